"""Compact and expanded placeholders, and the ids that media identities enter prefix keys as."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sessiontree import LimitExceeded, MediaItem, MediaSpanError, OutOfRange, PositionError, SessionTreeError, Unsupported
from sessiontree.placeholders import compact, expand, pad_sequence, pad_values
from sessiontree.positions import PositionScheme, scheme
from tests import reference as ref
from tests.reference import RULES, Segment
from tests.toy import (
    A_IDS,
    IMG,
    VE,
    VID,
    VS,
    a_turn,
    attack_array,
    histories,
    image,
    media,
    new_session,
    plain,
    reference_scheme,
    reply,
    toy_scheme,
    turn,
    video,
)

ID = sha256(b"x").digest()
TOY = toy_scheme()


def item(spans: Sequence[tuple[int, int]], grid: tuple[int, int, int] | None = (1, 4, 4), **more: Any) -> MediaItem:
    return MediaItem(**{"modality": "image", "identity": ID, "spans": spans, "grid_thw": grid, **more})


def naive_compact(segment: Segment) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids with one placeholder an item, and where it stands: token by token."""
    ids: list[int] = []
    spans = {}
    for index, token in enumerate(segment.tokens):
        inside = [number for number, one in enumerate(segment.items) if one.spans[0][0] <= index < sum(one.spans[0])]
        if inside and inside[0] in spans:
            continue
        if inside:
            spans[inside[0]] = (len(ids), 1)
        ids.append(token)
    return ids, [spans[number] for number in range(len(segment.items))]


# --- expand and compact -------------------------------------------------------------------------------------------------


def test_the_toy_image_expands_to_its_four_placeholders() -> None:
    ids, (one,) = expand(TOY, [1, 2, VS, IMG, VE, 3], [item([(3, 1)])])
    assert ids.dtype == np.int32
    assert ids.tolist() == A_IDS
    assert one == item([(3, 4)])
    back, (shrunk,) = compact(ids, [one])
    assert back.dtype == np.int32
    assert back.tolist() == [1, 2, VS, IMG, VE, 3]
    assert shrunk == item([(3, 1)])


@settings(max_examples=150, deadline=None)
@given(histories(), st.sampled_from(RULES), st.randoms(use_true_random=False))
def test_each_form_is_the_inverse_of_the_other(history: list[Segment], rule: str, random: Any) -> None:
    family = toy_scheme(rule)
    for segment in history:
        items = media(segment)
        random.shuffle(items)
        ids, compacted = compact(segment.tokens, items)
        expected, spans = naive_compact(segment)
        assert ids.tolist() == expected
        assert sorted(one.spans[0] for one in compacted) == sorted(spans)
        assert [one.content() for one in compacted] == [one.content() for one in items]
        expanded, again = expand(family, ids, compacted)
        assert expanded.tolist() == list(segment.tokens)
        assert again == tuple(items)
        once_more, recompacted = compact(expanded, again)
        assert once_more.tolist() == ids.tolist()
        assert recompacted == compacted
        for one in items:
            theirs = ref.Item(one.modality, one.identity, one.grid_thw or (0, 0, 0), one.second_per_grid_ts, ())
            assert family.num_placeholders(one) == ref.placeholder_count(reference_scheme(rule), theirs) == one.num_placeholders


def test_several_items_in_any_order_with_text_between_and_none() -> None:
    segment = turn(image(), 7, image(2, 6, 1, fill=9), video(2), *(VS, image(2, 2, 2), VE))
    items = media(segment)[::-1]
    ids, compacted = compact(segment.tokens, items)
    assert ids.tolist() == [IMG, 7, 9, VID, VS, IMG, VE]
    assert [one.spans for one in compacted] == [((5, 1),), ((3, 1),), ((2, 1),), ((0, 1),)]
    expanded, again = expand(TOY, ids, compacted)
    assert expanded.tolist() == list(segment.tokens)
    assert list(again) == items


def test_everything_else_of_an_item_stays() -> None:
    given_item = item([(1, 1)], target_sizes=[(2, 2)], extra={"ids": np.arange(3)})
    _, (one,) = expand(TOY, [7, IMG], iter([given_item]))
    assert one.content() == given_item.content()
    assert plain(one.extra) == plain({"ids": np.arange(3)})


def test_text_alone_is_the_same_in_both_forms() -> None:
    for ids in ([], [1, 2, IMG]):
        for form in (expand(TOY, ids, []), compact(ids, []), expand(scheme("text@vllm"), ids, [])):
            assert form[0].tolist() == ids
            assert form[0].dtype == np.int32
            assert form[1] == ()


