"""The training frameworks of the paper, one per file."""

from hardsphere.objectives.alp import LogitPairing
from hardsphere.objectives.base import Adversary as Adversary
from hardsphere.objectives.base import Learner as Learner
from hardsphere.objectives.base import Losses as Losses
from hardsphere.objectives.base import Objective as Objective
from hardsphere.objectives.fast import FastTraining
from hardsphere.objectives.free import FreeTraining
from hardsphere.objectives.pgd import PGDTraining
from hardsphere.objectives.standard import Standard
from hardsphere.objectives.trades import Trades

FRAMEWORKS: dict[str, type[Objective]] = {
    "standard": Standard,
    "pgd": PGDTraining,
    "alp": LogitPairing,
    "trades": Trades,
    "free": FreeTraining,
    "fast": FastTraining,
}
