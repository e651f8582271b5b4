"""What people write: a plan as YAML, or its content, and the sentence that answers a mistake.

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

What a measurement can be is in `KINDS`.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from hardsphere.config import number
from hardsphere.corruptions import CORRUPTIONS
from hardsphere.errors import HardsphereError, nearest
from hardsphere.evaluate import Entry, OfEps, Suite
from hardsphere.evaluate.binding import attack_function
from hardsphere.recipes import recipe as make
from hardsphere.reproduce.measures import Attacks, Call, Corruptions, Measurement, attacks
from hardsphere.reproduce.plan import Plan, Run, merge


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
    value = default if plain.get(key) is None else plain[key]
    if not isinstance(value, list | tuple):
        raise HardsphereError(f"{key} is '{value}', but must be a list.")
    return list(value)


# ---------------------------------------------------------------------------------------------------------------------
# Measurements
# ---------------------------------------------------------------------------------------------------------------------


def read_measurement(plain: Any) -> Measurement:
    """One item of a plan's ``measure`` list."""
    if isinstance(plain, str):
        plain = {"corruptions": True} if plain == "corruptions" else {"suite": plain}
    if not isinstance(plain, Mapping):
        raise HardsphereError(f"A measurement is '{plain}', but must be a suite's name or a mapping such as suite: x.")
    kinds = [kind for kind in KINDS if kind in plain]
    if len(kinds) != 1:
        raise HardsphereError(f"A measurement needs exactly one of {', '.join(KINDS)}, but has {_listed(plain)}.")
    return KINDS[kinds[0]](dict(plain))


def _listed(plain: Mapping[str, Any]) -> str:
    return ", ".join(map(str, plain)) or "nothing"


def _read_suite(plain: dict[str, Any]) -> Measurement:
    allowed = ("suite", "name", "only", "limits", "options", "eps", "limit", "seed")
    check_keys(plain, allowed, "A measurement with a suite")
    measurement = attacks(
        str(plain["suite"]),
        name=plain.get("name"),
        only=None if plain.get("only") is None else _list(plain, "only", []),
        limits={entry: _count(f"limits.{entry}", value) for entry, value in _mapping(plain, "limits").items()},
        options={entry: _options(values) for entry, values in _mapping(plain, "options").items()},
        **_place(plain),
    )
    for entry in measurement.suite.entries:
        _check_attack(entry)
    return measurement


def _read_entries(plain: dict[str, Any]) -> Measurement:
    check_keys(plain, ("entries", "name", "protocol", "cascade", "eps", "limit", "seed"), "A measurement with entries")
    if "name" not in plain:
        raise HardsphereError("A measurement with entries needs a name.")
    allowed = [item.name for item in fields(Entry)]
    entries = []
    for entry in _list(plain, "entries", []):
        if not isinstance(entry, Mapping) or not {"name", "attack"} <= set(entry):
            raise HardsphereError(f"The entry '{entry}' needs at least a name and an attack.")
        check_keys(entry, allowed, "An entry")
        values = dict(entry) | {"options": _options(entry.get("options") or {})}
        values |= {key: tuple(_list(values, key, [])) for key in ("norms", "needs") if key in values}
        values |= {"limit": _count("limit", values["limit"])} if values.get("limit") is not None else {}
        entries.append(Entry(**values))
        _check_attack(entries[-1])
    protocol = str(plain.get("protocol", "honest"))
    cascade = plain.get("cascade", False)
    if not isinstance(cascade, bool):
        raise HardsphereError(f"cascade is '{cascade}', but must be true or false.")
    suite = Suite(str(plain["name"]), 1, protocol, tuple(entries), cascade)
    return Attacks(suite.name, suite, **_place(plain))


def _check_attack(entry: Entry) -> None:
    """Refuse an attack or an option that does not exist: evaluating would notice it after the training only."""
    taken = inspect.signature(attack_function(entry)).parameters.values()
    known = [one.name for one in taken if one.kind is one.KEYWORD_ONLY]
    for option in entry.options:
        if option not in known and not any(one.kind is one.VAR_KEYWORD for one in taken):
            raise HardsphereError(f"The attack of '{entry.name}' has no option '{option}'.{nearest(option, known)}")


def _read_corruptions(plain: dict[str, Any]) -> Measurement:
    check_keys(plain, ("corruptions", "name", "names", "limit", "seed"), "A measurement of corruptions")
    place = plain["corruptions"]
    if place in (False, None):
        raise HardsphereError("corruptions is off: leave that measurement out.")
    chosen = tuple(_list(plain, "names", []) or CORRUPTIONS)
    for one in chosen:
        if one not in CORRUPTIONS:
            raise HardsphereError(f"Unknown corruption '{one}'.{nearest(str(one), CORRUPTIONS)}")
    values = {key: value for key, value in _place(plain).items() if key != "eps"}
    return Corruptions(str(plain.get("name", "corruptions")), None if place is True else str(place), chosen, **values)


def _read_call(plain: dict[str, Any]) -> Measurement:
    check_keys(plain, ("call", "name", "options"), "A measurement that calls a function")
    call = Call(str(plain.get("name", plain["call"])), str(plain["call"]), _mapping(plain, "options"))
    call.resolve()
    return call


def _place(plain: Mapping[str, Any]) -> dict[str, Any]:
    eps = plain.get("eps")
    try:
        radius = eps if eps is None or eps == "run" else number(eps)
    except (ValueError, TypeError, ZeroDivisionError, OverflowError):
        raise HardsphereError(
            f"eps is '{eps}', but must be a number such as 8/255, or run for the run's own."
        ) from None
    if isinstance(radius, float) and radius <= 0:  # a ball would refuse it, but only after the training
        raise HardsphereError(f"eps is '{eps}', but must be above 0.")
    limit = plain.get("limit")
    return {
        "eps": radius,
        "limit": None if limit is None else _count("limit", limit),
        "seed": _count("seed", plain.get("seed", 0), least=0),
    }


def _count(key: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise HardsphereError(f"{key} is '{value}', but must be a whole number from {least} on.")
    return value


def _options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of an attack; a length such as ``0.25eps`` grows with the ball."""

    def read(key: str, value: Any) -> Any:
        try:
            if isinstance(value, str) and value.endswith("eps"):
                return OfEps(number(value.removesuffix("eps") or "1"))
            return number(value) if isinstance(value, str) and "/" in value else value
        except (ValueError, ZeroDivisionError, OverflowError):
            raise HardsphereError(
                f"The option {key} is '{value}', which is no length such as 2/255 or 0.25eps."
            ) from None

    if not isinstance(values, Mapping):
        raise HardsphereError(f"The options '{values}' must be a mapping such as steps: 10.")
    return {key: read(key, value) for key, value in values.items()}


def check_keys(plain: Mapping[str, Any], allowed: Sequence[str], what: str) -> None:
    """Refuse keys that mean nothing."""
    for key in plain:
        if key not in allowed:
            raise HardsphereError(f"{what} has the unknown key '{key}'.{nearest(str(key), allowed)}")


KINDS: dict[str, Callable[[dict[str, Any]], Measurement]] = {
    "suite": _read_suite,
    "entries": _read_entries,
    "corruptions": _read_corruptions,
    "call": _read_call,
}
"""What a measurement in a plan can be, by the key that says so."""
