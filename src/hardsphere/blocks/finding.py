"""Where the blocks of a network are: in the trace of it that `hardsphere.norms.fuse_norms` has left."""

from __future__ import annotations

import operator
from typing import Any, cast

from torch import fx, nn

from hardsphere.blocks.layers import Block, Tail
from hardsphere.norms import Affine, SumAndNorm, as_just

# Numbers of channels that tiles of the kernels divide; narrow ones are slow, so only first layers may have so few.
WIDTHS = (64, 160)
NARROW = (16, 32)


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
        if second is None or between is None or not _keeps_the_shape(second) or not _is_wide(second.in_channels):
            continue
        first, a = _convolution(network, z, middle, kernel=3)
        shortcut, source = _convolution(network, other, node, kernel=1)
        before, t = _before(network, a, norms)
        same = shortcut is None and other is t and first is not None and _keeps_the_shape(first)
        changed = shortcut is not None and source is a and first is not None and _end_alike(first, shortcut)
        if first is not None and before is not None and (same or changed) and _has_tiles(first.in_channels):
            return Block(before, first, between, second, after, shortcut), t, cast(fx.Node, a)
        return Tail(between, second, after), cast(fx.Node, z), cast(fx.Node, other)
    return None


def _convolution(network: fx.GraphModule, node: Any, user: Any, kernel: int) -> tuple[nn.Conv2d | None, Any]:
    """The convolution that a node asks for this user alone, if the kernels can do it, and what it is given."""
    layer = as_just(nn.Conv2d, _asked(network, node))
    fused = layer is not None and _is_fusable(layer, kernel) and list(node.users) == [user]
    return (layer, node.args[0]) if fused else (None, None)


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


def _end_alike(one: nn.Conv2d, other: nn.Conv2d) -> bool:
    """Whether their results have one shape, if they are given the same image: sums broadcast, but kernels do not."""
    return one.stride == other.stride and one.out_channels == other.out_channels


def _keeps_the_shape(layer: nn.Conv2d) -> bool:
    return layer.stride == (1, 1) and layer.in_channels == layer.out_channels


def _is_wide(channels: int) -> bool:
    return any(channels % width == 0 for width in WIDTHS)


def _has_tiles(channels: int) -> bool:
    return channels in NARROW or _is_wide(channels)


def _put(network: fx.GraphModule, node: fx.Node, block: nn.Module, *given: fx.Node) -> fx.Node:
    """A fused block in the place of the sum and norm that it ends in."""
    name = f"of_{node.name}"
    network.add_module(name, block.eval())
    with network.graph.inserting_before(node):
        new = network.graph.call_module(name, given)
    node.replace_all_uses_with(new)
    network.graph.erase_node(node)
    return new
