"""Whole runs on digits: they end robust, they survive being killed, and they refuse what cannot work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import hardsphere.train.loop as loop
from hardsphere.attacks.losses import margin
from hardsphere.attacks.pgd import pgd
from hardsphere.data import load as load_data
from hardsphere.data import to_float, train_loader
from hardsphere.errors import HardsphereError
from hardsphere.noise import Noise
from hardsphere.recipes import recipe
from hardsphere.threat import Ball
from hardsphere.train import load, train
from hardsphere.train.averaging import make_average
from hardsphere.train.capture import Captured
from hardsphere.train.deployed import build_model
from hardsphere.train.tensors import read_tensors

SHORT = {"epochs": "2", "model": "cnn-4", "batch": "128", "attack.steps": "2"}


def short(name: str = "digits/pgd-he", **changes: str) -> Any:
    return recipe(name, SHORT | {key.replace("__", "."): value for key, value in changes.items()})


def metrics(path: Path) -> list[dict[str, Any]]:
    """The logged rows without what the clock measured."""
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("seconds", "images_per_second")} for row in rows]


def final_weights(path: Path) -> dict[str, torch.Tensor]:
    return read_tensors(path / "checkpoints" / "last" / "state.safetensors")[0]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def robust_accuracy(path: Path) -> tuple[float, float]:
    """Clean and margin-PGD-20 accuracy at eps 0.2 on the test digits, at the deployed scale."""
    model = load(path).model
    test = load_data("digits").test
    x, y = to_float(test.pixels), test.labels
    attacked = pgd(model, x, y, Ball("linf", 0.2), noise=Noise(0, test.ids), steps=20, loss=margin)
    with torch.no_grad():
        clean = (model(x).argmax(1) == y).float().mean().item()
        robust = (model(attacked.x_adv).argmax(1) == y).float().mean().item()
    return clean, robust


@pytest.fixture(scope="module")
def standard(tmp_path_factory: pytest.TempPathFactory) -> tuple[float, float]:
    path = tmp_path_factory.mktemp("standard") / "run"
    train(recipe("digits/standard", {"epochs": "10"}), path)
    return robust_accuracy(path)


# Those that take longest are left to `make check`.
FRAMEWORKS = [
    "pgd",
    "fast-mhe",
    *(pytest.param(name, marks=pytest.mark.check) for name in ("alp-he", "trades-he", "free-he")),
]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_framework_ends_more_robust_than_standard_training(
    name: str, standard: tuple[float, float], tmp_path: Path
) -> None:
    train(recipe(f"digits/{name}", {"epochs": "8"}), tmp_path / "run")
    clean, robust = robust_accuracy(tmp_path / "run")
    assert clean > 0.85
    assert robust > standard[1] + 0.2


@pytest.mark.check
def test_the_promised_numbers(standard: tuple[float, float], tmp_path: Path) -> None:
    """`digits/pgd-he` as it is: at least 95 % clean, at least 25 points above standard training."""
    train(recipe("digits/pgd-he"), tmp_path / "run")
    clean, robust = robust_accuracy(tmp_path / "run")
    assert clean >= 0.95
    assert robust >= standard[1] + 0.25


def test_a_run_directory_has_everything(tmp_path: Path) -> None:
    path = tmp_path / "run"
    trained = train(short(), path)
    assert trained.position.finished == "all 2 epochs are done"
    names = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert {"config.yaml", "environment.json", "metrics.jsonl"} <= names
    assert {f"checkpoints/{name}/model.safetensors" for name in ("best", "last")} <= names
    assert any(name.startswith("tensorboard/events") for name in names)
    assert not [name for name in names if name.endswith(".tmp")]
    environment = json.loads((path / "environment.json").read_text())
    assert len(environment["source"]) == 16
    rows = metrics(path)
    assert [row["epoch"] for row in rows] == [1, 2]
    assert {"loss", "lr", "adversarial_accuracy", "validation_clean", "validation_robust"} <= rows[0].keys()
    deployed = load(path)
    assert deployed.selection.startswith("best of epochs 1 to 2, by margin-PGD-")
    assert deployed.class_names == tuple("0123456789")
    assert deployed.ball == Ball("linf", 0.2)


def test_the_rate_is_that_after_the_preparing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the first epoch begins with compiling, which says nothing about the epochs to come.

    Nor do the images that were trained on meanwhile: here, three batches and half a second.
    """
    monkeypatch.setattr(loop.Stepper, "recorded_at", None)
    step = loop.Stepper.step

    def recorded(self: Any, batch: Any, epoch: int, index: int) -> None:
        if (epoch, index) == (0, 3):
            time.sleep(0.5)
            monkeypatch.setattr(loop.Stepper, "recorded_at", time.perf_counter())
        step(self, batch, epoch, index)

    monkeypatch.setattr(loop.Stepper, "step", recorded)
    data, config = load_data("digits"), short("digits/standard", epochs="2")
    train(config, tmp_path / "run")
    assert data.train is not None
    batches = len(train_loader(data.train, config.batch))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["preparing_seconds"] > 0.5
    assert rows[1]["preparing_seconds"] == 0
    for row, counted in zip(rows, (batches - 3, batches), strict=True):
        spent = row["seconds"] - row["preparing_seconds"]
        assert row["images_per_second"] * spent == pytest.approx(len(data.train) * counted / batches)


