"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009), from the official binary or Python files, checked before they are read.

The Python layout is pickled, and a pickle can run anything: a file is opened only if its MD5 is the published one, and
then by a reader that knows arrays and nothing else. CIFAR-10's binary files are compared with the SHA-1s of the
official ones; for CIFAR-100's, which have no published digests, length and labels are checked.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hardsphere.data.sources import Images
from hardsphere.errors import HardsphereError

_PIXELS = 3 * 32 * 32

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# fmt: off
CIFAR100_CLASSES = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl", "boy",
    "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair", "chimpanzee", "clock",
    "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish", "forest",
    "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion", "lizard",
    "lobster", "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange", "orchid",
    "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy", "porcupine", "possum",
    "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper",
    "snail", "snake", "spider", "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank", "telephone",
    "television", "tiger", "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale", "willow_tree", "wolf",
    "woman", "worm",
)
# fmt: on
# Means and standard deviations of the training images, per channel.
CIFAR10_MOMENTS = ((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616))
CIFAR100_MOMENTS = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))


@dataclass(frozen=True)
class Layout:
    """One way in which the files are published.

    Args:
        folder: the folder that the official archive unpacks to.
        train: the training files in order, each with its digest, or None where none is published.
        test: the test files, likewise.
        algorithm: of the digests, as `hashlib` names it.
        label: for binary files, (bytes before the pixels, which of them is the label); for pickles, the label's key.
        rows: samples per file, where no digest vouches for it.
    """

    folder: str
    train: Mapping[str, str | None]
    test: Mapping[str, str | None]
    algorithm: str
    label: tuple[int, int] | str
    rows: Mapping[str, int] | None = None


CIFAR10_BINARY = Layout(
    "cifar-10-batches-bin",
    {
        "data_batch_1.bin": "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
        "data_batch_2.bin": "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
        "data_batch_3.bin": "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
        "data_batch_4.bin": "aab85764eb3584312d3c7f65fd2fd016e36a258e",
        "data_batch_5.bin": "26e2849e66a845b7f1e4614ae70f4889ae604628",
    },
    {"test_batch.bin": "67eb016db431130d61cd03c7ad570b013799c88c"},
    "sha1",
    (1, 0),
)
CIFAR10_PYTHON = Layout(
    "cifar-10-batches-py",
    {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    },
    {"test_batch": "40351d587109b95175f43aff81a1287e"},
    "md5",
    "labels",
)
CIFAR100_BINARY = Layout(
    "cifar-100-binary",
    {"train.bin": None},
    {"test.bin": None},
    "sha1",
    (2, 1),  # the coarse label comes first
    {"train.bin": 50_000, "test.bin": 10_000},
)
CIFAR100_PYTHON = Layout(
    "cifar-100-python",
    {"train": "16019d7e3df5f24257cddd939b257f8d"},
    {"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
    "md5",
    "fine_labels",
)

CIFAR10_LAYOUTS = (CIFAR10_BINARY, CIFAR10_PYTHON)
CIFAR100_LAYOUTS = (CIFAR100_BINARY, CIFAR100_PYTHON)


def read_cifar(directory: Path, layouts: Sequence[Layout], class_names: tuple[str, ...]) -> tuple[Images, Images]:
    """(train, test), from whichever of the layouts lies in ``directory`` or in its official folder there."""
    folder, layout = _find(directory, layouts)
    return _split(folder, layout, layout.train, class_names), _split(folder, layout, layout.test, class_names)


def _find(directory: Path, layouts: Sequence[Layout]) -> tuple[Path, Layout]:
    for layout in layouts:
        for folder in (directory, directory / layout.folder):
            if any((folder / name).is_file() for name in (*layout.train, *layout.test)):
                return folder, layout
    names = " nor ".join(f"{layout.folder}/" for layout in layouts)
    raise HardsphereError(
        f"{directory} holds neither {names}: give the folder of the official files or its parent"
        f"{_how_to_fetch(layouts[0], directory)}."
    )


def _split(folder: Path, layout: Layout, files: Mapping[str, str | None], class_names: tuple[str, ...]) -> Images:
    parts = [_read(folder / name, layout, digest) for name, digest in files.items()]
    pixels = torch.from_numpy(np.concatenate([pixels for pixels, _ in parts])).view(-1, 3, 32, 32)
    labels = torch.from_numpy(np.concatenate([labels for _, labels in parts]))
    if int(labels.max()) >= len(class_names):
        names = ", ".join(files)
        raise HardsphereError(f"{folder}/{names} holds the label {int(labels.max())} of {len(class_names)} classes.")
    return Images(pixels, labels, torch.arange(len(labels)), class_names)


def _read(path: Path, layout: Layout, digest: str | None) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(pixels, labels) of one file, as (rows, 3072) and int64."""
    data = _checked(path, layout, digest)
    if isinstance(layout.label, str):
        return _from_pickle(path, data, layout.label)
    before, which = layout.label
    row = before + _PIXELS
    rows = layout.rows[path.name] if layout.rows else len(data) // row
    if len(data) != rows * row:
        raise HardsphereError(f"{path} has {len(data):,} bytes, not {rows * row:,}: half-written, or another file.")
    table = np.frombuffer(data, np.uint8).reshape(rows, row)
    return table[:, before:], table[:, which].astype(np.int64)


def _checked(path: Path, layout: Layout, digest: str | None) -> bytes:
    """The bytes of a file whose digest is right: what is parsed later is what was checked."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise HardsphereError(f"{path} is missing{_how_to_fetch(layout, path.parent)}.") from None
    except OSError as error:
        raise HardsphereError(f"{path} cannot be read: {error.strerror}.") from error
    if digest is not None and hashlib.new(layout.algorithm, data, usedforsecurity=False).hexdigest() != digest:
        raise HardsphereError(
            f"{path} is half-written or not the official file (its {layout.algorithm.upper()} is wrong): remove it and "
            f"fetch it again{_how_to_fetch(layout, path.parent)}."
        )
    return data


def _how_to_fetch(layout: Layout, directory: Path) -> str:
    """A pointer to the fetching command, which knows CIFAR-10's binary files only."""
    if layout.folder != CIFAR10_BINARY.folder:
        return ""
    parent = directory.parent if directory.name == layout.folder else directory
    return f" (`hardsphere data cifar10 --out {parent}` fetches them)"


def _from_pickle(path: Path, data: bytes, key: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    try:
        content = _ArraysOnly(io.BytesIO(data), encoding="bytes").load()
        pixels, labels = content[b"data"], np.asarray(content[key.encode()], dtype=np.int64)
    except (pickle.UnpicklingError, KeyError, TypeError, ValueError, EOFError) as error:
        raise HardsphereError(f"{path} is not a pickled CIFAR batch: {error}.") from error
    if pixels.dtype != np.uint8 or pixels.shape != (len(labels), _PIXELS):
        raise HardsphereError(f"{path} holds {pixels.dtype} pixels of shape {pixels.shape} for {len(labels)} labels.")
    return pixels, labels


class _ArraysOnly(pickle.Unpickler):
    """Reads containers, numbers, text and NumPy arrays; any other name in the file is refused."""

    def find_class(self, module: str, name: str) -> Any:
        known = {
            # The function moved between NumPy's versions; an array knows where it is now.
            ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
            ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return known[module, name]
