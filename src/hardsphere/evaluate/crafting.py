"""The model as attacks ask it on a GPU: a stand-in in half precision, several times faster.

Only the crafting uses it. What counts is always answered by the model itself in float32.
"""

from __future__ import annotations

import copy
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hardsphere.blocks import compile_kernels, has_blocks, many
from hardsphere.errors import HardsphereError
from hardsphere.runtime import autocast, has_convolutions
from hardsphere.shadow import ALIKE, ALONG, Shadow, agreement, departure
from hardsphere.sphere import final_linear


class HalfPrecision(nn.Module):
    """A frozen stand-in for a model: it computes in bf16, but for its last layer, and answers in float32.

    Weights are cast once, not in every pass; images and weights are laid out with the channels last, as tensor cores
    want them.

    Args:
        norms: BatchNorm and ReLU are one step; kernels of our own do that, where anything else is torch's.
        blocks: these are one step with the convolutions of a residual block.
    """

    def __init__(self, model: nn.Module, norms: bool = True, blocks: bool = False) -> None:
        super().__init__()
        own = copy.deepcopy(model).eval().requires_grad_(False)
        _make_last_layer_exact(own)
        own.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model = Shadow(own, fold=norms, fuse_norms=norms, fuse_blocks=blocks).network
        self.training = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        with autocast("bf16", x.device):
            return cast(Tensor, self.model(x)).float()


def stand_in(model: nn.Module, x: Tensor) -> HalfPrecision | str:
    """The model in half precision, or in words why nothing of the kind can stand in for it.

    It must give the model's answers for ``x`` up to rounding, and bear a pass backwards. A foreign model may refuse to
    be copied, and its layers what is done to them; then less is done to them, and in the end float32 is there.
    """
    reason = ""
    for norms, blocks in ((True, True), (True, False), (False, False)):
        if blocks and not has_convolutions(x):
            continue
        try:
            half = HalfPrecision(model, norms, blocks)
            images = many(x) if has_blocks(half) else x
            compile_kernels(half, images)
            away = departure(half, model, images)
            along = agreement(half, model, images) if has_blocks(half) else 1.0
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            continue
        if away <= ALIKE and along >= ALONG:
            return half
        reason = f"its answers change by {100 * away:.0f} %"
    return reason


class ExactLinear(nn.Linear):
    """A linear layer that leaves half precision alone: three digits of a logit are too few to attack."""

    def forward(self, z: Tensor) -> Tensor:
        with torch.autocast(z.device.type, enabled=False):
            return F.linear(z.float(), self.weight, self.bias)


def _make_last_layer_exact(model: nn.Module) -> None:
    """Make the last layer, if it is a plain linear one, compute in float32. Hypersphere heads do so already."""
    try:
        last = model.get_submodule(final_linear(model))
    except HardsphereError:
        return
    if type(last) is nn.Linear:
        last.__class__ = ExactLinear
