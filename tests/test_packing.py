"""Packed trees are their paths: every edge with the weight that the rows give it, every mask each path's own causal one."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from engine_bridge import PackedSpan, TreePack, TreePacks, pack_rows, pack_tree, to_transformers, tree_mask
from sessiontree import (
    LimitExceeded,
    MediaItem,
    MediaSpanError,
    Node,
    OutOfRange,
    PositionError,
    Session,
    SessionStore,
    UnknownNode,
    Unsupported,
)
from sessiontree.annotations import ADVANTAGE, LOGPROBS, LOSS_MASK, LOSS_WEIGHT, TRAIN, Ragged, Spans, TokenValues
from sessiontree.node import clipped_spans
from sessiontree.positions import MODES, scheme
from sessiontree.rollouts import groups, rollouts
from tests.toy import IMG, VE, VS, image, media, new_session, toy_scheme, turn, video
from tests.trained_trees import FAMILIES, SEEDED, WEIGHTINGS, TokenKey, Walk, decode, random_tree

SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # making a tree smaller takes minutes and says little
TREES = settings(max_examples=400 if SOAK else 18, deadline=None, suppress_health_check=list(HealthCheck), phases=PHASES)
FACTORS = (LOSS_WEIGHT, ADVANTAGE)


def chosen_leaves(rng: random.Random, session: Session) -> list[Node]:
    """Some of a tree's nodes that no item is open behind, leaves and others, in any order."""
    whole = [node for node in session.tree if node.position_state().open_block is None]
    leaves = [node for node in session.leaves() if node in whole]
    return rng.sample(leaves, len(leaves)) + rng.sample(whole, min(len(whole), rng.randint(0, 2)))


def keyed(walk: Walk, pack: TreePack, mode: Any) -> dict[int, TokenKey]:
    """Which token each of a pack's is, by the paths of the nodes that it says its tokens are of; checks these on the way."""
    parents, ids, positions = pack.parent.tolist(), pack.input_ids.tolist(), pack.position_ids.numpy()
    tables = {node.id: (walk.keys(node), node.input_ids().tolist(), node.positions(mode=mode)) for node in pack.nodes}
    found: dict[int, TokenKey] = {}
    indices = {-1: -1}  # of each token on its path
    for at, (before, number) in enumerate(zip(parents, pack.node_id.tolist(), strict=True)):
        keys, tokens, table = tables[pack.nodes[number].id]
        index = indices[at] = indices[before] + 1
        assert ids[at] == tokens[index]
        assert np.array_equal(positions[:, at], table[:, index])
        found[at] = keys[index]
        assert before < 0 or found[before] == keys[index - 1]
    assert len(set(found.values())) == len(pack)  # each token once
    return found


def check_pack(walk: Walk, pack: TreePack, mode: Any) -> dict[int, TokenKey]:
    """A pack's tokens, masks, media and rows; its tokens by their index."""
    keys = keyed(walk, pack, mode)
    paths = torch.eye(len(pack), dtype=torch.bool)
    for at, before in enumerate(pack.parent.tolist()):
        if before >= 0:
            paths[at] |= paths[before]
    dense = pack.dense_mask()
    assert torch.equal(dense, paths)
    covered = torch.zeros_like(dense, dtype=torch.int64)
    for first, last, begin, end, causal in pack.rectangles().tolist():
        assert first < last and begin < end and (not causal or (first, last) == (begin, end))
        block = torch.ones((last - first, end - begin), dtype=torch.int64)
        covered[first:last, begin:end] += block.tril() if causal else block
    assert torch.equal(covered, dense.long())
    shown = {at: content for span in pack.media_spans for content, at in placeholders(span)}
    for row in range(len(pack.rows)):
        indices = pack.row_indices(row)
        assert [keys[at] for at in indices.tolist()] == walk.keys(pack.rows[row])
        placed = {at: content for span in spans_of(pack.rows[row]) for content, at in placeholders(PackedSpan(*span))}
        assert {index: shown[at] for index, at in enumerate(indices.tolist()) if at in shown} == placed
    assert {content for content, _ in shown.values()} == {item.content() for item in pack.needed_items}
    assert len(pack.needed_items) == len({item.content() for item in pack.needed_items})
    return keys


def spans_of(node: Node) -> list[tuple[MediaItem, int, int, int]]:
    return clipped_spans(node, 0, node.stop)


def placeholders(span: PackedSpan) -> list[tuple[Any, int]]:
    return [((span.item.content(), span.first_row + at), span.start + at) for at in range(span.stop - span.start)]


