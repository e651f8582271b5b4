"""Auto-PGD in turns: the twin of `hardsphere.attacks.apgd`, whose rules for step and momentum it shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from hardsphere.attacks.apgd import MOMENTUM, Memory, TargetedLoss, checkpoints, likeliest_others
from hardsphere.attacks.base import Loss, check_settings, has_direction, levelled
from hardsphere.attacks.losses import cross_entropy, targeted_dlr, towards
from hardsphere.attacks.programs.base import Answer, Ask, Program, State, Turn, common, zeros
from hardsphere.noise import Noise
from hardsphere.threat import Ball, per_sample


class AutoPGD(Program):
    """Runs of Auto-PGD, one after another: a run for each restart, or for each target and restart.

    Args:
        runs: how many; with targets, how many for each.
        objective: (logits, y, target) -> what to make large.
        targets: how many of the likeliest other classes to aim at in turn; 0 for none.
        purpose: (noise, run) -> the randomness of a run.
    """

    def __init__(
        self,
        ball: Ball,
        steps: int,
        restarts: int,
        objective: TargetedLoss,
        purpose: Callable[[Noise, Tensor], Noise],
        targets: int = 0,
        targeted: bool = False,
    ) -> None:
        super().__init__(ball)
        ball.require("APGD", "linf", "l2")
        self.steps, self.restarts, self.objective, self.purpose = steps, restarts, objective, purpose
        self.targets, self.targeted = targets, targeted

    def prepare(self, x: Tensor) -> None:
        intervals = [checkpoints(self.steps).get(step, 0) for step in range(self.steps + 1)]
        self.intervals = torch.tensor(intervals, device=x.device)

    def start(self, x: Tensor, y: Tensor, noise: Noise, logits: Tensor) -> State:
        run = zeros(x)
        targets = likeliest_others(logits, y, self.targets) if self.targets else y[:, None]
        first = self._first_point(x, noise, run)
        state = common(x, y, first, noise) | {"run": run, "step": zeros(x), "targets": targets}
        return state | _memory_entries(Memory.of(zeros(x), first, self.ball.eps))

    def _first_point(self, x: Tensor, noise: Noise, run: Tensor) -> Tensor:
        return self.ball.random_surface(x, self.purpose(noise, run))

    def loss(self, logits: Tensor, state: State) -> Tensor:
        rank = (state["run"] // self.restarts).clamp_max(state["targets"].shape[1] - 1)
        return self.objective(logits, state["y"], state["targets"].gather(1, rank[:, None]).squeeze(1))

    def most_turns(self, state: State) -> int:
        return self._runs(state) * (self.steps + 1)

    def _runs(self, state: State) -> int:
        return state["targets"].shape[1] * self.restarts

    def ends_run(self, turn: int) -> bool:
        return turn % (self.steps + 1) == self.steps

    def turn(self, state: State, answer: Answer, ask: Ask, again: bool) -> Turn:
        x, step = state["x"], state["step"]
        last = step == self.steps  # the last image of a run is only looked at
        stuck = state["stuck"] & (last | ~has_direction(answer.gradient))
        memory = Memory(alive=step, **{name: state[name] for name in _REMEMBERED})
        memory.observe(answer.loss, levelled(answer.gradient))
        interval = self.intervals[step]
        memory.look_back(interval, due=interval > 0)
        memory.move(x, self.ball, per_sample(torch.where(step == 0, 1.0, MOMENTUM).to(x.dtype), x))
        run, step = state["run"] + last, torch.where(last, 0, step + 1)
        new = _memory_entries(memory)
        if again:
            start = self._first_point(x, Noise.of_keys(state["keys"]), run)
            fresh = _memory_entries(Memory.of(step, start, self.ball.eps))
            new = {name: torch.where(per_sample(last, value), fresh[name], value) for name, value in new.items()}
        new |= {"run": run, "step": step, "stuck": stuck, "finished": last & (run >= self._runs(state))}
        return Turn(new, state["x_adv"], answer.logits, torch.ones_like(last))


_REMEMBERED = [field.name for field in fields(Memory) if field.name != "alive"]


def _memory_entries(memory: Memory) -> State:
    return {name: getattr(memory, name) for name in _REMEMBERED}


def apgd(
    ball: Ball, *, steps: int = 100, restarts: int = 1, loss: Loss = cross_entropy, targeted: bool = False
) -> Program:
    """`hardsphere.attacks.apgd` in turns."""
    check_settings(steps=steps, restarts=restarts)
    ascent = towards(loss) if targeted else loss
    return AutoPGD(
        ball,
        steps,
        restarts,
        lambda logits, y, _: ascent(logits, y),
        lambda noise, run: noise.fold("apgd", run % restarts),
        targeted=targeted,
    )


def apgd_targeted(
    ball: Ball, *, targets: int = 9, steps: int = 100, restarts: int = 1, loss: TargetedLoss = targeted_dlr
) -> Program:
    """`hardsphere.attacks.apgd_targeted` in turns."""
    check_settings(targets=targets, steps=steps, restarts=restarts)
    return AutoPGD(
        ball,
        steps,
        restarts,
        loss,
        lambda noise, run: noise.fold("apgd-targeted", run // restarts, run % restarts),
        targets=targets,
    )
