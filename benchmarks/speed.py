"""Every published speed of training and evaluation: measures what is not there yet, and writes the pages from that.

    python benchmarks/speed.py measure results --data DIR      # on a GPU, 50 minutes for all; DIR holds CIFAR-10
    python benchmarks/speed.py measure results --only heads fast --budget 10
    python benchmarks/speed.py render results                  # results/bench-training.md, results/bench-evaluation.md

Each figure is a command of its own, in a process of its own, and a JSON file of its own: remove the file to have it
measured again. What a killed process left half done is measured again. Nothing else should use the machine meanwhile.
Without --data the two evaluations are left out.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hardsphere
from hardsphere.bench.costs import RECIPE, Setting, read_points
from hardsphere.bench.subject import PLAIN_ROUNDS, plain_steps
from hardsphere.evaluate.statistics import wilson
from hardsphere.markdown import header, line
from hardsphere.runtime import code_of

Result = Mapping[str, Any]

PGD = "bench train cifar10/pgd-he"
TRAINING = {
    "preactresnet18-128": f"{PGD} --model preactresnet18 --batch 128 --steps 60 --no-heads --profile",
    "preactresnet18-512": f"{PGD} --model preactresnet18 --batch 512 --steps 20 --no-heads",
    "wrn-34-10-128": f"{PGD} --model wrn-34-10 --batch 128 --steps 12 --no-heads --profile",
    "wrn-34-10-512": f"{PGD} --model wrn-34-10 --batch 512 --steps 4 --no-heads",
    "wrn-34-1-128": f"{PGD} --model wrn-34-1 --batch 128 --steps 40 --no-heads --profile",
    "free-preactresnet18-128": "bench train cifar10/free-he --steps 20 --no-heads",
    "fast-preactresnet18-128": "bench train cifar10/fast-he --steps 100 --no-heads",
}
HEADS = {"heads-preactresnet18-128": f"{PGD} --model preactresnet18 --batch 128 --steps 60"}
FIRST_USE = f"{PGD} --model wrn-34-10 --batch 128 --steps 4 --no-heads"
FIRST_USES = ("first-use-cold", "first-use-warm")
SWEEP = "bench sweep"
EVALUATIONS = {
    "eval-preactresnet18": (
        "train cifar10/fast epochs=15 --data data --out runs/preactresnet18",
        "bench eval --run runs/preactresnet18 --data cifar10:data --limit 1000 --rounds 2 --against-pyautoattack",
    ),
    "eval-wrn-34-10": (
        "train cifar10/fast model=wrn-34-10 epochs=12 --data data --out runs/wrn-34-10",
        "bench eval --run runs/wrn-34-10 --data cifar10:data --limit 1000 --against-pyautoattack",
    ),
}


def file_of(results: Path, name: str) -> Path:
    return results / f"bench-{name}.json"


def is_done(results: Path, name: str) -> bool:
    """Whether a figure was measured to its end. An evaluation is saved before the reference begins as well."""
    try:
        found = json.loads(file_of(results, name).read_text())
    except (FileNotFoundError, ValueError):
        return False
    return isinstance(found, dict) and (name not in EVALUATIONS or found.get("reference") is not None)


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workshop:
    """Where commands run: in a folder of their own, so that what they record of themselves names no place.

    Attributes:
        folder: holds ``data``, a link to the images, and ``runs``.
        results: where the figures go.
    """

    folder: Path
    results: Path

    def run(self, words: str, *more: str, **variables: str) -> None:
        source = str(Path(hardsphere.__file__).parents[1])
        paths = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
        print(f"hardsphere {words}", flush=True)
        subprocess.run(
            [sys.executable, "-m", "hardsphere", *words.split(), *more],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": paths, **variables},
            stdout=subprocess.DEVNULL,
            check=True,
        )

    def measure(self, name: str, words: str, **variables: str) -> None:
        self.run(words, "--out", str(file_of(self.results, name).resolve()), **variables)

    def first_use(self) -> None:
        """The same command twice with a compile cache of its own, empty the first time."""
        with tempfile.TemporaryDirectory() as cache:
            places = {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TRITON_CACHE_DIR": f"{cache}/triton"}
            for name in FIRST_USES:
                self.measure(name, FIRST_USE, **places)

    def sweep(self) -> None:
        self.run(SWEEP, "--out", str((self.results / "bench-sweep").resolve()))

    def evaluate(self, name: str) -> None:
        """Train a model that is worth attacking, and attack it."""
        train, judge = EVALUATIONS[name]
        self.run(train)
        self.measure(name, judge)


def jobs(shop: Workshop, with_data: bool) -> Iterator[tuple[str, bool, Callable[[], None]]]:
    """(name, whether it is done, what does it)."""
    for name, words in (TRAINING | HEADS).items():
        yield name, is_done(shop.results, name), lambda name=name, words=words: shop.measure(name, words)  # type: ignore[misc]
    yield "first-use", all(is_done(shop.results, name) for name in FIRST_USES), shop.first_use
    yield "sweep", False, shop.sweep  # knows by itself what is there
    for name in EVALUATIONS if with_data else ():
        yield name, is_done(shop.results, name), lambda name=name: shop.evaluate(name)  # type: ignore[misc]


def unknown(only: Sequence[str]) -> list[str]:
    """The words with which no figure's name begins."""
    names = [*TRAINING, *HEADS, "first-use", "sweep", *EVALUATIONS]
    return [word for word in only if not any(name.startswith(word) for name in names)]


