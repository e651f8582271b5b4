"""The tables: every one has a valid plan at every scale, renders as it should, and runs end to end."""

from __future__ import annotations

import json
import re
import shutil
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
from hardsphere.reproduce import ENTRIES, colour_digits, outline, paper, reproduce, tables
from hardsphere.reproduce.building import Builder, recipe_line
from hardsphere.reproduce.drawing import gains_figure, steps_figure
from hardsphere.reproduce.outcomes import student
from hardsphere.reproduce.plan import family_id, record_id
from hardsphere.reproduce.render import markdown
from hardsphere.reproduce.scales import MEASURES, SCALES, limited
from hardsphere.reproduce.store import Store
from hardsphere.reproduce.tables import HONEST, TABLES, Column, Row, Table, plan_of, run_of
from hardsphere.threat import Ball

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
    assert len(together.items()) == len(two.items()) > len(ten.items())
    assert len(plan_of([TABLES["table2"], TABLES["table9"]], small).runs) == len(two.runs) + len(nine.runs) - 2


def test_scales_are_what_they_say() -> None:
    he = next(row for row in TABLES["table2"].rows if row.title == "PGD-AT + HE")
    full = run_of(TABLES["table2"], he, SCALES["full"]).config
    assert full == recipe("cifar10/pgd-he")
    small = run_of(TABLES["table2"], he, SCALES["small"]).config
    assert (small.model, small.epochs, small.schedule, small.ema.decay) == ("preactresnet18", 20, "onecycle", 0.999)


def test_table_2_at_the_small_scale_is_what_is_published() -> None:
    """PGD-20/500, MIM-20, FGSM, DeepFool, FAB and C&W as margin-PGD-100 on all images; 200 for the two expensive."""
    small, table = SCALES["small"], TABLES["table2"]
    runs = plan_of([table], small).runs
    assert [run.config.recipe for run in runs] == [
        f"cifar10/{framework}{head}" for framework in ("pgd", "alp", "trades") for head in ("", "-he", "-mhe")
    ]
    assert all((run.config.model, run.config.seed) == ("preactresnet18", 0) for run in runs)
    assert all(run.config.epochs >= 20 for run in runs)
    own = Ball("linf", 8 / 255)
    found = {}
    for name, measurement in table.measurements(small).items():
        for entry in measurement.suite.entries:  # type: ignore[attr-defined]
            n = entry.limit or measurement.limit  # type: ignore[attr-defined]
            found[entry.name] = (name, n, measurement.ball(own).eps, entry.view)  # type: ignore[attr-defined]
            if "step_size" in entry.options and entry.attack in ("pgd", "mim"):
                assert entry.options["step_size"].factor * 0.031 == pytest.approx(0.003)
    paper_columns = ("pgd-20", "pgd-500", "mim-20", "fgsm", "deepfool", "cw-100", "fab-20")
    assert all(found[name][1:] == (None, 0.031, "paper") for name in paper_columns)
    assert all(found[name][1:] == (200, 0.031, "paper") for name in ("cw-l2", "feature"))
    assert all(found[name][1:] == (None, 0.031, "deployed") for name in ("pgd-20-adaptive", "pgd-500-adaptive"))
    standard = {name: rest for name, (measure, *rest) in found.items() if measure == "standard"}
    assert standard == {name: [1000, 8 / 255, "deployed"] for name in ("apgd-ce", "apgd-t", "fab-t", "square")}
    assert len(found) == 11 + 4
    feature = table.measurements(small)["few-images"].suite.entries[1]  # type: ignore[attr-defined]
    assert (feature.options["steps"], feature.options["restarts"]) == (50, 100)


def test_table_3_at_the_small_scale_is_what_is_published() -> None:
    small, table = SCALES["small"], TABLES["table3"]
    assert [(run.config.recipe, run.config.epochs, run.config.model) for run in plan_of([table], small).runs] == [
        (f"cifar10/{name}{head}", epochs, "preactresnet18")
        for name, epochs in (("fast", 30), ("free", 10))
        for head in ("", "-he", "-mhe")
    ]
    measured = table.measurements(small)
    (pgd,) = measured["pgd-50-10"].suite.entries  # type: ignore[attr-defined]
    assert (pgd.options["steps"], pgd.options["restarts"], pgd.view, pgd.limit) == (50, 10, "paper", None)
    assert measured["pgd-50-10"].ball(Ball("linf", 8 / 255)).eps == 8 / 255  # type: ignore[attr-defined]
    assert measured["standard"].limit == 1000  # type: ignore[attr-defined]
    assert [column.title for column in table.all_columns] == ["Epochs", "Clean", "PGD-50", "Minutes", "Standard"]


def test_the_most_telling_is_measured_first_and_the_most_expensive_last() -> None:
    for table in TABLES.values():
        names = list(table.measurements(SCALES["small"]))
        assert names[0] == "standard"
        assert [name for name in MEASURES if name in names] == names
    assert list(TABLES["table2"].measurements(SCALES["small"]))[-2:] == ["pgd-500-adaptive", "pgd-500"]


