"""What a plan comes to before anything is done: each training and measurement, what is recorded, and a rough cost.

Costs are passes through the network: images times passes per image, a backward pass counting as two forward ones. They
are upper bounds, since attacks leave alone what is wrong anyway or broken already.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hardsphere.config import Config, to_dict
from hardsphere.reproduce.measures import Attacks, Corruptions, Measurement
from hardsphere.reproduce.origins import recipe_line
from hardsphere.reproduce.plan import Plan, Run, record_id
from hardsphere.reproduce.store import Store
from hardsphere.reproduce.workspace import Workspace

IMAGES = {"cifar10": (49_000, 10_000), "cifar100": (49_000, 10_000), "digits": (1_294, 359), "arrays": (1_294, 359)}
"""Training and test images of data sets whose size is known without looking."""


def outline(plan: Plan, store: Store, work: Path) -> list[str]:
    """The plan in lines, with what is recorded of it."""
    lines: list[str] = []
    total = 0.0
    for run in plan.runs:
        more, cost = _run(run, store, Workspace(work).trained(run))
        lines, total = [*lines, *more], total + cost
    for group in plan.groups:
        state = "to do" if store.latest(group.id) is None else "recorded"
        names = ", ".join(run.name for run in group.runs)
        lines.append(f"{group.name} of {names}: {group.options.get('images', '?'):,} images, {state}")
    return [*lines, f"To do: at most {_passes(total)} passes."]


def _run(run: Run, store: Store, here: bool) -> tuple[list[str], float]:
    """The lines of a run, and the passes that are still to be made."""
    config, sets = run.config, store.weights_of(run.id)
    held = store.of_one_training(run)
    missing = store.unrecorded(run)
    again = bool(missing) and not here
    cost = training_passes(config) if again else 0.0
    lines = [
        f"{run.name}: {recipe_line(to_dict(config))}, {config.epochs} epochs, {_training_state(sets, missing, here)}"
    ]
    for one in run.measurements:
        record = held.get(one.name)
        exact = record is not None and record["id"] == record_id(config, one)
        passes = measuring_passes(config, one)
        state = f"recorded on weights {record['weights']}" if exact and record else "to do"
        if exact and again:
            state += ", to be measured again"
        if again or not exact:
            cost += passes or 0.0
        lines.append(f"    {one.name:<18} {_images(config, one):<34} {_passes(passes):>8} passes  {state}")
    return lines, cost


def _training_state(sets: Sequence[str], missing: Sequence[Measurement], here: bool) -> str:
    if not missing:
        return "recorded"
    if here:
        return "trained, its weights are here"
    if sets:
        return f"to be trained again: something is missing on the weights {', '.join(sets)}, which are gone"
    return "to be trained"


def training_passes(config: Config) -> float:
    """Passes of a training: the attack's steps and the update, each with its backward pass."""
    images = IMAGES.get(config.dataset, (0, 0))[0]
    updates = {"alp": 2, "trades": 2}.get(config.framework, 1)
    steps = {"standard": 0, "free": 0}.get(config.framework, config.attack.steps)
    return 3.0 * (steps + updates) * config.objective.updates_per_batch * config.epochs * images


def measuring_passes(config: Config, measurement: Measurement) -> float | None:
    """Passes of a measurement, at most; none if nothing is known about it."""
    size = IMAGES.get(config.dataset, (0, 0))[1]
    if isinstance(measurement, Attacks):
        n = min(measurement.limit or size, size)
        return sum(entry.cost * min(entry.limit or n, n) for entry in measurement.suite.entries)
    if isinstance(measurement, Corruptions):
        return 5.0 * len(measurement.names) * min(measurement.limit or size, size)
    return None


def _images(config: Config, measurement: Measurement) -> str:
    """How many images, and how many for attacks that have fewer: ``200 or 10,000 images``."""
    size = IMAGES.get(config.dataset, (0, 0))[1] or None
    whole = getattr(measurement, "limit", None)
    single = [entry.limit for entry in measurement.suite.entries] if isinstance(measurement, Attacks) else [None]
    counts = sorted({min(n for n in (limit, whole, size, 10**9) if n) for limit in single})
    return " or ".join("all" if count == 10**9 else f"{count:,}" for count in counts) + " images"


def _passes(count: float | None) -> str:
    """``3.2 M``."""
    return "?" if count is None else f"{count / 1e6:,.1f} M"
