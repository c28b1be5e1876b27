"""Annotations as values, and on trees and sessions in memory: what is said, of which tokens, and who sees it."""

from __future__ import annotations

import copy
import enum
import itertools
import math
import pickle
import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sessiontree import (
    LimitExceeded,
    Node,
    OutOfRange,
    Session,
    SessionStore,
    SessionTree,
    SessionTreeError,
    UnknownNode,
    Unsupported,
    codec,
)
from sessiontree.annotation_log import AnnotationLog, Said
from sessiontree.annotations import (
    ADVANTAGE,
    LOGPROBS,
    REWARD,
    ROUTED_EXPERTS,
    WEIGHT_VERSION,
    Ragged,
    Spans,
    TokenValues,
)
from sessiontree.errors import CorruptTree
from tests.test_robustness import alarms, interrupted

DTYPES: Final = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")


def text_session() -> Session:
    return SessionStore.in_memory().create("s", scheme="text@hf5")


def by_token(value: Any) -> Any:
    """What a value says of each token: {offset: (type, bytes)}; of spans [(start, stop, value)]; a scalar with its type."""
    if isinstance(value, TokenValues):
        return {
            start + at: (str(row.dtype), row.shape, row.tobytes()) for start, rows in value.stretches for at, row in enumerate(rows)
        }
    if isinstance(value, Ragged):
        return {token: (str(row.dtype), row.tobytes()) for token, row in value.lists().items()}
    if isinstance(value, Spans):
        return list(value)
    return type(value), repr(value)


# --- values ------------------------------------------------------------------------------------------------------------------
def test_values_of_tokens_are_delta_arrays() -> None:
    value = TokenValues(np.arange(6, dtype=np.float32).reshape(3, 2), start=4)
    assert (value.dtype, value.row_shape, value.stop) == (np.dtype("float32"), (2,), 7)
    [(start, rows)] = value.stretches
    assert start == 4 and rows.tolist() == [[0, 1], [2, 3], [4, 5]]
    values, known = value.read(3, 6)
    assert values.tolist() == [[0, 0], [0, 1], [2, 3]] and known.tolist() == [False, True, True]
    assert values.dtype == np.float32
    assert value.read(9, 9).values.shape == (0, 2)
    for start, stop in ((-1, 2), (3, 2), (0, 2**31)):
        with pytest.raises(OutOfRange):
            value.read(start, stop)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_that_touch_are_one_and_those_that_do_not_stay_apart(dtype: str) -> None:
    ones = np.ones(2, dtype)
    value = TokenValues(ones, 4).over(TokenValues(ones, 0), "v").over(TokenValues(ones, 8), "v")
    assert [(start, len(rows)) for start, rows in value.stretches] == [(0, 2), (4, 2), (8, 2)]
    value = TokenValues(ones, 2).over(value, "v").over(TokenValues(ones, 6), "v")
    assert [(start, len(rows)) for start, rows in value.stretches] == [(0, 10)]
    assert value == TokenValues(np.ones(10, dtype))


