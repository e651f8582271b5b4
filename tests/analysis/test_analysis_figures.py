"""Every analysis and every figure on a small network with digits: what is drawn, and that the model stays as it was."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hardsphere import analysis
from hardsphere.analysis import figures
from hardsphere.data import load, to_float
from hardsphere.errors import HardsphereError
from hardsphere.models import HeadSpec, build
from hardsphere.threat import Ball

BALL = Ball("linf", 0.1)
PAIR = {"plain": HeadSpec(), "HE": HeadSpec(feature_norm=True, weight_norm=True, margin=0.2)}
RESULTS: dict[str, Callable[[nn.Module, Tensor, Tensor], Any]] = {
    "gradient_ratio": lambda model, x, y: analysis.gradient_ratio(model, x, y, BALL, steps=2),
    "step_direction": lambda model, x, y: analysis.step_direction(model, x, y, BALL, steps=2),
    "class_bias": lambda model, x, y: analysis.class_bias(model, x, y, BALL, steps=2),
    "gradient_weight": lambda model, x, y: analysis.gradient_weight(model, x, y, BALL, steps=2),
    "feature_geometry": lambda model, x, y: analysis.feature_geometry(model, x, y, x.flip(3)),
    "normalised_attack": lambda model, x, y: analysis.normalised_attack(model, x, y, BALL),
    "perturbations": lambda model, x, y: analysis.perturbations({"it": model}, x, y, BALL, steps=2),
    "transfer_matrix": lambda model, x, y: analysis.transfer_matrix({"it": model}, x, y, BALL, attacks=("pgd-2",)),
}


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    test = load("digits").test
    return to_float(test.pixels)[:40], test.labels[:40]


@pytest.fixture(scope="module")
def models(digits: tuple[Tensor, Tensor]) -> dict[str, nn.Module]:
    """A few steps of training, so that features, gradients and answers are not those of chance."""
    x, y = digits
    trained = {}
    for name, head in PAIR.items():
        model = build("cnn-4", num_classes=10, in_channels=1, image_size=8, head=head, seed=0)
        optimiser = torch.optim.Adam(model.parameters(), 0.02)
        for _ in range(30):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimiser.step()
        trained[name] = model.eval()
    return trained


@pytest.mark.parametrize("name", RESULTS)
def test_an_analysis_leaves_no_trace_and_sums_up_in_plain_values(
    name: str, digits: tuple[Tensor, Tensor], models: dict[str, nn.Module]
) -> None:
    model = models["HE"].train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    try:
        summed = RESULTS[name](model, *digits).to_dict()
        assert all(module.training for module in model.modules())
    finally:
        model.eval()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is not None for parameter in model.parameters())
    assert summed["n"] == 40
    assert json.loads(json.dumps(summed, allow_nan=False)) == summed


PER_MODEL = {
    "gradient_ratio": (figures.gradient_ratio_figure, 1),
    "step_direction": (figures.step_direction_figure, 3),
    "class_bias": (figures.class_bias_figure, 4),
    "gradient_weight": (figures.gradient_weight_figure, 2),
    "feature_geometry": (figures.feature_geometry_figure, 4),
}


@pytest.mark.parametrize("name", PER_MODEL)
def test_figures_of_two_models(name: str, digits: tuple[Tensor, Tensor], models: dict[str, nn.Module]) -> None:
    draw, panels = PER_MODEL[name]
    figure = draw({label: RESULTS[name](model, *digits) for label, model in models.items()})
    assert size_of_png(figure) > 10_000
    titled = [axes for axes in figure.axes if axes.get_title()]
    assert len(titled) == panels
    words = " ".join(text.get_text() for axes in titled for text in _texts(axes))
    for label in models:
        assert label in words
    with pytest.raises(HardsphereError, match="nothing to draw"):
        draw({})


def _texts(axes: Any) -> list[Any]:
    legend = axes.get_legend()
    return [axes.title, *(legend.get_texts() if legend else [])]


def size_of_png(figure: Any) -> int:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    assert file.getvalue().startswith(b"\x89PNG")
    return len(file.getvalue())


def test_gradient_figure_draws_the_mean_ratios(digits: tuple[Tensor, Tensor], models: dict[str, nn.Module]) -> None:
    found = {label: RESULTS["gradient_ratio"](model, *digits) for label, model in models.items()}
    (axes,) = figures.gradient_ratio_figure(found).axes
    lines = {line.get_label(): line.get_ydata() for line in axes.lines}
    for label, result in found.items():
        layers = result.to_dict()["layers"].values()
        assert list(lines[f"{label}, mean"]) == pytest.approx([layer["ratio"]["mean"] for layer in layers])
        assert list(lines[f"{label}, median"]) == pytest.approx([layer["ratio"]["p50"] for layer in layers])
    assert [tick.get_text() for tick in axes.get_xticklabels()] == [*(f"body.{k}" for k in (0, 3, 6, 9, 12)), "fc"]


def test_gradient_figure_has_its_legend_beside_the_lines() -> None:
    layers = tuple(f"layer{index}.weight" for index in range(20))
    ratios = torch.linspace(4, 2, 20).expand(30, -1)
    found = {f"PGD-AT + {head}": analysis.GradientRatio(layers, torch.ones(30, 20), ratios, 1) for head in ("", "HE")}
    figure = figures.gradient_ratio_figure(found)
    size_of_png(figure)  # places everything
    (axes,) = figure.axes
    legend = axes.get_legend()
    assert legend is not None
    assert legend.get_window_extent().x0 >= axes.get_window_extent().x1
    assert legend.get_window_extent().x1 <= figure.bbox.x1


def test_gradient_figure_refuses_networks_of_different_layers() -> None:
    one, two = (
        analysis.GradientRatio(layers, torch.ones(1, 1), torch.ones(1, 1), 1)
        for layers in (("a.weight",), ("b.weight",))
    )
    with pytest.raises(HardsphereError, match="different layers"):
        figures.gradient_ratio_figure({"one": one, "two": two})


def test_transfer_figure_writes_the_accuracies(digits: tuple[Tensor, Tensor], models: dict[str, nn.Module]) -> None:
    found = analysis.transfer_matrix(models, *digits, BALL, attacks=("pgd-3", "mim-3"))
    figure = figures.transfer_figure(found)
    assert size_of_png(figure) > 10_000
    for axes, attack in zip(figure.axes, found.attacks, strict=False):
        table = 100 * found.accuracies(attack)
        written = [text.get_text() for text in axes.texts]
        assert written == [f"{table[i, j]:.1f}" + "*" * (i == j) for i in range(2) for j in range(2)]


def test_normalised_attack_figure_draws_accuracies(digits: tuple[Tensor, Tensor], models: dict[str, nn.Module]) -> None:
    found = RESULTS["normalised_attack"](models["plain"], *digits)
    figure = figures.normalised_attack_figure(found)
    assert size_of_png(figure) > 5_000
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    rights = [found.right[k, variant] for variant in ("without", "fn", "fn_same_length") for k in (1, 2)]
    assert heights == pytest.approx([100 * float(right.double().mean()) for right in rights])


def test_perturbation_figure_shows_the_grid(digits: tuple[Tensor, Tensor], models: dict[str, nn.Module]) -> None:
    found = analysis.perturbations(models, *digits, BALL, steps=2)
    figure = figures.perturbation_figure(found, count=5)
    assert size_of_png(figure) > 5_000
    (axes,) = figure.axes
    assert torch.equal(torch.from_numpy(axes.images[0].get_array().data), found.grid(5)[0])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["clean image", "plain", "HE"]
