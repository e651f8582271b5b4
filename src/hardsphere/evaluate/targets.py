"""From what a person writes to what is evaluated: TARGET, data and threat model.

TARGET is a run directory or a model file of ours, which bring their own data, norm and radius; a file of weights
together with the name of the network; ``package.module:callable``, which makes a network; ``timm:NAME`` or
``torchvision:NAME``. Weights are read with `weights_only=True` and nothing else: a pickle that asks to run code is
refused. What a foreign model does not say of itself must be said by the caller: nothing is guessed.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from hardsphere.config import number
from hardsphere.errors import HardsphereError
from hardsphere.evaluate.suites import Suite, as_suite
from hardsphere.threat import Ball

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hardsphere.data import DataSet, Source
    from hardsphere.train import Deployed

_WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")


@dataclass(frozen=True)
class Job:
    """Everything `evaluate` needs: ``evaluate(job.model, job.source, ball=job.balls, about=job.about, ...)``.

    Pass ``class_names=job.class_names`` too.

    Attributes:
        model: in eval mode.
        source: the test images.
        balls: one or several.
        class_names: one name per class; none if the data has numbers only.
        about: what the card tells: ``target``, ``data``, ``selection``.
    """

    model: nn.Module
    source: Source
    balls: tuple[Ball, ...]
    class_names: tuple[str, ...] | None
    about: dict[str, Any] = field(default_factory=dict)


def resolve(
    target: str | Path,
    *,
    suite: str | Suite = "standard",
    data: str | None = None,
    eps: str | float | Sequence[float] | None = None,
    norm: str | None = None,
    weights: str | Path | None = None,
    network: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Job:
    """A target with its data and threat model.

    Args:
        target: see the module's docstring.
        suite: decides the radius if it has one of its own (`paper`) and none is given.
        data: ``digits``, ``cifar10:DIR``, ``folder:DIR``, ``FILE.npz``; the run's own by default.
        eps: one radius or several, as ``"2/255,4/255"`` or numbers; the run's own by default.
        norm: the run's own by default.
        weights: a file of weights for a network that comes without, or with others.
        network: the name of the network in a file of weights, as `hardsphere.models.build` knows it.
        mean: of each channel, if the network wants its input normalised and does not do it itself.
        std: likewise.
    """
    text = str(target)
    if _is_ours(Path(text)):
        if weights is not None or network is not None:
            raise HardsphereError(f"'{text}' holds its own network and weights: leave --weights and --model away.")
        return _ours(Path(text), suite, data, eps, norm)
    if data is None:
        if ":" not in text and not Path(text).exists():
            raise HardsphereError(f"'{text}' is no target: there is no such run directory or file.")
        raise HardsphereError(f"'{text}' does not say what data to evaluate on: add --data, such as cifar10:DIR.")
    images = _data(data)
    suite = as_suite(suite)
    if eps is None and suite.eps is None:
        raise HardsphereError(f"'{text}' does not say what radius to evaluate at: add --eps, such as 8/255.")
    if norm is None and suite.eps is None:
        raise HardsphereError(f"'{text}' does not say in which norm to evaluate: add --norm, such as linf.")
    balls = _balls_of(suite, eps, norm, None)
    model = _foreign(text, images, weights, network, mean, std)
    about = {
        "target": text,
        "data": f"{data} test",
        "selection": None,
        "weights": None if weights is None else str(weights),
    }
    names = None if images.name == "arrays" else images.class_names
    return Job(model.eval(), images.test, balls, names, about)


def default_directory(target: str, suite: str, **settings: object) -> Path:
    """Where an evaluation is written by default: into the run it judges, else ``evaluations/<target>-<suite>``.

    Args:
        settings: what was asked for beside the suite; each that is not None gets an evaluation of its own.
    """
    given = [f"{name}-{value}" for name, value in settings.items() if value is not None]
    name = "-".join([suite, *given])
    folder = Path(target) if Path(target).is_dir() else Path("evaluations")
    title = f"evaluation-{name}" if folder == Path(target) else f"{target}-{name}"
    return folder / re.sub(r"[^A-Za-z0-9.]+", "-", title).strip("-")


def first_images(source: Source, limit: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The first images of a split on a device, with labels and ids."""
    from hardsphere.data import eval_batches

    part = source.subset(range(min(limit, len(source))))
    (batch,) = eval_batches(part, batch=len(part), device=device)
    return batch.x, batch.y, batch.ids


def parse_radii(text: str) -> list[float]:
    """``"2/255,4/255,8/255"`` as numbers."""
    try:
        radii = [number(part.strip()) for part in text.split(",")]
    except (ValueError, ZeroDivisionError, TypeError):
        raise HardsphereError(
            f"eps is '{text}', but must be one or more numbers, such as 8/255 or 2/255,4/255."
        ) from None
    return radii


# ---------------------------------------------------------------------------------------------------------------------
# Our own runs and model files
# ---------------------------------------------------------------------------------------------------------------------


