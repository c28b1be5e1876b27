"""Nodes and trees through pickle: what goes over, what stays behind, and that nothing comes back that was tampered with.

The expectations are taken from the node or tree itself before it is pickled, as plain values (see `facts`).
"""

from __future__ import annotations

import copyreg
import gc
import hashlib
import multiprocessing
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sessiontree import (
    CorruptTree,
    Edit,
    ExternalPositions,
    Head,
    HeadMoved,
    KeyTaken,
    LimitExceeded,
    MediaItem,
    MediaSpanError,
    NeedsMedia,
    Node,
    PositionScheme,
    Problem,
    Session,
    SessionStore,
    SessionTree,
    UnknownNode,
)
from sessiontree.index import Limits
from sessiontree.pickling import _constants, _node, _records, _tree
from sessiontree.positions.runs import ExternalRun, is_external, packed, unpacked
from tests.test_tree import IMAGE_PAD, VISION_END, VISION_START, identity, image, text_tree, tree_print, video, vl

PROTOCOLS: Final = range(pickle.HIGHEST_PROTOCOL + 1)
METADATA: Final = {
    "none": None,
    "numbers": [0, -(2**63), 2**64 - 1, 1.5, float("inf"), True, False],
    "text": "ünï\u2028çode",
    "bytes": b"\x00\xff",
    "nested": {"list": [1, [2, {"deep": (3,)}]], 7: "an int for a key", "set": {"a", "b", 3}},
    "floats": np.arange(6.0).reshape(2, 3),
    "transposed": np.arange(6).reshape(2, 3).T,
    "nothing": np.empty((0, 4), np.int16),
    "scalar": np.array(7),
    "one byte": np.array([5], np.uint8),
    "times": np.array(["2024-01-01"], "datetime64[D]"),
    "strings": np.array(["a", "bc"]),
    "record": np.array([(1, 2.0)], [("x", "<i4"), ("y", "<f8")]),
    "inside": [{"array": np.ones(3, np.float16)}],
}


