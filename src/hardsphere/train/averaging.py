"""Averages of the weights along training; the averaged model is the one that is judged and deployed."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hardsphere.config import Config


class Average:
    """No averaging: the deployed model is the trained one."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def after_update(self, model: nn.Module, updates: Tensor) -> None:
        """Take in the weights after an optimiser step; ``updates`` counts the steps so far, on the device."""

    def after_epoch(self, model: nn.Module, epoch: int, clean: Iterable[Tensor]) -> None:
        """Take in the weights after an epoch (from 1); ``clean`` yields clean training images."""


class ExponentialAverage(Average):
    """theta' = decay theta' + (1 - decay) theta after every update, of parameters and BatchNorm statistics alike.

    The decay grows as (1 + t) / (10 + t) up to its value, so that the start does not linger in short runs.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(copy.deepcopy(model).requires_grad_(False))
        self.decay = decay

    @torch.no_grad()
    def after_update(self, model: nn.Module, updates: Tensor) -> None:
        weight = 1 - ((1 + updates) / (10 + updates)).clamp(max=self.decay)
        average, live = _float_tensors(self.model), _float_tensors(model)
        (_move_in_one_pass if _same_layout(average, live) and weight.is_cuda else _move)(average, live, weight)


class StochasticAverage(Average):
    """SWA: the plain mean of the weights at the ends of epochs, from ``start`` on, with BatchNorm measured anew."""

    def __init__(self, model: nn.Module, start: int) -> None:
        super().__init__(copy.deepcopy(model).requires_grad_(False))
        self.start = start

    @torch.no_grad()
    def after_epoch(self, model: nn.Module, epoch: int, clean: Iterable[Tensor]) -> None:
        if epoch < self.start:
            self.model.load_state_dict(model.state_dict())
            return
        torch._foreach_lerp_(_float_tensors(self.model), _float_tensors(model), 1 / (epoch - self.start + 1))
        measure_statistics(self.model, clean)


def make_average(config: Config, model: nn.Module) -> Average:
    """The average that a configuration asks for."""
    if config.ema.decay:
        return ExponentialAverage(model, config.ema.decay)
    if config.swa.start:
        return StochasticAverage(model, config.swa.start)
    return Average(model)


@torch.no_grad()
def measure_statistics(model: nn.Module, images: Iterable[Tensor]) -> None:
    """Set BatchNorm's running statistics to their mean over the images, whatever the batches that they come in.

    A last image that is alone in its batch is left out, as in training: it has no variance.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
    mode = model.training
    model.train()
    seen = 0
    for x in images:
        if seen and len(x) == 1:
            continue
        seen += len(x)
        for norm in norms:
            norm.momentum = len(x) / seen
        model(x)
    model.train(mode)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def _move(average: list[Tensor], live: list[Tensor], weight: Tensor) -> None:
    """average += weight (live - average)."""
    differences = torch._foreach_sub(live, average)
    torch._foreach_mul_(differences, weight)
    torch._foreach_add_(average, differences)


def _move_in_one_pass(average: list[Tensor], live: list[Tensor], weight: Tensor) -> None:
    """The same with a third of the memory traffic, by a kernel that reads the weight on the device.

    SGD with the rate ``weight``, upwards along the gradient ``live`` and with a weight decay of 1, does just this.
    """
    torch._fused_sgd_(
        average,
        live,
        [],
        weight_decay=1.0,
        momentum=0.0,
        lr=weight,
        dampening=0.0,
        nesterov=False,
        maximize=True,
        is_first_step=False,
    )


def _same_layout(some: list[Tensor], others: list[Tensor]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(a.dtype == b.dtype == torch.float32 and a.stride() == b.stride() for a, b in pairs)


def _float_tensors(model: nn.Module) -> list[Tensor]:
    return [value for value in model.state_dict().values() if value.is_floating_point()]
