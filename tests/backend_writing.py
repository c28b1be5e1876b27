"""Sessions, nodes and looks, as tests of a backend write them and read them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

from sessiontree.backends.shared import Backend, Change, Look, NewNode, NewSession, NodeRow

Connect = Callable[[], Backend]
Since = tuple[int, int, int]


def row_of(ordinal: int, parent: int | None = None, key: int = 0) -> NodeRow:
    return NodeRow(ordinal, ordinal - 1 if parent is None else parent, sha256(b"node %d" % ordinal).digest(), key)


def node(ordinal: int, record: bytes | None = None, key: int = 0) -> NewNode:
    return NewNode(row_of(ordinal, key=key), b"record %d" % ordinal if record is None else record)


def nodes(first: int, last: int, record: bytes | None = None) -> list[NewNode]:
    """Inclusive of both."""
    return [node(ordinal, record) for ordinal in range(first, last + 1)]


def noise(size: int, seed: int = 0) -> bytes:
    """Bytes that nothing makes smaller."""
    return b"".join(sha256(b"%d %d" % (seed, at)).digest() for at in range(size // 32 + 1))[:size]


def made(backend: Backend, name: str, its_nodes: Sequence[NewNode] = (), **more: Any) -> int:
    """The number of a new session."""
    (number,) = backend.sessions.draw(1)
    assert (
        backend.sessions.create(NewSession(number, name, more.pop("tenant", None), b"of " + name.encode(), its_nodes, **more))
        == "made"
    )
    return number


def commit(backend: Backend, change: Change) -> bool:
    (done,) = backend.sessions.commit([change])
    return done


def looked(backend: Backend, number: int, since: Since | None = None) -> Look:
    look = backend.sessions.look(number, since)
    assert look is not None
    assert [row.ordinal for row in look.nodes] == sorted(row.ordinal for row in look.nodes)
    return look._replace(nodes=list(look.nodes), refs=dict(look.refs))


def since_of(look: Look) -> Since:
    return look.version, look.removals, look.nodes[-1].ordinal if look.nodes else 0


def merged(earlier: Look, later: Look) -> Look:
    """All that there is, of what was known and what came since."""
    if later.whole:
        return later
    return later._replace(whole=True, nodes=[*earlier.nodes, *later.nodes], refs={**earlier.refs, **later.refs})
