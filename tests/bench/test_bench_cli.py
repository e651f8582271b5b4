"""`hardsphere bench` as a person calls it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from hardsphere.bench import costs
from hardsphere.bench.costs import Axis, Setting
from hardsphere.cli import main
from hardsphere.cli.app import command_line

RESULTS = Path(__file__).parents[2] / "results"


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["hardsphere", "bench", *words, "--device", "cpu"])
    with pytest.raises(SystemExit) as done:
        main()
    return int(done.value.code or 0)


def test_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "train.json"
    words = ["train", "cifar10/fast-he", "--model", "cnn-2", "--batch", "4", "--steps", "1", "--no-heads", "--profile"]
    assert call(monkeypatch, *words, "--out", str(out)) == 0
    result = json.loads(out.read_text())
    assert result["command"] == f"hardsphere bench {' '.join(words)} --device cpu"
    assert {"images_per_second", "tflops", "gemm_share", "peak_memory_gib", "over_plain_loop"} <= result.keys()
    assert result["profile"]["groups"]
    shown = capsys.readouterr().out
    assert "\nof the plain loop " in shown
    assert "The longest:" in shown


def test_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "eval.json"
    assert call(monkeypatch, "eval", "--model", "cnn-2", "--limit", "2", "--suite", "quick", "--out", str(out)) == 0
    assert json.loads(out.read_text())["suite"].startswith("quick/")
    assert "survivors" in capsys.readouterr().out


def test_corrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "corrupt.json"
    assert call(monkeypatch, "corrupt", "--limit", "2", "--name", "contrast", "--no-loop", "--out", str(out)) == 0
    assert json.loads(out.read_text())["sets"] == 5
    assert "contrast" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["bench", "train"], ["bench", "eval"], ["bench", "corrupt"], ["audit", "runs/a"]])
def test_a_folder_cannot_be_a_file_to_write(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said before anything is measured, not after minutes of it."""
    monkeypatch.setattr("hardsphere.runtime.pick_device", lambda device: pytest.fail("work had begun"))
    monkeypatch.setattr(sys, "argv", ["hardsphere", *words, "--out", str(tmp_path)])
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code == 2
    assert "is a directory" in capsys.readouterr().err


def test_what_cannot_be_saved_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no folder")
    out = tmp_path / "file" / "corrupt.json"
    assert call(monkeypatch, "corrupt", "--limit", "2", "--name", "contrast", "--no-loop", "--out", str(out)) == 2
    shown = capsys.readouterr()
    assert '"images_per_second"' in shown.out
    assert "Traceback" not in shown.err


@pytest.mark.parametrize("place", [["--out", "a.json"], ["--out=a.json"], []])
def test_where_it_was_written_is_not_part_of_the_command(place: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["hardsphere", "bench", *place, "train", "--outer", "a b"])
    assert command_line(without="--out") == "hardsphere bench train --outer 'a b'"


def test_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = Axis("attack steps K", "cnn-2, batch 4", {k: Setting("cnn-2", 4, k) for k in (1, 2, 3)})
    monkeypatch.setitem(costs.AXES, "k", tiny)
    monkeypatch.setattr(costs, "_MOST_STEPS", 2)
    assert call(monkeypatch, "sweep", "--axis", "k", "--out", str(tmp_path)) == 0
    assert "attack steps K" in capsys.readouterr().out
    assert len((tmp_path / "points.jsonl").read_text().splitlines()) == 3
    assert (tmp_path / "sweep.png").exists()


def test_the_page_keeps_the_axes_that_are_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(RESULTS / "bench-sweep" / "points.jsonl", tmp_path)
    assert call(monkeypatch, "sweep", "--axis", "k", "--out", str(tmp_path)) == 0
    assert json.loads((tmp_path / "law.json").read_text()).keys() == {"k", "batch", "width"}
    assert "Width of WRN-34" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["eval", "--run", "runs/none", "--model", "cnn"], "give --run or --model, not both"),
        (["eval", "--run", "runs/none"], "runs/none"),
        (["eval", "--model", "cnn", "--skip", "3"], "give --run"),
        (["eval", "--model", "cnm", "--limit", "2"], "Unknown model 'cnm'"),
        (["sweep", "--out", "somewhere", "--axis", "depth"], "Unknown axis 'depth'"),
        (["sweep", "--out", __file__], "is a file"),
        (["train", "cifar10/standard", "--attack-steps", "7"], "Attack steps change nothing"),
        (["sweep", "--out", "somewhere", "--budget", "soon"], "The budget is 'soon'"),
        (["corrupt", "--name", "sunshine", "--limit", "1"], "sunshine"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert call(monkeypatch, *words) == 2
    assert sentence in capsys.readouterr().err
