"""The sweep runner: trains, judges and records each run of a plan in one go, inside a budget of time.

    out/results.jsonl       one line per run and measurement: configuration, numbers, provenance
    out/outcomes/*.npz      its per-sample outcomes, bit-packed: what a later run is compared with
    work/<id>/              run directories and ledgers, so that what was interrupted goes on; may be thrown away

What is recorded is not done again. The budget is kept three times over: no run begins after it, none begins that, going
by recorded runs of its kind, would not end inside it, and one that lasts longer than expected is stopped between two
batches. Its checkpoints and ledger stay, and the next call goes on from them.
"""

from __future__ import annotations

import fcntl
import gc
import json
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hardsphere.config import to_dict
from hardsphere.data import DataSet
from hardsphere.data import load as load_data
from hardsphere.errors import HardsphereError
from hardsphere.evaluate import Progress
from hardsphere.evaluate.witness import model_digest
from hardsphere.files import write_json, write_text
from hardsphere.reproduce.measures import Measurement, Subject
from hardsphere.reproduce.outcomes import Bits, Estimate, difference, read_outcomes, write_outcomes
from hardsphere.reproduce.plan import Group, Plan, Run, read_plan, record_id, seconds
from hardsphere.runtime import environment, hardware, pick_device
from hardsphere.train import load, train
from hardsphere.train.loop import Reporter, Silence

SCHEMA = "hardsphere.sweep/1"
SAVE_EVERY = 120.0  # seconds between checkpoints inside an epoch, where a budget may end the run
TRAINED = "trained.json"  # beside the weights of a finished training: what there is to say about it
GPU_BATCH, CPU_BATCH = 250, 256  # an evaluation is stopped between batches, so they must not take minutes

Record = dict[str, Any]
Places = Path | str | Mapping[str, Path | str] | None


class OutOfTime(Exception):
    """The budget is spent; everything that was done is on disk."""


@dataclass(frozen=True)
class Swept:
    """What a sweep has so far.

    Attributes:
        out: the directory of the records.
        records: those of the plan, by id.
        missing: what is still to be measured, as (run, measurement).
        failed: runs that could not be trained or judged, with the reason; the next call tries them again.
    """

    out: Path
    records: dict[str, Record]
    missing: tuple[tuple[str, str], ...]
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return not self.missing


class Store:
    """The recorded results of a directory."""

    def __init__(self, out: Path) -> None:
        self.out, self.file = out, out / "results.jsonl"
        self.records: dict[str, Record] = {}
        for line in self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else ():
            try:
                record = json.loads(line)
                self.records[record["id"]] = record
            except (ValueError, KeyError, TypeError):
                raise HardsphereError(f"'{self.file}' holds a line that is no record of a sweep.") from None

    def add(self, record: Record, outcomes: Mapping[str, Bits]) -> None:
        """Write outcomes first, the record that refers to them last."""
        if outcomes:
            slug = re.sub(r"[^a-z0-9]+", "-", f"{record['run']} {record['measurement']['name']}".lower()).strip("-")
            record["outcomes"] = f"outcomes/{slug}-{record['id']}.npz"
            write_outcomes(self.out / record["outcomes"], outcomes)
        self.records[record["id"]] = record
        write_text(self.file, "".join(json.dumps(one) + "\n" for one in self.records.values()))

    def outcomes(self, record: Record) -> dict[str, Bits]:
        """The per-sample outcomes of a record."""
        if record.get("outcomes") is None:
            raise HardsphereError(f"The record of '{record['run']}' has no per-sample outcomes.")
        return read_outcomes(self.out / record["outcomes"])

    def compare(self, first: Record, second: Record, columns: Sequence[str]) -> Estimate:
        """First minus second, paired image by image; refused if they were not judged on the same images."""
        one, other = first["result"], second["result"]
        if one["data"] != other["data"] or one["ids"] != other["ids"]:
            raise HardsphereError(
                f"'{first['run']}' and '{second['run']}' were judged on different images, so they cannot be paired."
            )
        mine, theirs = self.outcomes(first), self.outcomes(second)
        for column in columns:
            if column not in mine or column not in theirs:
                raise HardsphereError(f"'{column}' was not measured on both '{first['run']}' and '{second['run']}'.")
        return difference([mine[column] for column in columns], [theirs[column] for column in columns])


