"""Any folder of images, one subfolder per class, whose name is the class's name.

Layouts: ``DIR/train/<class>/...`` with ``DIR/test`` or ``DIR/val`` beside it; or ``DIR/<class>/...`` alone, of which a
fifth is cut off as the test split, the same every time. Where both a test folder and a validation folder exist, the
latter is the validation split. Splits may also be called training, testing, valid or validation, in small letters or
large. Only an index is kept in memory; the header of every image is checked when it is made.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from hardsphere.data.decode import verify
from hardsphere.data.sources import ImageFiles
from hardsphere.data.split import hold_out
from hardsphere.errors import HardsphereError
from hardsphere.noise import Noise

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
IMAGENET_MOMENTS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

# Cut off as the test split where the folder has none of its own; fixed, whatever the seed of a run.
_TEST_SHARE = 0.2

_TRAIN, _TEST, _VALIDATION = ("train", "training"), ("test", "testing"), ("val", "valid", "validation")


class FolderSplits(NamedTuple):
    """The splits of a folder; validation is None unless the folder brings one beside its test split."""

    train: ImageFiles
    validation: ImageFiles | None
    test: ImageFiles
    note: str


def read_folder(directory: Path, size: int = 224) -> FolderSplits:
    """The splits that a folder holds, or that are cut from it."""
    train_folder, test_folder, held_out = _split_folders(directory)
    if train_folder is None:
        if there := test_folder or held_out:
            raise HardsphereError(f"{directory} has {there.name}/ but no train/ beside it to train on.")
        train, test = set_aside(_index(directory, size, None))
        note = f"{directory} has no test split: {len(test)} of {len(train) + len(test)} images were set aside as one."
        return FolderSplits(train, None, test, note)
    train = _index(train_folder, size, None)
    if test_folder is not None:
        validation = _index(held_out, size, train.class_names) if held_out else None
        return FolderSplits(train, validation, _index(test_folder, size, train.class_names), "")
    if held_out is None:
        raise HardsphereError(
            f"{directory} has {train_folder.name}/ but no test/ or val/ with the same classes beside it."
        )
    return FolderSplits(train, None, _index(held_out, size, train.class_names), f"{held_out} is the test split.")


def set_aside(index: ImageFiles) -> tuple[ImageFiles, ImageFiles]:
    """The cut of a folder without splits: (training data, test split)."""
    train, test = hold_out(index, _TEST_SHARE, purpose="test")
    assert test is not None
    return train, test


def read_test_folder(directory: Path, size: int = 224) -> ImageFiles:
    """The test split of a folder, or all of it if it has no splits."""
    train, test, held_out = _split_folders(directory)
    if train is not None:
        return read_folder(directory, size).test
    return _index(test or held_out or directory, size, None)


def _split_folders(directory: Path) -> list[Path | None]:
    """The folders of the training, the test and the validation split, of those that there are.

    A class may have such a name as well: its folder holds images and no folders, or has no train folder beside it but
    folders of other names.
    """
    if not directory.is_dir():
        raise HardsphereError(f"There is no folder {directory}.")
    all_names = _class_folders(directory)
    folders = {name.lower(): directory / name for name in all_names if _class_folders(directory / name)}
    splits = [
        next((folders[name] for name in names if name in folders), None) for names in (_TRAIN, _TEST, _VALIDATION)
    ]
    others = [name for name in all_names if directory / name not in splits]
    return splits if splits[0] is not None or not others else [None, None, None]


def _index(root: Path, size: int, class_names: tuple[str, ...] | None) -> ImageFiles:
    """The images of one split. Ids follow the sorted names; the order is shuffled once, the same way everywhere.

    Sorted names go class by class, and the first n of them would be a sample of one class.
    """
    found = _class_folders(root)
    if class_names is None:
        class_names = found
        if len(class_names) < 2:
            what = f"one class only ('{found[0]}')" if found else "no class folders"
            raise HardsphereError(f"{root} holds {what}: a classifier needs a folder for each of two or more classes.")
    strange = sorted(set(found) - set(class_names))
    if strange:
        raise HardsphereError(f"{root} holds the class '{strange[0]}', which the training folder does not know.")
    paths, labels = [], []
    for label, name in enumerate(class_names):
        files = _image_files(root / name)
        if not files:
            raise HardsphereError(f"The class folder {root / name} holds no images ({', '.join(SUFFIXES)}).")
        paths += [file.relative_to(root).as_posix() for file in files]
        labels += [label] * len(files)
    with ThreadPoolExecutor(max_workers=min(32, os.cpu_count() or 1)) as pool:
        for _ in pool.map(verify, (root / path for path in paths), chunksize=1):
            pass
    index = ImageFiles(root, tuple(paths), torch.tensor(labels), torch.arange(len(paths)), class_names, size)
    return index.subset(Noise(0, index.ids).fold("folder order").keys.argsort(stable=True))


def _class_folders(root: Path) -> tuple[str, ...]:
    if not root.is_dir():
        return ()
    return tuple(sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith(".")))


def _image_files(folder: Path) -> list[Path]:
    """Every image below a folder, by name; hidden files are not images, whatever they are called."""
    files = [
        Path(parent) / name
        for parent, _, names in os.walk(folder, followlinks=True)
        for name in names
        if name.lower().endswith(SUFFIXES) and not name.startswith(".")
    ]
    return sorted(files, key=lambda file: file.relative_to(folder).as_posix())
