"""Editing history without editing it: truncate, drop_last, replace and rewrite, against naive splices of lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sessiontree import (
    Edit,
    ExternalPositions,
    Head,
    HeadMoved,
    KeyTaken,
    LimitExceeded,
    Link,
    MediaItem,
    MediaSpanError,
    NameTaken,
    Node,
    OutOfRange,
    Position,
    PositionLimitExceeded,
    Session,
    SessionStore,
    SessionTree,
    UnknownNode,
    Unsupported,
)
from tests.test_tree import (
    IMAGE_PAD,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
    identity,
    image,
    refused,
    text_tree,
    tree_print,
    video,
    vl,
)

Spans = list[tuple[bytes, int, int]]


def spans_of(node: Node) -> Spans:
    return [(item.identity, start, stop) for item, start, stop in node.media_spans()]


def conversation() -> tuple[Session, list[Node]]:
    """system [0, 3), image question [3, 11), reply [11, 15), an empty turn, question [15, 17)."""
    session = SessionStore.in_memory().create("s", scheme=vl())
    system = session.append(session.root, [1, 2, 3], role="system", metadata={"m": "system"})
    ask = [VISION_START, *[IMAGE_PAD] * 4, VISION_END, 8, 9]
    question = session.append(system, ask, media=[image("a", 1)], metadata={"m": ["question"]}, key="q")
    draft = session.draft(question, metadata={"m": "reply"})
    draft.extend([20, 21, 22, 23])
    answer = draft.commit("length")
    empty = session.append(answer, [], role="tool")
    last = session.append(empty, [30, 31])
    return session, [session.root, system, question, answer, empty, last]


# --- truncate and drop_last ---------------------------------------------------------------------------------------------


def test_truncate_at_every_length() -> None:
    session, (root, system, question, answer, empty, last) = conversation()
    ids = last.input_ids().tolist()
    boundaries = {0: root, 3: system, 11: question, 15: empty, 17: last}
    for length in range(18):
        before = tree_print(session)
        if 4 < length < 8:
            error = refused(session, MediaSpanError, lambda length=length: session.truncate(last, length))  # type: ignore[misc]
            assert (error.item, error.span) == (question.media[0], (4, 8))
            continue
        cut = session.truncate(last, length)
        assert cut.input_ids().tolist() == ids[:length]
        assert cut.positions().tolist() == last.positions(0, length).tolist()
        assert spans_of(cut) == [span for span in spans_of(last) if span[2] <= length]
        assert cut.next_position <= last.next_position
        if length in boundaries:
            assert cut is boundaries[length]
            assert tree_print(session) == before
            continue
        source = next(node for node in last.path() if node.start < length < node.stop)
        assert (cut.parent, cut.start, cut.stop) == (source.parent, source.start, length)
        assert (cut.role, cut.origin, cut.finish_reason, cut.tail_policy, cut.key) == (source.role, source.origin, None, None, None)
        assert cut.metadata == source.metadata
        assert cut.links == (Link("prefix_of", source.id, length),)
        assert cut in session.siblings(source)
        after = tree_print(session)
        assert after[1][: before[0]] == before[1]
        assert session.truncate(last, length) is cut, "again"
        assert session.drop_last(last, 17 - length) is cut
        assert tree_print(session) == after
    assert session.truncate(answer, 15) is answer
    assert session.truncate(root, 0) is root


@pytest.mark.parametrize("length", [-1, 18, 2**70, -(2**70)])
def test_lengths_outside_the_path(length: int) -> None:
    session, nodes = conversation()
    error = refused(session, OutOfRange, lambda: session.truncate(nodes[-1], length))
    assert (error.value, error.limit) == (length, 17)
    error = refused(session, OutOfRange, lambda: session.drop_last(nodes[-1], length))
    assert (error.value, error.limit) == (length, 17)


@pytest.mark.parametrize("length", [1.0, "1", None, True, Position(1), [1]])
def test_a_length_is_a_token_index(length: Any) -> None:
    session, nodes = conversation()
    refused(session, TypeError, lambda: session.truncate(nodes[-1], length))
    refused(session, TypeError, lambda: session.drop_last(nodes[-1], length))
    three: Any = np.int64(3)
    assert session.truncate(nodes[-1], three) is nodes[1]


def test_drop_last_counts_from_the_end() -> None:
    session, (_, system, question, answer, empty, last) = conversation()
    assert session.drop_last(last, 0) is last
    assert session.drop_last(last, 2) is empty
    assert session.drop_last(last, 6) is question
    assert session.drop_last(answer, 12) is system
    assert session.drop_last(last, 17) is session.root
    cut = session.drop_last(answer, 1)
    assert cut.input_ids(11).tolist() == [20, 21, 22]
    assert cut.origin == "generated"


def test_a_cut_reply_keeps_the_positions_it_was_decoded_with() -> None:
    session = SessionStore.in_memory().create("s", scheme=vl("hf5", tokens_per_second=7))
    prompt = session.append(session.root, [1, *[VIDEO_PAD] * 6, 2], media=[video("v", 1)])
    draft = session.draft(prompt)
    draft.extend([3, 4, 5])
    answer = draft.commit()
    assert answer.positions().tolist() != answer.positions(mode="as_replayed").tolist()
    cut = session.truncate(answer, 10)
    for mode in ("as_decoded", "as_replayed"):
        assert cut.positions(mode=mode).tolist() == answer.positions(0, 10, mode).tolist()
    assert cut.mrope_position_delta == answer.mrope_position_delta
    assert session.append(cut, [6]).positions(10)[0, 0] == cut.positions()[0, -1] + 1


def test_what_is_cut_stays_and_grows_apart() -> None:
    tree = text_tree()
    tree, node = tree.append(tree.root, range(10))
    whole = tree
    tree, cut = tree.truncate(node, 4)
    tree, more = tree.append(cut, [100, 101])
    tree, other = tree.append(node, [200])
    assert more.input_ids().tolist() == [0, 1, 2, 3, 100, 101]
    assert other.input_ids().tolist() == [*range(10), 200]
    assert node.token_ids.tolist() == list(range(10))
    assert cut not in whole
    assert tree.append(tree.root, range(4))[1] is cut, "equal content is the same node, cut or appended"


def test_cuts_of_other_sessions_nodes() -> None:
    session, nodes = conversation()
    refused(session, UnknownNode, lambda: session.truncate(bytes(32), 1))
    stranger = text_tree().append(text_tree().root, [1, 2])[1]
    refused(session, UnknownNode, lambda: session.truncate(stranger, 1))
    refused(session, UnknownNode, lambda: session.rewrite(stranger, [(0, 1, [9])]))
    refused(session, UnknownNode, lambda: session.drop_last(stranger, 1))
    assert session.truncate(nodes[1].id, 2).token_ids.tolist() == [1, 2]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=120), st.data())
@settings(max_examples=60, deadline=None)
def test_the_deepest_node_that_ends_there(sizes: list[int], data: st.DataObject) -> None:
    """Long paths with many empty turns, against a walk along the path."""
    tree = text_tree()
    tree, node = tree.append(tree.root, [0])
    for size in sizes:
        tree, node = tree.append(node, [7] * size, role=data.draw(st.sampled_from(["user", "tool"])))
    path = node.path()
    for length in range(node.stop + 1):
        ends = [one for one in path if one.stop == length]
        cut_tree, cut = tree.truncate(node, length)
        if ends:
            assert cut is ends[-1]
            assert cut_tree is tree
        else:
            assert cut.parent is [one for one in path if one.stop < length][-1]
        assert cut.input_ids().tolist() == node.input_ids(0, length).tolist()
        inserted = tree.rewrite(node, [(length, length, [99])])[1]
        shared = [one for one in path if one.stop <= length]
        assert inserted.path()[: len(shared)] == tuple(shared)


# --- replace ------------------------------------------------------------------------------------------------------------


def test_replace_branches_and_moves_the_head() -> None:
    session, (_, system, question, answer, _, last) = conversation()
    first = session.set_head("main", last)
    before = tree_print(session)
    new = session.replace(question, [8, 8], head="main", expected=first, metadata={"m": 2}, key="r")
    assert (new.parent, new.role, new.token_ids.tolist(), new.key, new.origin) == (system, "user", [8, 8], "r", "input")
    assert new.metadata == {"m": 2}
    assert session.head("main").node is new
    assert session.head("main").version > first.version
    assert session.siblings(new) == (question,)
    assert tree_print(session)[1][: before[0]] == before[1], "what was replaced, and all below it, stays"
    assert last in session.tree
    again = session.replace(question, [8, 8], head="main", key="r")
    assert again is new
    assert session.replace(answer, [1], head="fresh", expected=None).role == "assistant"
    assert session.replace(answer.id, [1], head="fresh", role="tool").role == "tool"
    pictured = session.replace(question, [IMAGE_PAD] * 4, head="pic", media=[image("b", 0)])
    assert spans_of(pictured) == [(identity("b"), 3, 7)]
    assert sorted(session.heads) == ["fresh", "main", "pic"]


def test_a_replace_that_fails_leaves_neither_node_nor_head() -> None:
    session, (root, system, question, answer, _, last) = conversation()
    session.set_head("main", last)
    stale = session.head("main")
    session.set_head("main", answer)
    actual = session.head("main")
    error = refused(session, HeadMoved, lambda: session.replace(question, [5], head="main", expected=stale))
    assert error.actual == actual
    refused(session, HeadMoved, lambda: session.replace(question, [5], head="main", expected=last))
    refused(session, HeadMoved, lambda: session.replace(question, [5], head="none", expected=last))
    refused(session, NameTaken, lambda: session.replace(question, [5], head="main", expected=None))
    refused(session, OutOfRange, lambda: session.replace(question, [-5], head="main"))
    refused(session, OutOfRange, lambda: session.replace(root, [5], head="main"))
    refused(session, OutOfRange, lambda: session.replace(system, [], head="main"))
    refused(session, MediaSpanError, lambda: session.replace(question, [5], head="main", media=[image("a", 0)]))
    refused(session, KeyTaken, lambda: session.replace(question, [5], head="main", key="q"))
    refused(session, TypeError, lambda: session.replace(question, [5], head="main", metadata={"a": object()}))
    wrong: Any = 5
    refused(session, TypeError, lambda: session.replace(question, [5], head=wrong))
    refused(session, TypeError, lambda: session.replace(question, [5], head="main", expected=wrong))
    refused(session, UnknownNode, lambda: session.replace(bytes(32), [5], head="main"))
    assert session.append(system, [6]).input_ids().tolist() == [1, 2, 3, 6]


# --- rewrite ------------------------------------------------------------------------------------------------------------


def test_a_template_that_strips_reasoning() -> None:
    session, (_, _, question, answer, empty, last) = conversation()
    before = tree_print(session)
    new = session.rewrite(last, [Edit(12, 14)])
    assert new.input_ids().tolist() == [*last.input_ids(0, 12).tolist(), 23, 30, 31]
    path = new.path()
    assert path[:3] == last.path()[:3]
    head, stripped, tool, asked = path[3:]
    assert (head.token_ids.tolist(), head.links) == ([20], (Link("prefix_of", answer.id, 12),))
    assert (stripped.token_ids.tolist(), stripped.links) == ([23], (Link("derived_from", answer.id, 12),))
    assert (tool.token_ids.tolist(), tool.links) == ([], (Link("derived_from", empty.id, 12),))
    assert (asked.token_ids.tolist(), asked.links) == ([30, 31], (Link("derived_from", last.id, 12),))
    assert [node.role for node in path[3:]] == ["assistant", "assistant", "tool", "user"]
    assert [node.origin for node in path[3:]] == ["generated", "input", "input", "input"]
    assert [dict(node.metadata) for node in path[3:]] == [{"m": "reply"}, {"m": "reply"}, {}, {}]
    assert question in path
    assert tree_print(session)[1][: before[0]] == before[1]
    assert session.rewrite(last, [(12, 14)]) is new
    assert len(session.tree) == before[0] + 4


def test_a_whole_turn_goes_and_media_move_with_their_tokens() -> None:
    session, (root, _, question, _, _, last) = conversation()
    new = session.rewrite(last, [(0, 3, [])])
    assert new.input_ids().tolist() == last.input_ids(3).tolist()
    assert spans_of(new) == [(identity("a"), 1, 5)]
    assert new.path()[1].links == (Link("derived_from", question.id, 0),)
    assert new.path()[1].parent is root
    assert new.depth == last.depth - 1
    moved = session.rewrite(last, [(1, 2, [5, 5, 5]), (9, 10, [])])
    assert spans_of(moved) == [(identity("a"), 6, 10)]
    assert moved.input_ids().tolist() == [1, 5, 5, 5, 3, *last.input_ids(3, 9).tolist(), *last.input_ids(10).tolist()]
    gone = session.rewrite(last, [(3, 9, [77])])
    assert spans_of(gone) == []
    assert gone.input_ids().tolist() == [1, 2, 3, 77, *last.input_ids(9).tolist()]
    swapped = session.rewrite(last, [(4, 8, [IMAGE_PAD] * 6, [image("b", 0, 2, 3)])])
    assert spans_of(swapped) == [(identity("b"), 4, 10)]
    both = session.rewrite(last, [(3, 3, [VISION_START, *[IMAGE_PAD] * 4], [image("b", 1)])])
    assert spans_of(both) == [(identity("b"), 4, 8), (identity("a"), 9, 13)]


def test_edits_that_change_nothing_give_the_node_itself() -> None:
    session, nodes = conversation()
    last = nodes[-1]
    before = tree_print(session)
    changes: list[Any] = [[], [(0, 0, [])], [(0, 3, [1, 2, 3])], [(0, 1, [1]), (16, 17, [31])], [(17, 17, [])], iter([(5, 5, [])])]
    for edits in changes:
        assert session.rewrite(last, edits) is last
    assert session.rewrite(session.root, []) is session.root
    assert tree_print(session) == before
    partly = session.rewrite(last, [(0, 3, [1, 2, 3]), (16, 17, [9])])
    assert partly.input_ids().tolist() == [*last.input_ids(0, 16).tolist(), 9]
    assert partly.links == (Link("derived_from", last.id, 16),)
    assert partly.path()[:5] == tuple(nodes[:5])


def test_the_same_tokens_at_the_start_of_an_edit_are_shared() -> None:
    session, nodes = conversation()
    last = nodes[-1]
    new = session.rewrite(last, [(12, 15, [21, 22, 99])])
    assert new.input_ids(11).tolist() == [20, 21, 22, 99, 30, 31]
    assert new.links[0].reused_tokens == 14
    assert new.path()[3].token_ids.tolist() == [20, 21, 22]
    cut = session.rewrite(last, [(15, 17, [])])
    assert cut is nodes[4]
    shorter = session.rewrite(last, [(16, 17, [])])
    assert shorter is session.truncate(last, 16)


def test_insertions_at_both_ends() -> None:
    session, nodes = conversation()
    last = nodes[-1]
    front = session.rewrite(last, [(0, 0, [99])])
    assert front.input_ids().tolist() == [99, *last.input_ids().tolist()]
    assert front.path()[1].role == "system"
    back = session.rewrite(last, [(17, 17, [99])])
    assert back.input_ids().tolist() == [*last.input_ids().tolist(), 99]
    assert back.path()[:6] == last.path()
    assert back.links == (Link("derived_from", last.id, 17),)
    rooted = session.rewrite(session.root, [(0, 0, [1, 2])])
    assert (rooted.parent, rooted.token_ids.tolist()) == (session.root, [1, 2])


def test_a_rewritten_reply_is_prefilled() -> None:
    session = SessionStore.in_memory().create("s", scheme=vl("hf5", tokens_per_second=7))
    prompt = session.append(session.root, [1, *[VIDEO_PAD] * 6, 2], media=[video("v", 1)])
    draft = session.draft(prompt)
    draft.extend([3, 4, 5])
    answer = draft.commit()
    new = session.rewrite(answer, [(8, 9, [])])
    assert new.origin == "input"
    assert new.positions().tolist() == new.positions(mode="as_replayed").tolist()
    assert new.positions(8)[0, 0] == prompt.next_position


@pytest.mark.parametrize(
    ("edits", "error"),
    [
        ([(-1, 2, [])], OutOfRange),
        ([(0, 18, [])], OutOfRange),
        ([(2, 1, [])], OutOfRange),
        ([(18, 18, [1])], OutOfRange),
        ([(0, 2, []), (1, 3, [])], OutOfRange),
        ([(2, 3, []), (0, 1, [])], OutOfRange),
        ([(0, 1, [-1])], OutOfRange),
        ([(0, 1, [2**31])], OutOfRange),
        ([(0.0, 1, [])], TypeError),
        ([(0, "1", [])], TypeError),
        ([(0, Position(1), [])], TypeError),
        ([(True, 2, [])], TypeError),
        ([(0, 1, [1.5])], TypeError),
        ([(0, 1, None)], TypeError),
        ([(0, 1, "ab")], TypeError),
        ([(0,)], TypeError),
        ([(0, 1, [], [], 5)], TypeError),
        ([5], TypeError),
        (["ab"], TypeError),
        (5, TypeError),
        (None, TypeError),
        ([(0, 1, [1], ["image"])], TypeError),
        ([(0, 1, [1], 5)], TypeError),
        ([(5, 6, [])], MediaSpanError),
        ([(5, 6, [IMAGE_PAD])], MediaSpanError),
        ([(0, 5, [])], MediaSpanError),
        ([(7, 12, [])], MediaSpanError),
        ([(5, 5, [1])], MediaSpanError),
        ([(4, 6, []), (6, 8, [])], MediaSpanError),
        ([(0, 1, [1], [image("b", 0)])], MediaSpanError),
        ([(0, 1, [1] * 4, [image("b", 1)])], MediaSpanError),
        ([(0, 1, [1] * 5, [image("b", 0, 1, 3)]), (5, 6, [])], MediaSpanError),
        ([(0, 1, [1] * 5, [MediaItem("image", identity("b"), [(0, 5)], (1, 4, 4))])], MediaSpanError),
        ([(0, 1, [1] * 5)], LimitExceeded),
        ([(0, 1, [2]), (16, 17, [1] * 5)], LimitExceeded),
        ([(0, 1, [VIDEO_PAD] * 3, [video("w", 0, 3, 1, 1, 10.0)])], PositionLimitExceeded),
    ],
)
def test_edits_that_are_refused_leave_nothing(edits: Any, error: type[Exception]) -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme=vl("sglang", max_position_limit=26), max_tokens=20)
    system = session.append(session.root, [1, 2, 3], role="system")
    question = session.append(system, [VISION_START, *[IMAGE_PAD] * 4, VISION_END, 8, 9], media=[image("a", 1)])
    last = session.append(question, range(20, 26))
    session.set_head("main", last)
    refused(session, error, lambda: session.rewrite(last, edits))
    assert session.rewrite(last, [(0, 1, [9])]).input_ids().tolist() == [9, *last.input_ids(1).tolist()]


def splice(old: list[int], spans: Spans, edits: list[Edit]) -> tuple[list[int], Spans, dict[int, int]]:
    """The new list, the spans in it, and where each token that stays went."""
    new: list[int] = []
    added: Spans = []
    places: dict[int, int] = {}
    at = 0
    for edit in [*edits, Edit(len(old), len(old), [])]:
        for index in range(at, edit.start):
            places[index] = len(new)
            new.append(old[index])
        for item in edit.media:
            added += [(item.identity, len(new) + offset, len(new) + offset + size) for offset, size in item.spans]
        new += np.asarray(edit.token_ids, int).tolist()
        at = edit.stop
    kept = [
        (name, places[start], places[stop - 1] + 1) for name, start, stop in spans if all(at in places for at in range(start, stop))
    ]
    return new, sorted(kept + added, key=lambda span: span[1]), places


def turn_after(node: Node, edits: list[Edit], is_last: bool) -> tuple[list[int], Spans]:
    """Tokens and spans, from 0, of the turn in a node's place: edits belong to the turn they start in."""
    old = node.token_ids.tolist()
    new: list[int] = []
    spans: Spans = []
    places: dict[int, int] = {}
    for index in range(node.start, node.stop + 1):
        for edit in edits:
            if edit.start == index and (index < node.stop or is_last):
                spans += [
                    (item.identity, len(new) + offset, len(new) + offset + size)
                    for item in edit.media
                    for offset, size in item.spans
                ]
                new += np.asarray(edit.token_ids, int).tolist()
        if index < node.stop and not any(edit.start <= index < edit.stop for edit in edits):
            places[index - node.start] = len(new)
            new.append(old[index - node.start])
    for item in node.media:
        spans += [(item.identity, places[offset], places[offset] + size) for offset, size in item.spans if offset in places]
    return new, sorted(spans, key=lambda span: span[1])


