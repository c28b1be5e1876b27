"""Whether records are what they say, one segment at a time; here, or in helper processes where there is much to check.

What a check needs to know of other segments comes with the task: ids of parents, and schemes. So any process can do any of them.
A helper is a Python of its own that is told what to do over pipes, not a fork and not a second run of a caller's main module; where
one cannot be had, fails, or does not know a scheme, its tasks are done here.
"""

from __future__ import annotations

import os
import pickle
import select
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from sessiontree import codec
from sessiontree.annotations import OfTokens
from sessiontree.backends import blobs
from sessiontree.backends.frames import CHUNK, ENTRY, Window, is_sound
from sessiontree.backends.system import System
from sessiontree.errors import CorruptTree, SessionTreeError, StoreFailed
from sessiontree.positions import PositionScheme, scheme
from sessiontree.tokens import TOKEN_BYTES

_HELPER: Final = "from sessiontree.fsck.checks import serve; serve()"


class Moved(StoreFailed):
    """What was read is not there any more: a writer took it back, or moved it."""

    def __init__(self, path: str, offset: int) -> None:
        super().__init__(f"{path}, offset {offset}: a record that was read is there no more; try again")


class Task(NamedTuple):
    """Records of one segment to check. ``above``: of each, its parent's id, if it is a node and that is known."""

    path: str
    seed: int
    rows: npt.NDArray[np.void]
    above: list[bytes | None]
    rules: dict[int, PositionScheme]  # of sessions, as far as they are known
    files: bool  # whether names of files of features are asked for


class Checked(NamedTuple):
    """What was found. Indexes are those of the task's rows; ``starts``, ``stops``: tokens before a node and up to its end, or 0."""

    starts: bytes
    stops: bytes
    bad: dict[int, str]
    others: dict[int, bytes]  # records that are neither nodes nor annotations
    said: dict[int, tuple[bytes, str, int, int]]  # of annotations: the node's id, the name, where its tokens end, the version
    identities: set[bytes]  # of media
    contents: set[str]  # names of the files that these have, or would have


def check(task: Task, system: Any, tell: Callable[[int], None] | None = None) -> Checked:
    """Check nodes: their encoding, their digests, that their positions are those of their session; and annotations.

    Raises Moved, OSError.
    """
    rows, rules, seed = task.rows, task.rules, task.seed
    starts, stops = np.zeros((2, len(rows)), np.int64)
    made = Checked(b"", b"", {}, {}, {}, set(), set())
    told = 0
    fields = (rows[name].tolist() for name in ("kind", "session", "offset", "length", "crc"))
    fd = system.open(task.path, os.O_RDONLY)
    try:
        window = Window(system, fd)
        for at, (kind, session, offset, length, crc, above) in enumerate(zip(*fields, task.above, strict=True)):
            record = window.get(offset, length)
            if not is_sound(record, length, crc, seed):
                raise Moved(task.path, offset)
            if tell is not None and offset >= told:
                tell(offset)
                told = offset + CHUNK
            if kind not in (codec.NODE, codec.ANNOTATION):
                made.others[at] = record
                continue
            try:
                if kind == codec.ANNOTATION:
                    said = codec.decode(record)
                    assert isinstance(said, codec.AnnotationRecord)
                    end = said.value.stop if isinstance(said.value, OfTokens) else 0
                    made.said[at] = said.node_id, said.name, end, said.version
                    continue
                node = codec.decode(record)
                assert isinstance(node, codec.NodeRecord)
                stop = node.state.num_tokens
                start = stop - len(node.data) // TOKEN_BYTES
                starts[at], stops[at] = start, stop
                if above is not None:
                    codec.check_digest(node, above)
                if session in rules:
                    codec.check_positions(node, start, rules[session])
            except CorruptTree as error:
                made.bad[at] = str(error)
                continue
            for item in node.media:
                made.identities.add(item.identity)
                if task.files:
                    made.contents.add(blobs.file_name(item.content()))
    finally:
        system.close(fd)
    return made._replace(starts=starts.tobytes(), stops=stops.tobytes())


# elsewhere ------------------------------------------------------------------------------------------------------------------


def serve() -> None:
    """What a helper does: check what it is sent, as long as there is something."""
    system = System()
    with suppress(EOFError, BrokenPipeError):
        while True:
            path, seed, rows, above, named, files = pickle.load(sys.stdin.buffer)
            try:
                rules = {session: scheme(name, **params) for session, (name, params) in named.items()}
                answer = check(Task(path, seed, np.frombuffer(rows, ENTRY), above, rules, files), system)
            except (SessionTreeError, OSError):  # whoever asked does it, and sees what is wrong
                answer = None
            pickle.dump(answer, sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)
            sys.stdout.buffer.flush()


class _Helper:
    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _HELPER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # an interrupt from the terminal is for this process
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout

    def send(self, task: Task) -> bool:
        named = {session: (rules.name, dict(rules.params)) for session, rules in task.rules.items()}
        try:
            told = (task.path, task.seed, task.rows.tobytes(), task.above, named, task.files)
            pickle.dump(told, self._to, pickle.HIGHEST_PROTOCOL)
            self._to.flush()
        except OSError:
            return False
        return True

    def answers(self, seconds: float | None) -> bool:
        """Whether it has something to say, within so many seconds."""
        return bool(select.select([self._from], [], [], seconds)[0])

    def receive(self) -> Checked | None:
        try:
            answer: Checked | None = pickle.load(self._from)
        except (EOFError, OSError, pickle.UnpicklingError):
            return None
        return answer

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


class Checks:
    """Does tasks, here and in so many helpers, and hands on what is found in the order of the tasks."""

    def __init__(self, system: Any, helpers: int, take: Callable[[Any, Checked], None]) -> None:
        self._system = system
        self._take = take
        self._idle: list[_Helper] = []
        self._all: list[_Helper] = []
        self._open: deque[list[Any]] = deque()  # [what the task is called, task, helper or None, what was found or None]
        for _ in range(helpers if sys.executable else 0):
            with suppress(OSError):
                self._all.append(_Helper())
        self._idle += self._all

    def do(self, name: Any, task: Task, tell: Callable[[int], None]) -> None:
        """Do a task, or have it done meanwhile."""
        self._collect(0)
        while self._idle:
            helper = self._idle.pop()
            if helper.send(task):
                self._open.append([name, task, helper, None])
                return
        self._open.append([name, task, None, check(task, self._system, tell)])
        self._collect(0)

    def finish(self) -> None:
        """Wait for everything."""
        self._collect(None)

    def stop(self) -> None:
        for helper in self._all:
            helper.stop()

    def _collect(self, seconds: float | None) -> None:
        for entry in self._open:
            _, task, helper, found = entry
            if found is None and helper.answers(seconds):
                entry[3] = helper.receive()
                if entry[3] is None:  # never asked again
                    entry[3] = check(task, self._system)
                else:
                    self._idle.append(helper)
        while self._open and self._open[0][3] is not None:
            name, _, _, found = self._open.popleft()
            self._take(name, found)
