"""Table 1 of the paper against formulas written out anew, in float64 and without the library's own functions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hardsphere.data import Batch
from hardsphere.noise import Noise
from hardsphere.objectives import FRAMEWORKS, Adversary, Learner
from hardsphere.objectives.alp import LogitPairing
from hardsphere.objectives.base import State
from hardsphere.objectives.free import FreeTraining
from hardsphere.objectives.trades import Trades
from hardsphere.sphere import SphereHead, find_head
from hardsphere.threat import Ball

BALL = Ball("linf", 0.1)
HEADS = {
    "plain": {"feature_norm": False, "weight_norm": False},
    "he": {"scale": 15.0, "margin": 0.2},
    "mhe": {"scale": 15.0, "margin": 0.1, "angular": True},
}


def network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Flatten(), nn.Linear(12, 7), nn.Tanh())
    return nn.Sequential(body, SphereHead(7, 5, **HEADS[kind])).double()


def learner(model: nn.Module, **changes: object) -> Learner:
    settings = {"ball": BALL, "steps": 3, "step_size": 0.04} | changes
    return Learner(model, find_head(model), Adversary(**settings))  # type: ignore[arg-type]


def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(6, 3, 2, 2, generator=generator, dtype=torch.float64)
    return Batch(x, torch.tensor([0, 1, 2, 3, 4, 0]), torch.arange(6))


def raw_logits(model: nn.Module, x: Tensor, kind: str) -> np.ndarray:
    """The head's output at scale 1, by numpy."""
    head = find_head(model)
    assert head is not None
    z = model[0](x).detach().numpy()  # type: ignore[index]
    w = head.weight.detach().numpy()
    if kind == "plain":
        assert head.bias is not None
        return z @ w.T + head.bias.detach().numpy()
    cosines = (z / np.linalg.norm(z, axis=1, keepdims=True)) @ (w / np.linalg.norm(w, axis=1, keepdims=True)).T
    return cosines if kind == "he" else -np.arccos(cosines)


def log_softmax(values: np.ndarray) -> np.ndarray:
    return values - np.log(np.exp(values).sum(axis=1, keepdims=True))


def cross_entropy(raw: np.ndarray, y: Tensor, kind: str) -> np.ndarray:
    """-log softmax(s (raw - m 1_y))_y, eq. 6."""
    scale, margin = (1.0, 0.0) if kind == "plain" else (HEADS[kind]["scale"], HEADS[kind]["margin"])
    shifted = raw.copy()
    shifted[np.arange(len(y)), y.numpy()] -= margin
    return -log_softmax(scale * shifted)[np.arange(len(y)), y.numpy()]


def temperature(kind: str) -> float:
    return 1.0 if kind == "plain" else float(HEADS[kind]["scale"])


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("framework", ["standard", "pgd", "alp", "trades", "fast"])
def test_training_objective(framework: str, kind: str) -> None:
    model, data = network(kind), batch()
    x_adv = (data.x + 0.05).clamp(0, 1)
    clean, adversarial = raw_logits(model, data.x, kind), raw_logits(model, x_adv, kind)
    ce_clean, ce_adversarial = (cross_entropy(raw, data.y, kind) for raw in (clean, adversarial))
    log_p, log_q = (log_softmax(temperature(kind) * raw) for raw in (clean, adversarial))
    expected = {
        "standard": ce_adversarial,
        "pgd": ce_adversarial,
        "fast": ce_adversarial,
        "alp": 0.5 * ce_clean + 0.5 * ce_adversarial + 0.5 * np.linalg.norm(clean - adversarial, axis=1),
        "trades": ce_clean + 6.0 * (np.exp(log_p) * (log_p - log_q)).sum(axis=1),
    }[framework]
    got = FRAMEWORKS[framework]().losses(learner(model), data, x_adv).per_sample
    np.testing.assert_allclose(got.detach().numpy(), expected, rtol=1e-8)  # ALP guards its square root


def test_released_pairing_is_the_mean_square_of_raw_cosines() -> None:
    model, data = network("he"), batch()
    x_adv = (data.x + 0.05).clamp(0, 1)
    clean, adversarial = raw_logits(model, data.x, "he"), raw_logits(model, x_adv, "he")
    plain, paired = (
        LogitPairing(weight=weight, pairing="mse").losses(learner(model), data, x_adv).per_sample.detach().numpy()
        for weight in (0.0, 0.5)
    )
    np.testing.assert_allclose(paired - plain, 0.5 * ((clean - adversarial) ** 2).mean(axis=1), atol=1e-12)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("framework", ["pgd", "alp", "trades"])
def test_adversary_follows_its_own_objective(framework: str, kind: str) -> None:
    """K sign steps on the formula of Table 1, by finite differences of numpy's formula, give the same x*."""
    model, data, noise = network(kind), batch(), Noise(0, torch.arange(6))
    got = FRAMEWORKS[framework]().craft(learner(model), data, noise)
    target = log_softmax(temperature(kind) * raw_logits(model, data.x, kind))

    def objective(x: Tensor) -> np.ndarray:
        log_q = log_softmax(temperature(kind) * raw_logits(model, x, kind))
        if framework == "trades":
            return (np.exp(target) * (target - log_q)).sum(axis=1)
        return -log_q[np.arange(6), data.y.numpy()]

    x_adv = BALL.random_start(data.x, noise)
    for _ in range(3):
        gradient = torch.zeros_like(x_adv)
        for c in range(3):
            for i in range(2):
                for j in range(2):
                    step = torch.zeros_like(x_adv)
                    step[:, c, i, j] = 1e-6
                    gradient[:, c, i, j] = torch.from_numpy(objective(x_adv + step) - objective(x_adv - step))
        x_adv = x_adv + 0.04 * gradient.sign()
        x_adv = torch.minimum(torch.maximum(x_adv, data.x - 0.1), data.x + 0.1).clamp(0, 1)
    torch.testing.assert_close(got, x_adv, rtol=0, atol=1e-12)


