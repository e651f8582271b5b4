"""hardsphere: adversarial training with hypersphere embedding, and an honest measure of robustness.

The names below are the public API. They are loaded on first use: `hardsphere --help` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hardsphere.corruptions import corrupt as corrupt
    from hardsphere.errors import HardsphereError as HardsphereError
    from hardsphere.evaluate import evaluate as evaluate
    from hardsphere.evaluate.audit import audit as audit
    from hardsphere.predict import predict as predict
    from hardsphere.recipes import recipe as recipe
    from hardsphere.reproduce import reproduce as reproduce
    from hardsphere.reproduce import sweep as sweep
    from hardsphere.sphere import SphereHead as SphereHead
    from hardsphere.sphere import attach as attach
    from hardsphere.sphere import paper_view as paper_view
    from hardsphere.threat import Ball as Ball
    from hardsphere.train import load as load
    from hardsphere.train import train as train

__version__ = "0.1.0"

_HOME = {
    "Ball": "hardsphere.threat",
    "HardsphereError": "hardsphere.errors",
    "SphereHead": "hardsphere.sphere",
    "attach": "hardsphere.sphere",
    "audit": "hardsphere.evaluate.audit",
    "corrupt": "hardsphere.corruptions",
    "evaluate": "hardsphere.evaluate",
    "load": "hardsphere.train",
    "paper_view": "hardsphere.sphere",
    "predict": "hardsphere.predict",
    "recipe": "hardsphere.recipes",
    "reproduce": "hardsphere.reproduce",
    "sweep": "hardsphere.reproduce",
    "train": "hardsphere.train",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'hardsphere' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*_HOME, "__version__"]
