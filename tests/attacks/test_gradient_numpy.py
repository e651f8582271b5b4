"""Gradient attacks step by step against numpy, in float64, on a small nonlinear model that cannot be broken."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hardsphere import attacks
from hardsphere.attacks import Stop, losses
from hardsphere.attacks.apgd import Memory, checkpoints
from hardsphere.noise import Noise
from hardsphere.threat import Ball

rng = np.random.default_rng(3)
INNER, OUTER, OFFSET = rng.normal(size=(6, 12)) * 4, rng.normal(size=(3, 6)), np.array([8.0, 0.0, -9.0])
PIXELS = 0.5 + 0.3 * rng.uniform(-1, 1, size=(5, 12))
IMAGES, LABELS = torch.tensor(PIXELS).view(5, 3, 2, 2), torch.zeros(5, dtype=torch.long)
NOISE = Noise(0, torch.arange(5))
# Radii that float32 holds exactly.
BALLS = {"linf": Ball("linf", 0.125), "l2": Ball("l2", 0.5)}


class Net(nn.Module):
    """Class 0 leads by 8, so that it stays ahead everywhere in the balls; class 2 never becomes the runner-up."""

    def __init__(self, offset: np.ndarray = OFFSET) -> None:
        super().__init__()
        self.offset = torch.tensor(offset)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x.flatten(1) @ torch.tensor(INNER).T)
        return hidden @ torch.tensor(OUTER).T + self.offset


def _logits(point: np.ndarray, offset: np.ndarray = OFFSET) -> np.ndarray:
    return OUTER @ np.tanh(INNER @ point) + offset


def _margin(point: np.ndarray) -> float:
    logits = _logits(point).astype(np.float32)  # the attacks compare float32 losses
    return float(logits[1] - logits[0])


def _slope(point: np.ndarray) -> np.ndarray:
    return ((OUTER[1] - OUTER[0]) * (1 - np.tanh(INNER @ point) ** 2)) @ INNER


def _project(ball: Ball, x: np.ndarray, z: np.ndarray) -> np.ndarray:
    delta = z - x
    if ball.norm == "linf":
        return np.clip(x + np.clip(delta, -ball.eps, ball.eps), 0, 1)
    return np.clip(x + delta * min(1, ball.eps / max(np.linalg.norm(delta), 1e-30)), 0, 1)


def _steepest(ball: Ball, g: np.ndarray) -> np.ndarray:
    return np.sign(g) if ball.norm == "linf" else g / np.linalg.norm(g)


def _apgd(ball: Ball, x: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Algorithm 1 of Croce and Hein for one point, with lists instead of running counts."""
    eta, halved, last = 2 * ball.eps, False, 0
    points, values = [start], [_margin(start)]
    best, best_at_last_check = 0, -np.inf
    point, before = start, start
    for k in range(100):
        if k in {22, 41, 57, 70, 80, 87, 93, 99}:
            rises = sum(values[i + 1] > values[i] for i in range(last, k))
            unmoved = values[best] <= best_at_last_check
            halve = rises <= 0.75 * (k - last) or (not halved and unmoved)
            halved, last, best_at_last_check = halve, k, values[best]
            if halve:
                eta, point = eta / 2, points[best]
        z = _project(ball, x, point + eta * _steepest(ball, _slope(point)))
        new = z if k == 0 else _project(ball, x, point + 0.75 * (z - point) + 0.25 * (point - before))
        before, point = point, new
        points.append(point)
        values.append(_margin(point))
        if values[-1] > values[best]:
            best = len(values) - 1
    return point


def _mim(ball: Ball, x: np.ndarray, decay: float) -> np.ndarray:
    point, g = x, np.zeros_like(x)
    for _ in range(10):
        slope = _slope(point)
        g = decay * g + slope / np.abs(slope).sum()
        point = _project(ball, x, point + ball.eps / 4 * _steepest(ball, g))
    return point


def _gama(ball: Ball, x: np.ndarray, start: np.ndarray) -> np.ndarray:
    def probabilities(point: np.ndarray) -> np.ndarray:
        powers = np.exp(_logits(point, np.zeros(3)))
        return powers / powers.sum()

    reference, point = probabilities(start), start
    for step in range(20):
        weight = 50 * max(0.0, 1 - step / 5)

        def value(point: np.ndarray, weight: float = weight) -> float:
            p = probabilities(point)
            return float(max(p[1], p[2]) - p[0] + weight * ((p - reference) ** 2).sum())

        # Central differences: no formula is shared with the attack's gradient.
        moves = 1e-5 * np.eye(12)
        gradient = np.array([value(point + move) - value(point - move) for move in moves])
        length = 0.03 * (1.0 if step < 12 else 0.1 if step < 17 else 0.01)
        point = _project(ball, x, point + length * np.sign(gradient))
    return point


