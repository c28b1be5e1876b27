"""What it costs to give back what was dropped: time and memory of gc, and what it leaves on disk.

Expected before the first run of this file: a record is read, checked and written again in 3 µs, so that half a million of them take
2 s, and to find out which a second more; memory for the index of what stays (73 B a node, 40 MB, and as much again while it grows)
and some arrays over all nodes: 150 MB.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from harness import Figure, report

from sessiontree import SessionStore


def make(path: Path, count: int) -> None:
    """A store of so many nodes in paths of 100, of which the lower halves are dropped."""
    with SessionStore.open(path, durability="relaxed") as store:
        session = store.create("bench", scheme="text@hf5")
        ids = np.arange(8, dtype=np.int32)
        tip, dropped = session.root, []
        for number in range(count):
            ids[:2] = number % 2**16, number >> 16
            tip = session.append(tip if tip.depth < 100 else session.root, ids)
            if tip.depth == 51:
                dropped.append(tip)
        session.drop(*dropped)


def memory(peak: bool) -> int:
    """Bytes that this process holds; the most since ``forget_peak``."""
    name = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def collect(path: Path) -> tuple[float, int, int, int, bool]:
    with SessionStore.open(path) as store:
        session = store.get("bench")
        nodes = len(session.tree)
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
        before = memory(peak=False)
        start = time.perf_counter()
        done = store.gc()
        taken = time.perf_counter() - start
        assert done.nodes_after == nodes - 1 == len(session.tree) - 1
        return taken, memory(peak=True) - before, done.nodes_before, done.nodes_after, done.swept


def size_of(path: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file())


def collecting(path: Path, count: int) -> Iterator[Figure]:
    start = multiprocessing.get_context("spawn")  # so that memory is that of gc alone
    with start.Pool(1, maxtasksperchild=1) as pool:
        pool.apply(make, (path, count))
        before = size_of(path)
        taken, more, nodes, left, swept = pool.apply(collect, (path,))
    yield Figure(f"gc of {nodes:,} nodes, {nodes - left:,} of them dropped", taken, "s", 30)
    yield Figure("memory that gc takes beside the open store", more / 1e6, "MB", 200)
    yield Figure("bytes on disk after gc", size_of(path) / 1e6, "MB", peers={"before": before / 1e6}, note=f"swept: {swept}")


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    folder = Path(tempfile.mkdtemp(prefix="sessiontree-bench-", dir=os.environ.get("BENCH_DIR")))
    try:
        return int(not report(collecting(folder / "store", count)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
