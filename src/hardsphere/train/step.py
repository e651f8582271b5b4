"""One training step: the objective, the optimiser and the averages, written so that a GPU can replay it as one graph.

Nothing here waits for the device: counters that the step needs (the number of the update, the learning rate, the epoch)
are tensors on it, sums for the log are added up there, and a loss that is not finite is only remembered.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from hardsphere.config import Config
from hardsphere.data import Batch
from hardsphere.noise import Noise
from hardsphere.objectives import Learner, Losses
from hardsphere.objectives.base import State
from hardsphere.runtime import autocast
from hardsphere.sphere import find_head
from hardsphere.train.averaging import Average
from hardsphere.train.capture import Captured
from hardsphere.train.guards import FiniteGuard
from hardsphere.train.perturbation import worst_weights
from hardsphere.train.schedules import learning_rate

# How many batches may pass on a GPU before the host looks whether a loss was not finite.
_LOOK_EVERY = 50


class Stepper:
    """Trains a model batch by batch.

    Args:
        config: what to train.
        model: the model in training.
        average: the weight average that follows it.
        batches_per_epoch: of full and partial batches.
        fast: compile the network and replay each step as a CUDA graph; needs a GPU.
        say: told how long compiling took.
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        average: Average,
        device: torch.device,
        batches_per_epoch: int,
        fast: bool = False,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.config, self.model, self.average, self.device = config, model, average, device
        self.updates_per_batch = config.objective.updates_per_batch
        self.updates_per_epoch = batches_per_epoch * self.updates_per_batch
        self.optimizer = torch.optim.SGD(
            model.parameters(),
            lr=torch.tensor(config.lr, device=device) if fast else config.lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            nesterov=config.nesterov,
            fused=fast or None,
        )
        self.guard = FiniteGuard(device, self.updates_per_epoch, self.updates_per_batch)
        self.updates = 0
        self.clock = torch.zeros((), dtype=torch.int64, device=device)  # the same number, on the device
        self.rates = torch.zeros(self.updates_per_batch, device=device)
        self.state: State = {}
        self.meters: dict[str, Tensor] = {}
        adversary = config.attack.adversary()
        self.plain = Learner(model, find_head(model), adversary, config.label_smoothing)
        self.captured: Captured | None = None
        if fast:
            network = cast(nn.Module, torch.compile(model, dynamic=False))
            fused = partial(torch.compile, dynamic=False)
            compiled = Learner(network, find_head(model), adversary, config.label_smoothing, fused)
            self.captured = Captured(lambda batch, epoch, awp: self._train(compiled, batch, epoch, awp), say)

    def step(self, batch: Batch, epoch: int, index: int) -> None:
        """Train on one batch, the ``index``-th of its epoch."""
        # Layers with randomness of their own (dropout) draw from torch's generator: fix it per batch, not per run.
        torch.manual_seed(_mixed(self.config.seed, epoch, index))
        for replay in range(self.updates_per_batch):
            self.rates[replay] = learning_rate(self.config, self.updates + replay, self.updates_per_epoch)
        self.clock.fill_(self.updates)
        awp = bool(self.config.awp.gamma) and epoch >= self.config.awp.warmup
        if self.captured is not None and len(batch.x) == self.config.batch:
            batch.x = batch.x.contiguous(memory_format=torch.channels_last)
            self.captured(batch, epoch, awp)
        else:
            self._train(self.plain, batch, torch.tensor(epoch, device=self.device), awp)
        self.updates += self.updates_per_batch
        if index % _LOOK_EVERY == 0:
            self.guard.check()

    def _train(self, learner: Learner, batch: Batch, epoch: Tensor, awp: bool) -> None:
        """The objective's own step; a function of what is on the device alone."""
        noise = Noise(self.config.seed, batch.ids).fold("train", epoch)
        replays = iter(range(self.updates_per_batch))

        def update(losses: Callable[[], Losses]) -> None:
            self._update(losses, next(replays), awp)

        with autocast(self.config.precision, self.device):
            self.config.objective.step(learner, batch, noise, self.state, update)

    def _update(self, losses: Callable[[], Losses], replay: int, awp: bool) -> None:
        """One optimiser step on the mean of the losses."""
        if awp:
            with worst_weights(self.model, lambda: losses().per_sample.mean(), self.config.awp.gamma):
                self._backward(losses)
        else:
            self._backward(losses)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].copy_(self.rates[replay])
            else:
                group["lr"] = float(self.rates[replay])
        self.optimizer.step()
        self.clock += 1
        self.average.after_update(self.model, self.clock)

    def _backward(self, losses: Callable[[], Losses]) -> None:
        computed = losses()
        loss = computed.per_sample.mean()
        self.guard.watch(loss, self.clock)
        if self.device.type == "cpu":
            self.guard.check()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self._meter({"loss": computed.per_sample.detach(), **computed.logged})

    def _meter(self, values: dict[str, Tensor]) -> None:
        """Add up per-sample numbers and how many there were."""
        for name, value in values.items():
            if name not in self.meters:
                self.meters[name] = torch.zeros(2, dtype=torch.float64, device=self.device)
            total = value.sum()
            self.meters[name] += torch.stack([total, torch.full_like(total, value.numel())])

    def averages(self) -> dict[str, float]:
        """The means of what was metered since the last call."""
        sums = {name: both.tolist() for name, both in self.meters.items()}
        for both in self.meters.values():
            both.zero_()
        return {name: total / count for name, (total, count) in sums.items() if count}

    def momenta(self) -> State:
        """The optimiser's memory, by parameter name."""
        entries = {name: self.optimizer.state[parameter] for name, parameter in self.model.named_parameters()}
        kept = {name: entry.get("momentum_buffer") for name, entry in entries.items()}
        return {name: momentum for name, momentum in kept.items() if momentum is not None}

    def set_momenta(self, momenta: State) -> None:
        """Bring the optimiser's memory back."""
        self.optimizer.state.clear()
        for name, parameter in self.model.named_parameters():
            if name in momenta:
                self.optimizer.state[parameter]["momentum_buffer"] = momenta[name]


def _mixed(seed: int, epoch: int, index: int) -> int:
    """One seed per batch."""
    return (seed * 1_000_003 + epoch * 100_003 + index) % (1 << 63)
