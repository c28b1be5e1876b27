"""How fast files of other tools go into a store on disk and out again, and what a large one holds in memory.

Expected before the first run: JSON is parsed at 100 MB/s and more, a node is made and written in 25 µs, so messages of 500 bytes
come in at 15 to 20 MB/s, three times the bar, and go out at the same. Measured first, with those: 4 to 5. A node's metadata cost
as much again (frozen, sorted, packed), a turn on its way 30 µs, and each conversation is a session of its own, with a head and
what is said of it: 300 µs. Real messages are longer: ShareGPT's take 161 tokens of a question and 338 of an answer, so these have
such lengths, and short ones are told beside them. An import of what is known looks at each session's mark and opens none.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from harness import Figure, report

from sessiontree import SessionStore
from sessiontree.interchange import export_file, import_file

WORDS = ("session", "tree", "node", "branch", "token", "image", "prompt", "answer", "reply", "model", "cache", "page", "layer")
MEGABYTES = 100
DEEP = 2_565
LONG = 100_000


def text(rng: random.Random, words: int) -> str:
    """So many words on average, half to one and a half times as many."""
    return " ".join(rng.choices(WORDS, k=rng.randrange(words // 2, words + words // 2)))


def chats(path: Path, megabytes: float, asked: int = 120, answered: int = 250) -> None:
    """Conversations of ten messages each, one a line.

    ``asked``, ``answered``: words of each on average; 161 and 338 tokens are what ShareGPT's have in the paper on vLLM.
    """
    rng = random.Random(1)
    with path.open("w") as file:
        while file.tell() < megabytes * 1e6:
            messages = [
                {"role": ("user", "assistant")[at % 2], "content": text(rng, (asked, answered)[at % 2])} for at in range(10)
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def mapping(path: Path, count: int, deep: bool) -> None:
    """A ChatGPT export of one conversation: ``count`` nodes in a line, or each third with another child."""
    nodes: dict[str, Any] = {"0": {"id": "0", "message": None, "parent": None, "children": []}}
    parent = "0"
    for at in range(1, count):
        name = str(at)
        role = ("user", "assistant")[at % 2]
        message = {"id": name, "author": {"role": role}, "content": {"content_type": "text", "parts": [f"message {at}"]}}
        nodes[name] = {"id": name, "message": message, "parent": parent, "children": []}
        nodes[parent]["children"].append(name)
        if deep or at % 3:
            parent = name
    path.write_text(json.dumps([{"title": "deep", "conversation_id": "deep", "mapping": nodes, "current_node": parent}]))


def transcript(path: Path, count: int) -> None:
    """A Claude Code transcript of ``count`` lines."""
    with path.open("w") as file:
        for at in range(count):
            role = ("user", "assistant")[at % 2]
            line = {
                "type": role,
                "uuid": f"u{at}",
                "parentUuid": f"u{at - 1}" if at else None,
                "sessionId": "long",
                "timestamp": "2026-11-01T12:00:00.000Z",
                "isSidechain": False,
                "message": {"role": role, "content": f"line {at}"},
            }
            file.write(json.dumps(line) + "\n")


def seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def peak(store: Path, file: Path) -> float:
    """The most memory that a process ever held which imports a file: MB. (Not ru_maxrss, which knows what its parent held.)"""
    script = (
        "import sys; from sessiontree import SessionStore; from sessiontree.interchange import import_file\n"
        "with SessionStore.open(sys.argv[1]) as store: import_file(store, sys.argv[2], 'openai')\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    found = subprocess.run([sys.executable, "-c", script, str(store), str(file)], check=True, capture_output=True, text=True)
    return int(found.stdout) / 1000


def figures(folder: Path) -> Iterator[Figure]:
    path = folder / "chats.jsonl"
    chats(path, MEGABYTES)
    size = path.stat().st_size / 1e6
    with SessionStore.open(folder / "store") as store:
        taken = seconds(lambda: import_file(store, path, "openai"))
        yield Figure(f"{MEGABYTES} MB of chat messages, imported to disk", size / taken, "MB/s", 5, "higher")
        again = seconds(lambda: import_file(store, path, "openai"))
        yield Figure(
            f"{MEGABYTES} MB of chat messages, imported again: nothing is new",
            size / again,
            "MB/s",
            better="higher",
            note=f"{taken / again:.0f} times faster",
        )
        out = folder / "out.jsonl"
        yield Figure(
            f"{MEGABYTES} MB of chat messages, exported",
            size / seconds(lambda: export_file(store, out, "openai")),
            "MB/s",
            better="higher",
        )
        same = [json.loads(line) for line in out.open()] == [json.loads(line) for line in path.open()]
        yield Figure(f"{MEGABYTES} MB of chat messages: what is exported is what was imported", float(same), "", 1, "higher")
    short = folder / "short.jsonl"
    chats(short, MEGABYTES / 5, asked=60, answered=60)
    with SessionStore.open(folder / "store of short ones") as store:
        taken = seconds(partial(import_file, store, short, "openai"))
    yield Figure(
        f"{MEGABYTES // 5} MB of short ones, 60 words each, imported", short.stat().st_size / 1e6 / taken, "MB/s", better="higher"
    )
    for name, make, form in (
        (f"a ChatGPT export {DEEP:,} nodes deep", partial(mapping, count=DEEP, deep=True), "chatgpt"),
        (f"a ChatGPT export of {LONG:,} nodes with branches", partial(mapping, count=LONG, deep=False), "chatgpt"),
        (f"a Claude Code transcript of {LONG:,} lines", partial(transcript, count=LONG), "claude-code"),
    ):
        file = folder / f"{form}-{name.split()[2]}-{len(name)}.json"
        make(file)
        with SessionStore.open(folder / f"store of {file.name}") as store:
            taken = seconds(partial(import_file, store, file, form))
            target = folder / f"out of {file.name}"
            out_again = seconds(partial(export_file, store, target, form))
        yield Figure(
            f"{name}, imported", taken, "s", note=f"{file.stat().st_size / 1e6 / taken:.1f} MB/s; exported in {out_again:.2f} s"
        )
    small, large = folder / "small.jsonl", folder / "large.jsonl"
    for file, megabytes in ((small, 50), (large, 400)):
        row = json.dumps({"messages": [{"role": "user", "content": "word " * 2000} for _ in range(10)]}) + "\n"
        with file.open("w") as lines:
            for _ in range(int(megabytes * 1e6 / len(row))):
                lines.write(row)
    one, eight = peak(folder / "small", small), peak(folder / "large", large)
    yield Figure("most memory of importing 400 MB over 50 MB", eight / one, "times", note=f"{eight:.0f} MB over {one:.0f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        sys.exit(0 if report(figures(Path(name))) else 1)
