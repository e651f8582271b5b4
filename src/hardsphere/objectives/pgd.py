"""PGD-AT (Madry et al., 2018): train on the worst case that projected gradient descent finds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hardsphere.data import Batch
from hardsphere.noise import Noise
from hardsphere.objectives.base import Learner, Losses, Objective, hits, label_cross_entropy


@dataclass(frozen=True)
class PGDTraining(Objective):
    """L_A = CE(f(x'), y); L_T = CE^m(f(x*), y) (Table 1)."""

    def craft(self, learner: Learner, batch: Batch, noise: Noise) -> Tensor:
        return learner.maximise(label_cross_entropy(batch.y), batch.x, noise)

    def losses(self, learner: Learner, batch: Batch, x_adv: Tensor) -> Losses:
        logits = learner.model(x_adv)
        return Losses(learner.classification_loss(logits, batch.y), {"adversarial_accuracy": hits(logits, batch.y)})
