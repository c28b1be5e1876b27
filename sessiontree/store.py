"""The store that holds sessions, in memory or on disk, and what they share. There is no clock in here: time comes in by
:meth:`SessionStore.tick`.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from heapq import heapify, heappop, heappush, nsmallest
from importlib import import_module
from sys import getrefcount
from types import TracebackType
from typing import Any, Final, NamedTuple
from weakref import ref

import numpy as np

from sessiontree import codec, news
from sessiontree.backends.base import Progress
from sessiontree.backends.blob_features import BlobFeatures
from sessiontree.backends.blobs import FeatureFolder
from sessiontree.backends.sealed import sealed
from sessiontree.backends.segment_log import new_identity
from sessiontree.backends.shared import Backend, scope_of
from sessiontree.compaction import GcReport, compact
from sessiontree.draft import NOWHERE, Draft
from sessiontree.errors import (
    IncompatibleStore,
    KeyTaken,
    NeedsExtra,
    NodeHeld,
    OutOfRange,
    SessionExists,
    SessionTreeError,
    StoreClosed,
    StoreFailed,
    UnknownAlias,
    UnknownSession,
    Unsupported,
)
from sessiontree.events import DEFAULT_CAPACITY, Event, Feed, Kind, Sink, Subscription, checked_capacity, checked_kinds
from sessiontree.features import DEFAULT_BUDGET as DEFAULT_FEATURE_BYTES
from sessiontree.features import Features, FeatureStore
from sessiontree.frozen import checked_text
from sessiontree.handover import unpacked
from sessiontree.journal import Durability, Journal, Overtaken, WriteLost
from sessiontree.locks import begin_anew_in_children, new_lock
from sessiontree.media import MediaItem
from sessiontree.memory import HeldNodes
from sessiontree.node import Namespace, Node
from sessiontree.positions import PositionScheme
from sessiontree.positions import scheme as scheme_named
from sessiontree.session import Session, check_may_wait
from sessiontree.shared_gc import collect
from sessiontree.shared_journal import SharedJournal
from sessiontree.sleepers import Sleeper, Sleepers
from sessiontree.tokens import PathCache, as_index, in_range
from sessiontree.tree import DEFAULT_PATH_CACHE_BYTES, SessionTree, limits_of, lineage_of, new_tree

__all__ = ["Session", "SessionStore"]

_logger = logging.getLogger(__name__)

MAX_SESSION_ID: Final = 512
_URLS: Final = ("postgresql://", "postgres://")
_ALONE: Final = 5  # references to a session that the store holds, and looks at; whoever holds more of them has it awake
_OLDEST: Final = 1024  # sessions at least that are put in the order of their use together
_AT_ONCE: Final = 256  # sessions that gc looks at before others can be opened, and evict before it asks what is held


class Usage(NamedTuple):
    """What a store holds in memory. Bytes are those really held, each beside its budget.

    ``sessions``: those that are open, ``asleep_sessions`` of which were evicted and wait on disk. ``node_bytes``: sessions, their
    nodes, tokens and annotations, and what finds them. ``draft_bytes``: open drafts. ``index_bytes``: what finds sessions and
    records on disk, and records that wait for it.
    """

    sessions: int
    feature_bytes: int
    feature_budget_bytes: int
    path_cache_bytes: int
    path_cache_budget_bytes: int
    asleep_sessions: int = 0
    node_bytes: int = 0
    draft_bytes: int = 0
    index_bytes: int = 0
    memory_budget_bytes: int | None = None

    @property
    def memory_bytes(self) -> int:
        """All of it."""
        return self.feature_bytes + self.path_cache_bytes + self.node_bytes + self.draft_bytes + self.index_bytes


class Evicted(NamedTuple):
    """What :meth:`SessionStore.evict` let go of.

    ``before``, ``after``: ``memory_bytes`` of the store's :class:`Usage`. ``feature_bytes``, ``path_cache_bytes``: those that went.
    ``sessions``: ids of those whose nodes went, the least recently used first.
    """

    before: int
    after: int
    feature_bytes: int
    path_cache_bytes: int
    sessions: tuple[str, ...]


class SessionStore:
    """Sessions by id, and what they share: features of media, whole paths of forks, aliases.

    Make one with :meth:`in_memory`, or with :meth:`open` for one on disk.
    """

    def __init__(
        self,
        *,
        feature_bytes: int = DEFAULT_FEATURE_BYTES,
        path_cache_bytes: int = DEFAULT_PATH_CACHE_BYTES,
        idle_ttl: float | None = None,
        draft_ttl: float | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        for what, ttl in (("idle_ttl", idle_ttl), ("draft_ttl", draft_ttl)):
            if ttl is not None and not _time(ttl, what) > 0:
                raise OutOfRange(f"{what} is {ttl}, not above 0", value=ttl, limit=0)
        self._lock = new_lock()
        self._feed = Feed()
        self._sessions: dict[str, Session] = {}
        self._opened = 0
        self._closed = False
        self._features = FeatureStore(feature_bytes)
        self._paths = PathCache(path_cache_bytes)
        self._aliases: dict[tuple[Namespace, str], bytes | None] = {}  # None: dropped, whatever the disk said
        self._idle_ttl = idle_ttl
        self._draft_ttl = draft_ttl
        self._own_identity: bytes | None = None
        self._memory_bytes = None if memory_bytes is None else in_range(memory_bytes, sys.maxsize, "memory_bytes", "a store")
        self._now = -math.inf
        self._asleep = Sleepers()
        self._survivors: dict[int, Sequence[tuple[int, ref[Node]]]] = {}  # of those asleep, nodes that somebody held
        self._fresh: dict[str, Session] = {}
        self._uncounted: dict[str, Session] = {}  # those that were used since their bytes were counted
        self._oldest: list[tuple[int, str]] = []  # of the sessions that are awake, the least recently used last
        self._with_drafts: dict[str, ref[Session]] = {}  # by id, the sessions that have any, or had
        self._timers: list[tuple[float, int, str]] = []  # of sessions that are awake: see _take_due
        self._uses: Iterator[int] = itertools.count(1)
        self._nodes = HeldNodes()
        self._held = 0  # bytes counted for the sessions that are awake
        self._journal: Journal | None = None
        self._collecting = new_lock()
        self._collects = False
        self._awake: set[str] = set()  # ids of sessions that were open at any time since gc began
        self._opening = new_lock()  # for taking sessions from the disk: one thread makes each
        self._creating: dict[str, Any] = {}  # by id, the locks of whoever is writing new sessions there

    @classmethod
    def in_memory(
        cls,
        *,
        feature_bytes: int = DEFAULT_FEATURE_BYTES,
        path_cache_bytes: int = DEFAULT_PATH_CACHE_BYTES,
        idle_ttl: float | None = None,
        draft_ttl: float | None = None,
    ) -> SessionStore:
        """A store that lives and dies with this process.

        ``feature_bytes``: budget for features of media. ``path_cache_bytes``: for whole paths of forks that were read as views.
        ``idle_ttl``: how long a session may lie idle before :meth:`tick` closes it, in the unit that tick is called with;
        ``draft_ttl``: the same for a draft, before tick aborts it.
        """
        return cls(feature_bytes=feature_bytes, path_cache_bytes=path_cache_bytes, idle_ttl=idle_ttl, draft_ttl=draft_ttl)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        durability: Durability = "group",
        read_only: bool = False,
        strict: bool = True,
        feature_bytes: int = DEFAULT_FEATURE_BYTES,
        path_cache_bytes: int = DEFAULT_PATH_CACHE_BYTES,
        idle_ttl: float | None = None,
        draft_ttl: float | None = None,
        memory_bytes: int | None = None,
    ) -> SessionStore:
        """A store in the directory ``path``, made if there is none; its parent must be there.

        ``durability``: when a change is on disk. "commit": when the call that made it returns, and nobody sees it before.
        "group": soon after, many at a time; :meth:`flush` waits for it. "relaxed": at the next flush or close. ``read_only``:
        beside a process that writes, or before one does, following it: :meth:`sessions` lists what is there by now, and
        :meth:`get` takes the session that it got before along; nothing is created then. ``strict``: refuse a store in
        which opening finds damage before the end; what the sidecars vouch for is checked when it is read. False: read
        everything now, and serve what is sound of it, to be read only: a head is then the last of which a sound record is
        left, and :attr:`Head.uncertain` where damage may hide a later one. See :attr:`damaged` and
        :attr:`damaged_sessions`.

        Sessions are read as they are asked for: opening looks at none of them, and reading a path takes memory for that path. A
        session that was closed is opened again by :meth:`get`. ``memory_bytes``: what :meth:`tick` has the store hold in memory at
        most, by :meth:`evict`; None: no budget. The rest as for :meth:`in_memory`.

        Raises StoreLocked within a second where another process writes to it, IncompatibleStore for a format or record type of
        a newer version or a directory of something else, CorruptTree for damage, StoreFailed where the disk refuses.
        """
        store = cls(
            feature_bytes=feature_bytes,
            path_cache_bytes=path_cache_bytes,
            idle_ttl=idle_ttl,
            draft_ttl=draft_ttl,
            memory_bytes=memory_bytes,
        )
        if isinstance(path, str) and path.startswith(_URLS):
            raise Unsupported("open() takes a directory; a URL is for connect()")
        path = os.path.abspath(path)
        store._journal = Journal.open(
            path, store._features, store._paths, store._nodes, durability=durability, read_only=read_only, strict=strict
        )
        store._features.files = FeatureFolder(os.path.join(path, "blobs"), read_only=read_only)
        _logger.info("opened %r, %s", store, "read-only" if read_only else f"durability {durability}")
        if store.recovered_bytes:
            _logger.warning("%r: cut %d bytes of a commit that was never finished", store, store.recovered_bytes)
        if store.damaged:
            _logger.error("%r: damaged in %d places; it is only read", store, len(store.damaged))
        return store

    @classmethod
    def connect(
        cls,
        where: str | Backend,
        *,
        tenant: str | None = None,
        replica: str | None = None,
        blobs: str | None = "database",
        blob_grace_seconds: float = 3600.0,
        read_only: bool = False,
        cache_bytes: int = 256 * 2**20,
        feature_bytes: int = DEFAULT_FEATURE_BYTES,
        path_cache_bytes: int = DEFAULT_PATH_CACHE_BYTES,
        idle_ttl: float | None = None,
        draft_ttl: float | None = None,
        memory_bytes: int | None = None,
    ) -> SessionStore:
        """A store that many processes write at once: in PostgreSQL (a ``postgresql://`` URL), or in any other backend.

        A change is durable when the call that made it returns, as with "commit", and nobody sees it before. A session in hand is as
        this process saw it last; :meth:`get` and :meth:`Session.refresh` look at what others wrote since. What it writes is checked
        against what there is: an append under any node succeeds, and a head that somebody else has moved raises HeadMoved.
        Threads that wait at the same time are committed together.

        ``tenant``: see and make sessions of that tenant's namespaces alone; None: all. ``replica``: URL of a server that nodes are
        read from; what is not there yet is asked of the first. ``blobs``: where features of media are kept: "database",
        "s3://bucket/prefix", or None. ``blob_grace_seconds``: how old features that no node names must be for :meth:`gc` to remove
        them; those of a turn that is about to be committed somewhere are younger. ``cache_bytes``: of records of nodes, kept in
        memory once they were read or written. The rest as for :meth:`open`.

        A :class:`~sessiontree.backends.shared.Backend` has nodes and blobs of its own, so ``replica`` and ``blobs`` are for URLs.
        For a ``tenant`` it must have been connected to for that tenant as well. It is closed with the store.

        Raises StoreFailed where the server cannot be reached for half a minute, IncompatibleStore for a schema of another version,
        NeedsExtra where psycopg is missing (``pip install sessiontree[postgres]``).
        """
        if tenant is not None:
            tenant = checked_text(tenant, "tenant")
        store = cls(
            feature_bytes=feature_bytes,
            path_cache_bytes=path_cache_bytes,
            idle_ttl=idle_ttl,
            draft_ttl=draft_ttl,
            memory_bytes=memory_bytes,
        )
        if not _time(blob_grace_seconds, "blob_grace_seconds") >= 0:
            raise OutOfRange(f"blob_grace_seconds is {blob_grace_seconds}, below 0", value=blob_grace_seconds, limit=0)
        if isinstance(where, str):
            backend = backend_at(where, tenant=tenant, replica=replica, blobs=blobs, read_only=read_only)
        elif not isinstance(where, Backend):
            raise TypeError(f"a store is connected to by a URL or a Backend, not {type(where).__name__}")
        elif replica is not None or blobs not in (None, "database"):
            raise Unsupported(f"replica and blobs are said of a URL; what {where.where} is made of stands in its Backend")
        else:
            backend = where
        try:
            store._journal = SharedJournal(
                sealed(backend),
                store._features,
                store._paths,
                store._nodes,
                cache_bytes=in_range(cache_bytes, sys.maxsize, "cache_bytes", "a store"),
                tenant=tenant,
                read_only=read_only,
            )
            if backend.blobs is not None:
                prefix = "" if tenant is None else f"{scope_of(tenant).hex()}/"
                store._features.files = BlobFeatures(backend.blobs, prefix, grace_seconds=blob_grace_seconds, read_only=read_only)
        except BaseException:
            backend.close()
            raise
        begin_anew_in_children(store)
        _logger.info("connected %r%s", store, ", read-only" if read_only else "")
        return store

    def _begin_anew(self) -> None:
        """In a forked child of a process that is connected: sessions in hand are the parent's, and are closed here."""
        assert isinstance(self._journal, SharedJournal)
        self._journal._begin_anew()
        for session in self._sessions.values():
            session._closed = True
        self._sessions.clear()
        self._fresh.clear()
        self._uncounted.clear()
        self._with_drafts.clear()
        self._timers.clear()
        self._creating.clear()
        self._held = 0

    def create(
        self,
        session_id: str,
        *,
        scheme: PositionScheme | str,
        namespace: Namespace | Mapping[str, str | None] | str | None = None,
        model_fingerprint: str = "",
        max_tokens: int | None = None,
        reserve_output: int = 0,
    ) -> Session:
        """Open a session with an empty tree.

        ``scheme``: a scheme, or the name of one without parameters. ``namespace``: a Namespace, a mapping of cache_salt, lora
        and tenant, or a tenant's name. ``max_tokens``: tokens allowed on a path; appends leave ``reserve_output`` of them to
        generation. An id whose session was closed gives another incarnation. Raises SessionExists, UnknownScheme,
        LimitExceeded.
        """
        lineage = lineage_of(scheme, namespace, model_fingerprint, self._features)
        return self._open(session_id, new_tree(lineage, limits_of(max_tokens, reserve_output), self._paths))

    def fork(self, session: Session, node: Node | bytes, new_session_id: str) -> Session:
        """A session that holds the path of ``node``, shared; its heads are its own. See :meth:`SessionTree.forked`.

        The session may be one of another store; features of the media it shares stay there, and a store on disk takes a copy of the
        path then. Raises UnknownNode, SessionExists.
        """
        if not isinstance(session, Session):
            raise TypeError(f"a Session is forked, not {type(session).__name__}")
        while True:
            session._found(node)
            tree, drops = session._seen()
            source = tree._resolve(node)
            with suppress(Overtaken):  # something was dropped: perhaps this node
                return self._fork(session, tree, source, new_session_id, tree.forked(source), drops)
            if self._journal is not None and self._journal.many_write:
                session._look_anew(self._journal)

    def _fork(
        self, session: Session, tree: SessionTree, source: Node, new_session_id: str, forked: SessionTree, drops: Any
    ) -> Session:
        """A session of ``forked``, which lies over the path of ``source``, a node of the session's ``tree``.

        ``drops``: what :meth:`Session._seen` said when that was found. Raises Overtaken where something was dropped since.
        """
        tip = None
        if session._number is not None and session._store is self and not session._closed:  # else it may lack what was dropped
            ordinal = tree._index.find_ordinal(source, tree._count)
            assert ordinal is not None
            tip = session._number, ordinal
        return self._open(new_session_id, forked, tip, drops)

    def _open(self, session_id: str, tree: SessionTree, tip: tuple[int, int] | None = None, drops: Any = 0) -> Session:
        session_id = checked_text(session_id, "a session id")
        if not 0 < len(session_id) <= MAX_SESSION_ID:
            raise OutOfRange(
                f"a session id has 1 to {MAX_SESSION_ID} characters, not {len(session_id)}",
                value=len(session_id),
                limit=MAX_SESSION_ID,
            )
        if self._journal is not None:
            return self._open_durably(self._journal, session_id, tree, tip, drops)
        with self._lock:
            self._check_open()
            if session_id in self._sessions:
                raise SessionExists(f"session {session_id!r} is open", session_id=session_id)
            self._opened += 1
            session = Session(session_id, self._opened, tree, self)
            self._put(session)
        session._touch()
        self._feed.pass_on()
        return session

    def _put(self, session: Session, *, again: bool = False) -> None:
        """Have a session that was opened, and say so before anybody writes to it; the lock is held. ``again``: it was before."""
        batch = news.opened(*session._named, session._tree, self._feed.wanted, again=again)
        self._set_timer(session)
        put, sessions, session_id = self._feed.put, self._sessions, session.id
        sessions[session_id] = session  # from here to the call nothing comes in between
        if batch:
            put(batch)

    def _open_durably(
        self, journal: Journal, session_id: str, tree: SessionTree, tip: tuple[int, int] | None, drops: Any
    ) -> Session:
        making = new_lock()
        with making:
            try:
                with self._opening:
                    self._check_open()
                    if journal.many_write and session_id in self._sessions:  # perhaps it was dropped elsewhere
                        self._taken(journal, session_id, self._sessions[session_id])
                    if session_id in self._sessions or session_id in self._creating or journal.number_of(session_id) is not None:
                        raise SessionExists(f"session {session_id!r} is in the store", session_id=session_id)
                    self._creating[session_id] = making
                    self._wake(session_id)
                number, incarnation, waiting = journal.create(session_id, tree, tip, drops)  # which may wait for the disk
                session = Session(session_id, incarnation, tree, self, number)
                session._made = waiting
                with self._lock:
                    self._put(session)
                session._touch()
            finally:
                if self._creating.get(session_id) is making:
                    del self._creating[session_id]
        self._feed.pass_on()
        return session

    def _found(self, journal: Journal, session_id: str) -> Session | None:
        """A session that lies in the store, opened again; where the store is only read, as it is now."""
        while True:
            with self._opening:
                self._check_open()
                making = self._creating.get(session_id)  # before the sessions, among which it is put first
                session = self._sessions.get(session_id)
                if session is not None or making is None:
                    return self._taken(journal, session_id, session)
            if making._is_owned():
                return None  # a signal handler, in the middle of making it
            with making:  # until it is made, or refused
                pass

    def _taken(self, journal: Journal, session_id: str, session: Session | None) -> Session | None:
        """The same; ``session``: the one that is open. The lock for opening is held."""
        if session is not None and not journal.follows:
            return session
        number = journal.number_of(session_id)
        if session is not None and session._number != number:  # it was dropped, and perhaps made again
            with session._lock:
                told = session._closed
                session._end()
                session._drop_whole(told=True)
            if not told:
                self._forget(session)
            session = None
        if number is None:
            return None
        if session is not None:
            session._look_anew(journal)
            return session
        tree, pins = journal.tree(number)
        slept = self._asleep.get(number)
        incarnation = journal.opened(number) if slept is None else slept.incarnation
        session = Session(session_id, incarnation, tree, self, number)
        session._use = next(self._uses)  # no use of it, but who wakes it does not do so to let it go
        session._pins = pins
        if slept is not None:
            session._generations, session._last_used = slept.generations, slept.last_used
            session._adopt_nodes(self._survivors.pop(number, ()))
        self._wake(session_id)
        with self._lock:
            if slept is None:
                self._put(session, again=True)
            else:  # it was open all the time
                self._set_timer(session)
                self._sessions[session_id] = session
                self._asleep.remove(number)
        return session

    def adopt(self, data: bytes | bytearray | memoryview) -> Draft:
        """Go on with a draft that was handed over, in the session of its id: :meth:`Session.adopt`.

        Where there is no such session, and the draft brought its path or starts at the root, the session is made, of that path and
        with its limits. Raises UnknownSession where neither is so, and what Session.adopt raises; nothing has changed then.
        """
        parcel = unpacked(data)
        session_id = parcel.session.session_id
        while True:
            try:
                return self.get(session_id)._adopt(parcel)
            except UnknownSession:
                if not parcel.whole:
                    raise
            parcel.check_opening(self._identity, None)
            rules, limits = codec.rules_of(parcel.session), parcel.session.limits
            lineage = lineage_of(rules, parcel.session.namespace, parcel.session.model_fingerprint, self._features)
            tree = parcel.attached(new_tree(lineage, limits, self._paths))
            parcel.draft(tree, NOWHERE)  # it can go on there
            with suppress(SessionExists):  # somebody else was quicker
                self._open(session_id, tree)

    @property
    def _identity(self) -> bytes | None:
        """What the store is known by where drafts that left it come back; None of one that is only read.

        In memory it is drawn when it is first asked for: a store that no draft leaves draws nothing.
        """
        if self._journal is not None:
            return self._journal.identity
        with self._lock:
            self._own_identity = self._own_identity or new_identity()
            return self._own_identity

    def _view_of(self, session_id: str) -> tuple[SessionTree, Mapping[bytes, int]] | None:
        """A session's tree and pins as they are now, without opening the session; None where there is none."""
        with self._lock:
            self._check_open()
            found = self._sessions.get(session_id)
        journal = self._journal
        if journal is None or (found is not None and not journal.follows):
            return None if found is None else (found.tree, found._pins)
        number = journal.number_of(session_id)
        if number is None:
            return None
        tree, pins = journal.view(number)
        return tree._read_only(), pins

    def tree(self, session_id: str) -> SessionTree:
        """A session's tree as it is now, without opening the session: that is no use of it. Raises UnknownSession, CorruptTree."""
        found = self._view_of(session_id)
        if found is None:
            raise UnknownSession(f"no session {session_id!r}", session_id=session_id)
        return found[0]._read_only()

    def get(self, session_id: str, *, scheme: PositionScheme | str | None = None, model_fingerprint: str | None = None) -> Session:
        """The session of this id: the open one, or from the disk.

        ``scheme``, ``model_fingerprint``: what the session is expected to have been created with; None is not checked. Raises
        UnknownSession, IncompatibleStore saying what was expected and what was found, CorruptTree.
        """
        found = self._got(session_id)
        self._feed.pass_on()
        _check_expected(found, scheme, model_fingerprint)
        found._touch()
        return found

    def _got(self, session_id: str) -> Session:
        """The same, not used by that, and nobody told yet."""
        with self._lock:
            self._check_open()
            found = self._sessions.get(session_id)
        if self._journal is not None and (found is None or self._journal.follows):
            found = self._found(self._journal, checked_text(session_id, "a session id"))
        if found is None:
            lost = self.damaged_sessions if self.damaged else ()
            beside = f"; the ids of sessions {', '.join(map(str, lost))} are lost to damage" if lost else ""
            what = "open session" if self._journal is None else "session"
            raise UnknownSession(f"no {what} {session_id!r}{beside}", session_id=session_id)
        return found

    def sessions(self) -> tuple[str, ...]:
        """Ids of the open sessions, in the order they were opened; of a store on disk: of all, in the order they were created.

        Where the record of one is damaged, that raises CorruptTree with its number (``session``); with ``strict=False`` it is left
        out, and stands in :attr:`damaged_sessions`. The others can be got either way.
        """
        with self._lock:
            self._check_open()
            if self._journal is None:
                return tuple(self._sessions)
        return tuple(dict.fromkeys(self._journal.session_ids().values()))

    def flush(self) -> None:
        """Wait until everything is on disk that any session has written. In memory it does nothing.

        Raises StoreFailed, naming the nodes that never will be, where the disk refused it; the store takes no more writes then.
        """
        self._check_open()
        if self._journal is not None:
            self._journal.flush()
            for session in list(self._sessions.values()):
                session._show(self._journal)

    @property
    def damaged(self) -> tuple[tuple[int, int, int], ...]:
        """(segment, start, stop) of every stretch that opening with ``strict=False`` found damaged; such a store is only read."""
        return () if self._journal is None else self._journal.damaged

    @property
    def losses(self) -> tuple[tuple[int, int, int], ...]:
        """Those of :attr:`damaged` that may have held records which are lost; beside the others everything is there."""
        return () if self._journal is None else self._journal.losses

    @property
    def damaged_sessions(self) -> tuple[int, ...]:
        """Numbers of sessions, as they were created, whose own records are damaged, so that nobody knows their ids any more.

        Those of which anything else is left, and with ``strict=False`` those that :meth:`sessions` has left out.
        """
        return () if self._journal is None else self._journal.damaged_sessions

    @property
    def recovered_bytes(self) -> int:
        """How many bytes of a commit that was never finished opening has cut from the end."""
        return 0 if self._journal is None else self._journal.recovered_bytes

    def tick(self, now: float) -> tuple[str, ...]:
        """Tell the store the time; ids of the sessions that it closes for it, in the order they were opened.

        First, drafts are aborted that took no token, rollback, state or progress for ``draft_ttl``: ``draft.how_closed``
        is "timed out" then, and writing to one raises DraftClosed. Then those sessions are closed that lay idle for
        ``idle_ttl`` and have no open draft. There is no clock in here: a write, a commit, a ``get`` or a lookup is use of
        a session at the time that was told last (before the first tick: at that), so tell it often within an ``idle_ttl``;
        use of a draft counts at the next tick, so none is aborted early. The same calls close the same on every rank. At
        last, what is held above ``memory_bytes`` is evicted, which may wait for the disk. Nodes that readers hold stay
        readable. Raises OutOfRange for a time before the last one.
        """
        now = _time(now, "the time")
        with self._lock:
            self._check_open()
            if now < self._now:
                raise OutOfRange(f"the time {now} after {self._now}", value=now, limit=self._now)
        self._look()
        with self._lock:
            self._now = max(self._now, now)
        if self._draft_ttl is not None:
            for session in self._drafting():
                session._time_out_drafts(now, self._draft_ttl)
        ended = [] if self._idle_ttl is None else self._expire(now, self._idle_ttl)
        self._feed.pass_on()
        closed = tuple(session_id for _, session_id in sorted(ended))
        if closed:
            some = ", ".join(map(repr, closed[:8]))
            _logger.info("tick(%s) closed %d idle sessions: %s%s", now, len(closed), some, ", ..." if len(closed) > 8 else "")
        if self._memory_bytes is not None:
            self.evict(self._memory_bytes)
        return closed

    def _expire(self, now: float, idle_ttl: float) -> list[tuple[int, str]]:
        """Incarnation and id of the sessions that are closed now, since they lay idle for so long."""
        closed: list[tuple[int, str]] = []
        taken: dict[int, Session] = {}  # by incarnation
        try:
            with self._opening, self._lock:  # else one that evict looks at may be neither awake nor asleep
                self._take_due(now, idle_ttl, taken)
            drafting = {session.incarnation: session for session in self._drafting()}  # in use, as long as a draft is open
            for incarnation, session in sorted((drafting | taken).items()):
                if session._expire(now, idle_ttl):
                    closed.append((incarnation, session.id))
        finally:
            with self._lock:
                for session in taken.values():
                    if not session.closed:
                        self._set_timer(session)
        journal = self._journal
        if journal is not None:
            with self._opening:
                idle = self._asleep.idle(now, idle_ttl)
                names = journal.names_of([number for _, number in idle])
                for incarnation, number in idle:
                    session_id = names.get(number)  # where its record is damaged, it has none any more
                    batch = () if session_id is None else news.closed(session_id, incarnation, self._feed.wanted, expired=True)
                    self._asleep.remove(number)
                    self._survivors.pop(number, None)
                    if batch:
                        self._feed.put(batch)
                    if session_id is not None:
                        closed.append((incarnation, session_id))
        return closed

    def _take_due(self, now: float, idle_ttl: float, taken: dict[int, Session]) -> None:
        """Take the timers of sessions that may have lain idle for so long, and add those to ``taken``; the lock is held.

        Each that is awake has a timer, an entry of a heap, of when it was used last or before that. Where it was used since, it
        gets another: so each is looked at once in an ``idle_ttl``, not at every tick.
        """
        timers = self._timers
        if len(timers) > 2 * len(self._sessions) + _OLDEST:  # most are of sessions that are no more, or fell asleep
            timers[:] = [(session._last_used, session.incarnation, key) for key, session in self._sessions.items()]
            heapify(timers)
        while timers and not now - timers[0][0] < idle_ttl:
            _, incarnation, session_id = timers[0]
            session = self._sessions.get(session_id)
            if session is not None and session.incarnation == incarnation:
                taken[incarnation] = session
            heappop(timers)

    def _set_timer(self, session: Session) -> None:
        if self._idle_ttl is not None:
            heappush(self._timers, (session._last_used, session.incarnation, session.id))

    def _look(self) -> None:
        """Note when the sessions were used that were since the last look."""
        fresh, uncounted = self._fresh, self._uncounted
        while fresh:
            try:
                session = fresh.popitem()[1]
            except KeyError:  # somebody else was quicker
                return
            try:
                session._last_used = self._now
                uncounted[session.id] = session
                if self._sessions.get(session.id) is not session:  # it was closed meanwhile
                    uncounted.pop(session.id, None)
            except BaseException:  # interrupted: it is looked at again
                fresh.setdefault(session.id, session)
                raise

    def _count_used(self) -> None:
        """Count the bytes of the sessions that were used."""
        self._look()
        uncounted = self._uncounted
        while uncounted:
            try:
                session = uncounted.popitem()[1]
            except KeyError:
                return
            try:
                self._count_bytes(session)
            except BaseException:
                uncounted.setdefault(session.id, session)
                raise

    def _count_bytes(self, session: Session) -> None:
        held = session._count_bytes()
        with self._lock:
            if self._sessions.get(session.id) is session:
                self._held += held - session._held
                session._held = held

    def evict(self, target_bytes: int | None = None) -> Evicted:
        """Let go of memory until the store holds no more than ``target_bytes``, or of all that it can (None, 0).

        Features of media first, then the paths of forks that were gathered, then the nodes of sessions, the least recently used of
        each first. All of it comes back when it is next asked for: nodes and features from the disk. Nothing goes that somebody
        holds: nodes, features, the path of a draft or of a pinned node. A session that nobody holds goes as a whole, and is the
        same one when it is asked for again: its incarnation stays, and the time when it was used last. To evict is no use of a
        session, and changes nothing that can be seen of it.

        Waits until what was written is on disk; what cannot be brought there stays. Of a store in memory, only gathered paths go.
        Raises OutOfRange.
        """
        target = 0 if target_bytes is None else in_range(target_bytes, sys.maxsize, "target_bytes", "a store")
        self._check_open()
        usage = before = self.usage()
        features = paths = 0
        if usage.memory_bytes > target and usage.feature_bytes:
            features = self._features.release(usage.memory_bytes - target, self._needed())
            usage = self.usage()
        if usage.memory_bytes > target and usage.path_cache_bytes:
            paths = usage.path_cache_bytes
            self._paths.clear()
            usage = self.usage()
        sessions: list[str] = []
        journal = self._journal
        if journal is not None and usage.memory_bytes > target:
            check_may_wait(journal)
            with suppress(StoreFailed):  # what is on disk can go all the same
                journal.flush()
            journal.let_go()
            sessions = list(self._put_away_until(journal, target))
            if sessions:
                journal.forget_numbers()
            for number, left in list(self._survivors.items()):
                if not any(known() is not None for _, known in left):
                    self._survivors.pop(number, None)
            self._feed.pass_on()
        return Evicted(before.memory_bytes, self.usage().memory_bytes, features, paths, tuple(sessions))

    def _needed(self) -> set[tuple[Any, ...]]:
        """Contents of the media on the paths of open drafts and of pinned nodes."""
        needed: set[tuple[Any, ...]] = set()
        for session in list(self._sessions.values()):
            if not (session._pins or session._open_drafts):
                continue
            held = [draft.parent for draft in session._drafts()]
            with suppress(SessionTreeError):  # a pin that cannot be read holds nothing
                held += map(session.node, session.pins)
            needed.update(item.content() for node in held for item, _, _ in node.media_spans())
        return needed

    def _put_away_until(self, journal: Journal, target: int) -> Iterator[str]:
        """Ids of the sessions that go, one by one, until the store holds no more than ``target`` bytes."""
        over, stayed = 0, []
        try:
            for at, (use, session_id) in enumerate(self._by_use()):
                if at % _AT_ONCE == 0 or over <= 0:
                    over = self.usage().memory_bytes - target
                if over <= 0:
                    stayed.append((use, session_id))
                    return
                before = self._held
                if self._put_away(journal, session_id):
                    yield session_id
                else:
                    stayed.append((use, session_id))
                over -= before - self._held
        finally:
            self._oldest += reversed(stayed)  # they come first the next time

    def _by_use(self) -> Iterator[tuple[int, str]]:
        """All sessions that are awake, the least recently used first, each taken off :attr:`_oldest`.

        What lies there was not used since it was found, or is not what it was, so whatever is not there was used later: to find
        some of the oldest takes a look at all sessions, to take one of them none. What is used from now on is not waited for.
        """
        last, until = -1, next(self._uses)
        while True:
            try:
                use, session_id = self._oldest.pop()
            except IndexError:
                later = [(session._use, key) for key, session in list(self._sessions.items()) if last < session._use < until]
                if not later:
                    return
                self._oldest = nsmallest(max(_OLDEST, len(later) // 8), later)[::-1]
                continue
            last = max(last, use)
            session = self._sessions.get(session_id)
            if session is not None and session._use == use:
                del session  # or it would be held
                yield use, session_id

    def _put_away(self, journal: Journal, session_id: str) -> bool:
        """Let the nodes of a session go, and the session itself where nobody holds it: whether that could be."""
        with self._opening:
            session = self._sessions.get(session_id)
            if session is None:
                return False
            lock, alive = session._lock, ref(session)
            if not lock.acquire(blocking=False):
                return False  # it is in use; and nobody who wants another session is to wait for that
            try:  # whoever writes to the session comes in before or after
                number = session._number
                # Where others write, a session that is looked at again says what is new in it, so it stays.
                if number is not None and not journal.follows and getrefcount(session) <= _ALONE and session._at_rest(journal):
                    sleeper = Sleeper(session.incarnation, session._generations, session._last_used)
                    nodes, held, used = session._refs(), 0, False
                    try:
                        with self._lock:
                            held = session._held
                            del self._sessions[session_id]
                            self._uncounted.pop(session_id, None)
                            used = self._fresh.pop(session_id, None) is not None  # since the store looked
                            if used:
                                sleeper = sleeper._replace(last_used=self._now)  # before anybody tells a later time
                        del session  # here it goes, where nobody else holds it
                    finally:
                        session = self._settled(session_id, alive, number, sleeper, held, used=used)
                    if session is None:
                        self._leave(number, nodes)
                        self._feed.tell(Event("evicted", session_id, sleeper.incarnation, nbytes=held))
                        return True
            finally:
                lock.release()
        before = self._held + self._nodes.held_bytes()
        if not session._lighten(journal):
            return False
        self._count_bytes(session)
        freed = before - self._held - self._nodes.held_bytes()
        if freed > 0:
            self._feed.tell(Event("evicted", session_id, session.incarnation, nbytes=freed))
        return freed > 0

    def _settled(
        self, session_id: str, alive: ref[Session], number: int, sleeper: Sleeper, held: int, *, used: bool
    ) -> Session | None:
        """Whether a session that was let go is asleep now: the session, in its place again, where somebody holds it."""
        session = alive()
        with self._lock:
            if session is None:
                self._held -= held
                self._asleep.put(number, sleeper)
            else:
                self._sessions[session_id] = self._uncounted[session_id] = session
                if used:
                    self._fresh[session_id] = session
        return session

    def _leave(self, number: int, nodes: Iterable[tuple[int, ref[Node]]]) -> None:
        """A session fell asleep: those of its nodes that somebody holds are counted, and are its own when it wakes."""
        left = [(ordinal, known) for ordinal, known in nodes if known() is not None]
        for node in (known() for _, known in left):
            if node is not None:
                self._nodes.count(node)
        if left:
            self._survivors[number] = left

    def drop(self, session_id: str) -> None:
        """Forget a session and close it. What was forked from it keeps its path; :meth:`gc` gives the rest back.

        Raises UnknownSession; NodeHeld where it has a pin or an open draft.
        """
        journal = self._journal
        if self._opening._is_owned():
            raise Unsupported("no session is dropped in the middle of opening one")
        with self._opening:
            session = self._got(session_id)
            session._check_alone(journal is not None and journal.waits)
            with session._lock:
                while not self._dropped(journal, session):
                    pass
        self._feed.pass_on()

    def _dropped(self, journal: Journal | None, session: Session) -> bool:
        """Drop a session, whose lock is held: whether that was done; else somebody else wrote to it first."""
        if journal is not None:
            session._catch_up(journal)
        for holder in (*(f"pin {pin[:4].hex()}" for pin in session._pins), *("an open draft" for _ in session._drafts())):
            raise NodeHeld(f"session {session.id!r} is held by {holder}", node=None, holder=holder)
        was, session._closed = session._closed, True
        try:
            if journal is not None and session._number is not None:
                journal.drop(session._number, [0], session._waiting)
        except (Overtaken, WriteLost):
            session._closed = was
            assert journal is not None
            if not journal.many_write:
                raise
            session._reload(journal)
            return False
        except SessionTreeError:
            session._closed = was
            raise
        finally:  # where it was interrupted, the journal knows whether it is gone
            if session._closed:
                session._drop_whole(told=was)
                self._forget(session)
        return True

    def gc(self, *, recent: int | None = None, progress: Progress | None = None) -> GcReport:
        """Give back what was dropped: nodes, heads, aliases, and features that no node names any more.

        Nodes are kept that their sessions show, with their paths; those that forks share; and what a reader, in any process, holds.
        ``recent``: also drop what no head, pin or open draft leads to, except for the last so many nodes of each session and their
        paths; None: drop nothing more. ``progress``: is told (done, all) nodes.

        Others go on reading and writing meanwhile. A crash or an error at any moment leaves every path that can be reached as it
        was. A store in memory has nothing to give back but what ``recent`` drops. Raises Unsupported for a store that is only read,
        StoreFailed, CorruptTree where what is to be kept is damaged.
        """
        if recent is not None and as_index(recent, "recent") < 0:
            raise OutOfRange(f"recent is {recent}, below 0", value=recent, limit=0)
        self._check_open()
        if self._journal is not None:
            check_may_wait(self._journal)
        with self._collecting:
            if self._collects:
                raise Unsupported("gc was called in the middle of gc")
            self._collects = True
            try:
                report = self._gc(recent, progress)
            finally:
                self._collects = False
                self._awake = set()
        _logger.info("gc of %r: %s", self, report)
        return report

    def _gc(self, recent: int | None, progress: Progress | None) -> GcReport:
        journal = self._journal
        if journal is not None:
            journal.check_writable()
        before = 0 if journal is not None else self._count()
        if recent is not None:
            with self._opening:
                self._awake = {*self._sessions, *self._creating}
            for session in list(self._sessions.values()):
                session._collect(recent)
            if journal is not None:
                self._collect_closed(journal, recent)
        if journal is None:
            return GcReport(before, self._count(), 0, 0, 0, swept=True)

        def told(done: int, total: int) -> None:
            self._check_open()
            if progress is not None:
                progress(done, total)

        files = self._features.files
        if isinstance(journal, SharedJournal):
            return collect(journal, files if isinstance(files, BlobFeatures) else None, told)
        return compact(journal, files if isinstance(files, FeatureFolder) else None, told)

    def _collect_closed(self, journal: Journal, recent: int) -> None:
        """As :meth:`Session._collect`, of sessions that nobody has opened since gc began."""
        names = journal.session_ids()
        journal.flush()  # what they wrote before they were closed
        numbers = list(names)
        columns = None
        if not journal.many_write:  # else each session is looked at alone
            columns = journal.columns()
            columns.group()
        for start in range(0, len(numbers), _AT_ONCE):
            self._check_open()
            with self._opening:
                asleep = [number for number in numbers[start : start + _AT_ONCE] if names[number] not in self._awake]
                dead = journal.drop_unreachable(asleep, recent, columns)
                wanted = self._feed.wanted
                for number, gone in dead.items() if "nodes_dropped" in wanted else ():
                    slept = self._asleep.get(number)
                    self._feed.put(news.dropped(names[number], 0 if slept is None else slept.incarnation, gone, wanted))
            self._feed.pass_on()

    def _count(self) -> int:
        return sum(len(session._tree) - 1 for session in list(self._sessions.values()))

    def put_features(self, item: MediaItem, features: Any) -> Features:
        """Keep features of an item (pixels, encoder outputs) by its content, under the budget. See :meth:`FeatureStore.put`.

        ``features``: an array or tensor, or a mapping of names to them; copied. Keep what comes back for as long as a request
        needs it: what somebody holds is not evicted. Raises LimitExceeded where the budget is held by others, KeyTaken for
        other bytes under a name that this content has.
        """
        self._check_open()
        return self._features.put(item, features)

    def get_features(self, item: MediaItem) -> Features | None:
        """The features of an item's content; None where there are none."""
        return self._features.get(item)

    def drop_features(self, item: MediaItem) -> None:
        """Forget the features of an item's content. Nodes keep all they know of it; whoever holds the features keeps them."""
        self._features.drop(item)

    def alias_media(
        self, alias: str, item: MediaItem | bytes, namespace: Namespace | Mapping[str, str | None] | str | None = None
    ) -> bytes:
        """Name an identity by a caller's own id (a uuid), within a namespace: the identity. Naming it again changes nothing.

        Raises KeyTaken where the alias names another identity: the same id never stands for other bytes.
        """
        alias, scope = checked_text(alias, "an alias"), Namespace.of(namespace)
        identity = item.identity if isinstance(item, MediaItem) else MediaItem("image", item, ()).identity
        with self._opening:
            known = self._alias(scope, alias)
            while known is None:
                known = identity if self._journal is None else self._journal.alias(scope, alias, identity)
                if self._journal is None or not self._journal.many_write:
                    self._aliases[scope, alias] = known
        if known != identity:
            raise KeyTaken(f"alias {alias!r} names {known[:4].hex()}, not {identity[:4].hex()}", key=alias, identity=known)
        return known

    def aliased_media(self, alias: str, namespace: Namespace | Mapping[str, str | None] | str | None = None) -> bytes:
        """The identity that an alias names in a namespace. Raises UnknownAlias."""
        with self._opening:
            found = self._alias(Namespace.of(namespace), checked_text(alias, "an alias"))
        if found is None:
            raise UnknownAlias(f"no media are named {alias!r} there", alias=alias)
        return found

    def _alias(self, scope: Namespace, alias: str) -> bytes | None:
        self._check_open()
        if self._journal is not None and (self._journal.many_write or (scope, alias) not in self._aliases):
            return self._journal.aliased(scope, alias)
        return self._aliases.get((scope, alias))

    def drop_alias(self, alias: str, namespace: Namespace | Mapping[str, str | None] | str | None = None) -> None:
        """Forget an alias. Raises UnknownAlias."""
        scope = Namespace.of(namespace)
        with self._opening:
            self.aliased_media(alias, scope)
            if self._journal is None:
                del self._aliases[scope, alias]
            else:
                self._journal.alias(scope, alias, None)
                if not self._journal.many_write:
                    self._aliases[scope, alias] = None

    def usage(self) -> Usage:
        """What the store holds in memory by now."""
        self._count_used()
        features, paths, journal = self._features, self._paths, self._journal
        asleep = len(self._asleep)
        return Usage(
            sessions=len(self._sessions) + asleep,
            feature_bytes=features.held_bytes,
            feature_budget_bytes=features.budget_bytes,
            path_cache_bytes=paths.held_bytes,
            path_cache_budget_bytes=paths.budget_bytes,
            asleep_sessions=asleep,
            node_bytes=self._held + self._nodes.held_bytes(),
            draft_bytes=sum(draft._held_bytes() for session in self._drafting() for draft in session._drafts()),
            index_bytes=self._asleep.nbytes + (0 if journal is None else journal.index_bytes()),
            memory_budget_bytes=self._memory_bytes,
        )

    def _drafting(self) -> list[Session]:
        """The sessions with drafts that are open, or closed and held by somebody; in the order they were opened."""
        found, with_drafts = [], self._with_drafts
        for session_id, known in list(with_drafts.items()):
            session = known()
            if session is None or not session._open_drafts:
                latest = with_drafts.pop(session_id, known)
                session = latest()
                if session is None or not session._open_drafts:
                    continue
                with_drafts.setdefault(session_id, latest)  # one was opened meanwhile
            if self._sessions.get(session_id) is session:
                found.append(session)
        return sorted(found, key=lambda session: session.incarnation)

    def close(self) -> None:
        """Close every session. The store takes no more calls; closing it again does nothing."""
        with self._lock:
            first, self._closed = not self._closed, True
            open_sessions = list(self._sessions.values())
        for session in open_sessions:
            session.close()
        try:
            with self._collecting:  # gc ends as soon as it sees that
                if self._journal is not None:
                    self._journal.close()
                self._features.close()
                self._paths.clear()
        finally:
            self._feed.close()
        if first:
            _logger.info("closed %r", self)

    def subscribe(
        self,
        capacity: int = DEFAULT_CAPACITY,
        kinds: Iterable[Kind] | None = None,
        *,
        notify: Callable[[], object] | None = None,
    ) -> Subscription:
        """Be told what happens in this store from now on, in order. See :class:`~sessiontree.events.Subscription`.

        What becomes visible after this has returned is told of. ``capacity``: how many events may wait to be read; what comes while
        so many do is not kept, but counted, and an event of kind "lost" says so in its place. ``kinds``: those that are wanted;
        None: all. ``notify``: called without arguments, on the thread that writes, when there is something to read and was nothing
        before, and when it is closed; it should be short. What it raises is logged. No writer waits for a subscriber, or fails for
        one.

        Raises OutOfRange for a capacity below 1, Unsupported for a kind that there is not, and in a signal handler that comes in
        while its thread writes; StoreClosed.
        """
        if notify is not None and not callable(notify):
            raise TypeError(f"notify is called without arguments; a {type(notify).__name__} cannot be")
        subscription = Subscription(self._feed, checked_capacity(capacity), checked_kinds(kinds), notify)
        self._listen(subscription)
        return subscription

    def _listen(self, sink: Sink) -> None:
        """Tell a sink what becomes visible from now on."""
        self._check_open()
        with self._lock:
            open_sessions = tuple(self._sessions.values())
        if self._feed.leading or any(session._lock._is_owned() for session in open_sessions):
            raise Unsupported("nobody subscribes in the middle of an operation on a session, or while events are told")
        self._feed.add(sink)
        with self._lock:
            open_sessions = tuple(self._sessions.values())
        for session in open_sessions:  # who writes at this moment may not know yet that it is to tell
            with session._lock:
                pass

    def _wake(self, session_id: str) -> None:
        """A session is being opened; the lock for that is held."""
        if self._collects:
            self._awake.add(session_id)

    def _forget(self, session: Session) -> None:
        with self._lock:
            if self._sessions.get(session.id) is session:
                del self._sessions[session.id]
                self._fresh.pop(session.id, None)
                self._uncounted.pop(session.id, None)
                self._with_drafts.pop(session.id, None)
                self._held -= session._held

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("this store is closed")

    def __enter__(self) -> SessionStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a store is one; a copy would be a second writer")

    def __repr__(self) -> str:
        where = "in memory" if self._journal is None else f"at {self._journal.path}"
        return f"<SessionStore {where}, {len(self._sessions)} sessions open>"


def _check_expected(session: Session, scheme: PositionScheme | str | None, model_fingerprint: str | None) -> None:
    found: Any
    for what, expected, found in (
        ("scheme", scheme_named(scheme) if isinstance(scheme, str) else scheme, session.scheme),
        ("model fingerprint", model_fingerprint, session.root.model_fingerprint),
    ):
        if expected is not None and expected != found:
            raise IncompatibleStore(
                f"session {session.id!r} has the {what} {found!r}, not {expected!r}", expected=expected, found=found
            )


def backend_at(url: str, *, tenant: str | None, replica: str | None, blobs: str | None, read_only: bool) -> Backend:
    """The backend of a URL. Raises Unsupported, NeedsExtra."""
    if not url.startswith(_URLS):
        told = "what was given" if "=" in url or "@" in url else repr(url)  # there may be a password
        shown = f"{url.partition('://')[0]}://..." if "://" in url else told
        raise Unsupported(f"a store is connected to by a postgresql:// URL or a Backend, not {shown}; a directory is for open()")
    try:
        postgres: Any = import_module("sessiontree.backends.postgres")
    except ImportError as error:
        raise NeedsExtra(f"PostgreSQL needs pip install 'sessiontree[postgres]': {error}", extra="postgres") from error
    backend: Backend = postgres.connect(url, tenant=tenant, replica=replica, blobs=blobs, read_only=read_only)
    return backend


def _time(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{what} is a number, not {type(value).__name__}")
    try:
        time = float(value)
    except OverflowError:
        time = math.inf
    if not math.isfinite(time):
        raise OutOfRange(f"{what} is {time}, not a time", value=value, limit=math.inf)
    return time
