"""The suites: every entry runs with its own settings, names and hashes say what is in them."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from toys import Linear, images, labelled

from hardsphere import attacks
from hardsphere.errors import HardsphereError
from hardsphere.evaluate import SUITES, Entry, OfEps, Suite, evaluate, suite_named
from hardsphere.sphere import attach
from hardsphere.threat import Ball

ENTRIES = {f"{suite.name}:{entry.name}": (suite, entry) for suite in SUITES.values() for entry in suite.entries}
LESS = {"steps": 3, "queries": 30, "restarts": 2, "targets": 2, "draws": 2, "searches": 1, "pairs": 4}


class Centred(nn.Module):
    """The flattened image, with grey at zero."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) - 0.5


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_every_entry_runs_in_its_norms_and_is_left_out_aloud_in_the_others(name, norm):
    suite, entry = ENTRIES[name]
    short = replace(entry, options={key: LESS.get(key, value) for key, value in entry.options.items()})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(Centred(), nn.Linear(16, 8, bias=False), nn.Tanh(), nn.Linear(8, 5, bias=False))
    model = attach(net, scale=15.0)
    x = images(6)
    y = model(x).argmax(dim=1)
    assert len(y.unique()) > 1
    ball = Ball(norm, {"linf": 0.1, "l2": 0.4, "l1": 1.5}[norm])
    probe = replace(suite, entries=(short, Entry("control", "random_noise", {"draws": 1}, norms=("linf", "l2", "l1"))))
    result = evaluate(model, x, y, ball, suite=probe, source=net)
    assert (entry.name in result.by_attack) == (norm in entry.norms)
    if norm in entry.norms:
        assert len(result.ledger.rows(attack=entry.name)) == 6
    else:
        assert f"{entry.name} was left out: it does not work in {norm}." in result.card["remarks"]


@pytest.mark.parametrize("name", ENTRIES)
def test_every_setting_is_one_the_attack_knows(name):
    _, entry = ENTRIES[name]
    known = inspect.signature(getattr(attacks, entry.attack)).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    assert open_ended or set(entry.options) <= set(known)


def test_standard_is_autoattacks_standard_set():
    described = [(entry.attack, dict(entry.options)) for entry in suite_named("standard").entries]
    assert described == [
        ("apgd", {"steps": 100, "loss": "cross_entropy", "restarts": 1}),
        ("apgd_targeted", {"steps": 100, "targets": 9, "restarts": 1}),
        ("fab_targeted", {"steps": 100, "targets": 9, "restarts": 1}),
        ("square", {"queries": 5000}),
    ]
    assert suite_named("standard").cascade
    assert all(entry.view == "deployed" and entry.limit is None for entry in suite_named("standard").entries)


def test_paper_has_the_settings_of_table_2():
    suite = suite_named("paper")
    assert (suite.protocol, suite.cascade, suite.eps) == ("paper", False, 0.031)
    by_name = {entry.name: entry for entry in suite.entries}
    for name in ("pgd-20", "pgd-500", "mim-20", "pgd-20-adaptive", "pgd-500-adaptive"):
        options = by_name[name].options
        assert options["step_size"].factor * 0.031 == pytest.approx(0.003)
        assert options["keep"] == "last"
        assert options.get("restarts", 1) == 1
    assert all((entry.view == "paper") == ("adaptive" not in entry.name) for entry in suite.entries)


def test_the_paper_suite_brings_its_own_radius():
    model = Linear()
    x, y = labelled(model, 4)
    fast = replace(suite_named("paper"), entries=suite_named("paper").entries[:1])
    assert evaluate(model, x, y, suite=fast).balls == (Ball("linf", 0.031),)


def test_full_contains_standard_and_every_suite_says_what_to_know_of_it():
    assert suite_named("full").entries[:4] == suite_named("standard").entries
    assert "may overstate" in suite_named("quick").caveat
    assert all(suite.caveat for suite in SUITES.values())


def test_the_hash_follows_whatever_decides_a_number():
    base = Suite("s", 1, "honest", (Entry("a", "pgd", {"steps": 3, "step_size": OfEps(0.5)}),))
    (entry,) = base.entries
    others = [
        replace(base, version=2),
        replace(base, protocol="paper"),
        replace(base, cascade=False),
        replace(base, entries=(replace(entry, options={"steps": 4, "step_size": OfEps(0.5)}),)),
        replace(base, entries=(replace(entry, options={"steps": 3, "step_size": OfEps(0.25)}),)),
        replace(base, entries=(replace(entry, view="paper"),)),
        replace(base, entries=(replace(entry, limit=10),)),
        replace(base, entries=(replace(entry, outside="filter"),)),
        replace(base, entries=(entry, replace(entry, name="b"))),
    ]
    assert len({base.hash, *(other.hash for other in others)}) == 1 + len(others)
    assert replace(base, caveat="words").hash == base.hash
    assert str(base) == f"s/1: a [{base.hash}]"


def test_suites_that_make_no_sense_are_refused():
    entry = Entry("a", "pgd")
    for entries, protocol in [
        ((), "honest"),
        ((entry, entry), "honest"),
        ((entry,), "hope"),
        ((Entry("carried", "pgd"),), "honest"),
    ]:
        with pytest.raises(HardsphereError):
            Suite("s", 1, protocol, entries)


def test_the_feature_attack_finds_guides_in_data_sorted_by_class_and_does_without_in_one_class():
    net = attach(nn.Sequential(nn.Flatten(), nn.Linear(2, 2)), scale=5.0)
    with torch.no_grad():
        net[1].weight.copy_(torch.eye(2))
    bright = torch.linspace(0.6, 0.9, 300)
    x = torch.cat([torch.stack([bright, 1 - bright], 1), torch.stack([1 - bright, bright], 1)]).view(600, 1, 1, 2)
    y = torch.arange(600) // 300
    entry = Entry("feature", "feature_attack", {"steps": 10, "restarts": 2, "step_size": OfEps(0.5)}, needs=("guides",))
    ball = Ball("linf", 0.3)
    result = evaluate(net, x, y, ball, suite=[entry])
    # By symmetry the boundary is where the two pixels are equal: at a distance of (2 b - 1) / 2.
    assert result.robust_accuracy == pytest.approx(float((bright - 0.5 > 0.3).double().mean()), abs=0.01)
    with pytest.raises(HardsphereError, match="two classes"):
        evaluate(net, x[:300], y[:300], ball, suite=[entry])
