"""Images in, batches out: digits, CIFAR-10 and CIFAR-100, image folders and arrays.

`load` reads a data set, checks it and holds a validation split out of its training data. `train_loader` gives the
augmented batches of an epoch, `eval_batches` the plain ones. Pixels are float32 in [0, 1], NCHW, from here on.
"""

from hardsphere.data.augment import Augment, augment, cutmix
from hardsphere.data.datasets import NAMES, load, parse_source
from hardsphere.data.fetch import fetch_cifar10
from hardsphere.data.loader import TrainLoader, eval_batches, train_loader
from hardsphere.data.sources import Batch, DataSet, ImageFiles, Images, Source, to_float
from hardsphere.data.split import hold_out

__all__ = [
    "NAMES",
    "Augment",
    "Batch",
    "DataSet",
    "ImageFiles",
    "Images",
    "Source",
    "TrainLoader",
    "augment",
    "cutmix",
    "eval_batches",
    "fetch_cifar10",
    "hold_out",
    "load",
    "parse_source",
    "to_float",
    "train_loader",
]
