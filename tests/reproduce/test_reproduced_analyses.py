"""The analyses as entries of `reproduce`: planned, recorded with their provenance, and written with their figures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hardsphere import analysis
from hardsphere.data import Images, to_float
from hardsphere.data import load as load_data
from hardsphere.reproduce import ANALYSES, SCALES, Reproduced, reproduce
from hardsphere.reproduce.analyses import _correlation, _gradient_lines
from hardsphere.reproduce.tables import TABLES, plan_of
from hardsphere.train import load

TINY: dict[str, Any] = {"epochs": 1, "model": "cnn-4", "batch": 256, "attack.steps": 1}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory for all of them: what one has trained, the others use."""
    return tmp_path_factory.mktemp("analyses")


def made(name: str, out: Path) -> Reproduced:
    return reproduce(name, "smoke", out=out, overrides=TINY, device="cpu", command=f"hardsphere reproduce {name}")


@pytest.mark.parametrize("name", ANALYSES)
def test_an_analysis_end_to_end(name: str, out: Path) -> None:
    done = made(name, out)
    assert done.swept.failed == {}
    assert done.complete
    entry = ANALYSES[name]
    text = (out / f"{name}.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {entry.title}, scale smoke")
    assert f"Command: `hardsphere reproduce {name}`" in text
    built = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
    assert [run["title"] for run in built["runs"]] == [row.title for row in entry.rows]
    assert all(run["weights"] and run["selection"] and run["machines"] for run in built["runs"])
    assert built["found"][0]["facts"]["n"] == entry.images["smoke"]
    for row in entry.rows:
        assert row.title in text
    for figure, caption in entry.figures.items():
        assert (out / f"{figure}.png").read_bytes().startswith(b"\x89PNG")
        assert f"({figure}.png)\n\n*{caption}.*" in text
    for word in entry.terms:
        assert f"- *{word}*: " in text
        assert text.count(word) > 1  # it explains what is there


def test_what_is_recorded_is_what_the_analysis_says(out: Path) -> None:
    done = made("gradients", out)
    group = ANALYSES["gradients"].group(SCALES["smoke"], 0, TINY)
    assert group is not None
    facts = done.swept.records[group.id]["result"]
    deployed = load(out / "work" / group.runs[1].id)
    test = load_data("digits").test
    assert isinstance(test, Images)
    part = test.subset(range(facts["n"]))
    direct = analysis.gradient_ratio(
        deployed.model, to_float(part.pixels), part.labels, deployed.ball, seed=0, ids=part.ids
    ).to_dict()
    for layer, numbers in direct["layers"].items():
        recorded = facts["models"]["PGD-AT + HE"]["layers"][layer]
        assert recorded["ratio"]["mean"] == pytest.approx(numbers["ratio"]["mean"], rel=1e-6)


