"""The digital corruptions against Pillow, SciPy and formulas."""

from __future__ import annotations

import colorsys
import io

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from torch import Tensor

from hardsphere.corruptions import SEVERITIES, corrupt
from hardsphere.corruptions.constants import SETTINGS, VARIANTS
from hardsphere.corruptions.digital import affine_positions, displacement, resize_box
from hardsphere.noise import Noise

CASES = [(variant, severity) for variant in VARIANTS for severity in SEVERITIES]


def pictures(variant: str, small: Tensor, large: Tensor) -> Tensor:
    return small[::12] if variant == "cifar" else large[:1]


@pytest.mark.parametrize(("variant", "severity"), CASES)
def test_contrast_factor(variant: str, severity: int, small: Tensor, large: Tensor) -> None:
    images = pictures(variant, small, large)
    (factor,) = SETTINGS[variant]["contrast"][severity - 1]
    x = images.numpy() / 255
    mean = x.mean(axis=(2, 3), keepdims=True)
    out = corrupt(images, "contrast", severity, seed=0, variant=variant)
    np.testing.assert_array_equal(out, (np.clip((x - mean) * factor + mean, 0, 1) * 255).astype(np.uint8))
    slope = np.polyfit(images[0, 0].flatten().numpy(), out[0, 0].flatten().numpy(), 1)[0]
    assert slope == pytest.approx(factor, abs=0.02)


@pytest.mark.parametrize(("variant", "severity"), CASES)
def test_saturate_is_hsv_saturation(variant: str, severity: int, small: Tensor) -> None:
    factor, offset = SETTINGS[variant]["saturate"][severity - 1]
    images = small[:1, :, ::2, ::2].clone()
    images[0, :, 0, :4] = torch.tensor([0, 255, 90, 7], dtype=torch.uint8)  # no hue: tinted red by an offset
    out = corrupt(images, "saturate", severity, seed=0, variant=variant)
    for pixel, result in zip(images[0].flatten(1).T.numpy(), out[0].flatten(1).T.numpy(), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*(pixel / 255).tolist())
        changed = min(max(saturation * factor + offset, 0.0), 1.0)
        expected = np.array(colorsys.hsv_to_rgb(hue, changed, value)) * 255
        assert np.abs(result - expected).max() <= 1 + 1e-9


@pytest.mark.parametrize(("variant", "severity"), CASES)
def test_pixelate_is_pillow_to_the_bit(variant: str, severity: int, small: Tensor, large: Tensor) -> None:
    images = pictures(variant, small, large)
    (factor,) = SETTINGS[variant]["pixelate"][severity - 1]
    side = images.shape[-1]
    out = corrupt(images, "pixelate", severity, seed=0, variant=variant)
    for image, result in zip(images, out, strict=True):
        picture = Image.fromarray(image.permute(1, 2, 0).numpy())
        picture = picture.resize((int(side * factor),) * 2, Image.Resampling.BOX)
        picture = picture.resize((side, side), Image.Resampling.BOX)
        np.testing.assert_array_equal(result.permute(1, 2, 0), np.asarray(picture))


def test_pixelate_sizes_of_cifar() -> None:
    assert [int(32 * factor) for (factor,) in SETTINGS["cifar"]["pixelate"]] == [30, 28, 27, 24, 20]


@pytest.mark.parametrize("size", [(7, 9), (16, 13), (40, 33), (64, 3), (1, 1)])
def test_box_resize_is_pillow_to_the_bit(size: tuple[int, int], small: Tensor) -> None:
    images = small[:2, :, :25, :31]
    expected = [
        Image.fromarray(image.permute(1, 2, 0).numpy()).resize(size[::-1], Image.Resampling.BOX) for image in images
    ]
    np.testing.assert_array_equal(resize_box(images, *size).permute(0, 2, 3, 1), np.stack(expected))


