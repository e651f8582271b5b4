"""What of a plan is recorded, and what is still to be done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hardsphere.reproduce.measures import Measurement
from hardsphere.reproduce.plan import Group, Plan, Run, record_id
from hardsphere.reproduce.store import Record, Store
from hardsphere.reproduce.workspace import Workspace


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

    @property
    def to_go(self) -> str:
        """How much is missing, in words."""
        count = len(self.missing)
        return f"{count} measurement{'' if count == 1 else 's'} to go"


def recorded(plan: Plan, store: Store, failed: Mapping[str, str]) -> Swept:
    """What a plan has on record so far, and what of it failed when it was last tried."""
    held, missing, names = {}, [], set()
    for run in plan.runs:
        found = store.of_one_training(run)
        names |= {run.name, *(f"{run.name}, {one.name}" for one in run.measurements)}
        for one in run.measurements:
            record = found.get(one.name)
            if record is not None and record["id"] == record_id(run.config, one):
                held[record["id"]] = record
            else:
                missing.append((run.name, one.name))
    for group in plan.groups:
        record = store.latest(group.id)
        names.add(group.name)
        if record is not None:
            held[group.id] = record
        else:
            missing.append((group.name, "together"))
    return Swept(store.out, held, tuple(missing), {name: failed[name] for name in failed if name in names})


@dataclass(frozen=True)
class Due:
    """What is still to be done, going by the records and by the weights that are there."""

    plan: Plan
    store: Store
    workspace: Workspace

    def runs(self) -> list[Run]:
        """The runs of which anything is left to do."""
        return [run for run in self.plan.runs if self.is_open(run)]

    def is_open(self, run: Run) -> bool:
        """Whether there is anything left to do for a run."""
        return bool(self.store.unrecorded(run)) or (self.wanted(run) and not self.workspace.trained(run))

    def measurements(self, run: Run) -> list[Measurement]:
        """What is still to be measured on the weights of a trained run: nothing if other weights have it all."""
        return self.store.unmeasured(run, self.workspace.note(run)["weights"]) if self.store.unrecorded(run) else []

    def groups(self) -> list[Group]:
        """The groups that are not recorded yet."""
        return [group for group in self.plan.groups if self.store.latest(group.id) is None]

    def wanted(self, run: Run) -> bool:
        """Whether a group still needs the weights of a run."""
        return any(run.id == member.id for group in self.groups() for member in group.runs)

    def needs_weights(self, run: Run) -> bool:
        """Whether anything still needs the weights of a run."""
        return bool(self.store.unrecorded(run)) or self.wanted(run)
