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
from hardsphere.bench.subject import TrainingRun, flops_per_image, images_like, plain_rates
from hardsphere.errors import HardsphereError
from hardsphere.recipes import VARIANTS, recipe, unasked
from hardsphere.runtime import environment, expect_compiling, hardware
from hardsphere.train.forerunner import sent_ahead

ROUNDS = 5
EPOCH_IMAGES = 50_000  # CIFAR-10's training images
HEADS = ("", "he", "mhe")
_NAMES = {"he": "HE", "mhe": "m-HE"}


@dataclass(frozen=True)
class TrainingBench:
    """What one benchmark measured; rates are medians over interleaved rounds.

    Attributes:
        image_shape: channels, height and width of the random images, as the recipe's own have.
        classes: of the recipe's data, or ten where only the data itself would tell.
        attack_steps: K; none where the recipe's steps have no such attack.
        updates_per_batch: how often a step trains on its batch: FreeAT replays each, the others train on it once.
        images_per_second: of the whole step, as `hardsphere train` runs it here; an image counts once per step, however
            often the step replays it.
        rounds_images_per_second: the same, round by round.
        epoch_seconds: one pass over as many images as CIFAR-10 has, 50,000, with all replays, without validation and
            checkpoints.
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
    image_shape: list[int]
    classes: int
    batch: int
    attack_steps: int | None
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
    """Measure a recipe's training step on random images of the shape that the recipe trains on.

    Args:
        overrides: of the recipe; attack steps that would change nothing are refused.
        steps: per round; there are five rounds.
        heads: also measure the plain head, HE and m-HE, interleaved.
        profile: also say where the time goes.
        started: when the command began, on the clock of `time.perf_counter`; now by default.
    """
    entered = time.perf_counter()
    started = entered if started is None else started
    config = recipe(name, {"ema.decay": "0.999", **(overrides or {})})
    attacked = "attack.steps" not in unasked(config)
    if "attack.steps" in (overrides or {}) and not attacked:
        raise HardsphereError(f"Attack steps change nothing in a step of {name}: leave them away.")
    gpu = device.type == "cuda"
    warm = cache_is_warm() if gpu else None
    data = images_like(config, config.batch)
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
        image_shape=list(data.shape),
        classes=len(data.class_names),
        batch=config.batch,
        attack_steps=config.attack.steps if attacked else None,
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


def as_text(bench: TrainingBench) -> str:
    """What a person compares, a line each."""
    shape = " x ".join(map(str, bench.image_shape))
    rounds = bench.rounds_images_per_second
    share = f"{bench.gemm_share:.0%} of the {bench.gemm_tflops:,.2f} of matrix products"
    lines = [
        f"{bench.recipe}, {bench.model}, batch {bench.batch}, on {bench.device}",
        f"random images of {shape}, {bench.classes} classes",
        _line("images/s", f"{bench.images_per_second:,.0f}", f"{min(rounds):,.0f} to {max(rounds):,.0f} in its rounds"),
        _line("of the plain loop", f"{bench.over_plain_loop:.2f}x", f"{bench.plain_images_per_second:,.0f} images/s"),
        _line("TFLOP/s", f"{bench.tflops:,.2f}", share),
    ]
    if bench.peak_memory_gib is not None:
        lines.append(_line("peak memory", f"{bench.peak_memory_gib:.1f} GiB"))
    compiled = "" if bench.compile_seconds is None else f"{bench.compile_seconds:.1f} s of compiling until full speed"
    lines.append(_line("first step after", f"{bench.first_step_seconds:.1f} s", compiled))
    lines += [
        _line(f"cost of {_NAMES[head]}", f"{over:+.1%}", "over the plain head")
        for head, over in bench.head_overhead.items()
    ]
    return "\n".join([*lines, *bench.remarks])


def _line(name: str, value: str, more: str = "") -> str:
    return f"{name:20}{value:>12}   {more}".rstrip()


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
