"""What is recorded about the code, and what is started ahead."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest
import torch

from hardsphere import runtime
from hardsphere.errors import HardsphereError
from hardsphere.runtime import code_of, commit, expect_compiling, pick_device


def test_a_copy_of_the_source_outside_a_checkout_is_told_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_git(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", no_git)
    monkeypatch.setenv("HARDSPHERE_COMMIT", "0123abcd")
    assert commit() == "0123abcd"
    monkeypatch.setenv("HARDSPHERE_COMMIT", "")
    assert commit() is None


@pytest.mark.parametrize(("changed", "mark"), [("", ""), (" M sphere.py", "+")])
def test_in_a_checkout_git_is_believed(changed: str, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"ls-files": "sphere.py", "rev-parse": "0123456789ab", "status": changed}

    def git(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, stdout=f"{answers[command[3]]}\n")

    monkeypatch.setattr(subprocess, "run", git)
    monkeypatch.setenv("HARDSPHERE_COMMIT", "another")
    assert commit() == f"0123456789ab{mark}"


def test_the_code_of_a_record() -> None:
    assert code_of({"commit": "0123abcd", "source": "s1"}) == "0123abcd"
    assert code_of({"commit": None, "source": "s1"}) == "source s1"


def test_a_gpu_that_is_not_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(HardsphereError, match=r"There is no device 'cuda:7' here: the last one is cuda:1\."):
        pick_device("cuda:7")


def test_the_compilers_helpers_are_started_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    compiler = ModuleType("torch._inductor.async_compile")
    monkeypatch.setitem(sys.modules, compiler.__name__, compiler)
    expect_compiling(torch.device("cpu"))  # a torch that starts them elsewhere
    compiler.maybe_warm_pool = lambda: started.append("helpers")  # type: ignore[attr-defined]
    expect_compiling(torch.device("cpu"))
    assert started == ["helpers"]


def test_a_recording_is_of_the_device_of_the_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of the one that was current when torch first recorded anything, where a graph would be empty."""
    seen: list[tuple[str, object]] = []

    class Entered:
        def __init__(self, kind: str, what: object) -> None:
            self.entry = kind, what

        def __enter__(self) -> None:
            seen.append(self.entry)

        def __exit__(self, *_: object) -> None:
            seen.append(("end of", self.entry[0]))

    streams: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: Entered("device", device))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: streams.append(device) or f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: Entered("graph", (graph, stream)))
    runtime._recording_stream.cache_clear()
    one, other = torch.device("cuda:1"), torch.device("cuda:0")
    for device in (one, other, one):
        with runtime.recording("graph", device):  # type: ignore[arg-type]
            pass
    runtime._recording_stream.cache_clear()
    assert streams == [one, other]
    begun = [("device", other), ("graph", ("graph", "stream of cuda:0"))]
    assert seen[4:8] == [*begun, ("end of", "graph"), ("end of", "device")]
    assert seen[:4] == seen[8:]
    assert seen[1] == ("graph", ("graph", "stream of cuda:1"))


@pytest.mark.parametrize("setting", ["fp32_precision", "cuda.matmul.fp32_precision"])
def test_the_other_way_to_set_tf32_is_named(setting: str) -> None:
    """In a process of its own: torch does not forget that it was used."""
    lines = ["import torch", f"torch.backends.{setting} = 'tf32'", "from hardsphere.runtime import exact_float32"]
    lines += ["with exact_float32():", "    pass"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("hardsphere.errors.HardsphereError: TF32 was set by fp32_precision")
