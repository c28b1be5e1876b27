"""A draft: one generation in flight.

It is the one mutable thing that readers of a tree ever hold, and it belongs to one owner. It reads like the node it may become,
so that a preempted request can be prefilled again from it. It is no part of any tree: committing makes the node in one step,
aborting it, or dropping the last reference, leaves no trace. As bytes it goes on in another process (:mod:`sessiontree.handover`).

Beside its owner, the thread that calls ``SessionStore.tick`` may close it, under its session's lock. Committing and handing over
say under that lock that they have begun, so a draft is closed once. Taking tokens takes no lock, and only leaves word that it was
used: a draft whose owner comes back at the very moment of its time-out may take tokens that lead nowhere, once.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from sys import getsizeof
from types import TracebackType
from typing import Any, Final, Literal, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray
from pyrsistent import PMap

from sessiontree.details import TAIL_POLICIES, USUAL_DETAILS, Details, TailPolicy
from sessiontree.errors import (
    DraftClosed,
    FinishRefused,
    LimitExceeded,
    PositionLimitExceeded,
    Unsupported,
)
from sessiontree.frozen import EMPTY_METADATA, checked_text, freeze_metadata, handed_out
from sessiontree.heads import UNSET, Head
from sessiontree.locks import new_lock
from sessiontree.media import MediaItem
from sessiontree.node import MediaSpan, Node, Origin, positions_in, positions_table, refuse_inside_item
from sessiontree.node import position_pieces as node_pieces
from sessiontree.positions import Mode, PositionScheme, PositionState
from sessiontree.positions.runs import Piece
from sessiontree.tokens import (
    MAX_TOKEN_ID,
    TOKEN_BYTES,
    Position,
    TokenIds,
    in_range,
    token_array,
    token_bytes,
    window,
)
from sessiontree.turns import Turn, plan_turn

REFUSED_FINISH_REASONS: Final = frozenset({"abort", "error"})
MAX_STATE_BYTES: Final = 2**20
DRAFT_BYTES: Final = 700  # of a draft without tokens and states: measured

HowClosed = Literal["committed", "aborted", "timed out", "handed over"]
#: Openings of sessions that a draft has been in: each the identity of a store and an incarnation there, a store at most once.
Openings = tuple[tuple[bytes, int], ...]


class Host(Protocol):
    """What a draft needs of its session. ``_lock``: held by whoever closes a draft that is not his."""

    _lock: Any

    def _commit(
        self,
        parent: Node,
        turn: Turn,
        details: Details,
        head: str | None,
        expected: Any,
        annotations: Mapping[str, Any] | None,
    ) -> Node: ...

    def _close_draft(self, draft: Draft, how: HowClosed) -> None:
        """Shut a draft, and tell of it."""

    def _packed(self, draft: Draft, with_path: bool) -> bytes: ...


class _Nowhere:
    """Where a closed draft is: it holds its path and nothing else."""

    _lock = new_lock()

    def _commit(self, *_: object) -> NoReturn:
        raise DraftClosed("this draft was closed")

    def _close_draft(self, draft: Draft, how: HowClosed) -> None:
        draft._shut(how)

    def _packed(self, draft: Draft, with_path: bool) -> NoReturn:
        raise DraftClosed("this draft was closed")


NOWHERE: Final[Host] = _Nowhere()


class Draft:
    """Generated tokens under ``parent`` that are not a node yet. Made by ``Session.draft``; as a context manager it aborts on exit.

    ``start``: path index of its first token. ``len``: tokens taken so far. Reading works after it is closed; writing raises
    DraftClosed.
    """

    __slots__ = (
        "__weakref__",
        "_computed",
        "_ending",
        "_first",
        "_host",
        "_how_closed",
        "_key",
        "_last_used",
        "_max_tokens",
        "_metadata",
        "_openings",
        "_parent",
        "_planned",
        "_role",
        "_room",
        "_start",
        "_states",
        "_tokens",
        "_used",
    )

    origin: Origin = "generated"
    media: tuple[MediaItem, ...] = ()

    def __init__(
        self,
        parent: Node,
        *,
        role: str,
        metadata: PMap[str, Any],
        key: str,
        max_tokens: int | None,
        host: Host,
        openings: Openings = (),
    ) -> None:
        """``max_tokens``: limit of the path's length. ``host``: its session. ``openings``: those that it may come back to."""
        state, replayed, scheme = parent.state, parent.replayed, parent._lineage.scheme
        if state.open_blocks:
            refuse_inside_item(parent, parent, "nothing can be generated there")
        self._parent = parent
        self._start = parent.stop
        self._role = role if type(role) is str and role.isascii() else checked_text(role, "role")
        self._key = key if type(key) is str and key.isascii() else checked_text(key, "key")
        self._metadata = metadata
        self._max_tokens = max_tokens
        self._host = host
        self._openings = openings
        self._tokens = array("i")
        self._states: list[tuple[int, bytes]] = []
        self._computed = 0
        self._how_closed: HowClosed | None = None
        self._ending = False  # it is being committed or handed over
        self._used = True  # since the last tick
        self._last_used = 0.0  # the time of the tick that saw it used
        # Its tokens have positions in both modes; as replayed they can stand further on than as decoded.
        first = max(state.max_position + 1, (state if replayed is None else replayed.state).next_position)
        self._first = first
        room = scheme.max_position_limit - first
        self._room = room if type(room) is int else math.ceil(room)
        if max_tokens is not None:
            self._room = min(self._room, max_tokens - parent.stop)
        self._planned = scheme.decode_room(state)
        if self._planned is not None:
            self._room = min(self._room, self._planned)

    # Writing

    def append(self, token_id: int) -> None:
        """Take one token. Raises OutOfRange, LimitExceeded, PositionLimitExceeded, DraftClosed; nothing is taken then."""
        token = in_range(token_id, MAX_TOKEN_ID, "token id", self)
        self._make_room(1)
        self._tokens.append(token)
        self._used = True

    def extend(self, token_ids: TokenIds) -> None:
        """Take many tokens, or none if one of them cannot be. Raises TypeError and what :meth:`append` raises."""
        data = token_bytes(token_ids, self._max_tokens)
        self._make_room(len(data) // TOKEN_BYTES)
        self._tokens.frombytes(data)
        self._used = True

    def _make_room(self, count: int) -> None:
        if self._how_closed is not None:
            self._check_open()
        if len(self._tokens) + count > self._room:
            stop = self.stop + count
            if self._max_tokens is not None and stop > self._max_tokens:
                raise LimitExceeded(
                    f"{self!r}: a path of {stop} tokens; the session allows {self._max_tokens}",
                    value=stop,
                    limit=self._max_tokens,
                )
            if self._planned is not None and len(self._tokens) + count > self._planned:
                raise Unsupported(
                    f"{self!r}: {self.scheme.name} decodes by a plan, which is {self._planned} tokens long here; "
                    "append a generated image with its grid",
                    limit=self._planned,
                )
            limit = self.scheme.max_position_limit
            position = self._first + len(self._tokens) + count - 1
            raise PositionLimitExceeded(
                f"{self!r}: position {position} is not below {self.scheme.name}'s max_position_limit of {limit}",
                value=position,
                limit=limit,
            )

    def _check_open(self) -> None:
        if self._how_closed is not None:
            raise DraftClosed(f"{self!r} was {self._how_closed}", draft=self)

    def touch(self) -> None:
        """Say that it is still wanted, though it waits for its turn: its time-out begins anew. Raises DraftClosed."""
        self._check_open()
        self._used = True

    def rollback(self, length: int) -> None:
        """Keep its first ``length`` tokens (speculative decoding), the state that was current there, and what is computed of them.

        Raises OutOfRange outside 0..len, DraftClosed.
        """
        self._check_open()
        length = in_range(length, len(self._tokens), "length", self)
        del self._tokens[length:]
        while self._states and self._states[-1][0] > length:
            self._states.pop()
        self._computed = min(self._computed, self._start + length)
        self._used = True

    def set_state(self, state: bytes) -> None:
        """Keep a small opaque state (grammar, sampler) that belongs to the tokens so far. At most 1 MiB, else LimitExceeded."""
        self._check_open()
        if not isinstance(state, (bytes, bytearray, memoryview)):
            raise TypeError(f"a draft's state is bytes, not {type(state).__name__}")
        kept = bytes(state)
        if len(kept) > MAX_STATE_BYTES:
            raise LimitExceeded(f"a state of {len(kept)} bytes", value=len(kept), limit=MAX_STATE_BYTES)
        at = len(self._tokens)
        if self._states and self._states[-1][0] == at:
            self._states.pop()
        if not self._states or self._states[-1][1] != kept:
            self._states.append((at, kept))
        self._used = True

    @property
    def state(self) -> bytes | None:
        """The opaque state set last at or before the tokens kept; None if there is none."""
        return self._states[-1][1] if self._states else None

    @property
    def num_computed_tokens(self) -> int:
        """How many tokens of its path have KV, from the first on, as its engine says: 0 at first.

        A scheduler sets it to what a prefix cache has, and again after each chunk; the next chunk is path tokens
        ``[num_computed_tokens, stop)``, or as many of them as fit. Raises OutOfRange outside 0..stop, DraftClosed.
        """
        return self._computed

    @num_computed_tokens.setter
    def num_computed_tokens(self, count: int) -> None:
        self._check_open()
        self._computed = in_range(count, self.stop, "num_computed_tokens", self)
        self._used = True

    def preempt(self) -> None:
        """Its KV was given up: nothing is computed, so it is prefilled again, its own tokens included. Raises DraftClosed."""
        self.num_computed_tokens = 0

    def commit(
        self,
        finish_reason: str = "stop",
        length: int | None = None,
        tail_policy: TailPolicy = "keep",
        *,
        metadata: Mapping[str, Any] | None = None,
        head: str | None = None,
        expected: Head | Node | bytes | None = UNSET,
        annotations: Mapping[str, Any] | None = None,
    ) -> Node:
        """Make the node: the first ``length`` tokens (None: all), as the client saw them.

        ``metadata`` replaces the draft's: what is known only now, such as the ids of tool calls that were made. ``head``: moved to
        it in the same step, by compare-and-set where ``expected`` is given. ``annotations``: said of the node in the same step, as
        by :meth:`Session.annotate`; arrays have a row for each token that is committed. All of it or nothing.

        ``tail_policy="drop_last"`` leaves out the last of them, as engines do whose next prompt lacks the final sampled token;
        it is recorded on the node. Raises FinishRefused for "abort" and "error" in any case, OutOfRange for a length outside
        0..len, KeyTaken where the draft's key names other content, HeadMoved, NameTaken, StaleSession, DraftClosed. A commit
        that raises leaves the draft open.
        """
        try:
            self._begin_end()
            details = USUAL_DETAILS.get(finish_reason) if type(finish_reason) is str else None
            if details is None:
                finish_reason = checked_finish_reason(finish_reason)
            data = self._tokens.tobytes()
            if length is not None or tail_policy.__class__ is not str or tail_policy != "keep":
                data, tail_policy = self._cut(data, length, tail_policy)
                details = None
            parent = self._parent
            turn = plan_turn(parent._lineage.scheme, parent, data, (), "generated", self._role, self._key)
            frozen = self._metadata if metadata is None else freeze_metadata(metadata)
            if details is None or frozen is not EMPTY_METADATA:
                details = Details(frozen, finish_reason, tail_policy)
            node = self._host._commit(parent, turn, details, head, expected, annotations)
            self._host._close_draft(self, "committed")
        finally:
            self._ending = False
        return node

    def _cut(self, data: bytes, length: int | None, tail_policy: TailPolicy) -> tuple[bytes, TailPolicy]:
        """What is to be kept of its tokens, and the policy, checked."""
        tail_policy = checked_text(tail_policy, "tail_policy")  # type: ignore[assignment]
        if tail_policy not in TAIL_POLICIES:
            raise FinishRefused(f"no tail policy {tail_policy!r}; keep or drop_last", tail_policy=tail_policy)
        had = len(data) // TOKEN_BYTES
        count = had if length is None else in_range(length, had, "length", self)
        if tail_policy == "drop_last":
            count = max(0, count - 1)
        return data[: count * TOKEN_BYTES], tail_policy

    def hand_over(self, *, with_path: bool = False) -> bytes:
        """Close it here, to go on elsewhere: bytes for :meth:`Session.adopt` and :meth:`SessionStore.adopt`, in any process.

        They hold its tokens, its states, what is computed, and the id of its parent, not the path; ``with_path``: that too, for a
        process that cannot read the store. Adopted where it was made, and committed, it gives the node it would have given had it
        never left. Nothing here holds its parent or its session meanwhile: pin the one, and use the other within its idle_ttl.

        Raises LimitExceeded for what no record holds, DraftClosed. A hand-over that raises leaves the draft open.
        """
        try:
            self._begin_end()
            data = self._host._packed(self, with_path)
            self._close("handed over")
        finally:
            self._ending = False
        return data

    def abort(self) -> None:
        """Give it up. Nothing of it was ever in the tree. Raises DraftClosed after a commit, and once it was handed over."""
        if self._how_closed not in ("aborted", "timed out"):
            self._check_open()
            self._close("aborted")

    def _begin_end(self) -> None:
        """From here on it does not time out, until whoever calls this lets go of ``_ending``."""
        with self._host._lock:
            if self._how_closed is not None:
                self._check_open()
            self._ending = True

    def _times_out(self, now: float, ttl: float) -> bool:
        """Whether nothing was done to it for ``ttl``, in the store's time; its session's lock is held."""
        if self._used:  # since the tick before: nobody knows when, so none is aborted early
            self._used, self._last_used = False, now
        return not self._ending and self._how_closed is None and now - self._last_used >= ttl

    def _close(self, how: HowClosed) -> None:
        self._host._close_draft(self, how)

    def _shut(self, how: HowClosed) -> None:
        self._how_closed = how
        self._host = NOWHERE

    def _reopen(self, host: Host) -> None:
        """Go on with it where it was: what it was committed as will never be durable."""
        self._host, self._used = host, True
        self._how_closed = None

    @property
    def closed(self) -> bool:
        """Whether it takes no more tokens: see :attr:`how_closed`."""
        return self._how_closed is not None

    @property
    def how_closed(self) -> HowClosed | None:
        """ "committed", "aborted", "timed out" (aborted by :meth:`SessionStore.tick`), "handed over"; None while it is open."""
        return self._how_closed

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self.closed:
            self.abort()

    # Reading, as a node

    @property
    def parent(self) -> Node:
        """The node it would be a child of."""
        return self._parent

    @property
    def start(self) -> int:
        """Path index of its first token."""
        return self._start

    @property
    def role(self) -> str:
        """The role its node will have."""
        return self._role

    @property
    def key(self) -> str:
        """The key its node will have."""
        return self._key

    @property
    def scheme(self) -> PositionScheme:
        """The position scheme of its session."""
        return self.parent.scheme

    @property
    def metadata(self) -> PMap[str, Any]:
        """The metadata its node will have; a copy each time."""
        metadata: PMap[str, Any] = handed_out(self._metadata)
        return metadata

    @property
    def depth(self) -> int:
        """The depth its node would have."""
        return self.parent.depth + 1

    @property
    def stop(self) -> int:
        """Path index after its last token."""
        return self.start + len(self._tokens)

    @property
    def room(self) -> int:
        """How many more tokens it can take before a context or position limit."""
        return max(0, self._room - len(self._tokens))

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Its own tokens so far: (stop - start,) int32, a read-only copy."""
        return token_array(self._tokens.tobytes())

    @property
    def next_position(self) -> Position | float:
        """Where a prefilled token after it would stand."""
        return self.scheme.next_position(self.position_state())

    @property
    def mrope_position_delta(self) -> int | float:
        """max_position + 1 - stop: the token at index i that is decoded next stands at i + delta."""
        return self.scheme.mrope_position_delta(self.position_state())

    def position_state(self, mode: Mode = "as_decoded") -> PositionState:
        """The state that positions after its tokens continue from."""
        state = positions_in(self.parent, mode).state
        if mode == "as_decoded":
            return self.scheme.plan_decode(state, len(self._tokens))[1]
        return self.scheme.plan(state, self._tokens.tobytes())[1]

    def path(self) -> tuple[Node, ...]:
        """The nodes from the root to its parent: all that is committed of its path."""
        return self.parent.path()

    def input_ids(self, start: int = 0, stop: int | None = None, *, copy: bool = True) -> NDArray[np.int32]:
        """Path tokens ``[start, stop)``, its own included: (stop - start,) int32, read-only. Raises OutOfRange.

        As for a node; its own tokens are copied in any case.
        """
        first, last = window(start, stop, self.stop)
        if last <= self.start:
            return self.parent.input_ids(first, last, copy=copy)
        own = self._tokens[max(0, first - self.start) : last - self.start].tobytes()
        if first >= self.start:
            return token_array(own)
        return token_array(self.parent._extent.read_bytes(first, self.start) + own)

    def positions(
        self, start: int = 0, stop: int | None = None, mode: Mode = "as_decoded", *, out: NDArray[Any] | None = None
    ) -> NDArray[Any]:
        """Positions of path tokens ``[start, stop)``: (num_axes, stop - start), read-only. As for a node."""
        first, last = window(start, stop, self.stop)
        return positions_table(self.scheme, last - first, position_pieces(self, first, last, mode), out)

    def media_spans(self, start: int = 0, stop: int | None = None) -> tuple[MediaSpan, ...]:
        """(item, start, stop) for each span of its path that meets the window, clipped to it. As for a node."""
        first, last = window(start, stop, self.stop)
        return self.parent.media_spans(min(first, self.start), min(last, self.start))

    def _held_bytes(self) -> int:
        """What it takes in memory: tokens, states, and itself."""
        return DRAFT_BYTES + getsizeof(self._tokens) + sum(getsizeof(state) for _, state in self._states)

    def __len__(self) -> int:
        return len(self._tokens)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        how = self._how_closed or "open"
        where = f"tokens=[{self.start}, {self.stop}) role={self.role!r} under {self.parent.id[:4].hex()}"
        return f"<Draft {self.key!r} {how} {where}>"

    def __reduce__(self) -> Any:
        raise TypeError("a draft belongs to its session and is not pickled; hand_over gives bytes")


def position_pieces(draft: Draft, start: int, stop: int, mode: Mode) -> list[Piece]:
    """What of its path's runs covers path tokens ``[start, stop)``, as :func:`sessiontree.node.position_pieces` for a node."""
    own = draft.start
    pieces = node_pieces(draft.parent, min(start, own), min(stop, own), mode)
    if stop > own:
        scheme, state, tokens = draft.scheme, positions_in(draft.parent, mode).state, draft._tokens
        plan = scheme.plan_decode(state, len(tokens)) if mode == "as_decoded" else scheme.plan(state, tokens.tobytes())
        begin = max(start, own)
        pieces.append(Piece(begin - start, plan[0], begin - own, stop - own))
    return pieces


def checked_finish_reason(finish_reason: Any) -> str:
    """The finish reason of what becomes a node. Raises FinishRefused for "abort", "error" and none at all, TypeError."""
    reason = checked_text(finish_reason, "finish_reason")
    if not reason or reason.strip().casefold() in REFUSED_FINISH_REASONS:
        raise FinishRefused(f"a generation that ended with {reason!r} is no turn; abort it", finish_reason=reason)
    return reason


def extend_drafts(drafts: Sequence[Draft], token_ids: TokenIds | Sequence[TokenIds]) -> None:
    """Let each draft of a batch take its tokens, all of them or none.

    ``token_ids``: (B,) ints, one for each draft, or B sequences of ints. Raises what :meth:`Draft.extend` raises, TypeError for
    lengths that differ or a draft that is named twice.
    """
    drafts = tuple(drafts)
    for draft in drafts:
        if type(draft) is not Draft:
            raise TypeError(f"a batch is of drafts, not {type(draft).__name__}")
    if len(set(map(id, drafts))) != len(drafts):
        raise TypeError("a draft stands twice in one batch")
    if isinstance(token_ids, (list, tuple)) and any(map(_is_run, token_ids)):
        runs = [token_bytes(tokens) for tokens in token_ids]
        _check_lengths(drafts, runs)
        for draft, run in zip(drafts, runs, strict=True):
            draft._make_room(len(run) // TOKEN_BYTES)
        for draft, run in zip(drafts, runs, strict=True):
            draft._tokens.frombytes(run)
            draft._used = True
        return
    tokens = memoryview(token_bytes(token_ids)).cast("i").tolist()
    _check_lengths(drafts, tokens)
    for draft in drafts:
        if draft._how_closed is not None or len(draft._tokens) >= draft._room:
            draft._make_room(1)
    for draft, token in zip(drafts, tokens, strict=True):
        draft._tokens.append(token)
        draft._used = True


def _check_lengths(drafts: Sequence[Draft], tokens: Sequence[Any]) -> None:
    if len(drafts) != len(tokens):
        raise TypeError(f"{len(drafts)} drafts and tokens for {len(tokens)}")


def _is_run(tokens: Any) -> bool:
    """Whether an entry of a batch is several tokens rather than one."""
    return isinstance(tokens, Sequence) or getattr(tokens, "ndim", 0) > 0
