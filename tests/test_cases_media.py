"""CASES.md, what media are: identities, prefix keys, fields without a name, parts, cuts; the rows' own numbers, and their kinds."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from engine_bridge import request_inputs
from sessiontree import Edit, MediaItem, MediaSpanError, Node, Session, media_identity
from sessiontree.placeholders import compact, expand, pad_sequence, pad_values
from tests import reference as ref
from tests.reference import RULES, Segment
from tests.toy import (
    A_IDS,
    A_TABLE,
    IMG,
    PAD_VALUE,
    VE,
    VS,
    Block,
    a_turn,
    attack_array,
    attack_slots,
    blocks,
    check,
    fingerprint,
    grow,
    image,
    media,
    new_session,
    plain,
    refuses,
    reply,
    same,
    shown,
    toy_scheme,
    tree_digest,
    turn,
    video,
)

EXAMPLES = settings(max_examples=40, deadline=None)


def identity(name: str) -> bytes:
    return sha256(name.encode()).digest()


def an_image(name: str, offset: int, grid: tuple[int, int, int] = (1, 4, 4), **more: Any) -> MediaItem:
    frames, height, width = grid
    spans = more.pop("spans", [(offset, frames * height * width // 4)])
    return MediaItem("image", identity(name), spans, grid, **more)


# --- C69, D40: an identity is the content -----------------------------------------------------------------------------
def different(contents: Mapping[str, Any]) -> None:
    """Every content has an identity of its own, 32 bytes, and the same one each time."""
    found = {name: media_identity("image", content) for name, content in contents.items()}
    assert {len(one) for one in found.values()} == {32}
    for (name, one), (other, two) in itertools.combinations(found.items(), 2):
        assert one != two, (name, other)
    assert found == {name: media_identity("image", content) for name, content in contents.items()}


RAW = np.random.default_rng(69).integers(0, 256, 30 * 150 * 4, dtype=np.uint8)


def test_c69_equal_bytes_of_another_shape_or_dtype() -> None:
    wide = RAW[: 30 * 150].reshape(30, 150)
    arrays = {
        "30x150": wide,
        "150x30": wide.reshape(150, 30),
        "flat": wide.reshape(-1),
        "one of 30x150": wide[None],
        "30x150x1": wide[..., None],
        "turned": wide.T,
        "bytes": wide.tobytes(),
        "rows": list(wide),
        "float32": RAW.view(np.float32).reshape(30, 150),
        "uint8 view": RAW.reshape(30, 150, 4),
        "uint8, 600 wide": RAW.reshape(30, 600),
        **{
            dtype: RAW.view(dtype)
            for dtype in ("<i4", "<u4", ">u4", ">f4", "<f8", "<i8", "<c8", "<f2", "i1", "V4", "S4", "<m8[s]", "<M8[s]")
        },
        **{f"records {dtype}": RAW.view(dtype) for dtype in ("<u2,<u2", "<i2,<u2", "u1,u1,<u2")},
        "all": RAW,
    }
    different(arrays)


def test_c69_list_boundaries() -> None:
    one, two, three, four, five = (np.array([number]) for number in range(1, 6))
    joined = np.concatenate
    different(
        {
            "[[1, 2], [3, 4, 5]]": [[1, 2], [3, 4, 5]],
            "[[1, 2, 3], [4, 5]]": [[1, 2, 3], [4, 5]],
            "[1, 2, 3, 4, 5]": [1, 2, 3, 4, 5],
            "[[1, 2, 3, 4, 5]]": [[1, 2, 3, 4, 5]],
            "[[], [1, 2, 3, 4, 5]]": [[], [1, 2, 3, 4, 5]],
            "[[1, 2, 3, 4, 5], []]": [[1, 2, 3, 4, 5], []],
            "arrays of 2 and 3": [joined([one, two]), joined([three, four, five])],
            "arrays of 3 and 2": [joined([one, two, three]), joined([four, five])],
            "array": joined([one, two, three, four, five]),
            "arrays of 1": [one, two, three, four, five],
            "bytes of 2 and 3": [b"ab", b"cde"],
            "bytes of 3 and 2": [b"abc", b"de"],
            "bytes": b"abcde",
        }
    )


def pictures(raw: bytes, sizes: Sequence[tuple[int, int]], modes: Sequence[str]) -> dict[str, Image.Image]:
    return {f"{mode} {size}": Image.frombytes(mode, size, raw) for mode in modes for size in sizes}


def test_c69_pictures() -> None:
    grey = RAW[: 30 * 150].tobytes()
    sizes = [(30, 150), (150, 30)]
    coloured: dict[str, Any] = pictures(grey, sizes, ["L", "P"])
    for name, colours in {"colours": range(256 * 3), "others": range(1, 256 * 3 + 1)}.items():
        coloured[name] = Image.frombytes("P", (30, 150), grey)
        coloured[name].putpalette([colour % 256 for colour in colours])
    assert len({one.tobytes() for one in coloured.values()}) == 1
    coloured |= pictures(RAW.tobytes(), sizes, ["RGBA", "CMYK", "RGBX", "I", "F"])
    coloured |= {"array": np.asarray(coloured["L (30, 150)"]), "bytes": grey}
    different(coloured)
    converted = coloured["colours"].convert("RGB")
    assert media_identity("image", converted) == media_identity("image", Image.frombytes("RGB", (30, 150), converted.tobytes()))


def test_c69_all_of_the_digest_counts() -> None:
    """Content that differs in one byte, anywhere, differs in about half the bits of its identity."""
    first = np.frombuffer(media_identity("image", RAW), np.uint8)
    for at in range(0, RAW.size, 997):
        other = RAW.copy()
        other[at] ^= 1
        apart = np.unpackbits(first ^ np.frombuffer(media_identity("image", other), np.uint8)).sum()
        assert 80 < apart < 176


dtypes = st.sampled_from(["u1", "i1", "<u2", "<i2", ">i2", "<f2", "<i4", "<f4"])


@st.composite
def contents(draw: st.DrawFn) -> tuple[Any, Any]:
    """Some content, and all of it as a value with one repr."""
    kind = draw(st.sampled_from(["bytes", "array", "picture", "list"]))
    if kind == "list":
        pieces = draw(st.lists(contents(), max_size=3))
        return [piece for piece, _ in pieces], ["list", [said for _, said in pieces]]
    raw = draw(st.sampled_from([bytes(8), b"\x01" + bytes(7)]))
    if kind == "bytes":
        return raw, ["bytes", raw]
    if kind == "array":
        flat = np.frombuffer(raw, draw(dtypes))
        shape = draw(st.sampled_from([(-1,), (1, -1), (-1, 1), (2, -1)]))
        return flat.reshape(shape), ["array", flat.dtype.str, flat.reshape(shape).shape, raw]
    mode, size = draw(st.sampled_from(["L", "P"])), draw(st.sampled_from([(8, 1), (1, 8), (4, 2), (2, 4)]))
    one = Image.frombytes(mode, size, raw)
    colours = draw(st.sampled_from([[1, 2, 3], [1, 2, 4]])) if mode == "P" else None
    if colours:
        one.putpalette(colours)
    return one, ["picture", mode, size, colours, raw]


@settings(max_examples=300, deadline=None)
@given(contents(), contents(), st.sampled_from([None, {"size": 8}, {"size": 8.0}]), st.sampled_from([None, {"size": 8}]))
def test_d40_identities_are_equal_where_bytes_shape_dtype_mode_and_boundaries_are(
    one: tuple[Any, Any], two: tuple[Any, Any], options: dict[str, Any] | None, others: dict[str, Any] | None
) -> None:
    ones, twos = media_identity("image", one[0], options=options), media_identity("image", two[0], options=others)
    assert (ones == twos) == (repr((one[1], options)) == repr((two[1], others)))
    assert media_identity("image", one[0], options=options) == ones


def test_d40_other_bytes_are_another_item_and_another_node() -> None:
    session = new_session()
    nodes = []
    for fill in (0, 1, 0):
        pixels = np.full((4, 4, 3), fill, np.uint8)
        item = MediaItem("image", media_identity("image", pixels), [(3, 4)], (1, 4, 4))
        nodes.append(session.append(session.root, A_IDS, media=[item]))
    assert nodes[0] is nodes[2]
    assert nodes[0].id != nodes[1].id
    assert nodes[0].media[0].content() != nodes[1].media[0].content()


# --- C70: prefix keys of media ----------------------------------------------------------------------------------------
def test_c70_a_million_items_and_no_pattern_twice() -> None:
    values = np.array([pad_values(sha256(number.to_bytes(4)).digest()) for number in range(1_000_000)])
    assert values.shape == (1_000_000, 4)
    first = np.sort(values[:, 0])
    assert (first[1:] != first[:-1]).all(), "two patterns begin alike, and a prefix may end behind the first value"
    some = np.sort(values[:50_000].ravel())
    assert (some[1:] != some[:-1]).all(), "one value in two places"
    # Wide in every bit: no value is a small hash with something added.
    for column in values[:20_000].T - 1_000_000:
        ones = ((column[:, None] >> np.arange(62)) & 1).mean(axis=0)
        assert ((ones > 0.47) & (ones < 0.53)).all()


def test_c70_neighbouring_identities_share_nothing() -> None:
    """What a reduction of the digest would make alike: identities that agree in all but one byte, at either end."""
    base = bytes(32)
    found = [pad_values(base[:at] + bytes([value]) + base[at + 1 :]) for at in range(32) for value in range(1, 256)]
    for column in zip(*found, strict=True):
        assert len(set(column)) == len(found)


@EXAMPLES
@given(st.binary(min_size=32, max_size=32), st.integers(1, 300), st.data())
def test_c70_a_cut_changes_nothing_before_it(name: bytes, length: int, data: st.DataObject) -> None:
    whole = pad_sequence(name, 0, length)
    cut = data.draw(st.integers(0, length))
    assert np.array_equal(whole, np.concatenate([pad_sequence(name, 0, cut), pad_sequence(name, cut, length)]))
    assert [int(value) for value in whole] == [pad_values(name)[index % 4] for index in range(length)]


# --- C72: the prefix knows which image stands where -------------------------------------------------------------------
@pytest.mark.parametrize("fill", [IMG, PAD_VALUE, 7])
def test_c72_another_image_at_the_same_ids(fill: int) -> None:
    session = new_session()
    system = session.append(session.root, [5, 6], role="system")
    ids = [1, 2, VS, fill, fill, fill, fill, VE, 3]
    one = session.append(system, ids, media=[an_image("one", 3)])
    two = session.append(system, ids, media=[an_image("two", 3)])
    assert one.input_ids().tolist() == two.input_ids().tolist()
    assert same(one.positions(), two.positions())
    assert one.id != two.id
    assert one.shared_prefix_len(two) == two.shared_prefix_len(one) == 5, "the shared text before the image"
    assert one.shared_prefix_len(one) == 11
    text = session.append(system, ids)
    assert len({one.id, two.id, text.id}) == 3
    assert text.shared_prefix_len(one) == one.shared_prefix_len(text) == 5
    # What follows never meets again, however alike.
    behind_one, behind_two = session.append(one, [8, 9]), session.append(two, [8, 9])
    assert behind_one.id != behind_two.id
    assert behind_one.shared_prefix_len(behind_two) == 5
    # The same content is the same node, and shares everything with a turn that says it in pieces.
    assert session.append(system, ids, media=[an_image("one", 3)]) is one
    pieces = session.append(session.append(system, ids[:2]), ids[2:], media=[an_image("one", 1)])
    assert pieces.id != one.id
    assert pieces.shared_prefix_len(one) == 11


def test_c72_the_same_image_at_another_offset() -> None:
    """Ids alike, the image not where it was: placeholders outside a span are text."""
    session = new_session()
    ids = [1, 2, IMG, IMG, IMG, IMG, IMG, IMG, 3]
    at = {offset: session.append(session.root, ids, media=[an_image("one", offset)]) for offset in (2, 3, 4)}
    assert len({node.id for node in at.values()}) == 3
    for (first, one), (second, two) in itertools.permutations(at.items(), 2):
        assert one.shared_prefix_len(two) == min(first, second)
    shifted = session.append(session.root, [1, *ids[:-1]], media=[an_image("one", 3)])
    assert shifted.shared_prefix_len(at[2]) == 1


CHANGES: dict[str, Callable[[MediaItem], MediaItem]] = {
    "identity": lambda item: MediaItem("image", identity("other"), item.spans, item.grid_thw),
    "modality": lambda item: MediaItem("video", item.identity, item.spans, item.grid_thw, 0.5),
    "grid": lambda item: MediaItem("image", item.identity, item.spans, (1, 2, 8)),
    "target sizes": lambda item: MediaItem("image", item.identity, item.spans, item.grid_thw, target_sizes=[(4, 4)]),
    "extra": lambda item: MediaItem("image", item.identity, item.spans, item.grid_thw, extra={"a": 1}),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("rule", RULES)
def test_c72_whatever_describes_an_image_is_in_the_prefix(change: str, rule: str) -> None:
    session = new_session(toy_scheme(rule))
    one, other = an_image("one", 3), CHANGES[change](an_image("one", 3))
    before = session.append(session.root, A_IDS, media=[one])
    after = session.append(session.root, A_IDS, media=[other])
    assert before.id != after.id
    assert before.shared_prefix_len(after) == after.shared_prefix_len(before) == 3


def padded(node: Node) -> list[int]:
    """A path's ids as prefix keys: media written as their identities' ids."""
    ids = node.input_ids().astype(np.int64)
    for item, start, stop in node.media_spans():
        first = item.placeholders_before
        ids[start:stop] = pad_sequence(item.identity, first, first + stop - start)
    return [int(token) for token in ids]


@st.composite
def paths(draw: st.DrawFn) -> list[Segment]:
    """One to three turns over few images, so that two of them are often alike for a while."""
    segments = []
    for _ in range(draw(st.integers(1, 3))):
        pieces: list[int | Block] = [1]
        for _ in range(draw(st.integers(0, 2))):
            pieces += draw(st.sampled_from([(image(),), (image(number=1),), (7,), (IMG,)]))
        segments.append(turn(*pieces))
    return segments


@EXAMPLES
@given(paths(), paths())
def test_c72_padded_ids_agree_as_long_as_the_paths_do(ones: list[Segment], twos: list[Segment]) -> None:
    """All images are of one grid here, so positions say nothing that ids and images do not."""
    session = new_session()
    one, two = grow(session, session.root, *ones), grow(session, session.root, *twos)
    pairs = list(zip(padded(one), padded(two), strict=False))
    alike = next((index for index, (its, other) in enumerate(pairs) if its != other), len(pairs))
    assert one.shared_prefix_len(two) == alike
    assert (one.id == two.id) == (ones == twos)


# --- C79: fields of an item that this library knows no name for -------------------------------------------------------
def moss(turn_number: int) -> dict[str, Any]:
    """What Moss-VL's processor says of one image."""
    return {
        "vision_position_ids": np.arange(12, dtype=np.int64).reshape(3, 4) + turn_number,
        "media_nums_per_sample": torch.tensor([turn_number]),
        "visible_frame_counts": [turn_number],
    }


