"""Per-sample outcomes, one bit each, and what two of them say about each other.

A column of outcomes is a vector of booleans: right on the clean image and still standing. Packed, ten thousand images
are 1.25 KB, so that every recorded run keeps them, and a later run can be compared with it image by image after its
weights are gone. A number over several columns (mCA: 75 of them) is the mean over the columns of each image.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from hardsphere.errors import HardsphereError
from hardsphere.evaluate.statistics import Interval, paired_difference, wilson
from hardsphere.files import appearing

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
    with appearing(file) as partial:
        partial.write_bytes(buffer.getvalue())
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
    """The mean of the columns, with Wilson's interval.

    Several columns of one image are dependent, so images are what is counted: their effective number grows as much as
    the spread of the per-image means stays below that of a single column, up to the number of columns.
    """
    means = np.mean(_stack(columns), axis=0)
    n = len(means)
    mean = float(np.mean(means)) if n else 0.0
    effect = 1.0
    if len(columns) > 1 and n > 1 and 0 < mean < 1:
        effect = float(np.clip(np.var(means, ddof=1) / (mean * (1 - mean)), 1 / len(columns), 1.0))
    whole = len(columns) == 1 or mean in (0.0, 1.0)
    return Estimate(mean, wilson(round(mean * n), n) if whole else _wilson(mean, n / effect), n)


def difference(first: Sequence[Bits], second: Sequence[Bits]) -> Estimate:
    """First minus second on the same images: Tango's interval for one column, the normal one over images for several.

    The images must be the same and in the same order; see `hardsphere.reproduce.store.Store.compare`.
    """
    if len(first) != len(second) or [len(bits) for bits in first] != [len(bits) for bits in second]:
        raise HardsphereError("Two measurements on different numbers of images or columns cannot be paired.")
    if len(first) == 1:
        (one,), (other,) = first, second
        only_first, only_second = int((one & ~other).sum()), int((other & ~one).sum())
        value = (only_first - only_second) / max(len(one), 1)
        return Estimate(value, paired_difference(only_first, only_second, len(one)), len(one))
    apart = np.mean(_stack(first), axis=0) - np.mean(_stack(second), axis=0)
    n, value = len(apart), float(np.mean(apart)) if len(apart) else 0.0
    spread = float(np.std(apart, ddof=1)) if n > 1 else 0.0
    if spread == 0:  # images that all agree still leave room for others that do not
        low, high = paired_difference(0, 0, n)
        return Estimate(value, (max(value + low, -1.0), min(value + high, 1.0)), n)
    half = _Z * spread / math.sqrt(n)
    return Estimate(value, (max(value - half, -1.0), min(value + half, 1.0)), n)


_Z = NormalDist().inv_cdf(0.975)
_STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)


def student(freedom: int) -> float:
    """The 97.5 % point of Student's distribution, by its degrees of freedom; beyond 10 to a thousandth, by series."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    first, second = (_Z**3 + _Z) / 4, (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / 96
    third = (3 * _Z**7 + 19 * _Z**5 + 17 * _Z**3 - 15 * _Z) / 384
    return _Z + first / freedom + second / freedom**2 + third / freedom**3


def _stack(columns: Sequence[Bits]) -> Any:
    if len({len(bits) for bits in columns}) != 1:
        raise HardsphereError("A mean over several columns needs columns over the same images.")
    return np.stack([bits.astype(np.float64) for bits in columns])


def _wilson(p: float, n: float) -> Interval:
    """Wilson's interval for a number of images that need not be whole."""
    centre = (p + _Z * _Z / (2 * n)) / (1 + _Z * _Z / n)
    half = _Z / (1 + _Z * _Z / n) * math.sqrt(p * (1 - p) / n + _Z * _Z / (4 * n * n))
    return centre - half, centre + half
