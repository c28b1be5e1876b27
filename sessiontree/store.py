"""Sessions and the store that holds them, in memory or on disk.

A :class:`Session` is an atom: the current :class:`~sessiontree.tree.SessionTree`. Readers take it without a lock; a writer takes
the session's lock, makes a new value and swaps it in, so an operation that raises leaves the old value. What a writer checks
and plans, it does before it takes the lock wherever that can be long or runs a caller's code. Appending to any node
always works; only heads are contested, and they move by compare-and-set. There is no clock in here (time comes in by
:meth:`SessionStore.tick`) and no cursor.

On disk, a session tells the store's :class:`~sessiontree.journal.Journal` what it did, in the order it did it, before it lets go of
its lock; it waits for the disk, if it has to, after that. Where it has to, readers see a change only when it is durable, and one
that the disk refuses was never there.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakSet

import numpy as np
from numpy.typing import ArrayLike
from pyrsistent import PMap

from sessiontree.backends.base import Progress
from sessiontree.backends.blobs import FeatureFolder
from sessiontree.compaction import GcReport, compact
from sessiontree.details import NO_DETAILS, Details
from sessiontree.draft import Draft, checked_finish_reason
from sessiontree.edits import Content, Edit, Plan, plan_linear, plan_prefix, plan_rewrite, without_bos
from sessiontree.errors import (
    IncompatibleStore,
    KeyTaken,
    NodeHeld,
    OutOfRange,
    SessionExists,
    SessionTreeError,
    StaleSession,
    StoreClosed,
    UnknownAlias,
    UnknownSession,
    Unsupported,
)
from sessiontree.features import DEFAULT_BUDGET as DEFAULT_FEATURE_BYTES
from sessiontree.features import Features, FeatureStore
from sessiontree.frozen import checked_text, freeze_metadata
from sessiontree.heads import Head, HeadNodes
from sessiontree.journal import Durability, Journal, Overtaken, WriteLost
from sessiontree.locks import new_lock
from sessiontree.media import MediaItem
from sessiontree.node import Namespace, Node
from sessiontree.positions import ExternalPositions, PositionScheme
from sessiontree.positions import scheme as scheme_named
from sessiontree.prefixes import PrefixMatch
from sessiontree.query import Diff, Order, Problem
from sessiontree.record import Recorded, plan_record, with_key
from sessiontree.tokens import PathCache, TokenIds, as_index, in_range, token_array, token_bytes
from sessiontree.tree import DEFAULT_PATH_CACHE_BYTES, UNSET, SessionTree, limits_of, lineage_of, new_tree
from sessiontree.turns import Turn, plan_turn

__all__ = ["Session", "SessionStore"]

MAX_SESSION_ID: Final = 512
_AT_ONCE: Final = 256  # sessions that gc looks at before others can be opened
T = TypeVar("T")


class Session:
    """One session: its tree, its heads, and the operations that change them.

    Every parent and node argument is a Node or its 32-byte id; a node this session does not hold raises UnknownNode. Writing
    through a closed session raises StaleSession; nodes stay readable.
    """

    __slots__ = (
        "__weakref__",
        "_closed",
        "_doubtful",
        "_dropped",
        "_generations",
        "_id",
        "_incarnation",
        "_last_used",
        "_limits",
        "_lock",
        "_number",
        "_open_drafts",
        "_pins",
        "_store",
        "_told",
        "_tree",
        "_unsettled",
        "_used",
        "_waiting",
        "_written",
    )

    def __init__(
        self, session_id: str, incarnation: int, tree: SessionTree, store: SessionStore, number: int | None = None
    ) -> None:
        self._id = session_id
        self._incarnation = incarnation
        self._tree = tree
        self._number = number  # in the store's journal; None: it is in memory alone
        self._written = tree  # what was written last
        self._told = [tree]  # how far the journal was told of it
        self._waiting = 0  # what the journal said to wait for
        self._unsettled: deque[tuple[int, SessionTree]] = deque()  # what is not known to be durable
        self._limits = tree.limits
        self._store = store
        self._lock = new_lock()
        self._closed = False
        self._generations = itertools.count(1)
        self._open_drafts: WeakSet[Draft] = WeakSet()
        self._pins: dict[bytes, int] = {}  # ids of the pinned nodes
        self._dropped = False  # whether nodes ever were, so that one that was found before may be gone
        self._doubtful = False  # whether something may have been recorded that is not seen here
        self._used = True  # since the last tick
        self._last_used = -math.inf  # the time when it was

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
        """Named nodes; a copy each time. Of a session on disk, each is read when it is asked for by name."""
        return HeadNodes(dict(self._tree.heads))

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

    def branch_done(self, node: Node | bytes) -> bool:
        """Whether no turn is to come at ``node`` or below it, as heads say: what only those turns would need can go.

        A head stands where a conversation goes on; an open draft is a turn on its way. So a branch is done when neither is at the
        node or below it, and all are when the session is closed. A session that never had a head says nothing: none of its branches
        is done while it is open. Heads outlive the process, so what they say does. Pins say what is kept, not what goes on; and
        whoever is told that a branch is done may still go on from it, which only costs what was let go.

        O(heads and drafts × log depth). Raises UnknownNode, for nodes that were dropped too.
        """
        tree = self._tree
        node = tree._resolve(node)
        if self._closed or not tree._moves:
            return self._closed
        held = [*(head.node for head in tree._heads.values()), *(draft.parent for draft in self._drafts())]
        return not any(tip.depth >= node.depth and tip.ancestor(node.depth).id == node.id for tip in held)

    def leaves(self) -> tuple[Node, ...]:
        """Nodes without children, in commit order."""
        return self._tree.leaves()

    def lowest_common_ancestor(self, one: Node | bytes, two: Node | bytes) -> Node:
        """The deepest node on both paths, in O(log depth)."""
        return self._tree.lowest_common_ancestor(one, two)

    def diff(self, one: Node | bytes, two: Node | bytes) -> Diff:
        """How the path of ``two`` differs from that of ``one``. See :class:`Diff`."""
        return self._tree.diff(one, two)

    def descendants(self, node: Node | bytes, order: Order = "commit") -> Iterator[Node]:
        """All nodes below ``node`` as the tree is now, one by one. See :meth:`SessionTree.descendants`."""
        return self._tree.descendants(node, order)

    def search(
        self, predicate: Callable[[Node], object], node: Node | bytes | None = None, order: Order = "commit"
    ) -> Iterator[Node]:
        """Nodes of the tree as it is now for which ``predicate`` is true, one by one. See :meth:`SessionTree.search`."""
        return self._tree.search(predicate, node, order)

    def longest_prefix(self, token_ids: TokenIds, media: Iterable[MediaItem] = ()) -> PrefixMatch:
        """How far a whole history is known, as a stateless client resends it. See :meth:`SessionTree.longest_prefix`."""
        return self._tree.longest_prefix(token_ids, media)

    def validate(self, path: Node | bytes | Sequence[Node], *, allow_extend_truncated: bool = False) -> tuple[Problem, ...]:
        """Unpaired tool calls and replies cut off and gone on from, on a node's path. See :meth:`SessionTree.validate`."""
        return self._tree.validate(path, allow_extend_truncated=allow_extend_truncated)

    def to_text(self, *, max_nodes: int = 200) -> str:
        """A picture of the tree for terminals. See :meth:`SessionTree.to_text`."""
        return self._tree.to_text(max_nodes=max_nodes)

    def to_dot(self) -> str:
        """The tree in Graphviz's language. See :meth:`SessionTree.to_dot`."""
        return self._tree.to_dot()

    def to_networkx(self) -> Any:
        """The tree as a graph of networkx. See :meth:`SessionTree.to_networkx`."""
        return self._tree.to_networkx()

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
        strip_bos: int | None = None,
    ) -> Node:
        """A prefilled turn under any node. See :meth:`SessionTree.append`."""
        # As SessionTree.append, but the lock is only held for what needs it.
        parent = self._tree._resolve(parent)
        max_tokens, reserved = self._limits
        data = token_bytes(token_ids, max_tokens)
        if strip_bos is not None:
            data, media, positions = without_bos(parent, Content(data, media, positions), strip_bos)
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
            if key is None:  # only now: a draft that is refused uses up no key
                draft._key = self._own_key(node)
            self._open_drafts.add(draft)
        return draft

    def _own_key(self, parent: Node) -> str:
        """A key that no other generation of this session has, nor a child of ``parent``."""
        while True:  # counted in one step: nothing that comes in between gets the same
            own = f"{self.id}/{self.incarnation}/{next(self._generations)}"
            if not self._tree._has_key(parent, own):
                return own

    def record(
        self,
        prompt_token_ids: TokenIds,
        completion_token_ids: TokenIds,
        media: Iterable[MediaItem] = (),
        *,
        role: str = "user",
        completion_role: str = "assistant",
        finish_reason: str = "stop",
        prompt_metadata: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> Recorded:
        """Record a generation of somebody who keeps no tree: the whole prompt as the engine saw it, and the completion.

        As much of the prompt as :meth:`longest_prefix` knows is shared, up to the first token that differs, wherever turns end;
        what is new of it becomes one turn of ``role`` with ``prompt_metadata``; the completion becomes a generated turn under it
        with ``metadata``. ``media``: the prompt's, spans relative to its first token. A media span is never cut: where a
        difference is inside one, the history forks before it. Without a ``key`` the completion gets one of its own, so that
        equal samples stay apart; with one, recording again changes nothing. All of it is recorded or nothing.

        Raises FinishRefused for "abort" and "error", and what append and commit raise.
        """
        finish_reason = checked_finish_reason(finish_reason)
        prompt, completion = (token_bytes(ids, self.max_tokens) for ids in (prompt_token_ids, completion_token_ids))
        items, tree = tuple(media), self._tree
        match, beyond = tree._find_prefix(prompt, items)
        plan, reused, fork = plan_record(
            match,
            beyond,
            prompt,
            completion,
            items,
            role=checked_text(role, "role"),
            completion_role=completion_role,
            key=key,
            prompt_details=Details(freeze_metadata(prompt_metadata)),
            details=Details(freeze_metadata(metadata), finish_reason, "keep"),
        )

        def attach(tree: SessionTree) -> tuple[SessionTree, Node]:
            self._check_there(tree, plan.parent)
            tree._check_limit(plan.stop, 0)
            # Only now: a generation that is refused uses up no key.
            return tree._attach_all(plan if key is not None else with_key(plan, self._own_key(plan.parent)), reserved=0)

        made = self._swap(attach)
        assert made.parent is not None
        return Recorded(made.parent, made, reused, fork)

    def _attach(self, parent: Node, turn: Turn, details: Details, reserved: int = 0) -> Node:
        # As _swap, without its calls: this is what every append and commit goes through.
        carry = True
        journal = self._store._journal
        if journal is not None:

            def attach(tree: SessionTree) -> tuple[SessionTree, Node]:
                if self._dropped:
                    self._check_there(tree, parent)
                return tree._attach_alone(parent, turn, details, None, reserved, True)

            return self._swap_durably(journal, attach)
        with self._lock:
            while True:
                if self._closed:
                    self._check_open()
                before = self._tree
                if self._dropped:
                    self._check_there(before, parent)
                after, node = before._attach_alone(parent, turn, details, None, reserved, carry)
                if self._tree is before:
                    self._tree = after
                    self._used = True
                    return node
                carry = False  # what comes in between may come in again: be quick

    def _check_there(self, tree: SessionTree, parent: Node) -> None:
        """A node that was found before the lock was taken may have been dropped since. Raises UnknownNode."""
        if self._dropped:
            tree._resolve(parent)

    def _swap(self, operation: Callable[[SessionTree], tuple[SessionTree, T]]) -> T:
        """Take the tree on by one operation, which gives the new tree and a result.

        A signal handler or finalizer may write to this session in the middle of it, on this very thread. Then the tree is not
        what the operation began with, and it is done again on the tree there is: comparing and setting takes no Python call, so
        nothing comes in between.
        """
        if self._store._journal is not None:
            return self._swap_durably(self._store._journal, operation)
        with self._lock:
            while True:
                self._check_open()
                before = self._tree
                after, result = operation(before)
                if self._tree is before:
                    self._tree = after
                    self._used = True
                    return result

    def _swap_durably(self, journal: Journal, operation: Callable[[SessionTree], tuple[SessionTree, T]]) -> T:
        """The same on disk: where changes are to be durable before anybody sees them, others may write behind this meanwhile."""
        if journal.waits:
            _check_may_wait(journal)
        with self._lock:
            while True:
                if self._closed:
                    self._check_open()
                if self._unsettled or self._doubtful:
                    self._catch_up(journal)
                before = self._written
                after, result = operation(before)
                if self._written is not before:
                    continue
                self._written = after
                try:
                    waiting = self._tell(journal)
                except WriteLost:
                    self._reload(journal)
                    continue
                except SessionTreeError:  # it was not taken; where anything else is raised, nobody knows, and it is told again
                    self._written = self._told[0]
                    raise
                break
            if not journal.waits:
                self._tree = self._written
        if not journal.waits:
            journal.relieve()
            return result
        try:
            journal.wait(waiting)
        finally:
            with self._lock:
                self._settle(journal)
        return result

    def _tell(self, journal: Journal) -> int:
        """Put all that was written into the journal, in order: the number to wait for.

        What comes in between on this thread may tell of the same: then it has been told. An interrupt may leave it told and not
        known to be: then it is told again. Records say what they are, so that does no harm.
        """
        while True:
            written, told = self._written, self._told[0]
            if not told._precedes(written):
                if journal.failed:
                    journal.flush()  # raises: a retry that finds what was never durable is no success
                return self._waiting
            assert self._number is not None
            try:
                waiting = journal.changed(self._number, told, written, self._waiting, self._told)
            except Overtaken:
                continue
            if journal.waits:
                self._unsettled.append((waiting, written))
            if self._told[0] is told or self._told[0]._precedes(written):
                self._told[0] = written
            self._waiting = max(self._waiting, waiting)
            self._used = True
            if self._written is written:
                return self._waiting

    def _settle(self, journal: Journal) -> None:
        """Show what has become durable; take back what was lost, and what was written behind it."""
        unsettled = self._unsettled
        while unsettled:
            first = unsettled[0]
            waiting, written = first
            durable = journal.is_durable(waiting)
            if durable is None:
                return
            if not durable:
                if not journal.failed:
                    self._reload(journal)
                    return
                unsettled.clear()
                self._written = self._told[0] = self._tree
                return
            if self._tree._precedes(written):
                self._tree = written
            if unsettled and unsettled[0] is first:  # nothing comes in between looking and taking
                unsettled.popleft()

    def _reload(self, journal: Journal) -> None:
        """Something was lost: what is there is what the disk has."""
        assert self._number is not None
        tree, pins = journal.tree(self._number)
        self._unsettled.clear()
        self._waiting = 0
        self._tree = self._written = self._told[0] = tree
        self._pins = pins
        self._doubtful = False

    def _catch_up(self, journal: Journal) -> None:
        """Know what has become of all that was handed over, as far as that is known."""
        self._settle(journal)
        if self._doubtful:
            self._reload(journal)

    def _show(self, journal: Journal) -> None:
        with self._lock:
            self._catch_up(journal)

    def truncate(self, node: Node | bytes, length: int) -> Node:
        """The first ``length`` tokens of a node's path. See :meth:`SessionTree.truncate`."""
        source = self._tree._resolve(node)
        return self._planned(plan_prefix(source, in_range(length, source.stop, "length", source)), source.stop)

    def drop_last(self, node: Node | bytes, count: int) -> Node:
        """A node's path without its last ``count`` tokens. See :meth:`SessionTree.drop_last`."""
        source = self._tree._resolve(node)
        return self._planned(plan_prefix(source, source.stop - in_range(count, source.stop, "count", source)), source.stop)

    def _take(self, turns: Sequence[tuple[bytes, Turn, Details]]) -> int:
        """Make nodes of turns as they are, each under the node of an id, all of them or none: how many were not there.

        Nothing that stands in a turn is checked. Raises UnknownNode, KeyTaken, LimitExceeded.
        """

        def attach(tree: SessionTree) -> tuple[SessionTree, int]:
            before = len(tree)
            for parent, turn, details in turns:
                tree, _ = tree._attach(tree.node(parent), turn, details, reserved=0)
            return tree, len(tree) - before

        return self._swap(attach)

    def _planned(self, plan: Plan, was: int) -> Node:
        # Planned before the lock is taken, as long as that takes and whatever code of a caller's it runs.
        def attach(tree: SessionTree) -> tuple[SessionTree, Node]:
            self._check_there(tree, plan.parent)
            return tree._attach_all(plan, was)

        return self._swap(attach)

    def replace(
        self,
        node: Node | bytes,
        token_ids: TokenIds,
        *,
        head: str,
        expected: Head | Node | bytes | None = UNSET,
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
        return self._planned(plan_rewrite(source, edits), source.stop)

    def linearize(self, results: Sequence[Node | bytes]) -> Node:
        """One path through sibling turns, in the order given. See :meth:`SessionTree.linearize`."""
        tree = self._tree
        return self._planned(plan_linear([tree._resolve(node) for node in results]), 0)

    def set_head(self, name: str, node: Node | bytes, expected: Head | Node | bytes | None = UNSET) -> Head:
        """Create or move a head, by compare-and-set where ``expected`` is given. See :meth:`SessionTree.set_head`."""
        return self._swap(lambda tree: tree.set_head(name, node, expected))

    @property
    def pins(self) -> frozenset[bytes]:
        """Ids of the nodes that are pinned."""
        return frozenset(self._pins)

    def pin(self, node: Node | bytes) -> None:
        """Keep a node with its path and its media, whatever :meth:`SessionStore.gc` removes, until it is unpinned."""
        self._set_pin(node, pinned=True)

    def unpin(self, node: Node | bytes) -> None:
        """No longer keep a node for a pin's sake. One that is not pinned is left as it is."""
        self._set_pin(node, pinned=False)

    def _set_pin(self, node: Node | bytes, *, pinned: bool) -> None:
        journal = self._store._journal
        self._check_alone(journal is not None and journal.waits)
        with self._lock:
            self._check_open()
            if journal is not None:
                self._catch_up(journal)
            tree = self._tree if journal is None else self._written
            found = tree._resolve(node)
            if (found.id in self._pins) == pinned:
                return
            ordinal = tree._index.find_ordinal(found, tree._count)
            assert ordinal is not None
            number = self._number
            if journal is not None and number is not None:
                self._recorded(lambda: journal.pin(number, ordinal, found.id, pinned, self._waiting))
            pins = {**self._pins, found.id: ordinal}
            if not pinned:
                del pins[found.id]
            self._pins = pins
            self._doubtful = False
            self._used = True

    def _recorded(self, record: Callable[[], None]) -> None:
        """Record something that is not seen here yet: where it is interrupted, nobody knows whether it was."""
        self._doubtful = True
        try:
            record()
        except SessionTreeError:
            self._doubtful = False
            raise

    def _check_alone(self, waits: bool) -> None:
        """Raises Unsupported in a signal handler or finalizer that comes in where it would undo what is being done."""
        if self._lock._is_owned():
            raise Unsupported(f"nothing is pinned or dropped in the middle of another operation on session {self.id!r}")
        if waits and self._store._journal is not None:
            _check_may_wait(self._store._journal)

    def drop(self, *nodes: Node | bytes) -> None:
        """Forget nodes and all below them. Whoever holds them keeps them; :meth:`SessionStore.gc` gives their bytes back.

        Raises UnknownNode; NodeHeld where a head, a pin or an open draft is among them; Unsupported for the root, which goes with
        its session, and for the path that a fork shares with the session it was forked from.
        """

        def checked(tree: SessionTree) -> list[Node]:
            roots = [tree._resolve(node) for node in nodes]
            pins = ((f"pin {pin[:4].hex()}", tree.node(pin)) for pin in self._pins)
            drafts = (("an open draft", draft.parent) for draft in self._drafts())
            heads = ((f"head {name!r}", head.node) for name, head in tree._heads.items())
            tree._check_held(roots, itertools.chain(heads, pins, drafts))
            return roots

        if self._store._journal is None:
            self._drop_in_memory(checked)
        else:
            self._drop_durably(
                self._store._journal,
                lambda tree: [tree._index.find_ordinal(node, tree._count) or 0 for node in checked(tree)],
            )

    def _drop_in_memory(self, doomed: Callable[[SessionTree], list[Node]]) -> None:
        self._check_alone(waits=False)

        def drop(tree: SessionTree) -> tuple[SessionTree, None]:
            self._dropped = True
            roots = doomed(tree)
            return tree.drop(*roots) if roots else tree, None

        self._swap(drop)

    def _drop_durably(self, journal: Journal, doomed: Callable[[SessionTree], list[int]]) -> None:
        """``doomed``: given all there is, which is on disk, the ordinals of what is to go."""
        self._check_alone(waits=True)
        with self._lock:
            while True:
                self._check_open()
                journal.flush()
                self._catch_up(journal)
                tree, number = self._told[0], self._number
                ordinals = doomed(tree)
                if not ordinals or number is None:
                    return
                self._dropped = True
                with suppress(Overtaken):  # a signal handler did something: perhaps it moved a head there
                    self._recorded(lambda: journal.drop(number, ordinals, self._waiting, self._told, tree))  # noqa: B023
                    break
            journal.flush()
            self._reload(journal)
            self._used = True

    def _collect(self, recent: int) -> None:
        """Drop what nothing leads to. See :meth:`SessionStore.gc`."""
        journal = self._store._journal

        def unreachable(tree: SessionTree) -> list[Node]:
            held = [head.node for head in tree._heads.values()]
            held += [*map(tree.node, self._pins), *(draft.parent for draft in self._drafts())]
            return tree._unreachable(held, recent)

        def ordinals(tree: SessionTree) -> list[int]:
            assert journal is not None and self._number is not None
            drafts = {tree._index.find_ordinal(draft.parent, tree._count) or 0 for draft in self._drafts()}
            return journal.unreachable(self._number, recent, drafts)

        with suppress(StaleSession):
            if journal is None:
                self._drop_in_memory(unreachable)
            else:
                self._drop_durably(journal, ordinals)

    def drop_head(self, name: str) -> None:
        """Forget a head; its node stays. Raises UnknownHead."""
        self._swap(lambda tree: (tree.drop_head(name), None))

    def flush(self) -> None:
        """Wait until everything it has written is on disk. See :meth:`SessionStore.flush`."""
        self._store.flush()

    def close(self) -> None:
        """End this incarnation. Writes through it, and commits of its drafts, raise StaleSession from now on."""
        with self._lock:
            self._closed = True
        self._store._forget(self)

    def _expire(self, before: float, now: float, idle_ttl: float) -> bool:
        """Close it if it lay idle for ``idle_ttl``, in the store's time, and no draft is open."""
        with self._lock:
            if self._used:  # since the tick before, so at the time that one told
                self._used, self._last_used = False, before if math.isfinite(before) else now
            if self._has_open_draft():
                self._last_used = now
            if self._closed or now - self._last_used < idle_ttl:
                return False
            self._closed = True
        self._store._forget(self)
        return True

    def _has_open_draft(self) -> bool:
        return bool(self._drafts())

    def _drafts(self) -> list[Draft]:
        """Those that are open."""
        while True:
            try:
                return [draft for draft in self._open_drafts if not draft.closed]
            except RuntimeError:  # a signal handler has opened one meanwhile
                continue

    def _repr_html_(self) -> str:
        return self._tree._repr_html_()

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


class Usage(NamedTuple):
    """What a store holds in memory beside the nodes themselves. Bytes are those really held, each beside its budget."""

    sessions: int
    feature_bytes: int
    feature_budget_bytes: int
    path_cache_bytes: int
    path_cache_budget_bytes: int


class SessionStore:
    """Sessions by id, and what they share: features of media, whole paths of forks, aliases.

    Make one with :meth:`in_memory`, or with :meth:`open` for one on disk.
    """

    def __init__(
        self,
        *,
        feature_bytes: int = DEFAULT_FEATURE_BYTES,
        path_cache_bytes: int = DEFAULT_PATH_CACHE_BYTES,
        idle_ttl: float | None = None,
    ) -> None:
        if idle_ttl is not None and not _time(idle_ttl, "idle_ttl") > 0:
            raise OutOfRange(f"idle_ttl is {idle_ttl}, not above 0", value=idle_ttl, limit=0)
        self._lock = new_lock()
        self._sessions: dict[str, Session] = {}
        self._opened = 0
        self._closed = False
        self._features = FeatureStore(feature_bytes)
        self._paths = PathCache(path_cache_bytes)
        self._aliases: dict[tuple[Namespace, str], bytes | None] = {}  # None: dropped, whatever the disk said
        self._idle_ttl = idle_ttl
        self._now = -math.inf
        self._journal: Journal | None = None
        self._collecting = new_lock()
        self._collects = False
        self._awake: set[str] = set()  # ids of sessions that were open at any time since gc began
        self._opening = new_lock()  # for taking sessions from the disk: one thread makes each
        self._creating: set[str] = set()  # ids of sessions that are being written there

    @classmethod
    def in_memory(
        cls,
        *,
        feature_bytes: int = DEFAULT_FEATURE_BYTES,
        path_cache_bytes: int = DEFAULT_PATH_CACHE_BYTES,
        idle_ttl: float | None = None,
    ) -> SessionStore:
        """A store that lives and dies with this process.

        ``feature_bytes``: budget for features of media. ``path_cache_bytes``: for whole paths of forks that were read as views.
        ``idle_ttl``: how long a session may lie idle before :meth:`tick` closes it, in the unit that tick is called with.
        """
        return cls(feature_bytes=feature_bytes, path_cache_bytes=path_cache_bytes, idle_ttl=idle_ttl)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        durability: Durability = "group",
        read_only: bool = False,
        strict: bool = True,
        feature_bytes: int = DEFAULT_FEATURE_BYTES,
        path_cache_bytes: int = DEFAULT_PATH_CACHE_BYTES,
        idle_ttl: float | None = None,
    ) -> SessionStore:
        """A store in the directory ``path``, made if there is none; its parent must be there.

        ``durability``: when a change is on disk. "commit": when the call that made it returns, and nobody sees it before.
        "group": soon after, many at a time; :meth:`flush` waits for it. "relaxed": at the next flush or close. ``read_only``:
        beside a process that writes, or before one does, following it at every :meth:`get` and :meth:`sessions`, which take the
        sessions that were got before along; nothing is created then. ``strict``: refuse a store in which opening finds damage
        before the end; what the sidecars vouch for is checked when it is read. False: read everything now, and serve what is sound
        of it, to be read only: a head is then the last of which a sound record is left, and :attr:`Head.uncertain` where damage may
        hide a later one. See :attr:`damaged` and :attr:`damaged_sessions`.

        Sessions are read as they are asked for: opening looks at none of them, and reading a path takes memory for that path. A
        session that was closed is opened again by :meth:`get`. The rest as for :meth:`in_memory`.

        Raises StoreLocked within a second where another process writes to it, IncompatibleStore for a format or record type of
        a newer version or a directory of something else, CorruptTree for damage, StoreFailed where the disk refuses.
        """
        store = cls(feature_bytes=feature_bytes, path_cache_bytes=path_cache_bytes, idle_ttl=idle_ttl)
        path = os.path.abspath(path)
        store._journal = Journal.open(
            path, store._features, store._paths, durability=durability, read_only=read_only, strict=strict
        )
        store._features.files = FeatureFolder(os.path.join(path, "blobs"), read_only=read_only)
        return store

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
        lineage = lineage_of(scheme, namespace, model_fingerprint, self._features)
        return self._open(session_id, new_tree(lineage, limits_of(max_tokens, reserve_output), self._paths))

    def fork(self, session: Session, node: Node | bytes, new_session_id: str) -> Session:
        """A session that holds the path of ``node``, shared; its heads are its own. See :meth:`SessionTree.forked`.

        The session may be one of another store; features of the media it shares stay there, and a store on disk takes a copy of the
        path then. Raises UnknownNode, SessionExists.
        """
        if not isinstance(session, Session):
            raise TypeError(f"a Session is forked, not {type(session).__name__}")
        while True:
            drops = 0 if self._journal is None else self._journal.drops
            tree = session._tree
            source = tree._resolve(node)
            with suppress(Overtaken):  # something was dropped: perhaps this node
                return self._fork(session, tree, source, new_session_id, tree.forked(source), drops)

    def _fork(
        self, session: Session, tree: SessionTree, source: Node, new_session_id: str, forked: SessionTree, drops: int
    ) -> Session:
        """A session of ``forked``, which lies over the path of ``source``, a node of the session's ``tree``.

        ``drops``: how many there had been in the journal when that was found. Raises Overtaken where there are more by now.
        """
        tip = None
        if session._number is not None and session._store is self and not session._closed:  # else it may lack what was dropped
            ordinal = tree._index.find_ordinal(source, tree._count)
            assert ordinal is not None
            tip = session._number, ordinal
        return self._open(new_session_id, forked, tip, drops)

    def _open(self, session_id: str, tree: SessionTree, tip: tuple[int, int] | None = None, drops: int = 0) -> Session:
        session_id = checked_text(session_id, "a session id")
        if not 0 < len(session_id) <= MAX_SESSION_ID:
            raise OutOfRange(
                f"a session id has 1 to {MAX_SESSION_ID} characters, not {len(session_id)}",
                value=len(session_id),
                limit=MAX_SESSION_ID,
            )
        if self._journal is not None:
            return self._open_durably(self._journal, session_id, tree, tip, drops)
        with self._lock:
            self._check_open()
            if session_id in self._sessions:
                raise SessionExists(f"session {session_id!r} is open", session_id=session_id)
            self._opened += 1
            session = Session(session_id, self._opened, tree, self)
            self._sessions[session_id] = session
        return session

    def _open_durably(
        self, journal: Journal, session_id: str, tree: SessionTree, tip: tuple[int, int] | None, drops: int
    ) -> Session:
        mine = False
        try:
            with self._opening:
                self._check_open()
                if session_id in self._sessions or session_id in self._creating or journal.number_of(session_id) is not None:
                    raise SessionExists(f"session {session_id!r} is in the store", session_id=session_id)
                mine = True  # before it is said: an interrupt must leave nothing behind
                self._creating.add(session_id)
                self._wake(session_id)
            number, incarnation = journal.create(session_id, tree, tip, drops)  # which may wait for the disk
            session = Session(session_id, incarnation, tree, self, number)
            with self._lock:
                self._sessions[session_id] = session
        finally:
            if mine:
                self._creating.discard(session_id)
        return session

    def _found(self, journal: Journal, session_id: str) -> Session | None:
        """A session that lies in the store, opened again; where the store is only read, as it is now."""
        with self._opening:
            self._check_open()
            session = self._sessions.get(session_id)
            if session is not None and not journal.follows:
                return session
            number = journal.number_of(session_id)
            if number is None:
                return None
            tree, pins = journal.tree(number)
            if session is None or session._number != number:  # or it was dropped, and made again
                session = Session(session_id, journal.opened(number), tree, self, number)
            session._tree = session._written = session._told[0] = tree
            session._pins = pins
            self._wake(session_id)
            with self._lock:
                self._sessions[session_id] = session
        return session

    def _view_of(self, session_id: str) -> tuple[SessionTree, Mapping[bytes, int]] | None:
        """A session's tree and pins as they are now, without opening the session; None where there is none."""
        with self._lock:
            self._check_open()
            found = self._sessions.get(session_id)
        journal = self._journal
        if journal is None or (found is not None and not journal.follows):
            return None if found is None else (found.tree, found._pins)
        number = journal.number_of(session_id)
        if number is None:
            return None
        tree, pins = journal.tree(number)
        return tree._read_only(), pins

    def get(self, session_id: str, *, scheme: PositionScheme | str | None = None, model_fingerprint: str | None = None) -> Session:
        """The session of this id: the open one, or from the disk.

        ``scheme``, ``model_fingerprint``: what the session is expected to have been created with; None is not checked. Raises
        UnknownSession, IncompatibleStore saying what was expected and what was found, CorruptTree.
        """
        with self._lock:
            self._check_open()
            found = self._sessions.get(session_id)
        if self._journal is not None and (found is None or self._journal.follows):
            found = self._found(self._journal, checked_text(session_id, "a session id"))
        if found is None:
            lost = self.damaged_sessions if self.damaged else ()
            beside = f"; the ids of sessions {', '.join(map(str, lost))} are lost to damage" if lost else ""
            raise UnknownSession(f"no open session {session_id!r}{beside}", session_id=session_id)
        _check_expected(found, scheme, model_fingerprint)
        found._used = True
        return found

    def sessions(self) -> tuple[str, ...]:
        """Ids of the open sessions, in the order they were opened; of a store on disk: of all, in the order they were created.

        Where the record of one is damaged, that raises CorruptTree with its number (``session``); with ``strict=False`` it is left
        out, and stands in :attr:`damaged_sessions`. The others can be got either way.
        """
        with self._lock:
            self._check_open()
            if self._journal is None:
                return tuple(self._sessions)
        return tuple(dict.fromkeys(self._journal.session_ids().values()))

    def flush(self) -> None:
        """Wait until everything is on disk that any session has written. In memory it does nothing.

        Raises StoreFailed, naming the nodes that never will be, where the disk refused it; the store takes no more writes then.
        """
        self._check_open()
        if self._journal is not None:
            self._journal.flush()
            for session in tuple(self._sessions.values()):
                session._show(self._journal)

    @property
    def damaged(self) -> tuple[tuple[int, int, int], ...]:
        """(segment, start, stop) of every stretch that opening with ``strict=False`` found damaged; such a store is only read."""
        return () if self._journal is None else self._journal.damaged

    @property
    def losses(self) -> tuple[tuple[int, int, int], ...]:
        """Those of :attr:`damaged` that may have held records which are lost; beside the others everything is there."""
        return () if self._journal is None else self._journal.losses

    @property
    def damaged_sessions(self) -> tuple[int, ...]:
        """Numbers of sessions, as they were created, whose own records are damaged, so that nobody knows their ids any more.

        Those of which anything else is left, and with ``strict=False`` those that :meth:`sessions` has left out.
        """
        return () if self._journal is None else self._journal.damaged_sessions

    @property
    def recovered_bytes(self) -> int:
        """How many bytes of a commit that was never finished opening has cut from the end."""
        return 0 if self._journal is None else self._journal.recovered_bytes

    def tick(self, now: float) -> tuple[str, ...]:
        """Tell the store the time; ids of the sessions that it closes for it, in the order they were opened.

        Those are closed that lay idle for ``idle_ttl`` and have no open draft. There is no clock in here: a write, a commit or a
        ``get`` is use at the time that was told last (before the first tick: at that), so tell it often within an ``idle_ttl``. The
        same calls close the same sessions on every rank. Nodes that readers hold stay readable. Raises OutOfRange for a time
        before the last one.
        """
        now = _time(now, "the time")
        with self._lock:
            self._check_open()
            if now < self._now:
                raise OutOfRange(f"the time {now} after {self._now}", value=now, limit=self._now)
            before, self._now = self._now, now
            open_sessions = tuple(self._sessions.values())
        if self._idle_ttl is None:
            return ()
        return tuple(session.id for session in open_sessions if session._expire(before, now, self._idle_ttl))

    def drop(self, session_id: str) -> None:
        """Forget a session and close it. What was forked from it keeps its path; :meth:`gc` gives the rest back.

        Raises UnknownSession; NodeHeld where it has a pin or an open draft.
        """
        journal = self._journal
        if self._opening._is_owned():
            raise Unsupported("no session is dropped in the middle of opening one")
        with self._opening:
            session = self.get(session_id)
            session._check_alone(journal is not None and journal.waits)
            with session._lock:
                if journal is not None:
                    session._catch_up(journal)
                for holder in (*(f"pin {pin[:4].hex()}" for pin in session._pins), *("an open draft" for _ in session._drafts())):
                    raise NodeHeld(f"session {session_id!r} is held by {holder}", node=None, holder=holder)
                was, session._closed = session._closed, True
                try:
                    if journal is not None and session._number is not None:
                        journal.drop(session._number, [0], session._waiting)
                except SessionTreeError:
                    session._closed = was
                    raise
                finally:  # where it was interrupted, the journal knows whether it is gone
                    if session._closed:
                        self._forget(session)

    def gc(self, *, recent: int | None = None, progress: Progress | None = None) -> GcReport:
        """Give back what was dropped: nodes, heads, aliases, and features that no node names any more.

        Nodes are kept that their sessions show, with their paths; those that forks share; and what a reader, in any process, holds.
        ``recent``: also drop what no head, pin or open draft leads to, except for the last so many nodes of each session and their
        paths; None: drop nothing more. ``progress``: is told (done, all) nodes.

        Others go on reading and writing meanwhile. A crash or an error at any moment leaves every path that can be reached as it
        was. A store in memory has nothing to give back but what ``recent`` drops. Raises Unsupported for a store that is only read,
        StoreFailed, CorruptTree where what is to be kept is damaged.
        """
        if recent is not None and as_index(recent, "recent") < 0:
            raise OutOfRange(f"recent is {recent}, below 0", value=recent, limit=0)
        self._check_open()
        if self._journal is not None:
            _check_may_wait(self._journal)
        with self._collecting:
            if self._collects:
                raise Unsupported("gc was called in the middle of gc")
            self._collects = True
            try:
                return self._gc(recent, progress)
            finally:
                self._collects = False
                self._awake = set()

    def _gc(self, recent: int | None, progress: Progress | None) -> GcReport:
        journal = self._journal
        if journal is not None:
            journal.check_writable()
        before = 0 if journal is not None else self._count()
        if recent is not None:
            with self._opening:
                self._awake = {*self._sessions, *self._creating}
            for session in tuple(self._sessions.values()):
                session._collect(recent)
            if journal is not None:
                self._collect_closed(journal, recent)
        if journal is None:
            return GcReport(before, self._count(), 0, 0, 0, swept=True)

        def told(done: int, total: int) -> None:
            self._check_open()
            if progress is not None:
                progress(done, total)

        files = self._features.files
        return compact(journal, files if isinstance(files, FeatureFolder) else None, told)

    def _collect_closed(self, journal: Journal, recent: int) -> None:
        """As :meth:`Session._collect`, of sessions that nobody has opened since gc began."""
        names = journal.session_ids()
        journal.flush()  # what they wrote before they were closed
        columns = journal.columns()
        columns.group()
        numbers = list(names)
        for start in range(0, len(numbers), _AT_ONCE):
            self._check_open()
            with self._opening:
                asleep = [number for number in numbers[start : start + _AT_ONCE] if names[number] not in self._awake]
                found = ((number, journal.unreachable(number, recent, (), columns)) for number in asleep)
                if dead := {number: ordinals for number, ordinals in found if ordinals}:
                    journal.drop_all(dead)

    def _count(self) -> int:
        return sum(len(session._tree) - 1 for session in tuple(self._sessions.values()))

    def put_features(self, item: MediaItem, features: Any) -> Features:
        """Keep features of an item (pixels, encoder outputs) by its content, under the budget. See :meth:`FeatureStore.put`.

        ``features``: an array or tensor, or a mapping of names to them; copied. Keep what comes back for as long as a request
        needs it: what somebody holds is not evicted. Raises LimitExceeded where the budget is held by others, KeyTaken for
        other bytes under a name that this content has.
        """
        self._check_open()
        return self._features.put(item, features)

    def get_features(self, item: MediaItem) -> Features | None:
        """The features of an item's content; None where there are none."""
        return self._features.get(item)

    def drop_features(self, item: MediaItem) -> None:
        """Forget the features of an item's content. Nodes keep all they know of it; whoever holds the features keeps them."""
        self._features.drop(item)

    def alias_media(
        self, alias: str, item: MediaItem | bytes, namespace: Namespace | Mapping[str, str | None] | str | None = None
    ) -> bytes:
        """Name an identity by a caller's own id (a uuid), within a namespace: the identity. Naming it again changes nothing.

        Raises KeyTaken where the alias names another identity: the same id never stands for other bytes.
        """
        alias, scope = checked_text(alias, "an alias"), Namespace.of(namespace)
        identity = item.identity if isinstance(item, MediaItem) else MediaItem("image", item, ()).identity
        with self._opening:
            known = self._alias(scope, alias)
            if known is None:
                if self._journal is not None:
                    self._journal.alias(scope, alias, identity)
                known = self._aliases[scope, alias] = identity
        if known != identity:
            raise KeyTaken(f"alias {alias!r} names {known[:4].hex()}, not {identity[:4].hex()}", key=alias, identity=known)
        return known

    def aliased_media(self, alias: str, namespace: Namespace | Mapping[str, str | None] | str | None = None) -> bytes:
        """The identity that an alias names in a namespace. Raises UnknownAlias."""
        with self._opening:
            found = self._alias(Namespace.of(namespace), checked_text(alias, "an alias"))
        if found is None:
            raise UnknownAlias(f"no media are named {alias!r} there", alias=alias)
        return found

    def _alias(self, scope: Namespace, alias: str) -> bytes | None:
        self._check_open()
        if (scope, alias) not in self._aliases and self._journal is not None:
            return self._journal.aliased(scope, alias)
        return self._aliases.get((scope, alias))

    def drop_alias(self, alias: str, namespace: Namespace | Mapping[str, str | None] | str | None = None) -> None:
        """Forget an alias. Raises UnknownAlias."""
        scope = Namespace.of(namespace)
        with self._opening:
            self.aliased_media(alias, scope)
            if self._journal is None:
                del self._aliases[scope, alias]
            else:
                self._journal.alias(scope, alias, None)
                self._aliases[scope, alias] = None

    def usage(self) -> Usage:
        """What the store holds beside nodes."""
        features, paths = self._features, self._paths
        return Usage(len(self._sessions), features.held_bytes, features.budget_bytes, paths.held_bytes, paths.budget_bytes)

    def close(self) -> None:
        """Close every session. The store takes no more calls; closing it again does nothing."""
        with self._lock:
            self._closed = True
            open_sessions = tuple(self._sessions.values())
        for session in open_sessions:
            session.close()
        with self._collecting:  # gc ends as soon as it sees that
            if self._journal is not None:
                self._journal.close()
            self._features.close()
            self._paths.clear()

    def _wake(self, session_id: str) -> None:
        """A session is being opened; the lock for that is held."""
        if self._collects:
            self._awake.add(session_id)

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
        where = "in memory" if self._journal is None else f"at {self._journal.path}"
        return f"<SessionStore {where}, {len(self._sessions)} sessions open>"


def _check_may_wait(journal: Journal) -> None:
    """Raises Unsupported in a signal handler that stands in the way of what it would wait for."""
    if journal.leading:
        raise Unsupported("a signal handler that comes in while its thread is writing to the disk cannot wait for the disk")


def _check_expected(session: Session, scheme: PositionScheme | str | None, model_fingerprint: str | None) -> None:
    found: Any
    for what, expected, found in (
        ("scheme", scheme_named(scheme) if isinstance(scheme, str) else scheme, session.scheme),
        ("model fingerprint", model_fingerprint, session.root.model_fingerprint),
    ):
        if expected is not None and expected != found:
            raise IncompatibleStore(
                f"session {session.id!r} has the {what} {found!r}, not {expected!r}", expected=expected, found=found
            )


def _time(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{what} is a number, not {type(value).__name__}")
    try:
        time = float(value)
    except OverflowError:
        time = math.inf
    if not math.isfinite(time):
        raise OutOfRange(f"{what} is {time}, not a time", value=value, limit=math.inf)
    return time
