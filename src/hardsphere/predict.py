"""Classify image files with a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hardsphere.callable import make_callable
from hardsphere.data import to_float
from hardsphere.data.decode import centre, read_rgb
from hardsphere.errors import HardsphereError
from hardsphere.runtime import pick_device
from hardsphere.train import Deployed, load

# As many as fit beside a large network; a folder of photographs at once would not.
_BATCH = 64


def predict(
    run: str | Path, files: str | Path | Sequence[str | Path], *, top: int = 3, device: str | None = None
) -> list[list[tuple[str, float]]]:
    """For each file the ``top`` most probable classes with their probabilities, at the model's own temperature."""
    chosen = pick_device(device)
    deployed = load(run)
    model = deployed.model.to(chosen)
    paths = [Path(file) for file in ([files] if isinstance(files, str | Path) else files)]
    found: list[list[tuple[str, float]]] = []
    for start in range(0, len(paths), _BATCH):
        images = torch.stack([_as_evaluated(file, deployed) for file in paths[start : start + _BATCH]]).to(chosen)
        with torch.no_grad():
            probabilities = model(images).softmax(dim=1).cpu()
        values, classes = probabilities.topk(min(top, probabilities.shape[1]), dim=1)
        found += [
            [(deployed.class_names[index], value) for index, value in zip(row_classes, row_values, strict=True)]
            for row_classes, row_values in zip(classes.tolist(), values.tolist(), strict=True)
        ]
    return found


def _as_evaluated(file: Path, deployed: Deployed) -> Tensor:
    """An image file as training and evaluation cut it out."""
    if deployed.data_name == "folder":
        return to_float(centre(_existing(file), deployed.shape[1]))
    return read_image(file, deployed.shape)


def read_image(file: Path, shape: tuple[int, int, int]) -> Tensor:
    """An image file as a model takes it: float in [0, 1], its short side scaled to the model's size, centre cut out."""
    from PIL import Image, ImageOps

    channels, height, width = shape
    image = read_rgb(_existing(file))
    if channels == 1:
        image = image.convert("L")
    if image.size != (width, height):
        image = ImageOps.fit(image, (width, height), method=Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(image, dtype=np.uint8)).view(height, width, channels)
    return to_float(pixels.permute(2, 0, 1))


def _existing(file: Path) -> Path:
    if file.is_dir():
        raise HardsphereError(f"'{file}' is a folder: name the image files in it, such as {file / '*'}.")
    if not file.is_file():
        raise HardsphereError(f"There is no file '{file}'.")
    return file


make_callable(__name__)  # `hardsphere.predict(...)`
