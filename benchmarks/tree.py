"""The speed and size of the tree: what a turn, a branch, a read and a question cost, at any depth, beside the ways of peers.

Expected before the first run of this file, with the parts already measured by themselves while they were built: an append of 16
tokens 5-6 µs (1 µs for the node, 0.5 for SHA-256, 1 for checks, the rest for the tree value, positions and a lock), of 1,000
about 5 µs more (SHA-256 2.4, copies), the same at every depth; an image turn 20 µs; a view of a million tokens 0.4 µs (a NumPy
array over what is there) against 70 µs for a copy of them; a fork's path as long as one concatenation; a path of 1,000 nodes 10
µs (32 tuples put together); a common ancestor at depth 100,000 3-4 µs (34 steps at 0.1); a history of 131,072 tokens found in
0.1 ms (compared at memory speed); 560 B a node beside its tokens.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from harness import Figure, median_of, memory_of, microseconds, report
from numpy.typing import NDArray
from peers import chains, langgraph_turns, lists, tensors

from sessiontree import MediaItem, Node, Session, SessionStore, extend_drafts, media_identity
from sessiontree.positions import scheme

MILLION = 1_000_000
# Paths of 100M tokens are measured: longer than the default limit allows.
POSITIONS = scheme("qwen2_5_vl@sglang", spatial_merge_size=2, tokens_per_second=2, max_position_limit=2**28)


def new_session(name: str) -> Session:
    return SessionStore.in_memory().create(name, scheme=POSITIONS)


def fresh_turns(count: int) -> Iterator[NDArray[np.int32]]:
    """Turns of ``count`` tokens that differ. One array, changed each time: whoever keeps it must copy it."""
    ids = np.arange(count, dtype=np.int32)
    for turn in itertools.count():
        ids[0] = turn
        yield ids


def grow(session: Session, tip: Node, turns: int, length: int) -> Node:
    for ids in itertools.islice(fresh_turns(length), turns):
        tip = session.append(tip, ids)
    return tip


def appends(length: int, bar: float) -> Iterator[Figure]:
    for depth in (10, 1_000, 100_000):
        session = new_session("bench")
        tip = grow(session, session.root, depth - 1, length)
        turns = fresh_turns(length)

        def append(session: Session = session, turns: Iterator[Any] = turns) -> None:
            nonlocal tip
            tip = session.append(tip, next(turns))

        samples = 20_000 if length < 100 else 5_000
        taken = microseconds(append, samples)
        history = min(depth * length, 4 * MILLION)
        shorter = f"; peers at {history:,} tokens" if history < depth * length else ""
        note = f"GC on, id and tree value included; max {taken.max():.0f} µs; {depth + samples:,} nodes at the end{shorter}"
        name = f"append {length:,} tokens to a tip, {depth:,} nodes"
        yield Figure(f"{name}, median", float(np.median(taken)), "µs", bar, peers=copies(history, length), note=note)
        yield Figure(f"{name}, p99", float(np.percentile(taken, 99)), "µs", 100)


def copies(history: int, length: int) -> dict[str, float]:
    """What it takes to make the next turn of a history by copying it."""
    ids, turn = list(range(history)), list(range(length))
    tensor, new = torch.arange(history, dtype=torch.int32), torch.arange(length, dtype=torch.int32)
    few = 5 if history > MILLION else 50
    return {"list copy": median_of(lambda: ids + turn, few), "torch.cat": median_of(lambda: torch.cat([tensor, new]), few)}


def image_turn() -> Iterator[Figure]:
    session = new_session("bench")
    tip = session.root
    ids = np.concatenate([np.arange(200), [151652], np.full(256, 151655), [151653], np.arange(98)]).astype(np.int32)
    identities = (media_identity("png", number.to_bytes(4, "little")) for number in itertools.count())

    def append() -> None:
        nonlocal tip
        item = MediaItem("image", next(identities), spans=[(201, 256)], grid_thw=(1, 32, 32))
        tip = session.append(tip, ids, media=[item])

    note = "item made and checked, id and tree value included"
    yield Figure("append an image turn, 300 + 256 tokens", median_of(append, 5_000), "µs", 60, note=note)


def drafts() -> Iterator[Figure]:
    session = new_session("bench")
    prompt = session.append(session.root, range(100))
    batch = [session.draft(prompt) for _ in range(512)]
    sampled = np.arange(512, dtype=np.int32)
    yield Figure("extend 512 drafts by one token each", median_of(lambda: extend_drafts(batch, sampled), 1_000), "µs", 150)


def reads() -> Iterator[Figure]:
    session = new_session("bench")
    tip = grow(session, session.root, 1_000, 1_000)
    path, turns, choose = tip.path(), fresh_turns(16), random.Random(0)

    def branch() -> Node:
        return session.append(choose.choice(path), next(turns))

    yield Figure("branch with 16 tokens from any node of 1M tokens", median_of(branch, 5_000), "µs", 10)

    copied = median_of(tip.input_ids, 100)
    note = "input_ids(copy=False); a copy, the default, is listed as peer: PyTorch writes through read-only arrays"
    peers = {"input_ids()": copied}
    viewed = median_of(lambda: tip.input_ids(copy=False), 1_000, each=10)
    yield Figure("read the whole path of a tip, 1M tokens", viewed, "µs", 0.5, peers=peers, note=note)

    forks = iter([session.append(tip.parent or tip, ids) for ids in itertools.islice(fresh_turns(16), 60)])
    prefix, own = path[-2].input_ids(), np.arange(16, dtype=np.int32)
    concatenated, copies, views = [], [], []
    for _ in range(30):  # in turns, so that what the machine does meets all of them
        concatenated.append(microseconds(lambda: np.concatenate([prefix, own]), 1)[0])
        copies.append(microseconds(next(forks).input_ids, 1)[0])
        fork = next(forks)
        views.append(microseconds(lambda fork=fork: fork.input_ids(copy=False), 1)[0])  # type: ignore[misc]
    base = float(np.median(concatenated))
    note = "first read, input_ids(); np.concatenate = 1"
    yield Figure("read the whole path of a fresh branch, 1M tokens", float(np.median(copies)) / base, "x", 1.3, note=note)
    note = "first read, input_ids(copy=False), kept for the next; np.concatenate = 1"
    yield Figure("view the whole path of a fresh branch, 1M tokens", float(np.median(views)) / base, "x", 1.3, note=note)
    again = median_of(lambda: fork.input_ids(copy=False), 1_000, each=10)
    yield Figure("view the whole path of a branch again, 1M tokens", again, "µs")


def turn_by_turn() -> Iterator[Figure]:
    """A conversation whose whole path is read at every turn."""

    def ours(copy: bool) -> Node:
        session = new_session("bench")
        tip = session.root
        for ids in itertools.islice(fresh_turns(1_000), 1_000):
            tip = session.append(tip, ids)
            tip.input_ids(copy=copy)
        return tip

    def peer(histories: Iterator[Any]) -> None:
        kept = list(itertools.islice(histories, 1_000))  # every turn stays readable, as every node does
        assert len(kept[-1]) == MILLION

    ids = np.arange(1_000, dtype=np.int32)
    ways: dict[str, Callable[[], Iterator[Any]]] = {
        "list copy": lambda: lists(ids.tolist()),
        "torch.cat": lambda: tensors(torch.from_numpy(ids.copy())),
    }
    seconds = {name: best_of(lambda way=way: peer(way()), 1) for name, way in ways.items()}  # type: ignore[misc]
    seconds["chain + concatenate"] = best_of(lambda: drained(chains(ids)), 1)
    put = langgraph_turns(ids.tolist())
    if put is not None:
        seconds["LangGraph InMemorySaver, 100 turns"] = put(100)
    name = "1M tokens in 1,000 turns, whole path read each turn"
    milliseconds = {key: value * 1e3 for key, value in seconds.items()}
    note = "input_ids(copy=False)" + ("" if put else "; LangGraph not installed (make bench PEERS=1)")
    yield Figure(f"{name}: time", best_of(lambda: ours(False), 5) * 1e3, "ms", 40, peers=milliseconds, note=note)
    yield Figure(f"{name}, as copies: time", best_of(lambda: ours(True), 5) * 1e3, "ms", note="input_ids()")
    held, _ = memory_of(lambda: ours(False))
    copied = {"list copy": memory_of(lambda: list(itertools.islice(lists(ids.tolist()), 1_000)))[0] / 1e6}
    copied["torch.cat"] = sum(tensor.nbytes for tensor in itertools.islice(ways["torch.cat"](), 1_000)) / 1e6
    yield Figure(f"{name}: memory", held / 1e6, "MB", 12, peers=copied, note="tracemalloc, above the start")


def drained(histories: Iterator[Any]) -> None:
    for _ in itertools.islice(histories, 1_000):
        pass


def best_of(call: Callable[[], object], times: int) -> float:
    """Seconds of the fastest of some runs."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return min(taken)


