"""What is recorded about the code, and what is started ahead."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest
import torch

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
