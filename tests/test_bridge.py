"""The bridge: a window of a path as tensors, inputs of transformers, and a tiny model that must agree with itself."""

from __future__ import annotations

import copy
import sys
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from transformers import DynamicCache, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from engine_bridge import RequestInputs, request_inputs, to_sglang, to_transformers, to_vllm
from sessiontree import (
    Draft,
    MediaItem,
    MediaSpanError,
    NeedsExtra,
    NeedsMedia,
    Node,
    OutOfRange,
    Position,
    PositionError,
    Session,
    SessionStore,
    Unsupported,
)
from sessiontree.positions import scheme
from tests.test_tree import IMAGE_PAD, VIDEO_PAD, VISION_END, VISION_START, identity, image, node_print, tree_print, video, vl

MODES: tuple[Any, ...] = ("as_decoded", "as_replayed")


def sample(rule: str = "hf5") -> tuple[Session, Node, Draft]:
    """image [1, 5), video [8, 14), a reply, another turn with the same image, a draft."""
    session = SessionStore.in_memory().create("s", scheme=vl(rule, tokens_per_second=7))
    first = session.append(session.root, [VISION_START, *[IMAGE_PAD] * 4, VISION_END, 7], media=[image("a", 1)])
    second = session.append(first, [8, *[VIDEO_PAD] * 6, 9], media=[video("v", 1)])
    with session.draft(second) as draft:
        draft.extend([20, 21, 22])
        reply = draft.commit()
    session.append(reply, [99])
    third = session.append(reply, [*[IMAGE_PAD] * 4, 5], media=[image("a", 0)])
    draft = session.draft(third)
    draft.extend([30, 31])
    return session, third, draft


# --- request_inputs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["hf5", "sglang", "vllm"])
@pytest.mark.parametrize("mode", MODES)
def test_every_prefix_of_a_node_and_a_draft(rule: str, mode: Any) -> None:
    session, node, draft = sample(rule)
    before = tree_print(session)
    for holder in (node, draft):
        for prefix_len in range(holder.stop + 1):
            inputs = request_inputs(holder, prefix_len, mode=mode)
            count = holder.stop - prefix_len
            assert inputs.input_ids.shape == (count,)
            assert inputs.positions.shape == (3, count)
            assert inputs.mrope_position_delta.shape == (1, 1)
            assert {inputs.input_ids.dtype, inputs.positions.dtype, inputs.mrope_position_delta.dtype} == {torch.int64}
            assert inputs.input_ids.tolist() == holder.input_ids(prefix_len).tolist()
            assert inputs.positions.tolist() == holder.positions(prefix_len, None, mode).tolist()
            state = holder.position_state(mode)
            assert inputs.mrope_position_delta.item() == state.max_position + 1 - holder.stop
            assert inputs.media_spans == holder.media_spans(prefix_len)
            needed = []
            for item, _, _ in inputs.media_spans:
                if item.identity not in needed:
                    needed.append(item.identity)
            assert [item.identity for item in inputs.needed_items] == needed
            assert (inputs.mode, inputs.prefix_len) == (mode, prefix_len)
    assert tree_print(session) == before


def test_the_modes_differ_where_they_should() -> None:
    _, node, _ = sample("hf5")
    decoded, replayed = (request_inputs(node, mode=mode) for mode in MODES)
    assert decoded.positions.tolist() != replayed.positions.tolist()
    assert decoded.mrope_position_delta.item() == node.mrope_position_delta != replayed.mrope_position_delta.item()
    assert request_inputs(node).positions.tolist() == decoded.positions.tolist(), "as decoded is the default"


def test_needed_items_are_those_of_the_window_each_once() -> None:
    _, node, _ = sample()
    assert [item.identity for item in request_inputs(node).needed_items] == [identity("a"), identity("v")]
    assert [item.identity for item in request_inputs(node, 13).needed_items] == [identity("v"), identity("a")]
    assert [item.identity for item in request_inputs(node, 14).needed_items] == [identity("a")]
    assert request_inputs(node, node.stop - 1).needed_items == ()
    clipped = request_inputs(node, 3).media_spans
    assert [span[1:] for span in clipped] == [(3, 5), (8, 14), (18, 22)]
    assert request_inputs(node, node.stop).media_spans == ()


