"""Inside a scheduler: turns beside SGLang 0.5.23's own sessions, steps of 512 commits, threads, idle sessions.

A turn is 1,024 tokens, 16 of them the reply; an image turn has an image of 256 among them. SGLang's side is its own functions, in
the order in which its scheduler calls them: ``create_req``, and for an image the shift of offsets, ``duplicate_pad_mm_input_ids``
and ``extend_image_inputs``; ``init_next_round_input`` (without a prefix cache) when the request is scheduled, the new turn's
ids out of ``get_fill_ids`` and its columns of ``mrope_positions``, as ``prepare_for_extend`` and the forward batch take them; the
reply put into ``output_ids``, the check for the end, ``refresh_fill_ids`` and ``finish_req``. Ours is the item made and checked,
``append``, the turn's ids, positions and delta, ``draft``, ``extend``, ``commit`` and ``set_head``. Requests, ids, hashes and the
table of a turn by itself are there before the clock starts on either side; KV, features and prefix caches are on neither. Both
have gone through every turn before.

Expected before the first run of this file: an image turn 60 µs and a text turn 45 at any depth; SGLang's streaming image turn
15-20 ms at turn 1,000 (300 times ours), its regular one 12 ms at turn 300 (200 times). 5.1 B a token and up to 1 of room. 512
commits and heads on disk 18 ms, since a commit is told to the journal in one step and its head in another: over the bar before
anything is mended. 16 threads at 0.95 of one's rate in memory, since the interpreter's lock is the limit, and 0.9 on disk. Idle
sessions 40 MB (the log's index: 90 B a record, three records each, and their ids), 1 ms for one to come back. 20 appends at once:
p99 at 2-3 times a single writer's. A head that moves among 100,000: 5 µs in memory and 12 on disk (added later, after the parts had
been measured), the same as among ten but for the copy of what was moved last. What came of it: docs/scheduler.md.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from harness import Figure, median_of, memory_of, microseconds, report
from numpy.typing import NDArray
from sglang_sessions import IMAGE, POSITIONS, REPLY, TOKENS, images, own_table, prompt_ids, request

from sessiontree import MediaItem, Node, Session, SessionStore, media_identity
from tests.sglang_engine import engine, missing

LAST = np.arange(REPLY, dtype=np.int32)
SESSIONS, STEPS = 512, 200
THREADS, APPENDS = 16, 4_000
HEADS = IDLE = 100_000
OPEN, BUDGET = 20_000, 64 * 2**20
NUMBERS = itertools.count()
clock = time.perf_counter_ns


def new_session(name: str = "bench") -> Session:
    return SessionStore.in_memory().create(name, scheme=POSITIONS)


# a turn ------------------------------------------------------------------------------------------------------------------------


class Ours:
    """A session of ours; ``turn`` is the next one: its microseconds."""

    def __init__(self) -> None:
        self.session = new_session()
        self.tip = self.session.root

    def turn(self, image: bool) -> float:
        ids, identity, session = np.array(prompt_ids(image), np.int32), media_identity("png", str(next(NUMBERS))), self.session
        began = clock()
        media = [MediaItem("image", identity, [(101, IMAGE)], grid_thw=(1, 32, 32))] if image else ()
        prompt = session.append(self.tip, ids, media=media)
        new = prompt.input_ids(prompt.start), prompt.positions(prompt.start), prompt.mrope_position_delta
        draft = session.draft(prompt)
        draft.extend(LAST)
        self.tip = draft.commit("length")
        session.set_head("main", self.tip)
        taken = clock() - began
        assert new[1].shape == (3, len(new[0]))
        return taken / 1000


class Theirs:
    """The same of SGLang's own session, streaming or regular."""

    def __init__(self, streaming: bool) -> None:
        messages = engine("sglang.srt.managers.io_struct")
        self.controller = engine("sglang.srt.session.session_controller").SessionController(None)
        self.controller.open(messages.OpenSessionReqInput(capacity_of_str_len=0, session_id="s", streaming=streaming))
        self.session = self.controller.get("s")
        self.rid: str | None = None
        self.table = own_table()
        self.held = 0  # tokens that have KV
        utils = engine("sglang.srt.managers.mm_utils")
        self.pad = partial(utils.duplicate_pad_mm_input_ids, pad_input_ids_func=utils.pad_mm_tokens)

    def turn(self, image: bool) -> float:
        inputs, streaming = images([101], self.table) if image else None, self.session.streaming
        given, reply = request("s", prompt_ids(image), None if streaming else self.rid, inputs), array("q", range(REPLY))
        began = clock()
        made = self.session.create_req(given, None, 200_000)
        if inputs is not None:
            self.controller.adjust_mm_offsets(given, made, inputs)
            made.origin_input_ids = self.pad(made.origin_input_ids, inputs)
            made.extend_image_inputs(inputs)
        made.init_next_round_input()
        made.extend_end = len(made.full_untruncated_fill_ids)
        new = made.get_fill_ids()[self.held :]
        if inputs is not None:
            made.multimodal_inputs.mrope_positions[:, self.held : made.extend_end].contiguous()
        made.output_ids.extend(reply)
        made.update_finish_state(REPLY)
        made.refresh_fill_ids()
        if streaming:
            self.session.finish_req(made)
        taken = clock() - began
        assert made.finished() and made.to_finish is None and len(new) == TOKENS - REPLY
        self.held += TOKENS
        self.rid = made.rid
        return taken / 1000


