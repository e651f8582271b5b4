"""Rebuilding the paper: `reproduce` makes a table in both protocols, `sweep` runs anyone's own plan.

`reproduce` plans the runs a table needs (`tables`, `analyses`, at a scale of `scales`), has them trained, judged and
recorded inside a budget (`sweeping`, `worker`, `store`), puts the table together (`building`) with the paper's numbers
(`paper`) beside the measured ones, and writes it (`table_page`, `analysis_page`, `drawing`). What is recorded is not
done again, so that a table grows from call to call and from machine to machine, and tables share what they have in
common.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hardsphere.callable import make_callable
from hardsphere.errors import HardsphereError, nearest
from hardsphere.evaluate import Progress
from hardsphere.files import write_json, write_text
from hardsphere.reproduce.analyses import ANALYSES as ANALYSES
from hardsphere.reproduce.analysing import Analysis
from hardsphere.reproduce.analysis_page import analysis_page
from hardsphere.reproduce.building import Builder
from hardsphere.reproduce.drawing import draw
from hardsphere.reproduce.due import Swept, recorded
from hardsphere.reproduce.outlining import outline as outline_plan
from hardsphere.reproduce.places import Places, with_data
from hardsphere.reproduce.plan import Plan as Plan
from hardsphere.reproduce.reading import read_plan as read_plan
from hardsphere.reproduce.scales import SCALES as SCALES
from hardsphere.reproduce.scales import Scale, limited, scale_named
from hardsphere.reproduce.store import Store
from hardsphere.reproduce.sweep_page import sweep_markdown as sweep_markdown
from hardsphere.reproduce.sweeping import sweep as sweep
from hardsphere.reproduce.table_page import table_page
from hardsphere.reproduce.tables import TABLES as TABLES
from hardsphere.reproduce.tables import Table, check_only, plan_of
from hardsphere.reproduce.workspace import Workspace
from hardsphere.train.loop import Reporter, Silence


@dataclass(frozen=True)
class Reproduced:
    """What `reproduce` wrote.

    Attributes:
        files: the Markdown of each table; its JSON lies beside it.
        tables: the tables in plain values.
        swept: what is recorded, what is missing and what failed.
    """

    files: tuple[Path, ...]
    tables: tuple[dict[str, Any], ...]
    swept: Swept

    @property
    def complete(self) -> bool:
        return all(table["complete"] for table in self.tables)


def reproduce(
    table: str,
    scale: str = "smoke",
    budget: str | float | None = None,
    data_dir: Places = None,
    out: Path | str | None = None,
    *,
    only: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    overrides: Mapping[str, Any] | None = None,
    limits: Mapping[str, int] | None = None,
    render_only: bool = False,
    keep_weights: bool = True,
    work: Path | str | None = None,
    device: str | None = None,
    batch: int | None = None,
    reporter: Reporter | None = None,
    progress: Callable[[Progress], None] | None = None,
    command: str = "",
    clock: Callable[[], float] = time.monotonic,
    begin: Callable[[Path], None] | None = None,
) -> Reproduced:
    """Rebuild a table of the paper, as far as the budget goes; the same call goes on.

    Several processes may be given the same directory, and even the same call: each run is done by one of them.

    Args:
        table: such as ``table2`` or ``gradients`` (see `ENTRIES`), several with commas between them, or ``all``.
        scale: ``smoke``, ``small`` or ``full``.
        budget: such as ``9m``; none goes to the end.
        data_dir: where CIFAR-10 lies (for table4 and table12 the image folder), or a mapping with ``cifar10`` and
            ``folder``; smoke needs none.
        out: for the table, the results and the per-sample outcomes; ``results/<scale>`` by default.
        only: work on these rows alone, by recipe (``pgd-he``) or title; the table shows whatever is recorded.
        seeds: one row per seed.
        overrides: of every run, by dotted key.
        limits: test images of a single attack, a measurement or an analysis, such as
            ``{"pgd-500": 1000, "standard": 500, "mechanism": 200}``.
        render_only: write the tables from what is recorded, and do nothing else.
        keep_weights: false drops them once a run is judged; another table may then have to train it again.
        work, device, batch, reporter, progress, command, clock, begin: as for `sweep`.
    """
    asked = _Asked.of(table, scale, out, work, only, seeds, overrides, limits)
    watch = reporter or Silence()
    if render_only:
        swept = recorded(asked.plan(), asked.records(), Workspace(asked.work).failures())
        if table == "all":
            asked = asked.keeping([one for one in asked.entries if _has_a_row(one, asked)])
    else:
        asked.check_comparisons()
        ready, places, left_out = with_data(asked.entries, asked.scale, data_dir, asked.work)
        for sentence in left_out:
            watch.say(sentence)
        asked = asked.keeping(ready)
        swept = sweep(
            asked.plan(keep_weights),
            asked.folder,
            budget,
            data_dir=places,
            work=asked.work,
            device=device,
            batch=batch,
            reporter=watch,
            progress=progress,
            command=command,
            clock=clock,
            begin=begin,
        )
    remarks = [f"{name} failed: {reason}" for name, reason in swept.failed.items()]
    if overrides:
        remarks.append(f"Overridden in every run: {' '.join(f'{key}={value}' for key, value in overrides.items())}.")
    store = Store(asked.folder)
    with store.locked():  # whoever writes last has seen the records of all
        store.refresh()
        built = [_write(one, asked, store, command, remarks) for one in asked.entries]
    return Reproduced(tuple(asked.folder / f"{one.name}.md" for one in asked.entries), tuple(built), swept)


def on_record(plan: Plan | Path | str | Mapping[str, Any], out: Path | str) -> Swept:
    """What of a sweep's plan is recorded in a directory, by whomever."""
    return recorded(read_plan(plan), Store(Path(out)), Workspace.of_results(out).failures())


