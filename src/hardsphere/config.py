"""The configuration of a run: frozen, typed, saved with the run. Unknown keys and wrong types are errors.

A recipe (see `hardsphere.recipes`) makes a `Config`; overrides such as ``attack.eps=8/255`` change single values of it.
Keys are the dotted paths of the fields below.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal, TypeVar

from hardsphere.errors import HardsphereError, nearest
from hardsphere.objectives import FRAMEWORKS, Adversary, Objective
from hardsphere.objectives.standard import Standard
from hardsphere.threat import Ball

T = TypeVar("T")


def _require(ok: bool, sentence: str) -> None:
    if not ok:
        raise HardsphereError(sentence)


@dataclass(frozen=True)
class HeadConfig:
    """The last layer. With both norms off it is an ordinary linear layer."""

    feature_norm: bool = False  # FN: normalise the feature
    weight_norm: bool = False  # WN: normalise each class vector
    angular: bool = False  # m-HE: -theta instead of cos(theta)
    scale: float = 15.0  # s
    margin: float = 0.0  # m, in the training loss only

    def __post_init__(self) -> None:
        _require(self.scale > 0, f"head.scale is {self.scale}, but it must be above 0.")
        _require(self.margin >= 0, f"head.margin is {self.margin}, but it must be at least 0.")
        both = self.feature_norm and self.weight_norm
        _require(both or not self.angular, "head.angular (m-HE) needs head.feature_norm and head.weight_norm both on.")


@dataclass(frozen=True)
class AttackConfig:
    """The inner maximisation of training, and the ball in which the run is judged."""

    norm: Literal["linf", "l2", "l1"] = "linf"
    eps: float = 8 / 255  # radius, in pixel units
    steps: int = 10  # K
    step_size: float = 2 / 255
    scale: float | None = None  # scale at which the adversary sees the logits; none: the head's own
    start: Literal["uniform", "gaussian", "clean"] = "uniform"
    bn: Literal["eval", "train"] = "eval"  # mode of BatchNorm during the attack

    def __post_init__(self) -> None:
        _require(0 < self.eps < math.inf, f"attack.eps is {self.eps:g}, but it must be above 0, such as 8/255.")
        _require(self.steps >= 0, f"attack.steps is {self.steps}, but it must be at least 0.")
        _require(self.step_size > 0, f"attack.step_size is {self.step_size:g}, but it must be above 0.")
        _require(self.scale is None or self.scale > 0, f"attack.scale is {self.scale}, but it must be above 0.")

    def adversary(self) -> Adversary:
        """These settings as the training frameworks use them."""
        ball = Ball(self.norm, self.eps)
        return Adversary(ball, self.steps, self.step_size, self.scale, self.start, self.bn)


@dataclass(frozen=True)
class DataConfig:
    """Augmentation and the held-out split."""

    pad: int = 0  # pad by this many pixels and crop back at random
    padding: Literal["zero", "reflect"] = "zero"
    flip: bool = False
    cutout: int = 0  # side of the square that is erased; 0 is off
    cutmix: float = 0.0  # alpha of CutMix's Beta distribution; 0 is off
    size: int | None = None  # side of the images of a folder
    validation: float | None = None  # images (or their share, below 1) held out to select the checkpoint

    def __post_init__(self) -> None:
        _require(min(self.pad, self.cutout, self.cutmix) >= 0, "data.pad, data.cutout and data.cutmix start at 0.")
        _require(
            self.validation is None or self.validation > 0, "data.validation must be above 0: checkpoints need it."
        )


@dataclass(frozen=True)
class EmaConfig:
    """Exponential moving average of the weights; the averaged model is the one that is judged and saved."""

    decay: float = 0.0  # 0 is off; .999 for short schedules, .9996 for long ones

    def __post_init__(self) -> None:
        _require(0 <= self.decay < 1, f"ema.decay is {self.decay}, but it must be at least 0 and below 1.")


@dataclass(frozen=True)
class SwaConfig:
    """Stochastic weight averaging: the plain mean of the weights at the ends of the last epochs."""

    start: int = 0  # first epoch (from 1) that is averaged; 0 is off

    def __post_init__(self) -> None:
        _require(self.start >= 0, f"swa.start is {self.start}, but it must be at least 0.")


@dataclass(frozen=True)
class AwpConfig:
    """Adversarial weight perturbation (Wu et al., 2020)."""

    gamma: float = 0.0  # relative size of the perturbation; 0 is off; .01 for PGD-AT, .005 for TRADES
    warmup: int = 0  # epochs before it begins

    def __post_init__(self) -> None:
        _require(self.gamma >= 0 and self.warmup >= 0, "awp.gamma and awp.warmup must be at least 0.")


@dataclass(frozen=True)
class SelectConfig:
    """How the best checkpoint is chosen: margin-PGD, which no logit scale can fool, on the held-out split."""

    steps: int = 10
    limit: int = 1000  # at most this many held-out images

    def __post_init__(self) -> None:
        _require(self.steps >= 1 and self.limit >= 1, "select.steps and select.limit must be at least 1.")


@dataclass(frozen=True)
class Config:
    """Everything that decides the outcome of a run."""

    recipe: str  # the name it was made from
    source: Literal["paper", "code"]  # whose constants: the paper's text or the released code
    framework: str  # the training framework, a key of `objectives.FRAMEWORKS`
    dataset: str  # digits, cifar10, cifar100, folder or arrays
    model: str
    epochs: int
    batch: int
    lr: float
    schedule: Literal["step", "cyclic", "onecycle", "cosine", "constant"] = "step"
    milestones: tuple[float, ...] = (0.75, 0.9)  # of the step schedule, as shares of all epochs
    warmup: float = 0.3  # share of the steps in which the one-cycle rate rises
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 5e-4
    label_smoothing: float = 0.0
    seed: int = 0
    init: str | None = None  # file with weights to start from
    init_warmup: int = 0  # epochs in which only the new head is trained, after init
    precision: Literal["auto", "float32", "bf16"] = "auto"  # auto: bf16 on a GPU, float32 on a CPU
    repeatable: bool = False  # on a GPU: only kernels that repeat bit for bit, so that resuming is exact; slower
    objective: Objective = field(default_factory=Standard)  # the framework's own options
    head: HeadConfig = HeadConfig()
    attack: AttackConfig = AttackConfig()
    data: DataConfig = DataConfig()
    ema: EmaConfig = EmaConfig()
    swa: SwaConfig = SwaConfig()
    awp: AwpConfig = AwpConfig()
    select: SelectConfig = SelectConfig()

    def __post_init__(self) -> None:
        _require(self.epochs >= 1, f"epochs is {self.epochs}, but it must be at least 1.")
        _require(
            self.batch >= 2, f"batch is {self.batch}, but it must be at least 2, because BatchNorm compares images."
        )
        _require(abs(self.seed) < 2**31, f"seed is {self.seed}, but it must lie between -2^31 and 2^31.")
        _require(self.lr > 0, f"lr is {self.lr:g}, but it must be above 0.")
        _require(0 <= self.momentum < 1, f"momentum is {self.momentum}, but it must be at least 0 and below 1.")
        _require(self.momentum > 0 or not self.nesterov, "nesterov needs a momentum above 0.")
        _require(self.weight_decay >= 0, f"weight_decay is {self.weight_decay}, but it must be at least 0.")
        _require(0 <= self.label_smoothing < 1, "label_smoothing must be at least 0 and below 1.")
        _require(0 <= self.warmup <= 1, "warmup is a share of the steps, from 0 to 1.")
        _require(all(0 <= share <= 1 for share in self.milestones), "milestones are shares of the epochs, from 0 to 1.")
        _require(self.init_warmup >= 0, f"init_warmup is {self.init_warmup}, but it must be at least 0.")
        _require(
            self.init is not None or self.init_warmup == 0, "init_warmup trains a new head on old weights: set init."
        )
        _require(
            not (self.ema.decay and self.swa.start), "Set ema.decay or swa.start, not both: they average differently."
        )
        _require(
            self.swa.start <= self.epochs, f"swa.start is {self.swa.start}, but there are only {self.epochs} epochs."
        )


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """All values by dotted key, in the order of the fields."""
    flat: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            flat |= flatten(value, f"{prefix}{item.name}.")
        else:
            flat[prefix + item.name] = value
    return flat


def override(config: T, values: Mapping[str, Any]) -> T:
    """The configuration with some values replaced; a value may be text, such as ``"8/255"``.

    Values of one group are set together, so that a group is only checked in its final state.
    """
    known = flatten(config)
    for key in values:
        if key not in known:
            raise HardsphereError(f"Unknown key '{key}'.{nearest(str(key), known)}")
    return _override(config, values, "")


def _override(config: T, values: Mapping[str, Any], prefix: str) -> T:
    kinds = typing.get_type_hints(type(config))
    changes: dict[str, Any] = {}
    for item in dataclasses.fields(config):  # type: ignore[arg-type]
        key = prefix + item.name
        old = getattr(config, item.name)
        if dataclasses.is_dataclass(old):
            if any(name.startswith(f"{key}.") for name in values):
                changes[item.name] = _override(old, values, f"{key}.")
        elif key in values:
            changes[item.name] = parse(key, values[key], kinds[item.name])
    return dataclasses.replace(config, **changes) if changes else config  # type: ignore[type-var]


def parse_assignments(assignments: list[str]) -> dict[str, str]:
    """``["attack.eps=8/255", ...]`` from a command line, as a dictionary."""
    values: dict[str, str] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise HardsphereError(f"'{text}' is not of the form key=value, such as epochs=20.")
        if key in values:
            raise HardsphereError(f"The key '{key}' is given twice.")
        values[key] = value
    return values


def parse(key: str, value: Any, kind: Any) -> Any:
    """A value, perhaps text, as the type of a field; an error that names the key if it is none."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null", "")):
            return None
        return parse(key, value, next(part for part in arguments if part is not type(None)))
    if origin is Literal:
        if value not in arguments:
            choices = ", ".join(map(str, arguments))
            raise HardsphereError(
                f"{key} is '{value}', but it must be one of: {choices}.{nearest(str(value), arguments)}"
            )
        return value
    if origin is tuple:
        parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
        return tuple(parse(key, part, arguments[0]) for part in parts if part != "")
    readers: dict[Any, Callable[[Any], Any]] = {bool: _boolean, int: _integer, float: number, str: str}
    try:
        return readers[kind](value)
    except (ValueError, TypeError, ZeroDivisionError, OverflowError):
        wanted = {bool: "true or false", int: "a whole number", float: "a finite number such as 0.5 or 8/255"}[kind]
        raise HardsphereError(f"{key} is '{value}', but it must be {wanted}.") from None


