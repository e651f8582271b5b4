"""The runner: takes samples through a suite of attacks and writes what it saw into the ledger.

It trusts nothing an attack returns (`hardsphere.evaluate.witness`). Outcomes do not depend on the batch: all randomness
is a function of the seed, the sample and the attack, so that survivors can be packed into full batches, a batch that
does not fit into memory can be halved, work can be split into shards, and an evaluation that was killed goes on where
it stopped and ends with the same rows.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hardsphere.attacks.base import attacking
from hardsphere.errors import HardsphereError
from hardsphere.evaluate import witness
from hardsphere.evaluate.card import make_card
from hardsphere.evaluate.clock import Clock, Progress
from hardsphere.evaluate.images import save_images as write_images
from hardsphere.evaluate.ledger import COMPLETE, Ledger, Outcome, Row, Sample, ledger_in
from hardsphere.evaluate.samples import Samples, gather
from hardsphere.evaluate.striking import Striker, chunks, guide_positions
from hardsphere.evaluate.suites import CARRIED, Entry, Suite, as_suite
from hardsphere.files import write_json
from hardsphere.threat import Ball

if TYPE_CHECKING:
    from hardsphere.data import Source

DEFAULT_BATCH = 256

_ANSWERS = 8  # images that a model is known by again


@dataclass(repr=False)
class Evaluation:
    """What an evaluation found. Accuracies are fractions of all samples, those the model gets wrong anyway included.

    Attributes:
        ledger: the rows everything here is computed from.
        card: the report card, in plain values.
        balls: the balls, by growing radius.
        suite: the suite.
    """

    ledger: Ledger
    card: dict[str, Any]
    balls: tuple[Ball, ...]
    suite: Suite

    @property
    def clean_accuracy(self) -> float:
        return self.ledger.clean_accuracy()

    @property
    def robust_accuracy(self) -> float:
        """The worst case over all attacks, sample by sample; inside the largest ball if there are several."""
        return self.ledger.robust_accuracy(self.balls[-1].eps)

    @property
    def by_attack(self) -> dict[str, float]:
        """Accuracy under each attack alone; in a cascade, after it. Inside the largest ball if there are several."""
        return {line["name"]: line["accuracy"] for line in self.card["results"][-1]["attacks"]}

    @property
    def curve(self) -> dict[float, float]:
        """Robust accuracy by radius."""
        return {ball.eps: self.ledger.robust_accuracy(ball.eps) for ball in self.balls}

    def __repr__(self) -> str:
        rates = ", ".join(
            f"{100 * rate:.2f} % robust in {ball}" for ball, rate in zip(self.balls, self.curve.values(), strict=True)
        )
        return f"<Evaluation {self.suite.id}: {100 * self.clean_accuracy:.2f} % clean, {rates}>"

    def survivors(self, ball: Ball | None = None) -> set[int]:
        """The ids of the samples that no attack broke."""
        ball = ball or self.balls[-1]
        self.ledger.require_norm(ball.norm)
        return self.ledger.robust(ball.eps)


def evaluate(
    model: nn.Module | Callable[[Tensor], Tensor],
    x: Tensor | Source,
    y: Tensor | None = None,
    ball: Ball | Sequence[Ball] | None = None,
    *,
    suite: str | Suite | list[Entry] = "standard",
    seed: int = 0,
    ids: Tensor | None = None,
    class_names: Sequence[str] | None = None,
    limit: int | None = None,
    batch: int = DEFAULT_BATCH,
    out: Path | str | None = None,
    progress: Callable[[Progress], None] | None = None,
    eot: int = 1,
    save_images: bool = False,
    source: nn.Module | None = None,
    shard: tuple[int, int] | None = None,
    device: torch.device | str | None = None,
    fast: bool | None = None,
    about: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Measure how robust a classifier is.

    Args:
        model: maps images in [0, 1] to logits; it is left as it was found.
        x: float images in [0, 1], (N, C, H, W), or a `hardsphere.data` split, which is read as it is needed.
        y: the labels; a data split brings its own.
        ball: the threat model; several radii of one norm give a curve. A suite that has a radius of its own (`paper`)
            needs none.
        suite: the name of a suite, a `Suite`, or a list of entries.
        seed: of all randomness in the attacks.
        ids: the samples' ids in their data set; their positions by default.
        class_names: for the card.
        limit: evaluate the first so many samples.
        batch: how many images at once; halved by itself when memory runs out.
        out: the directory for ``ledger.db`` and ``card.json``; the same call goes on there if it was interrupted. None
            keeps the ledger in memory.
        progress: called after every batch.
        eot: average the logits of so many draws (expectation over transformation), for a randomised model.
        save_images: keep the first broken image of each sample in the ledger and write them into ``out``.
        source: another model, for suites with a transfer attack.
        shard: (index, count): work on every count-th sample only; `hardsphere.evaluate.merge` joins the ledgers.
        device: where to run; the model's own device by default.
        fast: craft in half precision with recorded turns (`hardsphere.evaluate.slots`), or in TF32 where an attack has
            only its plain form; on a GPU by default. Either way an image counts only if the model is wrong about it in
            float32.
        about: what the card tells beside the numbers: ``target``, ``data``, ``selection``, ``command``.
    """
    suite, seed = as_suite(suite), int(seed)
    balls = _balls(ball, suite)
    _check_arguments(batch, eot, shard, seed)
    samples = gather(x, y, ids, class_names, limit)
    home = witness.device_of(model, x.device if isinstance(x, Tensor) else torch.device("cpu"))
    model, remark, _ = witness.in_float32(model, samples.images(range(min(witness.FEW, len(samples))), home))
    place = home if device is None else torch.device(device)
    digest = witness.model_digest(model)
    guest = source if source is not None else nn.Identity()
    with (
        witness.moved(model, home, place),
        witness.moved(guest, witness.device_of(guest, place), place),
        attacking(model),
        witness.plain_float32(place),
    ):
        hurry = place.type == "cuda" if fast is None else fast
        run = _Run(model, samples, suite, balls, seed, batch, place, eot, source, shard, save_images, hurry, progress)
        with ledger_in(out) as (ledger, directory):
            ledger.claim(
                {
                    "suite": suite.id,
                    "suite_hash": suite.hash,
                    "norm": balls[0].norm,
                    "eps": [ball.eps for ball in balls],
                    "seed": seed,
                    "eot": eot,
                    "model": digest,
                    "source": None if source is None else witness.model_digest(source),
                    "data": samples.digest(),
                    "ids": _ids_digest(samples),
                    "n": len(samples),
                    "shard": list(shard) if shard is not None else None,
                    "images": save_images,
                    "crafting": run.striker.crafting,
                }
            )
            run.remarks += [remark] if remark is not None else []
            run.go(ledger)
            ledger.settle()
            told = {"crafting": run.striker.crafting, **(about or {})}
            card = make_card(ledger, suite, balls, run.classes, samples, place, run.remarks, told)
            if directory is not None:
                write_json(directory / "card.json", card)
                for ball in balls if save_images else ():
                    write_images(ledger, ball.eps, directory / f"adversarial-{ball.norm}-{ball.eps:.6g}.npz")
            return Evaluation(ledger, card, balls, suite)


