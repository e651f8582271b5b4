"""How fast a whole training step is: data, augmentation, attack, update and weight average included.

The plain loop, measured in the same run, is what a PyTorch user writes first: eager, default precision, one kernel
launch at a time. Only ratios within one run compare machines fairly.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hardsphere.bench.clock import gemm_rate, seconds, wait
from hardsphere.config import Config
from hardsphere.data import Augment, Batch, DataSet, Images, TrainLoader, train_loader
from hardsphere.recipes import VARIANTS, recipe
from hardsphere.runtime import choose_kernels, environment, hardware
from hardsphere.train.averaging import make_average
from hardsphere.train.deployed import build_model
from hardsphere.train.step import Stepper

ROUNDS = 5


@dataclass(frozen=True)
class TrainingBench:
    """What one benchmark measured; rates are medians over interleaved rounds.

    Attributes:
        images_per_second: of the whole step, as `hardsphere train` runs it here.
        tflops: arithmetic done per second by that, counted by torch on one plain step.
        gemm_share: its share of the matrix-product rate measured in the same run.
        first_steps_seconds: until the steps run at full speed, compilation included.
        over_plain_loop: how many times faster than the plain loop.
        head_overhead: relative extra time of HE and m-HE over the plain head.
    """

    recipe: str
    model: str
    batch: int
    steps: int
    images_per_second: float
    tflops: float
    gemm_tflops: float
    gemm_share: float
    peak_memory_gib: float | None
    first_steps_seconds: float
    plain_images_per_second: float
    over_plain_loop: float
    head_overhead: dict[str, float]
    device: str
    environment: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def bench_training(
    name: str = "cifar10/pgd-he",
    overrides: dict[str, Any] | None = None,
    *,
    steps: int = 50,
    device: torch.device,
    heads: bool = True,
) -> TrainingBench:
    """Measure a recipe's training step on random images of CIFAR-10's shape."""
    config = recipe(name, {"ema.decay": "0.999", **(overrides or {})})
    data = _random_images(config.batch)
    plain_rate = _plain_rate(config, data, device, steps)
    flops = _flops_per_image(config, data, device)
    gemm = gemm_rate(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    heads_to_time = {"": VARIANTS[""], "he": VARIANTS["he"], "mhe": VARIANTS["mhe"]} if heads else {}
    runs = {"": _Run(config, data, device)}
    runs |= {f"head:{key}": _Run(replace(config, head=head), data, device) for key, head in heads_to_time.items()}
    times: dict[str, list[float]] = {key: [] for key in runs}
    for _, (key, run) in itertools.product(range(ROUNDS), runs.items()):
        times[key].append(seconds(lambda run=run: run.go(steps), device) / steps)  # type: ignore[misc]
    step = statistics.median(times[""])
    plain_head = statistics.median(times["head:"]) if heads else float("nan")
    return TrainingBench(
        recipe=config.recipe,
        model=config.model,
        batch=config.batch,
        steps=steps,
        images_per_second=config.batch / step,
        tflops=flops * config.batch / step / 1e12,
        gemm_tflops=gemm / 1e12,
        gemm_share=flops * config.batch / step / gemm,
        peak_memory_gib=torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None,
        first_steps_seconds=runs[""].first_steps_seconds,
        plain_images_per_second=plain_rate,
        over_plain_loop=config.batch / step / plain_rate,
        head_overhead={key: statistics.median(times[f"head:{key}"]) / plain_head - 1 for key in ("he", "mhe") if heads},
        device=hardware(device),
        environment=environment(device),
    )


class _Run:
    """A model in training, stepped as the trainer does it."""

    def __init__(self, config: Config, data: DataSet, device: torch.device, fast: bool = True) -> None:
        choose_kernels(config.repeatable)
        gpu = device.type == "cuda"
        model = build_model(config, data).to(device).train()
        if gpu and fast:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        loader = _loader(config, data, device)
        self.stepper = Stepper(config, model, make_average(config, model), device, len(loader), fast and gpu)
        self.batches = _forever(loader)
        self.done = 0
        self.first_steps_seconds = seconds(lambda: self.go(6 if gpu and fast else 1), device)

    def go(self, steps: int) -> None:
        for batch in itertools.islice(self.batches, steps):
            self.stepper.step(batch, 0, self.done % 45 + 1)  # no index at which the host would look in
            self.done += 1


def _forever(loader: TrainLoader) -> Iterator[Batch]:
    return itertools.chain.from_iterable(loader.epoch(epoch) for epoch in itertools.count())


def _loader(config: Config, data: DataSet, device: torch.device) -> TrainLoader:
    assert data.train is not None
    augment = Augment(config.data.pad, config.data.padding, config.data.flip)
    return train_loader(data.train, config.batch, device, augment, config.seed)


def _random_images(batch: int) -> DataSet:
    count = 40 * batch  # whole batches only
    pixels = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(count) % 10
    names = tuple(f"class {index}" for index in range(10))
    images = Images(pixels, labels, torch.arange(count), names)
    return DataSet("random", images, images, images, names, (3, 32, 32), (0.5,) * 3, (0.25,) * 3)


def _plain_rate(config: Config, data: DataSet, device: torch.device, steps: int) -> float:
    """Images per second of the plain loop: eager, float32 as torch sets it by default, no average."""
    plain = replace(config, precision="float32", ema=replace(config.ema, decay=0.0))
    run = _Run(plain, data, device, fast=False)
    few = max(2, steps // 5)
    return config.batch * few / seconds(lambda: run.go(few), device)


def _flops_per_image(config: Config, data: DataSet, device: torch.device) -> float:
    """Arithmetic of one training step per image.

    A forward pass is counted by torch; the gradient by the input costs as much again, that by the weights once more.
    """
    few = replace(config, batch=4, ema=replace(config.ema, decay=0.0))
    run = _Run(few, data, device, fast=False)
    model = run.stepper.model
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(torch.zeros(1, 3, 32, 32, device=device))
    forwards = 0

    def count(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal forwards
        by_weights = torch.is_grad_enabled() and any(weight.requires_grad for weight in module.parameters())
        forwards += 3 if by_weights else 2 if inputs[0].requires_grad else 1

    hook = model.register_forward_pre_hook(count)
    run.go(1)
    hook.remove()
    wait(device)
    return float(counter.get_total_flops() * forwards)
