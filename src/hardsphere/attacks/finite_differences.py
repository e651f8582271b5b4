"""NES (Ilyas et al., 2018) and SPSA (Uesato et al., 2018): gradient ascent without gradients.

Both ask for the margin at pairs of points x + sigma u and x - sigma u, and take the mean of the differences times u for
the gradient; NES draws u from a normal distribution, SPSA from {-1, +1}. The estimate enters the same steepest step as
in PGD, so that the attack is free of the scale of the logits. The points may leave the pixel box a little, because
clipping them would bias the estimate. The differences are small: autocast and TF32 are switched off here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hardsphere.attacks.base import (
    AttackResult,
    Loss,
    attacking,
    check_batch,
    check_settings,
    check_sizes,
    result,
    succeeded,
)
from hardsphere.attacks.losses import margin, negated
from hardsphere.noise import Noise
from hardsphere.runtime import exact_float32
from hardsphere.threat import Ball

GROUP = 8
"""Pairs whose differences are summed together; a constant, so that the sum does not depend on batch or memory."""


def nes(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    noise: Noise,
    steps: int = 80,
    step_size: float | None = None,
    sigma: float = 1e-3,
    pairs: int = 128,
    queries: int | None = None,
    targeted: bool = False,
    chunk: int = 2048,
) -> AttackResult:
    """Ascent on the margin with gradients estimated from normal directions.

    One query goes to the clean image and 2 * pairs + 1 to each step, whose last one asks whether the sample is broken.

    Args:
        y: the true labels, or the wished ones if ``targeted``.
        step_size: length of a step in the ball's norm; eps / 8 by default, which is 1/255 at 8/255.
        sigma: how far from the current image the differences are taken.
        queries: the most queries per sample, if these are fewer than the steps would take.
        chunk: the most images in one call of the model; it changes memory, not outcomes.
    """
    folded = noise.fold("nes")
    return _ascend(model, x, y, ball, folded, Noise.normal, steps, step_size, sigma, pairs, queries, targeted, chunk)


def spsa(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    noise: Noise,
    steps: int = 80,
    step_size: float | None = None,
    sigma: float = 1e-3,
    pairs: int = 128,
    queries: int | None = None,
    targeted: bool = False,
    chunk: int = 2048,
) -> AttackResult:
    """Ascent on the margin with gradients estimated from random signs. The arguments are those of `nes`."""
    folded = noise.fold("spsa")
    return _ascend(model, x, y, ball, folded, Noise.signs, steps, step_size, sigma, pairs, queries, targeted, chunk)


@torch.no_grad()
def _ascend(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    noise: Noise,
    draw: Callable[..., Tensor],
    steps: int,
    step_size: float | None,
    sigma: float,
    pairs: int,
    queries: int | None,
    targeted: bool,
    chunk: int,
) -> AttackResult:
    check_settings(steps=steps, pairs=pairs, chunk=chunk, queries=1 if queries is None else queries)
    check_sizes(sigma=sigma)
    check_batch(x, y)
    step_size = ball.eps / 8 if step_size is None else step_size
    goal = negated(margin) if targeted else margin
    left = 1 + steps * (2 * pairs + 1) if queries is None else queries
    found, broken = x.clone(), torch.zeros(len(x), dtype=torch.bool, device=x.device)
    stuck = torch.ones_like(broken)
    alive = torch.arange(len(x), device=x.device)
    with attacking(model), full_precision(x):
        for step in range(steps + 1):
            if left < 1 or len(alive) == 0:
                break
            left -= 1
            won = succeeded(ask(model, found[alive], chunk), y[alive], targeted)
            broken[alive[won]] = True
            alive = alive[~won]
            affordable = min(pairs, (left - 1) // 2)  # the step is worth nothing without the query that ends it
            if step == steps or affordable < 1 or len(alive) == 0:
                break
            left -= 2 * affordable
            gradient = torch.zeros_like(x[alive])
            for first in range(0, affordable, GROUP):
                count = min(GROUP, affordable - first)
                directions = draw_pairs(noise[alive].fold(step), draw, first, count, x.shape[1:])
                slopes = slopes_along(model, found[alive], y[alive], directions, sigma, goal, chunk)
                gradient += (slopes.view(*slopes.shape, *[1] * (x.dim() - 1)) * directions).sum(1)
            stuck[alive] &= (gradient == 0).flatten(1).all(dim=1)
            found[alive] = ball.project(x[alive], ball.step(found[alive], gradient, step_size))
    return result(x, found, broken, ball, stuck)


def draw_pairs(noise: Noise, draw: Callable[..., Tensor], first: int, count: int, shape: torch.Size) -> Tensor:
    """Directions number ``first`` to ``first + count`` of each sample, of shape (B, count, *shape)."""
    rows = torch.arange(len(noise), device=noise.keys.device).repeat_interleave(count)
    numbers = torch.arange(first, first + count, device=noise.keys.device).repeat(len(noise))
    return draw(noise[rows].fold(numbers), *shape).reshape(len(noise), count, *shape)


def slopes_along(
    model: nn.Module, x: Tensor, y: Tensor, directions: Tensor, sigma: float, goal: Loss, chunk: int
) -> Tensor:
    """(goal(x + sigma u) - goal(x - sigma u)) / (2 sigma) for each of a sample's directions u, of shape (B, count).

    Costs two queries per direction. A difference that is not finite counts as zero.
    """
    count = directions.shape[1]
    moved = sigma * directions.to(x.dtype)
    points = torch.cat([x[:, None] + moved, x[:, None] - moved], dim=1).flatten(0, 1)
    values = goal(ask(model, points, chunk), y.repeat_interleave(2 * count)).view(len(x), 2 * count)
    return torch.nan_to_num((values[:, :count] - values[:, count:]) / (2 * sigma), posinf=0.0, neginf=0.0)


def ask(model: nn.Module, x: Tensor, chunk: int) -> Tensor:
    """The logits of any number of images, at most ``chunk`` of them at a time."""
    return torch.cat([model(x[first : first + chunk]).float() for first in range(0, len(x), chunk)])


@contextmanager
def full_precision(x: Tensor) -> Iterator[None]:
    """Differences of logits drown in the rounding of bf16, and in that of TF32."""
    with exact_float32(), torch.autocast(x.device.type, enabled=False):
        yield
