"""Tiny models of transformers, float64: chunked, branched, padded and packed inputs give the logits of one full forward.

The full forward is transformers' alone: the whole history at once, at positions the model computes itself.
"""

from __future__ import annotations

import copy
import inspect
import os
import random
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.nn.functional import scaled_dot_product_attention as attention
from transformers import AttentionInterface, DynamicCache, Qwen2VLImageProcessorPil
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
from transformers.models.ernie4_5_vl_moe.processing_ernie4_5_vl_moe import Ernie4_5_VLMoeProcessor

from engine_bridge import to_transformers
from engine_bridge.adapters import transformers as adapter
from sessiontree import Draft, MediaItem, Node, Session, SessionStore, Unsupported, media_identity
from tests.tiny_models import (
    DELIMITERS,
    END,
    FAMILIES,
    IMAGE,
    START,
    VIDEO,
    VIDEO_END,
    VIDEO_START,
    clip,
    encoded,
    grids,
    identity,
    picture,
    tiny_model,
    tiny_scheme,
    tiny_text_model,
)

SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"
SCHEDULES = settings(max_examples=300 if SOAK else 15, deadline=None, suppress_health_check=list(HealthCheck))
BAR = 1e-5
FAR = 1e-2  # what wrong inputs change at least
QWEN = ("qwen2_5_vl", "qwen3_vl")
PROCESSOR = Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, size={"shortest_edge": 56 * 56, "longest_edge": 56 * 56 * 4})


class Lab:
    """A session and its model; pixels by identity, as a server would keep them."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.model = tiny_model(family)
        self.session: Session = SessionStore.in_memory().create("s", scheme=tiny_scheme(family))
        self.pixels: dict[bytes, torch.Tensor] = {}

    def shown(self, parent: Node, before: list[int], size: tuple[int, int], colour: str, after: list[int]) -> Node:
        """A turn with a picture of ``size`` pixels (width, height)."""
        features = PROCESSOR(images=[Image.new("RGB", size, colour)], return_tensors="pt")
        grid = features["image_grid_thw"][0].tolist()
        count = grid[1] * grid[2] // 4
        identity = media_identity("image", features["pixel_values"])
        self.pixels[identity] = features["pixel_values"].double()
        item = MediaItem("image", identity, [(len(before) + 1, count)], grid)
        return self.session.append(parent, [*before, START, *[IMAGE] * count, END, *after], media=[item])

    def clip(self, parent: Node, before: list[int], name: str, after: list[int]) -> Node:
        """A turn with a video of two frames, 1 x 2 merged patches each; where frames have spans of their own, text is between."""
        identity = media_identity("video", name)
        generator = torch.Generator().manual_seed(len(name))
        self.pixels[identity] = torch.randn((2 * 2 * 4, 3 * 2 * 14 * 14), generator=generator, dtype=torch.float64)
        at = len(before) + 1
        spans, ids = ([(at, 4)], [VIDEO] * 4) if self.family == "qwen2_5_vl" else ([(at, 2), (at + 4, 2)], [VIDEO] * 2)
        if self.family == "qwen3_vl":
            ids = [VIDEO, VIDEO, END, START, VIDEO, VIDEO]
        item = MediaItem("video", identity, spans, (2, 2, 4), 1.0 if self.family == "qwen2_5_vl" else None)
        return self.session.append(parent, [*before, START, *ids, END, *after], media=[item])

    def pixel_inputs(self, items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
        given = {}
        for modality, values, grid in (
            ("image", "pixel_values", "image_grid_thw"),
            ("video", "pixel_values_videos", "video_grid_thw"),
        ):
            if shown := [item for item in items if item.modality == modality]:
                given[values] = torch.cat([self.pixels[item.identity] for item in shown])
                given[grid] = torch.tensor([item.grid_thw for item in shown])
        return given

    def run(self, inputs: Any, **more: Any) -> list[torch.Tensor]:
        """The logits of each request of a batch."""
        items = [item for row in inputs.rows for item in row.items]
        with torch.inference_mode():
            logits = self.model(**inputs, **self.pixel_inputs(items), **more).logits
        return [logits[row.row, row.start : row.stop] for row in inputs.rows]

    def whole(self, holder: Node | Draft) -> torch.Tensor:
        """One forward of transformers over a whole path, at the positions that it computes itself."""
        ids = torch.tensor([holder.input_ids().tolist()])
        items = list({start: item for item, start, _ in holder.media_spans()}.values())
        kept = [item for at, item in enumerate(items) if not at or item is not items[at - 1]]  # frames of a video are one item
        self.model.model.rope_deltas = None
        with torch.inference_mode():
            logits: torch.Tensor = self.model(
                input_ids=ids,
                mm_token_type_ids=(ids == IMAGE).long() + 2 * (ids == VIDEO).long(),
                attention_mask=torch.ones_like(ids),
                use_cache=False,
                **self.pixel_inputs(kept),
            ).logits[0]
        return logits

    def cache(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)


def apart(one: Any, other: Any) -> float:
    assert one.shape == other.shape
    return float((one - other).abs().max()) if one.numel() else 0.0


def forest(lab: Lab) -> dict[str, Node]:
    """Two roots' children, one of which goes on twice, with pictures, a video and text alone."""
    first = lab.shown(lab.session.root, [10, 11], (84, 56), "crimson", [12, 13])
    with lab.session.draft(first) as draft:
        draft.extend([14, 15, 16])
        reply = draft.commit()
    second = lab.shown(reply, [17], (56, 84), "royalblue", [18])
    branch = lab.shown(lab.session.append(reply, [19, 20]), [], (112, 56), "olive", [21, 22, 23])
    text = lab.session.append(lab.session.root, [24, 25, 26, 27, 28])
    mixed = lab.shown(lab.clip(lab.session.root, [29], "waves", [30, 31]), [32], (56, 56), "teal", [33])
    return {"first": first, "reply": reply, "second": second, "branch": branch, "text": text, "mixed": mixed}