def test_features_are_asked_for_only_by_the_flag() -> None:
    _, node, draft = sample()
    with pytest.raises(NeedsMedia) as caught:
        request_inputs(node, 4, features=True)
    assert [item.identity for item in caught.value.items] == [identity("a"), identity("v")]
    with pytest.raises(NeedsMedia):
        request_inputs(draft, features=True)
    assert request_inputs(node, node.stop - 1, features=True).input_ids.tolist() == [5]
    assert request_inputs(draft, node.stop, features=True).input_ids.tolist() == [30, 31]


@pytest.mark.parametrize("mode", MODES)
def test_writing_to_the_tensors_reaches_no_node(mode: Any) -> None:
    session, node, draft = sample()
    before = tree_print(session), draft.input_ids().tolist(), draft.positions().tolist()
    for holder in (*session.tree, draft):
        for prefix_len in {0, holder.stop // 2, holder.stop}:
            inputs = request_inputs(holder, prefix_len, mode=mode)
            for tensor in (inputs.input_ids, inputs.positions, inputs.mrope_position_delta):
                tensor.fill_(77)
            if holder is node and not prefix_len:
                for tensor in to_transformers(holder, mode=mode).values():
                    tensor.fill_(78)
    assert (tree_print(session), draft.input_ids().tolist(), draft.positions().tolist()) == before
    big = session.append(node, range(100, 10_100))  # read as a view
    whole = node_print(big)
    request_inputs(big).input_ids.fill_(77)
    to_transformers(big, big.start)["input_ids"].fill_(77)
    assert node_print(big) == whole


@pytest.mark.parametrize(
    ("prefix_len", "error"),
    [
        (-1, OutOfRange),
        (24, OutOfRange),
        (2**70, OutOfRange),
        (1.0, TypeError),
        ("1", TypeError),
        (None, TypeError),
        (True, TypeError),
        (Position(1), TypeError),
        (torch.tensor(1.0), TypeError),
    ],
)
def test_prefixes_that_are_refused(prefix_len: Any, error: type[Exception]) -> None:
    _, node, _ = sample()
    for make in (request_inputs, to_transformers):
        with pytest.raises(error) as caught:
            make(node, prefix_len)
        assert type(caught.value) is error
    four: Any = np.int64(4)
    assert request_inputs(node, four).prefix_len == 4


@pytest.mark.parametrize("wrong", [None, 1, "node", [1, 2], bytes(32)])
def test_only_nodes_and_drafts_have_inputs(wrong: Any) -> None:
    for make in (request_inputs, to_transformers):
        with pytest.raises(TypeError):
            make(wrong)


def test_a_mode_that_does_not_exist() -> None:
    _, node, draft = sample()
    mode: Any = "guessed"
    for holder in (node, draft):
        with pytest.raises(PositionError):
            request_inputs(holder, mode=mode)
        with pytest.raises(PositionError):
            request_inputs(holder, holder.stop, mode=mode)


def test_request_inputs_are_frozen_and_fit_together() -> None:
    _, node, _ = sample()
    inputs: Any = request_inputs(node)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        inputs.prefix_len = 1
    with pytest.raises(OutOfRange):
        RequestInputs(torch.zeros(3, dtype=torch.int64), torch.zeros((3, 4)), torch.zeros((1, 1)), (), (), (), "as_decoded", 0)


def test_text_has_one_axis() -> None:
    session = SessionStore.in_memory().create("s", scheme="text@vllm")
    node = session.append(session.append(session.root, [5, 6]), [7])
    inputs = request_inputs(node, 1)
    assert inputs.input_ids.tolist() == [6, 7]
    assert inputs.positions.tolist() == [[1, 2]]
    assert inputs.mrope_position_delta.tolist() == [[0]]
    root = request_inputs(session.root)
    assert (root.input_ids.shape, root.positions.shape, root.mrope_position_delta.tolist()) == ((0,), (1, 0), [[0]])
    given = to_transformers(node, 1)
    assert sorted(given) == ["attention_mask", "input_ids", "position_ids"]
    assert given["input_ids"].tolist() == [[6, 7]]
    assert given["position_ids"].tolist() == [[1, 2]]
    assert given["attention_mask"].tolist() == [[1, 1, 1]]


# --- to_transformers ----------------------------------------------------------------------------------------------------


def test_inputs_of_transformers() -> None:
    session = SessionStore.in_memory().create("s", scheme=vl("hf5"))
    ids = [1, 900, 901, 902, 903, 2, *[77] * 6, 3]  # engines overwrite what is inside spans
    node = session.append(session.root, ids, media=[image("a", 1), video("v", 6)])
    for prefix_len in (0, 1, 5, 6, 12, 13):
        given = to_transformers(node, prefix_len)
        assert given["input_ids"].tolist() == [[1, *[IMAGE_PAD] * 4, 2, *[VIDEO_PAD] * 6, 3][prefix_len:]]
        assert given["mm_token_type_ids"].tolist() == [[0, 1, 1, 1, 1, 0, 2, 2, 2, 2, 2, 2, 0][prefix_len:]]
        assert given["position_ids"].shape == (3, 1, 13 - prefix_len)
        assert given["position_ids"][:, 0].tolist() == node.positions(prefix_len).tolist()
        assert given["attention_mask"].tolist() == [[1] * 13]
        assert all(tensor.dtype == torch.int64 for tensor in given.values())
    assert node.token_ids.tolist() == ids


def test_the_mode_reaches_transformers() -> None:
    _, node, draft = sample("hf5")
    for holder in (node, draft):
        for mode in MODES:
            assert to_transformers(holder, mode=mode)["position_ids"][:, 0].tolist() == holder.positions(mode=mode).tolist()


@pytest.mark.parametrize("prefix_len", [2, 3, 4, 9, 13, 19])
def test_a_window_that_begins_inside_an_item_is_refused(prefix_len: int) -> None:
    _, node, draft = sample()
    for holder in (node, draft):
        with pytest.raises(Unsupported) as caught:
            to_transformers(holder, prefix_len)
        assert caught.value.prefix_len == prefix_len
        assert caught.value.item in [item for item, _, _ in holder.media_spans()]


def test_items_in_parts_are_taken_whole_or_refused() -> None:
    """A window that begins or ends where one part of an item meets the next is inside the item."""
    session = SessionStore.in_memory().create("s", scheme=vl("hf5"))
    first = MediaItem("image", identity("a"), [(1, 3)], (1, 4, 4), unfinished=True)
    rest = MediaItem("image", identity("a"), [(0, 1)], (1, 4, 4), placeholders_before=3)
    part = session.append(session.root, [1, *[IMAGE_PAD] * 3], media=[first])
    whole = session.append(part, [IMAGE_PAD, 2], media=[rest])
    given = to_transformers(whole)
    assert given["input_ids"].tolist() == [[1, *[IMAGE_PAD] * 4, 2]]
    assert to_transformers(whole, 5)["input_ids"].tolist() == [[2]]
    with pytest.raises(Unsupported):
        to_transformers(whole, part.stop)
    with pytest.raises(MediaSpanError):
        to_transformers(part)


@pytest.mark.parametrize("stray", [IMAGE_PAD, VIDEO_PAD])
def test_a_placeholder_id_outside_every_span_is_refused(stray: int) -> None:
    session = SessionStore.in_memory().create("s", scheme=vl("hf5"))
    node = session.append(session.root, [1, 2, stray, 3, *[IMAGE_PAD] * 4], media=[image("a", 4)])
    for prefix_len in (0, 2):
        with pytest.raises(Unsupported) as caught:
            to_transformers(node, prefix_len)
        assert caught.value.index == 2
    assert to_transformers(node, 3)["input_ids"].tolist() == [[3, *[IMAGE_PAD] * 4]]
    assert request_inputs(node).input_ids.tolist() == node.input_ids().tolist(), "elsewhere it is text"


def test_a_scheme_without_the_placeholder_id_is_refused() -> None:
    session = SessionStore.in_memory().create("s", scheme=scheme("qwen2_vl@hf5", video_token_id=VIDEO_PAD))
    text = session.append(session.root, [1, IMAGE_PAD])
    assert to_transformers(text)["mm_token_type_ids"].tolist() == [[0, 0]]
    node = session.append(text, [IMAGE_PAD] * 4, media=[image("a", 0)])
    with pytest.raises(Unsupported, match="image_token_id"):
        to_transformers(node)


# --- a model ------------------------------------------------------------------------------------------------------------

VOCABULARY = 128


@pytest.fixture(scope="module")
def model() -> Any:
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "initializer_range": 0.2,
            "bos_token_id": None,
            "eos_token_id": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [0],
            "initializer_range": 0.2,
        },
        image_token_id=IMAGE_PAD,
        video_token_id=VIDEO_PAD,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return Qwen2_5_VLForConditionalGeneration(config).float().eval()


