"""Compute convolutions with Triton's interpreter: `python interpreted.py GIVEN FOUND`, with TRITON_INTERPRET=1.

In a process of its own, since Triton decides when it is imported what its functions will be.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from hardsphere.kernels.convolution import convolve, convolve_back


def main(given: Path, found: Path) -> None:
    cases = torch.load(given, weights_only=True)
    found_of = {"forwards": lambda case: list(convolve(*case)), "backwards": lambda case: convolve_back(*case)}
    torch.save({key: [found_of[key](case) for case in some] for key, some in cases.items()}, found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
