"""Nothing that comes out of the library can be changed, and nothing that went in changes it later, short of ctypes."""

from __future__ import annotations

import copy
import pickle
import warnings
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from sessiontree import (
    Draft,
    Edit,
    ExternalPositions,
    MediaItem,
    Namespace,
    Node,
    Session,
    SessionStore,
    SessionTree,
    extend_drafts,
    media_identity,
)
from sessiontree.frozen import Sealed
from sessiontree.positions import scheme
from tests.test_tree import IMAGE_PAD, VIDEO_PAD, VISION_END, VISION_START, identity, image, node_print, tree_print, video, vl

SMALL = 2000


def sample() -> Session:
    """A session with every kind of node: text, media, a table, generated, cut, rewritten, branched, empty; and heads."""
    session = SessionStore.in_memory().create("s", scheme=vl(), namespace=Namespace("salt", "lora", "tenant"))
    metadata = {
        "list": [1, {"deep": [2, 3]}],
        "set": {1, 2},
        "array": np.arange(4.0),
        "nested": {"array": [np.arange(3), {"more": np.ones((2, 2))}]},
        "bytes": bytearray(b"abc"),
    }
    first = session.append(session.root, [VISION_START, *[IMAGE_PAD] * 4, VISION_END, 5], media=[image("a", 1)], metadata=metadata)
    with session.draft(first, metadata=metadata) as draft:
        draft.extend(range(100, 120))
        reply = draft.commit("length")
    second = session.append(reply, [7, *[VIDEO_PAD] * 6, 8], media=[video("v", 1)])
    session.append(reply, [9, 9, 9])  # a second child has an arena of its own, exactly filled
    session.append(session.root, range(11), role="system")
    table = session.append(second, [1, 2], positions=np.array([[50, 51], [50, 51], [60, 61]]))
    session.append(table, [])
    session.truncate(reply, reply.stop - 3)
    session.rewrite(second, [(first.stop + 1, first.stop + 3, [1, 2, 3])])
    session.append(session.root, range(SMALL))
    session.set_head("main", second)
    session.set_head("other", first)
    return session


def alone(number: int) -> Node:
    """Nodes whose tokens lie in memory in different ways."""
    session = SessionStore.in_memory().create("s", scheme="text@hf5")
    root = session.root
    first = session.append(root, range(10))  # 40 bytes of an arena of 64
    if number == 0:
        return first
    if number == 1:  # fills the arena exactly
        return session.append(first, range(6))
    if number == 2:  # a second child of the root
        return session.append(root, [1, 2, 3])
    if number == 3:  # a second child elsewhere
        session.append(first, [1])
        return session.append(first, [4, 5, 6])
    if number == 4:
        return session.truncate(first, 4)
    if number == 5:
        return session.rewrite(first, [(0, 2, [7, 7])])
    if number == 6:  # a layer over the session's tree
        second = session.append(first, [2])
        return session.tree.append(second, [4, 5])[1]
    if number == 7:
        return SessionStore.in_memory().fork(session, first, "f").append(first, [4, 5, 6])
    if number == 8:
        draft = session.draft(first)
        draft.extend([1, 2, 3])
        return draft.commit()
    if number == 9:
        session.append(root, [3])
        node = session.append(root, range(70_000))
        return node
    return session.append(session.append(first, range(6)), [5])  # the parent's arena has just grown


ALONE = range(11)


# --- arrays -------------------------------------------------------------------------------------------------------------


def bases(value: Any) -> Iterator[Any]:
    """``value`` and everything behind it: ``.base`` of arrays, ``.obj`` of memoryviews, to the end."""
    while value is not None:
        yield value
        if isinstance(value, memoryview):
            value = value.obj
        elif isinstance(value, np.ndarray):
            value = value.base
        else:
            return


def buffer(values: Any) -> memoryview:
    return memoryview(values)


