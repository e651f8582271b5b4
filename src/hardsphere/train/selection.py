"""How good a model is on the held-out split: what the best checkpoint is chosen by."""

from __future__ import annotations

import torch
from torch import nn

from hardsphere.attacks.losses import margin
from hardsphere.attacks.pgd import pgd
from hardsphere.data import Source, eval_batches
from hardsphere.noise import Noise
from hardsphere.runtime import exact_float32, tf32, without_kernel_search
from hardsphere.threat import Ball


def held_out_accuracy(
    model: nn.Module, source: Source, ball: Ball, *, steps: int, limit: int, batch: int, seed: int, device: torch.device
) -> tuple[float, float]:
    """Clean accuracy, and accuracy under margin-PGD: an attack that no logit scale can weaken.

    Images may be crafted in TF32, but what counts is answered in float32.
    """
    if limit < len(source):  # evenly over the whole split, which may be sorted by class
        source = source.subset([index * len(source) // limit for index in range(limit)])
    mode = model.training
    model.eval()
    count, clean, robust = 0, 0, 0
    with exact_float32(), without_kernel_search():
        for part in eval_batches(source, batch, device):
            with torch.no_grad():
                right = model(part.x).argmax(dim=1) == part.y
            noise = Noise(seed, part.ids).fold("select")[right]
            with tf32():
                attacked = pgd(model, part.x[right], part.y[right], ball, noise=noise, steps=steps, loss=margin)
            with torch.no_grad():
                held = model(attacked.x_adv).argmax(dim=1) == part.y[right]
            count, clean, robust = count + len(right), clean + int(right.sum()), robust + int(held.sum())
    model.train(mode)
    return clean / count, robust / count
