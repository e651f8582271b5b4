"""The pages of speed under results/ say what was measured: they are rendered from the JSON beside them."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hardsphere.bench.chart import write_sweep
from hardsphere.bench.costs import AXES, sweep_costs

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


@pytest.fixture(scope="module")
def speed() -> ModuleType:
    spec = importlib.util.spec_from_file_location("speed", ROOT / "benchmarks" / "speed.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["speed"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["bench-training.md", "bench-evaluation.md"])
def test_a_page_is_what_was_measured(name: str, speed: ModuleType) -> None:
    assert (RESULTS / name).read_text() == speed.PAGES[name](RESULTS), "run: python benchmarks/speed.py render results"


def test_the_page_of_the_sweep_is_what_was_measured(tmp_path: Path) -> None:
    shutil.copy(RESULTS / "bench-sweep" / "points.jsonl", tmp_path)
    swept = sweep_costs(tmp_path, device=torch.device("cpu"))
    write_sweep(swept, AXES, tmp_path)
    assert not swept.missing
    assert (RESULTS / "bench-sweep" / "sweep.md").read_text() == (tmp_path / "sweep.md").read_text()
    laws, again = (json.loads((folder / "law.json").read_text()) for folder in (RESULTS / "bench-sweep", tmp_path))
    for axis, law in laws.items():
        assert law["coefficients"] == pytest.approx(again[axis]["coefficients"])
    assert "/tmp" not in (tmp_path / "points.jsonl").read_text()


def test_a_changed_figure_changes_its_page(speed: ModuleType, tmp_path: Path) -> None:
    for file in RESULTS.glob("bench-*.json"):
        shutil.copy(file, tmp_path)
    file = tmp_path / "bench-preactresnet18-128.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"images_per_second": 12_345.6}))
    before, after = (speed.training_page(folder) for folder in (RESULTS, tmp_path))
    assert "| 12,346 |" in after
    assert "| 12,346 |" not in before


def test_a_sweep_of_other_code_is_told_apart(speed: ModuleType, tmp_path: Path) -> None:
    """Laws of older code must not stand beside newer steps without a word."""
    folder = tmp_path / "bench-sweep"
    folder.mkdir()
    row = {"recipe": "cifar10/pgd-he", "model": "cnn-8", "batch": 64, "attack_steps": 10, "images_per_second": 2000.0}
    row |= {"environment": {"commit": "new", "source": "1"}}
    for commit, told in (("old", True), ("new", False)):
        point = {
            "setting": {"model": "cnn-8", "batch": 64, "attack_steps": 10},
            "step_seconds": 0.064,
            "gemm_share": 0.1,
        }
        point |= {
            "rounds_step_seconds": [0.064],
            "images_per_second": 1000.0,
            "tflops": 1.0,
            "first_steps_seconds": 1.0,
        }
        (folder / "points.jsonl").write_text(json.dumps(point | {"environment": {"commit": commit, "source": "1"}}))
        assert ("cnn-8 at batch 64 made 1,000 images/s (2,000)" in speed._growth(tmp_path, [row])) == told
        other = row | {"attack_steps": 1}
        assert "made" not in speed._growth(tmp_path, [other])


@pytest.mark.parametrize("file", sorted(RESULTS.glob("bench-*.json")), ids=lambda file: file.stem)
def test_a_figure_comes_with_its_command_machine_and_code(file: Path) -> None:
    found = json.loads(file.read_text())
    assert found["command"].startswith("hardsphere bench ")
    assert found["device"]
    assert found["environment"]["source"]
    assert found["environment"]["torch"]
    assert "/tmp" not in file.read_text()
    assert "/home" not in file.read_text()


def test_what_is_half_done_is_not_done(speed: ModuleType, tmp_path: Path) -> None:
    """An evaluation is saved before the reference begins; a file may have been cut off."""
    for file in RESULTS.glob("bench-*.json"):
        shutil.copy(file, tmp_path)
    for name, text in (
        (
            "eval-wrn-34-10",
            json.dumps(json.loads((RESULTS / "bench-eval-wrn-34-10.json").read_text()) | {"reference": None}),
        ),
        ("wrn-34-10-128", '{"images_per_sec'),
        ("heads-preactresnet18-128", "null"),
    ):
        assert speed.is_done(tmp_path, name)
        (tmp_path / f"bench-{name}.json").write_text(text)
        assert not speed.is_done(tmp_path, name)
        with pytest.raises(FileNotFoundError, match="measured to its end"):
            speed.read(tmp_path, name)


def test_figures_that_do_not_exist_are_told(speed: ModuleType) -> None:
    assert speed.unknown(["heads", "first", "sweep", "eval", "headz", "corrupt"]) == ["headz", "corrupt"]


def test_time_in_no_kernel_is_of_a_step_that_nobody_watched(speed: ModuleType) -> None:
    profile = {"busy_milliseconds": 9.0, "idle_share": 0.5}
    row = {"batch": 100, "images_per_second": 10_000.0, "profile": profile}
    assert speed._between_kernels(row) == pytest.approx(0.1)
    assert speed._between_kernels(row | {"profile": profile | {"busy_milliseconds": 11.0}}) == 0


def test_what_is_measured_is_not_measured_again(
    speed: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bench-fast-preactresnet18-128.json").write_text("{}")
    ran: list[list[str]] = []

    def run(command: list[str], **settings: Any) -> None:
        ran.append(command[3:])
        assert (settings["cwd"] / "data").resolve() == tmp_path
        if "--out" in command and "bench" in command:
            Path(command[-1]).write_text('{"reference": {}}')

    monkeypatch.setattr(speed.subprocess, "run", run)
    speed.measure(tmp_path, tmp_path, ["fast", "heads", "eval-wrn", "first"], None)
    verbs = [words[:2] for words in ran]
    assert verbs == [["bench", "train"]] * 3 + [["train", "cifar10/fast"], ["bench", "eval"]]
    again = len(ran)
    speed.measure(tmp_path, tmp_path, ["fast", "heads", "eval-wrn", "first"], None)
    assert len(ran) == again
    speed.measure(tmp_path, tmp_path, [], 0.0)
    assert len(ran) == again  # no time left
