"""An epoch is a function of (seed, epoch): complete, shuffled, resumable, and each sample's fate its own."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hardsphere.data import Augment, Batch, ImageFiles, Images, Source, augment, eval_batches, to_float, train_loader
from hardsphere.data.decode import random_part
from hardsphere.errors import HardsphereError
from hardsphere.noise import Noise

FULL = Augment(pad=2, flip=True, cutout=2, cutmix=1.0)
PLAIN = Augment(pad=2, flip=True, cutout=2)


def in_memory(count: int = 23) -> Images:
    pixels = Noise(1, torch.arange(count)).integers(0, 256, 3, 6, 6).to(torch.uint8)
    return Images(pixels, torch.arange(count) % 4, torch.arange(count) * 3 + 7, ("a", "b", "c", "d"))


def on_disk(folder: Path, count: int = 23) -> ImageFiles:
    source = in_memory(count)
    for index, pixels in enumerate(source.pixels):
        tall = np.kron(pixels.permute(1, 2, 0).numpy(), np.ones((3, 2, 1), np.uint8))
        Image.fromarray(tall).save(folder / f"{index}.png")
    names = tuple(f"{index}.png" for index in range(count))
    return ImageFiles(folder, names, source.labels, source.ids, source.class_names, size=7)


@pytest.fixture(params=["memory", "disk"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    return in_memory() if request.param == "memory" else on_disk(tmp_path)


def same(first: list[Batch], second: list[Batch]) -> bool:
    pairs = list(zip(first, second, strict=True))
    return all(torch.equal(a.x, b.x) and torch.equal(a.y, b.y) and torch.equal(a.ids, b.ids) for a, b in pairs)


def by_id(batches: list[Batch]) -> dict[int, torch.Tensor]:
    return {int(own): x for batch in batches for own, x in zip(batch.ids, batch.x, strict=True)}


def test_an_epoch_is_every_sample_once(source: Source) -> None:
    loader = train_loader(source, 5, augment=FULL, seed=2)
    batches = list(loader.epoch(0))
    assert [len(batch) for batch in batches] == [5, 5, 5, 5, 3]
    assert len(loader) == 5
    ids = torch.cat([batch.ids for batch in batches])
    assert sorted(ids.tolist()) == source.ids.tolist()
    assert ids.tolist() != source.ids.tolist()
    for batch in batches:
        assert batch.x.dtype == torch.float32
        assert batch.x.min() >= 0
        assert batch.x.max() <= 1
        assert batch.y.shape == (len(batch), 4)
        torch.testing.assert_close(batch.y.sum(1), torch.ones(len(batch)))


def test_resuming_gives_the_batches_that_were_left(source: Source) -> None:
    whole = list(train_loader(source, 5, augment=FULL, seed=2).epoch(3))
    for start in range(6):
        assert same(whole[start:], list(train_loader(source, 5, augment=FULL, seed=2).epoch(3, start)))


def test_epoch_and_seed_change_order_and_pixels(source: Source) -> None:
    loader = train_loader(source, 5, augment=PLAIN, seed=2)
    one, two = list(loader.epoch(0)), list(loader.epoch(1))
    other = list(train_loader(source, 5, augment=PLAIN, seed=3).epoch(0))
    for changed in (two, other):
        assert [b.ids.tolist() for b in one] != [b.ids.tolist() for b in changed]
        assert any(not torch.equal(x, by_id(changed)[own]) for own, x in by_id(one).items())
    assert same(one, list(loader.epoch(0)))


def test_a_sample_s_augmentation_does_not_depend_on_its_batch(source: Source) -> None:
    reference = by_id(list(train_loader(source, 5, augment=PLAIN, seed=2).epoch(1)))
    part = source.subset(list(range(9, -1, -1)))
    for batch_size, split in ((4, source), (23, source), (3, part)):
        for own, x in by_id(list(train_loader(split, batch_size, augment=PLAIN, seed=2).epoch(1))).items():
            assert torch.equal(x, reference[own])


def test_resident_batches_are_augment_of_the_source() -> None:
    source = in_memory()
    for batch in train_loader(source, 5, augment=PLAIN, seed=2).epoch(4):
        rows = (batch.ids - 7) // 3
        expected = augment(source.pixels[rows], Noise(2, batch.ids).fold("augment", 4), PLAIN)
        assert torch.equal(batch.x, to_float(expected))
        assert torch.equal(batch.y, source.labels[rows])


def test_streamed_batches_are_random_parts_then_augmented(tmp_path: Path) -> None:
    source = on_disk(tmp_path)
    for batch in train_loader(source, 5, augment=PLAIN, seed=2).epoch(4):
        noise = Noise(2, batch.ids).fold("augment", 4)
        rows = ((batch.ids - 7) // 3).tolist()
        numbers = noise.fold("part").uniform(10, 4).tolist()
        parts = [random_part(tmp_path / f"{row}.png", 7, own) for row, own in zip(rows, numbers, strict=True)]
        assert torch.equal(batch.x, to_float(augment(torch.stack(parts), noise, PLAIN)))


@pytest.mark.parametrize(
    ("count", "batch", "sizes"), [(11, 5, [5, 5]), (12, 5, [5, 5, 2]), (3, 1, [1] * 3), (2, 9, [2])]
)
def test_a_last_batch_of_one_is_dropped(count: int, batch: int, sizes: list[int]) -> None:
    loader = train_loader(in_memory(count), batch)
    assert [len(one) for one in loader.epoch(0)] == sizes
    assert len(loader) == len(sizes)


def test_floats_off_the_grid_stay_as_they_are() -> None:
    source = Images(torch.rand(4, 1, 2, 2), torch.zeros(4, dtype=torch.int64), torch.arange(4), ("a", "b"))
    batch = next(train_loader(source, 4).epoch(0))
    assert torch.equal(batch.x, source.pixels[batch.ids])


def test_evaluation_is_plain_and_in_order(source: Source) -> None:
    batches = list(eval_batches(source, 5))
    assert [len(batch) for batch in batches] == [5, 5, 5, 5, 3]
    assert torch.cat([batch.ids for batch in batches]).tolist() == source.ids.tolist()
    assert torch.equal(torch.cat([batch.y for batch in batches]), source.labels)
    assert same(
        list(eval_batches(source, 5, limit=7)), [batches[0], next(iter(eval_batches(source.subset([5, 6]), 9)))]
    )
    if isinstance(source, Images):
        assert torch.equal(torch.cat([batch.x for batch in batches]), to_float(source.pixels))


def test_an_epoch_may_be_abandoned(tmp_path: Path) -> None:
    epoch = train_loader(on_disk(tmp_path), 2).epoch(0)
    next(epoch)
    epoch.close()  # type: ignore[attr-defined]


def test_an_image_that_broke_since_is_named(tmp_path: Path) -> None:
    source = on_disk(tmp_path)
    whole = (tmp_path / "3.png").read_bytes()
    (tmp_path / "3.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(HardsphereError, match=r"3\.png cannot be read"):
        list(train_loader(source, 5).epoch(0))
    with pytest.raises(HardsphereError, match=r"3\.png cannot be read"):
        list(eval_batches(source, 5))


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(HardsphereError, match="batch size is 0"):
        train_loader(in_memory(), 0)
    with pytest.raises(HardsphereError, match="one image"):
        train_loader(in_memory(1), 2)
    with pytest.raises(HardsphereError, match="too much to reflect"):
        train_loader(in_memory(), 2, augment=Augment(pad=6, padding="reflect"))
    for batch, limit in ((0, None), (1, 0)):
        with pytest.raises(HardsphereError, match="must be at least 1"):
            next(eval_batches(in_memory(), batch, limit=limit))


@pytest.mark.gpu
def test_the_gpu_gives_the_same_batches_without_waiting_for_the_host(tmp_path: Path) -> None:
    for source in (in_memory(), on_disk(tmp_path)):
        for spec in (FULL, Augment(pad=3, padding="reflect", flip=True)):
            cpu = list(train_loader(source, 5, "cpu", spec, seed=2).epoch(1))
            gpu = list(train_loader(source, 5, "cuda", spec, seed=2).epoch(1))
            assert same(cpu, [Batch(b.x.cpu(), b.y.cpu(), b.ids.cpu()) for b in gpu])
            plain = [Batch(b.x.cpu(), b.y.cpu(), b.ids.cpu()) for b in eval_batches(source, 5, "cuda")]
            assert same(list(eval_batches(source, 5)), plain)
    loader = train_loader(in_memory(), 5, "cuda", FULL, seed=2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert len(list(loader.epoch(0))) == 5
    finally:
        torch.cuda.set_sync_debug_mode("default")
