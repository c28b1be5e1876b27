"""Requests of SGLang 0.5.23, judged by its own code: message types, scheduler, sessions, position functions, on the CPU."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from engine_bridge.adapters.sglang import ITEM_FIELDS, LOST_IN_SESSIONS, OUTPUT_FIELDS, REQUEST_FIELDS, to_sglang
from engine_bridge.policies import prompt_of
from sessiontree import (
    Draft,
    MediaItem,
    MediaSpanError,
    NeedsMedia,
    Node,
    OutOfRange,
    PositionError,
    Session,
    SessionStore,
    Unsupported,
)
from sessiontree.placeholders import compact, expand, pad_sequence, pad_values
from sessiontree.positions import ExternalPositions, scheme
from sessiontree.replay import replay
from tests.conftest import SOAK
from tests.histories import History, without_leading_empties
from tests.rope_oracle import RANDOMS, TEXT, draw_history
from tests.sglang_engine import engine, needs_sglang
from tests.sglang_scheduler import MESSAGES, REQUESTS, Engine, configured, decoded, prefilled, refused
from tests.test_positions_sglang import FAMILIES, ask
from tests.test_tree import IMAGE_PAD, VIDEO_PAD, VISION_END, VISION_START, identity, image, tree_print, video, vl
from tests.toy import A_IDS, A_TABLE, IMG, PAD_VALUE, VE, VS, toy_scheme

pytestmark = needs_sglang

EXAMPLES = settings(max_examples=200 if SOAK else 15)
PARTS = ("mm_items", "input_ids", "padded_input_ids", "mrope_positions", "mrope_position_delta")


@pytest.fixture(scope="module", autouse=True)
def _configured() -> Iterator[None]:
    with configured():
        yield


def one_image() -> tuple[Session, Node]:
    session = SessionStore.in_memory().create("s", scheme=vl("sglang"))
    return session, session.append(session.root, [VISION_START, *[IMAGE_PAD] * 4, VISION_END, 7], media=[image("a", 1)])


def through_the_wire(request: Any) -> Any:
    """As the scheduler process gets it: encoded, decoded and type-checked by SGLang."""
    io_struct = engine(MESSAGES)
    return io_struct.msgpack_decode(io_struct.msgpack_encode(request))


def accepted(request: Any, scheduler: Engine | None = None) -> Any:
    """The ``Req`` that SGLang's scheduler makes of it."""
    scheduler = Engine() if scheduler is None else scheduler
    scheduler.scheduler.handle_generate_request(request)
    made = scheduler.queue[-1]
    assert refused(made) is None
    return made


def padded(node: Node | Draft) -> list[int]:
    """A path's ids with the sentinels of each span over its placeholders, span by span."""
    ids = node.input_ids().astype(np.int64)
    for item, spans in prompt_of(node).media:
        for start, stop in spans:
            ids[start:stop] = pad_sequence(item.identity, 0, stop - start)
    return [int(token) for token in ids]


def next_decoded(session: Session, node: Node) -> list[int]:
    """The position of the token that would be decoded behind ``node``."""
    with session.draft(node) as draft:
        draft.append(TEXT)
        return [int(at) for at in draft.positions(node.stop)[:, 0].astype(np.int64)]


# --- one request ----------------------------------------------------------------------------------------------------------


def test_a_request_with_one_image() -> None:
    session, node = one_image()
    before = tree_print(session)
    request = through_the_wire(to_sglang(node, rid="r", sampling_params={"max_new_tokens": 5}))
    assert isinstance(request, engine(MESSAGES).TokenizedGenerateReqInput)
    assert (request.rid, request.sampling_params.max_new_tokens, request.session_params) == ("r", 5, None)
    assert request.input_ids == array("q", [52, 50, 50, 50, 50, 53, 7])
    given = request.mm_inputs
    assert isinstance(given, engine(REQUESTS).MultimodalProcessorOutput)
    [item] = given.mm_items
    assert isinstance(item, engine(REQUESTS).MultimodalDataItem)
    assert item.offsets == [(1, 4)], "inclusive"
    assert (item.modality.name, item.identity) == ("IMAGE", identity("a"))
    assert item.hash == int.from_bytes(identity("a")[:8], "big")
    assert tuple(item.pad_values) == pad_values(identity("a"))
    assert item.pad_value == pad_values(identity("a"))[0]
    assert item.model_specific_data["image_grid_thw"].tolist() == [[1, 4, 4]]
    assert (item.feature, item.precomputed_embeddings) == (None, None)
    assert given.input_ids == [52, 50, 50, 50, 50, 53, 7]
    assert given.padded_input_ids == [52, *pad_values(identity("a")), 53, 7]
    assert (given.im_token_id, given.video_token_id, given.im_start_id, given.audio_token_id) == (IMAGE_PAD, VIDEO_PAD, 52, None)
    assert given.mrope_positions.dtype == given.mrope_position_delta.dtype == torch.int64
    assert given.mrope_positions.tolist() == node.positions().tolist()
    assert given.mrope_position_delta.tolist() == [[-2]]
    assert tree_print(session) == before


