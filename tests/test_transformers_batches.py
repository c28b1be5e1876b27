"""Batches for transformers: each row is what the request is alone, and what a walk over its tokens says; padding moves nothing."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, note, settings

from engine_bridge import to_transformers
from engine_bridge.adapters import transformers as adapter
from sessiontree import Draft, MediaItem, MediaSpanError, Node, OutOfRange, Session, SessionStore, Unsupported
from sessiontree.positions import known_schemes, scheme
from tests.rope_oracle import RANDOMS, draw_history
from tests.test_tree import IMAGE_PAD, VIDEO_PAD, VISION_START, identity, image, tree_print, video, vl

SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"
BATCHES = settings(max_examples=400 if SOAK else 25, deadline=None, suppress_health_check=list(HealthCheck))
MEDIA_FAMILIES = tuple(family for family in adapter._FAMILIES if family != "text")
TYPES = {"image": 1, "video": 2, "audio": 0}
Holder = Node | Draft


# --- what a window is, token by token -------------------------------------------------------------------------------------


def placed(holder: Holder) -> list[tuple[MediaItem, list[int]]]:
    """Each item of a path, in path order, and the tokens that are its placeholders."""
    found: list[tuple[MediaItem, list[int]]] = []
    growing: dict[bytes, list[int]] = {}
    node: Node = holder if isinstance(holder, Node) else holder.parent
    for turn in node.path():
        for item in turn.media:
            if item.placeholders_before == 0:
                growing[item.identity] = []
                found.append((item, growing[item.identity]))
            for offset, length in item.spans:
                growing[item.identity] += range(turn.start + offset, turn.start + offset + length)
    return found


def expected(holder: Holder, start: int, stop: int) -> dict[str, Any] | None:
    """A window's ids, types and items; None where transformers cannot take it."""
    positions_of = holder.scheme
    if holder.position_state().open_block is not None:
        return None
    params, ids = positions_of.params, holder.input_ids().tolist()
    types, inside, items = [0] * len(ids), set(), []
    for item, tokens in placed(holder):
        if tokens[-1] < start or tokens[0] >= stop:
            continue
        whole = len(tokens) == positions_of.num_placeholders(item)
        heard = item.modality == "video" and item.audio_feature_length is not None
        unseen = item.modality == "video" and positions_of.family == "paddleocr_vl"
        if tokens[0] < start or tokens[-1] >= stop or not whole or heard or unseen:
            return None
        items.append(item)
        kind = "image" if positions_of.family == "glm4v" else item.modality
        for at in tokens:
            ids[at], types[at] = params[f"{kind}_token_id"], TYPES[item.modality]
        inside |= set(tokens)
    pads = {params.get(f"{kind}_token_id") for kind in TYPES}
    if any(ids[at] in pads for at in range(start, stop) if at not in inside):
        return None
    return {"ids": ids[start:stop], "types": types[start:stop], "items": items}


# --- random forests and windows -------------------------------------------------------------------------------------------


def forest(rng: random.Random, family: str) -> list[Holder]:
    """The nodes of a random tree of a family, and drafts on some of them."""
    history = draw_history(rng, family).history
    session = SessionStore.in_memory().create("s", scheme=scheme(f"{family}@hf5", **history.params))
    nodes: list[Node] = [session.root]
    for turn in history.turns():
        if turn.tokens or nodes[-1].stop:  # there is no empty turn under the root
            nodes.append(session.append(nodes[-1], turn.tokens, media=turn.media))
    whole = [node for node in nodes if node.position_state().open_block is None]
    drafts: list[Holder] = []
    for _ in range(rng.randint(0, 4)):
        parent = rng.choice(whole)
        draft = session.draft(parent)
        draft.extend([rng.randint(1, 40) for _ in range(rng.randint(1, 5))])
        drafts.append(draft)
        if rng.random() < 0.5:
            drafts.append(draft := draft.commit())  # type: ignore[assignment]
            whole.append(session.append(draft, [rng.randint(1, 40) for _ in range(rng.randint(1, 5))]))  # type: ignore[arg-type]
    return [*nodes[1:], *whole, *drafts]


