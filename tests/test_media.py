"""Media items and identities: what is taken, what is refused, and what makes two of them equal."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import subprocess
import sys
from hashlib import sha256
from types import MappingProxyType, SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps, ImagePalette

from sessiontree import (
    LimitExceeded,
    MediaItem,
    MediaSpanError,
    OutOfRange,
    PositionError,
    SessionStore,
    SessionTreeError,
    Unsupported,
    media_identity,
)
from sessiontree.digest import content_prefix, pack
from sessiontree.media import _dtype_name
from sessiontree.positions import scheme
from tests.test_tree import identity
from tests.toy import attack_array, attack_slots, plain

ID = identity("x")


def make(**changes: Any) -> MediaItem:
    return MediaItem(**{"modality": "image", "identity": ID, "spans": [(0, 4)], "grid_thw": (1, 4, 4), **changes})


# --- items --------------------------------------------------------------------------------------------------------------


def test_an_item_is_what_it_was_given() -> None:
    given_fields: tuple[Any, ...] = (
        "video",
        bytearray(ID),
        np.array([[9, 2], [1, 3]]),
        torch.tensor([2, 4, 6]),
        np.float32(0.5),
        np.int64(7),
        [[1, 2], (3, 4)],
        np.uint8(5),
        np.True_,
    )
    item = MediaItem(*given_fields)
    assert item.fields() == ("video", ID, ((1, 3), (9, 2)), (2, 4, 6), 0.5, 7, ((1, 2), (3, 4)), 5, True)
    assert [type(value) for value in item.fields()] == [str, bytes, tuple, tuple, float, int, tuple, int, bool]
    assert all(
        type(number) is int for pair in (*item.spans, *item.target_sizes, item.grid_thw or ()) for number in np.ravel(pair).tolist()
    )
    assert type(item.spans[0]) is tuple
    assert item.num_placeholders == 5
    sparse = MediaItem("audio", ID, iter([(0, 1)]))
    assert sparse.fields() == ("audio", ID, ((0, 1),), None, None, None, (), 0, False)
    assert MediaItem("image", ID, []).spans == ()
    assert MediaItem("image", ID, [(5, 1), (0, 5), (6, 1)]).spans == ((0, 5), (5, 1), (6, 1)), "spans may touch"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"modality": "text"}, Unsupported),
        ({"modality": None}, TypeError),
        ({"modality": "Image"}, Unsupported),
        ({"identity": ID.hex()}, TypeError),
        ({"identity": None}, TypeError),
        ({"identity": ID[:31]}, OutOfRange),
        ({"identity": ID + b"1"}, OutOfRange),
        ({"identity": b""}, OutOfRange),
        ({"spans": None}, TypeError),
        ({"spans": 3}, TypeError),
        ({"spans": [3]}, TypeError),
        ({"spans": [(0.0, 4)]}, TypeError),
        ({"spans": [(0, 4.0)]}, TypeError),
        ({"spans": ["ab"]}, TypeError),
        ({"spans": [(True, 4)]}, TypeError),
        ({"spans": [(None, 4)]}, TypeError),
        ({"spans": np.array([[0.0, 4.0]])}, TypeError),
        ({"spans": [(0, 0)]}, MediaSpanError),
        ({"spans": [(0, 2), (1, 2)]}, MediaSpanError),
        ({"spans": [(0, 2), (0, 2)]}, MediaSpanError),
        ({"grid_thw": (1, 4)}, PositionError),
        ({"grid_thw": ()}, PositionError),
        ({"grid_thw": (1, 4, 4, 4)}, PositionError),
        ({"grid_thw": (0, 4, 4)}, PositionError),
        ({"grid_thw": (1, -4, 4)}, PositionError),
        ({"grid_thw": (1, 2**70, 4)}, PositionError),
        ({"grid_thw": (1.0, 4, 4)}, TypeError),
        ({"grid_thw": 4}, TypeError),
        ({"grid_thw": torch.tensor([[1, 4, 4]])}, TypeError),
        ({"second_per_grid_ts": float("nan")}, PositionError),
        ({"second_per_grid_ts": float("inf")}, PositionError),
        ({"second_per_grid_ts": -0.5}, PositionError),
        ({"second_per_grid_ts": "1"}, TypeError),
        ({"second_per_grid_ts": True}, TypeError),
        ({"second_per_grid_ts": [1.0, 2.0]}, TypeError),
        ({"audio_feature_length": -1}, OutOfRange),
        ({"audio_feature_length": 2**70}, OutOfRange),
        ({"audio_feature_length": 1.0}, TypeError),
        ({"target_sizes": None}, TypeError),
        ({"target_sizes": [(1.0, 2)]}, TypeError),
        ({"target_sizes": [(2**70, 2)]}, OutOfRange),
        ({"target_sizes": [(-1, 2)]}, OutOfRange),
        ({"placeholders_before": -1}, OutOfRange),
        ({"placeholders_before": 2**70}, OutOfRange),
        ({"placeholders_before": 1.0}, TypeError),
        ({"placeholders_before": None}, TypeError),
        ({"unfinished": 1}, TypeError),
        ({"unfinished": None}, TypeError),
        ({"unfinished": "no"}, TypeError),
    ],
)
def test_what_an_item_refuses(changes: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        make(**changes)
    assert type(caught.value) is error


@pytest.mark.parametrize(
    "changes",
    [
        {"spans": [(0, 1, 2)]},
        {"spans": [(0,)]},
        {"spans": [()]},
        {"spans": [(-1, 4)]},
        {"spans": [(0, -4)]},
        {"spans": [(2**70, 1)]},
        {"target_sizes": [(1,)]},
        {"target_sizes": [(1, 2, 3)]},
        {"second_per_grid_ts": 10**400},
    ],
)
def test_every_refusal_is_typed(changes: dict[str, Any]) -> None:
    with pytest.raises((SessionTreeError, TypeError)):
        make(**changes)


def test_span_errors_name_the_item_and_the_span() -> None:
    with pytest.raises(MediaSpanError, match=ID[:4].hex()) as caught:
        make(spans=[(0, 3), (2, 4)])
    assert caught.value.span == (2, 4)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"modality": "video"},
    {"identity": identity("y")},
    {"spans": [(1, 4)]},
    {"spans": [(0, 2), (2, 2)]},
    {"grid_thw": (1, 2, 8)},
    {"grid_thw": None},
    {"second_per_grid_ts": 0.0},
    {"second_per_grid_ts": 1.0},
    {"audio_feature_length": 0},
    {"target_sizes": [(1, 2)]},
    {"target_sizes": [(2, 1)]},
    {"placeholders_before": 1},
    {"unfinished": True},
    {"extra": {"a": 1}},
    {"extra": {"a": 1.0}},
    {"extra": {"a": True}},
    {"extra": {"a": None}},
    {"extra": {"a": "1"}},
    {"extra": {"a": b"1"}},
    {"extra": {"b": 1}},
    {"extra": {"a": 1, "b": 1}},
    {"extra": {1: 1}},
    {"extra": {"1": 1}},
    {"extra": {"a": []}},
    {"extra": {"a": {}}},
    {"extra": {"a": set()}},
    {"extra": {"a": [1]}},
    {"extra": {"a": {1}}},
    {"extra": {"a": [["b", 1]]}},
    {"extra": {"a": {"b": 1}}},
    {"extra": {"a": np.arange(4, dtype=np.int32)}},
    {"extra": {"a": np.arange(4, dtype=np.uint32)}},
    {"extra": {"a": np.arange(4, dtype=np.int32).reshape(2, 2)}},
    {"extra": {"a": np.arange(4, dtype=np.int32).view("<i2,<u2")}},
    {"extra": {"a": np.arange(4, dtype=np.int32).view("<u2,<i2")}},
    {"extra": {"a": np.arange(4, dtype=np.int32).view("V4")}},
    {"extra": {"a": [0, 1, 2, 3]}},
]


def test_items_are_equal_by_every_field() -> None:
    for one, two in itertools.combinations(VARIANTS, 2):
        assert make(**one) != make(**two)
        assert make(**one).fields() != make(**two).fields()
    for changes in VARIANTS:
        assert make(**changes) == make(**changes)
        assert hash(make(**changes)) == hash(make(**changes))
    assert make(spans=[(6, 1), (0, 2)]) == make(spans=[(0, 2), (6, 1)])
    assert make(second_per_grid_ts=-0.0).fields() == make(second_per_grid_ts=0).fields()
    assert repr(make(second_per_grid_ts=-0.0).second_per_grid_ts) == "0.0"
    other: Any = "item"
    assert make() != other


@pytest.mark.parametrize("changes", VARIANTS)
def test_items_copy_and_pickle(changes: dict[str, Any]) -> None:
    item = make(**changes)
    assert copy.copy(item) is copy.deepcopy(item) is item
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        made = pickle.loads(pickle.dumps(item, protocol))
        assert made == item
        assert hash(made) == hash(item)
        assert made.fields() == item.fields()
        assert plain(made.extra) == plain(item.extra)
    evolve: Any = attrs.evolve  # mypy knows no attrs class without an __init__
    assert evolve(item, spans=[(9, 4)]) == item.with_spans([(9, 4)])
    assert copy.deepcopy({"a": [item]})["a"][0] is item
    assert str(item).startswith(item.modality)
    assert ID[:4].hex() in repr(item) or identity("y")[:4].hex() in repr(item)


def test_an_item_is_frozen() -> None:
    item: Any = make()
    for name in ("spans", "identity", "brand_new"):
        with pytest.raises((attrs.exceptions.FrozenInstanceError, AttributeError)):
            setattr(item, name, ())
    with pytest.raises((attrs.exceptions.FrozenInstanceError, AttributeError)):
        del item.spans


def test_moving_an_item_keeps_the_rest() -> None:
    item = make(placeholders_before=3, target_sizes=[(1, 1)])
    moved = item.with_spans([(7, 4)])
    assert moved.fields() == ("image", ID, ((7, 4),), (1, 4, 4), None, None, ((1, 1),), 3, False)
    assert item.with_spans([(7, 4)], placeholders_before=0, unfinished=True).fields()[-2:] == (0, True)
    assert item.spans == ((0, 4),)


# --- fields that this library knows no name for -------------------------------------------------------------------------


def extra() -> dict[str, Any]:
    """What a processor gives; everything in it can be written to."""
    return {
        "vision_position_ids": np.arange(6, dtype=np.int64).reshape(3, 2),
        "media_nums_per_sample": torch.tensor([1, 2]),
        "visible": [[1, 2], {"deep": [bytearray(b"ab"), {3, 4}]}],
        "rate": 0.5,
    }


EXTRA_READ = {
    "vision_position_ids": np.arange(6, dtype=np.int64).reshape(3, 2),
    "media_nums_per_sample": np.array([1, 2]),
    "visible": ((1, 2), {"deep": (b"ab", frozenset({3, 4}))}),
    "rate": 0.5,
}


def test_extra_is_read_back_frozen() -> None:
    given_extra = extra()
    item = make(extra=given_extra)
    before = item.fields()
    given_extra["vision_position_ids"][:] = 9
    given_extra["media_nums_per_sample"][:] = 9
    given_extra["visible"][0].append(9)
    given_extra["visible"][1]["deep"][0][:] = b"zz"
    given_extra["visible"][1]["deep"][1].add(9)
    given_extra["more"] = 1
    assert plain(item.extra) == plain(EXTRA_READ)
    for value in (item.extra, make(extra={"a": {"b": np.zeros(2)}}).extra):
        assert value is not item.extra
    attack_array(item.extra["vision_position_ids"])
    attack_array(item.extra["media_nums_per_sample"])
    # PMap says that it is immutable; its slots can be set.
    for handed in (item.extra, item.extra["visible"][1]):
        object.__setattr__(handed, "_size", 0)
        object.__setattr__(handed, "_buckets", None)
    assert plain(item.extra) == plain(EXTRA_READ)
    assert item.fields() == before
    assert item == make(extra=extra())
    attack_slots(item, ["extra", "_extra", "_extra_field"])


def test_the_order_of_extra_does_not_count() -> None:
    one = make(extra={"a": 1, "b": {"c": {5, 6, 7}, "d": [1]}})
    two = make(extra={"b": {"d": (1,), "c": frozenset({7, 6, 5})}, "a": np.int64(1)})
    assert one == two
    assert hash(one) == hash(two)
    assert one.fields() == two.fields()
    assert make(extra={"a": np.asfortranarray(np.eye(3))}) == make(extra={"a": torch.eye(3, dtype=torch.float64)})
    assert make(extra={"a": float("nan")}) == make(extra={"a": float("nan")})


def test_items_without_extra_are_what_they_always_were() -> None:
    """Ids of the version before `extra`: an empty one leaves no mark."""
    video = MediaItem("video", bytes(range(32)), [(1, 8)], (2, 4, 8), 0.5, 7, [(1, 2)], 0, False)
    image = MediaItem("image", bytes(32), [(1, 3)], (1, 4, 4), unfinished=True)
    heads = [sha256(content_prefix("input", "user", None, (item.fields(),), None)).hexdigest() for item in (video, image)]
    assert heads == [
        "90554ae15864e12b04fb81321961cdbd03775b81f9518e7cb6ce96ecf8f84ec7",
        "dc2a8558f417ca80c5ea76457bc3442890f5ca9a5e3fd86657484d38cb982a8d",
    ]
    session = SessionStore.in_memory().create("one", scheme=scheme("qwen2_5_vl@sglang"))
    node_id = "b335ae1b78e5982ac1ecf56a37d5e7db437d14b0c9462172d9a45456411650a4"
    empties: list[Any] = [None, {}, MappingProxyType({}), image.extra]
    for empty in empties:
        item = MediaItem("image", bytes(32), [(1, 3)], (1, 4, 4), unfinished=True, extra=empty)
        assert item == image
        assert item.fields() == image.fields()
        assert item.content() == image.content() == ("image", bytes(32), (1, 4, 4), None, None, ())
        assert session.append(session.root, [7, 1, 1, 1], media=[item]).id.hex() == node_id
        assert repr(item) == repr(image)
    other = session.append(
        session.root, [7, 1, 1, 1], media=[MediaItem("image", bytes(32), [(1, 3)], (1, 4, 4), unfinished=True, extra={"a": 0})]
    )
    assert other.id.hex() != node_id


def test_extra_goes_where_the_item_goes() -> None:
    item = make(extra=extra())
    moved = item.with_spans([(3, 4)], placeholders_before=2, unfinished=True)
    assert plain(moved.extra) == plain(EXTRA_READ)
    assert moved == make(extra=extra(), spans=[(3, 4)], placeholders_before=2, unfinished=True)
    assert moved.content() == item.content() != make().content()
    assert moved.with_spans([(0, 4)], placeholders_before=0, unfinished=False) == item
    assert pack(item.fields()) != pack(make().fields())
    assert pack(item.content()) != pack(make().content())
    assert len({item, moved, make(extra=extra()), make()}) == 3


def test_extra_is_shown() -> None:
    assert repr(make(extra={"a": [1, "x"]})).endswith(", grid_thw=(1, 4, 4), extra={'a': (1, 'x')})")
    assert "extra" not in repr(make())


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (5, TypeError),
        ("ab", TypeError),
        ([("a", 1)], TypeError),
        ({"a": object()}, TypeError),
        ({1.5: 1}, TypeError),
        ({"a": "\ud800"}, TypeError),
        ({"a": np.array([object()])}, TypeError),
        ({"a": 2**70}, OutOfRange),
        ({"a": torch.empty(1, device="meta")}, TypeError),
    ],
)
def test_extra_that_cannot_be_frozen(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="extra" if not isinstance(value, dict) or "a" not in value or error is OutOfRange else None):
        make(extra=value)


def test_extra_that_holds_itself() -> None:
    loop: dict[str, Any] = {}
    loop["a"] = loop
    with pytest.raises(LimitExceeded):
        make(extra=loop)
    deep: Any = 1
    for _ in range(60):
        deep = {"a": [deep]} if _ % 2 else [deep]
    with pytest.raises(LimitExceeded):
        make(extra={"a": deep})
    deep = 1
    for number in range(60):
        deep = {"a": deep} if number % 2 else [deep]
    assert hash(make(extra={"a": deep})) == hash(make(extra={"a": deep}))


# --- identities ---------------------------------------------------------------------------------------------------------

PIXELS = np.arange(12, dtype=np.float32).reshape(3, 4)

DIFFERENT: list[tuple[str, Any, Any]] = [
    ("image", PIXELS, None),
    ("video", PIXELS, None),
    ("", PIXELS, None),
    ("image", PIXELS.reshape(4, 3), None),
    ("image", PIXELS.reshape(-1), None),
    ("image", PIXELS.reshape(1, 3, 4), None),
    ("image", PIXELS.astype(np.float64), None),
    ("image", PIXELS.view(np.int32), None),
    ("image", PIXELS.T, None),
    ("image", PIXELS[::-1], None),
    ("image", PIXELS + 1, None),
    ("image", PIXELS.tobytes(), None),
    ("image", [PIXELS], None),
    ("image", [[PIXELS]], None),
    ("image", list(PIXELS), None),
    ("image", [PIXELS, b""], None),
    ("image", [b"", PIXELS], None),
    ("image", PIXELS, {"size": 1}),
    ("image", PIXELS, {"size": 1.0}),
    ("image", PIXELS, {"size": True}),
    ("image", PIXELS, {"size": "1"}),
    ("image", PIXELS, {"size": b"1"}),
    ("image", PIXELS, {"size": None}),
    ("image", PIXELS, {"size": [1]}),
    ("image", PIXELS, {"size": {1}}),
    ("image", PIXELS, {"size": {"a": 1}}),
    ("image", PIXELS, {"size": ["a", 1]}),
    ("image", PIXELS, {"size": [["a", 1]]}),
    ("image", PIXELS, {"size": np.array([1])}),
    ("image", PIXELS, {"size": np.array([[1]])}),
    ("image", PIXELS, {"mode": 1}),
    ("image", PIXELS, {"1": "a"}),
    ("image", PIXELS, {1: "a"}),
    ("image", b"", None),
    ("image", [], None),
    ("image", [[]], None),
    ("image", [[], []], None),
    ("image", [b"ab", b"c"], None),
    ("image", [b"a", b"bc"], None),
    ("image", [b"abc"], None),
    ("image", b"abc", None),
    ("image", "abc", None),
    ("image", ["abc"], None),
    ("image", 1, None),
    ("image", 1.0, None),
    ("image", True, None),
    ("image", None, None),
    ("image", np.zeros(0), None),
    ("image", np.zeros((0, 3)), None),
    ("image", np.array(1.0), None),
    ("image", np.array([1.0]), None),
    ("image", np.arange(4, dtype=np.int32).view("<i2,<u2"), None),
    ("image", np.arange(4, dtype=np.int32).view("<u2,<i2"), None),
    ("image", np.arange(4, dtype=np.int32).view("V4"), None),
    ("image", b"", {"size": np.arange(4, dtype=np.int32).view("<i2,<u2")}),
    ("image", b"", {"size": np.arange(4, dtype=np.int32).view("<u2,<i2")}),
]


def test_whatever_differs_has_another_identity() -> None:
    found: dict[bytes, Any] = {}
    for kind, data, options in DIFFERENT:
        one = media_identity(kind, data, options=options)
        assert type(one) is bytes
        assert len(one) == 32
        assert one not in found, ((kind, data, options), found[one])
        found[one] = (kind, data, options)


SAME: list[tuple[Any, Any]] = [
    (PIXELS, PIXELS.copy()),
    (PIXELS, np.asfortranarray(PIXELS)),
    (PIXELS, np.stack([PIXELS, PIXELS], -1)[..., 0]),
    (PIXELS, np.frombuffer(PIXELS.tobytes(), np.float32).reshape(3, 4)),
    (PIXELS, torch.from_numpy(PIXELS.copy())),
    (PIXELS, torch.from_numpy(PIXELS.T.copy()).T),
    (PIXELS, torch.tensor(PIXELS, requires_grad=True)),
    ([PIXELS, b"x"], (PIXELS, bytearray(b"x"))),
    (b"abc", memoryview(b"abc")),
    (b"abc", memoryview(b"aXbXc")[::2]),
]


@pytest.mark.parametrize(("one", "two"), SAME)
def test_equal_content_has_one_identity(one: Any, two: Any) -> None:
    assert media_identity("image", one) == media_identity("image", two)


def test_types_that_numpy_knows_only_the_size_of() -> None:
    """float8 and their like, which other packages add: one byte, kind V, no fields. None of them is installed here."""
    added: list[Any] = [
        SimpleNamespace(kind="V", type=float, str="|V1", name=name) for name in ("float8_e4m3fn", "float8_e5m2", "int4")
    ]
    assert len({_dtype_name(dtype) for dtype in (*added, np.dtype("V1"), np.dtype("u1"))}) == 5


def test_identities_are_what_they_were() -> None:
    """Ids of the version before pictures and records were told apart."""
    data = [np.arange(6, dtype="<i2").reshape(2, 3), b"a", None]
    one = media_identity("image", data, options={"a": np.zeros(2, "f4")})
    assert one.hex() == "7f69053d8e12c09ff59b0d786bd4bc415a805ee8480f3e408eb44f7c31c37fd1"
    two = media_identity("image", np.zeros(1, [("a", "<i2"), ("b", "u1")]))
    assert two.hex() == "5ab8e02676cf6413c2465429605661d7b94f4ebee7048f640fd50ab3ad01bcf4"


def test_options_have_no_order_and_no_empty_form() -> None:
    one = media_identity("image", b"", options={"a": 1, "b": {"c": [2], "d": {3, 4}}})
    assert one == media_identity("image", b"", options={"b": {"d": {4, 3}, "c": (2,)}, "a": 1})
    assert media_identity("image", b"") == media_identity("image", b"", options={}) == media_identity("image", b"", options=None)
    mixed: Any = {1: "a", "1": "b"}
    turned: Any = {"1": "b", 1: "a"}
    assert media_identity("image", b"", options=mixed) == media_identity("image", b"", options=turned)


def test_an_identity_is_the_same_in_every_process() -> None:
    script = (
        "from sessiontree import media_identity as m; print(m('image', [b'ab', 'c', 1.5], options={'a': {'x', 'y', 'z'}}).hex())"
    )
    there = {
        subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert there == {media_identity("image", [b"ab", "c", 1.5], options={"a": {"x", "y", "z"}}).hex()}


@pytest.mark.parametrize(
    ("kind", "data", "options"),
    [
        (1, b"", None),
        (b"image", b"", None),
        (None, b"", None),
        ("image", object(), None),
        ("image", {1: 2}, None),
        ("image", {1}, None),
        ("image", np.array([object()]), None),
        ("image", [b"", object()], None),
        ("image", b"", {"a": object()}),
        ("image", b"", {1.5: 1}),
        ("image", b"", 5),
        ("\ud800", b"", None),
        ("image", "\ud800", None),
        ("image", b"", {"\ud800": 1}),
        ("image", b"", {"a": "\ud800"}),
    ],
)
def test_what_has_no_identity_is_a_type_error(kind: Any, data: Any, options: Any) -> None:
    with pytest.raises(TypeError):
        media_identity(kind, data, options=options)


def test_content_that_holds_itself_or_is_too_large_a_number() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises((LimitExceeded, TypeError)):
        media_identity("image", loop)
    with pytest.raises((SessionTreeError, TypeError)):
        media_identity("image", 2**70)
    with pytest.raises(SessionTreeError):
        media_identity("image", b"", options={"a": 2**70})


nested = st.recursive(
    st.one_of(st.binary(max_size=3), st.text("ab", max_size=2), st.integers(-2, 2)),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


@given(nested, nested)
@settings(max_examples=200, deadline=None)
def test_identities_are_equal_where_contents_are(one: Any, two: Any) -> None:
    assert (media_identity("k", one) == media_identity("k", two)) == (one == two)


# --- pictures -----------------------------------------------------------------------------------------------------------

# Modes that take as many bytes a pixel: the same bytes are another picture in each.
SAME_WIDTH = [("L", "P"), ("LA", "PA", "I;16"), ("RGB", "YCbCr", "HSV", "LAB"), ("RGBA", "CMYK", "RGBX", "RGBa", "I", "F")]


def picture(mode: str, size: tuple[int, int] = (4, 6), seed: int = 0) -> Image.Image:
    one = Image.new(mode, size)
    raw = np.random.default_rng(seed).integers(0, 2, len(one.tobytes()), dtype=np.uint8).tobytes()
    return Image.frombytes(mode, size, raw)


def with_palette(colours: list[int], mode: str = "RGB") -> Image.Image:
    one = picture("P")
    one.putpalette(colours, mode)
    return one


def with_transparency(one: Image.Image, transparency: Any) -> Image.Image:
    one.info["transparency"] = transparency
    return one


def stored(one: Image.Image, form: str = "PNG", **options: Any) -> Image.Image:
    """Written to a file and opened again, nothing of it read yet."""
    file = io.BytesIO()
    one.save(file, form, **options)
    return Image.open(io.BytesIO(file.getvalue()))


@pytest.mark.parametrize("modes", SAME_WIDTH)
def test_the_mode_of_a_picture_counts(modes: tuple[str, ...]) -> None:
    assert len({picture(mode).tobytes() for mode in modes}) == 1
    assert len({media_identity("image", picture(mode)) for mode in modes}) == len(modes)
    for mode in modes:
        assert media_identity("image", picture(mode)) == media_identity("image", picture(mode).copy())
        sizes = [(4, 6), (6, 4), (24, 1), (1, 24), (2, 12)]
        raw = picture(mode).tobytes()
        shaped = [Image.frombytes(mode, size, raw) for size in sizes]
        assert len({one.tobytes() for one in shaped}) == 1
        assert len({media_identity("image", one) for one in (*shaped, picture(mode, seed=1))}) == 6


PICTURES: dict[str, Any] = {
    "indexes without colours": lambda: picture("P"),
    "two colours": lambda: with_palette([1, 2, 3, 4, 5, 6]),
    "other colours": lambda: with_palette([1, 2, 3, 4, 5, 7]),
    "four colours": lambda: with_palette([*range(12)]),
    "three colours with alpha": lambda: with_palette([*range(12)], "RGBA"),
    "the first transparent": lambda: with_transparency(with_palette([1, 2, 3, 4, 5, 6]), 0),
    "the second transparent": lambda: with_transparency(with_palette([1, 2, 3, 4, 5, 6]), 1),
    "half transparent": lambda: with_transparency(with_palette([1, 2, 3, 4, 5, 6]), b"\x80"),
    "grey": lambda: picture("L"),
    "black transparent": lambda: with_transparency(picture("L"), 0),
    "its bytes": lambda: picture("L").tobytes(),
    "its array": lambda: np.asarray(picture("L")),
    "a list of it": lambda: [picture("L")],
    "two of it": lambda: [picture("L"), picture("L")],
    "bits": lambda: picture("1"),
    "no pixels": lambda: Image.new("L", (0, 4)),
    "no pixels, upright": lambda: Image.new("L", (4, 0)),
}


def test_palette_and_transparency_of_a_picture_count() -> None:
    found = {name: media_identity("image", make_it()) for name, make_it in PICTURES.items()}
    assert len(set(found.values())) == len(PICTURES)
    assert found == {name: media_identity("image", make_it()) for name, make_it in PICTURES.items()}
    one = picture("P")
    one.putpalette(ImagePalette.ImagePalette("RGB", [1, 2, 3, 4, 5, 6]))
    assert media_identity("image", one) == found["two colours"]
    assert media_identity("image", picture("L"), options={"size": 1}) != found["grey"] != media_identity("video", picture("L"))


def test_a_picture_is_the_same_read_from_a_file() -> None:
    for mode in ("RGB", "L", "RGBA", "I;16", "1"):
        expected = media_identity("image", picture(mode))
        named = stored(picture(mode))
        named.info["comment"] = "a"
        assert named.format == "PNG"
        assert media_identity("image", named) == media_identity("image", stored(picture(mode), "TIFF")) == expected
    colours = stored(with_palette([1, 2, 3, 4, 5, 6]))
    assert media_identity("image", stored(colours)) == media_identity("image", colours)
    clear = stored(with_palette([1, 2, 3, 4, 5, 6]), transparency=b"\x80\xff")
    assert clear.info["transparency"] == b"\x80\xff"
    assert media_identity("image", clear) != media_identity("image", stored(with_palette([1, 2, 3, 4, 5, 6])))


def turned(orientation: int) -> Image.Image:
    exif = Image.Exif()
    exif[0x0112] = orientation
    exif[0x010E] = f"picture {orientation}"
    return stored(picture("L"), exif=exif)


def test_how_a_file_says_its_picture_is_turned_counts() -> None:
    """transformers' load_image, for one, turns by EXIF: the same pixels, other features."""
    assert len({turned(orientation).tobytes() for orientation in range(1, 9)}) == 1
    assert len({media_identity("image", turned(orientation)) for orientation in range(1, 9)}) == 8
    assert media_identity("image", turned(1)) == media_identity("image", picture("L"))
    upright = ImageOps.exif_transpose(turned(6))
    assert media_identity("image", upright) == media_identity("image", picture("L").transpose(Image.Transpose.ROTATE_270))
    broken = picture("L")
    broken.info["exif"] = b"Exif\0\0nonsense"
    assert media_identity("image", broken) == media_identity("image", picture("L"))


