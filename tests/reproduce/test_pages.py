"""Built tables and their pages: numbers, verdicts, and everything that a reader must know about them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import pytest
from made_up import MADE_UP, PGD, ROBUST, made_up_store

from hardsphere.config import to_dict
from hardsphere.errors import HardsphereError
from hardsphere.evaluate.statistics import paired_difference
from hardsphere.evaluate.striking import FAST_CRAFTING
from hardsphere.recipes import recipe
from hardsphere.reproduce import tables
from hardsphere.reproduce.building import Builder
from hardsphere.reproduce.drawing import draw, gains_figure, steps_figure
from hardsphere.reproduce.origins import recipe_line
from hardsphere.reproduce.outcomes import student
from hardsphere.reproduce.scales import SCALES
from hardsphere.reproduce.store import Store
from hardsphere.reproduce.table_page import PROTOCOLS, table_page
from hardsphere.reproduce.tables import HONEST, TABLES, Row, Table

GOLDEN = Path(__file__).parent / "golden.md"


def test_the_page_of_a_made_up_result(tmp_path: Path) -> None:
    built = Builder(MADE_UP, SCALES["smoke"], made_up_store(tmp_path)).build(command="hardsphere reproduce made-up")
    assert table_page(built) == GOLDEN.read_text(encoding="utf-8")


def test_a_gain_that_vanishes_is_said_to_vanish(tmp_path: Path) -> None:
    built = Builder(MADE_UP, SCALES["smoke"], made_up_store(tmp_path)).build()
    assert not built["complete"]
    assert [row["title"] for row in built["rows"] if row["missing"]] == ["PGD-AT + m-HE"]
    pair = built["pairs"][0]
    titles = [column["title"] for column in built["columns"]]
    assert titles[-1] == HONEST.title
    _, pgd, _, honest = pair["cells"]
    assert pgd["value"] == pytest.approx(15)
    assert pgd["interval"] == pytest.approx([100 * end for end in paired_difference(15, 0, 100)])
    assert pgd["sign"] == 1
    assert honest["value"] == pytest.approx(1)
    assert honest["sign"] == 0
    assert pair["verdict"] == "not shown"
    assert built["pairs"][1]["verdict"] == "not measured"
    (sentence,) = built["conclusions"]
    gain = "PGD-AT + HE − PGD-AT: the gain in the paper's protocol (PGD-20 +15.00)"
    assert sentence == f"{gain} is not shown in the honest one: +1.00 [-2.74, +5.45], n = 100."


@pytest.mark.parametrize(("he", "verdict"), [(60, "gain shown"), (20, "loss shown"), (40, "not shown")])
def test_the_honest_column_alone_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, he: int, verdict: str
) -> None:
    monkeypatch.setitem(ROBUST, "PGD-AT + HE", he)
    built = Builder(MADE_UP, SCALES["smoke"], made_up_store(tmp_path)).build()
    assert built["pairs"][0]["verdict"] == verdict
    assert bool(built["conclusions"]) == (verdict != "gain shown")
    assert any("turns into a loss" in sentence for sentence in built["conclusions"]) == (verdict == "loss shown")


def test_a_row_that_was_trained_again_says_so(tmp_path: Path) -> None:
    store = made_up_store(tmp_path)
    for record in store.lines[:2]:
        record["trained"]["instead_of"] = ["older weights"]
    (remark,) = Builder(MADE_UP, SCALES["smoke"], store).build()["remarks"]
    assert remark.startswith("PGD-AT: trained again")
    assert "those of older weights stay on record" in remark


@pytest.mark.parametrize(
    ("crafting", "attack", "told"),
    [
        ("bf16 and TF32, confirmed in float32", "deepfool", True),
        ("bf16 and TF32, confirmed in float32", "mim-20", False),
        (FAST_CRAFTING, "deepfool", False),
        ("float32", "deepfool", False),
    ],
)
def test_attacks_that_saw_the_boundary_in_tf32_are_named(
    crafting: str, attack: str, told: bool, tmp_path: Path
) -> None:
    store = made_up_store(tmp_path)
    for record in store.lines:
        record["result"]["crafting"] = crafting
        record["result"]["columns"][attack] = next(iter(record["result"]["columns"].values()))
    remarks = Builder(MADE_UP, SCALES["smoke"], store).build()["remarks"]
    assert any(f"{attack} saw the boundary in TF32" in remark for remark in remarks) == told


def test_what_alp_pairs_is_weighed(tmp_path: Path) -> None:
    """In the last epoch, half a pairing of 0.8 is a fifth of a loss of 2, and half a pairing of 0.2 a tenth of 1."""
    store = made_up_store(tmp_path)
    logs = {"PGD-AT": [(9.0, 9.0), (2.0, 0.8)], "PGD-AT + HE": [(1.0, 0.2)]}
    for record in store.lines:
        record["config"] = to_dict(recipe("digits/alp"))
        rows = [{"loss": loss, "pairing": pairing} for loss, pairing in logs[record["run"]]]
        file = tmp_path / "training" / f"a-run-{record['training']}-{record['weights'][:6]}.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (remark,) = Builder(MADE_UP, SCALES["smoke"], store).build()["remarks"]
    assert "of the last epoch: 20% in PGD-AT, 10% in PGD-AT + HE." in remark
    file.write_text("{")
    with pytest.raises(HardsphereError, match="is damaged"):
        Builder(MADE_UP, SCALES["smoke"], store).build()


def test_numbers_of_other_weights_do_not_stand_in_a_row(tmp_path: Path) -> None:
    store = made_up_store(tmp_path)
    newer = json.loads(json.dumps(store.lines[0]))
    newer["weights"], newer["trained"]["minutes"] = "newer", 99.0
    store.lines.append(newer)
    row = Builder(MADE_UP, SCALES["smoke"], store).build()["rows"][0]
    assert not row["missing"]
    assert row["cells"][2]["value"] == 12.5  # minutes of the training that has all the numbers


def test_seeds_have_a_mean(tmp_path: Path) -> None:
    for seed, more in ((0, 0), (1, 2), (2, 4)):
        made_up_store(tmp_path, seed=seed, more=more)
    built = Builder(MADE_UP, SCALES["smoke"], Store(tmp_path)).build((0, 1, 2))
    rows = {row["title"]: row for row in built["rows"]}
    honest = rows["PGD-AT + HE, mean of 3 seeds"]["cells"][-1]
    assert honest["value"] == pytest.approx(43)
    single = [rows[f"PGD-AT + HE, seed {seed}"]["cells"][-1] for seed in (0, 1, 2)]
    own = mean((cell["interval"][1] - cell["interval"][0]) / 2 for cell in single)
    assert own > 4.3027 * 2 / 3**0.5  # so few images say less than three seeds do
    assert honest["interval"] == pytest.approx([43 - own, 43 + own])
    assert rows["PGD-AT, mean of 3 seeds"]["cells"][2] == {"value": 12.5, "interval": None, "n": None, "paper": None}
    pairs = {pair["title"]: pair for pair in built["pairs"]}
    mean_pair = pairs["PGD-AT + HE − PGD-AT, mean of 3 seeds"]
    assert mean_pair["cells"][-1]["value"] == pytest.approx(1)
    assert mean_pair["verdict"] == "not shown"  # the same in all three, but within what other images might say
    assert "PGD-AT + m-HE − PGD-AT, mean of 3 seeds" not in pairs
    text = table_page(built)
    assert "| **PGD-AT + HE, mean of 3 seeds** |" in text
    assert "Student's interval over the seeds" in text
    for seed, more in ((0, 0), (1, 20), (2, 40)):
        made_up_store(tmp_path / "apart", seed=seed, more=more)
    apart = Builder(MADE_UP, SCALES["smoke"], Store(tmp_path / "apart")).build((0, 1, 2))
    spread = next(row for row in apart["rows"] if row["title"] == "PGD-AT, mean of 3 seeds")["cells"][-1]
    half = 4.3027 * 20 / 3**0.5
    assert spread["interval"] == pytest.approx([60 - half, 100.0])


def two_frameworks() -> Table:
    more = (Row("FastAT", "fast"), Row("FastAT + HE", "fast-he", against="FastAT"))
    values = {"FastAT": {"PGD-20": 46.40}, "FastAT + HE": {"PGD-20": 52.55}}
    return replace(MADE_UP, rows=(*MADE_UP.rows[:2], *more), values={**MADE_UP.values, **values})


def test_what_a_head_gains_in_the_mean_of_the_frameworks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One image more in one framework and five others in another; each pair alone shows nothing."""
    for numbers, plain, he in ((ROBUST, 30, 35), (PGD, 50, 55)):
        monkeypatch.setitem(numbers, "FastAT", plain)
        monkeypatch.setitem(numbers, "FastAT + HE", he)
    table = two_frameworks()
    built = Builder(table, SCALES["smoke"], made_up_store(tmp_path, table, rows=4)).build()
    (both,) = built["means"]
    assert both["title"] == "HE − plain, mean over PGD-AT, FastAT"
    _, pgd, minutes, honest = both["cells"]
    per_image = [0.5] * 6 + [0.0] * 94
    half = 1.959964 * stdev(per_image) / 10
    assert honest["value"] == pytest.approx(3)
    assert honest["interval"] == pytest.approx([3 - 100 * half, 3 + 100 * half])
    assert honest["sign"] == 1
    assert both["verdict"] == ""
    assert pgd["value"] == pytest.approx((15 + 5) / 2)
    assert pgd["paper"] == pytest.approx((5.39 + 6.15) / 2)
    assert minutes is None
    text = table_page(built)
    assert "| **HE − plain, mean over PGD-AT, FastAT** |" in text
    assert "| in the paper | – | +5.77 | – |  |" in text


