"""Gradient attacks on a CUDA device: the same outcomes as on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from gradient_table import Entry, cases, name
from linear import Case, linear_case
from torch import Tensor

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
        # A pixel whose gradient is rounding goes either way, and momentum carries it on: hardly any, and to no effect.
        apart = (there.x_adv[index].cpu() - here.x_adv[index]).abs()
        assert float((apart > 1e-4).float().mean()) < 0.02
        begin, end, other = (margin(case, index, x[index]) for x in (case.x, here.x_adv, there.x_adv))
        assert abs(other - end) < 0.01 * begin


def margin(case: Case, index: int, x: Tensor) -> float:
    """By how much the right class leads, in float64."""
    logits = copy.deepcopy(case.model).double()(x.cpu().double()[None])[0]
    y = int(case.y[index])
    others = torch.cat([logits[:y], logits[y + 1 :]])
    return float((logits[y] - others.max()).detach())
