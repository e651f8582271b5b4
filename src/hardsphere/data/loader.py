"""From a split to batches: resident on the device for images in memory, streamed for image files.

An epoch is a pure function of (seed, epoch): the order comes from keys of the samples, the augmentation from their own
streams of `Noise`. A run that resumes in the middle of an epoch asks for the rest of it and gets exactly the batches
that an uninterrupted run would have seen, on any device, with nothing saved.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hardsphere.data import decode
from hardsphere.data.augment import Augment, box_sides, training_batch
from hardsphere.data.sources import Batch, ImageFiles, Images, Source, to_float
from hardsphere.errors import HardsphereError
from hardsphere.noise import Noise

# Batches decoded ahead of the one in use.
_AHEAD = 3

Job = Callable[[], Tensor]
Fuse = Callable[[Callable[..., Any]], Callable[..., Any]]


class TrainLoader(ABC):
    """Shuffled and augmented batches of a split; made by `train_loader`.

    The last batch of an epoch may be smaller. It is dropped if it would hold one sample: BatchNorm cannot train on one.
    """

    def __init__(self, source: Source, batch: int, device: torch.device, augment: Augment, seed: int) -> None:
        if batch < 1:
            raise HardsphereError(f"The batch size is {batch}, but it must be at least 1.")
        if len(source) == 1 < batch:
            raise HardsphereError("The training set holds one image: there is nothing to train on.")
        self.batch = batch
        self.device = device
        self.augment = augment
        self.seed = seed
        self.samples = len(source)
        self.classes = len(source.class_names)
        self._sides = box_sides(augment.cutmix, device) if augment.cutmix else None

    def __len__(self) -> int:
        full, rest = divmod(self.samples, self.batch)
        return full + (rest > 1)

    @abstractmethod
    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from batch ``start`` on."""

    def _rows(self, ids: Tensor, epoch: int, start: int) -> Iterator[Tensor]:
        """The positions of the samples of each batch. Distinct ids have distinct keys, so sorting them shuffles."""
        order = Noise(self.seed, ids).fold("order", epoch).keys.argsort(stable=True)
        for index in range(start, len(self)):
            yield order[index * self.batch : (index + 1) * self.batch]

    def _noise(self, ids: Tensor, epoch: int | Tensor) -> Noise:
        return Noise(self.seed, ids).fold("augment", epoch)

    def _finished(self, pixels: Tensor, labels: Tensor, ids: Tensor, epoch: int | Tensor) -> Batch:
        """Augmented on the device."""
        noise = self._noise(ids, epoch)
        return Batch(*training_batch(pixels, labels, noise, self.augment, self._sides, self.classes), ids)


