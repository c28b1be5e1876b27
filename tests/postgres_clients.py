"""Clients of a store that many processes write: each is a process that does things at random, and says so in a file of its own.

A line is written before each call and another when it has returned, each by one call of the system, so a client that is killed
leaves its last call open and nothing else. Times are of the clock that all processes of a machine share, in nanoseconds.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from sessiontree import (
    Head,
    HeadMoved,
    KeyTaken,
    MediaItem,
    Node,
    Session,
    SessionStore,
    SessionTreeError,
    StoreFailed,
    UnknownHead,
)
from sessiontree.backends.shared import Backend
from sessiontree.positions import PositionScheme, scheme

ROOTS: Final = ("a", "b", "c")  # sessions that are there from the start
NAMES: Final = ("main", "side")
ALIASES: Final = 6
IMAGE: Final = 101
IMAGE_TOKENS: Final = 4
_KNOWN: Final = 40  # nodes of a session that a client remembers
_FORKS: Final = 12  # that a client makes
_IMPATIENT: Final = 3.0  # seconds after which some clients take a server for lost


def rules() -> PositionScheme:
    tokens: dict[str, Any] = {"image_token_id": IMAGE, "video_token_id": 102, "vision_start_token_id": 100}
    return scheme("qwen2_5_vl@sglang", **tokens, tokens_per_second=2)


def image(number: int, at: int) -> MediaItem:
    """One of a few, its placeholders from token ``at`` on."""
    identity = hashlib.sha256(b"image %d" % number).digest()
    return MediaItem("image", identity, [(at, IMAGE_TOKENS)], grid_thw=(1, 4, 4))


def media_of(image_number: int | None, tokens: Sequence[int]) -> list[MediaItem]:
    return [] if image_number is None else [image(image_number, tokens.index(IMAGE))]


def place(head: Head | None) -> tuple[str, int] | None:
    return None if head is None else (head.node.id.hex(), head.version)


def nodes_of(session: Session) -> list[Node]:
    """All of a session, in commit order."""
    return list(session.descendants(session.root))


class Client:
    """What one client does with a store. ``number``: its own; the first one drops things. ``log``: a file to be added to."""

    def __init__(self, store: SessionStore, log: Path, number: int, seed: str) -> None:
        self.store = store
        self.number = number
        self.rng = random.Random(seed)
        self.name = log.stem  # of this life
        self.calls = 0
        self.forks: list[str] = []  # that are there
        self.forked = 0
        self.sessions: dict[str, Session] = {}
        self.ids: list[str] = list(ROOTS)
        self.known: dict[str, list[bytes]] = {}
        self.made: dict[str, list[bytes]] = {}  # by this client, nobody else's, to drop or pin
        self.heads: dict[tuple[str, str], list[Head | None]] = {}
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def close(self) -> None:
        os.close(self._log)

    def call(self, kind: str, what: Callable[[], Any], **given: Any) -> Any:
        """Do something and record it. None where it raised."""
        self.calls += 1
        self._say(call=self.calls, made=time.monotonic_ns(), kind=kind, **given)
        try:
            result = what()
        except SessionTreeError as error:
            end = time.monotonic_ns()
            self._say(call=self.calls, returned=end, error=type(error).__name__, said=str(error))
            if type(error).__name__ in ("StaleSession", "UnknownSession") and "session" in given:
                self.sessions.pop(given["session"], None)
            return None
        self._say(call=self.calls, returned=time.monotonic_ns(), result=result)
        return result

    def _say(self, **line: Any) -> None:
        data = json.dumps(line).encode() + b"\n"
        assert os.write(self._log, data) == len(data)

    # What it does

    def step(self) -> None:
        """One thing, at random."""
        rng = self.rng
        session_id = rng.choice(ROOTS) if rng.random() < 0.7 else rng.choice(self.ids)
        session = self.sessions.get(session_id)
        if session is None:
            with suppress(SessionTreeError):
                self.sessions[session_id] = self.store.get(session_id)
            return
        weights = {
            self.read: 16,
            self.append: 26,
            self.generate: 12,
            self.move: 12,
            self.swap: 24,
            self.free: 3,
            self.drop_head: 3,
            self.fork: 2 if self.forked < _FORKS else 0,
            self.pin: 3,
            self.alias: 1,
            self.look_around: 2,
            self.drop: 12 if self.number == 0 else 0,
            self.drop_session: 2 if self.number == 0 and self.forks else 0,
            self.collect: 2 if self.number == 0 else 0,
        }
        rng.choices(list(weights), list(weights.values()))[0](session)

    def node_of(self, session: Session) -> bytes:
        """One that is known, rather a late one."""
        known = self.known.get(session.id, [])
        return self.rng.choice([session.root.id, *known[-8:], *known[-8:], *known[-_KNOWN:]])

    def learn(self, session_id: str, node_id: str) -> None:
        known = self.known.setdefault(session_id, [])
        if (found := bytes.fromhex(node_id)) not in known:
            known.append(found)
            del known[:-_KNOWN]

    def append(self, session: Session) -> None:
        rng, parent = self.rng, self.node_of(session)
        tokens = [rng.randrange(3)] if rng.random() < 0.4 else [self.number, *rng.choices(range(90), k=rng.randint(1, 12))]
        number = rng.randrange(5) if rng.random() < 0.2 else None
        if number is not None:
            tokens += [100, *[IMAGE] * IMAGE_TOKENS, 105]
        key = f"key {rng.randrange(20)}" if rng.random() < 0.2 else None
        alone = len(tokens) > 2 and number is None and key is None  # nobody else makes it
        given: dict[str, Any] = {"parent": parent.hex(), "tokens": tokens, "image": number, "key": key}

        def append() -> str:
            return session.append(parent, tokens, media=media_of(number, tokens), key=key).id.hex()

        self._note(session, self.call("append", append, session=session.id, **given), alone=alone)

    def generate(self, session: Session) -> None:
        parent = self.node_of(session)
        try:
            draft = session.draft(parent)
        except SessionTreeError:
            return
        tokens = self.rng.choices(range(90), k=self.rng.randint(1, 20))
        draft.extend(tokens)
        given = {"parent": parent.hex(), "tokens": tokens, "key": draft.key}

        def commit() -> str:
            return draft.commit("stop").id.hex()

        made = self.call("generate", commit, session=session.id, **given)
        self._note(session, made, alone=True)

    def _note(self, session: Session, node_id: str | None, *, alone: bool) -> None:
        if node_id is not None:
            self.learn(session.id, node_id)
            if alone:
                self.made.setdefault(session.id, []).append(bytes.fromhex(node_id))

    def read(self, session: Session) -> None:
        name, found = self.rng.choice(NAMES), list[Head | None]()

        def read() -> tuple[str, int] | None:
            head: Head | None
            session.refresh()
            try:
                head = session.head(name)
            except UnknownHead:
                head = None
            at = place(head)  # which may read the node, and fail
            found.append(head)
            return at

        self._saw(session, name, found, self.call("read", read, session=session.id, name=name))

    def _saw(self, session: Session, name: str, found: list[Head | None], result: Any) -> None:
        if found:
            self.heads.setdefault((session.id, name), []).append(found[-1])
            del self.heads[session.id, name][:-4]
        if result is not None and result[0] != "moved":
            self.learn(session.id, result[0])

    def move(self, session: Session) -> None:
        name, node, found = self.rng.choice(NAMES), self.node_of(session), list[Head | None]()

        def move() -> tuple[str, int] | None:
            found.append(session.set_head(name, node))
            return place(found[0])

        self._saw(session, name, found, self.call("set", move, session=session.id, name=name, node=node.hex()))

    def swap(self, session: Session) -> None:
        """Compare and set, mostly with what was seen last."""
        name = self.rng.choice(NAMES)
        seen = self.heads.get((session.id, name), [None])
        self._swap(session, name, seen[-1] if self.rng.random() < 0.8 else self.rng.choice(seen))

    def free(self, session: Session) -> None:
        self._swap(session, self.rng.choice(NAMES), None)

    def _swap(self, session: Session, name: str, expected: Head | None) -> None:
        node, found = self.node_of(session), list[Head | None]()

        def swap() -> Any:
            try:
                head = session.set_head(name, node, expected=expected)
            except HeadMoved as error:
                at = place(error.actual)
                found.append(error.actual)
                return "moved", at
            found.append(head)
            return place(head)

        given = {"name": name, "node": node.hex(), "expected": place(expected)}
        self._saw(session, name, found, self.call("cas", swap, session=session.id, **given))

    def drop_head(self, session: Session) -> None:
        name = self.rng.choice(NAMES)

        def drop() -> bool:
            try:
                session.drop_head(name)
            except UnknownHead:
                return False
            return True

        self.call("drop_head", drop, session=session.id, name=name)

    def fork(self, session: Session) -> None:
        """Under a name of its own, or under one that others take too."""
        node = self.node_of(session)
        self.forked += 1
        name = f"fork {self.rng.randrange(8)}" if self.rng.random() < 0.2 else f"fork {self.name} {self.forked}"

        def fork() -> str:
            return self.store.fork(session, node, name).id

        if self.call("fork", fork, session=session.id, node=node.hex(), new=name) is not None:
            self.forks.append(name)
            self.ids.append(name)

    def pin(self, session: Session) -> None:
        """Pin a node of its own that is not, or let one go that is: nobody else does."""
        mine = self.made.get(session.id, [])
        if mine:
            node = self.rng.choice(mine[-20:])
            if node in session.pins:
                self.call("unpin", lambda: session.unpin(node), session=session.id, node=node.hex())
            else:
                self.call("pin", lambda: session.pin(node), session=session.id, node=node.hex())

    def alias(self, session: Session) -> None:
        alias, item = f"alias {self.rng.randrange(ALIASES)}", image(self.rng.randrange(5), 0)

        def name() -> str:
            try:
                return self.store.alias_media(alias, item).hex()
            except KeyTaken as error:
                return error.identity.hex()

        self.call("alias", name, alias=alias, identity=item.identity.hex())

    def look_around(self, session: Session) -> None:
        """Which sessions there are by now."""
        with suppress(SessionTreeError):
            self.ids = list(self.store.sessions())[-40:]

    def drop(self, session: Session) -> None:
        """A node of its own, or one that others make as well."""
        mine = self.made.get(session.id, [])
        node = self.rng.choice(mine[-20:]) if mine and self.rng.random() < 0.5 else self.node_of(session)
        if node != session.root.id:
            self.call("drop", lambda: session.drop(node), session=session.id, node=node.hex())

    def drop_session(self, session: Session) -> None:
        name = self.forks.pop(self.rng.randrange(len(self.forks)))
        if name.count(" ") > 1:  # nobody else takes that name, so it does not come again
            self.call("drop_session", lambda: self.store.drop(name), session=name)

    def collect(self, session: Session) -> None:
        def collect() -> None:
            self.store.gc()

        self.call("gc", collect)


def connected(where: str, number: int) -> SessionStore:
    """A store at a URL; some give up sooner than others."""
    from sessiontree.backends import postgres

    place: str | Backend = postgres.connect(where, seconds=_IMPATIENT) if number % 2 else where
    return SessionStore.connect(place)


def main(where: str, log: str, number: str, until: str) -> None:
    """One client, until a time."""
    logging.getLogger("sessiontree").setLevel(logging.ERROR)  # that a server does not answer is what this is about
    while time.monotonic_ns() < int(until):
        try:
            store = connected(where, int(number))
        except StoreFailed:
            continue  # it tried for a while
        with store:
            client = Client(store, Path(log), int(number), Path(log).stem)
            while time.monotonic_ns() < int(until):
                client.step()
                time.sleep(client.rng.random() / 50)  # or eight of them would have no time for what they wait for
            client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
