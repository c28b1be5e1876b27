"""Keeping a store healthy: ``fsck``, ``stats``, ``gc``, ``pin``, ``unpin``, ``drop``."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from sessiontree.cli.output import (
    Code,
    Usage,
    flat,
    is_url,
    progress,
    report_facts,
    safe,
    shown,
    styled,
    write,
    write_json,
    write_pairs,
)
from sessiontree.cli.source import Json, Place, Store, backend, check_store, complete_place, find_place, session_named, writing
from sessiontree.errors import NodeHeld
from sessiontree.render import _count, _listed, _name
from sessiontree.store import Session, SessionStore

MAX_LINES: Final = 100  # of a list in a report
NodePlace = Annotated[
    str,
    typer.Argument(
        metavar="PLACE", help="SESSION/NODE, or NODE where it is the only one.", autocompletion=complete_place, show_default=False
    ),
]


def fsck(
    store: Store,
    salvage: Annotated[
        Path | None,
        typer.Option("--salvage", metavar="NEW", help="Write every undamaged node to a new store at NEW.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> int:
    """Check every byte of a store.

    Reads all of it again and compares every digest; changes nothing. Names what is damaged and what depends on that, and tells
    it from a write that was cut short. Exit code 1: something is damaged.
    """
    from sessiontree.fsck import fsck as checked  # noqa: PLC0415
    from sessiontree.fsck import fsck_shared  # noqa: PLC0415
    from sessiontree.fsck import salvage as saved  # noqa: PLC0415

    rescue = None
    if is_url(store):
        if salvage is not None:
            raise Usage("--salvage is for a store's directory; `sessiontree copy` takes sessions that are sound out of this one")
        with backend(store) as found, progress("fsck", as_json) as bar:
            report = fsck_shared(found, progress=bar)
    else:
        check_store(store)
        with progress("fsck" if salvage is None else "salvage", as_json) as bar:
            if salvage is None:
                report = checked(store, progress=bar)
            else:
                rescued = saved(store, salvage, progress=bar)
                report, rescue = rescued.report, report_facts(rescued)
                del rescue["report"]
    facts = report_facts(report)
    if as_json:
        write_json(facts | {"salvage": rescue})
        return Code.FINE if report.ok else Code.FOUND
    write(_verdict(report))
    _write_report(facts)
    if rescue is not None:
        write(f"what is sound was written to {safe(str(salvage))}")
        _write_report(rescue, "  ")
    elif not report.ok and not is_url(store):
        write("--salvage NEW writes what is sound to a new store.")
    return Code.FINE if report.ok else Code.FOUND


def _verdict(report: Any) -> str:
    """In one line how bad it is."""
    if not report.ok:
        line = styled("DAMAGED", fg="red", bold=True)
        return line + ("; nothing is lost: all records can be read" if report.lossless else "")
    if report.sidecars:
        return styled("nothing is lost; an index is damaged, which the next writer makes again", fg="yellow")
    return styled("nothing is damaged", fg="green")


def _write_report(facts: dict[str, Any], indent: str = "") -> None:
    """Numbers first, then what lists hold, a line each."""
    write_pairs(flat(facts), indent)
    for name, found in facts.items():
        for each in found[:MAX_LINES] if isinstance(found, list) else ():
            write(f"{indent}{name.replace('_', ' ')}: {_described(each)}")
        if isinstance(found, list) and len(found) > MAX_LINES:
            write(f"{indent}{name.replace('_', ' ')}: {len(found) - MAX_LINES:,} more; --json has all")


def _described(found: Any) -> str:
    """One thing that was found, in a line."""
    if not isinstance(found, dict):
        names = found if isinstance(found, list) else [found]
        return "/".join("(a lost name)" if each is None else _name(str(each), 64) for each in names)
    if "what" not in found:
        return ", ".join(f"{name} {value}" for name, value in flat(found))
    line = safe(str(found["what"]))
    where = [safe(str(found["path"]))] if found.get("path") else []
    where += [f"{name} {found[name]}" for name in ("segment", "offset") if found.get(name) is not None]
    where += [f"session {_name(found['session_id'])}"] if found.get("session_id") is not None else []
    where += [f"node {found['node_id'][:16]}"] if found.get("node_id") else []
    below = [node[:8] for node in found.get("dependents") or ()]
    lost = f"; with it {_count(len(below), 'node')} below: {_listed(below)}" if below else ""
    named_by = [node[:8] for node in found.get("named_by") or ()]
    lost += f"; features of {_count(len(named_by), 'node')}: {_listed(named_by)}" if named_by else ""
    lost += "; nothing is lost by it" if found.get("harmless") else ""
    return line + (f" ({', '.join(where)})" if where else "") + lost


def stats(store: Store, as_json: Json = False) -> int:
    """Count what a store holds.

    Bytes by kind, live and dead, how much is shared, how deep and wide sessions are.
    """
    from sessiontree.fsck import stats as counted  # noqa: PLC0415
    from sessiontree.fsck import stats_shared  # noqa: PLC0415

    if is_url(store):
        with backend(store) as found:
            facts = report_facts(stats_shared(found))
    else:
        check_store(store)
        facts = report_facts(counted(store))
    if as_json:
        write_json(facts)
    else:
        _write_report(facts)
    return Code.FINE


def gc(
    store: Store,
    recent: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Also drop what no head and no pin leads to, except for the last N nodes of each session and their paths.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Give back what was dropped.

    What no session shows any more leaves the disk, except for what another process reads: that goes when it is done. Killed
    half-way, a store is as it was or as it will be.
    """
    with writing(store) as opened, progress("gc", as_json) as bar:
        facts = report_facts(opened.gc(recent=recent, progress=bar))
    if as_json:
        write_json(facts)
    else:
        write_pairs(flat(facts))
    return Code.FINE


