"""Every finding fires on a toy that has its defect, and no unrelated one does; honest models give none."""

from __future__ import annotations

import copy
import io
import json
import warnings
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import audit_models as toys
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from toys import Linear, labelled, radius_at

from hardsphere.attacks.losses import margin
from hardsphere.attacks.pgd import fgsm
from hardsphere.data import load as load_data
from hardsphere.data import to_float
from hardsphere.errors import HardsphereError
from hardsphere.evaluate import Entry, evaluate
from hardsphere.evaluate.audit import LIMIT, Audit, Finding, Kind, Severity, audit, probes
from hardsphere.evaluate.audit.probes import speaks_of_test
from hardsphere.evaluate.audit.scale import Trials, compare
from hardsphere.evaluate.audit.subject import Subject, mean_gain
from hardsphere.models import HeadSpec, build
from hardsphere.noise import Noise
from hardsphere.recipes import recipe
from hardsphere.report.audit import audit_markdown, render_audit
from hardsphere.sphere import find_head, paper_view
from hardsphere.threat import Ball
from hardsphere.train import load, train

BALL = Ball("linf", 0.1)
COUNT = 120


@pytest.fixture(scope="module")
def digits():
    return load_data("digits")


@pytest.fixture(scope="module")
def samples(digits):
    """The first test images, their labels and ids."""
    return to_float(digits.test.pixels), digits.test.labels, digits.test.ids


@pytest.fixture(scope="module")
def linear(digits):
    return toys.fit_linear(to_float(digits.train.pixels), digits.train.labels)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Honestly trained robust networks by recipe, epochs and seed, each trained when it is first asked for."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def deployed(name, epochs, seed):
        run = folder / f"{name}-{epochs}-{seed}"
        train(recipe(f"digits/{name}", {"epochs": str(epochs), "seed": str(seed), "attack.steps": "5"}), run)
        return load(run)

    return deployed


def honest(*models):
    """(recipe, epochs, seed, samples) for a test: seed 0 goes with the quick tests, the others with the slow ones."""
    return [pytest.param(*model, marks=() if model[2] == 0 else pytest.mark.check) for model in models]


# -- one defect each --------------------------------------------------------------------------------------------------


@dataclass
class Toy:
    """A defect, what it must give and what else it may give because it follows from it."""

    name: str
    build: object
    must: Kind
    may: frozenset[Kind] = frozenset()
    severity: Severity = Severity.SUSPICIOUS
    prepare: object = None
    options: dict = field(default_factory=dict)


BLIND = frozenset({Kind.BLACK_BOX_STRONGER, Kind.HUGE_EPS_HOLDS, Kind.NOISE_AS_STRONG})
"""What follows from gradients that are of no use."""


def misleading(change):
    return lambda model, x: toys.Misleading(model, change=change)


