"""The benchmarks on a GPU: `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch

from hardsphere.bench import bench_training
from hardsphere.bench.costs import Setting, measure
from hardsphere.bench.evaluation import bench_evaluation, subject_of_network
from hardsphere.bench.kernels import PRODUCTS

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


@pytest.mark.parametrize("name", ["cifar10/pgd-he", "cifar10/free-he"])
def test_kernels_inside_the_recorded_step_are_seen(name: str) -> None:
    measured = bench_training(name, {"model": "cnn-8", "batch": 64}, steps=2, device=GPU, profile=True)
    assert measured.peak_memory_gib is not None
    assert measured.compile_cache_warm is not None
    assert measured.profile is not None
    assert measured.profile.kernels_per_step > 50
    assert measured.profile.groups[PRODUCTS] > 0
    assert 0 <= measured.profile.idle_share < 1  # type: ignore[operator]


def test_a_point_and_an_evaluation() -> None:
    assert measure(Setting("cnn-8", 64, 2), 1e15, 0.01, GPU).step_seconds > 0
    measured = bench_evaluation(subject_of_network("cnn-8", None, 32, GPU), suite="quick", device=GPU)
    assert measured.peak_memory_gib is not None
    assert measured.tflops > 0
