"""The paper's analyses: Table 7, Figs. 2 (right), 3 and 4, and section 3.

Each looks at some trained models at once, on the first test images, and gives facts (JSON), lines of Markdown and
figures. A new one is one function and one entry in `ANALYSES`.

The functions `look_*` keep their names and this module: both are part of what a recorded look is recognised by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from hardsphere import analysis
from hardsphere.analysis import figures
from hardsphere.evaluate.targets import first_images
from hardsphere.markdown import header, line
from hardsphere.reproduce import paper
from hardsphere.reproduce.analysing import Analysis, Facts, figure_name, plain_title
from hardsphere.reproduce.drawing import drawn
from hardsphere.reproduce.measures import Subject
from hardsphere.reproduce.page_parts import NOTHING, accuracy
from hardsphere.reproduce.table_page import PRINTED
from hardsphere.reproduce.tables import Row
from hardsphere.threat import Ball

# ---------------------------------------------------------------------------------------------------------------------
# What the functions share
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scene:
    """The models on their device, by row, with the images they are shown."""

    models: dict[str, nn.Module]
    ball: Ball
    x: Tensor
    y: Tensor
    ids: Tensor

    @property
    def images(self) -> tuple[Tensor, Tensor]:
        return self.x, self.y


def _scene(subjects: Mapping[str, Subject], images: int) -> _Scene:
    first = next(iter(subjects.values()))
    models = {plain_title(name): subject.deployed.model.to(subject.device) for name, subject in subjects.items()}
    return _Scene(models, first.deployed.ball, *first_images(first.test, images, first.device))


def _mean(summary: Facts, digits: int = 3) -> str:
    """A mean with its normal 95 % interval."""
    if summary["mean"] is None:
        return NOTHING
    if summary["error"] is None:
        return f"{summary['mean']:.{digits}f}"
    half = 1.96 * summary["error"]
    return f"{summary['mean']:.{digits}f} [{summary['mean'] - half:.{digits}f}, {summary['mean'] + half:.{digits}f}]"


# ---------------------------------------------------------------------------------------------------------------------
# Table 7: FN only in the attack
# ---------------------------------------------------------------------------------------------------------------------


def look_normalised(subjects: Mapping[str, Subject], folder: Path, images: int, seed: int) -> Facts:
    """A plainly trained model, attacked with and without FN in the attack."""
    scene = _scene(subjects, images)
    (model,) = scene.models.values()
    found = analysis.normalised_attack(model, *scene.images, scene.ball, seed=seed, ids=scene.ids)
    drawn(lambda: figures.normalised_attack_figure(found), folder / figure_name("table7", seed))
    return found.to_dict()


def _normalised_lines(facts: Facts) -> list[str]:
    titles = ("without FN", "with FN", "with FN, same length", "with − without FN, paired")
    lines = [f"Accuracy in %; clean {accuracy(facts['clean'])}.", "", *header(["attack", *titles])]
    for name, row in facts["attacks"].items():
        apart = row["fn_minus_without"]
        low, high = (100 * end for end in apart["interval"])
        cells = [accuracy(row[variant]) for variant in ("without", "fn", "fn_same_length")]
        cells.append(f"{100 * apart['difference']:+.2f} [{low:+.1f}, {high:+.1f}]")
        lines.append(line([f"**{name.upper()}**", *cells]))
        printed = paper.TABLE_7.get(name.upper())
        if printed is not None:
            plain, with_fn = printed["without FN"], printed["with FN"]
            lines.append(line([PRINTED, f"{plain:.2f}", f"{with_fn:.2f}", NOTHING, f"{with_fn - plain:+.2f}"]))
    return lines


# ---------------------------------------------------------------------------------------------------------------------
# Fig. 3: gradient ratios
# ---------------------------------------------------------------------------------------------------------------------


def look_gradients(subjects: Mapping[str, Subject], folder: Path, images: int, seed: int) -> Facts:
    """How much larger the gradient of the training loss is at adversarial examples, layer by layer."""
    scene = _scene(subjects, images)
    found = {
        name: analysis.gradient_ratio(model, *scene.images, scene.ball, seed=seed, ids=scene.ids)
        for name, model in scene.models.items()
    }
    drawn(lambda: figures.gradient_ratio_figure(found), folder / figure_name("gradients", seed))
    return {"n": len(scene.x), "models": {name: one.to_dict() for name, one in found.items()}}


def _gradient_lines(facts: Facts) -> list[str]:
    models = facts["models"]
    layers = next(iter(models.values()))["layers"]
    lines = header(["layer", *(f"{name}, {kind}" for name in models for kind in ("mean", "median"))])
    for layer in layers:
        ratios = [one["layers"].get(layer, {}).get("ratio") for one in models.values()]
        cells = [text for ratio in ratios for text in _mean_and_median(ratio)]
        lines.append(line([f"`{layer}`", *cells]))
    (first, base), *others = models.items()
    compared = [text for name, one in others for text in _against(name, one["layers"], first, base["layers"])]
    return [*lines, "", *compared] if compared else lines


def _against(name: str, layers: Facts, other: str, base: Facts) -> list[str]:
    """In how many layers mean and median lie above those of another model: the paper's figure shows means alone."""
    pairs = [(layers[layer]["ratio"], base[layer]["ratio"]) for layer in layers if layer in base]
    pairs = [(mine, theirs) for mine, theirs in pairs if mine["mean"] is not None and theirs["mean"] is not None]
    if not pairs:
        return []
    mean, median = (sum(mine[kind] > theirs[kind] for mine, theirs in pairs) for kind in ("mean", "p50"))
    text = f"- {name} against {other}: the mean is higher in {mean} of {len(pairs)} layers, the median in {median}."
    if (2 * mean > len(pairs)) != (2 * median > len(pairs)):
        text += " The mean, which is what the paper shows, is moved by a few images; the typical one says the opposite."
    return [text]


