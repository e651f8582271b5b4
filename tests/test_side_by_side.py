"""Processes that work beside the one that was started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hardsphere.cli import side_by_side
from hardsphere.cli.side_by_side import beside


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command of one's own in place of hardsphere, which writes down who it is."""
    package = tmp_path / "hardsphere"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import os, sys, time\n"
        "number = os.environ['HARDSPHERE_BESIDE']\n"
        "print('process', number, *sys.argv[1:], flush=True)\n"
        "time.sleep(60 if 'forever' in sys.argv else 0)\n"
        "sys.exit(3 if number == sys.argv[1] else 0)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("HARDSPHERE_BESIDE", raising=False)
    return tmp_path


def test_each_runs_what_was_typed_and_is_waited_for(
    typed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hardsphere", "3", "--processes", "3"])
    with beside(2) as others:
        others.start(typed)
    assert [one.poll() for one in others.running] == [0, 3]
    for number in (2, 3):
        assert (typed / f"process-{number}.log").read_text() == f"process {number} 3 --processes 3\n"
    assert capsys.readouterr().err == f"Process 3 ended with exit code 3: see '{typed / 'process-3.log'}'.\n"


def test_one_of_them_starts_no_more(typed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARDSPHERE_BESIDE", "2")
    monkeypatch.setenv("HARDSPHERE_STARTER", str(os.getppid()))
    with beside(2) as others:
        others.start(typed)
    assert others.running == []


def test_they_end_with_the_one_that_started_them(typed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["hardsphere", "0", "forever"])
    started = []

    def interrupted() -> None:
        with beside(2) as others:
            others.start(typed)
            started.extend(others.running)
            raise KeyboardInterrupt

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(started) == 2
    assert all(one.poll() is not None for one in started)
    assert time.monotonic() - begun < side_by_side._PATIENCE


def test_before_they_are_needed_none_is_started(typed: Path) -> None:
    with beside(2) as others:
        pass
    assert others.running == []
    assert list(typed.glob("*.log")) == []


def test_each_takes_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(4)
    try:
        for others, share in ((0, 4), (1, 2), (2, 1), (9, 1)):
            with beside(others):
                assert torch.get_num_threads() == share
            assert torch.get_num_threads() == 4
        monkeypatch.setenv("OMP_NUM_THREADS", "4")  # as somebody wishes
        with beside(1):
            assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(threads)


def test_they_end_with_one_that_is_killed() -> None:
    script = "import time; from hardsphere.cli.side_by_side import beside\nwith beside(0): time.sleep(100)"
    child = (
        "import os, subprocess, sys; os.environ |= {'HARDSPHERE_BESIDE': '2', 'HARDSPHERE_STARTER': str(os.getpid())}\n"
        f"child = subprocess.Popen([sys.executable, '-c', {script!r}], stdout=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    number = int(parent.stdout.readline())
    parent.kill()  # at once, before it could look who its parent is
    parent.communicate()
    deadline = time.monotonic() + 40
    while _is_running(number) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not _is_running(number)


def _is_running(number: int) -> bool:
    """A process that has ended may still be in the list until someone asks for it."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
