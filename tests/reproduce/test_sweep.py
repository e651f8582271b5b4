"""The sweep runner: budget, continuation and records, with made-up work; one real run end to end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_up import Coin, Workshop, workshop

from hardsphere.data import load as load_data
from hardsphere.errors import HardsphereError
from hardsphere.evaluate import evaluate
from hardsphere.recipes import recipe
from hardsphere.reproduce import on_record, worker
from hardsphere.reproduce.measures import Call
from hardsphere.reproduce.outcomes import read_outcomes
from hardsphere.reproduce.plan import Group, Plan, Run, merge, record_id
from hardsphere.reproduce.store import Store
from hardsphere.reproduce.sweep_page import sweep_markdown
from hardsphere.reproduce.sweeping import sweep
from hardsphere.train import load, train

NAMES = ("digits/pgd", "digits/alp", "digits/trades")


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Workshop:
    return workshop(monkeypatch)


def plan(shop: Workshop, epochs: int = 3, **options: object) -> Plan:
    """Three runs of 30 seconds and 5 more to judge each."""
    runs = [Run(name, recipe(name, {"epochs": epochs}), (Coin(shop.clock),)) for name in NAMES]
    return Plan("made up", tuple(runs), **options)  # type: ignore[arg-type]


def recorded(out: Path) -> list[dict[str, object]]:
    """The records without what depends on the day."""
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    volatile = ("seconds", "environment", "trained")
    return [{key: value for key, value in line.items() if key not in volatile} for line in lines]


def test_everything_is_done_once(shop: Workshop, tmp_path: Path) -> None:
    first = sweep(plan(shop), tmp_path, clock=shop.clock, device="cpu")
    assert first.complete
    assert [one["run"] for one in first.records.values()] == list(NAMES)
    assert len(shop.trained) == 9
    before, now = (tmp_path / "results.jsonl").read_text(), shop.clock.now
    again = sweep(plan(shop), tmp_path, "1s", clock=shop.clock, device="cpu")
    assert again.records == first.records
    assert len(shop.trained) == 9
    assert shop.clock.now == now
    assert (tmp_path / "results.jsonl").read_text() == before


def test_a_changed_configuration_is_another_run(shop: Workshop, tmp_path: Path) -> None:
    sweep(plan(shop), tmp_path, clock=shop.clock, device="cpu")
    changed = plan(shop)
    changed = replace(
        changed, runs=(replace(changed.runs[0], config=recipe(NAMES[0], {"epochs": 4})), *changed.runs[1:])
    )
    swept = sweep(changed, tmp_path, clock=shop.clock, device="cpu")
    assert shop.trained[9:] == [(NAMES[0], epoch) for epoch in (1, 2, 3, 4)]
    assert len(swept.records) == 3
    assert len(recorded(tmp_path)) == 4  # the older result stays


def test_no_run_begins_that_would_not_end_in_time(shop: Workshop, tmp_path: Path) -> None:
    """35 s each: the first is unknown and starts; after it 45 s of 80 are left; the third would need 35 of 10."""
    swept = sweep(plan(shop), tmp_path, "80s", clock=shop.clock, device="cpu")
    assert not swept.complete
    assert swept.missing == ((NAMES[2], "coin"),)
    assert len(shop.trained) == 6
    assert shop.clock.now == 1000 + 70
    done = sweep(plan(shop), tmp_path, "80s", clock=shop.clock, device="cpu")
    assert done.complete
    assert len(shop.trained) == 9


def test_a_run_that_outlasts_the_budget_goes_on_next_time(shop: Workshop, tmp_path: Path) -> None:
    """Nothing is known of the first run: it is stopped between two epochs, since the third would not fit."""
    first = sweep(plan(shop), tmp_path, "28s", clock=shop.clock, device="cpu")
    assert first.records == {}
    assert len(first.missing) == 3
    assert shop.trained == [(NAMES[0], 1), (NAMES[0], 2)]
    assert shop.clock.now <= 1000 + 28
    second = sweep(plan(shop), tmp_path, "28s", clock=shop.clock, device="cpu")
    assert shop.trained[2] == (NAMES[0], 3)  # not from the beginning
    assert [one["run"] for one in second.records.values()] == [NAMES[0]]


def test_the_budget_ends_a_run_between_two_batches(shop: Workshop, tmp_path: Path) -> None:
    shop.epoch_seconds = 100.0
    swept = sweep(plan(shop), tmp_path, "60s", clock=shop.clock, device="cpu")
    assert shop.clock.now == 1000 + 100  # the batch in flight, of 50 s, is finished
    assert swept.records == {}


def test_in_pieces_or_in_one_go_the_records_are_the_same(shop: Workshop, tmp_path: Path) -> None:
    whole = sweep(plan(shop), tmp_path / "whole", clock=shop.clock, device="cpu")
    shop.trained.clear()
    calls = 0
    while not (pieces := sweep(plan(shop), tmp_path / "pieces", "28s", clock=shop.clock, device="cpu")).complete:
        calls += 1
        assert calls < 12
    assert calls > 1
    assert len(shop.trained) == 9  # no epoch was trained twice
    assert recorded(tmp_path / "pieces") == recorded(tmp_path / "whole")
    for key, record in whole.records.items():
        ours = read_outcomes(tmp_path / "pieces" / pieces.records[key]["outcomes"])
        theirs = read_outcomes(tmp_path / "whole" / record["outcomes"])
        assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


def test_a_new_measurement_does_not_train_again_while_the_weights_are_there(shop: Workshop, tmp_path: Path) -> None:
    sweep(plan(shop), tmp_path, clock=shop.clock, device="cpu")
    more = plan(shop)
    more = replace(more, runs=tuple(replace(run, measurements=(Coin(shop.clock, salt=1),)) for run in more.runs))
    swept = sweep(more, tmp_path, clock=shop.clock, device="cpu")
    assert swept.complete
    assert len(shop.trained) == 9
    assert len(recorded(tmp_path)) == 6


def test_weights_can_be_dropped(shop: Workshop, tmp_path: Path) -> None:
    small = plan(shop, keep_weights=False)
    swept = sweep(small, tmp_path, clock=shop.clock, device="cpu")
    assert swept.complete
    left = sorted(file.name for file in (tmp_path / "work" / small.runs[0].id).rglob("*"))
    assert left == ["metrics.jsonl", "weights.txt"]  # and the configuration and environment of a real run
    assert sweep(small, tmp_path, clock=shop.clock, device="cpu").complete
    assert len(shop.trained) == 9


def look(subjects, folder, word):  # type: ignore[no-untyped-def]
    """A group's function: what it saw, and a figure."""
    (folder / "figure.txt").write_text(word)
    return {"n": len(subjects), "seen": [subject.deployed.recipe for subject in subjects.values()]}