GRIDS = {"a": (2, 3), "b": (3, 2), "c": (1, 4)}


def pixels(name: str) -> torch.Tensor:
    height, width = GRIDS[name]
    generator = torch.Generator().manual_seed(ord(name))
    return torch.randn((4 * height * width, 3 * 2 * 14 * 14), generator=generator)


def turn(name: str, text: list[int]) -> tuple[list[int], list[MediaItem]]:
    height, width = GRIDS[name]
    return [VISION_START, *[IMAGE_PAD] * (height * width), VISION_END, *text], [image(name, 1, height, width)]


def pixel_inputs(names: list[str]) -> dict[str, torch.Tensor]:
    if not names:
        return {}
    return {
        "pixel_values": torch.cat([pixels(name) for name in names]),
        "image_grid_thw": torch.tensor([[1, 2 * GRIDS[name][0], 2 * GRIDS[name][1]] for name in names]),
    }


def run(model: Any, holder: Node | Draft, cache: Any, shift: int = 0) -> torch.Tensor:
    """The logits of what the cache lacks of a path, fed at the path's positions."""
    cached = cache.get_seq_length()
    given = to_transformers(holder, cached)
    given["position_ids"] = given["position_ids"] + shift
    names = [name for item, _, _ in holder.media_spans(cached) for name in GRIDS if item.identity == identity(name)]
    with torch.inference_mode():
        logits: torch.Tensor = model(**given, **pixel_inputs(names), past_key_values=cache, use_cache=True).logits[0]
    return logits


