"""An audit for people: in the terminal, and as Markdown. Both say the same: the verdict, then each finding."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hardsphere.evaluate.audit import Audit

_COLOURS = {"sound": "green", "suspicious": "yellow", "invalid": "red"}
_MEANING = {
    "sound": "No probe found a reason to distrust attacks on this model.",
    "suspicious": "Some attack is weaker than it looks: the model may be less robust than its numbers.",
    "invalid": "Numbers about this model mean nothing until this is put right.",
}


def render_audit(audit: Audit) -> RenderableType:
    """An audit as something rich can print."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    colour = _COLOURS[audit.verdict]
    head = Text.assemble(("Audit  ", "bold"), (audit.verdict, f"bold {colour}"), f"  {_MEANING[audit.verdict]}")
    parts: list[RenderableType] = [head, Text(_scope(audit), "dim")]
    for finding in audit.findings:
        title = Text.assemble((_title(finding.kind.name), f"bold {_COLOURS[finding.severity.value]}"))
        body = Text.assemble((finding.seen, "bold"), "\n", finding.kind.value)
        parts += [title, Padding(body, (0, 0, 0, 2))]
    parts += [Text(note, "dim") for note in audit.notes]
    return Padding(Group(*parts), (1, 0))


def audit_markdown(audit: Audit) -> str:
    """An audit as Markdown."""
    lines = [f"# Audit: {audit.verdict}", "", f"{_MEANING[audit.verdict]} ({_scope(audit)})", ""]
    for finding in audit.findings:
        lines += [f"## {_title(finding.kind.name)} ({finding.severity.value})", ""]
        lines += [f"**{finding.seen}** {finding.kind.value}", ""]
    return "\n".join([*lines, *(f"- {note}" for note in audit.notes)]).rstrip() + "\n"


def _scope(audit: Audit) -> str:
    return f"{audit.ball}, n = {audit.n}, seed {audit.seed}, {audit.seconds:.1f} s"


def _title(name: str) -> str:
    words = name.replace("_", " ").lower().replace("ce ", "CE ")
    return words[0].upper() + words[1:]
