"""Run directories: what counts as trained, what is dropped, and who may work where."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardsphere.errors import HardsphereError
from hardsphere.recipes import recipe
from hardsphere.reproduce.plan import Run
from hardsphere.reproduce.workspace import TRAINED, Workspace, claimed

RUN = Run("digits/pgd", recipe("digits/pgd"), ())


@pytest.fixture
def place(tmp_path: Path) -> Workspace:
    made = Workspace(tmp_path / "work")
    made.prepare()
    return made


def test_a_training_counts_only_with_its_note_and_its_weights(place: Workspace) -> None:
    assert not place.begun(RUN)
    (place.of(RUN) / "checkpoints").mkdir(parents=True)
    assert place.begun(RUN)
    assert not place.trained(RUN)
    assert place.weights(RUN) is None
    place.leave_note(RUN, {"weights": "w"})
    assert place.trained(RUN)
    assert place.weights(RUN) == "w"
    (place.of(RUN) / "metrics.jsonl").write_text("")
    place.drop_weights(RUN)
    assert not place.trained(RUN)
    assert [file.name for file in place.of(RUN).iterdir()] == ["metrics.jsonl"]


def test_git_does_not_see_it(place: Workspace) -> None:
    assert (place.path / ".gitignore").read_text() == "*\n"


def test_a_claim_is_held_by_one_at_a_time(place: Workspace) -> None:
    lock = place.lock(RUN.id)
    with claimed(lock) as ours, claimed(lock) as theirs, claimed(place.lock("other")) as another:
        assert (ours, theirs, another) == (True, False, True)
    with claimed(lock) as again:
        assert again


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HardsphereError, match="cannot be written"):
        Workspace(tmp_path / "file" / "work").prepare()
    with pytest.raises(HardsphereError, match="cannot be written"), claimed(tmp_path / "file" / "a.lock"):
        pass


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00\x00"])
def test_a_damaged_note_is_one_sentence(place: Workspace, text: str) -> None:
    place.leave_note(RUN, {"weights": "w"})
    place.leave_failure("a run", "no memory")
    assert place.failures() == {"a run": "no memory"}
    for file in (place.of(RUN) / TRAINED, place.path / "failed" / "a-run.json"):
        file.write_text(text)
        with pytest.raises(HardsphereError, match=f"'{file}' is damaged"):
            place.note(RUN) if file.name == TRAINED else place.failures()


def test_a_note_that_another_process_takes_away_is_no_failure(place: Workspace) -> None:
    """Between the look into the folder and the look into the file."""
    place.leave_failure("a run", "no memory")
    (place.path / "failed" / "another.json").symlink_to("gone.json")
    assert place.failures() == {"a run": "no memory"}
