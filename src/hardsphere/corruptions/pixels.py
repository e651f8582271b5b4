"""From 8-bit images to numbers and back, as the original generator does it: by truncation, not by rounding."""

from __future__ import annotations

import torch
from torch import Tensor

# A sum of many products, such as a blur, comes out a few 1e-13 above or below the exact number, depending on the order
# in which a device adds. Where the exact number is a whole grey level (any flat region), truncation would turn that
# into a full level. The guard is far larger than the error and far smaller than the least weight of a kernel.
_GUARD = 1e-10


def as_unit(images: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """8-bit images as numbers in [0, 1]. Double precision, because the original truncates its double precision.

    The divisor is a tensor: by a plain number a GPU multiplies with the reciprocal, which rounds differently, and a
    pixel that nothing was done to would lose a level.
    """
    return images.to(dtype) / torch.tensor(255, dtype=dtype, device=images.device)


def from_unit(values: Tensor) -> Tensor:
    """Numbers in [0, 1] as 8-bit images: clipped, scaled, truncated. For element-by-element arithmetic."""
    return truncated(values.clamp(0, 1).mul_(255))


def from_sums(values: Tensor) -> Tensor:
    """Like `from_unit`, for numbers that are sums of many products, and therefore a hair off."""
    return truncated(values.clamp(0, 1).mul_(255).add_(_GUARD))


def truncated(values: Tensor) -> Tensor:
    """Numbers in [0, 256) as 8-bit images, towards 0; by way of int32, which is the faster one."""
    return values.to(torch.int32).to(torch.uint8)
