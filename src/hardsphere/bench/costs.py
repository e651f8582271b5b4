"""What a training step costs by the number of attack steps, by the batch and by the width of the network.

Each point is the real thing: compiled and recorded as in training, which takes up to a minute on a GPU. So a point is
written down as soon as it is measured, the sweep stops inside its budget, and the same call goes on.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hardsphere.bench.clock import forget_memory, gemm_rate, seconds
from hardsphere.bench.subject import TrainingRun, flops_per_image, random_images
from hardsphere.errors import HardsphereError, nearest
from hardsphere.recipes import recipe
from hardsphere.runtime import environment

RECIPE = "cifar10/pgd-he"
POINTS_FILE = "points.jsonl"

# What all times behind one law have in common.
_SAME = {"device": "device", "torch": "torch", "source": "source of hardsphere"}

_ROUNDS = 5
_FEWEST_STEPS, _MOST_STEPS = 2, 50


@dataclass(frozen=True)
class Setting:
    """What is trained at one point."""

    model: str
    batch: int
    attack_steps: int

    def __str__(self) -> str:
        return f"{self.model}, batch {self.batch}, K = {self.attack_steps}"


@dataclass(frozen=True)
class Axis:
    """One quantity that varies, and the settings by its value.

    Attributes:
        title: for people.
        fixed: what stays the same, in words.
        powers: the powers of the value whose sum is the law.
    """

    title: str
    fixed: str
    settings: Mapping[int, Setting]
    powers: tuple[int, ...] = (0, 1)


AXES: dict[str, Axis] = {
    "k": Axis(
        "attack steps K",
        "PreActResNet-18, batch 128",
        {k: Setting("preactresnet18", 128, k) for k in (1, 2, 3, 5, 7, 10, 15, 20)},
    ),
    "batch": Axis(
        "batch",
        "PreActResNet-18, K = 10",
        {batch: Setting("preactresnet18", batch, 10) for batch in (64, 128, 256, 512, 1024)},
    ),
    "width": Axis(
        "width of WRN-34",
        "batch 128, K = 10",
        {width: Setting(f"wrn-34-{width}", 128, 10) for width in (1, 2, 5, 10, 20)},
        powers=(0, 1, 2),
    ),
}


@dataclass(frozen=True)
class Point:
    """One measured setting; ``step_seconds`` is the median of the rounds."""

    setting: Setting
    step_seconds: float
    rounds_step_seconds: tuple[float, ...]
    images_per_second: float
    tflops: float
    gemm_share: float
    first_steps_seconds: float
    environment: dict[str, Any]


@dataclass(frozen=True)
class Swept:
    """What is known so far, by axis and value, and what the budget left out."""

    points: dict[str, dict[int, Point]]
    missing: tuple[str, ...]


def sweep_costs(
    out: Path,
    *,
    axes: Mapping[str, Axis] = AXES,
    budget: float | None = None,
    round_seconds: float = 0.5,
    device: torch.device,
    say: Callable[[str], None] = lambda text: None,
) -> Swept:
    """Measure what is not yet written down in a folder.

    Args:
        axes: what is measured; what is told is all that is known.
        budget: in seconds; no point begins that would, going by the longest so far, end after it.
        round_seconds: how long each of five rounds takes, roughly.
        say: told of each point.
    """
    out.mkdir(parents=True, exist_ok=True)
    file, began, longest = out / POINTS_FILE, time.monotonic(), 0.0
    known = read_points(file)
    wanted = dict.fromkeys(setting for axis in axes.values() for setting in axis.settings.values())
    todo = [setting for setting in wanted if setting not in known]
    if todo:
        _refuse_others(file, known.values(), environment(device))
    gemm = gemm_rate(device) if todo else 0.0
    missing = []
    for setting in todo:
        so_far = time.monotonic() - began
        if budget is not None and so_far + longest > budget:
            missing.append(str(setting))
            continue
        point = measure(setting, gemm, round_seconds, device)
        longest = max(longest, time.monotonic() - began - so_far)
        _append(file, point)
        known[setting] = point
        say(f"{setting}: {1e3 * point.step_seconds:.2f} ms a step, {point.gemm_share:.0%} of the matrix-product rate")
    found = {
        name: {value: known[setting] for value, setting in axis.settings.items() if setting in known}
        for name, axis in {**AXES, **axes}.items()
    }
    return Swept(found, tuple(missing))


def axes_named(names: Sequence[str]) -> dict[str, Axis]:
    """Some of the axes, or all if none is named."""
    for name in names:
        if name not in AXES:
            raise HardsphereError(f"Unknown axis '{name}': use one of {', '.join(AXES)}.{nearest(name, AXES)}")
    return {name: AXES[name] for name in names or AXES}


def measure(setting: Setting, gemm: float, round_seconds: float, device: torch.device) -> Point:
    """Measure one point, as if no other had been measured before."""
    if device.type == "cuda":
        torch.compiler.reset()  # else torch gives up compiling after some variants of the same code
    forget_memory(device)
    changes = {"model": setting.model, "batch": setting.batch, "attack.steps": setting.attack_steps}
    config = recipe(RECIPE, {"ema.decay": "0.999", **changes})
    run = TrainingRun(config, random_images(config.batch), device)
    once = seconds(lambda: run.go(_FEWEST_STEPS), device) / _FEWEST_STEPS
    steps = min(max(round(round_seconds / once), _FEWEST_STEPS), _MOST_STEPS)
    times = tuple(seconds(lambda: run.go(steps), device) / steps for _ in range(_ROUNDS))
    step = statistics.median(times)
    flops = flops_per_image(config) * config.batch / step
    return Point(
        setting=setting,
        step_seconds=step,
        rounds_step_seconds=times,
        images_per_second=config.batch / step,
        tflops=flops / 1e12,
        gemm_share=flops / gemm,
        first_steps_seconds=run.first_steps_seconds,
        environment=environment(device),
    )


def read_points(file: Path) -> dict[Setting, Point]:
    """What was measured before; a line that a killed process left unfinished is measured again."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []
    points = [_point(line) for line in lines]
    return {point.setting: point for point in points if point is not None}


def _refuse_others(file: Path, points: Iterable[Point], here: Mapping[str, Any]) -> None:
    """A law is fitted to times of one machine and code. Where nothing is left to measure, any may write the page."""
    for point in points:
        for key, what in _SAME.items():
            if (other := point.environment[key]) != here[key]:
                raise HardsphereError(
                    f"'{file}' was measured with another {what}, {other} and not {here[key]}: choose another folder."
                )


def _point(line: str) -> Point | None:
    try:
        plain: dict[str, Any] = json.loads(line)
        rounds = tuple(plain.pop("rounds_step_seconds"))
        return Point(setting=Setting(**plain.pop("setting")), rounds_step_seconds=rounds, **plain)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _append(file: Path, point: Point) -> None:
    with file.open("a+", encoding="utf-8") as stream:
        if stream.tell() and not file.read_bytes().endswith(b"\n"):
            stream.write("\n")  # after a line that was never finished
        stream.write(json.dumps(asdict(point)) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
