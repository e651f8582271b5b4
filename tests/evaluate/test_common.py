"""Accuracy under common corruptions: against a loop written out here, from every kind of set."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from hardsphere.corruptions import CORRUPTIONS, SEVERITIES, corrupt, write_cifar, write_folder
from hardsphere.data import Images, load, to_float
from hardsphere.errors import HardsphereError
from hardsphere.evaluate.common import FromFolders, baseline_named, evaluate_corruptions
from hardsphere.report.card import card_markdown

pytestmark = pytest.mark.filterwarnings("ignore::hardsphere.corruptions.FrostStandInWarning")

N = 12
SOME = ("gaussian_noise", "contrast", "jpeg_compression")


@pytest.fixture(scope="module")
def source() -> Images:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (N, 3, 32, 32), generator=generator, dtype=torch.uint8)
    pixels = (pixels // 4 + 60 * (torch.arange(N) % 3)[:, None, None, None]).to(torch.uint8)
    return Images(pixels, torch.arange(N) % 3, torch.arange(N), ("dark", "grey", "light"))


@pytest.fixture
def model() -> nn.Module:
    """Guesses by mean brightness and by contrast, so that every corruption matters to it."""
    torch.manual_seed(1)
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, 3))


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five pictures that stand for the frost photographs."""
    folder = tmp_path_factory.mktemp("frost")
    generator = np.random.default_rng(0)
    for index, suffix in enumerate(("png", "png", "png", "jpg", "jpg"), start=1):
        picture = generator.integers(0, 256, (400, 500, 3), dtype=np.uint8)
        Image.fromarray(picture).save(folder / f"frost{index}.{suffix}")
    return folder


def expected(model: nn.Module, source: Images, name: str, severity: int) -> float:
    images = to_float(corrupt(source.pixels, name, severity, seed=0, ids=source.ids))
    with torch.no_grad():
        return (model(images).argmax(1) == source.labels).float().mean().item()


def test_cells_are_plain_accuracies_on_every_sample(model: nn.Module, source: Images) -> None:
    found = evaluate_corruptions(model, source, names=SOME, batch=5)
    for name in SOME:
        for severity in SEVERITIES:
            assert found.scores.table[name, severity] == pytest.approx(expected(model, source, name, severity))
    with torch.no_grad():
        clean = (model(to_float(source.pixels)).argmax(1) == source.labels).float().mean().item()
    assert found.clean_accuracy == pytest.approx(clean)
    assert found.scores.mca is None
    assert "needs all 75 cells" in found.card["remarks"][0]


def test_a_generated_set_gives_the_same_numbers(model: nn.Module, source: Images, tmp_path: Path) -> None:
    write_cifar(source.pixels, source.labels, tmp_path / "set", seed=0, names=SOME)
    on_disk = evaluate_corruptions(model, source, tmp_path / "set", batch=7)
    assert on_disk.scores.table == evaluate_corruptions(model, source, names=SOME).scores.table
    assert "generated" in on_disk.card["corruptions"]["from"]
    fewer = evaluate_corruptions(model, source, tmp_path / "set", limit=5)
    assert fewer.card["data"]["n"] == 5


def test_all_75_cells_give_the_papers_mean(model: nn.Module, source: Images, photographs: Path, tmp_path: Path) -> None:
    found = evaluate_corruptions(model, source, frost=photographs, out=tmp_path / "out")
    means = [np.mean([found.scores.table[name, severity] for severity in SEVERITIES]) for name in CORRUPTIONS]
    assert found.scores.mca == pytest.approx(np.mean(means))
    card = json.loads((tmp_path / "out" / "card.json").read_text())
    assert card["corruptions"]["mca"] == pytest.approx(found.scores.mca)
    assert len(card["corruptions"]["table"]) == 75
    text = card_markdown(card)
    assert "mCA, mean over 15 x 5" in text
    assert all(name in text for name in CORRUPTIONS)
    # Relative to itself, every corruption error is 1.
    if all(mean < 1 for mean in found.scores.per_corruption.values()):
        itself = baseline_named(str(tmp_path / "out" / "card.json"))
        again = evaluate_corruptions(model, source, frost=photographs, baseline=itself)
        assert again.scores.mce == pytest.approx(1.0)


