"""SIGKILL at random moments, then the same command: the rows of an uninterrupted run."""

from __future__ import annotations

import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from victim import run

from hardsphere.evaluate import open_ledger

HERE = Path(__file__).parent


def test_killed_and_resumed_gives_the_rows_of_an_uninterrupted_run(tmp_path):
    whole = run(None)
    batches = []
    run(None, batches.append)
    chance = random.Random(0)
    kills = 0
    for attempt in range(20):
        # The last attempts are left alone, so that the test ends.
        limit = chance.randint(1, len(batches) // 3) if attempt < 4 else 0
        command = [
            sys.executable,
            str(HERE / "victim.py"),
            str(tmp_path / "out"),
            str(limit),
            f"{chance.random() * 0.02}",
        ]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=HERE, timeout=120, check=False)
        if ended.returncode == 0:
            break
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        kills += 1
        with sqlite3.connect(tmp_path / "out" / "ledger.db") as db:  # never half-written, whenever it was killed
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert ended.stdout == "finished\n"
    assert kills >= 2
    resumed = open_ledger(tmp_path / "out")
    assert resumed.samples() == whole.ledger.samples()
    for one, other in zip(resumed.rows(), whole.ledger.rows(), strict=True):
        assert (one.eps, one.attack, one.sample, one.outcome) == (other.eps, other.attack, other.sample, other.outcome)
        assert (one.stop, one.predicted) == (other.stop, other.predicted)
        assert one.distance == pytest.approx(other.distance, abs=1e-5)
        assert (one.forwards, one.backwards) == pytest.approx((other.forwards, other.backwards))
    for ball in whole.balls:
        assert resumed.images(ball.eps) == whole.ledger.images(ball.eps)
        assert 0 < resumed.robust_accuracy(ball.eps) < resumed.clean_accuracy()
