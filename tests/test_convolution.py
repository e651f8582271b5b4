"""The convolutions with fused surroundings, computed step by step by Triton's interpreter: no GPU is needed.

What a GPU makes of them is another matter, and another file's. Half precision is float16 here: the interpreter knows no
arithmetic in bf16.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import interpreted
from hardsphere import blocks

pytestmark = pytest.mark.check

# (images, inputs, outputs, height, width): channels with and without a rest in each role, more images than a tile
# holds, images of one row, of one column and of one pixel.
SHAPES = [
    (2, 96, 128, 3, 5),
    (130, 32, 64, 4, 4),
    (3, 160, 160, 2, 3),
    (3, 64, 320, 1, 2),
    (5, 64, 64, 1, 1),
    (5, 128, 64, 4, 1),
]
CASES = list(itertools.product(SHAPES, [False, True]))


def image(*shape: int, seed: int) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()
    return numbers.contiguous(memory_format=torch.channels_last)


def factors(channels: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(channels)
    return torch.rand(channels, generator=generator) + 0.5, torch.randn(channels, generator=generator)


def forwards(shape: tuple[int, ...], add: bool) -> tuple[Tensor | None, ...]:
    """x, weight, scale, shift and another image."""
    count, inputs, outputs, height, width = shape
    weight = image(outputs, inputs, 3, 3, seed=1) / (3 * inputs**0.5)
    other = image(count, outputs, height, width, seed=2) if add else None
    return image(count, inputs, height, width, seed=0), weight, *factors(outputs), other


def backwards(shape: tuple[int, ...], add: bool) -> tuple[Tensor | None, ...]:
    """The gradient by the result, weight, scale, y and another gradient; inputs are what the convolution gave."""
    count, inputs, outputs, height, width = shape
    weight = image(inputs, outputs, 3, 3, seed=1) / (3 * inputs**0.5)
    scale, shift = factors(outputs)
    y = norm(image(count, outputs, height, width, seed=3).double(), scale, shift).half()
    other = image(count, outputs, height, width, seed=2) if add else None
    return image(count, inputs, height, width, seed=0), weight, scale, y, other


def norm(z: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return (z * scale.double()[:, None, None] + shift.double()[:, None, None]).relu()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[tuple[tuple[int, ...], bool], list[Tensor]]]:
    """What the kernels give in all cases."""
    pytest.importorskip("triton", minversion="3.9", reason="older interpreters do not know today's NumPy")
    given, results = (tmp_path_factory.mktemp("interpreted") / name for name in ("given.pt", "found.pt"))
    torch.save(
        {"forwards": [forwards(*case) for case in CASES], "backwards": [backwards(*case) for case in CASES]}, given
    )
    command = [sys.executable, str(Path(interpreted.__file__)), str(given), str(results)]
    subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, check=True, timeout=200)
    return {key: dict(zip(CASES, some, strict=True)) for key, some in torch.load(results, weights_only=True).items()}


def close(value: Tensor, expected: Tensor) -> bool:
    """Up to the rounding of the result to float16."""
    return bool((value.double() - expected).norm() <= 2**-11 * expected.norm())


@pytest.mark.parametrize(("shape", "add"), CASES)
def test_forwards(found: dict[str, dict[object, list[Tensor]]], shape: tuple[int, ...], add: bool) -> None:
    x, weight, scale, shift, other = forwards(shape, add)
    assert x is not None
    assert weight is not None
    assert scale is not None
    assert shift is not None
    total, y = found["forwards"][shape, add]
    expected = F.conv2d(x.double(), weight.double(), padding=1)
    if other is not None:
        assert close(total, expected + other)
        expected = total.double()  # the norm is of the rounded sum
    assert close(y, norm(expected, scale, shift))


@pytest.mark.parametrize(("shape", "add"), CASES)
def test_backwards(found: dict[str, dict[object, Tensor]], shape: tuple[int, ...], add: bool) -> None:
    """Against torch's own gradient of norm, ReLU and convolution."""
    gradient, weight, scale, _, other = backwards(shape, add)
    assert gradient is not None
    assert weight is not None
    assert scale is not None
    count, _, outputs, height, width = shape
    z = image(count, outputs, height, width, seed=3).double().requires_grad_()
    result = F.conv2d(norm(z, *factors(outputs)), weight.double(), padding=1)
    (expected,) = torch.autograd.grad(result, z, gradient.double())
    assert close(found["backwards"][shape, add], expected if other is None else expected + other)


def test_blocks_know_the_tiles() -> None:
    pytest.importorskip("triton")
    from hardsphere.kernels import convolution

    assert convolution.IMAGES == blocks._IMAGES
    for width in blocks._WIDTHS:
        assert any(width % sum(tile) == 0 for tile in convolution.TILES)
