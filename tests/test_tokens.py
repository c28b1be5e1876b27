"""Token ids at the edge against a naive oracle, and arenas that are written once."""

from __future__ import annotations

import struct
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from sessiontree import Node, OutOfRange, SessionStore, extend_drafts
from sessiontree.tokens import Extent, PathCache, token_bytes
from tests.test_tree import refused, text_tree

MAX_ID = 2**31 - 1
INTS = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
DTYPES = [np.dtype(order + name) for name in INTS for order in "<>"]
TORCH_TYPES = {
    "i1": torch.int8,
    "i2": torch.int16,
    "i4": torch.int32,
    "i8": torch.int64,
    "u1": torch.uint8,
    "u2": torch.uint16,
    "u4": torch.uint32,
    "u8": torch.uint64,
}


def naive(values: Sequence[int]) -> bytes:
    return b"".join(struct.pack("<i", value) for value in values)


def strided(values: np.ndarray[Any, Any], step: int) -> np.ndarray[Any, Any]:
    """The same values in memory that is ``step`` items apart, backwards for a negative step."""
    room = np.full(max(1, len(values) * abs(step)), 77, values.dtype)
    view = room[: len(values) * abs(step) : abs(step)]
    view = view[::-1] if step < 0 else view
    view[:] = values
    return view


ARRAYS: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {
    "array": lambda values: values,
    "every third": lambda values: strided(values, 3),
    "backwards": lambda values: strided(values, -1),
    "backwards by two": lambda values: strided(values, -2),
    "column": lambda values: np.stack([values, values], 1)[:, 1],
    "read-only": lambda values: np.frombuffer(values.tobytes(), values.dtype),
    "unaligned": lambda values: np.frombuffer(b"x" + values.tobytes(), values.dtype, offset=1),
    "memoryview": lambda values: buffer(values.astype(values.dtype.newbyteorder("="))),
    "numpy scalars": list,
    "tuple of numpy scalars": tuple,
    "zero-dimensional arrays": lambda values: [np.array(value) for value in values],
    "list": lambda values: values.tolist(),
    "tuple": lambda values: tuple(values.tolist()),
    "deque": lambda values: deque(values.tolist()),
    "array.array": lambda values: array("q" if values.dtype.kind == "i" else "Q", values.tolist()),
    "tensor": lambda values: tensor(values).clone(),
    "strided tensor": lambda values: torch.stack([tensor(values), tensor(values)], 1)[:, 0],
    "list of tensors": lambda values: list(tensor(values)),
    "subclass": lambda values: values.view(Sub),
}


def buffer(values: Any) -> memoryview:
    return memoryview(values)


class Sub(np.ndarray[Any, Any]):
    """An array of another class."""


