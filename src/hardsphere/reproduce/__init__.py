"""Rebuilding the paper: `reproduce` makes a table in both protocols, `sweep` runs anyone's own plan.

`reproduce` plans the runs a table needs (`tables`), has them trained, judged and recorded inside a budget (`sweep`),
and writes the table (`render`) with the paper's numbers (`paper`) beside the measured ones. What is recorded is not
done again, so that a table grows from call to call, and tables share what they have in common.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hardsphere.callable import make_callable
from hardsphere.data import Images
from hardsphere.data import load as load_data
from hardsphere.errors import HardsphereError, nearest
from hardsphere.evaluate import Progress
from hardsphere.files import appearing, write_json, write_text
from hardsphere.reproduce.analyses import ANALYSES as ANALYSES
from hardsphere.reproduce.analyses import Analysis, save_figure
from hardsphere.reproduce.plan import Plan as Plan
from hardsphere.reproduce.plan import read_plan as read_plan
from hardsphere.reproduce.render import FIGURES, Builder, markdown
from hardsphere.reproduce.render import sweep_markdown as sweep_markdown
from hardsphere.reproduce.sweeping import Places, Store, Swept, place_of
from hardsphere.reproduce.sweeping import sweep as sweep
from hardsphere.reproduce.tables import MEASURES, Scale, Table, plan_of, scale_named
from hardsphere.reproduce.tables import SCALES as SCALES
from hardsphere.reproduce.tables import TABLES as TABLES
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
    seeds: Sequence[int] = (0,),
    overrides: Mapping[str, Any] | None = None,
    limits: Mapping[str, int] | None = None,
    keep_weights: bool = True,
    work: Path | str | None = None,
    device: str | None = None,
    batch: int | None = None,
    reporter: Reporter | None = None,
    progress: Callable[[Progress], None] | None = None,
    command: str = "",
    clock: Callable[[], float] = time.monotonic,
) -> Reproduced:
    """Rebuild a table of the paper, as far as the budget goes; the same call goes on.

    Args:
        table: such as ``table2`` or ``gradients`` (see `ENTRIES`), or ``all``.
        scale: ``smoke``, ``small`` or ``full``.
        budget: such as ``9m``; none goes to the end.
        data_dir: where CIFAR-10 lies (for table4 and table12 the image folder), or a mapping with ``cifar10`` and
            ``folder``; smoke needs none.
        out: for the table, the results and the per-sample outcomes; ``results/<scale>`` by default.
        seeds: one row per seed.
        overrides: of every run, by dotted key.
        limits: test images of a measurement or of a single attack, such as ``{"standard": 500, "pgd-500": 1000}``.
        keep_weights: false drops them once a run is judged; another table may then have to train it again.
        work, device, batch, reporter, progress, command, clock: as for `sweep`.
    """
    size = _limited(scale_named(scale), limits or {})
    wanted = list(ENTRIES.values()) if table == "all" else [entry_named(table)]
    folder = Path(out) if out is not None else Path("results") / scale
    workplace = Path(work) if work is not None else folder / "work"
    tables, places, left_out = _with_data(wanted, size, data_dir, workplace)
    for sentence in left_out:
        (reporter or Silence()).say(sentence)
    analyses = [one for one in tables if isinstance(one, Analysis)]
    groups = [one.group(size, seed, overrides) for one in analyses for seed in seeds]
    swept = sweep(
        plan_of(tables, size, seeds, overrides, keep_weights, groups),
        folder,
        budget,
        data_dir=places,
        work=workplace,
        device=device,
        batch=batch,
        reporter=reporter,
        progress=progress,
        command=command,
        clock=clock,
    )
    store, files, built = Store(folder), [], []
    remarks = [f"{name} failed: {reason}" for name, reason in swept.failed.items()]
    if overrides:
        remarks.append(f"Overridden in every run: {' '.join(f'{key}={value}' for key, value in overrides.items())}.")
    for one in tables:
        if isinstance(one, Analysis):
            content = one.build(size, store, seeds, overrides, command, remarks)
            text = one.markdown(content)
        else:
            content = Builder(one, size, store, overrides).build(seeds, command, remarks)
            text = markdown(content)
            if one.name in FIGURES:
                save_figure(FIGURES[one.name](content), folder / f"{one.name}.png")
        files.append(folder / f"{one.name}.md")
        write_json(folder / f"{one.name}.json", content)
        write_text(files[-1], text)
        built.append(content)
    return Reproduced(tuple(files), tuple(built), swept)


ENTRIES: dict[str, Table | Analysis] = {**TABLES, **ANALYSES}
"""Everything that can be reproduced, by name."""


def entry_named(name: str) -> Table | Analysis:
    """One of the entries."""
    if name not in ENTRIES:
        raise HardsphereError(
            f"Unknown table '{name}': use all or one of {', '.join(ENTRIES)}.{nearest(name, ENTRIES)}"
        )
    return ENTRIES[name]


def _limited(scale: Scale, limits: Mapping[str, int]) -> Scale:
    """The scale with other numbers of images: for whole measurements, or for single attacks."""
    entries = {name: n for name, n in limits.items() if name not in MEASURES}
    known = {
        entry.name
        for make in MEASURES.values()
        for entry in getattr(getattr(make(scale), "suite", None), "entries", ())
    }
    for name in entries:
        if name not in known:
            raise HardsphereError(f"There is no measurement or attack '{name}' to limit.")
    whole = {name: n for name, n in limits.items() if name in MEASURES}
    return replace(scale, limits={**scale.limits, **whole}, entries={**scale.entries, **entries})


def _with_data(
    tables: Sequence[Table | Analysis], scale: Scale, data_dir: Places, work: Path
) -> tuple[list[Table | Analysis], dict[str, Path], list[str]]:
    """The tables whose data is there, where it lies, and a sentence for each that is left out."""
    needed = dict.fromkeys(table.data_at(scale) for table in tables)
    places: dict[str, Path] = {}
    for name in needed:
        # One directory, without a name, is CIFAR-10's unless only an image folder is asked for.
        meant = isinstance(data_dir, Mapping) or name != "folder" or len(needed) == 1
        place = place_of(data_dir, name) if meant else None
        if name == "arrays":
            place = colour_digits(work / "digits-32.npz")
        if place is not None:
            places[name] = place
    ready = [table for table in tables if table.data_at(scale) in (*places, "digits")]
    if not ready:
        (name, *_) = needed
        raise HardsphereError(f"The scale '{scale.name}' needs the data '{name}': say where it lies with --data.")
    left_out = [f"{one.name} is left out: it needs the data '{one.data}'." for one in tables if one not in ready]
    return ready, places, left_out


def colour_digits(file: Path) -> Path:
    """The digits as colour images of 32 x 32 pixels: corruptions are defined on nothing smaller or grey."""
    import numpy as np

    if file.exists():
        return file
    digits = load_data("digits", validation=0)
    assert isinstance(digits.train, Images)
    assert isinstance(digits.test, Images)
    arrays: dict[str, Any] = {}
    for split, images in (("train", digits.train), ("test", digits.test)):
        large = images.pixels.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
        arrays[f"x_{split}"], arrays[f"y_{split}"] = large.expand(-1, 3, -1, -1).numpy(), images.labels.numpy()
    with appearing(file) as partial, partial.open("wb") as stream:
        np.savez_compressed(stream, **arrays)
    return file


make_callable(__name__)  # `hardsphere.reproduce(...)`
