"""Writes in the background, so that a fast device does not wait for a disk.

An epoch of FastAT takes a second on a large GPU, and its checkpoints as long again. So what is to be written is copied
to the host, and written while the next epoch is trained. The order is kept, each file appears as a whole, and no more
than one epoch's writing is ever outstanding.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any


class Writer:
    """Gathers work and does it in order in a thread of its own; what fails there is raised at the next call."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer")
        self._gathered: list[Callable[[], object]] = []
        self._under_way: Future[None] | None = None

    def later(self, function: Callable[..., object], *arguments: Any) -> None:
        """Add a call to what `begin` will begin; nobody else may change its arguments."""
        self._gathered.append(partial(function, *arguments))

    def begin(self) -> None:
        """Begin with what was gathered, once all before it is done."""
        self.wait()
        work, self._gathered = self._gathered, []
        self._under_way = self._thread.submit(_one_after_the_other, work)

    def check(self) -> None:
        """Raise what has failed by now, without waiting."""
        if self._under_way is not None and self._under_way.done():
            self.wait()

    def wait(self) -> None:
        """Wait until all that was begun is done."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def close(self) -> None:
        """Finish what was begun, and forget what was only gathered."""
        self._gathered = []
        try:
            self.wait()
        finally:
            self._thread.shutdown()


def _one_after_the_other(work: list[Callable[[], object]]) -> None:
    for one in work:
        one()
