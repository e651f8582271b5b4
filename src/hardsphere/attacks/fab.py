"""FAB, the fast adaptive boundary attack (Croce & Hein, 2020), and its targeted form as in AutoAttack.

Like DeepFool it walks to linearised decision boundaries, but it projects exactly onto boundary and pixel box together,
is drawn towards the clean image all the while, and goes on from every success to find a closer one. Only ratios of gaps
and gradients are used, so the attack is free of the scale and shift of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from hardsphere.attacks.base import (
    ROUNDING,
    AttackResult,
    attacking,
    check_batch,
    check_settings,
    has_direction,
    logits_at,
    result,
    succeeded,
)
from hardsphere.attacks.deepfool import Rivals, leaders, losing_to, losing_to_leaders, nearest_boundary, winning
from hardsphere.noise import Noise
from hardsphere.threat import Ball, per_sample


def fab(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    noise: Noise,
    steps: int = 100,
    restarts: int = 1,
    candidates: int = 10,
    targeted: bool = False,
    minimise: bool = False,
    alpha_max: float = 0.1,
    eta: float = 1.05,
    beta: float = 0.9,
) -> AttackResult:
    """The closest image on the other side of any boundary.

    A minimum-norm attack: it returns the closest image found that the model gets wrong, or the last one tried, and has
    broken the sample only if such an image was found and lies inside the ball.

    Args:
        y: the true labels, or the wished ones if ``targeted``; then the boundary is that with the leading class.
        restarts: the first starts at the clean image, the others at random at half the best distance so far.
        candidates: as many of the classes that lead at the current image are looked at, the true one among them, with
            one backward pass for each other one. The paper looks at all classes, which 1,000 of them do not allow.
        minimise: go on inside the ball, to the nearest image that can be found.
        alpha_max: the largest weight of the step from the clean image against the step from the current one.
        eta: how much farther than the boundary a step reaches.
        beta: how far from the clean image, in parts of the way, a success is pulled back.
    """
    ball.require("FAB", "linf", "l2")
    check_settings(steps=steps, restarts=restarts, candidates=candidates)
    check_batch(x, y)
    x = x.detach()
    approach = partial(
        _approach, steps=steps, alpha_max=alpha_max, eta=eta, beta=beta, targeted=targeted, candidates=candidates
    )
    with attacking(model):
        won = succeeded(logits_at(model, x), y, targeted)
        return _closest(model, x, y, ball, noise.fold("fab"), won, [None], restarts, minimise, approach)


def fab_targeted(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    noise: Noise,
    steps: int = 100,
    restarts: int = 1,
    targets: int = 9,
    minimise: bool = False,
    alpha_max: float = 0.1,
    eta: float = 1.05,
    beta: float = 0.9,
) -> AttackResult:
    """FAB-T: FAB at one boundary at a time, with one backward pass per step whatever the number of classes.

    The goal is any class but ``y``; the targets are the classes that lead at the clean image, min(targets, classes - 1)
    of them, each tried on the samples that the ones before have not broken. The other arguments are those of `fab`.
    """
    ball.require("FAB", "linf", "l2")
    check_settings(steps=steps, restarts=restarts, targets=targets)
    check_batch(x, y)
    x = x.detach()
    approach = partial(
        _approach, steps=steps, alpha_max=alpha_max, eta=eta, beta=beta, targeted=False, candidates=targets + 1
    )
    with attacking(model):
        logits = logits_at(model, x)
        others, won = leaders(logits, y, targets), succeeded(logits, y)
        rounds = [others[:, rank : rank + 1] for rank in range(others.shape[1])]
        return _closest(model, x, y, ball, noise.fold("fab_targeted"), won, rounds, restarts, minimise, approach)


def _closest(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    noise: Noise,
    won: Tensor,
    rounds: Sequence[Tensor | None],
    restarts: int,
    minimise: bool,
    approach: Callable[..., tuple[Tensor, Tensor, Tensor]],
) -> AttackResult:
    """The best of all restarts and rounds; a round has a target for each sample, or none where any class will do.

    The samples ``won`` need no attack: the model is wrong about the clean image.
    """
    enough = 0.0 if minimise else ball.eps
    found, best = x.clone(), torch.where(won, 0.0, torch.inf).to(x.dtype)
    stuck = torch.ones_like(won)
    for restart in range(restarts):
        for index, targets in enumerate(rounds):
            alive = (best > enough).nonzero().squeeze(1)
            if len(alive) == 0:
                break
            clean = x[alive]
            start = clean
            if restart > 0:
                away = ball.random_surface(clean, noise[alive].fold(restart, index)) - clean
                start = clean + per_sample(0.5 * (best[alive] / ball.eps).clamp_max(1), x) * away
            target = None if targets is None else targets[alive]
            image, distance, moved = approach(model, clean, y[alive], start, ball, target, enough)
            better = (distance < best[alive]) | best[alive].isinf()
            found[alive[better]], best[alive[better]] = image[better], distance[better]
            stuck[alive] &= ~moved
    return result(x, found, best <= ball.eps + ROUNDING, ball, stuck)


def _approach(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    start: Tensor,
    ball: Ball,
    target: Tensor | None,
    enough: float,
    *,
    steps: int,
    alpha_max: float,
    eta: float,
    beta: float,
    targeted: bool,
    candidates: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """One run of FAB from ``start``: the closest success, its distance, and whether there was ever a direction.

    Without a success the image is the last one tried and the distance is infinite. A sample is left alone once its
    distance is at most ``enough``, or where the model gives no direction.
    """

    def rivals(alive: Tensor) -> Rivals:
        if targeted:
            return winning(y[alive])
        return losing_to_leaders(y[alive], candidates - 1) if target is None else losing_to(y[alive], target[alive])

    found, best = start.clone(), torch.full((len(x),), torch.inf, dtype=x.dtype, device=x.device)
    moved = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    alive, x_adv = torch.arange(len(x), device=x.device), start
    for _ in range(steps):
        _, gap, normal = nearest_boundary(model, x_adv, ball, rivals(alive))
        go = has_direction(normal)
        alive, x_adv, gap, normal = alive[go], x_adv[go], gap[go], normal[go]
        if len(alive) == 0:
            break
        moved[alive] = True
        clean, label = x[alive], y[alive]
        x_adv = step_towards(clean, x_adv, gap, normal, ball, alpha_max, eta)
        won = succeeded(logits_at(model, x_adv), label, targeted)
        distance = ball.distance(clean, x_adv)
        better = won & (distance < best[alive])
        found[alive[better]], best[alive[better]] = x_adv[better], distance[better]
        never = best[alive].isinf()
        found[alive[never]] = x_adv[never]
        x_adv = torch.where(per_sample(won, x), clean + beta * (x_adv - clean), x_adv)
        more = best[alive] > enough
        alive, x_adv = alive[more], x_adv[more]
        if len(alive) == 0:
            break
    return found, best, moved


def step_towards(
    clean: Tensor, x_adv: Tensor, gap: Tensor, normal: Tensor, ball: Ball, alpha_max: float, eta: float
) -> Tensor:
    """Step to the linearised boundary, and beyond by eta: partly from x_adv, partly from the clean image.

    Args:
        gap: Z_rival - Z_own at x_adv.
        normal: its gradient.
    """
    # The linearised gap at the clean image is that at x_adv plus what the way back adds to it.
    gap_clean = gap + (normal * (clean - x_adv)).flatten(1).sum(1)
    # Both projections at once: a GPU takes as long for one.
    both = ball.shortest(torch.cat([x_adv, clean]), torch.cat([normal, normal]), -torch.cat([gap, gap_clean]))
    d_adv, d_clean = both.chunk(2)
    a_adv, a_clean = ball.size(d_adv).clamp_min(1e-8), ball.size(d_clean).clamp_min(1e-8)
    alpha = per_sample((a_adv / (a_adv + a_clean)).clamp_max(alpha_max), clean)
    return ((1 - alpha) * (x_adv + eta * d_adv) + alpha * (clean + eta * d_clean)).clamp(0, 1)
