"""Which samples train the network: ||grad_w L(x*)|| / ||grad_w L(x)||, layer by layer (the paper's Fig. 3).

x* is the adversarial example of x, L the training loss (eq. 6, scale and margin included), w one layer's weights. The
paper plots E(||grad L(x*)|| / ||grad L(x)||): a larger ratio means that training attends more to adversarial examples.
That mean follows the samples whose clean gradient happens to be nearly zero, so the median and the ratio of the two
means are given beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from hardsphere.analysis.common import Part, answers, bare, collect, observed, summary
from hardsphere.attacks import pgd
from hardsphere.errors import HardsphereError
from hardsphere.sphere import find_head, margin_cross_entropy
from hardsphere.threat import Ball


@dataclass(frozen=True, eq=False)
class GradientRatio:
    """Gradient norms of each sample and layer.

    Attributes:
        layers: the names of the weights, in the order of the forward pass.
        clean: ||grad_w L(x)||, float64 of shape (N, layers).
        adversarial: ||grad_w L(x*)||, likewise.
        steps: of the PGD that made x*.
    """

    layers: tuple[str, ...]
    clean: Tensor
    adversarial: Tensor
    steps: int

    @property
    def ratios(self) -> Tensor:
        """||grad_w L(x*)|| / ||grad_w L(x)|| of each sample and layer; NaN where the clean gradient is zero."""
        return torch.where(self.clean > 0, self.adversarial / self.clean, torch.nan)

    def to_dict(self) -> dict[str, Any]:
        """Per layer: the paper's mean of ratios with its spread, and the ratio of the mean norms."""
        layers = {}
        for index, name in enumerate(self.layers):
            clean, adversarial = float(self.clean[:, index].mean()), float(self.adversarial[:, index].mean())
            layers[name] = {
                "ratio": summary(self.ratios[:, index]),
                "ratio_of_means": adversarial / clean if clean > 0 else None,
                "clean_norm": clean,
                "adversarial_norm": adversarial,
            }
        return {"n": len(self.clean), "steps": self.steps, "loss": "training loss, eq. 6", "layers": layers}


def gradient_ratio(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    *,
    steps: int = 10,
    step_size: float | None = None,
    chunk: int = 16,
    seed: int = 0,
    ids: Tensor | None = None,
    batch: int = 256,
) -> GradientRatio:
    """The gradient of the training loss at x* and at x, for every sample and every layer, with BatchNorm in eval mode.

    Args:
        steps: of PGD on the cross-entropy of the model as deployed; its last iterate is x*.
        step_size: of PGD; 2.5 * eps / steps by default.
        chunk: samples whose gradients are in memory at once; 1 takes them one by one, which every network allows.
        seed: of PGD's random start.
    """
    if chunk < 1:
        raise HardsphereError(f"The chunk is {chunk}, but must hold at least one sample.")
    network = bare(model)
    with observed(network) as device:
        layers = weights_in_order(network, x[:1].to(device))
    norms = _norms(network, layers, chunk)

    def work(part: Part) -> dict[str, Tensor]:
        attack = pgd(model, part.x, part.y, ball, noise=part.noise, steps=steps, step_size=step_size, keep="last")
        return {"clean": norms(part.x, part.y), "adversarial": norms(attack.x_adv, part.y)}

    found = collect(model, x, y, work, seed=seed, ids=ids, batch=batch)
    return GradientRatio(tuple(layers), found["clean"].double(), found["adversarial"].double(), steps)


def weights_in_order(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The parameters of two dimensions or more that a pass uses, in the order in which their layers are called."""
    called: list[str] = []
    hooks = [
        module.register_forward_pre_hook(lambda _module, _inputs, name=name: called.append(name))
        for name, module in model.named_modules()
    ]
    try:
        with torch.no_grad():
            model(x)
    finally:
        for hook in hooks:
            hook.remove()
    weights: dict[str, Tensor] = {}
    for name in dict.fromkeys(called):
        for own, parameter in model.get_submodule(name).named_parameters(recurse=False):
            if parameter.dim() > 1 and not any(parameter is known for known in weights.values()):
                weights[f"{name}.{own}" if name else own] = parameter
    if not weights:
        raise HardsphereError(f"{type(model).__name__} has no weights of two dimensions or more to look at.")
    return weights


def _norms(model: nn.Module, layers: dict[str, Tensor], chunk: int) -> Callable[[Tensor, Tensor], Tensor]:
    """(images, labels) -> the norm of each sample's gradient by each layer, (N, layers)."""
    head = find_head(model)
    weights = {name: weight.detach() for name, weight in layers.items()}

    def loss(weights: dict[str, Tensor], image: Tensor, target: Tensor) -> Tensor:
        logits = functional_call(model, weights, (image[None],))
        return margin_cross_entropy(head, logits, target[None])[0]

    def sizes(image: Tensor, target: Tensor) -> Tensor:
        gradients = grad(loss)(weights, image, target)
        return torch.stack([torch.linalg.vector_norm(gradients[name]) for name in layers])

    def norms(x: Tensor, y: Tensor) -> Tensor:
        # One-hot rows, made outside: vmap cannot make them from labels.
        targets = F.one_hot(y, answers(model, x[:1]).shape[1]).to(x.dtype)
        if chunk > 1:
            return vmap(sizes, chunk_size=chunk)(x, targets)
        return torch.stack([sizes(image, target) for image, target in zip(x, targets, strict=True)])

    return norms