def at_turn(session: Ours | Theirs, image: bool, depth: int) -> float:
    """Microseconds of the turns from there on, in a session that goes through all before: the least of five medians of five."""
    for _ in range(depth):
        session.turn(image)
    return min(statistics.median(session.turn(image) for _ in range(5)) for _ in range(5))


def turns() -> Iterator[Figure]:
    if reason := missing():
        print(f"not measured beside SGLang: {reason}")
    for image in (True, False):
        kind = "a turn with an image" if image else "a text turn"
        # The regular one first: it keeps all that it ever made, so its arrays are in memory that is new to the process, and not in
        # what a streaming one has let go of.
        for streaming, depth, bar in ((False, 300, 200), (True, 1_000, 150)):
            ours = at_turn(Ours(), image, depth)
            if reason:
                yield Figure(f"{kind}, turn {depth:,}", ours, "µs")
                continue
            theirs = at_turn(Theirs(streaming), image, depth)
            gc.collect()  # its requests and session name each other
            name = f"{kind}, turn {depth:,}: SGLang's {'streaming' if streaming else 'regular'} session over ours"
            yield Figure(name, theirs / ours, "x", bar if image else None, "higher", {"SGLang, µs": theirs}, f"ours {ours:.0f} µs")


def memory() -> Iterator[Figure]:
    def after(session: Ours | Theirs, depth: int) -> float:
        def go_through() -> None:
            for _ in range(depth):
                session.turn(False)

        return memory_of(go_through)[0] / depth / TOKENS

    peers = {}
    if not missing():
        peers = {f"SGLang regular at turn {depth}": after(Theirs(False), depth) for depth in (100, 200)}
        peers["SGLang streaming"] = after(Theirs(True), 1_000)
        gc.collect()
    ours = Ours()
    allocated = after(ours, 1_000)
    room = len(ours.tip._extent.buffer) / ours.tip.stop - LAST.itemsize
    note = f"tracemalloc, without {room:.2f} B of room for more, which nothing was written to; regular: 12 B more with every turn"
    yield Figure("live memory at turn 1,000, text, per token", allocated - room, "B", 5.5, peers=peers, note=note)


# a step ------------------------------------------------------------------------------------------------------------------------


def step_times(store: SessionStore, sessions: list[Session], steps: int, *, heads: bool) -> NDArray[np.float64]:
    """Milliseconds of each of some steps in which a draft of each session commits; ``heads``: and a head moves to it."""
    rng = np.random.default_rng(0)
    tips = [session.append(session.root, np.full(256, number, np.int32)) for number, session in enumerate(sessions)]
    one = sessions[0] is sessions[1]
    taken = np.empty(steps)
    for step in range(steps):
        drafts = [session.draft(tip) for session, tip in zip(sessions, tips, strict=True)]
        for draft, length in zip(drafts, rng.integers(1, 129, len(drafts)).tolist(), strict=True):
            draft.extend(rng.integers(0, 150_000, length, np.int32))
        began = clock()
        nodes = [draft.commit("stop") for draft in drafts]
        if heads:
            for session, node in zip(sessions, nodes, strict=True):
                session.set_head("main", node)
        taken[step] = (clock() - began) / 1e6
        if not one:
            tips = [session.append(node, np.full(64, step, np.int32)) for session, node in zip(sessions, nodes, strict=True)]
    store.flush()
    return taken


