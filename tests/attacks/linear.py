"""Linear classifiers on images, on which the distance to the nearest wrong answer is known in closed form.

The class of an image is the largest of Z_k = c * (w_k.(x - 1/2) + b_k), so the nearest image of class k lies at
(Z_y - Z_k) / (c * ||w_y - w_k||_q), where q is the dual of the ball's norm. The images stay in [0.4, 0.6] and every
radius used here is below 0.4, so that the pixel box plays no part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hardsphere.noise import Noise
from hardsphere.threat import Ball

DUAL = {"linf": 1.0, "l2": 2.0, "l1": float("inf")}
SHAPE = (3, 6, 6)


class LinearModel(nn.Module):
    """A linear classifier of images whose logits are multiplied by ``factor``."""

    def __init__(self, weight: Tensor, bias: Tensor, factor: float = 1.0) -> None:
        super().__init__()
        self.layer = nn.Linear(weight.shape[1], weight.shape[0])
        with torch.no_grad():
            self.layer.weight.copy_(weight)
            self.layer.bias.copy_(bias)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.layer(x.flatten(1) - 0.5)


@dataclass(frozen=True)
class Case:
    """A linear model, images that it classifies correctly, and how far each is from the nearest wrong answer.

    Attributes:
        distance: the closed form of that distance in the ball's norm.
        nearest: the class that lies there; the wished label of a targeted attack.
        ball: its radius is the median distance, so that about half of the samples can be broken.
    """

    model: LinearModel
    x: Tensor
    y: Tensor
    distance: Tensor
    nearest: Tensor
    ball: Ball

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: slice | Tensor) -> Case:
        """The same case with a part of the samples."""
        x, y, distance, nearest = (values[index] for values in (self.x, self.y, self.distance, self.nearest))
        return replace(self, x=x, y=y, distance=distance, nearest=nearest)

    def times(self, factor: float) -> Case:
        """The same case with logits multiplied by ``factor``: nothing that matters has changed."""
        return replace(self, model=LinearModel(self.model.layer.weight, self.model.layer.bias, factor))

    def noise(self, seed: int = 0) -> Noise:
        """Noise for these samples, whose ids are 0, 1, 2, ... in the undivided case."""
        return Noise(seed, torch.arange(len(self)))

    def within(self, part: float) -> Tensor:
        """The samples whose distance is at most ``part`` of the radius: an attack of that quality must break them."""
        return self.distance <= part * self.ball.eps

    def beyond(self, part: float) -> Tensor:
        """The samples whose distance is at least ``part`` of the radius: above 1 nothing can break them."""
        return self.distance >= part * self.ball.eps


def linear_case(classes: int, norm: str, count: int = 64, seed: int = 0, shape: tuple[int, ...] = SHAPE) -> Case:
    """A random linear model with ``count`` images, and the closed forms (in float64)."""
    generator = torch.Generator().manual_seed(seed)
    pixels = int(torch.tensor(shape).prod())
    weight = torch.randn(classes, pixels, generator=generator, dtype=torch.float64)
    bias = 0.05 * torch.randn(classes, generator=generator, dtype=torch.float64)
    x = 0.4 + 0.2 * torch.rand(count, *shape, generator=generator)
    logits = (x.double().flatten(1) - 0.5) @ weight.float().double().T + bias.float().double()
    y = logits.argmax(1)
    distances = torch.stack([_distances(weight.float().double(), logits[i], int(y[i]), norm) for i in range(count)])
    distance, nearest = distances.min(1)
    ball = Ball(norm, float(distance.median()))
    assert ball.eps < 0.4, "the box would cut the ball"
    return Case(LinearModel(weight.float(), bias.float()), x, y, distance, nearest, ball)


def _distances(weight: Tensor, logits: Tensor, y: int, norm: str) -> Tensor:
    """The distance to each class, infinite for the sample's own."""
    slopes = torch.linalg.vector_norm(weight[y] - weight, ord=DUAL[norm], dim=1)
    distances = (logits[y] - logits) / slopes
    distances[y] = torch.inf
    return distances
