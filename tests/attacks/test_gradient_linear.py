"""Gradient attacks against linear models, where the distance to the nearest wrong answer is known."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from gradient_table import Entry, broken, cases, name
from linear import Case, LinearModel, linear_case
from torch import Tensor

from hardsphere import attacks
from hardsphere.attacks import AttackResult, losses
from hardsphere.noise import Noise
from hardsphere.threat import Ball

# Rounding: a pixel near 1/2 is off by at most 3e-8, and an l1 ball adds up those of all pixels.
ROUNDING = 5e-6

# Around the best point of a ball the loss is flat, so rounding of 1e-7, which depends on batch, scale and processor,
# decides between points that lie about its root apart, in radii.
FLAT = 5e-3

_case = cache(linear_case)


def _run(entry: Entry, case: Case, noise: Noise | None = None) -> AttackResult:
    return entry.attack(case.model, case.x, case.y, case.ball, noise=case.noise() if noise is None else noise)


def _end_alike(found: AttackResult, other: AttackResult, part: slice, ball: Ball) -> bool:
    """Whether both came to the same end with the same images, up to rounding."""
    apart = ball.distance(found.x_adv, other.x_adv[part])
    return found.stop == other.stop[part] and float(apart.max()) <= FLAT * ball.eps


def _check(case: Case, found: AttackResult, targeted: bool = False) -> None:
    """Nothing is missed within 0.98 eps, nothing is claimed beyond 1.02 eps, and every claim is true."""
    won = broken(found)
    predicted = case.model(found.x_adv).argmax(1)
    assert bool(won[case.within(0.98)].all()), f"missed {int((case.within(0.98) & ~won).sum())}"
    assert not bool(won[case.beyond(1.02)].any())
    assert torch.equal(won, won & (predicted == case.nearest if targeted else predicted != case.y))
    assert float(found.distance[won].max()) <= case.ball.eps + ROUNDING
    assert torch.allclose(found.distance, case.ball.distance(case.x, found.x_adv))
    assert float(found.x_adv.min()) >= 0
    assert float(found.x_adv.max()) <= 1


@pytest.mark.parametrize(("entry", "norm"), cases(), ids=name)
def test_two_classes_for_every_batch_size(entry: Entry, norm: str) -> None:
    """The closed form is reached, and a sample meets the same fate in a batch of 64, of 7 and alone."""
    case = _case(2, norm)[: 14 if entry.few else 64]
    whole = _run(entry, case)
    _check(case, whole)
    for size, used in ((7, 14), (1, 2 if entry.few else 5)):
        for begin in range(0, used, size):
            part = slice(begin, begin + size)
            found = _run(entry, case[part], case.noise()[part])
            assert _end_alike(found, whole, part, case.ball)


@pytest.mark.parametrize(("entry", "norm"), cases(many=True), ids=name)
def test_ten_classes(entry: Entry, norm: str) -> None:
    case = _case(10, norm)[: 12 if entry.few else 64]
    _check(case, _run(entry, case))


def _most_gained(slope: Tensor, room: Tensor, norm: str, eps: float) -> Tensor:
    """max of slope.d over ||d|| <= eps and |d_i| <= room_i, pixel by pixel, where all slopes point into the room."""
    if norm == "linf":
        return (slope * room.clamp_max(eps)).sum(1)
    if norm == "l1":  # the steepest pixels go all their way, until the radius is spent
        order = slope.argsort(dim=1, descending=True)
        slope, room = slope.gather(1, order), room.gather(1, order)
        return (slope * (eps - room.cumsum(1) + room).clamp_min(0).minimum(room)).sum(1)
    low, high = torch.zeros(len(slope), 1), torch.full((len(slope), 1), 1e3)  # d_i = min(t * slope_i, room_i)
    for _ in range(60):
        time = (low + high) / 2
        short = (time * slope).minimum(room).norm(dim=1, keepdim=True) < eps
        low, high = torch.where(short, time, low), torch.where(short, high, time)
    return (slope * (low * slope).minimum(room)).sum(1)


@pytest.mark.parametrize(("entry", "norm"), cases(free=True, many=True), ids=name)
@pytest.mark.parametrize("kind", ["grey", "black-and-white"])
def test_the_box_is_no_defence(entry: Entry, norm: str, kind: str) -> None:
    """Pixels everywhere from 0 to 1, and radii beyond what a pixel can take under l1: the best d is known still."""
    generator = torch.Generator().manual_seed(5)
    x = torch.rand(400, 3, 8, 8, generator=generator)
    x = x if kind == "grey" else x.round()
    model = LinearModel(torch.randn(2, 192, generator=generator), torch.zeros(2))
    x = x[(model(x)[:, 0] - model(x)[:, 1]).abs().topk(48).indices]  # those farthest from the boundary
    y = model(x).argmax(1)
    gap = -losses.margin(model(x), y).detach()
    uphill = (model.layer.weight[1 - y] - model.layer.weight[y]).detach()
    room = torch.where(uphill > 0, 1 - x.flatten(1), x.flatten(1))
    radius = {"linf": (0.05, 0.14), "l2": (0.6, 1.2), "l1": (4.0, 7.0)}[norm]
    ball = Ball(norm, radius[kind != "grey"])
    gained = _most_gained(uphill.abs(), room, norm, ball.eps)
    won = broken(entry.attack(model, x, y, ball, noise=Noise(0, torch.arange(48))))
    assert 8 < int((gap < 0.97 * gained).sum()) < 40
    assert bool(won[gap < 0.97 * gained].all())
    assert not bool(won[gap > 1.001 * gained].any())


@pytest.mark.parametrize(("entry", "norm"), cases(targeted=True), ids=name)
def test_wished_labels(entry: Entry, norm: str) -> None:
    """With the nearest class as the wish, the closed form is the same."""
    case = _case(10 if entry.many else 2, norm)[: 8 if entry.few else 64]
    found = entry.attack(case.model, case.x, case.nearest, case.ball, noise=case.noise(), targeted=True)
    _check(case, found, targeted=True)


@pytest.mark.parametrize(("entry", "norm"), cases(free=True, many=True), ids=name)
def test_the_scale_of_the_logits_changes_no_outcome(entry: Entry, norm: str) -> None:
    case = _case(10, norm)
    whole = _run(entry, case)
    for factor in (1e-3, 1e3):
        found = _run(entry, case.times(factor))
        assert _end_alike(found, whole, slice(None), case.ball)


def test_the_cross_entropy_does_depend_on_the_scale() -> None:
    """The other side of the test above: saturated, the cross-entropy has no gradient left, and says so."""
    case = _case(10, "linf").times(1e5)
    found = attacks.pgd(case.model, case.x, case.y, case.ball, noise=case.noise())
    assert attacks.Stop.STUCK in found.stop


@pytest.mark.parametrize(("entry", "norm"), cases(last=True), ids=name)
def test_last_iterate(entry: Entry, norm: str) -> None:
    """Samples broken from the start are worked on to the last step, where the honest protocol returns at once."""
    case = _case(2, norm)
    wrong = 1 - case.y
    noise = case.noise()
    stopped = entry.attack(case.model, case.x, wrong, case.ball, noise=noise)
    pushed = entry.attack(case.model, case.x, wrong, case.ball, noise=noise, keep="last")
    near = case.beyond(2.0)  # no point of the ball is of the wrong class, so every iterate counts as broken
    assert int(near.sum()) > 3
    assert bool(broken(stopped)[near].all())
    assert bool(broken(pushed)[near].all())
    gap = losses.margin(case.model(pushed.x_adv), wrong) - losses.margin(case.model(stopped.x_adv), wrong)
    assert bool((gap[near] > 0).all())


@pytest.mark.parametrize(("entry", "norm"), cases(), ids=name)
def test_channels_last_images(entry: Entry, norm: str) -> None:
    case = _case(2, norm)
    case = case[case.within(0.8).nonzero().squeeze(1)[:6]]
    plain = _run(entry, case)
    found = entry.attack(
        case.model,
        case.x.contiguous(memory_format=torch.channels_last),
        case.y,
        case.ball,
        noise=case.noise(),
    )
    assert found.stop == plain.stop
    assert torch.allclose(found.x_adv, plain.x_adv, atol=1e-5)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_thousand_classes(norm: str) -> None:
    case = _case(1000, norm)[:24]
    for attack in (attacks.apgd_targeted, attacks.gama):
        found = attack(case.model, case.x, case.y, case.ball, noise=case.noise(), steps=25)
        assert bool(broken(found)[case.within(0.9)].all())
        assert not bool(broken(found)[case.beyond(1.02)].any())
    for loss in (losses.margin, losses.dlr):
        _check(case, attacks.pgd(case.model, case.x, case.y, case.ball, noise=case.noise(), loss=loss, steps=40))
        _check(case, attacks.apgd(case.model, case.x, case.y, case.ball, noise=case.noise(), loss=loss, steps=60))


def test_random_noise_is_a_weak_control(norm: str) -> None:
    """Noise never leaves the ball, is beaten by one gradient step, and more draws never break fewer samples."""
    case = _case(2, norm)
    few, many = (
        attacks.random_noise(case.model, case.x, case.y, case.ball, noise=case.noise(), draws=draws)
        for draws in (2, 60)
    )
    one_step = attacks.fgsm(case.model, case.x, case.y, case.ball, noise=case.noise())
    assert not bool((broken(few) & ~broken(many)).any())
    assert broken(few).sum() < broken(many).sum() < broken(one_step).sum()
    assert not bool(broken(many)[case.beyond(1.02)].any())
    assert float(many.distance.max()) <= case.ball.eps + ROUNDING
    standing = ~broken(many)
    gained = losses.margin(case.model(many.x_adv), case.y) - losses.margin(case.model(few.x_adv), case.y)
    assert bool((gained[standing] >= 0).all())


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_nearest_images_of_carlini_and_wagner(norm: str) -> None:
    """Told to minimise, the originals come close to the closed form itself, on either side of the radius."""
    case = _case(2, norm)[:12]
    if norm == "linf":
        found = attacks.carlini_linf_original(
            case.model, case.x, case.y, case.ball, noise=case.noise(), steps=60, step_size=1e-3, minimise=True
        )
        far = case.beyond(0.9)  # the search ends at a tau of 0.9 eps
    else:
        found = attacks.carlini_l2(
            case.model, case.x, case.y, case.ball, noise=case.noise(), steps=200, step_size=1e-3, minimise=True
        )
        far = case.beyond(0.2)
    assert int(far.sum()) > 5
    assert bool((case.model(found.x_adv).argmax(1) != case.y)[far].all())
    ratio = found.distance[far] / case.distance[far]
    assert float(ratio.min()) > 0.999
    assert float(ratio.max()) < 1.15
    assert torch.equal(broken(found), case.ball.distance(case.x, found.x_adv) <= case.ball.eps + 1e-6)
