"""Benchmarks that anyone can run: how fast training is here, and what bounds it."""

from hardsphere.bench.training import TrainingBench as TrainingBench
from hardsphere.bench.training import bench_training as bench_training
