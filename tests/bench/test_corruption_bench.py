from __future__ import annotations

import types

import numpy as np
import pytest
import torch

from hardsphere.bench import corrupting
from hardsphere.bench.corrupting import as_text, bench_corruptions
from hardsphere.errors import HardsphereError

CPU = torch.device("cpu")


def test_each_corruption_and_the_whole_set_are_timed() -> None:
    measured = bench_corruptions(4, names=("contrast", "brightness"), loop=False, device=CPU)
    assert [one.name for one in measured.corruptions] == ["contrast", "brightness"]
    assert measured.sets == 10
    assert measured.seconds == pytest.approx(sum(one.seconds for one in measured.corruptions))
    assert measured.images_per_second == pytest.approx(40 / measured.seconds)
    assert all(one.over_loop is None for one in measured.corruptions)
    assert "10 x 4 images" in as_text(measured)


def test_the_loop_sees_one_image_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []

    def corrupt(image: np.ndarray, corruption_name: str, severity: int) -> np.ndarray:
        seen.append(image.shape)
        return image

    monkeypatch.setattr(corrupting, "_reference", lambda: types.SimpleNamespace(corrupt=corrupt))
    measured = bench_corruptions(3, names=("contrast",), device=CPU)
    assert seen == [(32, 32, 3)] * 4  # one to warm up
    assert measured.corruptions[0].over_loop is not None
    assert "over a loop" in as_text(measured)


def test_bad_input_is_one_sentence() -> None:
    with pytest.raises(HardsphereError, match="at least one"):
        bench_corruptions(0, device=CPU)
    with pytest.raises(HardsphereError, match="sunshine"):
        bench_corruptions(1, names=("sunshine",), device=CPU)
