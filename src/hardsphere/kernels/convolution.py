"""3x3 convolutions on Hopper GPUs, with the cheap steps around them in the same kernel.

A convolution is a matrix product: for each pixel, images by channels, summed over the nine taps and their channels.
Here a tile of that product is one pixel of 128 images, so that everything a step loads is a plain box, a tap outside of
the image is never visited, and any image size will do. What residual networks do before and after (the sum of two
branches, BatchNorm in eval mode, ReLU, and the way back through them) is done to a tile while it is in registers, where
it costs a fraction of a pass over memory.

The loads go through tensor descriptors (TMA), the products through the tensor cores of a whole warpgroup (wgmma).
Triton makes both from `load` and `dot`, if both factors are used just as they were loaded. A factor that is reshaped
first travels through registers, and those were seen to be overwritten while a product still read them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped,import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,import-not-found,unused-ignore]
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-untyped,import-not-found,unused-ignore]

IMAGES = 128
"""How many images a tile holds; fewer cost as much."""

_TAPS = 9
_DEPTH = 64  # input channels a step: rows of 128 bytes, the widest that shared memory swizzles
_SLICE = 64  # output channels that are finished at a time: more do not fit into registers beside the product
_STAGES = 3  # loads in flight; with three, two tiles share a multiprocessor, and one computes while the other loads
_WARPS = 4

# Output channels of a tile, the best first: a power of two, and what 160 leaves over beside it.
TILES = ((128, 0), (128, 32), (64, 0))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _add_taps(total, beside, x, w, w_beside, image, row, column, channel, begin, height, width, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr, BESIDE: tl.constexpr, BACK: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
    """Add the products of all taps inside the image, over ``STEPS`` times ``DEPTH`` channels from ``begin`` on."""
    top = (row == 0).to(tl.int32)
    left = (column == 0).to(tl.int32)
    rows = 3 - top - (row == height - 1).to(tl.int32)
    columns = 3 - left - (column == width - 1).to(tl.int32)
    for step in tl.range(0, rows * columns * STEPS):
        tap = step // STEPS
        c = begin + (step % STEPS) * DEPTH
        down = (tap >= columns).to(tl.int32) + (tap >= 2 * columns).to(tl.int32)
        r, s = top + down, left + tap - down * columns
        a = x.load([image, ((row + r - 1) * width + column + s - 1) * INPUTS + c])
        if BACK:  # the same with all taps the other way round, and inputs and outputs of the weights exchanged
            place = (8 - 3 * r - s) * OUTPUTS + channel
            total = tl.dot(a, w.load([c, place]), total)
            if BESIDE > 0:
                beside = tl.dot(a, w_beside.load([c, place + TILE]), beside)
        else:
            place = (3 * r + s) * INPUTS + c
            total = tl.dot(a, w.load([channel, place]).T, total)
            if BESIDE > 0:
                beside = tl.dot(a, w_beside.load([channel + TILE, place]).T, beside)
    return total, beside


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _finish(value, out, other, more, scale, shift, image, place, channel, CHANNELS: tl.constexpr, BACK: tl.constexpr, ADD: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
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
            rounded = (value + other.load([image, here]).to(tl.float32)).to(out.dtype)
            more.store([image, here], rounded)
            value = rounded.to(tl.float32)
        value = tl.maximum(value * factor + tl.load(shift + channels)[None, :], 0.0)
    out.store([image, here], value.to(out.dtype))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _convolution(x, w, w_beside, x_rest, w_rest, w_beside_rest, out, other, more, out_beside, other_beside, more_beside, scale, shift, height, width, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, IMAGES: tl.constexpr, DEPTH: tl.constexpr, SLICE: tl.constexpr, TILE: tl.constexpr, BESIDE: tl.constexpr, BACK: tl.constexpr, ADD: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
    """One tile: some channels of one pixel of many images."""
    tiles: tl.constexpr = OUTPUTS // (TILE + BESIDE)
    steps: tl.constexpr = INPUTS // DEPTH
    rest: tl.constexpr = INPUTS % DEPTH
    channel = tl.program_id(0) % tiles * (TILE + BESIDE)
    pixel = tl.program_id(0) // tiles % (height * width)
    image = tl.program_id(0) // tiles // (height * width) * IMAGES
    row, column = pixel // width, pixel % width
    total = tl.zeros((IMAGES, TILE), dtype=tl.float32)
    beside = tl.zeros((IMAGES, BESIDE if BESIDE > 0 else 16), dtype=tl.float32)
    if steps > 0:
        total, beside = _add_taps(total, beside, x, w, w_beside, image, row, column, channel, 0, height, width, INPUTS, OUTPUTS, DEPTH, steps, TILE, BESIDE, BACK)  # fmt: skip  # noqa: E501
    if rest > 0:
        total, beside = _add_taps(total, beside, x_rest, w_rest, w_beside_rest, image, row, column, channel, steps * DEPTH, height, width, INPUTS, OUTPUTS, rest, 1, TILE, BESIDE, BACK)  # fmt: skip  # noqa: E501
    place = pixel * OUTPUTS
    if TILE > SLICE:
        first, second = total.reshape(IMAGES, 2, SLICE).permute(0, 2, 1).split()
        _finish(first, out, other, more, scale, shift, image, place, channel, SLICE, BACK, ADD)
        _finish(second, out, other, more, scale, shift, image, place, channel + SLICE, SLICE, BACK, ADD)
    else:
        _finish(total, out, other, more, scale, shift, image, place, channel, TILE, BACK, ADD)
    if BESIDE > 0:
        _finish(beside, out_beside, other_beside, more_beside, scale, shift, image, place, channel + TILE, BESIDE, BACK, ADD)  # fmt: skip  # noqa: E501


def convolve(
    x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, other: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(total, y) with y = max(scale total + shift, 0), where total is the 3x3 convolution of x plus another image.

    Without another image the total is not kept, and y is given for both. Images and weights are of half precision with
    their channels last in memory; scale and shift are float32.
    """
    y = _like(x, len(weight))
    total = y if other is None else torch.empty_like(y)
    _launch(x, weight, y, other, total, scale, shift, back=False)
    return total, y


