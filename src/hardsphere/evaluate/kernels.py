"""Triton kernels; imported only where there is a GPU, since Triton comes with torch's builds for one."""

from __future__ import annotations

import triton  # type: ignore[import-untyped,import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,import-not-found,unused-ignore]
from torch import Tensor

_BLOCK = 2048


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _affine(x, scale, shift, y, count, channels, RELU: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """y = scale x + shift, at least zero if asked: float32 arithmetic between bf16 images, channels last in memory."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    channel = place % channels
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    value = value * tl.load(scale + channel) + tl.load(shift + channel)
    if RELU:
        value = tl.maximum(value, 0.0)
    tl.store(y + place, value.to(tl.bfloat16), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _affine_backward(gradient, y, scale, back, count, channels, RELU: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The gradient by x: scale times that by y, where y was not clipped."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    channel = place % channels
    value = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32) * tl.load(scale + channel)
    if RELU:
        value = tl.where(tl.load(y + place, mask=inside, other=0.0).to(tl.float32) > 0, value, 0.0)
    tl.store(back + place, value.to(tl.bfloat16), mask=inside)


def affine(x: Tensor, scale: Tensor, shift: Tensor, y: Tensor, relu: bool) -> None:
    """Fill y; all images are bf16 with their channels last in memory."""
    _affine[(triton.cdiv(x.numel(), _BLOCK),)](x, scale, shift, y, x.numel(), x.shape[1], relu, _BLOCK)


def affine_backward(gradient: Tensor, y: Tensor, scale: Tensor, back: Tensor, relu: bool) -> None:
    """Fill back with the gradient by x."""
    _affine_backward[(triton.cdiv(y.numel(), _BLOCK),)](gradient, y, scale, back, y.numel(), y.shape[1], relu, _BLOCK)
