"""A built analysis as a Markdown page: what was seen, what its words mean, and how the models stand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hardsphere.markdown import header, line
from hardsphere.reproduce.origins import Plain
from hardsphere.reproduce.page_parts import accuracy, bullets, count, minutes, runs_section, sentence
from hardsphere.reproduce.tables import HONEST


def analysis_page(built: Plain, lines: Callable[[Mapping[str, Any]], list[str]]) -> str:
    """A built analysis for people.

    Args:
        lines: the facts of one look as Markdown.
    """
    parts = [f"# {built['title']}, scale {built['scale']}", "", *_incomplete(built)]
    parts += [f"{sentence(built['about'])} In brackets 95 % intervals over the test images.", ""]
    parts += [f"{sentence(built['measured'])}{_attacked(built)}", ""]
    for found in built["found"]:
        parts += [f"## Seed {found['seed']}, n = {found['facts']['n']:,} test images", "", *lines(found["facts"]), ""]
        parts += [text for name, caption in found["figures"].items() for text in (*_figure(name, caption), "")]
    terms = [f"*{word}*: {text}" for word, text in built["terms"].items()]
    parts += ["## What the words mean", "", *bullets(terms)] if terms else []
    parts += [*_standing(built), *_how_measured(built)]
    return "\n".join([*parts, *runs_section(built["runs"], built["command"], judged=False)]) + "\n"


def _incomplete(built: Plain) -> list[str]:
    lines = []
    if not built["complete"]:
        lines += ["**In progress**: not all models were looked at yet; the same command goes on.", ""]
    if built["absent"]:
        lines += [f"Not looked at yet: {', '.join(built['absent'])}.", ""]
    return lines


def _attacked(built: Plain) -> str:
    balls = " or ".join(built["balls"])
    return f" Attacks see the models as deployed, in the ball {balls}." if balls else ""


def _figure(name: str, caption: str) -> list[str]:
    return [f"![{name.removesuffix('.png')}]({name})", "", f"*{caption}.*"]


def _standing(built: Plain) -> list[str]:
    """The robustness of the models, which this page explains and does not measure."""
    if not built["standing"]:
        return []
    lines = ["## The same models in both protocols", ""]
    if not any(one["paper"] or one["honest"] for one in built["standing"]):
        return [*lines, "Neither protocol is on record for these weights.", ""]
    lines += ["Accuracy in %. How robust the models are is what the honest column says, not this page.", ""]
    columns = {"paper": "PGD-20", "honest": HONEST.title}
    paper, honest = (f"{title}, *{kind}*{_in(built, kind)}" for kind, title in columns.items())
    lines += header(["model", "clean", "n", paper, "n", honest, "n"])
    for one in built["standing"]:
        cells = [one[protocol] for protocol in ("clean", "paper", "honest")]
        shown = [text for cell in cells for text in (accuracy(cell), count(None if cell is None else cell["n"]))]
        lines.append(line([one["title"], *shown]))
    return [*lines, ""]


def _in(built: Plain, protocol: str) -> str:
    balls = dict.fromkeys(one[protocol]["ball"] for one in built["standing"] if one[protocol])
    return f", {' or '.join(ball for ball in balls if ball)}" if any(balls) else ""


def _how_measured(built: Plain) -> list[str]:
    said = [_look(found) for found in built["found"]] + list(built["remarks"])
    return ["## How it was measured", "", *bullets(said)] if said else []


def _look(found: Plain) -> str:
    where = f"the first {found['facts']['n']:,} images of the test set {', '.join(found['data'])}"
    cost = f"all models together in {minutes(found['minutes'])} min on {found['machine']}"
    return f"Seed {found['seed']}: {where}; {cost}, in float32; commit {found['commit']}"
