"""FN inside the attack (Table 7), perturbation images (Fig. 2) and transfer (Fig. 4) on linear models."""

from __future__ import annotations

import json

import pytest
import torch
from analysis_models import Pixels, Smooth, headed, images
from torch import Tensor

from hardsphere.analysis import normalised_attack, perturbations, transfer_matrix
from hardsphere.analysis.images import near_zero, sparsity, visible
from hardsphere.errors import HardsphereError
from hardsphere.threat import Ball


def two_classes(seed: int) -> Tensor:
    return torch.randn(2, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def margins(weight: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Z_y - Z_other; the answer is right exactly if it is positive."""
    return ((x.flatten(1) @ weight.T) @ torch.tensor([1.0, -1.0], dtype=torch.float64)) * (1 - 2 * y)


# Table 7


def test_one_step_with_and_without_feature_norm_on_pixels() -> None:
    """With two classes a step follows the margin: sign(W) without FN, the sign of W's tangential part with FN."""
    # Pixels and weights far from balanced: W has a large part along x, and its tangential part other signs.
    weight, eps = two_classes(0) + torch.tensor([[0.6], [0.0]]), 0.2
    x, ball = images(200, 1, 3, 4, low=0.36, high=0.64), Ball("linf", eps)
    y = (x.flatten(1) @ weight.T).argmax(1)
    found = normalised_attack(Pixels(weight), x, y, ball, steps=(1,), step_size=eps, random_start=False)
    pair, flat = (weight[0] - weight[1]) * (1 - 2 * y[:, None]), x.flatten(1)
    tangential = pair - (pair * flat).sum(1, keepdim=True) / flat.pow(2).sum(1, keepdim=True) * flat
    right = {}
    for name, direction in (("without", pair), ("fn", tangential), ("fn_same_length", tangential)):
        right[name] = ((flat - eps * direction.sign()) * pair).sum(1) > 0
        assert torch.equal(found.right[1, name], right[name])
    assert not torch.equal(right["without"], right["fn"])  # or the test would tell nothing
    assert found.clean.all()
    assert found.length == pytest.approx(float(flat.norm(dim=1).mean()))
    row = found.to_dict()["attacks"]["pgd-1"]
    assert row["fn"]["count"] == int(right["fn"].sum())
    gain = float(right["fn"].double().mean() - right["without"].double().mean())
    assert row["fn_minus_without"]["difference"] == pytest.approx(gain)
    low, high = row["fn_minus_without"]["interval"]
    assert low <= gain <= high


def test_a_head_that_has_feature_norm_is_attacked_the_same_either_way() -> None:
    model, x, y = headed(Smooth(), "FN"), images(20, 3, 2, 2), torch.arange(20) % 5
    with torch.no_grad():
        y = torch.where(torch.arange(20) < 15, model(x).argmax(1), y)
    found = normalised_attack(model, x, y, Ball("linf", 0.1), steps=(1, 3), step_size=0.05)
    for k in (1, 3):
        for variant in ("fn", "fn_same_length"):
            assert torch.equal(found.right[k, variant], found.right[k, "without"])
    assert 0 < int(found.right[3, "without"].sum()) < int(found.clean.sum())


def test_what_is_crafted_through_feature_norm_is_judged_without() -> None:
    """A bias decides everything once features have length 1, but not in the model itself."""
    weight, x = two_classes(0), images(20, 1, 3, 4)
    model = Pixels(20 * weight)
    model.fc.bias = torch.nn.Parameter(torch.tensor([30.0, -30.0], dtype=torch.float64))
    y = (20 * x.flatten(1) @ weight.T + model.fc.bias.detach()).argmax(1)
    found = normalised_attack(model, x, y, Ball("linf", 1e-6), steps=(1,))
    unit = x.flatten(1) / x.flatten(1).norm(dim=1, keepdim=True)
    through = (20 * unit @ weight.T + model.fc.bias.detach()).argmax(1)
    assert (through != y).any()
    assert found.right[1, "fn"].all()


def test_step_size_is_the_papers_by_default() -> None:
    model, x, y = Pixels(two_classes(0)), images(2, 1, 3, 4), torch.tensor([0, 1])
    assert normalised_attack(model, x, y, Ball("linf", 0.031)).step_size == pytest.approx(0.003)
    with pytest.raises(HardsphereError, match="at least one"):
        normalised_attack(model, x, y, Ball("linf", 0.031), steps=())


# Fig. 2, right


def test_perturbations_of_a_linear_model_are_signs() -> None:
    weights = {"one": two_classes(0), "two": two_classes(1)}
    x, y, eps = images(5, 1, 3, 4, low=0.2, high=0.8), torch.tensor([0, 1, 0, 1, 1]), 0.1
    found = perturbations({name: Pixels(weight) for name, weight in weights.items()}, x, y, Ball("linf", eps))
    for name, weight in weights.items():
        sign = ((weight[1] - weight[0]).sign() * (1 - 2 * y[:, None])).view_as(x)
        torch.testing.assert_close(found.deltas[name], eps * sign)
        assert torch.equal(found.right[name], margins(weight, x + eps * sign, y) > 0)
        summed = found.to_dict()["models"][name]
        assert summed["l2"]["mean"] == pytest.approx(eps * 12**0.5)
        assert summed["linf"]["mean"] == pytest.approx(eps)
        assert summed["sparsity"]["mean"] == pytest.approx(0, abs=1e-9)
        assert summed["near_zero"]["mean"] == 0
    json.dumps(found.to_dict(), allow_nan=False)
    grid = found.grid(count=4, padding=2)
    assert grid.dtype == torch.uint8
    assert grid.shape == (1, 3 * (3 + 2) + 2, 4 * (4 + 2) + 2)
    assert (grid[:, :2] == 255).all()
    torch.testing.assert_close(grid[0, 2:5, 8:12], (255 * x[1, 0]).round().to(torch.uint8))
    assert torch.equal(grid[0, 12:15, 20:24] == 255, found.deltas["two"][3, 0] > 0)


def test_measures_of_sparsity_have_known_ends() -> None:
    single, zero = torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4, 4)
    single[0, 0, 1, 2] = -0.3
    assert sparsity(single).item() == pytest.approx(1)
    assert near_zero(single).item() == pytest.approx(15 / 16)
    assert visible(single)[0, 0, 1, 2] == 0
    assert (visible(zero) == 0.5).all()
    half = torch.zeros(1, 1, 1, 4)
    half[..., :2] = 1
    assert sparsity(half).item() == pytest.approx(2 - 2**0.5)


# Fig. 4


@pytest.mark.parametrize("attack", ["pgd-20", "mim-20"])
def test_transfer_between_linear_models(attack: str) -> None:
    weights = {"a": two_classes(0), "b": two_classes(0) + 0.8 * two_classes(1)}
    x, eps = images(80, 1, 3, 4, low=0.2, high=0.8), 0.05
    y = (x.flatten(1) @ weights["a"].T).argmax(1)
    models = {name: Pixels(weight) for name, weight in weights.items()}
    found = transfer_matrix(models, x, y, Ball("linf", eps), attacks=(attack,), step_size=eps / 5, batch=30)
    for source, weight in weights.items():
        corner = x + eps * ((weight[1] - weight[0]).sign() * (1 - 2 * y[:, None])).view_as(x)
        for target, judge in weights.items():
            assert torch.equal(found.right[attack, source, target], margins(judge, corner, y) > 0)
        assert torch.equal(found.clean[source], margins(weight, x, y) > 0)
    table = found.accuracies(attack)
    assert table[0, 0] < table[1, 0] < 1  # what was crafted on b is weaker against a than a's own
    cells = found.to_dict()["attacks"][attack]
    assert cells["a"]["a"]["white_box"]
    assert not cells["a"]["b"]["white_box"]
    assert cells["b"]["a"]["accuracy"] == float(table[1, 0])


def test_the_papers_view_crafts_on_raw_cosines() -> None:
    """At a huge scale the deployed cross-entropy saturates in float32 and gives no direction; raw cosines do."""
    model, x = headed(Smooth(), "HE", scale=1e6), images(30, 3, 2, 2)
    with torch.no_grad():
        y = model(x).argmax(1)
    ball = Ball("linf", 0.3)
    deployed, paper = (
        transfer_matrix({"m": model}, x, y, ball, attacks=("bim-5",), step_size=0.05, view=view).accuracies("bim-5")
        for view in ("deployed", "paper")
    )
    assert deployed.item() > 0.9
    assert paper.item() < 0.7


def test_transfer_refuses_what_it_cannot_do() -> None:
    x, y, ball = images(2, 1, 3, 4), torch.tensor([0, 1]), Ball("linf", 0.1)
    with pytest.raises(HardsphereError, match="square-20"):
        transfer_matrix({"a": Pixels(two_classes(0))}, x, y, ball, attacks=("square-20",))
    with pytest.raises(HardsphereError, match="No models"):
        transfer_matrix({}, x, y, ball)
