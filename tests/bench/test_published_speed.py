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


@pytest.mark.parametrize("file", sorted(RESULTS.glob("bench-*.json")), ids=lambda file: file.stem)
def test_a_figure_comes_with_its_command_machine_and_code(file: Path) -> None:
    found = json.loads(file.read_text())
    assert found["command"].startswith("hardsphere bench ")
    assert found["device"]
    assert found["environment"]["source"]
    assert found["environment"]["torch"]
    assert "/tmp" not in file.read_text()
    assert "/home" not in file.read_text()


def test_what_is_measured_is_not_measured_again(
    speed: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bench-corrupt.json").write_text("{}")
    ran: list[list[str]] = []

    def run(command: list[str], **settings: Any) -> None:
        ran.append(command[3:])
        assert (settings["cwd"] / "data").resolve() == tmp_path
        if "--out" in command and "bench" in command:
            Path(command[-1]).write_text("{}")

    monkeypatch.setattr(speed.subprocess, "run", run)
    speed.measure(tmp_path, tmp_path, ["corrupt", "heads", "eval-wrn", "first"], None)
    verbs = [words[:2] for words in ran]
    assert verbs == [["bench", "train"]] * 3 + [["train", "cifar10/fast"], ["bench", "eval"]]
    again = len(ran)
    speed.measure(tmp_path, tmp_path, ["corrupt", "heads", "eval-wrn", "first"], None)
    assert len(ran) == again
    speed.measure(tmp_path, tmp_path, [], 0.0)
    assert len(ran) == again  # no time left
