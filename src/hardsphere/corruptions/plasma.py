"""Fractal clouds, for fog and for the stand-in of frost."""

from __future__ import annotations

import torch
from torch import Tensor

from hardsphere.noise import Noise


def plasma(noise: Noise, side: int, decay: float) -> Tensor:
    """A fractal height map in [0, 1] for each sample, (B, side, side), by the diamond-square method on a torus.

    Each midpoint is the mean of its four neighbours plus a uniform number; as in the original, its amplitude is the
    square of a roughness that starts at 100 and is divided by ``decay`` from level to level.
    """
    height = torch.zeros(len(noise), side, side, device=noise.keys.device)
    step, roughness = side, 100.0
    while step >= 2:
        half = step // 2
        points = side // step
        wobble = roughness * roughness * (2 * noise.fold("plasma", step).uniform(3, points, points) - 1)
        corners = height[:, ::step, ::step]
        pairs = corners + corners.roll(-1, 1)
        centres = (pairs + pairs.roll(-1, 2)) / 4 + wobble[:, 0]
        height[:, half::step, half::step] = centres
        across = centres + centres.roll(1, 1) + corners + corners.roll(-1, 2)
        down = centres + centres.roll(1, 2) + corners + corners.roll(-1, 1)
        height[:, ::step, half::step] = across / 4 + wobble[:, 1]
        height[:, half::step, ::step] = down / 4 + wobble[:, 2]
        step, roughness = half, roughness / decay
    height = height - height.amin(dim=(1, 2), keepdim=True)
    return height / height.amax(dim=(1, 2), keepdim=True)
