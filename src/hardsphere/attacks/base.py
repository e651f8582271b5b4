"""What every attack shares: its result, when it has won, and how it asks the model.

An attack is a pure function ``attack(model, x, y, ball, *, noise, ...) -> AttackResult``. It keeps its state per
sample, stops working on a sample once that is broken, and leaves the model as it found it. What it returns is a
proposal: the evaluation's runner projects and classifies it again before anything counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from hardsphere.errors import HardsphereError
from hardsphere.threat import Ball, per_sample

Loss = Callable[[Tensor, Tensor], Tensor]
"""A loss (logits, labels) -> one float32 number per sample; an attack makes it large."""

KEEP = ("any", "last")
"""Which iterate an attack returns: the first broken one (the honest protocol), or the last one (the paper's)."""

ROUNDING = 1e-6
"""How far float32 may carry an image beyond the radius."""


class Stop(Enum):
    """Why an attack stopped working on a sample."""

    BROKEN = "The attack found an image inside the ball that the model gets wrong."
    SPENT = "The attack used all its steps and did not break the sample."
    STUCK = "The gradient was exactly zero or not finite everywhere the attack looked: it had no direction to follow."


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
    """Whether the attacker has won: any class but ``y``, or exactly ``y`` if the attack is targeted.

    Logits that are not numbers name no class, so they are no success.
    """
    prediction = logits.argmax(dim=1)
    won = prediction == y if targeted else prediction != y
    return won & ~logits.isnan().any(dim=1)


@contextmanager
def attacking(model: nn.Module, mode: str = "eval") -> Iterator[None]:
    """Run an attack without a trace: eval mode, frozen parameters, and everything put back afterwards.

    Frozen parameters also make each pass a third cheaper, since only the input's gradient is computed. Adversarial
    training may ask for ``mode="train"``: the attack then sees BatchNorm as it is, and does move its statistics.
    """
    modes = {module: module.training for module in model.modules()}
    wanted = {parameter: parameter.requires_grad for parameter in model.parameters()}
    if mode == "eval":
        model.eval()
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
        for parameter, flag in wanted.items():
            parameter.requires_grad_(flag)


def logits_and_gradient(
    model: nn.Module, x: Tensor, loss: Callable[..., Tensor], *context: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The logits at x, ``loss(logits, *context)`` of each sample, and the gradient of each loss by its own image.

    The gradient is zero where the model, or the loss, does not depend on the image at all.
    """
    x = leaf(x)
    with torch.enable_grad():
        logits = model(x).float()
        losses = loss(logits, *context)
        if not losses.requires_grad:
            return logits.detach(), losses, torch.zeros_like(x)
        # Samples do not meet in an eval-mode network, so the gradient of the sum holds each sample's own.
        (gradient,) = torch.autograd.grad(losses.sum(), x, allow_unused=True, materialize_grads=True)
    return logits.detach(), losses.detach(), gradient


def leaf(x: Tensor) -> Tensor:
    """The images as something to differentiate by."""
    if torch.is_inference_mode_enabled():
        raise HardsphereError(
            "torch.inference_mode() takes all gradients away, so that an attack finds nothing: use torch.no_grad()."
        )
    return x.detach().requires_grad_()


def logits_at(model: nn.Module, x: Tensor) -> Tensor:
    """The float32 logits at x, without a graph."""
    with torch.no_grad():
        logits: Tensor = model(x)
    return logits.float()


def has_direction(gradient: Tensor) -> Tensor:
    """Whether a sample's gradient is finite and not all zero."""
    flat = gradient.flatten(1)
    return flat.isfinite().all(dim=1) & (flat != 0).any(dim=1)


def levelled(gradient: Tensor) -> Tensor:
    """Each sample's gradient with its largest entry at +-1: the same direction, out of reach of under- and overflow.

    Entries that are not finite say nothing and become zero; a gradient of zeros stays one.
    """
    gradient = torch.nan_to_num(gradient, nan=0.0, posinf=0.0, neginf=0.0)
    largest = gradient.abs().flatten(1).amax(dim=1)
    return gradient / per_sample(torch.where(largest > 0, largest, 1), gradient)


def survivors(broken: Tensor) -> Tensor:
    """The positions of the samples that are still to be attacked."""
    return (~broken).nonzero().squeeze(1)


def check_batch(x: Tensor, y: Tensor) -> None:
    """Refuse images that the pixel box would cut off, for what is left of them is no success, and foreign labels."""
    if x.dtype not in (torch.float32, torch.float64):
        raise HardsphereError(f"The images are {x.dtype}, but an attack needs float32, such as x.float() in [0, 1].")
    if y.shape != (len(x),) or y.dtype != torch.int64:
        raise HardsphereError(f"The labels are {y.dtype} of shape {tuple(y.shape)}, but must be {len(x)} of int64.")
    if bool((y < 0).any()):
        raise HardsphereError(f"A label is {int(y.min())}, but classes are counted from 0.")
    low, high = (x.detach().min().item(), x.detach().max().item()) if x.numel() else (0.0, 1.0)
    if not (low >= -ROUNDING and high <= 1 + ROUNDING):  # not (...): NaN fails every comparison
        raise HardsphereError(
            f"The pixels lie between {low:.3g} and {high:.3g}, but an attack needs them in [0, 1]: normalise images "
            "inside the model."
        )


def check_settings(keep: str = "any", **counts: int) -> None:
    """Refuse an unknown protocol and counts (steps, restarts, ...) below 1."""
    if keep not in KEEP:
        raise HardsphereError(f"keep is '{keep}', but an attack keeps 'any' broken iterate or only the 'last' one.")
    for name, count in counts.items():
        if count < 1:
            raise HardsphereError(f"{name} is {count}, but an attack needs at least 1.")


def check_sizes(largest: float = math.inf, **sizes: float) -> None:
    """Refuse sizes (sigma, a constant, ...) that are not above 0, finite and at most ``largest``."""
    for name, size in sizes.items():
        if not (0 < size <= largest and math.isfinite(size)):
            limit = "" if largest == math.inf else f" and at most {largest:g}"
            raise HardsphereError(f"{name} is {size}, but must be a finite number above 0{limit}.")
