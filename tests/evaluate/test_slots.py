"""Attacks in slots against their plain twins."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import Linear, distances, labelled, radius_at

from hardsphere import attacks, threat
from hardsphere.attacks import AttackResult, Stop, losses
from hardsphere.attacks.programs import PROGRAMS, program
from hardsphere.blocks import functions, has_blocks
from hardsphere.evaluate import Entry, Progress, crafting, evaluate, witness
from hardsphere.evaluate.crafting import HalfPrecision, lost_gradients, stand_in
from hardsphere.evaluate.slots import Judged, Slots
from hardsphere.evaluate.striking import FAST_CRAFTING
from hardsphere.models import build
from hardsphere.noise import Noise
from hardsphere.runtime import tf32
from hardsphere.threat import Ball
from unasked import unasked

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("pgd", "linf", {"steps": 7}),
    ("pgd", "linf", {"steps": 7, "restarts": 3, "loss": losses.margin}),
    ("pgd", "l1", {"steps": 5, "loss": losses.dlr, "keep": "last"}),
    ("pgd", "l2", {"steps": 5, "targeted": True}),
    ("bim", "linf", {"steps": 4}),
    ("fgsm", "linf", {"keep": "last"}),
    ("mim", "linf", {"steps": 6, "keep": "last"}),
    ("mim", "l2", {"steps": 6, "loss": losses.margin}),
    ("carlini_linf", "linf", {"steps": 9, "restarts": 2}),
    ("apgd", "linf", {"steps": 30}),
    ("apgd", "l2", {"steps": 20, "restarts": 2, "loss": losses.dlr}),
    ("apgd", "linf", {"steps": 20, "targeted": True}),
    ("apgd_targeted", "linf", {"steps": 20, "targets": 3}),
    ("apgd_targeted", "l2", {"steps": 12, "targets": 9, "restarts": 2}),
    ("fab_targeted", "linf", {"steps": 12, "targets": 4}),
    ("fab_targeted", "l2", {"steps": 12, "targets": 9}),
    ("fab_targeted", "linf", {"steps": 6, "targets": 2, "eta": 1.2, "beta": 0.5, "alpha_max": 0.3}),
    ("feature_attack", "linf", {"steps": 6, "restarts": 4, "step_size": 0.01}),
    ("feature_attack", "l2", {"steps": 6, "restarts": 4, "step_size": 0.1, "keep": "last"}),
    ("square", "linf", {"queries": 150}),
    ("square", "linf", {"queries": 90, "targeted": True, "rescale": True}),
]
RADIUS = {"linf": 0.012, "l2": 0.1, "l1": 0.7}
COUNT = 33


class Small(nn.Module):
    """A convolution network whose decisions are neither all near nor all far."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.conv = nn.Conv2d(3, 12, 3, padding=1)
            self.norm = nn.BatchNorm2d(12)
            self.linear = nn.Linear(12 * 16, 6)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.norm(self.conv(x - 0.5)))
        return self.linear(torch.nn.functional.avg_pool2d(z, 2).flatten(1))


def samples(model: nn.Module) -> tuple[Tensor, Tensor]:
    x = torch.rand(COUNT, 3, 8, 8, generator=torch.Generator().manual_seed(5))
    x = x.to(next(model.parameters()).device)
    return x, model(x).argmax(dim=1).detach()


def in_slots(name: str, options: dict[str, Any], ball: Ball, model: nn.Module, size: int, crafted_on: nn.Module) -> Any:
    """All samples through a program: the verdicts by position, and how often the host looked in."""
    x, y = samples(model)
    y = _wished(y, options)

    def fetch(positions: Sequence[int]) -> tuple[Tensor, Tensor, Noise]:
        rows = torch.tensor(positions, device=x.device)
        return x[rows], y[rows], Noise(0, rows)

    made = program(name, ball, **options, **_guides(name, model))
    assert made is not None
    slots = Slots(made, crafted_on, model, fetch, _confirmed(model, ball, made.targeted), size)
    return {one.position: one for done in slots.run(range(COUNT)) for one in done}


def ball_for(name: str, norm: str, targeted: bool) -> Ball:
    """A radius at which the attack breaks some samples and leaves others."""
    return Ball(norm, (3 if targeted else 1) * (5 if name == "feature_attack" else 1) * RADIUS[norm])


def _guides(name: str, model: nn.Module) -> dict[str, Tensor]:
    if name != "feature_attack":
        return {}
    x = torch.rand(60, 3, 8, 8, generator=torch.Generator().manual_seed(7)).to(next(model.parameters()).device)
    return {"guides": x, "guide_labels": torch.arange(60, device=x.device) % 6}


