"""Accuracy under common corruptions, in the same ledger: 15 corruptions at 5 severities, one row per sample and cell.

The corrupted images come from a set on disk (CIFAR-10-C or ImageNet-C, official or generated) or are made on the fly.
Unlike an attack, a corruption is judged on every sample, also on those that the model gets wrong when they are clean:
that is how the paper's mCA counts.
"""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hardsphere import corruptions
from hardsphere.attacks.base import attacking
from hardsphere.corruptions import (
    CORRUPTIONS,
    SEVERITIES,
    Baseline,
    CorruptionScores,
    CorruptionSet,
    FrostSource,
    FrostStandInWarning,
    frost_source,
)
from hardsphere.corruptions.sets import MANIFEST
from hardsphere.data import ImageFiles, Images, Source, to_float
from hardsphere.data.decode import read_rgb
from hardsphere.errors import HardsphereError
from hardsphere.evaluate import witness
from hardsphere.evaluate.card import corruption_card
from hardsphere.evaluate.clock import Progress
from hardsphere.evaluate.ledger import Ledger, Outcome, Row, Sample, ledger_in
from hardsphere.evaluate.runner import DEFAULT_BATCH, recognise
from hardsphere.evaluate.samples import gather
from hardsphere.files import write_json

SUITE = "corruptions/1"


class Corrupted(Protocol):
    """Where corrupted images come from.

    Attributes:
        names: the corruptions there are.
        about: in words, for the card.
        frost_stand_in: whether frost is the drawn stand-in.
        identity: what decides the images beside the clean ones.
    """

    names: tuple[str, ...]
    about: str
    frost_stand_in: bool
    identity: dict[str, Any]

    def images(self, name: str, severity: int, positions: Sequence[int]) -> Tensor:
        """uint8 images (n, 3, H, W) at these positions of the clean set."""
        ...


@dataclass(frozen=True)
class CorruptionEvaluation:
    """What an evaluation under corruptions found.

    Attributes:
        ledger: the rows everything is computed from.
        card: the report card, in plain values.
        scores: mCA, the mean of each corruption, the table of cells, and mCE if there is a baseline.
    """

    ledger: Ledger
    card: dict[str, Any]
    scores: CorruptionScores

    @property
    def clean_accuracy(self) -> float:
        return self.ledger.clean_accuracy()


def evaluate_corruptions(
    model: nn.Module,
    source: Source,
    corrupted: Path | str | None = None,
    *,
    names: Sequence[str] | None = None,
    seed: int = 0,
    frost: str | Path | None = None,
    baseline: Baseline | None = None,
    limit: int | None = None,
    batch: int = DEFAULT_BATCH,
    out: Path | str | None = None,
    device: torch.device | str | None = None,
    progress: Callable[[Progress], None] | None = None,
    about: Mapping[str, Any] | None = None,
) -> CorruptionEvaluation:
    """Measure accuracy under common corruptions.

    Args:
        model: maps images in [0, 1] to logits; it is left as it was found.
        source: the clean test images, in the order of the corrupted set.
        corrupted: directory of a set in the layout of CIFAR-10-C or ImageNet-C; by default the clean images are
            corrupted on the fly.
        names: which corruptions; by default the 15 of the mean.
        seed: of corruptions made on the fly.
        frost: directory of frost photographs for corruptions made on the fly.
        baseline: what the mean corruption error is relative to.
        limit: the first so many images.
        out: directory for ``ledger.db`` and ``card.json``; the same call goes on there if it was interrupted.
    """
    samples = gather(source, None, None, None, limit)
    cells = find_corrupted(source, corrupted, names=names, seed=seed, frost=frost)
    home = witness.device_of(model, torch.device("cpu"))
    model = witness.in_float32(model, samples.images([0], home)).model
    place = home if device is None else torch.device(device)
    identity = {
        "suite": SUITE,
        "suite_hash": _hash(cells.names),
        "norm": None,
        "eps": [0.0],
        "seed": seed,
        "eot": 1,
        "model": witness.model_digest(model),
        "data": samples.digest(),
        "ids": None,
        "n": len(samples),
        "shard": None,
        "images": False,
        **cells.identity,
    }
    with (
        witness.moved(model, home, place),
        attacking(model),
        witness.plain_float32(place),
        ledger_in(out) as (ledger, directory),
    ):
        ledger.claim(identity)
        witness.introduce(model, samples.images([0], place))
        recognise(ledger, model, samples, place)
        run = _Run(model, cells, samples.labels, samples.ids, batch, place, ledger, progress)
        run.clean(lambda positions: samples.images(positions, place))
        for name in cells.names:
            for severity in SEVERITIES:
                run.cell(name, severity)
        ledger.settle()
        result = corruptions.scores(
            _accuracies(ledger, cells.names), frost_stand_in=cells.frost_stand_in, baseline=baseline
        )
        card = corruption_card(ledger, SUITE, result, cells.about, samples, place, dict(about or {}))
        if directory is not None:
            write_json(directory / "card.json", card)
        return CorruptionEvaluation(ledger, card, result)