@pytest.fixture(scope="module", params=QWEN)
def lab(request: pytest.FixtureRequest) -> Lab:
    return Lab(request.param)


@pytest.fixture(scope="module")
def nodes(lab: Lab) -> dict[str, Node]:
    return forest(lab)


@pytest.fixture(scope="module")
def wholes(lab: Lab, nodes: dict[str, Node]) -> dict[str, torch.Tensor]:
    return {name: lab.whole(node) for name, node in nodes.items()}


def test_one_request_is_one_full_forward(lab: Lab, nodes: dict[str, Node], wholes: dict[str, torch.Tensor]) -> None:
    for name, node in nodes.items():
        (logits,) = lab.run(to_transformers(node))
        assert apart(logits, wholes[name]) < BAR, name


@pytest.mark.parametrize(
    "cuts", [(0, 2, 11, 14, 16), (0, 12, 13), (0, 14), (0, 1, 2, 3, 9, 10, 11, 12, 13, 14, 15, 16, 17, 23, 24)]
)
def test_a_path_prefilled_in_chunks(lab: Lab, nodes: dict[str, Node], wholes: dict[str, torch.Tensor], cuts: Sequence[int]) -> None:
    node = nodes["second"]
    cache, found = lab.cache(), []
    for start, stop in zip(cuts, (*cuts[1:], None), strict=True):
        assert cache.get_seq_length() == start
        found += lab.run(to_transformers(node, start, stop=stop), cache=cache, use_cache=True)
    assert apart(torch.cat(found), wholes["second"]) < BAR


def test_a_branch_on_a_copied_cache(lab: Lab, nodes: dict[str, Node], wholes: dict[str, torch.Tensor]) -> None:
    cache = lab.cache()
    lab.run(to_transformers(nodes["reply"]), cache=cache, use_cache=True)
    kept = copy.deepcopy(cache)
    for name in ("second", "branch"):
        cache = copy.deepcopy(kept)
        start = nodes["reply"].stop
        (logits,) = lab.run(to_transformers(nodes[name], start), cache=cache, use_cache=True)
        assert apart(logits, wholes[name][start:]) < BAR, name
    # A fork from inside a turn: the cache is cropped to what both share.
    other = lab.session.append(lab.session.truncate(nodes["first"], nodes["first"].stop - 1), [34, 35])
    shared = other.shared_prefix_len(nodes["reply"])
    kept.crop(shared - kept.get_seq_length())
    (logits,) = lab.run(to_transformers(other, shared), cache=kept, use_cache=True)
    assert apart(logits, lab.whole(other)[shared:]) < BAR


