"""A training step as one CUDA graph: recorded once, then replayed with a single launch.

A step of adversarial training is thousands of small kernels; launching them one by one leaves a fast GPU waiting for
the host. The first steps run ordinarily, as real training steps, which also compiles the network and fills every
buffer; then one step is recorded, which executes nothing, and from there on each batch is copied in and replayed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hardsphere.data import Batch
from hardsphere.runtime import aside, recording

# Steps before the recording: lazy initialisation and the compiler need more than one.
_WARM_STEPS = 3

Body = Callable[[Batch, Tensor, bool], None]


@dataclass
class _Graph:
    """A recorded step with the tensors it reads."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    epoch: Tensor

    def replay(self, batch: Batch, epoch: int) -> None:
        self.batch.x.copy_(batch.x, non_blocking=True)
        self.batch.y.copy_(batch.y, non_blocking=True)
        self.batch.ids.copy_(batch.ids, non_blocking=True)
        self.epoch.fill_(epoch)
        self.graph.replay()


class Captured:
    """Runs a step's body, from its fourth call on as a graph; a body that depends on a flag has a graph for each.

    Args:
        body: the step, a function of what is on the device alone, and of a flag.
        say: told how long compiling and recording took.

    Attributes:
        recorded_at: when the last graph was recorded, on the clock of `time.perf_counter`.
    """

    def __init__(self, body: Body, say: Callable[[str], None]) -> None:
        self.body = body
        self.say = say
        self.began: float | None = None
        self.recorded_at: float | None = None
        self.warm: dict[bool, int] = {}
        self.graphs: dict[bool, _Graph] = {}

    def __call__(self, batch: Batch, epoch: int, flag: bool) -> None:
        if self.began is None:
            self.began = time.perf_counter()
        if flag in self.graphs:
            self.graphs[flag].replay(batch, epoch)
        elif self.warm.get(flag, 0) < _WARM_STEPS:
            self.warm[flag] = self.warm.get(flag, 0) + 1
            with aside(batch.x.device):
                self.body(batch, torch.tensor(epoch, device=batch.x.device), flag)
        else:
            self.graphs[flag] = self._record(batch, flag)
            self.graphs[flag].replay(batch, epoch)

    def _record(self, batch: Batch, flag: bool) -> _Graph:
        static = Batch(batch.x.clone(), batch.y.clone(), batch.ids.clone())
        epoch = torch.zeros((), dtype=torch.int64, device=batch.x.device)
        graph = torch.cuda.CUDAGraph()
        with recording(graph, batch.x.device):
            self.body(static, epoch, flag)
        self.recorded_at = time.perf_counter()
        if not self.graphs and self.began is not None:
            seconds = self.recorded_at - self.began
            self.say(
                f"The step was compiled and recorded in {seconds:.0f} s; torch keeps what it compiled for next time."
            )
        return _Graph(graph, static, epoch)
