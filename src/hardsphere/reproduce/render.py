"""From recorded results to a table: plain values first, Markdown from those, so that the two always say the same.

Each measured number stands beside the paper's, with its interval and number of images; each pair of defences is
compared image by image. Whether a gain is real is said by the honest column alone: if the interval of the paired
difference there includes 0, the gain is "not shown", whatever the paper's protocol says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hardsphere.config import flatten, from_dict
from hardsphere.recipes import recipe
from hardsphere.reproduce import paper
from hardsphere.reproduce.measures import Measurement
from hardsphere.reproduce.outcomes import Bits, Estimate, accuracy
from hardsphere.reproduce.plan import record_id
from hardsphere.reproduce.sweeping import Record, Store, Swept
from hardsphere.reproduce.tables import HONEST, Column, Row, Scale, Table, run_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA = "hardsphere.table/1"
VERDICTS = {1: "gain shown", 0: "not shown", -1: "loss shown"}

Plain = dict[str, Any]


class Builder:
    """Puts one table together from what is recorded."""

    def __init__(self, table: Table, scale: Scale, store: Store, overrides: Mapping[str, Any] | None = None) -> None:
        self.table, self.scale, self.store, self.overrides = table, scale, store, overrides
        self.measurements = table.measurements(scale)
        self._outcomes: dict[str, dict[str, Bits]] = {}

    def build(self, seeds: Sequence[int] = (0,), command: str = "", remarks: Sequence[str] = ()) -> Plain:
        """The table in plain values; accuracies and the paper's numbers in percent."""
        rows = self.table.rows_at(self.scale)
        lines = [self._row(row, seed, len(seeds) > 1) for seed in seeds for row in rows]
        pairs = [self._pair(row, seed, len(seeds) > 1) for seed in seeds for row in rows if row.against is not None]
        runs = [self._provenance(row, seed) for seed in seeds for row in self._distinct(rows)]
        missing = [line["title"] for line in lines if any(cell is None for cell in line["cells"])]
        return {
            "schema": SCHEMA,
            "table": self.table.name,
            "title": self.table.title,
            "scale": self.scale.name,
            "about": self.scale.about,
            "complete": not missing,
            "missing": missing,
            "columns": [self._column(column, rows, seeds) for column in self.table.all_columns],
            "rows": lines,
            "pairs": pairs,
            "conclusions": [sentence for pair in pairs if (sentence := self._conclusion(pair))],
            "runs": [run for run in runs if run is not None],
            "measurements": self._measured(rows, seeds),
            "paper": paper.SETTING.get(self.table.name),
            "remarks": [*remarks, *paper.REMARKS.get(self.table.name, ()), *self._remarks(rows, seeds)],
            "command": command,
        }

    # -- what is recorded ---------------------------------------------------------------------------------------------

    def record(self, row: Row, measure: str, seed: int) -> Record | None:
        config = run_of(self.table, row, self.scale, seed, self.overrides).config
        return self.store.records.get(record_id(config, self.measurements[measure]))

    def _any_record(self, row: Row, seed: int) -> Record | None:
        found = (self.record(row, measure, seed) for measure in self.measurements)
        return next((one for one in found if one is not None), None)

    def _bits(self, record: Record) -> dict[str, Bits]:
        if record["id"] not in self._outcomes:
            self._outcomes[record["id"]] = self.store.outcomes(record)
        return self._outcomes[record["id"]]

    def _row_named(self, title: str) -> Row:
        return next(row for row in self.table.rows if row.title == title)

    def _titles(self) -> list[str]:
        return [column.title for column in self.table.all_columns]

    def _distinct(self, rows: Sequence[Row]) -> list[Row]:
        """One row per training: the severities of a defence share theirs."""
        return [row for row in rows if row.severity in (None, 1)]

    # -- numbers ------------------------------------------------------------------------------------------------------

    def _row(self, row: Row, seed: int, several: bool) -> Plain:
        cells = [self._cell(row, column, seed) for column in self.table.all_columns]
        return {"title": _titled(row.title, seed, several), "seed": seed, "cells": cells}

    def _cell(self, row: Row, column: Column, seed: int) -> Plain | None:
        printed = self.table.values.get(row.title, {}).get(column.title)
        if column.measure == "training":
            record = self._any_record(row, seed)
            value = None if record is None else float(record["trained"][column.cells[0]])
            return None if value is None else {"value": value, "interval": None, "n": None, "paper": printed}
        record = self.record(row, column.measure, seed)
        if record is None:
            return None
        names = _cells(column, row, record)
        if any(name not in self._bits(record) for name in names):
            return None
        return _percent(accuracy([self._bits(record)[name] for name in names])) | {"paper": printed}

    def _pair(self, row: Row, seed: int, several: bool) -> Plain:
        assert row.against is not None
        other = self._row_named(row.against)
        cells = [self._difference(row, other, column, seed) for column in self.table.all_columns]
        honest = cells[self._titles().index(HONEST.title)]
        return {
            "title": _titled(f"{row.title} − {other.title}", seed, several),
            "seed": seed,
            "cells": cells,
            "verdict": "not measured" if honest is None else VERDICTS[honest["sign"]],
        }

    def _difference(self, row: Row, other: Row, column: Column, seed: int) -> Plain | None:
        if column.measure == "training":
            return None
        first, second = self.record(row, column.measure, seed), self.record(other, column.measure, seed)
        if first is None or second is None:
            return None
        names = _cells(column, row, first)
        if any(name not in self._bits(record) for name in names for record in (first, second)):
            return None
        found = self.store.compare(first, second, names)
        values = self.table.values
        mine, theirs = (values.get(one.title, {}).get(column.title) for one in (row, other))
        printed = None if mine is None or theirs is None else round(mine - theirs, 2)
        return _percent(found) | {"sign": found.sign, "paper": printed}

    def _conclusion(self, pair: Plain) -> str | None:
        """What became of gains that the paper's protocol shows and the honest one does not."""
        honest = pair["cells"][self._titles().index(HONEST.title)]
        gains = [
            f"{column.title} {cell['value']:+.2f}"
            for column, cell in zip(self.table.all_columns, pair["cells"], strict=True)
            if cell is not None and cell["sign"] > 0 and self._protocol(column) == "paper"
        ]
        if honest is None or honest["sign"] > 0 or not gains:
            return None
        low, high = honest["interval"]
        fate = "not shown" if honest["sign"] == 0 else "a loss"
        return (
            f"{pair['title']}: {', '.join(gains)}; under the honest protocol {honest['value']:+.2f} "
            f"[{low:+.2f}, {high:+.2f}]: {fate}."
        )

    # -- where they come from -----------------------------------------------------------------------------------------

    def _column(self, column: Column, rows: Sequence[Row], seeds: Sequence[int]) -> Plain:
        cells = (self._cell(row, column, seed) for row in rows for seed in seeds)
        n = next((cell["n"] for cell in cells if cell is not None), None)
        return {"title": column.title, "protocol": self._protocol(column), "n": n, "note": column.note}

    def _protocol(self, column: Column) -> str:
        if column.measure == "training":
            return "–"
        if column.cells == ("clean",):
            return "clean"
        said = self.measurements[column.measure].describe()
        return str(said.get("protocol", said["kind"]))

    def _measured(self, rows: Sequence[Row], seeds: Sequence[int]) -> list[Plain]:
        """How each measurement was made, from the first record of it."""
        found = []
        for name, measurement in self.measurements.items():
            records = (self.record(row, name, seed) for seed in seeds for row in rows)
            record = next((one for one in records if one is not None), None)
            found.append({"name": name, **_measurement(measurement, record)})
        return found

    def _provenance(self, row: Row, seed: int) -> Plain | None:
        record = self._any_record(row, seed)
        if record is None:
            return None
        records = [one for name in self.measurements if (one := self.record(row, name, seed)) is not None]
        machine, trained = record["environment"], record["trained"]
        return {
            "title": row.title if row.severity is None else row.title.rpartition(",")[0],
            "id": record["training"],
            "recipe": recipe_line(record["config"]),
            "seed": seed,
            "epochs": trained["epochs"],
            "best_epoch": trained["best_epoch"],
            "selection": trained["selection"],
            "training_minutes": trained["minutes"],
            "judging_minutes": sum(one["seconds"] for one in records) / 60,
            "models": sorted({one["result"]["model"] for one in records if "model" in one["result"]}),
            "commits": sorted({one["environment"]["commit"] or one["environment"]["source"] for one in records}),
            "hardware": machine["device"],
            "torch": machine["torch"],
            "outcomes": [one["outcomes"] for one in records],
            "commands": list(dict.fromkeys(one["command"] for one in records if one["command"])),
        }

    def _remarks(self, rows: Sequence[Row], seeds: Sequence[int]) -> list[str]:
        """What the evaluations remarked, and what was other than it should be."""
        found: dict[str, None] = {}
        for seed in seeds:
            for row in self._distinct(rows):
                models = set()
                for name in self.measurements:
                    record = self.record(row, name, seed)
                    if record is None:
                        continue
                    found |= dict.fromkeys(f"{name}: {text}" for text in record["result"].get("remarks", ()))
                    models.add(record["result"].get("model"))
                    if record["result"].get("frost_stand_in"):
                        text = "mCA is the mean over the other 14 corruptions; the paper's is over all 15."
                        found[f"{name}: {text}"] = None
                if len(models) > 1:
                    found[f"{row.title}: its columns come from {len(models)} trainings of the same configuration."] = (
                        None
                    )
        return list(found)


