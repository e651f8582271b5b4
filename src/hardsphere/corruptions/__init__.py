"""Common corruptions: CIFAR-10-C and ImageNet-C (Hendrycks & Dietterich, ICLR 2019).

`corrupt` applies one of 15 + 4 corruptions at one of 5 severities to a batch of 8-bit images, on a CPU or a GPU.
`write_cifar` and `write_folder` make whole sets in the official layouts, `read_cifar` reads official and generated
ones, `scores` turns accuracies into the mean over 15 x 5.
"""

from __future__ import annotations

from hardsphere.corruptions.apply import corrupt as corrupt
from hardsphere.corruptions.constants import ALL as ALL
from hardsphere.corruptions.constants import CORRUPTIONS as CORRUPTIONS
from hardsphere.corruptions.constants import EXTRA as EXTRA
from hardsphere.corruptions.constants import SEVERITIES as SEVERITIES
from hardsphere.corruptions.frost import FrostSource as FrostSource
from hardsphere.corruptions.frost import FrostStandInWarning as FrostStandInWarning
from hardsphere.corruptions.frost import frost_source as frost_source
from hardsphere.corruptions.scores import ALEXNET as ALEXNET
from hardsphere.corruptions.scores import Baseline as Baseline
from hardsphere.corruptions.scores import CorruptionScores as CorruptionScores
from hardsphere.corruptions.scores import scores as scores
from hardsphere.corruptions.sets import CorruptionSet as CorruptionSet
from hardsphere.corruptions.sets import read_cifar as read_cifar
from hardsphere.corruptions.sets import write_cifar as write_cifar
from hardsphere.corruptions.sets import write_folder as write_folder
