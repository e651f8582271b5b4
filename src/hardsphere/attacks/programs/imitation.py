"""The feature attack in turns: the twin of `hardsphere.attacks.feature_attack`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hardsphere.attacks.base import check_batch, logits_at
from hardsphere.attacks.feature import eligible_guides, watched
from hardsphere.attacks.losses import cross_entropy
from hardsphere.attacks.programs.ascent import Ascent
from hardsphere.attacks.programs.base import Answer, Ask, Program, State, Turn
from hardsphere.noise import Noise
from hardsphere.threat import Ball, per_sample


class Imitation(Ascent):
    """Climbs towards the features of a guide, another one in each run.

    Beside what an ascent has: ``order``, the guides with those that a sample may have first, ``guides``, how many these
    are, and ``wished``, the features of the present one.
    """

    def __init__(
        self,
        ball: Ball,
        guides: Tensor,
        guide_labels: Tensor,
        steps: int,
        step_size: float,
        restarts: int,
        targeted: bool,
        keep: str,
    ) -> None:
        super().__init__(ball, [step_size] * steps, cross_entropy, self._start_of, restarts, None, targeted, keep)
        self.guides, self.guide_labels = guides, guide_labels

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        self.model = model
        with watched(model) as self.caught:
            yield

    def prepare(self, x: Tensor) -> None:
        super().prepare(x)
        logits_at(self.model, self.guides)
        self.features = self.caught[-1].flatten(1).float()

    def start(self, x: Tensor, y: Tensor, noise: Noise, logits: Tensor) -> State:
        order, counts = eligible_guides(y, self.guide_labels, self.targeted)
        state = super().start(x, y, noise, logits) | {"order": order, "guides": counts}
        return state | {"wished": self._wished(state, state["run"])}

    def _start_of(self, x: Tensor, noise: Noise, run: Tensor) -> Tensor:
        return self.ball.random_start(x, noise.fold("feature", run))

    def _wished(self, state: State, run: Tensor) -> Tensor:
        streams, counts = Noise.of_keys(state["keys"]).fold("feature", run), state["guides"]
        drawn = (streams.fold("guide").uniform() * counts).long().clamp_max(counts - 1)
        return self.features[state["order"].gather(1, drawn[:, None]).squeeze(1)]

    def loss(self, logits: Tensor, state: State) -> Tensor:
        return F.cosine_similarity(self.caught[-1].flatten(1).float(), state["wished"], dim=1)

    def turn(self, state: State, answer: Answer, ask: Ask, again: bool) -> Turn:
        turn = super().turn(state, answer, ask, again)
        if again:
            last = per_sample(state["step"] == len(self.lengths), state["wished"])
            turn.new["wished"] = torch.where(last, self._wished(state, turn.new["run"]), state["wished"])
        return turn


def feature_attack(
    ball: Ball,
    *,
    guides: Tensor,
    guide_labels: Tensor,
    steps: int = 50,
    step_size: float | None = None,
    restarts: int = 100,
    targeted: bool = False,
    keep: str = "any",
) -> Program:
    """`hardsphere.attacks.feature_attack` in turns."""
    check_batch(guides, guide_labels)
    length = ball.eps / 8 if step_size is None else step_size
    return Imitation(ball, guides, guide_labels, steps, length, restarts, targeted, keep)
