"""Page hashes against the engines' own functions and against chains from scratch; what shares a page; what is remembered."""

from __future__ import annotations

import gc
import hashlib
import pickle
import random
import weakref
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as File
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import engine_bridge.chains as ours
from engine_bridge import PageHashes, page_hashes
from engine_bridge.page_hashes import SCHEMES, HashScheme
from engine_bridge.page_memo import Memo
from sessiontree import (
    Draft,
    ExternalPositions,
    MediaItem,
    Node,
    OutOfRange,
    PositionError,
    Session,
    SessionStore,
    SessionTreeError,
    UnknownNode,
    Unsupported,
)
from sessiontree.placeholders import pad_values
from sessiontree.positions import MODES, Mode
from sessiontree.testing.together import in_threads
from tests.histories import random_cuts, split, without_leading_empties
from tests.rope_oracle import RANDOMS
from tests.sglang_engine import engine as sglang_module
from tests.sglang_engine import needs_sglang
from tests.test_positions_families import FRAME_NAMES, NAMES, PARAMS, decoded, drawn, item, made, scheme_of
from tests.toy import IMG, image, new_session, reply, turn
from tests.toy import grow as grow_toy
from tests.vllm_engine import load as vllm_module
from tests.vllm_engine import needs_vllm

EXAMPLES = settings(max_examples=40, deadline=None)
MEDIA_SCHEMES: tuple[HashScheme, ...] = tuple(scheme for scheme in SCHEMES if scheme != "nano_vllm")
SIZES = st.sampled_from([1, 2, 3, 4, 16, 23, 24, 64, 255, 256]) | st.integers(1, 300)
SALTS = st.sampled_from([None, "a", "salt", "ä" * 20, "s" * 300])
WIDE_IDS = [0, 1, 23, 24, 255, 256, 65_535, 65_536, 2**31 - 1]


# --- paths ------------------------------------------------------------------------------------------------------------
class Whole(NamedTuple):
    """An item as it stands on a whole path: ``spans`` half-open, in path coordinates."""

    identity: bytes
    modality: str
    spans: tuple[tuple[int, int], ...]


