"""Questions to nodes and trees, against naive answers. Names carry the rows of CASES.md that a test is for.

Every answer is computed from plain lists that the test wrote down as it built the tree: a path is the tuple of its turns, a turn
the tuple of its tokens; a conversation is a list of rows with their parents' numbers; media and positions are `reference.Segment`s.
"""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sessiontree import (
    ExternalPositions,
    KeyTaken,
    LimitExceeded,
    MediaItem,
    MediaSpanError,
    Node,
    OutOfRange,
    Position,
    PositionError,
    Problem,
    Session,
    SessionStore,
    SessionTree,
    UnknownNode,
    Unsupported,
)
from sessiontree.query import diff, lowest_common_ancestor
from tests import reference as ref
from tests.reference import Segment
from tests.test_tree import refused, text_tree, tree_print
from tests.toy import (
    IMG,
    PAD_VALUE,
    check,
    grow,
    histories,
    image,
    media,
    new_session,
    reference_scheme,
    reply,
    shown,
    store_of,
    toy_scheme,
    turn,
    video,
)

DEPTH: Final = 100_000
WIDTH: Final = 10_000
BOS: Final = 77
#: Depths around the places where one node holds those above it, and around jumps.
BOUNDARIES: Final = (1, 2, 15, 16, 30, 31, 32, 33, 62, 63, 64, 65, 94, 95, 96, 97, 127, 128, 129, 159, 160, 161)

Turn = tuple[int, ...]
Path = tuple[Turn, ...]  # of the root: ()


class Version(NamedTuple):
    """A tree, and beside it what it holds in commit order: each node's path as the test knows it, and the node."""

    tree: SessionTree
    rows: list[tuple[Path, Node]]


@st.composite
def versions(draw: st.DrawFn, most: int = 25) -> list[Version]:
    """Trees that come from one: longer ones, layers over old values, forks, and copies that share no object with them."""
    tree = text_tree()
    made = [Version(tree, [((), tree.root)])]
    for _ in range(draw(st.integers(1, most))):
        tree, rows = made[draw(st.sampled_from((-1, 0, draw(st.integers(0, len(made) - 1)))))]
        path, parent = rows[draw(st.sampled_from((-1, draw(st.integers(0, len(rows) - 1)))))]
        known = dict(rows)
        how = draw(st.sampled_from(("append",) * 6 + ("fork", "copy")))
        if how == "fork":
            made.append(Version(tree.forked(parent), [(path[:depth], known[path[:depth]]) for depth in range(len(path) + 1)]))
        elif how == "copy":
            copied = pickle.loads(pickle.dumps(tree))
            made.append(Version(copied, [(path, node) for (path, _), node in zip(rows, copied, strict=True)]))
        else:
            tokens = tuple(draw(st.lists(st.integers(0, 2), min_size=0 if path else 1, max_size=2)))
            at = (*path, tokens)
            new, node = tree.append(parent, tokens)
            assert known.get(at, node) is node
            made.append(Version(new, rows if at in known else [*rows, (at, node)]))
    return made


def common(one: Path, two: Path) -> Path:
    """The turns that two paths begin with alike."""
    depth = 0
    while depth < min(len(one), len(two)) and one[depth] == two[depth]:
        depth += 1
    return one[:depth]


def up(node: Node) -> list[Node]:
    """A path, root first, by parents alone."""
    found = [node]
    while found[0].parent is not None:
        found.insert(0, found[0].parent)
    return found


def chain(tree: SessionTree, node: Node, depth: int, mark: int = 1) -> tuple[SessionTree, list[Node]]:
    """``depth`` turns under ``node``, and they as a list; each third is empty."""
    made = []
    for at in range(depth):
        tree, node = tree.append(node, [mark, at] if at % 3 != 1 else [], role="user" if at % 2 else "assistant")
        made.append(node)
    return tree, made


# --- up from a node ----------------------------------------------------------------------------------------------------


def check_upward(node: Node, path: Sequence[Node], turns: Path) -> None:
    """A node's path, its ancestors and who holds each token, by a list of the nodes and one of their turns (the root's not)."""
    walked = node.path()
    assert len(walked) == len(path)
    assert all(one is two for one, two in zip(walked, path, strict=True))
    for depth, ancestor in enumerate(path):
        assert node.ancestor(depth) is ancestor
    assert node.ancestor(node.depth) is node
    holders = [path[depth] for depth, tokens in enumerate(turns, 1) for _ in tokens]
    assert [node.node_at(index) for index in range(len(holders))] == holders
    for index, holder in enumerate(holders):
        assert node.node_at(index) is holder
    for outside in (-1, len(holders)):
        with pytest.raises(OutOfRange):
            node.node_at(outside)
    for outside in (-1, node.depth + 1):
        with pytest.raises(OutOfRange):
            node.ancestor(outside)


@given(versions())
@settings(max_examples=60, deadline=None)
def test_upward_in_trees_of_every_kind(made: list[Version]) -> None:
    for _, rows in made:
        known = dict(rows)
        for path, node in rows:
            check_upward(node, [known[path[:depth]] for depth in range(len(path) + 1)], path)


def test_paths_at_every_depth_around_blocks() -> None:
    """From every node of a chain, with a branch and its copy in another layer at each boundary of a block."""
    tree = text_tree()
    nodes: list[Node] = [tree.root]
    turns: list[Turn] = [()]
    for depth in range(1, 200):
        tokens = () if depth % 3 == 2 else (depth, 7)
        tree, node = tree.append(nodes[-1], tokens)
        nodes.append(node)
        turns.append(tokens)
    for depth in range(200):
        check_upward(nodes[depth], nodes[: depth + 1], tuple(turns[1 : depth + 1]))
    for depth in BOUNDARIES:
        for old in (tree, tree.forked(nodes[depth]), pickle.loads(pickle.dumps(tree))):
            start = list(old)[: depth + 1] if old is not tree else nodes[: depth + 1]
            new, branch = chain(old, start[-1], 70, mark=2)
            own = tuple((2, at) if at % 3 != 1 else () for at in range(70))
            for at in (0, 1, 30, 31, 32, 33, 63, 64, 69):
                check_upward(branch[at], [*start, *branch[: at + 1]], (*turns[1 : depth + 1], *own[: at + 1]))
            assert [new.children(node)[-1] for node in start[-1:] + branch[:-1]] == branch


@pytest.mark.parametrize(
    ("depth", "error"), [(True, TypeError), (1.0, TypeError), ("1", TypeError), (Position(1), TypeError), (2**70, OutOfRange)]
)
def test_depths_and_indexes_that_are_refused(depth: Any, error: type[Exception]) -> None:
    tree = text_tree()
    tree, node = tree.append(tree.root, [1, 2, 3])
    for call in (node.ancestor, node.node_at):
        with pytest.raises(error):
            call(depth)
    place: Any = np.int64(1)
    assert node.ancestor(place) is node.node_at(place) is node
    for nothing in (0, -1, 1):
        with pytest.raises(OutOfRange):
            tree.root.node_at(nothing)


# --- two paths ---------------------------------------------------------------------------------------------------------


@given(versions())
@settings(max_examples=80, deadline=None)
def test_the_lowest_common_ancestor_of_any_two_nodes(made: list[Version]) -> None:
    """Of one tree, of a tree and its fork, of layers that both hold the same node, of copies that share no object."""
    ids = {path: node.id for _, rows in made for path, node in rows}
    nodes = list({id(node): (path, node) for _, rows in reversed(made) for path, node in rows}.values())[:40]
    for (path, one), (other, two) in product(nodes, repeat=2):
        shared = common(path, other)
        found = lowest_common_ancestor(one, two)
        assert found is not None
        assert (found.id, found.depth) == (ids[shared], len(shared))
        assert any(found is node for node in (up(one)[len(shared)], up(two)[len(shared)]))
    for tree, rows in made:
        known = dict(rows)
        for (path, one), (other, two) in product(rows[-6:], repeat=2):
            assert tree.lowest_common_ancestor(one.id, two) is known[common(path, other)]


def test_the_lowest_common_ancestor_around_blocks_and_in_other_objects() -> None:
    """Branches at every boundary of a chain; the chain itself as built, unpickled, forked and built again."""
    tree = text_tree()
    tree, trunk = chain(tree, tree.root, 170)
    copied = list(pickle.loads(pickle.dumps(tree)))
    again, rebuilt = chain(text_tree(), text_tree().root, 170)
    assert rebuilt == trunk
    tips: list[tuple[int, int, Node]] = []  # the depth at which it leaves the chain, its own length, the node
    for depth in BOUNDARIES:
        for start, value in ((trunk[depth - 1], tree), (copied[depth], again), (trunk[depth - 1], tree.forked(trunk[depth - 1]))):
            for length in (0, 1, 33, 70):
                _, branch = chain(value, start, length, mark=depth + 1000)
                tips.append((depth, length, branch[-1] if branch else start))
    for (depth, length, one), (other, another, two) in product(tips[::3], tips):
        # From different places, the chain goes on from the upper one, and the other leaves it there.
        expected = depth + min(length, another) if depth == other else min(depth, other)
        found = lowest_common_ancestor(one, two)
        assert found is not None
        assert found.depth == expected
        assert found.id in (one.ancestor(expected).id, two.ancestor(expected).id)
        assert one.ancestor(expected).id == two.ancestor(expected).id


def test_two_layers_over_one_old_value_hold_the_same_node() -> None:
    base = text_tree()
    base, a = base.append(base.root, [1])
    base.append(a, [0])  # so that what follows are layers
    one, left = base.append(a, [2])
    two, right = base.append(a, [2])
    assert left is not right
    assert left == right
    one, under_left = one.append(left, [3])
    two, under_right = two.append(right, [4])
    _, twin = two.append(right, [3])
    assert lowest_common_ancestor(under_left, under_right) == left
    assert lowest_common_ancestor(under_left, twin) == under_left
    assert lowest_common_ancestor(left, under_right) == left
    assert one.lowest_common_ancestor(under_left, right) is left, "a tree answers with its own objects"
    assert two.lowest_common_ancestor(left, under_right) is right
    assert under_left.shared_prefix_len(under_right) == 2
    assert under_left.shared_prefix_len(twin) == 3
    with pytest.raises(UnknownNode):
        one.lowest_common_ancestor(under_left, under_right)


