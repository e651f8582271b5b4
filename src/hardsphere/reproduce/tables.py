"""The paper's tables as plans: which runs at which scale, and which column comes from which measurement.

Every table has the paper's columns, measured in the paper's protocol, and beside them the worst case over the standard
suite on the model as deployed (the honest protocol): `HONEST` is appended to each of them.

A new table is one entry in `TABLES`; if it needs a new kind of measurement, that is one more in `scales.MEASURES`. What
looks at several trained models at once is an entry in `hardsphere.reproduce.analyses`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hardsphere.corruptions import CORRUPTIONS, SEVERITIES
from hardsphere.errors import HardsphereError, nearest
from hardsphere.recipes import recipe
from hardsphere.reproduce import paper
from hardsphere.reproduce.measures import ROBUST, Measurement
from hardsphere.reproduce.plan import Group, Plan, Run, merge
from hardsphere.reproduce.scales import MEASURES, SCALES, Scale


@dataclass(frozen=True)
class Row:
    """A defence.

    Attributes:
        title: as printed; also the key of the paper's values.
        recipe: without the data, such as ``pgd-he``.
        overrides: of this row.
        against: the row it is paired with.
        severity: of corruptions, where a row is one severity.
        scales: where the row exists.
    """

    title: str
    recipe: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    against: str | None = None
    severity: int | None = None
    scales: tuple[str, ...] = tuple(SCALES)


@dataclass(frozen=True)
class Column:
    """A number of each row.

    Attributes:
        title: as printed; also the key of the paper's values.
        measure: the measurement it comes from; ``training`` for what training itself says.
        cells: the columns of outcomes that it is the mean of; ``{s}`` is the row's severity.
        note: what a reader must know.
        protocol: if other than the measurement's.
    """

    title: str
    measure: str
    cells: tuple[str, ...]
    note: str = ""
    protocol: str = ""


HONEST = Column("Standard", "standard", (ROBUST,), "AutoAttack's standard set")
CLEAN = Column("Clean", "pgd-20", ("clean",))
BLACK_BOX = "black-box"
"""The protocol of a single attack that sees answers only: the paper's columns, but not the worst case."""


@dataclass(frozen=True)
class Table:
    """One table of the paper.

    Attributes:
        name: what it is asked for by.
        title: its title.
        rows: the defences.
        columns: the paper's columns; the honest one is appended to them.
        data: the data set at the scales small and full.
        values: the paper's numbers by row and column.
        smoke_data: the data set at the scale smoke.
        headline: the columns that sum up a table too wide to be taken in at once.
    """

    name: str
    title: str
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    values: Mapping[str, Mapping[str, float]]
    data: str = "cifar10"
    smoke_data: str = "digits"
    headline: tuple[str, ...] = ()

    @property
    def all_columns(self) -> tuple[Column, ...]:
        return (*self.columns, HONEST)

    def rows_at(self, scale: Scale) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if scale.name in row.scales)

    def data_at(self, scale: Scale) -> str:
        return self.smoke_data if scale.name == "smoke" else self.data

    def measurements(self, scale: Scale) -> dict[str, Measurement]:
        """By the name that columns know them by, in the order of the work."""
        names = {column.measure for column in self.all_columns}
        return {name: make(scale) for name, make in MEASURES.items() if name in names}


class Item(Protocol):
    """What a run can be planned for: a table, or an analysis of trained models."""

    @property
    def name(self) -> str: ...
    @property
    def data(self) -> str: ...
    def rows_at(self, scale: Scale) -> tuple[Row, ...]: ...
    def data_at(self, scale: Scale) -> str: ...
    def measurements(self, scale: Scale) -> dict[str, Measurement]: ...


def run_of(item: Item, row: Row, scale: Scale, seed: int = 0, overrides: Mapping[str, Any] | None = None) -> Run:
    """The run behind a row."""
    data = item.data_at(scale)
    framework = row.recipe.partition("-")[0]
    # Corruptions need colour images: there the digits come from a file, with everything else as for digits.
    base, dataset = ("digits", {"dataset": "arrays"}) if data == "arrays" else (data, {})
    values = {**dataset, **scale.overrides(data, framework), **row.overrides, **(overrides or {}), "seed": seed}
    config = recipe(f"{base}/{row.recipe}", values)
    name = row.title if row.severity is None else row.title.rpartition(",")[0]
    return Run(f"{name}, seed {seed}" if seed else name, config, tuple(item.measurements(scale).values()))


