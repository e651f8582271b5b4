"""The convolutions with fused surroundings, on a GPU that has them: `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hardsphere.blocks import compile_kernels, has_blocks
from hardsphere.evaluate.crafting import HalfPrecision
from hardsphere.models import build
from hardsphere.runtime import exact_float32, has_convolutions
from hardsphere.shadow import departure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and not has_convolutions(torch.zeros(1, device="cuda")),
        reason="needs a Hopper GPU",
    ),
]

# (images, inputs, outputs, height, width, stride): those of the usual networks, and odd ones.
SHAPES = [
    (128, 160, 160, 32, 32, 1),
    (128, 320, 320, 16, 16, 1),
    (128, 640, 640, 8, 8, 1),
    (128, 16, 160, 32, 32, 1),
    (128, 160, 320, 32, 32, 2),
    (128, 64, 64, 32, 32, 1),
    (128, 128, 128, 16, 16, 1),
    (128, 256, 256, 8, 8, 1),
    (128, 512, 512, 4, 4, 1),
    (128, 64, 128, 32, 32, 2),
    (128, 256, 512, 8, 8, 2),
    (300, 64, 128, 5, 7, 2),
    (96, 320, 64, 3, 1, 1),
    (512, 512, 512, 4, 4, 1),
]


def image(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    numbers = torch.randn(shape, device="cuda", generator=generator).bfloat16()
    return numbers.contiguous(memory_format=torch.channels_last)


def close(value: Tensor, expected: Tensor) -> bool:
    """Up to the rounding of the result to bf16, and of the sum that it may be made of."""
    return bool((value.double() - expected).norm() <= 2**-8 * expected.norm())


@pytest.mark.parametrize("add", ["nothing", "other", "point"])
@pytest.mark.parametrize("shape", SHAPES)
def test_forwards_and_backwards_against_float64(shape: tuple[int, ...], add: str) -> None:
    """The first images and the last, and the same bits every time: a race would show in some of the runs."""
    from hardsphere.kernels import convolve, convolve_back

    count, inputs, outputs, height, width, stride = shape
    before, after = (count, inputs, height, width), (count, outputs, -(-height // stride), -(-width // stride))
    y, gradient = image(*before, seed=0).relu(), image(*after, seed=1)
    weight = image(outputs, inputs, 3, 3, seed=2) / (3 * inputs**0.5)
    narrow = image(outputs, inputs, 1, 1, seed=3) / inputs**0.5
    scale, shift = torch.rand(max(shape), device="cuda") + 0.5, torch.randn(max(shape), device="cuda")
    other, more = (image(*after, seed=4), image(*before, seed=5)) if add == "other" else (None, None)
    ends = [0, 1, count - 1]
    exact = y[ends].double().requires_grad_()
    expected = F.conv2d(exact, weight.double(), stride=stride, padding=1)
    if add == "point":
        expected = expected + F.conv2d(exact, narrow.double(), stride=stride)
    (by_y,) = torch.autograd.grad(expected, exact, gradient[ends].double())
    expected = expected.detach() if other is None else expected.detach() + other[ends].double()

    def run() -> tuple[Tensor, Tensor, Tensor]:
        points = ((y, narrow, stride), (gradient, narrow, stride)) if add == "point" else (None, None)
        total, out = convolve(y, weight, scale[:outputs], shift[:outputs], stride, other, points[0])
        return total, out, convolve_back(gradient, weight, scale[:inputs], y, stride, more, points[1])

    total, out, back = run()
    if add != "nothing":
        assert close(total[ends], expected)
    factor, offset = (vector.double()[:outputs, None, None] for vector in (scale, shift))
    assert close(out[ends], (expected * factor + offset).relu())
    by_z = torch.where(y[ends] > 0, by_y * scale.double()[:inputs, None, None], 0)
    assert close(back[ends], by_z if more is None else by_z + more[ends].double())
    for _ in range(60):
        assert all(torch.equal(one, two) for one, two in zip(run(), (total, out, back), strict=True))


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
        least = model(x).argmin(1).detach()
        assert departure(fused, model, x) <= 1.2 * departure(single, model, x)
        for network in (model, single, fused):
            inside = x.clone().requires_grad_()
            loss = F.cross_entropy(network(inside), least, reduction="sum")
            found.append(torch.autograd.grad(loss, inside)[0])
    exact, by_layers, by_blocks = found
    assert (by_blocks - exact).norm() <= 1.2 * (by_layers - exact).norm()
    assert (by_layers - exact).norm() <= 0.5 * exact.norm()


def test_all_kernels_of_a_network_are_compiled_ahead() -> None:
    from hardsphere.kernels import convolution

    network = HalfPrecision(build("wrn-10-4", num_classes=10, image_size=32, seed=0).cuda(), blocks=True)
    x = torch.rand(128, 3, 32, 32, device="cuda").requires_grad_()
    compile_kernels(network, x)
    (cache,) = (cache[0] for cache in convolution._convolution.device_caches.values())
    before = len(cache)
    torch.autograd.grad(network(x).sum(), x)
    assert 0 < before == len(cache)


def test_a_batch_that_would_leave_the_tiles_empty_goes_layer_by_layer() -> None:
    model = build("preactresnet18", num_classes=10, image_size=8, seed=0).cuda()
    fused, single = HalfPrecision(model, blocks=True), HalfPrecision(model)
    few = torch.rand(20, 3, 8, 8, device="cuda")
    assert torch.equal(fused(few), single(few))
