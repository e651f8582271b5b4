"""Random noise, the control: an attack that does not beat it has found nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hardsphere.attacks.base import (
    AttackResult,
    attacking,
    check_batch,
    check_settings,
    logits_at,
    result,
    succeeded,
    survivors,
)
from hardsphere.attacks.losses import margin
from hardsphere.noise import Noise
from hardsphere.threat import Ball, per_sample


def random_noise(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    noise: Noise,
    draws: int = 100,
    targeted: bool = False,
) -> AttackResult:
    """The best of several random images of the ball: by turns a uniform one and an extreme point (such as +-eps).

    A sample that no draw breaks gets the draw with the largest margin.
    """
    check_settings(draws=draws)
    check_batch(x, y)
    x = x.detach()
    found, broken = x.clone(), torch.zeros(len(x), dtype=torch.bool, device=x.device)
    best = torch.full((len(x),), -torch.inf, device=x.device)
    sign = -1 if targeted else 1
    with attacking(model):
        for draw in range(draws):
            alive = survivors(broken)
            if len(alive) == 0:
                break
            drawn = ball.random_extreme if draw % 2 else ball.random_start
            x_adv = drawn(x[alive], noise[alive].fold("random", draw))
            logits = logits_at(model, x_adv)
            won, lead = succeeded(logits, y[alive], targeted), sign * margin(logits, y[alive])
            better = won | (lead > best[alive])
            found[alive] = torch.where(per_sample(better, x_adv), x_adv, found[alive])
            best[alive], broken[alive] = torch.maximum(best[alive], lead), won
    return result(x, found, broken, ball)
