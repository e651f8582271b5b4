"""Weather against its recipes, followed step by step in NumPy with the same random numbers."""

from __future__ import annotations

import colorsys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from torch import Tensor

from hardsphere.corruptions import SEVERITIES, corrupt, frost_source
from hardsphere.corruptions.blur import trail
from hardsphere.corruptions.constants import SETTINGS, VARIANTS
from hardsphere.corruptions.plasma import plasma
from hardsphere.noise import Noise

CASES = [(variant, severity) for variant in VARIANTS for severity in SEVERITIES]


def pictures(variant: str, small: Tensor, large: Tensor) -> Tensor:
    return small[::12] if variant == "cifar" else large[:1]


def streams(name: str, severity: int, count: int, seed: int) -> Noise:
    return Noise(seed, torch.arange(count)).fold("corruption", name, severity)


def close(out: np.ndarray, expected: np.ndarray, mean: float = 0.02) -> None:
    difference = np.abs(out.astype(int) - expected.astype(int))
    assert difference.max() <= 1
    assert difference.mean() <= mean


@pytest.mark.parametrize(("variant", "severity"), CASES)
def test_brightness_is_hsv_value(variant: str, severity: int, small: Tensor) -> None:
    """Against the standard library's colour conversion, on colours that include black, white and grey."""
    (added,) = SETTINGS[variant]["brightness"][severity - 1]
    colours = torch.cat([small[:1, :, ::2, ::2].flatten(2), torch.tensor([[0, 255, 90, 255, 0]] * 3)[None]], dim=2)
    images = torch.nn.functional.pad(colours, (0, 16 * 17 - colours.shape[2])).view(1, 3, 16, 17).to(torch.uint8)
    out = corrupt(images, "brightness", severity, seed=0, variant=variant)
    for pixel, result in zip(images[0].flatten(1).T.numpy(), out[0].flatten(1).T.numpy(), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*(pixel / 255).tolist())
        expected = np.array(colorsys.hsv_to_rgb(hue, saturation, min(value + added, 1.0))) * 255
        assert np.abs(result - expected).max() <= 1
        assert (result <= expected + 1e-9).all()  # truncated


@pytest.mark.parametrize(("variant", "severity"), CASES)
def test_snow(variant: str, severity: int, small: Tensor, large: Tensor) -> None:
    images = pictures(variant, small, large)[:1]
    mean, deviation, zoom, threshold, radius, sigma, kept = SETTINGS[variant]["snow"][severity - 1]
    side = images.shape[-1]
    noise = streams("snow", severity, 1, seed=2)
    layer = mean + deviation * noise.fold("flakes").normal(side, side)[0].numpy().astype(float)
    crop = int(np.ceil(side / zoom))
    top = (side - crop) // 2
    layer = ndimage.zoom(layer[top : top + crop, top : top + crop], zoom, order=1, mode="nearest")
    trim = (len(layer) - side) // 2
    layer = layer[trim : trim + side, trim : trim + side]
    layer[layer < threshold] = 0
    flakes = (np.clip(layer, 0, 1) * 255).astype(np.uint8)
    angle = -135 + 90 * noise.fold("angle").uniform()
    assert -135 <= angle.item() < -45
    blurred = trail(torch.from_numpy(flakes)[None, None], radius, sigma, angle)[0, 0].numpy() / 255
    x = images[0].numpy().transpose(1, 2, 0) / 255
    grey = (x @ [0.299, 0.587, 0.114])[..., None]
    x = kept * x + (1 - kept) * np.maximum(x, grey * 1.5 + 0.5)
    expected = np.clip(x + (blurred + np.rot90(blurred, 2))[..., None], 0, 1) * 255
    out = corrupt(images, "snow", severity, seed=2, variant=variant)[0].numpy().transpose(1, 2, 0)
    close(out, np.floor(expected + 1e-6))


def naive_plasma(side: int, decay: float, noise: Noise) -> np.ndarray:
    """Diamond-square one point at a time, with neighbours that wrap around."""
    height, step, rough = np.zeros((side, side)), side, 100.0
    while step >= 2:
        half, points = step // 2, side // step
        wobble = (
            rough * (2 * noise.fold("plasma", step).uniform(3, points, points)[0].numpy().astype(float) - 1) * rough
        )
        for i in range(points):
            for j in range(points):
                y, x = i * step, j * step
                corners = height[y, x] + height[(y + step) % side, x] + height[y, (x + step) % side]
                corners += height[(y + step) % side, (x + step) % side]
                height[y + half, x + half] = corners / 4 + wobble[0, i, j]
        for i in range(points):
            for j in range(points):
                y, x = i * step, j * step
                here, right, below = height[y, x], height[y, (x + step) % side], height[(y + step) % side, x]
                centre, above = height[y + half, x + half], height[(y - half) % side, x + half]
                height[y, x + half] = (here + right + centre + above) / 4 + wobble[1, i, j]
                height[y + half, x] = (here + below + centre + height[y + half, (x - half) % side]) / 4 + wobble[
                    2, i, j
                ]
        step, rough = half, rough / decay
    height -= height.min()
    return height / height.max()


