"""Features of media: values that stay what they are, kept under a budget that never takes what somebody holds.

Names carry the rows of CASES.md that a test is for.
"""

from __future__ import annotations

import copy
import gc
import pickle
import random
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import Event, Thread
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from numpy.typing import NDArray

from sessiontree import KeyTaken, LimitExceeded, MediaItem, NeedsMedia, OutOfRange, SessionStore
from sessiontree.features import OVERHEAD_BYTES, Features, FeatureStore
from tests.test_robustness import alarms, coming_in, forked
from tests.test_tree import IMAGE_PAD, identity, image, vl

UNIT = 4096 + OVERHEAD_BYTES  # what `pixels` count


def item(number: int | str, offset: int = 0) -> MediaItem:
    return image(f"image {number}", offset)


def pixels(value: float = 0, size: int = 1024) -> NDArray[np.float32]:
    return np.full(size, value, np.float32)


def units(count: float) -> FeatureStore:
    """A store for so many features of the usual size."""
    return FeatureStore(int(count * UNIT))


def kept(store: FeatureStore) -> list[MediaItem]:
    """The items it keeps, the longest unused first; without using them."""
    return [features.item for features in store._kept.values()]


def audit(store: FeatureStore) -> None:
    """Everything a store says of itself agrees, and with what is really there."""
    held, live = store.held_bytes, {content: entry() for content, entry in store._entries.items()}
    assert len(store) == len(live)
    assert not store._dead
    for content, features in live.items():
        assert features is not None
        assert features.content == content
        assert features._newer == [None]
        assert store._entries[content].nbytes == features.nbytes
    assert held == sum(features.nbytes for features in live.values() if features is not None) <= store.budget_bytes
    for content, features in store._kept.items():
        assert live[content] is features


def base_of(array: Any) -> Any:
    while isinstance(array, np.ndarray):
        array = array.base
    return array


# --- what features are ----------------------------------------------------------------------------------------------------


def test_features_are_what_was_put() -> None:
    store = FeatureStore()
    where = item(1, offset=7)
    grid = np.arange(6, dtype=np.int64).reshape(2, 3)
    features = store.put(where, {"pixels": pixels(3), "grid": grid})
    assert features.item is where
    assert features.content == where.content() == item(1).content()
    assert features.names == tuple(features) == ("pixels", "grid")
    assert ("grid" in features, "other" in features) == (True, False)
    assert (features.dtype("pixels"), features.dtype("grid")) == ("float32", "int64")
    assert features["pixels"].tolist() == [3.0] * 1024
    assert features["grid"].dtype == np.int64
    assert {name: array.tolist() for name, array in features.arrays().items()} == {
        "pixels": [3.0] * 1024,
        "grid": [[0, 1, 2], [3, 4, 5]],
    }
    assert features.nbytes == 4096 + 48 + 2 * OVERHEAD_BYTES == store.held_bytes
    assert store.get(item(1, offset=9)) is features, "wherever it stands"
    assert item(1, offset=3) in store
    assert len(store) == 1
    assert "pixels float32 (1024,)" in repr(features)
    assert repr(store) == f"<FeatureStore of 1 contents: {features.nbytes} of {256 * 2**20} bytes>"
    for call in (features.__getitem__, features.dtype):
        with pytest.raises(KeyError):
            call("other")
    audit(store)


def test_one_array_is_named_features() -> None:
    store = FeatureStore()
    for number, value in enumerate((pixels(), torch.zeros(1024), np.float32(2.5), UserDict(features=pixels()))):
        assert store.put(item(number), value).names == ("features",)
    scalar = store.need([item(2)])[0]["features"]
    assert (scalar.shape, scalar.tolist()) == ((), 2.5)


