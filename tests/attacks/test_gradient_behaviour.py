"""What gradient attacks owe their users beyond strength: no trace on the model, honest reasons, clear refusals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from gradient_table import TABLE, Entry, SmallNet, broken, cases, name, trained
from linear import LinearModel, linear_case
from torch import Tensor, nn

from hardsphere import attacks
from hardsphere.attacks import AttackResult, Stop, losses
from hardsphere.attacks.apgd import likeliest_others
from hardsphere.attacks.base import levelled, succeeded
from hardsphere.errors import HardsphereError
from hardsphere.noise import Noise
from hardsphere.sphere import attach, find_head, paper_view
from hardsphere.threat import Ball

GENERATOR = torch.Generator().manual_seed(1)
IMAGES = torch.rand(24, 3, 8, 8, generator=GENERATOR)
IDS = Noise(0, torch.arange(24))

# The attacks outside the table, which need more than a model and a batch.
OTHERS = [
    Entry(
        "feature",
        partial(attacks.feature_attack, guides=IMAGES.flip(0), guide_labels=torch.arange(24) % 10, steps=5, restarts=2),
    ),
    Entry("transfer", partial(attacks.transfer, source=SmallNet(seed=5), steps=5, restarts=2)),
    Entry("random-noise", partial(attacks.random_noise, draws=4)),
]


class Through(nn.Module):
    """A linear model behind a function of its logits or its pixels, to plant a defect."""

    def __init__(self, inner: nn.Module, pixels: object = None, logits: object = None) -> None:
        super().__init__()
        self.inner = inner
        self.pixels = pixels or (lambda x: x)
        self.logits = logits or (lambda z: z)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.inner(self.pixels(x)))  # type: ignore[operator,no-any-return]


@pytest.mark.parametrize("entry", [*TABLE, *OTHERS], ids=name)
def test_leaves_no_trace(entry: Entry) -> None:
    """Gradients, BatchNorm statistics, modes, frozen parameters, hooks and the caller's images are as before."""
    model = SmallNet().train()
    model.pool.eval()
    model.conv.bias.requires_grad_(False)
    model.last.weight.grad = torch.ones_like(model.last.weight)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    x, y = IMAGES.clone(), torch.arange(24) % 10
    entry.attack(model, x, y, Ball(entry.norms[0], 0.01), noise=IDS)
    assert torch.equal(x, IMAGES)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == wanted
    assert all(
        (parameter.grad is None) if parameter is not model.last.weight else bool((parameter.grad == 1).all())
        for parameter in model.parameters()
    )
    assert not any(module._forward_pre_hooks for module in model.modules())


EVERY = {
    **{str(entry): (entry.attack, entry.norms[0]) for entry in [*TABLE, *OTHERS]},
    "deepfool": (attacks.deepfool, "linf"),
    "fab": (partial(attacks.fab, steps=5), "linf"),
    "fab-targeted": (partial(attacks.fab_targeted, steps=5, targets=2), "linf"),
    "nes": (partial(attacks.nes, steps=2, pairs=4), "linf"),
    "spsa": (partial(attacks.spsa, steps=2, pairs=4), "linf"),
    "zoo": (partial(attacks.zoo, queries=20), "linf"),
    "square": (partial(attacks.square, queries=10), "linf"),
    "rays": (partial(attacks.rays, queries=20), "linf"),
}
every_attack = pytest.mark.parametrize(("attack", "norm"), EVERY.values(), ids=EVERY)


@every_attack
def test_foreign_batches_are_refused(attack: Callable[..., AttackResult], norm: str) -> None:
    """Of images that are normalised outside of the model the box would cut off most, and call the rest broken."""
    x, y = IMAGES, torch.arange(24) % 10
    arguments = {"noise": IDS}
    for foreign, labels, sentence in (
        ((x - 0.5) / 0.25, y, "need"),
        (torch.full_like(x, torch.nan), y, "need"),
        (x.half(), y, "float16"),
        ((255 * x).byte(), y, "uint8"),
        (x, y[:1], r"must be 24 of int64"),
        (x, y.float(), r"must be 24 of int64"),
        (x, y - 100, "A label is -100"),
    ):
        with pytest.raises(HardsphereError, match=sentence):
            attack(SmallNet(), foreign, labels, Ball(norm, 0.1), **arguments)


