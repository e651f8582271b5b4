"""DeepFool, FAB and targeted FAB against the closed forms of linear models, and FAB's projection against solvers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gradient_table import SmallNet, broken, trained
from linear import Case, LinearModel, linear_case
from scipy.optimize import linprog, minimize
from torch import Tensor, nn

from hardsphere.attacks import AttackResult, Stop, deepfool, fab, fab_targeted
from hardsphere.attacks.deepfool import leaders, losing_to, nearest_boundary
from hardsphere.errors import HardsphereError
from hardsphere.noise import Noise
from hardsphere.threat import Ball

Attack = Callable[..., AttackResult]

ATTACKS: dict[str, Attack] = {
    "deepfool": deepfool,
    "fab": partial(fab, steps=10),
    "fab-targeted": partial(fab_targeted, steps=10),
}
NEAREST: dict[str, Attack] = {  # with the distances as their goal
    "deepfool": deepfool,
    "fab": partial(fab, steps=20, minimise=True),
    "fab-targeted": partial(fab_targeted, steps=20, minimise=True),
}
every_attack = pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
smooth_norms = pytest.mark.parametrize("norm", ["linf", "l2"])


def run(attack: Attack, case: Case, size: int | None = None, seed: int = 0, **options: Any) -> AttackResult:
    """The attack on the whole case, in batches of ``size``."""
    size = size or len(case)
    noise, parts = case.noise(seed), []
    for start in range(0, len(case), size):
        rows = slice(start, start + size)
        parts.append(attack(case.model, case.x[rows], case.y[rows], case.ball, noise=noise[rows], **options))
    return AttackResult(
        torch.cat([part.x_adv for part in parts]),
        torch.cat([part.distance for part in parts]),
        [stop for part in parts for stop in part.stop],
    )


def truly_broken(case: Case, x_adv: Tensor, targeted: bool = False) -> Tensor:
    """Whether images are wrong (or as wished), inside the box and inside the ball, by numpy in float64."""
    weight = case.model.layer.weight.detach().double().numpy()
    flat, bias = x_adv.double().flatten(1).numpy(), case.model.layer.bias.detach().double().numpy()
    prediction = ((flat - 0.5) @ weight.T + bias).argmax(1)
    won = prediction == case.y.numpy() if targeted else prediction != case.y.numpy()
    away = flat - case.x.double().flatten(1).numpy()
    size = np.abs(away).max(1) if case.ball.norm == "linf" else np.sqrt((away**2).sum(1))
    return torch.from_numpy(won & (size <= case.ball.eps + 1e-6) & (flat >= 0).all(1) & (flat <= 1).all(1))


@pytest.mark.parametrize("size", [1, 7, 64])
@pytest.mark.parametrize("classes", [2, 10])
@smooth_norms
@every_attack
def test_breaks_what_the_closed_form_allows(attack: Attack, norm: str, classes: int, size: int) -> None:
    case = linear_case(classes, norm)
    case = case[: {1: 9, 7: 21, 64: 64}[size]]
    found = run(attack, case, size)
    assert bool(broken(found)[case.within(0.98)].all())
    assert not bool(broken(found)[case.beyond(1.02)].any())
    assert torch.equal(truly_broken(case, found.x_adv), broken(found))
    assert 2 < int(case.within(0.98).sum()) < len(case) - 2


@pytest.mark.parametrize("classes", [2, 10])
@smooth_norms
@pytest.mark.parametrize("attack", NEAREST.values(), ids=NEAREST.keys())
def test_finds_the_closed_form_distance(attack: Attack, norm: str, classes: int) -> None:
    """Also for the samples that lie outside the ball: the distance tells how far."""
    case = linear_case(classes, norm, count=32)
    found = run(attack, case)
    ratio = found.distance / case.distance
    assert float(ratio.min()) > 0.999
    assert float(ratio.max()) < 1.025
    assert torch.allclose(found.distance, case.ball.distance(case.x, found.x_adv))


@smooth_norms
def test_deepfool_on_a_linear_model_takes_one_step(norm: str) -> None:
    """(1 + overshoot) times the closed form, at once."""
    case = linear_case(2, norm)
    found = run(deepfool, case, steps=1, overshoot=0.1)
    assert torch.allclose(found.distance.double(), 1.1 * case.distance, rtol=1e-3, atol=1e-6)
    assert torch.equal(broken(found), 1.1 * case.distance <= case.ball.eps)


@pytest.mark.parametrize("size", [1, 7])
@smooth_norms
@every_attack
def test_outcomes_do_not_depend_on_the_batch(attack: Attack, norm: str, size: int) -> None:
    case = linear_case(5, norm, count=10)
    whole, parts = run(attack, case), run(attack, case, size)
    assert whole.stop == parts.stop
    assert torch.allclose(whole.x_adv, parts.x_adv, atol=1e-5)


@pytest.mark.parametrize("factor", [1e-3, 30.0, 1e3])
@smooth_norms
@every_attack
def test_outcomes_do_not_depend_on_the_scale_of_the_logits(attack: Attack, norm: str, factor: float) -> None:
    case = linear_case(10, norm, count=12)
    one, other = run(attack, case), run(attack, case.times(factor))
    assert one.stop == other.stop
    assert torch.allclose(one.distance, other.distance, atol=1e-4)


@pytest.mark.parametrize("classes", [2, 10])
@smooth_norms
@pytest.mark.parametrize("attack", [deepfool, partial(fab, steps=20)], ids=["deepfool", "fab"])
def test_reaches_a_wished_class(attack: Attack, norm: str, classes: int) -> None:
    case = linear_case(classes, norm)
    wished = replace(case, y=case.nearest)
    found = run(attack, wished, targeted=True)
    assert bool(broken(found)[case.within(0.98)].all())
    assert not bool(broken(found)[case.beyond(1.02)].any())
    assert torch.equal(truly_broken(wished, found.x_adv, targeted=True), broken(found))


def test_a_wished_class_that_is_not_the_nearest() -> None:
    """The way may lead past a third class; what counts is the wished one."""
    case = linear_case(5, "l2", count=32)
    wished = replace(case, y=(case.y + 1) % 5, ball=Ball("l2", 0.39))
    for attack in (deepfool, fab):
        found = run(attack, wished, targeted=True)
        assert torch.equal(case.model(found.x_adv).argmax(1) == wished.y, broken(found))
        assert float(broken(found).float().mean()) > 0.9


@smooth_norms
@every_attack
def test_a_thousand_classes(attack: Attack, norm: str) -> None:
    case = linear_case(1000, norm, count=16)
    found = run(attack, case)
    assert bool(broken(found)[case.within(0.98)].all())
    assert not bool(broken(found)[case.beyond(1.02)].any())


@pytest.mark.parametrize(("classes", "targets"), [(2, 1), (3, 2), (10, 9), (1000, 9)])
def test_targets_are_nine_or_all_other_classes(classes: int, targets: int) -> None:
    logits = torch.rand(6, classes, generator=torch.Generator().manual_seed(0))
    y = logits.argsort(dim=1)[:, -2]  # the true class is the second largest
    others = leaders(logits, y, 9)
    expected = [
        [int(k) for k in np.argsort(-row.numpy()) if k != label][:targets] for row, label in zip(logits, y, strict=True)
    ]
    assert others.tolist() == expected


@every_attack
def test_an_image_that_is_already_wrong(attack: Attack) -> None:
    case = linear_case(10, "linf", count=8)
    found = run(attack, replace(case, y=case.nearest))
    assert found.stop == [Stop.BROKEN] * 8
    assert bool((found.distance == 0).all())


@every_attack
def test_an_image_exactly_on_the_boundary(attack: Attack) -> None:
    """Both logits are zero, and class 0 is answered: the smallest step breaks it."""
    weight = torch.stack([torch.ones(4), -torch.ones(4)])
    model, x = LinearModel(weight, torch.zeros(2)), torch.full((1, 1, 2, 2), 0.5)
    found = attack(model, x, torch.tensor([0]), Ball("linf", 0.01), noise=Noise(0, torch.arange(1)))
    assert found.stop == [Stop.BROKEN]
    assert float(found.distance) < 1e-4


class Through(nn.Module):
    """A linear model behind a function of its logits."""

    def __init__(self, inner: nn.Module, logits: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.logits = inner, logits

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.inner(x))


@pytest.mark.parametrize(
    "logits",
    [
        pytest.param(lambda z: z.detach(), id="detached"),
        pytest.param(lambda z: z.detach() + 0 * z, id="zero"),
        pytest.param(lambda z: z + 0 * (z - z.detach()).abs().sqrt(), id="not-a-number"),
    ],
)
@smooth_norms
@every_attack
def test_no_gradient_is_said_aloud(attack: Attack, norm: str, logits: Callable[[Tensor], Tensor]) -> None:
    case = linear_case(4, norm, count=5)
    found = attack(Through(case.model, logits), case.x, case.y, case.ball, noise=case.noise())
    assert found.stop == [Stop.STUCK] * 5
    assert bool(found.x_adv.isfinite().all())


@pytest.mark.parametrize("attack", [fab, fab_targeted])
def test_nothing_found_is_not_broken(attack: Attack) -> None:
    """There are gradients everywhere but no other class anywhere."""
    case = linear_case(3, "linf", count=4)
    model = Through(case.model, lambda z: z.sigmoid() * torch.tensor([0.0, 1.0, 1.0]) + torch.tensor([2.0, 0.0, 0.0]))
    y = torch.zeros(4, dtype=torch.long)
    found = attack(model, case.x, y, Ball("linf", 0.5), noise=case.noise(), steps=5)
    assert found.stop == [Stop.SPENT] * 4


class Plateau(nn.Module):
    """Flat around the image of 0.5, so that the first start has no direction; a random one has."""

    def forward(self, x: Tensor) -> Tensor:
        climb = ((x - 0.5).abs() - 0.005).clamp_min(0).flatten(1).mean(1)
        return torch.stack([torch.full_like(climb, 0.05), climb], dim=1)


@pytest.mark.parametrize("attack", [fab, fab_targeted])
def test_a_restart_leaves_a_plateau(attack: Attack) -> None:
    x, y = torch.full((3, 1, 4, 4), 0.5), torch.zeros(3, dtype=torch.long)
    arguments = (Plateau(), x, y, Ball("linf", 0.1))
    assert attack(*arguments, noise=Noise(0, torch.arange(3))).stop == [Stop.STUCK] * 3
    again = attack(*arguments, noise=Noise(0, torch.arange(3)), restarts=2, minimise=True)
    assert again.stop == [Stop.BROKEN] * 3
    assert float(again.distance.min()) > 0.055  # where all pixels climb; those that stay on the plateau do not


@pytest.mark.parametrize("attack", [fab, fab_targeted])
@smooth_norms
def test_random_restarts_do_not_depend_on_the_batch(attack: Attack, norm: str) -> None:
    x, y, ball = torch.full((3, 1, 4, 4), 0.5), torch.zeros(3, dtype=torch.long), Ball(norm, 0.4)
    options: dict[str, Any] = {"restarts": 2, "steps": 3}
    whole = attack(Plateau(), x, y, ball, noise=Noise(0, torch.arange(3)), **options)
    for row in range(3):
        alone = attack(Plateau(), x[:1], y[:1], ball, noise=Noise(0, torch.tensor([row])), **options)
        assert torch.allclose(whole.x_adv[row], alone.x_adv[0], atol=1e-5)
    assert not torch.allclose(whole.x_adv[0], whole.x_adv[1], atol=1e-3)
    other = attack(Plateau(), x, y, ball, noise=Noise(1, torch.arange(3)), **options)
    assert not torch.allclose(whole.x_adv, other.x_adv, atol=1e-3)


@every_attack
def test_leaves_no_trace_and_takes_channels_last(attack: Attack) -> None:
    model = SmallNet().train()
    model.pool.eval()
    model.conv.bias.requires_grad_(False)
    model.last.weight.grad = torch.ones_like(model.last.weight)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    x = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    y, kept = model.eval()(x).argmax(1), x.clone()
    model.train(), model.pool.eval()
    plain = attack(model, x, y, Ball("linf", 0.02), noise=Noise(0, torch.arange(6)))
    last = attack(
        model, x.to(memory_format=torch.channels_last), y, Ball("linf", 0.02), noise=Noise(0, torch.arange(6))
    )
    assert torch.equal(x, kept)
    assert plain.stop == last.stop
    assert torch.allclose(plain.distance, last.distance, atol=1e-4)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == wanted
    assert bool((model.last.weight.grad == 1).all())
    assert all(p.grad is None for p in model.parameters() if p is not model.last.weight)


@every_attack
def test_refuses_what_it_has_no_geometry_for(attack: Attack) -> None:
    case = linear_case(3, "l1", count=2)
    with pytest.raises(HardsphereError, match="linf or l2, not in l1"):
        run(attack, case)
    with pytest.raises(HardsphereError, match="steps is 0"):
        run(attack, replace(case, ball=Ball("linf", 0.1)), steps=0)


@smooth_norms
def test_the_nearest_boundary_is_the_nearest(norm: str) -> None:
    """Gap and gradient of the class at the smallest ratio, by float64 formulas."""
    case, ball = linear_case(10, norm, count=20), Ball(norm, 0.1)
    others = leaders(case.model(case.x).detach(), case.y, 9)
    logits, gap, normal = nearest_boundary(case.model, case.x, ball, losing_to(case.y, others))
    assert torch.allclose(-gap.double() / ball.dual(normal).double(), case.distance, rtol=1e-3, atol=1e-6)
    weight = case.model.layer.weight.detach()
    assert torch.allclose(normal.flatten(1), weight[case.nearest] - weight[case.y], atol=1e-6)
    assert torch.allclose(logits, case.model(case.x))


# The projection of FAB.


def _random_planes(count: int, pixels: int, part: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Points in the box, normals (some entries zero) and gains that the box allows where ``part`` is below 1."""
    rng = np.random.default_rng(3)
    x = rng.choice([0.0, 1.0, 0.5, 0.9], size=(count, pixels)) * rng.random((count, pixels))
    x[: count // 4, 0], x[: count // 4, 1] = 0.0, 1.0
    normal = rng.normal(size=(count, pixels)) * (rng.random((count, pixels)) > 0.2)
    up, down = np.where(normal > 0, 1 - x, -x), np.where(normal > 0, -x, 1 - x)
    high, low = (normal * up).sum(1), (normal * down).sum(1)
    gain = np.where(rng.random(count) < 0.5, part * high, part * low) * rng.random(count)
    return x, normal, gain


def _shortest(norm: str, x: np.ndarray, normal: np.ndarray, gain: np.ndarray) -> np.ndarray:
    count, pixels = x.shape
    image = torch.from_numpy(x).view(count, 1, 1, pixels)
    delta = Ball(norm, 1.0).shortest(image, torch.from_numpy(normal).view_as(image), torch.from_numpy(gain))
    return delta.flatten(1).numpy()


def test_shortest_is_the_linear_programme() -> None:
    """linf: minimise t with -t <= d <= t, <w, d> = g and x + d in the box."""
    x, normal, gain = _random_planes(120, 8, 0.999)
    delta = _shortest("linf", x, normal, gain)
    for d, start, w, g in zip(delta, x, normal, gain, strict=True):
        pixels = len(start)
        bound = np.hstack([np.vstack([np.eye(pixels), -np.eye(pixels)]), -np.ones((2 * pixels, 1))])
        solved = linprog(
            np.eye(pixels + 1)[-1],
            bound,
            np.zeros(2 * pixels),
            np.append(w, 0)[None],
            [g],
            [*zip(-start, 1 - start, strict=True), (0, None)],
        )
        assert solved.status == 0
        assert np.abs(d).max() == pytest.approx(solved.fun, abs=1e-8)
        assert w @ d == pytest.approx(g, abs=1e-9)
        assert ((start + d >= -1e-12) & (start + d <= 1 + 1e-12)).all()


def test_shortest_is_the_quadratic_programme() -> None:
    """l2: minimise ||d||^2 with <w, d> = g and x + d in the box."""
    x, normal, gain = _random_planes(40, 6, 0.9)
    delta = _shortest("l2", x, normal, gain)
    for d, start, w, g in zip(delta, x, normal, gain, strict=True):
        solved = minimize(
            lambda v: v @ v,
            np.zeros(len(start)),
            jac=lambda v: 2 * v,
            method="SLSQP",
            bounds=list(zip(-start, 1 - start, strict=True)),
            constraints={"type": "eq", "fun": lambda v, w=w, g=g: w @ v - g, "jac": lambda v, w=w: w},
            options={"ftol": 1e-14, "maxiter": 500},
        )
        assert w @ d == pytest.approx(g, abs=1e-9)
        assert d @ d == pytest.approx(solved.fun, rel=1e-5, abs=1e-9)
        assert ((start + d >= -1e-12) & (start + d <= 1 + 1e-12)).all()


@smooth_norms
def test_shortest_goes_as_far_as_the_box_allows(norm: str) -> None:
    x, normal, _ = _random_planes(30, 8, 1.0)
    delta = _shortest(norm, x, normal, np.full(30, 1e3))
    assert np.allclose(delta, np.where(normal > 0, 1 - x, np.where(normal < 0, -x, 0)))


@smooth_norms
def test_shortest_of_nothing_is_nothing(norm: str) -> None:
    x, normal, gain = _random_planes(4, 8, 0.5)
    assert not _shortest(norm, x, normal, np.zeros(4)).any()
    assert not _shortest(norm, x, np.zeros_like(normal), gain).any()


def test_dual_norms_and_membership() -> None:
    w = torch.tensor([[[[3.0, -4.0]]]])
    assert [float(Ball(norm, 1).dual(w)) for norm in ("linf", "l2", "l1")] == [7.0, 5.0, 4.0]
    x = torch.zeros(2, 1, 1, 2)
    near = torch.tensor([[[[0.1, 0.1]]], [[[0.1, 0.2]]]])
    assert Ball("linf", 0.15).contains(x, near).tolist() == [True, False]
    assert Ball("linf", 0.15).contains(x, near, slack=0.06).tolist() == [True, True]


@pytest.mark.check
@pytest.mark.filterwarnings("default")
@smooth_norms
def test_deepfool_agrees_with_foolbox(norm: str) -> None:
    """On a network: the same images, up to the 1e-4 that foolbox adds to each step."""
    foolbox = pytest.importorskip("foolbox")
    model, x, y = trained()
    theirs = {"linf": foolbox.attacks.LinfDeepFoolAttack, "l2": foolbox.attacks.L2DeepFoolAttack}[norm]
    other = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
    _, images, success = theirs(steps=100, candidates=10, overshoot=0.02)(other, x, y, epsilons=None)
    assert bool(success.all())
    found = deepfool(model, x, y, Ball(norm, 10.0), noise=Noise(0, torch.arange(len(x))))
    assert bool(broken(found).all())
    ratio = found.distance / Ball(norm, 10.0).distance(x, images)
    assert 0.97 < float(ratio.median()) < 1.005
    assert float(ratio.max()) < 1.05


@pytest.mark.check
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.012), ("l2", 0.1)])
def test_targeted_fab_agrees_with_autoattack(norm: str, eps: float) -> None:
    """On a network: the same survivors, up to two of 128."""
    pyautoattack = pytest.importorskip("pyautoattack")
    model, x, y = trained()
    other = pyautoattack.AutoAttack(
        model, norm={"linf": "Linf", "l2": "L2"}[norm], eps=eps, version="custom", attacks=["fab-t"], seed=0
    )
    other.fab.n_iter, other.fab.n_restarts, other.fab.n_target_classes = 50, 1, 9
    images, _ = other.run_standard_evaluation(x, y, batch_size=len(x))
    theirs = model(images).argmax(1) == y
    ours = ~broken(fab_targeted(model, x, y, Ball(norm, eps), noise=Noise(0, torch.arange(len(x))), steps=50))
    assert 25 < int(theirs.sum()) < 103
    assert int((ours != theirs).sum()) <= 2
