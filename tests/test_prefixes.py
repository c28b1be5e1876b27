"""How far a history is known: `longest_prefix` against plain loops over all nodes, whatever the tree, whoever comes in between."""

from __future__ import annotations

import gc
import os
import pickle
import random
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from threading import Event, Thread
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from sessiontree import (
    MediaItem,
    MediaSpanError,
    Node,
    OutOfRange,
    PrefixMatch,
    Session,
    SessionStore,
    SessionTree,
    SessionTreeError,
)
from sessiontree import node as node_module
from sessiontree import prefixes as prefixes_module
from sessiontree import spans as spans_module
from sessiontree.index import NodeIndex
from sessiontree.prefixes import PrefixIndex
from sessiontree.tokens import Extent, token_bytes
from tests.test_robustness import coming_in, forked, interrupted
from tests.test_store import in_threads
from tests.toy import IMG, new_session, toy_scheme

SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"
Content = tuple[Any, ...]
Target = Session | SessionTree


# --- the model: plain loops over nodes --------------------------------------------------------------------------------
class Cell(NamedTuple):
    """What stands at one path index: a token, and which placeholder of which content it is, if it is one."""

    token: int
    content: Content | None = None
    number: int = 0


def content_of(item: MediaItem) -> Content:
    """All that an item is, wherever it stands."""
    extra = tuple(sorted(item.extra.items()))
    return (
        item.modality,
        item.identity,
        item.grid_thw,
        item.second_per_grid_ts,
        item.audio_feature_length,
        item.target_sizes,
        extra,
    )


def item_of(content: Content, spans: Sequence[tuple[int, int]], before: int = 0, unfinished: bool = False) -> MediaItem:
    modality, identity, grid, seconds, audio, sizes, extra = content
    return MediaItem(modality, identity, spans, grid, seconds, audio, sizes, before, unfinished, dict(extra))


class Expected(NamedTuple):
    """What `longest_prefix` has to answer; and the earliest node that holds a token behind what is known, which `record` names."""

    node: Node
    length: int
    within: Node | None
    beyond: Node | None = None


class Naive:
    """Answers from `input_ids` and `media_spans` of nodes, token by token. Remembers the cells of a node, and nothing else."""

    def __init__(self) -> None:
        self._own: dict[bytes, list[Cell]] = {}

    def own(self, node: Node) -> list[Cell]:
        """The cells of a node's own tokens."""
        cells = self._own.get(node.id)
        if cells is None:
            cells = [Cell(token) for token in node.input_ids(node.start, node.stop).tolist()]
            counted: dict[int, int] = {}
            for item, start, stop in node.media_spans(node.start, node.stop):
                for index in range(start, stop):
                    number = counted.get(id(item), item.placeholders_before)
                    counted[id(item)] = number + 1
                    at = index - node.start
                    cells[at] = Cell(cells[at].token, content_of(item), number)
            self._own[node.id] = cells
        return cells

    def path(self, node: Node) -> list[Cell]:
        return [cell for on_path in node.path() for cell in self.own(on_path)]

    def alike(self, nodes: Sequence[Node], history: Sequence[Cell]) -> list[int]:
        """For each node how many cells its path and the history have alike. Parents come before their children."""
        known: dict[bytes, int] = {}
        for node in nodes:
            at = 0
            if node.parent is not None:
                at = known[node.parent.id]
                if at == node.parent.stop:
                    for one, two in zip(self.own(node), history[at:], strict=False):
                        if one != two:
                            break
                        at += 1
            known[node.id] = at
        return [known[node.id] for node in nodes]

    def answer(self, nodes: Sequence[Node], alike: Sequence[int], count: int) -> Expected:
        """The answer of a tree that holds the first ``count`` nodes."""
        best, length = nodes[0], max(alike[:count])
        for node, known in zip(nodes[:count], alike, strict=False):
            if known == node.stop and node.stop > best.stop:
                best = node
        reaching = zip(nodes[:count], alike, strict=False)
        beyond = next((node for node, known in reaching if known >= length < node.stop), None)
        if length == best.stop:
            return Expected(best, length, None, beyond)
        within = next(node for node, known in zip(nodes, alike, strict=True) if known >= length)
        assert within.start <= best.stop < length < within.stop
        return Expected(best, length, within, beyond)

    def expected(self, tree: Iterable[Node], history: Sequence[Cell]) -> Expected:
        nodes = list(tree)
        return self.answer(nodes, self.alike(nodes, history), len(nodes))


def as_given(history: Sequence[Cell], style: int = 0) -> tuple[list[int], list[MediaItem]]:
    """A history as arguments. ``style``: each run of placeholders whole, one by one, in halves, or items with all their spans."""
    pieces: list[tuple[Content, int, int, int]] = []  # content, first placeholder, start, length
    for at, cell in enumerate(history):
        if cell.content is None:
            continue
        if pieces and style != 1:
            content, first, start, length = pieces[-1]
            runs_on = start + length == at and content == cell.content and first + length == cell.number
            if runs_on and not (style == 2 and length == 2):
                pieces[-1] = (content, first, start, length + 1)
                continue
        pieces.append((cell.content, cell.number, at, 1))
    items: list[MediaItem] = []
    ends: list[int] = []
    for content, first, start, length in pieces:
        if style == 3 and items and content == content_of(items[-1]) and first == ends[-1]:
            items[-1] = items[-1].with_spans([*items[-1].spans, (start, length)])
            ends[-1] += length
        else:
            items.append(item_of(content, [(start, length)], first, unfinished=style == 2))
            ends.append(first + length)
    return [cell.token for cell in history], items[::-1] if style == 1 else items


def tree_of(target: Target) -> SessionTree:
    return target.tree if isinstance(target, Session) else target


def ask(naive: Naive, target: Target, history: Sequence[Cell], style: int = 0) -> PrefixMatch:
    """The answer, which is the model's, node for node."""
    expected = naive.expected(tree_of(target), history)
    ids, items = as_given(history, style)
    match = target.longest_prefix(ids, items)
    assert isinstance(match, PrefixMatch)
    assert same(match, expected), f"{match} is not {expected} for {history}"
    assert match.offset == expected.length - expected.node.stop
    beyond = tree_of(target)._find_prefix(token_bytes(ids), tuple(items))[1]
    assert beyond == expected.beyond, f"{beyond} is not {expected.beyond} for {history}"
    return match


def found(match: PrefixMatch) -> tuple[Node, int, Node | None]:
    return match.node, match.length, match.within


def same(match: PrefixMatch, expected: Expected) -> bool:
    """The same nodes of the same tree, and the same length."""
    within, other = match.within, expected.within
    return (
        match.node.id == expected.node.id
        and match.length == expected.length
        and (within is other if within is None or other is None else within.id == other.id)
    )


def ask_all(naive: Naive, targets: Iterable[Target], histories: Sequence[Sequence[Cell]]) -> None:
    for target in targets:
        for number, history in enumerate(histories):
            ask(naive, target, history, number % 4)


# --- content ----------------------------------------------------------------------------------------------------------
def picture(number: int = 0, grid: tuple[int, int, int] = (1, 4, 4), modality: str = "image", **extra: int) -> Content:
    seconds = 1.0 if modality == "video" else None
    return (modality, bytes([number]) * 32, grid, seconds, None, (), tuple(sorted(extra.items())))


PICTURES = (
    picture(),  # 4 placeholders
    picture(1),
    picture(0, (1, 4, 2)),  # 2; the same picture, resized
    picture(0, (1, 2, 4)),
    picture(0, (2, 4, 2), "video"),
    picture(0, (1, 4, 4), channels=3),
)


def placeholders(content: Content) -> int:
    frames, height, width = content[2]
    return int(frames * height * width) // 4


def shown(content: Content, token: int = IMG, first: int = 0, stop: int | None = None) -> list[Cell]:
    return [Cell(token, content, number) for number in range(first, placeholders(content) if stop is None else stop)]


def text(*tokens: int) -> list[Cell]:
    return [Cell(token) for token in tokens]


def turn_of(cells: Sequence[Cell]) -> tuple[list[int], list[MediaItem]]:
    """Cells as a turn for `append`: each run of placeholders is an item, unfinished where the last one is missing."""
    ids, items = as_given(cells)
    return ids, [
        item.with_spans(item.spans, unfinished=item.placeholders_before + item.num_placeholders < placeholders(content_of(item)))
        for item in items
    ]


def put(target: Target, parent: Node, cells: Sequence[Cell], **options: Any) -> tuple[Target, Node]:
    """Append; the target that holds the node, a session itself or another value."""
    ids, items = turn_of(cells)
    if isinstance(target, Session):
        return target, target.append(parent, ids, media=items, **options)
    return target.append(parent, ids, media=items, **options)


def add(session: Session, parent: Node, cells: Sequence[Cell], **options: Any) -> Node:
    return put(session, parent, cells, **options)[1]


def generate(session: Session, parent: Node, *tokens: int, key: str | None = None) -> Node:
    draft = session.draft(parent, key=key)
    draft.extend(tokens)
    return draft.commit()


