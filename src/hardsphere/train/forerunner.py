"""A second process that compiles a step's update while this one compiles its attack.

torch's compiler uses one core, and a step has two large graphs. The forerunner builds a network of the same shape and
updates it once, without attacking it; what is compiled for that stays in torch's cache on disk, where this process
finds it a moment later. Whatever goes wrong there costs time and nothing else: this process then compiles by itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from hardsphere.config import Config, from_dict
from hardsphere.data import Batch, DataSet
from hardsphere.noise import Noise
from hardsphere.objectives import Learner, Objective
from hardsphere.objectives.standard import Standard
from hardsphere.runtime import end_with, expect_compiling, source_hash, wake
from hardsphere.train.averaging import Average
from hardsphere.train.compiling import Compiler, cache_place
from hardsphere.train.deployed import describe, rebuild
from hardsphere.train.step import Stepper, compiled_twin

# Fewer cores than this are busy enough with one compiler and its helpers.
_CORES = 4

# How much of the GPU's memory the forerunner may take from the training that it serves.
_MEMORY = 0.25

_PATIENCE = 300.0  # seconds, beyond which something must be wrong

_NOT_AHEAD = "The update could not be compiled ahead, so the first step takes longer"

_START = "from hardsphere.train.forerunner import main; main()"

# What the update's graph depends on; what is forgotten here makes a first step slower, and nothing worse.
_SHAPING = ("model", "head", "batch", "precision", "framework", "objective", "label_smoothing", "data")

Job = Mapping[str, Any]


@dataclass(frozen=True)
class Forerunner:
    """The process that compiles ahead.

    Attributes:
        complaints: what it wrote on standard error.
        say: told if it failed, and why.
    """

    process: subprocess.Popen[bytes]
    complaints: IO[bytes]
    say: Callable[[str], None]

    def wait(self) -> None:
        """Wait until it is done, or has failed."""
        try:
            reason = self._last_words() if self.process.wait(_PATIENCE) else ""
        except subprocess.TimeoutExpired:
            self.process.kill()
            reason = f"it took more than {_PATIENCE:.0f} seconds"
        if reason:
            self.say(f"{_NOT_AHEAD}: {reason}.")

    def stop(self) -> None:
        """End it, done or not."""
        self.process.kill()
        self.process.wait()

    def _last_words(self) -> str:
        self.complaints.seek(0)
        lines = self.complaints.read().decode(errors="replace").split("\n")
        return next((line.strip().rstrip(".") for line in reversed(lines) if line.strip()), "it gave no reason")


@contextmanager
def sent_ahead(
    config: Config, data: DataSet, device: torch.device, say: Callable[[str], None] = lambda text: None
) -> Iterator[Callable[[], None] | None]:
    """A forerunner for a training that is about to begin: what waits for it, or none if there is nothing to gain."""
    job = {"description": describe(config, data, None), "device": str(device), "parent": os.getpid()}
    wait = None
    with ExitStack() as until_the_end:
        try:
            if _is_worth_it(config) and not _mark(job).exists():
                complaints = until_the_end.enter_context(tempfile.TemporaryFile())
                forerunner = Forerunner(_send(job, complaints), complaints, say)
                until_the_end.callback(forerunner.stop)
                wait = forerunner.wait
        except OSError as reason:  # no more processes, or no place for its complaints
            say(f"{_NOT_AHEAD}: {reason}.")
        yield wait


def _is_worth_it(config: Config) -> bool:
    """Whether attack and update are two graphs, the update is what a rehearsal compiles, and there are cores for it."""
    objective = config.objective
    two_graphs = type(objective).step is Objective.step and not isinstance(objective, Standard)
    return two_graphs and config.init_warmup == 0 and (os.cpu_count() or 1) >= _CORES


def _mark(job: Job) -> Path:
    """The file beside torch's cache that says that an update of this shape was compiled before."""
    description = job["description"]
    shape = {key: description[key] for key in ("class_names", "shape", "mean", "std")}
    shape |= {key: description["config"].get(key) for key in _SHAPING}
    text = json.dumps([shape, job["device"], source_hash(), torch.__version__], sort_keys=True)
    return cache_place() / "hardsphere" / sha256(text.encode()).hexdigest()[:16]


def _send(job: Job, complaints: IO[bytes]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", _START], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=complaints
    )
    threading.Thread(target=_hand_over, args=(job, process.stdin)).start()
    return process


def _hand_over(job: Job, to: IO[bytes]) -> None:
    """Tell the forerunner what to do, once this process is on the device: some GPUs take one process and no other."""
    with suppress(BrokenPipeError), to:  # broken: it has failed already, and `wait` says so
        wake(torch.device(job["device"]))
        to.write(json.dumps(job).encode())


# ---------------------------------------------------------------------------------------------------------------------
# In the other process
# ---------------------------------------------------------------------------------------------------------------------


def main() -> None:
    """Read the job from standard input, do it, and leave a mark."""
    job = json.load(sys.stdin)
    end_with(job["parent"])
    rehearse(job["description"], torch.device(job["device"]))
    mark = _mark(job)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()


def rehearse(description: Job, device: torch.device) -> None:
    """Compile the update of a training, by updating a network of its shape once."""
    config = from_dict(description["config"])
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
        torch.cuda.set_per_process_memory_fraction(_MEMORY)
    expect_compiling(device)
    model = rebuild(description).to(device).train()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    stepper = Stepper(replace(config, objective=_unattacked(config.objective)), model, Average(model), device, 1)
    learner = compiled_twin(stepper.plain, Compiler())
    batch = _batch(config, description, device)
    stepper._train(learner, batch, torch.zeros((), dtype=torch.int64, device=device), awp=False)


def _unattacked(objective: Objective) -> Objective:
    """The same framework, whose adversary leaves the images as they are; as a copy, for an attack's are others."""

    def craft(self: Objective, learner: Learner, batch: Batch, noise: Noise) -> Tensor:
        return batch.x.clone()

    rehearsed: Objective = type("Rehearsed", (type(objective),), {"craft": craft})(**vars(objective))
    return rehearsed


def _batch(config: Config, description: Job, device: torch.device) -> Batch:
    """A batch such as the loader's."""
    size, classes = config.batch, len(description["class_names"])
    x = torch.rand(size, *description["shape"], device=device).contiguous(memory_format=torch.channels_last)
    y = torch.arange(size, device=device) % classes
    mixed = torch.nn.functional.one_hot(y, classes).float() if config.data.cutmix else y
    return Batch(x, mixed, torch.arange(size, device=device))
