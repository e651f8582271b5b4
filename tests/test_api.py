"""The public API: what `import hardsphere` promises."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hardsphere


def test_every_public_name_can_be_used_before_and_after_its_home_is_imported() -> None:
    """`hardsphere.train` is a package and a function: both readings must work, in either order."""
    for name in hardsphere.__all__:
        assert callable(getattr(hardsphere, name))
    script = """
import hardsphere, hardsphere.train, hardsphere.evaluate, hardsphere.predict
config = hardsphere.recipe("digits/pgd")
for function in (hardsphere.train, hardsphere.evaluate, hardsphere.predict):
    try:
        function()
    except TypeError as error:
        assert "missing" in str(error), error
    else:
        raise AssertionError
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_importing_it_is_cheap() -> None:
    script = "import sys, hardsphere; assert 'torch' not in sys.modules; dir(hardsphere)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_torchs_compiler_is_not_imported_where_nothing_is_compiled() -> None:
    """It takes as long as all the rest of torch."""
    modules = "hardsphere.evaluate, hardsphere.predict, hardsphere.train"
    script = f"import sys, {modules}; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'attak'"):
        _ = hardsphere.attak  # type: ignore[attr-defined]
