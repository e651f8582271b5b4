"""Figures of built tables: Fig. 2 (left) of the paper, and what HE gains under each attack.

A figure is drawn off screen (Agg) and belongs to its caller; matplotlib is imported only when one is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hardsphere.files import appearing
from hardsphere.reproduce.origins import Plain
from hardsphere.reproduce.tables import HONEST

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours: people who confuse red and green tell them apart too.
COLOURS = {"clean": "#555555", "paper": "#0072B2", "adaptive": "#009E73", "honest": "#D55E00"}
BESIDE = 3  # pairs in one row of a figure


def drawn(make: Callable[[], Figure], file: Path) -> bool:
    """Write a figure as PNG; false where there is no matplotlib: the numbers must not be lost for want of a picture."""
    try:
        figure = make()
    except ImportError:
        return False
    with appearing(file) as partial:
        figure.savefig(partial, format="png", dpi=120)
    return True


def draw(built: Plain, folder: Path) -> Plain:
    """Draw the figure of a table, if it has one and there is anything to show: its file and caption."""
    known, file = FIGURES.get(built["table"]), f"{built['table']}.png"
    if known is None or not any(cell for row in built["rows"] for cell in row["cells"]):
        return {"figures": []}
    shown = drawn(lambda: known.make(built), folder / file)
    return {"figures": [file], "caption": known.caption} if shown else {"figures": []}


# ---------------------------------------------------------------------------------------------------------------------
# What HE gains under each attack
# ---------------------------------------------------------------------------------------------------------------------


def gains_figure(built: Plain) -> Figure:
    """The paired differences to the plain defence under each attack, with intervals; the paper's are hollow marks."""
    shown = [index for index, column in enumerate(built["columns"]) if column["protocol"] in COLOURS]
    pairs = [pair for pair in built["pairs"] if any(pair["cells"][index] for index in shown)]
    across, down = min(max(len(pairs), 1), BESIDE), max(-(-len(pairs) // BESIDE), 1)
    figure = _canvas(3.3 * across + 1.6, 0.28 * len(shown) * down + 1.5 * down + 0.5)
    grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    panels: list[Axes] = list(grid.flat)
    for axes, pair in zip(panels, pairs, strict=False):
        _gains(axes, pair, [built["columns"][index] for index in shown], [pair["cells"][index] for index in shown])
    for axes in panels[len(pairs) :]:
        axes.set_visible(False)
    for axes in panels[max(len(pairs) - across, 0) : len(pairs)]:  # the lowest of each column; a row may be short
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("difference in percentage points", fontsize=9)
    _legend(figure, [built["columns"][index]["protocol"] for index in shown])
    figure.suptitle(f"{built['title']}, scale {built['scale']}", fontsize=10)
    return figure


def _gains(axes: Axes, pair: Plain, columns: Sequence[Plain], cells: Sequence[Plain | None]) -> None:
    """One pair: the first column uppermost."""
    heights = range(len(columns) - 1, -1, -1)
    for height, column, cell in zip(heights, columns, cells, strict=True):
        if column["protocol"] == "honest":  # what the verdict comes from
            axes.axhspan(height - 0.5, height + 0.5, color=COLOURS["honest"], alpha=0.12, linewidth=0)
        if cell is None:
            continue
        colour = COLOURS[column["protocol"]]
        axes.errorbar(cell["value"], height, xerr=_reach([cell]), fmt="o", color=colour, markersize=4, capsize=2)
        if cell["paper"] is not None:
            axes.plot(cell["paper"], height, "D", markerfacecolor="none", color="0.45", markersize=5)
    axes.axvline(0, color="0.6", linewidth=0.8, zorder=0)
    axes.set_ylim(-0.5, len(columns) - 0.5)
    axes.set_yticks(list(heights), [_labelled(column) for column in columns], fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_title(f"{pair['title']}\nverdict (honest): {pair['verdict']}", fontsize=9)


def _labelled(column: Plain) -> str:
    return str(column["title"]) if column["n"] is None else f"{column['title']} (n = {column['n']:,})"


def _legend(figure: Figure, protocols: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    marks = [
        Line2D([], [], color=colour, marker="o", markersize=4, label=name)
        for name, colour in COLOURS.items()
        if name in protocols
    ]
    hollow = Line2D([], [], color="0.45", marker="D", markerfacecolor="none", linestyle="", label="in the paper")
    figure.legend(handles=[*marks, hollow], loc="outside lower center", ncols=len(marks) + 1, fontsize=8, frameon=False)


# ---------------------------------------------------------------------------------------------------------------------
# Fig. 2, left
# ---------------------------------------------------------------------------------------------------------------------


HEADS = {"PGD-AT": "#000000", "PGD-AT + HE": "#CC79A7"}  # not the colours of protocols


def steps_figure(built: Plain) -> Figure:
    """Fig. 2, left, in both protocols: accuracy by the number of attack steps in training."""
    figure = _canvas(6.4, 4.0)
    axes = figure.add_subplot()
    titles = [column["title"] for column in built["columns"]]
    curves = [(head, column) for head in HEADS for column in ("PGD-20", HONEST.title)]
    for index, (head, title) in enumerate(curves):
        place = titles.index(title)
        rows = [row for row in built["rows"] if row["title"].partition(",")[0] == head and row["seed"] == 0]
        points = [(_k(row["title"]), cell) for row in rows if (cell := row["cells"][place]) is not None]
        if points:
            # Side by side, so that intervals do not hide one another.
            steps = [k + 0.06 * (index - (len(curves) - 1) / 2) for k, _ in points]
            cells = [cell for _, cell in points]
            axes.errorbar(
                steps,
                [cell["value"] for cell in cells],
                _reach(cells),
                color=HEADS[head],
                linestyle="--" if title == HONEST.title else "-",
                marker="o",
                markersize=4,
                capsize=2,
                label=f"{head}, {title} ({built['columns'][place]['protocol']})",
            )
    axes.set_xticks(sorted({_k(row["title"]) for row in built["rows"]}))
    axes.set_xlabel("steps k of the attack in training")
    axes.set_ylabel("accuracy in %")
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)  # curves may lie anywhere
    return figure


def _k(title: str) -> int:
    return int(title.partition("k = ")[2].partition(",")[0])


# ---------------------------------------------------------------------------------------------------------------------
# Parts of figures
# ---------------------------------------------------------------------------------------------------------------------


def _canvas(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _reach(cells: Sequence[Plain]) -> list[list[float]]:
    """The ways from numbers to the lower and upper ends of their intervals."""
    below = [max(cell["value"] - cell["interval"][0], 0.0) for cell in cells]
    above = [max(cell["interval"][1] - cell["value"], 0.0) for cell in cells]
    return [below, above]


@dataclass(frozen=True)
class Drawing:
    """How a table is drawn, and what the figure shows."""

    make: Callable[[Plain], Figure]
    caption: str


FIGURES: dict[str, Drawing] = {
    "steps": Drawing(steps_figure, "Accuracy by the number of attack steps in training, with 95 % intervals; seed 0."),
    "table2": Drawing(
        gains_figure,
        "What a head gains over the plain one under each attack, by protocol, with 95 % intervals; hollow: the paper's "
        "own differences. The shaded line decides.",
    ),
}
"""The tables that have a figure."""