@contextmanager
def small_blocks(block: int, patience: int) -> Iterator[None]:
    """Searches that leave the lines early, so that small trees try all the ways there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes_module, "BLOCK", block, raising=False)
        patch.setattr(prefixes_module, "_PATIENCE", patience, raising=False)
        yield


@contextmanager
def layers_that_stay() -> Iterator[None]:
    """No layer is carried over into another: as many stay as there are values that were appended to an older one."""
    layer = NodeIndex.layer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NodeIndex, "layer", lambda self, count, carry: layer(self, count, False))
        yield


def layered(tree: SessionTree, parent: Node, unseen: Sequence[Cell], own: Sequence[Cell]) -> tuple[SessionTree, Node]:
    """``own`` under a node of ``tree`` in a layer over it; what lies below goes on by ``unseen`` after that version."""
    put(tree, parent, unseen, role="unseen")
    value, node = put(tree, parent, own, role="own")
    return tree_of(value), node


# --- examples ---------------------------------------------------------------------------------------------------------
def test_an_empty_history_and_an_empty_tree() -> None:
    naive, session = Naive(), new_session()
    assert found(session.longest_prefix([])) == (session.root, 0, None)
    assert found(session.longest_prefix([1, 2])) == (session.root, 0, None)
    node = add(session, session.root, text(1, 2))
    assert found(session.longest_prefix([])) == (session.root, 0, None)
    assert found(session.longest_prefix([1])) == (session.root, 1, node)
    assert found(session.longest_prefix(np.array([1, 2, 3]))) == (node, 2, None)
    assert found(session.longest_prefix((2, 1))) == (session.root, 0, None)
    ask_all(naive, [session, session.tree], [text(*ids) for ids in ((), (1,), (1, 2), (1, 2, 3), (2,))])


def test_the_earliest_of_those_that_end_at_the_same_place() -> None:
    session = new_session()
    first = add(session, session.root, text(1, 2, 3), role="system")
    half = add(session, session.root, text(1, 2))
    second = add(session, half, text(3))
    other = add(session, session.root, text(1, 2, 3), role="user")
    replies = [generate(session, node, 4, 5) for node in (other, second, first)]
    empty = add(session, first, [])
    beyond = add(session, empty, text(9, 9))
    assert found(session.longest_prefix([1, 2, 3])) == (first, 3, None)
    assert found(session.longest_prefix([1, 2, 3, 4, 5, 6])) == (replies[0], 5, None)
    assert found(session.longest_prefix([1, 2, 3, 4, 6])) == (first, 4, replies[0])
    assert found(session.longest_prefix([1, 2, 3, 9, 6])) == (first, 4, beyond)
    assert found(session.longest_prefix([1, 2, 9])) == (half, 2, None)
    naive = Naive()
    ask_all(naive, [session], [naive.path(node) for node in session.tree])


def test_an_older_value_sees_only_its_nodes() -> None:
    naive, session = Naive(), new_session()
    kept = [session.tree]
    paths: tuple[list[int], ...] = ([1, 2, 3, 4, 5, 6], [1, 2, 3], [1, 2, 3, 4], [1, 9, 9], [1], [1, 2, 3, 4, 5, 6, 7], [])
    for ids in paths[:-1]:
        add(session, session.root, text(*ids))
        kept.append(session.tree)
    for tree in (*kept, *kept[::-1]):
        for ids in paths:
            for length in range(len(ids) + 1):
                ask(naive, tree, text(*ids[:length]))
                ask(naive, tree, text(*ids[:length], 5))


def test_layers_over_older_values() -> None:
    naive, session = Naive(), new_session()
    prompt = add(session, session.root, text(1, 2))
    old = session.tree
    generate(session, prompt, 3, 4)
    one, deep = old.append(prompt, [3, 5])
    two, _ = old.append(prompt, [3, 4, 9])
    above, _ = one.append(deep, [6])
    beside, _ = one.append(deep, [7])
    histories = [text(1, 2, 3, *tail) for tail in ((), (4,), (4, 9), (5,), (5, 6), (5, 7), (5, 6, 7), (8,))]
    for _ in range(2):
        ask_all(naive, [old, session, one, two, above, beside, session.tree], histories)
        add(session, prompt, text(3, 5, 7, 7))


def test_forked_sessions_see_their_path() -> None:
    naive, store = Naive(), SessionStore.in_memory()
    session = store.create("a", scheme=toy_scheme())
    prompt = add(session, session.root, [*text(1), *shown(PICTURES[0]), *text(2)])
    replies = [generate(session, prompt, 3, number) for number in (4, 5)]
    fork = store.fork(session, replies[1], "b")
    histories = [naive.path(node) for node in session.tree]
    histories += [[*naive.path(replies[1]), *text(number)] for number in (6, 7)]
    ask_all(naive, [session, fork], histories)
    add(session, replies[1], text(6))
    add(fork, replies[1], text(7))
    further = store.fork(fork, fork.leaves()[0], "c")
    ask_all(naive, [session, fork, further], histories)
    calls = session.append(prompt, [8], metadata={"tool_calls": ["x", "y"]})
    results = [session.append(calls, [9, number], metadata={"tool_call_id": name}) for number, name in enumerate("xy")]
    with_siblings = store.fork(session, results[1], "d")
    assert len(with_siblings.tree) == 5
    histories += [naive.path(node) for node in session.tree]
    ask_all(naive, [session, with_siblings], histories)


@pytest.mark.parametrize(("block", "patience"), [(512, 32), (512, 0), (2, 0)])
def test_a_layer_sees_no_more_of_what_lies_below(block: int, patience: int) -> None:
    """Below, lines grow, are left, and end nodes at the same places and by the same tokens as above, before and after."""
    with small_blocks(block, patience):
        ask_layers_and_what_lies_below()


def ask_layers_and_what_lies_below() -> None:
    histories = [
        text(*ids) for ids in ((1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4, 5), (1, 2, 3, 4, 5, 6), (1, 2, 9), (7,))
    ]
    histories += [[*history, Cell(8)] for history in histories]
    for early in (True, False):
        for number in range(2**5):  # which of the turns below come to what lies below
            naive, session = Naive(), new_session()
            node = add(session, session.root, text(1, 2, 3))
            old = session.tree
            value, above = old.append(node, [4, 5])
            upper, _ = value.append(above, [6])
            turns = ((node, (4,)), (node, (4, 5, 6)), (session.root, (1, 2)), (session.root, (7,)), (session.root, (1, 2, 9)))
            if early:
                ask_all(naive, [upper, session], histories)
            for bit, (parent, ids) in enumerate(turns):
                if number >> bit & 1:
                    add(session, parent, text(*ids))
            layers = [value, upper, *(upper.append(value.root, ids)[0] for ids in ([1, 2], [1, 2, 3, 4], [7, 8]))]
            ask_all(naive, [*layers, old, session] if early else [session, old, *layers], histories)


@pytest.mark.parametrize("block", [1, 2])
def test_branches_of_a_layer_that_go_on_alike_from_different_places(block: int) -> None:
    """Searched for by blocks, each is found from where it leaves what lies below."""
    with small_blocks(block, 0):
        naive, session = Naive(), new_session()
        one, two = (add(session, session.root, text(*ids)) for ids in ([1, 1], [2, 2]))
        three = add(session, one, text(1, 1))
        layer = session.tree
        for parent, ids in ((one, [5, 5, 6, 6]), (two, [5, 5, 7, 7]), (three, [5, 5, 8, 8])):
            layer = layer.append(parent, ids)[0]
        fork = session.tree.forked(three)
        for parent, ids in ((one, [5, 5, 6, 6]), (three, [5, 5, 7, 7]), (session.root, [5, 5, 8, 8])):
            fork = fork.append(parent, ids)[0]
        begins, ends = ((), (1, 1), (2, 2), (1, 1, 1, 1)), ((6, 6), (7, 7), (8, 8))
        ask_all(naive, [layer, fork], [text(*begin, 5, 5, *end) for begin in begins for end in ends])


@pytest.mark.parametrize("block", [512, 1, 3])
def test_layers_over_layers_and_forks(block: int) -> None:
    """Many layers, each of which leaves one of those below it somewhere; then the same over a fork of the last."""
    with small_blocks(block, 0), layers_that_stay():
        naive, session = Naive(), new_session()
        cells = [*text(1, 2), *shown(PICTURES[0]), *text(3, 4, 5)]
        tip = add(session, session.root, cells)
        tree = session.tree
        asked: list[Target] = [session]
        chance = random.Random(block)
        for _ in range(3):
            values = []
            for number in range(20):
                node = chance.choice(list(tree)[-6:])
                ends = [[*shown(PICTURES[number % 6]), *text(number)], text(3, 4), text(number), text(4, number % 3)]
                tree, tip = layered(tree, node, chance.choice(ends), chance.choice(ends))
                values.append(tree)
            assert tree._index.layers > 15
            asked += [values[4], values[-1]]
            tree = tree.forked(tip)
            asked.append(tree)
        histories = [naive.path(node) for target in asked for node in list(tree_of(target))[-9:]]
        histories += [[*history[:-1], Cell(8)] for history in histories]
        ask_all(naive, asked[::-1], histories)


def test_a_fork_of_a_session_that_is_gone() -> None:
    """Its nodes are all that is left of it: a path of many extents, pictures and turns that end at the same place."""
    naive, store = Naive(), SessionStore.in_memory()
    session = store.create("a", scheme=toy_scheme())
    at = session.root
    for number in range(40):
        cells = [*text(number % 3), *shown(PICTURES[number % 6]), *text(4, number % 2, 5)]
        node = add(session, at, cells)
        at = add(session, session.truncate(node, node.stop - 1) if number % 3 else node, [] if number % 4 else text(6))
    fork, value = store.fork(session, at, "b"), session.tree.forked(at)
    further = store.fork(fork, at.ancestor(50), "c")
    gone = weakref.ref(session._tree._index)
    session.close()
    del session
    gc.collect()
    assert gone() is None
    targets: list[Target] = [fork, value, further, value.append(at, [7, 7])[0], value.append(at.ancestor(9), [3])[0]]
    add(fork, at.ancestor(20), text(9))
    add(further, at.ancestor(20), [*text(1), *shown(PICTURES[1])])
    path = naive.path(at)
    histories = [path[:length] for length in range(0, len(path), 3)]
    histories += [[*path[: number * 5], Cell(number % 3)] for number in range(20)]
    histories += [naive.path(node) for target in targets for node in list(tree_of(target))[-3:]]
    ask_all(naive, targets, histories)
    fork.close()
    ask_all(naive, targets, histories[::5])


def test_sessions_of_other_namespaces_know_nothing_of_each_other() -> None:
    naive, store = Naive(), SessionStore.in_memory()
    one = store.create("a", scheme=toy_scheme(), namespace="x")
    two = store.create("b", scheme=toy_scheme(), namespace="y")
    node = add(one, one.root, text(1, 2, 3))
    assert found(two.longest_prefix([1, 2, 3])) == (two.root, 0, None)
    other = add(two, two.root, text(1, 2))
    assert (node.id, other.id) == (one.longest_prefix([1, 2, 3]).node.id, two.longest_prefix([1, 2, 3]).node.id)
    ask_all(naive, [one, two], [text(1, 2, 3), text(1, 2), text(1)])


def test_equal_ids_of_other_media() -> None:
    """The same text under another picture is another history; what stands before the picture is shared."""
    naive, session = Naive(), new_session()
    for content in PICTURES:
        node = add(session, session.root, [*text(1, 2), *shown(content), *text(3)])
        assert session.longest_prefix(node.input_ids(), node.media).node == node
    add(session, session.root, text(1, 2, *[IMG] * 6))
    histories = [naive.path(node) for node in session.tree]
    for content in PICTURES:
        histories += [
            [*text(1, 2), *shown(content, token), *text(4)] for token in (IMG, 7)
        ]  # the same media under other ids are others
        histories += [[*text(1, 2), *shown(content, stop=1)], [*text(1), *shown(content)], [*text(1, 2), *shown(content, first=1)]]
    for style in range(4):
        for history in histories:
            ask(naive, session, history, style)
    assert session.longest_prefix([1, 2, *[IMG] * 4]).length == 6  # text that only looks like it: the last of all
    match = session.longest_prefix([1, 2, IMG, IMG, IMG, 9], [item_of(PICTURES[0], [(2, 4)])])
    assert (match.length, match.node, match.within) == (5, session.root, session.tree.children(session.root)[0])


@pytest.mark.parametrize("known", PICTURES)
def test_a_picture_nobody_has_seen_where_another_stands(known: Content) -> None:
    """However little the two differ by, the known part ends before them, and its earliest node is named."""
    naive, session = Naive(), new_session()
    first = add(session, session.root, text(1, 2, 3))
    add(session, session.root, [*text(1, 2), *shown(known), *text(4)])
    others = [content for content in PICTURES if content != known]
    others += [picture(0, (1, 4, 4), channels=4), picture(0, (4, 4, 1)), (*known[:3], 0.5, *known[4:]), (*known[:4], 7, *known[5:])]
    for content in others:
        ids, media = as_given([*text(1, 2), *shown(content, stop=1), *text(4)])
        assert found(session.longest_prefix(ids, media)) == (session.root, 2, first)
    for number in (1, 2, 3):
        ids, media = as_given([*text(1, 2), Cell(IMG, known, number)])
        assert found(session.longest_prefix(ids, media)) == (session.root, 2, first)
    assert found(session.longest_prefix([1, 2, IMG, IMG])) == (session.root, 2, first)
    ask_all(naive, [session], [[*text(1, 2), *shown(content)] for content in (known, *others)])


def test_parts_and_wholes_are_the_same() -> None:
    naive, content = Naive(), PICTURES[0]
    whole = [*text(1), *shown(content), *text(2)]
    cut = new_session()
    at = cut.root
    for cells in (whole[:2], [], whole[2:4], whole[4:]):
        at = add(cut, at, cells)
    tip = at
    uncut = new_session()
    add(uncut, uncut.root, whole)
    halves = add(uncut, uncut.root, whole[:3])
    add(uncut, halves, [*whole[3:], *text(9)])
    for session in (cut, uncut):
        for style in range(4):
            for length in range(len(whole) + 1):
                ask(naive, session, whole[:length], style)
                ask(naive, session, [*whole[:length], Cell(IMG, PICTURES[1], 2)], style)
                ask(naive, session, [*whole[:length], Cell(IMG, content, 3)], style)
    assert found(cut.longest_prefix(*as_given(whole))) == (tip, 6, None)


def test_items_of_several_spans() -> None:
    """As they come with an external table: placeholders are counted over all spans, and text stands between them."""
    naive, session, content = Naive(), new_session(), PICTURES[0]
    ids = [1, IMG, IMG, 5, IMG, IMG, 6]
    table = np.tile(np.arange(7), (3, 1))
    apart = session.append(session.root, ids, media=[item_of(content, [(1, 2), (4, 2)])], positions=table)
    session.append(session.root, ids, media=[item_of(content, [(1, 1), (2, 1), (4, 2)])], positions=table)
    two = [item_of(content, [(1, 2)]), item_of(content, [(4, 2)])]  # twice the same, each from its first placeholder on
    twice = session.append(session.root, ids, media=two, positions=table)
    once = session.append(session.root, ids, media=two[:1], positions=table + 1)
    assert session.longest_prefix(ids, [item_of(content, [(1, 2), (4, 2)])]).node == apart
    assert session.longest_prefix(ids, two).node == twice
    assert session.longest_prefix(ids, two[:1]).node == once
    histories = [naive.path(node) for node in session.tree]
    for style in range(4):
        for history in histories:
            for length in range(len(history) + 1):
                ask(naive, session, history[:length], style)


def test_where_the_positions_came_from_does_not_matter() -> None:
    session = new_session()
    table = session.append(session.root, [1, 2, 3], positions=np.tile([[7, 8, 9]], (3, 1)))
    plain = add(session, session.root, text(1, 2, 3))
    decoded = generate(session, table, 4)
    filled = add(session, plain, text(4))
    assert len({node.id for node in (table, plain, decoded, filled)}) == 4
    assert found(session.longest_prefix([1, 2, 3])) == (table, 3, None)
    assert found(session.longest_prefix([1, 2, 3, 4, 5])) == (decoded, 4, None)


def test_cut_rewritten_and_joined_nodes() -> None:
    naive, session = Naive(), new_session()
    prompt = add(session, session.root, [*text(1, 2), *shown(PICTURES[0]), *text(3, 4, 5)])
    reply = generate(session, prompt, 6, 7, 8)
    after = add(session, reply, [*text(1), *shown(PICTURES[1])])
    versions: list[Target] = [session.tree]
    cut = [session.truncate(after, length) for length in (1, 7, 8, 10, 13)]
    versions.append(session.tree)
    session.rewrite(after, [(7, 8, [9])])
    session.rewrite(after, [(9, 12, [])])
    session.rewrite(after, [(2, 6, [])])
    session.drop_last(reply, 1)
    versions.append(session.tree)
    for node in cut[:3]:
        add(session, node, text(4, 5))
        add(session, node, text(4, 6))
    session.linearize(session.children(cut[1]))
    histories = [naive.path(node) for node in session.tree]
    histories += [[*history[:-1], Cell(77)] for history in histories if history]
    ask_all(naive, [session, *versions], histories)


def test_one_turn_for_each_token() -> None:
    """The same tokens in a deep path and in one turn, in either order."""
    for deep_first in (False, True):
        naive, session = Naive(), new_session()
        tokens = [number % 3 for number in range(60)]
        if not deep_first:
            whole = add(session, session.root, text(*tokens))
        at = session.root
        chain = [at := add(session, at, text(token)) for token in tokens]
        if deep_first:
            whole = add(session, session.root, text(*tokens))
        match = session.longest_prefix([*tokens, 9])
        assert found(match) == ((chain[-1] if deep_first else whole), 60, None)
        for length in range(61):
            ask(naive, session, text(*tokens[:length]))
            ask(naive, session, text(*tokens[:length], 7))


def test_a_loaded_tree_answers_the_same() -> None:
    """C83."""
    naive, targets, histories = scenario()
    for target in targets:
        tree = tree_of(target)
        loaded = pickle.loads(pickle.dumps(tree))
        assert [node.id for node in loaded] == [node.id for node in tree]
        for history in histories:
            one, two = tree.longest_prefix(*as_given(history)), ask(naive, loaded, history)
            assert (one.node, one.length, one.within) == (two.node, two.length, two.within)


def test_histories_that_cannot_be() -> None:
    session = new_session()
    add(session, session.root, [*text(1), *shown(PICTURES[0])])
    content = PICTURES[0]
    refused: list[tuple[Any, Any, type[Exception]]] = [
        ([-1], (), OutOfRange),
        ([2**31], (), OutOfRange),
        ([1.5], (), TypeError),
        ("12", (), TypeError),
        (None, (), TypeError),
        ([[1, 2]], (), TypeError),
        ([1], ["x"], TypeError),
        ([1], 5, TypeError),
        ([1], [item_of(content, [(0, 4)])], MediaSpanError),
        ([1] * 8, [item_of(content, [(0, 4)]), item_of(content, [(3, 4)])], MediaSpanError),
        ([1] * 8, [item_of(content, [])], MediaSpanError),
    ]
    for ids, media, error in refused:
        for target in (session, session.tree):
            with pytest.raises(error):
                target.longest_prefix(ids, media)
    assert len(session.tree) == 2
    given = iter([item_of(content, [(1, 4)])])
    assert session.longest_prefix([1, *[IMG] * 4], given).length == 5


def test_what_comes_out_is_the_trees_own() -> None:
    session = new_session()
    node = add(session, session.root, text(1, 2, 3))
    for target in (session, session.tree):
        assert target.longest_prefix([1, 2, 3]).node is node
        assert target.longest_prefix([1, 2]).within is node
        assert target.longest_prefix([9]).node is session.root
    session.close()
    assert session.longest_prefix([1, 2, 3]).node is node


# --- any tree against the model ---------------------------------------------------------------------------------------
TOKENS = (1, 2, IMG)
pieces = st.one_of(
    st.sampled_from(TOKENS),
    st.tuples(st.sampled_from(PICTURES), st.sampled_from((IMG, IMG, 2))),
)
turns = st.lists(pieces, max_size=4)
numbers = st.integers(0, 10**6)


def cells_of(turn: Iterable[int | tuple[Content, int]]) -> list[Cell]:
    return [cell for piece in turn for cell in (text(piece) if isinstance(piece, int) else shown(*piece))]


class Histories(RuleBasedStateMachine):
    """Trees of every kind, older values of them, and queries in between. Small alphabets, so that most prefixes collide."""

    def __init__(self) -> None:
        super().__init__()
        self.naive = Naive()
        self.store = SessionStore.in_memory()
        self.targets: list[Target] = []
        self.forks = 0

    @initialize(both=st.booleans())
    def begin(self, both: bool) -> None:
        for name in "ab"[: 1 + both]:
            self.targets.append(self.store.create(name, scheme=toy_scheme("hf5"), namespace=name))

    def pick(self, number: int) -> tuple[int, Target, list[Node]]:
        at = number % len(self.targets)
        return at, self.targets[at], list(tree_of(self.targets[at]))

    def done(self, at: int, result: Node | tuple[SessionTree, Node]) -> None:
        """A session has changed; of a value there is another one now, and the first stays in every fourth case."""
        if isinstance(result, tuple):
            if len(self.targets) < 8 and len(result[0]) % 4 == 0:
                self.targets.append(result[0])
            else:
                self.targets[at] = result[0]

    def hold(self, number: int, target: Target) -> None:
        """One more to ask; where there are many, in the place of another that is no session of the beginning."""
        if len(self.targets) < 8:
            self.targets.append(target)
        else:
            self.targets[2 + number % 6] = target

    @rule(tree=numbers, number=numbers, turn=turns, role=st.integers(0, 4), cut=st.integers(0, 7), rest=st.integers(0, 2))
    def append(self, tree: int, number: int, turn: list[Any], role: int, cut: int, rest: int) -> None:
        at, chosen, nodes = self.pick(tree)
        parent = nodes[-1 - number % min(len(nodes), 5)] if role else nodes[number % len(nodes)]
        cells = cells_of(turn)
        if cut and cells and cells[-1].content is not None:
            cells = cells[: -cut % placeholders(cells[-1].content) or None]
        open_block = parent.position_state().open_block
        if open_block is not None and cells:
            content = next(content_of(item) for item, *_ in parent.media_spans()[::-1])
            missing = shown(content, first=open_block.placeholders)
            cells = missing[:-1] if rest == 1 and len(missing) > 1 else [*missing, *cells]
        with suppress(SessionTreeError):
            result = put(chosen, parent, cells, role="system" if role == 1 else "user", key="k" if role == 2 else None)
            self.done(at, result[1] if isinstance(chosen, Session) else result)  # type: ignore[arg-type]

    @rule(tree=numbers, number=numbers, tokens=st.lists(st.sampled_from(TOKENS), max_size=4), key=st.sampled_from((None, "k", "l")))
    def sample(self, tree: int, number: int, tokens: list[int], key: str | None) -> None:
        _, chosen, nodes = self.pick(tree)
        if isinstance(chosen, Session):
            with suppress(SessionTreeError):
                generate(chosen, nodes[number % len(nodes)], *tokens, key=key)

    @rule(tree=numbers, number=numbers, length=numbers)
    def truncate(self, tree: int, number: int, length: int) -> None:
        at, chosen, nodes = self.pick(tree)
        node = nodes[number % len(nodes)]
        with suppress(SessionTreeError):
            self.done(at, chosen.truncate(node, length % (node.stop + 1)))

    @rule(tree=numbers, number=numbers, start=numbers, length=st.integers(0, 3), turn=st.lists(pieces, max_size=2))
    def rewrite(self, tree: int, number: int, start: int, length: int, turn: list[Any]) -> None:
        at, chosen, nodes = self.pick(tree)
        node = nodes[number % len(nodes)]
        first = start % (node.stop + 1)
        with suppress(SessionTreeError):
            self.done(at, chosen.rewrite(node, [(first, min(first + length, node.stop), *turn_of(cells_of(turn)))]))

    @rule(tree=numbers, number=numbers)
    def linearize(self, tree: int, number: int) -> None:
        at, chosen, nodes = self.pick(tree)
        children = chosen.children(nodes[number % len(nodes)])
        with suppress(SessionTreeError):
            self.done(at, chosen.linearize(children[:3]))

    @rule(
        tree=numbers,
        number=numbers,
        shift=st.integers(0, 1),
        spans=st.sampled_from(([], [(0, 2)], [(0, 1), (1, 1)], [(0, 2), (3, 2)])),
    )
    def table(self, tree: int, number: int, shift: int, spans: list[tuple[int, int]]) -> None:
        at, chosen, nodes = self.pick(tree)
        positions = np.tile(np.arange(5) + shift, (3, 1))
        items = [item_of(PICTURES[0], spans)] if spans else []
        with suppress(SessionTreeError):
            self.done(at, chosen.append(nodes[number % len(nodes)], [IMG, IMG, 1, IMG, 2], media=items, positions=positions))

    @precondition(lambda self: len(self.targets) < 8)
    @rule(tree=numbers)
    def keep(self, tree: int) -> None:
        self.targets.append(tree_of(self.targets[tree % len(self.targets)]))

    @rule(
        tree=numbers, number=numbers, steps=st.lists(st.tuples(numbers, turns, turns), min_size=1, max_size=4), asks=st.booleans()
    )
    def layers(self, tree: int, number: int, steps: list[tuple[int, list[Any], list[Any]]], asks: bool) -> None:
        """A chain of layers, each over a version that what lies below it has left behind."""
        value = tree_of(self.pick(tree)[1])
        for where, unseen, own in steps:
            nodes = list(value)
            parent = nodes[-1 - where % min(len(nodes), 5)]
            with suppress(SessionTreeError):
                value = layered(value, parent, cells_of(unseen), cells_of(own))[0]
            if asks:
                ask(self.naive, value, self.naive.path(nodes[number % len(nodes)]), number % 4)
        self.hold(number, value)

    @rule(tree=numbers, number=numbers, ends=st.lists(numbers, min_size=1, max_size=3), turn=turns)
    def fork(self, tree: int, number: int, ends: list[int], turn: list[Any]) -> None:
        """A fork, of a fork, of a fork; something is appended to each but the last before that is forked."""
        chosen = self.pick(tree)[1]
        for end in ends:
            nodes = list(tree_of(chosen))
            node = nodes[-1 - end % min(len(nodes), 8)]
            if isinstance(chosen, Session) and end % 2:
                self.forks += 1
                chosen = self.store.fork(chosen, node, f"fork {self.forks}")
            else:
                chosen = tree_of(chosen).forked(node)
            if end is not ends[-1]:
                with suppress(SessionTreeError):
                    chosen, _ = put(chosen, node, cells_of(turn))
        self.hold(number, chosen)

    @precondition(lambda self: len(self.targets) > 2)
    @rule(number=numbers)
    def drop(self, number: int) -> None:
        """A target is closed and gone; what was forked from it stays."""
        target = self.targets.pop(2 + number % (len(self.targets) - 2))
        if isinstance(target, Session):
            target.close()

    @rule(
        tree=numbers,
        source=numbers,
        number=numbers,
        edits=st.lists(st.tuples(st.integers(0, 5), numbers, numbers), max_size=2),
        style=st.integers(0, 3),
    )
    def ask(self, tree: int, source: int, number: int, edits: list[tuple[int, int, int]], style: int) -> None:
        nodes = self.pick(source)[2]
        history = self.naive.path(nodes[number % len(nodes)])
        for kind, where, what in edits:
            at = where % (len(history) + 1)
            if kind == 0:
                del history[at:]
            elif kind == 1:
                history[at : at + 1] = text(TOKENS[what % 3])
            elif kind == 2:
                history[at:] = shown(PICTURES[what % len(PICTURES)])
            elif kind == 3 and at < len(history):
                history[at] = history[at]._replace(token=TOKENS[what % 3])
            elif kind == 4 and at < len(history):
                history[at] = history[at]._replace(content=PICTURES[what % len(PICTURES)], number=what % 4)
            elif kind == 5:
                history[at:] = self.naive.path(nodes[what % len(nodes)])[at:]
        ask(self.naive, self.targets[tree % len(self.targets)], history, style)

    def teardown(self) -> None:
        paths = {tuple(self.naive.path(node)) for target in self.targets for node in tree_of(target)}
        for target in self.targets:
            for number, path in enumerate(sorted(paths, key=repr)):
                ask(self.naive, target, path, number % 4)
                ask(self.naive, target, [*path[: number % (len(path) + 1)], Cell(1)], number % 4)


def run_histories(block: int, patience: int, stay: bool, options: settings) -> None:
    with small_blocks(block, patience), layers_that_stay() if stay else nullcontext():
        run_state_machine_as_test(Histories, settings=options)


@pytest.mark.parametrize("stay", [False, True], ids=["", "layers stay"])
@pytest.mark.parametrize(("block", "patience"), [(512, 32), (1, 0), (2, 0), (3, 1)])
def test_any_tree_answers_as_the_model_does(block: int, patience: int, stay: bool) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    options = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=checks)
    run_histories(block, patience, stay, options)


@pytest.mark.soak
@pytest.mark.parametrize("stay", [False, True], ids=["", "layers stay"])
@pytest.mark.parametrize(("block", "patience"), [(512, 32), (1, 0), (2, 0), (3, 1)])
def test_any_tree_answers_as_the_model_does_for_long(block: int, patience: int, stay: bool) -> None:
    options = settings(max_examples=1_500, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck))
    run_histories(block, patience, stay, options)


@pytest.mark.parametrize("seed", range(3))
def test_paths_that_forked_often(seed: int) -> None:
    """Hundreds of forks on the way, over several thousand tokens with pictures on them, at the real size of a block."""
    chance = random.Random(seed)
    naive, session = Naive(), new_session()
    kept: list[Target] = []
    tip = session.root
    tips = [tip]
    for number in range(150):
        cells: list[Cell] = []
        for _ in range(chance.randrange(1, 4)):
            cells += text(*[chance.choice((1, 2))] * chance.randrange(30))
            cells += shown(chance.choice(PICTURES)) if chance.random() < 0.5 else text(number)
        node = add(session, tip, cells)
        cut = node.stop - chance.randrange(len(cells)) if chance.random() < 0.8 else node.stop
        with suppress(SessionTreeError):
            node = session.truncate(node, cut)
        tip = node if chance.random() < 0.9 else chance.choice(tips[-20:])
        tips.append(tip)
        if number % 30 == 0:
            kept.append(session.tree)
    assert tip.stop > 1_500
    if seed:  # from nothing; else version by version
        kept.reverse()
    for target in (*kept, session):
        for _ in range(12):
            path = naive.path(chance.choice([tip, *tips]))
            at = chance.randrange(len(path) + 1)
            changed = [*path[:at], *([Cell(3)] if chance.random() < 0.5 else shown(PICTURES[at % 6])), *path[at + 1 :]]
            ask(naive, target, path, at % 4)
            ask(naive, target, changed, at % 4)


@pytest.mark.parametrize("seed", range(8))
def test_many_nodes_in_each_of_many_layers_and_forks(seed: int) -> None:
    """Values grow, leave others behind that grow on, and are forked; each takes in some nodes at a time."""
    chance, naive = random.Random(seed), Naive()
    targets: list[Target] = [new_session()]
    deepest = 0
    with small_blocks(*((512, 32), (512, 0), (1, 0), (3, 1))[seed % 4]), layers_that_stay() if seed % 3 else nullcontext():
        for number in range(300):
            at = -1 if chance.random() < 0.7 else chance.randrange(len(targets))
            left = tree_of(targets[at])
            targets[at] = grow_at_random(targets[at], chance, number)
            deepest = max(deepest, tree_of(targets[at])._index.layers)
            if number % 10 == 9:
                targets.append(left if chance.random() < 0.7 else left.forked(chance.choice(list(left)[-8:])))
                del targets[1:-7]
            if number % 5 == 0:
                path = naive.path(chance.choice(list(tree_of(chance.choice(targets)))))
                ask(naive, chance.choice(targets), [*path, *text(chance.choice((1, 2)))], number % 4)
        assert deepest > 1
        paths = sorted({tuple(naive.path(node)) for target in targets for node in tree_of(target)}, key=repr)
        for target in targets:
            for path in map(list, chance.sample(paths, 25)):
                ask(naive, target, path, len(path) % 4)
                ask(naive, target, [*path[: chance.randrange(len(path) + 1)], *text(1, 2)], len(path) % 4)


# --- interrupts -------------------------------------------------------------------------------------------------------
def scenario() -> tuple[Naive, list[Target], list[list[Cell]]]:
    """A bit of everything: a session and its older values, layers, a fork; and histories to ask them for."""
    naive, store = Naive(), SessionStore.in_memory()
    session = store.create("a", scheme=toy_scheme())
    content = PICTURES[0]
    targets: list[Target] = [session]
    prompt = add(session, session.root, [*text(1, 2), *shown(content, stop=2)])
    rest = add(session, prompt, [*shown(content, first=2), *text(3)])  # in place, an item that runs on
    reply = generate(session, rest, 4, 5)
    targets.append(session.tree)
    other = add(session, session.root, [*text(1, 2), *shown(PICTURES[1]), *text(3)])
    add(session, session.root, [*text(1, 2), *shown(content), *text(3, 4, 6)], role="system")
    add(session, session.truncate(reply, 8), text(9))
    add(session, add(session, reply, []), text(1))
    layer, above = session.tree.append(other, [7, 7])
    upper, top = layered(layer, above, text(8, 9), text(8))
    targets += [layer, upper]
    fork = store.fork(session, reply, "b")
    add(fork, reply, text(2, 2))
    targets += [fork, layered(fork.tree, reply, text(2), text(2, 3))[0], upper.forked(top), session.tree]
    add(session, other, text(7, 8))
    paths = {tuple(naive.path(node)) for target in targets for node in tree_of(target)}
    histories = [list(path) for path in sorted(paths, key=repr)]
    histories += [[*history[:-1], Cell(50)] for history in histories if history]
    return naive, targets, histories


def forget(targets: Iterable[Target]) -> None:
    """As if nobody had asked before."""
    for target in targets:
        index: NodeIndex | None = tree_of(target)._index
        while index is not None:
            index._prefixes = None
            index = index.base


def codes_of(*owners: Any) -> list[CodeType]:
    """Everything that runs in a class or module."""
    return [value.__code__ for owner in owners for value in vars(owner).values() if isinstance(value, FunctionType)]


INTERRUPTED: dict[str, list[CodeType]] = {
    "NodeIndex.prefixes": [
        method.__code__
        for method in (NodeIndex.prefixes, NodeIndex._own_prefixes, NodeIndex._new_prefixes, NodeIndex._add_prefixes)
    ],
    "PrefixIndex": codes_of(PrefixIndex),
    "lines": codes_of(prefixes_module._Line, prefixes_module._Path),
    "what it calls": codes_of(prefixes_module, spans_module),
}


@pytest.mark.parametrize("what", sorted(INTERRUPTED))
def test_an_interrupt_at_any_line_leaves_all_answers_right(what: str) -> None:
    with small_blocks(2, 0):
        naive, targets, histories = scenario()
        given = [as_given(history, number % 4) for number, history in enumerate(histories)]
        expected = [[naive.expected(tree_of(target), history) for history in histories] for target in targets]
        lines, longest = 0, given[max(range(len(given)), key=lambda number: len(given[number][0]))]
        while True:
            forget(targets)
            with interrupted(lines, INTERRUPTED[what]) as hit:
                for target in targets[::-1]:
                    target.longest_prefix(*longest)
            if not hit:
                break
            for target, answers in zip(targets, expected, strict=True):
                for arguments, answer in list(zip(given, answers, strict=True))[lines % 3 :: 3]:
                    assert same(target.longest_prefix(*arguments), answer), f"line {lines}"
            lines += 1
    assert lines > 20


@pytest.mark.parametrize("what", sorted(INTERRUPTED))
def test_a_session_goes_on_after_an_interrupt(what: str) -> None:
    """What is added after the interrupt is found too, and what stood before still is."""
    lines = 0
    while True:
        naive, session = Naive(), new_session()
        prompt = add(session, session.root, [*text(1), *shown(PICTURES[0], stop=1)])
        session.longest_prefix([1])
        rest = add(session, prompt, [*shown(PICTURES[0], first=1, stop=3)])
        add(session, session.root, text(1, 2, 3))
        with interrupted(lines, INTERRUPTED[what]) as hit:
            session.longest_prefix([1, 2, 3])
        if not hit:
            break
        old = session.tree
        last = add(session, rest, [*shown(PICTURES[0], first=3), *text(4)])
        generate(session, last, 5)
        add(session, rest, [*shown(PICTURES[0], first=3), *text(6)])
        add(session, session.root, text(1, 2, 4))
        histories = [naive.path(node) for node in session.tree]
        ask_all(naive, [old, session], [*histories, *([*history, Cell(9)] for history in histories)])
        lines += 1
    assert lines


# --- coming in between ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("writes", [False, True], ids=["reads", "writes"])
def test_a_query_in_the_middle_of_another_is_exact(writes: bool) -> None:
    """As a signal handler's or finalizer's; with or without new nodes that it brings in."""
    places = 0
    while True:
        naive, store = Naive(), SessionStore.in_memory()
        session = store.create("a", scheme=toy_scheme())
        prompt = add(session, session.root, [*text(1, 2), *shown(PICTURES[0]), *text(3, 4)])
        session.longest_prefix([1])
        old = session.tree
        reply = generate(session, prompt, 5, 6)
        session.truncate(reply, 7)
        add(session, session.root, [*text(1, 2), *shown(PICTURES[1])])
        histories = [naive.path(node) for node in session.tree]
        histories += [[*histories[2][:7], Cell(9)]]
        before = session.tree

        def action(naive: Naive = naive, session: Session = session, old: SessionTree = old, asked: Any = histories) -> None:
            if writes:
                add(session, session.root, text(1))
                session.truncate(list(session.tree)[1], 2)
            ask_all(naive, [session, old], asked)

        given = [as_given(history) for history in (histories[2], histories[-1], histories[1], histories[-2])]
        answers: list[tuple[Target, PrefixMatch]] = []
        with coming_in(places, action) as ran:
            for target in (session, old):
                answers += [(target, target.longest_prefix(*arguments)) for arguments in given]
        if not ran:
            break
        for (target, answer), history in zip(answers, [histories[2], histories[-1], histories[1], histories[-2]] * 2, strict=True):
            versions = (before, session.tree) if target is session else (old,)
            assert any(same(answer, naive.expected(tree, history)) for tree in versions), f"place {places}: {answer}"
        ask_all(naive, [session, old, before], histories)
        places += 1
    assert places > 20


@pytest.mark.parametrize("step", range(3))
def test_a_question_to_layers_and_forks_in_the_middle_of_another(step: int) -> None:
    """Where what lies below is just being taken in, whoever comes in between does that for itself alone, and answers as exactly."""
    places = step
    while True:
        naive, targets, histories = scenario()
        asked = histories[:: len(histories) // 4]
        given = as_given(histories[-1])
        with coming_in(places, partial(ask_all, naive, targets, asked)) as ran:
            for target in targets[::-1]:
                target.longest_prefix(*given)
        if not ran:
            break
        ask_all(naive, targets, histories[places % 5 :: 5])
        for target in targets:
            index = tree_of(target)._index
            assert index._prefixes is not None
            base = None if index.base is None else index.base._prefixes
            assert (index._prefixes._below[-1][0] if index._prefixes._below else None) is base  # nobody else's stays in use
        places += 17
    assert places > 100


def test_a_query_while_children_are_linked() -> None:
    places = 0
    while True:
        naive, session = Naive(), new_session()
        prompt = add(session, session.root, text(1, 2))
        for number in range(4):
            add(session, prompt, text(3, number))
        histories = [[*naive.path(node), Cell(9)] for node in session.tree]
        with coming_in(places, partial(ask_all, naive, [session], histories)) as ran:
            children = session.children(prompt)
        if not ran:
            break
        assert children == tuple(session.tree)[2:]
        ask_all(naive, [session], histories)
        places += 1
    assert places > 3


def test_a_fork_in_the_middle_of_linking() -> None:
    """The child asks in the handler that forked, goes on with what the fork came in between, and asks again."""
    places = 0
    while True:
        naive, session = Naive(), new_session()
        for ids in ([1, 2, 3, 4], [1, 2], [3, 4], [3, 5, 6], [3]):
            add(session, session.root, text(*ids))
        versions = [session.tree]
        add(session, session.root, text(3, 4, 5, 6))
        histories = [[*naive.path(node), Cell(9)] for node in session.tree]
        status = forked(partial(asked_around_a_fork, places, session, partial(ask_all, naive, [session, *versions], histories)))
        if status == 77:
            break
        assert status == 0, f"place {places}"
        places += 3 if SOAK else 8
    assert places > 30


def asked_around_a_fork(place: int, session: Session, check: Callable[[], object]) -> None:
    with coming_in(place, partial(go_on_as_a_child, check)) as came:
        session.longest_prefix([3, 4])
    check()
    add(session, session.root, text(3, 5, 6, 7))
    check()
    if not came:
        os._exit(77)


def go_on_as_a_child(work: Callable[[], object]) -> None:
    """Fork; the child does ``work`` and goes on, the parent waits and ends as the child does."""
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    work()


# --- threads and processes --------------------------------------------------------------------------------------------
def grow_at_random(target: Target, chance: random.Random, number: int) -> Target:
    """One more node somewhere, mostly near the root, often one that ends inside another; what holds it."""
    nodes = list(tree_of(target))
    parent = chance.choice(nodes[:12]) if chance.random() < 0.7 else nodes[-1]
    kind = chance.random()
    with suppress(SessionTreeError):
        if kind < 0.4:
            made = target.truncate(chance.choice(nodes), chance.randrange(chance.choice(nodes).stop + 1))
            return made[0] if isinstance(made, tuple) else target
        if kind < 0.7:
            cells = [*text(*chance.choices((1, 2), k=chance.randrange(1, 5))), *shown(chance.choice(PICTURES[:2]))]
            return put(target, parent, cells[: chance.randrange(1, len(cells))])[0]
        return put(target, parent, text(*chance.choices((1, 2), k=chance.randrange(1, 12))), key=str(number))[0]
    return target


def test_readers_beside_writers() -> None:
    """Each answer is that of some version between those before and after the query."""
    session, naive = new_session(), Naive()
    add(session, session.root, text(*[1, 2] * 6))
    answers: list[tuple[int, list[Cell], PrefixMatch, int]] = []
    reading = [0, 1]

    def work(number: int) -> None:
        chance, mine = random.Random(number), Naive()
        if number > 1:
            for turn in range(600):
                if reading:
                    grow_at_random(session, chance, number * 1_000 + turn)
                    time.sleep(0)
            return
        try:
            for _ in range(120):
                node = chance.choice(list(session.tree)[-40:])
                history = [*mine.path(node)[: chance.randrange(node.stop + 1)], *text(*chance.choices((1, 2), k=2))]
                given = as_given(history, chance.randrange(4))
                before = len(session.tree)
                match = session.longest_prefix(*given)
                answers.append((before, history, match, len(session.tree)))
                time.sleep(0)
        finally:
            reading.pop()

    in_threads(4, work)
    assert len(answers) == 240
    nodes = list(session.tree)
    for before, history, match, after in answers:
        alike = naive.alike(nodes, history)
        assert any(same(match, naive.answer(nodes, alike, count)) for count in range(before, after + 1)), (before, match, after)
    ask_all(naive, [session], [naive.path(node) for node in nodes[::7]])


def test_readers_of_values_beside_a_linking_thread() -> None:
    """An older value's answer is the same before, while and after others are taken in."""
    session, naive = new_session(), Naive()
    long = add(session, session.root, text(*range(1, 200)))
    for length in range(0, 180, 20):
        session.truncate(long, length + 1)
    old = session.tree
    given = [list(range(1, stop)) for stop in (50, 120, 181, 190, 250)]
    expected = [naive.expected(old, text(*ids)) for ids in given]
    errors: list[BaseException] = []
    stop = Event()

    def read() -> None:
        try:
            while not stop.is_set():
                for ids, answer in zip(given, expected, strict=True):
                    assert same(old.longest_prefix(ids), answer)
        except BaseException as error:
            errors.append(error)

    threads = [Thread(target=read) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for length in range(199, 0, -1):
            session.truncate(long, length)
            session.longest_prefix([1])
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert not errors


def test_readers_of_layers_and_forks_beside_a_writer() -> None:
    """Each makes its own of versions that are just being taken in; threads ask what others have made too."""
    session, made = new_session(), list[Target]()
    long = add(session, session.root, [*text(*[1, 2] * 20), *shown(PICTURES[0]), *text(3)])
    errors: list[tuple[Target, list[Cell]]] = []
    reading = [0] * 3

    def work(number: int) -> None:
        chance, naive = random.Random(number), Naive()
        if not number:
            for turn in range(500):
                if reading:
                    grow_at_random(session, chance, turn)
                    time.sleep(0)
            return
        try:
            for turn in range(40):
                value = tree_of(chance.choice([session, *made[-4:]]))
                node = chance.choice([*list(value)[-9:], long if long in value else value.root])
                if chance.random() < 0.4:
                    value = value.forked(node)
                with suppress(SessionTreeError):
                    value = value.append(node, [1, 2, number, turn][: chance.randrange(1, 5)])[0]
                made.append(value)
                history = [*naive.path(chance.choice(list(value)[-9:])), *text(chance.choice((1, 2)))]
                for target in (value, made[chance.randrange(len(made))]):
                    if not same(target.longest_prefix(*as_given(history)), naive.expected(tree_of(target), history)):
                        errors.append((target, history))
        finally:
            reading.pop()

    in_threads(4, work)
    assert not errors
    naive = Naive()
    ask_all(naive, made[::9], [naive.path(node) for node in list(session.tree)[::25]])


def test_a_forked_child_of_a_process_that_links() -> None:
    naive, session, stop = Naive(), new_session(), Event()
    chance = random.Random(5)
    for number in range(30):
        grow_at_random(session, chance, number)
    errors: list[BaseException] = []

    def link() -> None:
        try:
            number = 100
            while not stop.is_set() and number < 3_000:
                number += 1
                parent = list(session.tree)[number % 40 % len(session.tree)]
                with suppress(MediaSpanError):  # where that one ends inside a picture
                    session.append(parent, [number % 2 + 1] * (number % 5 + 1), key=str(number))
                session.longest_prefix([1, 2, 1])
        except BaseException as error:
            errors.append(error)

    def child() -> None:
        nodes = list(session.tree)
        ask_all(naive, [session], [[*naive.path(node), Cell(1)] for node in nodes[:: max(1, len(nodes) // 40)]])
        grow_at_random(session, chance, 9_999)
        ask_all(naive, [session], [naive.path(node) for node in list(session.tree)[-3:]])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = Thread(target=link, daemon=True)
    thread.start()
    try:
        exits = [forked(child) for _ in range(15)]
    finally:
        stop.set()
        thread.join(10)
        sys.setswitchinterval(interval)
    assert not errors
    assert exits == [0] * 15


# --- cost -------------------------------------------------------------------------------------------------------------
class Work:
    """What queries did: lines of Python, tokens looked at, nodes taken in."""

    lines = 0
    tokens = 0
    added = 0


class Counted(bytes):
    """Token bytes that count how many of them are taken out."""

    work: Work

    def __getitem__(self, key: Any) -> Any:
        piece = super().__getitem__(key)
        if isinstance(key, slice):
            self.work.tokens += len(piece) // 4
        return piece


class CountedNumpy:
    """NumPy, counting what it is given to look at."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def frombuffer(self, buffer: Any, dtype: Any, count: int = -1, offset: int = 0) -> Any:
        array = np.frombuffer(buffer, dtype, count, offset)
        self._work.tokens += len(array)
        return array


@contextmanager
def counted() -> Iterator[Work]:
    """Count what queries do."""
    work = Work()
    search, add_node = PrefixIndex.search, PrefixIndex.add
    lines_of = (PrefixIndex, prefixes_module._Line, prefixes_module._Path, prefixes_module, NodeIndex, SessionTree)
    codes = set(codes_of(*lines_of, spans_module, node_module, Node, Extent))
    read_bytes = Extent.read_bytes

    def searching(self: PrefixIndex, history: Any, count: int) -> Any:
        data = Counted(history.data)
        data.work = work
        return search(self, history._replace(data=data), count)

    def adding(self: PrefixIndex, node: Node) -> None:
        work.added += 1
        add_node(self, node)

    def reading(self: Extent, start: int, stop: int) -> bytes:
        work.tokens += stop - start
        return read_bytes(self, start, stop)

    def line(frame: Any, event: str, arg: Any) -> Any:
        work.lines += event == "line"
        return line

    before = sys.gettrace()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefixIndex, "search", searching)
        patch.setattr(PrefixIndex, "add", adding)
        patch.setattr(Extent, "read_bytes", reading)
        patch.setattr(prefixes_module, "np", CountedNumpy(work))
        sys.settrace(lambda frame, event, arg: line if frame.f_code in codes else None)
        try:
            yield work
        finally:
            sys.settrace(before)


SHARED = 10_000


Queries = tuple[SessionTree, list[list[int]]]  # an older value that holds the long turn alone, and what to ask


def siblings_under_a_prompt(session: Session, count: int) -> Queries:
    """Children of a long prompt that have all but their end in common."""
    prompt = session.append(session.root, range(SHARED))
    first = session.tree
    for number in range(count):
        session.append(prompt, [7] * 20 + [number])
    shared = list(range(SHARED))
    ends = [[*[7] * 20, count - 1, 1], [*[7] * 20, 2**30], [8]]
    return first, [shared, shared[:-5], *([*shared, *end] for end in ends), [*shared[:-1], 2**30]]


def siblings_that_end_on_the_way(session: Session, count: int) -> Queries:
    """Children of the root, each a beginning of one long turn: a node ends at every token of it."""
    long = session.append(session.root, range(SHARED))
    first = session.tree
    for length in np.linspace(1, SHARED - 1, count).astype(int).tolist():
        session.truncate(long, length)
    shared = list(range(SHARED))
    return first, [shared, shared[:5_000], [*shared[:5_001], 2**30], [*shared[:9_999], 2**30], [*shared, 1]]


def siblings_that_fork_on_the_way(session: Session, count: int) -> Queries:
    """Children of beginnings of one long turn: a path forks from it at every token."""
    long = session.append(session.root, range(SHARED))
    first = session.tree
    for length in np.linspace(1, SHARED - 1, count).astype(int).tolist():
        session.append(session.truncate(long, length), [2**30, 5])
    shared = list(range(SHARED))
    return first, [shared, shared[:5_000], [*shared[:5_001], 2**30 + 1], [*shared[:9_999], 2**30, 5, 5], [*shared, 1]]


@pytest.mark.parametrize("build", [siblings_under_a_prompt, siblings_that_end_on_the_way, siblings_that_fork_on_the_way])
def test_a_query_costs_its_history_and_not_the_tree(build: Callable[[Session, int], Queries]) -> None:
    figures: dict[int, list[int]] = {}
    for count in (10, 10_000):
        session = new_session()
        early = session.append(session.root, [1, 2])
        targets: list[Target] = [session, session.tree]
        first, histories = build(session, count)
        targets.append(session.tree)
        session.longest_prefix([5])
        session.append(early, [3])
        session.longest_prefix([5])
        for history in histories:
            for target in targets:
                with counted() as work:
                    target.longest_prefix(history)
                assert work.added == 0
                assert work.tokens <= 4 * len(history) + 2_000  # both sides of each comparison, and how looks grow
                figures.setdefault(count, []).append(work.lines)
            with counted() as work:
                first.longest_prefix(history)
            # It passes by where newer nodes end, of which there is at most one for each token.
            assert work.lines <= 3 * len(history) + 300
    for few, many in zip(figures[10], figures[10_000], strict=True):
        assert many <= 2 * few + 60, figures


def test_a_path_that_forked_at_every_token_costs_its_length() -> None:
    """The worst of trees: at each of 1,000 tokens the path leaves a node that goes on otherwise."""
    figures = []
    for count in (250, 1_000):
        session = new_session()
        at = session.root
        for number in range(count):
            session.append(at, [5, 1])
            at = (
                session.append(at, [number % 3 + 6]) if number % 2 else session.truncate(session.append(at, [7, 2, 3]), at.stop + 1)
            )
        ids = at.input_ids()
        session.longest_prefix(ids)
        with counted() as work:
            assert session.longest_prefix(ids).length == count
        figures.append(work.lines / count)
        assert work.added == 0
        assert work.tokens < 300 * count
    assert figures[1] < 2 * figures[0] + 10


@pytest.mark.parametrize("over", ["nothing", "a value", "a path"])
def test_a_path_that_forked_often_is_found_by_blocks(over: str) -> None:
    """A path that leaves 600 others is not followed from one to the next, whatever those nodes lie over."""
    session = new_session()
    at: Node = session.append(session.root, range(100, 400))
    session.append(session.root, [7])
    tree: SessionTree = session.tree
    target: Target = session if over == "nothing" else tree.forked(at) if over == "a path" else tree.append(at, [9])[0]
    at = session.root
    for number in range(600):
        target, _ = put(target, at, text(5, 1))
        target, at = put(target, at, text(*[number % 3 + 6] * 10))
    ids = at.input_ids().tolist()
    assert target.longest_prefix(ids).node == at
    with counted() as work:
        assert target.longest_prefix([*ids, 3]).node == at
    assert work.lines < 5_000


@pytest.mark.parametrize("patience", [0, 2])
def test_only_what_lies_behind_many_forks_has_blocks(patience: int) -> None:
    """In each layer: a search begins there by lines."""
    with small_blocks(2, patience):
        session = new_session()
        at: Node = session.append(session.root, [3] * 9)
        tree: SessionTree = session.tree
        for under in (tree, tree.append(session.root, [4])[0]):
            target: Target = under
            node = at
            for forks in range(1, 6):
                target, _ = put(target, node, text(8, forks))
                target, node = put(target, node, text(*[5] * 9))
                assert target.longest_prefix([*node.input_ids().tolist(), 1]).node == node
                value = tree_of(target)
                index = value._index.prefixes(len(value))
                assert bool(index._blocks) == (index._lines[-1].forks > patience)
                assert index._lines[-1].forks == forks


def test_nodes_are_taken_in_once_and_by_their_own_length() -> None:
    session = new_session()
    prompt = session.append(session.root, range(SHARED))
    costs = []
    for turn in range(3):
        for number in range(300):
            session.append(prompt, [9] * 10 + [turn * 300 + number])
        value = session.tree
        with counted() as work:
            session.longest_prefix([1])
        costs.append((work.added, work.lines))
        with counted() as again:
            session.longest_prefix([1])
            value.longest_prefix([1])
        assert again.added == 0
    assert [added for added, _ in costs] == [301, 300, 300]
    assert max(lines for _, lines in costs) < 300 * 120


def test_a_chain_is_taken_in_by_its_new_tokens() -> None:
    """Not by the length of the path: each turn of a long conversation costs what the first did."""
    session = new_session()
    at = session.root
    costs = []
    for turn in range(600):
        at = session.append(at, [turn % 5] * 100)
        with counted() as work:
            session.longest_prefix([1])
        costs.append((work.lines, work.tokens))
        assert work.added == 1
    assert max(lines for lines, _ in costs[500:]) <= 2 * max(lines for lines, _ in costs[:100])
    assert max(tokens for _, tokens in costs[500:]) <= 2 * max(tokens for _, tokens in costs[:100]) + 100


def test_an_append_never_waits_for_queries() -> None:
    """What queries derive, writers do not pay for."""
    session = new_session()
    prompt = session.append(session.root, [1])
    session.longest_prefix([1])
    with counted() as work:
        for number in range(50):
            session.append(prompt, [number])
    assert work.added == 0


@pytest.mark.parametrize("count", [100, 3_000])
def test_a_layer_takes_in_its_own_nodes_alone(count: int) -> None:
    """What if this were appended to the tree as it is: asked of many such values, each has one node that is new."""
    session = new_session()
    prompt = session.append(session.root, [1])
    for number in range(count):
        session.append(prompt, [number])
    session.longest_prefix([1])
    for number in range(20):
        value, node = session.tree.append(prompt, [2**30 + number])
        session.append(prompt, [2**29 + number])
        with counted() as work:
            assert value.longest_prefix([1, 2**30 + number]).node == node
        assert work.added <= 2  # its own, and the one that came to what lies below since the last time
        with counted() as again:
            assert value.longest_prefix([1, 2**29 + number]).node == prompt
            assert value.longest_prefix([1, count - 1]).length == 2
        assert again.added == 0
        assert work.lines + again.lines < 800


def test_a_layer_takes_in_no_more_of_what_lies_below_than_it_sees() -> None:
    session = new_session()
    node = session.append(session.root, [1])
    value, own = session.tree.append(node, [2])
    for number in range(500):
        session.append(node, [3, number])
    with counted() as work:
        assert value.longest_prefix([1, 2, 3]).node == own
    assert work.added == 2


def test_a_chain_of_layers_takes_in_each_node_once() -> None:
    """A question costs its history and the number of layers, a layer what is its own, however much lies below."""
    with layers_that_stay():
        session = new_session()
        shared = session.append(session.root, range(SHARED))
        for number in range(1_000):
            session.append(shared, [number])
        session.longest_prefix([1])
        tree, at = session.tree, shared
        for number in range(40):
            tree.append(at, [5, number])
            tree, at = tree.append(at, [6, number])
            with counted() as work:
                assert tree.longest_prefix([*range(SHARED), *at.input_ids(SHARED).tolist(), 9]).node == at
            assert work.added == 1
            assert work.tokens < 4 * SHARED + 2_000
            assert work.lines < 700 + 80 * number
        assert tree._index.layers == 40


def test_layers_that_are_carried_over_cost_little_more_than_their_nodes() -> None:
    """Of n values each appended to the one before and never the newest, all asked: O(n log n) nodes are taken in."""
    session = new_session()
    tree, at = session.tree, session.append(session.root, [1])
    tree = session.tree
    with counted() as work:
        for number in range(256):
            tree.append(at, [5, number])
            tree, at = tree.append(at, [6])
            assert tree.longest_prefix([1, *[6] * (number + 1)]).node == at
    assert tree._index.layers <= 9
    assert work.added <= 256 * 9


def deep_session(turns: int, forking: bool) -> tuple[Session, Node]:
    """A path of turns of 10 tokens; ``forking``: each in an extent of its own."""
    session = new_session()
    at = session.root
    for number in range(turns):
        if forking:
            session.append(at, [7])
        at = session.append(at, [5] * 9 + [number])
    return session, at


@pytest.mark.parametrize("forking", [False, True], ids=["one extent", "many extents"])
def test_a_fork_takes_in_its_own_nodes_alone(forking: bool) -> None:
    """However long the path that it was forked at; a question costs its history, and no more by the depth than its logarithm."""
    figures: dict[int, list[int]] = {}
    for turns in (100, 5_000):
        session, at = deep_session(turns, forking)
        store = SessionStore.in_memory()
        fork = store.fork(session, at, "b")
        early = at.ancestor(50)
        for number in range(3):
            fork.append(at, [1, number])
            fork.append(early, [5, 5, 2, number])
        further = store.fork(fork, at, "c")
        added = []
        ids = at.input_ids(0, 500).tolist()
        layer = fork.tree.append(early, [5, 5, 3])[0]
        for target, tail, length in (
            (fork, [5, 5, 2, 2, 8], 504),
            (further, [5, 5, 2], 502),
            (layer, [5, 5, 3, 3], 503),
            (fork, [], 500),
        ):
            with counted() as work:
                assert target.longest_prefix([*ids, *tail]).length == length
            added.append(work.added)
            with counted() as work:
                assert target.longest_prefix([*ids[:-1], 10**6]).length == 499
                assert target.longest_prefix([*ids, *tail]).length == length
            assert work.added == 0
            assert work.tokens < 10_000
            with counted() as early_difference:
                assert target.longest_prefix([*ids[:99], *[10**6] * 40_000]).length == 99
            assert early_difference.tokens < 2_000
            figures.setdefault(turns, []).append(work.lines)
        assert added == [6, 0, 1, 0]
        with counted() as work:
            assert fork.longest_prefix([*at.input_ids().tolist(), 1, 2, 3]).length == at.stop + 2
        assert work.tokens < 5 * at.stop + 2_000
        assert work.lines < (2 * at.stop if forking else 0) + 1_000
    for few, many in zip(figures[100], figures[5_000], strict=True):
        assert many <= few + 1_500, figures


def test_a_forks_own_turns_are_taken_in_by_their_new_tokens() -> None:
    """Not by the length of the path that they go on from, at the first question as at the last."""
    costs = []
    for turns in (100, 5_000):
        session, at = deep_session(turns, False)
        fork = SessionStore.in_memory().fork(session, at, "b")
        for turn in range(30):
            at = fork.append(at, [turn % 5] * 100)
            with counted() as work:
                fork.longest_prefix([1])
            assert work.added == 1
            costs.append((work.lines, work.tokens))
    for few, many in zip(costs[:30], costs[30:], strict=True):
        assert many[0] <= 2 * few[0] + 60
        assert many[1] <= 2 * few[1] + 2_000
