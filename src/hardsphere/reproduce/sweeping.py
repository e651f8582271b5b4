"""The sweep runner: goes through a plan, run by run, and has each trained, judged and recorded inside a budget of time.

    out/                    the records: see `hardsphere.reproduce.store`
    work/                   weights and ledgers, which may be thrown away: see `hardsphere.reproduce.workspace`

What is recorded is not done again, whether its weights are still there or not. A run of which something is missing goes
on with the weights in ``work``; if they are gone it is trained again, and everything is measured anew on the new
weights, unless they are the same bit for bit: one row never mixes the numbers of two trainings.

Several processes may work on one plan and one directory: each run is done by whoever claims it first.
"""

from __future__ import annotations

import sqlite3
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hardsphere.errors import HardsphereError
from hardsphere.evaluate import Progress
from hardsphere.reproduce.budget import Budget, OutOfTime, seconds
from hardsphere.reproduce.due import Due, Swept, recorded
from hardsphere.reproduce.forecast import expected_seconds
from hardsphere.reproduce.places import Places, Shelf
from hardsphere.reproduce.plan import Group, Plan, Run
from hardsphere.reproduce.reading import read_plan
from hardsphere.reproduce.store import Store
from hardsphere.reproduce.worker import Worker, tidy_memory
from hardsphere.reproduce.workspace import Workspace, claimed
from hardsphere.runtime import hardware, pick_device
from hardsphere.train.loop import Reporter, Silence

GPU_BATCH, CPU_BATCH = 1000, 256  # small batches leave a GPU idle; an evaluation is stopped between two of them


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
    begin: Callable[[Path], None] | None = None,
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
        begin: called with the directory of the work before the first run, once plan and data are found to be right;
            not where nothing is to be done.
    """
    plan = read_plan(plan)
    time_left = Budget.of(seconds(budget), clock)
    chosen = pick_device(device)
    workspace = Workspace.of_results(out, work)
    worker = Worker(
        Store(Path(out)),
        workspace,
        Shelf(data_dir),
        time_left,
        chosen,
        batch or (GPU_BATCH if chosen.type == "cuda" else CPU_BATCH),
        compile,
        reporter or Silence(),
        progress,
        command,
    )
    state = _Sweep(plan, worker)
    state.go(begin)
    worker.store.refresh()
    return recorded(plan, worker.store, workspace.failures() | state.failed)


@dataclass
class _Sweep:
    """One call: what is next, and what became of it.

    Attributes:
        failed: what could not be done, with the reason.
        told: whether it has been said that time is up.
    """

    plan: Plan
    worker: Worker
    failed: dict[str, str] = field(default_factory=dict)
    told: bool = False

    def __post_init__(self) -> None:
        self.store, self.workspace, self.budget = self.worker.store, self.worker.workspace, self.worker.budget
        self.due = Due(self.plan, self.store, self.workspace)
        self.say = self.worker.reporter.say

    def go(self, begin: Callable[[Path], None] | None = None) -> None:
        todo = self.due.runs()
        for run in todo:
            self.worker.shelf.data(run.config)  # a wrong --data must be said before hours of training, not after
        if todo or self.due.groups():
            self.workspace.prepare()
        if todo and begin is not None:
            begin(self.workspace.path)
        for run in todo:
            if self.budget.spent:
                break
            if not self.fits(run):
                self.say(f"{run.name}: expected to take longer than the budget has left; put off.")
                continue
            if not self.attempt(run.name, partial(self.do, run)):
                break
        self.look()

    def fits(self, run: Run) -> bool:
        """Whether to begin. What was begun goes on, and what fits into no budget is done in parts."""
        device, weights = hardware(self.worker.device), self.workspace.weights(run)
        expected = expected_seconds(run, self.store, device, weights)
        return self.workspace.begun(run) or expected > self.budget.total or self.budget.holds(expected)

    def do(self, run: Run) -> None:
        """Train (or go on, or find it trained), judge, record, and tidy up; unless another process is at it."""
        with claimed(self.workspace.lock(run.id)) as ours:
            self.store.refresh()
            if not ours:
                self.say(f"{run.name}: another process is at it; left to that one.")
            elif self.due.is_open(run):
                if not self.workspace.trained(run):
                    self.worker.train(run)
                self.look()
                self.judge_all(run)
                self.tidy(run)

    def judge_all(self, run: Run) -> None:
        """Everything that is still to be measured on the weights of a run; one that fails does not stop the others."""
        for measurement in self.due.measurements(run):
            if not self.attempt(f"{run.name}, {measurement.name}", partial(self.worker.judge, run, measurement)):
                raise OutOfTime

    def look(self) -> None:
        """Look at the groups whose models are all trained by now: that takes seconds, and weights may not last."""
        for group in self.due.groups():
            if all(self.workspace.trained(run) for run in group.runs) and not self.budget.spent:
                self.attempt(group.name, partial(self.together, group))

    def together(self, group: Group) -> None:
        """Look at a group, unless another process is at it or was."""
        with claimed(self.workspace.lock(group.id)) as ours:
            self.store.refresh()
            if not ours or self.store.latest(group.id) is not None:
                return
            self.worker.look(group)
        for run in group.runs:
            self.tidy(next(one for one in self.plan.runs if one.id == run.id))

    def tidy(self, run: Run) -> None:
        """Drop the weights that nobody needs any more, if they are not to be kept."""
        if not (self.plan.keep_weights or self.due.needs_weights(run)):
            self.workspace.drop_weights(run)

    def attempt(self, name: str, work: Callable[[], None]) -> bool:
        """Do some work; false if time ran out. What fails is said, and does not stop the rest."""
        try:
            work()
        except OutOfTime:
            if not self.told:
                self.say(f"{name}: the budget is spent; the same command goes on from here.")
            self.told = True
            return False
        except HardsphereError as reason:
            self.fail(name, str(reason), str(reason))
        except (OSError, sqlite3.Error):
            raise  # a full disk, or one that cannot be written: there is nothing that could be recorded
        except Exception as reason:
            # A GPU whose memory is full, or a function of one's own that fails: other runs may do better, and tables
            # must be written.
            first_line = str(reason).strip().partition("\n")[0]
            self.fail(name, f"{type(reason).__name__}: {first_line}", traceback.format_exc())
            tidy_memory(self.worker.device)
        else:
            self.workspace.forget_failure(name)
        return True

    def fail(self, name: str, reason: str, details: str) -> None:
        """Say what failed, and leave a note of it for the other processes and for the pages."""
        self.failed[name] = reason
        self.workspace.leave_failure(name, reason)
        self.say(f"{name}: {details}")
