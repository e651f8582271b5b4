"""The pages of tables under results/ say what was measured: they are rendered from the records beside them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from hardsphere.reproduce import reproduce

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
PAGES = ("table2", "table3", "mechanism", "gradients")


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records alone, and the pages made of them anew."""
    out = tmp_path_factory.mktemp("results")
    shutil.copy(RESULTS / "results.jsonl", out)
    for folder in ("outcomes", "training"):
        shutil.copytree(RESULTS / folder, out / folder)
    for figure in RESULTS.glob("*.png"):  # those of analyses are made where the weights are
        shutil.copy(figure, out)
    reproduce(",".join(PAGES), "small", out=out, render_only=True)
    return out


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_was_measured(name: str, rendered: Path) -> None:
    expected = (rendered / f"{name}.md").read_text(encoding="utf-8")
    told = f"run: hardsphere reproduce {name} --scale small --out results --render"
    assert (RESULTS / f"{name}.md").read_text(encoding="utf-8") == expected, told


def test_a_record_names_its_commit_its_machine_and_no_place() -> None:
    text = (RESULTS / "results.jsonl").read_text(encoding="utf-8")
    assert "/tmp" not in text
    assert "/home" not in text
    for line in text.splitlines():
        record = json.loads(line)
        assert record["environment"]["commit"]
        assert record["environment"]["device"]
        assert record["command"].startswith("hardsphere reproduce ")


def test_the_index_names_every_page() -> None:
    index = RESULTS / "README.md"
    pages = {page.relative_to(RESULTS).as_posix() for page in RESULTS.rglob("*.md") if page != index}
    assert set(re.findall(r"\]\((\S+)\)", index.read_text(encoding="utf-8"))) == pages


def test_the_readme_repeats_the_tables() -> None:
    pages = [(RESULTS / f"{name}.md").read_text(encoding="utf-8").splitlines() for name in ("table2", "table3")]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith(("| **", "| pair"))]
    assert len(rows) > 1
    assert set(rows) <= set(pages[0]) | set(pages[1])