def test_text_alone_needs_no_multimodal_inputs() -> None:
    for name in ("text@sglang", "text@vllm", "qwen2_vl@sglang"):
        session = SessionStore.in_memory().create("s", scheme=name)
        node = session.append(session.root, [5, 6, 7])
        request = through_the_wire(to_sglang(node))
        assert (request.input_ids.tolist(), request.mm_inputs) == ([5, 6, 7], None)
    session = SessionStore.in_memory().create("s", scheme="qwen2_vl@sglang")
    node = session.append(session.root, [5, 6], positions=[[3, 4]] * 3)
    request = to_sglang(node)
    assert request.mm_inputs.mrope_positions.tolist() == [[3, 4]] * 3, "SGLang would take 0 and 1"
    made = accepted(request)
    assert prefilled(made).tolist() == [[3, 4]] * 3
    assert decoded(made).tolist() == [5] * 3
    further = session.append(session.root, [5, 6], positions=ExternalPositions([[0, 1]] * 3, max_position=5))
    assert decoded(accepted(to_sglang(further))).tolist() == [6] * 3, "the table is plain, what follows it is not"
    with pytest.raises(Unsupported):
        to_sglang(further, session_params={"id": "chat"})
    text = SessionStore.in_memory().create("s", scheme="text@sglang")
    with pytest.raises(Unsupported):
        to_sglang(text.append(text.root, [5, 6], positions=[[3, 4]]))


def test_a_draft_is_its_path_and_what_was_generated() -> None:
    session, node = one_image()
    draft = session.draft(node, key="request 1")
    draft.extend([30, 31])
    request = to_sglang(draft)
    assert (request.rid, request.input_ids.tolist()) == ("request 1", [52, 50, 50, 50, 50, 53, 7, 30, 31])
    assert request.mm_inputs.mrope_positions.tolist() == draft.positions().tolist()
    assert to_sglang(draft, rid="another").rid == "another"
    assert to_sglang(node).rid is None


def test_writing_to_a_request_reaches_no_node() -> None:
    session, node = one_image()
    session.append(session.root, [1])
    store = session
    before = tree_print(store)
    request = to_sglang(node)
    request.mm_inputs.mrope_positions.fill_(77)
    request.mm_inputs.padded_input_ids[0] = request.mm_inputs.input_ids[0] = request.input_ids[0] = 77
    request.mm_inputs.mm_items[0].model_specific_data["image_grid_thw"].fill_(77)
    assert tree_print(store) == before
    assert to_sglang(node).mm_inputs.mm_items[0].model_specific_data["image_grid_thw"].tolist() == [[1, 4, 4]]


# --- whole histories --------------------------------------------------------------------------------------------------------


def grown(session: Session, history: History, rng: random.Random, replies: bool) -> tuple[Node, list[Node]]:
    """A history's turns with replies between them, and the nodes that an engine could be given: those that end outside items."""
    node, whole = session.root, []
    for turn in without_leading_empties(history.turns()):
        node = session.append(node, list(turn.tokens), media=turn.media)
        if node.position_state().open_block is None:
            whole.append(node)
            if replies and rng.random() < 0.6:
                with session.draft(node) as draft:
                    draft.extend([TEXT] * min(draft.room, rng.randrange(4)))
                    node = draft.commit()
                whole.append(node)
    return node, whole


@pytest.mark.parametrize("family", FAMILIES)
@EXAMPLES
@given(rng=RANDOMS)
def test_positions_and_delta_are_those_of_sglangs_own_function(family: str, rng: random.Random) -> None:
    """Given the whole history, so as replayed. Its float tables are cast once, as its forward batch casts them."""
    history, target_grids = draw_history(rng, family, scanned=True)
    session = SessionStore.in_memory().create("s", scheme=scheme(f"{family}@sglang", **history.params))
    node, _ = grown(session, history, rng, replies=False)
    answer = ask(history, history.tokens, target_grids)
    request = to_sglang(node, mode="as_replayed", target_grids=target_grids)
    given = request.mm_inputs
    if given is None:
        assert not history.items
        assert np.array_equal(answer.positions.astype(np.int64), np.broadcast_to(np.arange(node.stop), (3, node.stop)))
        return
    expected = np.concatenate((answer.positions.astype(np.int64), answer.plan), axis=1)
    assert np.array_equal(given.mrope_positions.numpy(), expected)
    assert given.mrope_position_delta.tolist() == [[math.floor(answer.delta)]]
    assert given.mrope_positions.dtype == torch.int64


@pytest.mark.parametrize("family", FAMILIES)
@EXAMPLES
@given(rng=RANDOMS)
def test_sglangs_scheduler_gives_the_nodes_answers(family: str, rng: random.Random) -> None:
    """Padding, offsets, modalities, windows of chunked prefill and the next decoded token, over the wire and without it."""
    history, _ = draw_history(rng, family, scanned=True)
    session = SessionStore.in_memory().create("s", scheme=scheme(f"{family}@sglang", **history.params))
    _, whole = grown(session, history, rng, replies=True)
    for node in rng.sample(whole, min(2, len(whole))):
        if not node.stop:
            continue
        request = to_sglang(node, rid="r")
        made = accepted(through_the_wire(request) if rng.random() < 0.5 else request)
        assert made.origin_input_ids.tolist() == padded(node)
        assert made.origin_input_ids_unpadded.tolist() == node.input_ids().tolist()
        assert np.array_equal(prefilled(made), node.positions().astype(np.int64))
        start = rng.randrange(node.stop)
        stop = rng.randint(start + 1, node.stop)
        assert np.array_equal(prefilled(made, start, stop), node.positions(start, stop).astype(np.int64))
        if family != "glm_image":
            assert decoded(made).tolist() == next_decoded(session, node)
        items = [] if made.multimodal_inputs is None else made.multimodal_inputs.mm_items
        marks = engine(REQUESTS).MultimodalProcessorOutput.build_token_modalities(node.input_ids().tolist(), items)
        expected = np.zeros(node.stop, int)
        for item, start, stop in node.media_spans():
            expected[start:stop] = {"image": 1, "video": 2, "audio": 3}[item.modality]
        assert (marks or [0] * node.stop) == expected.tolist()