def plain(value: Any) -> Any:
    """Metadata as values that compare, with one repr in every process."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tolist()
    if isinstance(value, Mapping):
        return sorted((repr(key), plain(entry)) for key, entry in value.items())
    if isinstance(value, frozenset):
        return "set", sorted(repr(plain(entry)) for entry in value)
    return tuple(map(plain, value)) if isinstance(value, tuple) else value


def facts(node: Node) -> dict[str, Any]:
    """Everything that a node says of itself, as plain values."""
    return {
        "id": node.id,
        "hash": hash(node),
        "path": [one.id for one in node.path()],
        "place": (node.depth, node.start, node.stop),
        "what": (node.origin, node.role, node.key, node.finish_reason, node.tail_policy),
        "tokens": node.token_ids.tolist(),
        "input_ids": node.input_ids().tolist(),
        "positions": [node.positions(mode=mode).tolist() for mode in ("as_decoded", "as_replayed")],
        "dtype": str(node.positions().dtype),
        "states": [node.position_state(mode) for mode in ("as_decoded", "as_replayed")],
        "runs": (node.runs, node.replayed),
        "next": (int(node.next_position), node.mrope_position_delta),
        "media": [(item.fields(), plain(item.extra)) for item in node.media],
        "spans": [(item.identity, start, stop) for item, start, stop in node.media_spans()],
        "metadata": plain(node.metadata),
        "links": [tuple(link) for link in node.links],
        "scheme": (node.scheme.name, sorted(node.scheme.params.items())),
        "constants": (tuple(node.namespace), node.model_fingerprint),
        "repr": repr(node),
    }


def tree_facts(tree: SessionTree) -> dict[str, Any]:
    return {
        "nodes": [facts(node) for node in tree],
        "children": [[child.id for child in tree.children(node)] for node in tree],
        "leaves": [node.id for node in tree.leaves()],
        "heads": sorted((name, head.node.id, head.version) for name, head in tree.heads.items()),
        "limits": tuple(tree.limits),
        "len": len(tree),
        "repr": repr(tree),
        "text": tree.to_text(),
    }


def digest(tree: SessionTree) -> str:
    """The same in every process."""
    told = tree_facts(tree)
    for node in told["nodes"]:
        del node["hash"]  # bytes hash otherwise there
    return hashlib.sha256(repr(told).encode()).hexdigest()


def part(name: str, offset: int, length: int, before: int, *, unfinished: bool) -> MediaItem:
    return MediaItem("image", identity(name), [(offset, length)], (1, 4, 4), placeholders_before=before, unfinished=unfinished)


def sample(rule: str = "hf5", store: SessionStore | None = None) -> Session:
    """A session in which everything occurs that a node can have."""
    session = (store or SessionStore.in_memory()).create(
        "s",
        scheme=vl(rule),
        namespace={"tenant": "t", "lora": "l", "cache_salt": "c"},
        model_fingerprint="m",
        max_tokens=200,
        reserve_output=20,
    )
    system = session.append(session.root, [1, 2, 3], role="system", metadata=METADATA)
    extra = MediaItem("image", identity("extra"), [(1, 4)], (1, 4, 4), extra={"scales": np.arange(3.0), "n": [1, {"a": None}]})
    user = session.append(system, [VISION_START, *[IMAGE_PAD] * 4, VISION_END, 9], media=[extra], key="user")
    film = session.append(user, [VISION_START, *[51] * 12, VISION_END], media=[video("film", 1, frames=6)])
    for number in range(2):  # equal samples, positions that differ as decoded and as replayed
        with session.draft(film, metadata={"sample": number}) as draft:
            draft.extend([4, 5, 6])
            reply = draft.commit("length", tail_policy="drop_last" if number else "keep")
    begin = session.append(reply, [7, *[IMAGE_PAD] * 2], media=[part("split", 1, 2, 0, unfinished=True)])
    between = session.append(begin, [], role="tool")
    session.append(between, [IMAGE_PAD, IMAGE_PAD, 8], media=[part("split", 0, 2, 2, unfinished=False)])
    table = np.arange(9).reshape(3, 3) + 40
    placed = session.append(reply, [1, 2, 3], positions=ExternalPositions(table, 60, 70))
    session.append(placed, [5])
    session.append(film, [1, 2], positions=table[:, :2], role="tool", metadata={"tool_call_id": "a"})
    beside = session.append(film, [3], role="tool", metadata={"tool_call_id": "b"})
    session.linearize([beside, session.append(film, [4], role="ünï", key="schlüssel ✓")])
    session.truncate(user, 9)
    rewritten = session.rewrite(beside, [Edit(1, 2, [8, 8])])
    session.append(session.root, [2**31 - 1, 0])
    for name, node in (("main", reply), ("main", rewritten), ("gone", film), ("root", session.root), ("häd", reply)):
        session.set_head(name, node)
    session.drop_head("gone")
    return session


# --- what goes over ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("rule", ["hf5", "sglang"])
def test_every_node_through_every_protocol(protocol: int, rule: str) -> None:
    for node in sample(rule).tree:
        made = pickle.loads(pickle.dumps(node, protocol))
        assert type(made) is Node
        assert made is not node
        assert made == node
        assert facts(made) == facts(node)
        for copied, one in zip(made.path(), node.path(), strict=True):
            assert facts(copied) == facts(one)
            assert copied.parent is None or copied.parent is made.ancestor(copied.depth - 1)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("rule", ["hf5", "sglang"])
def test_trees_through_every_protocol(protocol: int, rule: str) -> None:
    tree = sample(rule).tree
    before = tree_facts(tree)
    made = pickle.loads(pickle.dumps(tree, protocol))
    assert type(made) is SessionTree
    assert tree_facts(made) == before == tree_facts(tree)
    assert tree_print(made) == tree_print(tree)
    assert [node in tree for node in made] == [True] * len(tree)
    for node in made:
        assert made.node(node.id) is node
        assert node.parent is None or node.parent is made.node(node.parent.id)
    again = pickle.loads(pickle.dumps(made, protocol))
    assert tree_facts(again) == before
    assert pickle.dumps(again, protocol) == pickle.dumps(made, protocol)


def test_positions_differ_in_the_two_modes_and_go_over_as_they_are() -> None:
    session = sample("hf5")
    differing = [node for node in session.tree if node.replayed is not None]
    assert len(differing) > 3
    copies = pickle.loads(pickle.dumps(session.tree))
    for node in differing:
        copied = copies.node(node.id)
        assert copied.positions().tolist() != copied.positions(mode="as_replayed").tolist()
        assert copied.replayed == node.replayed


def test_everything_that_can_occur_does() -> None:
    """Or the other tests would show less than they say."""
    nodes = list(sample().tree)
    assert {node.origin for node in nodes} == {"input", "generated"}
    assert {node.tail_policy for node in nodes} == {None, "keep", "drop_last"}
    assert {link.kind for node in nodes for link in node.links} == {"derived_from", "prefix_of"}
    assert any(is_external(node.runs) for node in nodes)
    assert any(node.state.open_block is not None for node in nodes)
    assert any(item.extra for node in nodes for item in node.media)
    assert any(node.parent is not None and not len(node) for node in nodes)
    assert {node.finish_reason for node in nodes} == {None, "length"}
    assert any(node.key and not node.key.isascii() for node in nodes)


def arrays_in(value: Any) -> list[np.ndarray[Any, Any]]:
    if isinstance(value, np.ndarray):
        return [value]
    if hasattr(value, "values"):
        return [array for entry in value.values() for array in arrays_in(entry)]
    return [array for entry in value for array in arrays_in(entry)] if isinstance(value, (tuple, frozenset)) else []


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_frozen_arrays_stay_read_only(protocol: int) -> None:
    """Those of metadata and of media; a pickle of NumPy's own comes back writable."""
    tree = sample().tree
    for copied in (pickle.loads(pickle.dumps(tree, protocol)), pickle.loads(pickle.dumps(tree.leaves()[0], protocol)).path()):
        system, user = list(copied)[1:3]
        stored = [system._details.metadata, user.media[0]._extra]
        arrays = [array for holder in (*stored, system.metadata, user.media[0].extra) for array in arrays_in(holder)]
        assert len(arrays) == 2 * 10
        for array in (*arrays, system.token_ids, user.input_ids(), user.input_ids(copy=False), user.positions()):
            with pytest.raises(ValueError, match="read-only"):
                array[...] = array
            with pytest.raises(ValueError, match="WRITEABLE"):
                array.setflags(write=True)
            holder: Any = array
            while isinstance(holder, np.ndarray):
                with pytest.raises(ValueError, match="WRITEABLE"):
                    holder.flags.writeable = True
                holder = holder.base
            assert holder is None or memoryview(holder).readonly
        dtypes = {name: array.dtype for name, array in system.metadata.items() if isinstance(array, np.ndarray)}
        assert dtypes == {name: array.dtype for name, array in METADATA.items() if isinstance(array, np.ndarray)}


