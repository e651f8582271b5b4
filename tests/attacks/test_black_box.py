"""NES, SPSA, ZOO, Square and RayS: strength against closed forms, exact budgets, and no gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gradient_table import SmallNet, broken
from linear import Case, LinearModel, linear_case
from torch import Tensor, nn

from hardsphere.attacks import AttackResult, Stop, nes, rays, spsa, square, zoo
from hardsphere.attacks.finite_differences import draw_pairs, slopes_along
from hardsphere.attacks.losses import margin
from hardsphere.attacks.square import _bump, _bumps, _random_window, _tiles, side_at, stripes
from hardsphere.errors import HardsphereError
from hardsphere.noise import Noise
from hardsphere.threat import Ball

SHAPE = (1, 4, 4)


@dataclass(frozen=True)
class Entry:
    """An attack with a budget that suffices for 16 pixels, and with one that is meant to run out."""

    name: str
    attack: Callable[..., AttackResult]
    norm: str
    options: dict[str, Any]
    short: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.name}-{self.norm}"

    def __call__(self, model: nn.Module, case: Case, noise: Noise | None = None, **options: Any) -> AttackResult:
        noise = case.noise() if noise is None else noise
        return self.attack(model, case.x, case.y, case.ball, noise=noise, **{**self.options, **options})


ENTRIES = [
    Entry("nes", nes, "linf", {"steps": 24, "pairs": 32}, {"queries": 150, "pairs": 32}),
    Entry("nes", nes, "l2", {"steps": 24, "pairs": 32}, {"queries": 150, "pairs": 32}),
    Entry("spsa", spsa, "linf", {"steps": 24, "pairs": 32}, {"queries": 150, "pairs": 32}),
    Entry("spsa", spsa, "l2", {"steps": 24, "pairs": 32}, {"queries": 150, "pairs": 32}),
    Entry("zoo", zoo, "linf", {"queries": 400, "coordinates": 10}, {"queries": 150, "coordinates": 10}),
    Entry("square", square, "linf", {"queries": 500}, {"queries": 60}),
    Entry("square", square, "l2", {"queries": 1000}, {"queries": 60}),
    Entry("rays", rays, "linf", {"queries": 800}, {"queries": 60}),
]
every_attack = pytest.mark.parametrize("entry", ENTRIES, ids=str)


class Counting(nn.Module):
    """Counts the images it is asked about, and refuses to be differentiated."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.images, self.largest = inner, 0, 0

    def forward(self, x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        assert not x.requires_grad
        self.images += len(x)
        self.largest = max(self.largest, len(x))
        logits: Tensor = self.inner(x)
        return logits


def hopeless(norm: str, count: int) -> Case:
    """Samples whose ball contains no other class, so that every budget is spent."""
    case = linear_case(3, norm, count=count, shape=SHAPE)
    return replace(case, ball=Ball(norm, float(case.distance.min()) / 10))


@pytest.mark.parametrize("classes", [2, 10])
@every_attack
def test_breaks_most_of_what_the_closed_form_allows(entry: Entry, classes: int) -> None:
    case = linear_case(classes, entry.norm, shape=SHAPE, seed=3)
    found = entry(case.model, case)
    assert bool(broken(found)[case.within(0.8)].all())
    assert not bool(broken(found)[case.beyond(1.02)].any())
    assert 15 < int(case.within(0.8).sum()) < 40
    # By numpy in float64, what is called broken is wrong, and inside box and ball.
    weight, bias = (values.detach().double().numpy() for values in (case.model.layer.weight, case.model.layer.bias))
    flat = found.x_adv.double().flatten(1).numpy()
    wrong = ((flat - 0.5) @ weight.T + bias).argmax(1) != case.y.numpy()
    away = flat - case.x.double().flatten(1).numpy()
    size = np.abs(away).max(1) if entry.norm == "linf" else np.sqrt((away**2).sum(1))
    sure = broken(found).numpy()
    assert wrong[sure].all()
    assert (size[sure] <= case.ball.eps + 1e-6).all()
    assert ((flat >= 0) & (flat <= 1)).all()


@pytest.mark.parametrize("size", [1, 7])
@every_attack
def test_outcomes_do_not_depend_on_the_batch(entry: Entry, size: int) -> None:
    """Nor does the strength: in small batches too, what is closer than 0.8 of the radius breaks."""
    case = linear_case(2, entry.norm, shape=SHAPE, seed=3)
    case = case[torch.cat([case.within(0.8).nonzero()[:6, 0], case.beyond(1.02).nonzero()[:1, 0]])]
    whole = entry(case.model, case)
    noise = case.noise()
    parts = [
        entry(case.model, case[start : start + size], noise[start : start + size])
        for start in range(0, len(case), size)
    ]
    assert [stop for part in parts for stop in part.stop] == whole.stop
    assert torch.allclose(torch.cat([part.x_adv for part in parts]), whole.x_adv, atol=1e-5)
    assert broken(whole).tolist() == [True] * 6 + [False]


@pytest.mark.parametrize("factor", [1e-3, 1e3])
@every_attack
def test_outcomes_do_not_depend_on_the_scale_of_the_logits(entry: Entry, factor: float) -> None:
    case = linear_case(10, entry.norm, shape=SHAPE, seed=3, count=12)
    options = {"queries": 300} if "queries" in entry.options else {}
    one, other = entry(case.model, case, **options), entry(case.times(factor).model, case, **options)
    decided = case.within(0.8) | case.beyond(1.02)
    assert torch.equal(broken(one)[decided], broken(other)[decided])
    assert float((broken(one) == broken(other)).float().mean()) > 0.9


@every_attack
def test_reaches_a_wished_class(entry: Entry) -> None:
    case = linear_case(10, entry.norm, shape=SHAPE, seed=3)
    wished = replace(case, y=case.nearest)
    found = entry(case.model, wished, targeted=True)
    assert bool(broken(found)[case.within(0.8)].all())
    assert not bool(broken(found)[case.beyond(1.02)].any())
    assert bool((case.model(found.x_adv).argmax(1) == case.nearest)[broken(found)].all())


@every_attack
def test_a_thousand_classes(entry: Entry) -> None:
    case = linear_case(1000, entry.norm, shape=SHAPE, count=12)
    found = entry(case.model, case)
    assert bool(broken(found)[case.within(0.8)].all())
    assert not bool(broken(found)[case.beyond(1.02)].any())


@pytest.mark.parametrize("count", [1, 5])
@every_attack
def test_the_budget_is_exact(entry: Entry, count: int) -> None:
    """Nobody breaks, so every sample spends all it may; finite differences come in pairs and may leave one query."""
    case = hopeless(entry.norm, count)
    model, budget = Counting(case.model), int(entry.short["queries"])
    found = entry.attack(model, case.x, case.y, case.ball, noise=case.noise(), **entry.short)
    assert found.stop == [Stop.SPENT] * count
    assert budget - 1 <= model.images / count <= budget
    assert model.images / count == budget or entry.name in ("nes", "spsa", "zoo")


@pytest.mark.parametrize("budget", [1, 2, 3, 4])
@every_attack
def test_the_smallest_budgets(entry: Entry, budget: int) -> None:
    case = hopeless(entry.norm, 2)
    model = Counting(case.model)
    entry(model, case, queries=budget)
    assert 0 < model.images <= 2 * budget


@every_attack
def test_broken_samples_are_not_asked_about_again(entry: Entry) -> None:
    """Three samples are wrong from the start; they cost what little it takes to see that."""
    case = hopeless(entry.norm, 4)
    y = torch.cat([case.y[:1], case.nearest[1:]])
    model = Counting(case.model)
    found = entry.attack(model, case.x, y, case.ball, noise=case.noise(), **entry.short)
    assert found.stop == [Stop.SPENT, *[Stop.BROKEN] * 3]
    assert model.images <= int(entry.short["queries"]) + 3 * 40


@pytest.mark.parametrize("entry", ENTRIES[:5], ids=str)
def test_chunks_change_memory_but_not_outcomes(entry: Entry) -> None:
    case = linear_case(3, entry.norm, shape=SHAPE, count=4)
    model = Counting(case.model)
    whole, pieces = entry(case.model, case, **entry.short), entry(model, case, **entry.short, chunk=3)
    assert model.largest == 3
    assert whole.stop == pieces.stop
    assert torch.allclose(whole.x_adv, pieces.x_adv, atol=1e-6)


@pytest.mark.parametrize("entry", ENTRIES[:5], ids=str)
def test_finite_differences_ignore_autocast(entry: Entry) -> None:
    """In bf16 the differences would be noise."""
    case = linear_case(3, entry.norm, shape=SHAPE, count=8)
    plain = entry(case.model, case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = entry(case.model, case)
    assert torch.equal(plain.x_adv, mixed.x_adv)


@pytest.mark.parametrize("entry", ENTRIES[:5], ids=str)
def test_a_constant_model_is_said_aloud(entry: Entry) -> None:
    case = hopeless(entry.norm, 3)
    model = LinearModel(torch.zeros(3, 16), torch.tensor([1.0, 0.0, 0.0]))
    found = entry(model, replace(case, y=torch.zeros(3, dtype=torch.long)))
    assert found.stop == [Stop.STUCK] * 3
    assert torch.equal(found.x_adv, case.x)


@every_attack
def test_logits_that_are_not_numbers_break_nothing(entry: Entry) -> None:
    case = hopeless(entry.norm, 3)
    model = LinearModel(torch.full((3, 16), torch.nan), torch.zeros(3))
    found = entry.attack(model, case.x, case.y, case.ball, noise=case.noise(), **entry.short)
    assert Stop.BROKEN not in found.stop
    assert bool(found.x_adv.isfinite().all())


@every_attack
def test_leaves_no_trace_and_takes_channels_last(entry: Entry) -> None:
    model = SmallNet().train()
    model.pool.eval()
    model.conv.bias.requires_grad_(False)
    model.last.weight.grad = torch.ones_like(model.last.weight)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    x, y = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 2, 3])
    kept, ball, noise = x.clone(), Ball(entry.norm, 0.02), Noise(0, torch.arange(3))
    plain = entry.attack(model, x, y, ball, noise=noise, **entry.short)
    last = entry.attack(model, x.to(memory_format=torch.channels_last), y, ball, noise=noise, **entry.short)
    assert torch.equal(x, kept)
    assert plain.stop == last.stop
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == wanted
    assert bool((model.last.weight.grad == 1).all())
    assert all(p.grad is None for p in model.parameters() if p is not model.last.weight)


