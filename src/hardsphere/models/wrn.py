"""Wide residual networks for small images (Zagoruyko and Komodakis 2016), in the variant of TRADES and of the paper.

The names in the state dict are those of the released checkpoints. These also hold a `sub_block1` that no forward pass
ever used; it is left out here and skipped where such a checkpoint is read.
"""

from __future__ import annotations

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from hardsphere.errors import HardsphereError
from hardsphere.models.layers import conv, initialise, pooled


class Block(nn.Module):
    """BN-ReLU-conv twice; where the channels change, the activated input feeds the 1x1 shortcut too."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = conv(inputs, outputs, 3, stride)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = conv(outputs, outputs, 3)
        self.convShortcut = None if inputs == outputs else conv(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(x))
        shortcut = x if self.convShortcut is None else self.convShortcut(out)
        out = self.conv2(F.relu(self.bn2(self.conv1(out))))
        return cast(Tensor, out + shortcut)


class Group(nn.Module):
    """Blocks at one image size; the first of them changes the channels and the size."""

    def __init__(self, blocks: int, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        first = Block(inputs, outputs, stride)
        self.layer = nn.Sequential(first, *(Block(outputs, outputs, 1) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.layer(x))


class WideResNet(nn.Module):
    """WRN-depth-widen: three groups of (depth - 4) / 6 blocks with 16, 32 and 64 times ``widen`` channels."""

    def __init__(self, depth: int, widen: int, num_classes: int, in_channels: int) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6 != 0 or widen < 1:
            raise HardsphereError(
                f"There is no wrn-{depth}-{widen}: the depth must be 6n + 4 (10, 16, …, 28, 34), the width at least 1."
            )
        blocks = (depth - 4) // 6
        self.conv1 = conv(in_channels, 16, 3)
        self.block1 = Group(blocks, 16, 16 * widen, 1)
        self.block2 = Group(blocks, 16 * widen, 32 * widen, 2)
        self.block3 = Group(blocks, 32 * widen, 64 * widen, 2)
        self.bn1 = nn.BatchNorm2d(64 * widen)
        self.fc = nn.Linear(64 * widen, num_classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        out = self.block3(self.block2(self.block1(self.conv1(x))))
        return cast(Tensor, self.fc(pooled(F.relu(self.bn1(out)))))
