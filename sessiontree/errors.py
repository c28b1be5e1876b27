"""Every failure of sessiontree, as types.

All of them derive from :class:`SessionTreeError`; each message names the thing, the span and the limit, and the same facts are
attributes. A wrong Python type is an ordinary ``TypeError``. An operation that raises has changed nothing.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CorruptTree",
    "DraftClosed",
    "FinishRefused",
    "HeadMoved",
    "IncompatibleStore",
    "InterchangeError",
    "KeyTaken",
    "LimitExceeded",
    "MediaSpanError",
    "NameTaken",
    "NeedsExtra",
    "NeedsMedia",
    "NodeHeld",
    "OutOfRange",
    "PositionError",
    "PositionLimitExceeded",
    "SessionDiffers",
    "SessionExists",
    "SessionTreeError",
    "StaleSession",
    "StoreClosed",
    "StoreFailed",
    "StoreLocked",
    "UnknownAlias",
    "UnknownFormat",
    "UnknownHead",
    "UnknownNode",
    "UnknownScheme",
    "UnknownSession",
    "Unsupported",
]


class SessionTreeError(Exception):
    """Base of every failure. What the message names is there as attributes too, those that each class declares."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.__dict__.update(facts)


class UnknownNode(SessionTreeError):
    """A node, or a node id, that this session does not hold. ``node_id``: the 32 bytes that were asked for."""

    node_id: bytes


class UnknownSession(SessionTreeError):
    """No open session has this id."""

    session_id: str


class UnknownHead(SessionTreeError, KeyError):
    """No head has this name."""

    name: str

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return Exception.__str__(self)


class UnknownAlias(SessionTreeError, KeyError):
    """Nothing was named by this alias."""

    alias: str

    def __str__(self) -> str:
        return Exception.__str__(self)


class UnknownScheme(SessionTreeError):
    """No position scheme has this name. ``known``: those that are."""

    name: str
    known: tuple[str, ...]


class UnknownFormat(SessionTreeError):
    """No interchange format has this name, or it does not go that way. ``known``: those that do."""

    name: str
    known: tuple[str, ...]


class InterchangeError(SessionTreeError):
    """A file of another tool says what cannot be read. ``path``: the file. ``place``: the line, or the path inside the document."""

    path: str
    place: str


class SessionExists(SessionTreeError):
    """An open session has this id already."""

    session_id: str


class SessionDiffers(SessionTreeError):
    """A session was to be copied to where there is one of its id that is no earlier state of it."""

    session_id: str


class KeyTaken(SessionTreeError):
    """``key`` names other content: under the same parent, where ``node`` is the Node that has it, or in the same namespace."""

    key: str
    node: Any
    identity: bytes
    item: Any


class HeadMoved(SessionTreeError):
    """A compare-and-set found another head. ``actual``: the Head that is there, None where there is none."""

    name: str
    actual: Any


class NameTaken(HeadMoved):
    """A head of this name exists and ``expected=None`` asked for a free one."""


class DraftClosed(SessionTreeError):
    """The draft was committed, aborted or handed over, or it timed out."""


class FinishRefused(SessionTreeError):
    """A draft that ended this way is never a node, or ``tail_policy`` is none."""

    finish_reason: str
    tail_policy: str


class OutOfRange(SessionTreeError):
    """A token id, token index, length or depth outside its range."""

    value: Any
    limit: Any
    index: int


class MediaSpanError(SessionTreeError):
    """Media that do not fit their placeholders. ``span``: half-open, in the coordinates that the message states."""

    item: Any
    span: tuple[int, int] | None
    limit: int


class PositionError(SessionTreeError):
    """Positions, or parameters of a position scheme, that cannot be right."""

    value: Any
    limit: Any
    item: Any
    parameter: str


class LimitExceeded(SessionTreeError):
    """A context or size limit. ``node``: the Node whose path is over it, where that is what was asked for."""

    value: Any
    limit: Any
    node: Any


class PositionLimitExceeded(PositionError, LimitExceeded):
    """A position at or above the scheme's ``max_position_limit``."""


class NeedsMedia(SessionTreeError):
    """Features were asked for that are not held. ``items``: the MediaItems, in path order."""

    items: tuple[Any, ...]


class NeedsExtra(SessionTreeError, ImportError):
    """A package that is not installed. ``extra``: the extra of sessiontree that brings it."""

    extra: str


class Unsupported(SessionTreeError):
    """Understood, and refused by name with the reason."""

    item: Any
    node: Any
    index: int
    prefix_len: int


class NodeHeld(SessionTreeError):
    """A node was to go, and ``holder``, a head, a pin or an open draft, holds ``node``: that one or one below it."""

    node: Any
    holder: str


class StaleSession(SessionTreeError):
    """A write through a session that was closed."""

    session_id: str
    incarnation: int


class CorruptTree(SessionTreeError):
    """Stored bytes that do not match their digests. ``session``: the number in its store of the one whose record they are."""

    session: int
    segment: int
    offset: int


class IncompatibleStore(SessionTreeError):
    """A store of another format, scheme or model."""


class StoreLocked(SessionTreeError):
    """Another process writes to this store."""


class StoreFailed(SessionTreeError):
    """The store no longer takes writes, or did not take this one. ``nodes``: ids of those that never will be durable."""

    nodes: tuple[bytes, ...] = ()


class StoreClosed(StoreFailed):
    """The store was closed."""
