"""The sweep runner: trains, judges and records each run of a plan in one go, inside a budget of time.

    out/                    the records: see `hardsphere.reproduce.store`
    work/<id>/              run directories and ledgers, so that what was interrupted goes on; may be thrown away

What is recorded is not done again, whether its weights are still there or not. A run of which something is missing goes
on with the weights in ``work``; if they are gone it is trained again, and everything is measured anew on the new
weights, unless they are the same bit for bit: one row never mixes the numbers of two trainings.

The budget is kept three times over: no run begins after it, none begins that, going by recorded runs of its kind, would
not end inside it, and one that lasts longer than expected is stopped between two batches. Its checkpoints and ledger
stay, and the next call goes on from them.

Several processes may work on one plan and one directory: each run is done by whoever claims it first. Within a process
the runs follow one another; compiled networks and recorded graphs are forgotten in between.
"""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import time
import traceback
from collections.abc import Callable, Mapping
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
from hardsphere.reproduce.plan import Group, Plan, Run, family_id, read_plan, record_id, seconds
from hardsphere.reproduce.store import SCHEMA, Record, Store, claimed
from hardsphere.runtime import environment, hardware, pick_device
from hardsphere.train import load, train
from hardsphere.train.loop import Reporter, Silence

SAVE_EVERY = 120.0  # seconds between checkpoints inside an epoch, where a budget may end the run
TRAINED = "trained.json"  # beside the weights of a finished training: what there is to say about it
COMMIT = "HARDSPHERE_COMMIT"  # the variable that names the commit where the source is a copy outside of git
GPU_BATCH, CPU_BATCH = 1000, 256  # small batches leave a GPU idle; an evaluation is stopped between two of them

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
    workplace = Path(work) if work is not None else folder / "work"
    try:
        write_text(workplace / ".gitignore", "*\n")  # weights and ledgers are no results
    except OSError as reason:
        raise HardsphereError(f"The directory '{workplace}' cannot be written ({reason}).") from None
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
        self.pace = _Pace(self.clock, self.end)
        self.spent = False

    def go(self) -> None:
        todo = [run for run in self.plan.runs if self.is_open(run)]
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
        self.look()

    def attempt(self, name: str, work: Callable[[], None]) -> bool:
        """Do some work; false if time ran out. What fails is said, and does not stop the rest."""
        try:
            work()
        except OutOfTime:
            if not self.spent:
                self.reporter.say(f"{name}: the budget is spent; the same command goes on from here.")
            self.spent = True
            return False
        except HardsphereError as reason:
            self.failed[name] = str(reason)
            self.reporter.say(f"{name}: {reason}")
        except RuntimeError as reason:
            # What a GPU says when its memory is full or when it fails; other runs may fit, and tables must be written.
            self.failed[name] = f"{type(reason).__name__}: {str(reason).strip().partition(chr(10))[0]}"
            self.reporter.say(f"{name}: {traceback.format_exc()}")
            _tidy_memory(self.device)
        return True

    def waiting(self) -> list[Group]:
        """The groups that are not recorded yet."""
        return [group for group in self.plan.groups if self.store.latest(group.id) is None]

    def wanted(self, run: Run) -> bool:
        """Whether a group still needs the weights of a run."""
        return any(run.id == member.id for group in self.waiting() for member in group.runs)

    def trained(self, run: Run) -> bool:
        """Whether the weights of a finished training are there."""
        path = self.work / run.id
        return (path / TRAINED).exists() and (path / "checkpoints").is_dir()

    def note(self, run: Run) -> Record:
        """What there is to say about a finished training."""
        found: Record = json.loads((self.work / run.id / TRAINED).read_text(encoding="utf-8"))
        return found

    def is_open(self, run: Run) -> bool:
        """Whether there is anything left to do for a run."""
        return bool(self.store.unrecorded(run)) or (self.wanted(run) and not self.trained(run))

    def do(self, run: Run) -> None:
        """Train (or go on, or find it trained), judge, record, and tidy up; unless another process is at it."""
        with claimed(self.work / f"{run.id}.lock") as ours:
            self.store.refresh()
            if not ours:
                self.reporter.say(f"{run.name}: another process is at it; left to that one.")
            elif self.is_open(run):
                if not self.trained(run):
                    self.train(run)
                self.look()
                if self.store.unrecorded(run):
                    self.judge_all(run)
                self.tidy(run)

    def judge_all(self, run: Run) -> None:
        """Everything that is still to be measured on the weights of a run; one that fails does not stop the others."""
        for measurement in self.store.unmeasured(run, self.note(run)["weights"]):
            if not self.attempt(f"{run.name}, {measurement.name}", partial(self.judge, run, measurement)):
                raise OutOfTime

    def train(self, run: Run) -> None:
        """Train to the end, and leave a note of it beside the weights."""
        path, earlier = self.work / run.id, self.store.weights_of(run.id)
        self.reporter.say(f"{run.name}: training into {path}")
        begin = self.clock()
        try:
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
        finally:
            _tidy_memory(self.device)
        robust, clean = trained.position.best
        weights = model_digest(load(path).model)
        facts = {
            "epochs": run.config.epochs,
            "best_epoch": trained.position.best_epoch,
            "finished": trained.position.finished,
            "validation_robust": robust,
            "validation_clean": clean,
            "weights": weights,
            "instead_of": [other for other in earlier if other != weights],
            **_training_time(path, self.clock() - begin),
        }
        self.store.add_training(run, weights, (path / "metrics.jsonl").read_text(encoding="utf-8"))
        write_json(path / TRAINED, facts)
        if facts["instead_of"]:
            self.reporter.say(f"{run.name}: trained again, to other weights than before; all is measured on these.")

    def tidy(self, run: Run) -> None:
        """Drop the weights that nobody needs any more, if they are not to be kept."""
        if not (self.plan.keep_weights or self.store.unrecorded(run) or self.wanted(run)):
            drop_weights(self.work / run.id)

    def judge(self, run: Run, measurement: Measurement) -> None:
        if self.clock() >= self.end:
            raise OutOfTime
        identity = record_id(run.config, measurement)
        self.reporter.say(f"{run.name}: measuring {measurement.name}")
        subject, trained = self.subject(run, self.work / run.id / f"measured-{identity}")
        begin = self.clock()
        measured = measurement.measure(subject)
        assert measured.facts.get("model", trained["weights"]) == trained["weights"], "another model was measured"
        record = {
            "schema": SCHEMA,
            "id": identity,
            "family": family_id(run.config, measurement),
            "training": run.id,
            "weights": trained["weights"],
            "run": run.name,
            "config": to_dict(run.config),
            "measurement": {"name": measurement.name, **measurement.describe()},
            "trained": trained,
            "result": measured.facts,
            "seconds": self.clock() - begin,
            "outcomes": None,
            **self.provenance(),
        }
        self.store.add(record, measured.outcomes)
        _tidy_memory(self.device, compiled=False)

    def look(self) -> None:
        """Look at the groups whose models are all trained by now: that takes seconds, and weights may not last."""
        for group in self.waiting():
            if all(self.trained(run) for run in group.runs) and self.clock() < self.end:
                self.attempt(group.name, partial(self.together, group))

    def together(self, group: Group) -> None:
        """Look at several trained models at once, and record what was seen."""
        with claimed(self.work / f"{group.id}.lock") as ours:
            self.store.refresh()
            if not ours or self.store.latest(group.id) is not None:
                return
            self.reporter.say(f"{group.name}: looking at {', '.join(run.name for run in group.runs)}")
            found = {run.name: self.subject(run, self.work / run.id / f"seen-{group.id}") for run in group.runs}
            subjects = {name: subject for name, (subject, _) in found.items()}
            begin = self.clock()
            facts = group.function(subjects, self.store.out, **group.options)
            record = {
                "schema": SCHEMA,
                "id": group.id,
                "group": group.name,
                "run": group.name,
                "configs": {run.name: to_dict(run.config) for run in group.runs},
                "models": {name: trained["weights"] for name, (_, trained) in found.items()},
                "data": {name: subject.test.digest() for name, subject in subjects.items()},
                "measurement": {"name": group.name, **group.describe()},
                "trained": {name: trained for name, (_, trained) in found.items()},
                "result": json.loads(json.dumps(facts)),
                "seconds": self.clock() - begin,
                "outcomes": None,
                **self.provenance(),
            }
            self.store.add(record, {})
        for run in group.runs:
            self.tidy(next(one for one in self.plan.runs if one.id == run.id))

    def provenance(self) -> Record:
        """What numbers depend on; a copy of the source without version control is told its commit."""
        machine = environment(self.device)
        machine["commit"] = machine["commit"] or os.environ.get(COMMIT)
        return {"environment": machine, "command": self.command}

    def subject(self, run: Run, folder: Path) -> tuple[Subject, Record]:
        """A trained model ready to be judged, and what there is to say about its training."""
        deployed, note = load(self.work / run.id), self.note(run)
        if model_digest(deployed.model) != note["weights"]:
            raise HardsphereError(
                f"The weights in '{self.work / run.id}' are not those that were trained there: remove that directory."
            )
        about = {"target": run.name, "data": f"{run.config.dataset} test", "selection": deployed.selection}
        if self.command:
            about["command"] = self.command
        subject = Subject(deployed, self.test_data(run).test, folder, self.device, self.batch, about, self.watched)
        return subject, {**note, "selection": deployed.selection}

    def watched(self, state: Progress) -> None:
        """Pass on how an evaluation goes, and stop it when time is up: what it has done is in its ledger."""
        if self.progress is not None:
            self.progress(state)
        self.pace.step(f"{state.attack} {state.ball}", state.done < state.total)

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
            for record in self.store.lines
            if "config" in record
            and record["environment"]["device"] == hardware(self.device)
            and record["config"]["model"] == config.model
            and record["config"]["dataset"] == config.dataset
        ]
        closest = [one for one in kin if one["config"]["framework"] == config.framework] or kin
        per_epoch = max((one["trained"]["wall_seconds"] / one["config"]["epochs"] for one in closest), default=0.0)
        judging = 0.0
        # Weights that are gone have to be made again, and then everything has to be measured on the new ones.
        todo = self.store.unmeasured(run, self.note(run)["weights"]) if self.trained(run) else run.measurements
        for measurement in todo if self.store.unrecorded(run) else ():
            said = {"name": measurement.name, **measurement.describe()}
            judging += max((one["seconds"] for one in kin if one["measurement"] == said), default=0.0)
        return per_epoch * config.epochs * (not self.trained(run)) + judging

    # -- data ---------------------------------------------------------------------------------------------------------

    def place(self, dataset: str) -> Path | None:
        return place_of(self.data_dir, dataset)

    def test_data(self, run: Run) -> DataSet:
        name, size = run.config.dataset, run.config.data.size
        if (name, size) not in self.data:
            self.data[name, size] = load_data(name, self.place(name), size=size)
        return self.data[name, size]

    def swept(self) -> Swept:
        self.store.refresh()
        return recorded(self.plan, self.store, self.failed)


