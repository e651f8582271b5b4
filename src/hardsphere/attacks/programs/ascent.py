"""PGD and its kin (FGSM, BIM, MIM, C&W in l-inf) in turns: the twin of `hardsphere.attacks.pgd.climb`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hardsphere.attacks.base import Loss, check_settings, has_direction, levelled
from hardsphere.attacks.losses import cross_entropy, margin, towards
from hardsphere.attacks.pgd import default_step
from hardsphere.attacks.programs.base import Answer, Ask, Program, State, Turn, common, zeros
from hardsphere.noise import Noise
from hardsphere.threat import Ball, per_sample


class Ascent(Program):
    """Projected steps up a loss, from a start of their own for each restart.

    Args:
        lengths: of the steps.
        start: (x, noise, restart) -> the first images; ``restart`` may differ from sample to sample.
        decay: what a step keeps of the past directions, or None for no memory.
    """

    def __init__(
        self,
        ball: Ball,
        lengths: list[float],
        loss: Loss,
        start: Callable[[Tensor, Noise, Tensor], Tensor],
        restarts: int = 1,
        decay: float | None = None,
        targeted: bool = False,
        keep: str = "any",
    ) -> None:
        super().__init__(ball)
        check_settings(keep, steps=len(lengths), restarts=restarts)
        self.lengths, self.first, self.restarts, self.decay = lengths, start, restarts, decay
        self.ascent = towards(loss) if targeted else loss
        self.targeted, self.keep = targeted, keep

    def prepare(self, x: Tensor) -> None:
        self.table = torch.tensor([*self.lengths, 0.0], dtype=x.dtype, device=x.device)

    def start(self, x: Tensor, y: Tensor, noise: Noise, logits: Tensor) -> State:
        run = zeros(x)
        memory = {} if self.decay is None else {"memory": torch.zeros_like(x)}
        return common(x, y, self.first(x, noise, run), noise) | {"run": run, "step": zeros(x)} | memory

    def loss(self, logits: Tensor, state: State) -> Tensor:
        return self.ascent(logits, state["y"])

    def most_turns(self, state: State) -> int:
        return self.restarts * (len(self.lengths) + 1)

    def ends_run(self, turn: int) -> bool:
        return self.restarts > 1 and turn % (len(self.lengths) + 1) == len(self.lengths)

    def turn(self, state: State, answer: Answer, ask: Ask, again: bool) -> Turn:
        x, step = state["x"], state["step"]
        last = step == len(self.lengths)
        new = {"stuck": state["stuck"] & (last | ~has_direction(answer.gradient))}
        direction = levelled(answer.gradient)
        if self.decay is not None:
            size = direction.abs().flatten(1).sum(1)
            direction = self.decay * state["memory"] + direction / per_sample(torch.where(size > 0, size, 1), x)
            new["memory"] = torch.where(per_sample(last, x), 0, direction)
        moved = self.ball.project(x, self.ball.step(state["x_adv"], direction, self.table[step]))
        new["run"], new["step"] = state["run"] + last, torch.where(last, 0, step + 1)
        if again:
            start = self.first(x, Noise.of_keys(state["keys"]), new["run"])
            moved = torch.where(per_sample(last, x), start, moved)
        new["x_adv"], new["finished"] = moved, last & (new["run"] >= self.restarts)
        counts = last if self.keep == "last" else torch.ones_like(last)
        return Turn(new, state["x_adv"], answer.logits, counts)


def pgd(
    ball: Ball,
    *,
    steps: int = 20,
    step_size: float | None = None,
    restarts: int = 1,
    loss: Loss = cross_entropy,
    random_start: bool = True,
    targeted: bool = False,
    keep: str = "any",
) -> Program:
    """`hardsphere.attacks.pgd` in turns."""
    length = default_step(ball, steps) if step_size is None else step_size

    def start(x: Tensor, noise: Noise, run: Tensor) -> Tensor:
        return ball.random_start(x, noise.fold("pgd", run)) if random_start else x

    return Ascent(ball, [length] * steps, loss, start, restarts, targeted=targeted, keep=keep)


def bim(
    ball: Ball,
    *,
    steps: int = 20,
    step_size: float | None = None,
    loss: Loss = cross_entropy,
    targeted: bool = False,
    keep: str = "any",
) -> Program:
    """`hardsphere.attacks.bim` in turns."""
    return pgd(ball, steps=steps, step_size=step_size, loss=loss, random_start=False, targeted=targeted, keep=keep)


def fgsm(ball: Ball, *, loss: Loss = cross_entropy, targeted: bool = False, keep: str = "any") -> Program:
    """`hardsphere.attacks.fgsm` in turns."""
    return bim(ball, steps=1, step_size=ball.eps, loss=loss, targeted=targeted, keep=keep)


def mim(
    ball: Ball,
    *,
    steps: int = 20,
    step_size: float | None = None,
    decay: float = 1.0,
    loss: Loss = cross_entropy,
    targeted: bool = False,
    keep: str = "any",
) -> Program:
    """`hardsphere.attacks.mim` in turns."""
    length = default_step(ball, steps) if step_size is None else step_size
    return Ascent(ball, [length] * steps, loss, lambda x, *_: x, decay=decay, targeted=targeted, keep=keep)


def carlini_linf(
    ball: Ball,
    *,
    steps: int = 100,
    step_size: float | None = None,
    restarts: int = 1,
    targeted: bool = False,
    keep: str = "any",
) -> Program:
    """`hardsphere.attacks.carlini_linf` in turns."""
    ball.require("C&W", "linf")
    first = ball.eps / 4 if step_size is None else step_size
    lengths = [first * (1 - step / steps) for step in range(steps)]

    def start(x: Tensor, noise: Noise, run: Tensor) -> Tensor:
        return ball.random_start(x, noise.fold("carlini", run))

    return Ascent(ball, lengths, margin, start, restarts, targeted=targeted, keep=keep)
