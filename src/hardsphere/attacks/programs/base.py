"""An attack as a program of turns: what `hardsphere.evaluate.slots` needs to keep a GPU full.

In each turn a program asks the model about an image per sample and takes in the answer. All it remembers are tensors
with one row per sample, its turns change them without a question to the host, and no sample knows of another. So a turn
can be recorded once as a CUDA graph and replayed, samples at different turns can share a batch, and a sample that is
done gives up its row to the next one. The functions of `hardsphere.attacks` are the same attacks in plain form: the
tests hold each program against its twin.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hardsphere.noise import Noise
from hardsphere.threat import Ball

State = dict[str, Tensor]
"""One row per sample. Always there: ``x``, ``y``, ``x_adv`` (the image to ask about next), ``stuck`` (there never was a
direction to follow) and ``finished`` (all turns are over)."""


Ask = Callable[[Tensor], Tensor]


class Answer(NamedTuple):
    """What the model says about the images: the logits, the program's loss, and its gradient by the image.

    A program that asks for no gradient gets the logits in the place of both.
    """

    logits: Tensor
    loss: Tensor
    gradient: Tensor


class Turn(NamedTuple):
    """What came of a turn.

    Attributes:
        new: the entries of the state that changed, none of them in place.
        image: the image that may have broken the sample.
        logits: the model's answer for it.
        counts: whether it would count, were the model wrong about it.
    """

    new: State
    image: Tensor
    logits: Tensor
    counts: Tensor


class Program(ABC):
    """An attack in turns.

    Attributes:
        gradient: whether it asks for gradients, or for logits only.
        targeted: whether y is the wished class.
        asks: how many answers a turn takes.
        look_every: after so many turns it pays to look which samples are done.
    """

    gradient = True
    asks = 1
    targeted = False
    look_every = 20

    def __init__(self, ball: Ball) -> None:
        self.ball = ball

    def watching(self, model: nn.Module) -> AbstractContextManager[None]:
        """The context in which ``model`` is asked; a program may look at more than its logits."""
        return nullcontext()

    def prepare(self, x: Tensor) -> None:  # noqa: B027 - most programs have tables, but none needs to
        """Make tables that all turns share, once, before the first sample starts; ``x`` shows shape and device."""

    @abstractmethod
    def start(self, x: Tensor, y: Tensor, noise: Noise, logits: Tensor) -> State:
        """The state before the first turn; ``logits`` are the answers for the clean images."""

    @abstractmethod
    def most_turns(self, state: State) -> int:
        """How many turns a sample has at most."""

    def refresh(self, state: State) -> State:
        """What can be prepared for the next ``look_every`` turns: entries to renew before them."""
        return {}

    def loss(self, logits: Tensor, state: State) -> Tensor:
        """What is differentiated by the image, one number per sample."""
        raise NotImplementedError

    @abstractmethod
    def turn(self, state: State, answer: Answer, ask: Ask, again: bool) -> Turn:
        """What comes of the answer for ``x_adv``.

        Args:
            ask: the logits for other images, should the turn need them.
            again: whether a run may end in this turn, for any sample (see `ends_run`).
        """

    def ends_run(self, turn: int) -> bool:
        """Whether a sample's ``turn`` (from 0) ends a run, so that another may begin and its start is needed."""
        return False


def common(x: Tensor, y: Tensor, x_adv: Tensor, noise: Noise) -> State:
    """The entries that every state has, and the keys of the samples' randomness."""
    never = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    return {"x": x, "y": y, "x_adv": x_adv, "keys": noise.keys, "stuck": ~never, "finished": never}


def zeros(x: Tensor) -> Tensor:
    """A counter per sample."""
    return torch.zeros(len(x), dtype=torch.int64, device=x.device)
