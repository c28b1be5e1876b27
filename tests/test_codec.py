"""Records: what goes in comes out with its exact types, in one encoding; whatever is damaged or hostile is a typed error.

Expectations are taken from nodes, as plain values with their types (see `exact`), before they are encoded.
"""

from __future__ import annotations

import importlib
import itertools
import os
import random
import struct
import sys
import time
import tracemalloc
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any, Final

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyrsistent import PMap

from sessiontree import CorruptTree, ExternalPositions, IncompatibleStore, MediaItem, Node, OutOfRange, Session, SessionStore, codec
from sessiontree.codec import (
    NONE,
    AliasRecord,
    DropRecord,
    Entry,
    HeadRecord,
    NodeRecord,
    OpenedRecord,
    PinRecord,
    Record,
    SessionRecord,
    check_digest,
    check_positions,
    check_root,
    check_runs,
    decode,
    digest_of_key,
    encode,
    encode_node,
    entry_of,
    heads_of,
    key_digest,
    name_digest,
    renumbered,
    text_turn,
)
from sessiontree.details import Details
from sessiontree.digest import content_prefix, node_id
from sessiontree.errors import LimitExceeded, Unsupported
from sessiontree.frozen import MAX_DEPTH, freeze_metadata
from sessiontree.index import Limits
from sessiontree.node import Namespace
from sessiontree.positions import PositionScheme, PositionState, known_schemes, scheme
from sessiontree.positions.runs import (
    AbsoluteRun,
    CanvasRun,
    ExternalRun,
    FloatTextRun,
    FrameRun,
    GridRun,
    Run,
    TableRun,
    TextRun,
    is_external,
    packed,
)
from sessiontree.turns import Turn
from tests import histories, toy
from tests.test_pickling import METADATA, sample
from tests.test_tree import text_tree

SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"
MUTATIONS: Final = 1_000_000 if SOAK else 20_000
HEAD_BYTES: Final = 61
TEXT: Final = scheme("text@hf5")
KEY, ORIGIN, ROLE, TOKENS, RUNS, STATE, REPLAYED, MEDIA, DETAILS = range(9)


def exact(value: Any) -> Any:
    """A value with the types of all that is in it; NaN equals itself, 0.0 is not -0.0."""
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), repr(value.dtype.fields), value.shape, value.tobytes(), value.flags.writeable
    if isinstance(value, MediaItem):
        return "item", exact(value.fields()), exact(value._extra)
    if isinstance(value, PMap):
        return "map", sorted((repr(exact(key)), exact(entry)) for key, entry in value.items())
    if isinstance(value, frozenset):
        return "set", sorted(repr(exact(entry)) for entry in value)
    if isinstance(value, tuple):
        return "tuple", [exact(entry) for entry in value]  # what is carried comes back in plain ones
    return type(value).__name__, repr(value)


def record_of(session: int, ordinal: int, parent: int, node: Node) -> NodeRecord:
    assert node.role is not None
    details = node._details._replace(open_calls=Details().open_calls)
    content = (node.token_ids.tobytes(), node.media, node.origin, node.role, node.key, node.runs, node.state, node.replayed)
    return NodeRecord(session, ordinal, parent, node.id, *content, details)


def check_node(node: Node, parent_ordinal: int = 0, ordinal: int = 1) -> bytes:
    """Through the codec and back."""
    expected = record_of(7, ordinal, parent_ordinal, node)
    data = encode_node(7, ordinal, parent_ordinal, node)
    made = decode(data)
    assert isinstance(made, NodeRecord)
    assert exact(made) == exact(expected)
    assert type(made.state) is PositionState
    assert type(made.details) is Details
    assert encode(made) == encode(expected) == data
    assert entry_of(data) == Entry(codec.NODE, 7, ordinal, parent_ordinal, node.id, key_digest(node.key))
    assert node.parent is not None
    check_digest(made, node.parent.id)
    check_positions(made, node.start, node.scheme)
    return data


def check_tree(nodes: list[Node]) -> list[bytes]:
    ordinals = {node.id: ordinal for ordinal, node in enumerate(nodes)}
    return [check_node(node, ordinals[node.parent.id], ordinals[node.id]) for node in nodes if node.parent is not None]


def grown(history: histories.History, rule: str, cuts: list[int] | None = None) -> list[Node]:
    """A golden history under a rule, in turns."""
    tree = SessionStore.in_memory().create("s", scheme=scheme(f"{history.family}@{rule}", **history.params))
    node = tree.root
    for turn in histories.without_leading_empties(histories.split(history, history.cuts if cuts is None else cuts)):
        node = tree.append(node, turn.tokens, media=turn.media)
    if "glm_image" not in history.family and not node.state.open_blocks:
        with tree.draft(node) as draft:
            draft.extend([1, 2, 3])
            node = draft.commit("stop")
        tree.append(node, [5, 6])
    return list(tree.tree)


@cache
def samples() -> tuple[bytes, ...]:
    """Records of every kind, the corpus that is damaged below."""
    records: list[bytes] = []
    for rule in ("hf5", "sglang"):
        records += check_tree(list(sample(rule).tree))
    for family in histories.GOLDEN_FAMILIES:
        history = min((history for history, _ in histories.cases(family, "hf5") if history.items), key=lambda one: len(one.tokens))
        records += check_tree(grown(history, "hf5"))
    records += [encode(record) for record in RECORDS]
    return tuple(data for data in dict.fromkeys(records) if len(data) < 20_000)


def session_record(session: Session, tip: tuple[int, int] | None = None) -> SessionRecord:
    root = session.root
    params = tuple(sorted(root.scheme.params.items()))
    constants = (root.scheme.name, params, root.namespace, root.model_fingerprint)
    return SessionRecord(3, "sitzung ✓", *constants, session.tree.limits, root.id, tip)


RECORDS: Final[tuple[Record, ...]] = (
    session_record(sample()),
    session_record(toy.new_session(toy.toy_scheme("hf5", tokens_per_second=2.5)), (2, 17)),
    session_record(SessionStore.in_memory().create("s", scheme="text@hf5", max_tokens=2**40)),
    HeadRecord(1, "main", 12, 3),
    HeadRecord(NONE - 1, "häd", None, 2**40),
    HeadRecord(1, "", 0, 0),
    OpenedRecord(5, 1),
    OpenedRecord(0, 2**60),
    AliasRecord(Namespace("salt", None, "tenant"), "cat.png", bytes(range(32))),
    AliasRecord(Namespace(), "", None),
    PinRecord(3, 0, bytes(range(32)), True),
    PinRecord(2**32 - 2, 2**32 - 2, bytes(32), False),
    DropRecord(3, (0,)),
    DropRecord(0, (1, 5, 2**32 - 2)),
)


# --- there and back ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_every_kind_there_and_back(record: Record) -> None:
    made = decode(encode(record))
    assert type(made) is type(record)
    assert exact(made) == exact(record)
    assert encode(made) == encode(record)
    for one, other in zip(made, record, strict=True):
        assert type(one) is type(other)
    if isinstance(made, SessionRecord):
        check_root(made)
        with pytest.raises(CorruptTree, match="root"):
            check_root(made._replace(model_fingerprint="other"))


