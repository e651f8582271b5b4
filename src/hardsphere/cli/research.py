"""Verbs of research: reproduce, sweep, and bench, which has a file of its own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hardsphere.cli.app import Device, command_line
from hardsphere.cli.benching import bench_app as bench_app

if TYPE_CHECKING:
    from hardsphere.reproduce.due import Swept

Budget = Annotated[
    str | None, typer.Option(help="Stop inside this time, such as 90s, 9m or 2h; the same call goes on.")
]
Processes = Annotated[
    int, typer.Option(min=1, help="Work in several processes side by side; each takes the runs that no other has.")
]


def reproduce(
    table: Annotated[
        str, typer.Argument(help="table2 to table12, ablation, steps, mechanism, ..., several with commas, or all")
    ],
    scale: Annotated[str, typer.Option(help="smoke (digits, minutes on a CPU), small or full.")] = "smoke",
    budget: Budget = None,
    data: Annotated[Path | None, typer.Option(help="Where CIFAR-10 lies; smoke needs none.")] = None,
    folder: Annotated[Path | None, typer.Option(help="The image folder of the ImageNet tables.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for tables and outcomes; results/<scale> by default.")
    ] = None,
    only: Annotated[str | None, typer.Option(help="Work on these rows alone, such as pgd,pgd-he.")] = None,
    limit: Annotated[
        list[str] | None, typer.Option(help="Fewer images for an attack or measurement, such as pgd-500=1000.")
    ] = None,
    seed: Annotated[list[int] | None, typer.Option(help="One or several.")] = None,
    keep_weights: Annotated[bool, typer.Option(help="Keep the weights of the runs.")] = True,
    batch: Annotated[int | None, typer.Option(min=1, help="Images at once while judging.")] = None,
    processes: Processes = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what there is to do, and do nothing.")] = False,
    render: Annotated[bool, typer.Option("--render", help="Write the tables from what is recorded only.")] = False,
    device: Device = None,
) -> None:
    """Rebuild a table or figure of the paper, in both protocols, with the paper's numbers beside the measured ones."""
    import sys

    from hardsphere.cli.side_by_side import beside
    from hardsphere.progress import PlainEvaluation, reporter
    from hardsphere.reproduce import outline
    from hardsphere.reproduce import reproduce as run

    rows = [word.strip() for word in only.split(",")] if only else []
    limits = _limits(limit or [])
    if dry_run:
        typer.echo("\n".join(outline(table, scale, out, only=rows, seeds=seed or (0,), limits=limits)))
        return
    places = {name: place for name, place in (("cifar10", data), ("folder", folder)) if place is not None}
    command = "" if render else command_line(without="--budget")
    work = partial(
        run, table, scale, budget, places, out, only=rows, seeds=seed or (0,), limits=limits, command=command
    )
    with beside(processes - 1) as others, reporter() as watch:
        done = work(
            render_only=render,
            keep_weights=keep_weights,
            device=device,
            batch=batch,
            reporter=watch,
            progress=None if sys.stderr.isatty() else PlainEvaluation(),  # on a terminal the bar is the reporter's
            begin=others.start,
        )
    if others.running:
        done = work(render_only=True)  # with what the others have recorded since
    for file in done.files:
        typer.echo(file.read_text())
    _written(", ".join(map(str, done.files)), done.swept)


def _limits(words: list[str]) -> dict[str, int]:
    """``["pgd-500=1000"]`` as a mapping."""
    from hardsphere.errors import HardsphereError

    limits = {}
    for word in words:
        name, _, count = word.partition("=")
        if not count.isdecimal():
            raise HardsphereError(f"The limit '{word}' must be a name and a number, such as pgd-500=1000.")
        limits[name] = int(count)
    return limits


def sweep(
    plan: Annotated[Path, typer.Argument(help="a YAML file: which runs to train, and what to measure on each")],
    out: Annotated[Path, typer.Option(help="Folder for the results.")],
    budget: Budget = None,
    data: Annotated[Path | None, typer.Option(help="Where the data set lies; digits needs none.")] = None,
    processes: Processes = 1,
    device: Device = None,
) -> None:
    """Train, judge and record the runs of a plan, as far as the budget goes; the same call goes on."""
    from hardsphere.cli.side_by_side import beside
    from hardsphere.progress import reporter
    from hardsphere.reproduce import on_record, sweep_markdown
    from hardsphere.reproduce import sweep as run

    command = command_line(without="--budget")
    with beside(processes - 1) as others, reporter() as watch:
        swept = run(
            plan, out, budget, data_dir=data, device=device, reporter=watch, command=command, begin=others.start
        )
    if others.running:
        swept = on_record(plan, out)
    typer.echo(sweep_markdown(swept))
    _written(str(out / "results.jsonl"), swept)


def _written(files: str, swept: Swept) -> None:
    """The last line: where it is, and whether there is more to do."""
    typer.echo(f"Written: {files}" + (f" ({swept.to_go}: call it again)" if swept.missing else ""))
