"""A held-out split is stratified, deterministic, independent of the order of the samples, and never the whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardsphere.data import Images, hold_out
from hardsphere.errors import HardsphereError


def labelled(labels: list[int], classes: int) -> Images:
    pixels = torch.zeros(len(labels), 1, 1, 1, dtype=torch.uint8)
    return Images(pixels, torch.tensor(labels), torch.arange(len(labels)), tuple(map(str, range(classes))))


@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.integers(2, 40), min_size=2, max_size=6), amount=st.floats(0.05, 0.6), seed=st.integers(0, 9))
def test_each_class_gives_its_share(counts: list[int], amount: float, seed: int) -> None:
    labels = [label for label, count in enumerate(counts) for _ in range(count)]
    kept, held = hold_out(labelled(labels, len(counts)), amount, seed)
    assert held is not None
    assert sorted([*kept.ids.tolist(), *held.ids.tolist()]) == list(range(len(labels)))
    for label, count in enumerate(counts):
        given_away = int((held.labels == label).sum())
        assert 1 <= given_away <= count - 1
        assert abs(given_away - count * amount) < 2 or given_away == 1
    assert held.ids.tolist() == sorted(held.ids.tolist())  # the source's order


def test_a_number_of_images_is_met_exactly() -> None:
    _, held = hold_out(labelled([0] * 50 + [1] * 30 + [2] * 20, 3), 13)
    assert held is not None
    assert torch.bincount(held.labels).tolist() == [6, 4, 3]  # 6.5, 3.9, 2.6: ties go to no one twice


def test_the_choice_belongs_to_seed_and_ids_alone() -> None:
    source = labelled([0, 1] * 50, 2)
    _, held = hold_out(source, 0.2, seed=3)
    _, of_reversed = hold_out(source.subset(list(range(99, -1, -1))), 0.2, seed=3)
    _, other = hold_out(source, 0.2, seed=4)
    _, other_purpose = hold_out(source, 0.2, seed=3, purpose="test")
    assert held is not None
    assert of_reversed is not None
    assert other is not None
    assert other_purpose is not None
    assert sorted(of_reversed.ids.tolist()) == held.ids.tolist()
    assert other.ids.tolist() != held.ids.tolist()
    assert other_purpose.ids.tolist() != held.ids.tolist()


def test_nothing_is_held_out_on_request() -> None:
    source = labelled([0, 1], 2)
    assert hold_out(source, 0) == (source, None)


@pytest.mark.parametrize(
    ("labels", "amount", "sentence"),
    [
        ([0, 1, 0, 1], 4, "would leave nothing of 4"),
        ([0, 1, 0, 1], -0.1, "a fraction below 1, a number of images, or 0"),
        ([0, 1, 0, 1], 1.5, "a fraction below 1"),
        ([0, 1, 0, 1], float("nan"), "a fraction below 1"),
        ([0, 1], 1, "Every class has one image only"),
    ],
)
def test_impossible_splits_are_refused(labels: list[int], amount: float, sentence: str) -> None:
    with pytest.raises(HardsphereError, match=sentence):
        hold_out(labelled(labels, 2), amount)