def test_what_comes_back_is_as_immutable_as_any_node() -> None:
    tree = sample().tree
    node, made = pickle.loads(pickle.dumps(tree.leaves()[0])), pickle.loads(pickle.dumps(tree))
    for value, names in ((node, ("id", "parent", "start", "media", "state", "_details", "_up")), (made, ("_index", "_heads"))):
        for name in names:
            for setter in (setattr, object.__setattr__):
                with pytest.raises(AttributeError):
                    setter(value, name, None)
    made.heads.get("main")
    node.metadata.set("x", 1)
    assert "x" not in node.metadata


def test_values_of_every_kind() -> None:
    """Old versions, layers over them, forks with siblings they keep, a tree of a root: each with just what it sees."""
    tree = text_tree()
    versions = [tree]
    tree, a = tree.append(tree.root, [1], metadata={"tool_calls": ["x", "y"]})
    versions.append(tree)
    tree, x = tree.append(a, [2], metadata={"tool_call_id": "x"})
    tree, y = tree.append(a, [3], metadata={"tool_call_id": "y"})
    versions += [tree, tree.forked(x), tree.forked(a), tree.forked(x).forked(y)]
    for step in range(6):
        layer, node = versions[1].append(a, [step])
        versions += [layer, layer.append(node, [step])[0], layer.set_head("main", node)[0]]
    fork, _ = tree.forked(x).append(y, [5])
    versions += [fork, fork.truncate(x, 0)[0], tree.set_head("y", y)[0].drop_head("y")]
    for version in versions:
        made = pickle.loads(pickle.dumps(version))
        assert tree_facts(made) == tree_facts(version)
        assert list(made) == list(version)


