"""THE METHOD: hypersphere embedding (Pang et al., NeurIPS 2020, section 2.2).

A classifier ends in logits W.z + b. The hypersphere head normalises the feature z (FN), the class vectors W_l (WN), or
both (eq. 4), so that the logits become s * cos(theta_l) (eq. 5), and trains with a margin m on the true class (AM,
eq. 6). The modified form, m-HE, speaks -theta instead of cos(theta) (section 3.5).

Two deliberate differences from the released code. Normalisation is a differentiable function of the raw weights, never
an assignment to `.data`, so that weight averaging, weight perturbation, compilation and data parallelism see the true
parameters. And the deployed model answers at its training temperature s: on raw cosines the softmax is nearly flat and
a cross-entropy attack pushes towards the average of all other classes, which flatters the model. The paper's raw
cosines are an explicit view, `paper_view`.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hardsphere.errors import HardsphereError

# arccos has an infinite slope at +-1; 1e-6 is the smallest guard that float32 represents well next to 1.
_ARCCOS_GUARD = 1e-6

# What a feature is taken to be at least as long as, as in torch's own normalisation.
_SHORTEST = 1e-12

# So many class vectors and more are left to a library to multiply.
_FEW = 32


class SphereHead(nn.Module):
    """The last layer of a classifier on the hypersphere.

    Args:
        in_features: length of the feature z.
        num_classes: number of class vectors W_l.
        scale: s, the inverse temperature; it multiplies whenever one of the norms is on.
        margin: m, subtracted from the true class in the training loss only.
        feature_norm: FN, normalise z.
        weight_norm: WN, normalise each W_l.
        angular: m-HE, speak -theta instead of cos(theta); needs both norms.

    Attributes:
        directions: the class vectors as `normalise_ahead` found them, or None.
    """

    directions: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        scale: float = 15.0,
        margin: float = 0.2,
        feature_norm: bool = True,
        weight_norm: bool = True,
        angular: bool = False,
    ) -> None:
        super().__init__()
        if angular and not (feature_norm and weight_norm):
            raise HardsphereError(
                "The angular head (m-HE) speaks of angles, so it needs both feature_norm and weight_norm."
            )
        if not (scale > 0 and math.isfinite(scale)):
            raise HardsphereError(f"The head's scale is {scale}, but it must be a finite number above 0.")
        if not (margin >= 0 and math.isfinite(margin)):
            raise HardsphereError(f"The head's margin is {margin}, but it must be a finite number of at least 0.")
        self.in_features = in_features
        self.num_classes = num_classes
        self.feature_norm = feature_norm
        self.weight_norm = weight_norm
        self.angular = angular
        self.scale = float(scale) if self.normalised else 1.0
        self.margin = float(margin) if self.normalised else 0.0
        self.weight = nn.Parameter(torch.empty(num_classes, in_features))
        self.bias = None if self.normalised else nn.Parameter(torch.zeros(num_classes))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        self.register_buffer("directions", None, persistent=False)

    @property
    def normalised(self) -> bool:
        """Whether FN or WN is on; if neither is, this is an ordinary linear layer."""
        return self.feature_norm or self.weight_norm

    def class_vectors(self) -> Tensor:
        """W_l as the head uses them: of length 1 with WN (eq. 4)."""
        return self._current_vectors() if self.directions is None else self.directions

    def _current_vectors(self) -> Tensor:
        weight = at_least_float32(self.weight)
        return F.normalize(weight, dim=-1) if self.weight_norm else weight

    @torch.no_grad()
    def normalise_ahead(self) -> None:
        """Normalise the class vectors now, for all images until the next call: their weights stand still meanwhile."""
        vectors = self._current_vectors()
        if self.directions is None:
            self.directions = vectors.clone()
        else:
            self.directions.copy_(vectors)  # in its place: a recorded graph reads it there

    def cosines(self, z: Tensor) -> Tensor:
        """cos(theta_l) between the feature and each class vector (eq. 5), whatever norms the head itself uses."""
        z, weight = at_least_float32(z), at_least_float32(self.weight)
        with torch.autocast(z.device.type, enabled=False):
            return F.linear(F.normalize(z, dim=-1), F.normalize(weight, dim=-1))

    def unscaled(self, z: Tensor) -> Tensor:
        """The output at scale 1: cos(theta), -theta for m-HE, or the half-normalised product of FN or WN alone."""
        z = at_least_float32(z)
        with torch.autocast(z.device.type, enabled=False):
            if self.feature_norm and self.directions is not None:
                products = cast(Tensor, _Cosines.apply(z, self.directions))  # type: ignore[no-untyped-call]
            else:
                z = F.normalize(z, dim=-1) if self.feature_norm else z
                bias = None if self.bias is None else at_least_float32(self.bias)
                products = _products(z, self.class_vectors(), bias)
            return -torch.acos(products.clamp(_ARCCOS_GUARD - 1, 1 - _ARCCOS_GUARD)) if self.angular else products

    def forward(self, z: Tensor) -> Tensor:
        return self.scale * self.unscaled(z)

    def with_margin(self, logits: Tensor, y: Tensor) -> Tensor:
        """s * (cos(theta) - m * 1_y), the argument of the softmax in eq. 6; ``y`` holds labels or probabilities."""
        if self.margin == 0:
            return logits
        target = y.to(logits.dtype) if y.is_floating_point() else F.one_hot(y, logits.shape[-1]).to(logits.dtype)
        return logits - self.scale * self.margin * target

    def extra_repr(self) -> str:
        form = "-theta" if self.angular else "cos" if self.feature_norm and self.weight_norm else "inner product"
        norms = "+".join(name for name, on in (("FN", self.feature_norm), ("WN", self.weight_norm)) if on) or "none"
        constants = f"scale={self.scale:g}, margin={self.margin:g}"
        return f"{self.in_features} -> {self.num_classes}, {form}, norms={norms}, {constants}"


def margin_cross_entropy(head: SphereHead | None, logits: Tensor, y: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """L^m_CE (eq. 6) of each sample, in float32; the plain cross-entropy if there is no head."""
    logits = at_least_float32(logits)
    if head is not None:
        logits = head.with_margin(logits, y)
    return F.cross_entropy(logits, y, reduction="none", label_smoothing=label_smoothing)


def find_head(model: nn.Module) -> SphereHead | None:
    """The hypersphere head of a model, if it has one."""
    heads = [module for module in model.modules() if isinstance(module, SphereHead)]
    return heads[-1] if heads else None


class _Cosines(torch.autograd.Function):
    """cos(theta_l) against class vectors of length 1 that have no gradient (eq. 5), with the derivative written out.

    d cos_l / dz = (W_l - cos_l z / |z|) / |z|, the part of W_l across z (eq. 13). Its sum over the classes needs no
    more than the cosines; autograd, which goes through z / |z|, sums over all features once more, in a kernel of its
    own in each pass of an attack.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, directions: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(z, dim=-1, keepdim=True).clamp_min(_SHORTEST)
        direction = z / length
        cosines = _products(direction, directions)
        ctx.save_for_backward(direction, length, cosines, directions)
        return cosines

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        direction, length, cosines, directions = ctx.saved_tensors
        along = (gradient * cosines).sum(dim=-1, keepdim=True)
        return (_products(gradient, directions.mT) - along * direction) / length, None