@pytest.mark.parametrize("padding", ["left", "right", "packed"])
def test_a_batch_of_whole_paths(lab: Lab, nodes: dict[str, Node], wholes: dict[str, torch.Tensor], padding: Any) -> None:
    order = ("second", "text", "branch", "mixed", "first")
    inputs = to_transformers([nodes[name] for name in order], padding=padding)
    for name, logits in zip(order, lab.run(inputs), strict=True):
        assert apart(logits, wholes[name]) < BAR, name


@pytest.mark.parametrize("padding", ["left", "right"])
def test_a_padded_batch_goes_on(lab: Lab, nodes: dict[str, Node], wholes: dict[str, torch.Tensor], padding: Any) -> None:
    """Unequal windows behind unequal cached prefixes, three times, with what is cached told by the mask of the call before."""
    order = ("second", "text", "branch", "mixed")
    held = [nodes[name] for name in order]
    inputs, cache = None, lab.cache()
    behind_clip = 9 if lab.family == "qwen3_vl" else 7
    bounds: list[Any] = [[0] * 4, [2, 1, 11, behind_clip], [11, 4, 14, behind_clip], [None] * 4]
    found: list[list[torch.Tensor]] = [[] for _ in order]
    for starts, stops in pairwise(bounds):
        mask = None if inputs is None else inputs["attention_mask"]
        inputs = to_transformers(held, starts, stop=stops, padding=padding, cache_mask=mask)
        assert inputs["attention_mask"].shape[1] == cache.get_seq_length() + inputs["input_ids"].shape[1]
        for pieces, logits in zip(found, lab.run(inputs, cache=cache, use_cache=True), strict=True):
            pieces.append(logits)
    for name, pieces in zip(order, found, strict=True):
        assert apart(torch.cat(pieces), wholes[name]) < BAR, name


def test_c21_a_padded_batch_decodes_at_index_and_delta(lab: Lab, nodes: dict[str, Node]) -> None:
    """One token for each request and step, each at its own index + delta; a draft is read as it grows."""
    drafts = [lab.session.draft(nodes[name]) for name in ("second", "text", "first")]
    inputs, cache, starts = to_transformers(drafts, padding="left"), lab.cache(), [0, 0, 0]
    found = lab.run(inputs, cache=cache, use_cache=True)
    for step in range(3):
        starts = [draft.stop for draft in drafts]
        for draft in drafts:
            draft.append(35 + step)
        inputs = to_transformers(drafts, starts, cache_mask=inputs["attention_mask"])
        for draft, position in zip(drafts, inputs["position_ids"][:, :, 0].T.tolist(), strict=True):
            assert position == [draft.stop - 1 + draft.parent.mrope_position_delta] * 3
        found = [torch.cat(pair) for pair in zip(found, lab.run(inputs, cache=cache, use_cache=True), strict=True)]
    for draft, logits in zip(drafts, found, strict=True):
        assert apart(logits, lab.whole(draft)) < BAR


def test_c18_a_batch_after_another_leaves_nothing_behind(lab: Lab, nodes: dict[str, Node], wholes: dict[str, torch.Tensor]) -> None:
    """The model keeps rope_deltas of whatever ran last; explicit positions do not read them."""
    lab.whole(nodes["mixed"])
    assert lab.model.model.rope_deltas is not None
    cache = lab.cache()
    lab.run(to_transformers(nodes["reply"]), cache=cache, use_cache=True)
    lab.whole(nodes["branch"])
    (logits,) = lab.run(to_transformers(nodes["second"], nodes["reply"].stop), cache=cache, use_cache=True)
    assert apart(logits, wholes["second"][nodes["reply"].stop :]) < BAR


