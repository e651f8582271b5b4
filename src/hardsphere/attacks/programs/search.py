"""Square in turns: the twin of `hardsphere.attacks.square` under linf."""

from __future__ import annotations

import torch
from torch import Tensor

from hardsphere.attacks.base import check_settings, check_sizes, succeeded
from hardsphere.attacks.losses import margin, negated
from hardsphere.attacks.programs.base import Answer, Ask, Program, State, Turn, common, zeros
from hardsphere.attacks.square import Squares, draw_squares, side_at, stripes, with_squares
from hardsphere.noise import Noise
from hardsphere.threat import Ball, per_sample


class RandomSquares(Program):
    """Random search on the margin; ``best`` is the largest so far and ``held`` its image.

    The squares of all turns until the next look are drawn at once: ``squares`` holds top, left and side of each, and
    ``drawn`` tells from which query on.
    """

    gradient = False
    look_every = 100

    def __init__(self, ball: Ball, queries: int, part: float, rescale: bool, targeted: bool) -> None:
        super().__init__(ball)
        check_settings(queries=queries)
        check_sizes(1.0, part=part)
        self.queries, self.part, self.rescale, self.targeted = queries, part, rescale, targeted
        self.goal = negated(margin) if targeted else margin

    def prepare(self, x: Tensor) -> None:
        sides = [side_at(query, self.queries, self.part, self.rescale, x) for query in range(self.queries + 1)]
        self.sides = torch.tensor(sides, device=x.device)

    def start(self, x: Tensor, y: Tensor, noise: Noise, logits: Tensor) -> State:
        noise = noise.fold("square")
        lowest = torch.full((len(x),), -torch.inf, device=x.device)
        first = stripes(x, noise.fold(0), self.ball)
        state = common(x, y, first, noise) | {"query": zeros(x), "held": x, "best": lowest}
        return state | self.refresh(state)

    def most_turns(self, state: State) -> int:
        return self.queries

    def refresh(self, state: State) -> State:
        query = state["query"]
        turns = query[:, None] + 1 + torch.arange(self.look_every, device=query.device)
        keys = Noise.of_keys(state["keys"][:, None]).fold(turns).keys
        side = self.sides[turns.clamp_max(self.queries)]
        top, left, _, signs = draw_squares(state["x"], side.flatten(), Noise.of_keys(keys.flatten()))
        squares = torch.stack([top.view_as(side), left.view_as(side), side], dim=2)
        return {"drawn": query, "squares": squares, "signs": signs.view(*side.shape, -1)}

    def turn(self, state: State, answer: Answer, ask: Ask, again: bool) -> Turn:
        x, y = state["x"], state["y"]
        value = self.goal(answer.logits, y)
        better = succeeded(answer.logits, y, self.targeted) | (value > state["best"])
        held = torch.where(per_sample(better, x), state["x_adv"], state["held"])
        query = state["query"] + 1
        index = (state["query"] - state["drawn"])[:, None, None]
        top, left, side = state["squares"].take_along_dim(index, dim=1).squeeze(1).unbind(dim=1)
        signs = state["signs"].take_along_dim(index, dim=1).squeeze(1)
        new = {
            "x_adv": with_squares(x, held, Squares(top, left, side, signs), self.ball),
            "held": held,
            "best": torch.where(better, value, state["best"]),
            "query": query,
            "stuck": torch.zeros_like(state["stuck"]),
            "finished": query >= self.queries,
        }
        return Turn(new, state["x_adv"], answer.logits, torch.ones_like(better))


def square(
    ball: Ball, *, queries: int = 5000, part: float = 0.8, rescale: bool = False, targeted: bool = False
) -> Program | None:
    """`hardsphere.attacks.square` in turns; under l2, whose windows have shapes of their own, only the plain form."""
    return RandomSquares(ball, queries, part, rescale, targeted) if ball.norm == "linf" else None
