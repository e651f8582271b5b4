"""The attacks of Carlini and Wagner (2017), three of them.

`carlini_linf` is what the field has come to call C&W in l-inf: projected gradient steps on their margin. The other two
are the originals. They work in the variable w with x' = (tanh(w) + 1) / 2, where every w is an image, and search for
the closest broken image, which may lie outside the ball; only one inside counts as broken.

The paper's column "C&W (l-inf version)" can hardly be either: at 84 % it agrees with `carlini_l2` whose images are then
held against an l-inf radius, and measures that filter rather than robustness.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hardsphere.attacks.base import (
    ROUNDING,
    AttackResult,
    attacking,
    check_batch,
    check_settings,
    check_sizes,
    has_direction,
    logits_and_gradient,
    result,
    succeeded,
)
from hardsphere.attacks.losses import margin, towards
from hardsphere.attacks.pgd import climb
from hardsphere.noise import Noise
from hardsphere.threat import Ball, per_sample

_INSIDE_BOX = 0.999999  # keeps arctanh finite at black and white
_SMALLEST_TAU = 1 / 256
_LARGEST_CONST = 20.0
_PATIENCE = 0.9999


def carlini_linf(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    noise: Noise,
    steps: int = 100,
    step_size: float | None = None,
    restarts: int = 1,
    targeted: bool = False,
    keep: str = "any",
) -> AttackResult:
    """PGD on the margin max_i Z_i - Z_y, free of scale, from a uniform start with steps that shrink linearly.

    Args:
        step_size: the first length of a step; eps / 4 by default.
        keep: as in `pgd`.
    """
    ball.require("C&W", "linf")
    first = ball.eps / 4 if step_size is None else step_size
    ascent = towards(margin) if targeted else margin
    return climb(
        model,
        x,
        y,
        ball,
        start=lambda alive, restart: ball.random_start(x[alive], noise[alive].fold("carlini", restart)),
        objective=lambda logits, alive, _: ascent(logits, y[alive]),
        steps=steps,
        step_size=lambda step: first * (1 - step / steps),
        restarts=restarts,
        targeted=targeted,
        keep=keep,
    )


def carlini_l2(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    noise: Noise,
    steps: int = 1000,
    step_size: float = 5e-3,
    searches: int = 9,
    initial_const: float = 1e-2,
    confidence: float = 0.0,
    targeted: bool = False,
    minimise: bool = False,
) -> AttackResult:
    """The broken image nearest in l2: minimise ||x' - x||_2^2 + c * max(0, confidence - lead of the wrong class).

    The constant c grows tenfold until a search succeeds and is bisected from there. It draws nothing from ``noise``.

    Args:
        ball: says which image counts; in another norm than l2 too, which makes a weak attack.
        steps: steps of Adam in each search; a search is given up where a tenth of them no longer lowers the loss.
        step_size: Adam's, in the space of w.
        searches: how many constants to try.
        confidence: by how much the wrong class must lead.
        minimise: go on inside the ball, to the nearest image that can be found.
    """
    check_settings(steps=steps, searches=searches)
    check_sizes(initial_const=initial_const)
    check_batch(x, y)
    x = x.detach()
    closest = _Closest(x, y, ball, targeted, minimise)
    everyone = torch.arange(len(x), device=x.device)
    const = x.new_full((len(x),), initial_const)
    low, high = torch.zeros_like(const), torch.full_like(const, torch.inf)
    with attacking(model):
        for _ in range(searches):
            rows = everyone[closest.unsettled(everyone)]
            if len(rows) == 0:
                break
            worked = torch.zeros(len(x), dtype=torch.bool, device=x.device)
            last_loss = torch.full_like(const, torch.inf)
            w, adam = _to_tanh(x), _Adam(x, step_size)
            for step in range(steps):
                x_adv = _to_image(w[rows])
                delta = x_adv - x[rows]
                logits, hinge, gradient = logits_and_gradient(model, x_adv, closest.hinge, rows, confidence)
                closest.stuck[rows] &= (hinge > 0) & ~has_direction(gradient)
                won = succeeded(logits, y[rows], targeted) & (hinge <= 0)
                worked[rows] |= won
                closest.offer(rows[won], x_adv[won], delta[won].flatten(1).pow(2).sum(1))
                c = per_sample(const[rows], x_adv)
                gradient = 2 * delta + c * torch.nan_to_num(gradient)
                w[rows] = w[rows] - adam.update(rows, gradient * _slope(w[rows]))
                going = closest.unsettled(rows)
                if step % max(steps // 10, 1) == 0:
                    loss = delta.flatten(1).pow(2).sum(1) + const[rows] * hinge
                    going &= loss <= _PATIENCE * last_loss[rows]
                    last_loss[rows] = loss
                rows = rows[going]
                if len(rows) == 0:
                    break
            high = torch.where(worked, torch.minimum(high, const), high)
            low = torch.where(worked, low, torch.maximum(low, const))
            const = torch.where(high.isinf(), const * 10, (low + high) / 2)
    return closest.result()


def carlini_linf_original(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    noise: Noise,
    steps: int = 1000,
    step_size: float = 5e-3,
    initial_const: float = 1e-5,
    tau: float = 1.0,
    targeted: bool = False,
    minimise: bool = False,
) -> AttackResult:
    """The original l-inf attack: minimise c * max(0, -lead of the wrong class) + sum_i max(0, |delta_i| - tau).

    After a success tau falls to nine tenths of what was needed and the search goes on from there; after ``steps`` steps
    without one c doubles, and the sample is given up beyond 20. A sample that stands therefore costs some twenty times
    ``steps`` passes. Each sample has its own c and tau. It draws nothing from ``noise``.

    Args:
        steps: most steps of Adam for one pair (c, tau).
        step_size: Adam's, in the space of w.
        tau: the first bound on the pixels.
        minimise: go on inside the ball, to the nearest image that can be found.
    """
    ball.require("The original l-inf C&W", "linf")
    check_settings(steps=steps)
    check_sizes(_LARGEST_CONST, initial_const=initial_const)  # it is doubled up to there
    check_sizes(tau=tau)
    check_batch(x, y)
    x = x.detach()
    closest = _Closest(x, y, ball, targeted, minimise)
    everyone = torch.arange(len(x), device=x.device)
    const = x.new_full((len(x),), initial_const)
    bound = torch.full_like(const, tau)
    spent = torch.zeros_like(const)
    w, adam = _to_tanh(x), _Adam(x, step_size)
    warm = w.clone()
    floor = min(_SMALLEST_TAU, 0.9 * ball.eps)
    # A factor of nine tenths would step over the one bound that matters here, so the radius itself is tried as well.
    radius = 0.99 * ball.eps
    rows = everyone
    with attacking(model):
        while len(rows):
            x_adv = _to_image(w[rows])
            delta = x_adv - x[rows]
            logits, hinge, gradient = logits_and_gradient(model, x_adv, closest.hinge, rows)
            closest.stuck[rows] &= (hinge > 0) & ~has_direction(gradient)
            won, size = succeeded(logits, y[rows], targeted), ball.size(delta)
            closest.offer(rows[won], x_adv[won], size[won])
            c, t = const[rows], bound[rows]
            excess = (delta.abs() - per_sample(t, delta)).clamp_min(0)
            reached = won & (c * hinge + excess.flatten(1).sum(1) < 1e-4 * c)
            gradient = per_sample(c, delta) * torch.nan_to_num(gradient) + delta.sign() * (excess > 0)
            w[rows] = w[rows] - adam.update(rows, gradient * _slope(w[rows]))
            spent[rows] += 1
            tighter = 0.9 * torch.minimum(t, size)
            bound[rows] = torch.where(reached, torch.where(t > radius, tighter.clamp_min(radius), tighter), t)
            warm[rows[reached]] = _to_tanh(x_adv[reached])
            tired = ~reached & (spent[rows] >= steps)
            const[rows] = torch.where(tired, 2 * c, c)
            again = rows[reached | tired]
            w[again], spent[again] = warm[again], 0
            adam.forget(again)
            rows = rows[closest.unsettled(rows) & (const[rows] <= _LARGEST_CONST) & (bound[rows] >= floor)]
    return closest.result()


class _Closest:
    """The closest broken image of each sample so far."""

    def __init__(self, x: Tensor, y: Tensor, ball: Ball, targeted: bool, minimise: bool) -> None:
        self.x, self.y, self.ball, self.targeted, self.minimise = x, y, ball, targeted, minimise
        self.image = x.clone()
        self.size = x.new_full((len(x),), torch.inf)
        self.stuck = torch.ones(len(x), dtype=torch.bool, device=x.device)

    def hinge(self, logits: Tensor, rows: Tensor, confidence: float = 0.0) -> Tensor:
        """By how much the class that the attacker wants still lacks the lead that it should have."""
        lead = -margin(logits, self.y[rows]) if self.targeted else margin(logits, self.y[rows])
        return (confidence - lead).clamp_min(0)

    def offer(self, rows: Tensor, images: Tensor, sizes: Tensor) -> None:
        closer = sizes < self.size[rows]
        self.image[rows[closer]], self.size[rows[closer]] = images[closer], sizes[closer]

    def broken(self, rows: Tensor) -> Tensor:
        return self.size[rows].isfinite() & self.ball.contains(self.x[rows], self.image[rows], ROUNDING)

    def unsettled(self, rows: Tensor) -> Tensor:
        """Whether there is more to find: always if the nearest image is wanted, else until one lies in the ball."""
        return torch.ones_like(rows, dtype=torch.bool) if self.minimise else ~self.broken(rows)

    def result(self) -> AttackResult:
        everyone = torch.arange(len(self.x), device=self.x.device)
        return result(self.x, self.image, self.broken(everyone), self.ball, self.stuck)


class _Adam:
    """Adam (Kingma and Ba, 2015) with moments and a step counter of its own for each sample."""

    def __init__(self, like: Tensor, step_size: float) -> None:
        self.step_size = step_size
        self.first, self.second = torch.zeros_like(like), torch.zeros_like(like)
        self.count = torch.zeros(len(like), device=like.device)

    def update(self, rows: Tensor, gradient: Tensor) -> Tensor:
        """What to subtract from the samples at ``rows``."""
        self.count[rows] += 1
        self.first[rows] = first = 0.9 * self.first[rows] + 0.1 * gradient
        self.second[rows] = second = 0.999 * self.second[rows] + 0.001 * gradient.square()
        count = per_sample(self.count[rows], gradient)
        return self.step_size * (first / (1 - 0.9**count)) / ((second / (1 - 0.999**count)).sqrt() + 1e-8)

    def forget(self, rows: Tensor) -> None:
        self.first[rows], self.second[rows], self.count[rows] = 0, 0, 0


def _to_tanh(x: Tensor) -> Tensor:
    return torch.atanh((2 * x - 1) * _INSIDE_BOX)


def _to_image(w: Tensor) -> Tensor:
    return (torch.tanh(w) + 1) / 2


def _slope(w: Tensor) -> Tensor:
    """dx' / dw."""
    return (1 - torch.tanh(w).square()) / 2
