"""Arrays from an .npz file: one's own data set in one file.

Keys: ``x_train``, ``y_train``, ``x_test``, ``y_test``; or ``x`` and ``y`` for a test alone; ``class_names`` if wanted.
Images are uint8, or floats in [0, 1]; (N, H, W) for grey ones, (N, C, H, W) or (N, H, W, C) with 1 or 3 channels. Where
both readings are possible, (N, C, H, W) is taken. Floats that are whole multiples of 1/255 are stored as bytes, any
others as float32, so that nothing is rounded away.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hardsphere.data.sources import Images, check_unit_range, to_float
from hardsphere.errors import HardsphereError, nearest

Array = np.ndarray[Any, Any]

_SPLITS = ("x_train", "y_train", "x_test", "y_test")
_TEST_ONLY = ("x", "y")
_KEYS = (*_SPLITS, *_TEST_ONLY, "class_names")


def read_arrays(path: Path) -> tuple[Images | None, Images]:
    """(train, test), train being None where the file holds ``x`` and ``y`` only."""
    arrays = _open(path)
    unknown = sorted(set(arrays) - set(_KEYS))
    if unknown:
        raise HardsphereError(
            f"{path} holds the unknown key '{unknown[0]}': the keys are {', '.join(_KEYS)}.{nearest(unknown[0], _KEYS)}"
        )
    pairs = [_SPLITS[:2], _SPLITS[2:]] if "x" not in arrays and "y" not in arrays else [_TEST_ONLY]
    missing = [key for pair in pairs for key in pair if key not in arrays]
    if missing:
        raise HardsphereError(
            f"{path} has no '{missing[0]}': it needs x_train, y_train, x_test and y_test, or x and y for a test alone."
        )
    if len(pairs) == 1 and any(key in arrays for key in _SPLITS):
        raise HardsphereError(f"{path} holds x and y beside x_train and x_test: keep one kind of keys.")
    read = [(_pixels(path, x, arrays[x]), _labels(path, y, arrays[y])) for x, y in pairs]
    names = _class_names(path, arrays, [labels for _, labels in read])
    splits = [_images(path, x, pixels, labels, names) for (x, _), (pixels, labels) in zip(pairs, read, strict=True)]
    if len({split.pixels.shape[1:] for split in splits}) > 1:
        raise HardsphereError(
            f"{path} has training images of shape {tuple(splits[0].pixels.shape[1:])}, but test images of shape "
            f"{tuple(splits[-1].pixels.shape[1:])}."
        )
    return (splits[0] if len(splits) == 2 else None), splits[-1]


def _open(path: Path) -> dict[str, Array]:
    if not path.is_file():
        raise HardsphereError(f"There is no file {path}.")
    try:
        with path.open("rb") as file:  # NumPy itself would leave a broken file open
            content = np.load(file, allow_pickle=False)
            if not isinstance(content, np.lib.npyio.NpzFile):
                raise HardsphereError(f"{path} is one bare array: save an .npz with x_train, y_train, x_test, y_test.")
            return {key: np.asarray(content[key]) for key in content.files}
    except HardsphereError:
        raise
    except ValueError as error:
        if "pickle" not in str(error):
            raise HardsphereError(f"{path} cannot be read as an .npz file: {error}.") from error
        raise HardsphereError(
            f"{path} holds pickled Python objects, which could run any code and are not opened: save plain arrays "
            "(class_names as np.array([...], dtype=str))."
        ) from error
    except (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise HardsphereError(f"{path} is half-written or not an .npz file ({error}).") from error


def _pixels(path: Path, key: str, array: Array) -> Tensor:
    what = f"'{key}' in {path}"
    if array.ndim not in (3, 4) or array.size == 0:
        problem = "is empty" if array.size == 0 else f"has the shape {array.shape}"
        raise HardsphereError(f"{what} {problem}, but images are (N, H, W), (N, C, H, W) or (N, H, W, C), N above 0.")
    if array.dtype != np.uint8 and array.dtype.kind != "f":
        raise HardsphereError(f"{what} is {array.dtype}: save pixels in 0..255 as uint8, or as floats in [0, 1].")
    pixels = torch.from_numpy(np.ascontiguousarray(array if array.dtype == np.uint8 else array.astype(np.float32)))
    pixels = _channels_first(what, pixels)
    return pixels if pixels.dtype == torch.uint8 else _as_bytes_if_exact(pixels, what)


def _channels_first(what: str, pixels: Tensor) -> Tensor:
    if pixels.dim() == 3:
        return pixels.unsqueeze(1)
    if pixels.shape[1] in (1, 3):
        return pixels
    if pixels.shape[3] in (1, 3):
        return pixels.permute(0, 3, 1, 2).contiguous()
    raise HardsphereError(f"{what} has the shape {tuple(pixels.shape)}, but axis 1 or axis 3 must be 1 or 3 channels.")


def _as_bytes_if_exact(pixels: Tensor, what: str) -> Tensor:
    check_unit_range(pixels, f"The images {what}")
    as_bytes = (pixels * 255).round().to(torch.uint8)
    return as_bytes if (to_float(as_bytes) - pixels).abs().max() <= 1e-7 else pixels


def _labels(path: Path, key: str, array: Array) -> Tensor:
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise HardsphereError(
            f"'{key}' in {path} is {array.dtype} of shape {array.shape}, but labels are integers of shape (N,)."
        )
    return torch.from_numpy(array.astype(np.int64))


def _class_names(path: Path, arrays: dict[str, Array], labels: list[Tensor]) -> tuple[str, ...]:
    """The names given, or else the numbers of the classes of the first split, which is the training data if any."""
    if "class_names" in arrays:
        names = tuple(str(name) for name in arrays["class_names"].tolist()) if arrays["class_names"].ndim == 1 else ()
        if len(set(names)) != len(names) or len(names) < 2:
            raise HardsphereError(f"'class_names' in {path} must be two or more different names.")
        return names
    count = int(labels[0].max()) + 1 if len(labels[0]) else 0
    if count < 2:
        raise HardsphereError(f"{path} holds one class only, but a classifier needs two: name them in 'class_names'.")
    return tuple(str(label) for label in range(count))


def _images(path: Path, key: str, pixels: Tensor, labels: Tensor, names: tuple[str, ...]) -> Images:
    try:
        return Images(pixels, labels, torch.arange(len(labels)), names)
    except HardsphereError as error:
        raise HardsphereError(f"'{key}' in {path}: {error}") from None