@given(st.lists(st.tuples(st.integers(0, 30), st.lists(st.integers(0, 3), max_size=2), st.booleans()), max_size=25))
@settings(max_examples=50, deadline=None)
def test_any_tree(steps: list[tuple[int, list[int], bool]]) -> None:
    """Nodes appended anywhere, some to an older version; heads moved in between."""
    tree = text_tree()
    versions = [tree]
    for at, tokens, move in steps:
        tree = versions[-1 - at % min(3, len(versions))]
        parent = list(tree)[at % len(tree)]
        if tokens or parent.parent is not None:
            tree, node = tree.append(parent, tokens, metadata={"at": at})
            tree = tree.set_head(f"h{at % 3}", node)[0] if move else tree
        versions.append(tree)
    for version in versions[-3:]:
        made = pickle.loads(pickle.dumps(version))
        assert tree_facts(made) == tree_facts(version)
        for node in version:
            assert facts(pickle.loads(pickle.dumps(node))) == facts(node)


def test_trees_go_over_while_they_are_added_to() -> None:
    session = sample()
    tree = session.tree
    before = tree_facts(tree)
    for number in range(50):
        session.append(session.root, [number, number])
    assert tree_facts(pickle.loads(pickle.dumps(tree))) == before
    assert len(pickle.loads(pickle.dumps(session.tree))) == len(tree) + 50


def test_values_that_hold_nodes() -> None:
    session = sample()
    node, head = session.heads["main"], session.head("main")
    assert pickle.loads(pickle.dumps(head)) == head
    assert type(pickle.loads(pickle.dumps(head))) is Head
    problems = (*session.validate(session.leaves()[-1]), Problem("malformed", node, "x", (node, node)))
    assert pickle.loads(pickle.dumps(problems)) == problems
    match = session.longest_prefix(node.input_ids(), [])
    assert pickle.loads(pickle.dumps(match)) == match
    recorded = session.record([9, 9], [3])
    assert pickle.loads(pickle.dumps(recorded)) == recorded
    found = pickle.loads(pickle.dumps(session.diff(node, session.root)))
    assert (found.ancestor, found.kind, found.removed.tolist()) == (session.root, "end", node.input_ids().tolist())
    assert pickle.loads(pickle.dumps({node: [node.parent]})) == {node: [node.parent]}


def test_errors_that_hold_nodes() -> None:
    """A worker's error arrives as it was raised."""
    session = sample()
    node = session.heads["main"]
    with pytest.raises(HeadMoved) as moved:
        session.set_head("main", node, expected=session.root)
    with pytest.raises(KeyTaken) as taken:
        for tokens in ([1], [2]):
            session.append(node, tokens, key="k")
    with pytest.raises(UnknownNode) as unknown:
        session.node(bytes(32))
    with pytest.raises(MediaSpanError) as span:
        session.append(node, [IMAGE_PAD], media=[image("x", 0)])
    for caught in (moved, taken, unknown, span):
        made = pickle.loads(pickle.dumps(caught.value))
        assert type(made) is type(caught.value)
        assert str(made) == str(caught.value)
        assert {name: repr(value) for name, value in vars(made).items()} == {
            name: repr(value) for name, value in vars(caught.value).items()
        }
    assert pickle.loads(pickle.dumps(moved.value)).actual == session.head("main")
    assert pickle.loads(pickle.dumps(taken.value)).node == taken.value.node


# --- going on from what came over -------------------------------------------------------------------------------------------


def gone_on(tree: SessionTree) -> list[bytes]:
    """Ids of all that these operations make of a tree, every parent named by its id; and where its heads are then."""
    made: list[bytes] = []
    table = np.arange(6).reshape(3, 2) + 100
    for node in [node.id for node in tree]:
        if tree.node(node).state.open_block is not None:
            tree, new = tree.append(node, [IMAGE_PAD, IMAGE_PAD, 6], media=[part("split", 0, 2, 2, unfinished=False)])
        else:
            tree, new = tree.append(node, [5, IMAGE_PAD, IMAGE_PAD, IMAGE_PAD, IMAGE_PAD, 6], media=[image("new", 1)], role="tool")
            made.append(tree.append(node, [1, 2], positions=table)[1].id)
        made.append(new.id)
        made.append(tree.append(new, [1], key="k")[1].id)
        tree, cut = tree.drop_last(new, 1)
        made.append(cut.id)
        tree, head = tree.set_head("main", cut)
        made.append(repr(head.version).encode())
    leaf = max(tree.leaves(), key=lambda leaf: (leaf.depth, leaf.id))
    tree, rewritten = tree.rewrite(leaf, [Edit(0, 1, [9, 9, 9])])
    tree, joined = tree.linearize(tree.children(tree.root)[:3])
    return [*made, rewritten.id, joined.id, *(node.id for node in tree)]