def moss_image(turn_number: int, offset: int = 3, **more: Any) -> MediaItem:
    return an_image(f"moss {turn_number}", offset, extra=moss(turn_number), **more)


def carries(item: MediaItem, turn_number: int) -> bool:
    expected = {**moss(turn_number), "media_nums_per_sample": np.array([turn_number])}
    return bool(plain(item.extra) == plain({**expected, "visible_frame_counts": (turn_number,)}))


def test_c79_each_turn_keeps_its_own_fields() -> None:
    session = new_session()
    node = session.root
    for number in (1, 2, 3):
        node = session.append(node, A_IDS, media=[moss_image(number)])
        node = grow(session, node, reply(8, 9))
        assert [carries(item, at) for at, (item, _, _) in enumerate(node.media_spans(), 1)] == [True] * number
    first, second, third = (item for item, _, _ in node.media_spans())
    assert not carries(first, 2)
    assert len({first, second, third}) == 3


def test_c79_fields_travel_through_every_operation() -> None:
    session = new_session()
    first = session.append(session.root, A_IDS, media=[moss_image(1)])
    node = grow(session, first, reply(8, 9))
    node = session.append(node, [4, *A_IDS, 5], media=[moss_image(2, 4)])
    fork = session.append(first, A_IDS, media=[moss_image(3)])
    made = {
        "truncated": session.truncate(node, node.stop - 1),
        "rewritten in front": session.rewrite(node, [Edit(0, 1, [6, 6])]),
        "rewritten between": session.rewrite(node, [Edit(9, 10, [])]),
        "rewritten behind": session.rewrite(node, [Edit(node.stop, node.stop, [6])]),
        "appended to": session.append(node, [6]),
    }
    for name, after in made.items():
        items = [item for item, _, _ in after.media_spans()]
        assert [carries(item, at) for at, item in enumerate(items, 1)] == [True, True], name
    assert [carries(item, number) for (item, _, _), number in zip(fork.media_spans(), (1, 3), strict=True)] == [True, True]
    moved = session.rewrite(node, [Edit(0, 0, [IMG], [an_image("small", 0, (1, 2, 2), extra={"new": 1})])])
    assert [sorted(item.extra) for item, _, _ in moved.media_spans()] == [["new"], sorted(moss(1)), sorted(moss(1))]
    inputs = request_inputs(node)
    assert [carries(item, at) for at, item in enumerate(inputs.needed_items, 1)] == [True, True]
    elsewhere = new_session(name="elsewhere")
    copied = elsewhere.root
    for part in node.path()[1:]:
        copied = elsewhere.append(copied, part.token_ids, media=part.media)
    assert [item for item, _, _ in copied.media_spans()] == [item for item, _, _ in node.media_spans()]


