"""``import`` and ``export`` in the formats of other tools."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Final

from sessiontree.cli.output import Code, Usage, flat, is_url, progress, report_facts, safe, styled, write, write_json, write_pairs
from sessiontree.cli.source import check_store, connected, find_place, reading, sessions_named
from sessiontree.cli.words import template, words
from sessiontree.errors import InterchangeError
from sessiontree.interchange import DEFAULT_SCHEME, Loss, export_file, format_named, formats, import_file
from sessiontree.node import Namespace
from sessiontree.positions import scheme as scheme_named
from sessiontree.render import _count
from sessiontree.store import SessionStore

#: The format that is ours.
BUNDLE: Final = "bundle"
FORMATS: Final = f"{BUNDLE}, {', '.join(formats())}"


def import_conversations(
    store: str,
    file: str,
    format_name: str,
    *,
    tokenizer: str | None,
    scheme: str,
    namespace: Namespace | None,
    prefix: str,
    salvage: bool,
    as_json: bool,
) -> int:
    """A file of another tool into a store."""
    form, rule, writes = format_named(format_name), scheme_named(scheme), template(tokenizer)
    if not os.path.exists(file):
        raise Usage(f"there is no file {file}")
    with _open(store) as opened, progress("import", as_json) as bar:
        try:
            report = import_file(
                opened, file, form, template=writes, scheme=rule, namespace=namespace, prefix=prefix, salvage=salvage, progress=bar
            )
        except InterchangeError as error:
            error.candidates = ("With --salvage, what cannot be read is left out and counted.",)  # type: ignore[attr-defined]
            raise
    facts = report_facts(report)
    if as_json:
        write_json(facts)
        return Code.FINE
    write(f"imported from {safe(file)}")
    names = facts.pop("session_ids")
    _write_report(facts, report.lost, report.faults)
    for name in names[:10]:
        write(f"  {safe(name)}")
    if len(names) > 10:
        write(f"  … `sessiontree ls {safe(store)}` lists them")
    return Code.FINE


def export_conversations(
    store: str,
    file: str,
    format_name: str,
    sessions: list[str] | None,
    start: str | None,
    *,
    tokenizer: str | None,
    lenient: bool,
    force: bool,
    as_json: bool,
) -> int:
    """Sessions as a file of another tool."""
    form, text = format_named(format_name), words(tokenizer)
    with reading(store, lenient) as source:
        at = None
        if start is not None:
            session, node = find_place(source, start)
            at = (session.id, session.root if node is None else node)
        names = sessions_named(source, sessions)
        decode = None if text is None else text.of_ids
        report = export_file(source, file, form, names, at=at, decode=decode, overwrite=force)
    facts = report_facts(report)
    if as_json:
        write_json(facts)
        return Code.FINE
    for each in report.files[:10]:
        write(f"written to {safe(each)}")
    _write_report({name: value for name, value in facts.items() if name != "files"}, report.lost, ())
    return Code.FINE


def _write_report(facts: Mapping[str, Any], lost: Iterable[Loss], faults: Iterable[Loss]) -> None:
    write_pairs(flat({name: value for name, value in facts.items() if name not in ("format", "lost", "faults")}), "  ")
    for word, losses in (("lost", lost), ("not read", faults)):
        for loss in losses:
            where = f", first {safe(loss.first)}" if loss.first else ""
            write(styled(f"  {word}: ", fg="yellow") + f"{safe(loss.what)} ({_count(loss.count, 'time')}{where})")


def _open(store: str) -> Any:
    """A store to import into, made if there is none. What an import did is on disk when it ends, not at each turn."""
    if is_url(store):
        return connected(store)
    if os.path.isfile(store):
        raise Usage(f"{store} is a file; import into a store")
    if os.path.exists(store):
        check_store(store)
    return SessionStore.open(store)


__all__ = ["BUNDLE", "DEFAULT_SCHEME", "FORMATS", "export_conversations", "import_conversations"]