def packed_forms(inputs: Any) -> dict[str, dict[str, Any]]:
    """Packed inputs as they are, and each without one of the things that keep its sequences apart."""
    given = dict(inputs)
    return {
        "as given": given,
        "three rows": {**given, "position_ids": given["position_ids"][1:]},
        "a text row that goes on": {
            **given,
            "position_ids": torch.cat([torch.arange(given["input_ids"].shape[1])[None, None], given["position_ids"][1:]]),
        },
        "a mask": {**given, "attention_mask": torch.ones_like(given["input_ids"])},
        "a cache": {**given, "use_cache": True},
    }


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_packed_sequences_do_not_see_each_other(
    lab: Lab, nodes: dict[str, Node], wholes: dict[str, torch.Tensor], implementation: str
) -> None:
    """What comes first changes nothing behind it; with anything less than the packed form it does."""
    inputs = to_transformers([nodes["branch"], nodes["second"]], padding="packed")
    other = to_transformers([nodes["mixed"], nodes["second"]], padding="packed")
    lab.model.set_attn_implementation(implementation)
    try:
        for name, given in packed_forms(inputs).items():
            rows = adapter.TransformersInputs(given, inputs.rows)
            first, second = lab.run(rows)
            assert apart(first, wholes["branch"]) < BAR, name
            assert (apart(second, wholes["second"]) < BAR) == (name == "as given"), name
            if name != "as given":
                assert apart(second, wholes["second"]) > FAR, name
        _, second = lab.run(other)
        assert apart(second, wholes["second"]) < BAR
    finally:
        lab.model.set_attn_implementation("sdpa")


def by_lengths(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **more: Any
) -> tuple[torch.Tensor, None]:
    """Attention that knows no mask and no position, only ``cu_seq_lens``, as a kernel of variable length does."""
    assert attention_mask is None
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    if "cu_seq_lens_q" not in more:  # a vision tower, which cuts its sequences itself
        return attention(query, key, value).transpose(1, 2), None
    bounds = more["cu_seq_lens_q"].tolist()
    assert more["cu_seq_lens_k"].tolist() == bounds
    assert more["max_length_q"] == more["max_length_k"] == max(stop - start for start, stop in pairwise(bounds))
    pieces = [
        attention(query[:, :, start:stop], key[:, :, start:stop], value[:, :, start:stop], is_causal=True)
        for start, stop in pairwise(bounds)
    ]
    return torch.cat(pieces, dim=2).transpose(1, 2), None


def test_packed_lengths_alone_keep_sequences_apart(lab: Lab, nodes: dict[str, Node], wholes: dict[str, torch.Tensor]) -> None:
    AttentionInterface.register("by_lengths", by_lengths)
    lab.model.set_attn_implementation("by_lengths")
    try:
        order = ("mixed", "text", "second", "branch")
        inputs = to_transformers([nodes[name] for name in order], padding="packed")
        for name, logits in zip(order, lab.run(inputs), strict=True):
            assert apart(logits, wholes[name]) < BAR, name
    finally:
        lab.model.set_attn_implementation("sdpa")


def test_the_model_tells_inputs_apart(lab: Lab, nodes: dict[str, Node], wholes: dict[str, torch.Tensor]) -> None:
    """What makes the tests above able to fail: a position, a mask or a picture changed changes logits."""
    inputs = to_transformers([nodes["second"], nodes["text"]])
    pads = inputs.rows[1].start
    late = inputs["position_ids"].clone()
    late[:, 0, -2:] += 1
    seen = inputs["attention_mask"].clone()
    seen[1, pads - 1] = 1
    for name, change in {"position_ids": late, "attention_mask": seen}.items():
        found = lab.run(adapter.TransformersInputs({**inputs, name: change}, inputs.rows))
        assert apart(found[name == "attention_mask"], wholes["text" if name == "attention_mask" else "second"]) > FAR, name
    padded = inputs["position_ids"].clone()
    padded[:, 1, :pads] = 99
    found = lab.run(adapter.TransformersInputs({**inputs, "position_ids": padded}, inputs.rows))
    assert apart(found[1], wholes["text"]) < BAR, "where padding stands reaches no logit"
    swapped = [inputs.rows[0]._replace(items=inputs.rows[0].items[::-1]), inputs.rows[1]]
    assert lab.model.config.image_token_id == IMAGE
    with torch.inference_mode():
        items = swapped[0].items
        logits = lab.model(**inputs, **lab.pixel_inputs(items)).logits
    assert apart(logits[0], wholes["second"]) > FAR


