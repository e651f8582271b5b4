"""BatchNorm and ReLU of a frozen network as one pass over memory.

In eval mode BatchNorm is y = scale x + shift, and most networks clip it at zero at once. One by one, and with a
backward pass that is made for training, these cheap steps take as long as the convolutions between them. Here each pair
is one kernel forwards and one backwards, together with the sum of two branches before it, if there is one. They are
found in the network by tracing it (torch.fx); where a network cannot be traced, its layers stay as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from hardsphere.runtime import has_kernels
from hardsphere.sphere import SphereHead

Layer = TypeVar("Layer", bound=nn.Module)

_RELU = (F.relu, torch.relu, torch.relu_, F.relu_)
_SUM = (operator.add, torch.add)

# Python's operators in place, and the same that leave their image alone.
_IN_PLACE: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}


class Affine(nn.Module):
    """BatchNorm2d in eval mode, followed by ReLU or not; as under autocast, float32 arithmetic between bf16 images.

    Args:
        norm: whose statistics and parameters it takes; `refresh` takes them again.
        relu: clip at zero.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, norm: nn.BatchNorm2d, relu: bool = False) -> None:
        super().__init__()
        assert norm.running_mean is not None
        assert norm.running_var is not None
        self.mean, self.variance, self.eps = norm.running_mean, norm.running_var, norm.eps
        ones, zeros = torch.ones_like(self.mean), torch.zeros_like(self.mean)
        self.weight = ones if norm.weight is None else norm.weight.detach()
        self.bias = zeros if norm.bias is None else norm.bias.detach()
        self.register_buffer("scale", ones.clone())
        self.register_buffer("shift", zeros.clone())
        self.relu = relu
        refresh([self])

    def forward(self, x: Tensor) -> Tensor:
        if _has_kernel(x):
            return cast(Tensor, _Fused.apply(x, self.scale, self.shift, self.relu))  # type: ignore[no-untyped-call]
        y = (x.float() * self.scale[:, None, None] + self.shift[:, None, None]).to(x.dtype)
        return F.relu(y) if self.relu else y


@torch.no_grad()
def refresh(norms: Sequence[Affine]) -> None:
    """scale = weight / sqrt(variance + eps) and shift = bias - mean scale, of all layers at once."""
    scales = torch._foreach_add([norm.variance for norm in norms], [norm.eps for norm in norms])
    torch._foreach_rsqrt_(scales)
    torch._foreach_mul_(scales, [norm.weight for norm in norms])
    torch._foreach_copy_([norm.scale for norm in norms], scales)
    torch._foreach_mul_(scales, [norm.mean for norm in norms])
    torch._foreach_copy_([norm.shift for norm in norms], torch._foreach_sub([norm.bias for norm in norms], scales))


def gradient_before(gradient: Tensor, y: Tensor, scale: Tensor, relu: bool, other: Tensor | None = None) -> Tensor:
    """From the gradient by y, the result of a norm, that by what the norm was given; another one is added to it."""
    if _has_kernel(y):
        from hardsphere import kernels

        return kernels.affine_backward(_laid_out(gradient), y, scale, relu, None if other is None else _laid_out(other))
    before = gradient.float() * scale[:, None, None]
    before = torch.where(y > 0, before, 0.0) if relu else before
    return (before if other is None else before + other.float()).to(y.dtype)


def _has_kernel(x: Tensor) -> bool:
    """Whether a kernel of our own is to be used; torch's compiler writes its own, together with what is around.

    While it traces, it either says so, or has tensors of another type stand for the real ones.
    """
    traced = torch.compiler.is_compiling() or type(x) not in (Tensor, nn.Parameter)
    return x.dtype == torch.bfloat16 and not traced and has_kernels(x)


class SumAndNorm(nn.Module):
    """The sum of two branches and its norm: what a residual block hands on, and what the next one begins with."""

    def __init__(self, norm: Affine) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        norm = self.norm
        if x.dtype == other.dtype and x.shape == other.shape and _has_kernel(x):
            both = _FusedSum.apply(x, other, norm.scale, norm.shift, norm.relu)  # type: ignore[no-untyped-call]
            return cast("tuple[Tensor, Tensor]", both)
        total = x + other
        return total, norm(total)


def as_just(kind: type[Layer], module: object) -> Layer | None:
    """A module that does what its kind does and nothing else: it is of no other class, and nobody listens in."""
    if type(module) is not kind:
        return None
    module = cast(nn.Module, module)
    hooks = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    return None if any(hooks) else cast(Layer, module)


def _laid_out(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, scale: Tensor, shift: Tensor, relu: bool) -> Tensor:
        from hardsphere import kernels

        _, y = kernels.affine(_laid_out(x), scale, shift, relu)
        context.save_for_backward(y, scale)
        context.relu = relu
        context.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(context: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        y, scale = context.saved_tensors
        back = None if gradient is None else gradient_before(gradient, y, scale, context.relu)
        return back, None, None, None


class _FusedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, x: Tensor, other: Tensor, scale: Tensor, shift: Tensor, relu: bool
    ) -> tuple[Tensor, Tensor]:
        from hardsphere import kernels

        total, y = kernels.affine(_laid_out(x), scale, shift, relu, _laid_out(other))
        context.save_for_backward(y, scale)
        context.relu = relu
        context.set_materialize_grads(False)  # the sum may be used for nothing but the norm
        return total, y

    @staticmethod
    def backward(context: Any, by_total: Tensor | None, by_y: Tensor | None) -> tuple[Tensor | None, ...]:
        y, scale = context.saved_tensors
        if by_y is None:
            return by_total, by_total, None, None, None
        back = gradient_before(by_y, y, scale, context.relu, by_total)
        return back, back, None, None, None


