from __future__ import annotations

import torch

from hardsphere.bench import bench_training
from hardsphere.bench.training import _flops_per_image, _random_images
from hardsphere.recipes import recipe


def test_arithmetic_of_a_step_is_counted() -> None:
    """K attack passes of two forwards' worth and an update of three; TRADES adds a target and a second update pass."""
    overrides = {"model": "cnn-4", "attack.steps": "5", "batch": "8"}
    device = torch.device("cpu")

    def forwards(name: str) -> float:
        config = recipe(name, overrides)
        single = _flops_per_image(recipe("cifar10/standard", overrides), _random_images(8), device) / 3
        return _flops_per_image(config, _random_images(8), device) / single

    assert forwards("cifar10/pgd") == 5 * 2 + 3
    assert forwards("cifar10/trades") == 1 + 5 * 2 + 3 + 3
    assert forwards("cifar10/free") == 8 * 3


def test_the_forward_pass_of_a_known_network() -> None:
    """PreActResNet-18 on 32 x 32 images: 1.11 GFLOP per forward pass."""
    config = recipe("cifar10/standard", {"model": "preactresnet18"})
    per_image = _flops_per_image(config, _random_images(4), torch.device("cpu"))
    assert abs(per_image / 3 / 1.11e9 - 1) < 0.01


def test_it_runs_on_a_cpu() -> None:
    measured = bench_training("cifar10/pgd-he", {"model": "cnn-4", "batch": 8}, steps=1, device=torch.device("cpu"))
    assert measured.images_per_second > 0
    assert measured.head_overhead.keys() == {"he", "mhe"}
    assert measured.peak_memory_gib is None
