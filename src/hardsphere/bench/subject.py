"""What is measured: a model in training on random images, stepped as `hardsphere train` does it."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hardsphere.bench.clock import seconds, wait
from hardsphere.config import Config
from hardsphere.data import Augment, Batch, DataSet, Images, TrainLoader, train_loader
from hardsphere.runtime import choose_kernels
from hardsphere.train.averaging import make_average
from hardsphere.train.compiling import Compiler
from hardsphere.train.deployed import build_model
from hardsphere.train.step import Stepper

Shape = tuple[int, int, int]

SHAPE: Shape = (3, 32, 32)
CLASSES = 10

# Of data whose images and classes are known beforehand. Others are taken to be CIFAR-10's, a folder's to have its size.
_CIFAR = (SHAPE, CLASSES)
_KNOWN = {"digits": ((1, 8, 8), 10), "cifar100": (SHAPE, 100)}
_FOLDER_SIDE = 224

# As many batches as this holds, so that those of large images fit into memory as well.
_PIXELS = 1 << 28

# How many steps a GPU needs until it replays recorded ones; the rest of the warm-up comes free.
_FIRST_STEPS = 6
PLAIN_ROUNDS = 3


class TrainingRun:
    """A model in training.

    Args:
        fast: as on a GPU in real training: compiled and replayed as one graph. A CPU has no such thing.
        wait_for_update: returns when the update is compiled, if another process does that.

    Attributes:
        began_at: when the first step began, on the clock of `time.perf_counter`.
        first_step_at: when it was done.
        first_steps_seconds: how long it took until the steps ran at full speed, compiling and recording included.
        remarks: what the compiler had to say.
    """

    def __init__(
        self,
        config: Config,
        data: DataSet,
        device: torch.device,
        fast: bool = True,
        wait_for_update: Callable[[], None] | None = None,
    ) -> None:
        choose_kernels(config.repeatable)
        fast = fast and device.type == "cuda"
        model = build_model(config, data).to(device).train()
        if fast:
            _compile_many_variants()
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.remarks: list[str] = []
        say = self.remarks.append
        loader = _loader(config, data, device, Compiler(say) if fast else None)
        average = make_average(config, model)
        self.stepper = Stepper(config, model, average, device, len(loader), fast, say, wait_for_update)
        self.batches = _forever(loader)
        self.done = 0
        self.began_at = time.perf_counter()
        first = seconds(lambda: self.go(1), device)
        self.first_step_at = time.perf_counter()
        self.first_steps = _FIRST_STEPS if fast else 1
        self.first_steps_seconds = first + seconds(lambda: self.go(self.first_steps - 1), device)

    def go(self, steps: int) -> None:
        """Train on so many batches; the host does not wait for the device."""
        for batch in itertools.islice(self.batches, steps):
            self.stepper.step(batch, 0, self.done % 45 + 1)  # no index at which the host would look in
            self.done += 1


def random_images(batch: int, shape: Shape = SHAPE, classes: int = CLASSES) -> DataSet:
    """Random images, of CIFAR-10's shape by default, in whole batches."""
    count = batch * min(40, max(2, _PIXELS // (batch * math.prod(shape))))
    pixels = torch.randint(256, (count, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(count) % classes
    names = tuple(f"class {index}" for index in range(classes))
    images = Images(pixels, labels, torch.arange(count), names)
    return DataSet("random", images, images, images, names, shape, (0.5,) * shape[0], (0.25,) * shape[0])


def images_like(config: Config, batch: int) -> DataSet:
    """Random images in place of a recipe's own: of their shape, and of as many classes where that is known."""
    side = config.data.size or _FOLDER_SIDE
    shape, classes = ((3, side, side), CLASSES) if config.dataset == "folder" else _KNOWN.get(config.dataset, _CIFAR)
    return random_images(batch, shape, classes)


def plain_rates(config: Config, data: DataSet, device: torch.device, steps: int) -> list[float]:
    """Images per second of the plain loop, round by round: eager, float32 as torch sets it by default, no average."""
    plain = replace(config, precision="float32", ema=replace(config.ema, decay=0.0))
    run = TrainingRun(plain, data, device, fast=False)
    few = plain_steps(steps)
    return [config.batch * few / seconds(lambda: run.go(few), device) for _ in range(PLAIN_ROUNDS)]


def plain_steps(steps: int) -> int:
    """How many steps a round of the plain loop has, beside so many of ours: it is slow."""
    return max(2, steps // 5)


def flops_per_image(config: Config) -> float:
    """Arithmetic of one training step per image.

    A forward pass is counted by torch; the gradient by the input costs as much again, that by the weights once more.
    """
    data = images_like(config, batch=1)
    return forward_flops(build_model(config, data), data.shape) * _forwards_per_step(config)


def forward_flops(model: nn.Module, shape: Shape) -> float:
    """Arithmetic of one forward pass of one image, as torch counts it: two per multiply-add."""
    where = next(model.parameters()).device
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(torch.zeros(1, *shape, device=where))
    return float(counter.get_total_flops())


def _forwards_per_step(config: Config) -> int:
    """How many forward passes a step is worth per image. No network changes that, so a tiny one on the CPU tells."""
    tiny = replace(config, model="cnn-4", batch=4, ema=replace(config.ema, decay=0.0))
    device = torch.device("cpu")
    run = TrainingRun(tiny, random_images(4), device)
    forwards = 0

    def count(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal forwards
        by_weights = torch.is_grad_enabled() and any(weight.requires_grad for weight in module.parameters())
        forwards += 3 if by_weights else 2 if inputs[0].requires_grad else 1

    hook = run.stepper.model.register_forward_pre_hook(count)
    run.go(1)
    hook.remove()
    wait(device)
    return forwards


def _compile_many_variants() -> None:
    """A benchmark compiles the same code for several networks; past a limit torch would silently run it uncompiled."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = 64


def _forever(loader: TrainLoader) -> Iterator[Batch]:
    return itertools.chain.from_iterable(loader.epoch(epoch) for epoch in itertools.count())


def _loader(config: Config, data: DataSet, device: torch.device, fused: Compiler | None) -> TrainLoader:
    assert data.train is not None
    augment = Augment(config.data.pad, config.data.padding, config.data.flip)
    return train_loader(data.train, config.batch, device, augment, config.seed, fused)
