"""`torch.compile` for the pieces of a step; where the compiler refuses one, the function itself."""

from __future__ import annotations

import getpass
import os
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

ONE_VARIANT: dict[str, Any] = {"triton.autotune_pointwise": False}
"""An option of `torch.compile`: it would compile up to six variants of each elementwise kernel, time them and keep the
fastest, which takes seconds at the first start and gains nothing: these kernels are as fast as memory is."""


class Compiler:
    """Makes functions fast. What one of them is refused for is said once, and the run goes on without.

    Functions are told apart by their code, so that a closure may be made anew for each batch. Each compiler has codes
    of its own: torch compiles a code for so many models and settings at most, and a process may train many in turn.

    Args:
        say: told what is refused.
        options: of `torch.compile`; `ONE_VARIANT` by default.
    """

    def __init__(self, say: Callable[[str], None] = lambda text: None, **options: Any) -> None:
        self.say = say
        self.options = options or {"options": ONE_VARIANT}
        self.codes: dict[CodeType, CodeType] = {}
        self.refused: set[CodeType] = set()

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(function, MethodType):
            return partial(self(function.__func__), function.__self__)
        assert isinstance(function, FunctionType)
        compiled = torch.compile(self._with_own_code(function), dynamic=False, **self.options)

        def run(*arguments: Any) -> Any:
            if function.__code__ not in self.refused:
                try:
                    return compiled(*arguments)
                except _refusals() as reason:
                    self.refused.add(function.__code__)
                    self.say(
                        f"torch cannot compile '{function.__qualname__}' here, so it runs slower: {_short(reason)}"
                    )
            # It may ask a network that was compiled by itself, which would be refused for the same reason.
            with torch.compiler.set_stance("force_eager"):
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


def cache_place() -> Path:
    """Where torch's compiler keeps what it compiled."""
    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or _default_place())


def _default_place() -> Path:
    try:
        user = getpass.getuser()
    except (KeyError, ImportError, OSError):
        user = f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"
    safe = re.sub(r'[\\/:*?"<>|]', "_", user)
    return Path(tempfile.gettempdir()) / f"torchinductor_{safe}"
