"""Where the time of a training step goes: kernels by group, the longest ones, and how long the device was idle.

Kernels inside a recorded graph are seen one by one, like others. Groups go by name: what torch's compiler writes is
called ``triton_<kind>_fused_<operations>``, what libraries bring has names of their own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from hardsphere.bench.clock import wait
from hardsphere.bench.subject import TrainingRun

PRODUCTS = "convolutions and matrix products"
ELEMENTWISE = "elementwise"
REDUCTIONS = "reductions and normalisation"
COPIES = "copies and layout"
OPTIMISER = "optimiser and weight average"
OTHER = "other"

LONGEST = 12

# The first that matches decides: a fused elementwise kernel also names the convolution whose output it takes.
_RULES = tuple(
    (re.compile(pattern, re.IGNORECASE), group)
    for pattern, group in (
        (r"^triton_tem_", PRODUCTS),
        (r"^triton_(red|per|mix|split)", REDUCTIONS),
        (r"^triton_(poi|for|unk)|^_(affine|shortest)", ELEMENTWISE),
        (r"multi_tensor_apply|fused_?sgd|_foreach_|^optimizer", OPTIMISER),
        (r"^mem(cpy|set)|nchwtonhwc|nhwctonchw|tensortransform|copy|CatArray|FillFunctor", COPIES),
        (r"^aten::(clone|contiguous|_to_copy|to|cat|stack|fill_|zero_|empty.*|index.*|gather|resize_|pad)$", COPIES),
        (r"batch_?norm|bn_(fw|bw)|softmax|reduce|^aten::(sum|mean|amax|max|argmax|_?log_softmax.*)$", REDUCTIONS),
        (r"gemm|conv|cutlass|xmma|nvjet|wgrad|dgrad|fprop|winograd|splitk", PRODUCTS),
        (r"^aten::(add|b)?mm$|^aten::(matmul|linear)", PRODUCTS),
        (r"elementwise|^aten::", ELEMENTWISE),
    )
)


@dataclass(frozen=True)
class Kernel:
    """One kernel, or one operation on a CPU, summed over all its calls; times are per step."""

    name: str
    group: str
    calls: float
    milliseconds: float
    share: float


@dataclass(frozen=True)
class KernelProfile:
    """What the profiler saw.

    Attributes:
        steps: how many steps were watched.
        kernels_per_step: launches, or operations on a CPU.
        busy_milliseconds: per step, the sum over kernels.
        groups: each group's share of that, largest first.
        longest: the kernels that take longest.
        idle_share: share of the time between the first kernel and the last in which none ran; none on a CPU. The
            profiler itself takes time between kernels, so this is too large; see `busy_milliseconds` beside the time
            of a step that nobody watched.
    """

    steps: int
    kernels_per_step: float
    busy_milliseconds: float
    groups: dict[str, float]
    longest: tuple[Kernel, ...]
    idle_share: float | None


Span = tuple[str, float, float]
"""A kernel's name, beginning and end in microseconds."""


def profile_steps(run: TrainingRun, device: torch.device, steps: int = 5) -> KernelProfile:
    """Watch some steps of a run that is already at full speed."""
    gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU
    # Older versions of torch warn of the events of earlier cycles, of which there are none, unless they are to be kept.
    watching = partial(profile, activities=[activity], acc_events=True)
    with watching():  # the first use sets the profiler up
        run.go(1)
        wait(device)
    with watching() as watched:
        run.go(steps)
        wait(device)
    events = watched.events() or []
    if gpu:
        seen = (event for event in events if event.device_type.name == "CUDA" and not event.is_user_annotation)
        spans = [(event.name, event.time_range.start, event.time_range.end) for event in seen]
        return summarise(spans, steps, idle_share(spans))
    # Operations call each other: only what each does itself counts.
    return summarise([(event.name, 0.0, event.self_cpu_time_total) for event in events], steps, None)


def summarise(spans: Iterable[Span], steps: int, idle: float | None) -> KernelProfile:
    """Sum up by kernel and by group."""
    time: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for name, begin, end in spans:
        time[name] += end - begin
        calls[name] += 1
    total = sum(time.values()) or 1.0
    groups: dict[str, float] = defaultdict(float)
    for name, spent in time.items():
        groups[group_of(name)] += spent / total
    ranked = sorted(time, key=lambda name: -time[name])[:LONGEST]
    return KernelProfile(
        steps=steps,
        kernels_per_step=sum(calls.values()) / steps,
        busy_milliseconds=sum(time.values()) / steps / 1e3,
        groups=dict(sorted(groups.items(), key=lambda item: -item[1])),
        longest=tuple(
            Kernel(name, group_of(name), calls[name] / steps, time[name] / steps / 1e3, time[name] / total)
            for name in ranked
        ),
        idle_share=idle,
    )


def group_of(name: str) -> str:
    """The group that a kernel or operation belongs to."""
    return next((group for pattern, group in _RULES if pattern.search(name)), OTHER)


def idle_share(spans: Iterable[Span]) -> float | None:
    """Share of the time from the first beginning to the last end that no kernel covers; kernels may overlap."""
    ordered = sorted((begin, end) for _, begin, end in spans)
    if not ordered:
        return None
    covered, reached = 0.0, ordered[0][0]
    for begin, end in ordered:
        covered += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    whole = reached - ordered[0][0]
    return 1 - covered / whole if whole > 0 else 0.0


def as_text(profiled: KernelProfile) -> str:
    """The profile as a table for people."""
    idle = "" if profiled.idle_share is None else f", idle {profiled.idle_share:.1%} of the time while watched"
    lines = [f"{profiled.kernels_per_step:,.0f} kernels and {profiled.busy_milliseconds:.2f} ms a step{idle}"]
    lines += [f"{share:7.1%}  {group}" for group, share in profiled.groups.items()]
    lines += ["", "The longest:"]
    lines += [
        f"{one.share:7.1%} {one.milliseconds:9.3f} ms {one.calls:7.1f} x  {_short(one.name)}"
        for one in profiled.longest
    ]
    return "\n".join(lines)


def _short(name: str, width: int = 90) -> str:
    return name if len(name) <= width else name[: width - 3] + "..."