class Path(NamedTuple):
    """A path, and what it was made of, written down beside it."""

    session: Session
    nodes: tuple[Node, ...]
    tokens: tuple[int, ...]
    items: tuple[Whole, ...]

    @property
    def tip(self) -> Node:
        return self.nodes[-1]

    def ranges(self, size: int) -> list[tuple[str, int, int]]:
        """(identity in hex, start, stop) of each item as vLLM counts it, where its pages of ``size`` are hashed turn by turn."""
        found: list[tuple[str, int, int]] = []
        for one in sorted(self.items, key=lambda one: one.spans[0][0]):
            start, stop = self.around(one, size, found[-1][2] if found else 0)
            found.append((one.identity.hex(), start, stop))
        return found

    def around(self, one: Whole, size: int, before: int) -> tuple[int, int]:
        first, last = one.spans[0][0], one.spans[-1][1]
        scheme, tokens = self.tip.scheme, self.tokens
        if one.modality != "video" or scheme.family not in ("qwen3_vl", "glm4v"):
            return first, last
        begins = next(node.start for node in self.nodes if node.start <= first < node.stop)
        ends = next(node.stop for node in self.nodes if node.start < last <= node.stop)
        lowest = max(before, begins // size * size - 1, 0)  # what is known and not hashed, and a delimiter
        ends = min([ends, *(other.spans[0][0] for other in self.items if other.spans[0][0] >= last)])
        behind = [*tokens[last:ends], None]
        ids = {name.removesuffix("_token_id"): value for name, value in scheme.params.items()}
        if scheme.family == "qwen3_vl":
            if first - 1 >= lowest and tokens[first - 1] == ids["vision_start"]:
                for at in range(first - 2, lowest - 1, -1):
                    if tokens[at] == ids["vision_end"]:
                        break
                    if tokens[at] == ids["vision_start"]:
                        first = at + 1
                        break
            return first, last + (behind[0] == ids["vision_end"])
        if first - 2 >= max(lowest, begins // size * size) and tokens[first - 2 : first] == (
            ids["video_start"],
            ids["image_start"],
        ):
            first -= 2
        if behind[0] == ids["image_end"]:
            for at, token in enumerate(behind):
                if token in (ids["video_start"], ids["image_start"]):
                    break
                if token == ids["video_end"]:
                    return first, last + at + 1
        return first, last


def path(rng: random.Random, name: str, number: int, most: int = 250, session: Session | None = None) -> Path:
    """A random history of a family, cut into turns at random, items in parts; replies between them wherever one may stand."""
    found = drawn(name, number, most)
    cuts = random_cuts(rng, found)
    session = session or new_session(scheme_of(found, name))
    node, nodes = session.root, [session.root]
    tokens: list[int] = []
    replies: list[tuple[int, int]] = []  # where in the history, how many tokens
    at = 0
    for part in without_leading_empties(split(found, cuts)):
        media = [renamed(one) for one in part.media]
        node = session.append(node, part.tokens, media=media)
        nodes.append(node)
        tokens += part.tokens
        at += len(part.tokens)
        if rng.random() < 0.4 and not node.state.open_blocks and not name.startswith(("glm_image", "minicpm")):
            said = [rng.choice(WIDE_IDS) for _ in range(rng.choice([0, 1, 3, 20]))]
            node = decoded(session, node, *said)
            nodes.append(node)
            tokens += said
            replies.append((at, len(said)))

    def moved(index: int) -> int:
        return index + sum(count for where, count in replies if where <= index)

    items = tuple(
        Whole(renamed(one).identity, one.modality, tuple((moved(offset), moved(offset) + length) for offset, length in one.spans))
        for one in found.items
    )
    return Path(session, tuple(nodes), tuple(tokens), items)


def renamed(one: MediaItem) -> MediaItem:
    """Two items in three have an identity that others have as well."""
    number = int.from_bytes(one.identity, "little")
    name = hashlib.sha256(bytes([number % 2 if number % 3 else number])).digest()
    return MediaItem(
        one.modality,
        name,
        one.spans,
        one.grid_thw,
        one.second_per_grid_ts,
        one.audio_feature_length,
        one.target_sizes,
        one.placeholders_before,
        one.unfinished,
    )


paths = st.builds(path, RANDOMS, st.sampled_from([name for name in NAMES if not name.startswith("glm_image")]), st.integers(0, 40))


# --- chains from scratch ----------------------------------------------------------------------------------------------
def filled(tokens: Sequence[int], items: Sequence[Whole]) -> list[int]:
    """Ids with the sentinels of media over their spans."""
    ids = list(tokens)
    for one in items:
        for start, stop in one.spans:
            ids[start:stop] = [pad_values(one.identity)[at % 4] for at in range(stop - start)]
    return ids


def extra_keys(
    ranges: Sequence[tuple[str, int, int]], start: int, stop: int, salt: str | None, lora: tuple[str, str] | None
) -> Any:
    keys: list[Any] = [] if lora is None else [("lora", copy(lora[0]), copy(lora[1]))]
    keys += [("mm", copy(name), first - start) for name, first, last in ranges if first < stop and last > start]
    if start == 0 and salt:
        keys.append(("cache_salt", copy(salt)))
    return tuple(keys) or None


def copy(text: str) -> str:
    """As it is after it was sent to the engine: an object of its own."""
    return text.encode().decode()


def from_scratch(
    scheme: str,
    tokens: Sequence[int],
    size: int,
    salt: str | None = None,
    lora: Any = None,
    tagged: Mapping[int, bytes] | None = None,
    items: Sequence[Whole] = (),
    ranges: Sequence[tuple[str, int, int]] = (),
) -> list[bytes]:
    """Every page of a flat list of ids. ``tagged``: positions to mix in, by number of the page."""
    before = b""
    if scheme == "sglang" and salt:
        before = hashlib.sha256(b"sglang-cache-salt-v1\0" + salt.encode()).digest()
    if scheme == "sglang_storage" and (salt or lora):
        given = b"sglang-cache-namespace-v1"
        for part in (lora, salt):
            given += b"\0" if not part else b"\1" + len(part.encode()).to_bytes(8, "little") + part.encode()
        before = hashlib.sha256(given).digest()
    if scheme.startswith("vllm"):
        before = encoded(scheme, "vllm-none-hash")
    ids = filled(tokens, items) if scheme.startswith("sglang") else list(tokens)
    hashes = []
    for number in range(len(ids) // size):
        start, stop = number * size, (number + 1) * size
        page = ids[start:stop]
        if tagged and number in tagged:
            before = hashlib.sha256(b"sessiontree as_decoded\0" + before + tagged[number]).digest()
        if scheme.startswith("sglang"):
            wide = max(page) > 2**32 - 1
            words = b"".join(one.to_bytes(8 if wide else 4, "little") for one in page)
            before = hashlib.sha256(before + (b"\xff" if wide else b"") + words).digest()
        elif scheme.startswith("vllm"):
            pair = (lora, lora) if isinstance(lora, str) else lora
            before = encoded(scheme, (before, tuple(page), extra_keys(ranges, start, stop, salt, pair)))
        else:
            before = nano_vllm(page, before)
        hashes.append(before)
    return hashes


def encoded(scheme: str, value: Any) -> bytes:
    if scheme == "vllm_sha256":
        return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()
    cbor2 = pytest.importorskip("cbor2", reason="the oracle of canonical CBOR is not installed")
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


def nano_vllm(page: Sequence[int], before: bytes) -> bytes:
    """nano-vllm's rule: an int that goes on as its eight little-endian bytes, then NumPy's own ints."""
    xxhash = pytest.importorskip("xxhash", reason="nano-vllm hashes with xxhash, which is not installed")
    hasher = xxhash.xxh64()
    if before:
        hasher.update(int.from_bytes(before, "big").to_bytes(8, "little"))
    hasher.update(np.array(list(page)).tobytes())
    return cast(int, hasher.intdigest()).to_bytes(8, "big")


def differing(node: Node | Draft, size: int) -> dict[int, bytes]:
    """Pages with a token that stands elsewhere as decoded than as replayed, and the positions of each."""
    table = node.positions()
    apart = (table != node.positions(mode="as_replayed")).any(axis=0)
    pages = range(node.stop // size)
    return {
        page: table[:, page * size : (page + 1) * size].tobytes() for page in pages if apart[page * size : (page + 1) * size].any()
    }


@EXAMPLES
@given(
    paths, SIZES, st.sampled_from(MEDIA_SCHEMES), SALTS, st.sampled_from([None, "adapter", "b"]), st.sampled_from(MODES), st.data()
)
def test_every_node_of_a_path_has_the_pages_of_the_flat_list(
    made_path: Path, size: int, scheme: HashScheme, salt: str | None, lora: str | None, mode: Mode, data: st.DataObject
) -> None:
    """Whatever the order nodes are asked in, and wherever cuts run through items: the pages of a prefix are those of the whole."""
    tip = made_path.tip
    apart = differing(tip, size)
    tagged = apart if mode == "as_decoded" else {}
    whole = from_scratch(scheme, made_path.tokens, size, salt, lora, tagged, made_path.items, made_path.ranges(size))
    order = data.draw(st.permutations(made_path.nodes))
    for node in order:
        found = page_hashes(node, scheme, size, salt, lora, mode=mode)
        assert len(found) == node.stop // size
        assert list(found) == whole[: len(found)]
    if not apart:
        assert page_hashes(tip, scheme, size, salt, lora, mode="as_replayed") == page_hashes(tip, scheme, size, salt, lora)


@EXAMPLES
@given(st.lists(st.lists(st.sampled_from(WIDE_IDS), max_size=90), min_size=1, max_size=8), SIZES, st.sampled_from(SCHEMES))
def test_text_of_every_width(turns: list[list[int]], size: int, scheme: HashScheme) -> None:
    session = SessionStore.in_memory().create("s", scheme="text@vllm")
    node, tokens = session.root, list[int]()
    for number, ids in enumerate([[5], *turns]):
        node = decoded(session, node, *ids) if number % 2 else session.append(node, ids)
        tokens += ids
        assert page_hashes(node, scheme, size) == from_scratch(scheme, tokens, size)


#: What the engines themselves said once, so that whoever has no engine sees it too: SGLang 0.5.23, vLLM 0.33.0.
KNOWN: dict[HashScheme, str] = {
    "sglang": "2ab3d5a7a5716785aaa2da35533ff3f792542a21bfd821a326351b691bcd72a0",
    "sglang_storage": "0d71ea7ad27f7835013e1fe3724a1c2527fc8b0ad8de23c522d04d2f1a9abcb7",
    "vllm_sha256": "c933e67138388c408ffc9ea6ea2f79fb71f462033c4b62666da8cb06d718ea27",
    "vllm_sha256_cbor": "4a8825265d8666bce0de9cca18ac50317685f6fdf8d436f6dfcd6f739d3a1990",
}


@pytest.mark.parametrize("scheme", KNOWN)
def test_what_engines_said(scheme: HashScheme) -> None:
    session = new_session(made("qwen2_5_vl@sglang"))
    ids = [8, 8, 8, *[7] * 9, 23, 24, 255, 256, 65_535, 65_536, 2**31 - 1] * 3
    media = [
        MediaItem("image", b"a" * 32, [(3, 9)], (1, 3, 3)),
        MediaItem("video", b"b" * 32, [(20, 10)], (10, 1, 1), second_per_grid_ts=0.5),
    ]
    node = session.append(session.root, ids, media=media)
    lora: Any = "a name" if scheme.startswith("sglang") else ("a name", "/a/path")
    assert page_hashes(node, scheme, 8, "salt", lora)[-1].hex() == KNOWN[scheme]


# --- SGLang's own functions -------------------------------------------------------------------------------------------
def sglang_hashes(ids: Sequence[int], size: int) -> list[bytes] | None:
    """SGLang's compiled chain over flat ids."""
    return [bytes.fromhex(one) for one in sglang_utils().get_hash_str(array("q", ids), None, size)]


def sglang_utils() -> Any:
    utils = sglang_module("sglang.srt.mem_cache.utils")
    try:
        utils.get_hash_str([1], None, 1)
    except RuntimeError as error:
        pytest.skip(f"SGLang compiles its hashes when they are first wanted, and cannot here: {error.__cause__ or error}")
    return utils


def sglang_padded(tokens: Sequence[int], items: Sequence[Whole]) -> Any:
    """A prompt as SGLang overwrites it, by its own items."""
    schedule_batch = sglang_module("sglang.srt.managers.schedule_batch")
    modality = schedule_batch.Modality
    made_items = []
    for one in items:
        its = schedule_batch.MultimodalDataItem(modality=modality[one.modality.upper()])
        its.offsets = [(start, stop - 1) for start, stop in one.spans]
        its.set_identity(one.identity)
        made_items.append(its)
    inputs = SimpleNamespace(mm_items=made_items, im_token_id=1, video_token_id=1, audio_token_id=1)
    return sglang_module("sglang.srt.managers.mm_utils").pad_mm_tokens(array("q", tokens), inputs)


@needs_sglang
@EXAMPLES
@given(paths, SIZES, SALTS, st.sampled_from([None, "adapter"]), st.integers(0, 20))
def test_sglangs_own_prefix_tree_has_the_same_hashes(
    made_path: Path, size: int, salt: str | None, lora: str | None, cut: int
) -> None:
    """Its nodes and keys, its sentinels, its hash functions of cache events and of storage."""
    utils = sglang_utils()
    radix = sglang_module("sglang.srt.mem_cache.radix_cache")
    ids = sglang_padded(made_path.tokens, made_path.items)
    stop = len(ids) // size * size
    root = radix.TreeNode()
    root.key = radix.RadixKey(array("q"))
    root.hash_value = []
    parent, nodes = root, []
    middle = min(cut * size, stop)
    for first, last in ((0, middle), (middle, stop)):
        if first < last:
            node = radix.TreeNode()
            node.key = radix.RadixKey(ids[first:last], lora, cache_salt=salt)
            node.parent = parent
            node.hash_value = utils.compute_node_hash_values(node, size)
            parent = node
            nodes.append(node)
    stored = [bytes.fromhex(one) for node in nodes for one in node.hash_value]
    published = [bytes.fromhex(one) for node in nodes for one in utils.compute_node_event_hash_values(node, size)]
    tip = made_path.tip
    assert page_hashes(tip, "sglang_storage", size, salt, lora, mode="as_replayed") == stored
    events = page_hashes(tip, "sglang", size, salt, lora, mode="as_replayed")
    assert events == published
    for one in events[:3]:
        assert int.from_bytes(one[:8], "big", signed=True) == utils.hash_str_to_int64(one.hex())


# --- vLLM's own functions ---------------------------------------------------------------------------------------------
def vllm_hashes(
    scheme: str,
    tokens: Sequence[int],
    ranges: Sequence[tuple[str, int, int]],
    embedded: Any,
    size: int,
    salt: str | None,
    lora: tuple[str, str] | None,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> list[bytes]:
    """The block hashes of vLLM's own request. Its first ``chunk`` tokens are the prompt, the others were sampled.

    ``embedded``: which tokens take a row of encoder output.
    """
    utils, hashing = vllm_module("vllm.v1.core.kv_cache_utils"), vllm_module("vllm.utils.hashing")
    inputs, lora_request = vllm_module("vllm.multimodal.inputs"), vllm_module("vllm.lora.request")
    hash_function = hashing.get_hash_fn_by_name(scheme.removeprefix("vllm_"))
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    utils.init_none_hash(hash_function)
    features = []
    for name, first, last in ranges:
        where = inputs.PlaceholderRange(first, last - first, embedded[first:last])
        features.append(inputs.MultiModalFeatureSpec(None, "image", copy(name), where))
    sampling = vllm_module("vllm.sampling_params").SamplingParams(max_tokens=1)
    requests = vllm_module("vllm.v1.request")
    monkeypatch.setattr(requests.StructuredOutputRequest, "from_sampling_params", lambda _: None, raising=False)  # no grammar here
    request = requests.Request(
        "r",
        list(tokens[:chunk]),
        sampling,
        None,
        mm_features=features,
        lora_request=None if lora is None else lora_request.LoRARequest(copy(lora[0]), 1, copy(lora[1])),
        cache_salt=None if salt is None else copy(salt),
        block_hasher=utils.get_request_block_hasher(size, hash_function),
    )
    for at in range(chunk, len(tokens), 5):
        request.append_output_token_ids(list(tokens[at : at + 5]))
    return list(request.block_hashes)


@needs_vllm
@EXAMPLES
@given(paths, SIZES, SALTS, st.sampled_from([None, ("adapter", "/where/it/is"), ("same", "same")]), st.data())
def test_vllms_own_request_has_the_same_hashes(
    made_path: Path, size: int, salt: str | None, lora: tuple[str, str] | None, data: st.DataObject
) -> None:
    """One range an item, text between its spans not embedded; hashed at once, or as tokens come."""
    last = max((last for _, _, last in made_path.ranges(size)), default=1)
    embedded = torch.zeros(len(made_path.tokens), dtype=torch.bool)
    for one in made_path.items:
        for start, stop in one.spans:
            embedded[start:stop] = True
    chunk = data.draw(st.integers(last, len(made_path.tokens)))
    for scheme in ("vllm_sha256", "vllm_sha256_cbor"):
        with pytest.MonkeyPatch.context() as monkeypatch:
            expected = vllm_hashes(scheme, made_path.tokens, made_path.ranges(size), embedded, size, salt, lora, chunk, monkeypatch)
        assert page_hashes(made_path.tip, scheme, size, salt, lora, mode="as_replayed") == expected


FILMS = {
    "qwen3_vl": ("vision_start", "vision_end", [], ["vision_start"], ["vision_end"]),
    "glm4v": ("image_start", "image_end", ["video_start"], [], ["video_end"]),
}


@needs_vllm
@pytest.mark.parametrize("name", FRAME_NAMES)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 40])
def test_a_video_of_frames_is_vllms_range_with_its_timestamps(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM writes it: from the first timestamp to the last vision_end, or from begin_of_video to end_of_video."""
    family = name.partition("@")[0]
    opening, closing, first, around, last = FILMS[family]
    ids = {key: PARAMS[family][f"{key}_token_id"] for key in (opening, closing, *first, *around, *last)}
    pad = PARAMS[family]["video_token_id" if family == "qwen3_vl" else "image_token_id"]
    stamps = [[30, 31, 32], [33, 34]]
    for before in range(12):
        tokens = [7] * before + [ids[one] for one in around]
        start = len(tokens)
        tokens += [ids[one] for one in first]
        spans = []
        for stamp in stamps:
            tokens += [*stamp, ids[opening]] if family == "qwen3_vl" else [ids[opening]]
            spans.append((len(tokens), 4))
            tokens += [pad] * 4 + [ids[closing], *([] if family == "qwen3_vl" else stamp)]
        tokens += [ids[one] for one in last]
        stop = len(tokens) - (family == "qwen3_vl")
        session = new_session(made(name))
        text = session.append(session.root, [8, 8, 8])
        film = session.append(text, tokens, media=[item(1, "video", spans, (2, 2, 2))])
        node = session.append(film, [9] * 40)
        flat = [8, 8, 8, *tokens, *[9] * 40]
        embedded = torch.zeros(len(flat), dtype=torch.bool)
        for offset, length in spans:
            embedded[3 + offset : 3 + offset + length] = True
        where = [((1).to_bytes(32, "little").hex(), 3 + start, 3 + stop)]
        for scheme in ("vllm_sha256", "vllm_sha256_cbor"):
            expected = vllm_hashes(scheme, flat, where, embedded, size, None, None, len(flat), monkeypatch)
            assert page_hashes(node, scheme, size) == expected
            assert page_hashes(film, scheme, size) == expected[: film.stop // size]
            assert page_hashes(text, scheme, size) == expected[: 3 // size], "a turn before it says nothing of it"


@needs_vllm
@pytest.mark.parametrize("name", [name for name in FRAME_NAMES if name.startswith("qwen3_vl")])
def test_the_delimiter_may_be_the_last_token_of_the_page_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = {key: PARAMS["qwen3_vl"][f"{key}_token_id"] for key in ("vision_start", "vision_end", "video")}
    film = [30, 31, ids["vision_start"], *[ids["video"]] * 4, ids["vision_end"], ids["vision_end"], 9, 9, 9]
    session = new_session(made(name))
    before = session.append(session.root, [8] * 3 + [ids["vision_start"]])
    node = session.append(before, film, media=[item(1, "video", [(3, 4)], (1, 2, 2))])
    flat = [*before.input_ids().tolist(), *film]
    where, embedded = [((1).to_bytes(32, "little").hex(), 4, 12)], torch.zeros(len(flat), dtype=torch.bool)
    embedded[7:11] = True
    for scheme in ("vllm_sha256", "vllm_sha256_cbor"):
        expected = vllm_hashes(scheme, flat, where, embedded, 4, None, None, len(flat), monkeypatch)
        assert page_hashes(node, scheme, 4) == expected


@needs_vllm
def test_the_seed_is_an_argument_and_no_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    session = SessionStore.in_memory().create("s", scheme="text@vllm")
    node = session.append(session.root, range(40))
    utils, hashing = vllm_module("vllm.v1.core.kv_cache_utils"), vllm_module("vllm.utils.hashing")
    for scheme in ("vllm_sha256", "vllm_sha256_cbor"):
        before = page_hashes(node, scheme, 16)
        monkeypatch.setenv("PYTHONHASHSEED", "7")
        assert page_hashes(node, scheme, 16) == before
        function = hashing.get_hash_fn_by_name(scheme.removeprefix("vllm_"))
        utils.init_none_hash(function)
        first = utils.hash_block_tokens(function, None, range(16), None)
        assert page_hashes(node, scheme, 16, none_hash_seed="7")[0] == first
        monkeypatch.delenv("PYTHONHASHSEED")


# --- decoded and replayed ---------------------------------------------------------------------------------------------
HF5 = "qwen2_5_vl@hf5"


def filmed(frames: int = 8, before: int = 1) -> tuple[Session, Node]:
    """A session behind whose video a reply is decoded further on than a prefill would place it."""
    session = new_session(made(HF5))
    film = item(1, "video", [(before, frames)], (frames, 1, 1), second_per_grid_ts=0.5)
    return session, session.append(session.root, [*[9] * before, *[7] * frames], media=[film])


@pytest.mark.parametrize("scheme", MEDIA_SCHEMES)
@pytest.mark.parametrize("size", [1, 3, 4, 9])
def test_what_was_decoded_and_what_would_be_replayed_never_share_a_page(scheme: HashScheme, size: int) -> None:
    session, film = filmed()
    said = decoded(session, film, 5, 6, 7, 8)
    whole = session.append(film, [5, 6, 7, 8])  # the same ids, prefilled
    assert not np.array_equal(said.positions(film.stop), whole.positions(film.stop))
    node, other = session.append(said, [3] * 20), session.append(whole, [3] * 20)
    for one, two in ((said, whole), (node, other)):
        apart = film.stop // size  # the page that the first decoded token is in
        decoded_pages, prefilled = page_hashes(one, scheme, size), page_hashes(two, scheme, size)
        assert decoded_pages[:apart] == prefilled[:apart]
        assert not set(decoded_pages[apart:]) & set(prefilled[apart:])
        assert page_hashes(one, scheme, size, mode="as_replayed") == prefilled, "a replay is the prefill of the same ids"
        assert page_hashes(two, scheme, size, mode="as_replayed") == prefilled


@pytest.mark.parametrize("scheme", MEDIA_SCHEMES)
@pytest.mark.parametrize("size", [2, 4, 5, 16])
def test_a_page_that_a_decoded_token_begins_and_a_later_turn_fills(scheme: HashScheme, size: int) -> None:
    """A table that says where text goes on takes both modes back to one; the page before it ends still holds the decoded token."""
    session, film = filmed()
    table = ExternalPositions(np.arange(100, 120)[None].repeat(3, axis=0))
    one, two = (
        session.append(parent, range(20), positions=table)
        for parent in (decoded(session, film, 5, 6), session.append(film, [5, 6]))
    )
    assert one.replayed is None
    assert np.array_equal(one.positions(11), two.positions(11))
    hashes, others = page_hashes(one, scheme, size), page_hashes(two, scheme, size)
    apart = film.stop // size
    assert hashes[:apart] == others[:apart]
    assert not set(hashes[apart:]) & set(others[apart:])
    singly = session.append(decoded(session, decoded(session, film, 5), 6), range(20), positions=table)
    assert page_hashes(singly, scheme, size) == hashes, "wherever its turns end"
    behind = session.append(one, range(40))
    assert page_hashes(behind, scheme, size)[: len(hashes)] == hashes


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 40), max_size=6),
    st.lists(st.integers(0, 40), max_size=6),
    st.integers(1, 12),
    st.sampled_from(SCHEMES[:4]),
)
def test_paths_of_equal_ids_share_the_pages_whose_tokens_all_stand_alike(
    ones: list[int], twos: list[int], size: int, scheme: HashScheme
) -> None:
    """The same ids, cut into decoded and prefilled turns in two ways: they share as far as positions agree, and no page more."""
    session, film = filmed()
    tips = []
    for cuts in (ones, twos):
        node, at = film, 0
        for number, cut in enumerate([*sorted(cuts), 40]):
            ids = range(at, cut)
            node = decoded(session, node, *ids) if number % 2 else session.append(node, ids)
            at = cut
        tips.append(node)
    one, two = tips
    unlike = (one.positions() != two.positions()).any(axis=0)
    alike = int(unlike.argmax()) if unlike.any() else one.stop
    hashes, others = page_hashes(one, scheme, size), page_hashes(two, scheme, size)
    assert hashes[: alike // size] == others[: alike // size]
    assert not set(hashes[alike // size :]) & set(others[alike // size :])


def test_where_both_modes_agree_the_mode_is_no_part_of_a_hash() -> None:
    session = new_session()
    node = grow_toy(session, session.root, turn(1, image(), 2), reply(3, 4, 5), turn(6, 7))
    for scheme in MEDIA_SCHEMES:
        assert page_hashes(node, scheme, 2) == page_hashes(node, scheme, 2, mode="as_replayed")


# --- drafts, forks, other sessions ------------------------------------------------------------------------------------
@pytest.mark.parametrize("scheme", MEDIA_SCHEMES)
@pytest.mark.parametrize("frames", [0, 5])
def test_a_draft_has_the_pages_of_the_node_that_it_becomes(scheme: HashScheme, frames: int) -> None:
    session, film = filmed(frames) if frames else (new_session(made(HF5)), None)
    parent = film or session.append(session.root, [9, 9, 9])
    for size in (1, 2, 5, 64):
        draft = session.draft(parent, key=f"{size}")
        assert page_hashes(draft, scheme, size) == page_hashes(parent, scheme, size)
        seen = []
        for token in range(9):
            draft.append(token)
            seen.append(page_hashes(draft, scheme, size))
            assert len(seen[-1]) == draft.stop // size
        draft.rollback(4)
        assert page_hashes(draft, scheme, size) == seen[3]
        draft.extend([90, 91])
        replayed = page_hashes(draft, scheme, size, mode="as_replayed")
        hashes = page_hashes(draft, scheme, size)
        node = draft.commit()
        assert page_hashes(node, scheme, size) == hashes == page_hashes(draft, scheme, size), "a closed draft reads on"
        assert page_hashes(node, scheme, size, mode="as_replayed") == replayed
        assert node.stop < size or seen[-1][-1] != hashes[-1]
        # Pages that were handed out stay what they were.
        assert seen[3] == hashes[: len(seen[3])] and len(seen[-1]) == (parent.stop + 9) // size


@EXAMPLES
@given(paths, SIZES, st.sampled_from(MEDIA_SCHEMES), st.data())
def test_forks_reopened_stores_and_other_processes_say_the_same(
    tmp_path_factory: pytest.TempPathFactory, made_path: Path, size: int, scheme: HashScheme, data: st.DataObject
) -> None:
    at = data.draw(st.integers(1, len(made_path.nodes) - 1))
    node = made_path.nodes[at]
    expected = page_hashes(made_path.tip, scheme, size)
    pickled = pickle.loads(pickle.dumps(made_path.session.tree))
    again = pickled.node(made_path.tip.id)
    assert page_hashes(again, scheme, size) == expected
    if not node.state.open_blocks:
        branch = made_path.session.append(node, [3] * 300, key="branch")
        shared = node.stop // size
        hashes = page_hashes(branch, scheme, size)
        assert hashes[:shared] == expected[:shared]
        assert len(hashes) == branch.stop // size
    where = tmp_path_factory.mktemp("store")
    with SessionStore.open(where) as store:
        session = store.create("s", scheme=made_path.session.root.scheme)
        stored = session.root
        for turn_node in made_path.nodes[1:]:
            if turn_node.origin == "generated":
                stored = decoded(session, stored, *turn_node.token_ids.tolist())
            else:
                stored = session.append(stored, turn_node.token_ids, media=turn_node.media)
        session.set_head("tip", stored)
    with SessionStore.open(where) as store:
        assert page_hashes(store.get("s").head("tip").node, scheme, size) == expected


# --- namespaces -------------------------------------------------------------------------------------------------------
def test_the_sessions_namespace_counts_where_no_other_is_given() -> None:
    store = SessionStore.in_memory()
    plain, own = (
        store.create(name, scheme="text@vllm", namespace=namespace)
        for name, namespace in (("plain", None), ("own", {"cache_salt": "s", "lora": "a", "tenant": "t"}))
    )
    one, two = (session.append(session.root, range(40)) for session in (plain, own))
    for scheme in MEDIA_SCHEMES:
        assert page_hashes(two, scheme, 16) == page_hashes(one, scheme, 16, salt="s", lora="a")
        assert page_hashes(two, scheme, 16, salt="", lora="") == page_hashes(one, scheme, 16)
        assert page_hashes(two, scheme, 16, salt="other") == page_hashes(one, scheme, 16, salt="other", lora="a")
        with own.draft(two) as draft:
            draft.extend(range(20))
            assert page_hashes(draft, scheme, 16)[:2] == page_hashes(two, scheme, 16)
    with pytest.raises(Unsupported):
        page_hashes(two, "nano_vllm", 16)
    assert page_hashes(two, "nano_vllm", 16, salt="", lora="") == page_hashes(one, "nano_vllm", 16)


def test_which_engine_tells_salts_and_adapters_apart() -> None:
    session = SessionStore.in_memory().create("s", scheme="text@vllm", namespace="tenant")
    node = session.append(session.root, range(40))
    bare = {scheme: page_hashes(node, scheme, 16) for scheme in MEDIA_SCHEMES}
    for scheme in MEDIA_SCHEMES:
        one, two = (set(page_hashes(node, scheme, 16, salt=salt)) for salt in ("one", "two"))
        assert len(one | two | set(bare[scheme])) == 6, scheme
        with_lora = page_hashes(node, scheme, 16, lora="one")
        assert (with_lora == bare[scheme]) is (scheme == "sglang"), "SGLang's events name the adapter beside the hash"
    assert bare["sglang"] == bare["sglang_storage"]
    for scheme in ("vllm_sha256", "vllm_sha256_cbor"):
        named = {path: page_hashes(node, scheme, 16, lora=("name", path))[0] for path in ("one", "two")}
        assert named["one"] != named["two"], "a name that stands for other weights now"


# --- what is wrong ----------------------------------------------------------------------------------------------------
WRONG: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"scheme": "sha256"}, Unsupported),
    ({"scheme": "SGLANG"}, Unsupported),
    ({"scheme": None}, TypeError),
    ({"page_size": 0}, OutOfRange),
    ({"page_size": -(2**70)}, OutOfRange),
    ({"page_size": 16.0}, TypeError),
    ({"page_size": True}, TypeError),
    ({"salt": b"salt"}, TypeError),
    ({"salt": "\ud800"}, TypeError),
    ({"lora": b"lora"}, TypeError),
    ({"lora": ["name", "path"], "scheme": "vllm_sha256"}, TypeError),
    ({"lora": ("name",), "scheme": "vllm_sha256"}, TypeError),
    ({"lora": ("name", 1), "scheme": "vllm_sha256"}, TypeError),
    ({"lora": ("name", "path")}, TypeError),
    ({"none_hash_seed": None}, TypeError),
    ({"mode": "guessed"}, PositionError),
    ({"mode": None}, TypeError),
    ({"scheme": "nano_vllm", "salt": "s"}, Unsupported),
    ({"scheme": "nano_vllm", "lora": "a"}, Unsupported),
]


@pytest.mark.parametrize(("given_", "error"), WRONG)
def test_what_is_refused(given_: dict[str, Any], error: type[Exception]) -> None:
    session = SessionStore.in_memory().create("s", scheme="text@vllm")
    node = session.append(session.root, range(40))
    page_hashes(node, "sglang", 1)  # whatever is remembered under an equal page size
    with session.draft(node) as draft:
        for holder in (node, draft, session.root):
            with pytest.raises(error) as caught:
                page_hashes(holder, **{"scheme": "sglang", "page_size": 16, **given_})
            assert type(caught.value) is error
            if issubclass(error, SessionTreeError):
                assert str(caught.value)


@pytest.mark.parametrize("wrong", [None, 1, "node", [1, 2], bytes(32)])
def test_only_nodes_and_drafts_have_pages(wrong: Any) -> None:
    with pytest.raises(TypeError):
        page_hashes(wrong, "sglang", 16)


def test_nano_vllm_has_no_media() -> None:
    session = new_session()
    text = session.append(session.root, range(20))
    node = grow_toy(session, text, turn(1, image(), 2))
    assert len(page_hashes(text, "nano_vllm", 4)) == 5
    for below in (node, session.append(node, range(20))):
        with pytest.raises(Unsupported) as caught:
            page_hashes(below, "nano_vllm", 4)
        assert caught.value.item == node.media[0]


# --- the value that comes back ----------------------------------------------------------------------------------------
@EXAMPLES
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 9), st.integers(0, 25), st.data())
def test_they_read_as_a_tuple(lengths: list[int], size: int, more: int, data: st.DataObject) -> None:
    session = SessionStore.in_memory().create("s", scheme="text@vllm")
    node = session.root
    for length in lengths:
        node = session.append(node, range(length))
    holder: Node | Draft = node
    if more:
        holder = session.draft(node)
        holder.extend(range(more))
    expected = tuple(from_scratch("sglang", holder.input_ids().tolist(), size))
    bound = st.none() | st.integers(-40, 40)
    part = slice(data.draw(bound), data.draw(bound), data.draw(st.none() | st.sampled_from([-3, -1, 1, 2])))
    index = data.draw(st.integers(-40, 40))
    for first in ("slice", "index", "whole"):  # whichever is read first
        hashes = page_hashes(holder, "sglang", size)
        assert len(hashes) == len(expected)
        if first == "whole":
            assert list(hashes) == list(expected)
        if first == "index" and -len(expected) <= index < len(expected):
            assert hashes[index] == expected[index]
        assert hashes[part] == expected[part]
        if -len(expected) <= index < len(expected):
            assert hashes[index] == expected[index]
        else:
            with pytest.raises(IndexError):
                hashes[index]
    assert hashes == expected
    assert hashes == list(expected)
    assert hashes == page_hashes(holder, "sglang", size)
    assert hashes != expected[:-1] or not expected
    assert hashes != "text"
    assert (expected[-1] in hashes) if expected else not hashes
    assert str(len(expected)) in repr(hashes)
    with pytest.raises(TypeError):
        hash(hashes)
    with pytest.raises(TypeError):
        cast(Any, hashes)[0] = b""


def test_every_slice_is_that_of_a_tuple() -> None:
    session = SessionStore.in_memory().create("s", scheme="text@vllm")
    node = session.append(session.append(session.root, range(8)), range(10))
    hashes = page_hashes(node, "sglang", 2)
    expected = tuple(page_hashes(node, "sglang", 2))
    bounds = [None, *range(-11, 12)]
    for start in bounds:
        for stop in bounds:
            for step in (None, -3, -1, 1, 2, 5):
                assert hashes[start:stop:step] == expected[start:stop:step], (start, stop, step)


def test_pages_outlive_their_session() -> None:
    session = new_session()
    node = grow_toy(session, session.root, turn(*range(40)), turn(image()), turn(*range(40)))
    hashes = page_hashes(node, "sglang", 4)
    expected = list(page_hashes(node, "sglang", 4))
    session.close()
    del session, node
    gc.collect()
    assert list(hashes) == expected


# --- what is remembered -----------------------------------------------------------------------------------------------
@pytest.fixture
def memo(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memo[Any]]:
    """A memory of its own."""
    own: Memo[Any] = Memo(2**20)
    monkeypatch.setattr(ours, "_memo", own)
    yield own


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, memo: Memo[Any]) -> list[int]:
    """How many tokens were hashed, call by call."""
    calls: list[int] = []
    for kind in (ours.SGLang, ours.VLLM, ours.VLLMCbor, ours.NanoVLLM):

        def counting(self: Any, before: bytes, first: int, ids: NDArray[np.int32], pieces: Any, real: Any = kind.hash_pages) -> Any:
            calls.append(len(ids))
            return real(self, before, first, ids, pieces)

        monkeypatch.setattr(kind, "hash_pages", counting)
    return calls


@pytest.mark.parametrize("scheme", SCHEMES)
def test_only_new_pages_are_hashed_whatever_the_depth(scheme: HashScheme, counted: list[int]) -> None:
    session = SessionStore.in_memory().create("s", scheme="text@vllm")
    node = session.root
    for depth in range(300):
        node = session.append(node, range(10))
        page_hashes(node, scheme, 16)
        assert sum(counted) == (node.stop // 16 - node.start // 16) * 16, depth
        counted.clear()
    page_hashes(node, scheme, 16)
    assert not counted, "a node twice"
    for ancestor in node.path():  # a branch anywhere on it hashes its own pages alone
        branch = session.append(ancestor, range(100, 140))
        page_hashes(branch, scheme, 16)
        assert sum(counted) == (branch.stop // 16 - branch.start // 16) * 16
        counted.clear()
    with session.draft(node) as draft:
        draft.extend(range(100))
        page_hashes(draft, scheme, 16)
        assert sum(counted) == (draft.stop // 16 - draft.start // 16) * 16
    counted.clear()
    page_hashes(node, scheme, 15)
    assert sum(counted) == node.stop // 15 * 15, "pages of another size are others"


def test_a_path_that_was_asked_for_at_its_end_is_known_all_along(counted: list[int]) -> None:
    session = SessionStore.in_memory().create("s", scheme="text@vllm")
    node = session.root
    for _ in range(50):
        node = session.append(node, range(10))
    page_hashes(node, "sglang", 16)
    counted.clear()
    for ancestor in node.path():
        list(page_hashes(ancestor, "sglang", 16))
    assert not counted


def test_the_memory_keeps_no_node_and_nothing_of_nodes_that_are_gone(memo: Memo[Any]) -> None:
    session = new_session()
    node = grow_toy(session, session.root, turn(*range(40)), turn(image()), turn(*range(40)))
    for scheme in MEDIA_SCHEMES:
        page_hashes(node, scheme, 4)
        page_hashes(node, scheme, 4, salt="s")
    assert len(memo) == 3 * 8
    gone = weakref.ref(node)
    tree, branch = session.tree.append(node, range(50))
    page_hashes(branch, "sglang", 4)
    assert len(memo) == 3 * 8 + 1
    del tree, branch
    gc.collect()
    assert len(memo) == 3 * 8
    session.close()
    del session, node
    gc.collect()
    assert gone() is None
    assert len(memo) == 0


@pytest.mark.parametrize("limit", [0, 1, 7, 100])
def test_a_memory_that_is_too_small_only_costs_time(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small: Memo[Any] = Memo(limit)
    monkeypatch.setattr(ours, "_memo", small)
    session = SessionStore.in_memory().create("s", scheme="text@vllm")
    nodes = [session.root]
    for _ in range(40):
        nodes.append(session.append(nodes[-1], range(10)))
    for node in [*nodes, *reversed(nodes)]:
        assert page_hashes(node, "sglang", 4) == from_scratch("sglang", node.input_ids().tolist(), 4)
        assert sum(1 + len(entry.value.hashes) for part in (small._young, small._old) for entry in part.values()) <= limit + 8


def test_the_least_recently_used_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    memo: Memo[Any] = Memo(100)
    monkeypatch.setattr(ours, "_memo", memo)
    session = SessionStore.in_memory().create("s", scheme="text@vllm")
    kept = session.append(session.root, [1])
    others = [session.append(session.root, [2, number]) for number in range(300)]
    key = page_hashes(kept, "sglang", 4)._chain.key
    for other in others:
        page_hashes(other, "sglang", 4)
        assert memo.get(key + kept.id) is not None
    assert memo.get(key + others[0].id) is None


def test_a_path_of_very_many_turns(memo: Memo[Any]) -> None:
    session = SessionStore.in_memory().create("s", scheme="text@vllm")
    node = session.root
    for number in range(20_000):
        node = session.append(node, [number])
    hashes = page_hashes(node, "sglang", 16)
    assert hashes == from_scratch("sglang", range(20_000), 16)
    assert hashes[17] == page_hashes(node.ancestor(300), "sglang", 16)[17]


def test_every_thread_gets_the_right_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many threads, few places to remember, nodes that die meanwhile."""
    monkeypatch.setattr(ours, "_memo", Memo(60))
    session = SessionStore.in_memory().create("s", scheme="text@vllm")
    nodes = [session.root]
    for number in range(40):
        nodes.append(session.append(nodes[-1], range(number, number + 10)))
    expected = {scheme: from_scratch(scheme, nodes[-1].input_ids().tolist(), 4) for scheme in SCHEMES}

    def ask(number: int) -> None:
        rng = random.Random(number)
        for _ in range(150):
            scheme, node = rng.choice(SCHEMES), rng.choice(nodes)
            assert page_hashes(node, scheme, 4) == expected[scheme][: node.stop // 4]
            own = session.append(node, [number, rng.randrange(100)], key=None)
            page_hashes(own, scheme, 4)

    in_threads(6, ask)


# --- rows of CASES.md -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scheme", MEDIA_SCHEMES)
def test_c72_another_image_changes_every_page_from_its_span_on(scheme: HashScheme) -> None:
    session = new_session()
    for size in (1, 2, 3, 16):
        one, two = (
            grow_toy(session, session.root, turn(*range(10), image(number=number), *range(5)), turn(*range(20)), reply(*range(20)))
            for number in (0, 1)
        )
        assert one.input_ids().tolist() == two.input_ids().tolist()
        hashes, others = page_hashes(one, scheme, size), page_hashes(two, scheme, size)
        shared = 10 // size
        assert hashes[:shared] == others[:shared], "text before the image still shares"
        assert not set(hashes[shared:]) & set(others[shared:])


@pytest.mark.parametrize("scheme", MEDIA_SCHEMES)
def test_c72_the_same_image_at_another_offset_of_a_page(scheme: HashScheme) -> None:
    """All ids alike, and the image not where it was: placeholders outside its span are text."""
    session = new_session()
    nodes = {
        offset: session.append(session.root, [IMG] * 32, media=[MediaItem("image", b"i" * 32, [(offset, 4)], (1, 4, 4))])
        for offset in range(20, 28)
    }
    text = session.append(session.root, [IMG] * 32)
    hashes = [page_hashes(node, scheme, 16) for node in (*nodes.values(), text)]
    assert len({one[0] for one in hashes}) == 1, "the page before it"
    assert len({one[1] for one in hashes}) == len(hashes)


def test_c70_each_page_of_an_item_has_its_identity_in_every_bit_that_sglang_takes() -> None:
    """Identities that agree in all but one byte share no page; and a part of an item has the pages of the whole."""
    session = new_session()
    seen: set[bytes] = set()
    for at in range(32):
        name = bytes(at) + b"\1" + bytes(31 - at)
        node = session.append(session.root, [IMG] * 64, media=[MediaItem("image", name, [(0, 64)], (1, 16, 16))])
        hashes = page_hashes(node, "sglang", 1)
        whole = set(hashes)
        assert len(whole) == 64
        assert not seen & whole
        seen |= whole
        for cut in (1, 30, 63):
            part = MediaItem("image", name, [(0, cut)], (1, 16, 16), unfinished=True)
            rest = MediaItem("image", name, [(0, 64 - cut)], (1, 16, 16), placeholders_before=cut)
            first = session.append(session.root, [IMG] * cut, media=[part])
            assert page_hashes(first, "sglang", 1) == hashes[:cut]
            assert page_hashes(session.append(first, [IMG] * (64 - cut), media=[rest]), "sglang", 1) == hashes


@pytest.mark.parametrize("scheme", MEDIA_SCHEMES)
def test_c66_evicting_kv_changes_no_node_and_a_node_keeps_no_kv(scheme: HashScheme) -> None:
    """An engine's cache beside the tree: it drops what it likes, and finds again by the same names what is still there."""
    session = new_session()
    rng = random.Random(66)
    cache: dict[bytes, object] = {}
    node = session.root
    for number in range(12):
        node = grow_toy(session, node, turn(*range(number, number + 30), image(number=number % 2)))
        before = node.id, node.input_ids().tolist(), node.positions().tolist(), list(page_hashes(node, scheme, 16))
        pages = {name: bytearray(16) for name in before[3] if name not in cache}
        held = [weakref.ref(kept) for kept in map(_Kv, pages)]
        assert all(kept() is None for kept in held), "no page was kept by being named"
        cache.update(pages)
        for name in rng.sample(sorted(cache), len(cache) // 3):
            del cache[name]
        assert (node.id, node.input_ids().tolist(), node.positions().tolist(), list(page_hashes(node, scheme, 16))) == before
    cached = next((number for number, name in enumerate(page_hashes(node, scheme, 16)) if name not in cache), -1)
    assert cached == len([*_leading(page_hashes(node, scheme, 16), cache)])
    session.close()
    assert cache, "what the engine holds is its own business"


class _Kv:
    """A page of an engine's."""

    def __init__(self, name: bytes) -> None:
        self.name = name


def _leading(hashes: PageHashes, cache: Mapping[bytes, object]) -> Iterator[bytes]:
    for one in hashes:
        if one not in cache:
            return
        yield one


@pytest.mark.parametrize("durable", [False, True])
def test_c88_what_routers_and_caches_ask_of_a_session(durable: bool, tmp_path: File) -> None:
    """Effective ids, page names, which opening this is, and which branches will get no more turns; no engine anywhere."""
    with SessionStore.open(tmp_path) if durable else SessionStore.in_memory() as store:
        session = store.create("s", scheme=made(HF5), namespace={"cache_salt": "acme"})
        prompt = session.append(session.root, range(40))
        one, two = decoded(session, prompt, *range(20)), decoded(session, prompt, *range(50, 70))
        for node in (session.root, prompt, one, two):
            assert not session.branch_done(node), "nobody said anything yet"
        session.set_head("one", one)
        session.set_head("two", two)
        more = session.append(one, [1, 2, 3])
        assert [session.branch_done(node) for node in (session.root, prompt, one, two, more)] == [False] * 4 + [True]
        session.set_head("one", more, expected=one)
        assert not session.branch_done(more)
        session.drop_head("two")  # this branch is finished; its history stays
        assert [session.branch_done(node.id) for node in (session.root, prompt, one, two, more)] == [False] * 3 + [True, False]
        # What a cache may let go: the pages of the branch that no other branch begins with.
        shared, branch = page_hashes(prompt, "sglang", 16), page_hashes(two, "sglang", 16)
        assert branch[: len(shared)] == shared
        assert not set(branch[len(shared) :]) & set(page_hashes(more, "sglang", 16))
        with session.draft(two) as draft:  # a turn on its way
            assert not session.branch_done(two)
            draft.append(1)
        assert session.branch_done(two)
        session.pin(two)
        assert session.branch_done(two), "a pin keeps a node; it says nothing of turns to come"
        ids = {node.id: (node.input_ids().tolist(), list(page_hashes(node, "sglang", 16))) for node in session.tree}
        incarnation = session.incarnation
        done = {node.id: session.branch_done(node) for node in session.tree}
        if not durable:
            session.close()
            assert all(map(session.branch_done, session.tree)), "a closed session gets no turns"
            return
    with SessionStore.open(tmp_path) as store:
        again = store.get("s")
        assert again.incarnation != incarnation, "what was said of the one before says nothing of this one"
        assert {node.id: (node.input_ids().tolist(), list(page_hashes(node, "sglang", 16))) for node in again.tree} == ids
        assert {node.id: again.branch_done(node) for node in again.tree} == done
        again.drop_head("one")
        assert all(map(again.branch_done, again.tree)), "the last head went"
    with SessionStore.open(tmp_path) as store:
        assert all(map(store.get("s").branch_done, store.get("s").tree))
        store.get("s").set_head("main", prompt.id)
        assert [store.get("s").branch_done(node.id) for node in (prompt, one)] == [False, True]
        store.get("s").unpin(two.id)
        store.get("s").drop(one.id)
        with pytest.raises(UnknownNode):
            store.get("s").branch_done(one.id)


@EXAMPLES
@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from(["grow", "head", "drop", "draft"])), max_size=30))
def test_c88_a_branch_is_done_when_nothing_stands_below_it(steps: list[tuple[int, str]]) -> None:
    session = SessionStore.in_memory().create("s", scheme="text@vllm")
    nodes, heads, drafts = [session.root], dict[str, Node](), list[Draft]()
    for number, (pick, step) in enumerate(steps):
        node = nodes[pick % len(nodes)]
        if step == "grow":
            nodes.append(session.append(node, [number]))
        elif step == "head":
            heads[f"{pick % 3}"] = node
            session.set_head(f"{pick % 3}", node)
        elif step == "draft":
            drafts.append(session.draft(node))
        elif f"{pick % 3}" in heads:
            del heads[f"{pick % 3}"]
            session.drop_head(f"{pick % 3}")
        elif drafts:
            drafts.pop().abort()
        said = any(step == "head" for _, step in steps[: number + 1])
        held = [*heads.values(), *(draft.parent for draft in drafts)]
        for at in nodes:
            assert session.branch_done(at) is (said and not any(at in tip.path() for tip in held))
