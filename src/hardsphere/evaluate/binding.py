"""From what a suite writes down to what runs: attacks by name, and what an attack sees of the model."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from torch import nn

from hardsphere.attacks.base import AttackResult
from hardsphere.errors import HardsphereError, nearest
from hardsphere.evaluate.suites import Entry
from hardsphere.sphere import ScaledView, paper_view


def attack_function(entry: Entry) -> Callable[..., AttackResult]:
    if not isinstance(entry.attack, str):
        return entry.attack
    attacks = importlib.import_module("hardsphere.attacks")
    found = getattr(attacks, entry.attack, None)
    if not callable(found):
        known = [name for name in dir(attacks) if not name.startswith("_")]
        raise HardsphereError(f"There is no attack named '{entry.attack}'.{nearest(entry.attack, known)}")
    return found  # type: ignore[no-any-return]


def view(model: nn.Module, name: str) -> nn.Module:
    """What an attack sees of the model: see `hardsphere.evaluate.suites.Entry`."""
    if name == "deployed":
        return model
    if name == "paper":
        return paper_view(model)
    if name == "fn":
        attacks = importlib.import_module("hardsphere.attacks")
        return attacks.feature_normalised(model)  # type: ignore[no-any-return]
    if name.startswith("x"):
        return ScaledView(model, float(name[1:]))
    raise HardsphereError(f"Unknown view '{name}': use deployed, paper, fn or xC for logits times C.")


def averaged(model: nn.Module, eot: int) -> nn.Module:
    if eot == 1:
        return model
    attacks = importlib.import_module("hardsphere.attacks")
    return attacks.expectation(model, eot)  # type: ignore[no-any-return]
