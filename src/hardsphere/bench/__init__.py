"""Benchmarks that anyone can run: how fast training, evaluation and corruptions are here, and what bounds them.

Each has a file of its own: `training`, `evaluation`, `corrupting`, and `costs` for what a training step costs by the
attack's steps, the batch and the width of the network.
"""

from hardsphere.bench.training import TrainingBench as TrainingBench
from hardsphere.bench.training import bench_training as bench_training