def edge_weights(walk: Walk, packs: TreePacks, mode: Any) -> dict[TokenKey, float]:
    """The weight of each token that an edge leads to, each of which must be led to once, from the token before it."""
    found: dict[TokenKey, float] = {}
    for pack in packs:
        keys = check_pack(walk, pack, mode)
        source, target, weight = (each.tolist() for each in pack.edges)
        assert target == sorted(target)
        assert all(at >= pack.num_context for at in target)
        for before, at, value in zip(source, target, weight, strict=True):
            assert before == pack.parent[at] >= 0
            assert keys[at] not in found
            found[keys[at]] = value
    return found


@pytest.mark.parametrize("family", FAMILIES)
@TREES
@given(rng=SEEDED)
def test_edges_are_the_rows_labels_and_masks_their_own(family: str, rng: random.Random) -> None:
    session = random_tree(rng, family)
    leaves = chosen_leaves(rng, session)
    factors = rng.choice((FACTORS, (LOSS_WEIGHT,), ()))
    mode: Any = rng.choice(("as_decoded", "as_replayed"))
    weighting: Any = rng.choice(WEIGHTINGS)
    walk = Walk(session, leaves, factors)
    given: Any = {"annotations": session, "weighting": weighting, "factors": factors, "mode": mode, "dtype": torch.float64}
    expected = walk.weights(weighting)
    packs = pack_tree(leaves, **given)
    assert packs.rows == tuple(walk.rows)
    assert edge_weights(walk, packs, mode) == pytest.approx(expected, rel=1e-12, abs=0)
    assert packs.row_tokens == sum(row.stop for row in walk.rows)
    tokens = len({key for row in walk.rows for key in walk.keys(row)})
    assert packs.packed_tokens == tokens
    assert packs.dedupe_ratio == (packs.row_tokens / tokens if tokens else 1.0)
    assert [row for pack in packs for row in pack.rows] == sorted((row for row in packs.rows if row.stop), key=packs.rows.index)
    if packs:
        check_split(rng, walk, leaves, given, expected)


def check_split(rng: random.Random, walk: Walk, leaves: list[Node], given: dict[str, Any], expected: dict[TokenKey, float]) -> None:
    longest, tokens = max(row.stop for row in walk.rows), sum(row.stop for row in walk.rows)
    budget = rng.randint(longest, tokens)
    packs = pack_tree(leaves, token_budget=budget, **given)
    assert all(len(pack) <= budget for pack in packs)
    assert edge_weights(walk, packs, given["mode"]) == pytest.approx(expected, rel=1e-12, abs=0)
    assert packs.packed_tokens == sum(map(len, packs))
    assert sorted(row.id for pack in packs for row in pack.rows) == sorted(row.id for row in walk.rows if row.stop)
    if longest > 1:
        with pytest.raises(LimitExceeded, match=f"takes {longest - 1}") as caught:
            pack_tree(leaves, token_budget=longest - 1, **given)
        assert caught.value.value > caught.value.limit == longest - 1


@pytest.mark.parametrize("family", FAMILIES)
@TREES
@given(rng=SEEDED)
def test_rows_have_the_same_weights(family: str, rng: random.Random) -> None:
    session = random_tree(rng, family)
    leaves = chosen_leaves(rng, session)
    weighting: Any = rng.choice(WEIGHTINGS)
    walk = Walk(session, leaves, FACTORS)
    padding: Any = rng.choice(("left", "right", "packed"))
    given: Any = {"annotations": session, "weighting": weighting, "factors": FACTORS, "dtype": torch.float64}
    rows = pack_rows(leaves, padding=padding, pad_token_id=45, **given)
    assert rows.rows == tuple(walk.rows)
    lengths = [row.stop for row in rows.rows]
    bounds = np.cumsum([0, *lengths]).tolist()
    assert rows.cu_seq_lens.tolist() == bounds
    assert rows.max_length == max(lengths, default=0)
    unseen = torch.ones_like(rows.input_ids, dtype=torch.bool)
    for number, (row, weights) in enumerate(zip(rows.rows, walk.row_weights(weighting), strict=True)):
        start = bounds[number] if padding == "packed" else rows.max_length - row.stop if padding == "left" else 0
        line, columns = 0 if padding == "packed" else number, slice(start, start + row.stop)
        unseen[line, columns] = False
        ids = row.input_ids().tolist()
        assert rows.input_ids[line, columns].tolist() == ids
        axes = row.scheme.num_axes
        positions = rows.position_ids if axes > 1 else rows.position_ids[None]
        assert np.array_equal(positions[-axes:, line, columns].numpy(), row.positions())
        if padding == "packed":
            assert positions[0, 0, columns].tolist() == list(range(row.stop))
        trained = [walk.trained[key] for key in walk.keys(row)]
        labels = [token if each else -100 for token, each in zip(ids[1:], trained[1:], strict=True)] + [-100] * bool(ids)
        assert rows.shift_labels[line, columns].tolist() == labels
        assert rows.weights[line, columns].tolist() == pytest.approx([*weights[1:], *[0.0] * bool(ids)], rel=1e-12, abs=0)
        own = [span for span in rows.media_spans if span.request == number]
        assert [(span.item, span.start - start, span.stop - start, span.first_row) for span in own] == spans_of(row)
    assert (rows.shift_labels[unseen] == -100).all() and (rows.weights[unseen] == 0).all()
    assert (rows.input_ids[unseen] == 45).all()
    if padding == "packed":
        assert rows.attention_mask is None
    else:
        assert rows.attention_mask is not None
        assert torch.equal(rows.attention_mask, (~unseen).long())


