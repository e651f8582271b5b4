"""Other people's implementations as second opinions: scikit-image, OpenCV and imagecorruptions-imaug.

The last has the constants for 224 pixels only, and an elastic transform, a pixelation, a frost and a zoom blur of its
own (it keeps the upper left of an enlarged image instead of its middle). What it computes alike must agree within one
grey level on average, and noise in its moments.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from hardsphere.corruptions import SEVERITIES, corrupt
from hardsphere.corruptions.blur import disk, trail
from hardsphere.corruptions.constants import SETTINGS, VARIANTS
from hardsphere.corruptions.digital import affine_positions
from hardsphere.corruptions.linear import between_pixels, mirror, zoom_matrix
from hardsphere.corruptions.plasma import plasma
from hardsphere.corruptions.spatter import distance_to_edge, edges, equalised, water
from hardsphere.noise import Noise

pytestmark = pytest.mark.check


@pytest.fixture(scope="module")
def other() -> ModuleType:
    module = pytest.importorskip("imagecorruptions.corruptions", reason="imagecorruptions-imaug is not installed")
    if not hasattr(module, "_shuffle_pixels_njit_glass_blur"):
        pytest.skip("this is not the maintained imagecorruptions-imaug")
    return module


@pytest.fixture(scope="module")
def cv2() -> ModuleType:
    return pytest.importorskip("cv2", reason="OpenCV is not installed")


@pytest.fixture(scope="module")
def skimage() -> ModuleType:
    pytest.importorskip("skimage.filters", reason="scikit-image is not installed")
    return pytest.importorskip("skimage")


def picture(image: Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).numpy())


def theirs(other: ModuleType, name: str, image: Tensor, severity: int) -> np.ndarray:
    result = np.asarray(getattr(other, name)(picture(image), severity))
    return result.astype(np.uint8).transpose(2, 0, 1).astype(int)


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize(
    "name", ["gaussian_blur", "defocus_blur", "brightness", "contrast", "saturate", "jpeg_compression"]
)
def test_without_randomness(name: str, severity: int, large: Tensor, other: ModuleType) -> None:
    ours = corrupt(large, name, severity, seed=0, variant="imagenet").numpy().astype(int)
    difference = np.abs(ours - np.stack([theirs(other, name, image, severity) for image in large]))
    assert difference.mean() < 1


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize(
    "name", ["gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise", "glass_blur", "snow", "fog", "spatter"]
)
def test_moments_of_the_random_ones(name: str, severity: int, large: Tensor, other: ModuleType) -> None:
    """Mean and spread of the change, over several draws; the clouds of fog differ much from draw to draw."""
    draws = {"fog": 40, "snow": 10, "spatter": 10}.get(name, 3)
    np.random.seed(severity)  # noqa: NPY002 (it draws from there)
    image = large[1]
    repeated = image.expand(draws, -1, -1, -1)
    ours = corrupt(repeated, name, severity, seed=0, variant="imagenet").numpy().astype(int) - image.numpy().astype(int)
    others = np.stack([theirs(other, name, image, severity) for _ in range(draws)]) - image.numpy().astype(int)
    spread = max(ours.mean(axis=(1, 2, 3)).std(), others.mean(axis=(1, 2, 3)).std())
    assert abs(ours.mean() - others.mean()) < 1 + 4 * spread * (2 / draws) ** 0.5
    assert ours.std() == pytest.approx(others.std(), rel=0.1)


@pytest.mark.parametrize(("radius", "rim"), [c for variant in VARIANTS for c in SETTINGS[variant]["defocus_blur"]])
def test_disk(radius: float, rim: float, other: ModuleType) -> None:
    np.testing.assert_allclose(disk(radius, rim), other.disk(radius, rim, dtype=np.float64), atol=1e-7)


@pytest.mark.parametrize("angle", [-135, -100.3, -45, -12.7, 0, 33, 45])
@pytest.mark.parametrize(("radius", "sigma"), [(6, 1), (9, 2.5), (15, 8), (20, 15)])
def test_motion(radius: int, sigma: float, angle: float, large: Tensor, other: ModuleType) -> None:
    ours = trail(large[:1], radius, sigma, torch.tensor([angle]))[0].permute(1, 2, 0).numpy()
    expected = other._motion_blur(large[0].permute(1, 2, 0).numpy(), radius, sigma, angle)
    assert np.abs(ours - expected).max() < 0.6  # ours is rounded


def test_zoom(other: ModuleType) -> None:
    x = np.random.default_rng(0).random((224, 224, 1))
    for factor in (2, 3, 4, 4.5, 2.5):
        part = other.clipped_zoom(x, factor)[..., 0]
        trim = (len(part) - 224) // 2
        matrix = zoom_matrix(224, factor).numpy()
        ours = matrix @ x[..., 0] @ matrix.T
        np.testing.assert_allclose(ours[:-1, :-1], part[trim : trim + 224, trim : trim + 224][:-1, :-1], atol=1e-9)


@pytest.mark.parametrize("decay", [1.4, 2, 3])
def test_plasma_spectrum(decay: float, other: ModuleType) -> None:
    """The same roughness at each scale: mean squares of differences at distances 1 to 64."""
    np.random.seed(0)  # noqa: NPY002
    draws = 60
    ours = plasma(Noise(0, torch.arange(draws)), 128, decay).double().numpy()
    others = np.stack([other.plasma_fractal(128, decay) for _ in range(draws)])
    for distance in (1, 4, 16, 64):
        squares = [((x - np.roll(x, distance, axis=2)) ** 2).mean(axis=(1, 2)) for x in (ours, others)]
        error = np.sqrt(sum(square.var() / draws for square in squares))
        assert abs(squares[0].mean() - squares[1].mean()) < 5 * error


@pytest.mark.parametrize("jitter", [1.0, 2.56, 5.0])
def test_affine(jitter: float, small: Tensor, cv2: ModuleType) -> None:
    noise = Noise(0, torch.arange(4))
    y, x = affine_positions(32, 32, jitter, noise)
    ours = between_pixels(small[:4].float(), y, x, mirror)
    corners = np.array([[26, 26], [26, 6], [6, 6]], dtype=np.float32)
    moves = jitter * (2 * noise.uniform(3, 2).numpy() - 1)
    for number in range(4):
        matrix = cv2.getAffineTransform(corners, corners + moves[number])
        image = small[number].permute(1, 2, 0).numpy().astype(np.float32)
        expected = cv2.warpAffine(image, matrix, (32, 32), borderMode=cv2.BORDER_REFLECT_101)
        difference = np.abs(ours[number].permute(1, 2, 0).numpy() - expected)
        assert difference.mean() < 1


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_hsv_and_gaussian_of_scikit_image(variant: str, severity: int, small: Tensor, skimage: ModuleType) -> None:
    from skimage import color, filters

    for image in small[::16]:
        x = image.permute(1, 2, 0).numpy() / 255
        (added,) = SETTINGS[variant]["brightness"][severity - 1]
        factor, offset = SETTINGS[variant]["saturate"][severity - 1]
        (sigma,) = SETTINGS[variant]["gaussian_blur"][severity - 1]
        bright, saturated = color.rgb2hsv(x), color.rgb2hsv(x)
        bright[..., 2] = np.clip(bright[..., 2] + added, 0, 1)
        saturated[..., 1] = np.clip(saturated[..., 1] * factor + offset, 0, 1)
        expected = {
            "brightness": color.hsv2rgb(bright),
            "saturate": color.hsv2rgb(saturated),
            "gaussian_blur": filters.gaussian(x, sigma=sigma, channel_axis=-1),
        }
        for name, values in expected.items():
            ours = corrupt(image[None], name, severity, seed=0, variant=variant)[0].permute(1, 2, 0).numpy().astype(int)
            difference = np.abs(ours - (np.clip(values, 0, 1) * 255).astype(np.uint8).astype(int))
            assert difference.max() <= 1, name
            assert difference.mean() < 0.1, name


def test_impulse_of_scikit_image(skimage: ModuleType) -> None:
    from skimage import util

    flat = np.full((224, 224, 3), 0.3)
    noisy = util.random_noise(flat, mode="s&p", amount=0.17, rng=np.random.default_rng(0))
    images = torch.full((1, 3, 224, 224), 77, dtype=torch.uint8)
    ours = corrupt(images, "impulse_noise", 4, seed=0, variant="imagenet")[0]
    for level, value in ((0, 0), (1, 255)):
        assert (noisy == level).mean() == pytest.approx((ours == value).float().mean().item(), abs=0.005)


def liquids(variant: str, severity: int, side: int) -> np.ndarray:
    ndimage = pytest.importorskip("scipy.ndimage")
    mean, deviation, smoothness, threshold, _, _ = SETTINGS[variant]["spatter"][severity - 1]
    layer = np.random.default_rng(severity).normal(mean, deviation, (4, side, side))
    layer = ndimage.gaussian_filter(layer, (0, smoothness, smoothness), mode="nearest")
    layer[layer < threshold] = 0
    return (np.clip(layer, 0, 1) * 255).astype(np.uint8)


@pytest.mark.parametrize("severity", [1, 2, 3])
@pytest.mark.parametrize(("variant", "side"), [("cifar", 32), ("imagenet", 224)])
def test_water_of_opencv(variant: str, side: int, severity: int, cv2: ModuleType) -> None:
    """Each step to the bit, or nearly: the distance transform of OpenCV works with 16 fractional bits."""
    kernel = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]])
    for liquid in liquids(variant, severity, side):
        plane = torch.from_numpy(liquid)[None]
        canny = cv2.Canny(liquid, 50, 150)
        np.testing.assert_array_equal(edges(plane)[0], canny > 0)
        distance = np.minimum(cv2.distanceTransform(255 - canny, cv2.DIST_L2, 5), 20)
        np.testing.assert_allclose(distance_to_edge(edges(plane))[0].clamp(max=20), distance, atol=1e-3)
        soft = cv2.blur(distance, (3, 3)).astype(np.uint8)
        np.testing.assert_array_equal(equalised(torch.from_numpy(soft)[None].long())[0], cv2.equalizeHist(soft))
        rim = cv2.filter2D(cv2.equalizeHist(soft), cv2.CV_8U, kernel)
        shown = liquid * cv2.blur(rim, (3, 3)).astype(np.float32)
        difference = np.abs(water(plane)[0].numpy() - shown / max(shown.max(), 1))
        assert difference.mean() * 255 < 1