@pytest.mark.parametrize("rule", ["hf5", "sglang"])
def test_a_session_in_which_everything_occurs(rule: str) -> None:
    nodes = list(sample(rule).tree)
    check_tree(nodes)
    assert any(node.replayed is not None for node in nodes) == (rule == "hf5")
    assert any(is_external(node.runs) for node in nodes)
    assert any(node.state.open_blocks for node in nodes)
    assert any(item.extra for node in nodes for item in node.media)


@pytest.mark.parametrize("name", known_schemes())
def test_every_family_under_every_rule(name: str) -> None:
    """As the vectors cut them, and cut anywhere, so that blocks are open and canvases are carried."""
    family, _, rule = name.partition("@")
    rng = random.Random(name)
    seen = 0
    for history, _ in itertools.islice(histories.cases(family, rule), 40):
        if len(history.tokens) > 20_000 or (history.has_audio_in_video and rule != "hf5"):
            continue
        for cuts in (list(history.cuts), histories.random_cuts(rng, history), histories.random_cuts(rng, history)):
            check_tree(grown(history, rule, cuts))
            seen += 1
    assert seen


@given(toy.histories(), st.sampled_from(["hf5", "sglang", "vllm"]))
@settings(max_examples=100, deadline=None)
def test_any_session(segments: Any, rule: str) -> None:
    session = toy.new_session(toy.toy_scheme(rule))
    toy.grow(session, session.root, *segments)
    check_tree(list(session.tree))


def test_forks_and_cuts_whose_tokens_lie_elsewhere() -> None:
    """In extents of their parents, in several, in none."""
    session = toy.new_session()
    first = session.append(session.root, range(100))
    second = session.append(first, range(50))
    other = session.append(first, range(7))
    cut = session.truncate(second, 120)
    deeper = session.append(session.append(cut, []), [1])
    fork = SessionStore.in_memory().fork(session, other, "fork")
    grown_on = fork.append(fork.root, [3]), fork.append(other, [1, 2])
    for node in (first, second, other, cut, deeper, *grown_on):
        assert check_node(node)


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
    | st.binary(max_size=5)
)
arrays = st.sampled_from([value for value in METADATA.values() if isinstance(value, np.ndarray)])
hashable: st.SearchStrategy[Any] = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)
keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=3) | st.integers(-(2**63), 2**64 - 1)
values = st.recursive(
    scalars | arrays | st.frozensets(hashable, max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)
metadatas = st.dictionaries(keys, values, max_size=5)


def noted(metadata: Any) -> NodeRecord:
    _, node = text_tree().append(text_tree().root, [1], metadata=metadata)
    return record_of(1, 1, 0, node)


@given(metadatas)
@settings(max_examples=300, deadline=None)
def test_any_metadata(metadata: dict[Any, Any]) -> None:
    record = noted(metadata)
    made = decode(encode(record))
    assert exact(made) == exact(record)


@given(metadatas, st.randoms())
@settings(max_examples=100, deadline=None)
def test_equal_metadata_have_equal_bytes(metadata: dict[Any, Any], rng: random.Random) -> None:
    entries = list(metadata.items())
    rng.shuffle(entries)
    assert encode(noted(dict(entries))) == encode(noted(metadata))


def test_the_order_of_a_set_does_not_show() -> None:
    words = [f"w{number}" for number in range(50)]
    one, other = frozenset(words), frozenset(reversed(words))
    assert encode(noted({"set": one, "in": [{1: 2, "a": other}]})) == encode(noted({"in": [{"a": one, 1: 2}], "set": other}))
    plain = [(1,), {1}, {0: 1}, [1.0], [True], ["1"], [b"1"], [[1]], [np.array(1)], [np.array([1])], [-0.0], [0.0], [0], [None]]
    assert len({encode(noted({"x": value})) for value in plain}) == len(plain)


OVERLAPPING: Final = np.dtype({"names": ["a", "b"], "formats": ["<i4", "<i2"], "offsets": [0, 2], "itemsize": 8})
DTYPES: Final = [
    "?", "i1", "u1", "i2", "u8", "f2", "f4", "f8", "g", "F", "D", "U3", "S2", "S0", "V5", "M8", "M8[ns]", "m8[25s]", "M8[D]",
    [("x", "i4"), ("y", "f8", (2, 3))], [(("title", "x"), "U2"), ("inner", [("z", "u1")])], np.dtype("u1,f8", align=True),
    OVERLAPPING, [],
]  # fmt: skip


@pytest.mark.parametrize("kind", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)], ids=str)
def test_arrays_of_every_type(kind: Any, shape: tuple[int, ...]) -> None:
    dtype = np.dtype(kind)
    data = bytes(range(2)) * (dtype.itemsize * 3 + 1)
    array = np.ndarray(shape, dtype, data * 2) if dtype.kind not in "U" else np.zeros(shape, dtype)
    record = noted({"a": array})
    made = decode(encode(record))
    assert isinstance(made, NodeRecord)
    back = made.details.metadata["a"]
    assert back.dtype == record.details.metadata["a"].dtype
    assert exact(made) == exact(record)
    with pytest.raises(ValueError, match="WRITEABLE"):
        back.setflags(write=True)


def test_arrays_of_types_from_elsewhere_are_refused_before_they_are_stored() -> None:
    rational: Any = importlib.import_module("numpy._core._rational_tests").rational
    with pytest.raises(Unsupported, match="from elsewhere"):
        encode(noted({"a": np.zeros(2, rational)}))
    with pytest.raises(Unsupported, match="title"):
        encode(noted({"a": np.zeros(1, [((7, "x"), "i4")])}))


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_as_deep_as_metadata_go() -> None:
    deepest = {"x": nested(MAX_DEPTH - 1)}
    with pytest.raises(LimitExceeded):
        freeze_metadata({"x": nested(MAX_DEPTH)})
    record = noted(deepest)
    assert exact(decode(encode(record))) == exact(record)


def test_numbers_that_no_record_holds() -> None:
    _, node = text_tree().append(text_tree().root, [1])
    for session, ordinal, parent in ((-1, 1, 0), (2**32, 1, 0), (0, NONE, 0), (0, 1, 1), (0, 0, 0), (0, 1, -1)):
        with pytest.raises(OutOfRange):
            encode_node(session, ordinal, parent, node)
    with pytest.raises(OutOfRange):
        encode(HeadRecord(1, "x", NONE, 1))
    with pytest.raises(OutOfRange):
        encode(OpenedRecord(1, 2**64))
    for ordinals in ((), (2, 2), (3, 1), (-1,), (2**32 - 1,)):
        with pytest.raises(OutOfRange):
            encode(DropRecord(1, ordinals))
    with pytest.raises(OutOfRange):
        encode(PinRecord(1, 2**32 - 1, bytes(32), True))
    with pytest.raises(TypeError, match="no record"):
        encode(Limits())  # type: ignore[arg-type]


# --- the format --------------------------------------------------------------------------------------------------------------

