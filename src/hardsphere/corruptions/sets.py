"""Whole sets of corrupted images, in the layouts of CIFAR-10-C and ImageNet-C, so that any existing loader reads them.

A CIFAR set is one array per corruption, ``<name>.npy``, of the five severities one after another, and ``labels.npy``. A
folder set is ``<corruption>/<severity>/<class>/<image>.JPEG`` at quality 85. Beside either lies ``manifest.json``: how
the set was made; official sets have none. Files appear under their name only when they are complete, so a stopped run
is taken up by running it again.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import hardsphere
from hardsphere.corruptions.apply import corrupt
from hardsphere.corruptions.constants import ALL, CORRUPTIONS, SEVERITIES, check_names
from hardsphere.corruptions.frost import FrostSource, frost_source
from hardsphere.data.decode import read_rgb
from hardsphere.errors import HardsphereError, nearest
from hardsphere.files import appearing, leftovers, write_json

Progress = Callable[[str, int, int], None]
"""Told the corruption, the severity and the number of images done for it."""

MANIFEST = "manifest.json"
JPEG_QUALITY = 85
_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff")


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def write_cifar(
    images: Tensor,
    labels: Tensor | np.ndarray | Sequence[int],
    out_dir: str | Path,
    *,
    seed: int,
    names: Sequence[str] = CORRUPTIONS,
    variant: str = "cifar",
    frost: FrostSource | str | Path | None = None,
    device: str | torch.device = "cpu",
    batch_size: int = 2000,
    progress: Progress | None = None,
) -> Path:
    """Write a set in the layout of CIFAR-10-C; files that are there already are kept.

    Args:
        images: 8-bit images in the order of their data set, uint8 of shape (N, 3, H, W).
        labels: N class numbers.
        out_dir: where the set goes; made if need be.
        seed: the seed of the whole set.
        names: which corruptions.
        variant: whose constants, see `corrupt`.
        frost: where frost comes from, see `frost_source`; what was used is in the manifest.
        device: where the work is done. The outcome does not depend on the batch size.
        progress: called after each batch.

    Returns:
        The path of the manifest.
    """
    check_names(list(names))
    out = Path(out_dir)
    targets = np.asarray(labels, dtype=np.int64)
    if targets.shape != (len(images),):
        raise HardsphereError(f"There are {len(images)} images but labels of shape {targets.shape}: give one to each.")
    source = frost_source(frost)
    content = hashlib.sha256(images.cpu().contiguous().numpy().tobytes() + targets.tobytes()).hexdigest()
    made = _manifest("cifar", seed, variant, source, len(images), content)
    manifest = _begin(out, made, [f"{name}.npy" for name in ALL])
    _write_array(out / "labels.npy", np.tile(targets, len(SEVERITIES)))
    for name in names:
        target = out / f"{name}.npy"
        shape = (len(SEVERITIES) * len(images), *images.shape[2:], 3)
        if target.exists():
            _open_array(target, shape)  # says what is wrong, if something is
            continue
        with appearing(target) as partial:
            block = np.lib.format.open_memmap(partial, mode="w+", dtype=np.uint8, shape=shape)
            for severity in SEVERITIES:
                base = (severity - 1) * len(images)
                for start in range(0, len(images), batch_size):
                    end = min(start + batch_size, len(images))
                    ids = torch.arange(start, end)
                    part = images[start:end].to(device)
                    done = corrupt(part, name, severity, seed=seed, variant=variant, ids=ids, frost=source)
                    block[base + start : base + end] = done.permute(0, 2, 3, 1).cpu().numpy()
                    if progress is not None:
                        progress(name, severity, end)
            block.flush()
            del block
    return manifest


def write_folder(
    src_folder: str | Path,
    out_dir: str | Path,
    *,
    seed: int,
    names: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = SEVERITIES,
    frost: FrostSource | str | Path | None = None,
    device: str | torch.device = "cpu",
    batch_size: int = 32,
    resize: int = 256,
    crop: int = 224,
    progress: Progress | None = None,
) -> Path:
    """Write a set in the layout of ImageNet-C from a folder of classes; images that are there already are kept.

    Args:
        src_folder: ``<class>/<image>`` as for any image-folder data set.
        out_dir: where the set goes; made if need be.
        seed: the seed of the whole set.
        names: which corruptions.
        severities: which severities.
        frost: where frost comes from, see `frost_source`; what was used is in the manifest.
        device: where the work is done.
        resize: the length to which the short side of each image is brought.
        crop: the side of the square then cut from its middle. The constants are those made for 224.
        progress: called after each batch.

    Returns:
        The path of the manifest.
    """
    check_names(list(names))
    out, files = Path(out_dir), folder_images(src_folder)
    if resize < crop:
        raise HardsphereError(f"A square of {crop} pixels cannot be cut from images whose short side is {resize}.")
    source = frost_source(frost)
    listed = "\n".join(f"{file.parent.name}/{file.name} {file.stat().st_size}" for file in files)
    content = hashlib.sha256(listed.encode()).hexdigest()
    made = _manifest("imagenet", seed, "imagenet", source, len(files), content) | {"resize": resize, "crop": crop}
    manifest = _begin(out, made, list(ALL))
    for start in range(0, len(files), batch_size):
        batch = files[start : start + batch_size]
        images: Tensor | None = None
        for name in names:
            for severity in severities:
                targets = [out / name / str(severity) / file.parent.name / f"{file.stem}.JPEG" for file in batch]
                todo = [number for number, target in enumerate(targets) if not _is_there(target)]
                if todo:
                    if images is None:
                        images = torch.stack([_read_square(file, resize, crop) for file in batch]).to(device)
                    ids = torch.tensor(todo) + start
                    done = corrupt(
                        images[todo], name, severity, seed=seed, variant="imagenet", ids=ids, frost=source
                    ).permute(0, 2, 3, 1)
                    for number, image in zip(todo, done.cpu().numpy(), strict=True):
                        _write_jpeg(targets[number], image)
                if progress is not None:
                    progress(name, severity, start + len(batch))
    return manifest


def folder_images(folder: str | Path) -> list[Path]:
    """The images of ``<class>/<image>``, sorted by class and name; their position is their id."""
    root = Path(folder)
    if not root.is_dir():
        raise HardsphereError(f"'{root}' is no directory; it should hold one directory of images for each class.")
    classes = sorted(path for path in root.iterdir() if path.is_dir())
    files = [file for path in classes for file in sorted(path.iterdir()) if file.suffix.lower() in _SUFFIXES]
    if not files:
        raise HardsphereError(f"'{root}' holds no images in class directories, such as '{root.name}/cat/1.jpg'.")
    (group, stem), times = Counter((file.parent.name, file.stem) for file in files).most_common(1)[0]
    if times > 1:
        raise HardsphereError(
            f"Two images of class '{group}' are named '{stem}'; rename one, as both become '{stem}.JPEG'."
        )
    return files


def _read_square(file: Path, resize: int, crop: int) -> Tensor:
    """The middle of an image: short side to ``resize`` pixels, then a square of ``crop``, 8-bit (3, crop, crop)."""
    image = read_rgb(file)
    short, width, height = min(image.size), *image.size
    size = (resize * width // short, resize * height // short)
    image = image.resize(size, Image.Resampling.BILINEAR)
    left, top = (round((length - crop) / 2) for length in size)
    pixels = np.asarray(image.crop((left, top, left + crop, top + crop)))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


def _manifest(layout: str, seed: int, variant: str, source: FrostSource, count: int, content: str) -> dict[str, Any]:
    return {
        "made_by": f"hardsphere {hardsphere.__version__}",
        "layout": layout,
        "seed": seed,
        "variant": variant,
        "images": count,
        "source_sha256": content,
        "frost": source.origin,
        "frost_stand_in": source.stand_in,
    }


def _begin(out: Path, made: dict[str, Any], entries: Sequence[str]) -> Path:
    """Make the directory and its manifest, or make sure that what lies there was made in the same way."""
    path = out / MANIFEST
    if path.exists():
        there = _read_manifest(path)
        for key, value in made.items():
            if key != "made_by" and there.get(key) != value:
                raise HardsphereError(
                    f"'{out}' holds a set made with {key} {there.get(key)!r}, not {value!r}: choose another directory."
                )
        for leftover in leftovers(out):  # as large as what would have become of it
            leftover.unlink(missing_ok=True)
        return path
    if any((out / entry).exists() for entry in entries):
        raise HardsphereError(f"'{out}' holds corrupted images without a manifest: choose another directory.")
    out.mkdir(parents=True, exist_ok=True)
    write_json(path, made)
    return path


def _write_array(target: Path, values: np.ndarray) -> None:
    if not target.exists():
        with appearing(target) as partial, partial.open("wb") as file:
            np.save(file, values)


def _is_there(target: Path) -> bool:
    return target.exists() and target.stat().st_size > 0


def _write_jpeg(target: Path, image: np.ndarray) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with appearing(target, sync=False) as partial:
        Image.fromarray(image).save(partial, "JPEG", quality=JPEG_QUALITY, optimize=True)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


@dataclass(frozen=True)
class CorruptionSet:
    """A set in the layout of CIFAR-10-C, read from the disk as it is needed.

    Args:
        directory: where it lies.
        names: the corruptions that are there, in the official order.
        count: the number of images at one severity.
        manifest: how it was made; empty for an official set.
    """

    directory: Path
    names: tuple[str, ...]
    count: int
    manifest: dict[str, Any] = field(default_factory=dict)
    _labels: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64), repr=False, compare=False)

    @property
    def frost_stand_in(self) -> bool:
        """Whether its frost is the drawn stand-in, so that no mean over all 15 may be given."""
        return "frost" in self.names and bool(self.manifest.get("frost_stand_in", False))

    @property
    def official(self) -> bool:
        """Whether the set has no manifest of ours, and so is taken for a published one."""
        return not self.manifest

    def images(self, name: str, severity: int, start: int = 0, end: int | None = None) -> Tensor:
        """Images from ``start`` to ``end`` of one corruption and severity, uint8 of shape (n, 3, H, W)."""
        if name not in self.names:
            raise HardsphereError(
                f"'{self.directory}' has no '{name}'; it has {', '.join(self.names)}.{nearest(name, self.names)}"
            )
        block = self._block(severity)
        rows = _open_array(self.directory / f"{name}.npy")[block][slice(start, end)]
        return torch.from_numpy(np.array(rows)).permute(0, 3, 1, 2)

    def labels(self, severity: int = 1) -> Tensor:
        """The classes at one severity, int64 of shape (n,)."""
        return torch.from_numpy(self._labels[self._block(severity)].copy())

    def _block(self, severity: int) -> slice:
        if severity not in SEVERITIES:
            raise HardsphereError(f"The severity is {severity}, but it must be 1, 2, 3, 4 or 5.")
        return slice((severity - 1) * self.count, severity * self.count)


def read_cifar(directory: str | Path, names: Sequence[str] | None = None) -> CorruptionSet:
    """Open an official or a generated set in the layout of CIFAR-10-C.

    Args:
        directory: where ``labels.npy`` and the arrays of the corruptions lie.
        names: which corruptions must be there; by default those that are.
    """
    root = Path(directory)
    if not root.is_dir():
        raise HardsphereError(f"'{root}' is no directory; it should hold labels.npy and the arrays of CIFAR-10-C.")
    labels_file = root / "labels.npy"
    if not labels_file.exists():
        raise HardsphereError(f"'{root}' has no labels.npy, so it is no set in the layout of CIFAR-10-C.")
    labels = np.asarray(_open_array(labels_file))
    if labels.ndim != 1 or len(labels) % len(SEVERITIES) or not len(labels) or labels.dtype.kind not in "iu":
        raise HardsphereError(
            f"'{labels_file}' holds {labels.dtype} of shape {labels.shape}, not five equal blocks of class numbers."
        )
    if names is not None:
        check_names(list(names))
    found = tuple(name for name in (ALL if names is None else names) if (root / f"{name}.npy").exists())
    missing = [name for name in names or () if name not in found]
    if missing:
        raise HardsphereError(f"'{root}' lacks {', '.join(f'{name}.npy' for name in missing)}.")
    if not found:
        raise HardsphereError(f"'{root}' holds no array of a corruption, such as gaussian_noise.npy.")
    for name in found:
        array = _open_array(root / f"{name}.npy")
        if array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] != 3 or len(array) != len(labels):
            raise HardsphereError(
                f"'{root / name}.npy' holds {array.dtype} of shape {array.shape}, not {len(labels)} 8-bit RGB images."
            )
    manifest = _read_manifest(root / MANIFEST) if (root / MANIFEST).exists() else {}
    return CorruptionSet(root, found, len(labels) // len(SEVERITIES), manifest, labels.astype(np.int64))


def _open_array(path: Path, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """An array file, mapped and not read; never unpickled."""
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError):
        raise HardsphereError(
            f"'{path}' is truncated or no array file: delete it and make or fetch it again."
        ) from None
    if shape is not None and array.shape != shape:
        raise HardsphereError(f"'{path}' has shape {array.shape}, not {shape}: delete it or choose another directory.")
    return array


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text())
    except (ValueError, OSError):
        manifest = None
    if not isinstance(manifest, dict):
        raise HardsphereError(
            f"'{path}' is no manifest of a set of corruptions: delete it or choose another directory."
        )
    return manifest
