"""ALP, adversarial logit pairing (Kannan et al., 2018): clean and adversarial images must say the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from hardsphere.data import Batch
from hardsphere.objectives.base import Learner, Losses, hits
from hardsphere.objectives.pgd import PGDTraining
from hardsphere.sphere import at_least_float32


@dataclass(frozen=True)
class LogitPairing(PGDTraining):
    """L_T = alpha CE^m(f(x), y) + (1 - alpha) CE^m(f(x*), y) + weight ||W.(z - z*)||_2 (Table 1); L_A as PGD-AT.

    Attributes:
        alpha: share of the clean images in the classification loss.
        weight: lambda, the weight of the pairing term.
        pairing: ``"l2"``, the norm of each sample's difference (the paper), or ``"mse"``, the mean of its squares (the
            released code). Both compare the logits at scale 1.
    """

    alpha: float = 0.5
    weight: float = 0.5
    pairing: Literal["l2", "mse"] = "l2"

    def losses(self, learner: Learner, batch: Batch, x_adv: Tensor) -> Losses:
        # Two forwards, not one on both halves: BatchNorm must not mix clean with adversarial statistics.
        clean, adversarial = learner.model(batch.x), learner.model(x_adv)
        classification = self.alpha * learner.classification_loss(clean, batch.y) + (
            1 - self.alpha
        ) * learner.classification_loss(adversarial, batch.y)
        pairing = self._pairing(learner, at_least_float32(clean) - at_least_float32(adversarial))
        return Losses(
            classification + self.weight * pairing,
            {
                "clean_accuracy": hits(clean, batch.y),
                "adversarial_accuracy": hits(adversarial, batch.y),
                "pairing": pairing.detach(),
            },
        )

    def _pairing(self, learner: Learner, difference: Tensor) -> Tensor:
        if learner.head is not None:
            difference = difference / learner.head.scale
        if self.pairing == "mse":
            return difference.pow(2).mean(dim=1)
        # The norm has no gradient at zero; the guard is far below any difference that matters.
        return difference.pow(2).sum(dim=1).add(1e-12).sqrt()
