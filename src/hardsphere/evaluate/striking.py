"""One attack on some samples: from an entry of a suite to the rows of the ledger.

There are two ways. The plain one calls the attack's function batch by batch, in halves where memory runs out. The fast
one, for a GPU, runs its program in slots and in half precision (`hardsphere.evaluate.slots`). Both have every image
confirmed by `hardsphere.evaluate.witness`, and in both the outcome is a function of the seed and the sample.
"""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hardsphere.attacks.base import AttackResult, Stop
from hardsphere.attacks.programs import Program, program
from hardsphere.errors import HardsphereError
from hardsphere.evaluate import witness
from hardsphere.evaluate.binding import attack_function, averaged, view
from hardsphere.evaluate.crafting import stand_in
from hardsphere.evaluate.ledger import Outcome, Row
from hardsphere.evaluate.samples import Samples
from hardsphere.evaluate.slots import Judged, Slots
from hardsphere.evaluate.suites import Entry, OfEps
from hardsphere.noise import Noise
from hardsphere.runtime import tf32
from hardsphere.sphere import find_head
from hardsphere.threat import Ball

GUIDES = 256
"""How many images of the set serve as guides of the feature attack, the same ones for every shard."""

FAST_CRAFTING = "bf16 and TF32, attacks that may leave the ball in float32; confirmed in float32"

Found = tuple[Row, tuple[float, int, str, bytes] | None]
"""What came of one sample: its row, and its broken image if images are kept."""

_FEW = 4  # images on which it is asked how the model answers
_TRIED = 64  # images on which half precision must suit the model
_SLOTS_PER_IMAGE = 2  # half precision needs half the room
_SLOT_STEP = 8  # numbers of slots are multiples of this, so that few different ones occur


