"""What it costs to keep a store healthy: checking it, saving what is sound of it, counting it.

Expected before the first run of this file, from single pieces measured while they were built, on one core: 12 to 13 µs for a node
of 1,000 tokens (2.7 to find it in its frame and check the checksum, 3.8 to decode it, 2.7 for SHA-256 over 4 kB, 0.4 for its
positions, the rest to place it in its tree), so 310-340 MB/s of a store of such turns; 9 µs for one of 230 tokens, so 110 MB/s;
memory for an index of 150 to 250 B a record and never for records; stats as fsck; salvage half as fast, since it reads twice and
writes once. Stores lie in the page cache; where the disk is slower than these figures it is the limit: it gives each byte once.
A second process does more than half of what can be done apart from finding the records: half as fast again on two idle cores.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from durable import RULES, size_of
from harness import Figure, report

from sessiontree import SessionStore
from sessiontree.fsck import fsck, salvage, stats

MB = 1e6
MEASURE = """
import re, sys
from sessiontree.fsck import fsck
def most():  # kB
    return int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
before = most()
assert fsck(sys.argv[1], processes=1).ok
print((most() - before) * 1024)
"""


def filled(path: Path, length: int, size: float) -> int:
    """A store of about ``size`` bytes in turns of ``length`` tokens, paths of 100, one session of ten each: how many nodes."""
    count = int(size / (4 * length + 100)) // 10 * 10
    ids = np.arange(length, dtype=np.int32)
    with SessionStore.open(path, durability="relaxed") as store:
        for which in range(10):
            session = store.create(f"bench {which}", scheme=RULES)
            tip = session.root
            for number in range(count // 10):
                ids[0] = number
                tip = session.append(tip if tip.depth < 100 else session.root, ids)
                if number % 10_000 == 0:
                    store.flush()
            session.set_head("main", tip)
    return count


def timed(call: Any, *given: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    made = call(*given)
    return time.perf_counter() - start, made


def best(call: Any, *given: Any) -> float:
    return min(timed(call, *given)[0] for _ in range(3))


def hashed(path: Path) -> None:
    """The floor: every byte read and hashed, nothing understood."""
    for file in sorted((path / "segments").glob("*.seg")):
        digest = sha256()
        with file.open("rb") as data:
            while chunk := data.read(2**20):
                digest.update(chunk)


def memory_of_fsck(path: Path) -> float:
    done = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True)
    return float(done.stdout)


def checking(folder: Path, size: float) -> Iterator[Figure]:
    path = folder / "long"
    count = filled(path, 1000, size)
    total = fsck(path).bytes
    taken, alone, floor = best(fsck, path), best(lambda path: fsck(path, processes=1), path), best(hashed, path)
    yield Figure(
        "fsck of a store of turns of 1,000 tokens",
        total / taken / MB,
        "MB/s",
        250,
        "higher",
        peers={"in one process": total / alone / MB, "read and SHA-256 alone": total / floor / MB},
        note=f"{total / MB:,.0f} MB, {count:,} nodes; {len(os.sched_getaffinity(0))} cores; one: {alone / count * 1e6:.1f} µs each",
    )
    yield Figure("stats of a store of turns of 1,000 tokens", total / best(stats, path) / MB, "MB/s", better="higher")
    [segment, *_] = sorted((path / "segments").glob("*.seg"))
    with segment.open("r+b") as file:
        file.seek(segment.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    taken, made = timed(salvage, path, folder / "saved")
    lost = len(made.lost_nodes)
    note = f"{made.nodes:,} nodes saved, {lost} lost; the new store is {size_of(folder / 'saved') / MB:,.0f} MB"
    yield Figure(
        "salvage of a store of turns of 1,000 tokens, one byte flipped", total / taken / MB, "MB/s", better="higher", note=note
    )
    shutil.rmtree(path)
    shutil.rmtree(folder / "saved")


def small_nodes(folder: Path, size: float) -> Iterator[Figure]:
    path = folder / "short"
    count = filled(path, 230, size)
    total = fsck(path).bytes
    taken = best(fsck, path)
    note = f"{total / MB:,.0f} MB, {count:,} nodes, {taken / count * 1e6:.1f} µs each"
    yield Figure("fsck of a store of turns of 230 tokens", total / taken / MB, "MB/s", better="higher", note=note)
    memory = memory_of_fsck(path)
    yield Figure(
        "memory of fsck of a store of turns of 230 tokens, beside the library",
        memory / MB,
        "MB",
        note=f"{memory / count:.0f} B a node",
    )


def main() -> int:
    size = float(sys.argv[1]) if len(sys.argv) > 1 else 1e9
    folder = Path(tempfile.mkdtemp(prefix="sessiontree-bench-", dir=os.environ.get("BENCH_DIR")))
    try:
        parts = (checking(folder, size), small_nodes(folder, size / 4))
        return int(not report(figure for part in parts for figure in part))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
