"""Sessions of a store as conversations, and those as files of other tools."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import attrs
import numpy as np

from sessiontree.errors import UnknownFormat, Unsupported
from sessiontree.interchange import words
from sessiontree.interchange.conversations import MAIN, Conversation, Image, Message, Turn, messages_of
from sessiontree.interchange.formats import LACKING, Format, format_named
from sessiontree.interchange.loading import FILE, UNREADABLE, joined
from sessiontree.interchange.losses import Loss, Losses
from sessiontree.interchange.narrowing import narrowed
from sessiontree.node import Node
from sessiontree.store import Session, SessionStore

#: Turns after which what was read of the sessions so far may leave memory.
_EVICT_EVERY: Final = 2048

Decode = Callable[[list[int]], str]


@attrs.frozen(kw_only=True)
class ExportReport:
    """What an export wrote. ``files``: their paths, the first hundred. ``sessions``, ``turns``, ``images``: how many of each.
    ``lost``: what the format cannot hold.
    """

    format: str
    files: tuple[str, ...] = ()
    sessions: int = 0
    turns: int = 0
    images: int = 0
    lost: tuple[Loss, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """All of it in JSON's types."""
        return attrs.asdict(self)


def export_file(
    store: SessionStore,
    path: str | Path,
    format: str | Format,
    sessions: Iterable[str] | None = None,
    *,
    at: tuple[str, Node | bytes] | None = None,
    decode: Decode | None = None,
    overwrite: bool = False,
) -> ExportReport:
    """Write sessions as a file of another tool.

    ``sessions``: their ids; None: all. ``at``: instead of these, (session id, node): the path of that node and what is below it.
    ``decode``: ids to text, for turns that were not imported and so have tokens alone; without it they say nothing, which is
    counted. Of a format that holds one conversation a file, several sessions make a folder.

    The file is there whole or not at all. Raises UnknownFormat; Unsupported where ``path`` is there already, unless it is a file
    and ``overwrite`` says so; UnknownSession, UnknownNode, and what reading nodes raises.
    """
    form = format if isinstance(format, Format) else format_named(format)
    if form.write is None:
        raise UnknownFormat(f"{form.name} is read, not written", name=form.name, known=())
    target = Path(path)
    if target.exists() and not (overwrite and target.is_file()):
        raise Unsupported(f"{target} is there already")
    names = [at[0]] if at is not None else list(store.sessions() if sessions is None else sessions)
    saver = _Saver(store, form, names, None if at is None else at[1], decode)
    if not form.single or len(names) == 1:
        _written(form, map(saver.conversation, names), target, saver.losses)
        files = [target]
    else:
        made = target.with_name(f".{target.name}.partial-{os.getpid()}")
        made.mkdir()
        files = []
        try:
            for name in names:
                file = f"{_file_name(name)}{form.suffix}"
                _written(form, [saver.conversation(name)], made / file, saver.losses)
                files.append(target / file)
            made.rename(target)
        except BaseException:
            shutil.rmtree(made)
            raise
    return ExportReport(
        format=form.name,
        files=tuple(map(str, files[:100])),
        sessions=len(names),
        turns=saver.turns,
        images=saver.images,
        lost=joined([saver.losses.lost]),
    )


def _file_name(session_id: str) -> str:
    """What the file of a session is called, of at most 200 characters, another for each session."""
    name = quote(session_id, safe=" ")
    return name if len(name) <= 200 else f"{name[:160]}-{blake2b(session_id.encode(), digest_size=16).hexdigest()}"


def _written(form: Format, conversations: Iterable[Conversation], target: Path, losses: Losses) -> None:
    """A file under its name once all of it is on disk."""
    assert form.write is not None
    made = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        form.write(conversations, made, losses)
        with made.open("rb+") as file:
            os.fsync(file.fileno())
        made.replace(target)
    finally:
        made.unlink(missing_ok=True)