def test_c79_items_that_differ_in_a_field_are_two_contents() -> None:
    session = new_session()
    plain_node = session.append(session.root, A_IDS, media=[an_image("one", 3)])
    nodes = [plain_node]
    for extra in ({"a": 1}, {"a": 2}, {"a": 1.0}, {"b": 1}, {"a": np.array([1])}, {"a": np.array([1], dtype=np.int32)}):
        nodes.append(session.append(session.root, A_IDS, media=[an_image("one", 3, extra=extra)]))
    assert len({node.id for node in nodes}) == len(nodes)
    assert session.append(session.root, A_IDS, media=[an_image("one", 3, extra={})]) is plain_node
    twice = session.append(nodes[1], A_IDS, media=[an_image("one", 3, extra={"a": 2})])
    assert len(request_inputs(twice).needed_items) == 2, "one for each: neither stands for the other"
    again = session.append(nodes[1], A_IDS, media=[an_image("one", 3, extra={"a": 1})])
    assert len(request_inputs(again).needed_items) == 1


WHOLE: dict[str, Any] = {
    "modality": "video",
    "identity": identity("whole"),
    "grid_thw": (2, 4, 4),
    "second_per_grid_ts": 0.5,
    "audio_feature_length": None,
    "target_sizes": ((4, 4),),
    "extra": {"frames": np.array([1, 2])},
}
DISAGREEING: dict[str, list[Any]] = {
    "modality": ["image"],
    "identity": [identity("another")],
    "grid_thw": [(2, 2, 8), (4, 2, 4)],
    "second_per_grid_ts": [None, 0.0, 1.0],
    "audio_feature_length": [0, 30],
    "target_sizes": [(), ((4, 8),), ((4, 4), (4, 4))],
    "extra": [None, {"frames": np.array([1, 3])}, {"frames": (1, 2)}, {"frames": np.array([[1, 2]])}, {"other": 1}],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in DISAGREEING.items() for value in values])
