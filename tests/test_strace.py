"""System calls that the kernel's side refuses, under strace: the faults of ``tests/disk.py`` once more, by another witness.

A writer is a process of its own. It says what was acknowledged and what was refused; afterwards everything acknowledged is there,
whole, whatever call failed, and the writer has seen no other error than the typed one. It speaks with ``writev``, the one call for
writing that the library has no use for.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from sessiontree import IncompatibleStore, MediaItem, SessionStore, media_identity
from sessiontree.fsck import fsck
from tests.disk_model import DURABILITIES

ROOT = Path(__file__).parents[1]
STEPS = 14
LENGTH = 50  # tokens of every turn
#: What one is called depends on the machine and on how the log commits; names that a kernel has not are left out.
CALLS = {
    "write": "pwrite64,pwritev,pwritev2",
    "sync": "fdatasync",
    "fsync": "fsync",
    "fallocate": "fallocate",  # which may fail: the write will tell
    "ftruncate": "ftruncate",
    "rename": "rename,renameat,renameat2",
    "features": "write",
}
FAULTS = ("error=EIO", "error=ENOSPC")
KILL = "signal=KILL"

WRITER = """
import os, sys
from functools import partial
from types import SimpleNamespace
import numpy as np
from sessiontree import MediaItem, SessionStore, SessionTreeError, journal, media_identity
from sessiontree.backends.segment_log import SegmentLog

path, durability, steps, length = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
journal.SegmentLog = SimpleNamespace(open=partial(SegmentLog.open, segment_bytes=1200))
waiting = []

def say(*words):
    os.writev(1, [" ".join(words).encode() + b"\\n"])

def attempt(operation):
    try:
        return operation()
    except SessionTreeError as error:
        say("refused", type(error).__name__, *(node.hex() for node in getattr(error, "nodes", ())))

def step(number):
    global last
    ids = [number] * length
    if number % 4 == 0:
        recorded = session.record(ids, ids, role="prompt", completion_role="reply")
        made = [recorded.prompt, recorded.completion]
    elif number % 4 == 1 and last.parent is not None:
        made = [session.replace(last, ids, head="main")]
    else:
        made = [session.append(last, ids)]
    last = made[-1]
    waiting.extend(node.id.hex() for node in made)
    if durability == "commit" or number % 3 == 0:
        store.flush()
        say("acked", *waiting)
        waiting.clear()

def features(number):
    item = MediaItem("image", media_identity("png", b"%d" % number), [(0, 4)], grid_thw=(1, 4, 4))
    store.put_features(item, np.arange(100) + number)
    say("features", str(number))

store = attempt(lambda: SessionStore.open(path, durability=durability))
session = store and attempt(lambda: store.create("s", scheme="text@hf5"))
if session:
    last = session.root
    for number in range(1, steps + 1):
        attempt(lambda: step(number))
        if number % 5 == 0:
            attempt(lambda: features(number))
say("closing")
if store:
    attempt(store.close)
