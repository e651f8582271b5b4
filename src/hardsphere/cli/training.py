"""Verbs of training: train, recipes, show, predict, demo."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hardsphere.cli.app import Device, Overrides


def train(
    recipe: Annotated[str, typer.Argument(help="such as cifar10/trades-he; `hardsphere recipes` lists them")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; runs/<recipe>-seed<seed> by default.")] = None,
    data: Annotated[Path | None, typer.Option(help="Where the data set lies; digits needs none.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the run directory.")] = False,
    device: Device = None,
    compile: Annotated[bool, typer.Option(help="On a GPU: compile the network and replay steps as graphs.")] = True,
) -> None:
    """Train a model from a recipe."""
    from hardsphere.config import parse_assignments
    from hardsphere.progress import reporter
    from hardsphere.recipes import recipe as make
    from hardsphere.train import train as run

    config = make(recipe, parse_assignments(overrides or []))
    with reporter() as watch:
        trained = run(config, out, data_dir=data, resume=resume, device=device, reporter=watch, compile=compile)
    robust, clean = trained.position.best
    typer.echo(f"{trained.path}: {'already finished, ' if trained.already else ''}{trained.position.finished}.")
    typer.echo(
        f"Best epoch {trained.position.best_epoch}: {clean:.1%} clean, {robust:.1%} under margin-PGD "
        f"({config.attack.adversary().ball}), both on held-out training images."
    )


def recipes() -> None:
    """List the recipes."""
    from rich.console import Console
    from rich.table import Table

    from hardsphere.objectives import FRAMEWORKS
    from hardsphere.recipes import ABOUT
    from hardsphere.recipes.data import DATA

    table = Table("part", "choices", title="<data>/<framework>[-<variant>], such as cifar10/trades-he", box=None)
    table.add_row("data", ", ".join(DATA))
    for name, framework in FRAMEWORKS.items():
        about = (sys.modules[framework.__module__].__doc__ or "").partition("\n")[0]
        table.add_row(f"framework {name}", about)
    for variant, about in ABOUT.items():
        table.add_row(f"variant {variant}" if variant else "no variant", about)
    Console().print(table)


def show(
    recipe: Annotated[str, typer.Argument(help="the recipe")],
    overrides: Overrides = None,
) -> None:
    """Print a recipe's whole configuration, with any overrides applied."""
    import yaml

    from hardsphere.config import parse_assignments, to_dict
    from hardsphere.recipes import recipe as make

    config = make(recipe, parse_assignments(overrides or []))
    typer.echo(yaml.safe_dump(to_dict(config), sort_keys=False), nl=False)


def predict(
    run: Annotated[Path, typer.Argument(help="a run directory, or a model.safetensors")],
    files: Annotated[list[Path], typer.Argument(help="image files")],
    top: Annotated[int, typer.Option(min=1, help="How many classes to print per image.")] = 3,
    device: Device = None,
) -> None:
    """Classify images with a trained model."""
    from hardsphere.predict import predict as classify

    for file, ranking in zip(files, classify(run, files, top=top, device=device), strict=True):
        typer.echo(f"{file}: " + ", ".join(f"{name} {probability:.1%}" for name, probability in ranking))


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the run directories.")] = Path("runs/demo"),
) -> None:
    """Train two small networks on digits, with and without hypersphere embedding, and compare them honestly."""
    from hardsphere.demo import demo as run
    from hardsphere.progress import reporter

    with reporter() as watch:
        run(out, watch)
