"""Suites: named lists of attacks, versioned and stamped with a hash, so that one name always means the same evaluation.

A suite says under which protocol it counts. `honest`: a sample is broken if any image an attack kept is wrong, on the
model as deployed. `paper`: the last iterate of one restart, through `paper_view` (raw cosines), as Table 2 of Pang et
al. was measured; its numbers flatter a hypersphere head and are labelled so. In a cascade each attack works on what the
ones before it left standing, so that the suite costs what its first attack costs on samples that fall at once.

One's own suite is a `Suite` made of `Entry` objects; an entry's attack may be any function of the attack contract.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hardsphere.errors import HardsphereError, nearest

PROTOCOLS = ("honest", "paper")
PAPER_EPS = 0.031


@dataclass(frozen=True)
class OfEps:
    """A length that grows with the ball: ``factor * eps``."""

    factor: float

    def __str__(self) -> str:
        return f"{self.factor:.4g}eps"


@dataclass(frozen=True)
class Entry:
    """One attack of a suite with its settings.

    Attributes:
        name: its name in the suite, the ledger and the card; it also keys the attack's noise.
        attack: the name of a function in `hardsphere.attacks`, or such a function.
        options: keyword arguments; a length may be `OfEps`, ``loss`` a name in `hardsphere.attacks.losses`.
        view: what the attack sees of the model: ``deployed``, ``paper`` (raw cosines), ``fn`` (features normalised) or
            ``xC`` (logits times C). The runner always judges the model as deployed.
        limit: work on the first so many samples only, because the attack is expensive; the card says so.
        outside: what to make of a proposal outside the ball: ``project`` it, or ``filter``: count it as failed, which
            is how the paper thresholds attacks that look for the smallest perturbation.
        norms: the norms it works in; in others the entry is left out and the card says so.
        needs: what the runner hands over beside the samples: ``guides`` (other images, for the feature attack) or
            ``source`` (another model, for the transfer attack).
        cost: passes per sample, roughly; used to tell the time left.
        note: what the card says about it.
    """

    name: str
    attack: str | Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    view: str = "deployed"
    limit: int | None = None
    outside: str = "project"
    norms: tuple[str, ...] = ("linf", "l2")
    needs: tuple[str, ...] = ()
    cost: float = 100.0
    note: str = ""

    def describe(self) -> dict[str, Any]:
        """The entry in plain values: what the hash is taken of and what the card prints."""
        attack = self.attack if isinstance(self.attack, str) else _function(self.attack)
        options = {key: _plain(value) for key, value in sorted(self.options.items())}
        return {
            "name": self.name,
            "attack": attack,
            "options": options,
            "view": self.view,
            "limit": self.limit,
            "outside": self.outside,
        }


@dataclass(frozen=True)
class Suite:
    """A named evaluation.

    Attributes:
        name: what `--suite` is given.
        version: raised whenever the entries change.
        protocol: ``honest`` or ``paper``.
        entries: the attacks, in order.
        cascade: attack only what the attacks before left standing.
        caveat: what a reader of its numbers must know.
        eps: the radius it is defined at, if it has one of its own.
    """

    name: str
    version: int
    protocol: str
    entries: tuple[Entry, ...]
    cascade: bool = True
    caveat: str = ""
    eps: float | None = None

    def __post_init__(self) -> None:
        names = [entry.name for entry in self.entries]
        if not names:
            raise HardsphereError(f"The suite '{self.name}' holds no attacks.")
        if len(set(names)) < len(names) or CARRIED in names:
            raise HardsphereError(f"The attacks of suite '{self.name}' need different names, none of them '{CARRIED}'.")
        if self.protocol not in PROTOCOLS:
            raise HardsphereError(f"Unknown protocol '{self.protocol}': use one of {', '.join(PROTOCOLS)}.")

    @property
    def hash(self) -> str:
        """A short digest of everything that decides its numbers."""
        content = [self.name, self.version, self.protocol, self.cascade, [entry.describe() for entry in self.entries]]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def id(self) -> str:
        return f"{self.name}/{self.version}"

    def __str__(self) -> str:
        return f"{self.id}: {','.join(entry.name for entry in self.entries)} [{self.hash}]"


CARRIED = "carried"
"""The first line of a cascade at a larger radius: samples that had fallen inside a smaller ball already."""


def _plain(value: Any) -> Any:
    if isinstance(value, OfEps):
        return str(value)
    return _function(value) if callable(value) else value


def _function(function: Any) -> str:
    """A function of one's own by its name, and a digest of what it does: its code, its defaults, its closure's values.

    Objects in a closure, which change while the function is used, are not looked into.
    """
    if isinstance(function, functools.partial):
        return f"partial({_function(function.func)}, {function.args}, {sorted(function.keywords.items())})"
    name = f"{function.__module__}:{getattr(function, '__qualname__', type(function).__qualname__)}"
    if name.startswith("hardsphere."):
        return name  # what ours does is in the version of the suite
    held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    held += getattr(function, "__dict__", {}).values()
    values = [value for value in held if isinstance(value, int | float | str | tuple | OfEps)]
    does = [_code(function), getattr(function, "__defaults__", None), getattr(function, "__kwdefaults__", None)]
    text = re.sub(r" at 0x[0-9a-f]+", "", repr([*does, *values]))
    return f"{name}#{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _code(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):  # typed in by hand, or an object that can be called
        code = getattr(function, "__code__", None)
        return "" if code is None else f"{code.co_code.hex()} {code.co_consts} {code.co_names}"


def suite_named(name: str) -> Suite:
    """One of the suites of this file."""
    if name not in SUITES:
        raise HardsphereError(f"Unknown suite '{name}': use one of {', '.join(SUITES)}.{nearest(name, SUITES)}")
    return SUITES[name]


def as_suite(suite: str | Suite | list[Entry] | tuple[Entry, ...]) -> Suite:
    """A suite by name, as it is, or made of a list of entries (a cascade under the honest protocol)."""
    if isinstance(suite, str):
        return suite_named(suite)
    if isinstance(suite, Suite):
        return suite
    return Suite("custom", 1, "honest", tuple(suite))


# ---------------------------------------------------------------------------------------------------------------------
# The suites
# ---------------------------------------------------------------------------------------------------------------------

_ANY_NORM = ("linf", "l2", "l1")
_LINF = ("linf",)


def _gradient(name: str, attack: str, steps: int, times: int = 1, **rest: Any) -> Entry:
    """An attack of so many steps, each a forward and a backward pass, which is as dear as two forward ones."""
    fields = {key: rest.pop(key) for key in ("view", "limit", "outside", "needs", "note", "norms") if key in rest}
    return Entry(name, attack, {"steps": steps, **rest}, cost=3.0 * steps * times, **fields)


def _queries(name: str, attack: str, queries: int, limit: int | None = None, note: str = "", **rest: Any) -> Entry:
    """An attack of so many queries, each a forward pass."""
    norms = rest.pop("norms", _LINF)
    return Entry(name, attack, {"queries": queries, **rest}, limit=limit, norms=norms, cost=float(queries), note=note)


_STANDARD = (
    _gradient("apgd-ce", "apgd", 100, loss="cross_entropy", restarts=1),
    _gradient("apgd-t", "apgd_targeted", 100, 9, targets=9, restarts=1),
    _gradient("fab-t", "fab_targeted", 100, 9, targets=9, restarts=1),
    _queries("square", "square", 5000, norms=("linf", "l2")),
)

STANDARD = Suite(
    "standard",
    1,
    "honest",
    _STANDARD,
    caveat="AutoAttack's standard set: an upper bound on robust accuracy, tight for most deterministic models.",
)

QUICK = Suite(
    "quick",
    1,
    "honest",
    (
        _gradient("pgd-10", "pgd", 10, loss="cross_entropy", norms=_ANY_NORM),
        _gradient("pgd-20-margin", "pgd", 20, loss="margin", norms=_ANY_NORM),
        _gradient("apgd-t-20x3", "apgd_targeted", 20, 3, targets=3, restarts=1),
    ),
    caveat=(
        "Takes seconds and is no verdict: few steps, three targets and white-box gradients only, so it may overstate "
        "robustness by some points and cannot see masked gradients. Use standard for a number to publish."
    ),
)

_EXTRAS = (
    _gradient("pgd-100-margin", "pgd", 100, 5, restarts=5, loss="margin", norms=_ANY_NORM),
    _gradient("cw-100", "carlini_linf", 100, 5, restarts=5, norms=_LINF),
    _gradient("pgd-100-dlr", "pgd", 100, 5, restarts=5, loss="dlr", norms=_ANY_NORM),
    *(
        _gradient(f"pgd-100-ce-x{factor}", "pgd", 100, loss="cross_entropy", view=f"x{factor}", norms=_ANY_NORM)
        for factor in ("0.1", "0.3", "1", "3", "10")
    ),
    _gradient("gama-100", "gama", 100, 3, restarts=3),
    _gradient("mim-100", "mim", 100, loss="margin", step_size=OfEps(0.1)),
    _gradient("apgd-dlr", "apgd", 100, 5, loss="dlr", restarts=5),
    _gradient("fab", "fab", 100, 9, restarts=1),
    _queries("rays", "rays", 10000, limit=1000),
    _gradient("transfer", "transfer", 40, 2, restarts=2, needs=("source",), norms=_ANY_NORM),
    Entry("noise", "random_noise", {"draws": 100}, norms=_ANY_NORM, cost=100.0),
)

FULL = Suite(
    "full",
    1,
    "honest",
    (*_STANDARD, *_EXTRAS),
    caveat="The standard set and then every other attack that has been seen to go further, on what still stands.",
)

_TABLE_8_LIMIT = 1000

BLACKBOX = Suite(
    "blackbox",
    1,
    "honest",
    (
        _queries("zoo", "zoo", 20000, _TABLE_8_LIMIT, norms=_LINF),
        *(
            Entry(
                f"{attack}-{steps}",
                attack,
                {"steps": steps, "pairs": 128, "sigma": 0.001, "step_size": OfEps(1 / 8)},
                limit=_TABLE_8_LIMIT,
                norms=_LINF,
                cost=257.0 * steps,
            )
            for attack in ("spsa", "nes")
            for steps in (20, 50, 80)
        ),
        _queries("rays", "rays", 10000, _TABLE_8_LIMIT),
        _queries("square", "square", 5000, norms=("linf", "l2")),
        _gradient("transfer", "transfer", 40, 1, restarts=1, needs=("source",), norms=_ANY_NORM),
        Entry("noise", "random_noise", {"draws": 100}, norms=_ANY_NORM, cost=100.0, note="the control"),
    ),
    cascade=False,
    caveat="No attack here sees a gradient of the model: weaker than standard, unless gradients are masked.",
)

_STEP = OfEps(0.003 / PAPER_EPS)

PAPER = Suite(
    "paper",
    1,
    "paper",
    (
        _gradient("pgd-20", "pgd", 20, loss="cross_entropy", step_size=_STEP, keep="last", view="paper"),
        _gradient("pgd-500", "pgd", 500, loss="cross_entropy", step_size=_STEP, keep="last", view="paper"),
        _gradient("mim-20", "mim", 20, loss="cross_entropy", step_size=_STEP, keep="last", view="paper"),
        Entry("fgsm", "fgsm", {"loss": "cross_entropy", "keep": "last"}, view="paper", norms=_LINF, cost=3.0),
        _gradient(
            "deepfool", "deepfool", 100, 4, view="paper", outside="filter", note="smallest perturbation, filtered"
        ),
        _gradient("cw-100", "carlini_linf", 100, keep="last", view="paper", norms=_LINF, note="PGD on the margin"),
        _gradient(
            "cw-l2",
            "carlini_l2",
            1000,
            5,
            searches=5,
            view="paper",
            outside="filter",
            limit=1000,
            note="legacy: minimum l2, then counted only inside the ball; measures the filter, not robustness",
        ),
        _gradient(
            "feature",
            "feature_attack",
            50,
            100,
            step_size=OfEps(1 / 8),
            restarts=100,
            view="paper",
            limit=1000,
            needs=("guides",),
            note="the paper gives no settings",
        ),
        _gradient("fab-20", "fab", 20, 9, restarts=1, view="paper", outside="filter"),
        _gradient("pgd-20-adaptive", "pgd", 20, loss="adaptive", step_size=_STEP, keep="last", note="with s and m"),
        _gradient("pgd-500-adaptive", "pgd", 500, loss="adaptive", step_size=_STEP, keep="last", note="with s and m"),
    ),
    cascade=False,
    caveat=(
        "The paper's protocol: raw cosines, last iterate, one restart. Cross-entropy attacks on raw cosines are weak, "
        "so these numbers flatter a hypersphere head: compare them with the paper's Table 2 and with nothing else."
    ),
    eps=PAPER_EPS,
)

SUITES: dict[str, Suite] = {suite.name: suite for suite in (QUICK, PAPER, STANDARD, BLACKBOX, FULL)}
