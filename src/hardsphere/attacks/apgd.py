"""Auto-PGD (Croce and Hein, ICML 2020, Algorithm 1): PGD that chooses its own step size.

It starts with steps of 2 * eps and momentum, and looks back at checkpoints: where the loss has risen in too few of the
last steps, or its best has not moved while the step size stayed, the step is halved and the search goes on from the
best point. Broken samples leave the batch at once.

One difference from the authors' code: the first interval counts its first step too (theirs compares it with a row of
zeros, a rise for the cross-entropy and a fall for the DLR).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from hardsphere.attacks.base import (
    AttackResult,
    Loss,
    attacking,
    check_batch,
    check_settings,
    has_direction,
    levelled,
    logits_and_gradient,
    logits_at,
    result,
    succeeded,
    survivors,
)
from hardsphere.attacks.losses import cross_entropy, targeted_dlr, towards
from hardsphere.noise import Noise
from hardsphere.threat import Ball, per_sample

_RHO = 0.75  # the part of the steps that must raise the loss
MOMENTUM = 0.75  # the part of an update that is new

TargetedLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A loss (logits, true labels, targets) -> one number per sample."""


def apgd(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    noise: Noise,
    steps: int = 100,
    restarts: int = 1,
    loss: Loss = cross_entropy,
    targeted: bool = False,
) -> AttackResult:
    """Auto-PGD on a loss: the cross-entropy, `dlr` or any other.

    Args:
        y: the true labels, or the wished ones if ``targeted``.
    """
    ball.require("APGD", "linf", "l2")
    check_settings(steps=steps, restarts=restarts)
    check_batch(x, y)
    x = x.detach()
    ascent = towards(loss) if targeted else loss
    search = _Search(model, x, y, ball, steps, targeted)
    with attacking(model):
        for restart in range(restarts):
            search.run(noise.fold("apgd", restart), lambda logits, alive: ascent(logits, y[alive]))
    return search.result()


