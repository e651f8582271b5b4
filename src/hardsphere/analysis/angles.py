"""Angles: how much weight HE and m-HE give to a sample (section 3.5), and where features lie on the sphere.

The logit cos(theta) changes with the angle at the rate sin(theta): near the boundary, theta_yy* ~ 90 degrees, a sample
has full weight, and a strong adversarial example with a large theta_yy* has less. m-HE speaks -theta, whose rate is 1
everywhere. `gradient_weight` measures that rate by autograd, beside the closed form, and shows where clean and
adversarial samples lie on the curve.
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
    degrees,
    final_layer,
    flat_features,
    has_feature_norm,
    rival,
    summary,
)
from hardsphere.attacks import pgd
from hardsphere.errors import HardsphereError
from hardsphere.sphere import SphereHead
from hardsphere.threat import Ball


def weight_at(theta: Tensor, angular: bool) -> Tensor:
    """|d logit / d theta| at scale 1, theta in degrees: sin(theta) for HE, 1 for m-HE."""
    return torch.ones_like(theta) if angular else torch.sin(torch.deg2rad(theta))


@dataclass(frozen=True, eq=False)
class GradientWeight:
    """Angles in degrees and gradient weights, float64 of shape (N,), on clean and on adversarial images.

    Attributes:
        angular: whether the head is m-HE.
        own_clean, own_adversarial: theta_y, the angle between the feature and its own class vector.
        pair_clean, pair_adversarial: theta_yy*, the angle to W_y - W_y*; from 90 degrees on, y* has won.
        weight_clean, weight_adversarial: |d logit_y / d theta_y| at scale 1 by autograd through the head, as a part of
            the lengths that it multiplies by. `weight_at` is its closed form.
    """

    angular: bool
    own_clean: Tensor
    own_adversarial: Tensor
    pair_clean: Tensor
    pair_adversarial: Tensor
    weight_clean: Tensor
    weight_adversarial: Tensor

    @property
    def deviation(self) -> float:
        """How far autograd's weight is from the closed form at most; m-HE's guard at theta = 0 shows here."""
        both = ((self.weight_clean, self.own_clean), (self.weight_adversarial, self.own_adversarial))
        return max(float((weight - weight_at(angle, self.angular)).abs().max()) for weight, angle in both)

    def to_dict(self) -> dict[str, Any]:
        """``pair_weight``: the weight section 3.5 gives a sample by its theta_yy*, under HE; under m-HE it is 1."""
        spreads = {}
        for kind in ("clean", "adversarial"):
            pair = getattr(self, f"pair_{kind}")
            spreads[kind] = {
                "theta_own": summary(getattr(self, f"own_{kind}")),
                "theta_pair": summary(pair),
                "weight": summary(getattr(self, f"weight_{kind}")),
                "pair_weight_he": summary(weight_at(pair, angular=False)),
                "beyond_boundary": float((pair > 90).double().mean()),
            }
        return {
            "n": len(self.own_clean),
            "form": "-theta" if self.angular else "cos(theta)",
            "deviation_from_closed_form": self.deviation,
            **spreads,
        }


def gradient_weight(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    steps: int = 10,
    step_size: float | None = None,
    seed: int = 0,
    ids: Tensor | None = None,
    batch: int = 256,
) -> GradientWeight:
    """The weights and angles of clean images and of PGD's last iterates on the model as deployed.

    Args:
        steps: of PGD on the cross-entropy.
        step_size: 2.5 * eps / steps by default.
    """
    layer = final_layer(model)

    def work(part: Part) -> dict[str, Tensor]:
        attack = pgd(model, part.x, part.y, ball, noise=part.noise, steps=steps, step_size=step_size, keep="last")
        target = rival(answers(model, attack.x_adv), part.y)
        found = {}
        for kind, images in (("clean", part.x), ("adversarial", attack.x_adv)):
            with torch.no_grad():
                z = flat_features(model, images)
            found[f"own_{kind}"], found[f"pair_{kind}"] = _angles(layer, z, part.y, target)
            found[f"weight_{kind}"] = _weight(layer, z, part.y)
        return found

    found = collect(model, x, y, work, seed=seed, ids=ids, batch=batch)
    return GradientWeight(_angular(layer), **found)


def _angles(layer: nn.Linear | SphereHead, z: Tensor, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """theta_y and theta_yy* in degrees; in float64, because arccos loses half of the digits near 0."""
    z, vectors = z.double(), class_vectors(layer).double()
    own = F.cosine_similarity(z, vectors[y], dim=1)
    return degrees(own), degrees(F.cosine_similarity(z, vectors[y] - vectors[target], dim=1))


def _weight(layer: nn.Linear | SphereHead, z: Tensor, y: Tensor) -> Tensor:
    """||z|| times the length of the tangential part of grad_z logit_y, without scale and lengths, by autograd."""
    z = z.detach().requires_grad_()
    with torch.enable_grad():
        logits = layer(z).gather(1, y[:, None])
    slope = torch.autograd.grad(logits.sum(), z)[0].double()
    z = z.detach().double()
    direction = F.normalize(z, dim=1)
    tangential = slope - (slope * direction).sum(1, keepdim=True) * direction
    rate = torch.linalg.vector_norm(z, dim=1) * torch.linalg.vector_norm(tangential, dim=1)
    lengths = torch.linalg.vector_norm(class_vectors(layer).double(), dim=1)[y]
    if not has_feature_norm(layer):
        lengths = lengths * torch.linalg.vector_norm(z, dim=1)
    scale = layer.scale if isinstance(layer, SphereHead) else 1.0
    weight: Tensor = rate / (scale * lengths)
    return weight


def _angular(layer: nn.Linear | SphereHead) -> bool:
    return isinstance(layer, SphereHead) and layer.angular


@dataclass(frozen=True, eq=False)
class FeatureGeometry:
    """Where features lie, float64 of shape (N,), angles in degrees.

    Attributes:
        own_clean, own_adversarial: the angle to the sample's own class vector.
        other_clean, other_adversarial: the angle to the nearest other class vector.
        norm_clean, norm_adversarial: ||z||.
        turn: the angle by which the attack turned the feature.
    """

    own_clean: Tensor
    own_adversarial: Tensor
    other_clean: Tensor
    other_adversarial: Tensor
    norm_clean: Tensor
    norm_adversarial: Tensor
    turn: Tensor

    def to_dict(self) -> dict[str, Any]:
        kinds = {
            kind: {
                "own_angle": summary(getattr(self, f"own_{kind}")),
                "other_angle": summary(getattr(self, f"other_{kind}")),
                "angular_margin": summary(getattr(self, f"other_{kind}") - getattr(self, f"own_{kind}")),
                "norm": summary(getattr(self, f"norm_{kind}")),
            }
            for kind in ("clean", "adversarial")
        }
        ratio = summary(self.norm_adversarial / self.norm_clean)
        return {"n": len(self.turn), **kinds, "turn": summary(self.turn), "norm_ratio": ratio}


def feature_geometry(
    model: nn.Module, x: Tensor, y: Tensor, x_adv: Tensor, *, ids: Tensor | None = None, batch: int = 256
) -> FeatureGeometry:
    """Feature angles and norms on clean images and on their adversarial counterparts ``x_adv``."""
    if x_adv.shape != x.shape:
        raise HardsphereError(f"x_adv has the shape {tuple(x_adv.shape)}, but must be {tuple(x.shape)}, as x is.")
    vectors = class_vectors(final_layer(model)).double()

    def work(part: Part) -> dict[str, Tensor]:
        with torch.no_grad():
            clean = flat_features(model, part.x).double()
            adversarial = flat_features(model, x_adv[part.rows].to(part.x)).double()
        found = {"turn": degrees(F.cosine_similarity(clean, adversarial, dim=1))}
        for kind, z in (("clean", clean), ("adversarial", adversarial)):
            cosines = F.normalize(z, dim=1) @ F.normalize(vectors, dim=1).T
            found[f"own_{kind}"] = degrees(cosines.gather(1, part.y[:, None]).squeeze(1))
            found[f"other_{kind}"] = degrees(cosines.scatter(1, part.y[:, None], -torch.inf).amax(1))
            found[f"norm_{kind}"] = torch.linalg.vector_norm(z, dim=1)
        return found

    return FeatureGeometry(**collect(model, x, y, work, ids=ids, batch=batch))
