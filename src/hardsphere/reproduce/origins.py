"""Where recorded numbers come from, in plain values: the training, the attack and its settings, machine and code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hardsphere.config import flatten, from_dict, number
from hardsphere.evaluate.suites import SUITES
from hardsphere.recipes import recipe
from hardsphere.reproduce.measures import ROBUST, Measurement
from hardsphere.reproduce.store import Record
from hardsphere.runtime import code_of

Plain = dict[str, Any]

# ---------------------------------------------------------------------------------------------------------------------
# Trainings
# ---------------------------------------------------------------------------------------------------------------------


def training_origin(
    title: str, config: Mapping[str, Any], trained: Mapping[str, Any], weights: str, records: Sequence[Record]
) -> Plain:
    """A training and everything that was recorded of it, perhaps by several commands on several machines."""
    return {
        "title": title,
        "recipe": recipe_line(config),
        "network": config["model"],
        "seed": config["seed"],
        "epochs": trained["epochs"],
        "best_epoch": trained["best_epoch"],
        "selection": str(trained["selection"]),
        "finished": trained.get("finished"),
        "training_minutes": trained["minutes"],
        "compiling_minutes": trained.get("preparing_minutes", 0.0),
        "judging_minutes": sum(one["seconds"] for one in records) / 60,
        "weights": weights,
        "commits": sorted({commit_of(one) for one in records}),
        "machines": list(dict.fromkeys(machine_of(one) for one in records)),
        "outcomes": [one["outcomes"] for one in records if one["outcomes"]],
        "commands": list(dict.fromkeys(one["command"] for one in records if one["command"])),
    }


def commit_of(record: Mapping[str, Any]) -> str:
    """The code of a record."""
    return code_of(record["environment"])


def machine_of(record: Mapping[str, Any]) -> str:
    """``NVIDIA H200, torch 2.11.0``."""
    machine = record["environment"]
    return f"{machine['device']}, torch {machine['torch']}"


def recipe_line(config: Mapping[str, Any]) -> str:
    """``cifar10/pgd-he epochs=20 ...``: what `hardsphere train` is given to train this configuration."""
    made = from_dict(config)
    base, ours = flatten(recipe(made.recipe, {"source": made.source})), flatten(made)
    changes = [f"{key}={_word(value)}" for key, value in ours.items() if base.get(key) != value]
    whose = [] if made.source == "paper" else [f"source={made.source}"]
    return " ".join([made.recipe, *whose, *changes])


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_word, value))
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return _exactly(value) if isinstance(value, float) else str(value)


def _exactly(value: float) -> str:
    """As short as a number can be written that is read as this one and no other: ``0.031``, ``8/255``."""
    levels = round(value * 255) if abs(value) < 1 else 0
    return next(text for text in (f"{value:.6g}", f"{levels}/255", repr(value)) if number(text) == value)


def trained_again(title: str, weights: str, earlier: Sequence[str]) -> str:
    """A sentence on a training whose first weights were lost."""
    return (
        f"{title}: trained again, since weights measured in part were gone; all its numbers are of the weights "
        f"{weights}, those of {', '.join(earlier)} stay on record and are not shown."
    )


_CRAFTED_IN_TF32 = "bf16 and TF32, confirmed in float32"


def crossed_in_tf32(record: Record) -> str | None:
    """A sentence on attacks that go just across the boundary, measured when they still saw it in TF32."""
    if record["result"].get("crafting") != _CRAFTED_IN_TF32:
        return None
    crossing = [entry.name for entry in SUITES["paper"].entries if entry.outside == "filter"]
    shown = [name for name in record["result"].get("columns", {}) if name in crossing]
    if not shown:
        return None
    return (
        f"{record['measurement']['name']}: {', '.join(shown)} saw the boundary in TF32, and an image that had crossed "
        "it there but not in float32 was not attacked again, so that these accuracies may be too high. Newer code "
        "crafts them in float32."
    )


def pairing_share(config: Mapping[str, Any], log: Sequence[Record]) -> float | None:
    """The share of ALP's pairing term in the training loss of the last epoch; none for other frameworks."""
    if not log or "pairing" not in log[-1]:
        return None
    return float(config["objective"]["weight"] * log[-1]["pairing"] / log[-1]["loss"])