def test_norms_without_geometry_are_refused() -> None:
    case = linear_case(3, "l2", shape=SHAPE, count=2)
    for attack, name in ((zoo, "ZOO"), (rays, "RayS")):
        with pytest.raises(HardsphereError, match=f"{name} works in linf, not in l2"):
            attack(case.model, case.x, case.y, case.ball, noise=case.noise())
    with pytest.raises(HardsphereError, match="Square works in linf or l2, not in l1"):
        square(case.model, case.x, case.y, Ball("l1", 1.0), noise=case.noise())
    with pytest.raises(HardsphereError, match="queries is 0"):
        square(case.model, case.x, case.y, case.ball, noise=case.noise(), queries=0)


# Finite differences.


@pytest.mark.parametrize("draw", [Noise.normal, Noise.signs])
def test_slopes_and_their_mean_are_the_gradient(draw: Callable[..., Tensor]) -> None:
    """On a linear model a slope is <w, u> exactly, and the mean of slope * u tends to w."""
    case = linear_case(2, "linf", shape=SHAPE, count=3)
    weight = case.model.layer.weight.detach()
    w = weight[1 - case.y] - weight[case.y]
    directions = draw_pairs(case.noise(), draw, 0, 4000, torch.Size(SHAPE))
    with torch.no_grad():
        slopes = slopes_along(case.model, case.x, case.y, directions, 1e-3, margin, 5000)
    assert torch.allclose(slopes, torch.einsum("bkp,bp->bk", directions.flatten(2), w), atol=5e-3)
    mean = (slopes[:, :, None] * directions.flatten(2)).mean(1)
    assert float(torch.cosine_similarity(mean, w).min()) > 0.98
    assert torch.allclose(mean.norm(dim=1), w.norm(dim=1), rtol=0.1)