def baseline_named(text: str) -> Baseline:
    """``alexnet``, or the errors of another model from its ``card.json`` under corruptions."""
    if text.lower() == "alexnet":
        return corruptions.ALEXNET
    try:
        card = json.loads(Path(text).read_text())
        means = card["corruptions"]["per_corruption"]
    except (OSError, ValueError, KeyError, TypeError):
        raise HardsphereError(f"'{text}' is neither alexnet nor the card.json of corruptions.") from None
    if card["corruptions"]["frost_stand_in"]:
        raise HardsphereError(f"The frost of '{text}' is a stand-in, so it can be no baseline.")
    return Baseline(card["target"] or text, {name: 1 - mean for name, mean in means.items()})


@dataclass
class _Run:
    """One pass through the cells."""

    model: nn.Module
    cells: Corrupted
    labels: Tensor
    ids: Tensor
    batch: int
    device: torch.device
    ledger: Ledger
    progress: Callable[[Progress], None] | None

    def __post_init__(self) -> None:
        self.begin = time.perf_counter()
        self.total = len(self.cells.names) * len(SEVERITIES) * len(self.labels)
        self.finished = self.worked = 0

    def clean(self, images: Callable[[Sequence[int]], Tensor]) -> None:
        """Classify the clean images."""
        known = {sample.position for sample in self.ledger.samples()}
        for positions in self._chunks():
            if not known.issuperset(positions):
                predicted = witness.clean_predictions(self.model, images(positions)).tolist()
                rows = zip(positions, predicted, strict=True)
                self.ledger.add_samples(
                    Sample(int(self.ids[place]), place, int(self.labels[place]), guess) for place, guess in rows
                )

    def cell(self, name: str, severity: int) -> None:
        """Classify the images of one corruption at one severity."""
        attack = f"{name}-{severity}"
        done = self.ledger.done(0.0, attack)
        for positions in self._chunks():
            ids = self.ids[torch.tensor(positions)].tolist()
            if not done.issuperset(ids):
                begin = time.perf_counter()
                images = to_float(self.cells.images(name, severity, positions).to(self.device))
                predicted = witness.clean_predictions(self.model, images).tolist()
                share = (time.perf_counter() - begin) / len(positions)
                labels = self.labels[torch.tensor(positions)].tolist()
                outcomes = [
                    (Outcome.HELD if guess == label else Outcome.BROKEN).value
                    for guess, label in zip(predicted, labels, strict=True)
                ]
                self.ledger.add(
                    Row(0.0, attack, sample, outcome, None, None, guess, 1.0, 0.0, share)
                    for sample, outcome, guess in zip(ids, outcomes, predicted, strict=True)
                )
                self.worked += len(positions)
            self.finished += len(positions)
            self._tell(attack, positions[-1] + 1)

    def _chunks(self) -> list[list[int]]:
        count = len(self.labels)
        return [list(range(start, min(start + self.batch, count))) for start in range(0, count, self.batch)]

    def _tell(self, attack: str, done: int) -> None:
        if self.progress is not None:
            elapsed = time.perf_counter() - self.begin
            left = elapsed * (self.total - self.finished) / self.worked if self.worked else None
            self.progress(Progress(attack, None, done, len(self.labels), None, elapsed, left))


def _accuracies(ledger: Ledger, names: Sequence[str]) -> dict[tuple[str, int], float]:
    """Accuracy of each cell, in the order of the corruptions: a query on the ledger."""
    held: dict[str, list[bool]] = {}
    for row in ledger.rows(0.0):
        held.setdefault(row.attack, []).append(row.outcome == Outcome.HELD.value)
    hits = {(name, severity): held[f"{name}-{severity}"] for name in names for severity in SEVERITIES}
    return {cell: sum(hit) / len(hit) for cell, hit in hits.items()}


def _hash(names: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps([SUITE, list(names)]).encode()).hexdigest()[:8]


# ---------------------------------------------------------------------------------------------------------------------
# Where corrupted images come from
# ---------------------------------------------------------------------------------------------------------------------


def find_corrupted(
    source: Source, directory: Path | str | None, *, names: Sequence[str] | None, seed: int, frost: str | Path | None
) -> Corrupted:
    """A set on disk, or the clean images corrupted on the fly."""
    if directory is None:
        return OnTheFly(source, tuple(names or CORRUPTIONS), seed, frost_source(frost))
    root = Path(directory)
    if frost is not None:
        raise HardsphereError(f"'{root}' brings its own frost: leave --frost away.")
    if (root / "labels.npy").exists() or not root.is_dir():
        return FromArrays(corruptions.read_cifar(root, names), source)
    return FromFolders(root, source, names)