def _mean_and_median(ratio: Facts | None) -> tuple[str, str]:
    if ratio is None or ratio["mean"] is None:
        return NOTHING, NOTHING
    return _mean(ratio, 2), f"{ratio['p50']:.2f}"


# ---------------------------------------------------------------------------------------------------------------------
# Section 3: the mechanism
# ---------------------------------------------------------------------------------------------------------------------


def look_mechanism(subjects: Mapping[str, Subject], folder: Path, images: int, seed: int) -> Facts:
    """Steps spent on the norm (eqs. 11, 13), biased targets (eq. 16), gradient weights, angles and norms."""
    scene = _scene(subjects, images)
    x, y, ids, ball = scene.x, scene.y, scene.ids, scene.ball
    steps, bias, weights, geometry = {}, {}, {}, {}
    for name, model in scene.models.items():
        steps[name] = analysis.step_direction(model, x, y, ball, ids=ids)
        bias[name] = analysis.class_bias(model, x, y, ball, seed=seed, ids=ids)
        weights[name] = analysis.gradient_weight(model, x, y, ball, seed=seed, ids=ids)
        x_adv = analysis.adversarial_examples(model, x, y, ball, seed=seed, ids=ids)
        geometry[name] = analysis.feature_geometry(model, x, y, x_adv.to(x.device), ids=ids)
    drawn(lambda: figures.step_direction_figure(steps), folder / figure_name("mechanism-steps", seed))
    drawn(lambda: figures.class_bias_figure(bias), folder / figure_name("mechanism-bias", seed))
    drawn(lambda: figures.gradient_weight_figure(weights), folder / figure_name("mechanism-weights", seed))
    drawn(lambda: figures.feature_geometry_figure(geometry), folder / figure_name("mechanism-geometry", seed))
    return {
        "n": len(scene.x),
        "steps": {name: one.to_dict() for name, one in steps.items()},
        "bias": {name: one.to_dict() for name, one in bias.items()},
        "weights": {name: one.to_dict() for name, one in weights.items()},
        "geometry": {name: one.to_dict() for name, one in geometry.items()},
    }


def _mechanism_lines(facts: Facts) -> list[str]:
    readings: tuple[tuple[str, str, Callable[[Facts], str]], ...] = (
        ("share through ‖z‖, first step", "steps", lambda f: _mean(f["first_step"]["norm_share"])),
        ("share that FN removes, first step", "steps", lambda f: _mean(f["first_step"]["removed_share"])),
        ("efficiency, first step", "steps", lambda f: _mean(f["first_step"]["efficiency"])),
        ("relative drop of cos θ, all steps", "steps", lambda f: _number(f["relative_drop"])),
        ("‖W_l‖, largest over smallest", "bias", lambda f: _number(f["norms_max_over_min"])),
        ("correlation of ‖W_l‖ with targets", "bias", _correlation),
        ("gradient weight, clean", "weights", lambda f: _mean(f["clean"]["weight"])),
        ("gradient weight, adversarial", "weights", lambda f: _mean(f["adversarial"]["weight"])),
        ("angle to the own class, clean, degrees", "geometry", lambda f: _mean(f["clean"]["own_angle"], 1)),
        ("angle to the own class, adversarial, degrees", "geometry", lambda f: _mean(f["adversarial"]["own_angle"], 1)),
        ("‖z‖, adversarial over clean", "geometry", lambda f: _mean(f["norm_ratio"])),
    )
    rows = [line([title, *(read(one) for one in facts[part].values())]) for title, part, read in readings]
    return [*header(["quantity", *facts["steps"]]), *rows]


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}"


