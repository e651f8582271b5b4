"""The command line as a person meets it: in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from hardsphere import __version__
from hardsphere.cli import main
from hardsphere.data import ImageFiles, eval_batches
from hardsphere.data import load as load_data
from hardsphere.errors import HardsphereError
from hardsphere.evaluate.targets import default_directory
from hardsphere.models.classifier import Classifier
from hardsphere.predict import predict
from hardsphere.recipes import recipe
from hardsphere.reproduce.reading import read_plan
from hardsphere.train import load, train

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
    for verb in (
        "train",
        "recipes",
        "show",
        "predict",
        "evaluate",
        "audit",
        "corrupt",
        "bench",
        "reproduce",
        "sweep",
        "demo",
    ):
        assert verb in shown.stdout


def test_the_version_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["--version"], monkeypatch, capsys) == (0, f"hardsphere {__version__}\n", "")


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
        (["train", "digits/pgd", "--device", "mps"], "Unknown device"),
        (["train", "digits/pgd", "seed=99999999999999999999"], "must lie between -2^31 and 2^31"),
        (["evaluate", "runs/a", "--baseline", "alexnet"], "--baseline says nothing to --suite standard"),
        (["evaluate", "runs/a", "--suite", "corruptions", "--eps", "0.1"], "--eps says nothing to --suite corruptions"),
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


def invoke(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """The command line in this process: exit code, output and errors."""
    monkeypatch.setattr(sys, "argv", ["hardsphere", *words])
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as stopped:
        main()
    shown = capsys.readouterr()
    return int(stopped.value.code or 0), shown.out, shown.err


def test_evaluate_writes_a_card_and_goes_on_from_its_ledger(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "evaluate",
        str(run),
        "--suite",
        "quick",
        "--limit",
        "20",
        "--eps",
        "0.05,0.2",
        "--out",
        str(tmp_path / "out"),
    ]
    code, shown, progress = invoke(words, monkeypatch, capsys)
    assert code == 0
    assert "quick/1" in shown
    assert "at most" in progress
    card = json.loads((tmp_path / "out" / "card.json").read_text())
    assert card["data"]["n"] == 20
    assert [result["eps"] for result in card["results"]] == [0.05, 0.2]
    assert card["model"]["selection"].startswith("best of epochs")
    assert "--suite quick" in card["about"]["command"]
    before = (tmp_path / "out" / "ledger.db").stat().st_mtime_ns
    assert invoke(words, monkeypatch, capsys)[0] == 0
    assert json.loads((tmp_path / "out" / "card.json").read_text())["results"] == card["results"]
    code, _, error = invoke([*words, "--seed", "1"], monkeypatch, capsys)
    assert code == 2
    assert "seed" in error
    assert (tmp_path / "out" / "ledger.db").stat().st_mtime_ns >= before


def test_each_evaluation_of_a_run_has_a_place_of_its_own(run: Path) -> None:
    assert default_directory(str(run), "standard", eps=None, limit=None) == run / "evaluation-standard"
    named = default_directory(str(run), "quick", eps="2/255,4/255", limit=50, images=None)
    assert named == run / "evaluation-quick-eps-2-255-4-255-limit-50"
    assert default_directory("timm:resnet50", "quick", seed=1) == Path("evaluations/timm-resnet50-quick-seed-1")


def test_images_that_broke_the_model_are_kept_and_checked_as_files(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["evaluate", str(run), "--suite", "quick", "--limit", "20", "--save-images", "--out", str(tmp_path / "out")]
    code, shown, _ = invoke([*words, "--eps", "0.2,0.02"], monkeypatch, capsys)
    assert code == 0
    files = list((tmp_path / "out" / "png").glob("*.png"))
    assert f"of {len(files)} broken images stay broken as 8-bit PNG files" in shown
    assert "in linf 0.2 (n=20)" in shown  # that of the headline, in whatever order they were named
    assert files


def test_audit_prints_a_verdict(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["audit", str(run), "--limit", "30", "--out", str(tmp_path / "audit.json")]
    code, shown, _ = invoke(words, monkeypatch, capsys)
    assert code == 0
    found = json.loads((tmp_path / "audit.json").read_text())
    assert found["verdict"] in shown
    assert found["n"] == 30
    assert (found["view"], found["target"]) == ("deployed", str(run))
    assert found["command"].endswith("--limit 30")
    code, shown, _ = invoke([*words, "--paper-view"], monkeypatch, capsys)
    again = json.loads((tmp_path / "audit.json").read_text())
    assert (again["view"], again["model"]) == ("paper (raw cosines)", found["model"])
    code, _, error = invoke(["audit", str(run), "--eps", "0.1,0.2"], monkeypatch, capsys)
    assert (code, "one radius" in error) == (2, True)


def test_corrupt_writes_a_folder_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder of photographs: corrupted on disk in the layout of ImageNet-C."""
    for name in ("ant", "bee"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / name / "1.png")
    words = ["corrupt", "folder", "--data", str(tmp_path / "photos"), "--out", str(tmp_path / "c")]
    code, shown, _ = invoke(words, monkeypatch, capsys)
    assert code == 0
    assert "Frost: " in shown
    assert (tmp_path / "c" / "fog" / "5" / "bee" / "1.JPEG").is_file()
    assert len(list((tmp_path / "c").rglob("*.JPEG"))) == 2 * 75