def measure(results: Path, data: Path | None, only: Sequence[str], minutes: float | None) -> None:
    began = time.monotonic()
    results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        shop = Workshop(Path(folder), results)
        if data is not None:
            (shop.folder / "data").symlink_to(data.resolve())
        for name, done, work in jobs(shop, data is not None):
            chosen = not only or any(name.startswith(word) for word in only)
            late = minutes is not None and time.monotonic() - began > 60 * minutes
            if chosen and not done and not late:
                work()


# ---------------------------------------------------------------------------------------------------------------------
# Pages
# ---------------------------------------------------------------------------------------------------------------------


def read(results: Path, name: str) -> dict[str, Any]:
    file = file_of(results, name)
    if not is_done(results, name):
        raise FileNotFoundError(errno.ENOENT, "measured to its end", str(file))
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def code(result: Result) -> str:
    return code_of(result["environment"])


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([*header(titles), *map(line, rows)])


def training_page(results: Path) -> str:
    rows = {name: read(results, name) for name in TRAINING}
    heads = read(results, "heads-preactresnet18-128")
    parts = [
        f"# Speed of training on one {rows['preactresnet18-128']['device']}",
        "A whole step is timed: device-resident data, augmentation, attack, update, weight average; medians over five "
        "rounds, random images of CIFAR-10's shape, seed 0, bf16 with heads and losses in float32. PGD-AT takes ten "
        "attack steps. The plain loop is eager PyTorch in its default precision, measured in the same run, without the "
        f"weight average: the median over {in_words(PLAIN_ROUNDS)} rounds of {_few_steps(rows.values())} steps. "
        "`share` is the share of the bf16 matrix-product rate measured in the same run. Each row is one process; "
        "its JSON, with all rounds and the digest of the source, lies beside this file. "
        "`python benchmarks/speed.py measure OUT` measures all this anew in an empty folder.",
        table(
            ["step", "batch", "images/s", "rounds", "plain loop", "ratio", "TFLOP/s", "share", "GiB", "torch", "code"],
            [_training_row(row) for row in rows.values()],
        ),
        "\n".join(
            [
                *(_epoch(name, rows[f"{key}-preactresnet18-128"]) for key, name in _EPOCHS.items()),
                f"- Over the plain head, HE costs {heads['head_overhead']['he']:+.1%} and m-HE "
                f"{heads['head_overhead']['mhe']:+.1%}: PreActResNet-18, batch 128, medians of five interleaved rounds "
                f"of {heads['steps']} steps, {code(heads)}. Table 3 of the paper says 0.9 %.",
                *_measured_again(rows, {"preactresnet18-128": [heads], "wrn-34-10-128": _first_uses(results)}),
                "- A forward pass of WRN-34-10 is counted as 13.3 GFLOP, of PreActResNet-18 as 1.11 (two per "
                "multiply-add, by torch's counter).",
            ]
        ),
        "## First use",
        _first_use(results, [rows["wrn-34-10-128"], rows["wrn-34-10-512"]]),
        "## What bounds what is left",
        _profiles({title: rows[name] for name, title in _PROFILED.items()}),
        _growth(results, [row for row in rows.values() if row["recipe"] == RECIPE]),
        "## Commands",
        _commands(
            [
                *(row["command"] for row in (*rows.values(), heads)),
                f"hardsphere {FIRST_USE}",
                f"hardsphere {SWEEP} --out results/bench-sweep",
            ]
        ),
    ]
    return "\n\n".join(parts) + "\n"


