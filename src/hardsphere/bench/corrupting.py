"""How fast the corruptions are: each of them, and a whole corrupted set (15 corruptions at 5 severities)."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hardsphere.bench.clock import forget_memory, peak_memory, seconds
from hardsphere.corruptions import CORRUPTIONS, SEVERITIES, corrupt, frost_source
from hardsphere.errors import HardsphereError
from hardsphere.runtime import environment, hardware

TYPICAL = 3
_LOOP_IMAGES = 10


@dataclass(frozen=True)
class CorruptionSpeed:
    """One corruption.

    Attributes:
        images_per_second: over all severities.
        typical_images_per_second: at severity 3.
        over_loop: how many times faster per image than a loop over the reference package, both with the constants for
            ImageNet and at severity 3; none where that package is not installed.
    """

    name: str
    seconds: float
    images_per_second: float
    typical_images_per_second: float
    over_loop: float | None


@dataclass(frozen=True)
class CorruptionBench:
    """What one benchmark measured.

    Attributes:
        seconds: of all corruptions at all severities, each on all images.
        first_use_seconds: what came before that, once: tables, kernels, photographs.
    """

    images: int
    side: int
    sets: int
    seconds: float
    first_use_seconds: float
    images_per_second: float
    corruptions: tuple[CorruptionSpeed, ...]
    frost: str
    peak_memory_gib: float | None
    device: str
    environment: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def bench_corruptions(
    images: int = 10_000, *, names: Sequence[str] = CORRUPTIONS, loop: bool = True, device: torch.device
) -> CorruptionBench:
    """Corrupt random 32-pixel images, which lie on the device already.

    Args:
        loop: also time the reference package image by image, if it is installed.
    """
    if images < 1:
        raise HardsphereError(f"There are {images} images to corrupt, but at least one is needed.")
    pixels = _pictures(images).to(device)
    frost = frost_source()
    first_use = seconds(
        lambda: [corrupt(pixels[:2], n, s, seed=0, frost=frost) for n in names for s in SEVERITIES], device
    )
    forget_memory(device)
    speeds, total = [], 0.0
    reference = _reference() if loop else None
    for name in names:
        times = {
            severity: seconds(lambda s=severity, n=name: corrupt(pixels, n, s, seed=0, frost=frost), device)  # type: ignore[misc]
            for severity in SEVERITIES
        }
        spent = sum(times.values())
        total += spent
        speeds.append(
            CorruptionSpeed(
                name=name,
                seconds=spent,
                images_per_second=len(SEVERITIES) * images / spent,
                typical_images_per_second=images / times[TYPICAL],
                over_loop=None if reference is None else _over_loop(reference, pixels, name, device),
            )
        )
    return CorruptionBench(
        images=images,
        side=pixels.shape[-1],
        sets=len(names) * len(SEVERITIES),
        seconds=total,
        first_use_seconds=first_use,
        images_per_second=len(names) * len(SEVERITIES) * images / total,
        corruptions=tuple(speeds),
        frost=frost.origin,
        peak_memory_gib=peak_memory(device),
        device=hardware(device),
        environment=environment(device),
    )


def as_text(bench: CorruptionBench) -> str:
    """Each corruption's speed, and the time of the whole set."""
    looped = any(one.over_loop is not None for one in bench.corruptions)
    lines = [f"{'images per second':20}{'severity 3':>12}{'all five':>12}" + (f"{'over a loop':>14}" if looped else "")]
    for one in bench.corruptions:
        beside = "" if one.over_loop is None else f"{one.over_loop:13.1f}x"
        lines.append(f"{one.name:20}{one.typical_images_per_second:12,.0f}{one.images_per_second:12,.0f}{beside}")
    lines.append(f"{bench.sets} x {bench.images:,} images in {bench.seconds:.2f} s on {bench.device}")
    return "\n".join(lines)


def _pictures(count: int, side: int = 32) -> Tensor:
    """Random images; what a corruption costs hardly depends on what they show."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (count, 3, side, side), dtype=torch.uint8, generator=generator)


def _over_loop(reference: Any, pixels: Tensor, name: str, device: torch.device) -> float:
    """The reference's time per image over ours."""
    frost = frost_source()
    ours = seconds(lambda: corrupt(pixels, name, TYPICAL, seed=0, variant="imagenet", frost=frost), device) / len(
        pixels
    )
    singles = [image.numpy() for image in pixels[:_LOOP_IMAGES].cpu().permute(0, 2, 3, 1).contiguous()]

    def work(some: Sequence[Any]) -> None:
        for image in some:
            reference.corrupt(image, corruption_name=name, severity=TYPICAL)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other people's code
        work(singles[:1])
        theirs = seconds(lambda: work(singles), torch.device("cpu")) / len(singles)
    return theirs / ours


def _reference() -> Any | None:
    """The package `imagecorruptions`, which corrupts one image at a time, if it can be imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module("imagecorruptions")
        except Exception:  # its import fails in many ways: an old setuptools is missing, numba does not fit
            return None
