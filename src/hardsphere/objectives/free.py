"""FreeAT (Shafahi et al., 2019): each backward pass serves the weights and the perturbation at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hardsphere.data import Batch
from hardsphere.noise import Noise
from hardsphere.objectives.base import Learner, Losses, State, Update, hits
from hardsphere.objectives.pgd import PGDTraining


@dataclass(frozen=True)
class FreeTraining(PGDTraining):
    """PGD-AT's objectives, with each batch replayed and one perturbation carried on from replay to replay.

    The perturbation is never reset: it goes over to the next batch and the next epoch, clipped to the new images.

    Attributes:
        replays: how often each batch is trained on in a row.
    """

    replays: int = 8

    @property
    def updates_per_batch(self) -> int:
        return self.replays

    def step(self, learner: Learner, batch: Batch, noise: Noise, state: State, update: Update) -> None:
        del noise  # the perturbation starts at zero and is carried on
        delta = self._perturbation(state, batch.x)
        ball, size = learner.adversary.ball, learner.adversary.step_size
        for _ in range(self.replays):
            x_adv = ball.project(batch.x, batch.x + delta).detach().requires_grad_()

            def losses(x_adv: Tensor = x_adv) -> Losses:
                logits = learner.model(x_adv)
                loss = learner.classification_loss(logits, batch.y)
                return Losses(loss, {"adversarial_accuracy": hits(logits, batch.y)})

            update(losses)  # its backward pass also fills x_adv.grad
            assert x_adv.grad is not None
            with torch.no_grad():
                delta.copy_(ball.project(batch.x, ball.step(x_adv, x_adv.grad, size)) - batch.x)

    def _perturbation(self, state: State, x: Tensor) -> Tensor:
        """The part of the carried perturbation that belongs to a batch of this length."""
        if "delta" not in state:
            state["delta"] = torch.zeros_like(x)
        if len(state["delta"]) < len(x):
            longer = torch.zeros_like(x)
            longer[: len(state["delta"])] = state["delta"]
            state["delta"] = longer
        return state["delta"][: len(x)]
