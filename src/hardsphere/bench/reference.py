"""The reference to be faster than: AutoAttack's standard set as the package `pyautoattack` runs it.

It is called as its user would call it: default precision, its own batches, one run over all images. Its log says when
each attack begins; each ends by counting the survivors on the host, so the device's work is in its time.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hardsphere.bench.clock import wait
from hardsphere.errors import HardsphereError
from hardsphere.threat import Ball

BATCH = 500

_LOGGER = "auto-attack"
_NORMS = {"linf": "Linf", "l2": "L2"}
_SMALLEST_CLASSES = 10  # it attacks nine wrong classes, come what may


@dataclass(frozen=True)
class ReferenceRun:
    """What the reference found, and how long it took.

    Attributes:
        seconds: of the whole call, its own checks of the model included.
        attack_seconds: of each attack.
        survivors: positions of the images that withstood everything.
        settings: torch's switches for precision and kernels while it ran.
    """

    seconds: float
    attack_seconds: dict[str, float]
    survivors: frozenset[int]
    batch: int
    settings: dict[str, bool]


def package() -> Any:
    """The reference's package, or one sentence if it is not there."""
    try:
        return importlib.import_module("pyautoattack")
    except ImportError:
        raise HardsphereError(
            "The comparison needs the package pyautoattack, which is not installed: pip install pyautoattack==0.2.0."
        ) from None


def check_comparable(ball: Ball, suite: str, classes: int) -> None:
    """Refuse, before anything is measured, what the reference cannot do."""
    package()
    if suite != "standard":
        raise HardsphereError(f"pyautoattack runs the suite standard only, not {suite}: leave the comparison away.")
    if ball.norm not in _NORMS:
        raise HardsphereError(f"The comparison with pyautoattack is for linf and l2, not {ball.norm}.")
    if classes < _SMALLEST_CLASSES:
        raise HardsphereError(
            f"pyautoattack needs at least {_SMALLEST_CLASSES} classes, but the model has {classes}: "
            "leave the comparison away."
        )


def run_reference(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    seed: int,
    batch: int = BATCH,
    say: Callable[[str], None] = lambda text: None,
) -> ReferenceRun:
    """Attack the images, which lie on the model's device, with the standard set of pyautoattack.

    Args:
        say: told what the reference logs after each attack.
    """
    attack = package().AutoAttack(
        model, norm=_NORMS[ball.norm], eps=ball.eps, version="standard", device=x.device, seed=seed
    )
    settings = _settings()
    with _attack_begins(say) as begins:
        wait(x.device)
        begin = time.time()
        _, predicted = attack.run_standard_evaluation(x, y, batch_size=batch)
        wait(x.device)
        end = time.time()
    model.zero_grad(set_to_none=True)  # some of its attacks leave gradients behind
    ends = [*(moment for _, moment in begins[1:]), end]
    spent = {name: until - moment for (name, moment), until in zip(begins, ends, strict=True)}
    survivors = frozenset((predicted == y).nonzero().squeeze(1).tolist())
    return ReferenceRun(end - begin, spent, survivors, batch, settings)


def _settings() -> dict[str, bool]:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return {
        "cudnn.allow_tf32": cudnn.allow_tf32,
        "cuda.matmul.allow_tf32": matmul.allow_tf32,
        "cudnn.benchmark": cudnn.benchmark,
        "cudnn.deterministic": cudnn.deterministic,
    }


@contextmanager
def _attack_begins(say: Callable[[str], None]) -> Iterator[list[tuple[str, float]]]:
    """The names of the attacks and when each began, from the reference's own log, which nobody else sees meanwhile."""
    found: list[tuple[str, float]] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            first, _, name = record.getMessage().partition(" ")
            if first == "running":
                found.append((name, record.created))
            elif first == "robust":
                say(f"pyautoattack: {record.getMessage()}")

    logger, listener = logging.getLogger(_LOGGER), Listener()
    level, propagate = logger.level, logger.propagate
    logger.addHandler(listener)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield found
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
        logger.propagate = propagate