def replay(model: Any, node: Node) -> torch.Tensor:
    """One forward of transformers over the whole path, at the positions that it computes itself."""
    names = [name for item, _, _ in node.media_spans() for name in GRIDS if item.identity == identity(name)]
    ids = torch.tensor(node.input_ids()[None].astype(np.int64))
    model.model.rope_deltas = None
    with torch.inference_mode():
        logits: torch.Tensor = model(
            input_ids=ids, mm_token_type_ids=(ids == IMAGE_PAD).long(), attention_mask=torch.ones_like(ids), **pixel_inputs(names)
        ).logits[0]
    return logits


def test_chunks_and_branches_agree_with_one_forward(model: Any) -> None:
    session = SessionStore.in_memory().create("s", scheme=vl("hf5"))
    ids, media = turn("a", [10, 11, 12])
    first = session.append(session.root, ids, media=media)
    cache = DynamicCache(config=model.config)
    rows = [run(model, first, cache)]
    draft = session.draft(first)
    for token in (20, 21, 22):  # decoded one by one
        draft.append(token)
        rows.append(run(model, draft, cache))
    reply = draft.commit()
    at_reply = copy.deepcopy(cache)
    ids, media = turn("b", [13, 14])
    second = session.append(reply, ids, media=media)
    chunked = torch.cat([*rows, run(model, second, cache)])
    whole = replay(model, second)
    assert chunked.shape == whole.shape == (second.stop, VOCABULARY)
    assert (chunked - whole).abs().max() < 1e-3
    # A branch from the reply, with another image, on a copy of its cache; then from inside the first turn's text.
    ids, media = turn("c", [15])
    branch = session.append(reply, ids, media=media)
    assert (run(model, branch, at_reply) - replay(model, branch)[reply.stop :]).abs().max() < 1e-3
    cut = session.truncate(first, first.stop - 1)
    other = session.append(cut, [16, 17])
    at_cut = DynamicCache(config=model.config)
    rows = [run(model, cut, at_cut), run(model, other, at_cut)]
    assert (torch.cat(rows) - replay(model, other)).abs().max() < 1e-3


