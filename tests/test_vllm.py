"""to_vllm: engine inputs that vLLM 0.33.0's own classes take, prompts that its own processors expand to the same."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_bridge import to_vllm, to_vllm_prompt
from engine_bridge.adapters.vllm import FIELDS
from sessiontree import KeyTaken, MediaItem, MediaSpanError, NeedsMedia, Node, OutOfRange, Session, SessionStore, Unsupported
from sessiontree.placeholders import compact, expand
from sessiontree.positions import ExternalPositions, scheme
from tests.conftest import SOAK
from tests.test_tree import IMAGE_PAD, identity, image, video, vl
from tests.vllm_engine import load, needs_vllm
from tests.vllm_sessions import (
    AUDIO,
    COMPACT_IDS,
    FAMILIES,
    IMAGE,
    MODALITIES,
    ONE_IMAGE,
    ONE_VIDEO,
    VIDEO,
    VIDEO_END,
    VIDEO_START,
    VISION_END,
    VISION_START,
    Script,
    expanded_by_vllm,
    features_of,
    positions_of_vllm,
    request_of,
    rule,
    timestamp_ids,
)

pytestmark = needs_vllm
EXAMPLES = settings(max_examples=400 if SOAK else 40)


@pytest.fixture(scope="module", autouse=True)
def vllm() -> None:
    """What the adapter imports can only be imported by it behind the loader."""
    for name in ("vllm.inputs", "vllm.multimodal.inputs"):
        load(name)


@st.composite
def scripts(draw: st.DrawFn, family: str) -> Script:
    """Random sessions: text, items of every modality of the family, some of them again and again."""
    script = Script(family)
    script.say(*draw(st.lists(st.integers(100, 120), min_size=1, max_size=3)))
    for _ in range(draw(st.integers(0, 5))):
        sizes = draw(st.tuples(*[st.integers(1, 3)] * 3))
        script.show(draw(st.sampled_from(MODALITIES[family])), draw(st.sampled_from(["a", "bb", "ccc"])), *sizes)
        script.say(*draw(st.lists(st.integers(100, 120), max_size=3)))
    return script


def options(family: str) -> dict[str, Any]:
    return {"compact_ids": COMPACT_IDS.get(family), "timestamp_ids": timestamp_ids(family)}


def expanded(script: Script, prompt: Any) -> tuple[list[int], list[Any]]:
    """A TokensPrompt expanded by the script: its ids, and (modality, uuid, offset, length, which take embeddings) of each item.

    Every compact id begins the next item of its modality; what stands for it is what the script says stands for that uuid.
    """
    family = script.family
    one = COMPACT_IDS.get(family) or {"image": IMAGE, "video": VIDEO, "audio": AUDIO}
    content: dict[tuple[str, str], tuple[list[int], list[bool]]] = {}
    for number, (item, (start, stop)) in enumerate(zip(script.items, script.ranges, strict=True)):
        content[item.modality, item.identity.hex()] = script.tokens[start:stop], script.embeds(number)
    queues = {modality: list(uuids) for modality, uuids in prompt.get("multi_modal_uuids", {}).items()}
    modality_of = {one[modality]: modality for modality in queues}
    ids: list[int] = []
    found = []
    given = prompt["prompt_token_ids"]
    at = 0
    while at < len(given):
        modality = modality_of.get(given[at])
        if modality is None:
            ids.append(given[at])
        else:
            uuid = queues[modality].pop(0)
            tokens, embeds = content[modality, uuid]
            if family == "glm4v" and modality == "video":  # begin_of_video and end_of_video are in the prompt and in the range
                ids.pop()
                at += 1
            found.append((modality, uuid, len(ids), len(tokens), embeds))
            ids += tokens
        at += 1
    assert not any(queues.values())
    return ids, found


def placed(engine_input: Any) -> list[Any]:
    """The items of an engine input, as :func:`expanded` lists them."""
    found = []
    for modality, ranges in engine_input.get("mm_placeholders", {}).items():
        for at, uuid in zip(ranges, engine_input["mm_hashes"][modality], strict=True):
            embeds = [True] * at.length if at.is_embed is None else at.is_embed.tolist()
            found.append((modality, uuid, at.offset, at.length, embeds))
    return sorted(found, key=lambda each: each[2])


# --- what vLLM makes of it ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@EXAMPLES
@given(data=st.data())
def test_an_engine_input_is_what_vllm_would_have_made(family: str, data: st.DataObject) -> None:
    """For every family: ids, ranges and masks as scripted; a prompt that expands to them; the positions of the model itself."""
    script = data.draw(scripts(family))
    store, node = script.build(random.Random(data.draw(st.integers(0, 2**32))), features=True)
    given_ = to_vllm(node, features=True)
    assert given_["prompt_token_ids"] == script.tokens
    wanted = [
        (item.modality, item.identity.hex(), start, stop - start, script.embeds(number))
        for number, (item, (start, stop)) in enumerate(zip(script.items, script.ranges, strict=True))
    ]
    assert placed(given_) == wanted
    prompt = to_vllm_prompt(node, **options(family))
    assert prompt["prompt_token_ids"] == script.compact
    assert expanded(script, prompt) == (script.tokens, wanted)
    if not script.items:
        assert given_["type"] == "token"
        return
    theirs, ranges = expanded_by_vllm(family, prompt, given_["mm_kwargs"], script.items)
    assert theirs == script.tokens
    assert ranges == given_["mm_placeholders"]
    positions, delta = positions_of_vllm(family, given_)
    assert positions == node.positions(mode="as_replayed").tolist()
    assert delta == node.scheme.mrope_position_delta(node.position_state("as_replayed"))
    store.close()


@EXAMPLES
@given(data=st.data())
def test_arguments_are_those_that_vllm_cuts_out_of_a_batch(data: st.DataObject) -> None:
    """What a model's processor gives for all items at once, cut by the model's own field config, is what each item brings along."""
    family = data.draw(st.sampled_from(["qwen2_5_vl", "qwen2_5_omni", "ernie4_5_vl"]))
    script = data.draw(scripts(family))
    store, node = script.build(features=True)
    given_ = to_vllm(node, features=True)
    if not script.items:
        return
    batch: dict[str, list[Any]] = {}
    for item in script.items:
        for name, value in features_of(family, item).items():
            batch.setdefault(name, []).append(torch.tensor(value))
        if item.grid_thw is not None:
            batch.setdefault(f"{item.modality}_grid_thw", []).append(torch.tensor(item.grid_thw))
        if item.audio_feature_length is not None:
            batch.setdefault("audio_feature_lengths", []).append(torch.tensor(item.audio_feature_length))
    flat = {
        name: torch.cat(values, dim=int(name == "input_audio_features")) for name, values in batch.items() if values[0].ndim > 1
    }
    inputs = {**{name: torch.stack(values) for name, values in batch.items() if name not in flat}, **flat}
    if family == "ernie4_5_vl":
        models = load("vllm.model_executor.models.ernie45_vl")
        config = models.Ernie4_5VLMultiModalProcessor._get_mm_fields_config(None, inputs, {})
    elif family == "qwen2_5_vl":
        config = load("vllm.model_executor.models.qwen2_vl")._create_qwen2vl_field_factory(2)(inputs)
    else:
        config = load("vllm.model_executor.models.qwen2_5_omni_thinker").create_qwen2_5_omni_thinker_field_factory(2)(inputs)
    theirs = load("vllm.multimodal.inputs").MultiModalKwargsItems.from_hf_inputs(inputs, config)
    assert given_["mm_kwargs"].keys() == theirs.keys()
    for modality, items in theirs.items():
        for mine, its in zip(given_["mm_kwargs"][modality], items, strict=True):
            assert all(mine[name] == elem and mine[name].field.keep_on_cpu == elem.field.keep_on_cpu for name, elem in its.items())
            assert mine.keys() - its.keys() <= {"second_per_grid_ts"}
    joined = given_["mm_kwargs"].get_data()
    assert all(torch.equal(joined[name], value) for name, value in inputs.items())
    store.close()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_omni"])
def test_a_request_is_made_by_vllms_input_processor(family: str) -> None:
    script = Script(family)
    script.say(100)
    script.show("image", "a")
    script.show("video", "bb", frames=2)
    script.show("image", "c")
    store, node = script.build(namespace={"cache_salt": "tenant one", "lora": "l"}, features=True)
    request = request_of(to_vllm(node, features=True))
    assert request.prompt_token_ids == script.tokens
    assert request.cache_salt == "tenant one"
    assert [(spec.modality, spec.identifier, spec.mm_hash) for spec in request.mm_features] == [
        (item.modality, item.identity.hex(), item.identity.hex()) for item in script.items
    ]
    assert [
        (spec.mm_position.offset, spec.mm_position.offset + spec.mm_position.length) for spec in request.mm_features
    ] == script.ranges
    assert all(spec.data is not None for spec in request.mm_features)
    cached = request_of(to_vllm(node))
    assert [spec.data for spec in cached.mm_features] == [None] * 3
    assert [spec.mm_position for spec in cached.mm_features] == [spec.mm_position for spec in request.mm_features]
    store.close()


def test_text_is_a_token_input() -> None:
    session = SessionStore.in_memory().create("s", scheme="text@vllm")
    node = session.append(session.root, [5, 6])
    with session.draft(node) as draft:
        draft.extend([7])
        for holder, ids in ((node, [5, 6]), (draft, [5, 6, 7])):
            assert to_vllm(holder) == {"type": "token", "prompt_token_ids": ids}
            assert to_vllm_prompt(holder) == {"prompt_token_ids": ids}
            assert request_of(to_vllm(holder)).prompt_token_ids == ids
            assert all(type(token) is int for token in to_vllm(holder)["prompt_token_ids"])
    salted = SessionStore.in_memory().create("s", scheme="text@vllm", namespace={"cache_salt": "x"})
    node = salted.append(salted.root, [5])
    assert to_vllm(node)["cache_salt"] == to_vllm_prompt(node)["cache_salt"] == "x"
    with salted.draft(node) as draft:
        assert to_vllm(draft)["cache_salt"] == to_vllm_prompt(draft)["cache_salt"] == "x"


# --- C56 ----------------------------------------------------------------------------------------------------------------------


def test_c56_every_field_of_vllms_types_is_set_inherited_or_refused() -> None:
    """Fails when a type gains a field that the table does not have, or loses one that it has."""
    inputs = load("vllm.inputs")
    engine = load("vllm.inputs.engine")
    ranges = load("vllm.multimodal.inputs").PlaceholderRange
    known = {name: set(fields) for name, fields in FIELDS.items()}
    types = {"MultiModalInput": engine.MultiModalInput, "TokensInput": engine.TokensInput, "TokensPrompt": inputs.TokensPrompt}
    assert known == {
        **{name: set(kind.__required_keys__ | kind.__optional_keys__) for name, kind in types.items()},
        "PlaceholderRange": {field.name for field in dataclasses.fields(ranges)},
    }
    words = {word.partition(":")[0] for fields in FIELDS.values() for word in fields.values()}
    assert words == {"set", "inherited", "refused"}
    # EngineInput has no member that the table leaves out, but those for embeddings and for encoder-decoder models.
    union = {getattr(kind, "__name__", str(kind)) for kind in engine.EngineInput.__args__}
    assert union == {"TokensInput", "EmbedsInput", "MultiModalInput", "EncoderDecoderInput"}


def test_c56_what_the_table_says_is_set_is_set_and_nothing_else() -> None:
    script = Script("qwen3_vl")
    script.show("video", "a", frames=2)
    script.say(100)
    store, node = script.build(namespace={"cache_salt": "x"})
    plain = SessionStore.in_memory()
    session = plain.create("s", scheme="text@vllm", namespace={"cache_salt": "x"})
    text = session.append(session.root, [5])
    given_ = to_vllm(node)
    for name, made in (
        ("MultiModalInput", given_),
        ("TokensInput", to_vllm(text)),
        ("TokensPrompt", to_vllm_prompt(node, **options("qwen3_vl"))),
        ("PlaceholderRange", vars(given_["mm_placeholders"]["video"][0])),
    ):
        assert set(made) == {field for field, what in FIELDS[name].items() if what == "set"}, name
    fork = plain.fork(session, text, "fork")
    assert to_vllm(fork.append(text, [6]))["cache_salt"] == "x", "in a fork too"
    store.close()


# --- C72 ----------------------------------------------------------------------------------------------------------------------


def block_hashes(engine_input: Any, name: str = "sha256_cbor", size: int = 4) -> list[bytes]:
    """The hashes of full blocks that vLLM's own request has."""
    utils, requests = load("vllm.v1.core.kv_cache_utils"), load("vllm.v1.request")
    hash_function = load("vllm.utils.hashing").get_hash_fn_by_name(name)
    utils.init_none_hash(hash_function)
    hasher = utils.get_request_block_hasher(size, hash_function)
    return list(requests.Request.from_engine_core_request(request_of(engine_input), hasher).block_hashes)