def windows(rng: random.Random, holders: Sequence[Holder], from_start: bool) -> list[tuple[Holder, int, int]]:
    """Up to four windows that transformers can take."""
    found: list[tuple[Holder, int, int]] = []
    for _ in range(16):
        holder = rng.choice(holders)
        start = 0 if from_start else rng.choice((0, rng.randint(0, holder.stop)))
        stop = rng.choice((holder.stop, rng.randint(start, holder.stop)))
        if len(found) < 4 and expected(holder, start, stop) is not None:
            found.append((holder, start, stop))
    return found


def assert_row(inputs: Any, row: int, holder: Holder, start: int, stop: int, mode: Any) -> None:
    """The columns of one row are the window, at the positions of its node."""
    said, alone = inputs.rows[row], expected(holder, start, stop)
    assert alone is not None
    columns = slice(said.start, said.stop)
    assert said.window == (start, stop)
    assert said.stop - said.start == stop - start
    assert list(said.items) == alone["items"]
    at = said.row
    assert inputs["input_ids"][at, columns].tolist() == alone["ids"]
    positions = inputs["position_ids"][-holder.scheme.num_axes :, at, columns]
    assert positions.tolist() == holder.positions(start, stop, mode).tolist()
    if "mm_token_type_ids" in inputs:
        assert inputs["mm_token_type_ids"][at, columns].tolist() == alone["types"]


@pytest.mark.parametrize("family", MEDIA_FAMILIES)
@BATCHES
@given(rng=RANDOMS)
def test_every_row_is_the_request_alone(family: str, rng: random.Random) -> None:
    holders = forest(rng, family)
    mode: Any = rng.choice(("as_decoded", "as_replayed"))
    chosen = windows(rng, holders, from_start=False)
    if not chosen:
        return
    padding: Any = rng.choice(("left", "right"))
    if adapter._FAMILIES[family].padded:  # windows of one length, without a gap
        chosen = [each for each in chosen if each[2] - each[1] == chosen[0][2] - chosen[0][1] and each[1] == chosen[0][1]]
    held, starts, stops = (list(each) for each in zip(*chosen, strict=True))
    note(f"{padding} {mode} {chosen}")
    gaps = 0 if adapter._FAMILIES[family].padded else rng.randint(0, 3)
    mask = torch.zeros((len(held), max(starts) + gaps), dtype=torch.int64)
    for row, start in enumerate(starts):
        mask[row, rng.sample(range(mask.shape[1]), start)] = 1
    inputs = to_transformers(held, starts, stop=stops, mode=mode, padding=padding, pad_token_id=45, cache_mask=mask)
    width = max(stop - start for _, start, stop in chosen)
    assert inputs["input_ids"].shape == (len(held), width)
    assert inputs["position_ids"].shape == (held[0].scheme.num_axes, len(held), width)
    assert inputs["attention_mask"][:, : mask.shape[1]].tolist() == mask.tolist()
    for row, (holder, start, stop) in enumerate(chosen):
        assert_row(inputs, row, holder, start, stop, mode)
        alone = to_transformers(holder, start, stop=stop, mode=mode)
        real = slice(inputs.rows[row].start, inputs.rows[row].stop)
        assert real == (slice(width - (stop - start), width) if padding == "left" else slice(0, stop - start))
        assert inputs.rows[row].row == row
        for name in alone.keys() - {"position_ids", "attention_mask"}:
            assert torch.equal(inputs[name][row, real], alone[name][0]), name
            rest = torch.cat([inputs[name][row, : real.start], inputs[name][row, real.stop :]])
            assert set(rest.tolist()) <= {45 if name == "input_ids" else 0}, name
        assert torch.equal(inputs["position_ids"][:, row, real], alone["position_ids"][:, 0])
        rest = torch.cat([inputs["position_ids"][:, row, : real.start], inputs["position_ids"][:, row, real.stop :]], dim=1)
        assert set(rest.flatten().tolist()) <= {0}
        seen = inputs["attention_mask"][row, mask.shape[1] :]
        assert seen.nonzero()[:, 0].tolist() == list(range(real.start, real.stop))
        assert alone["attention_mask"].tolist() == [[1] * stop]
    assert all(tensor.dtype == torch.int64 for name, tensor in inputs.items() if name != "position_ids")
    assert inputs["position_ids"].dtype == (torch.int64 if held[0].scheme.dtype.kind == "i" else torch.float32)


