"""Spatter: water or mud thrown at the lens. Not one of the 15; by far the longest recipe.

The original shapes its water with an edge detector, a distance transform and a histogram equalisation of OpenCV. They
are written out here for batches, with OpenCV's integer arithmetic, so that spatter needs no further package.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hardsphere.corruptions.blur import smoothed
from hardsphere.corruptions.constants import Setting
from hardsphere.corruptions.linear import Border, filter_matrix, mirror, nearest, separable
from hardsphere.corruptions.pixels import as_unit, from_sums
from hardsphere.noise import Noise

_WATER = (175, 238, 238)
_MUD = (63, 42, 20)
_EDGE_LOW, _EDGE_HIGH = 50, 150
_FARTHEST = 20.0
# Lengths of a step to the side, across a corner and of a knight's move in OpenCV's 5 x 5 distance.
_SIDE, _CORNER, _KNIGHT = 1.0, 1.4, 2.1969
_EMBOSS = ((-2, -1, 0), (-1, 1, 1), (0, 1, 2))


def spatter(images: Tensor, setting: Setting, noise: Noise) -> Tensor:
    """Drops of water, lit at their rims, or patches of mud."""
    mean, deviation, smoothness, threshold, strength, mud = setting
    height, width = images.shape[-2:]
    liquid = smoothed(mean + deviation * noise.normal(height, width).double(), smoothness)
    liquid = torch.where(liquid < threshold, 0, liquid)
    x = as_unit(images)
    if mud:
        cover = smoothed((liquid > threshold).double(), strength)
        cover = torch.where(cover < 0.8, 0, cover)[:, None]
        return from_sums(x * (1 - cover) + cover * _colour(_MUD, x))
    return from_sums(x + (strength * water(from_sums(liquid)))[:, None] * _colour(_WATER, x))


def _colour(rgb: tuple[int, int, int], like: Tensor) -> Tensor:
    return torch.tensor(rgb, dtype=like.dtype, device=like.device).view(1, 3, 1, 1) / 255


def water(liquid: Tensor) -> Tensor:
    """How strongly water shows, in [0, 1], from its 8-bit thickness (B, H, W)."""
    distance = distance_to_edge(edges(liquid)).clamp(max=_FARTHEST)
    rim = equalised(_box(distance).long().clamp(0, 255))
    rim = _correlate(rim, _EMBOSS, mirror).clamp(0, 255)
    rim = (_box(rim.double()) + 0.5).floor()
    shown = liquid * rim
    largest = shown.amax(dim=(1, 2), keepdim=True)
    return shown / torch.where(largest > 0, largest, 1)  # the original divides by zero where there is no water at all


def _box(values: Tensor) -> Tensor:
    """The mean over 3 x 3 pixels, mirrored at the border."""
    third = torch.full((3,), 1 / 3, dtype=torch.float64)
    rows, cols = (filter_matrix(third, size, mirror) for size in values.shape[-2:])
    return separable(values, rows, cols) + 1e-9  # whole numbers must not fall below themselves


def _correlate(values: Tensor, kernel: tuple[tuple[int, ...], ...], border: Border) -> Tensor:
    """A 3 x 3 correlation in integers."""
    height, width = values.shape[-2:]
    rows = border(torch.arange(-1, height + 1, device=values.device), height)
    cols = border(torch.arange(-1, width + 1, device=values.device), width)
    padded = values[:, rows][:, :, cols]
    total = torch.zeros_like(values)
    for down, line in enumerate(kernel):
        for right, weight in enumerate(line):
            if weight:
                total += weight * padded[:, down : down + height, right : right + width]
    return total


def edges(values: Tensor) -> Tensor:
    """Canny's edges of 8-bit planes (B, H, W), with thresholds 50 and 150 on |dx| + |dy|, as a mask."""
    values = values.long()
    dx = _correlate(values, ((-1, 0, 1), (-2, 0, 2), (-1, 0, 1)), nearest)
    dy = _correlate(values, ((-1, -2, -1), (0, 0, 0), (1, 2, 1)), nearest)
    size = dx.abs() + dy.abs()
    candidate = (size > _EDGE_LOW) & _is_ridge(size, dx, dy)
    strong = candidate & (size > _EDGE_HIGH)
    # Weak candidates count where a chain of candidates leads to a strong one.
    while True:
        grown = (F.max_pool2d(strong[:, None].float(), 3, stride=1, padding=1)[:, 0] > 0) & candidate
        if torch.equal(grown, strong):
            return strong
        strong = grown


def _is_ridge(size: Tensor, dx: Tensor, dy: Tensor) -> Tensor:
    """Whether the gradient is largest along its own direction, rounded to 45 degrees in fixed point."""
    around = F.pad(size, (1, 1, 1, 1))
    height, width = size.shape[-2:]

    def at(down: int, right: int) -> Tensor:
        return around[:, 1 + down : 1 + down + height, 1 + right : 1 + right + width]

    across, up = dx.abs(), dy.abs() << 15
    tangent_22 = across * 13573  # tan(22.5 degrees) in units of 2**-15; tan(67.5 degrees) is that plus 2
    horizontal = up < tangent_22
    vertical = up > tangent_22 + (across << 16)
    same_sign = (dx ^ dy) >= 0
    diagonal = torch.where(same_sign, (size > at(-1, -1)) & (size > at(1, 1)), (size > at(-1, 1)) & (size > at(1, -1)))
    along_row = (size > at(0, -1)) & (size >= at(0, 1))
    along_column = (size > at(-1, 0)) & (size >= at(1, 0))
    return torch.where(horizontal, along_row, torch.where(vertical, along_column, diagonal))


def distance_to_edge(edge: Tensor) -> Tensor:
    """The length of the shortest path to an edge pixel, by steps to the side, across corners and knight's moves.

    Lengths above 20 are of no interest to the caller and may come out too large.
    """
    height, width = edge.shape[-2:]
    far = 10 * _FARTHEST
    distance = torch.where(edge, 0.0, far).double()
    moves = [(0, 1, _SIDE), (1, 0, _SIDE), (1, 1, _CORNER), (1, 2, _KNIGHT), (2, 1, _KNIGHT)]
    steps = {(down * a, right * b, cost) for down, right, cost in moves for a in (-1, 1) for b in (-1, 1)}
    for _ in range(int(_FARTHEST)):
        around = F.pad(distance, (2, 2, 2, 2), value=far)
        shorter = distance
        for down, right, cost in sorted(steps):
            there = around[:, 2 + down : 2 + down + height, 2 + right : 2 + right + width]
            shorter = torch.minimum(shorter, there + cost)
        if torch.equal(shorter, distance):
            break
        distance = shorter
    return distance


def equalised(values: Tensor) -> Tensor:
    """OpenCV's histogram equalisation of 8-bit planes (B, H, W) held as integers."""
    batch, count = len(values), values[0].numel()
    flat = values.flatten(1)
    histogram = torch.zeros(batch, 256, dtype=torch.int64, device=values.device)
    histogram.scatter_add_(1, flat, torch.ones_like(flat))
    lowest = flat.amin(dim=1, keepdim=True)
    in_lowest = histogram.gather(1, lowest)
    above = (histogram.cumsum(1) - in_lowest).clamp(min=0)
    scale = torch.tensor(255.0, device=values.device) / (count - in_lowest).clamp(min=1)
    table = (above * scale).round().long().clamp(0, 255)
    # A plane of one single value stays as it is.
    return torch.where(in_lowest == count, flat, table.gather(1, flat)).view_as(values)
