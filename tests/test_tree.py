"""The session tree as a persistent value: what every version sees, identity, retries, keys, heads and limits."""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Callable, Iterable
from threading import Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sessiontree import (
    ExternalPositions,
    Head,
    HeadMoved,
    KeyTaken,
    LimitExceeded,
    MediaItem,
    MediaSpanError,
    Namespace,
    NameTaken,
    Node,
    OutOfRange,
    Position,
    PositionError,
    PositionLimitExceeded,
    Session,
    SessionStore,
    SessionTree,
    SessionTreeError,
    UnknownHead,
    UnknownNode,
    UnknownScheme,
    Unsupported,
)
from sessiontree.positions import PositionScheme, scheme

IMAGE_PAD, VIDEO_PAD, VISION_START, VISION_END = 50, 51, 52, 53


def vl(rule: str = "hf5", **params: Any) -> PositionScheme:
    """Qwen2.5-VL with small ids."""
    given_params = {
        "image_token_id": IMAGE_PAD,
        "video_token_id": VIDEO_PAD,
        "vision_start_token_id": VISION_START,
        "tokens_per_second": 2,
    }
    return scheme(f"qwen2_5_vl@{rule}", **{**given_params, **params})


def identity(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def image(name: str, offset: int, height: int = 2, width: int = 2) -> MediaItem:
    """An image of height x width placeholders, after merging, at ``offset``."""
    return MediaItem("image", identity(name), [(offset, height * width)], (1, height * 2, width * 2))


def video(name: str, offset: int, frames: int = 3, height: int = 1, width: int = 2, seconds: float = 1.0) -> MediaItem:
    span = (offset, frames * height * width)
    return MediaItem("video", identity(name), [span], (frames, height * 2, width * 2), seconds)


def plain(value: Any) -> Any:
    """Metadata as something that compares."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if hasattr(value, "items"):
        return {key: plain(entry) for key, entry in value.items()}
    return tuple(map(plain, value)) if isinstance(value, tuple) else value


def node_print(node: Node) -> tuple[Any, ...]:
    """Everything that can be read of a node, as plain values."""
    return (
        node.id,
        None if node.parent is None else node.parent.id,
        node.depth,
        node.start,
        node.stop,
        node.token_ids.tobytes(),
        hashlib.sha256(node.input_ids().tobytes()).digest(),
        node.media,
        tuple(item.fields() for item in node.media),
        node.origin,
        node.role,
        node.key,
        node.finish_reason,
        node.tail_policy,
        plain(node.metadata),
        node.links,
        node.next_position,
        node.mrope_position_delta,
        tuple((item.identity, start, stop) for item, start, stop in node.media_spans()),
        tuple(node.positions(mode=mode).tobytes() for mode in ("as_decoded", "as_replayed")),
        node.scheme.name,
        dict(node.scheme.params),
        (node.namespace.cache_salt, node.namespace.lora, node.namespace.tenant),
    )


def tree_print(tree: SessionTree | Session) -> tuple[Any, ...]:
    """Everything that can be read of a tree or session."""
    tree = tree.tree if isinstance(tree, Session) else tree
    heads = {name: (head.node.id, head.version) for name, head in tree.heads.items()}
    return len(tree), tuple(map(node_print, tree)), heads, tuple(node.id for node in tree.leaves())


def refused(what: Session | SessionTree, error: type[Exception], call: Callable[[], object]) -> Any:
    """``call`` raises exactly ``error`` and leaves ``what`` as it was; returns the error."""
    before = tree_print(what)
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert tree_print(what) == before
    return caught.value


def text_tree(**options: Any) -> SessionTree:
    return SessionTree("text@hf5", **options)


# --- reading ----------------------------------------------------------------------------------------------------------


def test_a_new_tree_is_its_root() -> None:
    tree = SessionTree(vl(), {"tenant": "t", "lora": "l", "cache_salt": "c"}, model_fingerprint="m", max_tokens=9, reserve_output=3)
    root = tree.root
    assert (len(tree), list(tree), tree.leaves(), dict(tree.heads)) == (1, [root], (root,), {})
    assert (root.depth, root.start, root.stop, len(root), root.parent, root.role, root.key) == (0, 0, 0, 0, None, None, None)
    assert (root.token_ids.shape, root.token_ids.dtype.name, len(root.media), root.origin) == ((0,), "int32", 0, "input")
    assert root.positions().shape == (3, 0)
    assert (root.next_position, root.mrope_position_delta, root.finish_reason, root.links) == (0, 0, None, ())
    assert root.path() == (root,)
    assert tree.children(root) == tree.siblings(root) == ()
    assert (root.namespace, root.model_fingerprint) == (Namespace("c", "l", "t"), "m")
    assert (tree.limits.max_tokens, tree.limits.reserve_output) == (9, 3)


def test_reading_a_small_tree() -> None:
    tree = text_tree()
    tree, a = tree.append(tree.root, [1, 2, 3], role="system", metadata={"n": [1, {"m": 2}]})
    tree, b = tree.append(a, [4, 5])
    tree, c = tree.append(a, [6])
    tree, d = tree.append(tree.root, [7])
    tree, e = tree.append(b, [])
    root = tree.root
    assert list(tree) == [root, a, b, c, d, e]
    assert [node.depth for node in tree] == [0, 1, 2, 2, 1, 3]
    assert [(node.start, node.stop) for node in tree] == [(0, 0), (0, 3), (3, 5), (3, 4), (0, 1), (5, 5)]
    assert tree.children(root) == (a, d)
    assert tree.children(a.id) == (b, c)
    assert tree.siblings(b) == (c,)
    assert tree.siblings(c) == (b,)
    assert tree.siblings(e) == ()
    assert tree.leaves() == (c, d, e)
    assert e.path() == (root, a, b, e)
    assert [e.ancestor(depth) for depth in range(4)] == list(e.path())
    assert e.input_ids().tolist() == [1, 2, 3, 4, 5]
    assert e.input_ids(1, 4).tolist() == [2, 3, 4]
    assert e.input_ids(5).tolist() == e.input_ids(0, 0).tolist() == e.token_ids.tolist() == []
    assert e.positions().tolist() == [[0, 1, 2, 3, 4]]
    assert e.positions(2, 4).tolist() == [[2, 3]]
    assert (a.role, b.role) == ("system", "user")
    assert a.metadata == {"n": (1, {"m": 2})}
    assert a in tree
    assert a.id in tree
    assert bytes(32) not in tree
    assert "a" not in tree
    assert tree.node(a.id) is a
    mutable: Any = bytearray(a.id)
    assert tree.node(mutable) is a
    assert bool(e)
    assert bool(root)
    assert len(e) == 0


def test_every_window_of_a_path_over_many_turns() -> None:
    tree = SessionTree(vl("sglang"))
    node = tree.root
    ids: list[int] = []
    spans: list[tuple[str, int, int]] = []
    for turn in range(6):
        own = [VISION_START, *[IMAGE_PAD] * 4, VISION_END, 60 + turn]
        if turn % 3 == 2:
            tree, node = tree.append(node, [], role="tool")
        tree.append(node, [99])  # a branch in the way: the path is in several arenas
        tree, node = tree.append(node, own, media=[image(f"i{turn}", 1)])
        spans.append((f"i{turn}", len(ids) + 1, len(ids) + 5))
        ids += own
    positions = node.positions()
    assert positions.shape == (3, len(ids))
    for start in range(len(ids) + 1):
        for stop in range(start, len(ids) + 1):
            assert node.input_ids(start, stop).tolist() == ids[start:stop]
            assert node.positions(start, stop).tolist() == positions[:, start:stop].tolist()
            clipped = [
                (identity(name), max(begin, start), min(end, stop))
                for name, begin, end in spans
                if begin < stop and end > start and start < stop
            ]
            assert [(item.identity, begin, end) for item, begin, end in node.media_spans(start, stop)] == clipped


@pytest.mark.parametrize(
    ("start", "stop", "error"),
    [
        (-1, 2, OutOfRange),
        (0, 4, OutOfRange),
        (2, 1, OutOfRange),
        (4, None, OutOfRange),
        (0, -1, OutOfRange),
        (2**70, None, OutOfRange),
        (0.0, 2, TypeError),
        (0, "2", TypeError),
        (None, 2, TypeError),
        (True, 2, TypeError),
        (0, Position(2), TypeError),
        (np.float64(1), 2, TypeError),
    ],
)
def test_windows_that_are_refused(start: Any, stop: Any, error: type[Exception]) -> None:
    tree = text_tree()
    tree, node = tree.append(tree.root, [1, 2, 3])
    for read in (node.input_ids, node.positions, node.media_spans):
        with pytest.raises(error) as caught:
            read(start, stop)
        assert type(caught.value) is error
    window: Any = (np.int64(1), np.uint8(3))
    assert node.input_ids(*window).tolist() == [2, 3]


def test_a_mode_that_does_not_exist() -> None:
    tree, node = text_tree().append(text_tree().root, [1])
    assert tree.node(node.id) is node
    mode: Any = "as_guessed"
    with pytest.raises(PositionError, match="as_guessed"):
        node.positions(mode=mode)
    with pytest.raises(PositionError, match="as_guessed"):
        node.positions(0, 0, mode)
    with pytest.raises(PositionError):
        node.position_state(mode)


@pytest.mark.parametrize("depth", [-1, 4, 2**70])
def test_ancestors_outside_the_path(depth: int) -> None:
    tree = text_tree()
    node = tree.root
    for token in range(3):
        tree, node = tree.append(node, [token])
    with pytest.raises(OutOfRange) as caught:
        node.ancestor(depth)
    assert (caught.value.value, caught.value.limit) == (depth, 3)


@pytest.mark.parametrize("depth", [0.5, "1", None, 1.0])
def test_a_depth_is_an_int(depth: Any) -> None:
    tree = text_tree()
    tree, node = tree.append(tree.root, [1])
    with pytest.raises(TypeError):
        node.ancestor(depth)


def test_next_position_is_no_token_index() -> None:
    tree = text_tree()
    tree, node = tree.append(tree.root, [1, 2, 3])
    position = node.next_position
    assert isinstance(position, Position)
    assert position == 3
    assert position + 1 == 4
    assert 1 + position == 4
    assert position - 1 == 2
    with pytest.raises(TypeError, match="Position"):
        tree.truncate(node, position)
    with pytest.raises(TypeError, match="Position"):
        tree.drop_last(node, position - 1)
    with pytest.raises(TypeError, match="Position"):
        node.input_ids(0, 1 + (position - 3))


def test_positions_compute_as_ints() -> None:
    position: Any = Position(5)
    assert position + 0.5 == 5.5
    assert position - 0.5 == 4.5
    assert 0.5 + position == 5.5
    assert (position + np.arange(3)).tolist() == [5, 6, 7]
    assert (np.arange(3) + position).tolist() == [5, 6, 7]
    with pytest.raises(TypeError):
        position + "1"
    with pytest.raises(TypeError):
        position - None


# --- identity, retries and keys -----------------------------------------------------------------------------------------


def test_equal_content_is_the_same_node_whatever_its_metadata() -> None:
    tree = text_tree()
    tree, node = tree.append(tree.root, [1, 2], metadata={"a": 1})
    for again in ([1, 2], (1, 2), np.array([1, 2]), range(1, 3)):
        same, found = tree.append(tree.root, again, metadata={"a": 2, "b": [3]})
        assert found is node
        assert same is tree
    assert node.metadata == {"a": 1}


def test_everything_an_engine_computes_from_makes_another_node() -> None:
    scheme_ = vl()
    pads = [IMAGE_PAD] * 4
    root = SessionTree(scheme_).root
    tree = SessionTree(scheme_)
    made: list[tuple[str, bytes]] = []

    def add(what: str, parent: Node, ids: Any, **options: Any) -> Node:
        nonlocal tree
        tree, node = tree.append(parent, ids, **options)
        made.append((what, node.id))
        return node

    first = add("plain", root, pads)
    add("parent", first, pads)
    add("tokens", root, [*pads, 1])
    add("role", root, pads, role="system")
    add("key", root, pads, key="k")
    add("other key", root, pads, key="l")
    add("image", root, pads, media=[image("a", 0)])
    add("other image", root, pads, media=[image("b", 0)])
    add("grid", root, pads, media=[image("a", 0, 1, 4)])
    add("modality", root, pads, media=[video("a", 0, 1, 2, 2, 0.0)])
    add("time", root, pads, media=[video("a", 0, 1, 2, 2, 0.5)])
    add("target sizes", root, pads, media=[MediaItem("image", identity("a"), [(0, 4)], (1, 4, 4), target_sizes=[(1, 1)])])
    add("table", root, pads, positions=np.zeros((3, 4), int))
    add("other table", root, pads, positions=np.ones((3, 4), int))
    add("next position", root, pads, positions=ExternalPositions(np.ones((3, 4), int), next_position=7))
    add("max position", root, pads, positions=ExternalPositions(np.ones((3, 4), int), max_position=7))
    add("span", root, [*pads, 9], media=[image("a", 0)])
    add("moved span", root, [*pads, 9], media=[image("a", 1)])
    session = SessionStore.in_memory().create("s", scheme=scheme_)
    draft = session.draft(session.root, key="k")
    draft.extend(pads)
    made.append(("origin", draft.commit().id))
    ids = [node_id for _, node_id in made]
    assert len(set(ids)) == len(ids) == len(tree), sorted(made, key=lambda pair: pair[1])


def test_roots_differ_by_what_is_constant_in_a_session() -> None:
    roots = [
        SessionTree("text@hf5"),
        SessionTree("text@vllm"),
        SessionTree(scheme("text@hf5", max_position_limit=5)),
        SessionTree(vl()),
        SessionTree(vl(tokens_per_second=4)),
        SessionTree("text@hf5", {"tenant": "a"}),
        SessionTree("text@hf5", {"lora": "a"}),
        SessionTree("text@hf5", {"cache_salt": "a"}),
        SessionTree("text@hf5", {"cache_salt": ""}),
        SessionTree("text@hf5", model_fingerprint="m"),
    ]
    assert len({tree.root.id for tree in roots}) == len(roots)
    assert SessionTree("text@hf5", "a").root.id == SessionTree("text@hf5", Namespace(tenant="a"), max_tokens=5).root.id
    assert SessionTree("text@hf5").root == SessionTree(scheme("text@hf5", max_position_limit=2**24)).root


def test_ids_are_the_same_in_every_process_and_order() -> None:
    one, two = text_tree(), text_tree()
    one, a1 = one.append(one.root, [1])
    one, b1 = one.append(one.root, [2])
    two, b2 = two.append(two.root, [2])
    two, a2 = two.append(two.root, [1])
    assert (a1.id, b1.id) == (a2.id, b2.id)
    assert a1 == a2
    assert hash(a1) == hash(a2)
    assert a1 is not a2
    assert {a1: 1}[a2] == 1
    assert two.node(a1.id) is a2
    assert two.append(a1, [3])[1].parent is a2, "a node of another tree is taken by its id"


@pytest.mark.parametrize("key", ["k", "", "ключ", "x" * 10_000])
def test_keys_have_the_scope_of_their_parent(key: str) -> None:
    tree = text_tree()
    tree, a = tree.append(tree.root, [1], key=key)
    tree, b = tree.append(a, [1], key=key)
    assert a.key == b.key == key
    assert tree.append(tree.root, [1], key=key)[1] is a
    error = refused(tree, KeyTaken, lambda: tree.append(tree.root, [2], key=key))
    assert (error.key, error.node) == (key, a)
    refused(tree, KeyTaken, lambda: tree.append(tree.root, [1], key=key, role="system"))
    refused(tree, KeyTaken, lambda: tree.append(a.id, [1, 1], key=key))
    tree, c = tree.append(tree.root, [2], key=key + "2")
    tree, without = tree.append(tree.root, [1])
    assert len({a.id, c.id, without.id}) == 3


def test_keys_are_seen_through_layers_forks_and_old_values() -> None:
    base = text_tree()
    base, a = base.append(base.root, [1])
    old = base
    base, b = base.append(a, [2], key="k")
    other, c = old.append(a, [3], key="k")  # free in the old value
    assert (b.parent, c.parent) == (a, a)
    refused(base, KeyTaken, lambda: base.append(a, [3], key="k"))
    refused(other, KeyTaken, lambda: other.append(a, [2], key="k"))
    for _ in range(40):  # past the flattening of layers
        other.append(a, [9])
        other, _ = other.append(a, [len(other) + 10])
    refused(other, KeyTaken, lambda: other.append(a, [2], key="k"))
    assert other.append(a, [3], key="k") == (other, c)
    fork = base.forked(b)
    refused(fork, KeyTaken, lambda: fork.append(a, [3], key="k"))
    assert fork.append(a, [2], key="k")[1] is b
    assert base.forked(a).append(a, [3], key="k")[1] == c, "what a fork does not hold is free in it"


# --- versions -----------------------------------------------------------------------------------------------------------


def test_appending_to_an_old_value_changes_no_other() -> None:
    versions = [text_tree()]
    prints = [tree_print(versions[0])]
    nodes = [versions[0].root]
    for step in range(60):
        tree = versions[(step * 7) % len(versions)]
        parents = list(tree)
        tree, node = tree.append(parents[step % len(parents)], [step, step])
        versions.append(tree)
        prints.append(tree_print(tree))
        nodes.append(node)
        assert [tree_print(version) for version in versions] == prints
    for version, seen in zip(versions, prints, strict=True):
        assert [node.id for node in version] == [one[0] for one in seen[1]]
        for node in nodes:
            assert (node in version) == (node.id in version) == (node in list(version))


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_versions_against_a_naive_model(data: st.DataObject) -> None:
    """Every version is a list of (parent ordinal, tokens); every query of every version is derived from that list."""
    tree = text_tree()
    versions: list[tuple[SessionTree, list[tuple[int, tuple[int, ...]]]]] = [(tree, [(-1, ())])]
    for _ in range(data.draw(st.integers(1, 25))):
        tree, model = versions[data.draw(st.integers(0, len(versions) - 1))]
        parent = data.draw(st.integers(0, len(model) - 1))
        tokens = tuple(data.draw(st.lists(st.integers(0, 2), min_size=1 if parent == 0 else 0, max_size=2)))
        parent_node = list(tree)[parent]
        what = data.draw(st.sampled_from(["append", "append", "append", "fork", "frozen"]))
        if what == "fork":
            path = [*parent_node.path()]
            versions.append((tree.forked(parent_node), [(at - 1, tuple(node.token_ids.tolist())) for at, node in enumerate(path)]))
            continue
        if what == "frozen":
            tree = tree._read_only()
        new, node = tree.append(parent_node, tokens)
        known = (parent, tokens) in model
        assert (new is tree) == known
        versions.append((new, model if known else [*model, (parent, tokens)]))
        assert node == list(new)[versions[-1][1].index((parent, tokens))]
    for tree, model in versions:
        nodes = list(tree)
        assert [tuple(node.token_ids.tolist()) for node in nodes] == [tokens for _, tokens in model]
        assert [node.parent for node in nodes] == [None if parent < 0 else nodes[parent] for parent, _ in model]
        assert len(tree) == len(model)
        for at, node in enumerate(nodes):
            children = [nodes[child] for child, (parent, _) in enumerate(model) if parent == at]
            assert list(tree.children(node)) == children
            whole = [token for step in node.path() for token in step.token_ids.tolist()]
            assert node.input_ids().tolist() == whole
            assert list(tree.siblings(node)) == [
                other for child, other in enumerate(nodes) if model[child][0] == model[at][0] and child != at and at
            ]
        assert list(tree.leaves()) == [node for at, node in enumerate(nodes) if all(parent != at for parent, _ in model)]
        for other, other_model in versions:
            if len(other_model) > len(model) and other_model[: len(model)] == model:
                for node in list(other)[len(model) :]:
                    assert node not in tree
                    with pytest.raises(UnknownNode):
                        tree.node(node.id)


def test_values_appended_to_from_many_threads() -> None:
    base = text_tree()
    base, a = base.append(base.root, [1])
    results: list[tuple[int, SessionTree]] = []

    def work(number: int) -> None:
        tree = base
        for step in range(50):
            tree, node = tree.append(a, [number, step])
            assert node.token_ids.tolist() == [number, step]
        results.append((number, tree))

    threads = [Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    for number, tree in results:
        assert [node.token_ids.tolist() for node in tree.children(a)] == [[number, step] for step in range(50)]
        assert len(tree) == 52
    assert len(base) == 2
    assert base.children(a) == ()


# --- heads --------------------------------------------------------------------------------------------------------------


def test_heads_move_by_compare_and_set() -> None:
    tree = text_tree()
    tree, a = tree.append(tree.root, [1])
    tree, b = tree.append(a, [2])
    tree, first = tree.set_head("main", a, expected=None)
    assert isinstance(first, Head)
    assert (tree.head("main"), first.node) == (first, a)
    error = refused(tree, NameTaken, lambda: tree.set_head("main", b, expected=None))
    assert (error.name, error.actual) == ("main", first)
    error = refused(tree, HeadMoved, lambda: tree.set_head("main", b, expected=b))
    assert (error.name, error.actual) == ("main", first)
    moved, second = tree.set_head("main", b, expected=a)
    assert second.version > first.version
    assert moved.head("main") == second
    assert tree.head("main") == first
    error = refused(moved, HeadMoved, lambda: moved.set_head("main", a, expected=first))
    assert error.actual == second
    back, third = moved.set_head("main", a, expected=second)
    refused(back, HeadMoved, lambda: back.set_head("main", b, expected=first))  # the same node, another version
    assert back.set_head("main", b, expected=a)[1].version > third.version
    assert back.set_head("main", b)[1].node is b
    again, same = back.set_head("main", a.id)
    assert (same.node, same.version > third.version) == (a, True)
    error = refused(again, HeadMoved, lambda: again.set_head("other", a, expected=a))
    assert error.actual is None
    refused(again, HeadMoved, lambda: again.set_head("other", a, expected=third))


def test_a_dropped_head_comes_back_with_a_new_version() -> None:
    tree = text_tree()
    tree, a = tree.append(tree.root, [1])
    tree, first = tree.set_head("main", a)
    dropped = tree.drop_head("main")
    assert dict(dropped.heads) == {}
    assert tree.head("main") == first
    error = refused(dropped, UnknownHead, lambda: dropped.head("main"))
    assert error.name == "main"
    assert issubclass(UnknownHead, KeyError)
    assert "main" in str(error)
    refused(dropped, UnknownHead, lambda: dropped.drop_head("main"))
    refused(dropped, HeadMoved, lambda: dropped.set_head("main", a, expected=first))
    dropped, second = dropped.set_head("main", a, expected=None)
    assert second.version > first.version
    refused(dropped, HeadMoved, lambda: dropped.set_head("main", a, expected=first))


@pytest.mark.parametrize(
    ("name", "expected", "error"),
    [
        (1, None, TypeError),
        (None, None, TypeError),
        ("a\ud800", None, TypeError),
        ("main", 1, TypeError),
        ("main", "main", TypeError),
        ("main", ("node", 1), TypeError),
    ],
)
def test_heads_refuse_wrong_types(name: Any, expected: Any, error: type[Exception]) -> None:
    tree = text_tree()
    tree, _ = tree.set_head("main", tree.root)
    refused(tree, error, lambda: tree.set_head(name, tree.root, expected=expected))


def test_heads_only_point_to_nodes_of_the_tree() -> None:
    tree = text_tree()
    longer, node = tree.append(tree.root, [1])
    refused(tree, UnknownNode, lambda: tree.set_head("main", node))
    refused(tree, UnknownNode, lambda: tree.set_head("main", node.id))
    refused(tree, UnknownNode, lambda: tree.set_head("main", bytes(32)))
    assert longer.set_head("main", node)[1].node is node
    assert dict(longer.set_head("main", node)[0].forked(node).heads) == {}


# --- refusals -----------------------------------------------------------------------------------------------------------


def unfit(offset: int, length: int) -> MediaItem:
    return MediaItem("image", identity("x"), [(offset, length)], (1, 4, 4))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"token_ids": [1, -1]}, OutOfRange),
        ({"token_ids": [2**31]}, OutOfRange),
        ({"token_ids": ["a"]}, TypeError),
        ({"token_ids": None}, TypeError),
        ({"token_ids": []}, OutOfRange),
        ({"parent": bytes(32)}, UnknownNode),
        ({"parent": b"short"}, UnknownNode),
        ({"parent": "id"}, TypeError),
        ({"parent": None}, TypeError),
        ({"role": 1}, TypeError),
        ({"role": None}, TypeError),
        ({"role": "a\udcff"}, TypeError),
        ({"key": 1}, TypeError),
        ({"key": b"k"}, TypeError),
        ({"key": "\ud800"}, TypeError),
        ({"metadata": [1]}, TypeError),
        ({"metadata": "text"}, TypeError),
        ({"metadata": {"a": object()}}, TypeError),
        ({"metadata": {1.5: 1}}, TypeError),
        ({"metadata": {"a": 2**64}}, OutOfRange),
        ({"metadata": {"a": np.array([object()])}}, TypeError),
        ({"media": 1}, TypeError),
        ({"media": ["image"]}, TypeError),
        ({"media": [unfit(0, 5)]}, MediaSpanError),
        ({"media": [unfit(0, 3)]}, MediaSpanError),
        ({"media": [unfit(3, 4)]}, MediaSpanError),
        ({"media": [unfit(0, 4), unfit(2, 4)]}, MediaSpanError),
        ({"media": [MediaItem("image", identity("x"), [], (1, 4, 4))]}, MediaSpanError),
        ({"media": [MediaItem("image", identity("x"), [(0, 4)])]}, PositionError),
        ({"media": [MediaItem("audio", identity("x"), [(0, 4)], audio_feature_length=4)]}, Unsupported),
        ({"positions": np.zeros((2, 6), int)}, PositionError),
        ({"positions": np.zeros((3, 5), int)}, PositionError),
        ({"positions": np.zeros(6, int)}, PositionError),
        ({"positions": np.zeros((3, 6))}, PositionError),
        ({"positions": -np.ones((3, 6), int)}, PositionError),
        ({"positions": np.full((3, 6), 2**24)}, PositionLimitExceeded),
        ({"positions": ExternalPositions(np.ones((3, 6), int), max_position=0)}, PositionError),
        ({"positions": ExternalPositions(np.ones((3, 6), int), next_position=-1)}, PositionError),
        ({"positions": ExternalPositions(np.ones((3, 6), int), next_position=2**40)}, PositionLimitExceeded),
    ],
)
def test_what_append_refuses_leaves_nothing(arguments: dict[str, Any], error: type[Exception]) -> None:
    tree = SessionTree(vl())
    tree, _ = tree.append(tree.root, [1])
    tree, _ = tree.set_head("main", tree.root)
    given_arguments = {"parent": tree.root, "token_ids": [1, 2, 3, 4, 5, 6], **arguments}
    refused(tree, error, lambda: tree.append(given_arguments.pop("parent"), given_arguments.pop("token_ids"), **given_arguments))
    tree, node = tree.append(tree.root, [1, 2, 3, 4, 5, 6])
    assert len(tree) == 3
    assert node.input_ids().tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("metadata", [[], "", 0, ()])
def test_empty_metadata_of_a_wrong_type_is_refused_too(metadata: Any) -> None:
    tree = text_tree()
    refused(tree, TypeError, lambda: tree.append(tree.root, [1], metadata=metadata))


def test_metadata_that_is_too_deep_or_holds_itself() -> None:
    tree = text_tree()
    loop: list[Any] = []
    loop.append(loop)
    refused(tree, LimitExceeded, lambda: tree.append(tree.root, [1], metadata={"a": loop}))
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    refused(tree, LimitExceeded, lambda: tree.append(tree.root, [1], metadata={"a": deep}))
    while isinstance(deep, list):  # without the recursion of freeing it
        deep = deep.pop()


def test_context_limits() -> None:
    tree = text_tree(max_tokens=10, reserve_output=4)
    tree, a = tree.append(tree.root, [1, 2, 3])
    tree, b = tree.append(a, [4, 5, 6])  # exactly max_tokens - reserve_output
    error = refused(tree, LimitExceeded, lambda: tree.append(b, [7]))
    assert (error.value, error.limit) == (7, 6)
    refused(tree, LimitExceeded, lambda: tree.append(tree.root, range(7)))
    refused(tree, LimitExceeded, lambda: tree.rewrite(b, [(0, 1, [9, 9])]))
    assert tree.append(b, [])[1].stop == 6
    assert tree.append(a, [4, 5, 6])[1] is b, "a retry at the limit is a retry"
    fork = tree.forked(b)
    refused(fork, LimitExceeded, lambda: fork.append(b, [7]))


@pytest.mark.parametrize(
    ("max_tokens", "reserve", "error"),
    [
        (4, 5, LimitExceeded),
        (-1, 0, LimitExceeded),
        (None, -1, LimitExceeded),
        (4, -1, LimitExceeded),
        (4.0, 0, TypeError),
        ("4", 0, TypeError),
        (4, 1.0, TypeError),
        (True, 0, TypeError),
    ],
)
def test_limits_that_cannot_be(max_tokens: Any, reserve: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        text_tree(max_tokens=max_tokens, reserve_output=reserve)
    assert type(caught.value) is error


def test_position_limit() -> None:
    tree = SessionTree(vl("sglang", max_position_limit=10))
    tree, a = tree.append(tree.root, range(10))
    assert a.next_position == 10
    error = refused(tree, PositionLimitExceeded, lambda: tree.append(a, [1]))
    assert (error.value, error.limit) == (10, 10)
    assert isinstance(error, PositionError)
    assert isinstance(error, LimitExceeded)
    refused(tree, PositionLimitExceeded, lambda: tree.append(tree.root, range(11)))
    wide = MediaItem("image", identity("w"), [(0, 11)], (1, 2, 22))
    refused(tree, PositionLimitExceeded, lambda: tree.append(tree.root, [IMAGE_PAD] * 11, media=[wide]))
    long = video("v", 0, frames=4, height=1, width=1, seconds=1e9)
    refused(tree, PositionLimitExceeded, lambda: tree.append(tree.root, [VIDEO_PAD] * 4, media=[long]))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"scheme": "nope@hf5"}, UnknownScheme),
        ({"scheme": "text"}, UnknownScheme),
        ({"scheme": "text@nope"}, UnknownScheme),
        ({"scheme": 1}, TypeError),
        ({"namespace": 1}, TypeError),
        ({"namespace": {"user": "a"}}, TypeError),
        ({"namespace": {"tenant": 1}}, TypeError),
        ({"namespace": {"tenant": "\ud800"}}, TypeError),
        ({"model_fingerprint": b"m"}, TypeError),
        ({"model_fingerprint": "\ud800"}, TypeError),
    ],
)
def test_trees_that_cannot_be_made(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        SessionTree(**{"scheme": "text@hf5", **options})
    assert type(caught.value) is error


def test_media_keep_token_order_and_parts_continue() -> None:
    tree = SessionTree(vl())
    ids = [VISION_START, *[IMAGE_PAD] * 4, 5, *[VIDEO_PAD] * 6, 6]
    tree, node = tree.append(tree.root, ids, media=[video("v", 6), image("i", 1)])
    assert [item.modality for item in node.media] == ["image", "video"]
    assert tree.append(tree.root, ids, media=[image("i", 1), video("v", 6)])[1] is node
    grid = (1, 4, 4)
    first = MediaItem("image", identity("p"), [(1, 3)], grid, unfinished=True)
    rest = MediaItem("image", identity("p"), [(0, 1)], grid, placeholders_before=3)
    tree, part = tree.append(tree.root, [1, IMAGE_PAD, IMAGE_PAD, IMAGE_PAD], media=[first])
    whole_tree, whole = tree.append(part, [IMAGE_PAD, 2], media=[rest])
    _, single = tree.append(tree.root, [1, *[IMAGE_PAD] * 4, 2], media=[image("p", 1)])
    assert whole.positions().tolist() == single.positions().tolist()
    assert whole.next_position == single.next_position
    refused(tree, MediaSpanError, lambda: tree.append(part, [2]))
    refused(tree, MediaSpanError, lambda: tree.append(part, [IMAGE_PAD, 2], media=[image("p", 0, 1, 1)]))
    wrong = MediaItem("image", identity("q"), [(0, 1)], grid, placeholders_before=3)
    refused(tree, MediaSpanError, lambda: tree.append(part, [IMAGE_PAD, 2], media=[wrong]))
    assert whole in whole_tree


def test_external_positions_are_the_positions() -> None:
    tree = SessionTree(vl())
    tree, a = tree.append(tree.root, [1, 2])
    table = np.array([[2, 2, 9], [2, 3, 9], [2, 4, 9]])
    tree, b = tree.append(a, [3, 4, 5], positions=table)
    assert b.positions(2).tolist() == table.tolist()
    assert (b.next_position, b.mrope_position_delta) == (10, 5)
    tree, c = tree.append(b, [6])
    assert c.positions(4).tolist() == [[9, 10], [9, 10], [9, 10]]
    tree, again = tree.append(a, [3, 4, 5], positions=ExternalPositions(table))
    assert again is b
    assert tree.append(a, [3, 4, 5], positions=table.astype(np.int32))[1] is b, "equal positions, equal node"
    assert tree.truncate(b, 3)[1].positions(2).tolist() == [[2], [2], [2]]
    given = ExternalPositions(table, next_position=11)
    tree, own = tree.append(a, [3, 4, 5], positions=given)
    refused(tree, Unsupported, lambda: tree.truncate(own, 3))
    refused(tree, Unsupported, lambda: tree.rewrite(b, [(3, 4, [9])]))


def test_nodes_and_trees_are_made_by_operations_only() -> None:
    make: Any = Node
    with pytest.raises(TypeError):
        make()
    tree = text_tree()
    with pytest.raises(SessionTreeError):
        tree.append(tree.root, [-1])


def test_errors_name_their_facts() -> None:
    tree = text_tree()
    error = refused(tree, OutOfRange, lambda: tree.append(tree.root, [5, 2**31]))
    assert (error.index, error.value, error.limit) == (1, 2**31, 2**31 - 1)
    with pytest.raises(AttributeError):
        error.colour  # noqa: B018
    error = refused(tree, UnknownNode, lambda: tree.node(b"\1" * 32))
    assert error.node_id == b"\1" * 32


def ids_of(nodes: Iterable[Node]) -> list[bytes]:
    return [node.id for node in nodes]


def test_iterating_while_the_tree_grows_sees_one_version() -> None:
    tree = text_tree()
    tree, a = tree.append(tree.root, [1])
    seen = []
    grown = tree
    for node in tree:
        seen.append(node)
        grown, _ = grown.append(a, [len(seen)])
    assert ids_of(seen) == ids_of(tree) == ids_of([tree.root, a])
    assert len(grown) == 4


def test_a_held_node_keeps_its_path_alive_and_nothing_else() -> None:
    tree = text_tree()
    tree, held = tree.append(tree.root, [1, 2])
    tree, child = tree.append(held, [3])
    tree, sibling = tree.append(tree.root, [4])
    gone = [weakref.ref(child), weakref.ref(sibling)]
    kept = weakref.ref(tree.root)
    fork = tree.forked(held)
    del tree, child, sibling
    gc.collect()
    assert [one() for one in gone] == [None, None]
    assert kept() is fork.root
    assert fork.append(held, [3])[1].input_ids().tolist() == [1, 2, 3]


def test_a_state_that_only_begins_as_plain_text_does_is_kept() -> None:
    """Text goes on at its index, and something further up stands behind that."""
    session = SessionStore.in_memory().create("s", scheme="text@hf5")
    table = ExternalPositions([[0, 1]], next_position=2, max_position=100)
    node = session.append(session.root, [5, 6], positions=table)
    assert node.state[:3] == (2, 2, 100)
    assert session.append(node, [7]).state[:3] == (3, 3, 100)
