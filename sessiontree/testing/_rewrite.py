"""Says what the suite needs, and has pytest explain its assertions. Imported before the modules that hold them."""

from __future__ import annotations

from sessiontree import NeedsExtra

try:
    import hypothesis  # noqa: F401
    import pytest
except ImportError as error:
    what = f"the suite needs pytest and hypothesis: pip install 'sessiontree[testing]' ({error})"
    raise NeedsExtra(what, extra="testing") from error

PARTS = ("depth", "durability", "forks", "heads", "keeping", "machine", "media", "model", "sharing", "turns")

pytest.register_assert_rewrite(*(f"{__package__}.{part}" for part in PARTS))
