"""Gradient attacks against foolbox, an independent implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gradient_table import broken, trained

from hardsphere import attacks
from hardsphere.noise import Noise
from hardsphere.threat import Ball

pytestmark = [pytest.mark.check, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def foolbox() -> Any:
    return pytest.importorskip("foolbox")


@pytest.mark.parametrize(
    ("norm", "eps", "name"), [("linf", 0.012, "LinfPGD"), ("l2", 0.1, "L2PGD"), ("linf", 0.012, "FGSM")]
)
def test_projected_gradient_descent(foolbox: Any, norm: str, eps: float, name: str) -> None:
    """From the clean image and to the last step both are deterministic, so the images agree, not only the numbers."""
    model, x, y = trained()
    ball, noise = Ball(norm, eps), Noise(0, torch.arange(len(x)))
    other = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
    if name == "FGSM":
        theirs = foolbox.attacks.FGSM()
        ours = attacks.fgsm(model, x, y, ball, noise=noise, keep="last")
    else:
        theirs = getattr(foolbox.attacks, name)(rel_stepsize=0.125, steps=20, random_start=False)
        ours = attacks.bim(model, x, y, ball, noise=noise, keep="last")
    _, images, success = theirs(other, x, y, epsilons=eps)
    same = (ours.x_adv - images).abs().flatten(1).amax(1) < 1e-4
    assert float(same.float().mean()) > 0.97  # a sign may turn where a gradient is zero to the last bit
    assert int((broken(ours) != success).sum()) <= 1
    assert 10 < int(success.sum()) < 118


def test_carlini_and_wagner_l2(foolbox: Any) -> None:
    model, x, y = trained()
    x, y = x[:32], y[:32]
    ours = attacks.carlini_l2(
        model, x, y, Ball("l2", 1.0), noise=Noise(0, torch.arange(32)), steps=300, step_size=5e-3, minimise=True
    )
    theirs = foolbox.attacks.L2CarliniWagnerAttack(binary_search_steps=9, steps=300, stepsize=5e-3, initial_const=1e-2)
    other = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
    _, images, success = theirs(other, x, y, epsilons=None)
    assert bool(success.all())
    assert bool(broken(ours).all())
    ratio = ours.distance / (images - x).flatten(1).norm(dim=1)
    assert 0.97 < float(ratio.median()) < 1.03
    assert float(ratio.max()) < 1.1