@pytest.mark.parametrize("rule", ["hf5", "sglang", "vllm"])
def test_appending_to_what_came_over_gives_the_same_ids(rule: str) -> None:
    tree = sample(rule).tree
    made = pickle.loads(pickle.dumps(tree))
    expected = gone_on(tree)
    assert gone_on(made) == expected
    assert gone_on(made) == expected, "it is a value: appending to it again gives the same"
    assert len(made) == len(tree)


def test_a_retry_and_a_key_are_known_on_the_other_side() -> None:
    tree = sample().tree
    made = pickle.loads(pickle.dumps(tree))
    film = next(node for node in made if node.media and node.media[0].modality == "video")
    assert film.parent is not None
    user = film.parent
    assert user.key == "user"
    same, known = made.append(film.parent, film.token_ids, media=film.media, metadata={"other": 1})
    assert same is made
    assert known is film
    assert made.append(user.parent or user, user.token_ids, media=user.media, key="user")[1] is user
    with pytest.raises(KeyTaken):
        made.append(user.parent or user, [1], key="user")
    assert made.append(tree.root, [2**31 - 1, 0])[0] is made, "nodes of the original name those of the copy"
    assert tree.append(made.leaves()[0], [77])[1] == made.append(tree.leaves()[0], [77])[1]


def test_limits_go_over_with_a_tree() -> None:
    tree = sample().tree
    made = pickle.loads(pickle.dumps(tree))
    assert made.limits == tree.limits == Limits(200, 20)
    leaf = made.leaves()[0]
    assert made.append(leaf, [1] * (180 - leaf.stop))[1].stop == 180
    with pytest.raises(LimitExceeded):
        made.append(leaf, [1] * (181 - leaf.stop))
    full = text_tree(max_tokens=3)
    full, node = full.append(full.root, [1, 2, 3])
    assert pickle.loads(pickle.dumps(full)).limits == Limits(3, 0)
    assert list(pickle.loads(pickle.dumps(full))) == [full.root, node]
    assert pickle.loads(pickle.dumps(node)).stop == 3
    session = SessionStore.in_memory().create("s", scheme="text@hf5", max_tokens=5, reserve_output=3)
    start = session.append(session.root, [1, 2])
    with session.draft(start) as draft:
        draft.extend([3, 4, 5])
        draft.commit()
    assert len(pickle.loads(pickle.dumps(session.tree))) == 3, "replies stand in the room kept for them"


def test_versions_of_heads_go_on() -> None:
    """So that what was read before a tree went over still decides afterwards."""
    session = sample()
    tree = session.tree
    made = pickle.loads(pickle.dumps(tree))
    head = made.head("main")
    assert head == tree.head("main")
    assert made.heads == tree.heads
    moved, new = made.set_head("main", made.root, expected=tree.head("main"))
    assert new.version == tree.set_head("main", tree.root)[1].version == session.set_head("main", session.root).version
    back, again = moved.set_head("main", head.node)
    assert again != head
    with pytest.raises(HeadMoved):
        back.set_head("main", made.root, expected=tree.head("main"))
    dropped = pickle.loads(pickle.dumps(tree.drop_head("main")))  # a drop is a move too: no version comes twice
    assert dropped.set_head("main", tree.root)[1].version == new.version + 1


def test_a_copy_shares_no_memory_with_the_original_and_frees_its_own() -> None:
    tree = sample().tree
    made = pickle.loads(pickle.dumps(tree))
    extents = {id(node._extent) for node in tree}
    assert not extents & {id(node._extent) for node in made}
    longer, node = made.append(made.leaves()[0], [1, 2, 3])
    assert node not in tree
    assert node not in made
    assert node in longer
    node_alone = pickle.loads(pickle.dumps(tree.leaves()[0]))
    weak = weakref.ref(made.root), weakref.ref(node_alone.path()[0])
    assert all(one() is not None for one in weak)
    del made, longer, node, node_alone
    gc.collect()
    assert [one() for one in weak] == [None, None]


