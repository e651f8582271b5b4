"""The command line: verbs over the library. Parsing and printing only; torch is imported when a verb needs it."""

from __future__ import annotations

import os
import sqlite3
import sys

from hardsphere.cli import judging, making, research, training
from hardsphere.cli.app import app
from hardsphere.errors import HardsphereError

VERBS = (
    training.train,
    training.recipes,
    training.show,
    training.predict,
    judging.evaluate,
    judging.audit,
    research.reproduce,
    research.sweep,
    training.demo,
)
for verb in VERBS:
    app.command()(verb)
app.add_typer(making.data_app, name="data")
app.add_typer(making.corrupt_app, name="corrupt")
app.add_typer(research.bench_app, name="bench")


def main() -> None:
    """Run the command line; what a person can put right is one sentence and exit code 2."""
    # Idle threads that spin for long make small networks many times slower as soon as another program wants the
    # processor: an evaluation with 2 threads on 2 cores, beside another like it, 25 times at 20,000 turns and 3.5
    # times at 2,000, which cost it 7 % of its speed on an idle machine. torch reads this when it is imported, which no
    # verb has done yet.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    try:
        app()
    except HardsphereError as error:
        print(f"hardsphere: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    except BrokenPipeError:  # whoever read the output has seen enough
        sys.stderr.close()
        sys.exit(141)
    except (OSError, sqlite3.OperationalError) as error:
        # A full or read-only disk. Files are replaced whole and ledgers written in transactions, so nothing is lost.
        print(f"hardsphere: {error}. What was finished is kept; run it again once that is put right.", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    except SystemExit as left:
        if left.code == _INTERRUPTED:
            print(f"hardsphere: stopped.{_going_on(sys.argv[1:3])}", file=sys.stderr)  # noqa: T201
        raise


_INTERRUPTED = 130  # typer's exit code after Ctrl-C


def _going_on(words: list[str]) -> str:
    """How to go on with what was interrupted, by the first words of its command."""
    if words[:1] == ["train"]:
        return " The same command with --resume goes on."
    known = (["evaluate"], ["reproduce"], ["sweep"], ["corrupt"], ["demo"])
    return " The same command goes on." if words[:1] in known or words == ["bench", "sweep"] else ""