@dataclass
class _Run:
    """One pass through a suite: what stays the same while it lasts."""

    model: nn.Module
    samples: Samples
    suite: Suite
    balls: tuple[Ball, ...]
    seed: int
    batch: int
    device: torch.device
    eot: int
    source: nn.Module | None
    shard: tuple[int, int] | None
    save_images: bool
    fast: bool
    progress: Callable[[Progress], None] | None
    remarks: list[str] = field(default_factory=list)
    classes: int = 0
    known: dict[int, Sample] = field(default_factory=dict)
    clock: Clock = field(default_factory=lambda: Clock())

    def __post_init__(self) -> None:
        positions = list(range(len(self.samples)))
        self.positions = positions if self.shard is None else positions[self.shard[0] :: self.shard[1]]
        if not self.positions:
            raise HardsphereError(f"Shard {self.shard} of {len(self.samples)} samples is empty: use fewer shards.")
        self.striker = Striker(
            self.model,
            self.samples,
            self.seed,
            self.batch,
            self.device,
            self.eot,
            self.source,
            self.save_images,
            self.fast,
        )
        self.remarks.extend(self.striker.remarks)

    def go(self, ledger: Ledger) -> None:
        """Everything that is not in the ledger yet."""
        self._introduce()
        if not self.striker.random:
            recognise(ledger, self.model, self.samples, self.device)
        ledger.note("shape", list(self.striker.images(self.positions[:1]).shape[1:]))
        ledger.note("order", [CARRIED, *(entry.name for entry in self.suite.entries)])
        self._clean(ledger)
        entries = self._entries()
        stages = [(ball, entry) for ball in self.balls for entry in entries]
        for index, (ball, entry) in enumerate(stages):
            if self.suite.cascade and (index == 0 or stages[index - 1][0] != ball):
                self._carry(ledger, ball)
            self._attack(ledger, ball, entry, stages[index + 1 :])
        ledger.note(COMPLETE, True)

    def _introduce(self) -> None:
        """The number of classes, and whether labels and model agree on it."""
        self.classes = witness.introduce(self.model, self.striker.images(self.positions[:1]))
        low, high = int(self.samples.labels.min()), int(self.samples.labels.max())
        if low < 0 or high >= self.classes:
            wrong = low if low < 0 else high
            raise HardsphereError(
                f"A label is {wrong}, but the model has {self.classes} classes: it must lie in 0..{self.classes - 1}."
            )
        shown = len(set(self.samples.labels.tolist()))
        if shown < self.classes and len(self.samples) >= self.classes:
            self.remarks.append(f"The images are of {shown} of the model's {self.classes} classes only.")
        names = self.samples.class_names
        if names == tuple(map(str, range(len(names)))):
            names = self.samples.class_names = ()  # numbers, not names: arrays whose last classes happen to be missing
        if names and len(names) != self.classes:
            raise HardsphereError(f"There are {len(names)} class names, but the model has {self.classes} classes.")

    def _entries(self) -> list[Entry]:
        """The suite's entries that can run, with a remark for each thing that is other than the suite says."""
        entries = [entry for entry in self.suite.entries if _remark(self.remarks, entry, self)]
        if not entries:
            raise HardsphereError(f"The suite '{self.suite.name}' has no attack that can run: {' '.join(self.remarks)}")
        return entries

    def _clean(self, ledger: Ledger) -> None:
        """Classify the clean images."""
        self.known = {sample.position: sample for sample in ledger.samples()}
        for chunk in chunks(self.positions, self.batch):
            if all(position in self.known for position in chunk):
                continue
            predicted = [guess for part in self.striker.fitting(chunk, self._classify) for guess in part]
            found = [
                Sample(int(self.samples.ids[position]), position, int(self.samples.labels[position]), guess)
                for position, guess in zip(chunk, predicted, strict=True)
            ]
            ledger.add_samples(found)
            self.known.update({sample.position: sample for sample in found})
            right = sum(sample.correct for sample in self.known.values())
            bound = (right + len(self.positions) - len(self.known)) / len(self.positions)
            self._tell("clean", None, len(self.known), len(self.positions), bound, None)

    def _classify(self, part: Sequence[int]) -> list[int]:
        guesses: list[int] = witness.clean_predictions(self.striker.judge, self.striker.images(part)).tolist()
        return guesses

    def _carry(self, ledger: Ledger, ball: Ball) -> None:
        """What fell inside a smaller ball has fallen inside this one, which contains it."""
        smaller = [other for other in self.balls if other.eps < ball.eps]
        if not smaller:
            return
        fallen = {row.sample: row for row in ledger.rows(smaller[-1].eps) if row.outcome == Outcome.BROKEN.value}
        rows = []
        for sample in self.known.values():
            row = fallen.get(sample.sample)
            outcome = Outcome.BROKEN if row else Outcome.SKIPPED if sample.correct else Outcome.WRONG
            found = (row.distance, row.stop, row.predicted) if row else ()
            rows.append(Row(ball.eps, CARRIED, sample.sample, outcome.value, *found))
        images = [(ball.eps, sample, CARRIED, pixels) for sample, _, pixels in ledger.images(smaller[-1].eps)]
        ledger.add(rows, images)

    def _attack(self, ledger: Ledger, ball: Ball, entry: Entry, later: Sequence[tuple[Ball, Entry]]) -> None:
        """One attack at one radius, on every sample it has to work on."""
        names = [CARRIED, *(other.name for other in self.suite.entries)]
        before = names[: names.index(entry.name)]  # and not what later ones broke before an interruption
        fallen = dict(ledger.broken(ball.eps, [*before, entry.name]))
        earlier = set(ledger.broken(ball.eps, before)) if self.suite.cascade else set()
        todo, idle = [], []
        for position in self.positions:
            sample = self.known[position]
            beyond = entry.limit is not None and position >= entry.limit
            if sample.correct and not beyond and sample.sample not in earlier:
                todo.append(position)
            else:
                outcome = Outcome.SKIPPED if sample.correct else Outcome.WRONG
                idle.append(Row(ball.eps, entry.name, sample.sample, outcome.value))
        ledger.add(idle)
        done = ledger.done(ball.eps, entry.name)
        settled = {position for position in todo if self.known[position].sample in done}
        finished = len(settled)
        begin = time.perf_counter()
        for found in self.striker.outcomes(entry, ball, todo, settled):
            self.clock.record(entry, len(found), time.perf_counter() - begin)
            rows = [row for row, _ in found]
            ledger.add(rows, [image for _, image in found if image is not None])
            fallen.update({row.sample: entry.name for row in rows if row.outcome == Outcome.BROKEN.value})
            finished += len(found)
            standing = sum(sample.correct and sample.sample not in fallen for sample in self.known.values())
            left = self.clock.left(entry, len(todo) - finished, [(e, self._upcoming(e, standing)) for _, e in later])
            self._tell(entry.name, ball, finished, len(todo), standing / len(self.positions), left)
            begin = time.perf_counter()

    def _upcoming(self, entry: Entry, standing: int) -> int:
        """How many samples a later attack will work on, at most."""
        if not self.suite.cascade:
            standing = sum(sample.correct for sample in self.known.values())
        return standing if entry.limit is None else min(standing, entry.limit)

    def _tell(self, attack: str, ball: Ball | None, done: int, total: int, bound: float, left: float | None) -> None:
        if self.progress is not None:
            self.progress(Progress(attack, ball, done, total, bound, self.clock.elapsed(), left))