class OnTheFly:
    """Corrupts the clean images as they are asked for; 224-pixel constants from 64 pixels on, else CIFAR's."""

    def __init__(self, source: Source, names: tuple[str, ...], seed: int, frost: FrostSource) -> None:
        if isinstance(source, Images):
            _check_pixels(source.pixels)
        size = source.size if isinstance(source, ImageFiles) else source.pixels.shape[-1]
        self.source, self.names, self.seed, self.frost = source, names, seed, frost
        self.variant = "imagenet" if size >= 64 else "cifar"
        self.frost_stand_in = "frost" in names and frost.stand_in
        origin = f"; frost: {frost.origin}" if "frost" in names else ""
        self.about = f"made on the fly with seed {seed}, {self.variant} constants{origin}"
        self.identity = {"corrupted": self.about}

    def images(self, name: str, severity: int, positions: Sequence[int]) -> Tensor:
        part = self.source.subset(positions)
        pixels = part.pixels if isinstance(part, Images) else _decoded(part)
        with warnings.catch_warnings():  # the card says it, once
            warnings.simplefilter("ignore", FrostStandInWarning)
            return corruptions.corrupt(
                pixels, name, severity, seed=self.seed, variant=self.variant, ids=part.ids, frost=self.frost
            )


class FromArrays:
    """A set in the layout of CIFAR-10-C."""

    def __init__(self, found: CorruptionSet, source: Source) -> None:
        if found.count < len(source) or not torch.equal(found.labels()[: len(source)], source.labels):
            raise HardsphereError(
                f"'{found.directory}' holds {found.count} images per severity whose labels are not those of the "
                f"{len(source)} test images: evaluate on the data that it was made from."
            )
        self.found = found
        self.names = tuple(name for name in found.names if name in CORRUPTIONS) or found.names
        self.frost_stand_in = found.frost_stand_in
        made = "official, or without a manifest" if found.official else "generated"
        frost = f"; frost: {found.manifest.get('frost', 'unknown')}" if found.manifest else ""
        self.about = f"{found.directory} ({made}{frost})"
        self.identity = {"corrupted": str(found.directory), "content": _content(self)}

    def images(self, name: str, severity: int, positions: Sequence[int]) -> Tensor:
        return self.found.images(name, severity, positions[0], positions[-1] + 1)


class FromFolders:
    """A set in the layout of ImageNet-C: ``<corruption>/<severity>/<class>/<image>.JPEG``."""

    def __init__(self, root: Path, source: Source, names: Sequence[str] | None) -> None:
        if not isinstance(source, ImageFiles):
            raise HardsphereError(f"'{root}' is laid out as ImageNet-C, which needs an image folder as its data.")
        wanted = tuple(names or CORRUPTIONS)
        missing = [name for name in wanted if not (root / name).is_dir()]
        if names is not None and missing:
            raise HardsphereError(f"'{root}' lacks {', '.join(missing)}.")
        self.names = tuple(name for name in wanted if name not in missing)
        if not self.names:
            raise HardsphereError(f"'{root}' holds no corrupted set: neither labels.npy nor folders such as fog/1/.")
        self.root, self.source = root, source
        manifest = root / MANIFEST
        made = json.loads(manifest.read_text()) if manifest.exists() else {}
        self.frost_stand_in = "frost" in self.names and bool(made.get("frost_stand_in", False))
        self.about = f"{root} ({'generated' if made else 'official, or without a manifest'})"
        self.identity = {"corrupted": str(root), "content": _content(self)}

    def images(self, name: str, severity: int, positions: Sequence[int]) -> Tensor:
        return torch.stack([self._image(name, severity, Path(self.source.paths[place])) for place in positions])

    def _image(self, name: str, severity: int, path: Path) -> Tensor:
        import numpy as np
        from PIL.Image import Resampling

        file = self.root / name / str(severity) / path.parent.name / f"{path.stem}.JPEG"
        if not file.exists():
            raise HardsphereError(f"'{file}' is missing, so '{self.root}' is not the corrupted version of this data.")
        image, size = read_rgb(file), self.source.size
        short = min(image.width, image.height)
        if short < size:
            raise HardsphereError(f"'{file}' is {image.width}x{image.height}, smaller than the model's {size} pixels.")
        # The images of a set are cut already: their middle square shows what the model's own images show.
        left, top = (image.width - short) // 2, (image.height - short) // 2
        square = image.crop((left, top, left + short, top + short))
        shown = square if short == size else square.resize((size, size), Resampling.BILINEAR)
        return torch.from_numpy(np.array(shown)).permute(2, 0, 1)


def _content(cells: Corrupted) -> str:
    """A digest of the first image of every cell: another set may come to lie at the same place."""
    sha = hashlib.sha256()
    for name in cells.names:
        for severity in SEVERITIES:
            sha.update(cells.images(name, severity, [0]).contiguous().numpy().data)
    return sha.hexdigest()[:16]


def _check_pixels(pixels: Tensor) -> None:
    if pixels.dtype != torch.uint8:
        raise HardsphereError("Corruptions are defined on 8-bit images, but these have other values between.")
    if pixels.shape[1] != 3:
        raise HardsphereError("Corruptions are defined on colour images, but these are grey.")


def _decoded(source: ImageFiles) -> Tensor:
    from hardsphere.data.decode import centre

    return torch.stack([centre(source.root / path, source.size) for path in source.paths])
