"""Files that are either the old version or the new one, never half of each."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hardsphere.errors import HardsphereError


def write_text(file: Path, text: str) -> None:
    """Replace a file's text atomically."""
    temporary = _beside(file)
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    _publish(temporary, file)


def write_tensors(file: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Replace a safetensors file atomically; ``meta`` travels in its header as JSON, so the two never disagree."""
    from safetensors.torch import save_file

    plain = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    temporary = _beside(file)
    save_file(plain, temporary, {"hardsphere": json.dumps(meta)})
    with temporary.open("rb") as stream:
        os.fsync(stream.fileno())
    _publish(temporary, file)


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


def _beside(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    return file.with_name(f".{file.name}.{os.getpid()}.tmp")


def _publish(temporary: Path, file: Path) -> None:
    temporary.replace(file)
    directory = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the rename itself must survive a power cut
    finally:
        os.close(directory)
