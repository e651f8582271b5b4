"""Figures of built tables: Fig. 2 (left) of the paper, and what HE gains under each attack.

A figure is drawn off screen (Agg) and belongs to its caller; matplotlib is imported only when one is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hardsphere.files import appearing
from hardsphere.reproduce.building import Plain
from hardsphere.reproduce.tables import HONEST

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"paper": "#0072B2", "adaptive": "#009E73", "honest": "#D55E00"}


def drawn(make: Callable[[], Figure], file: Path) -> bool:
    """Write a figure as PNG; false where there is no matplotlib: the numbers must not be lost for want of a picture."""
    try:
        figure = make()
    except ImportError:
        return False
    with appearing(file) as partial:
        figure.savefig(partial, format="png", dpi=120)
    return True


def gains_figure(built: Plain) -> Figure:
    """The paired differences to the plain defence under each attack, with intervals; the paper's are hollow marks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    shown = [index for index, column in enumerate(built["columns"]) if column["protocol"] in COLOURS]
    pairs = [pair for pair in built["pairs"] if any(pair["cells"][index] for index in shown)]
    figure = Figure(figsize=(3.4 * min(max(len(pairs), 1), 3) + 1.2, 4.2 * max((len(pairs) + 2) // 3, 1)))
    figure.set_layout_engine("constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(max((len(pairs) + 2) // 3, 1), min(max(len(pairs), 1), 3), sharey=True, squeeze=False)
    for axes, pair in zip(grid.flat, pairs, strict=False):
        for height, index in enumerate(reversed(shown)):
            cell, protocol = pair["cells"][index], built["columns"][index]["protocol"]
            if cell is None:
                continue
            low, high = cell["interval"]
            reach = [[max(cell["value"] - low, 0.0)], [max(high - cell["value"], 0.0)]]
            axes.errorbar(cell["value"], height, xerr=reach, fmt="o", color=COLOURS[protocol], markersize=4)
            if cell["paper"] is not None:
                axes.plot(cell["paper"], height, "D", markerfacecolor="none", color="0.45", markersize=5)
        axes.axvline(0, color="0.6", linewidth=0.8)
        axes.set_title(f"{pair['title']}\nhonest gain: {pair['verdict']}", fontsize=9)
        axes.set_xlabel("difference in points")
    for axes in list(grid.flat)[len(pairs) :]:
        axes.set_visible(False)
    titles = [built["columns"][index]["title"] for index in reversed(shown)]
    for axes in grid[:, 0]:
        axes.set_yticks(range(len(shown)), titles, fontsize=8)
    marks = [Line2D([], [], color=colour, marker="o", label=name) for name, colour in COLOURS.items()]
    marks.append(
        Line2D([], [], color="0.45", marker="D", markerfacecolor="none", linestyle="", label="the paper's own")
    )
    figure.legend(handles=marks, loc="outside lower center", ncols=4, fontsize=8)
    return figure


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


FIGURES: dict[str, Callable[[Plain], Figure]] = {"steps": steps_figure, "table2": gains_figure}
"""The tables that have a figure."""