def test_sweep_and_reproduce(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = "{epochs: 1, model: cnn-4, batch: 256, attack.steps: 1}"
    plan = f"set: {settings}\nruns: [digits/pgd, digits/pgd-he]\nmeasure:\n  - {{suite: quick, limit: 10}}\n"
    (tmp_path / "plan.yaml").write_text(plan)
    words = ["sweep", str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "out")]
    code, shown, _ = invoke([*words, "--budget", "1h"], monkeypatch, capsys)
    assert code == 0
    assert "missing" not in shown
    assert len((tmp_path / "out" / "results.jsonl").read_text().splitlines()) == 2
    for wrong, sentence in (
        (["sweep", str(tmp_path / "none.yaml"), "--out", str(tmp_path / "o")], "none.yaml"),
        ([*words, "--budget", "soon"], "soon"),
        (["reproduce", "tabel2"], "Did you mean 'table2'?"),
        (["reproduce", "table2", "--scale", "tiny"], "tiny"),
        (["reproduce", "table2", "--scale", "small", "--out", str(tmp_path / "o")], "--data"),
    ):
        code, _, error = invoke(wrong, monkeypatch, capsys)
        assert code == 2
        assert sentence in error
        assert error.count("\n") == 1


def test_the_plan_in_the_documentation_is_one() -> None:
    text = (Path(__file__).parent.parent / "docs" / "reproduce.md").read_text(encoding="utf-8")
    (written,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    plan = read_plan(yaml.safe_load(written))
    assert len(plan.runs) == 2 * (1 + 4)
    assert all(len(run.measurements) == 2 for run in plan.runs)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--suite", "standrad"], "Did you mean 'standard'?"),
        (["--eps", "0"], "above 0"),
        (["--eps", "1/0"], "such as 8/255"),
        (["--norm", "l3"], "Unknown norm"),
        (["--data", "cifar11:x"], "names no data"),
        (["--weights", "w.pt"], "leave --weights"),
    ],
)
def test_evaluate_refuses_in_one_sentence(
    words: list[str],
    sentence: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, error = invoke(["evaluate", str(run), *words, "--out", str(tmp_path / "o")], monkeypatch, capsys)
    assert code == 2
    assert sentence in error
    assert error.count("\n") == 1
    assert not (tmp_path / "o").exists()


class Harmful:
    """A pickle that would write a file when it is opened."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.file, "w")


def test_a_strangers_pickle_is_never_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"model": Harmful(str(tmp_path / "harm"))}, tmp_path / "weights.pt")
    np.savez(tmp_path / "data.npz", x=np.zeros((4, 3, 8, 8), dtype=np.uint8), y=np.array([0, 1, 0, 1]))
    base = ["--data", str(tmp_path / "data.npz"), "--eps", "8/255", "--norm", "linf", "--out", str(tmp_path / "o")]
    words = ["evaluate", str(tmp_path / "weights.pt"), "--model", "cnn", *base]
    code, _, error = invoke(words, monkeypatch, capsys)
    assert code == 2
    assert error.count("\n") == 1
    assert not (tmp_path / "harm").exists()
    assert not (tmp_path / "o").exists()


def test_unreadable_images_are_named(run: Path, tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no image")
    for name in ("text.png", "none.png"):
        with pytest.raises(HardsphereError, match=name):
            predict(run, [tmp_path / name])
    done = hardsphere("predict", str(run), str(tmp_path / "text.png"))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_predict_takes_one_file_none_or_many(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many do not go through the network at once, and each gets its own answer."""
    files = [tmp_path / f"{shade}.png" for shade in range(0, 250, 50)]
    for file in files:
        Image.fromarray(np.full((8, 8), int(file.stem), dtype=np.uint8)).save(file)
    alone = [predict(run, str(file))[0] for file in files]
    monkeypatch.setattr("hardsphere.predict._BATCH", 2)
    sizes, forward = [], Classifier.forward

    def counted(model: Classifier, x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return forward(model, x)

    monkeypatch.setattr(Classifier, "forward", counted)
    together = predict(run, files)
    assert sizes == [2, 2, 1]
    assert [[name for name, _ in ranking] for ranking in together] == [[name for name, _ in row] for row in alone]
    assert [row[0][1] for row in together] == pytest.approx([row[0][1] for row in alone], abs=1e-5)
    assert predict(run, []) == []
    with pytest.raises(HardsphereError, match="is a folder"):
        predict(run, [tmp_path])


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), sqlite3.OperationalError("database or disk is full")]
)
def test_a_full_disk_gets_one_sentence(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr("hardsphere.recipes.recipe", full)
    code, _, shown = invoke(["show", "digits/pgd"], monkeypatch, capsys)
    assert code == 2
    assert str(error) in shown
    assert "What was finished is kept" in shown
    assert shown.count("\n") == 1


def test_predict_sees_a_folders_images_as_evaluation_does(tmp_path: Path) -> None:
    """The whole way on an image folder; the probabilities are those of the evaluation's own view of the file."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 2)):
        for label, name in enumerate(("ant", "bee")):
            (tmp_path / "photos" / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = generator.integers(0, 120, (30, 44, 3), dtype=np.uint8) + np.uint8(100 * label)
                Image.fromarray(pixels).save(tmp_path / "photos" / split / name / f"{index}.png")
    overrides = {"model": "cnn-4", "epochs": 1, "batch": 4, "data.size": 16, "attack.steps": 1}
    train(recipe("folder/pgd-he", overrides), tmp_path / "run", data_dir=tmp_path / "photos")
    file = tmp_path / "photos" / "val" / "bee" / "1.png"
    ((first, second),) = predict(tmp_path / "run", [file])
    deployed = load(tmp_path / "run")
    test = load_data("folder", tmp_path / "photos", size=16).test
    assert isinstance(test, ImageFiles)
    place = next(index for index, path in enumerate(test.paths) if path.endswith("bee/1.png"))
    (batch,) = eval_batches(test.subset([place]), 1)
    with torch.no_grad():
        expected = deployed.model(batch.x).softmax(1)[0]
    assert {first[0], second[0]} == {"ant", "bee"}
    assert first[1] == pytest.approx(expected.max().item(), abs=1e-5)


def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    words = ["train", "digits/pgd", "model=cnn-2", "epochs=1000", "--out", str(tmp_path / "run")]
    process = subprocess.Popen(
        [sys.executable, "-m", "hardsphere", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # in the background it is ignored
    )
    try:
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert error.endswith("hardsphere: stopped. The same command with --resume goes on.\n")


@pytest.mark.parametrize(
    ("words", "how"),
    [
        (["bench", "sweep", "--out", "costs"], " The same command goes on."),
        (["bench", "train"], ""),
        (["sweep", "plan.yaml"], " The same command goes on."),
        (["audit", "runs/a"], ""),
    ],
)
def test_only_what_goes_on_says_so(
    words: list[str], how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise SystemExit(130)

    monkeypatch.setattr("hardsphere.cli.app", interrupted)
    code, _, error = invoke(words, monkeypatch, capsys)
    assert (code, error) == (130, f"hardsphere: stopped.{how}\n")
