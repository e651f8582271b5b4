"""The same command in several processes at once: each takes the runs that no other has taken.

Much of judging waits for the host, and a small network leaves room on a large GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import typer

from hardsphere.runtime import end_with, sharing_cores

# Tells a process that it was started beside another, and should start none itself.
_BESIDE = "HARDSPHERE_BESIDE"

# By whom: asked itself, it might ask too late, when that one is gone.
_STARTER = "HARDSPHERE_STARTER"

_PATIENCE = 60.0  # seconds that an interrupted process has to finish what it writes


@contextmanager
def beside(count: int) -> Iterator[Others]:
    """So many processes beside this one, from their start until they end; they end with this one, whatever ends it."""
    others = Others(count)
    if _BESIDE in os.environ:
        end_with(int(os.environ[_STARTER]))
    try:
        with sharing_cores(count + 1):
            yield others
        for sentence in others.wait():
            typer.echo(sentence, err=True)
    finally:
        others.stop()


@dataclass
class Others:
    """The processes beside this one."""

    count: int
    logs: Path = Path()
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, logs: Path) -> None:
        """Start the command that was typed so many times more; what they say goes into a folder."""
        if _BESIDE in os.environ:
            return
        self.logs = logs
        for number in range(2, self.count + 2):
            with self._log(number).open("wb") as log:
                self.running.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "hardsphere", *sys.argv[1:]],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, _BESIDE: str(number), _STARTER: str(os.getpid())},
                    )
                )

    def wait(self) -> list[str]:
        """Wait until all have ended; a sentence about each that ended badly."""
        return [
            f"Process {number} ended with exit code {code}: see '{self._log(number)}'."
            for number, code in enumerate([one.wait() for one in self.running], start=2)
            if code
        ]

    def stop(self) -> None:
        """End those that are still running; what they have finished is recorded."""
        for one in self.running:
            with suppress(ProcessLookupError):
                one.terminate()
        for one in self.running:
            with suppress(subprocess.TimeoutExpired):
                one.wait(_PATIENCE)

    def _log(self, number: int) -> Path:
        return self.logs / f"process-{number}.log"
