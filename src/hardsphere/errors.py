"""The one exception that people see."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HardsphereError(ValueError):
    """Something a person can put right: one sentence that says what is wrong and what to do.

    The command line prints the sentence without a traceback and exits with code 2.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """``" Did you mean 'x'?"`` for the known name closest to ``name``, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""
