"""Messages behind a node, as an import makes them: how a conversation that was imported goes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sessiontree.interchange import words
from sessiontree.interchange.conversations import Conversation, Message
from sessiontree.interchange.loading import Importer
from sessiontree.interchange.losses import Losses
from sessiontree.interchange.openai import FORMAT, turns_of
from sessiontree.node import Node
from sessiontree.store import Session, SessionStore


def append_messages(
    store: SessionStore,
    session: Session,
    parent: Node | bytes,
    messages: Iterable[Message],
    *,
    template: Any = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Node:
    """A turn for each message, one behind the other under ``parent``; the last of them.

    ``messages``: OpenAI's chat messages; pictures as data URLs are kept once in ``store``, the session's. ``template``: as for
    :func:`import_file`; ``tools``: what it shows to the model, kept with the session where that has none. The same messages under
    the same node are the same turns. Raises InterchangeError for what is no message, UnknownNode, and what appending raises; turns
    before the one that is refused are there then.
    """
    losses = Losses(session.id)
    turns = turns_of(list(messages), "messages", losses)
    at = parent if isinstance(parent, Node) else session.node(parent)
    conversation = Conversation(id=session.id, turns=turns, tools=tuple(tools))
    tip = Importer(store, FORMAT, template).append(session, at, conversation, losses)
    facts = words.facts_from(session.annotation(session.root, words.ANNOTATION))
    if tools and not facts.get("tools"):
        session.annotate(session.root, {words.ANNOTATION: words.to_json({**facts, "tools": list(tools)})})
    return tip