def tensor(values: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.tensor(values.tolist(), dtype=TORCH_TYPES[values.dtype.str[1:]])


@st.composite
def int_arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype = draw(st.sampled_from(DTYPES))
    info = np.iinfo(dtype)
    edges = [
        value
        for value in (-1, 0, 1, 127, 128, 2**31 - 1, 2**31, 2**32, -(2**31), info.min, info.max)
        if info.min <= value <= info.max
    ]
    inside = st.integers(0, min(int(info.max), MAX_ID))
    values = draw(st.one_of(st.lists(inside, max_size=40), st.lists(st.one_of(st.sampled_from(edges), inside), max_size=8)))
    return np.array(values, dtype)


@pytest.mark.parametrize("container", ARRAYS)
@given(values=int_arrays())
@example(values=np.zeros(0, "i4"))
@example(values=np.array([5, 2**63 + 1], "u8"))
@example(values=np.array([-(2**63)], "i8"))
@settings(max_examples=40, deadline=None)
def test_integers_of_every_kind(container: str, values: np.ndarray[Any, Any]) -> None:
    numbers = [int(value) for value in values]
    assume(container != "list of tensors" or max(numbers, default=0) < 2**63)  # a larger one has no __index__ in PyTorch
    made = ARRAYS[container](values)
    bad = [at for at, value in enumerate(numbers) if not 0 <= value <= MAX_ID]
    if not bad:
        assert token_bytes(made) == naive(numbers)
        return
    with pytest.raises(OutOfRange) as caught:
        token_bytes(made)
    error = caught.value
    assert (error.index, int(error.value), error.limit) == (bad[0], numbers[bad[0]], MAX_ID)
    assert f"token {bad[0]} is {numbers[bad[0]]}" in str(error)


@given(st.lists(st.integers(0, MAX_ID), max_size=30), st.integers(0, 30), st.one_of(st.integers(max_value=-1), st.integers(2**31)))
@settings(max_examples=100, deadline=None)
def test_one_bad_id_of_any_size_is_named(good: list[int], at: int, bad: int) -> None:
    at = min(at, len(good))
    values = [*good[:at], bad, *good[at:]]
    for made in (values, tuple(values)):
        with pytest.raises(OutOfRange) as caught:
            token_bytes(made)
        assert (caught.value.index, caught.value.value) == (at, bad)


@pytest.mark.parametrize(
    ("values", "at"),
    [
        (range(-1, 3), 0),
        (range(5, -3, -1), 6),
        (range(2**31 - 2, 2**31 + 1), 2),
        (range(2**63, 2**63 + 2), 0),
        (range(2**70, 2**70 + 1), 0),
        (range(-1, 2**64, 2**63), 0),
        (range(0, 2**65, 2**64), 1),
    ],
)
def test_ranges_that_leave_the_token_ids(values: range, at: int) -> None:
    with pytest.raises(OutOfRange) as caught:
        token_bytes(values)
    assert (caught.value.index, caught.value.value) == (at, values[at])


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_ranges(start: int, stop: int, step: int) -> None:
    for values in (range(start, stop, step), range(start, stop, step)[::-1]):
        assert token_bytes(values) == naive(list(values))


@given(st.binary(max_size=20))
@settings(max_examples=30, deadline=None)
def test_bytes_are_small_ints(data: bytes) -> None:
    for made in (data, bytearray(data), memoryview(data), memoryview(data + data[::-1])[::-1][: len(data)]):
        assert token_bytes(made) == naive(list(data))


@pytest.mark.parametrize(
    "empty",
    [
        [],
        (),
        b"",
        bytearray(),
        range(0),
        deque(),
        array("i"),
        array("d"),
        memoryview(b""),
        np.array([]),
        np.zeros(0, bool),
        np.zeros(0, "u8"),
        np.zeros(3)[3:],
        torch.tensor([]),
        torch.zeros(0, dtype=torch.int64),
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}",
)
def test_empty_of_any_kind(empty: Any) -> None:
    assert token_bytes(empty) == b""
    tree = text_tree()
    tree, node = tree.append(tree.root, [1])
    assert tree.append(node, empty)[1].token_ids.tolist() == []


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        1,
        1.5,
        "12",
        "",
        {1, 2},
        {},
        {1: 2},
        iter([1]),
        (token for token in [1]),
        object(),
        [1.0],
        [1, 2.5],
        ["1"],
        [None],
        [[1]],
        [(1, 2)],
        [b"1"],
        [1j],
        [np.float64(1)],
        [np.array([1, 2])],
        [np.array([1.0])],
        array("d", [1.0]),
        np.array([1.0]),
        np.array([1], np.float16),
        np.array([True]),
        np.array([1j]),
        np.array(["1"]),
        np.array([b"1"]),
        np.array([1], object),
        np.array([None]),
        np.array(1),
        np.int64(1),
        np.zeros((2, 2), int),
        np.zeros((0, 3), int),
        np.zeros((1, 1), "i4"),
        np.zeros(1, "M8[s]"),
        np.zeros(1, "m8[s]"),
        np.zeros(1, [("a", "i4")]),
        torch.tensor([1.0]),
        torch.tensor([1.0], dtype=torch.bfloat16),
        torch.tensor([True]),
        torch.tensor(1),
        torch.zeros(2, 2, dtype=torch.int32),
        [torch.tensor(1.0)],
        [torch.tensor([1, 2])],
        buffer(np.zeros((2, 2), "i4")),
        buffer(np.zeros(2)),
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}",
)
def test_what_is_no_run_of_ints_is_a_type_error(wrong: Any) -> None:
    session = SessionStore.in_memory().create("s", scheme="text@hf5")
    first = session.append(session.root, [1])
    draft = session.draft(first)
    draft.append(7)
    for call in (
        lambda: token_bytes(wrong),
        lambda: session.append(first, wrong),
        lambda: draft.extend(wrong),
        lambda: session.rewrite(first, [(0, 1, wrong)]),
        lambda: session.replace(first, wrong, head="h"),
    ):
        refused(session, TypeError, call)
    assert draft.token_ids.tolist() == [7]


