"""Packages that can be called.

Python binds a subpackage's name in its parent as soon as it is imported, so `hardsphere.evaluate` is the package from
then on, although people look there for the function. Such a package answers a call with its function of the same name.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **options)


def make_callable(name: str) -> None:
    """Let the module ``name`` be called as its function of the same name."""
    sys.modules[name].__class__ = _CallableModule
