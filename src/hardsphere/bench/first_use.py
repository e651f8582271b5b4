"""What the first use costs: whether torch finds in its cache what it would otherwise have to compile."""

from __future__ import annotations

from hardsphere.train.compiling import cache_place

# Where torch's compiler keeps compiled graphs inside its cache.
_GRAPHS = "fxgraph"


def cache_is_warm() -> bool:
    """Whether the compiler's cache holds graphs of whatever kind, so that some or all of the compiling may be saved.

    Look before anything is compiled. Nothing of the compiler is imported for that, which takes seconds itself.
    """
    graphs = cache_place() / _GRAPHS
    return graphs.is_dir() and any(graphs.iterdir())


def compile_phases(least: float = 0.5) -> dict[str, float]:
    """The seconds of this process in each phase of torch's compiler, by torch's names for them, longest first.

    Phases contain each other. Those that took less than ``least`` seconds are left out.
    """
    from torch._dynamo import utils

    spent = {name: sum(times) for name, times in getattr(utils, "compilation_time_metrics", {}).items()}
    return {name: spent[name] for name in sorted(spent, key=lambda name: -spent[name]) if spent[name] >= least}