def _wished(y: Tensor, options: dict[str, Any]) -> Tensor:
    return (y + 1) % 6 if options.get("targeted") else y


def _confirmed(model: nn.Module, ball: Ball, targeted: bool) -> Callable[..., Any]:
    def confirm(x: Tensor, y: Tensor, x_adv: Tensor) -> tuple[Tensor, ...]:
        broken, predicted, distance, image = witness.confirm(model, x, y, x_adv, ball)
        return (predicted == y if targeted else broken), predicted, distance, image

    return confirm


@pytest.fixture
def turns_ask_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, which records them."""
    monkeypatch.setattr(Slots, "_advance", unasked(Slots._advance))
    monkeypatch.setattr(threat, "_has_settled", lambda *times: False)  # asked on a CPU alone


@pytest.mark.usefixtures("turns_ask_nothing")
@pytest.mark.parametrize(("name", "norm", "options"), CASES)
def test_slots_find_what_the_plain_form_finds(name: str, norm: str, options: dict[str, Any]) -> None:
    targeted = bool(options.get("targeted"))
    model, ball = Small(), ball_for(name, norm, targeted)
    x, y = samples(model)
    y = _wished(y, options)
    noise = Noise(0, torch.arange(COUNT))
    plain = getattr(attacks, name)(model, x, y, ball, noise=noise, **options, **_guides(name, model))
    broken, *_ = _confirmed(model, ball, targeted)(x, y, plain.x_adv)
    assert 5 < int(broken.sum()) < COUNT - 5, "a radius at which the comparison says something"
    with attacks.base.attacking(model):
        found: dict[int, Judged] = in_slots(name, options, ball, model, 8, model)
    assert sorted(found) == list(range(COUNT))
    assert [found[position].broken for position in range(COUNT)] == broken.tolist()
    for position in range(COUNT):
        assert found[position].stop.name == ("BROKEN" if broken[position] else "SPENT")


def test_every_program_is_held_against_its_twin() -> None:
    assert {name for name, _, _ in CASES} == set(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_takes_the_options_of_its_twin(name: str) -> None:
    """With the same defaults, so that a suite means the same on a GPU."""
    plain, turns = (inspect.signature(one).parameters.values() for one in (getattr(attacks, name), PROGRAMS[name]))
    options = {option.name: option.default for option in plain if option.kind is option.KEYWORD_ONLY}
    del options["noise"]
    assert {option.name: option.default for option in turns if option.name != "ball"} == options


@pytest.mark.parametrize("name", ["pgd", "apgd_targeted", "fab_targeted", "square"])
def test_verdicts_do_not_depend_on_the_slots(name: str) -> None:
    model, ball = Small(), Ball("linf", RADIUS["linf"])
    options: dict[str, Any] = {"queries": 60} if name == "square" else {"steps": 6}
    if "targeted" in name:
        options["targets"] = 2
    few, many = (in_slots(name, options, ball, model, size, model) for size in (10, 64))
    assert [few[one].broken for one in range(COUNT)] == [many[one].broken for one in range(COUNT)]


@pytest.mark.parametrize(
    ("name", "options", "turns"),
    [
        ("fgsm", {}, 2),
        ("pgd", {"steps": 20}, 21),
        ("apgd_targeted", {"steps": 10, "targets": 3}, 33),
        ("fab_targeted", {"steps": 10, "targets": 3}, 30),
        ("square", {"queries": 130}, 130),
    ],
)
def test_no_turn_is_wasted(name: str, options: dict[str, Any], turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    advance = Slots._advance
    monkeypatch.setattr(Slots, "_advance", lambda slots, again: (taken.append(again), advance(slots, again)))
    found = in_slots(name, options, Ball("linf", 1e-5), Small(), COUNT, Small())
    assert not any(one.broken for one in found.values())
    assert len(taken) == turns


def test_a_candidate_of_half_precision_counts_only_if_it_is_confirmed() -> None:
    """A crafting model that is wrong about everything finds candidates in every turn, and none of them counts."""

    class Liar(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return -model(x)

    model, ball = Small(), Ball("linf", 1e-4)
    found = in_slots("pgd", {"steps": 30}, ball, model, 8, Liar())
    assert not any(one.broken for one in found.values())
    assert all(one.forwards == 32 and one.backwards == 31 for one in found.values()), "each used all its turns"


def test_half_precision_answers_like_the_model() -> None:
    model = Small()
    x, _ = samples(model)
    half = HalfPrecision(model)
    with torch.no_grad():
        logits, exact = half(x), model(x)
    assert logits.dtype == torch.float32
    assert model.conv.weight.dtype == torch.float32, "the model itself stays as it was"
    assert half.model.linear.weight.dtype == torch.float32, "three digits of a logit would be too few"
    assert float((logits - exact).abs().max()) < 0.03 * float(exact.abs().max())
    assert not torch.equal(logits, exact)
    assert isinstance(stand_in(model, x), HalfPrecision)


@pytest.mark.parametrize("defect", ["none", "forwards", "backwards"])
def test_fused_blocks_stand_in_if_they_are_sound(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attacks on kernels that go backwards wrongly would be weak, and the model would look strong."""
    forwards, backwards = functions.convolve, functions.convolve_back
    if defect == "forwards":
        monkeypatch.setattr(functions, "convolve", lambda *a, **b: [2 * image for image in forwards(*a, **b)])
    if defect == "backwards":
        monkeypatch.setattr(functions, "convolve_back", lambda *a, **b: -backwards(*a, **b))
    monkeypatch.setattr(crafting, "has_convolutions", lambda x: True)
    model = build("wrn-10-4", num_classes=10, image_size=8, seed=0)
    x = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    model.train()(x)  # so that no norm is the identity
    half = stand_in(model.eval(), x)
    assert isinstance(half, HalfPrecision)
    assert has_blocks(half) == (defect == "none")
    with torch.no_grad():
        assert (half(x) - model(x)).norm() < 0.03 * model(x).norm()