SESSION_SCHEMES = (*(f"{family}@sglang" for family in FAMILIES if family != "glm_image"), "qwen2_5_vl@hf5", "qwen3_omni@hf5")


@pytest.mark.parametrize("name", SESSION_SCHEMES)
@pytest.mark.parametrize("streaming", [False, True])
@EXAMPLES
@given(rng=RANDOMS)
def test_turn_by_turn_in_a_session_of_sglang(name: str, streaming: bool, rng: random.Random) -> None:
    """SGLang puts its own history before each turn, shifts offsets and positions; what comes out is what the nodes say."""
    history, _ = draw_history(rng, name.partition("@")[0], scanned=True)
    session = SessionStore.in_memory().create("s", scheme=scheme(name, **history.params))
    scheduler = Engine()
    scheduler.open("chat", streaming=streaming)
    node, held, previous = session.root, 0, None
    for number, turn in enumerate(without_leading_empties(history.turns())):
        node = session.append(node, list(turn.tokens), media=turn.media)
        if node.position_state().open_block is not None or not node.stop:
            continue
        params = {"id": "chat", "rid": previous}
        request = to_sglang(node, held, rid=f"turn {number}", session_params=params)
        made = accepted(through_the_wire(request), scheduler)
        assert made.origin_input_ids.tolist() == padded(node)
        assert np.array_equal(prefilled(made), node.positions().astype(np.int64))
        assert decoded(made).tolist() == next_decoded(session, node)
        expected = [spans for _, spans in prompt_of(node).media]
        items = [] if made.multimodal_inputs is None else made.multimodal_inputs.mm_items
        assert [item.offsets for item in items] == [[(start, stop - 1) for start, stop in spans] for spans in expected]
        reply = [TEXT] * rng.randrange(1, 4)
        scheduler.generate(made, reply)
        with session.draft(node) as draft:
            draft.extend(reply)
            node = draft.commit()
        held, previous = node.stop, f"turn {number}"


def test_a_turn_of_text_that_sglang_would_place_elsewhere_carries_its_positions() -> None:
    """Under hf5 text goes on behind a video's frames' sides, not behind its last time; SGLang's sessions go on behind that."""
    session = SessionStore.in_memory().create("s", scheme=vl("hf5", tokens_per_second=7))
    first = session.append(session.root, [8, *[VIDEO_PAD] * 6, 9], media=[video("v", 1)])
    scheduler = Engine()
    scheduler.open("chat")
    scheduler.generate(accepted(to_sglang(first, rid="1", session_params={"id": "chat"}), scheduler), [])
    node = session.append(first, [20, 21])
    request = to_sglang(node, first.stop, rid="2", session_params={"id": "chat", "rid": "1"})
    assert request.mm_inputs.mm_items == []
    made = accepted(through_the_wire(request), scheduler)
    assert prefilled(made).tolist() == node.positions().tolist()
    assert decoded(made).tolist() == next_decoded(session, node)
    assert node.positions(first.stop).tolist() != [[at + node.mrope_position_delta for at in (8, 9)]] * 3


# --- cases ------------------------------------------------------------------------------------------------------------------


def test_c04_the_delta_is_one_number_however_many_turns_have_media() -> None:
    session = SessionStore.in_memory().create("s", scheme=vl("sglang"))
    node = session.append(session.root, [1])
    for turns in range(6):
        for held in (0, *([node.parent.stop] if turns and node.parent is not None else [])):
            params = {"id": "chat"} if held else None
            request = to_sglang(node, held, session_params=params)
            table = node.positions(held) - (node.positions(0, held).max() + 1 if held else 0)
            if turns:
                assert request.mm_inputs.mrope_position_delta.shape == (1, 1)
                assert request.mm_inputs.mrope_position_delta.item() == table.max() + 1 - table.shape[1]
                assert request.mm_inputs.mrope_positions.tolist() == table.tolist()
            else:
                assert request.mm_inputs is None
        with session.draft(node) as draft:
            draft.extend([8, 9])
            reply = draft.commit()
        node = session.append(reply, [VISION_START, *[IMAGE_PAD] * 4, VISION_END], media=[image(f"i{turns}", 1)])


