"""Attacks in slots on a CUDA device: recorded turns against plain ones, half precision against float32."""

from __future__ import annotations

import pytest
import torch
from test_slots import CASES, COUNT, RADIUS, Small, ball_for, in_slots

from hardsphere.evaluate import Evaluation, evaluate
from hardsphere.evaluate.slots import Slots
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
            self.seen = float(x.sum())  # waits for the device, which no recording allows
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
