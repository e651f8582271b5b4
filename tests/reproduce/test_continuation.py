"""Going on from the records alone: weights that are gone, trainings that do not repeat, several processes at once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from made_up import Coin, Workshop, workshop

from hardsphere.errors import HardsphereError
from hardsphere.recipes import recipe
from hardsphere.reproduce import reproduce
from hardsphere.reproduce.due import recorded
from hardsphere.reproduce.plan import Group, Plan, Run, merge
from hardsphere.reproduce.store import Store
from hardsphere.reproduce.sweeping import sweep
from hardsphere.reproduce.workspace import claimed

NAMES = ("digits/pgd", "digits/pgd-he")


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """Training that never gives the same weights twice, as on a GPU."""
    made = workshop(monkeypatch)
    made.repeatable = False
    return made


def coins(shop: Workshop, salts: Sequence[int] = (0, 1, 2), limit: int | None = None) -> tuple[Coin, ...]:
    measured: list[tuple[int, str]] = []
    return tuple(Coin(shop.clock, f"coin-{salt}", 5.0, salt, limit, measured) for salt in salts)


def plan(shop: Workshop, salts: Sequence[int] = (0, 1, 2), limit: int | None = None) -> Plan:
    measurements = coins(shop, salts, limit)
    return Plan("made up", tuple(Run(name, recipe(name, {"epochs": 3}), measurements) for name in NAMES))


def go(shop: Workshop, what: Plan, out: Path, budget: str | None = None):  # type: ignore[no-untyped-def]
    return sweep(what, out, budget, clock=shop.clock, device="cpu")


def test_what_is_recorded_is_not_trained_again_though_its_weights_are_gone(shop: Workshop, tmp_path: Path) -> None:
    first = go(shop, plan(shop), tmp_path)
    shutil.rmtree(tmp_path / "work")
    again = go(shop, plan(shop), tmp_path)
    assert again.complete
    assert again.records == first.records
    assert shop.trainings == 2


def test_a_partial_row_whose_weights_are_gone_is_measured_anew_as_a_whole(shop: Workshop, tmp_path: Path) -> None:
    """30 s of training and 5 for each measurement: 38 s are enough for two of the three; then the machine is lost."""
    partial = go(shop, plan(shop), tmp_path, "38s")
    run = plan(shop).runs[0]
    assert len(partial.records) == 2
    (old,) = Store(tmp_path).weights_of(run.id)
    shutil.rmtree(tmp_path / "work")
    whole = plan(shop)
    done = go(shop, whole, tmp_path)
    assert done.complete
    store = Store(tmp_path)
    row = store.of_one_training(run)
    (new,) = {record["weights"] for record in row.values()}
    assert new != old
    assert len(row) == 3
    assert whole.runs[0].measurements[0].measured[:3] == [(salt, new) for salt in (0, 1, 2)]  # type: ignore[attr-defined]
    assert all(record["trained"]["instead_of"] == [old] for record in row.values())
    assert store.weights_of(run.id) == [old, new]  # what was measured before stays on record
    assert len(store.lines) == 2 + 6
    shutil.rmtree(tmp_path / "work")
    assert go(shop, plan(shop), tmp_path).complete
    assert shop.trainings == 3


def test_weights_that_repeat_bit_for_bit_are_not_measured_twice(shop: Workshop, tmp_path: Path) -> None:
    shop.repeatable = True
    go(shop, plan(shop), tmp_path, "38s")
    shutil.rmtree(tmp_path / "work")
    whole = plan(shop)
    assert go(shop, whole, tmp_path).complete
    salts = [salt for salt, weights in whole.runs[0].measurements[0].measured if whole.runs[0].id in weights]  # type: ignore[attr-defined]
    assert salts == [2]
    assert all(not record["trained"]["instead_of"] for record in Store(tmp_path).lines)


def test_a_row_keeps_to_the_set_of_weights_that_has_most(shop: Workshop, tmp_path: Path) -> None:
    """A whole row, then another table that needs one more measurement of the same training: neither mixes."""
    go(shop, plan(shop, (0, 1)), tmp_path)
    (first,) = Store(tmp_path).weights_of(plan(shop).runs[0].id)
    shutil.rmtree(tmp_path / "work")
    go(shop, plan(shop, (1, 2)), tmp_path)
    store = Store(tmp_path)
    for salts, wanted in (((0, 1), True), ((1, 2), False)):
        row = store.of_one_training(plan(shop, salts).runs[0])
        assert len(row) == 2
        assert {record["weights"] == first for record in row.values()} == {wanted}
    assert recorded(plan(shop, (0, 1)), store, {}).complete
    assert recorded(plan(shop, (1, 2)), store, {}).complete


def test_another_number_of_images_takes_the_place_of_what_is_missing(shop: Workshop, tmp_path: Path) -> None:
    go(shop, plan(shop, (0,), limit=40), tmp_path)
    store, wanted = Store(tmp_path), plan(shop, (0,))
    row = store.of_one_training(wanted.runs[0])
    assert store.outcomes(row["coin-0"])["robust"].tolist() == tossed(0)[:40].tolist()
    assert len(recorded(wanted, store, {}).missing) == 2  # it is shown, and still to be done
    one, other = (store.of_one_training(run)["coin-0"] for run in wanted.runs)
    assert store.compare([(one, other)], ["robust"]).n == 40


def tossed(salt: int) -> np.ndarray:
    return np.random.default_rng(salt).random(100) < 0.5


def seen(subjects, folder):  # type: ignore[no-untyped-def]
    return {"n": 2, "seen": [subject.deployed.model for subject in subjects.values()]}


def test_a_group_is_looked_at_before_the_expensive_measurements(shop: Workshop, tmp_path: Path) -> None:
    """Once the second model is trained: a machine that is lost after that has not lost the analysis."""
    single = plan(shop)
    both = merge("both", single.runs, groups=[Group("pair", single.runs, seen)])
    assert go(shop, both, tmp_path).complete
    assert [record["run"] for record in Store(tmp_path).lines] == [NAMES[0]] * 3 + ["pair"] + [NAMES[1]] * 3


def test_what_another_process_is_at_is_left_to_it(shop: Workshop, tmp_path: Path) -> None:
    both = plan(shop)
    with claimed(tmp_path / "work" / f"{both.runs[0].id}.lock") as ours:
        assert ours
        swept = go(shop, both, tmp_path)
    assert {name for name, _ in swept.missing} == {NAMES[0]}
    assert shop.trained == [(NAMES[1], epoch) for epoch in (1, 2, 3)]
    assert go(shop, both, tmp_path).complete


def test_a_failing_device_does_not_stop_the_rest(
    shop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(self, subject):  # type: ignore[no-untyped-def]
        if self.salt == 1:
            raise RuntimeError("CUDA error: out of patience\nmore of it")
        return good(self, subject)

    good = Coin.measure
    monkeypatch.setattr(Coin, "measure", measure)
    swept = go(shop, plan(shop), tmp_path)
    names = [f"{name}, coin-1" for name in NAMES]
    assert swept.failed == dict.fromkeys(names, "RuntimeError: CUDA error: out of patience")
    assert len(swept.records) == 4


def test_exchanged_weights_are_noticed(shop: Workshop, tmp_path: Path) -> None:
    one = Plan("one", plan(shop).runs[:1])
    go(shop, one, tmp_path, "36s")
    (tmp_path / "work" / one.runs[0].id / "weights.txt").write_text("somebody else's")
    swept = go(shop, one, tmp_path)
    assert set(swept.failed) == {f"{NAMES[0]}, coin-2"}
    assert "not those that were trained there" in swept.failed[f"{NAMES[0]}, coin-2"]


def test_the_logs_of_trainings_are_kept(shop: Workshop, tmp_path: Path) -> None:
    go(shop, plan(shop), tmp_path)
    logs = sorted((tmp_path / "training").iterdir())
    assert len(logs) == 2
    assert [json.loads(line)["epoch"] for line in logs[0].read_text().splitlines()] == [1, 2, 3]


EARLIER = Path(__file__).parent / "earlier"
"""Records of PGD-AT and PGD-AT + HE at the smoke scale, as an earlier version wrote them; never to be made anew."""


def test_records_of_an_earlier_version_are_continued_and_rendered(tmp_path: Path) -> None:
    """All of it is recognised, so that nothing is trained or measured again, and the pages show the numbers."""
    shutil.copytree(EARLIER, tmp_path / "out")
    before = (tmp_path / "out" / "results.jsonl").read_bytes()
    done = reproduce("ablation,gradients", out=tmp_path / "out", only=["pgd", "pgd-he"], device="cpu")
    assert done.swept.complete
    assert (tmp_path / "out" / "results.jsonl").read_bytes() == before
    table, analysis = (file.read_text(encoding="utf-8") for file in done.files)
    assert "| **PGD-AT** | 79.17 [59.5, 90.8] | 37.50 [21.2, 57.3] |" in table
    assert "| **PGD-AT + HE − PGD-AT** | +8.33 [-6.6, +25.8] | +4.17 [-21.3, +29.1] |" in table
    assert "| PGD-20 | paper | 20 steps of 0.0194, on the cross-entropy, the last iterate counts;" in table
    assert "| `network.fc.weight` | 1.30 [1.17, 1.43] | 1.25 | 1.70 [1.13, 2.26] | 1.30 |" in analysis


# ---------------------------------------------------------------------------------------------------------------------
# The file of records
# ---------------------------------------------------------------------------------------------------------------------


def line(index: int) -> dict[str, object]:
    return {"id": f"{index}", "run": "r", "weights": "w", "measurement": {"name": "m"}, "result": {}}


def test_a_line_that_was_never_finished_is_forgotten(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add(line(1), {})
    with store.file.open("a") as stream:
        stream.write('{"id": "half')
    assert [one["id"] for one in Store(tmp_path).lines] == ["1"]
    store.add(line(2), {})
    assert [one["id"] for one in Store(tmp_path).lines] == ["1", "2"]


@pytest.mark.parametrize("text", [b'{"id": 3}\n', b"\x00\x00\n", b"\xff\xfe\n"])
def test_a_line_that_is_no_record_is_refused(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_bytes(text)
    with pytest.raises(HardsphereError, match="no record of a sweep"):
        Store(tmp_path)


def test_several_writers_share_one_file(tmp_path: Path) -> None:
    """Each has opened the file for itself, as processes do; a lock belongs to what was opened."""

    def write(name: str) -> None:
        store = Store(tmp_path)
        for index in range(10):
            store.add(line(index) | {"id": f"{name}{index}", "filler": "x" * 5000}, {"bits": np.ones(9, np.bool_)})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, "abcd"))
    lines = Store(tmp_path).lines
    assert len(lines) == 40
    for name in "abcd":
        assert [one["id"] for one in lines if one["id"][0] == name] == [f"{name}{index}" for index in range(10)]


@pytest.mark.check
def test_two_processes_share_the_work_of_one_table(tmp_path: Path) -> None:
    """Every row is trained once, and what is printed at the end is the whole table."""
    command = [sys.executable, "-m", "hardsphere", "reproduce", "table2,gradients", "--out", str(tmp_path / "two")]
    command += ["--only", "pgd,pgd-he", "--device", "cpu", "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    other = (tmp_path / "two" / "work" / "process-2.log").read_text()
    assert [text.count(": training into") for text in (done.stderr, other)] == [1, 1]
    assert "--processes 2" in done.stdout  # minutes are those of a shared machine
    assert (tmp_path / "two" / "table2.md").read_text() in done.stdout
    assert "missing" not in done.stdout
    lines = Store(tmp_path / "two").lines
    assert len({one["id"] for one in lines}) == len(lines) == 2 * 6 + 1
    table = json.loads((tmp_path / "two" / "table2.json").read_text())
    assert [row["title"] for row in table["rows"] if not row["missing"]] == ["PGD-AT", "PGD-AT + HE"]