def test_c72_another_image_or_another_offset_is_another_block_and_text_before_is_shared() -> None:
    session = SessionStore.in_memory().create("s", scheme=vl("vllm"))
    first = session.append(session.root, [1, 2, 3, 4, 5])

    def hashes(name: str, before: int = 0) -> list[bytes]:
        node = session.append(first, [6] * before + [IMAGE_PAD] * 8 + [7] * 8, media=[image(name, before, 2, 4)])
        return block_hashes(to_vllm(node))

    one, again, other, shifted = hashes("a"), hashes("a"), hashes("b"), hashes("a", 1)
    assert one == again
    assert one[0] == other[0] == shifted[0], "the text before is shared"
    assert not set(one[1:]) & set(other[1:]), "the same ids, another image"
    # Blocks 1 and 2 are placeholders alone in both; only the offset in the block tells them apart.
    ids = [
        to_vllm(session.append(first, [6] * n + [IMAGE_PAD] * 8, media=[image("a", n, 2, 4)]))["prompt_token_ids"] for n in (0, 1)
    ]
    assert ids[0][8:12] == ids[1][8:12] == [IMAGE_PAD] * 4
    assert not set(one[1:]) & set(shifted[1:])


@pytest.mark.parametrize("family", FAMILIES)
@EXAMPLES
@given(data=st.data())
def test_page_hashes_of_a_node_are_those_of_the_request_that_vllm_gets(family: str, data: st.DataObject) -> None:
    """Videos of frames in one turn: pages go turn by turn, and find only there what vLLM's range has around its frames."""
    page_hashes: Any = pytest.importorskip("engine_bridge.page_hashes").page_hashes
    script = data.draw(scripts(family))
    rng = None if family in ("qwen3_vl", "glm4v") else random.Random(data.draw(st.integers(0, 2**32)))
    store, node = script.build(rng, noise=False, namespace={"cache_salt": "x"})
    name = data.draw(st.sampled_from(["sha256", "sha256_cbor"]))
    size = data.draw(st.sampled_from([1, 4, 16]))
    theirs = block_hashes(to_vllm(node), name, size)
    assert [bytes(page) for page in page_hashes(node, f"vllm_{name}", page_size=size, mode="as_replayed")] == theirs
    store.close()