@pytest.mark.parametrize("rule", RULES)
def test_c79_a_later_part_that_disagrees_is_refused(rule: str, field: str, value: Any) -> None:
    session = new_session(toy_scheme(rule))
    beginning = MediaItem(spans=[(1, 3)], unfinished=True, **WHOLE)
    parent = session.append(session.root, [1, IMG, IMG, IMG], media=[beginning])
    rest = MediaItem(spans=[(0, 5)], placeholders_before=3, **{**WHOLE, field: value})
    error = refuses(MediaSpanError, session, session.append, parent, [IMG] * 5, media=[rest])
    assert f"differs in {field}" in str(error)
    assert WHOLE["identity"][:4].hex() in str(error)
    assert error.item == rest
    both = MediaItem(spans=[(0, 5)], placeholders_before=3, **{**WHOLE, field: value, "target_sizes": ((9, 9),)})
    assert "target_sizes" in str(refuses(MediaSpanError, session, session.append, parent, [IMG] * 5, media=[both]))
    right = MediaItem(spans=[(0, 5)], placeholders_before=3, **{**WHOLE, "extra": {"frames": torch.tensor([1, 2])}})
    node = session.append(parent, [IMG] * 5, media=[right])
    assert node.position_state().open_block is None
    straight = session.append(session.root, [1, *[IMG] * 8], media=[MediaItem(spans=[(1, 8)], **WHOLE)])
    assert same(node.positions(), straight.positions())


