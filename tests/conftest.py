"""One thread per test process: the tests run side by side, and idle threads that spin would slow all of them."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start

import torch

torch.set_num_threads(1)