def _products(x: Tensor, vectors: Tensor, bias: Tensor | None = None) -> Tensor:
    """The inner product of each row of x with each vector, plus the bias.

    Under attack the vectors are frozen and the network is compiled. There a sum becomes one kernel with what is around
    it, where the product of such narrow matrices is a kernel or two of its own, both ways, in each pass.
    """
    frozen = not (vectors.requires_grad and torch.is_grad_enabled())
    if not (torch.compiler.is_compiling() and frozen and min(vectors.shape) < _FEW):
        return F.linear(x, vectors, bias)
    sums = (x.unsqueeze(-2) * vectors).sum(dim=-1)
    return sums if bias is None else sums + bias


class ScaledView(nn.Module):
    """A model whose logits are multiplied by a constant; it shares the model's parameters, buffers and mode."""

    def __init__(self, model: nn.Module, factor: float) -> None:
        super().__init__()
        self.model = model
        self.factor = factor
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.model(x)) * self.factor


def at_scale(model: nn.Module, scale: float) -> nn.Module:
    """The model as it would speak at another scale; the model itself if its head is linear or at that scale already."""
    head = find_head(model)
    if head is None or not head.normalised:
        return model
    # The model may be such a view itself.
    spoken = math.prod((view.factor for view in model.modules() if isinstance(view, ScaledView)), start=head.scale)
    return model if math.isclose(spoken, scale) else ScaledView(model, scale / spoken)