FOREIGN: Final = [np.array([1, 2], ">i4"), np.array([1.5], ">f8"), np.array(["a"], ">U1"), np.array(["2024"], ">M8[Y]")]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("array", FOREIGN, ids=lambda array: array.dtype.str)
def test_arrays_keep_their_byte_order(array: np.ndarray[Any, Any], protocol: int) -> None:
    tree = SessionTree(vl())
    item = MediaItem("image", identity("x"), [(0, 4)], (1, 4, 4), extra={"scale": array})
    tree, noted = tree.append(tree.root, [1], metadata={"scale": array})
    tree, shown = tree.append(noted, [IMAGE_PAD] * 4, media=[item])
    assert pickle.loads(pickle.dumps(item, protocol)) == item
    assert facts(pickle.loads(pickle.dumps(noted, protocol))) == facts(noted)
    assert facts(pickle.loads(pickle.dumps(shown, protocol))) == facts(shown)
    assert tree_facts(pickle.loads(pickle.dumps(tree, protocol))) == tree_facts(tree)


# --- what stays behind ------------------------------------------------------------------------------------------------------


def test_features_do_not_go_over() -> None:
    store = SessionStore.in_memory()
    session = sample(store=store)
    node = next(node for node in session.tree if node.media)
    marked = np.full(100_000, 0x5EC4E7, np.int32)
    features = store.put_features(node.media[0], marked)
    assert store.get_features(node.media[0]) is features
    assert node.feature_store is not None
    for value in (node, session.tree):
        data = pickle.dumps(value)
        assert len(data) < 20_000
        assert marked[:4].tobytes() not in data
        made = pickle.loads(data)
        copies = [made] if isinstance(made, Node) else list(made)
        assert [copied.feature_store for copied in copies] == [None] * len(copies)
    assert store.usage().feature_bytes >= marked.nbytes


def test_features_are_named_as_missing_on_the_other_side() -> None:
    bridge = pytest.importorskip("engine_bridge")
    store = SessionStore.in_memory()
    session = sample(store=store)
    node = next(node for node in session.tree if node.media)
    store.put_features(node.media[0], np.zeros(4))
    made = pickle.loads(pickle.dumps(node))
    with pytest.raises(NeedsMedia) as caught:
        bridge.request_inputs(made, features=True)
    assert caught.value.items == node.media


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_sessions_stores_and_drafts_stay(protocol: int) -> None:
    store = SessionStore.in_memory()
    session = sample(store=store)
    draft = session.draft(session.root)
    for value in (session, store, draft):
        with pytest.raises(TypeError):
            pickle.dumps(value, protocol)
    data = pickle.dumps(session.tree, protocol)
    draft.extend([1])
    assert pickle.dumps(session.tree, protocol) == data, "an open draft is no part of a tree"
    weak = weakref.ref(session)
    made = pickle.loads(data)
    del session, store, draft, value
    gc.collect()
    assert weak() is None
    assert len(made) > 10


def test_a_closed_session_s_tree_goes_over() -> None:
    session = sample()
    tree, before = session.tree, tree_facts(session.tree)
    session.close()
    assert tree_facts(pickle.loads(pickle.dumps(tree))) == before


# --- other processes --------------------------------------------------------------------------------------------------------


def answer(value: Any) -> tuple[str, list[bytes], Any]:
    """What another process says of a value, what it goes on to, and the value."""
    if isinstance(value, SessionTree):
        return digest(value), gone_on(value), value
    return repr(facts(value)["positions"]), [node.id for node in value.path()], value


def test_another_process_says_the_same() -> None:
    """Spawned, so nothing is inherited: not the hash seed, not the index."""
    tree = sample().tree
    values: list[Any] = [tree, tree.forked(tree.leaves()[0]), tree.leaves()[0], tree.root]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        answers = pool.map(answer, values)
    for value, (told, grown, back) in zip(values, answers, strict=True):
        assert (told, grown) == answer(value)[:2]
        assert type(back) is type(value)
        if isinstance(value, SessionTree):
            assert tree_facts(back) == tree_facts(value)
        else:
            assert facts(back) == facts(value)


