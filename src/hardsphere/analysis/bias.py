"""Which classes an untargeted attack prefers, and how long the class vectors have grown (eq. 16).

Untargeted adversarial examples follow the similarity of the classes, so their labels are unbalanced, and without weight
normalisation eq. 16 lets ||W_l|| grow with the number and the ease of a class's samples. Here are both: the lengths of
the class vectors, as trained and as the head uses them, and where margin-PGD takes the samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hardsphere.analysis.common import Part, accuracy, answers, collect, final_layer, rival
from hardsphere.attacks import pgd
from hardsphere.attacks.losses import margin
from hardsphere.evaluate import witness
from hardsphere.sphere import SphereHead
from hardsphere.threat import Ball


@dataclass(frozen=True, eq=False)
class ClassBias:
    """Class vectors and attack targets.

    Attributes:
        weight_norm: whether the head has WN.
        raw_norms: ||W_l|| of the parameters, (classes,).
        norms: the length of each class vector as the head uses it; 1 under WN.
        labels: the true class of each sample, (N,).
        clean: the class predicted on the clean image.
        predicted: the class predicted on the adversarial one; -1 if the model answers NaN.
        aimed: y*, the largest wrong class there: the predicted one where the sample is broken, else where it was going.
    """

    weight_norm: bool
    raw_norms: Tensor
    norms: Tensor
    labels: Tensor
    clean: Tensor
    predicted: Tensor
    aimed: Tensor

    @property
    def broken(self) -> Tensor:
        """The samples that are right when clean and wrong under attack."""
        return (self.clean == self.labels) & (self.predicted != self.labels)

    @property
    def confusion(self) -> Tensor:
        """Samples by true (row) and predicted (column) class under attack."""
        seen = self.predicted >= 0
        return _count(self.labels[seen], self.predicted[seen], len(self.norms))

    @property
    def targets(self) -> Tensor:
        """How many samples the attack took to each class: broken ones only."""
        hit = self.broken & (self.predicted >= 0)
        return torch.bincount(self.predicted[hit], minlength=len(self.norms))

    @property
    def aims(self) -> Tensor:
        """Samples by true class (row) and by y* (column), broken or not; its diagonal is zero."""
        return _count(self.labels, self.aimed, len(self.norms))

    def to_dict(self) -> dict[str, Any]:
        return {
            "n": len(self.labels),
            "weight_norm": self.weight_norm,
            "clean": accuracy(self.clean == self.labels),
            "robust": accuracy((self.clean == self.labels) & ~self.broken),
            "raw_norms": self.raw_norms.tolist(),
            "norms": self.norms.tolist(),
            "norms_max_over_min": _max_over_min(self.norms),
            "norms_variation": float(self.norms.std(correction=0) / self.norms.mean()),
            "targets": self.targets.tolist(),
            "targets_imbalance": imbalance(self.targets),
            "targets_norms_correlation": _correlation(self.norms, self.targets.double()),
            "aims_imbalance": imbalance(self.aims.sum(0)),
            "aims_entropy_given_class": _conditional_entropy(self.aims),
            "confusion": self.confusion.tolist(),
        }


def class_bias(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    steps: int = 20,
    step_size: float | None = None,
    seed: int = 0,
    ids: Tensor | None = None,
    batch: int = 256,
) -> ClassBias:
    """Attack every sample by untargeted PGD on the margin, which no scale of the logits can mislead, and see where to.

    Args:
        steps: of PGD; its last iterate counts.
        step_size: 2.5 * eps / steps by default.
    """
    layer = final_layer(model)

    def work(part: Part) -> dict[str, Tensor]:
        attack = pgd(
            model, part.x, part.y, ball, noise=part.noise, steps=steps, step_size=step_size, loss=margin, keep="last"
        )
        _, predicted, _, x_adv = witness.confirm(model, part.x, part.y, attack.x_adv, ball)
        return {
            "labels": part.y,
            "clean": witness.clean_predictions(model, part.x),
            "predicted": predicted,
            "aimed": rival(answers(model, x_adv), part.y),
        }

    found = collect(model, x, y, work, seed=seed, ids=ids, batch=batch)
    raw = torch.linalg.vector_norm(layer.weight.detach().double().cpu(), dim=1)
    weight_norm = isinstance(layer, SphereHead) and layer.weight_norm
    return ClassBias(weight_norm, raw, torch.ones_like(raw) if weight_norm else raw, **found)


def imbalance(counts: Tensor) -> dict[str, Any]:
    """How far a histogram is from flat.

    ``entropy`` is a part of that of equal counts: 1 if all classes are hit alike, 0 if only one is. A few samples give
    less than 1 by chance alone, so compare it only between equal counts.
    """
    total = int(counts.sum())
    return {
        "count": total,
        "entropy": _entropy(counts) / math.log(len(counts)) if total else None,
        "largest_share": int(counts.max()) / total if total else None,
        "max_over_min": _max_over_min(counts.double()) if total else None,
    }


def _entropy(counts: Tensor) -> float:
    shares = counts[counts > 0].double() / counts.sum()
    return float(-(shares * shares.log()).sum())


def _conditional_entropy(counts: Tensor) -> float | None:
    """The entropy of the column given the row, as a part of log(classes - 1): 1 if every class goes to all others."""
    total, classes = int(counts.sum()), len(counts)
    if total == 0 or classes < 3:
        return None
    rows = [row for row in counts if int(row.sum())]
    return sum(_entropy(row) * int(row.sum()) / total for row in rows) / math.log(classes - 1)


def _max_over_min(values: Tensor) -> float | None:
    """None where the smallest is zero: a ratio would be infinite, which JSON cannot hold."""
    return float(values.max() / values.min()) if float(values.min()) > 0 else None


def _correlation(first: Tensor, second: Tensor) -> float | None:
    """Pearson's; none if one of the two does not vary."""
    first, second = first - first.mean(), second - second.mean()
    scale = float(first.norm() * second.norm())
    return float(first @ second) / scale if scale > 0 else None


def _count(rows: Tensor, columns: Tensor, classes: int) -> Tensor:
    return torch.bincount(rows * classes + columns, minlength=classes * classes).view(classes, classes)