# --- D39 ----------------------------------------------------------------------------------------------------------------------


@EXAMPLES
@given(data=st.data())
def test_d39_compact_and_expanded_sessions_are_the_same_to_vllm(data: st.DataObject) -> None:
    """Either form gives the same engine ids; the prompt is the compact form again; nothing is expanded twice."""
    script = data.draw(scripts("qwen2_5_vl"))
    rules = rule("qwen2_5_vl")
    ids, items = compact(script.tokens, script.items)
    assert ids.tolist() == script.compact
    full, media = expand(rules, ids, items)
    session = SessionStore.in_memory().create("s", scheme=rules)
    from_compact = session.append(session.root, full, media=media)
    from_expanded = session.append(session.root, script.tokens, media=script.items)
    assert from_compact == from_expanded
    assert to_vllm(from_compact)["prompt_token_ids"] == to_vllm(from_expanded)["prompt_token_ids"] == script.tokens
    assert to_vllm_prompt(from_compact)["prompt_token_ids"] == script.compact
    if any(item.num_placeholders > 1 for item in media):
        with pytest.raises(MediaSpanError, match="expanded already"):
            expand(rules, full, media)


def test_d39_sglang_and_vllm_get_the_same_ids_from_either_form() -> None:
    sglang: Any = pytest.importorskip("engine_bridge.adapters.sglang")
    engines: Any = pytest.importorskip("tests.sglang_engine")
    if (reason := engines.missing()) is not None:
        pytest.skip(reason)
    engines.engine("sglang.srt.managers.io_struct")
    script = Script("qwen2_5_vl")
    script.say(100)
    script.show("image", "a")
    script.show("video", "bb", frames=2)
    rules = rule("qwen2_5_vl")
    session = SessionStore.in_memory().create("s", scheme=rules)
    full, media = expand(rules, *compact(script.tokens, script.items))
    for ids, items in ((script.tokens, script.items), (full, media)):
        node = session.append(session.root, ids, media=items)
        theirs = sglang.to_sglang(node)
        assert list(theirs.input_ids) == to_vllm(node)["prompt_token_ids"] == script.tokens
        offsets = [(offset, offset + length - 1) for _, _, offset, length, _ in placed(to_vllm(node))]
        assert [item.offsets for item in theirs.mm_inputs.mm_items] == [[span] for span in offsets], "SGLang's ends are inclusive"


