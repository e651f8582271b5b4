"""Means over corruptions and severities, with known answers."""

from __future__ import annotations

import pytest

from hardsphere import HardsphereError
from hardsphere.corruptions import ALEXNET, CORRUPTIONS, EXTRA, SEVERITIES, Baseline, scores

HALF = {(name, severity): 0.5 for name in CORRUPTIONS for severity in SEVERITIES}


def test_mean_over_75_cells() -> None:
    accuracy = {(name, s): (10 * number + s) / 200 for number, name in enumerate(CORRUPTIONS) for s in SEVERITIES}
    result = scores(accuracy, frost_stand_in=False)
    assert result.mca == pytest.approx(sum(accuracy.values()) / 75)
    assert result.per_corruption["shot_noise"] == pytest.approx(13 / 200)
    assert list(result.per_corruption) == list(CORRUPTIONS)
    assert result.table == accuracy
    assert result.note == ""
    assert result.headline == f"mCA {result.mca:.2%}"


def test_extras_enter_no_mean() -> None:
    with_extras = HALF | {(name, severity): 1.0 for name in EXTRA for severity in SEVERITIES}
    result = scores(with_extras, frost_stand_in=False)
    assert result.mca == pytest.approx(0.5)
    assert result.per_corruption["spatter"] == 1


def test_a_stand_in_gives_no_mean_over_15() -> None:
    accuracy = HALF | {("frost", severity): 1.0 for severity in SEVERITIES}
    result = scores(accuracy, frost_stand_in=True, baseline=ALEXNET)
    assert result.mca is None
    assert result.mce is None
    assert result.mca_without_frost == pytest.approx(0.5)
    assert "stand-in" in result.note
    assert "mCA (14, without frost) 50.00%" in result.headline


def test_missing_cells_give_no_mean() -> None:
    some = {cell: value for cell, value in HALF.items() if cell not in {("fog", 2), ("snow", 1)}}
    result = scores(some, frost_stand_in=False)
    assert result.mca is None
    assert result.mca_without_frost is None
    assert "snow at severity 1 and 1 more" in result.note
    assert "fog" not in result.per_corruption
    assert result.headline.startswith("no mCA")
    without_frost = {cell: value for cell, value in HALF.items() if cell[0] != "frost"}
    assert scores(without_frost, frost_stand_in=False).mca_without_frost == pytest.approx(0.5)
    assert scores({}, frost_stand_in=False).mca is None


def test_mean_corruption_error() -> None:
    """AlexNet against itself is 1; half its errors are a half; the mean is over corruptions, not over cells."""
    itself = {(name, s): 1 - ALEXNET.errors[name] for name in CORRUPTIONS for s in SEVERITIES}
    assert scores(itself, frost_stand_in=False, baseline=ALEXNET).mce == pytest.approx(1)
    better = {cell: 1 - (1 - value) / 2 for cell, value in itself.items()}
    result = scores(better, frost_stand_in=False, baseline=ALEXNET)
    assert result.mce == pytest.approx(0.5)
    assert result.baseline is not None
    assert "AlexNet" in result.baseline
    own = Baseline("plain", {name: 0.25 if name == "fog" else 0.5 for name in CORRUPTIONS})
    assert scores(HALF, frost_stand_in=False, baseline=own).mce == pytest.approx((14 + 2) / 15)
    assert scores(HALF, frost_stand_in=False).mce is None


def test_errors() -> None:
    with pytest.raises(HardsphereError, match="between 0 and 1"):
        scores({("fog", 1): 87.2}, frost_stand_in=False)
    with pytest.raises(HardsphereError, match="between 0 and 1"):
        scores({("fog", 1): float("nan")}, frost_stand_in=False)
    with pytest.raises(HardsphereError, match="Did you mean 'fog'"):
        scores({("fogg", 1): 0.5}, frost_stand_in=False)
    with pytest.raises(HardsphereError, match="severity 6"):
        scores({("fog", 6): 0.5}, frost_stand_in=False)
    with pytest.raises(HardsphereError, match="lacks the error of"):
        Baseline("half", {"fog": 0.5})
    with pytest.raises(HardsphereError, match=r"errors lie in \(0, 1\]"):
        Baseline("zero", dict.fromkeys(CORRUPTIONS, 0.0))
