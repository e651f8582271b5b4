"""A built table, or a sweep, as Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hardsphere.reproduce.building import Plain
from hardsphere.reproduce.store import Record
from hardsphere.reproduce.sweeping import Swept

PROTOCOLS = {
    "paper": "as the paper measured: through raw cosines (scale 1) where the head has them; the last iterate of one "
    "restart, unless a note below says otherwise",
    "adaptive": (
        "the paper's adaptive attack: the same on the model as deployed, at its training scale; on a head without s "
        "and m that is the ordinary attack, whose number in the paper is repeated"
    ),
    "honest": "the worst case over AutoAttack's standard set, image by image, on the model as deployed",
}


def markdown(built: Plain) -> str:
    """A built table for people."""
    head = [f"# {built['title']}, scale {built['scale']}", "", *_incomplete(built)]
    head += [f"{built['about'][0].upper()}{built['about'][1:]}. Accuracy in %, 95 % intervals in brackets.", ""]
    said = dict.fromkeys(column["protocol"] for column in built["columns"])
    head += [f"- *{name}*: {PROTOCOLS[name]}{_radius(built, name)}" for name in said if name in PROTOCOLS]
    head += ["", *(line for name in built.get("figures", ()) for line in (f"![{built['title']}]({name})", ""))]
    body = [*_in_short(built), *_families(built)] if built["headline"] else [*_results(built), *_pairs(built)]
    return "\n".join([*head, *body, *_notes(built), *_runs(built)]) + "\n"


def _radius(built: Plain, protocol: str) -> str:
    """In which ball a protocol's attacks were, going by what is recorded."""
    kind = "honest" if protocol == "honest" else "paper"
    balls = dict.fromkeys(one["ball"] for one in built["measurements"] if "ball" in one and one["protocol"] == kind)
    return f"; in {', '.join(balls)}" if balls else ""


def _incomplete(built: Plain) -> list[str]:
    """What is missing, row by row."""
    lacking = [row for row in built["rows"] if row["missing"]]
    if not lacking:
        return []
    begun = [row for row in lacking if any(cell is not None for cell in row["cells"])]
    blank = [row["title"] for row in lacking if row not in begun]
    count = f"{len(lacking)} of {sum(row['seed'] is not None for row in built['rows'])} rows lack something"
    lines = [f"**Incomplete**: {count}; the same command goes on.", ""]
    lines += [f"- {row['title']}: still to come, perhaps on more images: {', '.join(row['missing'])}" for row in begun]
    lines += [f"- Not begun: {'; '.join(blank)}"] if blank else []
    return [*lines, ""]


# ---------------------------------------------------------------------------------------------------------------------
# Few columns: a line per defence
# ---------------------------------------------------------------------------------------------------------------------


def _results(built: Plain) -> list[str]:
    columns = built["columns"]
    lines = ["## Measured, and the paper's", ""]
    lines += header(["defence", *(column["title"] for column in columns)])
    lines += _protocol_lines(columns)
    for row in built["rows"]:
        cells = [_value(cell, column["n"]) for cell, column in zip(row["cells"], columns, strict=True)]
        lines.append(line([f"**{row['title']}**", *cells]))
        if any(cell is not None and cell["paper"] is not None for cell in row["cells"]):
            lines.append(line(["the paper's", *(_printed(cell) for cell in row["cells"])]))
    return [*lines, ""]


def _protocol_lines(columns: Sequence[Plain]) -> list[str]:
    counts = ("" if column["n"] is None else f"*{column['n']:,}*" for column in columns)
    return [line(["*protocol*", *(f"*{column['protocol']}*" for column in columns)]), line(["*n*", *counts])]


def _pairs(built: Plain) -> list[str]:
    if not built["pairs"]:
        return []
    titles = [column["title"] for column in built["columns"]]
    return ["## Differences, paired image by image", "", *_difference_lines(built, titles), *_conclusions(built)]


def _difference_lines(built: Plain, titles: Sequence[str]) -> list[str]:
    """A line for each pair, with the verdict, and one with the paper's difference."""
    places = [index for index, column in enumerate(built["columns"]) if column["title"] in titles]
    columns = [built["columns"][place] for place in places]
    lines = header(["pair", *(column["title"] for column in columns), "honest gain"])
    lines += [each.removesuffix("|") + "|  |" for each in _protocol_lines(columns)] if built["headline"] else []
    for pair in built["pairs"]:
        cells = [pair["cells"][place] for place in places]
        shown = [_difference(cell, column["n"]) for cell, column in zip(cells, columns, strict=True)]
        lines.append(line([f"**{pair['title']}**", *shown, f"**{pair['verdict']}**"]))
        if any(cell is not None and cell["paper"] is not None for cell in cells):
            lines.append(line(["the paper's", *(_printed(cell, "+") for cell in cells), ""]))
    return [*lines, ""]


def _conclusions(built: Plain) -> list[str]:
    return [*(f"- {sentence}" for sentence in built["conclusions"]), *([""] if built["conclusions"] else [])]


# ---------------------------------------------------------------------------------------------------------------------
# Many columns: what they come to first, then a block per family, a line per attack
# ---------------------------------------------------------------------------------------------------------------------


def _in_short(built: Plain) -> list[str]:
    if not any(cell is not None for pair in built["pairs"] for cell in pair["cells"]):
        return []
    lines = ["## In short", "", "Differences, paired image by image; bold where the interval excludes 0.", ""]
    shown = {**built, "pairs": [pair for pair in built["pairs"] if any(cell is not None for cell in pair["cells"])]}
    return [*lines, *_difference_lines(shown, built["headline"]), *_conclusions(built)]


