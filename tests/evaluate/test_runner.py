"""The runner against models whose robust accuracy is known, and against attacks and models that misbehave."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from toys import Linear, distances, images, labelled, radius_at

import hardsphere.evaluate as package
from hardsphere.attacks import AttackResult, Stop, pgd
from hardsphere.attacks.views import ExpectationView
from hardsphere.errors import HardsphereError
from hardsphere.evaluate import SUITES, Entry, Suite, evaluate
from hardsphere.evaluate.witness import Counted
from hardsphere.models import features
from hardsphere.sphere import attach
from hardsphere.threat import Ball

PGD = Entry("pgd", "pgd", {"steps": 20, "loss": "margin"}, norms=("linf", "l2", "l1"))


def outcomes(evaluation):
    return [(row.eps, row.attack, row.sample, row.outcome) for row in evaluation.ledger.rows()]


TARGETED = Entry("apgd-t", "apgd_targeted", {"steps": 20, "targets": 9})


def shorter(suite: Suite) -> Suite:
    """A suite with a hundredth of its queries."""
    entries = [
        replace(entry, options={**entry.options, "queries": entry.options["queries"] // 100})
        if "queries" in entry.options
        else entry
        for entry in suite.entries
    ]
    return replace(suite, entries=tuple(entries))


@pytest.mark.parametrize(
    "suite",
    ["quick", pytest.param(shorter(SUITES["standard"]), id="short"), pytest.param("standard", marks=pytest.mark.check)],
)
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_robust_accuracy_of_a_linear_model_is_the_closed_form(suite, norm):
    model = Linear()
    x, y = labelled(model, 60, wrong=6)
    ball = radius_at(model, x[6:], y[6:], 0.5, norm)
    result = evaluate(model, x, y, ball, suite=suite)
    n = len(y)
    assert result.clean_accuracy == (n - 6) / n
    assert result.robust_accuracy == float((distances(model, x, y, norm)[6:] > ball.eps).sum()) / n
    assert result.by_attack[list(result.by_attack)[-1]] == result.robust_accuracy  # a cascade ends at the worst case


def test_a_curve_holds_the_closed_form_at_each_radius_and_never_rises():
    model = Linear(classes=5)
    x, y = labelled(model, 80)
    balls = [radius_at(model, x, y, part) for part in (0.7, 0.2, 0.45)]
    result = evaluate(model, x, y, balls, suite=[TARGETED])
    expected = {ball.eps: float((distances(model, x, y) > ball.eps).double().mean()) for ball in balls}
    assert result.curve == pytest.approx(expected)
    values = list(result.curve.values())
    assert values == sorted(values, reverse=True)
    assert result.robust_accuracy == values[-1]
    carried = result.card["results"][1]["attacks"][0]
    assert carried["name"] == "carried"
    assert carried["accuracy"] == pytest.approx(values[0])
    assert carried["forwards"] == 0


@pytest.mark.parametrize("batch", [1, 7, 200])
def test_outcomes_do_not_depend_on_the_batch(batch):
    model = Linear(classes=4)
    x, y = labelled(model, 40, wrong=3)
    ball = radius_at(model, x[3:], y[3:], 0.5)
    suite = [Entry("weak", "pgd", {"steps": 2, "step_size": ball.eps / 4}), PGD]
    result = evaluate(model, x, y, ball, suite=suite, batch=batch)
    reference = evaluate(model, x, y, ball, suite=suite, batch=40)
    assert outcomes(result) == outcomes(reference)
    assert 0 < result.by_attack["pgd"] < result.by_attack["weak"] < 37 / 40  # each of the two had something to do


def test_a_cascade_attacks_survivors_only_and_packs_them():
    model = Linear()
    x, y = labelled(model, 64)
    ball = radius_at(model, x, y, 0.5)
    seen = []

    def watching(model, x, y, ball, *, noise):
        seen.append(len(x))
        return pgd(model, x, y, ball, noise=noise, steps=1, step_size=0.0)

    result = evaluate(model, x, y, ball, suite=[PGD, Entry("watch", watching)], batch=16)
    left = round(64 * result.by_attack["pgd"])
    assert seen == [16] * (left // 16) + ([left % 16] if left % 16 else [])
    rows = result.ledger.rows(attack="watch")
    assert sum(row.outcome == "skipped" for row in rows) == 64 - left
    assert len(rows) == 64


def test_without_a_cascade_every_attack_sees_every_sample():
    model = Linear()
    x, y = labelled(model, 30, wrong=2)
    ball = radius_at(model, x[2:], y[2:], 0.6)
    late = Entry("again", "pgd", {"steps": 20, "loss": "margin"})
    result = evaluate(model, x, y, ball, suite=Suite("alone", 1, "honest", (PGD, late), cascade=False))
    assert result.by_attack["pgd"] == result.by_attack["again"] == result.robust_accuracy
    assert {line["attacked"] for line in result.card["results"][0]["attacks"]} == {28}


# -- trust nothing --------------------------------------------------------------------------------------------------


def cheat(change):
    """An attack that proposes whatever ``change`` makes of the images and claims to have broken everything."""

    def attack(model, x, y, ball, *, noise):
        x_adv = change(x, ball)
        return AttackResult(x_adv, torch.zeros(len(x)), [Stop.BROKEN] * len(x))

    return Entry("cheat", attack)


CHEATS = {
    "claims": lambda x, ball: x,
    "nan": lambda x, ball: torch.full_like(x, torch.nan),
    "infinite": lambda x, ball: torch.full_like(x, torch.inf),
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_claim_of_success_is_not_believed(name):
    model = Linear()
    x, y = labelled(model, 20)
    ball = Ball("linf", float(distances(model, x, y).min()) * 0.9)
    result = evaluate(model, x, y, ball, suite=[cheat(CHEATS[name])])
    assert result.robust_accuracy == 1.0


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_images_far_outside_are_projected_before_they_count(norm):
    model = Linear(shape=(3, 16, 16))
    x, y = labelled(model, 20, shape=(3, 16, 16))
    ball = Ball(norm, {"linf": 1e-4, "l2": 1e-3, "l1": 12.0}[norm])
    far = cheat(lambda x, ball: 1 - x)
    result = evaluate(model, x, y, ball, suite=[Entry("far", far.attack, norms=("linf", "l2", "l1"))])
    for row in result.ledger.rows():
        assert row.distance <= ball.eps + 1e-6
        assert row.distance > 0.5 * ball.eps  # it was projected, not thrown away
    filtered = evaluate(
        model, x, y, ball, suite=[Entry("far", far.attack, outside="filter", norms=("linf", "l2", "l1"))]
    )
    assert filtered.robust_accuracy == 1.0


def test_pixels_outside_the_box_are_clipped():
    model = Linear()
    x, y = labelled(model, 8)
    kept = []

    class Recording(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            kept.append(x.detach())
            return self.inner(x)

    evaluate(Recording(), x, y, Ball("linf", 0.9), suite=[cheat(lambda x, ball: x + 5)])
    assert float(kept[-1].max()) == 1.0
    assert float(kept[-1].min()) > 0.5


# -- counting -------------------------------------------------------------------------------------------------------


def test_passes_are_counted_around_the_model():
    counted = Counted(Linear())
    x = images(5).requires_grad_()
    logits = counted(x)
    torch.autograd.grad(logits[:, 0].sum(), x, retain_graph=True)
    torch.autograd.grad(logits[:, 1].sum(), x)
    with torch.no_grad():
        counted(x)
    assert (counted.forwards, counted.backwards) == (10, 10)


def test_backward_passes_are_counted_wherever_in_the_model_they_start():
    counted = Counted(nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)))
    x = images(4).requires_grad_()
    features(counted, x).sum().backward()
    assert (counted.forwards, counted.backwards) == (4, 4)
    counted(x)  # a pass whose graph nobody follows costs no backward pass
    both = ExpectationView(counted, 3)(x)
    torch.autograd.grad(both.sum(), x)
    assert (counted.forwards, counted.backwards) == (20, 16)


def test_the_card_counts_passes_per_sample_attacked():
    model = Linear()
    x, y = labelled(model, 12)
    tiny = Ball("linf", 1e-6)
    result = evaluate(model, x, y, tiny, suite=[Entry("pgd", "pgd", {"steps": 7})], batch=5)
    (line,) = result.card["results"][0]["attacks"]
    assert (line["forwards"], line["backwards"]) == (8, 7)  # seven steps and a last look


# -- the model comes back as it was ---------------------------------------------------------------------------------


def test_model_is_left_as_it_was_found():
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Dropout(0.5), nn.Linear(12, 4))
    model.train()
    model[0].weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = images(10)
    evaluate(model, x, torch.arange(10) % 4, Ball("linf", 0.1), suite=[PGD])
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [parameter.requires_grad for parameter in model.parameters()] == [False, True, True, True, True, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_train_mode_does_not_reach_the_numbers():
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.9), nn.Linear(16, 3)).train()
    x = images(30)
    y = model.eval()(x).argmax(dim=1)
    model.train()
    assert evaluate(model, x, y, Ball("linf", 1e-4), suite=[PGD]).clean_accuracy == 1.0


def test_bfloat16_and_float64_models_are_judged_in_float32():
    model = Linear()
    x, y = labelled(model, 10)
    for dtype in (torch.bfloat16, torch.float64):
        cast = Linear().to(dtype)
        assert evaluate(cast, x, y, Ball("linf", 1e-5), suite=[PGD]).clean_accuracy > 0.8
        assert next(cast.parameters()).dtype == dtype


def test_a_plain_function_is_a_model_too():
    model = Linear()
    x, y = labelled(model, 10)
    ball = radius_at(model, x, y, 0.4)
    result = evaluate(lambda x: model(x), x, y, ball, suite=[PGD])
    assert result.robust_accuracy == float((distances(model, x, y) > ball.eps).double().mean())


# -- out of memory --------------------------------------------------------------------------------------------------


class Narrow(Linear):
    """Runs out of memory above a batch size."""

    def __init__(self, most: int, error: type[Exception]) -> None:
        super().__init__(classes=3)
        self.most, self.error, self.largest = most, error, 0

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise self.error("CUDA out of memory. Tried to allocate 20.00 GiB.")
        self.largest = max(self.largest, len(x))
        return super().forward(x)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_running_out_of_memory_halves_the_batch_and_changes_no_outcome(error):
    free = Linear(classes=3)
    x, y = labelled(free, 50, wrong=4)
    ball = radius_at(free, x[4:], y[4:], 0.5)
    expected = evaluate(free, x, y, ball, suite="quick", batch=32)
    narrow = Narrow(5, error)
    result = evaluate(narrow, x, y, ball, suite="quick", batch=32)
    assert outcomes(result) == outcomes(expected)
    assert narrow.largest == 4  # 32, 16, 8, 4
    for line, other in zip(result.card["results"][0]["attacks"], expected.card["results"][0]["attacks"], strict=True):
        assert line["forwards"] == pytest.approx(other["forwards"])  # failed attempts are not counted


def test_a_single_image_that_does_not_fit_is_said_so():
    with pytest.raises(HardsphereError, match="single image"):
        evaluate(Narrow(0, torch.OutOfMemoryError), images(3), torch.zeros(3, dtype=torch.int64), Ball("linf", 0.1))


def test_other_errors_of_the_model_are_not_swallowed():
    class Fails(Linear):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 2:
                raise RuntimeError("something else")
            return super().forward(x)

    with pytest.raises(RuntimeError, match="something else"):
        evaluate(Fails(), images(2), torch.zeros(2, dtype=torch.int64), Ball("linf", 0.1), suite=[PGD], batch=2)


# -- bad input ------------------------------------------------------------------------------------------------------

GOOD = {"x": images(4), "y": torch.tensor([0, 1, 0, 1])}
BAD_INPUT = {
    "empty": ({"x": images(4)[:0], "y": torch.zeros(0, dtype=torch.int64)}, "empty"),
    "three dimensions": ({"x": images(4)[:, 0]}, r"\(N, C, H, W\)"),
    "bytes": ({"x": torch.zeros(4, 1, 4, 4, dtype=torch.uint8)}, "uint8"),
    "normalised": ({"x": images(4) * 4 - 2}, "normalisation"),
    "nan pixels": ({"x": torch.full((4, 1, 4, 4), torch.nan)}, "nan"),
    "wrong size": ({"x": images(4, (1, 5, 5))}, r"cannot take images of shape \(1, 5, 5\)"),
    "label too large": ({"y": torch.tensor([0, 1, 2, 1])}, "A label is 2, but the model has 2 classes"),
    "label below zero": ({"y": torch.tensor([0, -1, 0, 1])}, "A label is -1"),
    "too few labels": ({"y": torch.tensor([0, 1])}, "must be 4 integers"),
    "float labels": ({"y": torch.rand(4)}, "integers"),
    "no labels": ({"y": None}, "need their labels"),
    "same ids": ({"ids": torch.tensor([1, 2, 3, 3])}, "same id"),
    "class names": ({"class_names": ["a", "b", "c"]}, "3 class names"),
    "suite": ({"suite": "standart"}, "Did you mean 'standard'"),
    "attack": ({"suite": [Entry("a", "pgdd")]}, "Did you mean 'pgd'"),
    "no attacks": ({"suite": []}, "no attacks"),
    "norms": ({"ball": [Ball("linf", 0.1), Ball("l2", 0.1)]}, "different norms"),
    "norm of the suite": ({"ball": Ball("l1", 0.1), "suite": "standard"}, "no attack that can run"),
    "no ball": ({"ball": None}, "needs a ball"),
    "batch": ({"batch": 0}, "at least one image"),
    "limit": ({"limit": 0}, "at least one image"),
    "shard": ({"shard": (2, 2)}, "index, count"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_one_sentence(name, tmp_path):
    change, message = BAD_INPUT[name]
    arguments = {**GOOD, "ball": Ball("linf", 0.1), "suite": "quick", **change}
    with pytest.raises(HardsphereError, match=message) as caught:
        evaluate(Linear(), arguments.pop("x"), arguments.pop("y"), out=tmp_path / "out", **arguments)
    assert "\n" not in str(caught.value)


def test_a_radius_of_zero_is_refused():
    with pytest.raises(HardsphereError, match="eps is 0"):
        Ball("linf", 0)


class Answers(nn.Module):
    def __init__(self, answer) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x: Tensor) -> Tensor:
        return self.answer(x)


BAD_MODELS = {
    "one number": (lambda x: x.flatten(1).sum(dim=1), "must return logits"),
    "maps": (lambda x: x, "must return logits"),
    "one class": (lambda x: x.flatten(1)[:, :1], "must return logits"),
    "batch lost": (lambda x: x.flatten(1).sum(dim=0, keepdim=True), "must return logits"),
    "tuple": (lambda x: (x, x), "a tuple"),
    "classes": (lambda x: x.flatten(1).argmax(dim=1, keepdim=True).expand(-1, 2), "floats"),
    "nan": (lambda x: x.flatten(1)[:, :2] * torch.nan, "NaN"),
    "raises": (lambda x: x.flatten(1) @ torch.zeros(3, 3), "cannot take images"),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_a_model_that_does_not_answer_properly_is_one_sentence(name, tmp_path):
    answer, message = BAD_MODELS[name]
    with pytest.raises(HardsphereError, match=message) as caught:
        evaluate(Answers(answer), *GOOD.values(), Ball("linf", 0.1), suite="quick", out=tmp_path)
    assert "\n" not in str(caught.value)


def test_a_model_that_answers_nan_inside_the_ball_is_broken_there():
    model = Linear()
    x, y = labelled(model, 6)

    def fragile(images: Tensor) -> Tensor:
        clean = (
            (images == x[: len(images)]).flatten(1).all(dim=1, keepdim=True) if len(images) == 6 else torch.tensor(True)
        )
        return torch.where(clean, model(images), torch.nan)

    nudge = cheat(lambda x, ball: x + 1e-6)
    assert evaluate(fragile, x, y, Ball("linf", 1e-5), suite=[nudge]).robust_accuracy == 0.0


# -- data sources ---------------------------------------------------------------------------------------------------


def test_images_on_disk_are_read_as_they_are_needed(tmp_path):
    from PIL import Image

    from hardsphere.data import ImageFiles, eval_batches

    model = Linear(shape=(3, 4, 4), classes=3)
    pixels = (images(12, (3, 4, 4)) * 255).round().to(torch.uint8)
    for index, one in enumerate(pixels):
        Image.fromarray(one.permute(1, 2, 0).numpy()).save(tmp_path / f"{index}.png")
    names = tuple(f"{index}.png" for index in range(12))
    blank = ImageFiles(
        tmp_path, names, torch.zeros(12, dtype=torch.int64), torch.arange(12) + 50, ("a", "b", "c"), size=4
    )
    (batch,) = eval_batches(blank, 12)
    x, y = batch.x, model(batch.x).argmax(dim=1)
    source = replace(blank, labels=y)
    ball = radius_at(model, x, y, 0.4)
    lazy = evaluate(model, source, ball=ball, suite="quick", batch=5, limit=10)
    eager = evaluate(model, x[:10], y[:10], ball, suite="quick", batch=5, ids=torch.arange(10) + 50)
    assert outcomes(lazy) == outcomes(eager)
    assert lazy.card["data"]["class_names"] == ["a", "b", "c"]
    assert lazy.card["data"]["ids"] == "50-59"
    with pytest.raises(HardsphereError, match="brings its own labels"):
        evaluate(model, source, y, ball)
    with pytest.raises(HardsphereError, match="must be a float tensor or a data source"):
        evaluate(model, [1, 2, 3], ball=ball)


# -- what the card says ---------------------------------------------------------------------------------------------


def test_below_four_classes_the_card_says_what_takes_the_place_of_dlr():
    model = Linear(classes=3)
    x, y = labelled(model, 10)
    ball = radius_at(model, x, y, 0.5)
    result = evaluate(model, x, y, ball, suite="quick")
    assert any("margin takes the place of DLR" in remark for remark in result.card["remarks"])
    assert any("2 targets instead of 3" in remark for remark in result.card["remarks"])
    assert result.robust_accuracy == float((distances(model, x, y) > ball.eps).double().mean())


def test_an_expensive_attack_works_on_the_first_samples_only_and_the_card_says_so():
    model = Linear()
    x, y = labelled(model, 20, wrong=2)
    ball = Ball("linf", float(distances(model, x, y).max()) * 1.1)
    limited = Entry("pgd", "pgd", {"steps": 20, "loss": "margin"}, limit=8)
    result = evaluate(model, x, y, ball, suite=[limited], batch=3)
    (line,) = result.card["results"][0]["attacks"]
    assert (line["n"], line["attacked"], line["accuracy"]) == (8, 6, 0.0)
    assert result.robust_accuracy == 12 / 20  # an upper bound: what was not attacked has not fallen
    assert result.card["remarks"] == ["pgd: the first 8 of 20 samples only, because it is expensive."]


def test_an_attack_that_lacks_its_source_is_left_out_aloud_and_runs_with_it():
    model = Linear()
    x, y = labelled(model, 20)
    ball = radius_at(model, x, y, 0.5)
    suite = [PGD, Entry("transfer", "transfer", {"steps": 20}, needs=("source",))]
    result = evaluate(model, x, y, ball, suite=suite)
    assert list(result.by_attack) == ["pgd"]
    assert result.card["remarks"] == ["transfer was left out: it needs a source model."]
    alone = evaluate(model, x, y, ball, suite=suite[1:], source=Linear())
    assert alone.robust_accuracy == float((distances(model, x, y) > ball.eps).double().mean())


def test_the_card_is_plain_and_holds_what_a_number_must_carry():
    model = Linear(classes=3)
    x, y = labelled(model, 12)
    ids = torch.arange(12) * 2 + 100
    about = {"target": "runs/a", "data": "toy", "selection": "the last epoch", "command": "evaluate"}
    result = evaluate(
        model, x, y, Ball("linf", 0.01), suite=[PGD], ids=ids, class_names=["a", "b", "c"], about=about, seed=5
    )
    card = json.loads(json.dumps(result.card))
    assert card == result.card
    assert card["seed"] == 5
    assert card["data"]["ids"] == ",".join(str(i) for i in range(100, 123, 2))
    assert card["data"]["name"] == "toy"
    assert card["model"]["selection"] == "the last epoch"
    assert card["protocol"] == "honest"
    assert card["suite"]["hash"] == result.suite.hash
    assert card["environment"]["torch"] == torch.__version__
    assert [one["name"] for one in card["results"][0]["classes"]] == ["a", "b", "c"]
    assert sum(one["n"] for one in card["results"][0]["classes"]) == 12
    assert sum(one["robust"]["count"] for one in card["results"][0]["classes"]) == card["robust"]["count"]
    low, high = card["robust"]["interval"]
    assert low < card["robust"]["accuracy"] <= high


def test_progress_tells_a_bound_that_only_falls_and_ends_at_the_result():
    model = Linear()
    x, y = labelled(model, 40, wrong=4)
    ball = radius_at(model, x[4:], y[4:], 0.5)
    told = []
    result = evaluate(model, x, y, ball, suite="quick", batch=8, progress=told.append)
    bounds = [step.upper_bound for step in told]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] == result.robust_accuracy
    assert told[0].attack == "clean"
    assert told[-1].left == 0
    assert all(step.left is not None and step.left >= 0 for step in told if step.ball)
    assert told[-1].done == told[-1].total


# -- protocols ------------------------------------------------------------------------------------------------------


def test_the_paper_suite_attacks_raw_cosines_and_is_judged_as_deployed():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = attach(nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 10)), scale=20.0)
    x = images(6)
    y = model(x).argmax(dim=1)
    seen = []

    def looking(model, x, y, ball, *, noise):
        seen.append(model(x).detach().abs().max().item())
        return pgd(model, x, y, ball, noise=noise, steps=1)

    ball = Ball("linf", 1e-5)  # so small that the first attack leaves all samples to the second
    evaluate(model, x, y, ball, suite=[Entry("a", looking, view="paper"), Entry("b", looking)])
    evaluate(model, x, y, ball, suite=[Entry("c", looking, view="x0.5")])
    assert seen[0] <= 1.0 + 1e-6
    assert seen[1] > 2.0
    assert seen[2] == pytest.approx(seen[1] / 2, rel=1e-5)


def test_averaging_makes_a_randomised_model_answer_in_the_mean():
    class Noisy(Linear):
        def forward(self, x: Tensor) -> Tensor:
            logits = super().forward(x)
            return logits + 30 * torch.randn_like(logits)

    model = Linear()
    x, y = labelled(model, 60)
    torch.manual_seed(0)
    once = evaluate(Noisy(), x, y, Ball("linf", 1e-6), suite=[PGD], eot=1).clean_accuracy
    often = evaluate(Noisy(), x, y, Ball("linf", 1e-6), suite=[PGD], eot=400)
    assert often.clean_accuracy > once + 0.1
    assert often.card["eot"] == 400


def test_the_package_itself_can_be_called():
    model = Linear()
    x, y = labelled(model, 10)
    assert package(model, x, y, Ball("linf", 1e-6), suite=[PGD]).robust_accuracy == 1.0


def test_a_seed_gives_the_same_rows_and_another_gives_others():
    model = Linear(classes=4)
    x, y = labelled(model, 30)
    ball = radius_at(model, x, y, 0.5)
    noise = [Entry("noise", "random_noise", {"draws": 5})]

    def rows(seed: int) -> list[float]:
        return [row.distance for row in evaluate(model, x, y, ball, suite=noise, seed=seed).ledger.rows()]

    assert rows(0) == rows(0)
    assert rows(0) != rows(1)
