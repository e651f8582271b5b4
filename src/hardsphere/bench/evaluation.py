"""How fast an evaluation is: a whole suite through `hardsphere.evaluate`, and beside it the reference's, if asked for.

Both see the same model, images and device. The device is woken by some passes before either begins, so that neither
pays for its start; what an evaluation prepares for itself, such as recorded graphs, is its own cost.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hardsphere.bench.clock import forget_memory, gemm_rate, peak_memory, seconds
from hardsphere.bench.reference import ReferenceRun, check_comparable, run_reference
from hardsphere.bench.subject import CLASSES, SHAPE, forward_flops
from hardsphere.data import load as load_data
from hardsphere.data import parse_source
from hardsphere.errors import HardsphereError
from hardsphere.evaluate import Evaluation, evaluate
from hardsphere.evaluate.targets import first_images, resolve
from hardsphere.models import HeadSpec, build
from hardsphere.runtime import environment, hardware
from hardsphere.threat import Ball

DEFAULT_BALL = Ball("linf", 8 / 255)


@dataclass(frozen=True)
class Subject:
    """A model with images, all on one device."""

    name: str
    data: str
    model: nn.Module
    x: Tensor
    y: Tensor
    ids: Tensor
    ball: Ball


@dataclass(frozen=True)
class AttackCost:
    """One attack of the suite: its time, and passes summed over the images it worked on."""

    name: str
    seconds: float
    attacked: int
    survivors: int
    forwards: float
    backwards: float


@dataclass(frozen=True)
class Comparison:
    """The reference on the same model, images and device.

    Attributes:
        times_faster: its seconds over those of our first evaluation.
        times_faster_warm: the same against a further one in the same process; none if there was none.
        difference_points: our robust accuracy minus its own, in points.
        only_ours, only_reference: how many images survive one of the two alone.
    """

    seconds: float
    attack_seconds: dict[str, float]
    survivors: int
    robust_accuracy: float
    batch: int
    settings: dict[str, bool]
    times_faster: float
    times_faster_warm: float | None
    difference_points: float
    only_ours: int
    only_reference: int


@dataclass(frozen=True)
class EvaluationBench:
    """What one benchmark measured.

    Attributes:
        seconds: of the first evaluation, whatever it prepares included.
        warm_seconds: of a further one in the same process, the median if there are several; none if there was none.
        attack_seconds: the sum over the attacks of the last evaluation.
        images_per_second, passes_per_second, tflops, gemm_share: of the last evaluation as a whole; a forward pass
            counts once, a backward pass, by the image alone, once more.
        attacks: the last evaluation, attack by attack.
        crafting: the precision in which the attacks worked, in the evaluation's own words.
    """

    target: str
    data: str
    suite: str
    ball: str
    images: int
    batch: int | None
    clean_accuracy: float
    robust_accuracy: float
    survivors: int
    seconds: float
    warm_seconds: float | None
    rounds_seconds: list[float]
    attack_seconds: float
    attacks: tuple[AttackCost, ...]
    images_per_second: float
    passes_per_second: float
    tflops: float
    gemm_tflops: float
    gemm_share: float
    peak_memory_gib: float | None
    crafting: str | None
    reference: Comparison | None
    device: str
    environment: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def subject_of_run(
    run: str | Path, data: str | None, suite: str, limit: int, device: torch.device, skip: int = 0
) -> Subject:
    """A trained model with the first images of its own test set, or of another, after those that are skipped."""
    job = resolve(run, suite=suite, data=data)
    if skip >= len(job.source):
        raise HardsphereError(f"There are {len(job.source)} images, so {skip} cannot be skipped.")
    x, y, ids = first_images(job.source.subset(range(skip, len(job.source))), limit, device)
    return Subject(str(run), str(job.about["data"]), job.model.to(device).eval(), x, y, ids, job.balls[-1])


def subject_of_network(name: str, data: str | None, limit: int, device: torch.device, seed: int = 0) -> Subject:
    """A network with new weights on the first test images of some data, or on random images.

    Random images are labelled as the network sees them, so that it is right about each and the attacks have work to do.
    """
    images = None if data is None else load_data(*parse_source(data))
    shape, classes = (SHAPE, CLASSES) if images is None else (images.shape, len(images.class_names))
    head = HeadSpec(feature_norm=True, weight_norm=True)
    model = build(name, num_classes=classes, in_channels=shape[0], image_size=shape[1], head=head, seed=seed)
    model = model.to(device).eval()
    if images is not None:
        x, y, ids = first_images(images.test, limit, device)
    else:
        x = torch.rand(limit, *SHAPE, generator=torch.Generator().manual_seed(seed)).to(device)
        with torch.no_grad():
            y = torch.cat([model(x[first : first + 256]).argmax(dim=1) for first in range(0, limit, 256)])
        ids = torch.arange(limit)
    return Subject(f"{name}, new weights", data or "random images", model, x, y, ids, DEFAULT_BALL)


def bench_evaluation(
    subject: Subject,
    *,
    suite: str = "standard",
    batch: int | None = None,
    rounds: int = 1,
    seed: int = 0,
    reference: bool = False,
    device: torch.device,
    keep: Callable[[EvaluationBench], object] = lambda found: None,
    say: Callable[[str], None] = lambda text: None,
) -> EvaluationBench:
    """Time an evaluation.

    Args:
        batch: images at once; the evaluation's own choice by default.
        rounds: how often to evaluate; from the second on, libraries are loaded and memory is at hand.
        reference: also run pyautoattack.
        keep: given the result before the reference begins, which takes many times longer.
        say: told how far the reference is.
    """
    if rounds < 1:
        raise HardsphereError(f"There are {rounds} rounds, but at least one is needed.")
    flops = forward_flops(subject.model, (subject.x.shape[1], subject.x.shape[2], subject.x.shape[3]))
    if reference:
        check_comparable(subject.ball, suite, _wake(subject))
    else:
        _wake(subject)
    gemm = gemm_rate(device)
    forget_memory(device)
    found: list[Evaluation] = []
    own: dict[str, Any] = {} if batch is None else {"batch": batch}

    def work() -> None:
        found.append(
            evaluate(subject.model, subject.x, subject.y, subject.ball, suite=suite, seed=seed, ids=subject.ids, **own)
        )

    times = [seconds(work, device) for _ in range(rounds)]
    peak, last = peak_memory(device), found[-1]
    warm = statistics.median(times[1:]) if rounds > 1 else None
    spent = times[-1]  # of the same evaluation as the passes
    attacks = _costs(last.card)
    passes = sum(attack.forwards + attack.backwards for attack in attacks)
    bench = EvaluationBench(
        target=subject.name,
        data=subject.data,
        suite=last.suite.id,
        ball=str(subject.ball),
        images=len(subject.x),
        batch=batch,
        clean_accuracy=last.clean_accuracy,
        robust_accuracy=last.robust_accuracy,
        survivors=len(last.survivors()),
        seconds=times[0],
        warm_seconds=warm,
        rounds_seconds=times,
        attack_seconds=sum(attack.seconds for attack in attacks),
        attacks=attacks,
        images_per_second=len(subject.x) / spent,
        passes_per_second=passes / spent,
        tflops=flops * passes / spent / 1e12,
        gemm_tflops=gemm / 1e12,
        gemm_share=flops * passes / spent / gemm,
        peak_memory_gib=peak,
        crafting=last.card.get("about", {}).get("crafting"),
        reference=None,
        device=hardware(device),
        environment=environment(device),
    )
    if not reference:
        return bench
    keep(bench)
    other = run_reference(subject.model, subject.x, subject.y, subject.ball, seed=seed, say=say)
    positions = {sample: position for position, sample in enumerate(subject.ids.tolist())}
    ours = frozenset(positions[sample] for sample in last.survivors())
    return replace(bench, reference=compare(ours, other, len(subject.x), times[0], warm))


def compare(ours: frozenset[int], other: ReferenceRun, images: int, spent: float, warm: float | None) -> Comparison:
    """Both outcomes side by side."""
    return Comparison(
        seconds=other.seconds,
        attack_seconds=other.attack_seconds,
        survivors=len(other.survivors),
        robust_accuracy=len(other.survivors) / images,
        batch=other.batch,
        settings=other.settings,
        times_faster=other.seconds / spent,
        times_faster_warm=None if warm is None else other.seconds / warm,
        difference_points=100 * (len(ours) - len(other.survivors)) / images,
        only_ours=len(ours - other.survivors),
        only_reference=len(other.survivors - ours),
    )


def as_text(bench: EvaluationBench) -> str:
    """Time and survivors of each attack, beside the reference's if there is one."""
    other = bench.reference
    theirs = other.attack_seconds if other is not None else {}
    lines = [_line("", "hardsphere", "pyautoattack" if other else "")]
    lines += [_line(one.name, _clock(one.seconds), _clock(theirs.get(one.name))) for one in bench.attacks]
    lines.append(_line("in all", _clock(bench.seconds), _clock(other.seconds if other else None)))
    if bench.warm_seconds is not None:
        lines.append(_line("once more", _clock(bench.warm_seconds), ""))
    lines.append(_line("survivors", str(bench.survivors), str(other.survivors) if other else ""))
    if other is not None:
        warm = f", {other.times_faster_warm:.2f} the second time" if other.times_faster_warm is not None else ""
        lines.append(
            f"{other.times_faster:.2f} times faster{warm}; difference {other.difference_points:+.2f} points, "
            f"only here survive {other.only_ours}, only there {other.only_reference}"
        )
    return "\n".join(lines)


def _line(name: str, ours: str, theirs: str) -> str:
    return f"{name:16}{ours:>14}{theirs:>14}".rstrip()


def _clock(spent: float | None) -> str:
    return "" if spent is None else f"{spent:.1f} s"


def _wake(subject: Subject, images: int = 64) -> int:
    """Some passes that start the device and its libraries; tells the number of classes."""
    x = subject.x[:images].clone().requires_grad_()
    logits = subject.model(x)
    torch.autograd.grad(logits.sum(), x)
    return int(logits.shape[1])


def _costs(card: Mapping[str, Any]) -> tuple[AttackCost, ...]:
    """The card gives passes per image that an attack worked on."""
    return tuple(
        AttackCost(
            name=line["name"],
            seconds=line["seconds"],
            attacked=line["attacked"],
            survivors=line["count"],
            forwards=line["forwards"] * line["attacked"],
            backwards=line["backwards"] * line["attacked"],
        )
        for line in card["results"][-1]["attacks"]
    )
