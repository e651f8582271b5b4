"""What the first use costs: whether torch finds in its cache what it would otherwise have to compile."""

from __future__ import annotations

import getpass
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

# Where torch's compiler keeps compiled graphs inside its cache.
_GRAPHS = "fxgraph"


@dataclass(frozen=True)
class CompileCache:
    """The cache of torch's compiler as it was found.

    Attributes:
        directory: where it lies; ``TORCHINDUCTOR_CACHE_DIR`` puts it elsewhere.
        warm: whether it held compiled graphs of whatever kind, so that some or all of the compiling may be saved.
    """

    directory: str
    warm: bool


def compile_cache() -> CompileCache:
    """Look before anything is compiled. Nothing of the compiler is imported for that, which takes seconds itself."""
    place = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or _default_place())
    graphs = place / _GRAPHS
    return CompileCache(str(place), graphs.is_dir() and any(graphs.iterdir()))


def _default_place() -> Path:
    try:
        user = getpass.getuser()
    except (KeyError, ImportError, OSError):
        user = f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"
    safe = re.sub(r'[\\/:*?"<>|]', "_", user)
    return Path(tempfile.gettempdir()) / f"torchinductor_{safe}"
