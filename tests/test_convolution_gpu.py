"""The convolutions with fused surroundings, on a GPU that has them: `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hardsphere.blocks import has_blocks
from hardsphere.evaluate.crafting import HalfPrecision
from hardsphere.models import build
from hardsphere.runtime import exact_float32, has_convolutions
from hardsphere.shadow import departure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not has_convolutions(torch.zeros(1, device="cuda")),
        reason="needs a Hopper GPU",
    ),
]

# (images, channels, height, width): those of the usual networks, and odd ones.
SHAPES = [
    (128, 160, 32, 32),
    (128, 320, 16, 16),
    (128, 640, 8, 8),
    (128, 64, 32, 32),
    (128, 128, 16, 16),
    (128, 256, 8, 8),
    (128, 512, 4, 4),
    (300, 64, 5, 7),
    (96, 320, 3, 1),
    (512, 512, 4, 4),
]


def image(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    numbers = torch.randn(shape, device="cuda", generator=generator).bfloat16()
    return numbers.contiguous(memory_format=torch.channels_last)


def close(value: Tensor, expected: Tensor) -> bool:
    """Up to the rounding of the result to bf16, and of the sum that it may be made of."""
    return bool((value.double() - expected).norm() <= 2**-8 * expected.norm())


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_forwards_and_backwards_against_float64(shape: tuple[int, ...], add: bool) -> None:
    """The first images, the last ones, and the same bits every time: a race would show in some of the runs."""
    from hardsphere.kernels import convolve, convolve_back

    count, channels = shape[:2]
    x, other, y = image(*shape, seed=0), image(*shape, seed=1), image(*shape, seed=2).relu()
    weight = image(channels, channels, 3, 3, seed=3) / (3 * channels**0.5)
    scale, shift = torch.rand(channels, device="cuda") + 0.5, torch.randn(channels, device="cuda")
    factor, offset = scale.double()[:, None, None], shift.double()[:, None, None]
    ends = [0, 1, count - 1]
    more = other[ends].double() if add else 0.0
    total, out = convolve(x, weight, scale, shift, other if add else None)
    expected = F.conv2d(x[ends].double(), weight.double(), padding=1) + more
    if add:
        assert close(total[ends], expected)
    assert close(out[ends], (expected * factor + offset).relu())
    back = convolve_back(x, weight, scale, y, other if add else None)
    expected = F.conv_transpose2d(x[ends].double(), weight.double(), padding=1)
    assert close(back[ends], torch.where(y[ends] > 0, expected * factor, 0) + more)
    for _ in range(100):
        again = convolve(x, weight, scale, shift, other if add else None)
        assert torch.equal(again[1], out)
        assert torch.equal(again[0], total if add else out)
        assert torch.equal(convolve_back(x, weight, scale, y, other if add else None), back)


@pytest.mark.parametrize("name", ["preactresnet18", "wrn-16-10"])
def test_fused_blocks_answer_like_single_layers(name: str) -> None:
    """In half precision they lie no further from float32 than the layers one by one, and point where they point."""
    torch.manual_seed(0)
    model = build(name, num_classes=10, image_size=32, seed=0).cuda().to(memory_format=torch.channels_last)
    x = torch.rand(128, 3, 32, 32, device="cuda")
    model.train()
    for _ in range(5):  # so that no norm is the identity
        model(x)
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0.0, 0.3)
    fused, single = HalfPrecision(model, blocks=True), HalfPrecision(model)
    assert has_blocks(fused)
    assert not has_blocks(single)
    found = []
    with exact_float32():
        assert departure(fused, model, x) <= 1.2 * departure(single, model, x)
        for network in (model, single, fused):
            inside = x.clone().requires_grad_()
            logits = network(inside)
            found.append(torch.autograd.grad(F.cross_entropy(logits, logits.argmin(1), reduction="sum"), inside)[0])
    exact, by_layers, by_blocks = found
    assert (by_blocks - exact).norm() <= 1.2 * (by_layers - exact).norm()
    assert (by_layers - exact).norm() <= 0.5 * exact.norm()


def test_a_batch_that_would_leave_the_tiles_empty_goes_layer_by_layer() -> None:
    model = build("preactresnet18", num_classes=10, image_size=8, seed=0).cuda()
    fused, single = HalfPrecision(model, blocks=True), HalfPrecision(model)
    few = torch.rand(20, 3, 8, 8, device="cuda")
    assert torch.equal(fused(few), single(few))
