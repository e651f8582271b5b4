"""Per-sample outcomes, one bit each, and what two of them say about each other.

A column of outcomes is a vector of booleans: right on the clean image and still standing. Packed, ten thousand images
are 1.25 KB, so that every recorded run keeps them, and a later run can be compared with it image by image after its
weights are gone. A number over several columns (mCA: 75 of them) is the mean over the columns of each image.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from hardsphere.errors import HardsphereError
from hardsphere.evaluate.statistics import Interval, paired_difference, wilson

Bits = np.ndarray[Any, np.dtype[np.bool_]]


def write_outcomes(file: Path, columns: Mapping[str, Bits]) -> Path:
    """Write named columns, perhaps of different lengths; the file is there as a whole or not at all."""
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        names=np.array(list(columns), np.str_),
        lengths=np.array([len(bits) for bits in columns.values()], np.int64),
        bits=np.concatenate([np.zeros(0, np.uint8), *(np.packbits(bits) for bits in columns.values())]),
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as stream:
        stream.write(buffer.getvalue())
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)
    return file


def read_outcomes(file: Path) -> dict[str, Bits]:
    """The columns that `write_outcomes` wrote."""
    try:
        with np.load(io.BytesIO(file.read_bytes()), allow_pickle=False) as stored:
            names, lengths, packed = stored["names"].tolist(), stored["lengths"].tolist(), stored["bits"]
    except FileNotFoundError:
        raise HardsphereError(f"There is no file of outcomes '{file}'.") from None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        raise HardsphereError(f"'{file}' is no file of packed outcomes, or is damaged.") from None
    columns, start = {}, 0
    for name, length in zip(names, lengths, strict=True):
        end = start + (length + 7) // 8
        columns[name] = np.unpackbits(packed[start:end], count=length).astype(np.bool_)
        start = end
    return columns


@dataclass(frozen=True)
class Estimate:
    """An accuracy, or the difference of two, with its 95 % interval and the number of images."""

    value: float
    interval: Interval
    n: int

    @property
    def sign(self) -> int:
        """1 or -1 if the interval lies on that side of zero, else 0."""
        low, high = self.interval
        return 1 if low > 0 else -1 if high < 0 else 0


def accuracy(columns: Sequence[Bits]) -> Estimate:
    """The mean of the columns: Wilson's interval for one column, the normal one over images for several."""
    if len(columns) == 1:
        (bits,) = columns
        held = int(bits.sum())
        return Estimate(held / max(len(bits), 1), wilson(held, len(bits)), len(bits))
    return _mean(np.mean(_stack(columns), axis=0))


def difference(first: Sequence[Bits], second: Sequence[Bits]) -> Estimate:
    """First minus second on the same images: Tango's interval for one column, the normal one over images for several.

    The images must be the same and in the same order; see `hardsphere.reproduce.sweep.Store.compare`.
    """
    if len(first) != len(second) or [len(bits) for bits in first] != [len(bits) for bits in second]:
        raise HardsphereError("Two measurements on different numbers of images or columns cannot be paired.")
    if len(first) == 1:
        (one,), (other,) = first, second
        only_first, only_second = int((one & ~other).sum()), int((other & ~one).sum())
        value = (only_first - only_second) / max(len(one), 1)
        return Estimate(value, paired_difference(only_first, only_second, len(one)), len(one))
    return _mean(np.mean(_stack(first), axis=0) - np.mean(_stack(second), axis=0))


def _stack(columns: Sequence[Bits]) -> Any:
    if len({len(bits) for bits in columns}) != 1:
        raise HardsphereError("A mean over several columns needs columns over the same images.")
    return np.stack([bits.astype(np.float64) for bits in columns])


def _mean(values: Any) -> Estimate:
    """The mean over images. The columns of one image are dependent, so the images are what is counted."""
    n = len(values)
    mean = float(np.mean(values))
    spread = float(np.std(values, ddof=1)) if n > 1 else math.inf
    half = NormalDist().inv_cdf(0.975) * spread / math.sqrt(n)
    return Estimate(mean, (max(mean - half, -1.0), min(mean + half, 1.0)), n)
