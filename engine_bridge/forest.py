"""Paths laid out as one sequence that has each of their tokens once: depth first, so that what follows a token stands together.

Nodes say which tokens paths share: equal nodes are the same tokens, and a node that was cut short of another (``prefix_of``) is its
first tokens. Nothing is compared but those. A :class:`Segment` is a stretch of one node's tokens that all or none of the paths
take; segments are few, tokens many, and only NumPy walks the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import numpy as np
from numpy.typing import NDArray

from sessiontree import Node, Unsupported
from sessiontree.node import positions_in, refuse_inside_item
from sessiontree.positions import Mode, PositionScheme
from sessiontree.positions.runs import Piece, write

#: Another node of the tree that a node is of, by its id; None where it is not known.
Find = Callable[[Node, bytes], Node | None]


class Segment(NamedTuple):
    """Path tokens ``[start, stop)`` of a node, at least one. ``before``: number of the segment before it on its path, or -1."""

    node: Node
    start: int
    stop: int
    before: int


@attrs.frozen(eq=False)
class Forest:
    """Paths in depth-first order.

    ``rows``: the last node of each path. ``segments``: in order. ``row_ends``: for each row, the number of the segment it ends
    with, -1 where it has no token. ``starts``, ``stops``: (segments,) int64, the sequence's tokens of each, half-open.
    ``subtree_ends``: (segments,) int64, where the tokens that follow it on any path end.
    """

    rows: tuple[Node, ...]
    segments: tuple[Segment, ...]
    row_ends: tuple[int, ...]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    subtree_ends: NDArray[np.int64]

    @classmethod
    def of(cls, rows: Sequence[Node], mode: Mode, find: Find) -> Forest:
        """The paths of some nodes; ``find`` gives nodes that are on none of them.

        Raises MediaSpanError for one that ends inside an item, Unsupported for two models' paths.
        """
        for row in rows:
            if row.scheme != rows[0].scheme:
                raise Unsupported(
                    f"{rows[0]!r} and {row!r} are of two schemes or their parameters; a pack is for one model", node=row
                )
            refuse_inside_item(row, row, "a model takes an item whole")
        segments, ends = _laid_out(rows, mode, find)
        lengths = np.array([stop - start for _, start, stop, _ in segments], np.int64)
        stops = lengths.cumsum()
        subtree_ends = stops.tolist()
        for number in range(len(segments) - 1, 0, -1):
            before = segments[number].before
            if before >= 0 and subtree_ends[before] < subtree_ends[number]:
                subtree_ends[before] = subtree_ends[number]
        row_ends = tuple(ends[row.id] for row in rows)
        return cls(tuple(rows), tuple(segments), row_ends, stops - lengths, stops, np.array(subtree_ends, np.int64))

    @property
    def num_tokens(self) -> int:
        return int(self.stops[-1]) if self.segments else 0

    def chain(self, number: int) -> list[int]:
        """The segments of the path that ends with segment ``number``, in path order; none for -1."""
        chain = []
        while number >= 0:
            chain.append(number)
            number = self.segments[number].before
        chain.reverse()
        return chain

    def path_ranges(self) -> list[list[slice]]:
        """For each row, where the sequence has its path, in path order; what is contiguous is one."""
        starts, stops = self.starts.tolist(), self.stops.tolist()
        firsts: list[int] = []  # of each segment's contiguous stretch
        for number, segment in enumerate(self.segments):
            goes_on = segment.before >= 0 and stops[segment.before] == starts[number]
            firsts.append(firsts[segment.before] if goes_on else number)
        found = []
        for end in self.row_ends:
            at, ranges = end, []
            while at >= 0:
                ranges.append(slice(starts[firsts[at]], stops[at]))
                at = self.segments[firsts[at]].before
            found.append(ranges[::-1])
        return found

    def each_token(self, values: Any) -> NDArray[Any]:
        """One value a segment as one a token."""
        return np.repeat(np.asarray(values), self.stops - self.starts)

    def input_ids(self) -> NDArray[np.int64]:
        """(tokens,) int64."""
        ids = np.empty(self.num_tokens, np.int64)
        if self.segments:
            np.concatenate([node.input_ids(start, stop, copy=False) for node, start, stop, _ in self.segments], out=ids)
        return ids

    def positions(self, mode: Mode) -> NDArray[Any]:
        """(num_axes, tokens) int64, float32 where the scheme's engine takes floats. Raises PositionError for the mode."""
        pieces = [
            Piece(at, positions_in(node, mode).runs, start - node.start, stop - node.start)
            for at, (node, start, stop, _) in zip(self.starts.tolist(), self.segments, strict=True)
        ]
        scheme: PositionScheme = self.rows[0].scheme
        table = np.empty((scheme.num_axes, self.num_tokens), scheme.dtype)
        write(pieces, table)
        return table.astype(model_dtype(scheme), copy=False)