def test_forked_sessions_share_their_paths() -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme="text@hf5")
    a = session.append(session.root, [1, 2])
    b = session.append(a, [3])
    fork = store.fork(session, b, "fork")
    again = store.fork(fork, b, "fork of the fork")
    ends = [where.append(b, [4, at]) for at, where in enumerate((session, fork, again))]
    for one, two in product(ends, repeat=2):
        assert lowest_common_ancestor(one, two) == (b if one is not two else one)
        assert one.shared_prefix_len(two) == (4 if one is not two else 5)
    with pytest.raises(UnknownNode):
        fork.lowest_common_ancestor(ends[0], ends[1])
    with pytest.raises(UnknownNode):
        session.diff(ends[0], ends[1])


@pytest.mark.parametrize(
    "other", [text_tree(namespace="t"), SessionTree("text@vllm"), text_tree(model_fingerprint="m"), SessionTree(toy_scheme())]
)
def test_different_roots_have_nothing_in_common(other: SessionTree) -> None:
    tree = text_tree()
    tree, nodes = chain(tree, tree.root, 40)
    _, others = chain(other, other.root, 40)
    for one, two in ((nodes[-1], others[-1]), (nodes[-1], others[2]), (tree.root, other.root), (tree.root, others[0])):
        for first, second in ((one, two), (two, one)):
            assert lowest_common_ancestor(first, second) is None
            assert first.shared_prefix_len(second) == 0
            found = diff(first, second)
            assert (found.ancestor, found.shared_prefix_len) == (None, 0)
            assert found.removed.tolist() == first.input_ids().tolist()
            assert found.added.tolist() == second.input_ids().tolist()


def test_a_diff_of_different_roots_blames_no_position() -> None:
    one, two = text_tree(), text_tree(namespace="t")
    _, a = one.append(one.root, [1, 2])
    _, b = two.append(two.root, [1, 2])
    assert a.positions().tolist() == b.positions().tolist()
    assert [diff(*pair).kind for pair in ((a, b), (one.root, two.root), (a, two.root))] == ["root"] * 3


class Laid(NamedTuple):
    """The nodes of a path, and what stands at each of its tokens: id, placeholder (content and number), position as decoded."""

    nodes: list[Node]
    tokens: list[tuple[Any, ...]]


def laid(session: Session, segments: Sequence[Segment], rule: str) -> Laid:
    nodes = [session.root]
    for segment in segments:
        nodes.append(grow(session, nodes[-1], segment))
    cells = [None if cell is None else (*content_of(cell[0]), cell[1]) for cell in ref.placeholder_cells(segments)]
    columns = ref.replay(reference_scheme(rule), segments, "as_decoded").positions.T.tolist()
    return Laid(nodes, list(zip(ref.input_ids(segments), cells, columns, strict=True)))


def content_of(item: ref.Item) -> tuple[Any, ...]:
    return item.modality, item.identity, item.grid_thw, item.second_per_grid_ts


def cut_in_two(segment: Segment, at: int) -> list[Segment]:
    """A turn as two; an item that the cut runs through is declared in parts."""
    left, right = [], []
    for item in segment.items:
        [(offset, length)] = item.spans
        if offset + length <= at:
            left.append(item)
        elif offset >= at:
            right.append(replace(item, spans=((offset - at, length),)))
        else:
            left.append(replace(item, spans=((offset, at - offset),), unfinished=True))
            before = item.placeholders_before + at - offset
            right.append(replace(item, spans=((0, offset + length - at),), placeholders_before=before))
    pieces = (segment.tokens[:at], left), (segment.tokens[at:], right)
    return [Segment(segment.origin, tokens, tuple(items)) for tokens, items in pieces]


@st.composite
def kindred(draw: st.DrawFn) -> tuple[list[Segment], list[Segment]]:
    """A history, and one like it: some tokens, media and origins are others, it ends elsewhere; both are cut anywhere."""
    one = draw(histories(max_turns=4))
    two = list(one)
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(two) - 1))
        origin, tokens, items = two[at].origin, two[at].tokens, two[at].items
        how = draw(st.sampled_from(("token", "media", "origin", "end")))
        if how == "token" and tokens:
            place = draw(st.integers(0, len(tokens) - 1))
            two[at] = Segment(origin, (*tokens[:place], 5, *tokens[place + 1 :]), items)
        elif how == "media" and items:
            number = draw(st.integers(0, len(items) - 1))
            other = replace(items[number], identity=bytes(32))
            two[at] = Segment(origin, tokens, (*items[:number], other, *items[number + 1 :]))
        elif how == "origin" and not items:
            two[at] = Segment("input" if origin == "generated" else "generated", tokens)
        elif how == "end" and at:
            del two[at:]
    for history in (one, two):
        for _ in range(draw(st.integers(0, 2))):
            at = draw(st.integers(0, len(history) - 1))
            size = len(history[at].tokens)
            if size > 1:
                history[at : at + 1] = cut_in_two(history[at], draw(st.integers(1, size - 1)))
    return one, two


def alike(one: Sequence[object], two: Sequence[object]) -> int:
    same = 0
    while same < min(len(one), len(two)) and one[same] == two[same]:
        same += 1
    return same


def first_difference(one: Sequence[tuple[Any, ...]], two: Sequence[tuple[Any, ...]]) -> str:
    """What differs first of two paths that are alike up to where one of them ends or these tokens stand."""
    if not one or not two:
        return "end" if one or two else "same"
    return "media" if one[0][1] != two[0][1] else "token" if one[0][0] != two[0][0] else "position"


def items_of(segments: Sequence[Segment], start: int, stop: int) -> Counter[tuple[Any, ...]]:
    """How often each item stands in a window of a path, and how much of it."""
    spans = ref.clip_spans(ref.media_spans(segments), start, stop)
    return Counter((content_of(item), last - first) for item, first, last in spans)


def items_in(spans: Sequence[tuple[MediaItem, int, int]]) -> Counter[tuple[Any, ...]]:
    contents = [(item.modality, item.identity, item.grid_thw, item.second_per_grid_ts) for item, _, _ in spans]
    return Counter((content, last - first) for content, (_, first, last) in zip(contents, spans, strict=True))


@given(kindred(), st.sampled_from(ref.RULES))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_two_paths_share_and_how_they_differ(pair: tuple[list[Segment], list[Segment]], rule: str) -> None:
    """From every node of one history to every node of another, in one session and in two."""
    session, elsewhere = new_session(toy_scheme(rule)), new_session(toy_scheme(rule))
    one = laid(session, pair[0], rule)
    whole = not any(item.unfinished for segment in (*pair[0], *pair[1]) for item in segment.items)
    for two in (laid(session, pair[1], rule), laid(elsewhere, pair[1], rule)):
        for (left, right), mirrored in product(product(one.nodes, two.nodes), (False, True)):
            first, second = (right, left) if mirrored else (left, right)
            ours, theirs = (two, one) if mirrored else (one, two)
            same = alike(ours.tokens[: first.stop], theirs.tokens[: second.stop])
            assert first.shared_prefix_len(second) == same
            found = diff(first, second)
            ids = alike([node.id for node in up(first)], [node.id for node in up(second)])
            assert found.ancestor is not None
            assert found.ancestor.id == up(first)[ids - 1].id
            assert found.shared_prefix_len == same
            assert found.kind == first_difference(ours.tokens[same : first.stop], theirs.tokens[same : second.stop])
            assert found.removed.tolist() == [token for token, _, _ in ours.tokens[same : first.stop]]
            assert found.added.tolist() == [token for token, _, _ in theirs.tokens[same : second.stop]]
            if whole:
                histories_of = (pair[1], pair[0]) if mirrored else pair
                gone = items_of(histories_of[0], same, first.stop)
                come = items_of(histories_of[1], same, second.stop)
                assert items_in(found.removed_media) == gone - come
                assert items_in(found.added_media) == come - gone


def test_kinds_of_difference() -> None:
    session = new_session()
    shared = grow(session, session.root, turn(1, 2))
    base = grow(session, shared, turn(*shown(image()), 3))
    token = grow(session, shared, turn(*shown(image()), 4))
    other = grow(session, shared, turn(*shown(image(number=1)), 3))
    painted = grow(session, shared, turn(*shown(image(number=1, fill=PAD_VALUE)), 3))
    filled = grow(session, shared, turn(*shown(image(fill=PAD_VALUE)), 3))
    larger = grow(session, shared, turn(*shown(image(4, 8)), 3))
    text = grow(session, shared, turn(100, IMG, IMG, IMG, IMG, 105, 3))
    longer = grow(session, base, turn(5, *shown(image(number=2))))
    assert session.tree.diff(base.id, token.id)[:3] == session.diff(base, token)[:3]
    for two, kind, same in (
        (base, "same", 9),
        (token, "token", 8),
        (other, "media", 3),
        (painted, "media", 3),
        (filled, "token", 3),
        (larger, "media", 3),
        (text, "media", 3),
        (longer, "end", 9),
        (shared, "end", 2),
        (session.root, "end", 0),
    ):
        for first, second in ((base, two), (two, base)):
            found = session.diff(first, second)
            assert (found.kind, found.shared_prefix_len) == (kind, same)
            assert found.ancestor == lowest_common_ancestor(base, two)
            assert found.removed.tolist() == first.input_ids(same).tolist()
            assert found.added.tolist() == second.input_ids(same).tolist()
            assert found.removed.dtype == found.added.dtype == np.int32
    assert [span[1:] for span in session.diff(base, other).removed_media] == [(3, 7)]
    assert session.diff(base, other).removed_media[0][0] is base.media[0]
    assert session.diff(base, other).added_media[0][0] is other.media[0]
    assert [span[1:] for span in session.diff(base, longer).added_media] == [(11, 15)]
    assert session.diff(base, longer).removed_media == ()
    assert session.diff(base, text).added_media == ()


def test_media_that_only_moved_are_neither_removed_nor_added() -> None:
    session = new_session()
    one = grow(session, session.root, turn(1, *shown(image()), *shown(image()), 3))
    two = grow(session, session.root, turn(2, 2, *shown(image()), *shown(image(number=1)), 3, *shown(image())))
    three = grow(session, session.root, turn(4, *shown(image())))
    found = session.diff(one, two)
    assert (found.kind, found.removed_media) == ("token", ())
    assert [(item.identity, start, stop) for item, start, stop in found.added_media] == [(image(number=1).item.identity, 9, 13)]
    found = session.diff(one, three)
    assert [span[1:] for span in found.removed_media] == [(8, 12)], "it stood there twice and stands there once"
    assert found.added_media == ()


