"""Photographs of frost: where they are found, and what stands in for them where they are not.

The original blends five photographs into the images. They are not ours to ship. They come with the package
`imagecorruptions`, whose files are read without importing it (its import needs an outdated setuptools), or from a
directory. Without either, a drawn texture stands in. It is not the published corruption and says so wherever it goes:
`FrostSource.stand_in`, a warning from `corrupt`, the manifest of a written set, and the scores, which then give no mean
over all 15.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hardsphere.corruptions.plasma import plasma
from hardsphere.errors import HardsphereError
from hardsphere.noise import Noise

_PACKAGES = ("imagecorruptions", "imagecorruptions-imaug")
_NAMES = ("frost1", "frost2", "frost3", "frost4", "frost5")  # the original never picks its sixth file
_SUFFIXES = (".png", ".jpg", ".jpeg")

STAND_IN = "stand-in"


class FrostStandInWarning(UserWarning):
    """Frost was drawn, not photographed: its numbers are not comparable with published ones."""


@dataclass(frozen=True)
class FrostSource:
    """Where the frost of a corruption comes from.

    Args:
        origin: in words, for people and manifests.
        files: the photographs; none for the stand-in.
    """

    origin: str
    files: tuple[Path, ...]

    @property
    def stand_in(self) -> bool:
        """Whether this is the drawn texture, whose numbers belong into no mean."""
        return not self.files


@dataclass(frozen=True)
class Photographs:
    """Photographs of several sizes, laid end to end so that one index reaches any pixel of any of them.

    Args:
        pixels: 8-bit RGB, (3, total number of pixels).
        offsets: where each photograph begins.
        heights: its rows.
        widths: its columns.
    """

    pixels: Tensor
    offsets: Tensor
    heights: Tensor
    widths: Tensor


def frost_source(frost: FrostSource | str | Path | None = None) -> FrostSource:
    """Decide where frost comes from.

    Args:
        frost: a directory with frost1 to frost5 (.png or .jpg); ``"stand-in"`` for the drawn texture; or nothing, for
            the photographs of an installed `imagecorruptions`, else the stand-in.
    """
    if isinstance(frost, FrostSource):
        return frost
    if frost is None:
        return _installed() or _stand_in_source()
    if frost == STAND_IN:
        return _stand_in_source()
    return _in_directory(Path(frost))


def _stand_in_source() -> FrostSource:
    return FrostSource("stand-in: a drawn texture, not the published photographs", ())


def _installed() -> FrostSource | None:
    for package in _PACKAGES:
        try:
            listed = metadata.files(package) or []
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        files = _five([Path(str(file.locate())) for file in listed if file.parent.name == "frost"])
        if files is not None:
            return FrostSource(f"photographs of {package} {version}", files)
    return None


def _in_directory(directory: Path) -> FrostSource:
    if not directory.is_dir():
        raise HardsphereError(f"'{directory}' is no directory; frost needs one with the photographs frost1 to frost5.")
    files = _five(sorted(directory.iterdir()))
    if files is None:
        raise HardsphereError(
            f"'{directory}' lacks some of frost1 to frost5 (.png or .jpg): put the original photographs there, "
            "or install the package imagecorruptions, which carries them."
        )
    return FrostSource(f"photographs in {directory.name}", files)


def _five(candidates: Sequence[Path]) -> tuple[Path, ...] | None:
    """The five photographs in order, if all are there."""
    found = {path.stem: path for path in candidates if path.suffix.lower() in _SUFFIXES and path.is_file()}
    return tuple(found[name] for name in _NAMES) if all(name in found for name in _NAMES) else None


@cache
def photographs(source: FrostSource, variant: str) -> Photographs:
    """The frost of a source; for 32-pixel images at a fifth of its size."""
    images = [_read(file) for file in source.files] or _drawn()
    if variant == "cifar":
        # Bilinear resizing by exactly 1/5 samples at the centre of each 5 x 5 block: it picks that pixel.
        images = [image[2::5, 2::5] for image in images]
    sizes = [image.shape[0] * image.shape[1] for image in images]
    return Photographs(
        pixels=torch.from_numpy(np.concatenate([image.reshape(-1, 3) for image in images]).T.copy()),
        offsets=torch.tensor([sum(sizes[:number]) for number in range(len(sizes))]),
        heights=torch.tensor([image.shape[0] for image in images]),
        widths=torch.tensor([image.shape[1] for image in images]),
    )


def _read(file: Path) -> np.ndarray:
    """RGB; a transparency channel is dropped, as in the original."""
    try:
        with Image.open(file) as image:
            return np.asarray(image.convert("RGB"))
    except OSError:
        raise HardsphereError(f"The frost photograph '{file}' cannot be read as an image.") from None


def _drawn() -> list[np.ndarray]:
    """Five textures with bright ridges on a cold ground: rough like frost, but no photographs of it."""
    noise = Noise(0, torch.arange(len(_NAMES)))
    layers = [
        (1 - (2 * plasma(noise.fold("frost", layer), 512, decay).double() - 1).abs()) ** sharp
        for layer, (decay, sharp) in enumerate([(1.6, 8), (1.3, 10), (1.1, 12)])
    ]
    ridges = torch.stack(layers).sum(0)
    strength = (ridges / ridges.mean(dim=(1, 2), keepdim=True) / 2.5).clamp(max=1)
    cold = torch.tensor([40.0, 75.0, 95.0], dtype=torch.float64)
    pixels = cold + strength[..., None] * (250 - cold)
    return list(pixels.to(torch.uint8).numpy())
