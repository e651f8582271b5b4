"""Adversarial examples of one model on another (the paper's Fig. 4)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hardsphere import attacks as library
from hardsphere.analysis.common import PAPER_STEP, Part, accuracy, collect, observed, some, still_right
from hardsphere.errors import HardsphereError
from hardsphere.evaluate import witness
from hardsphere.evaluate.binding import view as view_of
from hardsphere.threat import Ball


@dataclass(frozen=True, eq=False)
class TransferMatrix:
    """Every model on the adversarial examples of every other.

    Attributes:
        names: the models.
        attacks: such as ``"pgd-20"``.
        view: what the attack saw of the source: ``"deployed"``, or ``"paper"`` for raw cosines.
        right: (attack, source, target) -> whether the target is right on what was crafted on the source, (N,).
        clean: target -> whether it is right on the clean images.
    """

    names: tuple[str, ...]
    attacks: tuple[str, ...]
    view: str
    right: Mapping[tuple[str, str, str], Tensor]
    clean: Mapping[str, Tensor]

    def accuracies(self, attack: str) -> Tensor:
        """Accuracy by source (row) and target (column); the diagonal is white-box."""
        rows = [[self.right[attack, source, target] for target in self.names] for source in self.names]
        return torch.tensor([[float(right.double().mean()) for right in row] for row in rows], dtype=torch.float64)

    def to_dict(self) -> dict[str, Any]:
        def cells(attack: str) -> dict[str, Any]:
            return {
                source: {
                    target: {**accuracy(self.right[attack, source, target]), "white_box": source == target}
                    for target in self.names
                }
                for source in self.names
            }

        return {
            "n": len(next(iter(self.clean.values()))),
            "view": self.view,
            "clean": {name: accuracy(right) for name, right in self.clean.items()},
            "attacks": {attack: cells(attack) for attack in self.attacks},
        }


def transfer_matrix(
    models: Mapping[str, nn.Module],
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    attacks: Sequence[str] = ("pgd-20", "mim-20"),
    step_size: float | None = None,
    view: str = "deployed",
    seed: int = 0,
    ids: Tensor | None = None,
    batch: int = 256,
) -> TransferMatrix:
    """Craft on each model, keep the last iterate, and ask all of them; they must be on one device.

    Args:
        attacks: ``"pgd-K"``, ``"mim-K"`` or ``"bim-K"`` with K steps.
        step_size: by default that of the paper's evaluations, .003 at eps .031.
        view: what the attack sees of the source, as in an entry of a suite.
    """
    chosen = {name: _attack(name) for name in attacks}
    size = PAPER_STEP * ball.eps if step_size is None else step_size
    right: dict[tuple[str, str, str], Tensor] = {}
    clean: dict[str, Tensor] = {}
    for source, model in some(models).items():
        seen = view_of(model, view)

        def work(part: Part, source: str = source, seen: nn.Module = seen) -> dict[str, Tensor]:
            found = {"clean": witness.clean_predictions(models[source], part.x) == part.y}
            for name, (function, steps) in chosen.items():
                proposal = function(
                    seen, part.x, part.y, ball, noise=part.noise.fold(name), steps=steps, step_size=size, keep="last"
                )
                for target, judge in models.items():
                    with observed(judge):
                        found[f"{name} {target}"] = still_right(judge, part, proposal.x_adv, ball)
            return found

        found = collect(model, x, y, work, seed=seed, ids=ids, batch=batch)
        clean[source] = found["clean"]
        right.update({(name, source, target): found[f"{name} {target}"] for name in chosen for target in models})
    return TransferMatrix(tuple(models), tuple(chosen), view, right, clean)


def _attack(name: str) -> tuple[Any, int]:
    """``"pgd-20"`` -> the function and its number of steps."""
    match = re.fullmatch(r"(pgd|mim|bim)-([1-9]\d*)", name)
    if match is None:
        raise HardsphereError(f"'{name}' is no attack that can be transferred: write pgd-20, mim-20 or bim-20.")
    return getattr(library, match[1]), int(match[2])