TOYS = [
    Toy("no graph", lambda m, x: toys.Detached(m), Kind.ZERO_GRADIENT, BLIND, Severity.INVALID),
    Toy("rounded logits", lambda m, x: toys.Rounded(m), Kind.ZERO_GRADIENT, BLIND, Severity.INVALID),
    Toy("leaves torch", lambda m, x: toys.Opaque(m), Kind.ZERO_GRADIENT, BLIND, Severity.INVALID),
    Toy(
        "constant",
        lambda m, x: toys.Constant(),
        Kind.ZERO_GRADIENT,
        frozenset({Kind.HUGE_EPS_HOLDS}),
        Severity.INVALID,
    ),
    Toy("saturated", lambda m, x: toys.Saturated(m), Kind.ZERO_GRADIENT, frozenset({Kind.CE_WEAKER_THAN_MARGIN})),
    Toy("NaN gradients", misleading(toys.not_a_number), Kind.NON_FINITE_GRADIENT, BLIND, Severity.INVALID),
    Toy("flat logits", lambda m, x: toys.Scaled(m, factor=0.25), Kind.LOGIT_SCALE),
    Toy(
        "flatter logits",
        lambda m, x: toys.Scaled(m, factor=0.02),
        Kind.LOGIT_SCALE,
        frozenset({Kind.CE_WEAKER_THAN_MARGIN}),
    ),
    Toy("logits all but equal", lambda m, x: toys.Scaled(m, factor=1e-3), Kind.CE_WEAKER_THAN_MARGIN),
    Toy("half a gradient", misleading(toys.right_above_bright_below), Kind.BLACK_BOX_STRONGER),
    Toy(
        "half a gradient and a surrogate",
        misleading(toys.right_above_bright_below),
        Kind.TRANSFER_STRONGER,
        frozenset({Kind.BLACK_BOX_STRONGER}),  # what gradients hide, queries find as well
    ),
    Toy(
        "pixels cut off, on larger images",
        lambda m, x: toys.Clipping(m),
        Kind.BLACK_BOX_STRONGER,
        prepare=lambda x: x.repeat_interleave(4, 2).repeat_interleave(4, 3),
    ),
    Toy(
        "few starts lead up",
        misleading(toys.right_from_few_starts),
        Kind.STILL_HELPING,
        frozenset({Kind.BLACK_BOX_STRONGER, Kind.HUGE_EPS_HOLDS}),
    ),
    Toy("snaps back", lambda m, x: toys.Remembering(m, eps=BALL.eps, memory=x), Kind.HUGE_EPS_HOLDS),
    Toy("signs at random", misleading(toys.scrambled), Kind.NOISE_AS_STRONG, BLIND),
    Toy("noise on the input", lambda m, x: toys.Noisy(m, sigma=0.02), Kind.RANDOMISED),
    Toy("softmax", lambda m, x: toys.Softmax(m), Kind.PROBABILITIES, severity=Severity.INVALID),
    Toy("dropout left on", lambda m, x: toys.WithDropout(m).train(), Kind.TRAIN_MODE, severity=Severity.INVALID),
    Toy("statistics left on", lambda m, x: toys.WithBatchNorm(m).train(), Kind.TRAIN_MODE, severity=Severity.INVALID),
    Toy("batch in the logits", lambda m, x: toys.BatchCoupled(m), Kind.BATCH_DEPENDENT, severity=Severity.INVALID),
    Toy("a cache", lambda m, x: toys.Caching(m), Kind.REMEMBERS, severity=Severity.INVALID),
    Toy("NaN", lambda m, x: toys.NotANumber(m), Kind.NON_FINITE_OUTPUT, severity=Severity.INVALID),
    Toy(
        "images in [0, 255]",
        lambda m, x: m,
        Kind.INPUT_RANGE,
        severity=Severity.INVALID,
        prepare=lambda x: 255 * x,
    ),
    Toy(
        "images normalised outside",
        lambda m, x: toys.Unnormalised(m, mean=0.3, std=0.37),
        Kind.INPUT_RANGE,
        severity=Severity.INVALID,
        prepare=lambda x: (x - 0.3) / 0.37,
    ),
    Toy(
        "normalisation forgotten",
        lambda m, x: toys.Unnormalised(m, mean=0.3, std=0.37),
        Kind.NORMALISATION_OUTSIDE,
        severity=Severity.INVALID,
    ),
    Toy("chosen on test", lambda m, x: m, Kind.SELECTED_ON_TEST, options={"selection": "best PGD-20 on the test set"}),
]


@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.name)
def test_a_planted_defect_is_found_and_nothing_unrelated(toy, linear, samples):
    x, y, ids = (part[:COUNT] for part in samples)
    options = dict(toy.options)
    if toy.must is Kind.TRANSFER_STRONGER:
        options["surrogate"] = linear
    pixels = toy.prepare(x) if toy.prepare else x
    found = audit(toy.build(linear, x), pixels, y, BALL, ids=ids, **options)
    assert toy.must in found.kinds
    assert found.kinds <= {toy.must} | toy.may
    finding = next(finding for finding in found.findings if finding.kind is toy.must)
    assert finding.severity is toy.severity
    worst = {one.severity for one in found.findings}
    assert found.verdict == ("invalid" if Severity.INVALID in worst else "suspicious")
    json.dumps(found.to_dict())  # plain values only


def test_every_finding_has_a_toy():
    assert {toy.must for toy in TOYS} | {Kind.EVALUATION_TOO_WEAK} == set(Kind)


# -- no false alarm ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.05), ("linf", 0.15), ("l2", 0.3), ("l1", 0.5)])
def test_a_linear_model_is_sound(norm, eps, linear, samples):
    x, y, ids = (part[:COUNT] for part in samples)
    found = audit(linear, x, y, Ball(norm, eps), ids=ids, selection="the last epoch, not selected on test data")
    assert (found.findings, found.verdict) == ([], "sound")


