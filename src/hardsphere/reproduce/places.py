"""Where the data of a plan or a table lies; it is loaded once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hardsphere.config import Config
from hardsphere.data import DataSet, Images, load
from hardsphere.errors import HardsphereError
from hardsphere.files import appearing
from hardsphere.reproduce.scales import Scale
from hardsphere.reproduce.tables import Item

Places = Path | str | Mapping[str, Path | str] | None
"""A directory, or a directory for each data set by name."""

Asked = TypeVar("Asked", bound=Item)


def place_of(data_dir: Places, dataset: str) -> Path | None:
    """Where a data set lies."""
    place = data_dir.get(dataset) if isinstance(data_dir, Mapping) else data_dir
    return None if place is None or dataset == "digits" else Path(place)


class Shelf:
    """The data sets of a plan."""

    def __init__(self, data_dir: Places) -> None:
        self.data_dir = data_dir
        self._loaded: dict[tuple[str, int | None], DataSet] = {}

    def place(self, config: Config) -> Path | None:
        """Where the data of a run lies."""
        return place_of(self.data_dir, config.dataset)

    def data(self, config: Config) -> DataSet:
        """The data of a run, at its size."""
        name, size = config.dataset, config.data.size
        if (name, size) not in self._loaded:
            self._loaded[name, size] = load(name, self.place(config), size=size)
        return self._loaded[name, size]


def with_data(
    items: Sequence[Asked], scale: Scale, data_dir: Places, work: Path
) -> tuple[list[Asked], dict[str, Path], list[str]]:
    """The tables and analyses whose data is there, where it lies, and a sentence for each that is left out."""
    needed = dict.fromkeys(item.data_at(scale) for item in items)
    places: dict[str, Path] = {}
    for name in needed:
        # One directory, without a name, is CIFAR-10's unless only an image folder is asked for.
        meant = isinstance(data_dir, Mapping) or name != "folder" or len(needed) == 1
        place = place_of(data_dir, name) if meant else None
        if name == "arrays":
            place = colour_digits(work / "digits-32.npz")
        if place is not None:
            places[name] = place
    ready = [item for item in items if item.data_at(scale) in (*places, "digits")]
    if not ready:
        (name, *_) = needed
        raise HardsphereError(f"The scale '{scale.name}' needs the data '{name}': say where it lies with --data.")
    left_out = [f"{one.name} is left out: it needs the data '{one.data}'." for one in items if one not in ready]
    return ready, places, left_out


def colour_digits(file: Path) -> Path:
    """The digits as colour images of 32 x 32 pixels: corruptions are defined on nothing smaller or grey."""
    import numpy as np

    if file.exists():
        return file
    digits = load("digits", validation=0)
    assert isinstance(digits.train, Images)
    assert isinstance(digits.test, Images)
    arrays: dict[str, Any] = {}
    for split, images in (("train", digits.train), ("test", digits.test)):
        large = images.pixels.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
        arrays[f"x_{split}"], arrays[f"y_{split}"] = large.expand(-1, 3, -1, -1).numpy(), images.labels.numpy()
    with appearing(file) as partial, partial.open("wb") as stream:
        np.savez_compressed(stream, **arrays)
    return file
