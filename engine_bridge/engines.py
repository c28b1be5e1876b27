"""Engines are imported when they are used, and whoever has none is told which to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sessiontree import NeedsExtra

RELEASES: Final = {"sglang": "sglang==0.5.23", "vllm": "vllm==0.33.0", "transformers": "transformers==5.24.*"}


@contextmanager
def importing(engine: str) -> Iterator[None]:
    """Around the imports from ``engine``. Raises NeedsExtra where it, or something that it needs itself, is not there.

    An engine whose import once failed half-way can fail otherwise the next time: by whatever it then misses.
    """
    try:
        yield
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise NeedsExtra(f"{engine} cannot be imported here ({what}): pip install {RELEASES[engine]}", extra=engine) from error
