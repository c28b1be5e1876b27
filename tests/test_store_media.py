"""CASES.md C73 to C77 and C80 where they are met: features through the store, and what the bridge asks of them."""

from __future__ import annotations

import gc
import itertools
import pickle
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine_bridge import request_inputs
from sessiontree import (
    Draft,
    Edit,
    Features,
    KeyTaken,
    LimitExceeded,
    MediaItem,
    NeedsMedia,
    Node,
    OutOfRange,
    Session,
    SessionStore,
    SessionTree,
    SessionTreeError,
    StoreClosed,
)
from sessiontree.features import OVERHEAD_BYTES
from sessiontree.testing.together import in_threads
from tests.reference import Segment
from tests.toy import (
    A_TABLE,
    IMG,
    SECONDS,
    VID,
    a_turn,
    check,
    fingerprint,
    grow,
    histories,
    image,
    media,
    reply,
    same,
    shown,
    spans_of,
    toy_scheme,
    tree_digest,
    turn,
    video,
)

EXAMPLES = settings(max_examples=60, deadline=None)
SIZE = 1024
UNIT = 4 * SIZE + OVERHEAD_BYTES  # what the pixels of one item count


def pixels(number: float) -> NDArray[np.float32]:
    return np.full(SIZE, number, np.float32)


def new_store(units: float = 1000) -> SessionStore:
    """A store with room for the pixels of so many items."""
    return SessionStore.in_memory(feature_bytes=int(units * UNIT))


def opened(store: SessionStore, name: str = "s") -> Session:
    return store.create(name, scheme=toy_scheme())


def album(store: SessionStore, numbers: Sequence[int], name: str = "s") -> Node:
    """A turn of 9 tokens with one image for each number; the last node. Its image stands at 3 to 7."""
    session = opened(store, name)
    return grow(session, session.root, *(a_turn(number) for number in numbers))


def items_of(node: Node | Draft) -> list[MediaItem]:
    """One for each span, in path order."""
    return [item for item, _, _ in node.media_spans()]


def due(node: Node | Draft, prefix_len: int) -> list[MediaItem]:
    """The items with a span that ends behind ``prefix_len``, each content once, in path order: from spans of the whole path."""
    found: dict[Any, MediaItem] = {}
    for item, _, stop in node.media_spans():
        if stop > prefix_len:
            found.setdefault(item.content(), item)
    return list(found.values())


def needed(node: Node | Draft, prefix_len: int = 0, **how: Any) -> list[MediaItem]:
    """What a request is refused for; nothing where it is not."""
    try:
        request_inputs(node, prefix_len, features=True, **how)
    except NeedsMedia as error:
        return list(error.items)
    return []


def plain_inputs(node: Node | Draft, prefix_len: int = 0, **how: Any) -> list[Any]:
    inputs = request_inputs(node, prefix_len, **how)
    tensors = (inputs.input_ids, inputs.positions, inputs.mrope_position_delta)
    return [*(tensor.tolist() for tensor in tensors), inputs.media_spans, inputs.first_rows, inputs.needed_items]


@contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """How many bytes are allocated that were not before."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]

        def grown() -> int:
            gc.collect()
            return tracemalloc.get_traced_memory()[0] - before

        yield grown
    finally:
        tracemalloc.stop()


# --- C75: what has to be encoded again is named, exactly ----------------------------------------------------------------
def test_c75_exactly_the_items_whose_span_passes() -> None:
    store = new_store()
    session = opened(store)
    node = grow(
        session, session.root, a_turn(0), reply(8, 9), a_turn(1), turn(4, *shown(video(2)), 5), a_turn(0), a_turn(2), reply(6)
    )
    first, second, clip, again, last = items_of(node)
    assert spans_of(node)[0][1:] == (3, 7)
    assert first.content() == again.content()
    expected = {0: [first, second, clip, last], 6: [first, second, clip, last]}
    expected |= {7: [second, clip, again, last], 11: [second, clip, again, last], 17: [second, clip, again, last]}
    expected |= {18: [clip, again, last], node.stop - 2: [], node.stop: []}
    for prefix_len, items in expected.items():
        assert needed(node, prefix_len) == items, prefix_len
    for prefix_len in range(node.stop + 1):
        assert needed(node, prefix_len) == due(node, prefix_len) == list(request_inputs(node, prefix_len).needed_items)
        assert needed(node, prefix_len, mode="as_replayed") == due(node, prefix_len)
    with pytest.raises(NeedsMedia) as caught:
        request_inputs(node, features=True)
    assert isinstance(caught.value, SessionTreeError)
    assert isinstance(caught.value.items, tuple)
    for item in (first, second, clip, last):
        assert item.identity[:4].hex() in str(caught.value)
    for prefix_len in (-1, node.stop + 1):  # a window that cannot be is no question of features
        with pytest.raises(OutOfRange):
            request_inputs(node, prefix_len, features=True)


def test_c75_what_is_put_is_no_longer_asked_for() -> None:
    store = new_store()
    node = album(store, [0, 1, 0, 2, 1])
    zero, one, _, two, _ = items_of(node)
    assert needed(node) == [zero, one, two]
    store.put_features(one.with_spans([(77, 4)]), pixels(1))  # the same content, wherever it stands
    assert needed(node) == [zero, two]
    store.put_features(zero, pixels(0))
    assert needed(node) == [two]
    assert needed(node, 3 * 9 + 7) == []
    store.put_features(two, pixels(2))
    inputs = request_inputs(node, features=True)
    assert inputs.features is not None
    assert inputs.needed_items == (zero, one, two)
    assert [each["features"][0] for each in inputs.features] == [0, 1, 2]
    for prefix_len in range(node.stop + 1):
        window = request_inputs(node, prefix_len, features=True)
        assert window.features is not None
        assert len(window.features) == len(window.needed_items)
        for item, features in zip(window.needed_items, window.features, strict=True):
            assert features.content == item.content()
            assert features is store.get_features(item)
    assert request_inputs(node).features is None, "only where they are asked for"
    store.drop_features(one)
    del inputs, window, features
    assert needed(node) == [one]


@EXAMPLES
@given(histories(), st.data())
def test_c75_any_history_any_window_any_features(turns: list[Segment], data: st.DataObject) -> None:
    store = new_store()
    session = opened(store)
    node = grow(session, session.root, *turns)
    source: Node | Draft = node
    if data.draw(st.booleans()):
        source = session.draft(node)
        source.extend(data.draw(st.lists(st.integers(0, 9), max_size=3)))
    contents = list({item.content(): item for item in items_of(source)}.values())
    held = data.draw(st.lists(st.sampled_from(contents), unique=True)) if contents else []
    for item in held:
        store.put_features(item, pixels(items_of(source).index(item)))
    before = fingerprint(node)
    prefix_len = data.draw(st.integers(0, source.stop))
    wanted = due(source, prefix_len)
    missing = [item for item in wanted if item.content() not in {other.content() for other in held}]
    assert needed(source, prefix_len) == missing
    for item in missing:
        store.put_features(item, pixels(-1))
    inputs = request_inputs(source, prefix_len, features=True)
    assert inputs.features is not None
    assert [features.content for features in inputs.features] == [item.content() for item in inputs.needed_items]
    assert list(inputs.needed_items) == wanted
    assert plain_inputs(source, prefix_len)[-1] == inputs.needed_items
    assert inputs.input_ids.tolist() == source.input_ids(prefix_len).tolist()
    assert fingerprint(node) == before


def test_c75_one_content_with_another_grid_is_asked_for_on_its_own() -> None:
    store = new_store()
    session = opened(store)
    wide, tall = (MediaItem("image", bytes(32), [(0, 2)], grid) for grid in ((1, 2, 4), (1, 4, 2)))
    clip = MediaItem("video", bytes(32), [(0, 2)], (2, 2, 2), SECONDS)
    node = session.root
    for item, token in ((wide, IMG), (tall, IMG), (clip, VID), (wide, IMG)):
        node = session.append(node, [token] * 2, media=[item])
    assert needed(node) == [wide, tall, clip]
    store.put_features(tall, pixels(1))
    assert needed(node) == [wide, clip]
    store.put_features(wide, pixels(2))
    store.put_features(clip, pixels(3))
    inputs = request_inputs(node, features=True)
    assert [features["features"][0] for features in inputs.features or ()] == [2, 1, 3]


def test_c75_the_parts_of_one_item_are_one_content() -> None:
    store = new_store()
    session = opened(store)
    parts = [
        MediaItem("image", bytes(32), [(1, 3)], (1, 4, 8), unfinished=True),
        MediaItem("image", bytes(32), [(0, 2)], (1, 4, 8), placeholders_before=3, unfinished=True),
        MediaItem("image", bytes(32), [(0, 3)], (1, 4, 8), placeholders_before=5),
    ]
    node = session.append(session.root, [1, *[IMG] * 3], media=[parts[0]])
    node = session.append(node, [IMG] * 2, media=[parts[1]])
    node = session.append(node, [IMG] * 3, media=[parts[2]])
    for prefix_len, item in {0: parts[0], 3: parts[0], 4: parts[1], 5: parts[1], 6: parts[2], 8: parts[2]}.items():
        assert needed(node, prefix_len) == [item]
        assert request_inputs(node, prefix_len).first_rows[0] == max(0, prefix_len - 1)
    assert needed(node, 9) == []
    features = store.put_features(parts[1], pixels(7))
    for prefix_len in range(9):
        assert request_inputs(node, prefix_len, features=True).features == (features,)
    assert request_inputs(node, 9, features=True).features == ()


def test_c75_a_preempted_request_asks_again() -> None:
    """Prefill, decode, lose the KV cache and the features, come back: from the draft alone."""
    store = new_store()
    node = album(store, [0, 1])
    session = store.get("s")
    for number, item in enumerate(items_of(node)):
        store.put_features(item, pixels(number))
    draft = session.draft(node)
    assert request_inputs(draft, features=True).features is not None
    draft.extend([30, 31, 32])
    before = plain_inputs(draft)
    assert request_inputs(draft, node.stop, features=True).features == (), "decoding needs none"
    for item in items_of(node):
        store.drop_features(item)
    assert request_inputs(draft, node.stop, features=True).features == ()
    assert request_inputs(draft, draft.stop, features=True).features == ()
    assert needed(draft) == items_of(node)
    assert needed(draft, 8) == items_of(node)[1:]
    assert plain_inputs(draft) == before
    for number, item in enumerate(needed(draft)):
        store.put_features(item, pixels(number))
    again = request_inputs(draft, features=True)
    assert [features["features"][0] for features in again.features or ()] == [0, 1]
    committed = draft.commit()
    assert request_inputs(draft, features=True).features == request_inputs(committed, features=True).features
    assert plain_inputs(committed) == before


def test_c75_forks_and_branches_ask_the_same_store() -> None:
    store = new_store()
    node = album(store, [0, 1])
    session = store.get("s")
    zero, one = items_of(node)
    fork = store.fork(session, node.path()[1], "fork")
    branch = grow(fork, fork.node(node.path()[1].id), a_turn(2), reply(4))
    elsewhere = album(store, [1, 0], "another session")
    value = session.tree.append(node, [7])[1]  # a tree that nobody put into the session
    cut, rewritten = session.truncate(node, 17), session.rewrite(node, [Edit(0, 1, [9, 9])])
    two = items_of(branch)[1]
    asked: list[tuple[Node, list[MediaItem]]] = [
        *((node, [zero, one]), (branch, [zero, two]), (value, [zero, one]), (cut, [zero, one]), (rewritten, [zero, one])),
        (elsewhere, [one, zero]),
    ]
    for asking, items in asked:
        assert [item.content() for item in needed(asking)] == [item.content() for item in items]
        assert asking.feature_store is node.feature_store
    features = store.put_features(zero, pixels(0))
    for asking, items in asked:
        assert [item.content() for item in needed(asking)] == [item.content() for item in items if item is not zero]
    session.close()
    store.put_features(one, pixels(1))
    store.put_features(two, pixels(2))
    for asking, _ in asked:
        assert features in (request_inputs(asking, features=True).features or ()), "once, for all of them"
    fork.close()
    assert request_inputs(branch, features=True).features == (features, store.get_features(two))


def test_c75_two_stores_know_nothing_of_each_other() -> None:
    one, two = new_store(), new_store()
    node, twin = album(one, [0]), album(two, [0])
    assert node == twin
    features = one.put_features(items_of(node)[0], pixels(1))
    assert request_inputs(node, features=True).features == (features,)
    assert needed(twin) == items_of(twin), "equal, and of another store"
    other = two.put_features(items_of(node)[0], pixels(2))  # other pixels for the same identity: that store's own business
    assert (request_inputs(twin, features=True).features or ())[0]["features"][0] == 2
    assert (request_inputs(node, features=True).features or ())[0]["features"][0] == 1
    two.drop_features(items_of(node)[0])
    del other
    assert needed(twin) == items_of(twin)
    assert needed(node) == []
    below = two.get("s").append(node, [7])  # the other store's node as a parent: the path is this store's
    assert needed(below) == items_of(twin)
    assert (one.usage().feature_bytes, two.usage().feature_bytes) == (UNIT, 0)


def test_c75_a_fork_into_another_store_asks_the_store_its_path_is_of() -> None:
    here, there = new_store(), new_store()
    node = album(here, [0])
    fork = there.fork(here.get("s"), node, "fork")
    below = fork.append(node, [1])
    there.put_features(items_of(node)[0], pixels(1))
    assert needed(below) == items_of(node)
    here.put_features(items_of(node)[0], pixels(1))
    assert needed(below) == []


@pytest.mark.parametrize("end", ["session closed", "store closed", "store dropped", "no store", "pickled"])
def test_c75_without_a_store_features_are_asked_for_all_the_same(end: str) -> None:
    store = new_store()
    node = album(store, [0, 1, 0])
    items = items_of(node)
    expected = plain_inputs(node)
    held = [store.put_features(item, pixels(number)) for number, item in enumerate(items[:2])]
    if end == "session closed":
        store.get("s").close()
        assert request_inputs(node, features=True).features == tuple(held)
        return
    if end == "store closed":
        store.close()
        assert request_inputs(node, features=True).features == tuple(held), "what somebody holds is there"
        with pytest.raises(StoreClosed):
            store.put_features(items[0], pixels(0))
    elif end == "store dropped":
        store = SessionStore.in_memory()
        gc.collect()
        assert node.feature_store is None
        assert held[0]["features"][0] == 0, "readers own what they hold"
    elif end == "pickled":
        node = pickle.loads(pickle.dumps(node))
    else:
        tree = SessionTree(toy_scheme())
        node = tree.root
        for number in (0, 1, 0):
            tree, node = tree.append(node, a_turn(number).tokens, media=media(a_turn(number)))
    held.clear()
    if end == "store closed":
        gc.collect()
    for prefix_len in range(node.stop + 1):
        if end != "store closed":
            assert needed(node, prefix_len) == due(node, prefix_len)
        assert request_inputs(node, prefix_len).features is None
    assert plain_inputs(node) == expected, "nothing else is"
    assert request_inputs(node, node.stop, features=True).features == ()
    text = node.path()[0]
    assert request_inputs(text, features=True).features == ()


def test_c75_a_closed_store_keeps_nothing() -> None:
    store = new_store()
    node = album(store, [0, 1])
    for item in items_of(node):
        store.put_features(item, pixels(1))
    held = request_inputs(node, features=True).features
    store.close()
    assert store.usage().feature_bytes == 2 * UNIT, "somebody holds them"
    assert request_inputs(node, features=True).features == held
    assert store.get_features(items_of(node)[0]) is (held or ())[0]
    del held
    gc.collect()
    assert store.usage().feature_bytes == 0, "to have been asked is no reason to keep them for ever"
    assert needed(node) == items_of(node)


# --- C76: features go, and everything else stays ------------------------------------------------------------------------
@EXAMPLES
@given(histories(), st.sampled_from(["drop", "evict", "close", "never"]))
def test_c76_releasing_features_changes_no_position(turns: list[Segment], how: str) -> None:
    store = new_store(units=20)
    session = opened(store)
    draft = session.draft(grow(session, session.root, *turns))
    draft.extend([1, 2])
    nodes = list(session.tree)
    for number, item in enumerate(items_of(draft)[:20]):
        if store.get_features(item) is None and how != "never":
            store.put_features(item, pixels(number))
    before = [(fingerprint(node), plain_inputs(node), plain_inputs(node, node.start)) for node in nodes]
    drafted = plain_inputs(draft), plain_inputs(draft, mode="as_replayed")
    if how == "drop":
        for item in items_of(draft):
            store.drop_features(item)
    elif how == "evict":
        for number in range(20):
            store.put_features(MediaItem("image", bytes([number]) * 32, [(0, 4)], (1, 4, 4)), pixels(number))
    elif how == "close":
        store.close()
    assert all(store.get_features(item) is None for item in items_of(draft))
    assert [(fingerprint(node), plain_inputs(node), plain_inputs(node, node.start)) for node in nodes] == before
    assert (plain_inputs(draft), plain_inputs(draft, mode="as_replayed")) == drafted
    check(nodes[-1], turns)
    if how != "close":
        check(grow(session, nodes[-1], a_turn(3), reply(7)), [*turns, a_turn(3), reply(7)])
        check(draft.commit(), [*turns, reply(1, 2)])


def test_c76_the_toy_after_a_cache_hit() -> None:
    """vLLM: the grid went with the pixels, and positions crashed."""
    store = new_store()
    node = album(store, [0])
    item = items_of(node)[0]
    store.put_features(item, {"pixel_values": pixels(1), "image_grid_thw": np.array([[1, 4, 4]])})
    store.drop_features(item)
    assert store.get_features(item) is None
    assert same(node.positions(), A_TABLE)
    assert (node.mrope_position_delta, node.next_position, node.stop) == (-2, 7, 9)
    assert spans_of(node) == [(item.identity, 3, 7)]
    assert node.media[0].grid_thw == (1, 4, 4)
    for prefix_len in range(10):
        inputs = request_inputs(node, prefix_len)
        assert same(inputs.positions, A_TABLE[:, prefix_len:])
        assert inputs.mrope_position_delta.tolist() == [[-2]]
    below = grow(store.get("s"), node, reply(8, 9), a_turn(1))
    check(below, [a_turn(), reply(8, 9), a_turn(1)])


def test_c76_a_session_with_features_is_one_without() -> None:
    """Ids, heads and answers, step by step: features are no part of a session."""
    plain, rich = new_store(), new_store(units=3)
    ones, twos = opened(plain), opened(rich)
    one, two = ones.root, twos.root
    for number in range(8):
        segment = a_turn(number) if number % 2 == 0 else reply(number, number)
        one, two = grow(ones, one, segment), grow(twos, two, segment)
        for item in two.media:
            rich.put_features(item, pixels(number))
            if number % 4 == 0:
                rich.drop_features(item)
        assert ones.set_head("main", one) == twos.set_head("main", two)
        assert tree_digest(ones.tree) == tree_digest(twos.tree)
        assert plain_inputs(one) == plain_inputs(two)
    assert rich.usage().feature_bytes == 2 * UNIT
    assert plain.usage().feature_bytes == 0


# --- C77: two steps of one request, and others in between ---------------------------------------------------------------
def test_c77_a_requests_own_items_cannot_evict_each_other() -> None:
    """A budget of exactly its items, full of others' when it begins."""
    store = new_store(units=4)
    others = album(store, range(10, 14), "others")
    for item in items_of(others):
        store.put_features(item, pixels(10))
    node = album(store, range(4))
    held: list[Features] = []
    for number, item in enumerate(needed(node)):
        held.append(store.put_features(item, pixels(number)))
        assert all(store.get_features(mine) is not None for mine in items_of(node)[: number + 1])
    inputs = request_inputs(node, features=True)
    assert inputs.features == tuple(held)
    assert [features["features"][0] for features in held] == [0, 1, 2, 3]
    assert needed(others) == items_of(others)
    with pytest.raises(LimitExceeded) as caught:
        store.put_features(items_of(others)[0], pixels(10))
    assert caught.value.limit == 4 * UNIT
    assert request_inputs(node, features=True).features == tuple(held)
    del inputs, held
    store.put_features(items_of(others)[0], pixels(10))
    assert len(needed(node)) == 1


