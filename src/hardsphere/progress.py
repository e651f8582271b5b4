"""What a person sees of a run: a live bar with rate and time left, or plain lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from hardsphere.evaluate import Progress
from hardsphere.train.loop import Reporter


@contextmanager
def reporter() -> Iterator[Reporter]:
    """A live reporter on a terminal, a plain one elsewhere."""
    if not sys.stderr.isatty():
        yield PlainReporter()
        return
    with Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        yield LiveReporter(progress)


def epoch_line(row: dict[str, Any]) -> str:
    """An epoch's metrics as one line."""
    parts = [f"epoch {row['epoch']:>3}", f"loss {row['loss']:.3f}"]
    names = {
        "clean_accuracy": "clean",
        "adversarial_accuracy": "adversarial",
        "validation_clean": "held-out clean",
        "validation_robust": "held-out robust",
    }
    parts += [f"{short} {row[name]:.1%}" for name, short in names.items() if name in row]
    return "  ".join([*parts, f"lr {row['lr']:.4f}", f"{row['images_per_second']:,.0f} images/s"])


class PlainReporter:
    """One line per epoch, with the time left."""

    def begin(self, total: int, done: int) -> None:
        self._total, self._first, self._done, self._started = total, done, done, time.monotonic()

    def advance(self, done: int) -> None:
        self._done = done

    def epoch(self, row: dict[str, Any]) -> None:
        self._started += row["preparing_seconds"]  # that comes but once, and says nothing about the time left
        spent = time.monotonic() - self._started
        left = spent * (self._total - self._done) / max(self._done - self._first, 1)
        self.say(f"{epoch_line(row)}  {_duration(left)} left")

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)  # noqa: T201


class LiveReporter:
    """A progress bar, with each epoch's line above it."""

    def __init__(self, progress: Bar) -> None:
        self._progress = progress
        self._task: TaskID | None = None
        self._started, self._first = time.monotonic(), 0

    def begin(self, total: int, done: int) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task("training", total=total, completed=done, rate="")
        self._started, self._first = time.monotonic(), done

    def advance(self, done: int) -> None:
        assert self._task is not None
        rate = (done - self._first) / max(time.monotonic() - self._started, 1e-9)
        self._progress.update(self._task, completed=done, rate=f"{rate:.1f} batches/s")

    def epoch(self, row: dict[str, Any]) -> None:
        self._started += row["preparing_seconds"]
        self.say(epoch_line(row))

    def say(self, text: str) -> None:
        self._progress.console.print(text, highlight=False)


@contextmanager
def evaluation_progress() -> Iterator[Callable[[Progress], None]]:
    """Watch an evaluation: the attack at work, the bound on robust accuracy so far, and the time left."""
    if not sys.stderr.isatty():
        yield PlainEvaluation()
        return
    with Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("evaluating", total=None, left="")

        def update(state: Progress) -> None:
            left = "" if state.left is None else f"{_duration(state.left)} left"
            bar.update(task, description=_attack_line(state), completed=state.done, total=state.total, left=left)

        yield update


@contextmanager
def corruption_progress(names: int, images: int) -> Iterator[Callable[[str, int, int], None]]:
    """Watch a corrupted set being made."""
    with Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as bar:
        task = bar.add_task("corrupting", total=names * 5 * images)
        finished: dict[tuple[str, int], int] = {}

        def update(name: str, severity: int, done: int) -> None:
            finished[name, severity] = done
            bar.update(task, description=f"{name} {severity}", completed=sum(finished.values()))

        yield update


class PlainEvaluation:
    """A line when an attack begins and when it ends, and one every half minute in between."""

    def __init__(self) -> None:
        self._attack: tuple[str, str] | None = None
        self._said = 0.0

    def __call__(self, state: Progress) -> None:
        attack, now = (state.attack, str(state.ball)), time.monotonic()
        if attack == self._attack and state.done < state.total and now - self._said < 30:
            return
        self._attack, self._said = attack, now
        left = "" if state.left is None else f", {_duration(state.left)} left"
        print(f"{_attack_line(state)}: {state.done}/{state.total}{left}", file=sys.stderr, flush=True)  # noqa: T201


def _attack_line(state: Progress) -> str:
    where = "" if state.ball is None else f" in {state.ball}"
    bound = "" if state.upper_bound is None else f", at most {state.upper_bound:.1%} robust"
    return f"{state.attack}{where}{bound}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
