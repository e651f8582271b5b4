"""Transfer: images crafted on one model and judged on another, which needs nothing of the second but its answers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

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
from hardsphere.attacks.pgd import pgd
from hardsphere.errors import HardsphereError
from hardsphere.noise import Noise
from hardsphere.threat import Ball


def transfer(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    noise: Noise,
    source: nn.Module,
    attack: Callable[..., AttackResult] = pgd,
    restarts: int = 1,
    targeted: bool = False,
    **options: Any,
) -> AttackResult:
    """Craft on ``source``, judge on ``model``; every restart is tried on the samples that still stand.

    An attack that can keep its last iterate does: one that stops as soon as the source errs has barely crossed the
    source's boundary, and rarely the model's.

    Args:
        source: any classifier of the same classes.
        attack: the attack on the source, with further ``options`` of its own.
    """
    check_settings(restarts=restarts)
    check_batch(x, y)
    taken = inspect.signature(attack).parameters
    if "keep" in taken:
        options.setdefault("keep", "last")
    if targeted and "targeted" not in taken:
        raise HardsphereError("The attack on the source cannot be given a wished class: choose one with 'targeted'.")
    if targeted:
        options["targeted"] = True
    x = x.detach()
    found, broken = x.clone(), torch.zeros(len(x), dtype=torch.bool, device=x.device)
    with attacking(model):
        for restart in range(restarts):
            alive = survivors(broken)
            if len(alive) == 0:
                break
            streams = noise[alive].fold("transfer", restart)
            crafted = attack(source, x[alive], y[alive], ball, noise=streams, **options).x_adv
            x_adv = ball.project(x[alive], crafted)
            found[alive], broken[alive] = x_adv, succeeded(logits_at(model, x_adv), y[alive], targeted)
    return result(x, found, broken, ball)
