"""What attacks maximise: losses of (logits, labels), one float32 number per sample.

The cross-entropy sees the scale of the logits: at a small one its gradient spreads over all classes, at a large one it
underflows. The margin and the difference of logits ratio (DLR; Croce and Hein, 2020) do not, up to the last bit: their
denominators carry no additive constant.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hardsphere.attacks.base import Loss
from hardsphere.sphere import SphereHead, margin_cross_entropy


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """-log softmax(Z)_y: the only one of these losses whose strength depends on the scale of the logits."""
    return F.cross_entropy(logits.float(), y, reduction="none")


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """max over i != y of Z_i - Z_y: positive exactly when the sample is broken; its direction is free of scale."""
    logits = logits.float()
    return runner_up(logits, y) - logits.gather(1, y[:, None]).squeeze(1)


def dlr_available(num_classes: int) -> bool:
    """Whether the DLR losses exist: they rank four classes. For fewer, the margin takes their place."""
    return num_classes >= 4


def dlr(logits: Tensor, y: Tensor) -> Tensor:
    """(max over i != y of Z_i - Z_y) / (Z_pi1 - Z_pi3); the margin below four classes."""
    logits = logits.float()
    if not dlr_available(logits.shape[1]):
        return margin(logits, y)
    top = logits.topk(3, dim=1).values
    return margin(logits, y) / _spread(top[:, 0] - top[:, 2])


def targeted_dlr(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """(Z_t - Z_y) / (Z_pi1 - (Z_pi3 + Z_pi4) / 2), the way from class y to class t; Z_t - Z_y below four classes."""
    logits = logits.float()
    lead = (logits.gather(1, target[:, None]) - logits.gather(1, y[:, None])).squeeze(1)
    return _over_four(lead, logits)


def wished_dlr(logits: Tensor, y: Tensor) -> Tensor:
    """The targeted DLR where only the wished class y is known: its rival is the largest of the other logits.

    The negative of `dlr` would not do: it is constant wherever the wished class ranks third.
    """
    logits = logits.float()
    return _over_four(-margin(logits, y), logits)


def adaptive(head: SphereHead | None, spoken_at: float | None = None) -> Loss:
    """The paper's adaptive attack: the loss the model was trained with, scale s and margin m included (eq. 6).

    Args:
        head: the model's hypersphere head; without one this is the cross-entropy.
        spoken_at: the scale at which the logits arrive, such as 1 through `paper_view`; the head's own by default.
    """
    factor = 1.0 if head is None or spoken_at is None else head.scale / spoken_at
    return lambda logits, y: margin_cross_entropy(head, logits.float() * factor, y)


def runner_up(logits: Tensor, y: Tensor) -> Tensor:
    """The largest logit of a class other than y."""
    return logits.scatter(1, y[:, None], -torch.inf).amax(dim=1)


def negated(loss: Loss) -> Loss:
    """The loss with its sign turned: it falls where the other rises."""
    return lambda logits, y: -loss(logits, y)


def towards(loss: Loss) -> Loss:
    """The loss of a targeted attack, which moves towards a class instead of away from it."""
    return wished_dlr if loss is dlr else negated(loss)


def _over_four(lead: Tensor, logits: Tensor) -> Tensor:
    if not dlr_available(logits.shape[1]):
        return lead
    top = logits.topk(4, dim=1).values
    return lead / _spread(top[:, 0] - (top[:, 2] + top[:, 3]) / 2)


def _spread(difference: Tensor) -> Tensor:
    """A denominator; where the top logits tie, 1, so that the numerator's gradient still counts."""
    return torch.where(difference > 0, difference, 1)