def test_what_half_precision_changes_by_far_has_no_stand_in() -> None:
    class Contrary(nn.Module):
        def forward(self, logits: Tensor) -> Tensor:
            return logits * (-1 if torch.is_autocast_enabled("cpu") else 1)

    model = nn.Sequential(Small(), Contrary()).eval()
    assert stand_in(model, samples(Small())[0]) == "its answers change by 200 %"


def test_crafting_in_half_precision_finds_nearly_the_same() -> None:
    model, ball = Small(), Ball("linf", RADIUS["linf"])
    options = {"steps": 10, "targets": 3}
    exact = in_slots("apgd_targeted", options, ball, model, COUNT, model)
    half = in_slots("apgd_targeted", options, ball, model, COUNT, HalfPrecision(model))
    differing = sum(exact[one].broken != half[one].broken for one in range(COUNT))
    assert differing <= 1


def test_an_evaluation_in_half_precision_agrees_with_one_in_float32() -> None:
    """On a linear model the closed form is known: samples that are not near the radius fall, or stand, in both."""
    model = Linear(classes=5)
    x, y = labelled(model, 40, wrong=3)
    ball = radius_at(model, x[3:], y[3:], 0.5)
    suite = [Entry("apgd-t", "apgd_targeted", {"steps": 20}), Entry("noise", "random_noise", {"draws": 5})]
    fast, plain = (evaluate(model, x, y, ball, suite=suite, fast=fast) for fast in (True, False))
    assert fast.survivors() == plain.survivors()
    assert fast.clean_accuracy == plain.clean_accuracy == 37 / 40
    assert [result.card["about"]["crafting"] for result in (fast, plain)] == [
        FAST_CRAFTING,
        "float32",
    ]
    rows = [row for row in fast.ledger.rows(ball.eps) if row.attack == "apgd-t" and row.outcome in ("broken", "held")]
    assert len(rows) == 37
    assert all(row.forwards == row.backwards + 1 for row in rows)


def test_a_success_that_float32_does_not_confirm_is_tried_again_in_float32() -> None:
    model = Linear(classes=3)
    x, y = labelled(model, 12)
    ball = radius_at(model, x, y, 0.5)
    calls = []

    def hasty(model: nn.Module, x: Tensor, y: Tensor, ball: Ball, *, noise: Noise) -> AttackResult:
        """The first time, claims a success that is none."""
        calls.append(len(x))
        if len(calls) == 1:
            return AttackResult(x.clone(), torch.zeros(len(x)), [Stop.BROKEN] * len(x))
        return attacks.pgd(model, x, y, ball, noise=noise, loss=losses.margin, steps=20)

    found = evaluate(model, x, y, ball, suite=[Entry("hasty", hasty)], fast=True)
    assert calls == [12, 12]
    exact = evaluate(model, x, y, ball, suite=[Entry("pgd", "pgd", {"loss": "margin", "steps": 20})], fast=False)
    assert found.survivors() == exact.survivors()