def test_directions_are_those_of_their_numbers() -> None:
    """However they are grouped."""
    noise = Noise(0, torch.arange(3))
    together = draw_pairs(noise, Noise.normal, 0, 6, torch.Size(SHAPE))
    apart = [draw_pairs(noise, Noise.normal, first, 2, torch.Size(SHAPE)) for first in (0, 2, 4)]
    assert torch.equal(together, torch.cat(apart, dim=1))


def test_zoo_visits_every_pixel_once_before_any_again() -> None:
    """After one pass all pixels have moved by one step of Adam, which is the learning rate times a sign."""
    case = hopeless("linf", 3)
    ball = Ball("linf", 0.3)
    steep = LinearModel(case.model.layer.weight * 1e-4, torch.eye(3)[0] * 10)  # never wrong, never flat
    y = torch.zeros(3, dtype=torch.long)
    found = zoo(
        steep, case.x, y, ball, noise=case.noise(), queries=1 + 2 * 16 + 4, coordinates=4, step_size=0.01, sigma=0.1
    )
    weight = steep.layer.weight.detach()
    rival = (weight - 0)[1:][(steep(case.x)[:, 1:]).argmax(1)]
    expected = 0.01 * (rival - weight[0]).sign()
    assert torch.allclose((found.x_adv - case.x).flatten(1), expected, atol=1e-6)