def test_a_mean_over_frameworks_needs_two_that_are_judged(tmp_path: Path) -> None:
    table = two_frameworks()
    store = made_up_store(tmp_path, table)
    assert Builder(table, SCALES["smoke"], store).build()["means"] == []


def test_students_distribution() -> None:
    stats = pytest.importorskip("scipy.stats")
    for freedom in range(1, 60):
        assert student(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), abs=1e-3)


def test_a_wide_table_is_summed_up_and_shown_attack_by_attack(tmp_path: Path) -> None:
    wide = replace(MADE_UP, columns=(*MADE_UP.columns, tables._ADAPTIVE[0]), headline=("Clean", "PGD-20"))
    built = Builder(wide, SCALES["smoke"], made_up_store(tmp_path, wide)).build()
    text = table_page(built)
    assert text.index("## In short") < text.index("## PGD-AT") < text.index("## How it was measured")
    assert "| pair | Clean | PGD-20 | Standard | verdict (honest) |" in text
    assert "| PGD-20 | paper | 100 | 45.00 [35.6, 54.8] | 53.97 | 60.00 [50.2, 69.1] | 59.36 |" in text
    assert "| PGD-20 | paper | **+15.00 [+9.3, +23.3]** | +5.39 |" in text
    assert "| PGD-20 with s, m | adaptive | 100 |" in text
    assert "| verdict (honest) |  | **not shown** |  |" in text
    assert "- Not begun: PGD-AT + m-HE" in text