def sweep(
    plan: Plan | Path | str | Mapping[str, Any],
    out: Path | str,
    budget: str | float | None = None,
    *,
    data_dir: Places = None,
    work: Path | str | None = None,
    device: str | None = None,
    batch: int | None = None,
    compile: bool = True,
    reporter: Reporter | None = None,
    progress: Callable[[Progress], None] | None = None,
    command: str = "",
    clock: Callable[[], float] = time.monotonic,
) -> Swept:
    """Train, judge and record the runs of a plan that are not recorded yet, as far as the budget goes.

    Args:
        plan: a YAML file, its content, or a `Plan`.
        out: where results are recorded.
        budget: such as ``9m``; none goes to the end.
        data_dir: where the data lies; a mapping from data set to directory if the plan has several.
        work: for run directories; ``out/work`` by default.
        batch: images at once while judging; outcomes do not depend on it.
        compile: as for `hardsphere.train`.
        reporter: watches training.
        progress: watches judging.
        command: for the record.
        clock: seconds that only grow.
    """
    plan, limit = read_plan(plan), seconds(budget)
    started = clock()
    folder = Path(out)
    chosen = pick_device(device)
    with _locked(folder):
        workplace = Path(work) if work is not None else folder / "work"
        write_text(workplace / ".gitignore", "*\n")  # weights and ledgers are no results
        state = _Sweep(
            plan,
            Store(folder),
            workplace,
            math.inf if limit is None else started + limit,
            math.inf if limit is None else limit,
            data_dir,
            chosen,
            batch or (GPU_BATCH if chosen.type == "cuda" else CPU_BATCH),
            compile,
            reporter or Silence(),
            progress,
            command,
            clock,
        )
        state.go()
    return state.swept()