@pytest.mark.parametrize("wrong", [True, np.True_, 1.0, "1", None, [1], np.array([1, 2])])
def test_a_single_token_is_an_int(wrong: Any) -> None:
    session = SessionStore.in_memory().create("s", scheme="text@hf5")
    draft = session.draft(session.root)
    with pytest.raises(TypeError):
        draft.append(wrong)
    assert len(draft) == 0
    tokens: tuple[Any, ...] = (np.int8(3), torch.tensor(4))
    for token in tokens:
        draft.append(token)
    extend_drafts([draft], torch.tensor([5]))
    assert draft.token_ids.tolist() == [3, 4, 5]


# --- arenas -------------------------------------------------------------------------------------------------------------


def test_old_views_outlive_growth() -> None:
    tree = text_tree()
    tree, node = tree.append(tree.root, range(5000))
    views: list[tuple[Any, list[int]]] = [(node.input_ids(), list(range(5000)))]
    node_of: Node = node
    for step in range(200):
        tree, node_of = tree.append(node_of, [step] * (1 + step % 37))
        whole = views[-1][1] + [step] * (1 + step % 37)
        views.append((node_of.input_ids(), whole))
    for view, whole in views:
        assert view.tolist() == whole
    assert node.input_ids().tolist() == list(range(5000))


def test_an_extent_reads_what_was_written_across_its_parents() -> None:
    owner, paths = object(), PathCache(2**20)
    root = Extent(owner, None, 0, b"", paths)
    root.append(token_bytes(range(10)))
    middle = Extent(owner, root, 6, token_bytes(range(100, 105)), paths)
    tip = Extent(owner, middle, 8, token_bytes(range(200, 203)), paths)
    tip.append(token_bytes([300]))
    middle.append(token_bytes(range(400, 500)))
    root.append(token_bytes(range(500, 600)))
    whole = [0, 1, 2, 3, 4, 5, 100, 101, 200, 201, 202, 300]
    for start in range(13):
        for stop in range(start, 13):
            assert tip.read(start, stop).tolist() == whole[start:stop]
            assert tip.view(start, stop).tolist() == whole[start:stop]
            assert tip.read_bytes(start, stop) == naive(whole[start:stop])
    assert middle.read(0, 11).tolist() == [*whole[:8], 102, 103, 104]
    assert root.read(0, 10).tolist() == list(range(10))


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_branches_never_write_into_what_they_share(data: st.DataObject) -> None:
    """Every node's bytes against a naive model after every step, with views held from the moment each node appeared."""
    session = SessionStore.in_memory().create("s", scheme="text@hf5")
    known: dict[bytes, tuple[Node, list[int], Any]] = {session.root.id: (session.root, [], session.root.input_ids())}
    fresh = iter(range(1, 10**9))

    def tokens(least: int) -> list[int]:
        return [next(fresh) for _ in range(data.draw(st.sampled_from([least, 1, 2, 16, 17, 33, 4097])))]

    for _ in range(data.draw(st.integers(1, 20))):
        parent, before, _ = list(known.values())[data.draw(st.integers(0, len(known) - 1))]
        what = data.draw(st.sampled_from(["append", "append", "draft", "truncate", "rewrite", "value"]))
        if what == "append":
            new = tokens(1 if parent.depth == 0 else 0)
            node, ids = session.append(parent, new), before + new
        elif what == "value":
            new = tokens(1)
            node, ids = session.tree.append(parent, new)[1], before + new
            assert node.input_ids().tolist() == ids
            continue
        elif what == "draft":
            draft, new = session.draft(parent), tokens(1)
            draft.extend([*new, 5, 5])
            draft.rollback(len(new))
            node, ids = draft.commit(), before + new
        elif what == "truncate":
            length = data.draw(st.integers(0, parent.stop))
            node, ids = session.truncate(parent, length), before[:length]
        else:
            start = data.draw(st.integers(0, parent.stop))
            stop = data.draw(st.integers(start, parent.stop))
            new = tokens(1)
            node, ids = session.rewrite(parent, [(start, stop, new)]), before[:start] + new + before[stop:]
        for step in node.path():
            known.setdefault(step.id, (step, ids[: step.stop], step.input_ids()))
        for held, whole, view in known.values():
            assert held.input_ids().tolist() == whole
            assert held.token_ids.tolist() == whole[held.start :]
            assert view.tolist() == whole
