"""What every attack shares: its result, when it has won, and how it asks the model.

An attack is a pure function ``attack(model, x, y, ball, *, noise, ...) -> AttackResult``. It keeps its state per sample,
stops working on a sample once that is broken, and leaves the model as it found it. What it returns is a proposal: the
evaluation's runner projects and classifies it again before anything counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from hardsphere.threat import Ball

Loss = Callable[[Tensor, Tensor], Tensor]
"""A loss (logits, labels) -> one float32 number per sample; an attack makes it large."""


class Stop(Enum):
    """Why an attack stopped working on a sample."""

    BROKEN = "The attack found an image inside the ball that the model gets wrong."
    SPENT = "The attack used all its steps and did not break the sample."
    STUCK = "The gradient was exactly zero or not finite everywhere the attack looked, so it had no direction to follow."


@dataclass(frozen=True)
class AttackResult:
    """What an attack proposes.

    Attributes:
        x_adv: one image per sample: a broken one if any was found, else the last one tried.
        distance: its distance from the clean image, in the ball's norm.
        stop: for each sample why the attack stopped.
    """

    x_adv: Tensor
    distance: Tensor
    stop: list[Stop]


def result(x: Tensor, x_adv: Tensor, broken: Tensor, ball: Ball, stuck: Tensor | None = None) -> AttackResult:
    """Package images and masks as an `AttackResult`."""
    reasons = broken.long() if stuck is None else torch.where(broken, 1, torch.where(stuck, 2, 0))
    stop = [(Stop.SPENT, Stop.BROKEN, Stop.STUCK)[code] for code in reasons.tolist()]
    return AttackResult(x_adv, ball.distance(x, x_adv), stop)


def succeeded(logits: Tensor, y: Tensor, targeted: bool = False) -> Tensor:
    """Whether the attacker has won: any class but ``y``, or exactly ``y`` if the attack is targeted."""
    prediction = logits.argmax(dim=1)
    return prediction == y if targeted else prediction != y


@contextmanager
def attacking(model: nn.Module) -> Iterator[None]:
    """Run an attack without a trace: eval mode, frozen parameters, and everything put back afterwards.

    Frozen parameters also make each pass a third cheaper, since only the input's gradient is computed.
    """
    modes = {module: module.training for module in model.modules()}
    wanted = {parameter: parameter.requires_grad for parameter in model.parameters()}
    model.eval()
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for parameter, flag in wanted.items():
            parameter.requires_grad_(flag)


def logits_and_gradient(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The logits at x, the loss of each sample, and the gradient of each loss by its own image."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        logits = model(x).float()
        losses = loss(logits)
        # Samples do not meet in an eval-mode network, so the gradient of the sum holds each sample's own.
        (gradient,) = torch.autograd.grad(losses.sum(), x)
    return logits.detach(), losses.detach(), gradient