def first_change(node: Node, edits: list[Edit]) -> tuple[int, int] | None:
    """How many nodes stay whole, and how many tokens stay in all; None if nothing changes."""
    for number, turn in enumerate(node.path()):
        new, spans = turn_after(turn, edits, turn is node)
        old = turn.token_ids.tolist()
        had = [(item.identity, offset, offset + size) for item in turn.media for offset, size in item.spans]
        if (new, spans) == (old, had):
            continue
        same = 0
        while same < min(len(new), len(old)) and old[same] == new[same]:
            same += 1
        same = min([same, *(start for _, start, _ in set(spans) ^ set(had))])
        same = min([same, *(start for _, start, stop in had if start < same < stop)])
        return number + (same == len(old)), turn.start + same
    return None


class Case:
    """A path and edits of it."""

    def __init__(self, tree: SessionTree, node: Node, edits: list[Edit]) -> None:
        self.tree, self.node, self.edits = tree, node, edits

    def __repr__(self) -> str:
        turns = [(one.token_ids.tolist(), one.role, [item.fields() for item in one.media]) for one in self.node.path()[1:]]
        return f"Case({self.node.scheme.name}, {turns}, {self.edits})"


@st.composite
def paths_and_edits(draw: st.DrawFn) -> Case:
    rule = draw(st.sampled_from(["hf5", "sglang", "vllm"]))
    tree = SessionTree(vl(rule))
    node = tree.root
    small = st.lists(st.integers(0, 2), max_size=3)
    count = 0

    def pieces(least: int) -> tuple[list[int], list[MediaItem]]:
        nonlocal count
        ids: list[int] = draw(st.lists(st.integers(0, 2), min_size=least, max_size=3))
        media = []
        for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
            count += 1
            if draw(st.booleans()):
                media.append(image(f"i{count}", len(ids), 1, 2))
                ids += [IMAGE_PAD] * 2
            else:
                media.append(video(f"v{count}", len(ids), 3, 1, 1))
                ids += [VIDEO_PAD] * 3
            ids += draw(small)
        return ids, media

    for turn in range(draw(st.integers(1, 5))):
        ids, media = pieces(1 if node.parent is None else 0)
        role = draw(st.sampled_from(["user", "assistant"]))
        tree, node = tree.append(node, ids, media=media, role=role, metadata={"turn": turn})
    spans = spans_of(node)
    free = [at for at in range(node.stop + 1) if not any(start < at < stop for _, start, stop in spans)]
    number = draw(st.integers(0, 3))
    cuts = sorted(draw(st.lists(st.sampled_from(free), min_size=2 * number, max_size=2 * number)))
    old = node.input_ids().tolist()
    edits = []
    for start, stop in zip(cuts[::2], cuts[1::2], strict=True):
        if draw(st.booleans()):
            ids, media = pieces(0)
        else:
            common = draw(st.integers(0, stop - start))
            ids, media = old[start : start + common] + draw(small), []
        edits.append(Edit(start, stop, ids, media))
    return Case(tree, node, edits)


