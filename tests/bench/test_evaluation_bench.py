from __future__ import annotations

import logging
import sys
import time
import types
from dataclasses import replace

import pytest
import torch

from hardsphere.bench import evaluation
from hardsphere.bench.evaluation import EvaluationBench, as_text, bench_evaluation, compare, subject_of_network
from hardsphere.bench.reference import ReferenceRun, check_comparable, run_reference
from hardsphere.errors import HardsphereError
from hardsphere.models import build
from hardsphere.threat import Ball

CPU = torch.device("cpu")
BALL = Ball("linf", 8 / 255)


def test_it_runs_on_a_cpu() -> None:
    measured = bench_evaluation(subject_of_network("cnn-2", None, 4, CPU), suite="quick", rounds=2, device=CPU)
    assert measured.clean_accuracy == 1  # labelled as the network sees them
    assert [attack.name for attack in measured.attacks] == ["pgd-10", "pgd-20-margin", "apgd-t-20x3"]
    assert measured.attacks[0].attacked == 4
    assert measured.attacks[0].forwards >= 4
    assert measured.rounds_seconds == [measured.seconds, measured.warm_seconds]
    assert measured.images_per_second == pytest.approx(4 / measured.rounds_seconds[1])
    assert 0 < measured.gemm_share < 1
    assert measured.reference is None
    assert "pgd-20-margin" in as_text(measured)


def test_a_new_network_may_see_real_images() -> None:
    subject = subject_of_network("cnn-2", "digits", 5, CPU)
    assert subject.x.shape == (5, 1, 8, 8)


def test_outcomes_are_compared_image_by_image() -> None:
    other = ReferenceRun(12.0, {"apgd-ce": 5.0}, frozenset({0, 1, 2}), 500, {})
    found = compare(frozenset({1, 2, 3, 4}), other, images=200, spent=4.0, warm=3.0)
    assert (found.times_faster, found.times_faster_warm) == (3, 4)
    assert found.difference_points == pytest.approx(0.5)
    assert (found.only_ours, found.only_reference) == (2, 1)


class Pretender:
    """Logs like the reference, and breaks the first image."""

    def __init__(self, model: torch.nn.Module, **options: object) -> None:
        self.options = options

    def run_standard_evaluation(
        self, x: torch.Tensor, y: torch.Tensor, *, batch_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logger = logging.getLogger("auto-attack")
        for name, nap in (("apgd-ce", 0.02), ("square", 0.06)):
            logger.debug(f"running {name}")
            time.sleep(nap)
        logger.debug("robust accuracy: 66 %")
        predicted = y.clone()
        predicted[0] += 1
        return x, predicted


def test_each_attack_of_the_reference_is_timed_by_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("pyautoattack")
    module.AutoAttack = Pretender  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyautoattack", module)
    model = build("cnn-2", num_classes=10, seed=0)
    heard: list[str] = []
    x, y = torch.rand(3, 3, 32, 32), torch.zeros(3, dtype=torch.int64)
    found = run_reference(model, x, y, BALL, seed=0, say=heard.append)
    assert heard == ["pyautoattack: robust accuracy: 66 %"]
    assert found.survivors == {1, 2}
    assert 0.02 <= found.attack_seconds["apgd-ce"] < found.attack_seconds["square"]
    assert found.seconds >= 0.08
    assert logging.getLogger("auto-attack").handlers == []


def test_what_the_reference_cannot_do_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyautoattack", None)
    with pytest.raises(HardsphereError, match="not installed"):
        check_comparable(BALL, "standard", 10)
    monkeypatch.setitem(sys.modules, "pyautoattack", types.ModuleType("pyautoattack"))
    check_comparable(BALL, "standard", 10)
    with pytest.raises(HardsphereError, match="standard only"):
        check_comparable(BALL, "quick", 10)
    with pytest.raises(HardsphereError, match="at least 10 classes"):
        check_comparable(BALL, "standard", 4)
    with pytest.raises(HardsphereError, match="linf and l2"):
        check_comparable(Ball("l1", 10), "standard", 10)


def test_our_part_is_kept_before_the_reference_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[EvaluationBench] = []

    def run(*arguments: object, **options: object) -> ReferenceRun:
        assert len(kept) == 1
        return ReferenceRun(100.0, {}, frozenset(), 500, {})

    monkeypatch.setattr(evaluation, "check_comparable", lambda *arguments: None)
    monkeypatch.setattr(evaluation, "run_reference", run)
    subject = replace(subject_of_network("cnn-2", None, 3, CPU), ids=torch.tensor([70, 80, 90]))
    measured = bench_evaluation(subject, suite="quick", reference=True, device=CPU, keep=kept.append)
    assert kept[0].reference is None
    assert measured.reference is not None
    assert measured.reference.only_ours == measured.survivors
    assert measured.reference.times_faster == pytest.approx(100 / measured.seconds)


@pytest.mark.check
@pytest.mark.timeout(900)
def test_the_reference_itself() -> None:
    pytest.importorskip("pyautoattack")
    measured = bench_evaluation(subject_of_network("cnn-2", None, 4, CPU), reference=True, device=CPU)
    assert measured.reference is not None
    assert list(measured.reference.attack_seconds) == ["apgd-ce", "apgd-t", "fab-t", "square"]
    assert sum(measured.reference.attack_seconds.values()) <= measured.reference.seconds
    assert abs(measured.reference.difference_points) <= 25  # one image of four