@pytest.mark.parametrize("rule", ["hf5", "sglang"])
def test_c11_fractional_positions_are_cast_once_in_the_request(rule: str) -> None:
    """0.4 s a grid at 2 positions a second: cast turn by turn they would differ from the tenth token on."""
    ids = {
        "image_token_id": 90,
        "video_token_id": 91,
        "audio_token_id": 92,
        "vision_start_token_id": 93,
        "audio_start_token_id": 94,
    }
    session = SessionStore.in_memory().create("s", scheme=scheme(f"qwen3_omni@{rule}", position_id_per_seconds=2, **ids))  # type: ignore[arg-type]
    clip = MediaItem("video", identity("v"), [(2, 2)], grid_thw=(2, 2, 2), second_per_grid_ts=0.4)
    first = session.append(session.root, [8, 8, 91, 91, 8, 8], media=[clip])
    node = session.append(first, [8, 8, 91, 91, 8, 8], media=[clip])
    request = to_sglang(node)
    assert request.mm_inputs.mrope_positions[0].tolist() == [0, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert request.mm_inputs.mrope_position_delta.tolist() == [[-1]], "of -0.4: the next stands at 11.6"
    assert decoded(accepted(request)).tolist() == next_decoded(session, node) == [11, 11, 11]
    scheduler = Engine()
    scheduler.open("chat")
    scheduler.generate(accepted(to_sglang(first, rid="1", session_params={"id": "chat"}), scheduler), [])
    turn = to_sglang(node, 6, rid="2", session_params={"id": "chat", "rid": "1"})
    assert prefilled(accepted(turn, scheduler))[0].tolist() == [0, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_c26_positions_come_from_spans_whatever_ids_stand_in_them() -> None:
    """SGLang's own recomputation from padded ids loses the grid; with a table in the request it never recomputes."""
    tables = []
    for fill in (IMG, PAD_VALUE, 7):
        session = SessionStore.in_memory().create("s", scheme=toy_scheme())
        ids = [fill if token == IMG else token for token in A_IDS]
        node = session.append(session.root, ids, media=[MediaItem("image", identity("a"), [(3, 4)], grid_thw=(1, 4, 4))])
        made = accepted(to_sglang(node))
        tables.append(prefilled(made).tolist())
        assert made.origin_input_ids.tolist() == [1, 2, VS, *pad_values(identity("a")), VE, 3]
        assert made.multimodal_inputs.mrope_position_delta.tolist() == [[-2]]
    assert tables == [A_TABLE.tolist()] * 3
    alike, _ = engine("sglang.srt.layers.rotary_embedding.mrope_rope_index").get_rope_index(
        2, IMG, 102, VS, "qwen2_5_vl", 2, torch.tensor([[1, 2, VS, *pad_values(identity("a")), VE, 3]]), torch.tensor([[1, 4, 4]])
    )
    assert alike[:, 0].tolist() != A_TABLE.tolist(), "the fault is still there to be kept away from"


def test_c52_a_reply_with_and_without_its_last_sampled_token() -> None:
    session = SessionStore.in_memory().create("s", scheme=vl("sglang"))
    prompt = session.append(session.root, [1, 2, 3])
    with session.draft(prompt) as draft:
        draft.extend([4, 5])
        reply = draft.commit("length")
    assert reply.tail_policy == "keep"
    node = session.append(reply, [*[IMAGE_PAD] * 4, 6], media=[image("a", 0)])
    for policy, ids, offset in (("keep", [1, 2, 3, 4, 5], 5), ("drop_last", [1, 2, 3, 4], 4), (None, [1, 2, 3, 4, 5], 5)):
        request = to_sglang(node, tail_policy=policy)  # type: ignore[arg-type]
        assert request.input_ids.tolist() == [*ids, *[IMAGE_PAD] * 4, 6]
        assert request.mm_inputs.mm_items[0].offsets == [(offset, offset + 3)]
        assert request.mm_inputs.mrope_positions[0].tolist() == [*range(offset), *[offset] * 4, offset + 2]
        assert accepted(request).origin_input_ids.tolist() == [*ids, *pad_values(identity("a")), 6]
    with session.draft(prompt) as draft:
        draft.extend([4, 5])
        cut = draft.commit("length", tail_policy="drop_last")
    with pytest.raises(Unsupported):
        to_sglang(cut, tail_policy="keep")
    assert to_sglang(cut).input_ids.tolist() == [1, 2, 3, 4]


def test_c70_sentinels_come_from_the_whole_identity_and_are_the_same_however_the_item_was_split() -> None:
    tail, near = bytes(31) + b"\1", bytes(31) + b"\2"  # alike in the 64 bits that the hash keeps
    session = SessionStore.in_memory().create("s", scheme=vl("sglang"))
    both = [MediaItem("image", name, [(at, 4)], grid_thw=(1, 4, 4)) for name, at in ((tail, 0), (near, 4))]
    request = to_sglang(session.append(session.root, [IMAGE_PAD] * 8, media=both))
    one, two = request.mm_inputs.mm_items
    assert one.hash == two.hash
    assert not set(one.pad_values) & set(two.pad_values)
    assert request.mm_inputs.padded_input_ids == [*pad_values(tail), *pad_values(near)]
    big = MediaItem("image", tail, [(0, 9)], grid_thw=(1, 6, 6))
    whole = to_sglang(session.append(session.root, [IMAGE_PAD] * 9, media=[big])).mm_inputs.padded_input_ids
    for cut in range(1, 9):
        head = session.append(session.root, [IMAGE_PAD] * cut, media=[big.with_spans([(0, cut)], unfinished=True)])
        rest = big.with_spans([(0, 9 - cut)], placeholders_before=cut)
        request = to_sglang(session.append(head, [IMAGE_PAD] * (9 - cut), media=[rest]))
        assert [item.offsets for item in request.mm_inputs.mm_items] == [[(0, 8)]]
        assert request.mm_inputs.padded_input_ids == whole


def test_c79_unknown_fields_travel_with_their_item_and_those_of_whole_requests_are_refused() -> None:
    session = SessionStore.in_memory().create("s", scheme=vl("sglang"))

    def with_extra(name: str, offset: int, extra: Mapping[str, Any]) -> MediaItem:
        return MediaItem("image", identity(name), [(offset, 4)], grid_thw=(1, 4, 4), extra=extra)

    first = session.append(session.root, [IMAGE_PAD] * 4, media=[with_extra("a", 0, {"scale": np.array([1.5]), "tiles": [1, [2]]})])
    node = session.append(first, [IMAGE_PAD] * 4, media=[with_extra("b", 0, {"scale": np.array([2.5]), "how": {"crop": True}})])
    one, two = through_the_wire(to_sglang(node)).mm_inputs.mm_items
    assert (one.scale.tolist(), one.tiles) == ([1.5], [1, [2]])
    assert (two.scale.tolist(), two.how) == ([2.5], {"crop": True})
    for name in ("vision_position_ids", "media_nums_per_sample", "visible_frame_counts", "token_type_ids", "feature", "hash"):
        odd = session.append(first, [IMAGE_PAD] * 4, media=[with_extra("b", 0, {name: [1]})])
        with pytest.raises(Unsupported, match=name) as caught:
            to_sglang(odd)
        assert caught.value.item.identity == identity("b")


def test_d39_compact_and_expanded_prompts_give_the_same_request_and_nothing_is_expanded_twice() -> None:
    positions_of = vl("sglang")
    session = SessionStore.in_memory().create("s", scheme=positions_of)
    ids, media = [7, *[IMAGE_PAD] * 4, 8, *[VIDEO_PAD] * 6, 9], [image("a", 1), video("v", 6)]
    short_ids, short_media = compact(ids, media)
    assert len(short_ids) == 5
    requests = []
    for tokens, items in ((ids, media), expand(positions_of, short_ids, short_media)):
        requests.append(through_the_wire(to_sglang(session.append(session.root, tokens, media=items))))
    one, two = requests
    assert one.input_ids == two.input_ids
    assert one.mm_inputs.padded_input_ids == two.mm_inputs.padded_input_ids
    assert [item.offsets for item in one.mm_inputs.mm_items] == [[(1, 4)], [(6, 11)]]
    with pytest.raises(MediaSpanError):
        expand(positions_of, ids, media)
    with pytest.raises(MediaSpanError):
        session.append(session.root, short_ids, media=short_media)


def field(name: str, value: Any = None) -> dict[str, Any]:
    return {name: value}


def fields_of(kind: Any) -> set[str]:
    return set(kind.__struct_fields__)


def test_c56_every_field_of_the_engines_types_is_set_passed_left_or_refused() -> None:
    """Fails when SGLang's types gain or lose a field, until the adapter says what becomes of it."""
    io_struct, batch = engine(MESSAGES), engine(REQUESTS)
    assert set(REQUEST_FIELDS) == fields_of(io_struct.TokenizedGenerateReqInput)
    assert set(OUTPUT_FIELDS) == fields_of(batch.MultimodalProcessorOutput)
    assert set(ITEM_FIELDS) == fields_of(batch.MultimodalDataItem)
    assert fields_of(io_struct.SessionParams) == {"id", "rid", "offset", "replace", "drop_previous_output"}


PASSED = sorted(name for name, fate in REQUEST_FIELDS.items() if fate == "passed")
ARGUMENTS = ("rid", "sampling_params", "session_params", "cache_salt", "extra_key")


def samples() -> dict[str, Any]:
    """A value other than the default for every field that a caller may give, as msgspec takes it."""
    hints = engine("sglang.srt.managers.kv_hints").KvHintsEnvelope
    return {
        **{name: True for name in PASSED if name.startswith("return_")},
        **{name: name for name in PASSED if name.endswith(("_id", "_key", "_host", "_ipc", "_text", "_processor"))},
        **dict.fromkeys(("stream", "no_logs", "require_reasoning"), True),
        **dict.fromkeys(("logprob_start_len", "top_logprobs_num", "routed_experts_start_len", "priority"), 3),
        **dict.fromkeys(("bootstrap_port", "bootstrap_room", "decode_tp_size", "routed_dp_rank", "disagg_prefill_dp_rank"), 4),
        **{
            name: [1, 0]
            for name in ("token_ids_logprob", "token_type_ids", "multi_item_delimiter_indices", "token_indices_to_pool")
        },
        "sampling_logprobs_mode": "all",
        "time_stats": engine(MESSAGES).PickleWrapper(data=b"x"),
        "kv_hints": hints,
        "rid": "r",
        "cache_salt": "pepper",
        "sampling_params": {"max_new_tokens": 3},
        "session_params": None,
    }


@pytest.mark.parametrize("name", [name for name in PASSED if name not in ("session_params", "sampling_params")])
def test_c56_what_the_caller_gives_reaches_the_request(name: str) -> None:
    session = SessionStore.in_memory().create("s", scheme=vl("sglang"), namespace={"lora": "sql"} if name == "lora_id" else None)
    node = session.append(session.root, [VISION_START, *[IMAGE_PAD] * 4], media=[image("a", 1)])
    value = samples()[name]
    plain = to_sglang(node)
    assert getattr(plain, name) != value
    given: dict[str, Any] = {name: value}
    request = to_sglang(node, **given)
    assert getattr(request, name) == value
    assert all(
        getattr(request, other) == getattr(plain, other)
        for other in REQUEST_FIELDS
        if other not in (name, "mm_inputs", "sampling_params")
    )


@pytest.mark.parametrize("name", [name for name, fate in REQUEST_FIELDS.items() if fate not in ("set", "passed", "engine")])
def test_c56_refused_fields_say_why(name: str) -> None:
    _, node = one_image()
    with pytest.raises(Unsupported, match=name) as caught:
        to_sglang(node, **field(name))
    assert REQUEST_FIELDS[name] in str(caught.value)


@pytest.mark.parametrize("name", ["input_ids", "mm_inputs", "lora_name", "pp_prefetch_ticketed", "no_such_field"])
def test_c56_fields_that_are_not_the_callers(name: str) -> None:
    _, node = one_image()
    with pytest.raises(TypeError, match=name):
        to_sglang(node, **field(name))


def test_c56_what_sglangs_sessions_leave_behind_is_refused_in_one() -> None:
    """SGLang's own code says which: a request in a session against one without, each with every field set."""
    session, node = one_image()
    taken: dict[str, set[str]] = {}

    class Taken(Exception):
        pass

    for kind, params in (("plain", None), ("session", {"id": "chat"})):

        def make(_: Any, *given: Any, kind: str = kind, **named: Any) -> Any:
            taken[kind] = set(named)
            raise Taken

        scheduler = Engine()
        scheduler.open("chat")
        with patch.object(type(scheduler.scheduler), "_create_generation_req", make), pytest.raises(Taken):
            accepted(to_sglang(node, rid="r", session_params=params), scheduler)
    lost = (taken["plain"] - taken["session"]) & set(REQUEST_FIELDS)
    assert {name for name in lost if REQUEST_FIELDS[name] == "passed"} == set(LOST_IN_SESSIONS)
    for name in LOST_IN_SESSIONS:
        value = samples()[name]
        assert getattr(to_sglang(node, **field(name, value)), name) == value
        with pytest.raises(Unsupported, match=name):
            to_sglang(node, session_params={"id": "chat"}, **field(name, value))
        to_sglang(node, session_params={"id": "chat"}, **field(name))
    assert session.tree is not None


def test_c56_the_namespace_reaches_the_output_on_every_path(tmp_path: Path) -> None:
    """A fork, a cut, a draft, a replay, a session of SGLang's, and all of it again from a store that was reopened."""
    namespace = {"cache_salt": "pepper", "lora": "sql", "tenant": "acme"}

    def check(nodes: Sequence[Node | Draft]) -> None:
        for node in nodes:
            scheduler = Engine()
            scheduler.open("chat")
            for params in (None, {"id": "chat"}):
                request = through_the_wire(to_sglang(node, rid="r", session_params=params, extra_key="batch "))
                assert (request.cache_salt, request.extra_key) == ("pepper", "batch ")
                assert (request.lora_id, request.lora_name) == ("sql", "sql")
                made = accepted(request, scheduler)
                assert (made.cache_salt, made.extra_key, made.lora_id) == ("pepper", "batch sql", "sql")

    with SessionStore.open(tmp_path) as store:
        session = store.create("s", scheme=vl("sglang"), namespace=namespace)
        prompt = session.append(session.root, [VISION_START, *[IMAGE_PAD] * 4, VISION_END, 7], media=[image("a", 1)])
        draft = session.draft(prompt)
        draft.extend([8, 9])
        check([prompt, draft])
        reply = draft.commit()
        fork = store.fork(session, reply, "fork")
        check([reply, session.truncate(reply, 8), fork.append(fork.tree.node(reply.id), [3])])
    with SessionStore.open(tmp_path) as store:
        session = store.get("s")
        steps = list(replay(session))
        check([*(node for node in session.tree if node.stop), *(node for step in steps for node in (step.node, step.prompt))])


# --- features -----------------------------------------------------------------------------------------------------------------


def test_features_come_along_when_asked_for() -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme=vl("sglang"))
    items = [image("a", 0), image("b", 5), image("a", 10)]
    node = session.append(session.root, [*[IMAGE_PAD] * 4, 7, *[IMAGE_PAD] * 4, 7, *[IMAGE_PAD] * 4], media=items)
    with pytest.raises(NeedsMedia) as caught:
        to_sglang(node, features=True)
    assert [item.identity for item in caught.value.items] == [identity("a"), identity("b")]
    pixels, rows = np.arange(6, dtype=np.float32).reshape(2, 3), torch.ones(4, 5, dtype=torch.bfloat16)
    store.put_features(items[0], {"pixel_values": pixels, "mask": np.array([1, 0])})
    store.put_features(items[1], {"embeddings": rows, "pixel_values": pixels})
    assert [item.feature for item in to_sglang(node).mm_inputs.mm_items] == [None] * 3, "only when asked"
    one, two, three = through_the_wire(to_sglang(node, features=True)).mm_inputs.mm_items
    formats = engine(REQUESTS).MultimodalInputFormat
    for item in (one, three):
        assert (item.feature.tolist(), item.precomputed_embeddings, item.format) == (pixels.tolist(), None, formats.NORMAL)
        assert item.mask.tolist() == [1, 0]
    assert (two.feature, two.format) == (None, formats.PRECOMPUTED_EMBEDDING)
    assert two.precomputed_embeddings.dtype == torch.bfloat16
    assert torch.equal(two.precomputed_embeddings, rows)
    assert two.is_precomputed_embedding() and "pixel_values" not in two.model_specific_data
    to_sglang(node, features=True).mm_inputs.mm_items[0].feature.fill_(9)
    assert to_sglang(node, features=True).mm_inputs.mm_items[0].feature.tolist() == pixels.tolist()


def test_features_that_fit_no_encoder_are_refused() -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme=vl("sglang"))
    node = session.append(session.root, [IMAGE_PAD] * 4, media=[image("a", 0)])
    store.put_features(node.media[0], {"mystery": np.ones(3)})
    with pytest.raises(Unsupported, match="mystery"):
        to_sglang(node, features=True)
    for shape in ((3, 5), (5, 5), (4,), (1, 4, 5)):
        other = session.append(session.root, [IMAGE_PAD] * 4, media=[image(f"b{shape}", 0)])
        store.put_features(other.media[0], {"precomputed_embeddings": np.ones(shape)})
        with pytest.raises(MediaSpanError) as caught:
            to_sglang(other, features=True)
        assert (caught.value.item, caught.value.span, caught.value.limit) == (other.media[0], (0, 4), 4)