def _families(built: Plain) -> list[str]:
    lines = []
    for family in dict.fromkeys(row["family"] for row in built["rows"]):
        rows = [row for row in built["rows"] if row["family"] == family and any(row["cells"])]
        pairs = [pair for pair in built["pairs"] if pair["family"] == family and any(pair["cells"])]
        if rows:
            lines += [f"## {family}", "", *_measured_block(built, rows)]
        if pairs:
            lines += ["Paired image by image:", "", *_difference_block(built, pairs)]
    return lines


def _measured_block(built: Plain, rows: Sequence[Plain]) -> list[str]:
    titles = [title for row in rows for title in (row["title"], "paper")]
    lines = header(["attack", "protocol", "n", *titles])
    for place, column in enumerate(built["columns"]):
        cells = [row["cells"][place] for row in rows]
        shown = [text for cell in cells for text in (_value(cell, column["n"]) or "–", _printed(cell))]
        lines.append(line([_attack(column), column["protocol"], _count(column["n"]), *shown]))
    return [*lines, ""]


def _difference_block(built: Plain, pairs: Sequence[Plain]) -> list[str]:
    lines = header(["attack", *(title for pair in pairs for title in (pair["title"], "paper"))])
    for place, column in enumerate(built["columns"]):
        cells = [pair["cells"][place] for pair in pairs]
        shown = [text for cell in cells for text in (_difference(cell, column["n"]) or "–", _printed(cell, "+"))]
        if any(cells):
            lines.append(line([_attack(column), *shown]))
    verdicts = [text for pair in pairs for text in (f"**{pair['verdict']}**", "")]
    return [*lines, line(["honest gain", *verdicts]), ""]


def _attack(column: Plain) -> str:
    return f"**{column['title']}**" if column["protocol"] == "honest" else str(column["title"])


# ---------------------------------------------------------------------------------------------------------------------
# Where the numbers come from
# ---------------------------------------------------------------------------------------------------------------------


def _notes(built: Plain) -> list[str]:
    lines = ["## How it was measured", ""]
    for one in built["measurements"]:
        words = [f"`{one['name']}`", str(one.get("protocol", one["kind"])), str(one.get("suite", one["kind"]))]
        words += [f"in {one['ball']}"] if "ball" in one else []
        words += [one["from"]] if "from" in one else []
        words += [f"{one['n']:,} test images"] if "n" in one else ["not measured yet"]
        words += [f"seed {one['seed']}"] if "seed" in one else []
        words += [f"data {one['data']}"] if "data" in one else []
        words += [f"crafted: {one['crafting']}"] if one.get("crafting") else []
        words += [f"changed: {'; '.join(one['changes'])}"] if one.get("changes") else []
        lines.append(f"- {_escape(', '.join(words))}")
    lines += [f"- {column['title']}: {column['note']}" for column in built["columns"] if column["note"]]
    if built["paper"]:
        lines.append(f"- The paper's numbers: {built['paper']}")
    if any(row["seed"] is None for row in built["rows"]):
        lines.append("- Means over seeds: Student's interval over the seeds, but no narrower than a single seed's.")
    lines += [f"- {_escape(remark)}" for remark in built["remarks"]]
    return [*lines, ""]


def _runs(built: Plain) -> list[str]:
    lines = ["## Runs", ""]
    lines += header(["run", "seed", "best epoch", "training, min", "judging, min", "weights", "commit", "hardware"])
    for run in built["runs"]:
        best = f"{run['best_epoch']} of {run['epochs']}"
        minutes = [f"{run[key]:.2f}" for key in ("training_minutes", "judging_minutes")]
        where = f"{run['hardware']}, torch {run['torch']}"
        commits = ", ".join(run["commits"])
        lines.append(line([run["title"], str(run["seed"]), best, *minutes, run["weights"], commits, where]))
    lines += ["", *(f"- {run['title']}: `{run['recipe']}`; {run['selection']}" for run in built["runs"])]
    commands = list(dict.fromkeys([built["command"], *(one for run in built["runs"] for one in run["commands"])]))
    lines += [f"- Command: `{command}`" for command in commands if command]
    return lines


# ---------------------------------------------------------------------------------------------------------------------
# A sweep of one's own
# ---------------------------------------------------------------------------------------------------------------------


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


# ---------------------------------------------------------------------------------------------------------------------
# Cells
# ---------------------------------------------------------------------------------------------------------------------


def _value(cell: Plain | None, usual: int | None = None, sign: str = "") -> str:
    """A number with its interval, and with its own number of images if that is not the column's."""
    if cell is None:
        return ""
    if cell["interval"] is None:
        return f"{cell['value']:{sign}.4g}"
    low, high = cell["interval"]
    own = f" (n = {cell['n']:,})" if cell["n"] not in (None, usual) else ""
    return f"{cell['value']:{sign}.2f} [{low:{sign}.1f}, {high:{sign}.1f}]{own}"


def _difference(cell: Plain | None, usual: int | None = None) -> str:
    """Bold where its interval excludes 0."""
    text = _value(cell, usual, "+")
    return f"**{text}**" if cell is not None and cell.get("sign") else text


def _printed(cell: Plain | None, sign: str = "") -> str:
    if cell is None or cell["paper"] is None:
        return ""
    return f"{cell['paper']:{sign}.4g}" if cell["interval"] is None else f"{cell['paper']:{sign}.2f}"


def _count(n: int | None) -> str:
    return "" if n is None else f"{n:,}"


def header(cells: Sequence[str]) -> list[str]:
    """The head of a Markdown table."""
    return [line(cells), line(["---", *["---:"] * (len(cells) - 1)])]


def line(cells: Sequence[str]) -> str:
    """A line of a Markdown table."""
    return "| " + " | ".join(_escape(cell) for cell in cells) + " |"


def _escape(text: str) -> str:
    return text.replace("|", "\\|")
