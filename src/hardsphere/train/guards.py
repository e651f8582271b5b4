"""What stops a run before it does harm: a loss that is not finite, and a collapse of robustness."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hardsphere.attacks.losses import cross_entropy
from hardsphere.attacks.pgd import pgd
from hardsphere.data import Batch
from hardsphere.errors import HardsphereError
from hardsphere.noise import Noise
from hardsphere.runtime import without_kernel_search
from hardsphere.threat import Ball


class FiniteGuard:
    """Remembers, on the device, the first update whose loss was not finite. Looking at it is the only sync."""

    def __init__(self, device: torch.device, updates_per_epoch: int, updates_per_batch: int) -> None:
        self.first_bad = torch.full((), -1, dtype=torch.int64, device=device)
        self.updates_per_epoch = updates_per_epoch
        self.updates_per_batch = updates_per_batch

    def watch(self, loss: Tensor, update: Tensor) -> None:
        bad = (self.first_bad < 0) & ~torch.isfinite(loss.detach())
        self.first_bad.copy_(torch.where(bad, update, self.first_bad))

    def check(self) -> None:
        """Stop the run if a loss was not finite."""
        update = int(self.first_bad)
        if update < 0:
            return
        epoch, rest = divmod(update, self.updates_per_epoch)
        batch = rest // self.updates_per_batch
        raise HardsphereError(
            f"The loss is not finite at step {update + 1} (epoch {epoch + 1}, batch {batch + 1}): the last good "
            "checkpoint is kept; lower lr or attack.eps, or look for bad images in that batch."
        )


def pgd_accuracy(model: nn.Module, batch: Batch, ball: Ball, seed: int) -> float:
    """Accuracy under PGD-5 on one batch: enough to see single-step training collapse (Wong et al., 2020)."""
    labels = batch.y.argmax(dim=1) if batch.y.is_floating_point() else batch.y
    noise = Noise(seed, batch.ids).fold("collapse")
    mode = model.training
    with without_kernel_search():
        attacked = pgd(model, batch.x, labels, ball, noise=noise, steps=5, loss=cross_entropy)
        model.eval()
        with torch.no_grad():
            right = model(attacked.x_adv).argmax(dim=1) == labels
    model.train(mode)
    return float(right.float().mean())