def test_c77_a_request_that_is_too_large_says_so() -> None:
    store = new_store(units=3)
    node = album(store, range(4))
    held = [store.put_features(item, pixels(1)) for item in items_of(node)[:3]]
    with pytest.raises(LimitExceeded) as caught:
        store.put_features(items_of(node)[3], pixels(1))
    assert caught.value.value == 4 * UNIT
    assert items_of(node)[3].identity[:4].hex() in str(caught.value)
    assert needed(node) == items_of(node)[3:], "the others are as they were"
    assert request_inputs(node.path()[3], features=True).features == tuple(held)
    del held
    store.put_features(items_of(node)[3], pixels(1))  # held by nobody, the first of them goes
    assert needed(node) == items_of(node)[:1]


def test_c77_what_a_refused_request_has_already_is_the_last_to_go() -> None:
    store = new_store(units=4)
    node, others = album(store, range(3)), album(store, range(10, 13), "others")
    store.put_features(items_of(node)[1], pixels(1))  # long unused
    for item in items_of(others):
        store.put_features(item, pixels(10))
    missing = needed(node)
    assert missing == [items_of(node)[0], items_of(node)[2]]
    for item in missing:
        store.put_features(item, pixels(2))
    assert needed(node) == [], "the refusal was a use of what it found"
    assert needed(others) == items_of(others)[:2]


