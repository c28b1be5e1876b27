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
    "KeyTaken",
    "LimitExceeded",
    "MediaSpanError",
    "NameTaken",
    "NeedsMedia",
    "OutOfRange",
    "PositionError",
    "PositionLimitExceeded",
    "SessionExists",
    "SessionTreeError",
    "StaleSession",
    "StoreClosed",
    "StoreFailed",
    "StoreLocked",
    "UnknownHead",
    "UnknownNode",
    "UnknownScheme",
    "UnknownSession",
    "Unsupported",
]


class SessionTreeError(Exception):
    """Base of every failure. ``facts`` holds what the message names, by keyword; each fact is an attribute too."""

    facts: dict[str, Any]

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        # Only reached when normal lookup fails; `facts` itself is absent while an exception is being unpickled.
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        raise AttributeError(f"{type(self).__name__} has no fact {name!r}")


class UnknownNode(SessionTreeError):
    """A node, or a node id, that this session does not hold. ``node_id``: the 32 bytes that were asked for."""


class UnknownSession(SessionTreeError):
    """No open session has this id. ``session_id``."""


class UnknownHead(SessionTreeError, KeyError):
    """No head has this name. ``name``."""

    __str__ = Exception.__str__  # KeyError would show the repr of the message


class UnknownScheme(SessionTreeError):
    """No position scheme has this name. ``name`` and ``known``."""


class SessionExists(SessionTreeError):
    """An open session has this id already. ``session_id``."""


class KeyTaken(SessionTreeError):
    """``key`` names other content under the same parent. ``node``: the node that has it."""


class NameTaken(SessionTreeError):
    """A head of this name exists and ``expected=None`` asked for a free one. ``name`` and ``actual`` (a Head)."""


class HeadMoved(SessionTreeError):
    """A compare-and-set found another head. ``name`` and ``actual``: the Head that is there, None where there is none."""


class DraftClosed(SessionTreeError):
    """The draft was committed or aborted."""


class FinishRefused(SessionTreeError):
    """A draft that ended this way is never a node. ``finish_reason``."""


class OutOfRange(SessionTreeError):
    """A token id, token index, length or depth outside its range. ``value`` and ``limit``."""


class MediaSpanError(SessionTreeError):
    """Media that do not fit their placeholders. ``item`` and ``span`` (half-open; in the coordinates the message states)."""


class PositionError(SessionTreeError):
    """Positions, or parameters of a position scheme, that cannot be right."""


class LimitExceeded(SessionTreeError):
    """A context or size limit. ``value`` and ``limit``."""


class PositionLimitExceeded(PositionError, LimitExceeded):
    """A position at or above the scheme's ``max_position_limit``. ``value`` and ``limit``."""


class NeedsMedia(SessionTreeError):
    """Features were asked for that are not held. ``items``: the media items, in path order."""


class Unsupported(SessionTreeError):
    """Understood, and refused by name with the reason."""


class StaleSession(SessionTreeError):
    """A write through a session that was closed. ``session_id`` and ``incarnation``."""


class CorruptTree(SessionTreeError):
    """Stored bytes that do not match their digests."""


class IncompatibleStore(SessionTreeError):
    """A store of another format, scheme or model."""


class StoreLocked(SessionTreeError):
    """Another process writes to this store."""


class StoreFailed(SessionTreeError):
    """The store no longer takes writes."""


class StoreClosed(StoreFailed):
    """The store was closed."""
