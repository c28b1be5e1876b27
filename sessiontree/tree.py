"""The session tree as a persistent value.

A :class:`SessionTree` is (index, count, heads): it sees the first ``count`` nodes of an add-only index. Appending to the newest
version adds to the index and gives a value that sees one more; appending to an older version opens a layer over what that
version sees. No version ever changes, and none copies. Annotations are seen in the same way: the first so many of an add-only log.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
from numpy.typing import ArrayLike
from pyrsistent import PMap

from sessiontree import query, render
from sessiontree.annotation_log import (
    AnnotationLog,
    AnnotationSource,
    Said,
    annotation_of_each,
    annotations_of,
    inherited,
    path_spans,
    token_window,
)
from sessiontree.annotations import Annotation, TokenWindow, checked, said_over, same
from sessiontree.details import NO_DETAILS, Details
from sessiontree.digest import ID_BYTES
from sessiontree.edits import Content, Edit, Plan, links_to, plan_linear, plan_prefix, plan_rewrite, without_bos
from sessiontree.errors import (
    HeadMoved,
    KeyTaken,
    LimitExceeded,
    NameTaken,
    NodeHeld,
    OutOfRange,
    UnknownHead,
    UnknownNode,
    Unsupported,
)
from sessiontree.features import FeatureStore
from sessiontree.frozen import Sealed, checked_text, freeze_metadata, no_subclasses, seal
from sessiontree.heads import UNSET, Dropped, Head, Heads, HeadsByName, Move, handed_head, heads_of, moved, moves_between, new_head
from sessiontree.index import Limits, NodeIndex, slot_of
from sessiontree.media import MediaItem, placements
from sessiontree.node import Lineage, Namespace, Node, is_on_path, make_child, make_root
from sessiontree.positions import ExternalPositions, PositionScheme
from sessiontree.positions import scheme as scheme_named
from sessiontree.prefixes import History, PrefixMatch
from sessiontree.query import Diff, Order, Problem
from sessiontree.spans import placeholders_of
from sessiontree.stored import StoredHead
from sessiontree.tokens import TOKEN_BYTES, Extent, PathCache, TokenIds, as_index, in_range, shown, token_bytes
from sessiontree.turns import Turn, plan_turn

#: What the paths of forks may take in a tree that belongs to no store.
DEFAULT_PATH_CACHE_BYTES: Final = 32 * 2**20

#: More layers than this are not let stand. Carrying keeps far fewer; writes that come in the middle of others do not carry.
MAX_LAYERS: Final = 64


@attrs.frozen(init=False, eq=False, repr=False)
class SessionTree(Sealed):
    """A tree of turns as a value: every operation returns a new value and leaves this one as it was.

    ``len`` counts its nodes, the root included; iterating goes through them in commit order; ``in`` takes a node or an id.
    Trees compare by identity.
    """

    _index: NodeIndex
    _count: int
    _heads: Heads
    _moves: int
    _log: AnnotationLog | None  # None: nothing was ever said
    _said: int  # how much of its log it sees
    _writes: bool  # whether it may add to its index and its log while it is the newest value of them

    __init_subclass__ = no_subclasses

    def __new__(
        cls,
        scheme: PositionScheme | str,
        namespace: Namespace | Mapping[str, str | None] | str | None = None,
        *,
        model_fingerprint: str = "",
        max_tokens: int | None = None,
        reserve_output: int = 0,
    ) -> SessionTree:
        lineage = lineage_of(scheme, namespace, model_fingerprint)
        return new_tree(lineage, limits_of(max_tokens, reserve_output), PathCache(DEFAULT_PATH_CACHE_BYTES))

    # Reading

    @property
    def root(self) -> Node:
        """Depth 0, no tokens."""
        return self._index.root

    @property
    def scheme(self) -> PositionScheme:
        """The position scheme of every node."""
        return self._index.root.scheme

    @property
    def limits(self) -> Limits:
        """Context limits that appends and drafts are held to."""
        return self._index.limits

    @property
    def heads(self) -> PMap[str, Head]:
        """Named places. O(1), however many there are; one that lies on disk is read when it is asked for its node."""
        return HeadsByName(self._heads)

    def __len__(self) -> int:
        return self._count - self._index.bottom.missing

    def __iter__(self) -> Iterator[Node]:
        return self._index.walk(self._count)

    def __contains__(self, node: object) -> bool:
        if isinstance(node, Node):
            return self._find(node) is not None
        return isinstance(node, bytes) and self._index.find(node, self._count) is not None

    def node(self, node_id: bytes) -> Node:
        """The node of this id. Raises UnknownNode."""
        if not isinstance(node_id, (bytes, bytearray)):
            raise TypeError(f"a node id is {ID_BYTES} bytes, not {type(node_id).__name__}")
        found = self._index.find(bytes(node_id), self._count)
        if found is None:
            raise UnknownNode(f"no node {bytes(node_id[:4]).hex()} in this tree", node_id=bytes(node_id))
        return found

    def _resolve(self, node: Node | bytes) -> Node:
        """This tree's own object for a node or an id. Raises UnknownNode, TypeError."""
        if not isinstance(node, Node):
            return self.node(node)
        found = self._find(node)
        if found is None:
            raise UnknownNode(f"{node!r} is no node of this tree", node_id=node.id)
        return found

    def _find(self, node: Node) -> Node | None:
        index = self._index
        ordinal = index.by_id.get(node.id)
        if ordinal is not None and ordinal < self._count:
            return index.nodes[ordinal - index.base_count]
        tip = index.tip
        if tip is not None and node.depth <= tip.depth:  # without the ids of the whole path
            found = tip.ancestor(node.depth)
            return found if found.id == node.id else None
        return index.find(node.id, self._count)

    def _has_key(self, parent: Node, key: str) -> bool:
        index = self._index
        if not index.base_count and slot_of(parent, key) not in index.by_key:
            return False
        return index.find_child(parent, b"", key, self._count) is not None

    def children(self, node: Node | bytes) -> tuple[Node, ...]:
        """Children in commit order."""
        return tuple(child for _, child in self._children(self._resolve(node)))

    def _children(self, node: Node) -> Iterator[tuple[int, Node]]:
        return self._index.children(node, self._count)

    def siblings(self, node: Node | bytes) -> tuple[Node, ...]:
        """The other children of its parent, in commit order."""
        node = self._resolve(node)
        return () if node.parent is None else tuple(other for other in self.children(node.parent) if other.id != node.id)

    def leaves(self) -> tuple[Node, ...]:
        """Nodes without children, in commit order."""
        parents = {node.parent.id for node in self if node.parent is not None}
        return tuple(node for node in self if node.id not in parents)

    def lowest_common_ancestor(self, one: Node | bytes, two: Node | bytes) -> Node:
        """The deepest node on both paths, in O(log depth)."""
        return query.lowest_common_ancestor(self._resolve(one), self._resolve(two)) or self.root

    def diff(self, one: Node | bytes, two: Node | bytes) -> Diff:
        """How the path of ``two`` differs from that of ``one``. See :class:`Diff`."""
        return query.diff(self._resolve(one), self._resolve(two))

    def descendants(self, node: Node | bytes, order: Order = "commit") -> Iterator[Node]:
        """All nodes below ``node``, one by one: in "commit" order, or "depth_first". Raises UnknownNode, Unsupported."""
        return query.descendants(self._resolve(node), self._children, order)

    def search(
        self, predicate: Callable[[Node], object], node: Node | bytes | None = None, order: Order = "commit"
    ) -> Iterator[Node]:
        """Those of ``node`` (None: the root) and its descendants for which ``predicate`` is true, one by one, as they are found."""
        if not callable(predicate):
            raise TypeError(f"a predicate is a function of a node, not {type(predicate).__name__}")
        start = self.root if node is None else self._resolve(node)
        return filter(predicate, itertools.chain((start,), query.descendants(start, self._children, order)))

    def longest_prefix(self, token_ids: TokenIds, media: Iterable[MediaItem] = ()) -> PrefixMatch:
        """How far a whole history is known, as a stateless client resends it: the deepest node whose path it begins with.

        ``media``: its items, spans relative to the history's first token. Token ids must be equal one by one, inside spans too,
        and the items that they are placeholders of; turns, roles and where the positions came from do not matter. In time
        proportional to the history, whatever is in the tree; nodes that were added since the last call are taken in first, a
        few µs each, once for all values that hold them; the path of a fork needs no such thing. Of nodes on disk, the children of
        those that the history comes by are read, once. Raises OutOfRange and MediaSpanError for a history that cannot be.
        """
        return self._find_prefix(token_bytes(token_ids), tuple(media))[0]

    def _find_prefix(self, data: bytes, items: tuple[MediaItem, ...]) -> tuple[PrefixMatch, Node | None]:
        placements(items, len(data) // TOKEN_BYTES)
        return self._index.find_prefix(History(0, data, placeholders_of(items, 0)), self._count)

    def validate(self, path: Node | bytes | Sequence[Node], *, allow_extend_truncated: bool = False) -> tuple[Problem, ...]:
        """What a model or an API would stumble over on the path of a node: unpaired tool calls, replies cut off and gone on from.

        ``path``: a node, its id, or the nodes of its path. ``allow_extend_truncated``: going on from a reply that was cut off is
        meant. Empty where nothing is wrong. See :class:`Problem`.
        """
        last = path[-1] if isinstance(path, (tuple, list)) and path else path
        node = self._resolve(last)  # type: ignore[arg-type]  # which says so if it is neither
        return query.validate(node, self._children, allow_extend_truncated=allow_extend_truncated)

    def to_text(self, *, max_nodes: int = 200) -> str:
        """A picture for terminals; at most ``max_nodes`` nodes, and how many are not shown."""
        return render.to_text(tuple(self), self._named(), max_nodes=max_nodes)

    def to_dot(self) -> str:
        """The whole tree in Graphviz's language."""
        return render.to_dot(tuple(self), self._named())

    def to_networkx(self) -> Any:
        """The whole tree as a graph of networkx, an optional install. Nodes are keyed by hexadecimal ids."""
        return render.to_networkx(tuple(self), self._named())

    def _repr_html_(self) -> str:
        return render.to_html(tuple(self), self._named())

    def _named(self) -> dict[str, Node]:
        return {name: head.node for name, head in self._heads.items()}

    def _precedes(self, other: SessionTree) -> bool:
        """Whether ``other``, of the same session, has changes that this has not. To :meth:`drop` is none."""
        return self._count + self._moves + self._said < other._count + other._moves + other._said

    def head(self, name: str) -> Head:
        """The head of this name. Raises UnknownHead."""
        found = self._head(name)
        if found is None:
            raise UnknownHead(f"no head {name!r}", name=name)
        return found

    def _head(self, name: str) -> Head | None:
        found = self._heads.get(name)
        return None if found is None else handed_head(found)

    def __repr__(self) -> str:
        return f"<SessionTree {self.root.id[:4].hex()} {self.scheme.name} nodes={len(self)} heads={sorted(self._heads)}>"

    # New values

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
        annotations: Mapping[str, Any] | None = None,
    ) -> tuple[SessionTree, Node]:
        """A prefilled turn under any node: (the tree with it, the node).

        Equal content under the same parent is the same node: the tree comes back as it is, whatever the metadata. The same
        ``key`` with other content raises KeyTaken. ``positions``: this turn's position table where it comes from elsewhere.
        ``strip_bos``: the id of a BOS token that this turn loses if it begins with it and a history stands before it, as every
        rendering of a chat template does: ids, spans and positions together; None keeps all. ``derived_from``: nodes of this tree
        that it was made of, wherever they stand, kept as links: what a summary sums up, what a subagent was sent from.
        ``annotations``: said of the node, as by :meth:`annotate`. Raises UnknownNode, LimitExceeded, OutOfRange, MediaSpanError,
        PositionError, and what annotate raises; nothing has changed then.
        """
        parent = self._resolve(parent)
        data = token_bytes(token_ids, self.limits.max_tokens)
        if strip_bos is not None:
            data, media, positions = without_bos(parent, Content(data, media, positions), strip_bos)
        turn = plan_turn(parent.scheme, parent, data, media, "input", role, key, positions)
        details = NO_DETAILS if metadata is None else Details(freeze_metadata(metadata))
        if derived_from:
            details = details._replace(links=links_to(map(self._resolve, derived_from), parent, parent.stop))
        said = {} if annotations is None else checked(annotations, turn.state.num_tokens - parent.stop, role)
        tree, node = self._attach(parent, turn, details, reserved=self.limits.reserve_output)
        return tree._annotated(node, said), node

    def truncate(self, node: Node | bytes, length: int) -> tuple[SessionTree, Node]:
        """The first ``length`` tokens of a node's path.

        Where a node of the path ends there, the deepest such node. Otherwise a sibling of the node that is cut, which views its
        first tokens: same role and metadata, no finish reason, a ``prefix_of`` link. Raises OutOfRange outside 0..stop and
        MediaSpanError inside a media span.
        """
        node = self._resolve(node)
        return self._attach_all(plan_prefix(node, in_range(length, node.stop, "length", node)), node.stop)

    def drop_last(self, node: Node | bytes, count: int) -> tuple[SessionTree, Node]:
        """A node's path without its last ``count`` tokens. As :meth:`truncate`."""
        node = self._resolve(node)
        return self.truncate(node, node.stop - in_range(count, node.stop, "count", node))

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
    ) -> tuple[SessionTree, Node]:
        """Another turn in the place of ``node``: a new child of its parent, and ``head`` moved to it, in one step.

        ``node``, its siblings and all below them stay. ``role`` None keeps the role. Raises what append and set_head raise.
        """
        node = self._resolve(node)
        if node.parent is None:
            raise OutOfRange("the root has no parent to branch from; set a head to the root instead", value=0, limit=1)
        self._check_head(head, expected)
        role = node.role or "" if role is None else role
        tree, new = self.append(node.parent, token_ids, media=media, role=role, metadata=metadata, key=key, positions=positions)
        return tree.set_head(head, new)[0], new

    def rewrite(self, node: Node | bytes, edits: Iterable[Edit | Sequence[Any]]) -> tuple[SessionTree, Node]:
        """A path like ``node``'s with some of its tokens replaced: (the tree with it, its last node).

        ``edits``: :class:`Edit` values or (start, stop, token_ids, media) tuples in path coordinates, half-open, in order. The
        longest unchanged prefix is shared; turns after it are made anew, prefilled, with their role and metadata, media moved
        along, each with a ``derived_from`` link that says how many tokens are reused. An item goes where an edit covers its whole
        span; an edit that cuts a span raises MediaSpanError. Raises OutOfRange for edits that overlap or leave the path.
        """
        node = self._resolve(node)
        return self._attach_all(plan_rewrite(node, edits), node.stop)

    def set_head(self, name: str, node: Node | bytes, expected: Head | Node | bytes | None = UNSET) -> tuple[SessionTree, Head]:
        """Create or move a head: (the tree with it, the head).

        Without ``expected`` there is no check; None: the name must be free, else NameTaken; a Head, Node or id: it must be what is
        there, else HeadMoved, whose ``actual`` is the Head that is. Raises UnknownNode.
        """
        name = self._check_head(name, expected)
        moves = self._moves + 1
        head = new_head(self._resolve(node), moves)
        heads = moved(self._heads, self._moves, name, head)
        return self._with(heads, moves), head

    def _check_head(self, name: str, expected: Head | Node | bytes | None) -> str:
        if type(name) is not str or not name.isascii():
            name = checked_text(name, "a head's name")
        if expected is UNSET:
            return name
        actual = self._head(name)
        if expected is None:
            if actual is not None:
                raise NameTaken(f"head {name!r} exists, at {_place(actual)}", name=name, actual=actual)
        else:
            if not isinstance(expected, (Head, Node, bytes)):
                raise TypeError(f"expected is a Head, a Node, its id or None, not {type(expected).__name__}")
            there: Head | Node | bytes | None = actual
            if actual is not None and not isinstance(expected, Head):
                there = actual.node if isinstance(expected, Node) else actual.node.id
            if there != expected:
                raise HeadMoved(f"head {name!r} is at {_place(actual)}, not at {_place(expected)}", name=name, actual=actual)
        return name

    def drop_head(self, name: str) -> SessionTree:
        """The tree without this head. Raises UnknownHead."""
        self.head(name)
        return self._after_move(name, Dropped(self._moves + 1))

    def _after_move(self, name: str, change: Head | Dropped) -> SessionTree:
        return self._with(moved(self._heads, self._moves, name, change), change.version)

    def _with(self, heads: Heads, moves: int) -> SessionTree:
        return _value(self._index, self._count, heads, moves, self._log, self._said, self._writes)

    def _with_heads(self, heads: dict[str, Any], moves: int) -> SessionTree:
        return self._with(heads_of(heads, moves), moves)

    def _moves_since(self, before: SessionTree) -> list[Move]:
        """Where heads went since an earlier value of the same session, in the order in which they did."""
        return moves_between(before._heads, before._moves, self._heads, self._moves)

    def drop(self, *nodes: Node | bytes) -> SessionTree:
        """The tree without these nodes and all below them. O(all nodes).

        Raises UnknownNode, NodeHeld where a head is among them, Unsupported for the root, and for the path that a fork shares.
        """
        roots = [self._resolve(node) for node in nodes]
        self._check_held(roots, ((f"head {name!r}", head.node) for name, head in self._heads.items()))
        return self._keeping_prefixes(roots)._without(roots)

    def _without(self, roots: Sequence[Node]) -> SessionTree:
        lowest = self._index.bottom
        source = None if lowest._tip_source is None else lowest._tip_source()
        index = NodeIndex(lowest.root, lowest.limits, tip=lowest.tip, tip_source=source)
        gone = {node.id for node in roots}
        for ordinal, node in enumerate(self):
            if node.id in gone or (node.parent is not None and node.parent.id in gone):
                gone.add(node.id)
            elif ordinal >= index.base_count:
                index.add(node)
        nodes = list(index.walk(index.count))
        values = zip(nodes, self._read_said(nodes, None), strict=True)
        said = [Said(node.id, *each) for node, named in values for each in named.items()]
        log = AnnotationLog() if said else None
        if log is not None:
            log.takes(0, said)
        return _value(index, index.count, self._heads, self._moves, log, len(said), True)

    def _unreachable(self, held: Iterable[Node], recent: int) -> list[Node]:
        """The topmost of the nodes that lead to none that is held, nor to one of the last ``recent``."""
        nodes = list(self)
        alive = {node.id for node in held}
        alive.update(node.id for node in nodes[max(0, len(nodes) - recent) :])
        for node in reversed(nodes):
            if node.id in alive and node.parent is not None:
                alive.add(node.parent.id)
        lowest = self._index.lowest
        alive.update(node.id for node in nodes[: max(1, lowest)])  # the root, and a path that a fork shares
        return [node for node in nodes if node.id not in alive and node.parent is not None and node.parent.id in alive]

    def _check_held(self, roots: Sequence[Node], held: Iterable[tuple[str, Node]]) -> None:
        """Whether these nodes can go, given what is held and by what."""
        index = self._index
        for root in roots:
            ordinal = index.find_ordinal(root, self._count)
            if root.parent is None or ordinal is None or ordinal < index.lowest:
                what = "the root" if root.parent is None else "a node of the path that a fork shares"
                raise Unsupported(f"{what} goes with its session alone", node=root)
        for holder, node in held:
            for root in roots:
                if is_on_path(root, node):
                    raise NodeHeld(f"{root!r} is held by {holder}, at {node!r}", node=node, holder=holder)

    def forked(self, node: Node | bytes) -> SessionTree:
        """A tree that holds the path of ``node``; nodes are shared, heads are not. O(1), but for open tool calls and annotations.

        What is said of nodes is said of them in both; of one that is ``prefix_of`` another, what is said of that one by now.

        Results for tool calls that the path made and does not answer, where they were recorded beside it, come along, as siblings:
        a fork drops none of them. To go on from all of them, see :meth:`linearize`. Where anything is said, the path is walked.
        """
        node = self._resolve(node)
        return self._over_path(node, self.limits, query.sibling_results(node, self._children))

    def _over_path(self, tip: Node, limits: Limits, beside: Iterable[Node] = ()) -> SessionTree:
        """A tree over the path of one of this tree's nodes. ``beside``: children of that path, which come along.

        What nodes of it have from others that they are prefixes of, which do not come along, is said of themselves there.
        """
        index = NodeIndex(self.root, limits, tip=tip, tip_source=self._index)
        beside = tuple(beside)
        for node in beside:
            index.add(node)
        log = None if self._log is None else AnnotationLog(self._log, self._said, tip=tip)
        tree = _value(index, index.count, {}, 0, log, self._said, True)
        if log is not None:
            for node in tip.path():
                if node.links:
                    tree = tree._annotated(node, inherited(self._read_said, self.node, node))
            for node in beside:
                tree = tree._annotated(node, self.annotations(node))
        return tree

    def linearize(self, results: Sequence[Node | bytes]) -> tuple[SessionTree, Node]:
        """One path through sibling turns, in the order given: (the tree with it, its last node).

        Results of parallel tool calls that were recorded as siblings are never joined by themselves; this does it. The first stays
        as it is; the others follow it as turns made anew, prefilled, each with a ``derived_from`` link. Raises OutOfRange for
        none, Unsupported for nodes that are no siblings.
        """
        nodes = [self._resolve(node) for node in results]
        return self._attach_all(plan_linear(nodes), 0)

    def _read_only(self) -> SessionTree:
        """The same value, except that what is appended to it goes to a layer of its own.

        Whoever goes on writing to the index hands out this: other people's values then never stand in its way.
        """
        return _value(self._index, self._count, self._heads, self._moves, self._log, self._said, False)

    # Annotations

    def annotations(self, node: Node | bytes) -> dict[str, Annotation]:
        """What is said of a node, by name: its own annotations, and of its tokens those of a node that it is ``prefix_of``.

        The nearest counts for each token; scalars are a node's own. Of a session on disk they are read. Raises UnknownNode.
        """
        return annotations_of(self._read_said, self.node, self._resolve(node))

    def annotation(self, node: Node | bytes, name: str) -> Annotation | None:
        """The same of one name; None where nothing is said. Raises UnknownNode."""
        return self.annotation_of_each([node], name)[0]

    def annotation_of_each(self, nodes: Iterable[Node | bytes], name: str) -> list[Annotation | None]:
        """The same of many nodes, in their order, read together where they are stored. Raises UnknownNode."""
        found = [self._resolve(node) for node in nodes]
        return annotation_of_each(self._read_said, self.node, found, name)

    def annotated(self, name: str) -> dict[bytes, Annotation]:
        """What nodes have by this name themselves, by their ids. O(what is said by it)."""
        return {} if self._log is None else self._log.named(name, self._said)

    def token_values(self, node: Node | bytes, name: str, start: int = 0, stop: int | None = None) -> TokenWindow:
        """The :class:`TokenValues` of this name for tokens ``[start, stop)`` of a node's path, and of which tokens there are any.

        Exactly stop - start rows, in path coordinates. Raises UnknownNode, OutOfRange; Unsupported where this name is something
        else, or has rows of two types or shapes.
        """
        return token_window(self._read_said, self.node, self._resolve(node), name, start, stop)

    def spans(
        self, node: Node | bytes, name: str, start: int = 0, stop: int | None = None
    ) -> tuple[tuple[int, int, int | str], ...]:
        """The :class:`Spans` of this name for tokens ``[start, stop)`` of a node's path: (start, stop, value) each.

        In path coordinates, half-open, clipped to the window. Raises UnknownNode, OutOfRange, Unsupported.
        """
        return path_spans(self._read_said, self.node, self._resolve(node), name, start, stop)

    def _read_said(self, nodes: Sequence[Node], name: str | None) -> list[dict[str, Annotation]]:
        return [{} for _ in nodes] if self._log is None else self._log.read(nodes, self._said, name)

    def annotate(self, node: Node | bytes, annotations: Mapping[str, Any]) -> SessionTree:
        """The tree with something more said of a node.

        By name: a scalar, :class:`TokenValues`, :class:`Ragged`, :class:`Spans`, or an array of a row for each of its tokens. What
        is said of a token later stands in the place of what was said before; the rest stays. Saying the same again changes
        nothing. Raises UnknownNode, OutOfRange for tokens that the node has not, Unsupported for rows of another type or shape than
        before, LimitExceeded for names; nothing has changed then.
        """
        node = self._resolve(node)
        return self._annotated(node, checked(annotations, node.stop - node.start, node))

    def _annotated(self, node: Node, values: Mapping[str, Annotation]) -> SessionTree:
        """The same, of one of its own nodes, by values that were checked."""
        if not values:
            return self
        own = self._read_said([node], next(iter(values)) if len(values) == 1 else None)[0]
        more = []
        for name, value in values.items():
            older = own.get(name)
            now = said_over(value, older, f"{name!r} of {node!r}")
            if not same(now, older):
                more.append(Said(node.id, name, now))
        return self._saying(more)

    def _saying(self, more: Sequence[Said]) -> SessionTree:
        """The tree where this, too, is said of its own nodes, each in the place of what was said by that name."""
        if not more:
            return self
        log = self._log
        if log is None or not self._writes or not log.takes(self._said, more):
            log = AnnotationLog(log, self._said)
            log.takes(self._said, more)
        return _value(self._index, self._count, self._heads, self._moves, log, self._said + len(more), self._writes)

    def _said_since(self, before: SessionTree) -> list[Said]:
        """The annotations that an earlier value of the same session has not."""
        return [] if self._log is None else self._log.since(self._said, before._log, before._said)

    def _keeping_prefixes(self, roots: Sequence[Node]) -> SessionTree:
        """The tree before ``roots`` go: what is said of them is said of those that are prefixes of them and stay."""
        tree, gone = self, {root.id for root in roots}
        parents = {root.parent.id: root.parent for root in roots if root.parent is not None} if self._said else {}
        for parent in parents.values():
            for _, other in self._children(parent):
                if other.id not in gone and any(link.kind == "prefix_of" and link.node_id in gone for link in other.links):
                    tree = tree._annotated(other, inherited(self._read_said, self.node, other))
        return tree

    # Attaching what was planned

    def _attach_all(self, plan: Plan, was: int = 0, reserved: int | None = None) -> tuple[SessionTree, Node]:
        """Make nodes of what was planned; all of them or none.

        A path no longer than it ``was`` is never too long: its replies stood in the room kept for output already. ``reserved``:
        how many tokens to leave free for output, by default as many as for an append.
        """
        if plan.turns and plan.stop > was:
            self._check_limit(plan.stop, self.limits.reserve_output if reserved is None else reserved)
        tree, node = self, plan.parent
        for turn, details, extent in plan.turns:
            tree, node = tree._attach(node, turn, details, extent, reserved=0)
        return tree, node

    def _attach(
        self, parent: Node, turn: Turn, details: Details, extent: Extent | None = None, *, reserved: int
    ) -> tuple[SessionTree, Node]:
        """Make a node of a planned turn under ``parent``, one of this tree's own nodes.

        A node of the same content is returned as it is. ``extent`` already holds the turn's tokens at its place; None: they are
        written to the parent's where it ends there, else to a new one. ``reserved``: how many tokens to leave free for output.
        Raises KeyTaken, LimitExceeded, OutOfRange.
        """
        with self._index.lock:
            return self._attach_alone(parent, turn, details, extent, reserved, True)

    def _attach_alone(
        self, parent: Node, turn: Turn, details: Details, extent: Extent | None, reserved: int, carry: bool
    ) -> tuple[SessionTree, Node]:
        """As :meth:`_attach`, for who is alone in writing to the index, the owner of a session's.

        ``carry``: whether there is time to take small layers together.
        """
        index = self._index
        turn_id, data, media, origin, role, key, runs, state, replayed = turn
        count = self._count
        slot = None if key is None else slot_of(parent, key)
        if (slot is not None and slot in index.by_key) or index.base_count or turn_id in index.by_id:  # else it is new: mostly
            found = index.find_child(parent, turn_id, key, count)
            if found is not None:
                if found.id != turn_id:
                    raise KeyTaken(f"key {key!r} under {parent!r} names other content: {found!r}", key=key, node=found)
                return self, found
        stop = state.num_tokens  # the same object: that is one int less to keep
        if index.limits.max_tokens is not None:
            self._check_limit(stop, reserved)
        if not data and parent.parent is None and (key is None or origin != "input"):
            raise OutOfRange("an empty turn under the root says nothing, unless it has a key", value=0, limit=1)
        mine = self._writes and not index.busy
        if mine:
            index.busy = True
        try:
            carry = carry and (mine or not self._writes)
            newest = mine and index.base_count + len(index.nodes) == count
            if not newest or (carry and index.layers > MAX_LAYERS):
                index = index.layer(count, carry)
            if extent is None:
                extent = parent._extent
                if not data:
                    pass
                elif extent.writer is index.writer and extent.end == parent.stop:
                    extent.append(data)
                else:
                    extent = Extent(index.writer, extent, parent.stop, data, extent.paths)
            node = make_child(parent, turn_id, stop, media, origin, role, key, runs, state, replayed, details, extent)
            index.put(node, turn_id, slot)
            tree: SessionTree = _new(SessionTree)  # as _value, without a Python call
            _set_index(tree, index)
            _set_count(tree, count + 1)
            _set_heads(tree, self._heads)
            _set_moves(tree, self._moves)
            _set_log(tree, self._log if self._writes else _over(self._log, self._said))
            _set_said(tree, self._said)
            _set_writes(tree, True)
            return tree, node
        finally:
            if mine:
                self._index.busy = False

    def _check_limit(self, stop: int, reserved: int) -> None:
        allowed = self._index.limits.max_tokens
        if allowed is not None and stop > allowed - reserved:
            kept = f", {shown(reserved)} of them kept for output" if reserved else ""
            raise LimitExceeded(
                f"a path of {stop} tokens; the session allows {shown(allowed)}{kept}", value=stop, limit=allowed - reserved
            )


