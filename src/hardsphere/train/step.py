"""One training step: the objective, the optimiser and the averages, written so that a GPU can replay it as one graph.

Nothing here waits for the device: counters that the step needs (the number of the update, the learning rate, the epoch)
are tensors on it, sums for the log are added up there, and a loss that is not finite is only remembered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from hardsphere.attacks.base import attacking
from hardsphere.attacks.pgd import Fuse, as_it_is
from hardsphere.blocks import compile_kernels, has_blocks
from hardsphere.config import Config
from hardsphere.data import Batch
from hardsphere.noise import Noise
from hardsphere.objectives import Learner, Losses
from hardsphere.objectives.base import State
from hardsphere.runtime import autocast, has_convolutions, without_kernel_search
from hardsphere.shadow import ALIKE, ALONG, Shadow, agreement, departure
from hardsphere.sphere import find_head
from hardsphere.train.averaging import Average
from hardsphere.train.capture import Captured
from hardsphere.train.compiling import ONE_VARIANT, Compiler
from hardsphere.train.guards import FiniteGuard
from hardsphere.train.perturbation import worst_weights
from hardsphere.train.schedules import learning_rate

# How many batches may pass on a GPU before the host looks whether a loss was not finite.
_LOOK_EVERY = 50

Totals = dict[str, Tensor]
"""Of each number per sample: its sum, and of how many, in float64."""

Weighed = Callable[[], tuple[Tensor, Totals]]
"""The mean of the training losses, and what is metered."""


class Stepper:
    """Trains a model batch by batch.

    Args:
        config: what to train.
        model: the model in training.
        average: the weight average that follows it.
        batches_per_epoch: of full and partial batches.
        fast: compile the network and replay each step as a CUDA graph; needs a GPU.
        say: told how long compiling took.
        wait_for_update: returns when the update is compiled, if another process does that.
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
        wait_for_update: Callable[[], None] | None = None,
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
        self.plain = Learner(model, find_head(model), config.attack.adversary(), config.label_smoothing)
        self.fast = fast
        self.say = say
        self.captured: Captured | None = None
        self.wait_for_update = wait_for_update
        self.set_momenta({})

    def step(self, batch: Batch, epoch: int, index: int) -> None:
        """Train on one batch, the ``index``-th of its epoch."""
        # Layers with randomness of their own (dropout) draw from torch's generator: fix it per batch, not per run.
        torch.manual_seed(_mixed(self.config.seed, epoch, index))
        for replay in range(self.updates_per_batch):
            self.rates[replay] = learning_rate(self.config, self.updates + replay, self.updates_per_epoch)
        self.clock.fill_(self.updates)
        awp = bool(self.config.awp.gamma) and epoch >= self.config.awp.warmup
        if self.fast and len(batch.x) == self.config.batch:
            batch.x = batch.x.contiguous(memory_format=torch.channels_last)
            if self.captured is None:
                compiled = fast_learner(self.plain, self.config.precision, batch.x, Compiler(self.say), self.say)
                self.captured = Captured(lambda batch, epoch, awp: self._train(compiled, batch, epoch, awp), self.say)
            self.captured(batch, epoch, awp)
        else:
            self._train(self.plain, batch, torch.tensor(epoch, device=self.device), awp)
        self.updates += self.updates_per_batch
        if index % _LOOK_EVERY == 0:
            self.guard.check()

    @property
    def recorded_at(self) -> float | None:
        """When a step was last recorded, on the clock of `time.perf_counter`; what comes before is mostly compiling."""
        return self.captured.recorded_at if self.captured is not None else None

    def _train(self, learner: Learner, batch: Batch, epoch: Tensor, awp: bool) -> None:
        """The objective's own step; a function of what is on the device alone."""
        seed, fused = self.config.seed, learner.fused
        keys = fused(lambda ids, epoch: Noise(seed, ids).fold("train", epoch).keys)
        noise = Noise.of_keys(keys(batch.ids, epoch))
        replays = iter(range(self.updates_per_batch))

        def update(losses: Callable[[], Losses]) -> None:
            self._update(fused(lambda: _weighed(losses())), next(replays), awp, fused)

        with autocast(self.config.precision, self.device):
            self.config.objective.step(learner, batch, noise, self.state, update)

    def _update(self, losses: Weighed, replay: int, awp: bool, fused: Fuse = as_it_is) -> None:
        """One optimiser step on the mean of the losses."""
        if self.wait_for_update is not None:
            self.wait_for_update()
            self.wait_for_update = None
        if awp:
            with worst_weights(self.model, lambda: losses()[0], self.config.awp.gamma):
                self._backward(losses, fused)
        else:
            self._backward(losses, fused)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].copy_(self.rates[replay])
            else:
                group["lr"] = float(self.rates[replay])
        self.optimizer.step()
        self.clock += 1
        self.average.after_update(self.model, self.clock)

    def _backward(self, losses: Weighed, fused: Fuse) -> None:
        loss, totals = losses()
        fused(self.guard.watch)(loss.detach(), self.clock)
        if self.device.type == "cpu":
            self.guard.check()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self._meter(totals)

    def _meter(self, totals: Totals) -> None:
        """Add up what is logged."""
        for name, total in totals.items():
            if name not in self.meters:
                self.meters[name] = torch.zeros_like(total)
        torch._foreach_add_([self.meters[name] for name in totals], list(totals.values()))

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
        """Bring the optimiser's memory back.

        A fused update goes by places in memory, so momenta are laid out as their weights are. And it takes no weights
        that have none beside others that have some, so those that are yet to learn begin with zeros, which is the same.
        """
        self.optimizer.state.clear()
        for name, parameter in self.model.named_parameters():
            if name in momenta or (self.fast and self.config.momentum):
                momentum = torch.zeros_like(parameter, requires_grad=False)
                self.optimizer.state[parameter]["momentum_buffer"] = momentum
                if name in momenta:
                    momentum.copy_(momenta[name])


