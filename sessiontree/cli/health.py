"""Keeping a store healthy: ``fsck``, ``stats``, ``gc``, ``pin``, ``unpin``, ``drop``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sessiontree.cli.output import Code, Usage, flat, progress, report_facts, safe, styled, write, write_json, write_pairs
from sessiontree.cli.source import Json, Store, check_store, complete_place, complete_session, find_place, session_named, writing
from sessiontree.render import _count, _listed, _name

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
    from sessiontree.fsck import fsck as checked  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415
    from sessiontree.fsck import salvage as saved  # noqa: PLC0415

    check_store(store)
    with progress("fsck", as_json) as bar:
        report = checked(store, progress=bar)
    facts = report_facts(report)
    rescue = None
    if salvage is not None:
        with progress("salvage", as_json) as bar:
            rescue = report_facts(saved(store, salvage, progress=bar))
    if as_json:
        write_json(facts | {"salvage": rescue})
        return Code.FINE if report.ok else Code.FOUND
    write(styled("nothing is damaged", fg="green") if report.ok else styled("DAMAGED", fg="red", bold=True))
    write_pairs(flat(facts))
    for name, found in facts.items():
        for each in found if isinstance(found, list) else ():
            write(f"{name.replace('_', ' ')}: {_described(each)}")
    if rescue is not None:
        write(f"saved to {safe(str(salvage))}")
        write_pairs(flat(rescue), "  ")
    elif not report.ok:
        write("--salvage NEW writes what is sound to a new store.")
    return Code.FINE if report.ok else Code.FOUND


def _described(found: Any) -> str:
    """One thing that was found, in a line."""
    if not isinstance(found, dict):
        return safe(str(found))
    line = safe(str(found["what"]))
    where = [safe(str(found["path"]))] if found.get("path") else []
    where += [f"{name} {found[name]}" for name in ("segment", "offset") if found.get(name) is not None]
    where += [f"session {_name(found['session_id'])}"] if found.get("session_id") is not None else []
    where += [f"node {found['node_id'][:16]}"] if found.get("node_id") else []
    below = [node[:8] for node in found.get("dependents") or ()]
    lost = f"; with it {_count(len(below), 'node')} below: {_listed(below)}" if below else ""
    return line + (f" ({', '.join(where)})" if where else "") + lost


def stats(store: Store, as_json: Json = False) -> int:
    """Count what a store holds.

    Bytes by kind, live and dead, how much is shared, how deep and wide sessions are.
    """
    from sessiontree.fsck import stats as counted  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415

    check_store(store)
    facts = report_facts(counted(store))
    if as_json:
        write_json(facts)
    else:
        write_pairs(flat(facts))
    return Code.FINE


def gc(
    store: Store,
    recent: Annotated[
        int | None,
        typer.Option(min=0, help="Keep so many of the newest leaves of each session, beside heads and pins.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> int:
    """Remove what nothing leads to.

    What no head, pin or recent leaf leads to goes, and its space comes back. What another process reads stays until it is done.
    Killed half-way, a store is as it was or as it will be.
    """
    with writing(store) as opened, progress("gc", as_json) as bar:
        report = opened.gc(progress=bar) if recent is None else opened.gc(recent=recent, progress=bar)  # type: ignore[attr-defined,unused-ignore]
    facts = report_facts(report)
    if as_json:
        write_json(facts)
    else:
        write_pairs(flat(facts))
    return Code.FINE


def pin(
    store: Store,
    place: NodePlace,
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the pin is called, for unpin.", show_default=False)],
    as_json: Json = False,
) -> int:
    """Keep a node and its path from gc.

    And the features of their media.
    """
    with writing(store) as opened:
        session, node = find_place(opened, place)
        if node is None:
            raise Usage(f"{place!r} is a session; which node of it?")
        session.pin(node, name)  # type: ignore[attr-defined,unused-ignore]
        facts = {"session": session.id, "node": node.id.hex(), "pin": name}
    if as_json:
        write_json(facts)
    else:
        write(f"{_name(session.id)}/{node.id.hex()[:8]} is pinned as {_name(name)}")
    return Code.FINE


def unpin(
    store: Store,
    session_id: Annotated[
        str, typer.Argument(metavar="SESSION", help="A session's id.", autocompletion=complete_session, show_default=False)
    ],
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the pin is called.", show_default=False)],
    as_json: Json = False,
) -> int:
    """Remove a pin. The node stays until gc finds nothing else that leads to it."""
    with writing(store) as opened:
        session = session_named(opened, session_id)
        session.unpin(name)  # type: ignore[attr-defined,unused-ignore]
    if as_json:
        write_json({"session": session.id, "pin": name})
    else:
        write(f"{_name(name)} of {_name(session.id)} is no pin any more")
    return Code.FINE


def drop(store: Store, place: NodePlace, as_json: Json = False) -> int:
    """Drop a node and all that stands below it. The space comes back with gc.

    A node must be named; a session alone is refused.
    """
    with writing(store) as opened:
        session, node = find_place(opened, place)
        if node is None:
            raise Usage(f"{place!r} is a session; which node of it?")
        session.drop(node)  # type: ignore[attr-defined,unused-ignore]
        facts = {"session": session.id, "node": node.id.hex()}
    if as_json:
        write_json(facts)
    else:
        write(f"{_name(session.id)}/{node.id.hex()[:8]} is dropped, and all below it")
    return Code.FINE
