"""Sessions and the store that holds them, in memory.

A :class:`Session` is an atom: the current :class:`~sessiontree.tree.SessionTree`. Readers take it without a lock; a writer takes
the session's lock, makes a new value and swaps it in, so an operation that raises leaves the old value. What a writer checks
and plans, it does before it takes the lock wherever that can be long or runs a caller's code. Appending to any node
always works; only heads are contested, and they move by compare-and-set. There is no clock in here and no cursor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, TypeVar

from numpy.typing import ArrayLike
from pyrsistent import PMap, pmap

from sessiontree.draft import Draft
from sessiontree.edits import Edit, Plan, plan_prefix, plan_rewrite
from sessiontree.errors import OutOfRange, SessionExists, StaleSession, StoreClosed, UnknownSession
from sessiontree.frozen import checked_text, freeze_metadata
from sessiontree.locks import new_lock
from sessiontree.media import MediaItem
from sessiontree.node import NO_DETAILS, Details, Namespace, Node
from sessiontree.positions import ExternalPositions, PositionScheme
from sessiontree.tokens import TokenIds, in_range, token_array, token_bytes
from sessiontree.tree import UNSET, Head, SessionTree
from sessiontree.turns import Turn, plan_turn

__all__ = ["Session", "SessionStore"]

MAX_SESSION_ID: Final = 512
T = TypeVar("T")


class Session:
    """One session: its tree, its heads, and the operations that change them.

    Every parent and node argument is a Node or its 32-byte id; a node this session does not hold raises UnknownNode. Writing
    through a closed session raises StaleSession; nodes stay readable.
    """

    __slots__ = ("__weakref__", "_closed", "_drafts", "_id", "_incarnation", "_limits", "_lock", "_store", "_tree")

    def __init__(self, session_id: str, incarnation: int, tree: SessionTree, store: SessionStore) -> None:
        self._id = session_id
        self._incarnation = incarnation
        self._tree = tree
        self._limits = tree.limits
        self._store = store
        self._lock = new_lock()
        self._closed = False
        self._drafts = itertools.count(1)

    # Reading

    @property
    def id(self) -> str:
        """The id it was opened under."""
        return self._id

    @property
    def incarnation(self) -> int:
        """Which opening of the store this is, counted from 1: a session closed and opened again has another."""
        return self._incarnation

    @property
    def tree(self) -> SessionTree:
        """The tree as it is now, a value: what is appended to it does not reach this session."""
        return self._tree._read_only()

    @property
    def root(self) -> Node:
        """Depth 0, no tokens."""
        return self._tree.root

    @property
    def scheme(self) -> PositionScheme:
        """The position scheme of every node."""
        return self._tree.scheme

    @property
    def namespace(self) -> Namespace:
        """Cache salt, LoRA and tenant."""
        return self._tree.root.namespace

    @property
    def max_tokens(self) -> int | None:
        """Tokens allowed on a path; None without a limit."""
        return self._limits.max_tokens

    @property
    def reserve_output(self) -> int:
        """How many of ``max_tokens`` appends leave to generation."""
        return self._limits.reserve_output

    @property
    def closed(self) -> bool:
        """Whether this incarnation has ended."""
        return self._closed

    @property
    def heads(self) -> PMap[str, Node]:
        """Named nodes; a copy each time."""
        return pmap({name: head.node for name, head in self._tree.heads.items()}, pre_size=8)

    def head(self, name: str) -> Head:
        """A head with its version. Raises UnknownHead."""
        return self._tree.head(name)

    def node(self, node_id: bytes) -> Node:
        """The node of this id. Raises UnknownNode."""
        return self._tree.node(node_id)

    def children(self, node: Node | bytes) -> tuple[Node, ...]:
        """Children in commit order."""
        return self._tree.children(node)

    def siblings(self, node: Node | bytes) -> tuple[Node, ...]:
        """The other children of its parent, in commit order."""
        return self._tree.siblings(node)

    def leaves(self) -> tuple[Node, ...]:
        """Nodes without children, in commit order."""
        return self._tree.leaves()

    # Writing

    def append(
        self,
        parent: Node | bytes,
        token_ids: TokenIds,
        *,
        media: Iterable[MediaItem] = (),
        role: str = "user",
        metadata: Mapping[str, Any] | None = None,
        key: str | None = None,
        positions: ExternalPositions | ArrayLike | None = None,
    ) -> Node:
        """A prefilled turn under any node. See :meth:`SessionTree.append`."""
        # As SessionTree.append, but the lock is only held for what needs it.
        parent = self._tree._resolve(parent)
        max_tokens, reserved = self._limits
        data = token_bytes(token_ids, max_tokens)
        turn = plan_turn(parent._lineage.scheme, parent, data, media, "input", role, key, positions)
        details = NO_DETAILS if metadata is None else Details(freeze_metadata(metadata))
        return self._attach(parent, turn, details, reserved)

    def draft(
        self,
        parent: Node | bytes,
        *,
        role: str = "assistant",
        metadata: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> Draft:
        """A generation under any node. Without a ``key`` it gets one of its own, so that equal samples stay apart.

        Keys of its own are counted, not drawn: ranks that apply the same operations get the same ids.
        """
        frozen = freeze_metadata(metadata)
        with self._lock:
            self._check_open()
            node = self._tree._resolve(parent)
            limit = self._limits.max_tokens
            draft = Draft(node, role=role, metadata=frozen, key="" if key is None else key, max_tokens=limit, commit=self._attach)
            while key is None:
                # Only now: a draft that is refused uses up no key. In one step: nothing that comes in between gets the same.
                own = f"{self.id}/{self.incarnation}/{next(self._drafts)}"
                if not self._tree._has_key(node, own):
                    draft._key = key = own
        return draft

    def _attach(self, parent: Node, turn: Turn, details: Details, reserved: int = 0) -> Node:
        # As _swap, without its calls: this is what every append and commit goes through.
        carry = True
        with self._lock:
            while True:
                if self._closed:
                    self._check_open()
                before = self._tree
                after, node = before._attach_alone(parent, turn, details, None, reserved, carry)
                if self._tree is before:
                    self._tree = after
                    return node
                carry = False  # what comes in between may come in again: be quick

    def _swap(self, operation: Callable[[SessionTree], tuple[SessionTree, T]]) -> T:
        """Take the tree on by one operation, which gives the new tree and a result.

        A signal handler or finalizer may write to this session in the middle of it, on this very thread. Then the tree is not
        what the operation began with, and it is done again on the tree there is: comparing and setting takes no Python call, so
        nothing comes in between.
        """
        with self._lock:
            while True:
                self._check_open()
                before = self._tree
                after, result = operation(before)
                if self._tree is before:
                    self._tree = after
                    return result

    def truncate(self, node: Node | bytes, length: int) -> Node:
        """The first ``length`` tokens of a node's path. See :meth:`SessionTree.truncate`."""
        source = self._tree._resolve(node)
        return self._planned(source, plan_prefix(source, in_range(length, source.stop, "length", source)))

    def drop_last(self, node: Node | bytes, count: int) -> Node:
        """A node's path without its last ``count`` tokens. See :meth:`SessionTree.drop_last`."""
        source = self._tree._resolve(node)
        return self._planned(source, plan_prefix(source, source.stop - in_range(count, source.stop, "count", source)))

    def _planned(self, source: Node, plan: Plan) -> Node:
        # Planned before the lock is taken, as long as that takes and whatever code of a caller's it runs.
        return self._swap(lambda tree: tree._attach_all(source, plan))

    def replace(
        self,
        node: Node | bytes,
        token_ids: TokenIds,
        *,
        head: str,
        expected: Head | Node | None = UNSET,
        media: Iterable[MediaItem] = (),
        role: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        key: str | None = None,
        positions: ExternalPositions | ArrayLike | None = None,
    ) -> Node:
        """A new branch from the node's parent, and ``head`` moved to it. See :meth:`SessionTree.replace`."""
        # What runs a caller's code runs once, before the lock is taken.
        ids, items, frozen = token_array(token_bytes(token_ids, self.max_tokens)), tuple(media), freeze_metadata(metadata)
        table = positions if positions is None or isinstance(positions, ExternalPositions) else ExternalPositions(positions)
        return self._swap(
            lambda tree: tree.replace(
                node,
                ids,
                head=head,
                expected=expected,
                media=items,
                role=role,
                metadata=frozen,
                key=key,
                positions=table,
            )
        )

    def rewrite(self, node: Node | bytes, edits: Iterable[Edit | Sequence[Any]]) -> Node:
        """A path like the node's with some of its tokens replaced. See :meth:`SessionTree.rewrite`."""
        source = self._tree._resolve(node)
        return self._planned(source, plan_rewrite(source, edits))

    def set_head(self, name: str, node: Node | bytes, expected: Head | Node | None = UNSET) -> Head:
        """Create or move a head, by compare-and-set where ``expected`` is given. See :meth:`SessionTree.set_head`."""
        return self._swap(lambda tree: tree.set_head(name, node, expected))

    def drop_head(self, name: str) -> None:
        """Forget a head; its node stays. Raises UnknownHead."""
        self._swap(lambda tree: (tree.drop_head(name), None))

    def close(self) -> None:
        """End this incarnation. Writes through it, and commits of its drafts, raise StaleSession from now on."""
        with self._lock:
            self._closed = True
        self._store._forget(self)

    def _check_open(self) -> None:
        if self._closed:
            raise StaleSession(
                f"session {self.id!r}, incarnation {self.incarnation}, is closed",
                session_id=self.id,
                incarnation=self.incarnation,
            )

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a session is one; a copy would be a second writer")

    def __repr__(self) -> str:
        how = "closed" if self._closed else "open"
        return f"<Session {self.id!r} incarnation={self.incarnation} {how} nodes={len(self._tree)}>"


