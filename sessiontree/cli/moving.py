"""Sessions that go elsewhere: ``copy``, and bundles by ``export`` and ``import``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from sessiontree.cli.conversations import BUNDLE, DEFAULT_SCHEME, FORMATS, export_conversations, import_conversations
from sessiontree.cli.output import (
    Code,
    NoStore,
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
from sessiontree.cli.source import (
    Json,
    Lenient,
    Source,
    Tokenizer,
    complete_place,
    complete_session,
    find_place,
    is_bundle,
    reading,
    sessions_named,
    spot_named,
    writing,
)
from sessiontree.errors import IncompatibleStore
from sessiontree.node import Namespace
from sessiontree.render import _count, _listed, _name
from sessiontree.store import SessionStore

Bundle = Annotated[
    str, typer.Argument(metavar="FILE", help="The file; a bundle, unless --format says what else.", show_default=False)
]
FormatName = Annotated[str, typer.Option("--format", metavar="NAME", help=f"What the file is: {FORMATS}.")]
_FIELDS: Final = ", ".join(Namespace._fields)


def export(
    store: Source,
    file: Bundle,
    sessions: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SESSION...",
            help="Sessions to export, by id, the beginning of one, or a pattern with * and ?; all, if none is named.",
            autocompletion=complete_session,
            show_default=False,
        ),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="PLACE",
            help="Instead of sessions: SESSION/NODE, its path and what stands below it.",
            autocompletion=complete_place,
            show_default=False,
        ),
    ] = None,
    format_name: FormatName = BUNDLE,
    tokenizer: Tokenizer = None,
    features: Annotated[bool, typer.Option("--features", help="Of a bundle: take pixels and encoder outputs along.")] = False,
    zstd: Annotated[bool, typer.Option("--zstd", help="Of a bundle: compress.")] = False,
    lenient: Lenient = False,
    force: Annotated[bool, typer.Option("--force", help="Write over FILE if it is there.")] = False,
    as_json: Json = False,
) -> int:
    """Write sessions to one file, of ours or for another tool.

    All of them, those that are named, or what stands below one node. A FILE that is there is left alone without --force, and the
    inside of a store always. In another tool's format, what that cannot hold is counted and named; turns that were not imported
    get their words by --tokenizer.
    """
    from sessiontree.bundles import export_bundle  # noqa: PLC0415

    if sessions and start is not None:
        raise Usage("either sessions are exported, or what stands below --from")
    _check_file(file)
    if os.path.exists(file) and not force:
        raise Usage(f"{file} is there already; --force writes over it")
    if format_name != BUNDLE:
        if any((parent / "FORMAT").exists() and (parent / "segments").exists() for parent in Path(file).absolute().parents):
            raise Usage(f"{file} is inside of a store")
        return export_conversations(
            store, file, format_name, sessions, start, tokenizer=tokenizer, lenient=lenient, force=force, as_json=as_json
        )
    with reading(store, lenient) as source, progress("export", as_json) as bar:
        names = sessions_named(source, sessions)
        subtree = None
        if start is not None:
            session, subtree = find_place(source, start)
            names = [session.id]
        compress: Literal["zstd"] | None = "zstd" if zstd else None
        report = export_bundle(source, file, names, subtree=subtree, features=features, compress=compress, progress=bar)
    facts = report_facts(report)
    if as_json:
        write_json(facts)
    else:
        write(f"written to {safe(file)}")
        write_pairs(flat({"features" if name == "media" else name: value for name, value in facts.items()}), "  ")
        if report.left_out:
            write(f"  not in it, since they cannot be read: {_listed(report.left_out)}")
    return Code.CORRUPT if report.skipped or report.left_out or report.unread else Code.FINE


def import_(
    store: Annotated[
        str,
        typer.Argument(
            metavar="STORE", help="A store's directory, made if there is none, or a postgresql:// URL.", show_default=False
        ),
    ],
    file: Bundle,
    namespace: Annotated[
        list[str] | None,
        typer.Option(
            "--namespace",
            metavar="FIELD=VALUE",
            help=f"Import into another namespace than the bundle's: {_FIELDS}. Nodes get other ids then.",
            show_default=False,
        ),
    ] = None,
    format_name: FormatName = BUNDLE,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="NAME",
            help="Of another tool's file: write its messages as tokens, by the chat template of qwen or of what transformers finds "
            "in local files. Without it they are kept as words alone.",
            show_default=False,
        ),
    ] = None,
    scheme: Annotated[
        str, typer.Option("--scheme", metavar="NAME", help="Of another tool's file: the position scheme of the sessions.")
    ] = DEFAULT_SCHEME,
    prefix: Annotated[
        str, typer.Option("--prefix", metavar="TEXT", help="Of another tool's file: what the sessions' ids begin with.")
    ] = "",
    salvage: Annotated[
        bool, typer.Option("--salvage", help="Of another tool's file: leave out, and count, what cannot be read.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Read a bundle, or another tool's file, into a store.

    What is there already stays, a second time changes nothing, and what was interrupted goes on. Every digest of a bundle is
    checked; of another tool's file or folder, what a store has no place for is counted and named.
    """
    from sessiontree.bundles import import_bundle, open_bundle  # noqa: PLC0415

    _check_file(file)
    target = _namespace(namespace)
    if format_name != BUNDLE:
        return import_conversations(
            store,
            file,
            format_name,
            tokenizer=tokenizer,
            scheme=scheme,
            namespace=target,
            prefix=prefix,
            salvage=salvage,
            as_json=as_json,
        )
    if not os.path.isfile(file):
        raise NoStore(f"there is no bundle at {file}")
    if not is_bundle(Path(file)):
        error = IncompatibleStore(f"{file} is no bundle", path=file)
        error.candidates = ("Another tool's file is imported with --format NAME.",)  # type: ignore[attr-defined]
        raise error
    if is_url(store) or not os.path.exists(store):
        open_bundle(file).close()  # before anything is made for it
    with writing(store, make=True) as opened, progress("import", as_json) as bar:
        report = import_bundle(opened, file, namespace=target, progress=bar)
    facts = report_facts(report)
    if as_json:
        write_json(facts)
    else:
        write(f"imported from {safe(file)}")
        named = {"features" if name == "media" else name: value for name, value in facts.items()}
        write_pairs(flat(named | {"ids": list(facts["ids"])}), "  ")
        for head in facts["heads_kept"]:
            name = f"{_name(head['session_id'])}/{_name(head['name'])}"
            write(f"  {name} stays at {head['here'][:8]}; in the bundle it is at {head['bundled'][:8]}")
        for each in facts["annotations_kept"]:
            place = f"{_name(each['session_id'])}/{each['node_id'][:8]}"
            write(f"  annotation {_name(each['name'])} of {place} stays as it is; the bundle says something else")
    return Code.FINE