@pytest.mark.parametrize("repeatable", [False, True])
def test_torch_is_left_as_it_was(repeatable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn, seen = torch.backends.cudnn, []
    before = cudnn.deterministic, cudnn.benchmark
    step = loop.Stepper.step

    def watched(self: Any, *arguments: Any) -> None:
        seen.append((cudnn.deterministic, cudnn.benchmark))
        step(self, *arguments)

    monkeypatch.setattr(loop.Stepper, "step", watched)
    train(short("digits/standard", epochs="1", repeatable=str(repeatable).lower()), tmp_path / "run")
    assert set(seen) == {(repeatable, not repeatable)}
    assert (cudnn.deterministic, cudnn.benchmark) == before


def test_what_was_changed_for_nothing_is_said(tmp_path: Path) -> None:
    said: list[str] = []

    class Listener(loop.Silence):
        def say(self, text: str) -> None:
            said.append(text)

    train(recipe("digits/standard", {"attack.steps": 3, "epochs": 1}), tmp_path / "run", reporter=Listener())
    assert "attack.steps was changed, but nothing in this training asks for it." in said


def test_a_step_that_is_recorded_says_when() -> None:
    model = build_model(short(), load_data("digits"))
    stepper = loop.Stepper(short(), model, make_average(short(), model), torch.device("cpu"), 5)
    assert stepper.recorded_at is None  # nothing is compiled on a CPU
    stepper.captured = Captured(lambda *_: None, lambda text: None)
    assert stepper.recorded_at is None
    stepper.captured.recorded_at = 70.0
    assert stepper.recorded_at == 70


def test_the_best_checkpoint_ends_as_the_best_of_all_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first epoch is the best: its weights are kept as they were, and say in the end that three were judged."""
    path, found, seen = tmp_path / "run", iter([(0.9, 0.8), (0.9, 0.5), (0.9, 0.6)]), []

    def judge(*_: object, **__: object) -> tuple[float, float]:
        if (path / "checkpoints" / "best").exists():
            seen.append(load(path))
        return next(found)

    monkeypatch.setattr(loop, "held_out_accuracy", judge)
    begin = loop.Writer.begin
    monkeypatch.setattr(loop.Writer, "begin", lambda self: (begin(self), self.wait()))
    train(short("digits/pgd", epochs="3"), path)
    early, best = seen[0], load(path)
    assert early.selection.startswith("best of epochs 1 to 1, by margin-PGD-")
    assert best.selection.startswith("best of epochs 1 to 3, by margin-PGD-")
    assert json.loads((path / "checkpoints" / "best" / "meta.json").read_text()) == best.meta
    assert best.meta | {"selection": ""} == early.meta | {"selection": ""}
    assert all(torch.equal(value, early.model.state_dict()[name]) for name, value in best.model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("digits/pgd-he", {"ema__decay": "0.9"}),
        ("digits/free", {"objective__replays": "2"}),
        ("digits/trades-mhe", {"awp__gamma": "0.01", "swa__start": "1"}),
    ],
)
def test_stopping_inside_an_epoch_changes_nothing(
    name: str, changes: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupt the run after every few batches, with a checkpoint after each batch: the end is bit-identical."""
    config = short(name, **changes)
    train(config, tmp_path / "whole")

    class Interrupted(Exception):
        pass

    original = loop.Stepper.step
    left = 0

    def limited(self: Any, batch: Any, epoch: int, index: int) -> None:
        nonlocal left
        if left == 0:
            raise Interrupted
        left -= 1
        original(self, batch, epoch, index)

    monkeypatch.setattr(loop.Stepper, "step", limited)
    interruptions = 0
    while True:
        left = 7
        try:
            trained = train(config, tmp_path / "pieces", resume=True, save_every=0.0)
            break
        except Interrupted:
            interruptions += 1
    assert interruptions >= 2
    assert trained.position.finished
    assert same(final_weights(tmp_path / "whole"), final_weights(tmp_path / "pieces"))
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "pieces")
    best = [load(tmp_path / name).model.state_dict() for name in ("whole", "pieces")]
    assert same(*best)