def test_the_figure_of_the_gains_says_how_many_images(tmp_path: Path) -> None:
    wide = replace(MADE_UP, columns=(*MADE_UP.columns, tables._ADAPTIVE[0]), headline=("Clean", "PGD-20"))
    built = Builder(wide, SCALES["smoke"], made_up_store(tmp_path, wide)).build()
    figure = gains_figure(built)
    (axes,) = figure.axes
    assert figure.get_suptitle() == "Table 0. A made-up table, scale smoke"
    assert axes.get_title() == "PGD-AT + HE − PGD-AT\nverdict (honest): not shown"
    assert axes.get_xlabel() == "difference in percentage points"
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [f"{title} (n = 100)" for title in ("Clean", "PGD-20", "PGD-20 with s, m", "Standard")]
    drawn = {round(mark.lines[0].get_ydata()[0]): mark.lines[0].get_xdata()[0] for mark in axes.containers}
    assert drawn == pytest.approx({3: 0.0, 2: 15.0, 1: 1.0, 0: 1.0})  # the first column uppermost


def test_the_figure_of_the_steps_shows_both_protocols() -> None:
    table = TABLES["steps"]
    columns = [{"title": one.title, "protocol": "honest" if one is HONEST else "paper"} for one in table.all_columns]
    rows = []
    for k in (1, 2, 3):
        for head, value in (("PGD-AT", 40.0 + k), ("PGD-AT + HE", 45.0 + k)):
            cell = {"value": value, "interval": [value - 2, value + 3], "n": 100, "paper": None}
            cells = [cell if k < 3 else None] * len(columns)  # the last is not measured yet
            rows.append({"title": f"{head}, k = {k}", "seed": 0, "cells": cells})
    (axes,) = steps_figure({"rows": rows, "columns": columns}).axes
    curves = {drawn.get_label(): drawn.lines[0] for drawn in axes.containers}
    assert set(curves) == {
        f"{head}, {what}" for head in ("PGD-AT", "PGD-AT + HE") for what in ("PGD-20 (paper)", "Standard (honest)")
    }
    assert len({curve.get_xdata()[0] for curve in curves.values()}) == 4  # no interval hides another
    for label, curve in curves.items():
        assert curve.get_xdata().tolist() == pytest.approx([1, 2], abs=0.1)
        assert curve.get_ydata().tolist() == ([46, 47] if "HE" in label else [41, 42])


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    built = Builder(TABLES["table2"], SCALES["smoke"], Store(tmp_path)).build()
    assert draw(built, tmp_path) == {"figures": []}
    assert not list(tmp_path.glob("*.png"))


