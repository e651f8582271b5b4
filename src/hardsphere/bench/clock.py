"""Time, arithmetic and memory on a device."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch


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
    """FLOP/s of a large matrix product, the most that a network can hope for: bf16 on a GPU, float32 on a CPU."""
    gpu = device.type == "cuda"
    side, repeats, dtype = (8192, 50, torch.bfloat16) if gpu else (1024, 3, torch.float32)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    left @ right
    best = min(seconds(lambda: [left @ right for _ in range(repeats)], device) for _ in range(3))
    return 2 * side**3 * repeats / best


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
