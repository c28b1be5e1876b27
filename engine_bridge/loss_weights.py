"""Which tokens of some paths are trained on, and what each counts.

A token's weight is ``mask * factors * scale``. ``mask``: 1 for a sampled token, 0 for others, or what "loss_mask" says of it.
``factors``: annotations that are multiplied, "loss_weight" unless others are named. ``scale``: by the weighting, see
:data:`Weighting`. What is annotated ``train=False``, and all below it, is on no path that is trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol

import attrs
import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from engine_bridge.forest import Forest, Segment
from sessiontree import Node, OutOfRange, Session, SessionTree, UnknownNode, Unsupported
from sessiontree.annotations import LOSS_MASK, LOSS_WEIGHT, TRAIN, Annotation, Spans, TokenValues, rejects
from sessiontree.positions import Mode
from sessiontree.rollouts import Rollout

#: How a token counts that several paths share. "once": 1. "per_branch_mean": as in the mean over rows of each row's mean over its
#: trained tokens, so 1/R times the sum of 1/n over the rows that have it; R rows have a trained token, n is how many a row has.
#: Otherwise numbers by node, of a function or a mapping: one for the node, or (its tokens,).
Weighting = Literal["once", "per_branch_mean"] | Callable[[Node], ArrayLike] | Mapping[Node, ArrayLike]
Leaves = Session | SessionTree | Node | Iterable[Node | Rollout]

_NAMED: Final = ("once", "per_branch_mean")


class Annotated(Protocol):
    """A Session or a SessionTree."""

    def annotation_of_each(self, nodes: Sequence[Node], name: str, /) -> Sequence[Annotation | None]:
        """What is said of nodes by a name, of their tokens also by nodes that they are prefixes of; None where that is nothing."""

    def node(self, node_id: bytes, /) -> Node:
        """The node of an id. Raises UnknownNode."""


#: A Session or SessionTree, or a function that gives one for a node, where paths are of several.
Annotations = Annotated | Callable[[Node], Annotated]


class Said:
    """What annotations say of nodes, each asked for once."""

    def __init__(self, annotations: Annotations | None) -> None:
        if not (annotations is None or hasattr(annotations, "annotation_of_each") or callable(annotations)):
            kind = type(annotations).__name__
            raise TypeError(f"annotations are a Session, a SessionTree, or a function from a node to one, not {kind}")
        self._source: Any = annotations
        self._one = hasattr(annotations, "annotation_of_each")
        self._known: dict[tuple[bytes, str], Annotation | None] = {}

    def of(self, node: Node, name: str) -> Annotation | None:
        """Raises UnknownNode for a node that is of no tree that was given."""
        if self._source is None:
            return None
        key = node.id, name
        if key not in self._known:
            (self._known[key],) = (self._source if self._one else self._source(node)).annotation_of_each([node], name)
        return self._known[key]

    def ask(self, nodes: Sequence[Node], names: Iterable[str]) -> None:
        """Ask for some names of nodes at once, where one tree has all of them."""
        if self._source is not None and self._one:
            for name in names:
                asked = [node for node in nodes if (node.id, name) not in self._known]
                found = self._source.annotation_of_each(asked, name) if asked else ()
                self._known.update(zip([(node.id, name) for node in asked], found, strict=True))

    def find(self, beside: Node, node_id: bytes) -> Node | None:
        """Another node of the tree that ``beside`` is of; None where it is not there, or no tree was given."""
        if self._source is None:
            return None
        try:
            found: Node = (self._source if self._one else self._source(beside)).node(node_id)
        except UnknownNode:
            return None
        return found

    def rejected(self, node: Node) -> bool:
        """Whether the node itself is never to be trained on. Raises Unsupported where ``train`` is no bool."""
        return rejects(self.of(node, TRAIN), node.id)

    def mask(self, node: Node) -> bool | NDArray[np.bool_]:
        """Which of a node's tokens are trained on: all, none, or (its tokens,). Not the first of a path: nothing predicts it."""
        sampled = node.origin == "generated"
        if self.of(node, LOSS_MASK) is None and (node.start or not sampled):
            return sampled
        values, known = self.numbers(node, LOSS_MASK, 0, len(node))
        mask = np.where(known, values != 0, sampled)
        if not node.start:
            mask[:1] = False
        return mask

    def numbers(self, node: Node, name: str, start: int, stop: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """As :meth:`values`, one number a token. Raises Unsupported."""
        values, known = self.values(node, name, start, stop)
        if values.ndim != 1:
            raise Unsupported(f"{name!r} of {node!r} has rows of {values.shape[1:]}, no number for each token", node=node)
        return values, known

    def values(self, node: Node, name: str, start: int, stop: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """(values, known) of a node's tokens ``[start, stop)``, relative to it. A scalar is every token's. Raises Unsupported."""
        value = self.of(node, name)
        count = stop - start
        if value is None:
            return np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        if isinstance(value, TokenValues):
            return value.read(start, stop)
        known = np.ones(count, np.bool_)
        if isinstance(value, bool | int | float):
            return np.full(count, value), known
        if not isinstance(value, Spans) or any(isinstance(each, str) for _, _, each in value):
            raise Unsupported(f"{name!r} of {node!r} is a {type(value).__name__}, no number for each token", node=node)
        known[:] = False
        values = np.zeros(count, np.asarray([0, *(each for _, _, each in value)]).dtype)  # int64 holds not every one
        for begin, end, each in value:
            there = slice(max(begin - start, 0), max(end - start, 0))
            values[there], known[there] = each, True
        return values, known

    def of_each_token(self, segments: Sequence[Segment], name: str) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """(values, known) of the tokens of segments, one behind the other, zeros where nothing is said. Raises Unsupported."""
        self.ask([segment.node for segment in segments], (name,))
        parts, at = [], 0
        for node, first, last, _ in segments:
            values, known = self.values(node, name, first - node.start, last - node.start)
            if known.any():
                parts.append((node, slice(at, at + last - first), values, known))
            at += last - first
        shape = parts[0][2].shape[1:] if parts else ()
        dtype = np.result_type(*(values.dtype for _, _, values, _ in parts)) if parts else np.dtype(np.float32)
        values_of_all = np.zeros((at, *shape), dtype.str)  # one that torch knows: NumPy has two types of some sizes
        known_of_all = np.zeros(at, np.bool_)
        for node, there, values, known in parts:
            if values.shape[1:] != shape:
                raise Unsupported(f"{name!r} of {node!r} has rows of {values.shape[1:]}, those of others {shape}", node=node)
            values_of_all[there], known_of_all[there] = values, known
        return values_of_all, known_of_all


def leaves_of(leaves: Leaves, annotations: Annotations | None) -> tuple[list[Node], Annotations | None]:
    """The nodes that a caller means, each once, and where their annotations are. Raises TypeError, OutOfRange for none."""
    if isinstance(leaves, Session | SessionTree):
        found: Iterable[Node] = leaves.leaves()
        annotations = leaves if annotations is None else annotations
    elif isinstance(leaves, Node):
        if not isinstance(annotations, Session | SessionTree):
            raise TypeError(
                "a Node alone stands for all below it, as a Session or SessionTree given as annotations knows; [node] is its path"
            )
        nodes = [leaves, *annotations.descendants(leaves)]
        parents = {node.parent.id for node in nodes if node.parent is not None}
        found = [node for node in nodes if node.id not in parents]
    elif isinstance(leaves, Iterable):
        leaves = list(leaves)  # it may be an iterator, and is gone through twice
        found = [leaf.node if isinstance(leaf, Rollout) else leaf for leaf in leaves]
        if annotations is None and (rollouts := [leaf for leaf in leaves if isinstance(leaf, Rollout)]):
            annotations = _read_from(rollouts)
    else:
        raise TypeError(
            f"packs are made of a Session, a SessionTree, a Node, or some Nodes or Rollouts, not of a {type(leaves).__name__}; "
            "rollouts(store) and group.rollouts are some"
        )
    unique: dict[bytes, Node] = {}
    for node in found:
        if not isinstance(node, Node):
            raise TypeError(f"packs are made of Nodes and Rollouts, not {type(node).__name__}")
        unique.setdefault(node.id, node)
    if not unique:
        raise OutOfRange("a pack of no path", value=0, limit=1)
    return list(unique.values()), annotations


def _read_from(rollouts: Sequence[Rollout]) -> Callable[[Node], Annotated]:
    """The tree of the first rollout that has a node."""
    trees: dict[bytes, SessionTree] = {}
    for rollout in rollouts:
        node: Node | None = rollout.node
        while node is not None and node.id not in trees:
            trees[node.id] = rollout.tree
            node = node.parent
    return lambda node: trees.get(node.id, rollouts[0].tree)


def trained_rows(leaves: Sequence[Node], said: Said) -> list[Node]:
    """The paths that are trained on: those of leaves, cut where a node is rejected.

    A path that was cut stays only if something on it is trained on and it is not the beginning of another. It ends inside no item.
    """
    ends: dict[bytes, Node | None] = {}  # by node: the last node of its path that is not rejected, nor below one that is
    rows: dict[bytes, Node] = {}
    given: set[bytes] = set()
    for leaf in leaves:
        new, at = [], leaf
        while at.id not in ends:
            new.append(at)
            if at.parent is None:
                break
            at = at.parent
        for node in reversed(new):
            parent = node.parent
            above = None if parent is None else ends[parent.id]
            whole = parent is None or (above is not None and above.id == parent.id)
            ends[node.id] = node if whole and not said.rejected(node) else above
        end = ends[leaf.id]
        if end is not None and end.id == leaf.id:
            given.add(leaf.id)
        else:
            while end is not None and end.state.open_block is not None:
                end = end.parent
        if end is not None:
            rows.setdefault(end.id, end)
    inner: set[bytes] = set()
    for row in rows.values():
        parent = row.parent
        while parent is not None and parent.id not in inner:
            inner.add(parent.id)
            parent = parent.parent
    return [
        row
        for row in rows.values()
        if row.id in given or (row.id not in inner and any(np.any(said.mask(node)) for node in row.path() if len(node)))
    ]


@attrs.frozen(eq=False)
class LossWeights:
    """Weights of a forest's tokens as targets.

    ``trained``: (tokens,) bool, the mask. ``packed``: (tokens,) float64, each token's weight in the packed sequence.
    """

    forest: Forest
    trained: NDArray[np.bool_]
    packed: NDArray[np.float64]
    _base: NDArray[np.float64]
    _row_shares: NDArray[np.float64] | None  # what each row's tokens count in it; None: they count in the first row that has them
    _owners: NDArray[np.int64]  # (tokens,): the first row that has it

    @classmethod
    def of(cls, forest: Forest, said: Said, weighting: Weighting, factors: Sequence[str]) -> LossWeights:
        """Raises Unsupported where a weighting or factor says nothing of a trained token, OutOfRange for a number that is none."""
        trained = _trained(forest, said)
        base = trained.astype(np.float64)
        for name in factors:
            _multiply(base, trained, forest, said, name)
        shares = None
        if isinstance(weighting, str):
            if weighting not in _NAMED:
                raise Unsupported(f"no weighting {weighting!r}; {' or '.join(_NAMED)}, or numbers by node")
            packed = base
            if weighting == "per_branch_mean":
                shares = _row_shares(forest, trained)
                packed = base * forest.each_token(_sums_over_rows(forest, shares))
        elif callable(weighting) or isinstance(weighting, Mapping):
            packed = base = base * _custom(forest, trained, weighting)
        else:
            raise TypeError(f"a weighting is a name, a function or a mapping of nodes, not {type(weighting).__name__}")
        if not np.isfinite(base).all():
            at = int(np.isfinite(base).argmin())
            node = forest.segments[int(np.searchsorted(forest.stops, at, "right"))].node
            raise OutOfRange(f"a token of {node!r} has the weight {base[at]}", value=float(base[at]), limit=None)
        return cls(forest, trained, packed, base, shares, forest.each_token(_owners(forest)))

    def in_row(self, row: int, where: slice) -> NDArray[np.float64]:
        """What a stretch of tokens on one row's path counts in that row. Those of all rows add up to the packed weights."""
        if self._row_shares is None:
            return np.where(self._owners[where] == row, self._base[where], 0)
        return self._base[where] * float(self._row_shares[row])


def _trained(forest: Forest, said: Said) -> NDArray[np.bool_]:
    masks = [said.mask(segment.node) for segment in forest.segments]
    trained = forest.each_token([mask is True for mask in masks]).astype(np.bool_)
    for at, stop, (node, start, end, _), mask in zip(
        forest.starts.tolist(), forest.stops.tolist(), forest.segments, masks, strict=True
    ):
        if not isinstance(mask, bool):
            trained[at:stop] = mask[start - node.start : end - node.start]
    return trained


def _multiply(base: NDArray[np.float64], trained: NDArray[np.bool_], forest: Forest, said: Said, name: str) -> None:
    optional = name == LOSS_WEIGHT or name.startswith(f"{LOSS_WEIGHT}/")
    for at, stop, (node, start, end, _) in zip(forest.starts.tolist(), forest.stops.tolist(), forest.segments, strict=True):
        chosen = trained[at:stop]
        if not chosen.any() or (optional and said.of(node, name) is None):
            continue
        values, known = said.numbers(node, name, start - node.start, end - node.start)
        if not optional and not known[chosen].all():
            raise Unsupported(f"{node!r} has tokens to train on and no {name!r} for all of them", node=node)
        base[at:stop] *= np.where(known & chosen, values, 1)


def _row_shares(forest: Forest, trained: NDArray[np.bool_]) -> NDArray[np.float64]:
    """What a trained token of each row counts in the mean over rows of their means: (rows,), 0 for rows without any."""
    before = np.concatenate([[0], trained.cumsum()])
    counts = (before[forest.stops] - before[forest.starts]).tolist()
    for number, segment in enumerate(forest.segments):  # of the path so far
        if segment.before >= 0:
            counts[number] += counts[segment.before]
    rows = np.array([counts[end] if end >= 0 else 0 for end in forest.row_ends], np.float64)
    return np.divide(1, rows * np.count_nonzero(rows), out=np.zeros_like(rows), where=rows > 0)


def _sums_over_rows(forest: Forest, shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each segment the sum over the rows that have it."""
    sums = [0.0] * len(forest.segments)
    for end, share in zip(forest.row_ends, shares.tolist(), strict=True):
        if end >= 0:
            sums[end] += share
    for number in range(len(sums) - 1, -1, -1):
        before = forest.segments[number].before
        if before >= 0:
            sums[before] += sums[number]
    return np.array(sums)


def _custom(forest: Forest, trained: NDArray[np.bool_], weighting: Any) -> NDArray[np.float64]:
    scale = np.ones(forest.num_tokens)
    for at, stop, (node, start, end, _) in zip(forest.starts.tolist(), forest.stops.tolist(), forest.segments, strict=True):
        if not trained[at:stop].any():
            continue
        given = weighting.get(node) if isinstance(weighting, Mapping) else weighting(node)
        if given is None:
            raise Unsupported(f"the weighting says nothing of {node!r}, which has tokens to train on", node=node)
        values = np.asarray(given, np.float64)
        if values.shape not in ((), (len(node),)):
            raise OutOfRange(
                f"weights of shape {values.shape} for {node!r}; () or ({len(node)},)", value=values.shape, limit=len(node)
            )
        mine = values if values.ndim == 0 else values[start - node.start : end - node.start]
        scale[at:stop] = np.where(trained[at:stop], mine, 1)
    return scale


def _owners(forest: Forest) -> list[int]:
    owners = [-1] * len(forest.segments)
    for row, end in enumerate(forest.row_ends):
        at = end
        while at >= 0 and owners[at] < 0:
            owners[at] = row
            at = forest.segments[at].before
    return owners


def planned(
    leaves: Leaves,
    mode: Mode,
    annotations: Annotations | None,
    weighting: Weighting,
    factors: Iterable[str],
    dtype: torch.dtype,
) -> tuple[Said, LossWeights]:
    """What packs and rows are made from. ``dtype``: what their weights are to be. Raises as its parts, TypeError."""
    if not dtype.is_floating_point:
        raise TypeError(f"weights are floats, not {dtype}")
    names = tuple(factors)
    if isinstance(factors, str) or not all(isinstance(name, str) for name in names):
        raise TypeError("factors are a sequence of names of annotations")
    nodes, annotations = leaves_of(leaves, annotations)
    said = Said(annotations)
    if annotations is not None:
        paths = {node.id: node for leaf in nodes for node in leaf.path()}
        said.ask(list(paths.values()), (TRAIN, LOSS_MASK, *names))
    forest = Forest.of(trained_rows(nodes, said), mode, said.find)
    return said, LossWeights.of(forest, said, weighting, names)