@contextmanager
def no_full_collections() -> Iterator[None]:
    """Python's garbage collector as schedulers have it: what is there is frozen, and full collections are for idle times."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(before[0], before[1], 2**30)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def steps(folder: Path) -> Iterator[Figure]:
    for name, count, heads in (
        ("512 drafts of 512 sessions commit", SESSIONS, False),
        ("512 drafts of 512 sessions commit and heads move", SESSIONS, True),
        ("512 drafts of one session commit", 1, False),
    ):
        with no_full_collections(), SessionStore.open(folder / f"steps{count}{heads}") as store:
            made = [store.create(f"s{number}", scheme=POSITIONS) for number in range(count)]
            taken = step_times(store, made * (SESSIONS // count), STEPS, heads=heads)
        first = count == SESSIONS and not heads
        median = float(np.median(taken.reshape(5, -1), axis=1).min())
        note = f"the least of five medians; p99 of all {np.percentile(taken, 99):.1f} ms"
        yield Figure(f"a step in which {name}, on disk (group), median", median, "ms", 8 if first else None, note=note)
        yield Figure(
            f"a step in which {name}, on disk (group), longest of {STEPS}", float(taken.max()), "ms", 20 if first else None
        )


# threads -----------------------------------------------------------------------------------------------------------------------


def together(work: Callable[[int], None], count: int) -> float:
    """Seconds that threads take, each for the work of its number."""
    workers = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - began


def rate(store: SessionStore, threads: int) -> float:
    """Appends a second of 16 tokens to 16 sessions, each to its tip, by so many threads; on disk until all of them are there."""
    sessions = [store.create(f"{next(NUMBERS)}", scheme=POSITIONS) for _ in range(THREADS)]
    ids = np.arange(16, dtype=np.int32)

    def grow(number: int) -> None:
        mine = sessions[number::threads]
        tips = [session.root for session in mine]
        for _ in range(APPENDS):
            for at, session in enumerate(mine):
                tips[at] = session.append(tips[at], ids)

    taken = together(grow, threads)
    began = time.perf_counter()
    store.flush()
    taken += time.perf_counter() - began
    for session in sessions:
        session.close()
    return THREADS * APPENDS / taken


def stores(folder: Path) -> Iterator[tuple[str, SessionStore]]:
    """One in memory, and one on disk: each open until the next is asked for."""
    with SessionStore.in_memory() as store:
        yield "in memory", store
    with SessionStore.open(folder) as store:
        yield "on disk (group)", store


def threads(folder: Path) -> Iterator[Figure]:
    for name, store in stores(folder / "threads"):
        rate(store, 1)
        pairs = [(rate(store, THREADS), rate(store, 1)) for _ in range(5)]
        many, one = np.median(pairs, axis=0).tolist()
        figure = f"16 threads appending to 16 sessions over one thread, {name}"
        yield Figure(figure, many / one, "x", 0.9, "higher", {"one thread, 1/s": one}, f"{many:,.0f}/s in sum, 16 tokens each")


def at_once(session: Session, parents: list[Node], count: int, rounds: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Microseconds of appends by so many threads that begin together: of each by itself, and until the last of them is done."""
    began = 0
    ends, own = np.empty((rounds, count)), np.empty((rounds, count))
    starts = np.empty(rounds)

    def start() -> None:
        nonlocal began
        began = clock()

    barrier, over = threading.Barrier(count, start), threading.Barrier(count)

    def work(number: int) -> None:
        for turn in range(rounds):
            ids = np.full(16, next(NUMBERS), np.int32)
            parent = parents[(turn * count + number) % len(parents)]
            barrier.wait()
            first = clock()
            session.append(parent, ids)
            last = clock()
            own[turn, number], ends[turn, number], starts[turn] = last - first, last, began
            over.wait()

    together(work, count)
    return own.ravel() / 1000, (ends.max(axis=1) - starts) / 1000


