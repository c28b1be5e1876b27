"""CASES.md, the tree's meaning and lifecycle: aborts, branches, cuts, freezing; the rows' own numbers, and their kinds."""

from __future__ import annotations

import copy
import gc
import itertools
import random
import tracemalloc
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_bridge import request_inputs, to_transformers
from sessiontree import (
    Draft,
    DraftClosed,
    Edit,
    ExternalPositions,
    FinishRefused,
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
    Session,
    SessionExists,
    SessionStore,
    SessionTree,
    SessionTreeError,
    StaleSession,
    UnknownNode,
    extend_drafts,
    media_identity,
)
from sessiontree.positions import scheme
from tests.reference import Segment
from tests.toy import (
    A_IDS,
    A_TABLE,
    IMG,
    PAD_VALUE,
    a_turn,
    attack_array,
    attack_slots,
    check,
    fingerprint,
    grow,
    histories,
    image,
    media,
    new_session,
    refuses,
    reply,
    same,
    shown,
    spans_of,
    toy_scheme,
    tree_digest,
    turn,
    video,
)

EXAMPLES = settings(max_examples=40, deadline=None)


def text_session(**options: Any) -> Session:
    return new_session(scheme("text@sglang"), **options)


def decode(session: Session, parent: Node, *tokens: int, **how: Any) -> Node:
    draft = session.draft(parent)
    draft.extend(tokens)
    return draft.commit(**how)


# --- C35: no operation changes an older node --------------------------------------------------------------------------
def test_c35_a_childs_image_is_the_childs() -> None:
    session = new_session()
    parent = grow(session, session.root, a_turn())
    sibling = grow(session, parent, turn(4))
    before = [fingerprint(node) for node in session.tree]
    child = grow(session, parent, a_turn(number=1))
    assert [fingerprint(node) for node in session.tree][:3] == before
    assert (len(parent.media), len(sibling.media), len(child.media)) == (1, 0, 1)
    assert parent.media_spans() == ((parent.media[0], 3, 7),)
    assert spans_of(child) == [(parent.media[0].identity, 3, 7), (child.media[0].identity, 12, 16)]


def random_operation(session: Session, rng: random.Random, node: Node) -> Node:
    """One operation at a node; what it made."""
    tokens = [rng.randrange(1000) for _ in range(rng.randrange(1, 6))]
    head = rng.choice(["main", "other"])
    match rng.randrange(9):
        case 0:
            return session.append(node, tokens, metadata={"step": tokens})
        case 1:
            height, width = rng.randrange(2, 7, 2), rng.randrange(2, 7, 2)
            return grow(session, node, turn(*tokens, *shown(image(height, width, rng.randrange(3)))))
        case 2:
            return grow(session, node, turn(*shown(video(rng.randrange(1, 4)))))
        case 3:
            draft = session.draft(node)
            draft.extend(tokens)
            draft.rollback(rng.randrange(len(tokens) + 1))
            draft.extend(tokens)
            return draft.commit(length=rng.randrange(1, len(draft) + 1))
        case 4:
            with session.draft(node) as draft:
                draft.extend(tokens)
            return node
        case 5:
            return session.truncate(node, rng.randrange(node.stop + 1))
        case 6:
            return session.rewrite(node, [Edit(at := rng.randrange(node.stop + 1), at, tokens)])
        case 7:
            return node if node.parent is None else session.replace(node, tokens, head=head)
        case _:
            session.set_head(head, node)
            return node


def test_c35_ten_thousand_operations_and_every_ancestor_and_sibling() -> None:
    rng = random.Random(35)
    refused = changed = 0
    for round_number in range(100):
        session = new_session(name=f"round {round_number}")
        known = {session.root.id: fingerprint(session.root)}
        nodes = [session.root]
        for _ in range(100):
            node = rng.choice(nodes[-12:])
            if node.depth > 8:
                node = node.path()[4]
            around = [*node.path(), *session.siblings(node), *session.children(node)]
            assert [fingerprint(other) for other in around] == [known[other.id] for other in around]
            try:
                made = random_operation(session, rng, node)
            except (MediaSpanError, OutOfRange):
                refused += 1
                made = node
            assert [fingerprint(other) for other in around] == [known[other.id] for other in around]
            for other in made.path():
                changed += other.id not in known
                known.setdefault(other.id, fingerprint(other))
            nodes.append(made)
        assert {node.id: fingerprint(node) for node in session.tree} == known
    assert changed > 3000
    assert refused < 3000


# --- C36: what a caller passes in stays the caller's, and the node its own --------------------------------------------
IDS = [1, 2, 3, 200, 5]
TOKEN_TYPES: dict[str, Callable[[], Any]] = {
    "list": lambda: list(IDS),
    "int32": lambda: np.array(IDS, dtype=np.int32),
    "int64": lambda: np.array(IDS),
    "uint8": lambda: np.array(IDS, dtype=np.uint8),
    "big-endian": lambda: np.array(IDS, dtype=">i4"),
    "every second": lambda: np.repeat(np.array(IDS, dtype=np.int32), 2)[::2],
    "writable view": lambda: np.frombuffer(bytearray(np.array(IDS, dtype=np.int32).tobytes()), dtype=np.int32),
    "tensor": lambda: torch.tensor(IDS),
    "int32 tensor": lambda: torch.tensor(IDS, dtype=torch.int32),
    "tensor row": lambda: torch.tensor([IDS, IDS])[1],
    "bytearray": lambda: bytearray(IDS),
    "memoryview": lambda: memoryview(bytearray(IDS)),
    "array i": lambda: array("i", IDS),
    "array q": lambda: array("q", IDS),
    "array I": lambda: array("I", IDS),
}


def scribble(value: Any) -> None:
    """Overwrite every element of something mutable, and lengthen what can grow."""
    for at in range(len(value)):
        value[at] = 77
    if isinstance(value, (list, array, bytearray)):
        value.extend([77, 77])
    assert list(map(int, value))[: len(IDS)] != IDS


def content(value: Any) -> list[int]:
    return [int(entry) for entry in value]


def by_append(session: Session, parent: Node, given: Any) -> Callable[[], object]:
    node = session.append(parent, given)
    return lambda: (node.token_ids.tolist(), fingerprint(node))


def by_tree(session: Session, parent: Node, given: Any) -> Callable[[], object]:
    tree, node = session.tree.append(parent, given)
    return lambda: (node.token_ids.tolist(), tree_digest(tree))


def by_replace(session: Session, parent: Node, given: Any) -> Callable[[], object]:
    node = session.replace(session.append(parent, [9]), given, head="main")
    return lambda: (node.token_ids.tolist(), fingerprint(node))


def by_draft(session: Session, parent: Node, given: Any) -> Callable[[], object]:
    draft = session.draft(parent)
    draft.extend(given)
    return lambda: (draft.token_ids.tolist(), draft.input_ids().tolist(), draft.positions().tolist())


def by_commit(session: Session, parent: Node, given: Any) -> Callable[[], object]:
    draft = session.draft(parent)
    draft.extend(given)
    node = draft.commit()
    return lambda: (node.token_ids.tolist(), fingerprint(node), draft.token_ids.tolist())


def by_batch(session: Session, parent: Node, given: Any) -> Callable[[], object]:
    drafts = [session.draft(parent) for _ in given]
    extend_drafts(drafts, given)
    return lambda: ([int(draft.token_ids[0]) for draft in drafts], [len(draft) for draft in drafts])


def by_batch_of_runs(session: Session, parent: Node, given: Any) -> Callable[[], object]:
    drafts = [session.draft(parent), session.draft(parent)]
    runs = [given, [1]]
    extend_drafts(drafts, runs)
    runs[1] = given
    return lambda: (drafts[0].token_ids.tolist(), drafts[1].token_ids.tolist())


def by_edit(session: Session, parent: Node, given: Any) -> Callable[[], object]:
    edit = Edit(0, 0, given)
    edits: list[Edit] = [edit]
    node = session.rewrite(session.append(parent, [9, 9]), edits)
    edits.append(Edit(0, 1))
    return lambda: (node.input_ids(0, len(IDS)).tolist(), fingerprint(node))


def by_edit_list(session: Session, parent: Node, given: Any) -> Callable[[], object]:
    edit: list[Any] = [0, 1, given, []]
    node = session.rewrite(session.append(parent, [9, 9]), [edit])
    edit[:] = [0, 0, [], []]
    return lambda: (node.input_ids(0, len(IDS)).tolist(), fingerprint(node))


