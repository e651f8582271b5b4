"""Class vectors and attack targets (eq. 16) where the attack's targets are known beforehand."""

from __future__ import annotations

import json
import math

import pytest
import torch
from analysis_models import Pixels, Smooth, headed, images
from torch import Tensor

from hardsphere.analysis import ClassBias, class_bias
from hardsphere.analysis.bias import imbalance
from hardsphere.threat import Ball

CLASSES = 4
BALL = Ball("linf", 0.1)


def neighbours(labels: list[int], gaps: list[float]) -> tuple[Tensor, Tensor]:
    """Images whose pixels are the logits: class y leads class y + 1 by a gap, the others are far behind.

    Inside the ball the leader can lose 0.1 and its neighbour gain 0.1, so a sample breaks exactly if its gap is below
    0.2, and then towards its neighbour.
    """
    x = torch.full((len(labels), 1, 1, CLASSES), 0.1, dtype=torch.float64)
    for row, (label, gap) in enumerate(zip(labels, gaps, strict=True)):
        x[row, 0, 0, (label + 1) % CLASSES] = 0.5
        x[row, 0, 0, label] = 0.5 + gap
    return x, torch.tensor(labels)


def test_targets_and_confusion_of_a_known_attack() -> None:
    labels = [0, 0, 0, 1, 2, 3, 3]
    gaps = [0.1, 0.15, 0.3, 0.1, 0.3, 0.1, -0.05]  # the last one is wrong from the start
    x, y = neighbours(labels, gaps)
    model = Pixels(torch.eye(CLASSES, dtype=torch.float64))
    found = class_bias(model, x, y, BALL, steps=20)
    assert found.clean.tolist() == [0, 0, 0, 1, 2, 3, 0]
    assert found.predicted.tolist() == [1, 1, 0, 2, 2, 0, 0]
    assert found.broken.tolist() == [True, True, False, True, False, True, False]
    assert found.targets.tolist() == [1, 2, 1, 0]
    assert found.confusion.tolist() == [[1, 2, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0], [2, 0, 0, 0]]
    assert found.aimed.tolist() == [1, 1, 1, 2, 3, 0, 0]
    assert found.aims.tolist() == [[0, 3, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [2, 0, 0, 0]]
    summed = found.to_dict()
    assert summed["clean"]["count"] == 6
    assert summed["robust"]["count"] == 2
    assert summed["aims_entropy_given_class"] == 0  # every class has one neighbour
    assert summed["targets_imbalance"] == imbalance(torch.tensor([1, 2, 1, 0]))
    json.dumps(summed, allow_nan=False)


def test_lengths_of_class_vectors_with_and_without_weight_norm() -> None:
    lengths = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64)
    x, y = neighbours([0, 1], [0.3, 0.3])
    plain = class_bias(Pixels(torch.diag(lengths)), x, y, BALL, steps=2)
    assert plain.norms.tolist() == plain.raw_norms.tolist() == lengths.tolist()
    assert plain.to_dict()["norms_max_over_min"] == 6
    assert plain.to_dict()["norms_variation"] == pytest.approx(math.sqrt(3.5) / 3)
    normalised = class_bias(headed(Pixels(torch.diag(lengths)), "HE"), x, y, BALL, steps=2)
    assert normalised.raw_norms.tolist() == lengths.tolist()
    assert normalised.norms.tolist() == [1, 1, 1, 1]
    assert normalised.to_dict()["targets_norms_correlation"] is None
    assert (plain.weight_norm, normalised.weight_norm) == (False, True)


def test_imbalance_has_known_ends() -> None:
    flat, single = imbalance(torch.tensor([5, 5, 5, 5])), imbalance(torch.tensor([0, 7, 0, 0]))
    assert flat == {"count": 20, "entropy": pytest.approx(1.0), "largest_share": 0.25, "max_over_min": 1.0}
    assert single == {"count": 7, "entropy": 0.0, "largest_share": 1.0, "max_over_min": None}
    assert imbalance(torch.tensor([0, 0]))["entropy"] is None
    half = imbalance(torch.tensor([1, 1, 2, 0]))
    assert half["entropy"] == pytest.approx((2 * 0.25 * math.log(4) + 0.5 * math.log(2)) / math.log(4))


def test_the_entropy_given_the_class_is_a_mean_over_rows() -> None:
    """Class 0 goes to 1 and 2 alike, class 1 to 2 only: (2/3) log 2 + (1/3) 0, as a part of log 2."""
    lengths = torch.ones(3, dtype=torch.float64)
    labels, aimed = torch.tensor([0, 0, 0, 0, 1, 1]), torch.tensor([1, 2, 1, 2, 2, 2])
    found = ClassBias(False, lengths, lengths, labels, labels, aimed, aimed)
    assert found.to_dict()["aims_entropy_given_class"] == pytest.approx(2 / 3)
    assert found.to_dict()["targets"] == [0, 2, 4]


def test_correlation_is_pearsons() -> None:
    lengths = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    labels, aimed = torch.tensor([1, 0, 0, 0]), torch.tensor([0, 1, 2, 2])
    found = ClassBias(False, lengths, lengths, labels, labels, aimed, aimed)  # targets 1, 1, 2
    assert found.to_dict()["targets_norms_correlation"] == pytest.approx(math.sqrt(3) / 2)


def test_outcomes_do_not_depend_on_the_batch() -> None:
    model, x, y = headed(Smooth(), "HE"), images(9, 3, 2, 2), torch.arange(9) % 5
    whole = class_bias(model, x, y, BALL, steps=2)
    parts = class_bias(model, x, y, BALL, steps=2, batch=4)
    for name in ("labels", "clean", "predicted", "aimed"):
        assert torch.equal(getattr(whole, name), getattr(parts, name))


def test_no_scale_of_the_logits_misleads_the_attack() -> None:
    """At this scale the cross-entropy is zero in float32 wherever the answer is right."""
    x = images(30, 3, 2, 2)
    with torch.no_grad():
        y = headed(Smooth(), "HE")(x).argmax(1)
    usual, huge = (class_bias(headed(Smooth(), "HE", scale=s), x, y, BALL, steps=5) for s in (1.0, 2.0**20))
    assert int(usual.broken.sum()) > 0
    assert torch.equal(usual.predicted, huge.predicted)
