"""Models: `build` makes a classifier from its name, `load_weights` fills it from a file, `features` looks inside.

One file per family. Names: `cnn`, `cnn-WIDTH`, `preactresnet18`, `preactresnet18-WIDTH`, `wrn-DEPTH-WIDTH`, the four
ImageNet networks of the paper, and `timm:NAME` or `torchvision:NAME` where these packages are installed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import nn

from hardsphere.errors import HardsphereError, nearest
from hardsphere.models import resnet
from hardsphere.models.classifier import Classifier, features
from hardsphere.models.cnn import CNN
from hardsphere.models.foreign import timm_model, torchvision_model
from hardsphere.models.preactresnet import PreActResNet18
from hardsphere.models.weights import load_weights, read_weights
from hardsphere.models.wrn import WideResNet
from hardsphere.sphere import attach

__all__ = ["Classifier", "HeadSpec", "build", "features", "load_weights", "names", "read_weights"]

_CNN_WIDTH = 16
_PREACTRESNET_WIDTH = 64


@dataclass(frozen=True)
class HeadSpec:
    """The last layer of a model, as a config writes it; the plain linear layer is kept while both norms are off.

    The fields are those of `hardsphere.sphere.SphereHead`.
    """

    feature_norm: bool = False
    weight_norm: bool = False
    angular: bool = False
    scale: float = 15.0
    margin: float = 0.0


def names() -> list[str]:
    """The names `build` knows, with capital letters where a number or another package's name goes."""
    return [
        "cnn",
        "cnn-WIDTH",
        "preactresnet18",
        "preactresnet18-WIDTH",
        "wrn-28-10",
        "wrn-34-10",
        "wrn-34-20",
        "wrn-DEPTH-WIDTH",
        *resnet.VARIANTS,
        "timm:NAME",
        "torchvision:NAME",
    ]


def build(
    name: str,
    *,
    num_classes: int,
    in_channels: int = 3,
    image_size: int = 32,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    head: HeadSpec = HeadSpec(),  # noqa: B008 (frozen)
    seed: int | None = None,
) -> Classifier:
    """A classifier with new weights.

    Args:
        name: one of `names()`.
        num_classes: number of classes, at least 2.
        in_channels: 1 for grey images, 3 for colour.
        image_size: side of the images in pixels; only backbones laid out for one size look at it.
        mean: mean of each channel; 0 by default.
        std: standard deviation of each channel; 1 by default.
        head: the last layer.
        seed: makes the weights a function of this number alone; by default they are drawn from torch's generator.
    """
    _check_at_least(2, "num_classes", num_classes)
    _check_at_least(1, "in_channels", in_channels)
    _check_at_least(1, "image_size", image_size)
    mean = _for_channels("mean", mean, 0.0, in_channels)
    std = _for_channels("std", std, 1.0, in_channels)
    with _seeded(seed):
        network = _network(name, num_classes, in_channels, image_size)
        if head.feature_norm or head.weight_norm or head.angular:
            network = attach(network, **asdict(head))
    return Classifier(network, mean, std)


def _network(name: str, num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    package, colon, foreign = name.partition(":")
    if colon and package == "timm":
        return timm_model(foreign, num_classes, in_channels, image_size)
    if colon and package == "torchvision":
        return torchvision_model(foreign, num_classes, in_channels, image_size)
    if match := re.fullmatch(r"cnn(?:-([1-9]\d*))?", name):
        return CNN(int(match[1] or _CNN_WIDTH), num_classes, in_channels)
    if match := re.fullmatch(r"preactresnet18(?:-([1-9]\d*))?", name):
        return PreActResNet18(int(match[1] or _PREACTRESNET_WIDTH), num_classes, in_channels)
    if match := re.fullmatch(r"wrn-(\d+)-(\d+)", name):
        return WideResNet(int(match[1]), int(match[2]), num_classes, in_channels)
    if name in resnet.VARIANTS:
        return resnet.ResNet(name, num_classes, in_channels)
    raise HardsphereError(f"Unknown model '{name}': use one of {', '.join(names())}.{nearest(name, names())}")


def _check_at_least(least: int, what: str, value: int) -> None:
    if value < least:
        raise HardsphereError(f"{what} is {value}, but a model needs at least {least}.")


def _for_channels(what: str, values: Sequence[float] | None, default: float, in_channels: int) -> Sequence[float]:
    if values is None:
        return [default] * in_channels
    if len(values) != in_channels:
        raise HardsphereError(f"{what} has {len(values)} numbers, but the images have {in_channels} channels.")
    return values


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Draw from the seed's own stream and leave torch's generator as it was."""
    if seed is None:
        yield
        return
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs as well
    try:
        yield
    finally:
        torch.set_rng_state(before)
