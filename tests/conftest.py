"""One thread per test process: the tests run side by side, and idle threads that spin would slow all of them."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_numbers_every_time():
    """A test that draws weights without a seed of its own draws the same ones in every run."""
    torch.manual_seed(0)
