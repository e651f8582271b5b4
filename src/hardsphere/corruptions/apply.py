"""`corrupt`: one corruption at one severity, on a batch of 8-bit images."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hardsphere.corruptions import blur, digital, noises, spatter, weather
from hardsphere.corruptions.constants import Setting, setting
from hardsphere.corruptions.frost import FrostSource, FrostStandInWarning, frost_source, photographs
from hardsphere.errors import HardsphereError
from hardsphere.noise import Noise

Step = Callable[[Tensor, Setting, Noise], Tensor]

_STEPS: dict[str, Step] = {
    "gaussian_noise": noises.gaussian_noise,
    "shot_noise": noises.shot_noise,
    "impulse_noise": noises.impulse_noise,
    "defocus_blur": blur.defocus_blur,
    "glass_blur": blur.glass_blur,
    "motion_blur": blur.motion_blur,
    "zoom_blur": blur.zoom_blur,
    "snow": weather.snow,
    "fog": weather.fog,
    "brightness": weather.brightness,
    "contrast": digital.contrast,
    "elastic_transform": digital.elastic_transform,
    "pixelate": digital.pixelate,
    "jpeg_compression": digital.jpeg_compression,
    "speckle_noise": noises.speckle_noise,
    "gaussian_blur": blur.gaussian_blur,
    "spatter": spatter.spatter,
    "saturate": digital.saturate,
}

# How many 8-bit values are worked on at once: on a CPU what its caches hold (many times faster than a large batch at
# once), on a GPU what keeps it busy within a few gigabytes.
_VALUES_AT_ONCE = {"cpu": 3 * 2**16, "cuda": 3 * 2**23}

_SMALLEST_SIDE = 16


def corrupt(
    images: Tensor,
    name: str,
    severity: int,
    *,
    seed: int,
    variant: str = "cifar",
    ids: Tensor | None = None,
    frost: FrostSource | str | Path | None = None,
) -> Tensor:
    """One common corruption at one severity.

    What happens to an image depends on the image, its id, the seed, the corruption and the severity, and on nothing
    else: not on the batch it is in.

    Args:
        images: 8-bit RGB images, uint8 of shape (B, 3, H, W), on any device.
        name: one of `CORRUPTIONS` or `EXTRA`.
        severity: 1 to 5.
        seed: the seed of the whole set.
        variant: ``"cifar"`` for the constants made for 32 pixels, ``"imagenet"`` for those made for 224.
        ids: the images' numbers in their data set, (B,); 0, 1, 2... by default.
        frost: where frost comes from, see `frost_source`.

    Returns:
        The corrupted images, like ``images`` in type, shape and device.
    """
    constants = setting(variant, name, severity)
    _check(images)
    if ids is None:
        ids = torch.arange(len(images))
    if ids.shape != images.shape[:1]:
        raise HardsphereError(
            f"There are {len(images)} images but ids of shape {tuple(ids.shape)}: give one id to each."
        )
    images = images.contiguous()
    step = _frost_step(frost, variant) if name == "frost" else _STEPS[name]
    noise = Noise(seed, ids.to(images.device)).fold("corruption", name, severity)
    done = [step(images[part], constants, noise[part]) for part in _parts(images)]
    return torch.cat(done) if done else images.clone()


def _parts(images: Tensor) -> list[slice]:
    """The batch in parts of a size that the device likes; the outcome does not depend on it."""
    at_once = _VALUES_AT_ONCE.get(images.device.type, _VALUES_AT_ONCE["cpu"])
    count = max(1, at_once // math.prod(images.shape[1:]))
    return [slice(start, start + count) for start in range(0, len(images), count)]


def _frost_step(frost: FrostSource | str | Path | None, variant: str) -> Step:
    source = frost_source(frost)
    if source.stand_in and frost is None:
        warnings.warn(
            "Frost is a drawn stand-in, not comparable with published numbers: install imagecorruptions or name a "
            "directory with its photographs.",
            FrostStandInWarning,
            stacklevel=3,
        )
    return partial(weather.frost, photographs=photographs(source, variant))


def _check(images: Tensor) -> None:
    if images.dtype != torch.uint8:
        raise HardsphereError(f"Corruptions need 8-bit images (torch.uint8, 0 to 255), not {images.dtype}.")
    if images.dim() != 4 or images.shape[1] != 3:
        raise HardsphereError(
            f"Corruptions need RGB images of shape (B, 3, H, W), not {tuple(images.shape)}; "
            "repeat the channel of grey images three times."
        )
    if min(images.shape[-2:]) < _SMALLEST_SIDE:
        raise HardsphereError(
            f"Images of {images.shape[2]} x {images.shape[3]} pixels are too small: enlarge them to 32."
        )
