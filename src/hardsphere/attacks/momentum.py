"""The momentum iterative method, MIM or MI-FGSM (Dong et al., 2018): steps along a sum of past gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hardsphere.attacks.base import AttackResult, Loss
from hardsphere.attacks.losses import cross_entropy, towards
from hardsphere.attacks.pgd import climb, default_step
from hardsphere.noise import Noise
from hardsphere.threat import Ball, per_sample


def mim(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    noise: Noise,
    steps: int = 20,
    step_size: float | None = None,
    decay: float = 1.0,
    loss: Loss = cross_entropy,
    targeted: bool = False,
    keep: str = "any",
) -> AttackResult:
    """From the clean image, g <- decay * g + gradient / ||gradient||_1 and a steepest step along g.

    It draws nothing from ``noise``.

    Args:
        step_size: length of a step in the ball's norm; 2.5 * eps / steps by default.
        decay: mu, what a step keeps of the past.
        keep: as in `pgd`.
    """
    length = default_step(ball, steps) if step_size is None else step_size
    ascent = towards(loss) if targeted else loss
    g = torch.zeros_like(x)

    def remember(gradient: Tensor, alive: Tensor, _: int) -> Tensor:
        size = gradient.abs().flatten(1).sum(1)
        g[alive] = decay * g[alive] + gradient / per_sample(torch.where(size > 0, size, 1), gradient)
        return g[alive]

    return climb(
        model,
        x,
        y,
        ball,
        start=lambda alive, _: x[alive],
        objective=lambda logits, alive, _: ascent(logits, y[alive]),
        steps=steps,
        step_size=lambda _: length,
        momentum=remember,
        targeted=targeted,
        keep=keep,
    )
