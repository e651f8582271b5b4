from __future__ import annotations

from typing import Any

import pytest
import yaml

from hardsphere.config import flatten, from_dict, number, override, parse_assignments, to_dict
from hardsphere.errors import HardsphereError
from hardsphere.recipes import names, recipe, without_effect


def test_recipes_cover_data_frameworks_and_variants() -> None:
    assert len(names()) == len(set(names())) == 4 * 6 * 6
    assert {"cifar10/trades-he", "digits/fast", "cifar100/alp-fnwn", "folder/free-mhe"} <= set(names())


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("source", ["paper", "code"])
def test_every_recipe_survives_being_saved(name: str, source: str) -> None:
    config = recipe(name, {"source": source})
    assert config.recipe == name
    assert config.source == source
    assert from_dict(yaml.safe_load(yaml.safe_dump(to_dict(config)))) == config


def test_the_papers_values() -> None:
    """Section 4 of the paper."""
    config = flatten(recipe("cifar10/trades-he"))
    expected = {
        "model": "wrn-34-10",
        "epochs": 100,
        "lr": 0.1,
        "milestones": (0.75, 0.9),
        "weight_decay": 5e-4,
        "batch": 128,
        "objective.beta": 6.0,
        "head.scale": 15.0,
        "head.margin": 0.2,
        "attack.eps": 8 / 255,
        "attack.step_size": 2 / 255,
        "attack.steps": 10,
        "attack.start": "uniform",
        "attack.bn": "eval",
        "attack.scale": None,
    }
    assert {key: config[key] for key in expected} == expected
    assert recipe("cifar10/pgd-mhe").head.margin == 0.1
    assert recipe("cifar10/pgd-fnwn").head.margin == 0
    assert recipe("digits/pgd").attack.eps == 0.2
    fast, free = recipe("cifar10/fast"), recipe("cifar10/free-he")
    assert fast.model == free.model == "preactresnet18"
    assert fast.attack.step_size == pytest.approx(1.25 * 8 / 255)
    assert (fast.schedule, free.objective.updates_per_batch) == ("cyclic", 8)
    alp = flatten(recipe("cifar10/alp"))
    assert (alp["objective.alpha"], alp["objective.weight"], alp["objective.pairing"]) == (0.5, 0.5, "l2")


def test_the_released_codes_values() -> None:
    pgd, alp, trades = (flatten(recipe(f"cifar10/{name}-he", {"source": "code"})) for name in ("pgd", "alp", "trades"))
    for config in (pgd, alp, trades):
        assert (config["attack.eps"], config["attack.step_size"], config["attack.start"]) == (0.031, 0.007, "gaussian")
        assert config["epochs"] == 77
    assert [config["head.scale"] for config in (pgd, alp, trades)] == [10, 20, 15]
    assert [config["head.margin"] for config in (pgd, alp, trades)] == [0.2, 0.3, 0.2]
    assert alp["objective.pairing"] == "mse"
    assert (pgd["weight_decay"], trades["weight_decay"]) == (5e-4, 2e-4)


def test_overrides_win_over_the_source() -> None:
    config = recipe("cifar10/pgd-he", {"source": "code", "attack.eps": "4/255", "epochs": "3"})
    assert config.attack.eps == 4 / 255
    assert config.epochs == 3


def test_a_group_is_checked_in_its_final_state() -> None:
    """Switching FN and WN on together with the angular form must not fail half way."""
    values = {"head.angular": "true", "head.feature_norm": "true", "head.weight_norm": "yes"}
    assert recipe("digits/pgd", values).head.angular


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("epoch", "3", "Unknown key 'epoch'. Did you mean 'epochs'?"),
        ("attack.esp", "0.1", "Did you mean 'attack.eps'?"),
        ("objective.beta", "3", "Unknown key 'objective.beta'"),  # PGD-AT has no beta
        ("epochs", "ten", "epochs is 'ten', but it must be a whole number."),
        ("epochs", "1.5", "a whole number"),
        ("epochs", "0", "at least 1"),
        ("attack.eps", "0", "above 0"),
        ("attack.eps", "-8/255", "above 0"),
        ("attack.eps", "1/0", "finite number"),
        ("attack.eps", "nan", "finite number"),
        ("attack.eps", "inf", "finite number"),
        ("attack.norm", "linfty", "Did you mean 'linf'?"),
        ("ema.decay", "1", "below 1"),
        ("data.flip", "maybe", "true or false"),
        ("head.angular", "true", "feature_norm"),
        ("milestones", "0.5,x", "finite number"),
        ("source", "papers", "paper, code"),
        ("head.scale", "5", "head.scale says nothing to a linear head: leave it away, or train digits/pgd-he."),
        ("head.margin", "0.2", "head.margin says nothing to a linear head"),
        ("batch", "1", "at least 2"),
        ("init_warmup", "2", "set init"),
    ],
)
def test_wrong_values_get_one_sentence(key: str, value: str, words: str) -> None:
    with pytest.raises(HardsphereError) as error:
        recipe("digits/pgd", {key: value})
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_head_that_normalises_takes_its_scale_and_margin() -> None:
    assert recipe("digits/pgd", {"head.feature_norm": "true", "head.scale": "5"}).head.scale == 5
    assert recipe("digits/pgd-wn", {"head.margin": "0.1"}).head.margin == 0.1
    assert recipe("folder/pgd", {"head.scale": 10}).head.scale == 10  # as it is there


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(HardsphereError, match="Did you mean 'cifar10/trades-he'"):
        recipe("cifar10/trade-he")


