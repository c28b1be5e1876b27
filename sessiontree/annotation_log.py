"""The annotations of one tree, add-only and shared by its versions, as its nodes are.

A version of a tree is told of the first ``count`` things that were said; whoever says something more adds it behind them, or, where
it is not the newest version, in a layer over them. Nothing is taken out or changed, so readers need no lock. What is said last of a
name on a node is all there is of it by then.

A log may lie over that of the session a tree was forked from, of which it sees what is said of the path that they share, and over
what a store holds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from sys import getsizeof
from typing import Any, Final, NamedTuple, Protocol

from sessiontree.annotations import Annotation, OfTokens, Spans, TokenValues, TokenWindow, kind_of, value_bytes
from sessiontree.errors import UnknownNode, Unsupported
from sessiontree.locks import new_lock
from sessiontree.node import Node, is_on_path
from sessiontree.tokens import window

_ENTRY_BYTES: Final = 120  # of an entry beside its value


class Said(NamedTuple):
    """One annotation, as it is since then."""

    node_id: bytes
    name: str
    value: Annotation


class AnnotationSource(Protocol):
    """Annotations in a store, as they were when it was looked at."""

    def read(self, nodes: Sequence[Node], name: str | None) -> Sequence[Mapping[str, Annotation]]:
        """Those of nodes, in their order; ``name``: that one alone. Read together. Raises CorruptTree, StoreFailed."""

    def named(self, name: str) -> dict[bytes, Annotation]:
        """What nodes of the session, and of the path that it shares, have by a name, by their ids. Raises the same."""


class AnnotationLog:
    """See the module. ``base``, ``base_count``: what it lies over, and how much of that; ``source``: what is stored below it.

    ``tip``: of a fork, the last node of the path that it shares: of other nodes it sees nothing that ``base`` says.
    """

    __slots__ = ("_busy", "_by_node", "_lock", "_nbytes", "_said", "base", "base_count", "source", "tip")

    def __init__(
        self,
        base: AnnotationLog | None = None,
        base_count: int = 0,
        source: AnnotationSource | None = None,
        tip: Node | None = None,
    ) -> None:
        self.base: AnnotationLog | None = base
        self.base_count: int = base_count
        self.source: AnnotationSource | None = source
        self.tip: Node | None = tip
        self._busy = False  # somebody is adding to it; whoever comes in between on the same thread leaves it alone
        self._lock = new_lock()
        self._said: list[Said] = []
        # What was said of each node: its number, or, of more than one thing, by name, numbers in order.
        self._by_node: dict[bytes, int | dict[str, list[int]]] = {}
        self._nbytes = 0

    @property
    def count(self) -> int:
        return self.base_count + len(self._said)

    def takes(self, count: int, more: Sequence[Said]) -> bool:
        """Add more behind the first ``count``; False, and nothing was done, where there is more already.

        No version sees it yet. An interrupt leaves some of it, which none ever sees.
        """
        with self._lock:
            if self._busy or self.count != count:
                return False
            self._busy = True
            try:
                for said in more:
                    self._nbytes += _ENTRY_BYTES + value_bytes(said.value)
                    self._said.append(said)
                    self._note(said, self.count - 1)
            finally:
                self._busy = False
            return True

    def _note(self, said: Said, number: int) -> None:
        """By which it is found from here on."""
        known = self._by_node.get(said.node_id)
        if known is None:
            self._by_node[said.node_id] = number
            return
        if isinstance(known, int):
            known = self._by_node[said.node_id] = {self._said[known - self.base_count].name: [known]}
        known.setdefault(said.name, []).append(number)

    def read(self, nodes: Sequence[Node], count: int, name: str | None = None) -> list[dict[str, Annotation]]:
        """What is said of nodes within the first ``count``, by name; ``name``: that one alone."""
        found: list[dict[str, Annotation]] = [{} for _ in nodes]
        wanted = list(zip(nodes, found, strict=True))
        log: AnnotationLog | None = self
        while log is not None:
            for node, values in wanted if log._by_node else ():
                names = log._by_node.get(node.id, {})
                if isinstance(names, int):
                    said = log._said[names - log.base_count]
                    if names < count and name in (None, said.name):
                        values.setdefault(said.name, said.value)
                    continue
                for each in list(names) if name is None else (name,):  # in one step: others add to it
                    numbers = names.get(each, ())
                    if each not in values and (last := bisect_left(numbers, count)):
                        values[each] = log._said[numbers[last - 1] - log.base_count].value
            if log.source is not None:
                for (_, values), stored in zip(wanted, log.source.read([node for node, _ in wanted], name), strict=True):
                    for each, value in stored.items():
                        values.setdefault(each, value)
            if log.tip is not None:
                wanted = [(node, values) for node, values in wanted if is_on_path(node, log.tip)]
            count = min(count, log.base_count)
            log = log.base
        return found

    def named(self, name: str, count: int) -> dict[bytes, Annotation]:
        """What is said by a name within the first ``count``, by the ids of nodes."""
        layers: list[dict[bytes, Annotation]] = []
        log: AnnotationLog | None = self
        while log is not None:
            layer = {} if log.source is None else log.source.named(name)
            layer |= {said.node_id: said.value for said in log._said[: max(0, count - log.base_count)] if said.name == name}
            layers.append(layer)
            count = min(count, log.base_count)
            if log.tip is not None and log.base is not None:
                path = log.tip.path()
                shared = zip(path, log.base.read(path, count, name), strict=True)
                layers.append({node.id: values[name] for node, values in shared if values})
                break
            log = log.base
        return {node_id: value for layer in reversed(layers) for node_id, value in layer.items()}

    def since(self, count: int, before: AnnotationLog | None, first: int) -> list[Said]:
        """What is said within the first ``count``, and was not within the first ``first`` of ``before``: the last of each name.

        Not what is stored.
        """
        layers: list[list[Said]] = []
        log: AnnotationLog | None = self
        while log is not None and count > first:
            layers.append(log._said[max(0, first - log.base_count if log is before else 0) : count - log.base_count])
            if log is before:
                break
            count = min(count, log.base_count)
            log = log.base
        last = {(said.node_id, said.name): said for layer in reversed(layers) for said in layer}
        return list(last.values())

    def node_ids(self, count: int) -> Iterator[bytes]:
        """Ids of the nodes of which something is said within the first ``count``, some more than once. Not of what is stored."""
        log: AnnotationLog | None = self
        while log is not None:
            yield from (said.node_id for said in log._said[: max(0, count - log.base_count)])
            count = min(count, log.base_count)
            log = log.base

    def held_bytes(self) -> int:
        """About how many bytes it takes, without what it lies over."""
        return getsizeof(self._by_node) + self._nbytes


Find = Callable[[bytes], Node]  # raises UnknownNode
Read = Callable[[Sequence[Node], str | None], Sequence[dict[str, Annotation]]]


def annotations_of(read: Read, find: Find, node: Node) -> dict[str, Annotation]:
    """All annotations of a node: its own, and of its tokens those of the node it is a prefix of."""
    return _with_inherited(read, find, node, read([node], None)[0], None)


def annotation_of_each(read: Read, find: Find, nodes: Sequence[Node], name: str) -> list[Annotation | None]:
    """The same of one name, of many nodes."""
    found = zip(nodes, read(nodes, name), strict=True)
    return [(_with_inherited(read, find, node, own, name) if node.links else own).get(name) for node, own in found]


def inherited(read: Read, find: Find, node: Node) -> dict[str, Annotation]:
    """What a node has of its tokens from the node it is a prefix of, and not of its own."""
    own = read([node], None)[0]
    return {name: value for name, value in _with_inherited(read, find, node, dict(own), None).items() if own.get(name) is not value}


def _with_inherited(read: Read, find: Find, node: Node, found: dict[str, Annotation], name: str | None) -> dict[str, Annotation]:
    """``found``, a node's own, and what is said of its tokens elsewhere: of each token what stands nearest counts."""
    at, length = node, node.stop - node.start
    seen = {node.id}
    while (whole := _whole_of(at, find)) is not None and whole.id not in seen:
        for each, value in read([whole], name)[0].items():
            own = found.get(each)
            if isinstance(value, OfTokens) and (own is None or type(own) is type(value)):
                clipped = value.clipped(0, length)
                if clipped is not None:
                    found[each] = clipped if own is None else own.over(clipped, each)
        at = whole
        seen.add(at.id)
    return found