@dataclass
class Striker:
    """What does not change from attack to attack.

    Attributes:
        judge: the model as it is judged, in float32.
        fast: craft in half precision, or in TF32 where an attack has only its plain form.
        crafting: the precision of the crafting, in words.
        remarks: why it is not the one that was asked for.
    """

    model: nn.Module
    samples: Samples
    seed: int
    batch: int
    device: torch.device
    eot: int
    source: nn.Module | None
    save_images: bool
    fast: bool

    def __post_init__(self) -> None:
        self.judge = averaged(self.model, self.eot)
        self.counted = witness.Counted(self.model)
        self.attacked = averaged(self.counted, self.eot)
        self.size = self.batch
        self.remarks: list[str] = []
        few = self.images(range(min(_FEW, len(self.samples))))
        witness.introduce(self.model, few[:1])
        alone = witness.one_by_one(self.model, few)
        self.random = self._answers_differ(few, alone)
        if not self.random:
            self._look_for_company(alone)
        self.half = self._stand_in() if self.fast and self.eot == 1 and not self.random else None
        self.fast = self.half is not None
        self.crafting = FAST_CRAFTING if self.fast else "float32"

    def _answers_differ(self, x: Tensor, alone: Tensor) -> bool:
        """Whether the model answers the same question twice in two ways; then a remark says what that means."""
        if torch.equal(alone.nan_to_num(), witness.one_by_one(self.model, x).nan_to_num()):
            return False
        advice = "read the worst case" if self.eot > 1 else "read the worst case, and set eot"
        self.remarks.append(
            "The model's answers are random: an image counts by a single draw, images were crafted in float32, and "
            f"the accuracy under a single attack says little ({advice})."
        )
        return True

    def _look_for_company(self, alone: Tensor) -> None:
        """A remark if an image's answer depends on the others of its batch."""
        together = self.fitting(range(len(alone)), lambda part: witness.answer(self.model, self.images(part)))
        if witness.differ(torch.cat(list(together)), alone):
            self.remarks.append(
                "The model's answers for an image depend on the other images of its batch, and so do the outcomes: "
                "does it normalise by the batch, as BatchNorm in train mode does?"
            )

    def _stand_in(self) -> nn.Module | None:
        """The model in half precision; none, and a remark why, where that cannot stand in for the model."""
        tried = range(min(_TRIED, len(self.samples)))
        half: nn.Module | str = next(self.fitting(tried, lambda part: stand_in(self.model, self.images(part))))
        if not isinstance(half, str):
            return half
        self.remarks.append(f"Images were crafted in float32, since half precision does not suit the model: {half}.")
        return None

    def outcomes(self, entry: Entry, ball: Ball, todo: Sequence[int], done: Collection[int]) -> Iterator[list[Found]]:
        """Attack the samples at these positions but those ``done``, and tell of some at a time."""
        made = self._program(entry, ball) if self.fast else None
        if made is not None:
            rest = [position for position in todo if position not in done]
            yield from self._in_slots(made, entry, ball, rest, len(todo))
            return
        attack = self._bind(entry, ball)
        # The batches are those of an uninterrupted run: a batch is in the ledger as a whole or not at all.
        for chunk in chunks(todo, self.batch):
            rest = [position for position in chunk if position not in done]
            parts = self.fitting(rest, lambda part: self._strike(attack, part, ball, entry))
            found = [one for part in parts for one in part]
            if found:
                yield found

    # The plain way.

    def _strike(
        self, attack: Callable[..., AttackResult], part: Sequence[int], ball: Ball, entry: Entry
    ) -> list[Found]:
        """Attack a batch and write down what came of it."""
        begin = time.perf_counter()
        x, y, noise = self._fetch(part, entry)
        self.counted.forwards = self.counted.backwards = 0
        # What may leave the ball goes just across the boundary, and TF32 sees that elsewhere than float32.
        with tf32() if self.fast and entry.outside == "project" else nullcontext():
            proposal = attack(x, y, noise)
        judged = witness.confirm(self.judge, x, y, proposal.x_adv, ball, entry.outside)
        stop = proposal.stop
        if self.fast or self.random or entry.view == "fn":
            judged, stop = self._without_doubt(entry, ball, (x, y, noise), judged, stop)
        share = 1 / len(part)
        costs = (self.counted.forwards * share, self.counted.backwards * share, (time.perf_counter() - begin) * share)
        return [
            self._found(position, entry, ball, hit, guess, far, why, costs, image)
            for position, hit, guess, far, why, image in zip(
                part, *(column.tolist() for column in judged[:3]), stop, judged[3], strict=True
            )
        ]

    def _without_doubt(
        self,
        entry: Entry,
        ball: Ball,
        batch: tuple[Tensor, Tensor, Noise],
        judged: tuple[Tensor, Tensor, Tensor, Tensor],
        stop: list[Stop],
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], list[Stop]]:
        """An attack that stopped for a success that is none, in float32 or in another draw, works on that sample again.

        In float32; and to its last step on a random model, where it would only stop for the next piece of luck, and on
        another view of the model, whose successes need not be the model's.
        """
        claimed = torch.tensor([why is Stop.BROKEN for why in stop], device=self.device)
        rows = (claimed & ~judged[0]).nonzero().squeeze(1)
        if len(rows) == 0 or entry.outside == "filter":
            return judged, stop
        x, y, noise = batch[0][rows], batch[1][rows], batch[2][rows]
        proposal = self._bind(entry, ball, to_the_end=self.random or entry.view == "fn")(x, y, noise)
        again = witness.confirm(self.judge, x, y, proposal.x_adv, ball, entry.outside)
        for old, new in zip(judged, again, strict=True):
            old[rows] = new
        stop = list(stop)
        for row, why in zip(rows.tolist(), proposal.stop, strict=True):
            stop[row] = why
        return judged, stop

    def fitting(self, positions: Sequence[int], work: Callable[[Sequence[int]], Any]) -> Iterator[Any]:
        """Do some work batch by batch, in halves where a batch does not fit into memory."""
        start = 0
        while start < len(positions):
            part = positions[start : start + self.size]
            try:
                yield work(part)
                start += len(part)
                continue
            except (RuntimeError, MemoryError) as reason:
                self._forgive(reason, len(part))
            # Outside of the except block, so that the exception no longer holds the tensors of the failed attempt.
            self._halve(len(part))

    def _forgive(self, reason: Exception, images: int) -> None:
        """Raise again what is no lack of memory, or a lack that no smaller batch could help."""
        if not witness.is_out_of_memory(reason):
            raise reason
        if images == 1:
            raise HardsphereError(witness.TOO_LARGE) from reason

    def _halve(self, images: int) -> None:
        self.size = (images + 1) // 2
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # The fast way.

    def _program(self, entry: Entry, ball: Ball) -> Program | None:
        """The program of the entry's attack; none if it has none, or where images outside the ball are to be told."""
        if not isinstance(entry.attack, str) or entry.outside != "project":
            return None
        return program(entry.attack, ball, **self._options(entry, ball))

    def _in_slots(
        self, made: Program, entry: Entry, ball: Ball, positions: Sequence[int], of: int
    ) -> Iterator[list[Found]]:
        """Run a program on the samples, with half the slots again and again until they fit into memory.

        There are as many slots as an uninterrupted run ``of`` all samples has, so that the same kernels answer.
        """
        assert self.half is not None
        left = list(positions)
        while left:
            count = _slots(of, self.size)
            slots = Slots(
                made,
                view(self.half, entry.view),
                self.judge,
                lambda part: self._fetch(part, entry),
                lambda x, y, x_adv: witness.confirm(self.judge, x, y, x_adv, ball, entry.outside),
                count,
            )
            try:
                begin = time.perf_counter()
                for judged in slots.run(left):
                    seconds = (time.perf_counter() - begin) / len(judged)
                    yield [self._found_in_slots(one, entry, ball, seconds) for one in judged]
                    settled = {one.position for one in judged}
                    left = [position for position in left if position not in settled]
                    begin = time.perf_counter()
                return
            except (RuntimeError, MemoryError) as reason:
                self._forgive(reason, self.size)
            del slots
            self._halve(self.size)
            made = self._program(entry, ball) or made

    def _found_in_slots(self, one: Judged, entry: Entry, ball: Ball, seconds: float) -> Found:
        costs = (float(one.forwards), float(one.backwards), seconds)
        return self._found(
            one.position, entry, ball, one.broken, one.predicted, one.distance, one.stop, costs, one.image
        )

    # What both share.

    def _found(
        self,
        position: int,
        entry: Entry,
        ball: Ball,
        broken: bool,
        predicted: int,
        distance: float,
        stop: Stop,
        costs: tuple[float, float, float],
        image: Tensor,
    ) -> Found:
        sample = int(self.samples.ids[position])
        outcome = Outcome.BROKEN if broken else Outcome.HELD
        row = Row(ball.eps, entry.name, sample, outcome.value, distance, stop.name, predicted, *costs)
        if not (broken and self.save_images):
            return row, None
        return row, (ball.eps, sample, entry.name, image.cpu().contiguous().numpy().tobytes())

    def _fetch(self, positions: Sequence[int], entry: Entry) -> tuple[Tensor, Tensor, Noise]:
        ids = self.samples.ids[torch.as_tensor(positions)].to(self.device)
        return self.images(positions), self.labels(positions), Noise(self.seed, ids).fold(entry.name)

    def images(self, positions: Sequence[int]) -> Tensor:
        return self.samples.images(positions, self.device)

    def labels(self, positions: Sequence[int]) -> Tensor:
        return self.samples.labels[torch.as_tensor(positions)].to(self.device)

    def _bind(
        self, entry: Entry, ball: Ball, to_the_end: bool = False
    ) -> Callable[[Tensor, Tensor, Noise], AttackResult]:
        """The entry's attack with everything but the batch filled in; to its last step if it can go on so far."""
        function = attack_function(entry)
        model = view(self.attacked, entry.view)
        options = self._options(entry, ball)
        if to_the_end and "keep" in inspect.signature(function).parameters:
            options["keep"] = "last"
        return lambda x, y, noise: function(model, x, y, ball, noise=noise, **options)

    def _options(self, entry: Entry, ball: Ball) -> dict[str, Any]:
        options = {key: self._resolve(key, value, ball) for key, value in entry.options.items()}
        if "source" in entry.needs:
            options["source"] = self.source
        if "guides" in entry.needs:
            positions = guide_positions(len(self.samples))
            options["guides"], options["guide_labels"] = self.images(positions), self.labels(positions)
        return options

    def _resolve(self, key: str, value: Any, ball: Ball) -> Any:
        """A setting as the attack takes it."""
        if isinstance(value, OfEps):
            return value.factor * ball.eps
        if key == "loss" and isinstance(value, str):
            losses = importlib.import_module("hardsphere.attacks.losses")
            if value == "adaptive":
                return losses.adaptive(find_head(self.model))
            return getattr(losses, value)
        return value


def guide_positions(n: int) -> list[int]:
    """Evenly over the whole set, which may be sorted by class."""
    return [index * n // min(GUIDES, n) for index in range(min(GUIDES, n))]


def chunks(positions: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """The positions in runs of ``size``."""
    for start in range(0, len(positions), size):
        yield positions[start : start + size]


def _slots(samples: int, batch: int) -> int:
    """How many slots: as many rounds as needed, all of about the same size, so that the last is not half empty."""
    most = _SLOTS_PER_IMAGE * batch
    rounds = -(-samples // most)
    each = -(-samples // rounds)
    return min(-(-each // _SLOT_STEP) * _SLOT_STEP, most)
