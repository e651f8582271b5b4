"""Holding a split out of the training data: stratified by class, and the same every time.

Which samples go is a function of (seed, id, purpose), so that it does not depend on the order of the files, on the
machine or on a library's generator.
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor

from hardsphere.data.sources import ImageFiles, Images
from hardsphere.errors import HardsphereError
from hardsphere.noise import Noise

S = TypeVar("S", Images, ImageFiles)


def hold_out(source: S, amount: float, seed: int = 0, purpose: str = "validation") -> tuple[S, S | None]:
    """Split a source into (what stays, what is held out), both in the source's order.

    Every class gives its share, at least one image where it has two or more, and keeps at least one.

    Args:
        amount: a fraction below 1, or a number of images from 1 on; 0 holds nothing out.
        seed: chooses the samples.
        purpose: names the split, so that two splits of one source are independent.
    """
    if not (math.isfinite(amount) and amount >= 0) or (amount > 1 and amount != int(amount)):
        raise HardsphereError(
            f"The {purpose} split is {amount:g}, but it must be a fraction below 1, a number of images, or 0 for none."
        )
    if amount == 0:
        return source, None
    wanted = int(amount) if amount >= 1 else round(amount * len(source))
    if wanted >= len(source):
        raise HardsphereError(f"A {purpose} split of {wanted} images would leave nothing of {len(source)} to train on.")
    counts = torch.bincount(source.labels, minlength=len(source.class_names))
    shares = _shares(counts.tolist(), wanted)
    if sum(shares) == 0:
        raise HardsphereError(f"Every class has one image only, so there is nothing to hold out for a {purpose} split.")
    held = torch.zeros(len(source), dtype=torch.bool)
    # Distinct ids have distinct keys, so sorting by key is a permutation that belongs to the seed alone.
    rank = Noise(seed, source.ids).fold("hold out", purpose).keys
    for label, share in enumerate(shares):
        members = (source.labels == label).nonzero().squeeze(1)
        held[members[rank[members].argsort(stable=True)[:share]]] = True
    return source.subset(_positions(~held)), source.subset(_positions(held))


def _shares(counts: list[int], wanted: int) -> list[int]:
    """How many of each class to hold out: proportional, largest remainders first."""
    exact = [count * wanted / sum(counts) for count in counts]
    shares = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(counts)), key=lambda label: (shares[label] - exact[label], label))
    for label in by_remainder[: wanted - sum(shares)]:
        shares[label] += 1
    return [min(max(share, 1), count - 1) if count > 1 else 0 for share, count in zip(shares, counts, strict=True)]


def _positions(mask: Tensor) -> Tensor:
    return mask.nonzero().squeeze(1)