def test_c77_the_inputs_of_a_request_keep_its_features() -> None:
    store = new_store(units=3)
    node = album(store, range(2))
    for item in items_of(node):
        store.put_features(item, pixels(5))
    inputs = request_inputs(node, features=True)
    for number in range(20):
        store.put_features(MediaItem("image", bytes([number]) * 32, [(0, 4)], (1, 4, 4)), pixels(number))
        assert needed(node) == []
    for item in items_of(node):
        store.drop_features(item)
    assert needed(node) == [], "dropped by somebody else in the middle of it, and there all the same"
    assert [features["features"].tolist() for features in inputs.features or ()] == [[5.0] * SIZE] * 2
    del inputs
    for item in items_of(node):
        store.drop_features(item)
    assert needed(node) == items_of(node)
    assert store.usage().feature_bytes <= 3 * UNIT


def test_c77_what_a_request_held_through_it_all_is_there_for_the_next_one() -> None:
    store = new_store(units=3)
    node, others = album(store, [0]), album(store, range(10, 14), "others")
    store.put_features(items_of(node)[0], pixels(5))
    inputs = request_inputs(node, features=True)
    for item in items_of(others):
        store.put_features(item, pixels(10))
    assert store.usage().feature_bytes == 3 * UNIT
    del inputs
    assert needed(node) == [], "room was made by what nobody held, and by that alone"
    assert needed(others) == items_of(others)[:2]


