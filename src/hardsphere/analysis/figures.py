"""Figures of the analyses, beside the paper's own where it has one. Each returns a matplotlib `Figure` to be saved.

Nothing here touches matplotlib's global state: a figure is drawn off screen (Agg) and belongs to its caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hardsphere.analysis.angles import FeatureGeometry, GradientWeight, weight_at
from hardsphere.analysis.bias import ClassBias
from hardsphere.analysis.direction import StepDirection
from hardsphere.analysis.gradients import GradientRatio
from hardsphere.analysis.images import Perturbations
from hardsphere.analysis.normalised import NormalisedAttack
from hardsphere.analysis.transfer import TransferMatrix
from hardsphere.errors import HardsphereError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours: people who confuse red and green tell them apart too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")


def gradient_ratio_figure(found: Mapping[str, GradientRatio]) -> Figure:
    """Fig. 3: the mean ratio of gradient norms by layer, one line per model, with the middle half of the samples."""
    from matplotlib.ticker import LogFormatter

    _require(found)
    layers = _same([result.layers for result in found.values()], "layers")
    figure, (axes,) = _canvas(1, width=max(6.0, 0.42 * len(layers) + 2.5) + 1.8, height=4.4)
    places = list(range(len(layers)))
    for colour, (name, result) in zip(_colours(found), found.items(), strict=True):
        ratios = result.ratios
        low, high = (torch.nanquantile(ratios, q, dim=0).tolist() for q in (0.25, 0.75))
        axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(places, torch.nanmean(ratios, 0).tolist(), "o-", color=colour, label=f"{name}, mean")
        axes.plot(places, torch.nanquantile(ratios, 0.5, dim=0).tolist(), ":", color=colour, label=f"{name}, median")
    axes.axhline(1, color="0.6", linewidth=0.8)
    if axes.get_ylim()[1] > 10:  # a few samples without a clean gradient, or almost
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(LogFormatter())
    else:
        axes.set_ylim(bottom=0)
    axes.set_xticks(places, _short(layers), rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_ylabel("‖∇L(x*)‖ / ‖∇L(x)‖")
    axes.set_title("Gradient norms, adversarial over clean\n(shaded: the middle half of the samples)", fontsize=10)
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))  # the lines leave it no room
    return figure


def step_direction_figure(found: Mapping[str, StepDirection]) -> Figure:
    """What Fig. 1 illustrates, measured: by step, the share spent on the norm, efficiency, and cos(theta) itself."""
    from matplotlib.ticker import MaxNLocator

    _require(found)
    figure, (share, efficiency, cosine) = _canvas(3, width=12.5, height=3.8)
    for colour, (name, result) in zip(_colours(found), found.items(), strict=True):
        steps = list(range(1, result.cosine.shape[1] + 1))
        share.plot(steps, _means(result.norm_share), "o-", color=colour, label=name, clip_on=False)
        if result.feature_norm:
            share.plot(steps, _means(result.removed_share), "o--", mfc="none", color=colour, label=f"{name}, if no FN")
        efficiency.plot(steps, _means(result.efficiency), "o-", color=colour, label=name)
        cosine.plot(steps, _means(result.cosine), "o-", color=colour, label=name)
    share.set_ylabel("share of ‖∇‖² through ‖z‖")
    share.set_ylim(bottom=0)
    share.set_title("Spent on ‖z‖ (eq. 11; FN: none, eq. 13)")
    efficiency.set_ylabel("decrease of cos θ, part of the largest")
    efficiency.set_title("First-order efficiency")
    cosine.set_ylabel("cos θ(y, y*) before the step")
    cosine.axhline(0, color="0.6", linewidth=0.8)
    cosine.set_title("Towards the boundary at 0")
    for axes in (share, efficiency, cosine):
        axes.set_xlabel("attack step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _legend(axes)
    return figure


def class_bias_figure(found: Mapping[str, ClassBias], class_names: Sequence[str] | None = None) -> Figure:
    """Eq. 16: the lengths of the class vectors, where attacks go, and from which class to which."""
    _require(found)
    names = class_names or [str(index) for index in range(len(next(iter(found.values())).norms))]
    figure, panels = _canvas(2 + len(found), width=4.2 * (2 + len(found)), height=4.2)
    lengths, targets, *maps = panels
    for index, (name, result) in enumerate(found.items()):
        normalised = ", as trained (WN uses 1)" if result.weight_norm else ""
        mean = result.raw_norms / result.raw_norms.mean()
        _bars(lengths, mean.tolist(), index, len(found), f"{name}{normalised}")
        shares = result.targets.double() / result.targets.sum().clamp_min(1)
        _bars(targets, (100 * shares).tolist(), index, len(found), name)
    lengths.set_ylabel("‖Wₗ‖ / mean")
    lengths.set_title("Class vectors")
    targets.axhline(100 / len(names), color="0.6", linewidth=0.8)
    targets.set_ylabel("% of broken samples")
    targets.set_title("Where margin-PGD takes them")
    for axes in (lengths, targets):
        axes.set_xticks(range(len(names)), names, rotation=60 if max(map(len, names)) > 2 else 0)
        axes.set_xlabel("class")
        axes.set_ylim(top=1.3 * axes.get_ylim()[1])  # room for the legend
        _legend(axes)
    for axes, (name, result) in zip(maps, found.items(), strict=True):
        rows = result.aims.double()
        shares = 100 * rows / rows.sum(1, keepdim=True).clamp_min(1)
        drawn = axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=100)
        axes.set_xticks(range(len(names)), names, rotation=60 if max(map(len, names)) > 2 else 0)
        axes.set_yticks(range(len(names)), names)
        axes.set_xlabel("goes towards y*")
        axes.set_ylabel("true class")
        axes.set_title(f"{name}: % of each class")
        figure.colorbar(drawn, ax=axes, shrink=0.7)
    return figure


def gradient_weight_figure(found: Mapping[str, GradientWeight]) -> Figure:
    """Section 3.5: the weight against theta for HE and m-HE, above where clean and adversarial samples lie."""
    _require(found)
    figure, panels = _canvas(len(found), width=max(5.2, 4.6 * len(found)), height=4.2)
    theta = torch.linspace(0, 180, 181, dtype=torch.float64)
    for axes, (name, result) in zip(panels, found.items(), strict=True):
        axes.plot(theta, weight_at(theta, angular=False), color="black", label="weight, HE: sin θ")
        axes.plot(theta, weight_at(theta, angular=True), "--", color="black", label="weight, m-HE: 1")
        shown = axes.twinx()
        for colour, kind in zip(COLOURS, ("clean", "adversarial"), strict=False):
            angles = getattr(result, f"pair_{kind}").numpy()
            shown.hist(
                angles, bins=60, range=(0, 180), color=colour, alpha=0.5, density=True, label=f"θ(y, y*), {kind}"
            )
        shown.set_yticks([])
        shown.set_ylim(top=1.3 * shown.get_ylim()[1])
        axes.axvline(90, color="0.6", linewidth=0.8)
        axes.set_ylim(0, 1.35)
        axes.set_xticks(range(0, 181, 30))
        axes.set_xlabel("θ in degrees (boundary at 90)")
        axes.set_ylabel("|d logit / dθ| at scale 1")
        axes.set_title(f"{name} ({'−θ' if result.angular else 'cos θ'})")
        handles = [artist for one in (axes, shown) for artist in one.get_legend_handles_labels()[0]]
        axes.legend(handles=handles, fontsize=7, frameon=False, loc="upper center", ncols=2)
    return figure


def feature_geometry_figure(found: Mapping[str, FeatureGeometry]) -> Figure:
    """Angles to the own and to the nearest other class vector, and feature norms, clean and adversarial."""
    _require(found)
    figure, panels = _canvas(2 * len(found), width=9.5, height=3.4 * len(found), columns=2)
    for row, (name, result) in enumerate(found.items()):
        angles, norms = panels[2 * row], panels[2 * row + 1]
        clean, adversarial = COLOURS[:2]
        outlines = {
            "own class, clean": (result.own_clean, clean, "-"),
            "nearest other, clean": (result.other_clean, clean, ":"),
            "own class, adversarial": (result.own_adversarial, adversarial, "-"),
            "nearest other, adversarial": (result.other_adversarial, adversarial, ":"),
        }
        _outlines(angles, outlines)
        _outlines(
            norms,
            {"clean": (result.norm_clean, clean, "-"), "adversarial": (result.norm_adversarial, adversarial, "-")},
        )
        angles.set_xlabel("angle between feature and class vector, degrees")
        norms.set_xlabel("‖z‖")
        angles.set_title(f"{name}: angles")
        norms.set_title(f"{name}: feature norms")
        for axes in (angles, norms):
            axes.set_yticks([])
            axes.set_ylabel("density of samples")
            axes.set_ylim(top=1.45 * axes.get_ylim()[1])  # room for the legend
            _legend(axes)
    return figure


def normalised_attack_figure(found: NormalisedAttack) -> Figure:
    """Table 7 as bars: accuracy under PGD-k without FN, with FN, and with FN at the features' own length."""
    labels = {"without": "no FN", "fn": "FN in the attack", "fn_same_length": "FN at mean ‖z‖"}
    figure, (axes,) = _canvas(1, width=5.6, height=3.8)
    summed = found.to_dict()["attacks"]
    for index, (variant, label) in enumerate(labels.items()):
        cells = [summed[f"pgd-{k}"][variant] for k in found.steps]
        _bars(axes, [100 * cell["accuracy"] for cell in cells], index, len(labels), label, _whiskers(cells))
    axes.set_xticks(range(len(found.steps)), [f"PGD-{k}" for k in found.steps])
    axes.set_ylabel("accuracy, % (95 % interval)")
    axes.set_ylim(0, 1.4 * axes.get_ylim()[1])  # room for the legend
    axes.set_title("FN inside the attack only (Table 7; lower: stronger attack)", fontsize=10)
    _legend(axes)
    return figure


