"""Named runs: ``<data>/<framework>[-<variant>]``, such as ``cifar10/trades-he``.

A recipe is the composition of three small functions: what the framework needs, what the data changes, and what the
variant does to the head. `source="code"` takes the constants of the authors' released code instead of the paper's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hardsphere.config import AttackConfig, Config, DataConfig, HeadConfig, flatten, override
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
    made = override(config, values)
    _check_head(config.head, made.head, data, framework)
    return made


def _check_head(before: HeadConfig, after: HeadConfig, data: str, framework: str) -> None:
    """A scale or a margin that would do nothing was meant to do something; as a grid it would train one run twice."""
    if after.feature_norm or after.weight_norm:
        return
    for key in ("scale", "margin"):
        if getattr(before, key) != getattr(after, key):
            raise HardsphereError(
                f"head.{key} says nothing to a linear head: leave it away, or train {data}/{framework}-he."
            )


def unasked(config: Config) -> tuple[str, ...]:
    """The settings that nothing in a training asks for."""
    silent = _SILENT.get(config.framework, ())
    if not (config.head.feature_norm or config.head.weight_norm):
        silent = (*silent, "attack.scale")
    return (*silent, *(key for key, schedule in _SCHEDULED.items() if config.schedule != schedule))


def without_effect(config: Config) -> list[str]:
    """The settings that somebody changed in a recipe although its training does not ask for them."""
    if config.recipe not in names():
        return []
    own, changed = flatten(recipe(config.recipe, {"source": config.source})), flatten(config)
    return [key for key in dict.fromkeys(unasked(config)) if own[key] != changed[key]]


# FreeAT's attack is the training pass itself.
_SILENT = {
    "standard": ("attack.steps", "attack.step_size", "attack.start", "attack.bn", "attack.scale"),
    "free": ("attack.steps", "attack.start", "attack.bn", "attack.scale"),
}
_SCHEDULED = {"milestones": "step", "warmup": "onecycle"}


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
