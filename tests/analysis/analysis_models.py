"""Small models in float64 on which the analyses have closed forms."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hardsphere.sphere import SphereHead, attach

HEADS: dict[str, dict[str, bool] | None] = {
    "plain": None,
    "FN": {"feature_norm": True, "weight_norm": False},
    "WN": {"feature_norm": False, "weight_norm": True},
    "HE": {"feature_norm": True, "weight_norm": True},
    "m-HE": {"feature_norm": True, "weight_norm": True, "angular": True},
}


class Pixels(nn.Module):
    """The feature is the image itself, so that every angle and norm can be read off its pixels."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.fc = nn.Linear(weight.shape[1], weight.shape[0], bias=False).to(weight.dtype)
        with torch.no_grad():
            self.fc.weight.copy_(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(1))


class Smooth(nn.Module):
    """A smooth network whose features depend on the image in norm and direction."""

    def __init__(self, inputs: int = 12, dim: int = 7, classes: int = 5) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(inputs, 9)
        self.second = nn.Linear(9, dim)
        self.fc = nn.Linear(dim, classes)
        self.double()

    def body(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(3 * self.first(x.flatten(1) - 0.5)))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x))


def headed(model: nn.Module, head: str, scale: float = 6.0, margin: float = 0.2) -> nn.Module:
    """The model with one of the heads of `HEADS`."""
    options = HEADS[head]
    return model if options is None else attach(model, scale=scale, margin=margin, **options)


def head_of(model: nn.Module) -> SphereHead:
    head = model.get_submodule("fc")
    assert isinstance(head, SphereHead)
    return head


def images(count: int, *shape: int, seed: int = 4, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Uniform images in float64."""
    generator = torch.Generator().manual_seed(seed)
    return low + (high - low) * torch.rand(count, *shape, dtype=torch.float64, generator=generator)
