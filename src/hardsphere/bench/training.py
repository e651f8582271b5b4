"""How fast a whole training step is: data, augmentation, attack, update and weight average included.

The plain loop, measured in the same run, is what a PyTorch user writes first: eager, default precision, one kernel
launch at a time. Only ratios within one run compare machines fairly.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from hardsphere.bench.clock import forget_memory, gemm_rate, peak_memory, seconds
from hardsphere.bench.first_use import cache_is_warm, compile_phases
from hardsphere.bench.kernels import KernelProfile, profile_steps
from hardsphere.bench.subject import TrainingRun, flops_per_image, plain_rates, random_images
from hardsphere.recipes import VARIANTS, recipe
from hardsphere.runtime import environment, expect_compiling, hardware
from hardsphere.train.forerunner import sent_ahead

ROUNDS = 5
EPOCH_IMAGES = 50_000  # CIFAR-10's training images
HEADS = ("", "he", "mhe")


@dataclass(frozen=True)
class TrainingBench:
    """What one benchmark measured; rates are medians over interleaved rounds.

    Attributes:
        updates_per_batch: how often a step trains on its batch: FreeAT replays each, the others train on it once.
        images_per_second: of the whole step, as `hardsphere train` runs it here; an image counts once per step, however
            often the step replays it.
        rounds_images_per_second: the same, round by round.
        epoch_seconds: one pass over 50,000 images, with all replays, without validation and checkpoints.
        tflops: arithmetic done per second by that, counted by torch on one plain step.
        gemm_share: its share of the matrix-product rate measured in the same run.
        peak_memory_gib: of this one run.
        first_step_seconds: from the start of the command, after Python's own, to the end of the first training step:
            imports, the device's start, random data in place of a real set's, compiling.
        first_step_parts: of that, until the benchmark began (imports), until the first step began (the device's start,
            data, the network), and the first step itself.
        first_steps_seconds: from the first step on until the steps run at full speed, compilation included.
        compile_seconds: the same without the steps' own time; none where nothing is compiled.
        compile_phases: what torch's compiler spent that on, by its own names for its phases, which contain each other.
        compile_cache_warm: whether there were compiled graphs in torch's cache; none where nothing is compiled.
        over_plain_loop: how many times faster than the plain loop.
        head_overhead: relative extra time of HE and m-HE over the plain head.
        head_rounds_seconds: seconds per step with each head, round by round.
        profile: where the time goes, if asked for.
        remarks: what the compiler had to say.
    """

    recipe: str
    model: str
    batch: int
    attack_steps: int
    updates_per_batch: int
    steps: int
    images_per_second: float
    rounds_images_per_second: list[float]
    epoch_seconds: float
    tflops: float
    gemm_tflops: float
    gemm_share: float
    peak_memory_gib: float | None
    first_step_seconds: float
    first_step_parts: dict[str, float]
    first_steps_seconds: float
    compile_seconds: float | None
    compile_phases: dict[str, float]
    compile_cache_warm: bool | None
    plain_images_per_second: float
    plain_rounds_images_per_second: list[float]
    over_plain_loop: float
    head_overhead: dict[str, float]
    head_rounds_seconds: dict[str, list[float]]
    profile: KernelProfile | None
    remarks: list[str]
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
    profile: bool = False,
    started: float | None = None,
) -> TrainingBench:
    """Measure a recipe's training step on random images of CIFAR-10's shape.

    Args:
        steps: per round; there are five rounds.
        heads: also measure the plain head, HE and m-HE, interleaved.
        profile: also say where the time goes.
        started: when the command began, on the clock of `time.perf_counter`; now by default.
    """
    entered = time.perf_counter()
    started = entered if started is None else started
    config = recipe(name, {"ema.decay": "0.999", **(overrides or {})})
    gpu = device.type == "cuda"
    warm = cache_is_warm() if gpu else None
    data = random_images(config.batch)
    # First what a person waits for first; nothing else may have warmed the device.
    complaints: list[str] = []
    with sent_ahead(config, data, device, complaints.append) if gpu else nullcontext() as wait_for_update:
        if gpu:
            expect_compiling(device)
        forget_memory(device)
        run = TrainingRun(config, data, device, wait_for_update=wait_for_update)
    peak, phases = peak_memory(device), compile_phases() if gpu else {}
    plain = plain_rates(config, data, device, steps)
    forget_memory(device)
    gemm, flops = gemm_rate(device), flops_per_image(config)
    runs = {"": run}
    for head in HEADS if heads else ():
        same = config.head == VARIANTS[head]
        runs[f"head:{head}"] = run if same else TrainingRun(replace(config, head=VARIANTS[head]), data, device)
    times = _interleaved(runs, steps, device)
    step = statistics.median(times[""])
    rate, plain_rate = config.batch / step, statistics.median(plain)
    head_times = {head or "plain": times[f"head:{head}"] for head in HEADS if heads}
    return TrainingBench(
        recipe=config.recipe,
        model=config.model,
        batch=config.batch,
        attack_steps=config.attack.steps,
        updates_per_batch=config.objective.updates_per_batch,
        steps=steps,
        images_per_second=rate,
        rounds_images_per_second=[config.batch / one for one in times[""]],
        epoch_seconds=EPOCH_IMAGES / rate,
        tflops=flops * rate / 1e12,
        gemm_tflops=gemm / 1e12,
        gemm_share=flops * rate / gemm,
        peak_memory_gib=peak,
        first_step_seconds=run.first_step_at - started,
        first_step_parts={
            "imports": entered - started,
            "preparation": run.began_at - entered,
            "first step": run.first_step_at - run.began_at,
        },
        first_steps_seconds=run.first_steps_seconds,
        compile_seconds=max(run.first_steps_seconds - run.first_steps * step, 0.0) if gpu else None,
        compile_phases=phases,
        compile_cache_warm=warm,
        plain_images_per_second=plain_rate,
        plain_rounds_images_per_second=plain,
        over_plain_loop=rate / plain_rate,
        head_overhead={head: _overhead(head_times, head) for head in ("he", "mhe") if heads},
        head_rounds_seconds=head_times,
        profile=profile_steps(run, device) if profile else None,
        remarks=list(dict.fromkeys([*complaints, *(remark for one in runs.values() for remark in one.remarks)])),
        device=hardware(device),
        environment=environment(device),
    )


def _interleaved(runs: Mapping[str, TrainingRun], steps: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds per step of each run, round by round; a run under two names is timed once a round for both."""
    times: dict[str, list[float]] = {key: [] for key in runs}
    distinct = {id(run): run for run in runs.values()}
    for _, (which, run) in itertools.product(range(ROUNDS), distinct.items()):
        spent = seconds(lambda run=run: run.go(steps), device) / steps  # type: ignore[misc]
        for key, other in runs.items():
            if id(other) == which:
                times[key].append(spent)
    return times


def _overhead(times: Mapping[str, list[float]], head: str) -> float:
    return statistics.median(times[head]) / statistics.median(times["plain"]) - 1
