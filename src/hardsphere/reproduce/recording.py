"""What a record holds: the configuration, the numbers, and everything they depend on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hardsphere.config import to_dict
from hardsphere.reproduce.measures import Measured, Measurement, Subject
from hardsphere.reproduce.plan import Group, Run, family_id, record_id
from hardsphere.reproduce.store import SCHEMA, Record
from hardsphere.runtime import environment
from hardsphere.train.loop import Position


def training_facts(position: Position, run: Run, weights: str, earlier: list[str], path: Path, wall: float) -> Record:
    """What there is to say about a finished training.

    Args:
        earlier: the digests of the weights that it is recorded with already.
        path: its run directory.
        wall: seconds of this call.
    """
    robust, clean = position.best
    return {
        "epochs": run.config.epochs,
        "best_epoch": position.best_epoch,
        "finished": position.finished,
        "validation_robust": robust,
        "validation_clean": clean,
        "weights": weights,
        "instead_of": [other for other in earlier if other != weights],
        **_training_time(path, wall),
    }


def _training_time(path: Path, wall: float) -> dict[str, float]:
    """Minutes of training alone, over all calls, and seconds with everything around it, over this call at least."""
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    spent, preparing = (sum(row.get(key, 0.0) for row in rows) for key in ("seconds", "preparing_seconds"))
    return {"minutes": (spent - preparing) / 60, "preparing_minutes": preparing / 60, "wall_seconds": max(wall, spent)}


def measurement_record(
    run: Run, measurement: Measurement, trained: Record, measured: Measured, seconds: float, provenance: Record
) -> Record:
    """A measurement of one training."""
    return {
        "schema": SCHEMA,
        "id": record_id(run.config, measurement),
        "family": family_id(run.config, measurement),
        "training": run.id,
        "weights": trained["weights"],
        "run": run.name,
        "config": to_dict(run.config),
        "measurement": {"name": measurement.name, **measurement.describe()},
        "trained": trained,
        "result": measured.facts,
        "seconds": seconds,
        "outcomes": None,
        **provenance,
    }


def group_record(
    group: Group,
    subjects: Mapping[str, Subject],
    trained: Mapping[str, Record],
    facts: Mapping[str, Any],
    seconds: float,
    provenance: Record,
) -> Record:
    """What was seen in several trained models at once; subjects and trainings by the names of the runs."""
    return {
        "schema": SCHEMA,
        "id": group.id,
        "group": group.name,
        "run": group.name,
        "configs": {run.name: to_dict(run.config) for run in group.runs},
        "models": {name: one["weights"] for name, one in trained.items()},
        "data": {name: subject.test.digest() for name, subject in subjects.items()},
        "measurement": {"name": group.name, **group.describe()},
        "trained": dict(trained),
        "result": json.loads(json.dumps(facts)),
        "seconds": seconds,
        "outcomes": None,
        **provenance,
    }


def provenance(device: torch.device, command: str) -> Record:
    """What numbers depend on."""
    return {"environment": environment(device), "command": command}
