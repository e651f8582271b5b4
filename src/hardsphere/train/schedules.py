"""Learning rates as pure functions of the update's number, so that resuming needs no state."""

from __future__ import annotations

import math

from hardsphere.config import Config


def learning_rate(config: Config, update: int, updates_per_epoch: int) -> float:
    """The rate of update number ``update`` (from 0)."""
    total = config.epochs * updates_per_epoch
    if config.schedule == "step":
        # Compare whole updates: a share of the epochs would be hit or missed by rounding.
        drops = sum(update >= round(share * config.epochs) * updates_per_epoch for share in config.milestones)
        return config.lr * 0.1**drops
    progress = (update + 1) / (total + 1)  # never exactly 0 or 1, where the rate would be 0
    if config.schedule == "cyclic":
        return config.lr * (1 - abs(2 * progress - 1))
    if config.schedule == "onecycle":
        if progress < config.warmup:
            return config.lr * progress / config.warmup
        return config.lr * (1 - progress) / (1 - config.warmup) if config.warmup < 1 else config.lr
    if config.schedule == "cosine":
        return config.lr * (1 + math.cos(math.pi * progress)) / 2
    return config.lr
