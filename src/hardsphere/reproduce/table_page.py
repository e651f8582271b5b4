"""A built table as a Markdown page: what it comes to first, then the numbers, then how they were made."""

from __future__ import annotations

from collections.abc import Sequence

from hardsphere.markdown import header, line
from hardsphere.reproduce.origins import Plain
from hardsphere.reproduce.page_parts import (
    NOTHING,
    bullets,
    count,
    difference,
    printed,
    runs_section,
    sentence,
    value,
)

PRINTED = "in the paper"
VERDICT = "verdict (honest)"

PROTOCOLS = {
    "paper": (
        "each attack alone, as the paper ran it: through raw cosines (scale 1) where the head has them, the last "
        "iterate of one restart unless said otherwise below. Cross-entropy attacks are weak there, so that these "
        "numbers flatter a hypersphere head"
    ),
    "adaptive": (
        "the paper's adaptive attack: PGD on the training loss, with s and m, on the model as deployed. A plain head "
        "has neither, so that for it this is *paper* again from another random start, and the paper's number is "
        "repeated"
    ),
    "black-box": "a single attack that sees the answers of the deployed model only; any image it finds counts",
    "corruptions": "common corruptions; no adversary",
    "honest": (
        "the model as deployed under AutoAttack's standard set: an image counts as right only if none of its attacks "
        "breaks it"
    ),
}


def table_page(built: Plain) -> str:
    """A built table for people."""
    wide = bool(built["headline"])
    parts = [f"# {built['title']}, scale {built['scale']}", "", *_incomplete(built), *_how_to_read(built)]
    parts += [*_in_short(built), *_figures(built), *_families(built)] if wide else [*_few(built), *_figures(built)]
    return "\n".join([*parts, *_how_measured(built), *runs_section(built["runs"], built["command"])]) + "\n"


def _incomplete(built: Plain) -> list[str]:
    """What is missing, row by row."""
    lacking = [row for row in built["rows"] if row["missing"]]
    if not lacking:
        return []
    begun = [row for row in lacking if any(row["cells"])]
    blank = [row["title"] for row in lacking if row not in begun]
    total = sum(row["seed"] is not None for row in built["rows"])
    state = f"**In progress**: {total - len(lacking)} of {total} rows are complete"
    said = [_to_come(built, row) for row in begun]
    said += [f"Not begun: {'; '.join(blank)}"] if blank else []
    more = f"`hardsphere reproduce {built['table']}` with the same options goes on, and `--only` picks rows."
    return [f"{state}; {more}", "", *bullets(said)]


def _to_come(built: Plain, row: Plain) -> str:
    titles = [column["title"] for column in built["columns"]]
    there = [title for title in row["missing"] if row["cells"][titles.index(title)] is not None]
    absent = [title for title in row["missing"] if title not in there]
    parts = [f"not measured yet: {', '.join(absent)}"] if absent else []
    parts += [f"so far on another number of images than planned: {', '.join(there)}"] if there else []
    return f"{row['title']}: {'; '.join(parts)}"


def _how_to_read(built: Plain) -> list[str]:
    """The setting, the protocols and the rule behind the verdicts."""
    lines = [
        f"{sentence(built['about'])} Accuracy in % on the first n test images, in brackets its 95 % interval. "
        f"{_scope(built)}",
        "",
    ]
    said = dict.fromkeys(column["protocol"] for column in built["columns"])
    about = [f"*{name}*{_radius(built, name)}: {PROTOCOLS[name]}." for name in PROTOCOLS if name in said]
    if built["paper"]:
        about.append(f"*{PRINTED}*: the paper's own number, for orientation ({built['paper']}).")
    return [*lines, *bullets(about)]


def _scope(built: Plain) -> str:
    """What the intervals cover; whoever reads them must know that training again gives another network."""
    if len(built["seeds"]) == 1:
        return (
            "Intervals are over test images: each row is one training, and what another seed would give is not in them."
        )
    return "Intervals of a single seed are over test images; those of means are over the seeds as well."


def _radius(built: Plain, protocol: str) -> str:
    """In which ball a protocol's attacks were, going by what is recorded."""
    balls = dict.fromkeys(column["ball"] for column in built["columns"] if column["protocol"] == protocol)
    shown = [ball for ball in balls if ball]
    return f" (in the ball {' or '.join(shown)})" if shown else ""


