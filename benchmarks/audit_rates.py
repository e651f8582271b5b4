"""How often the audit's LOGIT_SCALE fires, on models that the rule was chosen on and on others that it was not.

    python benchmarks/audit_rates.py design            # the models on which the rule was chosen
    python benchmarks/audit_rates.py judging           # models made for judging it, after it was fixed
    python benchmarks/audit_rates.py judging --part 0/2 --folder F  # half of the work; another process does 1/2

trains small networks on 1,197 of the 8 x 8 digits (seconds each) and fits linear models, sweeps the logit scale on the
other 600 of each, as deployed and through `paper_view`, and prints how many models of each family give the finding on
the first 100, 256 and 600 images. Models and sweeps are kept in the folder; what is there is not made again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from hardsphere.attacks.base import attacking
from hardsphere.evaluate.audit import scale
from hardsphere.evaluate.audit.subject import Subject
from hardsphere.evaluate.statistics import wilson
from hardsphere.recipes import recipe
from hardsphere.sphere import paper_view
from hardsphere.threat import Ball
from hardsphere.train import load, train

TRAINING = 1197
COUNTS = (100, 256, 600)
Trials = dict[float, scale.Trials]


@dataclass(frozen=True)
class Model:
    """One model of a family: a recipe trained for some epochs, or softmax regression with an inverse penalty."""

    family: str
    seed: int
    epochs: int = 0
    network: str = "cnn"
    inverse_penalty: float = 0.0

    def __str__(self) -> str:
        made = f"C{self.inverse_penalty:g}" if self.family == "linear" else f"{self.network}-{self.epochs}-epochs"
        return f"{self.family}-{made}-seed{self.seed}"


def design() -> Iterator[Model]:
    for epochs in (5, 8, 12, 20):
        yield from (Model(family, seed, epochs) for family in ("pgd", "pgd-he") for seed in (100, 101))
        yield from (Model(family, 100, epochs) for family in ("trades", "trades-he"))
    yield from (Model("standard", 100, epochs) for epochs in (3, 8))
    yield from (Model("linear", seed, inverse_penalty=c) for c in (0.1, 1.0, 10.0, 100.0) for seed in (100, 101))


def judging() -> Iterator[Model]:
    """Other seeds, other lengths of training, a narrower network among them, other penalties, another split."""
    for epochs in (6, 10, 15):
        for seed, width in ((200, "cnn"), (201, "cnn"), (202, "cnn-8")):
            yield from (Model(family, seed, epochs, width) for family in ("pgd", "pgd-he"))
        yield from (Model(family, 200, epochs) for family in ("trades", "trades-he"))
    yield from (Model("standard", 200, epochs) for epochs in (4, 10))
    yield from (Model("linear", seed, inverse_penalty=c) for c in (0.3, 1.0, 3.0, 30.0) for seed in (200, 201, 202))


SETS = {"design": (design, 1), "judging": (judging, 2)}
"""Models, and the seed that divides the digits into those for training and those for the audit."""


def digits(folder: Path, seed: int) -> tuple[Path, dict[str, np.ndarray]]:
    """All digits, divided at random; as a file for training, and as arrays."""
    bunch = load_digits()
    pixels = ((bunch.images.astype(int) * 255 + 8) // 16).astype(np.uint8)
    order = np.random.default_rng(seed).permutation(len(pixels))
    rows = {"train": order[:TRAINING], "test": order[TRAINING:]}
    arrays = {f"{kind}_{name}": values[rows[name]] for name in rows for kind, values in _kinds(pixels, bunch.target)}
    path = folder / f"digits-{seed}.npz"
    if not path.exists():
        np.savez(path, **arrays)
    return path, arrays


def _kinds(pixels: np.ndarray, labels: np.ndarray) -> tuple[tuple[str, np.ndarray], ...]:
    return ("x", pixels), ("y", labels)


def network(model: Model, folder: Path, data: Path) -> tuple[nn.Module, Ball]:
    """The recipe's network; inside a smaller ball if it was not trained to hold in one, which would leave nothing."""
    run, eps = folder / "runs" / str(model), 0.1 if model.family == "standard" else 0.2
    values = {"epochs": model.epochs, "seed": model.seed, "model": model.network, "dataset": "arrays"}
    values |= {"attack.steps": 5, "attack.eps": eps, "attack.step_size": eps / 4}
    config = recipe(f"digits/{model.family}", {key: str(value) for key, value in values.items()})
    train(config, run, data_dir=data, resume=run.exists())
    deployed = load(run)
    return deployed.model, deployed.ball