def plan_of(
    items: Sequence[Item],
    scale: Scale,
    seeds: Sequence[int] = (0,),
    overrides: Mapping[str, Any] | None = None,
    keep_weights: bool = True,
    groups: Sequence[Group] = (),
    only: Sequence[str] = (),
) -> Plan:
    """Everything that some tables need at a scale, or the rows named by ``only``; what they share is done once."""
    runs = [
        run_of(item, row, scale, seed, overrides)
        for item in items
        for seed in seeds
        for row in item.rows_at(scale)
        if is_among(row, only)
    ]
    return merge(", ".join(item.name for item in items), runs, keep_weights, groups)


def is_among(row: Row, only: Sequence[str]) -> bool:
    """Whether a row is asked for, by its recipe (``pgd-he``) or its title (``PGD-AT + HE``); no names are all rows."""
    return not only or any(word.lower() in (row.recipe, row.title.lower()) for word in only)


def check_only(items: Sequence[Item], scale: Scale, only: Sequence[str]) -> None:
    """Refuse a name that is no row of any of these tables."""
    rows = [row for item in items for row in item.rows_at(scale)]
    for word in only:
        if not any(is_among(row, [word]) for row in rows):
            known = dict.fromkeys(row.recipe for row in rows)
            raise HardsphereError(
                f"There is no row '{word}' here: use one of {', '.join(known)}, or a row's title.{nearest(word, known)}"
            )


_FRAMEWORKS = {"PGD-AT": "pgd", "ALP": "alp", "TRADES": "trades", "FastAT": "fast", "FreeAT": "free"}
_HEADS = {"": "", " + HE": "-he", " + m-HE": "-mhe"}


def _grid(frameworks: Sequence[str], heads: Sequence[str]) -> tuple[Row, ...]:
    """Each framework with each head, paired with the plain one."""
    return tuple(
        Row(title + head, _FRAMEWORKS[title] + _HEADS[head], against=title if head else None)
        for title in frameworks
        for head in heads
    )


_THREE, _PLAIN_HE, _ALL_HEADS = ("PGD-AT", "ALP", "TRADES"), ("", " + HE"), ("", " + HE", " + m-HE")

_WHITE_BOX = (
    CLEAN,
    Column("PGD-20", "pgd-20", ("pgd-20",)),
    Column("PGD-500", "pgd-500", ("pgd-500",)),
    Column("MIM-20", "white-box", ("mim-20",)),
    Column("FGSM", "white-box", ("fgsm",), "one step of eps from the clean image"),
    Column("DeepFool", "white-box", ("deepfool",), "the smallest perturbation, counted only inside the ball"),
    Column("C&W", "white-box", ("cw-100",), "PGD on the margin"),
    Column(
        "C&W (legacy)",
        "few-images",
        ("cw-l2",),
        "minimum l2, counted only inside the l-inf ball: measures that filter, not robustness",
    ),
    Column("Feature", "few-images", ("feature",), "each restart aims at another image; the paper gives no settings"),
    Column("FAB", "white-box", ("fab-20",), "the smallest perturbation, counted only inside the ball"),
)
_ADAPTIVE = tuple(
    Column(f"PGD-{steps} with s, m", measure, (f"pgd-{steps}-adaptive",), protocol="adaptive")
    for steps, measure in ((20, "pgd-20"), (500, "pgd-500-adaptive"))
)

_SHORT = ("Gauss", "Shot", "Impulse", "Defocus", "Glass", "Motion", "Zoom", "Snow", "Frost", "Fog", "Bright", "Contra")
CORRUPTION_TITLES = dict(zip(CORRUPTIONS, (*_SHORT, "Elastic", "Pixel", "JPEG"), strict=True))
_MCA = Column("mCA", "corruptions", tuple(f"{name}-{severity}" for name in CORRUPTIONS for severity in SEVERITIES))
_CORRUPTION_MEANS = tuple(
    Column(title, "corruptions", tuple(f"{name}-{severity}" for severity in SEVERITIES))
    for name, title in CORRUPTION_TITLES.items()
)
_CORRUPTION_CELLS = tuple(Column(title, "corruptions", (name + "-{s}",)) for name, title in CORRUPTION_TITLES.items())


