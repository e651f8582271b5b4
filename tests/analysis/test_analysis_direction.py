"""The split of an attack's step (eqs. 11 and 13) against closed forms and autograd."""

from __future__ import annotations

import pytest
import torch
from analysis_models import HEADS, Pixels, Smooth, headed, images
from torch import Tensor

from hardsphere.analysis import step_direction
from hardsphere.analysis.direction import split_margin
from hardsphere.threat import Ball

Y, TARGET = torch.tensor([0, 1, 2, 3, 4, 1]), torch.tensor([1, 2, 3, 4, 0, 4])


def photos() -> Tensor:
    return images(6, 3, 2, 2)


def gradient(value: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(value.sum(), x, retain_graph=True)[0]


def test_the_parts_are_those_of_the_product_rule() -> None:
    """||W|| (cos grad||z|| + ||z|| grad cos), each factor differentiated by autograd on its own."""
    model, x = Smooth(), photos().requires_grad_()
    pair = (model.fc.weight[Y] - model.fc.weight[TARGET]).detach()
    z = model.body(x)
    length, size = z.pow(2).sum(1).sqrt(), pair.pow(2).sum(1).sqrt()
    cosine = (pair * z).sum(1) / (size * length)
    norm = (size * cosine).detach().view(-1, 1, 1, 1) * gradient(length, x)
    angle = (size * length).detach().view(-1, 1, 1, 1) * gradient(cosine, x)
    split = split_margin(model, x, Y, TARGET)
    torch.testing.assert_close(split.through_norm, norm)
    torch.testing.assert_close(split.through_cosine, angle)
    squares = [part.pow(2).sum((1, 2, 3)) for part in (norm, angle)]
    torch.testing.assert_close(split.share, squares[0] / (squares[0] + squares[1]))


@pytest.mark.parametrize("head", HEADS)
def test_the_parts_add_up_to_the_gradient_of_the_models_own_margin(head: str) -> None:
    model, x = headed(Smooth(), head), photos().requires_grad_()
    logits = model(x)
    margin = logits.gather(1, Y[:, None]) - logits.gather(1, TARGET[:, None])
    split = split_margin(model, x, Y, TARGET)
    torch.testing.assert_close(split.whole, gradient(margin, x), rtol=1e-9, atol=1e-12)
    if head in ("plain", "WN"):
        assert (split.share > 1e-4).all()
    else:
        assert (split.through_norm == 0).all()  # eq. 13: exactly


@pytest.mark.parametrize("head", ["FN", "HE", "m-HE"])
def test_with_feature_norm_no_step_is_spent_on_the_norm(head: str) -> None:
    found = step_direction(headed(Smooth(), head), photos(), Y, Ball("linf", 0.1), steps=3)
    assert found.feature_norm
    assert (found.norm_share == 0).all()
    assert (found.agreement == 1).all()
    torch.testing.assert_close(found.efficiency, torch.ones_like(found.efficiency))
    torch.testing.assert_close(found.drop, found.pure_drop, rtol=0, atol=0)
    assert (found.removed_share > 1e-4).any()
    assert found.to_dict()["relative_drop"] == 1.0


def known_pair() -> tuple[Pixels, Tensor, Tensor, Tensor]:
    """Two classes on the pixels themselves: W_yy*, the images and their labels."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(2, 8, dtype=torch.float64, generator=generator) + 0.5 * torch.tensor([[1.0], [0.0]])
    x, y = images(10, 1, 2, 4, low=0.3, high=0.7), torch.arange(10) % 2
    return Pixels(weight), x, y, (weight[0] - weight[1]) * (1 - 2 * y[:, None])


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_on_pixels_the_share_is_the_squared_cosine(norm: str) -> None:
    model, x, y, pair = known_pair()
    flat, eta = x.flatten(1), 0.02
    found = step_direction(model, x, y, Ball(norm, 0.1), steps=1, step_size=eta)
    unit = flat / flat.norm(dim=1, keepdim=True)
    cosine = (pair * unit).sum(1) / pair.norm(dim=1)
    radial = (pair * unit).sum(1, keepdim=True) * unit
    tangential = pair - radial

    def step(direction: Tensor) -> Tensor:
        return direction.sign() if norm == "linf" else direction / direction.norm(dim=1, keepdim=True)

    def after(direction: Tensor) -> Tensor:
        moved = flat - eta * step(direction)
        return (pair * moved).sum(1) / (pair.norm(dim=1) * moved.norm(dim=1))

    best = tangential.abs().sum(1) if norm == "linf" else tangential.norm(dim=1)
    expected = {
        "norm_share": cosine**2,
        "removed_share": cosine**2,
        "agreement": (pair.sign() == tangential.sign()).double().mean(1),
        "efficiency": (step(pair) * tangential).sum(1) / best,
        "cosine": cosine,
        "drop": cosine - after(pair),
        "pure_drop": cosine - after(tangential),
    }
    for name, values in expected.items():
        torch.testing.assert_close(getattr(found, name)[:, 0], values, msg=lambda text, name=name: f"{name}: {text}")
    assert not found.feature_norm
    assert (expected["agreement"] < 1).any()
    assert found.to_dict()["relative_drop"] == pytest.approx(float(found.drop.sum() / found.pure_drop.sum()))


def test_with_feature_norm_the_removed_share_is_that_of_the_plain_head() -> None:
    model, x, y, pair = known_pair()
    flat = x.flatten(1)
    found = step_direction(headed(model, "FN"), x, y, Ball("linf", 0.1), steps=1)
    cosine = (pair * flat).sum(1) / (pair.norm(dim=1) * flat.norm(dim=1))
    torch.testing.assert_close(found.removed_share[:, 0], cosine**2)


def test_each_step_starts_where_the_last_one_ended() -> None:
    model, x, y, _ = known_pair()
    found = step_direction(model, x, y, Ball("linf", 0.1), steps=2, step_size=0.02)
    # With two classes the cross-entropy has the direction of the margin: the second cosine is the first less its drop.
    torch.testing.assert_close(found.cosine[:, 1], found.cosine[:, 0] - found.drop[:, 0])
    assert found.cosine.shape == (10, 2)
    # At the edge of the ball the projection takes everything back.
    edge = step_direction(model, x, y, Ball("linf", 0.02), steps=2, step_size=0.02)
    torch.testing.assert_close(edge.drop[:, 1], torch.zeros(10, dtype=torch.float64))
