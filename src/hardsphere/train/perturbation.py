"""AWP, adversarial weight perturbation (Wu et al., 2020): train where the weights themselves are at their worst."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def worst_weights(model: nn.Module, loss: Callable[[], Tensor], gamma: float) -> Iterator[None]:
    """Move each weight matrix by gamma of its norm up the loss; put all weights back on leaving.

    The original takes one ascent step of a copy of the model and scales the difference to ||w||. A single step's
    difference is the gradient times a rate, and the scaling removes the rate: so no copy is needed.
    """
    weights = [weight for weight in model.parameters() if weight.requires_grad and weight.dim() > 1]
    with _statistics_kept(model):
        gradients: tuple[Tensor | None, ...] = torch.autograd.grad(loss(), weights, allow_unused=True)
    originals = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is None:  # of a layer that plays no part, such as a second classifier
                continue
            weight.add_(gradient * (gamma * weight.norm() / (gradient.norm() + 1e-20)))
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, original in zip(weights, originals, strict=True):
                weight.copy_(original)


@contextmanager
def _statistics_kept(model: nn.Module) -> Iterator[None]:
    """A train-mode pass that leaves BatchNorm's running statistics alone."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    kept = [(norm, {name: value.clone() for name, value in norm.named_buffers()}) for norm in norms]
    try:
        yield
    finally:
        with torch.no_grad():
            for norm, buffers in kept:
                for name, value in buffers.items():
                    norm.get_buffer(name).copy_(value)
