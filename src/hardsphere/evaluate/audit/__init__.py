"""The audit: whether the numbers about a model can be believed.

Robust accuracy is an upper bound; a weak attack makes it large. The audit looks for the ways in which attacks are known
to be weak (masked gradients, a loss at the wrong scale, a model that is not what it seems) with probes of its own, and
returns findings with their evidence and a verdict. It does not measure robustness: `hardsphere.evaluate` does.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from hardsphere.attacks.base import attacking, logits_and_gradient
from hardsphere.attacks.losses import margin
from hardsphere.attacks.views import expectation
from hardsphere.callable import make_callable
from hardsphere.errors import HardsphereError
from hardsphere.evaluate import witness
from hardsphere.evaluate.audit import probes
from hardsphere.evaluate.audit.findings import Audit as Audit
from hardsphere.evaluate.audit.findings import Finding as Finding
from hardsphere.evaluate.audit.findings import Kind as Kind
from hardsphere.evaluate.audit.findings import Severity as Severity
from hardsphere.evaluate.audit.subject import Subject, ids_by_position, in_parts, reuse
from hardsphere.evaluate.samples import as_tensor, gather
from hardsphere.sphere import ScaledView
from hardsphere.threat import Ball

if TYPE_CHECKING:
    from hardsphere.data import Source
    from hardsphere.evaluate.runner import Evaluation

LIMIT = 256
"""Samples that the probes use: enough for the scale sweep to see what raw cosines hide of a small model."""
BATCH = 256
DRAWS_OF_A_RANDOMISED_MODEL = 8


def audit(
    model: nn.Module | Callable[[Tensor], Tensor],
    x: Tensor | Source,
    y: Tensor | None,
    ball: Ball,
    *,
    evaluation: Evaluation | None = None,
    seed: int = 0,
    ids: Tensor | None = None,
    selection: str | Mapping[str, Any] | None = None,
    surrogate: nn.Module | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    limit: int = LIMIT,
    batch: int = BATCH,
    device: torch.device | str | None = None,
) -> Audit:
    """Look for reasons not to believe what attacks say about a classifier.

    Args:
        model: maps images in [0, 1] to logits; it is left as it was found.
        x: float images, (N, C, H, W), or a `hardsphere.data` split.
        y: the labels; none if the data split brings its own.
        ball: the threat model.
        evaluation: an evaluation of the same model, whose outcomes are used beside the probes' own.
        seed: of all randomness in the probes, and of the model's own if it draws from torch's generator.
        ids: the samples' ids in their data set; by default those the evaluation knows them by, or their positions.
        selection: how the checkpoint was chosen, in words or as a mapping with ``split`` or ``ids``; what the
            evaluation's card says by default.
        surrogate: another model of the same classes, for transfer; on the same device.
        progress: called with (probe, index, count) before each probe.
        limit: use the first so many samples.
        batch: how many images at once; halved by itself when memory runs out.
        device: where to run; the model's own device by default.
    """
    began = time.perf_counter()
    x, y = as_tensor(x, "images"), as_tensor(y, "labels")
    if ids is None and y is not None and evaluation is not None:
        ids = ids_by_position(evaluation, y, limit)
    samples = gather(_clipped(x), y, ids, None, limit)
    home = witness.device_of(model, x.device if isinstance(x, Tensor) else torch.device("cpu"))
    model, remark, finite = witness.in_float32(model, samples.images(range(min(witness.FEW, len(samples))), home))
    place = home if device is None else torch.device(device)
    rows = range(len(samples))
    images = x[: len(samples)].float().to(place) if isinstance(x, Tensor) else samples.images(rows, place)
    labels, keys = samples.labels.to(place), samples.ids.to(place)
    if selection is None and evaluation is not None:
        selection = evaluation.card.get("model", {}).get("selection")
    with witness.moved(model, home, place), witness.plain_float32(place), _own_randomness(place, seed):
        run = _Run(model, images, labels, keys, ball, seed, batch, evaluation, surrogate, progress)
        run.notes += [remark] if remark is not None else []
        if isinstance(model, ScaledView):
            run.notes.append(f"Audited with logits times {model.factor:g} (at scale 1: raw cosines), not as deployed.")
        findings = [*run.questions(seed), *probes.selected_on_test(selection, keys), *run.attacks()]
        if remark is not None and not finite:
            findings.append(probes.found(Kind.NON_FINITE_OUTPUT, remark))
    findings.sort(key=lambda finding: finding.severity is not Severity.INVALID)
    return Audit(findings, run.measured, run.notes, len(images), ball, seed, time.perf_counter() - began)


class _Run:
    """One audit: first questions to the model, then attacks on the samples that it gets right."""

    def __init__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        ids: Tensor,
        ball: Ball,
        seed: int,
        batch: int,
        evaluation: Evaluation | None,
        surrogate: nn.Module | None,
        progress: Callable[[str, int, int], None] | None,
    ) -> None:
        self.model, self.x, self.y, self.ids, self.ball, self.seed, self.batch = model, x, y, ids, ball, seed, batch
        self.evaluation, self.surrogate, self.progress = evaluation, surrogate, progress
        self.measured: dict[str, Any] = {}
        self.notes: list[str] = []
        self.hopeless = ""
        self.random = False
        self.logits = torch.empty(0)

    def questions(self, seed: int) -> Iterator[Finding]:
        """What can be seen without an attack. The mode comes first: everything after it is asked in eval mode."""
        self._tell("questions", 0)
        few = self.x[:32]
        fresh = _copied(self.model)
        classes = self._introduce()
        yield from probes.train_mode(self.model, _seeded(self._as_found, seed), _seeded(self._answer, seed), few)
        self.logits = self._answer(self.x)
        outside = list(probes.input_range(self.x, self.measured))
        unsteady = list(probes.randomised(self.logits, self._answer(self.x), self.measured))
        self.random = bool(unsteady)
        if outside:
            self.hopeless = "the pixels lie outside [0, 1]"
        yield from outside
        yield from probes.finite_outputs(self.logits, self.measured)
        yield from probes.probabilities(self.logits)
        yield from unsteady
        if not self.random:
            for finding in probes.batch_dependent(self._answer, self.x, self.logits):
                self.hopeless = self.hopeless or "its outcomes would depend on the batch"
                yield finding
            for finding in probes.remembers(self._answer, partial(self._ask, fresh), few) if fresh is not None else ():
                self.hopeless = self.hopeless or "its outcomes would depend on what was asked before"
                yield finding
            if not self.hopeless and bool(self.logits.isfinite().all()):
                yield from probes.normalisation_outside(self._answer, self.x, self.y, self.logits, self.measured)
        self.measured["clean_accuracy"] = float((self.logits.argmax(dim=1) == self.y).float().mean())
        self.measured["classes"] = classes

    def attacks(self) -> Iterator[Finding]:
        """The probes that attack, where attacks have a meaning."""
        finite = self.logits.isfinite().all(dim=1)
        right = (self.logits.argmax(dim=1) == self.y) & finite
        if not right.any():
            none = "gets none of these images right" if finite.any() else "gives none of these images a finite answer"
            self.hopeless = self.hopeless or f"the model {none}"
        if self.hopeless:
            self.notes.append(f"No attack was run: {self.hopeless}.")
            return
        model = self.model
        if self.random:
            model = expectation(model, DRAWS_OF_A_RANDOMISED_MODEL)
            self.notes.append(f"The model is randomised: probes attack the mean of {model.samples} draws.")
        with attacking(self.model):
            if not _differentiable(model, self.x[:1], self.y[:1]):
                model = _Opaque(model)
                self.notes.append("The model cannot be differentiated: probes see it without gradients.")
            subject = Subject(
                model,
                self.x[right],
                self.y[right],
                self.ids[right],
                len(self.x),
                self.ball,
                self.seed,
                self.batch,
                self.surrogate,
                measured=self.measured,
                notes=self.notes,
            )
            if self.evaluation is not None:
                subject.evaluated = reuse(self.evaluation, self.model, subject)
            for index, (name, probe) in enumerate(probes.ATTACKS.items()):
                self._tell(name, index + 1)
                yield from probe(subject)

    def _introduce(self) -> int:
        with attacking(self.model):
            classes = witness.introduce(self.model, self.x[:1])
        low, high = int(self.y.min()), int(self.y.max())
        if low < 0 or high >= classes:
            wrong = low if low < 0 else high
            raise HardsphereError(
                f"A label is {wrong}, but the model has {classes} classes: it must lie in 0..{classes - 1}."
            )
        return classes

    def _answer(self, x: Tensor) -> Tensor:
        return self._ask(self.model, x)

    def _ask(self, model: nn.Module, x: Tensor) -> Tensor:
        answers = []
        with attacking(model):
            self.batch = in_parts(len(x), self.batch, lambda part: answers.append(witness.answer(model, x[part])))
        return torch.cat(answers)

    def _as_found(self, x: Tensor) -> Tensor:
        """The answer in whatever mode the model came in; statistics that this moves are put back."""
        buffers = [(module._buffers, dict(module._buffers)) for module in self.model.modules()]
        copies = [{name: None if old is None else old.clone() for name, old in held.items()} for _, held in buffers]
        try:
            return witness.answer(self.model, x)
        finally:
            for (place, held), copied in zip(buffers, copies, strict=True):
                for name, old in held.items():
                    if old is not None:
                        old.copy_(cast(Tensor, copied[name]))
                place.clear()
                place.update(held)

    def _tell(self, probe: str, index: int) -> None:
        if self.progress is not None:
            self.progress(probe, index, len(probes.ATTACKS) + 1)


class _Opaque(nn.Module):
    """A model whose forward pass refuses an image that wants a gradient: it is given one that does not."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.model(x.detach()))


