"""A run and its data: what it was trained on is known again, and what it was not trained on stays apart."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hardsphere.data import ImageFiles, Images
from hardsphere.demo import _train
from hardsphere.errors import HardsphereError
from hardsphere.evaluate.targets import resolve
from hardsphere.recipes import recipe
from hardsphere.threat import Ball
from hardsphere.train import train
from hardsphere.train.loop import Silence
from hardsphere.train.selection import held_out_accuracy

SMALL = {"model": "cnn-2", "data.size": "32", "batch": "8", "attack.steps": "1"}


def photos(root: Path, names: str = "abc", count: int = 10) -> Path:
    """A folder of noise, one brightness a class."""
    generator = np.random.default_rng(0)
    for label, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for index in range(count):
            pixels = generator.integers(0, 80, (32, 32, 3)) + 60 * label
            Image.fromarray(pixels.astype(np.uint8)).save(root / name / f"{index:02d}.png")
    return root


class Interrupted(Silence):
    def epoch(self, row: Any) -> None:
        raise KeyboardInterrupt


def test_a_run_does_not_go_on_with_other_data(tmp_path: Path) -> None:
    data = photos(tmp_path / "photos")
    config = recipe("folder/pgd-he", SMALL | {"epochs": "2"})
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", data_dir=data, reporter=Interrupted())
    (data / "a" / "00.png").rename(tmp_path / "00.png")
    with pytest.raises(HardsphereError, match=r"not those that the run in .* began with"):
        train(config, tmp_path / "run", data_dir=data, resume=True)
    photos(data, "d")  # one class more
    with pytest.raises(HardsphereError, match=r"not those that the run in .* began with"):
        train(config, tmp_path / "run", data_dir=data, resume=True)
    shutil.rmtree(data / "d")
    (tmp_path / "00.png").rename(data / "a" / "00.png")
    train(config, tmp_path / "run", data_dir=data, resume=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("trained")
    train(recipe("folder/pgd-he", SMALL | {"epochs": "1"}), place / "run", data_dir=photos(place / "photos"))
    return place


def test_test_images_that_were_trained_on_are_refused(trained: Path, tmp_path: Path) -> None:
    """Of a folder without splits a fifth is set aside; with one image less it is another fifth."""
    data = trained / "photos"
    assert len(resolve(trained / "run").source) == 6
    assert len(resolve(trained / "run", data=f"folder:{data}").source) == 6
    (data / "a" / "00.png").rename(tmp_path / "00.png")
    try:
        for named in (None, f"folder:{data}"):
            with pytest.raises(HardsphereError, match="may have been trained on"):
                resolve(trained / "run", data=named)
    finally:
        (tmp_path / "00.png").rename(data / "a" / "00.png")


def test_data_that_was_moved_is_known_again(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "photos", tmp_path / "moved")
    job, own = resolve(trained / "run", data=f"folder:{tmp_path / 'moved'}"), resolve(trained / "run")
    assert isinstance(job.source, ImageFiles)
    assert isinstance(own.source, ImageFiles)
    assert job.source.paths == own.source.paths
    assert len(job.source) == 6


def test_of_somebody_elses_folder_all_images_are_judged(trained: Path, tmp_path: Path) -> None:
    job = resolve(trained / "run", data=f"folder:{photos(tmp_path / 'others', count=2)}")
    assert len(job.source) == 6
    photos(tmp_path / "apart" / "train", count=2)
    photos(tmp_path / "apart" / "test", count=3)
    assert len(resolve(trained / "run", data=f"folder:{tmp_path / 'apart'}").source) == 9


def test_other_classes_of_the_same_number_are_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(HardsphereError, match="knows the classes a, b, c, but the data has x, y, z"):
        resolve(trained / "run", data=f"folder:{photos(tmp_path / 'others', 'xyz')}")


def test_ordinary_training_is_selected_by_clean_accuracy(tmp_path: Path) -> None:
    """Robust accuracy of an ordinary network is noise near 0, which an early epoch wins."""
    run = train(recipe("digits/standard", {"model": "cnn-4", "epochs": "6"}), tmp_path / "run")
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    best = max(rows, key=lambda row: (row["validation_clean"], row["validation_robust"]))
    assert run.position.best_epoch == best["epoch"]
    assert max(row["validation_robust"] for row in rows) > best["validation_robust"]
    assert "by clean accuracy on" in resolve(tmp_path / "run").about["selection"]


def test_selection_sees_all_classes_of_a_sorted_split() -> None:
    """Of 100 images sorted by class, the first 10 are of one class, which this model alone knows."""
    labels = torch.arange(10).repeat_interleave(10)
    source = Images(torch.zeros(100, 1, 8, 8, dtype=torch.uint8), labels, torch.arange(100), tuple("abcdefghij"))
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].bias.copy_(torch.eye(10)[0])
    options = {"steps": 1, "batch": 4, "seed": 0, "device": torch.device("cpu")}
    assert held_out_accuracy(model, source, Ball("linf", 0.1), limit=10, **options) == (0.1, 0.1)


@pytest.mark.parametrize("words", [{"framework": "trades"}, {"framework": "foo"}, {"recipe": "digits/trades"}])
def test_a_framework_is_chosen_by_the_recipe(words: dict[str, str]) -> None:
    with pytest.raises(HardsphereError, match="train another recipe, such as digits/trades"):
        recipe("digits/pgd", words)
    assert recipe("digits/pgd", {"framework": "pgd"}) == recipe("digits/pgd")


def test_the_demonstration_removes_no_run_of_another(tmp_path: Path) -> None:
    short = {"model": "cnn-2", "epochs": "1"}
    mine, demo = recipe("digits/pgd", short | {"seed": "5"}), recipe("digits/pgd", short)
    train(mine, tmp_path / "pgd")
    with pytest.raises(HardsphereError, match="holds another run"):
        _train(demo, tmp_path / "pgd", Silence())
    _train(mine, tmp_path / "new", Silence())
    _train(demo, tmp_path / "new", Silence())  # its own, of an older version
