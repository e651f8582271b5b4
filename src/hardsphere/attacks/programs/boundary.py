"""FAB-T in turns: the twin of `hardsphere.attacks.fab_targeted`.

A turn is a step: the gradient where the search stands, the step, and the answer for the image that it leads to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hardsphere.attacks.base import ROUNDING, check_settings, has_direction, succeeded
from hardsphere.attacks.deepfool import leaders
from hardsphere.attacks.fab import step_towards
from hardsphere.attacks.programs.base import Answer, Ask, Program, State, Turn, common, zeros
from hardsphere.noise import Noise
from hardsphere.threat import Ball, per_sample


class TargetedBoundary(Program):
    """FAB at one boundary after another, from the clean image each time, until an image inside the ball is found.

    Beside what every state has: ``found`` and ``best``, the closest success and its distance.
    """

    asks = 2

    def __init__(self, ball: Ball, steps: int, targets: int, alpha_max: float, eta: float, beta: float) -> None:
        super().__init__(ball)
        ball.require("FAB", "linf", "l2")
        check_settings(steps=steps, targets=targets)
        self.steps, self.targets = steps, targets
        self.alpha_max, self.eta, self.beta = alpha_max, eta, beta

    def start(self, x: Tensor, y: Tensor, noise: Noise, logits: Tensor) -> State:
        farthest = torch.full((len(x),), torch.inf, dtype=x.dtype, device=x.device)
        return common(x, y, x, noise) | {
            "targets": leaders(logits, y, self.targets),
            "run": zeros(x),
            "step": zeros(x),
            "found": x,
            "best": farthest,
        }

    def most_turns(self, state: State) -> int:
        return state["targets"].shape[1] * self.steps

    def loss(self, logits: Tensor, state: State) -> Tensor:
        rank = state["run"].clamp_max(state["targets"].shape[1] - 1)
        target = state["targets"].gather(1, rank[:, None])
        return (logits.gather(1, target) - logits.gather(1, state["y"][:, None])).squeeze(1)

    def turn(self, state: State, answer: Answer, ask: Ask, again: bool) -> Turn:
        x, y, step = state["x"], state["y"], state["step"]
        go = has_direction(answer.gradient)
        gap = torch.where(answer.loss == 0, -1e-6 * self.ball.dual(answer.gradient), answer.loss)
        normal = torch.where(per_sample(go, x), answer.gradient, 0)
        gap = torch.where(go, gap, 0)
        moved = step_towards(x, state["x_adv"], gap, normal, self.ball, self.alpha_max, self.eta)
        logits = ask(moved)
        won, distance = go & succeeded(logits, y), self.ball.distance(x, moved)
        better = won & (distance < state["best"])
        keep = better | (go & state["best"].isinf())  # without a success, the last image tried
        over = ~go | (step + 1 == self.steps)
        run = state["run"] + over
        after = torch.where(per_sample(won, x), x + self.beta * (moved - x), moved)
        new = {
            "x_adv": torch.where(per_sample(over, x), x, after),
            "step": torch.where(over, 0, step + 1),
            "run": run,
            "found": torch.where(per_sample(keep, x), moved, state["found"]),
            "best": torch.where(better, distance, state["best"]),
            "stuck": state["stuck"] & ~go,
            "finished": over & (run >= state["targets"].shape[1]),
        }
        return Turn(new, moved, logits, go & (distance <= self.ball.eps + ROUNDING))


def fab_targeted(
    ball: Ball,
    *,
    steps: int = 100,
    restarts: int = 1,
    targets: int = 9,
    minimise: bool = False,
    alpha_max: float = 0.1,
    eta: float = 1.05,
    beta: float = 0.9,
) -> Program | None:
    """`hardsphere.attacks.fab_targeted` in turns; with restarts, or to the smallest distance, only the plain form."""
    return TargetedBoundary(ball, steps, targets, alpha_max, eta, beta) if restarts == 1 and not minimise else None