def _check_file(file: str) -> None:
    """Raises Usage for what names no file."""
    if is_url(file):
        raise Usage(f"{shown(file)} is no file: `sessiontree copy` goes there")
    if file == "-":
        raise Usage("a file has a name; nothing is read from stdin or written to stdout")


def _namespace(fields: list[str] | None) -> Namespace | None:
    if not fields:
        return None
    pairs = [field.partition("=") for field in fields]
    for name, equals, _ in pairs:
        if not equals or name not in Namespace._fields:
            raise Usage(f"--namespace takes FIELD=VALUE with one of {_FIELDS}, not {name!r}")
    return Namespace.of({name: value or None for name, _, value in pairs})


def fork(
    store: Annotated[str, typer.Argument(metavar="STORE", help="A store's directory, or a postgresql:// URL.", show_default=False)],
    place: Annotated[
        str,
        typer.Argument(metavar="PLACE", help="SESSION/NODE, SESSION or NODE.", autocompletion=complete_place, show_default=False),
    ],
    session: Annotated[str, typer.Argument(metavar="SESSION", help="The id of the new session.", show_default=False)],
    as_json: Json = False,
) -> int:
    """Make a session of the path of one node.

    The path is shared, not copied, and ends in head "main" there.
    """
    with writing(store) as opened:
        source, shape, ordinal = spot_named(opened, place)
        tip = shape.node(ordinal)
        made = opened.fork(source, tip, session)
        made.set_head("main", made.node(tip.id))
    if as_json:
        write_json({"session": made.id, "from": source.id, "node": tip.id.hex()})
    else:
        write(f"{_name(made.id)} goes on from {_name(source.id)}/{tip.id.hex()[:8]}")
    return Code.FINE


