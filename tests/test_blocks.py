"""Residual blocks as functions of tensors, against the layers themselves; on a CPU the kernels' slow twins compute."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frozen import trained_norms
from hardsphere.blocks import functions, fuse_blocks, has_blocks, layers, many
from hardsphere.blocks.layers import Block, Tail
from hardsphere.models import build
from hardsphere.norms import fuse_norms
from hardsphere.recipes import VARIANTS
from hardsphere.shadow import Shadow
from hardsphere.sphere import attach


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "IMAGES", 4)


def network(name: str) -> nn.Module:
    return trained_norms(attach(build(name, num_classes=10, in_channels=3, image_size=8, seed=0)))


def fused(model: nn.Module) -> nn.Module:
    return fuse_blocks(fuse_norms(copy.deepcopy(model)))


def kinds(model: nn.Module) -> list[str]:
    return [type(module).__name__ for module in model.modules() if isinstance(module, Block | Tail)]


def images(count: int = 4, size: int = 8) -> Tensor:
    return torch.rand(count, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def answers(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Of a scalar that weighs all logits differently."""
    image = x.clone().requires_grad_()
    logits = model(image)
    (gradient,) = torch.autograd.grad(logits.cos().sum(), image)
    return logits.detach(), gradient


def assert_same(model: nn.Module, other: nn.Module, x: Tensor) -> None:
    for one, two in zip(answers(model, x), answers(other, x), strict=True):
        assert (one - two).norm() <= 1e-6 * two.norm()  # norms compute in float32


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("preactresnet18-64", 8 * ["Block"]),
        ("wrn-16-10", 6 * ["Block"]),
        ("wrn-10-4", 3 * ["Block"]),
        ("wrn-10-3", ["Tail"]),  # of 48, 96 and 192 channels, only the last have tiles
        ("wrn-16-1", ["Block", "Block"]),  # of 16, 32 and 64
    ],
)
def test_a_network_stays_the_same_function(name: str, expected: list[str]) -> None:
    model = network(name).double()
    quick = fused(model)
    assert kinds(quick) == expected
    assert has_blocks(quick)
    assert_same(quick, model, images())


def test_compiled_it_is_the_same_function() -> None:
    model = network("wrn-16-4").double()
    assert_same(torch.compile(fused(model), backend="aot_eager", dynamic=False), model, images())  # type: ignore[arg-type]


def test_the_functions_keep_torchs_rules() -> None:
    """Shapes, strides and gradients as torch's own check of operators wants them."""
    t, other = (torch.randn(4, 64, 4, 4).contiguous(memory_format=torch.channels_last) for _ in range(2))
    weights = [torch.randn(64, 64, 3, 3).contiguous(memory_format=torch.channels_last) / 24 for _ in range(2)]
    vectors = [torch.rand(64) + 0.5 for _ in range(5)]
    t.requires_grad_()
    other.requires_grad_()
    a = (t * vectors[0][:, None, None]).relu().detach()
    narrow = torch.randn(64, 64, 1, 1) / 8
    torch.library.opcheck(functions.block, (t, a, *weights, None, 1, *vectors))
    torch.library.opcheck(functions.block, (t, a, *weights, narrow, 2, *vectors))
    torch.library.opcheck(functions.tail, (t, a, other, weights[0], *vectors[:3]))


