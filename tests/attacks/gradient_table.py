"""The gradient attacks as one table, and the small network that several tests attack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, nn

from hardsphere import attacks
from hardsphere.attacks import AttackResult, Stop, losses

ALL, SMOOTH = ("linf", "l2", "l1"), ("linf", "l2")


@dataclass(frozen=True)
class Entry:
    """An attack with its options, and what is expected of it.

    Attributes:
        norms: the norms it is made for.
        many: whether it also reaches the closed form with ten classes (a cross-entropy need not).
        free: whether its outcomes are unchanged when the logits are multiplied.
        targeted: whether it can be given a wished label.
        last: whether it can keep its last iterate.
        few: run it on few samples, because it takes many steps.
    """

    name: str
    attack: Callable[..., AttackResult]
    norms: tuple[str, ...] = ALL
    many: bool = True
    free: bool = True
    targeted: bool = True
    last: bool = True
    few: bool = False

    def __str__(self) -> str:
        return self.name


TABLE = [
    Entry("fgsm-ce", attacks.fgsm, many=False, free=False),
    Entry("fgsm-margin", partial(attacks.fgsm, loss=losses.margin), many=False),
    Entry("bim-ce", attacks.bim, many=False, free=False),
    Entry("bim-margin", partial(attacks.bim, loss=losses.margin)),
    Entry("pgd-ce", attacks.pgd, many=False, free=False),
    Entry("pgd-margin", partial(attacks.pgd, loss=losses.margin)),
    Entry("pgd-dlr", partial(attacks.pgd, loss=losses.dlr)),
    Entry("mim-ce", attacks.mim, many=False, free=False),
    Entry("mim-margin", partial(attacks.mim, loss=losses.margin)),
    Entry("apgd-ce", partial(attacks.apgd, steps=40), SMOOTH, many=False, free=False, last=False),
    Entry("apgd-margin", partial(attacks.apgd, steps=40, loss=losses.margin), SMOOTH, last=False),
    Entry("apgd-dlr", partial(attacks.apgd, steps=40, loss=losses.dlr), SMOOTH, last=False),
    Entry("apgd-targeted", partial(attacks.apgd_targeted, steps=25), SMOOTH, targeted=False, last=False),
    Entry("gama", partial(attacks.gama, steps=40), SMOOTH, free=False),
    Entry("carlini-linf", partial(attacks.carlini_linf, steps=30), ("linf",)),
    Entry(
        "carlini-linf-original",
        partial(attacks.carlini_linf_original, steps=50, step_size=5e-4, initial_const=0.1),
        ("linf",),
        free=False,
        last=False,
        few=True,
    ),
    Entry(
        "carlini-l2", partial(attacks.carlini_l2, steps=100, step_size=2e-3), ("l2",), free=False, last=False, few=True
    ),
]


def entries(norm: str | None = None, **expected: bool) -> list[Entry]:
    """The part of the table that works in a norm and has the given properties."""
    return [
        entry
        for entry in TABLE
        if (norm is None or norm in entry.norms)
        and all(getattr(entry, key) == value for key, value in expected.items())
    ]


def cases(**expected: bool) -> list[tuple[Entry, str]]:
    """Each attack with each of its norms."""
    return [(entry, norm) for norm in ALL for entry in entries(norm, **expected)]


def name(value: object) -> str:
    """Readable ids for pytest."""
    return str(value)


def broken(found: AttackResult) -> Tensor:
    """Which samples the attack says it broke."""
    return torch.tensor([stop is Stop.BROKEN for stop in found.stop])


class SmallNet(nn.Module):
    """A convolutional network with BatchNorm and a final linear layer."""

    def __init__(self, classes: int = 10, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.conv = nn.Conv2d(3, 8, 3, padding=1)
            self.norm = nn.BatchNorm2d(8)
            self.last = nn.Linear(8 * 4, classes)
        self.pool = nn.AdaptiveAvgPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.pool(torch.tanh(3 * self.norm(self.conv(x)))).flatten(1))
        return logits


@cache
def trained() -> tuple[SmallNet, Tensor, Tensor]:
    """A small network fitted to noisy prototypes of ten classes, and images that it classifies correctly."""
    generator = torch.Generator().manual_seed(2)
    prototypes = torch.rand(10, 3, 8, 8, generator=generator)
    labels = torch.arange(400) % 10
    images = (prototypes[labels] * 0.4 + 0.6 * torch.rand(400, 3, 8, 8, generator=generator)).clamp(0, 1)
    model = SmallNet(seed=1).train()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(40):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimiser.step()
    model.eval()
    right = model(images).argmax(1) == labels
    return model, images[right][:128], labels[right][:128]
