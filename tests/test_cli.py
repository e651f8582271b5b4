"""The command line as a person meets it: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hardsphere.cli import main
from hardsphere.errors import HardsphereError
from hardsphere.predict import predict

TINY = ["epochs=1", "model=cnn-4", "attack.steps=1", "batch=256"]


def hardsphere(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "hardsphere", *words],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "run"
    done = hardsphere("train", "digits/pgd-he", *TINY, "--out", str(path))
    assert done.returncode == 0, done.stderr
    assert "epoch   1" in done.stderr
    assert "all 1 epochs are done" in done.stdout
    return path


def test_help_does_not_wait_for_torch() -> None:
    script = (
        "import sys; from hardsphere.cli import app; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    started = time.perf_counter()
    shown = hardsphere("--help")
    assert shown.returncode == 0
    assert time.perf_counter() - started < 2  # measured at 0.2 s on an idle machine
    for verb in ("train", "recipes", "show", "predict", "data", "demo"):
        assert verb in shown.stdout


def test_recipes_and_show() -> None:
    listed = hardsphere("recipes").stdout
    for word in ("cifar10", "trades", "mhe", "TRADES (Zhang et al., 2019)"):
        assert word in listed
    shown = hardsphere("show", "cifar10/trades-he", "attack.eps=4/255").stdout
    assert "model: wrn-34-10" in shown
    assert f"eps: {4 / 255}" in shown


def test_predict_names_classes(run: Path, tmp_path: Path) -> None:
    Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(tmp_path / "black.png")
    Image.fromarray(np.full((20, 30, 3), 200, dtype=np.uint8)).save(tmp_path / "wide.png")
    done = hardsphere("predict", str(run), str(tmp_path / "black.png"), str(tmp_path / "wide.png"), "--top", "2")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith(f"{tmp_path / 'black.png'}: ")
    assert second.count("%") == 2


def test_a_finished_run_says_so(run: Path) -> None:
    done = hardsphere("train", "digits/pgd-he", *TINY, "--out", str(run), "--resume")
    assert done.returncode == 0
    assert "already finished" in done.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train", "digits/pgd-hee"], "Did you mean 'digits/pgd-he'?"),
        (["train", "digits/pgd", "epochz=1"], "Did you mean 'epochs'?"),
        (["train", "digits/pgd", "epochs=0"], "at least 1"),
        (["train", "digits/pgd", "attack.eps=1/0"], "finite number"),
        (["train", "digits/pgd", "attack.eps=0"], "above 0"),
        (["train", "digits/pgd", "epochs"], "key=value"),
        (["train", "digits/pgd", "model=resnet51"], "Did you mean"),
        (["train", "cifar10/pgd"], "cifar10"),
        (["train", "cifar10/pgd", "--data", "nowhere"], "nowhere"),
        (["train", "folder/pgd", "--data", "nowhere"], "nowhere"),
        (["train", "digits/pgd", "--device", "gpu"], "Unknown device"),
        (["train", "digits/pgd", "init=nothing.pt"], "nothing.pt"),
        (["predict", "nowhere", "x.png"], "nowhere"),
        (["show", "digits/pgb"], "Did you mean"),
    ],
)
def test_mistakes_get_one_sentence_and_exit_code_2(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process, since importing torch anew for each mistake would take most of the time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["hardsphere", *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    shown = capsys.readouterr().err
    assert stopped.value.code == 2
    assert sentence in shown
    assert shown.startswith("hardsphere: ")
    assert shown.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_unreadable_images_are_named(run: Path, tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no image")
    for name in ("text.png", "none.png"):
        with pytest.raises(HardsphereError, match=name):
            predict(run, [tmp_path / name])
    done = hardsphere("predict", str(run), str(tmp_path / "text.png"))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
