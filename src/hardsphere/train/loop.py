"""The training loop: batches in, checkpoints out. It knows no framework; the objective runs each step.

Everything random in a step is a function of (seed, epoch, batch, sample), so the state of a run is its weights and a
few counters, and a run that was killed and resumed ends bit for bit where an uninterrupted one does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hardsphere import models
from hardsphere.config import Config
from hardsphere.data import Augment, DataSet, eval_batches, train_loader
from hardsphere.errors import HardsphereError
from hardsphere.recipes import without_effect
from hardsphere.runtime import kernels_chosen
from hardsphere.sphere import final_linear
from hardsphere.threat import Ball
from hardsphere.train.averaging import make_average
from hardsphere.train.compiling import Compiler
from hardsphere.train.deployed import build_model, describe, describe_anew, save_deployed, split_digests
from hardsphere.train.guards import pgd_accuracy
from hardsphere.train.run import RunDirectory
from hardsphere.train.schedules import learning_rate
from hardsphere.train.selection import held_out_accuracy
from hardsphere.train.step import Stepper
from hardsphere.train.tensors import labelled, on_host, part, read_tensors, to_device, write_tensors
from hardsphere.train.writing import Writer


class Reporter(Protocol):
    """Who watches a run: a progress bar, plain lines, or nobody."""

    def begin(self, total: int, done: int) -> None: ...
    def advance(self, done: int) -> None: ...
    def epoch(self, row: dict[str, Any]) -> None: ...
    def say(self, text: str) -> None: ...


class Silence:
    """A reporter that reports nothing."""

    def begin(self, total: int, done: int) -> None: ...
    def advance(self, done: int) -> None: ...
    def epoch(self, row: dict[str, Any]) -> None: ...
    def say(self, text: str) -> None: ...


@dataclass
class Position:
    """Where a run stands; saved with each checkpoint."""

    epoch: int = 0  # epochs completed
    batch: int = 0  # batches of the running epoch completed
    updates: int = 0
    best: tuple[float, float] = (-1.0, -1.0)  # robust and clean accuracy of the best checkpoint
    best_epoch: int = 0
    probe: float | None = None  # PGD accuracy after the last epoch, for the collapse check
    finished: str | None = None  # why the run ended


# Held-out images at a time: as many numbers as 1,000 images of 32 x 32 have, which keep a GPU busy, fit anywhere.
_JUDGED_AT_ONCE = 1000 * 3 * 32 * 32


class Trainer:
    """One training run.

    Args:
        config: what to train.
        data: its data; the test split is never read here.
        data_dir: recorded in the checkpoints, so that evaluation finds the data again.
        save_every: seconds between checkpoints within an epoch; one is written after each epoch in any case.
        fast: compile the network and replay each step as a CUDA graph; needs a GPU.
        wait_for_update: returns when the update is compiled, if another process does that.
    """

    def __init__(
        self,
        config: Config,
        data: DataSet,
        *,
        device: torch.device,
        data_dir: Path | None = None,
        reporter: Reporter | None = None,
        save_every: float = 600.0,
        fast: bool = False,
        wait_for_update: Callable[[], None] | None = None,
    ) -> None:
        if data.train is None or data.validation is None:
            raise HardsphereError(f"The data '{data.name}' has no training images.")
        for note in data.notes:
            (reporter or Silence()).say(note)
        self.config, self.device = config, device
        self.reporter: Reporter = reporter or Silence()
        for key in without_effect(config):
            self.reporter.say(f"{key} was changed, but nothing in this training asks for it.")
        self.save_every = save_every
        self.description = describe(config, data, data_dir) | {"splits": split_digests(data)}
        self.train_source, self.validation, self.shape = data.train, data.validation, data.shape
        spec = config.data
        augment = Augment(spec.pad, spec.padding, spec.flip, spec.cutout, spec.cutmix)
        fused = Compiler(self.reporter.say) if fast else None
        self.loader = train_loader(data.train, config.batch, device, augment, config.seed, fused)
        self.model = self._initial_model(data)
        self.average = make_average(config, self.model)
        self.stepper = Stepper(
            config, self.model, self.average, device, len(self.loader), fast, self.reporter.say, wait_for_update
        )
        self.position = Position()
        self.writer = Writer()
        self.was_finished = False

    def _initial_model(self, data: DataSet) -> models.Classifier:
        model = build_model(self.config, data)
        if self.config.init is not None:
            new = models.load_weights(model, Path(self.config.init))
            self.reporter.say(f"Started from {self.config.init}" + (f"; new: {', '.join(new)}." if new else "."))
        model.to(self.device)
        if self.device.type == "cuda":
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def fit(self, run: RunDirectory) -> Position:
        """Train into a run directory to the end, going on from its last checkpoint if it has one."""
        self.run = run
        if run.state_file.exists():
            self._restore(run.state_file)
            self.was_finished = self.position.finished is not None
            if self.was_finished:
                return self.position
            self._keep_epoch()
            self.writer.begin()
        self.run.rewind_metrics(self.position.epoch)
        self.reporter.begin(self.config.epochs * len(self.loader), self._batches_done())
        events = _events(self.run.path / "tensorboard", self.position.epoch)
        try:
            with kernels_chosen(self.config.repeatable):
                while self.position.finished is None:
                    row = self._epoch()
                    _add_scalars(events, row)
                    self.reporter.epoch(row)
        finally:
            events.close()
            self.writer.close()
        return self.position

    def _epoch(self) -> dict[str, Any]:
        """One epoch, its judgement on the held-out split, and its checkpoint."""
        epoch, started = self.position.epoch, time.perf_counter()
        prepared, first_batch = started, self.position.batch
        self._set_trainable(epoch)
        saved_at = time.monotonic()
        for batch in self.loader.epoch(epoch, self.position.batch):
            self.stepper.step(batch, epoch, self.position.batch)
            if (recorded := self.stepper.recorded_at) is not None and recorded > prepared:
                prepared, first_batch = recorded, self.position.batch  # which was recorded first, and then done
            self.position.batch += 1
            self.reporter.advance(self._batches_done())
            self.writer.check()
            if time.monotonic() - saved_at > self.save_every and self.position.batch < len(self.loader):
                self.stepper.guard.check()
                self._save_state()
                self.writer.begin()
                saved_at = time.monotonic()
        self.stepper.guard.check()
        seconds = time.perf_counter() - started
        self.average.after_epoch(self.model, epoch + 1, self._clean_images())
        images = len(self.train_source) * (1 - first_batch / len(self.loader))
        return self._conclude(self._training_row(epoch, seconds, prepared - started, images))

    def _set_trainable(self, epoch: int) -> None:
        """Train mode; in the warm-up after `init` only the head learns, and the body keeps its statistics."""
        self.model.train()
        if self.config.init_warmup == 0:
            return
        warming = epoch < self.config.init_warmup
        if epoch == self.config.init_warmup:
            self.stepper.captured = None  # that step was recorded with a frozen body
        head = self.model.get_submodule(final_linear(self.model))
        self.model.requires_grad_(not warming)
        head.requires_grad_(True)
        if warming:
            self.model.eval()
            head.train()

    def _training_row(self, epoch: int, seconds: float, preparing: float, images: float) -> dict[str, Any]:
        """What the epoch's training saw, averaged over its samples; the rate is that after the preparing."""
        updates = self.stepper.updates
        return {
            "epoch": epoch + 1,
            "updates": updates,
            "lr": learning_rate(self.config, updates - 1, self.stepper.updates_per_epoch),
            **self.stepper.averages(),
            "seconds": seconds,
            "preparing_seconds": preparing,
            "images_per_second": images / (seconds - preparing),
        }

    def _conclude(self, row: dict[str, Any]) -> dict[str, Any]:
        """Judge the epoch, keep it if it is the best, write the checkpoint; roll back if robustness collapsed."""
        position, epoch = self.position, row["epoch"]
        if self._collapsed(row):
            self.writer.wait()  # for the file of the epoch before, among others
            self.run.log(row)
            self._restore(self.run.epoch_file)
            position = self.position
            position.finished = f"rolled back to epoch {position.epoch}: PGD accuracy collapsed in epoch {epoch}"
            self.reporter.say(f"PGD accuracy collapsed in epoch {epoch}: {position.finished.partition(':')[0]}.")
            self._settle_best()
            self._save_state()
            self.writer.begin()
            return row
        clean, robust = self._judge()
        row |= {"validation_clean": clean, "validation_robust": robust}
        position.epoch, position.batch = epoch, 0
        weights = on_host(self.average.model.state_dict())
        if self._rank(robust, clean) > self._rank(*position.best):
            position.best, position.best_epoch = (robust, clean), epoch
            chosen = {"validation_robust": robust, "validation_clean": clean}
            self._save_model("best", weights, self._selection(), chosen)
        if epoch == self.config.epochs:
            position.finished = f"all {epoch} epochs are done"
            self._settle_best()
        self._save_model("last", weights, f"last epoch ({epoch}), not selected")
        # First the row, then the state: if the process dies in between, the epoch is trained again and the row rewound.
        self.writer.later(self.run.log, dict(row))
        self._save_state()
        self._keep_epoch()
        self.writer.begin()
        return row

    def _keep_epoch(self) -> None:
        """Keep what a collapse would be rolled back to: the state between two epochs."""
        if self.config.objective.collapse_drop is not None and self.position.batch == 0:
            self.writer.later(self.run.keep_epoch)

    def _collapsed(self, row: dict[str, Any]) -> bool:
        """Whether PGD accuracy on a training batch fell beyond what the objective allows (catastrophic overfitting)."""
        allowed = self.config.objective.collapse_drop
        if allowed is None:
            return False
        probe = next(self.loader.epoch(self.position.epoch))
        before, now = self.position.probe, pgd_accuracy(self.model, probe, self._ball(), self.config.seed)
        row["probe_pgd"] = now
        if before is not None and before - now > allowed:
            return True
        self.position.probe = now
        return False

    def _judge(self) -> tuple[float, float]:
        select = self.config.select
        return held_out_accuracy(
            self.average.model,
            self.validation,
            self._ball(),
            steps=select.steps,
            limit=select.limit,
            batch=max(self.config.batch, min(1000, _JUDGED_AT_ONCE // math.prod(self.shape))),
            seed=self.config.seed,
            device=self.device,
        )

    def _ball(self) -> Ball:
        return Ball(self.config.attack.norm, self.config.attack.eps)

    def _clean_images(self) -> Iterator[Tensor]:
        return (batch.x for batch in eval_batches(self.train_source, self.config.batch, self.device))

    def _batches_done(self) -> int:
        return self.position.epoch * len(self.loader) + self.position.batch

    def _selection(self) -> str:
        """What the best checkpoint is the best of by now, and by which measure."""
        select, held_out = self.config.select, min(self.config.select.limit, len(self.validation))
        robust = self.config.objective.selected_by == "robust"
        measure = f"margin-PGD-{select.steps}" if robust else "clean accuracy"
        return f"best of epochs 1 to {self.position.epoch}, by {measure} on {held_out} held-out training images"

    def _rank(self, robust: float, clean: float) -> tuple[float, float]:
        """What the best epoch has most of; the other number decides between equals."""
        return (robust, clean) if self.config.objective.selected_by == "robust" else (clean, robust)

    def _settle_best(self) -> None:
        """The best checkpoint says what it was the best of when it was written; now it is the best of all epochs."""
        self.writer.later(describe_anew, self.run.path / "checkpoints" / "best", {"selection": self._selection()})

    def _save_model(
        self, name: str, weights: dict[str, Tensor], selection: str, more: Mapping[str, float] | None = None
    ) -> None:
        meta = self.description | {"selection": selection, "epoch": self.position.epoch, **(more or {})}
        self.writer.later(save_deployed, self.run.path / "checkpoints" / name, weights, meta)

    def _save_state(self) -> None:
        stepper, self.position.updates = self.stepper, self.stepper.updates
        tensors = labelled(self.model.state_dict(), "model.") | labelled(stepper.momenta(), "momentum.")
        tensors |= labelled(stepper.state, "objective.") | labelled(stepper.meters, "meters.")
        if self.average.model is not self.model:
            tensors |= labelled(self.average.model.state_dict(), "average.")
        self.writer.later(write_tensors, self.run.state_file, on_host(tensors), self._state_meta())

    def _state_meta(self) -> dict[str, Any]:
        return {"position": dict(vars(self.position)), "splits": self.description["splits"]}

    def _check_data(self, meta: Mapping[str, Any]) -> None:
        """Other images would be trained on what was held out before, and the best epoch be chosen by others."""
        now, before = self.description["splits"], meta.get("splits")
        changed = [name for name in ("train", "validation") if before is not None and before[name] != now[name]]
        if changed:
            raise HardsphereError(
                f"The {' and '.join(changed)} images are not those that the run in '{self.run.path}' began with: "
                "bring them back, or train anew with another --out."
            )

    def _restore(self, file: Path) -> None:
        """Go back to a checkpoint."""
        tensors, meta = read_tensors(file)
        self._check_data(meta)
        tensors = to_device(tensors, self.device)
        self.model.load_state_dict(part(tensors, "model."))
        if self.average.model is not self.model:
            self.average.model.load_state_dict(part(tensors, "average."))
        self.stepper.set_momenta(part(tensors, "momentum."))
        self.stepper.state, self.stepper.meters = part(tensors, "objective."), part(tensors, "meters.")
        self.position = Position(**meta["position"])
        self.position.best = (self.position.best[0], self.position.best[1])
        self.stepper.updates = self.position.updates


def _add_scalars(events: Any, row: Mapping[str, Any]) -> None:
    for name, value in row.items():
        if isinstance(value, float):
            events.add_scalar(name, value, row["epoch"])


def _events(directory: Path, done: int) -> Any:
    """TensorBoard's writer; events of epochs that will be trained again are hidden."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(directory), purge_step=done + 1 if done else None)
