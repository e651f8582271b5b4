"""Image folders: classes, splits, decoding with known answers, and every way in which a folder can be wrong."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from hardsphere.data import ImageFiles, eval_batches, load
from hardsphere.data.decode import centre, random_box, random_part, read_rgb
from hardsphere.errors import HardsphereError


def picture(path: Path, value: int = 100, size: tuple[int, int] = (20, 16)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, value, value)).save(path)


def classes(root: Path, counts: dict[str, int]) -> None:
    for shade, (name, count) in enumerate(counts.items()):
        for index in range(count):
            picture(root / name / f"{index:02d}.png", 50 * shade + index)


def test_train_and_test_folders(tmp_path: Path) -> None:
    classes(tmp_path / "train", {"cat": 20, "dog": 10})
    classes(tmp_path / "val", {"cat": 3, "dog": 2})
    data = load("folder", tmp_path, size=8)
    assert data.class_names == ("cat", "dog")
    assert data.shape == (3, 8, 8)
    assert data.mean == (0.485, 0.456, 0.406)
    assert isinstance(data.train, ImageFiles)
    assert data.validation is not None
    assert (len(data.train), len(data.validation), len(data.test)) == (27, 3, 5)
    assert torch.bincount(data.validation.labels).tolist() == [2, 1]
    assert sorted([*data.train.ids.tolist(), *data.validation.ids.tolist()]) == list(range(30))
    # Ids follow the sorted names, and each sample is what its name says.
    by_id = dict(zip(data.train.ids.tolist(), data.train.paths, strict=True))
    assert by_id.get(0, "cat/00.png") == "cat/00.png"
    assert all(path == (f"cat/{own:02d}.png" if own < 20 else f"dog/{own - 20:02d}.png") for own, path in by_id.items())
    for batch in eval_batches(data.test, 2):
        index = torch.where(batch.ids < 3, batch.ids, batch.ids + 50 - 3)
        assert torch.equal((batch.x[:, 0, 0, 0] * 255).round().long(), index)
        assert torch.equal(batch.y, (batch.ids >= 3).long())


def test_the_first_files_are_not_all_of_one_class(tmp_path: Path) -> None:
    classes(tmp_path / "train", {"a": 2, "b": 2})
    classes(tmp_path / "test", {"a": 20, "b": 20})
    data = load("folder", tmp_path, size=8)
    assert 3 < int(data.test.labels[:20].sum()) < 17
    assert torch.equal(data.test.ids, load("folder", tmp_path, size=8).test.ids)


def test_three_folders_are_three_splits(tmp_path: Path) -> None:
    for split, count in (("train", 4), ("validation", 2), ("test", 3)):
        classes(tmp_path / split, {"a": count, "b": count})
    data = load("folder", tmp_path)
    assert data.train is not None
    assert data.validation is not None
    assert (len(data.train), len(data.validation), len(data.test)) == (8, 4, 6)
    again = load("folder", tmp_path, validation=0)
    assert again.validation is None
    assert data.notes == ()


def test_classes_alone_are_cut_into_train_and_test(tmp_path: Path) -> None:
    classes(tmp_path, {"a": 10, "b": 10, "c": 20})
    data = load("folder", tmp_path)
    other = load("folder", tmp_path, seed=1)
    assert data.train is not None
    assert data.validation is not None
    assert other.validation is not None
    assert torch.bincount(data.test.labels).tolist() == [2, 2, 4]
    assert (len(data.train), len(data.validation)) == (29, 3)
    assert torch.equal(data.test.ids, other.test.ids)  # the seed of a run does not choose what it is tested on
    assert data.validation.ids.tolist() != other.validation.ids.tolist()
    assert data.notes == (f"{tmp_path} has no test split: 8 of 40 images were set aside as one.",)


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    classes(tmp_path, {"plane": 5, "train": 5})
    assert load("folder", tmp_path).class_names == ("plane", "train")


def test_a_class_may_be_called_test_and_hold_folders(tmp_path: Path) -> None:
    classes(tmp_path / "test", {"one": 2, "two": 3})
    classes(tmp_path, {"cat": 5, "dog": 5})
    data = load("folder", tmp_path, validation=0)
    assert data.class_names == ("cat", "dog", "test")
    assert data.train is not None
    assert len(data.train) + len(data.test) == 15


@pytest.mark.parametrize(
    ("train", "test", "validation"), [("Training", "Testing", "valid"), ("TRAIN", "test", "Val"), ("train", "Test", "")]
)
def test_splits_have_many_names(tmp_path: Path, train: str, test: str, validation: str) -> None:
    """None of them may become a class: the test images would be trained on."""
    for split, count in ((train, 5), (test, 3), (validation, 2)):
        if split:
            classes(tmp_path / split, {"cat": count, "dog": count})
    data = load("folder", tmp_path)
    assert data.class_names == ("cat", "dog")
    assert data.train is not None
    assert data.validation is not None
    assert len(data.test) == 6
    assert (len(data.train), len(data.validation)) == ((10, 4) if validation else (8, 2))
    assert load("folder", tmp_path, test_only=True).test.paths == data.test.paths


def test_splits_without_a_training_folder_are_judged_but_not_trained_on(tmp_path: Path) -> None:
    for split, count in (("test", 3), ("val", 2)):
        classes(tmp_path / split, {"cat": count, "dog": count})
    with pytest.raises(HardsphereError, match="has test/ but no train/ beside it"):
        load("folder", tmp_path)
    assert len(load("folder", tmp_path, test_only=True).test) == 6
    (tmp_path / "unlabelled" / "test").mkdir(parents=True)
    picture(tmp_path / "unlabelled" / "test" / "0.png")
    classes(tmp_path / "unlabelled" / "train", {"cat": 2, "dog": 2})
    with pytest.raises(HardsphereError, match="no test/ or val/ with the same classes"):
        load("folder", tmp_path / "unlabelled")


def test_nested_folders_and_strange_files(tmp_path: Path) -> None:
    classes(tmp_path, {"a": 2, "b": 2})
    picture(tmp_path / "a" / "deep" / "er" / "IMAGE.JPG")
    (tmp_path / "a" / "notes.txt").write_text("not an image")
    (tmp_path / "a" / "._00.png").write_bytes(b"a hidden file")
    (tmp_path / ".cache").mkdir()
    (tmp_path / "README").write_text("words")
    data = load("folder", tmp_path, validation=0)
    assert data.train is not None
    assert len(data.train) + len(data.test) == 5
    assert data.class_names == ("a", "b")


def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(HardsphereError, match="no folder"):
        load("folder", tmp_path / "nowhere")
    with pytest.raises(HardsphereError, match="no class folders"):
        load("folder", tmp_path)
    classes(tmp_path, {"only": 3})
    with pytest.raises(HardsphereError, match=r"one class only \('only'\)"):
        load("folder", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(HardsphereError, match=r"empty holds no images"):
        load("folder", tmp_path)


def test_what_is_wrong_with_splits_is_said(tmp_path: Path) -> None:
    classes(tmp_path / "train", {"a": 2, "b": 2})
    with pytest.raises(HardsphereError, match="no test/ or val/ with the same classes"):
        load("folder", tmp_path)
    classes(tmp_path / "test", {"a": 2})
    with pytest.raises(HardsphereError, match=re.escape(str(tmp_path / "test" / "b")) + " holds no images"):
        load("folder", tmp_path)
    classes(tmp_path / "test", {"b": 2, "zebra": 1})
    with pytest.raises(HardsphereError, match="the class 'zebra', which the training folder does not know"):
        load("folder", tmp_path)


@pytest.mark.parametrize("kind", ["text", "half", "nothing"])
def test_an_unreadable_image_is_named_at_once(tmp_path: Path, kind: str) -> None:
    classes(tmp_path, {"a": 4, "b": 4})
    bad = tmp_path / "b" / "02.png"
    whole = bad.read_bytes()
    bad.write_bytes({"text": b"I am text", "half": whole[: len(whole) // 2], "nothing": b""}[kind])
    with pytest.raises(HardsphereError, match=re.escape(str(bad)) + " cannot be read"):
        load("folder", tmp_path)


def test_the_centre_is_the_usual_one(tmp_path: Path) -> None:
    """At 256 pixels Resize(256) changes nothing, so that the crop is exact."""
    pixels = np.random.default_rng(0).integers(0, 256, (300, 256, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "tall.png")
    Image.fromarray(pixels.transpose(1, 0, 2)).save(tmp_path / "wide.png")
    tall, wide = centre(tmp_path / "tall.png", 224), centre(tmp_path / "wide.png", 224)
    assert np.array_equal(tall.permute(1, 2, 0).numpy(), pixels[38:262, 16:240])
    assert torch.equal(wide, tall.transpose(1, 2))
    assert centre(tmp_path / "tall.png", 32).shape == (3, 32, 32)


@settings(max_examples=200, deadline=None)
@given(width=st.integers(1, 400), height=st.integers(1, 400), seed=st.integers(0, 1000))
def test_random_boxes_lie_in_the_image(width: int, height: int, seed: int) -> None:
    numbers = np.random.default_rng(seed).random((10, 4)).tolist()
    left, top, right, bottom = random_box(width, height, numbers)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    if min(width, height) > 30 and max(width, height) < 1.3 * min(width, height):
        share = (right - left) * (bottom - top) / (width * height)
        aspect = (right - left) / (bottom - top)
        assert 0.08 * 0.9 < share <= 1
        assert 0.75 * 0.9 < aspect < 4 / 3 * 1.1


def test_random_boxes_fill_their_range() -> None:
    rng = np.random.default_rng(0)
    boxes = np.array([random_box(1000, 1000, rng.random((10, 4)).tolist()) for _ in range(2000)])
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    area, log_aspect = width * height / 1e6, np.log(width / height)
    assert area.min() < 0.1
    assert area.max() > 0.95
    assert abs(log_aspect.mean()) < 0.02
    assert log_aspect.max() > np.log(4 / 3) - 0.03


def test_a_random_part_is_the_box_resized(tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (60, 50, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    numbers = np.random.default_rng(2).random((10, 4)).tolist()
    left, top, right, bottom = random_box(50, 60, numbers)
    expected = Image.fromarray(pixels[top:bottom, left:right]).resize((9, 9), Image.Resampling.BILINEAR)
    assert np.array_equal(random_part(tmp_path / "x.png", 9, numbers).permute(1, 2, 0).numpy(), np.asarray(expected))


def test_every_mode_becomes_rgb(tmp_path: Path) -> None:
    grey = Image.new("L", (4, 4), 77)
    deep = Image.fromarray(np.full((4, 4), 77 * 256 + 3, np.uint16))
    palette = grey.convert("RGB").quantize(2)
    palette.info["transparency"] = b"\x00\x10"
    for name, image in {"l": grey, "la": grey.convert("LA"), "p": palette, "i16": deep}.items():
        image.save(tmp_path / f"{name}.png")
        assert read_rgb(tmp_path / f"{name}.png").getpixel((1, 1)) == (77, 77, 77), name
    Image.fromarray(np.full((4, 4), 0.5, np.float32)).save(tmp_path / "f.tiff")
    with pytest.raises(HardsphereError, match=r"f\.tiff cannot be read"):
        read_rgb(tmp_path / "f.tiff")