def _correlation(bias: Facts) -> str:
    """Pearson's correlation over the classes, with Fisher's interval."""
    value, classes = bias["targets_norms_correlation"], len(bias["norms"])
    if value is None or classes <= 3 or abs(value) >= 1:
        return _number(value)
    half = 1.96 / math.sqrt(classes - 3)
    low, high = (math.tanh(math.atanh(value) + side * half) for side in (-1, 1))
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


# ---------------------------------------------------------------------------------------------------------------------
# Fig. 4: transfer; Fig. 2, right: perturbations
# ---------------------------------------------------------------------------------------------------------------------


def look_transfer(subjects: Mapping[str, Subject], folder: Path, images: int, seed: int) -> Facts:
    """Craft on each model, ask all of them."""
    scene = _scene(subjects, images)
    found = analysis.transfer_matrix(scene.models, *scene.images, scene.ball, seed=seed, ids=scene.ids)
    drawn(lambda: figures.transfer_figure(found), folder / figure_name("transfer", seed))
    return found.to_dict()


def _transfer_lines(facts: Facts) -> list[str]:
    lines = []
    for attack, sources in facts["attacks"].items():
        lines += ["", *header([f"{attack.upper()}: crafted on ↓, judged on →", *sources])]
        for source, targets in sources.items():
            cells = [accuracy(cell) + (" \\*" if cell["white_box"] else "") for cell in targets.values()]
            lines.append(line([f"**{source}**", *cells]))
    return ["Accuracy in %; * where the attack saw the judge itself (white box).", "", *lines[1:]]


def look_perturbations(subjects: Mapping[str, Subject], folder: Path, images: int, seed: int) -> Facts:
    """What PGD adds to the images, model by model."""
    scene = _scene(subjects, images)
    found = analysis.perturbations(scene.models, *scene.images, scene.ball, ids=scene.ids)
    drawn(lambda: figures.perturbation_figure(found), folder / figure_name("perturbations", seed))
    return found.to_dict()


def _perturbation_lines(facts: Facts) -> list[str]:
    lines = header(
        ["model", "accuracy under attack, %", "l2 norm, pixel units", "near zero, share of pixels", "sparsity"]
    )
    for name, one in facts["models"].items():
        cells = [accuracy(one["right"]), *(_mean(one[key]) for key in ("l2", "near_zero", "sparsity"))]
        lines.append(line([f"**{name}**", *cells]))
    return lines


_PAIR = (Row("PGD-AT", "pgd"), Row("PGD-AT + HE", "pgd-he"), Row("PGD-AT + m-HE", "pgd-mhe"))
_SIX = tuple(
    Row(title + head, recipe + variant)
    for title, recipe in (("PGD-AT", "pgd"), ("ALP", "alp"), ("TRADES", "trades"))
    for head, variant in (("", ""), (" + HE", "-he"))
)
_FEW = {"smoke": 24, "small": 1000, "full": 1000}

_PGD_10 = "the last iterate of PGD-10 on the cross-entropy, from a random start, in steps of 2.5 eps / 10"
_FIGURE_ONLY = "The paper's values are in its figure only."

_NORMALISED_TERMS = {
    "with FN": "features of length 1 inside the attack, as the paper writes it; that flattens the softmax as well",
    "with FN, same length": "features of their mean length, so that little but the direction of a step changes",
}

_GRADIENT_TERMS = {
    "mean": "over the images, as in the paper; a few images with almost no clean gradient can dominate it",
    "median": "of the images, which those few do not move",
}

_MECHANISM_TERMS = {
    "share through ‖z‖": (
        "of the gradient of the margin logit W_yy*·z by the image, the part (of its squared length) that only changes "
        "the length of the feature z, and so no answer (eq. 11); 0 with feature normalisation FN (eq. 13). y* is the "
        "class that the attack ends at"
    ),
    "share that FN removes": "the same for the head without FN on the same features; without FN it is the share itself",
    "efficiency": (
        "how much of the largest first-order decrease of cos θ a step attains, θ being the angle between z and "
        "W_y − W_y*; 1 is a step along the gradient of cos θ alone"
    ),
    "relative drop of cos θ": (
        "how far all steps on all images together lower cos θ, over what steps along its own gradient would; one "
        "number, so that it has no interval"
    ),
    "‖W_l‖": "the length of a class vector as the head uses it: a property of the weights, without an interval",
    "correlation of ‖W_l‖ with targets": (
        "Pearson's over the classes, between ‖W_l‖ and the number of images that PGD-20 on the margin breaks into "
        "class l (eq. 16), with Fisher's interval over the classes; none where all class vectors have one length"
    ),
    "gradient weight": (
        "|d logit / dθ| at scale 1 and θ the angle to the own class, which weighs an image in training (section 3.5): "
        "sin θ where the logit is a cosine, 1 for m-HE"
    ),
    "angle to the own class": "between the feature and the vector of the true class",
    "‖z‖, adversarial over clean": "the length of the feature at the adversarial example over that at the clean image",
}