@pytest.mark.parametrize("padding", ["left", "right", "packed"])
def test_rows_have_the_columns_of_to_transformers(padding: Any) -> None:
    _, leaves = branched()
    rows = pack_rows(leaves, padding=padding)
    inputs = to_transformers(list(rows.rows), padding=padding)
    assert torch.equal(rows.input_ids, inputs["input_ids"])
    assert torch.equal(rows.position_ids, inputs["position_ids"])
    if padding == "packed":
        assert torch.equal(rows.cu_seq_lens, inputs["cu_seq_lens_q"]) and rows.max_length == inputs["max_length_q"]
    else:
        assert rows.attention_mask is not None and torch.equal(rows.attention_mask, inputs["attention_mask"])


@pytest.mark.parametrize("padding", ["left", "right", "packed"])
def test_rows_say_of_their_tokens_what_the_pack_says(padding: Any) -> None:
    session, leaves = branched()
    for number, node in enumerate(session.descendants(session.root)):
        if node.origin == "generated":
            session.annotate(node, {LOGPROBS: -np.arange(len(node), dtype=np.float32) - number, ADVANTAGE: number})
    (pack,) = pack_tree(leaves, annotations=session)
    rows = pack_rows(leaves, annotations=session, padding=padding)
    columns = [
        (0 if padding == "packed" else at, range(int(start), int(start) + row.stop))
        for at, row in enumerate(rows.rows)
        for start in [rows.cu_seq_lens[at] if padding == "packed" else rows.max_length - row.stop if padding == "left" else 0]
    ]
    for name in (LOGPROBS, ADVANTAGE, "nothing"):
        (values, known), (here, known_here) = pack.token_values(name), rows.token_values(name)
        assert here.shape == known_here.shape == rows.input_ids.shape and here.dtype == values.dtype
        seen = torch.zeros_like(known_here)
        for at, (line, those) in enumerate(columns):
            assert torch.equal(here[line, those], values[pack.row_indices(at)])
            assert torch.equal(known_here[line, those], known[pack.row_indices(at)])
            seen[line, those] = True
        assert not known_here[~seen].any() and not here[~seen].any()
    _, known = rows.token_values(LOGPROBS)
    assert known[:, 1:][rows.shift_labels[:, :-1] >= 0].all()


# --- masks ------------------------------------------------------------------------------------------------------------


@st.composite
def tok_ends(draw: st.DrawFn) -> list[int]:
    """``tok_end`` of a random forest, parents drawn among those that a depth-first order allows."""
    count = draw(st.integers(1, 150))
    rng = draw(SEEDED)
    ends, open_tokens = [count] * count, list[int]()
    for at in range(count):
        if rng.random() < 0.15:
            keep = rng.randint(0, len(open_tokens))
            for closed in open_tokens[keep:]:
                ends[closed] = at
            del open_tokens[keep:]
        open_tokens.append(at)
    return ends


@settings(TREES, max_examples=200 if SOAK else 12)
@given(ends=tok_ends(), block_size=st.sampled_from([2, 3, 16, 32, 128]))
def test_a_block_mask_is_the_dense_one(ends: list[int], block_size: int) -> None:
    host = np.array(ends, np.int32)
    ours = tree_mask.block_mask(host, torch.tensor(ends), block_size)
    count = len(ends)
    theirs = create_block_mask(ours.mask_mod, None, None, count, count, device="cpu", BLOCK_SIZE=block_size)
    assert ours.seq_lengths == theirs.seq_lengths and ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    for prefix in ("", "full_"):
        for side in ("kv", "q"):
            counts, indices = (getattr(ours, f"{prefix}{side}_{name}") for name in ("num_blocks", "indices"))
            expected, their_indices = (getattr(theirs, f"{prefix}{side}_{name}") for name in ("num_blocks", "indices"))
            assert counts.dtype == indices.dtype == torch.int32
            assert torch.equal(counts, expected) and indices.shape == their_indices.shape
            for row, used in enumerate(counts[0, 0].tolist()):
                assert indices[0, 0, row, :used].tolist() == their_indices[0, 0, row, :used].tolist()
    dense = tree_mask.dense_mask(torch.tensor(ends))
    assert dense.tolist() == [[key <= query < ends[key] for key in range(count)] for query in range(count)]
    at, zero = torch.arange(count), torch.tensor(0)
    assert torch.equal(ours.mask_mod(zero, zero, at[:, None], at), dense)


