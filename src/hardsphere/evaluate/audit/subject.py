"""What is audited, and how a probe strikes it: the same model, samples and streams of noise for every probe.

As in the evaluation's runner nothing an attack returns is believed: `Subject.strike` projects and classifies again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hardsphere.attacks.base import AttackResult, Stop
from hardsphere.attacks.losses import margin
from hardsphere.errors import HardsphereError
from hardsphere.evaluate import witness
from hardsphere.evaluate.ledger import Outcome
from hardsphere.evaluate.statistics import Interval, paired_difference
from hardsphere.evaluate.suites import CARRIED
from hardsphere.noise import Noise
from hardsphere.threat import Ball

if TYPE_CHECKING:
    from hardsphere.evaluate.runner import Evaluation

BLACK_BOX = frozenset({"square", "rays", "spsa", "nes", "zoo"})
CONTROLS = frozenset({"transfer", "random_noise"})


@dataclass(frozen=True)
class Gain:
    """How many more of all samples one attack breaks than another, with the paired interval, in points."""

    points: float
    interval: Interval
    confidence: float = 0.95

    def over(self, points: float) -> bool:
        """Whether the gain is larger than so many points, and larger than chance."""
        return self.points > points and self.interval[0] > 0

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.points:.1f} points ({100 * self.confidence:g} % interval {low:.1f} to {high:.1f})"

    def to_dict(self) -> dict[str, Any]:
        return {"points": self.points, "interval": list(self.interval), "confidence": self.confidence}


@dataclass
class Evaluated:
    """What a finished evaluation says about the samples at hand, as masks over them.

    Attributes:
        known: samples that it evaluated.
        white: broken by an attack that sees gradients.
        black: broken by an attack that sees outputs only.
        other: broken by transfer, noise, or inside a smaller ball already.
        stuck: samples on which some attack never had a gradient to follow.
    """

    known: Tensor
    white: Tensor
    black: Tensor
    other: Tensor
    stuck: Tensor


@dataclass
class Subject:
    """A model, the samples it gets right, and what is known about it so far.

    Attributes:
        model: in eval mode, in float32, frozen.
        x: the images it classifies correctly, y their labels, ids their ids.
        n: all samples at hand, those it gets wrong included; points are hundredths of this.
        broken: outcomes of the attacks so far, by name.
        kept: the share of its clean margin that each attack left a sample, 0 if it broke it.
        measured: what the probes saw, for the report.
        notes: what was left out and why.
    """

    model: nn.Module
    x: Tensor
    y: Tensor
    ids: Tensor
    n: int
    ball: Ball
    seed: int
    batch: int
    surrogate: nn.Module | None = None
    evaluated: Evaluated | None = None
    broken: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[str, Tensor] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def strike(
        self,
        name: str,
        attack: Callable[..., AttackResult],
        *,
        through: nn.Module | None = None,
        ball: Ball | None = None,
        stream: str | None = None,
        rows: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Which samples an attack breaks, a mask over ``x``; remembered by name.

        Args:
            through: the view of the model that the attack sees; what counts is always the model itself.
            ball: another ball than the audit's own.
            stream: attacks that share a stream start from the same random images; by default the name.
            rows: positions to work on; all by default.
        """
        ball = ball or self.ball
        rows = torch.arange(len(self.x), device=self.x.device) if rows is None else rows
        broken = torch.zeros(len(self.x), dtype=torch.bool, device=self.x.device)
        kept = torch.ones(len(self.x), device=self.x.device)

        def work(part: slice) -> None:
            here = rows[part]
            x, y = self.x[here], self.y[here]
            noise = Noise(self.seed, self.ids[here]).fold("audit", stream or name)
            proposal = attack(through or self.model, x, y, ball, noise=noise, **options)
            broken[here], _, _, judged = witness.confirm(self.model, x, y, proposal.x_adv, ball)
            kept[here] = self._share_kept(x, y, judged).masked_fill(broken[here], 0.0)

        self.batch = in_parts(len(rows), self.batch, work)
        self.broken[name], self.kept[name] = broken, kept
        return broken

    def _share_kept(self, x: Tensor, y: Tensor, attacked: Tensor) -> Tensor:
        """The lead of the right class after the attack, as a share of its lead on the clean image, in [0, 1]."""
        before, after = (-margin(witness.answer(self.model, images), y) for images in (x, attacked))
        return (after / before).nan_to_num(0.0, 0.0, 0.0).clamp(0, 1)

    def union(self, *names: str) -> Tensor:
        """The samples that any of these attacks broke."""
        masks = [self.broken[name] for name in names if name in self.broken]
        return torch.stack([torch.zeros_like(self.y, dtype=torch.bool), *masks]).any(dim=0)

    def white(self) -> Tensor:
        """What gradient attacks break: the probes' own and those of the evaluation."""
        own = self.union("ce", "margin", "targeted")
        return own if self.evaluated is None else own | self.evaluated.white

    def gain(self, more: Tensor, than: Tensor) -> Gain:
        """How much more of all samples the first mask holds than the second."""
        return gain(int((more & ~than).sum()), int((than & ~more).sum()), self.n)

    def percent(self, broken: Tensor) -> float:
        """Broken samples in percent of all samples; those that the model gets wrong anyway do not count."""
        return 100 * int(broken.sum()) / self.n