# --- every schedule -------------------------------------------------------------------------------------------------------


def cuttable(node: Node) -> list[int]:
    """Where a window may begin or end: outside items."""
    inside: set[int] = set()
    spans = node.media_spans()
    for item, _, _ in spans:
        stands = [(start, stop) for other, start, stop in spans if other is item]
        inside |= set(range(stands[0][0] + 1, stands[-1][1]))
    return [at for at in range(node.stop + 1) if at not in inside]


@SCHEDULES
@given(rng=st.integers(0, 2**32).map(random.Random))
def test_any_schedule_of_any_forest(lab: Lab, rng: random.Random) -> None:
    """Random trees; their requests in one cache, window by window, padded on either side; and packed."""
    colours, sizes = ("crimson", "olive", "teal", "gold"), ((84, 56), (56, 84), (112, 56), (56, 56))
    grown = Lab(lab.family)
    held = [grown.session.root]
    for number in range(rng.randint(2, 6)):
        parent, before = rng.choice(held), [rng.randint(1, 40) for _ in range(rng.randint(1, 4))]
        kind = rng.choice(("picture", "picture", "text", "reply", "clip"))
        if kind == "clip":
            held.append(grown.clip(parent, before, f"clip {number}", [41]))
        elif kind == "reply":
            with grown.session.draft(parent) as draft:
                draft.extend(before)
                held.append(draft.commit())
        elif kind == "text":
            held.append(grown.session.append(parent, before))
        else:
            held.append(grown.shown(parent, before, rng.choice(sizes), rng.choice(colours), before[1:]))
    requests = [rng.choice(held[1:]) for _ in range(rng.randint(1, 4))]
    wholes = [grown.whole(node) for node in requests]
    packed = to_transformers(requests, padding="packed", mode="as_replayed")
    for logits, whole in zip(grown.run(packed), wholes, strict=True):
        assert apart(logits, whole) < BAR
    found: list[list[torch.Tensor]] = [[] for _ in requests]
    starts, cache, mask = [0] * len(requests), grown.cache(), None
    while any(start < node.stop for start, node in zip(starts, requests, strict=True)):
        stops = [
            node.stop if len(found[0]) > 5 else rng.choice([at for at in cuttable(node) if at >= start])
            for start, node in zip(starts, requests, strict=True)
        ]
        if starts == stops:
            continue
        padding: Any = rng.choice(("left", "right"))
        inputs = to_transformers(requests, starts, stop=stops, padding=padding, mode="as_replayed", cache_mask=mask)
        for pieces, logits in zip(found, grown.run(inputs, cache=cache, use_cache=True), strict=True):
            pieces.append(logits)
        starts, mask = stops, inputs["attention_mask"]
    for pieces, whole in zip(found, wholes, strict=True):
        assert apart(torch.cat(pieces), whole) < BAR


# --- every family ---------------------------------------------------------------------------------------------------------


