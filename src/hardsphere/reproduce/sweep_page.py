"""What a sweep of one's own plan has recorded, as Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hardsphere.markdown import header, line
from hardsphere.reproduce.due import Swept
from hardsphere.reproduce.origins import commit_of, machine_of
from hardsphere.reproduce.page_parts import accuracy, bullets, count, minutes
from hardsphere.reproduce.store import Record


def sweep_markdown(swept: Swept) -> str:
    """A table per measurement."""
    parts = ["# Sweep", ""]
    if not swept.complete:
        parts += [f"**In progress**: {swept.to_go}; the same command goes on.", ""]
    parts += bullets([f"{name} failed: {reason}" for name, reason in swept.failed.items()])
    by_measurement: dict[str, list[Record]] = {}
    for record in swept.records.values():
        by_measurement.setdefault(json.dumps(record["measurement"], sort_keys=True), []).append(record)
    for records in by_measurement.values():
        parts += [f"## {records[0]['measurement']['name']}", "", *_recorded(records), "", *_origins(records)]
    return "\n".join(parts)


def _recorded(records: Sequence[Record]) -> list[str]:
    """The records of one measurement: its accuracies, or else the numbers it gives."""
    result = records[0]["result"]
    if "columns" in result:
        return _accuracies(records)
    names = [key for key, found in result.items() if isinstance(found, int | float)]
    lines = header(["run", *names])
    return [*lines, *(line([one["run"], *(str(one["result"].get(name, "")) for name in names)]) for one in records)]


def _accuracies(records: Sequence[Record]) -> list[str]:
    """A line per run, a column per attack."""
    result = records[0]["result"]
    names = list(result["columns"])
    lines = [*_how_to_read(result), "", *header(["run", "seed", "n", *names, "training, min", "judging, min"])]
    for one in records:
        n = one["result"].get("n")
        cells = [_cell(one["result"]["columns"].get(name), n) for name in names]
        spent = [minutes(one["trained"]["minutes"]), minutes(one["seconds"] / 60)]
        lines.append(line([one["run"], str(one["config"]["seed"]), count(n), *cells, *spent]))
    return lines


def _cell(proportion: Mapping[str, Any] | None, n: int | None) -> str:
    """An accuracy, with its own number of images if that is not the line's."""
    own = None if proportion is None else proportion.get("n")
    return accuracy(proportion) + (f" (n = {own:,})" if own not in (None, n) else "")


def _how_to_read(result: Mapping[str, Any]) -> list[str]:
    protocol = f"Protocol *{result['protocol']}*" if "protocol" in result else "Measured"
    where = f" in the ball {result['ball']}" if "ball" in result else ""
    said = [f"{protocol}{where}. Accuracy in % on the first n test images, in brackets its 95 % interval."]
    if result.get("cascade"):
        said.append("Each attack works on what those before it left standing: a column counts all up to it.")
    return [" ".join(said)]


def _origins(records: Sequence[Record]) -> list[str]:
    """What the numbers depend on beside the runs themselves, each value once."""
    suites = dict.fromkeys(one["result"]["suite"] for one in records if "suite" in one["result"])
    code = dict.fromkeys(f"commit {commit_of(one)}, {machine_of(one)}" for one in records)
    commands = dict.fromkeys(f"Command: `{one['command']}`" for one in records if one["command"])
    return bullets([*(f"Suite {suite}" for suite in suites), *_data(records), *code, *commands])


def _data(records: Sequence[Record]) -> list[str]:
    """Which test images; runs that were judged on different ones must not be compared, which nobody sees otherwise."""
    digests = dict.fromkeys(one["result"]["data"] for one in records if "data" in one["result"])
    several = ", so that the runs cannot be compared with each other" if len(digests) > 1 else ""
    return [f"Test images {' and '.join(map(str, digests))}{several}"] if digests else []