def pairing_remark(shares: Mapping[str, float]) -> str:
    """What the rows of ALP differ in besides their heads."""
    said = ", ".join(f"{share:.0%} in {title}" for title, share in shares.items())
    return (
        "ALP's pairing term, which is taken at scale 1 as in the paper, made up so much of the training loss of the "
        f"last epoch: {said}. So the heads are not all that these trainings differ in: the less it weighs, the closer "
        "ALP is to training on clean and adversarial images half and half."
    )


# ---------------------------------------------------------------------------------------------------------------------
# Measurements
# ---------------------------------------------------------------------------------------------------------------------

SEEN = {"paper": "sees raw cosines (scale 1)", "deployed": "sees the model as deployed"}
LOSSES = {
    "cross_entropy": "on the cross-entropy",
    "adaptive": "on the training loss with s and m",
    "margin": "on the margin",
}
KEPT = {"last": "the last iterate counts", "any": "any iterate counts"}
COUNTS = ("restarts", "targets", "queries", "searches", "pairs", "draws")


def measurement_origin(measurement: Measurement, records: Sequence[Record]) -> Plain:
    """How a measurement was made, over all rows of a table: every value that occurs, the most usual case being one."""

    def all_of(key: str) -> list[Any]:
        return list(dict.fromkeys(one["result"][key] for one in records if one["result"].get(key) is not None))

    said = measurement.describe()
    suites = (f"{one['measurement']['suite']} [{one['measurement']['hash']}]" for one in records if "suite" in said)
    return {
        "name": measurement.name,
        "kind": said["kind"],
        "protocol": said.get("protocol", said["kind"]),
        "suites": list(dict.fromkeys(suites)),
        "balls": all_of("ball"),
        "n": all_of("n"),
        "data": all_of("data"),
        "seeds": all_of("seed"),
        "crafting": all_of("crafting"),
        "from": all_of("from"),
        "changes": list(dict.fromkeys(text for one in records for text in one["result"].get("changes", ()))),
    }


def attack_origin(names: Sequence[str], result: Mapping[str, Any]) -> Plain:
    """The attack behind a number of a table, in words, and the ball it was in; nothing where there was none.

    Args:
        names: the columns of outcomes that the number is made of.
        result: of the record they are in.
    """
    columns, eps = result.get("columns", {}), result.get("eps")
    worst = list(names) == [ROBUST]
    chosen = {name: one for name, one in columns.items() if "options" in one and (worst or [name] == list(names))}
    settled = {name: settings(one["options"], eps) for name, one in chosen.items()}
    words = [f"{name} ({text})" for name, text in settled.items()] if worst else list(settled.values())
    views = dict.fromkeys(SEEN.get(one["view"], one["view"]) for one in chosen.values())
    parts = [f"{'the worst case over ' if worst and words else ''}{', '.join(words)}", *views]
    text = "; ".join(part for part in parts if part)
    return {"attack": text, "ball": result.get("ball", "") if text else ""}


def settings(options: Mapping[str, Any], eps: float | None) -> str:
    """``20 steps of 0.003, on the cross-entropy, the last iterate counts``."""
    words = []
    if "steps" in options:
        each = f" of {_length(options['step_size'], eps)}" if "step_size" in options else ""
        words.append(f"{options['steps']:,} steps{each}")
    words += [_counted(options[key], key) for key in COUNTS if key in options]
    words += [LOSSES.get(options["loss"], f"on {options['loss']}")] if "loss" in options else []
    words += [KEPT.get(options["keep"], f"keeps {options['keep']}")] if "keep" in options else []
    known = {"steps", "step_size", "loss", "keep", *COUNTS}
    words += [f"{key} {value}" for key, value in options.items() if key not in known]
    return ", ".join(words)


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what.removesuffix('s') if count == 1 else what}"


def _length(length: float | str, eps: float | None) -> str:
    """A step in pixel units; recorded as ``0.25eps`` where it grows with the ball."""
    if isinstance(length, str) and length.endswith("eps") and eps is not None:
        return f"{float(length.removesuffix('eps')) * eps:.3g}"
    return f"{length:.3g}" if isinstance(length, float) else str(length)