GOLDEN: Final = {
    "text": (
        "980201ce00000001ce00000001ce00000000c4206f8d700fad84f05b2fc9452785a2331b5cfcfb91cf2feffc18e2747ee7a2fc1ccf0000"
        "00000000000099c000a475736572c40c01000000020000000300000000950303029090c090c0"
    ),
    "image": (
        "980201ce00000001ce00000002ce00000001c420f47680091075a7132ab37002fb295f2fda7a6c33dd9dcce21530d1165aa30f9ecff650"
        "28a929c3548299a16b00a475736572c424010000000200000064000000650000006500000065000000650000006900000003000000c412"
        "939300030398020406060002020093000208950c0a099090c09199a5696d616765c42037f53e7c0957de38c31a547a56acc27fb36d808a"
        "47946e20f0a8ba618d49a93a9192030493010404c0c09000c2c0"
    ),
    "details": (
        "980201ce00000001ce00000003ce00000001c42067b45c35e57f06b6ebb8dfee26364a90d05cb2805505a3177e4ceae16ce0f2f0cf0000"
        "00000000000099c000a475736572c4040900000003950404039090c090949502a16194009403a33c69329102c40401000200930207c0c3"
        "a1629301a178cb3ff8000000000000c0c090"
    ),
    "session": (
        "980101ce00000001ce00000000ce00000000c420043a718774c572bd8a25adbeb1bfcd5c0256ae11cecf9f9c3f925d0e52beaf89cf0000"
        "00000000000098a173a874657874406866359192b26d61785f706f736974696f6e5f6c696d69740993c0c0c0a0920a01c4200000000000"
        "000000000000000000000000000000000000000000000000000000920004"
    ),
    "head": (
        "980301ce00000001ce00000002ce00000000c4200d6e4079e36703ebd37c00722f5891d28b0e2811dc114b129215123adcce3605cf0000"
        "00000000000092a46d61696e03"
    ),
    "dropped": (
        "980301ce00000001ceffffffffce00000000c4200d6e4079e36703ebd37c00722f5891d28b0e2811dc114b129215123adcce3605cf0000"
        "00000000000092a46d61696e04"
    ),
    "opened": (
        "980401ce00000001ce00000000ce00000000c4200000000000000000000000000000000000000000000000000000000000000000cf0000"
        "0000000000009102"
    ),
    "alias": (
        "980501ceffffffffce00000000ce00000000c420e5a47f294c482af637850e382e19e47154266a3d6fd711659a793912ba3572a2cf0000"
        "0000000000009393c0a16cc0a161c4200000000000000000000000000000000000000000000000000000000000000000"
    ),
}


def golden_records() -> dict[str, bytes]:
    tree = toy.new_session().tree
    tree, text = tree.append(tree.root, [1, 2, 3])
    tree, image = tree.append(text, toy.A_IDS, media=toy.media(toy.a_turn()), key="k")
    tree, details = tree.append(text, [9], metadata={"b": {1.5, "x"}, "a": [np.array([1, 2], "<i2"), {7: None}, True]})
    return {
        "text": encode_node(1, 1, 0, text),
        "image": encode_node(1, 2, 1, image),
        "details": encode_node(1, 3, 1, details),
        "session": encode(
            SessionRecord(1, "s", "text@hf5", (("max_position_limit", 9),), Namespace(), "", Limits(10, 1), bytes(32), (0, 4))
        ),
        "head": encode(HeadRecord(1, "main", 2, 3)),
        "dropped": encode(HeadRecord(1, "main", None, 4)),
        "opened": encode(OpenedRecord(1, 2)),
        "alias": encode(AliasRecord(Namespace(None, "l"), "a", bytes(32))),
    }


@pytest.mark.parametrize("name", GOLDEN)
def test_the_format_stays(name: str) -> None:
    """Stores hold these bytes: whoever changes them raises FORMAT_VERSION and goes on reading version 1."""
    assert codec.FORMAT_VERSION == 1
    assert golden_records()[name].hex() == GOLDEN[name]
    decode(bytes.fromhex(GOLDEN[name]))


def test_a_record_is_one_msgpack_array_that_begins_with_its_entry() -> None:
    for data in samples():
        kind, version, session, ordinal, parent, identity, key, body = msgpack.unpackb(data, strict_map_key=False)
        assert version == 1
        assert entry_of(data) == (kind, session, ordinal, parent, identity, key)
        assert data[HEAD_BYTES:] == msgpack.packb(body)
        assert entry_of(data[:HEAD_BYTES]) == entry_of(data)


def test_entries() -> None:
    assert entry_of(encode(HeadRecord(1, "main", None, 4))) == (codec.HEAD, 1, NONE, 0, name_digest("main"), 0)
    assert entry_of(encode(HeadRecord(1, "main", 2, 4))) == (codec.HEAD, 1, 2, 0, name_digest("main"), 0)
    assert entry_of(encode(OpenedRecord(6, 4))) == (codec.OPENED, 6, 0, 0, bytes(32), 0)
    assert entry_of(encode(RECORDS[0])) == (codec.SESSION, 3, 0, 0, name_digest("sitzung ✓"), 0)
    alias = AliasRecord(Namespace("a"), "x", None)
    assert entry_of(encode(alias)) == (codec.ALIAS, NONE, 0, 0, codec.alias_digest(Namespace("a"), "x"), 0)
    assert (
        len({codec.alias_digest(*given) for given in ((Namespace("a"), "x"), (Namespace(None, "a"), "x"), (Namespace("a"), ""))})
        == 3
    )
    assert key_digest(None) == 0 != key_digest("")


def test_sizes() -> None:
    tree = toy.new_session().tree
    tree, long = tree.append(tree.root, range(1000))
    tree, short = tree.append(long, range(16), key="session/1/2")
    item = MediaItem("image", bytes(range(32)), [(5, 200)], (1, 20, 40))
    tree, shown = tree.append(long, range(1000), media=[item])
    assert len(encode_node(1, 2, 0, long)) <= 4_000 + 100
    assert len(encode_node(1, 2, 0, short)) <= 64 + 100
    assert len(encode_node(1, 2, 0, shown)) <= 4_000 + 180


# --- where records stand -----------------------------------------------------------------------------------------------------


def test_digests_and_positions_are_checked() -> None:
    session = sample()
    nodes = [node for node in session.tree if node.parent is not None]
    for node in nodes:
        assert node.parent is not None
        record = record_of(1, 1, 0, node)
        with pytest.raises(CorruptTree, match="holds the content of"):
            check_digest(record, bytes(32))
        for changed in (
            record._replace(data=record.data + bytes(4)),
            record._replace(role="x"),
            record._replace(key="x"),
            record._replace(origin="input" if record.origin == "generated" else "generated"),
            record._replace(media=(*record.media, MediaItem("image", bytes(32), [(0, 1)]))),
        ):
            with pytest.raises(CorruptTree, match="holds the content of"):
                check_digest(changed, node.parent.id)
        with pytest.raises(CorruptTree, match="state of"):
            check_positions(record, node.start + 1, node.scheme)
        with pytest.raises(CorruptTree, match="no such numbers"):
            check_positions(record._replace(state=record.state._replace(next_position=1.0)), node.start, node.scheme)
    [table, *_] = [node for node in nodes if is_external(node.runs)]
    assert table.parent is not None
    with pytest.raises(CorruptTree, match="holds the content of"):
        check_digest(record_of(1, 1, 0, table)._replace(state=table.state._replace(max_position=71)), table.parent.id)


