"""Sets on the disk: layout, resumption, and what happens to damaged ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from hardsphere import HardsphereError
from hardsphere.corruptions import corrupt, read_cifar, write_cifar, write_folder
from hardsphere.corruptions.sets import _read_square

NAMES = ("gaussian_noise", "frost", "contrast")


@pytest.fixture
def written(small: Tensor, tmp_path: Path) -> Path:
    write_cifar(small[:6], range(6), tmp_path / "c", seed=4, names=NAMES, frost="stand-in", batch_size=4)
    return tmp_path / "c"


def test_layout(written: Path, small: Tensor) -> None:
    """As in the official files: severities in blocks, in the order of the test set, channels last."""
    assert sorted(path.name for path in written.iterdir()) == sorted(
        [*(f"{name}.npy" for name in NAMES), "labels.npy", "manifest.json"]
    )
    for name in NAMES:
        array = np.load(written / f"{name}.npy")
        assert array.shape == (30, 32, 32, 3)
        assert array.dtype == np.uint8
        for severity in range(1, 6):
            expected = corrupt(small[:6], name, severity, seed=4, frost="stand-in").permute(0, 2, 3, 1)
            np.testing.assert_array_equal(array[6 * (severity - 1) : 6 * severity], expected)
    np.testing.assert_array_equal(np.load(written / "labels.npy"), np.tile(np.arange(6), 5))


def test_manifest(written: Path) -> None:
    manifest = json.loads((written / "manifest.json").read_text())
    assert manifest["seed"] == 4
    assert manifest["variant"] == "cifar"
    assert manifest["frost_stand_in"] is True
    assert "stand-in" in manifest["frost"]
    assert manifest["made_by"].startswith("hardsphere ")


def test_read_back(written: Path, small: Tensor) -> None:
    data = read_cifar(written)
    assert data.names == ("gaussian_noise", "frost", "contrast")
    assert data.count == 6
    assert data.frost_stand_in
    assert not data.official
    expected = corrupt(small[:6], "contrast", 3, seed=4)
    assert torch.equal(data.images("contrast", 3), expected)
    assert torch.equal(data.images("contrast", 3, 2, 5), expected[2:5])
    assert data.labels(3).tolist() == list(range(6))
    assert data.labels().dtype == torch.int64
    assert not read_cifar(written, ["contrast"]).frost_stand_in


def test_official_sets_have_no_manifest(written: Path) -> None:
    (written / "manifest.json").unlink()
    data = read_cifar(written)
    assert data.official
    assert not data.frost_stand_in


def test_a_stopped_run_goes_on(small: Tensor, tmp_path: Path) -> None:
    def stop(name: str, severity: int, done: int) -> None:
        if name == "contrast" and severity == 3:
            raise KeyboardInterrupt

    arguments = {"seed": 1, "names": ("brightness", "contrast"), "batch_size": 3}
    with pytest.raises(KeyboardInterrupt):
        write_cifar(small[:5], range(5), tmp_path, progress=stop, **arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["brightness.npy", "labels.npy", "manifest.json"]
    before = (tmp_path / "brightness.npy").stat()
    seen = []
    (tmp_path / ".contrast.npy.7.tmp").write_bytes(b"half of it, by a process that was killed")
    write_cifar(small[:5], range(5), tmp_path, progress=lambda *what: seen.append(what), **arguments)
    assert list(tmp_path.glob("*.tmp")) == []
    assert (tmp_path / "brightness.npy").stat().st_mtime_ns == before.st_mtime_ns
    assert seen == [("contrast", severity, done) for severity in range(1, 6) for done in (3, 5)]
    assert torch.equal(read_cifar(tmp_path).images("contrast", 5), corrupt(small[:5], "contrast", 5, seed=1))
    # More corruptions may join a set that was made in the same way.
    write_cifar(small[:5], range(5), tmp_path, seed=1, names=("saturate",))
    assert read_cifar(tmp_path).names == ("brightness", "contrast", "saturate")


def test_sets_are_not_mixed(written: Path, small: Tensor) -> None:
    for change, message in [
        ({"seed": 5}, "made with seed 4, not 5"),
        ({"variant": "imagenet"}, "made with variant 'cifar'"),
        ({"images": small[1:7]}, "made with source_sha256"),
        ({"labels": [1] * 6}, "made with source_sha256"),
    ]:
        arguments = {
            "images": small[:6],
            "labels": range(6),
            "seed": 4,
            "names": ("fog",),
            "frost": "stand-in",
        } | change
        with pytest.raises(HardsphereError, match=message):
            write_cifar(arguments.pop("images"), arguments.pop("labels"), written, **arguments)
    (written / "manifest.json").unlink()
    with pytest.raises(HardsphereError, match="without a manifest"):
        write_cifar(small[:6], range(6), written, seed=4)


def test_damaged_sets(written: Path, small: Tensor, tmp_path: Path) -> None:
    with pytest.raises(HardsphereError, match="is no directory"):
        read_cifar(tmp_path / "nowhere")
    with pytest.raises(HardsphereError, match=r"has no labels\.npy"):
        read_cifar(tmp_path)
    with pytest.raises(HardsphereError, match=r"lacks fog\.npy, snow\.npy"):
        read_cifar(written, ["contrast", "fog", "snow"])
    with pytest.raises(HardsphereError, match="has no 'fogg'"):
        read_cifar(written).images("fogg", 1)
    with pytest.raises(HardsphereError, match="severity is 6"):
        read_cifar(written).images("contrast", 6)
    whole = (written / "contrast.npy").read_bytes()
    for damaged in (whole[:-100], whole[:40], b"", b"not an array at all"):
        (written / "contrast.npy").write_bytes(damaged)
        with pytest.raises(HardsphereError, match=r"contrast\.npy' is truncated"):
            read_cifar(written)
        with pytest.raises(HardsphereError, match=r"contrast\.npy' is truncated"):
            write_cifar(small[:6], range(6), written, seed=4, names=("contrast",), frost="stand-in")
    np.save(written / "contrast.npy", np.zeros((25, 32, 32, 3), dtype=np.uint8))
    with pytest.raises(HardsphereError, match="not 30 8-bit RGB images"):
        read_cifar(written)
    np.save(written / "contrast.npy", np.array([{"pickled": 1}]), allow_pickle=True)
    with pytest.raises(HardsphereError, match="truncated or no array file"):
        read_cifar(written)
    (written / "contrast.npy").unlink()
    np.save(written / "labels.npy", np.zeros(7, dtype=np.int64))
    with pytest.raises(HardsphereError, match="not five equal blocks"):
        read_cifar(written)
    (written / "manifest.json").write_text("[]")
    with pytest.raises(HardsphereError, match="is no manifest"):
        write_cifar(small[:6], range(6), written, seed=4)


def test_bad_arguments(small: Tensor, tmp_path: Path) -> None:
    with pytest.raises(HardsphereError, match="give one to each"):
        write_cifar(small[:6], range(5), tmp_path, seed=0)
    with pytest.raises(HardsphereError, match="Unknown corruption 'rain'"):
        write_cifar(small[:6], range(6), tmp_path, seed=0, names=("rain",))


@pytest.fixture
def folder(large: Tensor, tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    for number, (group, size) in enumerate([("cat", (300, 260)), ("cat", (256, 400)), ("dog", (512, 600))]):
        (root / group).mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(large[number % 2].permute(1, 2, 0).numpy()).resize(size)
        picture.save(root / group / f"{number}.png")
    (root / "dog" / "notes.txt").write_text("not an image")
    return root


def test_folder_layout(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = {"seed": 2, "names": ("contrast", "gaussian_noise"), "severities": (1, 5), "batch_size": 2}
    write_folder(folder, out, **arguments)
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*.JPEG"))
    images = ("cat/0.JPEG", "cat/1.JPEG", "dog/2.JPEG")
    assert files == [
        f"{name}/{s}/{image}" for name in ("contrast", "gaussian_noise") for s in (1, 5) for image in images
    ]
    # Short side to 256, middle 224 x 224, corrupted with the id of its place in the list, JPEG at quality 85.
    picture = (
        Image.open(folder / "dog" / "2.png").resize((256, 300), Image.Resampling.BILINEAR).crop((16, 38, 240, 262))
    )
    pixels = torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1)[None]
    noisy = corrupt(pixels, "gaussian_noise", 5, seed=2, variant="imagenet", ids=torch.tensor([2]))[0].permute(1, 2, 0)
    Image.fromarray(noisy.numpy()).save(tmp_path / "expected.jpg", quality=85, optimize=True)
    made = out / "gaussian_noise" / "5" / "dog" / "2.JPEG"
    assert made.read_bytes() == (tmp_path / "expected.jpg").read_bytes()
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["layout"], manifest["variant"], manifest["images"]) == ("imagenet", "imagenet", 3)
    # A second run makes only what is missing, an empty file included, and the same as before.
    whole = made.read_bytes()
    made.write_bytes(b"")
    kept = out / "contrast" / "1" / "cat" / "0.JPEG"
    before = kept.stat().st_mtime_ns
    write_folder(folder, out, **arguments)
    assert made.read_bytes() == whole
    assert kept.stat().st_mtime_ns == before
    with pytest.raises(HardsphereError, match="made with seed 2, not 3"):
        write_folder(folder, out, **(arguments | {"seed": 3}))


def test_folder_errors(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(HardsphereError, match="is no directory"):
        write_folder(tmp_path / "nowhere", out, seed=0)
    with pytest.raises(HardsphereError, match="holds no images in class directories"):
        write_folder(folder / "cat", out, seed=0)
    with pytest.raises(HardsphereError, match="cannot be cut"):
        write_folder(folder, out, seed=0, resize=128)
    Image.open(folder / "dog" / "2.png").save(folder / "dog" / "2.jpg")
    with pytest.raises(HardsphereError, match="are named '2'"):
        write_folder(folder, out, seed=0)
    (folder / "dog" / "2.jpg").unlink()
    (folder / "dog" / "3.jpg").write_bytes(b"broken")
    with pytest.raises(HardsphereError, match="cannot be read"):
        write_folder(folder, out, seed=0, names=("contrast",))


def test_grey_levels_of_16_bits_are_those_that_training_sees(tmp_path: Path) -> None:
    """A ramp over all 65,536 levels: its mean is half way, and not all of it white."""
    ramp = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    assert abs(_read_square(tmp_path / "ramp.png", 64, 64).float().mean() - 127.5) < 1
