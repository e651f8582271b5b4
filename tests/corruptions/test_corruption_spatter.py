"""The parts of spatter against plain implementations, one pixel at a time."""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import Tensor

from hardsphere.corruptions import SEVERITIES, corrupt
from hardsphere.corruptions.constants import SETTINGS, VARIANTS
from hardsphere.corruptions.spatter import distance_to_edge, edges, equalised, water
from hardsphere.noise import Noise

CASES = [(variant, severity) for variant in VARIANTS for severity in SEVERITIES]
MUD = [case for case in CASES if SETTINGS[case[0]]["spatter"][case[1] - 1][5]]
WATER = [case for case in CASES if case not in MUD]


def layer(variant: str, severity: int, side: int, seed: int) -> np.ndarray:
    mean, deviation, smoothness, threshold, _, _ = SETTINGS[variant]["spatter"][severity - 1]
    draws = Noise(seed, torch.arange(1)).fold("corruption", "spatter", severity).normal(side, side)[0].numpy()
    liquid = ndimage.gaussian_filter(mean + deviation * draws.astype(float), smoothness, mode="nearest")
    liquid[liquid < threshold] = 0
    return liquid


@pytest.mark.parametrize(("variant", "severity"), MUD)
def test_mud(variant: str, severity: int, small: Tensor, large: Tensor) -> None:
    images = small[:1] if variant == "cifar" else large[:1]
    _, _, _, threshold, strength, _ = SETTINGS[variant]["spatter"][severity - 1]
    liquid = layer(variant, severity, images.shape[-1], seed=3)
    cover = ndimage.gaussian_filter((liquid > threshold).astype(float), strength, mode="nearest")
    cover[cover < 0.8] = 0
    colour = np.array([63, 42, 20])[:, None, None] / 255
    expected = images[0].numpy() / 255 * (1 - cover) + cover * colour
    out = corrupt(images, "spatter", severity, seed=3, variant=variant)[0].numpy()
    difference = np.abs(out.astype(int) - (np.clip(expected, 0, 1) * 255 + 1e-10).astype(int))
    assert difference.max() <= 1
    assert difference.mean() <= 0.001


@pytest.mark.parametrize(("variant", "severity"), WATER)
def test_water_adds_pale_turquoise(variant: str, severity: int) -> None:
    side = 32 if variant == "cifar" else 224
    strength = SETTINGS[variant]["spatter"][severity - 1][4]
    out = corrupt(torch.zeros(1, 3, side, side, dtype=torch.uint8), "spatter", severity, seed=1, variant=variant)[0]
    liquid = (layer(variant, severity, side, seed=1) * 255 + 1e-10).clip(0, 255).astype(np.uint8)
    shown = water(torch.from_numpy(liquid)[None])[0]
    assert shown.max() == 1
    assert (shown[liquid == 0] == 0).all()
    expected = strength * shown.numpy() * np.array([175, 238, 238])[:, None, None]
    assert np.abs(out.numpy() - expected).max() < 1


def test_no_water_leaves_the_image() -> None:
    assert (water(torch.zeros(2, 16, 16, dtype=torch.uint8)) == 0).all()


def test_edges_of_a_square() -> None:
    plane = torch.zeros(1, 20, 20, dtype=torch.uint8)
    plane[0, 6:14, 6:14] = 200
    found = edges(plane)[0]
    assert found[5:7, 8:12].any(0).all()  # a line along the top
    assert found[8:12, 13:15].any(1).all()  # and along the right
    assert not found[8:12, 8:12].any()
    assert not found[:4].any()
    faint = plane // 10
    assert not edges(faint).any()


def test_weak_edges_count_only_beside_strong_ones() -> None:
    """A step of 30 makes a gradient of 120, between the thresholds; a step of 100 one of 400."""
    plane = torch.zeros(2, 20, 20, dtype=torch.uint8)
    plane[:, :, 10:] = 30
    plane[1, :5, 10:] = 100
    found = edges(plane)
    assert not found[0].any()
    assert found[1, 10:, 8:12].any(1).all()


def test_distance_is_the_shortest_path() -> None:
    edge = torch.zeros(1, 24, 30, dtype=torch.bool)
    edge[0, 3, 4] = edge[0, 15, 20] = True
    out = distance_to_edge(edge)[0]
    kinds = ((0, 1, 1.0), (1, 0, 1.0), (1, 1, 1.4), (1, 2, 2.1969), (2, 1, 2.1969))
    moves = [(a * y, b * x, cost) for a, b, cost in kinds for y in (-1, 1) for x in (-1, 1)]
    best = {(3, 4): 0.0, (15, 20): 0.0}
    queue = [(0.0, place) for place in best]
    while queue:
        length, (y, x) = heapq.heappop(queue)
        for dy, dx, cost in moves:
            place = (y + dy, x + dx)
            if 0 <= place[0] < 24 and 0 <= place[1] < 30 and length + cost < best.get(place, math.inf):
                best[place] = length + cost
                heapq.heappush(queue, (length + cost, place))
    for (y, x), length in best.items():
        if length <= 20:
            assert out[y, x].item() == pytest.approx(length)


def test_equalised() -> None:
    values = torch.from_numpy(np.random.default_rng(0).integers(10, 60, (2, 16, 16)))
    values[1] = 37
    out = equalised(values)
    assert (out[1] == 37).all()
    histogram = np.bincount(values[0].flatten(), minlength=256)
    lowest = int(np.flatnonzero(histogram)[0])
    below = histogram.cumsum() - histogram[lowest]
    table = np.round(below * (255 / (256 - histogram[lowest])))
    np.testing.assert_array_equal(out[0], table[values[0]])
    assert out[0].min() == 0
    assert out[0].max() == 255