def assert_sealed(values: np.ndarray[Any, Any]) -> None:
    """No way to write through an array, its flags or anything it stands on."""
    assert not values.flags.writeable
    copy = values.copy()
    for under in bases(values):
        if isinstance(under, np.ndarray):
            with pytest.raises(ValueError):
                under.flags.writeable = True
            with pytest.raises(ValueError):
                under.setflags(write=True)
            with pytest.raises(ValueError):
                under[...] = 0
            with pytest.raises(ValueError):
                under.sort()
            with pytest.raises(ValueError):
                under.view().flags.writeable = True
            if under.ndim == 1:
                with pytest.raises(ValueError):
                    np.add(under, 1, out=under)
            with pytest.raises(TypeError):
                buffer(under.reshape(-1).view(np.uint8))[:] = bytes(under.nbytes)
        elif isinstance(under, memoryview):
            assert under.readonly
            with pytest.raises(TypeError):
                under[0] = 0
        else:
            assert type(under) is bytes
    assert np.array_equal(values, copy)


def arrays_of(node: Node | Draft) -> Iterator[np.ndarray[Any, Any]]:
    yield node.token_ids
    for start in {0, node.start, node.stop // 2, node.stop}:
        yield node.input_ids(start)
        yield node.positions(start)
        yield node.positions(start, mode="as_replayed")
    yield node.input_ids(0, node.stop // 2)


def metadata_arrays(value: Any) -> Iterator[np.ndarray[Any, Any]]:
    if isinstance(value, np.ndarray):
        yield value
    elif hasattr(value, "values"):
        for entry in value.values():
            yield from metadata_arrays(entry)
    elif isinstance(value, tuple):
        for entry in value:
            yield from metadata_arrays(entry)


def write_through(values: np.ndarray[Any, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = torch.from_numpy(values)
    tensor.fill_(77)
    assert tensor.numel() == 0 or int(tensor.reshape(-1)[0]) == 77


def test_arrays_of_nodes_are_sealed_to_their_last_base() -> None:
    for node in sample().tree:
        for values in [*arrays_of(node), *metadata_arrays(node.metadata)]:
            assert_sealed(values)


def test_the_sample_has_metadata_arrays() -> None:
    assert sum(len(list(metadata_arrays(node.metadata))) for node in sample().tree) >= 9


@pytest.mark.parametrize("number", ALONE)
def test_arrays_are_sealed_however_the_tokens_lie(number: int) -> None:
    for values in arrays_of(alone(number)):
        assert_sealed(values)


@pytest.mark.parametrize("length", [100_000, 300_000])
def test_long_windows_are_sealed_and_nobody_elses(length: int) -> None:
    session = SessionStore.in_memory().create("s", scheme="text@hf5")
    node = session.append(session.root, range(length))
    fork = session.append(session.root, range(1, length + 1))
    for child in (node, fork, session.append(node, range(length)), session.append(fork, [1])):
        before = node_print(child)
        for values in arrays_of(child):
            assert_sealed(values)
            write_through(values)
        assert node_print(child) == before


@pytest.mark.parametrize("number", ALONE)
def test_tensors_over_windows_reach_no_node(number: int) -> None:
    node = alone(number)
    before = [node_print(step) for step in node.path()]
    for values in arrays_of(node):
        write_through(values)
        assert [node_print(step) for step in node.path()] == before


def test_tensors_over_anything_reach_no_node() -> None:
    session = sample()
    before = tree_print(session)
    for node in session.tree:
        for values in [*arrays_of(node), *metadata_arrays(node.metadata)]:
            write_through(values)
    assert tree_print(session) == before


def test_tensors_over_a_drafts_arrays_reach_nothing() -> None:
    session = sample()
    head = session.heads["main"]
    draft = session.draft(head, metadata={"a": np.arange(3), "b": [np.arange(2)]})
    draft.extend([1, 2, 3])
    before = tree_print(session)
    ids, positions = draft.input_ids().tolist(), draft.positions().tolist()
    for values in [*arrays_of(draft), *metadata_arrays(draft.metadata)]:
        assert_sealed(values)
        write_through(values)
    assert (draft.token_ids.tolist(), draft.input_ids().tolist(), draft.positions().tolist()) == ([1, 2, 3], ids, positions)
    assert [values.tolist() for values in metadata_arrays(draft.metadata)] in ([[0, 1, 2], [0, 1]], [[0, 1], [0, 1, 2]])
    assert tree_print(session) == before
    node = draft.commit()
    assert node.token_ids.tolist() == [1, 2, 3]
    assert node.metadata["a"].tolist() == [0, 1, 2]


def test_tensors_over_the_metadata_of_a_cut_or_rewritten_node() -> None:
    session = SessionStore.in_memory().create("s", scheme="text@hf5")
    node = session.append(session.root, [1, 2, 3], metadata={"a": np.arange(3)})
    for other in (session.truncate(node, 2), session.rewrite(node, [(0, 1, [9])])):
        write_through(other.metadata["a"])
        assert other.metadata["a"].tolist() == node.metadata["a"].tolist() == [0, 1, 2]


def test_positions_of_schemes_and_tables_are_sealed() -> None:
    rule = vl()
    planned, state = rule.extend(rule.initial_state(), [1, 2, 3])
    decoded, _ = rule.decode(state, [4, 5])
    external = ExternalPositions([[1, 2], [3, 4], [5, 6]], 9, 9)
    for values in (planned, decoded, external.positions):
        assert_sealed(values)
    write_through(external.positions)
    assert external.positions.tolist() == [[1, 2], [3, 4], [5, 6]]
    tree = SessionTree(rule)
    tree, node = tree.append(tree.root, [1, 2], positions=external)
    write_through(node.positions())
    write_through(external.positions)
    assert node.positions().tolist() == [[1, 2], [3, 4], [5, 6]]
    write_through(planned)
    assert rule.extend(rule.initial_state(), [1, 2, 3])[0].tolist() == [[0, 1, 2]] * 3


# --- objects ------------------------------------------------------------------------------------------------------------


def names_of(value: object) -> set[str]:
    """Every attribute and slot, public and private, of a value and its class."""
    slots: set[str] = set()
    for cls in type(value).__mro__:
        own = cls.__dict__.get("__slots__", ())
        slots |= {own} if isinstance(own, str) else set(own)
    return {*dir(value), *slots, "brand_new"} - {"__class__"}


MISSING = object()


def openings(value: object, harmless: Callable[[], bool] = lambda: False) -> list[str]:
    """Ways to change ``value`` that worked, each undone at once; ``harmless`` says that one made no difference."""
    found = []

    def attempt(how: str, name: str, change: Callable[[], object]) -> None:
        before = getattr(value, name, MISSING)
        try:
            change()
        except (AttributeError, TypeError):
            return
        try:
            if not harmless():
                found.append(f"{how} {type(value).__name__}.{name}")
        finally:
            if before is MISSING:
                object.__delattr__(value, name)
            else:
                object.__setattr__(value, name, before)

    for name in sorted(names_of(value)):
        attempt("object.__setattr__", name, partial(object.__setattr__, value, name, 0))
        attempt("setattr", name, partial(setattr, value, name, 0))
        if hasattr(value, name):
            attempt("object.__delattr__", name, partial(object.__delattr__, value, name))
            attempt("delattr", name, partial(delattr, value, name))
    if hasattr(value, "__dict__"):
        found.append(f"{type(value).__name__} has a __dict__")
    return found


def values_of(session: Session) -> dict[str, Any]:
    """One of each kind of value that comes out of a session."""
    tree = session.tree
    node = session.heads["main"]
    cut = next(node for node in tree if node.links and node.links[0].kind == "prefix_of")
    rich = next(node for node in tree if node.metadata)
    return {
        "root": session.root,
        "node": node,
        "cut node": cut,
        "item": node.path()[1].media[0],
        "tree": tree,
        "head": session.head("main"),
        "link": cut.links[0],
        "scheme": node.scheme,
        "state": node.position_state(),
        "placed": node.state,
        "run": node.runs[0] if isinstance(node.runs, tuple) else None,
        "namespace": node.namespace,
        "limits": tree.limits,
        "external": ExternalPositions([[1]]),
        "position": node.next_position,
        "path": node.path(),
        "spans": node.media_spans(),
        "edit": Edit(0, 1, (2,)),
        "metadata": rich.metadata,
        "empty metadata": session.root.metadata,
        "nested metadata": rich.metadata["list"][1],
        "heads": session.heads,
        "heads of a tree": tree.heads,
        "parameters": node.scheme.params,
    }


VALUES = (
    "root",
    "node",
    "cut node",
    "item",
    "tree",
    "head",
    "link",
    "scheme",
    "state",
    "placed",
    "run",
    "namespace",
    "limits",
    "external",
    "position",
    "path",
    "spans",
    "edit",
)
MAPS = ("metadata", "empty metadata", "nested metadata", "heads", "heads of a tree", "parameters")


@pytest.mark.parametrize("what", VALUES)
def test_no_attribute_or_slot_can_be_set_or_deleted(what: str) -> None:
    session = sample()
    before = tree_print(session)
    assert openings(values_of(session)[what]) == []
    assert tree_print(session) == before


@pytest.mark.parametrize("what", MAPS)
def test_no_change_to_a_map_reaches_what_it_came_from(what: str) -> None:
    """pyrsistent's maps can be changed by whoever wants to; what they were read from must not change with them."""
    session = sample()
    tree = session.tree
    before = tree_print(session), tree_print(tree), dict(SessionTree("text@hf5").root.metadata)

    def unchanged() -> bool:
        try:
            return (tree_print(session), tree_print(tree), dict(SessionTree("text@hf5").root.metadata)) == before
        except Exception:
            return False

    values = {**values_of(session), "heads of a tree": tree.heads}
    assert openings(values[what], unchanged) == []
    assert unchanged()


@pytest.mark.parametrize("what", ["node", "item", "tree", "scheme", "external"])
def test_the_class_of_a_value_stays(what: str) -> None:
    session = sample()
    value = values_of(session)[what]
    cls = type(value)
    twins = [type("Twin", (Sealed,), {"__slots__": cls.__dict__["__slots__"]})]
    if what == "scheme":  # families are subclasses
        twins.append(type("Evil", (cls,), {"__slots__": ()}))
    else:
        with pytest.raises(TypeError):
            type("Evil", (cls,), {"__slots__": ()})
    for twin in twins:
        for attempt in (object.__setattr__, setattr):
            with suppress(AttributeError, TypeError):
                attempt(value, "__class__", twin)
            assert type(value) is cls


@pytest.mark.parametrize("what", ["item", "tree", "scheme", "external", "node", "namespace", "head", "link"])
def test_a_value_cannot_be_initialised_again(what: str) -> None:
    session = sample()
    value = values_of(session)[what]
    before = (tree_print(session), repr(value), hash(value))
    arguments: dict[str, tuple[Any, ...]] = {
        "item": ("video", identity("evil"), [(0, 1)], (1, 2, 2)),
        "tree": ("text@vllm",),
        "scheme": ("vllm", {"tokens_per_second": 9}),
        "external": ([[9, 9]],),
        "namespace": ("evil",),
        "head": (session.root, 9),
        "link": ("prefix_of", bytes(32), 9),
    }
    with suppress(AttributeError, TypeError):
        type(value).__init__(value, *arguments.get(what, ()))
    if hasattr(value, "__setstate__"):
        for state in ({name: 0 for name in names_of(value)}, (0,) * 20, (None, {name: 0 for name in names_of(value)})):
            with suppress(AttributeError, TypeError):
                value.__setstate__(state)
    assert (tree_print(session), repr(value), hash(value)) == before


def test_containers_take_no_items() -> None:
    session = sample()
    rich = next(node for node in session.tree if node.metadata)
    node = session.heads["main"]
    before = tree_print(session)
    containers: list[Any] = [
        rich.metadata,
        rich.metadata["list"],
        rich.metadata["list"][1],
        rich.metadata["list"][1]["deep"],
        rich.metadata["nested"],
        rich.metadata["nested"]["array"],
        rich.metadata["set"],
        rich.metadata["bytes"],
        node.media,
        node.links,
        node.path(),
        node.media_spans(),
        node.media[0].spans,
        node.media[0].grid_thw,
        node.id,
        session.heads,
        session.tree.heads,
        session.head("main"),
        node.scheme.params,
        session.leaves(),
        session.children(session.root),
    ]
    for container in containers:
        for key in (0, "list", "main", "deep"):
            with pytest.raises(TypeError):
                container[key] = 1
            with pytest.raises((TypeError, AttributeError)):
                del container[key]
        for name in ("append", "extend", "clear", "pop", "insert", "add", "setdefault", "popitem", "__setitem__", "__ior__"):
            assert not hasattr(container, name), name
    maps: list[Any] = [rich.metadata, rich.metadata["list"][1], session.heads, session.tree.heads, node.scheme.params]
    for container in maps:
        for changed in (container.set("x", 1), container.remove(next(iter(container))), container.update({"x": 1})):
            assert changed is not container
        evolver = container.evolver()
        evolver["x"] = 1
        evolver.persistent()
    assert tree_print(session) == before


def test_metadata_is_frozen_to_plain_immutable_types() -> None:
    class Loud(str):
        colour = "red"

    class Count(int):
        pass

    class Share(float):
        pass

    session = SessionStore.in_memory().create("s", scheme="text@hf5")
    metadata = {"text": Loud("a"), "int": Count(3), "float": Share(0.5), "np": np.float64(2.5), Loud("key"): (Loud("b"),)}
    node = session.append(session.root, [1], role=Loud("user"), metadata=metadata, key=Loud("k"))
    assert node.metadata == {"text": "a", "int": 3, "float": 0.5, "np": 2.5, "key": ("b",)}
    kept = [*node.metadata, *node.metadata.values(), node.metadata["key"][0], node.role, node.key]
    assert {type(value) for value in kept} <= {str, int, float, tuple}


# --- what goes in -------------------------------------------------------------------------------------------------------

INPUTS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "list": (lambda: [1, 2, 3], lambda ids: ids.clear()),
    "array": (lambda: np.array([1, 2, 3]), lambda ids: ids.fill(9)),
    "int32 array": (lambda: np.array([1, 2, 3], np.int32), lambda ids: ids.fill(9)),
    "view": (lambda: np.array([1, 2, 3, 4], np.int32)[:3], lambda ids: ids.base.fill(9)),
    "tensor": (lambda: torch.tensor([1, 2, 3], dtype=torch.int32), lambda ids: ids.fill_(9)),
    "int64 tensor": (lambda: torch.tensor([1, 2, 3]), lambda ids: ids.fill_(9)),
    "bytearray": (lambda: bytearray([1, 2, 3]), lambda ids: ids.clear()),
    "array.array": (lambda: array("i", [1, 2, 3]), lambda ids: ids.pop()),
    "memoryview": (lambda: memoryview(bytearray([1, 2, 3])), lambda ids: ids.__setitem__(0, 9)),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_token_ids_given_to_any_call_stay_the_callers(kind: str) -> None:
    make, spoil = INPUTS[kind]
    session = SessionStore.in_memory().create("s", scheme="text@hf5")
    draft, batch, lone = (session.draft(session.root) for _ in range(3))
    base = session.append(session.root, [7, 7, 7])
    given_ids = [make() for _ in range(8)]
    copies = [list(map(int, ids)) for ids in given_ids]
    first = session.append(session.root, given_ids[0])
    draft.extend(given_ids[1])
    extend_drafts([batch], [given_ids[2]])
    rewritten = session.rewrite(base, [Edit(1, 2, given_ids[3])])
    replaced = session.replace(base, given_ids[4], head="main", role="system")
    tree, valued = session.tree.append(base, given_ids[5])
    external = session.rewrite(base, iter([(0, 1, given_ids[6])]))
    lone.extend(given_ids[7])
    assert [list(map(int, ids)) for ids in given_ids] == copies, "the caller's objects are as they were"
    before = tree_print(session), tree_print(tree)
    for ids in given_ids:
        spoil(ids)
    assert (tree_print(session), tree_print(tree)) == before
    for holder in (first, draft, batch, replaced, valued, lone):
        assert holder.token_ids.tolist() == [1, 2, 3]
    assert rewritten.input_ids().tolist() == [7, 1, 2, 3, 7]
    assert external.input_ids().tolist() == [1, 2, 3, 7, 7]
    assert draft.commit().token_ids.tolist() == [1, 2, 3]


def test_everything_else_given_stays_the_callers() -> None:
    spans, grid, sizes = [[1, 4]], [1, 4, 4], [[1, 2]]
    raw: Any = bytearray(identity("a"))
    item = MediaItem("image", raw, spans, grid, target_sizes=sizes)
    array_spans = np.array([[6, 4]])
    array_grid: Any = np.array([1, 4, 4])
    tensor_grid: Any = torch.tensor([1, 4, 4])
    other = MediaItem("image", identity("b"), array_spans, array_grid)
    third = MediaItem("image", identity("c"), [(11, 4)], tensor_grid)
    media = [item, other, third]
    logprobs = np.arange(3.0)
    weights = torch.arange(3.0)
    metadata: dict[str, Any] = {"a": {"b": [1, {2}, logprobs]}, "c": bytearray(b"x"), "d": weights}
    parameters: dict[str, Any] = {"tokens_per_second": 2}
    names: dict[str, str | None] = {"tenant": "t"}
    session = SessionStore.in_memory().create("s", scheme=scheme("qwen2_5_vl@hf5", **parameters), namespace=names)
    node = session.append(
        session.root, [0, *[IMAGE_PAD] * 4, 0, *[IMAGE_PAD] * 4, 0, *[IMAGE_PAD] * 4], media=media, metadata=metadata
    )
    table = np.arange(6).reshape(3, 2)
    placed = session.append(node, [1, 2], positions=table)
    state: Any = bytearray(b"state")
    draft = session.draft(node, metadata=metadata)
    draft.set_state(state)
    edit = [0, 1, [5], []]
    edits = [edit]
    rewritten = session.rewrite(node, edits)
    assert (spans, grid, sizes, len(media), edits) == ([[1, 4]], [1, 4, 4], [[1, 2]], 3, [[0, 1, [5], []]])
    assert list(metadata) == ["a", "c", "d"]
    assert table.tolist() == [[0, 1], [2, 3], [4, 5]]
    before = tree_print(session)
    spans[0][0] = grid[0] = sizes[0][0] = 9
    raw[0] ^= 1
    array_spans.fill(9)
    array_grid.fill(9)
    tensor_grid.fill_(9)
    media.clear()
    metadata["a"]["b"][1].add(3)
    metadata["a"]["b"].append(4)
    metadata["a"]["e"] = 5
    metadata["c"].clear()
    metadata["f"] = 1
    logprobs.fill(-1)
    weights.fill_(-1)
    table.fill(9)
    state.clear()
    edits.clear()
    edit.clear()
    names["tenant"] = "evil"
    parameters["tokens_per_second"] = 9
    assert tree_print(session) == before
    assert item.fields() == ("image", identity("a"), ((1, 4),), (1, 4, 4), None, None, ((1, 2),), 0, False)
    assert draft.state == b"state"
    assert draft.commit("stop").metadata["a"]["b"][2].tolist() == [0.0, 1.0, 2.0]
    assert placed.positions(node.stop).tolist() == [[0, 1], [2, 3], [4, 5]]
    assert rewritten.metadata["d"].tolist() == [0.0, 1.0, 2.0]
    assert session.namespace.tenant == "t"
    assert session.scheme.params["tokens_per_second"] == 2


def test_media_identity_changes_nothing_it_reads() -> None:
    pixels = np.arange(6.0)
    options = {"a": [1]}
    media_identity("image", [pixels], options=options)
    assert pixels.flags.writeable
    assert pixels.tolist() == [0, 1, 2, 3, 4, 5]
    assert options == {"a": [1]}


def test_values_copy_and_pickle_as_values() -> None:
    session = sample()
    values = values_of(session)
    for what in ("item", "scheme", "external", "namespace", "limits", "position", "state", "link", "metadata"):
        value = values[what]
        for made in (copy.copy(value), copy.deepcopy(value), *([] if what == "metadata" else [pickle.loads(pickle.dumps(value))])):
            assert type(made) is type(value), what
            if what == "external":
                assert made.positions.tolist() == value.positions.tolist()
            elif what != "metadata":
                assert made == value, what
            if what != "metadata":
                assert openings(made) == [], what
    for what in ("node", "tree", "head"):
        assert copy.copy(values[what]) == copy.deepcopy(values[what]) == values[what]
    assert copy.deepcopy(values["head"]).node is values["head"].node
    for what in ("node", "tree"):
        assert copy.deepcopy({"x": [values[what]]})["x"][0] is values[what]
    node = pickle.loads(pickle.dumps(values["node"]))
    assert node == values["node"]
