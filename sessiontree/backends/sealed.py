"""A backend whose records are sealed: each is followed by its checksum, which is checked when it comes back.

A database gives what its disk gives. A node's id says whether its tokens are right; of positions, metadata, heads, limits and
aliases nothing else would.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from struct import Struct
from typing import Final, Literal

from sessiontree.backends.frames import checksum
from sessiontree.backends.shared import LONG, Backend, Change, Look, NewNode, NewSession, Nodes, Sessions
from sessiontree.errors import CorruptTree

_SEAL: Final = Struct("<I")
_REF: Final = "{!r} in session {}"
_SOUND: Final = 0x2144DF1C  # the crc32 of anything that its own crc32 stands behind, and of nothing else


def seal(record: bytes) -> bytes:
    """A record and its checksum."""
    return record + _SEAL.pack(checksum(record, 0))


def unseal(sealed: bytes, what: str, *of: object) -> bytes:
    """The record. ``what``: what it is of, as a format of ``of``. Raises CorruptTree."""
    if checksum(sealed, 0) != _SOUND:
        raise CorruptTree(f"the record of {what.format(*of)} does not match its checksum")
    return sealed[: -_SEAL.size]


def sealed(backend: Backend) -> Backend:
    """The same backend, with records sealed on the way there and checked on the way back."""
    return backend._replace(sessions=SealedSessions(backend.sessions), nodes=SealedNodes(backend.nodes))


def _sealed_nodes(nodes: Sequence[NewNode]) -> list[NewNode]:
    return [NewNode(row, seal(record)) for row, record in nodes]


def _sealed_refs(refs: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    return {name: seal(record) for name, record in refs.items()}


def _sealed_change(change: Change) -> Change:
    session, before, after, nodes, refs, drops, gone = change
    return Change(session, before, after, _sealed_nodes(nodes), _sealed_refs(refs), drops, gone)


class SealedSessions:
    """See :class:`~sessiontree.backends.shared.Sessions`."""

    def __init__(self, sessions: Sessions) -> None:
        self.inner = sessions
        self.draw: Final = sessions.draw
        self.find: Final = sessions.find
        self.names: Final = sessions.names
        self.tips: Final = sessions.tips
        self.all: Final = sessions.all
        self.remove: Final = sessions.remove

    def create(self, new: NewSession) -> Literal["made", "taken", "dropped"]:
        refs = _sealed_refs(new.refs)
        return self.inner.create(new._replace(record=seal(new.record), nodes=_sealed_nodes(new.nodes), refs=refs))

    def look(self, number: int, since: tuple[int, int, int] | None = None) -> Look | None:
        look = self.inner.look(number, since)
        if look is None:
            return None
        refs = {
            name: record if name[:1] == LONG else unseal(record, _REF, name, number)  # of a beginning nothing is checked yet
            for name, record in look.refs.items()
        }
        return look._replace(record=unseal(look.record, "session {}", number), refs=refs)

    def read_refs(self, number: int, names: Sequence[bytes]) -> Sequence[bytes | None]:
        found = list(self.inner.read_refs(number, names))
        for at, record in enumerate(found):
            if record is not None:
                found[at] = unseal(record, _REF, names[at], number)
        return found

    def commit(self, changes: Sequence[Change]) -> Sequence[bool]:
        return self.inner.commit([_sealed_change(change) for change in changes])

    def named(self, name: bytes) -> bytes | None:
        found = self.inner.named(name)
        return None if found is None else unseal(found, "name {!r}", name)

    def name(self, name: bytes, record: bytes | None, expected: bytes | None, tenant: str | None = None) -> bool:
        to, of = (None if each is None else seal(each) for each in (record, expected))
        return self.inner.name(name, to, of, tenant)

    def all_named(self) -> Mapping[bytes, bytes]:
        return {name: unseal(record, "name {!r}", name) for name, record in self.inner.all_named().items()}


class SealedNodes:
    """See :class:`~sessiontree.backends.shared.Nodes`."""

    def __init__(self, nodes: Nodes) -> None:
        self.inner = nodes

    def read(self, session: int, ordinals: Sequence[int], *, fresh: bool = False) -> Iterator[bytes | None]:
        for ordinal, record in zip(ordinals, self.inner.read(session, ordinals, fresh=fresh), strict=True):
            yield None if record is None else unseal(record, "node {} of session {}", ordinal, session)