def forks_memory() -> Iterator[Figure]:
    session = new_session("bench")
    tip = grow(session, session.root, 1_000, 1_000)

    def fork_and_read() -> list[Node]:
        forks = [session.append(tip, ids) for ids in itertools.islice(fresh_turns(16), 64)]
        for fork in forks:
            fork.input_ids(copy=False)
        return forks

    held, _ = memory_of(fork_and_read)
    note = "input_ids(copy=False), default budget of 32 MiB; as copies nothing is kept"
    yield Figure("64 forks of 1M tokens, each read once: memory above the path", held / 1e6, "MB", 40, note=note)


def walks() -> Iterator[Figure]:
    session = new_session("bench")
    tip = grow(session, session.root, 999, 16)
    yield Figure("path of 1,000 nodes", median_of(tip.path, 2_000), "µs", 25)
    trunk = grow(session, tip, 49_001, 16)
    one, two = (grow(session, session.append(trunk, [mark]), 49_999, 16) for mark in (1, 2))
    assert session.lowest_common_ancestor(one, two) == trunk
    assert one.depth == two.depth == 100_000
    taken = median_of(lambda: session.lowest_common_ancestor(one, two), 2_000, each=5)
    yield Figure("lowest common ancestor at depth 100,000", taken, "µs", 5, note="both tips there, the ancestor at 50,000")