def test_what_is_carried_fits_the_family() -> None:
    for family in ("qwen2_5_omni", "qwen3_omni", "hunyuan_vl", "minicpmv4_7"):
        history = histories.vectors(family)[0]
        nodes = grown(history, "hf5")
        for node in nodes[1:]:
            record = record_of(1, 1, 0, node)
            for carried in (
                (1, 2, 3, 4),
                (None,) * len(node.state.carried or (1,)),
                (*node.state.carried, 0),
                (-1, *node.state.carried[1:]),
            ):
                with pytest.raises(CorruptTree, match="carries"):
                    check_positions(record._replace(state=node.state._replace(carried=carried)), node.start, node.scheme)


GOOD_RUNS: Final[list[tuple[int, int, list[Run]]]] = [
    (3, 9, [TextRun(5, 2), GridRun(4, 7, 7, 1, 2, 2, 0)]),
    (3, 7, [FloatTextRun(3, -1.5, 0), FrameRun(4, 1.0, np.arange(3, dtype="<f4").tobytes(), 1, 2, 1)]),
    (3, 6, [FrameRun(6, 1, np.arange(3, dtype="<i8").tobytes(), 2, 1, 0)]),
    (4, 6, [AbsoluteRun(6, 0, 3, 0, 1)]),
    (3, 10, [CanvasRun(10, 3, np.array([(1, 2, 2), (6, 1, 3)], "<i4").tobytes())]),
    (3, 2, [TableRun(1, "<i8", bytes(24)), TextRun(1, 1)]),
    (1, 2, [ExternalRun(2, "<f4", bytes(8))]),
    (1, 0, []),
]


@pytest.mark.parametrize(("axes", "count", "runs"), GOOD_RUNS)
def test_runs_that_cover(axes: int, count: int, runs: list[Run]) -> None:
    made = packed(runs)
    for given_axes in (axes, None):
        check_runs(made, count, given_axes)
        for other in (count + 1, count - 1):
            with pytest.raises(CorruptTree, match=r"tokens in a node of|bytes for"):
                check_runs(made, other, given_axes)
    for run in runs:
        if type(run) not in (TextRun, FloatTextRun, AbsoluteRun):
            with pytest.raises(CorruptTree, match=r"axes|bytes for"):
                check_runs(made, count, 2)


BAD_RUNS: Final[dict[str, tuple[int, Any]]] = {
    "a float": (1, 1.0),
    "a bool": (1, True),
    "too far": (1, 2**60),
    "no array": (0, msgpack.packb(1)),
    "no runs": (1, msgpack.packb([1])),
    "of no kind": (1, msgpack.packb([[8, 1, 1]])),
    "of a kind below": (1, msgpack.packb([[-1, 1, 1]])),
    "of a bool": (1, msgpack.packb([[False, 1, 1]])),
    "a field less": (1, msgpack.packb([[0, 1]])),
    "a field more": (1, msgpack.packb([[0, 1, 1, 1]])),
    "less than no tokens": (1, msgpack.packb([[0, 2, 0], [0, -1, 0]])),
    "text too far": (1, msgpack.packb([[0, 1, 2**54]])),
    "text at NaN": (1, packed([FloatTextRun(1, float("nan"), 0)])),
    "text before it": (1, packed([FloatTextRun(1, 1.0, -1)])),
    "no height": (4, packed([GridRun(4, 0, 0, 0, 0, 2, 0)])),
    "a skip of a frame": (4, packed([GridRun(4, 0, 0, 0, 2, 2, 4)])),
    "a frame less": (4, packed([FrameRun(4, 0, bytes(8), 1, 2, 0)])),
    "a frame more": (4, packed([FrameRun(4, 0, bytes(24), 1, 2, 0)])),
    "times of another number": (4, packed([FrameRun(4, 0.0, bytes(16), 1, 2, 0)])),
    "times of NaN": (1, packed([FrameRun(1, 0.0, np.array([np.nan], "<f4").tobytes(), 1, 1, 0)])),
    "rows of nothing": (4, packed([AbsoluteRun(4, 0, 0, 0, 0)])),
    "half a crop": (9, packed([CanvasRun(9, 0, bytes(6))])),
    "a crop at the marker": (9, packed([CanvasRun(9, 0, np.array([0, 1, 1], "<i4").tobytes())])),
    "a crop too large": (9, packed([CanvasRun(9, 0, np.array([1, 3, 3], "<i4").tobytes())])),
    "crops over one another": (9, packed([CanvasRun(9, 0, np.array([1, 2, 2, 4, 1, 1], "<i4").tobytes())])),
    "a table of objects": (1, packed([TableRun(1, "|O", bytes(8))])),
    "a table of too little": (2, packed([TableRun(2, "<i8", bytes(8))])),
    "a table of nothing": (1, packed([TableRun(1, "<i8", b"")])),
    "a table below 0": (1, packed([TableRun(1, "<i8", b"\xff" * 8)])),
    "two tables from elsewhere": (2, packed([ExternalRun(1, "<i8", bytes(8))] * 2)),
    "an extension": (1, b"\xd4\x05\x00"),
    "a map": (0, b"\x80"),
    "something behind": (0, b"\x90\x90"),
    "nothing": (0, b""),
}


@pytest.mark.parametrize("name", BAD_RUNS)
def test_runs_that_do_not(name: str) -> None:
    count, runs = BAD_RUNS[name]
    with pytest.raises(CorruptTree):
        check_runs(runs, count)


# --- damage ------------------------------------------------------------------------------------------------------------------


