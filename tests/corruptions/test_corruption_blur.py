"""The blurs against their kernels, computed on their own in float64, and against SciPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import Tensor

from hardsphere.corruptions import SEVERITIES, corrupt
from hardsphere.corruptions.blur import copy_sources, disk, trail, trail_weights
from hardsphere.corruptions.constants import SETTINGS, VARIANTS
from hardsphere.corruptions.linear import zoom_factors, zoom_matrix
from hardsphere.noise import Noise

CASES = [(variant, severity) for variant in VARIANTS for severity in SEVERITIES]


def pictures(variant: str, small: Tensor, large: Tensor) -> Tensor:
    return small[::6] if variant == "cifar" else large[:1]


def to_8_bits(x: np.ndarray) -> np.ndarray:
    """Truncated, as if the sums were exact: in flat regions they are whole numbers, which they miss by a hair."""
    return (np.clip(x, 0, 1) * 255 + 1e-10).astype(np.uint8)


def close(out: Tensor, expected: np.ndarray, mean: float = 0.001) -> None:
    """Never more than one level apart (truncation at a whole number may fall either way), and hardly ever that."""
    difference = np.abs(out.numpy().astype(int) - expected.astype(int))
    assert difference.max() <= 1
    assert difference.mean() <= mean


@pytest.mark.parametrize(("variant", "severity"), CASES)
def test_gaussian_blur(variant: str, severity: int, small: Tensor, large: Tensor) -> None:
    images = pictures(variant, small, large)
    (sigma,) = SETTINGS[variant]["gaussian_blur"][severity - 1]
    expected = ndimage.gaussian_filter(images.numpy() / 255, (0, 0, sigma, sigma), mode="nearest", truncate=4.0)
    close(corrupt(images, "gaussian_blur", severity, seed=0, variant=variant), to_8_bits(expected))


def numpy_disk(radius: float, rim: float) -> np.ndarray:
    reach = 8 if radius <= 8 else radius
    x, y = np.meshgrid(np.arange(-reach, reach + 1), np.arange(-reach, reach + 1))
    kernel = (x**2 + y**2 <= radius**2).astype(float)
    kernel /= kernel.sum()
    side = 3 if radius <= 8 else 5
    taps = np.exp(-((np.arange(side) - side // 2) ** 2) / (2 * rim**2))
    taps /= taps.sum()
    for axis in (0, 1):
        kernel = ndimage.correlate1d(kernel, taps, axis=axis, mode="mirror")
    return kernel


@pytest.mark.parametrize(("variant", "severity"), CASES)
def test_defocus_blur(variant: str, severity: int, small: Tensor, large: Tensor) -> None:
    images = pictures(variant, small, large)[:3]
    kernel = numpy_disk(*SETTINGS[variant]["defocus_blur"][severity - 1])
    np.testing.assert_allclose(disk(*SETTINGS[variant]["defocus_blur"][severity - 1]), kernel, atol=1e-12)
    planes = images.numpy().reshape(-1, *images.shape[2:]) / 255
    expected = np.stack([ndimage.correlate(plane, kernel, mode="mirror") for plane in planes])
    out = corrupt(images, "defocus_blur", severity, seed=0, variant=variant)
    close(out, to_8_bits(expected).reshape(images.shape))


def test_defocus_at_32_pixels_is_first_only_a_small_gaussian() -> None:
    """Disks below radius 1 are a single pixel: the published supports before smoothing are 1, 1, 1, 5 and 9."""
    supports = [int((disk(radius, 1e-3) > 0).sum()) for radius, _ in SETTINGS["cifar"]["defocus_blur"]]
    assert supports == [1, 1, 1, 5, 9]


@pytest.mark.parametrize("reach", [1, 2, 3, 4])
def test_glass_copies_as_the_original_walk_does(reach: int) -> None:
    """The walk itself, with NumPy's tuple assignment of views, which copies where it means to swap."""
    side = 14
    moves = Noise(reach, torch.arange(5)).integers(-reach, reach, 2, side, side)
    sources = copy_sources(moves, reach)
    for number in range(5):
        x = np.arange(side * side).reshape(side, side, 1).repeat(3, axis=2)
        for h in range(side - reach, reach, -1):
            for w in range(side - reach, reach, -1):
                dy, dx = moves[number, :, h, w].tolist()
                x[h, w], x[h + dy, w + dx] = x[h + dy, w + dx], x[h, w]
        np.testing.assert_array_equal(sources[number].view(side, side), x[..., 0])


@pytest.mark.parametrize(("variant", "severity"), CASES)
def test_glass_blur(variant: str, severity: int, small: Tensor, large: Tensor) -> None:
    images = pictures(variant, small, large)[:1, :, :64, :64]
    sigma, reach, rounds = SETTINGS[variant]["glass_blur"][severity - 1]
    reach, side = int(reach), images.shape[-1]
    noise = Noise(3, torch.arange(1)).fold("corruption", "glass_blur", severity)
    x = images[0].numpy().transpose(1, 2, 0) / 255
    x = to_8_bits(ndimage.gaussian_filter(x, (sigma, sigma, 0), mode="nearest"))
    for number in range(int(rounds)):
        moves = noise.fold("move", number).integers(-reach, reach, 2, side, side)[0].numpy()
        assert moves.min() == -reach
        assert moves.max() == reach - 1
        for h in range(side - reach, reach, -1):
            for w in range(side - reach, reach, -1):
                x[h, w] = x[h + moves[0, h, w], w + moves[1, h, w]]
    x = to_8_bits(ndimage.gaussian_filter(x / 255, (sigma, sigma, 0), mode="nearest"))
    close(corrupt(images, "glass_blur", severity, seed=3, variant=variant)[0], x.transpose(2, 0, 1))


