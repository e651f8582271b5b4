"""Residual blocks of a frozen network as two kernels forwards and two backwards, on a GPU that has these kernels.

A pre-activation block (He et al. 2016) makes from the image t of the block before and its activation a = relu(norm(t))

    b = relu(norm(conv(a))),    t' = conv(b) + t,    a' = relu(norm(t')),

and where the shape changes the first convolution has a stride, and a 1x1 convolution of a takes the place of t in the
sum. Everything but the convolutions is cheap arithmetic and expensive memory traffic, so each kernel of
`hardsphere.kernels.convolution` does what comes after its convolution as well, backwards too. Of a block of another
kind only the second half may be fused (`Tail`). Both are found in a network whose norms are fused already
(`hardsphere.norms`). Where the images do not suit the kernels, the layers are asked one by one.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.grad import conv2d_input

from hardsphere.norms import Affine, SumAndNorm, gradient_before

# Of the kernels, which only a GPU can import: how many images a tile holds, and which numbers of channels tiles divide;
# narrow ones are slow, so only the first layers of a network may have so few.
_IMAGES = 128
_WIDTHS = (64, 160)
_NARROW = (16, 32)

_LEAST_SHARE = 0.75  # of the tiles' images that must be there: with fewer the kernels gain nothing


class Block(nn.Module):
    """(t, a) -> (t', a'), where a = relu(norm(t)) was worked out by whatever made t.

    Its gradient by t contains the one by way of a, for which none is given.
    """

    def __init__(
        self,
        before: Affine,
        first: nn.Conv2d,
        between: Affine,
        second: nn.Conv2d,
        after: SumAndNorm,
        shortcut: nn.Conv2d | None = None,
    ) -> None:
        super().__init__()
        self.before, self.first, self.between, self.second, self.after = before, first, between, second, after
        self.shortcut = shortcut

    def forward(self, t: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        between, after, shortcut = self.between, self.after.norm, self.shortcut
        if not _suits(a):
            other = t if shortcut is None else shortcut(a)
            return cast("tuple[Tensor, Tensor]", self.after(self.second(between(self.first(a))), other))
        weights = (self.first.weight, self.second.weight, None if shortcut is None else shortcut.weight)
        scales = (self.before.scale, between.scale, between.shift, after.scale, after.shift)
        _, total, out = _block(t, a, *weights, self.first.stride[0], *scales)
        return total, out


class Tail(nn.Module):
    """The second half of a block: (z, other) -> (t', a') with t' = conv(relu(norm(z))) + other."""

    def __init__(self, before: Affine, conv: nn.Conv2d, after: SumAndNorm) -> None:
        super().__init__()
        self.before, self.conv, self.after = before, conv, after

    def forward(self, z: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        a = self.before(z)
        if not _suits(a):
            return cast("tuple[Tensor, Tensor]", self.after(self.conv(a), other))
        after = self.after.norm
        return cast(
            "tuple[Tensor, Tensor]",
            _tail(z, a.detach(), other, self.conv.weight, self.before.scale, after.scale, after.shift),
        )


def _suits(image: Tensor) -> bool:
    """Whether the kernels are worth their while; on a CPU, where there are none, their slow twins take any numbers."""
    if image.is_cuda and image.dtype != torch.bfloat16:
        return False
    tiles = -(-len(image) // _IMAGES)
    return len(image) >= _LEAST_SHARE * tiles * _IMAGES


def has_blocks(network: nn.Module) -> bool:
    """Whether some of a network's blocks are fused."""
    return any(isinstance(module, Block | Tail) for module in network.modules())


def compile_kernels(network: nn.Module, x: Tensor) -> None:
    """Have the kernels ready that a pass through the network and back needs for images like these, if it has blocks."""
    if not (x.is_cuda and has_blocks(network)):
        return
    from hardsphere import kernels

    image = x.detach().clone().requires_grad_()
    with kernels.compiled_together(), torch.enable_grad():
        torch.autograd.grad(network(image).float().sum(), image)


def many(x: Tensor) -> Tensor:
    """These images, over and over again, until there are enough of them for the kernels."""
    return x if len(x) >= _IMAGES else x[torch.arange(_IMAGES, device=x.device) % len(x)]


# ---------------------------------------------------------------------------------------------------------------------
# The two as functions of tensors, with their gradients
# ---------------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("hardsphere::block", mutates_args=())
def _block(
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
    """(b, t', a')."""
    _, b = _convolve(a, first, scale_between, shift_between, stride=stride)
    if shortcut is None:
        return b, *_convolve(b, second, scale_after, shift_after, other=t)
    return b, *_convolve(b, second, scale_after, shift_after, point=Point(a, shortcut, stride))


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
    inner = _convolve_back(gradient, second, scale_between, b)
    if shortcut is None:
        return _convolve_back(inner, first, scale_before, a, stride=stride, other=gradient)
    return _convolve_back(inner, first, scale_before, a, stride=stride, point=Point(gradient, shortcut, stride))


@torch.library.custom_op("hardsphere::tail", mutates_args=())
def _tail(
    z: Tensor,
    a: Tensor,
    other: Tensor,
    weight: Tensor,
    scale_before: Tensor,
    scale_after: Tensor,
    shift_after: Tensor,
) -> tuple[Tensor, Tensor]:
    """(t', a')."""
    return _convolve(a, weight, scale_after, shift_after, other=other)


@torch.library.custom_op("hardsphere::tail_back", mutates_args=())
def _tail_back(gradient: Tensor, a: Tensor, weight: Tensor, scale_before: Tensor) -> Tensor:
    """From the gradient by t', that by z."""
    return _convolve_back(gradient, weight, scale_before, a)


def _like(image: Tensor, channels: int | None = None, stride: int = 1) -> Tensor:
    height, width = ((side - 1) // stride + 1 for side in image.shape[2:])
    size = (len(image), channels or image.shape[1], height, width)
    return torch.empty(size, dtype=image.dtype, device=image.device, memory_format=torch.channels_last)


@_block.register_fake
def _(t: Tensor, a: Tensor, first: Tensor, second: Tensor, shortcut: Tensor | None, stride: int, *_: Tensor) -> Any:
    return tuple(_like(a, len(first), stride) for _ in range(3))


@_tail.register_fake
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


_block.register_autograd(_back_through_block, setup_context=_keep_block)
_tail.register_autograd(_back_through_tail, setup_context=_keep_tail)


def _by_total(by_total: Tensor | None, by_out: Tensor | None, out: Tensor, scale: Tensor) -> Tensor | None:
    """The gradient by the sum, with what comes by way of its norm."""
    return by_total if by_out is None else gradient_before(by_out, out, scale, True, by_total)


# ---------------------------------------------------------------------------------------------------------------------
# The kernels, and what they compute, step by step
# ---------------------------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """A 1x1 convolution whose result is added: of an image, or on the way back the gradient by its result."""

    image: Tensor
    weight: Tensor
    stride: int


def _convolve(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    shift: Tensor,
    stride: int = 1,
    other: Tensor | None = None,
    point: Point | None = None,
) -> tuple[Tensor, Tensor]:
    if x.is_cuda:
        from hardsphere import kernels

        return kernels.convolve(x, weight, scale, shift, stride, other, point)
    total = F.conv2d(x, weight, stride=stride, padding=1)
    total = total if other is None else total + other
    total = total if point is None else total + F.conv2d(point.image, point.weight, stride=point.stride)
    return total, (total.float() * scale[:, None, None] + shift[:, None, None]).relu().to(x.dtype)


def _convolve_back(
    gradient: Tensor,
    weight: Tensor,
    scale: Tensor,
    y: Tensor,
    stride: int = 1,
    other: Tensor | None = None,
    point: Point | None = None,
) -> Tensor:
    if gradient.is_cuda:
        from hardsphere import kernels

        return kernels.convolve_back(gradient, weight, scale, y, stride, other, point)
    by_y: Tensor = conv2d_input(y.shape, weight, gradient, stride=stride, padding=1)  # type: ignore[no-untyped-call]
    if point is not None:
        by_y = by_y + conv2d_input(y.shape, *point[1::-1], stride=point.stride)  # type: ignore[no-untyped-call]
    return gradient_before(by_y, y, scale, True, other)


# ---------------------------------------------------------------------------------------------------------------------
# Finding them
# ---------------------------------------------------------------------------------------------------------------------


def fuse_blocks(network: nn.Module) -> nn.Module:
    """The network with its residual blocks fused, if `hardsphere.norms.fuse_norms` has fused its norms."""
    if not isinstance(network, fx.GraphModule):
        return network
    norms: dict[fx.Node, Affine] = {}  # of a node that gives (t, relu(norm(t)))
    for node in list(network.graph.nodes):
        after = _asked(network, node)
        if not isinstance(after, SumAndNorm):
            continue
        block = _block_before(network, node, after, norms)
        if block is not None:
            node = _put(network, node, *block)
        if after.norm.relu:
            norms[node] = after.norm
    network.graph.eliminate_dead_code()
    network.recompile()
    return network


def _block_before(
    network: fx.GraphModule, node: fx.Node, after: SumAndNorm, norms: dict[fx.Node, Affine]
) -> tuple[nn.Module, fx.Node, fx.Node] | None:
    """The block that ends in a sum and its norm, with what it is given; none if it is no such block."""
    if not after.norm.relu:
        return None
    for last, other in (node.args, node.args[::-1]):
        second, middle = _convolution(network, last, node, kernel=3)
        between, z = _activation(network, middle, last)
        if second is None or between is None or second.stride != (1, 1) or not _is_wide(second.in_channels):
            continue
        first, a = _convolution(network, z, middle, kernel=3)
        shortcut, source = _convolution(network, other, node, kernel=1)
        before, t = _before(network, a, norms)
        same = shortcut is None and other is t and first is not None and first.stride == (1, 1)
        changed = shortcut is not None and source is a and first is not None and first.stride == shortcut.stride
        if first is not None and before is not None and (same or changed) and _has_tiles(first.in_channels):
            return Block(before, first, between, second, after, shortcut), t, cast(fx.Node, a)
        return Tail(between, second, after), cast(fx.Node, z), cast(fx.Node, other)
    return None


def _convolution(network: fx.GraphModule, node: Any, user: Any, kernel: int) -> tuple[nn.Conv2d | None, Any]:
    """The convolution that a node asks for this user alone, if the kernels can do it, and what it is given."""
    layer = _asked(network, node)
    fused = type(layer) is nn.Conv2d and _is_fusable(layer, kernel) and list(node.users) == [user]
    return (cast(nn.Conv2d, layer), node.args[0]) if fused else (None, None)


def _activation(network: fx.GraphModule, node: Any, user: Any) -> tuple[Affine | None, Any]:
    """The norm with ReLU that a node asks for this user alone, and what it is given."""
    layer = _asked(network, node)
    fused = isinstance(layer, Affine) and layer.relu and list(node.users) == [user]
    return (cast(Affine, layer), node.args[0]) if fused else (None, None)


def _before(network: fx.GraphModule, a: Any, norms: dict[fx.Node, Affine]) -> tuple[Affine | None, Any]:
    """The norm and the image t by which a = relu(norm(t)), if it is such an image."""
    layer = _asked(network, a)
    if isinstance(layer, Affine) and layer.relu:
        return layer, a.args[0]
    if not _is_part(a, 1) or a.args[0] not in norms:
        return None, None
    both = a.args[0]
    return norms[both], next((part for part in both.users if _is_part(part, 0)), None)


def _is_part(node: Any, place: int) -> bool:
    return isinstance(node, fx.Node) and node.target is operator.getitem and bool(node.args[1] == place)


def _asked(network: fx.GraphModule, node: Any) -> nn.Module | None:
    asks = isinstance(node, fx.Node) and node.op == "call_module" and not node.kwargs
    return network.get_submodule(str(node.target)) if asks else None


def _is_fusable(layer: nn.Conv2d, kernel: int) -> bool:
    """Whether it is a frozen convolution of that size, padded to keep the image's size but for a stride of 1 or 2."""
    plain = layer.groups == 1 and layer.bias is None and layer.padding_mode == "zeros" and layer.dilation == (1, 1)
    sized = layer.kernel_size == (kernel, kernel) and layer.padding == (kernel // 2, kernel // 2)
    return plain and sized and layer.stride in ((1, 1), (2, 2)) and not layer.weight.requires_grad


def _is_wide(channels: int) -> bool:
    return any(channels % width == 0 for width in _WIDTHS)


def _has_tiles(channels: int) -> bool:
    return channels in _NARROW or _is_wide(channels)


def _put(network: fx.GraphModule, node: fx.Node, block: nn.Module, *given: fx.Node) -> fx.Node:
    """A fused block in the place of the sum and norm that it ends in."""
    name = f"of_{node.name}"
    network.add_module(name, block.eval())
    with network.graph.inserting_before(node):
        new = network.graph.call_module(name, given)
    node.replace_all_uses_with(new)
    network.graph.erase_node(node)
    return new
