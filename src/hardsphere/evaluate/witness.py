"""What the runner sees with its own eyes: answers in float32, passes counted, distances measured.

Nothing an attack returns is believed. `confirm` projects each proposal into the ball, measures its distance in float64,
asks the model in eval mode and in plain float32 (TF32 and autocast off), and only then says that a sample is broken.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn

from hardsphere.attacks.base import attacking
from hardsphere.errors import HardsphereError
from hardsphere.runtime import exact_float32, kernels_chosen
from hardsphere.threat import Ball, per_sample

TOLERANCE = 1e-6
"""How far beyond eps a perturbation may reach: the rounding of float32 pixels."""


FEW = 32
"""Clean images that a model is asked for to see how it answers."""

TOO_LARGE = "Even a single image does not fit into memory: use another device."


class Counted(nn.Module):
    """A model that counts, in samples, the forward and backward passes asked of it.

    Whatever calls it pays, so that a budget is measured from outside the attack. Attributes that this class does not
    have are the model's own.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self.forwards = 0
        self.backwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += len(x)
        if x.requires_grad and torch.is_grad_enabled():
            # An alias of its own for this pass: its gradient is asked for exactly when a backward pass comes this way,
            # from the logits or, as in the feature attack, from somewhere inside.
            x = x.view_as(x)
            x.register_hook(self._count_backward)  # type: ignore[no-untyped-call]
        return cast(Tensor, self.model(x))

    def _count_backward(self, gradient: Tensor) -> None:
        self.backwards += len(gradient)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)


class CallableModule(nn.Module):
    """Any function from images to logits, as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def extra_repr(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__name__)


class Judged(NamedTuple):
    """A model as it is judged.

    Attributes:
        model: the model itself if its numbers are float32, else a copy in float32.
        remark: that it is a copy, and what the model answers as it is.
        finite: whether it answers in finite numbers as it is, as far as is known.
    """

    model: nn.Module
    remark: str | None = None
    finite: bool = True


def in_float32(model: nn.Module | Callable[[Tensor], Tensor], x: Tensor) -> Judged:
    """The model in float32.

    Args:
        x: some clean images where the model is; one that casts them by itself, so that no copy could answer them, is
            left as it is.
    """
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise HardsphereError(f"The model is a {type(model).__name__}, but must be a torch module or a function.")
        return Judged(CallableModule(model))
    if _has_no_modes(model):
        return Judged(CallableModule(model.__call__))
    dtype = _other_dtype(model)
    if dtype is None:
        return Judged(model)
    copied = copy.deepcopy(model).float()
    answers = _own_answer(copied, x)
    if answers is None and _own_answer(model, x) is not None:
        return Judged(model)
    text = f"The model's numbers are {dtype}: it was measured in a float32 copy of itself."
    own = _own_answer(model, x.to(dtype))
    if own is None or answers is None or own.shape != answers.shape:
        return Judged(copied, f"{text} What it answers as it is could not be asked here.")
    infinite = int((~own.isfinite().all(dim=1)).sum())
    if infinite:
        remark = f"{text} As it is, its answers for {infinite} of {len(x)} clean images are not finite."
        return Judged(copied, remark, finite=False)
    flipped = int((own.argmax(dim=1) != answers.argmax(dim=1)).sum())
    return Judged(copied, f"{text} As it is, it puts {flipped} of {len(x)} clean images into another class.")


def _other_dtype(model: nn.Module) -> torch.dtype | None:
    """The type of a model's numbers, where it is not float32."""
    tensors = (*model.parameters(), *model.buffers())
    others = (tensor.dtype for tensor in tensors if tensor.is_floating_point() and tensor.dtype != torch.float32)
    return next(others, None)


def _has_no_modes(model: nn.Module) -> bool:
    """Whether a module knows neither training nor evaluation: frozen TorchScript, and what `torch.export` makes."""
    exported = isinstance(model, fx.GraphModule) and "train" in vars(model)  # where it only raises
    return exported or not all(hasattr(module, "training") for module in model.modules())


def _own_answer(model: nn.Module, x: Tensor) -> Tensor | None:
    """What a model answers if it can."""
    try:
        with attacking(model), torch.no_grad():
            answers = model(x)
    except Exception:  # whatever a foreign model does with numbers that it does not expect
        return None
    return answers.float() if isinstance(answers, Tensor) and answers.dim() == 2 else None


def device_of(model: nn.Module | Callable[[Tensor], Tensor], default: torch.device) -> torch.device:
    """Where the model lives; a function does not say."""
    tensors = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    return tensors[0].device if tensors else default


@contextmanager
def moved(model: nn.Module, home: torch.device, place: torch.device) -> Iterator[None]:
    """The model on another device for a while."""
    if place == home:
        yield
        return
    model.to(place)
    try:
        yield
    finally:
        model.to(home)


@contextmanager
def plain_float32(device: torch.device) -> Iterator[None]:
    """Float32 as IEEE means it: no TF32, no autocast, and convolutions that repeat. All put back afterwards."""
    with kernels_chosen(repeatable=True), exact_float32(), torch.autocast(device.type, enabled=False):
        yield


