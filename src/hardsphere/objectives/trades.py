"""TRADES (Zhang et al., 2019): accuracy on clean images, and a surrounding in which the prediction does not change."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hardsphere.data import Batch
from hardsphere.noise import Noise
from hardsphere.objectives.base import Learner, Losses, Objective, hits
from hardsphere.sphere import at_least_float32


def divergence(log_adversarial: Tensor, log_clean: Tensor) -> Tensor:
    """KL(f(x) || f(x')) of each sample from log-probabilities; in log space, so that no probability underflows."""
    return F.kl_div(log_adversarial, log_clean, reduction="none", log_target=True).sum(dim=1)


@dataclass(frozen=True)
class Trades(Objective):
    """L_A = KL(f(x) || f(x')); L_T = CE^m(f(x), y) + beta KL(f(x) || f(x*)) (Table 1).

    The paper's table writes the cross-entropy CE(f(x'), f(x)). It has the same gradient for the adversary, since the
    entropy of f(x) does not depend on x', but another one for training, where f(x) is not held fixed; TRADES itself and
    the released code use KL.
    """

    beta: float = 6.0

    def craft(self, learner: Learner, batch: Batch, noise: Noise) -> Tensor:
        adversary = learner.adversary
        with torch.no_grad(), learner.victim() as model:
            speak = learner.fused(lambda x: adversary.logits(model, learner.head, x).log_softmax(dim=1))
            target = speak(batch.x)
        return learner.maximise(lambda logits: divergence(logits.log_softmax(dim=1), target), batch.x, noise)

    def losses(self, learner: Learner, batch: Batch, x_adv: Tensor) -> Losses:
        # Two forwards, not one on both halves: BatchNorm must not mix clean with adversarial statistics.
        clean, adversarial = at_least_float32(learner.model(batch.x)), at_least_float32(learner.model(x_adv))
        change = divergence(adversarial.log_softmax(dim=1), clean.log_softmax(dim=1))
        return Losses(
            learner.classification_loss(clean, batch.y) + self.beta * change,
            {
                "clean_accuracy": hits(clean, batch.y),
                "adversarial_accuracy": hits(adversarial, batch.y),
                "divergence": change.detach(),
            },
        )