def grouped(shop: Workshop, **options: object) -> Plan:
    """Two of the three runs are looked at together; nothing is measured on the second alone."""
    single = plan(shop).runs
    bare = replace(single[1], measurements=())
    return merge("grouped", single[:1], groups=[Group("pair", (single[0], bare), look, {"word": "drawn"})], **options)  # type: ignore[arg-type]


def test_a_group_is_looked_at_once_all_its_models_are_trained(shop: Workshop, tmp_path: Path) -> None:
    pair = grouped(shop)
    first = sweep(pair, tmp_path, "50s", clock=shop.clock, device="cpu")
    assert first.missing == (("pair", "together"),)
    assert not (tmp_path / "figure.txt").exists()
    second = sweep(pair, tmp_path, "50s", clock=shop.clock, device="cpu")
    assert second.complete
    assert (tmp_path / "figure.txt").read_text() == "drawn"
    record = second.records[pair.groups[0].id]
    assert record["result"] == {"n": 2, "seen": [run.id for run in pair.runs]}
    assert list(record["configs"]) == list(NAMES[:2])
    assert record["trained"][NAMES[1]]["best_epoch"] == 3
    work = len(shop.trained)
    (tmp_path / "figure.txt").unlink()
    assert sweep(pair, tmp_path, clock=shop.clock, device="cpu").complete
    assert len(shop.trained) == work == 6
    assert not (tmp_path / "figure.txt").exists()  # recorded, so not done again