class Bench:
    """A session of one family with pictures whose features are given, not encoded."""

    def __init__(self, family: str) -> None:
        self.model = tiny_model(family)
        session = SessionStore.in_memory().create("s", scheme=tiny_scheme(family))
        self.first = self.turn(session, session.root, [1, 2], "a", (2, 3), [8, 9, 10])
        self.second = self.turn(session, self.first, [11], "b", (3, 2), [12, 13])
        self.other = self.turn(session, session.root, [3], "c", (1, 4), [14])
        self.text = session.append(session.root, [1, 2, 3, 4, 5, 6])

    def turn(self, session: Session, parent: Node, before: list[int], name: str, size: tuple[int, int], after: list[int]) -> Node:
        item = picture(session.scheme, name, len(before) + 1, *size)
        return session.append(parent, [*before, START, *[7] * item.num_placeholders, END, *after], media=[item])

    def run(self, inputs: Any, **more: Any) -> list[torch.Tensor]:
        items = [item for row in inputs.rows for item in row.items]
        with torch.inference_mode():
            logits = self.model(**inputs, **encoded(self.model, items), **more).logits
        return [logits[row.row, row.start : row.stop] for row in inputs.rows]

    def whole(self, node: Node, **more: Any) -> torch.Tensor:
        """One forward at the positions the model computes itself."""
        given = to_transformers(node)
        items = given.rows[0].items
        del given["position_ids"]
        self.model.model.rope_deltas = None
        with torch.inference_mode():
            logits: torch.Tensor = self.model(**given, **encoded(self.model, items), **grids(items), **more).logits[0]
        return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs_as_its_own_model_does(family: str) -> None:
    bench = Bench(family)
    requests = [bench.second, bench.text, bench.other]
    wholes = [bench.whole(node) for node in requests]
    for node, whole in zip(requests, wholes, strict=True):
        (logits,) = bench.run(to_transformers(node))
        assert apart(logits, whole) < BAR
    given = to_transformers(bench.other)
    given["position_ids"] = given["position_ids"] * 2
    (wrong,) = bench.run(given)
    assert apart(wrong, wholes[2]) > FAR

    cache, found = DynamicCache(config=bench.model.config), []
    cuts: tuple[Any, ...] = (0, 2, bench.first.stop - 1, bench.first.stop + 1, None)
    for start, stop in pairwise(cuts):
        found += bench.run(to_transformers(bench.second, start, stop=stop), cache=cache, use_cache=True)
    assert apart(torch.cat(found), wholes[0]) < BAR

    paddings: tuple[Any, ...] = ("left", "right", "packed")
    for padding in paddings:
        reason = getattr(adapter._FAMILIES[family], "packed" if padding == "packed" else "padded")
        if reason:
            with pytest.raises(Unsupported, match=reason):
                to_transformers(requests, padding=padding)
            continue
        for logits, whole in zip(bench.run(to_transformers(requests, padding=padding)), wholes, strict=True):
            assert apart(logits, whole) < BAR, padding


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"hunyuan_vl", "minicpmv4_7", "paddleocr_vl"}))
def test_videos_of_every_family_that_has_them(family: str) -> None:
    """Behind a video the position rules differ most; a full forward is what a replay computes."""
    bench = Bench(family)
    session = SessionStore.in_memory().create("s", scheme=tiny_scheme(family))
    item = clip(session.scheme, "waves", 2, 2)
    stop = sum(item.spans[-1])
    ids = [1, START, *[7] * (stop - 2), END, 4]
    node = bench.turn(session, session.append(session.root, ids, media=[item]), [5, 6], "a", (2, 1), [8, 9])
    text = session.append(session.root, [1, 2, 3])
    seconds = {"video_second_per_grid": torch.ones(1)} if "omni" in family else {}
    whole = bench.whole(node, **seconds)
    paddings: tuple[Any, ...] = ("left", "right", "packed")
    for padding in paddings:
        _, found = bench.run(to_transformers([text, node], mode="as_replayed", padding=padding))
        assert apart(found, whole) < BAR, padding


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni"])
def test_audio(family: str) -> None:
    bench = Bench(family)
    session = SessionStore.in_memory().create("s", scheme=tiny_scheme(family))
    heard = MediaItem("audio", identity("speech"), [(2, 1)], audio_feature_length=30)
    count = session.scheme.num_placeholders(heard)
    ids = [1, VIDEO_START, *[7] * count, VIDEO_END, 4, 5]
    speech = session.append(session.root, ids, media=[heard.with_spans([(2, count)])])
    node, text = bench.turn(session, speech, [6], "a", (2, 2), [8]), session.append(session.root, [1, 2, 3])
    sound = {
        "input_features": torch.randn((1, 8, 30), generator=torch.Generator().manual_seed(1), dtype=torch.float64),
        "feature_attention_mask": torch.ones((1, 30), dtype=torch.int64),
    }
    whole = bench.whole(node, **sound)
    paddings: tuple[Any, ...] = ("left", "packed")
    for padding in paddings:
        inputs = to_transformers([text, node], mode="as_replayed", padding=padding)
        _, found = bench.run(inputs, **sound)
        assert apart(found, whole) < BAR, padding
    assert [item.modality for item in inputs.rows[1].items] == ["audio", "image"]


