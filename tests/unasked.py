"""What no CUDA graph can record, since host and GPU would have to meet: noticed on any machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

# The value of a tensor, or the shape of a result that depends on one.
_QUESTIONS = {
    aten._local_scalar_dense,
    aten.is_nonzero,
    aten.equal,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.bincount,
}
# A tensor made of the host's own numbers, as by torch.tensor: on a GPU a copy from memory that is not pinned.
_TELLING = {aten.lift, aten.lift_fresh, aten.lift_fresh_copy}
_BY_INDEX = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class NoQuestions(TorchDispatchMode):
    """Refuses operations after which the host must know what is in a tensor, or that copy its own numbers into one."""

    def __torch_dispatch__(
        self, operation: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        packet = operation.overloadpacket
        masked = packet in _BY_INDEX and any(by is not None and by.dtype == torch.bool for by in args[1])
        asks = packet in _QUESTIONS or masked
        assert not asks, f"the host asks what is in a tensor: {operation}"
        assert packet not in _TELLING, f"the host copies numbers of its own: {operation}"
        return operation(*args, **(kwargs or {}))


def unasked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which may ask the device nothing, and tell it nothing."""

    def run(*arguments: Any) -> Any:
        one_hot = F.one_hot
        F.one_hot = lambda y, classes: (y[:, None] == torch.arange(classes)).long()  # torch's asks, but not on a GPU
        try:
            with NoQuestions():
                return function(*arguments)
        finally:
            F.one_hot = one_hot

    return run
