"""Fixtures for tests of attacks. The linear models and their closed forms are in `linear.py` beside this file."""

from __future__ import annotations

import pytest
import torch
from linear import Case, linear_case


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Small tensors gain nothing from threads, and tests share the machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", params=["linf", "l2", "l1"])
def norm(request: pytest.FixtureRequest) -> str:
    """Each norm in turn."""
    return str(request.param)


@pytest.fixture(scope="session")
def two_classes(norm: str) -> Case:
    """64 images under a two-class linear model, for each norm."""
    return linear_case(2, norm)


@pytest.fixture(scope="session")
def ten_classes(norm: str) -> Case:
    """64 images under a ten-class linear model, for each norm."""
    return linear_case(10, norm)