@pytest.mark.parametrize("part", [0.05, 0.5, 0.9])
def test_a_linear_model_of_two_classes_is_sound_at_every_radius(part):
    model = Linear()  # in train mode, as it was built: that changes nothing it says
    x, y = labelled(model, 80, wrong=5)
    found = audit(model, x, y, radius_at(model, x[5:], y[5:], part))
    assert found.findings == []
    assert model.training


def test_log_probabilities_are_logits(linear, samples):
    x, y, ids = (part[:COUNT] for part in samples)
    assert audit(toys.LogSoftmax(linear), x, y, BALL, ids=ids).findings == []


@pytest.mark.parametrize(
    ("name", "epochs", "seed", "count"),
    honest(
        ("pgd", 5, 0, 150),
        ("pgd-he", 5, 0, 150),
        ("pgd", 8, 1, 359),
        ("pgd-he", 8, 1, 359),
        ("pgd", 5, 2, 359),
    ),
)
def test_an_honestly_trained_robust_model_is_sound(name, epochs, seed, count, trained, samples):
    deployed, (x, y, ids) = trained(name, epochs, seed), (values[:count] for values in samples)
    found = audit(deployed.model, x, y, deployed.ball, ids=ids, selection=deployed.selection)
    assert (found.findings, found.verdict, found.n) == ([], "sound", min(count, LIMIT))
    broken = found.probes["white_box"]["margin"]
    assert 10 < broken < 90  # the probes had something to break and something to leave


@pytest.mark.parametrize(
    ("name", "epochs", "seed", "count"),
    honest(("pgd-he", 5, 0, 100), ("pgd-he", 8, 1, 359)),
)
def test_raw_cosines_show_the_scale_finding_that_the_deployed_model_does_not(
    name, epochs, seed, count, trained, samples
):
    deployed, (x, y, ids) = trained(name, epochs, seed), (values[:count] for values in samples)
    found = audit(paper_view(deployed.model), x, y, deployed.ball, ids=ids)
    assert Kind.LOGIT_SCALE in found.kinds
    assert found.kinds <= {Kind.LOGIT_SCALE, Kind.CE_WEAKER_THAN_MARGIN}
    (finding,) = (finding for finding in found.findings if finding.kind is Kind.LOGIT_SCALE)
    assert finding.evidence["factor"] == find_head(deployed.model).scale
    assert finding.evidence["broken"]["points"] > 1
    assert finding.evidence["worn"]["interval"][0] > 0


# -- with an evaluation -----------------------------------------------------------------------------------------------


def test_a_weak_evaluation_is_found_out(linear, samples):
    x, y, ids = (part[:100] for part in samples)
    weak = evaluate(linear, x, y, BALL, ids=ids, suite=[Entry("weak", "pgd", {"steps": 1, "step_size": 1e-3})])
    found = audit(linear, x, y, BALL, ids=ids, evaluation=weak)
    assert found.kinds == {Kind.EVALUATION_TOO_WEAK}
    strong = evaluate(linear, x, y, BALL, ids=ids, suite="quick")
    assert audit(linear, x, y, BALL, ids=ids, evaluation=strong).findings == []


def test_black_box_outcomes_and_stuck_attacks_of_an_evaluation_count(linear, samples):
    x, y, ids = (part[:100] for part in samples)
    suite = [Entry("pgd", "pgd", {"steps": 5}), Entry("square", "square", {"queries": 500})]
    model = toys.Detached(linear)
    seen = evaluate(model, x, y, BALL, ids=ids, suite=suite)
    by_square = sum(row.outcome == "broken" for row in seen.ledger.rows(attack="square"))
    found = audit(model, x, y, BALL, evaluation=seen)  # it finds the samples by their positions
    assert not [note for note in found.notes if "evaluation" in note]
    assert found.probes["black_box"]["broken"] >= by_square > 10
    assert found.probes["gradients"]["stuck"] == sum(row.stop == "STUCK" for row in seen.ledger.rows(attack="pgd")) > 50


