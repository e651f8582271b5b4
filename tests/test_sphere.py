"""The method against independent formulas and autograd, in float64: equations 4 to 6 and 14 to 16, Lemmas 1 and 2."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

from hardsphere.errors import HardsphereError
from hardsphere.models import HeadSpec, build
from hardsphere.sphere import (
    ScaledView,
    SphereHead,
    at_scale,
    attach,
    final_linear,
    find_head,
    margin_cross_entropy,
    paper_view,
)
from hardsphere.threat import NORMS, Ball

DIM, CLASSES, BATCH = 7, 5, 6
NORMALISATIONS = {"FN": (True, False), "WN": (False, True), "FN+WN": (True, True)}
PRODUCTS = {"aten.mm.default", "aten.addmm.default"}
DUAL = {"linf": 1.0, "l2": 2.0, "l1": math.inf}


def head_of(feature_norm: bool = True, weight_norm: bool = True, **options: float) -> SphereHead:
    torch.manual_seed(1)
    return SphereHead(DIM, CLASSES, feature_norm=feature_norm, weight_norm=weight_norm, **options).double()


@pytest.fixture
def z() -> Tensor:
    return torch.randn(BATCH, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 3


@pytest.fixture
def y() -> Tensor:
    return torch.tensor([0, 1, 2, 3, 4, 1])


class Body(nn.Module):
    """A smooth feature extractor z(x; omega), so that gradients with respect to x and omega can be compared."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(12, 9).double()
        self.second = nn.Linear(9, DIM).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x.flatten(1))))


def images() -> Tensor:
    return torch.rand(BATCH, 3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


# The head


@pytest.mark.parametrize("norms", NORMALISATIONS)
def test_output_is_scale_times_the_normalised_product(norms: str, z: Tensor) -> None:
    feature_norm, weight_norm = NORMALISATIONS[norms]
    head = head_of(feature_norm, weight_norm, scale=11.0)
    expected = torch.empty(BATCH, CLASSES, dtype=torch.float64)
    for k in range(BATCH):
        for label in range(CLASSES):
            value = z[k].dot(head.weight[label])
            value = value / z[k].dot(z[k]).sqrt() if feature_norm else value
            value = value / head.weight[label].dot(head.weight[label]).sqrt() if weight_norm else value
            expected[k, label] = 11 * value
    torch.testing.assert_close(head(z), expected)
    torch.testing.assert_close(head.unscaled(z), expected / 11)


def test_cosines_lie_on_the_circle_and_do_not_depend_on_lengths(z: Tensor) -> None:
    head = head_of()
    cosines = head.cosines(z)
    assert cosines.abs().max() <= 1 + 1e-12
    torch.testing.assert_close(head.cosines(z * 37), cosines)
    with torch.no_grad():
        head.weight.mul_(torch.rand(CLASSES, 1) + 0.5)
    torch.testing.assert_close(head.cosines(z), cosines)
    along = head.weight.detach() * 2
    torch.testing.assert_close(head.cosines(along).diagonal(), torch.ones(CLASSES, dtype=torch.float64))
    torch.testing.assert_close(head.cosines(-along).diagonal(), -torch.ones(CLASSES, dtype=torch.float64))
    assert head(along).abs().max() <= head.scale * (1 + 1e-12)


@pytest.mark.parametrize("angular", [False, True])
def test_the_derivative_that_is_written_out(angular: bool) -> None:
    """With class vectors normalised ahead a head says the same, and has the same slope by the feature as autograd's."""
    torch.manual_seed(0)
    head = SphereHead(7, CLASSES, angular=angular).double()
    head.weight.requires_grad_(False)
    z = (3 * torch.randn(5, 7, dtype=torch.float64)).requires_grad_()
    weights = torch.randn(5, CLASSES, dtype=torch.float64)
    expected = head(z)
    (slope,) = torch.autograd.grad((weights * expected).sum(), z)
    head.normalise_ahead()
    found = head(z)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad((weights * found).sum(), z)[0], slope)
    assert torch.autograd.gradcheck(head, z)
    across = (slope * z).sum(1) / (slope.norm(dim=1) * z.norm(dim=1))
    torch.testing.assert_close(across, torch.zeros_like(across), rtol=0, atol=1e-12)  # eq. 13: none of it along z


