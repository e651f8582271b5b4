"""The scale of the logits: whether the cross-entropy is weak at the one that the model speaks at.

A constant before the logits changes no prediction, but it turns the cross-entropy's gradient: at a small scale towards
the average of all other classes, at a large one into nothing. An honest model speaks near the scale at
which the cross-entropy is strongest, but not at it: after a short training a factor of three gains a few points. What
this looks for is a scale that is wrong by far, or that costs the attack many points.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hardsphere.attacks.pgd import pgd
from hardsphere.evaluate.audit.findings import Finding, Kind
from hardsphere.evaluate.audit.subject import Gain, Subject, mean_gain
from hardsphere.sphere import ScaledView, find_head

STEPS = 20
STARTS = 2
USUAL_SCALE = 15.0
NEAR = 3.0
FAR_POINTS, NEAR_POINTS = 1.0, 5.0
"""What s or 1/s may gain, and what 3 or 1/3 may: an honest model, trained for a short time, is off by such a factor."""
HALF = 0.5
"""Samples that keep more of their margin than this are far from the edge of the ball, and count as if at this."""


@dataclass(frozen=True)
class Trials:
    """What PGD did to the samples at one scale, (starts, samples).

    Attributes:
        broken: whether it broke them.
        kept: the share of its clean margin that a sample keeps, 0 if it is broken.
    """

    broken: Tensor
    kept: Tensor

    def of(self, samples: Tensor) -> Trials:
        return Trials(self.broken[:, samples], self.kept[:, samples])


@dataclass(frozen=True)
class Comparison:
    """PGD on the logits times a factor against PGD as deployed.

    Attributes:
        broken: how many more samples it breaks.
        worn: how much more it takes of the margins, in hundredths of a margin. Its interval tells a gain from chance:
            few samples lie so near the edge of the ball that one attack breaks them and the other does not, but every
            sample that loses half of its margin tells which attack is the stronger one.
    """

    factor: float
    broken: Gain
    worn: Gain

    @property
    def gains(self) -> bool:
        """Whether this factor makes the attack stronger, be it by as little as honest training leaves."""
        return self.broken.points > FAR_POINTS and self.worn.interval[0] > 0

    @property
    def is_finding(self) -> bool:
        near = 1 / NEAR <= self.factor <= NEAR
        return self.gains and self.broken.points > (NEAR_POINTS if near else FAR_POINTS)

    def __str__(self) -> str:
        return (
            f"On the logits times {self.factor:.3g}, cross-entropy PGD-{STEPS} breaks {self.broken} more "
            f"and takes {self.worn} more of the clean margins."
        )

    def to_dict(self) -> dict[str, Any]:
        return {"broken": self.broken.to_dict(), "worn": self.worn.to_dict()}


def logit_scale(subject: Subject) -> Iterator[Finding]:
    """Cross-entropy PGD on the logits times {1/s, 1/3, 1, 3, s}: the best of the factors that make a finding.

    Where none does but one makes the attack stronger, the reader is told in a note.
    """
    compared = compare(sweep(subject), subject.n)
    subject.measured["logit_scale"] = {f"x{one.factor:.3g}": one.to_dict() for one in compared}
    gaining = [one for one in compared if one.gains]
    findings = [one for one in gaining if one.is_finding]
    best = max(findings or gaining, key=lambda one: one.broken.points, default=None)
    if findings and best is not None:
        yield Finding(Kind.LOGIT_SCALE, str(best), {"factor": best.factor, "n": subject.n, **best.to_dict()})
    elif best is not None:
        subject.notes.append(f"{best} Honest training leaves as much: no finding, but quote margin or DLR attacks.")


def sweep(subject: Subject) -> dict[float, Trials]:
    """Trials by factor, every factor from the same random images.

    s is the scale of the model's hypersphere head, even if a view hides it, and 15, the paper's, for other models.
    """
    head = find_head(subject.model)
    scale = head.scale if head is not None and head.scale > NEAR else USUAL_SCALE
    return {factor: _trials(subject, factor) for factor in (1 / scale, 1 / NEAR, 1.0, NEAR, scale)}


def _trials(subject: Subject, factor: float) -> Trials:
    view = subject.model if factor == 1 else ScaledView(subject.model, factor)
    names = [f"scale x{factor:.3g}, start {start}" for start in range(STARTS)]
    for start, name in enumerate(names):
        subject.strike(name, pgd, through=view, stream=f"scale, start {start}", steps=STEPS)
    return Trials(*(torch.stack([seen[name] for name in names]) for seen in (subject.broken, subject.kept)))


def compare(trials: Mapping[float, Trials], n: int) -> list[Comparison]:
    """Each factor against the deployed scale.

    Four factors have four chances to look better, so each interval is one of 98.75 % (Bonferroni).
    """
    factors = [factor for factor in trials if factor != 1.0]
    confidence = 1 - 0.05 / len(factors)
    deployed, worn = trials[1.0], trials[1.0].kept.clamp(max=HALF)
    return [
        Comparison(
            factor,
            mean_gain(trials[factor].broken, deployed.broken, n, confidence),
            mean_gain(worn, trials[factor].kept.clamp(max=HALF), n, confidence),
        )
        for factor in factors
    ]