@pytest.mark.parametrize(("variant", "severity"), CASES)
@pytest.mark.parametrize("name", ["motion_blur", "snow"])
def test_trail_weights(variant: str, severity: int, name: str) -> None:
    setting = SETTINGS[variant][name][severity - 1]
    radius, sigma = setting[4:6] if name == "snow" else setting
    exact = np.exp(-(np.arange(2 * math.ceil(radius) + 1) ** 2) / (2 * sigma**2))
    exact /= exact.sum()
    weights = np.zeros_like(exact)
    weights[: len(trail_weights(radius, sigma))] = trail_weights(radius, sigma)
    assert sum(trail_weights(radius, sigma)) == pytest.approx(1)
    assert np.abs(weights - exact).sum() < 1e-4  # a fortieth of a grey level


@pytest.mark.parametrize(("variant", "severity"), CASES)
def test_motion_blur(variant: str, severity: int, small: Tensor, large: Tensor) -> None:
    images = pictures(variant, small, large)
    radius, sigma = SETTINGS[variant]["motion_blur"][severity - 1]
    uniform = Noise(9, torch.arange(len(images))).fold("corruption", "motion_blur", severity).fold("angle").uniform()
    out = corrupt(images, "motion_blur", severity, seed=9, variant=variant)
    taps = range(2 * math.ceil(radius) + 1)
    weights = np.array([math.exp(-(i**2) / (2 * sigma**2)) for i in taps])
    weights /= weights.sum()
    for image, share, result in zip(images.numpy(), uniform.tolist(), out, strict=True):
        angle = math.radians(-45 + 90 * share)
        padded = np.pad(image, ((0, 0), (64, 64), (64, 64)), mode="edge").astype(float)
        total = 0.0
        for i, weight in zip(taps, weights, strict=True):
            down, right = math.ceil(i * math.sin(angle) - 0.5), math.ceil(i * math.cos(angle) - 0.5)
            total = total + weight * np.roll(padded, (-down, -right), axis=(1, 2))[:, 64:-64, 64:-64]
        close(result, np.floor(total + 0.5))


def test_trail_of_one_white_pixel_is_the_kernel() -> None:
    image = torch.zeros(1, 1, 41, 41, dtype=torch.uint8)
    image[0, 0, 20, 20] = 255
    line = trail(image, 6, 2, torch.zeros(1))[0, 0, 20].numpy()
    # The pixel at p looks forward, so a white pixel shows behind itself.
    weights = np.array(trail_weights(6, 2))
    np.testing.assert_array_equal(line[20 - len(weights) + 1 : 21], np.floor(255 * weights + 0.5)[::-1])
    assert line[21:].sum() == 0


def test_zoom_grids_have_the_lengths_that_numpy_gives() -> None:
    lengths = {v: [len(zoom_factors(*c)) for c in SETTINGS[v]["zoom_blur"]] for v in VARIANTS}
    assert lengths == {"cifar": [7, 12, 16, 21, 26], "imagenet": [12, 16, 11, 13, 11]}
    largest = [round(zoom_factors(*c)[-1], 6) for v in VARIANTS for c in SETTINGS[v]["zoom_blur"]]
    assert largest == [1.06, 1.11, 1.15, 1.20, 1.25, 1.11, 1.15, 1.20, 1.24, 1.30]


def scipy_zoom(x: np.ndarray, factor: float) -> np.ndarray:
    side = x.shape[-1]
    crop = math.ceil(side / factor)
    top = (side - crop) // 2
    part = x[..., top : top + crop, top : top + crop]
    part = ndimage.zoom(part, (1,) * (x.ndim - 2) + (factor, factor), order=1, mode="nearest")
    trim = (part.shape[-1] - side) // 2
    return part[..., trim : trim + side, trim : trim + side]


@pytest.mark.parametrize("size", [32, 224])
@pytest.mark.parametrize("factor", [1, 1.01, 1.06, 1.25, 1.3, 1.75, 2.25, 3, 4.5])
def test_zoom_matrix(size: int, factor: float) -> None:
    x = np.random.default_rng(0).random((1, size, size))
    matrix = zoom_matrix(size, factor).numpy()
    np.testing.assert_allclose(matrix @ x @ matrix.T, scipy_zoom(x, factor), atol=1e-12)
    np.testing.assert_allclose(matrix.sum(1), 1)


@pytest.mark.parametrize(("variant", "severity"), CASES)
def test_zoom_blur(variant: str, severity: int, small: Tensor, large: Tensor) -> None:
    images = pictures(variant, small, large)[:2]
    x = images.numpy() / 255
    factors = np.arange(1, *SETTINGS[variant]["zoom_blur"][severity - 1])
    expected = (x + sum(scipy_zoom(x, factor) for factor in factors)) / (len(factors) + 1)
    close(corrupt(images, "zoom_blur", severity, seed=0, variant=variant), to_8_bits(expected))