def test_rows_can_be_picked() -> None:
    small = SCALES["small"]
    plan = plan_of([TABLES["table2"]], small, only=["pgd", "PGD-AT + HE"])
    assert [run.name for run in plan.runs] == ["PGD-AT", "PGD-AT + HE"]
    steps = plan_of([TABLES["steps"]], small, only=["pgd-he"])
    assert len(steps.runs) == 7


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


def made_up_store(out: Path, table: Table = MADE_UP, seed: int = 0, more: int = 0) -> Store:
    """Records of PGD-AT and PGD-AT + HE; m-HE is still to come."""
    store, smoke = Store(out), SCALES["smoke"]
    for row in table.rows[:2]:
        run = run_of(table, row, smoke, seed)
        for name, measurement in table.measurements(smoke).items():
            columns = {"clean": first(80)}
            if name == "standard":
                columns["robust"] = first(ROBUST[row.title] + more)
            else:
                columns |= {"pgd-20": first(PGD[row.title]), "pgd-20-adaptive": first(ROBUST[row.title])}
            record: dict[str, Any] = {
                "id": record_id(run.config, measurement),
                "family": family_id(run.config, measurement),
                "training": run.id,
                "weights": f"weights {seed}",
                "run": run.name,
                "config": to_dict(run.config),
                "measurement": {"name": name, **measurement.describe()},
                "trained": {"epochs": 2, "best_epoch": 1, "selection": "by hand", "minutes": 12.5},
                "result": {"data": "d1", "ids": "0-99", "n": 100, "suite": "S", "ball": "linf 0.2"},
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


def test_a_row_that_was_trained_again_says_so(tmp_path: Path) -> None:
    store = made_up_store(tmp_path)
    for record in store.lines[:2]:
        record["trained"]["instead_of"] = ["older weights"]
    (remark,) = Builder(MADE_UP, SCALES["smoke"], store).build()["remarks"]
    assert remark.startswith("PGD-AT: trained again")
    assert "those of older weights stay on record" in remark


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
    text = markdown(built)
    assert "| **PGD-AT + HE, mean of 3 seeds** |" in text
    assert "Student's interval over the seeds" in text
    for seed, more in ((0, 0), (1, 20), (2, 40)):
        made_up_store(tmp_path / "apart", seed=seed, more=more)
    apart = Builder(MADE_UP, SCALES["smoke"], Store(tmp_path / "apart")).build((0, 1, 2))
    spread = next(row for row in apart["rows"] if row["title"] == "PGD-AT, mean of 3 seeds")["cells"][-1]
    half = 4.3027 * 20 / 3**0.5
    assert spread["interval"] == pytest.approx([60 - half, 100.0])


def test_students_distribution() -> None:
    stats = pytest.importorskip("scipy.stats")
    for freedom in range(1, 60):
        assert student(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), abs=1e-3)


def test_a_wide_table_is_summed_up_and_shown_attack_by_attack(tmp_path: Path) -> None:
    wide = replace(MADE_UP, columns=(*MADE_UP.columns, tables._ADAPTIVE[0]), headline=("Clean", "PGD-20"))
    built = Builder(wide, SCALES["smoke"], made_up_store(tmp_path, wide)).build()
    text = markdown(built)
    assert text.index("## In short") < text.index("## PGD-AT") < text.index("## How it was measured")
    assert "| pair | Clean | PGD-20 | Standard | honest gain |" in text
    assert "| PGD-20 | paper | 100 | 45.00 [35.6, 54.8] | 53.97 | 60.00 [50.2, 69.1] | 59.36 |" in text
    assert "| PGD-20 | **+15.00 [+9.3, +23.3]** | +5.39 |" in text
    assert "| PGD-20 with s, m | adaptive | 100 |" in text
    assert "| honest gain | **not shown** |  |" in text
    assert "- Not begun: PGD-AT + m-HE" in text
    (axes,) = gains_figure(built).axes
    assert axes.get_title().startswith("PGD-AT + HE − PGD-AT")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["Standard", "PGD-20 with s, m", "PGD-20"]


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


FEW = dict.fromkeys((*MEASURES, "pgd-20-adaptive"), 6)