def fuse_norms(network: nn.Module) -> nn.Module:
    """The network in eval mode with its BatchNorm and ReLU fused, or the network itself if it cannot be traced."""
    modules = dict(network.named_modules())
    try:
        graph = _traced(network, modules)
    except Exception:  # whatever a foreign network does while it is traced, it is no error of the evaluation
        return network
    fused: dict[str, nn.Module] = {}
    for node in list(graph.nodes):
        norm = _norm_of(node, modules)
        if norm is None:
            continue
        relu = _relu_after(node, modules)
        norm.relu = relu is not None
        name = f"fused_{len(fused)}"
        total = node.args[0] if node.args else None
        if isinstance(total, fx.Node) and _is_sum(total):
            fused[name] = SumAndNorm(norm)
            new = _after_sum(graph, total, name)
        else:
            fused[name] = norm
            with graph.inserting_after(node):
                new = graph.call_module(name, node.args, node.kwargs)
        (node if relu is None else relu).replace_all_uses_with(new)
        if relu is not None:
            graph.erase_node(relu)
        graph.erase_node(node)
    for name, module in fused.items():
        network.add_module(name, module)
    return fx.GraphModule(network, graph).eval() if fused else network


def _traced(network: nn.Module, modules: dict[str, nn.Module]) -> fx.Graph:
    """The graph of a network as it is asked: under autocast to bf16."""
    tensor = next((tensor for tensor in (*network.parameters(), *network.buffers())), torch.empty(0))
    with torch.autocast(tensor.device.type, torch.bfloat16):
        graph = _Tracer(tensor.device.type).trace(network)
    for node in graph.nodes:
        image = node.args[0] if node.args else None
        if isinstance(image, fx.Node) and len(image.users) > 1 and _is_in_place(node, modules):
            raise fx.proxy.TraceError("What a node changes in place is read elsewhere, before or after it.")
    for node in graph.nodes:
        node.target = _IN_PLACE.get(node.target, node.target)
    return graph


def _is_in_place(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether a node changes the image that it is given."""
    if node.op == "call_module":
        return bool(getattr(modules[str(node.target)], "inplace", False))
    name = str(getattr(node.target, "__name__", node.target))
    if node.target in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
        return True
    told = node.args[1:] if getattr(node.target, "__module__", "") == F.__name__ else ()
    return "out" in node.kwargs or any(value is True for value in (*told, node.kwargs.get("inplace")))


def _norm_of(node: fx.Node, modules: dict[str, nn.Module]) -> Affine | None:
    """The norm that a node asks, as an affine step, if it is one and is asked nowhere else."""
    module = modules.get(str(node.target)) if node.op == "call_module" else None
    if type(module) is Affine:
        asked = [other for other in node.graph.nodes if other.op == "call_module" and other.target == node.target]
        return module if len(asked) == 1 else None
    norm = as_just(nn.BatchNorm2d, module)
    return None if norm is None or norm.running_mean is None or norm.training else Affine(norm)


def _after_sum(graph: fx.Graph, total: fx.Node, name: str) -> fx.Node:
    """Put a `SumAndNorm` in the place of a sum; the node of the norm."""
    with graph.inserting_after(total):
        both = graph.call_module(name, total.args)
    with graph.inserting_after(both):
        first = graph.call_function(operator.getitem, (both, 0))
    with graph.inserting_after(first):
        second = graph.call_function(operator.getitem, (both, 1))
    total.replace_all_uses_with(first)
    graph.erase_node(total)
    return second


def _is_sum(node: fx.Node) -> bool:
    """Whether a node adds two images; a second norm of the same sum finds it taken already."""
    added = node.op == "call_function" and node.target in _SUM and not node.kwargs
    return added and len(node.args) == 2 and all(isinstance(part, fx.Node) for part in node.args)


def _relu_after(node: fx.Node, modules: dict[str, nn.Module]) -> fx.Node | None:
    """The ReLU that is the only thing done with a node's result, if it is so."""
    if len(node.users) != 1:
        return None
    user = next(iter(node.users))
    if user.op == "call_module" and as_just(nn.ReLU, modules.get(str(user.target))) is not None:
        return user
    if user.op == "call_function" and user.target in _RELU:
        return user
    return user if user.op == "call_method" and user.target in ("relu", "relu_") else None


class _Tracer(fx.Tracer):
    """Layers are taken as they are; so are hypersphere heads, which look at the device of what they are given.

    A graph knows no contexts, so what is asked in one of its own, such as without autocast, cannot be traced.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.context = self._context()

    def _context(self) -> tuple[object, ...]:
        kind = self.device
        return torch.is_grad_enabled(), torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Image(node, self)

    def create_node(self, *given: Any, **more: Any) -> fx.Node:
        if self._context() != self.context:
            raise fx.proxy.TraceError("A part of the network is asked in a context of its own.")
        return super().create_node(*given, **more)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """As everyone asks it: with its hooks, and with an image alone. What else it can be given has its defaults."""
        return super().create_args_for_root(lambda network, image: network(image), is_module, concrete_args)

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return isinstance(module, SphereHead) or not any(True for _ in module.children())


def _recorded(operation: Any) -> Any:
    return lambda image, other: image.tracer.create_proxy("call_function", operation, (image, other), {})


class _Image(fx.Proxy):
    """What goes through a network that is traced. Left to itself it would take ``x += y`` for ``x = x + y``."""

    __iadd__ = _recorded(operator.iadd)
    __isub__ = _recorded(operator.isub)
    __imul__ = _recorded(operator.imul)
    __itruediv__ = _recorded(operator.itruediv)
