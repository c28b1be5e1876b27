"""Packing a tree of rollouts on the host, beside finding the tree again in flat rows of token lists: one process, one run.

A prompt of 8,192 tokens, eight branches of 1,024, four replies of 512 under each: 32,768 tokens in place of 311,296.

Expected before the first run: 41 nodes at some 10 µs of Python each and ten passes over 32,768 tokens, 0.5 ms; a block mask of
256 x 256 blocks in numbers, 1 ms; a trie walks 311,296 tokens at 0.3 µs each, 100 ms and more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from harness import Figure, median_of, report

from engine_bridge import pack_rows, pack_tree, tree_mask
from sessiontree import Node, Session, SessionStore
from sessiontree.annotations import ADVANTAGE, LOGPROBS, LOSS_MASK, LOSS_WEIGHT
from sessiontree.positions import scheme

TREE = (8_192, 8, 1_024, 4, 512)  # tokens of the prompt; branches, tokens of each; replies under each, tokens of each
ROUNDS = 5


def rollouts(session: Session, sizes: tuple[int, int, int, int, int] = TREE, vocabulary: int = 150_000) -> list[Node]:
    """The ends of the paths of such a tree."""
    prompt_tokens, branches, branch_tokens, replies, reply_tokens = sizes
    rng = np.random.default_rng(0)

    def decoded(parent: Node, count: int) -> Node:
        with session.draft(parent) as draft:
            draft.extend(rng.integers(0, vocabulary, count, np.int32))
            return draft.commit()

    prompt = session.append(session.root, rng.integers(0, vocabulary, prompt_tokens, np.int32))
    inner = [decoded(prompt, branch_tokens) for _ in range(branches)]
    return [decoded(branch, reply_tokens) for branch in inner for _ in range(replies)]


def tree_of_rows(rows: list[list[int]], sampled: list[list[bool]]) -> tuple[torch.Tensor, ...]:
    """A peer: the tree found again in rows and their loss masks, token by token.

    Ids, positions, parents, subtree ends, and of the edges sources, targets and weights.
    """
    root: dict[int, Any] = {}
    for row, mask in zip(rows, sampled, strict=True):
        at = root
        for token, trained in zip(row, mask, strict=True):
            entry = at.get(token)
            if entry is None:
                entry = at[token] = ({}, trained)
            at = entry[0]
    ids: list[int] = []
    positions: list[int] = []
    parents: list[int] = []
    targets: list[int] = []
    stack = [(token, entry, -1, 0) for token, entry in reversed(root.items())]
    while stack:
        token, (below, trained), parent, position = stack.pop()
        number = len(ids)
        ids.append(token)
        positions.append(position)
        parents.append(parent)
        if trained and parent >= 0:
            targets.append(number)
        stack += [(each, more, number, position + 1) for each, more in reversed(below.items())]
    ends = list(range(1, len(ids) + 1))
    for number in range(len(ids) - 1, 0, -1):
        parent = parents[number]
        if parent >= 0 and ends[parent] < ends[number]:
            ends[parent] = ends[number]
    sources = [parents[number] for number in targets]
    made = (torch.tensor(numbers) for numbers in (ids, positions, parents, ends, sources, targets, [1.0] * len(targets)))
    return tuple(made)


def quickest(*calls: tuple[Callable[[], object], int]) -> list[float]:
    """Of each call the least of some medians, in ms, taken in turn: what others do to the machine is not what is measured."""
    medians = [[median_of(call, count) for call, count in calls] for _ in range(ROUNDS)]
    return [min(each) / 1000 for each in zip(*medians, strict=True)]


def figures() -> Iterator[Figure]:
    rules = scheme("qwen2_5_vl@hf5", spatial_merge_size=2, tokens_per_second=2, image_token_id=151655, video_token_id=151656)
    with SessionStore.in_memory() as store:
        session = store.create("bench", scheme=rules)
        leaves = rollouts(session)
        rows = [leaf.input_ids().tolist() for leaf in leaves]
        packs = pack_tree(leaves)
        (pack,) = packs
        sampled = [[node.origin == "generated" for node in leaf.path() for _ in range(len(node))] for leaf in leaves]
        found = tree_of_rows(rows, sampled)
        ours = (pack.input_ids, pack.position_ids[0], pack.parent, pack.tok_end, *pack.edges)
        assert all(torch.equal(one.to(other.dtype), other) for one, other in zip(ours, found, strict=True))
        host = pack.tok_end.numpy()
        packing, mean, mask, peer = quickest(
            (lambda: pack_tree(leaves), 50),
            (lambda: pack_tree(leaves, weighting="per_branch_mean"), 50),
            (lambda: tree_mask.block_mask(host, pack.tok_end, 128), 50),
            (lambda: tree_of_rows(rows, sampled), 1),
        )
        tree = "8k + 8 × 1k + 32 × 512"
        what = f"pack {tree}"
        yield Figure(f"{what}, host", packing, "ms", 1, peers={"trie of token lists": peer}, note=f"{len(pack):,} tokens")
        yield Figure(f"{what}, per_branch_mean", mean, "ms", 1)
        yield Figure(f"{what}, over finding the tree in rows", peer / packing, "times", 100, "higher")
        yield Figure(
            f"block mask of {tree}", mask, "ms", 5, note=f"tok_end {host.nbytes >> 10} KiB; dense {len(host) ** 2 >> 20} MiB"
        )
        yield Figure("tokens of the rows over packed ones", packs.dedupe_ratio, "times", note=f"{packs.row_tokens:,} of the rows")
        for node in {node.id: node for leaf in leaves for node in leaf.path()[2:]}.values():
            said = {LOGPROBS: np.zeros(len(node), np.float32), LOSS_MASK: np.ones(len(node), np.bool), ADVANTAGE: 0.5}
            session.annotate(node, said)
        named: Any = {"annotations": session, "factors": (LOSS_WEIGHT, ADVANTAGE)}
        annotated, split, flat, edges = quickest(
            (lambda: pack_tree(leaves, **named), 50),
            (lambda: pack_tree(leaves, token_budget=12_000), 50),
            (lambda: pack_rows(leaves, padding="packed"), 10),
            (lambda: pack.token_values(LOGPROBS), 10),
        )
        yield Figure(f"{what}, with loss masks and advantages", annotated, "ms", note="read of 40 nodes")
        repeated = pack_tree(leaves, token_budget=12_000)
        yield Figure(
            f"{what}, in packs of at most 12,000",
            split,
            "ms",
            note=f"{len(repeated)} packs, {repeated.dedupe_ratio:.2f} times fewer",
        )
        yield Figure(f"{what}, log-probabilities of all its tokens", edges, "ms")
        yield Figure(f"{what}, as packed rows", flat, "ms", note="ten times the tokens")


if __name__ == "__main__":
    sys.exit(not report(figures()))