def test_an_evaluation_of_something_else_is_not_used_and_the_audit_says_so(linear, samples):
    x, y, ids = (part[:60] for part in samples)
    weak = evaluate(linear, x, y, BALL, ids=ids, suite=[Entry("weak", "pgd", {"steps": 1, "step_size": 1e-3})])
    cases = {
        "no numbers inside": (linear, x, y, Ball("linf", 0.05), ids),
        "another model": (toys.LogSoftmax(linear), x, y, BALL, ids),
        "other samples": (linear, x.flip(0), y.flip(0), BALL, torch.arange(60)),
    }
    for reason, (model, pixels, labels, ball, keys) in cases.items():
        found = audit(model, pixels, labels, ball, ids=keys, evaluation=weak)
        assert Kind.EVALUATION_TOO_WEAK not in found.kinds
        assert any(reason in note for note in found.notes)


def test_the_selection_is_read_from_the_evaluation_and_from_ids(linear, samples):
    x, y, ids = (part[:40] for part in samples)
    about = {"selection": "the best epoch by test accuracy"}
    seen = evaluate(linear, x, y, BALL, ids=ids, suite="quick", about=about)
    assert Kind.SELECTED_ON_TEST in audit(linear, x, y, BALL, ids=ids, evaluation=seen).kinds
    shared = {"ids": ids[:7].tolist()}
    (finding,) = audit(linear, x, y, BALL, ids=ids, selection=shared).findings
    assert (finding.kind, finding.evidence["shared"]) == (Kind.SELECTED_ON_TEST, 7)
    assert audit(linear, x, y, BALL, ids=ids, selection={"split": "validation", "ids": [10**9]}).findings == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("best epoch on the test set", True),
        ("best test accuracy", True),
        ("PGD-20 on test_batch", True),
        ("best of epochs 1 to 8, by margin-PGD-10 on 144 held-out training images", False),
        ("the latest epoch, not selected", False),
        ("held-out split, never on test data", False),
        ("the fastest epoch", False),
    ],
)
def test_which_descriptions_speak_of_test_data(text, expected):
    assert speaks_of_test(text) is expected


# -- manners ----------------------------------------------------------------------------------------------------------


def test_the_model_and_the_generator_are_left_as_they_were(linear, samples):
    x, y, ids = (part[:30] for part in samples)
    model = toys.WithBatchNorm(linear).train()
    model.model.eval()
    weight = model.model[1].weight
    weight.grad = torch.ones_like(weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    audit(model, x, y, BALL, ids=ids)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.norm.running_mean is model.norm._buffers["running_mean"]
    assert weight.requires_grad
    assert torch.equal(weight.grad, torch.ones_like(weight))
    weight.grad = None


def test_an_audit_repeats_and_does_not_depend_on_the_batch(linear, samples):
    x, y, ids = (part[:20] for part in samples)
    noisy = toys.Noisy(linear, sigma=0.05)
    first, second = (audit(noisy, x[:8], y[:8], BALL, ids=ids[:8]).probes for _ in range(2))
    assert first == second
    whole, parts = (audit(linear, x, y, BALL, ids=ids, batch=batch).probes for batch in (20, 7))
    whole.pop("randomness"), parts.pop("randomness")
    assert whole == parts


def test_a_batch_that_does_not_fit_is_halved(linear, samples):
    x, y, ids = (part[:40] for part in samples)

    class Small(toys.Around):
        def forward(self, x):
            if x.requires_grad and len(x) > 10:
                raise RuntimeError("out of memory: the toy takes ten images")
            return self.model(x)

    narrow, wide = (audit(model, x, y, BALL, ids=ids).probes for model in (Small(linear), linear))
    assert narrow == wide


def test_all_nan_and_nothing_right_are_findings_or_notes_and_no_crash(linear, samples):
    x, y, ids = (part[:30] for part in samples)

    class Nan(nn.Module):
        def forward(self, x):
            return x.flatten(1)[:, :10] * torch.nan

    found = audit(Nan(), x, y, BALL, ids=ids)
    assert (found.kinds, found.verdict) == ({Kind.NON_FINITE_OUTPUT}, "invalid")
    assert any("none of these images" in note for note in found.notes)
    wrong = audit(linear, x, (linear(x).argmax(1) + 1) % 10, BALL, ids=ids)
    assert any("none of these images" in note for note in wrong.notes)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda m, x, y: (m, x[:0], y[:0]), "empty"),
        (lambda m, x, y: (m, x, y + 10), "10 classes"),
        (lambda m, x, y: (m, (255 * x).byte(), y), "uint8"),
        (lambda m, x, y: (m, x[:, :, :4], y), "cannot take images"),
        (lambda m, x, y: (nn.Flatten(0), x, y), "must return logits"),
        (lambda m, x, y: ("a model", x, y), "must be a torch module"),
    ],
)
def test_bad_input_is_one_sentence(change, sentence, linear, samples):
    model, x, y = change(linear, samples[0][:20], samples[1][:20])
    with pytest.raises(HardsphereError, match=sentence):
        audit(model, x, y, BALL)


