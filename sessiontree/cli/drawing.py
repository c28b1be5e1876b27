"""``tree``: a picture of a session that begins at once, however many nodes it has.

The picture is that of ``to_text``: a turn stands straight below the one before; where a path forks, branches are indented, in
commit order, and the one with the most nodes comes last and goes straight on. The shape is known without reading nodes, and
each is read when its line is written. A node that cannot be read is a line too, and what stands below it is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import typer

from sessiontree.cli.facts import Marks, node_facts, node_line
from sessiontree.cli.output import Code, safe, stream_json, styled, write
from sessiontree.cli.shape import Shape
from sessiontree.cli.source import (
    Json,
    Lenient,
    OnePlace,
    Source,
    Tokenizer,
    complete_node,
    damaged_bytes,
    find_place,
    node_named,
    reading,
    write_losses,
)
from sessiontree.cli.words import Words, words
from sessiontree.errors import CorruptTree
from sessiontree.node import Node
from sessiontree.render import _count, _listed


class Row(NamedTuple):
    """One line of a picture. ``node``: None where it cannot be read, for the reason ``error``. ``cut``: nodes below not shown."""

    rail: str
    below_rail: str
    ordinal: int
    node: Node | None
    error: CorruptTree | None
    cut: int


def rows(shape: Shape, start: int = 0, depth: int | None = None) -> Iterator[Row]:
    """The picture from a node on, ``depth`` levels of it; each node is read when its row is asked for."""
    waiting = [(start, "", "", 0)]  # a node, its own rail, that of what comes below it, and its level
    while waiting:
        ordinal, own, rail, level = waiting.pop()
        try:
            node, error = shape.node(ordinal), None
        except CorruptTree as damage:
            node, error = None, damage
        branches = [] if error is not None or level == depth else shape.children(ordinal)
        yield Row(own, rail, ordinal, node, error, 0 if branches else shape.below[ordinal])
        if branches:
            last = max(branches, key=lambda branch: (shape.below[branch], branch))
            leaves = len(branches) > 1 and not shape.below[last]
            waiting.append((last, rail + "└─", rail + "  ", level + 1) if leaves else (last, rail, rail, level + 1))
            waiting += [(branch, rail + "├─", rail + "│ ", level + 1) for branch in reversed(branches) if branch != last]


def tree(
    store: Source,
    place: OnePlace = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="NODE",
            help="Draw what stands below this node: a head, root, or the beginning of an id.",
            autocompletion=complete_node,
            show_default=False,
        ),
    ] = None,
    depth: Annotated[int | None, typer.Option(min=0, help="Draw so many levels below the first node.", show_default=False)] = None,
    tokenizer: Tokenizer = None,
    lenient: Lenient = False,
    as_json: Json = False,
) -> int:
    """Draw a session as a tree.

    ● generated, ○ given, ← heads. A turn stands straight below the one before. Where a path forks, branches are indented, and
    the one with the most nodes comes last and goes straight on. Exit code 5: some nodes cannot be read; they are lines of the
    picture.
    """
    text = words(tokenizer)
    with reading(store, lenient) as source:
        session, node = find_place(source, place)
        top = node if start is None else node_named(session, start)
        shape = Shape(session._tree)
        first = 0 if top is None else shape.ordinal(top)
        marks = Marks(session, shape)
        lost = 0 if first else shape.lost
        lost_heads = [] if first else shape.lost_heads()
        unreadable = lost > 0 or bool(lost_heads or source.losses)

        def noticed() -> Iterator[Row]:
            nonlocal unreadable
            for row in rows(shape, first, depth):
                unreadable |= row.error is not None
                yield row

        if as_json:
            facts = {
                "session": session.id,
                "count": len(session._tree),
                "lost": lost,
                "lost_heads": lost_heads,
                "damaged_bytes": damaged_bytes(source),
            }
            entries = (_row_facts(row, shape, marks, text) for row in noticed())
            stream_json(facts, "nodes", entries)
        else:
            for row in noticed():
                if row.node is not None:
                    write(row.rail + node_line(row.node, marks, text))
                else:
                    write(
                        row.rail + styled(f"✗ {_short(shape.id_at(row.ordinal))} cannot be read: {safe(str(row.error))}", fg="red")
                    )
                if row.cut:
                    why = "below it cannot be read" if row.error else "below"
                    write(f"{row.below_rail}⋮ {_count(row.cut, 'node')} {why}")
            if lost:
                write(styled(f"✗ {_count(lost, 'node')} not shown: what they stand under is missing", fg="red"))
            write_losses(source)
            if lost_heads:
                write(styled(f"✗ at nodes of which nothing is left: {_listed(lost_heads)}", fg="red"))
    return Code.CORRUPT if unreadable else Code.FINE


def _short(node_id: bytes | None) -> str:
    return "a node" if node_id is None else node_id.hex()[:8]


def _row_facts(row: Row, shape: Shape, marks: Marks, text: Words | None) -> dict[str, Any]:
    below = {"below": shape.below[row.ordinal]}
    if row.node is not None:
        return node_facts(row.node, marks, text) | below
    node_id = shape.id_at(row.ordinal)
    facts: dict[str, Any] = {"id": None, "heads": [], "pinned": False}
    if node_id is not None:
        facts = {"id": node_id.hex(), "heads": marks.heads(node_id), "pinned": marks.pinned(node_id)}
    return facts | below | {"error": str(row.error)}
