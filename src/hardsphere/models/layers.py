"""What the families share: bias-free convolutions, global pooling, one initialisation."""

from __future__ import annotations

import math

from torch import Tensor, nn


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A bias-free convolution that keeps the image size at stride 1; a batch normalisation beside it has the bias."""
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)


def pooled(x: Tensor) -> Tensor:
    """Each channel's average over the image, so that a network takes images of any size."""
    return x.mean(dim=(2, 3))


def initialise(network: nn.Module) -> None:
    """Convolutions N(0, sqrt(2 / (k^2 C_out))), batch normalisation at identity, a linear layer without its bias."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.normal_(module.weight, 0.0, math.sqrt(2 / (math.prod(module.kernel_size) * module.out_channels)))
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
