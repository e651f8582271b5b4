"""The compiled inner maximisation against its slow twin, on a CPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from hardsphere import models
from hardsphere.data import Batch
from hardsphere.noise import Noise
from hardsphere.objectives import Learner
from hardsphere.recipes import recipe
from hardsphere.sphere import find_head

pytestmark = pytest.mark.check  # compiling takes half a minute


@pytest.mark.parametrize("name", ["pgd-he", "trades-mhe"])
def test_compiled_maximisation_finds_the_same_images(name: str) -> None:
    """One graph for each piece, used again for the next batch; sign steps may turn at a few rounded gradients."""
    config = recipe(f"cifar10/{name}", {"attack.steps": "3"})
    head = models.HeadSpec(**vars(config.head))
    model = models.build("cnn-4", num_classes=10, head=head, seed=0).train()
    adversary = config.attack.adversary()
    plain = Learner(model, find_head(model), adversary)
    fused = partial(torch.compile, dynamic=False, fullgraph=True)
    fast = Learner(torch.compile(model, dynamic=False), find_head(model), adversary, 0.0, fused)  # type: ignore[arg-type]
    graphs = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        x = torch.rand(8, 3, 32, 32, generator=generator)
        batch = Batch(x, torch.randint(10, (8,), generator=generator), torch.arange(8))
        noise = Noise(seed, batch.ids).fold("train", torch.tensor(seed))
        slow, quick = (config.objective.craft(learner, batch, noise) for learner in (plain, fast))
        assert (slow != quick).float().mean() < 0.01
        assert (quick - x).abs().max() <= adversary.ball.eps + 1e-6
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[2]
