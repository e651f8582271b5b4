"""The ledger: one row per radius, sample and attack. Every number of an evaluation is a query on it.

SQLite with a write-ahead log. The runner commits a batch of rows as one transaction, so that killing the process at any
moment loses at most the batch in flight, and the file is never half-written. What is evaluated (suite, seed, digests
of model and data, ball) is written into the file first: rows of another evaluation are refused, never mixed in.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hardsphere.errors import HardsphereError

FORMAT = 1

COMPLETE = "complete"
"""The note that an evaluation went to its end; what was not attacked yet looks robust."""

_TABLES = """
CREATE TABLE IF NOT EXISTS identity (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS notes (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS samples (
    sample INTEGER PRIMARY KEY, position INTEGER NOT NULL UNIQUE, label INTEGER NOT NULL, predicted INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS outcomes (
    eps REAL NOT NULL, attack TEXT NOT NULL, sample INTEGER NOT NULL, outcome TEXT NOT NULL, distance REAL,
    stop TEXT, predicted INTEGER, forwards REAL NOT NULL, backwards REAL NOT NULL, seconds REAL NOT NULL,
    PRIMARY KEY (eps, attack, sample)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS images (
    eps REAL NOT NULL, sample INTEGER NOT NULL, attack TEXT NOT NULL, pixels BLOB NOT NULL,
    PRIMARY KEY (eps, sample)) WITHOUT ROWID;
"""


class Outcome(Enum):
    """What became of a sample under an attack."""

    WRONG = "clean-wrong"
    """The model gets the clean image wrong, so there is nothing to attack; it counts as not robust."""
    HELD = "held"
    """The attack did not break the sample."""
    BROKEN = "broken"
    """The runner saw the model get an image inside the ball wrong."""
    SKIPPED = "skipped"
    """Not attacked: an earlier attack of a cascade had broken it, or it lies beyond the attack's sample limit."""


@dataclass(frozen=True)
class Sample:
    """A sample and what the model says about its clean image."""

    sample: int
    position: int
    label: int
    predicted: int

    @property
    def correct(self) -> bool:
        return self.label == self.predicted


@dataclass(frozen=True)
class Row:
    """What one attack at one radius did to one sample.

    Attributes:
        eps: the ball's radius.
        attack: the entry's name in its suite.
        sample: the sample's id.
        outcome: an `Outcome`'s value.
        distance: from the clean image to the one proposed, as the runner measured it; none if it was not attacked.
        stop: the name of the attack's own reason to stop (`hardsphere.attacks.Stop`).
        predicted: the class the runner saw on the proposed image.
        forwards: forward passes of its batch, divided among the batch.
        backwards: backward passes, likewise.
        seconds: time, likewise.
    """

    eps: float
    attack: str
    sample: int
    outcome: str
    distance: float | None = None
    stop: str | None = None
    predicted: int | None = None
    forwards: float = 0.0
    backwards: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Tally:
    """What one attack did at one radius, added up.

    Attributes:
        n: the samples it counts, those that the model gets wrong anyway included.
        correct: of these, the ones whose clean image is classified right.
        attacked: samples it worked on.
        broken: samples it broke.
        stuck: samples on which it never had a gradient to follow.
        robust: samples right on the clean image and not broken by it; in a cascade not by any before it either.
        forwards: forward passes altogether, in samples.
        backwards: backward passes altogether, in samples.
        seconds: time altogether.
    """

    n: int
    correct: int
    attacked: int
    broken: int
    stuck: int
    robust: int
    forwards: float
    backwards: float
    seconds: float


class Ledger:
    """A file of outcomes, or one in memory.

    Args:
        path: the file, made if it is not there; none keeps everything in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        try:
            self._db = sqlite3.connect(":memory:" if path is None else path, timeout=60, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_TABLES)
        except sqlite3.DatabaseError as reason:
            raise HardsphereError(f"{path} cannot be used as a ledger ({reason}): choose another directory.") from None

    # -- identity ------------------------------------------------------------------------------------------------------

    @property
    def identity(self) -> dict[str, Any]:
        """What was evaluated and how: everything that, if it were different, would make other rows."""
        return {key: json.loads(value) for key, value in self._db.execute("SELECT * FROM identity ORDER BY key")}

    def claim(self, identity: Mapping[str, Any]) -> None:
        """Say what is evaluated here, or raise if the file already holds something else."""
        wanted = {"format": FORMAT, **json.loads(json.dumps(dict(identity)))}
        held = self.identity
        if not held:
            with self._transaction():
                pairs = [(key, json.dumps(value)) for key, value in wanted.items()]
                self._db.executemany("INSERT INTO identity VALUES (?, ?)", pairs)
        elif held != wanted:
            different = [key for key in sorted(held.keys() | wanted.keys()) if held.get(key) != wanted.get(key)]
            shown = ", ".join(
                f"{key} {_short(held.get(key))} there, {_short(wanted.get(key))} here" for key in different
            )
            raise HardsphereError(
                f"{self.path} holds another evaluation ({shown}): choose another output directory or delete that one."
            )

    def note(self, key: str, value: Any) -> None:
        """Keep something that the card tells and that is no part of the identity."""
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (key, json.dumps(value)))

    def noted(self, key: str, default: Any = None) -> Any:
        found = self._db.execute("SELECT value FROM notes WHERE key = ?", (key,)).fetchone()
        return default if found is None else json.loads(found[0])

    # -- writing -------------------------------------------------------------------------------------------------------

    def add_samples(self, samples: Iterable[Sample]) -> None:
        with self._transaction():
            self._db.executemany("INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?)", map(astuple, samples))

    def add(self, rows: Iterable[Row], images: Iterable[tuple[float, int, str, bytes]] = ()) -> None:
        """Write the rows of one batch, and the images that go with them, as one transaction."""
        with self._transaction():
            self._db.executemany(f"INSERT OR REPLACE INTO outcomes VALUES ({_marks(10)})", map(astuple, rows))
            self._db.executemany("INSERT OR IGNORE INTO images VALUES (?, ?, ?, ?)", images)

    def _transaction(self) -> _Transaction:
        return _Transaction(self._db)

    # -- queries -------------------------------------------------------------------------------------------------------

    def samples(self) -> list[Sample]:
        """All samples in the order of the data."""
        return [Sample(*row) for row in self._db.execute("SELECT * FROM samples ORDER BY position")]

    def rows(self, eps: float | None = None, attack: str | None = None) -> list[Row]:
        """The rows, by radius, attack and sample."""
        where, values = _where(eps=eps, attack=attack)
        query = f"SELECT * FROM outcomes{where} ORDER BY eps, attack, sample"
        return [Row(*row) for row in self._db.execute(query, values)]

    def radii(self) -> list[float]:
        return [eps for (eps,) in self._db.execute("SELECT DISTINCT eps FROM outcomes ORDER BY eps")]

    def attacks(self, eps: float) -> list[str]:
        """The attacks that have rows at this radius, in the order of the suite if the ledger knows one."""
        found = [name for (name,) in self._db.execute("SELECT DISTINCT attack FROM outcomes WHERE eps = ?", (eps,))]
        order = list(self.noted("order", []))
        return sorted(found, key=lambda name: (order.index(name) if name in order else len(order), name))

    def done(self, eps: float, attack: str) -> set[int]:
        """The samples that have a row."""
        query = "SELECT sample FROM outcomes WHERE eps = ? AND attack = ?"
        return {sample for (sample,) in self._db.execute(query, (eps, attack))}

    def broken(self, eps: float, attacks: Sequence[str] | None = None) -> dict[int, str]:
        """The samples that some attack (of those named) broke at this radius, and the first one that did."""
        query = "SELECT sample, attack FROM outcomes WHERE eps = ? AND outcome = ?"
        order = self.attacks(eps) if attacks is None else list(attacks)
        rank = {name: index for index, name in enumerate(order)}
        hits = self._db.execute(query, (eps, Outcome.BROKEN.value)).fetchall()
        found: dict[int, str] = {}
        for sample, name in sorted((hit for hit in hits if hit[1] in rank), key=lambda hit: rank[hit[1]]):
            found.setdefault(sample, name)
        return found

    def clean_accuracy(self) -> float:
        """The fraction of samples whose clean image is classified right."""
        right, n = self._db.execute("SELECT TOTAL(label = predicted), COUNT(*) FROM samples").fetchone()
        return float(right) / max(int(n), 1)

    def require_norm(self, norm: str) -> None:
        """Refuse a norm that nothing was evaluated in."""
        own = self.identity.get("norm", norm)
        if own != norm:
            raise HardsphereError(f"Nothing was evaluated in {norm}: the evaluation is of {own}.")

    def radius(self, eps: float) -> float:
        """The radius of the evaluation that is meant; one sentence if it has none such: nothing broke samples there."""
        known: list[float] = self.identity.get("eps") or [eps]
        found = [one for one in known if math.isclose(one, eps, rel_tol=1e-6)]
        if not found:
            there = ", ".join(f"{one:g}" for one in known)
            raise HardsphereError(f"Nothing was evaluated at eps {eps:g}: the evaluation is of eps {there}.")
        return found[0]

    def robust(self, eps: float) -> set[int]:
        """The samples right on the clean image and broken by no attack in this ball, nor in a smaller one inside it."""
        eps = self.radius(eps)
        query = """SELECT sample FROM samples WHERE label = predicted AND sample NOT IN (
            SELECT sample FROM outcomes WHERE eps <= ? AND outcome = 'broken')"""
        return {sample for (sample,) in self._db.execute(query, (eps,))}

    def robust_accuracy(self, eps: float) -> float:
        """The fraction of all samples that are right on the clean image and that no attack at this radius broke."""
        (n,) = self._db.execute("SELECT COUNT(*) FROM samples").fetchone()
        return len(self.robust(eps)) / max(int(n), 1)

    def tally(self, eps: float, attack: str, *, before: Sequence[str] = (), limit: int | None = None) -> Tally:
        """What one attack did.

        Args:
            before: the attacks of a cascade whose broken samples count as broken here as well.
            limit: count the first so many samples of the data only.
        """
        names, eps = [attack, *before], self.radius(eps)
        query = f"""
            WITH counted AS (SELECT sample, label = predicted AS correct FROM samples WHERE position < ?), fallen AS (
                SELECT DISTINCT sample FROM outcomes
                WHERE eps = ? AND outcome = 'broken' AND attack IN ({_marks(len(names))}))
            SELECT COUNT(*), TOTAL(correct), TOTAL(correct AND sample NOT IN fallen) FROM counted"""
        n, correct, robust = self._db.execute(query, (_ALL if limit is None else limit, eps, *names)).fetchone()
        query = """
            SELECT TOTAL(outcome IN ('held', 'broken')), TOTAL(outcome = 'broken'), TOTAL(stop = 'STUCK'),
                TOTAL(forwards), TOTAL(backwards), TOTAL(seconds)
            FROM outcomes WHERE eps = ? AND attack = ?"""
        attacked, broken, stuck, *costs = self._db.execute(query, (eps, attack)).fetchone()
        return Tally(n, int(correct), int(attacked), int(broken), int(stuck), int(robust), *costs)

    def images(self, eps: float) -> list[tuple[int, str, bytes]]:
        """(sample, attack, float32 pixels) of the broken images that were kept."""
        query = "SELECT sample, attack, pixels FROM images WHERE eps = ? ORDER BY sample"
        return list(self._db.execute(query, (self.radius(eps),)))

    # -- the file ------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Fold the write-ahead log into the file, so that it can be copied alone."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_ALL = 2**62


class _Transaction:
    """All of it or nothing: rolled back on any exception, so that a ledger is never left half-written."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db

    def __enter__(self) -> None:
        self.db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.db.execute("COMMIT")
        elif self.db.in_transaction:  # on a full disk SQLite has rolled back by itself
            self.db.execute("ROLLBACK")


def open_ledger(path: Path) -> Ledger:
    """An existing ledger, or the output directory that holds it as ``ledger.db``."""
    file = path / "ledger.db" if path.is_dir() else path
    if not file.is_file():
        raise HardsphereError(f"There is no ledger at {file}.")
    return Ledger(file)


def merge(ledgers: Sequence[Path | Ledger], path: Path | None = None) -> Ledger:
    """One ledger out of the shards of one evaluation.

    Args:
        ledgers: the shards, all of them: of the same evaluation and without a sample in common.
        path: the file to write, which must not exist yet; none keeps the merged ledger in memory.
    """
    if not ledgers:
        raise HardsphereError("There are no ledgers to merge.")
    if path is not None and path.exists():
        raise HardsphereError(f"{path} exists already: merge into a new file.")
    shards = [(shard, False) if isinstance(shard, Ledger) else (open_ledger(shard), True) for shard in ledgers]
    try:
        identities = [shard.identity for shard, _ in shards]
        whole = {key: value for key, value in identities[0].items() if key != "shard"}
        for (shard, _), identity in zip(shards, identities, strict=True):
            if {key: value for key, value in identity.items() if key != "shard"} != whole:
                raise HardsphereError(f"{shard.path} and {shards[0][0].path} are shards of different evaluations.")
        count = (identities[0].get("shard") or [0, 1])[1]
        present = sorted((identity.get("shard") or [0, 1])[0] for identity in identities)
        if present != list(range(count)):
            raise HardsphereError(f"The evaluation has {count} shards, but {[i + 1 for i in present]} were given.")
        for shard, _ in shards:
            if not shard.noted(COMPLETE, False):
                raise HardsphereError(f"The evaluation in {shard.path} was interrupted: finish it before merging.")
        merged = Ledger(path)
        merged.claim({**{key: value for key, value in whole.items() if key != "format"}, "shard": None})
        with merged._transaction():
            for shard, _ in shards:
                for table in ("notes", "samples", "outcomes", "images"):
                    _copy(shard._db, merged._db, table)
        return merged
    finally:
        for shard, opened in shards:
            if opened:
                shard.close()


def _copy(source: sqlite3.Connection, target: sqlite3.Connection, table: str) -> None:
    with closing(source.execute(f"SELECT * FROM {table}")) as rows:
        marks = _marks(len(rows.description))
        # Shards share their notes; of anything else they have no row in common.
        target.executemany(f"INSERT {'OR REPLACE' if table == 'notes' else ''} INTO {table} VALUES ({marks})", rows)


def _marks(count: int) -> str:
    return ", ".join("?" * count)


def _where(**conditions: Any) -> tuple[str, list[Any]]:
    given = {column: value for column, value in conditions.items() if value is not None}
    clause = " AND ".join(f"{column} = ?" for column in given)
    return (f" WHERE {clause}" if given else ""), list(given.values())


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."


class ledger_in:
    """The ledger of an output directory; closed if the evaluation fails, left open for queries if it succeeds."""

    def __init__(self, out: Path | str | None) -> None:
        self.directory = None if out is None else Path(out)

    def __enter__(self) -> tuple[Ledger, Path | None]:
        if self.directory is None:
            self.ledger = Ledger()
        else:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
            except OSError as reason:
                raise HardsphereError(f"The output directory {self.directory} cannot be made ({reason}).") from None
            self.ledger = Ledger(self.directory / "ledger.db")
        return self.ledger, self.directory

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.ledger.close()
