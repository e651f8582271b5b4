"""How sure a measured accuracy is: Wilson's interval for one proportion, Tango's for the difference of two paired ones.

Wilson (1927) inverts the score test, so that the interval stays inside [0, 1] and keeps its coverage at 0 %, at 100 %
and for small n, where the usual plus-or-minus interval has width zero. Tango (Statistics in Medicine 17, 1998) does the
same for two attacks, or two models, measured on the same samples: only the samples on which they disagree say anything
about the difference, and a paired interval is much narrower than the two single ones suggest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

Interval = tuple[float, float]


def wilson(successes: int, n: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval for a proportion; (0, 1) if nothing was measured."""
    if n == 0:
        return 0.0, 1.0
    z = _quantile(confidence)
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # The ends are exactly 0 and 1 there; rounding would leave 1e-17 beside them.
    return (0.0 if successes == 0 else centre - half), (1.0 if successes == n else centre + half)


def paired_difference(only_first: int, only_second: int, n: int, confidence: float = 0.95) -> Interval:
    """Tango's score interval for p_first - p_second, two proportions of the same n samples.

    Args:
        only_first: samples with the property under the first condition alone.
        only_second: samples with the property under the second condition alone.
        n: all samples, those on which the two agree included.
    """
    if n == 0:
        return -1.0, 1.0
    z = _quantile(confidence)
    estimate = (only_first - only_second) / n
    low = _crossing(lambda d: _tango_score(only_first, only_second, n, d) - z, -1.0, estimate)
    high = _crossing(lambda d: _tango_score(only_first, only_second, n, d) + z, estimate, 1.0)
    return low, high


def mcnemar(only_first: int, only_second: int) -> float:
    """The exact two-sided p-value of McNemar's test that the two conditions are equally likely."""
    n = only_first + only_second
    tail: float = sum(math.comb(n, k) for k in range(min(only_first, only_second) + 1)) / 2**n
    return min(1.0, 2.0 * tail)


def _tango_score(b: int, c: int, n: int, difference: float) -> float:
    """(b - c - n d) / sqrt(n (2 q + d (1 - d))), where q is the likeliest p_second-only if the difference is d."""
    linear = -b - c + (2 * n - b + c) * difference
    constant = -c * difference * (1 - difference)
    q = (math.sqrt(max(linear * linear - 8 * n * constant, 0.0)) - linear) / (4 * n)
    variance = n * (2 * q + difference * (1 - difference))
    distance = b - c - n * difference
    if variance <= 0:
        return 0.0 if abs(distance) < 1e-12 else math.copysign(math.inf, distance)
    return distance / math.sqrt(variance)


def _crossing(falling: Callable[[float], float], low: float, high: float) -> float:
    """Where a falling function passes zero in [low, high]; the nearer end if it does not."""
    if falling(low) <= 0:
        return low
    if falling(high) >= 0:
        return high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2


def _quantile(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2)