def _severities(rows: Sequence[Row]) -> tuple[Row, ...]:
    """A row for each severity of each defence."""
    return tuple(
        replace(
            row,
            title=f"{row.title}, severity {severity}",
            against=row.against and f"{row.against}, severity {severity}",
            severity=severity,
        )
        for row in rows
        for severity in SEVERITIES
    )


def _severity_values(cells: Mapping[str, paper.Cells]) -> dict[str, dict[str, float]]:
    return {
        f"{title}, severity {severity}": {CORRUPTION_TITLES[name]: values[severity - 1] for name, values in row.items()}
        for title, row in cells.items()
        for severity in SEVERITIES
    }


def _scale_and_margin(s: float, m: float) -> str:
    return f"TRADES + HE, s = {s}, m = {m}"


def _imagenet_rows() -> tuple[Row, ...]:
    rows = list(_grid(["FreeAT"], _PLAIN_HE))
    for title, model in (
        ("ResNet-152", "resnet152"),
        ("WRN-50-2", "wide_resnet50_2"),
        ("WRN-101-2", "wide_resnet101_2"),
    ):
        for row in _grid(["FreeAT"], _PLAIN_HE):
            against = row.against and f"{row.against}, {title}"
            rows.append(Row(f"{row.title}, {title}", row.recipe, {"model": model}, against, scales=("full",)))
    return tuple(rows)


def _steps_rows() -> tuple[Row, ...]:
    rows = []
    for k in range(1, 8):
        scales = tuple(SCALES) if k in (1, 3) else ("small", "full")
        plain = f"PGD-AT, k = {k}"
        rows.append(Row(plain, "pgd", {"attack.steps": k}, scales=scales))
        rows.append(Row(f"PGD-AT + HE, k = {k}", "pgd-he", {"attack.steps": k}, plain, scales=scales))
    return tuple(rows)


_ABLATION_ROWS = tuple(
    Row(f"PGD-AT{title}", f"pgd{variant}", against="PGD-AT" if variant else None)
    for title, variant in (("", ""), (" + FN", "-fn"), (" + WN", "-wn"), (" + FN + WN", "-fnwn"), (" + HE", "-he"))
)
_PGD_20 = (
    CLEAN,
    Column("PGD-20", "pgd-20", ("pgd-20",)),
    _ADAPTIVE[0],
)