@pytest.mark.parametrize("family", [family for family in MEDIA_FAMILIES if adapter._FAMILIES[family].packed is None])
@BATCHES
@given(rng=RANDOMS)
def test_packed_rows_are_the_requests_one_after_another(family: str, rng: random.Random) -> None:
    chosen = windows(rng, forest(rng, family), from_start=True)
    if not chosen:
        return
    held, _, stops = (list(each) for each in zip(*chosen, strict=True))
    inputs = to_transformers(held, stop=stops, padding="packed")
    bounds = np.cumsum([0, *stops]).tolist()
    assert inputs["cu_seq_lens_q"].tolist() == inputs["cu_seq_lens_k"].tolist() == bounds
    assert inputs["cu_seq_lens_q"].dtype == inputs["cu_seq_lens_k"].dtype == torch.int32
    assert inputs["max_length_q"] == inputs["max_length_k"] == max(stops)
    assert inputs["use_cache"] is False
    assert "attention_mask" not in inputs
    assert inputs["input_ids"].shape == (1, bounds[-1])
    assert inputs["position_ids"].shape == (1 + held[0].scheme.num_axes, 1, bounds[-1])
    assert inputs["position_ids"][0, 0].tolist() == [at for stop in stops for at in range(stop)]
    for row, (holder, start, stop) in enumerate(chosen):
        assert_row(inputs, row, holder, start, stop, "as_decoded")
        assert (inputs.rows[row].row, inputs.rows[row].start) == (0, bounds[row])


@pytest.mark.parametrize("family", MEDIA_FAMILIES)
@BATCHES
@given(rng=RANDOMS)
def test_what_cannot_be_taken_is_refused(family: str, rng: random.Random) -> None:
    """Every window of a random path is made or refused as the walk over its tokens says, and a batch with one such whole."""
    holder = rng.choice(forest(rng, family))
    for _ in range(6):
        start = rng.randint(0, holder.stop)
        stop = rng.randint(start, holder.stop)
        if expected(holder, start, stop) is None:
            with pytest.raises((Unsupported, MediaSpanError)):
                to_transformers(holder, start, stop=stop)
            with pytest.raises((Unsupported, MediaSpanError)):
                to_transformers([holder, holder], [0, start], stop=[0, stop])
        else:
            assert_row(to_transformers(holder, start, stop=stop), 0, holder, start, stop, "as_decoded")


# --- one batch, by hand ---------------------------------------------------------------------------------------------------


def pair() -> tuple[Session, Node, Node]:
    """Seven tokens with an image at [1, 5), and a reply of three behind four tokens of text."""
    session = SessionStore.in_memory().create("s", scheme=vl("hf5", vision_end_token_id=53))
    shown = session.append(session.root, [VISION_START, 1, 2, 3, 4, 53, 7], media=[image("a", 1)])
    said = session.append(session.root, [20, 21, 22, 23])
    with session.draft(said, key="r") as draft:
        draft.extend([30, 31, 32])
        return session, shown, draft.commit()


def test_a_left_padded_batch() -> None:
    session, shown, reply = pair()
    before = tree_print(session)
    inputs = to_transformers([shown, reply], stop=[None, 5], pad_token_id=9)
    assert inputs["input_ids"].tolist() == [[VISION_START, *[IMAGE_PAD] * 4, 53, 7], [9, 9, 20, 21, 22, 23, 30]]
    assert inputs["attention_mask"].tolist() == [[1] * 7, [0, 0, 1, 1, 1, 1, 1]]
    assert inputs["mm_token_type_ids"].tolist() == [[0, 1, 1, 1, 1, 0, 0], [0] * 7]
    assert inputs["position_ids"].tolist() == [
        [[0, 1, 1, 1, 1, 3, 4], [0, 0, 0, 1, 2, 3, 4]],
        [[0, 1, 1, 2, 2, 3, 4], [0, 0, 0, 1, 2, 3, 4]],
        [[0, 1, 2, 1, 2, 3, 4], [0, 0, 0, 1, 2, 3, 4]],
    ]
    assert [row[:4] for row in inputs.rows] == [(0, 0, 7, (0, 7)), (1, 2, 7, (0, 5))]
    assert [row.items for row in inputs.rows] == [shown.media, ()]
    for tensor in inputs.values():
        tensor.fill_(77)
    assert tree_print(session) == before