TAKERS = [by_append, by_tree, by_replace, by_draft, by_commit, by_batch, by_batch_of_runs, by_edit, by_edit_list]


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("kind", TOKEN_TYPES)
def test_c36_tokens_of_every_type(taker: Callable[[Session, Node, Any], Callable[[], Any]], kind: str) -> None:
    session = text_session()
    given = TOKEN_TYPES[kind]()
    read = taker(session, session.root, given)
    assert content(given) == IDS  # the call left it as it was
    before = read()
    assert before[0] == IDS
    scribble(given)
    assert read() == before
    if taker is by_draft:  # the draft goes on, and the caller's object does not grow with it
        again = TOKEN_TYPES[kind]()
        read = taker(session, session.root, again)
        assert content(again) == IDS


@pytest.mark.parametrize(
    "given", [tuple(IDS), bytes(IDS), [np.int64(token) for token in IDS], *[make() for make in TOKEN_TYPES.values()]]
)
def test_c36_tokens_of_every_type_are_the_same_node(given: Any) -> None:
    session = text_session()
    assert session.append(session.root, given) is session.append(session.root, IDS)
    assert session.append(session.root, range(1, 4)) is session.append(session.root, [1, 2, 3])


@pytest.mark.parametrize("kind", ["list", "int32", "int64", "tensor", "array i"])
def test_c36_many_tokens(kind: str) -> None:
    """As many as the library hands out as views."""
    makers: dict[str, Callable[[Sequence[int]], Any]] = {
        "list": list,
        "int32": lambda ids: np.array(ids, dtype=np.int32),
        "int64": np.array,
        "tensor": torch.tensor,
        "array i": lambda ids: array("i", ids),
    }
    ids = list(range(10_000))
    session = text_session()
    given = makers[kind](ids)
    node = session.append(session.root, given)
    draft = session.draft(node)
    draft.extend(given)
    before = fingerprint(node)
    scribble(given)
    assert fingerprint(node) == before
    assert node.input_ids().tolist() == ids
    assert draft.input_ids().tolist() == ids + ids
    assert fingerprint(draft.commit()) == fingerprint(session.children(node)[0])


def test_c36_later_chunks_do_not_grow_the_callers_list() -> None:
    """vLLM #54215: tokens of later chunks appeared in the caller's prompt list."""
    session = text_session()
    prompt = [1, 2, 3]
    node = session.append(session.root, prompt)
    finished = decode(session, node, 4, 5, 6)
    next_turn = grow(session, finished, turn(7, 8), reply(9))
    assert prompt == [1, 2, 3]
    assert node.token_ids.tolist() == [1, 2, 3]
    assert finished.token_ids.tolist() == [4, 5, 6]
    assert next_turn.input_ids().tolist() == list(range(1, 10))


def nested() -> dict[str, Any]:
    return {
        "list": [1, [2, {"deep": [3]}]],
        "dict": {"a": {"b": [1, 2]}, 5: "five"},
        "bytearray": bytearray(b"abc"),
        "memoryview": memoryview(bytearray(b"abc")),
        "array": np.arange(4),
        "tensor": torch.arange(4),
        "set": {1, 2},
        "tuple": ([1], {"x": [2]}),
        "tool_calls": ["call-1", "call-2"],
        "plain": (1, 2.5, None, True, "text", b"bytes"),
    }


def vandalise(value: Any) -> None:
    """Change everything that can be changed, to the bottom."""
    if isinstance(value, dict):
        for entry in value.values():
            vandalise(entry)
        value.clear()
        value["new"] = 1
    elif isinstance(value, list):
        for entry in value:
            vandalise(entry)
        value[:] = [None]
    elif isinstance(value, tuple):
        for entry in value:
            vandalise(entry)
    elif isinstance(value, set):
        value.clear()
    elif isinstance(value, (bytearray, memoryview)):
        value[:] = bytes(len(value))
    elif isinstance(value, np.ndarray):
        value[:] = -1
    elif isinstance(value, torch.Tensor):
        value.fill_(-1)


def test_c36_the_vandal_does_change_things() -> None:
    kept = nested()
    vandalise(kept)
    assert kept == {"new": 1}
    inner = nested()
    entries = dict(inner)
    vandalise(inner)
    assert entries["list"] == [None]
    assert entries["array"].tolist() == [-1] * 4
    assert bytes(entries["memoryview"]) == bytes(3)


@pytest.mark.parametrize("where", ["append", "replace", "draft", "tree"])
def test_c36_nested_metadata(where: str) -> None:
    session = text_session()
    base = session.append(session.root, [1])
    given = nested()
    inner = dict(given)
    sources: dict[str, Callable[[], Node | Draft]] = {
        "append": lambda: session.append(base, [2], metadata=given),
        "replace": lambda: session.replace(base, [2], head="main", metadata=given),
        "draft": lambda: session.draft(base, metadata=given),
        "tree": lambda: session.tree.append(base, [2], metadata=given)[1],
    }
    made = sources[where]()
    expected = {
        "list": (1, (2, {"deep": (3,)})),
        "dict": {"a": {"b": (1, 2)}, 5: "five"},
        "bytearray": b"abc",
        "memoryview": b"abc",
        "set": {1, 2},
        "tuple": ((1,), {"x": (2,)}),
        "tool_calls": ("call-1", "call-2"),
        "plain": (1, 2.5, None, True, "text", b"bytes"),
    }

    def holds(metadata: Mapping[str, Any]) -> bool:
        arrays = [metadata["array"].tolist(), metadata["tensor"].tolist()]
        return {name: metadata[name] for name in expected} == expected and arrays == [[0, 1, 2, 3]] * 2

    assert holds(made.metadata)
    assert given.keys() == nested().keys()
    for entry in inner.values():
        vandalise(entry)
    vandalise(given)
    assert holds(made.metadata)
    if isinstance(made, Draft):
        assert holds(made.commit().metadata)


ITEM_ARGUMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "lists": lambda: {"spans": [[3, 4]], "grid_thw": [1, 4, 4], "target_sizes": [[4, 4]]},
    "arrays": lambda: {"spans": np.array([[3, 4]]), "grid_thw": np.array([1, 4, 4]), "target_sizes": np.array([[4, 4]])},
    "tensors": lambda: {
        "spans": torch.tensor([[3, 4]]),
        "grid_thw": torch.tensor([1, 4, 4]),
        "target_sizes": torch.tensor([[4, 4]]),
    },
}


@pytest.mark.parametrize("kind", ITEM_ARGUMENTS)
def test_c36_arguments_of_a_media_item(kind: str) -> None:
    session = new_session()
    given = ITEM_ARGUMENTS[kind]()
    identity = bytearray(range(32))
    seconds = np.array(0.5)
    item = MediaItem("image", identity, second_per_grid_ts=seconds, **given)  # type: ignore[arg-type]
    items = [item]
    node = session.append(session.root, A_IDS, media=items)
    before = fingerprint(node), item.fields()
    for value in given.values():
        vandalise(value)
    vandalise(identity)
    seconds[...] = 9.0
    items.append(item)
    items[0] = MediaItem("image", bytes(32), [(0, 1)])
    assert (fingerprint(node), item.fields()) == before
    assert item.spans == ((3, 4),)
    assert item.identity == bytes(range(32))
    assert item.grid_thw == (1, 4, 4)
    assert item.second_per_grid_ts == 0.5
    assert node.media == (item,)
    assert same(node.positions(), A_TABLE)


def test_c36_media_lists_of_an_edit_and_a_replacement() -> None:
    session = new_session()
    first = session.append(session.root, [7, 8])
    makers: list[Callable[[list[MediaItem]], Node]] = [
        lambda items: session.replace(first, A_IDS, head="main", media=items),
        lambda items: session.rewrite(first, [Edit(0, 2, A_IDS, items)]),
        lambda items: session.rewrite(first, [[0, 2, A_IDS, items]]),
        lambda items: session.tree.append(first.path()[0], A_IDS, media=items)[1],
    ]
    for make in makers:
        items = media(a_turn())
        node = make(items)
        before = fingerprint(node)
        items.clear()
        assert fingerprint(node) == before
        assert len(node.media) == 1
        assert same(node.positions(), A_TABLE)