def test_what_is_expanded_already_is_refused_by_name() -> None:
    """D39."""
    ids, items = expand(TOY, [1, 2, VS, IMG, VE, 3], [item([(3, 1)])])
    with pytest.raises(MediaSpanError, match=rf"{ID[:4].hex()}: span \[3, 7\) is expanded already") as caught:
        expand(TOY, ids, items)
    assert caught.value.item == items[0]
    assert caught.value.span == (3, 7)
    # One of two, the other compact; and one that is expanded to another length than its grid has.
    second = item([(8, 1)])
    with pytest.raises(MediaSpanError, match="expanded already"):
        expand(TOY, [*ids.tolist()[:8], IMG], [*items, second])
    with pytest.raises(MediaSpanError, match="expanded already"):
        expand(TOY, [1, IMG, IMG], [item([(1, 2)])])


def test_an_item_of_one_placeholder_is_the_same_in_both_forms() -> None:
    small = item([(1, 1)], (1, 2, 2))
    for ids, items in (expand(TOY, [7, IMG, 8], [small]), compact([7, IMG, 8], [small])):
        assert ids.tolist() == [7, IMG, 8]
        assert items == (small,)
    larger = item([(3, 1)])
    ids, items = expand(TOY, [7, IMG, 8, IMG], [small, larger])
    assert ids.tolist() == [7, IMG, 8, IMG, IMG, IMG, IMG]
    assert [one.spans for one in items] == [((1, 1),), ((3, 4),)]


