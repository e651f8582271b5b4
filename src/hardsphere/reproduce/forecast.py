"""How long a run will take, going by recorded runs of its kind on the same hardware."""

from __future__ import annotations

from hardsphere.config import Config
from hardsphere.reproduce.plan import Run
from hardsphere.reproduce.store import Record, Store


def expected_seconds(run: Run, store: Store, hardware: str, weights: str | None) -> float:
    """Seconds to train and judge a run; what nothing is known about counts as nothing.

    Args:
        hardware: as it is recorded.
        weights: the digest of the run's weights; none if they are still to be made, or gone.
    """
    kin = _kin(run.config, store, hardware)
    # Weights that are gone have to be made again, and then everything has to be measured on the new ones.
    todo = run.measurements if weights is None else store.unmeasured(run, weights)
    judging = 0.0
    for measurement in todo if store.unrecorded(run) else ():
        said = {"name": measurement.name, **measurement.describe()}
        judging += max((one["seconds"] for one in kin if one["measurement"] == said), default=0.0)
    return judging + (_training(run.config, kin) if weights is None else 0.0)


def _kin(config: Config, store: Store, hardware: str) -> list[Record]:
    """The records of the same network on the same data and hardware."""
    return [
        record
        for record in store.lines
        if "config" in record
        and record["environment"]["device"] == hardware
        and record["config"]["model"] == config.model
        and record["config"]["dataset"] == config.dataset
    ]


def _training(config: Config, kin: list[Record]) -> float:
    closest = [one for one in kin if one["config"]["framework"] == config.framework] or kin
    per_epoch = max((one["trained"]["wall_seconds"] / one["config"]["epochs"] for one in closest), default=0.0)
    return float(per_epoch * config.epochs)
