"""One thread per test process: the tests run side by side, and idle threads that spin would slow all of them."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU its tests are skipped. Whoever asks for them by name sees them fail: skipped, they show nothing."""
    left_out = not torch.cuda.is_available() and config.option.markexpr != "gpu"
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("default"))  # torch's compiler warns there of its own doings
            if left_out:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _same_numbers_every_time():
    """A test that draws weights without a seed of its own draws the same ones in every run."""
    torch.manual_seed(0)