def recognise(ledger: Ledger, model: nn.Module, samples: Samples, device: torch.device) -> None:
    """Refuse to go on with the evaluation of another model: a digest does not see all that a function depends on."""
    x = samples.images(range(min(_ANSWERS, len(samples))), device)
    answers, earlier = witness.one_by_one(model, x).cpu(), ledger.noted("answers")
    if earlier is None:
        ledger.note("answers", answers.tolist())
    elif witness.differ(answers, torch.tensor(earlier)):
        raise HardsphereError(
            f"{ledger.path} holds the evaluation of another model, whose answers on the same images are others: "
            "choose another output directory or delete that one."
        )


def _remark(remarks: list[str], entry: Entry, run: _Run) -> bool:
    """Note what is other than the suite says, and tell whether the entry can run at all."""

    def say(text: str) -> None:
        if text not in remarks:
            remarks.append(text)

    norm = run.balls[0].norm
    if norm not in entry.norms:
        say(f"{entry.name} was left out: it does not work in {norm}.")
        return False
    if "source" in entry.needs and run.source is None:
        say(f"{entry.name} was left out: it needs a source model.")
        return False
    if "guides" in entry.needs and len(set(run.samples.labels[guide_positions(len(run.samples))].tolist())) < 2:
        say(f"{entry.name} was left out: it needs images of two classes at least.")
        return False
    targets = entry.options.get("targets")
    if isinstance(targets, int) and run.classes - 1 < targets:
        say(f"{entry.name}: {run.classes - 1} targets instead of {targets}, since there are {run.classes} classes.")
    if run.classes < 4 and (entry.options.get("loss") == "dlr" or entry.attack == "apgd_targeted"):
        say(f"{entry.name}: the margin takes the place of DLR, which needs at least 4 classes.")
    if entry.limit is not None and entry.limit < len(run.samples):
        say(f"{entry.name}: the first {entry.limit} of {len(run.samples)} samples only, because it is expensive.")
    return True


