"""How soon `sessiontree tree` and `sessiontree log` show a first screen of a session of 100,000 nodes.

Expected before the first run of this file, from single pieces measured while it was built: 0.2 s for the interpreter and what it
imports, 0.05 s for the store's index, 0.1 s for who is whose child and how many stand below each, which needs no node read, and
1 ms for 40 nodes; so 0.4 s, alike for a chain, a bush and a star, while reading every node first, as `to_text` has to, takes
seconds. The same for the end of a chain, whose nodes `log` reads alone.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from harness import Figure, report

from sessiontree import Session, SessionStore

COUNT = 100_000
LINES = 40  # of a first screen


def chain(session: Session) -> None:
    node = session.root
    for number in range(COUNT):
        node = session.append(node, [number, 1, 2, 3], role="assistant" if number % 2 else "user")
    session.set_head("main", node)


def bush(session: Session) -> None:
    """Most go on from where one was a moment ago, some from anywhere; with heads."""
    rng = random.Random(1)
    nodes = [session.root]
    for number in range(COUNT):
        nodes.append(session.append(rng.choice(nodes[-50:] if number % 3 else nodes), [number, 1, 2, 3]))
    for number in range(100):
        session.set_head(f"head {number}", rng.choice(nodes))


def star(session: Session) -> None:
    for number in range(COUNT):
        session.append(session.root, [number, 1, 2, 3])


def first_screen(name: str, path: Path, session: str) -> float:
    """Seconds from the start of the process to the last line of the first screen."""
    command = [sys.executable, "-m", "sessiontree", name, str(path), session]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(LINES)]
        taken = time.perf_counter() - start
        process.stdout.close()
    assert all(lines)
    return taken


def figures(folder: Path) -> Iterator[Figure]:
    path = folder / "store"
    with SessionStore.open(path, durability="relaxed") as store:
        for shape in (chain, bush, star):
            shape(store.create(shape.__name__, scheme="text@hf5"))
    for shape in (chain, bush, star):
        name = shape.__name__
        with SessionStore.open(path, read_only=True) as store:
            start = time.perf_counter()
            store.get(name).to_text()
            whole = time.perf_counter() - start
        taken = [first_screen("tree", path, name) for _ in range(5)]
        yield Figure(
            f"tree: first {LINES} lines of a {name} of {COUNT:,} nodes, interpreter start included",
            statistics.median(taken),
            "s",
            1,
            peers={"to_text() alone, s": whole},
            note=f"worst of {len(taken)}: {max(taken):.2f} s",
        )
    with SessionStore.open(path, read_only=True) as store:
        start = time.perf_counter()
        store.get("chain").head("main").node.path()
        whole = time.perf_counter() - start
    taken, drawn = [], []
    for _ in range(5):  # by turns, so that both see the same machine
        taken.append(first_screen("log", path, "chain"))
        drawn.append(first_screen("tree", path, "chain"))
    yield Figure(
        f"log: first {LINES} lines of a path of {COUNT:,} nodes over those of tree",
        statistics.median(taken) / statistics.median(drawn),
        "x",
        1.3,
        peers={"reading the path alone, s": whole},
        note=f"{statistics.median(taken):.2f} s, interpreter start included; worst of {len(taken)}: {max(taken):.2f} s",
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "sessiontree", "tree", str(path), "bush"], stdout=subprocess.PIPE, check=True)
    yield Figure("the whole bush drawn", time.perf_counter() - start, "s", note=f"{len(done.stdout.splitlines()):,} lines")


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="sessiontree-bench-", dir=os.environ.get("BENCH_DIR")))
    try:
        return int(not report(figures(folder)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
