"""The paper's analyses as entries beside its tables: Table 7, Figs. 2 (right), 3 and 4, and section 3.

Each looks at some trained models at once, on the first test images, and gives facts (JSON), lines of Markdown and
figures. They explain the numbers of the tables; a robustness number is only what the standard suite says, so each page
also says where to find it. A new one is one function and one entry in `ANALYSES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hardsphere import analysis
from hardsphere.analysis import figures
from hardsphere.config import to_dict
from hardsphere.evaluate.targets import first_images
from hardsphere.reproduce import paper
from hardsphere.reproduce.building import Plain, commit_of, recipe_line
from hardsphere.reproduce.drawing import drawn
from hardsphere.reproduce.measures import Measurement, Subject
from hardsphere.reproduce.plan import Group
from hardsphere.reproduce.render import header, line
from hardsphere.reproduce.scales import Scale
from hardsphere.reproduce.store import Record, Store
from hardsphere.reproduce.tables import Row, is_among, run_of
from hardsphere.threat import Ball

SCHEMA = "hardsphere.analysis/1"

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Analysis:
    """Something the paper looks at in trained models.

    Attributes:
        name: what it is asked for by.
        title: its title.
        rows: the models.
        look: given the models' subjects, a folder and the number of images, returns facts and draws figures.
        lines: the facts as Markdown.
        images: test images by scale.
        figures: the files that `look` draws.
        note: what a reader must know.
    """

    name: str
    title: str
    rows: tuple[Row, ...]
    look: Callable[..., Facts]
    lines: Callable[[Facts], list[str]]
    images: Mapping[str, int]
    figures: tuple[str, ...] = ()
    note: str = ""
    data: str = "cifar10"

    def rows_at(self, scale: Scale) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if scale.name in row.scales)

    def data_at(self, scale: Scale) -> str:
        return "digits" if scale.name == "smoke" else self.data

    def measurements(self, scale: Scale) -> dict[str, Measurement]:
        return {}

    def group(
        self, scale: Scale, seed: int = 0, overrides: Mapping[str, Any] | None = None, only: Sequence[str] = ()
    ) -> Group | None:
        """The models to look at together, perhaps only some of them; none if what is asked for makes no comparison."""
        rows = [row for row in self.rows_at(scale) if is_among(row, only)]
        if len(rows) < min(2, len(self.rows)):
            return None
        runs = tuple(run_of(self, row, scale, seed, overrides) for row in rows)
        name = f"{self.name}, seed {seed}" if seed else self.name
        images = scale.limits.get(self.name, self.images[scale.name])
        return Group(name, runs, self.look, {"images": images, "seed": seed})

    def recorded(self, scale: Scale, store: Store, seed: int, overrides: Mapping[str, Any] | None) -> Record | None:
        """What was seen in most of the models, on the images asked for if possible, the newest of equals."""
        whole = self.group(scale, seed, overrides)
        assert whole is not None
        said, configs = whole.describe(), [to_dict(run.config) for run in whole.runs]
        best, rank = None, (0, False)
        for record in store.lines:
            ours = record["measurement"]
            if ours.get("function") != said["function"] or ours["options"]["seed"] != seed:
                continue
            if all(config in configs for config in record["configs"].values()):
                worth = (len(record["configs"]), ours["options"] == said["options"])
                best, rank = (record, worth) if worth >= rank else (best, rank)
        return best

    def build(
        self,
        scale: Scale,
        store: Store,
        seeds: Sequence[int] = (0,),
        overrides: Mapping[str, Any] | None = None,
        command: str = "",
        remarks: Sequence[str] = (),
        only: Sequence[str] = (),
    ) -> Plain:
        """What was recorded, in plain values; complete if the models asked for are in it."""
        found = {seed: self.recorded(scale, store, seed, overrides) for seed in seeds}
        records = {seed: record for seed, record in found.items() if record is not None}
        asked = {row.title for row in self.rows_at(scale) if is_among(row, only)}
        seen = [{_plain_title(name) for name in record["configs"]} for record in records.values()]
        absent = [row.title for row in self.rows_at(scale) if not all(row.title in titles for titles in seen)]
        drawings = [figure_name(name, seed) for name in self.figures for seed in records]
        return {
            "schema": SCHEMA,
            "table": self.name,
            "title": self.title,
            "scale": scale.name,
            "about": scale.about,
            "complete": len(records) == len(seeds) and all(asked <= titles for titles in seen),
            "absent": absent if records else [],
            "found": [{"seed": seed, "facts": record["result"]} for seed, record in records.items()],
            "figures": [name for name in drawings if (store.out / name).exists()],
            "balls": [_ball(config) for record in records.values() for config in record["configs"].values()],
            "runs": [_provenance(record, name) for record in records.values() for name in record["configs"]],
            "remarks": [*([self.note] if self.note else []), *remarks],
            "command": command,
        }

    def markdown(self, built: Plain) -> str:
        """The same for people."""
        parts = [f"# {built['title']}, scale {built['scale']}", ""]
        if not built["complete"]:
            parts += ["**Incomplete**: not all models were looked at yet; the same command goes on.", ""]
        if built["absent"]:
            parts += [f"Without {', '.join(built['absent'])}.", ""]
        parts += [f"{built['about'][0].upper()}{built['about'][1:]}. 95 % intervals in brackets.", ""]
        for found in built["found"]:
            parts += [
                f"## Seed {found['seed']}, n = {found['facts']['n']} test images",
                "",
                *self.lines(found["facts"]),
            ]
            drawings = [name for name in self.figures if figure_name(name, found["seed"]) in built["figures"]]
            parts += ["", *(f"![{name}]({figure_name(name, found['seed'])})" for name in drawings), ""]
        parts += [f"- {remark}" for remark in built["remarks"]]
        parts += [f"- Attacks see the models as deployed, in {ball}." for ball in dict.fromkeys(built["balls"])]
        parts.append("- Robustness in both protocols is in the tables of these models: this page explains numbers.")
        for run in built["runs"]:
            parts.append(
                f"- {run['title']}: `{run['recipe']}` seed {run['seed']}, best epoch {run['best_epoch']} of "
                f"{run['epochs']}, {run['selection']}; {run['training_minutes']:.2f} min of training, "
                f"{run['minutes']:.2f} min here, {run['hardware']}, torch {run['torch']}, commit {run['commit']}, "
                f"weights {run['model']}"
            )
        commands = dict.fromkeys([built["command"], *(run["command"] for run in built["runs"])])
        return "\n".join([*parts, *(f"- Command: `{command}`" for command in commands if command)]) + "\n"


def _ball(config: Mapping[str, Any]) -> str:
    return str(Ball(config["attack"]["norm"], config["attack"]["eps"]))


def _provenance(record: Mapping[str, Any], name: str) -> Plain:
    trained, machine = record["trained"][name], record["environment"]
    return {
        "title": name,
        "recipe": recipe_line(record["configs"][name]),
        "seed": record["configs"][name]["seed"],
        "epochs": trained["epochs"],
        "best_epoch": trained["best_epoch"],
        "selection": trained["selection"],
        "training_minutes": trained["minutes"],
        "minutes": record["seconds"] / 60,
        "hardware": machine["device"],
        "torch": machine["torch"],
        "commit": commit_of(record),
        "model": record["models"][name],
        "command": record["command"],
    }


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
    models = {_plain_title(name): subject.deployed.model.to(subject.device) for name, subject in subjects.items()}
    return _Scene(models, first.deployed.ball, *first_images(first.test, images, first.device))


def _plain_title(name: str) -> str:
    return name.partition(", seed ")[0]


def figure_name(name: str, seed: int) -> str:
    """``gradients.png``, or ``gradients-seed1.png``."""
    return f"{name}-seed{seed}.png" if seed else f"{name}.png"


def _mean(summary: Facts, digits: int = 3) -> str:
    """A mean with its normal interval."""
    if summary["mean"] is None:
        return "–"
    if summary["error"] is None:
        return f"{summary['mean']:.{digits}f}"
    half = 1.96 * summary["error"]
    return f"{summary['mean']:.{digits}f} [{summary['mean'] - half:.{digits}f}, {summary['mean'] + half:.{digits}f}]"


def _accuracy(proportion: Facts) -> str:
    low, high = (100 * end for end in proportion["interval"])
    return f"{100 * proportion['accuracy']:.2f} [{low:.1f}, {high:.1f}]"


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
    titles = ("without FN", "with FN", "with FN, same length", "FN − without")
    lines = header(["attack", *titles])
    for name, row in facts["attacks"].items():
        apart = row["fn_minus_without"]
        low, high = (100 * end for end in apart["interval"])
        cells = [_accuracy(row[variant]) for variant in ("without", "fn", "fn_same_length")]
        cells.append(f"{100 * apart['difference']:+.2f} [{low:+.1f}, {high:+.1f}]")
        lines.append(line([f"**{name.upper()}**", *cells]))
        printed = paper.TABLE_7.get(name.upper())
        if printed is not None:
            plain, with_fn = printed["without FN"], printed["with FN"]
            lines.append(line(["the paper's", f"{plain:.2f}", f"{with_fn:.2f}", "", f"{with_fn - plain:+.2f}"]))
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
    lines = header(["layer", *models])
    for layer in layers:
        cells = [_mean(one["layers"][layer]["ratio"], 2) if layer in one["layers"] else "–" for one in models.values()]
        lines.append(line([f"`{layer}`", *cells]))
    return lines


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
        ("gradient through ‖z‖, first step, share", "steps", lambda f: _mean(f["first_step"]["norm_share"])),
        ("what FN removes, or would, share", "steps", lambda f: _mean(f["first_step"]["removed_share"])),
        ("efficiency of the first step on cos θ", "steps", lambda f: _mean(f["first_step"]["efficiency"])),
        ("drop of cos θ over that of pure steps", "steps", lambda f: _number(f["relative_drop"])),
        ("‖W_l‖, largest over smallest class", "bias", lambda f: _number(f["norms_max_over_min"])),
        ("correlation of ‖W_l‖ and attack targets", "bias", lambda f: _number(f["targets_norms_correlation"])),
        ("gradient weight, clean", "weights", lambda f: _mean(f["clean"]["weight"])),
        ("gradient weight, adversarial", "weights", lambda f: _mean(f["adversarial"]["weight"])),
        ("angle to the own class, clean, degrees", "geometry", lambda f: _mean(f["clean"]["own_angle"], 1)),
        ("angle to the own class, adversarial", "geometry", lambda f: _mean(f["adversarial"]["own_angle"], 1)),
        ("‖z‖ adversarial over clean", "geometry", lambda f: _mean(f["norm_ratio"])),
    )
    rows = [line([title, *(read(one) for one in facts[part].values())]) for title, part, read in readings]
    return [*header(["", *facts["steps"]]), *rows]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


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
        lines += ["", *header([f"{attack}, crafted on (rows), judged on", *sources])]
        for source, targets in sources.items():
            cells = [_accuracy(cell) + (" *" if cell["white_box"] else "") for cell in targets.values()]
            lines.append(line([f"**{source}**", *cells]))
    return [*lines[1:], "", "\\* white box"]


def look_perturbations(subjects: Mapping[str, Subject], folder: Path, images: int, seed: int) -> Facts:
    """What PGD adds to the images, model by model."""
    scene = _scene(subjects, images)
    found = analysis.perturbations(scene.models, *scene.images, scene.ball, ids=scene.ids)
    drawn(lambda: figures.perturbation_figure(found), folder / figure_name("perturbations", seed))
    return found.to_dict()


def _perturbation_lines(facts: Facts) -> list[str]:
    lines = header(["model", "right", "l2", "share of pixels near zero", "sparsity"])
    for name, one in facts["models"].items():
        cells = [_accuracy(one["right"]), *(_mean(one[key]) for key in ("l2", "near_zero", "sparsity"))]
        lines.append(line([f"**{name}**", *cells]))
    return lines


_PAIR = (Row("PGD-AT", "pgd"), Row("PGD-AT + HE", "pgd-he"), Row("PGD-AT + m-HE", "pgd-mhe"))
_SIX = tuple(
    Row(title + head, recipe + variant)
    for title, recipe in (("PGD-AT", "pgd"), ("ALP", "alp"), ("TRADES", "trades"))
    for head, variant in (("", ""), (" + HE", "-he"))
)
_FEW = {"smoke": 24, "small": 1000, "full": 1000}

ANALYSES: dict[str, Analysis] = {
    one.name: one
    for one in (
        Analysis(
            "table7",
            "Table 7. FN only in the attack, on a standardly trained network",
            (Row("standard", "standard"),),
            look_normalised,
            _normalised_lines,
            {"smoke": 24, "small": 10_000, "full": 10_000},
            ("table7",),
            "The paper states neither radius, step size nor the scale of FN here.",
        ),
        Analysis(
            "gradients",
            "Fig. 3. Gradient norms at adversarial over those at clean images, by layer",
            _PAIR,
            look_gradients,
            _gradient_lines,
            {"smoke": 16, "small": 500, "full": 500},
            ("gradients",),
            "The paper's values are in its figure only.",
        ),
        Analysis(
            "mechanism",
            "Section 3. Where the steps of an attack go, with and without normalisation",
            _PAIR,
            look_mechanism,
            _mechanism_lines,
            _FEW,
            ("mechanism-steps", "mechanism-bias", "mechanism-weights", "mechanism-geometry"),
        ),
        Analysis(
            "transfer",
            "Fig. 4. Transfer between models, PGD-20 and MIM-20",
            _SIX,
            look_transfer,
            _transfer_lines,
            _FEW,
            ("transfer",),
            "The paper's values are in its figure only.",
        ),
        Analysis(
            "perturbations",
            "Fig. 2, right. Adversarial perturbations with and without HE",
            _PAIR[:2],
            look_perturbations,
            _perturbation_lines,
            {"smoke": 8, "small": 200, "full": 200},
            ("perturbations",),
            "The paper shows ImageNet; here it is the data of the run.",
        ),
    )
}
