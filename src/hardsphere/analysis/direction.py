"""Where an attack's step goes: into ||z||, which cannot change the answer, or into cos(theta), which can (eqs. 11, 13).

A first-order attack lowers the margin logit W_yy*.z' = ||W_yy*|| ||z'|| cos(theta'), y* being the class that it arrives
at. Its gradient by x' has two parts,

    ||W_yy*|| cos(theta') grad ||z'||   and   ||W_yy*|| ||z'|| grad cos(theta'),

which are the pull-backs of the radial and of the tangential part of the gradient by z'. Without feature normalisation
a step follows their sum (eq. 11); with it the first part is exactly zero (eq. 13). This measures how much of the step
that first part takes, and what it costs: under l-infinity a step follows signs only, so that a small part may turn
many of them, or none. The split is exact for any head; a bias plays no part in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hardsphere.analysis.common import (
    Part,
    answers,
    class_vectors,
    collect,
    final_layer,
    flat_features,
    has_feature_norm,
    rival,
    summary,
)
from hardsphere.attacks.base import check_settings, levelled, logits_and_gradient
from hardsphere.attacks.losses import cross_entropy
from hardsphere.attacks.pgd import default_step
from hardsphere.sphere import SphereHead
from hardsphere.threat import Ball

_MEASURES = ("norm_share", "removed_share", "agreement", "efficiency", "cosine", "drop", "pure_drop")


@dataclass(frozen=True, eq=False)
class StepDirection:
    """What each step of an attack does, float64 of shape (N, steps): column t is the step from iterate t to t + 1.

    Attributes:
        feature_norm: whether the head has FN.
        norm_share: ||g_norm||^2 / (||g_norm||^2 + ||g_cos||^2), the share of the gradient that goes through ||z||.
        removed_share: the same for W_yy*.z, the head without FN on the same features: what FN removes.
        agreement: the share of pixels on which the gradient has the sign of grad cos(theta).
        efficiency: how much of the largest first-order decrease of cos(theta) the step U_p attains, at most 1; 1 for
            the pure step, along -grad cos(theta).
        cosine: cos(theta_yy*) before the step.
        drop: how far the step lowers cos(theta_yy*), measured by taking it; the projection cuts later steps short.
        pure_drop: how far the pure step of the same length lowers it.
        step_size: the length of the steps.
    """

    feature_norm: bool
    norm_share: Tensor
    removed_share: Tensor
    agreement: Tensor
    efficiency: Tensor
    cosine: Tensor
    drop: Tensor
    pure_drop: Tensor
    step_size: float

    def to_dict(self) -> dict[str, Any]:
        """Spreads over all samples, for the first step, for all steps, and the means of each step."""
        measures = {name: getattr(self, name) for name in _MEASURES}
        return {
            "n": len(self.cosine),
            "feature_norm": self.feature_norm,
            "step_size": self.step_size,
            "first_step": {name: summary(values[:, 0]) for name, values in measures.items()},
            "all_steps": {name: summary(values) for name, values in measures.items()},
            "mean_by_step": {name: _column_means(values) for name, values in measures.items()},
            "relative_drop": _ratio(self.drop.sum(), self.pure_drop.sum()),
        }


def step_direction(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    steps: int = 10,
    step_size: float | None = None,
    ids: Tensor | None = None,
    batch: int = 256,
) -> StepDirection:
    """Split the steps of an attack that starts at the clean image and climbs the cross-entropy of the deployed model.

    At each of its iterates the gradient of the margin logit against y*, the class at the attack's end, is split into
    its two parts, and both the step along the whole and the pure one are tried.

    Args:
        step_size: 2.5 * eps / steps by default.
    """
    check_settings(steps=steps)
    layer = final_layer(model)
    length = default_step(ball, steps) if step_size is None else step_size

    def work(part: Part) -> dict[str, Tensor]:
        iterates = _iterates(model, part, ball, steps, length)
        target = rival(answers(model, iterates[-1]), part.y)
        columns = [_measure(model, layer, here, part, target, ball, length) for here in iterates[:-1]]
        return {name: torch.stack([column[name] for column in columns], dim=1) for name in _MEASURES}

    found = collect(model, x, y, work, ids=ids, batch=batch)
    measured = {name: values.double() for name, values in found.items()}
    return StepDirection(has_feature_norm(layer), **measured, step_size=length)


@dataclass(frozen=True)
class Split:
    """The gradient of the margin logit by the image, in two parts whose sum it is."""

    through_norm: Tensor
    through_cosine: Tensor

    @property
    def whole(self) -> Tensor:
        return self.through_norm + self.through_cosine

    @property
    def share(self) -> Tensor:
        """The part of ||g_norm||^2 + ||g_cos||^2 that goes through ||z||."""
        norm, cosine = (part.flatten(1).double().pow(2).sum(1) for part in (self.through_norm, self.through_cosine))
        return norm / (norm + cosine)


def split_margin(model: nn.Module, x: Tensor, y: Tensor, target: Tensor, without_norm: bool = False) -> Split:
    """Split the gradient of Z_y - Z_target by the image.

    Args:
        without_norm: split W_yy*.z instead, the margin logit of the head without FN, on the same features.
    """
    layer = final_layer(model)
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        z = flat_features(model, x)
    if without_norm:
        vectors = class_vectors(layer)
        slope = vectors[y] - vectors[target]
    else:
        slope = _slope(layer, z, y, target)
    direction = F.normalize(z.detach(), dim=1)
    radial = (slope * direction).sum(1, keepdim=True) * direction
    if has_feature_norm(layer) and not without_norm:
        radial = torch.zeros_like(radial)  # as it is; rounding would leave 1e-8
    norm = torch.autograd.grad(z, x, radial, retain_graph=True)[0]
    cosine = torch.autograd.grad(z, x, slope - radial)[0]
    return Split(norm, cosine)


def _slope(layer: nn.Module, z: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """The gradient of Z_y - Z_target by the feature."""
    z = z.detach().requires_grad_()
    with torch.enable_grad():
        logits = layer(z)
        margin = logits.gather(1, y[:, None]) - logits.gather(1, target[:, None])
    return torch.autograd.grad(margin.sum(), z)[0]


def _iterates(model: nn.Module, part: Part, ball: Ball, steps: int, length: float) -> list[Tensor]:
    """PGD from the clean image, every iterate kept."""
    iterates = [part.x]
    for _ in range(steps):
        _, _, gradient = logits_and_gradient(model, iterates[-1], cross_entropy, part.y)
        iterates.append(ball.project(part.x, ball.step(iterates[-1], levelled(gradient), length)))
    return iterates


def _measure(
    model: nn.Module, layer: nn.Linear | SphereHead, here: Tensor, part: Part, target: Tensor, ball: Ball, length: float
) -> dict[str, Tensor]:
    split = split_margin(model, here, part.y, target)
    raw = split_margin(model, here, part.y, target, without_norm=True) if has_feature_norm(layer) else split
    pair = class_vectors(layer)[part.y] - class_vectors(layer)[target]

    def cosine(images: Tensor) -> Tensor:
        with torch.no_grad():
            return F.cosine_similarity(flat_features(model, images), pair, dim=1)

    def after(gradient: Tensor) -> Tensor:
        return cosine(ball.project(part.x, ball.step(here, -levelled(gradient), length)))

    whole, pure = levelled(split.whole), levelled(split.through_cosine)
    before = cosine(here)
    return {
        "norm_share": split.share,
        "removed_share": raw.share,
        "agreement": (whole.sign() == pure.sign()).flatten(1).double().mean(1),
        "efficiency": (ball.steepest(whole) * pure).flatten(1).sum(1) / ball.dual(pure),
        "cosine": before,
        "drop": before - after(split.whole),
        "pure_drop": before - after(split.through_cosine),
    }


def _column_means(values: Tensor) -> list[float | None]:
    return [summary(column)["mean"] for column in values.T]


def _ratio(above: Tensor, below: Tensor) -> float | None:
    return float(above / below) if float(below) != 0 else None
