"""A session: an atom that holds a tree.

A :class:`Session` is the current :class:`~sessiontree.tree.SessionTree`. Readers take it without a lock; a writer takes
the session's lock, makes a new value and swaps it in, so an operation that raises leaves the old value. What a writer checks
and plans, it does before it takes the lock wherever that can be long or runs a caller's code. Appending to any node
always works; only heads are contested, and they move by compare-and-set. There is no clock in here and no cursor.

On disk, a session tells the store's :class:`~sessiontree.journal.Journal` what it did, in the order it did it, before it lets go of
its lock; it waits for the disk, if it has to, after that. Where it has to, readers see a change only when it is durable, and one
that the disk refuses was never there.

No step here counts on threads taking turns in the interpreter: what is locked by what, in which order, and why what is done
without a lock is one step on a free-threaded build too, stands in docs/concurrency.md.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from sys import getsizeof
from types import TracebackType
from typing import Any, Final, Protocol, TypeVar
from weakref import ref

from numpy.typing import ArrayLike
from pyrsistent import PMap

from sessiontree import news
from sessiontree.annotations import Annotation, TokenWindow, checked
from sessiontree.details import NO_DETAILS, USUAL_DETAILS, Details
from sessiontree.draft import Draft, HowClosed, checked_finish_reason
from sessiontree.drift import Decode, decoder_of
from sessiontree.edits import Content, Edit, Plan, links_to, plan_linear, plan_prefix, plan_rewrite, without_bos
from sessiontree.errors import (
    SessionTreeError,
    StaleSession,
    UnknownNode,
    UnknownSession,
    Unsupported,
)
from sessiontree.events import Batch, Feed
from sessiontree.frozen import EMPTY_METADATA, checked_text, freeze_metadata
from sessiontree.handover import Parcel, packed, unpacked
from sessiontree.heads import UNSET, Head, HeadNodes, heads_bytes
from sessiontree.index import NodeIndex
from sessiontree.journal import Anew, Journal, Overtaken, WriteLost
from sessiontree.locks import new_lock
from sessiontree.media import MediaItem
from sessiontree.memory import HeldNodes
from sessiontree.node import Namespace, Node, is_on_path
from sessiontree.positions import ExternalPositions, PositionScheme
from sessiontree.prefixes import PrefixMatch
from sessiontree.query import Diff, Order, Problem
from sessiontree.record import Recorded, plan_record, with_key
from sessiontree.stored import StoredIndex
from sessiontree.tokens import TOKEN_BYTES, TokenIds, in_range, token_array, token_bytes
from sessiontree.tree import SessionTree
from sessiontree.turns import Turn, plan_turn

__all__ = ["Session"]

T = TypeVar("T")
HeadMove = tuple[str, Any]  # a head's name, and what is expected there
Tell = Callable[[str, int, SessionTree, SessionTree, frozenset[str], news.Drafts], Batch]

#: What a session takes beside its nodes and what finds them: measured, as everything that is made with one.
SESSION_BYTES: Final = 4_140
_ROOT_BYTES: Final = 1_200


class Home(Protocol):
    """What a session needs of the store that it is in."""

    _journal: Journal | None
    _feed: Feed
    _fresh: dict[str, Session]  # those that were used since anybody looked
    _with_drafts: dict[str, ref[Session]]  # those that have open drafts
    _uses: Iterator[int]  # numbers of uses
    _nodes: HeldNodes

    @property
    def _identity(self) -> bytes | None: ...

    def flush(self) -> None: ...

    def _forget(self, session: Session) -> None: ...

    def _got(self, session_id: str) -> Session: ...


class Session:
    """One session: its tree, its heads, and the operations that change them.

    Every parent and node argument is a Node or its 32-byte id; a node this session does not hold raises UnknownNode. Writing
    through a closed session raises StaleSession; nodes stay readable.
    """

    __slots__ = (
        "__weakref__",
        "_brought",
        "_closed",
        "_doubtful",
        "_dropped",
        "_feed",
        "_generations",
        "_held",
        "_id",
        "_incarnation",
        "_kept",
        "_last_used",
        "_light",
        "_limits",
        "_lock",
        "_made",
        "_number",
        "_open_drafts",
        "_pins",
        "_store",
        "_told",
        "_tree",
        "_unsettled",
        "_use",
        "_waiting",
        "_written",
    )

    def __init__(self, session_id: str, incarnation: int, tree: SessionTree, store: Home, number: int | None = None) -> None:
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
        self._feed = store._feed
        self._lock = new_lock()
        self._closed = False
        self._generations = 0  # how many keys it has made
        self._open_drafts: set[ref[Draft]] = set()  # and those that are closed, as long as they live
        self._brought: set[str] = set()  # keys of drafts that came from elsewhere
        self._pins: dict[bytes, int] = {}  # ids of the pinned nodes
        self._dropped = False  # whether nodes ever were, so that one that was found before may be gone
        self._doubtful = False  # whether something may have been recorded that is not seen here
        self._made = 0  # what the journal said to wait for until it is on disk that there is such a session
        self._light: SessionTree | None = None  # a tree of which no node is here for the session's sake
        self._kept: dict[bytes, Node] = {}  # what pins hold, though the other nodes go to disk
        self._held = 0  # bytes that were counted for it when the store looked last
        self._last_used = -math.inf  # the time when it was, as told by then
        self._use = 0  # the number of its last use

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
        """Named nodes as they are now. O(1), however many; of a session on disk, each is read when it is asked for by name."""
        return HeadNodes(self._tree._heads)

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
        return not any(is_on_path(node, tip) for tip in held)

    def leaves(self) -> tuple[Node, ...]:
        """Nodes without children, in commit order."""
        return self._tree.leaves()

    def annotations(self, node: Node | bytes) -> dict[str, Annotation]:
        """What is said of a node, by name. See :meth:`SessionTree.annotations`."""
        return self._tree.annotations(node)

    def annotation(self, node: Node | bytes, name: str) -> Annotation | None:
        """What is said of a node by one name; None where that is nothing. See :meth:`SessionTree.annotations`."""
        return self._tree.annotation(node, name)

    def annotation_of_each(self, nodes: Iterable[Node | bytes], name: str) -> list[Annotation | None]:
        """The same of many nodes, in their order, read together. See :meth:`SessionTree.annotation_of_each`."""
        return self._tree.annotation_of_each(nodes, name)

    def token_values(self, node: Node | bytes, name: str, start: int = 0, stop: int | None = None) -> TokenWindow:
        """The rows of an annotation along a node's path. See :meth:`SessionTree.token_values`."""
        return self._tree.token_values(node, name, start, stop)

    def spans(
        self, node: Node | bytes, name: str, start: int = 0, stop: int | None = None
    ) -> tuple[tuple[int, int, int | str], ...]:
        """The spans of an annotation along a node's path. See :meth:`SessionTree.spans`."""
        return self._tree.spans(node, name, start, stop)

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
        """How far a whole history is known, as a stateless client resends it. See :meth:`SessionTree.longest_prefix`.

        That is use of the session, as writing to it is.
        """
        if not self._closed:
            self._touch()
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
        derived_from: Iterable[Node | bytes] = (),
        head: str | None = None,
        expected: Head | Node | bytes | None = UNSET,
        annotations: Mapping[str, Any] | None = None,
    ) -> Node:
        """A prefilled turn under any node. See :meth:`SessionTree.append`.

        ``head``: moved to it in the same step, by compare-and-set where ``expected`` is given. ``annotations``: said of it in the
        same step, as by :meth:`annotate`. All of it or nothing, and durable as one.
        """
        # As SessionTree.append, but the lock is only held for what needs it.
        meter = self._feed.meter
        begun = 0.0 if meter is None else meter.now()
        parent = self._found(parent)
        max_tokens, reserved = self._limits
        data = token_bytes(token_ids, max_tokens)
        if strip_bos is not None:
            data, media, positions = without_bos(parent, Content(data, media, positions), strip_bos)
        turn = plan_turn(parent._lineage.scheme, parent, data, media, "input", role, key, positions)
        details = NO_DETAILS if metadata is None else Details(freeze_metadata(metadata))
        if derived_from:
            details = details._replace(links=links_to(map(self._found, derived_from), parent, parent.stop))
        node = (
            self._attach(parent, turn, details, reserved)
            if head is None and annotations is None
            else self._attach_with(head, expected, annotations, parent, turn, details, reserved)
        )
        if meter is not None:
            meter.appended(begun)
        return node

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
        frozen = EMPTY_METADATA if metadata is None else freeze_metadata(metadata)
        with self._lock:
            if self._closed:
                self._check_open()
            node = self._found(parent)
            draft = Draft(
                node,
                role=role,
                metadata=frozen,
                key="" if key is None else key,
                max_tokens=self._limits.max_tokens,
                host=self,
            )
            if key is None:  # only now: a draft that is refused uses up no key
                draft._key = self._own_key(node)
            self._have_open(draft)
        return draft

    def _have_open(self, draft: Draft) -> None:
        self._open_drafts.add(ref(draft, self._open_drafts.discard))
        self._store._with_drafts[self._id] = ref(self)  # only now: see _drafting
        if (meter := self._feed.meter) is not None:
            meter.opened_draft()

    def adopt(self, data: bytes | bytearray | memoryview) -> Draft:
        """Go on with a draft that was handed over, here or in another process: as :meth:`Draft.hand_over` left it.

        Its parent is to be in this session; where it is not and the draft brought its path, the path is added. Room is what this
        session allows. The same bytes may be adopted again, as after a crash: whichever is committed first makes the node, and
        committing the same again gives that node.

        Raises UnknownNode for its parent, IncompatibleStore where scheme, namespace or model fingerprint differ or the format is
        another, StaleSession where it comes from an opening of this store that is over, CorruptTree for other bytes than
        hand_over gives, KeyTaken, LimitExceeded, TypeError; nothing has changed then.
        """
        return self._adopt(unpacked(data))

    def _adopt(self, parcel: Parcel) -> Draft:
        parcel.check_root(self.root)

        def go_on(tree: SessionTree) -> Draft:
            self._check_open()
            parcel.check_opening(self._store._identity, self.incarnation)
            draft = parcel.draft(tree, self)
            self._brought.add(draft.key)
            self._have_open(draft)
            return draft

        def attach(tree: SessionTree) -> tuple[SessionTree, Draft]:
            tree = parcel.attached(tree)
            return tree, go_on(tree)

        if parcel.path and parcel.parent_id not in self._tree:
            return self._swap(attach)
        with suppress(UnknownNode):  # said below
            self._found(parcel.parent_id)  # which others may have made
        with self._lock:
            draft = go_on(self._tree)
            self._touch()
            return draft

    def _packed(self, draft: Draft, with_path: bool) -> bytes:
        return packed(draft, self.id, self._limits, (self._store._identity, self.incarnation), with_path)

    def _commit(
        self,
        parent: Node,
        turn: Turn,
        details: Details,
        head: str | None,
        expected: Any,
        annotations: Mapping[str, Any] | None,
    ) -> Node:
        """Make the node of a draft."""
        meter = self._feed.meter
        begun = 0.0 if meter is None else meter.now()
        node = (
            self._attach(parent, turn, details)
            if head is None and annotations is None
            else self._attach_with(head, expected, annotations, parent, turn, details)
        )
        if meter is not None:
            meter.committed(begun)
        return node

    def _attach_with(
        self,
        head: str | None,
        expected: Any,
        annotations: Mapping[str, Any] | None,
        parent: Node,
        turn: Turn,
        details: Details,
        reserved: int = 0,
    ) -> Node:
        """Make a node, move a head to it and annotate it, in one."""
        move = None if head is None else (checked_text(head, "a head's name"), expected)
        journal = self._store._journal
        if annotations is not None:
            said = checked(annotations, turn.state.num_tokens - parent.stop, turn.role)

            def attach(tree: SessionTree) -> tuple[SessionTree, Node]:
                tree, node = self._attached(parent, turn, details, reserved, move, tree)
                return tree._annotated(node, said), node

            return self._swap(attach)
        if journal is None:
            return self._swap(partial(self._attached, parent, turn, details, reserved, move))
        return self._attach_on_disk(journal, parent, turn, details, reserved, move)

    def annotate(self, node: Node | bytes, annotations: Mapping[str, Any]) -> None:
        """Say something more of a node, durably as any change. See :meth:`SessionTree.annotate`.

        A fork keeps what it says itself, and sees what the session it was forked from had said when the fork was opened.
        """
        node = self._found(node)
        said = checked(annotations, node.stop - node.start, node)
        self._swap(lambda tree: (tree._annotated(tree._resolve(node), said), None))

    def _close_draft(self, draft: Draft, how: HowClosed) -> None:
        if how == "committed" and self._feed.meter is None:  # nobody is told of that
            draft._shut(how)
            return
        self._end_draft(draft, how)
        self._feed.pass_on()

    def _end_draft(self, draft: Draft, how: HowClosed) -> None:
        """Shut a draft. If a branch ends by that it is told: by an abort, since after a commit a head may follow."""
        feed = self._feed
        if how in ("aborted", "timed out") and "branch_ended" in feed.wanted:
            with self._lock:
                left = [draft] if not self._closed else []
                batch = tuple(
                    news.ended(*self._named, self._tree, left, lambda: [each for each in self._drafts() if each is not draft])
                )
                put = feed.put
                if draft._how_closed is None:  # from here to the call nothing comes in between
                    draft._how_closed = how
                    if batch:
                        put(batch)
        draft._shut(how)
        if feed.meter is not None:
            feed.meter.closed_draft(how)

    def _own_key(self, parent: Node) -> str:
        """A key that no other generation of this session has, nor a child of ``parent``."""
        while True:
            number = self._generations + 1
            self._generations = number  # no call since it was read: nothing that comes in between gets the same
            own = f"{self._id}/{self._incarnation}/{number}"
            if own not in self._brought and not self._tree._has_key(parent, own):
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
        derived_from: Iterable[Node | bytes] = (),
        decode: Decode | None = None,
        special_ids: Iterable[int] = (),
        annotations: Mapping[str, Any] | None = None,
    ) -> Recorded:
        """Record a generation of somebody who keeps no tree: the whole prompt as the engine saw it, and the completion.

        As much of the prompt as :meth:`longest_prefix` knows is shared, up to the first token that differs, wherever turns end;
        what is new of it becomes one turn of ``role`` with ``prompt_metadata``; the completion becomes a generated turn under it
        with ``metadata``. ``media``: the prompt's, spans relative to its first token. A media span is never cut: where a
        difference is inside one, the history forks before it. Without a ``key`` the completion gets one of its own, so that
        equal samples stay apart; with one, recording again gives the same node. ``derived_from``: as for append, of the turn
        that is new of the prompt. ``annotations``: said of the completion, as by :meth:`annotate`, and anew when it is recorded
        again. All of it is recorded or nothing. Of equal samples, a prompt that resends them goes on from the first.

        ``decode``: what makes text, or bytes of UTF-8, of a list of ids and leaves special tokens in: a tokenizer's ``decode`` or
        ``decode_bytes``; with it, ``fork.drift`` says what kind of drift it is, going by a few thousand tokens. ``special_ids``:
        which ids are special tokens. It changes nothing of what is recorded, and is called only where the prompt forks, before
        anything is, and without a lock. An Exception that it raises is logged and leaves ``drift`` "unknown".

        Raises FinishRefused for "abort" and "error", and what append, commit and annotate raise.
        """
        finish_reason = checked_finish_reason(finish_reason)
        prompt, completion = (token_bytes(ids, self.max_tokens) for ids in (prompt_token_ids, completion_token_ids))
        items = tuple(media)
        role = checked_text(role, "role")
        prompt_details = NO_DETAILS if prompt_metadata is None else Details(freeze_metadata(prompt_metadata))
        details = USUAL_DETAILS.get(finish_reason) if metadata is None else None
        if details is None:
            details = Details(freeze_metadata(metadata), finish_reason, "keep")
        sources, decoder = tuple(map(self._found, derived_from)), decoder_of(decode, special_ids)
        said = {} if annotations is None else checked(annotations, len(completion) // TOKEN_BYTES, completion_role)
        while True:
            tree = self._tree
            match, beyond = tree._find_prefix(prompt, items)
            plan, reused, fork = plan_record(
                match,
                beyond,
                prompt,
                completion,
                items,
                role=role,
                completion_role=completion_role,
                key=key,
                prompt_details=prompt_details,
                details=details,
                sources=sources,
                decoder=decoder,
                children=tree._children,
            )
            own: list[str] | None = [] if key is None else None
            with suppress(UnknownNode):  # what it goes on from was dropped meanwhile
                made = self._swap(partial(self._attach_generation, plan, own, said))
                assert made.parent is not None
                return Recorded(made.parent, made, reused, fork)

    def _attach_generation(
        self, plan: Plan, own: list[str] | None, said: Mapping[str, Annotation], tree: SessionTree
    ) -> tuple[SessionTree, Node]:
        """``own``: its own key, the same however often it is done anew; empty before it has one, None where it has another."""
        self._check_there(tree, plan.parent)
        tree._check_limit(plan.stop, 0)
        if own is not None:
            if not own:  # only now: a generation that is refused uses up no key
                own.append(self._own_key(plan.parent))
            plan = with_key(plan, own[0])
        tree, node = tree._attach_all(plan, reserved=0)
        return tree._annotated(node, said), node

    def _attach(self, parent: Node, turn: Turn, details: Details, reserved: int = 0) -> Node:
        # As _swap, without its calls: this is what every append and commit goes through.
        carry = True
        store = self._store
        journal = store._journal
        if journal is not None:
            return self._attach_on_disk(journal, parent, turn, details, reserved)
        feed = self._feed
        with self._lock:
            while True:
                if self._closed:
                    self._check_open()
                before = self._tree
                if self._dropped:
                    self._check_there(before, parent)
                after, node = before._attach_alone(parent, turn, details, None, reserved, carry)
                if feed.wanted:  # as _turn does it
                    new = after is not before and "node_committed" in feed.wanted
                    batch = (news.committed(self._id, self._incarnation, node),) if new else ()
                    put = feed.put
                    if self._tree is before:  # from here to the call nothing comes in between
                        self._tree = after
                        if batch:
                            put(batch)
                        break
                elif self._tree is before:
                    self._tree = after
                    self._use = next(store._uses)
                    store._fresh[self._id] = self
                    return node
                carry = False  # what comes in between may come in again: be quick
            self._touch()
        feed.pass_on()
        return node

    def _attach_on_disk(
        self, journal: Journal, parent: Node, turn: Turn, details: Details, reserved: int, move: HeadMove | None = None
    ) -> Node:
        if journal.waits:
            check_may_wait(journal)
        made = self._attach_at_rest(journal, parent, turn, details, reserved, move)
        attached = partial(self._attached, parent, turn, details, reserved, move)
        if made is None:
            return self._swap_durably(journal, attached)
        self._see_through(journal, made[1], attached)
        return made[0]

    def _attached(
        self, parent: Node, turn: Turn, details: Details, reserved: int, move: HeadMove | None, tree: SessionTree
    ) -> tuple[SessionTree, Node]:
        self._check_there(tree, parent)
        tree, node = tree._attach_alone(parent, turn, details, None, reserved, True)
        return tree if move is None else tree.set_head(move[0], node, move[1])[0], node

    def _attach_at_rest(
        self, journal: Journal, parent: Node, turn: Turn, details: Details, reserved: int, move: HeadMove | None
    ) -> tuple[Node, int] | None:
        """As :meth:`_swap_durably`, without its calls, up to the number to wait for.

        None where that is not enough: it finds the node, if it made one, and tells of it. So it is where many write and this is
        refused, perhaps for what is there no longer.
        """
        told = self._told
        with self._lock:
            before = self._written
            if self._closed or self._doubtful or self._unsettled:
                return None
            try:
                if self._dropped:
                    self._check_there(before, parent)
                after, node = before._attach_alone(parent, turn, details, None, reserved, True)
                if after is before:
                    return None
                if move is not None:
                    after, _ = after.set_head(move[0], node, move[1])
            except SessionTreeError:
                if journal.many_write:
                    return None
                raise
            if self._written is not before:
                return None
            self._written = after
            assert self._number is not None
            try:
                head = None if move is None else (move[0], after._moves)
                waiting = journal.attached(self._number, before, node, turn, details, self._waiting, told, head)
            except (Overtaken, WriteLost):  # something was left untold, came in between, or was lost
                return None
            except SessionTreeError:  # as there
                self._written = told[0]
                raise
            if journal.waits:
                self._unsettled.append((waiting, after))
            if told[0] is before:  # else what came in between has told of more
                told[0] = after
            self._waiting = max(self._waiting, waiting)
            self._touch()
            if not journal.waits:  # else nobody sees it yet
                if self._feed.wanted:
                    while not self._turn(self._tree, self._written):
                        pass
                else:  # from here to the next line nothing comes in between
                    self._tree = self._written
            return node, waiting

    def _see_through(
        self, journal: Journal, waiting: int, operation: Callable[[SessionTree], tuple[SessionTree, T]]
    ) -> Anew | None:
        """Wait for what was told of and show it, or else see that the disk keeps up; no lock is held.

        Where another process wrote first, the operation is done anew on what there is then.
        """
        if journal.waits:
            again = partial(self._swap_durably, journal, operation)
            return journal.wait(waiting, partial(self._settle_alone, journal), again)
        if self._feed.wanted:
            self._feed.pass_on()
        journal.relieve()
        return None

    def _check_there(self, tree: SessionTree, parent: Node) -> None:
        """A node that was found before the lock was taken may have been dropped since. Raises UnknownNode."""
        if self._dropped:
            tree._resolve(parent)

    def _found(self, node: Node | bytes) -> Node:
        """A node of it, that others may have made since it looked. Raises UnknownNode."""
        try:
            return self._tree._resolve(node)
        except UnknownNode:
            journal = self._store._journal
            if journal is None or not journal.many_write or self._closed:
                raise
        self._look_anew(journal)
        return self._tree._resolve(node)

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
                if self._closed:
                    self._check_open()
                before = self._tree
                after, result = operation(before)
                if self._turn(before, after):
                    self._touch()
                    break
        if self._feed.wanted:
            self._feed.pass_on()
        return result

    def _turn(self, before: SessionTree, after: SessionTree, gone: Iterable[bytes] = (), tell: Tell = news.changed) -> bool:
        """Show a tree in the place of another, and tell what is new: the one way to do it. The lock is held.

        ``gone``: ids of nodes that were dropped in between, without those below them. ``tell``: says what is new. False, and
        nothing was done, where something came in between.
        """
        wanted = self._feed.wanted
        if not wanted or after is before:
            if self._tree is before:
                self._tree = after
                return True
            return False
        batch = tell(self._id, self._incarnation, before, after, wanted, self._drafts)
        if gone:
            batch += news.dropped(*self._named, gone, wanted)
        put = self._feed.put
        if self._tree is not before:  # from here to the call nothing comes in between
            return False
        self._tree = after
        if batch:
            put(batch)
        return True

    def _turn_to(self, after: SessionTree, gone: Iterable[bytes] = (), tell: Tell = news.changed) -> None:
        """The same, whatever is shown."""
        while not self._turn(self._tree, after, gone, tell):
            pass

    @property
    def _named(self) -> tuple[str, int]:
        return self._id, self._incarnation

    def _swap_durably(self, journal: Journal, operation: Callable[[SessionTree], tuple[SessionTree, T]]) -> T:
        """The same on disk: where changes are to be durable before anybody sees them, others may write behind this meanwhile."""
        if journal.waits:
            check_may_wait(journal)
        refused: SessionTreeError | None = None
        with self._lock:
            while True:
                if self._closed:
                    self._check_open()
                if self._unsettled or self._doubtful:
                    self._catch_up(journal)
                before = self._written
                try:
                    after, result = operation(before)
                except SessionTreeError as error:
                    if self._looks_again(journal):
                        continue
                    if not self._unsettled:
                        raise
                    refused, waiting = error, self._waiting
                    break
                if self._written is not before or (after is before and self._looks_again(journal)):
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
                while not self._turn(self._tree, self._written):
                    pass
        if refused is not None:  # for what nobody may know of yet
            durable = journal.settles(waiting)
            self._settle_alone(journal)
            if durable:
                try:
                    raise refused
                finally:
                    del refused  # which holds this frame
            return self._swap_durably(journal, operation)
        try:
            anew = self._see_through(journal, waiting, operation)
        finally:
            self._feed.pass_on()
        return result if anew is None else anew.result

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
            self._touch()
            if self._written is written:
                return self._waiting

    def _settle_alone(self, journal: Journal) -> None:
        with self._lock:
            self._settle(journal)
        self._feed.pass_on()

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
            while (shown := self._tree)._precedes(written) and not self._turn(shown, written):
                pass
            if unsettled and unsettled[0] is first:  # nothing comes in between looking and taking
                unsettled.popleft()

    def _reload(self, journal: Journal, gone: Iterable[bytes] = ()) -> None:
        """Something was lost, or dropped: what is there is what the disk has."""
        assert self._number is not None
        many = journal.many_write
        held = self._refs() if many else ()
        try:
            tree, pins = journal.tree(self._number)
        except UnknownSession:  # it was dropped elsewhere
            self._end()
            self._store._forget(self)
            self._check_open()
            raise
        if many:
            self._dropped = True
        self._unsettled.clear()
        self._waiting = 0
        self._written = self._told[0] = tree
        self._turn_to(tree, gone, news.looked_anew if many else news.changed)
        self._pins = pins
        self._doubtful = False
        self._adopt_nodes(held)

    def _catch_up(self, journal: Journal) -> None:
        """Know what has become of all that was handed over, as far as that is known."""
        self._settle(journal)
        if self._doubtful:
            self._reload(journal)

    def refresh(self) -> None:
        """Take in what other processes wrote to it; :meth:`SessionStore.get` does the same.

        That is one call of a store that many write, and an operation that comes upon what others wrote does it by itself. Elsewhere
        there is nothing to take in, but for a store that follows its writer (``read_only``). Raises UnknownSession where it was
        dropped, StoreFailed.
        """
        self._check_open()
        if self._store._journal is not None and self._store._journal.follows:
            self._store._got(self._id)
            self._feed.pass_on()

    def _look_anew(self, journal: Journal) -> None:
        """Have what there is by now."""
        assert self._number is not None
        if journal.many_write:
            check_may_wait(journal)
        with self._lock:
            if not journal.many_write:
                self._follow(*journal.tree(self._number))
            elif not journal.is_current(self._number):
                self._reload(journal)
        self._feed.pass_on()

    def _seen(self) -> tuple[SessionTree, Any]:
        """Its tree, and what the journal is to be told when something is made of it, in one."""
        journal = self._store._journal
        with self._lock:  # where nothing is dropped in between
            return self._tree, 0 if journal is None else journal.drops_of(self._number)

    def _looks_again(self, journal: Journal) -> bool:
        """Whether others wrote what it did not know of, and knows now; the lock is held.

        What is refused, or finds nothing to do, writes nothing that could be refused in its turn, so this is to be asked first.
        """
        if not journal.many_write or self._number is None:
            return False
        if not journal.is_current(self._number):
            self._reload(journal)
            return True
        self._settle(journal)  # all of that is durable
        return False

    def _show(self, journal: Journal) -> None:
        with self._lock:
            self._catch_up(journal)
        self._feed.pass_on()

    def _follow(self, tree: SessionTree, pins: dict[bytes, int]) -> None:
        """Be what a writer has made of it by now."""
        with self._lock:
            self._written = self._told[0] = tree
            self._turn_to(tree, tell=news.followed)
            self._pins = pins
        self._feed.pass_on()

    def truncate(self, node: Node | bytes, length: int) -> Node:
        """The first ``length`` tokens of a node's path. See :meth:`SessionTree.truncate`."""
        source = self._found(node)
        return self._planned(plan_prefix(source, in_range(length, source.stop, "length", source)), source.stop)

    def drop_last(self, node: Node | bytes, count: int) -> Node:
        """A node's path without its last ``count`` tokens. See :meth:`SessionTree.drop_last`."""
        source = self._found(node)
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
        source = self._found(node)
        return self._planned(plan_rewrite(source, edits), source.stop)

    def linearize(self, results: Sequence[Node | bytes]) -> Node:
        """One path through sibling turns, in the order given. See :meth:`SessionTree.linearize`."""
        return self._planned(plan_linear([self._found(node) for node in results]), 0)

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
        while not self._pinned(journal, node, pinned=pinned):
            pass
        self._feed.pass_on()

    def _pinned(self, journal: Journal | None, node: Node | bytes, *, pinned: bool) -> bool:
        """Whether that was done; else somebody else wrote first."""
        with self._lock:
            self._check_open()
            if journal is not None:
                self._catch_up(journal)
            tree = self._tree if journal is None else self._written
            try:
                found = tree._resolve(node)
            except UnknownNode:
                if journal is not None and self._looks_again(journal):
                    return False
                raise
            if (found.id in self._pins) == pinned:
                return journal is None or not self._looks_again(journal)
            ordinal = tree._index.find_ordinal(found, tree._count)
            assert ordinal is not None
            number = self._number
            if journal is not None and number is not None:
                try:
                    self._recorded(lambda: journal.pin(number, ordinal, found.id, pinned, self._waiting))
                except (Overtaken, WriteLost):
                    self._reload(journal)
                    return False
            pins = {**self._pins, found.id: ordinal}
            kept = {**self._kept, found.id: found}
            if not pinned:
                del pins[found.id], kept[found.id]
            self._pins, self._kept = pins, kept
            self._doubtful = False
            self._touch()
            return True

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
            check_may_wait(self._store._journal)

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
            ids = {root.id for root in roots}
            return roots if len(ids) == 1 else [root for root in roots if not any(node.id in ids for node in root.path()[:-1])]

        if self._store._journal is None:
            self._drop_in_memory(checked)
        else:
            self._drop_durably(
                self._store._journal,
                lambda tree: [tree._index.find_ordinal(node, tree._count) or 0 for node in checked(tree)],
            )

    def _drop_in_memory(self, doomed: Callable[[SessionTree], list[Node]]) -> None:
        self._check_alone(waits=False)
        with self._lock:
            while True:
                self._check_open()
                before = self._tree
                self._dropped = True
                roots = {node.id: node for node in doomed(before)}
                if self._turn(before, before.drop(*roots.values()) if roots else before, roots):
                    self._touch()
                    break
            self._written = self._told[0] = self._tree  # of no use in memory, but they would hold what was dropped
        self._feed.pass_on()

    def _drop_durably(self, journal: Journal, doomed: Callable[[SessionTree], list[int]]) -> None:
        """``doomed``: given all there is, which is on disk, the ordinals of what is to go."""
        self._check_alone(waits=True)
        self._keep_prefixes(journal, doomed)
        with self._lock:
            while True:
                self._check_open()
                journal.flush()
                self._catch_up(journal)
                self._looks_again(journal)
                tree, number = self._told[0], self._number
                ordinals = doomed(tree)
                if not ordinals or number is None:
                    return
                self._dropped = True
                # Overtaken: a signal handler did something, perhaps it moved a head there; or another process.
                with suppress(Overtaken, WriteLost) if journal.many_write else suppress(Overtaken):
                    self._recorded(lambda: journal.drop(number, ordinals, self._waiting, self._told, tree))  # noqa: B023
                    break
            journal.flush()
            tells = "nodes_dropped" in self._feed.wanted and not journal.many_write  # else looking anew does
            gone = dict.fromkeys(ordinals) if tells else ()
            self._reload(journal, [tree._index.id_of(ordinal) for ordinal in gone])
            self._touch()
        self._feed.pass_on()

    def _keep_prefixes(self, journal: Journal, doomed: Callable[[SessionTree], list[int]]) -> None:
        """What is said of nodes that are to go is said of those that are prefixes of them and stay."""
        if not self._tree._said:
            return
        journal.flush()  # what is to go may be asked of the disk

        def keep(tree: SessionTree) -> tuple[SessionTree, None]:
            return tree._keeping_prefixes([tree._index.node_at(ordinal) for ordinal in doomed(tree) if ordinal]), None

        self._swap_durably(journal, keep)

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
            self._end()
        self._store._forget(self)
        self._feed.pass_on()

    def _end(self, *, expired: bool = False) -> None:
        """Have ended; the lock is held."""
        batch = news.closed(*self._named, self._feed.wanted, expired=expired)
        put = self._feed.put
        if not self._closed:  # from here to the call nothing comes in between
            self._closed = True
            if batch:
                put(batch)

    def _drop_whole(self, *, told: bool) -> None:
        """Tell that it has ended, unless that was ``told``, and that all of it is forgotten; the lock is held."""
        wanted = self._feed.wanted
        batch = () if told else news.closed(*self._named, wanted)
        batch += news.dropped(*self._named, [self.root.id], wanted)
        if batch:
            self._feed.put(batch)

    def _touch(self) -> None:
        """It is used now. Whoever does that holds its lock, or is the only one to know it."""
        self._use = next(self._store._uses)
        self._store._fresh[self._id] = self

    def _expire(self, now: float, idle_ttl: float) -> bool:
        """Close it if it lay idle for ``idle_ttl``, in the store's time, and no draft is open."""
        with self._lock:
            if self._has_open_draft() or self._last_used == -math.inf:
                self._last_used = now
            if self._closed or now - self._last_used < idle_ttl:
                return False
            if self._id in self._store._fresh:  # used since the store looked
                return False
            self._end(expired=True)
        self._store._forget(self)
        self._feed.pass_on()
        return True

    def _time_out_drafts(self, now: float, ttl: float) -> None:
        """Abort the drafts that lay idle for ``ttl``, in the store's time."""
        if not self._open_drafts:
            return
        with self._lock:
            for draft in self._drafts():
                if draft._times_out(now, ttl):
                    self._end_draft(draft, "timed out")
        self._feed.pass_on()

    # Memory

    def _count_bytes(self) -> int:
        """What its nodes and what finds them take by now, those that were read from disk left out."""
        heads = self._tree._heads
        total = SESSION_BYTES + getsizeof(self._id) + getsizeof(self._pins)
        if heads:
            total += heads_bytes(heads)
        for log in {self._written._log, self._tree._log}:
            total += 0 if log is None else log.held_bytes()
        for tree in (self._written, self._tree):
            index: NodeIndex | None = tree._index
            while index is not None:
                total += index.held_bytes()
                if index.tip is not None:
                    total -= _ROOT_BYTES  # that of the session it was forked from
                if index.is_orphan:
                    assert index.tip is not None
                    self._store._nodes.count_path(index.tip)
                index = index.base
            if self._tree is self._written or self._tree._index is self._written._index:
                break
        return total

    def _rests(self, journal: Journal) -> bool:
        """Whether all that it did is on disk; its lock is held."""
        self._settle(journal)
        written = self._written
        return not (
            self._closed
            or self._doubtful
            or self._unsettled
            or self._tree is not written
            or self._told[0] is not written
            or not journal.is_durable(max(self._made, self._waiting))
        )

    def _lighten(self, journal: Journal) -> bool:
        """Have its nodes on disk alone, but for those that somebody holds: whether that can be."""
        with self._lock:
            if self._number is None or not self._rests(journal):
                return False
            tree, told = self._tree, self._told
            if tree is self._light:
                base = tree._index.base
                if isinstance(base, StoredIndex):
                    base.forget()
                return False
            kept = {pin: tree.node(pin) for pin in self._pins}
            held = self._refs()
            fresh, _ = journal.stored(self._number)
            if (fresh._count, fresh._moves) != (tree._count, tree._moves):
                return False  # what was said is counted anew: of a fork, and where gc took some of it, it is less
            if not (self._tree is tree and self._written is tree and told[0] is tree):
                return False  # a signal handler wrote something; from here to the next line no call is made
            self._tree = self._written = told[0] = fresh
            self._kept = kept
            del tree  # with it go the nodes that nobody else holds
            stored = fresh._index.base
            assert isinstance(stored, StoredIndex)
            stored.forget()
            self._light = fresh
            self._adopt_nodes(held)
            return True

    def _adopt_nodes(self, nodes: Iterable[tuple[int, ref[Node]]]) -> None:
        """Give out those that live as its own, though it is read from the disk."""
        stored = self._tree._index.base
        if isinstance(stored, StoredIndex):
            stored.adopt_living((ordinal, node) for ordinal, known in nodes if (node := known()) is not None)

    def _refs(self) -> list[tuple[int, ref[Node]]]:
        """Its nodes in memory, with their ordinals, without holding them."""
        tree, found = self._tree, []
        for index, visible in tree._index.layers_upward(tree._count):
            if isinstance(index, StoredIndex):
                found += [(ordinal, ref(node)) for ordinal, node in index.living()]
            else:
                nodes = enumerate(index.nodes[: visible - index.base_count], index.base_count)
                found += [(ordinal, ref(node)) for ordinal, node in nodes]
        return found

    def _at_rest(self, journal: Journal) -> bool:
        """Whether it can be made again from the disk as it is; its lock is held."""
        return not self._pins and self._rests(journal)

    def _has_open_draft(self) -> bool:
        return bool(self._drafts())

    def _drafts(self) -> list[Draft]:
        """Those that are open."""
        while True:
            try:
                return [draft for each in self._open_drafts if (draft := each()) is not None and draft._how_closed is None]
            except RuntimeError:  # a signal handler has opened one meanwhile, or another thread
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


def check_may_wait(journal: Journal) -> None:
    """Raises Unsupported in a signal handler that stands in the way of what it would wait for."""
    if journal.leading:
        raise Unsupported("a signal handler that comes in while its thread is writing to the disk cannot wait for the disk")
