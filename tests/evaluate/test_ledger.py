"""The ledger: what goes in comes out, transactions are whole, evaluations do not mix, shards make the whole."""

from __future__ import annotations

import sqlite3

import pytest
import torch
from toys import Linear, labelled, radius_at

from hardsphere.errors import HardsphereError
from hardsphere.evaluate import Entry, evaluate, merge, open_ledger
from hardsphere.evaluate.ledger import Ledger, Row, Sample
from hardsphere.threat import Ball

WEAK = Entry("weak", "pgd", {"steps": 3})
STRONG = Entry("strong", "apgd_targeted", {"steps": 10})


def small() -> Ledger:
    ledger = Ledger()
    ledger.add_samples([Sample(10, 0, 1, 1), Sample(11, 1, 0, 0), Sample(12, 2, 1, 0), Sample(13, 3, 0, 0)])
    ledger.note("order", ["b", "a"])
    ledger.add([Row(0.1, "b", 10, "held", 0.1), Row(0.1, "b", 11, "broken", 0.1), Row(0.1, "b", 12, "clean-wrong")])
    ledger.add([Row(0.1, "b", 13, "held", 0.1, "STUCK", 0, 4.0, 2.0, 0.5)])
    ledger.add([Row(0.1, "a", 10, "broken", 0.05), Row(0.1, "a", 11, "skipped"), Row(0.1, "a", 13, "held", 0.1)])
    return ledger


def test_accuracies_are_queries():
    ledger = small()
    assert ledger.clean_accuracy() == 3 / 4
    assert ledger.robust(0.1) == {13}
    assert ledger.robust_accuracy(0.1) == 1 / 4
    assert ledger.robust_accuracy(0.2) == 1 / 4  # nothing was tried at that radius, but what fell at 0.1 lies inside
    assert ledger.robust_accuracy(0.05) == 3 / 4
    assert ledger.attacks(0.1) == ["b", "a"]
    assert ledger.broken(0.1) == {11: "b", 10: "a"}
    assert ledger.broken(0.1, ["a"]) == {10: "a"}
    alone, after = ledger.tally(0.1, "a"), ledger.tally(0.1, "a", before=["b"])
    assert (alone.n, alone.correct, alone.attacked, alone.broken, alone.robust) == (4, 3, 2, 1, 2)
    assert after.robust == 1
    first = ledger.tally(0.1, "b", limit=2)
    assert (first.n, first.correct, first.robust) == (2, 2, 1)
    everything = ledger.tally(0.1, "b")
    assert (everything.stuck, everything.forwards, everything.backwards, everything.seconds) == (1, 4.0, 2.0, 0.5)


def test_a_batch_is_written_as_a_whole_or_not_at_all(tmp_path):
    ledger = Ledger(tmp_path / "ledger.db")

    def rows():
        yield Row(0.1, "a", 1, "held")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ledger.add(rows())
    assert ledger.rows() == []
    ledger.add([Row(0.1, "a", 1, "held")])  # and it is still usable
    assert len(ledger.rows()) == 1


def test_the_file_is_in_wal_mode_and_settles_into_one_file(tmp_path):
    model = Linear()
    x, y = labelled(model, 10)
    evaluate(model, x, y, Ball("linf", 0.01), suite=[WEAK], out=tmp_path).ledger.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["card.json", "ledger.db"]
    with sqlite3.connect(tmp_path / "ledger.db") as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_the_same_call_again_does_nothing_and_says_the_same(tmp_path):
    model = Linear()
    x, y = labelled(model, 20)
    ball = radius_at(model, x, y, 0.5)
    calls = []

    def attack(model, x, y, ball, *, noise):
        from hardsphere.attacks import pgd

        calls.append(len(x))
        return pgd(model, x, y, ball, noise=noise, steps=3)

    suite = [Entry("counted", attack)]
    first = evaluate(model, x, y, ball, suite=suite, out=tmp_path, batch=7)
    first.ledger.close()
    done = len(calls)
    second = evaluate(model, x, y, ball, suite=suite, out=tmp_path, batch=7)
    assert len(calls) == done == 3
    first.card.pop("environment")
    second.card.pop("environment")
    assert second.card == first.card


def variants():
    model = Linear()
    x, y = labelled(model, 10)
    base = {"model": model, "x": x, "y": y, "ball": Ball("linf", 0.01), "suite": [WEAK], "seed": 0}
    yield "seed", base, {"seed": 1}
    yield "eps", base, {"ball": Ball("linf", 0.02)}
    yield "norm", base, {"ball": Ball("l2", 0.01)}
    yield "suite", base, {"suite": [WEAK, STRONG]}
    yield "settings", base, {"suite": [Entry("weak", "pgd", {"steps": 4})]}
    yield "model", base, {"model": Linear(seed=5)}
    yield "source", base, {"source": Linear(seed=5)}
    yield "images", base, {"x": x.flip(0)}
    yield "labels", base, {"y": 1 - y}
    yield "ids", base, {"ids": torch.arange(10) + 1}
    yield "count", base, {"x": x[:9], "y": y[:9]}


