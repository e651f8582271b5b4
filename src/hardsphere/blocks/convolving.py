"""Convolutions with what is around them: by the kernels on a GPU, or by their slow twins, step by step."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input

from hardsphere.norms import gradient_before


class Point(NamedTuple):
    """A 1x1 convolution whose result is added: of an image, or on the way back the gradient by its result."""

    image: Tensor
    weight: Tensor
    stride: int


def convolve(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    shift: Tensor,
    stride: int = 1,
    other: Tensor | None = None,
    point: Point | None = None,
) -> tuple[Tensor, Tensor]:
    """(total, max(scale total + shift, 0)), where total is the 3x3 convolution of x and what is to be added to it."""
    if x.is_cuda:
        from hardsphere import kernels

        return kernels.convolve(x, weight, scale, shift, stride, other, point)
    total = F.conv2d(x, weight, stride=stride, padding=1)
    total = total if other is None else total + other
    total = total if point is None else total + F.conv2d(point.image, point.weight, stride=point.stride)
    return total, (total.float() * scale[:, None, None] + shift[:, None, None]).relu().to(x.dtype)


def convolve_back(
    gradient: Tensor,
    weight: Tensor,
    scale: Tensor,
    y: Tensor,
    stride: int = 1,
    other: Tensor | None = None,
    point: Point | None = None,
) -> Tensor:
    """From the gradient by a convolution's result, that by z, of which its input is y = max(scale z + shift, 0)."""
    if gradient.is_cuda:
        from hardsphere import kernels

        return kernels.convolve_back(gradient, weight, scale, y, stride, other, point)
    by_y: Tensor = conv2d_input(y.shape, weight, gradient, stride=stride, padding=1)  # type: ignore[no-untyped-call]
    if point is not None:
        by_y = by_y + conv2d_input(y.shape, *point[1::-1], stride=point.stride)  # type: ignore[no-untyped-call]
    return gradient_before(by_y, y, scale, True, other)