def test_a_packed_batch() -> None:
    _, shown, reply = pair()
    inputs = to_transformers((reply, shown), padding="packed")
    assert inputs["input_ids"].tolist() == [[20, 21, 22, 23, 30, 31, 32, VISION_START, *[IMAGE_PAD] * 4, 53, 7]]
    assert inputs["position_ids"].tolist() == [
        [[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6]],
        [[0, 1, 2, 3, 4, 5, 6, 0, 1, 1, 1, 1, 3, 4]],
        [[0, 1, 2, 3, 4, 5, 6, 0, 1, 1, 2, 2, 3, 4]],
        [[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 1, 2, 3, 4]],
    ]
    assert inputs["cu_seq_lens_q"].tolist() == [0, 7, 14]
    assert [row[:4] for row in inputs.rows] == [(0, 0, 7, (0, 7)), (0, 7, 14, (0, 7))]


def test_one_picture_shown_twice_is_to_be_encoded_twice() -> None:
    """Pixels go to transformers once for each time an item stands there, row after row, videos by frames only once."""
    session, shown, _ = pair()
    again = session.append(shown, [VISION_START, 1, 2, 3, 4, 53, *[5] * 6], media=[image("a", 1), video("v", 6)])
    inputs = to_transformers([again, shown], padding="right")
    assert [[item.modality for item in row.items] for row in inputs.rows] == [["image", "image", "video"], ["image"]]
    frames = SessionStore.in_memory().create("s", scheme=scheme("qwen3_vl@hf5", image_token_id=50, video_token_id=51))
    clip = MediaItem("video", identity("v"), [(0, 2), (4, 2)], (2, 2, 4))
    node = frames.append(frames.root, [1, 1, 8, 9, 1, 1, 3], media=[clip])
    assert to_transformers(node).rows[0].items == (clip,)
    assert to_transformers(node)["mm_token_type_ids"].tolist() == [[2, 2, 0, 0, 2, 2, 0]]
    for start, stop in ((0, 2), (0, 3), (2, 7), (3, 4), (4, 7)):
        with pytest.raises(Unsupported):
            to_transformers(node, start, stop=stop)
    for start, stop in ((0, 0), (6, 7), (0, 6)):
        assert to_transformers(node, start, stop=stop)["input_ids"].shape == (1, stop - start)


def test_text_rows_stand_in_a_batch_of_another_scheme() -> None:
    """Their axes are alike, and an id that is a placeholder of the other scheme is as stray there."""
    _, shown, reply = pair()
    texts = SessionStore.in_memory().create("t", scheme="text@hf5")
    text = texts.append(texts.root, [1, 2, 3])
    for order in ([text, shown, reply], [shown, text, reply]):
        inputs = to_transformers(order, padding="right")
        row = order.index(text)
        assert inputs["position_ids"][:, row].tolist() == [[0, 1, 2, 0, 0, 0, 0]] * 3
        assert inputs["mm_token_type_ids"].shape == (3, 7)
    packed = to_transformers([text, shown], padding="packed")
    assert packed["position_ids"][:, 0, :3].tolist() == [[0, 1, 2]] * 4
    stray = texts.append(texts.root, [1, IMAGE_PAD])
    assert to_transformers(stray)["input_ids"].tolist() == [[1, IMAGE_PAD]]
    with pytest.raises(Unsupported, match="image_token_id"):
        to_transformers([stray, shown])
    floats = SessionStore.in_memory().create("f", scheme=scheme("qwen3_omni@hf5", position_id_per_seconds=25))
    sound = floats.append(floats.root, [1, 2])
    assert to_transformers([text, sound])["position_ids"].dtype == torch.float32
    with pytest.raises(Unsupported, match=r"qwen2_5_vl@hf5.*qwen3_omni@hf5"):
        to_transformers([shown, text, sound])
    other = SessionStore.in_memory().create("o", scheme=vl("hf5"))
    with pytest.raises(Unsupported, match="parameters"):
        to_transformers([shown, other.append(other.root, [1])])


