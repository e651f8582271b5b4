"""The model as attacks ask it on a GPU: a copy in half precision, several times faster.

Only the crafting uses it. What counts is always answered by the model itself in float32.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hardsphere.errors import HardsphereError
from hardsphere.runtime import autocast
from hardsphere.sphere import final_linear


class HalfPrecision(nn.Module):
    """A copy of a model that computes in bf16, but for its last layer, and answers in float32.

    The weights of convolutions and linear layers are cast once, not in every pass; images and weights are laid out
    with the channels last, as tensor cores want them. BatchNorm, an affine step in eval mode, has a backward pass to
    match.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = _exact_last_layer(copy.deepcopy(model).eval().requires_grad_(False))
        self.training = False
        last = _last_layer(self.model)
        for module in self.model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear) and module is not last:
                module.to(torch.bfloat16)
            if type(module) is nn.BatchNorm2d and module.running_var is not None:
                AffineNorm.become(module)
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        with autocast("bf16", x.device):
            return cast(Tensor, self.model(x)).float()


class ExactLinear(nn.Linear):
    """A linear layer that leaves half precision alone: three digits of a logit are too few to attack."""

    def forward(self, z: Tensor) -> Tensor:
        with torch.autocast(z.device.type, enabled=False):
            return F.linear(z.float(), self.weight, self.bias)


class AffineNorm(nn.BatchNorm2d):
    """BatchNorm in eval mode whose backward pass is one multiplication; torch's own computes as if in training."""

    slope: Tensor

    @classmethod
    def become(cls, norm: nn.BatchNorm2d) -> None:
        """Turn a layer into one of these where it stands."""
        assert norm.running_var is not None
        slope = (norm.running_var + norm.eps).rsqrt()
        slope = slope if norm.weight is None else slope * norm.weight
        norm.register_buffer("slope", slope.view(1, -1, 1, 1).to(torch.bfloat16))
        norm.__class__ = cls

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad:
            return super().forward(x)
        return cast(Tensor, _Affine.apply(x, self))  # type: ignore[no-untyped-call]


class _Affine(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, norm: AffineNorm) -> Tensor:
        context.slope = norm.slope.to(x.dtype)
        return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * context.slope, None


def _last_layer(model: nn.Module) -> nn.Module | None:
    try:
        return model.get_submodule(final_linear(model))
    except HardsphereError:
        return None


def _exact_last_layer(model: nn.Module) -> nn.Module:
    """Make the last layer, if it is a plain linear one, compute in float32. Hypersphere heads do so already."""
    last = _last_layer(model)
    if type(last) is nn.Linear:
        last.__class__ = ExactLinear
    return model
