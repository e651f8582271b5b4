"""The convolutions with fused surroundings, computed step by step by Triton's interpreter: no GPU is needed.

What a GPU makes of them is another matter, and another file's. Half precision is float16 here: the interpreter knows no
arithmetic in bf16.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hardsphere.blocks import finding, layers

pytestmark = pytest.mark.check

# (images, inputs, outputs, height, width): channels with and without a rest in each role, more images than a tile
# holds, images of one row, of one column and of one pixel, of even and of odd size.
SHAPES = [
    (2, 96, 128, 3, 5),
    (130, 32, 64, 4, 4),
    (3, 160, 160, 2, 3),
    (3, 64, 320, 1, 2),
    (5, 16, 64, 1, 1),
    (5, 128, 64, 4, 1),
]
CASES = list(itertools.product(SHAPES, [1, 2], ["nothing", "other", "point"]))
Case = tuple[tuple[int, ...], int, str]


def image(*shape: int, seed: int) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()
    return numbers.contiguous(memory_format=torch.channels_last)


def factors(channels: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(channels)
    return torch.rand(channels, generator=generator) + 0.5, torch.randn(channels, generator=generator)


def forwards(shape: tuple[int, ...], stride: int, add: str) -> tuple[Any, ...]:
    """x, weight, scale, shift, stride, another image, and a point that is added."""
    count, inputs, outputs, height, width = shape
    weight = image(outputs, inputs, 3, 3, seed=1) / (3 * inputs**0.5)
    down = (count, outputs, (height - 1) // stride + 1, (width - 1) // stride + 1)
    other = image(*down, seed=2) if add == "other" else None
    point = (image(count, 80, height, width, seed=3), image(outputs, 80, 1, 1, seed=4) / 9, stride)
    x = image(count, inputs, height, width, seed=0)
    return x, weight, *factors(outputs), stride, other, point if add == "point" else None


def backwards(shape: tuple[int, ...], stride: int, add: str) -> tuple[Any, ...]:
    """The gradient by the result, weight, scale, y, stride, another gradient, and a point; inputs are the results'."""
    count, inputs, outputs, height, width = shape
    weight = image(inputs, outputs, 3, 3, seed=1) / (3 * inputs**0.5)
    scale, shift = factors(outputs)
    y = norm(image(count, outputs, height, width, seed=3).double(), scale, shift).half()
    other = image(count, outputs, height, width, seed=2) if add == "other" else None
    down = (count, inputs, (height - 1) // stride + 1, (width - 1) // stride + 1)
    point = (image(*down, seed=5), image(inputs, outputs, 1, 1, seed=4) / inputs**0.5, stride)
    return image(*down, seed=0), weight, scale, y, stride, other, point if add == "point" else None


def norm(z: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return (z * scale.double()[:, None, None] + shift.double()[:, None, None]).relu()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[Case, Any]]:
    """What the kernels give in all cases."""
    pytest.importorskip("triton", minversion="3.9", reason="older interpreters do not know today's NumPy")
    given, results = (tmp_path_factory.mktemp("interpreted") / name for name in ("given.pt", "found.pt"))
    cases = {"forwards": [forwards(*case) for case in CASES], "backwards": [backwards(*case) for case in CASES]}
    torch.save(cases, given)
    command = [sys.executable, str(Path(__file__).with_name("interpreted.py")), str(given), str(results)]
    subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, check=True, timeout=200)
    return {key: dict(zip(CASES, some, strict=True)) for key, some in torch.load(results, weights_only=True).items()}


def close(value: Tensor, expected: Tensor) -> bool:
    """Up to the rounding of the result to float16."""
    return bool((value.double() - expected).norm() <= 2**-11 * expected.norm())


@pytest.mark.parametrize(("shape", "stride", "add"), CASES)
def test_forwards(found: dict[str, dict[Case, Any]], shape: tuple[int, ...], stride: int, add: str) -> None:
    x, weight, scale, shift, _, other, point = forwards(shape, stride, add)
    total, y = found["forwards"][shape, stride, add]
    expected = F.conv2d(x.double(), weight.double(), stride=stride, padding=1)
    if add != "nothing":
        more = other if point is None else F.conv2d(point[0].double(), point[1].double(), stride=stride)
        assert close(total, expected + more)
        expected = total.double()  # the norm is of the rounded sum
    assert close(y, norm(expected, scale, shift))