def copy(
    store: Annotated[
        str,
        typer.Argument(metavar="FROM", help="A store's directory, a postgresql:// URL, or a bundle's file.", show_default=False),
    ],
    target: Annotated[
        str,
        typer.Argument(metavar="TO", help="The same. What is not there is made: a store, or a bundle.", show_default=False),
    ],
    sessions: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SESSION...",
            help="Sessions to copy, by id, the beginning of one, or a pattern with * and ?; all, if none is named.",
            autocompletion=complete_session,
            show_default=False,
        ),
    ] = None,
    bundle: Annotated[
        bool, typer.Option("--bundle", help="If TO is not there, make it a bundle, as is done where its name ends in .bundle.")
    ] = False,
    zstd: Annotated[bool, typer.Option("--zstd", help="Compress the bundle.")] = False,
    as_json: Json = False,
) -> int:
    """Bring sessions from one store to another.

    With heads, pins, forks, annotations, features and aliases of their media. What was begun goes on: sessions that TO has are
    left alone if they are equal, get what they lack if they are an earlier state, and are refused if they are anything else. In
    the end both sides are read and the digests of each session compared. Exit code 1: they differ, or are refused.
    """
    from sessiontree.copying import copy_sessions  # noqa: PLC0415

    if _same(store, target):
        raise Usage("FROM and TO are the same")
    with reading(store) as source:
        names = sessions_named(source, sessions)
        with _opened(target, bundle=bundle or zstd) as there, progress("copy", as_json) as bar:
            report = copy_sessions(source, there, names, compress="zstd" if zstd else None, progress=bar)
    facts = report_facts(report)
    if as_json:
        write_json({"from": shown(store), "to": shown(target)} | facts)
        return Code.FINE if report.ok else Code.FOUND
    for each in facts["sessions"]:
        write(_copied(each))
    write_pairs(flat({"sessions": facts["sessions"], "features": report.features, "aliases": report.aliases}))
    if report.absent:
        write(styled(f"✗ features of {_count(report.absent, 'item')} are in {safe(shown(store))} alone", fg="red"))
    write(styled("both sides are equal", fg="green") if report.ok else styled("THEY DIFFER", fg="red", bold=True))
    return Code.FINE if report.ok else Code.FOUND


def _copied(facts: dict[str, Any]) -> str:
    """What became of a session, in a line."""
    line = f"{_name(facts['session_id'])}  {_count(facts['nodes'], 'node')}, {facts['added']:,} new, "
    if facts["equal"]:
        return f"{line}{facts['source'][:16]}"
    return styled("✗ ", fg="red") + f"{line}{facts['source'][:16]} here, {facts['target'][:16] or 'nothing'} there"


def _same(one: str, other: str) -> bool:
    if is_url(one) or is_url(other):
        return one == other
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)


@contextmanager
def _opened(target: str, *, bundle: bool) -> Iterator[SessionStore | Path]:
    """A store to copy to, or a bundle's path."""
    if is_url(target) or os.path.isdir(target) or not (bundle or target.endswith(".bundle") or os.path.exists(target)):
        with writing(target, make=True) as store:
            yield store
    else:
        yield Path(target)