@pytest.mark.parametrize("kind", ["list", "array", "int32 array", "tensor", "ExternalPositions", "ExternalPositions of a tensor"])
def test_c36_external_tables(kind: str) -> None:
    makers: dict[str, Callable[[], tuple[Any, Any]]] = {
        "list": lambda: (table := A_TABLE.tolist(), table),
        "array": lambda: (table := A_TABLE.copy(), table),
        "int32 array": lambda: (table := A_TABLE.astype(np.int32), table),
        "tensor": lambda: (table := torch.tensor(A_TABLE), table),
        "ExternalPositions": lambda: (table := A_TABLE.copy(), ExternalPositions(table)),
        "ExternalPositions of a tensor": lambda: (table := torch.tensor(A_TABLE), ExternalPositions(table)),
    }
    session = new_session()
    table, given = makers[kind]()
    node = session.append(session.root, A_IDS, media=media(a_turn()), positions=given)
    before = fingerprint(node)
    rows = list(table)
    for row in rows:
        for at in range(len(row)):
            row[at] = 55
    assert fingerprint(node) == before
    assert same(node.positions(), A_TABLE)
    assert int(rows[0][0]) == 55
    if isinstance(given, ExternalPositions):
        assert same(given.positions, A_TABLE)


@pytest.mark.parametrize("kind", [bytearray, lambda state: memoryview(bytearray(state))], ids=["bytearray", "memoryview"])
def test_c36_state_of_a_draft(kind: Callable[[bytes], Any]) -> None:
    session = text_session()
    draft = session.draft(session.append(session.root, [1]))
    state = kind(b"grammar")
    draft.set_state(state)
    draft.extend([2])
    state[:] = b"another"
    assert draft.state == b"grammar"
    assert type(draft.state) is bytes
    draft.set_state(b"later")
    draft.rollback(0)
    assert draft.state == b"grammar"


def test_c36_namespaces_ids_and_content() -> None:
    fields: dict[str, str | None] = {"tenant": "a", "lora": None}
    session = text_session(namespace=fields)
    root = session.root.id
    fields["tenant"] = "b"
    assert session.namespace == Namespace(tenant="a")
    assert text_session(namespace={"tenant": "a"}).root.id == root
    node_id = bytearray(session.root.id)
    child = session.append(bytes(node_id), [1])
    node_id[:] = bytes(32)
    assert child.parent == session.root
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4)
    options = {"size": [3, 4]}
    identity = media_identity("image", [pixels], options=options)
    item = MediaItem("image", identity, [(0, 1)])
    pixels[:] = 0
    options["size"].append(5)
    assert item.identity == identity
    assert media_identity("image", [pixels], options={"size": [3, 4]}) != identity


# --- D41: what is handed out cannot be used to change anything --------------------------------------------------------
def furnished() -> tuple[Session, Node]:
    """A session with every kind of node and detail, and its tip."""
    session = new_session(namespace={"tenant": "t"})
    first = session.append(session.root, A_IDS, media=media(a_turn()), metadata=nested(), key="first")
    draft = session.draft(first, metadata={"tool_calls": ["call-1"]})
    draft.extend(range(20))
    answered = draft.commit("length", length=18, tail_policy="drop_last")
    cut = session.truncate(answered, 12)
    rewritten = session.rewrite(cut, [Edit(0, 1, [50, 51])])
    tip = session.append(rewritten, [1, 2, 3], positions=A_TABLE[:, :3])
    for parent in (session.root, first, rewritten):  # siblings, each in an arena of its own
        for number in range(2):
            session.append(parent, [40 + number, 41, 42])
    session.set_head("main", tip)
    return session, tip


