"""The command line: verbs over the library. Parsing and printing only; torch is imported when a verb needs it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from hardsphere.errors import HardsphereError

app = typer.Typer(
    name="hardsphere",
    help="Train image classifiers that withstand adversarial perturbations, and tell honestly how robust they are.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Fetch data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")
corrupt_app = typer.Typer(help="Make corrupted sets in the official layouts.", no_args_is_help=True)
app.add_typer(corrupt_app, name="corrupt")
bench_app = typer.Typer(help="Measure how fast things are on this machine.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; by default a GPU if there is one.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="such as attack.eps=8/255")]


def main() -> None:
    """Run the command line; what a person can put right is one sentence and exit code 2."""
    # Idle threads that spin for milliseconds make small networks many times slower as soon as another program wants the
    # processor (40 times for 2 threads on 2 cores, both busy); spinning briefly costs nothing on an idle machine. torch
    # reads this when it is imported, which no verb has done yet.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    try:
        app()
    except HardsphereError as error:
        print(f"hardsphere: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    except KeyboardInterrupt:
        print("hardsphere: stopped. The same command with --resume goes on.", file=sys.stderr)  # noqa: T201
        sys.exit(130)


@app.command()
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


@app.command()
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


@app.command()
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


@app.command()
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


Target = Annotated[
    str,
    typer.Argument(
        help="a run directory, a checkpoint, package.module:callable, timm:NAME, torchvision:NAME, or a file of weights"
    ),
]
Images = Annotated[
    str | None,
    typer.Option("--data", help="digits, cifar10:DIR, cifar100:DIR, folder:DIR or FILE.npz; the run's own by default."),
]
Norm = Annotated[str | None, typer.Option(help="linf, l2 or l1; the run's own by default.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first N test images.")]
Weights = Annotated[Path | None, typer.Option(help="A file of weights for the network; no pickle is executed.")]
Network = Annotated[str | None, typer.Option("--model", help="The network that a file of weights belongs to.")]
Seed = Annotated[int, typer.Option(help="Of all randomness in the attacks.")]
Frost = Annotated[Path | None, typer.Option(help="Folder with the photographs frost1 to frost5.")]


@app.command()
def evaluate(
    target: Target,
    suite: Annotated[str, typer.Option(help="quick, paper, standard, blackbox, full, or corruptions.")] = "standard",
    data: Images = None,
    eps: Annotated[
        str | None, typer.Option(help="Radius, or several for a curve: 2/255,4/255; the run's own by default.")
    ] = None,
    norm: Norm = None,
    limit: Limit = None,
    out: Annotated[Path | None, typer.Option(help="Folder for ledger.db and card.json.")] = None,
    weights: Weights = None,
    model: Network = None,
    seed: Seed = 0,
    batch: Annotated[int, typer.Option(min=1, help="Images at once; halved by itself when memory runs out.")] = 256,
    eot: Annotated[int, typer.Option(min=1, help="Average over N draws of a randomised model.")] = 1,
    source: Annotated[str | None, typer.Option(help="Another target, for suites with a transfer attack.")] = None,
    save_images: Annotated[
        bool, typer.Option("--save-images", help="Keep the images that broke the model, and check them as PNG files.")
    ] = False,
    corruptions: Annotated[
        Path | None, typer.Option(help="A corrupted set, official or generated; by default it is made on the fly.")
    ] = None,
    frost: Frost = None,
    baseline: Annotated[
        str | None, typer.Option(help="For the mean corruption error: alexnet, or another model's card.json.")
    ] = None,
    device: Device = None,
) -> None:
    """Measure how robust a classifier is. The same command goes on after an interruption."""
    if suite == "corruptions":
        _evaluate_corruptions(
            target, data, limit, out, weights, model, seed, batch, corruptions, frost, baseline, device
        )
        return
    from hardsphere.evaluate import evaluate as run
    from hardsphere.evaluate import verify_png
    from hardsphere.evaluate.targets import default_directory, resolve
    from hardsphere.progress import evaluation_progress
    from hardsphere.report.card import show_card
    from hardsphere.runtime import pick_device

    chosen = pick_device(device)
    job = resolve(target, suite=suite, data=data, eps=eps, norm=norm, weights=weights, network=model)
    other = resolve(source, suite=suite, data=data, eps=eps, norm=norm).model if source else None
    settings = {"eps": eps, "norm": norm, "limit": limit, "seed": seed or None, "eot": eot if eot > 1 else None}
    folder = out or default_directory(target, suite, **settings, images=save_images)
    with evaluation_progress() as watch:
        evaluation = run(
            job.model,
            job.source,
            ball=job.balls,
            suite=suite,
            seed=seed,
            class_names=job.class_names,
            limit=limit,
            batch=batch,
            out=folder,
            progress=watch,
            eot=eot,
            save_images=save_images,
            source=other,
            device=chosen,
            about={**job.about, "command": _command()},
        )
    show_card(evaluation.card)
    if save_images:
        typer.echo(
            verify_png(job.model, job.source, None, job.balls[-1], evaluation.ledger, folder / "png", limit=limit)
        )
    typer.echo(f"Written: {folder / 'card.json'}, {folder / 'ledger.db'}")


def _evaluate_corruptions(
    target: str,
    data: str | None,
    limit: int | None,
    out: Path | None,
    weights: Path | None,
    model: str | None,
    seed: int,
    batch: int,
    corruptions: Path | None,
    frost: Path | None,
    baseline: str | None,
    device: str | None,
) -> None:
    from hardsphere.evaluate.common import baseline_named, evaluate_corruptions
    from hardsphere.evaluate.targets import default_directory, resolve
    from hardsphere.progress import evaluation_progress
    from hardsphere.report.card import show_card
    from hardsphere.runtime import pick_device

    chosen = pick_device(device)
    # Corruptions know no ball, so a foreign model need not name one.
    job = resolve(target, suite="paper", data=data, weights=weights, network=model)
    folder = out or default_directory(target, "corruptions", limit=limit, seed=seed or None)
    with evaluation_progress() as watch:
        evaluation = evaluate_corruptions(
            job.model,
            job.source,
            corruptions,
            seed=seed,
            frost=frost,
            baseline=baseline_named(baseline) if baseline else None,
            limit=limit,
            batch=batch,
            out=folder,
            device=chosen,
            progress=watch,
            about={**job.about, "command": _command()},
        )
    show_card(evaluation.card)
    typer.echo(f"Written: {folder / 'card.json'}, {folder / 'ledger.db'}")


@app.command()
def audit(
    target: Target,
    data: Images = None,
    eps: Annotated[str | None, typer.Option(help="Radius; the run's own by default.")] = None,
    norm: Norm = None,
    limit: Annotated[int, typer.Option(min=1, help="At most the first N test images.")] = 256,
    raw: Annotated[
        bool, typer.Option("--paper-view", help="Audit the model at scale 1 (raw cosines), as the paper measures it.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the findings as JSON into this file.")] = None,
    weights: Weights = None,
    model: Network = None,
    source: Annotated[str | None, typer.Option(help="Another target to transfer attacks from.")] = None,
    seed: Seed = 0,
    device: Device = None,
) -> None:
    """Look for signs that a robustness number cannot be trusted: masked gradients, a flattering scale, and more."""
    from rich.console import Console

    from hardsphere.evaluate.audit import audit as run
    from hardsphere.evaluate.targets import first_images, resolve
    from hardsphere.files import write_json
    from hardsphere.report.audit import render_audit
    from hardsphere.runtime import pick_device
    from hardsphere.sphere import paper_view

    chosen = pick_device(device)
    job = resolve(target, data=data, eps=eps, norm=norm, weights=weights, network=model)
    other = resolve(source, data=data, eps=eps, norm=norm).model.to(chosen) if source else None
    x, y, ids = first_images(job.source, limit, chosen)
    audited = job.model.to(chosen)
    found = run(
        paper_view(audited) if raw else audited,
        x,
        y,
        job.balls[-1],
        ids=ids,
        seed=seed,
        selection=job.about.get("selection"),
        surrogate=other,
        limit=limit,
    )
    Console().print(render_audit(found))
    if out is not None:
        write_json(out, found.to_dict())


def _command(without: str | None = None) -> str:
    """The command line as it was typed, for the record; perhaps without one option, which takes a value."""
    import shlex

    words = sys.argv[1:]
    if without in words:
        place = words.index(without)
        words = words[:place] + words[place + 2 :]
    return shlex.join(["hardsphere", *words])


@data_app.command("cifar10")
def data_cifar10(out: Annotated[Path, typer.Option(help="Folder to put it into.")]) -> None:
    """Fetch CIFAR-10, check it against the official digests, and lay it out as the official binary files."""
    from hardsphere.data import fetch_cifar10

    fetch_cifar10(out, progress=typer.echo)


@corrupt_app.command("cifar10")
def corrupt_cifar10(
    data: Annotated[Path, typer.Option(help="Where CIFAR-10 lies.")],
    out: Annotated[Path, typer.Option(help="Folder for the set, in the layout of CIFAR-10-C.")],
    seed: Annotated[int, typer.Option(help="Of all randomness in the corruptions.")] = 0,
    extra: Annotated[bool, typer.Option("--extra", help="Also the four extra corruptions.")] = False,
    frost: Frost = None,
    device: Device = None,
) -> None:
    """Write CIFAR-10-C of the test images: <name>.npy in five severity blocks, and labels.npy."""
    from hardsphere.corruptions import ALL, CORRUPTIONS, frost_source, write_cifar
    from hardsphere.data import load
    from hardsphere.data.sources import Images
    from hardsphere.progress import corruption_progress
    from hardsphere.runtime import pick_device

    test = load("cifar10", data).test
    assert isinstance(test, Images)
    names, source = (ALL if extra else CORRUPTIONS), frost_source(frost)
    typer.echo(f"Frost: {source.origin}")
    with corruption_progress(len(names), len(test)) as watch:
        manifest = write_cifar(
            test.pixels,
            test.labels,
            out,
            seed=seed,
            names=names,
            frost=source,
            device=pick_device(device),
            progress=watch,
        )
    typer.echo(f"Written: {manifest.parent}")


@corrupt_app.command("folder")
def corrupt_folder(
    data: Annotated[Path, typer.Option(help="Folder with one folder of images per class.")],
    out: Annotated[Path, typer.Option(help="Folder for the set, in the layout of ImageNet-C.")],
    seed: Annotated[int, typer.Option(help="Of all randomness in the corruptions.")] = 0,
    extra: Annotated[bool, typer.Option("--extra", help="Also the four extra corruptions.")] = False,
    frost: Frost = None,
    device: Device = None,
) -> None:
    """Write the 224-pixel version of a folder: <corruption>/<severity>/<class>/<image>.JPEG."""
    from hardsphere.corruptions import ALL, CORRUPTIONS, frost_source, write_folder
    from hardsphere.corruptions.sets import folder_images
    from hardsphere.progress import corruption_progress
    from hardsphere.runtime import pick_device

    names, source = (ALL if extra else CORRUPTIONS), frost_source(frost)
    typer.echo(f"Frost: {source.origin}")
    with corruption_progress(len(names), len(folder_images(data))) as watch:
        manifest = write_folder(
            data, out, seed=seed, names=names, frost=source, device=pick_device(device), progress=watch
        )
    typer.echo(f"Written: {manifest.parent}")


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
    result = measured.to_dict() | {"command": _command(without="--out")}
    if out is not None:
        write_json(out, result)
    typer.echo(json.dumps({key: value for key, value in result.items() if key != "environment"}, indent=2))


Budget = Annotated[
    str | None, typer.Option(help="Stop inside this time, such as 90s, 9m or 2h; the same call goes on.")
]


@app.command()
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
            command=_command(without="--budget"),
        )
    for file in done.files:
        typer.echo(file.read_text())
    typer.echo(
        f"Written: {', '.join(map(str, done.files))}" + ("" if done.complete else " (incomplete: call it again)")
    )


@app.command()
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
            plan, out, budget, data_dir=data, device=device, reporter=watch, command=_command(without="--budget")
        )
    typer.echo(sweep_markdown(swept))
    missing = f" ({len(swept.missing)} measurements are missing: call it again)" if swept.missing else ""
    typer.echo(f"Written: {out / 'results.jsonl'}{missing}")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the run directories.")] = Path("runs/demo"),
) -> None:
    """Train two small networks on digits, with and without hypersphere embedding, and compare them honestly."""
    from hardsphere.demo import demo as run
    from hardsphere.progress import reporter

    with reporter() as watch:
        run(out, watch)
