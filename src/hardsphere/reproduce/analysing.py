"""An analysis of trained models as an entry beside the tables: planned as a group, found among the records, built.

The analyses themselves are in `hardsphere.reproduce.analyses`. They explain the numbers of the tables and do not
measure robustness, so each page also holds what its models have on record in both protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hardsphere.config import to_dict
from hardsphere.reproduce.measures import ROBUST, Measurement
from hardsphere.reproduce.origins import Plain, commit_of, machine_of, training_origin
from hardsphere.reproduce.plan import HOW_MANY, Group
from hardsphere.reproduce.scales import MEASURES, Scale
from hardsphere.reproduce.store import Record, Store
from hardsphere.reproduce.tables import CLEAN, HONEST, Row, is_among, run_of
from hardsphere.threat import Ball

SCHEMA = "hardsphere.analysis/2"

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Analysis:
    """Something the paper looks at in trained models.

    Attributes:
        name: what it is asked for by.
        title: its title.
        about: what is measured, and by which attack.
        rows: the models.
        look: given the models' subjects, a folder and the number of images, returns facts and draws figures.
        lines: the facts as Markdown.
        images: test images by scale.
        terms: what the words of its lines mean.
        figures: the files that `look` draws, each with its caption.
        note: what else a reader must know.
    """

    name: str
    title: str
    about: str
    rows: tuple[Row, ...]
    look: Callable[..., Facts]
    lines: Callable[[Facts], list[str]]
    images: Mapping[str, int]
    terms: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    data: str = "cifar10"

    def rows_at(self, scale: Scale) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if scale.name in row.scales)

    def data_at(self, scale: Scale) -> str:
        return "digits" if scale.name == "smoke" else self.data

    def measurements(self, scale: Scale) -> dict[str, Measurement]:
        return {}

    def group(
        self, scale: Scale, seed: int = 0, overrides: Mapping[str, Any] | None = None, only: Sequence[str] = ()
    ) -> Group | None:
        """The models to look at together, perhaps only some of them; none if what is asked for makes no comparison."""
        rows = [row for row in self.rows_at(scale) if is_among(row, only)]
        if len(rows) < min(2, len(self.rows)):
            return None
        runs = tuple(run_of(self, row, scale, seed, overrides) for row in rows)
        name = f"{self.name}, seed {seed}" if seed else self.name
        images = scale.limits.get(self.name, self.images[scale.name])
        return Group(name, runs, self.look, {"images": images, "seed": seed})

    def recorded(self, scale: Scale, store: Store, seed: int, overrides: Mapping[str, Any] | None) -> Record | None:
        """What was seen in most of the models, on the images asked for if possible, the newest of equals."""
        whole = self.group(scale, seed, overrides)
        assert whole is not None
        options, configs = whole.describe()["options"], [to_dict(run.config) for run in whole.runs]
        best, rank = None, (0, False)
        for record in self._looks(store, seed):
            if all(config in configs for config in record["configs"].values()):
                worth = (len(record["configs"]), record["measurement"]["options"] == options)
                best, rank = (record, worth) if worth >= rank else (best, rank)
        return best

    def _looks(self, store: Store, seed: int) -> list[Record]:
        """Every look on record, at whatever models and images, the oldest first: each has drawn over the last."""
        function = Group(self.name, (), self.look).describe()["function"]
        looks = [one for one in store.lines if one["measurement"].get("function") == function]
        return [one for one in looks if one["measurement"]["options"].get("seed") == seed and "configs" in one]

    def build(
        self,
        scale: Scale,
        store: Store,
        seeds: Sequence[int] = (0,),
        overrides: Mapping[str, Any] | None = None,
        command: str = "",
        remarks: Sequence[str] = (),
        only: Sequence[str] = (),
    ) -> Plain:
        """What was recorded, in plain values; complete if the models asked for are in it."""
        found = {seed: self.recorded(scale, store, seed, overrides) for seed in seeds}
        records = {seed: record for seed, record in found.items() if record is not None}
        asked = {row.title for row in self.rows_at(scale) if is_among(row, only)}
        seen = [{plain_title(name) for name in record["configs"]} for record in records.values()]
        absent = [row.title for row in self.rows_at(scale) if not all(row.title in titles for titles in seen)]
        return {
            "schema": SCHEMA,
            "table": self.name,
            "title": self.title,
            "scale": scale.name,
            "about": scale.about,
            "measured": self.about,
            "terms": dict(self.terms),
            "complete": len(records) == len(seeds) and all(asked <= titles for titles in seen),
            "absent": absent if records else [],
            "found": [self._found(record, seed, store) for seed, record in records.items()],
            "balls": _balls(records.values()),
            "standing": [one for record in records.values() for one in _standing(record, store, scale)],
            "runs": [_origin(record, name) for record in records.values() for name in record["configs"]],
            "remarks": [*([self.note] if self.note else []), *self._left_out(records, store), *remarks],
            "command": command,
        }

    def _found(self, record: Record, seed: int, store: Store) -> Plain:
        """What one look has seen, and what it depends on."""
        drawings = {figure_name(name, seed): caption for name, caption in self.figures.items()}
        ours = record is self._looks(store, seed)[-1]
        return {
            "seed": seed,
            "facts": record["result"],
            "figures": {name: caption for name, caption in drawings.items() if ours and (store.out / name).exists()},
            "minutes": record["seconds"] / 60,
            "commit": commit_of(record),
            "machine": machine_of(record),
            "data": list(dict.fromkeys(record["data"].values())),
        }

    def _left_out(self, records: Mapping[int, Record], store: Store) -> list[str]:
        """Where the figures in the folder are not of what the page tells."""
        return [
            f"The figures of seed {seed} are left out: they are of a later look, at other models or images."
            for seed, record in records.items()
            if self.figures and record is not self._looks(store, seed)[-1]
        ]


def plain_title(name: str) -> str:
    """The title of a row without its seed."""
    return name.partition(", seed ")[0]


def figure_name(name: str, seed: int) -> str:
    """``gradients.png``, or ``gradients-seed1.png``."""
    return f"{name}-seed{seed}.png" if seed else f"{name}.png"


def _balls(records: Iterable[Record]) -> list[str]:
    """The balls that the models were trained for, in which they are looked at."""
    attacks = [config["attack"] for record in records for config in record["configs"].values()]
    return list(dict.fromkeys(str(Ball(attack["norm"], attack["eps"])) for attack in attacks))


def _origin(record: Record, name: str) -> Plain:
    return training_origin(name, record["configs"][name], record["trained"][name], record["models"][name], [record])


def _standing(record: Record, store: Store, scale: Scale) -> list[Plain]:
    """What the models of a look have on record in both protocols: the same weights, on the most images."""
    columns = {"clean": (CLEAN.measure, "clean"), "paper": ("pgd-20", "pgd-20"), "honest": (HONEST.measure, ROBUST)}
    found = []
    for name, weights in record["models"].items():
        ours = [one for one in store.lines if one.get("weights") == weights]
        cells = {key: _widest(ours, MEASURES[made](scale), column) for key, (made, column) in columns.items()}
        found.append({"title": name, "weights": weights, **cells})
    return found


def _widest(records: Sequence[Record], measurement: Measurement, column: str) -> Plain | None:
    """A recorded proportion, with the ball it was measured in.

    What settles its numbers must be the same, and not the name alone: a sweep of one's own may call anything standard.
    """
    said = _settled(measurement.describe())
    fitting = [one["result"] for one in records if _settled(one["measurement"]) == said]
    cells = [{**one["columns"][column], "ball": one.get("ball")} for one in fitting if column in one.get("columns", {})]
    return max(cells, key=lambda cell: int(cell["n"]), default=None)


def _settled(said: Mapping[str, Any]) -> Plain:
    """What a measurement says of itself but its name and its number of images."""
    return {key: value for key, value in said.items() if key not in ("name", *HOW_MANY)}
