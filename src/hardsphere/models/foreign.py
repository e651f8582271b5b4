"""Backbones of torchvision and timm, where these are installed. No weights are downloaded: start from them by `init`.

Beside a torch of another build, importing torchvision (and timm, which imports it) raises RuntimeError rather than
ImportError, so both mean that the package cannot be used.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

from torch import nn

from hardsphere.errors import HardsphereError, nearest


def timm_model(name: str, num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """A timm backbone with untrained weights."""
    timm = _import("timm")
    _check_known("timm", name, timm.list_models())
    # Transformers are laid out for one image size and must be told which; convolutional networks refuse to be told.
    described = timm.get_pretrained_cfg(name)
    size = {"img_size": image_size} if described is not None and described.fixed_input_size else {}
    network = timm.create_model(name, pretrained=False, num_classes=num_classes, in_chans=in_channels, **size)
    return cast(nn.Module, network)


def torchvision_model(name: str, num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """A torchvision classifier with untrained weights; its first convolution is remade for images without colour."""
    models = _import("torchvision.models")
    _check_known("torchvision", name, models.list_models(module=models))
    size = {"image_size": image_size} if name.startswith("vit_") else {}
    network = cast(nn.Module, models.get_model(name, weights=None, num_classes=num_classes, **size))
    if in_channels != 3:
        _remake_first_convolution(network, in_channels)
    return network


def _import(module: str) -> Any:
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as reason:
        raise HardsphereError(
            f"Models named '{package}:…' need the package {package} beside a matching torch: "
            f"pip install 'hardsphere[backbones]' ({reason})."
        ) from None


def _check_known(package: str, name: str, known: list[str]) -> None:
    if name.partition(".")[0] not in known:
        raise HardsphereError(f"{package} has no model named '{name}'.{nearest(name, known)}")


def _remake_first_convolution(network: nn.Module, in_channels: int) -> None:
    name, old = next((name, module) for name, module in network.named_modules() if isinstance(module, nn.Conv2d))
    new = nn.Conv2d(
        in_channels,
        old.out_channels,
        cast(tuple[int, int], old.kernel_size),
        stride=cast(tuple[int, int], old.stride),
        padding=cast(tuple[int, int], old.padding),
        bias=old.bias is not None,
    )
    parent, _, child = name.rpartition(".")
    setattr(network.get_submodule(parent), child, new)