def _check(found: attacks.AttackResult, expected: Callable[[int], np.ndarray]) -> None:
    assert {*found.stop} == {Stop.SPENT}
    for row, image in enumerate(found.x_adv.flatten(1).numpy()):
        assert np.allclose(image, expected(row), atol=1e-6)


@pytest.mark.parametrize("norm", BALLS)
def test_apgd(norm: str) -> None:
    ball = BALLS[norm]
    start = ball.random_surface(IMAGES, NOISE.fold("apgd", 0)).flatten(1).numpy()
    found = attacks.apgd(Net(), IMAGES, LABELS, ball, noise=NOISE, loss=losses.margin)
    _check(found, lambda row: _apgd(ball, PIXELS[row], start[row]))


@pytest.mark.parametrize("norm", BALLS)
@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_mim(norm: str, decay: float) -> None:
    ball = BALLS[norm]
    options = {"steps": 10, "step_size": ball.eps / 4, "decay": decay, "loss": losses.margin}
    found = attacks.mim(Net(), IMAGES, LABELS, ball, noise=NOISE, **options)
    _check(found, lambda row: _mim(ball, PIXELS[row], decay))


def test_gama() -> None:
    ball = BALLS["linf"]
    start = ball.random_extreme(IMAGES, NOISE.fold("gama", 0)).flatten(1).numpy()
    assert np.allclose(np.abs(start - PIXELS), ball.eps)  # no pixel is near the box
    # Without a lead, so that all three probabilities count; to the last step, though the samples break.
    found = attacks.gama(Net(np.zeros(3)), IMAGES, LABELS, ball, noise=NOISE, steps=20, step_size=0.03, keep="last")
    for row, image in enumerate(found.x_adv.flatten(1).numpy()):
        assert np.allclose(image, _gama(ball, PIXELS[row], start[row]), atol=1e-6)


def test_carlini_linf() -> None:
    ball = BALLS["linf"]
    start = ball.random_start(IMAGES, NOISE.fold("carlini", 0)).flatten(1).numpy()
    found = attacks.carlini_linf(Net(), IMAGES, LABELS, ball, noise=NOISE, steps=10)

    def expected(row: int) -> np.ndarray:
        point = start[row]
        for step in range(10):
            point = _project(ball, PIXELS[row], point + ball.eps / 4 * (1 - step / 10) * np.sign(_slope(point)))
        return point

    _check(found, expected)


def test_checkpoints_of_apgd() -> None:
    assert checkpoints(100) == {22: 22, 41: 19, 57: 16, 70: 13, 80: 10, 87: 7, 93: 6, 99: 6}
    assert all(interval >= 1 for steps in range(1, 60) for interval in checkpoints(steps).values())


def test_when_apgd_halves_its_step() -> None:
    """Condition 1: at most 75 % of the steps rose. Condition 2: the best is where it was, and so was the step."""
    table = [
        # rises of 20, best loss, best at the last checkpoint, halved there -> halved now
        (16, 2.0, 1.0, False, False),
        (15, 2.0, 1.0, False, True),
        (15, 2.0, 1.0, True, True),
        (16, 1.0, 1.0, False, True),
        (16, 1.0, 1.0, True, False),
        (16, 2.0, 1.0, True, False),
    ]
    rises, best_loss, checked, halved, expected = (torch.tensor(column) for column in zip(*table, strict=True))
    images = torch.rand(len(table), 3, 2, 2)
    state = Memory.of(torch.arange(len(table)), images, eps=0.5)
    state.rises, state.best_loss, state.checked_loss, state.halved = rises.float(), best_loss, checked, halved
    state.best, state.best_gradient = images + 1, images + 2
    state.look_back(20, due=torch.ones(len(table), dtype=torch.bool))
    assert state.halved.tolist() == expected.tolist()
    assert state.step_size.tolist() == [0.5 if now else 1.0 for now in expected]
    assert torch.equal(state.x_adv, torch.where(expected.view(-1, 1, 1, 1), images + 1, images))
    assert torch.equal(state.gradient, torch.where(expected.view(-1, 1, 1, 1), images + 2, 0))
    assert torch.equal(state.checked_loss, best_loss)
    assert state.rises.tolist() == [0] * len(table)
