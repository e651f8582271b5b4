"""Tensors in safetensors files, each with its own description; names with prefixes keep several parts in one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hardsphere.errors import HardsphereError
from hardsphere.files import appearing


def write_tensors(file: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Replace a safetensors file atomically; ``meta`` travels in its header as JSON, so the two never disagree.

    Args:
        tensors: as `on_host` gives them.
    """
    from safetensors.torch import save

    with appearing(file) as partial:  # written here, since safetensors' own file could be read by its owner only
        partial.write_bytes(save(tensors, {"hardsphere": json.dumps(meta)}))


def on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in the host's memory, which share nothing."""
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}


def read_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write_tensors` wrote."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            header = opened.metadata() or {}
            tensors: dict[str, Tensor] = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise HardsphereError(f"There is no file '{file}'.") from None
    except (SafetensorError, OSError):
        raise HardsphereError(f"'{file}' is no whole safetensors file: it is truncated or damaged.") from None
    if "hardsphere" not in header:
        raise HardsphereError(f"'{file}' was not written by hardsphere: it does not say what model it holds.")
    return tensors, json.loads(header["hardsphere"])


def part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose name begins with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def labelled(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors with a prefix before each name."""
    return {prefix + name: value for name, value in tensors.items()}


def to_device(tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The tensors on a device."""
    return {name: value.to(device) for name, value in tensors.items()}