def test_an_interrupted_evaluation_in_slots_ends_with_the_same_rows(tmp_path: Path) -> None:
    model = Linear(classes=5)
    x, y = labelled(model, 150)
    ball = radius_at(model, x, y, 0.5)
    suite = [Entry("apgd", "apgd", {"steps": 30}), Entry("square", "square", {"queries": 250})]

    def rows(out: Path, stop_after: int | None = None) -> list[tuple[Any, ...]]:
        seen = []

        def watch(progress: Progress) -> None:
            seen.append(progress)
            if len(seen) == stop_after:
                raise KeyboardInterrupt

        found = evaluate(model, x, y, ball, suite=suite, batch=16, fast=True, out=out, progress=watch)
        return sorted((row.attack, row.sample, row.outcome, row.predicted, row.forwards) for row in found.ledger.rows())

    whole = rows(tmp_path / "whole")
    for stop in (12, 14, 17):
        with pytest.raises(KeyboardInterrupt):
            rows(tmp_path / str(stop), stop)
        assert rows(tmp_path / str(stop)) == whole


def test_a_randomised_model_is_not_replayed() -> None:
    class Noisy(Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1e-3 * torch.randn(len(x), 5)

    model = Noisy(classes=5)
    x, y = labelled(model, 6)
    card = evaluate(model, x, y, Ball("linf", 0.01), suite="quick", fast=True).card
    assert card["about"]["crafting"] == "float32"
    assert any("random" in remark for remark in card["remarks"])


def test_a_model_that_half_precision_does_not_suit_is_attacked_in_float32_and_the_card_says_why() -> None:
    class Picky(Linear):
        def forward(self, x: Tensor) -> Tensor:
            if torch.is_autocast_enabled("cpu"):
                raise NotImplementedError("no half precision, please\nsecond line")
            return super().forward(x)

    model = Picky(classes=5)
    x, y = labelled(model, 6)
    card = evaluate(model, x, y, Ball("linf", 0.01), suite="quick", fast=True).card
    assert card["about"]["crafting"] == "float32"
    assert any("NotImplementedError: no half precision, please." in remark for remark in card["remarks"])


def test_a_model_that_cannot_be_copied_is_attacked_in_float32() -> None:
    model = Linear(classes=5)
    x, y = labelled(model, 6)
    model.kept = model.linear.weight * 2  # a tensor with a history, which torch does not copy
    card = evaluate(model, x, y, Ball("linf", 0.01), suite="quick", fast=True).card
    assert card["about"]["crafting"] == "float32"
    assert any("RuntimeError: Only Tensors created explicitly" in remark for remark in card["remarks"])


class Saturated(nn.Module):
    """Its units' inputs lie so far out that tanh is 1 in bf16, where float32 still sees a slope."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.first, self.last = Linear(classes=12, seed=3), nn.Linear(12, 5, bias=False)
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.slope * self.first(x)))


def test_half_precision_that_hides_slopes_does_not_stand_in() -> None:
    """Its answers are right: only an attack would notice, by failing."""
    x = labelled(Linear(), 64)[0]
    for slope, hidden in ((0.2, False), (40.0, True)):
        torch.manual_seed(0)
        model = Saturated(slope).eval()
        share = lost_gradients(HalfPrecision(model), model, x).float().mean()
        assert share > crafting.LOST if hidden else share == 0
        found = stand_in(model, x)
        assert isinstance(found, str) == hidden
        assert found == f"it hides the slopes of {100 * share:.0f} % of the images" or not hidden
        if hidden:
            assert crafting.departure(HalfPrecision(model), model, x) < crafting.ALIKE
            card = evaluate(model, x, model(x).argmax(dim=1), Ball("linf", 0.01), suite="quick", fast=True).card
            assert card["about"]["crafting"] == "float32"
            assert any("hides the slopes" in remark for remark in card["remarks"])


def test_no_slope_is_lost_where_there_is_none() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    nn.init.zeros_(model[1].weight)
    x = labelled(Linear(), 8)[0]
    assert not bool(lost_gradients(HalfPrecision(model), model, x).any())


def test_half_precision_is_tried_on_as_many_images_as_fit() -> None:
    """A lack of memory is no reason against half precision."""

    class Greedy(Linear):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 20:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(x)

    model = Greedy(classes=5)
    x, y = labelled(Linear(classes=5), 70)
    card = evaluate(model, x, y, Ball("linf", 0.01), suite=[Entry("apgd", "apgd", {"steps": 5})], fast=True).card
    assert card["about"]["crafting"] == FAST_CRAFTING


@pytest.mark.parametrize(("outside", "allowed"), [("project", True), ("filter", False)])
def test_what_may_leave_the_ball_sees_the_boundary_in_float32(outside: str, allowed: bool) -> None:
    """It goes just across: one that TF32 sees elsewhere would be missed by its rounding."""
    model = Linear(classes=3)
    x, y = labelled(model, 6)
    seen = []

    def watching(model: nn.Module, x: Tensor, y: Tensor, ball: Ball, *, noise: Noise) -> AttackResult:
        seen.append((torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32))
        return AttackResult(x.clone(), torch.zeros(len(x)), [Stop.SPENT] * len(x))

    evaluate(model, x, y, Ball("linf", 0.01), suite=[Entry("watching", watching, outside=outside)], fast=True)
    assert seen == [(allowed, allowed)]


@pytest.mark.parametrize("attack", ["nes", "spsa", "zoo"])
def test_finite_differences_are_taken_in_float32(attack: str) -> None:
    """Differences over small distances drown in the rounding of TF32."""
    seen = set()

    class Watching(Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.add((torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32))
            return super().forward(x)

    model = Watching(classes=3)
    x, y = labelled(model, 4)
    seen.clear()
    with tf32():
        noise = Noise(0, torch.arange(4))
        getattr(attacks, attack)(model, x, y, Ball("linf", 0.01), noise=noise, queries=20)
        assert torch.backends.cudnn.allow_tf32
    assert seen == {(False, False)}


@pytest.mark.parametrize("attack", ["pgd", "apgd", "apgd_targeted"])
def test_an_image_that_gets_no_answer_is_broken_in_slots_too(attack: str) -> None:
    """NaN is no right answer, wherever the slots stand when the attack comes upon it."""

    class Hollow(Linear):
        """Has no answer near its boundaries: the root of a negative number."""

        def forward(self, x: Tensor) -> Tensor:
            logits = super().forward(x)
            first, second = logits.topk(2, dim=1).values.split(1, dim=1)
            return logits + 0 * (first - second - 0.05).sqrt()

    model = Hollow(classes=3)
    x, _ = labelled(model, 60)
    x = x[~model(x).isnan().any(dim=1)]
    y = model(x).argmax(dim=1)
    ball = Ball("linf", 0.1)
    suite = [Entry(attack, attack, {"steps": 20})]
    plain, fast = (evaluate(model, x, y, ball, suite=suite, fast=one).robust_accuracy for one in (False, True))
    beyond = (distances(model, x, y) > ball.eps).float().mean()
    assert fast <= plain
    assert fast <= beyond + 0.05


def test_a_success_on_another_view_that_the_model_does_not_share_is_no_reason_to_stop() -> None:
    """With features normalised, images seem broken that are not: the attack goes on to its last step."""
    keeps = []

    def hasty(model: nn.Module, x: Tensor, y: Tensor, ball: Ball, *, noise: Noise, keep: str = "any") -> AttackResult:
        keeps.append(keep)
        stop = Stop.BROKEN if keep == "any" else Stop.SPENT
        return AttackResult(x.clone(), torch.zeros(len(x)), [stop] * len(x))

    model = build("cnn-2", num_classes=3, image_size=8, seed=0).eval()
    x, y = labelled(model, 5, shape=(3, 8, 8))
    evaluate(model, x, y, Ball("linf", 0.01), suite=[Entry("hasty", hasty, view="fn")], fast=False)
    evaluate(model, x, y, Ball("linf", 0.01), suite=[Entry("hasty", hasty)], fast=False)
    assert keeps == ["any", "last", "any"]


def test_answers_that_depend_on_the_batch_are_said() -> None:
    class Social(Linear):
        def forward(self, x: Tensor) -> Tensor:
            logits = super().forward(x)
            return logits - logits.mean(dim=0) if len(x) > 1 else logits

    for model, said in ((Social(classes=3), True), (Linear(classes=3), False)):
        x, y = labelled(Linear(classes=3), 9)
        remarks = evaluate(model, x, y, Ball("linf", 0.01), suite="quick").card["remarks"]
        assert any("other images of its batch" in remark for remark in remarks) == said


def test_running_out_of_memory_halves_the_slots_and_changes_no_outcome() -> None:
    class Greedy(Linear):
        most = 1000

        def forward(self, x: Tensor) -> Tensor:
            if len(x) > self.most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(x)

    model = Greedy(classes=5)
    x, y = labelled(model, 150)
    ball = radius_at(model, x, y, 0.5)
    suite = [Entry("apgd", "apgd", {"steps": 20, "loss": "dlr"})]
    roomy = evaluate(model, x, y, ball, suite=suite, fast=True)
    model.most = 40
    assert evaluate(model, x, y, ball, suite=suite, fast=True).survivors() == roomy.survivors()
