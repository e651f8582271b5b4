"""The report card: what an evaluation says, in plain values that fit into JSON, each with what it rests on.

`hardsphere.report.card` shows it. Every proportion comes with its count and Wilson's 95 % interval; the card as a whole
with the protocol, the suite and its hash, the seed, the digests of model and data, the commit, the hardware and time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hardsphere.corruptions import CorruptionScores
from hardsphere.evaluate.ledger import Ledger, Sample
from hardsphere.evaluate.samples import Samples
from hardsphere.evaluate.statistics import wilson
from hardsphere.evaluate.suites import CARRIED, Entry, Suite
from hardsphere.runtime import environment
from hardsphere.threat import Ball

SCHEMA = "hardsphere.card/1"


def make_card(
    ledger: Ledger,
    suite: Suite,
    balls: Sequence[Ball],
    classes: int,
    samples: Samples,
    device: torch.device,
    remarks: Sequence[str],
    about: dict[str, Any],
) -> dict[str, Any]:
    """The card of a finished evaluation.

    Args:
        remarks: what was other than the suite says.
        about: what the caller knows: ``target``, ``data``, ``selection``, ``command`` and whatever else it wants kept.
    """
    known = ledger.samples()
    names = samples.class_names or tuple(str(index) for index in range(classes))
    results = [_result(ledger, suite, balls, index, known, names) for index in range(len(balls))]
    correct = sum(sample.correct for sample in known)
    identity = ledger.identity
    return {
        "schema": SCHEMA,
        "target": about.pop("target", None),
        "model": {"digest": identity["model"], "classes": classes, "selection": about.pop("selection", None)},
        "data": _data(ledger, names, about),
        "protocol": suite.protocol,
        "suite": {
            "id": suite.id,
            "hash": suite.hash,
            "description": str(suite),
            "cascade": suite.cascade,
            "caveat": suite.caveat,
        },
        "threat": {"norm": balls[0].norm, "eps": [ball.eps for ball in balls]},
        "seed": identity["seed"],
        "eot": identity["eot"],
        "shard": identity["shard"],
        "clean": proportion(correct, len(known)),
        "robust": results[-1]["robust"],
        "results": results,
        "remarks": list(remarks),
        "minutes": sum(row.seconds for row in ledger.rows()) / 60,
        "environment": environment(device),
        **({"about": about} if about else {}),
    }


def corruption_card(
    ledger: Ledger,
    suite: str,
    scores: CorruptionScores,
    corrupted: str,
    samples: Samples,
    device: torch.device,
    about: dict[str, Any],
) -> dict[str, Any]:
    """The card of a finished evaluation under common corruptions.

    Args:
        corrupted: where the corrupted images came from, in words.
        about: as for `make_card`.
    """
    known, identity = ledger.samples(), ledger.identity
    return {
        "schema": SCHEMA,
        "target": about.pop("target", None),
        "model": {"digest": identity["model"], "selection": about.pop("selection", None)},
        "data": _data(ledger, samples.class_names, about),
        "protocol": "corruptions",
        "suite": {"id": suite, "hash": identity["suite_hash"]},
        "seed": identity["seed"],
        "clean": proportion(sum(sample.correct for sample in known), len(known)),
        "corruptions": {
            "from": corrupted,
            "frost_stand_in": scores.frost_stand_in,
            "mca": scores.mca,
            "mca_without_frost": scores.mca_without_frost,
            "mce": scores.mce,
            "baseline": scores.baseline,
            "per_corruption": scores.per_corruption,
            "table": {f"{name}-{severity}": accuracy for (name, severity), accuracy in scores.table.items()},
        },
        "remarks": [scores.note] if scores.note else [],
        "minutes": sum(row.seconds for row in ledger.rows()) / 60,
        "environment": environment(device),
        **({"about": about} if about else {}),
    }


def _data(ledger: Ledger, names: Sequence[str], about: dict[str, Any]) -> dict[str, Any]:
    known = ledger.samples()
    return {
        "name": about.pop("data", None),
        "digest": ledger.identity["data"],
        "n": len(known),
        "ids": ranges(sample.sample for sample in known),
        "class_names": list(names),
    }


def _result(
    ledger: Ledger, suite: Suite, balls: Sequence[Ball], index: int, known: Sequence[Sample], names: Sequence[str]
) -> dict[str, Any]:
    """One point of the curve: every attack, the worst case and the classes inside one ball."""
    ball = balls[index]
    present = set(ledger.attacks(ball.eps))
    lines, before = [], []
    if CARRIED in present:
        settings = {"attack": CARRIED, "options": {}, "note": f"broken inside {balls[index - 1]} already"}
        lines.append(_line(ledger, ball, CARRIED, settings, (), None))
        before.append(CARRIED)
    for entry in suite.entries:
        if entry.name in present:
            earlier = tuple(before) if suite.cascade else ()
            lines.append(_line(ledger, ball, entry.name, _settings(entry), earlier, entry.limit))
            before.append(entry.name)
    robust = ledger.robust(ball.eps)
    return {
        "eps": ball.eps,
        "ball": str(ball),
        "robust": proportion(len(robust), len(known)),
        "attacks": lines,
        "broken_by": _broken_by(ledger, ball),
        "classes": [_class(name, label, known, robust) for label, name in enumerate(names)],
    }


def _line(
    ledger: Ledger, ball: Ball, name: str, settings: dict[str, Any], before: Sequence[str], limit: int | None
) -> dict[str, Any]:
    tally = ledger.tally(ball.eps, name, before=before, limit=limit)
    return {
        "name": name,
        **settings,
        **proportion(tally.robust, tally.n),
        "attacked": tally.attacked,
        "broken": tally.broken,
        "stuck": tally.stuck,
        # Per sample that it worked on: what the attack costs, not how many samples others had left it.
        "forwards": tally.forwards / max(tally.attacked, 1),
        "backwards": tally.backwards / max(tally.attacked, 1),
        "seconds": tally.seconds,
    }


def _settings(entry: Entry) -> dict[str, Any]:
    described = entry.describe()
    return {"attack": described["attack"], "options": described["options"], "view": entry.view, "note": entry.note}


def _class(name: str, label: int, known: Sequence[Sample], robust: set[int]) -> dict[str, Any]:
    own = [sample for sample in known if sample.label == label]
    return {
        "name": name,
        "n": len(own),
        "clean": proportion(sum(sample.correct for sample in own), len(own)),
        "robust": proportion(sum(sample.sample in robust for sample in own), len(own)),
    }


def _broken_by(ledger: Ledger, ball: Ball) -> dict[str, int]:
    """How many samples each attack was the first to break."""
    counts: dict[str, int] = {}
    for name in ledger.broken(ball.eps).values():
        counts[name] = counts.get(name, 0) + 1
    return counts


def proportion(count: int, n: int) -> dict[str, Any]:
    """A proportion with its count and Wilson's 95 % interval; the accuracy of nothing is none."""
    return {"accuracy": count / n if n else None, "count": count, "n": n, "interval": list(wilson(count, n))}


def ranges(ids: Iterable[int]) -> str:
    """Ids in short: ``0-99,105``."""
    parts: list[list[int]] = []
    for number in sorted(ids):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in parts)