def test_what_is_refused_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this fails, transformers can do it now, and the refusal can go."""
    minicpm = Bench("minicpmv4_7")
    gap = torch.tensor([[0, 1, 1], [1, 0, 1]])
    with pytest.raises(Unsupported, match="padded"):  # no padding in the windows, but in the cache
        to_transformers([minicpm.text, minicpm.text], 2, stop=4, cache_mask=gap)
    monkeypatch.setattr(adapter, "_FAMILIES", {name: adapter._Family() for name in adapter._FAMILIES})
    for bench in (Bench("hunyuan_vl"), minicpm):
        with pytest.raises(ValueError, match=r"channels|flash-linear-attention"):
            bench.run(to_transformers([bench.second, bench.text], padding="packed"))
    requests, cache = [minicpm.text, minicpm.other], DynamicCache(config=minicpm.model.config)
    wholes = [minicpm.whole(node) for node in requests]
    inputs = to_transformers(requests, stop=[3, 1])
    minicpm.run(inputs, cache=cache, use_cache=True)
    inputs = to_transformers(requests, [3, 1], cache_mask=inputs["attention_mask"])
    found = minicpm.run(inputs, cache=cache, use_cache=True)
    assert max(apart(logits, whole[-len(logits) :]) for logits, whole in zip(found, wholes, strict=True)) > FAR


GIVEN = {"input_ids", "position_ids", "attention_mask", "mm_token_type_ids", "moe_mm_token_type_ids", "use_cache"}
PIXELS = {"pixel_values", "image_grid_thw", "target_sizes", "pixel_values_videos", "video_grid_thw", "target_sizes_videos"}
SOUND = {"input_features", "feature_attention_mask", "audio_feature_lengths"}
CALLERS = {"cache", "labels", "logits_to_keep", "output_router_logits", "downsample_mode", "mm_encoder_outputs", "inputs_embeds"}
# Read only where a model computes positions, which are given.
UNREAD = {"second_per_grid_ts", "video_second_per_grid", "use_audio_in_video"}


@pytest.mark.parametrize("family", FAMILIES)
def test_c56_a_model_takes_nothing_that_is_not_known_here(family: str) -> None:
    """A field that transformers adds to a forward has to be given, left to the caller, or known to be unread."""
    taken = set(inspect.signature(inspect.unwrap(type(tiny_model(family)).forward)).parameters) - {"self", "kwargs"}
    assert taken <= GIVEN | PIXELS | SOUND | CALLERS | UNREAD
    bench = Bench(family)
    given = to_transformers(bench.second).keys()
    assert given <= taken
    assert GIVEN & taken - given <= {"use_cache"}
    if adapter._FAMILIES[family].packed is None:
        packed = to_transformers([bench.second], padding="packed").keys()
        assert packed - taken - {"use_cache"} == FlashAttentionKwargs.__annotations__.keys()


def test_ernie_routes_tokens_as_its_processor_says() -> None:
    """And would run the tokens of a picture through the experts of text if it were not told."""
    bench = Bench("ernie4_5_vl")
    given = to_transformers([bench.second, bench.other])
    names = ("image_start_token", "image_end_token", "video_start_token", "video_end_token")
    ids = {f"{name}_id": DELIMITERS[f"{name}_id"] for name in names}
    processor: Any = SimpleNamespace(image_token_id=IMAGE, video_token_id=VIDEO, **ids)
    theirs = Ernie4_5_VLMoeProcessor.create_moe_mm_token_type_ids(processor, given["input_ids"].numpy())
    assert given["moe_mm_token_type_ids"].tolist() == theirs.tolist()
    right = bench.run(given)
    del given["moe_mm_token_type_ids"]
    assert apart(bench.run(given)[0], right[0]) > FAR


@pytest.mark.parametrize("padding", ["left", "right", "packed"])
def test_a_text_model(padding: Any) -> None:
    session = SessionStore.in_memory().create("s", scheme="text@hf5")
    first = session.append(session.root, [1, 2, 3, 4, 5])
    requests = [session.append(first, [6, 7]), session.append(session.root, [8]), first]
    inputs = to_transformers(requests, padding=padding)
    with torch.inference_mode():
        logits = tiny_text_model()(**inputs).logits
        for node, row in zip(requests, inputs.rows, strict=True):
            alone = tiny_text_model()(input_ids=torch.tensor([node.input_ids().tolist()])).logits[0]
            assert apart(logits[row.row, row.start : row.stop], alone) < BAR
