"""`torch.compile` for the small functions of a step; where the compiler refuses one, the function itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

ONE_VARIANT = {"triton.autotune_pointwise": False}
"""An option of `torch.compile`, for kernels that hardly count: torch would compile up to six variants of each, time
them and keep the fastest, which takes seconds at the first start."""


class Compiler:
    """Makes functions fast. What one of them is refused for is said once, and the run goes on without.

    Functions are told apart by their code, so that a closure may be made anew for each batch. Each compiler has codes
    of its own: torch compiles a code for so many models and settings at most, and a process may train many in turn.

    Args:
        say: told what is refused.
        options: of `torch.compile`.
    """

    def __init__(self, say: Callable[[str], None] = lambda text: None, **options: Any) -> None:
        self.say = say
        self.options = options
        self.codes: dict[CodeType, CodeType] = {}
        self.refused: set[CodeType] = set()

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(function, MethodType):
            return partial(self(function.__func__), function.__self__)
        assert isinstance(function, FunctionType)
        compiled = torch.compile(self._with_own_code(function), dynamic=False, **self.options)

        def run(*arguments: Any) -> Any:
            if function.__code__ in self.refused:
                return function(*arguments)
            try:
                return compiled(*arguments)
            except _refusals() as reason:
                self.refused.add(function.__code__)
                self.say(f"torch cannot compile '{function.__qualname__}' here, so it runs slower: {_short(reason)}")
                return function(*arguments)

        return run

    def _with_own_code(self, function: FunctionType) -> FunctionType:
        code = self.codes.setdefault(function.__code__, function.__code__.replace())
        return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


def _refusals() -> type[Exception]:
    """What the compiler raises. It is asked for when something is raised, since its import takes a second."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def _short(reason: Exception) -> str:
    return " ".join(str(reason).split())[:300]