# ---------------------------------------------------------------------------------------------------------------------
# Arguments and files
# ---------------------------------------------------------------------------------------------------------------------


def _balls(ball: Ball | Sequence[Ball] | None, suite: Suite) -> tuple[Ball, ...]:
    if ball is None:
        if suite.eps is None:
            raise HardsphereError(f"The suite '{suite.name}' needs a ball, such as Ball('linf', 8 / 255).")
        ball = Ball("linf", suite.eps)
    balls = (ball,) if isinstance(ball, Ball) else tuple(ball)
    if not balls or not all(isinstance(one, Ball) for one in balls):
        raise HardsphereError("The threat model must be a Ball or several, such as Ball('linf', 8 / 255).")
    if len({one.norm for one in balls}) > 1:
        raise HardsphereError(f"The balls have different norms ({', '.join(map(str, balls))}): evaluate one at a time.")
    if len(set(balls)) < len(balls):
        raise HardsphereError(f"A radius is given twice ({', '.join(map(str, balls))}).")
    return tuple(sorted(balls, key=lambda one: one.eps))


def _check_arguments(batch: int, eot: int, shard: tuple[int, int] | None, seed: int) -> None:
    if abs(seed) >= 2**31:
        raise HardsphereError(f"The seed is {seed}, but it must lie between -2^31 and 2^31.")
    if batch < 1:
        raise HardsphereError(f"The batch is {batch}, but must hold at least one image.")
    if eot < 1:
        raise HardsphereError(f"eot is {eot}, but at least one draw is needed.")
    if shard is not None and not 0 <= shard[0] < shard[1]:
        raise HardsphereError(f"The shard is {shard}, but must be (index, count) with 0 <= index < count.")


def _ids_digest(samples: Samples) -> str:
    return hashlib.sha256(samples.ids.contiguous().numpy().data).hexdigest()[:16]