def test_one_item_at_two_places_under_the_same_ids() -> None:
    session = new_session()
    ids = [1, *[IMG] * 6]
    early, late = (session.append(session.root, ids, media=[MediaItem("image", bytes(32), [(at, 4)], (1, 4, 4))]) for at in (1, 2))
    assert session.diff(early, late)[1:3] == session.diff(late, early)[1:3] == (1, "media")
    assert session.diff(early, late).removed_media == session.diff(early, late).added_media == ()


def test_an_item_that_begins_again_is_not_one_that_goes_on() -> None:
    """Under a table, how many placeholders an item has is the table's business: twice two are not once four."""
    session = new_session()
    table = np.full((3, 4), 5)
    twice = [MediaItem("image", bytes(32), [(at, 2)], (1, 4, 4)) for at in (0, 2)]
    one = session.append(session.root, [IMG] * 4, media=[MediaItem("image", bytes(32), [(0, 4)], (1, 4, 4))], positions=table)
    two = session.append(session.root, [IMG] * 4, media=twice, positions=table)
    assert session.diff(one, two)[1:3] == session.diff(two, one)[1:3] == (2, "media")
    assert two.shared_prefix_len(two) == 4


@pytest.mark.parametrize("at", range(3, 7))
def test_a_token_that_differs_inside_an_item_is_a_token_however_the_item_is_cut(at: int) -> None:
    session = new_session()
    history = turn(1, *shown(image()), 3)
    other = Segment("input", tuple(9 if index == 5 else token for index, token in enumerate(history.tokens)), history.items)
    whole = grow(session, session.root, history)
    parts = grow(session, session.root, *cut_in_two(other, min(at, 5)))
    assert session.diff(whole, parts)[1:3] == session.diff(parts, whole)[1:3] == (5, "token")
    first = grow(session, session.root, cut_in_two(history, at)[0])
    ends = [
        grow(session, first, cut_in_two(one, at)[1])
        for one in (history, Segment("input", (*history.tokens[:6], 9, 9), history.items))
    ]
    assert session.diff(*ends)[:3] == (first, 6, "token")


def test_an_item_that_moved_and_was_cut_is_neither_removed_nor_added() -> None:
    session = new_session()
    whole = grow(session, session.root, turn(7, *shown(image()), 3))
    parts = grow(session, session.root, turn(1), *cut_in_two(turn(*shown(image()), 3), 3))
    assert whole.input_ids(1).tolist() == parts.input_ids(1).tolist()
    for one, two in ((whole, parts), (parts, whole)):
        found = session.diff(one, two)
        assert (found.kind, found.shared_prefix_len) == ("token", 0)
        assert (found.removed_media, found.added_media) == ((), ())


@pytest.mark.parametrize("at", range(1, 9))
def test_an_item_cut_into_parts_is_what_it_is_whole(at: int) -> None:
    session = new_session()
    history = turn(1, 2, *shown(image()), 3)
    whole = grow(session, session.root, history)
    parts = grow(session, session.root, *cut_in_two(history, at))
    assert parts.depth == 2
    found = session.diff(whole, parts)
    assert found.kind == "same"
    assert len(found.removed) == len(found.added) == 0
    assert found.removed_media == found.added_media == ()
    assert whole.shared_prefix_len(parts) == parts.shared_prefix_len(whole) == 9
    first = parts.parent
    assert first is not None
    assert session.diff(first, whole)[1:3] == (at, "end")
    thrice = grow(session, session.root, *cut_in_two(history, 4)[:1], *cut_in_two(cut_in_two(history, 4)[1], 1))
    assert thrice.depth == 3
    assert session.diff(thrice, parts).kind == "same"


def test_positions_as_decoded_decide_not_those_as_replayed() -> None:
    """After a video under the hf5 rule, what was decoded and what was prefilled stand at different positions."""
    session = new_session(toy_scheme("hf5"))
    start = grow(session, session.root, turn(1, *shown(video(frames=6))))
    end = start.stop
    assert start.mrope_position_delta + end != start.next_position
    decoded = grow(session, start, reply(7, 8))
    again = grow(session, start, reply(7, 8))
    given = grow(session, start, turn(7, 8))
    assert decoded.positions(mode="as_replayed").tolist() == given.positions(mode="as_replayed").tolist()
    assert decoded.positions().tolist() != given.positions().tolist()
    assert session.diff(decoded, given)[1:3] == (end, "position")
    assert session.diff(decoded, again)[1:3] == (end + 2, "same")
    even = new_session(toy_scheme("sglang"))
    start = grow(even, even.root, turn(1, 2))
    assert even.diff(grow(even, start, reply(7, 8)), grow(even, start, turn(7, 8)))[1:3] == (4, "same")


def test_external_tables_count_by_their_positions() -> None:
    session = new_session()
    start = session.append(session.root, [1, 2])
    plain = session.append(start, [5, 6, 7])
    equal = session.append(start, [5, 6, 7], positions=plain.positions(2))
    late = session.append(start, [5, 6, 7], positions=plain.positions(2) + np.array([0, 0, 9]))
    assert len({plain.id, equal.id, late.id}) == 3, "a table is part of what a node is"
    assert session.diff(plain, equal)[:3] == (start, 5, "same")
    assert session.diff(plain, late)[:3] == (start, 4, "position")
    assert session.diff(late, equal)[1:3] == (4, "position")
    assert session.diff(late, equal).removed.tolist() == session.diff(late, equal).added.tolist() == [7]
    after = [session.append(node, [8]) for node in (plain, equal, late)]
    assert session.diff(after[0], after[1]).kind == "same"
    jumped = session.append(session.append(start, [5, 6, 7], positions=ExternalPositions(plain.positions(2), 40)), [8])
    assert session.diff(after[0], jumped)[1:3] == (5, "position")
    pruned = MediaItem("image", bytes(32), [(1, 2)], (1, 4, 4))
    kept = [
        session.append(start, [100, number, number, 105], media=[pruned], positions=np.full((3, 4), 2))
        for number in (IMG, PAD_VALUE)
    ]
    assert session.diff(*kept)[1:3] == (3, "token")
    assert session.diff(kept[0], session.append(start, [100, IMG, IMG, 105], positions=np.full((3, 4), 2)))[1:3] == (3, "media")


@pytest.mark.parametrize("other", [5, None, "x", b"x"])
def test_trees_refuse_what_is_no_node(other: Any) -> None:
    session = new_session()
    node = grow(session, session.root, turn(1))
    for call in (session.diff, session.lowest_common_ancestor, session.tree.diff, session.tree.lowest_common_ancestor):
        for pair in ((node, other), (other, node)):
            with pytest.raises(UnknownNode if isinstance(other, bytes) else TypeError):
                call(*pair)


@pytest.mark.parametrize("other", [5, None, "x", b"x"])
def test_nodes_refuse_what_is_no_node(other: Any) -> None:
    session = new_session()
    node = grow(session, session.root, turn(1))
    for call in (node.shared_prefix_len, lambda other: diff(node, other), lambda other: lowest_common_ancestor(other, node)):
        wrong: Any
        for wrong in (other, session.draft(node), session):
            with pytest.raises(TypeError):
                call(wrong)


# --- what stands below a node -------------------------------------------------------------------------------------------


def below(rows: Sequence[tuple[Path, Node]], path: Path) -> list[Node]:
    """All below a path, in commit order."""
    return [node for other, node in rows if len(other) > len(path) and other[: len(path)] == path]


def depth_first(rows: Sequence[tuple[Path, Node]], path: Path) -> list[Node]:
    found = []
    for other, node in rows:
        if other and other[:-1] == path:
            found += [node, *depth_first(rows, other)]
    return found


@given(versions(), st.integers(0, 2))
@settings(max_examples=80, deadline=None)
def test_what_stands_below_in_both_orders(made: list[Version], token: int) -> None:
    """On old values and layers over them, on forks and copies, whatever was appended to the same index later."""
    for tree, rows in made:
        for path, node in rows:
            found = list(tree.descendants(node))
            assert len(found) == len(below(rows, path))
            assert all(one is two for one, two in zip(found, below(rows, path), strict=True))
            assert all(
                one is two for one, two in zip(tree.descendants(node.id, "depth_first"), depth_first(rows, path), strict=True)
            )

            def ends_so(node: Node) -> bool:
                return token in node.token_ids

            wanted = [one for one in (node, *below(rows, path)) if token in one.token_ids.tolist()]
            assert list(tree.search(ends_so, node)) == wanted
            assert set(tree.search(ends_so, node, "depth_first")) == set(wanted)
        known = dict(rows)
        for path, node in (row for other in made for row in other.rows):
            assert (node in tree) == (node.id in tree) == (path in known)
        assert list(tree.search(lambda node: True)) == [node for _, node in rows]
        assert list(tree.search(lambda node: True, order="depth_first")) == [tree.root, *depth_first(rows, ())]


