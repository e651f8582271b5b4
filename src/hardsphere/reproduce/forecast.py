"""How long a run will take, going by the latest recorded run of its kind on the same hardware.

The latest, because it ran under conditions most like the present ones: where processes share a machine, each is slower.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        judging += _latest([one["seconds"] for one in kin if one["measurement"] == said])
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
    return config.epochs * _latest([one["trained"]["wall_seconds"] / one["config"]["epochs"] for one in closest])


def _latest(seconds: Sequence[float]) -> float:
    return seconds[-1] if seconds else 0.0