def test_a_page_of_nothing_says_so(tmp_path: Path) -> None:
    built = Builder(TABLES["table2"], SCALES["small"], Store(tmp_path)).build()
    text = table_page(built)
    assert "**In progress**: 0 of 9 rows are complete" in text
    assert "## In short" not in text
    assert "## Runs" not in text


def test_what_is_still_to_come_is_said_row_by_row(tmp_path: Path) -> None:
    """One measurement is missing, another was made on fewer images than planned: both are said, and not alike."""
    store = made_up_store(tmp_path)
    standard, pgd = store.lines[:2]
    pgd["id"] = "on fewer images"
    store.lines.remove(standard)
    text = table_page(Builder(MADE_UP, SCALES["smoke"], store).build())
    assert "**In progress**: 1 of 3 rows are complete; `hardsphere reproduce made-up` with the same options" in text
    unequal = "so far on another number of images than planned: Clean, PGD-20"
    assert f"- PGD-AT: not measured yet: Standard; {unequal}" in text


def test_a_reader_learns_what_intervals_and_verdicts_mean(tmp_path: Path) -> None:
    text = table_page(Builder(MADE_UP, SCALES["smoke"], made_up_store(tmp_path)).build())
    assert "each row is one training, and what another seed would give is not in them" in text
    assert "The verdict comes from the honest column alone" in text
    assert "of twenty without any difference, one is called a gain or a loss by chance" in text
    assert "Wilson's for an accuracy, Tango's for a paired difference" in text
    for seed in (0, 1):
        made_up_store(tmp_path / "two", seed=seed)
    text = table_page(Builder(MADE_UP, SCALES["smoke"], Store(tmp_path / "two")).build((0, 1)))
    assert "those of means are over the seeds as well" in text


@pytest.mark.parametrize("name", TABLES)
def test_every_protocol_is_explained_and_honest_is_one_column(name: str, tmp_path: Path) -> None:
    """Both protocols on every page; a single attack is never called honest, which is the worst case over many."""
    built = Builder(TABLES[name], SCALES["small"], Store(tmp_path)).build()
    protocols = [column["protocol"] for column in built["columns"]]
    assert protocols.count("honest") == 1
    assert protocols[-1] == "honest"
    assert set(protocols) - {"clean", "–"} <= set(PROTOCOLS)
    text = table_page(built)
    assert text.startswith(f"# {TABLES[name].title}, scale small\n")
    assert all(f"- *{protocol}*" in text for protocol in set(protocols) & set(PROTOCOLS))


def test_measurements_on_several_machines_are_all_named(tmp_path: Path) -> None:
    """A table grows from machine to machine: its page names each of them, and each precision of crafting."""
    store = made_up_store(tmp_path)
    other = store.lines[1]
    other["environment"] = {"device": "a GPU", "commit": None, "source": "s2", "torch": "3"}
    other["result"]["crafting"] = "bf16"
    text = table_page(Builder(MADE_UP, SCALES["smoke"], store).build())
    assert "| c1, source s2 | an abacus, torch 2; a GPU, torch 3 |" in text
    assert "| `pgd-20` | pgd-20/1 [h1] | d1 | bf16; float32 | 0 |" in text


def test_a_training_that_ended_early_says_so(tmp_path: Path) -> None:
    store = made_up_store(tmp_path)
    for record in store.lines[:2]:
        record["trained"]["finished"] = "rolled back to epoch 1: PGD accuracy collapsed in epoch 2"
        record["trained"]["selection"] = "best of epochs 1 to 1, by hand"
    text = table_page(Builder(MADE_UP, SCALES["smoke"], store).build())
    assert "- PGD-AT, seed 0, ended early: rolled back to epoch 1: PGD accuracy collapsed in epoch 2" in text
    assert "- Epoch kept of PGD-AT: best of epochs 1 to 1, by hand" in text
    assert "- Epoch kept of PGD-AT + HE: best of epochs 1 to 2, by hand" in text


@pytest.mark.parametrize("source", ["paper", "code"])
def test_a_recipe_line_trains_the_same_configuration(source: str) -> None:
    values = {"epochs": 20, "attack.eps": 4 / 255, "attack.step_size": 0.1 / 3, "ema.decay": 0.999, "source": source}
    config = recipe("cifar10/trades-he", values)
    line = recipe_line(to_dict(config))
    assert " attack.eps=4/255 " in line
    name, *changes = line.split()
    assert recipe(name, dict(change.split("=") for change in changes)) == config