_PROFILED = {"preactresnet18-128": "PreActResNet-18", "wrn-34-10-128": "WRN-34-10", "wrn-34-1-128": "WRN-34-1"}
_EPOCHS = {"fast": "FastAT", "free": "FreeAT, which replays each batch eight times"}


def in_words(number: int) -> str:
    return {2: "two", 3: "three", 5: "five"}.get(number, str(number))


def _few_steps(rows: Iterable[Result]) -> str:
    few = [plain_steps(row["steps"]) for row in rows]
    return f"{min(few)} to {max(few)}"


def _training_row(row: Result) -> list[str]:
    rounds = row.get("rounds_images_per_second")
    return [
        f"{row['recipe']}, {row['model']}",
        str(row["batch"]),
        f"{row['images_per_second']:,.0f}",
        f"{min(rounds):,.0f} to {max(rounds):,.0f}" if rounds else "–",
        f"{row['plain_images_per_second']:,.0f}",
        f"{row['over_plain_loop']:.1f}",
        f"{row['tflops']:.0f}",
        f"{row['gemm_share']:.0%}",
        f"{row['peak_memory_gib']:.1f}",
        row["environment"]["torch"],
        code(row),
    ]


def _epoch(name: str, row: Result) -> str:
    return f"- {name}: an epoch of 50,000 images takes {50_000 / row['images_per_second']:.1f} s."


def _measured_again(rows: Mapping[str, Result], others: Mapping[str, Sequence[Result]]) -> list[str]:
    """The same step and code in other runs: the table must not be the best of many."""

    def rate(row: Result) -> str:
        return f"{row['images_per_second']:,.0f} (matrix products at {row['gemm_tflops']:.0f} TFLOP/s)"

    same = {name: [row for row in again if code(row) == code(rows[name])] for name, again in others.items()}
    return [
        f"- {rows[name]['model']}, batch {rows[name]['batch']}, in the table {rate(rows[name])}, made in other runs "
        f"{' and '.join(map(rate, again))} images/s."
        for name, again in same.items()
        if again
    ]


def _first_uses(results: Path) -> list[Result]:
    """Cold and warm, or nothing as long as one is missing."""
    there = all(is_done(results, name) for name in FIRST_USES)
    return [read(results, name) for name in FIRST_USES] if there else []


def _first_use(results: Path, others: Sequence[Result]) -> str:
    """The command for it, and what the other runs of that network saw of it, perhaps with older code."""
    text = (
        "Seconds from the command to the end of the first training step, and what of it were imports, the preparation "
        "of device, data and network, and the step itself, which is compiled there; Python's own start is not in it. "
        "After a few steps more the step is recorded and at full speed: what all that took beyond the steps' own time "
        "is in the last column."
    )
    kept = {True: "a cache in use", False: "empty cache"}
    rows = [(f"WRN-34-10, batch {one['batch']}, {kept[one['compile_cache_warm']]}", one) for one in others]
    if measured := _first_uses(results):
        cold, warm = measured
        rows = [
            ("WRN-34-10, batch 128, empty cache", cold),
            ("WRN-34-10, batch 128, the same command again", warm),
            *rows,
        ]
    cells = [
        [name, f"{row['first_step_seconds']:.0f}", *_parts(row), f"{row['compile_seconds']:.0f}", code(row)]
        for name, row in rows
    ]
    titles = ["", "in all", "imports", "preparation", "first step", "until full speed", "code"]
    return f"{text}\n\n{table(titles, cells)}"


def _parts(row: Result) -> list[str]:
    parts = row.get("first_step_parts", {})
    return [f"{parts[name]:.0f}" if name in parts else "–" for name in ("imports", "preparation", "first step")]


