"""The nouns of this room: a split in memory (`Images`), a split on disk (`ImageFiles`), a `DataSet`, a `Batch`.

A split checks itself when it is made, so that whatever holds one may rely on it: images of one shape, finite and in
range, one label per image, every label a class. Each sample carries an id, its position in the original file order,
which keys all randomness about it (`hardsphere.noise`), whatever subset, order or batch it later travels in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from hardsphere.errors import HardsphereError


class _Split(Protocol):
    """What a split of either kind offers."""

    @property
    def labels(self) -> Tensor: ...
    @property
    def ids(self) -> Tensor: ...
    @property
    def class_names(self) -> tuple[str, ...]: ...
    def __len__(self) -> int: ...


@dataclass(frozen=True, eq=False)
class Images:
    """One split held in memory.

    Args:
        pixels: (N, C, H, W) on the CPU: uint8, or float32 in [0, 1] where 8 bits would lose something.
        labels: int64 of shape (N,).
        ids: int64 of shape (N,), the samples' positions in the original file order.
        class_names: one name per class.
    """

    pixels: Tensor
    labels: Tensor
    ids: Tensor
    class_names: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.pixels.dim() != 4 or 0 in self.pixels.shape[1:]:
            raise HardsphereError(f"Images need the shape (N, C, H, W), not {tuple(self.pixels.shape)}.")
        if self.pixels.dtype not in (torch.uint8, torch.float32):
            raise HardsphereError(f"Pixels are {_dtype(self.pixels)}, but must be uint8, or float32 in [0, 1].")
        _check_labels(self, len(self.pixels))
        if self.pixels.dtype == torch.float32:
            check_unit_range(self.pixels, "The images")

    def __len__(self) -> int:
        return len(self.pixels)

    def subset(self, indices: Tensor | Sequence[int]) -> Images:
        """The samples at these positions, in this order, with the ids they have here."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        return replace(self, pixels=self.pixels[rows], labels=self.labels[rows], ids=self.ids[rows])

    def digest(self) -> str:
        """The fingerprint of the pixels and labels: 16 hexadecimal digits of their SHA-256."""
        sha = hashlib.sha256(f"{_dtype(self.pixels)} {tuple(self.pixels.shape)}".encode())
        sha.update(self.pixels.contiguous().numpy().data)
        sha.update(self.labels.contiguous().numpy().data)
        return sha.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """One split on disk, decoded on the fly to RGB squares of ``size`` pixels (see `hardsphere.data.decode`).

    Args:
        root: the folder that ``paths`` are relative to.
        paths: one relative path per sample.
        labels: int64 of shape (N,).
        ids: int64 of shape (N,), the samples' positions in the original file order.
        class_names: one name per class.
        size: height and width of the decoded images.
    """

    root: Path
    paths: tuple[str, ...]
    labels: Tensor
    ids: Tensor
    class_names: tuple[str, ...]
    size: int = 224

    def __post_init__(self) -> None:
        if self.size < 1:
            raise HardsphereError(f"The image size is {self.size}, but it must be at least 1 pixel.")
        _check_labels(self, len(self.paths))

    def __len__(self) -> int:
        return len(self.paths)

    def subset(self, indices: Tensor | Sequence[int]) -> ImageFiles:
        """The samples at these positions, in this order, with the ids they have here."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        paths = tuple(self.paths[row] for row in rows.tolist())
        return replace(self, paths=paths, labels=self.labels[rows], ids=self.ids[rows])

    def digest(self) -> str:
        """The fingerprint of names, file sizes, labels and image size: 16 hexadecimal digits of their SHA-256."""
        sha = hashlib.sha256(f"{self.size}".encode())
        for path, label in zip(self.paths, self.labels.tolist(), strict=True):
            sha.update(f"{path}\0{self.path(path).stat().st_size}\0{label}\n".encode())
        return sha.hexdigest()[:16]

    def path(self, relative: str) -> Path:
        """Where a file of this split lies."""
        return self.root / relative


Source = Images | ImageFiles


@dataclass(frozen=True, eq=False)
class DataSet:
    """A data set: splits that share their classes and the shape of their images.

    Args:
        name: what `load` was asked for.
        train: the training data less ``validation``; none if the source holds test data only.
        validation: held out of the training data, for the selection of checkpoints; none if the caller wants none.
        test: read by evaluation alone.
        class_names: one name per class.
        shape: (C, H, W).
        mean: one number per channel, for the normalisation layer inside the model.
        std: one number per channel, likewise.
        notes: sentences on what was decided for the user, to be said aloud.
    """

    name: str
    train: Source | None
    validation: Source | None
    test: Source
    class_names: tuple[str, ...]
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    notes: tuple[str, ...] = ()


@dataclass
class Batch:
    """Some samples on the device.

    Args:
        x: float32 images in [0, 1], (B, C, H, W).
        y: int64 labels of shape (B,), or float32 class probabilities of shape (B, L) under CutMix.
        ids: int64 of shape (B,).
    """

    x: Tensor
    y: Tensor
    ids: Tensor

    def __len__(self) -> int:
        return len(self.x)


def to_float(pixels: Tensor) -> Tensor:
    """Pixels as float32 in [0, 1]: byte k becomes the float nearest to k/255, on every device.

    CUDA divides float32 by a constant through its reciprocal, so that an image would not be the same image everywhere;
    in float64, that error is too small to reach the result.
    """
    if pixels.is_floating_point():
        return pixels
    return (pixels.double() / 255).float() if pixels.is_cuda else pixels.float() / 255


def check_unit_range(pixels: Tensor, what: str) -> None:
    """Refuse float pixels that are not finite or not in [0, 1], and say what to do about it."""
    low, high = pixels.min().item(), pixels.max().item()  # NaN anywhere makes both NaN
    if low != low:
        raise HardsphereError(f"{what} hold NaN pixels: every pixel must be a number in [0, 1].")
    if low >= 0 and 1 < high <= 255:
        raise HardsphereError(
            f"{what} hold float pixels up to {high:g}, as if in 0..255: save them as uint8 or divide by 255."
        )
    if not (low >= 0 and high <= 1):
        raise HardsphereError(
            f"{what} hold pixels from {low:g} to {high:g}: float pixels must lie in [0, 1], before any normalisation."
        )


def _check_labels(split: _Split, count: int) -> None:
    labels, ids, classes = split.labels, split.ids, len(split.class_names)
    if count == 0:
        raise HardsphereError("The set of images is empty: it needs at least one image.")
    if labels.shape != (count,) or ids.shape != (count,):
        raise HardsphereError(
            f"There are {count} images, but labels of shape {tuple(labels.shape)} and ids of shape {tuple(ids.shape)}."
        )
    if labels.dtype != torch.int64 or ids.dtype != torch.int64:
        raise HardsphereError(f"Labels and ids must be int64, not {_dtype(labels)} and {_dtype(ids)}.")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        wrong = low if low < 0 else high
        raise HardsphereError(f"A label is {wrong}, but with {classes} classes labels must lie in 0..{classes - 1}.")


def _dtype(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")