def test_features_repeat_what_their_item_says_and_never_contradict_it() -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme=vl("sglang"))
    pixels = np.ones((16, 3), np.float32)
    node = session.append(session.root, [VIDEO_PAD] * 6, media=[video("a", 0)])
    [film] = node.media
    store.put_features(film, {"pixel_values_videos": pixels, "video_grid_thw": np.array(film.grid_thw)})
    [given] = to_sglang(node, features=True).mm_inputs.mm_items
    assert given.model_specific_data["video_grid_thw"].tolist() == [list(film.grid_thw or ())]
    extra = {"note": [1, 2], "weights": np.arange(3)}
    for number, (name, said) in enumerate(
        {
            "image_grid_thw": np.array([[1, 2, 8]]),
            "note": np.array([1, 2]),
            "weights": np.arange(3) + 1,
            "offsets": np.array([[0, 3]]),
            "features": pixels,
            "embeddings": np.ones((4, 5)),
        }.items()
    ):
        item = with_extra(image(f"b{number}", 0), extra)
        node = session.append(session.root, [IMAGE_PAD] * 4, media=[item])
        given_features = {"pixel_values": pixels, "image_embeds": np.zeros((4, 5)), name: said}
        if name in ("image_grid_thw", "weights"):
            del given_features["image_embeds"]
        store.put_features(node.media[0], given_features)
        with pytest.raises(Unsupported, match=name):
            to_sglang(node, features=True)


