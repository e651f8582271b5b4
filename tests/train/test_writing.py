"""Writing in the background: in order, never more than one piece ahead, and failures are told."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import hardsphere.train.loop as loop
from hardsphere.recipes import recipe
from hardsphere.train import load, train
from hardsphere.train.writing import Writer


def test_the_order_is_kept_and_nothing_is_written_before_it_is_begun() -> None:
    writer, done = Writer(), []
    for value in range(3):
        writer.later(done.append, value)
    assert done == []
    writer.begin()
    writer.later(done.append, 3)
    writer.wait()
    assert done == [0, 1, 2]
    writer.begin()
    writer.close()
    assert done == [0, 1, 2, 3]


def test_the_caller_goes_on_meanwhile_but_not_further_ahead() -> None:
    writer, gate, done = Writer(), threading.Event(), []
    writer.later(gate.wait, 60)
    writer.later(done.append, "first")
    writer.begin()
    writer.check()  # nothing has failed, and it does not wait
    assert done == []
    writer.later(done.append, "second")
    threading.Timer(0.05, gate.set).start()
    writer.begin()  # waits for the first piece
    assert done[0] == "first"
    writer.close()
    assert done == ["first", "second"]


def test_what_was_only_gathered_is_forgotten_at_the_end() -> None:
    writer, done = Writer(), []
    writer.later(done.append, 1)
    writer.close()
    assert done == []


@pytest.mark.parametrize("call", ["begin", "wait", "close"])
def test_a_failure_is_raised_once_and_stops_what_came_with_it(call: str) -> None:
    writer, done = Writer(), []

    def fail() -> None:
        raise OSError(28, "No space left on device")

    writer.later(fail)
    writer.later(done.append, 1)
    writer.begin()
    with pytest.raises(OSError, match="No space left"):
        getattr(writer, call)()
    assert done == []
    writer.close()


def test_a_failure_is_noticed_within_the_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full after the first epoch: the second does not end."""
    original, seen = loop.Stepper.step, []

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def watched(self: Any, batch: Any, epoch: int, index: int) -> None:
        seen.append((epoch, index))
        if epoch == 1 and index == 0:
            trainer_writers[0]._under_way.exception()  # let it fail before the next batch
        original(self, batch, epoch, index)

    trainer_writers: list[Writer] = []
    begin = loop.Writer.begin

    def begun(self: Writer) -> None:
        trainer_writers.append(self)
        begin(self)

    monkeypatch.setattr(loop.Writer, "begin", begun)
    monkeypatch.setattr(loop.Stepper, "step", watched)
    config = recipe("digits/standard", {"epochs": "3", "model": "cnn-2", "batch": "128"})
    with monkeypatch.context() as patch:
        patch.setattr(loop, "write_tensors", full)
        with pytest.raises(OSError, match="No space left"):
            train(config, tmp_path / "run")
    assert seen[-1] == (1, 0)
    monkeypatch.setattr(loop.Stepper, "step", original)
    train(config, tmp_path / "run", resume=True)
    assert load(tmp_path / "run").selection.startswith("best of epochs 1 to 3")
