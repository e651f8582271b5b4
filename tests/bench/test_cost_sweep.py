from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hardsphere.bench import costs
from hardsphere.bench.chart import write_sweep
from hardsphere.bench.costs import AXES, Axis, Point, Setting, Swept, axes_named, sweep_costs
from hardsphere.bench.laws import fit
from hardsphere.errors import HardsphereError

CPU = torch.device("cpu")


def made_up(setting: Setting, step_seconds: float, device: str = "a machine") -> Point:
    rounds = (0.9 * step_seconds, step_seconds, 1.2 * step_seconds)
    environment = {"device": device, "torch": "2", "commit": None, "source": "s1"}
    return Point(setting, step_seconds, rounds, 1.0, 1.0, 0.25, 1.0, environment)


@pytest.mark.parametrize("powers", [(0, 1), (0, 2), (0, 1, 2)])
def test_a_fit_recovers_what_was_planted(powers: tuple[int, ...]) -> None:
    values, planted = [1, 2, 5, 10, 20], (0.003, 0.0007, 0.0001)

    def time(value: float) -> float:
        return sum(coefficient * value**power for coefficient, power in zip(planted, powers, strict=False))

    law = fit(values, [time(value) for value in values], powers)
    assert law.coefficients == pytest.approx(planted[: len(powers)])
    assert law.departures == pytest.approx([0] * 5, abs=1e-9)
    assert law.outside == {}
    assert law.at(4) == pytest.approx(time(4))
    assert sum(law.parts(4)) == pytest.approx(time(4))


def test_where_one_part_overtakes_the_next() -> None:
    values = [1, 2, 5, 10, 20]
    law = fit(values, [8 + 4 * x + 0.5 * x**2 for x in values], (0, 1, 2))
    assert law.crossings == pytest.approx((2, 8))
    assert fit(values, [9 + 0.25 * x**2 for x in values], (0, 2)).crossings == pytest.approx((6,))
    assert fit(values, [10 * x - 2 for x in values]).crossings == ()  # a fixed part below zero leads nowhere


def test_a_fit_tells_where_it_fails() -> None:
    values = [1, 2, 3, 5, 7, 10, 15, 20]
    times = [0.010 + 0.001 * value for value in values]
    times[-1] *= 1.5
    law = fit(values, times)
    assert law.largest_departure[0] == 20
    assert law.outside[20] > 0.1


def test_a_law_of_one_point_is_none() -> None:
    with pytest.raises(HardsphereError, match="at least 2 different values"):
        fit([3, 3], [1.0, 1.0])


def test_one_real_point() -> None:
    point = costs.measure(Setting("cnn-2", 4, 1), 1e12, 0.001, CPU)
    assert len(point.rounds_step_seconds) == 5
    assert min(point.rounds_step_seconds) <= point.step_seconds <= max(point.rounds_step_seconds)
    assert point.images_per_second == pytest.approx(4 / point.step_seconds)


def test_the_sweep_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Setting] = []

    def measure(setting: Setting, gemm: float, round_seconds: float, device: torch.device) -> Point:
        measured.append(setting)
        point = made_up(setting, 0.01 + 0.001 * setting.attack_steps)
        return replace(point, environment=costs.environment(device))

    monkeypatch.setattr(costs, "measure", measure)
    monkeypatch.setattr(costs, "gemm_rate", lambda device: 1e12)
    clock = iter(float(second) for second in range(0, 10_000, 10))  # every look at the clock finds 10 s gone
    monkeypatch.setattr(costs.time, "monotonic", lambda: next(clock))
    axes = {
        "k": Axis("attack steps K", "tiny", {k: Setting("cnn-2", 4, k) for k in (1, 2, 3)}),
        "batch": Axis("batch", "tiny", {b: Setting("cnn-2", b, 2) for b in (4, 8)}),
    }
    first = sweep_costs(tmp_path, axes=axes, budget=45, device=CPU)
    assert 1 <= len(measured) < 4
    assert len(first.missing) == 4 - len(measured)  # K = 2 at batch 4 lies on both axes
    with (tmp_path / "points.jsonl").open("a") as stream:
        stream.write('{"setting": {"mod')  # killed while writing
    second = sweep_costs(tmp_path, axes=axes, device=CPU)
    assert second.missing == ()
    assert len(measured) == len(set(measured)) == 4
    assert list(second.points["k"]) == [1, 2, 3]
    again = sweep_costs(tmp_path, axes=axes, device=CPU)
    assert again == second
    assert len(measured) == 4


