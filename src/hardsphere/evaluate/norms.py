"""BatchNorm and ReLU of a frozen network as one pass over memory.

In eval mode BatchNorm is y = scale x + shift, and most networks clip it at zero at once. One by one, and with a
backward pass that is made for training, these cheap steps take as long as the convolutions between them. Here each pair
is one kernel forwards and one backwards, found in the network by tracing it (torch.fx); where a network cannot be
traced, its layers stay as they are.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from hardsphere.sphere import SphereHead
from hardsphere.threat import has_kernels

_RELU = (F.relu, torch.relu, torch.relu_, F.relu_)


class FrozenNorm(nn.Module):
    """BatchNorm2d in eval mode, followed by ReLU or not; frozen when it is made.

    Args:
        norm: whose statistics and parameters it takes.
        relu: clip at zero.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, norm: nn.BatchNorm2d, relu: bool) -> None:
        super().__init__()
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = (norm.running_var + norm.eps).rsqrt()
        scale = scale if norm.weight is None else scale * norm.weight.detach()
        shift = -norm.running_mean * scale
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift if norm.bias is None else shift + norm.bias.detach())
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.bfloat16 and has_kernels(x):
            return cast(Tensor, _Fused.apply(x, self.scale, self.shift, self.relu))  # type: ignore[no-untyped-call]
        y = (x.float() * self.scale[:, None, None] + self.shift[:, None, None]).to(x.dtype)
        return F.relu(y) if self.relu else y


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, scale: Tensor, shift: Tensor, relu: bool) -> Tensor:
        from hardsphere import kernels

        x = x.contiguous(memory_format=torch.channels_last)
        y = torch.empty_like(x)
        kernels.affine(x, scale, shift, y, relu)
        context.save_for_backward(y, scale)
        context.relu = relu
        return y

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        from hardsphere import kernels

        y, scale = context.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        back = torch.empty_like(gradient)
        kernels.affine_backward(gradient, y, scale, back, context.relu)
        return back, None, None, None


def fuse_norms(network: nn.Module) -> nn.Module:
    """The network in eval mode with its BatchNorm and ReLU fused, or the network itself if it cannot be traced."""
    try:
        graph = _Tracer().trace(network)
    except Exception:  # whatever a foreign network does while it is traced, it is no error of the evaluation
        return network
    modules = dict(network.named_modules())
    fused: dict[str, nn.Module] = {}
    for node in list(graph.nodes):
        norm = modules.get(str(node.target)) if node.op == "call_module" else None
        if type(norm) is not nn.BatchNorm2d or norm.running_mean is None or norm.training:
            continue
        name = f"fused_{len(fused)}"
        relu = _relu_after(node, modules)
        fused[name] = FrozenNorm(norm, relu is not None)
        with graph.inserting_after(node):
            new = graph.call_module(name, node.args, node.kwargs)
        old = node if relu is None else relu
        old.replace_all_uses_with(new)
        if relu is not None:
            graph.erase_node(relu)
        graph.erase_node(node)
    for name, module in fused.items():
        network.add_module(name, module)
    return fx.GraphModule(network, graph) if fused else network


def _relu_after(node: fx.Node, modules: dict[str, nn.Module]) -> fx.Node | None:
    """The ReLU that is the only thing done with a node's result, if it is so."""
    if len(node.users) != 1:
        return None
    user = next(iter(node.users))
    if user.op == "call_module" and type(modules.get(str(user.target))) is nn.ReLU:
        return user
    if user.op == "call_function" and user.target in _RELU:
        return user
    return user if user.op == "call_method" and user.target in ("relu", "relu_") else None


class _Tracer(fx.Tracer):
    """Layers are taken as they are; so are hypersphere heads, which look at the device of what they are given."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return isinstance(module, SphereHead) or not any(True for _ in module.children())
