"""Adversarial perturbations as images (the paper's Fig. 2, right), and how sparse they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hardsphere.analysis.common import Part, accuracy, collect, some, still_right, summary
from hardsphere.attacks import bim
from hardsphere.threat import Ball, per_sample


@dataclass(frozen=True, eq=False)
class Perturbations:
    """Perturbations of the same images for several models.

    Attributes:
        x: the clean images, (N, C, H, W).
        deltas: by model, x* - x.
        right: by model, whether it is right on x*.
    """

    x: Tensor
    deltas: Mapping[str, Tensor]
    right: Mapping[str, Tensor]

    def grid(self, count: int = 8, padding: int = 1) -> Tensor:
        """uint8 of shape (C, H, W): the clean images in the first row, then a row of perturbations for each model.

        A perturbation is shown with zero at mid-grey and its own largest pixel at black or white.
        """
        rows = [self.x[:count], *(visible(delta[:count]) for delta in self.deltas.values())]
        return _tiled(torch.stack(rows), padding)

    def to_dict(self) -> dict[str, Any]:
        models = {}
        for name, delta in self.deltas.items():
            flat = delta.flatten(1).double()
            models[name] = {
                "right": accuracy(self.right[name]),
                "l2": summary(torch.linalg.vector_norm(flat, dim=1)),
                "linf": summary(flat.abs().amax(1)),
                "near_zero": summary(near_zero(delta)),
                "sparsity": summary(sparsity(delta)),
            }
        return {"n": len(self.x), "models": models}


def perturbations(
    models: Mapping[str, nn.Module],
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    steps: int = 20,
    step_size: float | None = None,
    ids: Tensor | None = None,
    batch: int = 256,
) -> Perturbations:
    """The perturbation that untargeted PGD finds for each model, from the clean image: noise would show as speckles.

    Args:
        models: by the name that the figure shows.
        step_size: 2.5 * eps / steps by default.
    """
    deltas, right = {}, {}
    for name, model in some(models).items():

        def work(part: Part, model: nn.Module = model) -> dict[str, Tensor]:
            attack = bim(model, part.x, part.y, ball, noise=part.noise, steps=steps, step_size=step_size, keep="last")
            return {"delta": attack.x_adv - part.x, "right": still_right(model, part, attack.x_adv, ball)}

        found = collect(model, x, y, work, ids=ids, batch=batch)
        deltas[name], right[name] = found["delta"], found["right"]
    return Perturbations(x.detach().cpu(), deltas, right)


def visible(delta: Tensor) -> Tensor:
    """A perturbation as an image in [0, 1]: 1/2 + delta / (2 max |delta|), image by image; grey where it is zero."""
    largest = delta.abs().flatten(1).amax(1)
    return 0.5 + delta / (2 * per_sample(torch.where(largest > 0, largest, 1), delta))


def near_zero(delta: Tensor, part: float = 0.1) -> Tensor:
    """The share of pixels below ``part`` of the largest one."""
    flat = delta.flatten(1).abs()
    return (flat < part * flat.amax(1, keepdim=True)).double().mean(1)


def sparsity(delta: Tensor) -> Tensor:
    """Hoyer's (sqrt(n) - ||d||_1 / ||d||_2) / (sqrt(n) - 1): 0 if all pixels are equal, 1 if only one is not zero."""
    flat = delta.flatten(1).double()
    root = flat.shape[1] ** 0.5
    ratio = flat.abs().sum(1) / torch.linalg.vector_norm(flat, dim=1)
    hoyer: Tensor = (root - ratio) / (root - 1)
    return hoyer


def _tiled(images: Tensor, padding: int) -> Tensor:
    """(rows, columns, C, H, W) in [0, 1] as one uint8 image with white lines between."""
    rows, columns, channels, height, width = images.shape
    tall, wide = height + padding, width + padding
    canvas = torch.full((channels, rows * tall + padding, columns * wide + padding), 255, dtype=torch.uint8)
    pixels = (images.clamp(0, 1) * 255).round().to(torch.uint8)
    for row in range(rows):
        for column in range(columns):
            top, left = padding + row * tall, padding + column * wide
            canvas[:, top : top + height, left : left + width] = pixels[row, column]
    return canvas