def _boolean(value: Any) -> bool:
    known = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    text = str(value).lower()
    if text not in known:
        raise ValueError(text)
    return known[text]


def _integer(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError(value)
    return int(value)


def number(value: Any) -> float:
    """A finite number, perhaps written as a fraction."""
    if isinstance(value, bool):
        raise ValueError(value)
    result = float(value) if not (isinstance(value, str) and "/" in value) else float(Fraction(value.replace(" ", "")))
    if not math.isfinite(result):
        raise ValueError(value)
    return result


def duration(text: str) -> float:
    """``90s``, ``9m`` or ``2h`` in seconds."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh])\s*", text)
    if match is None or float(match[1]) == 0:
        raise HardsphereError(f"The budget is '{text}', but must be a time such as 90s, 9m or 2h.")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def to_dict(config: Any) -> dict[str, Any]:
    """The configuration as plain nested dictionaries, lists and values, for YAML and JSON."""
    plain: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            plain[item.name] = to_dict(value)
        else:
            plain[item.name] = list(value) if isinstance(value, tuple) else value
    return plain


def from_dict(plain: Mapping[str, Any]) -> Config:
    """The configuration that `to_dict` wrote; missing, unknown or wrong values are errors."""
    framework = plain.get("framework")
    if framework not in FRAMEWORKS:
        raise HardsphereError(f"Unknown framework '{framework}'.{nearest(str(framework), FRAMEWORKS)}")
    # Every value is set by the override below; what stands here only has to be of the right type.
    blank = Config("", "paper", framework, "", "", epochs=1, batch=2, lr=1.0, objective=FRAMEWORKS[framework]())
    flat = _flat(plain, "")
    missing = [key for key in flatten(blank) if key not in flat]
    if missing:
        raise HardsphereError(f"The configuration lacks the key '{missing[0]}'.")
    return override(blank, flat)


def _flat(plain: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in plain.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat
