from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hardsphere.bench import bench_training
from hardsphere.bench.first_use import cache_is_warm, compile_phases
from hardsphere.bench.kernels import PRODUCTS, profile_steps
from hardsphere.bench.subject import TrainingRun, flops_per_image, forward_flops, random_images
from hardsphere.bench.training import as_text
from hardsphere.errors import HardsphereError
from hardsphere.recipes import recipe
from hardsphere.train.compiling import cache_place
from hardsphere.train.deployed import build_model

CPU = torch.device("cpu")
TINY = {"model": "cnn-4", "batch": 8}


def test_arithmetic_of_a_step_is_counted() -> None:
    """K attack passes of two forwards' worth and an update of three; TRADES adds a target and a second update pass."""
    overrides = {"model": "cnn-4", "attack.steps": "5", "batch": "8"}

    def forwards(name: str) -> float:
        single = flops_per_image(recipe("cifar10/standard", overrides)) / 3
        return flops_per_image(recipe(name, overrides)) / single

    assert forwards("cifar10/pgd") == 5 * 2 + 3
    assert forwards("cifar10/trades") == 1 + 5 * 2 + 3 + 3
    assert forwards("cifar10/free") == 8 * 3


def test_the_forward_pass_of_a_known_network() -> None:
    """PreActResNet-18 on 32 x 32 images: 1.11 GFLOP per forward pass."""
    per_image = flops_per_image(recipe("cifar10/standard", {"model": "preactresnet18"}))
    assert abs(per_image / 3 / 1.11e9 - 1) < 0.01


def test_it_runs_on_a_cpu() -> None:
    measured = bench_training("cifar10/pgd-he", TINY | {"attack.steps": 2}, steps=1, device=CPU)
    assert measured.images_per_second > 0
    assert measured.head_overhead.keys() == {"he", "mhe"}
    assert measured.head_rounds_seconds.keys() == {"plain", "he", "mhe"}
    assert measured.peak_memory_gib is None
    assert measured.compile_seconds is None
    assert measured.first_step_seconds > 0
    assert sum(measured.first_step_parts.values()) == pytest.approx(measured.first_step_seconds)


def test_the_rounds_are_kept_and_the_rate_is_their_median() -> None:
    measured = bench_training("cifar10/fast-he", TINY, steps=1, device=CPU, heads=False)
    rounds = sorted(measured.rounds_images_per_second)
    assert len(rounds) == 5
    assert measured.images_per_second == pytest.approx(rounds[2])
    assert measured.epoch_seconds == pytest.approx(50_000 / measured.images_per_second)
    assert measured.attack_steps == 1  # the recipe's own
    assert measured.head_overhead == {}


def test_what_a_person_reads() -> None:
    measured = bench_training("cifar10/fast-he", TINY, steps=1, device=CPU, heads=False)
    text = as_text(measured)
    assert text.startswith("cifar10/fast-he, cnn-4, batch 8, on ")
    assert "GiB" not in text
    assert "compiling" not in text
    assert "cost of" not in text
    on_gpu = replace(
        measured,
        images_per_second=11859.4,
        rounds_images_per_second=[11869.0, 11831.0],
        over_plain_loop=7.83,
        tflops=303.1,
        gemm_tflops=765.0,
        gemm_share=0.396,
        peak_memory_gib=0.84,
        compile_seconds=45.2,
        head_overhead={"he": 0.009, "mhe": -0.001},
        remarks=["The network runs slower."],
    )
    lines = [" ".join(line.split()) for line in as_text(on_gpu).splitlines()]
    assert "images/s 11,859 11,831 to 11,869 in its rounds" in lines
    assert "TFLOP/s 303.10 40% of the 765.00 of matrix products" in lines
    assert "peak memory 0.8 GiB" in lines
    assert any(line.endswith("45.2 s of compiling until full speed") for line in lines)
    assert lines[-3:] == [
        "cost of HE +0.9% over the plain head",
        "cost of m-HE -0.1% over the plain head",
        "The network runs slower.",
    ]


@pytest.mark.parametrize(
    ("name", "changes", "shape", "classes"),
    [
        ("digits/fast-he", {}, (1, 8, 8), 10),
        ("cifar100/fast-he", {}, (3, 32, 32), 100),
        ("folder/fast-he", {"data.size": 48}, (3, 48, 48), 10),
    ],
)
def test_images_and_classes_are_those_of_the_recipe(
    name: str, changes: dict[str, int], shape: tuple[int, int, int], classes: int
) -> None:
    measured = bench_training(name, TINY | changes, steps=1, device=CPU, heads=False)
    assert (measured.image_shape, measured.classes) == (list(shape), classes)
    assert f"random images of {' x '.join(map(str, shape))}, {classes} classes" in as_text(measured).splitlines()
    network = build_model(recipe(name, TINY | changes), random_images(2, shape, classes))
    one_pass = forward_flops(network, shape)
    assert measured.tflops / measured.images_per_second == pytest.approx(5 * one_pass / 1e12)


def test_images_are_as_many_as_fit_into_memory() -> None:
    assert random_images(8).train.pixels.shape == (320, 3, 32, 32)
    assert len(random_images(64, (3, 512, 512)).train.pixels) == 64 * 5


@pytest.mark.parametrize("name", ["cifar10/standard", "cifar10/free-he"])
def test_attack_steps_that_change_nothing_are_refused(name: str) -> None:
    with pytest.raises(HardsphereError, match=f"change nothing in a step of {name}"):
        bench_training(name, TINY | {"attack.steps": 7}, steps=1, device=CPU, heads=False)
    assert bench_training(name, TINY, steps=1, device=CPU, heads=False).attack_steps is None


def test_a_replayed_batch_counts_once() -> None:
    measured = bench_training("cifar10/free-he", TINY, steps=1, device=CPU, heads=False)
    assert measured.updates_per_batch == 8
    assert measured.profile is None


def test_a_profile_on_a_cpu() -> None:
    run = TrainingRun(recipe("cifar10/fast-he", TINY), random_images(8), CPU)
    found = profile_steps(run, CPU, steps=1)
    assert sum(found.groups.values()) == pytest.approx(1)
    assert found.groups[PRODUCTS] > 0
    assert found.idle_share is None


def test_phases_of_the_compiler_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import utils

    monkeypatch.setattr(utils, "compilation_time_metrics", {"codegen": [1.0, 2.0], "guards": [0.1], "trace": [0.7]})
    assert compile_phases() == {"codegen": 3.0, "trace": 0.7}
    assert list(compile_phases()) == ["codegen", "trace"]
    assert "guards" in compile_phases(least=0.05)


def test_a_cache_is_warm_once_it_holds_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert not cache_is_warm()
    (tmp_path / "fxgraph" / "ab").mkdir(parents=True)
    assert cache_is_warm()
    assert cache_place() == tmp_path


def test_the_cache_lies_where_torch_puts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert str(cache_place()) == default_cache_dir()
