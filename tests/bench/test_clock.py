"""The rate of matrix products, against which steps are held."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hardsphere.bench import clock

CPU = torch.device("cpu")
PRODUCT = 2 * 1024**3  # operations
BOX = 2 * 9 * 512**2 * 16**2


class Napping:
    """Matrices that any library multiplies in no time but that of a nap; so are convolutions, 1x1 or with a padding."""

    def __init__(self, nap: float, padded: float = 1.0) -> None:
        self.nap, self.padded = nap, padded

    def __call__(self, *given: Any, padding: int = 0) -> None:
        time.sleep(self.padded if padding else self.nap)

    def __matmul__(self, other: object) -> None:
        self()

    def view(self, *shape: int) -> None: ...

    def __getitem__(self, places: object) -> None: ...


@pytest.mark.parametrize(
    ("matrices", "convolution", "box", "work"),
    [(0.002, 0.02, 0.02, PRODUCT), (0.02, 0.002, 0.02, PRODUCT), (0.02, 0.02, 0.002, BOX)],
)
def test_a_cpu_is_held_to_the_fastest_of_its_products(
    matrices: float, convolution: float, box: float, work: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On some processors one is twice as fast as the other, and a step faster than the slower one's best."""
    monkeypatch.setattr(torch, "randn", lambda *size, **more: Napping(matrices))
    monkeypatch.setattr(clock.F, "conv2d", Napping(convolution, box))
    rate = clock.gemm_rate(CPU)
    assert work / 0.004 < rate <= work / 0.002


def test_the_convolutions_are_as_much_work_as_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[torch.Tensor, ...]] = []
    work: list[int] = []
    conv2d = clock.F.conv2d

    def watched(*given: torch.Tensor, **more: int) -> None:
        with FlopCounterMode(display=False) as counter:
            seen.append((*given, conv2d(*given, **more)))
        work.append(counter.get_total_flops())

    monkeypatch.setattr(clock.F, "conv2d", watched)
    assert clock.gemm_rate(CPU) > 0
    assert set(work) == {PRODUCT, BOX}
    image, weight, result = seen[0]
    product = weight.flatten(1).double() @ image.flatten(2)[0].double()
    torch.testing.assert_close(result.flatten(2)[0].double(), product, rtol=1e-3, atol=1e-3)
