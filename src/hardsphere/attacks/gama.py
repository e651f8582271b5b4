"""GAMA-PGD (Sriramanan et al., 2020): the margin of probabilities, guided at first by how far they have moved.

The relaxation lambda * ||P(x') - P(x_0)||^2 gives the first steps a direction that does not depend on one rival class
alone; it fades to nothing over the first quarter. The loss speaks of probabilities, so it sees the scale of the logits:
the deployed model, at its training temperature, is the one to attack.
"""

from __future__ import annotations

from torch import Tensor, nn

from hardsphere.attacks.base import AttackResult, check_settings
from hardsphere.attacks.losses import margin
from hardsphere.attacks.pgd import climb
from hardsphere.noise import Noise
from hardsphere.threat import Ball

_FADED = 0.25  # of the steps: 25 of 100
_DROPS = (0.6, 0.85)  # of the steps: 60 and 85 of 100


def gama(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    noise: Noise,
    steps: int = 100,
    step_size: float | None = None,
    restarts: int = 1,
    relaxation: float = 50.0,
    targeted: bool = False,
    keep: str = "any",
) -> AttackResult:
    """PGD from a random extreme point of the ball on the guided margin of probabilities.

    Args:
        step_size: the first length of a step, 2 * eps by default; a tenth of it after 60 % and a hundredth after 85 %
            of the steps.
        relaxation: lambda at the first step.
        keep: as in `pgd`.
    """
    check_settings(steps=steps)
    first = 2 * ball.eps if step_size is None else step_size
    sign = -1 if targeted else 1
    reference: Tensor | None = None

    def objective(logits: Tensor, alive: Tensor, step: int) -> Tensor:
        nonlocal reference
        probabilities = logits.softmax(dim=1)
        if reference is None:
            reference = probabilities.new_zeros(len(x), probabilities.shape[1])
        if step == 0:
            reference[alive] = probabilities.detach()
        moved = (probabilities - reference[alive]).pow(2).sum(dim=1)
        weight = relaxation * max(0.0, 1 - step / (_FADED * steps))
        return sign * margin(probabilities, y[alive]) + weight * moved

    return climb(
        model,
        x,
        y,
        ball,
        start=lambda alive, restart: ball.random_extreme(x[alive], noise[alive].fold("gama", restart)),
        objective=objective,
        steps=steps,
        step_size=lambda step: first * 0.1 ** sum(step >= drop * steps for drop in _DROPS),
        restarts=restarts,
        targeted=targeted,
        keep=keep,
    )