def test_table_2_end_to_end(tmp_path: Path) -> None:
    """A tenth of the smoke scale: nothing to learn from the numbers, everything from their being there."""
    rows = ("pgd", "pgd-he", "alp-mhe")
    options: dict[str, Any] = {"only": rows, "overrides": TINY, "limits": FEW}
    first_call = reproduce("table2", "smoke", "1s", out=tmp_path, device="cpu", **options)
    assert not first_call.swept.complete
    assert "**Incomplete**" in first_call.files[0].read_text(encoding="utf-8")
    done = reproduce("table2", "smoke", out=tmp_path, command="hardsphere reproduce table2", device="cpu", **options)
    assert done.swept.complete
    assert done.swept.failed == {}
    (file,) = done.files
    text = file.read_text(encoding="utf-8")
    assert text.startswith("# Table 2. White-box attacks on CIFAR-10, scale smoke")
    assert "- Not begun: PGD-AT + m-HE; ALP; ALP + HE; TRADES; TRADES + HE; TRADES + m-HE" in text
    assert "86.75" in text
    assert "- Overridden in every run: epochs=1 model=cnn-4 batch=256 attack.steps=1." in text
    assert "- Command: `hardsphere reproduce table2`" in text
    built = json.loads((tmp_path / "table2.json").read_text(encoding="utf-8"))
    assert len(built["rows"]) == 9
    whole = [row for row in built["rows"] if not row["missing"]]
    assert [row["title"] for row in whole] == ["PGD-AT", "PGD-AT + HE", "ALP + m-HE"]
    assert all([cell["n"] for cell in row["cells"]] == [24] + [6] * 12 for row in whole)  # clean ones cost nothing
    assert {column["protocol"] for column in built["columns"]} == {"clean", "paper", "adaptive", "honest"}
    assert len(list((tmp_path / "outcomes").glob("*.npz"))) == 3 * 6
    outside = [one for one in tmp_path.rglob("*") if one.is_file() and "work" not in one.parts]
    assert max(one.stat().st_size for one in outside) < 500_000  # what travels and is kept is small
    shutil.rmtree(tmp_path / "work")
    again = reproduce("table10", "smoke", out=tmp_path, device="cpu", **options)  # needs nothing new
    assert again.swept.complete
    assert len(list((tmp_path / "outcomes").glob("*.npz"))) == 3 * 6
    file.unlink()
    rendered = reproduce("all", "smoke", out=tmp_path, render_only=True, **options)
    assert {one.stem for one in rendered.files} == {"table2", "table10", "ablation", "adaptive", "steps"}
    assert file.read_text(encoding="utf-8") == text


def test_some_rows_at_a_time(tmp_path: Path) -> None:
    """Rows by recipe, fewer images for one attack, and what is planned before and after."""
    options: dict[str, Any] = {"overrides": TINY, "limits": {**FEW, "pgd-500": 3}}
    before = outline("table2,gradients", out=tmp_path, only=["pgd", "pgd-he"], **options)
    assert before[0].endswith("to be trained")
    assert before[-2] == "gradients of PGD-AT, PGD-AT + HE: 16 images, to do"
    done = reproduce("table2,gradients", out=tmp_path, only=["pgd", "pgd-he"], device="cpu", **options)
    table, analysis = done.tables
    assert done.swept.complete
    assert not table["complete"]
    assert [row["title"] for row in table["rows"] if not row["missing"]] == ["PGD-AT", "PGD-AT + HE"]
    assert analysis["complete"]
    assert analysis["absent"] == ["PGD-AT + m-HE"]
    assert "Without PGD-AT + m-HE." in done.files[1].read_text(encoding="utf-8")
    counts = {column["title"]: column["n"] for column in table["columns"]}
    assert (counts["PGD-500"], counts["PGD-20"]) == (3, 6)
    after = outline("table2,gradients", out=tmp_path, only=["pgd", "pgd-he"], **options)
    assert after[-1] == "To do: at most 0.0 M passes."
    assert after[-2].endswith("recorded")
    more = outline("table2", out=tmp_path, only=["pgd"], overrides=TINY, limits={**options["limits"], "pgd-500": 6})
    assert any(line.endswith("to do") and "pgd-500 " in line for line in more)
    shutil.rmtree(tmp_path / "work")
    gone = outline("table2", out=tmp_path, only=["pgd"], overrides=TINY, limits={**options["limits"], "pgd-500": 6})
    assert "to be trained again: something is missing on the weights" in gone[0]


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
        ({"table": "table2", "limits": {"pgd-20": 0}}, "at least 1 image"),
        ({"table": "table2", "only": ["pdg"]}, "There is no row 'pdg' here"),
        ({"table": "table2,tabel3"}, "Unknown table 'tabel3'"),
        ({"table": "table2", "overrides": {"epoch": 1}}, "Unknown key 'epoch'"),
        ({"table": "table2", "scale": "small", "data_dir": "nowhere"}, "There is no folder nowhere"),
    ],
)
def test_a_mistake_is_one_sentence(words: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(HardsphereError, match=re.escape(sentence)):
        reproduce(**words, out=tmp_path)


def test_limits_reach_their_attacks() -> None:
    size = limited(SCALES["small"], {"standard": 50, "pgd-500": 20, "mechanism": 7}, ["mechanism"])
    measured = TABLES["table2"].measurements(size)
    assert measured["standard"].limit == 50  # type: ignore[attr-defined]
    entries = {
        entry.name: entry.limit
        for name in ("pgd-500", "few-images")
        for entry in measured[name].suite.entries  # type: ignore[attr-defined]
    }
    assert entries == {"pgd-500": 20, "feature": 200, "cw-l2": 200}
    group = ENTRIES["mechanism"].group(size)  # type: ignore[union-attr]
    assert group is not None
    assert group.options["images"] == 7
    assert replace(size, limits={}, entries={}) == replace(SCALES["small"], limits={}, entries={})


@pytest.mark.check
def test_everything_at_the_smoke_scale(tmp_path: Path) -> None:
    done = reproduce("all", out=tmp_path, device="cpu")
    assert done.swept.failed == {}
    assert done.complete
    assert [file.stem for file in done.files] == list(ENTRIES)
