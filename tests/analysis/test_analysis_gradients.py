"""Gradient norms per layer (Fig. 3) against closed forms and a plain loop over the samples."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from analysis_models import Pixels, Smooth, head_of, headed, images
from torch import Tensor, nn

from hardsphere.analysis import GradientRatio, adversarial_examples, gradient_ratio
from hardsphere.analysis.gradients import weights_in_order
from hardsphere.errors import HardsphereError
from hardsphere.models import build
from hardsphere.threat import Ball

BALL = Ball("linf", 0.1)


def test_softmax_regression_has_the_gradient_f_minus_label_times_x() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 6, dtype=torch.float64, generator=generator)
    model, x, y = Pixels(weight), images(9, 1, 2, 3), torch.arange(9) % 4
    found = gradient_ratio(model, x, y, BALL, steps=3, seed=5)

    def expected(x: Tensor) -> Tensor:
        flat = x.flatten(1)
        residual = torch.softmax(flat @ weight.T, 1) - torch.eye(4, dtype=torch.float64)[y]
        return (residual.norm(dim=1) * flat.norm(dim=1))[:, None]

    x_adv = adversarial_examples(model, x, y, BALL, steps=3, seed=5)
    assert (x_adv - x).abs().amax() > 0.05
    assert found.layers == ("fc.weight",)
    torch.testing.assert_close(found.clean, expected(x))
    torch.testing.assert_close(found.adversarial, expected(x_adv))
    torch.testing.assert_close(found.ratios, expected(x_adv) / expected(x))


@pytest.mark.parametrize("head", ["plain", "HE", "m-HE"])
@pytest.mark.parametrize("chunk", [1, 4])
def test_norms_are_those_of_a_loop_over_the_training_loss(head: str, chunk: int) -> None:
    model, x, y = headed(Smooth(), head), images(7, 3, 2, 2), torch.arange(7) % 5
    found = gradient_ratio(model, x, y, BALL, steps=2, chunk=chunk, batch=5)
    x_adv = adversarial_examples(model, x, y, BALL, steps=2)
    parameters = dict(model.named_parameters())
    assert found.layers == ("first.weight", "second.weight", "fc.weight")
    for values, points in ((found.clean, x), (found.adversarial, x_adv)):
        for k in range(len(x)):
            logits = _training_logits(model, head, points[k : k + 1], y[k])
            loss = F.cross_entropy(logits, y[k : k + 1])
            gradients = torch.autograd.grad(loss, [parameters[name] for name in found.layers])
            torch.testing.assert_close(values[k], torch.stack([g.pow(2).sum().sqrt() for g in gradients]))


def _training_logits(model: nn.Module, head: str, x: Tensor, label: Tensor) -> Tensor:
    """s * (cos - m 1_y), or s * (-theta - m 1_y), written out (eq. 6)."""
    if head == "plain":
        return model(x)
    z, weight = model.body(x), head_of(model).weight
    cosines = (z @ weight.T) / (z.norm() * weight.norm(dim=1))
    spoken = cosines if head == "HE" else -torch.acos(cosines)
    return 6.0 * (spoken - 0.2 * torch.eye(5, dtype=torch.float64)[label])


def test_layers_come_in_the_order_of_the_forward_pass() -> None:
    model = build("preactresnet18-4", num_classes=3, seed=0)
    layers = list(weights_in_order(model.eval(), torch.rand(1, 3, 8, 8)))
    assert layers[:2] == ["network.conv1.weight", "network.layer1.0.conv1.weight"]
    assert layers[-1] == "network.linear.weight"
    # The shortcut is registered after the convolutions of its block and called before them.
    start = layers.index("network.layer2.0.shortcut.0.weight")
    assert layers[start + 1 : start + 3] == ["network.layer2.0.conv1.weight", "network.layer2.0.conv2.weight"]
    assert len(layers) == sum(parameter.dim() > 1 for parameter in model.parameters())


def test_a_shared_weight_counts_once_and_an_unused_one_not_at_all() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(4, 4)
            self.last = nn.Linear(4, 4)
            self.first = nn.Linear(4, 4)
            self.last.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.first(x.flatten(1))))

    assert list(weights_in_order(Tied(), torch.rand(1, 1, 2, 2))) == ["first.weight"]


def test_summary_leaves_out_samples_without_a_clean_gradient() -> None:
    clean = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64)
    adversarial = torch.tensor([[5.0], [3.0], [2.0]], dtype=torch.float64)
    layer = GradientRatio(("w",), clean, adversarial, 10).to_dict()["layers"]["w"]
    assert layer["ratio"]["n"] == 2
    assert layer["ratio"]["mean"] == layer["ratio"]["p50"] == 2.0  # of 3 and 1
    assert layer["ratio_of_means"] == pytest.approx(10 / 3)
    json.dumps(layer, allow_nan=False)


def test_errors_are_sentences() -> None:
    model, x, y = Smooth(), images(2, 3, 2, 2), torch.tensor([0, 1])
    with pytest.raises(HardsphereError, match="chunk is 0"):
        gradient_ratio(model, x, y, BALL, chunk=0)
    with pytest.raises(HardsphereError, match="batch is 0"):
        gradient_ratio(model, x, y, BALL, batch=0)
    with pytest.raises(HardsphereError, match="must lie in"):
        gradient_ratio(model, x + 1, y, BALL)
