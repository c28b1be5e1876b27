"""sessiontree: the session state of an LLM scheduler as an immutable, persistent tree.

Sessions are trees of turns with text, images and video. Every node is immutable: token ids, media, positions. Appending
and branching make new nodes that share everything with their parent.
"""

from sessiontree import pickling as _pickling  # noqa: F401  # nodes and trees can be pickled from here on
from sessiontree.annotations import Annotation, Ragged, Spans, TokenValues, TokenWindow
from sessiontree.compaction import GcReport
from sessiontree.details import Link
from sessiontree.draft import Draft, extend_drafts
from sessiontree.edits import Edit
from sessiontree.errors import (
    CorruptTree,
    DraftClosed,
    FinishRefused,
    HeadMoved,
    IncompatibleStore,
    InterchangeError,
    KeyTaken,
    LimitExceeded,
    MediaSpanError,
    NameTaken,
    NeedsExtra,
    NeedsMedia,
    NodeHeld,
    OutOfRange,
    PositionError,
    PositionLimitExceeded,
    SessionDiffers,
    SessionExists,
    SessionTreeError,
    StaleSession,
    StoreClosed,
    StoreFailed,
    StoreLocked,
    UnknownAlias,
    UnknownFormat,
    UnknownHead,
    UnknownNode,
    UnknownScheme,
    UnknownSession,
    Unsupported,
)
from sessiontree.events import Event, Subscription
from sessiontree.features import Features
from sessiontree.handles import NodeHandles
from sessiontree.heads import Head
from sessiontree.media import MediaItem, media_identity
from sessiontree.node import Namespace, Node
from sessiontree.positions import ExternalPositions, PositionScheme, PositionState
from sessiontree.prefixes import PrefixMatch
from sessiontree.query import Diff, Problem
from sessiontree.record import Fork, Recorded
from sessiontree.replay import ReplayStep, replay
from sessiontree.store import Evicted, Session, SessionStore, Usage
from sessiontree.tokens import Position
from sessiontree.tree import SessionTree

__version__ = "0.1.0"

__all__ = [
    "Annotation",
    "CorruptTree",
    "Diff",
    "Draft",
    "DraftClosed",
    "Edit",
    "Event",
    "Evicted",
    "ExternalPositions",
    "Features",
    "FinishRefused",
    "Fork",
    "GcReport",
    "Head",
    "HeadMoved",
    "IncompatibleStore",
    "InterchangeError",
    "KeyTaken",
    "LimitExceeded",
    "Link",
    "MediaItem",
    "MediaSpanError",
    "NameTaken",
    "Namespace",
    "NeedsExtra",
    "NeedsMedia",
    "Node",
    "NodeHandles",
    "NodeHeld",
    "OutOfRange",
    "Position",
    "PositionError",
    "PositionLimitExceeded",
    "PositionScheme",
    "PositionState",
    "PrefixMatch",
    "Problem",
    "Ragged",
    "Recorded",
    "ReplayStep",
    "Session",
    "SessionDiffers",
    "SessionExists",
    "SessionStore",
    "SessionTree",
    "SessionTreeError",
    "Spans",
    "StaleSession",
    "StoreClosed",
    "StoreFailed",
    "StoreLocked",
    "Subscription",
    "TokenValues",
    "TokenWindow",
    "UnknownAlias",
    "UnknownFormat",
    "UnknownHead",
    "UnknownNode",
    "UnknownScheme",
    "UnknownSession",
    "Unsupported",
    "Usage",
    "extend_drafts",
    "media_identity",
    "replay",
]
