"""DeepFool (Moosavi-Dezfooli et al., 2016): walk to the nearest decision boundary of the linearised model.

Only the ratio |Z_k - Z_y| / ||grad(Z_k - Z_y)||_q counts, so the attack is free of the scale of the logits. As in the
paper the overshoot is applied to the whole perturbation, not to each step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hardsphere.attacks.base import (
    ROUNDING,
    AttackResult,
    attacking,
    check_batch,
    check_settings,
    has_direction,
    leaf,
    logits_at,
    result,
    succeeded,
)
from hardsphere.noise import Noise
from hardsphere.threat import Ball, per_sample

Rivals = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From logits to the class that is to lose, one per sample, and the classes that may win, some per sample."""


def deepfool(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    noise: Noise,
    steps: int = 100,
    overshoot: float = 0.02,
    candidates: int = 10,
    targeted: bool = False,
) -> AttackResult:
    """The nearest boundary of the linearised model, again and again until it has been crossed.

    A minimum-norm attack: it stops at the first image that the model gets wrong, wherever that lies, and has broken the
    sample only if that is inside the ball. It draws nothing from ``noise``.

    Args:
        y: the true labels, or the wished ones if ``targeted``; then the boundary is that with the leading class.
        overshoot: how much farther than the boundary the whole perturbation reaches.
        candidates: as many of the classes that lead at the clean image are looked at, the true one among them.
    """
    ball.require("DeepFool", "linf", "l2")
    check_settings(steps=steps, candidates=candidates)
    check_batch(x, y)
    x = x.detach()
    found, crossed = x.clone(), torch.zeros(len(x), dtype=torch.bool, device=x.device)
    stuck = torch.ones_like(crossed)
    alive = torch.arange(len(x), device=x.device)
    total = torch.zeros_like(x)  # the perturbation without its overshoot
    with attacking(model):
        others = leaders(logits_at(model, x), y, candidates - 1)
        for _ in range(steps):
            rivals = winning(y[alive]) if targeted else losing_to(y[alive], others[alive])
            logits, gap, normal = nearest_boundary(model, found[alive], ball, rivals)
            won = succeeded(logits, y[alive], targeted)
            crossed[alive[won]] = True
            go = ~won & has_direction(normal)
            alive, gap, normal = alive[go], gap[go], normal[go]
            if len(alive) == 0:
                break
            stuck[alive] = False
            total[alive] = ball.step(total[alive], normal, gap.abs() / ball.dual(normal))
            found[alive] = (x[alive] + (1 + overshoot) * total[alive]).clamp(0, 1)
        if len(alive):
            crossed[alive] = succeeded(logits_at(model, found[alive]), y[alive], targeted)
    return result(x, found, crossed & ball.contains(x, found, ROUNDING), ball, stuck)


def nearest_boundary(model: nn.Module, x: Tensor, ball: Ball, rivals: Rivals) -> tuple[Tensor, Tensor, Tensor]:
    """The logits, and of the nearest linearised boundary with a rival the gap Z_rival - Z_own and its gradient.

    One backward pass per rival, of which only the nearest is kept. A rival whose gradient is zero or not finite gives
    no boundary; where none gives one, both the gap and the gradient are zero. An image exactly on the boundary counts
    as a millionth of a pixel short of it, so that a step does not end there.
    """
    x = leaf(x)
    with torch.enable_grad():
        logits = model(x).float()
        own, others = rivals(logits.detach())
        gaps = logits.gather(1, others) - logits.gather(1, own[:, None])
        nearest = torch.full((len(x),), torch.inf, device=x.device)
        gap, normal = torch.zeros_like(nearest), torch.zeros_like(x)
        for k in range(gaps.shape[1] if gaps.requires_grad else 0):  # a model may not depend on the image at all
            (gradient,) = torch.autograd.grad(
                gaps[:, k].sum(), x, retain_graph=k + 1 < gaps.shape[1], allow_unused=True, materialize_grads=True
            )
            slope, this = ball.dual(gradient), gaps[:, k].detach()
            this = torch.where(this == 0, -1e-6 * slope, this)
            distance = torch.where((slope > 0) & slope.isfinite(), this.abs() / slope, torch.inf)
            closer = distance < nearest
            nearest, gap = torch.where(closer, distance, nearest), torch.where(closer, this, gap)
            normal = torch.where(per_sample(closer, x), gradient, normal)
    return logits.detach(), gap, normal.detach()


def leaders(logits: Tensor, y: Tensor, count: int) -> Tensor:
    """The ``count`` largest logits' classes other than y (or all others, if there are fewer), the largest first."""
    count = max(1, min(count, logits.shape[1] - 1))
    return logits.scatter(1, y[:, None], -torch.inf).topk(count, dim=1).indices


def losing_to(y: Tensor, others: Tensor) -> Rivals:
    """The true class is to lose against any of ``others``."""
    return lambda logits: (y, others)


def losing_to_leaders(y: Tensor, count: int) -> Rivals:
    """The true class is to lose against any of the others that lead at the image in question."""
    return lambda logits: (y, leaders(logits, y, count))


def winning(y: Tensor) -> Rivals:
    """The wished class is to win against whichever other class leads."""
    return lambda logits: (leaders(logits, y, 1).squeeze(1), y[:, None])
