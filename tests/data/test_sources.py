"""The nouns check themselves; subsets keep ids; pixels become the same floats everywhere."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hardsphere.data import Batch, ImageFiles, Images, to_float
from hardsphere.errors import HardsphereError

NAMES = ("a", "b", "c")


def images(count: int = 6) -> Images:
    pixels = torch.arange(count * 12, dtype=torch.uint8).view(count, 3, 2, 2)
    return Images(pixels, torch.arange(count) % 3, torch.arange(count) + 10, NAMES)


def test_a_subset_keeps_order_and_ids() -> None:
    part = images().subset([4, 1])
    assert part.ids.tolist() == [14, 11]
    assert part.labels.tolist() == [1, 1]
    assert part.pixels[0, 0, 0, 0] == 48
    assert len(part) == 2
    assert torch.equal(images().subset(torch.tensor([4, 1])).pixels, part.pixels)


def test_the_digest_sees_pixels_and_labels_and_not_ids() -> None:
    whole = images()
    assert len(whole.digest()) == 16
    assert whole.digest() == images().digest()
    assert whole.digest() == replace(whole, ids=whole.ids + 1).digest()
    assert whole.digest() != replace(whole, labels=whole.labels.flip(0)).digest()
    assert whole.digest() != replace(whole, pixels=whole.pixels ^ 1).digest()
    assert whole.digest() != replace(whole, pixels=whole.pixels.view(6, 3, 1, 4)).digest()


def test_every_byte_becomes_the_nearest_float() -> None:
    every = torch.arange(256, dtype=torch.uint8).repeat(5)[:1279]  # long and odd: vectorised loops and their tails
    exact = torch.tensor([level / 255 for level in every.tolist()], dtype=torch.float64).float()
    assert torch.equal(to_float(every), exact)
    assert to_float(exact) is exact


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"pixels": torch.zeros(6, 2, 2, dtype=torch.uint8)}, r"shape \(N, C, H, W\), not \(6, 2, 2\)"),
        ({"pixels": torch.zeros(6, 3, 2, 2, dtype=torch.int32)}, "Pixels are int32"),
        ({"pixels": torch.full((6, 3, 2, 2), float("nan"))}, "NaN"),
        ({"pixels": torch.full((6, 3, 2, 2), 200.0)}, "0..255: save them as uint8 or divide by 255"),
        ({"pixels": torch.full((6, 3, 2, 2), -1.5)}, "before any normalisation"),
        ({"pixels": torch.full((6, 3, 2, 2), float("inf"))}, r"must lie in \[0, 1\]"),
        ({"labels": torch.full((6,), 3)}, "A label is 3, but with 3 classes labels must lie in 0..2"),
        ({"labels": torch.full((6,), -1)}, "A label is -1"),
        ({"labels": torch.zeros(5, dtype=torch.int64)}, r"6 images, but labels of shape \(5,\)"),
        ({"labels": torch.zeros(6)}, "must be int64, not float32"),
        ({"ids": torch.zeros(7, dtype=torch.int64)}, r"ids of shape \(7,\)"),
    ],
)
def test_what_is_wrong_is_said(change: dict[str, torch.Tensor], sentence: str) -> None:
    with pytest.raises(HardsphereError, match=sentence):
        replace(images(), **change)


def test_an_empty_set_is_refused() -> None:
    with pytest.raises(HardsphereError, match="empty"):
        images().subset([])


def test_image_files_have_the_same_interface(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / name).write_bytes(b"1234")
    files = ImageFiles(tmp_path, ("x", "y"), torch.tensor([0, 1]), torch.tensor([5, 6]), NAMES, size=8)
    part = files.subset([1])
    assert (part.paths, part.ids.tolist(), part.size, len(part)) == (("y",), [6], 8, 1)
    before = files.digest()
    assert before != replace(files, size=9).digest()
    assert before != replace(files, labels=torch.tensor([1, 1])).digest()
    (tmp_path / "y").write_bytes(b"12345")
    assert before != files.digest()
    with pytest.raises(HardsphereError, match="at least 1 pixel"):
        replace(files, size=0)
    with pytest.raises(HardsphereError, match="empty"):
        files.subset([])


def test_a_batch_knows_its_length() -> None:
    assert len(Batch(torch.zeros(4, 1, 2, 2), torch.zeros(4), torch.zeros(4))) == 4
