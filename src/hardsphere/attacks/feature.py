"""The feature attack (Lin et al., Line290/FeatureAttack): imitate the features of an image of another class.

Each attempt draws a guide, an image of another class, and climbs the cosine between the penultimate features of the
attacked image and those of the guide. The cosine knows nothing of the logits, nor of their scale. Trying many guides
for one image is the same as replicating the image, only that no work is done after the first success.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hardsphere.attacks.base import AttackResult, check_batch, logits_at
from hardsphere.attacks.pgd import climb
from hardsphere.errors import HardsphereError
from hardsphere.noise import Noise
from hardsphere.sphere import final_linear
from hardsphere.threat import Ball


def feature_attack(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    noise: Noise,
    guides: Tensor,
    guide_labels: Tensor,
    steps: int = 50,
    step_size: float | None = None,
    restarts: int = 100,
    targeted: bool = False,
    keep: str = "any",
) -> AttackResult:
    """Climb towards the features of drawn guides, one guide per restart.

    Args:
        guides: images to imitate, such as the rest of the test set.
        guide_labels: their labels; a sample is guided by images of any class but y, or of class y if ``targeted``.
        step_size: length of a step in the ball's norm; eps / 8 by default.
        restarts: how many guides each sample may try, drawn with replacement.
        keep: as in `pgd`.
    """
    check_batch(guides, guide_labels)
    length = ball.eps / 8 if step_size is None else step_size
    order, counts = eligible_guides(y, guide_labels, targeted)
    wished: Tensor | None = None

    with watched(model) as caught:

        def start(alive: Tensor, restart: int) -> Tensor:
            nonlocal wished
            streams = noise[alive].fold("feature", restart)
            drawn = (streams.fold("guide").uniform() * counts[alive]).long().clamp_max(counts[alive] - 1)
            logits_at(model, guides[order[alive, drawn]])
            features = caught[-1].flatten(1).float()
            if wished is None:
                wished = features.new_zeros(len(x), features.shape[1])
            wished[alive] = features
            return ball.random_start(x[alive], streams)

        def objective(_: Tensor, alive: Tensor, step: int) -> Tensor:
            assert wished is not None, "start() runs before the first step"
            return F.cosine_similarity(caught[-1].flatten(1).float(), wished[alive], dim=1)

        return climb(
            model,
            x,
            y,
            ball,
            start=start,
            objective=objective,
            steps=steps,
            step_size=lambda _: length,
            restarts=restarts,
            targeted=targeted,
            keep=keep,
        )


def eligible_guides(y: Tensor, guide_labels: Tensor, targeted: bool) -> tuple[Tensor, Tensor]:
    """The guides in an order of its own for each sample, those that it may have first, and how many these are."""
    eligible = (guide_labels[None, :] == y[:, None]) == targeted
    counts = eligible.sum(dim=1)
    if (counts == 0).any():
        wanted = "of a wished class" if targeted else "of another class"
        raise HardsphereError(f"Some samples have no guide {wanted}: give the feature attack guides of more classes.")
    return (~eligible).byte().argsort(dim=1, stable=True), counts


@contextmanager
def watched(model: nn.Module) -> Iterator[list[Tensor]]:
    """Catches what the final layer is given in each pass: the list holds the latest feature, with its graph."""
    caught: list[Tensor] = []

    def catch(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        caught[:] = [inputs[0]]

    hook = model.get_submodule(final_linear(model)).register_forward_pre_hook(catch)
    try:
        yield caught
    finally:
        hook.remove()
