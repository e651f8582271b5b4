"""Attacks at full speed: a batch of slots in which samples come and go, and turns that are replayed as one CUDA graph.

An attack usually works on a batch until its last sample is done, and asks after every step which ones still matter, so
that a fast GPU waits for the host and works on half-empty batches. Here a program (`hardsphere.attacks.programs`) takes
all slots through many turns without a question; then the host looks in, takes out the samples that are done and puts
the next ones into their slots, whatever turn the others are at.

The turns may run in half precision, so what they find is only a candidate: the image on which the wrong class led the
most, or came near enough to leave a doubt. The caller's `Confirm` has the last word, and a sample whose candidate it
rejects goes on where it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hardsphere.attacks.base import Stop, logits_and_gradient, logits_at
from hardsphere.attacks.losses import margin
from hardsphere.attacks.programs import Answer, Program, State, Turn
from hardsphere.noise import Noise
from hardsphere.runtime import aside, recording
from hardsphere.threat import per_sample

Fetch = Callable[[Sequence[int]], tuple[Tensor, Tensor, Noise]]
"""Positions -> images, labels and randomness of these samples."""

Confirm = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]
"""(x, y, x_adv) -> (broken, predicted class, distance, the image judged), in full precision."""

DOUBT = 0.02
"""A candidate is worth a look in full precision if the true class leads by less than this part of the largest logit."""

_WARM_TURNS = 2  # before the recording: libraries set themselves up lazily


@dataclass(frozen=True)
class Judged:
    """A sample that is done: what was found and what it cost."""

    position: int
    broken: bool
    predicted: int
    distance: float
    stop: Stop
    image: Tensor
    forwards: int
    backwards: int


class _Guest(NamedTuple):
    """A sample in a slot: its position, and at which turn it came."""

    position: int
    turn: int


class Slots:
    """Runs a program on samples, so many at a time.

    Args:
        model: what the program asks, in the precision of the crafting.
        exact: the model in full precision, which ranks the targets at the clean images.
        size: the number of slots.
    """

    def __init__(
        self, program: Program, model: nn.Module, exact: nn.Module, fetch: Fetch, confirm: Confirm, size: int
    ) -> None:
        self.program, self.model, self.exact = program, model, exact
        self.fetch, self.confirm, self.size = fetch, confirm, size
        self.state: State = {}
        self.graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        self.warm = {False: 0, True: 0}
        self.turns = 0
        self.capture = True

    def run(self, positions: Sequence[int]) -> Iterator[list[Judged]]:
        """Work on all samples; those that are done are handed out each time the host looks in."""
        with self.program.watching(self.model):
            yield from self._run(deque(positions))

    def _run(self, queue: deque[int]) -> Iterator[list[Judged]]:
        occupants: dict[int, _Guest] = {}
        while queue or occupants:
            self._fill(occupants, queue)
            for name, value in self.program.refresh(self.state).items():
                self.state[name].copy_(value)
            came = {guest.turn for guest in occupants.values()}
            for _ in range(min(self._next_look(turn) for turn in came) - self.turns):
                self._turn(any(self.program.ends_run(self.turns - turn) for turn in came))
                self.turns += 1
            done = self._look(occupants)
            if done:
                yield done

    def _next_look(self, came: int) -> int:
        """When a sample that came at some turn is looked at: that depends on nothing but how long it has been here."""
        every, most = self.program.look_every, self.program.most_turns(self.state)
        return came + min(((self.turns - came) // every + 1) * every, most)

    def _is_due(self, came: int) -> bool:
        here = self.turns - came
        return here % self.program.look_every == 0 or here >= self.program.most_turns(self.state)

    def _fill(self, occupants: dict[int, _Guest], queue: deque[int]) -> None:
        """Put waiting samples into free slots."""
        free = [slot for slot in range(self.size) if slot not in occupants][: len(queue)]
        if not free:
            return
        positions = [queue.popleft() for _ in free]
        x, y, noise = self.fetch(positions)
        x = x.contiguous()
        if not self.state:
            self.program.prepare(x)
        fresh = self.program.start(x, y, noise, logits_at(self.exact, x)) | _blank(x)
        if not self.state:
            # Slots that are never filled hold copies: their turns cost the same and count for nothing.
            spread = torch.arange(self.size, device=x.device) % len(x)
            self.state = {name: value[spread].clone() for name, value in fresh.items()}
        else:
            rows = torch.tensor(free, device=x.device)
            for name, value in fresh.items():
                self.state[name][rows] = value
        occupants.update({slot: _Guest(position, self.turns) for slot, position in zip(free, positions, strict=True)})

    def _turn(self, again: bool) -> None:
        """One turn of all slots, with or without the beginning of new runs: on a GPU from the third on a replay."""
        if again in self.graphs:
            self.graphs[again].replay()
        elif not self.capture or not self.state["x"].is_cuda:
            self._advance(again)
        elif self.warm[again] < _WARM_TURNS:
            self.warm[again] += 1
            with aside(self.state["x"].device):
                self._advance(again)
        else:
            self._record(again)
            self._turn(again)

    def _record(self, again: bool) -> None:
        """Record a turn; a model that cannot be recorded is asked directly from now on."""
        graph = torch.cuda.CUDAGraph()
        try:
            with recording(graph, self.state["x"].device):
                self._advance(again)
            self.graphs[again] = graph
        except RuntimeError:
            torch.cuda.synchronize(self.state["x"].device)
            self.graphs, self.capture = {}, False

    def _advance(self, again: bool) -> None:
        """A turn, a function of what is on the device alone; the state changes in place."""
        state, program = self.state, self.program
        if program.gradient:
            answer = Answer(*logits_and_gradient(self.model, state["x_adv"], program.loss, state))
        else:
            logits = logits_at(self.model, state["x_adv"])
            answer = Answer(logits, logits, logits)
        turn = program.turn(state, answer, lambda images: logits_at(self.model, images), again)
        new = turn.new | self._candidate(turn)
        new["asked"] = state["asked"] + ~state["finished"]
        new["finished"] = state["finished"] | new["finished"]
        for name, value in new.items():
            state[name].copy_(value)

    def _candidate(self, turn: Turn) -> State:
        """Remember the image on which the wrong class led the most, relative to the size of the logits."""
        state = self.state
        lead = margin(turn.logits, state["y"])
        score = (-lead if self.program.targeted else lead) / turn.logits.abs().amax(dim=1).clamp_min(1e-30)
        score = score.masked_fill(turn.logits.isnan().any(dim=1), 0.0)  # no right answer, if float32 gives none either
        better = turn.counts & (score > state["score"]) & ~state["finished"]
        candidate = torch.where(per_sample(better, turn.image), turn.image, state["candidate"])
        return {"score": torch.where(better, score, state["score"]), "candidate": candidate}

    def _look(self, occupants: dict[int, _Guest]) -> list[Judged]:
        """Have candidates confirmed, and take out the samples that are broken or have used up their turns."""
        state = self.state
        score, finished = state["score"].tolist(), state["finished"].tolist()
        due = [slot for slot, guest in occupants.items() if self._is_due(guest.turn)]
        slots = [slot for slot in due if finished[slot] or score[slot] > -DOUBT]
        if not slots:
            return []
        rows = torch.tensor(slots, device=state["x"].device)
        none = state["score"][rows].isneginf()
        fallback = state.get("found", state["x_adv"])[rows]
        proposal = torch.where(per_sample(none, fallback), fallback, state["candidate"][rows])
        broken, predicted, distance, image = self.confirm(state["x"][rows], state["y"][rows], proposal)
        state["score"][rows] = -torch.inf
        columns = (broken, predicted, distance, state["stuck"][rows], state["asked"][rows])
        judged = []
        for index, (slot, hit, guess, far, stuck, asked) in enumerate(
            zip(slots, *(column.tolist() for column in columns), strict=True)
        ):
            if not hit and not finished[slot]:
                continue
            guest = occupants.pop(slot)
            stop = Stop.BROKEN if hit else Stop.STUCK if stuck else Stop.SPENT
            forwards, backwards = self.program.asks * asked + 1, asked if self.program.gradient else 0
            judged.append(Judged(guest.position, hit, guess, far, stop, image[index], forwards, backwards))
        return judged


def _blank(x: Tensor) -> State:
    """What the slots remember of a sample beside the program's own state."""
    return {
        "candidate": x,
        "score": torch.full((len(x),), -torch.inf, device=x.device),
        "asked": torch.zeros(len(x), dtype=torch.int64, device=x.device),
    }
