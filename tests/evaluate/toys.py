"""Models whose robustness is known in closed form."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hardsphere.threat import Ball


class Linear(nn.Module):
    """Logits W.x + b of the flattened image."""

    def __init__(self, shape: tuple[int, int, int] = (1, 4, 4), classes: int = 2, seed: int = 0) -> None:
        super().__init__()
        size = shape[0] * shape[1] * shape[2]
        generator = torch.Generator().manual_seed(seed)
        self.linear = nn.Linear(size, classes)
        with torch.no_grad():
            self.linear.weight.copy_(torch.randn(classes, size, generator=generator))
            # The boundaries pass through the middle of the box.
            self.linear.bias.copy_(-0.5 * self.linear.weight.sum(dim=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(1))


def images(count: int, shape: tuple[int, int, int] = (1, 4, 4), seed: int = 1) -> Tensor:
    """Images far enough from 0 and 1 that the box never stops a perturbation of 0.2."""
    return 0.2 + 0.6 * torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed))


def distances(model: Linear, x: Tensor, y: Tensor, norm: str = "linf") -> Tensor:
    """The distance of each image from the nearest boundary of its class, in float64: |gap| / ||difference of w||_q."""
    weight, bias = model.linear.weight.detach().double(), model.linear.bias.detach().double()
    logits = x.flatten(1).double() @ weight.T + bias
    gaps = logits.gather(1, y[:, None]) - logits
    steepness = (weight[y][:, None] - weight[None]).norm(p={"linf": 1, "l2": 2}[norm], dim=2)
    ratio = gaps / steepness.clamp_min(1e-300)
    return ratio.scatter(1, y[:, None], torch.inf).amin(dim=1)


def labelled(model: nn.Module, count: int, wrong: int = 0, **rest: int) -> tuple[Tensor, Tensor]:
    """Images with the model's own answers as labels, the first ``wrong`` of them changed."""
    x = images(count, **rest)
    with torch.no_grad():
        logits = model(x)
    y = logits.argmax(dim=1)
    y[:wrong] = (y[:wrong] + 1) % logits.shape[1]
    return x, y


def radius_at(model: Linear, x: Tensor, y: Tensor, part: float, norm: str = "linf") -> Ball:
    """A ball whose radius lies in the middle of a gap between two samples' distances, near the given quantile."""
    ordered = distances(model, x, y, norm).sort().values
    start = int(part * len(ordered))
    window = ordered[start : start + 6]
    widest = int((window[1:] / window[:-1]).argmax())
    return Ball(norm, float((window[widest] + window[widest + 1]) / 2))
