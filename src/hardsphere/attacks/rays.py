"""RayS (Chen & Gu, 2020): the closest boundary along a ray of signs, asking for labels only.

A ray is a vector of signs. Blocks of it are flipped, larger ones first, and a flip stays if it brings the boundary
closer, which one query settles and a bisection then measures. Each sample is at its own point of this search: one call
of the model answers the next question of every sample, so that none waits and the budget is exact for each.

Once the blocks are single pixels the paper's algorithm flips these in turn until the budget is spent, and on reaching a
ray that no single flip improves it asks the same questions for ever. Here the pixels are shuffled then, and the search
begins again with large blocks, from the ray that it has.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hardsphere.attacks.base import ROUNDING, AttackResult, attacking, check_batch, check_settings, result, succeeded
from hardsphere.noise import Noise
from hardsphere.threat import Ball, per_sample


@torch.no_grad()
def rays(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    noise: Noise,
    queries: int = 10_000,
    tolerance: float = 1e-3,
    targeted: bool = False,
    minimise: bool = False,
) -> AttackResult:
    """Search over rays, hierarchically.

    A minimum-norm attack: it returns the closest image found that the model gets wrong, and has broken the sample only
    if such an image was found and lies inside the ball.

    Args:
        y: the true labels, or the wished ones if ``targeted``.
        queries: the most queries per sample.
        tolerance: the l2 length to which the boundary along a ray is measured.
        minimise: go on inside the ball, to the nearest image that the queries allow.
    """
    ball.require("RayS", "linf")
    check_settings(queries=queries)
    check_batch(x, y)
    noise, pixels = noise.fold("rays"), x.shape[1:].numel()
    enough, tolerance = 0.0 if minimise else ball.eps, tolerance / math.sqrt(pixels)  # both in linf
    # What each sample knows: its best ray, how far the boundary is along it, and the block that it is flipping.
    best = torch.ones_like(x).flatten(1)
    radius = torch.full((len(x),), torch.inf, dtype=x.dtype, device=x.device)
    level = torch.zeros(len(x), dtype=torch.long, device=x.device)
    block, rounds = torch.zeros_like(level), torch.zeros_like(level)
    order = torch.arange(pixels, device=x.device).repeat(len(x), 1)
    # What it is asking: whether the flipped ray is better, and if so, where between low and high its boundary lies.
    ray = _flipped(best, order, level, block)
    bisecting = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    low, high = torch.zeros_like(radius), torch.zeros_like(radius)
    alive = torch.arange(len(x), device=x.device)
    with attacking(model):
        for _ in range(queries):
            if len(alive) == 0:
                break
            measuring = bisecting[alive]
            length = torch.where(measuring, (low[alive] + high[alive]) / 2, radius[alive].clamp_max(1))
            wrong = succeeded(model(_along(x[alive], ray[alive], length)), y[alive], targeted)
            low[alive] = torch.where(measuring, torch.where(wrong, low[alive], length), 0)
            high[alive] = torch.where(measuring & ~wrong, high[alive], length)
            bisecting[alive] = measuring | wrong
            closer = alive[wrong & (length < radius[alive])]
            best[closer], radius[closer] = ray[closer], high[closer]
            alive = alive[radius[alive] > enough]
            settled = alive[~bisecting[alive] | (high[alive] - low[alive] <= tolerance)]
            level[settled], block[settled] = _next_block(level[settled], block[settled], pixels)
            again = settled[(level[settled] == 0) & (block[settled] == 0)]
            if len(again):
                rounds[again] += 1
                order[again] = noise[again].fold(rounds[again]).bits(pixels).argsort(dim=1, stable=True)
            ray[settled] = _flipped(best[settled], order[settled], level[settled], block[settled])
            bisecting[settled] = False
    found = _along(x, best, radius.clamp_max(1))
    return result(x, found, radius <= ball.eps + ROUNDING, ball)


def _along(x: Tensor, ray: Tensor, length: Tensor) -> Tensor:
    """The image that lies ``length`` along a ray, inside the box."""
    return (x + per_sample(length, x) * ray.reshape(x.shape)).clamp(0, 1)


def _block_size(level: Tensor, pixels: int) -> Tensor:
    """At each level the blocks are half as long as at the one before; the last may be shorter."""
    return -(-pixels // 2**level)


def _flipped(ray: Tensor, order: Tensor, level: Tensor, block: Tensor) -> Tensor:
    """The rays with the signs of one block turned."""
    return torch.where(order // _block_size(level, ray.shape[1])[:, None] == block[:, None], -ray, ray)


def _next_block(level: Tensor, block: Tensor, pixels: int) -> tuple[Tensor, Tensor]:
    """The next block of the level, or the first of the next level, or after the single pixels the whole ray again."""
    size = _block_size(level, pixels)
    over = (block + 1) * size >= pixels
    return torch.where(over, torch.where(size == 1, 0, level + 1), level), torch.where(over, 0, block + 1)
