"""A path of 100,000 turns: appended to, opened again and read, under the default recursion limit."""

from __future__ import annotations

import sys

import numpy as np

from sessiontree import SessionStore
from sessiontree.testing.base import Conformance, Home

DEPTH = 100_000


class DepthTests(Conformance):
    def test_a_path_of_100_000_turns(self, home: Home) -> None:
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(1000)
        try:
            self.go_deep(home)
        finally:
            sys.setrecursionlimit(limit)

    def go_deep(self, home: Home) -> None:
        """A path of which as many turns are appended one by one as ``deep_appends`` says."""
        with SessionStore.in_memory() as memory:
            source = memory.create("deep", scheme="text@hf5")
            node = source.root
            for turn in range(DEPTH - self.deep_appends):
                node = source.append(node, [turn])
            session = home.store.fork(source, node, "deep") if node.depth else home.store.create("deep", scheme="text@hf5")
        node = session.node(node.id)
        for turn in range(node.depth, DEPTH):
            node = session.append(node, [turn])
        session.set_head("main", node)
        tip = home.again(session).head("main").node
        assert (tip.depth, tip.stop, tip.id) == (DEPTH, DEPTH, node.id)
        assert np.array_equal(tip.input_ids(), np.arange(DEPTH))
        assert np.array_equal(tip.positions(DEPTH - 9), [np.arange(DEPTH - 9, DEPTH)])
        assert len(tip.path()) == DEPTH + 1
        assert [tip.ancestor(depth).token_ids.tolist() for depth in (1, 777, DEPTH)] == [[0], [776], [DEPTH - 1]]
        again = home.store.get("deep")
        below = again.append(tip, [1])
        beside = again.append(tip.ancestor(DEPTH // 2), [2])
        assert again.lowest_common_ancestor(below, beside).depth == DEPTH // 2
        fork = home.store.fork(again, below, "fork")
        assert fork.append(below, [3]).input_ids(DEPTH).tolist() == [1, 3]