@pytest.mark.parametrize(("name", "base", "change"), list(variants()), ids=[name for name, _, _ in variants()])
def test_another_evaluation_in_the_same_directory_is_refused(tmp_path, name, base, change):
    evaluate(**base, out=tmp_path).ledger.close()
    before = (tmp_path / "card.json").read_bytes()
    with pytest.raises(HardsphereError, match="holds another evaluation"):
        evaluate(**{**base, **change}, out=tmp_path)
    assert (tmp_path / "card.json").read_bytes() == before
    evaluate(**base, out=tmp_path).ledger.close()  # and the old one is as it was


def test_a_file_that_is_no_ledger_is_refused(tmp_path):
    (tmp_path / "ledger.db").write_bytes(b"no database at all, but long enough to be looked at" * 20)
    model = Linear()
    x, y = labelled(model, 4)
    with pytest.raises(HardsphereError, match="cannot be used as a ledger"):
        evaluate(model, x, y, Ball("linf", 0.1), suite=[WEAK], out=tmp_path)
    with pytest.raises(HardsphereError, match="no ledger"):
        open_ledger(tmp_path / "elsewhere")


def test_an_output_directory_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    model = Linear()
    x, y = labelled(model, 4)
    with pytest.raises(HardsphereError, match="cannot be made"):
        evaluate(model, x, y, Ball("linf", 0.1), suite=[WEAK], out=tmp_path / "file")


def test_merged_shards_are_the_rows_of_one_process(tmp_path):
    model = Linear(classes=5)
    x, y = labelled(model, 31, wrong=3)
    balls = [radius_at(model, x[3:], y[3:], part) for part in (0.3, 0.6)]
    suite = [WEAK, Entry("strong", "apgd_targeted", {"steps": 10}, limit=20)]
    whole = evaluate(model, x, y, balls, suite=suite, batch=8)
    for index in range(3):
        evaluate(model, x, y, balls, suite=suite, shard=(index, 3), out=tmp_path / str(index), batch=4).ledger.close()
    merged = merge([tmp_path / "1", tmp_path / "0", tmp_path / "2" / "ledger.db"], tmp_path / "merged.db")
    assert merged.samples() == whole.ledger.samples()
    together, alone = merged.rows(), whole.ledger.rows()
    assert [(r.eps, r.attack, r.sample, r.outcome, r.predicted) for r in together] == [
        (r.eps, r.attack, r.sample, r.outcome, r.predicted) for r in alone
    ]
    for one, other in zip(together, alone, strict=True):
        assert (one.distance is None) == (other.distance is None)
        if one.distance is not None:
            assert one.distance == pytest.approx(other.distance, abs=1e-5)
    for ball in balls:
        assert merged.robust_accuracy(ball.eps) == whole.ledger.robust_accuracy(ball.eps)
        assert merged.attacks(ball.eps) == whole.ledger.attacks(ball.eps)
    # The merged ledger is that of the whole evaluation: the same call in its directory finds nothing left to do.
    merged.close()
    (tmp_path / "whole").mkdir()
    (tmp_path / "merged.db").rename(tmp_path / "whole" / "ledger.db")
    told = []
    again = evaluate(model, x, y, balls, suite=suite, out=tmp_path / "whole", progress=told.append)
    assert again.ledger.rows() == together
    assert again.card["results"][-1]["robust"] == whole.card["results"][-1]["robust"]
    assert again.card["shard"] is None


def test_shards_that_do_not_belong_together_or_are_missing_are_refused(tmp_path):
    model = Linear()
    x, y = labelled(model, 10)
    ball = Ball("linf", 0.01)
    for name, options in {"a": {}, "b": {"seed": 1}}.items():
        for index in range(2):
            path = tmp_path / f"{name}{index}"
            evaluate(model, x, y, ball, suite=[WEAK], shard=(index, 2), out=path, **options).ledger.close()
    with pytest.raises(HardsphereError, match="different evaluations"):
        merge([tmp_path / "a0", tmp_path / "b1"])
    with pytest.raises(HardsphereError, match=r"2 shards, but \[1\]"):
        merge([tmp_path / "a0"])
    with pytest.raises(HardsphereError, match=r"\[1, 1\]"):
        merge([tmp_path / "a0", tmp_path / "a0"])
    with pytest.raises(HardsphereError, match="no ledgers"):
        merge([])
    merge([tmp_path / "a0", tmp_path / "a1"], tmp_path / "whole.db").close()
    with pytest.raises(HardsphereError, match="exists already"):
        merge([tmp_path / "a0", tmp_path / "a1"], tmp_path / "whole.db")