def test_flex_attention_takes_it() -> None:
    """Forward on the CPU, where it has no backward: the same as dense attention."""
    _, leaves = branched()
    (pack,) = pack_tree(leaves)
    mask = pack.block_mask()
    assert mask is pack.block_mask()
    assert mask.BLOCK_SIZE == (128, 128)
    assert pack_tree(leaves, block_size=64)[0].block_mask().BLOCK_SIZE == (64, 64)
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, len(pack), 16)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=pack.dense_mask())
    assert torch.allclose(flex_attention(query, key, value, block_mask=mask), expected, atol=1e-5)


# --- by hand ----------------------------------------------------------------------------------------------------------


def branched() -> tuple[Session, list[Node]]:
    """A prompt of 9 tokens with an image, two replies of 3 and 2, a tool's answer of 2 behind the first, two more replies of 2."""
    session = new_session()
    shown = turn(1, 2, VS, image(), VE, 3)
    prompt = session.append(session.root, shown.tokens, media=media(shown))
    first, second = decode(session, prompt, [20, 21, 22]), decode(session, prompt, [30, 31])
    answer = session.append(first, [40, 41], role="tool")
    return session, [decode(session, answer, [50, 51]), decode(session, answer, [60, 61]), second]


def one_reply() -> tuple[Session, Node, Node]:
    """A prompt of two tokens, and a reply of three."""
    session = new_session()
    prompt = session.append(session.root, [1, 2])
    draft = session.draft(prompt)
    draft.extend([5, 6, 7])
    return session, prompt, draft.commit()


def test_a_small_tree() -> None:
    _, leaves = branched()
    packs = pack_tree(leaves, weighting="per_branch_mean", dtype=torch.float64)
    (pack,) = packs
    assert pack.input_ids.tolist() == [1, 2, VS, *[IMG] * 4, VE, 3, 20, 21, 22, 40, 41, 50, 51, 60, 61, 30, 31]
    assert pack.tok_end.tolist() == [20] * 9 + [18] * 5 + [16] * 2 + [18] * 2 + [20] * 2
    assert pack.parent.tolist() == [*range(-1, 15), 13, 16, 8, 18]
    assert pack.edges.source.tolist() == [8, 9, 10, 13, 14, 13, 16, 8, 18]
    assert pack.edges.target.tolist() == [9, 10, 11, 14, 15, 16, 17, 18, 19]
    shared, own, other = 2 / 5 / 3, 1 / 5 / 3, 1 / 2 / 3
    assert pack.edges.weight.tolist() == pytest.approx([shared] * 3 + [own] * 4 + [other] * 2)
    assert [(span.start, span.stop, span.first_row) for span in pack.media_spans] == [(3, 7, 0)]
    assert pack.rectangles().tolist() == [
        [0, 9, 0, 9, 1],
        [9, 20, 0, 9, 0],
        [9, 14, 9, 14, 1],
        [14, 18, 9, 14, 0],
        [14, 16, 14, 16, 1],
        [16, 18, 16, 18, 1],
        [18, 20, 18, 20, 1],
    ]
    assert pack.row_indices(1).tolist() == [*range(14), 16, 17]
    assert packs.dedupe_ratio == (16 + 16 + 11) / 20


def test_d36_each_sampled_token_once_rejected_attempts_zero_and_a_tools_change_drops_nothing() -> None:
    """D36: pack tree with 3 leaves: every sampled token has loss weight once (or the stated weighting), rejected attempts zero, a
    tools change in mid-path drops no sampled token."""
    session = new_session()
    prompt = session.append(session.root, [1, 2, 3])
    call = decode(session, prompt, [10, 11])
    tools = session.append(call, [4, 5], role="system")  # other tools from here on
    good, better = decode(session, tools, [20, 21]), decode(session, tools, [30])
    rejected = decode(session, prompt, [40, 41, 42])
    after = decode(session, session.append(rejected, [6]), [43])
    session.annotate(rejected, {TRAIN: False})
    leaves = [good, better, after]
    (pack,) = pack_tree(leaves, annotations=session)
    sampled = pack.input_ids[pack.edges.target].tolist()
    assert sampled == [10, 11, 20, 21, 30]
    assert pack.edges.weight.tolist() == [1.0] * 5
    assert not {40, 41, 42, 6, 43} & set(pack.input_ids.tolist())
    (mean,) = pack_tree(leaves, annotations=session, weighting="per_branch_mean", dtype=torch.float64)
    assert mean.edges.weight.tolist() == pytest.approx([1 / 4 / 2 + 1 / 3 / 2] * 2 + [1 / 4 / 2] * 2 + [1 / 3 / 2])
    assert mean.edges.weight.sum() == pytest.approx(1)  # no branch weighs more for its length or its failures
    rows = pack_rows(leaves, annotations=session)
    assert rows.shift_labels.tolist() == [
        [-100, -100, 10, 11, -100, -100, 20, 21, -100],
        [-100, -100, 10, 11, -100, -100, 30, -100, -100],
    ]
    assert rows.weights.tolist() == [[0, 0, 1, 1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0, 1, 0, 0]]