def arrays(dtype: str, shape: tuple[int, ...]) -> st.SearchStrategy[np.ndarray[Any, Any]]:
    """Any bytes that are values of a type: NaNs with payloads, negative zeros, denormal numbers."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if dtype == "bool":
        return st.binary(min_size=size, max_size=size).map(lambda data: (np.frombuffer(data, "u1") & 1).astype(bool).reshape(shape))
    return st.binary(min_size=size, max_size=size).map(lambda data: np.frombuffer(data, dtype).reshape(shape))


@st.composite
def sayings(draw: st.DrawFn) -> tuple[type, list[Any]]:
    """Some values of one kind, type and row shape, one said after the other."""
    kind = draw(st.sampled_from([TokenValues, Ragged, Spans]))
    dtype = draw(st.sampled_from(DTYPES))
    row = draw(st.sampled_from([(), (2,), (2, 3), (0,)]))
    found: list[Any] = []
    for _ in range(draw(st.integers(1, 6))):
        start, count = draw(st.integers(0, 12)), draw(st.integers(0, 6))
        if kind is TokenValues:
            found.append(TokenValues(draw(arrays(dtype, (count, *row))), start))
        elif kind is Ragged:
            lengths = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
            found.append(Ragged(draw(arrays(dtype, (sum(lengths),))), np.array(lengths, np.int64), start))
        else:
            cuts = sorted(draw(st.sets(st.integers(0, 18), max_size=6)))
            pairs = [(a, b) for a, b in itertools.pairwise(cuts) if draw(st.booleans())]
            found.append(Spans([(a, b, draw(st.one_of(st.integers(-(2**63), 2**64 - 1), st.text(max_size=3)))) for a, b in pairs]))
    return kind, found


@settings(max_examples=400, deadline=None)
@given(sayings(), st.integers(0, 18), st.integers(0, 18))
def test_what_is_said_later_of_a_token_counts(said: tuple[type, list[Any]], start: int, stop: int) -> None:
    kind, values = said
    model: dict[int, Any] = {}
    whole = None
    for number, value in enumerate(values):
        whole = value.over(whole, "v")
        if kind is Spans:
            model |= {at: (number, begin, each) for begin, end, each in value for at in range(begin, end)}
        else:
            model |= by_token(value)
    assert whole is not None

    def expected(tokens: dict[int, Any]) -> Any:
        if kind is not Spans:
            return tokens
        found: list[Any] = []
        for at, which in sorted(tokens.items()):
            if found and found[-1][0] == which and found[-1][2] == at:
                found[-1][2] = at + 1
            else:
                found.append([which, at, at + 1])
        return [(begin, end, which[2]) for which, begin, end in found]

    assert by_token(whole) == expected(model)
    assert whole.stop == max(model, default=-1) + 1
    clipped = whole.clipped(start, stop)
    inside = {at: each for at, each in model.items() if start <= at < stop}
    assert (clipped is None) == (not inside)
    if clipped is not None:
        assert by_token(clipped) == expected(inside)
    if kind is TokenValues:
        parts = [(begin, begin + len(rows)) for begin, rows in whole.stretches]
        assert all(one[1] < other[0] for one, other in itertools.pairwise(parts))
        window = whole.read(0, 20)
        assert np.flatnonzero(window.known).tolist() == sorted(model)
        assert {at: window.values[at].tobytes() for at in model} == {at: each[2] for at, each in model.items()}
        assert not window.values[~window.known].any()
    assert whole.over(None, "v") is whole
    assert whole.over(whole, "v") == whole and hash(whole.over(whole, "v")) == hash(whole)
    assert pickle.loads(pickle.dumps(whole)) == whole
    assert copy.deepcopy(whole) == whole


@settings(max_examples=400, deadline=None)
@given(sayings(), st.integers(0, 2**64 - 1))
def test_a_record_is_the_value_bit_for_bit(said: tuple[type, list[Any]], version: int) -> None:
    whole = None
    for value in said[1]:
        whole = value.over(whole, "v")
    assert whole is not None
    record = codec.AnnotationRecord(3, 7, bytes(range(32)), "näme", whole, version)
    data = codec.encode(record)
    found = codec.decode(data)
    assert found == record and codec.encode(found) == data
    assert isinstance(found, codec.AnnotationRecord) and type(found.value) is said[0]
    assert by_token(found.value) == by_token(whole)


@pytest.mark.parametrize("value", [True, False, 0, -1, 2**64 - 1, -(2**63), 0.0, -0.0, 1e300, math.inf, "", "é" * 9, "\0"])
def test_scalars_keep_their_type(value: Any) -> None:
    data = codec.encode(codec.AnnotationRecord(0, 0, bytes(32), "x", value, 1))
    found = codec.decode(data)
    assert isinstance(found, codec.AnnotationRecord)
    assert (type(found.value), repr(found.value)) == (type(value), repr(value))
    session = text_session()
    session.annotate(session.root, {"x": value})
    assert repr(session.annotations(session.root)["x"]) == repr(value)


def test_nan_is_one_value() -> None:
    session = text_session()
    session.annotate(session.root, {"x": math.nan})
    before = session.tree
    session.annotate(session.root, {"x": math.nan})
    assert session.tree._said == before._said
    session.annotate(session.root, {"x": 0.0})
    session.annotate(session.root, {"x": -0.0})
    assert repr(session.annotation(session.root, "x")) == "-0.0"


def record_of(value: Any, name: Any = "x") -> bytes:
    return codec.encode(codec.AnnotationRecord(0, 1, bytes(32), name, value, 1))


def test_a_record_that_no_store_writes_is_corrupt() -> None:
    """Each byte changed, cut anywhere, and forms that would be another value."""
    for value in (
        1.5,
        "text",
        TokenValues(np.ones((2, 3), np.float16), 4),
        Ragged.of([[1], [], [2, 3]]),
        Spans([(0, 2, 1), (3, 4, "b")]),
    ):
        data = record_of(value)
        whole = codec.decode(data)
        for size in range(len(data)):
            with pytest.raises(SessionTreeError):
                codec.decode(data[:size])
        with pytest.raises(CorruptTree):
            codec.decode(data + b"\0")
        for at in range(len(data)):
            for bit in range(8):
                changed = bytearray(data)
                changed[at] ^= 1 << bit
                try:
                    found = codec.decode(bytes(changed))
                except SessionTreeError:
                    continue
                assert found != whole, "two records are never one value"
                assert codec.encode(found) == bytes(changed), "what is taken is what a store writes"


WRONG_PARTS: Final[dict[str, tuple[type, tuple[Any, ...]]]] = {
    "an empty part": (TokenValues, ((0, np.ones(0)),)),
    "parts that overlap": (TokenValues, ((0, np.ones(3)), (2, np.ones(3)))),
    "parts that touch": (TokenValues, ((0, np.ones(3)), (3, np.ones(3)))),
    "parts in another order": (TokenValues, ((5, np.ones(3)), (0, np.ones(3)))),
    "parts of two types": (TokenValues, ((0, np.ones(3)), (5, np.ones(3, np.float32)))),
    "parts of two shapes": (TokenValues, ((0, np.ones((3, 1))), (5, np.ones((3, 2))))),
    "a negative start": (TokenValues, ((-1, np.ones(3)),)),
    "a start that is none": (TokenValues, (("0", np.ones(3)),)),
    "no array": (TokenValues, ((0, 3),)),
    "complex numbers": (TokenValues, ((0, np.ones(3, np.complex64)),)),
    "no dimension": (TokenValues, ((0, np.array(1.0)),)),
    "too many fields": (TokenValues, ((0, np.ones(3), 1),)),
    "lengths that do not sum up": (Ragged, ((0, np.ones(2, np.int32), np.ones(3)),)),
    "negative lengths": (Ragged, ((0, np.array([-1, 3], np.int32), np.ones(2)),)),
    "wide lengths": (Ragged, ((0, np.ones(2, np.int64), np.ones(2)),)),
    "lists of two types": (Ragged, ((0, np.ones(1, np.int32), np.ones(1)), (5, np.ones(1, np.int32), np.ones(1, np.int8)))),
    "an empty span": (Spans, ((2, 2, 1),)),
    "a span backwards": (Spans, ((3, 2, 1),)),
    "spans that overlap": (Spans, ((0, 3, 1), (2, 4, 1))),
    "spans in another order": (Spans, ((3, 4, 1), (0, 1, 1))),
    "a span of a float": (Spans, ((0, 1, 1.5),)),
    "a span of a bool": (Spans, ((0, 1, True),)),
}


@pytest.mark.parametrize("what", WRONG_PARTS)
def test_parts_that_no_value_has_are_corrupt(what: str) -> None:
    kind, parts = WRONG_PARTS[what]
    data = codec._record(codec.ANNOTATION, 0, 1, 0, codec.name_digest("x"), 1, (bytes(32), "x", *form(kind, parts)))
    with pytest.raises(CorruptTree):
        codec.decode(data)


def form(kind: type, parts: tuple[Any, ...]) -> tuple[int, Any]:
    fields = tuple(tuple(codec._packable(each) if isinstance(each, np.ndarray) else each for each in part) for part in parts)
    return 1 + (TokenValues, Ragged, Spans).index(kind), fields


# --- what callers give --------------------------------------------------------------------------------------------------------
class Small(enum.IntEnum):
    ONE = 1


class MyList(list[int]):
    pass


TAKEN: Final[dict[str, tuple[Any, Any]]] = {
    "a list": ([1, 2, 3, 4], TokenValues(np.array([1, 2, 3, 4]))),
    "a tuple": ((1.5, 2.0, 3.0, 4.0), TokenValues(np.array([1.5, 2, 3, 4]))),
    "a subclass of list": (MyList([1, 2, 3, 4]), TokenValues(np.array([1, 2, 3, 4]))),
    "another byte order": (np.arange(4, dtype=">f4"), TokenValues(np.arange(4, dtype="<f4"))),
    "every other one": (np.arange(8, dtype=np.uint16)[::2], TokenValues(np.array([0, 2, 4, 6], np.uint16))),
    "backwards": (np.arange(4)[::-1], TokenValues(np.array([3, 2, 1, 0]))),
    "in Fortran's order": (np.asfortranarray(np.arange(12).reshape(4, 3)), TokenValues(np.arange(12).reshape(4, 3))),
    "a tensor": (torch.arange(4, dtype=torch.float32), TokenValues(np.arange(4, dtype=np.float32))),
    "a tensor with a gradient": (torch.ones(4, requires_grad=True), TokenValues(np.ones(4, np.float32))),
    "rows of nothing": (np.zeros((4, 0), np.int8), TokenValues(np.zeros((4, 0), np.int8))),
    "a tensor of no dimension": (torch.tensor(2.5), 2.5),
    "a NumPy scalar": (np.float32(0.5), 0.5),
    "a NumPy bool": (np.bool_(True), True),
    "an enum": (Small.ONE, 1),
    "the largest int": (2**64 - 1, 2**64 - 1),
}
REFUSED: Final[dict[str, tuple[Any, type[Exception]]]] = {
    "too few rows": ([1, 2, 3], OutOfRange),
    "too many rows": ([1] * 5, OutOfRange),
    "no rows": ([], OutOfRange),
    "tokens behind the end": (TokenValues([1], 4), OutOfRange),
    "spans behind the end": (Spans([(3, 5, 1)]), OutOfRange),
    "lists behind the end": (Ragged.of([[1]], start=4), OutOfRange),
    "objects": (np.array([1, None, 2, 3], object), TypeError),
    "texts": (np.array(list("abcd")), TypeError),
    "complex numbers": (np.ones(4, complex), TypeError),
    "times": (np.zeros(4, "datetime64[s]"), TypeError),
    "long doubles": (np.ones(4, np.longdouble), TypeError),
    "a masked array": (np.ma.masked_array([1, 2, 3, 4], [False, True, False, False]), TypeError),
    "records": (np.zeros(4, [("a", "i4")]), TypeError),
    "lists of lists of several lengths": ([[1], [2, 3], [], [4]], TypeError),
    "a tensor that NumPy has no type for": (torch.ones(4, dtype=torch.bfloat16), TypeError),
    "a generator": ((each for each in range(4)), TypeError),
    "bytes": (b"abcd", TypeError),
    "None": (None, TypeError),
    "a mapping": ({}, TypeError),
    "a complex": (1j, TypeError),
    "an int of 65 bits": (2**64, OutOfRange),
    "a lone surrogate": ("\ud800", TypeError),
}


@pytest.mark.parametrize("what", TAKEN)
def test_what_is_taken(what: str) -> None:
    given_value, expected = TAKEN[what]
    session = text_session()
    node = session.append(session.root, [1, 2, 3, 4], annotations={"x": given_value})
    found = session.annotations(node)["x"]
    assert type(found) is type(expected) and found == expected


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("how", ["annotate", "append", "commit", "record"])
def test_what_is_refused_changes_nothing(what: str, how: str) -> None:
    value, error = REFUSED[what]
    session = text_session()
    node = session.append(session.root, [1, 2, 3, 4], annotations={"kept": 1})
    draft = session.draft(node)
    draft.extend([5, 6, 7, 8])
    before, count = session.tree, len(session.tree)
    calls: dict[str, Callable[[], object]] = {
        "annotate": lambda: session.annotate(node, {"fine": 1, "x": value}),
        "append": lambda: session.append(node, [5, 6, 7, 8], annotations={"fine": 1, "x": value}, head="h"),
        "commit": lambda: draft.commit(annotations={"fine": 1, "x": value}, head="h"),
        "record": lambda: session.record([1, 2, 9], [5, 6, 7, 8], annotations={"fine": 1, "x": value}),
    }
    with pytest.raises(error, match="'x' of "):
        calls[how]()
    assert len(session.tree) == count and session.tree._said == before._said and not session.heads
    assert session.annotations(node) == {"kept": 1}
    made = draft.commit(annotations={"x": [1, 2, 3, 4]})  # it is still open
    assert session.annotations(made) == {"x": TokenValues([1, 2, 3, 4])}


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: TokenValues([1], -1), OutOfRange),
        (lambda: TokenValues([1], 2**31), OutOfRange),
        (lambda: TokenValues([1], 1.0), TypeError),  # type: ignore[arg-type]
        (lambda: TokenValues([1], True), TypeError),
        (lambda: TokenValues(3), TypeError),
        (lambda: Ragged([1, 2], [1, 2]), OutOfRange),
        (lambda: Ragged([1], [-1, 2]), OutOfRange),
        (lambda: Ragged([1], [1.0]), TypeError),
        (lambda: Ragged([1], np.array([2**63], np.uint64)), OutOfRange),
        (lambda: Ragged([[1]], [1]), TypeError),
        (lambda: Ragged.of([[[1, 2], [3, 4]]]), TypeError),
        (lambda: Ragged(np.zeros(0, np.int8), np.full(4, 2**31 - 1)), OutOfRange),
        (lambda: Spans([(0, 0, 1)]), OutOfRange),
        (lambda: Spans([(2, 1, 1)]), OutOfRange),
        (lambda: Spans([(0, 3, 1), (2, 4, 1)]), OutOfRange),
        (lambda: Spans([(0, 1, 2**64)]), OutOfRange),
        (lambda: Spans([(0, 1, True)]), TypeError),
        (lambda: Spans([(0, 1, 1.5)]), TypeError),  # type: ignore[list-item]
        (lambda: Spans([(0, 1)]), TypeError),  # type: ignore[list-item]
        (lambda: Spans(None), TypeError),  # type: ignore[arg-type]
    ],
)
def test_values_that_cannot_be(call: Callable[[], object], error: type[Exception]) -> None:
    with pytest.raises(error):
        call()


@pytest.mark.parametrize(
    ("annotations", "error"),
    [
        ({"": 1}, LimitExceeded),
        ({"x" * 257: 1}, LimitExceeded),
        ({3: 1}, TypeError),
        ({None: 1}, TypeError),
        ({"\ud800": 1}, TypeError),
        ([("a", 1)], TypeError),
        ("abc", TypeError),
        (None, TypeError),
    ],
)
def test_names_and_mappings_that_cannot_be(annotations: Any, error: type[Exception]) -> None:
    session = text_session()
    with pytest.raises(error):
        session.annotate(session.root, annotations)
    assert session.tree._said == 0
    session.annotate(session.root, {"x" * 256: 1, "\0": 2})
    assert session.annotations(session.root) == {"x" * 256: 1, "\0": 2}


def test_a_name_keeps_its_kind_type_and_rows() -> None:
    session = text_session()
    node = session.append(session.root, [1, 2], annotations={"v": np.ones(2, np.float32), "l": Ragged.of([[1], []]), "s": 1})
    for name, value in (
        ("v", np.ones(2)),
        ("v", np.ones((2, 1), np.float32)),
        ("v", Ragged.of([[1], []])),
        ("v", 1.0),
        ("l", Ragged.of([[1.0], []])),
        ("l", Spans([(0, 1, 1)])),
        ("s", np.ones(2)),
    ):
        with pytest.raises(Unsupported, match=repr(name)):
            session.annotate(node, {"new": 1, name: value})
    assert set(session.annotations(node)) == {"v", "l", "s"}
    session.annotate(node, {"s": "text"})
    assert session.annotations(node)["s"] == "text"


# --- nobody changes what a node has --------------------------------------------------------------------------------------------
def test_what_a_caller_gave_may_change_afterwards() -> None:
    session = text_session()
    rows, lengths, ids = np.arange(4.0), np.array([1, 1, 0, 2]), np.arange(4)
    tensor = torch.arange(4.0)
    names = {"rows": rows, "tensor": tensor, "lists": Ragged(ids, lengths)}
    node = session.append(session.root, [1, 2, 3, 4], annotations=names)
    expected = {name: by_token(value) for name, value in session.annotations(node).items()}
    rows[:], lengths[:], ids[:] = 9, 1, 9
    tensor.fill_(9)
    names.clear()
    assert {name: by_token(value) for name, value in session.annotations(node).items()} == expected


def test_what_is_handed_out_may_change() -> None:
    session = text_session()
    node = session.append(
        session.root, [1, 2, 3, 4], annotations={"rows": np.arange(4.0), "lists": Ragged.of([[1], [2, 3], [], [4]]), "s": 1}
    )
    found: dict[str, Any] = session.annotations(node)
    expected = {name: by_token(value) for name, value in found.items()}
    for array in (
        found["rows"].stretches[0][1],
        found["rows"].read(0, 4).values,
        found["lists"].stretches[0][1],
        found["lists"].stretches[0][2],
        *found["lists"].lists().values(),
        *session.token_values(node, "rows"),
    ):
        if array.size:
            torch.from_numpy(array).fill_(1 if array.dtype == bool else 77)
    found.clear()
    assert {name: by_token(value) for name, value in session.annotations(node).items()} == expected
    value: Any = session.annotation(node, "rows")
    with pytest.raises(AttributeError):
        value._parts = ()


@pytest.mark.parametrize("kind", [TokenValues, Ragged, Spans])
def test_values_have_no_subclasses(kind: type) -> None:
    with pytest.raises(TypeError):
        type("Sub", (kind,), {})


# --- on trees ------------------------------------------------------------------------------------------------------------------
def seen(tree: SessionTree | Session, node: Node | bytes) -> dict[str, Any]:
    return {name: by_token(value) for name, value in tree.annotations(node).items()}


def test_old_values_of_a_tree_stay_what_they_were() -> None:
    session = text_session()
    node = session.append(session.root, [1, 2, 3], annotations={"v": [1, 1, 1]})
    trees: list[tuple[SessionTree, Any]] = []
    for number in range(30):
        trees.append((session.tree, seen(session, node)))
        session.annotate(node, {"v": TokenValues([number], number % 3), f"n{number % 4}": number})
        if not number % 7:
            old, expected = trees[number // 2]
            branch = old.annotate(node, {"n0": "old"})
            assert seen(branch, node) == {**expected, "n0": (str, "'old'")}
            higher = branch.annotate(node, {"n0": "older"})
            assert seen(branch, node)["n0"] == (str, "'old'") and seen(higher, node)["n0"] == (str, "'older'")
    for tree, expected in trees:
        assert seen(tree, node) == expected
    assert seen(pickle.loads(pickle.dumps(session.tree)), node) == seen(session, node)


def test_saying_the_same_again_changes_nothing() -> None:
    session = text_session()
    node = session.append(session.root, [1, 2], annotations={"v": [1, 2], "s": 1})
    tree = session.tree
    assert tree.annotate(node, {}) is tree
    assert tree.annotate(node, {"v": TokenValues([2], 1), "s": 1}) is tree
    assert tree.annotate(node, {"s": True}) is not tree  # another type
    assert tree.annotate(node, {"empty": TokenValues(np.zeros(0))}).annotations(node)["empty"] == TokenValues([])


def test_an_append_of_what_is_there_says_more_of_it() -> None:
    session = text_session()
    node = session.append(session.root, [1, 2], annotations={"a": 1})
    assert session.append(session.root, [1, 2], annotations={"b": 2}) == node
    assert session.annotations(node) == {"a": 1, "b": 2}


def test_a_node_of_another_tree_is_unknown() -> None:
    session, other = text_session(), text_session()
    node = other.append(other.root, [1])
    for call in (
        lambda: session.annotate(node, {"a": 1}),
        lambda: session.annotations(node),
        lambda: session.token_values(node, "a"),
        lambda: session.spans(bytes(32), "a"),
    ):
        with pytest.raises(UnknownNode):
            call()


def test_values_along_a_path() -> None:
    session = text_session()
    node, expected, known = session.root, [0.0] * 40, [False] * 40
    for turn in range(10):
        start = node.stop
        node = session.append(node, [turn] * 4)
        if turn % 3:
            session.annotate(node, {"v": TokenValues(np.array([turn, turn + 0.5], np.float32), 1)})
            expected[start + 1 : start + 3] = [turn, turn + 0.5]
            known[start + 1 : start + 3] = [True, True]
    for start, stop in itertools.combinations_with_replacement(range(41), 2):
        window = session.token_values(node, "v", start, stop)
        assert window.values.tolist() == expected[start:stop] and window.known.tolist() == known[start:stop]
        assert window.values.dtype == np.float32
    assert session.token_values(node, "nothing", 3, 5).values.tolist() == [0, 0]
    for start, stop in ((-1, 3), (0, 41), (5, 4)):
        with pytest.raises(OutOfRange):
            session.token_values(node, "v", start, stop)
        with pytest.raises(OutOfRange):
            session.spans(node, "v", start, stop)
    with pytest.raises(Unsupported):
        session.spans(node, "v")
    last = session.append(node, [1], annotations={"v": np.ones(1)})
    with pytest.raises(Unsupported, match="float64"):
        session.token_values(last, "v")


def test_a_prefix_reads_through_and_says_its_own() -> None:
    session = text_session()
    node = session.append(
        session.root, [1, 2, 3, 4, 5], annotations={"v": [1, 2, 3, 4, 5], "s": 1, WEIGHT_VERSION: Spans([(0, 2, 1), (2, 5, 2)])}
    )
    part = session.truncate(node, 3)
    assert seen(session, part) == {"v": by_token(TokenValues([1, 2, 3])), WEIGHT_VERSION: [(0, 2, 1), (2, 3, 2)]}
    session.annotate(node, {"v": TokenValues([9], 0)})
    assert session.token_values(part, "v").values.tolist() == [9, 2, 3]
    session.annotate(part, {"v": TokenValues([7], 1), "s": "own"})
    assert session.token_values(part, "v").values.tolist() == [9, 7, 3]
    assert session.token_values(node, "v").values.tolist() == [9, 2, 3, 4, 5]
    shorter = session.truncate(part, 2)
    assert session.token_values(shorter, "v").values.tolist() == [9, 7]
    before = session.tree
    session.drop(node)
    assert session.token_values(part, "v").values.tolist() == [9, 7, 3]
    assert session.token_values(shorter, "v").values.tolist() == [9, 7]
    assert session.spans(part, WEIGHT_VERSION) == ((0, 2, 1), (2, 3, 2))
    assert before.token_values(node, "v").values.tolist() == [9, 2, 3, 4, 5]
    session.drop(part)
    assert session.token_values(shorter, "v").values.tolist() == [9, 7]


def test_a_fork_at_a_prefix_has_what_the_whole_said() -> None:
    """The whole does not come along."""
    store = SessionStore.in_memory()
    session = store.create("s", scheme="text@hf5")
    node = session.append(session.root, [1, 2, 3, 4], annotations={"v": [1, 2, 3, 4]})
    deep = session.append(session.truncate(node, 2), [7], annotations={"v": [5]})
    fork = store.fork(session, deep, "f")
    assert node not in fork.tree
    assert fork.token_values(deep, "v").values.tolist() == [1, 2, 5]


def test_a_fork_says_things_of_its_own() -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme="text@hf5")
    node = session.append(session.root, [1, 2], annotations={"v": [1, 2], REWARD: 1.0})
    fork = store.fork(session, node, "f")
    fork.annotate(node, {REWARD: 2.0, "v": TokenValues([9], 1)})
    session.annotate(node, {ADVANTAGE: 3.0})
    assert fork.annotations(node)[REWARD] == 2.0 and session.annotations(node)[REWARD] == 1.0
    assert fork.token_values(node, "v").values.tolist() == [1, 9] and session.token_values(node, "v").values.tolist() == [1, 2]
    assert ADVANTAGE not in fork.annotations(node)
    again = store.fork(fork, node, "g")
    assert again.annotations(node) == fork.annotations(node)


def test_d37_delta_arrays_keep_the_rows_of_any_path() -> None:
    """Delta arrays with start offset per node; concat along any path has exactly the right rows; two weight versions inside one
    completion keep two spans."""
    store = SessionStore.in_memory()
    session = store.create("s", scheme="text@hf5")
    rng = np.random.default_rng(3)

    def experts(count: int) -> np.ndarray[Any, Any]:
        return rng.integers(0, 64, (count, 4, 2), dtype=np.uint8)

    prompt = session.append(session.root, range(10, 17))
    rows = experts(6)  # of the last sampled token there are none: it was never fed
    draft = session.draft(prompt)
    draft.extend(range(7))
    said: dict[str, Any] = {ROUTED_EXPERTS: TokenValues(rows), WEIGHT_VERSION: Spans([(0, 4, 7), (4, 7, 8)])}
    reply = draft.commit("length", annotations=said)
    tool = session.append(reply, [50, 51, 52], annotations={ROUTED_EXPERTS: TokenValues(late := experts(3))})
    session.annotate(reply, {ROUTED_EXPERTS: TokenValues(last := experts(1), 6)})  # it was fed by now
    window = session.token_values(tool, ROUTED_EXPERTS)
    assert window.values.shape == (17, 4, 2) and window.known.tolist() == [False] * 7 + [True] * 10
    assert window.values[7:].tobytes() == np.concatenate([rows, last, late]).tobytes()
    assert session.spans(tool, WEIGHT_VERSION) == ((7, 11, 7), (11, 14, 8))

    part = session.truncate(reply, 12)  # partial resume, in the middle of the annotated completion
    resumed = session.draft(part)
    resumed.extend([70, 71])
    more = experts(2)
    other = resumed.commit("stop", annotations={ROUTED_EXPERTS: more, WEIGHT_VERSION: Spans([(0, 2, 9)])})
    window = session.token_values(other, ROUTED_EXPERTS)
    assert window.values[7:].tobytes() == np.concatenate([rows[:5], more]).tobytes() and len(window.values) == 14
    assert session.spans(other, WEIGHT_VERSION) == ((7, 11, 7), (11, 12, 8), (12, 14, 9))
    assert session.spans(other, WEIGHT_VERSION, 9, 13) == ((9, 11, 7), (11, 12, 8), (12, 13, 9))

    fork = store.fork(session, other, "fork")
    deeper = fork.append(other, [1], annotations={ROUTED_EXPERTS: (end := experts(1))})
    window = fork.token_values(deeper, ROUTED_EXPERTS, 11, 15)
    assert window.values.tobytes() == np.concatenate([rows[4:5], more, end]).tobytes() and window.known.all()
    session.drop(reply)
    assert fork.token_values(other, ROUTED_EXPERTS).values.tobytes() == session.token_values(other, ROUTED_EXPERTS).values.tobytes()


def test_a_generation_and_what_is_said_of_it_are_one_step() -> None:
    session = text_session()
    found: list[bool] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            tree = session.tree
            found.extend(LOGPROBS in tree.annotations(leaf) for leaf in tree.leaves() if leaf.origin == "generated")

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for number in range(150):
            draft = session.draft(session.root)
            draft.extend([number])
            draft.commit(annotations={LOGPROBS: [-0.5]})
            session.record([number, 1], [2, 3], annotations={LOGPROBS: [-1.0, -2.0], REWARD: 1.0})
    finally:
        stop.set()
        watcher.join()
    assert found and all(found)
    assert all(LOGPROBS in session.annotations(node) for node in session.tree if node.origin == "generated")


def test_threads_that_annotate_one_node_lose_nothing() -> None:
    session = text_session()
    node = session.append(session.root, range(64))
    start = threading.Barrier(4)

    def say(which: int) -> None:
        start.wait()
        for number in range(100):
            at = (number * 4 + which) % 64
            session.annotate(node, {"v": TokenValues(np.array([at + 1], np.int32), at), f"of {which}": number})

    threads = [threading.Thread(target=say, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert session.token_values(node, "v").values.tolist() == list(range(1, 65))
    assert {name: value for name, value in session.annotations(node).items() if name != "v"} == {
        f"of {which}": 99 for which in range(4)
    }


def test_a_signal_handler_annotates_what_it_interrupts() -> None:
    session = text_session()
    node = session.append(session.root, range(8))
    handled = 0
    busy = False

    def handler() -> None:
        nonlocal handled, busy
        if not busy:
            busy = True
            handled += 1
            session.annotate(node, {"handler": handled, "v": TokenValues([handled], handled % 4)})
            busy = False

    with alarms(handler):
        for number in range(3_000):
            session.annotate(node, {"main": number, "v": TokenValues([number], 4 + number % 4)})
            assert session.annotations(node)["main"] == number
            assert session.token_values(node, "v").values[4 + number % 4] == number
    assert handled
    assert session.annotations(node)["handler"] == handled
    assert session.token_values(node, "v").values[handled % 4] == handled


ANNOTATING: Final[dict[str, Any]] = {
    "AnnotationLog.takes": AnnotationLog.takes,
    "SessionTree._annotated": SessionTree._annotated,
    "SessionTree._saying": SessionTree._saying,
    "Session._swap": Session._swap,
    "Session._turn": Session._turn,
    "Session._attach_with": Session._attach_with,
}


@pytest.mark.parametrize("what", ANNOTATING)
def test_an_interrupt_at_any_line_leaves_all_of_it_or_nothing(what: str) -> None:
    """Afterwards what is said anew is there, and old values say what they did."""
    lines = 0
    while True:
        session = text_session()
        node = session.append(session.root, [1, 2], annotations={"v": [1, 2], "s": 0})
        before, old = session.tree, seen(session, node)
        expected = [old, {"v": by_token(TokenValues([1, 5])), "s": (int, "1")}]
        with interrupted(lines, [ANNOTATING[what].__code__]) as hit:
            session.annotate(node, {"v": TokenValues([5], 1), "s": 1})
            draft = session.draft(node)
            draft.extend([7])
            draft.commit(annotations={"s": 2})
        assert seen(session, node) in expected, f"line {lines}"
        assert all(session.annotations(each) == {"s": 2} for each in session.children(node)), f"line {lines}"
        session.annotate(node, {"t": 3})
        session.annotate(node, {"v": TokenValues([8], 0)})
        assert session.annotations(node)["t"] == 3 and session.token_values(node, "v").values[0] == 8
        assert seen(before, node) == old
        if not hit:
            break
        lines += 1
    assert lines


def test_a_log_gives_back_what_it_took() -> None:
    """Layers over old values, which others share."""
    node, other = (bytes([number]) * 32 for number in (1, 2))
    log = AnnotationLog()
    assert log.takes(0, [Said(node, "a", 1), Said(other, "a", 2)])
    assert not log.takes(1, [Said(node, "a", 3)]), "there is more already"
    layer = AnnotationLog(log, 1)
    assert layer.takes(1, [Said(node, "b", 4)]) and layer.count == 2
    assert layer.since(2, log, 1) == [Said(node, "b", 4)]
    assert layer.since(2, None, 0) == [Said(node, "a", 1), Said(node, "b", 4)]
    assert list(layer.node_ids(2)) == [node, node] and list(layer.node_ids(1)) == [node]
    assert layer.named("a", 2) == {node: 1} and log.named("a", 2) == {node: 1, other: 2}
    assert layer.held_bytes() < log.held_bytes() + 1


def test_every_value_sees_what_was_said_by_then() -> None:
    """Of a node with one thing said and with many, by names that come again, in one log and in layers over old values."""
    session = text_session()
    nodes = [session.append(session.root, [number]) for number in range(3)]
    names = ("a", "b", "c")
    values, said = [session.tree], [{node.id: dict[str, int]() for node in nodes}]

    def add(value: SessionTree, at: int, node: Node, name: str, what: int) -> None:
        values.append(value)
        said.append({node_id: dict(known) for node_id, known in said[at].items()})
        said[-1][node.id][name] = what

    for what, (number, each) in enumerate([(0, 0), (1, 1), (0, 0), (0, 1), (1, 0), (0, 0), (1, 1), (2, 2)], 100):
        session.annotate(nodes[number], {names[each]: what})
        add(session.tree, -1, nodes[number], names[each], what)
    assert values[-1]._log is values[1]._log, "all of these in one"
    for at in range(len(said)):
        node, name = nodes[at % 2], names[at % 3]
        add(values[at].annotate(node, {name: 200 + at}), at, node, name, 200 + at)
        add(values[-1].annotate(nodes[2], {"c": 300 + at}), -1, nodes[2], "c", 300 + at)
    for value, known in zip(values, said, strict=True):
        for node in nodes:
            assert value.annotations(node) == known[node.id]
            assert value._read_said([node], "a")[0].keys() <= {"a"}
            assert [value.annotation(node, name) for name in names] == [known[node.id].get(name) for name in names]


def test_memory_counts_what_is_said() -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme="text@hf5")
    node = session.append(session.root, range(1000))
    before = store.usage().memory_bytes
    session.annotate(node, {"v": np.ones((1000, 16), np.float64)})
    assert 128_000 <= store.usage().memory_bytes - before <= 132_000
    session.drop(node)
    assert store.usage().memory_bytes < before


def test_messages_name_the_thing_and_the_limit() -> None:
    session = text_session()
    node = session.append(session.root, [1, 2])
    with pytest.raises(OutOfRange, match=r"'v' of .*goes to token 3 of 2") as error:
        session.annotate(node, {"v": TokenValues([1], 2)})
    assert (error.value.value, error.value.limit) == (3, 2)
    assert repr(TokenValues(np.ones((2, 3), np.float16), 1)) == "<TokenValues float16 (3,) of [1, 3)>"
    assert repr(Ragged.of([[1], [2]])) == "<Ragged of [0, 2)>"
    assert TokenValues([1.0], 1) != TokenValues([1], 1)
    assert TokenValues([1.0]) != 1


def test_a_draft_that_is_aborted_says_nothing() -> None:
    session = text_session()
    draft = session.draft(session.root)
    draft.extend([1])
    draft.abort()
    with pytest.raises(SessionTreeError):
        draft.commit(annotations={"a": 1})
    assert session.tree._said == 0
