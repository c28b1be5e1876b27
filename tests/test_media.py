"""Media items and identities: what is taken, what is refused, and what makes two of them equal."""

from __future__ import annotations

import copy
import itertools
import pickle
import subprocess
import sys
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sessiontree import (
    LimitExceeded,
    MediaItem,
    MediaSpanError,
    OutOfRange,
    PositionError,
    SessionTreeError,
    Unsupported,
    media_identity,
)
from tests.test_tree import identity

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
    plain = MediaItem("audio", ID, iter([(0, 1)]))
    assert plain.fields() == ("audio", ID, ((0, 1),), None, None, None, (), 0, False)
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
        assert made.fields() == item.fields()
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
