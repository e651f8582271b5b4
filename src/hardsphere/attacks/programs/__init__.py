"""Attacks as programs of turns, by the names of their plain forms in `hardsphere.attacks`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hardsphere.attacks.programs.ascent import bim, carlini_linf, fgsm, mim, pgd
from hardsphere.attacks.programs.auto import apgd, apgd_targeted
from hardsphere.attacks.programs.base import Answer as Answer
from hardsphere.attacks.programs.base import Program as Program
from hardsphere.attacks.programs.base import State as State
from hardsphere.attacks.programs.base import Turn as Turn
from hardsphere.attacks.programs.boundary import fab_targeted
from hardsphere.attacks.programs.imitation import feature_attack
from hardsphere.attacks.programs.search import square
from hardsphere.threat import Ball

PROGRAMS: dict[str, Callable[..., Program | None]] = {
    "apgd": apgd,
    "apgd_targeted": apgd_targeted,
    "bim": bim,
    "carlini_linf": carlini_linf,
    "fab_targeted": fab_targeted,
    "feature_attack": feature_attack,
    "fgsm": fgsm,
    "mim": mim,
    "pgd": pgd,
    "square": square,
}


def program(name: str, ball: Ball, **options: Any) -> Program | None:
    """The program of an attack, or None if it has only its plain form, or only that for these options."""
    make = PROGRAMS.get(name)
    return None if make is None else make(ball, **options)
