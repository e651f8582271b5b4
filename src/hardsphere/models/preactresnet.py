"""PreActResNet-18 for small images (He et al. 2016), the field's network for fast experiments.

There are two of them in circulation: Rice et al., AWP and Bag of Tricks take the 1x1 shortcut from the *activated*
input, fast_adversarial takes it from the raw input. This is the first. The names in the state dict are theirs as well.
"""

from __future__ import annotations

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from hardsphere.models.layers import conv, initialise, pooled


class Block(nn.Module):
    """BN-ReLU-conv twice; where the shape changes, a 1x1 convolution of the activated input is the shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = conv(inputs, outputs, 3, stride)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = conv(outputs, outputs, 3)
        self.shortcut = nn.Sequential(conv(inputs, outputs, 1, stride)) if stride != 1 or inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(x))
        shortcut = x if self.shortcut is None else self.shortcut(out)
        out = self.conv2(F.relu(self.bn2(self.conv1(out))))
        return cast(Tensor, out + shortcut)


class PreActResNet18(nn.Module):
    """Four stages of two blocks, of 1, 2, 4 and 8 times ``width`` channels; the usual width is 64."""

    def __init__(self, width: int, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.conv1 = conv(in_channels, width, 3)
        self.layer1 = nn.Sequential(Block(width, width, 1), Block(width, width, 1))
        self.layer2 = nn.Sequential(Block(width, 2 * width, 2), Block(2 * width, 2 * width, 1))
        self.layer3 = nn.Sequential(Block(2 * width, 4 * width, 2), Block(4 * width, 4 * width, 1))
        self.layer4 = nn.Sequential(Block(4 * width, 8 * width, 2), Block(8 * width, 8 * width, 1))
        self.bn = nn.BatchNorm2d(8 * width)
        self.linear = nn.Linear(8 * width, num_classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer4(self.layer3(self.layer2(self.layer1(self.conv1(x)))))
        return cast(Tensor, self.linear(pooled(F.relu(self.bn(out)))))
