"""BatchNorm and ReLU as one step, against the layers themselves."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frozen import trained_norms
from hardsphere.models import build
from hardsphere.norms import Affine, SumAndNorm, fuse_norms
from hardsphere.sphere import attach


@pytest.mark.parametrize(("name", "norms", "sums"), [("preactresnet18-4", 17, 8), ("wrn-16-1", 13, 6)])
def test_a_network_stays_the_same_function(name: str, norms: int, sums: int) -> None:
    model = trained_norms(attach(build(name, num_classes=10, in_channels=3, image_size=32, seed=0))).double()
    fused = fuse_norms(copy.deepcopy(model))
    layers = [module for module in fused.modules() if isinstance(module, Affine)]
    assert len(layers) == norms
    assert sum(isinstance(module, SumAndNorm) for module in fused.modules()) == sums
    assert sum(layer.relu for layer in layers) == norms
    assert not any(isinstance(module, nn.BatchNorm2d) for module in fused.modules())
    x = torch.rand(3, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    outcomes = []
    for network in (model, fused):
        image = x.clone().requires_grad_()
        logits = network(image)
        (gradient,) = torch.autograd.grad(logits.cos().sum(), image)
        outcomes.append((logits, gradient))
    for one, other in zip(*outcomes, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4 * float(one.detach().abs().max()))


class Odd(nn.Module):
    """A norm whose result is used twice, one without ReLU, one with a ReLU layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.BatchNorm2d(2) for _ in range(3))
        self.clip = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        shared = self.first(x)
        return F.relu(shared) + shared + self.second(x) * self.clip(self.third(x))


def test_only_a_relu_that_follows_alone_is_taken_in() -> None:
    model = trained_norms(Odd())
    fused = fuse_norms(copy.deepcopy(model))
    assert [layer.relu for layer in fused.modules() if isinstance(layer, Affine)] == [False, False, True]
    x = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(2))
    assert torch.allclose(model(x.clone()), fused(x.clone()), atol=1e-5)


class Branches(nn.Module):
    """A sum with two norms and a third use, a sum with a number, and a sum of shapes that differ."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth = (nn.BatchNorm2d(2) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        total = x * 2 + x.flip(0)
        one = F.relu(self.first(total)) + self.second(total) + total
        return one + self.third(x + 1.0) + self.fourth(x + x.mean((2, 3), keepdim=True))


def test_sums_are_taken_in_once() -> None:
    model = trained_norms(Branches())
    fused = fuse_norms(copy.deepcopy(model))
    assert sum(isinstance(layer, SumAndNorm) for layer in fused.modules()) == 2
    assert sum(isinstance(layer, Affine) for layer in fused.modules()) == 4
    x = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(3))
    found = []
    for network in (model, fused):
        image = x.clone().requires_grad_()
        y = network(image)
        found.append((y.detach(), torch.autograd.grad(y.sin().sum(), image)[0]))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def test_what_cannot_be_traced_stays_as_it_is() -> None:
    class Branching(Odd):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if float(x.sum()) > 0 else -x)

    model = Branching().eval()
    assert fuse_norms(model) is model


def test_a_norm_in_training_or_without_statistics_stays_as_it_is() -> None:
    plain = nn.Sequential(nn.BatchNorm2d(2, track_running_stats=False), nn.ReLU()).eval()
    assert fuse_norms(plain) is plain
    busy = nn.Sequential(nn.BatchNorm2d(2), nn.ReLU()).train()
    assert fuse_norms(busy) is busy


class Plain(nn.Module):
    """A norm with its ReLU, and another that is asked on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other, self.relu = nn.BatchNorm2d(2), nn.BatchNorm2d(2), nn.ReLU()

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        return self.relu((self.norm if other is None else self.other)(x))


def hooked(name: str) -> nn.Module:
    model = Plain()
    if name == "network":
        model.register_forward_pre_hook(lambda _, given: (3 * given[0] - 1,))
    else:
        model.get_submodule(name).register_forward_hook(lambda _, given, y: y.clamp(max=0.5))
    return model


class InPlace(nn.Module):
    """An image that is changed in place where it is read elsewhere as well."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.clip, self.how = nn.BatchNorm2d(2), nn.ReLU(inplace=True), how

    def forward(self, x: Tensor) -> Tensor:
        total = kept = x + x.flip(0)
        if self.how == "layer":
            self.clip(total)
        if self.how == "method":
            total.clamp_(max=0.5)
        if self.how == "function":
            F.relu(total, inplace=True)
        if self.how == "sum":
            total += x
        if self.how == "product":
            total *= x
        return F.relu(self.norm(total)) + kept


ODD = {
    "what else it can be given": Plain,
    "a hook on the network": lambda: hooked("network"),
    "a hook on a norm": lambda: hooked("norm"),
    "a hook on a relu": lambda: hooked("relu"),
    **{f"a {how} in place": partial(InPlace, how) for how in ("layer", "method", "function", "sum", "product")},
}


@pytest.mark.parametrize("name", ODD)
def test_odd_networks_stay_the_same_function(name: str) -> None:
    """Whether they are traced or not."""
    model = trained_norms(ODD[name]())
    fused = fuse_norms(copy.deepcopy(model))
    x = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(4))
    assert torch.allclose(model(x.clone()), fused(x.clone()), atol=1e-5)


def test_a_sum_in_place_of_what_is_read_there_alone_is_fused() -> None:
    class Residual(Plain):
        def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
            out = self.other(x)
            out += x
            return self.relu(self.norm(out))

    model = trained_norms(Residual())
    fused = fuse_norms(copy.deepcopy(model))
    assert sum(isinstance(layer, SumAndNorm) for layer in fused.modules()) == 1
    x = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(5))
    assert torch.allclose(model(x.clone()), fused(x.clone()), atol=1e-5)


@pytest.mark.parametrize("context", ["autocast", "no_grad"])
def test_a_part_in_a_context_of_its_own_keeps_it(context: str) -> None:
    """Such as logits that are worked out in float32, whatever the precision of the rest."""

    class Careful(Plain):
        def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
            z = super().forward(x).mean((2, 3))
            with torch.autocast("cpu", enabled=False) if context == "autocast" else torch.no_grad():
                weights = z.float() @ torch.eye(2)
            return z * weights

    model = trained_norms(Careful())
    fused = fuse_norms(copy.deepcopy(model))
    x = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(6)).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        one, two = model(x), fused(x)
    assert two.dtype == one.dtype
    assert torch.equal(two, one)
    gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (one, two)]
    assert torch.allclose(*gradients)
