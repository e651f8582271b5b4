"""Where a kernel runs: Triton launches on the current device, which need not be that of the images."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def beside(x: Tensor) -> AbstractContextManager[object]:
    """Make the device of some images the current one for a while; on a CPU, where Triton only imitates, nothing."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