@pytest.mark.parametrize("call", [lambda ids, items: expand(TOY, ids, items), compact])
@pytest.mark.parametrize(
    ("given_item", "error", "match"),
    [
        (item([(0, 1)], unfinished=True), MediaSpanError, "part"),
        (item([(0, 1)], placeholders_before=3), MediaSpanError, "part"),
        (item([(0, 1), (2, 1)]), Unsupported, "2 spans"),
        (item([]), MediaSpanError, "no span"),
        (item([(3, 1)]), MediaSpanError, "past the 3 tokens"),
        ("image", TypeError, "MediaItems"),
    ],
)
def test_what_has_no_other_form(call: Any, given_item: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        call([IMG, IMG, IMG], [given_item])
    if isinstance(caught.value, SessionTreeError):
        assert caught.value.item == given_item  # type: ignore[attr-defined]
        assert ID[:4].hex() in str(caught.value)


def test_items_at_one_place_are_refused() -> None:
    one = item([(0, 1)])
    for items in ([one, one], [one, item([(0, 1)])]):
        with pytest.raises(MediaSpanError, match="overlaps"):
            expand(TOY, [IMG, IMG], items)


def test_a_span_of_several_ids_cannot_be_compacted() -> None:
    for ids in ([1, IMG, IMG, VID, IMG], [1, VID, IMG, IMG, IMG], [1, IMG, IMG, IMG, VID]):
        with pytest.raises(MediaSpanError, match=r"span \[1, 5\) holds several ids") as caught:
            compact(ids, [item([(1, 4)])])
        assert caught.value.span == (1, 5)


@pytest.mark.parametrize(
    ("family", "given_item", "error"),
    [
        (scheme("text@sglang"), item([(0, 1)]), Unsupported),
        (TOY, item([(0, 1)], modality="audio"), Unsupported),
        (TOY, item([(0, 1)], audio_feature_length=4), Unsupported),
        (TOY, item([(0, 1)], None), PositionError),
        (TOY, item([(0, 1)], (1, 1, 4)), PositionError),
    ],
)
def test_items_that_the_scheme_cannot_place(family: PositionScheme, given_item: MediaItem, error: type[Exception]) -> None:
    for call in (lambda: expand(family, [IMG], [given_item]), lambda: family.num_placeholders(given_item)):
        with pytest.raises(error, match=ID[:4].hex()):
            call()


def test_too_many_tokens_are_refused_before_any_is_made() -> None:
    huge = item([(0, 1)], (2**31 - 1, 2**31 - 1, 2**31 - 1))
    tracemalloc.start()
    with pytest.raises(LimitExceeded) as caught:
        expand(TOY, [IMG], [huge])
    with pytest.raises(LimitExceeded):
        expand(TOY, [IMG] * 2, [item([(0, 1)], (1, 2**16, 2**16)), item([(1, 1)], (1, 2**17, 2**16))])
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert caught.value.value == (2**31 - 1) * (2**30 - 1) ** 2
    assert len(expand(TOY, [7, IMG, 7], [item([(1, 1)])], max_tokens=6)[0]) == 6
    with pytest.raises(LimitExceeded, match="6 tokens when expanded; 5 are allowed"):
        expand(TOY, [7, IMG, 7], [item([(1, 1)])], max_tokens=5)
    limit: Any = 5.0
    with pytest.raises(TypeError):
        expand(TOY, [7], [], max_tokens=limit)


def test_token_ids_are_checked_and_owned() -> None:
    given_ids = np.array([7, IMG], dtype=np.int64)
    ids, _ = expand(TOY, given_ids, [item([(1, 1)])])
    given_ids[:] = 0
    assert ids.tolist() == [7, IMG, IMG, IMG, IMG]
    attack_array(ids)
    for given_tokens in ((7, IMG), np.array([7, IMG], dtype=">u2"), torch.tensor([7, IMG]), bytearray([7, IMG])):
        assert expand(TOY, given_tokens, [item([(1, 1)])])[0].tolist() == [7, IMG, IMG, IMG, IMG]
    for wrong, error in (([-1, 1], OutOfRange), ([1.5, 1], TypeError), ("ab", TypeError), ([[1, 2]], TypeError)):
        bad: Any = wrong
        with pytest.raises(error):
            expand(TOY, bad, [item([(1, 1)])])
        with pytest.raises(error):
            compact(bad, [item([(1, 1)])])


def test_the_expanded_form_is_what_nodes_take() -> None:
    session = new_session()
    ids, items = expand(TOY, [1, 2, VS, IMG, VE, 3], [item([(3, 1)], identity=a_turn().items[0].identity)])
    node = session.append(session.root, ids, media=items)
    straight = session.append(session.root, A_IDS, media=media(a_turn()))
    assert node.id == straight.id
    assert compact(node.token_ids, node.media)[0].tolist() == [1, 2, VS, IMG, VE, 3]
    draft = session.draft(node)
    draft.extend(reply(4, 5).tokens)
    reread = draft.commit()
    assert compact(reread.input_ids(), [one.with_spans([(start, stop - start)]) for one, start, stop in reread.media_spans()])[
        0
    ].tolist() == [1, 2, VS, IMG, VE, 3, 4, 5]
    # Compact as it is, the turn has one placeholder too few for its grid.
    with pytest.raises(MediaSpanError, match="its grid has 4"):
        session.append(session.root, [1, 2, VS, IMG, VE, 3], media=[item([(3, 1)])])


# --- ids of identities --------------------------------------------------------------------------------------------------

# pad_values and padding_sequence(7)[-3:] of SGLang 0.5.23's MultimodalDataItem, run after set_identity with these.
SGLANG = {
    bytes(32): (1484253362110568644, 3301934392075651176, 318471819182036349, 2703848712215624371),
    b"\xff" * 32: (1514070023276701149, 3503261123662758571, 3790577122018863306, 1280607172659296772),
    bytes(range(32)): (3247985050617078762, 1102849016513251168, 1853231768861687138, 662052459344210337),
    sha256(b"A").digest(): (1740542537616983852, 1009356705622018283, 2696708446559791181, 2283628144002240575),
}


@pytest.mark.parametrize("identity", SGLANG)
def test_pad_values_are_those_of_sglang(identity: bytes) -> None:
    values = SGLANG[identity]
    writable: Any = bytearray(identity)
    assert pad_values(identity) == pad_values(writable) == values
    assert pad_sequence(identity, 0, 7).tolist() == [*values, *values[:3]]
    assert pad_sequence(identity, 0, 0).shape == (0,)
    assert pad_sequence(identity, 5, 6).tolist() == [values[1]]


def test_a_pad_id_depends_on_identity_and_index_alone() -> None:
    """C70: prefix-stable, wherever a span is cut and wherever one reads on."""
    for identity, values in SGLANG.items():
        whole = pad_sequence(identity, 0, 40)
        assert whole.dtype == np.int64
        for start in range(12):
            for stop in range(start, 40):
                assert np.array_equal(pad_sequence(identity, start, stop), whole[start:stop])
        whole[:] = 0
        assert pad_sequence(identity, 0, 4).tolist() == list(values)
    far = pad_sequence(ID, 2**31 - 4, 2**31)
    assert far.tolist() == list(pad_values(ID))


def test_pad_values_are_no_token_ids_of_any_vocabulary_and_fit_int64() -> None:
    for number in range(2000):
        values = pad_values(sha256(number.to_bytes(4)).digest())
        assert all(1_000_000 <= value < 2**63 for value in values)
        assert all(type(value) is int for value in values)
        assert len(set(values)) == 4


def test_what_has_no_pad_values() -> None:
    wrong: list[tuple[Any, type[Exception]]] = [
        (ID[:31], OutOfRange),
        (ID + b"x", OutOfRange),
        (b"", OutOfRange),
        (ID.hex(), TypeError),
        (None, TypeError),
    ]
    for identity, error in wrong:
        with pytest.raises(error):
            pad_values(identity)
        with pytest.raises(error):
            pad_sequence(identity, 0, 1)
    windows: list[tuple[Any, Any, type[Exception]]] = [
        (-1, 3, OutOfRange),
        (3, 2, OutOfRange),
        (0, 2**31 + 1, OutOfRange),
        (2**300, 2**301, OutOfRange),
        (0.0, 1, TypeError),
        (0, None, TypeError),
        (True, 2, TypeError),
    ]
    for start, stop, error in windows:
        with pytest.raises(error):
            pad_sequence(ID, start, stop)
