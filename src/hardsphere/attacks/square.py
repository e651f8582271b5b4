"""Square (Andriushchenko et al., 2020): random search with square-shaped changes, asking for logits only.

Each query changes a square window at random, and the change stays if the margin grew. The windows shrink by the
schedule of the paper. Unlike in AutoAttack's code, a window may also cover the last row and column, which breaks more
of small images; under l2 it may shrink to one pixel; and position and signs are drawn for each sample, not once for the
batch, which changes nothing but that samples do not depend on each other.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hardsphere.attacks.base import AttackResult, attacking, check_batch, check_settings, check_sizes, result, succeeded
from hardsphere.attacks.losses import margin, negated
from hardsphere.noise import Noise
from hardsphere.threat import Ball, per_sample

HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
"""The changed part of the image is halved after these queries, out of 10,000."""


@torch.no_grad()
def square(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    noise: Noise,
    queries: int = 5000,
    part: float = 0.8,
    rescale: bool = False,
    targeted: bool = False,
) -> AttackResult:
    """Random search on the margin.

    Args:
        y: the true labels, or the wished ones if ``targeted``.
        queries: the most queries per sample; the clean image is not asked for.
        part: p, the part of the image that the first windows cover.
        rescale: stretch the schedule, which is made for 10,000 queries, to the number of queries. AutoAttack does not.
    """
    ball.require("Square", "linf", "l2")
    check_settings(queries=queries)
    check_sizes(1.0, part=part)
    check_batch(x, y)
    begin, change = (stripes, random_squares) if ball.norm == "linf" else (_tiles, _bumps)
    goal, noise = negated(margin) if targeted else margin, noise.fold("square")
    found, broken = x.clone(), torch.zeros(len(x), dtype=torch.bool, device=x.device)
    best = torch.full((len(x),), -torch.inf, device=x.device)
    alive = torch.arange(len(x), device=x.device)
    with attacking(model):
        for query in range(queries):
            if len(alive) == 0:
                break
            stream = noise[alive].fold(query)
            if query == 0:
                candidate = begin(x[alive], stream, ball)
            else:
                side = side_at(query, queries, part, rescale, x)
                candidate = change(x[alive], found[alive], side, stream, ball)
            logits = model(candidate).float()
            value, won = goal(logits, y[alive]), succeeded(logits, y[alive], targeted)
            better = won | (value > best[alive])
            found[alive[better]], best[alive[better]] = candidate[better], value[better]
            broken[alive[won]] = True
            alive = alive[~won]
    return result(x, found, broken, ball)


def stripes(x: Tensor, noise: Noise, ball: Ball) -> Tensor:
    """The start under linf: vertical stripes of random sign, one pixel wide."""
    _, channels, _, width = x.shape
    return ball.project(x, x + ball.eps * noise.signs(channels, 1, width))


def random_squares(x: Tensor, best: Tensor, side: int, noise: Noise, ball: Ball) -> Tensor:
    """A candidate under linf: in a square window each channel moves to one end of its range."""
    return with_squares(x, best, draw_squares(x, side, noise), ball)


class Squares(NamedTuple):
    """A window for each sample, and the sign of each of its channels."""

    top: Tensor
    left: Tensor
    side: int | Tensor
    signs: Tensor


def draw_squares(x: Tensor, side: int | Tensor, noise: Noise) -> Squares:
    """Windows for images like ``x``, as many as ``noise`` has streams; the side may differ from one to the other."""
    _, channels, height, width = x.shape
    top, left = _corner(height, width, side, noise.fold("window"))
    return Squares(top, left, side, noise.fold("signs").signs(channels))


def with_squares(x: Tensor, best: Tensor, squares: Squares, ball: Ball) -> Tensor:
    """The best images with a square changed in each."""
    inside, _, _ = _window(x, squares.top, squares.left, squares.side)
    return ball.project(x, torch.where(inside, x + ball.eps * squares.signs[:, :, None, None], best))


def _tiles(x: Tensor, noise: Noise, ball: Ball) -> Tensor:
    """The start under l2: the image is tiled, about five by five, with bumps of random sign and orientation."""
    _, channels, height, width = x.shape
    side = max(height // 5, 1)
    row, column = torch.arange(height, device=x.device)[:, None], torch.arange(width, device=x.device)
    tiles = -(-height // side), -(-width // side)
    signs = noise.fold("signs").signs(channels, *tiles)[:, :, row // side, column // side]
    upright = noise.fold("turn").signs(1, *tiles)[:, :, row // side, column // side] > 0
    bump = _bump(side, x.device)[row % side, column % side]
    turned = _bump(side, x.device)[column % side, row % side]
    return ball.project(x, ball.step(x, (signs * torch.where(upright, bump, turned)).to(x.dtype), ball.eps))


def _bumps(x: Tensor, best: Tensor, side: int, noise: Noise, ball: Ball) -> Tensor:
    """A candidate under l2 (algorithm 3): one window gives up its perturbation, and another receives its norm.

    In each channel the receiving window keeps its direction, to which a bump of random sign is added, and takes over
    the norm of both windows and a share of what the perturbation has not used.
    """
    delta, channels = best - x, x.shape[1]
    side += (side + 1) % 2 if side < min(x.shape[2:]) else 0  # odd, where the image allows, as a bump has a middle
    inside, row, column = _random_window(x, side, noise.fold("window"))
    row, column = row.clamp(0, side - 1), column.clamp(0, side - 1)  # outside the window anything will do
    emptied, _, _ = _random_window(x, side, noise.fold("emptied"))
    bump, upright = _bump(side, x.device), per_sample(noise.fold("turn").signs() > 0, x)
    bump = torch.where(upright, bump[row, column], bump[column, row]) * noise.fold("signs").signs(channels, 1, 1)
    fresh = torch.where(inside, bump.to(x.dtype) + _unit(torch.where(inside, delta, 0)), 0)
    unused = per_sample((ball.eps**2 - ball.size(delta) ** 2).clamp_min(0), x) / channels
    norm = (torch.where(inside | emptied, delta, 0).pow(2).sum((2, 3), keepdim=True) + unused).sqrt()
    delta = torch.where(inside, norm * _unit(fresh), torch.where(emptied, 0, delta))
    return ball.project(x, ball.step(x, delta, ball.eps))


def side_at(query: int, queries: int, part: float, rescale: bool, x: Tensor) -> int:
    """The side of the window that a query changes: a square that covers ``part`` of the image, halved by schedule."""
    reached = query * 10_000 / queries if rescale else query
    covered = part / 2.0 ** sum(reached > count for count in HALVINGS)
    height, width = x.shape[2:]
    return min(max(round(math.sqrt(covered * height * width)), 1), height, width)


def _random_window(x: Tensor, side: int, noise: Noise) -> tuple[Tensor, Tensor, Tensor]:
    """A square at random in each image: see `_window`."""
    top, left = _corner(x.shape[2], x.shape[3], side, noise)
    return _window(x, top, left, side)


def _corner(height: int, width: int, side: int | Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """The corner of a square anywhere in an image, the last row and column included."""
    place = noise.uniform(2)
    return (place[:, 0] * (height - side + 1)).long(), (place[:, 1] * (width - side + 1)).long()


def _window(x: Tensor, top: Tensor, left: Tensor, side: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mask of a square in each image, and each pixel's row and column counted from its corner."""
    height, width = x.shape[2:]
    row = torch.arange(height, device=x.device)[:, None] - per_sample(top, x)
    column = torch.arange(width, device=x.device) - per_sample(left, x)
    if isinstance(side, Tensor):
        side = per_sample(side, x)
    return (row >= 0) & (row < side) & (column >= 0) & (column < side), row, column


@lru_cache(maxsize=64)
def _bump(side: int, device: torch.device) -> Tensor:
    """eta of the paper: two pyramids of opposite sign, one in each half of a square."""
    half = side // 2
    return torch.cat([_pyramid(half, side, device), -_pyramid(side - half, side, device)])


def _pyramid(height: int, width: int, device: torch.device) -> Tensor:
    """A pyramid whose ring at distance k from the middle has the height of the sum of 1 / (j + 1)**2 over j >= k."""
    far = max(height, width) // 2
    heights = (torch.arange(1, far + 2, device=device) ** -2.0).flip(0).cumsum(0).flip(0)
    row, column = torch.arange(height, device=device)[:, None], torch.arange(width, device=device)
    rings = heights[torch.maximum((row - height // 2).abs(), (column - width // 2).abs())]
    return rings / rings.pow(2).sum().sqrt()


def _unit(delta: Tensor) -> Tensor:
    """Each channel divided by its l2 norm; zero stays zero."""
    norm = delta.pow(2).sum((2, 3), keepdim=True).sqrt()
    return delta / torch.where(norm > 0, norm, 1)