def test_a_data_split_brings_labels_and_ids(linear, digits, samples):
    x, y, ids = (part[:30] for part in samples)
    whole = audit(linear, digits.test, None, BALL, limit=30)
    assert whole.n == 30
    assert whole.probes == audit(linear, x, y, BALL, ids=ids).probes


def test_progress_names_every_probe_once(linear, samples):
    x, y, ids = (part[:20] for part in samples)
    steps = []
    audit(linear, x, y, BALL, ids=ids, progress=lambda *step: steps.append(step))
    names, indices, counts = zip(*steps, strict=True)
    assert list(indices) == list(range(counts[0]))
    assert len(set(names)) == len(names)


def test_the_mean_gain_is_the_paired_mean_and_its_interval():
    more, than = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 1]]).bool(), torch.tensor([[0, 1, 0, 0], [0, 0, 1, 0]]).bool()
    gain = mean_gain(more, than, 5, 0.9875)
    difference = [1.0, 0.0, -0.5, 0.5, 0.0]  # the fifth sample is one that the model gets wrong
    mean = sum(difference) / 5
    error = (sum((one - mean) ** 2 for one in difference) / 5 / 5) ** 0.5
    assert gain.points == pytest.approx(100 * mean)
    assert gain.interval == pytest.approx((100 * (mean - 2.497705 * error), 100 * (mean + 2.497705 * error)), abs=1e-4)


def test_a_sample_keeps_the_share_of_its_lead_that_an_attack_leaves(linear, samples):
    x, y, ids = (part[:40] for part in samples)
    right = linear(x).argmax(1) == y
    x, y, ids = x[right], y[right], ids[right]
    subject = Subject(linear, x, y, ids, len(x), BALL, 0, 16)
    broken = subject.strike("fgsm", fgsm)
    attacked = fgsm(linear, x, y, BALL, noise=Noise(0, ids)).x_adv
    share = margin(linear(attacked), y) / margin(linear(x), y)
    assert broken.any()
    assert not broken.all()
    assert torch.allclose(subject.kept["fgsm"], share.clamp(0, 1), atol=1e-5)
    assert torch.equal(subject.kept["fgsm"] == 0, broken)


@pytest.mark.parametrize(
    ("factor", "gain", "wear", "gains", "is_finding"),
    [
        (15.0, 0.02, 0.1, True, True),
        (15.0, 0.005, 0.1, False, False),  # too few more are broken
        (1 / 15, 0.02, 0.0, False, False),  # nothing but those few speaks for it
        (3.0, 0.02, 0.1, True, False),  # as much as honest training leaves
        (1 / 3, 0.06, 0.1, True, True),
    ],
)
def test_a_scale_is_found_if_it_breaks_more_and_the_margins_agree(factor, gain, wear, gains, is_finding):
    count = 1000
    noise = torch.rand(1, count, generator=torch.Generator().manual_seed(0)) * 0.1
    deployed = Trials(torch.zeros(1, count, dtype=torch.bool), 0.3 + noise.flip(1))
    other = Trials((torch.arange(count) < gain * count)[None], 0.3 + noise - wear)
    (compared,) = compare({1.0: deployed, factor: other}, count)
    assert (compared.gains, compared.is_finding) == (gains, is_finding)


def test_samples_far_from_the_edge_say_nothing_about_a_scale():
    broken = torch.zeros(1, 10, dtype=torch.bool)
    kept = torch.linspace(0.5, 1, 10)[None]
    (compared,) = compare({1.0: Trials(broken, kept), 15.0: Trials(broken, kept.flip(1))}, 10)
    assert compared.worn.interval == (0, 0)