@pytest.mark.parametrize("key", EVERY)
def test_inference_mode_is_no_defence(key: str) -> None:
    """It cannot be left from inside as no_grad can. An attack without gradients works there, the others say so."""
    attack, norm = EVERY[key]
    model, x, y = trained()
    arguments = (model, x[:6], y[:6], Ball(norm, 0.05))
    outside = attack(*arguments, noise=IDS[:6])
    with torch.inference_mode():
        if key in ("nes", "spsa", "zoo", "square", "rays", "random-noise"):
            assert attack(*arguments, noise=IDS[:6]).stop == outside.stop
        else:
            with pytest.raises(HardsphereError, match=r"use torch\.no_grad"):
                attack(*arguments, noise=IDS[:6])


@every_attack
def test_an_empty_batch_and_images_with_a_graph(attack: Callable[..., AttackResult], norm: str) -> None:
    model, y = SmallNet().eval(), torch.arange(24) % 10
    empty = attack(model, IMAGES[:0], y[:0], Ball(norm, 0.1), noise=IDS[:0])
    assert empty.stop == []
    assert empty.x_adv.shape == (0, 3, 8, 8)
    found = attack(model, IMAGES[:2].clone().requires_grad_(), y[:2], Ball(norm, 0.1), noise=IDS[:2])
    assert not found.x_adv.requires_grad


@every_attack
def test_double_precision(attack: Callable[..., AttackResult], norm: str) -> None:
    model, x = SmallNet().double().eval(), IMAGES[:3].double()
    attack = partial(attack, guides=IMAGES.double()) if "guides" in getattr(attack, "keywords", {}) else attack
    attack = partial(attack, source=model) if "source" in getattr(attack, "keywords", {}) else attack
    assert attack(model, x, torch.arange(3), Ball(norm, 0.01), noise=IDS[:3]).x_adv.dtype == torch.float64


