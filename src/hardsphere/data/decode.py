"""From an image file to uint8 pixels: the field's usual squares, for evaluation and for training.

Evaluation takes the centre of the image after its short side is resized to 8/7 of the size (256 for 224); training
takes a random part of 8 % to 100 % of the area with an aspect of 3/4 to 4/3 (Szegedy et al., 2015), resized to the
square. Both resample bilinearly with antialiasing. Orientation tags of cameras are not applied, as is usual.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hardsphere.errors import HardsphereError

if TYPE_CHECKING:
    from PIL.Image import Image

# A random part that does not fit into the image is drawn again, at most this often.
TRIES = 10
# Numbers that one try takes: area, aspect, and where.
NUMBERS_PER_TRY = 4

_AREA = (0.08, 1.0)
_ASPECT = (3 / 4, 4 / 3)


def verify(path: Path) -> None:
    """Refuse a file that is not an image, without decoding its pixels."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            image.verify()
    except Exception as error:  # each of Pillow's readers fails in its own way
        raise unreadable(path, error) from error


def read_rgb(path: Path) -> Image:
    """The whole image as 8-bit RGB."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            image.load()
            return _rgb(image)
    except Exception as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> HardsphereError:
    """The sentence for an image that cannot be read."""
    return HardsphereError(f"The image {path} cannot be read ({type(error).__name__}): repair it or remove it.")


def centre(path: Path, size: int) -> Tensor:
    """The middle of an image, as evaluation sees it: uint8 of shape (3, size, size)."""
    from PIL.Image import Resampling

    image = read_rgb(path)
    width, height = image.size
    short = round(size * 256 / 224)
    if width <= height:
        width, height = short, int(short * height / width)
    else:
        width, height = int(short * width / height), short
    image = image.resize((width, height), Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return _pixels(image.crop((left, top, left + size, top + size)))


def random_part(path: Path, size: int, numbers: Sequence[Sequence[float]]) -> Tensor:
    """A random part of an image, as training sees it: uint8 of shape (3, size, size).

    Args:
        numbers: `TRIES` rows of `NUMBERS_PER_TRY` uniform numbers in [0, 1).
    """
    from PIL.Image import Resampling

    image = read_rgb(path)
    image = image.crop(random_box(*image.size, numbers))
    return _pixels(image.resize((size, size), Resampling.BILINEAR))


def random_box(width: int, height: int, numbers: Sequence[Sequence[float]]) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of the first try that fits, else the largest centred box of an allowed aspect."""
    for area, aspect, across, down in numbers:
        target = width * height * (_AREA[0] + (_AREA[1] - _AREA[0]) * area)
        ratio = _ASPECT[0] * (_ASPECT[1] / _ASPECT[0]) ** aspect  # uniform in the logarithm
        w, h = round(math.sqrt(target * ratio)), round(math.sqrt(target / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(across * (width - w + 1)), int(down * (height - h + 1))
            return left, top, left + w, top + h
    w = min(width, max(1, round(height * _ASPECT[1])))
    h = min(height, max(1, round(width / _ASPECT[0])))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def _rgb(image: Image) -> Image:
    if image.mode in ("I", "F"):
        raise ValueError(f"mode {image.mode} has no agreed range")
    if image.mode.startswith("I;16"):
        from PIL import Image as pil

        eight_bits: Any = (np.asarray(image) >> 8).astype(np.uint8)  # Pillow itself would clip at 255
        image = pil.fromarray(eight_bits)
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def _pixels(image: Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