def test_values_are_read_by_type() -> None:
    config = override(
        recipe("digits/pgd"),
        {"milestones": "0.5,3/4", "attack.scale": "1", "init": "none", "data.flip": "on", "batch": 64.0},
    )
    assert config.milestones == (0.5, 0.75)
    assert config.attack.scale == 1.0
    assert config.init is None
    assert config.data.flip is True
    assert config.batch == 64
    assert number("8/255") == 8 / 255
    assert override(config, {"milestones": 0.5}).milestones == (0.5,)  # as YAML reads milestones: 0.5


@pytest.mark.parametrize(
    ("values", "words"),
    [({"milestones": None}, "milestones is 'None', but it must be a finite number"), ({5: 5}, "Unknown key '5'")],
)
def test_values_that_no_command_line_gives_get_one_sentence_too(values: dict[Any, Any], words: str) -> None:
    with pytest.raises(HardsphereError, match=words):
        recipe("digits/pgd", values)


def test_assignments() -> None:
    assert parse_assignments(["a.b=1=2", "c="]) == {"a.b": "1=2", "c": ""}
    for bad in (["epochs"], ["=3"], ["a=1", "a=2"]):
        with pytest.raises(HardsphereError):
            parse_assignments(bad)


def test_a_saved_config_with_foreign_parts_is_refused() -> None:
    plain = to_dict(recipe("digits/trades"))
    for change, words in (
        ({"framework": "trade"}, "Did you mean 'trades'"),
        ({"colour": 1}, "Unknown key 'colour'"),
        ({"epochs": "many"}, "whole number"),
    ):
        with pytest.raises(HardsphereError, match=words):
            from_dict(plain | change)
    del plain["model"]
    with pytest.raises(HardsphereError, match="lacks the key 'model'"):
        from_dict(plain)


def test_no_released_value_is_made_up() -> None:
    """None was released for m-HE, for digits or for the attack of FreeAT, which is the training pass itself."""

    def changed(name: str) -> set[str]:
        paper, code = (flatten(recipe(name, {"source": source})) for source in ("paper", "code"))
        return {key for key in paper if paper[key] != code[key]}

    assert changed("cifar10/pgd-mhe") == changed("cifar10/trades-mhe") == changed("cifar10/pgd")
    assert "head.scale" in changed("cifar10/pgd-he") - changed("cifar10/pgd-mhe")
    assert changed("cifar10/free-he") == changed("digits/free") == {"source"}
    for framework in ("pgd-he", "alp-he", "alp-mhe", "trades"):
        assert changed(f"digits/{framework}") == {"source", "attack.start"}
    assert changed("digits/fast") == {"source", "attack.bn"}
    assert changed("cifar10/fast") == {"source", "attack.bn", "epochs"}


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("digits/free-he", {"attack.steps": 10, "attack.start": "gaussian"}, ["attack.steps", "attack.start"]),
        ("digits/free-he", {"attack.step_size": 0.1, "attack.eps": 0.1}, []),
        ("digits/standard", {"attack.step_size": 0.1, "attack.eps": 0.1}, ["attack.step_size"]),
        ("digits/pgd", {"attack.scale": 5.0}, ["attack.scale"]),
        ("digits/pgd-he", {"attack.scale": 5.0, "attack.steps": 3, "attack.bn": "train"}, []),
        ("digits/pgd-he", {"milestones": "0.5"}, ["milestones"]),
        ("digits/pgd-he", {"milestones": "0.5", "schedule": "step"}, []),
        ("cifar10/pgd-he", {"warmup": 0.5}, ["warmup"]),
        ("cifar10/pgd-he", {"source": "code"}, []),
    ],
)
def test_what_was_changed_for_nothing_is_known(name: str, changes: dict[str, object], expected: list[str]) -> None:
    assert without_effect(recipe(name, changes)) == expected