def test_c77_requests_of_many_threads_get_their_own_or_a_typed_refusal() -> None:
    """Eight requests of three items each, shared in part, in room for nine: never a KeyError, never another's pixels."""
    store = new_store(units=9)
    nodes = [album(store, [number, number + 1, 20 + number], str(number)) for number in range(8)]
    value_of = {media(a_turn(number))[0].content(): number for number in range(40)}
    served = [0] * 8

    def work(number: int) -> None:
        node = nodes[number]
        for _ in range(60):
            held: list[Features] = []
            for _ in range(100):
                try:
                    inputs = request_inputs(node, features=True)
                    break
                except NeedsMedia as error:
                    assert set(error.items) <= set(items_of(node))
                    try:
                        held += [store.put_features(item, pixels(value_of[item.content()])) for item in error.items]
                    except LimitExceeded as full:
                        assert full.limit == 9 * UNIT
                        held.clear()
            else:
                continue
            assert inputs.features is not None
            assert [features["features"][0] for features in inputs.features] == [number, number + 1, 20 + number]
            assert store.usage().feature_bytes <= 9 * UNIT
            served[number] += 1
            if number % 3 == 0:
                store.drop_features(items_of(node)[0])
            held.clear()
            del inputs

    in_threads(8, work)
    assert min(served) > 0
    gc.collect()
    assert 0 < store.usage().feature_bytes <= 9 * UNIT


