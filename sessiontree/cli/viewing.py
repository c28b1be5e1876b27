"""``view`` and ``serve``: a session as a page, in a file, or live while somebody writes."""

from __future__ import annotations

import os
import sys
import webbrowser
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, Final

import typer

from sessiontree.cli.output import Code, Usage, safe, shown, without_passwords, write, write_json
from sessiontree.cli.source import Json, Lenient, OneSession, Source, Tokenizer, reading, session_named
from sessiontree.cli.viewed import Viewed
from sessiontree.cli.words import Words, words
from sessiontree.errors import SessionTreeError, StoreFailed
from sessiontree.viewer.page import page
from sessiontree.viewer.server import Server

MEGABYTE: Final = 10**6


def view(
    store: Source,
    session: OneSession = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="The page; by default SESSION.html in this directory.", show_default=False
        ),
    ] = None,
    max_megabytes: Annotated[
        float, typer.Option("--max-mb", min=1, help="Leave out what is told of the oldest nodes, so that the file is not larger.")
    ] = 50,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    tokenizer: Tokenizer = None,
    lenient: Lenient = False,
    as_json: Json = False,
) -> int:
    """Write a session as one page of HTML.

    It needs nothing else, no network and no server: the tree, to be moved in, searched and coloured; of each node text, token ids,
    media, metadata and a chart of its positions; and two nodes side by side. docs/viewer.md says more. Exit code 5: some of it
    cannot be read, and the page says what.
    """
    text = words(tokenizer)
    with reading(store, lenient) as source:
        found = session_named(source, session)
        viewed = Viewed(found, text, keeps=True)
        path = Path(f"{_file_name(found.id)}.html") if output is None else output
        if path.exists() and not force:
            raise Usage(f"{path} is there already; --force writes over it")
        size = _write(path, viewed, int(max_megabytes * MEGABYTE))
        if as_json:
            write_json({"session": found.id, "file": str(path), "bytes": size, "nodes": len(found._tree) - 1})
        else:
            write(f"{safe(str(path))}  {size:,} bytes, {len(found._tree) - 1:,} nodes")
        damaged = viewed.damaged or bool(source.losses)
    if show:
        webbrowser.open(path.absolute().as_uri())
    return Code.CORRUPT if damaged else Code.FINE


def _file_name(session_id: str) -> str:
    """A name that is no path and no option, whatever a session is called."""
    return "".join(each if each.isalnum() or each in "-_." else "_" for each in session_id[:80]).lstrip(".-") or "session"


def _write(path: Path, viewed: Viewed, most_bytes: int) -> int:
    """The page as a file, whole or not at all: how many bytes it has. Raises StoreFailed."""
    room = most_bytes - sum(len(piece.encode()) for piece in page())
    beginning = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beginning.open("w", encoding="utf-8") as file:
            file.writelines(page(viewed.blocks(room)))
        beginning.replace(path)
    except OSError as error:
        raise StoreFailed(f"{path}: {error.strerror or error}", path=str(path)) from error
    finally:
        with suppress(OSError):
            beginning.unlink()
    return path.stat().st_size


class Live:
    """Sessions of a store that is followed, for a server. One thread at a time looks."""

    def __init__(self, store: Any, text: Words | None, first: str | None) -> None:
        self._store = store
        self._text = text
        self._first = first
        self._viewed: dict[str, Viewed] = {}
        self._lock = Lock()

    def sessions(self) -> list[dict[str, Any]]:
        with self._lock:
            return [{"id": each, "first": each == self._first} for each in self._store.sessions()]

    def tree(self, session_id: str, known: str) -> bytes | None:
        with self._lock:
            return self._looked_at(session_id, anew=True).tree(known)

    def chunk(self, session_id: str, number: int) -> bytes:
        with self._lock:
            return self._looked_at(session_id).chunk(number)

    def picture(self, session_id: str, name: str) -> bytes:
        with self._lock:
            return self._looked_at(session_id).picture(name)

    def said_of(self, error: SessionTreeError) -> str:
        return without_passwords(f"{type(error).__name__}: {error}")

    def _looked_at(self, session_id: str, *, anew: bool = False) -> Viewed:
        found = self._viewed.get(session_id)
        if found is not None and not anew:
            return found
        session = self._store.get(session_id)
        if found is None or found.session is not session:
            found = self._viewed[session_id] = Viewed(session, self._text)
        else:
            found.refresh()
        return found


def serve(
    store: Source,
    session: OneSession = None,
    host: Annotated[
        str, typer.Option(help="The address to listen at. It asks for no password: beyond this machine all can read.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8765,
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    tokenizer: Tokenizer = None,
    lenient: Lenient = False,
    as_json: Json = False,
) -> int:
    """Show a store's sessions in the browser, live.

    The page of `view`, at an address of this machine, following whoever writes to the store. It only reads. Ends with Ctrl-C.
    """
    text = words(tokenizer)
    with reading(store, lenient) as source:
        first = None if session is None else session_named(source, session).id
        try:
            server = Server(Live(source, text, first), host, port)
        except OSError as error:
            raise StoreFailed(f"cannot listen at {host}:{port}: {error.strerror or error}") from error
        with server:
            if as_json:
                write_json({"url": server.url, "store": shown(store)})
            else:
                write(f"{server.url}  shows {safe(shown(store))}; Ctrl-C ends it")
            sys.stdout.flush()
            if show:
                webbrowser.open(server.url)
            with suppress(KeyboardInterrupt):
                server.serve_forever()
    return Code.FINE
