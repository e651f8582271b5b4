"""The network that is attacked in place of the live one: the same answers, as the live one changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hardsphere import models, norms
from hardsphere.attacks.base import attacking
from hardsphere.recipes import VARIANTS
from hardsphere.shadow import ALIKE, Shadow, departure
from hardsphere.sphere import find_head


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


class Scaled(nn.Module):
    """A model whose answers are those of another, so many times over."""

    def __init__(self, model: nn.Module, factor: float) -> None:
        super().__init__()
        self.model, self.factor = model, factor

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        return self.factor * logits


class OneWay(torch.autograd.Function):
    """The identity, which cannot be gone back through."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("no way back")


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
        logits = model(images()).float()
        loss = nn.functional.cross_entropy(logits, torch.arange(8) % logits.shape[1])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


NETWORKS = ["preactresnet18-8", "preactresnet18-8+he", "wrn-10-2+mhe", "cnn-4+he", "foreign"]


@pytest.mark.parametrize("name", NETWORKS)
def test_cast_once_is_cast_every_time(name: str) -> None:
    """Bit for bit the live model under autocast, before and after it has learned.

    Gradients through a hypersphere head are written out in the stand-in, so there they agree but for rounding.
    """
    model = build(name).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    shadow = Shadow(model, fold=False, pad=False)
    for _ in range(2):
        mine, live = answer(shadow.refresh(), images()), answer(model, images())
        assert torch.equal(mine[0], live[0])
        head = find_head(shadow.network)
        if head is None or head.directions is None:
            assert torch.equal(mine[1], live[1])
        else:
            assert (mine[1] - live[1]).norm() < 0.02 * live[1].norm()  # bf16 behind the head
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
        with attacking(model):
            assert departure(shadow.network, model, images()) <= ALIKE
        train_a_little(model)


def test_the_affine_step_is_batch_normalisation() -> None:
    """In float32 there is nothing to round but the formula itself."""
    norm = nn.BatchNorm2d(5, eps=1e-3)
    for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        nn.init.uniform_(tensor, 0.5, 2.0)  # type: ignore[arg-type]
    model = nn.Sequential(norm)
    x = torch.randn(4, 5, 3, 3)
    torch.testing.assert_close(Shadow(model).network(x), model.eval()(x))


class TwoNames(nn.Module):
    """Layers that are attributes, and in a sequence as well, by which they are asked."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.body = nn.Sequential(self.conv, self.norm, nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x).mean((2, 3))
        return y


@pytest.mark.parametrize("fuse", [False, True])
def test_a_layer_of_two_names_follows_the_live_one(fuse: bool) -> None:
    model = TwoNames().train()
    shadow = Shadow(model, fuse_norms=fuse)
    train_a_little(model)
    assert departure(shadow.refresh(), model.eval(), images()) <= 0.02
    assert not any(isinstance(module, nn.BatchNorm2d | nn.Conv2d) for module in shadow.network.modules())


def test_a_norm_with_a_hook_keeps_it() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 32 * 32, 10)).eval()
    model[0].register_forward_hook(lambda _, given, y: y.clamp(max=0.5))
    assert departure(Shadow(model).network, model, images()) <= 0.02


def test_norms_are_worked_out_once_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    worked_out: list[norms.Affine] = []
    real = norms.refresh
    monkeypatch.setattr(norms, "refresh", lambda several: worked_out.extend(several) or real(several))
    shadow = Shadow(build("preactresnet18-8+he"))
    assert len(worked_out) == len(shadow._norms) == 17


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


@pytest.mark.parametrize("name", ["preactresnet18-8+he", "wrn-10-2+mhe"])
def test_class_vectors_are_normalised_once_a_step(name: str) -> None:
    model = build(name)
    live = find_head(model)
    assert live is not None
    shadow = Shadow(model)
    mine = find_head(shadow.network)
    assert mine is not None
    train_a_little(model)
    assert not torch.equal(mine.class_vectors(), live.class_vectors())
    shadow.refresh()
    assert torch.equal(mine.class_vectors(), live.class_vectors())
    assert mine.directions is not None
    assert live.directions is None  # a model in training differentiates through its norms
    assert "network.linear.directions" not in model.state_dict()


@pytest.mark.parametrize(("factor", "expected"), [(1.0, 0.0), (1.25, 0.25), (0.0, 1.0), (-1.0, 2.0)])
def test_a_departure_is_relative_to_the_models_answers(factor: float, expected: float) -> None:
    model = build("foreign").eval()
    assert departure(Scaled(model, factor), model, images()) == pytest.approx(expected, abs=1e-2)


@pytest.mark.parametrize("head", ["", "he", "mhe"])
def test_another_network_is_a_departure(head: str) -> None:
    """All angles of m-HE lie near 90 degrees, in any network."""
    spec = models.HeadSpec(**vars(VARIANTS[head]))
    one, other = (models.build("cnn-4", num_classes=10, head=spec, seed=seed).eval() for seed in (0, 1))
    assert departure(one, one, images()) <= ALIKE
    assert departure(other, one, images()) > 5 * ALIKE


def test_where_the_model_says_nothing_any_answer_is_a_departure() -> None:
    model = build("foreign").eval()
    silent = Scaled(model, 0.0)
    assert departure(silent, silent, images()) == 0
    assert departure(model, silent, images()) > ALIKE


def test_answers_that_are_not_numbers_are_not_alike() -> None:
    model = build("foreign").eval()
    assert not departure(Scaled(model, float("nan")), model, images()) <= ALIKE


def test_a_stand_in_must_bear_a_pass_backwards() -> None:
    class Blind(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = model(OneWay.apply(x))
            return logits

    model = build("foreign").eval()
    with torch.no_grad():
        assert torch.equal(Blind()(images()), model(images()))
    with pytest.raises(RuntimeError, match="no way back"):
        departure(Blind(), model, images())