@pytest.mark.parametrize(("shape", "stride", "add"), CASES)
def test_backwards(found: dict[str, dict[Case, Any]], shape: tuple[int, ...], stride: int, add: str) -> None:
    """Against torch's own gradient of norm, ReLU and convolutions."""
    gradient, weight, _, _, _, other, point = backwards(shape, stride, add)
    count, _, outputs, height, width = shape
    z = image(count, outputs, height, width, seed=3).double().requires_grad_()
    y = norm(z, *factors(outputs))
    value = (F.conv2d(y, weight.double(), stride=stride, padding=1) * gradient).sum()
    if point is not None:
        value = value + (F.conv2d(y, point[1].double(), stride=stride) * point[0]).sum()
    (expected,) = torch.autograd.grad(value, z)
    assert close(found["backwards"][shape, stride, add][0], expected if other is None else expected + other)


def test_blocks_know_the_tiles() -> None:
    pytest.importorskip("triton")
    from hardsphere.kernels import convolution

    assert convolution.IMAGES == layers.IMAGES
    for width in (*finding.WIDTHS, *finding.NARROW):
        assert any(width % sum(tile) == 0 for tile in convolution.TILES)


class Hopper:
    """What Triton asks of a driver before it compiles; there is no GPU behind it."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], list[Any]]]:
    """Compiles for a Hopper GPU; tells which kernels there are by now."""
    pytest.importorskip("triton")
    from triton.runtime.driver import driver

    from hardsphere.kernels import convolution

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", Hopper())
    caches = convolution._convolution.device_caches
    caches.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Triton has words about its next version
        yield lambda: [kernel for cache in caches.values() for kernel in cache[0].values()]
    caches.clear()


def test_kernels_are_compiled_together(compiled: Callable[[], list[Any]]) -> None:
    """Asked for twice, compiled once; nothing is launched, which could not be done here."""
    from hardsphere.kernels import compiled_together, convolution

    with compiled_together():
        for add in ("nothing", "other", "other"):
            convolution.convolve(*bf16(forwards(SHAPES[1], 1, add)))
            convolution.convolve_back(*bf16(backwards(SHAPES[1], 1, add)))
        assert not compiled()
    assert len(compiled()) == 4
    assert all(".target sm_90a" in kernel.asm["ptx"] for kernel in compiled())
    assert convolution._awaited is None


def test_what_cannot_be_compiled_is_said(compiled: Callable[[], list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    from hardsphere.kernels import compiled_together, convolution

    monkeypatch.setattr(convolution, "_WARPS", 3)
    with pytest.raises(Exception, match="num_warps"), compiled_together():
        convolution.convolve(*bf16(forwards(SHAPES[1], 1, "nothing")))
    assert convolution._awaited is None


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("add", ["nothing", "other", "point"])
@pytest.mark.parametrize(("inputs", "outputs"), [(160, 160), (128, 256), (16, 64)])
def test_no_factor_travels_through_registers(
    monkeypatch: pytest.MonkeyPatch, inputs: int, outputs: int, add: str, stride: int
) -> None:
    """Compiled for a Hopper GPU, which takes none. Registers would be overwritten while a product still reads them."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compiled

    from hardsphere.kernels import convolution

    kernel = convolution._convolution
    launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *given, **settings: launches.append((given, settings))

    monkeypatch.setattr(convolution, "_convolution", Recorder())
    shape = (2, inputs, outputs, 4, 4)
    convolution.convolve(*bf16(forwards(shape, stride, add)))
    convolution.convolve_back(*bf16(backwards(shape, stride, add)))
    for given, settings in launches:
        options = {name: settings.pop(name) for name in ("num_warps", "num_stages")}
        types = [_type(value) for value in given] + ["constexpr"] * len(settings)
        source = ASTSource(kernel, dict(zip(kernel.arg_names, types, strict=True)), settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Triton has words about its next version
            code = compiled(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ttgir"]
        left = re.findall(r"ttng\.warp_group_dot %[^\n]* : ([^\n]*?) \* ", code)
        assert left
        assert all(factor.startswith("!ttg.memdesc<") for factor in left)
    assert len(launches) == 2


def bf16(given: tuple[Any, ...]) -> list[Any]:
    """The same with images and weights as they are in training."""
    kept = [value.bfloat16() if isinstance(value, Tensor) and value.dtype == torch.half else value for value in given]
    return [tuple(bf16(value)) if isinstance(value, tuple) else value for value in kept]


def _type(value: Any) -> str:
    """As Triton writes it."""
    if isinstance(value, Tensor):
        return "*fp32"
    return "i32" if isinstance(value, int) else f"tensordesc<bf16[{', '.join(map(str, value.block_shape))}]>"
