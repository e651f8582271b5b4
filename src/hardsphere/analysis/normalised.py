"""Feature normalisation inside the attack only, on a model trained without it (the paper's Table 7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hardsphere.analysis.common import PAPER_STEP, Part, accuracy, collect, difference, flat_features, still_right
from hardsphere.attacks import feature_normalised, pgd
from hardsphere.errors import HardsphereError
from hardsphere.evaluate import witness
from hardsphere.threat import Ball

VARIANTS = ("without", "fn", "fn_same_length")
"""No FN; FN as the paper writes it, which also changes the logits' temperature; FN at the features' mean length."""


@dataclass(frozen=True, eq=False)
class NormalisedAttack:
    """Who withstands PGD-k with and without feature normalisation inside the attack.

    Attributes:
        steps: the numbers of steps, k.
        step_size: the length of each.
        length: the mean of ||z|| on the clean images.
        clean: whether the model is right on the clean image, (N,).
        right: (k, variant of `VARIANTS`) -> whether it is right under attack, (N,).
    """

    steps: tuple[int, ...]
    step_size: float
    length: float
    clean: Tensor
    right: Mapping[tuple[int, str], Tensor]

    def to_dict(self) -> dict[str, Any]:
        rows = {}
        for k in self.steps:
            row: dict[str, Any] = {variant: accuracy(self.right[k, variant]) for variant in VARIANTS}
            for variant in VARIANTS[1:]:
                row[f"{variant}_minus_without"] = difference(self.right[k, variant], self.right[k, "without"])
            rows[f"pgd-{k}"] = row
        constants = {"step_size": self.step_size, "mean_feature_length": self.length}
        return {"n": len(self.clean), **constants, "clean": accuracy(self.clean), "attacks": rows}


def normalised_attack(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    steps: Sequence[int] = (1, 2),
    step_size: float | None = None,
    random_start: bool = True,
    seed: int = 0,
    ids: Tensor | None = None,
    batch: int = 256,
) -> NormalisedAttack:
    """Craft on the model as it is and through FN, judge on the model as it is; both start from the same noise.

    FN at unit length also flattens the softmax and lets the layer's bias weigh more, so that the cross-entropy climbs
    another mixture of classes. The third variant gives features their mean length: it changes little but the direction
    of the step, which is what Table 7 is about.

    Args:
        step_size: the paper gives none for its Table 7; by default that of its evaluations, .003 at eps .031.
    """
    if not steps:
        raise HardsphereError("No number of steps was given: name at least one, such as (1, 2).")
    size = PAPER_STEP * ball.eps if step_size is None else step_size
    length = float(collect(model, x, y, lambda part: _lengths(model, part), ids=ids, batch=batch)["length"].mean())
    seen = {
        "without": model,
        "fn": feature_normalised(model),
        "fn_same_length": feature_normalised(model, scale=length),
    }

    def work(part: Part) -> dict[str, Tensor]:
        found = {"clean": witness.clean_predictions(model, part.x) == part.y}
        for k in steps:
            for variant in VARIANTS:
                attack = pgd(
                    seen[variant],
                    part.x,
                    part.y,
                    ball,
                    noise=part.noise,
                    steps=k,
                    step_size=size,
                    random_start=random_start,
                    keep="last",
                )
                found[f"{k} {variant}"] = still_right(model, part, attack.x_adv, ball)
        return found

    found = collect(model, x, y, work, seed=seed, ids=ids, batch=batch)
    right = {(k, variant): found[f"{k} {variant}"] for k in steps for variant in VARIANTS}
    return NormalisedAttack(tuple(steps), size, length, found["clean"], right)


def _lengths(model: nn.Module, part: Part) -> dict[str, Tensor]:
    with torch.no_grad():
        return {"length": torch.linalg.vector_norm(flat_features(model, part.x).double(), dim=1)}
