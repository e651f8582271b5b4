"""The Triton kernels against their slow twins, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hardsphere.norms import Affine, SumAndNorm
from hardsphere.runtime import has_kernels
from hardsphere.threat import Ball

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("shape", [(5, 24, 7, 3), (64, 160, 16, 16)])
def test_norm_and_relu_are_one_kernel(shape: tuple[int, ...], relu: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = nn.BatchNorm2d(shape[1]).eval().requires_grad_(False)
    for tensor in (norm.weight, norm.bias, norm.running_mean):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    x = torch.randn(shape, generator=generator).bfloat16()
    weight = torch.randn(shape, generator=generator).bfloat16()
    found = []
    for device in ("cpu", "cuda"):
        layer = Affine(norm, relu).to(device)
        image = x.to(device, memory_format=torch.channels_last).requires_grad_()
        assert has_kernels(image) == (device == "cuda")
        y = layer(image)
        (gradient,) = torch.autograd.grad((y * weight.to(device)).float().sum(), image)
        found.append((y.detach().cpu().float(), gradient.cpu().float()))
    for here, there in zip(*found, strict=True):
        assert torch.allclose(here, there, rtol=2**-7, atol=2**-7)
    assert bool((found[1][0] == 0).any()) == relu


@pytest.mark.parametrize("sum_is_used", [True, False])
def test_a_sum_and_its_norm_are_one_kernel(sum_is_used: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    norm = nn.BatchNorm2d(32).eval().requires_grad_(False)
    norm.running_mean.copy_(torch.randn(32, generator=generator))
    x, other, weight = (torch.randn(9, 32, 6, 6, generator=generator).bfloat16() for _ in range(3))
    found = []
    for device in ("cpu", "cuda"):
        layer = SumAndNorm(Affine(norm, relu=True)).to(device)
        branches = [branch.to(device).requires_grad_() for branch in (x, other)]
        total, y = layer(*branches)
        value = (y * weight.to(device)).float().sum() + (total.float().sin().sum() if sum_is_used else 0)
        gradients = torch.autograd.grad(value, branches)
        found.append([part.detach().cpu().float() for part in (total, y, *gradients)])
    for here, there in zip(*found, strict=True):
        assert torch.allclose(here, there, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_the_projection_is_one_kernel(norm: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x, normal = (torch.rand(40, 3, 32, 32, generator=generator) for _ in range(2))
    normal = normal - 0.5
    normal[0, 0] = 0
    most = (normal.abs() * torch.where(normal > 0, 1 - x, x)).flatten(1).sum(1)
    ball = Ball(norm, 0.1)
    for part in (0.0, 0.001, 0.3, -0.3, 0.9, 2.0):
        gain = part * most
        here = ball.shortest(x, normal, gain)
        there = ball.shortest(x.cuda(), normal.cuda(), gain.cuda()).cpu()
        assert torch.allclose(here, there, atol=2e-6)
