"""Mistakes that would give a wrong number without a word: another model, another radius, an unfinished shard."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from test_ledger import WEAK
from torch import Tensor, nn
from toys import Linear, distances, images, labelled

from hardsphere.attacks import pgd
from hardsphere.errors import HardsphereError
from hardsphere.evaluate import Entry, audit, evaluate, merge
from hardsphere.evaluate.images import verify_png
from hardsphere.threat import Ball

BALL = Ball("linf", 0.05)


class Normalising(nn.Module):
    """Its mean is a tensor that no state dict holds, its levels an integer."""

    def __init__(self, mean: float = 0.0, levels: int = 256) -> None:
        super().__init__()
        self.net, self.mean, self.levels = Linear(classes=4), torch.tensor(mean), levels

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net((x * self.levels).round() / self.levels - self.mean)
        return logits


@pytest.mark.parametrize("change", [{"mean": 0.3}, {"levels": 3}])
def test_another_model_does_not_go_on_with_an_evaluation(change: dict[str, float], tmp_path: Path) -> None:
    x, y = labelled(Normalising(), 20)
    evaluate(Normalising(), x, y, BALL, suite=[WEAK], out=tmp_path).ledger.close()
    evaluate(Normalising(), x, y, BALL, suite=[WEAK], out=tmp_path).ledger.close()
    with pytest.raises(HardsphereError, match="evaluation of another model"):
        evaluate(Normalising(**change), x, y, BALL, suite=[WEAK], out=tmp_path)


def test_another_function_does_not_go_on_with_an_evaluation(tmp_path: Path) -> None:
    one, other = Linear(classes=4), Linear(classes=4, seed=5)
    x, y = labelled(one, 20)
    evaluate(lambda z: one(z), x, y, BALL, suite=[WEAK], out=tmp_path).ledger.close()
    with pytest.raises(HardsphereError, match="evaluation of another model"):
        evaluate(lambda z: other(z), x, y, BALL, suite=[WEAK], out=tmp_path)


def test_an_audit_does_not_use_the_evaluation_of_another_function() -> None:
    one, other = Linear(classes=4), Linear(classes=4, seed=5)
    x, y = labelled(one, 60)
    evaluation = evaluate(lambda z: other(z), x, y, BALL, suite=[WEAK])
    assert (
        "The evaluation was not used: it is of a model that gave other answers on these images."
        in audit(lambda z: one(z), x, y, BALL, evaluation=evaluation).notes
    )
    own = evaluate(lambda z: one(z), x, y, BALL, suite=[WEAK])
    assert not any("not used" in note for note in audit(lambda z: one(z), x, y, BALL, evaluation=own).notes)


def test_answers_of_another_machine_are_the_same_answers(tmp_path: Path) -> None:
    """Where sums are taken in another order, logits differ in their last digits."""
    model = Linear(classes=4)
    x, y = labelled(model, 20)
    evaluate(lambda z: model(z), x, y, BALL, suite=[WEAK], out=tmp_path).ledger.close()
    evaluate(lambda z: model(z) * (1 + 1e-5), x, y, BALL, suite=[WEAK], out=tmp_path)


def attack_of(steps: int, by_hand: bool) -> object:
    def attack(model, x, y, ball, *, noise):  # type: ignore[no-untyped-def]
        return pgd(model, x, y, ball, noise=noise, steps=steps)

    return attack if by_hand else functools.partial(pgd, steps=steps)


@pytest.mark.parametrize("by_hand", [True, False])
def test_another_attack_of_the_same_name_is_another_suite(by_hand: bool, tmp_path: Path) -> None:
    model = Linear(classes=4)
    x, y = labelled(model, 20)
    for _ in range(2):
        evaluate(model, x, y, BALL, suite=[Entry("mine", attack_of(1, by_hand))], out=tmp_path).ledger.close()
    with pytest.raises(HardsphereError, match="suite_hash"):
        evaluate(model, x, y, BALL, suite=[Entry("mine", attack_of(20, by_hand))], out=tmp_path)


def test_a_shard_that_was_interrupted_is_not_merged(tmp_path: Path) -> None:
    model = Linear(classes=4)
    x, y = labelled(model, 20)

    def stop(progress: object) -> None:
        raise KeyboardInterrupt

    options = {"suite": [WEAK], "batch": 4}
    evaluate(model, x, y, BALL, shard=(0, 2), out=tmp_path / "0", **options).ledger.close()
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, x, y, BALL, shard=(1, 2), out=tmp_path / "1", progress=stop, **options)
    with pytest.raises(HardsphereError, match="was interrupted"):
        merge([tmp_path / "0", tmp_path / "1"])
    evaluate(model, x, y, BALL, shard=(1, 2), out=tmp_path / "1", **options).ledger.close()
    whole = evaluate(model, x, y, BALL, **options)
    assert merge([tmp_path / "0", tmp_path / "1"]).robust_accuracy(BALL.eps) == whole.robust_accuracy


def test_a_ball_that_was_not_evaluated_has_no_survivors_to_tell(tmp_path: Path) -> None:
    model = Linear(classes=4)
    x, y = labelled(model, 20)
    evaluation = evaluate(model, x, y, BALL, suite=[WEAK], save_images=True)
    assert evaluation.survivors(Ball("linf", 0.05 * (1 + 1e-9))) == evaluation.survivors()
    with pytest.raises(HardsphereError, match=r"at eps 0\.0501: the evaluation is of eps 0\.05"):
        evaluation.survivors(Ball("linf", 0.0501))
    with pytest.raises(HardsphereError, match="Nothing was evaluated in l2"):
        evaluation.survivors(Ball("l2", 0.05))
    with pytest.raises(HardsphereError, match=r"at eps 0\.2"):
        evaluation.ledger.robust_accuracy(0.2)
    with pytest.raises(HardsphereError, match="in l2"):
        verify_png(model, x, y, Ball("l2", 0.05), evaluation.ledger, tmp_path)
    with pytest.raises(HardsphereError, match=r"at eps 0\.06"):
        verify_png(model, x, y, Ball("linf", 0.06), evaluation.ledger, tmp_path)


class InPlace(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.sub_(0.1))


def test_a_model_that_changes_its_images_is_refused_and_they_are_left_alone() -> None:
    x, y = images(20), torch.zeros(20, dtype=torch.int64)
    before = x.clone()
    for judge in (evaluate, audit):
        with pytest.raises(HardsphereError, match="changes the images"):
            judge(InPlace(classes=4), x, y, BALL)
    assert torch.equal(x, before)
    evaluate(lambda z: InPlace(classes=4)(z.clone()), x, y, BALL, suite=[WEAK])


class Noisy(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits + 0.3 * torch.randn_like(logits)


def test_luck_does_not_end_an_attack_on_a_random_model() -> None:
    """In closed form 7 % of the images are out of reach; an attack that stops at a lucky draw leaves 42 % standing."""
    model, ball = Linear(classes=4), Ball("linf", 0.08)
    x, y = labelled(model, 300)
    out_of_reach = float((distances(model, x, y) > ball.eps).double().mean())
    torch.manual_seed(0)
    evaluation = evaluate(Noisy(model), x, y, ball, suite=[Entry("pgd", "pgd", {"steps": 20})])
    assert evaluation.robust_accuracy < out_of_reach + 0.05
    assert any("answers are random" in remark for remark in evaluation.card["remarks"])


def test_arrays_and_lists_will_do() -> None:
    model = Linear(classes=4)
    x, y = labelled(model, 20)
    expected = evaluate(model, x, y, BALL, suite=[WEAK], seed=3)
    ball, seed = Ball("linf", np.float64(0.05)), np.int64(3)
    for labels in (y.numpy(), y.tolist()):
        found = evaluate(model, x.numpy(), labels, ball, suite=[WEAK], seed=seed)  # type: ignore[arg-type]
        assert found.survivors() == expected.survivors()
        assert audit(model, x.numpy(), labels, ball).n == 20  # type: ignore[arg-type]
    with pytest.raises(HardsphereError, match="The labels are a list that is no array of numbers"):
        evaluate(model, x, ["cat"] * 20, BALL)  # type: ignore[arg-type]
    with pytest.raises(HardsphereError, match="The images are a list"):
        evaluate(model, x.tolist(), y, BALL)
    with pytest.raises(HardsphereError, match="eps is '8/255', but a ball needs a number"):
        Ball("linf", "8/255")  # type: ignore[arg-type]
