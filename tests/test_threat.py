"""The geometry of the Lp balls against definitions, an exact solver and properties that must hold everywhere."""

from __future__ import annotations

import math

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize
from torch import Tensor

from hardsphere.errors import HardsphereError
from hardsphere.noise import Noise
from hardsphere.threat import NORMS, Ball, per_sample

ORDER = {"linf": math.inf, "l2": 2.0, "l1": 1.0}
DUAL = {"linf": 1.0, "l2": 2.0, "l1": math.inf}
SHAPE = (3, 2, 3, 3)

balls = st.builds(Ball, st.sampled_from(NORMS), st.floats(1e-3, 10.0))
pixels = arrays.arrays(np.float64, SHAPE, elements=st.floats(0, 1)).map(torch.from_numpy)
numbers = arrays.arrays(np.float64, SHAPE, elements=st.floats(-4, 4)).map(torch.from_numpy)
properties = settings(max_examples=60, deadline=None, derandomize=True)


def some(seed: int, dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.rand(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("norm", NORMS)
def test_size_and_distance(norm: str) -> None:
    ball, x, delta = Ball(norm, 0.1), some(0), some(1) - 0.5
    expected = torch.linalg.vector_norm(delta.flatten(1), ORDER[norm], dim=1)
    torch.testing.assert_close(ball.size(delta), expected)
    torch.testing.assert_close(ball.distance(x, x + delta), expected)
    torch.testing.assert_close(ball.size(delta.to(memory_format=torch.channels_last)), expected)
    assert ball.distance(x, x).eq(0).all()


@properties
@given(balls, numbers)
def test_the_steepest_step_has_length_one_and_reaches_the_dual_norm(ball: Ball, gradient: Tensor) -> None:
    step = ball.steepest(gradient)
    alive = gradient.flatten(1).abs().amax(1) > 0
    torch.testing.assert_close(ball.size(step), alive.double())
    reached = (gradient * step).flatten(1).sum(1)
    torch.testing.assert_close(reached, torch.linalg.vector_norm(gradient.flatten(1), DUAL[ball.norm], dim=1))


def test_the_steepest_steps_by_hand() -> None:
    gradient = torch.tensor([[3.0, -4.0, 0.0]])
    assert Ball("linf", 1).steepest(gradient).tolist() == [[1, -1, 0]]
    torch.testing.assert_close(Ball("l2", 1).steepest(gradient), torch.tensor([[0.6, -0.8, 0.0]]))
    assert Ball("l1", 1).steepest(gradient).tolist() == [[0, -1, 0]]


@pytest.mark.parametrize("norm", NORMS)
def test_a_zero_gradient_gives_a_zero_step_and_leaves_its_neighbours_alone(norm: str) -> None:
    ball, gradient = Ball(norm, 0.1), some(2) - 0.5
    gradient[1] = 0
    step = ball.steepest(gradient)
    assert step[1].eq(0).all()
    assert torch.equal(step[[0, 2]], ball.steepest(gradient[[0, 2]]))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("size", [1e-35, 1e-25, 1e30])
def test_the_length_of_the_gradient_does_not_matter(norm: str, size: float) -> None:
    """A confident model has gradients whose squares are zero in float32; a step that vanished would mask them."""
    gradient = some(3, torch.float32) - 0.5
    torch.testing.assert_close(Ball(norm, 1).steepest(gradient * size), Ball(norm, 1).steepest(gradient))


def test_a_step_may_differ_from_sample_to_sample() -> None:
    x, gradient, sizes = some(4), some(5) - 0.5, torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    for norm in NORMS:
        ball = Ball(norm, 1)
        torch.testing.assert_close(ball.distance(x, ball.step(x, gradient, sizes)), sizes)
        torch.testing.assert_close(ball.step(x, gradient, sizes)[1:2], ball.step(x[1:2], gradient[1:2], 0.2))


def test_an_l1_step_goes_where_the_box_lets_it() -> None:
    x, gradient = torch.tensor([[1.0, 0.0, 0.5]]), torch.tensor([[3.0, -2.0, 1.0]])
    torch.testing.assert_close(Ball("l1", 1).step(x, gradient, 0.25), torch.tensor([[1.0, 0.0, 0.75]]))
    stuck = Ball("l1", 1).step(x[:, :2], gradient[:, :2], 0.25)
    assert torch.equal(stuck, x[:, :2])
    long = Ball("l1", 1).step(x, gradient, 0.75)
    torch.testing.assert_close(long, torch.tensor([[1.0, 0.0, 1.0]]))


@properties
@given(pixels, numbers, st.floats(0.01, 20.0))
def test_an_l1_step_is_the_best_that_the_box_allows(x: Tensor, gradient: Tensor, size: float) -> None:
    """maximise g.d with |d|_1 <= size and x + d in the box, as a linear programme in the parts up and down of d."""
    step = (Ball("l1", 1).step(x, gradient, size) - x).flatten(1).numpy()
    for d, start, slope in zip(step, x.flatten(1).numpy(), gradient.flatten(1).numpy(), strict=True):
        solved = optimize.linprog(
            np.concatenate([-slope, slope]),
            np.ones((1, 2 * len(d))),
            [size],
            bounds=[*((0, 1 - pixel) for pixel in start), *((0, pixel) for pixel in start)],
        )
        assert np.isclose(slope @ d, -solved.fun, atol=1e-7)
        assert np.abs(d).sum() <= size + 1e-9
        assert (start + d).min() >= -1e-12
        assert (start + d).max() <= 1 + 1e-12


@properties
@given(balls, pixels, numbers)
def test_projections_are_allowed_and_final(ball: Ball, x: Tensor, far: Tensor) -> None:
    near = ball.project(x, far)
    assert near.min() >= 0
    assert near.max() <= 1
    assert (ball.distance(x, near) <= ball.eps * (1 + 1e-9) + 1e-12).all()
    torch.testing.assert_close(ball.project(x, near), near, rtol=0, atol=1e-9)


@properties
@given(balls, pixels, pixels)
def test_what_is_allowed_already_stays(ball: Ball, x: Tensor, other: Tensor) -> None:
    share = (0.999 * ball.eps / ball.distance(x, other).clamp_min(1e-12)).clamp_max(1)
    inside = x + per_sample(share, x) * (other - x)
    torch.testing.assert_close(ball.project(x, inside), inside, rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", NORMS)
def test_projections_in_float32_keep_to_the_ball_and_the_box(norm: str) -> None:
    x, far = some(6, torch.float32, (8, 3, 16, 16)), 3 * some(7, torch.float32, (8, 3, 16, 16)) - 1
    ball = Ball(norm, {"linf": 8 / 255, "l2": 0.5, "l1": 12.0}[norm])
    near = ball.project(x, far)
    assert near.dtype == torch.float32
    assert near.min() >= 0
    assert near.max() <= 1
    # x + delta rounds each pixel to half a unit in the last place of 1.
    slack = {"linf": 6e-8, "l2": 1e-6, "l1": 1e-4}[norm]
    assert (ball.distance(x, near) <= ball.eps + slack).all()
    torch.testing.assert_close(ball.project(x, near), near, rtol=0, atol=1e-6)
    last = ball.project(x.to(memory_format=torch.channels_last), far.to(memory_format=torch.channels_last))
    assert torch.equal(last, near)


def test_the_linf_projection_is_exact() -> None:
    x, far = some(8), 3 * some(9) - 1
    expected = np.clip(np.clip(far.numpy(), x.numpy() - 0.1, x.numpy() + 0.1), 0, 1)
    assert np.array_equal(Ball("linf", 0.1).project(x, far).numpy(), expected)


def test_the_l2_projection_is_onto_the_ball_then_the_box() -> None:
    x, far = some(10), 3 * some(11) - 1
    for k, near in enumerate(Ball("l2", 0.7).project(x, far)):
        delta = (far[k] - x[k]).numpy()
        expected = np.clip(x[k].numpy() + delta * min(1, 0.7 / np.linalg.norm(delta)), 0, 1)
        np.testing.assert_allclose(near.numpy(), expected, atol=1e-12)


def exact_l1_projection(x: np.ndarray, far: np.ndarray, eps: float) -> np.ndarray:
    """The threshold by sorting the breakpoints of the piecewise linear length, then solving its one segment."""
    delta = far - x
    size, room = np.abs(delta), np.where(delta > 0, 1 - x, x)

    def length(threshold: float) -> float:
        return float(np.clip(size - threshold, 0, room).sum())

    threshold = 0.0
    if length(0.0) > eps:
        points = np.unique(np.concatenate([[0.0], size, np.maximum(size - room, 0)]))
        right = next(i for i, point in enumerate(points) if length(point) <= eps)
        a, b = points[right - 1], points[right]
        threshold = a + (length(a) - eps) / (length(a) - length(b)) * (b - a)
    return np.asarray(x + np.sign(delta) * np.clip(size - threshold, 0, room))


@properties
@given(pixels, numbers, st.floats(0.01, 8.0))
def test_the_l1_projection_is_exact(x: Tensor, far: Tensor, eps: float) -> None:
    near = Ball("l1", eps).project(x, far)
    for k in range(len(x)):
        expected = exact_l1_projection(x[k].flatten().numpy(), far[k].flatten().numpy(), eps)
        np.testing.assert_allclose(near[k].flatten().numpy(), expected, atol=1e-8)


def test_the_l1_projection_against_a_general_solver() -> None:
    x, far = some(12, shape=(2, 6)), 3 * some(13, shape=(2, 6)) - 1
    for k in range(2):
        # d = up - down with both at least 0 makes the l1 norm smooth.
        centre, delta = x[k].numpy(), (far[k] - x[k]).numpy()
        solved = optimize.minimize(
            lambda v, delta=delta: ((v[:6] - v[6:] - delta) ** 2).sum(),
            np.full(12, 0.01),
            method="SLSQP",
            bounds=[(0, float(1 - c)) for c in centre] + [(0, float(c)) for c in centre],
            constraints={"type": "ineq", "fun": lambda v: 0.8 - v.sum()},
            options={"ftol": 1e-14, "maxiter": 500},
        )
        near = Ball("l1", 0.8).project(x[k : k + 1], far[k : k + 1])[0]
        np.testing.assert_allclose(near.numpy(), centre + solved.x[:6] - solved.x[6:], atol=1e-5)


@properties
@given(balls, pixels, st.integers(0, 1000))
def test_random_starts_are_allowed_and_do_not_depend_on_the_batch(ball: Ball, x: Tensor, seed: int) -> None:
    ids = torch.tensor([5, 9, 2])
    start = ball.random_start(x, Noise(seed, ids))
    assert start.dtype == x.dtype
    assert start.min() >= 0
    assert start.max() <= 1
    assert (ball.distance(x, start) <= ball.eps * (1 + 1e-6)).all()
    alone = ball.random_start(x[1:2], Noise(seed, ids[1:2]))
    torch.testing.assert_close(start[1:2], alone, rtol=0, atol=1e-9)


@pytest.mark.parametrize("norm", NORMS)
def test_random_starts_fill_the_ball_evenly(norm: str) -> None:
    """In d dimensions (size / eps)^d is uniform, whatever the norm; in the middle of the box nothing is clipped."""
    ball, samples, d = Ball(norm, 0.3), 4000, 3
    x = torch.full((samples, d), 0.5)
    delta = ball.random_start(x, Noise(1, torch.arange(samples))) - x
    volume = (ball.size(delta) / 0.3) ** d
    assert abs(volume.mean() - 0.5) < 5 * (1 / 12 / samples) ** 0.5
    assert abs(volume.var() - 1 / 12) < 0.01
    assert delta.mean(0).abs().max() < 0.02
    spread = delta.abs().mean(0)
    assert spread.max() / spread.min() < 1.1


@pytest.mark.parametrize("norm", ["Linf", "l3", "", "l_2"])
def test_unknown_norms(norm: str) -> None:
    with pytest.raises(HardsphereError, match=r"Unknown norm .* use one of linf, l2, l1"):
        Ball(norm, 0.1)


def test_the_nearest_norm_is_suggested() -> None:
    with pytest.raises(HardsphereError, match="Did you mean 'linf'"):
        Ball("Linf", 0.1)


@pytest.mark.parametrize("eps", [0.0, -0.1, math.inf, math.nan])
def test_a_radius_that_is_none(eps: float) -> None:
    with pytest.raises(HardsphereError, match="finite radius above 0"):
        Ball("linf", eps)


def test_balls_are_written_as_people_write_them() -> None:
    written = [str(Ball("linf", 8 / 255)), str(Ball("linf", 0.031)), str(Ball("linf", 0.2)), str(Ball("l2", 128 / 255))]
    assert written == ["linf 8/255", "linf 0.031", "linf 0.2", "l2 128/255"]
    assert str(Ball("l1", 12)) == "l1 12"
