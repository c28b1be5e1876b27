"""What every part of the suite stands on: how a store is opened, what it is said to be able to do, and the store of a test."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import ClassVar

import pytest

from sessiontree import Session, SessionStore
from sessiontree.testing.model import SCHEME

Opener = Callable[[], SessionStore]


class Home:
    """The store of a test, and its sessions. ``reopens``, ``counts``: whether it survives_reopen and counts_nodes."""

    def __init__(self, opener: Opener, *, reopens: bool, counts: bool) -> None:
        self.counts = counts
        self._opener = opener
        self._reopens = reopens
        self._numbers = itertools.count(1)
        self._stack = ExitStack()
        self.store: SessionStore = self._opened(opener)

    def _opened(self, opener: Opener) -> SessionStore:
        return self._stack.enter_context(opener())

    def session(self, **options: object) -> Session:
        """A new session, of an id that no other has."""
        return self.store.create(self.name(), **{"scheme": SCHEME, **options})  # type: ignore[arg-type]

    def name(self) -> str:
        """An id that no session has."""
        return f"session {next(self._numbers)}"

    def reopen(self) -> None:
        """Close the store and open it anew; one that ends with its process goes on."""
        if self._reopens:
            self.store.close()
            self.store = self._opened(self._opener)

    def again(self, session: Session) -> Session:
        """A session as it is when the store was opened anew."""
        self.reopen()
        return self.store.get(session.id)

    def twice(self, session: Session) -> Iterator[Session]:
        """A session as it is, and then as it is when the store was opened anew."""
        yield session
        yield self.again(session)

    def beside(self, opener: Opener) -> SessionStore:
        """Another store, open beside this one until the test ends."""
        return self._opened(opener)

    def close(self) -> None:
        """Close every store."""
        self._stack.close()


class Conformance:
    """Fixtures of the suite, and what a store is said to be able to do. What it is not takes its tests away, by name.

    ``survives_reopen``: what is in it is there when it was closed and is opened again. ``durable``: what was acknowledged is there
    even where its process was killed; under ``acknowledges = "return"`` a call acknowledges what it did when it returns, under
    "flush" when a flush after it does. ``many_writers``: any number of processes may have it open and write. ``keeps_features``:
    features of media are there again too. ``counts_nodes``: the report of gc counts the nodes that are stored.
    ``deep_appends``: how many turns of the deepest path are appended one by one; the others come as a fork.
    ``examples``: how many histories are drawn for each property.
    """

    survives_reopen: ClassVar[bool] = True
    durable: ClassVar[bool] = True
    acknowledges: ClassVar[str] = "flush"
    many_writers: ClassVar[bool] = False
    keeps_features: ClassVar[bool] = True
    counts_nodes: ClassVar[bool] = True
    deep_appends: ClassVar[int] = 100_000
    examples: ClassVar[int] = 20

    @pytest.fixture
    def make_store(self) -> Opener:
        """To be overridden: what opens the store of this test, the same one each time it is called.

        It is called again when the store was closed, and where ``many_writers`` also while it is open. For tests with processes
        it goes there by pickle: a ``functools.partial`` of a function of a module, or of a class method.
        """
        raise NotImplementedError("override the fixture make_store")

    @pytest.fixture
    def make_reader(self, make_store: Opener) -> Opener | None:
        """What opens the store to be read while another process has it open to write; None: nothing does. By pickle too."""
        return make_store if self.many_writers else None

    @pytest.fixture
    def make_tenant_store(self) -> Callable[[str], SessionStore] | None:
        """What opens the store for one tenant, who sees no session of another's; None: nothing does."""
        return None

    @pytest.fixture
    def home(self, make_store: Opener) -> Iterator[Home]:
        """The store of this test, open."""
        home = Home(make_store, reopens=self.survives_reopen, counts=self.counts_nodes)
        try:
            yield home
        finally:
            home.close()

    @pytest.fixture
    def elsewhere(self, make_store: Opener) -> Opener:
        """``make_store``, for other processes."""
        try:
            pickle.dumps(make_store)
        except Exception as error:
            pytest.fail(f"make_store has to go to other processes, and cannot: {error}")
        return make_store

    def need(self, *capabilities: str) -> None:
        """Skip the rest of a test of what this store cannot do."""
        for capability in capabilities:
            if not getattr(self, capability):
                pytest.skip(f"of a store that has {capability}")
