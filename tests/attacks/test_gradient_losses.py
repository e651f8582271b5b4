"""Losses of attacks against their formulas in numpy, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hardsphere.attacks import losses
from hardsphere.sphere import SphereHead, paper_view

rng = np.random.default_rng(0)
LOGITS = rng.normal(size=(40, 7))
LABELS = rng.integers(0, 7, size=40)
TARGETS = (LABELS + rng.integers(1, 7, size=40)) % 7


def _margin(z: np.ndarray, y: int) -> float:
    return float(np.delete(z, y).max() - z[y])


def _dlr(z: np.ndarray, y: int) -> float:
    ranked = np.sort(z)[::-1]
    return _margin(z, y) / float(ranked[0] - ranked[2])


def _targeted_dlr(z: np.ndarray, y: int, t: int) -> float:
    ranked = np.sort(z)[::-1]
    return float((z[t] - z[y]) / (ranked[0] - (ranked[2] + ranked[3]) / 2))


def _wished_dlr(z: np.ndarray, t: int) -> float:
    rival = int(np.argmax(np.where(np.arange(len(z)) == t, -np.inf, z)))
    return _targeted_dlr(z, rival, t)


def _cross_entropy(z: np.ndarray, y: int) -> float:
    return float(np.log(np.exp(z - z.max()).sum()) + z.max() - z[y])


@pytest.mark.parametrize(
    ("loss", "formula"),
    [
        (losses.margin, _margin),
        (losses.dlr, _dlr),
        (losses.wished_dlr, _wished_dlr),
        (losses.cross_entropy, _cross_entropy),
        (losses.negated(losses.margin), lambda z, y: -_margin(z, y)),
    ],
    ids=["margin", "dlr", "wished-dlr", "cross-entropy", "negated"],
)
def test_formulas(loss: losses.Loss, formula: object) -> None:
    found = loss(torch.tensor(LOGITS, dtype=torch.float32), torch.tensor(LABELS))
    expected = [formula(z, y) for z, y in zip(LOGITS, LABELS, strict=True)]  # type: ignore[operator]
    assert found.dtype == torch.float32
    assert np.allclose(found.numpy(), expected, rtol=1e-4, atol=1e-6)


def test_targeted_dlr() -> None:
    found = losses.targeted_dlr(torch.tensor(LOGITS), torch.tensor(LABELS), torch.tensor(TARGETS))
    expected = [_targeted_dlr(z, y, t) for z, y, t in zip(LOGITS, LABELS, TARGETS, strict=True)]
    assert np.allclose(found.numpy(), expected, rtol=1e-4, atol=1e-6)


def test_dlr_is_free_of_scale_and_shift_however_small() -> None:
    """Also where an additive 1e-12 in the denominator would have shown."""
    logits, y, t = torch.tensor(LOGITS), torch.tensor(LABELS), torch.tensor(TARGETS)
    for factor in (1e-20, 1e-3, 1e3, 1e20):
        assert torch.allclose(losses.dlr(logits * factor, y), losses.dlr(logits, y), rtol=1e-4)
        assert torch.allclose(losses.targeted_dlr(logits * factor, y, t), losses.targeted_dlr(logits, y, t), rtol=1e-4)
    assert torch.allclose(losses.dlr(logits + 100, y), losses.dlr(logits, y), rtol=1e-2)


def test_dlr_at_a_tie_still_has_a_gradient() -> None:
    logits = torch.zeros(1, 5, requires_grad=True)
    for loss in (losses.dlr, losses.wished_dlr):
        value = loss(logits, torch.tensor([2]))
        (gradient,) = torch.autograd.grad(value.sum(), logits)
        assert value.tolist() == [0]
        assert bool(gradient.isfinite().all())
        assert float(gradient[0, 2].abs()) > 0


@pytest.mark.parametrize("classes", [2, 3])
def test_below_four_classes_the_margin_takes_the_place_of_dlr(classes: int) -> None:
    logits, y = torch.tensor(LOGITS[:, :classes]).float(), torch.tensor(LABELS % classes)
    assert not losses.dlr_available(classes)
    assert losses.dlr_available(4)
    assert torch.equal(losses.dlr(logits, y), losses.margin(logits, y))
    target = (y + 1) % classes
    lead = (logits.gather(1, target[:, None]) - logits.gather(1, y[:, None])).squeeze(1)
    assert torch.equal(losses.targeted_dlr(logits, y, target), lead)
    assert torch.equal(losses.wished_dlr(logits, y), -losses.margin(logits, y))


def test_the_wish_has_a_direction_at_every_rank() -> None:
    """-DLR is constant where the wished class ranks third; its targeted counterpart is not."""
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.5, -1.0]], requires_grad=True)
    third = torch.tensor([2])
    (flat,) = torch.autograd.grad(losses.negated(losses.dlr)(logits, third).sum(), logits)
    assert float(flat.abs().max()) == 0
    for wish in range(1, 5):
        (gradient,) = torch.autograd.grad(losses.towards(losses.dlr)(logits, torch.tensor([wish])).sum(), logits)
        assert float(gradient[0, wish]) > 0


def test_adaptive_is_the_training_loss() -> None:
    """CE(s * (cos - m * 1_y), y), from the deployed logits and from the paper's raw cosines alike."""
    torch.manual_seed(0)
    head = SphereHead(6, 7, scale=15, margin=0.2)
    z, y = torch.randn(40, 6), torch.tensor(LABELS)
    cosines = F.normalize(z) @ F.normalize(head.weight).T
    expected = [
        _cross_entropy(15 * (c - 0.2 * (np.arange(7) == label)), label)
        for c, label in zip(cosines.detach().double().numpy(), LABELS, strict=True)
    ]
    deployed = losses.adaptive(head)(head(z), y)
    raw = losses.adaptive(head, spoken_at=1.0)(paper_view(head)(z), y)
    assert np.allclose(deployed.detach().numpy(), expected, rtol=1e-4, atol=1e-5)
    assert torch.allclose(deployed, raw, rtol=1e-4, atol=1e-5)
    assert torch.equal(losses.adaptive(None)(head(z), y), losses.cross_entropy(head(z), y))
