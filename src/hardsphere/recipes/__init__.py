"""Named runs: ``<data>/<framework>[-<variant>]``, such as ``cifar10/trades-he``.

A recipe is the composition of three small functions: what the framework needs, what the data changes, and what the
variant does to the head. `source="code"` takes the constants of the authors' released code instead of the paper's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hardsphere.config import AttackConfig, Config, DataConfig, HeadConfig, override
from hardsphere.errors import HardsphereError, nearest
from hardsphere.objectives import FRAMEWORKS
from hardsphere.recipes.data import DATA
from hardsphere.recipes.released import as_released

VARIANTS: dict[str, HeadConfig] = {
    "": HeadConfig(),
    "fn": HeadConfig(feature_norm=True),
    "wn": HeadConfig(weight_norm=True),
    "fnwn": HeadConfig(feature_norm=True, weight_norm=True),
    "he": HeadConfig(feature_norm=True, weight_norm=True, margin=0.2),
    "mhe": HeadConfig(feature_norm=True, weight_norm=True, angular=True, margin=0.1),
}

ABOUT = {
    "": "linear head",
    "fn": "feature normalisation only",
    "wn": "weight normalisation only",
    "fnwn": "both normalisations, no margin",
    "he": "hypersphere embedding (both, with margin)",
    "mhe": "modified hypersphere embedding (angles)",
}


def names() -> list[str]:
    """All recipes."""
    return [
        f"{data}/{framework}" + (f"-{variant}" if variant else "")
        for data in DATA
        for framework in FRAMEWORKS
        for variant in VARIANTS
    ]


def recipe(name: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """The configuration of a recipe, with overrides by dotted key applied last."""
    if name not in names():
        raise HardsphereError(f"Unknown recipe '{name}'.{nearest(name, names())} `hardsphere recipes` lists them all.")
    data, _, rest = name.partition("/")
    framework, _, variant = rest.partition("-")
    values = dict(overrides or {})
    for key, settled in {"recipe": name, "framework": framework}.items():
        if values.get(key, settled) != settled:
            raise HardsphereError(f"'{key}' is what a recipe's name says: train another recipe, such as {data}/trades.")
    source = values.get("source", "paper")
    config = replace(_framework(framework), recipe=name, head=VARIANTS[variant])
    config = DATA[data](config)
    if source == "code":
        config = as_released(config)
    return override(config, values)


def _framework(framework: str) -> Config:
    """The paper's CIFAR recipe (section 4): 100 epochs, rate 0.1 divided by 10 at 75 and 90, PGD-10 inside."""
    base = Config(
        recipe="",
        source="paper",
        framework=framework,
        dataset="",
        model="wrn-34-10",
        epochs=100,
        batch=128,
        lr=0.1,
        objective=FRAMEWORKS[framework](),
        data=DataConfig(pad=4, flip=True),
    )
    if framework == "fast":
        attack = AttackConfig(steps=1, step_size=1.25 * base.attack.eps)
        return replace(base, model="preactresnet18", epochs=30, lr=0.2, schedule="cyclic", attack=attack)
    if framework == "free":
        attack = AttackConfig(steps=1, step_size=base.attack.eps)
        return replace(base, model="preactresnet18", epochs=10, lr=0.04, schedule="cyclic", attack=attack)
    return base
