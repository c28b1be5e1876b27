"""Where a request goes on whose client keeps no session: what it resends, to the node that ends its prompt.

What is known is found, and only the rest is appended. A reply is known by its text, at the place where it was generated, and is
taken as it was generated: text that is tokenized again gives other ids. Where the template shows an earlier reply without its
thoughts, its path is rewritten: of each reply the tokens that still stand are kept, and so is all that stands before the first.

Everything here may read and write the disk, and runs on a thread of the store's. What it appends is input; no reply is made here.
``room``: tokens that the reply may come to have; a prompt that leaves less is refused before any of it is appended. ``keep``:
called once that is sure, to have the store keep the request's pictures.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from mini_scheduler.chat import Turn, closing
from mini_scheduler.text import decode, encode
from sessiontree import Edit, LimitExceeded, MediaItem, MediaSpanError, Node, Session

Keep = Callable[[], object]


def nothing() -> None: ...


def continue_tokens(
    session: Session, token_ids: Sequence[int], media: Sequence[MediaItem], room: int = 0, keep: Keep = nothing
) -> Node:
    """The node that ends with this prompt, wherever turns of earlier ones ended. An image is never cut."""
    check_length(session, len(token_ids), room)
    keep()
    match = session.longest_prefix(token_ids, media)
    node = match.node
    if match.within is not None:
        with suppress(MediaSpanError):
            node = session.truncate(match.within, match.length)
    behind = [item for item in media if item.spans[0][0] >= node.stop]
    rest = [item.with_spans([(start - node.stop, size) for start, size in item.spans]) for item in behind]
    return node if node.stop == len(token_ids) else session.append(node, token_ids[node.stop :], media=rest)


def continue_chat(session: Session, turns: Sequence[Turn], room: int = 0, keep: Keep = nothing) -> Node:
    """The node that ends with these turns, the last of which ends where the assistant is to speak."""
    *earlier, last = _questions(turns)
    as_shown = [*(turn.shown for question in earlier for turn in question), *last]
    check_length(session, sum(len(turn.token_ids) for turn in as_shown), room)
    keep()
    node = session.root
    for question in earlier:
        node = _without_thoughts(session, node, question)
    return append_turns(session, node, last)


def append_turns(session: Session, node: Node, turns: Sequence[Turn]) -> Node:
    """The turns behind ``node``: those that are there, the others appended. A reply that was generated there is that reply."""
    for turn in turns:
        node = _next(session, node, turn)
    return node


def check_length(session: Session, count: int, room: int) -> None:
    """Before anything is appended: whether a prompt may have so many tokens, and ``room`` for a reply. Raises LimitExceeded."""
    limit = session.max_tokens
    if limit is not None and count + room > limit:
        what = f"{count} tokens of prompt and {room} new ones; this server has room for {limit}"
        raise LimitExceeded(what, value=count + room, limit=limit)


def reply_of(session: Session, prompt: Node, text: str) -> Node | None:
    """The reply of this text that was generated behind a prompt; the first of equal ones."""
    return next((node for node in replies_of(session, prompt) if node.metadata.get("text") == text), None)


def replies_of(session: Session, prompt: Node) -> Iterator[Node]:
    return (node for node in session.children(prompt) if node.origin == "generated" and node.finish_reason is not None)


def _next(session: Session, node: Node, turn: Turn) -> Node:
    if turn.text is not None:
        known = reply_of(session, node, turn.text)
        if known is not None:
            return _as_said(session, known, turn.text)
        return session.append(node, turn.token_ids, role="assistant", metadata={"text": turn.text})
    ahead = closing(int(node.input_ids(node.stop - 1)[0])) if turn.after_reply else []
    media = [item.with_spans([(start + len(ahead), size) for start, size in item.spans]) for item in turn.media]
    return session.append(node, [*ahead, *turn.token_ids], media=media, role=turn.role)


def _as_said(session: Session, reply: Node, text: str) -> Node:
    """A reply as far as its client saw it: a stop string may have ended the text inside a token."""
    ids = reply.token_ids.tolist()
    if decode(ids) == text:
        return reply
    whole = next(count for count in range(len(ids), -1, -1) if text.startswith(decode(ids[:count])))
    rest = encode(text[len(decode(ids[:whole])) :])
    node = session.truncate(reply, reply.start + whole)
    return session.append(node, rest, role="assistant") if rest else node


def _questions(turns: Sequence[Turn]) -> list[Sequence[Turn]]:
    """A conversation cut before each turn of the user's."""
    cuts = [at for at, turn in enumerate(turns) if turn.role == "user" and at]
    return [turns[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(turns)], strict=True)]


def _without_thoughts(session: Session, node: Node, turns: Sequence[Turn]) -> Node:
    """A question that was answered, as it is shown once the next was asked.

    Its replies were generated while their thoughts were shown, so that is the path on which they are known.
    """
    if all(turn.text is None or turn.shown.text == turn.text for turn in turns):
        return append_turns(session, node, turns)
    known, whole, edits = 0, node, list[Edit]()
    tip = node
    for at, turn in enumerate(turns, 1):
        if turn.text is None:
            tip = _next(session, tip, turn)
            continue
        reply = reply_of(session, tip, turn.text)
        if reply is None:
            break
        tip = whole = reply
        known = at
        if turn.shown.text != turn.text:
            edits.append(_forgetting(reply, turn))
    node = session.rewrite(whole, edits) if edits else whole
    return append_turns(session, node, [turn.shown for turn in turns[known:]])


def _forgetting(reply: Node, turn: Turn) -> Edit:
    """The edit that leaves of a reply what is shown of it: its own tokens where they can be cut there, else that text anew."""
    ids = reply.token_ids.tolist()
    shown = turn.shown.text or ""
    thought = (turn.text or "").removesuffix(shown)
    cut = bisect_left(range(len(ids)), len(thought), key=lambda length: len(decode(ids[:length])))
    if decode(ids[:cut]) == thought and decode(ids[cut:]).startswith(shown):
        return Edit(reply.start, reply.start + cut)
    ends = ids[-1:] if ids and not decode(ids[-1:]) else []  # a control token, which ended it
    return Edit(reply.start, reply.stop, [*encode(shown), *ends])


# --- responses ----------------------------------------------------------------------------------------------------------
def continue_response(
    session: Session,
    before: Node | None,
    had: Sequence[int],
    instructions: Sequence[int],
    turns: Sequence[Turn],
    room: int = 0,
    keep: Keep = nothing,
) -> Node:
    """Behind an earlier response, whose own instructions are not inherited: where these differ, its path gets another beginning.

    All turns of it are kept, token for token, and its media too. ``before``: its reply, whose path begins with ``had``; None: there
    is none. Turns know whether they stand behind it.
    """
    count = sum(len(turn.token_ids) for turn in turns) + len(instructions)
    if before is None:
        check_length(session, count, room)
        keep()
        node = session.append(session.root, instructions, role="system") if instructions else session.root
    else:
        check_length(session, count + before.stop - len(had), room)
        keep()
        node = before if had == instructions else session.rewrite(before, [Edit(0, len(had), instructions)])
    return append_turns(session, node, turns)