def recorded(plan: Plan, store: Store, failed: Mapping[str, str] | None = None) -> Swept:
    """What a plan has on record so far."""
    held, missing = {}, []
    for run in plan.runs:
        found = store.of_one_training(run)
        for one in run.measurements:
            record = found.get(one.name)
            if record is not None and record["id"] == record_id(run.config, one):
                held[record["id"]] = record
            else:
                missing.append((run.name, one.name))
    for group in plan.groups:
        record = store.latest(group.id)
        if record is not None:
            held[group.id] = record
        else:
            missing.append((group.name, "together"))
    return Swept(store.out, held, tuple(missing), dict(failed or {}))


class _Pace:
    """Stops an evaluation between two batches, when time is up or when the next one would not fit into what is left."""

    def __init__(self, clock: Callable[[], float], end: float) -> None:
        self.clock, self.end = clock, end
        self.attack, self.since = "", clock()

    def step(self, attack: str, more: bool) -> None:
        """A batch of an attack is done."""
        now = self.clock()
        lasted = now - self.since if attack == self.attack else 0.0  # of another attack nothing is known yet
        self.attack, self.since = attack, now
        if now >= self.end or (more and now + lasted > self.end):
            raise OutOfTime


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


def _tidy_memory(device: torch.device, compiled: bool = True) -> None:
    """Give back what recorded graphs hold, for other processes too.

    Args:
        compiled: also forget compiled networks: the compiler gives up on a process that compiles many of them.
    """
    if device.type == "cuda":
        if compiled:
            torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


def _training_time(path: Path, wall: float) -> dict[str, float]:
    """Minutes of training alone, over all calls, and seconds with everything around it, over this call at least."""
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    spent = sum(row["seconds"] for row in rows)
    return {"minutes": spent / 60, "wall_seconds": max(wall, spent)}