def test_a_process_that_only_unpickles() -> None:
    """Nothing of sessiontree is imported there before, so the pickle has to bring it; and no torch comes with it."""
    script = """
import pickle, sys
tree, node = pickle.load(sys.stdin.buffer)
assert node in tree and "torch" not in sys.modules
assert pickle.loads(pickle.dumps(tree)).node(node.id) == node
sys.stdout.buffer.write(pickle.dumps((tree, node, node.positions().tolist())))
"""
    tree = sample().tree
    node = tree.leaves()[0]
    done = subprocess.run(
        [sys.executable, "-c", script], input=pickle.dumps((tree, node)), capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    back, again, positions = pickle.loads(done.stdout)
    assert tree_facts(back) == tree_facts(tree)
    assert facts(again) == facts(node)
    assert positions == node.positions().tolist()


# --- tampering ----------------------------------------------------------------------------------------------------------------


class Forged:
    """Pickles as a call of one of the functions that unpickling makes."""

    def __init__(self, call: Callable[..., Any], *given_values: Any) -> None:
        self.reduced = call, given_values

    def __reduce__(self) -> Any:
        return self.reduced


def forged(call: Callable[..., Any], *given_values: Any) -> Any:
    return pickle.loads(pickle.dumps(Forged(call, *given_values)))


def parts(tree: SessionTree) -> Any:
    """What a tree's pickle holds: (what is constant, the root's id, records, heads, moves, annotations)."""
    reduced: Any = copyreg.dispatch_table[SessionTree](tree)
    assert reduced[0] is _tree
    return reduced[1]


def test_a_record_put_together_again_is_the_tree() -> None:
    tree = sample().tree
    assert tree_facts(forged(_tree, *parts(tree))) == tree_facts(tree)
    node = tree.leaves()[0]
    path = node.path()
    assert facts(forged(_node, _constants(path[0], Limits()), path[0].id, _records(path))) == facts(node)


IDENTITY_FIELDS: Final[dict[str, Callable[[Any], Any]]] = {
    "id": lambda record: record._replace(id=bytes(32)),
    "a bit of the id": lambda record: record._replace(id=bytes([record.id[0] ^ 1]) + record.id[1:]),
    "parent": lambda record: record._replace(parent=-1 if record.parent >= 0 else 0),
    "tokens": lambda record: record._replace(data=record.data[:-4] if record.data else b"\1\0\0\0"),
    "a token": lambda record: record._replace(data=b"\7" + record.data[1:] if record.data[:1] != b"\7" else b"\1\0\0\0"),
    "origin": lambda record: record._replace(origin="generated" if record.origin == "input" else "input"),
    "role": lambda record: record._replace(role=record.role + "x"),
    "key": lambda record: record._replace(key=(record.key or "") + "x"),
    "media": lambda record: record._replace(media=record.media[1:] if record.media else (image("forged", 0),)),
    "whether it has a table": lambda record: record._replace(external=not record.external),
}


@pytest.mark.parametrize("field", IDENTITY_FIELDS)
def test_whatever_makes_an_id_is_checked(field: str) -> None:
    """In each record of a tree, and of the path of a node."""
    tree = sample().tree
    constants, root, records, *heads = parts(tree)
    for call, own, rest in ((_tree, records, heads), (_node, _records(tree.leaves()[0].path()), [])):
        for at, record in enumerate(own):
            if field == "parent" and not at:
                continue
            changed = [*own[:at], IDENTITY_FIELDS[field](record), *own[at + 1 :]]
            with pytest.raises(CorruptTree):
                forged(call, constants, root, changed, *rest)


@pytest.mark.parametrize(
    "changes",
    [
        {"spans": [(2, 4)]},
        {"identity": bytes(32)},
        {"grid_thw": (1, 2, 8)},
        {"second_per_grid_ts": 2.0},
        {"extra": {"n": 2}},
        {"extra": None},
        {"unfinished": True},
    ],
)
def test_every_field_of_an_item_is_checked(changes: dict[str, Any]) -> None:
    tree = sample().tree
    constants, root, records, *rest = parts(tree)
    at, record = next((at, record) for at, record in enumerate(records) if record.media and record.media[0].extra)
    item = record.media[0]
    fields: dict[str, Any] = {name: getattr(item, name) for name in ("modality", "identity", "spans", "grid_thw", "extra")}
    forged_item = MediaItem(**{**fields, **changes})
    with pytest.raises(CorruptTree):
        forged(_tree, constants, root, [*records[:at], record._replace(media=(forged_item,)), *records[at + 1 :]], *rest)


def test_external_tables_are_checked() -> None:
    """Their positions and what comes after them are part of the id."""
    tree = sample().tree
    constants, root, records, *rest = parts(tree)
    with_tables = [at for at, record in enumerate(records) if record.external]
    assert len(with_tables) == 2
    for at in with_tables:
        record = records[at]
        [run] = unpacked(record.runs, len(record.data) // 4)
        assert isinstance(run, ExternalRun)
        flipped = packed([run._replace(data=bytes([run.data[0] ^ 1]) + run.data[1:])])
        for changed in (
            record._replace(runs=flipped),
            record._replace(state=record.state._replace(next_position=record.state.next_position + 1)),
            record._replace(state=record.state._replace(max_position=record.state.max_position + 1)),
            record._replace(state=record.state._replace(num_tokens=record.state.num_tokens + 1)),
        ):
            with pytest.raises(CorruptTree):
                forged(_tree, constants, root, [*records[:at], changed, *records[at + 1 :]], *rest)


def test_what_is_constant_in_a_session_is_checked() -> None:
    tree = sample().tree
    (scheme, namespace, fingerprint, limits), root, records, *rest = parts(tree)
    for constants in (
        (vl("sglang"), namespace, fingerprint, limits),
        (vl("hf5", tokens_per_second=3), namespace, fingerprint, limits),
        (scheme, namespace._replace(tenant="other"), fingerprint, limits),
        (scheme, namespace, "other", limits),
    ):
        assert isinstance(constants[0], PositionScheme)
        with pytest.raises(CorruptTree):
            forged(_tree, constants, root, records, *rest)
    with pytest.raises(CorruptTree):
        forged(_tree, (scheme, namespace, fingerprint, limits), bytes(32), records, *rest)


def test_flipped_bytes_are_found() -> None:
    """In tokens, roles, keys, identities of media and the ids themselves, wherever they lie in the pickle."""
    tree = sample().tree
    node = next(node for node in tree if node.key and not node.key.isascii())
    user = next(node for node in tree if node.key == "user")
    data = pickle.dumps(tree)
    wanted = [
        user.token_ids.tobytes(),
        np.array([2**31 - 1, 0], "<i4").tobytes(),
        user.id,
        node.id,
        tree.root.id,
        identity("extra"),
        b"system",
        b"\xc3\xbcssel",
    ]
    for piece in wanted:
        at = data.index(piece)
        for offset in {0, len(piece) // 2, len(piece) - 1}:
            damaged = bytearray(data)
            damaged[at + offset] ^= 1
            with pytest.raises((CorruptTree, UnicodeDecodeError)):
                pickle.loads(bytes(damaged))


def test_records_left_out_or_in_another_order() -> None:
    tree = text_tree()
    for at in range(6):
        tree, _ = tree.append(list(tree)[at // 2], [at])
    constants, root, records, *rest = parts(tree)
    for at in range(len(records) - 1):
        swapped = [*records[:at], records[at + 1], records[at], *records[at + 2 :]]
        try:
            made = forged(_tree, constants, root, swapped, *rest)
        except (CorruptTree, IndexError):
            continue
        assert {node.id for node in made} == {node.id for node in tree}, "siblings may change places, nothing else"
    with pytest.raises(CorruptTree):
        forged(_tree, constants, root, records[1:], *rest)


@pytest.mark.parametrize("parent", [5, 10**6, 2**70])
def test_a_parent_that_is_not_there(parent: int) -> None:
    tree = text_tree()
    for at in range(5):
        tree, _ = tree.append(list(tree)[at], [at])
    constants, root, records, *rest = parts(tree)
    _, moves, said = rest
    with pytest.raises(CorruptTree):
        forged(_tree, constants, root, [*records[:-1], records[-1]._replace(parent=parent)], *rest)
    with pytest.raises(CorruptTree):
        forged(_tree, constants, root, records, {"main": (parent + 5, 1, False)}, moves, said)
    with pytest.raises(CorruptTree, match="something is said"):
        forged(_tree, constants, root, records, {}, moves, {parent: {"reward": 1}})


STORED_POSITIONS: Final[dict[str, Callable[[Any], Any]]] = {
    "num_tokens": lambda record: record._replace(state=record.state._replace(num_tokens=90)),
}


@pytest.mark.parametrize("field", STORED_POSITIONS)
def test_stored_positions_are_checked(field: str) -> None:
    """As far as the record says itself what they must be."""
    tree = sample("hf5").tree
    constants, root, records, *rest = parts(tree)
    at = next(at for at, record in enumerate(records) if record.origin == "generated")
    assert records[at].replayed is not None
    changed = STORED_POSITIONS[field](records[at])
    with pytest.raises(CorruptTree):
        forged(_tree, constants, root, [*records[:at], changed, *records[at + 1 :]], *rest)
