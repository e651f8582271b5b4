"""The card as people see it: the terminal and Markdown say what the JSON says."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from hardsphere.evaluate import Entry, Suite, evaluate
from hardsphere.report import card_markdown, show_card
from hardsphere.threat import Ball


class Linear(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, 16, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1) - 0.5) @ self.weight.T


def card(classes: int = 4, cascade: bool = True, eps: tuple[float, ...] = (0.02,), **about: str) -> dict:
    model = Linear(classes)
    x = torch.rand(50, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    y = model(x).argmax(dim=1)
    y[:5] = (y[:5] + 1) % classes
    entries = (
        Entry("pgd|10", "pgd", {"steps": 10}),
        Entry("pgd-500-adaptive", "apgd_targeted", {"steps": 10, "targets": 9}, limit=40),
    )
    suite = Suite("mine", 3, "honest", entries, cascade=cascade, caveat="Read this first.")
    result = evaluate(model, x, y, [Ball("linf", one) for one in eps], suite=suite, about=about)
    return json.loads(json.dumps(result.card))  # as it comes out of card.json


def shown(card: dict, width: int = 100) -> str:
    stream = io.StringIO()
    show_card(card, Console(file=stream, width=width, color_system=None))
    return stream.getvalue()


FORMS = {"terminal": shown, "markdown": card_markdown}


@pytest.mark.parametrize("form", FORMS)
def test_a_card_shows_its_numbers_and_what_they_rest_on(form):
    one = card(target="runs/mine", data="toy test", selection="the last epoch", command="hardsphere evaluate runs/mine")
    text = FORMS[form](one)
    assert "90.00" in text  # clean
    assert f"{100 * one['robust']['accuracy']:.2f}" in text
    low, high = (100 * end for end in one["robust"]["interval"])
    assert f"{low:.1f} – {high:.1f}" in text
    flat = " ".join(text.split())
    for expected in (
        "runs/mine",
        "toy test",
        "n = 50",
        "linf 0.02",
        "honest protocol",
        "the last epoch",
        "seed 0",
        "mine/3",
        one["suite"]["hash"],
        one["model"]["digest"],
        one["data"]["digest"],
        "ids 0-49",
        "Read this first.",
        "3 targets instead of 9",
        "the first 40 of 50 samples only",
        "hardsphere evaluate runs/mine",
        f"torch {torch.__version__}",
    ):
        assert expected in flat, expected


def test_a_cascade_says_after_it_and_single_attacks_say_alone():
    assert "after it" in shown(card())
    assert "alone" in shown(card(cascade=False))


def test_a_curve_shows_every_radius():
    text = shown(card(eps=(0.01, 0.02, 8 / 255)))
    for ball in ("robust, linf 0.01", "robust, linf 0.02", "robust, linf 8/255"):
        assert ball in text
    assert text.count("worst case") == 3
    assert "carried" in text


def test_with_many_classes_the_weakest_are_shown():
    text = shown(card(classes=60))
    assert "The 20 weakest of" in text


def test_nothing_is_lost_in_a_terminal_of_80_columns():
    one = card(target="runs/mine")
    for line in one["results"][0]["attacks"]:  # as large as numbers become
        line.update(broken=5000, attacked=10000, forwards=20000.0, backwards=20000.0, seconds=3599.0)
    lines = shown(one, width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    (worst,) = [line for line in lines if "worst case" in line]
    assert f"{100 * one['robust']['accuracy']:.2f}" in worst


def test_markdown_tables_have_as_many_cells_in_every_row():
    width = None
    for line in card_markdown(card()).splitlines():
        if not line.startswith("|"):
            width = None
            continue
        cells = line.replace("\\|", "").count("|")
        assert width in (None, cells)
        width = cells


def test_the_paper_protocol_is_labelled():
    one = card()
    one["protocol"] = "paper"
    assert "paper protocol (raw cosines" in shown(one)
    assert "paper protocol (raw cosines" in card_markdown(one)