def test_a_mark_that_is_no_bool_is_refused_not_overlooked() -> None:
    session, (one, _, _) = branched()
    session.annotate(one, {TRAIN: 0})
    for pack in (pack_tree, pack_rows):
        with pytest.raises(Unsupported, match=r"'train' of node .* is 0; it is True or False"):
            pack(session)


def test_paths_may_come_one_by_one_and_what_is_none_is_told() -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme="text@hf5")
    reply = decode(session, session.append(session.root, [1, 2]), [10, 11])
    session.annotate(reply, {LOSS_MASK: np.array([True, False]), ADVANTAGE: 2.0})
    (pack,) = pack_tree(rollouts(store), factors=(ADVANTAGE,))
    assert pack.input_ids[pack.edges.target].tolist() == [10]
    assert pack.edges.weight.tolist() == [2.0]
    (group,) = groups(store)
    for other in (store, group):
        with pytest.raises(TypeError, match=rf"not of a {type(other).__name__}; rollouts\(store\) and group.rollouts are some"):
            pack_tree(other)  # type: ignore[arg-type]


def test_a_rejected_end_leaves_what_came_before_it() -> None:
    session, (one, two, _) = branched()
    session.annotate(one, {TRAIN: False})
    session.annotate(two, {TRAIN: False})
    (pack,) = pack_tree([one, two], annotations=session)
    assert pack.rows == (one.parent,)
    assert pack.input_ids[pack.edges.target].tolist() == [20, 21, 22]
    first = one.path()[2]
    session.annotate(first, {TRAIN: False})
    assert list(pack_tree([one, two], annotations=session)) == []
    assert pack_rows([one, two], annotations=session).rows == ()


def test_a_turn_cut_short_is_the_first_tokens_of_the_whole_one() -> None:
    session, (_, _, second) = branched()
    long = decode(session, second, [70, 71, 72, 73])
    cut = session.truncate(long, long.start + 2)
    again = session.truncate(cut, cut.stop - 1)
    ends = [decode(session, cut, [80]), long, session.append(again, [90])]
    (pack,) = pack_tree(ends)
    assert pack.input_ids.tolist()[9:] == [30, 31, 70, 71, 72, 73, 80, 90]
    assert pack.parent.tolist()[9:] == [8, 9, 10, 11, 12, 13, 12, 11]
    assert pack.input_ids[pack.edges.target].tolist() == [30, 31, 70, 71, 72, 73, 80]
    for tree, tokens in ((session, 4 + 1), (None, 4 + 1 + 1)):  # that ``again`` was cut of ``long`` only ``cut`` says
        assert len(pack_tree([ends[1], ends[2]], annotations=tree)[0]) == second.stop + tokens
    other = decode(session, second, [70, 71, 72, 73])  # sampled again: not the same tokens
    assert len(pack_tree([long, other])[0].edges.target) == 2 + 4 + 4


def test_leaves_of_several_sessions_are_a_forest() -> None:
    one, (leaf, *_) = branched()
    two = new_session(name="other")
    end = decode(two, two.append(two.root, [7, 8]), [9])
    two.annotate(end, {LOSS_WEIGHT: TokenValues([4.0])})
    (pack,) = pack_tree([leaf, end], annotations=lambda node: two if node in end.path() else one)
    assert pack.parent.tolist()[-3:] == [-1, 16, 17]
    assert pack.tok_end.tolist()[-3:] == [19] * 3
    assert pack.edges.weight.tolist() == [1.0] * 5 + [4.0]
    assert len(pack.rows) == 2
    found = [*rollouts(one), *rollouts(two)]
    (pack,) = pack_tree(found)
    assert pack.edges.weight.tolist() == [1.0] * 9 + [4.0]
    with pytest.raises(UnknownNode):
        pack_tree([leaf, end], annotations=one)


