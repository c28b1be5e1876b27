"""What it takes to write a store of 100,000 nodes as a bundle, and to take it into another store.

Expected before the first run of this file, from single pieces measured while they were built: to copy a stored record, its checksum
compared and made again, 8 µs, so 0.8 s of export; to open a bundle 4 µs a record; to take a node in, 8 µs to decode it, 3 for its
digest, 5 to make it, 8 to write it: 3 s with opening. So 4 s in all, of the 10 that are allowed, and twice that on a busy machine.
A bundle has the records of the store in fewer frames: not more bytes than the segments, and a hundredth less where each node was a
commit. zstd makes a half of random tokens, which are three bytes of four, and costs a second. (After
that run nodes came to be read twice, so that nothing changes before all is known to fit: a second more.)
"""

from __future__ import annotations

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
from sessiontree.bundles import export_bundle, import_bundle, open_bundle
from sessiontree.positions import scheme

RULES = scheme("qwen2_5_vl@sglang", spatial_merge_size=2, tokens_per_second=2)
SESSIONS, DEPTH, TURN = 10, 100, 64
BRANCHED = 50  # where each conversation but the first leaves another one


def conversations(path: Path, count: int) -> None:
    """Sessions of conversations that have a beginning in common, input and replies in turn, written side by side."""
    rng = np.random.default_rng(1)
    with SessionStore.open(path) as store:
        for number in range(SESSIONS):
            session = store.create(f"session {number}", scheme=RULES, namespace="bench")
            node = session.root
            made = 0
            while made < count // SESSIONS:
                if node.depth >= DEPTH:
                    session.set_head(f"end {made}", node)
                    node = node.ancestor(BRANCHED)
                ids = rng.integers(0, 150_000, TURN, np.int32)
                if node.depth % 2:
                    draft = session.draft(node)
                    draft.extend(ids)
                    node = draft.commit("stop", metadata={"temperature": 0.7})
                else:
                    node = session.append(node, ids)
                made += 1


def segments(path: Path) -> int:
    """Bytes of a store's frames, of a store that was closed and in which nothing is dead."""
    return sum(file.stat().st_size for file in (path / "segments").glob("*.seg"))


def bundles(folder: Path, count: int) -> Iterator[Figure]:
    conversations(folder / "store", count)
    bundle = folder / "all.bundle"
    start = time.perf_counter()
    with SessionStore.open(folder / "store") as store:
        exported = export_bundle(store, bundle)
    export = time.perf_counter() - start
    start = time.perf_counter()
    with SessionStore.open(folder / "other") as store:
        imported = import_bundle(store, bundle)
    taken = time.perf_counter() - start
    assert exported.nodes == imported.nodes_added == count
    note = f"export {export:.2f} s, import {taken:.2f} s, both with opening and closing the store; {TURN} tokens a node"
    yield Figure(f"export and import of {count:,} nodes", export + taken, "s", 10, note=note)
    with SessionStore.open(folder / "other") as store:
        start = time.perf_counter()
        again = import_bundle(store, bundle)
        assert not again.nodes_added
        yield Figure("import of a bundle that is there already", time.perf_counter() - start, "s")
    start = time.perf_counter()
    with open_bundle(bundle) as opened:
        node = opened.get("session 0").head(min(opened.get("session 0").heads)).node
        note = f"and the path of {node.depth} nodes read: {len(node.input_ids()):,} tokens"
    yield Figure("a bundle opened, and a path read", time.perf_counter() - start, "s", note=note)
    size = bundle.stat().st_size
    live = {"commit by commit": segments(folder / "store"), "as imported": segments(folder / "other")}
    for how, written in live.items():
        yield Figure(f"bundle over live bytes of the store, written {how}", size / written, "x", 1.02, note=f"{size / 1e6:.1f} MB")
    start = time.perf_counter()
    with SessionStore.open(folder / "store") as store:
        packed = export_bundle(store, folder / "packed.bundle", compress="zstd")
    note = f"export {time.perf_counter() - start:.2f} s; tokens are random"
    yield Figure("bundle by zstd over live bytes of the store", packed.bytes / live["as imported"], "x", note=note)


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    folder = Path(tempfile.mkdtemp(prefix="sessiontree-bench-", dir=os.environ.get("BENCH_DIR")))
    try:
        return int(not report(bundles(folder, count)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
