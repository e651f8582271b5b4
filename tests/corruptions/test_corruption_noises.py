"""The noises against their exact distributions over the 256 grey levels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from hardsphere.corruptions import SEVERITIES, corrupt
from hardsphere.corruptions.constants import SETTINGS, VARIANTS

LEVELS = np.arange(256)
CASES = [(variant, severity) for variant in VARIANTS for severity in SEVERITIES]


def histogram(name: str, variant: str, severity: int, value: int) -> np.ndarray:
    """How often each level comes out for images of one single value: 98,304 draws."""
    images = torch.full((32, 3, 32, 32), value, dtype=torch.uint8)
    out = corrupt(images, name, severity, seed=5, variant=variant)
    return np.bincount(out.flatten().numpy(), minlength=256)


def agree(counts: np.ndarray, chance: np.ndarray) -> None:
    """Mean, variance and cumulated shares within five standard errors (and the rounding of single draws)."""
    n = counts.sum()
    assert chance.sum() == pytest.approx(1)
    mean = (chance * LEVELS).sum()
    variance = (chance * (LEVELS - mean) ** 2).sum()
    fourth = (chance * (LEVELS - mean) ** 4).sum()
    seen_mean = (counts * LEVELS).sum() / n
    seen_variance = (counts * (LEVELS - mean) ** 2).sum() / n
    assert abs(seen_mean - mean) <= 5 * np.sqrt(variance / n) + 1e-9
    assert abs(seen_variance - variance) <= 5 * np.sqrt(max(fourth - variance**2, 0) / n) + 1e-9
    below = chance.cumsum()
    error = np.sqrt(np.maximum(below * (1 - below), 0) / n)
    assert (np.abs(counts.cumsum() / n - below) <= 5 * error + 3 / n).all()


def truncated_normal(value: int, sigma: float) -> np.ndarray:
    """The chance of each level of clip(x + N(0, sigma)) * 255, truncated."""
    bounds = np.concatenate([[-np.inf], np.arange(1, 256) / 255, [np.inf]])
    # Exactly 1 is level 255, which nothing below 1 reaches: the last bin begins at 1.
    return np.diff(stats.norm.cdf((bounds - value / 255) / sigma))


@pytest.mark.parametrize(("variant", "severity"), CASES)
@pytest.mark.parametrize("value", [128, 250])
def test_gaussian_noise(variant: str, severity: int, value: int) -> None:
    (sigma,) = SETTINGS[variant]["gaussian_noise"][severity - 1]
    agree(histogram("gaussian_noise", variant, severity, value), truncated_normal(value, sigma))


@pytest.mark.parametrize(("variant", "severity"), CASES)
def test_speckle_noise_scales_with_the_value(variant: str, severity: int) -> None:
    (sigma,) = SETTINGS[variant]["speckle_noise"][severity - 1]
    agree(histogram("speckle_noise", variant, severity, 101), truncated_normal(101, sigma * 101 / 255))
    assert histogram("speckle_noise", variant, severity, 0)[0] == 32 * 3 * 32 * 32


@pytest.mark.parametrize(("variant", "severity"), CASES)
@pytest.mark.parametrize("value", [0, 7, 128, 255])
def test_shot_noise_is_poisson(variant: str, severity: int, value: int) -> None:
    (photons,) = SETTINGS[variant]["shot_noise"][severity - 1]
    count = np.arange(2000)
    level = (np.clip(count / photons, 0, 1) * 255).astype(np.uint8)
    chance = np.bincount(level, weights=stats.poisson.pmf(count, value / 255 * photons), minlength=256)
    agree(histogram("shot_noise", variant, severity, value), chance)


@pytest.mark.parametrize(("variant", "severity"), CASES)
def test_impulse_noise_hits_half_white_half_black(variant: str, severity: int) -> None:
    (amount,) = SETTINGS[variant]["impulse_noise"][severity - 1]
    chance = np.zeros(256)
    chance[[0, 77, 255]] = amount / 2, 1 - amount, amount / 2
    agree(histogram("impulse_noise", variant, severity, 77), chance)


def test_impulse_noise_hits_channels_independently() -> None:
    images = torch.full((32, 3, 32, 32), 77, dtype=torch.uint8)
    hit = corrupt(images, "impulse_noise", 5, seed=0, variant="imagenet") != 77
    together = (hit[:, 0] & hit[:, 1]).float().mean().item()
    assert together == pytest.approx(0.27**2, abs=5 * (0.27**2 / hit[:, 0].numel()) ** 0.5)
