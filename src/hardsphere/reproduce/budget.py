"""The time a sweep may take, and what stops its work when that is over.

The budget is kept three times over: no run begins after it, none begins that, going by recorded runs of its kind
(`hardsphere.reproduce.forecast`), would not end inside it, and one that lasts longer than expected is stopped between
two batches. Its checkpoints and ledger stay, and the next call goes on from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hardsphere.config import duration
from hardsphere.errors import HardsphereError
from hardsphere.train.loop import Reporter

Clock = Callable[[], float]


class OutOfTime(Exception):
    """The budget is spent; everything that was done is on disk."""


@dataclass(frozen=True)
class Budget:
    """So many seconds from its making on.

    Attributes:
        clock: seconds that only grow.
        total: the seconds; infinite if there is no limit.
        end: when they are over, by the clock.
    """

    clock: Clock
    total: float
    end: float

    @classmethod
    def of(cls, total: float | None, clock: Clock) -> Budget:
        """From now on; none is no limit."""
        lasting = math.inf if total is None else total
        return cls(clock, lasting, clock() + lasting)

    @property
    def limited(self) -> bool:
        return math.isfinite(self.total)

    @property
    def spent(self) -> bool:
        return self.clock() >= self.end

    def holds(self, expected: float) -> bool:
        """Whether something of so many seconds would end in time if it began now."""
        return self.clock() + expected <= self.end


def seconds(budget: str | float | None) -> float | None:
    """``90s``, ``9m`` or ``2h`` in seconds; none is no limit."""
    if budget is None or isinstance(budget, int | float):
        if budget is not None and not budget > 0:
            raise HardsphereError(f"The budget is {budget}, but must be above 0.")
        return budget
    return duration(budget)


class Pace:
    """Stops an evaluation between two batches, when time is up or when the next one would not fit into what is left."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.attack, self.since = "", budget.clock()

    def step(self, attack: str, more: bool) -> None:
        """A batch of an attack is done."""
        now = self.budget.clock()
        lasted = now - self.since if attack == self.attack else 0.0  # of another attack nothing is known yet
        self.attack, self.since = attack, now
        if now >= self.budget.end or (more and now + lasted > self.budget.end):
            raise OutOfTime


class Watch:
    """A reporter that stops a training when time is up, or when the next epoch would not fit into what is left."""

    def __init__(self, inner: Reporter, epochs: int, budget: Budget) -> None:
        self.inner, self.epochs, self.budget = inner, epochs, budget
        self.since = budget.clock()

    def begin(self, total: int, done: int) -> None:
        self.inner.begin(total, done)
        self.since = self.budget.clock()

    def advance(self, done: int) -> None:
        self.inner.advance(done)
        if self.budget.spent:
            raise OutOfTime

    def epoch(self, row: dict[str, Any]) -> None:
        self.inner.epoch(row)
        now = self.budget.clock()
        lasted, self.since = now - self.since, now
        if row["epoch"] < self.epochs and now + lasted > self.budget.end:
            raise OutOfTime  # the epoch's checkpoint is written already

    def say(self, text: str) -> None:
        self.inner.say(text)
