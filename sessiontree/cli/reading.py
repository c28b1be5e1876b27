"""Looking at what is there: ``ls``, ``show``, ``log``, ``diff``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import islice
from typing import Annotated, Any, Final

import numpy as np
import typer

from sessiontree import query
from sessiontree.cli.facts import (
    Marks,
    annotation_facts,
    annotation_line,
    held,
    item_facts,
    namespace_facts,
    node_facts,
    node_line,
    number,
    span_facts,
)
from sessiontree.cli.output import Code, plain, safe, shown, stream_json, styled, write, write_json, write_pairs
from sessiontree.cli.shape import Shape
from sessiontree.cli.source import (
    Json,
    Lenient,
    OnePlace,
    Source,
    Tokenizer,
    complete_place,
    damaged_bytes,
    each_session,
    place_named,
    reading,
    spot_named,
    write_losses,
)
from sessiontree.cli.words import Words, words
from sessiontree.errors import CorruptTree
from sessiontree.interchange import created_at_of, title_of
from sessiontree.interchange.times import iso
from sessiontree.node import Node
from sessiontree.query import Diff
from sessiontree.render import _count, _isolated, _listed, _name
from sessiontree.store import Session

MAX_IDS: Final = 64  # token ids that `show` and `diff` print unless all are asked for
MAX_TEXT: Final = 400  # characters of what stands behind the parting that `diff` prints
MAX_TITLE: Final = 60  # characters of a title that `ls` prints
MAX_TURNS: Final = 10  # turns that `diff` prints of either side
_LONG: Final = 10**9


# --- ls ---------------------------------------------------------------------------------------------------------------
def ls(store: Source, lenient: Lenient = False, as_json: Json = False) -> int:
    """List sessions and their heads.

    In the order they were created.
    """
    unread = 0

    def listed() -> Iterator[tuple[str, Session | CorruptTree]]:
        nonlocal unread
        for session_id, session in each_session(source, lenient):
            unread += isinstance(session, CorruptTree)
            yield session_id, session

    with reading(store, lenient) as source:
        if as_json:
            lost = source.damaged_sessions
            entries = (_session_facts(session_id, session) for session_id, session in listed())
            stream_json({"path": shown(store), "damaged": len(lost), "damaged_bytes": damaged_bytes(source)}, "sessions", entries)
        else:
            for session_id, session in listed():
                write(_session_line(session_id, session, bool(source.losses)))
            if lost := source.damaged_sessions:
                write(styled(f"✗ {_count(len(lost), 'session')} not shown: their own records are damaged", fg="red"))
            write_losses(source)
        hidden = bool(source.losses)
    return Code.CORRUPT if lost or unread or hidden else Code.FINE


def _session_line(session_id: str, session: Session | CorruptTree, damaged: bool) -> str:
    name = styled(_name(session_id, _LONG), bold=True)
    if isinstance(session, CorruptTree):
        return name + "  " + styled(f"✗ cannot be read: {safe(str(session))}", fg="red")
    tree = session._tree
    title, created_at = _imported(session)
    if title is not None:
        name += f"  {_name(title, MAX_TITLE)}"
    if created_at is not None:
        name += f"  {created_at[:10]}"
    facts = [_count(len(tree) - 1, "node") + (f" ({shared:,} shared)" if (shared := _shared(session)) else "")]
    if names := sorted(tree._heads):
        facts.append(f"{_count(len(names), 'head')}: {_listed(names)}")
    if unsure := _uncertain(session):
        facts.append(f"uncertain since damage may hide later moves: {_listed(unsure)}")
    if damaged and (lost := Shape(tree).lost_heads()):
        facts.append(f"at nodes that are lost: {_listed(lost)}")
    if session.pins:
        facts.append(_count(len(session.pins), "pin"))
    facts.append(_name(session.scheme.name))
    facts += [f"{name} {_name(value)}" for name, value in namespace_facts(session.namespace).items() if value is not None]
    return f"{name}  {', '.join(facts)}"


def _imported(session: Session) -> tuple[str | None, str | None]:
    """The title of the conversation that a session was imported of, and when that was begun."""
    with suppress(CorruptTree):  # of the root: the session is there all the same
        began = created_at_of(session)
        return title_of(session), None if began is None else iso(began)
    return None, None


def _shared(session: Session) -> int:
    """How many nodes lie on the path that a fork shares with what it was made from."""
    tip = session._tree._index.layers_upward(session._tree._count)[0][0].tip
    return 0 if tip is None else tip.depth


def _uncertain(session: Session) -> list[str]:
    """Heads that may have been somewhere else later: damage may hide it."""
    return [name for name, head in sorted(session._tree._heads.items()) if head.uncertain]


def _session_facts(session_id: str, session: Session | CorruptTree) -> dict[str, Any]:
    if isinstance(session, CorruptTree):
        return {"id": session_id, "error": str(session)}
    shape = Shape(session._tree)
    return {
        "id": session.id,
        "title": _imported(session)[0],
        "created_at": _imported(session)[1],
        "nodes": len(session._tree) - 1,
        "shared": _shared(session),
        "root": session.root.id.hex(),
        "heads": {name: _hex(shape.id_at(ordinal)) for name, ordinal in shape.ordinals_of_heads().items()},
        "uncertain_heads": _uncertain(session),
        "pins": sorted(pin.hex() for pin in session.pins),
        "scheme": session.scheme.name,
        "scheme_params": plain(dict(session.scheme.params)),
        "namespace": namespace_facts(session.namespace),
        "model_fingerprint": session.root.model_fingerprint,
        "max_tokens": session.max_tokens,
        "reserve_output": session.reserve_output,
    }


def _hex(node_id: bytes | None) -> str | None:
    return None if node_id is None else node_id.hex()


# --- show -------------------------------------------------------------------------------------------------------------
def show(
    store: Source,
    place: OnePlace = None,
    tokenizer: Tokenizer = None,
    every_id: Annotated[bool, typer.Option("--ids", help=f"Print all token ids, not only the first {MAX_IDS}.")] = False,
    lenient: Lenient = False,
    as_json: Json = False,
) -> int:
    """Show all that is known of one node.

    Without a NODE: head "main", or the only head, or, in a session without heads, the node that came last.
    """
    text = words(tokenizer)
    with reading(store, lenient) as source:
        session, node = place_named(source, place)
        shape = Shape(session._tree)
        at = shape.ordinal(node)
        marks, children = Marks(session, shape), [shape.id_at(child) for child in shape.children(at)]
        has_features = [held(node, item) for item in node.media]
        said = [annotation_facts(*each, node) for each in sorted(session.annotations(node).items())]
        positions = {mode: _positions(node, mode) for mode in ("as_decoded", "as_replayed")}
        if as_json:
            facts = node_facts(node, marks, text)
            for item, has in zip(facts["media"], has_features, strict=True):
                item["features"] = has
            facts |= {
                "session": session.id,
                "children": list(map(_hex, children)),
                "token_ids": node.token_ids.tolist(),
                "metadata": plain(node.metadata),
                "annotations": said,
                "positions": positions,
            }
            write_json(facts)
            return Code.FINE
        decoded, replayed = positions["as_decoded"], positions["as_replayed"]
        ids = node.token_ids[: None if every_id else MAX_IDS].tolist()
        more = f" … {len(node) - len(ids):,} more" if len(ids) < len(node) else ""
        origin = f"{node.origin}, {node.finish_reason or 'no finish reason'}, tail {node.tail_policy}"
        pairs = [
            ("node", node.id.hex()),
            ("session", _name(session.id, _LONG)),
            ("parent", "none: the root" if node.parent is None else node.parent.id.hex()),
            ("depth", f"{node.depth:,}"),
            ("tokens", f"[{node.start}, {node.stop}) of the path, {len(node):,} of its own"),
            ("role", "none" if node.role is None else _name(node.role)),
            ("origin", safe(origin) if node.origin == "generated" else node.origin),
            ("key", "none" if node.key is None else _name(node.key, _LONG)),
            ("heads", _listed(marks.heads(node.id)) or "none"),
            ("pinned", "yes" if marks.pinned(node.id) else "no"),
            ("children", f"{len(children):,}" + "".join(f" {child.hex()[:8]}" for child in children[:8] if child)),
            ("below", _count(shape.below[at], "node")),
            ("positions", f"next {decoded['next_position']}, delta {decoded['mrope_position_delta']}"),
        ]
        if replayed != decoded:
            pairs.append(("as replayed", f"next {replayed['next_position']}, delta {replayed['mrope_position_delta']}"))
        for item, has in zip(node.media, has_features, strict=True):
            spans = " ".join(f"[{node.start + start}, {node.start + start + size})" for start, size in item.spans)
            details = {name: value for name, value in item_facts(item).items() if value and name not in ("modality", "identity")}
            pairs.append(
                (
                    item.modality,
                    f"{item.identity.hex()} {spans} {safe(json.dumps(details))}, features {'held' if has else 'absent'}",
                )
            )
        pairs += [("link", f"{link.kind} {link.node_id.hex()}, {link.reused_tokens:,} tokens shared") for link in node.links]
        pairs += [("metadata", safe(json.dumps(plain(node.metadata), ensure_ascii=False)))] if node.metadata else []
        pairs += [("annotation", annotation_line(each)) for each in said]
        pairs.append(("token ids", " ".join(map(str, ids)) + more if ids else "none"))
        write_pairs(pairs)
        if text is not None:
            write("text")
            for line in text.text(node).split("\n"):
                write(f"│ {_isolated(safe(line))}")
    return Code.FINE


def _positions(node: Node, mode: Any) -> dict[str, Any]:
    state = node.position_state(mode)
    return {
        "next_position": number(node.scheme.next_position(state)),
        "mrope_position_delta": number(node.scheme.mrope_position_delta(state)),
    }


# --- log --------------------------------------------------------------------------------------------------------------
def log(
    store: Source,
    place: OnePlace = None,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=0, help="Show so many nodes.", show_default=False)] = None,
    tokenizer: Tokenizer = None,
    lenient: Lenient = False,
    as_json: Json = False,
) -> int:
    """Show the path of a node up to the root, newest first.

    Without a NODE: head "main", or the only head, or, in a session without heads, the node that came last.
    """
    text = words(tokenizer)
    with reading(store, lenient) as source:
        session, shape, ordinal = spot_named(source, place)
        marks = Marks(session, shape)
        upward = islice(shape.upward(ordinal), limit)
        if as_json:
            entries = (node_facts(each, marks, text) for each in upward)
            stream_json({"session": session.id, "node": _hex(shape.id_at(ordinal))}, "nodes", entries)
        else:
            for each in upward:
                write(node_line(each, marks, text))
    return Code.FINE


def _upward(node: Node | None) -> Iterator[Node]:
    while node is not None:
        yield node
        node = node.parent


# --- diff -------------------------------------------------------------------------------------------------------------
def diff(
    store: Source,
    one: Annotated[
        str,
        typer.Argument(
            metavar="A", help="A place: SESSION/NODE, SESSION or NODE.", autocompletion=complete_place, show_default=False
        ),
    ],
    two: Annotated[str, typer.Argument(metavar="B", help="Another one.", autocompletion=complete_place, show_default=False)],
    other: Annotated[
        str | None,
        typer.Option("--in", metavar="STORE", help="The store or bundle that B is in, if it is another.", show_default=False),
    ] = None,
    tokenizer: Tokenizer = None,
    lenient: Lenient = False,
    as_json: Json = False,
) -> int:
    """Show where two nodes or sessions part.

    And how each goes on from there. A session is its head "main", or its only head. Exit code 1: they differ.
    """
    text = words(tokenizer)
    with ExitStack() as stack:
        source = stack.enter_context(reading(store, lenient))
        beside = source if other is None else stack.enter_context(reading(other, lenient))
        first, second = place_named(source, one), place_named(beside, two)
        found = query.diff(first.node, second.node)
        sides = [
            _Side("a", first.session, first.node, found.removed, found.removed_media, found),
            _Side("b", second.session, second.node, found.added, found.added_media, found),
        ]
        if as_json:
            ancestor = found.ancestor
            facts: dict[str, Any] = {
                "kind": found.kind,
                "ancestor": None if ancestor is None else ancestor.id.hex(),
                "depth": None if ancestor is None else ancestor.depth,
                "token_index": found.shared_prefix_len,
            }
            write_json(facts | {side.name: side.facts(text) for side in sides})
        else:
            _write_diff(found, sides, text)
    return Code.FINE if found.kind == "same" else Code.FOUND


class _Side:
    """What one of two paths has behind what both have."""

    def __init__(self, name: str, session: Session, node: Node, rest: Any, media: Any, found: Diff) -> None:
        self.name = name
        self.session = session
        self.marks = Marks(session, Shape(session._tree))
        self.node = node
        self.rest: np.ndarray[Any, Any] = rest
        self.media = media
        first = 0 if found.ancestor is None else found.ancestor.depth + 1
        self.turns = [each for each in _upward(node) if each.depth >= first][::-1]

    def facts(self, text: Words | None) -> dict[str, Any]:
        return {
            "session": self.session.id,
            "node": self.node.id.hex(),
            "depth": self.node.depth,
            "stop": self.node.stop,
            "token_ids": self.rest.tolist(),
            "media": span_facts(self.media),
            "nodes": [node_facts(each, self.marks, text) for each in self.turns],
        }

    def describe(self) -> str:
        node = self.node
        return f"{self.name}  {_name(self.session.id, _LONG)}/{node.id.hex()[:8]}  depth {node.depth:,}, {node.stop:,} tokens"

    def write(self, index: int, text: Words | None) -> None:
        write()
        if not self.turns and not len(self.rest):
            write(f"{self.name} ends there")
            return
        write(f"{self.name} goes on with {_count(len(self.rest), 'token')} in {_count(len(self.turns), 'turn')}")
        for each in self.turns[:MAX_TURNS]:
            write("  " + node_line(each, self.marks, text))
        if len(self.turns) > MAX_TURNS:
            write(f"  ⋮ {_count(len(self.turns) - MAX_TURNS, 'turn')} more")
        for item, start, stop in self.media:
            write(f"  only {self.name} has {item} at [{start}, {stop})")
        if len(self.rest):
            ids = self.rest[:MAX_IDS].tolist()
            more = f" … {len(self.rest) - len(ids):,} more" if len(self.rest) > len(ids) else ""
            write(f"  from token {index} on: {' '.join(map(str, ids))}{more}")
            if text is not None:
                write(f"  {text.beginning(self.node, MAX_TEXT, index)}")


_KINDS: Final = {
    "same": "they are the same",
    "end": "one ends where the other goes on",
    "media": "there stand different media",
    "token": "there stand different tokens",
    "position": "there stand equal tokens at different positions",
    "root": "they have nothing in common: their sessions differ in scheme, namespace or model",
}


def _write_diff(found: Diff, sides: list[_Side], text: Words | None) -> None:
    for side in sides:
        write(side.describe())
    if found.ancestor is not None:
        ancestor = found.ancestor
        write(
            f"both have {_count(found.shared_prefix_len, 'token')}; the last node on both is {ancestor.id.hex()[:8]}"
            f" at depth {ancestor.depth:,}, which ends at token {ancestor.stop}"
        )
    write(
        styled(
            f"at token {found.shared_prefix_len} {_KINDS[found.kind]}"
            if found.kind not in ("same", "root")
            else _KINDS[found.kind],
            bold=True,
        )
    )
    if found.kind != "same":
        for side in sides:
            side.write(found.shared_prefix_len, text)