def test_a_feature_of_no_length_with_class_vectors_normalised_ahead() -> None:
    head = SphereHead(7, CLASSES)
    head.weight.requires_grad_(False)
    z = torch.zeros(2, 7, requires_grad=True)
    (slope,) = torch.autograd.grad(head(z).sum(), z)
    head.normalise_ahead()
    assert torch.equal(head(z), torch.zeros(2, CLASSES))
    torch.testing.assert_close(torch.autograd.grad(head(z).sum(), z)[0], slope)


def test_cosines_are_cosines_whatever_norms_the_head_uses(z: Tensor) -> None:
    for feature_norm, weight_norm in [*NORMALISATIONS.values(), (False, False)]:
        head = head_of(feature_norm, weight_norm)
        torch.testing.assert_close(head.cosines(z), F.cosine_similarity(z[:, None], head.weight[None], dim=-1))


def test_a_head_without_norms_is_the_linear_layer(z: Tensor) -> None:
    head = head_of(False, False, scale=15.0, margin=0.2)
    assert head.scale == 1
    assert head.margin == 0
    assert head.bias is not None
    with torch.no_grad():
        head.bias.uniform_()
    torch.testing.assert_close(head(z), F.linear(z, head.weight, head.bias))
    assert head.with_margin(z, torch.zeros(BATCH, dtype=torch.long)) is z


@pytest.mark.parametrize("norms", NORMALISATIONS)
def test_a_norm_takes_the_bias_away(norms: str) -> None:
    head = head_of(*NORMALISATIONS[norms])
    assert head.bias is None
    assert list(head.state_dict()) == ["weight"]


def test_the_angular_head_speaks_minus_theta(z: Tensor) -> None:
    head = head_of(angular=True, scale=4.0)
    theta = torch.acos(F.cosine_similarity(z[:, None], head.weight[None], dim=-1))
    torch.testing.assert_close(head(z), -4 * theta)
    assert torch.equal(head(z).argmax(1), head.cosines(z).argmax(1))
    assert (head.unscaled(z) <= 0).all()
    assert (head.unscaled(z) >= -math.pi).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_guarded_arccos_is_finite_where_its_slope_is_not(sign: float, dtype: torch.dtype) -> None:
    head = head_of(angular=True).to(dtype)
    z = (sign * 3 * head.weight.detach()).requires_grad_()
    logits = head(z)
    gradients = torch.autograd.grad(F.cross_entropy(logits, torch.arange(CLASSES)), [z, head.weight])
    assert logits.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients)
    # The guard of 1e-6 on the cosine is sqrt(2e-6) on the angle.
    ends = logits.diagonal() / head.scale + (0 if sign > 0 else math.pi)
    assert ends.abs().max() < 2e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_features_give_float32_logits(dtype: torch.dtype, z: Tensor) -> None:
    for options in ({}, {"angular": True}, {"feature_norm": False}, {"weight_norm": False}):
        head = head_of(**options).to(dtype)
        logits = head(z.to(dtype))
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, head.float()(z.to(dtype).float()))


def test_autocast_leaves_the_head_in_float32(z: Tensor) -> None:
    for options in ({}, {"angular": True}, {"feature_norm": False}, {"weight_norm": False}):
        model = nn.Sequential(nn.Linear(DIM, DIM), head_of(**options)).float()
        with torch.autocast("cpu", torch.bfloat16):
            feature = model[0](z.float())
            logits = model(z.float())
        assert feature.dtype == torch.bfloat16
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, model[1](feature.float()))


def test_a_feature_of_zero_gives_finite_logits() -> None:
    for angular in (False, True):
        assert head_of(angular=angular)(torch.zeros(1, DIM, dtype=torch.float64)).isfinite().all()


@pytest.mark.parametrize("angular", [False, True])
def test_tracing_the_head_breaks_no_graph(angular: bool, z: Tensor, y: Tensor) -> None:
    _compare_compiled(head_of(angular=angular), z, y, backend="aot_eager")


@pytest.mark.check
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it sets up its compiler
@pytest.mark.parametrize("angular", [False, True])
def test_the_compiled_head_is_the_head(angular: bool, z: Tensor, y: Tensor) -> None:
    _compare_compiled(head_of(angular=angular), z, y, backend="inductor")