def test_unequal_prefixes_need_to_be_told_where_they_are() -> None:
    _, shown, reply = pair()
    with pytest.raises(Unsupported, match="cache_mask") as caught:
        to_transformers([shown, reply], [5, 4])
    assert caught.value.prefix_len == 5
    assert to_transformers([shown, reply], 5)["attention_mask"].tolist() == [[1] * 7] * 2
    assert to_transformers([shown, reply], [5, 5])["input_ids"].tolist() == [[53, 7], [31, 32]]
    mask = torch.tensor([[True, True, True, True, True, False], [False, True, False, True, True, True]])
    inputs = to_transformers([shown, reply], [5, 4], cache_mask=mask)
    assert inputs["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 1, 1, 1, 1, 1]]
    assert inputs["input_ids"].tolist() == [[0, 53, 7], [30, 31, 32]]
    wrong: list[tuple[Any, type[Exception]]] = [
        (mask[:1], OutOfRange),
        (mask[0], OutOfRange),
        (mask.flip(0), OutOfRange),
        (mask[:, :4], OutOfRange),
        (mask.numpy(), TypeError),
        (mask.float(), TypeError),
        ([[1] * 5, [1] * 4], TypeError),
    ]
    for each, error in wrong:
        with pytest.raises(error) as failure:
            to_transformers([shown, reply], [5, 4], cache_mask=each)
        assert type(failure.value) is error


def test_packed_paths_are_whole() -> None:
    _, shown, reply = pair()
    with pytest.raises(Unsupported, match="no cache"):
        to_transformers([shown, reply], [0, 1], padding="packed")
    with pytest.raises(Unsupported, match="no cache"):
        to_transformers([shown], padding="packed", cache_mask=torch.ones((1, 0)))
    texts = SessionStore.in_memory().create("t", scheme="text@hf5")
    moved = texts.append(texts.root, [1, 2], positions=np.array([[4, 5]]))
    text = texts.append(texts.root, [3])
    assert to_transformers([moved, text])["position_ids"].tolist() == [[4, 5], [0, 0]]
    with pytest.raises(Unsupported, match="count from 0"):
        to_transformers([text, moved], padding="packed")
    empty = to_transformers([texts.root, text, texts.root], padding="packed")
    assert empty["cu_seq_lens_k"].tolist() == [0, 0, 1, 1]
    assert empty["position_ids"].tolist() == [[0]]


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"nodes": []}, OutOfRange),
        ({"nodes": ()}, OutOfRange),
        ({"nodes": {}}, TypeError),
        ({"nodes": [None]}, TypeError),
        ({"prefix_len": [0]}, OutOfRange),
        ({"prefix_len": [0, 1, 2]}, OutOfRange),
        ({"prefix_len": [0, None]}, TypeError),
        ({"prefix_len": [0, 8]}, OutOfRange),
        ({"stop": [1]}, OutOfRange),
        ({"stop": 8}, OutOfRange),
        ({"prefix_len": 6, "stop": [7, 1]}, OutOfRange),
        ({"stop": 1.0}, TypeError),
        ({"padding": "middle"}, Unsupported),
        ({"padding": None}, TypeError),
        ({"pad_token_id": -1}, OutOfRange),
        ({"pad_token_id": "0"}, TypeError),
        ({"pad_token_id": IMAGE_PAD, "stop": [7, 1]}, Unsupported),
        ({"pad_token_id": VIDEO_PAD, "stop": [7, 1]}, Unsupported),
        ({"tail_policy": "drop"}, Unsupported),
        ({"cache_mask": [[], []]}, TypeError),
        *(({"cache_mask": torch.zeros(2, 0, dtype=kind)}, TypeError) for kind in (torch.float32, torch.complex64)),
        ({"cache_mask": torch.zeros((2, 3), dtype=torch.int64).to_sparse()}, TypeError),
    ],
)
def test_arguments_that_are_refused(changed: dict[str, Any], error: type[Exception]) -> None:
    _, shown, reply = pair()
    arguments: dict[str, Any] = {"nodes": [shown, reply], **changed}
    with pytest.raises(error) as caught:
        to_transformers(**arguments)
    assert type(caught.value) is error


