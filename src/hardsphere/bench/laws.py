"""The law of a cost: a fixed part and parts that grow, fitted to measured times.

It tells from where on each part leads, and where measurement departs from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hardsphere.errors import HardsphereError

TOLERANCE = 0.10
"""From here on a departure is worth a word."""


@dataclass(frozen=True)
class Law:
    """t(x) = the sum of coefficient * x ** power, fitted so that the relative departures are small.

    Attributes:
        powers: of x, rising from 0, the fixed part.
        values: the x that were measured.
        departures: (measured - fitted) / fitted at each of them.
    """

    powers: tuple[int, ...]
    coefficients: tuple[float, ...]
    values: tuple[float, ...]
    departures: tuple[float, ...]

    def parts(self, x: float) -> tuple[float, ...]:
        """What each power contributes to the fitted time."""
        pairs = zip(self.powers, self.coefficients, strict=True)
        return tuple(coefficient * float(x) ** power for power, coefficient in pairs)

    def at(self, x: float) -> float:
        """The fitted time."""
        return sum(self.parts(x))

    @property
    def crossings(self) -> tuple[float, ...]:
        """From where on each part is larger than the one before; none where a part does not grow the time."""
        parts = list(zip(self.powers, self.coefficients, strict=True))
        if min(self.coefficients) <= 0:
            return ()
        return tuple((before / after) ** (1 / (high - low)) for (low, before), (high, after) in pairwise(parts))

    @property
    def outside(self) -> dict[float, float]:
        """The values at which the law is wrong by more than 10 %, with the departure."""
        return {x: far for x, far in zip(self.values, self.departures, strict=True) if abs(far) > TOLERANCE}

    @property
    def largest_departure(self) -> tuple[float, float]:
        """The value at which the law is most wrong, with the departure."""
        return max(zip(self.values, self.departures, strict=True), key=lambda pair: abs(pair[1]))


def fit(values: Sequence[float], times: Sequence[float], powers: Sequence[int] = (0, 1)) -> Law:
    """Least squares of the relative departures: a short time counts as much as a long one."""
    if len(set(values)) < len(powers) or len(values) != len(times) or min(times) <= 0:
        raise HardsphereError(f"Such a law needs the times, above 0, of at least {len(powers)} different values.")
    x, t = np.asarray(values, dtype=np.float64), np.asarray(times, dtype=np.float64)
    parts = np.stack([x**power for power in powers], axis=1)
    coefficients, *_ = np.linalg.lstsq(parts / t[:, None], np.ones_like(t), rcond=None)
    fitted = parts @ coefficients
    return Law(
        tuple(powers),
        tuple(map(float, coefficients)),
        tuple(map(float, values)),
        tuple(float(far) for far in (t - fitted) / fitted),
    )