def crowd(folder: Path) -> Iterator[Figure]:
    for name, store in stores(folder / "crowd"):
        session = store.create("bench", scheme=POSITIONS)
        nodes = [session.root]
        for number in range(10_000):
            nodes.append(session.append(nodes[-1], np.full(16, number, np.int32)))
        at_once(session, nodes, 1, 500)
        single, _ = at_once(session, nodes, 1, 4_000)
        many, last = at_once(session, nodes, 20, 200)
        one, crowded = float(np.percentile(single, 99)), float(np.percentile(many, 99))
        medians = f"median {np.median(many):.1f} beside {np.median(single):.1f}, the last of 20 done after {np.median(last):,.0f}"
        figure = f"20 appends at once on a session of 10,000 nodes, {name}: p99 over a single writer's"
        yield Figure(figure, crowded / one, "x", 10, peers={"single, p99, µs": one}, note=f"p99 {crowded:.0f} µs, {medians}")


# heads --------------------------------------------------------------------------------------------------------------------------


def heads(folder: Path) -> Iterator[Figure]:
    for where, store in stores(folder / "heads"):
        for count in (10, HEADS):
            session = store.create(f"{count}", scheme=POSITIONS)
            nodes = [session.append(session.root, [number]) for number in range(10)]
            for number in range(count):
                session.set_head(f"head {number}", nodes[0])
            store.flush()
            moves = zip(np.random.default_rng(0).permutation(10_000) % count, itertools.cycle(nodes), strict=False)

            def move(session: Session = session, moves: Iterator[tuple[int, Node]] = moves) -> None:
                number, node = next(moves)
                session.set_head(f"head {number}", node)

            with no_full_collections():
                taken = microseconds(move, 10_000)
            many = count == HEADS
            note = f"mean {taken.mean():.1f}, longest {taken.max() / 1000:.1f} ms"
            name = f"one of {count:,} heads, {where}"
            yield Figure(f"set_head of {name}, median", float(np.median(taken)), "µs", 30 if many else None, note=note)
            looked = median_of(lambda session=session: "none" in session.heads, 1_000, each=10)  # type: ignore[misc]
            yield Figure(f"a name looked for in session.heads of {count:,}, {where}", looked, "µs", 5 if many else None)


# time -----------------------------------------------------------------------------------------------------------------------------


def ticks(folder: Path) -> Iterator[Figure]:
    """What a scheduler pays to tell the time, when few of its sessions were used and none lay idle for too long."""
    with SessionStore.in_memory(idle_ttl=3600.0, draft_ttl=60.0) as store:
        made = [store.create(f"{number}", scheme="text@hf5") for number in range(OPEN)]
        for session in made:
            session.append(session.root, [1, 2, 3])
        drafts = [session.draft(session.root) for session in made[:SESSIONS]]
        now = itertools.count()
        for _ in range(2):
            store.tick(next(now))
        taken = []
        for turn in range(50):
            for session, draft in zip(made, drafts, strict=False):
                session.set_head("main", session.append(session.root, [turn + 10]))
                draft.extend([turn])
            began = clock()
            assert store.tick(next(now)) == ()
            taken.append((clock() - began) / 1e6)
        name = f"tick of a store with {OPEN:,} sessions open, {SESSIONS} of them used since, each with a draft"
        yield Figure(name, statistics.median(taken), "ms", note=f"longest {max(taken):.1f} ms")
    with no_full_collections(), SessionStore.open(folder / "ticks", memory_bytes=BUDGET, idle_ttl=3600.0) as store:
        ids, taken = np.arange(200, dtype=np.int32), []
        for turn in range(400):
            for number in range(50):
                session = store.create(f"{turn} {number}", scheme="text@hf5")
                session.append(session.root, ids)
            del session
            began = clock()
            store.tick(turn)
            taken.append((clock() - began) / 1e6)
        usage = store.usage()
        assert 0 < usage.asleep_sessions < usage.sessions == 20_000
        name = f"tick of a store with {usage.sessions:,} sessions at its budget: 50 came, and 50 go"
        note = f"{usage.sessions - usage.asleep_sessions:,} awake; longest {max(taken[-100:]):.1f} ms; waits for the disk"
        yield Figure(name, statistics.median(taken[-100:]), "ms", note=note)


