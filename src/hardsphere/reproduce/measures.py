"""What can be measured on a trained model: a suite of attacks, common corruptions, or any function of one's own.

A measurement says in plain values what decides its numbers (`describe`), so that a recorded one is recognised, and
gives facts that fit into JSON together with per-sample outcomes. A new kind is one class here and one line in
`hardsphere.reproduce.reading.KINDS`, which says how people write it in a plan.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from hardsphere.corruptions import CORRUPTIONS
from hardsphere.data import Source
from hardsphere.errors import HardsphereError, nearest
from hardsphere.evaluate import Evaluation, Outcome, Progress, Suite, evaluate, suite_named
from hardsphere.evaluate.card import proportion
from hardsphere.evaluate.common import evaluate_corruptions
from hardsphere.reproduce.outcomes import Bits
from hardsphere.threat import Ball
from hardsphere.train import Deployed

ROBUST = "robust"
"""The column of the worst case over a whole suite."""


@dataclass(frozen=True)
class Subject:
    """A trained model and everything needed to judge it.

    Attributes:
        deployed: the model with its configuration.
        test: the test images.
        folder: for ledgers, so that an interrupted measurement goes on.
        device: where to run.
        batch: images at once.
        about: what cards tell.
        progress: called after every batch; may raise to stop.
    """

    deployed: Deployed
    test: Source
    folder: Path
    device: torch.device
    batch: int
    about: Mapping[str, Any] = field(default_factory=dict)
    progress: Callable[[Progress], None] | None = None


@dataclass(frozen=True)
class Measured:
    """What came out: facts for JSON, and one column of booleans per attack or corruption."""

    facts: dict[str, Any]
    outcomes: dict[str, Bits] = field(default_factory=dict)


class Measurement(Protocol):
    """Anything that can be measured on one trained model."""

    @property
    def name(self) -> str: ...
    def describe(self) -> dict[str, Any]: ...
    def measure(self, subject: Subject) -> Measured: ...


@dataclass(frozen=True)
class Attacks:
    """A suite of attacks.

    Attributes:
        suite: the suite.
        eps: the radius; none for the suite's own, or else the run's; ``"run"`` for the run's in any case.
        limit: the first so many test images; none for all of them.
        seed: of the attacks.
        changes: what is other than in the named suite, for people.
    """

    name: str
    suite: Suite
    eps: float | str | None = None
    limit: int | None = None
    seed: int = 0
    changes: tuple[str, ...] = ()

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "suite",
            "suite": self.suite.id,
            "hash": self.suite.hash,
            "content": replace(self.suite, entries=tuple(replace(one, limit=None) for one in self.suite.entries)).hash,
            "protocol": self.suite.protocol,
            "eps": self.eps,
            "limit": self.limit,
            "seed": self.seed,
        }

    def ball(self, own: Ball) -> Ball:
        """The ball in which a run, trained for its own ball, is judged."""
        if self.eps is None and self.suite.eps is not None:
            return Ball(own.norm, self.suite.eps)
        return own if self.eps is None or isinstance(self.eps, str) else Ball(own.norm, self.eps)

    def measure(self, subject: Subject) -> Measured:
        ball = self.ball(subject.deployed.ball)
        evaluation = evaluate(
            subject.deployed.model,
            subject.test,
            ball=ball,
            suite=self.suite,
            seed=self.seed,
            limit=self.limit,
            batch=subject.batch,
            out=subject.folder,
            progress=subject.progress,
            device=subject.device,
            about=subject.about,
        )
        try:
            outcomes = suite_outcomes(evaluation)
        finally:
            evaluation.ledger.close()
        card = evaluation.card
        settings = {line["name"]: line for line in card["results"][-1]["attacks"]}
        columns = {}
        for name, bits in outcomes.items():
            line = settings.get(name, {})
            columns[name] = proportion(int(bits.sum()), len(bits))
            columns[name] |= {key: line[key] for key in ("view", "options", "note", "seconds") if key in line}
            assert not line or line["count"] == columns[name]["count"], f"{name}: the bits and the card disagree"
        return Measured(
            {
                "protocol": self.suite.protocol,
                "suite": str(self.suite),
                "cascade": self.suite.cascade,
                "ball": str(ball),
                "norm": ball.norm,
                "eps": ball.eps,
                "changes": list(self.changes),
                **_common(card),
                "columns": columns,
            },
            outcomes,
        )


def suite_outcomes(evaluation: Evaluation) -> dict[str, Bits]:
    """Who stands after each attack of an evaluation: the clean images, each attack (in a cascade with all before it),
    and the worst case. An attack with a limit has a column of that length."""
    ledger, eps = evaluation.ledger, evaluation.balls[-1].eps
    known = ledger.samples()
    place = {sample.sample: index for index, sample in enumerate(known)}
    correct = np.array([sample.correct for sample in known], np.bool_)
    present, fallen = set(ledger.attacks(eps)), np.zeros(len(known), np.bool_)
    columns = {"clean": correct}
    for entry in evaluation.suite.entries:
        if entry.name not in present:
            continue
        if not evaluation.suite.cascade:
            fallen = np.zeros(len(known), np.bool_)
        for row in ledger.rows(eps, entry.name):
            fallen[place[row.sample]] |= row.outcome == Outcome.BROKEN.value
        columns[entry.name] = (correct & ~fallen)[: entry.limit]
    robust = ledger.robust(eps)
    columns[ROBUST] = np.array([sample.sample in robust for sample in known], np.bool_)
    return columns


@dataclass(frozen=True)
class Corruptions:
    """Common corruptions: 15 at 5 severities, a column each.

    Attributes:
        directory: a set in an official layout; none makes the images on the fly.
        names: which corruptions.
        limit: the first so many test images; none for all of them.
        seed: of corruptions made on the fly.
    """

    name: str = "corruptions"
    directory: str | None = None
    names: tuple[str, ...] = CORRUPTIONS
    limit: int | None = None
    seed: int = 0

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "corruptions",
            "set": self.directory,
            "names": list(self.names),
            "limit": self.limit,
            "seed": self.seed,
        }

    def measure(self, subject: Subject) -> Measured:
        found = evaluate_corruptions(
            subject.deployed.model,
            subject.test,
            self.directory,
            names=self.names,
            seed=self.seed,
            limit=self.limit,
            batch=subject.batch,
            out=subject.folder,
            device=subject.device,
            progress=subject.progress,
            about=subject.about,
        )
        known = found.ledger.samples()
        place = {sample.sample: index for index, sample in enumerate(known)}
        outcomes = {"clean": np.array([sample.correct for sample in known], np.bool_)}
        for cell in found.card["corruptions"]["table"]:
            outcomes[cell] = np.zeros(len(known), np.bool_)
            for row in found.ledger.rows(0.0, cell):
                outcomes[cell][place[row.sample]] = row.outcome == Outcome.HELD.value
        found.ledger.close()
        scores = found.card["corruptions"]
        facts = {
            "protocol": "corruptions",
            **_common(found.card),
            **{key: scores[key] for key in ("from", "frost_stand_in", "mca", "mca_without_frost", "per_corruption")},
            "columns": {name: proportion(int(bits.sum()), len(bits)) for name, bits in outcomes.items()},
        }
        return Measured(facts, outcomes)


@dataclass(frozen=True)
class Call:
    """A function of one's own: it is given the `Subject` and returns facts that fit into JSON, or a `Measured`.

    Attributes:
        function: the function, or ``package.module:function``.
        options: keyword arguments for it.
    """

    name: str
    function: str | Callable[..., Measured | Mapping[str, Any]]
    options: Mapping[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        function = self.function
        name = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
        return {"kind": "call", "function": name, "options": dict(sorted(self.options.items()))}

    def measure(self, subject: Subject) -> Measured:
        function = self.resolve()
        found = function(subject, **self.options)
        return found if isinstance(found, Measured) else Measured({"protocol": "call", **found})

    def resolve(self) -> Callable[..., Measured | Mapping[str, Any]]:
        """The function itself."""
        if not isinstance(self.function, str):
            return self.function
        module, colon, name = self.function.partition(":")
        try:
            found = getattr(importlib.import_module(module), name) if colon else None
        except (ImportError, AttributeError, ValueError) as reason:
            raise HardsphereError(f"The function '{self.function}' cannot be had ({reason}).") from None
        if not callable(found):
            raise HardsphereError(f"'{self.function}' is no function: write package.module:function.")
        return found  # type: ignore[no-any-return]


def _common(card: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "n": card["data"]["n"],
        "data": card["data"]["digest"],
        "ids": card["data"]["ids"],
        "model": card["model"]["digest"],
        "seed": card["seed"],
        "minutes": card["minutes"],
        "crafting": card.get("about", {}).get("crafting"),
        "remarks": card["remarks"],
    }


# ---------------------------------------------------------------------------------------------------------------------
# Suites that differ from a named one
# ---------------------------------------------------------------------------------------------------------------------


def attacks(
    suite: str | Suite,
    *,
    name: str | None = None,
    only: Sequence[str] | None = None,
    limits: Mapping[str, int] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    eps: float | str | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> Attacks:
    """A suite, perhaps with fewer attacks, fewer samples for some of them, or other settings.

    Args:
        only: the attacks to keep, by name.
        limits: the first so many samples for an attack.
        options: other settings of an attack, such as ``{"pgd-500": {"steps": 50}}``; the suite's name then says so.
    """
    base = suite_named(suite) if isinstance(suite, str) else suite
    limits, options = dict(limits or {}), dict(options or {})
    known = [entry.name for entry in base.entries]
    for wanted in [*(only or ()), *limits, *options]:
        if wanted not in known:
            raise HardsphereError(f"The suite '{base.name}' has no attack '{wanted}'.{nearest(wanted, known)}")
    kept = [entry for entry in base.entries if only is None or entry.name in only]
    changes = [f"{entry}: {_settings(values)}" for entry, values in options.items() if only is None or entry in only]
    entries = tuple(
        replace(
            entry,
            limit=limits.get(entry.name, entry.limit),
            options={**entry.options, **options.get(entry.name, {})},
        )
        for entry in kept
    )
    title = f"{base.name}-changed" if changes else base.name
    return Attacks(name or base.name, replace(base, name=title, entries=entries), eps, limit, seed, tuple(changes))


def _settings(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())
