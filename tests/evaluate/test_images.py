"""Adversarial images as files: kept, saved, rounded to 8 bits inside the ball and judged again."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from toys import Linear, distances, images, labelled, radius_at

from hardsphere.errors import HardsphereError
from hardsphere.evaluate import Entry, evaluate, open_ledger, verify_png
from hardsphere.evaluate.images import kept_images, quantise
from hardsphere.threat import Ball

SUITE = [Entry("apgd-t", "apgd_targeted", {"steps": 20})]


def eight_bit(x):
    return (x * 255).round() / 255


def test_saved_images_are_inside_the_ball_and_wrong(tmp_path):
    model = Linear(classes=4)
    x, y = labelled(model, 30, wrong=2)
    balls = [radius_at(model, x[2:], y[2:], part) for part in (0.3, 0.6)]
    ids = torch.arange(30) * 3
    result = evaluate(model, x, y, balls, suite=SUITE, out=tmp_path, save_images=True, ids=ids)
    for ball, file in zip(balls, sorted(tmp_path.glob("*.npz")), strict=True):
        saved = np.load(file)
        where = saved["ids"] // 3
        clean, proposed = x[where], torch.from_numpy(saved["x"])
        assert len(where) == 28 - len(result.survivors(ball))
        assert not set(saved["ids"].tolist()) & result.survivors(ball)
        assert torch.equal(model(proposed).argmax(dim=1), torch.from_numpy(saved["predicted"]))
        assert (saved["predicted"] != saved["y"]).all()
        assert (saved["y"] == y[where].numpy()).all()
        assert float(ball.distance(clean.double(), proposed.double()).max()) <= ball.eps + 1e-6
    assert set(np.load(file)["attack"]) == {"carried", "apgd-t"}


def test_without_saving_there_is_nothing_to_verify(tmp_path):
    model = Linear()
    x, y = labelled(model, 5)
    result = evaluate(model, x, y, Ball("linf", 0.05), suite=SUITE)
    with pytest.raises(HardsphereError, match="kept no images"):
        kept_images(result.ledger, 0.05)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_png_files_are_judged_as_they_are_read_back(tmp_path, channels, norm):
    shape = (channels, 4, 4)
    model = Linear(shape=shape, classes=3)
    x = eight_bit(images(40, shape))
    y = model(x).argmax(dim=1)
    ball = radius_at(model, x, y, 0.5, norm)
    result = evaluate(model, x, y, ball, suite=SUITE, save_images=True, out=tmp_path / "out")
    robust = result.robust_accuracy
    result.ledger.close()
    check = verify_png(model, x, y, ball, open_ledger(tmp_path / "out"), tmp_path / "png")
    index = json.loads((tmp_path / "png" / "index.json").read_text())
    assert len(index) == check.broken == len(list((tmp_path / "png").glob("*.png"))) > 5
    wrong = 0
    for entry in index:
        levels = np.array(Image.open(tmp_path / "png" / entry["file"])).reshape(4, 4, channels)
        back = torch.from_numpy(levels).permute(2, 0, 1)[None].double() / 255
        sample = int(entry["file"].split("-")[0])
        inside = float(ball.distance(x[sample : sample + 1].double(), back)) <= ball.eps + 1e-6
        wrong += bool(inside and model(back.float()).argmax() != y[sample])
    assert check.still_broken == wrong
    assert check.accuracy == pytest.approx((40 - wrong) / 40)
    assert check.accuracy >= robust


def test_rounding_heals_what_hardly_crossed_the_boundary(tmp_path):
    # The smallest perturbations that work, far below one level of 255: as a PNG nothing is left of them.
    model = Linear()
    x = eight_bit(images(10))
    y = model(x).argmax(dim=1)
    ball = Ball("linf", 0.3 / 255)
    close = distances(model, x, y) <= 0.29 / 255
    if not close.any():
        direction = (model.linear.weight[1] - model.linear.weight[0]).sign().detach().view(1, 4, 4)
        with torch.no_grad():  # move the boundary to 0.1/255 beyond the first image
            gap = model(x[:1]).diff() + (model.linear.weight[1] - model.linear.weight[0]).abs().sum() * 0.1 / 255
            model.linear.bias[1] -= float(gap)
        assert direction.abs().min() == 1
        y = model(x).argmax(dim=1)
    result = evaluate(model, x, y, ball, suite=SUITE, save_images=True)
    assert result.robust_accuracy < 1
    check = verify_png(model, x, y, ball, result.ledger, tmp_path)
    assert (check.still_broken, check.accuracy) == (0, 1.0)
    assert "0 of" in str(check)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from(["linf", "l2", "l1"]),
    st.sampled_from([0.031, 8 / 255, 0.1, 1.0]),
    st.booleans(),
)
def test_quantised_images_stay_in_the_ball_around_8_bit_images(seed, norm, eps, far):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (2, 3, 5, 5), generator=generator) / 255
    ball = Ball(norm, eps)
    proposal = (
        torch.rand(2, 3, 5, 5, generator=generator) if far else x + eps * torch.randn(2, 3, 5, 5, generator=generator)
    )
    x_adv = ball.project(x, proposal)
    levels = quantise(x, x_adv, ball)
    assert levels.dtype == torch.uint8
    assert float(ball.distance(x.double(), levels.double() / 255).max()) <= eps + 1e-6
    assert float((levels.double() / 255 - x_adv.double()).abs().max()) <= 1 / 255 + 1e-6


def test_images_of_two_channels_are_no_png(tmp_path):
    model = Linear(shape=(2, 4, 4))
    x, y = labelled(model, 5, shape=(2, 4, 4))
    result = evaluate(model, x, y, Ball("linf", 0.2), suite=SUITE, save_images=True)
    with pytest.raises(HardsphereError, match="1, 3 or 4 channels"):
        verify_png(model, x, y, Ball("linf", 0.2), result.ledger, tmp_path)