def with_extra(item: MediaItem, extra: Mapping[str, Any]) -> MediaItem:
    """The item with further fields."""
    return MediaItem(item.modality, item.identity, item.spans, item.grid_thw, extra=extra)


def test_audio_in_video_is_refused_since_sglang_would_lose_the_audio() -> None:
    ids = {"image": IMAGE_PAD, "video": VIDEO_PAD, "vision_start": VISION_START, "vision_end": VISION_END}
    ids |= {"audio": 60, "audio_start": 61, "audio_end": 62}
    params: Any = {f"{name}_token_id": token for name, token in ids.items()}
    rule = scheme("qwen3_omni@hf5", position_id_per_seconds=13, **params)
    film = MediaItem("video", identity("a"), [(0, 1)], (2, 4, 4), second_per_grid_ts=1.0, audio_feature_length=100)
    count = rule.num_placeholders(film)
    session = SessionStore.in_memory().create("s", scheme=rule)
    tokens = [VISION_START, 61, *[VIDEO_PAD] * count, 62, VISION_END]
    node = session.append(session.root, tokens, media=[film.with_spans([(2, count)])])
    with pytest.raises(Unsupported, match="audio in video") as caught:
        to_sglang(node)
    assert caught.value.item == node.media[0]


# --- sampling and session parameters --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", ["END", "\N{ROCKET}", ["a", "é\N{ROCKET}"]])
def test_stop_strings_are_normalised_and_measured_by_their_bytes(stop: Any) -> None:
    _, node = one_image()
    params = through_the_wire(
        to_sglang(node, sampling_params={"stop": stop, "stop_regex": "a+", "min_new_tokens": 3})
    ).sampling_params
    strings = [stop] if isinstance(stop, str) else stop
    assert (params.stop_strs, params.is_normalized, params.min_new_tokens) == (strings, True, 3)
    assert params.stop_str_max_len == max(len(text.encode()) for text in strings), "no tokenizer makes more tokens of it"