def fast_learner(
    plain: Learner, precision: str, x: Tensor, fused: Fuse, say: Callable[[str], None] = lambda text: None
) -> Learner:
    """The compiled twin of a learner, for batches like ``x``.

    Under bf16 the attack runs on a `Shadow` of the network, unless it is meant to move BatchNorm's statistics.
    """
    twin = compiled_twin(plain, fused)
    with autocast(precision, x.device):
        if plain.adversary.bn != "eval" or not torch.is_autocast_enabled(x.device.type):
            return twin
        for kernels in (True, False) if has_convolutions(x) else (False,):
            try:
                shadow = Shadow(plain.model, fuse_norms=kernels, fuse_blocks=kernels)
            except Exception as error:  # a foreign network may refuse to be copied
                say(f"The network cannot be copied, so its attack runs somewhat slower: {_in_words(error)}.")
                return twin
            if kernels and not has_blocks(shadow.network):
                continue  # what torch's compiler makes of the network as it is gains as much
            doubt = _doubt(shadow, plain.model, x)
            if doubt is None:
                return replace(twin, stand_in=shadow.refresh)
            if kernels:
                say(f"The network's blocks cannot be fused here, so its attack runs somewhat slower: {doubt}.")
    say("The network has layers of its own that do not take bf16 weights, so its attack runs somewhat slower.")
    return twin


def compiled_twin(plain: Learner, fused: Fuse) -> Learner:
    """The same learner with its network and the pieces of its step compiled."""
    network = cast(nn.Module, torch.compile(plain.model, dynamic=False, options=ONE_VARIANT))
    return replace(plain, model=network, fused=fused)


def _doubt(shadow: Shadow, model: nn.Module, x: Tensor) -> str | None:
    """Why the shadow cannot stand in for the model: it must give its answers, and its gradients, up to rounding.

    Layers that take no bf16 weights raise an error; kernels of our own are asked with the whole batch, as they will be.
    """
    fused = has_blocks(shadow.network)
    images = x if fused else x[:2]
    try:
        with without_kernel_search(), attacking(model):  # once: not worth a search
            compile_kernels(shadow.network, images)
            away = departure(shadow.network, model, images)
            along = agreement(shadow.network, model, images) if fused else 1.0
    except Exception as error:
        return _in_words(error)
    if not away <= ALIKE:
        return f"its answers change by {100 * away:.0f} %"
    return None if along >= ALONG else "its gradients point elsewhere"


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _weighed(losses: Losses) -> tuple[Tensor, Totals]:
    """The loss of a batch, and the sums for the log."""
    values = {"loss": losses.per_sample.detach(), **losses.logged}
    return losses.per_sample.mean(), {name: _sum_and_count(value) for name, value in values.items()}


def _sum_and_count(values: Tensor) -> Tensor:
    total = values.sum()
    return torch.stack([total, torch.full_like(total, values.numel())]).double()


def _mixed(seed: int, epoch: int, index: int) -> int:
    """One seed per batch."""
    return (seed * 1_000_003 + epoch * 100_003 + index) % (1 << 63)
