"""The recorded results of a directory: what was measured on which weights, kept for good and found again.

    out/results.jsonl       one line per measurement of a training: configuration, numbers, provenance
    out/outcomes/*.npz      its per-sample outcomes, bit-packed: what a later run is compared with
    out/training/*.jsonl    the log of each training

All of it is small and needs no weights to go on from: ``tar czf results.tgz --exclude=./work -C out .`` takes it from a
machine that is lent to the next one.

Lines are only ever appended, under a lock, so that several processes may record into one directory, and a process that
dies while writing loses its own line at most.

Training on a GPU does not repeat bit for bit: the same configuration trained again is another set of weights. So each
line carries the digest of the weights it was measured on, and numbers that stand in one row of a table are always those
of one set (`Store.of_one_training`); what was measured on others stays on record and is not mixed in.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from hardsphere.errors import HardsphereError
from hardsphere.files import read_objects, write_text
from hardsphere.reproduce.measures import Measurement
from hardsphere.reproduce.outcomes import Bits, Estimate, difference, read_outcomes, write_outcomes
from hardsphere.reproduce.plan import Run, family_id, record_id

SCHEMA = "hardsphere.sweep/2"

Record = dict[str, Any]


class Store:
    """The recorded results of a directory.

    Attributes:
        lines: every record, the oldest first.
    """

    def __init__(self, out: Path) -> None:
        self.out, self.file = out, out / "results.jsonl"
        self.lines: list[Record] = []
        self.refresh()

    def refresh(self) -> None:
        """Take in what other processes have recorded meanwhile."""
        text = self.file.read_text(encoding="utf-8", errors="replace") if self.file.exists() else ""
        complete, _, _ = text.rpartition("\n")  # a line without an end is one that is being written, or never was
        self.lines = [self._parsed(line) for line in complete.splitlines()]

    def _parsed(self, line: str) -> Record:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not {"id", "run", "measurement", "result"} <= record.keys():
            raise HardsphereError(f"'{self.file}' holds a line that is no record of a sweep.")
        return record

    def add(self, record: Record, outcomes: Mapping[str, Bits]) -> None:
        """Write outcomes first, the record that refers to them last."""
        if outcomes:
            name = slug(f"{record['run']} {record['measurement']['name']}")
            record["outcomes"] = f"outcomes/{name}-{record['id']}-{record['weights'][:6]}.npz"
            write_outcomes(self.out / record["outcomes"], outcomes)
        with self.locked() as stream:
            _end_with_a_whole_line(stream)
            stream.write((json.dumps(record) + "\n").encode())
            stream.flush()
            os.fsync(stream.fileno())
        self.refresh()

    def add_training(self, run: Run, weights: str, metrics: str) -> None:
        """Keep the log of a training, which is small, where its weights are not kept."""
        write_text(self.out / "training" / f"{slug(run.name)}-{run.id}-{weights[:6]}.jsonl", metrics)

    def log_of(self, record: Record) -> list[Record]:
        """The epochs of the training behind a record; none if its log is not here."""
        files = sorted((self.out / "training").glob(f"*-{record['training']}-{record['weights'][:6]}.jsonl"))
        return read_objects(files[0]) if files else []

    @contextmanager
    def locked(self) -> Iterator[IO[bytes]]:
        """The file, while no other process writes into the directory."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            stream = self.file.open("ab+")
        except OSError as reason:
            raise HardsphereError(f"The directory '{self.out}' cannot be written ({reason}).") from None
        with stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield stream

    # -- what is recorded ---------------------------------------------------------------------------------------------

    def latest(self, identity: str) -> Record | None:
        """The last record of that id."""
        return next((one for one in reversed(self.lines) if one["id"] == identity), None)

    def weights_of(self, training: str) -> list[str]:
        """The digests of the weights that a training has been recorded with, the oldest first."""
        return list(dict.fromkeys(one["weights"] for one in self.lines if one.get("training") == training))

    def unmeasured(self, run: Run, weights: str) -> list[Measurement]:
        """What is still to be measured on these weights."""
        known = {one["id"] for one in self.lines if one.get("weights") == weights}
        return [one for one in run.measurements if record_id(run.config, one) not in known]

    def unrecorded(self, run: Run) -> list[Measurement]:
        """What is missing to a whole row: nothing as soon as one set of weights has it all."""
        missing = [self.unmeasured(run, weights) for weights in self.weights_of(run.id)]
        return min(missing, key=len, default=list(run.measurements))

    def of_one_training(self, run: Run) -> dict[str, Record]:
        """The measurements of a run by name, all of one set of weights: the one that has most, the newest of equals.

        Where a measurement was made on another number of images than the run asks for, that one takes its place.
        """
        best: dict[str, Record] = {}
        rank = (0, 0)
        for weights in self.weights_of(run.id):
            found = self._measured_on(run, weights)
            exact = sum(record_id(run.config, one) == found[one.name]["id"] for one in _among(run, found))
            if (exact, len(found)) >= rank:
                best, rank = found, (exact, len(found))
        return best

    def _measured_on(self, run: Run, weights: str) -> dict[str, Record]:
        ours = [one for one in self.lines if one.get("weights") == weights]
        found = {}
        for measurement in run.measurements:
            exact, alike = record_id(run.config, measurement), family_id(run.config, measurement)
            fitting = [one for one in ours if one["id"] == exact] or [one for one in ours if one["family"] == alike]
            if fitting:
                found[measurement.name] = max(fitting, key=_images)
        return found

    # -- outcomes -----------------------------------------------------------------------------------------------------

    def outcomes(self, record: Record) -> dict[str, Bits]:
        """The per-sample outcomes of a record."""
        if record.get("outcomes") is None:
            raise HardsphereError(f"The record of '{record['run']}' has no per-sample outcomes.")
        return read_outcomes(self.out / record["outcomes"])

    def compare(self, pairs: Sequence[tuple[Record, Record]], columns: Sequence[str]) -> Estimate:
        """First minus second of a pair, image by image, or the mean over several pairs.

        Refused if they were not judged on the same images. Where an attack had fewer images in one of them, these,
        which are the first ones, are what is compared.
        """
        every = [record for pair in pairs for record in pair]
        for record in every[1:]:
            if not same_images(every[0], record):
                raise HardsphereError(
                    f"'{every[0]['run']}' and '{record['run']}' were judged on different images, so they cannot be "
                    "paired."
                )
        outcomes = [self.outcomes(record) for record in every]
        for record, found in zip(every, outcomes, strict=True):
            if missing := [column for column in columns if column not in found]:
                raise HardsphereError(f"'{missing[0]}' was not measured on '{record['run']}'.")
        n = min(len(found[column]) for found in outcomes for column in columns)
        firsts, seconds = ([found[column][:n] for found in outcomes[i::2] for column in columns] for i in (0, 1))
        return difference(firsts, seconds)


def same_images(first: Record, second: Record) -> bool:
    """Whether two measurements were made on the same images."""
    return all(first["result"][key] == second["result"][key] for key in ("data", "ids"))


def slug(text: str) -> str:
    """Words as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _among(run: Run, found: Mapping[str, Record]) -> list[Measurement]:
    return [one for one in run.measurements if one.name in found]


def _images(record: Record) -> int:
    """How many images the most expensive column of a record has."""
    columns = record["result"].get("columns", {}).values()
    return min((int(one.get("n", 0)) for one in columns), default=0)


def _end_with_a_whole_line(stream: IO[bytes]) -> None:
    """Cut off what a process that died while writing has left."""
    stream.seek(0)
    text = stream.read()
    if text and not text.endswith(b"\n"):
        stream.truncate(text.rfind(b"\n") + 1)
    stream.seek(0, os.SEEK_END)
