"""Bottleneck residual networks for 224 px (He et al. 2015), the paper's ImageNet models.

Names and values of the state dict are torchvision's, so its weights load here. As there, the stride of a block sits on
its 3x3 convolution ("v1.5"), and the wide forms double the inner width only.
"""

from __future__ import annotations

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from hardsphere.models.layers import conv, initialise, pooled

# name: (blocks of each stage, inner width of the first stage)
VARIANTS = {
    "resnet50": ((3, 4, 6, 3), 64),
    "resnet152": ((3, 8, 36, 3), 64),
    "wide_resnet50_2": ((3, 4, 6, 3), 128),
    "wide_resnet101_2": ((3, 4, 23, 3), 128),
}


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, each before its batch normalisation."""

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv(inputs, inner, 1)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = conv(inner, inner, 3, stride)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = conv(inner, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        changes = stride != 1 or inputs != outputs
        self.downsample = nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs)) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """One of `VARIANTS`; four stages of 256, 512, 1024 and 2048 channels."""

    def __init__(self, name: str, num_classes: int, in_channels: int) -> None:
        super().__init__()
        blocks, width = VARIANTS[name]
        self.conv1 = conv(in_channels, 64, 7, stride=2)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = _stage(blocks[0], 64, width, 256, 1)
        self.layer2 = _stage(blocks[1], 256, 2 * width, 512, 2)
        self.layer3 = _stage(blocks[2], 512, 4 * width, 1024, 2)
        self.layer4 = _stage(blocks[3], 1024, 8 * width, 2048, 2)
        self.fc = nn.Linear(2048, num_classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        out = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), kernel_size=3, stride=2, padding=1)
        out = self.layer4(self.layer3(self.layer2(self.layer1(out))))
        return cast(Tensor, self.fc(pooled(out)))


def _stage(blocks: int, inputs: int, inner: int, outputs: int, stride: int) -> nn.Sequential:
    first = Bottleneck(inputs, inner, outputs, stride)
    return nn.Sequential(first, *(Bottleneck(outputs, inner, outputs, 1) for _ in range(blocks - 1)))