def _compare_compiled(head: SphereHead, z: Tensor, y: Tensor, backend: str) -> None:
    def loss(feature: Tensor) -> Tensor:
        return margin_cross_entropy(head, head(feature), y).sum()

    z.requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend=backend, fullgraph=True)
    for actual, expected in zip(
        torch.autograd.grad(compiled(z), [z, head.weight]), torch.autograd.grad(loss(z), [z, head.weight]), strict=True
    ):
        torch.testing.assert_close(actual, expected)


HEADS: dict[str, dict[str, bool]] = {
    "plain": {"feature_norm": False, "weight_norm": False},
    "FN": {"weight_norm": False},
    "WN": {"feature_norm": False},
    "HE": {},
    "m-HE": {"angular": True},
}


def _under_attack(head: SphereHead, z: Tensor, y: Tensor) -> tuple[Tensor, set[str]]:
    """The gradient by z through a compiled head, and the operations it is made of."""
    asked: set[str] = set()

    def note(graph: fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        asked.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda feature: margin_cross_entropy(head, head(feature), y).sum(),
        backend=aot_autograd(fw_compiler=note, bw_compiler=note),
        fullgraph=True,
    )
    z = z.clone().requires_grad_()
    return torch.autograd.grad(compiled(z), z)[0], asked


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", HEADS)
def test_under_attack_a_compiled_head_sums(name: str, z: Tensor, y: Tensor) -> None:
    """Frozen class vectors, few of them: no product of matrices, and the gradient that the formula has."""
    head = head_of(**HEADS[name])
    z.requires_grad_()
    (expected,) = torch.autograd.grad(margin_cross_entropy(head, head(z), y).sum(), z)
    head.requires_grad_(False)
    if head.weight_norm:
        head.normalise_ahead()
    gradient, asked = _under_attack(head, z.detach(), y)
    torch.testing.assert_close(gradient, expected)
    assert not asked & PRODUCTS


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("classes", "frozen"), [(5, False), (100, True)])
def test_what_learns_and_what_is_large_is_left_to_a_library(classes: int, frozen: bool, z: Tensor, y: Tensor) -> None:
    head = SphereHead(40, classes).double().requires_grad_(not frozen)
    assert _under_attack(head, z.repeat(1, 6)[:, :40], y)[1] & PRODUCTS


@pytest.mark.parametrize("norms", [(True, False), (False, True), (False, False)])
def test_angles_need_both_norms(norms: tuple[bool, bool]) -> None:
    with pytest.raises(HardsphereError, match="needs both feature_norm and weight_norm"):
        SphereHead(DIM, CLASSES, feature_norm=norms[0], weight_norm=norms[1], angular=True)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_that_is_none(scale: float) -> None:
    with pytest.raises(HardsphereError, match="scale"):
        SphereHead(DIM, CLASSES, scale=scale)


@pytest.mark.parametrize("margin", [-0.1, math.inf, math.nan])
def test_a_margin_that_is_none(margin: float) -> None:
    with pytest.raises(HardsphereError, match="margin"):
        SphereHead(DIM, CLASSES, margin=margin)


def test_the_head_says_what_it_is() -> None:
    assert "7 -> 5, cos, norms=FN+WN, scale=15, margin=0.2" in repr(SphereHead(DIM, CLASSES))
    assert "-theta" in repr(SphereHead(DIM, CLASSES, angular=True))
    assert "inner product, norms=WN" in repr(SphereHead(DIM, CLASSES, feature_norm=False))
    assert "norms=none" in repr(SphereHead(DIM, CLASSES, feature_norm=False, weight_norm=False))


# The margin loss, eq. 6


@pytest.mark.parametrize(("norms", "angular"), [("FN", False), ("WN", False), ("FN+WN", False), ("FN+WN", True)])
def test_margin_loss_by_hand(norms: str, angular: bool, z: Tensor, y: Tensor) -> None:
    head = head_of(*NORMALISATIONS[norms], scale=9.0, margin=0.3, angular=angular)
    values = head.unscaled(z)
    losses = []
    for k, label in enumerate(y.tolist()):
        numerator = torch.exp(9 * (values[k, label] - 0.3))
        others = sum(torch.exp(9 * values[k, other]) for other in range(CLASSES) if other != label)
        losses.append(-torch.log(numerator / (numerator + others)))
    torch.testing.assert_close(margin_cross_entropy(head, head(z), y), torch.stack(losses))