def _is_ours(path: Path) -> bool:
    """A run or checkpoint directory, or a safetensors file that describes its own model."""
    if path.is_dir():
        return True
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return bool(file.metadata())
    except (SafetensorError, OSError):
        raise HardsphereError(f"{path} is damaged, or no file of weights at all.") from None


def _ours(
    path: Path,
    suite: str | Suite,
    data: str | None,
    eps: str | float | Sequence[float] | None,
    norm: str | None,
) -> Job:
    from hardsphere.data import load as load_data
    from hardsphere.train import load

    deployed = load(path)
    if data is not None and not _is_own(data, deployed):
        images = _without_trained(_data(data, deployed.config.data.size), deployed)
    else:
        spec = deployed.config.data
        options: dict[str, Any] = {} if spec.size is None else {"size": spec.size}
        images = load_data(
            deployed.data_name, deployed.data_dir, validation=spec.validation, seed=deployed.config.seed, **options
        )
        _check_unchanged(path, images, deployed.meta.get("splits"))
    # Arrays have numbers for names, and those of the last classes may be missing.
    fits = len(images.class_names) == len(deployed.class_names) or (
        images.name == "arrays" and len(images.class_names) < len(deployed.class_names)
    )
    if not fits:
        raise HardsphereError(
            f"'{path}' knows {len(deployed.class_names)} classes, but the data has {len(images.class_names)}."
        )
    if images.name != "arrays" and images.class_names != deployed.class_names:
        ours, theirs = _listed(deployed.class_names), _listed(images.class_names)
        raise HardsphereError(f"'{path}' knows the classes {ours}, but the data has {theirs}.")
    balls = _balls_of(as_suite(suite), eps, norm, deployed.ball)
    about = {"target": str(path), "data": f"{data or deployed.data_name} test", "selection": deployed.selection}
    return Job(deployed.model, images.test, balls, deployed.class_names, about)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _is_own(data: str, deployed: Deployed) -> bool:
    """Whether a person names the very place that the run was trained on, of which a part is held out."""
    from hardsphere.data import parse_source

    name, directory = parse_source(data)
    place = deployed.data_dir
    return name == deployed.data_name and place is not None and directory.resolve() == place.resolve()


def _without_trained(images: DataSet, deployed: Deployed) -> DataSet:
    """Of the folder that a run was trained on, lying elsewhere by now, only what was set aside then."""
    from hardsphere.data import ImageFiles
    from hardsphere.data.folder import set_aside

    splits = deployed.meta.get("splits")
    if not isinstance(images.test, ImageFiles) or splits is None or images.test.digest() == splits["test"]:
        return images
    try:
        _, test = set_aside(images.test)
    except HardsphereError:  # too few images: those of a training were not
        return images
    return replace(images, test=test) if test.digest() == splits["test"] else images


def _check_unchanged(path: Path, images: DataSet, splits: Mapping[str, str | None] | None) -> None:
    """Where a folder's own cut into splits has changed, its test images may be among those that were trained on."""
    if splits is None or images.train is None or images.test.digest() == splits["test"]:
        return
    if images.train.digest() != splits["train"]:
        raise HardsphereError(
            f"The data of '{path}' is not what it was trained on any more, so that its test images may have been "
            "trained on: bring it back, or name other data with --data."
        )


def _data(text: str, size: int | None = None) -> DataSet:
    """Somebody's data to be judged on: of a folder without splits, all of it."""
    from hardsphere.data import load, parse_source

    name, directory = parse_source(text)
    options: dict[str, Any] = {"size": size} if size is not None and name == "folder" else {}
    return load(name, directory, test_only=True, **options)


def _balls_of(
    suite: Suite, eps: str | float | Sequence[float] | None, norm: str | None, own: Ball | None
) -> tuple[Ball, ...]:
    """What was asked for, else what the suite is defined at, else what the model was trained for."""
    if eps is None and suite.eps is not None:
        if norm not in (None, "linf"):
            raise HardsphereError(
                f"The suite '{suite.name}' has a radius of its own in linf only: add --eps for {norm}."
            )
        return _balls(suite.eps, "linf")
    radius, usual = (own.eps, own.norm) if own is not None else (None, "linf")
    return _balls(eps if eps is not None else cast(float, radius), norm or usual)


def _balls(eps: str | float | Sequence[float], norm: str) -> tuple[Ball, ...]:
    radii = parse_radii(eps) if isinstance(eps, str) else [eps] if isinstance(eps, int | float) else list(eps)
    return tuple(Ball(norm, radius) for radius in radii)


# ---------------------------------------------------------------------------------------------------------------------
# Everyone else's
# ---------------------------------------------------------------------------------------------------------------------


