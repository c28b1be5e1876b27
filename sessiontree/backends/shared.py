"""What a store that many processes write needs of a place to keep sessions in: three small protocols.

A session there is a small log under compare-and-append. It has a version; a :class:`Change` says which version it was made for,
and takes effect whole or, where somebody else wrote first, not at all. Whoever was second looks again and does its operation anew
on the tree there is by then. So ordinals and versions mean the same in every process.

All methods may be called by many threads and, each with a backend of its own, by many processes. They raise StoreFailed where
something could not be done, or nobody knows whether it was, after a bounded number of attempts; IncompatibleStore for a place laid
out by another version. What they are given is valid, and what they give back is checked by whoever asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, Protocol

_NOTHING: Final[Mapping[bytes, bytes]] = MappingProxyType({})


def scope_of(tenant: str) -> bytes:
    """What a tenant's rows and blobs are known by: 16 bytes of its name's digest."""
    return sha256(b"tenant " + tenant.encode()).digest()[:16]


class NodeRow(NamedTuple):
    """What is known of a node without reading it.

    ``ordinal``: in its session, from 1. ``parent``: its parent's, 0 for the root. ``id``: 32 bytes. ``key``: the digest of its key,
    below 2**64; 0 without one.
    """

    ordinal: int
    parent: int
    id: bytes
    key: int


class NewNode(NamedTuple):
    """A node and its record."""

    row: NodeRow
    record: bytes


class NewSession(NamedTuple):
    """A session that is not there yet.

    ``number``: drawn before. ``name``: its id, any text without surrogates. ``tenant``: that of its namespace. ``nodes``: what it
    begins with. ``tip``: of a fork, the session and the ordinal of the node whose path it shares, looked at while that session's
    ``drops`` were ``tip_drops``.
    """

    number: int
    name: str
    tenant: str | None
    record: bytes
    nodes: Sequence[NewNode] = ()
    tip: tuple[int, int] | None = None
    tip_drops: int = 0


class Change(NamedTuple):
    """One write to one session: all of it, and only where the session's version is ``before``; ``after`` is it then.

    ``nodes``: theirs are the next ordinals, in order. ``refs``: records by names of 1 to 64 bytes, each in the place of an earlier
    one of that name. ``drops``: the session's ``drops`` grow by one. ``gone``: the session is dropped, and its name is free.
    """

    session: int
    before: int
    after: int
    nodes: Sequence[NewNode] = ()
    refs: Mapping[bytes, bytes] = _NOTHING
    drops: bool = False
    gone: bool = False


class Look(NamedTuple):
    """A session as it is, or what came since an earlier look.

    ``drops``: how often something was dropped from it. ``removals``: how often :meth:`Sessions.remove` took something out of it.
    ``gone``: it was dropped, and is there for the sake of forks. ``whole``: this is all of it. ``nodes``: by ordinal.
    """

    record: bytes
    version: int
    drops: int
    removals: int
    gone: bool
    whole: bool
    nodes: Sequence[NodeRow]
    refs: Mapping[bytes, bytes]


class Removal(NamedTuple):
    """What is taken out of one session: all of it, and only where nothing changed since it was chosen.

    ``version``: the session's, which stays; its ``removals`` grow by one. ``ordinals``: of nodes. ``refs``: names. ``forks``: how
    many sessions there are that have their tip in it. ``whole``: the session itself, which is gone.
    """

    session: int
    version: int
    ordinals: Sequence[int]
    refs: Sequence[bytes]
    forks: int
    whole: bool = False


class Sessions(Protocol):
    """Sessions: which there are, what is known of their nodes, and the refs that move by compare-and-set."""

    def draw(self, count: int) -> Sequence[int]:
        """Numbers from 1 on that were never given before, ascending, below 2**32 - 1."""

    def create(self, new: NewSession) -> Literal["made", "taken", "dropped"]:
        """Make a session, durably; its version is 0.

        "taken": one of that name is there. "dropped": the tip's session has other ``drops`` by now, or is no longer there.
        """

    def find(self, name: str) -> int | None:
        """The number of the session of a name; None where there is none, or it is gone."""

    def names(self) -> Sequence[tuple[int, str]]:
        """Numbers and names of the sessions that are not gone, by number."""

    def look(self, number: int, since: tuple[int, int, int] | None = None) -> Look | None:
        """A session as it is now; None where there is none.

        ``since``: (version, removals, last ordinal) of an earlier look. What came after it is enough then, unless something was
        removed since.
        """

    def commit(self, changes: Sequence[Change]) -> Sequence[bool]:
        """Whether each took effect, durably; each on its own, and of no session are there two. Applied once, whatever happens."""

    def tips(self) -> Sequence[tuple[int, int, int]]:
        """Of each fork, gone or not: its number, that of the session its tip is in, and the tip's ordinal."""

    def all(self) -> Sequence[tuple[int, bool]]:
        """The number of each session, and whether it is gone."""

    def remove(self, removal: Removal) -> bool:
        """Whether it took effect."""

    def named(self, name: bytes) -> bytes | None:
        """What a name of 1 to 64 bytes stands for in the whole store."""

    def name(self, name: bytes, record: bytes | None, expected: bytes | None, tenant: str | None = None) -> bool:
        """Have it stand for a record where it stands for ``expected`` (None, each: for nothing); whether it did.

        ``tenant``: whose it is, from a backend of all tenants; from that of one it is that one's.
        """

    def all_named(self) -> Mapping[bytes, bytes]:
        """Every such name."""


class Nodes(Protocol):
    """Records of nodes. They never change, so a copy anywhere is as good.

    But once the last nodes of a session were removed, others come under their ordinals, and a copy that lags has the old ones:
    whoever finds that it was given another node asks again for what is ``fresh``.
    """

    def read(self, session: int, ordinals: Sequence[int], *, fresh: bool = False) -> Iterable[bytes | None]:
        """Records in that order, asked for at once; None for one that is not there. ``fresh``: none comes from a copy.

        They may be taken as they come: whoever asks for other things meanwhile makes a list of them first.
        """


class Blobs(Protocol):
    """Bytes under names that say what they are: written once."""

    def put(self, name: str, data: bytes) -> bool:
        """Whether it is new; what is there stays."""

    def get(self, name: str) -> bytes | None: ...

    def names(self, prefix: str = "") -> Iterable[tuple[str, float]]:
        """Names that begin so, and for how many seconds each has been there, as the server counts them."""

    def delete(self, names: Iterable[str]) -> int:
        """How many of them were there."""


class Backend(NamedTuple):
    """All of a place. ``where``: what messages call it. ``blobs``: None where features of media are not kept.

    ``close``: called once. Where it was connected to for one tenant, so is the store over it.
    """

    where: str
    sessions: Sessions
    nodes: Nodes
    blobs: Blobs | None
    close: Callable[[], None]