def test_the_margin_acts_in_the_loss_alone(z: Tensor, y: Tensor) -> None:
    plain, with_margin = head_of(margin=0.0), head_of(margin=0.4)
    assert torch.equal(plain(z), with_margin(z))
    torch.testing.assert_close(margin_cross_entropy(plain, plain(z), y), F.cross_entropy(plain(z), y, reduction="none"))
    assert (margin_cross_entropy(with_margin, plain(z), y) > margin_cross_entropy(plain, plain(z), y)).all()


def test_the_loss_of_a_model_without_head_is_cross_entropy(z: Tensor, y: Tensor) -> None:
    smoothed = margin_cross_entropy(None, z, y, label_smoothing=0.1)
    torch.testing.assert_close(smoothed, F.cross_entropy(z, y, reduction="none", label_smoothing=0.1))
    assert margin_cross_entropy(None, z.bfloat16(), y).dtype == torch.float32


def test_labels_may_be_probabilities(z: Tensor, y: Tensor) -> None:
    head = head_of(margin=0.3)
    one_hot = F.one_hot(y, CLASSES).double()
    torch.testing.assert_close(margin_cross_entropy(head, head(z), one_hot), margin_cross_entropy(head, head(z), y))
    mixed = 0.25 * one_hot + 0.75 / CLASSES
    expected = -(mixed * (head.scale * (head.cosines(z) - 0.3 * mixed)).log_softmax(1)).sum(1)
    torch.testing.assert_close(margin_cross_entropy(head, head(z), mixed), expected)


# What the norms do to the gradients


def test_gradients_through_both_norms_are_tangent_projections(z: Tensor, y: Tensor) -> None:
    head = head_of(scale=6.0, margin=0.2)
    z.requires_grad_()
    loss = margin_cross_entropy(head, head(z), y).sum()
    to_z, to_weight = torch.autograd.grad(loss, [z, head.weight])

    with torch.no_grad():
        z_unit = z / z.norm(dim=1, keepdim=True)
        w_unit = head.weight / head.weight.norm(dim=1, keepdim=True)
        one_hot = F.one_hot(y, CLASSES).double()
        slope = 6 * ((6 * (z_unit @ w_unit.T - 0.2 * one_hot)).softmax(1) - one_hot)  # dL / dcos(theta)
        pull_z, pull_w = slope @ w_unit, slope.T @ z_unit
        expected_z = (pull_z - (pull_z * z_unit).sum(1, keepdim=True) * z_unit) / z.norm(dim=1, keepdim=True)
        expected_w = (pull_w - (pull_w * w_unit).sum(1, keepdim=True) * w_unit) / head.weight.norm(dim=1, keepdim=True)
    torch.testing.assert_close(to_z, expected_z)
    torch.testing.assert_close(to_weight, expected_w)


@pytest.mark.parametrize("angular", [False, True])
def test_both_norms_by_finite_differences(angular: bool, z: Tensor, y: Tensor) -> None:
    head = head_of(angular=angular)

    def loss(feature: Tensor, weight: Tensor) -> Tensor:
        logits = torch.func.functional_call(head, {"weight": weight}, (feature,))
        return margin_cross_entropy(head, logits, y)

    assert torch.autograd.gradcheck(loss, (z.requires_grad_(), head.weight.detach().clone().requires_grad_()))


@pytest.mark.parametrize("norms", NORMALISATIONS)
def test_feature_norm_frees_z_and_weight_norm_frees_w_of_radial_gradients(norms: str, z: Tensor, y: Tensor) -> None:
    feature_norm, weight_norm = NORMALISATIONS[norms]
    head = head_of(feature_norm, weight_norm)
    z.requires_grad_()
    to_z, to_weight = torch.autograd.grad(margin_cross_entropy(head, head(z), y).sum(), [z, head.weight])
    radial_z = F.cosine_similarity(to_z, z, dim=1).abs()
    radial_w = F.cosine_similarity(to_weight, head.weight, dim=1).abs()
    assert (radial_z < 1e-12).all() if feature_norm else (radial_z > 1e-4).all()
    assert (radial_w < 1e-12).all() if weight_norm else (radial_w > 1e-4).all()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("angular", [False, True])
