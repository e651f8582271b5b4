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

_POINTS, _LAW = "#0072B2", "#D55E00"

# What each part of a law stands for, the fixed one first.
_PARTS = {
    "k": ("the update, the data and the weight average", "the passes of the attack"),
    "batch": (
        "the optimiser, the weight average, and kernels that take the same time however few images they are given",
        "arithmetic and memory traffic, both by the image",
    ),
    "width": (
        "the number of kernels, which any width has: narrow ones do not fill the device",
        "memory traffic of images between convolutions",
        "the arithmetic of convolutions",
    ),
}

# What it means for the cost that the part of a power overtakes the one before it.
_LEADS = {
    1: "The fixed part is larger below {:.2g}: there the cost is closer to constant than to linear.",
    2: "The part in x is overtaken above {:.2g}: there the cost is no longer linear.",
}


def write_sweep(swept: Swept, axes: Mapping[str, Axis], out: Path) -> list[Path]:
    """Laws, figure and text of every axis with more points than its law has parts, into a folder; the files written."""
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
        name: fit(list(points), [point.step_seconds for point in points.values()], axes[name].powers)
        for name, points in swept.points.items()
        if len(points) > len(axes[name].powers)
    }


def plain_law(law: Law) -> dict[str, Any]:
    """A law in plain values, with where its parts overtake each other and where it does not hold."""
    outside = {f"{x:g}": far for x, far in law.outside.items()}
    return asdict(law) | {"unit": "seconds", "crossings": list(law.crossings), "outside": outside}


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
    parts.append(f"`hardsphere bench sweep --out DIR`, {'; '.join(codes)}. All points are in `points.jsonl`.")
    return "\n\n".join(parts) + "\n"


def _table(axis: Axis, law: Law, points: Mapping[int, Point]) -> str:
    titles = [axis.title, "ms per step", "rounds", "law, ms", "images/s", "TFLOP/s", "of GEMM"]
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
        ]
        lines.append(line(cells))
    return "\n".join([f"{axis.title[0].upper()}{axis.title[1:]} ({axis.fixed}):", "", *lines])


def _sentence(name: str, axis: Axis, law: Law, points: Mapping[int, Point]) -> str:
    least, most = min(points), max(points)
    low, high = (points[value].gemm_share for value in (least, most))
    return (
        f"**{axis.title}** from {least} to {most} ({axis.fixed}): t = {_formula(law)} ms. "
        f"{_parts(name, law, least, most)}{_holding(law, points)} "
        f"The step runs at {low:.0%} of GEMM at {least} and {high:.0%} at {most}."
    )


def _parts(name: str, law: Law, least: int, most: int) -> str:
    """What the parts of a law are, how much they matter, and from where on each leads."""
    if min(law.coefficients) < 0:
        return "A part of the fit is below zero, so it does not tell where the cost comes from. "
    words = []
    starts, ends = (law.parts(value) for value in (least, most))
    for power, meaning, start, end in zip(law.powers, _PARTS.get(name, ()), starts, ends, strict=False):
        title = "The fixed part" if power == 0 else f"The part in {_grown(power)}"
        words.append(
            f"{title} ({meaning}) is {start / law.at(least):.0%} at {least} and {end / law.at(most):.0%} at {most}."
        )
    crossings = zip(law.powers[1:], law.crossings, strict=False)
    words += [_LEADS[power].format(crossing) for power, crossing in crossings if power in _LEADS]
    return "".join(f"{word} " for word in words)


def _holding(law: Law, points: Mapping[int, Point]) -> str:
    if not law.outside:
        x, far = law.largest_departure
        return f"The law holds within {TOLERANCE:.0%} everywhere (at worst {far:+.1%}, at {x:g})."
    places = ", ".join(f"{x:g} ({far:+.0%}, {points[int(x)].gemm_share:.0%} of GEMM)" for x, far in law.outside.items())
    return f"Measurement departs from the law by more than {TOLERANCE:.0%} at {places}."


def _formula(law: Law) -> str:
    text = ""
    for power, coefficient in zip(law.powers, law.coefficients, strict=True):
        sign = ("-" if coefficient < 0 else "") if not text else f" {'-' if coefficient < 0 else '+'} "
        text += f"{sign}{abs(1e3 * coefficient):.3g}{f' {_grown(power)}' if power else ''}"
    return text


def _grown(power: int) -> str:
    return {1: "x", 2: "x²"}.get(power, f"x^{power}")


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