def test_c79_a_third_part_agrees_with_the_first() -> None:
    session = new_session()
    node = session.append(session.root, [IMG] * 3, media=[MediaItem(spans=[(0, 3)], unfinished=True, **WHOLE)])
    node = session.append(node, [])
    middle = MediaItem(spans=[(0, 2)], placeholders_before=3, unfinished=True, **WHOLE)
    node = session.append(node, [IMG] * 2, media=[middle])
    without = MediaItem(spans=[(0, 3)], placeholders_before=5, **{**WHOLE, "extra": None})
    assert "differs in extra" in str(refuses(MediaSpanError, session, session.append, node, [IMG] * 3, media=[without]))
    early = MediaItem(spans=[(0, 5)], placeholders_before=3, **WHOLE)
    assert "placeholders_before=3" in str(refuses(MediaSpanError, session, session.append, node, [IMG] * 5, media=[early]))
    last = MediaItem(spans=[(0, 3)], placeholders_before=5, **WHOLE)
    assert session.append(node, [IMG] * 3, media=[last]).mrope_position_delta == -6


# --- C80: items that branches share are frozen ------------------------------------------------------------------------
def test_c80_no_branch_changes_an_item_for_another() -> None:
    session = new_session()
    shared = session.append(session.root, A_IDS, media=[moss_image(1)])
    branches = [session.append(shared, [number]) for number in range(3)]
    before = tree_digest(session.tree), [fingerprint(node) for node in branches]
    item: Any = branches[0].media_spans()[0][0]
    fields = ["modality", "identity", "spans", "grid_thw", "second_per_grid_ts", "audio_feature_length", "target_sizes"]
    attack_slots(item, [*fields, "placeholders_before", "unfinished", "extra", "num_placeholders"])
    for name in ("feature", "precomputed_embeddings", "hash", "pad_value"):
        with pytest.raises(AttributeError):
            setattr(item, name, torch.zeros(4))
        with pytest.raises(AttributeError):
            object.__setattr__(item, name, torch.zeros(4))
    handed = item.extra
    attack_array(handed["vision_position_ids"])
    attack_array(handed["media_nums_per_sample"])
    with pytest.raises(TypeError):
        handed["visible_frame_counts"] = (9,)
    object.__setattr__(handed, "_buckets", None)
    for branch in branches:
        [(own, start, stop)] = branch.media_spans()
        assert own is item, "shared, not copied"
        assert (start, stop) == (3, 7)
        assert carries(own, 1)
    assert (tree_digest(session.tree), [fingerprint(node) for node in branches]) == before


