"""How large everything is, and what can be measured: the scales, and the measurements that tables are made of.

`smoke` runs on a CPU in minutes and shows that everything works; `small` is PreActResNet-18 with a short schedule;
`full` is the paper's recipe.

A measurement is what is recorded as a whole, so the attacks of the paper's Table 2 are several of them: whoever is
interrupted keeps what was finished. `MEASURES` lists them in the order of the work, the most telling first, the most
expensive last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hardsphere.errors import HardsphereError, nearest
from hardsphere.evaluate import SUITES, Entry, OfEps, Suite
from hardsphere.reproduce.measures import Attacks, Corruptions, Measurement, attacks

# ---------------------------------------------------------------------------------------------------------------------
# Scales
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """How large everything is.

    Attributes:
        name: ``smoke``, ``small`` or ``full``.
        about: in words.
        overrides: of every run, by data and framework.
        limits: test images of a measurement or an analysis; all of them, or the analysis's own, where there is none.
        entries: test images of single attacks.
        options: other settings of attacks, where even one image would take too long.
    """

    name: str
    about: str
    overrides: Callable[[str, str], dict[str, Any]]
    limits: Mapping[str, int | None]
    entries: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def limit(self, measurement: str) -> int | None:
        return self.limits.get(measurement, self.limits.get("*"))


def _smoke(data: str, framework: str) -> dict[str, Any]:
    values: dict[str, Any] = {"epochs": 1 if framework == "free" else 2, "select.steps": 2, "select.limit": 50}
    if framework in ("pgd", "alp", "trades"):
        values |= {"attack.steps": 3, "attack.step_size": 0.1}
    return values | ({"model": "cnn-8"} if data == "arrays" else {})


def _small(data: str, framework: str) -> dict[str, Any]:
    if data == "folder":
        return {"epochs": 10, "schedule": "onecycle", "data.size": 64, "batch": 128}
    if framework in ("fast", "free"):
        return {}  # the paper's own recipe is PreActResNet-18 and short
    return {"model": "preactresnet18", "epochs": 20, "schedule": "onecycle", "lr": 0.2, "ema.decay": 0.999}


def _full(data: str, framework: str) -> dict[str, Any]:
    return {}


_SMOKE_OPTIONS: dict[str, dict[str, Any]] = {
    "pgd-500": {"steps": 30},
    "pgd-500-adaptive": {"steps": 30},
    "pgd-50-10": {"steps": 10, "restarts": 2},
    "deepfool": {"steps": 5},
    "cw-100": {"steps": 10},
    "cw-l2": {"steps": 10, "searches": 2},
    "feature": {"steps": 3, "restarts": 2},
    "fab-20": {"steps": 3},
    "apgd-ce": {"steps": 10},
    "apgd-t": {"steps": 5, "targets": 2},
    "fab-t": {"steps": 3, "targets": 2},
    "square": {"queries": 30},
    "zoo": {"queries": 60},
    "rays": {"queries": 60},
    **{f"{attack}-{steps}": {"pairs": 4} for attack in ("spsa", "nes") for steps in (20, 50, 80)},
}

SCALES: dict[str, Scale] = {
    "smoke": Scale(
        "smoke",
        "8 x 8 digits in place of the paper's data, a small CNN, two epochs, a few images and shortened attacks: this "
        "shows that everything works, and is no result",
        _smoke,
        {"*": 24, "corruptions": 12},
        options=_SMOKE_OPTIONS,
    ),
    "small": Scale(
        "small",
        "PreActResNet-18, 20 epochs of one cycle with averaged weights (FastAT and FreeAT: the paper's schedules)",
        _small,
        {"standard": 1000, "raw-standard": 1000, "imagenet-pgd": 1000, "blackbox": 100, "corruptions": 1000},
        entries={"cw-l2": 200, "feature": 200, "rays": 200},
    ),
    "full": Scale("full", "the paper's recipe", _full, {"blackbox": 1000}),
}


def scale_named(name: str) -> Scale:
    """One of the scales."""
    if name not in SCALES:
        raise HardsphereError(f"Unknown scale '{name}': use one of {', '.join(SCALES)}.{nearest(name, SCALES)}")
    return SCALES[name]


# ---------------------------------------------------------------------------------------------------------------------
# Measurements
# ---------------------------------------------------------------------------------------------------------------------


def _pgd(name: str, steps: int, *, restarts: int = 1, keep: str = "last") -> Entry:
    """PGD through raw cosines at a quarter of the radius per step (2/255 at 8/255, 1/255 at 4/255)."""
    options = {"steps": steps, "restarts": restarts, "step_size": OfEps(1 / 4), "loss": "cross_entropy", "keep": keep}
    return Entry(name, "pgd", options, view="paper", cost=3.0 * steps * restarts)


# fast_adversarial counts an image as broken in any restart, so here any iterate counts.
_FAST = Suite("fast-adversarial", 1, "paper", (_pgd("pgd-50-10", 50, restarts=10, keep="any"),), cascade=False)
_IMAGENET = Suite("imagenet-pgd", 1, "paper", (_pgd("pgd-10", 10), _pgd("pgd-50", 50)), cascade=False)
_RAW = Suite(
    "standard-raw-cosines",
    1,
    "paper",
    tuple(replace(entry, view="paper") for entry in SUITES["standard"].entries),
    caveat="AutoAttack's standard set on raw cosines, as the paper ran it.",
)


def _attacks(measure: str, suite: str | Suite, only: Sequence[str] | None = None) -> Callable[[Scale], Measurement]:
    def make(scale: Scale) -> Attacks:
        entries = (SUITES[suite] if isinstance(suite, str) else suite).entries
        names = [entry.name for entry in entries if only is None or entry.name in only]
        # The paper's radius, .031, says nothing on digits, which are trained and judged at .2.
        eps = "run" if scale.name == "smoke" else None
        return attacks(
            suite,
            name=measure,
            only=only,
            limits={name: scale.entries[name] for name in names if name in scale.entries},
            options={name: scale.options[name] for name in names if name in scale.options},
            eps=eps,
            limit=scale.limit(measure),
        )

    return make


_QUERIES = ("zoo", *(f"{attack}-{steps}" for attack in ("spsa", "nes") for steps in (20, 50, 80)))

MEASURES: dict[str, Callable[[Scale], Measurement]] = {
    "standard": _attacks("standard", "standard"),
    "pgd-20": _attacks("pgd-20", "paper", ("pgd-20", "pgd-20-adaptive")),
    "pgd-50-10": _attacks("pgd-50-10", _FAST),
    "imagenet-pgd": _attacks("imagenet-pgd", _IMAGENET),
    "raw-standard": _attacks("raw-standard", _RAW),
    "white-box": _attacks("white-box", "paper", ("mim-20", "fgsm", "deepfool", "cw-100", "fab-20")),
    "few-images": _attacks("few-images", "paper", ("cw-l2", "feature")),
    "corruptions": lambda scale: Corruptions(limit=scale.limit("corruptions")),
    "blackbox": _attacks("blackbox", "blackbox", _QUERIES),
    "rays": _attacks("rays", "blackbox", ("rays",)),
    "pgd-500-adaptive": _attacks("pgd-500-adaptive", "paper", ("pgd-500-adaptive",)),
    "pgd-500": _attacks("pgd-500", "paper", ("pgd-500",)),
}
"""Every measurement by name, in the order in which they are made."""


def limited(scale: Scale, limits: Mapping[str, int], analyses: Sequence[str] = ()) -> Scale:
    """The scale with other numbers of images: for single attacks, whole measurements, or analyses."""
    single = {
        entry.name
        for make in MEASURES.values()
        for entry in getattr(getattr(make(scale), "suite", None), "entries", ())
    }
    known = sorted({*single, *MEASURES, *analyses})
    for name, n in limits.items():
        if name not in known:
            raise HardsphereError(f"There is no measurement or attack '{name}' to limit.{nearest(name, known)}")
        if n < 1:
            raise HardsphereError(f"The limit of '{name}' is {n}, but must be at least 1 image.")
    entries = {name: n for name, n in limits.items() if name in single}
    whole = {name: n for name, n in limits.items() if name not in single}
    return replace(scale, limits={**scale.limits, **whole}, entries={**scale.entries, **entries})
