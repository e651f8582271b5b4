"""Models seen through another forward pass, for attacks: each view shares the model's parameters, buffers and mode.

A view is a surrogate to craft on. What is found there counts only if the model itself, or for a randomised one its
expectation, is broken by it.
"""

from __future__ import annotations

from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from hardsphere.attacks.base import check_settings
from hardsphere.sphere import final_linear


class ExpectationView(nn.Module):
    """A randomised model whose logits are the mean over several forward passes."""

    def __init__(self, model: nn.Module, samples: int) -> None:
        super().__init__()
        self.model = model
        self.samples = samples
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        total = cast(Tensor, self.model(x)).float()
        for _ in range(self.samples - 1):
            total = total + self.model(x).float()
        return total / self.samples


class FeatureNormalisedView(nn.Module):
    """A model whose final layer is given z / ||z|| instead of z."""

    def __init__(self, model: nn.Module, scale: float) -> None:
        super().__init__()
        self.model = model
        self.scale = scale
        self.training = model.training
        self._final = final_linear(model)

    def _normalise(self, layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor]:
        z = inputs[0]
        return ((self.scale * F.normalize(z.float(), dim=-1)).to(z.dtype),)

    def forward(self, x: Tensor) -> Tensor:
        # The hook lives for this pass only: outside the view the model is the one that was trained.
        hook = self.model.get_submodule(self._final).register_forward_pre_hook(self._normalise)
        try:
            return cast(Tensor, self.model(x))
        finally:
            hook.remove()


def expectation(model: nn.Module, samples: int) -> nn.Module:
    """The model whose gradients are expectations over its own randomness (Athalye et al., 2018).

    The randomness is the model's own, so outcomes repeat only as far as the model's generator is seeded.

    Args:
        samples: forward passes per answer; 1 gives the model itself.
    """
    check_settings(samples=samples)
    return model if samples == 1 else ExpectationView(model, samples)


def feature_normalised(model: nn.Module, scale: float = 1.0) -> nn.Module:
    """The model with feature normalisation (FN) inside the attack only, though trained without (the paper's Table 7).

    Args:
        scale: the length that features are given; the paper does not state one, and 1 is plain FN.
    """
    return FeatureNormalisedView(model, scale)
