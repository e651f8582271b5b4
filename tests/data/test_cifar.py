"""CIFAR's official files, small: planted pixels come back, and nothing that was not checked is opened."""

import hashlib
import os
import pickle
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hardsphere.data import load
from hardsphere.data.cifar import (
    CIFAR10_BINARY,
    CIFAR10_CLASSES,
    CIFAR10_PYTHON,
    CIFAR100_BINARY,
    CIFAR100_CLASSES,
    CIFAR100_PYTHON,
    Layout,
    read_cifar,
)
from hardsphere.errors import HardsphereError

ROWS = 4


def planted(name: str, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Random pixels and labels that belong to a file's name."""
    rng = np.random.default_rng(list(name.encode()))
    return rng.integers(0, 256, (ROWS, 3072), dtype=np.uint8), rng.integers(0, classes, ROWS, dtype=np.uint8)


def python2_pickle(pixels: np.ndarray, labels: np.ndarray, key: bytes) -> bytes:
    """The opcodes that Python 2 wrote for {'data': array, key: list}, as the official files have them."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(" + number(0) + b"t" + text(b"b") + b"tR"
    dtype = b"cnumpy\ndtype\n(" + text(b"u1") + number(0) + number(1) + b"tR("
    dtype += number(3) + text(b"|") + b"NNN" + number(-1) * 2 + number(0) + b"tb"
    shape = b"(" + number(pixels.shape[0]) + number(pixels.shape[1]) + b"t"
    raw = pixels.tobytes()
    state = b"(" + number(1) + shape + dtype + b"\x89" + b"T" + struct.pack("<i", len(raw)) + raw + b"tb"
    numbers = b"](" + b"".join(number(int(label)) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + empty + state + text(key) + numbers + b"u."


def write(directory: Path, layout: Layout, classes: int) -> Layout:
    """Small files in a layout, and the layout that knows their digests."""
    (directory / layout.folder).mkdir(parents=True)
    digests: dict[str, dict[str, str | None]] = {"train": {}, "test": {}}
    for split, files in (("train", layout.train), ("test", layout.test)):
        for name in files:
            pixels, labels = planted(name, classes)
            if isinstance(layout.label, str):
                data = python2_pickle(pixels, labels, layout.label.encode())
            else:
                head = [labels[:, None]] if layout.label == (1, 0) else [labels[:, None] // 5, labels[:, None]]
                data = np.concatenate([*head, pixels], axis=1).tobytes()
            (directory / layout.folder / name).write_bytes(data)
            digests[split][name] = hashlib.new(layout.algorithm, data).hexdigest()
    if layout.rows is not None:
        return replace(layout, rows=dict.fromkeys(layout.rows, ROWS))
    return replace(layout, **digests)


CASES = [
    (CIFAR10_BINARY, CIFAR10_CLASSES),
    (CIFAR10_PYTHON, CIFAR10_CLASSES),
    (CIFAR100_BINARY, CIFAR100_CLASSES),
    (CIFAR100_PYTHON, CIFAR100_CLASSES),
]


@pytest.mark.parametrize(("layout", "names"), CASES, ids=lambda case: getattr(case, "folder", ""))
@pytest.mark.parametrize("inside", [False, True], ids=["parent", "folder"])
def test_planted_pixels_come_back(tmp_path: Path, layout: Layout, names: tuple[str, ...], inside: bool) -> None:
    small = write(tmp_path, layout, len(names))
    train, test = read_cifar(tmp_path / layout.folder if inside else tmp_path, [small], names)
    for split, files in ((train, layout.train), (test, layout.test)):
        expected = [planted(name, len(names)) for name in files]
        assert np.array_equal(split.pixels.numpy(), np.concatenate([p for p, _ in expected]).reshape(-1, 3, 32, 32))
        assert np.array_equal(split.labels.numpy(), np.concatenate([y for _, y in expected]))
        assert split.ids.tolist() == list(range(ROWS * len(files)))
        assert split.class_names == names


def test_whichever_layout_is_there_is_found(tmp_path: Path) -> None:
    python = write(tmp_path, CIFAR10_PYTHON, 10)
    train, _ = read_cifar(tmp_path, [CIFAR10_BINARY, python], CIFAR10_CLASSES)
    assert len(train) == 5 * ROWS


def test_class_names() -> None:
    assert len(set(CIFAR100_CLASSES)) == 100
    assert list(CIFAR100_CLASSES) == sorted(CIFAR100_CLASSES)
    assert len(set(CIFAR10_CLASSES)) == 10


@pytest.mark.parametrize(("layout", "names"), CASES, ids=lambda case: getattr(case, "folder", ""))
def test_a_half_written_file_is_refused(tmp_path: Path, layout: Layout, names: tuple[str, ...]) -> None:
    small = write(tmp_path, layout, len(names))
    path = tmp_path / layout.folder / list(layout.train)[-1]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(HardsphereError, match=f"{path.name} .*half-written"):
        read_cifar(tmp_path, [small], names)


@pytest.mark.parametrize(("layout", "names"), CASES, ids=lambda case: getattr(case, "folder", ""))
def test_a_missing_file_is_named(tmp_path: Path, layout: Layout, names: tuple[str, ...]) -> None:
    small = write(tmp_path, layout, len(names))
    (tmp_path / layout.folder / next(iter(layout.test))).unlink()
    with pytest.raises(HardsphereError, match=f"{next(iter(layout.test))} is missing"):
        read_cifar(tmp_path, [small], names)


@pytest.mark.parametrize("layout", [CIFAR10_BINARY, CIFAR100_BINARY], ids=["cifar10", "cifar100"])
def test_labels_outside_the_classes_are_refused(tmp_path: Path, layout: Layout) -> None:
    small = write(tmp_path, layout, 100)
    with pytest.raises(HardsphereError, match="holds the label"):
        read_cifar(tmp_path, [small], CIFAR10_CLASSES[:2])


def test_no_pickle_is_opened_unchecked(tmp_path: Path) -> None:
    """The official digests, a file that would run a command: it is refused before anything in it is read."""
    folder = tmp_path / CIFAR10_PYTHON.folder
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    with pytest.raises(HardsphereError, match="MD5 is wrong"):
        load("cifar10", tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_checked_pickle_still_may_hold_arrays_only(tmp_path: Path) -> None:
    small = write(tmp_path, CIFAR10_PYTHON, 10)
    data = pickle.dumps(Evil(tmp_path / "ran"))
    (tmp_path / small.folder / "data_batch_1").write_bytes(data)
    small = replace(small, train={"data_batch_1": hashlib.md5(data).hexdigest()})
    with pytest.raises(HardsphereError, match=r"not a pickled CIFAR batch: it asks for \w+\.mkdir"):
        read_cifar(tmp_path, [small], CIFAR10_CLASSES)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [{b"data": 1}, [1, 2], {"labels": [0], b"data": b""}])
def test_other_pickles_are_refused(tmp_path: Path, content: object) -> None:
    small = write(tmp_path, CIFAR10_PYTHON, 10)
    data = pickle.dumps(content)
    (tmp_path / small.folder / "data_batch_1").write_bytes(data)
    with pytest.raises(HardsphereError, match="not a pickled CIFAR batch"):
        read_cifar(tmp_path, [replace(small, train={"data_batch_1": hashlib.md5(data).hexdigest()})], CIFAR10_CLASSES)


def test_pixels_of_another_shape_are_refused(tmp_path: Path) -> None:
    small = write(tmp_path, CIFAR10_PYTHON, 10)
    data = python2_pickle(np.zeros((2, 5), np.uint8), np.zeros(2, np.uint8), b"labels")
    (tmp_path / small.folder / "data_batch_1").write_bytes(data)
    with pytest.raises(HardsphereError, match=r"uint8 pixels of shape \(2, 5\) for 2 labels"):
        read_cifar(tmp_path, [replace(small, train={"data_batch_1": hashlib.md5(data).hexdigest()})], CIFAR10_CLASSES)


def test_an_empty_directory_says_what_was_sought(tmp_path: Path) -> None:
    with pytest.raises(HardsphereError, match=r"neither cifar-10-batches-bin/ nor cifar-10-batches-py/.*data cifar10"):
        load("cifar10", tmp_path)
    with pytest.raises(HardsphereError, match="neither cifar-100-binary/ nor cifar-100-python/"):
        load("cifar100", tmp_path)
    with pytest.raises(HardsphereError, match="no folder"):
        load("cifar10", tmp_path / "nowhere")
    with pytest.raises(HardsphereError, match=r"needs a directory .*data cifar10"):
        load("cifar10")


class Evil:
    """What an attacker would pickle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)
