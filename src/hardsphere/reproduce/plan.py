"""The plan of a sweep: which runs to train, and what to measure on each.

    name: temperature
    keep_weights: false             # drop the weights once a run is judged
    seeds: [0, 1]
    set: {epochs: 20, model: preactresnet18}        # overrides of every run
    runs:
      - cifar10/pgd                 # a recipe
      - recipe: cifar10/trades-he
        name: TRADES + HE           # optional
        set: {ema.decay: 0.999}     # overrides of this run
        grid: {head.scale: [5, 15], head.margin: [0, 0.2]}      # one run for every combination
    measure:                        # a run may have a list of its own
      - standard                    # a suite
      - suite: paper
        limit: 1000                 # the first test images
        eps: 0.031                  # or run, for the run's own
        only: [pgd-20, pgd-500, cw-l2]
        limits: {cw-l2: 200}        # fewer images for an expensive attack
        options: {pgd-500: {steps: 100}}
      - corruptions: true           # or the directory of a corrupted set
        limit: 1000
      - name: mine
        protocol: honest
        entries: [{name: pgd-7, attack: pgd, options: {steps: 7, step_size: 0.25eps}, view: paper}]
      - call: package.module:function

The identity of a run is what it is and how it is measured, not what it is called: a recorded run whose configuration
has changed is another run.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from hardsphere.config import Config, duration, to_dict
from hardsphere.errors import HardsphereError
from hardsphere.recipes import recipe as make
from hardsphere.reproduce.measures import Measurement, check_keys, read_measurement

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


# ---------------------------------------------------------------------------------------------------------------------
# From YAML
# ---------------------------------------------------------------------------------------------------------------------


def read_plan(source: Plan | Path | str | Mapping[str, Any]) -> Plan:
    """A plan from a YAML file or its content; one sentence if it makes no sense."""
    if isinstance(source, Plan):
        return source
    plain, name = (source, "sweep") if isinstance(source, Mapping) else (_yaml(Path(source)), Path(source).stem)
    check_keys(plain, ("name", "keep_weights", "seeds", "set", "runs", "measure"), "The plan")
    seeds = _list(plain, "seeds", [0])
    if any(isinstance(seed, bool) or not isinstance(seed, int) for seed in seeds) or len(set(seeds)) < len(seeds):
        raise HardsphereError(f"seeds is {seeds}, but must be a list of different whole numbers.")
    keep = plain.get("keep_weights", True)
    if not isinstance(keep, bool):
        raise HardsphereError(f"keep_weights is '{keep}', but must be true or false.")
    common, shared = _mapping(plain, "set"), _list(plain, "measure", [])
    runs = []
    for item in _list(plain, "runs", []):
        runs += _runs(item, common, shared, seeds)
    names = [run.name for run in runs]
    for twin in {one for one in names if names.count(one) > 1}:
        raise HardsphereError(f"Two runs of the plan are called '{twin}': give them different names.")
    return merge(str(plain.get("name", name)), runs, keep)


def _yaml(file: Path) -> Mapping[str, Any]:
    try:
        plain = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError:
        raise HardsphereError(f"There is no readable plan '{file}'.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as reason:
        detail = " ".join(str(reason).split())[:200]
        raise HardsphereError(f"'{file}' is no YAML file: {detail}.") from None
    if not isinstance(plain, Mapping):
        raise HardsphereError(f"'{file}' is no plan: it needs at least runs and measure.")
    return plain


def _runs(item: Any, common: Mapping[str, Any], shared: Sequence[Any], seeds: Sequence[int]) -> list[Run]:
    """The runs of one item: every recipe, every combination of its grid, every seed."""
    plain = {"recipe": item} if isinstance(item, str | list) else item
    if not isinstance(plain, Mapping) or "recipe" not in plain:
        raise HardsphereError(f"The run '{item}' names no recipe.")
    check_keys(plain, ("recipe", "name", "set", "grid", "measure"), "A run")
    recipes = plain["recipe"] if isinstance(plain["recipe"], list) else [plain["recipe"]]
    written = _list(plain, "measure", shared)
    if not written:
        raise HardsphereError(f"The run '{plain['recipe']}' measures nothing: add measure to it or to the plan.")
    measurements = tuple(read_measurement(one) for one in written)
    fixed, grid = {**common, **_mapping(plain, "set")}, _mapping(plain, "grid")
    if "seed" in fixed or "seed" in grid:
        raise HardsphereError("The seed of a run is given by seeds, not by set or grid.")
    runs = []
    for recipe, varied, seed in itertools.product(recipes, expand(grid), seeds):
        config = make(str(recipe), {**fixed, **varied, "seed": seed})
        base = str(plain.get("name", recipe)) if len(recipes) == 1 else str(recipe)
        runs.append(Run(run_name(base, varied, seed if len(seeds) > 1 else None), config, measurements))
    return runs


def expand(grid: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every combination of the grid's values, the last key varying fastest."""
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise HardsphereError(f"grid.{key} is '{values}', but must be a list of values.")
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def run_name(base: str, varied: Mapping[str, Any], seed: int | None) -> str:
    """``TRADES + HE, head.scale 5, seed 1``."""
    parts = [base, *(f"{key} {value}" for key, value in varied.items())]
    return ", ".join(parts + ([f"seed {seed}"] if seed is not None else []))


def _mapping(plain: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = plain.get(key) or {}
    if not isinstance(value, Mapping):
        raise HardsphereError(f"{key} is '{value}', but must be a mapping such as epochs: 20.")
    return value


def _list(plain: Mapping[str, Any], key: str, default: Sequence[Any]) -> list[Any]:
    value = plain.get(key, default)
    if not isinstance(value, list | tuple):
        raise HardsphereError(f"{key} is '{value}', but must be a list.")
    return list(value)


def seconds(budget: str | float | None) -> float | None:
    """``90s``, ``9m`` or ``2h`` in seconds; none is no limit."""
    if budget is None or isinstance(budget, int | float):
        if budget is not None and not budget > 0:
            raise HardsphereError(f"The budget is {budget}, but must be above 0.")
        return budget
    return duration(budget)