def model_dtype(scheme: PositionScheme) -> type[np.int64 | np.float32]:
    """Of positions, as models take them."""
    return np.int64 if scheme.dtype.kind == "i" else np.float32


def _laid_out(rows: Iterable[Node], mode: Mode, find: Find) -> tuple[list[Segment], dict[bytes, int]]:
    """The segments of some paths, and by node the segment that it ends with."""
    roots, children = _union(rows)
    segments: list[Segment] = []
    ends: dict[bytes, int] = {}
    # What is still to come: a group of nodes with the first tokens alike, from a path index and behind a segment.
    stack = [(group, 0, -1) for group in reversed(_groups(roots, mode, find))]
    while stack:
        group, start, before = stack.pop()
        stop = group[-1].stop
        if start < stop:
            segments.append(Segment(group[0], start, stop, before))
            before = len(segments) - 1
        below: list[Node] = []
        while group and group[-1].stop == stop:
            node = group.pop()
            ends[node.id] = before
            below += children[node.id]
        stack += [(branch, stop, before) for branch in reversed(_groups(below, mode, find))]
        if group:
            stack.append((group, stop, before))
    return segments, ends


def _union(rows: Iterable[Node]) -> tuple[list[Node], Mapping[bytes, list[Node]]]:
    """The roots of some paths, and the children of each node on them, by its id: as they are met first."""
    roots: list[Node] = []
    children: dict[bytes, list[Node]] = {}
    for row in rows:
        node, known = row, row.id in children
        while not known:
            children.setdefault(node.id, [])
            parent = node.parent
            if parent is None:
                roots.append(node)
                break
            known = parent.id in children
            children.setdefault(parent.id, []).append(node)
            node = parent
    return roots, children


def _groups(nodes: list[Node], mode: Mode, find: Find) -> list[list[Node]]:
    """Nodes behind the same token, those together of which one is the first tokens of the other: the longest first."""
    if not any(node.links for node in nodes):
        return [[node] for node in nodes]
    here = {node.id: node for node in nodes}
    groups: dict[bytes, list[Node]] = {}
    for node in nodes:
        groups.setdefault(_whole_id(node, here, find), []).append(node)
    found = []
    for group in groups.values():
        longest = max(group, key=len)
        alike = [node for node in group if _begins(longest, node, mode)]
        found.append(sorted(alike, key=len, reverse=True))
        found += [[node] for node in group if node not in alike]
    return found


def _whole_id(node: Node, here: Mapping[bytes, Node], find: Find) -> bytes:
    """Of the node that it was cut of, or that was cut of, as far as nodes are found."""
    while link := next((link for link in node.links if link.kind == "prefix_of"), None):
        whole = here.get(link.node_id) or find(node, link.node_id)
        if whole is None:
            return link.node_id
        node = whole
    return node.id


def _begins(longest: Node, node: Node, mode: Mode) -> bool:
    """Whether a node's tokens are the first of another's to the model too: a turn cut short can stand elsewhere, replayed."""
    if node is longest:
        return True
    window = node.start, node.stop
    positions = longest.positions(*window, mode), node.positions(*window, mode)
    return np.array_equal(*positions) and np.array_equal(longest.input_ids(*window), node.input_ids(*window))
