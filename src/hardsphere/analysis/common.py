"""What the analyses share: how they go through the samples, the last layer they look into, and how they sum up.

An analysis leaves the model as it found it, works in eval mode and in plain float32, batch by batch, and returns its
per-sample numbers as tensors on the CPU, in the order of the samples, so that two models can be compared in pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from hardsphere.attacks import pgd
from hardsphere.attacks.base import Loss, attacking
from hardsphere.attacks.losses import cross_entropy
from hardsphere.errors import HardsphereError
from hardsphere.evaluate import witness
from hardsphere.evaluate.audit.subject import in_parts
from hardsphere.evaluate.card import proportion
from hardsphere.evaluate.samples import gather
from hardsphere.evaluate.statistics import mcnemar, paired_difference
from hardsphere.evaluate.suites import PAPER_EPS
from hardsphere.models import features
from hardsphere.noise import Noise
from hardsphere.sphere import SphereHead, final_linear
from hardsphere.threat import Ball

PAPER_STEP = 0.003 / PAPER_EPS
"""The step of the paper's evaluations (step .003 at eps .031), as a part of eps."""

QUANTILES = (5, 25, 50, 75, 95)


@dataclass(frozen=True)
class Part:
    """Some of the samples, on the model's device.

    Attributes:
        rows: where they lie among all samples.
        noise: their streams, keyed by the samples' ids: what they draw does not depend on the batch.
    """

    rows: slice
    x: Tensor
    y: Tensor
    noise: Noise


@contextmanager
def observed(model: nn.Module) -> Iterator[torch.device]:
    """The model in eval mode, frozen, in float32 without TF32; yields its device."""
    device = witness.device_of(model, torch.device("cpu"))
    with attacking(model), witness.plain_float32(device):
        yield device


def collect(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    work: Callable[[Part], dict[str, Tensor]],
    *,
    seed: int = 0,
    ids: Tensor | None = None,
    batch: int = 256,
) -> dict[str, Tensor]:
    """Do some work on every batch and join what it found, one row per sample; smaller batches where memory ends."""
    if batch < 1:
        raise HardsphereError(f"The batch is {batch}, but must hold at least one image.")
    samples = gather(x, y, ids, None, None)
    found: list[dict[str, Tensor]] = []
    with observed(model) as device:

        def one(rows: slice) -> None:
            noise = Noise(seed, samples.ids[rows].to(device))
            part = Part(rows, x[rows].detach().to(device), samples.labels[rows].to(device), noise)
            found.append({name: values.detach().cpu() for name, values in work(part).items()})

        in_parts(len(samples), batch, one)
    return {name: torch.cat([values[name] for values in found]) for name in found[0]}


def adversarial_examples(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    steps: int = 10,
    step_size: float | None = None,
    loss: Loss = cross_entropy,
    seed: int = 0,
    ids: Tensor | None = None,
    batch: int = 256,
) -> Tensor:
    """x*: PGD's last iterate on the model as deployed, for every sample, on the CPU."""

    def work(part: Part) -> dict[str, Tensor]:
        options = {"steps": steps, "step_size": step_size, "loss": loss, "keep": "last"}
        return {"x_adv": pgd(model, part.x, part.y, ball, noise=part.noise, **options).x_adv}  # type: ignore[arg-type]

    return collect(model, x, y, work, seed=seed, ids=ids, batch=batch)["x_adv"]


def bare(model: nn.Module) -> nn.Module:
    """The model itself, without what `torch.compile` puts around it."""
    return cast(nn.Module, getattr(model, "_orig_mod", model))


def final_layer(model: nn.Module) -> nn.Linear | SphereHead:
    """The layer that makes the logits."""
    layer = bare(model).get_submodule(final_linear(bare(model)))
    if not isinstance(layer, nn.Linear | SphereHead):
        raise HardsphereError(f"The last layer is a {type(layer).__name__}, but the analysis reads a linear one.")
    return layer


def flat_features(model: nn.Module, x: Tensor) -> Tensor:
    """The features z, one vector per image, with the graph if gradients are on."""
    z = features(model, x)
    if z.dim() != 2:
        raise HardsphereError(f"The features have the shape {tuple(z.shape)}, but the analysis needs one vector each.")
    return z


def class_vectors(layer: nn.Linear | SphereHead) -> Tensor:
    """W_l as the layer uses them: of length 1 under WN."""
    return (layer.class_vectors() if isinstance(layer, SphereHead) else layer.weight).detach()


def has_feature_norm(layer: nn.Linear | SphereHead) -> bool:
    """Whether the layer is deaf to ||z||."""
    return isinstance(layer, SphereHead) and layer.feature_norm


def rival(logits: Tensor, y: Tensor) -> Tensor:
    """y*: the largest class other than y, which is the predicted one wherever the sample is broken."""
    return logits.scatter(1, y[:, None], -torch.inf).argmax(dim=1)


def answers(model: nn.Module, x: Tensor) -> Tensor:
    """The logits, without a graph."""
    with torch.no_grad():
        return cast(Tensor, model(x))


def still_right(model: nn.Module, part: Part, x_adv: Tensor, ball: Ball) -> Tensor:
    """Whether the model still gives the true class, as the evaluation's runner would see it."""
    predicted = witness.confirm(model, part.x, part.y, x_adv, ball)[1]
    return predicted == part.y


def degrees(cosines: Tensor) -> Tensor:
    """Angles in degrees from cosines."""
    return torch.rad2deg(torch.acos(cosines.clamp(-1, 1)))


def summary(values: Tensor) -> dict[str, Any]:
    """Count, mean, standard error of the mean and quantiles of the finite values; none where nothing was measured."""
    values = values.double().flatten()
    values = values[values.isfinite()]
    n = len(values)
    if n == 0:
        return {"n": 0, "mean": None, "error": None, **{f"p{q}": None for q in QUANTILES}}
    at = torch.quantile(values, torch.tensor(QUANTILES, dtype=torch.float64) / 100)
    error = float(values.std()) / n**0.5 if n > 1 else None
    quantiles = {f"p{q}": float(value) for q, value in zip(QUANTILES, at, strict=True)}
    return {"n": n, "mean": float(values.mean()), "error": error, **quantiles}


def accuracy(right: Tensor) -> dict[str, Any]:
    """An accuracy with its count and 95 % interval."""
    return proportion(int(right.sum()), len(right))


def difference(first: Tensor, second: Tensor) -> dict[str, Any]:
    """How much more of the samples the first mask holds, with the paired 95 % interval and McNemar's p-value."""
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    n = len(first)
    return {
        "difference": (only_first - only_second) / max(n, 1),
        "interval": list(paired_difference(only_first, only_second, n)),
        "p_value": mcnemar(only_first, only_second),
        "n": n,
    }


def some(models: Mapping[str, nn.Module]) -> Mapping[str, nn.Module]:
    """The models themselves; no models are an error."""
    if not models:
        raise HardsphereError("No models were given: name at least one.")
    return models
