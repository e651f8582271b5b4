"""Linear steps on images: separable filters and resampling as matrices, and sampling between pixels.

Blurring and zooming act on rows and columns alike and are the same for each image of a batch, so they are products
with small matrices: ``rows @ image @ cols.T``, or a sum of such products. Everything is float64: results then agree
between batch sizes and devices to far below what truncation to 8 bits can see, and no reduced-precision mode of a GPU
touches them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

Border = Callable[[Tensor, int], Tensor]
"""Where a position outside of ``range(size)`` takes its value from."""


def nearest(index: Tensor, size: int) -> Tensor:
    """The edge pixel goes on for ever: a a a | a b c d | d d d."""
    return index.clamp(0, size - 1)


def reflect(index: Tensor, size: int) -> Tensor:
    """Mirrored about the outer side of the edge pixel: c b a | a b c d | d c b."""
    index = torch.maximum(index, -1 - index)
    return _folded(index, 2 * size, 2 * size - 1)


def mirror(index: Tensor, size: int) -> Tensor:
    """Mirrored about the centre of the edge pixel: d c b | a b c d | c b a."""
    return _folded(index.abs(), max(2 * size - 2, 1), 2 * size - 2)


def _folded(index: Tensor, period: int, last: int) -> Tensor:
    """The way back from ``last``, for positions that are not negative; they rarely need the slow remainder."""
    if index.numel() and int(index.max()) > last:
        index = index.remainder(period)
    return torch.minimum(index, last - index)


def gaussian_weights(sigma: float, truncate: float) -> Tensor:
    """A normalised Gaussian at -r..r with r = truncate * sigma, rounded; a single 1 for sigma = 0."""
    radius = int(truncate * sigma + 0.5)
    if radius == 0:
        return torch.ones(1, dtype=torch.float64)
    weights = torch.exp(-0.5 * (torch.arange(-radius, radius + 1, dtype=torch.float64) / sigma) ** 2)
    return weights / weights.sum()


def filter_matrix(weights: Tensor, size: int, border: Border) -> Tensor:
    """The matrix of a correlation with an odd number of weights over ``size`` pixels."""
    radius = len(weights) // 2
    position = torch.arange(size)[:, None]
    source = border(position + torch.arange(-radius, radius + 1), size)
    return torch.zeros(size, size, dtype=torch.float64).scatter_add_(1, source, weights.expand_as(source))


@cache
def gaussian_matrix(size: int, sigma: float, truncate: float, border: Border) -> Tensor:
    """The matrix of a Gaussian filter."""
    return filter_matrix(gaussian_weights(sigma, truncate), size, border)


@cache
def zoom_matrix(size: int, factor: float) -> Tensor:
    """The matrix that crops the middle of a line and enlarges it by ``factor`` to the old length, linearly.

    As in the original: ceil(size / factor) pixels are stretched so that their end points meet those of
    round(factor * that) pixels, whose middle is kept.
    """
    crop = math.ceil(size / factor)
    stretched = round(crop * factor)
    kept = torch.arange(size) + (stretched - size) // 2
    position = kept.double() * ((crop - 1) / max(stretched - 1, 1))
    low = position.floor().clamp(0, max(crop - 2, 0))
    fraction = (position - low)[:, None]
    source = low.long()[:, None] + (size - crop) // 2
    matrix = torch.zeros(size, size, dtype=torch.float64)
    matrix.scatter_add_(1, source, 1 - fraction)
    return matrix.scatter_add_(1, (source + 1).clamp(max=size - 1), fraction)


def separable(images: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    """rows @ image @ cols.T for each plane of ``images``."""
    rows, cols = rows.to(images.device), cols.to(images.device)
    return rows @ (images @ cols.T)


def sum_of_separable(images: Tensor, rows: Sequence[Tensor], cols: Sequence[Tensor]) -> Tensor:
    """The sum over k of rows[k] @ image @ cols[k].T for each plane of ``images``, in two matrix products."""
    # Ordered so that the (column, k) axis of the first product is already the (row, k) axis that the second one needs.
    right = torch.stack(tuple(cols)).permute(2, 0, 1).flatten(1).to(images.device)
    left = torch.stack(tuple(rows)).permute(1, 2, 0).flatten(1).to(images.device)
    *batch, height, width = images.shape
    spread = (images @ right).view(*batch, height * len(cols), width)
    return left @ spread


@dataclass(frozen=True)
class Banded:
    """A linear map of flattened small planes whose output pixels depend on near input pixels only.

    Each part makes the outputs from ``start`` to ``end`` from the inputs from ``low`` on, by one matrix product.
    """

    parts: tuple[tuple[int, int, int, Tensor], ...]

    def __call__(self, images: Tensor) -> Tensor:
        flat = images.flatten(-2)
        out = torch.empty_like(flat)
        for start, end, low, block in self.parts:
            out[..., start:end] = flat[..., low : low + len(block)] @ block.to(images.device)
        return out.view_as(images)


def banded(rows: Sequence[Tensor], cols: Sequence[Tensor], lines: int = 4) -> Banded:
    """`sum_of_separable` for small images: several times faster than its many tiny products.

    Args:
        lines: how many lines of the output one part makes.
    """
    height, width = len(rows[0]), len(cols[0])
    parts = []
    for start in range(0, height, lines):
        end = min(start + lines, height)
        pairs = zip(rows, cols, strict=True)
        block = torch.stack([torch.einsum("ih,jw->hwij", row[start:end], col) for row, col in pairs]).sum(0)
        block = block.reshape(height * width, -1)
        used = block.any(dim=1).nonzero().flatten()
        low, high = int(used[0]), int(used[-1]) + 1
        parts.append((start * width, end * width, low, block[low:high].clone()))
    return Banded(tuple(parts))


def between_pixels(images: Tensor, y: Tensor, x: Tensor, border: Border) -> Tensor:
    """Bilinear samples of float (B, C, H, W) images at real positions y and x of shape (B, H', W').

    Interpolates as a + (b - a) * t, which is exactly a wherever a and b are equal.
    """
    batch, channels, height, width = images.shape
    flat = images.reshape(batch, channels, -1)
    top, left = y.floor(), x.floor()
    down, right = (y - top).to(images.dtype)[:, None], (x - left).to(images.dtype)[:, None]
    top, left = top.long(), left.long()
    lines = border(top, height) * width, border(top + 1, height) * width
    columns = border(left, width), border(left + 1, width)

    def corner(line: Tensor, column: Tensor) -> Tensor:
        index = (line + column).view(batch, 1, -1).expand(-1, channels, -1)
        return flat.gather(2, index).view(batch, channels, *y.shape[1:])

    def across(line: Tensor) -> Tensor:
        first, second = (corner(line, column) for column in columns)
        return first + (second - first) * right

    upper, lower = (across(line) for line in lines)
    return upper + (lower - upper) * down


@cache
def zoom_factors(end: float, step: float) -> tuple[float, ...]:
    """The factors as NumPy's arange makes them, which for two of the published pairs includes the end."""
    return tuple(np.arange(1, end, step).tolist())
