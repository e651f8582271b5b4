"""The law of a cost: a fixed part and a part that grows, fitted to measured times, and where they depart from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hardsphere.errors import HardsphereError

TOLERANCE = 0.10
"""From here on a departure is worth a word."""


@dataclass(frozen=True)
class Law:
    """t(x) = fixed + growth * x ** power, fitted so that the relative departures are small.

    Attributes:
        values: the x that were measured.
        departures: (measured - fitted) / fitted at each of them.
    """

    fixed: float
    growth: float
    power: int
    values: tuple[float, ...]
    departures: tuple[float, ...]

    def at(self, x: float) -> float:
        """The fitted time."""
        return self.fixed + self.growth * float(x) ** self.power

    @property
    def outside(self) -> dict[float, float]:
        """The values at which the law is wrong by more than 10 %, with the departure."""
        return {x: far for x, far in zip(self.values, self.departures, strict=True) if abs(far) > TOLERANCE}

    @property
    def largest_departure(self) -> tuple[float, float]:
        """The value at which the law is most wrong, with the departure."""
        return max(zip(self.values, self.departures, strict=True), key=lambda pair: abs(pair[1]))


def fit(values: Sequence[float], times: Sequence[float], power: int = 1) -> Law:
    """Least squares of the relative departures: a short time counts as much as a long one."""
    if len(set(values)) < 2 or len(values) != len(times) or min(times) <= 0:
        raise HardsphereError("A law needs the times, above 0, of at least two different values.")
    x, t = np.asarray(values, dtype=np.float64) ** power, np.asarray(times, dtype=np.float64)
    (fixed, growth), *_ = np.linalg.lstsq(np.stack([1 / t, x / t], axis=1), np.ones_like(t), rcond=None)
    fitted = fixed + growth * x
    departures = tuple(float(far) for far in (t - fitted) / fitted)
    return Law(float(fixed), float(growth), power, tuple(map(float, values)), departures)