@given(paths_and_edits())
@settings(max_examples=250, deadline=None)
def test_rewrite_against_a_splice_of_lists(case: Case) -> None:
    tree, node, edits = case.tree, case.node, case.edits
    before = tree_print(tree)
    old, spans = node.input_ids().tolist(), spans_of(node)
    expected, expected_spans, places = splice(old, spans, edits)
    change = first_change(node, edits)
    tree2, new = tree.rewrite(node, edits)
    assert tree_print(tree) == before
    assert new.input_ids().tolist() == expected
    assert spans_of(new) == expected_spans
    if change is None:
        assert new is node
        assert tree2 is tree
        return
    whole_nodes, shared = change
    items = [item.with_spans([(start, stop - start)]) for item, start, stop in new.media_spans()]
    whole, state = node.scheme.extend(node.scheme.initial_state(), expected, items)
    assert new.positions().tolist() == whole.tolist()
    assert (new.next_position, new.mrope_position_delta) == (
        node.scheme.next_position(state),
        node.scheme.mrope_position_delta(state),
    )
    # What ends before the change is shared, object for object.
    old_path, new_path = node.path(), new.path()
    same = old_path[:whole_nodes]
    assert len(new_path) >= len(same)
    assert all(one is two for one, two in zip(same, new_path, strict=False))
    # What follows is made anew: each turn of one source, in order, with its role and metadata.
    sources = {one.id: one for one in old_path}
    depths = []
    first = 0  # depth of the first turn that the next one may stand for
    for made in new_path[len(same) :]:
        if made in tree:
            continue  # what a rewrite gives may have been there before
        (link,) = made.links
        source = sources[link.node_id]
        depths.append(source.depth)
        stood_for = old_path[min(source.depth, first) : source.depth + 1]  # the link names the last of them
        first = source.depth + (link.kind != "prefix_of")  # what follows the cut in a turn is of that turn still
        assert (made.role or "", made.metadata) in [(one.role or made.role, one.metadata) for one in stood_for]
        assert made.origin == "input"
        common = [one for one, two in zip(old_path, new_path, strict=False) if one is two]
        assert link.reused_tokens == max(shared, common[-1].stop), "what an edit made may be what stood there"
        assert new.input_ids(0, shared).tolist() == old[:shared]
        assert link.kind == ("prefix_of" if len(made) and made.stop <= shared else "derived_from")
        for index in range(source.start, source.stop):
            if index in places and made.start <= places[index] < made.stop:
                assert old[index] == made.token_ids[places[index] - made.start]
    assert depths == sorted(depths)
    for index, place in places.items():
        if index >= shared:
            home = next(one for one in new_path if one.start <= place < one.stop)
            source = next(one for one in old_path if one.start <= index < one.stop)
            assert home in tree or home.links[0].node_id == source.id, "a token that stays is in the turn made from its own"
    assert tree2.rewrite(node, edits) == (tree2, new), "again: nothing new"


