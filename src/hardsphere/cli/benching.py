"""Verbs of `hardsphere bench`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from hardsphere.cli.app import Device, command_line

_STARTED = time.perf_counter()  # the program imports its verbs first of all

bench_app = typer.Typer(help="Measure how fast things are on this machine.", no_args_is_help=True)

Out = Annotated[Path | None, typer.Option(dir_okay=False, help="Write the result as JSON into this file.")]


@bench_app.command("train")
def bench_train(
    recipe: Annotated[str, typer.Argument(help="the recipe whose step is measured")] = "cifar10/pgd-he",
    model: Annotated[str | None, typer.Option(help="The network; the recipe's own by default.")] = None,
    batch: Annotated[int, typer.Option(min=2, help="Images per step.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Steps per round; there are five rounds.")] = 50,
    attack_steps: Annotated[
        int | None, typer.Option(min=0, help="K, the steps of the inner attack; the recipe's own by default.")
    ] = None,
    heads: Annotated[bool, typer.Option(help="Also measure what HE and m-HE cost over the plain head.")] = True,
    profile: Annotated[bool, typer.Option("--profile", help="Also show which kernels the time goes to.")] = False,
    out: Out = None,
    device: Device = None,
) -> None:
    """Measure a whole training step: data, augmentation, attack, update and weight average.

    It trains on random images of the shape that the recipe's own have.
    """
    from hardsphere.bench import kernels, training
    from hardsphere.runtime import pick_device

    given = {"model": model, "attack.steps": attack_steps}
    overrides = {"batch": batch} | {key: value for key, value in given.items() if value is not None}
    measured = training.bench_training(
        recipe,
        overrides,
        steps=steps,
        device=pick_device(device),
        heads=heads,
        profile=profile,
        started=_STARTED,
    )
    _deliver(measured.to_dict(), out, hidden=("environment", "profile"))
    typer.echo(training.as_text(measured))
    if measured.profile is not None:
        typer.echo(f"\n{kernels.as_text(measured.profile)}")


@bench_app.command("eval")
def bench_eval(
    run: Annotated[Path | None, typer.Option(help="A run directory or model file; else a network is made.")] = None,
    model: Annotated[
        str | None, typer.Option(help="A network with new weights instead of a run; preactresnet18 by default.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Such as cifar10:DIR; by default the run's own, or random images.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="The first N images.")] = 1000,
    skip: Annotated[int, typer.Option(min=0, help="Leave out so many images of the run before these.")] = 0,
    batch: Annotated[int | None, typer.Option(min=1, help="Images at once; the evaluation's own by default.")] = None,
    suite: Annotated[str, typer.Option(help="The suite of attacks.")] = "standard",
    rounds: Annotated[int, typer.Option(min=1, help="Evaluate N times; the first is told apart.")] = 1,
    against_pyautoattack: Annotated[
        bool, typer.Option("--against-pyautoattack", help="Also run pyautoattack on the same model and images.")
    ] = False,
    out: Out = None,
    device: Device = None,
) -> None:
    """Measure an evaluation: a whole suite of attacks, beside the reference implementation if asked for."""
    from hardsphere.bench.evaluation import as_text, bench_evaluation, subject_of_network, subject_of_run
    from hardsphere.errors import HardsphereError
    from hardsphere.runtime import pick_device

    chosen = pick_device(device)
    if run is not None and model is not None:
        raise HardsphereError("A run holds its own network: give --run or --model, not both.")
    if run is None and skip:
        raise HardsphereError("Only the images of a run can be skipped: give --run, or leave --skip away.")
    if run is not None:
        subject = subject_of_run(run, data, suite, limit, chosen, skip)
    else:
        subject = subject_of_network(model or "preactresnet18", data, limit, chosen)
    measured = bench_evaluation(
        subject,
        suite=suite,
        batch=batch,
        rounds=rounds,
        reference=against_pyautoattack,
        device=chosen,
        keep=lambda found: _save(found.to_dict(), out),
        say=lambda text: typer.echo(text, err=True),
    )
    _deliver(measured.to_dict(), out)
    typer.echo(as_text(measured))


@bench_app.command("corrupt")
def bench_corrupt(
    limit: Annotated[int, typer.Option(min=1, help="How many 32-pixel images.")] = 10_000,
    name: Annotated[list[str] | None, typer.Option(help="Only this corruption, or these.")] = None,
    loop: Annotated[bool, typer.Option(help="Also time the package imagecorruptions, if it is installed.")] = True,
    out: Out = None,
    device: Device = None,
) -> None:
    """Measure the 15 common corruptions at all 5 severities."""
    from hardsphere.bench.corrupting import as_text, bench_corruptions
    from hardsphere.corruptions import CORRUPTIONS
    from hardsphere.runtime import pick_device

    measured = bench_corruptions(limit, names=name or CORRUPTIONS, loop=loop, device=pick_device(device))
    _deliver(measured.to_dict(), out)
    typer.echo(as_text(measured))


@bench_app.command("sweep")
def bench_sweep(
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for points, laws, figure and text.")],
    axis: Annotated[list[str] | None, typer.Option(help="Measure k, batch or width; all three by default.")] = None,
    budget: Annotated[
        str | None, typer.Option(help="Stop inside this time, such as 90s or 4m; the same call goes on.")
    ] = None,
    device: Device = None,
) -> None:
    """Measure what a training step costs by attack steps, batch and width, and fit a law to each."""
    from hardsphere.bench.chart import write_sweep
    from hardsphere.bench.costs import AXES, axes_named, sweep_costs
    from hardsphere.config import duration
    from hardsphere.runtime import pick_device

    axes, limit = axes_named(axis or ()), duration(budget) if budget else None
    swept = sweep_costs(out, axes=axes, budget=limit, device=pick_device(device), say=typer.echo)
    files = write_sweep(swept, AXES, out)
    for file in files:
        if file.suffix == ".md":
            typer.echo(file.read_text())
    if swept.missing:
        typer.echo(f"The budget left out {len(swept.missing)} points: the same call goes on.")
    typer.echo(f"Written: {', '.join(map(str, [out / 'points.jsonl', *files]))}")


def _deliver(result: dict[str, Any], out: Path | None, hidden: tuple[str, ...] = ("environment",)) -> None:
    """Print what of a result is short, and save it whole. What cannot be saved has at least been shown."""
    import json

    told = _with_command(result)
    typer.echo(json.dumps({key: value for key, value in told.items() if key not in hidden}, indent=2))
    _save(result, out)


def _save(result: dict[str, Any], out: Path | None) -> None:
    """Save a result with the command that measured it."""
    from hardsphere.files import write_json

    if out is not None:
        write_json(out, _with_command(result))


def _with_command(result: dict[str, Any]) -> dict[str, Any]:
    return result | {"command": command_line(without="--out")}
