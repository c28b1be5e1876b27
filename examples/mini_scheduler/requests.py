"""What the front asks of the engine, and what it is told: the vocabulary of this package on one page.

A request is a draft under the node that ends its prompt. What the engine keeps beside it, pages and a slot, is of this moment:
take it away, and the draft still says all that is needed to run the request again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import attrs

from mini_scheduler.text import Detokenizer
from sessiontree import Draft, LimitExceeded, Node, OutOfRange, SessionTreeError

FinishReason = Literal["stop", "length", "abort", "error"]
MAX_STOPS: Final = 16
MAX_STOP_LENGTH: Final = 256


def _number(least: float, most: float) -> Any:
    def check(_: Any, attribute: attrs.Attribute[Any], value: float | None) -> None:
        if value is not None and not least <= value <= most:  # NaN is in no range
            raise OutOfRange(f"{attribute.name} {value} outside {least:g}..{most:g}", value=value, limit=most)

    return check


def _few_stops(_: Any, attribute: attrs.Attribute[Any], stops: tuple[Any, ...]) -> None:
    if len(stops) > MAX_STOPS:
        raise LimitExceeded(f"{len(stops)} in {attribute.name}; the most are {MAX_STOPS}", value=len(stops), limit=MAX_STOPS)
    for stop in stops:
        if isinstance(stop, str) and not 0 < len(stop) <= MAX_STOP_LENGTH:
            raise OutOfRange(
                f"a stop string has 1 to {MAX_STOP_LENGTH} characters, not {len(stop)}", value=len(stop), limit=MAX_STOP_LENGTH
            )


@attrs.frozen
class Sampling:
    """How tokens are picked and when a reply ends. Belongs to one request; nothing is taken over from an earlier one.

    ``temperature``: 0 takes the likeliest token. ``top_k``: of so many, -1 of all. ``seed``: equal seeds give equal replies to
    equal prompts; None: drawn from the draft's key. ``stop``: strings that end the text before them; the tokens in which one was
    said are history, as in SGLang. ``stop_token_ids``: tokens that end the reply, and are its last. ``ignore_eos``: never pick the
    end of the turn. Raises OutOfRange, LimitExceeded.
    """

    max_new_tokens: int = attrs.field(default=128, validator=_number(1, 2**20))
    temperature: float = attrs.field(default=1.0, validator=_number(0.0, 100.0))
    top_p: float = attrs.field(default=1.0, validator=_number(1e-6, 1.0))
    top_k: int = attrs.field(default=-1, validator=_number(-1, 2**31 - 1))
    seed: int | None = attrs.field(default=None, validator=_number(-(2**63), 2**64 - 1))
    stop: tuple[str, ...] = attrs.field(default=(), converter=tuple, validator=_few_stops)
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=tuple, validator=_few_stops)
    ignore_eos: bool = False


@attrs.frozen
class Output:
    """What one step added to a request; the last one has a ``finish_reason``.

    ``token_ids``: those that are new. ``text``: new text that is sure, of whole characters and no part of a stop string; the texts
    of all outputs joined are the reply's. ``matched``: the stop token or string. ``node``: the committed reply, with "stop" and
    "length". ``error``: why there is none, with "error". ``cached_tokens``: of the prompt, those whose KV was there.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    matched: int | str | None = None
    node: Node | None = None
    error: SessionTreeError | None = None
    reason: str = ""
    cached_tokens: int = 0


class Request:
    """One reply in the making.

    ``draft``: under the node that ends the prompt. ``tell``: called with each :class:`Output` on the engine's thread; it should
    only pass it on. ``salt``: of its KV pages: only requests of the same salt find them; None: the session's. ``metadata``: the
    node's, to which the engine adds ``text``. ``for_training``: the node is annotated with the log-probability of each token, and
    with the versions of the weights that sampled them.
    """

    def __init__(
        self,
        draft: Draft,
        sampling: Sampling,
        tell: Callable[[Output], None],
        *,
        salt: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        for_training: bool = False,
    ) -> None:
        self.draft = draft
        self.sampling = sampling
        self.tell = tell
        self.salt = (draft.parent.namespace.cache_salt or "") if salt is None else salt
        self.metadata = dict(metadata or {})
        self.for_training = for_training
        # The engine's.
        self.text = Detokenizer(sampling.stop)
        self.pages: list[int] = []  # its block table: the KV of path tokens [0, len(pages) * page_size)
        self.hashes: Sequence[bytes] = ()  # of the prompt's full pages
        self.named = 0  # how many of its pages others can find
        self.slot: int | None = None  # while it decodes
        self.cached_tokens: int | None = None  # None before it was admitted
        self.aborted: str | None = None  # why, once it is to go
        self.logprobs: list[float] = []  # of its tokens, where they are for training
        self.versions: list[int] = []  # of the weights that sampled each
        self.ended = False

    @property
    def left(self) -> int:
        """Tokens of its path that have no KV yet."""
        return self.draft.stop - self.draft.num_computed_tokens

    def __repr__(self) -> str:
        return f"<Request {self.draft.key!r}, {self.draft.num_computed_tokens} of {self.draft.stop} computed>"