def paper_view(model: nn.Module) -> nn.Module:
    """The model as the paper evaluates it: raw cosines (-theta for m-HE), scale 1; a linear head is unchanged.

    Cross-entropy attacks through this view are weak. Numbers measured here are of the `paper` protocol, never `honest`.
    """
    return at_scale(model, 1.0)


def attach(
    model: nn.Module,
    scale: float = 15.0,
    margin: float = 0.2,
    feature_norm: bool = True,
    weight_norm: bool = True,
    angular: bool = False,
    num_classes: int | None = None,
    layer: str | None = None,
) -> nn.Module:
    """Replace the final linear layer of a backbone by a `SphereHead`, in place, and return the model.

    The class vectors start from the layer's own weights if the number of classes stays the same.

    Args:
        model: any backbone that ends in a linear layer: ours, torchvision's, timm's, or one's own.
        num_classes: number of classes; that of the layer by default.
        layer: dotted name of the layer to replace; by default timm's classifier, or the last linear layer registered.
    """
    name = layer if layer is not None else final_linear(model)
    old = _submodule(model, name)
    if not isinstance(old, nn.Linear | SphereHead):
        raise HardsphereError(f"The layer '{name}' is a {type(old).__name__}, but the head replaces a linear layer.")
    classes = num_classes or old.weight.shape[0]
    head = SphereHead(old.in_features, classes, scale, margin, feature_norm, weight_norm, angular)
    head.to(device=old.weight.device, dtype=old.weight.dtype)
    if classes == old.weight.shape[0]:
        with torch.no_grad():
            head.weight.copy_(old.weight)
            if head.bias is not None and old.bias is not None:
                head.bias.copy_(old.bias)
    head.train(old.training)
    return _replace(model, name, head)


def final_linear(model: nn.Module) -> str:
    """The dotted name of the layer that makes the logits: a hypersphere head, timm's classifier, or the last linear."""
    classifier = find_head(model) or _timm_classifier(model)
    if isinstance(classifier, tuple):
        raise HardsphereError(f"{type(model).__name__} has {len(classifier)} classifiers: name one with layer='...'.")
    named = list(model.named_modules())
    linear: list[str] = [name for name, module in named if module is classifier]
    linear = linear or [name for name, module in named if isinstance(module, nn.Linear)]
    if not linear:
        raise HardsphereError(f"{type(model).__name__} has no linear layer to replace: name one with layer='...'.")
    return linear[-1]


def _timm_classifier(model: nn.Module) -> object:
    """What a timm model says of itself, also from inside wrappers such as `ScaledView`; None if it is not timm's."""
    while not callable(getattr(model, "get_classifier", None)):
        children = list(model.children())
        if len(children) != 1:
            return None
        model = children[0]
    classifier: object = model.get_classifier()  # type: ignore[operator]
    return classifier if isinstance(classifier, nn.Linear | tuple) else None


def _submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise HardsphereError(f"{type(model).__name__} has no layer named '{name}'.") from None


def _replace(model: nn.Module, name: str, new: nn.Module) -> nn.Module:
    if not name:
        return new
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)
    return model


def at_least_float32(values: Tensor) -> Tensor:
    """Half precision holds three digits of a cosine: too few to attack or to train on. Float64 stays for the tests."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
