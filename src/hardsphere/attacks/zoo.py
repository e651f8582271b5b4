"""ZOO (Chen et al., 2017): coordinate descent with finite differences, one Adam per pixel.

The loss is that of Carlini and Wagner. Here the ball bounds the distance, so that only its margin is left (the limit of
a large constant c), and each round takes many coordinates at the same image, one after the other in a random order that
visits all of them before any for the second time.

Moving one pixel by the paper's sigma of 1e-4 changes a cosine by about 1e-6 to 1e-7, which is float32's own rounding:
such estimates are mostly noise. The default here is one grey level, 1/255, whose effect stands well above the rounding
and which is still small beside the ball. What `hardsphere.attacks.finite_differences` says about precision holds here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hardsphere.attacks.base import (
    AttackResult,
    Loss,
    attacking,
    check_batch,
    check_settings,
    check_sizes,
    result,
    succeeded,
)
from hardsphere.attacks.finite_differences import GROUP, ask, full_precision, slopes_along
from hardsphere.attacks.losses import margin, negated
from hardsphere.noise import Noise
from hardsphere.threat import Ball

BETA_1, BETA_2 = 0.9, 0.999  # Adam's


@torch.no_grad()
def zoo(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    noise: Noise,
    queries: int = 20_000,
    step_size: float | None = None,
    sigma: float = 1 / 255,
    coordinates: int = 128,
    targeted: bool = False,
    chunk: int = 2048,
) -> AttackResult:
    """Ascent on the margin, a few coordinates at a time.

    One query goes to the clean image and 2 * coordinates + 1 to each round, whose last one asks whether the sample is
    broken.

    Args:
        y: the true labels, or the wished ones if ``targeted``.
        queries: the most queries per sample.
        step_size: Adam's learning rate; eps / 3 by default, which is about the usual 0.01 at 8/255.
        sigma: how far a pixel is moved to measure its slope.
        coordinates: pixels (of one channel) per round.
        chunk: the most images in one call of the model; it changes memory, not outcomes.
    """
    ball.require("ZOO", "linf")
    check_settings(queries=queries, coordinates=coordinates, chunk=chunk)
    check_sizes(sigma=sigma)
    check_batch(x, y)
    noise, step_size = noise.fold("zoo"), ball.eps / 3 if step_size is None else step_size
    goal, pixels = negated(margin) if targeted else margin, x.shape[1:].numel()
    found, broken = x.clone(), torch.zeros(len(x), dtype=torch.bool, device=x.device)
    stuck = torch.ones_like(broken)
    alive = torch.arange(len(x), device=x.device)
    mean, square = torch.zeros_like(x).flatten(1), torch.zeros_like(x).flatten(1)
    left, visit, position, order = queries, 0, pixels, torch.empty(0)
    with attacking(model), full_precision(x):
        while left >= 1 and len(alive):
            left -= 1
            won = succeeded(ask(model, found[alive], chunk), y[alive], targeted)
            broken[alive[won]] = True
            alive = alive[~won]
            if position == pixels:  # all pixels have been visited: shuffle them again
                order, visit, position = noise.fold(visit).bits(pixels).argsort(dim=1, stable=True), visit + 1, 0
            count = min(coordinates, pixels - position, (left - 1) // 2)
            if count < 1 or len(alive) == 0:
                break
            left -= 2 * count
            chosen, rows = order[alive, position : position + count], alive[:, None]
            position += count
            slopes = _pixel_slopes(model, found[alive], y[alive], chosen, sigma, goal, chunk)
            stuck[alive] &= (slopes == 0).all(dim=1)
            mean[rows, chosen] = BETA_1 * mean[rows, chosen] + (1 - BETA_1) * slopes
            square[rows, chosen] = BETA_2 * square[rows, chosen] + (1 - BETA_2) * slopes**2
            # Every pixel has its own count of steps in Adam, which is the number of visits. No constant is added to
            # the denominator: it would see the scale of the logits.
            towards = mean[rows, chosen] / (1 - BETA_1**visit)
            size = (square[rows, chosen] / (1 - BETA_2**visit)).sqrt()
            x_adv = found[alive].flatten(1)
            x_adv = x_adv.scatter_add(1, chosen, step_size * torch.where(size > 0, towards / size, 0))
            found[alive] = ball.project(x[alive], x_adv.reshape(-1, *x.shape[1:]))
    return result(x, found, broken, ball, stuck)


def _pixel_slopes(
    model: nn.Module, x: Tensor, y: Tensor, chosen: Tensor, sigma: float, goal: Loss, chunk: int
) -> Tensor:
    """The slope of the goal along each chosen pixel; a few pixels at a time, since each is a whole image to ask for."""
    slopes = []
    for first in range(0, chosen.shape[1], GROUP):
        some = chosen[:, first : first + GROUP]
        unit = torch.zeros(*some.shape, x[0].numel(), device=x.device).scatter(2, some[:, :, None], 1)
        slopes.append(slopes_along(model, x, y, unit.reshape(*some.shape, *x.shape[1:]), sigma, goal, chunk))
    return torch.cat(slopes, dim=1)
