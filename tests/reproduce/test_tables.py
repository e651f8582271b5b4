"""The tables: every one has a valid plan at every scale, renders as it should, and runs end to end."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from hardsphere import models
from hardsphere.corruptions import CORRUPTIONS
from hardsphere.data import load as load_data
from hardsphere.errors import HardsphereError
from hardsphere.recipes import recipe
from hardsphere.reproduce import ENTRIES, outline, paper, reproduce, tables
from hardsphere.reproduce.places import colour_digits
from hardsphere.reproduce.scales import MEASURES, SCALES, limited
from hardsphere.reproduce.tables import TABLES, plan_of, run_of
from hardsphere.threat import Ball


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
    assert "**In progress**" in first_call.files[0].read_text(encoding="utf-8")
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
    assert "Not looked at yet: PGD-AT + m-HE." in done.files[1].read_text(encoding="utf-8")
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
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    for line in lines:  # as if one machine had lacked the photographs of frost
        if line["measurement"]["kind"] == "corruptions":
            line["result"]["frost_stand_in"] = line["run"] == "FreeAT"
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = reproduce("table12", "smoke", out=tmp_path, overrides=TINY, render_only=True)
    cells = dict(
        zip([column["title"] for column in built["columns"]], again.tables[0]["pairs"][0]["cells"], strict=True)
    )
    assert cells["Frost"] is None
    assert cells["Fog"] is not None
    said = [text for text in again.tables[0]["remarks"] if "frost is a drawn stand-in" in text]
    assert [text.partition(":")[0] for text in said] == ["corruptions, FreeAT"]


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
        ({"table": "table2", "seeds": [1, 0, 1]}, "The seeds are 1, 0, 1, but must be different ones"),
        ({"table": "table2", "seeds": []}, "The seeds are none"),
        ({"table": "mechanism", "only": ["pgd"]}, "Of mechanism one row is nothing to compare: name at least two"),
        ({"table": "table2,tabel3"}, "Unknown table 'tabel3'"),
        ({"table": "table2", "overrides": {"epoch": 1}}, "Unknown key 'epoch'"),
        ({"table": "table2", "scale": "small", "data_dir": "nowhere"}, "There is no folder nowhere"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing_behind(
    words: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(HardsphereError, match=re.escape(sentence)):
        reproduce(**words, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_dry_run_refuses_what_would_do_nothing(tmp_path: Path) -> None:
    with pytest.raises(HardsphereError, match="one row is nothing to compare"):
        outline("mechanism", out=tmp_path, only=["pgd"])


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