class RawShortcut(nn.Module):
    """A block of another kind: its shortcut is of the image itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels) for channels in (64, 128, 128)])
        self.first = nn.Conv2d(64, 128, 3, 2, 1, bias=False)
        self.second = nn.Conv2d(128, 128, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(64, 128, 1, 2, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        b = F.relu(self.norms[1](self.first(F.relu(self.norms[0](x)))))
        total = self.second(b) + self.shortcut(x)
        return total, F.relu(self.norms[2](total))


class Ends(nn.Module):
    """A block that ends in a sum and its norm, with both handed out."""

    def __init__(self, stride: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels) for channels in (inputs, outputs, outputs)])
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 or inputs != outputs else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a = F.relu(self.norms[0](x))
        b = F.relu(self.norms[1](self.first(a)))
        total = self.second(b) + (x if self.shortcut is None else self.shortcut(a))
        return total, F.relu(self.norms[2](total))


SINGLE = {
    "the same shape": (lambda: Ends(1, 64, 64), "Block"),
    "more channels": (lambda: Ends(1, 16, 64), "Block"),
    "a stride": (lambda: Ends(2, 64, 128), "Block"),
    "a raw shortcut": (RawShortcut, "Tail"),
}


@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("size", [(4, 6), (5, 7), (1, 2)])
def test_a_block_alone(name: str, used: tuple[bool, bool], size: tuple[int, int]) -> None:
    """Whatever is used of what it hands on, and for images of even and odd size."""
    torch.manual_seed(0)
    make, kind = SINGLE[name]
    model = trained_norms(make()).double()
    quick = fused(model)
    assert kinds(quick) == [kind]
    x = torch.randn(4, model.get_submodule("first").in_channels, *size, dtype=torch.float64, requires_grad=True)

    def gradient(network: nn.Module) -> Tensor:
        value = sum(result.sin().sum() for result, use in zip(network(x), used, strict=True) if use)
        return torch.autograd.grad(value, x)[0]

    for one, two in zip((*quick(x), gradient(quick)), (*model(x), gradient(model)), strict=True):
        assert (one - two).norm() <= 1e-6 * two.norm()


def test_few_images_go_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network("wrn-10-4").double()
    quick = fused(model)
    monkeypatch.setattr(layers, "block", None)
    assert_same(quick, model, images(2))  # of four in a tile
    assert_same(quick, model, images(5))  # of eight in two
    with pytest.raises(TypeError):
        quick(images(6))


def test_a_shadow_with_blocks_follows_its_model() -> None:
    """Weights and statistics change in place; the norms are worked out anew once a step."""
    spec = VARIANTS["he"]
    model = build("wrn-16-4", num_classes=10, mean=[0.5] * 3, std=[0.25] * 3, head=spec, seed=0).train()  # type: ignore[arg-type]
    shadow = Shadow(model, fuse_norms=True, fuse_blocks=True)
    assert kinds(shadow.network) == 6 * ["Block"]
    with torch.autocast("cpu", torch.bfloat16):
        before = shadow.network(images().float())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model(images(8).float()), torch.arange(8)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    with torch.autocast("cpu", torch.bfloat16):
        after = shadow.refresh()(images().float())
        expected = model.eval()(images().float())
    assert (after - expected).norm() <= 0.05 * expected.norm()
    assert (before - expected).norm() >= 0.2 * expected.norm()


class Unlike(nn.Module):
    """A block, and what is none: a bias, weights in training, a middle used twice, a sum of other things."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change
        self.norms = nn.ModuleList([nn.BatchNorm2d(64) for _ in range(3)])
        stride, dilation = (2 if change == "stride" else 1), (2 if change == "dilation" else 1)
        self.second = nn.Conv2d(64, 64, 3, stride, dilation, dilation, bias=change == "bias")
        self.first = nn.Conv2d(64, 64, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a = self.norms[0](x)
        a = a if self.change == "no relu" else F.relu(a)
        b = F.relu(self.norms[1](self.first(a)))
        other = x[:, :, ::2, ::2] if self.change == "stride" else x
        total = self.second(b) + (a if self.change == "another sum" else other)
        end = F.relu(self.norms[2](total))
        return end + b if self.change == "used twice" else end + total


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("none", ["Block"]),
        ("stride", []),
        ("dilation", []),
        ("bias", []),
        ("used twice", []),
        ("no relu", ["Tail"]),
        ("another sum", ["Tail"]),
        ("in training", []),
    ],
)
def test_only_blocks_are_taken_for_blocks(change: str, expected: list[str]) -> None:
    torch.manual_seed(0)
    model = trained_norms(Unlike(change)).double()
    if change == "in training":
        model.get_submodule("second").requires_grad_(True)
    quick = fused(model)
    assert kinds(quick) == expected
    x = torch.randn(4, 64, 6, 6, dtype=torch.float64)
    assert_same(quick, model, x)


def weighted() -> nn.Module:
    """Convolutions that are given their weights anew each time they are asked."""
    model = Ends(1, 64, 64)
    for conv in (model.first, model.second):
        weight = conv.weight.detach()
        del conv.weight
        conv.direction = nn.Parameter(weight)
        conv.weight = weight  # as it was when it was last asked
        conv.register_forward_pre_hook(lambda conv, _: setattr(conv, "weight", conv.direction * 0.5))
    return model


def broadcasting() -> nn.Module:
    """A shortcut of one channel, which the sum adds to all."""
    model = Ends(2, 64, 128)
    model.shortcut = nn.Conv2d(64, 1, 1, 2, bias=False)
    return model


@pytest.mark.parametrize(("make", "expected"), [(weighted, []), (broadcasting, ["Tail"])])
def test_odd_convolutions_stay_the_same_function(make: Callable[[], nn.Module], expected: list[str]) -> None:
    torch.manual_seed(0)
    model = trained_norms(make()).double()
    quick = fused(model)
    assert kinds(quick) == expected
    x = torch.randn(4, 64, 6, 6, dtype=torch.float64)
    assert_same(nn.Sequential(quick, Sum()), nn.Sequential(model, Sum()), x)


class Sum(nn.Module):
    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return both[0] + both[1]


class Uneven(nn.Module):
    """The second halves of blocks whose convolution gives other channels than it takes, or whose sum broadcasts."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels) for channels in (64, outputs)])
        self.second = nn.Conv2d(64, outputs, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        total = self.second(F.relu(self.norms[0](x))) + x.mean((1, 2, 3), keepdim=True)
        return total + F.relu(self.norms[1](total))


@pytest.mark.parametrize("outputs", [64, 72, 128])
def test_uneven_halves_stay_the_same_function(outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels add no images of other shapes, so they are not asked."""
    monkeypatch.setattr(layers, "tail", None)
    torch.manual_seed(0)
    model = trained_norms(Uneven(outputs)).double()
    quick = fused(model)
    assert kinds(quick) == (["Tail"] if outputs == 64 else [])
    x = torch.randn(4, 64, 5, 6, dtype=torch.float64)
    assert_same(quick, model, x)
    assert_same(torch.compile(quick, backend="aot_eager", dynamic=False), model, x)  # type: ignore[arg-type]


def test_images_are_made_many() -> None:
    x = torch.arange(3.0)[:, None]
    assert many(x).flatten().tolist() == [0, 1, 2, 0]
    assert many(many(x)).flatten().tolist() == [0, 1, 2, 0]
