"""Compute convolutions with Triton's interpreter: `python interpreted.py GIVEN FOUND`, with TRITON_INTERPRET=1.

In a process of its own, since Triton decides when it is imported what its functions will be.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hardsphere.kernels.convolution import convolve, convolve_back


def main(given: Path, found: Path) -> None:
    functions = {"forwards": lambda case: list(convolve(*case)), "backwards": lambda case: [convolve_back(*case)]}
    results = {}
    for key, cases in torch.load(given, weights_only=True).items():
        results[key] = [functions[key](case) for case in cases]
        for case, result in zip(cases, results[key], strict=True):
            again = functions[key](laid_out_otherwise(case))
            assert all(torch.equal(one, two) for one, two in zip(result, again, strict=True))
    torch.save(results, found)


def laid_out_otherwise(case: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same with the channels first in memory."""
    kept = [value.contiguous() if isinstance(value, Tensor) else value for value in case]
    return tuple(laid_out_otherwise(value) if isinstance(value, tuple) else value for value in kept)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
