"""Gradient attacks on a CUDA device: the same outcomes as on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from gradient_table import Entry, cases, name
from linear import linear_case

from hardsphere.noise import Noise

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("entry", "norm"), cases(), ids=name)
def test_same_outcomes_as_on_the_cpu(entry: Entry, norm: str) -> None:
    case = linear_case(10, norm, count=12)
    here = entry.attack(case.model, case.x, case.y, case.ball, noise=case.noise())
    noise = Noise(0, torch.arange(12, device="cuda"))
    there = entry.attack(copy.deepcopy(case.model).cuda(), case.x.cuda(), case.y.cuda(), case.ball, noise=noise)
    assert there.x_adv.is_cuda
    # The radius is the distance of one of the samples: for that one rounding decides, and devices round differently.
    clear = (case.distance / case.ball.eps - 1).abs() > 1e-3
    assert int(clear.sum()) >= 10
    for index in clear.nonzero().flatten().tolist():
        assert there.stop[index] == here.stop[index]
        # A pixel whose gradient is rounding goes either way, and momentum carries it on: hardly any, and not far.
        apart = (there.x_adv[index].cpu() - here.x_adv[index]).abs()
        assert float((apart > 1e-4).float().mean()) < 0.02
        assert float(apart.max()) < 0.1 * case.ball.eps