@pytest.mark.parametrize(
    "given",
    [{"stop_regex": "("}, {"stop": ["x"] * 10**4}, {"max_new_tokens": -5}, {"top_p": 2.0}, {"temperature": math.nan}],
    ids=str,
)
def test_sampling_parameters_that_sglang_refuses_are_unsupported(given: dict[str, Any]) -> None:
    _, node = one_image()
    with pytest.raises(Unsupported, match="sampling_params"):
        to_sglang(node, sampling_params=given)


@pytest.mark.parametrize(
    "given",
    [{"id": 5}, {"id": "\ud800"}, {"rid": 5}, {"offset": "6"}, {"offset": 6.0}, {"replace": "yes"}, {"rid": b"x"}],
    ids=ascii,
)
def test_session_parameters_have_the_types_that_sglangs_messages_have(given: dict[str, Any]) -> None:
    _, node = one_image()
    for params in ({"id": "chat", **given}, engine(MESSAGES).SessionParams(**{"id": "chat", **given})):
        with pytest.raises(TypeError):
            to_sglang(node, 6, session_params=params)


# --- refusals -------------------------------------------------------------------------------------------------------------------


def test_windows_need_a_session_and_fit_its_offset() -> None:
    _, node = one_image()
    for params in (None, {}, {"rid": "x"}):
        with pytest.raises(Unsupported) as caught:
            to_sglang(node, 6, session_params=params)
        assert caught.value.prefix_len == 6
    assert to_sglang(node, 6, session_params={"id": "chat", "offset": 6}).input_ids.tolist() == [7]
    assert to_sglang(node, 6, session_params={"id": "chat", "offset": 0}).session_params.offset == 0
    with pytest.raises(OutOfRange) as wrong:
        to_sglang(node, 6, session_params={"id": "chat", "offset": 5})
    assert (wrong.value.value, wrong.value.limit) == (5, 6)
    for prefix_len in (2, 3, 4):
        with pytest.raises(Unsupported):
            to_sglang(node, prefix_len, session_params={"id": "chat"})
    params = engine(MESSAGES).SessionParams(id="chat", replace=True)
    assert to_sglang(node, 6, session_params=params).session_params is params
    assert to_sglang(node, node.stop, session_params=params).input_ids.tolist() == []


