"""Made-up runs: a clock turned by hand, a trainer that takes as long as it is told, measurements without models."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hardsphere.config import Config
from hardsphere.reproduce.measures import Measured, Subject
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
        return SimpleNamespace(selection="made up", recipe=path.name, model=weights)


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
    sweeping = import_module("hardsphere.reproduce.sweeping")  # the package's attribute of that name is the function
    monkeypatch.setattr(sweeping, "train", shop.train)
    monkeypatch.setattr(sweeping, "load", shop.load)
    monkeypatch.setattr(sweeping, "model_digest", lambda model: model)
    return shop
