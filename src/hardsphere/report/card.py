"""The report card for people: in the terminal, and as Markdown. Both say the same, line by line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hardsphere.markdown import escape, header, line

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_MANY_CLASSES = 20
"""With more classes than this only the weakest are shown; the JSON holds all of them."""


@dataclass(frozen=True)
class _Table:
    """A table before it has a form; the first column is text, the others are numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    strong: frozenset[int] = frozenset()


def show_card(card: dict[str, Any], console: Console | None = None) -> None:
    """Print a card to the terminal."""
    from rich.console import Console

    (console or Console()).print(card_view(card))


def card_view(card: dict[str, Any]) -> RenderableType:
    """A card as something rich can print."""
    from rich import box
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    honest = card["protocol"] == "honest"
    head = Text.assemble(
        ("Robustness card", "bold"),
        "  ",
        (_headline(card), "cyan"),
        "  ",
        (_protocol(card), "green" if honest else "yellow"),
    )
    parts: list[RenderableType] = [head, Text(_subject(card), "dim")]
    for table in _tables(card):
        grid = Table(
            title=table.title,
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            show_edge=False,
        )
        for index, column in enumerate(table.columns):
            grid.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
        for index, row in enumerate(table.rows):
            grid.add_row(*(Text(cell) for cell in row), style="bold" if index in table.strong else "")
        parts += [Text(), grid]
    parts.append(Text())
    parts += [Text(f"! {remark}", "yellow") for remark in _remarks(card)]
    parts += [Text(text, "dim") for text in _provenance(card)]
    return Padding(Group(*parts), (1, 0))


def card_markdown(card: dict[str, Any]) -> str:
    """A card as Markdown."""
    lines = [f"# Robustness card: {_headline(card)}", "", f"**{_protocol(card)}** · {_subject(card)}", ""]
    for table in _tables(card):
        lines += [f"## {table.title}", "", *header(table.columns)]
        for index, row in enumerate(table.rows):
            lines.append(line([f"**{cell}**" if index in table.strong and cell else cell for cell in row]))
        lines.append("")
    lines += [f"> {escape(remark)}\n" for remark in _remarks(card)]
    lines += [f"- {escape(text)}" for text in _provenance(card)]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------------------------------------------------
# What there is to say
# ---------------------------------------------------------------------------------------------------------------------


def _headline(card: dict[str, Any]) -> str:
    return card["target"] or f"model {card['model']['digest']}"


def _protocol(card: dict[str, Any]) -> str:
    if card["protocol"] == "corruptions":
        return "common corruptions"
    if card["protocol"] == "paper":
        return "paper protocol (raw cosines where the head has them, last iterate)"
    return f"{card['protocol']} protocol"


def _subject(card: dict[str, Any]) -> str:
    data = card["data"]
    if card["protocol"] == "corruptions":
        return f"{data['name'] or 'data'} · n = {data['n']} · {card['suite']['id']} · {card['corruptions']['from']}"
    balls = ", ".join(result["ball"] for result in card["results"])
    eot = f" · mean of {card['eot']} draws" if card["eot"] > 1 else ""
    return (
        f"{data['name'] or 'data'} · n = {data['n']} · {balls} · {card['suite']['id']} [{card['suite']['hash']}]{eot}"
    )


def _tables(card: dict[str, Any]) -> list[_Table]:
    if card["protocol"] == "corruptions":
        return [_corruption_summary(card), _corruption_cells(card["corruptions"])]
    results = card["results"]
    tables = [_summary(card)]
    for result in results:
        tables.append(_attacks(result, card["suite"]["cascade"], len(results) > 1))
    tables.append(_classes(results[-1]))
    return tables


def _summary(card: dict[str, Any]) -> _Table:
    rows = [["clean", *_accuracy(card["clean"])]]
    for result in card["results"]:
        rows.append([f"robust, {result['ball']}", *_accuracy(result["robust"])])
    return _Table("Accuracy", ["", "%", "95 % interval", "samples"], rows, frozenset({len(rows) - 1}))