say("done")
"""


def without_strace() -> str | None:
    """Why strace cannot be used here; None: it can."""
    found = shutil.which("strace")
    if found is None:
        return "strace is not installed"
    tried = subprocess.run(
        [found, "-f", "--seccomp-bpf", "-e", "trace=getpid", "-e", "inject=getpid:error=EIO", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    return None if tried.returncode == 0 else f"strace cannot trace here: {tried.stderr.strip().splitlines()[-1:]}"


WITHOUT = without_strace()
pytestmark = pytest.mark.skipif(WITHOUT is not None, reason=str(WITHOUT))


def named(calls: str) -> str:
    return ",".join(f"?{call}" for call in calls.split(","))


class Run:
    """One run of the writer: what it said, and which calls it made. ``fault`` hits the n-th of ``calls`` of each thread."""

    def __init__(self, folder: Path, durability: str, calls: str, fault: str | None = None, n: int = 1) -> None:
        self.path = folder / "store"
        trace = folder / "trace"
        command = ["strace", "-f", "-y", "-o", str(trace), "-e", f"trace={named(calls)},writev"]
        if fault is not None:
            command += ["-e", f"inject={named(calls)}:{fault}:when={n}"]
        if fault != KILL:  # quicker, but then no signal comes in
            command.append("--seccomp-bpf")
        python = [sys.executable, "-B", "-c", WRITER, str(self.path), durability, str(STEPS), str(LENGTH)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, *python], env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=60
        )
        lines = [line.split() for line in done.stdout.splitlines()]
        self.killed = done.returncode < 0 or done.returncode > 128
        assert self.killed or (done.returncode == 0 and lines[-1] == ["done"]), done.stderr
        self.acked = [(at, node) for at, (what, *nodes) in enumerate(lines) if what == "acked" for node in nodes]
        self.features = [int(words[1]) for words in lines if words[0] == "features"]
        self.refused = [(at, words[0], words[1:]) for at, (what, *words) in enumerate(lines) if what == "refused"]
        traced = trace.read_text()
        self.hit = "(INJECTED)" in traced or "killed by SIGKILL" in traced
        # What is written while a log closes is extra: nobody is told that it failed.
        working = traced.partition('"closing')[0].splitlines()
        self.hurt = any(re.search(r"(write|sync|truncate).*\.seg>.* = -1 .*\(INJECTED\)", line) for line in working)
        self.calls = Counter(tuple(line.split("(")[0].split()) for line in traced.splitlines() if "(" in line)


def check(run: Run, durability: str) -> None:
    """What is there after a run, and only that."""
    assert {kind for _, kind, _ in run.refused} <= {"StoreFailed"}
    with suppress(IncompatibleStore):  # where the store was not even made
        assert fsck(run.path).ok
    assert run.refused or not run.hurt, "a write or a sync of a segment failed, and nobody was told"
    with SessionStore.open(run.path, durability="commit") as store:
        if "s" not in store.sessions():
            assert not run.acked
            store.create("s", scheme="text@hf5")
        session = store.get("s")
        there = {node.id.hex(): node for node in session.tree}
        for _, node_id in run.acked:
            assert node_id in there, f"node {node_id} was acknowledged and is gone"
        last = max((at for at, _ in run.acked), default=-1)
        for at, _, nodes in run.refused:  # the store went on, so what it refused before was never there
            assert durability != "commit" or at > last or not there.keys() & set(nodes)
        for node in session.tree:
            if node.parent is None:
                continue
            ids = node.token_ids
            assert ids.tolist() == [ids[0]] * LENGTH and 1 <= ids[0] <= STEPS
            assert node.positions(node.start, node.stop).shape == (1, LENGTH)
            if node.role == "prompt":
                assert [child.role for child in session.children(node)][:1] == ["reply"], "half of what was recorded together"
            if node.role != "prompt" and ids[0] % 4 == 1 and node.depth > 1:
                assert "main" in session.heads, "a node without the head that was moved to it"
        for number in run.features:
            item = MediaItem("image", media_identity("png", b"%d" % number), [(0, 4)], grid_thw=(1, 4, 4))
            found = store.get_features(item)
            assert found is not None
            np.testing.assert_array_equal(found[found.names[0]], np.arange(100) + number)
        session.append(session.root, [STEPS + 1])


def reached(folder: Path, durability: str, calls: str) -> int:
    """How many of these calls a thread of the writer makes at most: a fault at a greater n never hits."""
    folder.mkdir()
    run = Run(folder, durability, calls)
    check(run, durability)
    assert not run.hit and not run.refused and len(run.acked) >= STEPS and len(run.features) == STEPS // 5
    by_thread: Counter[str] = Counter()
    names = set(calls.split(","))
    for words, number in run.calls.items():
        if len(words) == 2 and words[1] in names:
            by_thread[words[0]] += number
    return max(by_thread.values())


def places(most: int) -> Iterator[int]:
    """A few of 1..most, both ends among them."""
    yield from sorted({1, 2, (most + 2) // 3, (2 * most + 2) // 3, most})


@pytest.mark.parametrize("kind", CALLS)
def test_d03_d06_the_kernel_refuses_a_call(kind: str, tmp_path: Path) -> None:
    """At a few of the places where the writer makes it; at every one in ``make soak``."""
    hurt = refused = 0
    most = reached(tmp_path / "sound", "commit", CALLS[kind])
    for number, n in enumerate(places(most)):
        folder = tmp_path / str(n)
        folder.mkdir()
        run = Run(folder, "commit", CALLS[kind], FAULTS[number % 2], n)
        assert run.hit
        check(run, "commit")
        hurt += run.hurt
        refused += len(run.refused)
    assert (refused > 0) == (kind != "fallocate") and (hurt > 0) == (kind in ("write", "sync", "ftruncate"))


@pytest.mark.soak
@pytest.mark.parametrize("durability", DURABILITIES)
@pytest.mark.parametrize("fault", [*FAULTS, KILL])
@pytest.mark.parametrize("kind", CALLS)
def test_d03_d06_the_kernel_refuses_a_call_at_every_place(kind: str, fault: str, durability: str, tmp_path: Path) -> None:
    """SIGKILL: the writer dies there."""
    assert reached(tmp_path / "sound", durability, CALLS[kind])
    for n in count(1):
        folder = tmp_path / str(n)
        folder.mkdir()
        run = Run(folder, durability, CALLS[kind], fault, n)
        check(run, durability)
        if not run.hit:
            assert n > 1
            break
        shutil.rmtree(folder)


def test_d08_a_writer_that_dies_at_a_call_loses_nothing(tmp_path: Path) -> None:
    for number, kind in enumerate(("write", "sync", "fsync", "ftruncate")):
        folder = tmp_path / kind
        folder.mkdir()
        run = Run(folder, "commit", CALLS[kind], KILL, 3 + number)
        assert run.killed and run.hit
        check(run, "commit")


CHANGES = (
    "creat,unlink,unlinkat,rename,renameat,renameat2,mkdir,mkdirat,rmdir,link,linkat,symlink,symlinkat,chmod,fchmod,utimensat,"
    "truncate,ftruncate,fallocate,write,pwrite64,writev,pwritev,pwritev2,fsync,fdatasync,flock"
)
LOOK = """
import sys
from sessiontree.fsck import fsck, salvage, stats
fsck(sys.argv[1])
stats(sys.argv[1])
salvage(sys.argv[1], sys.argv[2])
"""


def test_fsck_opens_a_store_to_read_alone_and_changes_nothing_in_it(tmp_path: Path) -> None:
    run = Run(tmp_path, "commit", CALLS["sync"])
    trace, new = tmp_path / "looked", tmp_path / "new"
    command = ["strace", "-f", "-y", "--seccomp-bpf", "-o", str(trace), "-e", f"trace={named(CHANGES)},?open,openat"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, sys.executable, "-B", "-c", LOOK, str(run.path), str(new)], env=environment, check=True, timeout=60)
    calls = [line.split(maxsplit=1)[1] for line in trace.read_text().splitlines()]
    there = [call for call in calls if f"{run.path}/" in call or f"{run.path}>" in call or f'{run.path}"' in call]
    leases = [call for call in there if call.startswith("flock") and ".lease>" in call and "LOCK_SH" in call]
    assert leases, "what compaction would remove is held on to, as every reader does"
    others = [call for call in there if call not in leases]
    assert len(others) > 10 and all(call.startswith("open") and "O_RDONLY" in call for call in others)
    assert any(call.startswith(("pwrite", "write")) and str(new) in call for call in calls)


SAVE = """
import sys
from sessiontree import SessionTreeError
from sessiontree.fsck import salvage
try:
    salvage(sys.argv[1], sys.argv[2])
except SessionTreeError as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize(("kind", "n"), [("write", 2), ("sync", 2), ("fsync", 2), ("rename", 1), ("rename", 3)])
def test_a_full_disk_is_a_typed_error_of_salvage(kind: str, n: int, tmp_path: Path) -> None:
    run = Run(tmp_path, "commit", CALLS["sync"])
    trace = tmp_path / "looked"
    command = [
        "strace",
        "-f",
        "--seccomp-bpf",
        "-o",
        str(trace),
        "-e",
        f"trace={named(CALLS[kind])}",
        "-e",
        f"inject={named(CALLS[kind])}:error=ENOSPC:when={n}",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    python = [sys.executable, "-B", "-c", SAVE, str(run.path), str(tmp_path / "new")]
    done = subprocess.run([*command, *python], env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert "(INJECTED)" in trace.read_text() and done.stdout == "StoreFailed\n"
    assert fsck(run.path).ok
