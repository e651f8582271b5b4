"""A sweep for people: the fitted laws, one figure, and a page on where the laws hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hardsphere.bench.costs import Axis, Point, Swept
from hardsphere.bench.laws import TOLERANCE, Law, fit
from hardsphere.files import appearing, write_json, write_text
from hardsphere.markdown import header, line
from hardsphere.runtime import code_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FEWEST_POINTS = 3
_POINTS, _LAW = "#0072B2", "#D55E00"

# What the part that does not grow stands for.
_FIXED = {
    "k": "the update, the data and the weight average",
    "batch": "the optimiser, the weight average and kernels too small to fill the device",
    "width": "layers bound by memory, and kernels too small to fill the device",
}


def write_sweep(swept: Swept, axes: Mapping[str, Axis], out: Path) -> list[Path]:
    """Laws, figure and text of every axis with at least three points, into a folder; the files written."""
    laws = laws_of(swept, axes)
    if not laws:
        return []
    files = [out / "law.json", out / "sweep.md", out / "sweep.png"]
    write_json(files[0], {name: plain_law(law) for name, law in laws.items()})
    write_text(files[1], page(swept, axes, laws))
    draw(swept, axes, laws, files[2])
    return files


def laws_of(swept: Swept, axes: Mapping[str, Axis]) -> dict[str, Law]:
    """The law of each axis that has enough points."""
    return {
        name: fit(list(points), [point.step_seconds for point in points.values()], axes[name].power)
        for name, points in swept.points.items()
        if len(points) >= FEWEST_POINTS
    }


def plain_law(law: Law) -> dict[str, Any]:
    """A law in plain values, with the places where it does not hold."""
    return asdict(law) | {"unit": "seconds", "outside": {f"{x:g}": far for x, far in law.outside.items()}}


def page(swept: Swept, axes: Mapping[str, Axis], laws: Mapping[str, Law]) -> str:
    """The laws in words, with where and by how much each is wrong, above the points they are fitted to."""
    everything = [point for points in swept.points.values() for point in points.values()]
    parts = [
        f"# What a training step costs on {everything[0].environment['device']}",
        "![cost of a training step](sweep.png)",
        "Time t of one step of PGD-AT+HE as in real training: compiled and recorded, with data, augmentation, update "
        "and weight average, on random images, seed 0; median of five rounds. Laws are fitted to relative departures. "
        "GEMM is the matrix-product rate measured in the same run.",
        "\n".join(f"- {_sentence(name, axes[name], law, swept.points[name])}" for name, law in laws.items()),
        *(_table(axes[name], law, swept.points[name]) for name, law in laws.items()),
    ]
    if swept.missing:
        parts.append(f"Not measured yet: {'; '.join(swept.missing)}.")
    codes = dict.fromkeys(f"torch {one.environment['torch']}, {code_of(one.environment)}" for one in everything)
    parts.append(f"`hardsphere bench sweep`, {'; '.join(codes)}. All points are in `points.jsonl`.")
    return "\n\n".join(parts) + "\n"


def _table(axis: Axis, law: Law, points: Mapping[int, Point]) -> str:
    titles = [axis.title, "ms per step", "rounds", "law, ms", "images/s", "TFLOP/s", "of GEMM", "GiB"]
    lines = header(titles, words=0)
    for value, point in sorted(points.items()):
        rounds = [1e3 * one for one in point.rounds_step_seconds]
        cells = [
            str(value),
            f"{1e3 * point.step_seconds:.2f}",
            f"{min(rounds):.2f} to {max(rounds):.2f}",
            f"{1e3 * law.at(value):.2f}",
            f"{point.images_per_second:,.0f}",
            f"{point.tflops:.0f}",
            f"{point.gemm_share:.0%}",
            "–" if point.peak_memory_gib is None else f"{point.peak_memory_gib:.1f}",
        ]
        lines.append(line(cells))
    return "\n".join([f"{axis.title[0].upper()}{axis.title[1:]} ({axis.fixed}):", "", *lines])


def _sentence(name: str, axis: Axis, law: Law, points: Mapping[int, Point]) -> str:
    least, most = min(points), max(points)
    text = f"**{axis.title}** from {least} to {most} ({axis.fixed}): t = {_formula(law)} ms. "
    if law.fixed > 0:
        text += (
            f"The fixed part is {law.fixed / law.at(least):.0%} of the step at {least} and "
            f"{law.fixed / law.at(most):.0%} at {most}: {_FIXED.get(name, 'what does not grow')}. "
        )
    if law.outside:
        places = ", ".join(
            f"{x:g} ({far:+.0%}, {points[int(x)].gemm_share:.0%} of GEMM)" for x, far in law.outside.items()
        )
        text += f"It departs from the law by more than {TOLERANCE:.0%} at {places}. "
    else:
        x, far = law.largest_departure
        text += f"It holds within {TOLERANCE:.0%} everywhere (at worst {far:+.1%}, at {x:g}). "
    low, high = (points[value].gemm_share for value in (least, most))
    return text + f"The step runs at {low:.0%} of GEMM at {least} and {high:.0%} at {most}."


def _formula(law: Law) -> str:
    grown = {1: "x", 2: "x²"}.get(law.power, f"x^{law.power}")
    return f"{1e3 * law.fixed:.3g} {'+' if law.growth >= 0 else '-'} {abs(1e3 * law.growth):.3g} {grown}"


def draw(swept: Swept, axes: Mapping[str, Axis], laws: Mapping[str, Law], file: Path) -> None:
    """One panel per axis: points with their range over the rounds, and the law."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.0 * len(laws), 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels: Any = figure.subplots(1, len(laws), squeeze=False)[0]
    for panel, (name, law) in zip(panels, laws.items(), strict=True):
        _panel(panel, axes[name], law, swept.points[name], logarithmic=name != "k")
    with appearing(file) as partial:
        figure.savefig(partial, format="png", dpi=120)


def _panel(panel: Axes, axis: Axis, law: Law, points: Mapping[int, Point], logarithmic: bool) -> None:
    values = sorted(points)
    middle = [1e3 * points[value].step_seconds for value in values]
    below = [1e3 * (points[value].step_seconds - min(points[value].rounds_step_seconds)) for value in values]
    above = [1e3 * (max(points[value].rounds_step_seconds) - points[value].step_seconds) for value in values]
    grid = np.geomspace(values[0], values[-1], 100)
    panel.plot(grid, [1e3 * law.at(float(x)) for x in grid], color=_LAW, linewidth=1.5, label=f"{_formula(law)} ms")
    panel.errorbar(
        values, middle, yerr=[below, above], fmt="o", markersize=4, capsize=3, color=_POINTS, label="measured"
    )
    if logarithmic:
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.minorticks_off()
        panel.set_xticks(values, [str(value) for value in values])
        ticks = _round_ticks(min(middle), max(middle))
        panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    else:
        panel.set_ylim(bottom=0)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_xlabel(axis.title)
    panel.set_ylabel("ms per step")
    panel.set_title(axis.fixed, fontsize=10)
    panel.legend(frameon=False, fontsize=8)


def _round_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, from just below the lowest value to just above the highest."""
    powers = range(int(np.floor(np.log10(low))) - 1, int(np.ceil(np.log10(high))) + 2)
    every = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    first = max(tick for tick in every if tick <= low)
    last = min(tick for tick in every if tick >= high)
    return [tick for tick in every if first <= tick <= last]