def test_an_analysis_shows_its_models_in_both_protocols(tmp_path: Path) -> None:
    """Of the weights it looked at and no others: those of another training would be another model."""
    out = tmp_path / "out"
    shutil.copytree(Path(__file__).parent / "earlier", out)
    only = ("pgd", "pgd-he")
    page = reproduce("gradients", out=out, only=only, render_only=True).files[0].read_text(encoding="utf-8")
    assert "| model | clean | n | PGD-20, *paper*, linf 0.2 | n | Standard, *honest*, linf 0.2 | n |" in page
    assert "| PGD-AT | 79.17 [59.5, 90.8] | 24 | 37.50 [21.2, 57.3] | 24 | 16.67 [6.7, 35.9] | 24 |" in page
    assert "all models together in" in page
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    easier = next(line for line in lines if line["measurement"]["name"] == "standard" and line["run"] == "PGD-AT")
    easier = json.loads(json.dumps(easier))  # a sweep of one's own, in a smaller ball and on more images
    easier["measurement"]["eps"], easier["result"]["columns"]["robust"]["n"] = 0.01, 100
    (out / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, easier]))
    assert reproduce("gradients", out=out, only=only, render_only=True).files[0].read_text(encoding="utf-8") == page
    for line in lines:
        if line["measurement"]["name"] == "standard":
            line["weights"] = "other weights"
    (out / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = reproduce("gradients", out=out, only=only, render_only=True).files[0].read_text(encoding="utf-8")
    assert "| PGD-AT | 79.17 [59.5, 90.8] | 24 | 37.50 [21.2, 57.3] | 24 | – | – |" in page


def test_a_figure_of_another_look_is_not_shown(tmp_path: Path) -> None:
    """A later look at fewer models draws over the figure, while the page still tells of all of them."""
    out = tmp_path / "out"
    shutil.copytree(Path(__file__).parent / "earlier", out)
    (out / "gradients.png").write_bytes(b"a picture")
    lines = (out / "results.jsonl").read_text().splitlines()
    (look,) = [json.loads(line) for line in lines if json.loads(line).get("group") == "gradients"]

    def page() -> str:
        done = reproduce("gradients", out=out, only=("pgd", "pgd-he"), render_only=True)
        return done.files[0].read_text(encoding="utf-8")

    assert "(gradients.png)" in page()
    assert "are left out" not in page()
    later = {**look, "id": "later", "configs": dict(list(look["configs"].items())[:1])}
    with (out / "results.jsonl").open("a") as stream:
        stream.write(json.dumps(later) + "\n")
    assert "(gradients.png)" not in page()
    assert "The figures of seed 0 are left out: they are of a later look, at other models or images." in page()


def test_mean_and_median_of_gradients_may_disagree() -> None:
    def model(mean: float, median: float) -> dict[str, Any]:
        ratio = {"mean": mean, "error": 0.1, "p50": median}
        return {"layers": {name: {"ratio": ratio} for name in ("first", "last")}}

    lines = _gradient_lines({"models": {"A": model(2.0, 1.5), "B": model(3.0, 1.2), "C": model(3.0, 1.6)}})
    against = [line for line in lines if line.startswith("- ")]
    assert against[0].startswith("- B against A: the mean is higher in 2 of 2 layers, the median in 0. The mean")
    assert against[1] == "- C against A: the mean is higher in 2 of 2 layers, the median in 2."


def test_the_interval_of_a_correlation() -> None:
    """Fisher's: against scipy's."""
    stats = pytest.importorskip("scipy.stats")
    first, second = (
        [1.0, 2.0, 4.0, 3.0, 5.0, 7.0, 6.0, 9.0, 8.0, 0.0],
        [2.0, 1.0, 3.0, 5.0, 4.0, 6.0, 9.0, 7.0, 0.0, 8.0],
    )
    found = stats.pearsonr(first, second)
    low, high = found.confidence_interval(0.95)
    told = _correlation({"targets_norms_correlation": found.statistic, "norms": first})
    assert told == f"{found.statistic:.3f} [{low:.3f}, {high:.3f}]"
    assert _correlation({"targets_norms_correlation": None, "norms": first}) == "–"


def test_the_papers_table_7_stands_beside_ours(out: Path) -> None:
    made("table7", out)
    lines = (out / "table7.md").read_text(encoding="utf-8").splitlines()
    assert "| in the paper | 67.09 | 62.89 | – | -4.20 |" in lines
    assert "| in the paper | 50.37 | 33.75 | – | -16.62 |" in lines


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ANALYSES)
def test_every_analysis_has_a_plan_at_every_scale(name: str, scale: str) -> None:
    entry, size = ANALYSES[name], SCALES[scale]
    group, other = entry.group(size), entry.group(size, seed=1)
    assert group is not None
    assert other is not None
    plan = plan_of([entry], size, groups=[group])
    assert {run.id for run in group.runs} == {run.id for run in plan.runs}
    assert group.id != other.id
    trained = {run.id for run in plan_of([TABLES["table2"]], size).runs}
    assert name == "table7" or {run.id for run in plan.runs} <= trained  # no training that Table 2 has not
