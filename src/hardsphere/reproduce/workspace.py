"""Where runs are worked on: their weights and ledgers, so that what was interrupted goes on.

    work/<id>/              a run directory, and the ledgers of what is measured on it
    work/<id>.lock          held by the process that is at it
    work/failed/<name>.json what could not be done when it was last tried, and why

All of it may be thrown away: what is recorded (`hardsphere.reproduce.store`) needs no weights to go on from.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardsphere.errors import HardsphereError
from hardsphere.files import read_object, write_json, write_text
from hardsphere.reproduce.plan import Run
from hardsphere.reproduce.store import slug

TRAINED = "trained.json"  # beside the weights of a finished training: what there is to say about it


@dataclass(frozen=True)
class Workspace:
    """A directory of run directories."""

    path: Path

    @classmethod
    def of_results(cls, out: Path | str, work: Path | str | None = None) -> Workspace:
        """The place that is named, or the one beside the results."""
        return cls(Path(work) if work is not None else Path(out) / "work")

    def prepare(self) -> None:
        """Make it, invisible to git: weights and ledgers are no results."""
        try:
            write_text(self.path / ".gitignore", "*\n")
        except OSError as reason:
            raise HardsphereError(f"The directory '{self.path}' cannot be written ({reason}).") from None

    def of(self, run: Run) -> Path:
        """The run directory."""
        return self.path / run.id

    def lock(self, identity: str) -> Path:
        """The file that whoever works on a run or a group holds; see `claimed`."""
        return self.path / f"{identity}.lock"

    def begun(self, run: Run) -> bool:
        """Whether there are checkpoints, of a finished training or not."""
        return (self.of(run) / "checkpoints").is_dir()

    def trained(self, run: Run) -> bool:
        """Whether the weights of a finished training are there."""
        return (self.of(run) / TRAINED).exists() and self.begun(run)

    def note(self, run: Run) -> dict[str, Any]:
        """What there is to say about a finished training."""
        return read_object(self.of(run) / TRAINED)

    def leave_note(self, run: Run, facts: Mapping[str, Any]) -> None:
        """Say that a training is finished, last of all."""
        write_json(self.of(run) / TRAINED, dict(facts))

    def weights(self, run: Run) -> str | None:
        """The digest of the weights of a finished training, as far as they are there."""
        return str(self.note(run)["weights"]) if self.trained(run) else None

    def failures(self) -> dict[str, str]:
        """What could not be done when it was last tried, by whichever process, with the reason."""
        found = {}
        for file in sorted(self._failed.glob("*.json")):
            with suppress(FileNotFoundError):  # another process has just done it after all
                note = read_object(file)
                found[str(note.get("name"))] = str(note.get("reason"))
        return found

    def leave_failure(self, name: str, reason: str) -> None:
        """Say that something could not be done."""
        with suppress(OSError):  # perhaps for the same reason: a full disk
            write_json(self._failure(name), {"name": name, "reason": reason})

    def forget_failure(self, name: str) -> None:
        """It could be done, this time."""
        self._failure(name).unlink(missing_ok=True)

    @property
    def _failed(self) -> Path:
        return self.path / "failed"

    def _failure(self, name: str) -> Path:
        return self._failed / f"{slug(name)}.json"

    def drop_weights(self, run: Run) -> None:
        """Keep of a run directory only what is small: configuration, environment and metrics."""
        (self.of(run) / TRAINED).unlink(missing_ok=True)  # first: what is left must never look like a finished training
        for item in self.of(run).iterdir():
            if item.is_dir():
                shutil.rmtree(item)


@contextmanager
def claimed(file: Path) -> Iterator[bool]:
    """Whether some work is ours for as long as this lasts; false while another process is at it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        stream = file.open("w")
    except OSError as reason:
        raise HardsphereError(f"The directory '{file.parent}' cannot be written ({reason}).") from None
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