def in_parts(count: int, size: int, work: Callable[[slice], None]) -> int:
    """Do some work part by part, in smaller parts where one does not fit into memory; returns the size that fits."""
    start = 0
    while start < count:
        part = slice(start, min(start + size, count))
        try:
            work(part)
            start = part.stop
            continue
        except (RuntimeError, MemoryError) as reason:
            if not witness.is_out_of_memory(reason):
                raise
            if part.stop - start == 1:
                raise HardsphereError(witness.TOO_LARGE) from reason
        # Outside of the except block, so that the exception no longer holds the tensors of the failed attempt.
        size = (part.stop - start + 1) // 2
    return size


def gain(only_first: int, only_second: int, n: int) -> Gain:
    low, high = paired_difference(only_first, only_second, n)
    return Gain(100 * (only_first - only_second) / max(n, 1), (100 * low, 100 * high))


def mean_gain(more: Tensor, than: Tensor, n: int, confidence: float = 0.95) -> Gain:
    """How much larger the first of two measures is, (trials, samples), in hundredths per sample of all ``n``.

    A sample counts by its mean over the trials; one that is missing, because the model gets it wrong anyway, by zero.
    The interval is the usual one of a mean of paired differences, over samples, which are what was drawn.
    """
    difference = torch.zeros(n, dtype=torch.float64)
    difference[: more.shape[1]] = (more.double().mean(dim=0) - than.double().mean(dim=0)).cpu()
    mean, error = float(difference.mean()), float(difference.std(correction=0)) / math.sqrt(n)
    half = NormalDist().inv_cdf((1 + confidence) / 2) * error
    return Gain(100 * mean, (100 * (mean - half), 100 * (mean + half)), confidence)


def reuse(evaluation: Evaluation, model: nn.Module, subject: Subject) -> Evaluated | None:
    """The part of an evaluation that is about this model, this ball and these samples; a note where there is none."""
    radius = next((ball.eps for ball in evaluation.balls if _same(ball, subject.ball)), None)
    if radius is None:
        subject.notes.append(f"The evaluation was not used: it has no numbers inside {subject.ball}.")
        return None
    if evaluation.ledger.identity.get("model") != witness.model_digest(model):
        subject.notes.append("The evaluation was not used: it is of another model.")
        return None
    labels = {sample.sample: sample.label for sample in evaluation.ledger.samples()}
    pairs = list(zip(subject.ids.tolist(), subject.y.tolist(), strict=True))
    known = [sample in labels for sample, _ in pairs]
    if not any(known) or any(labels.get(sample, label) != label for sample, label in pairs):
        subject.notes.append("The evaluation was not used: it is about other samples, going by their ids and labels.")
        return None
    if _answers_otherwise(evaluation, subject):
        subject.notes.append("The evaluation was not used: it is of a model that gave other answers on these images.")
        return None
    families = _families(evaluation)
    sets: dict[str, set[int]] = {"white": set(), "black": set(), "other": set(), "stuck": set()}
    for row in evaluation.ledger.rows(radius):
        family = families.get(row.attack, "other")
        if row.outcome == Outcome.BROKEN.value:
            sets[family].add(row.sample)
        if row.stop == Stop.STUCK.name and family == "white":
            sets["stuck"].add(row.sample)

    def mask(members: set[int]) -> Tensor:
        hits = [there and sample in members for there, (sample, _) in zip(known, pairs, strict=True)]
        return torch.tensor(hits, dtype=torch.bool, device=subject.x.device)

    return Evaluated(
        torch.tensor(known, device=subject.x.device), **{family: mask(members) for family, members in sets.items()}
    )


def _answers_otherwise(evaluation: Evaluation, subject: Subject) -> bool:
    """Whether the evaluated model gave other answers on the images that both saw: digests do not see all of a model."""
    answers = evaluation.ledger.noted("answers", [])
    seen = {one.sample: answers[one.position] for one in evaluation.ledger.samples() if one.position < len(answers)}
    rows = [row for row, sample in enumerate(subject.ids.tolist()) if sample in seen]
    if not rows:
        return False
    ours = witness.one_by_one(subject.model, subject.x[rows]).cpu()
    return witness.differ(ours, torch.tensor([seen[int(subject.ids[row])] for row in rows]))


def ids_by_position(evaluation: Evaluation, y: Tensor, count: int) -> Tensor | None:
    """The ids that the evaluation knows the first samples by, if it went through samples with these labels."""
    at = {sample.position: sample for sample in evaluation.ledger.samples()}
    first = [at.get(row) for row in range(min(len(y), count))]
    labels = [None if sample is None else sample.label for sample in first]
    if labels != y[: len(first)].tolist():
        return None
    rest = range(2**62, 2**62 + len(y) - len(first))
    return torch.tensor([*(sample.sample for sample in first if sample is not None), *rest])


def _families(evaluation: Evaluation) -> Mapping[str, str]:
    """What each attack of the evaluation may see: gradients (white), outputs (black) or neither (other)."""
    families = {CARRIED: "other"}
    for entry in evaluation.suite.entries:
        attack = entry.attack if isinstance(entry.attack, str) else getattr(entry.attack, "__name__", "")
        black, control = attack in BLACK_BOX, attack in CONTROLS
        families[entry.name] = "black" if black else "other" if control else "white"
    return families


def _same(one: Ball, other: Ball) -> bool:
    return one.norm == other.norm and math.isclose(one.eps, other.eps, rel_tol=1e-6)