class SessionStore:
    """Sessions by id. Make one with :meth:`in_memory`."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._sessions: dict[str, Session] = {}
        self._opened = 0
        self._closed = False

    @classmethod
    def in_memory(cls) -> SessionStore:
        """A store that lives and dies with this process."""
        return cls()

    def create(
        self,
        session_id: str,
        *,
        scheme: PositionScheme | str,
        namespace: Namespace | Mapping[str, str | None] | str | None = None,
        model_fingerprint: str = "",
        max_tokens: int | None = None,
        reserve_output: int = 0,
    ) -> Session:
        """Open a session with an empty tree.

        ``scheme``: a scheme, or the name of one without parameters. ``namespace``: a Namespace, a mapping of cache_salt, lora
        and tenant, or a tenant's name. ``max_tokens``: tokens allowed on a path; appends leave ``reserve_output`` of them to
        generation. An id whose session was closed gives another incarnation. Raises SessionExists, UnknownScheme,
        LimitExceeded.
        """
        tree = SessionTree(
            scheme, namespace, model_fingerprint=model_fingerprint, max_tokens=max_tokens, reserve_output=reserve_output
        )
        return self._open(session_id, tree)

    def fork(self, session: Session, node: Node | bytes, new_session_id: str) -> Session:
        """A session that holds the path of ``node``, shared, and nothing else; its heads are its own. O(1).

        Raises UnknownNode, SessionExists.
        """
        if not isinstance(session, Session):
            raise TypeError(f"a Session is forked, not {type(session).__name__}")
        return self._open(new_session_id, session._tree.forked(node))

    def _open(self, session_id: str, tree: SessionTree) -> Session:
        session_id = checked_text(session_id, "a session id")
        if not 0 < len(session_id) <= MAX_SESSION_ID:
            raise OutOfRange(
                f"a session id has 1 to {MAX_SESSION_ID} characters, not {len(session_id)}",
                value=len(session_id),
                limit=MAX_SESSION_ID,
            )
        with self._lock:
            self._check_open()
            if session_id in self._sessions:
                raise SessionExists(f"session {session_id!r} is open", session_id=session_id)
            self._opened += 1
            session = Session(session_id, self._opened, tree, self)
            self._sessions[session_id] = session
        return session

    def get(self, session_id: str) -> Session:
        """The open session of this id. Raises UnknownSession."""
        with self._lock:
            self._check_open()
            found = self._sessions.get(session_id)
        if found is None:
            raise UnknownSession(f"no open session {session_id!r}", session_id=session_id)
        return found

    def sessions(self) -> tuple[str, ...]:
        """Ids of the open sessions, in the order they were opened."""
        with self._lock:
            self._check_open()
            return tuple(self._sessions)

    def close(self) -> None:
        """Close every session. The store takes no more calls; closing it again does nothing."""
        with self._lock:
            self._closed = True
            open_sessions = tuple(self._sessions.values())
        for session in open_sessions:
            session.close()

    def _forget(self, session: Session) -> None:
        with self._lock:
            if self._sessions.get(session.id) is session:
                del self._sessions[session.id]

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("this store is closed")

    def __enter__(self) -> SessionStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a store is one; a copy would be a second writer")

    def __repr__(self) -> str:
        return f"<SessionStore in memory, sessions={len(self._sessions)}>"