def refused(data: bytes) -> bool:
    """Whether a record is refused, as it must be if it is not right: nothing but encode() makes what decode() takes."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            record = decode(data)
        except (CorruptTree, IncompatibleStore) as error:
            assert 10 < len(str(error)) < 600
            assert not str(error).endswith(": ")
            return True
    assert encode(record) == data
    return False


def head_of(data: bytes) -> bytes:
    """What an index that was made of a record says it begins with."""
    entry = entry_of(data)
    kinds = [("kind", "u1"), ("session", "<u4"), ("ordinal", "<u4"), ("parent", "<u4"), ("id", "V32"), ("key", "<u8")]
    (head,) = heads_of(np.array([(*entry[:4], np.void(entry.id), entry.key)], kinds))
    assert len(head) == HEAD_BYTES
    return head


def short_way(data: bytes, parent_id: bytes, start: int) -> bool:
    """Whether a record is read the short way, which reads what the long way reads and lets nothing pass that it does not."""
    try:
        head = head_of(data)
    except (CorruptTree, IncompatibleStore):
        return False
    read = text_turn(data, head, parent_id, start)
    if read is None:
        return False
    turn, details = read
    record = decode(data)
    assert isinstance(record, NodeRecord) and data.startswith(head)
    check_digest(record, parent_id)
    check_positions(record, start, TEXT)
    assert (type(turn), type(turn.state), type(details)) == (Turn, PositionState, Details)
    assert exact((turn._replace(data=bytes(turn.data)), details)) == exact((record.turn, record.details))
    return True


def signed(data: bytes, parent_id: bytes) -> bytes:
    """A record that has the id of its content, so that nothing but what else is wrong with it can be found."""
    with suppress(Exception):
        key, by, role, tokens, *_ = msgpack.unpackb(data[HEAD_BYTES:])
        identity = node_id(parent_id, content_prefix(("input", "generated")[by], role, key), tokens)
        digest = digest_of_key(key) if key is not None else 0
        return data[:20] + identity + data[52:53] + struct.pack(">Q", digest) + data[HEAD_BYTES:]
    return data


def test_most_nodes_of_text_are_read_the_short_way() -> None:
    session = SessionStore.in_memory().create("s", scheme=TEXT)
    node, plain = session.root, []
    for count in (1, 20, 63, 64, 1000, 16_000):
        for key in (None, "", f"key ä {count}"):
            node = session.append(node, np.full(count, 2**31 - 1), role="ü" if key else "user", key=key)
            plain.append(node)
        for reason in ("stop", "length", "tool_calls"):
            with session.draft(node) as draft:
                draft.extend(range(count))
                node = draft.commit(reason)
            plain.append(node)
    plain.append(session.append(node, []))
    assert plain[-1].state.next_position > 2**16
    for at, one in enumerate(plain, 1):
        assert one.parent is not None
        data = encode_node(7, at, at - 1, one)
        assert short_way(data, one.parent.id, one.start)
        for cut in (0, HEAD_BYTES, HEAD_BYTES + 3, len(data) - 1):
            assert text_turn(data[:cut], head_of(data), one.parent.id, one.start) is None
        for wrong in (
            (data + b"\xc0", one.parent.id, one.start),
            (data, bytes(32), one.start),
            (data, one.parent.id, one.start + 1),
        ):
            assert text_turn(wrong[0], head_of(data), *wrong[1:]) is None
        unlike = data[:53] + struct.pack(">Q", 5) + data[HEAD_BYTES:]  # another key's digest
        assert text_turn(unlike, head_of(unlike), one.parent.id, one.start) is None
        other = renumbered(data, 7, at + 1, at)
        assert text_turn(other, head_of(data), one.parent.id, one.start) is None
    noted, ended = session.append(node, [1], metadata={"a": 1}), session.append(node, bytes(4 * 2**16))
    for one in (noted, ended):
        assert text_turn(encode_node(7, 2, 1, one), head_of(encode_node(7, 2, 1, one)), node.id, one.start) is None


#: Of a record of text, by what a field is replaced, as bytes of msgpack; all but the first have the digest of what they hold.
LAX: Final[dict[str, tuple[int, bytes]]] = {
    "another role": (ROLE, b"\xa4USER"),
    "a role of bytes": (ROLE, b"\xc4\x04user"),
    "a role in another length": (ROLE, b"\xd9\x04user"),
    "a role of a number": (ROLE, b"\x05"),
    "an origin of bool": (ORIGIN, b"\xc2"),
    "an origin below": (ORIGIN, b"\xff"),
    "an origin of no kind": (ORIGIN, b"\x02"),
    "an origin of float": (ORIGIN, b"\xcb" + bytes(8)),
    "an origin in another length": (ORIGIN, b"\xcc\0"),
    "a key of bytes": (KEY, b"\xc4\x01k"),
    "a key in another length": (KEY, b"\xd9\x01k"),
    "tokens of text": (TOKENS, b"\xa8" + bytes(8)),
    "tokens below 0": (TOKENS, b"\xc4\x08" + b"\0\0\0\x80" * 2),
    "the last token below 0": (TOKENS, b"\xc4\x08" + bytes(7) + b"\xff"),
    "half a token": (TOKENS, b"\xc4\x09" + bytes(9)),
    "tokens in another length": (TOKENS, b"\xc5\0\x08" + bytes(8)),
    "a base of bool": (RUNS, b"\xc3"),
    "a base of float": (RUNS, b"\xcb" + bytes(8)),
    "a base of 32-bit float": (RUNS, b"\xca" + bytes(4)),
    "a base too far": (RUNS, b"\xcf\0\x40" + bytes(6)),
    "a base too far below": (RUNS, b"\xd3\x80" + bytes(7)),
    "a base in another length": (RUNS, b"\xcc\0"),
    "a base in the same length": (RUNS, b"\xd1\x01\0"),
    "runs of bytes": (RUNS, b"\xc4\x01\x90"),
    "a state of 4": (STATE, b"\x94\x02\x02\x01\x90"),
    "a state of 6": (STATE, b"\x96\x02\x02\x01\x90\x90\x90"),
    "a count of float": (STATE, b"\x95\xcb\x40" + bytes(7) + b"\x02\x01\x90\x90"),
    "a count of others": (STATE, b"\x95\x03\x02\x01\x90\x90"),
    "a count in another length": (STATE, b"\x95\xcc\x02\x02\x01\x90\x90"),
    "a position of float": (STATE, b"\x95\x02\xcb\x40" + bytes(7) + b"\x01\x90\x90"),
    "a position of bool": (STATE, b"\x95\x02\xc3\0\x90\x90"),
    "a greatest position of bool": (STATE, b"\x95\x02\x02\xc3\x90\x90"),
    "a greatest position past the next": (STATE, b"\x95\x02\x02\x02\x90\x90"),
    "a greatest position below": (STATE, b"\x95\x02\x02\xfe\x90\x90"),
    "a position too far": (STATE, b"\x95\x02\xcf\0\x40" + bytes(6) + b"\x01\x90\x90"),
    "an open block": (STATE, b"\x95\x02\x02\x01\x91\xc0\x90"),
    "carrying a number": (STATE, b"\x95\x02\x02\x01\x90\x91\x01"),
    "carrying in another length": (STATE, b"\x95\x02\x02\x01\x90\xdc\0\0"),
    "replayed otherwise": (REPLAYED, b"\x92\0\x95\x02\x03\x02\x90\x90"),
    "replayed as false": (REPLAYED, b"\xc2"),
    "media of nothing": (MEDIA, b"\xc0"),
    "media of an item": (MEDIA, b"\x91\xc0"),
    "details of nothing": (DETAILS, b"\x94\xc0\xc0\xc0\x90"),
    "details as false": (DETAILS, b"\xc2"),
    "another reason": (DETAILS, b"\x94\xc0\xa5other\xa4keep\x90"),
    "a reason of bytes": (DETAILS, b"\x94\xc0\xc4\x04stop\xa4keep\x90"),
    "a reason in another length": (DETAILS, b"\x94\xc0\xd9\x04stop\xa4keep\x90"),
    "something behind": (DETAILS, b"\xc0\xc0"),
}


def text_fields() -> tuple[bytes, list[bytes], bytes]:
    """The head of a record of text, the fields of its body as bytes of msgpack, and the id of its parent."""
    session = SessionStore.in_memory().create("s", scheme=TEXT)
    data = encode_node(1, 1, 0, session.append(session.root, [0, 0]))
    return data[:HEAD_BYTES], [msgpack.packb(field) for field in msgpack.unpackb(data[HEAD_BYTES:])], session.root.id


@pytest.mark.parametrize("name", LAX)
def test_the_short_way_is_as_strict(name: str) -> None:
    head, fields, root = text_fields()
    assert signed(head[:20] + bytes(41) + b"\x99" + b"".join(fields), root)[20:52] == head[20:52]
    assert short_way(head + b"\x99" + b"".join(fields), root, 0)
    number, value = LAX[name]
    for count in (b"\x99", b"\xdc\0\x09"):
        changed = [value if at == number else field for at, field in enumerate(fields)]
        data = head + count + b"".join(changed)
        for _ in range(2):  # what was seen before is kept
            assert not short_way(data, root, 0) or name == "another reason"
            assert not short_way(signed(data, root), root, 0) or (name == "another role" and count == b"\x99")
        assert short_way(head + b"\x99" + b"".join(fields), root, 0)
    assert not short_way(head + b"\x98" + b"".join(fields[:-1]), root, 0)
    assert not short_way(head + b"\x9a" + b"".join([*fields, b"\xc0"]), root, 0)
    for session, ordinal, parent in ((NONE, 1, 0), (1, 1, 1), (1, 1, 2), (1, NONE, 0)):
        assert not short_way(renumbered(head + b"\x99" + b"".join(fields), session, ordinal, parent), root, 0)


def test_mutated_records_the_short_way() -> None:
    """As above, with the digest of what they hold: nothing else is left to find what is wrong."""
    session = SessionStore.in_memory().create("s", scheme=TEXT)
    root, nodes = session.root, []
    for role, key in itertools.product(("user", "assistant"), (None, "k")):
        nodes.append(session.append(root, [0, 300, 2**31 - 1], role=role, key=key and key + role))
        with session.draft(root, key=key and key + role + "!") as draft:
            draft.extend([1, 2])
            nodes.append(draft.commit("stop"))
    corpus = [encode_node(1, 1, 0, node) for node in nodes]
    assert all(short_way(data, root.id, 0) for data in corpus)
    rng = random.Random(2)
    passed = sum(
        short_way(signed(mutated(rng, rng.choice(corpus), rng.choice(corpus)), root.id), root.id, 0) for _ in range(MUTATIONS)
    )
    assert 0 < passed < MUTATIONS // 2


def mutated(rng: random.Random, data: bytes, other: bytes) -> bytes:
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(made)) if rng.random() < 0.3 else min(HEAD_BYTES + int(rng.expovariate(0.02)), len(made) - 1)
        step = rng.randrange(6)
        if step == 0:
            made[at] ^= 1 << rng.randrange(8)
        elif step == 1:
            made[at] = rng.choice(
                (0, 1, 0x7F, 0x80, 0x90, 0x91, 0xA1, 0xC0, 0xC1, 0xC2, 0xC4, 0xC7, 0xCB, 0xCF, 0xD3, 0xD6, 0xDD, 0xFF)
            )
        elif step == 2:
            del made[at : at + rng.randint(1, 9)]
        elif step == 3:
            made[at:at] = rng.randbytes(rng.randint(1, 5))
        elif step == 4:
            first = rng.randrange(len(other))
            made[at : at + rng.randint(0, 20)] = other[first : first + rng.randint(1, 20)]
        else:
            made[at : at + 1] = rng.choice((b"\xcd\0", b"\xce\0\0\0", b"\xdc\0", b"\xdd\xff\xff\xff\xff", b"\xca\0\0\0\0", b"\xd9"))
        if not made:
            break
    return bytes(made)


def test_mutated_records() -> None:
    corpus = [data for data in samples() if len(data) < 3_000]
    rng = random.Random(1)
    modules = set(sys.modules)
    refusals = sum(refused(mutated(rng, rng.choice(corpus), rng.choice(corpus))) for _ in range(MUTATIONS))
    assert refusals > MUTATIONS // 2
    assert set(sys.modules) == modules


def test_truncated_and_longer_records() -> None:
    for data in samples():
        stops = range(len(data)) if len(data) < 400 else random.Random(len(data)).sample(range(len(data)), 100)
        assert all(refused(data[:stop]) for stop in stops)
        assert refused(data + b"\xc0")
        assert refused(data + data)
        assert refused(b"\0" + data)


def with_body(data: bytes, *path: int, value: Any) -> bytes:
    """A record with a field of its body replaced."""
    body = msgpack.unpackb(data[HEAD_BYTES:])

    def replaced(node: Any, at: tuple[int, ...]) -> Any:
        return value if not at else [replaced(one, at[1:]) if number == at[0] else one for number, one in enumerate(node)]

    made: bytes = data[:HEAD_BYTES] + msgpack.packb(replaced(body, path))
    return made


IMAGE_FIELDS: Final = ["image", bytes(32), [[3, 4]], [1, 4, 4], None, None, [], 0, False]
DAMAGED: Final[dict[str, tuple[tuple[int, ...], Any]]] = {
    "a key of bytes": ((KEY,), b"k"),
    "another key than its digest": ((KEY,), "other"),
    "no key with its digest": ((KEY,), None),
    "an origin of no kind": ((ORIGIN,), 2),
    "an origin below": ((ORIGIN,), -1),
    "an origin of bool": ((ORIGIN,), False),
    "no role": ((ROLE,), None),
    "tokens of text": ((TOKENS,), "abcd"),
    "half a token": ((TOKENS,), bytes(37)),
    "a token below 0": ((TOKENS,), b"\xff" * 36),
    "a token more": ((TOKENS,), bytes(40)),
    "runs of text": ((RUNS,), "x"),
    "runs of a list": ((RUNS,), []),
    "less than its tokens": ((STATE, 0), 8),
    "a count of bool": ((STATE, 0), True),
    "a count of float": ((STATE, 0), 12.0),
    "a position of text": ((STATE, 1), "7"),
    "a position of NaN": ((STATE, 1), float("nan")),
    "a position at infinity": ((STATE, 2), float("inf")),
    "a position too far": ((STATE, 2), 2**60),
    "a state of 4": ((STATE,), [12, 1, 1, []]),
    "a state of a map": ((STATE,), {}),
    "an open block of nothing": ((STATE, 3), [[]]),
    "an open block of no item": ((STATE, 3), [[["picture", bytes(32), None, None, None, []], None, 1]]),
    "an open block of an int second": ((STATE, 3), [[["video", bytes(32), None, 1, None, []], None, 1]]),
    "an open block with another extra": ((STATE, 3), [[["image", bytes(32), None, None, None, [], 7], None, 1]]),
    "an open block at text": ((STATE, 3), [[["image", bytes(32), None, None, None, []], "x", 1]]),
    "carrying text": ((STATE, 4), ["x"]),
    "carrying bools": ((STATE, 4), [True]),
    "replayed in part": ((REPLAYED,), [1]),
    "replayed after other tokens": ((REPLAYED,), [1, [13, 1, 0, [], []]]),
    "media of a map": ((MEDIA,), {}),
    "media of 8 fields": ((MEDIA, 0), IMAGE_FIELDS[:8]),
    "media of 11 fields": ((MEDIA, 0), [*IMAGE_FIELDS, [2], 1]),
    "media with an empty extra": ((MEDIA, 0), [*IMAGE_FIELDS, [2]]),
    "media with a list for extra": ((MEDIA, 0), [*IMAGE_FIELDS, [0, 1]]),
    "media of no kind": ((MEDIA, 0, 0), "picture"),
    "a short identity": ((MEDIA, 0, 1), bytes(31)),
    "no span": ((MEDIA, 0, 2), []),
    "an empty span": ((MEDIA, 0, 2), [[3, 0]]),
    "a span before": ((MEDIA, 0, 2), [[-1, 4]]),
    "a span past the end": ((MEDIA, 0, 2), [[6, 4]]),
    "spans out of order": ((MEDIA, 0, 2), [[5, 2], [3, 2]]),
    "a span of bools": ((MEDIA, 0, 2), [[True, 4]]),
    "a span of three": ((MEDIA, 0, 2), [[3, 4, 1]]),
    "a grid of two": ((MEDIA, 0, 3), [4, 4]),
    "a grid of nothing": ((MEDIA, 0, 3), [1, 0, 4]),
    "a grid too large": ((MEDIA, 0, 3), [1, 2**31, 4]),
    "whole seconds": ((MEDIA, 0, 4), 1),
    "seconds below 0": ((MEDIA, 0, 4), -1.0),
    "no seconds at all": ((MEDIA, 0, 4), -0.0),
    "a length of float": ((MEDIA, 0, 5), 1.0),
    "sizes of one": ((MEDIA, 0, 6), [[1]]),
    "parts before of bool": ((MEDIA, 0, 7), True),
    "parts before below 0": ((MEDIA, 0, 7), -1),
    "unfinished of int": ((MEDIA, 0, 8), 1),
    "media over one another": ((MEDIA,), [IMAGE_FIELDS, IMAGE_FIELDS]),
    "media out of order": ((MEDIA,), [["image", bytes(32), [[7, 1]], *IMAGE_FIELDS[3:]], IMAGE_FIELDS]),
    "details of 3": ((DETAILS,), [None, None, None]),
    "details of nothing": ((DETAILS,), [None, None, None, []]),
    "metadata of nothing": ((DETAILS,), [[2], "stop", None, []]),
    "metadata of a list": ((DETAILS,), [[0, 1], None, None, []]),
    "metadata of text": ((DETAILS,), ["x", None, None, []]),
    "a reason of bytes": ((DETAILS,), [None, b"stop", None, []]),
    "a tail policy of no kind": ((DETAILS,), [None, "stop", "cut", []]),
    "a link of no kind": ((DETAILS,), [None, None, None, [["to", bytes(32), 0]]]),
    "a link to half a node": ((DETAILS,), [None, None, None, [["prefix_of", bytes(16), 0]]]),
    "a link below 0": ((DETAILS,), [None, None, None, [["prefix_of", bytes(32), -1]]]),
}  # fmt: skip
METADATA_DAMAGED: Final[dict[str, Any]] = {
    "an empty array": [],
    "a tag of text": ["list", 1],
    "a tag of no kind": [4, 1],
    "a tag of bool": [True, 1],
    "a map of three": [2, "a", 1, "b"],
    "a key twice": [2, "a", 1, "a", 1],
    "keys out of order": [2, "b", 1, "a", 1],
    "a key of bool": [2, True, 1],
    "a key of float": [2, 1.0, 1],
    "a key of NaN": [2, float("nan"), 1],
    "a key of bytes": [2, b"a", 1],
    "a key of a list": [2, [0], 1],
    "a member twice": [1, 1, 1],
    "members that are equal": [1, 1, 1.0],
    "members out of order": [1, 2, 1],
    "a member that has no hash": [1, [3, "<i4", [0], b""]],
    "a map of msgpack": {"a": 1},
    "a time": msgpack.Timestamp(1, 2),
    "an extension": msgpack.ExtType(5, b""),
    "an extension of 4 bytes": msgpack.ExtType(5, b"abcd"),
    "an array of objects": [3, "|O", [1], bytes(8)],
    "an array of Python": [3, "O", [1], bytes(8)],
    "an array of no type": [3, "nothing", [1], bytes(8)],
    "a type of old": [3, "a4", [1], bytes(4)],
    "two types": [3, "<i2,<i2", [1], bytes(4)],
    "a type in another spelling": [3, "i4", [1], bytes(4)],
    "big-endian": [3, ">i4", [1], bytes(4)],
    "a unit of no kind": [3, "<M8[parsec]", [1], bytes(8)],
    "a type of bytes": [3, b"<i4", [1], bytes(4)],
    "a size too many": [3, "<i4", [2], bytes(4)],
    "sizes below 0": [3, "<i4", [-1, -1], bytes(4)],
    "sizes of bool": [3, "<i4", [True], bytes(4)],
    "sizes without end": [3, "<i4", [0, 2**62, 2**62], b""],
    "too many sizes": [3, "<i4", [1] * 65, bytes(4)],
    "very many sizes": [3, "<i4", [2**62] * 10_000, bytes(4)],
    "data of text": [3, "<i4", [1], "abcd"],
    "a field of an object": [3, [8, False, [["x", None, 0, "|O", []]]], [1], bytes(8)],
    "a field twice": [3, [8, False, [["x", None, 0, "<i4", []]] * 2], [1], bytes(8)],
    "a field past the end": [3, [4, False, [["x", None, 2, "<i4", []]]], [1], bytes(4)],
    "a field of a huge shape": [3, [4, False, [["x", None, 0, "<i4", [2**40, 2**40]]]], [0], b""],
    "an alignment that is none": [3, [5, True, [["x", None, 1, "<i4", []]]], [1], bytes(5)],
    "an item without end": [3, [2**40, False, []], [0], b""],
}  # fmt: skip


def damaged_base() -> bytes:
    tree = toy.new_session().tree
    tree, node = tree.append(tree.root, [1, 2, 3])
    tree, node = tree.append(node, toy.A_IDS, media=toy.media(toy.a_turn()), key="k")
    return encode_node(1, 2, 1, node)


@pytest.mark.parametrize("name", DAMAGED)
def test_every_field_is_checked(name: str) -> None:
    path, value = DAMAGED[name]
    base = damaged_base()
    assert with_body(base, KEY, value="k") == base
    with pytest.raises(CorruptTree, match="node 2 of session 1"):
        decode(with_body(base, *path, value=value))


@pytest.mark.parametrize("name", METADATA_DAMAGED)
def test_metadata_are_checked(name: str) -> None:
    base = damaged_base()
    for value in (METADATA_DAMAGED[name], [2, "x", METADATA_DAMAGED[name]]):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(CorruptTree, match="node 2 of session 1"):
                decode(with_body(base, DETAILS, value=[value, None, None, []]))
            with pytest.raises(CorruptTree, match="node 2 of session 1"):
                decode(with_body(base, MEDIA, 0, value=[*IMAGE_FIELDS, value]))


def test_metadata_nested_too_deep() -> None:
    base = damaged_base()
    for depth in (MAX_DEPTH, MAX_DEPTH + 1, 200, 400):
        value: Any = 1
        for _ in range(depth):
            value = [0, value]
        with pytest.raises(CorruptTree, match="deeper"):
            decode(with_body(base, DETAILS, value=[[2, "x", value], None, None, []]))
    kind: Any = "<i4"
    for _ in range(100):
        kind = [4, False, [["x", None, 0, kind, []]]]
    with pytest.raises(CorruptTree, match="deeper"):
        decode(with_body(base, DETAILS, value=[[2, "x", [3, kind, [1], bytes(4)]], None, None, []]))


OTHERS_DAMAGED: Final[list[tuple[int, tuple[int, ...], Any]]] = [
    (0, (0,), None), (0, (0,), "other"), (0, (1,), 7), (0, (2,), [["b", 1], ["a", 1]]), (0, (2,), [["a", 1], ["a", 1]]),
    (0, (2,), {}),
    (0, (2,), [["a", [0]]]), (0, (2,), [[1, 1]]), (0, (3,), [None] * 4), (0, (3,), [1, None, None]), (0, (4,), None),
    (0, (5,), [10, 11]), (0, (5,), [-1, 0]), (0, (5,), [None, -1]), (0, (5,), [True, 0]), (0, (6,), bytes(31)), (0, (7,), [1]),
    (0, (7,), [1, NONE]), (0, (7,), [-1, 1]), (3, (0,), b"main"), (3, (0,), "other"), (3, (1,), -1), (3, (1,), 1.0), (3, (), []),
    (6, (0,), None), (6, (), 1), (8, (0,), [1, None, None]), (8, (1,), None), (8, (1,), "other"), (8, (2,), bytes(1)), (8, (), {}),
]  # fmt: skip


@pytest.mark.parametrize(("number", "path", "value"), OTHERS_DAMAGED)
def test_records_of_other_kinds_are_checked(number: int, path: tuple[int, ...], value: Any) -> None:
    with pytest.raises(CorruptTree, match=r"session|head|opening|alias"):
        decode(with_body(encode(RECORDS[number]), *path, value=value))


def test_every_byte_of_the_beginning_counts() -> None:
    for data in samples()[-12:]:
        for at in range(HEAD_BYTES):
            changed = bytearray(data)
            changed[at] ^= 0xFF
            if refused(bytes(changed)):
                continue
            # A number or an id that could be, of another node.
            assert at in range(4, 18) or at in range(20, 52)


def test_kinds_and_versions() -> None:
    data = damaged_base()
    for kind in (0, 9, 127, 255):
        with pytest.raises(CorruptTree, match=f"kind {kind} of version 1"):
            decode(data[:1] + bytes([kind]) + data[2:])
    for version in (2, 100, 255):
        newer = data[:2] + bytes([version]) + data[3:]
        for call in (decode, entry_of):
            for cut in (len(data), 10, 3):
                with pytest.raises(IncompatibleStore, match=f"version {version}"):
                    call(newer[:cut])
    for call in (decode, entry_of):
        with pytest.raises(CorruptTree, match="version 0"):
            call(data[:2] + b"\0" + data[3:])
        with pytest.raises(CorruptTree, match="0 bytes"):
            call(b"")
        with pytest.raises(CorruptTree, match="60 bytes"):
            call(data[:60])


def test_limits_of_size(monkeypatch: pytest.MonkeyPatch) -> None:
    data = damaged_base()
    assert decode(data, len(data))
    with pytest.raises(CorruptTree, match="is the limit"):
        decode(data, len(data) - 1)
    record = noted({"x": bytes(2**21)})
    large = encode(record)
    assert decode(large) == record
    monkeypatch.setattr(codec, "MAX_RECORD_BYTES", 2**21)
    with pytest.raises(LimitExceeded, match="is the limit"):
        encode(record)


def hostile() -> Iterator[tuple[str, bytes]]:
    """About a megabyte each, of which a careless reader makes far more."""
    head, size = damaged_base()[:HEAD_BYTES], 2**20
    yield "nested arrays that say they are long", head + struct.pack(">BI", 0xDD, size - 10_000) * 1_000 + bytes(size)
    yield "one level more than msgpack has", head + b"\x91" * 5_000
    yield "nested deep", head + b"\x91" * 1_000 + b"\xc0"
    yield "arrays of four billion", head + b"\xdd\xff\xff\xff\xff" * 1_000
    yield "maps of four billion", head + b"\xdf\xff\xff\xff\xff" * 1_000
    yield "bytes of four billion", head + b"\x99\xc6\xff\xff\xff\xff" + bytes(size)
    yield "an extension of a megabyte", head + b"\xc9\x00\x0f\xff\xff\x05" + bytes(size)
    yield "empty arrays", head + struct.pack(">BI", 0xDD, size) + b"\x90" * size
    yield "nothing", head + b"\x99" + b"\xc0" * size
    base = damaged_base()
    yield "a set of nothing", with_body(base, DETAILS, value=[[2, "x", [1, *[None] * size]], None, None, []])
    yield "tuples of nothing", with_body(base, DETAILS, value=[[2, "x", [0, *[[0]] * (size // 2)]], None, None, []])
    yield "runs of nothing", with_body(base, RUNS, value=msgpack.packb([[0, 0, 0]] * (size // 4)))
    yield "runs that say they are long", with_body(base, RUNS, value=struct.pack(">BI", 0xDD, size) * 1_000 + bytes(size))
    yield "spans without end", with_body(base, MEDIA, 0, 2, value=[[number, 1] for number in range(size // 6)])
    yield (
        "a shape without end",
        with_body(base, DETAILS, value=[[2, "x", [3, "<i4", [2**63 - 1] * (size // 9), b""]], None, None, []]),
    )


HOSTILE = dict(hostile())


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_records_take_no_more_than_their_size(name: str) -> None:
    data = HOSTILE[name]
    modules = set(sys.modules)
    tracemalloc.start()
    begun = time.process_time()
    try:
        for call in (decode, entry_of):
            with suppress(CorruptTree):
                call(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * 2**20 + 150 * len(data)
    assert time.process_time() - begun < 20
    assert set(sys.modules) == modules


def test_hostile_arrays_make_no_room() -> None:
    """What is declared alone costs nothing: the bound above holds with a small factor where a record holds no small objects."""
    for name in ("nested arrays that say they are long", "runs that say they are long", "bytes of four billion"):
        tracemalloc.start()
        try:
            assert refused(HOSTILE[name])
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 8 * 2**20


def test_a_large_record_leaves_no_large_packer_behind() -> None:
    record = noted({"x": bytes(2**24)})
    tracemalloc.start()
    try:
        for _ in range(2):
            encode(record)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 2**21
    assert peak > 2**24


def test_items_made_the_short_way_are_those_made_the_long_way() -> None:
    """Pictures are made without MediaItem's own checks."""
    choices: list[list[Any]] = [
        ["image", "video"],
        [bytes(32), bytes(31)],
        [[[0, 1]], [[0, 9]], [[2**31 - 1, 1]], [[0, 2**31]], [[0, 0]], [[-1, 2]], [[0, 1], [3, 1]]],
        [[1, 1, 1], [0, 1, 1], [1, 2**31 - 1, 1], [1, 1, 2**31], [1, -1, 1], None],
        [0, 5, 2**31 - 1, 2**31, -1],
        [True, False],
    ]
    for modality, identity, spans, grid, before, unfinished in itertools.product(*choices):
        fields = (
            modality,
            identity,
            tuple(map(tuple, spans)),
            None if grid is None else tuple(grid),
            None,
            None,
            (),
            before,
            unfinished,
        )
        try:
            expected: Any = exact(MediaItem(*fields))
        except Exception:
            expected = None
        try:
            made: Any = exact(codec._item(fields))
        except Exception:
            made = None
        assert made == expected


def test_threads_do_not_meet() -> None:
    from concurrent.futures import ThreadPoolExecutor

    corpus = samples()[:40]
    with ThreadPoolExecutor(8) as pool:
        for made in pool.map(lambda _: [encode(decode(data)) for data in corpus], range(40)):
            assert tuple(made) == corpus


def test_external_tables_of_every_family() -> None:
    for name in known_schemes():
        params = histories.histories(name.partition("@")[0])[0].params
        rules: PositionScheme = scheme(name, **params)
        tree = SessionStore.in_memory().create("s", scheme=rules)
        table = np.arange(4 * rules.num_axes).reshape(rules.num_axes, 4)
        node = tree.append(tree.root, [1, 2, 3, 4], positions=ExternalPositions(table.astype(rules.dtype)))
        tree.append(node, [5])
        check_tree(list(tree.tree))