@dataclass
class _Sweep:
    """One call: what stays the same while it lasts."""

    plan: Plan
    store: Store
    work: Path
    end: float
    budget: float
    data_dir: Places
    device: torch.device
    batch: int
    compile: bool
    reporter: Reporter
    progress: Callable[[Progress], None] | None
    command: str
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self.data: dict[tuple[str, int | None], DataSet] = {}
        self.failed: dict[str, str] = {}

    def go(self) -> None:
        todo = [run for run in self.plan.runs if self.unrecorded(run) or (self.wanted(run) and not self.trained(run))]
        for run in todo:
            self.test_data(run)  # a wrong --data must be said before hours of training, not after
        for run in todo:
            if self.clock() >= self.end:
                break
            if not self.fits(run):
                self.reporter.say(f"{run.name}: expected to take longer than the budget has left; put off.")
                continue
            if not self.attempt(run.name, partial(self.do, run)):
                break
        for group in self.waiting():
            if all(self.trained(run) for run in group.runs) and self.clock() < self.end:
                self.attempt(group.name, partial(self.together, group))

    def attempt(self, name: str, work: Callable[[], None]) -> bool:
        """Do some work; false if time ran out. What fails is said, and does not stop the rest."""
        try:
            work()
        except OutOfTime:
            self.reporter.say(f"{name}: the budget is spent; the same command goes on from here.")
            return False
        except HardsphereError as reason:
            self.failed[name] = str(reason)
            self.reporter.say(f"{name}: {reason}")
        return True

    def waiting(self) -> list[Group]:
        """The groups that are not recorded yet."""
        return [group for group in self.plan.groups if group.id not in self.store.records]

    def wanted(self, run: Run) -> bool:
        """Whether a group still needs the weights of a run."""
        return any(run.id == member.id for group in self.waiting() for member in group.runs)

    def trained(self, run: Run) -> bool:
        """Whether the weights of a finished training are there."""
        path = self.work / run.id
        return (path / TRAINED).exists() and (path / "checkpoints").is_dir()

    def unrecorded(self, run: Run) -> list[Measurement]:
        return [one for one in run.measurements if record_id(run.config, one) not in self.store.records]

    def do(self, run: Run) -> None:
        """Train (or go on, or find it trained), judge, record, and tidy up."""
        path = self.work / run.id
        if not self.trained(run):
            self.train(run, path)
        facts = json.loads((path / TRAINED).read_text(encoding="utf-8"))
        for measurement in self.unrecorded(run):
            self.judge(run, path, measurement, facts)
        self.tidy(run)

    def train(self, run: Run, path: Path) -> None:
        """Train to the end, and leave a note of it beside the weights."""
        self.reporter.say(f"{run.name}: training into {path}")
        begin = self.clock()
        trained = train(
            run.config,
            path,
            data_dir=self.place(run.config.dataset),
            resume=True,
            device=str(self.device),
            reporter=_Watch(self.reporter, run.config.epochs, self.clock, self.end),
            save_every=SAVE_EVERY if math.isfinite(self.end) else 600.0,
            compile=self.compile,
        )
        _tidy_memory(self.device)
        robust, clean = trained.position.best
        facts = {
            "epochs": run.config.epochs,
            "best_epoch": trained.position.best_epoch,
            "finished": trained.position.finished,
            "validation_robust": robust,
            "validation_clean": clean,
            **_training_time(path, self.clock() - begin),
        }
        write_json(path / TRAINED, facts)

    def tidy(self, run: Run) -> None:
        """Drop the weights that nobody needs any more, if they are not to be kept."""
        if not (self.plan.keep_weights or self.unrecorded(run) or self.wanted(run)):
            drop_weights(self.work / run.id)

    def judge(self, run: Run, path: Path, measurement: Measurement, trained: Record) -> None:
        if self.clock() >= self.end:
            raise OutOfTime
        identity = record_id(run.config, measurement)
        self.reporter.say(f"{run.name}: measuring {measurement.name}")
        subject = self.subject(run, path / f"measured-{identity}")
        begin = self.clock()
        measured = measurement.measure(subject)
        spent = self.clock() - begin
        record = {
            "schema": SCHEMA,
            "id": identity,
            "training": run.id,
            "run": run.name,
            "config": to_dict(run.config),
            "measurement": {"name": measurement.name, **measurement.describe()},
            "trained": {**trained, "selection": subject.deployed.selection},
            "result": measured.facts,
            "seconds": spent,
            "outcomes": None,
            "environment": environment(self.device),
            "command": self.command,
        }
        self.store.add(record, measured.outcomes)

    def together(self, group: Group) -> None:
        """Look at several trained models at once, and record what was seen."""
        self.reporter.say(f"{group.name}: looking at {', '.join(run.name for run in group.runs)}")
        subjects = {run.name: self.subject(run, self.work / run.id / f"seen-{group.id}") for run in group.runs}
        begin = self.clock()
        facts = group.function(subjects, self.store.out, **group.options)
        notes = {run.name: self.work / run.id / TRAINED for run in group.runs}
        record = {
            "schema": SCHEMA,
            "id": group.id,
            "group": group.name,
            "run": group.name,
            "configs": {run.name: to_dict(run.config) for run in group.runs},
            "models": {name: model_digest(subject.deployed.model) for name, subject in subjects.items()},
            "data": {name: subject.test.digest() for name, subject in subjects.items()},
            "measurement": {"name": group.name, **group.describe()},
            "trained": {
                name: {**json.loads(note.read_text(encoding="utf-8")), "selection": subjects[name].deployed.selection}
                for name, note in notes.items()
            },
            "result": json.loads(json.dumps(facts)),
            "seconds": self.clock() - begin,
            "outcomes": None,
            "environment": environment(self.device),
            "command": self.command,
        }
        self.store.add(record, {})
        for run in group.runs:
            self.tidy(next(one for one in self.plan.runs if one.id == run.id))

    def subject(self, run: Run, folder: Path) -> Subject:
        deployed = load(self.work / run.id)
        about = {"target": run.name, "data": f"{run.config.dataset} test", "selection": deployed.selection}
        if self.command:
            about["command"] = self.command
        return Subject(deployed, self.test_data(run).test, folder, self.device, self.batch, about, self.watched)

    def watched(self, state: Progress) -> None:
        """Pass on how an evaluation goes, and stop it when time is up: what it has done is in its ledger."""
        if self.progress is not None:
            self.progress(state)
        if self.clock() >= self.end:
            raise OutOfTime

    # -- time ---------------------------------------------------------------------------------------------------------

    def fits(self, run: Run) -> bool:
        """Whether to begin. What was begun goes on, and what fits into no budget is done in parts."""
        expected = self.expected(run)
        begun = (self.work / run.id / "checkpoints").exists()
        return begun or expected > self.budget or self.clock() + expected <= self.end

    def expected(self, run: Run) -> float:
        """Seconds, going by recorded runs on this hardware; what nothing is known about counts as nothing."""
        config = run.config
        kin = [
            record
            for record in self.store.records.values()
            if "config" in record
            and record["environment"]["device"] == hardware(self.device)
            and record["config"]["model"] == config.model
            and record["config"]["dataset"] == config.dataset
        ]
        closest = [one for one in kin if one["config"]["framework"] == config.framework] or kin
        per_epoch = max((one["trained"]["wall_seconds"] / one["config"]["epochs"] for one in closest), default=0.0)
        judging = 0.0
        for measurement in self.unrecorded(run):
            said = {"name": measurement.name, **measurement.describe()}
            judging += max((one["seconds"] for one in kin if one["measurement"] == said), default=0.0)
        return per_epoch * config.epochs + judging

    # -- data ---------------------------------------------------------------------------------------------------------

    def place(self, dataset: str) -> Path | None:
        return place_of(self.data_dir, dataset)

    def test_data(self, run: Run) -> DataSet:
        name, size = run.config.dataset, run.config.data.size
        if (name, size) not in self.data:
            self.data[name, size] = load_data(name, self.place(name), size=size)
        return self.data[name, size]

    def swept(self) -> Swept:
        wanted = [(run, one, record_id(run.config, one)) for run, one in self.plan.items()]
        held = {key: self.store.records[key] for _, _, key in wanted if key in self.store.records}
        missing = [(run.name, one.name) for run, one, key in wanted if key not in held]
        for group in self.plan.groups:
            if group.id in self.store.records:
                held[group.id] = self.store.records[group.id]
            else:
                missing.append((group.name, "together"))
        return Swept(self.store.out, held, tuple(missing), self.failed)


