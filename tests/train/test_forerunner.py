"""The process that compiles ahead: what it leaves in torch's cache, and that nothing depends on it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

from hardsphere.config import Config
from hardsphere.data import load
from hardsphere.recipes import recipe
from hardsphere.train import forerunner
from hardsphere.train.averaging import Average
from hardsphere.train.deployed import build_model
from hardsphere.train.forerunner import Forerunner, sent_ahead
from hardsphere.train.step import Stepper

CPU = torch.device("cpu")


def config(name: str = "pgd-he", **changes: str) -> Config:
    return recipe(f"digits/{name}", {"model": "cnn-4", "batch": "8", "attack.steps": "2", **changes})


# Trains one step, compiled as on a GPU, and prints how many of its update's graphs were in the cache, and were not.
TRAINING = """
import sys, torch
from torch._dynamo.utils import counters
from hardsphere.data import load, train_loader
from hardsphere.recipes import recipe
from hardsphere.train.averaging import make_average
from hardsphere.train.compiling import Compiler
from hardsphere.train.deployed import build_model
from hardsphere.train.step import Stepper, fast_learner

config = recipe(sys.argv[1], {"model": "cnn-4", "batch": "8", "attack.steps": "2", "precision": "bf16"})
data, device = load("digits"), torch.device("cpu")
model = build_model(config, data).train().to(memory_format=torch.channels_last)
stepper = Stepper(config, model, make_average(config, model), device, 1)
batch = next(train_loader(data.train, 8).epoch(0))
batch.x = batch.x.contiguous(memory_format=torch.channels_last)
learner = fast_learner(stepper.plain, "bf16", batch.x, Compiler(sys.exit), sys.exit)
real = stepper._update
def update(losses, *rest):
    counters.clear()
    real(losses, *rest)
    print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
stepper._update = update
stepper._train(learner, batch, torch.tensor(0), False)
"""


@pytest.mark.check
@pytest.mark.parametrize("name", ["pgd-he", "trades-mhe"])
def test_training_finds_what_was_compiled_ahead(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes forwards and backwards, and the watch over the loss."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    said: list[str] = []
    with sent_ahead(config(name, precision="bf16"), load("digits"), CPU, said.append) as wait:
        assert wait is not None
        wait()
    assert said == []
    command = [sys.executable, "-c", TRAINING, f"digits/{name}"]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "3 0\n"
    with sent_ahead(config(name, precision="bf16"), load("digits"), CPU) as again:
        assert again is None  # there is nothing left to do


class Process:
    """A stand-in for another process."""

    def __init__(self, code: int | None) -> None:
        self.code = code
        self.killed = False

    def wait(self, timeout: float | None = None) -> int:
        if self.code is None and not self.killed:
            raise subprocess.TimeoutExpired("", timeout or 0.0)
        return self.code or 0

    def kill(self) -> None:
        self.killed = True


@pytest.mark.parametrize(
    ("code", "wrote", "reason"),
    [
        (0, "a warning", None),
        (1, "Traceback\n  ...\nValueError: no such device.\n\n", "ValueError: no such device."),
        (1, "", "it gave no reason."),
        (None, "", "it took more than 300 seconds."),
    ],
)
def test_a_forerunner_that_fails_or_hangs_is_said_and_left_behind(
    code: int | None, wrote: str, reason: str | None
) -> None:
    said: list[str] = []
    process: Any = Process(code)
    Forerunner(process, BytesIO(wrote.encode()), said.append).wait()
    expected = f"The update could not be compiled ahead, so the first step takes longer: {reason}"
    assert said == ([expected] if reason else [])
    assert process.killed == (code is None)


def test_one_that_cannot_even_start_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(forerunner, "_START", "import nothing_of_that_name")
    said: list[str] = []
    with sent_ahead(config(), load("digits"), CPU, said.append) as wait:
        assert wait is not None
        wait()
    assert len(said) == 1
    assert said[0].endswith("ModuleNotFoundError: No module named 'nothing_of_that_name'.")


def test_without_room_for_another_process_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(subprocess, "Popen", no_room)
    said: list[str] = []
    with sent_ahead(config(), load("digits"), CPU, said.append) as wait:
        assert wait is None
    assert len(said) == 1
    assert said[0].endswith("Resource temporarily unavailable.")


def test_it_ends_with_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(forerunner, "_START", "import time; time.sleep(600)")
    sent: list[subprocess.Popen[bytes]] = []
    real = forerunner._send
    monkeypatch.setattr(forerunner, "_send", lambda *job: sent.append(real(*job)) or sent[-1])
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), sent_ahead(config(), load("digits"), CPU):
        raise KeyboardInterrupt
    assert sent[0].returncode is not None
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("asked", "cores", "worth"),
    [
        (config(), 8, True),
        (config(), 2, False),
        (config("trades"), 8, True),
        (config("free"), 8, False),  # its attack is its update
        (config("standard"), 8, False),  # it has no attack
    ],
)
def test_it_is_sent_only_where_it_helps(
    asked: Config, cores: int, worth: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(forerunner, "_START", "")
    with sent_ahead(asked, load("digits"), CPU) as wait:
        assert (wait is not None) == worth


def test_a_mark_tells_updates_apart() -> None:
    """By what their graphs depend on; the learning rate is not in a graph."""

    def mark(asked: Config) -> str:
        return forerunner._mark({"description": forerunner.describe(asked, load("digits"), None), "device": "cpu"}).name

    assert mark(config()) == mark(config(lr="0.7", epochs="3", seed="5"))
    others = [
        config(batch="16"),
        config("pgd"),
        config("trades-he"),
        config(label_smoothing="0.1"),
        config(model="mlp"),
    ]
    assert len({mark(asked) for asked in [config(), *others]}) == 1 + len(others)


def test_the_first_update_waits() -> None:
    asked, waits = config(), []
    data = load("digits")
    model = build_model(asked, data).train()
    stepper = Stepper(asked, model, Average(model), CPU, 1, wait_for_update=lambda: waits.append(stepper.clock.item()))
    description = forerunner.describe(asked, data, None)
    for index in range(3):
        stepper.step(forerunner._batch(asked, description, CPU), 0, index)
    assert waits == [0]
