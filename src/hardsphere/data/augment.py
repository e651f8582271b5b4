"""Random crop, flip, cutout and CutMix for a whole batch at once, on whatever device the batch is.

There is no loop over samples and no number comes back to the host: each transformation is integer arithmetic on
indices, followed by one gather. Integers are exact, so a batch is the same on every device, and the numbers of a sample
come from its own stream of `Noise`, so they do not depend on the batch it shares.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hardsphere.data.sources import to_float
from hardsphere.errors import HardsphereError, nearest
from hardsphere.noise import Noise

PADDINGS = ("zero", "reflect")

# CutMix draws its box sides from this many equally likely quantiles, in fixed point with this many bits.
_QUANTILES = 4096
_FIXED_POINT_BITS = 16


@dataclass(frozen=True)
class Augment:
    """What happens to a training image, in this order.

    Args:
        pad: pad by this much on each side, then crop back to the old size at random; 0 is off.
        padding: ``"zero"`` (the paper's) or ``"reflect"``.
        flip: mirror left and right with chance 1/2.
        cutout: side of a square set to 0, its centre anywhere in the image (DeVries and Taylor, 2017); 0 is off.
        cutmix: alpha of CutMix's Beta(alpha, alpha) (Yun et al., 2019); 0 is off.
    """

    pad: int = 0
    padding: str = "zero"
    flip: bool = False
    cutout: int = 0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        if self.padding not in PADDINGS:
            raise HardsphereError(
                f"Unknown padding '{self.padding}': use one of {', '.join(PADDINGS)}.{nearest(self.padding, PADDINGS)}"
            )
        if self.pad < 0 or self.cutout < 0:
            raise HardsphereError(f"pad is {self.pad} and cutout is {self.cutout}, but neither may be below 0.")
        if not 0 <= self.cutmix < float("inf"):
            raise HardsphereError(f"cutmix is {self.cutmix}, but it must be a finite number above 0, or 0 for off.")

    def check(self, height: int, width: int) -> None:
        """Refuse what images of this size cannot take."""
        if self.padding == "reflect" and self.pad >= min(height, width):
            raise HardsphereError(f"pad is {self.pad}: too much to reflect images of {height}x{width}.")


def augment(pixels: Tensor, noise: Noise, spec: Augment) -> Tensor:
    """Crop, flip and cut out, as ``spec`` says; the dtype stays (CutMix needs labels: see `cutmix`).

    Args:
        pixels: (B, C, H, W) of any dtype.
        noise: one stream per image, on the same device.
        spec: what to do.
    """
    _, _, height, width = pixels.shape
    rows = torch.arange(height, device=pixels.device).expand(len(pixels), height)
    cols = torch.arange(width, device=pixels.device).expand(len(pixels), width)
    if spec.flip:
        mirrored = noise.fold("flip").integers(0, 2, 1) == 1
        cols = torch.where(mirrored, width - 1 - cols, cols)
    if spec.pad:
        corner = noise.fold("crop").integers(-spec.pad, spec.pad + 1, 2)
        rows, cols = rows + corner[:, :1], cols + corner[:, 1:]
    if spec.flip or spec.pad:
        pixels = _gather(pixels, rows, cols, spec.padding)
    if spec.cutout:
        side = torch.full((len(pixels), 1), spec.cutout, device=pixels.device)
        hole = _boxes(noise.fold("cutout"), side, side, height, width)
        pixels = pixels.masked_fill(hole, 0)
    return pixels


def cutmix(pixels: Tensor, labels: Tensor, noise: Noise, sides: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Paste a box of the previous image of the batch into each image, and mix the labels by exact area.

    The order of the batch is random already, so the neighbour is a random partner. Box and area of a sample come from
    its own stream; its partner is the one thing about a sample that depends on the batch.

    Args:
        pixels: (B, C, H, W) of any dtype.
        labels: int64 of shape (B,).
        noise: one stream per image, on the same device.
        sides: `box_sides` of alpha, on the same device.
        classes: the number of classes.

    Returns:
        The mixed images, and float32 class probabilities of shape (B, classes).
    """
    _, _, height, width = pixels.shape
    side = sides[noise.fold("cutmix side").integers(0, len(sides), 1)]
    half = 1 << (_FIXED_POINT_BITS - 1)
    tall = (side * height + half) >> _FIXED_POINT_BITS
    wide = (side * width + half) >> _FIXED_POINT_BITS
    box = _boxes(noise.fold("cutmix"), tall, wide, height, width)
    mixed = torch.where(box, pixels.roll(1, 0), pixels)
    share = (box.flatten(1).sum(1, keepdim=True).double() * (1 / (height * width))).float()
    own = (labels[:, None] == torch.arange(classes, device=labels.device)).float()
    return mixed, own * (1 - share) + own.roll(1, 0) * share


def box_sides(alpha: float, device: torch.device | str = "cpu") -> Tensor:
    """The relative box side sqrt(1 - lambda), lambda ~ Beta(alpha, alpha), at equally likely quantiles, in fixed point.

    In z = log(lambda / (1 - lambda)) the density is (lambda (1 - lambda))^alpha: smooth for every alpha, easy to sum.
    """
    z = torch.linspace(-1, 1, 200_001, dtype=torch.float64) * (40 / min(alpha, 1.0))
    log_density = alpha * (F.logsigmoid(z) + F.logsigmoid(-z))
    cumulative = (log_density - log_density.max()).exp().cumsum(0)
    levels = (torch.arange(_QUANTILES, dtype=torch.float64) + 0.5) / _QUANTILES * cumulative[-1]
    remaining = torch.sigmoid(-z[torch.searchsorted(cumulative, levels)])  # 1 - lambda
    return (remaining.sqrt() * (1 << _FIXED_POINT_BITS)).round().long().to(device)


def training_batch(
    pixels: Tensor, labels: Tensor, noise: Noise, spec: Augment, sides: Tensor | None, classes: int
) -> tuple[Tensor, Tensor]:
    """The whole way from raw pixels and labels to a training batch (x, y)."""
    pixels = augment(pixels, noise, spec)
    if sides is not None:
        pixels, labels = cutmix(pixels, labels, noise, sides, classes)
    return to_float(pixels), labels


def _gather(pixels: Tensor, rows: Tensor, cols: Tensor, padding: str) -> Tensor:
    """out[b, c, i, j] = pixels[b, c, rows[b, i], cols[b, j]], where indices may lie outside the image."""
    batch, channels, height, width = pixels.shape
    if padding == "reflect":
        rows, cols = _reflect(rows, height), _reflect(cols, width)
        inside = None
    else:
        inside = _inside(rows, height)[:, None, :, None] & _inside(cols, width)[:, None, None, :]
        rows, cols = rows.clamp(0, height - 1), cols.clamp(0, width - 1)
    source = (rows[:, :, None] * width + cols[:, None, :]).flatten(1)[:, None, :].expand(batch, channels, -1)
    picked = pixels.flatten(2).gather(2, source).view_as(pixels)
    return picked if inside is None else picked.masked_fill(~inside, 0)


def _reflect(index: Tensor, length: int) -> Tensor:
    """Mirror about the first and the last pixel, which are not repeated."""
    return (length - 1) - ((length - 1) - index.abs()).abs()


def _inside(index: Tensor, length: int) -> Tensor:
    return (index >= 0) & (index < length)


def _boxes(noise: Noise, tall: Tensor, wide: Tensor, height: int, width: int) -> Tensor:
    """A mask (B, 1, H, W) of one box per image, its centre anywhere in the image, cut off at the border."""
    rows = _interval(noise.fold("row").integers(0, height, 1), tall, height)
    cols = _interval(noise.fold("column").integers(0, width, 1), wide, width)
    return rows[:, None, :, None] & cols[:, None, None, :]


def _interval(centre: Tensor, side: Tensor, length: int) -> Tensor:
    index = torch.arange(length, device=centre.device)
    first = centre - side // 2
    return (index >= first) & (index < first + side)
