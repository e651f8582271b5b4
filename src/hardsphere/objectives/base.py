"""What a training framework is: a pair of objectives (the paper's Table 1) and how one step of them is run.

An `Objective` owns what the adversary maximises (L_A) and what training minimises (L_T), returns per-sample losses and
what it wants logged, and declares its own options as fields. It knows nothing of devices, optimisers or files. A new
framework is one more file in this folder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from hardsphere.attacks.base import attacking
from hardsphere.attacks.pgd import Fuse, as_it_is, ascend
from hardsphere.data import Batch
from hardsphere.noise import Noise
from hardsphere.sphere import SphereHead, at_least_float32, margin_cross_entropy
from hardsphere.threat import Ball

State = dict[str, Tensor]
"""What an objective remembers from batch to batch; it is saved with the checkpoint."""


@dataclass(frozen=True)
class Losses:
    """The training loss of each sample, and numbers per sample to be averaged and logged."""

    per_sample: Tensor
    logged: dict[str, Tensor] = field(default_factory=dict)


class Update(Protocol):
    """One optimiser step on the mean of the losses; it may evaluate them more than once (weight perturbation)."""

    def __call__(self, losses: Callable[[], Losses]) -> None: ...


@dataclass(frozen=True)
class Adversary:
    """How the inner maximisation is run.

    Attributes:
        scale: the scale at which the adversary sees the logits; the head's own if None.
        start: ``"uniform"`` in the ball, ``"gaussian"`` (0.001 * N(0, 1), the released code) or ``"clean"``.
        bn: the mode of BatchNorm during the attack, ``"eval"`` or ``"train"``.
    """

    ball: Ball
    steps: int
    step_size: float
    scale: float | None = None
    start: str = "uniform"
    bn: str = "eval"

    def first_point(self, x: Tensor, noise: Noise) -> Tensor:
        """x^(0)."""
        if self.start == "uniform":
            return self.ball.random_start(x, noise)
        if self.start == "gaussian":
            return x + 0.001 * noise.normal(*x.shape[1:]).to(x.dtype)
        return x

    def logits(self, model: nn.Module, head: SphereHead | None, x: Tensor) -> Tensor:
        """The logits as the adversary sees them."""
        logits = at_least_float32(model(x))
        if self.scale is None or head is None:
            return logits
        return logits * (self.scale / head.scale)


@dataclass(frozen=True)
class Learner:
    """The model in training, with what every objective asks of it.

    Attributes:
        fused: what makes the pieces of a step fast, such as `torch.compile`.
        stand_in: gives what is attacked in place of the model, up to date with it; the model itself if None.
    """

    model: nn.Module
    head: SphereHead | None
    adversary: Adversary
    label_smoothing: float = 0.0
    fused: Fuse = as_it_is
    stand_in: Callable[[], nn.Module] | None = None

    def classification_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """L^m_CE of each sample (eq. 6)."""
        return margin_cross_entropy(self.head, logits, y, self.label_smoothing)

    @contextmanager
    def victim(self) -> Iterator[nn.Module]:
        """What the adversary attacks: in its mode of BatchNorm, and without gradients by the weights."""
        if self.stand_in is not None:
            yield self.stand_in()
            return
        with attacking(self.model, self.adversary.bn):
            yield self.model

    def maximise(self, loss: Callable[[Tensor], Tensor], x: Tensor, noise: Noise) -> Tensor:
        """x* = argmax of the loss of the adversary's logits over the ball (eq. 3), by projected gradient steps."""
        adversary = self.adversary
        start = self.fused(lambda x, keys: adversary.first_point(x, Noise.of_keys(keys)))
        with self.victim() as model:
            return ascend(
                lambda x_adv: loss(adversary.logits(model, self.head, x_adv)),
                x,
                start(x, noise.keys),
                adversary.ball,
                adversary.steps,
                adversary.step_size,
                self.fused,
            )


@dataclass(frozen=True)
class Objective(ABC):
    """A training framework: L_A, L_T, and how a step is run. Subclasses add their options as fields."""

    @property
    def updates_per_batch(self) -> int:
        """How many optimiser steps one batch makes."""
        return 1

    @property
    def collapse_drop(self) -> float | None:
        """How much PGD accuracy may fall within an epoch before training is rolled back; None for no such check."""
        return None

    @property
    def selected_by(self) -> Literal["robust", "clean"]:
        """By which accuracy on held-out images the best epoch is chosen."""
        return "robust"

    @abstractmethod
    def craft(self, learner: Learner, batch: Batch, noise: Noise) -> Tensor:
        """The adversarial examples x* of a batch: the maximum of L_A."""

    @abstractmethod
    def losses(self, learner: Learner, batch: Batch, x_adv: Tensor) -> Losses:
        """L_T of each sample."""

    def step(self, learner: Learner, batch: Batch, noise: Noise, state: State, update: Update) -> None:
        """Train on one batch: first the adversary, then the update."""
        del state  # for frameworks that remember something from batch to batch
        x_adv = self.craft(learner, batch, noise)
        update(lambda: self.losses(learner, batch, x_adv))


def hits(logits: Tensor, y: Tensor) -> Tensor:
    """1.0 where the prediction is right; under mixed labels, where it is the label of the larger share."""
    label = y.argmax(dim=1) if y.is_floating_point() else y
    return (logits.detach().argmax(dim=1) == label).float()


def label_cross_entropy(y: Tensor) -> Callable[[Tensor], Tensor]:
    """L_CE(f(x'), y) as a function of the logits: the adversarial objective of PGD-AT and ALP, without margin."""
    return lambda logits: torch.nn.functional.cross_entropy(logits, y, reduction="none")