def test_the_margin_is_inert_in_steepest_steps(norm: str, angular: bool, y: Tensor) -> None:
    """The margin multiplies each sample's gradient by a positive number, which U_p does not see."""
    body, head, ball = Body(), head_of(margin=0.4, angular=angular), Ball(norm, 0.1)
    x = images().requires_grad_()
    logits = head(body(x))
    (plain,) = torch.autograd.grad(F.cross_entropy(logits, y, reduction="sum"), x, retain_graph=True)
    (with_margin,) = torch.autograd.grad(margin_cross_entropy(head, logits, y).sum(), x)
    ratio = (with_margin / plain).flatten(1)
    torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio))
    assert (ratio > 1).all()
    torch.testing.assert_close(ball.steepest(with_margin), ball.steepest(plain))


# Lemma 1: the first-order adversary


@pytest.mark.parametrize("norm", NORMS)
def test_lemma_1_the_steepest_step_maximises_the_linearised_loss(norm: str, y: Tensor) -> None:
    body, head, eps = Body(), head_of(), 0.03
    ball = Ball(norm, eps)
    x = images().requires_grad_()

    def losses(images: Tensor) -> Tensor:
        return F.cross_entropy(head(body(images)), y, reduction="none")

    value = losses(x)
    (gradient,) = torch.autograd.grad(value.sum(), x)
    value, x = value.detach(), x.detach()

    def linearised(images: Tensor) -> Tensor:
        return value + (gradient * (images - x)).flatten(1).sum(1)

    best = ball.step(x, gradient, eps)
    torch.testing.assert_close(ball.distance(x, best), torch.full((BATCH,), eps, dtype=torch.float64))
    dual = gradient.flatten(1).norm(p=DUAL[norm], dim=1)
    torch.testing.assert_close(linearised(best), value + eps * dual)

    generator = torch.Generator().manual_seed(5)
    for trial in range(300):
        direction = torch.randn(x.shape, dtype=torch.float64, generator=generator)
        direction = direction * direction.abs() ** (trial % 3)  # also spiky ones, which the l1 ball favours
        feasible = x + direction * (eps / ball.size(direction)).view(-1, 1, 1, 1)
        assert (linearised(feasible) <= linearised(best) + 1e-12).all()

    # The increment of a step of eq. 8 is eta * ||gradient||_q to first order.
    eta = 1e-6
    with torch.no_grad():
        increment = losses(ball.step(x, gradient, eta)) - value
    torch.testing.assert_close(increment / eta, dual, rtol=1e-4, atol=1e-6)


# Lemma 2: the gradient of the cross-entropy


def _logit_gradients(body: Body, weight: Tensor, x: Tensor) -> Tensor:
    """d(W_l . z) / dx for each class, of shape (L, B, ...)."""
    x = x.detach().requires_grad_()
    products = body(x) @ weight.T
    return torch.stack(
        [torch.autograd.grad(products[:, label].sum(), x, retain_graph=True)[0] for label in range(CLASSES)]
    )


@pytest.mark.parametrize("one_hot", [False, True])
def test_lemma_2_the_gradient_is_a_sum_over_residual_logits(one_hot: bool, y: Tensor) -> None:
    body, head = Body(), head_of(False, False)
    assert head.bias is not None
    with torch.no_grad():
        head.bias.uniform_(-1, 1)
        head.weight.mul_(4)
    x_adv = (images() + 0.1).requires_grad_()
    target = F.one_hot(y, CLASSES).double() if one_hot else head(body(images())).softmax(1).detach()
    log_prediction = head(body(x_adv)).log_softmax(1)
    (gradient,) = torch.autograd.grad(-(target * log_prediction).sum(), x_adv)

    prediction, of_logit = log_prediction.exp().detach(), _logit_gradients(body, head.weight, x_adv)
    expected = torch.zeros_like(gradient)
    if one_hot:
        for k, label in enumerate(y.tolist()):
            for other in range(CLASSES):
                if other != label:
                    expected[k] -= prediction[k, other] * (of_logit[label, k] - of_logit[other, k])
    else:
        for i in range(CLASSES):
            for j in range(CLASSES):
                if i != j:
                    share = (target[:, i] * prediction[:, j]).view(-1, 1, 1, 1)
                    expected -= share * (of_logit[i] - of_logit[j])
    torch.testing.assert_close(gradient, expected)


