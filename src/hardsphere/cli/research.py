"""Verbs of research: bench, reproduce, sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hardsphere.cli.app import Device, command_line

bench_app = typer.Typer(help="Measure how fast things are on this machine.", no_args_is_help=True)


@bench_app.command("train")
def bench_train(
    recipe: Annotated[str, typer.Argument(help="the recipe whose step is measured")] = "cifar10/pgd-he",
    model: Annotated[str | None, typer.Option(help="The network; the recipe's own by default.")] = None,
    batch: Annotated[int, typer.Option(min=2, help="Images per step.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Steps per round; there are five rounds.")] = 50,
    attack_steps: Annotated[int, typer.Option(min=0, help="K, the steps of the inner attack.")] = 10,
    heads: Annotated[bool, typer.Option(help="Also measure what HE and m-HE cost over the plain head.")] = True,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON into this file.")] = None,
    device: Device = None,
) -> None:
    """Measure a whole training step: data, augmentation, attack, update and weight average."""
    import json

    from hardsphere.bench import bench_training
    from hardsphere.files import write_json
    from hardsphere.runtime import pick_device

    overrides = {"batch": batch, "attack.steps": attack_steps} | ({"model": model} if model else {})
    measured = bench_training(recipe, overrides, steps=steps, device=pick_device(device), heads=heads)
    result = measured.to_dict() | {"command": command_line(without="--out")}
    if out is not None:
        write_json(out, result)
    typer.echo(json.dumps({key: value for key, value in result.items() if key != "environment"}, indent=2))


Budget = Annotated[
    str | None, typer.Option(help="Stop inside this time, such as 90s, 9m or 2h; the same call goes on.")
]


def reproduce(
    table: Annotated[str, typer.Argument(help="table2 to table12, ablation, steps, mechanism, ..., or all")],
    scale: Annotated[str, typer.Option(help="smoke (digits, minutes on a CPU), small or full.")] = "smoke",
    budget: Budget = None,
    data: Annotated[Path | None, typer.Option(help="Where CIFAR-10 lies; smoke needs none.")] = None,
    folder: Annotated[Path | None, typer.Option(help="The image folder of the ImageNet tables.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for tables and outcomes; results/<scale> by default.")
    ] = None,
    seed: Annotated[list[int] | None, typer.Option(help="One or several.")] = None,
    keep_weights: Annotated[bool, typer.Option(help="Keep the weights of the runs.")] = True,
    device: Device = None,
) -> None:
    """Rebuild a table or figure of the paper, in both protocols, with the paper's numbers beside the measured ones."""
    from hardsphere.progress import reporter
    from hardsphere.reproduce import reproduce as run

    places = {name: place for name, place in (("cifar10", data), ("folder", folder)) if place is not None}
    with reporter() as watch:
        done = run(
            table,
            scale,
            budget,
            places,
            out,
            seeds=seed or (0,),
            keep_weights=keep_weights,
            device=device,
            reporter=watch,
            command=command_line(without="--budget"),
        )
    for file in done.files:
        typer.echo(file.read_text())
    typer.echo(
        f"Written: {', '.join(map(str, done.files))}" + ("" if done.complete else " (incomplete: call it again)")
    )


def sweep(
    plan: Annotated[Path, typer.Argument(help="a YAML file: which runs to train, and what to measure on each")],
    out: Annotated[Path, typer.Option(help="Folder for the results.")],
    budget: Budget = None,
    data: Annotated[Path | None, typer.Option(help="Where the data set lies; digits needs none.")] = None,
    device: Device = None,
) -> None:
    """Train, judge and record the runs of a plan, as far as the budget goes; the same call goes on."""
    from hardsphere.progress import reporter
    from hardsphere.reproduce import sweep as run
    from hardsphere.reproduce import sweep_markdown

    with reporter() as watch:
        swept = run(
            plan, out, budget, data_dir=data, device=device, reporter=watch, command=command_line(without="--budget")
        )
    typer.echo(sweep_markdown(swept))
    missing = f" ({len(swept.missing)} measurements are missing: call it again)" if swept.missing else ""
    typer.echo(f"Written: {out / 'results.jsonl'}{missing}")