def _profiles(rows: Mapping[str, Result]) -> str:
    groups = list(dict.fromkeys(group for row in rows.values() for group in row["profile"]["groups"]))
    shares = {group: [row["profile"]["groups"].get(group, 0.0) for row in rows.values()] for group in groups}
    cells = [[group, *(f"{one:.1%}" for one in some)] for group, some in shares.items() if max(some) >= 0.0005]
    cells.append(["kernels a step", *(f"{row['profile']['kernels_per_step']:,.0f}" for row in rows.values())])
    cells.append(["a kernel lasts, on average", *(f"{_kernel_microseconds(row):.0f} µs" for row in rows.values())])
    cells.append(["of a step's time, in no kernel", *(f"{_between_kernels(row):.1%}" for row in rows.values())])
    bounds = "; ".join(f"of {name}, {_bound(row)}" for name, row in rows.items())
    return (
        f"Kernels of replayed steps, batch 128, from the same runs (`--profile`). The last row holds the sum of their "
        f"times against a step of the table above, which no profiler slowed down:\n\n{table(['', *rows], cells)}\n\n"
        "Residual blocks under attack are kernels of our own ([how](../docs/speed.md)); the convolutions of the update "
        f"are cuDNN's. What takes most of the kernels' time: {bounds}. The rate counts all products of a convolution, "
        "also those with the zeros around an image, which our kernels leave out. A wide network is bound by its "
        "convolutions; the kernels of a narrow one are short, and part of their time is the same however few images "
        "they are given ([the law of the batch](bench-sweep/sweep.md))."
    )


def _growth(results: Path, rows: Sequence[Result]) -> str:
    """Where the laws of the cost are, and how steps of these rows did in the sweep, if that ran other code."""
    text = (
        "How the cost grows with attack steps, batch and width, by which law and why, is in "
        "[bench-sweep/sweep.md](bench-sweep/sweep.md)."
    )
    swept = read_points(results / "bench-sweep" / "points.jsonl")
    compared = []
    for row in rows:
        point = swept.get(Setting(row["model"], row["batch"], row["attack_steps"]))
        if point is not None and code_of(point.environment) != code(row):
            name = f"{row['model']} at batch {row['batch']}"
            compared.append(f"{name} made {point.images_per_second:,.0f} images/s ({row['images_per_second']:,.0f})")
    if compared:
        text += (
            f" Its laws are of the code that it names, and times have changed since. There {', '.join(compared)}; "
            "in brackets what the table above says."
        )
    return text


_OURS = "_convolution"


def _bound(row: Result) -> str:
    """The kernels that take most of the time: our own convolutions with their rate, or else the four longest."""
    longest = row["profile"]["longest"]
    ours = next((kernel for kernel in longest if kernel["name"] == _OURS), None)
    if ours is None:
        return f"{sum(kernel['share'] for kernel in longest[:4]):.0%} four of cuDNN's, with older code"
    passes, update = 2 * row["attack_steps"], 3  # in forward passes
    flops = row["tflops"] / row["images_per_second"] * row["batch"] * passes / (passes + update)
    rate = flops / (1e-3 * ours["milliseconds"])
    return f"{ours['share']:.0%} our own, at {rate:.0f} TFLOP/s (matrix products: {row['gemm_tflops']:.0f})"


def _kernel_microseconds(row: Result) -> float:
    return float(1e3 * row["profile"]["busy_milliseconds"] / row["profile"]["kernels_per_step"])


def _between_kernels(row: Result) -> float:
    """Kernels that ran side by side would make this too small."""
    step = row["batch"] / row["images_per_second"]
    return max(0.0, 1 - 1e-3 * float(row["profile"]["busy_milliseconds"]) / step)


def _commands(commands: Sequence[str]) -> str:
    return "```sh\n" + "\n".join(commands) + "\n```"


