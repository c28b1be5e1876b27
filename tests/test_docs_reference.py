"""The reference of the site names every public name, and nothing that is not there.

`make docs` holds the rest: pages in the navigation, links and their anchors.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
NAMED = frozenset(
    name for page in (DOCS / "reference").glob("*.md") for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
)


def places(value: Callable[..., object]) -> tuple[str, str]:
    """The module of a class or function, and its own name there."""
    return value.__module__, f"{value.__module__}.{value.__qualname__}"


@pytest.mark.parametrize("package", ["sessiontree", "engine_bridge", "sessiontree.interchange"])
def test_every_public_name_is_in_the_reference(package: str) -> None:
    """By where it is defined, or by that module or a package that gives it on."""
    found = importlib.import_module(package)
    public = {name: getattr(found, name) for name in found.__all__}
    missing = [name for name, value in public.items() if callable(value) and not {package, *places(value)} & NAMED]
    assert len(public) > 15 and not missing


@pytest.mark.parametrize("name", sorted(NAMED))
def test_what_the_reference_names_is_there(name: str) -> None:
    module, _, last = name.rpartition(".")
    try:
        found = importlib.import_module(name)
    except ModuleNotFoundError:
        found = getattr(importlib.import_module(module), last)
    assert found.__doc__