def test_c80_what_the_caller_keeps_is_the_callers() -> None:
    session = new_session()
    extra = moss(1)
    spans, grid, items = [[3, 4]], np.array([1, 4, 4]), []
    items.append(MediaItem("image", identity("one"), spans, grid, extra=extra))  # type: ignore[arg-type]
    node = session.append(session.root, A_IDS, media=items)
    before = fingerprint(node)
    extra["vision_position_ids"] += 7
    extra["media_nums_per_sample"] += 7
    extra["visible_frame_counts"].append(7)
    extra.clear()
    spans[0][0] = grid[0] = 9
    items.clear()
    assert fingerprint(node) == before
    assert carries(node.media[0], 1)


def test_c80_branches_read_while_others_write_to_what_they_got() -> None:
    session = new_session()
    shared = session.append(session.root, A_IDS, media=[moss_image(1)])
    wrong: list[str] = []
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            for value in shared.media[0].extra.values():
                if isinstance(value, np.ndarray):
                    torch.from_numpy(value).fill_(-1)
            torch.from_numpy(shared.token_ids).fill_(0)

    def read(number: int) -> None:
        node = session.append(shared, [number])
        for _ in range(200):
            if not carries(node.media_spans()[0][0], 1) or node.input_ids(0, 9).tolist() != A_IDS:
                wrong.append(f"branch {number}")

    writer = threading.Thread(target=write)
    readers = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    writer.start()
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    done.set()
    writer.join()
    assert wrong == []


# --- D38: several images, several turns, forks and cuts ---------------------------------------------------------------
def nodes_of(session: Session, parent: Node, *segments: Segment) -> list[Node]:
    made = []
    for segment in segments:
        parent = grow(session, parent, segment)
        made.append(parent)
    return made


def cut(segments: Sequence[Segment], length: int) -> list[Segment]:
    """The first tokens of a history; no item is cut."""
    kept = []
    for segment in segments:
        if length <= 0:
            break
        tokens = segment.tokens[:length]
        items = tuple(item for item in segment.items if sum(item.spans[-1]) <= len(tokens))
        kept.append(Segment(segment.origin, tokens, items))
        length -= len(segment.tokens)
    return kept