# Equations 14 to 16: what the parameters learn


def _gradient(value: Tensor, parameters: list[Tensor]) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, parameters, retain_graph=True)])


def test_equation_14_without_feature_norm_part_of_the_step_goes_into_the_length() -> None:
    body, head, label = Body(), head_of(False, False), 2
    omega = list(body.parameters())
    z = body(images()[:1])[0]
    prediction = head(z).softmax(0).detach()
    actual = -_gradient(F.cross_entropy(head(z), torch.tensor(label)), omega)

    expected = torch.zeros_like(actual)
    for other in set(range(CLASSES)) - {label}:
        residual = (head.weight[label] - head.weight[other]).detach()
        cosine = F.cosine_similarity(residual, z, dim=0)
        along_length = cosine.detach() * _gradient(z.norm(), omega)
        along_angle = z.norm().detach() * _gradient(cosine, omega)
        expected += prediction[other] * residual.norm() * (along_length + along_angle)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("scale", [1.0, 15.0])
def test_equation_15_with_feature_norm_only_the_angle_learns(scale: float) -> None:
    """The paper writes it at scale 1; the scale multiplies the logits and so the gradient."""
    body, head, label = Body(), head_of(True, False, scale=scale), 3
    omega = list(body.parameters())
    z = body(images()[:1])[0]
    prediction = head(z).softmax(0).detach()
    actual = -_gradient(F.cross_entropy(head(z), torch.tensor(label)), omega)

    expected = torch.zeros_like(actual)
    for other in set(range(CLASSES)) - {label}:
        residual = (head.weight[label] - head.weight[other]).detach()
        cosine = F.cosine_similarity(residual, z, dim=0)
        expected += scale * prediction[other] * residual.norm() * _gradient(cosine, omega)
    torch.testing.assert_close(actual, expected)


def test_equation_16_a_class_vector_moves_to_its_class_and_from_what_is_taken_for_it(z: Tensor, y: Tensor) -> None:
    head = head_of(False, False)
    actual = -torch.autograd.grad(F.cross_entropy(head(z), y, reduction="sum"), head.weight)[0]
    prediction = head(z).softmax(1)
    for label in range(CLASSES):
        expected = z[y == label].sum(0) - (prediction[:, label, None] * z).sum(0)
        torch.testing.assert_close(actual[label], expected)


# Scale and views


def test_the_paper_view_speaks_raw_cosines(z: Tensor) -> None:
    for head in (head_of(scale=15.0), head_of(scale=15.0, angular=True), head_of(weight_norm=False, scale=15.0)):
        view = paper_view(head)
        assert isinstance(view, ScaledView)
        torch.testing.assert_close(view(z), head.unscaled(z))
        torch.testing.assert_close(at_scale(head, 30.0)(z), 2 * head(z))
        assert at_scale(head, 15.0) is head
        assert paper_view(view) is view
        torch.testing.assert_close(at_scale(view, 15.0)(z), head(z))
        assert find_head(view) is head


def test_views_share_parameters_and_mode() -> None:
    model = nn.Sequential(nn.Dropout(), head_of()).eval()
    view = paper_view(model)
    assert not view.training
    assert {id(p) for p in view.parameters()} == {id(p) for p in model.parameters()}
    view.train()
    assert model.training
    assert paper_view(model).training


def test_linear_models_have_no_other_scale() -> None:
    linear = nn.Linear(3, 2)
    assert paper_view(linear) is linear
    without_norms = head_of(False, False)
    assert at_scale(without_norms, 7.0) is without_norms
    assert find_head(linear) is None


# Attaching the head