_LIST = (
    Table(
        "table2",
        "Table 2. White-box attacks on CIFAR-10",
        _grid(_THREE, _ALL_HEADS),
        (*_WHITE_BOX, *_ADAPTIVE),
        paper.TABLE_2_AND_10 | {row: {**paper.TABLE_2[row], **paper.ADAPTIVE.get(row, {})} for row in paper.TABLE_2},
        headline=("Clean", "PGD-20", "PGD-20 with s, m"),
    ),
    Table(
        "table3",
        "Table 3. FastAT and FreeAT with HE and m-HE on CIFAR-10",
        _grid(("FastAT", "FreeAT"), _ALL_HEADS),
        (
            Column("Epochs", "training", ("epochs",)),
            Column("Clean", "pgd-50-10", ("clean",)),
            Column("PGD-50", "pgd-50-10", ("pgd-50-10",)),
            Column(
                "Minutes", "training", ("minutes",), "training alone, without compiling, on the hardware named below"
            ),
        ),
        paper.TABLE_3,
    ),
    Table(
        "table4",
        "Table 4. FreeAT with HE on ImageNet, or any image folder",
        _imagenet_rows(),
        (
            Column("Clean", "imagenet-pgd", ("clean",)),
            Column("PGD-10", "imagenet-pgd", ("pgd-10",)),
            Column("PGD-50", "imagenet-pgd", ("pgd-50",)),
        ),
        paper.TABLE_4,
        data="folder",
    ),
    Table(
        "table5",
        "Table 5. Common corruptions on CIFAR-10-C, means over severities",
        _grid(_THREE, _PLAIN_HE),
        (_MCA, *_CORRUPTION_MEANS[3:]),
        paper.TABLE_5,
        smoke_data="arrays",
        headline=("mCA",),
    ),
    Table(
        "table6",
        "Table 6. RayS and AutoAttack on CIFAR-10",
        (
            Row("PGD-AT", "pgd"),
            Row("PGD-AT + HE", "pgd-he", against="PGD-AT"),
            Row("PGD-AT, WRN-34-20", "pgd", {"model": "wrn-34-20"}, scales=("full",)),
            Row("PGD-AT + HE, WRN-34-20", "pgd-he", {"model": "wrn-34-20"}, "PGD-AT, WRN-34-20", scales=("full",)),
        ),
        (
            Column("Clean", "raw-standard", ("clean",)),
            Column("RayS", "rays", ("rays",), "the paper does not state its number of queries", BLACK_BOX),
            Column("AutoAttack", "raw-standard", (ROBUST,), "as the paper ran it"),
        ),
        paper.TABLE_6,
    ),
    Table(
        "table8",
        "Table 8. Query-based black-box attacks on CIFAR-10",
        _grid(_THREE, _PLAIN_HE),
        tuple(
            Column(name.upper(), "blackbox", (name,), protocol=BLACK_BOX)
            for name in ("zoo", "spsa-20", "spsa-50", "spsa-80", "nes-20", "nes-50", "nes-80")
        ),
        paper.TABLE_8,
    ),
    Table(
        "table9",
        "Table 9. Scale s and margin m of TRADES + HE on CIFAR-10",
        (
            Row("TRADES", "trades"),
            *(
                Row(_scale_and_margin(s, m), "trades-he", {"head.scale": s, "head.margin": m}, "TRADES")
                for s, m in paper.TABLE_9
            ),
        ),
        _PGD_20,
        {"TRADES": {"Clean": 84.62, "PGD-20": 56.48}}
        | {
            _scale_and_margin(*key): dict(zip(("Clean", "PGD-20"), pair, strict=True))
            for key, pair in paper.TABLE_9.items()
        },
    ),
    Table(
        "table10",
        "Table 10. m-HE under white-box attacks on CIFAR-10",
        _grid(_THREE, _ALL_HEADS),
        tuple(column for column in _WHITE_BOX if column.title not in ("Feature", "FAB")),
        paper.TABLE_10,
        headline=("Clean", "PGD-20"),
    ),
    Table(
        "table11",
        "Table 11. Common corruptions on CIFAR-10-C, all 75 cells",
        _severities(_grid(_THREE, _PLAIN_HE)),
        _CORRUPTION_CELLS,
        _severity_values(paper.TABLE_11),
        smoke_data="arrays",
    ),
    Table(
        "table12",
        "Table 12. Common corruptions on ImageNet-C, all 75 cells",
        _severities(_grid(["FreeAT"], _PLAIN_HE)),
        _CORRUPTION_CELLS,
        _severity_values(paper.TABLE_12),
        data="folder",
        smoke_data="arrays",
    ),
    Table(
        "ablation",
        "Ablation. FN, WN and the margin of PGD-AT on CIFAR-10 (section 4.1)",
        _ABLATION_ROWS,
        _PGD_20,
        paper.ABLATION,
    ),
    Table(
        "adaptive",
        "Adaptive attacks. PGD with s and m on CIFAR-10 (section 4.1)",
        _grid(["PGD-AT"], _ALL_HEADS),
        (CLEAN, *(column for column in _WHITE_BOX if column.title in ("PGD-20", "PGD-500")), *_ADAPTIVE),
        paper.ADAPTIVE,
    ),
    Table(
        "steps",
        "Fig. 2, left. PGD-AT with k steps in training, under PGD-20 on CIFAR-10",
        _steps_rows(),
        _PGD_20,
        {},
    ),
)

TABLES: dict[str, Table] = {table.name: table for table in _LIST}