def perturbation_figure(found: Perturbations, count: int = 8) -> Figure:
    """Fig. 2, right: clean images above the perturbations found for each model."""
    count = min(count, len(found.x))
    image = found.grid(count)
    rows = ["clean image", *found.deltas]
    figure, (axes,) = _canvas(1, width=1.1 * count + 1.8, height=1.1 * len(rows) + 0.6)
    shown = image.permute(1, 2, 0).numpy()
    axes.imshow(shown if shown.shape[2] == 3 else shown[..., 0], cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    tall = image.shape[1] / len(rows)
    axes.set_yticks([tall * (row + 0.5) for row in range(len(rows))], rows)
    axes.set_xticks([])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title("Perturbations, each scaled to its largest pixel (grey: zero)", fontsize=10)
    return figure


def transfer_figure(found: TransferMatrix) -> Figure:
    """Fig. 4: accuracy of each target on each source's adversarial examples; * marks white-box cases."""
    names, size = found.names, len(found.names)
    side = max(3.6, 0.85 * size + 2.0)
    figure, panels = _canvas(len(found.attacks), width=side * len(found.attacks) + 0.6, height=side)
    for axes, attack in zip(panels, found.attacks, strict=True):
        cells = 100 * found.accuracies(attack)
        drawn = axes.imshow(cells.numpy(), cmap="viridis", vmin=0, vmax=100)
        for row in range(size):
            for column in range(size):
                value = float(cells[row, column])
                star = "*" if row == column else ""
                tone = "white" if value < 60 else "black"
                axes.text(column, row, f"{value:.1f}{star}", ha="center", va="center", color=tone, fontsize=9)
        axes.set_xticks(range(size), names, rotation=30, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(size), names)
        axes.set_xlabel("target")
        axes.set_ylabel("crafted on")
        axes.set_title(f"{attack}, accuracy in %")
    figure.colorbar(drawn, ax=list(panels), shrink=0.7)
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# Parts of figures
# ---------------------------------------------------------------------------------------------------------------------


def _canvas(panels: int, width: float, height: float, columns: int | None = None) -> tuple[Figure, list[Axes]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12)  # type: ignore[union-attr, call-arg]
    columns = columns or panels
    grid: Any = figure.subplots((panels + columns - 1) // columns, columns, squeeze=False)
    axes: list[Axes] = [one for row in grid for one in row]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _require(found: Mapping[str, object]) -> None:
    if not found:
        raise HardsphereError("There is nothing to draw: no results were given.")


def _colours(found: Mapping[str, object]) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(len(found))]


def _bars(
    axes: Axes, values: Sequence[float], index: int, count: int, label: str, whiskers: list[list[float]] | None = None
) -> None:
    """One of several groups of bars side by side."""
    width = 0.8 / count
    places = [place + (index - (count - 1) / 2) * width for place in range(len(values))]
    colour = COLOURS[index % len(COLOURS)]
    axes.bar(places, values, width, color=colour, label=label, yerr=whiskers, capsize=2, error_kw={"linewidth": 0.8})


def _whiskers(cells: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """The ways from an accuracy to the ends of its interval, in percent."""
    down = [100 * (cell["accuracy"] - cell["interval"][0]) for cell in cells]
    up = [100 * (cell["interval"][1] - cell["accuracy"]) for cell in cells]
    return [down, up]


def _outlines(axes: Axes, samples: Mapping[str, tuple[Tensor, str, str]]) -> None:
    """Histograms of (values, colour, line style) over the same bins, so that they can be compared."""
    everything = torch.cat([values for values, _, _ in samples.values()])
    ends = float(everything.min()), float(everything.max())
    for label, (values, colour, style) in samples.items():
        axes.hist(
            values.numpy(), bins=30, range=ends, density=True, histtype="step", color=colour, ls=style, label=label
        )


def _means(values: Tensor) -> list[float]:
    return torch.nanmean(values, dim=0).tolist()


def _legend(axes: Axes) -> None:
    axes.legend(fontsize=8, frameon=False)


def _same(values: Sequence[tuple[str, ...]], what: str) -> tuple[str, ...]:
    if len(set(values)) > 1:
        raise HardsphereError(
            f"The models have different {what}, so one figure cannot hold them: draw them one by one."
        )
    return values[0]


def _short(layers: Sequence[str]) -> list[str]:
    """Layer names without what they all share."""
    short = [name.removesuffix(".weight") for name in layers]
    first = {name.partition(".")[0] for name in short}
    return [name.partition(".")[2] or name for name in short] if len(first) == 1 else short
