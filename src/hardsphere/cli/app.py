"""What the verbs share: the program itself, and options that mean the same everywhere."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="hardsphere",
    help="Train image classifiers that withstand adversarial perturbations, and tell honestly how robust they are.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; by default a GPU if there is one.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="such as attack.eps=8/255")]
Frost = Annotated[Path | None, typer.Option(help="Folder with the photographs frost1 to frost5.")]


def command_line(without: str | None = None) -> str:
    """The command line as it was typed, for the record; perhaps without one option, which takes a value."""
    words = sys.argv[1:]
    if without in words:
        place = words.index(without)
        words = words[:place] + words[place + 2 :]
    return shlex.join(["hardsphere", *words])