def _attacks(result: dict[str, Any], cascade: bool, several: bool) -> _Table:
    title = "Attacks, each on what the ones before left standing" if cascade else "Attacks, each on its own"
    columns = ["attack", "after it" if cascade else "alone", "95 %", "broken", "fwd/img", "bwd/img", "time"]
    rows = []
    for attack in result["attacks"]:
        percent, interval, _ = _accuracy(attack)
        broken = f"{attack['broken']}/{attack['attacked']}"
        passes = [_count(attack["forwards"]), _count(attack["backwards"])] if attack["attacked"] else ["-", "-"]
        rows.append([attack["name"], percent, interval, broken, *passes, _time(attack["seconds"])])
    percent, interval, _ = _accuracy(result["robust"])
    fallen = sum(result["broken_by"].values())
    seconds = sum(line["seconds"] for line in result["attacks"])
    rows.append(["worst case", percent, interval, f"{fallen} in all", "", "", _time(seconds)])
    return _Table(f"{title}, {result['ball']}" if several else title, columns, rows, frozenset({len(rows) - 1}))


def _classes(result: dict[str, Any]) -> _Table:
    present = [one for one in result["classes"] if one["n"]]
    shown, title = present, "Classes"
    if len(present) > _MANY_CLASSES:
        shown = sorted(present, key=lambda one: one["robust"]["accuracy"])[:_MANY_CLASSES]
        title = f"The {_MANY_CLASSES} weakest of {len(present)} classes"
    rows = [[one["name"], str(one["n"]), _accuracy(one["clean"])[0], *_accuracy(one["robust"])[:2]] for one in shown]
    return _Table(f"{title}, {result['ball']}", ["class", "n", "clean %", "robust %", "95 % interval"], rows)


def _corruption_summary(card: dict[str, Any]) -> _Table:
    found = card["corruptions"]
    rows = [["clean", *_accuracy(card["clean"])[:2]]]
    if found["mca"] is not None:
        rows.append(["mCA, mean over 15 x 5", f"{100 * found['mca']:.2f}", ""])
    elif found["mca_without_frost"] is not None:
        rows.append(["mCA (14, without frost)", f"{100 * found['mca_without_frost']:.2f}", ""])
    if found["mce"] is not None:
        rows.append([f"mCE against {found['baseline']}", f"{100 * found['mce']:.2f}", ""])
    return _Table("Accuracy", ["", "%", "95 % interval"], rows, frozenset({1}))


def _corruption_cells(found: dict[str, Any]) -> _Table:
    rows = []
    for name, mean in found["per_corruption"].items():
        cells = [f"{100 * found['table'][f'{name}-{severity}']:.2f}" for severity in range(1, 6)]
        title = f"{name} (stand-in)" if name == "frost" and found["frost_stand_in"] else name
        rows.append([title, *cells, f"{100 * mean:.2f}"])
    return _Table("Accuracy in % by corruption and severity", ["corruption", *"12345", "mean"], rows)


def _remarks(card: dict[str, Any]) -> list[str]:
    remarks = [*card["remarks"]]
    if card["protocol"] == "corruptions":
        return remarks
    for result in card["results"]:
        for attack in result["attacks"]:
            if attack["stuck"]:
                remarks.append(
                    f"{attack['name']}: no gradient to follow on {attack['stuck']} of {attack['attacked']} samples."
                )
    return [card["suite"]["caveat"], *remarks] if card["suite"]["caveat"] else remarks


def _provenance(card: dict[str, Any]) -> list[str]:
    machine = card["environment"]
    commit = f" at {machine['commit']}" if machine["commit"] else f", source {machine['source']}"
    lines = [
        f"Suite {card['suite'].get('description', card['suite']['id'])}, seed {card['seed']}.",
        f"Model {card['model']['digest']}; checkpoint selection: {card['model']['selection'] or 'not known'}.",
        f"Data {card['data']['digest']}, ids {_shortened(card['data']['ids'])}.",
        f"{_time(60 * card['minutes'])} on {machine['device']}; hardsphere {machine['hardsphere']}{commit}, "
        f"torch {machine['torch']}, Python {machine['python']}.",
    ]
    command = card.get("about", {}).get("command")
    return [*lines, f"Command: {command}"] if command else lines


# ---------------------------------------------------------------------------------------------------------------------
# Cells
# ---------------------------------------------------------------------------------------------------------------------


def _accuracy(proportion: dict[str, Any]) -> list[str]:
    """[percent, interval, count of n]."""
    if proportion["accuracy"] is None:
        return ["-", "-", "0 of 0"]
    low, high = (100 * end for end in proportion["interval"])
    return [
        f"{100 * proportion['accuracy']:.2f}",
        f"{low:.1f} – {high:.1f}",
        f"{proportion['count']} of {proportion['n']}",
    ]


def _count(number: float) -> str:
    return f"{number:,.1f}" if number < 100 else f"{number:,.0f}"


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def _shortened(ids: str) -> str:
    return ids if len(ids) <= 60 else ids[:57] + "..."