def answer(model: nn.Module, x: Tensor) -> Tensor:
    """The model's logits in float32, or one sentence about what is wrong with them."""
    with torch.no_grad():
        logits = model(x)
    if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != len(x) or logits.shape[1] < 2:
        what = f"the shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise HardsphereError(f"For {len(x)} images the model returned {what}, but must return logits (N, classes).")
    if not logits.is_floating_point():
        raise HardsphereError(f"The model returned {logits.dtype} numbers, but must return logits, which are floats.")
    return logits.float()


def one_by_one(model: nn.Module, x: Tensor) -> Tensor:
    """The logits of a few images, each asked for alone: how many fit into memory is not known yet."""
    return torch.cat([answer(model, x[row : row + 1]) for row in range(len(x))])


def introduce(model: nn.Module, x: Tensor) -> int:
    """Ask the model for the first time: the number of its classes, or one sentence about why it does not answer."""
    before = x.clone()
    try:
        logits = answer(model, x)
    except HardsphereError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, AssertionError) as reason:
        if is_out_of_memory(reason):
            raise HardsphereError(TOO_LARGE) from reason
        first = str(reason).strip().partition("\n")[0]
        raise HardsphereError(
            f"The model cannot take images of shape {tuple(x.shape[1:])}: {type(reason).__name__}: {first}"
        ) from reason
    if not torch.equal(x, before):
        x.copy_(before)
        raise HardsphereError(
            "The model changes the images that it is given, so that no attack could trust its own: let it work on a "
            "copy, as in lambda x: model(x.clone())."
        )
    return logits.shape[1]


ALIKE = 1e-3
"""How far answers of one model may differ between machines, as a share of their spread."""


def differ(answers: Tensor, earlier: Tensor) -> bool:
    """Whether these logits are those of another model, and not of the same one on another machine."""
    if answers.shape != earlier.shape or not torch.equal(answers.isfinite(), earlier.isfinite()):
        return True
    finite = answers.isfinite()
    if not bool(finite.any()):
        return False
    gap, spread = (answers - earlier)[finite].abs().max(), (earlier[finite] - earlier[finite].mean()).abs().max()
    return bool(gap > ALIKE * spread)


def clean_predictions(model: nn.Module, x: Tensor) -> Tensor:
    """The class of each clean image; NaN is an error here, because then no number about the model means anything."""
    logits = answer(model, x)
    if bool(logits.isnan().any()):
        raise HardsphereError(
            "The model returned NaN for clean images: look for a division by zero or a bad checkpoint."
        )
    return logits.argmax(dim=1)


def confirm(
    model: nn.Module, x: Tensor, y: Tensor, x_adv: Tensor, ball: Ball, outside: str = "project"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the runner says about proposed images: (broken, predicted class or -1, distance, the image judged).

    A proposal outside the ball is projected into it, or counts as failed if ``outside`` is ``"filter"``. A proposal
    that holds NaN is the clean image. An image on which the model answers NaN is broken: that is no right answer.
    """
    if x_adv.shape != x.shape:
        raise HardsphereError(f"The attack returned images of shape {tuple(x_adv.shape)} for images {tuple(x.shape)}.")
    x_adv = x_adv.detach().to(x)
    hopeless = ~x_adv.flatten(1).isfinite().all(dim=1)
    x_adv = torch.where(per_sample(hopeless, x), x, x_adv)
    if outside == "project":
        x_adv = _inside(x, x_adv, ball)
    distance = ball.distance(x.double(), x_adv.double())
    flat = x_adv.flatten(1)
    allowed = (distance <= ball.eps + TOLERANCE) & (flat >= 0).all(dim=1) & (flat <= 1).all(dim=1)
    logits = answer(model, x_adv)
    predicted = torch.where(logits.isnan().any(dim=1), -1, logits.argmax(dim=1))
    return allowed & (predicted != y), predicted, distance.float(), x_adv


def _inside(x: Tensor, x_adv: Tensor, ball: Ball) -> Tensor:
    """The projection, and a second look: rounding many pixels may leave an l1 or l2 perturbation a hair too long."""
    x_adv = ball.project(x, x_adv)
    distance = ball.distance(x.double(), x_adv.double())
    shrink = torch.where(distance > ball.eps, (1 - 1e-6) * ball.eps / distance.clamp_min(1e-30), 1.0)
    shrunk = (x + (x_adv - x) * per_sample(shrink, x).to(x)).clamp(0, 1)
    return torch.where(per_sample(distance > ball.eps + TOLERANCE, x), shrunk, x_adv)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception is a device's, or the machine's, way to say that a batch is too large."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


def model_digest(model: nn.Module) -> str:
    """A fingerprint of what the model computes: its layout, its float settings such as a head's scale, its weights."""
    sha = hashlib.sha256(re.sub(r" at 0x[0-9a-f]+", "", repr(model)).encode())
    for name, module in model.named_modules():
        settings = {key: value for key, value in vars(module).items() if isinstance(value, float)}
        sha.update(f"{name} {type(module).__qualname__} {sorted(settings.items())}".encode())
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            sha.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            sha.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return sha.hexdigest()[:16]