def histories() -> Iterator[Figure]:
    """What a stateless client resends, looked up among nodes that share long prefixes."""
    random_ids = np.random.default_rng(0)
    for name, on_trunk in (("one trunk with 9 branches a turn", True), ("a path that forks at every turn", False)):
        session = new_session("bench")
        tip = session.root
        for _ in range(1_000 if on_trunk else 5_000):
            length = 131 if on_trunk else 26
            children = [
                session.append(tip, random_ids.integers(0, 150_000, length, np.int32)) for _ in range(10 if on_trunk else 2)
            ]
            tip = children[0 if on_trunk else -1]
        history = tip.input_ids()
        linked = microseconds(lambda: session.longest_prefix(history), 1)[0] / 1e3  # noqa: B023
        assert session.longest_prefix(history).node == tip
        taken = median_of(lambda: session.longest_prefix(history), 200) / 1e3  # noqa: B023
        note = f"{name}; the first call takes in {len(session.tree):,} nodes: {linked:.0f} ms"
        figure = f"longest_prefix of {len(history):,} tokens among 10,000 nodes"
        yield Figure(figure, taken, "ms", 1, note=note)


def node_memory() -> Iterator[Figure]:
    for turns, length in ((100_000, 16), (10_000, 1_000)):
        session = new_session("bench")
        held, tip = memory_of(lambda: grow(session, session.root, turns, length))  # noqa: B023
        room = (len(tip._extent.buffer) - 4 * tip.stop) / turns
        note = f"tracemalloc, {turns:,} turns; {room:.0f} B of it is room left in the arena"
        yield Figure(f"memory of a node beside 4 B/token, {length:,} tokens", held / turns - 4 * length, "B", 600, note=note)


def main() -> int:
    warm = new_session("warm")
    grow(warm, warm.root, 5_000, 16)
    figures = list(appends(16, 6))
    for rows in (appends(1_000, 10), image_turn(), drafts(), reads(), turn_by_turn(), forks_memory(), walks(), histories()):
        figures += rows
    figures += node_memory()
    return 0 if report(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
