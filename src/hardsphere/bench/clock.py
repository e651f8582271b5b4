"""Time, arithmetic and memory on a device."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """How long some work takes, the device's part included."""
    wait(device)
    started = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - started


def wait(device: torch.device) -> None:
    """Let the device finish what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gemm_rate(device: torch.device) -> float:
    """FLOP/s of a large matrix product, the most that a network can hope for: bf16 on a GPU, float32 on a CPU.

    A CPU is held to the fastest of three, since networks use them all: its library of convolutions may be faster than
    that of its matrices, and does a 3x3 convolution with fewer multiplications than are counted.
    """
    if device.type == "cuda":
        left, right = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
        return 2 * 8192**3 / _quickest(lambda: left @ right, 50, device)
    side, width, height = 1024, 512, 16
    left, right = torch.randn(side, side), torch.randn(side, side)
    point, image = left[:, :, None, None], right.view(1, side, -1, 32)
    box, photo = torch.randn(width, width, 3, 3), torch.randn(1, width, height, height)
    products: list[tuple[int, Callable[[], object]]] = [
        (side**3, lambda: left @ right),
        (side**3, lambda: F.conv2d(image, point)),
        (9 * width**2 * height**2, lambda: F.conv2d(photo, box, padding=1)),
    ]
    return max(2 * size / _quickest(product, 5, device) for size, product in products)


def _quickest(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    work()
    return min(seconds(lambda: [work() for _ in range(repeats)], device) for _ in range(3)) / repeats


def forget_memory(device: torch.device) -> None:
    """Give back what nobody holds any more, and begin to watch the peak anew."""
    gc.collect()
    if device.type == "cuda":
        torch.zeros(1, device=device)  # a device that was never used has no memory to watch
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> float | None:
    """The most that was held at once since `forget_memory`, in GiB; a CPU does not tell."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
