"""Plans: what a person writes, the runs it means, and the sentence that answers a mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hardsphere.errors import HardsphereError
from hardsphere.evaluate import SUITES, OfEps
from hardsphere.recipes import recipe
from hardsphere.reproduce.budget import seconds
from hardsphere.reproduce.measures import Attacks, Corruptions, attacks
from hardsphere.reproduce.plan import Run, merge, record_id
from hardsphere.reproduce.reading import expand, read_plan
from hardsphere.threat import Ball

SMALL: dict[str, Any] = {"runs": ["digits/pgd"], "measure": ["quick"]}


def test_a_grid_is_every_combination_in_order() -> None:
    assert expand({"a": [1, 2], "b": ["x", "y"]}) == [
        {"a": 1, "b": "x"},
        {"a": 1, "b": "y"},
        {"a": 2, "b": "x"},
        {"a": 2, "b": "y"},
    ]
    assert expand({}) == [{}]


def test_a_whole_plan(tmp_path: Path) -> None:
    file = tmp_path / "temperature.yaml"
    file.write_text(
        """
        keep_weights: false
        seeds: [0, 3]
        set: {epochs: 2, attack.eps: 1/10}
        runs:
          - digits/pgd
          - recipe: digits/trades-he
            name: TRADES + HE
            set: {epochs: 3}
            grid: {head.scale: [5, 15], head.margin: [0, 0.2, 0.4]}
            measure: [standard]
        measure:
          - {suite: paper, limit: 7, eps: run, only: [pgd-20, cw-l2], limits: {cw-l2: 5}, options: {pgd-20: {steps: 3}}}
          - {corruptions: true, limit: 4, names: [fog, snow]}
          - name: mine
            eps: 8/255
            entries: [{name: pgd-7, attack: pgd, options: {steps: 7, step_size: 0.25eps}, view: paper}]
        """
    )
    plan = read_plan(file)
    assert plan.name == "temperature"
    assert not plan.keep_weights
    assert len(plan.runs) == 2 * (1 + 6)
    assert [run.name for run in plan.runs[:3]] == [
        "digits/pgd, seed 0",
        "digits/pgd, seed 3",
        "TRADES + HE, head.scale 5, head.margin 0, seed 0",
    ]
    assert plan.runs[1].config == recipe("digits/pgd", {"epochs": 2, "attack.eps": 0.1, "seed": 3})
    last = {"epochs": 3, "attack.eps": 0.1, "head.scale": 15, "head.margin": 0.4, "seed": 3}
    assert plan.runs[-1].config == recipe("digits/trades-he", last)
    assert [one.name for one in plan.runs[-1].measurements] == ["standard"]
    paper, corrupted, mine = plan.runs[0].measurements
    assert isinstance(paper, Attacks)
    assert [(entry.name, entry.limit) for entry in paper.suite.entries] == [("pgd-20", None), ("cw-l2", 5)]
    assert paper.suite.entries[0].options["steps"] == 3
    assert paper.suite.entries[0].view == "paper"
    assert paper.suite.name == "paper-changed"
    assert paper.ball(Ball("linf", 0.1)) == Ball("linf", 0.1)
    assert isinstance(corrupted, Corruptions)
    assert corrupted.names == ("fog", "snow")
    assert isinstance(mine, Attacks)
    assert mine.ball(Ball("linf", 0.1)) == Ball("linf", 8 / 255)
    assert mine.suite.entries[0].options["step_size"] == OfEps(0.25)


def test_an_unchanged_suite_keeps_its_name_and_hash() -> None:
    assert attacks("standard", limit=10).suite == SUITES["standard"]
    assert attacks("paper").ball(Ball("linf", 0.2)) == Ball("linf", 0.031)  # its own radius
    assert attacks("standard").ball(Ball("linf", 0.2)) == Ball("linf", 0.2)


def test_ids_follow_what_decides_the_numbers_and_nothing_else() -> None:
    config = recipe("digits/pgd")
    base = record_id(config, attacks("standard", limit=10))
    assert base == record_id(recipe("digits/pgd"), attacks("standard", limit=10, name="another name"))
    others = [
        record_id(recipe("digits/pgd", {"epochs": 21}), attacks("standard", limit=10)),
        record_id(recipe("digits/pgd", {"seed": 1}), attacks("standard", limit=10)),
        record_id(config, attacks("standard", limit=11)),
        record_id(config, attacks("standard", limit=10, seed=1)),
        record_id(config, attacks("standard", limit=10, eps=0.1)),
        record_id(config, attacks("standard", limit=10, options={"square": {"queries": 10}})),
        record_id(config, Corruptions(limit=10)),
    ]
    assert len({base, *others}) == 8


def test_the_id_is_the_same_on_every_day() -> None:
    """A recorded result must be found again: the id may change only together with `FORMAT`."""
    first, again = (record_id(recipe("digits/pgd"), attacks("standard")) for _ in range(2))
    assert first == again
    assert len(first) == 12
    assert int(first, 16) >= 0


def test_shared_trainings_happen_once_with_all_measurements() -> None:
    config = recipe("digits/pgd")
    one, two = attacks("quick", limit=5), attacks("standard", limit=5)
    plan = merge("m", [Run("a", config, (one,)), Run("b", config, (one, two)), Run("c", recipe("digits/alp"), (one,))])
    assert [(run.name, [measured.name for measured in run.measurements]) for run in plan.runs] == [
        ("a", ["quick", "standard"]),
        ("c", ["quick"]),
    ]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rums": []}, "unknown key 'rums'. Did you mean 'runs'"),
        ({"runs": []}, "holds no runs"),
        ({"runs": "digits/pgd"}, "runs is 'digits/pgd', but must be a list"),
        ({"runs": ["digits/pdg"]}, "Unknown recipe 'digits/pdg'. Did you mean 'digits/pgd'"),
        ({"runs": [{"set": {"epochs": 1}}]}, "names no recipe"),
        ({"set": {"epoch": 1}}, "Unknown key 'epoch'. Did you mean 'epochs'"),
        ({"set": {"epochs": "many"}}, "epochs is 'many', but it must be a whole number"),
        ({"set": {"seed": 1}}, "given by seeds"),
        ({"seeds": 3}, "seeds is '3', but must be a list"),
        ({"seeds": [1, 1]}, "different whole numbers"),
        ({"keep_weights": "perhaps"}, "must be true or false"),
        ({"measure": []}, "measures nothing"),
        ({"measure": ["standart"]}, "Unknown suite 'standart'"),
        ({"measure": [{"limit": 5}]}, "needs exactly one of suite, entries, corruptions, call"),
        ({"measure": [{"suite": "paper", "only": ["pgd-21"]}]}, "no attack 'pgd-21'. Did you mean 'pgd-20'"),
        ({"measure": [{"suite": "paper", "limit": 0}]}, "limit is '0'"),
        ({"measure": [{"suite": "paper", "eps": "wide"}]}, "eps is 'wide'"),
        ({"measure": [{"suite": "paper", "eps": -0.1}]}, "eps is '-0.1', but must be above 0"),
        ({"measure": [{"suite": "paper", "only": 20}]}, "only is '20', but must be a list"),
        ({"measure": [{"suite": "paper", "limits": 5}]}, "limits is '5', but must be a mapping"),
        ({"measure": [{"suite": "paper", "options": ["steps"]}]}, "options is '['steps']', but must be a mapping"),
        (
            {"measure": [{"suite": "paper", "options": {"pgd-20": {"stepz": 5}}}]},
            "The attack of 'pgd-20' has no option 'stepz'. Did you mean 'steps'",
        ),
        (
            {"measure": [{"suite": "paper", "options": {"pgd-20": {"step_size": "wide eps"}}}]},
            "The option step_size is 'wide eps', which is no length",
        ),
        ({"measure": [{"suite": "paper", "limt": 3}]}, "unknown key 'limt'. Did you mean 'limit'"),
        ({"measure": [{"entries": [{"name": "a", "attack": "pgd"}]}]}, "needs a name"),
        ({"measure": [{"name": "n", "entries": [{"name": "a"}]}]}, "at least a name and an attack"),
        ({"measure": [{"name": "n", "entries": []}]}, "holds no attacks"),
        ({"measure": [{"name": "n", "entries": 5}]}, "entries is '5', but must be a list"),
        ({"measure": [{"name": "n", "entries": [{"name": "a", "attack": "pdg"}]}]}, "named 'pdg'. Did you mean 'pgd'"),
        ({"measure": [{"name": "n", "entries": [{"name": "a", "attack": "pgd", "limit": "x"}]}]}, "limit is 'x'"),
        ({"measure": [{"name": "n", "entries": [{"name": "a", "attack": "pgd", "norms": 2}]}]}, "norms is '2'"),
        (
            {"measure": [{"name": "n", "cascade": "no", "entries": [{"name": "a", "attack": "pgd"}]}]},
            "cascade is 'no', but must be true or false",
        ),
        ({"measure": [{"corruptions": True, "names": 5}]}, "names is '5', but must be a list"),
        ({"measure": [{"corruptions": True, "names": ["frog"]}]}, "Unknown corruption 'frog'. Did you mean 'fog'"),
        ({"measure": [{"call": "hardsphere.nowhere:f"}]}, "cannot be had"),
        ({"measure": [{"call": ":f"}]}, "cannot be had"),
        ({"measure": [{"call": "math:sqrt", "options": 5}]}, "options is '5', but must be a mapping"),
        ({"runs": [{"recipe": "digits/pgd", "grid": {"epochs": 3}}]}, "must be a list of values"),
        ({"runs": [{"recipe": "digits/pgd", "name": "x"}, {"recipe": "digits/alp", "name": "x"}]}, "are called 'x'"),
        (
            {"measure": [{"suite": "paper", "eps": 0.1}, {"suite": "paper", "eps": 0.2}]},
            "Two measurements of 'digits/pgd' are called 'paper': give one of them another name",
        ),
    ],
)
def test_a_mistake_is_one_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(HardsphereError) as caught:
        read_plan({**SMALL, **change})
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_plans(tmp_path: Path) -> None:
    with pytest.raises(HardsphereError, match="no readable plan"):
        read_plan(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("runs: [")
    with pytest.raises(HardsphereError, match="no YAML file"):
        read_plan(tmp_path / "bad.yaml")
    (tmp_path / "text.yaml").write_text("just text")
    with pytest.raises(HardsphereError, match="is no plan"):
        read_plan(str(tmp_path / "text.yaml"))
    (tmp_path / "good.yaml").write_text(yaml.safe_dump(SMALL))
    assert read_plan(tmp_path / "good.yaml").name == "good"


def test_budgets() -> None:
    assert [seconds(text) for text in ("90s", "9m", "2h", "1.5m", 30, None)] == [90, 540, 7200, 90, 30, None]
    for wrong in ("9", "9 minutes", "m", "-3s", "0s", ""):
        with pytest.raises(HardsphereError, match="such as 90s, 9m or 2h"):
            seconds(wrong)
    with pytest.raises(HardsphereError, match="above 0"):
        seconds(0)