def bushy(session: Session, count: int) -> list[Node]:
    """A tree in which node n hangs under node n // 3."""
    nodes = [session.root]
    for at in range(1, count):
        nodes.append(session.append(nodes[at // 3], [at]))
    return nodes


@pytest.mark.parametrize("order", ["commit", "depth_first"])
def test_a_search_looks_at_no_more_than_it_has_to(order: Any) -> None:
    session = new_session()
    nodes = bushy(session, 3000)
    for node in range(500):
        session.append(nodes[node], [1, node])
    calls = 0

    def counted(node: Node) -> bool:
        nonlocal calls
        calls += 1
        return node.depth >= 2

    found = session.search(counted, order=order)
    assert calls == 0, "nothing is looked at before somebody asks"
    first = next(found)
    assert first is nodes[3]
    assert calls == {"commit": 4, "depth_first": 3}[order]
    next(found)
    assert calls == {"commit": 5, "depth_first": 4}[order]
    rest = list(found)
    assert calls == 3500
    assert len(rest) + 2 == sum(up_to.depth >= 2 for up_to in session.tree)
    calls = 0
    assert next(session.search(counted, nodes[1000], order)) is nodes[1000]
    assert calls == 1


@pytest.mark.parametrize("order", ["commit", "depth_first"])
def test_values_taken_earlier_never_see_what_comes_later(order: Any) -> None:
    """Not even while they are being gone through: neither a session's tree nor a value whose index is appended to."""
    session = new_session()
    nodes = bushy(session, 30)
    tree = session.tree
    expected = list(tree.descendants(session.root, order))
    assert set(expected) == set(nodes[1:])
    iterators = [
        tree.descendants(session.root, order),
        session.descendants(session.root, order),
        tree.search(lambda node: node.depth > 0, order=order),
        session.search(lambda node: node.depth > 0, order=order),
    ]
    seen: list[list[Node]] = [[] for _ in iterators]
    for at in range(len(expected)):
        for iterator, own in zip(iterators, seen, strict=True):
            own.append(next(iterator))
        session.append(nodes[at], [at, 7])
        session.append(session.root, [at, 8])
    assert seen == [expected] * 4
    for iterator in iterators:
        assert next(iterator, None) is None
    assert len(list(session.descendants(session.root, order))) == len(expected) * 3
    value = text_tree()
    value, a = value.append(value.root, [1])
    value, b = value.append(a, [2])
    newest, going = value, value.descendants(value.root, order)
    for at in range(3):
        newest, _ = newest.append(a, [at, at])
        newest, _ = newest.append(value.root, [at, at])
    assert list(going) == [a, b]
    assert len(list(newest.descendants(value.root, order))) == 8


def test_searches_that_are_refused() -> None:
    """At the call, not at the first result."""
    session, other = new_session(), new_session()
    node = other.append(other.root, [1])
    for call in (session.descendants, session.tree.descendants):
        with pytest.raises(UnknownNode):
            call(node)
        wrong: Any
        for wrong, error in (("breadth_first", Unsupported), ("", Unsupported), (None, TypeError), (1, TypeError)):
            with pytest.raises(error):
                call(session.root, wrong)
            with pytest.raises(error):
                session.search(bool, None, wrong)
        with pytest.raises(TypeError):
            call(None)  # type: ignore[arg-type]
    with pytest.raises(UnknownNode):
        session.search(bool, node)

    def fails(node: Node) -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        next(session.search(fails))


# --- tool calls --------------------------------------------------------------------------------------------------------


class Said(NamedTuple):
    """A turn as the test writes it down: under which one, the tool calls it makes, the one it answers, how it ended."""

    parent: int
    calls: tuple[str, ...] = ()
    answer: str | None = None
    finish_reason: str | None = None


Conversation = list[Said]  # the root first, whose parent is -1
ROOT: Final = Said(-1)


def said(session: Session, conversation: Conversation) -> list[Node]:
    """The nodes of a conversation; turn n says the token n."""
    nodes = [session.root]
    for number, (parent, calls, answer, finish_reason) in enumerate(conversation[1:], 1):
        metadata: dict[str, Any] = {"tool_calls": list(calls)} if calls else {}
        if answer is not None:
            metadata["tool_call_id"] = answer
        if finish_reason is None:
            nodes.append(session.append(nodes[parent], [number], metadata=metadata, role="user" if answer is None else "tool"))
        else:
            draft = session.draft(nodes[parent], metadata=metadata)
            draft.append(number)
            nodes.append(draft.commit(finish_reason))
    return nodes


def line(conversation: Conversation, number: int) -> list[int]:
    """The numbers of a turn's path."""
    found = [number]
    while found[0]:
        found.insert(0, conversation[found[0]].parent)
    return found


Complaint = tuple[str, int, str | None, tuple[int, ...]]


def open_behind(conversation: Conversation, number: int) -> set[str]:
    """The calls made on a turn's path that it does not answer."""
    calls: set[str] = set()
    for at in line(conversation, number):
        calls.discard(conversation[at].answer or "")
        calls |= set(conversation[at].calls)
    return calls


def results_beside(conversation: Conversation, number: int, parents: Sequence[int]) -> list[int]:
    """Results for the calls open behind a turn that hang on ``parents``, turns of its path, or on other such results."""
    path, waiting, found = line(conversation, number), list(parents), []
    for parent in waiting:
        for other, one in enumerate(conversation):
            wanted = one.answer in open_behind(conversation, number) & open_behind(conversation, parent)
            if other and one.parent == parent and other not in path and wanted:
                waiting.append(other)
                found.append(other)
    return found


def complaints(conversation: Conversation, number: int, *, extend: bool = False) -> list[Complaint]:
    """What is wrong with a turn's path, each call and each result looked at by itself; sorted."""
    path = line(conversation, number)
    found: list[Complaint] = []
    for at, turn_number in enumerate(path):
        _, calls, answer, finish_reason = conversation[turn_number]
        before = [conversation[one] for one in path[:at]]
        for call in calls:
            if all(conversation[later].answer != call for later in path[at + 1 :]):
                beside = [other for other in results_beside(conversation, number, path) if conversation[other].answer == call]
                found.append(("unanswered_call", turn_number, call, tuple(beside)))
        if answer is not None and not any(answer in one.calls for one in before):
            found.append(("unrequested_result", turn_number, answer, ()))
        elif answer is not None and any(answer == one.answer for one in before):
            found.append(("repeated_result", turn_number, answer, ()))
        if not extend and finish_reason in ("length", "interrupted") and turn_number != number:
            found.append(("extended_truncated", turn_number, None, ()))
    return sorted(found, key=repr)


def told(problems: Sequence[Problem], nodes: Sequence[Node]) -> list[Complaint]:
    number = {node.id: at for at, node in enumerate(nodes)}
    depths = [problem.node.depth for problem in problems]
    assert depths == sorted(depths), "in path order"
    return sorted(
        ((kind, number[node.id], call, tuple(number[one.id] for one in elsewhere)) for kind, node, call, elsewhere in problems),
        key=repr,
    )


@st.composite
def conversations(draw: st.DrawFn, most: int = 14) -> Conversation:
    """Any tree of turns that make calls, each its own, and answer some that were made before, on their path or beside it."""
    conversation = [ROOT]
    made = ["never"]
    for number in range(1, draw(st.integers(2, most))):
        parent = draw(st.sampled_from((number - 1, draw(st.integers(0, number - 1)))))
        what = draw(st.sampled_from(("plain", "calls", "result", "result", "both")))
        calls = tuple(f"{number}{name}" for name in "abc"[: draw(st.integers(1, 3))]) if what in ("calls", "both") else ()
        answer = draw(st.sampled_from(made)) if what in ("result", "both") else None
        finish_reason = draw(st.sampled_from((None, "stop", "tool_calls", "length", "interrupted"))) if answer is None else None
        conversation.append(Said(parent, calls, answer, finish_reason))
        made += calls
    return conversation


@given(conversations(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_d23_validate_names_what_does_not_pair(conversation: Conversation, extend: bool) -> None:
    session = new_session()
    nodes = said(session, conversation)
    for number, node in enumerate(nodes):
        expected = complaints(conversation, number, extend=extend)
        found = session.validate(node, allow_extend_truncated=extend)
        assert told(found, nodes) == expected
        path = [nodes[at] for at in line(conversation, number)]
        given_path: Any
        for given_path in (node.id, tuple(path), path, [one.id for one in path]):
            assert session.tree.validate(given_path, allow_extend_truncated=extend) == found


@pytest.mark.parametrize(
    ("conversation", "expected"),
    [
        ([ROOT, Said(0, answer="a"), Said(1, ("a",)), Said(2)], ["unrequested_result", "unanswered_call"]),
        ([ROOT, Said(0, ("a",)), Said(1, answer="a"), Said(2, ("a",)), Said(3)], ["unanswered_call"]),
        ([ROOT, Said(0, ("a",)), Said(1, answer="a"), Said(2, ("a",)), Said(3, answer="a")], []),
        ([ROOT, Said(0, ("a",), "a"), Said(1)], ["unanswered_call", "unrequested_result"]),
    ],
    ids=["answered before it is made", "made again and not answered", "made and answered again", "answers itself"],
)
def test_d23_a_result_answers_only_a_call_before_it(conversation: Conversation, expected: list[str]) -> None:
    session = new_session()
    nodes = said(session, conversation)
    assert sorted(problem.kind for problem in session.validate(nodes[-1])) == sorted(expected)


def test_d23_results_beside_the_path_are_named() -> None:
    session = new_session()
    calls, a, b, late, elsewhere = range(1, 6)
    nodes = said(session, [ROOT, Said(0, ("a", "b")), Said(1, answer="a"), Said(1, answer="b"), Said(2), Said(0, answer="b")])
    [problem] = session.validate(nodes[late])
    assert problem == Problem("unanswered_call", nodes[calls], "b", (nodes[b],))
    assert str(problem) == f"unanswered_call 'b' at {nodes[calls]!r}; answered beside the path by {nodes[b]!r}"
    assert session.validate(nodes[b]) == (Problem("unanswered_call", nodes[calls], "a", (nodes[a],)),)
    [problem] = session.validate(nodes[elsewhere])
    assert problem == Problem("unrequested_result", nodes[elsewhere], "b", ())
    assert str(problem) == f"unrequested_result 'b' at {nodes[elsewhere]!r}"
    old = session.tree
    second = session.append(nodes[calls], [9], metadata={"tool_call_id": "b"}, role="tool")
    assert session.validate(nodes[late])[0].elsewhere == (nodes[b], second)
    assert old.validate(nodes[late])[0].elsewhere == (nodes[b],), "a value sees what it saw"
    with pytest.raises(UnknownNode):
        old.validate(second)


def test_c68_a_reply_cut_off_is_not_gone_on_from_silently() -> None:
    session = new_session()
    for finish_reason in ("length", "interrupted", "stop", "tool_calls", "eos"):
        nodes = said(session, [ROOT, Said(0), Said(1, finish_reason=finish_reason), Said(2), Said(3, finish_reason=finish_reason)])
        cut = finish_reason in ("length", "interrupted")
        assert nodes[2].finish_reason == finish_reason
        assert session.validate(nodes[2]) == session.validate(nodes[4], allow_extend_truncated=True) == ()
        assert session.validate(nodes[4]) == ((Problem("extended_truncated", nodes[2]),) if cut else ())
        assert session.validate(nodes[3]) == session.validate(nodes[4])
        if cut:
            assert str(session.validate(nodes[3])[0]) == f"extended_truncated at {nodes[2]!r}"
    empty = session.append(said(session, [ROOT, Said(0, finish_reason="length")])[1], [])
    assert [problem.kind for problem in session.validate(empty)] == ["extended_truncated"]


SHAPES: Final[list[tuple[Any, bool, tuple[str, ...]]]] = [
    # what `tool_calls` holds, whether that is malformed, and which of it are calls
    (None, False, ()),
    ([], False, ()),
    (["a", "b"], False, ("a", "b")),
    (("a", "a"), False, ("a",)),
    ([""], False, ("",)),
    ("a", True, ()),
    (b"a", True, ()),
    (5, True, ()),
    (True, True, ()),
    (1.5, True, ()),
    ({"id": "a"}, True, ()),
    ([{"id": "a", "type": "function"}], False, ("a",)),  # as OpenAI's messages have them
    ([{"type": "function"}], True, ()),
    ([{"id": 5}], True, ()),
    ({"a"}, True, ()),
    (["a", 5], True, ("a",)),
    (["a", None], True, ("a",)),
    (["a", ["b"]], True, ("a",)),
    ([b"a"], True, ()),
    ([[]], True, ()),
    (np.array("a"), True, ()),
    (np.array(["a"]), True, ()),
    # An array of many has no truth value.
    (np.array(["a", "b"]), True, ()),
    (np.array([1, 2]), True, ()),
    (np.zeros((2, 2)), True, ()),
]


@pytest.mark.parametrize(("shape", "malformed", "calls"), SHAPES)
def test_tool_calls_in_another_form(shape: Any, malformed: bool, calls: tuple[str, ...]) -> None:
    session = new_session()
    start = session.append(session.root, [1])
    node = session.append(start, [2], metadata={"tool_calls": shape, "tool_call_id": None, "other": [1]})
    end = session.append(node, [3])
    expected = [Problem("malformed", node)] * malformed + [Problem("unanswered_call", node, call) for call in calls]
    assert list(session.validate(end)) == expected
    assert session.validate(start) == ()
    assert session.tree.forked(node).leaves() == (node,)
    assert all(str(problem).startswith(problem.kind) for problem in expected)


@pytest.mark.parametrize(
    "shape",
    [
        0,
        5,
        True,
        False,
        b"",
        b"a",
        [1],
        [["a"]],
        [None],
        {},
        {"id": "a"},
        {"a"},
        np.array("a"),
        np.array(["a", "b"]),
        np.zeros(2),
        1.5,
    ],
)
def test_a_tool_call_id_in_another_form(shape: Any) -> None:
    session = new_session()
    calls = session.append(session.root, [1], metadata={"tool_calls": ["a"]})
    node = session.append(calls, [2], metadata={"tool_call_id": shape})
    assert session.validate(node) == (Problem("unanswered_call", calls, "a"), Problem("malformed", node))
    both = session.append(calls, [3], metadata={"tool_call_id": shape, "tool_calls": "x"})
    assert session.validate(both)[1:] == (Problem("malformed", both),)
    assert [one.kind for one in session.validate(session.append(node, [4]))] == ["unanswered_call", "malformed"]
    assert set(session.tree.forked(node)) == {session.root, calls, node}


def test_one_turn_answers_several_calls() -> None:
    session = new_session()
    calls = session.append(session.root, [1], metadata={"tool_calls": ["a", "b", "c"]})
    node = session.append(calls, [2], metadata={"tool_call_id": ["c", "a", "d", "a"]})
    assert [(problem.kind, problem.node, problem.call_id) for problem in session.validate(node)] == [
        ("unanswered_call", calls, "b"),
        ("unrequested_result", node, "d"),
    ]
    (problem, *_) = session.validate(session.append(calls, [3], metadata={"tool_call_id": "b"}))
    assert (problem.call_id, problem.elsewhere) == ("a", (node,)), "it stands beside the path"
    assert session.validate(session.append(session.root, [4], metadata={"tool_call_id": []})) == ()


@pytest.mark.parametrize("shape", ["", {}, 0, False, 0.0, b""])
def test_tool_calls_that_are_nothing(shape: Any) -> None:
    """What is false names no calls."""
    session = new_session()
    assert session.validate(session.append(session.root, [1], metadata={"tool_calls": shape})) == ()


def test_tool_calls_that_are_an_empty_array() -> None:
    session = new_session()
    node = session.append(session.root, [1], metadata={"tool_calls": np.array([])})
    assert [problem.kind for problem in session.validate(node)] in ([], ["malformed"])


@pytest.mark.parametrize("wrong", [None, 5, "x", (), [], [5], (None,), {1}])
def test_validate_takes_nodes_ids_and_paths(wrong: Any) -> None:
    session, other = new_session(), new_session()
    node = other.append(other.root, [1])
    with pytest.raises(TypeError):
        session.validate(wrong)
    for unknown in (node, node.id, node.path(), bytes(32)):
        with pytest.raises(UnknownNode):
            session.validate(unknown)
    assert session.validate(session.root) == session.validate(session.root.path()) == ()


# --- one path through siblings ------------------------------------------------------------------------------------------


def three_results(session: Session) -> tuple[Node, list[Node]]:
    """A turn that made three tool calls, and their results as its children; the last has a picture."""
    calls = session.append(session.root, [1, 2], role="assistant", metadata={"tool_calls": ["a", "b", "c"]})
    results = []
    for name, segment in zip("abc", (turn(10, 11), turn(12), turn(*shown(image()), 13)), strict=True):
        results.append(
            session.append(calls, segment.tokens, media=media(segment), role="tool", metadata={"tool_call_id": name, "n": [name]})
        )
    return calls, results


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2), (2,), (1, 0)])
def test_d13_results_are_joined_in_the_order_given(order: tuple[int, ...]) -> None:
    session = new_session()
    calls, results = three_results(session)
    before = tree_print(session)
    joined = session.linearize([results[at] for at in order])
    path = joined.path()
    assert path[:3] == (session.root, calls, results[order[0]])
    assert path[2] is results[order[0]], "the first stays as it is"
    segments = [turn(1, 2), *((turn(10, 11), turn(12), turn(*shown(image()), 13))[at] for at in order)]
    check(joined, segments)
    for at, made in zip(order[1:], path[3:], strict=True):
        source = results[at]
        assert (made.role, made.origin, made.metadata, made.finish_reason) == ("tool", "input", source.metadata, None)
        assert [(link.kind, link.node_id, link.reused_tokens) for link in made.links] == [("derived_from", source.id, calls.stop)]
    left = {"abc"[at] for at in range(3)} - {"abc"[at] for at in order}
    assert {problem.call_id for problem in session.validate(joined)} == left
    assert session.linearize([results[at].id for at in order]) is joined, "again changes nothing"
    assert session.children(calls) == tuple(results)
    assert tree_print(session)[1][: before[0]] == before[1]
    tree, same = session.tree.linearize([results[at] for at in order])
    assert same is joined
    assert len(tree) == len(session.tree)


def test_d13_generated_siblings_are_joined_as_input() -> None:
    session = new_session(toy_scheme("hf5"))
    start = grow(session, session.root, turn(1, *shown(video(frames=6))))
    samples = [grow(session, start, reply(7)) for _ in range(3)]
    assert len({node.id for node in samples}) == 3
    joined = session.linearize(samples)
    assert [node.origin for node in joined.path()[2:]] == ["generated", "input", "input"]
    assert joined.input_ids(start.stop).tolist() == [7, 7, 7]
    check(joined, [turn(1, *shown(video(frames=6))), reply(7), turn(7), turn(7)], "hf5")
    assert [node.finish_reason for node in joined.path()[2:]] == ["stop"] * 3
    assert session.linearize([samples[0], samples[2], samples[1]]) != joined, "equal samples stay apart"


def test_d13_what_is_not_joined() -> None:
    session = new_session()
    calls, results = three_results(session)
    below = session.append(results[0], [5])
    table = session.append(calls, [6], positions=[[9], [9], [9]])
    for nodes in ([results[0], below], [results[0], calls], [session.root, results[0]], [results[0], session.root]):
        refused(session, Unsupported, lambda nodes=nodes: session.linearize(nodes))  # type: ignore[misc]
    refused(session, Unsupported, lambda: session.linearize([results[0], table]))
    refused(session, OutOfRange, lambda: session.linearize([]))
    refused(session, UnknownNode, lambda: session.linearize([results[0], new_session(name="o").append(session.root, [8])]))
    refused(session, TypeError, lambda: session.linearize([5]))  # type: ignore[list-item]
    assert session.linearize([table, results[1]]).positions(2).tolist() == [[9, 10]] * 3
    small = new_session(max_tokens=8, name="small")
    calls, results = small.append(small.root, [1, 2]), []
    for at in range(3):
        results.append(small.append(calls, [at] * 3))
    assert small.linearize(results[:2]).stop == 8
    refused(small, LimitExceeded, lambda: small.linearize(results))


@pytest.mark.parametrize("order", [(0, 0), (0, 1, 1), (0, 1, 0), (1, 0, 2, 0)])
def test_d13_no_result_is_joined_twice(order: tuple[int, ...]) -> None:
    session = new_session()
    _, results = three_results(session)
    refused(session, Unsupported, lambda: session.linearize([results[at] for at in order]))


def test_joining_one_result_is_that_result_whatever_room_is_kept() -> None:
    session = new_session(max_tokens=10, reserve_output=5)
    start = grow(session, session.root, turn(1, 2, 3))
    node = grow(session, start, reply(4, 5, 6, 7))
    assert session.truncate(node, 7) is node
    assert session.linearize([node]) is node


# --- forks -------------------------------------------------------------------------------------------------------------


def forks(session: Session, node: Node, name: str = "fork") -> list[Session | SessionTree]:
    """The ways to fork at a node, by the node and by its id."""
    store = store_of(session)
    return [
        store.fork(session, node, name),
        store.fork(session, node.id, f"{name} by id"),
        session.tree.forked(node),
        session.tree.forked(node.id),
    ]


def test_d10_a_fork_ends_with_the_node_it_was_made_at() -> None:
    """Whichever that is: the root and its child, before, between and behind tool results, the tip."""
    session = new_session()
    conversation = [
        ROOT,
        Said(0),
        Said(1, finish_reason="stop"),
        Said(2),
        Said(3, ("a", "b"), finish_reason="tool_calls"),
        Said(4, answer="a"),
        Said(5, answer="b"),
        Said(6, ("c",), finish_reason="tool_calls"),
        Said(7, answer="c"),
        Said(8, finish_reason="stop"),
    ]
    nodes = said(session, conversation)
    session.set_head("main", nodes[-1])
    prints = tree_print(session)
    for number, node in enumerate(nodes):
        for fork in forks(session, node, str(number)):
            path = [nodes[at] for at in line(conversation, number)]
            assert list(fork.node(node.id).path()) == path
            tree = fork.tree if isinstance(fork, Session) else fork
            assert list(tree) == path
            assert tree.leaves() == (node,)
            assert dict(tree.heads) == {}
            assert tree.root is session.root
            assert told(tree.validate(node), nodes) == [
                (kind, at, call, ()) for kind, at, call, _ in complaints(conversation, number)
            ]
            grown = fork.append(node, [99])
            new = grown if isinstance(grown, Node) else grown[1]
            assert list(new.path()) == [*path, new]
    assert tree_print(session) == prints, "the session itself stays as it is"


def expected_fork(conversation: Conversation, number: int) -> tuple[list[int], list[int]]:
    """What a fork at a turn holds: its path; and beside it, for each call of the path that the path does not answer, its
    results that hang on the path where that is already behind the call."""
    path = line(conversation, number)
    return path, sorted(results_beside(conversation, number, path[:-1]))


def check_fork(session: Session, nodes: Sequence[Node], conversation: Conversation, number: int) -> None:
    path, beside = expected_fork(conversation, number)
    for fork in forks(session, nodes[number], f"{len(store_of(session).sessions())}"):
        tree = fork.tree if isinstance(fork, Session) else fork
        assert list(tree)[: len(path)] == [nodes[at] for at in path]
        assert {nodes.index(node) for node in list(tree)[len(path) :]} == set(beside)
        assert len(tree) == len(path) + len(beside)
        for result in beside:
            node = tree.node(nodes[result].id)
            assert node in tree.children(nodes[conversation[result].parent])
            assert {nodes.index(child) for child in tree.children(node)} <= set(beside)
            assert node.path() == nodes[result].path()
        kept = {at: sorted(path + beside).index(at) for at in path + beside}
        fewer = [conversation[at]._replace(parent=kept.get(conversation[at].parent, -1)) for at in sorted(kept)]
        assert told(tree.validate(nodes[number]), [nodes[at] for at in sorted(kept)]) == complaints(fewer, kept[number])


CALLS: Final = Said(0, ("a", "b", "c"))
SIBLINGS: Final[dict[str, tuple[Conversation, tuple[int, ...]]]] = {
    # a conversation, and the turns to fork at
    "two": ([ROOT, Said(0, ("a", "b")), Said(1, answer="a"), Said(1, answer="b")], (2, 3)),
    "three": ([ROOT, CALLS, Said(1, answer="a"), Said(1, answer="b"), Said(1, answer="c")], (2, 3, 4)),
    "one behind another": (
        [ROOT, CALLS, Said(1, answer="a"), Said(2, answer="b"), Said(2, answer="c"), Said(3, answer="c")],
        (3, 4, 5),
    ),
    "with children": (
        [ROOT, Said(0, ("a", "b")), Said(1, answer="a"), Said(1, answer="b"), Said(2), Said(3, finish_reason="stop"), Said(4)],
        (2, 3),
    ),
    "given twice": (
        [ROOT, Said(0, ("a", "b")), Said(1, answer="a"), Said(1, answer="a"), Said(1, answer="b"), Said(1, answer="b")],
        (2, 3, 4, 5),
    ),
    "beside other turns": (
        [ROOT, Said(0, ("a", "b")), Said(1, answer="a"), Said(1), Said(1, answer="never made"), Said(1, answer="b")],
        (2, 5),
    ),
    "calls of an earlier turn": (
        [
            ROOT,
            Said(0, ("z",)),
            Said(1, answer="z"),
            Said(2, ("a", "b")),
            Said(3, answer="a"),
            Said(3, answer="b"),
            Said(1, answer="z"),
        ],
        (2, 4, 5, 6),
    ),
    "all answered": (
        [ROOT, Said(0, ("a", "b")), Said(1, answer="a"), Said(2, answer="b"), Said(1, answer="b"), Said(3)],
        (3, 5),
    ),
}


@pytest.mark.parametrize("name", SIBLINGS)
def test_d13_a_fork_keeps_results_that_were_recorded_as_siblings(name: str) -> None:
    conversation, places = SIBLINGS[name]
    session = new_session()
    nodes = said(session, conversation)
    for number in places:
        check_fork(session, nodes, conversation, number)


#: Results beside the path that are not straight below the turn that made the calls.
HIDDEN_SIBLINGS: Final[dict[str, tuple[Conversation, tuple[int, ...]]]] = {
    # Engines write a few tokens of the chat template between the reply and the results.
    "a turn between call and results": (
        [ROOT, Said(0, ("a", "b"), finish_reason="tool_calls"), Said(1), Said(2, answer="a"), Said(2, answer="b")],
        (3, 4),
    ),
    # A tool that is an agent: its answer makes calls of its own.
    "results of a result": (
        [ROOT, Said(0, ("a",)), Said(1, ("x", "y"), "a"), Said(2, answer="x"), Said(2, answer="y")],
        (3, 4),
    ),
    "calls made one turn after another": (
        [ROOT, Said(0, ("a",)), Said(1, ("b",)), Said(2, answer="a"), Said(2, answer="b")],
        (3, 4),
    ),
    "a turn between results": (
        [ROOT, CALLS, Said(1, answer="a"), Said(2), Said(3, answer="b"), Said(3, answer="c")],
        (4, 5),
    ),
    "a turn behind one of the results": ([ROOT, Said(0, ("a", "b")), Said(1, answer="a"), Said(1, answer="b"), Said(2)], (4,)),
}


@pytest.mark.parametrize("name", HIDDEN_SIBLINGS)
def test_d13_a_fork_never_drops_a_result_silently(name: str) -> None:
    conversation, places = HIDDEN_SIBLINGS[name]
    session = new_session()
    nodes = said(session, conversation)
    for number in places:
        check_fork(session, nodes, conversation, number)


@given(conversations())
@settings(max_examples=150, deadline=None)
def test_d13_forks_of_any_conversation(conversation: Conversation) -> None:
    session = new_session()
    nodes = said(session, conversation)
    before = tree_print(session)
    for number in range(len(nodes)):
        check_fork(session, nodes, conversation, number)
    assert tree_print(session) == before


def test_d13_what_a_fork_keeps_goes_on_as_any_turn() -> None:
    session = new_session()
    store = store_of(session)
    calls, results = three_results(session)
    below = [session.append(result, [20 + at]) for at, result in enumerate(results)]
    fork = store.fork(session, results[1], "fork")
    assert list(fork.tree) == [session.root, calls, results[1], results[0], results[2]]
    assert set(fork.siblings(results[1])) == {results[0], results[2]}
    assert set(fork.children(calls)) == set(fork.leaves()) == set(results)
    for node, below_it in zip(results, below, strict=True):
        assert fork.node(node.id) is node
        assert below_it not in fork.tree
        assert fork.append(node, [30]).path()[:-1] == node.path()
        assert fork.append(node, below_it.token_ids) == below_it
    assert fork.append(calls, results[2].token_ids, media=results[2].media, role="tool") is results[2], (
        "a retry is no second result"
    )
    assert fork.linearize(results) == session.linearize(results)
    assert fork.set_head("main", results[2]).node is results[2]
    assert {problem.call_id for problem in fork.validate(results[1])} == {"a", "c"}
    assert fork.validate(fork.linearize(results)) == ()


def test_d13_a_fork_of_a_fork_keeps_them_too() -> None:
    session = new_session()
    store = store_of(session)
    calls, results = three_results(session)
    one = store.fork(session, results[0], "one")
    two = store.fork(one, results[2], "two")
    three = store.fork(two, results[1], "three")
    for number, fork in enumerate((one, two, three)):
        assert set(fork.tree) == {session.root, calls, *results}
        for node in results:
            assert fork.node(node.id) is node
            again = store.fork(fork, node, f"{number} again at {node.metadata['tool_call_id']}")
            assert list(again.tree)[:3] == list(node.path())
            assert set(again.tree) == set(fork.tree)
    deep = three
    for at in range(40):
        deep = store.fork(deep, results[at % 3], f"deep {at}")
    assert set(deep.tree) == set(session.tree)
    answers = {node.metadata["tool_call_id"] for node in deep.children(calls)}
    assert answers == {"a", "b", "c"}
    cut = store.fork(deep, calls, "cut")
    assert list(cut.tree) == [session.root, calls]
    for node in results:
        with pytest.raises(UnknownNode):
            cut.node(node.id)


def test_d13_a_fork_outlives_what_it_was_forked_from() -> None:
    session = new_session()
    calls, results = three_results(session)
    names = [node.id for node in (session.root, calls, results[1], results[0], results[2])]
    fork = session.tree.forked(results[1])
    longer, _ = fork.append(results[0], [5])
    weak = weakref.ref(session)
    store_of(session).close()
    del session, calls, results
    gc.collect()
    assert weak() is None
    for tree in (fork, longer, fork.forked(names[2])):
        assert [tree.node(name).id for name in names] == names
        assert [node.id for node in tree][:5] == names
        assert len(tree.children(names[1])) == 3
        assert bytes(32) not in tree


def test_d13_keys_of_what_a_fork_keeps_are_taken_in_it() -> None:
    session = new_session()
    calls = session.append(session.root, [1], metadata={"tool_calls": ["a", "b"]})
    a = session.append(calls, [2], key="a", metadata={"tool_call_id": "a"})
    b = session.append(calls, [3], key="b", metadata={"tool_call_id": "b"})
    other = session.append(calls, [4], key="c")
    fork = store_of(session).fork(session, a, "fork")
    assert fork.append(calls, [3], key="b") is b
    refused(fork, KeyTaken, lambda: fork.append(calls, [5], key="b"))
    refused(fork, KeyTaken, lambda: fork.append(calls, [5], key="a"))
    assert fork.append(calls, [5], key="c") not in session.tree
    assert other not in fork.tree


def test_a_fork_at_what_a_session_does_not_hold() -> None:
    session, other = new_session(), new_session()
    node = other.append(other.root, [1])
    before = store_of(session).sessions()
    for fork in (lambda: store_of(session).fork(session, node, "x"), lambda: session.tree.forked(node.id)):
        refused(session, UnknownNode, fork)
    assert store_of(session).sessions() == before
    with pytest.raises(TypeError):
        store_of(session).fork(session.tree, session.root, "x")  # type: ignore[arg-type]


# --- a BOS token that is not wanted ---------------------------------------------------------------------------------------


def stripped(segment: Segment) -> Segment:
    """A turn without its first token."""
    items = (replace(item, spans=tuple((offset - 1, length) for offset, length in item.spans)) for item in segment.items)
    return Segment(segment.origin, segment.tokens[1:], tuple(items))


@pytest.mark.parametrize("rule", ref.RULES)
def test_c50_ids_spans_and_positions_move_together(rule: str) -> None:
    first = turn(BOS, *shown(image()))  # history ends in media
    second = turn(BOS, 5, *shown(image(number=1)), image(4, 8, number=2), 6)
    session, other = new_session(toy_scheme(rule)), new_session(toy_scheme(rule))
    for where in (session, other):
        grow(where, where.root, first)
    [parent] = session.children(session.root)
    node = session.append(parent, second.tokens, media=media(second), strip_bos=BOS)
    check(node, [first, stripped(second)], rule)
    plain = grow(other, parent, stripped(second))
    assert node == plain, "it is the turn without a BOS"
    assert node.media == plain.media
    assert session.append(parent, second.tokens, media=media(second), strip_bos=BOS) is node
    assert session.append(parent, stripped(second).tokens, media=media(stripped(second)), strip_bos=BOS) is node
    tree, same = session.tree.append(parent, np.array(second.tokens), media=iter(media(second)), strip_bos=BOS)
    assert same is node
    assert len(tree) == len(session.tree)


def test_c50_external_positions_move_too() -> None:
    session = new_session()
    start = grow(session, session.root, turn(BOS, 1))
    table = np.array([[50, 60, 61], [50, 70, 71], [50, 80, 3]])
    node = session.append(start, [BOS, 5, 6], positions=table, strip_bos=BOS)
    assert node.positions(2).tolist() == table[:, 1:].tolist()
    assert node.token_ids.tolist() == [5, 6]
    assert node.next_position == 81
    assert node == session.append(start, [5, 6], positions=table[:, 1:])
    highest_at_bos = np.array([[90, 60, 61]] * 3)
    assert session.append(start, [BOS, 5, 6], positions=highest_at_bos, strip_bos=BOS).next_position == 62
    own = session.append(start, [BOS, 5, 6], positions=ExternalPositions(table, 200, 300), strip_bos=BOS)
    assert (own.next_position, own.position_state().max_position) == (200, 300)
    item = MediaItem("image", bytes(32), [(1, 2)], (1, 8, 8))
    pruned = session.append(start, [BOS, IMG, IMG], positions=table, media=[item], strip_bos=BOS)
    assert [span[1:] for span in pruned.media_spans()] == [(2, 4)]
    assert pruned.positions(2).tolist() == table[:, 1:].tolist()
    kept = session.append(start, [7, 5, 6], positions=table, strip_bos=BOS)
    assert kept.positions(2).tolist() == table.tolist()
    for wrong in (table[:, 1:], table[:, :0], table[:2], table[0], np.array([[-1, 2, -3]] * 3)):
        refused(session, PositionError, lambda wrong=wrong: session.append(start, [BOS, 5, 6], positions=wrong, strip_bos=BOS))  # type: ignore[misc]


@pytest.mark.parametrize("table", [5, np.array(5), "x"])
def test_c50_a_table_without_columns_is_a_typed_error(table: Any) -> None:
    session = new_session()
    start = session.append(session.root, [1])
    refused(session, PositionError, lambda: session.append(start, [BOS, 5], positions=table))
    refused(session, PositionError, lambda: session.append(start, [BOS, 5], positions=table, strip_bos=BOS))


def test_c50_a_span_on_the_bos_token_is_an_error() -> None:
    session = new_session()
    start = grow(session, session.root, turn(1))
    covered = turn(image(2, 2, fill=BOS), 6)
    larger = turn(image(fill=BOS), 6, *shown(image(number=1)))
    for segment in (covered, larger):
        for where in (session, session.tree):
            error = refused(
                session,
                MediaSpanError,
                lambda where=where, segment=segment: where.append(start, segment.tokens, media=media(segment)[::-1], strip_bos=BOS),  # type: ignore[misc]
            )
            assert error.span == (0, segment.items[0].spans[0][1])
            assert error.item.identity == segment.items[0].identity
        check(session.append(start, segment.tokens, media=media(segment)), [turn(1), segment])
    beside = turn(BOS, image(2, 2, fill=BOS), 6)
    check(session.append(start, beside.tokens, media=media(beside), strip_bos=BOS), [turn(1), stripped(beside)])


def test_c50_only_what_was_asked_for_and_only_behind_a_history() -> None:
    session = new_session()
    empty = session.tree
    first = session.append(session.root, [BOS, 1], strip_bos=BOS)
    assert first.token_ids.tolist() == [BOS, 1], "the first turn keeps its own"
    assert empty.append(session.root, [BOS, 1], strip_bos=BOS)[1] == first
    filled = session.tree
    bos: Any
    for given_ids, bos, ids in (
        ([BOS, 5], None, [BOS, 5]),
        ([BOS, 5], BOS + 1, [BOS, 5]),
        ([BOS, BOS, 5], BOS, [BOS, 5]),  # one of them
        ([5, BOS], BOS, [5, BOS]),
        ([0, 5], 0, [5]),
        ([2**31 - 1, 5], 2**31 - 1, [5]),
        ([2**31 - 1, 5], np.int64(2**31 - 1), [5]),
        ([], BOS, []),
        ([BOS], BOS, []),
    ):
        node = session.append(first, given_ids, strip_bos=bos)
        assert node.token_ids.tolist() == ids
        assert node == session.append(first, ids) == filled.append(first, given_ids, strip_bos=bos)[1]
    assert session.append(first, [BOS, 5]).token_ids.tolist() == [BOS, 5], "off by default"
    assert filled.append(first, [BOS, 5])[1].token_ids.tolist() == [BOS, 5]
    picture = new_session(name="p")
    start = grow(picture, picture.root, turn(image()))
    assert picture.append(start, [BOS, 5], strip_bos=BOS).token_ids.tolist() == [5]


def test_c50_the_rest_of_an_item_behind_a_bos_token() -> None:
    """A processor that renders each turn by itself puts a BOS before the rest of an image, where no token may stand."""
    session = new_session()
    begin, rest = cut_in_two(turn(1, *shown(image()), 3), 4)
    start = grow(session, session.root, begin)
    given_rest = Segment("input", (BOS, *rest.tokens), tuple(replace(item, spans=((1, item.spans[0][1]),)) for item in rest.items))
    refused(session, MediaSpanError, lambda: session.append(start, given_rest.tokens, media=media(given_rest)))
    check(session.append(start, given_rest.tokens, media=media(given_rest), strip_bos=BOS), [begin, rest])


@given(histories(max_turns=3), st.booleans(), st.sampled_from(ref.RULES))
@settings(max_examples=60, deadline=None)
def test_c50_any_turn_with_and_without_its_bos(history: list[Segment], with_bos: bool, rule: str) -> None:
    session = new_session(toy_scheme(rule))
    node = session.root
    for number, segment in enumerate(history):
        given_turn = segment
        if segment.origin == "input" and with_bos and number:
            items = (replace(item, spans=tuple((offset + 1, length) for offset, length in item.spans)) for item in segment.items)
            given_turn = Segment("input", (BOS, *segment.tokens), tuple(items))
        if segment.origin == "input":
            node = session.append(node, given_turn.tokens, media=media(given_turn), strip_bos=BOS if number else None)
        else:
            node = grow(session, node, segment)
    check(node, history, rule)


@pytest.mark.parametrize("bos", [2**32 + 5, 2**31, -1, 2**63, 2**70, -(2**70)])
def test_c50_a_bos_that_is_no_token_id_is_refused(bos: int) -> None:
    session = new_session()
    start = session.append(session.root, [1])
    for parent in (start, session.root):
        refused(session, OutOfRange, lambda parent=parent: session.append(parent, [5, 6], strip_bos=bos))  # type: ignore[misc]


@pytest.mark.parametrize("bos", ["5", 5.0, True, Position(5), b"5", [5]])
def test_c50_a_bos_of_another_type_is_refused(bos: Any) -> None:
    session = new_session()
    start = session.append(session.root, [1])
    for where in (session, session.tree):
        for parent in (start, session.root):
            refused(session, TypeError, lambda where=where, parent=parent: where.append(parent, [5, 6], strip_bos=bos))  # type: ignore[misc]


# --- D31: size ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recursion_limit() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


class Deep(NamedTuple):
    """100,000 turns of one token, turn n says n % 1000; all that is on the path; and a leaf that leaves it half way."""

    session: Session
    path: list[Node]
    side: Node

    @property
    def tip(self) -> Node:
        return self.path[-1]


MAKES, CUT_OFF, LEAVES = (
    40_000,
    70_000,
    50_000,
)  # depths: of a call that is never answered, of a reply that was cut off, of the branch


@pytest.fixture(scope="module")
def deep(recursion_limit: None) -> Deep:
    session = SessionStore.in_memory().create("deep", scheme="text@hf5")
    path = [session.root]
    for at in range(1, DEPTH + 1):
        if at == MAKES:
            path.append(session.append(path[-1], [at % 1000], metadata={"tool_calls": ["open"]}))
        elif at == CUT_OFF:
            draft = session.draft(path[-1])
            draft.append(at % 1000)
            path.append(draft.commit("length"))
        else:
            path.append(session.append(path[-1], [at % 1000]))
    side = session.append(path[LEAVES], [5, 5], metadata={"tool_call_id": "open"}, role="tool")
    session.set_head("main", path[-1])
    return Deep(session, path, side)


def deep_ids() -> list[int]:
    return [at % 1000 for at in range(1, DEPTH + 1)]


def test_d31_c60_paths_and_ancestors(deep: Deep) -> None:
    for depth in (DEPTH, DEPTH - 1, DEPTH - 31, 99_968, 99_967, 99_969, 65_536, 65_535, 33, 32, 31):
        path = deep.path[depth].path()
        assert len(path) == depth + 1
        assert all(one is two for one, two in zip(path, deep.path, strict=False))
    for depth in range(0, DEPTH + 1, 89):
        assert deep.tip.ancestor(depth) is deep.path[depth]
        assert deep.tip.node_at(min(depth, DEPTH - 1)) is deep.path[min(depth, DEPTH - 1) + 1]
    assert deep.side.path()[:-1] == tuple(deep.path[: LEAVES + 1])


def test_d31_common_ancestors_and_differences(deep: Deep) -> None:
    session, path, side = deep
    assert session.lowest_common_ancestor(deep.tip, side) is path[LEAVES]
    for depth in (0, 1, 31, 32, 33, 4711, LEAVES, LEAVES + 1, DEPTH - 1):
        assert lowest_common_ancestor(side, path[depth]) is path[min(depth, LEAVES)]
        assert lowest_common_ancestor(path[depth], deep.tip) is path[depth]
    found = session.diff(deep.tip, side)
    assert found[:3] == (path[LEAVES], LEAVES, "token")
    assert found.removed.tolist() == deep_ids()[LEAVES:]
    assert found.added.tolist() == [5, 5]
    assert session.diff(session.root, deep.tip).added.tolist() == deep_ids()


def test_d31_two_trees_of_equal_content(deep: Deep) -> None:
    """Pickled, each shares no object with the other: equal and hashed by id, their common ancestor found by ids."""
    dumped = pickle.dumps(deep.session.tree)
    tree = pickle.loads(dumped)
    assert len(dumped) < 200 * DEPTH
    other = list(tree)
    assert len(other) == DEPTH + 2
    assert other[DEPTH] is not deep.tip
    assert other[DEPTH] == deep.tip
    assert hash(other[DEPTH]) == hash(deep.tip)
    assert all(one == two for one, two in zip(other, deep.path, strict=False))
    assert tree.head("main") == deep.session.head("main")
    assert lowest_common_ancestor(other[DEPTH], deep.side) == deep.path[LEAVES]
    assert lowest_common_ancestor(other[DEPTH], deep.tip) == deep.tip
    assert other[DEPTH].shared_prefix_len(deep.tip) == DEPTH
    assert diff(other[DEPTH], deep.tip).kind == "same"
    side = pickle.loads(pickle.dumps(deep.side))
    assert side.path()[:-1] == deep.side.path()[:-1]
    assert side.input_ids().tolist() == [*deep_ids()[:LEAVES], 5, 5]
    assert {side, deep.side, other[DEPTH], deep.tip} == {deep.tip, deep.side}
    for value in (deep.tip, deep.session.tree, tree, side):
        assert copy.copy(value) is value
        assert copy.deepcopy([value])[0] is value
        assert len(repr(value)) < 200
        assert len(str(value)) < 200
    weak = weakref.ref(other[DEPTH // 2])
    del tree, other, side, value
    gc.collect()
    assert weak() is None


@pytest.mark.parametrize("order", ["commit", "depth_first"])
def test_d31_all_below(deep: Deep, order: Any) -> None:
    session, path, side = deep
    found = list(session.descendants(session.root, order))
    expected = [*path[1:], side] if order == "commit" else [*path[1 : LEAVES + 1], *path[LEAVES + 1 :], side]
    assert found == expected
    assert list(session.search(lambda node: node.depth == 99_999, order=order)) == [path[99_999]]
    assert list(session.descendants(path[DEPTH - 1], order)) == [deep.tip]


def test_d31_d23_validate(deep: Deep) -> None:
    session, path, side = deep
    expected = (Problem("unanswered_call", path[MAKES], "open", (side,)), Problem("extended_truncated", path[CUT_OFF]))
    assert session.validate(deep.tip) == session.validate(path) == expected
    assert session.validate(side) == ()


def test_d31_pictures(deep: Deep) -> None:
    tree = deep.session.tree
    text = tree.to_text().splitlines()
    assert len(text) < 250
    assert text[-1] == f"{DEPTH + 2 - 200:,} of {DEPTH + 2:,} nodes not shown"
    assert len(tree.to_text(max_nodes=DEPTH // 10).splitlines()) == DEPTH // 10 + 2
    assert tree.to_dot().count(" -> ") == DEPTH + 2
    assert deep.tip.id.hex() in tree._repr_html_()
    graph = pytest.importorskip("networkx") and tree.to_networkx()
    assert (graph.number_of_nodes(), graph.number_of_edges()) == (DEPTH + 2, DEPTH + 1)
    assert graph.nodes[deep.tip.id.hex()]["heads"] == ["main"]


def test_d31_prefixes_and_records(deep: Deep) -> None:
    session = deep.session
    match = session.longest_prefix([*deep_ids(), 1, 2])
    assert (match.node, match.length, match.within) == (deep.tip, DEPTH, None)
    match = session.longest_prefix([*deep_ids()[:LEAVES], 5, 6])
    assert (match.node, match.length, match.within) == (deep.path[LEAVES], LEAVES + 1, deep.side)
    fork = store_of(session).fork(session, deep.tip, "records")
    made = fork.record([*deep_ids(), 8], [9])
    assert (made.reused_tokens, made.fork, made.prompt.parent) == (DEPTH, None, deep.tip)
    assert made.completion.input_ids(DEPTH).tolist() == [8, 9]
    assert made.completion.depth == DEPTH + 2
    rewound = fork.record([*deep_ids()[:100], 8], [9])
    assert rewound.prompt.parent is deep.path[100]
    fork.close()


def test_d31_forks_and_edits(deep: Deep) -> None:
    session, path, side = deep
    for depth in (0, 1, MAKES, LEAVES, DEPTH):
        fork = session.tree.forked(path[depth])
        assert set(fork.leaves()) == {path[depth], side} if depth > LEAVES else {path[depth]}
    assert session.tree.forked(side).leaves() == (side,)
    assert session.truncate(deep.tip, 4711) is path[4711], "C60: rewound by any depth"
    tree, node = session.tree.append(deep.tip, [BOS, 3], strip_bos=BOS)
    assert node.input_ids(DEPTH).tolist() == [3]
    assert tree.forked(node).leaves() == (node, side)


def test_d31_a_result_costs_what_a_turn_costs_however_many_calls_are_open() -> None:
    taken = []
    for count in (1, 2000):
        tree = text_tree()
        tree, calls = tree.append(tree.root, [1], metadata={"tool_calls": [str(at) for at in range(count)]})
        tracemalloc.start()
        results = []
        for at in range(500):
            tree, node = tree.append(calls, [at], metadata={"tool_call_id": str(at)})
            results.append(node)
        taken.append((tracemalloc.get_traced_memory()[0], len(pickle.dumps(tree))))
        tracemalloc.stop()
        assert tree.children(calls) == tuple(results)
    (few, few_pickled), (many, many_pickled) = taken
    assert many < 2 * few
    assert many_pickled < 2000 * 30 + 1.5 * few_pickled


def test_d31_results_one_behind_another(recursion_limit: None) -> None:
    """A chain of 5,000 results, the last two as siblings: forks and validation go up all of it."""
    count = 5_000
    tree = text_tree()
    tree, calls = tree.append(tree.root, [1], metadata={"tool_calls": [str(at) for at in range(count + 2)]})
    node = calls
    for at in range(count):
        tree, node = tree.append(node, [at % 7], metadata={"tool_call_id": str(at)})
    tree, one = tree.append(node, [8], metadata={"tool_call_id": str(count)})
    tree, two = tree.append(node, [9], metadata={"tool_call_id": str(count + 1)})
    assert set(tree.forked(one).children(node)) == set(tree.forked(two).children(node)) == {one, two}
    assert tree.validate(one) == (Problem("unanswered_call", calls, str(count + 1), (two,)),)
    joined, last = tree.linearize([one, two])
    assert joined.validate(last) == ()
    assert list(joined.forked(last)) == list(last.path())


class Wide(NamedTuple):
    """A turn that made 10,000 tool calls, and its results as siblings."""

    session: Session
    calls: Node
    results: list[Node]


@pytest.fixture(scope="module")
def wide(recursion_limit: None) -> Wide:
    session = SessionStore.in_memory().create("wide", scheme="text@hf5")
    calls = session.append(session.root, range(50), metadata={"tool_calls": [str(at) for at in range(WIDTH)]})
    results = [session.append(calls, [at, 1], metadata={"tool_call_id": str(at)}, role="tool") for at in range(WIDTH)]
    return Wide(session, calls, results)


def test_d31_c60_ten_thousand_siblings(wide: Wide) -> None:
    session, calls, results = wide
    tree = session.tree
    for order in ("commit", "depth_first"):
        assert list(tree.descendants(session.root, order)) == [calls, *results]
    looked: list[Node] = []

    def watched(node: Node) -> bool:
        looked.append(node)
        return node.depth == 2

    assert next(tree.search(watched)) is results[0]
    assert len(looked) == 3
    assert tree.lowest_common_ancestor(results[3], results[-1]) is calls
    assert tree.diff(results[3], results[-1])[:3] == (calls, 50, "token")
    problems = tree.validate(results[5])
    assert [(problem.call_id, problem.elsewhere) for problem in problems] == [
        (str(at), (result,)) for at, result in enumerate(results) if at != 5
    ]
    assert tree.longest_prefix([*range(50), 4711, 1, 3]).node is results[4711]
    assert len(tree.to_text(max_nodes=WIDTH * 2).splitlines()) == WIDTH + 2
    assert tree.to_dot().count(" -> ") == WIDTH + 1
    assert results[-1].id.hex() in tree._repr_html_()
    assert tree.to_networkx().number_of_edges() == WIDTH + 1
    copied = pickle.loads(pickle.dumps(tree))
    assert list(copied) == list(tree)
    assert copied.children(calls) == tuple(results)
    assert pickle.loads(pickle.dumps(results[7])).path() == (session.root, calls, results[7])
    fork = store_of(session).fork(session, results[-1], "records")
    made = fork.record([*range(50), 4711, 1], [9])
    assert made.prompt is results[4711]
    fork.close()


def test_d31_d13_forks_keep_ten_thousand_siblings(wide: Wide) -> None:
    fork = wide.session.tree.forked(wide.results[17])
    again = fork.forked(wide.results[4711])
    for tree in (fork, again):
        assert len(tree) == WIDTH + 2
        assert set(tree.children(wide.calls)) == set(wide.results)


def test_d31_ten_thousand_results_are_joined(wide: Wide) -> None:
    tree = wide.session.tree
    few = wide.results[:4000]
    joined, last = tree.linearize(few)
    assert last.depth == 4001
    assert last.input_ids(50).tolist() == [token for at in range(4000) for token in (at, 1)]
    assert len(joined.validate(last)) == WIDTH - 4000