# --- D40 ----------------------------------------------------------------------------------------------------------------------


def test_d40_a_uuid_is_the_content_and_an_alias_never_stands_for_other_bytes() -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme=vl("vllm"))
    item = image("a", 0)
    store.alias_media("photo", item)
    node = session.append(session.root, [*[IMAGE_PAD] * 4, 7], media=[item])
    assert to_vllm_prompt(node)["multi_modal_uuids"] == {"image": [identity("a").hex()]}
    assert to_vllm(node)["mm_hashes"] == {"image": [store.aliased_media("photo").hex()]}
    with pytest.raises(KeyTaken):
        store.alias_media("photo", image("b", 0))
    assert to_vllm(node)["mm_hashes"] == {"image": [identity("a").hex()]}


def test_d40_one_identity_for_two_contents_is_refused() -> None:
    """vLLM finds features by the hash alone: it would give the second item those of the first."""
    session = SessionStore.in_memory().create("s", scheme=vl("vllm"))
    square = MediaItem("image", identity("a"), [(0, 4)], (1, 4, 4))
    wide = MediaItem("image", identity("a"), [(5, 2)], (1, 2, 4))
    alone = session.append(session.root, [*[IMAGE_PAD] * 4, 9], media=[square])
    assert len(to_vllm(session.append(alone, [*[IMAGE_PAD] * 4], media=[square]))["mm_hashes"]["image"]) == 2
    node = session.append(session.root, [*[IMAGE_PAD] * 4, 9, *[IMAGE_PAD] * 2], media=[square, wide])
    for make in (to_vllm, to_vllm_prompt):
        with pytest.raises(Unsupported, match="one identity") as caught:
            make(node)
        assert caught.value.item == wide


