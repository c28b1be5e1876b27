"""Files of other tools on their way into a store and out of it again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sessiontree import SessionStore
from sessiontree.interchange import (
    Conversation,
    ExportReport,
    ImportReport,
    Losses,
    SourceFile,
    export_file,
    format_named,
    import_file,
)


def said(path: Path) -> list[Any]:
    """The JSON values of a file: its lines, or the whole of it."""
    text = path.read_text()
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else [json.loads(text)]


def same(one: Any, other: Any) -> bool:
    """Whether two are the same JSON value: the order of keys does not count, the types of numbers do."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def through_a_store(
    path: Path, name: str, work: Path, *, salvage: bool = False, look: Callable[[SessionStore], None] = lambda store: None
) -> tuple[list[Any], ImportReport, ExportReport]:
    """What comes out of a store after a file went in, in the same format. ``look``: at the store in between."""
    out = work / f"out{path.suffix}"
    out.unlink(missing_ok=True)
    with SessionStore.in_memory() as store:
        read = import_file(store, path, name, salvage=salvage)
        look(store)
        written = export_file(store, out, name)
    return said(out), read, written


def read_conversations(path: Path, name: str, losses: Losses | None = None) -> list[Conversation]:
    """The conversations of a file, with their turns in lists."""
    form = format_named(name)
    assert form.read is not None
    found = []
    for conversation in form.read(SourceFile(path), losses or Losses(path.name)):
        conversation.turns = list(conversation.turns)
        found.append(conversation)
    return found


def written(conversations: list[Conversation], name: str, path: Path) -> Losses:
    """Conversations as a file; what it cannot hold."""
    form = format_named(name)
    assert form.write is not None
    losses = Losses(path.name)
    form.write(conversations, path, losses)
    return losses
