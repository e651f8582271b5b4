"""Noise: Gaussian, shot (Poisson), impulse (salt and pepper) and speckle."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from hardsphere.corruptions.constants import Setting
from hardsphere.corruptions.pixels import as_unit, from_unit
from hardsphere.noise import Noise

# A pixel of shot noise is drawn with 32 random bits; the first 12 of them alone decide all but a few per cent of the
# pixels, by one look into a table.
_BITS = 32
_FIRST_BITS = 12
_UNDECIDED = -1


def gaussian_noise(images: Tensor, setting: Setting, noise: Noise) -> Tensor:
    """x + N(0, sigma)."""
    (sigma,) = setting
    return from_unit(as_unit(images, torch.float32) + sigma * noise.normal(*images.shape[1:]))


def speckle_noise(images: Tensor, setting: Setting, noise: Noise) -> Tensor:
    """x + x * N(0, sigma)."""
    (sigma,) = setting
    x = as_unit(images, torch.float32)
    return from_unit(x + x * (sigma * noise.normal(*images.shape[1:])))


def impulse_noise(images: Tensor, setting: Setting, noise: Noise) -> Tensor:
    """Each value, of each channel on its own, becomes 0 or 255 with equal chance in a share of the cases."""
    (amount,) = setting
    bits = noise.bits(*images.shape[1:])
    hit = bits & 0xFFFFFFFF < round(amount * 2**32)
    salt_or_pepper = (bits < 0).to(torch.uint8) * 255  # by the sign, which the comparison above does not read
    return torch.where(hit, salt_or_pepper, images)


def shot_noise(images: Tensor, setting: Setting, noise: Noise) -> Tensor:
    """Poisson(x * photons) / photons.

    An 8-bit value has only 256 rates, so a draw is the inversion of one of 256 tabulated distribution functions:
    exact integers throughout, hence the same on each device.
    """
    (photons,) = setting
    first, bounds, levels = (table.to(images.device) for table in _poisson_tables(photons))
    # One number says both the pixel's value and where between 0 and 1 its draw lies.
    draw = (images.long() << _BITS) | (noise.bits(*images.shape[1:]) & (2**_BITS - 1))
    out = first[draw >> (_BITS - _FIRST_BITS)]
    undecided = out == _UNDECIDED
    out[undecided] = levels[torch.searchsorted(bounds, draw[undecided], right=True)]
    return out.to(torch.uint8)


@cache
def _poisson_tables(photons: float) -> tuple[Tensor, Tensor, Tensor]:
    """Tables that invert the distribution functions of Poisson(v / 255 * photons) for v = 0..255.

    Returns:
        The grey level for each value and leading bits of a draw, or `_UNDECIDED`; all steps of the 256 distribution
        functions on one increasing scale; the grey level below each of these steps.
    """
    rate = torch.arange(256, dtype=torch.float64)[:, None] / 255 * photons
    count = torch.arange(int(photons + 12 * photons**0.5 + 20), dtype=torch.float64)
    log_rate = torch.where(rate > 0, rate, 1).log()
    chance = torch.where(rate > 0, torch.exp(count * log_rate - rate - torch.lgamma(count + 1)), (count == 0).double())
    steps = (chance.cumsum(1).clamp(max=1) * 2**_BITS).long()
    steps[:, -1] = 2**_BITS
    bounds = (steps + (torch.arange(256)[:, None] << _BITS)).flatten()
    levels = from_unit(count / photons).to(torch.int16).repeat(256)
    # The leading bits decide where the lowest and the highest draw that begin with them have the same level.
    lowest = torch.arange(256 << _FIRST_BITS) << (_BITS - _FIRST_BITS)
    highest = lowest + 2 ** (_BITS - _FIRST_BITS) - 1
    low, high = (levels[torch.searchsorted(bounds, draw, right=True)] for draw in (lowest, highest))
    return torch.where(low == high, low, _UNDECIDED), bounds, levels
