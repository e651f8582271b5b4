"""Agreement with an independent implementation of AutoAttack."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from hardsphere.threat import Ball

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "autoattack_parity.py"


@pytest.mark.check
@pytest.mark.timeout(900)
def test_standard_keeps_as_many_samples_as_pyautoattack():
    pytest.importorskip("pyautoattack")
    spec = importlib.util.spec_from_file_location("autoattack_parity", SCRIPT)
    parity = importlib.util.module_from_spec(spec)
    sys.modules["autoattack_parity"] = parity
    spec.loader.exec_module(parity)
    found = parity.compare_on_digits(Ball("linf", parity.EPS["linf"]))
    assert found.n >= 500
    assert found.telling, str(found)
    assert abs(found.difference) <= 0.5, str(found)
