"""Intervals against published values, independent formulas and their own promise: coverage."""

from __future__ import annotations

import math
from itertools import product

import pytest
from scipy import optimize, stats

from hardsphere.evaluate.statistics import mcnemar, paired_difference, wilson


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_gives_the_values_of_newcombes_table(successes, n, low, high):
    # Newcombe, Statistics in Medicine 17 (1998) 857-872, table I, method 3.
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)


def test_wilson_covers_at_least_nearly_what_it_promises():
    # Exact coverage, summed over the binomial distribution.
    for n, p in product((50, 200, 1000), (0.05, 0.2, 0.5, 0.8, 0.95)):
        covered = sum(stats.binom.pmf(k, n, p) for k in range(n + 1) if wilson(k, n)[0] <= p <= wilson(k, n)[1])
        assert covered > 0.92, (n, p)


def test_wilson_of_nothing_and_of_everything():
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, 7)[0] == 0.0
    assert wilson(7, 7)[1] == 1.0
    assert wilson(5, 10, confidence=0.5)[1] - wilson(5, 10, confidence=0.5)[0] < 0.25


def constrained_score(b: int, c: int, n: int, d: float) -> float:
    """Tango's statistic with its nuisance parameter found by brute numerical maximisation of the likelihood."""

    def loss(q: float) -> float:
        cells = [(b, q + d), (c, q), (n - b - c, 1 - 2 * q - d)]
        return -sum(k * math.log(max(p, 1e-300)) for k, p in cells if k)

    low, high = max(0.0, -d), (1 - d) / 2
    q = optimize.minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-12}).x
    return (b - c - n * d) / math.sqrt(n * (2 * q + d * (1 - d)))


@pytest.mark.parametrize(("b", "c", "n"), [(1, 7, 21), (12, 2, 50), (3, 3, 40), (30, 5, 100)])
def test_tango_interval_ends_where_the_score_is_1_96(b, c, n):
    low, high = paired_difference(b, c, n)
    assert constrained_score(b, c, n, low) == pytest.approx(1.959964, abs=2e-3)
    assert constrained_score(b, c, n, high) == pytest.approx(-1.959964, abs=2e-3)


def test_tango_interval_of_a_published_example():
    # Fagerland, Lydersen & Laake, Statistics in Medicine 33 (2014): 1 and 7 discordant of 21 pairs.
    assert paired_difference(1, 7, 21) == pytest.approx((-0.517, -0.026), abs=1e-3)


def test_tango_interval_is_antisymmetric_and_sane_at_the_ends():
    low, high = paired_difference(4, 11, 60)
    assert paired_difference(11, 4, 60) == pytest.approx((-high, -low))
    low, high = paired_difference(0, 0, 100)
    assert low < 0 < high
    assert high < 0.05
    assert paired_difference(0, 0, 0) == (-1.0, 1.0)
    assert paired_difference(10, 0, 10)[1] == 1.0


def test_tango_interval_covers_what_it_promises():
    n, only_first, only_second = 30, 0.25, 0.1
    covered = 0.0
    for b in range(n + 1):
        for c in range(n + 1 - b):
            chance = stats.multinomial.pmf(
                [b, c, n - b - c], n, [only_first, only_second, 1 - only_first - only_second]
            )
            if chance > 1e-7:
                low, high = paired_difference(b, c, n)
                covered += chance * (low <= only_first - only_second <= high)
    assert 0.93 < covered < 0.98


@pytest.mark.parametrize(("b", "c"), [(1, 7), (5, 5), (0, 6), (0, 0), (12, 3)])
def test_mcnemar_is_the_two_sided_binomial_test(b, c):
    expected = stats.binomtest(b, b + c, 0.5).pvalue if b + c else 1.0
    assert mcnemar(b, c) == pytest.approx(expected)