def test_a_request_without_tokens_is_refused_outside_sessions() -> None:
    session, _ = one_image()
    with pytest.raises(OutOfRange):
        to_sglang(session.root)


def test_paths_that_end_inside_media_and_calls_without_results() -> None:
    session, node = one_image()
    part = image("b", 0).with_spans([(0, 3)], unfinished=True)
    with pytest.raises(MediaSpanError):
        to_sglang(session.append(node, [IMAGE_PAD] * 3, media=[part]))
    called = session.append(node, [1], metadata={"tool_calls": ["a"]})
    assert to_sglang(called).input_ids[-1] == 1
    with pytest.raises(Unsupported, match="'a'"):
        to_sglang(called, paired_calls=True)


def test_another_salt_or_adapter_than_the_sessions() -> None:
    store = SessionStore.in_memory()
    salted = store.create("salted", scheme="text@sglang", namespace={"cache_salt": "pepper"})
    node = salted.append(salted.root, [1])
    assert to_sglang(node, cache_salt="pepper").cache_salt == "pepper"
    with pytest.raises(Unsupported):
        to_sglang(node, cache_salt="salt")
    with pytest.raises(Unsupported):
        to_sglang(node, lora_id="sql")
    tuned = store.create("tuned", scheme="text@sglang", namespace={"lora": "sql"})
    request = to_sglang(tuned.append(tuned.root, [1]), lora_id="8f3a")
    assert (request.lora_id, request.lora_name) == ("8f3a", "sql")


@pytest.mark.parametrize("name", ["qwen2_5_omni@hf5", "hy_v4_vl@hf5", "hunyuan_vl@hf5", "minicpmv4_7@hf5"])
def test_families_that_sglang_does_not_run(name: str) -> None:
    session = SessionStore.in_memory().create("s", scheme=scheme(name))
    with pytest.raises(Unsupported) as caught:
        to_sglang(session.append(session.root, [1]))
    assert getattr(caught.value, "scheme") == name  # noqa: B009


def test_image_generation_decodes_by_a_plan_outside_sessions() -> None:
    ids: dict[str, Any] = {"image_token_id": 9, "image_start_token_id": 10, "image_end_token_id": 11}
    session = SessionStore.in_memory().create("s", scheme=scheme("glm_image@sglang", **ids))
    media = [MediaItem("image", identity("a"), [(1, 4)], grid_thw=(1, 2, 2))]
    node = session.append(session.root, [10, *[9] * 4, 11, 7, 10], media=media)
    plan = node.scheme.decode_positions(node.position_state(), [(1, 2, 3)])
    request = to_sglang(node, target_grids=[(1, 2, 3)])
    grids: Any = np.array([(1, 2, 3), (1, 1, 2)])
    two = node.scheme.decode_positions(node.position_state(), grids.tolist())
    assert to_sglang(node, target_grids=grids).mm_inputs.mrope_positions[:, node.stop :].tolist() == two.tolist()
    assert request.mm_inputs.mrope_positions.tolist() == np.concatenate((node.positions(), plan), axis=1).tolist()
    made = accepted(request)
    assert prefilled(made).tolist() == node.positions().tolist()
    assert decoded(made).tolist() == plan[:, 0].tolist()
    for grids in ([(1, 2, 3)], []):
        with pytest.raises(Unsupported):
            to_sglang(node, session_params={"id": "chat"}, target_grids=grids)
    _, other = one_image()
    with pytest.raises(Unsupported):
        to_sglang(other, target_grids=[(1, 2, 3)])


def test_wrong_types_and_modes() -> None:
    _, node = one_image()
    wrong: Any
    for wrong in (None, 1, "node", [node]):
        with pytest.raises(TypeError):
            to_sglang(wrong)
    for name in ("rid", "cache_salt", "extra_key", "sampling_params", "session_params"):
        wrong = {name: 5}
        with pytest.raises(TypeError):
            to_sglang(node, **wrong)
    with pytest.raises(TypeError):
        to_sglang(node, sampling_params={"no_such": 1})
    guessed: Any = "guessed"
    with pytest.raises(PositionError):
        to_sglang(node, mode=guessed)
    for prefix_len in (-1, 8, 1.0, None):
        wrong = prefix_len
        with pytest.raises((OutOfRange, TypeError)):
            to_sglang(node, wrong, session_params={"id": "chat"})


def test_importing_the_bridge_imports_no_engine() -> None:
    code = "import sys, engine_bridge.adapters.sglang; assert not {'sglang', 'vllm', 'transformers'} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
