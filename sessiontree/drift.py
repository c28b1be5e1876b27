"""Why a history that was sent again has other ids: its special tokens, its whitespace, or only another tokenisation.

A client that keeps text instead of ids has its history tokenised anew with every request, and a chat template puts its own marks
around it. So a prompt may leave what is known though it says the same. :func:`drift_of` reads both from a few tokens before the
first that differs, which are the same on both and hold the beginning of a character that was cut there, to the end of the node
that goes on otherwise. Ids are never compared behind that place, only what they say, so it does not matter where tokens end.

What is read is text with marks in it: one for each special token, and one for each placeholder of a media item, whose ids are the
engine's and say nothing. Marks stand between surrogates, which no decoded text holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple, get_args

from sessiontree.node import Node, placed_media
from sessiontree.spans import Placeholders, placeholder_at, placeholders_between
from sessiontree.tokens import MAX_TOKEN_ID, TOKEN_BYTES, in_range, token_array

Drift = Literal["retokenised", "whitespace", "special", "content", "unknown"]
#: From the least to the greatest.
DRIFTS: Final[tuple[Drift, ...]] = get_args(Drift)
Decode = Callable[[list[int]], str | bytes]

_BEFORE: Final = 8  # tokens
_FIRST_KNOWN: Final = 64  # tokens
_MOST_KNOWN: Final = 4_096
_MOST_GIVEN: Final = 4 * _MOST_KNOWN
_BEGIN, _END = "\udc00", "\udc01"
_CUT: Final = "\ufffd"
_log: Final = logging.getLogger(__name__)


class _Unreadable(Exception):
    """The decoder raised, or gave no text."""


class Decoder(NamedTuple):
    """What makes text of ids, and the ids that are special tokens."""

    decode: Decode
    special_ids: frozenset[int]


class _Piece(NamedTuple):
    """A run of text, or a special token or placeholder as its mark; ``token``: the id of a special token."""

    text: str
    is_mark: bool = False
    token: int | None = None


def decoder_of(decode: Decode | None, special_ids: Iterable[int]) -> Decoder | None:
    """The decoder that a caller gives, checked. Raises TypeError and OutOfRange for what is none, or no ids."""
    if decode is None:
        return None
    if not callable(decode):
        raise TypeError(f"decode is a function of a list of ids, not {type(decode).__name__}")
    return Decoder(decode, frozenset(in_range(token, MAX_TOKEN_ID, "special id", "token ids") for token in special_ids))


def drift_of(decoder: Decoder, at: int, known: Node, prompt: bytes, media: Sequence[Placeholders]) -> Drift:
    """What the difference at path index ``at`` is, between ``known``, which holds another token there, and a prompt.

    ``media``: the placeholders of the prompt. Reads at most a few thousand tokens of either, and few where they say other things.
    "unknown" where the decoder raises or gives no text, which is logged.
    """
    if placed_media(known, at, at + 1) and placeholder_at(media, at) is not None:  # of the same item: else that would differ
        return "special"
    stop, near = min(known.stop, at + _MOST_KNOWN), min(known.stop, at + _FIRST_KNOWN)
    try:
        drift = _drift_up_to(near, decoder, at, known, prompt, media)
        # What differs at the beginning differs in the whole.
        return drift if drift == "content" or near == stop else _drift_up_to(stop, decoder, at, known, prompt, media)
    except _Unreadable as error:
        cause = error.__cause__
        _log.warning("%r cannot be compared with a prompt that leaves it: %s", known, cause, exc_info=cause)
        return "unknown"


def _drift_up_to(stop: int, decoder: Decoder, at: int, known: Node, prompt: bytes, media: Sequence[Placeholders]) -> Drift:
    """The same, going by path tokens up to ``stop`` of ``known``. Raises _Unreadable."""
    start, contents = max(at - _BEFORE, 0), dict[Any, int]()
    marks = _marks(placed_media(known, start, stop), contents)
    one = _pieces(decoder, known.input_ids(start, stop).tolist(), start, marks)
    reach, most = 2 * (stop - at) + 16, min(len(prompt) // TOKEN_BYTES, at + _MOST_GIVEN)
    while True:  # until the prompt says more
        end = min(at + reach, most)
        marks = _marks(placeholders_between(media, start, end), contents)
        two = _pieces(decoder, token_array(prompt)[start:end].tolist(), start, marks)
        if end == most or (len(_said(two)) > len(_said(one)) and len(_bare(two)) > len(_bare(one))):
            return _compared(decoder, one, two)
        reach *= 4


def _compared(decoder: Decoder, one: list[_Piece], two: list[_Piece]) -> Drift:
    if _alike(_said(one), _said(two)):
        return "retokenised"
    if _alike(_said(_unseparated(one)), _said(_unseparated(two))):
        return "special"
    if _alike(_dense(_said(one)), _dense(_said(two))):
        return "whitespace"
    if _alike(_bare(one), _bare(two)) or _alike(_spelled(decoder, one), _spelled(decoder, two)):
        return "special"
    return "content"


def _alike(one: str, two: str) -> bool:
    """Whether the longer of two texts begins with the shorter; a character that is cut at an end may be any of several bytes."""
    length = min(len(one), len(two))
    if one[:length] == two[:length]:
        return True
    if not length or one[: length - 1] != two[: length - 1]:
        return False
    ends = [(text[length - 1], other[length - 1]) for text, other in ((one, two), (two, one)) if len(text) == length]
    return any(end == _CUT and other > "\x7f" and other != _BEGIN for end, other in ends)


def _said(pieces: Iterable[_Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def _dense(text: str) -> str:
    return "".join(text.split())


def _bare(pieces: Iterable[_Piece]) -> str:
    """Without special tokens and whitespace."""
    return _dense(_said(piece for piece in pieces if piece.token is None))


def _unseparated(pieces: Sequence[_Piece]) -> list[_Piece]:
    """Without the whitespace that a template puts between two special tokens, or behind the last."""
    kept = []
    for number, piece in enumerate(pieces):
        behind = number > 0 and pieces[number - 1].token is not None
        before = number + 1 == len(pieces) or pieces[number + 1].token is not None
        if piece.is_mark or piece.text.strip() or not (behind and before):
            kept.append(piece)
    return kept


def _spelled(decoder: Decoder, pieces: Iterable[_Piece]) -> str:
    """With special tokens as they are written."""
    return _said(piece if piece.token is None else _Piece(_text(decoder, [piece.token])) for piece in pieces)


def _pieces(decoder: Decoder, ids: Iterable[int], start: int, marks: dict[int, str]) -> list[_Piece]:
    """What ids say, from path index ``start`` on. ``marks``: of placeholders, by path index."""
    pieces: list[_Piece] = []
    run: list[int] = []
    for index, token in enumerate(ids, start):
        mark = marks.get(index)
        if mark is None and token not in decoder.special_ids:
            run.append(token)
            continue
        if run:
            pieces.append(_Piece(_text(decoder, run)))
            run = []
        pieces.append(_Piece(_mark(token), True, token) if mark is None else _Piece(mark, True))
    if run:
        pieces.append(_Piece(_text(decoder, run)))
    return pieces


def _marks(spans: Iterable[Placeholders], contents: dict[Any, int]) -> dict[int, str]:
    """A mark for each placeholder, by path index; ``contents``: the numbers of items, the same for both that are compared."""
    return {
        index: _mark(f"{contents.setdefault(piece.content, len(contents))}.{piece.first + index - piece.start}")
        for piece in spans
        for index in range(piece.start, piece.stop)
    }


def _mark(name: object) -> str:
    return f"{_BEGIN}{name}{_END}"


def _text(decoder: Decoder, ids: list[int]) -> str:
    try:
        text = decoder.decode(ids)
        if isinstance(text, bytes):
            return text.decode("utf-8", "replace")
        if not isinstance(text, str):
            raise TypeError(f"a decoder gives str or bytes, not {type(text).__name__}")
    except Exception as error:
        raise _Unreadable from error
    return text
