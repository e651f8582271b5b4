"""FastAT (Wong et al., 2020): one large step from a random start instead of many small ones.

It can collapse within an epoch: the network learns to defeat the single step and nothing else (catastrophic
overfitting). After each epoch a short PGD attack looks for that, and training is rolled back if it is found.
"""

from __future__ import annotations

from dataclasses import dataclass

from hardsphere.objectives.pgd import PGDTraining


@dataclass(frozen=True)
class FastTraining(PGDTraining):
    """PGD-AT with a single step of 1.25 eps, watched for collapse.

    Attributes:
        drop: the fall of PGD accuracy from one epoch to the next that counts as a collapse.
    """

    drop: float = 0.2

    @property
    def collapse_drop(self) -> float | None:
        return self.drop
