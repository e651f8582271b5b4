"""hardsphere: adversarial training with hypersphere embedding, and an honest measure of robustness.

The names below are the public API. They are loaded on first use: `hardsphere --help` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hardsphere.errors import HardsphereError as HardsphereError
    from hardsphere.sphere import SphereHead as SphereHead
    from hardsphere.sphere import attach as attach
    from hardsphere.sphere import paper_view as paper_view
    from hardsphere.threat import Ball as Ball

__version__ = "0.1.0"

_HOME = {
    "Ball": "hardsphere.threat",
    "HardsphereError": "hardsphere.errors",
    "SphereHead": "hardsphere.sphere",
    "attach": "hardsphere.sphere",
    "paper_view": "hardsphere.sphere",
}

__all__ = ["Ball", "HardsphereError", "SphereHead", "attach", "paper_view"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'hardsphere' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