@given(paths_and_edits(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_rewrite_that_cuts_an_item_leaves_nothing(case: Case, data: st.DataObject) -> None:
    tree, node = case.tree, case.node
    spans = spans_of(node)
    if not spans:
        return
    _, start, stop = data.draw(st.sampled_from(spans))
    inside = data.draw(st.integers(start + 1, stop - 1))
    edit = data.draw(
        st.sampled_from([Edit(inside, inside, [1]), Edit(inside, node.stop, []), Edit(0, inside, [7]), Edit(start, inside, [7])])
    )
    refused(tree, MediaSpanError, lambda: tree.rewrite(node, [edit]))
    refused(tree, MediaSpanError, lambda: tree.truncate(node, inside))


def test_rewrites_in_a_session_and_heads() -> None:
    session, nodes = conversation()
    head = session.set_head("main", nodes[-1])
    new = session.rewrite(nodes[-1], [(0, 1, [5])])
    assert session.head("main") == head, "a rewrite moves no head"
    assert isinstance(session.set_head("main", new, expected=head), Head)


def test_what_replaces_a_turns_end_stays_in_that_turn() -> None:
    """However much of the replacement is what was there: what is new belongs to the turn that the edit starts in."""
    tree = SessionTree("text@hf5")
    tree, system = tree.append(tree.root, [1, 2], role="system", metadata={"turn": 0})
    tree, empty = tree.append(system, [], role="tool")
    tree, user = tree.append(empty, [3, 4], role="user")
    tree, new = tree.rewrite(user, [(1, 3, [2, 9])])
    turns = [(node.role, node.token_ids.tolist()) for node in new.path()[1:]]
    assert turns == [("system", [1, 2]), ("system", [9]), ("tool", []), ("user", [4])]
    assert new.path()[1] is system
    assert new.path()[2].metadata == {"turn": 0}
    assert {link.reused_tokens for node in new.path()[2:] for link in node.links} == {2}


def test_what_happens_to_be_the_same_after_a_deletion_is_shared() -> None:
    tree = SessionTree("text@hf5")
    tree, node = tree.append(tree.root, [7, 7, 8, 9])
    tree, new = tree.rewrite(node, [(0, 1)])
    assert [(turn.token_ids.tolist(), turn.links[0].kind, turn.links[0].reused_tokens) for turn in new.path()[1:]] == [
        ([7], "prefix_of", 1),
        ([8, 9], "derived_from", 1),
    ]


def test_equal_samples_stay_apart_when_they_are_rewritten() -> None:
    session = SessionStore.in_memory().create("s", scheme="text@hf5")
    prompt = session.append(session.root, [1, 2])
    samples = []
    for number in range(3):
        draft = session.draft(prompt, metadata={"sample": number})
        draft.extend([7, 8, 9])
        samples.append(draft.commit())
    rewritten = [session.rewrite(sample, [(2, 3)]) for sample in samples]
    assert len(set(rewritten)) == 3
    assert [node.metadata["sample"] for node in rewritten] == [0, 1, 2]
    assert [node.links[0].node_id for node in rewritten] == [sample.id for sample in samples]
    assert [session.rewrite(sample, [(2, 3)]) for sample in samples] == rewritten
    assert session.rewrite(samples[0], [(3, 4)]) not in rewritten


def test_a_rewrite_may_use_the_room_that_its_replies_stood_in() -> None:
    session = SessionStore.in_memory().create("s", scheme="text@hf5", max_tokens=40, reserve_output=20)
    prompt = session.append(session.root, range(20))
    draft = session.draft(prompt)
    draft.extend(range(15))
    reply = draft.commit()
    assert session.rewrite(reply, [(20, 22)]).stop == 33
    assert session.rewrite(reply, [(0, 1, [99])]).stop == 35
    before = tree_print(session)
    with pytest.raises(LimitExceeded) as caught:
        session.rewrite(reply, [(0, 1, [98, 99])])
    assert (caught.value.value, caught.value.limit) == (36, 20)
    assert tree_print(session) == before


def test_a_turn_with_a_table_of_its_own_is_cut_with_its_table() -> None:
    session = SessionStore.in_memory().create("s", scheme="text@hf5")
    before = session.append(session.root, [5])
    table = [[1, 2, 9, 4]]
    node = session.append(before, [1, 2, 3, 4], positions=table)
    assert (node.next_position, node.mrope_position_delta) == (10, 5)
    cut = session.truncate(node, 3)
    assert cut.positions().tolist() == [[0, 1, 2]]
    assert (cut.next_position, cut.mrope_position_delta) == (3, 0)
    assert session.truncate(node, 4).positions().tolist() == [[0, 1, 2, 9]]
    own = session.append(before, [1, 2, 3, 4], positions=ExternalPositions(table, next_position=50))
    with pytest.raises(Unsupported):
        session.truncate(own, 3)
    with pytest.raises(Unsupported):
        session.rewrite(node, [(0, 1, [6])])


def test_a_keyed_turn_can_be_given_one_picture_or_another() -> None:
    session = SessionStore.in_memory().create("s", scheme=vl("hf5"))
    prompt = session.append(session.root, [1, 2, 3])
    draft = session.draft(prompt)
    draft.extend([4, 5])
    reply = draft.commit()
    shown = [session.rewrite(reply, [(5, 5, [9] * 4, [image(name, 0)])]) for name in ("a", "b", "a")]
    assert shown[0] == shown[2] != shown[1]
    assert [spans_of(node) for node in shown[:2]] == [[(identity("a"), 5, 9)], [(identity("b"), 5, 9)]]


def test_an_empty_turn_inside_a_split_item_is_rewritten_with_it() -> None:
    session = SessionStore.in_memory().create("s", scheme=vl("hf5"))
    start = session.append(session.root, [1, 2, 3])
    first = MediaItem("image", identity("i"), [(0, 2)], (1, 4, 4), unfinished=True)
    rest = MediaItem("image", identity("i"), [(0, 2)], (1, 4, 4), placeholders_before=2)
    part = session.append(start, [9, 9], media=[first])
    empty = session.append(part, [], role="tool")
    whole = session.append(empty, [9, 9], media=[rest])
    for node in (empty, whole):
        new = session.rewrite(node, [(0, 1, [7])])
        assert new.input_ids().tolist() == [7, *node.input_ids(1).tolist()]
        assert [turn.role for turn in new.path()] == [turn.role for turn in node.path()]
        assert new.positions().tolist() == node.positions().tolist()
        assert spans_of(new) == spans_of(node)


@given(paths_and_edits(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_the_shared_prefix_of_two_paths(case: Case, decode: bool) -> None:
    """As a comparison from the first token says: ids, media and positions alike."""
    tree, old = case.tree, case.node
    if decode:
        session = SessionStore.in_memory().create("s", scheme=old.scheme)
        nodes = {tree.root.id: session.root}
        for turn in old.path()[1:]:
            assert turn.parent is not None
            parent = nodes[turn.parent.id]
            if turn.role == "assistant" and not turn.media:
                draft = session.draft(parent)
                draft.extend(turn.token_ids)
                if not len(draft) and parent.parent is None:
                    return
                nodes[turn.id] = draft.commit()
            else:
                nodes[turn.id] = session.append(parent, turn.token_ids, media=turn.media, role=turn.role or "")
        old, new = nodes[old.id], session.rewrite(nodes[old.id], case.edits)
    else:
        _, new = tree.rewrite(old, case.edits)
    pairs = [(old, new), (new, old), (old, old), (new, new.path()[len(new.path()) // 2])]
    for one, two in pairs:
        stop = min(one.stop, two.stop)
        same = 0
        while same < stop:
            if one.input_ids(same, same + 1) != two.input_ids(same, same + 1):
                break
            if one.positions(same, same + 1).tolist() != two.positions(same, same + 1).tolist():
                break
            ones, twos = one.media_spans(same, same + 1), two.media_spans(same, same + 1)
            if [item.content() for item, _, _ in ones] != [item.content() for item, _, _ in twos]:
                break
            same += 1
        assert one.shared_prefix_len(two) == same
        if one is old and two is new:
            reported = [link.reused_tokens for turn in new.path() for link in turn.links if link.kind == "derived_from"]
            assert all(tokens <= same for tokens in reported)


def test_paths_of_different_sessions_share_what_is_alike_in_one_namespace() -> None:
    store = SessionStore.in_memory()
    one, two, other = (store.create(name, scheme="text@hf5", namespace=name[0]) for name in ("a1", "a2", "b"))
    nodes = [session.append(session.append(session.root, [1, 2]), [3, last]) for session, last in ((one, 4), (two, 5), (other, 4))]
    assert nodes[0].shared_prefix_len(nodes[1]) == 3
    assert nodes[0].shared_prefix_len(nodes[2]) == 0