# --- C52 ----------------------------------------------------------------------------------------------------------------------


def reply(session: Session, node: Node, ids: list[int], **how: Any) -> Node:
    with session.draft(node) as draft:
        draft.extend(ids)
        return draft.commit(**how)


def test_c52_the_next_prompt_with_and_without_the_last_sampled_token() -> None:
    session = SessionStore.in_memory().create("s", scheme="text@vllm")
    for kept, path in (("keep", [1, 2, 3, 4, 11]), ("drop_last", [1, 2, 3, 11])):
        policy: Any = kept
        a1 = session.append(session.root, [1, 2, 3])
        a2 = session.append(reply(session, a1, [4], tail_policy=policy), [11])
        assert to_vllm(a2)["prompt_token_ids"] == to_vllm_prompt(a2)["prompt_token_ids"] == path
        dropped: Any = {"tail_policy": "drop_last"}
        assert to_vllm(a2, **dropped)["prompt_token_ids"] == to_vllm_prompt(a2, **dropped)["prompt_token_ids"] == [1, 2, 3, 11]
        if kept == "drop_last":
            with pytest.raises(Unsupported):
                to_vllm(a2, tail_policy="keep")
        else:
            assert to_vllm(a2, tail_policy="keep")["prompt_token_ids"] == path


@EXAMPLES
@given(data=st.data())
def test_c52_chunks_of_a_streaming_session_are_what_vllms_scheduler_puts_together(data: st.DataObject) -> None:
    """vLLM's own scheduler goes through a session, chunk by chunk; its tokens, ranges and block hashes are those of the tree."""
    draw = data.draw
    session = SessionStore.in_memory().create("s", scheme=rule("qwen2_vl"))
    node = session.root
    scheduler = load("vllm.v1.core.sched.scheduler").Scheduler
    utils, requests = load("vllm.v1.core.kv_cache_utils"), load("vllm.v1.request")
    hash_function = load("vllm.utils.hashing").sha256_cbor
    utils.init_none_hash(hash_function)
    hasher = utils.get_request_block_hasher(4, hash_function)
    running: Any = None
    handed = 0
    for _ in range(draw(st.integers(1, 4))):
        script = draw(scripts("qwen2_vl"))
        node = session.append(node, script.tokens, media=script.items)
        chunk = to_vllm(node, handed, tail_policy="drop_last")
        request = request_of(chunk)
        request.resumable = True
        update = requests.Request.from_engine_core_request(request, hasher)
        if running is None:
            running = update
        else:
            fake = attrs.make_class("Fake", ["hash_block_size", "num_waiting_for_streaming_input", "log_stats"])(4, 0, False)
            scheduler._update_request_as_session(fake, running, requests.StreamingUpdate.from_request(update))
        whole = request_of(to_vllm(node, tail_policy="drop_last"))
        assert list(running.all_token_ids) == whole.prompt_token_ids
        assert [(spec.identifier, spec.mm_position) for spec in running.mm_features or ()] == [
            (spec.identifier, spec.mm_position) for spec in whole.mm_features or ()
        ]
        assert list(running.block_hashes) == list(requests.Request.from_engine_core_request(whole, hasher).block_hashes)
        sampled = draw(st.lists(st.integers(100, 120), min_size=1, max_size=6))
        running.num_computed_tokens = running.num_tokens + len(sampled) - 1
        running.append_output_token_ids(sampled)
        node = reply(session, node, sampled)
        handed = running.num_tokens - 1
        assert handed == prompt_len(node)


def prompt_len(node: Node) -> int:
    return len(to_vllm(node, tail_policy="drop_last")["prompt_token_ids"])


# --- what is refused ----------------------------------------------------------------------------------------------------------


def test_a_node_that_ends_inside_an_item_is_refused() -> None:
    session = SessionStore.in_memory().create("s", scheme=vl("vllm"))
    first = MediaItem("image", identity("a"), [(1, 3)], (1, 4, 4), unfinished=True)
    part = session.append(session.root, [1, *[IMAGE_PAD] * 3], media=[first])
    for make in (to_vllm, to_vllm_prompt):
        with pytest.raises(MediaSpanError) as caught:
            make(part)
        assert (caught.value.item, caught.value.span) == (first, (1, 4))
    whole = session.append(part, [IMAGE_PAD, 2], media=[first.with_spans([(0, 1)], placeholders_before=3, unfinished=False)])
    assert placed(to_vllm(whole)) == [("image", identity("a").hex(), 1, 4, [True] * 4)]
    with pytest.raises(Unsupported):
        to_vllm(whole, 2)


