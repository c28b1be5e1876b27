"""Many writers of one session: what an append takes beside nineteen others, over what it takes alone. ``figures`` has the rows."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import numpy as np
from harness import Figure, microseconds, report

from sessiontree import Node, Session, SessionStore

NODES = 10_000
THREADS = 20
EACH = 500
TOKENS = np.arange(16, dtype="<i4")


def a_session(store: SessionStore) -> tuple[Session, Node]:
    """A session of many nodes, one behind the other, and the last of them."""
    session = store.create("s", scheme="text@hf5")
    node = session.root
    for _ in range(NODES):
        node = session.append(node, TOKENS)
    return session, node


def appends(session: Session, parent: Node, first: int) -> Callable[[], Node]:
    """A call that appends another sibling each time."""
    tokens = TOKENS.copy()
    tokens[0] = first

    def append() -> Node:
        tokens[1] += 1
        return session.append(parent, tokens)

    return append


def figures() -> list[Figure]:
    """D29: the 99th percentile of appends by 20 threads to one parent, as a multiple of one writer's."""
    with SessionStore.in_memory() as store:
        session, parent = a_session(store)
        alone = microseconds(appends(session, parent, 1_000), THREADS * EACH)
        taken: list[np.ndarray] = []
        barrier = threading.Barrier(THREADS)

        def write(number: int) -> None:
            append = appends(session, parent, number)
            barrier.wait()
            taken.append(microseconds(append, EACH))

        threads = [threading.Thread(target=write, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        one, many = (float(np.percentile(each, 99)) for each in (alone, np.concatenate(taken)))
    what = f"append to a session of {NODES:,} nodes by {THREADS} threads, p99 over one writer's"
    return [Figure(what, many / one, "times", 10, note=f"{many:.1f} µs over {one:.1f} µs")]


if __name__ == "__main__":
    sys.exit(not report(figures()))