@pytest.mark.parametrize("epoch", [1, 2])
def test_dying_between_the_metrics_and_the_checkpoint_loses_neither(
    epoch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(short(), tmp_path / "whole")

    class Died(Exception):
        pass

    original = loop.write_tensors

    def dying(file: Path, tensors: Any, meta: Any) -> None:
        if meta["position"]["epoch"] == epoch and meta["position"]["batch"] == 0:
            raise Died
        original(file, tensors, meta)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "write_tensors", dying)
        with pytest.raises(Died):
            train(short(), tmp_path / "died")
    assert len(metrics(tmp_path / "died")) == epoch
    train(short(), tmp_path / "died", resume=True)
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "died")
    assert same(final_weights(tmp_path / "whole"), final_weights(tmp_path / "died"))


def command(out: Path, *words: str) -> list[str]:
    settings = ["epochs=3", "model=cnn-4", "attack.steps=2", "ema.decay=0.9"]
    return [sys.executable, "-m", "hardsphere", "train", "digits/free-he", *settings, "--out", str(out), *words]


@pytest.mark.check
def test_killed_at_random_moments_it_ends_the_same(tmp_path: Path) -> None:
    """SIGKILL, then the same command with --resume, until it is done."""
    subprocess.run(command(tmp_path / "whole"), check=True, capture_output=True)
    killed = 0
    for seconds in (2.0, 2.9, 3.7, 4.6, 6.0):
        process = subprocess.Popen(
            command(tmp_path / "killed", "--resume"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(seconds)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            killed += 1
        process.wait()
    assert killed >= 1
    subprocess.run(command(tmp_path / "killed", "--resume"), check=True, capture_output=True)
    assert same(final_weights(tmp_path / "whole"), final_weights(tmp_path / "killed"))
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "killed")
    again = subprocess.run(command(tmp_path / "killed", "--resume"), check=True, capture_output=True, text=True)
    assert "already finished" in again.stdout
    assert list((tmp_path / "killed").rglob("*.tmp")) == []


def test_what_a_killed_process_had_half_written_is_removed(tmp_path: Path) -> None:
    """Wherever it was killed, before its configuration was there or later, and whatever it was writing."""
    path = tmp_path / "run"
    path.mkdir()
    for early in (".lock", "environment.json", ".environment.json.7.tmp", ".config.yaml.7.tmp"):
        (path / early).write_text("{")
    train(short(), path, resume=True)
    assert list(path.rglob("*.tmp")) == []
    halves = [".metrics.jsonl.7.tmp", "checkpoints/.x.7.tmp", "checkpoints/last/.state.safetensors.7.tmp"]
    for late in halves:
        (path / late).write_text("{")
    (path / "evaluation").mkdir()
    (path / "evaluation" / ".card.json.7.tmp").write_text("{")  # a judgement's own, which may be at work right now
    assert train(short(), path, resume=True).already
    assert [file.name for file in path.rglob("*.tmp")] == [".card.json.7.tmp"]


def test_resume_with_nothing_saved_starts_afresh(tmp_path: Path) -> None:
    assert not train(short(), tmp_path / "run", resume=True).already
    assert train(short(), tmp_path / "run", resume=True).already


def test_a_directory_with_another_run_is_left_alone(tmp_path: Path) -> None:
    train(short(), tmp_path / "run")
    before = final_weights(tmp_path / "run")
    with pytest.raises(HardsphereError, match="already holds a run"):
        train(short(), tmp_path / "run")
    with pytest.raises(HardsphereError, match=r"differs in seed \(0 there, 1 now\)"):
        train(short(seed="1"), tmp_path / "run", resume=True)
    assert same(before, final_weights(tmp_path / "run"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(HardsphereError, match=r"thesis\.txt"):
        train(short(), tmp_path / "full")
    with pytest.raises(HardsphereError, match="is a file"):
        train(short(), tmp_path / "full" / "thesis.txt")


def test_two_processes_cannot_share_a_directory(tmp_path: Path) -> None:
    import fcntl

    train(short(), tmp_path / "run")
    with (tmp_path / "run" / ".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(HardsphereError, match="Another process"):
            train(short(), tmp_path / "run", resume=True)


def test_a_mistake_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(HardsphereError, match="Did you mean"):
        train(short(model="wnr-34-10"), tmp_path / "run")
    with pytest.raises(HardsphereError, match="There is no"):
        train(short(init=str(tmp_path / "none.safetensors")), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_truncated_checkpoint_is_named(tmp_path: Path) -> None:
    train(short(), tmp_path / "run")
    for file in (tmp_path / "run" / "checkpoints").rglob("*.safetensors"):
        os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(HardsphereError, match="truncated or damaged"):
        load(tmp_path / "run")
    with pytest.raises(HardsphereError, match="truncated or damaged"):
        train(short(), tmp_path / "run", resume=True)
    with pytest.raises(HardsphereError, match="no run directory"):
        load(tmp_path / "nowhere")
    with pytest.raises(HardsphereError, match="holds no trained model"):
        load(tmp_path)


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hardsphere.objectives.base import Losses
    from hardsphere.objectives.pgd import PGDTraining

    original = PGDTraining.losses
    calls = 0

    def poisoned(self: Any, learner: Any, batch: Any, x_adv: torch.Tensor) -> Losses:
        nonlocal calls
        calls += 1
        result = original(self, learner, batch, x_adv)
        return Losses(result.per_sample * float("nan")) if calls == 15 else result

    monkeypatch.setattr(PGDTraining, "losses", poisoned)
    with pytest.raises(HardsphereError, match=r"not finite at step 15 \(epoch 2, batch"):
        train(short(), tmp_path / "run")
    assert read_tensors(tmp_path / "run" / "checkpoints" / "last" / "state.safetensors")[1]["position"]["epoch"] == 1
    assert all(value.isfinite().all() for value in load(tmp_path / "run").model.state_dict().values())


def _no_links(*_: object) -> None:
    raise OSError(95, "Operation not supported")


@pytest.mark.parametrize("save_every", [600.0, 0.0], ids=["checkpoints after epochs", "and after each batch"])
@pytest.mark.parametrize("links", [True, False], ids=["on a disk with links", "without"])
def test_collapse_is_rolled_back(
    links: bool, save_every: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PGD accuracy falls from 60 % to 10 %: the run ends with the weights of the epoch before."""
    if not links:
        monkeypatch.setattr(os, "link", _no_links)
    kept: list[dict[str, torch.Tensor]] = []
    probes = iter([0.5, 0.6, 0.1])

    def probe(model: torch.nn.Module, *_: object) -> float:
        kept.append({name: value.clone() for name, value in model.state_dict().items()})
        return next(probes)

    monkeypatch.setattr(loop, "pgd_accuracy", probe)
    config = short("digits/fast", epochs="5", schedule="constant")
    said: list[str] = []
    watch = loop.Silence()
    watch.say = said.append  # type: ignore[method-assign]
    trained = train(config, tmp_path / "five", reporter=watch, save_every=save_every)
    assert trained.position.finished == "rolled back to epoch 2: PGD accuracy collapsed in epoch 3"
    assert trained.position.epoch == 2
    assert load(tmp_path / "five").selection.startswith("best of epochs 1 to 2, by margin-PGD-")
    assert "collapsed in epoch 3" in said[0]
    weights = {name.removeprefix("model."): value for name, value in final_weights(tmp_path / "five").items()}
    assert all(torch.equal(weights[name], value) for name, value in kept[1].items())
    assert not all(torch.equal(weights[name], value) for name, value in kept[2].items())
    assert train(config, tmp_path / "five", resume=True).already


def test_init_with_a_new_head_warms_the_head_alone(tmp_path: Path) -> None:
    train(short("digits/standard"), tmp_path / "old")
    weights = tmp_path / "old" / "checkpoints" / "last" / "model.safetensors"
    before = read_tensors(weights)[0]
    config = short("digits/pgd-he", init=str(weights), init_warmup="2")
    train(config, tmp_path / "new")
    after = read_tensors(tmp_path / "new" / "checkpoints" / "last" / "model.safetensors")[0]
    shared = [name for name in before if name in after and "fc" not in name and "linear" not in name]
    assert len(shared) > 4
    changed = [name for name in shared if not torch.equal(before[name], after[name])]
    assert changed == []
    train(short("digits/pgd-he", init=str(weights)), tmp_path / "all")
    moved = read_tensors(tmp_path / "all" / "checkpoints" / "last" / "model.safetensors")[0]
    assert any(not torch.equal(before[name], moved[name]) for name in shared)