def _place(head: Head | Node | bytes | None) -> str:
    if isinstance(head, bytes):
        return f"node {head[:4].hex()}"
    return f"version {shown(head.version)}, {head._where}" if isinstance(head, Head) else repr(head)


def lineage_of(
    scheme: PositionScheme | str,
    namespace: Namespace | Mapping[str, str | None] | str | None,
    model_fingerprint: str,
    features: FeatureStore | None = None,
) -> Lineage:
    """What is constant in a session, checked."""
    scheme = scheme_named(scheme) if isinstance(scheme, str) else scheme
    if not isinstance(scheme, PositionScheme):
        raise TypeError(f"a scheme is a PositionScheme or its name, not {type(scheme).__name__}")
    fingerprint = checked_text(model_fingerprint, "a model fingerprint")
    return Lineage(scheme, Namespace.of(namespace), fingerprint, None if features is None else weakref.ref(features))


def new_tree(lineage: Lineage, limits: Limits, paths: PathCache) -> SessionTree:
    """A tree of one node, its root. ``paths``: where the paths of its forks are kept once they were read."""
    extent = Extent(None, None, 0, b"", paths)
    root = make_root(lineage, extent)
    index = NodeIndex(root, limits)
    extent.writer = index.writer
    index.add(root)
    return _value(index, 1, {}, 0, None, 0, True)