# idle sessions -----------------------------------------------------------------------------------------------------------------


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def idle(folder: Path) -> dict[str, float]:
    """In a process of its own: sessions of a turn or two, evicted 1,000 at a time, and some of them asked for again."""
    with SessionStore.open(folder / "idle") as store:
        gc.collect()
        before = resident()
        ids = np.arange(64, dtype=np.int32)
        evicting = 0.0
        for number in range(IDLE):
            ids[0] = number
            session = store.create(f"session-{number}", scheme="text@hf5")
            node = session.append(session.root, ids)
            if number % 2:
                node = session.append(node, ids[:16])
            session.set_head("main", node)
            if number % 1000 == 999:
                del session, node
                began = time.perf_counter()
                store.evict()
                evicting += time.perf_counter() - began
        asleep = resident() - before
        back = []
        for number in np.random.default_rng(0).choice(IDLE, 200, replace=False).tolist():
            began = time.perf_counter()
            found = store.get(f"session-{number}").head("main").node.input_ids()
            back.append(time.perf_counter() - began)
            assert found[0] == number and len(found) == (80 if number % 2 else 64)
        on, in_hand, before = [], [], resident()
        for number in np.random.default_rng(1).choice(IDLE, 200, replace=False).tolist():
            began = time.perf_counter()
            session = store.get(f"session-{number}")
            session.append(session.head("main").node, ids)
            on.append(time.perf_counter() - began)
            in_hand.append(session)
        each = (resident() - before) / len(in_hand)
    size = sum(file.stat().st_size for file in (folder / "idle").rglob("*") if file.is_file())
    return {
        "asleep": asleep / 1e6,
        "evicting": evicting,
        "first": back[0] * 1000,
        "back": statistics.median(back) * 1000,
        "longest": max(back) * 1000,
        "on": statistics.median(on) * 1000,
        "longest on": max(on) * 1000,
        "in hand": each / 1000,
        "disk": size / IDLE,
    }


def idle_sessions(folder: Path) -> Iterator[Figure]:
    if not Path("/proc/self/statm").exists():
        print("idle sessions are not measured: there is no /proc to ask for resident memory")
        return
    ran = subprocess.run([sys.executable, __file__, "--idle", folder], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    name = f"{IDLE:,} idle sessions"
    note = "resident memory of the process over what it was with an empty store"
    yield Figure(f"{name} evicted to disk: memory", found["asleep"], "MB", 60, note=note)
    yield Figure(f"{name}: one of them back, its path read", found["back"], "ms", 5, note=f"the first {found['first']:.1f} ms")
    yield Figure(f"{name}: the longest of 200 to come back", found["longest"], "ms")
    yield Figure(
        f"{name}: one of them back and gone on with, 200 in turn",
        found["on"],
        "ms",
        note=f"the longest {found['longest on']:.1f} ms: each has to see what the one before wrote",
    )
    yield Figure(f"{name}: memory of each of the 200 that are in hand then", found["in hand"], "kB", note="resident")
    yield Figure(
        f"{name}: time to evict each", found["evicting"] / IDLE * 1e6, "µs", note="1,000 at a time, what was written synced"
    )
    yield Figure(f"{name}: bytes of each on disk", found["disk"], "B")


def main() -> int:
    if sys.argv[1:2] == ["--idle"]:
        print(json.dumps(idle(Path(sys.argv[2]))))
        return 0
    folder = Path(tempfile.mkdtemp(prefix="sessiontree-bench-", dir=os.environ.get("BENCH_DIR")))
    parts: dict[str, Callable[[], Iterator[Figure]]] = {
        "turns": turns,
        "memory": memory,
        "steps": lambda: steps(folder),
        "threads": lambda: threads(folder),
        "crowd": lambda: crowd(folder),
        "heads": lambda: heads(folder),
        "ticks": lambda: ticks(folder),
        "idle": lambda: idle_sessions(folder),
    }
    try:
        wanted = sys.argv[1].split(",") if len(sys.argv) > 1 else list(parts)
        return int(not report(figure for name in wanted for figure in parts[name]()))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