def test_d41_every_array_that_is_handed_out() -> None:
    session, tip = furnished()
    draft = session.draft(tip)
    draft.extend([5, 6, 7])
    before = tree_digest(session.tree)
    drafted = (draft.input_ids().tolist(), draft.positions().tolist())
    for node in session.tree:
        for mode in ("as_decoded", "as_replayed"):
            attack_array(node.positions(mode=mode))
            attack_array(node.positions(node.start, node.stop, mode))
        attack_array(node.token_ids)
        attack_array(node.input_ids())
        attack_array(node.input_ids(node.stop // 2, node.stop))
        attack_array(node.positions(node.stop, node.stop), tensor=False)
    for read in (draft.input_ids, draft.positions):
        attack_array(read())
        attack_array(read(0, 3))
        attack_array(read(draft.start, draft.stop))
    attack_array(draft.token_ids)
    first = session.children(session.root)[0]
    for name in ("array", "tensor"):
        attack_array(first.metadata[name])
    external = ExternalPositions(A_TABLE)
    attack_array(external.positions)
    assert same(external.positions, A_TABLE)
    states = [node.position_state() for node in session.tree]
    for made in (session.scheme.extend(states[1], A_IDS, media(a_turn())), session.scheme.decode(states[1], A_IDS)):
        attack_array(made[0])
    assert tree_digest(session.tree) == before
    assert (draft.input_ids().tolist(), draft.positions().tolist()) == drafted


@pytest.mark.parametrize("count", [1, 100, 5_000, 100_000])
def test_d41_windows_of_every_size(count: int) -> None:
    """Nothing NumPy offers writes to a node's tokens, copied or viewed, in one arena or over several."""
    session = text_session()
    base = session.append(session.root, range(count))
    nodes = [base, decode(session, base, 1, 2), session.append(base, range(count)), session.append(base, [3])]
    before = tree_digest(session.tree)
    for node in nodes:
        for start, stop in [(0, node.stop), (0, count), (count // 2, node.stop), (node.start, node.stop)]:
            attack_array(node.input_ids(start, stop), tensor=False)
        attack_array(node.token_ids, tensor=False)
        attack_array(node.positions(), tensor=False)
    assert tree_digest(session.tree) == before


@pytest.mark.parametrize("count", [1, 100, 4_096, 5_000, 300_000])
def test_d41_torch_from_numpy(count: int) -> None:
    """PyTorch writes through NumPy's read-only flag, so what it is given must be nobody else's memory.

    A first child writes on in its parent's arena, its siblings open arenas of exactly their size: both, at every depth.
    """
    session = text_session()
    ids = np.arange(1000, 1000 + count)
    parents = [session.root, session.append(session.root, ids)]
    parents.append(decode(session, parents[1], 5, 6))
    nodes = [session.append(parent, ids + shift) for parent in parents for shift in range(3)]
    draft = session.draft(nodes[-1])
    draft.extend(ids)
    before = tree_digest(session.tree), draft.input_ids().tolist(), draft.positions().tolist()
    sources: list[Node | Draft] = [*nodes, draft]
    for source in sources:
        for start, stop in [
            (0, source.stop),
            (source.start, source.stop),
            (0, min(count, source.stop)),
            (source.stop - 1, source.stop),
        ]:
            torch.from_numpy(source.input_ids(start, stop)).fill_(1)
            torch.as_tensor(source.positions(start, stop)).fill_(1)
        torch.from_numpy(source.token_ids).fill_(1)
    assert (tree_digest(session.tree), draft.input_ids().tolist(), draft.positions().tolist()) == before


def test_d41_metadata_to_the_bottom() -> None:
    session, _ = furnished()
    node = session.children(session.root)[0]
    before = fingerprint(node)
    metadata = node.metadata
    frozen: list[tuple[Any, Callable[[Any], object]]] = [
        (metadata, lambda value: value.__setitem__("new", 1)),
        (metadata, lambda value: value.update({"new": 1}) and value.clear()),
        (metadata, lambda value: setattr(value, "new", 1)),
        (metadata["list"], lambda value: value.append(1)),
        (metadata["list"][1][1], lambda value: value.__setitem__("deep", 1)),
        (metadata["list"][1][1]["deep"], lambda value: value.__setitem__(0, 1)),
        (metadata["dict"]["a"], lambda value: value.__delitem__("b")),
        (metadata["dict"]["a"]["b"], lambda value: value.__setitem__(0, 1)),
        (metadata["set"], lambda value: value.add(1)),
        (metadata["bytearray"], lambda value: value.__setitem__(0, 1)),
        (metadata["memoryview"], lambda value: value.__setitem__(0, 1)),
        (metadata["tool_calls"], lambda value: value.__setitem__(0, "call-9")),
        (node.links, lambda value: value.append(1)),
        (node.media, lambda value: value.append(1)),
        (node.media_spans(), lambda value: value.append(1)),
        (node.media_spans()[0], lambda value: value.__setitem__(1, 0)),
        (node.path(), lambda value: value.append(1)),
    ]
    for value, change in frozen:
        with pytest.raises((TypeError, AttributeError)):
            change(value)
    assert metadata.set("new", 1) != metadata  # a new map; this one stays
    assert "new" not in node.metadata
    assert fingerprint(node) == before


def test_d41_slots_of_a_stored_map() -> None:
    """A PMap keeps its content in slots that object.__setattr__ reaches; the node must not notice."""
    session, _ = furnished()
    node = session.children(session.root)[0]
    before = fingerprint(node), tree_digest(session.tree)
    maps: list[Any] = [node.metadata, node.metadata["dict"], node.metadata["list"][1][1], session.heads, session.tree.heads]
    maps.append(session.scheme.params)
    for value in maps:
        for name in ("_size", "_buckets", "_cached_hash"):
            try:
                object.__setattr__(value, name, 0)
            except (AttributeError, TypeError):
                continue
    assert (fingerprint(node), tree_digest(session.tree)) == before
    assert session.heads["main"] in session.tree
    assert session.scheme.params["spatial_merge_size"] == 2


NODE_ATTRIBUTES = [
    *["id", "parent", "depth", "start", "stop", "token_ids", "media", "origin", "role", "key", "finish_reason", "tail_policy"],
    *["metadata", "links", "scheme", "namespace", "next_position", "mrope_position_delta", "runs", "state", "replayed"],
]


def test_d41_object_setattr() -> None:
    session, tip = furnished()
    before = tree_digest(session.tree)
    for node in session.tree:
        attack_slots(node, NODE_ATTRIBUTES)
        attack_slots(node.position_state(), ["num_tokens", "next_position", "max_position", "open_block"])
        for link in node.links:
            attack_slots(link, ["kind", "node_id", "reused_tokens"])
        for item in node.media:
            fields = ["modality", "identity", "spans", "grid_thw", "second_per_grid_ts", "audio_feature_length"]
            attack_slots(item, [*fields, "target_sizes", "placeholders_before", "unfinished"])
    attack_slots(tip.namespace, ["cache_salt", "lora", "tenant"])
    attack_slots(tip.scheme, ["name", "rule", "params", "max_position_limit", "num_axes", "dtype"])
    attack_slots(session.head("main"), ["node", "version"])
    attack_slots(session.tree, ["root", "heads", "scheme", "limits"])
    attack_slots(ExternalPositions(A_TABLE), ["positions", "next_position", "max_position"])
    attack_slots(Edit(0, 1), ["start", "stop"])
    for private in ("_details", "_lineage", "_extent", "_up", "_media_above"):
        with pytest.raises(AttributeError):
            object.__setattr__(tip, private, None)
    assert tree_digest(session.tree) == before


@pytest.mark.parametrize("name", ["parent", "start", "stop", "role", "key", "metadata", "origin", "media", "scheme"])
def test_d41_what_a_draft_says_of_its_place(name: str) -> None:
    """Its tokens and its state are its owner's to change; where it stands is not."""
    session = text_session()
    stranger_session = text_session(name="other", namespace="other")
    stranger = stranger_session.append(stranger_session.root, [9, 9])
    draft = session.draft(session.append(session.root, [1]), key="request", metadata={"a": 1})
    draft.extend([5])
    expected = text_session().append(session.root, [1]), getattr(draft, name)
    with pytest.raises(AttributeError):
        setattr(draft, name, stranger if name == "parent" else None)
    assert getattr(draft, name) == expected[1]
    node = draft.commit()
    assert node.parent == expected[0]
    assert node.parent in session.tree


def test_d41_tensors_of_the_bridge() -> None:
    session, tip = furnished()
    draft = session.draft(tip)
    draft.extend([1, 2])
    before = tree_digest(session.tree), draft.input_ids().tolist(), draft.positions().tolist()
    sources: list[Node | Draft] = [*session.tree, draft]
    for source in sources:
        for prefix in (0, source.stop // 2):
            inputs = request_inputs(source, prefix)
            for tensor in (inputs.input_ids, inputs.positions, inputs.mrope_position_delta):
                tensor.fill_(9)
                tensor.numpy()[...] = 9
        if not source.stop:
            continue
        for tensor in to_transformers(source).values():
            tensor.fill_(9)
    assert (tree_digest(session.tree), draft.input_ids().tolist(), draft.positions().tolist()) == before


def test_d41_trees_and_copies() -> None:
    session, tip = furnished()
    before = tree_digest(session.tree)
    tree = session.tree
    for _ in range(3):  # what is appended to a value reaches neither it nor the session
        other, node = tree.append(tip, [1], metadata={"a": 1})
        other = other.set_head("main", node)[0].drop_head("main")
        assert node in other
        assert node not in tree
        assert node not in session.tree
    for value in (tip, tree, tip.metadata, tip.scheme):
        assert copy.copy(value) == value
        assert copy.deepcopy(value) == value
    assert tree_digest(session.tree) == before == tree_digest(tree)


def test_d41_tool_items_are_kept() -> None:
    """vLLM #43244: calls and their outputs were dropped from what was stored."""
    session = text_session()
    calls = [{"id": "call-1", "arguments": {"city": ["Paris"]}}]
    asked = decode(session, session.append(session.root, [1, 2]), 3, 4, finish_reason="tool_calls")
    call = session.append(asked, [5], role="assistant", metadata={"tool_calls": calls})
    result = session.append(call, [6, 7], role="tool", metadata={"tool_call_id": "call-1"})
    calls[0]["arguments"]["city"].append("Rome")  # type: ignore[index]
    calls.clear()
    assert call.metadata["tool_calls"] == ({"id": "call-1", "arguments": {"city": ("Paris",)}},)
    assert [node.role for node in result.path()] == [None, "user", "assistant", "assistant", "tool"]
    assert result.metadata["tool_call_id"] == "call-1"
    assert result.input_ids().tolist() == [1, 2, 3, 4, 5, 6, 7]


# --- C37, C38, C39, C40: attempts -------------------------------------------------------------------------------------
@pytest.mark.parametrize("ending", ["abort", "drop", "refused commit", "with block", "left open"])
def test_c37_an_aborted_turn_leaves_no_trace(ending: str) -> None:
    session = text_session()
    rng = np.random.default_rng(37)
    prompt, answered, first, second = (rng.integers(0, 150_000, count).astype(np.int32) for count in (512, 48, 64, 64))
    base = decode(session, session.append(session.root, prompt), *answered.tolist())
    turn_1 = session.append(base, first)
    assert turn_1.stop == 624
    digest = tree_digest(session.tree)
    draft = session.draft(turn_1)
    draft.extend(rng.integers(0, 150_000, 16))  # the first chunk; then the client goes away
    if ending == "abort":
        draft.abort()
    elif ending == "drop":
        del draft
        gc.collect()
    elif ending == "refused commit":
        with pytest.raises(FinishRefused):
            draft.commit("abort")
    elif ending == "with block":
        with pytest.raises(ConnectionError), draft:
            raise ConnectionError
    assert tree_digest(session.tree) == digest
    turn_2 = session.append(base, second)
    inputs = request_inputs(turn_2)
    assert inputs.input_ids.shape == (624,)
    expected = request_inputs(turn_1).input_ids.clone()
    expected[560:] = torch.from_numpy(second.astype(np.int64))
    assert torch.equal(inputs.input_ids, expected)
    assert same(inputs.positions, np.arange(624)[None])
    retried = session.append(base, first)
    assert retried == turn_1
    assert retried.input_ids().tolist() == [*prompt, *answered, *first]


@pytest.mark.parametrize("reason", ["abort", "error", "ABORT", "Error", " abort ", "Abort\n"])
def test_c38_abort_and_error_are_never_committed(reason: str) -> None:
    session = new_session()
    base = grow(session, session.root, a_turn())
    for tokens in ([], [8, 9], range(100)):
        draft = session.draft(base)
        draft.extend(tokens)
        error = refuses(FinishRefused, session, draft.commit, reason)
        assert error.finish_reason == reason
        refuses(FinishRefused, session, draft.commit, reason, length=len(draft))
        refuses(FinishRefused, session, draft.commit, reason, tail_policy="drop_last")
        assert not draft.closed
        draft.extend([1])  # the refusal did not end it
        draft.abort()
        refuses(DraftClosed, session, draft.commit, "stop")
    assert session.children(base) == ()


@pytest.mark.parametrize("reason", [None, {"type": "abort"}, b"abort", 1, ("abort",), ""])
def test_c38_a_reason_that_is_no_text(reason: Any) -> None:
    session = text_session()
    draft = session.draft(session.append(session.root, [1]))
    draft.extend([2])
    refuses(SessionTreeError if reason == "" else TypeError, session, draft.commit, reason)
    assert not draft.closed


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls", "interrupted", "aborted by nobody", "no error"])
def test_c38_other_reasons_are_kept(reason: str) -> None:
    session = text_session()
    base = session.append(session.root, [1])
    node = decode(session, base, 2, finish_reason=reason)
    assert node.finish_reason == reason
    assert session.children(base) == (node,)
    assert base.finish_reason is None


def test_c39_a_turn_that_was_rejected_is_unknown() -> None:
    """The ids the attempts would have had are taken from a session that lets them through."""
    generous, strict = text_session(), text_session(max_tokens=8, reserve_output=2)
    base = generous.append(generous.root, [1, 2, 3, 4, 5, 6])
    assert strict.append(strict.root, [1, 2, 3, 4, 5, 6]) == base
    attempts = [generous.append(base, [7]), generous.append(base, [7, 8, 9], key="k"), decode(generous, base, 7, 8, 9)]
    refuses(LimitExceeded, strict, strict.append, base, [7])
    refuses(LimitExceeded, strict, strict.append, base, [7, 8, 9], key="k")
    draft = strict.draft(base)
    refuses(LimitExceeded, strict, draft.extend, [7, 8, 9])
    draft.abort()
    aborted = strict.draft(base, key="request")
    aborted.extend([7, 8])
    aborted.abort()
    twin = generous.draft(base, key="request")
    twin.extend([7, 8])
    attempts.append(twin.commit())
    writes: list[Callable[[Node | bytes], object]] = [
        lambda parent: strict.append(parent, [1]),
        strict.draft,
        lambda parent: strict.truncate(parent, 1),
        lambda parent: strict.drop_last(parent, 1),
        lambda parent: strict.replace(parent, [1], head="main"),
        lambda parent: strict.rewrite(parent, [Edit(0, 1, [3])]),
        lambda parent: strict.set_head("main", parent),
        strict.children,
        strict.siblings,
    ]
    for attempt in attempts:
        assert attempt not in strict.tree
        assert attempt.id not in strict.tree
        for write in writes:
            refuses(UnknownNode, strict, write, attempt)
            error = refuses(UnknownNode, strict, write, attempt.id)
            assert error.node_id == attempt.id
    assert strict.append(base, []).input_ids().tolist() == [1, 2, 3, 4, 5, 6]
    accepted = strict.draft(base, key="request")
    accepted.extend([7, 8])
    assert accepted.commit() == attempts[-1]  # the retry is a node, and the very one


def test_c39_of_every_kind_of_rejected_append() -> None:
    session = new_session()
    base = grow(session, session.root, a_turn())
    item = MediaItem("image", bytes(32), [(0, 3)], (1, 4, 4))
    rejected: list[tuple[type[Exception], Any, dict[str, Any]]] = [
        (MediaSpanError, [IMG] * 3, {"media": [item]}),
        (OutOfRange, [1, -1], {}),
        (OutOfRange, [2**31], {}),
        (TypeError, [1.5], {}),
        (TypeError, "text", {}),
        (TypeError, [1], {"metadata": {"a": object()}}),
        (TypeError, [1], {"media": ["image"]}),
        (TypeError, [1], {"role": 3}),
        (TypeError, [1], {"key": 3}),
    ]
    for error, ids, named in rejected:
        refuses(error, session, session.append, base, ids, **named)
    child = session.append(base, [7])
    assert child.input_ids().tolist() == [*A_IDS, 7]
    refuses(UnknownNode, session, session.append, bytes(32), [1])
    refuses(UnknownNode, session, session.append, b"short", [1])
    refuses(TypeError, session, session.append, None, [1])


def test_c40_a_thousand_attempts_dropped_at_random_points() -> None:
    session = new_session()
    base = grow(session, session.root, a_turn())
    rng = random.Random(40)
    digest = tree_digest(session.tree)
    alive: list[weakref.ref[Draft]] = []
    kept: list[Draft] = []

    def attempt(number: int) -> None:
        draft = session.draft(base, key=None if number % 3 else "request")
        alive.append(weakref.ref(draft))
        points = rng.randrange(8)
        if points > 0:
            draft.append(1)
        if points > 1:
            draft.extend(range(rng.randrange(50)))
        if points > 2:
            draft.set_state(b"state")
            draft.rollback(rng.randrange(len(draft) + 1))
        if points > 3:
            request_inputs(draft)
        if points > 4:
            with pytest.raises(FinishRefused):
                draft.commit("abort")
        if points > 5:
            with pytest.raises(OutOfRange):
                draft.commit(length=len(draft) + 1)
        if points > 6:
            draft.abort()
        if rng.random() < 0.05:
            kept.append(draft)  # still in flight somewhere
        if rng.random() < 0.3:
            raise RuntimeError("the engine's step failed")

    failed = 0
    for number in range(1000):
        try:
            attempt(number)
        except RuntimeError:
            failed += 1
        if number % 100 == 0:
            assert tree_digest(session.tree) == digest
    assert 200 < failed < 400
    gc.collect()
    assert sum(reference() is not None for reference in alive) == len(kept) > 10
    assert tree_digest(session.tree) == digest
    nexts = [session.append(base, [number]) for number in range(50)]
    assert session.children(base) == tuple(nexts)
    node = decode(session, base, 8, 9)
    check(node, [a_turn(), reply(8, 9)])
    assert node in session.tree
    open_drafts = [draft for draft in kept if not draft.closed]
    assert open_drafts
    assert open_drafts[0].commit(length=0).parent == base


@EXAMPLES
@given(histories(), st.lists(st.sampled_from(["abort", "drop", "refuse", "raise"]), max_size=6))
def test_c40_append_works_after_any_attempts(history: list[Segment], endings: list[str]) -> None:
    session = new_session()
    node = session.root
    for count, segment in enumerate(history, 1):
        for ending in endings if node.depth else ():
            draft = session.draft(node)
            draft.extend([1, 2])
            if ending == "abort":
                draft.abort()
            elif ending == "refuse":
                refuses(FinishRefused, session, draft.commit, "error")
            elif ending == "raise":
                with pytest.raises(ZeroDivisionError), draft:
                    _ = 1 // 0
        node = grow(session, node, segment)
        check(node, history[:count])
    assert len(session.tree) == node.depth + 1


# --- C41, C42, C43: replacing, branches, aliases ----------------------------------------------------------------------
def test_c41_reset_to_the_root() -> None:
    session = new_session()
    old = grow(session, session.root, a_turn(), reply(8, 9), turn(4))
    others = [grow(session, step, turn(60 + step.depth)) for step in old.path()]
    session.set_head("main", old)
    before = {node: fingerprint(node) for node in session.tree}
    session.set_head("main", session.root, expected=old)
    assert session.heads == {"main": session.root}
    new = grow(session, session.heads["main"], turn(1, 1))
    session.set_head("main", new, expected=session.root)
    assert {node: fingerprint(node) for node in before} == before
    assert old in session.tree
    assert old.input_ids().tolist() == [*A_IDS, 8, 9, 4]
    assert all(other in session.tree for other in others)
    check(old, [a_turn(), reply(8, 9), turn(4)])
    # The root itself cannot be replaced by a sibling: it has no parent.
    refuses(OutOfRange, session, session.replace, session.root, [1], head="main")
    # First turns are replaced as any other.
    first = session.replace(old.path()[1], [5, 5], head="main")
    assert first.parent == session.root
    assert set(session.children(session.root)) == {others[0], old.path()[1], new, first}


def test_c41_reset_while_walking_the_tree() -> None:
    session = text_session()
    for number in range(20):
        session.append(session.root, [number])
    seen = 0
    for node in session.tree:  # SGLang: "dictionary changed size during iteration"
        seen += 1
        if node.depth:
            session.replace(node, [100 + seen], head="main")
        session.set_head("main", session.root)
    assert seen == 21
    assert len(session.tree) == 41


def test_c41_old_nodes_outlive_their_session() -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme=toy_scheme())
    old = grow(session, session.root, a_turn(), reply(8, 9))
    before = fingerprint(old)
    session.close()
    store.close()
    refuses(StaleSession, session, session.append, old, [1])
    assert fingerprint(old) == before
    check(old, [a_turn(), reply(8, 9)])
    assert request_inputs(old).input_ids.tolist() == [*A_IDS, 8, 9]


def test_c42_replacing_keeps_every_sibling() -> None:
    session = new_session()
    a = grow(session, session.root, a_turn())
    b, c = decode(session, a, 10, 11), decode(session, a, 12)
    below = grow(session, b, turn(1), reply(2))
    session.set_head("main", b)
    before = {node: fingerprint(node) for node in session.tree}
    d = decode(session, a, 13, 14)  # regenerate
    moved = session.set_head("main", d, expected=b)
    e = session.replace(b, [15], head="main", expected=moved)
    assert session.children(a) == (b, c, d, e)
    assert session.siblings(e) == (b, c, d)
    assert {node: fingerprint(node) for node in before} == before
    assert session.heads["main"] == e
    assert e.role == b.role == "assistant"
    for node, tokens in ((b, [10, 11]), (c, [12]), (d, [13, 14]), (e, [15])):
        assert node.input_ids().tolist() == [*A_IDS, *tokens]
        assert session.node(node.id) is node
    assert below in session.tree
    assert session.children(b) == (below.path()[3],)


def test_c42_a_replacement_that_fails_leaves_everything() -> None:
    session = new_session()
    a = grow(session, session.root, a_turn())
    b = decode(session, a, 10)
    first = session.set_head("main", b)
    moved = session.set_head("main", a)
    part = MediaItem("image", bytes(32), [(0, 3)], (1, 4, 4))
    for error, expected in [(HeadMoved, first), (HeadMoved, b), (NameTaken, None)]:
        raised = refuses(error, session, session.replace, b, [15], head="main", expected=expected)
        assert raised.actual == moved
    raised = refuses(HeadMoved, session, session.replace, b, [15], head="no such head", expected=b)
    assert raised.actual is None
    refuses(MediaSpanError, session, session.replace, b, [IMG] * 3, head="main", media=[part])
    refuses(OutOfRange, session, session.replace, b, [-1], head="main")
    refuses(UnknownNode, session, session.replace, bytes(32), [1], head="main")
    refuses(TypeError, session, session.replace, b, [1], head=3)
    assert session.children(a) == (b,)


def test_c43_the_same_alias_twice() -> None:
    session = new_session()
    a = grow(session, session.root, a_turn())
    first = session.append(a, [1, 2], key="rid")
    others: list[tuple[Any, dict[str, Any]]] = [
        ([1, 3], {}),
        ([1, 2], {"role": "tool"}),
        ([], {}),
        ([1, 2, 3], {}),
        ([IMG] * 4, {"media": [MediaItem("image", bytes(32), [(0, 4)], (1, 4, 4))]}),
        ([1, 2], {"positions": A_TABLE[:, :2]}),
    ]
    for ids, named in others:
        error = refuses(KeyTaken, session, session.append, a, ids, key="rid", **named)
        assert (error.key, error.node) == ("rid", first)
    draft = session.draft(a, key="rid")
    draft.extend([1, 2])  # the same tokens, but generated: other content
    assert refuses(KeyTaken, session, draft.commit).node == first
    assert not draft.closed
    assert session.append(a, [1, 2], key="rid", metadata={"again": 1}) == first  # a retry
    assert first.metadata == {}
    assert session.node(first.id) is first
    # A key has the scope of its parent, and never the last word over an id.
    below = session.append(first, [9], key="rid")
    assert (below.key, below.parent) == ("rid", first)
    assert session.append(a, [1, 2]) != first
    assert session.append(a, [1, 2], key="other") != first
    assert len({node.id for node in session.tree}) == len(session.tree) == 6


@pytest.mark.parametrize("key", ["", "a", "é", "日本", "a\0b", "x" * 1000])
def test_c43_any_text_is_an_alias(key: str) -> None:
    session = text_session()
    first = session.append(session.root, [1], key=key)
    assert session.append(session.root, [1], key=key) == first
    refuses(KeyTaken, session, session.append, session.root, [2], key=key)
    assert session.append(session.root, [1]) != first


def test_c43_a_request_committed_twice_is_one_node() -> None:
    session = text_session()
    base = session.append(session.root, [1])
    nodes = []
    for _ in range(3):
        draft = session.draft(base, key="request-7")
        draft.extend([2, 3])
        nodes.append(draft.commit())
    assert nodes[0] == nodes[1] == nodes[2]
    assert len(session.tree) == 3
    overrun = session.draft(base, key="request-7")
    overrun.extend([2, 3, 4])
    refuses(KeyTaken, session, overrun.commit)
    assert overrun.commit(length=2) == nodes[0]


# --- C47, C48: cuts by explicit operations, one coordinate system -----------------------------------------------------
def test_c47_truncate_and_drop_last_say_what_they_mean() -> None:
    session = new_session()
    node = grow(session, session.root, a_turn(), reply(8, 9), turn(4, 5, 6))
    for length in (-1, -3, node.stop + 1, 999, -(2**40), 2**70):
        error = refuses(OutOfRange, session, session.truncate, node, length)
        assert (error.value, error.limit) == (length, node.stop)
        refuses(OutOfRange, session, session.drop_last, node, length)
        refuses(OutOfRange, session, session.tree.truncate, node, length)
    assert session.truncate(node, 0) == session.root  # not "append"
    assert session.drop_last(node, node.stop) == session.root
    assert session.drop_last(node, 0) is session.truncate(node, node.stop) is node
    assert session.drop_last(node, 1).input_ids().tolist() == [*A_IDS, 8, 9, 4, 5]
    assert session.drop_last(node, 3) == session.truncate(node, 11) == node.parent
    assert session.drop_last(node, 4).input_ids().tolist() == [*A_IDS, 8]
    for wrong in (1.0, None, True, "1", [1]):
        refuses(TypeError, session, session.truncate, node, wrong)
        refuses(TypeError, session, session.drop_last, node, wrong)


def test_c47_what_a_cut_node_is() -> None:
    session = new_session()
    base = grow(session, session.root, a_turn())
    draft = session.draft(base, role="assistant", metadata={"a": [1]}, key="request")
    draft.extend([8, 9, 10])
    node = draft.commit("length")
    cut = session.truncate(node, 11)
    assert cut.parent is base
    assert (cut.role, cut.origin, cut.finish_reason) == ("assistant", "generated", None)
    assert cut.metadata == {"a": (1,)}
    assert [(link.kind, link.node_id, link.reused_tokens) for link in cut.links] == [("prefix_of", node.id, 11)]
    assert session.truncate(node, 11) is cut
    assert session.children(base) == (node, cut)
    check(cut, [a_turn(), reply(8, 9)])
    empty = grow(session, node, turn(), turn())
    assert session.truncate(empty, node.stop) is empty  # the deepest node that ends there


def test_c48_one_coordinate_system_padded_or_not() -> None:
    session = new_session()
    raw = grow(session, session.root, a_turn(), reply(8, 9), a_turn(number=1))
    padded = grow(session, session.root, a_turn(fill=PAD_VALUE), reply(8, 9), a_turn(number=1, fill=PAD_VALUE))
    inside = {4, 5, 6, 15, 16, 17}
    for length in range(raw.stop + 1):
        if length in inside:
            errors = [refuses(MediaSpanError, session, session.truncate, node, length) for node in (raw, padded)]
            assert errors[0].span == errors[1].span == ((3, 7) if length < 9 else (14, 18))
            continue
        cuts = [session.truncate(node, length) for node in (raw, padded)]
        assert cuts[0].stop == cuts[1].stop == length
        assert same(cuts[0].positions(), cuts[1].positions())
        assert spans_of(cuts[0]) == spans_of(cuts[1])
        ids = cuts[1].input_ids().copy()
        ids[ids == PAD_VALUE] = IMG
        assert same(ids, cuts[0].input_ids())
    # The raw ids that transformers looks for are derived, whatever the tokens say.
    for prefix in (0, 2, 3, 7, 11, 18):
        given_raw, given_padded = to_transformers(raw, prefix), to_transformers(padded, prefix)
        assert given_raw.keys() == given_padded.keys()
        assert all(torch.equal(given_raw[name], given_padded[name]) for name in given_raw)
        assert given_padded["input_ids"][0].tolist() == raw.input_ids(prefix).tolist()
    assert PAD_VALUE in request_inputs(padded).input_ids.tolist()


# --- C51, C52, C53: what a commit keeps -------------------------------------------------------------------------------
def test_c51_history_is_exactly_what_was_committed() -> None:
    session = text_session()
    base = session.append(session.root, [1])
    draft = session.draft(base)
    draft.extend([10, 11, 99, 12, 13])
    node = draft.commit("stop", length=3)
    assert node.token_ids.tolist() == [10, 11, 99]
    child = session.append(node, [20, 21])
    assert child.input_ids().tolist() == [1, 10, 11, 99, 20, 21]
    assert request_inputs(child).input_ids.tolist() == [1, 10, 11, 99, 20, 21]
    assert decode(session, child, 7).input_ids().tolist() == [1, 10, 11, 99, 20, 21, 7]
    refuses(DraftClosed, session, draft.append, 1)
    refuses(DraftClosed, session, draft.rollback, 0)
    refuses(DraftClosed, session, draft.abort)


@EXAMPLES
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=6), st.data())
def test_c51_speculation_and_overshoot(steps: list[tuple[int, int]], data: st.DataObject) -> None:
    session = new_session()
    base = grow(session, session.root, a_turn())
    draft = session.draft(base)
    kept: list[int] = []
    for number, (proposed, refused) in enumerate(steps):
        kept += range(100 * number, 100 * number + proposed)
        draft.extend(range(100 * number, 100 * number + proposed))
        length = max(0, len(kept) - refused)
        kept = kept[:length]
        draft.rollback(length)
        assert draft.token_ids.tolist() == kept
    for wrong in (-1, len(kept) + 1, 999):
        assert refuses(OutOfRange, session, draft.rollback, wrong).limit == len(kept)
        assert refuses(OutOfRange, session, draft.commit, length=wrong).limit == len(kept)
    seen = data.draw(st.integers(0, len(kept)))
    node = draft.commit("stop", length=seen)
    siblings = [session.append(node, [1, 2]), decode(session, node, 3, 4), session.append(node, [])]
    for sibling, more in zip(siblings, [turn(1, 2), reply(3, 4), turn()], strict=True):
        check(sibling, [a_turn(), reply(*kept[:seen]), more])


@pytest.mark.parametrize(
    ("policy", "expected"), [("keep", ["A1", "B1", "C1", "D1", "A2", "B2"]), ("drop_last", ["A1", "B1", "C1", "A2", "B2"])]
)
def test_c52_the_final_sampled_token(policy: Any, expected: list[str]) -> None:
    names = {"A1": 1, "B1": 2, "C1": 3, "D1": 4, "A2": 5, "B2": 6}
    session = text_session()
    prompt = session.append(session.root, [names[name] for name in ("A1", "B1", "C1")])
    answered = decode(session, prompt, names["D1"], tail_policy=policy)
    following = session.append(answered, [names["A2"], names["B2"]])
    assert following.input_ids().tolist() == [names[name] for name in expected]
    assert same(request_inputs(following).positions, np.arange(len(expected))[None])
    assert answered.tail_policy == policy
    assert answered.origin == "generated"
    assert (prompt.tail_policy, following.tail_policy) == (None, None)


@pytest.mark.parametrize("length", [None, 0, 1, 3, 5])
def test_c52_drop_last_is_the_last_that_was_seen(length: int | None) -> None:
    session = new_session()
    base = grow(session, session.root, a_turn())
    tokens = [10, 11, 12, 13, 14]
    seen = tokens if length is None else tokens[:length]
    kept = decode(session, base, *tokens, length=length, tail_policy="keep")
    dropped = decode(session, base, *tokens, length=length, tail_policy="drop_last", finish_reason="length")
    assert (kept.tail_policy, dropped.tail_policy) == ("keep", "drop_last")
    assert (kept.finish_reason, dropped.finish_reason) == ("stop", "length")
    check(kept, [a_turn(), reply(*seen)])
    check(dropped, [a_turn(), reply(*seen[:-1])])
    check(grow(session, dropped, a_turn(number=1)), [a_turn(), reply(*seen[:-1]), a_turn(number=1)])


def test_c52_no_third_policy() -> None:
    session = text_session()
    draft = session.draft(session.append(session.root, [1]))
    draft.extend([2])
    for policy in ("drop", "KEEP", ""):
        refuses(SessionTreeError, session, draft.commit, tail_policy=policy)
    assert draft.commit().tail_policy == "keep"


EMPTIES: list[Any] = [[], (), np.array([], np.int32), np.array([]), torch.tensor([], dtype=torch.int64), b"", array("i"), range(0)]


@pytest.mark.parametrize("empty", EMPTIES, ids=lambda empty: type(empty).__name__)
def test_c53_an_empty_turn(empty: Any) -> None:
    session = text_session()
    refuses(SessionTreeError, session, session.append, session.root, empty)
    assert len(session.tree) == 1
    node = grow(session, session.root, turn(1, 2), reply(3, 4))
    continued = session.append(node, empty)
    assert continued.input_ids().tolist() == [1, 2, 3, 4]
    assert (continued.parent, continued.start, continued.stop, len(continued)) == (node, 4, 4, 0)
    assert continued in session.children(node)
    assert continued
    assert continued.token_ids.shape == (0,)
    assert continued.positions(4, 4).shape == (1, 0)
    assert request_inputs(continued, 3).input_ids.tolist() == [4]
    assert request_inputs(continued, 4).positions.shape == (1, 0)
    assert session.append(node, empty) is continued
    assert session.append(node, empty, role="assistant") != continued
    assert session.append(continued, [5]).input_ids().tolist() == [1, 2, 3, 4, 5]


def test_c53_empty_replies() -> None:
    session = new_session()
    draft = session.draft(session.root)
    refuses(SessionTreeError, session, draft.commit)
    draft.extend([1])
    refuses(SessionTreeError, session, draft.commit, length=0)
    refuses(SessionTreeError, session, draft.commit, tail_policy="drop_last")
    assert not draft.closed
    assert draft.commit().input_ids().tolist() == [1]
    base = grow(session, session.root, a_turn())
    empty = session.draft(base).commit()
    assert empty.input_ids().tolist() == A_IDS
    check(grow(session, empty, reply(8), turn(4)), [a_turn(), reply(), reply(8), turn(4)])


# --- C65, D09, D11, D17, D18: branches --------------------------------------------------------------------------------
def test_c65_rewind_and_regenerate_twice() -> None:
    session = new_session()
    asked = grow(session, session.root, a_turn(), turn(4, 5))
    first = grow(session, asked, reply(8, 9), turn(6), reply(7))
    ancestor = session.node(first.path()[2].id)
    assert ancestor is asked
    again = [decode(session, ancestor, 8, 9), decode(session, ancestor, 8, 9)]
    assert len({first.path()[3], *again}) == 3
    assert session.children(asked) == (first.path()[3], *again)
    for sibling in again:
        assert sibling.parent is asked
        check(sibling, [a_turn(), turn(4, 5), reply(8, 9)])
    check(first, [a_turn(), turn(4, 5), reply(8, 9), turn(6), reply(7)])


def test_c65_regenerated_siblings_share_the_prefix() -> None:
    session = text_session()
    count = 200_000
    prompt = session.append(session.root, np.arange(count, dtype=np.int32))
    gc.collect()
    tracemalloc.start()
    try:
        siblings = [decode(session, prompt, 1, 2, number) for number in range(100)]
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 400_000  # half of one copy of the prompt, for a hundred siblings
    for number, sibling in enumerate(siblings):
        assert sibling.parent is prompt
        assert sibling.input_ids(count - 1).tolist() == [count - 1, 1, 2, number]
    assert siblings[0].input_ids(0, 3).tolist() == [0, 1, 2]


@pytest.mark.parametrize("forked", [False, True])
def test_d09_siblings_writes_stay_in_their_branch(forked: bool) -> None:
    """B + x and B + y, for 3 levels and 100 siblings; as branches of one session, or each as a fork of it."""
    store = SessionStore.in_memory()
    session = store.create("base", scheme=scheme("text@sglang"))
    base = session.append(session.root, [1, 2, 3])
    paths: dict[int, list[int]] = {}
    tips: dict[int, Node] = {}
    homes = {number: store.fork(session, base, f"fork {number}") if forked else session for number in range(100)}
    for level in range(3):
        for number in random.Random(level).sample(range(100), 100):
            tokens = [1000 * level + number, number]
            parent = tips.get(number, base)
            tips[number] = (
                homes[number].append(parent, tokens, metadata={"n": number})
                if (number + level) % 2
                else decode(homes[number], parent, *tokens)
            )
            paths.setdefault(number, [1, 2, 3]).extend(tokens)
    for number, tip in tips.items():
        home = store.get(f"fork {number}") if forked else store.get("base")
        found = home.node(tip.id)
        assert found.input_ids().tolist() == paths[number]
        assert [node.stop for node in found.path()] == [0, 3, 5, 7, 9]
        assert len(home.tree) == (5 if forked else 302)
        assert same(request_inputs(found, 3).input_ids, np.array(paths[number][3:]))
    assert base.input_ids().tolist() == [1, 2, 3]
    assert len(session.children(base)) == (0 if forked else 100)


@EXAMPLES
@given(st.lists(st.tuples(st.integers(0, 30), histories(max_turns=2)), min_size=1, max_size=12))
def test_d09_any_tree_of_branches(branches: list[tuple[int, list[Segment]]]) -> None:
    session = new_session()
    grown: list[tuple[Node, list[Segment]]] = [(session.root, [])]
    for which, segments in branches:
        node, history = grown[which % len(grown)]
        for segment in segments:
            node = grow(session, node, segment)
            history = [*history, segment]
            grown.append((node, history))
    for node, history in grown[1:]:
        check(node, history)
        store = SessionStore.in_memory()
        copied = store.fork(session, node, "copy")
        check(copied.node(node.id), history)
        check(grow(copied, node, a_turn(number=9)), [*history, a_turn(number=9)])


def test_d11_ten_thousand_forks_of_one_node() -> None:
    store = SessionStore.in_memory()
    session = store.create("parent", scheme=toy_scheme())
    node = grow(session, session.root, a_turn(), reply(8, 9))
    digest = tree_digest(session.tree)
    forks = [store.fork(session, node, f"fork-{number}") for number in range(10_000)]
    assert len(set(store.sessions())) == 10_001
    made = [decode(fork, node, 5, 6) for fork in forks]
    assert len({child.id for child in made}) == 10_000  # equal samples of different sessions stay apart
    assert all(fork.children(node) == (child,) for fork, child in zip(forks, made, strict=True))
    assert tree_digest(session.tree) == digest
    check(made[-1], [a_turn(), reply(8, 9), reply(5, 6)])
    refuses(SessionExists, session, store.fork, session, node, "fork-77")
    refuses(SessionExists, session, store.fork, session, node, "parent")
    refuses(SessionExists, session, store.create, "fork-77", scheme=toy_scheme())
    assert store.get("fork-77") is forks[77]
    assert len(forks[77].tree) == 4


def test_d11_ten_thousand_branches_in_one_session() -> None:
    session = text_session()
    node = session.append(session.root, [1])
    samples = [decode(session, node, 5, 6) for _ in range(5_000)]
    drafts = [session.draft(node) for _ in range(5_000)]
    extend_drafts(drafts, [5] * 5_000)
    extend_drafts(drafts, np.full(5_000, 6))
    samples += [draft.commit() for draft in drafts]
    assert len({sample.id for sample in samples}) == 10_000
    assert len({sample.key for sample in samples}) == 10_000
    assert session.children(node) == tuple(samples)
    assert samples[9_999].input_ids().tolist() == [1, 5, 6]


def test_d11_naming_a_taken_branch() -> None:
    session = text_session()
    node, other = session.append(session.root, [1]), session.append(session.root, [2])
    head = session.set_head("branch", node, expected=None)
    error = refuses(NameTaken, session, session.set_head, "branch", other, expected=None)
    assert (error.name, error.actual) == ("branch", head)
    refuses(NameTaken, session, session.set_head, "branch", node, expected=None)
    refuses(HeadMoved, session, session.set_head, "branch", other, expected=other)
    moved = session.set_head("branch", other, expected=head)
    back = session.set_head("branch", node, expected=other)
    assert len({head.version, moved.version, back.version}) == 3
    error = refuses(HeadMoved, session, session.set_head, "branch", other, expected=head)  # same node, older version
    assert error.actual == back


def test_d17_children_are_derived_from_parents() -> None:
    session = new_session()
    rng = random.Random(17)
    for _ in range(300):
        random_parent = rng.choice(list(session.tree))
        try:
            random_operation(session, rng, random_parent if random_parent.depth < 12 else session.root)
        except (MediaSpanError, OutOfRange):
            continue
    nodes = list(session.tree)
    assert len(nodes) > 50
    for node in nodes:
        expected = tuple(other for other in nodes if other.parent == node)
        assert session.children(node) == session.tree.children(node) == expected
        assert session.siblings(node) == tuple(
            other for other in nodes if other.parent == node.parent and other != node and node.depth
        )
        assert (node.role is None) == (node.parent is None)
        assert node.depth == 0 or node.parent in session.tree
    assert session.leaves() == tuple(node for node in nodes if not session.children(node))


def test_d17_a_head_is_a_committed_node() -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme=toy_scheme())
    base = grow(session, session.root, a_turn())
    session.set_head("main", base)
    stranger_session = store.create("other", scheme=toy_scheme())
    stranger = grow(stranger_session, stranger_session.root, turn(9))
    draft = session.draft(base, key="request")
    for chunk in range(5):  # streaming
        draft.extend([chunk])
        assert session.heads == {"main": base}
        assert session.children(base) == ()
        assert session.leaves() == (base,)
        refuses(TypeError, session, session.set_head, "main", draft)
        refuses(TypeError, session, session.set_head, "stream", draft)
    refuses(UnknownNode, session, session.set_head, "main", stranger)
    refuses(UnknownNode, session, session.set_head, "main", stranger.id)
    refuses(TypeError, session, session.set_head, "main", None)
    refuses(TypeError, session, session.set_head, "main", "main")
    version, _ = session.tree.append(base, [5])  # a node of another value of this tree
    refuses(UnknownNode, session, session.set_head, "main", version.children(base)[0])
    node = draft.commit("interrupted")
    assert session.set_head("main", node, expected=base) == session.head("main") == Head(node, session.head("main").version)
    assert (node.role, node.finish_reason) == ("assistant", "interrupted")


def test_d18_what_was_rewound_does_not_leak() -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme=scheme("text@sglang"))
    one = session.append(session.root, [1])
    two = decode(session, one, 2)
    three = session.append(two, [3])
    four = decode(session, three, 4)
    five = session.append(four, [5])
    session.set_head("main", five)
    session.set_head("main", three)  # rewind to 3
    other = decode(session, session.heads["main"], 40)  # 4'
    session.set_head("main", other, expected=three)
    fork = store.fork(session, other, "fork")
    for home in (session, fork):
        node = home.node(other.id)
        assert node.path() == (session.root, one, two, three, other)
        assert node.input_ids().tolist() == [1, 2, 3, 40]
    assert list(fork.tree) == [session.root, one, two, three, other]
    assert four not in fork.tree
    assert fork.children(three) == (other,)
    assert fork.siblings(other) == ()
    assert fork.leaves() == (other,)
    assert fork.heads == {}
    for rewound in (four, five):
        refuses(UnknownNode, fork, fork.append, rewound, [1])
        refuses(UnknownNode, fork, fork.set_head, "main", rewound)
    below = grow(fork, other, turn(6))
    assert below.input_ids().tolist() == [1, 2, 3, 40, 6]
    assert below not in session.tree
    assert five.input_ids().tolist() == [1, 2, 3, 4, 5]
    assert session.children(three) == (four, other)


@EXAMPLES
@given(histories(), histories(max_turns=2), st.data())
def test_d18_rewind_to_any_turn(history: list[Segment], new: list[Segment], data: st.DataObject) -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme=toy_scheme())
    tip = grow(session, session.root, *history)
    depth = data.draw(st.integers(0, len(history)))
    target = tip.path()[depth]
    branch = grow(session, target, *new)
    fork = store.fork(session, branch, "fork")
    expected = [*history[:depth], *new]
    check(fork.node(branch.id), expected)
    assert list(fork.tree) == list(branch.path())
    check(tip, history)


def test_d18_a_tree_value_keeps_its_own_future() -> None:
    tree = SessionTree(scheme("text@sglang"))
    tree, one = tree.append(tree.root, [1])
    older = tree
    futures = []
    for number in range(40):  # each from the older value, none sees another
        future, node = older.append(one, [number])
        future, node = future.append(node, [number, number])
        futures.append((future, node))
    assert len(older) == 2
    assert older.children(one) == ()
    for (future, node), number in zip(futures, itertools.count()):
        assert [step.token_ids.tolist() for step in future] == [[], [1], [number], [number, number]]
        assert future.children(one) == (node.parent,)
