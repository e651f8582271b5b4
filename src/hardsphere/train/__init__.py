"""Training: `train` runs a configuration into a run directory, `load` brings its model back."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from hardsphere.callable import make_callable
from hardsphere.config import Config
from hardsphere.data import load as load_data
from hardsphere.runtime import expect_compiling, pick_device
from hardsphere.train.deployed import Deployed as Deployed
from hardsphere.train.deployed import load as load
from hardsphere.train.forerunner import sent_ahead
from hardsphere.train.loop import Position, Reporter, Silence, Trainer
from hardsphere.train.run import RunDirectory


@dataclass(frozen=True)
class Trained:
    """A finished run.

    Attributes:
        path: the run directory.
        position: where the run ended, its best epoch and that epoch's accuracies on the held-out split.
        already: whether it was finished before this call.
    """

    path: Path
    position: Position
    already: bool


def default_directory(config: Config) -> Path:
    """``runs/<recipe>-seed<seed>``."""
    return Path("runs") / f"{config.recipe.replace('/', '-')}-seed{config.seed}"


def train(
    config: Config,
    out: str | Path | None = None,
    *,
    data_dir: str | Path | None = None,
    resume: bool = False,
    device: str | None = None,
    reporter: Reporter | None = None,
    save_every: float = 600.0,
    compile: bool = True,
) -> Trained:
    """Train a configuration into a run directory.

    Args:
        config: what to train, such as ``hardsphere.recipe("digits/pgd-he")``.
        out: the run directory; `default_directory` by default.
        data_dir: where the data set lies; digits needs none.
        resume: go on with the run that the directory holds, if it holds one.
        save_every: seconds between checkpoints within an epoch.
        compile: on a GPU, compile the network and replay each step as a CUDA graph.
    """
    chosen = pick_device(device)
    fast = compile and chosen.type == "cuda"
    if fast:
        expect_compiling(chosen)
    folder = Path(data_dir) if data_dir is not None else None
    path = Path(out) if out is not None else default_directory(config)
    spec = config.data
    data = load_data(config.dataset, folder, validation=spec.validation, seed=config.seed, size=spec.size)
    with sent_ahead(config, data, chosen, (reporter or Silence()).say) if fast else nullcontext() as wait_for_update:
        # The model is built before the directory is made: a mistake in the configuration must leave nothing behind.
        trainer = Trainer(
            config,
            data,
            device=chosen,
            data_dir=folder,
            reporter=reporter,
            save_every=save_every,
            fast=fast,
            wait_for_update=wait_for_update,
        )
        run = RunDirectory(path, config, resume=resume, device=chosen)
        try:
            position = trainer.fit(run)
        finally:
            run.close()
    return Trained(path, position, trainer.was_finished)


make_callable(__name__)  # `hardsphere.train(...)`
