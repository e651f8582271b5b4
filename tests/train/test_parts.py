"""Schedules, averages, weight perturbation and guards, each against its formula."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hardsphere.data import Batch
from hardsphere.errors import HardsphereError
from hardsphere.recipes import recipe
from hardsphere.threat import Ball
from hardsphere.train.averaging import ExponentialAverage, StochasticAverage, make_average, measure_statistics
from hardsphere.train.guards import FiniteGuard, pgd_accuracy
from hardsphere.train.perturbation import worst_weights
from hardsphere.train.schedules import learning_rate


def rates(**changes: str) -> list[float]:
    """Rates of all updates of 20 epochs of 10 updates."""
    config = recipe("cifar10/pgd", {"epochs": "20", "lr": "0.1", **changes})
    return [learning_rate(config, update, 10) for update in range(200)]


def test_step_schedule_drops_at_three_quarters_and_nine_tenths() -> None:
    values = rates(schedule="step")
    assert values[:150] == [0.1] * 150
    assert values[150:180] == pytest.approx([0.01] * 30)
    assert values[180:] == pytest.approx([0.001] * 20)


def test_the_papers_drops_are_at_epochs_75_and_90() -> None:
    config = recipe("cifar10/pgd")
    before_and_after = [learning_rate(config, epoch * 391 + shift, 391) for epoch in (75, 90) for shift in (-1, 0)]
    assert before_and_after == pytest.approx([0.1, 0.01, 0.01, 0.001])
    released = recipe("cifar10/pgd", {"source": "code"})
    # "epoch >= 75", where the first epoch is 1
    assert [learning_rate(released, 74 * 391 + shift, 391) for shift in (-1, 0)] == pytest.approx([0.1, 0.01])


def test_smooth_schedules() -> None:
    cyclic, one_cycle, cosine = (
        rates(schedule="cyclic"),
        rates(schedule="onecycle", warmup="0.25"),
        rates(schedule="cosine"),
    )
    assert cyclic == pytest.approx(cyclic[::-1])
    assert max(cyclic) == pytest.approx(0.1, rel=0.01)
    assert one_cycle.index(max(one_cycle)) == 50 - 1 or one_cycle.index(max(one_cycle)) == 50
    assert cosine == sorted(cosine, reverse=True)
    assert cosine[99] + cosine[100] == pytest.approx(0.1, rel=1e-6)
    for values in (cyclic, one_cycle, cosine):
        assert 0 < min(values) < 0.01 * 0.1 * 3
    assert rates(schedule="constant") == [0.1] * 200
    assert rates(schedule="onecycle", warmup="0")[0] == pytest.approx(0.1, rel=0.01)
    assert rates(schedule="onecycle", warmup="1")[-1] == pytest.approx(0.1, rel=0.01)


def test_exponential_average_follows_its_recursion() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    average = ExponentialAverage(model, 0.9)
    expected = model[0].weight.detach().clone()
    statistics = torch.zeros(2)
    for count in range(1, 200):
        with torch.no_grad():
            model[0].weight.fill_(float(count))
            model[1].running_mean.fill_(float(count))  # type: ignore[operator, union-attr]
        average.after_update(model, torch.tensor(count))
        decay = min(0.9, (1 + count) / (10 + count))
        expected = decay * expected + (1 - decay) * count
        statistics = decay * statistics + (1 - decay) * count
    torch.testing.assert_close(average.model[0].weight, expected, check_stride=False)  # type: ignore[index]
    torch.testing.assert_close(average.model[1].running_mean, statistics)  # type: ignore[index]


def test_stochastic_average_is_the_mean_of_epochs_with_fresh_statistics() -> None:
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3))
    average = StochasticAverage(model, start=3)
    images = [torch.randn(8, 2, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    for epoch in range(1, 6):
        with torch.no_grad():
            model[0].weight.fill_(float(epoch))
        average.after_epoch(model, epoch, images)
    assert torch.allclose(average.model[0].weight, torch.full((3, 2), 4.0))  # type: ignore[index]
    outputs = [x @ torch.full((2, 3), 4.0) for x in images]
    torch.testing.assert_close(average.model[1].running_mean, torch.stack([o.mean(0) for o in outputs]).mean(0))  # type: ignore[index]
    torch.testing.assert_close(average.model[1].running_var, torch.stack([o.var(0) for o in outputs]).mean(0))  # type: ignore[index]


@pytest.mark.parametrize("sizes", [(8, 8, 8), (11, 11, 2), (12, 11, 1), (23, 1), (24,)])
def test_statistics_do_not_depend_on_the_batches(sizes: tuple[int, ...]) -> None:
    """An image counts as much in a small last batch; alone, and with one pixel left, it has no variance."""
    model = nn.Sequential(nn.BatchNorm2d(2, momentum=0.3))
    images = (
        torch.randn(24, 2, 1, 1, generator=torch.Generator().manual_seed(0)) + torch.arange(24)[:, None, None, None]
    )
    measure_statistics(model, iter(images.split(sizes)))
    used = images[: 24 - (sizes[-1] == 1)].flatten(1)
    norm = model[0]
    assert isinstance(norm, nn.BatchNorm2d)
    torch.testing.assert_close(norm.running_mean, used.mean(0))
    parts = [part.flatten(1) for part in images.split(sizes) if len(part) > 1]
    weighed = sum(len(part) * part.var(0) for part in parts) / len(used)
    torch.testing.assert_close(norm.running_var, weighed)
    assert norm.momentum == 0.3


def test_measuring_statistics_restores_mode_and_momentum() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2)).eval()
    measure_statistics(model, [torch.randn(4, 2)])
    assert not model.training
    assert model[0].momentum == 0.1


def test_no_average_deploys_the_model_itself() -> None:
    model = nn.Linear(1, 1)
    assert make_average(recipe("digits/pgd"), model).model is model
    assert isinstance(make_average(recipe("digits/pgd", {"swa.start": "3"}), model), StochasticAverage)


def test_weight_perturbation_climbs_the_loss_and_comes_back() -> None:
    """The perturbed weights are w + gamma ||w|| g / ||g||, for matrices only; BatchNorm keeps its statistics."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
    x, y = torch.randn(8, 4).double(), torch.randint(2, (8,))

    def loss() -> torch.Tensor:
        return nn.functional.cross_entropy(model(x), y)

    reference = copy.deepcopy(model)
    gradients = torch.autograd.grad(nn.functional.cross_entropy(reference(x), y), list(reference.parameters()))
    before = copy.deepcopy(model.state_dict())
    clean = loss().item()
    with worst_weights(model, loss, 0.05):
        for (name, now), gradient in zip(model.named_parameters(), gradients, strict=True):
            old = before[name]
            moved = old + 0.05 * old.norm() * gradient / gradient.norm() if old.dim() > 1 else old
            torch.testing.assert_close(now.detach(), moved)
        assert loss().item() > clean
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_weight_perturbation_passes_over_weights_that_play_no_part() -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "spare": nn.Linear(4, 3)})
    before = copy.deepcopy(model.state_dict())
    with worst_weights(model, lambda: model["used"](torch.ones(2, 4)).pow(2).mean(), 0.05):
        changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"used.weight"}


