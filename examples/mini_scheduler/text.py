"""Text and tokens: Qwen's vocabulary, and text that grows with a reply.

Encoding is for prompts. What was generated is kept as tokens, and is never made from its text again.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from typing import Any, Final

from qwen_reference import IMAGE_PAD, VIDEO_PAD, VISION_END, VISION_START, tokenizer

IM_START: Final = 151644
IM_END: Final = 151645
# This tokenizer has no ids for them and would spell them out.
_VISION: Final = {
    "<|vision_start|>": VISION_START,
    "<|vision_end|>": VISION_END,
    "<|image_pad|>": IMAGE_PAD,
    "<|video_pad|>": VIDEO_PAD,
}
_VISION_MARK: Final = re.compile("(" + "|".join(map(re.escape, _VISION)) + ")")


def encode(text: str, *, special: bool = False) -> list[int]:
    """Token ids of ``text``. ``special``: markers such as ``<|im_start|>`` become control tokens; otherwise they are text."""
    if not special:
        plain: list[int] = tokenizer().encode(text, allowed_special=set())
        return plain
    found: list[int] = []
    for part in _VISION_MARK.split(text):
        if part in _VISION:
            found.append(_VISION[part])
        elif part:
            found += tokenizer().encode(part)
    return found


def token_bytes(token_id: int) -> bytes:
    """The UTF-8 of a token, which may be a part of a character; nothing of a control token."""
    piece: Any = tokenizer().decoder.get(token_id, b"")
    return piece if isinstance(piece, bytes) else b""


def decode(token_ids: Iterable[int]) -> str:
    """The text of tokens, control tokens left out, U+FFFD for what is no UTF-8."""
    return b"".join(map(token_bytes, token_ids)).decode("utf-8", "replace")


class Detokenizer:
    """The text of a reply as it grows, given out once it is sure: whole characters, and no part of a stop string.

    ``text``: all that was given out. ``matched``: the stop string that ended it; nothing comes after.
    """

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        self._stops = stops
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # may yet be the beginning of a stop string
        self.text = ""
        self.matched: str | None = None

    def push(self, token_id: int) -> str:
        """What is sure with one more token."""
        return self._sure(self._characters.decode(token_bytes(token_id)), last=False)

    def finish(self) -> str:
        """What was held back, when no token follows."""
        return self._sure(self._characters.decode(b"", final=True), last=True)

    def _sure(self, new: str, *, last: bool) -> str:
        if self.matched is not None:
            return ""
        held = self._held + new
        found = min(((at, stop) for stop in self._stops if (at := held.find(stop)) >= 0), default=None)
        if found is not None:
            sure, self.matched, self._held = held[: found[0]], found[1], ""
        else:
            keep = 0 if last else max((_overlap(held, stop) for stop in self._stops), default=0)
            sure, self._held = held[: len(held) - keep], held[len(held) - keep :]
        self.text += sure
        return sure


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` are the beginning of ``stop``."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
