"""Weather: snow, frost, fog, brightness."""

from __future__ import annotations

import torch
from torch import Tensor

from hardsphere.corruptions.blur import trail
from hardsphere.corruptions.constants import Setting
from hardsphere.corruptions.frost import Photographs
from hardsphere.corruptions.linear import separable, zoom_matrix
from hardsphere.corruptions.pixels import as_unit, from_sums, from_unit, truncated
from hardsphere.corruptions.plasma import plasma
from hardsphere.errors import HardsphereError
from hardsphere.noise import Noise


def snow(images: Tensor, setting: Setting, noise: Noise) -> Tensor:
    """A whitened image under two layers of falling flakes, the second being the first turned upside down."""
    mean, deviation, zoom, threshold, radius, sigma, kept = setting
    height, width = images.shape[-2:]
    flakes = mean + deviation * noise.fold("flakes").normal(1, height, width).double()
    flakes = separable(flakes, zoom_matrix(height, zoom), zoom_matrix(width, zoom))
    flakes = from_sums(torch.where(flakes < threshold, 0, flakes))
    angle = -135 + 90 * noise.fold("angle").uniform()
    layer = as_unit(trail(flakes, radius, sigma, angle), torch.float32)
    x = as_unit(images, torch.float32)
    white = (grey(x) * 1.5 + 0.5).expand_as(x)
    return from_unit(torch.maximum(x, white) * (1 - kept) + x * kept + (layer + layer.flip(2, 3)))


def grey(x: Tensor) -> Tensor:
    """The luma of RGB images, (B, 1, H, W)."""
    return 0.299 * x[:, 0:1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:3]


def frost(images: Tensor, setting: Setting, noise: Noise, photographs: Photographs) -> Tensor:
    """The image and a random part of one of five photographs of frost, added with weights."""
    weight, frost_weight = setting
    batch, _, height, width = images.shape
    if height >= photographs.heights.min() or width >= photographs.widths.min():
        smallest = f"{int(photographs.heights.min())} x {int(photographs.widths.min())}"
        raise HardsphereError(
            f"Images of {height} x {width} pixels do not fit into frost of {smallest}: "
            "use variant='imagenet', larger photographs or smaller images."
        )
    device = images.device
    which = noise.fold("photograph").integers(0, len(photographs.heights)).cpu()
    # A start is uniform below size - side; the sides of the photographs differ, so the range differs by sample.
    start = noise.fold("crop").uniform(2).cpu()
    top = (start[:, 0].double() * (photographs.heights[which] - height)).long()
    left = (start[:, 1].double() * (photographs.widths[which] - width)).long()
    stride = photographs.widths[which]
    corner = (photographs.offsets[which] + top * stride + left).to(device)
    row, column = torch.arange(height, device=device), torch.arange(width, device=device)
    index = corner[:, None, None] + row[:, None] * stride.to(device)[:, None, None] + column
    pixels = photographs.pixels.to(device)[:, index.flatten()].view(3, batch, height, width).transpose(0, 1)
    return truncated((weight * images.double() + frost_weight * pixels.double()).clamp_(0, 255))


def fog(images: Tensor, setting: Setting, noise: Noise) -> Tensor:
    """A fractal cloud is added and the whole is scaled back to the image's own maximum."""
    amount, decay = setting
    height, width = images.shape[-2:]
    side = 1 << (max(height, width) - 1).bit_length()
    x = as_unit(images)
    brightest = x.amax(dim=(1, 2, 3), keepdim=True)
    cloud = plasma(noise, side, decay)[:, None, :height, :width]
    return from_unit((x + amount * cloud) * brightest / (brightest + amount))


def brightness(images: Tensor, setting: Setting, noise: Noise) -> Tensor:
    """A constant is added to the value of hue, saturation and value.

    With hue and saturation unchanged the three channels keep their ratio to the largest, which is the value.
    """
    (added,) = setting
    x = as_unit(images)
    value = x.amax(dim=1, keepdim=True)
    ratio = torch.where(value > 0, x / torch.where(value > 0, value, 1), 1)
    return from_unit((value + added).clamp(max=1) * ratio)