def test_a_drawn_frost_is_never_mixed_into_a_mean(
    model: nn.Module, source: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hardsphere.corruptions import frost

    monkeypatch.setattr(frost, "_installed", lambda: None)
    found = evaluate_corruptions(model, source)
    assert found.scores.mca is None
    assert found.scores.mca_without_frost is not None
    text = card_markdown(found.card)
    assert "frost (stand-in)" in text
    assert "mCA (14, without frost)" in text


def test_another_set_at_the_same_place_is_another_evaluation(model: nn.Module, source: Images, tmp_path: Path) -> None:
    for seed in (0, 1):
        shutil.rmtree(tmp_path / "set", ignore_errors=True)
        write_cifar(source.pixels, source.labels, tmp_path / "set", seed=seed, names=SOME)
        if seed == 0:
            for _ in range(2):
                evaluate_corruptions(model, source, tmp_path / "set", out=tmp_path / "out").ledger.close()
    with pytest.raises(HardsphereError, match="holds another evaluation"):
        evaluate_corruptions(model, source, tmp_path / "set", out=tmp_path / "out")


def test_an_interrupted_evaluation_goes_on(model: nn.Module, source: Images, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    calls = 0

    def interrupt(_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise Stop

    with pytest.raises(Stop):
        evaluate_corruptions(model, source, names=SOME, batch=5, out=tmp_path / "out", progress=interrupt)
    resumed = evaluate_corruptions(model, source, names=SOME, batch=5, out=tmp_path / "out")
    assert resumed.scores.table == evaluate_corruptions(model, source, names=SOME).scores.table
    with pytest.raises(HardsphereError):
        evaluate_corruptions(model, source, names=SOME, seed=1, out=tmp_path / "out")


def test_a_folder_in_the_layout_of_imagenet_c(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        for label, name in enumerate(("ant", "bee")):
            for index in range(3):
                picture = generator.integers(0, 100, (80, 90, 3), dtype=np.uint8) + np.uint8(100 * label)
                file = tmp_path / "data" / split / name / f"{index}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(picture).save(file)
    data = load("folder", tmp_path / "data", size=64)
    write_folder(tmp_path / "data" / "val", tmp_path / "c", seed=0, names=("fog", "contrast"), resize=73, crop=64)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    with torch.no_grad():
        model[2].weight.copy_(torch.tensor([[-1.0] * 3, [1.0] * 3]))
        model[2].bias.copy_(torch.tensor([1.2, -1.2]))
    found = evaluate_corruptions(model, data.test, tmp_path / "c")
    assert set(found.scores.per_corruption) == {"fog", "contrast"}
    assert found.scores.table["contrast", 1] == 1.0  # it keeps each image's mean
    framed = np.full((64, 64, 3), 255, np.uint8)
    framed[8:-8, 8:-8] = 0
    Image.fromarray(framed).save(tmp_path / "c" / "fog" / "1" / Path(data.test.paths[0]).with_suffix(".JPEG"))
    shown = FromFolders(tmp_path / "c", replace(data.test, size=32), ("fog",)).images("fog", 1, [0])
    assert shown.shape == (1, 3, 32, 32)
    assert shown[..., 0].float().mean() > 240  # the whole picture in fewer pixels, not its middle
    assert shown[..., 16, 16].max() < 15
    (tmp_path / "c" / "fog" / "3" / "ant" / "1.JPEG").unlink()
    with pytest.raises(HardsphereError, match="not the corrupted version of this data"):
        evaluate_corruptions(model, data.test, tmp_path / "c")


def test_what_cannot_be_evaluated_is_said(model: nn.Module, source: Images, tmp_path: Path) -> None:
    write_cifar(source.pixels, source.labels.flip(0), tmp_path / "other", seed=0, names=SOME[:1])
    (tmp_path / "empty").mkdir()
    grey = Images(source.pixels[:, :1], source.labels, source.ids, source.class_names)
    for images, folder, options, words in (
        (source, tmp_path / "other", {}, "labels are not those"),
        (source, tmp_path / "empty", {}, "needs an image folder"),
        (source, tmp_path / "none", {}, "no directory"),
        (source, tmp_path / "other", {"frost": tmp_path}, "its own frost"),
        (grey, None, {}, "but these are grey"),
    ):
        with pytest.raises(HardsphereError, match=words):
            evaluate_corruptions(model, images, folder, **options)  # type: ignore[arg-type]
    with pytest.raises(HardsphereError, match="neither alexnet"):
        baseline_named("alexnot")
    assert baseline_named("alexnet").name.startswith("AlexNet")