def outline(
    table: str,
    scale: str = "smoke",
    out: Path | str | None = None,
    *,
    only: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    overrides: Mapping[str, Any] | None = None,
    limits: Mapping[str, int] | None = None,
    work: Path | str | None = None,
) -> list[str]:
    """What `reproduce` would do, line by line: every run and measurement, what is recorded, and a rough cost."""
    asked = _Asked.of(table, scale, out, work, only, seeds, overrides, limits)
    asked.check_comparisons()
    return outline_plan(asked.plan(), Store(asked.folder), asked.work)


@dataclass(frozen=True)
class _Asked:
    """What a call asks for."""

    entries: tuple[Table | Analysis, ...]
    scale: Scale
    folder: Path
    work: Path
    only: tuple[str, ...]
    seeds: tuple[int, ...]
    overrides: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        table: str,
        scale: str,
        out: Path | str | None,
        work: Path | str | None,
        only: Sequence[str],
        seeds: Sequence[int],
        overrides: Mapping[str, Any] | None,
        limits: Mapping[str, int] | None,
    ) -> _Asked:
        size = limited(scale_named(scale), limits or {}, list(ANALYSES))
        entries = tuple(ENTRIES.values()) if table == "all" else tuple(entry_named(one) for one in table.split(","))
        check_only(entries, size, only)
        if len(set(seeds)) < len(seeds) or not seeds:  # a mean would count one training as two
            raise HardsphereError(f"The seeds are {', '.join(map(str, seeds)) or 'none'}, but must be different ones.")
        folder = Path(out) if out is not None else Path("results") / scale
        workspace = Workspace.of_results(folder, work)
        return cls(entries, size, folder, workspace.path, tuple(only), tuple(seeds), overrides or {})

    def records(self) -> Store:
        """What is recorded, or at least begun; a folder that knows of nothing was hardly meant."""
        store = Store(self.folder)
        if not store.lines and not self.work.is_dir():
            raise HardsphereError(f"The folder '{self.folder}' holds no recorded results to render.")
        return store

    def check_comparisons(self) -> None:
        """Refuse a call that would do nothing: an analysis compares models, and one alone is none to it."""
        plan = self.plan()
        if not plan.items() and not plan.groups:
            names = ", ".join(one.name for one in self.entries)
            raise HardsphereError(f"Of {names} one row is nothing to compare: name at least two with --only.")

    def keeping(self, entries: Sequence[Table | Analysis]) -> _Asked:
        return replace(self, entries=tuple(entries))

    def plan(self, keep_weights: bool = True) -> Plan:
        """The rows that are asked for, and the analyses that they allow."""
        analyses = [one for one in self.entries if isinstance(one, Analysis)]
        looks = [one.group(self.scale, seed, self.overrides, self.only) for one in analyses for seed in self.seeds]
        groups = [group for group in looks if group is not None]
        return plan_of(self.entries, self.scale, self.seeds, self.overrides, keep_weights, groups, self.only)


def _has_a_row(entry: Table | Analysis, asked: _Asked) -> bool:
    """Whether enough is recorded to be worth a page: a whole row of a table, or what an analysis saw."""
    store = Store(asked.folder)
    if isinstance(entry, Analysis):
        return any(entry.recorded(asked.scale, store, seed, asked.overrides) for seed in asked.seeds)
    runs = plan_of([entry], asked.scale, asked.seeds, asked.overrides).runs
    return any(not store.unrecorded(run) for run in runs)


def _write(
    entry: Table | Analysis, asked: _Asked, store: Store, command: str, remarks: Sequence[str]
) -> dict[str, Any]:
    """Write a table or an analysis from what is recorded: Markdown, JSON and a figure."""
    if isinstance(entry, Analysis):
        content = entry.build(asked.scale, store, asked.seeds, asked.overrides, command, remarks, asked.only)
        text = analysis_page(content, entry.lines)
    else:
        content = Builder(entry, asked.scale, store, asked.overrides).build(asked.seeds, command, remarks)
        content |= draw(content, asked.folder)
        text = table_page(content)
    write_json(asked.folder / f"{entry.name}.json", content)
    write_text(asked.folder / f"{entry.name}.md", text)
    return content


ENTRIES: dict[str, Table | Analysis] = {**TABLES, **ANALYSES}
"""Everything that can be reproduced, by name."""


def entry_named(name: str) -> Table | Analysis:
    """One of the entries."""
    if name not in ENTRIES:
        raise HardsphereError(
            f"Unknown table '{name}': use all or one of {', '.join(ENTRIES)}.{nearest(name, ENTRIES)}"
        )
    return ENTRIES[name]


make_callable(__name__)  # `hardsphere.reproduce(...)`