def linear(model: Model, arrays: dict[str, np.ndarray]) -> tuple[nn.Module, Ball]:
    """Softmax regression on a random three quarters of the training images."""
    rows = np.random.default_rng(model.seed).permutation(TRAINING)[: 3 * TRAINING // 4]
    x, y = arrays["x_train"][rows].reshape(len(rows), -1) / 255, arrays["y_train"][rows]
    fitted = LogisticRegression(C=model.inverse_penalty, max_iter=5000).fit(x, y)
    layer = nn.Linear(*fitted.coef_.T.shape)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(fitted.coef_))
        layer.bias.copy_(torch.from_numpy(fitted.intercept_))
    return nn.Sequential(nn.Flatten(), layer).eval(), Ball("linf", 0.1)


@dataclass(frozen=True)
class Swept:
    """A model's sweep: trials by factor on the samples that it gets right, and which of all samples these are."""

    trials: Trials
    right: Tensor

    def found(self, rows: slice) -> bool:
        """Whether the audit of these samples alone would give the finding: noise belongs to a sample, not a batch."""
        inside = torch.zeros_like(self.right)
        inside[rows] = True
        among = inside[self.right]
        here = {factor: one.of(among) for factor, one in self.trials.items()}
        return any(one.is_finding for one in scale.compare(here, int(inside.sum())))

    def to_plain(self) -> tuple[dict[float, tuple[Tensor, Tensor]], Tensor]:
        return {factor: (one.broken, one.kept) for factor, one in self.trials.items()}, self.right

    @classmethod
    def from_plain(cls, trials: dict[float, tuple[Tensor, Tensor]], right: Tensor) -> Swept:
        return cls({factor: scale.Trials(*values) for factor, values in trials.items()}, right)


def swept(model: nn.Module, ball: Ball, x: Tensor, y: Tensor) -> Swept:
    with attacking(model):
        right = model(x).argmax(dim=1) == y
        ids = torch.arange(len(x))[right]
        subject = Subject(model, x[right], y[right], ids, len(x), ball, seed=0, batch=256)
        return Swept(scale.sweep(subject), right)


def make(model: Model, folder: Path, split: int) -> dict[str, Swept]:
    """Sweeps of one model by how it speaks: as deployed and, with a hypersphere head, through `paper_view`."""
    kept = folder / "sweeps" / f"{model}.pt"
    if not kept.exists():
        path, arrays = digits(folder, split)
        built, ball = linear(model, arrays) if model.family == "linear" else network(model, folder, path)
        x, y = torch.from_numpy(arrays["x_test"])[:, None].float() / 255, torch.from_numpy(arrays["y_test"])
        views = {"as deployed": built, "paper_view": paper_view(built)}
        if views["paper_view"] is built:
            views.pop("paper_view")
        kept.parent.mkdir(exist_ok=True)
        torch.save({view: swept(seen, ball, x, y).to_plain() for view, seen in views.items()}, kept)
    return {view: Swept.from_plain(*plain) for view, plain in torch.load(kept).items()}


def table(sweeps: dict[Model, dict[str, Swept]]) -> Iterator[str]:
    """Fired of all models on their first samples with Wilson's interval; (fired of all disjoint parts of that size)."""
    groups: dict[tuple[str, str], list[Swept]] = {}
    for model, views in sweeps.items():
        for view, one in views.items():
            family = f"linear C={model.inverse_penalty:g}" if model.family == "linear" else model.family
            groups.setdefault((family, view), []).append(one)
    yield " ".join([f"{'family':14} {'':12}", *(f"{f'n = {count}':^33}" for count in COUNTS)])
    for (family, view), members in sorted(groups.items(), key=lambda group: group[0][::-1]):
        yield " ".join([f"{family:14} {view:12}", *(_cell(members, count) for count in COUNTS)])


def _cell(members: list[Swept], count: int) -> str:
    parts = [slice(first, first + count) for first in range(0, COUNTS[-1] - count + 1, count)]
    fired = [[one.found(part) for part in parts] for one in members]
    first = sum(row[0] for row in fired)
    low, high = wilson(first, len(members))
    cell = f"{first:2}/{len(members):<2} {100 * low:3.0f}..{100 * high:3.0f} %"
    return f"{cell + f' ({sum(map(sum, fired))}/{len(members) * len(parts)})':^33}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=SETS)
    parser.add_argument("--folder", type=Path, default=Path("runs/audit-rates"))
    parser.add_argument("--part", default="0/1", help="which of how many equal parts of the models")
    options = parser.parse_args()
    torch.set_num_threads(1)
    models, split = SETS[options.set]
    part, parts = map(int, options.part.split("/"))
    folder = options.folder / options.set
    folder.mkdir(parents=True, exist_ok=True)
    sweeps = {model: make(model, folder, split) for model in list(models())[part::parts]}
    print("\n".join(table(sweeps)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