class _Saver:
    """One export: what is the same for all its sessions, and what is counted over them."""

    def __init__(
        self, store: SessionStore, form: Format, names: Iterable[str], at: Node | bytes | None, decode: Decode | None
    ) -> None:
        self.store = store
        self.form = form
        self.taken = set(names)  # what conversations are called, or may be
        self.at = at
        self.decode = decode
        self.losses = Losses("export")
        self.turns = self.images = self.evicted = 0

    def conversation(self, session_id: str) -> Conversation:
        if self.turns - self.evicted > _EVICT_EVERY:
            self.evicted = self.turns
            self.store.evict()
        session = self.store.get(session_id)
        at = self.at
        return self.of(session, at if at is None or isinstance(at, Node) else session.node(at))

    def of(self, session: Session, at: Node | None) -> Conversation:
        root = session.root
        facts = words.facts_from(session.annotation(root, words.ANNOTATION))
        own = facts.get("format") == self.form.name
        if facts.get("fields") and not own:
            self.losses.add(f"what only {facts.get('format')} says of a whole conversation", session.id)
        read_as, title = facts.get("id", session.id), facts.get("title")
        name = self._called(session.id, read_as, words.is_own(facts, session.id))
        if title and not words.is_own(facts, session.id):  # a fork's: nobody is to take one for the other
            title = f"{title} ({session.id})"
        nodes = _Nodes(session, at)
        heads = {name: nodes.name(node) for name, node in session.heads.items() if node in nodes and node != root}
        if at is not None and at != root:
            heads.setdefault(MAIN, nodes.name(at))
        self._count_lacking({name for name in ("title", "created_at") if facts.get(name)}, session.id)
        self._count_lacking(["heads"] * len(heads.keys() - {MAIN}), session.id)
        last = nodes.name(nodes.last) if nodes.last is not None else None
        was = facts.get("heads", {}).get(MAIN) if own and words.is_own(facts, session.id) else None
        if heads.get(MAIN, last) != last and (MAIN not in session.heads or session.heads[MAIN].id.hex() != was):
            self._count_lacking(["main"], session.id)
        return Conversation(
            id=name,
            read_as=None if name == read_as else read_as,
            turns=self._turns(session, nodes),
            title=title,
            created_at=facts.get("created_at"),
            tools=tuple(facts.get("tools", ())),
            heads=heads,
            fields=facts.get("fields", {}) if own else {},
        )

    def _count_lacking(self, names: Iterable[str], place: str) -> None:
        for name in names:
            if name in self.form.lacks:
                self.losses.add(LACKING[name], place)

    def _called(self, session_id: str, read_as: str, own: bool) -> str:
        """What a conversation is called: as when it was read, if this is that one and no other of the file is called so."""
        if own and (read_as == session_id or read_as not in self.taken):
            self.taken.add(read_as)
            return read_as
        return session_id

    def _turns(self, session: Session, nodes: _Nodes) -> Iterator[Turn]:
        for node in nodes:
            self.turns += 1
            parent = node.parent
            first = parent is None or parent.parent is None
            turn = self._turn(session, node, nodes.name(node), None if parent is None or first else nodes.name(parent))
            yield from self._apart(turn) if self.form.one_result else (turn,)

    def _apart(self, turn: Turn) -> Iterator[Turn]:
        """A turn, or where it has several results of tools, one for each and one for what stands beside them."""
        messages = messages_of(turn)
        if len(messages) > 1:
            self.losses.add("a turn with several results of tools, written as one for each", str(turn.id))
        for number, message in enumerate(messages[:-1], 1):
            made = attrs.evolve(
                turn, id=f"{turn.id}/{number}", message=message, token_ids=None, media=(), annotations={}, fields={}
            )
            yield made
            turn = attrs.evolve(turn, parent=made.id)
        yield turn if len(messages) < 2 else attrs.evolve(turn, message=messages[-1])

    def _turn(self, session: Session, node: Node, name: str, parent: str | None) -> Turn:
        metadata = node.metadata
        fields = words.fields_of(node)
        own = words.MESSAGE in metadata or bool(fields)  # it was imported
        for other in fields.keys() - {self.form.name}:
            self.losses.add(f"what only {other} says of a turn", name)
        message: Message | None = words.message_of(node)
        if message is None and node.role != UNREADABLE and len(node) and self.form.name not in fields:
            message = self._decoded(node, name)
        images = tuple(self._images(session, node, name))
        annotations = {each: value for each, value in session.annotations(node).items() if each != words.ANNOTATION}
        finish_reason = metadata.get(words.FINISH_REASON) if own else node.finish_reason
        for each in annotations if "annotations" in self.form.lacks else ():
            self.losses.add(f"the annotation {each}", name)
        if len(node) > len(node.media) or node.token_ids.any():  # more than what stands for pictures where nothing made tokens
            self._count_lacking(["token_ids", *(["media"] if node.media else ())], name)
        if self.form.name not in fields:
            said = {"times": metadata.get(words.CREATED_AT), "finish_reason": finish_reason}
            said["derived_from"] = metadata.get(words.DERIVED_FROM)
            self._count_lacking([each for each, value in said.items() if value is not None], name)
            message = None if message is None else narrowed(message, self.form.keys, name, self.losses)
        return Turn(
            id=name,
            parent=parent,
            message=message,
            role=node.role or "note",
            images=images,
            created_at=metadata.get(words.CREATED_AT),
            token_ids=node.token_ids,
            media=node.media,
            generated=node.origin == "generated",
            finish_reason=finish_reason,
            annotations=annotations,
            derived_from=tuple(metadata.get(words.DERIVED_FROM, ())),
            fields=fields.get(self.form.name, {}),
            place=name,
        )

    def _decoded(self, node: Node, name: str) -> dict[str, Any]:
        """A message of a node that has tokens alone."""
        if self.decode is None:
            self.losses.add("the words of turns that have tokens alone: no tokenizer was given", name)
            return {"role": node.role, "content": None}
        if node.media:
            self.losses.add("pictures of turns that have tokens alone", name, len(node.media))
        placed = np.zeros(len(node), bool)
        for item in node.media:
            for offset, length in item.spans:
                placed[offset : offset + length] = True
        return {"role": node.role, "content": self.decode(node.token_ids[~placed].tolist())}

    def _images(self, session: Session, node: Node, name: str) -> Iterator[Image]:
        images = node.metadata.get(words.IMAGES, ())
        items = {item.identity: item for item in reversed(node.media)} if images else {}
        for kept in images:
            self.images += 1
            data = kept.get("data")
            if data is None:
                item = items.get(kept["identity"])
                features = None if item is None else self.store.get_features(item)
                data = None if features is None or FILE not in features else bytes(features[FILE])
            if data is None:
                self.losses.add("pictures that are no longer kept", name)
            yield Image(b"" if data is None else data, kept["mime_type"])


class _Nodes:
    """The nodes of a session in commit order, but for the root; or the path of one and what is below it."""

    def __init__(self, session: Session, at: Node | None) -> None:
        self._at = at
        self._path: Sequence[Node] = () if at is None else at.path()[1:]  # the root's is empty
        below = session.root if at is None else at
        self._nodes = [*self._path, *session.descendants(below, "commit")]
        self._keys = Counter(node.key for node in self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    @property
    def last(self) -> Node | None:
        """The one that came last."""
        return self._nodes[-1] if self._nodes else None

    def name(self, node: Node) -> str:
        """What its turn is called: the key it was imported or committed under where only it has that, else its own id."""
        return node.key if node.key is not None and self._keys[node.key] == 1 else node.id.hex()

    def __contains__(self, node: Node) -> bool:
        at = self._at
        return at is None or node in self._path or (node.depth > at.depth and node.ancestor(at.depth) == at)
