"""Golden losses: 20 steps of each framework, in float64, must not change unless someone means it.

After an intended change, `python tests/objectives/test_golden.py` writes the file anew; say why in the commit.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hardsphere import models
from hardsphere.data import Augment, load, train_loader
from hardsphere.noise import Noise
from hardsphere.objectives import Learner, Losses
from hardsphere.objectives.base import State
from hardsphere.recipes import recipe
from hardsphere.sphere import find_head

GOLDEN = Path(__file__).with_name("golden.json")
RUNS = [
    f"digits/{framework}{head}"
    for framework in ("standard", "pgd", "alp", "trades", "free", "fast")
    for head in ("", "-he", "-mhe")
]


def losses_of(name: str) -> list[float]:
    """The mean loss of each of the first 20 updates with plain SGD."""
    config = recipe(name)
    data = load("digits")
    assert data.train is not None
    model = models.build(
        "cnn-4", num_classes=10, in_channels=1, image_size=8, head=models.HeadSpec(**vars(config.head)), seed=0
    )
    model.double().train()
    learner = Learner(model, find_head(model), config.attack.adversary())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    history: list[float] = []
    state: State = {}

    def update(losses) -> None:  # type: ignore[no-untyped-def]
        computed: Losses = losses()
        loss = computed.per_sample.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())

    for batch in train_loader(data.train, 32, torch.device("cpu"), Augment(), 0).epoch(0):
        batch.x = batch.x.double()
        config.objective.step(learner, batch, Noise(0, batch.ids).fold("train", 0), state, update)
        if len(history) >= 20:
            break
    return history[:20]


@pytest.mark.parametrize("name", RUNS)
def test_losses_of_the_first_steps(name: str) -> None:
    assert losses_of(name) == pytest.approx(json.loads(GOLDEN.read_text())[name], rel=1e-6)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: losses_of(name) for name in RUNS}, indent=1) + "\n")
