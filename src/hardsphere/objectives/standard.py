"""Ordinary training on clean images: the control that every robust number is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from hardsphere.data import Batch
from hardsphere.noise import Noise
from hardsphere.objectives.base import Learner, Losses, Objective, hits


@dataclass(frozen=True)
class Standard(Objective):
    """L_T = CE^m(f(x), y), no adversary."""

    @property
    def selected_by(self) -> Literal["robust", "clean"]:
        """Its robust accuracy is noise near 0, which a network that has hardly been trained wins."""
        return "clean"

    def craft(self, learner: Learner, batch: Batch, noise: Noise) -> Tensor:
        del learner, noise
        return batch.x

    def losses(self, learner: Learner, batch: Batch, x_adv: Tensor) -> Losses:
        logits = learner.model(x_adv)
        return Losses(learner.classification_loss(logits, batch.y), {"clean_accuracy": hits(logits, batch.y)})
