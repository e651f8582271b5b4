"""What an audit can find, as values: each kind of finding is the text that its reader sees.

A kind says what was seen, what it means and what to do; a `Finding` adds the evidence. ``invalid`` findings make every
number about the model worthless until they are put right. ``suspicious`` ones say that some attack was weaker than it
looks, so that the model may be less robust than its numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hardsphere.threat import Ball

SCHEMA = "hardsphere.audit/1"


class Severity(Enum):
    """How much a finding costs."""

    SUSPICIOUS = "suspicious"
    INVALID = "invalid"


class Kind(Enum):
    """What an audit looks for."""

    INPUT_RANGE = (
        "Pixels lie outside [0, 1], so that eps has no meaning and attacks cut the images off. "
        "Hand over images in [0, 1] and put any normalisation inside the model."
    )
    NORMALISATION_OUTSIDE = (
        "The model gets far more images right once they are normalised: it expects pixels that this audit was not "
        "given. Put the normalisation inside the model, so that it takes images in [0, 1]."
    )
    TRAIN_MODE = (
        "The model is in train mode and answers differently there: dropout and batch statistics act on every answer. "
        "Call model.eval() and measure again."
    )
    NON_FINITE_OUTPUT = (
        "The model answers with NaN or infinity. Look for a division by zero, an overflow or a bad checkpoint."
    )
    PROBABILITIES = (
        "The model returns probabilities, not logits: a second softmax flattens the cross-entropy, and where the first "
        "saturates no gradient is left. Return the values before the softmax."
    )
    BATCH_DEPENDENT = (
        "What the model says about an image depends on the other images of the batch, so no outcome belongs to a "
        "sample. Freeze the batch statistics, or evaluate with batches of one."
    )
    REMEMBERS = (
        "What the model says about an image depends on what it was asked before: attacks ask it thousands of times and "
        "may fail at its memory alone, while an image that is handed in once meets none. Audit and evaluate the "
        "network without its memory."
    )
    NON_FINITE_GRADIENT = (
        "Gradients by the image are NaN or infinite, so gradient attacks had nothing to follow. Find the operation "
        "that overflows or divides by zero, and rely on attacks without gradients until then."
    )
    ZERO_GRADIENT = (
        "Gradients by the image are exactly zero, so gradient attacks had nothing to follow: a saturated softmax, "
        "rounding, or a detached graph. Attack a differentiable stand-in (BPDA) or logits at a smaller scale, and add "
        "black-box attacks."
    )
    RANDOMISED = (
        "Two passes over the same image give different answers. Attack the expectation over that randomness (--eot "
        "20), and count a sample as robust only if the averaged answer holds."
    )
    LOGIT_SCALE = (
        "Cross-entropy PGD breaks more samples when the logits are multiplied by a constant, which changes no "
        "prediction: at the scale the model speaks at, that attack is weak. Attack at the stronger scale, or with a "
        "loss that has no scale (margin, DLR), and do not quote numbers of cross-entropy attacks at this one."
    )
    CE_WEAKER_THAN_MARGIN = (
        "PGD on the cross-entropy breaks far fewer samples than PGD on the margin: the cross-entropy is the wrong loss "
        "for this model. Quote attacks on the margin or the DLR instead."
    )
    BLACK_BOX_STRONGER = (
        "An attack that sees only outputs breaks samples that gradient attacks do not: the gradients mislead. Look for "
        "a part that is not differentiable or saturates, and attack a differentiable stand-in for it (BPDA)."
    )
    TRANSFER_STRONGER = (
        "Images made on another model break samples that attacks on this model do not: its own gradients mislead. "
        "Include transfer attacks in the worst case, and look for masked gradients."
    )
    STILL_HELPING = (
        "More steps or restarts of the same attack go on breaking samples: it has not converged. Raise both until the "
        "number stands still, and quote that one."
    )
    HUGE_EPS_HOLDS = (
        "With any image of the box allowed some samples still hold, although no classifier can be robust there: the "
        "attack fails, not the adversary. Look for gradients that vanish away from the data."
    )
    NOISE_AS_STRONG = (
        "Random noise breaks as many samples as gradient attacks: the gradients carry no information. Treat the "
        "model as masked, and use attacks without gradients."
    )
    EVALUATION_TOO_WEAK = (
        "The short probes of this audit break samples that the evaluation counts as robust. Evaluate with the "
        "standard suite, or with more steps and restarts."
    )
    SELECTED_ON_TEST = (
        "The checkpoint was chosen by its results on test data, so that its test numbers are biased upwards. Choose on "
        "a split held out of the training data and measure again."
    )

    @property
    def severity(self) -> Severity:
        """What a finding of this kind costs, unless its evidence says otherwise."""
        return Severity.INVALID if self in _INVALID else Severity.SUSPICIOUS


_INVALID = frozenset(
    {
        Kind.INPUT_RANGE,
        Kind.NORMALISATION_OUTSIDE,
        Kind.TRAIN_MODE,
        Kind.NON_FINITE_OUTPUT,
        Kind.PROBABILITIES,
        Kind.BATCH_DEPENDENT,
        Kind.REMEMBERS,
    }
)


@dataclass(frozen=True)
class Finding:
    """Something that was seen.

    Attributes:
        kind: what it is; ``kind.value`` is the text for the reader.
        seen: the evidence as a sentence.
        evidence: the numbers behind the sentence, in plain values.
        severity: the kind's own unless the evidence is worse, such as gradients that are zero for most samples.
    """

    kind: Kind
    seen: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    severity: Severity = Severity.SUSPICIOUS

    def __str__(self) -> str:
        return f"{self.kind.name} ({self.severity.value}): {self.seen} {self.kind.value}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind.name,
            "severity": self.severity.value,
            "seen": self.seen,
            "text": self.kind.value,
            "evidence": dict(self.evidence),
        }


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    Attributes:
        findings: the worst first, else in the order in which they were looked for.
        probes: what each probe measured, also where it found nothing.
        notes: what was left out and why.
        n: how many samples the probes used.
        ball: the threat model.
        seed: of all randomness in the probes.
        seconds: how long it took.
    """

    findings: list[Finding]
    probes: dict[str, Any]
    notes: list[str]
    n: int
    ball: Ball
    seed: int
    seconds: float

    @property
    def verdict(self) -> str:
        """``"invalid"`` if any finding is, ``"suspicious"`` if there is any finding at all, else ``"sound"``."""
        severities = {finding.severity for finding in self.findings}
        if Severity.INVALID in severities:
            return "invalid"
        return "suspicious" if severities else "sound"

    @property
    def kinds(self) -> set[Kind]:
        """Which kinds of findings there are."""
        return {finding.kind for finding in self.findings}

    def __str__(self) -> str:
        head = f"Audit: {self.verdict} ({self.ball}, n = {self.n}, seed {self.seed}, {self.seconds:.1f} s)"
        return "\n".join([head, *(f"- {finding}" for finding in self.findings), *(f"  {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """The audit in plain values that fit into JSON, for the card."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "findings": [finding.to_dict() for finding in self.findings],
            "probes": dict(self.probes),
            "notes": list(self.notes),
            "n": self.n,
            "ball": str(self.ball),
            "seed": self.seed,
            "seconds": self.seconds,
        }