def test_the_margin_does_not_reach_the_adversary() -> None:
    """L_A has no margin: two heads that differ in m alone meet the same adversarial examples."""
    one, other = network("he"), network("he")
    head = find_head(other)
    assert head is not None
    head.margin = 0.0
    noise = Noise(0, torch.arange(6))
    pgd = FRAMEWORKS["pgd"]()
    assert torch.equal(pgd.craft(learner(one), batch(), noise), pgd.craft(learner(other), batch(), noise))


def test_scale_one_is_another_adversary() -> None:
    """`attack.scale=1` is the paper's text: the adversary sees raw cosines, and pushes elsewhere."""
    model, noise = network("he"), Noise(0, torch.arange(6))
    pgd = FRAMEWORKS["pgd"]()
    deployed = pgd.craft(learner(model, steps=10), batch(), noise)
    raw = pgd.craft(learner(model, steps=10, scale=1.0), batch(), noise)
    assert not torch.equal(deployed, raw)
    same = pgd.craft(learner(model, steps=10, scale=15.0), batch(), noise)
    assert torch.equal(deployed, same)


def test_trades_runs_the_clean_images_once_for_the_attack() -> None:
    model, data, noise = network("he"), batch(), Noise(0, torch.arange(6))
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    trades, learning = Trades(), learner(model, steps=7)
    x_adv = trades.craft(learning, data, noise)
    assert len(calls) == 1 + 7
    trades.losses(learning, data, x_adv)
    assert len(calls) == 1 + 7 + 2


def test_trades_stays_finite_where_probabilities_underflow() -> None:
    model, data = network("he"), batch()
    head = find_head(model)
    assert head is not None
    head.scale = 5000.0
    model.float()
    data.x = data.x.float()
    losses = Trades().losses(learner(model), data, (data.x + 0.1).clamp(0, 1)).per_sample
    losses.mean().backward()
    assert losses.isfinite().all()
    assert head.weight.grad is not None
    assert head.weight.grad.isfinite().all()


@pytest.mark.parametrize("bn", ["eval", "train"])
def test_batch_norm_during_the_attack(bn: str) -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12), nn.Linear(12, 5)).double().train()
    before = model[1].running_mean.clone()  # type: ignore[operator, union-attr]
    FRAMEWORKS["pgd"]().craft(learner(model, bn=bn), batch(), Noise(0, torch.arange(6)))
    assert torch.equal(before, model[1].running_mean) == (bn == "eval")  # type: ignore[arg-type]
    assert model.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_free_carries_its_perturbation_and_shares_the_backward_pass() -> None:
    """The perturbation of a replay is made of the gradient of the one before; it outlives its batch."""
    model, data = network("plain"), batch()
    learning = learner(model, step_size=0.1)
    state: State = {}
    seen: list[Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def update(losses):  # type: ignore[no-untyped-def]
        hook = model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().clone()))
        optimizer.zero_grad()
        losses().per_sample.mean().backward()
        hook.remove()

    free = FreeTraining(replays=3)
    free.step(learning, data, Noise(0, data.ids), state, update)
    assert len(seen) == 3 == free.updates_per_batch
    assert torch.equal(seen[0], data.x)  # it starts at zero

    def expected_next(x_adv: Tensor) -> Tensor:
        x_adv = x_adv.clone().requires_grad_()
        loss = torch.nn.functional.cross_entropy(model(x_adv), data.y)
        (gradient,) = torch.autograd.grad(loss, x_adv)
        moved = x_adv.detach() + 0.1 * gradient.sign()
        return torch.minimum(torch.maximum(moved, data.x - 0.1), data.x + 0.1).clamp(0, 1)

    torch.testing.assert_close(seen[1], expected_next(seen[0]))
    torch.testing.assert_close(seen[2], expected_next(seen[1]))
    carried = state["delta"].clone()
    shorter = Batch(data.x[:4].flip(0), data.y[:4].flip(0), data.ids[:4])
    free.step(learning, shorter, Noise(0, shorter.ids), state, update)
    torch.testing.assert_close(seen[3], (shorter.x + carried[:4]).clamp(0, 1))
    assert torch.equal(state["delta"][4:], carried[4:])  # a shorter batch leaves the rest alone


def test_label_smoothing_and_mixed_labels() -> None:
    model, data = network("he"), batch()
    raw = raw_logits(model, data.x, "he")
    smooth = Learner(model, find_head(model), learner(model).adversary, label_smoothing=0.1)
    mixed = torch.full((6, 5), 0.05, dtype=torch.float64)
    mixed[torch.arange(6), data.y] = 0.8
    got = smooth.classification_loss(model(data.x), mixed).detach().numpy()
    target = 0.9 * mixed.numpy() + 0.1 / 5
    log_p = log_softmax(15.0 * (raw - 0.2 * mixed.numpy()))
    np.testing.assert_allclose(got, -(target * log_p).sum(axis=1), rtol=1e-9)
    assert math.isfinite(got.sum())