class Own(nn.Module):
    """Someone's own module, with another linear layer registered after the classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(DIM, CLASSES)
        self.gate = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(x * torch.sigmoid(self.gate(x)))


class LikeTimm(Own):
    def get_classifier(self) -> nn.Module:
        return self.classifier


class LikeTorchvision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, DIM, 1)
        self.heads = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.heads(self.features(x).mean((2, 3)))


@pytest.mark.parametrize("name", ["cnn-2", "preactresnet18-2", "wrn-10-1"])
def test_attach_to_our_models(name: str) -> None:
    model = build(name, num_classes=4, in_channels=1, seed=0).eval()
    weight = model.get_submodule(final_linear(model)).weight.detach().clone()
    attached = attach(model, scale=3.0, margin=0.1, angular=True)
    assert attached is model
    head = find_head(model)
    assert head is model.get_submodule(final_linear(model))
    assert (head.scale, head.margin, head.angular, head.training) == (3.0, 0.1, True, False)
    assert torch.equal(head.weight, weight)
    assert model(torch.rand(2, 1, 9, 9)).shape == (2, 4)


def test_attach_to_a_sequence_a_bare_layer_and_torchvision() -> None:
    sequence = attach(nn.Sequential(nn.Flatten(), nn.Linear(8, DIM), nn.ReLU(), nn.Linear(DIM, CLASSES)))
    assert final_linear(sequence) == "3"
    assert isinstance(sequence[1], nn.Linear)
    assert sequence(torch.rand(2, 8)).abs().max() <= 15
    assert isinstance(attach(nn.Linear(DIM, CLASSES)), SphereHead)
    torchvision = attach(LikeTorchvision())
    assert isinstance(torchvision.heads[2], SphereHead)
    assert torchvision(torch.rand(2, 3, 4, 4)).shape == (2, CLASSES)


def test_attach_where_timm_says_the_classifier_is() -> None:
    for model in (LikeTimm(), ScaledView(LikeTimm(), 1.0), nn.Sequential(LikeTimm())):
        assert final_linear(attach(model)).endswith("classifier")
        assert [type(m).__name__ for m in model.modules()].count("SphereHead") == 1


def test_a_timm_backbone_under_a_classifier_of_ones_own() -> None:
    model = nn.Sequential(LikeTimm(), nn.Linear(CLASSES, 3))
    assert final_linear(model) == "1"
    model[0].get_classifier = nn.Identity  # timm with num_classes=0
    assert final_linear(model[0]) == "gate"


def test_attach_by_name() -> None:
    model = attach(Own(), layer="classifier")
    assert isinstance(model.classifier, SphereHead)
    assert final_linear(model) == "classifier"  # the head from now on, though another linear layer comes later
    assert model(torch.rand(2, DIM)).shape == (2, CLASSES)


def test_attach_again_and_with_other_classes() -> None:
    model = attach(nn.Sequential(nn.Linear(DIM, CLASSES).bfloat16()))
    weight = model[0].weight.clone()
    attach(model, feature_norm=False, weight_norm=False)
    assert torch.equal(model[0].weight, weight)
    assert model[0].weight.dtype == torch.bfloat16
    attach(model, num_classes=3)
    assert model[0].weight.shape == (3, DIM)
    linear = nn.Linear(DIM, CLASSES)
    unchanged = attach(linear, feature_norm=False, weight_norm=False)
    x = torch.rand(2, DIM)
    torch.testing.assert_close(unchanged(x), linear(x))


def test_attach_says_what_is_wrong() -> None:
    with pytest.raises(HardsphereError, match="no linear layer"):
        attach(nn.Sequential(nn.Conv2d(3, 2, 1)))
    with pytest.raises(HardsphereError, match="no layer named 'top'"):
        attach(Own(), layer="top")
    with pytest.raises(HardsphereError, match="is a Conv2d"):
        attach(LikeTorchvision(), layer="features")
    distilled = LikeTimm()
    distilled.get_classifier = lambda: (distilled.classifier, distilled.gate)
    with pytest.raises(HardsphereError, match="2 classifiers"):
        attach(distilled)


def test_the_head_inside_a_model_survives_a_state_dict() -> None:
    spec = HeadSpec(feature_norm=True, weight_norm=True, margin=0.2)
    model = build("cnn-2", num_classes=3, head=spec, seed=0).eval()
    other = build("cnn-2", num_classes=3, head=spec, seed=1).eval()
    other.load_state_dict(model.state_dict())
    x = torch.rand(2, 3, 8, 8)
    assert torch.equal(model(x), other(x))