class ResidentLoader(TrainLoader):
    """The whole split lies on the device as it was read, mostly uint8; batches are gathered and augmented there."""

    def __init__(
        self, source: Images, batch: int, device: torch.device, augment: Augment, seed: int, fused: Fuse | None = None
    ) -> None:
        super().__init__(source, batch, device, augment, seed)
        augment.check(*source.pixels.shape[2:])
        self._pixels = source.pixels.to(device)
        self._labels = source.labels.to(device)
        self._ids = source.ids.to(device)
        self._whole_batch = self._gathered if fused is None else fused(self._laid_out)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        when = torch.full((), epoch, device=self.device)  # a tensor, lest each epoch be compiled anew
        for rows in self._rows(self._ids, epoch, start):
            gather = self._whole_batch if len(rows) == self.batch else self._gathered
            yield Batch(*gather(rows, when))

    def _gathered(self, rows: Tensor, epoch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ids = self._ids[rows]
        batch = self._finished(self._pixels[rows], self._labels[rows], ids, epoch)
        return batch.x, batch.y, ids

    def _laid_out(self, rows: Tensor, epoch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same batch, its pixels in the order in which a GPU convolves them."""
        x, y, ids = self._gathered(rows, epoch)
        return x.contiguous(memory_format=torch.channels_last), y, ids


class StreamingLoader(TrainLoader):
    """Image files: a random part of each is decoded by threads, ahead of need; the rest happens on the device."""

    def __init__(self, source: ImageFiles, batch: int, device: torch.device, augment: Augment, seed: int) -> None:
        super().__init__(source, batch, device, augment, seed)
        augment.check(source.size, source.size)
        self._source = source

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        source = self._source
        groups = ((rows, self._jobs(rows, epoch)) for rows in self._rows(source.ids, epoch, start))
        for rows, pixels in _decoded(groups, self.device):
            labels, ids = source.labels[rows].to(self.device), source.ids[rows].to(self.device)
            yield self._finished(pixels, labels, ids, epoch)

    def _jobs(self, rows: Tensor, epoch: int) -> list[Job]:
        source = self._source
        noise = self._noise(source.ids[rows], epoch).fold("part")
        numbers = noise.uniform(decode.TRIES, decode.NUMBERS_PER_TRY).tolist()
        paths = (source.path(source.paths[row]) for row in rows.tolist())
        return [partial(decode.random_part, path, source.size, own) for path, own in zip(paths, numbers, strict=True)]


def train_loader(
    source: Source,
    batch: int,
    device: torch.device | str = "cpu",
    augment: Augment | None = None,
    seed: int = 0,
    fused: Fuse | None = None,
) -> TrainLoader:
    """The loader that suits the source.

    Args:
        source: the training split.
        batch: samples per batch.
        device: where the batches are wanted.
        augment: what to do to each image; nothing by default. Image files are cropped at random in any case.
        seed: the seed of the whole run.
        fused: what makes the way from images in memory to a whole batch fast, such as `torch.compile`.
    """
    device, augment = torch.device(device), augment or Augment()
    if isinstance(source, Images):
        return ResidentLoader(source, batch, device, augment, seed, fused)
    return StreamingLoader(source, batch, device, augment, seed)


def eval_batches(
    source: Source, batch: int, device: torch.device | str = "cpu", limit: int | None = None
) -> Iterator[Batch]:
    """The split as it is, in its order, without augmentation.

    Args:
        source: any split.
        batch: samples per batch; the last one may be smaller.
        device: where the batches are wanted.
        limit: stop after this many samples.
    """
    if batch < 1 or (limit is not None and limit < 1):
        raise HardsphereError(f"The batch size is {batch} and the limit {limit}, but both must be at least 1.")
    device, count = torch.device(device), min(len(source), limit or len(source))
    groups = (torch.arange(first, min(first + batch, count)) for first in range(0, count, batch))
    for rows, pixels in _plain(source, groups, device):
        yield Batch(to_float(pixels), source.labels[rows].to(device), source.ids[rows].to(device))


def _plain(source: Source, groups: Iterable[Tensor], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    if isinstance(source, Images):
        return ((rows, source.pixels[rows].to(device)) for rows in groups)
    paths, size = source.paths, source.size
    return _decoded(
        ((rows, [partial(decode.centre, source.path(paths[row]), size) for row in rows.tolist()]) for rows in groups),
        device,
    )


def _decoded(groups: Iterable[tuple[Tensor, list[Job]]], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Run each batch's decoding jobs on threads (Pillow lets go of the interpreter), some batches ahead of need."""
    pool = ThreadPoolExecutor(max_workers=min(32, os.cpu_count() or 1), thread_name_prefix="decode")
    pending: deque[tuple[Tensor, list[Future[Tensor]]]] = deque()
    try:
        for rows, jobs in groups:
            pending.append((rows, [pool.submit(job) for job in jobs]))
            if len(pending) > _AHEAD:
                yield _stacked(*pending.popleft(), device)
        while pending:
            yield _stacked(*pending.popleft(), device)
    finally:  # also when the epoch is abandoned half-way, or an image cannot be read
        pool.shutdown(wait=True, cancel_futures=True)


def _stacked(rows: Tensor, images: list[Future[Tensor]], device: torch.device) -> tuple[Tensor, Tensor]:
    pixels = torch.stack([image.result() for image in images])
    if device.type == "cuda":
        pixels = pixels.pin_memory()  # so that the copy overlaps with the work on the batch before
    return rows, pixels.to(device, non_blocking=device.type == "cuda")
