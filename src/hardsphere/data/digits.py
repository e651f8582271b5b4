"""Scikit-learn's handwritten digits: 1,797 grey images of 8x8 pixels, at hand wherever the library is installed."""

from __future__ import annotations

import torch

from hardsphere.data.sources import Images
from hardsphere.data.split import hold_out

# The set comes without a test split of its own; this one is fixed, whatever the seed of a run.
_TEST_SHARE = 0.2


def read_digits() -> tuple[Images, Images]:
    """(train, test): 1,438 and 359 images; ids are positions in scikit-learn's order."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    sixteenths = torch.from_numpy(bunch.images).to(torch.int64)  # 0..16
    pixels = ((sixteenths * 255 + 8) // 16).to(torch.uint8).unsqueeze(1)
    labels = torch.from_numpy(bunch.target).to(torch.int64)
    whole = Images(pixels, labels, torch.arange(len(labels)), tuple(str(digit) for digit in range(10)))
    train, test = hold_out(whole, _TEST_SHARE, purpose="test")
    assert test is not None
    return train, test