@pytest.mark.parametrize("decay", [3, 2, 1.4])
def test_plasma(decay: float) -> None:
    noise = Noise(4, torch.arange(1))
    np.testing.assert_allclose(plasma(noise, 32, decay)[0], naive_plasma(32, decay, noise), atol=2e-6)


@pytest.mark.parametrize(("variant", "severity"), CASES)
def test_fog(variant: str, severity: int, small: Tensor, large: Tensor) -> None:
    images = pictures(variant, small, large)
    amount, decay = SETTINGS[variant]["fog"][severity - 1]
    height, width = images.shape[-2:]
    noise = streams("fog", severity, len(images), seed=1)
    cloud = plasma(noise, {32: 32, 224: 256}[height], decay).numpy()[:, None, :height, :width].astype(float)
    assert cloud.min() >= 0
    assert cloud.max() <= 1
    x = images.numpy() / 255
    brightest = x.max(axis=(1, 2, 3), keepdims=True)
    expected = np.clip((x + amount * cloud) * brightest / (brightest + amount), 0, 1) * 255
    close(corrupt(images, "fog", severity, seed=1, variant=variant).numpy(), expected.astype(np.uint8))


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five files whose pixels tell where they come from, a sixth that must not be used, and transparency to ignore."""
    directory = tmp_path_factory.mktemp("frost")
    for number in range(1, 7):
        height, width = 280 + 20 * number, 420 - 10 * number
        row, column = np.mgrid[:height, :width]
        pixels = np.stack([row % 256, column % 256, np.full_like(row, 40 * number), row % 3], axis=-1)
        Image.fromarray(pixels.astype(np.uint8)).save(directory / f"frost{number}.png")
    return directory


@pytest.mark.parametrize(("variant", "severity"), CASES)
def test_frost(variant: str, severity: int, small: Tensor, large: Tensor, photographs: Path) -> None:
    images = small if variant == "cifar" else large
    weight, frost_weight = SETTINGS[variant]["frost"][severity - 1]
    side = images.shape[-1]
    out = corrupt(images, "frost", severity, seed=7, variant=variant, frost=photographs)
    noise = streams("frost", severity, len(images), seed=7)
    which = noise.fold("photograph").integers(0, 5)
    start = noise.fold("crop").uniform(2).double()
    for number in range(len(images)):
        photo = np.asarray(Image.open(photographs / f"frost{which[number] + 1}.png"))[..., :3]
        if variant == "cifar":
            photo = photo[2::5, 2::5]
        top, left = (
            int(share * (size - side)) for share, size in zip(start[number].tolist(), photo.shape, strict=False)
        )
        part = photo[top : top + side, left : left + side].transpose(2, 0, 1)
        expected = np.clip(weight * images[number].numpy().astype(float) + frost_weight * part, 0, 255).astype(np.uint8)
        np.testing.assert_array_equal(out[number], expected)


def test_frost_uses_five_photographs_and_all_of_their_area(photographs: Path) -> None:
    out = corrupt(torch.zeros(2000, 3, 32, 32, dtype=torch.uint8), "frost", 5, seed=0, frost=photographs)
    blue = out[:, 2, 0, 0].float() / 0.45 / 40
    share = torch.bincount(blue.round().long(), minlength=7)[1:].float() / 2000
    assert share[5] == 0
    assert (share[:5] - 0.2).abs().max() < 5 * (0.2 * 0.8 / 2000) ** 0.5


def test_frost_sources(photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hardsphere import HardsphereError
    from hardsphere.corruptions import FrostStandInWarning, frost

    assert not frost_source(photographs).stand_in
    assert [path.stem for path in frost_source(photographs).files] == [f"frost{number}" for number in range(1, 6)]
    assert frost_source("stand-in").stand_in
    assert "stand-in" in frost_source("stand-in").origin
    with pytest.raises(HardsphereError, match="lacks some of frost1 to frost5"):
        frost_source(tmp_path)
    with pytest.raises(HardsphereError, match="is no directory"):
        frost_source(tmp_path / "nowhere")
    images = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    drawn = corrupt(images, "frost", 3, seed=0, frost="stand-in")  # asked for by name: no warning
    assert drawn.float().mean() > 10
    monkeypatch.setattr(frost, "_PACKAGES", ("no-such-package",))
    assert frost_source().stand_in
    with pytest.warns(FrostStandInWarning, match="drawn stand-in"):
        unasked = corrupt(images, "frost", 3, seed=0)
    assert torch.equal(unasked, drawn)


def test_frost_of_an_installed_package(tmp_path: Path, photographs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package whose import would fail, listed in the metadata as pip writes it."""
    package = tmp_path / "imagecorruptions"
    (package / "frost").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('never import me')\n")
    listed = ["imagecorruptions/__init__.py,,"]
    for path in sorted(photographs.iterdir()):
        (package / "frost" / path.name).write_bytes(path.read_bytes())
        listed.append(f"imagecorruptions/frost/{path.name},,")
    info = tmp_path / "imagecorruptions-9.9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: imagecorruptions\nVersion: 9.9.9\n")
    (info / "RECORD").write_text("\n".join(listed) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    source = frost_source()
    assert source.origin == "photographs of imagecorruptions 9.9.9"
    assert all(file.parent == package / "frost" for file in source.files)
