"""Two implementations of AutoAttack's standard set, side by side on one network: ours and pyautoattack's.

    python benchmarks/autoattack_parity.py [--norm linf] [--eps 0.25] [--device cpu] [--seeds 2]

trains a small network on 797 of the 8 x 8 digits by PGD adversarial training, attacks the other 1,000 with both, and
prints accuracy and time of each, the difference, and the samples on which they disagree. It fails if the reference
keeps less than 20 % or more than 80 %, where agreement would say little, or if the two differ by more than 0.5 points.

A thousand images, so that one sample is 0.1 points; a radius that leaves about a quarter of them, because the time goes
into samples that stand; and several seeds of each, whose means are compared.

Most of a difference is chance: two seeds of the same Auto-PGD disagree on some samples near the boundary, and two seeds
of either implementation may lie half a point apart. A small part is not. The reference's Square draws the corner of a
window of side s from [0, h - s), so that none ever covers the last row or column, whose pixels keep their first
stripes: 23 % of an image of 8 x 8, but 6 % of one of 32 x 32. Ours covers them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from hardsphere.attacks.pgd import ascend
from hardsphere.evaluate import Evaluation, evaluate
from hardsphere.models import build
from hardsphere.noise import Noise
from hardsphere.report import show_card
from hardsphere.threat import Ball

TRAINING = 797
LARGEST_DIFFERENCE = 0.5  # points
TELLING = 0.2, 0.8  # what the reference must keep for agreement to say something
EPS = {"linf": 0.25, "l2": 0.95}


@dataclass(frozen=True)
class Run:
    """The samples that one implementation keeps with one seed, and its time."""

    kept: frozenset[int]
    seconds: float


@dataclass(frozen=True)
class Comparison:
    """What both implementations found on the same samples, one run per seed; their means are what is compared."""

    n: int
    ours: tuple[Run, ...]
    references: tuple[Run, ...]
    evaluation: Evaluation

    @property
    def difference(self) -> float:
        """Ours minus the reference, in points of robust accuracy."""
        return self._points(_kept(self.ours) - _kept(self.references))

    @property
    def telling(self) -> bool:
        low, high = TELLING
        return low <= _kept(self.references) / self.n <= high

    @property
    def agrees(self) -> bool:
        return abs(self.difference) <= LARGEST_DIFFERENCE

    def __str__(self) -> str:
        lines = [self._row(f"pyautoattack 0.2.0, seed {seed}", run) for seed, run in enumerate(self.references)]
        lines += [self._row(f"hardsphere, seed {seed}", run) for seed, run in enumerate(self.ours)]
        lines.append(f"difference of the means {self.difference:+.2f} points")
        ours, reference = self.ours[0].kept, self.references[0].kept
        breaker = self.evaluation.ledger.broken(self.evaluation.balls[-1].eps)
        by = Counter(breaker[sample] for sample in reference - ours)
        names = ", ".join(f"{name} {count}" for name, count in by.most_common())
        lines.append(f"of the first seeds, only ours keeps {len(ours - reference)}; only the reference {by.total()}")
        if names:
            lines[-1] += f" (which ours broke by {names})"
        return "\n".join(lines)

    def _row(self, name: str, run: Run) -> str:
        return f"{name:28} {self._points(len(run.kept)):6.2f} %  {len(run.kept):4d} of {self.n}  {run.seconds:7.1f} s"

    def _points(self, count: float) -> float:
        return 100 * count / self.n


def _kept(runs: tuple[Run, ...]) -> float:
    """How many samples are kept, in the mean over the seeds."""
    return sum(len(run.kept) for run in runs) / len(runs)


def digits(seed: int = 0) -> tuple[Tensor, Tensor]:
    """All digits in a random order, pixels in [0, 1]."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(data.images, dtype=torch.float32)[order, None] / 16, torch.tensor(data.target)[order]


def trained(x: Tensor, y: Tensor, ball: Ball, epochs: int = 18, batch: int = 64, steps: int = 5) -> nn.Module:
    """A small convolutional network after PGD adversarial training, the same one each time on as many threads."""
    model = build("cnn-8", num_classes=10, in_channels=1, image_size=8, seed=0)
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for first in range(0, len(x), batch):
            rows = order[first : first + batch]
            images, labels = x[rows], y[rows]
            start = ball.random_start(images, Noise(epoch, rows))
            model.eval()
            attacked = ascend(partial(_losses, model, labels), images, start, ball, steps, 2.5 * ball.eps / steps)
            model.train()
            optimiser.zero_grad()
            _losses(model, labels, attacked).mean().backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return model.eval()


def _losses(model: nn.Module, labels: Tensor, images: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels, reduction="none")


def compare(model: nn.Module, x: Tensor, y: Tensor, ball: Ball, seeds: int = 2, batch: int = 500) -> Comparison:
    """Attack the same samples with both implementations, once for each seed."""
    ours, evaluations = [], []
    for seed in range(seeds):
        begin = time.perf_counter()
        evaluations.append(evaluate(model, x, y, ball, suite="standard", seed=seed, batch=batch))
        ours.append(Run(frozenset(evaluations[-1].survivors()), time.perf_counter() - begin))
    references = tuple(_reference(model, x, y, ball, seed, batch) for seed in range(seeds))
    return Comparison(len(x), tuple(ours), references, evaluations[0])


def _reference(model: nn.Module, x: Tensor, y: Tensor, ball: Ball, seed: int, batch: int) -> Run:
    from pyautoattack import AutoAttack  # type: ignore[import-untyped]

    norm = {"linf": "Linf", "l2": "L2"}[ball.norm]
    reference = AutoAttack(model, norm=norm, eps=ball.eps, version="standard", device=x.device, seed=seed)
    begin = time.perf_counter()
    x_adv, _ = reference.run_standard_evaluation(x, y, batch_size=batch)
    seconds = time.perf_counter() - begin
    with torch.no_grad():
        standing = (model(x_adv).argmax(dim=1) == y).nonzero().squeeze(1).tolist()
    return Run(frozenset(standing), seconds)


def compare_on_digits(ball: Ball, seeds: int = 2, device: str = "cpu") -> Comparison:
    """Train on the first digits and attack the others."""
    x, y = digits()
    model = trained(x[:TRAINING], y[:TRAINING], ball).to(device)
    return compare(model, x[TRAINING:].to(device), y[TRAINING:].to(device), ball, seeds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--norm", choices=sorted(EPS), default="linf")
    parser.add_argument("--eps", type=float)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=2, help="how many seeds of each, at least 1")
    options = parser.parse_args()
    ball = Ball(options.norm, options.eps or EPS[options.norm])
    found = compare_on_digits(ball, max(options.seeds, 1), options.device)
    show_card(found.evaluation.card)
    print(f"{ball}, {found.n} digits, {options.device}, {torch.get_num_threads()} threads\n{found}")
    if not found.telling:
        print("The reference keeps too few or too many samples to tell: choose another --eps.")
    return 0 if found.agrees and found.telling else 1


if __name__ == "__main__":
    sys.exit(main())