def pin(store: Store, place: NodePlace, as_json: Json = False) -> int:
    """Keep a node and its path from gc.

    And the features of their media, until it is unpinned.
    """
    with writing(store) as opened:
        session, node = _node_named(opened, place)
        session.pin(node)
    return _told({"session": session.id, "node": node.id.hex(), "pinned": True}, "pinned", as_json)


def unpin(store: Store, place: NodePlace, as_json: Json = False) -> int:
    """Remove a pin.

    The node stays until it is dropped, or gc --recent finds nothing else that leads to it.
    """
    with writing(store) as opened:
        session, node = _node_named(opened, place)
        session.unpin(node)
    return _told({"session": session.id, "node": node.id.hex(), "pinned": False}, "not pinned", as_json)


def drop(
    store: Store,
    place: NodePlace,
    whole: Annotated[bool, typer.Option("--session", help="PLACE is a session; drop all of it, heads included.")] = False,
    head: Annotated[bool, typer.Option("--head", help="PLACE is a head; remove that name, and no node.")] = False,
    as_json: Json = False,
) -> int:
    """Drop a node and all that stands below it.

    Refused where a head or a pin holds any of that: --head removes a head, unpin a pin. A whole session goes with its heads, not
    with a pin. The bytes come back with gc.
    """
    if whole and head:
        raise Usage("--session drops a session, --head a head; not both")
    with writing(store) as opened:
        if whole:
            session = session_named(opened, place)
            with _remedied(store, session):
                opened.drop(session.id)
            return _told({"session": session.id, "node": None}, "dropped", as_json)
        session, node = _node_named(opened, place)
        if head:
            meant = [each for each, at in session.heads.items() if at.id == node.id and f"/{place}".endswith(f"/{each}")]
            name = max(meant, key=len, default=None)
            if name is None:
                raise Usage(f"{place!r} names no head", candidates=tuple(f"{session.id}/{each}" for each in sorted(session.heads)))
            session.drop_head(name)
            facts = {"session": session.id, "node": node.id.hex(), "head": name}
            return _told(facts, f"no longer head {_name(name)}", as_json)
        with _remedied(store, session):
            session.drop(node)
    return _told({"session": session.id, "node": node.id.hex()}, "dropped, with all below it", as_json)


@contextmanager
def _remedied(store: str, session: Session) -> Iterator[None]:
    """Have a refusal say where the holder is, and what removes it."""
    try:
        yield
    except NodeHeld as error:
        kind, _, name = error.holder.partition(" ")
        node = "" if error.node is None else f", at {error.node.id[:4].hex()}"
        what = f"nothing is dropped: {error.holder} of session {session.id!r} holds it{node}"
        held = NodeHeld(what, node=error.node, holder=error.holder)
        at = shlex.quote(f"{session.id}/{ast.literal_eval(name) if kind == 'head' else name}")
        where = shlex.quote(shown(store))
        remedies = {"head": f"drop --head {where} {at}", "pin": f"unpin {where} {at}"}
        if kind in remedies:
            held.candidates = (f"`sessiontree {remedies[kind]}` lets go of it.",)  # type: ignore[attr-defined]
        raise held from error


def _node_named(store: SessionStore, place: str) -> Place:
    """A place where a node is named. Raises Usage."""
    session, node = find_place(store, place)
    if node is None:
        raise Usage(f"{place!r} is a session; which node of it? SESSION/NODE names one, and `drop --session` takes all of it")
    return Place(session, node)


def _told(facts: dict[str, Any], what: str, as_json: bool) -> int:
    """Say what was done."""
    if as_json:
        write_json(facts)
    else:
        node = f"/{facts['node'][:8]}" if facts["node"] else ""
        write(f"{_name(facts['session'])}{node} is {what}")
    return Code.FINE
