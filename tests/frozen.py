"""Frozen networks whose norms do something."""

from __future__ import annotations

import torch
from torch import nn


def trained_norms(model: nn.Module) -> nn.Module:
    """Statistics and parameters as after some training, so that no norm is the identity."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean):
                tensor.data.copy_(torch.randn(tensor.shape, generator=generator))
            module.running_var.copy_(torch.rand(module.running_var.shape, generator=generator) + 0.5)
    return model.eval().requires_grad_(False)
