"""What a person is told while a run goes on."""

from __future__ import annotations

import pytest

from hardsphere import progress


def test_the_time_left_does_not_count_the_preparing_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of three epochs the first took 70 s, 60 of them for compiling: two more will take 20."""
    clock = iter([0.0, 70.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    reporter = progress.PlainReporter()
    reporter.begin(30, 0)
    reporter.advance(10)
    reporter.epoch({"epoch": 1, "loss": 1.0, "lr": 0.1, "images_per_second": 1e3, "preparing_seconds": 60.0})
    assert capsys.readouterr().err.endswith("0:20 left\n")