_MECHANISM_FIGURES = {
    "mechanism-steps": (
        "Means over the images, step by step: the share of the gradient spent on ‖z‖, the efficiency of the step, and "
        "cos θ before it"
    ),
    "mechanism-bias": (
        "The lengths of the class vectors, the classes that broken images are taken to, and from which class to which"
    ),
    "mechanism-weights": "The weight by θ (lines), and where clean and adversarial images lie (bars: their density)",
    "mechanism-geometry": "Angles to the own and to the nearest other class, and lengths of features",
}

_PERTURBATION_TERMS = {
    "near zero": "below a tenth of the largest pixel of the perturbation",
    "sparsity": "Hoyer's: 0 if all pixels are equal in size, 1 if only one is not zero",
}

ANALYSES: dict[str, Analysis] = {
    one.name: one
    for one in (
        Analysis(
            "table7",
            "Table 7. FN only in the attack, on a standardly trained network",
            "PGD of 1 and of 2 steps on a network trained without adversary and without FN, crafted through the "
            "network as it is and through feature normalisation (FN); judged on the network as it is. Each step is "
            "eps × 0.003 / 0.031; the last iterate counts",
            (Row("standard", "standard"),),
            look_normalised,
            _normalised_lines,
            images={"smoke": 24, "small": 10_000, "full": 10_000},
            terms=_NORMALISED_TERMS,
            figures={"table7": "Accuracy under the attacks, with 95 % intervals; lower is a stronger attack"},
            note="The paper states neither radius, step size nor the scale of FN here.",
        ),
        Analysis(
            "gradients",
            "Fig. 3. Gradient norms at adversarial over those at clean images, by layer",
            "The norm of the gradient of the training loss (eq. 6, with s and m) by the weights of a layer, at the "
            "adversarial example x* over that at the clean image x, image by image: above 1, training attends more to "
            f"adversarial examples. x* is {_PGD_10}",
            _PAIR,
            look_gradients,
            _gradient_lines,
            images={"smoke": 16, "small": 500, "full": 500},
            terms=_GRADIENT_TERMS,
            figures={"gradients": "By layer, from input to output: mean, median, and the middle half of the images"},
            note=_FIGURE_ONLY,
        ),
        Analysis(
            "mechanism",
            "Section 3. Where the steps of an attack go, with and without normalisation",
            "Steps: PGD-10 on the cross-entropy from the clean image, in steps of 2.5 eps / 10. Targets: PGD-20 on the "
            f"margin, its last iterate. Weights, angles and norms: at the clean image and at {_PGD_10}",
            _PAIR,
            look_mechanism,
            _mechanism_lines,
            images=_FEW,
            terms=_MECHANISM_TERMS,
            figures=_MECHANISM_FIGURES,
        ),
        Analysis(
            "transfer",
            "Fig. 4. Transfer between models, PGD-20 and MIM-20",
            "Adversarial examples crafted on each model and judged by all of them; each step is eps × 0.003 / 0.031, "
            "and the last iterate counts",
            _SIX,
            look_transfer,
            _transfer_lines,
            images=_FEW,
            figures={"transfer": "Accuracy in % of the model in the column on what was crafted on the one in the row"},
            note=_FIGURE_ONLY,
        ),
        Analysis(
            "perturbations",
            "Fig. 2, right. Adversarial perturbations with and without HE",
            "What PGD-20 on the cross-entropy adds to an image, from the clean image in steps of 2.5 eps / 20; the "
            "last iterate",
            _PAIR[:2],
            look_perturbations,
            _perturbation_lines,
            images={"smoke": 8, "small": 200, "full": 200},
            terms=_PERTURBATION_TERMS,
            figures={"perturbations": "Clean images, and what is added to each, scaled to its own largest pixel"},
            note="The paper shows ImageNet; here it is the data of the run.",
        ),
    )
}