def convolve_back(gradient: Tensor, weight: Tensor, scale: Tensor, y: Tensor, other: Tensor | None = None) -> Tensor:
    """From the gradient by a convolution's result, that by what its input y = max(scale z + shift, 0) was made of, z.

    If there is another gradient by z, it is added.
    """
    back = _like(gradient, weight.shape[1])
    _launch(gradient, weight, back, other, y, scale, scale, back=True)
    return back


def _like(x: Tensor, channels: int) -> Tensor:
    size = (len(x), channels, *x.shape[2:])
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


class _Tile(NamedTuple):
    """Output channels of a tile: a power of two, and so many beside it."""

    width: int
    beside: int


def _tile(outputs: int, pixels: int, device: torch.device) -> _Tile:
    """The widest tile that leaves no channels over and still gives every multiprocessor something to do."""
    fitting = [_Tile(*tile) for tile in TILES if outputs % sum(tile) == 0]
    processors = _processors(device)
    busy = [tile for tile in fitting if pixels * outputs // sum(tile) >= 0.8 * processors]
    return (busy or fitting[-1:])[0]


def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def _launch(
    x: Tensor, weight: Tensor, out: Tensor, other: Tensor | None, more: Tensor, scale: Tensor, shift: Tensor, back: bool
) -> None:
    count, inputs, height, width = x.shape
    outputs = out.shape[1]
    groups = triton.cdiv(count, IMAGES)
    tile = _tile(outputs, groups * height * width, x.device)
    depth = min(_DEPTH, inputs)
    rest = inputs % depth or depth
    images, weights = _rows(x), _rows(weight)
    other_image = out if other is None else other

    def factors(depth: int) -> list[TensorDescriptor]:
        blocks = [(depth, size) if back else (size, depth) for size in (tile.width, tile.beside or tile.width)]
        return [_boxes(images, (IMAGES, depth)), *(_boxes(weights, block) for block in blocks)]

    def results(size: int) -> list[TensorDescriptor]:
        return [_boxes(_rows(image), (IMAGES, size)) for image in (out, other_image, more)]

    _convolution[(groups * height * width * (outputs // sum(tile)),)](
        *factors(depth),
        *factors(rest),
        *results(min(tile.width, _SLICE)),
        *results(tile.beside or min(tile.width, _SLICE)),
        scale,
        shift,
        height,
        width,
        inputs,
        outputs,
        IMAGES,
        depth,
        _SLICE,
        tile.width,
        tile.beside,
        back,
        other is not None,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )


def _rows(image: Tensor) -> Tensor:
    """Channels last, an image a row."""
    return image.permute(0, 2, 3, 1).reshape(len(image), -1)


def _boxes(rows: Tensor, box: tuple[int, int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(rows, list(box))
