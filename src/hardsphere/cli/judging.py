"""Verbs of judging: evaluate, audit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from hardsphere.cli.app import Device, Frost, command_line

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
Norm = Annotated[str | None, typer.Option(help="linf, l2 or l1; by default that of the radius.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first N test images.")]
Weights = Annotated[Path | None, typer.Option(help="A file of weights for the network; no pickle is executed.")]
Network = Annotated[str | None, typer.Option("--model", help="The network that a file of weights belongs to.")]
Seed = Annotated[int, typer.Option(help="Of all randomness in the attacks.")]


def evaluate(
    target: Target,
    suite: Annotated[str, typer.Option(help="quick, paper, standard, blackbox, full, or corruptions.")] = "standard",
    data: Images = None,
    eps: Annotated[
        str | None,
        typer.Option(
            help="Radius, or several for a curve: 2/255,4/255; by default the suite's (paper), else the run's own."
        ),
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
    fast: Annotated[
        bool | None,
        typer.Option(help="Craft in half precision, confirm in float32; on a GPU by default.", show_default=False),
    ] = None,
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
    apart = {"--corruptions": corruptions, "--frost": frost, "--baseline": baseline}
    draws, kept = eot if eot > 1 else None, save_images or None
    attacks = {"--eps": eps, "--norm": norm, "--source": source, "--fast": fast, "--save-images": kept, "--eot": draws}
    _refuse(attacks if suite == "corruptions" else apart, suite)
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
    settings = {"eps": eps, "norm": norm, "limit": limit, "seed": seed or None, "eot": draws, "fast": fast}
    folder = out or default_directory(target, suite, **settings, images="kept" if kept else None)
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
            fast=fast,
            device=chosen,
            about={**job.about, "command": command_line()},
        )
    show_card(evaluation.card)
    if save_images:
        typer.echo(
            verify_png(
                job.model, job.source, None, evaluation.balls[-1], evaluation.ledger, folder / "png", limit=limit
            )
        )
    typer.echo(f"Written: {folder / 'card.json'}, {folder / 'ledger.db'}")


def _refuse(options: Mapping[str, object], suite: str) -> None:
    """An option that would do nothing was meant to do something."""
    from hardsphere.errors import HardsphereError

    for name, value in options.items():
        if value is not None:
            raise HardsphereError(f"{name} says nothing to --suite {suite}: leave it away, or choose another suite.")


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
            about={**job.about, "command": command_line()},
        )
    show_card(evaluation.card)
    typer.echo(f"Written: {folder / 'card.json'}, {folder / 'ledger.db'}")


def audit(
    target: Target,
    data: Images = None,
    eps: Annotated[str | None, typer.Option(help="Radius; the run's own by default.")] = None,
    norm: Norm = None,
    limit: Annotated[int, typer.Option(min=1, help="At most the first N test images.")] = 256,
    raw: Annotated[
        bool, typer.Option("--paper-view", help="Audit the model at scale 1 (raw cosines), as the paper measures it.")
    ] = False,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the findings as JSON into this file.")] = None,
    weights: Weights = None,
    model: Network = None,
    source: Annotated[str | None, typer.Option(help="Another target to transfer attacks from.")] = None,
    seed: Seed = 0,
    device: Device = None,
) -> None:
    """Look for signs that a robustness number cannot be trusted: masked gradients, a flattering scale, and more."""
    from rich.console import Console

    from hardsphere.errors import HardsphereError
    from hardsphere.evaluate.audit import audit as run
    from hardsphere.evaluate.targets import first_images, resolve
    from hardsphere.evaluate.witness import model_digest
    from hardsphere.files import write_json
    from hardsphere.report.audit import render_audit
    from hardsphere.runtime import pick_device
    from hardsphere.sphere import paper_view

    chosen = pick_device(device)
    job = resolve(target, data=data, eps=eps, norm=norm, weights=weights, network=model)
    if len(job.balls) > 1:
        raise HardsphereError("An audit looks at one radius: give --eps one.")
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
        view = "paper (raw cosines)" if raw else "deployed"
        about = {key: job.about[key] for key in ("target", "data") if key in job.about}
        digest = {"model": model_digest(audited), "view": view, "command": command_line(without="--out")}
        write_json(out, found.to_dict() | about | digest)
