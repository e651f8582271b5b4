"""What is recorded about the code."""

from __future__ import annotations

import re
import subprocess

import pytest

from hardsphere.runtime import commit


def test_a_copy_of_the_source_outside_a_checkout_is_told_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_git(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", no_git)
    monkeypatch.setenv("HARDSPHERE_COMMIT", "0123abcd")
    assert commit() == "0123abcd"
    monkeypatch.setenv("HARDSPHERE_COMMIT", "")
    assert commit() is None


def test_in_a_checkout_git_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HARDSPHERE_COMMIT", raising=False)
    own = commit()
    if own is None:
        pytest.skip("the source lies in no checkout")
    assert re.fullmatch(r"[0-9a-f]{12}\+?", own)
    monkeypatch.setenv("HARDSPHERE_COMMIT", "another")
    assert commit() == own
