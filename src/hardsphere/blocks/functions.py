"""Blocks as functions of tensors, with their gradients: torch's compiler and autograd see each as one operation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hardsphere.blocks.convolving import Point, convolve, convolve_back
from hardsphere.norms import gradient_before


@torch.library.custom_op("hardsphere::block", mutates_args=())
def block(
    t: Tensor,
    a: Tensor,
    first: Tensor,
    second: Tensor,
    shortcut: Tensor | None,
    stride: int,
    scale_before: Tensor,
    scale_between: Tensor,
    shift_between: Tensor,
    scale_after: Tensor,
    shift_after: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """(b, t', a'). The way back needs scale_before, and beside a shortcut it needs t, to lead there."""
    _, b = convolve(a, first, scale_between, shift_between, stride=stride)
    if shortcut is None:
        return b, *convolve(b, second, scale_after, shift_after, other=t)
    return b, *convolve(b, second, scale_after, shift_after, point=Point(a, shortcut, stride))


@torch.library.custom_op("hardsphere::block_back", mutates_args=())
def _block_back(
    gradient: Tensor,
    a: Tensor,
    b: Tensor,
    first: Tensor,
    second: Tensor,
    shortcut: Tensor | None,
    stride: int,
    scale_before: Tensor,
    scale_between: Tensor,
) -> Tensor:
    """From the gradient by t', that by t."""
    inner = convolve_back(gradient, second, scale_between, b)
    if shortcut is None:
        return convolve_back(inner, first, scale_before, a, stride=stride, other=gradient)
    return convolve_back(inner, first, scale_before, a, stride=stride, point=Point(gradient, shortcut, stride))


@torch.library.custom_op("hardsphere::tail", mutates_args=())
def tail(
    z: Tensor,
    a: Tensor,
    other: Tensor,
    weight: Tensor,
    scale_before: Tensor,
    scale_after: Tensor,
    shift_after: Tensor,
) -> tuple[Tensor, Tensor]:
    """(t', a'). Of z only a is asked; it is given for autograd to lead back to, and the scale before it to do so."""
    return convolve(a, weight, scale_after, shift_after, other=other)


@torch.library.custom_op("hardsphere::tail_back", mutates_args=())
def _tail_back(gradient: Tensor, a: Tensor, weight: Tensor, scale_before: Tensor) -> Tensor:
    """From the gradient by t', that by z."""
    return convolve_back(gradient, weight, scale_before, a)


def _like(image: Tensor, channels: int | None = None, stride: int = 1) -> Tensor:
    height, width = ((side - 1) // stride + 1 for side in image.shape[2:])
    size = (len(image), channels or image.shape[1], height, width)
    return torch.empty(size, dtype=image.dtype, device=image.device, memory_format=torch.channels_last)


@block.register_fake
def _(t: Tensor, a: Tensor, first: Tensor, second: Tensor, shortcut: Tensor | None, stride: int, *_: Tensor) -> Any:
    return tuple(_like(a, len(first), stride) for _ in range(3))


@tail.register_fake
def _(z: Tensor, *_: Tensor) -> Any:
    return _like(z), _like(z)


@_block_back.register_fake
def _(gradient: Tensor, a: Tensor, *_: Any) -> Any:
    return _like(a)


@_tail_back.register_fake
def _(gradient: Tensor, a: Tensor, *_: Tensor) -> Any:
    return _like(a)


def _keep_block(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, a, first, second, shortcut, stride, scale_before, scale_between, _, scale_after, _ = inputs
    b, _, out = output
    ctx.save_for_backward(a, b, out, first, second, shortcut, scale_before, scale_between, scale_after)
    ctx.stride = stride
    ctx.set_materialize_grads(False)


def _back_through_block(
    ctx: Any, by_b: None, by_total: Tensor | None, by_out: Tensor | None
) -> tuple[Tensor | None, ...]:
    a, b, out, *weights, scale_before, scale_between, scale_after = ctx.saved_tensors
    gradient = _by_total(by_total, by_out, out, scale_after)
    if gradient is None:
        return (None,) * 11
    return _block_back(gradient, a, b, *weights, ctx.stride, scale_before, scale_between), *(None,) * 10


def _keep_tail(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    _, a, _, weight, scale_before, scale_after, _ = inputs
    ctx.save_for_backward(a, output[1], weight, scale_before, scale_after)
    ctx.set_materialize_grads(False)


def _back_through_tail(ctx: Any, by_total: Tensor | None, by_out: Tensor | None) -> tuple[Tensor | None, ...]:
    a, out, weight, scale_before, scale_after = ctx.saved_tensors
    gradient = _by_total(by_total, by_out, out, scale_after)
    by_z = None if gradient is None else _tail_back(gradient, a, weight, scale_before)
    return by_z, None, gradient, *(None,) * 4


block.register_autograd(_back_through_block, setup_context=_keep_block)
tail.register_autograd(_back_through_tail, setup_context=_keep_tail)


def _by_total(by_total: Tensor | None, by_out: Tensor | None, out: Tensor, scale: Tensor) -> Tensor | None:
    """The gradient by the sum, with what comes by way of its norm."""
    return by_total if by_out is None else gradient_before(by_out, out, scale, True, by_total)