def _whole_of(node: Node, find: Find) -> Node | None:
    """The node that this one is a prefix of, where that is still there."""
    for link in node.links:
        if link.kind == "prefix_of":
            try:
                return find(link.node_id)
            except UnknownNode:
                return None
    return None


def values_along(
    read: Read, find: Find, node: Node, name: str, kind: type[Any], start: int, stop: int
) -> Iterator[tuple[Node, Any]]:
    """The nodes of a path that say something by this name of its tokens ``[start, stop)``, and what. Raises Unsupported."""
    nodes = [each for each in node.path() if each.stop > start and each.start < stop]
    for each, own in zip(nodes, read(nodes, name) if nodes else (), strict=True):
        value = (_with_inherited(read, find, each, own, name) if each.links else own).get(name)
        if value is None:
            continue
        if not isinstance(value, kind):
            raise Unsupported(f"{name!r} of {each!r} is {kind_of(value)}, not {kind.__name__}")
        yield each, value


def token_window(read: Read, find: Find, node: Node, name: str, start: int, stop: int | None) -> TokenWindow:
    """The rows of :class:`TokenValues` for path tokens ``[start, stop)``. Raises OutOfRange, Unsupported."""
    start, stop = window(start, stop, node.stop, "start")
    found: TokenWindow | None = None
    for each, value in values_along(read, find, node, name, TokenValues, start, stop):
        if value.dtype is None:  # it says nothing of any token
            continue
        if found is None:
            found = TokenWindow.empty(stop - start, value.dtype, value.row_shape)
        elif (value.dtype, value.row_shape) != (found.values.dtype, found.values.shape[1:]):
            there = f"{found.values.dtype} {found.values.shape[1:]}"
            raise Unsupported(f"{name!r} of {each!r} has rows of {value.dtype} {value.row_shape}, further up {there}")
        begin, end = max(start, each.start), min(stop, each.stop)
        value.write(found, begin - each.start, end - each.start, begin - start)
    return TokenWindow.empty(stop - start, None, ()) if found is None else found


def path_spans(
    read: Read, find: Find, node: Node, name: str, start: int, stop: int | None
) -> tuple[tuple[int, int, int | str], ...]:
    """The :class:`Spans` of path tokens ``[start, stop)``, in path coordinates, clipped. Raises OutOfRange, Unsupported."""
    start, stop = window(start, stop, node.stop, "start")
    found = []
    for each, value in values_along(read, find, node, name, Spans, start, stop):
        clipped = value.clipped(max(0, start - each.start), stop - each.start)
        found += [(begin + each.start, end + each.start, which) for begin, end, which in clipped or ()]
    return tuple(found)