def evaluation_page(results: Path) -> str:
    found = {name: read(results, name) for name in EVALUATIONS}
    models = {"eval-preactresnet18": "PreActResNet-18", "eval-wrn-34-10": "WRN-34-10"}
    first = next(iter(found.values()))
    parts = [
        f"# Speed of evaluation on one {first['device']}",
        f"The `{first['suite']}` suite (honest protocol, seed 0) on the first {first['images']:,} test images of "
        f"CIFAR-10, {first['ball']}, on the same GPU, model and images as pyautoattack 0.2.0 in its defaults (batch "
        f"{first['reference']['batch']}, TF32 in convolutions). Ours: {first['crafting']}. torch "
        f"{first['environment']['torch']}; each figure is one run, and its JSON lies beside this file. In brackets "
        "Wilson's 95 % interval.",
        table(
            ["", *(f"{models[name]}, {who}" for name in found for who in ("hardsphere", "pyautoattack"))],
            _evaluation_rows(list(found.values())),
        ),
        "The first time includes what the evaluation prepares for itself, such as recording its turns. Kernels are "
        "compiled once on a machine: those that training on it had compiled already were loaded, not compiled. The "
        "device had been woken by passes of the model before either began. The second time is in the same process; "
        "where there was one, the single attacks and the TFLOP/s are its.",
        "Both models come from FastAT, which is quick to train and leaves them robust enough to be worth attacking:",
        _commands(
            [line for name, one in found.items() for line in (f"hardsphere {EVALUATIONS[name][0]}", one["command"])]
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _evaluation_rows(found: Sequence[Result]) -> list[list[str]]:
    def row(name: str, ours: Callable[[Result], str], theirs: Callable[[Result], str]) -> list[str]:
        return [name, *(cell for one in found for cell in (ours(one), theirs(one["reference"])))]

    def clock(seconds: float | None) -> str:
        return "" if seconds is None else f"{seconds:.1f} s"

    def share(survivors: int, images: int) -> str:
        low, high = wilson(survivors, images)
        return f"{survivors / images:.1%} [{100 * low:.1f}, {100 * high:.1f}]"

    def seconds_of(attack: str) -> Callable[[Result], str]:
        return lambda one: clock(next(line["seconds"] for line in one["attacks"] if line["name"] == attack))

    def nothing(_: Result) -> str:
        return ""

    names = [attack["name"] for attack in found[0]["attacks"]]
    images = found[0]["images"]
    return [
        *(row(name, seconds_of(name), lambda one, name=name: clock(one["attack_seconds"][name])) for name in names),  # type: ignore[misc]
        row("in all, first time", lambda one: clock(one["seconds"]), lambda one: clock(one["seconds"])),
        row("in all, second time", lambda one: clock(one["warm_seconds"]), nothing),
        row("**times faster, first time**", lambda one: f"**{one['reference']['times_faster']:.2f}**", nothing),
        row("times faster, second time", lambda one: _optional(one["reference"]["times_faster_warm"]), nothing),
        row("clean accuracy", lambda one: f"{one['clean_accuracy']:.1%}", nothing),
        row("survivors", lambda one: share(one["survivors"], images), lambda one: share(one["survivors"], images)),
        row(
            "images that survive only here",
            lambda one: str(one["reference"]["only_ours"]),
            lambda one: str(one["only_reference"]),
        ),
        row("TFLOP/s", lambda one: f"{one['tflops']:.0f}", nothing),
        row("share of the matrix-product rate", lambda one: f"{one['gemm_share']:.0%}", nothing),
        row("code", code, nothing),
    ]


def _optional(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


PAGES: dict[str, Callable[[Path], str]] = {
    "bench-training.md": training_page,
    "bench-evaluation.md": evaluation_page,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["measure", "render"])
    parser.add_argument("results", type=Path)
    parser.add_argument("--data", type=Path, help="where CIFAR-10 lies")
    parser.add_argument("--only", nargs="*", default=[], help="figures whose names begin so")
    parser.add_argument("--budget", type=float, help="minutes after which none is begun")
    given = parser.parse_args()
    if nothing := unknown(given.only):
        parser.error(f"no figure's name begins with {', '.join(nothing)}")
    if given.verb == "measure":
        measure(given.results, given.data, given.only, given.budget)
    for name, page in PAGES.items():
        try:
            (given.results / name).write_text(page(given.results))
        except FileNotFoundError as missing:
            print(f"{name} is not written: {missing.filename} is still to be measured.")


if __name__ == "__main__":
    main()
