"""Projected gradient descent (Madry et al., 2018): eq. 8 of the paper, repeated inside the ball.

FGSM (Goodfellow et al., 2015) is its first step from the clean image, BIM (Kurakin et al., 2017) the same without a
random start. `climb` is the loop that these, MIM, C&W, GAMA and the feature attack share; they differ in where they
start, what they climb, how far a step goes and whether the steps remember each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hardsphere.attacks.base import (
    AttackResult,
    Loss,
    attacking,
    check_batch,
    check_settings,
    has_direction,
    levelled,
    logits_and_gradient,
    logits_at,
    result,
    succeeded,
    survivors,
)
from hardsphere.attacks.losses import cross_entropy, towards
from hardsphere.noise import Noise
from hardsphere.threat import Ball

Fuse = Callable[[Callable[..., Any]], Callable[..., Any]]


def as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """Leave a function as it is: the slow twin of compiling it."""
    return function


def ascend(
    objective: Callable[[Tensor], Tensor],
    x: Tensor,
    start: Tensor,
    ball: Ball,
    steps: int,
    step_size: float,
    fused: Fuse = as_it_is,
) -> Tensor:
    """The inner maximisation of adversarial training: ``steps`` steps up a per-sample objective, last iterate.

    Args:
        fused: what makes a function of tensors fast, such as `torch.compile`.
    """
    total = fused(lambda x_adv: objective(x_adv).sum())
    advance = fused(lambda x_adv, gradient: ball.project(x, ball.step(x_adv, gradient, step_size)))
    x_adv = start
    for _ in range(steps):
        x_adv = x_adv.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(total(x_adv), x_adv)
        x_adv = advance(x_adv.detach(), gradient)
    return x_adv.detach()


def climb(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    start: Callable[[Tensor, int], Tensor],
    objective: Callable[[Tensor, Tensor, int], Tensor],
    steps: int,
    step_size: Callable[[int], float],
    restarts: int = 1,
    momentum: Callable[[Tensor, Tensor, int], Tensor] | None = None,
    targeted: bool = False,
    keep: str = "any",
) -> AttackResult:
    """Projected steps up an objective, on the samples that are not yet broken.

    The callables are given ``alive``, the positions in the batch of the samples at hand, so that whatever they remember
    of a sample can stay in tensors of the whole batch.

    Args:
        start: (alive, restart) -> the first images.
        objective: (logits, alive, step) -> what to make large, one number per sample.
        step_size: step -> the length of that step in the ball's norm.
        momentum: (gradient, alive, step) -> the direction to follow instead of the gradient itself.
    """
    check_settings(keep, steps=steps, restarts=restarts)
    check_batch(x, y)
    x = x.detach()
    found, broken = x.clone(), torch.zeros(len(x), dtype=torch.bool, device=x.device)
    stuck = torch.ones_like(broken)
    with attacking(model):
        for restart in range(restarts):
            alive = survivors(broken)
            if len(alive) == 0:
                break
            x_adv = start(alive, restart).detach()
            for step in range(steps):
                logits, _, gradient = logits_and_gradient(model, x_adv, objective, alive, step)
                if keep == "any":
                    won = succeeded(logits, y[alive], targeted)
                    if won.any():
                        found[alive[won]], broken[alive[won]] = x_adv[won], True
                        alive, x_adv, gradient = alive[~won], x_adv[~won], gradient[~won]
                        if len(alive) == 0:
                            break
                stuck[alive] &= ~has_direction(gradient)
                direction = levelled(gradient)
                if momentum is not None:
                    direction = momentum(direction, alive, step)
                x_adv = ball.project(x[alive], ball.step(x_adv, direction, step_size(step)))
            if len(alive):
                found[alive], broken[alive] = x_adv, succeeded(logits_at(model, x_adv), y[alive], targeted)
    return result(x, found, broken, ball, stuck)


def pgd(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    noise: Noise,
    steps: int = 20,
    step_size: float | None = None,
    restarts: int = 1,
    loss: Loss = cross_entropy,
    random_start: bool = True,
    targeted: bool = False,
    keep: str = "any",
) -> AttackResult:
    """Gradient ascent on a loss inside the ball.

    Args:
        y: the true labels, or the wished ones if ``targeted``.
        step_size: length of a step in the ball's norm; 2.5 * eps / steps by default.
        keep: ``"any"`` keeps the first broken iterate of any restart and stops there (the honest protocol);
            ``"last"`` runs every step and returns the last iterate (the paper's protocol).
    """
    length = default_step(ball, steps) if step_size is None else step_size
    ascent = towards(loss) if targeted else loss

    def start(alive: Tensor, restart: int) -> Tensor:
        return ball.random_start(x[alive], noise[alive].fold("pgd", restart)) if random_start else x[alive]

    return climb(
        model,
        x,
        y,
        ball,
        start=start,
        objective=lambda logits, alive, _: ascent(logits, y[alive]),
        steps=steps,
        step_size=lambda _: length,
        restarts=restarts,
        targeted=targeted,
        keep=keep,
    )


def fgsm(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    noise: Noise,
    loss: Loss = cross_entropy,
    targeted: bool = False,
    keep: str = "any",
) -> AttackResult:
    """One steepest step of length eps from the clean image. It draws nothing from ``noise``."""
    return bim(model, x, y, ball, noise=noise, steps=1, step_size=ball.eps, loss=loss, targeted=targeted, keep=keep)


def bim(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    noise: Noise,
    steps: int = 20,
    step_size: float | None = None,
    loss: Loss = cross_entropy,
    targeted: bool = False,
    keep: str = "any",
) -> AttackResult:
    """PGD from the clean image. It draws nothing from ``noise``."""
    return pgd(
        model,
        x,
        y,
        ball,
        noise=noise,
        steps=steps,
        step_size=step_size,
        loss=loss,
        random_start=False,
        targeted=targeted,
        keep=keep,
    )


def default_step(ball: Ball, steps: int) -> float:
    """2.5 * eps / steps (Madry et al.): long enough to cross the ball and to turn round once."""
    return 2.5 * ball.eps / max(steps, 1)
