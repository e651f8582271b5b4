"""Residual blocks as functions of tensors, against the layers themselves; on a CPU the kernels' slow twins compute."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frozen import trained_norms
from hardsphere import blocks
from hardsphere.blocks import Block, Tail, fuse_blocks, has_blocks, many
from hardsphere.models import build
from hardsphere.norms import fuse_norms
from hardsphere.recipes import VARIANTS
from hardsphere.shadow import Shadow
from hardsphere.sphere import attach


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_IMAGES", 4)


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
        ("preactresnet18-64", ["Block", "Block", "Tail", "Block", "Tail", "Block", "Tail", "Block"]),
        ("wrn-16-10", ["Tail", "Block", "Tail", "Block", "Tail", "Block"]),
        ("wrn-10-4", ["Tail", "Tail", "Tail"]),
        ("wrn-16-1", ["Tail", "Block"]),  # only 64 channels have tiles; 16 and 32 go layer by layer
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
    torch.library.opcheck(blocks._block, (t, a, *weights, *vectors))
    torch.library.opcheck(blocks._tail, (t, a, other, weights[0], *vectors[:3]))


@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("whole", [True, False])
def test_either_result_may_be_used_alone(used: tuple[bool, bool], whole: bool) -> None:
    """The gradient of a block on its own, against the formula in torch's own steps."""
    model = fused(network("preactresnet18-64").double())
    block = next(module for module in model.modules() if type(module) is (Block if whole else Tail))
    channels = (block.first if isinstance(block, Block) else block.conv).in_channels
    z, other = (torch.randn(4, channels, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def step(norm: nn.Module, image: Tensor) -> Tensor:
        scale, shift = norm.get_buffer("scale"), norm.get_buffer("shift")
        return (image * scale[:, None, None] + shift[:, None, None]).relu()

    def by_layers() -> tuple[Tensor, Tensor]:
        if isinstance(block, Block):
            middle = step(block.between, F.conv2d(step(block.before, z), block.first.weight, padding=1))
            total = F.conv2d(middle, block.second.weight, padding=1) + z
        else:
            total = F.conv2d(step(block.before, z), block.conv.weight, padding=1) + other
        return total, step(block.after.norm, total)

    def at_once() -> tuple[Tensor, Tensor]:
        given = (z, step(block.before, z)) if isinstance(block, Block) else (z, other)
        found: tuple[Tensor, Tensor] = block(*given)
        return found

    def gradients(results: tuple[Tensor, Tensor]) -> tuple[Tensor | None, ...]:
        value = sum(result.sin().sum() for result, use in zip(results, used, strict=True) if use)
        return torch.autograd.grad(value, (z, other), allow_unused=True)

    for one, two in zip(gradients(at_once()), gradients(by_layers()), strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            assert two is not None
            assert (one - two).norm() <= 1e-6 * two.norm()


def test_few_images_go_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network("wrn-10-4").double()
    quick = fused(model)
    monkeypatch.setattr(blocks, "_tail", None)
    assert_same(quick, model, images(2))  # of four in a tile
    assert_same(quick, model, images(5))  # of eight in two
    with pytest.raises(TypeError):
        quick(images(6))


def test_a_shadow_with_blocks_follows_its_model() -> None:
    """Weights and statistics change in place; the norms are worked out anew once a step."""
    spec = VARIANTS["he"]
    model = build("wrn-16-4", num_classes=10, mean=[0.5] * 3, std=[0.25] * 3, head=spec, seed=0).train()  # type: ignore[arg-type]
    shadow = Shadow(model, fuse_norms=True, fuse_blocks=True)
    assert kinds(shadow.network) == ["Tail", "Block", "Tail", "Block", "Tail", "Block"]
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
    """A block, and what is none: a stride, a bias, weights in training, a middle used twice, a sum of other things."""

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


def test_images_are_made_many() -> None:
    x = torch.arange(3.0)[:, None]
    assert many(x).flatten().tolist() == [0, 1, 2, 0]
    assert many(many(x)).flatten().tolist() == [0, 1, 2, 0]
