"""Where numbers come from, in words: the settings of attacks as they are recorded."""

from __future__ import annotations

from typing import Any

import pytest

from hardsphere.evaluate import SUITES
from hardsphere.reproduce.origins import attack_origin, settings


@pytest.mark.parametrize(
    ("options", "eps", "words"),
    [
        (
            {"keep": "last", "loss": "cross_entropy", "step_size": "0.09677eps", "steps": 20},
            0.031,
            "20 steps of 0.003, on the cross-entropy, the last iterate counts",
        ),
        (
            {"steps": 50, "restarts": 10, "step_size": "0.25eps", "loss": "adaptive", "keep": "any"},
            8 / 255,
            "50 steps of 0.00784, 10 restarts, on the training loss with s and m, any iterate counts",
        ),
        ({"steps": 100, "restarts": 1, "targets": 9}, 8 / 255, "100 steps, 1 restart, 9 targets"),
        ({"queries": 5000}, 8 / 255, "5,000 queries"),
        ({"steps": 20, "step_size": 0.01, "sigma": 0.001}, None, "20 steps of 0.01, sigma 0.001"),
        ({}, 0.1, ""),
    ],
)
def test_settings_in_words(options: dict[str, Any], eps: float | None, words: str) -> None:
    assert settings(options, eps) == words


def test_every_setting_of_the_suites_is_told() -> None:
    """No option of an attack is left out of its words."""
    for suite in SUITES.values():
        for entry in suite.entries:
            options = entry.describe()["options"]
            told = settings(options, 8 / 255)
            for key in ("steps", "queries", "restarts", "targets"):
                assert key not in options or f"{options[key]:,}" in told


def result(view: str) -> dict[str, Any]:
    one = {"view": view, "options": {"steps": 5}}
    return {"ball": "linf 0.1", "eps": 0.1, "columns": {"clean": {}, "a": one, "b": one, "robust": {}}}


def test_the_attack_behind_a_number() -> None:
    raw, deployed = "sees raw cosines (scale 1)", "sees the model as deployed"
    assert attack_origin(["a"], result("paper")) == {"attack": f"5 steps; {raw}", "ball": "linf 0.1"}
    worst = f"the worst case over a (5 steps), b (5 steps); {deployed}"
    assert attack_origin(["robust"], result("deployed")) == {"attack": worst, "ball": "linf 0.1"}
    nothing = {"attack": "", "ball": ""}
    assert attack_origin(["clean"], result("paper")) == nothing
    assert attack_origin(["fog-1", "fog-2"], {"n": 4, "columns": {"fog-1": {}, "fog-2": {}}}) == nothing