def test_c77_a_store_that_is_closed_in_the_middle_of_requests() -> None:
    store = new_store()
    node = album(store, range(4))
    items = items_of(node)
    closed = threading.Event()

    def work(number: int) -> None:
        if number == 0:
            store.close()
            closed.set()
            return
        last = False
        while not last:
            last = closed.is_set()
            try:
                held = [store.put_features(item, pixels(at)) for at, item in enumerate(items)]
            except StoreClosed:
                held = []
            if held:
                assert request_inputs(node, features=True).features == tuple(held)
            assert plain_inputs(node)[-1] == tuple(items)

    in_threads(5, work)
    with pytest.raises(StoreClosed):
        store.put_features(items[0], pixels(0))
    gc.collect()
    assert store.usage()[:2] == (0, 0)


# --- C73: one row of a batch is one row ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "kind",
    [
        "array",
        "tensor",
        "mapping",
        *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("fancy", "bfloat16", "requires grad")),
    ],
)
def test_c73_a_row_does_not_keep_its_batch(kind: str) -> None:
    store = new_store()
    node = album(store, [0])
    item = items_of(node)[0]
    row_bytes = 2**18
    store.put_features(MediaItem("image", bytes(32), [(0, 1)], (1, 2, 2)), pixels(0))
    before = store.usage().feature_bytes
    with traced() as grown:
        batch: Any = np.arange(64 * row_bytes // 4, dtype=np.float32).reshape(64, -1)
        given: Any = batch[7]
        if kind == "fancy":
            given = batch.T[:, 7]
        elif kind != "array":
            batch = torch.from_numpy(batch.copy())
            if kind == "bfloat16":
                batch = batch.to(torch.bfloat16)
            elif kind == "requires grad":
                batch.requires_grad_()
            given = {"pixels": batch[7]} if kind == "mapping" else batch[7]
        expected = np.asarray(batch[7].float().detach() if isinstance(batch, torch.Tensor) else batch[7]).copy()
        gone = weakref.ref(batch)
        features = store.put_features(item, given)
        del batch, given
        gc.collect()
        assert gone() is None
        retained = grown() - expected.nbytes
        assert retained <= 2 * row_bytes, "a row, not 64"
    counted = store.usage().feature_bytes - before
    assert counted == features.nbytes
    assert counted <= 2 * row_bytes
    assert retained <= counted + 2**16  # beside what is loaded and cached on first use
    name = features.names[0]
    if kind == "bfloat16":
        assert torch.equal(torch.tensor(features[name]).view(torch.bfloat16).float(), torch.tensor(expected))
    else:
        assert features[name].tolist() == expected.tolist()
    with traced() as grown:
        del features
        store.drop_features(item)
        assert store.usage().feature_bytes == before


def test_c73_a_request_holds_rows_not_batches() -> None:
    store = new_store()
    node = album(store, range(16))
    batch = np.repeat(np.arange(16, dtype=np.float32), SIZE * 8).reshape(16, -1)
    with traced() as grown:
        for item, row in zip(items_of(node), batch, strict=True):
            store.put_features(item, row)
        inputs = request_inputs(node, 15 * 9, features=True)
        for item in items_of(node):
            store.drop_features(item)
        assert store.usage().feature_bytes == batch[0].nbytes + OVERHEAD_BYTES
        assert grown() <= 2 * batch[0].nbytes
    assert [features["features"][0] for features in inputs.features or ()] == [15]


# --- C74: frames by the thousand -----------------------------------------------------------------------------------------
def test_c74_ten_thousand_frames_in_one_session() -> None:
    """A node keeps what describes a frame; its pixels are the store's, under the budget."""
    store = new_store(units=100)
    session = opened(store)
    node = grow(session, session.root, a_turn())
    frame = pixels(1)
    marks: list[int] = []
    with traced() as grown:
        for number in range(10_000):
            item = MediaItem("image", number.to_bytes(32), [(1, 4)], (1, 4, 4))
            node = session.append(node, [1, IMG, IMG, IMG, IMG], media=[item])
            store.put_features(item, frame)
            if number % 2_000 == 1_999:
                assert store.usage().feature_bytes <= 100 * UNIT
                marks.append(grown())
        growth = [after - before for before, after in itertools.pairwise(marks)]
        assert max(growth) <= 2_000 * 2_600, "no pixels: what a turn with a frame takes, whatever is on the path"
        assert marks[-1] <= 100 * UNIT + 10_000 * 2_600
        assert marks[-1] < 10_000 * frame.nbytes
        assert tracemalloc.get_traced_memory()[1] <= marks[-1] + 4 * 2**20
    assert len(needed(node)) == 10_000 - 100 + 1
    assert needed(node, node.stop - 5 * 100) == []
    assert spans_of(node, node.stop - 5) == [((9_999).to_bytes(32), node.stop - 4, node.stop)]


def test_c74_frames_of_sessions_that_come_and_go() -> None:
    """A stream of short sessions: flat, nodes and all."""
    store = new_store(units=50)
    marks: list[int] = []
    with traced() as grown:
        for number in range(300):
            with opened(store, f"camera {number % 7}") as session:
                node = session.root
                for frame in range(10):
                    item = MediaItem("image", (10 * number + frame).to_bytes(32), [(0, 4)], (1, 4, 4))
                    node = session.append(node, [IMG] * 4, media=[item])
                    store.put_features(item, pixels(frame))
                assert len(request_inputs(node, features=True).features or ()) == 10
            if number % 50 == 49:
                marks.append(grown())
        *usual, _ = sorted(marks[1:])  # in one of them, threads of others may hold something
        assert max(usual) - min(usual) <= 60_000
        assert max(marks) <= 50 * UNIT + 100_000
    assert store.usage().feature_bytes == 50 * UNIT
    assert store.usage().sessions == 0


def test_c74_one_turn_of_ten_thousand_frames() -> None:
    store = new_store(units=10)
    session = opened(store)
    items = [MediaItem("image", number.to_bytes(32), [(number, 1)], (1, 2, 2)) for number in range(10_000)]
    node = session.append(session.root, [IMG] * 10_000, media=items)
    assert needed(node) == items
    assert needed(node, 9_990) == items[9_990:]
    held = [store.put_features(item, pixels(1)) for item in items[9_990:]]
    assert request_inputs(node, 9_990, features=True).features == tuple(held)
    with pytest.raises(LimitExceeded):
        store.put_features(items[0], pixels(1))


# --- usage says what is ---------------------------------------------------------------------------------------------------
def test_usage_is_what_is_really_held() -> None:
    store = SessionStore.in_memory(feature_bytes=3 * 10**6, path_cache_bytes=10**6)
    node = album(store, range(3))
    assert store.usage()[:5] == (1, 0, 3 * 10**6, 0, 10**6)
    with traced() as grown:
        held = [store.put_features(item, np.zeros(50_000 * (number + 1), np.float32)) for number, item in enumerate(items_of(node))]
        counted = store.usage().feature_bytes
        assert counted == sum(features.nbytes for features in held)
        assert 0.9 * counted <= grown() <= counted + 4096
        store.drop_features(items_of(node)[0])
        assert store.usage().feature_bytes == counted, "dropped, and held by somebody: still there"
        gone = held.pop(0).nbytes
        assert store.usage().feature_bytes == counted - gone
        assert 0.9 * (counted - gone) <= grown() <= counted - gone + 4096
        more = store.put_features(items_of(node)[1], {"encoded": np.zeros(100, np.float32)})
        assert more.nbytes == held[0].nbytes + 400 + OVERHEAD_BYTES
        assert store.usage().feature_bytes == counted - gone + 400 + OVERHEAD_BYTES, "one array, however many hold it"
        assert grown() <= store.usage().feature_bytes + 4096
        held.clear()
        del more
        for item in items_of(node):
            store.drop_features(item)
        assert store.usage().feature_bytes == 0
        assert grown() <= 20_000


def test_usage_counts_paths_of_forks_and_sessions() -> None:
    store = SessionStore.in_memory(path_cache_bytes=400_000)
    session = store.create("s", scheme="text@sglang")
    base = session.append(session.root, np.arange(20_000))
    forks = [session.append(base, [number]) for number in range(8)]
    assert store.usage().path_cache_bytes == 0, "nobody has read one"
    with traced() as grown:
        views = [fork.input_ids(copy=False) for fork in forks[1:4]]
        counted = store.usage().path_cache_bytes
        assert 0.9 * counted <= grown() <= counted + 20_000
        assert 3 * 80_000 <= counted <= 400_000
        for fork in forks:
            fork.input_ids(copy=False)
            assert store.usage().path_cache_bytes <= 400_000
    assert [view[-1] for view in views] == [1, 2, 3]
    for number in range(5):
        store.fork(session, base, str(number))
    assert store.usage().sessions == 6
    session.close()
    assert store.usage().sessions == 5
    store.close()
    assert store.usage()[:2] == (0, 0)
    assert store.usage().path_cache_bytes == 0
    assert [view[-1] for view in views] == [1, 2, 3]


# --- C80, and the calls of the store themselves ---------------------------------------------------------------------------
def test_c80_branches_share_features_and_device_copies() -> None:
    store = new_store()
    node = album(store, [0])
    session = store.get("s")
    branches = [session.append(node, [number]) for number in range(4)] + [store.fork(session, node, "fork").append(node, [9])]
    store.put_features(items_of(node)[0], pixels(3))
    on_device: WeakKeyDictionary[Features, torch.Tensor] = WeakKeyDictionary()
    for branch in branches:
        (features,) = request_inputs(branch, features=True).features or ()
        copy = on_device.setdefault(features, torch.tensor(features["features"]))
        copy.fill_(7)  # a copy may be reassigned and written to; the features are what they were
        assert features["features"][0] == 3
        with pytest.raises((AttributeError, TypeError)):
            features.arrays = {}  # type: ignore[method-assign, assignment]
        with pytest.raises(ValueError, match="read-only"):
            features["features"][0] = 1
    assert len(on_device) == 1
    before = [fingerprint(branch) for branch in branches]
    store.drop_features(items_of(node)[0])
    del features
    gc.collect()
    assert len(on_device) == 0, "device copies go with what they are copies of"
    assert [fingerprint(branch) for branch in branches] == before
    assert items_of(branches[0])[0] is items_of(branches[4])[0]


def test_c80_a_branch_reads_while_others_put_and_drop() -> None:
    store = new_store(units=4)
    node = album(store, [0, 1])
    session = store.get("s")
    branches = [session.append(node, [number]) for number in range(4)]
    expected = [(fingerprint(branch), plain_inputs(branch)) for branch in branches]
    for number, item in enumerate(items_of(node)):
        store.put_features(item, pixels(number))
    inputs = [request_inputs(branch, features=True) for branch in branches]

    def work(number: int) -> None:
        for step in range(60):
            if number >= 4:
                item = items_of(node)[step % 2]
                store.drop_features(item)
                store.put_features(item, pixels(step % 2))
                store.put_features(item, {"encoded": np.zeros(1)}) if step == 30 and number == 4 else None
                continue
            assert (fingerprint(branches[number]), plain_inputs(branches[number])) == expected[number]
            assert [features["features"][5] for features in inputs[number].features or ()] == [0, 1]

    in_threads(6, work)


def test_the_calls_of_a_store() -> None:
    store = new_store()
    node = album(store, [0, 1])
    zero, one = items_of(node)
    assert store.get_features(zero) is None
    assert store.drop_features(zero) is None  # type: ignore[func-returns-value]  # nothing to drop is no error
    features = store.put_features(zero, torch.ones(2, 3))
    assert isinstance(features, Features)
    assert features.item == zero
    assert features.names == ("features",)
    assert store.get_features(zero.with_spans([(50, 4)])) is features
    assert store.put_features(zero, np.ones((2, 3), np.float32)) is features, "equal values change nothing"
    with pytest.raises(KeyTaken) as caught:
        store.put_features(zero, np.ones((3, 2), np.float32))
    assert (caught.value.key, caught.value.item) == ("features", zero)
    both = store.put_features(zero, {"encoded": np.zeros(4, np.float16)})
    assert both.names == ("features", "encoded")
    assert store.get_features(zero) is both
    assert request_inputs(node.path()[1], features=True).features == (both,)
    for wrong in (None, [1.0], b"pixels", "pixels", {}, {"a": None}, {1: np.ones(1)}, np.array(["a"]), np.array([None])):
        with pytest.raises(TypeError):
            store.put_features(one, wrong)
        assert store.get_features(one) is None
    for call in (store.get_features, store.drop_features):
        for not_an_item in (None, zero.identity, "image", node):
            with pytest.raises(TypeError):
                call(not_an_item)  # type: ignore[arg-type]
    assert store.usage().feature_bytes == both.nbytes
    no_room = SessionStore.in_memory(feature_bytes=0)
    bare = album(no_room, [0])
    with pytest.raises(LimitExceeded):
        no_room.put_features(zero, np.zeros(1))
    assert plain_inputs(bare)[-1] == (zero,)
    with pytest.raises(OutOfRange):
        SessionStore.in_memory(feature_bytes=-1)
    with pytest.raises(TypeError):
        SessionStore.in_memory(feature_bytes=1.5)  # type: ignore[arg-type]
    store.close()
    with pytest.raises(StoreClosed):
        store.put_features(zero, np.ones(1))
    assert grow_refused(store)


def grow_refused(store: SessionStore) -> bool:
    with pytest.raises(StoreClosed):
        opened(store, "another")
    return True


def test_an_image_and_its_edits_share_one_copy() -> None:
    """However often a history is cut, rewritten and forked, an image's pixels are there once."""
    store = new_store()
    session = opened(store)
    node = grow(session, session.root, a_turn(), reply(8), turn(4, *shown(image(number=1)), 5))
    for number, item in enumerate(items_of(node)):
        store.put_features(item, pixels(number))
    paths = [node, session.truncate(node, node.stop - 1), session.rewrite(node, [Edit(0, 1, [9, 9, 9])])]
    for number in range(50):
        paths.append(store.fork(session, node, str(number)).append(node, [number]))
    for path in paths:
        assert [features["features"][0] for features in request_inputs(path, features=True).features or ()] == [0, 1]
    assert store.usage().feature_bytes == 2 * UNIT