def test_unpaired_tool_calls_are_refused_when_asked() -> None:
    session = SessionStore.in_memory().create("s", scheme="text@vllm")
    call = session.append(session.root, [1], role="assistant", metadata={"tool_calls": ["c"]})
    answer = session.append(call, [2], role="tool", metadata={"tool_call_id": "c"})
    for make in (to_vllm, to_vllm_prompt):
        assert make(call)["prompt_token_ids"] == [1]
        with pytest.raises(Unsupported) as caught:
            make(call, paired_calls=True)
        assert caught.value.node == call
        assert make(answer, paired_calls=True)["prompt_token_ids"] == [1, 2]


def test_positions_of_a_turns_own_are_refused() -> None:
    session = SessionStore.in_memory().create("s", scheme=vl("vllm"))
    table = session.append(session.root, [1, 2], positions=ExternalPositions(np.array([[0, 5]] * 3)))
    for make in (to_vllm, to_vllm_prompt):
        with pytest.raises(Unsupported, match="position table") as caught:
            make(session.append(table, [3]))
        assert caught.value.node == table


def test_an_empty_prompt_is_refused() -> None:
    session = SessionStore.in_memory().create("s", scheme="text@vllm")
    node = session.append(session.root, [1])
    with pytest.raises(Unsupported):
        to_vllm(session.root)
    with pytest.raises(Unsupported):
        to_vllm_prompt(session.root)
    with pytest.raises(Unsupported):
        to_vllm(node, 1)
    with pytest.raises(OutOfRange):
        to_vllm(node, 2)
    wrong: Any = "node"
    for make in (to_vllm, to_vllm_prompt):
        with pytest.raises(TypeError):
            make(wrong)


@pytest.mark.parametrize("family", ["hunyuan_vl", "glm_image"])
def test_families_without_a_form_are_refused_with_media_and_not_without(family: str) -> None:
    session = SessionStore.in_memory().create("s", scheme=f"{family}@hf5")
    text = session.append(session.root, [1, 2])
    assert to_vllm(text)["prompt_token_ids"] == [1, 2]
    item = MediaItem("image", identity("a"), [(0, 1)], (1, 2, 2))
    count = session.root.scheme.num_placeholders(item)
    node = session.append(text, [5] * count, media=[item.with_spans([(0, count)])])
    for make in (to_vllm, to_vllm_prompt):
        with pytest.raises(Unsupported) as caught:
            make(node)
        assert caught.value.item.identity == identity("a")


def test_audio_in_video_images_of_frames_and_videos_of_paddleocr_are_refused() -> None:
    both = MediaItem("video", identity("v"), [(0, 1)], (1, 4, 4), 1.0, audio_feature_length=100)
    frames = MediaItem("image", identity("a"), [(0, 1)], (2, 4, 4))
    for rules, item in ((rule("qwen3_omni"), both), (rule("qwen2_vl"), frames), (rule("paddleocr_vl"), video("v", 0))):
        session = SessionStore.in_memory().create("s", scheme=rules)
        count = rules.num_placeholders(item)
        node = session.append(session.root, [5] * count, media=[item.with_spans([(0, count)])])
        with pytest.raises(Unsupported) as caught:
            to_vllm(node)
        assert caught.value.item.identity == item.identity


def test_a_scheme_without_the_placeholder_id_is_refused() -> None:
    session = SessionStore.in_memory().create("s", scheme=scheme("qwen2_vl@vllm", video_token_id=VIDEO))
    node = session.append(session.root, [IMAGE_PAD] * 4, media=[image("a", 0)])
    for make in (to_vllm, to_vllm_prompt):
        with pytest.raises(Unsupported, match="image_token_id"):
            make(node)


@pytest.mark.parametrize(
    ("family", "index", "token"),
    [
        ("qwen3_vl", 1, 100),  # no vision_start before the first timestamp
        ("qwen3_vl", 4, VISION_END),  # a marker in a timestamp
        ("glm4v", 1, 100),  # no begin_of_video
        ("glm4v", -2, 100),  # no end_of_video
    ],
)
def test_frames_that_stand_otherwise_than_vllm_writes_them_are_refused(family: str, index: int, token: int) -> None:
    script = Script(family)
    script.say(100)
    script.show("video", "a", frames=2)
    script.say(101)
    _, node = script.build()
    assert placed(to_vllm(node))
    script.tokens[index] = token
    store, node = script.build()
    with pytest.raises(Unsupported) as caught:
        to_vllm(node)
    assert caught.value.item == script.items[0]
    store.close()