class _Watch:
    """A reporter that stops a training when time is up, or when the next epoch would not fit into what is left."""

    def __init__(self, inner: Reporter, epochs: int, clock: Callable[[], float], end: float) -> None:
        self.inner, self.epochs, self.clock, self.end = inner, epochs, clock, end
        self.since = clock()

    def begin(self, total: int, done: int) -> None:
        self.inner.begin(total, done)
        self.since = self.clock()

    def advance(self, done: int) -> None:
        self.inner.advance(done)
        if self.clock() >= self.end:
            raise OutOfTime

    def epoch(self, row: dict[str, Any]) -> None:
        self.inner.epoch(row)
        now = self.clock()
        lasted, self.since = now - self.since, now
        if row["epoch"] < self.epochs and now + lasted > self.end:
            raise OutOfTime  # the epoch's checkpoint is written already

    def say(self, text: str) -> None:
        self.inner.say(text)


def place_of(data_dir: Places, dataset: str) -> Path | None:
    """Where a data set lies."""
    place = data_dir.get(dataset) if isinstance(data_dir, Mapping) else data_dir
    return None if place is None or dataset == "digits" else Path(place)


def drop_weights(path: Path) -> None:
    """Keep of a run directory only what is small: configuration, environment and metrics."""
    (path / TRAINED).unlink(missing_ok=True)  # first: what is left must never look like a finished training
    for item in path.iterdir():
        if item.is_dir():
            shutil.rmtree(item)


def _tidy_memory(device: torch.device) -> None:
    """Forget compiled networks and recorded graphs: the compiler gives up on a process that compiles many of them."""
    if device.type == "cuda":
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


def _training_time(path: Path, wall: float) -> dict[str, float]:
    """Minutes of training alone, over all calls, and seconds with everything around it, over this call at least."""
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    spent = sum(row["seconds"] for row in rows)
    return {"minutes": spent / 60, "wall_seconds": max(wall, spent)}


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    try:
        out.mkdir(parents=True, exist_ok=True)
        stream = (out / ".lock").open("w")
    except OSError as reason:
        raise HardsphereError(f"The directory '{out}' cannot be written ({reason}).") from None
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise HardsphereError(f"Another sweep is writing into '{out}' right now.") from None
        yield