def test_a_pad_id_matters_only_where_there_is_padding() -> None:
    _, shown, reply = pair()
    assert to_transformers([shown, reply], pad_token_id=IMAGE_PAD)["input_ids"].shape == (2, 7)


def test_a_dropped_tail_is_left_out_and_recorded() -> None:
    session, _, reply = pair()
    after = session.append(reply, [40, 41])
    kept = to_transformers([after, reply])
    assert [row.dropped for row in kept.rows] == [(), ()]
    inputs = to_transformers([after, reply], tail_policy="drop_last")
    assert inputs["input_ids"].tolist() == [[20, 21, 22, 23, 30, 31, 40, 41], [0, 0, 20, 21, 22, 23, 30, 31]]
    assert inputs["position_ids"][:, 0].tolist() == [list(range(8))] * 3
    assert [(row.dropped, row.window) for row in inputs.rows] == [((6,), (0, 8)), ((6,), (0, 6))]
    assert to_transformers(after, 6, tail_policy="drop_last")["input_ids"].tolist() == [[40, 41]]


def test_unpaired_tool_calls_are_refused_when_asked() -> None:
    session, shown, _ = pair()
    call = session.append(shown, [1], metadata={"tool_calls": ["c"]})
    result = session.append(call, [2], metadata={"tool_call_id": "c"})
    assert to_transformers([call, result])["input_ids"].shape == (2, 9)
    assert to_transformers([shown, result], paired_calls=True)["input_ids"].shape == (2, 9)
    with pytest.raises(Unsupported) as caught:
        to_transformers([result, call], paired_calls=True)
    assert caught.value.node == call


def test_every_scheme_is_taken_or_refused_by_name() -> None:
    for name in known_schemes():
        family = name.partition("@")[0]
        assert (family in adapter._FAMILIES) != (family in adapter._REFUSED), name
    images = SessionStore.in_memory().create("s", scheme=scheme("glm_image@hf5"))
    with pytest.raises(Unsupported, match="ids of the images"):
        to_transformers(images.append(images.root, [1]))


def test_what_a_family_has_no_input_for() -> None:
    omni = SessionStore.in_memory().create(
        "s",
        scheme=scheme(
            "qwen2_5_omni@hf5",
            video_token_id=51,
            audio_token_id=49,
            vision_start_token_id=52,
            audio_start_token_id=54,
            position_id_per_seconds=25,
        ),
    )
    heard = MediaItem("video", identity("v"), [(0, 9)], (2, 2, 4), 1.0, 20)
    node = omni.append(omni.root, [1] * 9, media=[heard])
    with pytest.raises(Unsupported, match="audio") as caught:
        to_transformers(node)
    assert caught.value.item == heard
    paddle = SessionStore.in_memory().create("s", scheme=scheme("paddleocr_vl@hf5", image_token_id=50, video_token_id=51))
    with pytest.raises(Unsupported, match="no video"):
        to_transformers(paddle.append(paddle.root, [1] * 6, media=[video("v", 0)]))
    ernie = SessionStore.in_memory().create("s", scheme=scheme("ernie4_5_vl@hf5", image_token_id=50, image_start_token_id=52))
    with pytest.raises(Unsupported, match="image_end_token_id"):
        to_transformers(ernie.append(ernie.root, [1]))


def test_tensors_are_made_on_the_device() -> None:
    _, shown, reply = pair()
    paddings: tuple[Any, ...] = ("left", "packed")
    for padding in paddings:
        inputs = to_transformers([shown, reply], device="meta", padding=padding)
        assert {tensor.device.type for tensor in inputs.values() if isinstance(tensor, torch.Tensor)} == {"meta"}