class Drawn:
    """No Pillow image, but a picture."""

    mode = "L"
    size = (2, 1)

    def tobytes(self) -> bytes:
        return b"ab"

    def getpalette(self, rawmode: str | None = "RGB") -> None:
        assert rawmode is None


class NotLoadedYet(Drawn):
    """Its file says something else than its pixels are, as some do."""

    mode = "P"

    def tobytes(self) -> bytes:
        self.mode = "L"
        return b"ab"


def test_whatever_is_like_a_picture_is_one() -> None:
    expected = media_identity("image", Image.frombytes("L", (2, 1), b"ab"))
    assert media_identity("image", Drawn()) == media_identity("image", NotLoadedYet()) == expected
    strange: Any = Drawn()
    strange.mode = object()
    with pytest.raises(TypeError, match="picture"):
        media_identity("image", strange)


def test_frames_of_an_animation() -> None:
    frames = [picture("L", seed=seed) for seed in range(3)]
    moving = stored(frames[0], "GIF", save_all=True, append_images=frames[1:])
    found = []
    for number in (0, 1, 2, 0):
        moving.seek(number)
        found.append(media_identity("video", moving))
    assert found[0] == found[3]
    assert len(set(found)) == 3
    assert media_identity("video", frames) != media_identity("video", frames[::-1])
