"""The main job in two minutes on digits: train with and without hypersphere embedding, then judge both honestly."""

from __future__ import annotations

import shutil
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hardsphere.config import Config
from hardsphere.data import DataSet, Images, to_float
from hardsphere.data import load as load_data
from hardsphere.evaluate import Entry, Evaluation, OfEps, Suite, evaluate
from hardsphere.evaluate.audit import Audit, audit
from hardsphere.evaluate.statistics import wilson
from hardsphere.files import write_text
from hardsphere.recipes import recipe
from hardsphere.report.audit import render_audit
from hardsphere.report.card import show_card
from hardsphere.train import Deployed, load, train
from hardsphere.train.loop import Reporter
from hardsphere.train.run import read_config

EPOCHS = 12  # of the recipes' 20: nearly as robust
JUDGED = 100  # test images; the standard suite on all of them would take minutes
CONTESTANTS = {"PGD-AT": "digits/pgd", "PGD-AT + HE": "digits/pgd-he"}

PAPER_PGD = Suite(
    "demo-paper",
    1,
    "paper",
    (Entry("pgd-20", "pgd", {"steps": 20, "step_size": OfEps(0.003 / 0.031), "keep": "last"}, view="paper"),),
)


def demo(out: Path, reporter: Reporter, console: Console | None = None) -> None:
    """Train, evaluate and audit both networks, and print what came out."""
    console = console or Console()
    data = load_data("digits")
    verdicts = {}
    for title, name in CONTESTANTS.items():
        path = out / name.partition("/")[2]
        console.print(f"Training {title} ({name}) into {path}", highlight=False)
        _train(recipe(name, {"epochs": EPOCHS}), path, reporter)
        console.print(f"Judging {title}: the standard suite and the audit, half a minute", highlight=False)
        verdicts[title] = _judge(load(path), data, path)
    for title, (_, honest, found) in verdicts.items():
        console.rule(title)
        show_card(honest.card, console)
        console.print(render_audit(found))
    console.rule("Both")
    console.print(_comparison(verdicts))
    console.print(
        "The paper's protocol attacks raw cosines, where cross-entropy is weak, so it flatters HE; "
        "a gain counts only if the honest column shows it.",
        highlight=False,
    )
    console.print(f"Run directories: {', '.join(str(out / name.partition('/')[2]) for name in CONTESTANTS.values())}")


def _train(config: Config, path: Path, reporter: Reporter) -> None:
    """Train, or go on; a demonstration of an older version is replaced, but no run that was not made here."""
    saved, mark = path / "config.yaml", path.parent / f".{path.name}-of-the-demo"
    if saved.exists() and mark.exists() and read_config(saved) != config:
        shutil.rmtree(path)
    if not path.exists():
        write_text(mark, "")
    train(config, path, resume=True, reporter=reporter)


def _judge(deployed: Deployed, data: DataSet, path: Path) -> tuple[Evaluation, Evaluation, Audit]:
    """The paper's PGD-20, the standard suite and the audit, all on the same images."""
    test = data.test
    assert isinstance(test, Images)
    test = test.subset(range(JUDGED))
    about = {"target": str(path), "data": f"digits, the first {JUDGED} test images", "selection": deployed.selection}
    paper = evaluate(deployed.model, test, ball=deployed.ball, suite=PAPER_PGD, about=about)
    honest = evaluate(deployed.model, test, ball=deployed.ball, suite="standard", about=about)
    x, y = to_float(test.pixels), test.labels
    found = audit(deployed.model, x, y, deployed.ball, evaluation=honest, ids=test.ids, selection=deployed.selection)
    return paper, honest, found


def _comparison(verdicts: dict[str, tuple[Evaluation, Evaluation, Audit]]) -> Table:
    table = Table(title=f"digits, linf 0.2, n = {JUDGED} test images, 95 % intervals", title_justify="left")
    for column in ("", "clean", "paper protocol: PGD-20", "honest: standard suite", "audit"):
        table.add_column(column)
    for title, (paper, honest, found) in verdicts.items():
        numbers = (honest.clean_accuracy, paper.robust_accuracy, honest.robust_accuracy)
        table.add_row(title, *(_percent(number) for number in numbers), found.verdict)
    return table


def _percent(accuracy: float) -> str:
    low, high = wilson(round(accuracy * JUDGED), JUDGED)
    return f"{accuracy:.1%} [{low:.0%}, {high:.0%}]"