def test_what_stands_for_leaves() -> None:
    session, leaves = branched()
    everything = pack_tree(session)
    assert set(everything.rows) == set(leaves)
    assert set(pack_tree(session.tree).rows) == set(leaves)
    assert set(pack_tree(session.root, annotations=session).rows) == set(leaves)
    assert set(pack_tree(leaves[0].path()[2], annotations=session).rows) == set(leaves[:2])
    assert pack_tree([leaves[0], leaves[0]]).rows == (leaves[0],)


def test_loss_masks_and_named_weights() -> None:
    session, (leaf, other, _) = branched()
    prompt, first = leaf.path()[1:3]
    session.annotate(prompt, {LOSS_MASK: TokenValues([True], 8)})
    session.annotate(first, {LOSS_MASK: TokenValues([0, 1], 1), "loss_weight/kl": np.array([1, 2, 3], np.float32)})
    session.annotate(leaf, {LOSS_WEIGHT: TokenValues([0.25], 1), ADVANTAGE: -2.0, LOGPROBS: np.array([-1, -2], np.float32)})
    (pack,) = pack_tree([leaf], annotations=session)
    assert pack.input_ids[pack.edges.target].tolist() == [3, 20, 22, 50, 51]
    assert pack.edges.weight.tolist() == [1, 1, 1, 1, 0.25]
    (named,) = pack_tree([leaf], annotations=session, factors=("loss_weight/kl",))
    assert named.edges.weight.tolist() == [1, 1, 3, 1, 1]
    logprobs, known = pack.token_values(LOGPROBS)
    assert logprobs[pack.edges.target].tolist() == [0, 0, 0, -1, -2] and logprobs.dtype == torch.float32
    assert known[pack.edges.target].tolist() == [False, False, False, True, True]
    assert pack.token_values(ADVANTAGE)[0][pack.edges.target].tolist() == [0, 0, 0, -2, -2]
    with pytest.raises(Unsupported, match="no 'advantage'"):
        pack_tree([leaf], annotations=session, factors=(ADVANTAGE,))
    session.annotate(prompt, {ADVANTAGE: 1.0})
    session.annotate(first, {ADVANTAGE: 0.0})
    (pack,) = pack_tree([leaf], annotations=session, factors=(LOSS_WEIGHT, ADVANTAGE))
    assert pack.edges.weight.tolist() == [1, 0, 0, -2, -0.5]  # edges stay where an advantage is 0
    (pack,) = pack_tree([leaf], annotations=session, weighting={prompt: 3, first: [1, 2, 4], leaf: 5.0})
    assert pack.edges.weight.tolist() == [3, 1, 4, 5, 1.25]
    routed = np.arange(12).reshape(2, 3, 2)
    versions, kept = Spans([(0, 1, 7)]), Ragged.of([[1], [2]])
    session.annotate(leaf, {"routed_experts": TokenValues(routed), "weight_version": versions, "top_p_ids": kept})
    (pack,) = pack_tree([leaf], annotations=session)
    assert pack.token_values("routed_experts")[0][-2:].tolist() == routed.tolist()
    assert pack.token_values("weight_version")[0].tolist()[-2:] == [7, 0]
    assert pack.token_values("weight_version")[1].tolist()[-2:] == [True, False]
    with pytest.raises(Unsupported, match="Ragged"):
        pack.token_values("top_p_ids")
    session.annotate(other, {"routed_experts": TokenValues(routed[:, :2])})
    with pytest.raises(Unsupported, match=r"rows of \(2, 2\)"):
        pack_tree([leaf, other], annotations=session)[0].token_values("routed_experts")


def test_rollouts_and_factors_may_come_one_by_one() -> None:
    session, leaves = branched()
    session.annotate(leaves[0], {LOSS_WEIGHT: 3.0})
    for leaf in (*leaves, leaves[0].path()[2]):
        session.annotate(leaf, {ADVANTAGE: 2.0})
    names = LOSS_WEIGHT, ADVANTAGE
    (whole,), (streamed,) = pack_tree(session, factors=names), pack_tree(rollouts(session), factors=iter(names))
    assert torch.equal(whole.edges.weight, streamed.edges.weight)
    assert set(streamed.edges.weight.tolist()) == {2.0, 6.0}
    rows = pack_rows(rollouts(session), factors=iter(names))
    assert torch.equal(pack_rows(session, factors=names).weights, rows.weights)
    session.annotate(session.leaves()[0], {TRAIN: False})
    assert session.leaves()[0] not in pack_tree(leaf for leaf in rollouts(session)).rows


