"""Adversarial images as files: saved as they are, and put to the test that saving usually fails, 8-bit PNG.

Attacks find perturbations in float32. Rounded to 256 levels, some of them heal. `verify_png` rounds without leaving the
ball, writes PNG files, reads them back and asks the model again, so that what it reports is true of the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from hardsphere.attacks.base import attacking
from hardsphere.errors import HardsphereError
from hardsphere.evaluate import witness
from hardsphere.evaluate.ledger import Ledger
from hardsphere.evaluate.samples import gather
from hardsphere.files import appearing, write_json
from hardsphere.threat import Ball, per_sample

if TYPE_CHECKING:
    from hardsphere.data import Source

_SLACK = 1e-4  # in levels: a pixel that is a level, up to the rounding of float32, is that level
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


@dataclass(frozen=True)
class PngCheck:
    """What became of broken images as PNG files.

    Attributes:
        ball: where they were looked for.
        n: all samples of the evaluation.
        broken: samples broken in float32.
        still_broken: of these, broken as a file too.
        accuracy: robust accuracy if the adversary must hand in PNG files, as a fraction of all n.
        directory: where the files are.
    """

    ball: Ball
    n: int
    broken: int
    still_broken: int
    accuracy: float
    directory: Path

    def __str__(self) -> str:
        healed = self.broken - self.still_broken
        return (
            f"{self.still_broken} of {self.broken} broken images stay broken as 8-bit PNG files, {healed} heal: "
            f"robust accuracy {100 * self.accuracy:.2f} % in {self.ball} (n={self.n})."
        )


def kept_images(ledger: Ledger, eps: float) -> tuple[Tensor, list[int], list[str]]:
    """The broken images that an evaluation kept inside one ball: (float32 images, sample ids, attacks)."""
    shape = ledger.noted("shape")
    kept = ledger.images(eps)
    if shape is None or not ledger.identity.get("images"):
        raise HardsphereError("This evaluation kept no images: run it with save_images=True (--save-images).")
    pixels = [np.frombuffer(blob, np.float32).reshape(shape) for _, _, blob in kept]
    stacked = np.stack(pixels) if pixels else np.zeros((0, *shape), np.float32)
    return torch.from_numpy(stacked.copy()), [sample for sample, _, _ in kept], [attack for _, attack, _ in kept]


def save_images(ledger: Ledger, eps: float, file: Path) -> Path:
    """Write the kept images of one ball as an ``.npz`` of x, y, ids, predicted and attack."""
    x, ids, attacks = kept_images(ledger, eps)
    labels = {sample.sample: sample.label for sample in ledger.samples()}
    predicted = {(row.sample, row.attack): row.predicted for row in ledger.rows(eps)}
    with appearing(file) as partial, partial.open("wb") as stream:
        np.savez_compressed(
            stream,
            x=x.numpy(),
            y=np.array([labels[sample] for sample in ids], np.int64),
            ids=np.array(ids, np.int64),
            predicted=np.array([predicted[key] for key in zip(ids, attacks, strict=True)], np.int64),
            attack=np.array(attacks, np.str_),
        )
    return file


def verify_png(
    model: nn.Module | Callable[[Tensor], Tensor],
    x: Tensor | Source,
    y: Tensor | None,
    ball: Ball,
    ledger: Ledger,
    directory: Path | str,
    *,
    ids: Tensor | None = None,
    limit: int | None = None,
    batch: int = 256,
) -> PngCheck:
    """Round the kept images to 8 bits inside the ball, write them as PNG, read them back and classify them.

    Args:
        x: the clean images, as they were evaluated; ``y``, ``ids`` and ``limit`` likewise.
        ledger: that of an evaluation with ``save_images=True``.
        directory: for the files, one per broken sample, and ``index.json``.
    """
    samples = gather(x, y, ids, None, limit)
    ledger.require_norm(ball.norm)
    images, sample_ids, attacks = kept_images(ledger, ball.eps)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if images.shape[1] not in _MODES:
        raise HardsphereError(f"PNG files have 1, 3 or 4 channels, but the images have {images.shape[1]}.")
    position = {int(sample): index for index, sample in enumerate(samples.ids)}
    device = witness.device_of(model, torch.device("cpu"))
    model = witness.in_float32(model, samples.images([0], device)).model
    index: list[dict[str, Any]] = []
    still = 0
    with attacking(model), witness.plain_float32(device):
        for first in range(0, len(images), batch):
            rows = range(first, min(first + batch, len(images)))
            where = [position[sample_ids[row]] for row in rows]
            clean, labels = samples.images(where, device), samples.labels[where].to(device)
            levels = quantise(clean.cpu(), images[rows.start : rows.stop], ball)
            files = [directory / f"{sample_ids[row]:06d}-{attacks[row]}.png" for row in rows]
            back = torch.stack([_round_trip(file, one) for file, one in zip(files, levels, strict=True)])
            proposed = (back.double() / 255).float().to(device)
            broken, predicted, distance, _ = witness.confirm(model, clean, labels, proposed, ball, outside="filter")
            still += int(broken.sum())
            for file, label, guess, far, hit in _rows(files, labels, predicted, distance, broken):
                index.append({"file": file.name, "label": label, "predicted": guess, "distance": far, "broken": hit})
    n, robust = len(ledger.samples()), len(ledger.robust(ball.eps))
    healed = len(images) - still
    write_json(directory / "index.json", index)
    return PngCheck(ball, n, len(images), still, (robust + healed) / max(n, 1), directory)


def quantise(x: Tensor, x_adv: Tensor, ball: Ball) -> Tensor:
    """The nearest 8-bit image (uint8 levels) that lies in the ball around x, as far as the clean image allows one.

    Under linf each pixel goes to the nearest level inside its own interval. Under l1 and l2 an image whose rounding
    leaves the ball is rounded towards the clean image instead, which only shortens a perturbation of 8-bit pixels.
    """
    exact = x_adv.double() * 255
    levels = exact.round()
    if ball.norm == "linf":
        low, high = (x.double() - ball.eps) * 255 - _SLACK, (x.double() + ball.eps) * 255 + _SLACK
        levels = levels.clamp(low.ceil(), high.floor())
    else:
        too_far = ball.distance(x.double(), levels / 255) > ball.eps
        inwards = torch.where(x_adv > x, (exact + _SLACK).floor(), (exact - _SLACK).ceil())
        levels = torch.where(per_sample(too_far, x), inwards, levels)
    return levels.clamp(0, 255).to(torch.uint8)


def _round_trip(file: Path, levels: Tensor) -> Tensor:
    """Write one image of uint8 levels (C, H, W) and read it back."""
    from PIL import Image

    channels = levels.shape[0]
    array = levels.permute(1, 2, 0).contiguous().numpy()
    Image.fromarray(array[..., 0] if channels == 1 else array).save(file)
    with Image.open(file) as picture:
        back = np.array(picture.convert(_MODES[channels]))
    return torch.from_numpy(back.reshape(*array.shape)).permute(2, 0, 1)


def _rows(files: list[Path], *columns: Tensor) -> Iterable[tuple[Any, ...]]:
    return zip(files, *(column.tolist() for column in columns), strict=True)