def test_the_report_says_verdict_finding_evidence_and_remedy(linear, samples):
    x, y, ids = (part[:30] for part in samples)
    found = audit(toys.Softmax(linear), x, y, BALL, ids=ids)
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(render_audit(found))
    for text in (console.export_text(), audit_markdown(found), str(found)):
        assert "invalid" in text
        assert "add up to 1" in text
        assert "Return the values before the softmax." in text
    sound = Audit([], {}, ["Nothing was left out."], 10, BALL, 0, 1.0)
    assert audit_markdown(sound).startswith("# Audit: sound")
    assert Finding(Kind.RANDOMISED, "Seen.").to_dict()["kind"] == "RANDOMISED"
    assert sound.to_dict()["verdict"] == "sound"


@pytest.mark.parametrize(("right_before", "right_after", "told"), [(83, 90, False), (83, 93, True), (40, 60, False)])
def test_what_more_contrast_gains_is_no_sign_of_other_pixels(right_before: int, right_after: int, told: bool) -> None:
    """It helps networks that were trained on these very pixels, but not against half of their errors."""
    y = torch.zeros(100, dtype=torch.long)

    def answer(x: Tensor) -> Tensor:
        right = right_after if float(x.max()) > 1.5 else right_before
        return torch.where(torch.arange(100) < right, 0, 1)[:, None].eq(torch.arange(2)).float()

    x = torch.rand(100, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    measured: dict[str, Any] = {}
    found = list(probes.normalisation_outside(answer, x, y, answer(x), measured))
    assert bool(found) == told
    assert measured["normalisation"]["points"] == right_after - right_before


class Overflowing(nn.Module):
    """Right in float32, and without a finite answer in float16."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * 30000.0 * 3.0 / 90000.0


def test_a_float16_model_is_told_from_its_float32_copy(linear, samples):
    x, y, ids = (part[:40] for part in samples)
    fine, overflows = copy.deepcopy(linear).half(), Overflowing(copy.deepcopy(linear)).half()
    for model, kinds in ((fine, set()), (overflows, {Kind.NON_FINITE_OUTPUT})):
        found = audit(model, x, y, BALL, ids=ids)
        assert found.kinds == kinds
        assert any("numbers are torch.float16" in note for note in found.notes)
        remarks = evaluate(model, x, y, BALL, suite="quick").card["remarks"]
        assert any("are not finite" in remark for remark in remarks) == bool(kinds)
        assert any("float32 copy of itself" in remark for remark in remarks)
    assert not any("copy" in note for note in audit(linear, x, y, BALL, ids=ids).notes)


def test_a_model_that_casts_its_images_is_judged_as_it_is(linear, samples):
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = copy.deepcopy(linear).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x.bfloat16()).float()

    x, y, _ = (part[:40] for part in samples)
    found = evaluate(Cast(), x, y, BALL, suite="quick")
    assert found.clean_accuracy > 0.9
    assert not any("copy" in remark for remark in found.card["remarks"])


def test_modules_that_know_no_modes_are_judged(linear, samples):
    x, y, ids = (part[:20] for part in samples)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frozen = torch.jit.freeze(torch.jit.trace(linear.eval(), x))
    size = {"x": {0: torch.export.Dim("images", min=1, max=4096)}}
    exported = torch.export.export(Plain(linear), (x,), dynamic_shapes=size).module()
    expected = evaluate(linear, x, y, BALL, suite="quick").survivors()
    for model in (frozen, exported):
        assert evaluate(model, x, y, BALL, suite="quick").survivors() == expected
        assert audit(model, x, y, BALL, ids=ids).verdict == "sound"


class Plain(nn.Module):
    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_an_audit_of_raw_cosines_says_so(samples):
    x, _, ids = (part[:10] for part in samples)
    head = HeadSpec(feature_norm=True, weight_norm=True)
    model = build("cnn-2", num_classes=10, in_channels=1, image_size=8, head=head, seed=0).eval()
    y = model(x).argmax(dim=1)
    for one, said in ((paper_view(model), True), (model, False)):
        assert any("raw cosines" in note for note in audit(one, x, y, BALL, ids=ids).notes) == said