def _differentiable(model: nn.Module, x: Tensor, y: Tensor) -> bool:
    """Whether a backward pass goes through without an error; what it gives is for the probes to judge."""
    try:
        logits_and_gradient(model, x, margin, y)
    except (RuntimeError, TypeError, NotImplementedError) as reason:
        if witness.is_out_of_memory(reason):
            raise
        return False
    return True


def _copied(model: nn.Module) -> nn.Module | None:
    """A copy that knows nothing of what the model will be asked; none where torch cannot copy it."""
    try:
        return copy.deepcopy(model)
    except Exception:  # whatever a foreign model does when it is copied
        return None


@contextmanager
def _own_randomness(device: torch.device, seed: int) -> Iterator[None]:
    """Torch's generators, which a randomised model draws from, seeded for the audit and put back afterwards."""
    devices: Sequence[torch.device] = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def _seeded(answer: Callable[[Tensor], Tensor], seed: int) -> Callable[[Tensor], Tensor]:
    """An answer for which the model draws the same numbers each time it is asked."""

    def ask(x: Tensor) -> Tensor:
        torch.manual_seed(seed)
        return answer(x)

    return ask


def _clipped(x: Tensor | Source) -> Tensor | Source:
    """The images with their pixels in [0, 1], so that their other properties can be checked: the range is a finding."""
    return x.nan_to_num(0.0).clamp(0, 1) if isinstance(x, Tensor) and x.is_floating_point() else x


make_callable(__name__)  # so that `hardsphere.evaluate.audit` may be called whether it is this package or the function
