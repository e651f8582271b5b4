"""Gradient weights (section 3.5) and feature geometry against closed forms, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from analysis_models import HEADS, Pixels, Smooth, headed, images
from torch import Tensor

from hardsphere.analysis import adversarial_examples, feature_geometry, gradient_weight
from hardsphere.analysis.angles import weight_at
from hardsphere.errors import HardsphereError
from hardsphere.sphere import SphereHead
from hardsphere.threat import Ball

BALL = Ball("linf", 0.1)


@pytest.mark.parametrize("angular", [False, True])
def test_weight_is_the_slope_of_the_heads_logit_along_a_great_circle(angular: bool) -> None:
    """z(theta) = cos(theta) w + sin(theta) v turns away from the class vector; autograd goes through the real head."""
    head = SphereHead(3, 2, scale=7.0, angular=angular).double()
    w = head.weight[0].detach() / head.weight[0].detach().norm()
    v = torch.linalg.cross(w, torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64))
    v = v / v.norm()
    theta = torch.linspace(5, 175, 35, dtype=torch.float64).requires_grad_()
    angle = torch.deg2rad(theta)
    z = 2.5 * (torch.cos(angle)[:, None] * w + torch.sin(angle)[:, None] * v)
    (slope,) = torch.autograd.grad(head(z)[:, 0].sum(), theta)
    slope_per_radian = slope * 180 / math.pi / 7.0
    torch.testing.assert_close(-slope_per_radian, weight_at(theta.detach(), angular))


def test_weights_of_he_and_mhe_are_sine_and_one() -> None:
    theta = torch.tensor([0.0, 30.0, 90.0, 150.0], dtype=torch.float64)
    torch.testing.assert_close(weight_at(theta, False), torch.tensor([0.0, 0.5, 1.0, 0.5], dtype=torch.float64))
    assert weight_at(theta, True).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("head", HEADS)
def test_measured_weights_meet_the_closed_form(head: str) -> None:
    model, x, y = headed(Smooth(), head), images(9, 3, 2, 2), torch.arange(9) % 5
    found = gradient_weight(model, x, y, BALL, steps=3)
    assert found.angular == (head == "m-HE")
    assert found.deviation < 1e-9
    expected = torch.ones(9, dtype=torch.float64) if head == "m-HE" else torch.sin(torch.deg2rad(found.own_clean))
    torch.testing.assert_close(found.weight_clean, expected)
    assert found.weight_clean.std() > 1e-3 or head == "m-HE"


@pytest.mark.parametrize("head", ["FN", "WN", "HE", "m-HE"])
def test_angles_are_those_of_the_features_and_90_degrees_is_the_boundary(head: str) -> None:
    model, x, ball = headed(Smooth(), head), images(40, 3, 2, 2), Ball("linf", 0.05)
    with torch.no_grad():
        y = model(x).argmax(1)
    found = gradient_weight(model, x, y, ball, steps=3, seed=2)
    x_adv = adversarial_examples(model, x, y, ball, steps=3, seed=2)
    with torch.no_grad():
        z, logits, weight = model.body(x), model(x_adv), model.fc.weight.detach()
    own = torch.acos((z * weight[y]).sum(1) / (z.norm(dim=1) * weight[y].norm(dim=1)))
    torch.testing.assert_close(found.own_clean, torch.rad2deg(own))
    wrong = logits.argmax(1) != y
    assert wrong.any()
    assert not wrong.all()
    assert torch.equal(found.pair_adversarial > 90, wrong)
    assert found.to_dict()["adversarial"]["beyond_boundary"] == pytest.approx(float(wrong.double().mean()))


def polar(radius: list[float], degrees: list[float]) -> Tensor:
    """Images of two pixels, given as points of the plane."""
    angle = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
    return (torch.tensor(radius, dtype=torch.float64)[:, None] * torch.stack([angle.cos(), angle.sin()], 1)).view(
        -1, 1, 1, 2
    )


def test_geometry_of_points_in_the_plane() -> None:
    model = Pixels(torch.tensor([[2.0, 0.0], [0.0, 0.5]], dtype=torch.float64))  # along the two axes
    x, x_adv = polar([0.5, 0.8, 0.4], [10, 40, 80]), polar([0.25, 0.8, 0.6], [50, 30, 60])
    found = feature_geometry(model, x, torch.tensor([0, 0, 1]), x_adv)
    expected = {
        "own_clean": [10, 40, 10],
        "other_clean": [80, 50, 80],
        "own_adversarial": [50, 30, 30],
        "other_adversarial": [40, 60, 60],
        "norm_clean": [0.5, 0.8, 0.4],
        "norm_adversarial": [0.25, 0.8, 0.6],
        "turn": [40, 10, 20],
    }
    for name, values in expected.items():
        torch.testing.assert_close(getattr(found, name), torch.tensor(values, dtype=torch.float64))
    summed = found.to_dict()
    assert summed["clean"]["angular_margin"]["p50"] == pytest.approx(70)
    assert summed["adversarial"]["angular_margin"]["mean"] == pytest.approx((-10 + 30 + 30) / 3)
    assert summed["norm_ratio"]["mean"] == pytest.approx((0.5 + 1 + 1.5) / 3)


def test_geometry_refuses_images_of_another_shape() -> None:
    model = Pixels(torch.eye(2, dtype=torch.float64))
    with pytest.raises(HardsphereError, match="x_adv has the shape"):
        feature_geometry(model, polar([1], [10]), torch.tensor([0]), polar([1, 1], [10, 20]))