@pytest.mark.parametrize("other", ["device", "torch", "source"])
def test_points_of_another_machine_or_code_are_not_mixed_in(other: str, tmp_path: Path) -> None:
    point = made_up(Setting("cnn-2", 4, 1), 1.0)
    here = costs.environment(CPU)
    costs._append(tmp_path / "points.jsonl", replace(point, environment=here | {other: "of yore"}))
    axis = Axis("attack steps K", "tiny", {k: Setting("cnn-2", 4, k) for k in (1, 2)})
    with pytest.raises(HardsphereError, match=re.escape(f", of yore and not {here[other]}:")):
        sweep_costs(tmp_path, axes={"k": axis}, device=CPU)


@pytest.mark.parametrize("line", [b"null", b"5", b'{"setting": 3}', b"\xff\xfe", b"\0\0\0"])
def test_a_damaged_line_is_no_point(line: bytes, tmp_path: Path) -> None:
    file = tmp_path / "points.jsonl"
    file.write_bytes(line + b"\n")
    costs._append(file, made_up(Setting("cnn-2", 4, 1), 1.0))
    assert list(costs.read_points(file)) == [Setting("cnn-2", 4, 1)]


def test_the_page_of_a_whole_sweep_is_written_anywhere(tmp_path: Path) -> None:
    axis = Axis("attack steps K", "tiny", {k: Setting("cnn-2", 4, k) for k in (1, 2, 3)})
    for setting in axis.settings.values():
        costs._append(tmp_path / "points.jsonl", made_up(setting, 1.0 * setting.attack_steps))
    swept = sweep_costs(tmp_path, axes={"k": axis}, device=CPU)
    assert [point.step_seconds for point in swept.points["k"].values()] == [1.0, 2.0, 3.0]
    assert swept.missing == ()


def test_laws_figure_and_text(tmp_path: Path) -> None:
    points = {
        "k": {k: made_up(s, 0.002 + 0.001 * k) for k, s in AXES["k"].settings.items()},
        "batch": {b: made_up(s, max(0.010, 1e-4 * b)) for b, s in AXES["batch"].settings.items()},
        "width": {w: made_up(s, 0.020 + 0.002 * w + 0.0005 * w**2) for w, s in AXES["width"].settings.items()},
    }
    files = write_sweep(Swept(points, ()), AXES, tmp_path)
    assert {file.name for file in files} == {"law.json", "sweep.md", "sweep.png"}
    law = json.loads((tmp_path / "law.json").read_text())
    assert law["k"]["coefficients"] == pytest.approx([0.002, 0.001])
    assert law["k"]["crossings"] == pytest.approx([2])
    assert law["width"]["coefficients"] == pytest.approx([0.020, 0.002, 0.0005])
    assert law["batch"]["outside"]
    text = (tmp_path / "sweep.md").read_text()
    assert "t = 2 + 1 x ms" in text
    assert "t = 20 + 2 x + 0.5 x² ms" in text
    assert "The fixed part is larger below 2: there the cost is closer to constant than to linear." in text
    assert "The part in x is overtaken above 4: there the cost is no longer linear." in text
    assert "Measurement departs from the law by more than 10% at" in text
    assert "| 20 | 22.00 | 19.80 to 26.40 | 22.00 | 1 | 1 | 25% |" in text
    assert "`hardsphere bench sweep --out DIR`, torch 2, source s1." in text
    assert (tmp_path / "sweep.png").stat().st_size < 200_000


def test_a_fit_with_a_part_below_zero_explains_nothing(tmp_path: Path) -> None:
    points = {"k": {k: made_up(s, 0.01 * k - 0.002) for k, s in AXES["k"].settings.items()}}
    write_sweep(Swept(points, ()), AXES, tmp_path)
    text = (tmp_path / "sweep.md").read_text()
    assert "t = -2 + 10 x ms. A part of the fit is below zero" in text
    assert "The fixed part" not in text


def test_too_few_points_make_no_law(tmp_path: Path) -> None:
    assert write_sweep(Swept({"k": {}}, ("all",)), AXES, tmp_path) == []


def test_an_unknown_axis() -> None:
    assert list(axes_named(["width"])) == ["width"]
    assert axes_named([]) == AXES
    with pytest.raises(HardsphereError, match="Did you mean 'batch'"):
        axes_named(["batches"])
