"""Real photographs, cut into images of 32 and of 224 pixels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from torch import Tensor


@pytest.fixture(scope="session")
def small() -> Tensor:
    """48 images of 32 pixels, uint8 (48, 3, 32, 32): parts of two photographs at a quarter of their size."""
    patches = []
    for name in ("china.jpg", "flower.jpg"):
        photo = Image.fromarray(load_sample_image(name))
        pixels = np.asarray(photo.resize((160, 106), Image.Resampling.LANCZOS))
        starts = [(row, column) for row in range(0, 74, 24) for column in range(0, 128, 21)][:24]
        patches += [pixels[row : row + 32, column : column + 32] for row, column in starts]
    return torch.from_numpy(np.stack(patches)).permute(0, 3, 1, 2).contiguous()


@pytest.fixture(scope="session")
def large() -> Tensor:
    """Two images of 224 pixels, uint8 (2, 3, 224, 224)."""
    cuts = [load_sample_image("china.jpg")[100:324, 200:424], load_sample_image("flower.jpg")[100:324, 150:374]]
    return torch.from_numpy(np.stack(cuts)).permute(0, 3, 1, 2).contiguous()
