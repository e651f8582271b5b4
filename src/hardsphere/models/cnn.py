"""A small convolutional network, for digits and for anything that has to run on a CPU."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from hardsphere.models.layers import conv, initialise, pooled


class CNN(nn.Module):
    """Five 3x3 convolutions with batch normalisation, halving the image twice; features of length 4 * width."""

    def __init__(self, width: int, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_unit(in_channels, width),
            *_unit(width, 2 * width, stride=2),
            *_unit(2 * width, 2 * width),
            *_unit(2 * width, 4 * width, stride=2),
            *_unit(4 * width, 4 * width),
        )
        self.fc = nn.Linear(4 * width, num_classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.fc(pooled(self.body(x))))


def _unit(inputs: int, outputs: int, stride: int = 1) -> tuple[nn.Module, ...]:
    return conv(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs), nn.ReLU()
