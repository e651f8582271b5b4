"""The samples of an evaluation, fetched by position: tensors in memory, or a data source read as it is needed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hardsphere.errors import HardsphereError

if TYPE_CHECKING:
    from hardsphere.data import Source


class Samples(Protocol):
    """Labelled images that can be fetched in any order.

    Attributes:
        labels: int64 of shape (N,), on the CPU.
        ids: int64 of shape (N,), unique, on the CPU.
        class_names: one name per class, or nothing.
    """

    labels: Tensor
    ids: Tensor
    class_names: tuple[str, ...]

    def __len__(self) -> int: ...

    def images(self, positions: Sequence[int], device: torch.device) -> Tensor:
        """The images at these positions, float32 in [0, 1], NCHW."""
        ...

    def digest(self) -> str:
        """A fingerprint of images and labels."""
        ...


@dataclass
class TensorSamples:
    """Images and labels in memory, checked when they come in."""

    x: Tensor
    labels: Tensor
    ids: Tensor
    class_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.x)

    def images(self, positions: Sequence[int], device: torch.device) -> Tensor:
        rows = torch.as_tensor(positions, dtype=torch.int64, device=self.x.device)
        return self.x[rows].to(device=device, dtype=torch.float32).clamp(0, 1)

    def digest(self) -> str:
        return self._digest

    @cached_property
    def _digest(self) -> str:
        sha = hashlib.sha256(f"{tuple(self.x.shape)}".encode())
        for first in range(0, len(self.x), 1024):  # a device's memory is not copied all at once
            rows = self.x[first : first + 1024].to(device="cpu", dtype=torch.float32)
            sha.update(rows.contiguous().numpy().data)
        sha.update(self.labels.contiguous().numpy().data)
        return sha.hexdigest()[:16]


class SourceSamples:
    """A `hardsphere.data` split; images on disk are decoded each time they are asked for."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.labels, self.ids, self.class_names = source.labels, source.ids, source.class_names

    def __len__(self) -> int:
        return len(self.source)

    def images(self, positions: Sequence[int], device: torch.device) -> Tensor:
        from hardsphere.data import eval_batches

        (batch,) = eval_batches(self.source.subset(positions), batch=len(positions), device=device)
        return batch.x

    def digest(self) -> str:
        return self.source.digest()


def gather(
    x: Tensor | Source, y: Tensor | None, ids: Tensor | None, class_names: Sequence[str] | None, limit: int | None
) -> Samples:
    """Tensors or a source as `Samples`, the first ``limit`` of them, checked; one sentence if they cannot be used."""
    if limit is not None and limit < 1:
        raise HardsphereError(f"The limit is {limit}, but an evaluation needs at least one image.")
    if isinstance(x, Tensor | np.ndarray):
        samples: Samples = _from_tensors(as_tensor(x, "images"), as_tensor(y, "labels"), as_tensor(ids, "ids"), limit)
    else:
        samples = _from_source(x, y, ids, limit)
    if class_names is not None:
        samples.class_names = tuple(class_names)
    if len(set(samples.ids.tolist())) < len(samples):
        raise HardsphereError(
            "Two samples have the same id, but ids key the randomness and the ledger: give each its own."
        )
    return samples


def as_tensor(values: Any, what: str) -> Any:
    """Arrays and lists of numbers as tensors; a tensor, a data source or nothing as it is."""
    if not isinstance(values, np.ndarray | list | tuple):
        return values
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise HardsphereError(f"The {what} are a {type(values).__name__} that is no array of numbers.") from None


def _from_source(source: Source, y: Tensor | None, ids: Tensor | None, limit: int | None) -> SourceSamples:
    if not hasattr(source, "subset"):
        raise HardsphereError(f"The images are a {type(source).__name__}, but must be a float tensor or a data source.")
    if y is not None or ids is not None:
        raise HardsphereError("A data source brings its own labels and ids: leave y and ids out.")
    if limit is not None and limit < len(source):
        source = source.subset(range(limit))
    return SourceSamples(source)


def _from_tensors(x: Tensor, y: Tensor | None, ids: Tensor | None, limit: int | None) -> TensorSamples:
    if y is None:
        raise HardsphereError("Images given as a tensor need their labels y.")
    if x.dim() != 4:
        raise HardsphereError(f"The images have the shape {tuple(x.shape)}, but must be (N, C, H, W).")
    if len(x) == 0:
        raise HardsphereError("The set of images is empty: it needs at least one image.")
    if not x.is_floating_point():
        raise HardsphereError(f"The images are {x.dtype}, but must be floats in [0, 1], such as x.float() / 255.")
    if y.shape != (len(x),) or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise HardsphereError(f"The labels are {y.dtype} of shape {tuple(y.shape)}, but must be {len(x)} integers.")
    ids = torch.arange(len(x)) if ids is None else ids
    if ids.shape != (len(x),) or ids.is_floating_point():
        raise HardsphereError(f"The ids are {ids.dtype} of shape {tuple(ids.shape)}, but must be {len(x)} integers.")
    if limit is not None:
        x, y, ids = x[:limit], y[:limit], ids[:limit]
    low, high = float(x.min()), float(x.max())
    if not (low >= -1e-6 and high <= 1 + 1e-6):  # not (...): NaN fails every comparison
        raise HardsphereError(
            f"The pixels lie in [{low:.4g}, {high:.4g}], but must lie in [0, 1]: put normalisation inside the model."
        )
    return TensorSamples(x.detach(), y.detach().long().cpu(), ids.detach().long().cpu())
