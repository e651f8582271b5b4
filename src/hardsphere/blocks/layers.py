"""A block and the second half of one as layers, which choose between the kernels and the layers one by one."""

from __future__ import annotations

from contextlib import suppress
from typing import cast

import torch
from torch import Tensor, nn

from hardsphere.blocks.functions import block, tail
from hardsphere.norms import Affine, SumAndNorm

IMAGES = 128
"""How many images a tile of the kernels holds; only a GPU can import them."""

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
        _, total, out = block(t, a, *weights, self.first.stride[0], *scales)
        return total, out


class Tail(nn.Module):
    """The second half of a block: (z, other) -> (t', a') with t' = conv(relu(norm(z))) + other."""

    def __init__(self, before: Affine, conv: nn.Conv2d, after: SumAndNorm) -> None:
        super().__init__()
        self.before, self.conv, self.after = before, conv, after

    def forward(self, z: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        a = self.before(z)
        if not _suits(a) or other.shape != a.shape or other.dtype != a.dtype:  # sums broadcast; kernels do not
            return cast("tuple[Tensor, Tensor]", self.after(self.conv(a), other))
        after = self.after.norm
        return cast(
            "tuple[Tensor, Tensor]",
            tail(z, a.detach(), other, self.conv.weight, self.before.scale, after.scale, after.shift),
        )


def _suits(image: Tensor) -> bool:
    """Whether the kernels are worth their while; on a CPU, where there are none, their slow twins take any numbers."""
    if image.is_cuda and image.dtype != torch.bfloat16:
        return False
    tiles = -(-len(image) // IMAGES)
    return len(image) >= _LEAST_SHARE * tiles * IMAGES


def has_blocks(network: nn.Module) -> bool:
    """Whether some of a network's blocks are fused."""
    return any(isinstance(module, Block | Tail) for module in network.modules())


def compile_kernels(network: nn.Module, x: Tensor) -> None:
    """Have the kernels ready that a pass through the network and back needs for images like these, if it has blocks.

    What goes wrong here will go wrong again where the kernel is asked for, and is dealt with there.
    """
    if not (x.is_cuda and has_blocks(network)):
        return
    from hardsphere import kernels

    image = x.detach().clone().requires_grad_()
    with suppress(Exception), kernels.compiled_together(), torch.enable_grad():
        torch.autograd.grad(network(image).float().sum(), image)


def many(x: Tensor) -> Tensor:
    """These images, over and over again, until there are enough of them for the kernels."""
    return x if len(x) >= IMAGES else x[torch.arange(IMAGES, device=x.device) % len(x)]
