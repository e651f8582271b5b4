"""Blur: Gaussian, defocus, frosted glass, motion, zoom."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from hardsphere.corruptions.constants import Setting
from hardsphere.corruptions.linear import (
    Banded,
    banded,
    filter_matrix,
    gaussian_matrix,
    gaussian_weights,
    mirror,
    nearest,
    separable,
    sum_of_separable,
    zoom_factors,
    zoom_matrix,
)
from hardsphere.corruptions.pixels import as_unit, from_sums, truncated
from hardsphere.noise import Noise

# What the tail of a motion blur may weigh before it is left out: a hundredth of a grey level at most.
_TAIL = 1e-5

# Up to this many pixels a zoom blur is made of matrices for several lines at a time.
_SMALL = 32 * 32


def smoothed(values: Tensor, sigma: float) -> Tensor:
    """A Gaussian filter of each plane, cut off at 4 sigma, with the edge pixels repeated outwards."""
    if len(gaussian_weights(sigma, 4.0)) == 1:
        return values
    rows, cols = (gaussian_matrix(size, sigma, 4.0, nearest) for size in values.shape[-2:])
    return separable(values, rows, cols)


def gaussian_blur(images: Tensor, setting: Setting, noise: Noise) -> Tensor:
    """A Gaussian filter."""
    (sigma,) = setting
    return from_sums(smoothed(as_unit(images), sigma))


def defocus_blur(images: Tensor, setting: Setting, noise: Noise) -> Tensor:
    """A disk with a slightly smoothed rim, as the filter of a lens out of focus."""
    radius, rim = setting
    height, width = images.shape[-2:]
    return from_sums(sum_of_separable(as_unit(images), *_disk_terms(radius, rim, height, width)))


@cache
def _disk_terms(radius: float, rim: float, height: int, width: int) -> tuple[list[Tensor], list[Tensor]]:
    """The disk as a sum of few products of a vertical and a horizontal filter, by its singular values."""
    left, values, right = torch.linalg.svd(disk(radius, rim))
    used = [term for term in range(len(values)) if values[term] > 1e-14]
    rows = [filter_matrix(left[:, term] * values[term], height, mirror) for term in used]
    cols = [filter_matrix(right[term], width, mirror) for term in used]
    return rows, cols


@cache
def disk(radius: float, rim: float) -> Tensor:
    """The kernel of the defocus blur: a disk of area 1 on a grid, smoothed by a small Gaussian of deviation ``rim``.

    The grid reaches to 8 pixels, or to the radius if that is larger; the disk may touch its border, at which the
    smoothing mirrors, so the weights need not add up to exactly 1.
    """
    reach = 8 if radius <= 8 else int(radius)
    grid = torch.arange(-reach, reach + 1, dtype=torch.float64)
    inside = (grid[:, None] ** 2 + grid**2 <= radius**2).double()
    tap = 1 if radius <= 8 else 2
    weights = torch.exp(-0.5 * (torch.arange(-tap, tap + 1, dtype=torch.float64) / rim) ** 2)
    rows = filter_matrix(weights / weights.sum(), len(grid), mirror)
    kernel = separable(inside / inside.sum(), rows, rows)
    return torch.where(kernel > 1e-15, kernel, 0)


def glass_blur(images: Tensor, setting: Setting, noise: Noise) -> Tensor:
    """Smooth, let each pixel take the place of a near one, in turn, and smooth again."""
    sigma, reach, rounds = setting[0], int(setting[1]), int(setting[2])
    batch, channels, height, width = images.shape
    out = from_sums(smoothed(as_unit(images), sigma)).flatten(2)
    for number in range(rounds):
        moves = noise.fold("move", number).integers(-reach, reach, 2, height, width)
        source = copy_sources(moves, reach)
        out = out.gather(2, source[:, None].expand(-1, channels, -1))
    return from_sums(smoothed(as_unit(out.view(batch, channels, height, width)), sigma))


def copy_sources(moves: Tensor, reach: int) -> Tensor:
    """Where each pixel of frosted glass comes from after one round, as a flat position (B, H * W).

    The original goes through the pixels from the last to the first and means to swap each with its neighbour at the
    (row, column) offset ``moves`` (B, 2, H, W). Its swap works on views of one array and so only copies the neighbour
    here. A pixel is therefore written once in a round, and it receives either the neighbour's value from before the
    round or, if the neighbour's turn has come already (it lies further on in reading order), the neighbour's new
    value, which in turn came from somewhere. Following all these chains at once, by doubling, replaces the walk.
    """
    batch, _, height, width = moves.shape
    count = height * width
    row, column = torch.arange(height, device=moves.device)[:, None], torch.arange(width, device=moves.device)
    here = row * width + column
    neighbour = here + moves[:, 0] * width + moves[:, 1]
    visited = (row > reach) & (row <= height - reach) & (column > reach) & (column <= width - reach)
    neighbour = torch.where(visited, neighbour, here).view(batch, count)
    later = neighbour > here.view(1, -1)
    if not later.any():
        return neighbour
    is_new = later & visited.view(-1)[neighbour]
    # A position p stands for the pixel's new value, count + p for its old one; an old value points to itself.
    old = torch.arange(count, 2 * count, device=moves.device)
    pointer = torch.cat([torch.where(is_new, neighbour, neighbour + count), old.expand(batch, -1)], dim=1)
    for _ in range(math.ceil(math.log2(count))):
        pointer = pointer.gather(1, pointer)
        if (pointer >= count).all():
            break
    return pointer[:, :count] - count


def motion_blur(images: Tensor, setting: Setting, noise: Noise) -> Tensor:
    """A one-sided Gaussian trail in a direction between -45 and 45 degrees."""
    radius, sigma = setting
    angle = -45 + 90 * noise.fold("angle").uniform()
    return trail(images, radius, sigma, angle)


def trail(images: Tensor, radius: float, sigma: float, degrees: Tensor) -> Tensor:
    """Motion blur of 8-bit images (B, C, H, W), each in its own direction, rounded to 8 bits.

    Weight i of the trail falls on the pixel nearest to i steps in the direction; edge pixels go on outwards.
    """
    batch, channels, height, width = images.shape
    weights = trail_weights(radius, sigma)
    step = torch.arange(len(weights), device=images.device)[:, None, None]
    angle = torch.deg2rad(degrees.double())[:, None]
    down, right = (torch.ceil(step * part(angle) - 0.5).long() for part in (torch.sin, torch.cos))
    rows = nearest(torch.arange(height, device=images.device) + down, height)[..., :, None] * width
    cols = nearest(torch.arange(width, device=images.device) + right, width)[..., None, :]
    flat = images.flatten(2).float()
    total = torch.zeros_like(flat)
    for row, col, weight in zip(rows, cols, weights, strict=True):
        index = (row + col).view(batch, 1, -1).expand(-1, channels, -1)
        total += flat.gather(2, index).mul_(weight)
    return truncated(total.add_(0.5)).view_as(images)


@cache
def trail_weights(radius: float, sigma: float) -> tuple[float, ...]:
    """The trail's weights, exp(-i^2 / 2 sigma^2) for i = 0..2 ceil(radius), without a tail too light to be seen."""
    weights = [math.exp(-(step**2) / (2 * sigma**2)) for step in range(2 * math.ceil(radius) + 1)]
    while weights[-1] < _TAIL * sum(weights):
        weights.pop()
    return tuple(weight / sum(weights) for weight in weights)


def zoom_blur(images: Tensor, setting: Setting, noise: Noise) -> Tensor:
    """The mean of the image and of its enlargements by a row of factors (the first of which is 1)."""
    end, step = setting
    height, width = images.shape[-2:]
    factors = zoom_factors(end, step)
    if height * width <= _SMALL:
        total = _small_zoom(factors, height, width)(as_unit(images))
    else:
        total = sum_of_separable(as_unit(images), *_zoom_terms(factors, height, width))
    return from_sums(total / (1 + len(factors)))


def _zoom_terms(factors: tuple[float, ...], height: int, width: int) -> tuple[list[Tensor], list[Tensor]]:
    factors = (1.0, *factors)  # the image itself, once more
    return [zoom_matrix(height, factor) for factor in factors], [zoom_matrix(width, factor) for factor in factors]


@cache
def _small_zoom(factors: tuple[float, ...], height: int, width: int) -> Banded:
    return banded(*_zoom_terms(factors, height, width))
