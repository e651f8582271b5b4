"""The plan of a sweep: which runs to train, and what to measure on each.

The identity of a run is what it is and how it is measured, not what it is called: a recorded run whose configuration
has changed is another run. People write plans as YAML (`hardsphere.reproduce.reading`); the paper's tables are plans
too (`hardsphere.reproduce.tables`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hardsphere.config import Config, to_dict
from hardsphere.errors import HardsphereError
from hardsphere.reproduce.measures import Measurement

FORMAT = 2
HOW_MANY = ("limit", "hash")
"""What a measurement says that depends on the number of images alone (a suite's hash covers its limits)."""


@dataclass(frozen=True)
class Run:
    """One training and what is measured on it."""

    name: str
    config: Config
    measurements: tuple[Measurement, ...]

    @property
    def id(self) -> str:
        """What is trained: a digest of the configuration."""
        return training_id(self.config)


@dataclass(frozen=True)
class Group:
    """Something that looks at several trained models at once, such as transfer between them.

    Attributes:
        runs: the trainings it needs; it knows them by their names.
        function: is given the `Subject` of each run by its name, and a folder for figures; returns facts for JSON.
        options: keyword arguments for it.
    """

    name: str
    runs: tuple[Run, ...]
    function: Callable[..., Mapping[str, Any]]
    options: Mapping[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        function = f"{self.function.__module__}:{self.function.__qualname__}"
        return {"kind": "group", "function": function, "options": dict(sorted(self.options.items()))}

    @property
    def id(self) -> str:
        """A digest of the configurations and of what is done with them."""
        runs = [[run.name, to_dict(run.config)] for run in self.runs]
        return _digest(["group", FORMAT, runs, self.describe()])


@dataclass(frozen=True)
class Plan:
    """A list of runs, and perhaps of groups of them.

    Attributes:
        keep_weights: keep them after a run is judged.
        groups: measured once all their runs, which must be among the runs, are trained.
    """

    name: str
    runs: tuple[Run, ...]
    keep_weights: bool = True
    groups: tuple[Group, ...] = ()

    def __post_init__(self) -> None:
        if not self.runs:
            raise HardsphereError(f"The plan '{self.name}' holds no runs.")
        for run in self.runs:
            names = [one.name for one in run.measurements]
            for twin in {one for one in names if names.count(one) > 1}:  # a row finds what it shows by that name
                raise HardsphereError(
                    f"Two measurements of '{run.name}' are called '{twin}': give one of them another name."
                )

    def items(self) -> list[tuple[Run, Measurement]]:
        """Every measurement of every run."""
        return [(run, measurement) for run in self.runs for measurement in run.measurements]


def training_id(config: Config) -> str:
    """12 hexadecimal digits that name a training."""
    return _digest(["training", FORMAT, to_dict(config)])


def record_id(config: Config, measurement: Measurement) -> str:
    """12 hexadecimal digits that name a measurement of a training."""
    return _digest(["record", FORMAT, to_dict(config), measurement.describe()])


def family_id(config: Config, measurement: Measurement) -> str:
    """The same for a measurement on any number of images."""
    said = {key: value for key, value in measurement.describe().items() if key not in HOW_MANY}
    return _digest(["family", FORMAT, to_dict(config), said])


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def merge(name: str, runs: Iterable[Run], keep_weights: bool = True, groups: Iterable[Group] = ()) -> Plan:
    """A plan in which a training that several runs share happens once, with the measurements of all of them."""
    groups = tuple(groups)
    merged: dict[str, Run] = {}
    for run in (*runs, *(run for group in groups for run in group.runs)):
        known = merged.setdefault(run.id, run)
        have = {record_id(run.config, measurement) for measurement in known.measurements}
        new = [one for one in run.measurements if record_id(run.config, one) not in have]
        merged[run.id] = replace(known, measurements=(*known.measurements, *new))
    return Plan(name, tuple(merged.values()), keep_weights, groups)
