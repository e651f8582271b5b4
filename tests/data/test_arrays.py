"""Arrays: every layout that is understood, and every array that is not."""

from pathlib import Path

import numpy as np
import pytest
import torch

from hardsphere.data import Images, load
from hardsphere.errors import HardsphereError

RNG = np.random.default_rng(0)
BYTES = RNG.integers(0, 256, (40, 3, 6, 5), dtype=np.uint8)
LABELS = np.arange(40) % 4


def save(path: Path, **arrays: object) -> Path:
    np.savez(path / "data.npz", **arrays)  # type: ignore[arg-type]
    return path / "data.npz"


def full(**changes: object) -> dict[str, object]:
    return {"x_train": BYTES, "y_train": LABELS, "x_test": BYTES[:8], "y_test": LABELS[:8]} | changes


def test_four_arrays_are_a_data_set(tmp_path: Path) -> None:
    data = load("arrays", save(tmp_path, **full(class_names=np.array(["w", "x", "y", "z"]))))
    assert data.train is not None
    assert data.validation is not None
    assert (len(data.train), len(data.validation), len(data.test)) == (36, 4, 8)
    assert data.class_names == ("w", "x", "y", "z")
    assert data.shape == (3, 6, 5)
    assert data.mean == tuple(np.round((BYTES / 255).mean((0, 2, 3)), 4))
    assert data.std == tuple(np.round((BYTES / 255).std((0, 2, 3)), 4))
    assert isinstance(data.test, Images)
    assert np.array_equal(data.test.pixels.numpy(), BYTES[:8])


def test_x_and_y_are_test_data(tmp_path: Path) -> None:
    data = load("arrays", save(tmp_path, x=BYTES, y=LABELS.astype(np.uint8)))
    assert data.train is None
    assert data.validation is None
    assert data.class_names == ("0", "1", "2", "3")
    assert len(data.test) == 40


@pytest.mark.parametrize(
    "array",
    [
        BYTES,
        BYTES.transpose(0, 2, 3, 1),
        (BYTES / 255).astype(np.float32),
        BYTES / 255,
        (BYTES / 255).transpose(0, 2, 3, 1),
    ],
    ids=["nchw", "nhwc", "float32", "float64", "float64 nhwc"],
)
def test_one_set_of_pixels_however_it_is_written(tmp_path: Path, array: np.ndarray) -> None:
    test = load("arrays", save(tmp_path, x=array, y=LABELS)).test
    assert isinstance(test, Images)
    assert np.array_equal(test.pixels.numpy(), BYTES)


def test_grey_images_need_no_channel_axis(tmp_path: Path) -> None:
    assert load("arrays", save(tmp_path, x=BYTES[:, 0], y=LABELS[:, None])).shape == (1, 6, 5)


def test_floats_off_the_grid_are_not_rounded(tmp_path: Path) -> None:
    floats = RNG.random((4, 1, 3, 3)).astype(np.float32)
    data = load("arrays", save(tmp_path, x=floats, y=LABELS[:4]))
    assert isinstance(data.test, Images)
    assert data.test.pixels.dtype == torch.float32
    assert np.array_equal(data.test.pixels.numpy(), floats)
    assert 0 < data.mean[0] < 1


def test_a_constant_channel_is_not_divided_by_zero(tmp_path: Path) -> None:
    assert load("arrays", save(tmp_path, x=np.full((4, 1, 2, 2), 51, np.uint8), y=LABELS[:4])).std == (1.0,)


def nan() -> np.ndarray:
    array = (BYTES / 255).astype(np.float32)
    array[3, 1, 2, 2] = np.nan
    return array


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"x_train": BYTES}, "has no 'y_train'"),
        ({"x": BYTES}, "has no 'y'"),
        (full(x=BYTES, y=LABELS), "keep one kind of keys"),
        (full(x_tset=BYTES), "unknown key 'x_tset'.*Did you mean 'x_test'"),
        (full(x_train=nan()), "'x_train' in .* NaN"),
        (full(x_train=BYTES.astype(np.float32)), "'x_train' .*0..255: save them as uint8 or divide by 255"),
        (full(x_train=BYTES / 255 * 4 - 2), "before any normalisation"),
        (full(x_train=BYTES.astype(np.int64)), "is int64: save pixels in 0..255 as uint8"),
        (full(x_train=BYTES > 3), "is bool"),
        (full(x_train=BYTES[:, 0, 0]), r"has the shape \(40, 5\)"),
        (full(x_train=BYTES[:0]), "is empty"),
        (full(x_train=RNG.integers(0, 256, (40, 5, 5, 4), dtype=np.uint8)), "must be 1 or 3 channels"),
        (full(x_train=BYTES[:30]), r"'x_train' .*30 images, but labels of shape \(40,\)"),
        (full(x_test=BYTES[:8, :1]), r"training images of shape \(3, 6, 5\), but test images of shape \(1, 6, 5\)"),
        (full(y_train=LABELS / 2), "labels are integers of shape"),
        (full(y_train=LABELS[:, None] == np.arange(4)), "labels are integers of shape"),
        (full(y_train=LABELS - 1), "'x_train' .*A label is -1"),
        (full(y_test=LABELS[:8] + 3), "'x_test' .*A label is 6, but with 4 classes"),
        (full(class_names=np.array(["a", "b"])), "A label is 3, but with 2 classes"),
        (full(class_names=np.array(["a", "a", "b", "c"])), "two or more different names"),
        (full(y_train=LABELS * 0, y_test=LABELS[:8] * 0), "one class only"),
        (full(class_names=np.array(["a", "b", "c", None])), "pickled Python objects"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, arrays: dict[str, object], sentence: str) -> None:
    with pytest.raises(HardsphereError, match=sentence):
        load("arrays", save(tmp_path, **arrays))


def test_files_that_are_no_npz_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HardsphereError, match="no file"):
        load("arrays", tmp_path / "nowhere.npz")
    with pytest.raises(HardsphereError, match="needs a file"):
        load("arrays")
    path = save(tmp_path, **full())
    whole = path.read_bytes()
    for broken in (whole[: len(whole) // 2], b"", b"PK\x03\x04 no", b"words"):
        path.write_bytes(broken)
        with pytest.raises(HardsphereError, match=r"data\.npz"):
            load("arrays", path)
    damaged = bytearray(whole)
    damaged[400] ^= 0xFF
    path.write_bytes(damaged)
    with pytest.raises(HardsphereError, match="half-written"):
        load("arrays", path)
    np.save(tmp_path / "bare.npy", BYTES)
    with pytest.raises(HardsphereError, match="one bare array"):
        load("arrays", tmp_path / "bare.npy")
