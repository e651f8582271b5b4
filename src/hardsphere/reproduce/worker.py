"""The work on one run: to train it, to measure something on it, to look at it together with others; and to record that.

Within a process one thing follows the other; compiled networks and recorded graphs are forgotten in between.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from hardsphere.errors import HardsphereError
from hardsphere.evaluate import Progress
from hardsphere.evaluate.witness import model_digest
from hardsphere.reproduce.budget import Budget, OutOfTime, Pace, Watch
from hardsphere.reproduce.measures import Call, Measurement, Subject
from hardsphere.reproduce.places import Shelf
from hardsphere.reproduce.plan import Group, Run, record_id
from hardsphere.reproduce.recording import group_record, measurement_record, provenance, training_facts
from hardsphere.reproduce.store import Record, Store
from hardsphere.reproduce.workspace import Workspace
from hardsphere.train import load, train
from hardsphere.train.loop import Reporter

SAVE_EVERY = 120.0  # seconds between checkpoints inside an epoch, where a budget may end the run


@dataclass
class Worker:
    """What the work is done with.

    Attributes:
        batch: images at once while judging.
        compile: as for `hardsphere.train`.
        command: for the record.
    """

    store: Store
    workspace: Workspace
    shelf: Shelf
    budget: Budget
    device: torch.device
    batch: int
    compile: bool
    reporter: Reporter
    progress: Callable[[Progress], None] | None
    command: str

    def __post_init__(self) -> None:
        self.pace = Pace(self.budget)

    def train(self, run: Run) -> None:
        """Train to the end, and leave a note of it beside the weights."""
        path, earlier, clock = self.workspace.of(run), self.store.weights_of(run.id), self.budget.clock
        self.reporter.say(f"{run.name}: training into {path}")
        begin = clock()
        try:
            trained = train(
                run.config,
                path,
                data_dir=self.shelf.place(run.config),
                resume=True,
                device=str(self.device),
                reporter=Watch(self.reporter, run.config.epochs, self.budget),
                save_every=SAVE_EVERY if self.budget.limited else 600.0,
                compile=self.compile,
            )
        finally:
            tidy_memory(self.device)
        weights = model_digest(load(path).model)
        facts = training_facts(trained.position, run, weights, earlier, path, clock() - begin)
        self.store.add_training(run, weights, (path / "metrics.jsonl").read_text(encoding="utf-8"))
        self.workspace.leave_note(run, facts)
        if facts["instead_of"]:
            self.reporter.say(f"{run.name}: trained again, to other weights than before; all is measured on these.")

    def judge(self, run: Run, measurement: Measurement) -> None:
        """Measure something on the weights of a run, and record it."""
        if self.budget.spent:
            raise OutOfTime
        self.reporter.say(f"{run.name}: measuring {measurement.name}")
        identity = record_id(run.config, measurement)
        subject, trained = self._subject(run, self.workspace.of(run) / f"measured-{identity}")
        begin = self.budget.clock()
        measured = measurement.measure(subject)
        seen = trained["weights"] if isinstance(measurement, Call) else measured.facts.get("model", trained["weights"])
        assert seen == trained["weights"], "another model was measured"  # what a function of one's own says is its own
        lasted = self.budget.clock() - begin
        record = measurement_record(run, measurement, trained, measured, lasted, self._provenance())
        self.store.add(record, measured.outcomes)
        tidy_memory(self.device, compiled=False)

    def look(self, group: Group) -> None:
        """Look at several trained models at once, and record what was seen."""
        self.reporter.say(f"{group.name}: looking at {', '.join(run.name for run in group.runs)}")
        found = {run.name: self._subject(run, self.workspace.of(run) / f"seen-{group.id}") for run in group.runs}
        subjects = {name: subject for name, (subject, _) in found.items()}
        trained = {name: note for name, (_, note) in found.items()}
        begin = self.budget.clock()
        facts = group.function(subjects, self.store.out, **group.options)
        lasted = self.budget.clock() - begin
        self.store.add(group_record(group, subjects, trained, facts, lasted, self._provenance()), {})

    def _provenance(self) -> Record:
        return provenance(self.device, self.command)

    def _subject(self, run: Run, folder: Path) -> tuple[Subject, Record]:
        """A trained model ready to be judged, and what there is to say about its training."""
        path, note = self.workspace.of(run), self.workspace.note(run)
        deployed = load(path)
        if model_digest(deployed.model) != note["weights"]:
            raise HardsphereError(
                f"The weights in '{path}' are not those that were trained there: remove that directory."
            )
        about = {"target": run.name, "data": f"{run.config.dataset} test", "selection": deployed.selection}
        if self.command:
            about["command"] = self.command
        test = self.shelf.data(run.config).test
        before = (deployed.meta.get("splits") or {}).get("test")
        if before is not None and test.digest() != before:
            raise HardsphereError(
                f"The test images of '{run.config.dataset}' are not those of when '{run.name}' was trained: say with "
                f"--data where the same data lies, or remove '{path}' to train it on the other."
            )
        subject = Subject(deployed, test, folder, self.device, self.batch, about, self._watched)
        return subject, {**note, "selection": deployed.selection}

    def _watched(self, state: Progress) -> None:
        """Pass on how an evaluation goes, and stop it when time is up: what it has done is in its ledger."""
        if self.progress is not None:
            self.progress(state)
        self.pace.step(f"{state.attack} {state.ball}", state.done < state.total)


def tidy_memory(device: torch.device, compiled: bool = True) -> None:
    """Give back what recorded graphs hold, for other processes too.

    Args:
        compiled: also forget compiled networks: the compiler gives up on a process that compiles many of them.
    """
    if device.type == "cuda":
        if compiled:
            torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
