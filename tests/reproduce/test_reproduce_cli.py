"""The options of `hardsphere reproduce`: what is listed, limited, picked and written."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from hardsphere.cli import main


def invoke(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """The command line in this process: exit code, output and errors."""
    monkeypatch.setattr(sys, "argv", ["hardsphere", "reproduce", *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    shown = capsys.readouterr()
    return int(stopped.value.code or 0), shown.out, shown.err


def test_a_dry_run_lists_everything_and_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["table2,mechanism", "--scale", "small", "--only", "pgd, pgd-he", "--out", str(tmp_path / "out")]
    code, shown, _ = invoke([*words, "--limit", "pgd-500=1000", "--dry-run"], monkeypatch, capsys)
    assert code == 0
    assert not (tmp_path / "out").exists()
    lines = shown.splitlines()
    assert lines[0].startswith("PGD-AT: cifar10/pgd model=preactresnet18 epochs=20 ")
    assert lines[0].endswith("20 epochs, to be trained")
    said = [line.split() for line in lines[1:7]]
    assert [(words[0], words[1], float(words[3])) for words in said] == [
        ("standard", "1,000", 10.7),
        ("pgd-20", "10,000", 1.2),
        ("white-box", "10,000", 21.0),
        ("few-images", "200", 6.0),
        ("pgd-500-adaptive", "10,000", 15.0),
        ("pgd-500", "1,000", 1.5),
    ]
    assert lines[-2] == "mechanism of PGD-AT, PGD-AT + HE: 1,000 images, to do"
    # 49,000 images, 20 epochs, 11 forward and backward passes; twice with what is measured
    assert lines[-1] == f"To do: at most {2 * (49e-3 * 20 * 33 + 55.4):.1f} M passes."


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["table2", "--limit", "pgd-500"], "such as pgd-500=1000"),
        (["table2", "--limit", "mim-2=10"], "Did you mean 'mim-20'?"),
        (["table2", "--only", "pgd-hee"], "Did you mean 'pgd-he'?"),
        (["table2,tabel3"], "Did you mean 'table3'?"),
    ],
)
def test_a_mistake_is_one_sentence(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, error = invoke([*words, "--out", str(tmp_path)], monkeypatch, capsys)
    assert code == 2
    assert sentence in error
    assert error.count("\n") == 1


def test_rendering_needs_neither_data_nor_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(Path(__file__).parent / "earlier", out)  # of another scale
    words = ["table3", "--scale", "small", "--render", "--out", str(out)]
    code, shown, _ = invoke(words, monkeypatch, capsys)
    assert code == 0
    assert "# Table 3. FastAT and FreeAT with HE and m-HE on CIFAR-10, scale small" in shown
    assert "Not begun: FastAT; FastAT + HE; FastAT + m-HE; FreeAT; FreeAT + HE; FreeAT + m-HE" in shown
    assert not (out / "work").exists()


def test_a_folder_without_records_is_not_rendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = invoke(["table3", "--render", "--out", str(tmp_path / "mistyped")], monkeypatch, capsys)
    assert code == 2
    assert "holds no recorded results" in error
    assert list(tmp_path.iterdir()) == []
