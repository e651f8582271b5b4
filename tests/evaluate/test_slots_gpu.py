"""Attacks in slots on a CUDA device: recorded turns against plain ones, half precision against float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_slots import CASES, COUNT, RADIUS, Small, ball_for, in_slots

from hardsphere.evaluate import Evaluation, evaluate
from hardsphere.evaluate.slots import Slots
from hardsphere.models import build
from hardsphere.runtime import has_convolutions
from hardsphere.threat import Ball

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("name", "norm", "options"), CASES)
def test_recorded_turns_do_what_plain_ones_do(name, norm, options, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Small().cuda().requires_grad_(False)
    ball = ball_for(name, norm, bool(options.get("targeted")))
    recorded = in_slots(name, options, ball, model, 8, model)
    monkeypatch.setattr(Slots, "_record", _give_up)
    plain = in_slots(name, options, ball, model, 8, model)
    assert [recorded[one].broken for one in range(COUNT)] == [plain[one].broken for one in range(COUNT)]
    assert [recorded[one].forwards for one in range(COUNT)] == [plain[one].forwards for one in range(COUNT)]


def _give_up(slots: Slots, again: bool) -> None:
    slots.capture = False


def test_a_model_that_cannot_be_recorded_is_asked_directly() -> None:
    class Curious(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = float(x.detach().sum())  # waits for the device, which no recording allows
            return super().forward(x)

    model, ball = Curious().cuda().requires_grad_(False), Ball("linf", RADIUS["linf"])
    found = in_slots("apgd", {"steps": 20}, ball, model, 8, model)
    plain = in_slots("apgd", {"steps": 20}, ball, Small().cuda().requires_grad_(False), 8, model)
    assert [found[one].broken for one in range(COUNT)] == [plain[one].broken for one in range(COUNT)]


def test_the_whole_suite_in_half_precision_agrees_with_float32() -> None:
    model = Small().cuda()
    x = torch.rand(300, 3, 8, 8, generator=torch.Generator().manual_seed(6)).cuda()
    y = model(x).argmax(dim=1)
    results: list[Evaluation] = [
        evaluate(model, x, y, Ball("linf", 0.012), suite="standard", fast=fast) for fast in (True, False)
    ]
    quick, exact = (len(result.survivors()) for result in results)
    assert 60 < exact < 240
    assert abs(quick - exact) <= 1
    assert results[0].card["about"]["crafting"].startswith("bf16")


def test_a_residual_network_in_fused_blocks_agrees_with_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(300, 3, 8, 8, generator=torch.Generator().manual_seed(6)).cuda()
    if not has_convolutions(x):
        pytest.skip("needs a Hopper GPU")
    torch.manual_seed(0)
    model = build("wrn-10-4", num_classes=10, image_size=8, seed=0).cuda()
    model.train()
    with torch.no_grad():
        for _ in range(30):  # so that the norms know these images
            model(x)
    y = model.eval()(x).argmax(dim=1)
    from hardsphere import kernels

    asked = []
    convolve = kernels.convolve
    monkeypatch.setattr(kernels, "convolve", lambda *given: asked.append(given) or convolve(*given))
    results: list[Any] = []
    for fast in (False, True):
        assert not asked
        results.append(evaluate(model, x, y, Ball("linf", 0.006), suite="standard", fast=fast))
    assert asked
    exact, quick = (len(result.survivors()) for result in results)
    assert 100 < exact < 250
    assert abs(quick - exact) <= 3
