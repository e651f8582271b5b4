"""The tables: every one has a valid plan at every scale, renders as it should, and runs end to end."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest

from hardsphere import models
from hardsphere.config import to_dict
from hardsphere.corruptions import CORRUPTIONS
from hardsphere.data import load as load_data
from hardsphere.errors import HardsphereError
from hardsphere.evaluate.statistics import paired_difference
from hardsphere.recipes import recipe
from hardsphere.reproduce import ENTRIES, colour_digits, paper, reproduce, tables
from hardsphere.reproduce.plan import record_id
from hardsphere.reproduce.render import Builder, markdown, recipe_line, steps_figure
from hardsphere.reproduce.sweeping import Store
from hardsphere.reproduce.tables import HONEST, SCALES, TABLES, Column, Row, Table, plan_of, run_of

GOLDEN = Path(__file__).parent / "golden.md"


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", TABLES)
def test_every_table_has_a_plan_at_every_scale(name: str, scale: str) -> None:
    table, size = TABLES[name], SCALES[scale]
    plan = plan_of([table], size)  # making it checks recipes, overrides, suites and attacks
    assert plan.runs
    measured = {one.name for one in plan.runs[0].measurements}
    assert "standard" in measured  # both protocols, always
    known = models.names()
    for run in plan.runs:
        assert run.config.model in known or re.fullmatch(r"cnn-\d+", run.config.model)
    titles = [row.title for row in table.rows_at(size)]
    assert len(set(titles)) == len(titles)
    for row in table.rows_at(size):
        assert row.against is None or row.against in titles
    for column in table.all_columns:
        if column.measure in ("training", "corruptions"):
            continue
        suite = table.measurements(size)[column.measure].suite  # type: ignore[attr-defined]
        assert set(column.cells) <= {"clean", "robust", *(entry.name for entry in suite.entries)}


@pytest.mark.parametrize("name", TABLES)
def test_the_papers_numbers_have_a_place(name: str) -> None:
    """Every number of the paper belongs to a row and a column that exist."""
    table = TABLES[name]
    rows, columns = {row.title for row in table.rows}, {column.title for column in table.all_columns}
    for row, values in table.values.items():
        assert row in rows
        assert set(values) <= columns
        assert all(0 < value <= 100 for value in values.values())
    assert name in paper.SETTING


def test_the_papers_means_are_those_of_its_75_cells() -> None:
    """Tables 11 and 12, transcribed cell by cell, must average to the means that Table 5 prints."""
    short = {title: name for name, title in tables.CORRUPTION_TITLES.items()}
    for printed, cells in ((paper.TABLE_5, paper.TABLE_11), (paper.IMAGENET_C, paper.TABLE_12)):
        assert printed.keys() == cells.keys()
        for row, values in printed.items():
            swapped = {"Defocus", "Glass"} if row == "ALP + HE" else set()  # known from the paper's own appendix
            for title, value in values.items():
                if title == "mCA":
                    computed = mean(mean(cells[row][name]) for name in CORRUPTIONS)
                    assert computed == pytest.approx(value, abs=0.05)
                elif title not in swapped:
                    assert mean(cells[row][short[title]]) == pytest.approx(value, abs=0.03)


def test_tables_share_what_they_have_in_common() -> None:
    """s = 15, m = 0.2 of Table 9 is the TRADES + HE of Table 2; Table 10 needs nothing that Table 2 has not."""
    small = SCALES["small"]
    two, ten, nine = (plan_of([TABLES[name]], small) for name in ("table2", "table10", "table9"))
    together = plan_of([TABLES["table2"], TABLES["table10"]], small)
    assert len(together.items()) == len(two.items()) == len(ten.items())
    assert len(plan_of([TABLES["table2"], TABLES["table9"]], small).runs) == len(two.runs) + len(nine.runs) - 2


def test_scales_are_what_they_say() -> None:
    he = next(row for row in TABLES["table2"].rows if row.title == "PGD-AT + HE")
    full = run_of(TABLES["table2"], he, SCALES["full"]).config
    assert full == recipe("cifar10/pgd-he")
    small = run_of(TABLES["table2"], he, SCALES["small"]).config
    assert (small.model, small.epochs, small.schedule, small.ema.decay) == ("preactresnet18", 20, "onecycle", 0.999)
    measured = TABLES["table2"].measurements(SCALES["small"])
    suite = measured["paper"].suite  # type: ignore[attr-defined]
    limits = {entry.name: entry.limit for entry in suite.entries}
    assert limits["feature"] == limits["cw-l2"] == 200
    assert limits["pgd-500"] is None
    assert suite.name == "paper"  # fewer images, but the same attacks
    assert measured["standard"].limit == 1000  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------------------------------------
# Rendering
# ---------------------------------------------------------------------------------------------------------------------

MADE_UP = Table(
    "made-up",
    "Table 0. A made-up table",
    (
        Row("PGD-AT", "pgd"),
        Row("PGD-AT + HE", "pgd-he", against="PGD-AT"),
        Row("PGD-AT + m-HE", "pgd-mhe", against="PGD-AT"),
    ),
    (
        Column("Clean", "pgd-20", ("clean",)),
        Column("PGD-20", "pgd-20", ("pgd-20",), "a note"),
        Column("Minutes", "training", ("minutes",)),
    ),
    {"PGD-AT": {"Clean": 86.75, "PGD-20": 53.97}, "PGD-AT + HE": {"Clean": 86.19, "PGD-20": 59.36}},
)
ROBUST = {"PGD-AT": 40, "PGD-AT + HE": 41}  # of 100 images under the standard suite
PGD = {"PGD-AT": 45, "PGD-AT + HE": 60}


def first(count: int, n: int = 100) -> np.ndarray:
    return np.arange(n) < count


def made_up_store(out: Path) -> Store:
    """Records of PGD-AT and PGD-AT + HE; m-HE is still to come."""
    store, smoke = Store(out), SCALES["smoke"]
    for row in MADE_UP.rows[:2]:
        run = run_of(MADE_UP, row, smoke)
        for name, measurement in MADE_UP.measurements(smoke).items():
            columns = {"clean": first(80)}
            columns |= {"robust": first(ROBUST[row.title])} if name == "standard" else {"pgd-20": first(PGD[row.title])}
            record: dict[str, Any] = {
                "id": record_id(run.config, measurement),
                "training": run.id,
                "run": run.name,
                "config": to_dict(run.config),
                "measurement": {"name": name, **measurement.describe()},
                "trained": {"epochs": 2, "best_epoch": 1, "selection": "by hand", "minutes": 12.5},
                "result": {"data": "d1", "ids": "0-99", "n": 100, "model": "m1", "suite": "S", "ball": "linf 0.2"},
                "seconds": 90.0,
                "outcomes": None,
                "environment": {"device": "an abacus", "commit": "c1", "source": "s1", "torch": "2"},
                "command": "hardsphere reproduce made-up",
            }
            store.add(record, columns)
    return Store(out)


def test_the_markdown_of_a_made_up_result(tmp_path: Path) -> None:
    built = Builder(MADE_UP, SCALES["smoke"], made_up_store(tmp_path)).build(command="hardsphere reproduce made-up")
    assert markdown(built) == GOLDEN.read_text(encoding="utf-8")


def test_a_gain_that_vanishes_is_said_to_vanish(tmp_path: Path) -> None:
    built = Builder(MADE_UP, SCALES["smoke"], made_up_store(tmp_path)).build()
    assert not built["complete"]
    assert built["missing"] == ["PGD-AT + m-HE"]
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
    assert sentence.startswith("PGD-AT + HE − PGD-AT: PGD-20 +15.00; under the honest protocol +1.00")
    assert sentence.endswith("not shown.")


@pytest.mark.parametrize(("he", "verdict"), [(60, "gain shown"), (20, "loss shown"), (40, "not shown")])
def test_the_honest_column_alone_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, he: int, verdict: str
) -> None:
    monkeypatch.setitem(ROBUST, "PGD-AT + HE", he)
    built = Builder(MADE_UP, SCALES["smoke"], made_up_store(tmp_path)).build()
    assert built["pairs"][0]["verdict"] == verdict
    assert bool(built["conclusions"]) == (verdict != "gain shown")


def test_columns_of_two_trainings_are_remarked_on(tmp_path: Path) -> None:
    store = made_up_store(tmp_path)
    key = next(iter(store.records))
    store.records[key]["result"]["model"] = "another"
    built = Builder(MADE_UP, SCALES["smoke"], store).build()
    assert "PGD-AT: its columns come from 2 trainings of the same configuration." in built["remarks"]


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
    for label, curve in curves.items():
        assert curve.get_xdata().tolist() == [1, 2]
        assert curve.get_ydata().tolist() == ([46, 47] if "HE" in label else [41, 42])


def test_a_recipe_line_trains_the_same_configuration() -> None:
    config = recipe("cifar10/trades-he", {"epochs": 20, "attack.eps": 0.1, "ema.decay": 0.999, "source": "code"})
    name, *changes = recipe_line(to_dict(config)).split()
    again = recipe(name, dict(change.split("=") for change in changes) | {"source": "code"})
    assert again == config


# ---------------------------------------------------------------------------------------------------------------------
# End to end
# ---------------------------------------------------------------------------------------------------------------------

TINY = {"epochs": 1, "model": "cnn-4", "batch": 256, "attack.steps": 1}


def test_table_2_end_to_end(tmp_path: Path) -> None:
    """A tenth of the smoke scale: nothing to learn from the numbers, everything from their being there."""
    options: dict[str, Any] = {"overrides": TINY, "limits": {"paper": 6, "standard": 6}, "device": "cpu"}
    first_call = reproduce("table2", "smoke", "1s", out=tmp_path, **options)
    assert not first_call.complete
    assert "**Incomplete**" in first_call.files[0].read_text(encoding="utf-8")
    done = reproduce("table2", "smoke", out=tmp_path, command="hardsphere reproduce table2", **options)
    assert done.complete
    assert done.swept.failed == {}
    (file,) = done.files
    text = file.read_text(encoding="utf-8")
    assert text.startswith("# Table 2. White-box attacks on CIFAR-10, scale smoke")
    assert "Incomplete" not in text
    assert "86.75" in text
    assert "- Overridden in every run: epochs=1 model=cnn-4 batch=256 attack.steps=1." in text
    assert "hardsphere reproduce table2" in text
    built = json.loads((tmp_path / "table2.json").read_text(encoding="utf-8"))
    assert len(built["rows"]) == 9
    assert all(cell is not None and cell["n"] == 6 for row in built["rows"] for cell in row["cells"])
    assert {column["protocol"] for column in built["columns"]} == {"clean", "paper", "honest"}
    assert len(built["pairs"]) == 6
    assert len(list((tmp_path / "outcomes").glob("*.npz"))) == 18
    again = reproduce("table10", "smoke", out=tmp_path, **options)  # needs nothing new
    assert again.complete
    assert len(list((tmp_path / "outcomes").glob("*.npz"))) == 18


def test_corruptions_end_to_end(tmp_path: Path) -> None:
    done = reproduce(
        "table12",
        "smoke",
        out=tmp_path,
        overrides=TINY,
        limits={"corruptions": 4, "standard": 4},
        keep_weights=False,
        device="cpu",
    )
    (built,) = done.tables
    assert done.complete
    assert [row["title"] for row in built["rows"]][4:6] == ["FreeAT, severity 5", "FreeAT + HE, severity 1"]
    record = next(one for one in done.swept.records.values() if one["measurement"]["kind"] == "corruptions")
    assert record["run"] == "FreeAT"
    fog = [column["title"] for column in built["columns"]].index("Fog")
    shown = [row["cells"][fog]["value"] for row in built["rows"][:5]]
    assert shown == pytest.approx([100 * record["result"]["columns"][f"fog-{s}"]["accuracy"] for s in range(1, 6)])
    assert not list((tmp_path / "work").glob("*/checkpoints"))


def test_colour_digits_are_the_digits(tmp_path: Path) -> None:
    made = load_data("arrays", colour_digits(tmp_path / "d.npz")).test
    original = load_data("digits").test
    assert made.pixels.shape[1:] == (3, 32, 32)  # type: ignore[union-attr]
    assert bool((made.pixels[:, :, ::4, ::4] == original.pixels).all())  # type: ignore[union-attr]
    assert bool((made.pixels[:, 1, 3::4, 3::4] == original.pixels[:, 0]).all())  # type: ignore[union-attr]
    assert made.labels.tolist() == original.labels.tolist()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"table": "table22"}, "Unknown table 'table22'"),
        ({"table": "table2", "scale": "huge"}, "Unknown scale 'huge'"),
        ({"table": "table2", "scale": "small"}, "needs the data 'cifar10'"),
        ({"table": "table2", "budget": "soon"}, "such as 90s, 9m or 2h"),
        ({"table": "table2", "limits": {"pgd-21": 5}}, "no measurement or attack 'pgd-21'"),
        ({"table": "table2", "overrides": {"epoch": 1}}, "Unknown key 'epoch'"),
        ({"table": "table2", "scale": "small", "data_dir": "nowhere"}, "There is no folder nowhere"),
    ],
)
def test_a_mistake_is_one_sentence(words: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(HardsphereError, match=re.escape(sentence)):
        reproduce(**words, out=tmp_path)


def test_limits_reach_their_attacks() -> None:
    from hardsphere.reproduce import _limited

    size = _limited(SCALES["small"], {"standard": 50, "pgd-500": 20})
    measured = TABLES["table2"].measurements(size)
    assert measured["standard"].limit == 50  # type: ignore[attr-defined]
    entries = {entry.name: entry.limit for entry in measured["paper"].suite.entries}  # type: ignore[attr-defined]
    assert entries["pgd-500"] == 20
    assert entries["feature"] == 200
    assert replace(size, limits={}, entries={}) == replace(SCALES["small"], limits={}, entries={})


@pytest.mark.check
def test_everything_at_the_smoke_scale(tmp_path: Path) -> None:
    done = reproduce("all", out=tmp_path, device="cpu")
    assert done.swept.failed == {}
    assert done.complete
    assert [file.stem for file in done.files] == list(ENTRIES)
