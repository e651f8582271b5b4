"""Where a run happens: the device, its precision, and what must be written down about them."""

from __future__ import annotations

import hashlib
import os
import platform
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hardsphere
from hardsphere.errors import HardsphereError


def pick_device(name: str | None = None) -> torch.device:
    """The device of that name; a GPU if there is one and none is named."""
    if name is None or name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device: torch.device | None = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise HardsphereError(f"Unknown device '{name}': use cpu, cuda or cuda:0.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise HardsphereError("No CUDA device can be used here: leave --device away to use the CPU.")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise HardsphereError(f"There is no device '{name}' here: the last one is cuda:{count - 1}.")
    return device


def autocast(precision: str, device: torch.device) -> Any:
    """The context of the network's passes: bf16 on a GPU unless float32 is asked for. Heads and losses stay float32."""
    bf16 = precision == "bf16" or (precision == "auto" and device.type == "cuda")
    # Without the cache of cast weights: a recorded graph would go on using the weights of the day it was recorded.
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False) if bf16 else nullcontext()


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    try:
        matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    except RuntimeError:  # torch does not tell one of its two settings once the other was used
        raise HardsphereError(
            "TF32 was set by fp32_precision, so that torch hides whether it is on: set it by "
            "torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32 instead."
        ) from None
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn


def exact_float32() -> AbstractContextManager[None]:
    """TF32 off: wherever an answer is counted, float32 means float32."""
    return _tf32(False)


def tf32() -> AbstractContextManager[None]:
    """TF32 on: float32 with a mantissa of ten bits, for what will be looked at again in `exact_float32`."""
    return _tf32(True)


@contextmanager
def _cudnn(deterministic: bool, benchmark: bool) -> Iterator[None]:
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = deterministic, benchmark
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before


def without_kernel_search() -> AbstractContextManager[None]:
    """No search for the fastest convolution: where batches shrink from step to step it would start anew each time."""
    return _cudnn(torch.backends.cudnn.deterministic, False)


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Run on a side stream of a GPU, as the recording of a graph does: what is set up lazily is set up there."""
    with torch.cuda.device(device):
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            yield
        torch.cuda.current_stream().wait_stream(side)


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, device: torch.device) -> Iterator[None]:
    """Record what happens on a GPU. Left to itself, torch records on whichever was current when it first did so.

    What runs on another one meanwhile is not recorded: a replay would do nothing, and say nothing.
    """
    with torch.cuda.device(device), torch.cuda.graph(graph, stream=_recording_stream(device)):
        yield


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def choose_kernels(repeatable: bool) -> None:
    """On a GPU, kernels whose results repeat bit for bit, or the fastest ones. A CPU's always repeat."""
    torch.backends.cudnn.deterministic = repeatable
    torch.backends.cudnn.benchmark = not repeatable


def kernels_chosen(repeatable: bool) -> AbstractContextManager[None]:
    """`choose_kernels` for a while: whoever calls a library wants torch's switches back as they were."""
    return _cudnn(repeatable, not repeatable)


def expect_compiling(device: torch.device) -> None:
    """Start a GPU, and the processes in which torch's compiler makes kernels, seconds before they are needed.

    The GPU starts in a thread while the compiler is imported. The processes take as long to start as Python with torch
    does. Until they are there the compiler makes one kernel after the other in this process; left to itself it starts
    them when it has its first kernel to make.
    """
    if device.type == "cuda":
        threading.Thread(target=wake, args=(device,)).start()
    with suppress(ImportError):  # other versions of torch start them elsewhere
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()


def wake(device: torch.device) -> None:
    """Start a device, if that can be done."""
    with suppress(RuntimeError):  # whoever needs the device will say what is wrong with it
        torch.zeros(1, device=device)


@contextmanager
def sharing_cores(processes: int) -> Iterator[None]:
    """Take this process's share of the cores: threads that outnumber them wait for each other most of the time.

    Whoever has set OMP_NUM_THREADS has shared them out already.
    """
    threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, threads // processes))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def end_with(parent: int) -> None:
    """End this process once the one that started it is gone: killed, that one cannot say so."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


@cache
def _triton_is_here() -> bool:
    return find_spec("triton") is not None


def has_kernels(x: Tensor) -> bool:
    """Whether `hardsphere.kernels` can work on a tensor."""
    return x.is_cuda and _triton_is_here()


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def has_convolutions(x: Tensor) -> bool:
    """Whether the convolutions of `hardsphere.kernels` can: they are made for Hopper GPUs and no others."""
    return has_kernels(x) and _is_hopper(x.device)


def hardware(device: torch.device) -> str:
    """The machine in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def source_hash() -> str:
    """A digest of the package's own source, which identifies the code even where there is no version control."""
    root = Path(hardsphere.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def commit() -> str | None:
    """The commit that the package's source belongs to, with ``+`` if it has changed since.

    Outside a checkout it is what the variable ``HARDSPHERE_COMMIT`` says, if anything; `source_hash` can be compared.
    """
    root, told = Path(hardsphere.__file__).parent, os.environ.get("HARDSPHERE_COMMIT") or None

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if not git("ls-files", "."):
            return told
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return told


def code_of(environment: Mapping[str, Any]) -> str:
    """The code that a recorded `environment` names: its commit, or else the digest of its source."""
    return str(environment["commit"] or f"source {environment['source']}")


def environment(device: torch.device) -> dict[str, Any]:
    """What a result depends on beside its configuration."""
    return {
        "hardsphere": hardsphere.__version__,
        "commit": commit(),
        "source": source_hash(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": hardware(device),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
