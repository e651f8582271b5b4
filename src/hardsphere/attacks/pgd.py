"""Projected gradient descent (Madry et al., 2018): eq. 8 of the paper, repeated inside the ball."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hardsphere.attacks.base import AttackResult, Loss, attacking, logits_and_gradient, result, succeeded
from hardsphere.attacks.losses import cross_entropy, negated
from hardsphere.noise import Noise
from hardsphere.threat import Ball


def ascend(
    objective: Callable[[Tensor], Tensor], x: Tensor, start: Tensor, ball: Ball, steps: int, step_size: float
) -> Tensor:
    """The inner maximisation of adversarial training: ``steps`` steps up a per-sample objective, last iterate."""
    x_adv = start
    for _ in range(steps):
        x_adv = x_adv.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(objective(x_adv).sum(), x_adv)
        x_adv = ball.project(x, ball.step(x_adv.detach(), gradient, step_size))
    return x_adv.detach()


def pgd(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    noise: Noise,
    steps: int = 20,
    step_size: float | None = None,
    restarts: int = 1,
    loss: Loss = cross_entropy,
    random_start: bool = True,
    targeted: bool = False,
    keep: str = "any",
) -> AttackResult:
    """Gradient ascent on a loss inside the ball.

    Args:
        y: the true labels, or the wished ones if ``targeted``.
        step_size: length of a step in the ball's norm; 2.5 * eps / steps by default.
        keep: ``"any"`` keeps the first broken iterate of any restart and stops there (the honest protocol);
            ``"last"`` runs every step and returns the last iterate (the paper's protocol).
    """
    step_size = 2.5 * ball.eps / steps if step_size is None else step_size
    ascent = negated(loss) if targeted else loss
    found, broken = x.clone(), torch.zeros(len(x), dtype=torch.bool, device=x.device)
    stuck = torch.ones_like(broken)
    with attacking(model):
        for restart in range(restarts):
            alive = (~broken).nonzero().squeeze(1)
            if len(alive) == 0:
                break
            clean, label = x[alive], y[alive]
            start = ball.random_start(clean, noise[alive].fold("pgd", restart)) if random_start else clean
            x_adv = start.clone()
            for _ in range(steps):
                logits, _, gradient = logits_and_gradient(model, x_adv, lambda logits, y=label: ascent(logits, y))
                if keep == "any":
                    won = succeeded(logits, label, targeted)
                    found[alive[won]], broken[alive[won]] = x_adv[won], True
                    alive, clean, label = alive[~won], clean[~won], label[~won]
                    x_adv, gradient = x_adv[~won], gradient[~won]
                    if len(alive) == 0:
                        break
                stuck[alive] &= ~_has_direction(gradient)
                x_adv = ball.project(clean, ball.step(x_adv, torch.nan_to_num(gradient), step_size))
            if len(alive):
                with torch.no_grad():
                    won = succeeded(model(x_adv), label, targeted)
                found[alive], broken[alive] = x_adv, broken[alive] | won
    return result(x, found, broken, ball, stuck)


def _has_direction(gradient: Tensor) -> Tensor:
    """Whether a sample's gradient is finite and not all zero."""
    flat = gradient.flatten(1)
    return flat.isfinite().all(dim=1) & (flat != 0).any(dim=1)
