"""One door to all data: a name and a directory in, a `DataSet` out."""

from __future__ import annotations

from pathlib import Path

from hardsphere.data import cifar
from hardsphere.data.arrays import read_arrays
from hardsphere.data.digits import read_digits
from hardsphere.data.folder import IMAGENET_MOMENTS, read_folder, read_test_folder
from hardsphere.data.sources import DataSet, ImageFiles, Images, Source
from hardsphere.data.split import S, hold_out
from hardsphere.errors import HardsphereError, nearest

NAMES = ("digits", "cifar10", "cifar100", "folder", "arrays")

# Held out of the training data unless the caller says otherwise: a number of images, or a share of them.
_VALIDATION = {"digits": 0.1, "cifar10": 1000, "cifar100": 1000, "folder": 0.1, "arrays": 0.1}

Moments = tuple[tuple[float, ...], tuple[float, ...]]


def load(
    name: str,
    directory: Path | None = None,
    *,
    validation: float | None = None,
    seed: int = 0,
    size: int | None = None,
    test_only: bool = False,
) -> DataSet:
    """Read and check a data set, and hold a validation split out of its training data, stratified by class.

    Args:
        name: one of `NAMES`.
        directory: where the data lies; a file for ``arrays``, not needed for ``digits``.
        validation: a fraction of the training data, or a number of images from 1 on; 0 for none. By default 1,000
            images of CIFAR, 10 % of other data, and nothing where an image folder brings a validation split of its own.
        seed: chooses the validation split.
        size: of the images of a ``folder``, 224 by default; other data has the size it has.
        test_only: nothing is trained on it: a ``folder`` without splits is a test split as a whole.
    """
    if name not in NAMES:
        raise HardsphereError(f"Unknown data '{name}': use one of {', '.join(NAMES)}.{nearest(name, NAMES)}")
    if name == "folder":
        place, pixels = _required(name, directory), 224 if size is None else size
        return _test_folder(place, pixels) if test_only else _folder(place, validation, seed, pixels)
    train, test, moments = _in_memory(name, directory)
    channels, height, width = test.pixels.shape[1:]
    if size is not None and (height, width) != (size, size):
        raise HardsphereError(f"The images of {name} are {height}x{width}: only a folder's can be resized to {size}.")
    kept, held = (None, None) if train is None else _validation(name, train, validation, seed)
    return DataSet(name, kept, held, test, test.class_names, (channels, height, width), *moments)


def parse_source(text: str) -> tuple[str, Path]:
    """What a person writes for data, as (name, directory).

    ``digits``, ``cifar10:DIR``, ``cifar100:DIR``, ``folder:DIR``, ``FILE.npz`` (or ``arrays:FILE.npz``).
    """
    name, colon, place = text.partition(":")
    if name in NAMES and place:
        return name, Path(place).expanduser()
    if text == "digits":
        return text, Path()
    if text.endswith(".npz"):
        return "arrays", Path(text).expanduser()
    if name in NAMES:
        example = "arrays:FILE.npz" if name == "arrays" else f"{name}:DIR"
        raise HardsphereError(f"'{text}' does not say where the data lies: write {example}.")
    raise HardsphereError(
        f"'{text}' names no data: write digits, cifar10:DIR, cifar100:DIR, folder:DIR or FILE.npz."
        f"{nearest(name, NAMES) if colon or '/' not in text else ''}"
    )


def _in_memory(name: str, directory: Path | None) -> tuple[Images | None, Images, Moments]:
    train: Images | None
    if name == "digits":
        train, test = read_digits()
        return train, test, _moments(train)
    place = _required(name, directory)
    if name == "arrays":
        train, test = read_arrays(place)
        return train, test, _moments(test if train is None else train)
    if not place.is_dir():
        raise HardsphereError(f"There is no folder {place}.")
    if name == "cifar10":
        train, test = cifar.read_cifar(place, cifar.CIFAR10_LAYOUTS, cifar.CIFAR10_CLASSES)
        return train, test, cifar.CIFAR10_MOMENTS
    train, test = cifar.read_cifar(place, cifar.CIFAR100_LAYOUTS, cifar.CIFAR100_CLASSES)
    return train, test, cifar.CIFAR100_MOMENTS


def _test_folder(directory: Path, size: int) -> DataSet:
    test = read_test_folder(directory, size)
    return DataSet("folder", None, None, test, test.class_names, (3, size, size), *IMAGENET_MOMENTS)


def _folder(directory: Path, validation: float | None, seed: int, size: int) -> DataSet:
    train, own, test, note = read_folder(directory, size)
    kept: ImageFiles | None
    held: Source | None
    if own is not None and validation is None:
        kept, held = train, own
    else:
        kept, held = _validation("folder", train, validation, seed)
    return DataSet(
        "folder", kept, held, test, test.class_names, (3, size, size), *IMAGENET_MOMENTS, (note,) if note else ()
    )


def _validation(name: str, train: S, amount: float | None, seed: int) -> tuple[S, S | None]:
    return hold_out(train, _VALIDATION[name] if amount is None else amount, seed)


def _required(name: str, directory: Path | None) -> Path:
    if directory is None:
        fetch = " (`hardsphere data cifar10 --out DIR` fetches it)" if name == "cifar10" else ""
        raise HardsphereError(f"The data '{name}' needs {'a file' if name == 'arrays' else 'a directory'}{fetch}.")
    return Path(directory)


def _moments(images: Images) -> Moments:
    """Mean and standard deviation per channel in [0, 1], to four digits; a constant channel is divided by 1."""
    pixels = images.pixels.double() / (255 if not images.pixels.is_floating_point() else 1)
    mean, std = pixels.mean((0, 2, 3)), pixels.std((0, 2, 3), correction=0)
    return (
        tuple(round(value, 4) for value in mean.tolist()),
        tuple(round(value, 4) or 1.0 for value in std.tolist()),
    )