def test_weights_are_dropped_only_after_the_groups_have_seen_them(shop: Workshop, tmp_path: Path) -> None:
    pair = grouped(shop, keep_weights=False)
    assert sweep(pair, tmp_path, clock=shop.clock, device="cpu").complete
    assert not list(tmp_path.glob("work/*/checkpoints"))
    assert not list(tmp_path.glob("work/*/trained.json"))
    assert len(shop.trained) == 6


def test_a_half_finished_second_training_is_not_taken_for_a_whole_one(shop: Workshop, tmp_path: Path) -> None:
    small = plan(shop, keep_weights=False)
    sweep(small, tmp_path, clock=shop.clock, device="cpu")
    more = replace(small, runs=(replace(small.runs[0], measurements=(Coin(shop.clock, salt=1),)),))
    shop.trained.clear()
    assert not sweep(more, tmp_path, "15s", clock=shop.clock, device="cpu").complete
    assert sweep(more, tmp_path, clock=shop.clock, device="cpu").complete
    assert [epoch for _, epoch in shop.trained] == [1, 2, 3]


def test_one_failure_does_not_stop_the_others(shop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = shop.train

    def train(config, path, **options):  # type: ignore[no-untyped-def]
        if config.framework == "alp":
            raise HardsphereError("The loss is not finite.")
        return good(config, path, **options)

    monkeypatch.setattr(worker, "train", train)
    swept = sweep(plan(shop), tmp_path, clock=shop.clock, device="cpu")
    assert swept.failed == {NAMES[1]: "The loss is not finite."}
    assert [one["run"] for one in swept.records.values()] == [NAMES[0], NAMES[2]]
    assert on_record(plan(shop), tmp_path).failed == swept.failed  # another process knows it, too
    monkeypatch.setattr(worker, "train", good)
    assert not sweep(plan(shop), tmp_path, clock=shop.clock, device="cpu").failed
    assert not on_record(plan(shop), tmp_path).failed


def test_a_function_of_ones_own_that_fails_does_not_stop_the_others(shop: Workshop, tmp_path: Path) -> None:
    def broken(subject: object) -> dict[str, object]:
        raise ValueError("That was not foreseen.")

    def unheard_of(subject: object) -> dict[str, object]:
        return {"weights": np.ones(3)}  # fits into no JSON

    own = (Call("broken", broken), Call("unheard of", unheard_of), Coin(shop.clock))
    swept = sweep(Plan("own", (Run("a", recipe(NAMES[0]), own),)), tmp_path, clock=shop.clock, device="cpu")
    assert [one["measurement"]["name"] for one in swept.records.values()] == ["coin"]
    assert swept.failed["a, broken"] == "ValueError: That was not foreseen."
    assert swept.failed["a, unheard of"].startswith("TypeError: ")


def test_a_full_disk_ends_the_sweep(shop: Workshop, tmp_path: Path) -> None:
    def full(subject: object) -> dict[str, object]:
        raise OSError(28, "No space left on device")

    own = (Call("full", full), Coin(shop.clock))
    with pytest.raises(OSError, match="No space left"):
        sweep(Plan("own", (Run("a", recipe(NAMES[0]), own),)), tmp_path, clock=shop.clock, device="cpu")


def test_a_function_of_ones_own_may_say_what_it_likes(shop: Workshop, tmp_path: Path) -> None:
    """Even words that mean something in the facts of a suite."""

    def facts(subject: object) -> dict[str, object]:
        return {"model": "mine", "columns": {"own": {"accuracy": 0.5, "interval": [0.2, 0.8]}}}

    own = Plan("own", (Run("a", recipe(NAMES[0]), (Call("own", facts),)),))
    swept = sweep(own, tmp_path, clock=shop.clock, device="cpu")
    assert "50.00 [20.0, 80.0]" in sweep_markdown(swept)


def test_runs_are_paired_only_on_the_same_images(shop: Workshop, tmp_path: Path) -> None:
    two = Plan("two", tuple(Run(f"{n}", recipe(NAMES[n]), (Coin(shop.clock, salt=n),)) for n in (0, 1)))
    one, other = sweep(two, tmp_path, clock=shop.clock, device="cpu").records.values()
    store = Store(tmp_path)
    direct = [np.random.default_rng(n).random(100) < 0.5 for n in (0, 1)]
    assert store.compare([(one, other)], ["robust"]).value == pytest.approx(direct[0].mean() - direct[1].mean())
    with pytest.raises(HardsphereError, match="'mim' was not measured on '0'"):
        store.compare([(one, other)], ["mim"])
    other = {**other, "result": {**other["result"], "data": "other images"}}
    with pytest.raises(HardsphereError, match="different images"):
        store.compare([(one, other)], ["robust"])


def test_a_file_that_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("not json\n")
    with pytest.raises(HardsphereError, match="no record of a sweep"):
        Store(tmp_path)


TINY = {
    "name": "tiny",
    "set": {"epochs": 1, "model": "cnn-4", "attack.steps": 1, "batch": 256, "select.steps": 1, "select.limit": 32},
    "runs": [{"recipe": ["digits/pgd", "digits/pgd-he"]}],
    "measure": [
        {"suite": "quick", "limit": 40},
        {"suite": "paper", "limit": 30, "only": ["pgd-20", "fgsm"], "limits": {"fgsm": 10}, "eps": "run"},
        {"call": "test_sweep:parameters"},
    ],
}


def parameters(subject):  # type: ignore[no-untyped-def]
    """A measurement of one's own."""
    return {"parameters": sum(weights.numel() for weights in subject.deployed.model.parameters())}


def test_a_real_sweep_says_what_evaluate_says(tmp_path: Path) -> None:
    swept = sweep(TINY, tmp_path / "out", device="cpu", command="hardsphere sweep tiny.yaml")
    assert swept.complete
    assert len(swept.records) == 6
    config = recipe("digits/pgd-he", TINY["set"])
    apart = train(config, tmp_path / "apart", device="cpu")
    deployed = load(apart.path)
    evaluation = evaluate(deployed.model, load_data("digits").test, ball=deployed.ball, suite="quick", limit=40)
    (record,) = [
        one for one in swept.records.values() if one["run"] == "digits/pgd-he" and one["measurement"]["name"] == "quick"
    ]
    held = read_outcomes(tmp_path / "out" / record["outcomes"])
    survivors = evaluation.survivors()
    assert held["robust"].tolist() == [sample.sample in survivors for sample in evaluation.ledger.samples()]
    assert {name: bits.mean() for name, bits in held.items() if name in evaluation.by_attack} == evaluation.by_attack
    assert held["clean"].mean() == evaluation.clean_accuracy
    columns = record["result"]["columns"]
    assert columns["robust"]["accuracy"] == evaluation.robust_accuracy
    assert columns["robust"]["n"] == 40
    assert record["result"]["protocol"] == "honest"
    assert record["command"] == "hardsphere sweep tiny.yaml"
    assert record["trained"]["minutes"] > 0
    assert record["trained"]["best_epoch"] == 1
    assert record["id"] == record_id(config, _quick())
    paper = next(one for one in swept.records.values() if one["measurement"]["name"] == "paper")
    assert paper["result"]["protocol"] == "paper"
    assert [len(bits) for bits in read_outcomes(tmp_path / "out" / paper["outcomes"]).values()] == [30, 30, 10, 30]
    text = sweep_markdown(swept)
    assert f"| digits/pgd-he | 0 | 40 | {100 * evaluation.clean_accuracy:.2f} [" in text
    assert text.count("a column counts all up to it") == 1  # quick is a cascade, paper is not
    assert "Protocol *paper* in the ball linf 0.2. Accuracy in %" in text
    assert text.count(" (n = 10) |") == 2  # of fgsm, which had fewer images than the line says
    assert f"- Test images {paper['result']['data']}\n" in text
    assert text.count("- Command: `hardsphere sweep tiny.yaml`") == 3
    assert f"parameters |\n| --- | ---: |\n| digits/pgd | {_parameters('digits/pgd')} |" in text
    called = [one["result"] for one in swept.records.values() if one["measurement"]["kind"] == "call"]
    assert called[0]["parameters"] > 0


def test_weights_are_not_judged_on_other_data_than_they_were_trained_with(tmp_path: Path) -> None:
    """Its test images may be among those that were trained on, and its numbers are no neighbours of the others."""
    for name in "ab":
        draw = np.random.default_rng(ord(name))
        images, labels = draw.integers(0, 256, (100, 3, 16, 16), np.uint8), np.arange(100) % 10
        np.savez(tmp_path / name, x_train=images[:60], y_train=labels[:60], x_test=images[60:], y_test=labels[60:])
    arrays = {**TINY, "runs": ["digits/pgd"], "set": {**TINY["set"], "dataset": "arrays"}, "measure": ["quick"]}
    more = {**arrays, "measure": ["quick", {"call": "test_sweep:parameters"}]}
    assert sweep(arrays, tmp_path / "out", data_dir=tmp_path / "a.npz", device="cpu").complete
    other = sweep(more, tmp_path / "out", data_dir=tmp_path / "b.npz", device="cpu")
    (reason,) = other.failed.values()
    assert "The test images of 'arrays' are not those of when 'digits/pgd' was trained" in reason
    assert sweep(more, tmp_path / "out", data_dir=tmp_path / "a.npz", device="cpu").complete


class Ticking:
    """A clock that ticks whenever somebody looks at it: every batch takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_real_work_in_pieces_ends_where_it_ends_in_one_go(tmp_path: Path) -> None:
    """Training is cut between epochs and evaluation between batches, again and again."""
    measured = [{"suite": "quick", "limit": 40}, {"suite": "paper", "limit": 30, "only": ["pgd-20"], "eps": "run"}]
    small = {**TINY, "runs": ["digits/pgd-he"], "set": {**TINY["set"], "epochs": 3}, "measure": measured}
    whole = sweep(small, tmp_path / "whole", device="cpu")
    clock, calls, before = Ticking(), 0, -1
    options = {"device": "cpu", "clock": clock, "batch": 8}
    while not (pieces := sweep(small, tmp_path / "pieces", f"{14 + calls % 3}s", **options)).complete:
        calls += 1
        assert calls < 20
        before = max(before, len(pieces.records))
    assert calls >= 4
    assert before == 1  # one measurement was recorded while the other was still to do
    for key, record in whole.records.items():
        again = pieces.records[key]
        assert again["result"]["model"] == record["result"]["model"]  # the weights, bit for bit
        ours, theirs = (read_outcomes(swept.out / one["outcomes"]) for swept, one in ((pieces, again), (whole, record)))
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


def _parameters(name: str) -> int:
    """A CNN of width 4 on digits: see `hardsphere.models.cnn`."""
    from hardsphere.train.deployed import build_model

    model = build_model(recipe(name, TINY["set"]), load_data("digits"))
    return sum(weights.numel() for weights in model.parameters())


def _quick():  # type: ignore[no-untyped-def]
    from hardsphere.reproduce.measures import attacks

    return attacks("quick", limit=40)