def _cells(column: Column, row: Row, record: Record) -> list[str]:
    """The columns of outcomes behind a number; a mean over all corruptions leaves a stand-in frost out."""
    names = [name.format(s=row.severity) for name in column.cells]
    kinds = {name.rpartition("-")[0] for name in names}
    if record["result"].get("frost_stand_in") and len(kinds) > 1:
        names = [name for name in names if not name.startswith("frost-")]
    return names


def _percent(found: Estimate) -> Plain:
    low, high = found.interval
    return {"value": 100 * found.value, "interval": [100 * low, 100 * high], "n": found.n}


def _titled(title: str, seed: int, several: bool) -> str:
    return f"{title}, seed {seed}" if several else title


def _measurement(measurement: Measurement, record: Record | None) -> Plain:
    said = measurement.describe()
    if record is None:
        return said
    keys = ("suite", "ball", "n", "data", "seed", "changes", "from", "protocol")
    return said | {key: record["result"][key] for key in keys if key in record["result"]}


def recipe_line(config: Mapping[str, Any]) -> str:
    """``cifar10/pgd-he epochs=20 ...``: what `hardsphere train` is given to train this configuration."""
    made = from_dict(config)
    base, ours = flatten(recipe(made.recipe, {"source": made.source})), flatten(made)
    changes = [f"{key}={_word(value)}" for key, value in ours.items() if base.get(key) != value]
    return " ".join([made.recipe, *changes])


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_word, value))
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


# ---------------------------------------------------------------------------------------------------------------------
# Markdown
# ---------------------------------------------------------------------------------------------------------------------


def markdown(built: Plain) -> str:
    """A built table for people."""
    head = [f"# {built['title']}, scale {built['scale']}", ""]
    if not built["complete"]:
        count = f"{len(built['missing'])} of {len(built['rows'])} rows lack something"
        head += [f"**Incomplete**: {count}; the same command goes on.", ""]
    head += [f"{built['about'][0].upper()}{built['about'][1:]}. Accuracy in %, 95 % intervals in brackets.", ""]
    if built["table"] in FIGURES:
        head += [f"![{built['title']}]({built['table']}.png)", ""]
    parts = [*head, *_results(built), *_pairs(built), *_notes(built), *_runs(built)]
    return "\n".join(parts) + "\n"


def sweep_markdown(swept: Swept) -> str:
    """What a sweep has recorded, a table per measurement; for plans of one's own."""
    parts = ["# Sweep", ""]
    if not swept.complete:
        parts += [f"**Incomplete**: {len(swept.missing)} to go; the same command goes on.", ""]
    parts += [f"- {name} failed: {reason}" for name, reason in swept.failed.items()]
    by_measurement: dict[str, list[Record]] = {}
    for record in swept.records.values():
        by_measurement.setdefault(json.dumps(record["measurement"], sort_keys=True), []).append(record)
    for records in by_measurement.values():
        parts += [f"## {records[0]['measurement']['name']}", "", *_recorded(records), ""]
    return "\n".join(parts)


def _recorded(records: Sequence[Record]) -> list[str]:
    """The records of one measurement: its accuracies, or else the numbers it gives."""
    result = records[0]["result"]
    words = [str(result[key]) for key in ("protocol", "suite", "ball") if key in result]
    lines = [*([", ".join(words), ""] if words else [])]
    if "columns" in result:
        names = list(result["columns"])
        lines += header(["run", "n", *names, "training, min"])
        for one in records:
            cells = [_proportion(one["result"]["columns"].get(name)) for name in names]
            lines.append(line([one["run"], str(one["result"]["n"]), *cells, f"{one['trained']['minutes']:.2f}"]))
        return lines
    names = [key for key, value in result.items() if isinstance(value, int | float)]
    lines += header(["run", *names])
    return [*lines, *(line([one["run"], *(str(one["result"].get(name, "")) for name in names)]) for one in records)]


def _proportion(found: Plain | None) -> str:
    if found is None or found["accuracy"] is None:
        return ""
    low, high = (100 * end for end in found["interval"])
    return f"{100 * found['accuracy']:.2f} [{low:.1f}, {high:.1f}]"


def steps_figure(built: Plain) -> Figure:
    """Fig. 2, left, in both protocols: accuracy by the number of attack steps in training."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    titles = [column["title"] for column in built["columns"]]
    styles = {"PGD-20": "-", HONEST.title: "--"}
    for colour, head in (("#0072B2", "PGD-AT"), ("#D55E00", "PGD-AT + HE")):
        rows = [row for row in built["rows"] if row["title"].partition(",")[0] == head and row["seed"] == 0]
        for column, style in styles.items():
            found = [(_k(row["title"]), row["cells"][titles.index(column)]) for row in rows]
            points = [(k, cell) for k, cell in found if cell is not None]
            if not points:
                continue
            values = [cell["value"] for _, cell in points]
            below = [max(cell["value"] - cell["interval"][0], 0.0) for _, cell in points]
            above = [max(cell["interval"][1] - cell["value"], 0.0) for _, cell in points]
            protocol = built["columns"][titles.index(column)]["protocol"]
            label = f"{head}, {column} ({protocol})"
            steps = [k for k, _ in points]
            axes.errorbar(steps, values, [below, above], color=colour, linestyle=style, marker="o", label=label)
    axes.set_xticks(sorted({_k(row["title"]) for row in built["rows"]}))
    axes.set_xlabel("steps k of the attack in training")
    axes.set_ylabel("accuracy in %")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    return figure


def _k(title: str) -> int:
    return int(title.partition("k = ")[2].partition(",")[0])


FIGURES: dict[str, Callable[[Plain], Figure]] = {"steps": steps_figure}
"""The tables that the paper shows as a figure."""


def _results(built: Plain) -> list[str]:
    columns = built["columns"]
    lines = ["## Measured, and the paper's", ""]
    lines += header(["defence", *(column["title"] for column in columns)])
    lines += [line(["*protocol*", *(f"*{column['protocol']}*" for column in columns)])]
    lines += [line(["*n*", *("" if column["n"] is None else f"*{column['n']}*" for column in columns)])]
    for row in built["rows"]:
        lines.append(line([f"**{row['title']}**", *(_value(cell) for cell in row["cells"])]))
        if any(cell is not None and cell["paper"] is not None for cell in row["cells"]):
            lines.append(line(["the paper's", *(_printed(cell) for cell in row["cells"])]))
    return [*lines, ""]


def _pairs(built: Plain) -> list[str]:
    if not built["pairs"]:
        return []
    columns = [column["title"] for column in built["columns"]]
    lines = ["## Differences, paired image by image", ""]
    lines += header(["pair", *columns, "honest gain"])
    for pair in built["pairs"]:
        cells = [_value(cell, "+") for cell in pair["cells"]]
        lines.append(line([f"**{pair['title']}**", *cells, f"**{pair['verdict']}**"]))
        if any(cell is not None and cell["paper"] is not None for cell in pair["cells"]):
            lines.append(line(["the paper's", *(_printed(cell, "+") for cell in pair["cells"]), ""]))
    lines.append("")
    lines += [f"- {sentence}" for sentence in built["conclusions"]]
    return [*lines, ""] if built["conclusions"] else lines


def _notes(built: Plain) -> list[str]:
    lines = ["## How it was measured", ""]
    for one in built["measurements"]:
        words = [f"`{one['name']}`", str(one.get("protocol", one["kind"])), str(one.get("suite", one["kind"]))]
        words += [f"in {one['ball']}"] if "ball" in one else []
        words += [one["from"]] if "from" in one else []
        words += [f"n = {one['n']}"] if "n" in one else ["not measured yet"]
        words += [f"seed {one['seed']}"] if "seed" in one else []
        words += [f"data {one['data']}"] if "data" in one else []
        words += [f"changed: {'; '.join(one['changes'])}"] if one.get("changes") else []
        lines.append(f"- {_escape(', '.join(words))}")
    lines += [f"- {column['title']}: {column['note']}" for column in built["columns"] if column["note"]]
    if built["paper"]:
        lines.append(f"- The paper's numbers: {built['paper']}")
    lines += [f"- {_escape(remark)}" for remark in built["remarks"]]
    return [*lines, ""]


def _runs(built: Plain) -> list[str]:
    lines = ["## Runs", ""]
    lines += header(["run", "seed", "best epoch", "training, min", "judging, min", "model", "commit", "hardware"])
    for run in built["runs"]:
        best = f"{run['best_epoch']} of {run['epochs']}"
        minutes = [f"{run[key]:.2f}" for key in ("training_minutes", "judging_minutes")]
        models, commits = ", ".join(run["models"]), ", ".join(run["commits"])
        where = f"{run['hardware']}, torch {run['torch']}"
        lines.append(line([run["title"], str(run["seed"]), best, *minutes, models, commits, where]))
    lines += ["", *(f"- {run['title']}: `{run['recipe']}`; {run['selection']}" for run in built["runs"])]
    commands = list(dict.fromkeys([built["command"], *(one for run in built["runs"] for one in run["commands"])]))
    lines += [f"- Command: `{command}`" for command in commands if command]
    return lines


def _value(cell: Plain | None, sign: str = "") -> str:
    if cell is None:
        return ""
    if cell["interval"] is None:
        return f"{cell['value']:{sign}.4g}"
    low, high = cell["interval"]
    return f"{cell['value']:{sign}.2f} [{low:{sign}.1f}, {high:{sign}.1f}]"


def _printed(cell: Plain | None, sign: str = "") -> str:
    if cell is None or cell["paper"] is None:
        return ""
    return f"{cell['paper']:{sign}.4g}" if cell["interval"] is None else f"{cell['paper']:{sign}.2f}"


def header(cells: Sequence[str]) -> list[str]:
    """The head of a Markdown table."""
    return [line(cells), line(["---", *["---:"] * (len(cells) - 1)])]


def line(cells: Sequence[str]) -> str:
    """A line of a Markdown table."""
    return "| " + " | ".join(_escape(cell) for cell in cells) + " |"


def _escape(text: str) -> str:
    return text.replace("|", "\\|")