def limits_of(max_tokens: int | None, reserve_output: int) -> Limits:
    """Context limits, checked. Raises TypeError, LimitExceeded."""
    reserve = as_index(reserve_output, "reserve_output")
    max_tokens = None if max_tokens is None else as_index(max_tokens, "max_tokens")
    if max_tokens is not None and not 0 <= reserve <= max_tokens:
        where = f"reserve_output {shown(reserve)} outside 0..max_tokens {shown(max_tokens)}"
        raise LimitExceeded(where, value=reserve, limit=max_tokens)
    if reserve < 0:
        raise LimitExceeded(f"reserve_output {shown(reserve)} is below 0", value=reserve, limit=0)
    return Limits(max_tokens, reserve)


_SET = seal(SessionTree)
_new = object.__new__
_set_index = _SET["_index"]
_set_count = _SET["_count"]
_set_heads = _SET["_heads"]
_set_moves = _SET["_moves"]
_set_log = _SET["_log"]
_set_said = _SET["_said"]
_set_writes = _SET["_writes"]


def stored_tree(
    index: NodeIndex, count: int, heads: dict[str, StoredHead], moves: int, annotations: AnnotationSource | None, said: int
) -> SessionTree:
    """The tree of a session that was opened again; ``index`` is its own to write to.

    ``annotations``: where those are that were stored, None where there are none; ``said``: how many there were.
    """
    log = None if annotations is None else AnnotationLog(None, said, annotations)
    return _value(index, count, heads_of(heads, moves), moves, log, said, True)


def _over(log: AnnotationLog | None, count: int) -> AnnotationLog | None:
    """A log of its own over the first so many of another."""
    return None if log is None else AnnotationLog(log, count)


def _value(
    index: NodeIndex, count: int, heads: Heads, moves: int, log: AnnotationLog | None, said: int, writes: bool
) -> SessionTree:
    tree: SessionTree = _new(SessionTree)
    _set_index(tree, index)
    _set_count(tree, count)
    _set_heads(tree, heads)
    _set_moves(tree, moves)
    _set_log(tree, log)
    _set_said(tree, said)
    _set_writes(tree, writes)
    return tree
