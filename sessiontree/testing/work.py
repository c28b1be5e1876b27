"""What the other processes of a test do. Each function is run by :func:`sessiontree.testing.together.process`."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from sessiontree import HeadMoved, SessionExists, SessionStore, TokenValues
from sessiontree.testing.together import Line

Opener = Callable[[], SessionStore]


def write(line: Line, opener: Opener, session_id: str, count: int, flushes: bool) -> None:
    """Append turn after turn, moving a head along; tell of each, (number, id), once it is acknowledged. End and close nothing."""
    store = opener()
    session = store.get(session_id)
    node = session.root
    for number in range(count):
        node = session.append(node, [number, number % 7])
        session.set_head("main", node)
        if flushes:
            store.flush()
        line.tell((number, node.id))
    os._exit(0)


def read(line: Line, opener: Opener, session_id: str) -> list[bytes]:
    """Open the store, and say which nodes are in a session."""
    with opener() as store:
        return [node.id for node in store.get(session_id).tree]


def open_first_and_append(line: Line, number: int, opener: Opener, count: int) -> list[bytes]:
    """Open a store at the same moment as others do, and append to a session of this process's own: the ids."""
    line.wait()
    with opener() as store:
        session = store.create(f"of process {number}", scheme="text@hf5")
        node, ids = session.root, []
        for turn in range(count):
            node = session.append(node, [number, turn])
            ids.append(node.id)
        store.flush()
        return ids


def create_all(line: Line, number: int, opener: Opener, names: list[str]) -> list[str]:
    """Create sessions that others create as well: those that were made here."""
    made = []
    with opener() as store:
        line.wait()
        for name in names:
            with suppress(SessionExists):
                made.append(store.create(name, scheme="text@hf5").id)
    return made


def append_to_one(line: Line, number: int, opener: Opener, session_id: str, parent: bytes, count: int) -> list[bytes]:
    """Append children to a node that others append to as well: the ids."""
    with opener() as store:
        session = store.get(session_id)
        line.wait()
        ids = [session.append(parent, [number, turn]).id for turn in range(count)]
        store.flush()
        return ids


def count_up(line: Line, number: int, opener: Opener, session_id: str, times: int) -> int:
    """Move one head ``times`` times to a new child of where it is, by compare-and-set: how often somebody else was first."""
    lost = 0
    with opener() as store:
        session = store.get(session_id)
        line.wait()
        for turn in range(times):
            head = session.head("main")
            while True:
                node = session.append(head.node, [number, turn])
                try:
                    session.set_head("main", node, expected=head)
                    break
                except HeadMoved as moved:
                    lost += 1
                    head = moved.actual
        store.flush()
    return lost


def annotate_token_by_token(line: Line, number: int, opener: Opener, session_id: str, node: bytes, count: int) -> None:
    """Say something of tokens ``[number * count, (number + 1) * count)`` of a node, one after the other."""
    with opener() as store:
        session = store.get(session_id)
        line.wait()
        for at in range(count):
            token = number * count + at
            session.annotate(node, {"logprobs": TokenValues([float(token)], start=token), f"by {number}": at})
