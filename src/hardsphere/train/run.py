"""The run directory: configuration, environment, metrics and checkpoints of one training run."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import IO, Any

import torch
import yaml

from hardsphere.config import Config, flatten, from_dict, to_dict
from hardsphere.errors import HardsphereError
from hardsphere.files import appearing, leftovers, write_json, write_text
from hardsphere.runtime import environment


class RunDirectory:
    """One run's files. Opening it takes a lock, so that two processes never train into the same directory."""

    def __init__(self, path: Path, config: Config, *, resume: bool, device: torch.device) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.metrics_file = path / "metrics.jsonl"
        self.state_file = path / "checkpoints" / "last" / "state.safetensors"
        self.epoch_file = path / "checkpoints" / "last" / "epoch.safetensors"
        _check_vacant(path, self.config_file, resume)
        path.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(path)
        try:
            self._claim(config, device)
        except BaseException:
            self.close()
            raise

    def _claim(self, config: Config, device: torch.device) -> None:
        """Write down what this run is, or make sure that the run here is the same."""
        for folder in (self.path, *self.path.glob("checkpoints/**/")):
            for leftover in leftovers(folder):
                leftover.unlink()
        if self.config_file.exists():
            _check_same(self.path, read_config(self.config_file), config)
            return
        write_json(self.path / "environment.json", environment(device))
        write_text(self.config_file, yaml.safe_dump(to_dict(config), sort_keys=False))

    def close(self) -> None:
        """Give the lock back."""
        self._lock.close()

    def keep_epoch(self) -> None:
        """Keep the state at the end of this epoch beside those within the next, to roll back to.

        The state's file is never written to again, only replaced; so a second name for it does where there are links.
        """
        with appearing(self.epoch_file) as partial:
            try:
                partial.unlink()
                os.link(self.state_file, partial)
            except OSError:
                shutil.copyfile(self.state_file, partial)

    def metrics(self) -> list[dict[str, Any]]:
        """The rows logged so far; a half-written last line, left by a crash, is not one of them."""
        if not self.metrics_file.exists():
            return []
        rows = []
        for line in self.metrics_file.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return rows

    def rewind_metrics(self, epoch: int) -> None:
        """Forget rows of epochs that will be trained again."""
        rows = [row for row in self.metrics() if row["epoch"] <= epoch]
        write_text(self.metrics_file, "".join(json.dumps(row) + "\n" for row in rows))

    def log(self, row: dict[str, Any]) -> None:
        """Append one row."""
        with self.metrics_file.open("a") as stream:
            stream.write(json.dumps(row) + "\n")


def read_config(file: Path) -> Config:
    """The configuration saved in a run directory."""
    try:
        plain = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError):
        raise HardsphereError(f"'{file}' is no readable configuration.") from None
    if not isinstance(plain, dict):
        raise HardsphereError(f"'{file}' is no configuration.")
    return from_dict(plain)


def _check_vacant(path: Path, config_file: Path, resume: bool) -> None:
    if path.exists() and not path.is_dir():
        raise HardsphereError(f"'{path}' is a file, but --out names a directory.")
    if config_file.exists() and not resume:
        raise HardsphereError(f"'{path}' already holds a run: add --resume to go on with it, or name another --out.")
    if not config_file.exists() and path.is_dir():
        begun = {path / ".lock", path / "environment.json", *leftovers(path)}
        foreign = sorted(item.name for item in path.iterdir() if item not in begun)
        if foreign:
            raise HardsphereError(
                f"'{path}' is not empty and holds no run (it has '{foreign[0]}'): name another --out."
            )


def _check_same(path: Path, saved: Config, wanted: Config) -> None:
    before, now = flatten(saved), flatten(wanted)
    different = [key for key in before | now if before.get(key) != now.get(key)]
    if different:
        changes = ", ".join(f"{key} ({before.get(key)} there, {now.get(key)} now)" for key in different[:4])
        raise HardsphereError(f"'{path}' holds another run; it differs in {changes}. Name another --out.")


def _lock(path: Path) -> IO[str]:
    stream = (path / ".lock").open("w")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        stream.close()
        raise HardsphereError(f"Another process is training into '{path}' right now.") from None
    return stream
