"""Made-up runs: a clock turned by hand, a trainer that takes as long as it is told, measurements without models.

And a made-up table, with records as a sweep would have left them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hardsphere.config import Config, to_dict
from hardsphere.reproduce import worker
from hardsphere.reproduce.measures import Measured, Subject
from hardsphere.reproduce.plan import family_id, record_id
from hardsphere.reproduce.scales import SCALES
from hardsphere.reproduce.store import Store
from hardsphere.reproduce.tables import Column, Row, Table, run_of
from hardsphere.train.loop import Position


class Clock:
    """Seconds that pass only when somebody works."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Workshop:
    """What `sweep` calls instead of real training: each epoch takes ``epoch_seconds``; checkpoints survive."""

    clock: Clock
    epoch_seconds: float = 10.0
    repeatable: bool = True  # whether training again gives the same weights
    trainings: int = 0
    trained: list[tuple[str, int]] = field(default_factory=list)  # (recipe, epoch) in the order of the work

    def train(self, config: Config, path: Path, *, reporter: Any, **_: Any) -> Any:
        state = path / "checkpoints" / "state.json"
        epoch = json.loads(state.read_text()) if state.exists() else 0
        if epoch == 0:
            self.trainings += 1
            path.mkdir(parents=True, exist_ok=True)
            (path / "weights.txt").write_text("same" if self.repeatable else f"training {self.trainings}")
        while epoch < config.epochs:
            for batch in range(2):
                self.clock.now += self.epoch_seconds / 2
                reporter.advance(2 * epoch + batch)
            epoch += 1
            self.trained.append((config.recipe, epoch))
            state.parent.mkdir(parents=True, exist_ok=True)
            state.write_text(json.dumps(epoch))
            with (path / "metrics.jsonl").open("a") as stream:
                stream.write(json.dumps({"epoch": epoch, "seconds": self.epoch_seconds}) + "\n")
            reporter.epoch({"epoch": epoch})
        return SimpleNamespace(position=Position(epoch=epoch, best=(0.5, 0.9), best_epoch=epoch, finished="done"))

    def load(self, path: Path) -> Any:
        assert (path / "checkpoints" / "state.json").exists(), "judged without weights"
        weights = f"{path.name} {(path / 'weights.txt').read_text()}"
        return SimpleNamespace(selection="made up", recipe=path.name, model=weights, meta={})


@dataclass(frozen=True)
class Coin:
    """A measurement of 100 images whose outcomes are a function of its salt."""

    clock: Clock
    name: str = "coin"
    takes: float = 5.0
    salt: int = 0
    limit: int | None = None
    measured: list[tuple[int, str]] = field(default_factory=list)  # (salt, weights) in the order of the work

    def describe(self) -> dict[str, Any]:
        return {"kind": "coin", "salt": self.salt, "limit": self.limit}

    def measure(self, subject: Subject) -> Measured:
        self.clock.now += self.takes
        self.measured.append((self.salt, subject.deployed.model))
        bits = np.random.default_rng(self.salt).random(100) < 0.5
        bits = bits[: self.limit]
        facts: dict[str, Any] = {"protocol": "honest", "data": "d", "ids": "0-99", "n": 100, "count": int(bits.sum())}
        facts["columns"] = {"robust": {"n": len(bits)}}
        return Measured(facts, {"clean": np.ones(100, np.bool_), "robust": bits})


def workshop(monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """Put made-up training in the place of the real one."""
    shop = Workshop(Clock())
    monkeypatch.setattr(worker, "train", shop.train)
    monkeypatch.setattr(worker, "load", shop.load)
    monkeypatch.setattr(worker, "model_digest", lambda model: model)
    return shop


# ---------------------------------------------------------------------------------------------------------------------
# A table with records
# ---------------------------------------------------------------------------------------------------------------------

MADE_UP = Table(
    "made-up",
    "Table 0. A made-up table",
    (
        Row("PGD-AT", "pgd"),
        Row("PGD-AT + HE", "pgd-he", against="PGD-AT"),
        Row("PGD-AT + m-HE", "pgd-mhe", against="PGD-AT"),
    ),
    (
        Column("Clean", "pgd-20", ("clean",)),
        Column("PGD-20", "pgd-20", ("pgd-20",), "a note"),
        Column("Minutes", "training", ("minutes",)),
    ),
    {"PGD-AT": {"Clean": 86.75, "PGD-20": 53.97}, "PGD-AT + HE": {"Clean": 86.19, "PGD-20": 59.36}},
)
ROBUST = {"PGD-AT": 40, "PGD-AT + HE": 41}  # of 100 images under the standard suite
PGD = {"PGD-AT": 45, "PGD-AT + HE": 60}

SETTINGS: dict[str, dict[str, Any]] = {
    "pgd-20": {"view": "paper", "options": {"steps": 20, "step_size": "0.1eps", "keep": "last"}},
    "pgd-20-adaptive": {"view": "deployed", "options": {"steps": 20, "step_size": "0.1eps", "loss": "adaptive"}},
    "apgd-ce": {"view": "deployed", "options": {"steps": 100, "restarts": 1, "loss": "cross_entropy"}},
    "square": {"view": "deployed", "options": {"queries": 5000}},
}


def first(count: int, n: int = 100) -> np.ndarray:
    """The first so many of n images stand."""
    return np.arange(n) < count


def made_up_store(out: Path, table: Table = MADE_UP, seed: int = 0, more: int = 0, rows: int = 2) -> Store:
    """Records of the first rows, PGD-AT and PGD-AT + HE; m-HE is still to come."""
    store, smoke = Store(out), SCALES["smoke"]
    for row in table.rows[:rows]:
        run = run_of(table, row, smoke, seed)
        for name, measurement in table.measurements(smoke).items():
            columns = {"clean": first(80)}
            if name == "standard":
                columns |= {one: first(ROBUST[row.title] + more) for one in ("apgd-ce", "square", "robust")}
            else:
                columns |= {"pgd-20": first(PGD[row.title]), "pgd-20-adaptive": first(ROBUST[row.title])}
            told = {one: {"n": len(bits), **SETTINGS.get(one, {})} for one, bits in columns.items()}
            record: dict[str, Any] = {
                "id": record_id(run.config, measurement),
                "family": family_id(run.config, measurement),
                "training": run.id,
                "weights": f"weights {seed}",
                "run": run.name,
                "config": to_dict(run.config),
                "measurement": {"name": name, **measurement.describe(), "suite": f"{name}/1", "hash": "h1"},
                "trained": {
                    "epochs": 2,
                    "best_epoch": 1,
                    "finished": "all 2 epochs are done",
                    "selection": "best of epochs 1 to 2, by hand",
                    "minutes": 12.5,
                },
                "result": {
                    "data": "d1",
                    "ids": "0-99",
                    "n": 100,
                    "suite": "S",
                    "ball": "linf 0.2",
                    "eps": 0.2,
                    "seed": 0,
                    "crafting": "float32",
                    "columns": told,
                },
                "seconds": 90.0,
                "outcomes": None,
                "environment": {"device": "an abacus", "commit": "c1", "source": "s1", "torch": "2"},
                "command": "hardsphere reproduce made-up",
            }
            store.add(record, columns)
    return Store(out)