def _figures(built: Plain) -> list[str]:
    caption = built.get("caption", "")
    shown = [f"![{built['title']}]({name})" for name in built.get("figures", ())]
    return [part for drawing in shown for part in (drawing, "", *([f"*{caption}*", ""] if caption else []))]


# ---------------------------------------------------------------------------------------------------------------------
# Differences, and what they come to
# ---------------------------------------------------------------------------------------------------------------------

RULE = (
    "Differences in points, paired image by image; bold where the interval excludes 0. The verdict comes from the "
    "honest column alone: *gain shown* or *loss shown* if its interval lies on that side of 0, otherwise *not shown*, "
    "which leaves open whatever the interval holds. Each is at 95 %, whatever the number of pairs: of twenty without "
    "any difference, one is called a gain or a loss by chance. It is a verdict on these weights: what a method gains "
    "beyond the luck of a training takes several seeds to say."
)


MEANS = " A mean over frameworks is taken image by image as well; its interval, too, is over images and not trainings."


def _rule(built: Plain) -> str:
    return RULE + (MEANS if built["means"] else "")


def _in_short(built: Plain) -> list[str]:
    """The columns that sum up a wide table."""
    if not _seen(built["pairs"]):
        return []
    return [
        "## In short",
        "",
        _rule(built),
        "",
        *_difference_lines(built, built["headline"]),
        *bullets(built["conclusions"]),
    ]


def _few(built: Plain) -> list[str]:
    """All there is of a table of few columns: a line per defence, then the differences."""
    lines = ["## Measured", "", *_results(built)] if _seen(built["rows"]) else []
    if not _seen(built["pairs"]):
        return lines
    titles = [column["title"] for column in built["columns"] if column["measurement"] != "training"]
    return [
        *lines,
        "## Differences",
        "",
        _rule(built),
        "",
        *_difference_lines(built, titles),
        *bullets(built["conclusions"]),
    ]


def _results(built: Plain) -> list[str]:
    columns = built["columns"]
    lines = [*header(["defence", *(column["title"] for column in columns)]), *_column_lines(columns)]
    for row in _seen(built["rows"]):
        cells = [value(cell, column["n"]) for cell, column in zip(row["cells"], columns, strict=True)]
        lines.append(line([f"**{row['title']}**", *cells]))
        if _has_printed(row["cells"]):
            lines.append(line([PRINTED, *map(printed, row["cells"])]))
    return [*lines, ""]


def _difference_lines(built: Plain, titles: Sequence[str]) -> list[str]:
    """A line for each pair, with the verdict, and one with the paper's difference."""
    places = [index for index, column in enumerate(built["columns"]) if column["title"] in titles]
    columns = [built["columns"][place] for place in places]
    lines = header(["pair", *(column["title"] for column in columns), VERDICT])
    lines += [f"{each}  |" for each in _column_lines(columns)]
    for pair in _seen([*built["pairs"], *built["means"]]):
        cells = [pair["cells"][place] for place in places]
        shown = [difference(cell, column["n"]) for cell, column in zip(cells, columns, strict=True)]
        verdict = f"**{pair['verdict']}**" if pair["verdict"] else ""
        lines.append(line([f"**{pair['title']}**", *shown, verdict]))
        if _has_printed(cells):
            lines.append(line([PRINTED, *(printed(cell, "+") for cell in cells), ""]))
    return [*lines, ""]


def _column_lines(columns: Sequence[Plain]) -> list[str]:
    """Under the titles: the protocol and the number of images of each column."""
    protocols, counts = (f"*{column['protocol']}*" for column in columns), (count(column["n"]) for column in columns)
    return [line(["*protocol*", *protocols]), line(["*n*", *counts])]


def _seen(lines: Sequence[Plain]) -> list[Plain]:
    """The rows or pairs of which anything is measured."""
    return [one for one in lines if any(one["cells"])]


def _has_printed(cells: Sequence[Plain | None]) -> bool:
    return any(cell is not None and cell["paper"] is not None for cell in cells)


# ---------------------------------------------------------------------------------------------------------------------
# Many columns: a block per family, a line per column
# ---------------------------------------------------------------------------------------------------------------------