def test_leaves_no_trace_after_a_failure() -> None:
    model = SmallNet().train()
    calls = []

    def fail(logits: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        attacks.pgd(model, IMAGES, torch.zeros(24, dtype=torch.long), Ball("linf", 0.1), noise=IDS, loss=fail)
    assert calls
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(("entry", "norm"), cases(), ids=name)
@pytest.mark.parametrize(
    "defect",
    [
        pytest.param({"pixels": lambda x: (x * 255).round() / 255}, id="rounded"),
        pytest.param({"logits": lambda z: z.detach()}, id="detached"),
        pytest.param({"logits": lambda z: z + 0 * (z - z.detach()).abs().sqrt()}, id="not-a-number"),
    ],
)
def test_no_gradient_is_said_aloud(entry: Entry, norm: str, defect: dict[str, object]) -> None:
    """Zero and non-finite gradients: the samples that stand are STUCK, and the images stay finite and in the ball."""
    case = linear_case(4, norm, count=8)
    model = Through(case.model, **defect)
    found = entry.attack(model, case.x, case.y, Ball(norm, case.ball.eps / 50), noise=case.noise(), **_short(entry))
    assert {stop for stop in found.stop if stop is not Stop.BROKEN} == {Stop.STUCK}
    assert bool(found.x_adv.isfinite().all())
    assert float(found.distance.max()) <= case.ball.eps


def _short(entry: Entry) -> dict[str, int]:
    """Fewer steps where there is nothing to find anyway."""
    return {"steps": 2} if entry.few else {}


def test_a_healthy_sample_is_never_called_stuck() -> None:
    """Half of the batch has no gradient: exactly that half is stuck."""
    case = linear_case(4, "linf", count=16)
    dead = torch.arange(16) % 2 == 0

    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            left = x.flatten(1)[:, :1] > 0.5
            return torch.where(left, case.model(x.detach()), case.model(x))

    x = case.x.clone()
    x[dead, 0, 0, 0], x[~dead, 0, 0, 0] = 0.55, 0.45
    y = case.model(x).argmax(1)
    for attack in (attacks.pgd, attacks.mim, attacks.apgd, attacks.carlini_linf, attacks.gama):
        found = attack(Half(), x, y, Ball("linf", 1e-5), noise=case.noise(), steps=5)
        stuck = torch.tensor([stop is Stop.STUCK for stop in found.stop])
        assert torch.equal(stuck | broken(found), dead | broken(found))


def test_nan_logits_are_no_success() -> None:
    logits = torch.tensor([[0.0, torch.nan], [torch.nan, 0.0], [0.0, 1.0]])
    assert succeeded(logits, torch.tensor([0, 1, 0])).tolist() == [False, False, True]
    assert succeeded(logits, torch.tensor([1, 0, 1]), targeted=True).tolist() == [False, False, True]


def test_levelled_gradients_survive_any_size() -> None:
    gradient = torch.tensor([[3e-40, -1e-40], [3e38, -1e38], [torch.inf, -1.0], [torch.nan, 2.0], [0.0, 0.0]])
    expected = torch.tensor([[1, -1 / 3], [1, -1 / 3], [0, -1], [0, 1], [0, 0]])
    assert torch.allclose(levelled(gradient), expected, atol=1e-3)


def test_likeliest_others() -> None:
    logits = torch.tensor([[5.0, 1.0, 3.0, 2.0], [5.0, 1.0, 3.0, 2.0]])
    assert likeliest_others(logits, torch.tensor([0, 2]), 2).tolist() == [[2, 3], [0, 3]]
    assert likeliest_others(logits, torch.tensor([0, 2]), 9).tolist() == [[2, 3, 1], [0, 3, 1]]


def test_the_stronger_attacks_are_at_least_as_strong() -> None:
    """On a nonlinear network, with the same number of steps: APGD, GAMA and C&W against PGD on the cross-entropy."""
    model, x, y = trained()
    assert len(x) == 128
    ball, noise = Ball("linf", 0.012), Noise(0, torch.arange(128))
    weak = int(broken(attacks.pgd(model, x, y, ball, noise=noise, steps=20)).sum())
    assert 20 < weak < 108
    assert int(broken(attacks.fgsm(model, x, y, ball, noise=noise)).sum()) <= weak
    for attack in (
        attacks.apgd,
        partial(attacks.apgd, loss=losses.dlr),
        attacks.apgd_targeted,
        attacks.gama,
        attacks.carlini_linf,
    ):
        assert int(broken(attack(model, x, y, ball, noise=noise, steps=20)).sum()) >= weak
    more = attacks.pgd(model, x, y, ball, noise=noise, steps=20, restarts=3)
    assert int(broken(more).sum()) >= weak


RESTARTING = {
    "pgd": partial(attacks.pgd, restarts=4, steps=2),
    "apgd": partial(attacks.apgd, restarts=4, steps=2),
    "apgd-targeted": partial(attacks.apgd_targeted, targets=4, steps=2),
    "gama": partial(attacks.gama, restarts=4, steps=2),
    "carlini-linf": partial(attacks.carlini_linf, restarts=4, steps=2),
    "random-noise": partial(attacks.random_noise, draws=8),
    "transfer": partial(attacks.transfer, source=SmallNet(seed=5), restarts=4, steps=2),
    "feature": partial(attacks.feature_attack, guides=IMAGES, guide_labels=torch.arange(24) % 10, restarts=4, steps=2),
}


@pytest.mark.parametrize("attack", RESTARTING.values(), ids=RESTARTING)
def test_restarts_in_any_company(attack: Callable[..., AttackResult]) -> None:
    """While others of the batch break and leave, a sample keeps its own draws."""
    model, x, y = trained()
    x, y, ball = x[:24], y[:24], Ball("linf", 0.02)
    whole = attack(model, x, y, ball, noise=IDS)
    assert 3 < int(broken(whole).sum()) < 24
    for part in (slice(0, 24, 5), slice(3, 4), slice(10, 24)):
        found = attack(model, x[part], y[part], ball, noise=IDS[part])
        assert found.stop == whole.stop[part]
        # Convolutions round differently in other batches, which turns the sign of a gradient next to zero.
        assert float((found.x_adv - whole.x_adv[part]).abs().gt(1e-6).float().mean()) < 0.002


def test_a_restart_is_a_new_start() -> None:
    case = linear_case(2, "linf", count=8)
    ball = Ball("linf", 1e-6)
    one, two = (
        attacks.pgd(case.model, case.x, case.y, ball, noise=case.noise(), steps=1, step_size=0.0, restarts=restarts)
        for restarts in (1, 2)
    )
    assert not torch.equal(one.x_adv, two.x_adv)


class Halves(nn.Module):
    """Features: the mean brightness of the left and of the right half. Class 0 is brighter on the left."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.last = nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            self.last.weight.copy_(torch.tensor([[1.0, -1.0], [-1.0, 1.0]]) * factor)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x[..., :2].flatten(1).mean(1), x[..., 2:].flatten(1).mean(1)
        logits: Tensor = self.last(torch.stack([left, right], dim=1))
        return logits


@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e5])
@pytest.mark.parametrize("targeted", [False, True])
def test_feature_attack_on_its_own_toy(factor: float, targeted: bool) -> None:
    """The two halves are |left - right| / 2 from being equally bright. The scale of the logits is no defence."""
    generator = torch.Generator().manual_seed(4)
    x = 0.4 + 0.2 * torch.rand(40, 3, 4, 4, generator=generator)
    model = Halves(factor)
    y = model(x).argmax(1)
    distance = (x[..., :2].flatten(1).mean(1) - x[..., 2:].flatten(1).mean(1)).abs() / 2
    ball = Ball("linf", float(distance.median()))
    noise = Noise(0, torch.arange(40))
    guides = torch.full((2, 3, 4, 4), 0.2)
    guides[0, ..., :2], guides[1, ..., 2:] = 0.8, 0.8
    found = attacks.feature_attack(
        model,
        x,
        1 - y if targeted else y,
        ball,
        noise=noise,
        guides=guides,
        guide_labels=torch.tensor([0, 1]),
        restarts=3,
        targeted=targeted,
    )
    assert bool(broken(found)[distance <= 0.98 * ball.eps].all())
    assert not bool(broken(found)[distance >= 1.02 * ball.eps].any())
    assert bool((model(found.x_adv).argmax(1) != y)[broken(found)].all())
    part = attacks.feature_attack(
        model, x[7:9], y[7:9], ball, noise=noise[7:9], guides=guides, guide_labels=torch.tensor([0, 1]), restarts=3
    )
    if not targeted:
        assert part.stop == found.stop[7:9]
        assert torch.allclose(part.x_adv, found.x_adv[7:9], atol=1e-6)


def test_feature_attack_draws_only_guides_of_other_classes() -> None:
    """A guide of the sample's own class would lead nowhere; without any other the attack refuses."""
    model = Halves()
    x = torch.full((1, 3, 4, 4), 0.5)
    x[..., :2] += 0.01
    y = torch.tensor([0])
    guides = torch.full((50, 3, 4, 4), 0.2)
    guides[:49, ..., :2], guides[49:, ..., 2:] = 0.8, 0.8
    labels = torch.tensor([0] * 49 + [1])
    found = attacks.feature_attack(
        model, x, y, Ball("linf", 0.02), noise=IDS[:1], guides=guides, guide_labels=labels, restarts=1
    )
    assert found.stop == [Stop.BROKEN]
    with pytest.raises(HardsphereError, match="no guide of another class"):
        attacks.feature_attack(
            model, x, y, Ball("linf", 0.02), noise=IDS[:1], guides=guides[:49], guide_labels=labels[:49]
        )


class Jittery(nn.Module):
    """A linear model whose answers are right and whose gradients are buried in its own noise."""

    def __init__(self, inner: LinearModel, seed: int) -> None:
        super().__init__()
        self.inner = inner
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner.layer.weight
        jitter = 6 * torch.randn(len(x), *weight.shape, generator=self.generator)
        logits: Tensor = self.inner(x) + torch.einsum("bkd,bd->bk", jitter, (x - x.detach()).flatten(1))
        return logits


def test_expectation_over_a_randomised_model() -> None:
    case = linear_case(2, "linf")
    options = {"loss": losses.margin, "noise": case.noise()}
    single = attacks.fgsm(Jittery(case.model, 0), case.x, case.y, case.ball, **options)
    view = attacks.expectation(Jittery(case.model, 0), 200)
    averaged = attacks.fgsm(view, case.x, case.y, case.ball, **options)
    assert bool(broken(averaged)[case.within(0.7)].all())
    assert int(broken(single).sum()) < int(broken(averaged).sum()) - 5
    x = case.x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(losses.margin(view(x), case.y).sum(), x)
    weight = case.model.layer.weight.detach()
    true = (weight[1 - case.y] - weight[case.y]).view_as(gradient)
    # The mean of 200 draws, each off by a standard deviation of 6 * sqrt(2).
    assert float((gradient - true).std()) < 1.1 * 6 * (2 / 200) ** 0.5
    plain = Jittery(case.model, 0)
    assert attacks.expectation(plain, 1) is plain


def test_feature_normalised_view() -> None:
    """FN by hand, the model's own answers untouched, and a surrogate that transfer can craft on."""
    model = SmallNet().eval()
    caught: list[Tensor] = []
    hook = model.last.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
    before = model(IMAGES)
    hook.remove()
    z = caught[0]
    view = attacks.feature_normalised(model, scale=2.0)
    expected = model.last(2 * z / z.norm(dim=1, keepdim=True))
    assert torch.allclose(view(IMAGES), expected, atol=1e-6)
    assert torch.equal(model(IMAGES), before)
    assert not model.last._forward_pre_hooks
    y = before.argmax(1)
    found = attacks.transfer(model, IMAGES, y, Ball("linf", 0.2), noise=IDS, source=view, steps=10)
    assert int(broken(found).sum()) > 12


def test_transfer_needs_nothing_but_answers() -> None:
    """The judged model has no gradient: PGD is stuck there, images crafted on an honest copy break it."""
    case = linear_case(2, "linf")
    mute = Through(case.model, logits=lambda z: z.detach())
    options = {"noise": case.noise(), "steps": 10}
    assert Stop.STUCK in attacks.pgd(mute, case.x, case.y, case.ball, **options).stop
    for attack in (attacks.pgd, attacks.mim, attacks.apgd, attacks.apgd_targeted, attacks.fab_targeted):
        found = attacks.transfer(mute, case.x, case.y, case.ball, source=case.model, attack=attack, **options)
        assert bool(broken(found)[case.within(0.98)].all())
        assert not bool(broken(found)[case.beyond(1.02)].any())


def test_transfer_reaches_a_wished_class() -> None:
    case = linear_case(10, "linf")
    options = {"noise": case.noise(), "steps": 20, "loss": losses.margin, "targeted": True}
    found = attacks.transfer(case.model, case.x, case.nearest, case.ball, source=case.model, **options)
    assert bool(broken(found)[case.within(0.98)].all())
    assert bool((case.model(found.x_adv).argmax(1) == case.nearest)[broken(found)].all())


def test_transfer_tries_every_restart() -> None:
    """From an unrelated source each restart is another draw; none may lose what an earlier one found."""
    case = linear_case(2, "linf")
    other = linear_case(2, "linf", seed=9).model
    options = {"noise": case.noise(), "source": other, "steps": 1, "step_size": 0.0}
    one, many = (
        attacks.transfer(case.model, case.x, case.y, case.ball, restarts=restarts, **options) for restarts in (1, 30)
    )
    assert not bool((broken(one) & ~broken(many)).any())
    assert int(broken(one).sum()) < int(broken(many).sum())
    assert bool((case.model(many.x_adv).argmax(1) != case.y)[broken(many)].all())


def test_only_the_scale_of_the_adaptive_loss_matters() -> None:
    """The margin rescales a sample's gradient and no sign turns, so three ways to attack at the scale s are one."""
    model = attach(SmallNet(), scale=15, margin=0.2).eval()
    head, y = find_head(model), model(IMAGES).argmax(1)
    assert head is not None
    options = {"noise": IDS, "steps": 5, "keep": "last"}
    ball = Ball("linf", 0.03)
    plain = attacks.pgd(model, IMAGES, y, ball, **options)
    adaptive = attacks.pgd(model, IMAGES, y, ball, loss=losses.adaptive(head), **options)
    view = attacks.pgd(paper_view(model), IMAGES, y, ball, loss=losses.adaptive(head, spoken_at=1.0), **options)
    paper = attacks.pgd(paper_view(model), IMAGES, y, ball, **options)

    def agreement(one: AttackResult, two: AttackResult) -> float:
        return float((one.x_adv - two.x_adv).abs().lt(1e-6).float().mean())

    assert agreement(plain, adaptive) > 0.999
    assert agreement(plain, view) > 0.999
    assert agreement(plain, paper) < 0.99  # at scale 1 the attack is another one


@pytest.mark.parametrize(
    ("attack", "ball", "options", "message"),
    [
        (attacks.pgd, Ball("linf", 0.1), {"steps": 0}, "steps is 0"),
        (attacks.pgd, Ball("linf", 0.1), {"restarts": 0}, "restarts is 0"),
        (attacks.pgd, Ball("linf", 0.1), {"keep": "best"}, "keep is 'best'"),
        (attacks.apgd, Ball("l1", 0.1), {}, "not in l1"),
        (attacks.apgd_targeted, Ball("l1", 0.1), {}, "not in l1"),
        (attacks.apgd_targeted, Ball("linf", 0.1), {"targets": 0}, "targets is 0"),
        (attacks.carlini_linf, Ball("l2", 0.1), {}, "not in l2"),
        (attacks.carlini_linf_original, Ball("l2", 0.1), {}, "not in l2"),
        (attacks.carlini_l2, Ball("l2", 0.1), {"searches": 0}, "searches is 0"),
        (attacks.random_noise, Ball("l2", 0.1), {"draws": 0}, "draws is 0"),
        (attacks.carlini_l2, Ball("l2", 0.1), {"initial_const": 0.0}, r"initial_const is 0\.0"),
        (attacks.carlini_linf_original, Ball("linf", 0.1), {"initial_const": 0.0}, r"initial_const is 0\.0"),
        (attacks.carlini_linf_original, Ball("linf", 0.1), {"initial_const": 50.0}, "at most 20"),
        (attacks.carlini_linf_original, Ball("linf", 0.1), {"tau": 0.0}, r"tau is 0\.0"),
        (attacks.nes, Ball("linf", 0.1), {"sigma": 0.0}, r"sigma is 0\.0"),
        (attacks.zoo, Ball("linf", 0.1), {"sigma": float("nan")}, "sigma is nan"),
        (attacks.square, Ball("linf", 0.1), {"part": -1.0}, r"part is -1\.0"),
        (
            attacks.feature_attack,
            Ball("linf", 0.1),
            {"guides": IMAGES, "guide_labels": torch.arange(2)},
            "must be 24 of int64",
        ),
        (attacks.gama, Ball("linf", 0.1), {"steps": 0}, "steps is 0"),
        (
            attacks.transfer,
            Ball("linf", 0.1),
            {"source": SmallNet(), "attack": attacks.apgd_targeted, "targeted": True},
            "cannot be given a wished class",
        ),
    ],
)
def test_refusals(attack: Callable[..., object], ball: Ball, options: dict[str, object], message: str) -> None:
    case = linear_case(2, "linf", count=2)
    with pytest.raises(HardsphereError, match=message):
        attack(case.model, case.x, case.y, ball, noise=case.noise(), **options)