# Square.


def test_windows_are_squares_anywhere() -> None:
    x, noise = torch.zeros(400, 2, 5, 7), Noise(0, torch.arange(400))
    for side in (1, 3, 5):
        inside, row, column = _random_window(x, side, noise)
        assert inside.shape == (400, 1, 5, 7)
        assert bool((inside.sum((1, 2, 3)) == side**2).all())
        corners = {tuple(mask.nonzero()[0].tolist()) for mask in inside[:, 0]}
        assert corners == {(top, left) for top in range(5 - side + 1) for left in range(7 - side + 1)}
        row, column = row.expand_as(inside)[inside], column.expand_as(inside)[inside]
        assert bool((row.view(400, side, side) == torch.arange(side)[:, None]).all())
        assert bool((column.view(400, side, side) == torch.arange(side)).all())


def test_each_sample_has_its_own_stripes() -> None:
    x, noise = torch.full((6, 3, 8, 8), 0.5), Noise(0, torch.arange(6))
    delta = stripes(x, noise, Ball("linf", 0.1)) - x
    assert torch.allclose(delta.abs(), torch.tensor(0.1))
    assert bool((delta == delta[:, :, :1]).all())
    assert len({tuple(own.flatten().sign().tolist()) for own in delta}) == 6


def test_the_bump_is_that_of_the_paper() -> None:
    """eta: pyramids with heights sum of 1 / (n + 1 - k)**2, in two halves of opposite sign."""

    def pyramid(height: int, width: int) -> np.ndarray:
        far = max(height // 2, width // 2)
        values = np.zeros((height, width))
        for r in range(height):
            for c in range(width):
                ring = max(abs(r - height // 2), abs(c - width // 2))
                values[r, c] = sum(1 / (j + 1) ** 2 for j in range(ring, far + 1))
        return values / np.sqrt((values**2).sum())

    for side in (3, 5, 9):
        expected = np.concatenate([pyramid(side // 2, side), -pyramid(side - side // 2, side)])
        assert np.allclose(_bump(side, torch.device("cpu")).numpy(), expected, atol=1e-6)


def test_l2_candidates_use_the_whole_radius() -> None:
    """Where the box leaves room, start and candidates lie on the sphere, and only two windows differ."""
    x, ball, ids = torch.full((20, 3, 11, 11), 0.5), Ball("l2", 0.3), torch.arange(20)
    start = _tiles(x, Noise(0, ids), ball)
    assert torch.allclose(ball.distance(x, start), torch.tensor(0.3), rtol=1e-4)
    candidate = _bumps(x, start, 3, Noise(1, ids), ball)
    assert torch.allclose(ball.distance(x, candidate), torch.tensor(0.3), rtol=1e-4)
    changed = ((candidate - start).abs() > 1e-6).any(dim=1).flatten(1).sum(1)
    assert int(changed.min()) >= 9
    assert int(changed.max()) <= 2 * 9
    tiled = (start - x).abs() > 0
    assert bool(tiled.all())


def test_the_schedule_halves_the_window() -> None:
    """Sides on images of 32 by 32 as the reference has them: 29 at first, then 20, 14, 10, 7, 5, 4, 3."""
    x = torch.zeros(1, 3, 32, 32)
    queries = (1, 10, 11, 50, 51, 200, 201, 500, 501, 1000, 1001, 2000, 2001, 4000, 4001, 5000)
    sides = [side_at(query, 10_000, 0.8, False, x) for query in queries]
    assert sides == [29, 29, 20, 20, 14, 14, 10, 10, 7, 7, 5, 5, 4, 4, 3, 3]


# RayS.


def test_rays_measures_the_closed_form_distance() -> None:
    case = linear_case(2, "linf", shape=SHAPE, seed=3, count=24)
    found = rays(case.model, case.x, case.y, case.ball, noise=case.noise(), queries=1500, minimise=True)
    assert bool((found.distance <= 1.001 * case.distance + 1e-3 / 4 + 1e-6).all())
    assert bool((found.distance >= 0.999 * case.distance).all())
    assert bool((case.model(found.x_adv).argmax(1) != case.y).all())


def test_rays_asks_for_labels_only() -> None:
    """A monotone function of the logits that destroys all distances between them changes nothing."""
    case = linear_case(4, "linf", shape=SHAPE, count=6)

    class Labels(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.one_hot(case.model(x).argmax(1), 4).float()

    attack = partial(rays, x=case.x, y=case.y, ball=case.ball, noise=case.noise(), queries=200)
    assert torch.equal(attack(case.model).x_adv, attack(Labels()).x_adv)
