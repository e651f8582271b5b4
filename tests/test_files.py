"""Files that appear whole, and what is left of those that do not."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hardsphere.files import appearing, leftovers, write_text

WRITING = """
import sys, time
from pathlib import Path
from hardsphere.files import appearing
with appearing(Path(sys.argv[1])) as partial:
    partial.write_text("half")
    print(partial.name, flush=True)
    time.sleep(100)
"""


def test_only_what_nobody_writes_any_more_is_left_over(tmp_path: Path) -> None:
    (tmp_path / "note").write_text("old")
    command = [sys.executable, "-c", WRITING, str(tmp_path / "note")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        assert (tmp_path / name).read_text() == "half"
        assert leftovers(tmp_path) == []
        process.send_signal(signal.SIGKILL)
        process.communicate()
    finally:
        process.kill()
    (tmp_path / ".theirs.tmp").touch()  # no name of ours
    assert leftovers(tmp_path) == [tmp_path / name]
    assert (tmp_path / "note").read_text() == "old"
    write_text(tmp_path / "note", "new")
    assert (tmp_path / "note").read_text() == "new"


def test_what_could_not_be_written_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with appearing(tmp_path / "note") as partial:
            partial.write_text("half")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert list(tmp_path.iterdir()) == []
