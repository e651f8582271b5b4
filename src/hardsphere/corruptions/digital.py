"""Digital: contrast, elastic transform, pixelation, JPEG compression, saturation."""

from __future__ import annotations

import io
import math
from functools import cache

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hardsphere.corruptions.constants import Setting
from hardsphere.corruptions.linear import between_pixels, gaussian_matrix, mirror, reflect, separable
from hardsphere.corruptions.pixels import as_unit, from_unit, truncated
from hardsphere.noise import Noise

# Pillow's resize of 8-bit images: weights in fixed point with 22 bits, each pass rounded to 8 bits.
_FIXED = 2.0**22


def contrast(images: Tensor, setting: Setting, noise: Noise) -> Tensor:
    """Each channel's deviation from its own mean is scaled."""
    (factor,) = setting
    height, width = images.shape[-2:]
    # The sum of integers is exact in any order.
    mean = images.sum(dim=(2, 3), keepdim=True, dtype=torch.int64).double() / (255 * height * width)
    return from_unit((as_unit(images) - mean) * factor + mean)


def saturate(images: Tensor, setting: Setting, noise: Noise) -> Tensor:
    """The saturation of hue, saturation and value is scaled and shifted.

    A channel lies below the value by a share of value * saturation that depends on the hue alone. Grey has no hue; the
    convention is red, so an offset tints grey pixels red, in the original too.
    """
    factor, offset = setting
    x = as_unit(images)
    value = x.amax(dim=1, keepdim=True)
    span = value - x.amin(dim=1, keepdim=True)
    red = torch.tensor([0.0, 1.0, 1.0], dtype=x.dtype, device=x.device).view(1, 3, 1, 1)
    share = torch.where(span > 0, (value - x) / torch.where(span > 0, span, 1), red)
    saturation = torch.where(value > 0, span / torch.where(value > 0, value, 1), 0)
    return from_unit(value * (1 - share * (saturation * factor + offset).clamp(0, 1)))


def elastic_transform(images: Tensor, setting: Setting, noise: Noise) -> Tensor:
    """A random affine map, then a smooth random displacement of each pixel."""
    amplitude, smoothness, jitter = setting
    height, width = images.shape[-2:]
    positions = affine_positions(height, width, jitter, noise.fold("affine"))
    x = between_pixels(images.float(), *positions, mirror)
    if amplitude > 0:
        down, right = displacement(height, width, amplitude, smoothness, noise.fold("elastic")).unbind(1)
        row = torch.arange(height, device=x.device)[:, None]
        column = torch.arange(width, device=x.device)
        x = between_pixels(x, row + down, column + right, reflect)
    return truncated(x.clamp_(0, 255))


def affine_positions(height: int, width: int, jitter: float, noise: Noise) -> tuple[Tensor, Tensor]:
    """The source (row, column) of each pixel under an affine map that moves three points by up to ``jitter`` pixels.

    Three corners of a square in the middle of the image, as (column, row), are moved independently; the map that does
    it takes source to target, so positions come from its inverse.
    """
    first, second, size = height // 2, width // 2, min(height, width) // 3
    points = [[first + size, second + size], [first + size, second - size], [first - size, second - size]]
    corners = torch.tensor(points, dtype=torch.float64, device=noise.keys.device)
    moved = corners + jitter * (2 * noise.uniform(3, 2).double() - 1)
    # From target back to source: [x y 1] of the moved corners times the unknown 3 x 2 matrix gives the corners.
    ones = torch.ones(len(moved), 3, 1, dtype=torch.float64, device=moved.device)
    back = torch.linalg.solve(torch.cat([moved, ones], dim=2), corners.expand(len(moved), 3, 2))[:, :, :, None, None]
    row = torch.arange(height, dtype=torch.float64, device=moved.device)[:, None]
    column = torch.arange(width, dtype=torch.float64, device=moved.device)
    x, y = (back[:, 0, axis] * column + back[:, 1, axis] * row + back[:, 2, axis] for axis in (0, 1))
    return y, x


def displacement(height: int, width: int, amplitude: float, smoothness: float, noise: Noise) -> Tensor:
    """The elastic displacement in pixels, (B, 2, H, W): smoothed uniform noise times an amplitude."""
    field = 2 * noise.uniform(2, height, width).double() - 1
    rows, cols = (gaussian_matrix(size, smoothness, 3.0, reflect) for size in (height, width))
    return separable(field, rows, cols) * amplitude


def pixelate(images: Tensor, setting: Setting, noise: Noise) -> Tensor:
    """Down to a smaller size and up again, both times with Pillow's box filter."""
    (factor,) = setting
    height, width = images.shape[-2:]
    small_height, small_width = int(height * factor), int(width * factor)
    small = resize_box(images, small_height, small_width)
    return resize_box(small, height, width)


def resize_box(images: Tensor, height: int, width: int) -> Tensor:
    """Pillow's ``resize`` of 8-bit images with its box filter, to the bit: columns first, then rows."""
    cols = box_weights(images.shape[-1], width).to(images.device)
    rows = box_weights(images.shape[-2], height).to(images.device)
    # Integers below 2**53 are exact in float64, so the sums are too, in any order.
    across = (images.double() @ cols.T).div_(_FIXED).add_(0.5).floor_()
    return truncated((rows @ across).div_(_FIXED).add_(0.5))


@cache
def box_weights(size: int, new_size: int) -> Tensor:
    """Pillow's box-filter weights from ``size`` to ``new_size`` pixels, in units of 2**-22."""
    scale = size / new_size
    support = 0.5 * max(scale, 1.0)
    matrix = torch.zeros(new_size, size, dtype=torch.float64)
    for target in range(new_size):
        centre = (target + 0.5) * scale
        low = max(int(centre - support + 0.5), 0)
        high = min(int(centre + support + 0.5), size)
        # The box is half open: of two pixels at its two ends only one counts.
        offset = [(source - centre + 0.5) / max(scale, 1.0) for source in range(low, high)]
        inside = [1.0 if -0.5 < where <= 0.5 else 0.0 for where in offset]
        for source, weight in zip(range(low, high), inside, strict=True):
            matrix[target, source] = math.floor(weight / sum(inside) * _FIXED + 0.5)
    return matrix


def jpeg_compression(images: Tensor, setting: Setting, noise: Noise) -> Tensor:
    """Through a JPEG file in memory, by Pillow."""
    quality = int(setting[0])
    planes = images.permute(0, 2, 3, 1).cpu().numpy()
    out = np.stack([_through_jpeg(image, quality) for image in planes])
    return torch.from_numpy(out).permute(0, 3, 1, 2).to(images.device)


def _through_jpeg(image: np.ndarray, quality: int) -> np.ndarray:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file, formats=("JPEG",)))
