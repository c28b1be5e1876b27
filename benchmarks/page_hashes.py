"""What page hashes cost: those of one new turn on a long session, beside the engines' own functions on the same tokens.

Expected before the first run of this file, from bare loops: 64 pages of SGLang 21 µs of SHA-256 and 8 µs around it, 64 of vLLM
65 µs with pickle and 180 µs with a CBOR library (so ids are encoded by NumPy here, 50 µs), 64 of nano-vllm 10 µs. SGLang's own
compiled chain beats ours where it is given the hash before the new pages; nobody gives it that outside of its own prefix tree.
vLLM's own hasher costs what ours does, with its lookups of media and keys, twice: it keeps what a request had.
"""

from __future__ import annotations

import gc
import sys
from array import array
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import torch
from harness import Figure, median_of, memory_of, report

from engine_bridge import page_hashes
from engine_bridge.page_hashes import SCHEMES, HashScheme
from sessiontree import MediaItem, Node, Session, SessionStore
from sessiontree.positions import scheme
from tests.sglang_engine import engine as sglang_module
from tests.sglang_engine import missing as missing_sglang
from tests.vllm_engine import can_run as can_run_vllm
from tests.vllm_engine import load as vllm_module

TOKENS = 2**17
TURN = 1024
PAGE = 16
SAMPLES = 400
BARS: dict[HashScheme, float | None] = {
    "sglang": 60,
    "sglang_storage": 60,
    "vllm_sha256": 120,
    "vllm_sha256_cbor": 120,
    "nano_vllm": None,
}
_numbers = count()


def ids_of(number: int, length: int = TURN) -> Any:
    return np.random.default_rng(number).integers(0, 150_000, length).astype(np.int32)


def grown(turns: int, tokens: int) -> tuple[Session, Node]:
    """A session of so many turns of so many tokens; the store lives as long as it does."""
    session = SessionStore.in_memory().create("bench", scheme="text@vllm")
    node = session.root
    for number in range(turns):
        node = session.append(node, ids_of(number, tokens))
    return session, node


def new_turns(session: Session, parent: Node, ask: Callable[[Node], object], samples: int = SAMPLES, media: Any = ()) -> float:
    """Median microseconds of asking a node that nobody asked before; its parent was."""
    ask(parent)
    nodes = iter([session.append(parent, ids_of(next(_numbers)), media=media, key=f"{next(_numbers)}") for _ in range(samples)])
    return median_of(lambda: ask(next(nodes)), samples)


def sglang_peers(node: Node) -> dict[str, float]:
    """SGLang's compiled chain: over the new pages with the hash before them in hand, and over the whole path."""
    if missing_sglang() is not None:
        return {}
    utils = sglang_module("sglang.srt.mem_cache.utils")
    try:
        before = utils.get_hash_str(array("q", node.input_ids(0, node.start).tolist()), None, PAGE)[-1]
    except RuntimeError:  # it cannot be compiled here
        return {}
    new, whole = (array("q", node.input_ids(start).tolist()) for start in (node.start, 0))
    return {
        "SGLang, new pages alone": median_of(lambda: utils.get_hash_str(new, before, PAGE), SAMPLES),
        "SGLang, whole path": median_of(lambda: utils.get_hash_str(whole, None, PAGE), 15),
    }


def vllm_peers(node: Node, name: HashScheme) -> dict[str, float]:
    """vLLM's own hasher, as a request that goes on calls it, and for a request that is sent again."""
    if not can_run_vllm():
        return {}
    utils = vllm_module("vllm.v1.core.kv_cache_utils")
    function = vllm_module("vllm.utils.hashing").get_hash_fn_by_name(name.removeprefix("vllm_"))
    requests = vllm_module("vllm.v1.request")
    requests.StructuredOutputRequest.from_sampling_params = lambda _: None  # no grammar here
    utils.init_none_hash(function)
    hasher = utils.get_request_block_hasher(PAGE, function)
    sampling = vllm_module("vllm.sampling_params").SamplingParams(max_tokens=1)
    request = requests.Request("r", node.input_ids().tolist(), sampling, None, block_hasher=hasher)
    hashes = list(request.block_hashes)
    assert page_hashes(node, name, PAGE) == hashes

    def ask(known: int) -> None:
        request.block_hashes = hashes[:known]
        hasher(request)

    old = node.start // PAGE
    before = hashes[:old]
    request.block_hashes = before
    return {"vLLM, new pages alone": median_of(lambda: hasher(request), SAMPLES), "vLLM, whole path": median_of(lambda: ask(0), 15)}


def figures() -> Iterator[Figure]:
    torch.set_num_threads(1)
    session, tip = grown(TOKENS // TURN, TURN)
    last = session.append(tip, ids_of(next(_numbers)))
    title = f"page hashes of a new {TURN:,}-token turn on {TOKENS // 1024}k tokens, pages of {PAGE}"
    for name in SCHEMES:
        peers = sglang_peers(last) if name == "sglang" else vllm_peers(last, name) if name.startswith("vllm") else {}
        value = new_turns(session, tip, lambda node, name=name: page_hashes(node, name, PAGE))  # type: ignore[misc]
        yield Figure(f"{title}: {name}", value, "µs", BARS[name], peers=peers)

    rules = scheme("qwen2_5_vl@sglang", image_token_id=151_655, video_token_id=151_656, vision_start_token_id=151_652)
    pictured = SessionStore.in_memory().create("pictured", scheme=rules)
    start = pictured.append(pictured.root, ids_of(0))
    image = MediaItem("image", bytes(32), [(300, 256)], (1, 32, 32))
    for name in ("sglang", "vllm_sha256"):
        value = new_turns(pictured, start, lambda node, name=name: page_hashes(node, name, PAGE), media=[image])  # type: ignore[misc]
        yield Figure(f"page hashes of a new {TURN:,}-token turn with an image of 256 placeholders: {name}", value, "µs")

    salts = count()
    value = median_of(lambda: page_hashes(last, "sglang", PAGE, salt=f"{next(salts)}"), 15) / 1000
    yield Figure(f"all pages of {TOKENS // 1024}k tokens, nothing remembered: sglang", value, "ms")
    value = median_of(lambda: page_hashes(last, "sglang", PAGE), 400, each=10)
    yield Figure("page hashes that are remembered", value, "µs")
    with session.draft(last) as draft:
        draft.extend(range(PAGE))
        yield Figure(
            "page hashes of a draft of one page", median_of(lambda: page_hashes(draft, "sglang", PAGE), 400, each=10), "µs"
        )

    gc.collect()
    size, hashes = memory_of(lambda: page_hashes(last, "sglang", PAGE, salt="of its own"))
    yield Figure("memory of a remembered page", size / len(hashes), "B", 150, note="its 32 bytes, as an object of Python's 65")

    taken: dict[int, list[float]] = {10: [], 10_000: []}
    sessions = {depth: grown(depth, PAGE) for depth in taken}
    for _ in range(9):  # in turn, so that both see the same machine
        for depth, (deep, node) in sessions.items():
            taken[depth].append(new_turns(deep, node, lambda node: page_hashes(node, "sglang", PAGE), 60))
    shallow, deep_one = (float(np.median(values)) for values in taken.values())
    yield Figure(
        "page hashes of a new page at depth 10,000 over depth 10: sglang",
        deep_one / shallow,
        "x",
        1.25,
        note=f"{shallow:.1f} and {deep_one:.1f} µs",
    )


if __name__ == "__main__":
    sys.exit(not report(figures()))
