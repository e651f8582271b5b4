"""Kernels that pass over images once: norms with their ReLU and sum, and the projection of the boundary attacks."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped,import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,import-not-found,unused-ignore]
from torch import Tensor

from hardsphere.kernels.place import beside

_BLOCK = 2048


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _affine(x, other, total, scale, shift, y, count, channels, ADD: tl.constexpr, RELU: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
    """y = scale x + shift, at least zero if asked: float32 arithmetic between bf16 images, channels last in memory.

    If asked, x is first made the sum of two images, which is kept in ``total``.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    channel = place % channels
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value = (value + tl.load(other + place, mask=inside, other=0.0).to(tl.float32)).to(tl.bfloat16)
        tl.store(total + place, value, mask=inside)
        value = value.to(tl.float32)
    value = value * tl.load(scale + channel) + tl.load(shift + channel)
    if RELU:
        value = tl.maximum(value, 0.0)
    tl.store(y + place, value.to(tl.bfloat16), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _affine_backward(gradient, y, scale, other, back, count, channels, ADD: tl.constexpr, RELU: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
    """The gradient by x: scale times that by y, where y was not clipped; if asked, ``other`` is added to it."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    channel = place % channels
    value = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32) * tl.load(scale + channel)
    if RELU:
        value = tl.where(tl.load(y + place, mask=inside, other=0.0).to(tl.float32) > 0, value, 0.0)
    if ADD:
        value = value + tl.load(other + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(back + place, value.to(tl.bfloat16), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _shortest(x, normal, gain, way, pixels, LINF: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One image of `hardsphere.threat.Ball.shortest`, which explains it; all of it stays in registers."""
    row = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    inside = place < pixels
    here = row * pixels + place
    wanted = tl.load(gain + row)
    slope = tl.load(normal + here, mask=inside, other=0.0)
    slope = tl.where(wanted < 0, -slope, slope)
    wanted = tl.abs(wanted)
    start = tl.load(x + here, mask=inside, other=0.0)
    room = tl.maximum(tl.where(slope > 0, 1 - start, start), 0.0)
    size = tl.abs(slope)
    speed = tl.where(size >= 0, 1.0, 0.0) if LINF else size
    time = tl.sum(size) * 0.0
    for _ in range(STEPS):
        part = tl.minimum(time * speed, room)
        gained = tl.sum(size * part)
        rate = tl.sum(tl.where(part < room, size * speed, 0.0))
        later = time + tl.maximum(wanted - gained, 0.0) / tl.where(rate > 0, rate, 1.0)
        time = tl.where(rate > 0, later, float("inf"))
    moved = tl.where(size > 0, tl.minimum(time * tl.where(size > 0, speed, 1.0), room), 0.0)
    tl.store(way + here, tl.where(slope < 0, -moved, moved), mask=inside)


def affine(x: Tensor, scale: Tensor, shift: Tensor, relu: bool, other: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(x, y) with y = scale x + shift, clipped at zero if ``relu``; with another image, x is the sum of the two.

    All images are bf16 with their channels last in memory.
    """
    add = other is not None
    y, total = torch.empty_like(x), torch.empty_like(x) if add else x
    with beside(x):
        _affine[(triton.cdiv(x.numel(), _BLOCK),)](
            x, other if add else x, total, scale, shift, y, x.numel(), x.shape[1], add, relu, _BLOCK
        )
    return total, y


def affine_backward(gradient: Tensor, y: Tensor, scale: Tensor, relu: bool, other: Tensor | None = None) -> Tensor:
    """The gradient by x, from that by y and, with another, from that by x itself."""
    add = other is not None
    back = torch.empty_like(y)
    with beside(y):
        _affine_backward[(triton.cdiv(y.numel(), _BLOCK),)](
            gradient, y, scale, other if add else gradient, back, y.numel(), y.shape[1], add, relu, _BLOCK
        )
    return back


def shortest(x: Tensor, normal: Tensor, gain: Tensor, linf: bool, steps: int) -> Tensor:
    """`hardsphere.threat.Ball.shortest` in one kernel; x and normal are float32 of shape (B, pixels)."""
    x, normal, gain = x.contiguous(), normal.contiguous(), gain.contiguous()
    way: Tensor = torch.empty_like(x)
    pixels = x.shape[1]
    with beside(x):
        _shortest[(len(x),)](x, normal, gain, way, pixels, linf, steps, triton.next_power_of_2(pixels), num_warps=8)
    return way