def test_what_is_said_of_tokens_that_are_not_trained_does_not_matter() -> None:
    session, prompt, reply = one_reply()
    session.annotate(prompt, {LOSS_WEIGHT: "none", ADVANTAGE: np.full(2, np.nan)})
    session.annotate(reply, {LOSS_MASK: np.array([False, True, True]), ADVANTAGE: np.array([np.nan, 2.0, 3.0])})
    (pack,) = pack_tree(session, factors=(LOSS_WEIGHT, ADVANTAGE))
    assert pack.edges.weight.tolist() == [2.0, 3.0]
    (pack,) = pack_tree(session, weighting={reply: np.array([np.inf, 5.0, 6.0])})
    assert pack.edges.weight.tolist() == [5.0, 6.0]
    session.annotate(reply, {LOSS_MASK: np.ones(3, np.bool)})
    with pytest.raises(OutOfRange, match="the weight nan"):
        pack_tree(session, factors=(ADVANTAGE,))


def test_numbers_of_64_bits() -> None:
    session, prompt, reply = one_reply()
    session.annotate(prompt, {"big": 2**64 - 1})
    session.annotate(reply, {LOSS_WEIGHT: Spans([(0, 1, 2**64 - 1), (1, 3, 2)])})
    (pack,) = pack_tree(session)
    assert pack.edges.weight.tolist() == [2.0**64, 2.0, 2.0]
    values, known = pack.token_values("big")
    assert values.tolist() == [2**64 - 1, 2**64 - 1, 0, 0, 0]
    assert known.tolist() == [True, True, False, False, False]


def test_annotations_of_a_turn_that_was_cut_stand_at_its_tokens() -> None:
    """A fork in the middle parts a turn in the pack; of each part what is said of its own tokens is read."""
    session = new_session()
    whole = decode(session, session.append(session.root, [1, 2]), [10, 11, 12, 13, 14])
    fork = decode(session, session.truncate(whole, 4), [20])
    said = {
        LOSS_WEIGHT: Spans([(0, 1, 2), (1, 3, 3), (4, 5, 5)]),
        LOGPROBS: np.arange(5, dtype=np.float32),
        "weight_version": Spans([(1, 4, 7)]),
    }
    session.annotate(whole, said)
    session.annotate(fork, {LOGPROBS: TokenValues([0.1])})  # float64, so all of them are
    (pack,) = pack_tree([whole, fork], annotations=session)
    assert pack.input_ids.tolist() == [1, 2, 10, 11, 12, 13, 14, 20]
    assert pack.edges.weight.tolist() == [2, 3, 3, 1, 5, 1]
    logprobs, known = pack.token_values(LOGPROBS)
    assert logprobs.dtype == torch.float64
    assert logprobs.tolist() == [0, 0, 0, 1, 2, 3, 4, 0.1] and known.tolist() == [False] * 2 + [True] * 6
    versions, known = pack.token_values("weight_version")
    assert versions.tolist() == [0, 0, 0, 7, 7, 7, 0, 0] and known.tolist() == [value > 0 for value in versions.tolist()]


def test_a_factor_that_says_something_of_some_tokens_alone_is_refused() -> None:
    session, (leaf, *_) = branched()
    session.annotate(leaf, {ADVANTAGE: TokenValues([1.0], 1), "loss_weights": TokenValues([1.0], 1)})
    session.annotate(leaf.path()[2], {ADVANTAGE: 1.0, "loss_weights": 1.0})
    for name in (ADVANTAGE, "loss_weights"):  # that is not "loss_weight", nor one named below it
        with pytest.raises(Unsupported, match=f"no '{name}' for all"):
            pack_tree([leaf], annotations=session, factors=(name,))


@pytest.mark.parametrize(("value", "kept"), [(False, 0), (np.False_, 0), (True, 1)], ids=repr)
def test_packs_leave_out_what_rollouts_leave_out(value: Any, kept: int) -> None:
    session = new_session()
    leaf = decode(session, session.append(session.root, [1]), [10])
    session.annotate(leaf, {TRAIN: value})
    assert len(list(rollouts(session))) == len(pack_tree([leaf], annotations=session)) == kept


def test_positions_of_either_mode() -> None:
    session = new_session(toy_scheme("hf5"))
    shown = turn(1, VS, video(frames=6), VE)
    leaf = decode(session, session.append(session.root, shown.tokens, media=media(shown)), [20, 21])
    leaf = session.append(leaf, [22])
    assert not np.array_equal(leaf.positions(), leaf.positions(mode="as_replayed"))
    for mode in MODES:
        assert np.array_equal(pack_tree([leaf], mode=mode)[0].position_ids.numpy(), leaf.positions(mode=mode))
        assert np.array_equal(pack_rows([leaf], mode=mode).position_ids[:, 0].numpy(), leaf.positions(mode=mode))