def test_the_model_tells_positions_apart(model: Any) -> None:
    """What makes the test above able to fail: one position more gives other logits."""
    session = SessionStore.in_memory().create("s", scheme=vl("hf5"))
    ids, media = turn("a", [10, 11, 12])
    first = session.append(session.root, ids, media=media)
    second = session.append(first, [20, 21])
    cache = DynamicCache(config=model.config)
    run(model, first, cache)
    right, wrong = run(model, second, copy.deepcopy(cache)), run(model, second, cache, shift=1)
    assert (right - replay(model, second)[first.stop :]).abs().max() < 1e-3
    assert (wrong - right).abs().max() > 1e-2


def test_one_content_with_two_grids_is_two_items() -> None:
    session = SessionStore.in_memory().create("s", scheme=vl("hf5"))
    square = MediaItem("image", identity("a"), [(0, 4)], (1, 4, 4))
    wide = MediaItem("image", identity("a"), [(5, 2)], (1, 2, 4))
    node = session.append(session.root, [*[IMAGE_PAD] * 4, 9, *[IMAGE_PAD] * 2], media=[wide, square])
    again = session.append(node, [8, *[IMAGE_PAD] * 4], media=[square.with_spans([(1, 4)])])
    inputs = request_inputs(again)
    assert inputs.needed_items == (square, wide)
    assert [(item.grid_thw, start, stop) for item, start, stop in inputs.media_spans] == [
        ((1, 4, 4), 0, 4),
        ((1, 2, 4), 5, 7),
        ((1, 4, 4), 8, 12),
    ]
    assert request_inputs(again, 7).needed_items == again.media


def test_a_clipped_span_says_which_row_of_the_encoder_output_it_begins_at() -> None:
    session = SessionStore.in_memory().create("s", scheme=vl("sglang"))
    clip = MediaItem("video", identity("v"), [(1, 5)], (3, 4, 4), 1.0, unfinished=True)
    rest = MediaItem("video", identity("v"), [(0, 7)], (3, 4, 4), 1.0, placeholders_before=5)
    part = session.append(session.root, [1, *[VIDEO_PAD] * 5], media=[clip])
    whole = session.append(part, [*[VIDEO_PAD] * 7, 2], media=[rest])
    for prefix_len in range(whole.stop + 1):
        inputs = request_inputs(whole, prefix_len)
        rows = [
            row + at
            for (_, start, stop), row in zip(inputs.media_spans, inputs.first_rows, strict=True)
            for at in range(stop - start)
        ]
        assert rows == list(range(max(0, prefix_len - 1), 12)) if prefix_len <= 13 else rows == []
    with session.draft(whole) as draft:
        draft.extend([5, 6])
        assert request_inputs(draft, 3).first_rows == (2, 5)
        assert request_inputs(draft, 15).first_rows == ()


def test_one_request_may_come_as_a_sequence() -> None:
    _, node, draft = sample()
    for holder in (node, draft):
        one, listed = to_transformers(holder), to_transformers([holder])
        assert one.keys() == listed.keys()
        assert all(torch.equal(one[name], listed[name]) for name in one)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("how", ["missing", "half there"])
def test_an_engine_that_cannot_be_imported_is_named_with_what_to_install(
    engine: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where something that it needs itself is missing, and by whatever its import then fails."""
    session = SessionStore.in_memory().create("s", scheme=vl(engine))
    node = session.append(session.root, [1, 2, 3])
    for name in [name for name in sys.modules if name.partition(".")[0] == engine]:
        monkeypatch.delitem(sys.modules, name)
    if how == "missing":
        monkeypatch.setitem(sys.modules, engine, None)
    else:
        monkeypatch.setattr(sys, "meta_path", [HalfThere(engine), *sys.meta_path])
    call: Any = {"sglang": to_sglang, "vllm": to_vllm}[engine]
    with pytest.raises(NeedsExtra, match=f"pip install {engine}==") as caught:
        call(node)
    assert caught.value.extra == engine
    assert isinstance(caught.value, ImportError)


class HalfThere:
    """A finder of an engine whose import fails by a KeyError."""

    def __init__(self, engine: str) -> None:
        self.engine = engine

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == self.engine:
            raise KeyError(name)
