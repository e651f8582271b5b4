"""3x3 convolutions on Hopper GPUs, with the cheap steps around them in the same kernel.

A convolution is a matrix product: for each pixel, images by channels, summed over the nine taps and their channels.
Here a tile of that product is one pixel of 128 images, so that everything a step loads is a plain box, a tap outside of
the image is never visited, nor one that a stride leaves out, and any image size will do. What residual networks do
before and after (the 1x1 convolution of a shortcut, the sum of two branches, BatchNorm in eval mode, ReLU, and the way
back through them) is done to a tile while it is in registers, where it costs a fraction of a pass over memory.

The loads go through tensor descriptors (TMA), the products through the tensor cores of a whole warpgroup (wgmma).
Triton makes both from `load` and `dot`, if both factors are used just as they were loaded. A factor that is reshaped
first travels through registers, and those were seen to be overwritten while a product still read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped,import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,import-not-found,unused-ignore]
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-untyped,import-not-found,unused-ignore]  # fmt: skip

from hardsphere.kernels.place import beside

IMAGES = 128
"""How many images a tile holds; fewer cost as much."""

# Output channels of a tile, the best first: a power of two, and what 160 leaves over beside it.
TILES = ((128, 0), (128, 32), (64, 0), (32, 0), (16, 0))

_DEPTH = 64  # input channels a step: rows of 128 bytes, the widest that shared memory swizzles
_SLICE = 64  # output channels that are finished at a time: more do not fit into registers beside the product
_STAGES = 3  # loads in flight; with three, two tiles share a multiprocessor, and one computes while the other loads
_WARPS = 4

_WIDE = 64  # a narrower tile is taken only for channels that no wide one divides
_MOST_PROCESSORS = 0.8  # of all that must have a tile; else the next narrower tile gives more of them one


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _taps(place, size, STRIDE: tl.constexpr, BACK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Along one side of the image: the first tap of a pixel, where it is read, and how many taps there are.

    Forwards the taps of an output go on by one, and what they read as well. Backwards the taps that had read a pixel
    go on by the stride, and what they had been read for goes back by one. ``size`` is that of what is read.
    """
    if BACK:
        tap = (place + 1) % STRIDE
        read = (place + 1) // STRIDE
        outside = (read > size - 1).to(tl.int32)
        tap += outside * STRIDE
        read -= outside
        return tap, read, (tl.minimum(2, place + 1) - tap) // STRIDE + 1
    tap = (place == 0).to(tl.int32)
    read = place * STRIDE - 1 + tap
    return tap, read, tl.minimum(3, size + 1 - place * STRIDE) - tap


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _add_taps(total, beside, x, w, w_beside, image, row, column, channel, begin, height, width, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, STRIDE: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr, BESIDE: tl.constexpr, BACK: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
    """Add the products of all taps inside the image, over ``STEPS`` times ``DEPTH`` channels from ``begin`` on."""
    top, read_row, rows = _taps(row, height, STRIDE, BACK)
    left, read_column, columns = _taps(column, width, STRIDE, BACK)
    for step in tl.range(0, rows * columns * STEPS):
        tap = step // STEPS
        c = begin + (step % STEPS) * DEPTH
        i = (tap >= columns).to(tl.int32) + (tap >= 2 * columns).to(tl.int32)
        j = tap - i * columns
        if BACK:  # inputs and outputs of the weights are exchanged
            a = x.load([image, ((read_row - i) * width + read_column - j) * INPUTS + c])
            place = (3 * (top + STRIDE * i) + left + STRIDE * j) * OUTPUTS + channel
            total = tl.dot(a, w.load([c, place]), total)
            if BESIDE > 0:
                beside = tl.dot(a, w_beside.load([c, place + TILE]), beside)
        else:
            a = x.load([image, ((read_row + i) * width + read_column + j) * INPUTS + c])
            place = (3 * (top + i) + left + j) * INPUTS + c
            total = tl.dot(a, w.load([channel, place]).T, total)
            if BESIDE > 0:
                beside = tl.dot(a, w_beside.load([channel + TILE, place]).T, beside)
    return total, beside


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _add_point(total, beside, x, w, w_beside, image, row, column, channel, begin, width, INPUTS: tl.constexpr, STRIDE: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr, BESIDE: tl.constexpr, BACK: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
    """Add the product of a 1x1 convolution, or on the way back that of the output that had read this pixel, if any."""
    if BACK:
        steps = STEPS * ((row % STRIDE == 0) & (column % STRIDE == 0)).to(tl.int32)
        pixel = row // STRIDE * width + column // STRIDE
    else:
        steps = STEPS
        pixel = row * STRIDE * width + column * STRIDE
    for step in tl.range(0, steps):
        c = begin + step * DEPTH
        a = x.load([image, pixel * INPUTS + c])
        if BACK:
            total = tl.dot(a, w.load([c, channel]), total)
            if BESIDE > 0:
                beside = tl.dot(a, w_beside.load([c, channel + TILE]), beside)
        else:
            total = tl.dot(a, w.load([channel, c]).T, total)
            if BESIDE > 0:
                beside = tl.dot(a, w_beside.load([channel + TILE, c]).T, beside)
    return total, beside


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _finish(value, out, other, more, scale, shift, image, place, channel, CHANNELS: tl.constexpr, BACK: tl.constexpr, ADD: tl.constexpr, KEEP: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
    """What is done to some channels of a tile: see `convolve` and `convolve_back`."""
    channels = channel + tl.arange(0, CHANNELS)
    factor = tl.load(scale + channels)[None, :]
    here = place + channel
    if BACK:
        value = tl.where(more.load([image, here]) > 0, value * factor, 0.0)
        if ADD:
            value += other.load([image, here]).to(tl.float32)
    else:
        if ADD:
            value += other.load([image, here]).to(tl.float32)
        if KEEP:
            rounded = value.to(out.dtype)
            more.store([image, here], rounded)
            value = rounded.to(tl.float32)
        value = tl.maximum(value * factor + tl.load(shift + channels)[None, :], 0.0)
    out.store([image, here], value.to(out.dtype))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _convolution(x, w, w_beside, x_rest, w_rest, w_beside_rest, p, v, v_beside, p_rest, v_rest, v_beside_rest, out, other, more, out_beside, other_beside, more_beside, scale, shift, height, width, x_height, x_width, p_width, INPUTS: tl.constexpr, POINTS: tl.constexpr, OUTPUTS: tl.constexpr, STRIDE: tl.constexpr, POINT_STRIDE: tl.constexpr, IMAGES: tl.constexpr, DEPTH: tl.constexpr, POINT_DEPTH: tl.constexpr, SLICE: tl.constexpr, TILE: tl.constexpr, BESIDE: tl.constexpr, BACK: tl.constexpr, ADD: tl.constexpr, KEEP: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
    """One tile: some channels of one pixel of many images."""
    tiles: tl.constexpr = OUTPUTS // (TILE + BESIDE)
    steps: tl.constexpr = INPUTS // DEPTH
    rest: tl.constexpr = INPUTS % DEPTH
    point_steps: tl.constexpr = POINTS // POINT_DEPTH
    point_rest: tl.constexpr = POINTS % POINT_DEPTH
    channel = tl.program_id(0) % tiles * (TILE + BESIDE)
    pixel = tl.program_id(0) // tiles % (height * width)
    image = tl.program_id(0) // tiles // (height * width) * IMAGES
    row, column = pixel // width, pixel % width
    total = tl.zeros((IMAGES, TILE), dtype=tl.float32)
    beside = tl.zeros((IMAGES, BESIDE if BESIDE > 0 else 16), dtype=tl.float32)
    if steps > 0:
        total, beside = _add_taps(total, beside, x, w, w_beside, image, row, column, channel, 0, x_height, x_width, INPUTS, OUTPUTS, STRIDE, DEPTH, steps, TILE, BESIDE, BACK)  # fmt: skip  # noqa: E501
    if rest > 0:
        total, beside = _add_taps(total, beside, x_rest, w_rest, w_beside_rest, image, row, column, channel, steps * DEPTH, x_height, x_width, INPUTS, OUTPUTS, STRIDE, rest, 1, TILE, BESIDE, BACK)  # fmt: skip  # noqa: E501
    if point_steps > 0:
        total, beside = _add_point(total, beside, p, v, v_beside, image, row, column, channel, 0, p_width, POINTS, POINT_STRIDE, POINT_DEPTH, point_steps, TILE, BESIDE, BACK)  # fmt: skip  # noqa: E501
    if point_rest > 0:
        total, beside = _add_point(total, beside, p_rest, v_rest, v_beside_rest, image, row, column, channel, point_steps * POINT_DEPTH, p_width, POINTS, POINT_STRIDE, point_rest, 1, TILE, BESIDE, BACK)  # fmt: skip  # noqa: E501
    place = pixel * OUTPUTS
    if TILE > SLICE:
        first, second = total.reshape(IMAGES, 2, SLICE).permute(0, 2, 1).split()
        _finish(first, out, other, more, scale, shift, image, place, channel, SLICE, BACK, ADD, KEEP)
        _finish(second, out, other, more, scale, shift, image, place, channel + SLICE, SLICE, BACK, ADD, KEEP)
    else:
        _finish(total, out, other, more, scale, shift, image, place, channel, TILE, BACK, ADD, KEEP)
    if BESIDE > 0:
        _finish(beside, out_beside, other_beside, more_beside, scale, shift, image, place, channel + TILE, BESIDE, BACK, ADD, KEEP)  # fmt: skip  # noqa: E501


# What is to be compiled together, while something is. No variable of a context: torch goes backwards in other threads.
_awaited: list[tuple[tuple[Any, ...], dict[str, Any]]] | None = None


@contextmanager
def compiled_together() -> Iterator[None]:
    """Compute no convolution that is asked for inside, but compile the kernels for all of them side by side at the end.

    A deep network has some twenty kernels, and one after the other each of them takes its time.
    """
    global _awaited
    _awaited = []
    try:
        yield
        with ThreadPoolExecutor() as threads, triton.AsyncCompileMode(threads):
            for given, settings in _awaited:
                _convolution.warmup(*given, grid=(1,), **settings)
    finally:
        _awaited = None


def convolve(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    shift: Tensor,
    stride: int = 1,
    other: Tensor | None = None,
    point: tuple[Tensor, Tensor, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """(total, y) with y = max(scale total + shift, 0), where total is the convolution of x plus what is to be added.

    That is another image, or the 1x1 convolution of a point (image, weight, stride). If nothing is to be added, the
    total is not kept, and y is given for both. Images and weights are of half precision with their channels last in
    memory; scale and shift are float32.
    """
    height, width = ((side - 1) // stride + 1 for side in x.shape[2:])
    y = _empty(x, len(weight), height, width)
    keep = other is not None or point is not None
    total = torch.empty_like(y) if keep else y
    _launch(x, weight, stride, point, y, other, total, scale, shift, back=False, keep=keep)
    return total, y


def convolve_back(
    gradient: Tensor,
    weight: Tensor,
    scale: Tensor,
    y: Tensor,
    stride: int = 1,
    other: Tensor | None = None,
    point: tuple[Tensor, Tensor, int] | None = None,
) -> Tensor:
    """From the gradient by a convolution's result, that by what its input y = max(scale z + shift, 0) was made of, z.

    If a 1x1 convolution had read the same input, the point is (gradient by its result, weight, stride). If there is
    another gradient by z, it is added.
    """
    back = _empty(y, *y.shape[1:])
    _launch(gradient, weight, stride, point, back, other, y, scale, scale, back=True, keep=False)
    return back


def _empty(x: Tensor, channels: int, height: int, width: int) -> Tensor:
    size = (len(x), channels, height, width)
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


class _Tile(NamedTuple):
    """Output channels of a tile: a power of two, and so many beside it."""

    width: int
    beside: int


def _tile(outputs: int, pixels: int, device: torch.device) -> _Tile:
    """The widest tile that leaves no channels over and still gives every multiprocessor something to do."""
    fitting = [_Tile(*tile) for tile in TILES if outputs % sum(tile) == 0]
    choice = [tile for tile in fitting if tile.width >= _WIDE] or fitting
    enough = _MOST_PROCESSORS * _processors(device)
    return next((tile for tile in choice if pixels * outputs // sum(tile) >= enough), choice[-1])


def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def _launch(
    x: Tensor,
    weight: Tensor,
    stride: int,
    point: tuple[Tensor, Tensor, int] | None,
    out: Tensor,
    other: Tensor | None,
    more: Tensor,
    scale: Tensor,
    shift: Tensor,
    back: bool,
    keep: bool,
) -> None:
    count, outputs, height, width = out.shape
    groups = triton.cdiv(count, IMAGES)
    tile = _tile(outputs, groups * height * width, x.device)
    pointed, point_weight, point_stride = (x, weight, 1) if point is None else point
    depths = [min(_DEPTH, source.shape[1]) for source in (x, pointed)]

    def factors(image: Tensor, weight: Tensor, depth: int) -> list[TensorDescriptor]:
        images, weights = _rows(image), _rows(weight)
        descriptors = []
        for deep in (depth, image.shape[1] % depth or depth):
            blocks = [(deep, size) if back else (size, deep) for size in (tile.width, tile.beside or tile.width)]
            descriptors += [_boxes(images, (IMAGES, deep)), *(_boxes(weights, block) for block in blocks)]
        return descriptors

    def results(size: int) -> list[TensorDescriptor]:
        return [_boxes(_rows(image), (IMAGES, size)) for image in (out, out if other is None else other, more)]

    taps = factors(x, weight, depths[0])
    given = (
        *taps,
        *(taps if point is None else factors(pointed, point_weight, depths[1])),
        *results(min(tile.width, _SLICE)),
        *results(tile.beside or min(tile.width, _SLICE)),
        scale,
        shift,
        height,
        width,
        *x.shape[2:],
        pointed.shape[3],
    )
    settings = {
        "INPUTS": x.shape[1],
        "POINTS": 0 if point is None else pointed.shape[1],
        "OUTPUTS": outputs,
        "STRIDE": stride,
        "POINT_STRIDE": point_stride,
        "IMAGES": IMAGES,
        "DEPTH": depths[0],
        "POINT_DEPTH": depths[1],
        "SLICE": _SLICE,
        "TILE": tile.width,
        "BESIDE": tile.beside,
        "BACK": back,
        "ADD": other is not None,
        "KEEP": keep,
        "num_warps": _WARPS,
        "num_stages": _STAGES,
    }
    if _awaited is None:
        with beside(x):
            _convolution[(groups * height * width * (outputs // sum(tile)),)](*given, **settings)
    else:
        _awaited.append((given, settings))


def _rows(image: Tensor) -> Tensor:
    """Channels last, an image a row."""
    return image.permute(0, 2, 3, 1).reshape(len(image), -1)


def _boxes(rows: Tensor, box: tuple[int, int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(rows, list(box))
