"""Packed outcomes, and the numbers computed from them, against direct computation."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from hardsphere.errors import HardsphereError
from hardsphere.evaluate.statistics import paired_difference, wilson
from hardsphere.reproduce.outcomes import accuracy, difference, read_outcomes, write_outcomes


def bits(seed: int, n: int, share: float = 0.5) -> np.ndarray:
    return np.random.default_rng(seed).random(n) < share


def test_what_is_packed_comes_back(tmp_path: Path) -> None:
    columns = {f"c{n}": bits(n, n) for n in (0, 1, 7, 8, 9, 1000)} | {"ones": np.ones(13, np.bool_)}
    back = read_outcomes(write_outcomes(tmp_path / "deep" / "o.npz", columns))
    assert list(back) == list(columns)
    for name, column in columns.items():
        assert back[name].dtype == np.bool_
        np.testing.assert_array_equal(back[name], column)
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["o.npz"]  # no temporary file is left


def test_ten_thousand_images_and_twelve_attacks_are_a_few_kilobytes(tmp_path: Path) -> None:
    file = write_outcomes(tmp_path / "o.npz", {f"attack-{index}": bits(index, 10_000) for index in range(12)})
    assert file.stat().st_size < 12 * 1250 + 1500


def test_no_columns_and_damaged_files(tmp_path: Path) -> None:
    assert read_outcomes(write_outcomes(tmp_path / "none.npz", {})) == {}
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(HardsphereError, match="no file of packed outcomes"):
        read_outcomes(tmp_path / "bad.npz")
    with pytest.raises(HardsphereError, match="There is no file"):
        read_outcomes(tmp_path / "missing.npz")


def test_one_column_has_wilsons_interval() -> None:
    column = np.array([True] * 30 + [False] * 70)
    found = accuracy([column])
    assert found.value == 0.3
    assert found.n == 100
    assert found.interval == wilson(30, 100)


def test_paired_difference_counts_the_images_that_disagree() -> None:
    first, second = bits(1, 500, 0.6), bits(2, 500, 0.5)
    only_first = sum(bool(a) and not bool(b) for a, b in zip(first, second, strict=True))
    only_second = sum(bool(b) and not bool(a) for a, b in zip(first, second, strict=True))
    found = difference([first], [second])
    assert found.value == pytest.approx(first.mean() - second.mean(), abs=1e-15)
    assert found.interval == paired_difference(only_first, only_second, 500)
    assert difference([second], [first]).value == -found.value


def test_several_columns_are_averaged_per_image() -> None:
    """By hand: per-image means 1, 1/2, 0, 1/2 have variance 1/6 where one column has 1/4: 4 images count as 6."""
    one, two = np.array([True, True, False, False]), np.array([True, False, False, True])
    found = accuracy([one, two])
    assert found.value == 0.5
    assert found.interval == pytest.approx(wilson(3, 6), abs=1e-12)
    assert found.n == 4


def test_columns_that_repeat_each_other_count_once() -> None:
    column = bits(3, 200, 0.3)
    held = int(column.sum())
    assert accuracy([column] * 5).interval == pytest.approx(wilson(held, 200), abs=1e-12)
    nobody = np.zeros(200, np.bool_)
    assert accuracy([nobody, nobody]).interval == wilson(0, 200)


def test_independent_columns_count_nearly_in_full() -> None:
    columns = [bits(seed, 20_000, 0.4) for seed in range(5)]
    low, high = accuracy(columns).interval
    held = sum(int(column.sum()) for column in columns)
    assert high - low == pytest.approx(np.diff(wilson(held, 100_000))[0], rel=0.03)


def test_a_difference_over_several_columns_by_hand() -> None:
    """Per-image differences 1/2, 0, 0, 1/2: mean 1/4, variance (4 / 16) / 3 = 1/12."""
    first = [np.array([True, True, False, True]), np.array([True, False, True, True])]
    second = [np.array([True, True, False, True]), np.array([False, False, True, False])]
    found = difference(first, second)
    half = 1.959963984540054 * math.sqrt(1 / 12 / 4)
    assert found.value == 0.25
    assert found.interval == pytest.approx((0.25 - half, 0.25 + half), abs=1e-12)
    same = difference(first, first)
    assert same.value == 0
    assert same.interval == paired_difference(0, 0, 4)  # and not a width of zero
    assert same.sign == 0


@pytest.mark.parametrize(("flips", "sign"), [(60, 1), (-60, -1), (1, 0)])
def test_a_gain_is_shown_only_if_its_interval_excludes_zero(flips: int, sign: int) -> None:
    low, high = np.zeros(200, np.bool_), np.zeros(200, np.bool_)
    high[: abs(flips)] = True
    first, second = (high, low) if flips > 0 else (low, high)
    assert difference([first], [second]).sign == sign


def test_what_cannot_be_paired_is_refused() -> None:
    with pytest.raises(HardsphereError, match="cannot be paired"):
        difference([bits(1, 10)], [bits(1, 11)])
    with pytest.raises(HardsphereError, match="same images"):
        accuracy([bits(1, 10), bits(1, 11)])