def _foreign(
    text: str,
    images: DataSet,
    weights: str | Path | None,
    network: str | None,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
) -> nn.Module:
    from hardsphere.models import Classifier

    package, colon, name = text.partition(":")
    if colon and package in ("timm", "torchvision"):
        return _published(text, images, weights, mean, std)
    if text.endswith(_WEIGHTS):
        return _checkpoint(Path(text), images, network, mean, std)
    if not colon or not package or not name:
        raise HardsphereError(
            f"'{text}' is no target: there is no such run directory or file, and it is not of the form "
            "package.module:callable, timm:NAME or torchvision:NAME."
        )
    model = _called(text, package, name)
    if weights is not None:
        _fill(model, Path(weights))
    if mean is None and std is None:
        return model
    channels = images.shape[0]
    return Classifier(model, mean or [0.0] * channels, std or [1.0] * channels)


def _checkpoint(
    file: Path, images: DataSet, network: str | None, mean: Sequence[float] | None, std: Sequence[float] | None
) -> nn.Module:
    from hardsphere.models import read_weights

    if not file.is_file():
        raise HardsphereError(f"There is no file of weights at {file}.")
    read_weights(file)  # refuses what is no file of weights, before anything is said about networks
    if network is None:
        raise HardsphereError(
            f"{file} holds weights but does not say of which network: add --model, such as wrn-34-10."
        )
    return _built(network, images, file, mean, std)


def _built(
    name: str, images: DataSet, file: Path, mean: Sequence[float] | None, std: Sequence[float] | None
) -> nn.Module:
    """A network of `hardsphere.models`, filled from a file."""
    from hardsphere.models import build, load_weights

    channels, size, _ = images.shape
    classes = len(images.class_names)
    model = build(name, num_classes=classes, in_channels=channels, image_size=size, mean=mean, std=std)
    if new := load_weights(model, file):
        raise HardsphereError(f"{file} has no weights for {new[0]} of {name} with {classes} classes.")
    return model


def _published(
    text: str, images: DataSet, weights: str | Path | None, mean: Sequence[float] | None, std: Sequence[float] | None
) -> nn.Module:
    """A network of timm or torchvision, with a file of weights or those its package publishes."""
    from hardsphere.models import Classifier

    if weights is not None:
        return _built(text, images, Path(weights), mean, std)
    network, own_mean, own_std = _downloaded(text)
    return Classifier(network, mean or own_mean, std or own_std)


def _downloaded(text: str) -> tuple[nn.Module, Sequence[float], Sequence[float]]:
    """A network with the weights its package publishes, and the normalisation that goes with them."""
    package, _, name = text.partition(":")
    try:
        library: Any = importlib.import_module("timm" if package == "timm" else "torchvision.models")
    except (ImportError, RuntimeError) as reason:  # beside a torch of another build torchvision raises the latter
        raise HardsphereError(
            f"'{text}' needs {package} beside a matching torch: pip install 'hardsphere[backbones]' ({reason})."
        ) from None
    try:
        if package == "timm":
            model = library.create_model(name, pretrained=True)
            return model, model.default_cfg["mean"], model.default_cfg["std"]
        published = library.get_model_weights(name).DEFAULT
        transforms = published.transforms()
        return library.get_model(name, weights=published), transforms.mean, transforms.std
    except Exception as reason:  # unknown names, no network, a full disk: each package has its own exceptions for them
        detail = " ".join(str(reason).split())[:200]
        raise HardsphereError(f"'{text}' cannot be had with its published weights ({detail}): add --weights.") from None


def _called(text: str, module: str, name: str) -> nn.Module:
    """What ``package.module:callable`` makes, or is."""
    with _from_here():
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except ImportError as reason:
            raise HardsphereError(f"The module of '{text}' cannot be imported ({reason}).") from None
        except AttributeError:
            raise HardsphereError(f"The module '{module}' has nothing named '{name}'.") from None
        except Exception as reason:
            raise HardsphereError(f"The module of '{text}' fails when it is imported: {_said(reason)}.") from reason
        model = found
        if not isinstance(found, nn.Module):
            if not callable(found):
                raise HardsphereError(f"'{text}' is a {type(found).__name__}, but must make a network when called.")
            try:
                model = found()
            except TypeError as reason:
                raise HardsphereError(f"'{text}' cannot be called without arguments ({reason}).") from None
            except HardsphereError:
                raise
            except Exception as reason:
                raise HardsphereError(f"'{text}' makes no network: {_said(reason)}.") from reason
    if not isinstance(model, nn.Module):
        raise HardsphereError(f"'{text}' returned a {type(model).__name__}, but must return a torch module.")
    return model


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _fill(model: nn.Module, file: Path) -> None:
    """Load a file of weights into a network of any kind."""
    from hardsphere.models import read_weights

    weights = read_weights(file)
    try:
        model.load_state_dict(weights)
    except RuntimeError as reason:
        detail = " ".join(str(reason).split())
        raise HardsphereError(f"{file} does not fit the network: {detail[:300]}") from None


@contextmanager
def _from_here() -> Iterator[None]:
    """Modules beside the caller can be imported, as with ``python -m``."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        if here in sys.path:
            sys.path.remove(here)