class Array:
    """Somebody else's array type."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> NDArray[Any]:
        return np.arange(3.0)


ARRAYS: dict[str, Any] = {
    "bool": np.array([True, False]),
    "one byte": np.array([7], np.uint8),
    "no byte": np.zeros((0, 3), np.float32),
    "no dimension": np.array(1.5),
    "half": np.arange(5, dtype=np.float16),
    "complex": np.array([[1j, 2]], np.complex64),
    "transposed": np.arange(12).reshape(3, 4).T,
    "every other": np.arange(12)[::-2],
    "column order": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "big-endian": np.arange(5, dtype=">f8"),
    "broadcast": np.broadcast_to(np.float32(2), (3, 4)),
    "read-only": np.frombuffer(bytes(range(8)), np.uint8),
    "foreign": Array(),
    "tensor": torch.arange(6, dtype=torch.int32).reshape(2, 3).t(),
    "tensor with gradients": torch.ones(3, requires_grad=True) * 2,
    "one byte of a tensor": torch.tensor([3], dtype=torch.int8),
    "no dimension of a tensor": torch.tensor(3.5),
}


@pytest.mark.parametrize("what", ARRAYS)
def test_arrays_of_every_kind_are_kept(what: str) -> None:
    value = ARRAYS[what]
    expected = value.detach().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    store = FeatureStore()
    features = store.put(item(1), {"a": value})
    array = features["a"]
    assert array.shape == expected.shape
    assert array.dtype == expected.dtype.newbyteorder("=")
    assert features.dtype("a") == expected.dtype.name
    assert array.flags.c_contiguous
    assert array.tolist() == expected.tolist()
    assert store.put(item(1), {"a": value}) is features
    assert store.put(item(1), {"a": expected.copy()}) is features, "of the other kind"
    audit(store)


BITS = [
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]


@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_dtypes_without_a_numpy_one_keep_their_bits(dtype: torch.dtype) -> None:
    values = torch.tensor([[0.5, 1.0, 2.0], [4.0, 8.0, 16.0]]).to(dtype)
    store = FeatureStore()
    features = store.put(item(1), {"a": values.t(), "gradients": torch.ones(2, requires_grad=True).to(dtype), "0-d": values[0, 1]})
    width = values.element_size()
    name = str(dtype).removeprefix("torch.")
    assert features.dtype("a") == features.dtype("gradients") == name
    array = features["a"]
    assert array.dtype == np.dtype(f"u{width}")
    assert array.shape == (3, 2)
    assert features["0-d"].shape == ()
    back = torch.from_numpy(array.copy()).view(dtype)
    assert torch.equal(back.to(torch.float32), values.t().to(torch.float32))
    assert features.nbytes == width * 9 + (width == 1) + 3 * OVERHEAD_BYTES
    assert store.put(item(1), {"a": values.t().contiguous()}) is features
    for other in (array, torch.from_numpy(array.copy()), next(torch.zeros(3, 2).to(d) for d in BITS if d != dtype)):
        with pytest.raises(KeyTaken):
            store.put(item(1), {"a": other})  # the same bits as ints are other values


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        "text",
        b"bytes",
        [1.0, 2.0],
        {},
        {"a": None},
        {"a": [1.0]},
        {"a": {}},
        {1: pixels()},
        {None: pixels()},
        {b"a": pixels()},
        {"\ud800": pixels()},
        np.array([object()]),
        np.array(["text"]),
        np.array([b"bytes"]),
        np.array(["text"], np.dtypes.StringDType()),
        np.array([1], "datetime64[s]"),
        np.zeros(2, [("a", "f4")]),
        np.zeros(2, "V4"),
        torch.zeros(3, device="meta"),
        torch.zeros(3, device="meta", dtype=torch.bfloat16),
        torch.zeros(3).to_sparse(),
        {"fine": pixels(), "not": None},
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_array_of_numbers_is_refused(value: Any) -> None:
    store = FeatureStore()
    with pytest.raises(TypeError):
        store.put(item(1), value)
    audit(store)
    assert len(store) == 0


def test_wrong_arguments() -> None:
    store = FeatureStore()
    not_an_item: Any = identity("x")
    for call in (store.get, store.drop, store.__contains__, lambda it: store.need([it]), lambda it: store.put(it, pixels())):
        with pytest.raises(TypeError):
            call(not_an_item)
    for budget in (None, 1.5, True, "1"):
        with pytest.raises(TypeError):
            FeatureStore(cast(Any, budget))
    with pytest.raises(OutOfRange):
        FeatureStore(-1)
    assert FeatureStore(cast(Any, np.int64(5))).budget_bytes == 5
    with pytest.raises(TypeError):
        Features()
    with pytest.raises(TypeError):
        type("Mine", (Features,), {})


# --- C80: frozen ------------------------------------------------------------------------------------------------------------


def test_c80_nothing_reaches_what_is_kept() -> None:
    store = FeatureStore()
    given, batch = pixels(1), torch.ones(2, 8)
    mapping: dict[str, Any] = {"a": given, "t": batch[0], "bits": batch[1].to(torch.bfloat16)}
    features = store.put(item(1), mapping)
    before = {name: array.tobytes() for name, array in features.arrays().items()}
    given[:] = 9
    batch[:] = 9
    mapping.clear()
    assert features.names == ("a", "t", "bits")
    for name, array in features.arrays().items():
        assert not array.flags.writeable
        assert not array.flags.owndata
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
        view = array[:4].view(np.uint8)
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True
        base = base_of(view)
        assert not isinstance(base, np.ndarray)
        with pytest.raises(TypeError):
            memoryview(base)
        again = np.asarray(base)
        with pytest.raises(ValueError, match="WRITEABLE"):
            again.flags.writeable = True
        base.__array_interface__["data"] = (0, False)
        base.__init__(features, None)
        for slot in type(base).__slots__:
            with pytest.raises(AttributeError):
                object.__setattr__(base, slot, None)
        assert array.tobytes() == np.asarray(base).tobytes() == before[name]
    features.arrays().clear()
    assert {name: array.tobytes() for name, array in features.arrays().items()} == before


def test_c80_features_are_sealed() -> None:
    store = FeatureStore()
    features = store.put(item(1), pixels())
    for name in ("item", "content", "names", "nbytes", "_arrays", "_newer", "other", "__class__"):
        for setter in (setattr, object.__setattr__):
            with pytest.raises((AttributeError, TypeError)):
                setter(features, name, None)
    for name in ("item", "nbytes"):
        with pytest.raises(AttributeError):
            delattr(features, name)
    with pytest.raises(TypeError):
        cast(Any, features)["a"] = pixels()
    assert copy.copy(features) is copy.deepcopy(features) is features
    with pytest.raises(TypeError, match="arrays"):
        pickle.dumps(features)
    other = FeatureStore().put(item(1), pixels())
    assert features != other
    assert hash(features) != hash(other)
    assert len({features, other}) == 2


def test_c80_device_copies_live_in_a_side_table() -> None:
    """One object for a content as long as it lives: a weak table keyed by it works across drops, and empties by itself."""
    store = units(1)
    features = store.put(item(1), pixels())
    on_device: weakref.WeakKeyDictionary[Features, str] = weakref.WeakKeyDictionary({features: "copy"})
    array = features["features"]
    del features
    store.drop(item(1))
    store.clear()
    assert on_device[store.need([item(1)])[0]] == "copy"
    del array
    assert on_device[store.put(item(1), pixels())] == "copy"
    store.put(item(2), pixels())
    assert not on_device


# --- C69: which content it is -------------------------------------------------------------------------------------------------


def test_c69_equal_bytes_of_another_shape_or_dtype_are_other_content() -> None:
    store = FeatureStore()
    square = np.zeros((30, 150), np.float32)
    features = store.put(item(1), {"a": square})
    others = [
        square.reshape(150, 30),
        square.ravel(),
        square[None],
        square.view(np.uint32),
        square.view(np.int32),
        square.view(np.uint8),
        torch.zeros(30, 300, dtype=torch.bfloat16),
        square[:-1],
        square + 1,
        -square,
    ]
    for other in others:
        for arrays in ({"a": other}, {"new": other, "a": other}):
            with pytest.raises(KeyTaken, match="'a'") as caught:
                store.put(item(1), arrays)
            assert str(item(1)) in str(caught.value)
            assert (caught.value.key, getattr(caught.value, "item", None)) == ("a", item(1))
    assert store.get(item(1)) is features
    assert features.names == ("a",), "neither the last nor the first wins"
    assert store.held_bytes == features.nbytes
    audit(store)


def test_c69_items_that_differ_in_anything_but_their_place_have_features_of_their_own() -> None:
    store = FeatureStore()
    id_ = identity("x")
    items = [
        MediaItem("image", id_, [(0, 4)]),
        MediaItem("video", id_, [(0, 4)]),
        MediaItem("image", identity("y"), [(0, 4)]),
        MediaItem("image", id_, [(0, 4)], (1, 4, 4)),
        MediaItem("image", id_, [(0, 4)], (1, 2, 8)),
        MediaItem("video", id_, [(0, 4)], (1, 4, 4), 1.0),
        MediaItem("audio", id_, [(0, 4)], None, None, 4),
        MediaItem("image", id_, [(0, 4)], target_sizes=[(2, 2)]),
    ]
    for number, each in enumerate(items):
        store.put(each, pixels(number))
    assert [features["features"][0] for features in store.need(items)] == list(range(len(items)))
    part = MediaItem("image", id_, [(9, 1)], placeholders_before=3, unfinished=True)
    assert store.get(part) is store.get(items[0])


def test_nan_and_negative_zero_are_their_bits() -> None:
    store = FeatureStore()
    values = np.array([np.nan, -0.0], np.float32)
    features = store.put(item(1), values)
    assert store.put(item(1), values.copy()) is features
    with pytest.raises(KeyTaken):
        store.put(item(1), np.array([np.nan, 0.0], np.float32))


# --- putting again, and further names --------------------------------------------------------------------------------------


def test_putting_equal_features_again_changes_nothing() -> None:
    store = units(2)
    features = store.put(item(1), {"a": pixels(), "b": pixels(1, 2)})
    held = store.held_bytes
    assert store.put(item(1, offset=5), {"b": pixels(1, 2)}) is features
    assert store.put(item(1), {"a": torch.zeros(1024), "b": pixels(1, 2)}) is features
    assert store.held_bytes == held
    assert features.item.spans == ((0, 4),)


def test_a_further_name_makes_features_with_both_that_take_their_place() -> None:
    store = FeatureStore(4 * UNIT)
    first = store.put(item(1), {"pixels": pixels(1)})
    store.put(item(2), pixels(2))
    both = store.put(item(1), {"pixels": pixels(1), "encoded": pixels(3)})
    assert both is not first
    assert (first.names, both.names) == (("pixels",), ("pixels", "encoded"))
    assert store.get(item(1)) is both
    assert both["pixels"].ctypes.data == first["pixels"].ctypes.data, "no second copy"
    assert store.held_bytes == both.nbytes + UNIT == 3 * UNIT, "shared arrays count once"
    assert kept(store) == [item(2), item(1)]
    third = store.put(item(1), {"more": pixels(4)})
    assert third.names == ("pixels", "encoded", "more")
    assert store.held_bytes == 4 * UNIT
    audit(store)
    store.clear()
    del both, third
    assert store.held_bytes == 3 * UNIT, "whoever holds the first holds what took its place: there is one of a content"
    found = store.get(item(1))
    assert found is not None
    assert found.names == ("pixels", "encoded", "more")
    del first
    assert store.held_bytes == 3 * UNIT
    store.drop(item(1))
    del found
    assert store.held_bytes == 0
    assert len(store) == 0
    audit(store)


def test_what_is_replaced_and_not_held_is_gone() -> None:
    store = units(2)
    first = weakref.ref(store.put(item(1), {"pixels": pixels(1)}))
    store.put(item(1), {"encoded": pixels(3)})
    assert first() is None
    assert store.held_bytes == 2 * UNIT
    audit(store)


def test_an_encoder_output_fits_beside_pixels_that_are_held() -> None:
    """Only what is new needs room: the usual step of an engine that holds the pixels while it encodes them."""
    store = units(2)
    (first,) = (store.put(item(1), {"pixels": pixels(1)}),)
    both = store.put(item(1), {"encoded": pixels(2)})
    assert store.held_bytes == both.nbytes == 2 * UNIT
    with pytest.raises(LimitExceeded):
        store.put(item(1), {"more": pixels()})
    assert store.get(item(1)) is both
    assert first.names == ("pixels",)
    audit(store)


def test_a_long_line_of_replacements_is_freed_without_recursion() -> None:
    store = FeatureStore(2**40)
    oldest = store.put(item(1), {"0": np.zeros(1)})
    chain = oldest
    # Made by hand: 50,000 puts of ever more names would take their square.
    for number in range(10_000):
        newer = store.put(item(number), np.zeros(1))
        chain._newer[0] = newer
        chain = newer
    del chain, newer
    assert store.held_bytes > 0
    store.clear()
    del oldest
    assert store.held_bytes == 0


# --- the budget -----------------------------------------------------------------------------------------------------------


def test_the_longest_unused_goes_first() -> None:
    store = units(3)
    for number in (1, 2, 3):
        store.put(item(number), pixels(number))
    store.get(item(1))
    assert item(2) in store
    store.put(item(4), pixels(4))
    assert kept(store) == [item(3), item(1), item(4)]
    store.need([item(1), item(3)])
    store.put(item(5), pixels())
    assert kept(store) == [item(1), item(3), item(5)]
    store.put(item(1), pixels(1))
    store.put(item(6), pixels())
    assert kept(store) == [item(5), item(1), item(6)]
    with pytest.raises(NeedsMedia):
        store.need([item(99), item(5)])  # what it found is used all the same
    store.put(item(7), pixels())
    assert kept(store) == [item(6), item(5), item(7)]
    assert store.get(item(2)) is None
    audit(store)


def test_no_more_is_evicted_than_has_to_be() -> None:
    store = units(4)
    for number in range(4):
        store.put(item(number), pixels())
    big = store.put(item("big"), pixels(0, 2 * (4096 + OVERHEAD_BYTES) // 4 - OVERHEAD_BYTES // 4))
    assert big.nbytes == 2 * UNIT
    assert kept(store) == [item(2), item(3), item("big")]
    assert store.held_bytes == store.budget_bytes
    store.put(item("tiny"), np.zeros(0))
    assert kept(store) == [item(3), item("big"), item("tiny")]
    audit(store)


def hold_features(features: Features) -> Any:
    return features


def hold_an_array(features: Features) -> Any:
    return features["features"]


def hold_a_view(features: Features) -> Any:
    return features["features"][3:5].view(np.uint8)


def hold_a_tensor(features: Features) -> Any:
    return torch.from_numpy(features["features"])[1:]


def hold_a_memoryview(features: Features) -> Any:
    return memoryview(cast(Any, features["features"]))


HOLDS = [hold_features, hold_an_array, hold_a_view, hold_a_tensor, hold_a_memoryview]


@pytest.mark.parametrize("hold", HOLDS)
def test_c77_what_a_request_holds_is_never_evicted(hold: Callable[[Features], Any]) -> None:
    store = units(3)
    held = hold(store.put(item("mine"), pixels(7)))
    for number in range(10):
        store.put(item(number), pixels(number))
        audit(store)
    assert kept(store) == [item("mine"), item(8), item(9)]
    store.drop(item("mine"))
    assert store.held_bytes == 3 * UNIT, "dropped and still held: still counted"
    assert len(store) == 3
    store.put(item(10), pixels())
    assert kept(store) == [item(9), item(10)]
    assert item("mine") in store
    assert store.need([item("mine")])[0]["features"][0] == 7, "and found again"
    assert kept(store) == [item(9), item(10), item("mine")]
    store.clear()
    assert store.held_bytes == UNIT
    del held
    assert store.held_bytes == 0
    assert item("mine") not in store
    assert store.get(item("mine")) is None
    audit(store)


def test_c77_the_items_of_one_request_cannot_evict_each_other() -> None:
    """Not if they are put one by one, at the limit, beside the items of others."""
    store = units(4)
    for number in range(4):
        store.put(item(f"old {number}"), pixels())
    items = [item(number) for number in range(4)]
    request = [store.put(each, pixels(number)) for number, each in enumerate(items)]
    assert list(store.need(items)) == request
    with pytest.raises(LimitExceeded):
        store.put(item("fifth"), pixels())
    assert list(store.need(items)) == request
    assert [features["features"][0] for features in request] == [0, 1, 2, 3]
    audit(store)


def test_c77_items_that_go_between_two_steps_are_named_not_a_key_error() -> None:
    store = units(2)
    items = [item(number) for number in range(4)]
    for each in items:
        store.put(each, pixels())
    with pytest.raises(NeedsMedia) as caught:
        store.need(items)
    assert caught.value.items == (items[0], items[1])


def test_what_does_not_fit_changes_nothing() -> None:
    store = units(4)
    held = [store.put(item(f"held {number}"), pixels()) for number in range(2)]
    features = [store.put(item(number), pixels(number)) for number in range(2)]
    ends = [weakref.ref(each) for each in features]
    order = kept(store)
    del features
    for number, size in ((9, 4096), (1, 4096)):  # a new content; a further name of one that is kept
        value = {"big": pixels(0, size)}
        with pytest.raises(LimitExceeded) as caught:
            store.put(item(number), value)
        assert caught.value.limit == 4 * UNIT
        assert caught.value.value == 4 * UNIT - (2 * UNIT if number == 9 else UNIT) + size * 4 + OVERHEAD_BYTES
        assert str(item(number)) in str(caught.value)
    with pytest.raises(LimitExceeded) as caught:
        store.put(item(10), pixels(0, 100_000))
    assert (caught.value.value, caught.value.limit) == (400_000 + OVERHEAD_BYTES, 4 * UNIT)
    assert all(end() is not None for end in ends), "nothing was evicted"
    assert kept(store) == order
    assert store.held_bytes == 4 * UNIT
    assert len(store) == 4
    audit(store)
    del held
    assert store.put(item(9), {"big": pixels(0, 4096)}).nbytes == 4 * 4096 + OVERHEAD_BYTES
    audit(store)


def test_what_can_never_fit_is_not_even_copied() -> None:
    store = FeatureStore(10_000)
    tracemalloc.start()
    try:
        with pytest.raises(LimitExceeded):
            store.put(item(1), np.broadcast_to(np.float32(0), (2**40,)))  # four TiB
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    for budget in (0, UNIT - 1):
        with pytest.raises(LimitExceeded):
            FeatureStore(budget).put(item(1), pixels())
    assert FeatureStore(UNIT).put(item(1), pixels()).nbytes == UNIT


def test_arrays_without_values_fill_a_budget_too() -> None:
    store = FeatureStore(20 * OVERHEAD_BYTES)
    for number in range(100):
        store.put(item(number), np.zeros(0))
    assert len(store) == 20


def test_an_error_that_somebody_keeps_holds_nothing() -> None:
    store = units(2)
    store.put(item(1), pixels())
    store.put(item(2), pixels())
    errors: list[Exception] = []
    for call in (
        lambda: store.put(item(1), pixels(1)),
        lambda: store.put(item(1), {"more": pixels(1, 2048)}),
        lambda: store.need([item(1), item(2), item(3)]),
    ):
        try:
            call()
        except (KeyTaken, LimitExceeded, NeedsMedia) as error:
            errors.append(error)
    assert len(errors) == 3
    store.clear()
    assert store.held_bytes == 0


# --- C73, C74: bytes that are really held ---------------------------------------------------------------------------------


@contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """Bytes allocated since."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield lambda: (gc.collect(), tracemalloc.get_traced_memory()[0] - before)[1]
    finally:
        tracemalloc.stop()