def test_the_first_token_of_a_path_is_not_trained() -> None:
    session = new_session()
    leaf = decode(session, session.root, [5, 6, 7])
    given: Any = {"weighting": "per_branch_mean", "dtype": torch.float64}
    assert pack_tree([leaf], **given)[0].edges.target.tolist() == [1, 2]
    assert pack_rows([leaf], **given).weights.tolist() == [[0.5, 0.5, 0]]
    session.annotate(leaf, {LOSS_MASK: True})
    assert pack_tree([leaf], annotations=session, **given)[0].edges.weight.tolist() == [0.5, 0.5]


def test_splits_repeat_the_path_above() -> None:
    _, leaves = branched()
    packs = pack_tree(leaves, token_budget=16)
    assert [pack.input_ids.tolist()[9:] for pack in packs] == [[20, 21, 22, 40, 41, 50, 51], [20, 21, 22, 40, 41, 60, 61], [30, 31]]
    assert [pack.num_context for pack in packs] == [0, 14, 9]
    assert [pack.edges.target.tolist() for pack in packs] == [[9, 10, 11, 14, 15], [14, 15], [9, 10]]
    assert packs.dedupe_ratio == 43 / (16 + 16 + 11)
    with pytest.raises(LimitExceeded, match="has 16 tokens; a pack takes 15") as caught:
        pack_tree(leaves, token_budget=15)
    assert caught.value.node == leaves[0]


def test_tensors_are_the_callers() -> None:
    _, leaves = branched()
    (pack,) = pack_tree(leaves)
    before, mask = leaves[0].input_ids().tolist(), pack.dense_mask()
    for tensor in (pack.input_ids, pack.position_ids, pack.parent, pack.node_id, *pack.edges):
        tensor.zero_()
    assert leaves[0].input_ids().tolist() == before
    assert torch.equal(pack_tree(leaves)[0].dense_mask(), mask)
    assert repr(pack).startswith("<TreePack of 3 paths, 20 tokens")


def test_bad_input() -> None:
    session, leaves = branched()
    leaf = leaves[0]
    text = SessionStore.in_memory().create("t", scheme=scheme("text@hf5"))
    other = text.append(text.root, [1])
    cases: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (TypeError, "not str", ["leaf"], {}),
        (TypeError, "stands for all below it", leaf, {}),
        (OutOfRange, "no path", [], {}),
        (Unsupported, "two schemes", [leaf, other], {}),
        (PositionError, "a mode is", leaves, {"mode": "decoded"}),
        (OutOfRange, "token_budget 0", leaves, {"token_budget": 0}),
        (TypeError, "integer", leaves, {"token_budget": 2.5}),
        (OutOfRange, "block_size 0", leaves, {"block_size": 0}),
        (Unsupported, "no weighting 'twice'", leaves, {"weighting": "twice"}),
        (TypeError, "a weighting is", leaves, {"weighting": 3}),
        (Unsupported, "says nothing of", leaves, {"weighting": {leaf: 1}}),
        (OutOfRange, r"shape \(3,\)", [leaf], {"weighting": lambda node: np.ones(3 if node == leaf else len(node))}),
        (OutOfRange, "weight nan", leaves, {"weighting": lambda node: float("nan")}),
        (TypeError, "factors are", leaves, {"factors": "loss_weight"}),
        (Unsupported, "no 'advantage'", leaves, {"factors": ("advantage",)}),
        (TypeError, "annotations are", leaves, {"annotations": 3}),
        (TypeError, "weights are floats", leaves, {"dtype": torch.int64}),
    ]
    for error, match, wrong, named in cases:
        with pytest.raises(error, match=match):
            pack_tree(wrong, **named)
        if not {"token_budget", "block_size"} & named.keys():
            with pytest.raises(error, match=match):
                pack_rows(wrong, **named)
    with pytest.raises(Unsupported, match="no padding 'middle'"):
        pack_rows(leaves, padding="middle")  # type: ignore[arg-type]
    with pytest.raises(OutOfRange, match="pad_token_id"):
        pack_rows(leaves, pad_token_id=-1)
    with pytest.raises(OutOfRange, match="row 3"):
        pack_tree(leaves)[0].row_indices(3)
    begun = media(turn(image()))[0].with_spans([(0, 2)], unfinished=True)
    with pytest.raises(MediaSpanError, match="ends inside"):
        pack_tree([session.append(leaf, [IMG, IMG], media=[begun])])
    session.annotate(leaf, {LOSS_MASK: "all"})
    with pytest.raises(Unsupported, match="str"):
        pack_tree(leaves, annotations=session)
    session.annotate(leaves[1], {LOSS_WEIGHT: TokenValues(np.ones((2, 2)))})
    with pytest.raises(Unsupported, match=r"rows of \(2,\)"):
        pack_tree(leaves[1:], annotations=session)
