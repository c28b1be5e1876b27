"""What was generated, and the requests that it was generated from, so that an engine can run them again.

A draft becomes one node, so a step of a replay is one node of origin "generated". Its prompt is the path of its parent, at the
positions that path was decoded with, which is what the engine's KV cache held then; a replay of the prompt at other positions
answers another question. Sampling is the engine's: what of it has to be known again belongs in ``metadata``.

A draft that was aborted, or is open still, was never recorded: no step stands for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, cast

import attrs
import numpy as np
from numpy.typing import NDArray
from pyrsistent import PMap

from sessiontree.details import Link, TailPolicy
from sessiontree.errors import CorruptTree
from sessiontree.media import MediaItem, each_content_once
from sessiontree.node import MediaSpan, Node
from sessiontree.stored import StoredIndex
from sessiontree.tokens import Position
from sessiontree.tree import SessionTree

__all__ = ["ReplayStep", "replay"]


class OneSession(Protocol):
    """A Session, or a bundle's."""

    @property
    def id(self) -> str: ...
    @property
    def tree(self) -> SessionTree: ...


class ManySessions(Protocol):
    """A SessionStore, or a bundle."""

    def sessions(self) -> tuple[str, ...]: ...
    def get(self, session_id: str, /) -> OneSession: ...


@attrs.frozen(eq=False)
class ReplayStep:
    """One recorded generation, and the request that made it.

    ``number``: counts the steps of a replay from 0. ``session_id``: whose it is. ``node``: what was recorded. ``prompt``: the node
    it was generated under; ``request_inputs(step.prompt)`` is the request as it was, and :attr:`input_ids` and the like are the
    same as arrays. ``missing``: items of the prompt whose features nobody holds, each content once, in path order: without
    them the request cannot be run again.

    An engine samples ``len(step.output_ids)`` tokens, the first at path index ``prompt.stop``, a token at index i at position
    i + delta, and compares. Fewer tokens may have been recorded than were sampled: :attr:`tail_policy` "drop_last" left one out,
    and who committed may have kept only what the client saw.
    """

    number: int
    session_id: str
    node: Node
    prompt: Node
    missing: tuple[MediaItem, ...]

    @property
    def input_ids(self) -> NDArray[np.int32]:
        """The prompt: (prompt.stop,) int32, read-only."""
        return self.prompt.input_ids()

    @property
    def positions(self) -> NDArray[Any]:
        """Of the prompt, as decoded: (num_axes, prompt.stop), read-only."""
        return self.prompt.positions()

    @property
    def mrope_position_delta(self) -> int | float:
        """Behind the prompt, as decoded."""
        return self.prompt.mrope_position_delta

    @property
    def next_position(self) -> Position | float:
        """Behind the prompt, as decoded: where its next prefilled token would have stood."""
        return self.prompt.next_position

    @property
    def media_spans(self) -> tuple[MediaSpan, ...]:
        """(item, start, stop) of the prompt, in path order and coordinates."""
        return self.prompt.media_spans()

    @property
    def needed_items(self) -> tuple[MediaItem, ...]:
        """The items whose features the request takes, each content once, in path order."""
        return _contents(self.prompt)

    @property
    def output_ids(self) -> NDArray[np.int32]:
        """What was recorded: (n,) int32, read-only."""
        return self.node.token_ids

    @property
    def output_positions(self) -> NDArray[Any]:
        """Where it was decoded: (num_axes, n), read-only."""
        return self.node.positions(self.node.start)

    @property
    def role(self) -> str | None:
        """The node's."""
        return self.node.role

    @property
    def key(self) -> str | None:
        """The node's: the caller's, a request id mostly, or the draft's own."""
        return self.node.key

    @property
    def finish_reason(self) -> str | None:
        """The node's; None for the beginning of a longer generation, see :attr:`beginning_of`."""
        return self.node.finish_reason

    @property
    def tail_policy(self) -> TailPolicy | None:
        """The node's."""
        return self.node.tail_policy

    @property
    def metadata(self) -> PMap[str, Any]:
        """The node's; a copy each time."""
        return self.node.metadata

    @property
    def beginning_of(self) -> Link | None:
        """The link to the whole generation, where this is the beginning of one that was cut: a step of its own, if it is here."""
        return next((link for link in self.node.links if link.kind == "prefix_of"), None)

    @property
    def problem(self) -> str | None:
        """Why it cannot be run again as it was; None where it can."""
        if not self.missing:
            return None
        some = ", ".join(map(str, self.missing[:8]))
        more = f" and {len(self.missing) - 8} more" if len(self.missing) > 8 else ""
        return f"no features are held of {some}{more}"


def replay(source: OneSession | ManySessions) -> Iterator[ReplayStep]:
    """Each recorded generation of a session, in commit order, with the request that made it.

    ``source``: a Session, a bundle's session; or a store or bundle: then session by session, in the order they were created, what
    several of them share once. Nodes are read one by one, of the session as it is when its turn comes. What cannot be run again
    is a step too, and says so (:attr:`ReplayStep.problem`). Raises CorruptTree: at a damaged node or session, or, where the store
    serves what is sound of it, behind the last step, if there are nodes or sessions that cannot be read.
    """
    if hasattr(source, "sessions"):
        return _steps(_sound(cast(ManySessions, source)))
    if hasattr(source, "tree"):
        return _steps((source,))
    raise TypeError(f"a session, a store or a bundle is replayed, not {type(source).__name__}")


def _sound(source: ManySessions) -> Iterator[OneSession | tuple[str, CorruptTree]]:
    """Its sessions; of one that cannot be read its id and why, where the rest is to be served."""
    for session_id in source.sessions():
        try:
            yield source.get(session_id)
        except CorruptTree as error:
            if not getattr(source, "damaged", ()):
                raise
            yield session_id, error


def _steps(sessions: Iterable[OneSession | tuple[str, CorruptTree]]) -> Iterator[ReplayStep]:
    number = 0
    seen: set[bytes] = set()  # of what came in earlier sessions
    unread: list[tuple[str, int]] = []
    closed: list[str] = []
    several = not isinstance(sessions, tuple)
    for session in sessions:
        if isinstance(session, tuple):
            closed.append(f"session {session[0]!r}: {session[1]}")
            continue
        tree, read = session.tree, 0
        for node in tree:
            read += 1
            if node.origin != "generated" or node.parent is None or node.id in seen:
                continue
            if several:
                seen.add(node.id)
            yield ReplayStep(number, session.id, node, node.parent, _absent(node.parent))
            number += 1
        if read < tree._count and _is_damaged(tree):
            unread.append((session.id, tree._count - read))
    if unread or closed:
        some = [*(f"{count} of session {name!r}" for name, count in unread[:8]), *closed[:8]]
        what = f"nodes that cannot be read: {', '.join(some)}; what was generated there is no step"
        raise CorruptTree(what, sessions=tuple(unread))


def _is_damaged(tree: SessionTree) -> bool:
    """Whether it lies in a store that serves what is sound of it: whoever goes through it is not told of the rest."""
    lowest, _ = tree._index.layers_upward(tree._count)[0]
    return isinstance(lowest, StoredIndex) and lowest.source.lenient


def _contents(node: Node) -> tuple[MediaItem, ...]:
    return each_content_once(item for item, _, _ in node.media_spans())


def _absent(node: Node) -> tuple[MediaItem, ...]:
    """Items of a path whose features are neither held nor on disk."""
    items, store = _contents(node), node.feature_store
    if store is None:
        return items
    return tuple(item for item in items if item not in store and (store.files is None or item.content() not in store.files))
