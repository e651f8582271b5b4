"""The model as attacks ask it on a GPU: a stand-in in half precision, several times faster.

Only the crafting uses it. What counts is always answered by the model itself in float32.
"""

from __future__ import annotations

import copy
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hardsphere.attacks.base import has_direction, levelled, logits_and_gradient
from hardsphere.blocks import compile_kernels, has_blocks, many
from hardsphere.errors import HardsphereError
from hardsphere.evaluate.witness import is_out_of_memory
from hardsphere.runtime import autocast, has_convolutions
from hardsphere.shadow import ALIKE, ALONG, Shadow, departure
from hardsphere.sphere import final_linear

LOST = 0.05
"""The largest share of `lost_gradients` that a stand-in may have: ordinary networks have none."""


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

    It must give the model's answers for ``x`` up to rounding, and the slopes that an attack climbs. A foreign model may
    refuse to be copied, and its layers what is done to them; then less is done, and in the end float32 is there.

    Args:
        x: a few dozen images; half precision may suit all but some.
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
            lost = lost_gradients(half, model, images)[: len(x)].float().mean()
        except Exception as error:
            if is_out_of_memory(error) and not blocks:
                raise  # with fewer images it may do
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            continue
        if away <= ALIKE and lost <= LOST:
            return half
        change = f"its answers change by {100 * away:.0f} %"
        reason = change if away > ALIKE else f"it hides the slopes of {100 * lost:.0f} % of the images"
    return reason


def lost_gradients(half: nn.Module, model: nn.Module, x: Tensor) -> Tensor:
    """Of which images the model's margin has a slope that half precision does not see, or sees elsewhere.

    Where bf16 rounds a saturated unit to its limit, answers are right and the slope is gone: attacks would fail there,
    and the number would flatter.
    """
    with torch.no_grad():
        own, rival = model(x).topk(2, dim=1).indices.split(1, dim=1)

    def lead(logits: Tensor) -> Tensor:
        return logits.gather(1, own) - logits.gather(1, rival)

    expected, seen = (logits_and_gradient(network, x, lead)[2] for network in (model, half))
    along = F.cosine_similarity(levelled(expected).flatten(1), levelled(seen).flatten(1), dim=1)
    return has_direction(expected) & ~(along >= ALONG)


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
