"""What a person sees of a run: a live bar with rate and time left, or plain lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from hardsphere.train.loop import Reporter


@contextmanager
def reporter() -> Iterator[Reporter]:
    """A live reporter on a terminal, a plain one elsewhere."""
    if not sys.stderr.isatty():
        yield PlainReporter()
        return
    with Progress(
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
        spent = time.monotonic() - self._started
        left = spent * (self._total - self._done) / max(self._done - self._first, 1)
        self.say(f"{epoch_line(row)}  {_duration(left)} left")

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)  # noqa: T201


class LiveReporter:
    """A progress bar, with each epoch's line above it."""

    def __init__(self, progress: Progress) -> None:
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
        self.say(epoch_line(row))

    def say(self, text: str) -> None:
        self._progress.console.print(text, highlight=False)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