def _families(built: Plain) -> list[str]:
    lines = []
    for family in dict.fromkeys(row["family"] for row in built["rows"]):
        rows = [row for row in _seen(built["rows"]) if row["family"] == family]
        pairs = [pair for pair in _seen(built["pairs"]) if pair["family"] == family]
        if rows:
            lines += [f"## {family}, column by column", "", *_measured_block(built, rows)]
        if pairs:
            lines += ["Differences:", "", *_difference_block(built, pairs)]
    return lines


def _measured_block(built: Plain, rows: Sequence[Plain]) -> list[str]:
    titles = [title for row in rows for title in (row["title"], PRINTED)]
    lines = header(["column", "protocol", "n", *titles], words=2)
    for place, column in enumerate(built["columns"]):
        cells = [row["cells"][place] for row in rows]
        shown = [text for cell in cells for text in (value(cell, column["n"]), printed(cell))]
        lines.append(line([_titled(column), column["protocol"], count(column["n"]), *shown]))
    return [*lines, ""]


def _difference_block(built: Plain, pairs: Sequence[Plain]) -> list[str]:
    titles = [title for pair in pairs for title in (pair["title"], PRINTED)]
    lines = header(["column", "protocol", *titles], words=2)
    for place, column in enumerate(built["columns"]):
        cells = [pair["cells"][place] for pair in pairs]
        shown = [text for cell in cells for text in (difference(cell, column["n"]), printed(cell, "+"))]
        if any(cells):
            lines.append(line([_titled(column), column["protocol"], *shown]))
    verdicts = [text for pair in pairs for text in (f"**{pair['verdict']}**", "")]
    return [*lines, line([VERDICT, "", *verdicts]), ""]


def _titled(column: Plain) -> str:
    return f"**{column['title']}**" if column["protocol"] == "honest" else str(column["title"])


# ---------------------------------------------------------------------------------------------------------------------
# How the numbers were made
# ---------------------------------------------------------------------------------------------------------------------


INTERVALS = (
    "Intervals: Wilson's for an accuracy, Tango's for a paired difference; for a mean over several columns, such as "
    "mCA, images are what is counted."
)


def _how_measured(built: Plain) -> list[str]:
    lines = ["## How it was measured", "", *_attack_table(built), *_measurement_table(built)]
    told = [column for column in built["columns"] if column["note"] and not column["attack"]]
    said = [f"{column['title']}: {column['note']}" for column in told]
    said += [f"`{one['name']}`, other than in the named suite: {'; '.join(one['changes'])}" for one in _changed(built)]
    said.append(INTERVALS)
    if any(row["seed"] is None for row in built["rows"]):
        said.append("Means over seeds: Student's interval over the seeds, but no narrower than a single seed's.")
    return [*lines, *bullets([*said, *built["remarks"]])]


def _attack_table(built: Plain) -> list[str]:
    """A line per attack: what it does, what it sees, where it may go."""
    shown = [column for column in built["columns"] if column["attack"]]
    if not shown:
        return []
    lines = header(["column", "protocol", "attack", "ball", "measurement", "n"], words=5)
    for column in shown:
        text = "; ".join(part for part in (column["attack"], column["note"]) if part)
        name = f"`{column['measurement']}`"
        lines.append(line([column["title"], column["protocol"], text, column["ball"], name, count(column["n"])]))
    return [*lines, ""]


def _measurement_table(built: Plain) -> list[str]:
    """A line per measurement, which is what is recorded as a whole."""
    done = [one for one in built["measurements"] if one["n"]]
    if not done:
        return []
    lines = header(["measurement", "suite [hash]", "test images, digest", "crafted in", "attack seed"], words=4)
    for one in done:
        suites = one["suites"] or one["from"] or [one["kind"]]
        cells = [f"`{one['name']}`", *(_listed(part) for part in (suites, one["data"], one["crafting"], one["seeds"]))]
        lines.append(line(cells))
    return [*lines, ""]


def _listed(values: Sequence[object]) -> str:
    return "; ".join(map(str, values)) or NOTHING


def _changed(built: Plain) -> list[Plain]:
    return [one for one in built["measurements"] if one["changes"]]