def test_c73_a_row_does_not_keep_its_batch() -> None:
    row_bytes = 256 * 1024
    for warm in (False, True):
        store = FeatureStore()
        store.put(item(0), pixels())
        with traced() as allocated:
            batch = np.full((64, row_bytes // 8), 1.5)
            features = store.put(item(1), batch[3])
            assert allocated() > 64 * row_bytes
            del batch
            retained = allocated()
        assert features["features"].tolist() == [1.5] * (row_bytes // 8)
        assert retained <= 2 * row_bytes
        assert features.nbytes == row_bytes + OVERHEAD_BYTES
        assert not warm or abs(retained - features.nbytes) <= OVERHEAD_BYTES


def test_c73_a_row_of_a_tensor_does_not_keep_its_batch() -> None:
    store = FeatureStore()
    for number, dtype in enumerate((torch.float32, torch.bfloat16)):
        batch = torch.zeros(64, 4096, dtype=dtype)
        freed = weakref.ref(batch.untyped_storage())
        features = store.put(item(number), batch[3])
        batch_end = weakref.ref(batch)
        del batch
        assert batch_end() is None
        assert freed() is None
        assert features.nbytes == 4096 * dtype.itemsize + OVERHEAD_BYTES
        base = base_of(features["features"])
        assert len(base._array.data) == 4096 * dtype.itemsize
        assert type(base._array.data) is bytes


def test_c73_the_account_is_what_is_allocated() -> None:
    """Within a third of ``OVERHEAD_BYTES`` an array, whatever the size."""
    for size in (0, 4096, 65_536):
        store = FeatureStore(2**30)
        store.put(item("first"), np.zeros(1))
        held = store.held_bytes
        value = np.zeros(size, np.uint8)
        with traced() as allocated:
            for number in range(200):
                store.put(item(number), value)
            measured, counted = allocated(), store.held_bytes - held
        assert counted - 200 * OVERHEAD_BYTES * 0.3 <= measured <= counted
        store.clear()
        assert store.held_bytes == 0


def test_c74_ten_thousand_frames_take_no_more_than_the_budget() -> None:
    store = FeatureStore(2**20)
    frame = np.zeros((3, 28, 28), np.float32)
    store.put(item(0), frame)
    with traced() as allocated:
        for number in range(10_000):
            store.put(item(number), frame)
            assert store.held_bytes <= 2**20
        assert allocated() <= 2**20 + 20_000
        peak = tracemalloc.get_traced_memory()[1]
    assert peak <= 2**20 + 200_000
    assert len(store) == 2**20 // (frame.nbytes + OVERHEAD_BYTES)
    assert kept(store)[-1] == item(9_999)
    assert len(store._entries) == len(store), "nothing is left of the others"
    audit(store)


def test_c74_features_that_are_put_and_dropped_leave_nothing() -> None:
    store = FeatureStore()
    frame = np.zeros(4, np.float32)
    store.put(item(0), frame)
    with traced() as allocated:
        for number in range(1_000):
            store.put(item(number), frame)
            store.drop(item(number))
            if number % 100 == 0:
                assert len(store) == 0
        assert len(store) == 0
        assert allocated() < 50_000


# --- C75, C76: needed again, and gone -------------------------------------------------------------------------------------


def test_c75_what_is_missing_is_named() -> None:
    store = FeatureStore()
    store.put(item(2), pixels(2))
    wanted = [item(3, 1), item(2), item(1), item(3, 5), item(2, 9)]
    with pytest.raises(NeedsMedia) as caught:
        store.need(iter(wanted))
    assert caught.value.items == (item(3, 1), item(1)), "in their order, each content once"
    assert str(item(3)) in str(caught.value)
    assert str(item(1)) in str(caught.value)
    for each in caught.value.items:
        store.put(each, pixels())
    found = store.need(wanted)
    assert [features.content for features in found] == [each.content() for each in wanted]
    assert found[0] is found[3]
    assert store.need([]) == ()
    many = [item(f"missing {number}") for number in range(1000)]
    with pytest.raises(NeedsMedia, match="and 992 more") as caught:
        store.need(many)
    assert caught.value.items == tuple(many)


def test_c76_nodes_need_no_features() -> None:
    store = units(2)
    session = SessionStore.in_memory().create("s", scheme=vl())
    picture = image("picture", 1)
    with_features = store.put(picture, pixels())
    node = session.append(session.root, [1, *[IMAGE_PAD] * 4, 2], media=[picture])
    before = (node.positions().tolist(), node.mrope_position_delta, node.media_spans(), node.media)
    end = weakref.ref(with_features)
    del with_features
    store.clear()
    assert end() is None
    assert before == (node.positions().tolist(), node.mrope_position_delta, node.media_spans(), node.media)
    assert session.append(node, [3]).positions(6, 7).tolist() == [[4]] * 3
    with pytest.raises(NeedsMedia):
        store.need(node.media)


# --- lives and deaths -------------------------------------------------------------------------------------------------------


def test_the_store_lets_go_at_once() -> None:
    store = units(1)
    end = weakref.ref(store.put(item(1), pixels()))
    assert end() is not None, "it is kept though nobody else holds it"
    store.put(item(2), pixels())
    assert end() is None
    end = weakref.ref(store.put(item(2), pixels()))
    store.drop(item(2))
    assert item(2) not in store
    store.drop(item(2))
    assert end() is None
    array = store.put(item(3), pixels(3))["features"]
    whole = weakref.ref(store)
    del store
    assert whole() is None
    assert array[0] == 3, "arrays outlive their store"


def test_features_in_a_cycle_are_held_until_it_is_collected() -> None:
    store = units(1)
    gc.disable()
    try:
        cycle: list[Any] = [store.put(item(1), pixels())["features"]]
        cycle.append(cycle)
        del cycle
        with pytest.raises(LimitExceeded):
            store.put(item(2), pixels())
        gc.collect()
        store.put(item(2), pixels())
    finally:
        gc.enable()
    assert kept(store) == [item(2)]


def test_whoever_is_told_of_an_end_may_use_the_store_from_any_thread() -> None:
    """What runs when features die runs without the store's lock: it may wait for a thread that waits for the store."""
    store = units(1)
    outcomes: list[bool] = []

    def elsewhere() -> None:
        thread = Thread(target=lambda: (store.get(item("x")), store.held_bytes), daemon=True)
        thread.start()
        thread.join(2)
        outcomes.append(not thread.is_alive())

    for number in range(3):
        weakref.finalize(store.put(item(number), pixels()), elsewhere)
    store.drop(item(2))
    weakref.finalize(store.put(item(3), pixels()), elsewhere)
    store.clear()
    store = units(2)
    weakref.finalize(store.put(item(4), pixels()), elsewhere)
    store.put(item(4), {"more": pixels()})
    assert outcomes == [True] * 5


def test_who_takes_features_by_a_weak_reference_while_they_go_keeps_them() -> None:
    """Told of the end of one, another thread takes the next that was to go: it stays, and the next after it goes."""
    store = units(3)
    ends = [weakref.ref(store.put(item(number), pixels(number))) for number in range(3)]
    taken: list[Features | None] = []
    for number in (0, 1):
        features = ends[number]()
        assert features is not None
        weakref.finalize(features, lambda other: taken.append(ends[other]()), 1 - number)
    del features
    store.put(item("big"), pixels(0, (2 * UNIT - OVERHEAD_BYTES) // 4))
    (survivor,) = taken
    assert survivor is not None
    assert sum(end() is not None for end in ends) == 1
    assert set(map(str, kept(store))) == {str(survivor.item), str(item("big"))}
    assert store.get(survivor.item) is survivor
    audit(store)


def test_references_that_are_miscounted_cost_no_features_that_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """They only plan; weak references have the last word, and the search for room comes to an end."""
    store = units(3)
    held = [store.put(item(number), pixels(number)) for number in range(2)]
    store.put(item(2), pixels(2))
    calls = 0

    def none(table: Any, key: Any) -> int:
        nonlocal calls
        calls += 1
        assert calls < 100
        return 0

    monkeypatch.setattr("sessiontree.features._references", none)
    store.put(item(3), pixels(3))
    assert item(2) not in store
    with pytest.raises(LimitExceeded):
        store.put(item(4), pixels(0, 2048))
    assert list(store.need([item(0), item(1)])) == held
    audit(store)


# --- coming in between ------------------------------------------------------------------------------------------------------


def stocked(size: int) -> FeatureStore:
    """A store with three contents that nobody else holds: full if it is of size 3."""
    store = units(size)
    for number in (1, 2, 3):
        store.put(item(number), {"a": pixels(number)})
    return store


def step(store: FeatureStore, what: str, held: list[Features]) -> None:
    """One call, whatever it returns being held."""
    with suppress(LimitExceeded, NeedsMedia, KeyTaken):
        if what == "put":
            held.append(store.put(item(4), {"a": pixels(4)}))
        elif what == "put other":
            held.append(store.put(item(5), {"a": pixels(5)}))
        elif what == "put again":
            held.append(store.put(item(1), {"a": pixels(1)}))
        elif what == "put further":
            held.append(store.put(item(1), {"b": pixels(6)}))
        elif what == "put another further":
            held.append(store.put(item(1), {"c": pixels(7)}))
        elif what == "put clash":
            held.append(store.put(item(4), {"a": pixels(8)}))
        elif what == "get":
            held += [features for features in (store.get(item(1)), store.get(item(4))) if features]
        elif what == "need":
            held += store.need([item(1), item(2)])
        elif what == "drop":
            store.drop(item(1))
            store.drop(item(4))
        elif what == "clear":
            store.clear()
        elif what == "let go":
            held.clear()
        else:
            assert store.held_bytes <= store.budget_bytes
            assert len(store) <= 5
            assert isinstance(item(4) in store, bool)


STEPS = ["put", "put again", "put further", "get", "need", "drop", "clear", "read"]
BETWEEN = ["put", "put other", "put another further", "put clash", "get", "need", "drop", "clear", "let go", "read"]


def one_of_each(store: FeatureStore, held: list[Features]) -> None:
    """What is held is in the store, under its content, in one object; later ones have all names of earlier ones."""
    audit(store)
    for features in held:
        current = store.get(features.item)
        assert current is not None
        assert set(features.names) <= set(current.names)
        assert features is current or features._newer[0] is not None
        for name in features:
            assert current[name].tobytes() == features[name].tobytes()
    audit(store)


PLACES = [(3, what, between) for what in STEPS for between in BETWEEN]
PLACES += [(6, what, between) for _, what, between in PLACES if what.startswith("put") and between.startswith("put")]


@pytest.mark.parametrize(("size", "what", "between"), PLACES)
def test_whatever_comes_in_between(size: int, what: str, between: str) -> None:
    places = 0
    while True:
        store = stocked(size)
        held: list[Features] = []
        with coming_in(places, partial(step, store, between, held)) as ran:
            step(store, what, held)
        if not ran:
            break
        one_of_each(store, held)
        if what.startswith("put") and between in ("put", "put again", "clear", "let go", "drop", "read"):
            assert held or between == "let go", "nothing was in its way"
        with suppress(LimitExceeded):  # where what came in between took all there is
            held.append(store.put(item(4), {"d": pixels()}))
        one_of_each(store, held)
        held.clear()
        store.clear()
        assert store.held_bytes == len(store) == 0
        places += 1
    assert places > 1


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("what", STEPS)
def test_interrupted_anywhere_a_store_goes_on(what: str) -> None:
    places = 0
    while True:
        store = stocked(3)
        held: list[Features] = []
        with suppress(KeyboardInterrupt), coming_in(places, interrupt) as ran:
            step(store, what, held)
        if not ran:
            break
        one_of_each(store, held)
        for number in range(10, 14):
            store.put(item(number), pixels())
            audit(store)
        assert not store._lock._is_owned()
        places += 1
    assert places > 1


def test_a_signal_handler_uses_the_store_it_interrupts() -> None:
    store = units(6)
    handled = 0
    busy = False
    mine: list[Features] = []

    def handler() -> None:
        nonlocal handled, busy
        if busy:
            return
        busy = True
        handled += 1
        with suppress(LimitExceeded):
            mine.append(store.put(item(handled % 7), {"handler's": pixels()}))
        store.get(item(handled % 5))
        if handled % 3 == 0:
            mine.clear()
            store.drop(item(handled % 7))
        busy = False

    with alarms(handler, 0.001):
        end = time.monotonic() + 0.5
        number = 0
        while time.monotonic() < end:
            number += 1
            with suppress(LimitExceeded):
                features = store.put(item(number % 7), {"a": pixels(number % 7)})
                assert features["a"][0] == number % 7
            if number % 4 == 0:
                store.drop(item(number % 5))
    assert handled > 30
    del features
    one_of_each(store, mine)
    mine.clear()
    store.clear()
    assert store.held_bytes == 0


def test_garbage_collected_in_the_middle() -> None:
    """Finalizers that put and drop, run by a collector that comes at every turn."""
    store = units(5)
    thresholds = gc.get_threshold()

    class Cycle:
        def __init__(self, number: int, features: Features) -> None:
            self.me, self.number, self.features = self, number, features

        def __del__(self) -> None:
            with suppress(LimitExceeded):
                store.put(item(self.number % 11), {"a": pixels(self.number % 11)})
            store.drop(item(self.number % 5))

    gc.set_threshold(3, 2, 2)
    try:
        for number in range(1_500):
            with suppress(LimitExceeded):
                Cycle(number * 7, store.put(item(number % 11), {"a": pixels(number % 11)}))
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    audit(store)
    store.clear()
    gc.collect()
    store.clear()
    assert store.held_bytes == 0


# --- threads and forks --------------------------------------------------------------------------------------------------------


@contextmanager
def switching_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def test_threads_share_a_store() -> None:
    store = FeatureStore(24 * (256 + OVERHEAD_BYTES))
    errors: list[BaseException] = []
    start = threading.Barrier(4)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        holding: list[Features] = []
        try:
            start.wait()
            for _ in range(600):
                number = rng.randrange(30)
                name = rng.choice("ab")
                match rng.randrange(6):
                    case 0 | 1 | 2:
                        with suppress(LimitExceeded):
                            features = store.put(item(number), {name: pixels(number, 64)})
                            assert features[name][63] == number
                            holding.append(features)
                    case 3:
                        found = store.get(item(number))
                        assert found is None or all(found[each][0] == number for each in found)
                    case 4:
                        store.drop(item(number))
                    case 5:
                        assert 0 <= store.held_bytes <= store.budget_bytes
                del holding[: len(holding) - 3]
                for features in holding:
                    current = store.get(features.item)
                    assert current is not None
                    assert set(features.names) <= set(current.names)
        except BaseException as error:
            errors.append(error)
        finally:
            holding.clear()
            features = found = current = None  # type: ignore[assignment]

    with switching_often():
        threads = [Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert not errors, errors
    audit(store)
    store.clear()
    assert store.held_bytes == 0


def test_threads_that_put_one_content_get_one_object() -> None:
    for _ in range(30):
        store = FeatureStore()
        start = threading.Barrier(4)
        made: list[Features] = []

        def work(store: FeatureStore = store, start: threading.Barrier = start, made: list[Features] = made) -> None:
            start.wait()
            made.append(store.put(item(1), pixels()))

        with switching_often():
            threads = [Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert len(made) == 4
        assert len(set(made)) == 1
        audit(store)


def test_copying_holds_no_lock() -> None:
    store = FeatureStore()
    inside, go_on = Event(), Event()

    class Slow:
        def __array__(self, dtype: Any = None, copy: Any = None) -> NDArray[Any]:
            inside.set()
            assert go_on.wait(5)
            return pixels(5)

    thread = Thread(target=store.put, args=(item(1), Slow()))
    thread.start()
    assert inside.wait(5)
    store.put(item(2), pixels())
    assert store.get(item(1)) is None
    go_on.set()
    thread.join(5)
    assert store.need([item(1)])[0]["features"][0] == 5


def test_a_forked_child_goes_on() -> None:
    store = units(6)
    mine = store.put(item("mine"), pixels(8))
    stop = Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            number = 0
            while not stop.is_set():
                number += 1
                store.put(item(number % 9), {"a": pixels(number % 9)})
                store.put(item(number % 9), {"b": pixels()})
                store.drop(item(number % 4))
        except BaseException as error:
            errors.append(error)

    def child() -> None:
        audit(store)
        assert store.get(item("mine")) is mine
        for number in range(100, 110):
            assert store.put(item(number), pixels(number))["features"][0] == number
            audit(store)
        store.clear()
        assert mine["features"][0] == 8

    with switching_often():
        thread = Thread(target=work, daemon=True)
        thread.start()
        try:
            exits = []
            for _ in range(12):
                time.sleep(0.002)
                exits.append(forked(child))
                if exits[-1] is None:
                    break
        finally:
            stop.set()
            thread.join(5)
    assert not errors
    assert exits == [0] * 12
    audit(store)


def test_no_torch_is_loaded() -> None:
    code = (
        "import sys, numpy; from sessiontree.features import FeatureStore; from sessiontree import MediaItem\n"
        "store = FeatureStore(); store.put(MediaItem('image', bytes(32), [(0, 1)]), numpy.zeros(3))\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- against a naive model --------------------------------------------------------------------------------------------------

NAMES = ("a", "b", "c")
SIZES = (0, 100, 1000, 5000)


class Budget(RuleBasedStateMachine):
    """A store beside a table of what it should hold: {number: {name: (size, value)}}, what is kept, what is held."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = 12_000 + 5 * OVERHEAD_BYTES
        self.store = FeatureStore(self.limit)
        self.live: dict[int, dict[str, tuple[int, int]]] = {}
        self.kept: list[int] = []
        self.handles: list[tuple[int, Any]] = []
        self.objects: dict[int, weakref.ref[Features]] = {}
        self.gone: list[weakref.ref[Features]] = []

    def bytes_of(self, arrays: dict[str, tuple[int, int]]) -> int:
        return sum(size + OVERHEAD_BYTES for size, _ in arrays.values())

    def use(self, number: int) -> None:
        if number in self.kept:
            self.kept.remove(number)
        self.kept.append(number)

    def bury(self) -> None:
        held = {number for number, _ in self.handles}
        for number in set(self.live) - set(self.kept) - held:
            del self.live[number]
            self.gone.append(self.objects.pop(number))

    @rule(
        number=st.integers(0, 5),
        names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True),
        size=st.sampled_from(SIZES),
        value=st.sampled_from((0, 0, 0, 1)),
        hold=st.sampled_from(("no", "no", "features", "array")),
    )
    def put(self, number: int, names: list[str], size: int, value: int, hold: str) -> None:
        value = value if size else 0
        given_arrays = {name: (size, value) for name in names}
        arrays = {name: np.full(size, value, np.uint8) for name in names}
        known = self.live.get(number, {})
        if self.bytes_of(given_arrays) <= self.limit and any(
            known.get(name, given_arrays[name]) != (size, value) for name in names
        ):
            with pytest.raises(KeyTaken):
                self.store.put(item(number), arrays)
            return
        after = {**known, **given_arrays}
        held = {each for each, _ in self.handles}
        growth, evicted = self.bytes_of(after) - self.bytes_of(known), []
        total = sum(map(self.bytes_of, self.live.values())) + growth
        for each in self.kept:
            if total <= self.limit or after == known:
                break
            if each not in held and each != number:
                evicted.append(each)
                total -= self.bytes_of(self.live[each])
        if total > self.limit and after != known:
            with pytest.raises(LimitExceeded) as caught:
                self.store.put(item(number), arrays)
            assert (caught.value.value, caught.value.limit) == (total, self.limit)
            return
        features = self.store.put(item(number), arrays)
        assert set(features.names) == set(after)
        if after == known:
            assert self.objects[number]() is features
        for each in evicted:
            self.kept.remove(each)
        self.live[number] = after
        self.objects[number] = weakref.ref(features)
        self.use(number)
        self.bury()
        if hold != "no":
            self.handles.append((number, features if hold == "features" else features[names[0]]))

    @rule(number=st.integers(0, 5), hold=st.booleans())
    def get(self, number: int, hold: bool) -> None:
        features = self.store.get(item(number))
        if number not in self.live:
            assert features is None
            return
        assert features is not None
        assert features is self.objects[number]()
        self.use(number)
        if hold:
            self.handles.append((number, features))

    @rule(numbers=st.lists(st.integers(0, 5), max_size=4))
    def need(self, numbers: list[int]) -> None:
        missing = tuple(item(number) for number in dict.fromkeys(numbers) if number not in self.live)
        if missing:
            with pytest.raises(NeedsMedia) as caught:
                self.store.need(map(item, numbers))
            assert caught.value.items == missing
        else:
            assert self.store.need(map(item, numbers)) == tuple(self.objects[number]() for number in numbers)
        for number in numbers:
            if number in self.live:
                self.use(number)

    @rule(number=st.integers(0, 5))
    def drop(self, number: int) -> None:
        self.store.drop(item(number))
        if number in self.kept:
            self.kept.remove(number)
        self.bury()

    @rule(sure=st.sampled_from((False, False, True)))
    def clear(self, sure: bool) -> None:
        if sure:
            self.store.clear()
            self.kept.clear()
            self.bury()

    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        if self.handles:
            del self.handles[data.draw(st.integers(0, len(self.handles) - 1))]
            self.bury()

    @invariant()
    def agrees(self) -> None:
        audit(self.store)
        assert kept(self.store) == [item(number) for number in self.kept]
        assert len(self.store) == len(self.live)
        assert self.store.held_bytes == sum(map(self.bytes_of, self.live.values())) <= self.limit
        assert not [end for end in self.gone if end() is not None]
        for number in range(6):
            assert (item(number) in self.store) == (number in self.live)
        for number, arrays in self.live.items():
            features = self.objects[number]()
            assert features is not None
            assert {name: (features[name].size, features[name].tobytes()[:1]) for name in features} == {
                name: (size, bytes([value])[: min(size, 1)]) for name, (size, value) in arrays.items()
            }


TestBudget = Budget.TestCase
TestBudget.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    dtype=st.sampled_from(["u1", "i2", ">i4", "f2", ">f4", "f8", "c8", "?"]),
    transposed=st.booleans(),
    seed=st.integers(0, 5),
)
def test_arrays_come_back(shape: list[int], dtype: str, transposed: bool, seed: int) -> None:
    values = (np.random.default_rng(seed).random(shape) * 100).astype(dtype)
    values = values.T if transposed else values
    array = FeatureStore().put(item(1), values)["features"]
    assert array.shape == values.shape
    assert array.dtype == values.dtype.newbyteorder("=")
    assert np.array_equal(array, values)
