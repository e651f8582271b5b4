"""Tables in Markdown: every page that is written for people has them."""

from __future__ import annotations

from collections.abc import Sequence


def header(cells: Sequence[str], words: int = 1) -> list[str]:
    """The head of a table, whose first columns hold words and whose others hold numbers."""
    return [line(cells), line(["---"] * words + ["---:"] * (len(cells) - words))]


def line(cells: Sequence[str]) -> str:
    """A line of a table."""
    return "| " + " | ".join(escape(cell) for cell in cells) + " |"


def escape(text: str) -> str:
    """The text as it may stand in a cell."""
    return text.replace("|", "\\|")
