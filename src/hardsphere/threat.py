"""The threat model: what an adversary may do to an image. All Lp geometry lives here and only here.

A `Ball` is the paper's B(x) = {x' : ||x' - x||_p <= eps}, cut with the pixel box [0, 1]. Attacks ask it for a random
start, a steepest step U_p (eq. 7), a projection and a distance, and so know nothing of norms themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hardsphere.errors import HardsphereError, nearest
from hardsphere.noise import Noise
from hardsphere.runtime import has_kernels

NORMS = ("linf", "l2", "l1")

# Ten suffice but where nearly all that the box allows is asked for; there the rest falls short by a rounding.
_NEWTON_STEPS = 12
_PIXELS_OF_A_KERNEL = 8192  # an image of one kernel must fit into the registers of one block


def per_sample(values: Tensor, like: Tensor) -> Tensor:
    """One number per sample, shaped so that it broadcasts against the images ``like``."""
    return values.view(-1, *[1] * (like.dim() - 1))


@dataclass(frozen=True)
class Ball:
    """Perturbations of at most ``eps`` in a norm, in pixel units, that keep the image inside [0, 1].

    Args:
        norm: ``"linf"``, ``"l2"`` or ``"l1"``.
        eps: the radius, above 0.
    """

    norm: str
    eps: float

    def __post_init__(self) -> None:
        if self.norm not in NORMS:
            known = ", ".join(NORMS)
            raise HardsphereError(f"Unknown norm '{self.norm}': use one of {known}.{nearest(self.norm, NORMS)}")
        try:
            object.__setattr__(self, "eps", float(self.eps))  # of numpy or torch, it would not go into a ledger
        except (TypeError, ValueError):
            raise HardsphereError(f"eps is '{self.eps}', but a ball needs a number, such as 8 / 255.") from None
        if not 0 < self.eps < float("inf"):
            raise HardsphereError(f"eps is {self.eps}, but a ball needs a finite radius above 0, such as 8/255.")

    def __str__(self) -> str:
        radius, over_255 = f"{self.eps:g}", self.eps * 255
        if float(radius) != self.eps and abs(over_255 - round(over_255)) < 1e-6:
            radius = f"{over_255:.0f}/255"
        return f"{self.norm} {radius}"

    def size(self, delta: Tensor) -> Tensor:
        """||delta||_p for each sample."""
        return _norm(delta, self.norm)

    def distance(self, x: Tensor, x_adv: Tensor) -> Tensor:
        """||x_adv - x||_p for each sample."""
        return self.size(x_adv - x)

    def steepest(self, gradient: Tensor) -> Tensor:
        """U_p(u) = argmax of u.v over ||v||_p <= 1 (eq. 7). A sample whose gradient is zero gets a zero step."""
        if self.norm == "linf":
            return gradient.sign()
        if self.norm == "l2":
            # Gradients of a confident model may be so small that their squares underflow: bring them near 1 first.
            largest = per_sample(_norm(gradient, "linf"), gradient)
            gradient = gradient / torch.where(largest > 0, largest, 1)
            return gradient / per_sample(_norm(gradient, "l2"), gradient).clamp_min(1)
        flat = gradient.flatten(1)
        largest = flat.abs().argmax(dim=1, keepdim=True)
        return torch.zeros_like(flat).scatter(1, largest, flat.gather(1, largest).sign()).view_as(gradient)

    def step(self, x_adv: Tensor, gradient: Tensor, size: float | Tensor) -> Tensor:
        """x_adv + size * U_p(gradient) (eq. 8), not yet projected; ``size`` may differ from sample to sample.

        U_1 spends the whole step on the steepest pixel, and the box would cut off most of that. So under l1 a pixel
        takes what its way to the box allows, and the rest goes to the next steepest.
        """
        if isinstance(size, Tensor):
            size = per_sample(size, x_adv)
        if self.norm == "l1":
            return x_adv + _steepest_l1_in_box(x_adv, gradient, size)
        return x_adv + size * self.steepest(gradient)

    def dual(self, gradient: Tensor) -> Tensor:
        """The most that a linear function with this gradient can change per unit of perturbation: the dual norm."""
        return _norm(gradient, {"linf": "l1", "l2": "l2", "l1": "linf"}[self.norm])

    def contains(self, x: Tensor, x_adv: Tensor, slack: float = 0.0) -> Tensor:
        """Whether x_adv is at most eps from x, or ``slack`` farther, which floating point may make necessary."""
        return self.distance(x, x_adv) <= self.eps + slack

    def require(self, attack: str, *norms: str) -> None:
        """Refuse a norm that ``attack`` has no geometry for."""
        if self.norm not in norms:
            raise HardsphereError(f"{attack} works in {' or '.join(norms)}, not in {self.norm}: choose another attack.")

    def shortest(self, x: Tensor, normal: Tensor, gain: Tensor) -> Tensor:
        """The smallest d with <normal, d> = gain that keeps x + d in the box, or the farthest that the box allows.

        This projects x onto a hyperplane cut with the box under linf and l2. Every pixel moves in the useful direction
        at its own speed (1 under linf, |normal_i| under l2) until it meets the wall, all for the same time:
        d_i = sign_i * min(time * speed_i, room_i). What is gained by a time is increasing, concave and piecewise
        linear, so that Newton's method climbs to the time from below and ends there exactly, after some ten steps;
        there is no need to sort the pixels by when they stop.
        """
        self.require("The projection onto a hyperplane", "linf", "l2")
        if x.dtype == torch.float32 and has_kernels(x) and x[0].numel() <= _PIXELS_OF_A_KERNEL:
            from hardsphere.kernels import shortest

            return shortest(x.flatten(1), normal.flatten(1), gain, self.norm == "linf", _NEWTON_STEPS).view(x.shape)
        exact = x.dtype if x.is_cuda else torch.float64  # a GPU is bound by memory here
        slope = (normal * per_sample(gain.sign(), normal)).flatten(1).to(exact)
        start, wanted = x.flatten(1).to(exact), gain.abs().to(exact)[:, None]
        room = torch.where(slope > 0, 1 - start, start).clamp_min(0)
        size = slope.abs()
        speed = torch.ones_like(size) if self.norm == "linf" else size
        pace = size * speed
        time = torch.zeros_like(wanted)
        for _ in range(_NEWTON_STEPS):
            way = torch.minimum(time * speed, room)
            gained = (size * way).sum(1, keepdim=True)
            rate = (pace * (way < room)).sum(1, keepdim=True)
            later = torch.where(rate > 0, time + (wanted - gained).clamp_min(0) / rate, torch.inf)
            if _has_settled(time, later):
                break
            time = later
        # Where the slope is zero and the time infinite, a pixel stays where it is.
        moved = torch.where(size > 0, time * torch.where(size > 0, speed, 1), 0)
        return (slope.sign() * torch.minimum(moved, room)).reshape(x.shape).to(x.dtype)

    def project(self, x: Tensor, x_adv: Tensor) -> Tensor:
        """The nearest allowed image: inside the ball around x and inside [0, 1].

        Under linf and l1 this is the Euclidean projection onto the intersection. Under l2 it is the field's usual one
        (onto the ball, then onto the box), which is allowed too, because clipping only shortens a perturbation of an
        image that lies in the box.
        """
        if self.norm == "linf":
            return torch.minimum(torch.maximum(x_adv, x - self.eps), x + self.eps).clamp(0, 1)
        delta = x_adv - x
        if self.norm == "l2":
            size = per_sample(_norm(delta, "l2"), delta)
            return (x + delta * (self.eps / size.clamp_min(self.eps))).clamp(0, 1)
        return (x + _onto_l1_ball_in_box(x, delta, self.eps)).clamp(0, 1)

    def random_start(self, x: Tensor, noise: Noise) -> Tensor:
        """A point drawn uniformly from the ball, then projected into the box."""
        shape = x.shape[1:]
        if self.norm == "linf":
            delta = (2 * noise.fold("direction").uniform(*shape) - 1) * self.eps
        elif self.norm == "l2":
            direction = noise.fold("direction").normal(*shape)
            radius = noise.fold("radius").uniform() ** (1 / shape.numel())
            delta = direction * per_sample(self.eps * radius / _norm(direction, "l2").clamp_min(1e-12), x)
        else:
            # Exponential magnitudes, normalised by their sum and one more of them, are uniform in the l1 ball.
            magnitude = -torch.log1p(-noise.fold("direction").uniform(*shape))
            spare = -torch.log1p(-noise.fold("radius").uniform())
            total = magnitude.flatten(1).sum(1) + spare
            delta = magnitude * noise.fold("sign").signs(*shape) * per_sample(self.eps / total.clamp_min(1e-12), x)
        return self.project(x, x + delta.to(x.dtype))

    def random_surface(self, x: Tensor, noise: Noise) -> Tensor:
        """A random point at distance eps, projected into the box: t / ||t||_p with t uniform, or normal under l2."""
        noise, shape = noise.fold("direction"), x.shape[1:]
        direction = noise.normal(*shape) if self.norm == "l2" else 2 * noise.uniform(*shape) - 1
        length = per_sample(self.eps / _norm(direction, self.norm).clamp_min(1e-12), x)
        return self.project(x, x + (direction * length).to(x.dtype))

    def random_extreme(self, x: Tensor, noise: Noise) -> Tensor:
        """A random extreme point of the ball, projected into the box: all pixels by +-eps, or one pixel under l1."""
        if self.norm == "l2":
            return self.random_surface(x, noise)
        shape = x.shape[1:]
        delta = self.eps * noise.fold("sign").signs(*shape)
        if self.norm == "l1":
            flat = delta.flatten(1)
            pixel = noise.fold("pixel").integers(0, flat.shape[1], 1)
            delta = torch.zeros_like(flat).scatter(1, pixel, flat.gather(1, pixel)).view_as(delta)
        return self.project(x, x + delta.to(x.dtype))


def _has_settled(time: Tensor, later: Tensor) -> bool:
    """Whether a step has changed nothing; a GPU would have to wait to learn that, and takes all steps."""
    return not time.is_cuda and bool((later == time).all())


def _norm(delta: Tensor, norm: str) -> Tensor:
    flat = delta.flatten(1)
    if norm == "linf":
        return flat.abs().amax(1)
    if norm == "l2":
        return flat.pow(2).sum(1).sqrt()
    return flat.abs().sum(1)


def _steepest_l1_in_box(x: Tensor, gradient: Tensor, size: float | Tensor) -> Tensor:
    """argmax of gradient.d over ||d||_1 <= size with x + d in the box: the steepest pixels go all the way they have."""
    slope = gradient.flatten(1)
    room = torch.where(gradient > 0, 1 - x, x).clamp_min(0).flatten(1) * (slope != 0)
    order = slope.abs().argsort(dim=1, descending=True, stable=True)
    way = room.gather(1, order)
    spent = way.cumsum(1) - way  # on the steeper pixels
    left = (size.flatten(1) if isinstance(size, Tensor) else size) - spent
    moved = torch.zeros_like(slope).scatter(1, order, torch.minimum(left.clamp_min(0), way))
    return (slope.sign() * moved).view_as(x)


def _onto_l1_ball_in_box(x: Tensor, delta: Tensor, eps: float) -> Tensor:
    """Euclidean projection of ``delta`` onto {||d||_1 <= eps} cut with {0 <= x + d <= 1}, by bisection.

    Its solution is d_i = sign(delta_i) * clip(|delta_i| - t, 0, room_i), where room_i is the way to the box and the
    threshold t >= 0 is zero if that is short enough already, else such that the sizes add up to eps.
    """
    room = torch.where(delta > 0, 1 - x, x).clamp_min(0)

    def shrunk(threshold: Tensor) -> Tensor:
        return torch.minimum((delta.abs() - per_sample(threshold, x)).clamp_min(0), room)

    low = torch.zeros(len(x), dtype=x.dtype, device=x.device)
    high = delta.abs().flatten(1).amax(1)
    fits = shrunk(low).flatten(1).sum(1) <= eps
    for _ in range(40):
        middle = (low + high) / 2
        too_long = shrunk(middle).flatten(1).sum(1) > eps
        low, high = torch.where(too_long, middle, low), torch.where(too_long, high, middle)
    return delta.sign() * shrunk(torch.where(fits, torch.zeros_like(high), high))