def check_cuts(session: Session, node: Node, segments: Sequence[Segment], rule: str) -> tuple[int, int]:
    """Truncate at every length; how many were refused and made."""
    assert session.truncate(node, 0) is session.root
    refused = 0
    spans = ref.media_spans(segments)
    for length in range(1, node.stop + 1):
        inside = [(start, stop) for _, start, stop in spans if start < length < stop]
        if inside:
            error = refuses(MediaSpanError, session, session.truncate, node, length)
            assert error.span == inside[0]
            assert error.item.identity.hex()[:8] in str(error)
            refused += 1
        else:
            check(session.truncate(node, length), cut(segments, length), rule)
    return refused, node.stop - refused


@pytest.mark.parametrize("rule", RULES)
def test_d38_text_image_text_image_over_three_turns_and_a_fork(rule: str) -> None:
    session = new_session(toy_scheme(rule))
    history = [a_turn(), reply(8, 9), turn(4, 5, *shown(image(4, 8, 1)), 6)]
    nodes = nodes_of(session, session.root, *history)
    for count, node in enumerate(nodes, 1):
        check(node, history[:count], rule)
    assert same(nodes[0].positions(), A_TABLE)
    assert [node.mrope_position_delta for node in nodes] == [-2, -2, -6]
    assert nodes[2].positions().shape == (3, 9 + 2 + 13)
    assert nodes[2].positions(14, 22).tolist() == [[12] * 8, [12] * 4 + [13] * 4, [12, 13, 14, 15] * 2]
    before = [fingerprint(node) for node in nodes]
    # Between the images: behind the first turn, behind the reply, and inside the text before the second image.
    between = [(nodes[0], history[:1]), (nodes[1], history[:2]), (session.truncate(nodes[2], 12), cut(history, 12))]
    for parent, past in between:
        for fork in (turn(7), turn(*shown(image(8, 4, 2)), 7), turn(*shown(video(2)), *shown(image())), reply(7, 7)):
            check(grow(session, parent, fork), [*past, fork], rule)
            follow_up = [fork, reply(3), turn(2, *shown(image(number=1)))]
            check(grow(session, parent, *follow_up), [*past, *follow_up], rule)
    assert [fingerprint(node) for node in nodes] == before
    assert check_cuts(session, nodes[2], history, rule) == (3 + 7, 24 - 10)
    inputs = request_inputs(nodes[2], 11)
    assert tuple(inputs.positions.shape) == (3, 13)
    assert tuple(inputs.mrope_position_delta.shape) == (1, 1)


@EXAMPLES
@given(
    st.lists(blocks(), min_size=2, max_size=3),
    st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=7, max_size=7),
    blocks(),
    st.sampled_from(RULES),
)
def test_d38_any_images_any_texts(shapes: list[Block], texts: list[list[int]], other: Block, rule: str) -> None:
    session = new_session(toy_scheme(rule))
    history: list[Segment] = []
    for number, block in enumerate(shapes):
        history.append(turn(1, *texts[number], block, *texts[number + 1]))
        if texts[number + 2]:
            history.append(reply(*texts[number + 2]))
    nodes = nodes_of(session, session.root, *history)
    for count, node in enumerate(nodes, 1):
        check(node, history[:count], rule)
        fork = turn(*texts[5], other, *texts[6])
        check(grow(session, node, fork), [*history[:count], fork], rule)
    check_cuts(session, nodes[-1], history, rule)
    for count, node in enumerate(nodes, 1):
        check(node, history[:count], rule)


# --- D39: expanded once ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", RULES)
def test_d39_either_form_gives_the_same_node_and_no_item_is_expanded_twice(rule: str) -> None:
    family = toy_scheme(rule)
    session = new_session(family)
    segment = turn(1, *shown(image(4, 8)), 2, *shown(video(2)), 3)
    ids, items = expand(family, *compact(segment.tokens, media(segment)))
    node = session.append(session.root, ids, media=items)
    assert node is session.append(session.root, segment.tokens, media=media(segment))
    assert ids.tolist() == list(segment.tokens)
    for number in (0, 1):
        with pytest.raises(MediaSpanError, match="expanded already") as caught:
            expand(family, node.token_ids, [node.media[number]])
        assert caught.value.item == node.media[number]
        assert caught.value.span == node.media_spans()[number][1:]
    short, compacted = compact(node.token_ids, node.media)
    assert short.tolist() == [1, VS, IMG, VE, 2, VS, 102, VE, 3]
    refuses(MediaSpanError, session, session.append, node, short, media=compacted)