@pytest.mark.parametrize(("family", "marker"), [("qwen3_vl", VISION_START), ("glm4v", VIDEO_START), ("glm4v", VIDEO_END)])
def test_markers_that_are_text_belong_to_no_video(family: str, marker: int) -> None:
    script = Script(family)
    script.say(100, marker, 101)
    script.show("video", "a", frames=2)
    script.say(102, marker, 103)
    _, node = script.build()
    given_, prompt = to_vllm(node), to_vllm_prompt(node, **options(family))
    (start, stop), (_, _, offset, length, _) = script.ranges[0], placed(given_)[0]
    assert (offset, offset + length) == (start, stop)
    assert prompt["prompt_token_ids"] == script.compact
    assert expanded(script, prompt) == (script.tokens, placed(given_))


@pytest.mark.parametrize("family", ["qwen3_vl", "glm4v"])
def test_a_frame_without_its_markers_is_refused(family: str) -> None:
    for at in (-1, 0):
        script = Script(family)
        script.show("video", "a", frames=2)
        script.say(101)
        offset, length = script.items[0].spans[1]
        script.tokens[offset - 1 if at else offset + length] = 100
        _, node = script.build()
        with pytest.raises(Unsupported, match="no frame") as caught:
            to_vllm(node)
        assert caught.value.item == script.items[0]


# --- prompts that vLLM would expand otherwise ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_vl", "glm4v"])
def test_timestamps_are_vllms_or_the_prompt_is_refused(family: str) -> None:
    script = Script(family)
    script.show("video", "a", frames=3)
    _, node = script.build()
    right = timestamp_ids(family)
    assert to_vllm_prompt(node, timestamp_ids=right)["prompt_token_ids"] == script.compact
    with pytest.raises(Unsupported, match="timestamp_ids") as caught:
        to_vllm_prompt(node)
    assert caught.value.item == script.items[0]
    for wrong in (
        lambda item: [*right(item)[:2], [1]],
        lambda item: right(item)[:2],
        lambda item: [*right(item), [1]],
    ):
        with pytest.raises(Unsupported, match=r"frame (2|3)"):
            to_vllm_prompt(node, timestamp_ids=wrong)
    for change in (str, float):  # equal as numbers, and no ids
        unlike: Any = lambda item, change=change: [list(map(change, text)) for text in right(item)]  # noqa: E731
        with pytest.raises(TypeError):
            to_vllm_prompt(node, timestamp_ids=unlike)


def test_ernie_needs_the_id_of_one_item() -> None:
    script = Script("ernie4_5_vl")
    script.show("image", "a")
    script.show("video", "b", frames=2)
    _, node = script.build()
    with pytest.raises(Unsupported, match="compact_ids"):
        to_vllm_prompt(node)
    with pytest.raises(Unsupported, match="apart"):
        to_vllm_prompt(node, compact_ids={"image": ONE_IMAGE, "video": ONE_IMAGE})
    wrong: Any = {"image": "22", "video": ONE_VIDEO}
    with pytest.raises(TypeError):
        to_vllm_prompt(node, compact_ids=wrong)
    assert to_vllm_prompt(node, compact_ids=COMPACT_IDS["ernie4_5_vl"])["prompt_token_ids"] == script.compact
    for wrong, error in (
        ({"image": -1, "video": ONE_VIDEO}, OutOfRange),
        ({"image": ONE_IMAGE, "video": 2**31}, OutOfRange),
        ({**COMPACT_IDS["ernie4_5_vl"], "images": 5}, Unsupported),
        ([("image", ONE_IMAGE)], TypeError),
    ):
        with pytest.raises(error):
            to_vllm_prompt(node, compact_ids=wrong)


def test_an_id_that_vllm_would_take_for_an_item_is_refused_and_is_text_to_the_engine_input() -> None:
    script = Script("qwen2_vl")
    script.say(100, VIDEO, 101)
    script.show("image", "a")
    script.say(102)
    _, node = script.build()
    assert to_vllm_prompt(node)["prompt_token_ids"] == script.compact, "no video, no id of videos"
    script.say(IMAGE)
    _, node = script.build()
    assert to_vllm(node)["prompt_token_ids"] == script.tokens
    with pytest.raises(Unsupported) as caught:
        to_vllm_prompt(node)
    assert caught.value.index == len(script.compact) - 1


# --- features -----------------------------------------------------------------------------------------------------------------


