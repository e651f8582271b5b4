"""The network that is attacked in place of the live one: the same answers, as the live one changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from hardsphere import models
from hardsphere.attacks.base import attacking
from hardsphere.recipes import VARIANTS
from hardsphere.train.shadow import Shadow


class Foreign(nn.Module):
    """Layers that the package's own networks do not have: biases, weights that are worked on, other norms, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 12, 3, bias=True)
        self.standardised = Standardised(12, 12, 3)
        self.grouped = nn.Conv2d(12, 12, 3, groups=12, padding_mode="reflect", padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(12, affine=False), nn.BatchNorm2d(12, track_running_stats=False)])
        self.layer_norm = nn.LayerNorm(12)
        self.hidden = nn.Linear(12, 16)
        self.batch_norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norms[0](self.first(x)).relu()
        out = self.norms[1](self.grouped(self.standardised(out))).relu().mean(dim=(2, 3))
        out = self.dropout(self.batch_norm(self.hidden(self.layer_norm(out))).relu())
        logits: Tensor = self.fc(out)
        return logits


class Standardised(nn.Conv2d):
    """A convolution that does something to its weights in float32 first."""

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.weight - self.weight.mean()) / self.weight.std()
        return nn.functional.conv2d(x, weight, self.bias, padding=1)


class Stubborn(nn.Module):
    """A linear layer that insists on float32, so bf16 weights do not go with it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 10)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            logits: Tensor = self.fc(x.float().mean(dim=(2, 3)))
            return logits


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "foreign":
        return Foreign()
    model, _, head = name.partition("+")
    spec = models.HeadSpec(**vars(VARIANTS[head]))
    return models.build(model, num_classes=10, mean=[0.5] * 3, std=[0.25] * 3, head=spec, seed=0)


def images() -> Tensor:
    x = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return x.contiguous(memory_format=torch.channels_last)


@pytest.fixture(autouse=True)
def bf16() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        yield


def answer(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and the gradient that the attack follows."""
    x = x.clone().requires_grad_()
    with attacking(model):
        logits = model(x).float()
        (gradient,) = torch.autograd.grad(logits.logsumexp(dim=1).sum(), x)
    return logits.detach(), gradient


def train_a_little(model: nn.Module) -> None:
    """In place, as the optimiser does it; the statistics move as well."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model.train()
    for _ in range(2):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images()).float(), torch.arange(8))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


NETWORKS = ["preactresnet18-8", "preactresnet18-8+he", "wrn-10-2+mhe", "cnn-4+he", "foreign"]


@pytest.mark.parametrize("name", NETWORKS)
def test_cast_once_is_cast_every_time(name: str) -> None:
    """Bit for bit the live model under autocast, before and after it has learned."""
    model = build(name).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    shadow = Shadow(model, fold=False, pad=False)
    for _ in range(2):
        for mine, live in zip(answer(shadow.refresh(), images()), answer(model, images()), strict=True):
            assert torch.equal(mine, live)
        train_a_little(model)


@pytest.mark.parametrize("name", NETWORKS)
def test_folded_and_padded_it_differs_by_rounding(name: str) -> None:
    """It is about as far from float32 as autocast is."""
    model = build(name).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    shadow = Shadow(model)
    for _ in range(2):
        with torch.autocast("cpu", enabled=False):
            exact = answer(model, images())
        cast, mine = answer(model, images()), answer(shadow.refresh(), images())
        for value, by_bf16, by_shadow in zip(exact, cast, mine, strict=True):
            assert (by_shadow - value).norm() < 1.5 * (by_bf16 - value).norm()
        assert shadow.speaks_like(model, images())
        train_a_little(model)


def test_the_affine_step_is_batch_normalisation() -> None:
    """In float32 there is nothing to round but the formula itself."""
    norm = nn.BatchNorm2d(5, eps=1e-3)
    for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        nn.init.uniform_(tensor, 0.5, 2.0)  # type: ignore[arg-type]
    model = nn.Sequential(norm)
    x = torch.randn(4, 5, 3, 3)
    torch.testing.assert_close(Shadow(model).network(x), model.eval()(x))


def test_it_keeps_the_layout_and_asks_for_no_gradients() -> None:
    model = build("preactresnet18-8+he").to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.train()
    shadow = Shadow(model)
    assert all(not parameter.requires_grad for parameter in shadow.network.parameters())
    assert not any(module.training for module in shadow.network.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(module.training for module in model.modules())
    for cast, live in zip(shadow._cast, shadow._live, strict=True):
        assert cast.dtype == torch.bfloat16
        assert cast.stride() == live.stride()
    for convolution in shadow.network.modules():
        if isinstance(convolution, nn.Conv2d):
            assert convolution.weight.is_contiguous(memory_format=torch.channels_last)


def test_the_head_is_the_live_head() -> None:
    """Cosines need float32, so the class vectors are the model's own memory."""
    model = build("preactresnet18-8+he")
    live = model.get_parameter("network.linear.weight")
    mine = Shadow(model).network.get_parameter("network.linear.weight")
    assert mine.data_ptr() == live.data_ptr()
    assert mine.dtype == torch.float32


def test_a_network_that_will_not_take_bf16_weights_is_found_out() -> None:
    model = Stubborn()
    assert not Shadow(model).speaks_like(model, images())
