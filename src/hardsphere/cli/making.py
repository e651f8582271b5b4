"""Verbs that make data: data, corrupt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hardsphere.cli.app import Device, Frost

data_app = typer.Typer(help="Fetch data sets.", no_args_is_help=True)
corrupt_app = typer.Typer(help="Make corrupted sets in the official layouts.", no_args_is_help=True)


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
