"""The probes: each looks for one kind of finding and says what it measured, whether it found anything or not.

The first ones ask the model only. The others attack it, shortly and on few samples: they do not measure robustness but
compare two attacks of which the second must not win (Athalye et al., 2018; Carlini et al., 2019; Pintor et al., 2022).
A comparison counts if the difference exceeds a stated number of points and its paired interval excludes zero.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hardsphere.attacks.apgd import apgd_targeted
from hardsphere.attacks.base import logits_and_gradient
from hardsphere.attacks.losses import cross_entropy, margin
from hardsphere.attacks.pgd import bim, pgd
from hardsphere.attacks.random import random_noise
from hardsphere.attacks.square import square
from hardsphere.attacks.transfer import transfer
from hardsphere.evaluate.audit.findings import Finding, Kind, Severity
from hardsphere.evaluate.audit.scale import logit_scale
from hardsphere.evaluate.audit.subject import Gain, Subject, gain, in_parts
from hardsphere.noise import Noise
from hardsphere.threat import Ball

STEPS = 20
LONGER = 5
"""How many times the steps the longer attack takes."""
RESTARTS = 4
QUERIES = 300
QUERIES_LEFT = 1000
"""Of Square on everything, and once more on what no attack broke."""
DRAWS = 20

POINT = 1.0
UNSEEN = 2.0
"""Points that an attack without gradients may add to gradient attacks: short probes leave an honest model some."""
MUCH = 5.0
"""Points by which the margin may beat the cross-entropy, where models trained by TRADES come near this; and that a
long attack without gradients may add, where honest ones were seen to leave it 2."""
CONVERGED = 3.0
"""Points that five times the steps, or four times the starts, may add."""
WHOLE_BOX = Ball("linf", 1.0)

Answer = Callable[[Tensor], Tensor]


def found(kind: Kind, seen: str, severity: Severity | None = None, **evidence: Any) -> Finding:
    return Finding(kind, seen, evidence, severity or kind.severity)


# ---------------------------------------------------------------------------------------------------------------------
# Questions
# ---------------------------------------------------------------------------------------------------------------------


def input_range(x: Tensor, measured: dict[str, Any]) -> Iterator[Finding]:
    low, high = float(x.min()), float(x.max())
    measured["pixels"] = {"low": low, "high": high}
    if not (low >= -1e-6 and high <= 1 + 1e-6):  # not (...): NaN fails every comparison
        yield found(Kind.INPUT_RANGE, f"The pixels lie in [{low:.4g}, {high:.4g}].", low=low, high=high)


def train_mode(model: nn.Module, as_found: Answer, in_eval: Answer, x: Tensor) -> Iterator[Finding]:
    """A module in train mode that answers the same in eval mode, such as a linear model just built, is no finding."""
    modules = sorted({type(module).__name__ for module in model.modules() if module.training})
    if modules and differ(as_found(x), in_eval(x), 1e-4):
        yield found(Kind.TRAIN_MODE, f"In train mode: {', '.join(modules[:6])}.", modules=modules)


def finite_outputs(logits: Tensor, measured: dict[str, Any]) -> Iterator[Finding]:
    bad = int((~logits.isfinite()).any(dim=1).sum())
    measured["non_finite_outputs"] = bad
    if bad:
        seen = f"For {bad} of {len(logits)} clean images an output is not a number or not finite."
        yield found(Kind.NON_FINITE_OUTPUT, seen, images=bad, of=len(logits))


def probabilities(logits: Tensor) -> Iterator[Finding]:
    inside = bool(((logits >= -1e-6) & (logits <= 1 + 1e-6)).all())
    if inside and bool(((logits.sum(dim=1) - 1).abs() < 1e-3).all()):
        seen = f"All outputs of {len(logits)} images lie in [0, 1] and add up to 1."
        yield found(Kind.PROBABILITIES, seen, largest=float(logits.max()))


def randomised(first: Tensor, second: Tensor, measured: dict[str, Any]) -> Iterator[Finding]:
    largest = float((first - second).abs().nan_to_num(0.0).max())
    flipped = int((first.argmax(dim=1) != second.argmax(dim=1)).sum())
    measured["randomness"] = {"largest_difference": largest, "flipped": flipped}
    if differ(first, second, 1e-4):
        seen = f"Outputs differ by up to {largest:.3g}, and {flipped} of {len(first)} clean predictions with them."
        yield found(Kind.RANDOMISED, seen, largest_difference=largest, flipped=flipped, of=len(first))


def batch_dependent(answer: Answer, x: Tensor, together: Tensor) -> Iterator[Finding]:
    few = min(len(x), 8)
    alone = torch.cat([answer(x[row : row + 1]) for row in range(few)])
    if differ(together[:few], alone, 1e-3):
        largest = float((together[:few] - alone).abs().nan_to_num(0.0).max())
        seen = f"Alone, images get outputs that differ by up to {largest:.3g} from those in a batch of {len(x)}."
        yield found(Kind.BATCH_DEPENDENT, seen, largest_difference=largest)


def remembers(answer: Answer, fresh: Answer, x: Tensor) -> Iterator[Finding]:
    """Whether a copy that was never asked anything answers otherwise to images near those that the model has seen."""
    levels = torch.tensor([-1.0, 1.0], device=x.device)[torch.arange(x[0].numel(), device=x.device) % 2]
    near = (x + levels.view_as(x[0]) / 255).clamp(0, 1)
    first, later = fresh(near), answer(near)
    if differ(first, later, 1e-3):
        largest = float((first - later).abs().nan_to_num(0.0).max())
        flipped = int((first.argmax(dim=1) != later.argmax(dim=1)).sum())
        seen = (
            f"Once it was asked for {len(x)} clean images, the model answers images a grey level away otherwise than a "
            f"copy that was not: outputs differ by up to {largest:.3g}, and {flipped} predictions with them."
        )
        yield found(Kind.REMEMBERS, seen, largest_difference=largest, flipped=flipped, of=len(x))


def normalisation_outside(
    answer: Answer, x: Tensor, y: Tensor, logits: Tensor, measured: dict[str, Any]
) -> Iterator[Finding]:
    """Whether the usual normalisations make the model right far more often."""
    right = logits.argmax(dim=1) == y
    best: tuple[Gain, str] | None = None
    for name, normalised in _normalised(x):
        better = answer(normalised).argmax(dim=1) == y
        rise = gain(int((better & ~right).sum()), int((right & ~better).sum()), len(y))
        if best is None or rise.points > best[0].points:
            best = rise, name
    assert best is not None
    rise, name = best
    measured["normalisation"] = {"best": name, **rise.to_dict()}
    accuracy = 100 * float(right.float().mean())
    # More contrast also helps a network that was trained on these very pixels, but not against half of its errors.
    if rise.over(MUCH) and rise.points >= (100 - accuracy) / 2:
        seen = f"Clean accuracy is {accuracy:.1f} %; with {name} it rises by {rise}."
        yield found(Kind.NORMALISATION_OUTSIDE, seen, normalisation=name, accuracy=accuracy, **rise.to_dict())


def _normalised(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    mean, std = x.mean(dim=(0, 2, 3), keepdim=True), x.std(dim=(0, 2, 3), keepdim=True)
    yield "the mean and deviation of these images", (x - mean) / std.clamp_min(1e-6)
    yield "pixels in [-1, 1]", 2 * x - 1
    yield "pixels in [0, 255]", 255 * x
    if x.shape[1] == 3:
        moments = {
            "ImageNet's": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
            "CIFAR-10's": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        }
        for whose, (centre, spread) in moments.items():
            yield f"{whose} mean and deviation", (x - _channels(centre, x)) / _channels(spread, x)


def _channels(values: tuple[float, ...], like: Tensor) -> Tensor:
    return torch.tensor(values, device=like.device, dtype=like.dtype).view(1, -1, 1, 1)


def selected_on_test(selection: str | Mapping[str, Any] | None, ids: Tensor) -> Iterator[Finding]:
    """How the checkpoint was chosen: in words, or a mapping with ``split`` or the ``ids`` it was chosen on."""
    if selection is None:
        return
    if isinstance(selection, Mapping):
        shared = len(set(map(int, selection.get("ids", ()))) & set(ids.tolist()))
        if shared:
            seen = f"{shared} of the {len(ids)} samples audited here were used to choose the checkpoint."
            yield found(Kind.SELECTED_ON_TEST, seen, shared=shared, of=len(ids))
            return
        text = str(selection.get("split", selection.get("selection", "")))
    else:
        text = selection
    if speaks_of_test(text):
        yield found(Kind.SELECTED_ON_TEST, f"The checkpoint's own description says: {text!r}.", selection=text)


def speaks_of_test(text: str) -> bool:
    """Whether a description of the selection names test data, other than to deny it."""
    for clause in re.split(r"[.;,]|\bbut\b", text.lower()):
        if re.search(r"\btest(s|set)?\b|\btest[- _]", clause) and not re.search(r"\b(not?|never|without)\b", clause):
            return True
    return False


def differ(first: Tensor, second: Tensor, share: float) -> bool:
    """Whether outputs differ by more than a share of their usual range over the classes."""
    first, second = first.nan_to_num(0.0, 0.0, 0.0), second.nan_to_num(0.0, 0.0, 0.0)
    usual = float((first.amax(dim=1) - first.amin(dim=1)).mean())
    return float((first - second).abs().max()) > share * max(usual, 1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# Attacks
# ---------------------------------------------------------------------------------------------------------------------


def gradients(subject: Subject) -> Iterator[Finding]:
    """Gradients at the clean image and at a random one of the ball; a zero counts if it is at both."""
    bad = torch.zeros_like(subject.y, dtype=torch.bool)
    zero = {"cross-entropy": torch.ones_like(bad), "margin": torch.ones_like(bad)}

    def work(part: slice) -> None:
        x, y = subject.x[part], subject.y[part]
        noise = Noise(subject.seed, subject.ids[part]).fold("audit", "gradients")
        for image in (x, subject.ball.random_start(x, noise)):
            for name, loss in (("cross-entropy", cross_entropy), ("margin", margin)):
                flat = logits_and_gradient(subject.model, image, loss, y)[2].flatten(1)
                bad[part] |= ~flat.isfinite().all(dim=1)
                zero[name][part] &= (flat == 0).all(dim=1)

    subject.batch = in_parts(len(subject.x), subject.batch, work)
    count = len(subject.x)
    blind = {name: int(mask.sum()) for name, mask in zero.items()}
    stuck = 0 if subject.evaluated is None else int(subject.evaluated.stuck.sum())
    subject.measured["gradients"] = {"of": count, "non_finite": int(bad.sum()), "zero": blind, "stuck": stuck}
    if bad.any():
        worst = Severity.INVALID if int(bad.sum()) >= count / 2 else None
        seen = f"Gradients are not finite for {int(bad.sum())} of {count} images."
        yield found(Kind.NON_FINITE_GRADIENT, seen, worst, images=int(bad.sum()), of=count)
    if max(*blind.values(), stuck) > count / 100:
        worst = Severity.INVALID if blind["margin"] >= count / 2 else None
        parts = [f"of the {name} for {number}" for name, number in blind.items() if number]
        parts += [f"throughout an attack of the evaluation for {stuck}"] if stuck else []
        seen = f"Gradients are exactly zero {' and '.join(parts)} of {count} images."
        yield found(Kind.ZERO_GRADIENT, seen, worst, **blind, stuck=stuck, of=count)


def _steps(subject: Subject) -> int:
    """Under l1 a step moves one pixel, so it takes more of them to get anywhere."""
    return 5 * STEPS if subject.ball.norm == "l1" else STEPS


def white_box(subject: Subject) -> Iterator[Finding]:
    """The gradient attacks that the others are compared with, and the two losses with each other."""
    steps = _steps(subject)
    ce = subject.strike("ce", pgd, stream="white", steps=steps)
    by_margin = subject.strike("margin", pgd, stream="white", steps=steps, loss=margin)
    if subject.ball.norm != "l1":
        subject.strike("targeted", apgd_targeted, steps=STEPS, targets=3)
    lead = subject.gain(by_margin, ce)
    subject.measured["white_box"] = {
        name: subject.percent(subject.broken[name]) for name in ("ce", "margin", "targeted") if name in subject.broken
    }
    subject.measured["margin_over_ce"] = lead.to_dict()
    if lead.over(MUCH):
        seen = (
            f"PGD-{steps} breaks {subject.percent(ce):.1f} % by the cross-entropy and "
            f"{subject.percent(by_margin):.1f} % by the margin: {lead} more."
        )
        yield found(Kind.CE_WEAKER_THAN_MARGIN, seen, n=subject.n, **lead.to_dict())


def still_helping(subject: Subject) -> Iterator[Finding]:
    """More steps of the same length, and more starts, on what the short attacks left standing."""
    white, steps = subject.white(), _steps(subject)
    options: dict[str, Any] = {
        "rows": (~white).nonzero().squeeze(1),
        "step_size": 2.5 * subject.ball.eps / steps,
        "loss": margin,
    }
    longer = subject.strike("longer", pgd, stream="white", steps=LONGER * steps, **options)
    again = subject.strike("restarts", pgd, steps=steps, restarts=RESTARTS, **options)
    by_steps, by_starts, both = (subject.gain(white | more, white) for more in (longer, again, longer | again))
    subject.measured["still_helping"] = {"steps": by_steps.to_dict(), "restarts": by_starts.to_dict()}
    if both.over(CONVERGED):
        seen = (
            f"Gradient attacks break {subject.percent(white):.1f} %; {LONGER} times the steps add "
            f"{by_steps.points:.1f} points and {RESTARTS} more starts {by_starts.points:.1f}, together {both}."
        )
        yield found(
            Kind.STILL_HELPING, seen, n=subject.n, steps=by_steps.points, restarts=by_starts.points, **both.to_dict()
        )


def black_box(subject: Subject) -> Iterator[Finding]:
    """Square on everything, and what black-box attacks of the evaluation broke, against gradient attacks.

    Of large images its few queries see little, so what is left after them is worth more; but with so many, Square also
    breaks some of an honest model that short gradient attacks do not.
    """
    black = longer = torch.zeros_like(subject.y, dtype=torch.bool)
    if subject.ball.norm == "l1":
        subject.notes.append("Square was left out: it does not work in l1.")
    else:
        black = subject.strike("square", square, queries=QUERIES, rescale=True)
        left = (~(_white(subject) | black)).nonzero().squeeze(1)
        longer = subject.strike("square longer", square, rows=left, queries=QUERIES_LEFT, rescale=True)
    if subject.evaluated is not None:
        black = black | subject.evaluated.black
    more, most = _beyond(subject, black), _beyond(subject, black | longer)
    subject.measured["black_box"] = {
        "broken": subject.percent(black | longer),
        "alone": more.to_dict(),
        "alone_longer": most.to_dict(),
    }
    if most.over(MUCH) or more.over(UNSEEN):
        more = most if most.over(MUCH) else more
        seen = f"Black-box attacks alone break {more} of samples that no gradient attack broke."
        yield found(Kind.BLACK_BOX_STRONGER, seen, n=subject.n, **more.to_dict())


def transferred(subject: Subject) -> Iterator[Finding]:
    if subject.surrogate is None:
        subject.notes.append("Transfer was left out: no surrogate model was given.")
        return
    moved = subject.strike("transfer", transfer, source=subject.surrogate, steps=STEPS, restarts=2, loss=margin)
    more = _beyond(subject, moved)
    subject.measured["transfer"] = {"broken": subject.percent(moved), "alone": more.to_dict()}
    if more.over(UNSEEN):
        seen = f"Images made on the surrogate alone break {more} of samples that no gradient attack broke."
        yield found(Kind.TRANSFER_STRONGER, seen, n=subject.n, **more.to_dict())


def _beyond(subject: Subject, broken: Tensor) -> Gain:
    """What an attack breaks beyond gradient attacks; how many these break beyond it says nothing against them."""
    return gain(int((broken & ~_white(subject)).sum()), 0, subject.n)


def _white(subject: Subject) -> Tensor:
    return subject.white() | subject.union("longer", "restarts")


def huge_eps(subject: Subject) -> Iterator[Finding]:
    """Gradient attacks from the clean image with the whole box allowed."""
    rows = torch.arange(min(len(subject.x), 64), device=subject.x.device)
    for name, loss in (("huge ce", cross_entropy), ("huge margin", margin)):
        rows_left = rows[~subject.union("huge ce")[rows]]
        subject.strike(name, bim, ball=WHOLE_BOX, rows=rows_left, steps=2 * STEPS, loss=loss)
    left = len(rows) - int(subject.union("huge ce", "huge margin").sum())
    subject.measured["huge_eps"] = {"held": left, "of": len(rows)}
    if left > len(rows) / 50:
        seen = f"{left} of {len(rows)} samples hold although every pixel may take every value."
        yield found(Kind.HUGE_EPS_HOLDS, seen, held=left, of=len(rows))


def noise_as_strong(subject: Subject) -> Iterator[Finding]:
    """The control. Where noise breaks nothing, or attacks break everything, it says nothing about gradients."""
    noisy, white = subject.strike("noise", random_noise, draws=DRAWS), subject.white()
    by_noise, by_gradient = subject.percent(noisy), subject.percent(white)
    subject.measured["noise"] = {"noise": by_noise, "gradient": by_gradient}
    standing = 100 * int((~(noisy | white)).sum()) / subject.n
    if by_noise > POINT and by_noise >= by_gradient - POINT and standing > POINT:
        seen = f"{DRAWS} draws of noise break {by_noise:.1f} %, gradient attacks {by_gradient:.1f} % (n = {subject.n})."
        yield found(Kind.NOISE_AS_STRONG, seen, noise=by_noise, gradient=by_gradient, n=subject.n)


def evaluation_too_weak(subject: Subject) -> Iterator[Finding]:
    """Samples that the evaluation counts as robust and a probe inside the same ball broke."""
    if subject.evaluated is None:
        return
    evaluated = subject.evaluated
    probes = subject.union("ce", "margin", "targeted", "longer", "restarts", "square", "transfer", "noise")
    robust = evaluated.known & ~(evaluated.white | evaluated.black | evaluated.other)
    missed = gain(int((probes & robust).sum()), 0, subject.n)
    subject.measured["missed_by_evaluation"] = missed.to_dict()
    if missed.over(CONVERGED):
        seen = f"The probes break {missed} of samples that the evaluation counts as robust."
        yield found(Kind.EVALUATION_TOO_WEAK, seen, n=subject.n, **missed.to_dict())


ATTACKS: Mapping[str, Callable[[Subject], Iterator[Finding]]] = {
    "gradients": gradients,
    "logit scale": logit_scale,
    "white box": white_box,
    "steps and restarts": still_helping,
    "black box": black_box,
    "transfer": transferred,
    "huge eps": huge_eps,
    "noise": noise_as_strong,
    "evaluation": evaluation_too_weak,
}
"""In this order: later probes compare with what earlier ones broke."""
