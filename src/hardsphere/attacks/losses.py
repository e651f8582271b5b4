"""What attacks maximise: losses of (logits, labels), one float32 number per sample."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hardsphere.attacks.base import Loss


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """-log softmax(Z)_y: the only one of these losses whose strength depends on the scale of the logits."""
    return F.cross_entropy(logits.float(), y, reduction="none")


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """max over i != y of Z_i - Z_y: positive exactly when the sample is broken; its direction is free of scale."""
    logits = logits.float()
    return runner_up(logits, y) - logits.gather(1, y[:, None]).squeeze(1)


def runner_up(logits: Tensor, y: Tensor) -> Tensor:
    """The largest logit of a class other than y."""
    return logits.scatter(1, y[:, None], -torch.inf).amax(dim=1)


def negated(loss: Loss) -> Loss:
    """The loss of a targeted attack, which moves towards a class instead of away from it."""
    return lambda logits, y: -loss(logits, y)
