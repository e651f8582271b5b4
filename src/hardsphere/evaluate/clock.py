"""How far an evaluation is, and how long it will still take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from hardsphere.evaluate.suites import Entry
from hardsphere.threat import Ball


@dataclass(frozen=True)
class Progress:
    """How far an evaluation is; one of these comes after every batch.

    Attributes:
        attack: the attack at work, or ``"clean"``.
        ball: the ball at work; none while clean images are classified.
        done: samples this attack has finished.
        total: samples it has to work on.
        upper_bound: robust accuracy inside this ball if nothing else were to break, which only falls; corruptions have
            none.
        elapsed: seconds since this call began.
        left: seconds still to go, roughly and rather too many; none while nothing is known yet.
    """

    attack: str
    ball: Ball | None
    done: int
    total: int
    upper_bound: float | None
    elapsed: float
    left: float | None


class Clock:
    """Time left, from what each attack has cost so far and what the others are said to cost in proportion."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.spent: dict[str, tuple[float, float]] = {}

    def elapsed(self) -> float:
        return time.perf_counter() - self.begin

    def record(self, entry: Entry, samples: int, seconds: float) -> None:
        passes, before = self.spent.get(entry.name, (0.0, 0.0))
        self.spent[entry.name] = (passes + entry.cost * samples, before + seconds)

    def left(self, entry: Entry, samples: int, later: Sequence[tuple[Entry, int]]) -> float | None:
        passes, seconds = (sum(column) for column in zip((0.0, 0.0), *self.spent.values(), strict=True))
        if passes == 0:
            return None
        total = 0.0
        for other, count in [(entry, samples), *later]:
            own_passes, own_seconds = self.spent.get(other.name, (passes, seconds))
            total += other.cost * count * own_seconds / own_passes
        return total