@pytest.mark.parametrize(("variant", "severity"), CASES)
def test_jpeg_bytes(variant: str, severity: int, small: Tensor, large: Tensor) -> None:
    images = pictures(variant, small, large)
    (quality,) = SETTINGS[variant]["jpeg_compression"][severity - 1]
    out = corrupt(images, "jpeg_compression", severity, seed=0, variant=variant)
    for image, result in zip(images, out, strict=True):
        file = io.BytesIO()
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "JPEG", quality=int(quality))
        np.testing.assert_array_equal(result.permute(1, 2, 0), np.asarray(Image.open(file)))


@pytest.mark.parametrize(("variant", "severity"), CASES)
def test_displacement_field(variant: str, severity: int) -> None:
    amplitude, smoothness, _ = SETTINGS[variant]["elastic_transform"][severity - 1]
    side = 32 if variant == "cifar" else 224
    noise = Noise(0, torch.arange(2))
    field = displacement(side, side, amplitude, smoothness, noise)
    draws = 2 * noise.uniform(2, side, side).numpy().astype(float) - 1
    expected = ndimage.gaussian_filter(draws, (0, 0, smoothness, smoothness), mode="reflect", truncate=3) * amplitude
    np.testing.assert_allclose(field, expected, atol=1e-9)
    if 0 < smoothness < side / 20:  # smoothed over little more than itself: the variance has a closed form
        radius = int(3 * smoothness + 0.5)
        weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / smoothness) ** 2)
        weights /= weights.sum()
        deviation = amplitude * (weights**2).sum() / np.sqrt(3)
        assert field.std().item() == pytest.approx(deviation, rel=0.25)


def test_affine_moves_three_points_by_at_most_the_jitter() -> None:
    """The moved corner is where the corner's own pixel is shown."""
    noise, jitter, side = Noise(1, torch.arange(4)), 2.5, 32
    y, x = affine_positions(side, side, jitter, noise)
    corners = np.array([[26, 26], [26, 6], [6, 6]])
    moved = corners + jitter * (2 * noise.uniform(3, 2).numpy().astype(float) - 1)
    for number in range(4):
        for corner, target in zip(corners, moved[number], strict=True):
            place = [[target[1]], [target[0]]]  # row, column of the shown point
            shown = [ndimage.map_coordinates(axis[number].numpy(), place, order=1)[0] for axis in (x, y)]
            np.testing.assert_allclose(shown, corner, atol=1e-9)
    assert np.abs(moved - corners).max() <= jitter


@pytest.mark.parametrize(("variant", "severity"), CASES)
def test_elastic_transform(variant: str, severity: int, small: Tensor, large: Tensor) -> None:
    images = pictures(variant, small, large)
    amplitude, smoothness, jitter = SETTINGS[variant]["elastic_transform"][severity - 1]
    side = images.shape[-1]
    noise = Noise(6, torch.arange(len(images))).fold("corruption", "elastic_transform", severity)
    source_y, source_x = affine_positions(side, side, jitter, noise.fold("affine"))
    field = displacement(side, side, amplitude, smoothness, noise.fold("elastic"))
    out = corrupt(images, "elastic_transform", severity, seed=6, variant=variant)
    row, column = np.mgrid[:side, :side]
    for number, image in enumerate(images.numpy()):
        place = (source_y[number].numpy(), source_x[number].numpy())
        bent = (row + field[number, 0].numpy(), column + field[number, 1].numpy())
        for channel, result in zip(image / 255, out[number].numpy(), strict=True):
            x = ndimage.map_coordinates(channel, place, order=1, mode="mirror")
            x = ndimage.map_coordinates(x, bent, order=1, mode="reflect")
            difference = np.abs(result.astype(int) - (np.clip(x, 0, 1) * 255 + 1e-7).astype(int))
            assert difference.max() <= 1
            assert difference.mean() <= 0.02


def test_elastic_at_the_first_severity_of_cifar_is_affine_only() -> None:
    assert SETTINGS["cifar"]["elastic_transform"][0] == (0, 0, pytest.approx(2.56))
    assert SETTINGS["imagenet"]["elastic_transform"][0] == pytest.approx((488, 170.8, 24.4))  # 244, as published