def test_weight_perturbation_leaves_statistics_to_the_training_pass() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    before = {name: value.clone() for name, value in model[1].named_buffers()}
    with worst_weights(model, lambda: model(torch.randn(8, 4)).pow(2).mean(), 0.05):
        pass
    for name, value in model[1].named_buffers():
        assert torch.equal(value, before[name])


def test_finite_guard_names_the_first_bad_step() -> None:
    guard = FiniteGuard(torch.device("cpu"), updates_per_epoch=10, updates_per_batch=2)
    guard.watch(torch.tensor(1.0), torch.tensor(0))
    guard.check()
    guard.watch(torch.tensor(float("nan")), torch.tensor(23))
    guard.watch(torch.tensor(float("inf")), torch.tensor(24))
    with pytest.raises(HardsphereError, match=r"step 24 \(epoch 3, batch 2\)"):
        guard.check()


def test_pgd_accuracy_of_a_linear_model() -> None:
    """The probe of the collapse check on samples on both sides of the closed-form distance."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))  # class 0 where the mean pixel is above 0.5
    model[1].load_state_dict({"weight": torch.tensor([[1.0] * 4, [0.0] * 4]), "bias": torch.tensor([-2.0, 0.0])})
    means = torch.tensor([0.55, 0.65, 0.75, 0.85])
    batch = Batch(
        means[:, None, None, None].expand(4, 1, 2, 2).clone(), torch.zeros(4, dtype=torch.long), torch.arange(4)
    )
    assert pgd_accuracy(model, batch, Ball("linf", 0.2), seed=0) == 0.5
