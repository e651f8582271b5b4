"""What the verbs share: the program itself, and options that mean the same everywhere."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="hardsphere",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from hardsphere import __version__

        typer.echo(f"hardsphere {__version__}")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train image classifiers that withstand adversarial perturbations, and tell honestly how robust they are."""


Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; by default a GPU if there is one.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="such as attack.eps=8/255")]
Frost = Annotated[Path | None, typer.Option(help="Folder with the photographs frost1 to frost5.")]


def command_line(without: str | None = None) -> str:
    """The command line as it was typed, for the record; perhaps without one option, which takes a value."""
    words = iter(sys.argv[1:])
    kept = []
    for word in words:
        if word == without:
            next(words, None)
        elif without is None or not word.startswith(f"{without}="):
            kept.append(word)
    return shlex.join(["hardsphere", *kept])
