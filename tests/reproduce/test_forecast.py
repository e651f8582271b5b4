"""How long a run will take, going by what is recorded of its kin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from made_up import Clock, Coin

from hardsphere.config import to_dict
from hardsphere.recipes import recipe
from hardsphere.reproduce.forecast import expected_seconds
from hardsphere.reproduce.plan import Run, record_id
from hardsphere.reproduce.store import Store

COINS = (Coin(Clock(), "coin-0", salt=0), Coin(Clock(), "coin-1", salt=1))


def run(name: str = "digits/pgd", epochs: int = 3) -> Run:
    return Run(name, recipe(name, {"epochs": epochs}), COINS)


def record(of: Run, coin: Coin, seconds: float, hardware: str = "abacus") -> dict[str, Any]:
    return {
        "id": record_id(of.config, coin),
        "training": of.id,
        "weights": "w",
        "run": of.name,
        "config": to_dict(of.config),
        "measurement": {"name": coin.name, **coin.describe()},
        "trained": {"wall_seconds": 30.0},
        "result": {},
        "seconds": seconds,
        "environment": {"device": hardware},
    }


def known(out: Path, *records: dict[str, Any]) -> Store:
    store = Store(out)
    store.lines = list(records)
    return store


def test_what_nothing_is_known_about_counts_as_nothing(tmp_path: Path) -> None:
    assert expected_seconds(run(), known(tmp_path), "abacus", None) == 0
    elsewhere = known(tmp_path, record(run("digits/alp"), COINS[0], 5.0, "slide rule"))
    assert expected_seconds(run(), elsewhere, "abacus", None) == 0


def test_kin_tell_the_time_by_epoch_and_by_measurement(tmp_path: Path) -> None:
    store = known(tmp_path, *(record(run("digits/alp"), coin, 5.0) for coin in COINS))
    assert expected_seconds(run(epochs=6), store, "abacus", None) == 60 + 10
    assert expected_seconds(run(epochs=6), store, "abacus", "trained already") == 10


def test_the_same_framework_is_closer_kin(tmp_path: Path) -> None:
    quick, slow = record(run(epochs=6), COINS[0], 1.0), record(run("digits/alp"), COINS[0], 1.0)
    assert expected_seconds(run(), known(tmp_path, quick, slow), "abacus", None) == 15 + 1


def test_the_latest_of_a_kind_tells(tmp_path: Path) -> None:
    """Earlier ones may have shared the machine."""
    shared, alone = record(run("digits/alp"), COINS[0], 9.0), record(run("digits/alp"), COINS[0], 2.0)
    shared["trained"] = {**shared["trained"], "wall_seconds": 600.0}
    assert expected_seconds(run(), known(tmp_path, shared, alone), "abacus", None) == 30 + 2


def test_weights_that_are_gone_cost_everything_again(tmp_path: Path) -> None:
    """One of two measurements is recorded: with the weights one is left to do, without them both and the training."""
    kin = [record(run("digits/alp"), coin, 5.0) for coin in COINS]
    store = known(tmp_path, *kin, record(run(), COINS[0], 5.0))
    assert expected_seconds(run(), store, "abacus", "w") == 5
    assert expected_seconds(run(), store, "abacus", None) == 30 + 10
    store.lines.append(record(run(), COINS[1], 5.0))
    assert expected_seconds(run(), store, "abacus", "w") == 0