def test_features_are_the_stores_or_named_as_missing() -> None:
    script = Script("qwen2_5_vl")
    script.show("image", "a")
    script.show("video", "b", frames=2)
    script.show("image", "a")
    store, node = script.build()
    for make in (to_vllm, to_vllm_prompt):
        with pytest.raises(NeedsMedia) as caught:
            make(node, features=True)
        assert [item.identity for item in caught.value.items] == [item.identity for item in script.items[:2]]
    for item in script.items[:2]:
        store.put_features(item, features_of("qwen2_5_vl", item))
    kwargs = to_vllm(node, features=True)["mm_kwargs"]
    assert kwargs["image"][0] == kwargs["image"][1]
    assert kwargs["video"][0]["second_per_grid_ts"].data.item() == 0.5
    assert to_vllm(node)["mm_kwargs"] == {"image": [None, None], "video": [None]}
    kwargs["image"][0]["pixel_values"].data.fill_(-1)
    assert to_vllm(node, features=True)["mm_kwargs"]["image"][0]["pixel_values"].data.min() >= 0, "a copy, whatever the engine does"
    with session_of(store).draft(node) as draft:
        draft.extend([5])
        assert to_vllm(draft, features=True)["mm_kwargs"]["image"][1] == to_vllm(node, features=True)["mm_kwargs"]["image"][1]
    store.close()


def session_of(store: SessionStore) -> Session:
    return store.get("s")


def test_encoder_outputs_are_handed_over_in_either_form() -> None:
    script = Script("qwen2_5_omni")
    script.show("image", "a")
    script.show("audio", "b", width=4)
    script.show("image", "c", 1, 3)
    store, node = script.build()
    for item in script.items:
        if item.modality == "audio":
            store.put_features(item, features_of("qwen2_5_omni", item))
        else:
            rows = torch.arange(item.num_placeholders * 8, dtype=torch.bfloat16).reshape(-1, 8)
            store.put_features(item, {"image_embeds": rows})
    kwargs = to_vllm(node, features=True)["mm_kwargs"]
    assert kwargs["image"][1]["image_embeds"].data.dtype == torch.bfloat16
    prompt = to_vllm_prompt(node, features=True)
    models = load("vllm.model_executor.models.qwen2_5_omni_thinker")
    parsed = models.Qwen2_5OmniThinkerMultiModalDataParser(spatial_merge_size=2, target_sr=16000).parse_mm_data(
        prompt["multi_modal_data"]
    )
    assert {modality: items.get_count() for modality, items in parsed.items()} == {"image": 2, "audio": 1}
    for modality in ("image", "audio"):
        for mine, its in zip(kwargs[modality], parsed[modality]._kwargs[modality], strict=True):
            assert mine == its
    store.close()


def test_what_an_encoder_gave_goes_before_what_it_takes() -> None:
    """As for SGLang; of both, vLLM's models would encode the pixels again."""
    script = Script("qwen2_5_vl")
    script.show("image", "a")
    script.show("video", "b", frames=2)
    store, node = script.build()
    for item in script.items:
        rows = np.ones((item.num_placeholders, 8), np.float32)
        store.put_features(item, {**features_of("qwen2_5_vl", item), f"{item.modality}_embeds": rows})
    kwargs = to_vllm(node, features=True)["mm_kwargs"]
    assert kwargs["image"][0].keys() == {"image_embeds", "image_grid_thw"}
    assert kwargs["video"][0].keys() == {"video_embeds", "video_grid_thw", "second_per_grid_ts"}
    store.close()


def test_features_that_a_prompt_cannot_take_are_refused() -> None:
    for family, modality in (("qwen2_5_vl", "image"), ("qwen2_5_vl", "video"), ("ernie4_5_vl", "image")):
        script = Script(family)
        script.show(modality, "a")
        store, node = script.build(features=True)
        assert to_vllm(node, features=True)["mm_kwargs"][modality][0] is not None
        with pytest.raises(Unsupported, match="engine input") as caught:
            to_vllm_prompt(node, features=True, **options(family))
        assert caught.value.item == script.items[0]
        store.close()


def test_features_of_another_size_or_name_are_refused() -> None:
    script = Script("qwen2_5_vl")
    script.show("image", "a")
    for features, error in (
        ({"pixel_values": np.zeros((3, 6))}, OutOfRange),
        ({"image_embeds": np.zeros((5, 6))}, OutOfRange),
        ({"image_embeds": np.zeros(())}, OutOfRange),
        ({"pixels": np.zeros((16, 6))}, Unsupported),
    ):
        store, node = script.build()
        store.put_features(script.items[0], features)
        with pytest.raises(error):
            to_vllm(node, features=True)
        store.close()


def test_nothing_here_changes_a_node() -> None:
    script = Script("qwen3_vl")
    script.show("video", "a", frames=2)
    store, node = script.build(random.Random(3), features=True)
    before = node.id, node.input_ids().tolist(), node.media_spans()
    given_ = to_vllm(node, features=True)
    given_["prompt_token_ids"][0] = 999
    to_vllm_prompt(node, **options("qwen3_vl"))["prompt_token_ids"].clear()
    assert (node.id, node.input_ids().tolist(), node.media_spans()) == before
    assert to_vllm(node)["prompt_token_ids"] == script.tokens
    store.close()
