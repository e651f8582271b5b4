"""What the pages share: cells of their tables, and the section that says where the models come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hardsphere.markdown import escape, header, line
from hardsphere.reproduce.origins import Plain

NOTHING = "–"


def sentence(text: str) -> str:
    """With a capital letter and a full stop."""
    return f"{text[0].upper()}{text[1:].removesuffix('.')}."


def bullets(sentences: Sequence[str]) -> list[str]:
    """A list, with an empty line after it if there is any."""
    return [*(f"- {escape(text)}" for text in sentences), *([""] if sentences else [])]


# ---------------------------------------------------------------------------------------------------------------------
# Cells
# ---------------------------------------------------------------------------------------------------------------------


def value(cell: Plain | None, usual: int | None = None, sign: str = "") -> str:
    """A number with its interval, and with its own number of images if that is not the column's."""
    if cell is None:
        return NOTHING
    if cell["interval"] is None:
        return _bare(cell["value"], sign)
    low, high = cell["interval"]
    own = f" (n = {cell['n']:,})" if cell["n"] not in (None, usual) else ""
    return f"{cell['value']:{sign}.2f} [{low:{sign}.1f}, {high:{sign}.1f}]{own}"


def difference(cell: Plain | None, usual: int | None = None) -> str:
    """Bold where its interval excludes 0."""
    text = value(cell, usual, "+")
    return f"**{text}**" if cell is not None and cell.get("sign") else text


def printed(cell: Plain | None, sign: str = "") -> str:
    """The paper's own number."""
    if cell is None or cell["paper"] is None:
        return NOTHING
    return _bare(cell["paper"], sign) if cell["interval"] is None else f"{cell['paper']:{sign}.2f}"


def _bare(number: float, sign: str) -> str:
    """A number without an interval, such as epochs, minutes or a distance: no more digits than tell something."""
    digits = "0f" if number == round(number) else "2f" if abs(number) >= 0.1 else "3g"
    return f"{number:{sign}.{digits}}"


def accuracy(proportion: Mapping[str, Any] | None) -> str:
    """A recorded proportion in percent, with its interval."""
    if proportion is None or proportion["accuracy"] is None:
        return NOTHING
    low, high = (100 * end for end in proportion["interval"])
    return f"{100 * proportion['accuracy']:.2f} [{low:.1f}, {high:.1f}]"


def count(n: int | None) -> str:
    return NOTHING if n is None else f"{n:,}"


def minutes(spent: float) -> str:
    """Two decimals, or one digit where they would say nothing."""
    return f"{spent:.2f}" if spent >= 0.05 else f"{spent:.1g}"


# ---------------------------------------------------------------------------------------------------------------------
# Where the models come from
# ---------------------------------------------------------------------------------------------------------------------


def runs_section(runs: Sequence[Plain], command: str, judged: bool = True) -> list[str]:
    """The trainings, how each can be made again, and the commands behind the page.

    Args:
        runs: as `hardsphere.reproduce.origins.training_origin` gives them.
        command: the one that writes the page; others may have worked on it before.
        judged: whether the minutes of judging are those of single runs.
    """
    if not runs:
        return []
    words = ["run", "network", "weights", "commit", "machine"]
    numbers = ["seed", "epoch kept", "training, min", "compiling, min", *(["judging, min"] if judged else [])]
    lines = ["## Runs", "", *header([*words, *numbers], words=len(words))]
    for run in runs:
        cells = [run["title"], run["network"], f"`{run['weights']}`", ", ".join(run["commits"])]
        cells += ["; ".join(run["machines"]), str(run["seed"]), f"{run['best_epoch']} of {run['epochs']}"]
        spent = [run["training_minutes"], run["compiling_minutes"], *([run["judging_minutes"]] if judged else [])]
        lines.append(line([*cells, *map(minutes, spent)]))
    commands = dict.fromkeys([command, *(one for run in runs for one in run["commands"])])
    return [
        *lines,
        "",
        *(f"- {run['title']}: `hardsphere train {run['recipe']}`" for run in runs),
        *_selections(runs),
        *_early_ends(runs),
        "- Minutes are those of the clock: runs that several processes did side by side shared the machine.",
        *(f"- Command: `{one}`" for one in commands if one),
    ]


def _selections(runs: Sequence[Plain]) -> list[str]:
    """Which epoch was kept and why, once for all runs that agree."""
    texts = dict.fromkeys(run["selection"] for run in runs)
    if len(texts) == 1:
        return [f"- Epoch kept: {text}" for text in texts]
    return [f"- Epoch kept of {', '.join(_titles(runs, text))}: {text}" for text in texts]


def _titles(runs: Sequence[Plain], selection: str) -> list[str]:
    return list(dict.fromkeys(run["title"] for run in runs if run["selection"] == selection))


def _early_ends(runs: Sequence[Plain]) -> list[str]:
    """Trainings that did not go to the end, such as FastAT after a collapse."""
    early = [run for run in runs if run["finished"] and not run["finished"].startswith("all ")]
    return [f"- {run['title']}, seed {run['seed']}, ended early: {run['finished']}" for run in early]
