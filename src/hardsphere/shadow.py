"""The network as the attack runs it: its weights cast to bf16 once a step instead of once a pass.

Autocast casts every float32 weight in every pass, and an attack makes ten passes with the same weights. The shadow is
the same network with bf16 copies of the weights of its convolutions and linear layers, refreshed at the start of each
attack; everything else (hypersphere heads, statistics, foreign layers) is the live model's own memory. It stands in
eval mode, so BatchNorm is a fixed affine step, y = scale x + shift, which is worked out once a step as well; so are the
class vectors of a hypersphere head, normalised in float32. Where there are kernels for it, what lies between two
convolutions is done together with them (`hardsphere.norms`, `hardsphere.blocks`).

Training attacks a shadow of the live model, and evaluation builds its stand-in in half precision on one of a frozen
model. Whether either may stand in for the model is asked before it does: `departure`, and with kernels of our own
`agreement`.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hardsphere import blocks, norms
from hardsphere.norms import Affine, as_just
from hardsphere.sphere import SphereHead

ALIKE = 0.1
"""The largest `departure` of a stand-in that differs from its model by no more than the rounding of bf16."""

ALONG = 0.5
"""The least `agreement` of a stand-in with kernels of our own: rounding to bf16 leaves 0.9 and more."""

# Layers whose weights autocast casts before anything else happens to them. Subclasses may do more with their weights.
_CAST = (nn.Conv2d, nn.Linear)

# Tensor cores read channels in groups of 16 bytes; images have 1 or 3 channels of 2 bytes.
_CHANNEL_GROUP = 8


class Shadow:
    """A stand-in for a model under attack, in eval mode and under bf16 autocast; it has no gradients by its weights.

    Args:
        model: the live model; its parameters and buffers may change in place, but must stay where they are.
        fold: make each BatchNorm2d an affine step: the same but for rounding.
        pad: give convolutions of few channels more of them, all zero: the same but for the order of a sum.
        fuse_norms: make each norm one with the ReLU after it and the sum before it, for kernels of our own.
        fuse_blocks: then make residual blocks one with their norms, for kernels of our own.
    """

    def __init__(
        self, model: nn.Module, fold: bool = True, pad: bool = True, fuse_norms: bool = False, fuse_blocks: bool = False
    ) -> None:
        own = [*model.parameters(), *model.buffers()]
        self.network = copy.deepcopy(model, {id(tensor): tensor for tensor in own})
        self._live: list[Tensor] = []
        self._cast: list[Tensor] = []
        self._narrow: list[tuple[Tensor, Tensor]] = []
        self._norms: list[Affine] = []
        self._heads: list[SphereHead] = []
        for module in list(self.network.modules()):
            norm, conv = as_just(nn.BatchNorm2d, module), as_just(nn.Conv2d, module)
            if fold and norm is not None and norm.running_mean is not None:
                self._norms.append(Affine(norm))
                self._replace(module, self._norms[-1])
            elif pad and conv is not None and _is_narrow(conv):
                self._replace(module, self._widened(conv))
            else:
                self._detach(module)
                if type(module) is SphereHead and module.weight_norm:
                    module.normalise_ahead()
                    self._heads.append(module)
        self.network.eval()
        if fuse_norms:
            self.network = norms.fuse_norms(self.network)
        if fuse_blocks:
            self.network = blocks.fuse_blocks(self.network)

    @torch.no_grad()
    def refresh(self) -> nn.Module:
        """The stand-in, brought up to date with the live model."""
        if self._cast:
            torch._foreach_copy_(self._cast, self._live)
        for wide, live in self._narrow:
            wide.copy_(live)
        if self._norms:
            norms.refresh(self._norms)
        for head in self._heads:
            head.normalise_ahead()
        return self.network

    def _detach(self, module: nn.Module) -> None:
        """Give a module frozen parameters: bf16 copies where autocast would cast them, else the live memory."""
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            live = parameter.detach()
            if type(module) in _CAST and live.dtype == torch.float32:
                self._live.append(live)
                self._cast.append(live.to(torch.bfloat16))
                live = self._cast[-1]
            module._parameters[name] = nn.Parameter(live, requires_grad=False)

    def _widened(self, conv: nn.Conv2d) -> nn.Module:
        """A convolution of few channels as one of a whole group of them."""
        weight = conv.weight.detach()
        spare = _CHANNEL_GROUP - conv.in_channels
        wide = F.pad(weight, (0, 0, 0, 0, 0, spare)).to(torch.bfloat16, memory_format=torch.channels_last)
        self._narrow.append((wide[:, : conv.in_channels], weight))
        return _Widened(conv, wide, spare)

    def _replace(self, old: nn.Module, new: nn.Module) -> None:
        """Under each of its names: foreign networks keep layers as attributes and in a sequence."""
        for name, module in list(self.network.named_modules(remove_duplicate=False)):
            if module is old:
                parent, _, child = name.rpartition(".")
                setattr(self.network.get_submodule(parent), child, new)


def departure(stand_in: nn.Module, model: nn.Module, x: Tensor) -> float:
    """By how much a stand-in's answers for ``x`` differ from those of the model in eval mode, relative to their size.

    Answers are logits less their mean over the classes: what all classes have in common decides nothing, and with m-HE
    it is so large that beside it any two networks would look alike.

    The stand-in makes a pass backwards as well, as an attack on it will. What it cannot bear, it raises: a foreign
    layer might not take bf16 weights at all.
    """
    image = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        answers = stand_in(image).float()
        torch.autograd.grad(answers.sum(), image, allow_unused=True)
    with torch.no_grad():
        answers, expected = _centred(answers), _centred(model(x).float())
        return float((answers - expected).norm() / expected.norm().clamp_min(1e-30))


def _centred(logits: Tensor) -> Tensor:
    return logits - logits.mean(dim=1, keepdim=True)


def agreement(stand_in: nn.Module, model: nn.Module, x: Tensor) -> float:
    """The cosine between the gradients of a stand-in's answers for ``x`` and of the model's.

    Kernels that go backwards wrongly make an attack weak and every number flattering, and no answer would show it.
    """

    def gradient(network: nn.Module) -> Tensor:
        image = x.detach().clone().requires_grad_()
        with torch.enable_grad():
            answers = network(image).float()
            weights = torch.linspace(-1.0, 1.0, answers[0].numel(), device=x.device)
            return torch.autograd.grad((answers.flatten(1) * weights).sum(), image)[0].flatten().float()

    return float(F.cosine_similarity(gradient(stand_in), gradient(model), dim=0))


class _Widened(nn.Module):
    """A convolution that is given more channels than the image has; the rest of both are zeros."""

    def __init__(self, conv: nn.Conv2d, weight: Tensor, spare: int) -> None:
        super().__init__()
        self.stride, self.padding, self.dilation, self.spare = conv.stride, conv.padding, conv.dilation, spare
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = F.pad(x, (0, 0, 0, 0, 0, self.spare))
        return F.conv2d(wide, self.weight, None, self.stride, self.padding, self.dilation)


def _is_narrow(conv: nn.Conv2d) -> bool:
    plain = conv.groups == 1 and conv.padding_mode == "zeros" and conv.bias is None and "weight" in conv._parameters
    return plain and conv.in_channels < _CHANNEL_GROUP and conv.weight.dtype == torch.float32
