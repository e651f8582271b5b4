"""Two implementations of AutoAttack's standard set, side by side on one network: ours and pyautoattack's.

    python benchmarks/autoattack_parity.py [--norm linf] [--eps 0.2] [--device cpu]

trains a small network on 1,200 of the 8 x 8 digits by PGD adversarial training (half a minute), attacks the other 597
with both, and prints accuracy and time of each and the samples on which they disagree. It fails if the reference keeps
less than 20 % or more than 80 %, where agreement would say little, or if the two differ by more than 0.5 points.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

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

TRAINING = 1200
LARGEST_DIFFERENCE = 0.5  # points
EPS = {"linf": 0.2, "l2": 0.8}


@dataclass(frozen=True)
class Comparison:
    """What both implementations found on the same samples."""

    n: int
    reference: set[int]
    reference_seconds: float
    ours: set[int]
    ours_seconds: float
    evaluation: Evaluation

    @property
    def difference(self) -> float:
        """Ours minus the reference, in points of robust accuracy."""
        return 100 * (len(self.ours) - len(self.reference)) / self.n

    @property
    def reference_accuracy(self) -> float:
        return len(self.reference) / self.n

    @property
    def agrees(self) -> bool:
        return abs(self.difference) <= LARGEST_DIFFERENCE

    def __str__(self) -> str:
        rows = [
            ("pyautoattack 0.2.0", len(self.reference), self.reference_seconds),
            ("hardsphere", len(self.ours), self.ours_seconds),
        ]
        lines = [
            f"{name:20} {100 * kept / self.n:6.2f} %  {kept:4d} of {self.n}  {spent:7.1f} s"
            for name, kept, spent in rows
        ]
        only = len(self.ours - self.reference), len(self.reference - self.ours)
        lines.append(
            f"difference {self.difference:+.2f} points; only ours keeps {only[0]}, only the reference {only[1]}"
        )
        return "\n".join(lines)


def digits(seed: int = 0) -> tuple[Tensor, Tensor]:
    """All digits in a random order, pixels in [0, 1]."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(data.images, dtype=torch.float32)[order, None] / 16, torch.tensor(data.target)[order]


def trained(x: Tensor, y: Tensor, ball: Ball, epochs: int = 12, batch: int = 64, steps: int = 5) -> nn.Module:
    """A small convolutional network after PGD adversarial training, the same one each time."""
    model = build("cnn-8", num_classes=10, in_channels=1, image_size=8, seed=0)
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for first in range(0, len(x), batch):
            rows = order[first : first + batch]
            images, labels = x[rows], y[rows]
            start = ball.random_start(images, Noise(epoch, rows))
            model.eval()
            attacked = ascend(
                lambda z, labels=labels: F.cross_entropy(model(z), labels, reduction="none"),
                images,
                start,
                ball,
                steps,
                2.5 * ball.eps / steps,
            )
            model.train()
            optimiser.zero_grad()
            F.cross_entropy(model(attacked), labels).backward()
            optimiser.step()
    return model.eval()


def compare(model: nn.Module, x: Tensor, y: Tensor, ball: Ball, batch: int = 256) -> Comparison:
    """Attack the same samples with both implementations."""
    from pyautoattack import AutoAttack

    begin = time.perf_counter()
    ours = evaluate(model, x, y, ball, suite="standard", batch=batch)
    ours_seconds = time.perf_counter() - begin

    norm = {"linf": "Linf", "l2": "L2"}[ball.norm]
    reference = AutoAttack(model, norm=norm, eps=ball.eps, version="standard", device=x.device, seed=0)
    begin = time.perf_counter()
    x_adv, _ = reference.run_standard_evaluation(x, y, batch_size=batch)
    reference_seconds = time.perf_counter() - begin
    with torch.no_grad():
        standing = (model(x_adv).argmax(dim=1) == y).nonzero().squeeze(1).tolist()
    return Comparison(len(x), set(standing), reference_seconds, ours.survivors(), ours_seconds, ours)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--norm", choices=sorted(EPS), default="linf")
    parser.add_argument("--eps", type=float)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    ball = Ball(options.norm, options.eps or EPS[options.norm])
    x, y = digits()
    model = trained(x[:TRAINING], y[:TRAINING], ball).to(options.device)
    found = compare(model, x[TRAINING:].to(options.device), y[TRAINING:].to(options.device), ball)
    show_card(found.evaluation.card)
    print(f"{ball}, {found.n} digits, {options.device}, {torch.get_num_threads()} threads\n{found}")
    telling = 0.2 <= found.reference_accuracy <= 0.8
    if not telling:
        print("The reference keeps too few or too many samples to tell: choose another --eps.")
    return 0 if found.agrees and telling else 1


if __name__ == "__main__":
    sys.exit(main())
