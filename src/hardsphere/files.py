"""Files that are either the old version or the new one, never half of each."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from hardsphere.errors import HardsphereError

_PARTIAL = re.compile(r"\..+\.\d+\.tmp")


@contextmanager
def appearing(target: Path, sync: bool = True) -> Iterator[Path]:
    """A temporary path whose file takes the place of ``target`` in one step, once it is complete.

    Args:
        sync: wait until it is on the disk. For millions of small files that takes hours.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    with partial.open("wb") as held:
        with suppress(OSError):  # where there are no locks, a leftover may be taken for one
            _lock(held)
        try:
            yield partial
            if sync:
                _sync(partial)
            partial.replace(target)
            if sync:
                _sync(target.parent)  # the rename itself must survive a power cut
        finally:
            partial.unlink(missing_ok=True)


def leftovers(folder: Path) -> list[Path]:
    """What processes that were killed while writing have left in a folder; one at work holds its file."""
    return [file for file in folder.glob(".*.tmp") if _PARTIAL.fullmatch(file.name) and not _is_held(file)]


def _is_held(file: Path) -> bool:
    try:
        with file.open("rb") as seen:
            _lock(seen)
    except OSError:  # another process has it, or has just finished it
        return True
    return False


def _lock(stream: IO[bytes]) -> None:
    """Hold a file until it is closed, or refuse where another process does; the lock of a killed process is gone."""
    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


def write_text(file: Path, text: str) -> None:
    """Replace a file's text atomically."""
    with appearing(file) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(file: Path, content: Any) -> None:
    """Replace a JSON file atomically."""
    write_text(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_object(file: Path) -> dict[str, Any]:
    """A JSON file that holds an object; one sentence if it is damaged."""
    return _object(file.read_text(encoding="utf-8", errors="replace"), file)


def read_objects(file: Path) -> list[dict[str, Any]]:
    """The lines of a file, each of them an object in JSON."""
    return [_object(line, file) for line in file.read_text(encoding="utf-8", errors="replace").splitlines()]


def _object(text: str, file: Path) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise HardsphereError(f"'{file}' is damaged: it does not hold what was written there.")
    return found


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
