"""From accuracies to the numbers that are published: mCA as the paper defines it, and the mean corruption error.

mCA is the mean accuracy over 15 corruptions x 5 severities. It exists only if all 75 cells were measured on the
published corruptions; otherwise it is `None`, and a note says why, next to the mean over what can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hardsphere.corruptions.constants import CORRUPTIONS, SEVERITIES, check_names
from hardsphere.errors import HardsphereError

Cell = tuple[str, int]


@dataclass(frozen=True)
class Baseline:
    """The errors that a mean corruption error is measured against.

    Args:
        name: what the errors belong to, for people.
        errors: the error of each of the 15 corruptions, in (0, 1], averaged over the severities.
    """

    name: str
    errors: Mapping[str, float]

    def __post_init__(self) -> None:
        missing = [name for name in CORRUPTIONS if name not in self.errors]
        if missing:
            raise HardsphereError(f"The baseline '{self.name}' lacks the error of {', '.join(missing)}.")
        for name in CORRUPTIONS:
            if not 0 < self.errors[name] <= 1:
                raise HardsphereError(
                    f"The baseline '{self.name}' has error {self.errors[name]} on {name}, but errors lie in (0, 1]."
                )


ALEXNET = Baseline(
    "AlexNet on ImageNet-C (Hendrycks & Dietterich)",
    {
        "gaussian_noise": 0.886428,
        "shot_noise": 0.894468,
        "impulse_noise": 0.922640,
        "defocus_blur": 0.819880,
        "glass_blur": 0.826268,
        "motion_blur": 0.785948,
        "zoom_blur": 0.798360,
        "snow": 0.866816,
        "frost": 0.826572,
        "fog": 0.819324,
        "brightness": 0.564592,
        "contrast": 0.853204,
        "elastic_transform": 0.646056,
        "pixelate": 0.717840,
        "jpeg_compression": 0.606500,
    },
)
"""The usual baseline of ImageNet-C. CIFAR-10-C has none: name your own, such as a plainly trained model."""


@dataclass(frozen=True)
class CorruptionScores:
    """What a table of accuracies amounts to. All numbers are shares in [0, 1], except mCE, which may exceed 1.

    Args:
        table: the accuracy of each (corruption, severity) measured.
        per_corruption: the mean over five severities, of each corruption measured at all of them.
        mca: the mean over 15 x 5, or `None` if that is not what was measured.
        mca_without_frost: the mean over the other 14 x 5, or `None` if some of these are missing.
        mce: the mean over 15 corruptions of error / error of the baseline, or `None`.
        baseline: the name of the baseline of ``mce``.
        frost_stand_in: whether frost was the drawn stand-in.
        note: why a number is missing, in one sentence; empty if none is.
    """

    table: dict[Cell, float]
    per_corruption: dict[str, float]
    mca: float | None
    mca_without_frost: float | None
    mce: float | None
    baseline: str | None
    frost_stand_in: bool
    note: str

    @property
    def headline(self) -> str:
        """The mean that may be quoted, with its name: the whole one, or that without frost and why."""
        if self.mca is not None:
            return f"mCA {self.mca:.2%}"
        if self.mca_without_frost is not None:
            return f"mCA (14, without frost) {self.mca_without_frost:.2%}. {self.note}"
        return f"no mCA. {self.note}"


def scores(
    accuracy: Mapping[Cell, float], *, frost_stand_in: bool, baseline: Baseline | None = None
) -> CorruptionScores:
    """Means, table and mean corruption error of measured accuracies.

    Args:
        accuracy: the accuracy in [0, 1] of each (corruption, severity); the four extra corruptions may be among them
            and enter no mean.
        frost_stand_in: whether frost was the drawn stand-in (`FrostSource.stand_in`, or the manifest of a set).
        baseline: what the corruption error is relative to; without it there is none.
    """
    _check(accuracy)
    per_corruption = {
        name: math.fsum(accuracy[name, severity] for severity in SEVERITIES) / len(SEVERITIES)
        for name in dict.fromkeys(name for name, _ in accuracy)
        if all((name, severity) in accuracy for severity in SEVERITIES)
    }
    missing = [cell for cell in cells() if cell not in accuracy]
    note = _note(missing, frost_stand_in)
    others = [name for name in CORRUPTIONS if name != "frost"]
    has_others = all(name in per_corruption for name in others)
    complete = not missing and not frost_stand_in
    mce = None
    if complete and baseline is not None:
        ratios = [(1 - per_corruption[name]) / baseline.errors[name] for name in CORRUPTIONS]
        mce = math.fsum(ratios) / len(ratios)
    return CorruptionScores(
        table=dict(accuracy),
        per_corruption=per_corruption,
        mca=math.fsum(per_corruption[name] for name in CORRUPTIONS) / len(CORRUPTIONS) if complete else None,
        mca_without_frost=math.fsum(per_corruption[name] for name in others) / len(others) if has_others else None,
        mce=mce,
        baseline=baseline.name if baseline is not None else None,
        frost_stand_in=frost_stand_in,
        note=note,
    )


def cells() -> list[Cell]:
    """The 75 cells of the mean, corruption by corruption."""
    return [(name, severity) for name in CORRUPTIONS for severity in SEVERITIES]


def _check(accuracy: Mapping[Cell, float]) -> None:
    check_names([name for name, _ in accuracy])
    for (name, severity), value in accuracy.items():
        if severity not in SEVERITIES:
            raise HardsphereError(f"The table has a severity {severity} of {name}, but severities are 1 to 5.")
        if not 0 <= value <= 1:
            raise HardsphereError(
                f"The accuracy of {name} at severity {severity} is {value}, but it must be a share between 0 and 1."
            )


def _note(missing: list[Cell], frost_stand_in: bool) -> str:
    if missing:
        name, severity = missing[0]
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return f"The mean over 15 x 5 needs all 75 cells, but {name} at severity {severity}{more} was not measured."
    if frost_stand_in:
        return "Frost was a drawn stand-in for the published photographs, so no mean over all 15 is given."
    return ""
