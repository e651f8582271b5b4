"""From recorded results to a table in plain values, from which Markdown, JSON and figures are made alike.

Each measured number stands beside the paper's, with its interval and number of images; each pair of defences is
compared image by image. Whether a gain is real is said by the honest column alone: if the interval of the paired
difference there includes 0, the gain is "not shown", whatever the paper's protocol says. The numbers of a row are those
of one set of weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from hardsphere.reproduce import paper
from hardsphere.reproduce.origins import (
    Plain,
    attack_origin,
    crossed_in_tf32,
    measurement_origin,
    pairing_remark,
    pairing_share,
    trained_again,
    training_origin,
)
from hardsphere.reproduce.outcomes import Bits, Estimate, accuracy, student
from hardsphere.reproduce.plan import record_id
from hardsphere.reproduce.scales import Scale
from hardsphere.reproduce.store import Record, Store, same_images
from hardsphere.reproduce.tables import HONEST, Column, Row, Table, run_of

SCHEMA = "hardsphere.table/3"
STAND_IN = (
    "frost is a drawn stand-in for the published photographs and not comparable with the paper's; a mean over the "
    "corruptions is over the other 14."
)
VERDICTS = {1: "gain shown", 0: "not shown", -1: "loss shown"}


class Builder:
    """Puts one table together from what is recorded."""

    def __init__(self, table: Table, scale: Scale, store: Store, overrides: Mapping[str, Any] | None = None) -> None:
        self.table, self.scale, self.store, self.overrides = table, scale, store, overrides
        self.measurements = table.measurements(scale)
        self.columns = table.all_columns
        self.titles = [column.title for column in self.columns]
        self._records: dict[tuple[str, int], dict[str, Record]] = {}
        self._outcomes: dict[str, dict[str, Bits]] = {}

    def build(self, seeds: Sequence[int] = (0,), command: str = "", remarks: Sequence[str] = ()) -> Plain:
        """The table in plain values; accuracies and the paper's numbers in percent."""
        rows = self.table.rows_at(self.scale)
        lines = [self._row(row, seed, len(seeds) > 1) for seed in seeds for row in rows]
        pairs = [self._pair(row, seed, len(seeds) > 1) for seed in seeds for row in rows if row.against is not None]
        if len(seeds) > 1:
            lines += [line for row in rows if any((line := self._mean_row(row, seeds))["cells"])]
            paired = (self._mean_pair(row, seeds) for row in rows if row.against is not None)
            pairs += [pair for pair in paired if any(pair["cells"])]
        means = self._over_frameworks(rows, seeds[0]) if len(seeds) == 1 else []
        runs = [self._run(row, seed) for seed in seeds for row in _distinct(rows)]
        return {
            "schema": SCHEMA,
            "table": self.table.name,
            "title": self.table.title,
            "scale": self.scale.name,
            "about": self.scale.about,
            "seeds": list(seeds),
            "complete": not any(line["missing"] for line in lines),
            "headline": [*self.table.headline, HONEST.title] if self.table.headline else [],
            "columns": [self._column(column, rows, seeds) for column in self.columns],
            "rows": lines,
            "pairs": pairs,
            "means": means,
            "conclusions": [sentence for pair in [*pairs, *means] if (sentence := self._conclusion(pair))],
            "runs": [run for run in runs if run is not None],
            "measurements": self._measured(rows, seeds),
            "paper": paper.SETTING.get(self.table.name),
            "remarks": [*remarks, *paper.REMARKS.get(self.table.name, ()), *self._remarks(rows, seeds)],
            "command": command,
        }

    # -- what is recorded ---------------------------------------------------------------------------------------------

    def records(self, row: Row, seed: int) -> dict[str, Record]:
        """The measurements of a row by name, all of one set of weights."""
        if (row.title, seed) not in self._records:
            run = run_of(self.table, row, self.scale, seed, self.overrides)
            self._records[row.title, seed] = self.store.of_one_training(run)
        return self._records[row.title, seed]

    def _bits(self, record: Record) -> dict[str, Bits]:
        if record["outcomes"] not in self._outcomes:
            self._outcomes[record["outcomes"]] = self.store.outcomes(record)
        return self._outcomes[record["outcomes"]]

    def _row_named(self, title: str) -> Row:
        return next(row for row in self.table.rows if row.title == title)

    # -- numbers ------------------------------------------------------------------------------------------------------

    def _row(self, row: Row, seed: int, several: bool) -> Plain:
        return {
            "title": _titled(row.title, seed, several),
            "family": _titled(row.against or row.title, seed, several),
            "seed": seed,
            "cells": [self._cell(row, column, seed) for column in self.columns],
            "missing": self._missing(row, seed),
        }

    def _missing(self, row: Row, seed: int) -> list[str]:
        """The columns that are still to be measured, or to be measured on more images."""
        run, found = run_of(self.table, row, self.scale, seed, self.overrides), self.records(row, seed)
        whole = {
            name
            for name, measurement in self.measurements.items()
            if name in found and found[name]["id"] == record_id(run.config, measurement)
        } | ({"training"} if found else set())
        unseen = [column for column in self.columns if self._cell(row, column, seed) is None]
        return [column.title for column in self.columns if column.measure not in whole or column in unseen]

    def _cell(self, row: Row, column: Column, seed: int) -> Plain | None:
        printed = self.table.values.get(row.title, {}).get(column.title)
        found = self.records(row, seed)
        if column.measure == "training":
            record = next(iter(found.values()), None)
            value = None if record is None else float(record["trained"][column.cells[0]])
            return None if value is None else {"value": value, "interval": None, "n": None, "paper": printed}
        record = found.get(column.measure)
        if record is None:
            return None
        names = _cells(column, row, record)
        if any(name not in self._bits(record) for name in names):
            return None
        return _percent(accuracy([self._bits(record)[name] for name in names])) | {"paper": printed}

    def _pair(self, row: Row, seed: int, several: bool) -> Plain:
        assert row.against is not None
        other = self._row_named(row.against)
        cells = [self._difference([(row, other)], column, seed) for column in self.columns]
        return {
            "title": _titled(f"{row.title} − {other.title}", seed, several),
            "family": _titled(other.title, seed, several),
            "seed": seed,
            "cells": cells,
            "verdict": self._verdict(cells),
        }

    def _verdict(self, cells: Sequence[Plain | None]) -> str:
        honest = cells[self.titles.index(HONEST.title)]
        return "not measured" if honest is None else VERDICTS[honest["sign"]]

    def _difference(self, pairs: Sequence[tuple[Row, Row]], column: Column, seed: int) -> Plain | None:
        """First minus second, or the mean of that over several pairs; none as long as anything of it is missing."""
        found = [[self.records(row, seed).get(column.measure) for row in pair] for pair in pairs]
        records = [(first, second) for first, second in found if first is not None and second is not None]
        if len(records) < len(pairs):
            return None
        every, names = [one for pair in records for one in pair], _cells(column, pairs[0][0], records[0][0])
        if not all(same_images(every[0], one) and names == _cells(column, pairs[0][0], one) for one in every):
            return None
        frost = {one["result"].get("frost_stand_in") for one in every}
        if len(frost) > 1 and any(name.startswith("frost-") for name in names):
            return None  # made of photographs in one, drawn in the other: not the same images
        if any(name not in self._bits(record) for name in names for record in every):
            return None
        estimate = self.store.compare(records, names)
        printed = [self._printed_difference(row, other, column) for row, other in pairs]
        return _percent(estimate) | {"sign": estimate.sign, "paper": _mean_of_all(printed)}

    def _printed_difference(self, row: Row, other: Row, column: Column) -> float | None:
        mine, theirs = (self.table.values.get(one.title, {}).get(column.title) for one in (row, other))
        return None if mine is None or theirs is None else mine - theirs

    # -- means over frameworks ----------------------------------------------------------------------------------------

    def _over_frameworks(self, rows: Sequence[Row], seed: int) -> list[Plain]:
        """What each head gains over the plain one in the mean of the frameworks that were judged with it."""
        heads: dict[str, list[tuple[Row, Row]]] = {}
        for row in rows:
            if row.against is not None and row.severity is None and row.title.startswith(f"{row.against} + "):
                pair = row, self._row_named(row.against)
                if self._difference([pair], HONEST, seed) is not None:
                    heads.setdefault(row.title.removeprefix(f"{row.against} + "), []).append(pair)
        return [self._mean_over(head, pairs, seed) for head, pairs in heads.items() if len(pairs) > 1]

    def _mean_over(self, head: str, pairs: Sequence[tuple[Row, Row]], seed: int) -> Plain:
        cells = [self._difference(pairs, column, seed) for column in self.columns]
        plain = [other.title for _, other in pairs]
        return {
            "title": f"{head} − plain, mean over {', '.join(plain)}",
            "seed": seed,
            "cells": cells,
            "verdict": "",  # a verdict is on the weights of a pair
        }

    # -- means over seeds ---------------------------------------------------------------------------------------------

    def _mean_row(self, row: Row, seeds: Sequence[int]) -> Plain:
        columns = zip(*([self._cell(row, column, seed) for column in self.columns] for seed in seeds), strict=True)
        title = f"{row.title}, mean of {len(seeds)} seeds"
        family = f"{row.against or row.title}, mean of {len(seeds)} seeds"
        cells = [_mean_cell(cells) for cells in columns]
        return {"title": title, "family": family, "seed": None, "cells": cells, "missing": []}

    def _mean_pair(self, row: Row, seeds: Sequence[int]) -> Plain:
        other = self._row_named(str(row.against))
        found = ([self._difference([(row, other)], column, seed) for column in self.columns] for seed in seeds)
        cells = [_mean_cell(cells) for cells in zip(*found, strict=True)]
        last = f", mean of {len(seeds)} seeds"
        return {
            "title": f"{row.title} − {other.title}{last}",
            "family": other.title + last,
            "seed": None,
            "cells": cells,
            "verdict": self._verdict(cells),
        }

    def _conclusion(self, pair: Plain) -> str | None:
        """What became of gains that the paper's protocol shows and the honest one does not."""
        honest = pair["cells"][self.titles.index(HONEST.title)]
        gains = [
            f"{column.title} {cell['value']:+.2f}"
            for column, cell in zip(self.columns, pair["cells"], strict=True)
            if cell is not None and cell["sign"] > 0 and self._protocol(column) == "paper"
        ]
        if honest is None or honest["sign"] > 0 or not gains:
            return None
        low, high = honest["interval"]
        fate = "is not shown" if honest["sign"] == 0 else "turns into a loss"
        return (
            f"{pair['title']}: the gain in the paper's protocol ({', '.join(gains)}) {fate} in the honest one: "
            f"{honest['value']:+.2f} [{low:+.2f}, {high:+.2f}], n = {honest['n']:,}."
        )

    # -- where they come from -----------------------------------------------------------------------------------------

    def _column(self, column: Column, rows: Sequence[Row], seeds: Sequence[int]) -> Plain:
        counts = [cell["n"] for row in rows for seed in seeds if (cell := self._cell(row, column, seed)) is not None]
        return {
            "title": column.title,
            "protocol": self._protocol(column),
            "n": max((count for count in counts if count is not None), default=None),
            "note": column.note,
            "measurement": column.measure,
            **self._attack(column, rows, seeds),
        }

    def _attack(self, column: Column, rows: Sequence[Row], seeds: Sequence[int]) -> Plain:
        """The attack behind a column, from the first record of it: what settles its numbers is the same in all."""
        for seed in seeds:
            for row in rows:
                if (record := self.records(row, seed).get(column.measure)) is not None:
                    return attack_origin(_cells(column, row, record), record["result"])
        return {"attack": "", "ball": ""}

    def _protocol(self, column: Column) -> str:
        if column.measure == "training":
            return "–"
        if column.cells == ("clean",):
            return "clean"
        said = self.measurements[column.measure].describe()
        return column.protocol or str(said.get("protocol", said["kind"]))

    def _measured(self, rows: Sequence[Row], seeds: Sequence[int]) -> list[Plain]:
        """How each measurement was made, going by all records of it that the table shows."""
        found = []
        for name, measurement in self.measurements.items():
            records = (self.records(row, seed).get(name) for seed in seeds for row in _distinct(rows))
            found.append(measurement_origin(measurement, [one for one in records if one is not None]))
        return found

    def _run(self, row: Row, seed: int) -> Plain | None:
        records = list(self.records(row, seed).values())
        if not records:
            return None
        first = records[0]
        return training_origin(_defence(row), first["config"], first["trained"], first["weights"], records)

    def _remarks(self, rows: Sequence[Row], seeds: Sequence[int]) -> list[str]:
        """What the evaluations remarked, and what was other than it should be."""
        found: dict[str, None] = {}
        for seed in seeds:
            for row in _distinct(rows):
                for name, record in self.records(row, seed).items():
                    found |= dict.fromkeys(f"{name}: {text}" for text in record["result"].get("remarks", ()))
                    if crossed := crossed_in_tf32(record):
                        found[crossed] = None
                    if record["result"].get("frost_stand_in"):
                        found[f"{name}, {_defence(row)}: {STAND_IN}"] = None
                    if again := record["trained"].get("instead_of"):
                        found[trained_again(_defence(row), record["weights"], again)] = None
            found |= dict.fromkeys(self._pairing(rows, seed))
        return list(found)

    def _pairing(self, rows: Sequence[Row], seed: int) -> list[str]:
        """How much of ALP's loss its pairing was: at scale 1, as the paper has it, a sphere leaves it little to say."""
        shares = {}
        for row in _distinct(rows):
            for record in list(self.records(row, seed).values())[:1]:
                if (share := pairing_share(record["config"], self.store.log_of(record))) is not None:
                    shares[_defence(row)] = share
        return [pairing_remark(shares)] if len(shares) > 1 else []