def apgd_targeted(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    noise: Noise,
    targets: int = 9,
    steps: int = 100,
    restarts: int = 1,
    loss: TargetedLoss = targeted_dlr,
) -> AttackResult:
    """Auto-PGD towards each of the likeliest other classes in turn; any class but y counts as a success.

    Args:
        y: the true labels.
        targets: how many classes to try, ranked at the clean image; all others if there are fewer.
        loss: the targeted DLR; below four classes it is the difference of the two logits.
    """
    ball.require("APGD", "linf", "l2")
    check_settings(targets=targets, steps=steps, restarts=restarts)
    check_batch(x, y)
    x = x.detach()
    search = _Search(model, x, y, ball, steps, targeted=False)

    def objective(target: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda logits, alive: loss(logits, y[alive], target[alive])

    with attacking(model):
        for rank, target in enumerate(likeliest_others(logits_at(model, x), y, targets).unbind(dim=1)):
            for restart in range(restarts):
                search.run(noise.fold("apgd-targeted", rank, restart), objective(target))
    return search.result()


def likeliest_others(logits: Tensor, y: Tensor, count: int) -> Tensor:
    """The classes other than y with the largest logits, likeliest first, of shape (B, min(count, classes - 1))."""
    others = logits.scatter(1, y[:, None], -torch.inf)
    return others.topk(min(count, logits.shape[1] - 1), dim=1).indices


def checkpoints(steps: int) -> dict[int, int]:
    """After which steps to look back, and over how many: 22, 41, 57, 70, 80, 87, 93 and 99 of 100."""
    interval, shortest, shrink = (max(int(part * steps), 1) for part in (0.22, 0.06, 0.03))
    found, last = {}, 0
    while last + interval <= steps:
        last += interval
        found[last] = interval
        interval = max(interval - shrink, shortest)
    return found


@dataclass
class Memory:
    """What Auto-PGD remembers of each sample that is still in the batch."""

    alive: Tensor
    x_adv: Tensor
    previous: Tensor
    gradient: Tensor
    loss: Tensor
    best: Tensor
    best_gradient: Tensor
    best_loss: Tensor
    step_size: Tensor
    rises: Tensor
    checked_loss: Tensor
    halved: Tensor

    @classmethod
    def of(cls, alive: Tensor, start: Tensor, eps: float) -> Memory:
        zero = torch.zeros_like(start)
        number = torch.zeros(len(start), device=start.device)
        return cls(
            alive=alive,
            x_adv=start,
            previous=start,
            gradient=zero,
            loss=number + torch.inf,
            best=start,
            best_gradient=zero,
            best_loss=number - torch.inf,
            step_size=(number + 2 * eps).to(start.dtype),
            rises=number,
            checked_loss=number - torch.inf,
            halved=number.bool(),
        )

    def part(self, mask: Tensor) -> Memory:
        return Memory(**{field.name: getattr(self, field.name)[mask] for field in fields(self)})

    def observe(self, loss: Tensor, gradient: Tensor) -> None:
        """Take in the loss and the gradient at x_adv."""
        self.rises = self.rises + (loss > self.loss)
        self.loss, self.gradient = loss, gradient
        better = loss > self.best_loss
        wide = per_sample(better, gradient)
        self.best_loss = torch.where(better, loss, self.best_loss)
        self.best = torch.where(wide, self.x_adv, self.best)
        self.best_gradient = torch.where(wide, gradient, self.best_gradient)

    def look_back(self, interval: int | Tensor, due: Tensor) -> None:
        """Halve the step and return to the best point where the search has stopped paying (conditions 1 and 2).

        Only samples for which a look is ``due`` are concerned.
        """
        oscillates = self.rises <= _RHO * interval
        rests = ~self.halved & (self.best_loss <= self.checked_loss)
        halve = due & (oscillates | rests)
        self.halved = torch.where(due, halve, self.halved)
        self.step_size = torch.where(halve, self.step_size / 2, self.step_size)
        wide = per_sample(halve, self.x_adv)
        self.x_adv = torch.where(wide, self.best, self.x_adv)
        self.gradient = torch.where(wide, self.best_gradient, self.gradient)
        self.checked_loss = torch.where(due, self.best_loss, self.checked_loss)
        self.rises = torch.where(due, 0, self.rises)

    def move(self, x: Tensor, ball: Ball, new: float | Tensor) -> None:
        """x + new * (z - x) + (1 - new) * (x - x_previous), where z is the projected steepest step."""
        z = ball.project(x, ball.step(self.x_adv, self.gradient, self.step_size))
        moved = self.x_adv + new * (z - self.x_adv) + (1 - new) * (self.x_adv - self.previous)
        self.previous, self.x_adv = self.x_adv, ball.project(x, moved)


class _Search:
    """Runs of Auto-PGD over one batch; each takes up the samples that the earlier ones did not break."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, ball: Ball, steps: int, targeted: bool) -> None:
        self.model, self.x, self.y, self.ball, self.targeted = model, x, y, ball, targeted
        self.steps, self.checkpoints = steps, checkpoints(steps)
        self.found = x.clone()
        self.broken = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        self.stuck = torch.ones_like(self.broken)

    def run(self, noise: Noise, objective: Callable[[Tensor, Tensor], Tensor]) -> None:
        """One run from a random start, one forward and backward pass per step."""
        alive = survivors(self.broken)
        if len(alive) == 0:
            return
        state = Memory.of(alive, self.ball.random_surface(self.x[alive], noise[alive]), self.ball.eps)
        for step in range(self.steps):
            logits, loss, gradient = logits_and_gradient(self.model, state.x_adv, objective, state.alive)
            won = succeeded(logits, self.y[state.alive], self.targeted)
            if won.any():
                self.found[state.alive[won]], self.broken[state.alive[won]] = state.x_adv[won], True
                state, loss, gradient = state.part(~won), loss[~won], gradient[~won]
                if len(state.alive) == 0:
                    return
            self.stuck[state.alive] &= ~has_direction(gradient)
            state.observe(loss, levelled(gradient))
            if step in self.checkpoints:
                state.look_back(self.checkpoints[step], due=torch.ones_like(state.halved))
            state.move(self.x[state.alive], self.ball, 1.0 if step == 0 else MOMENTUM)
        won = succeeded(logits_at(self.model, state.x_adv), self.y[state.alive], self.targeted)
        self.found[state.alive], self.broken[state.alive] = state.x_adv, won

    def result(self) -> AttackResult:
        return result(self.x, self.found, self.broken, self.ball, self.stuck)