def _distinct(rows: Sequence[Row]) -> list[Row]:
    """One row per training: the severities of a defence share theirs."""
    return [row for row in rows if row.severity in (None, 1)]


def _defence(row: Row) -> str:
    return row.title if row.severity is None else row.title.rpartition(",")[0]


def _cells(column: Column, row: Row, record: Record) -> list[str]:
    """The columns of outcomes behind a number; a mean over all corruptions leaves a stand-in frost out."""
    names = [name.format(s=row.severity) for name in column.cells]
    kinds = {name.rpartition("-")[0] for name in names}
    if record["result"].get("frost_stand_in") and len(kinds) > 1:
        names = [name for name in names if not name.startswith("frost-")]
    return names


def _mean_of_all(numbers: Sequence[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return round(mean(known), 2) if len(known) == len(numbers) else None


def _percent(found: Estimate) -> Plain:
    low, high = found.interval
    return {"value": 100 * found.value, "interval": [100 * low, 100 * high], "n": found.n}


def _mean_cell(cells: Sequence[Plain | None]) -> Plain | None:
    """The mean over seeds; none as long as a seed is missing.

    Its interval is Student's over the seeds, but no narrower than theirs are on average: all were judged on the same
    images, so that more seeds say nothing more about other images.
    """
    whole = [cell for cell in cells if cell is not None]
    if len(whole) < len(cells):
        return None
    values = [cell["value"] for cell in whole]
    middle, printed = mean(values), whole[0]["paper"]
    if any(cell["interval"] is None for cell in whole):
        return {"value": middle, "interval": None, "n": None, "paper": printed}
    own = mean((cell["interval"][1] - cell["interval"][0]) / 2 for cell in whole)
    half = max(student(len(values) - 1) * stdev(values) / len(values) ** 0.5, own)
    least = -100.0 if "sign" in whole[0] else 0.0
    low, high = max(middle - half, least), min(middle + half, 100.0)
    return {
        "value": middle,
        "interval": [low, high],
        "n": min(cell["n"] for cell in whole),
        "paper": printed,
        "sign": 1 if low > 0 else -1 if high < 0 else 0,
    }


def _titled(title: str, seed: int, several: bool) -> str:
    return f"{title}, seed {seed}" if several else title
