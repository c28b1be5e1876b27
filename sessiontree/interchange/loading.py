"""Conversations into a store.

A conversation becomes a session and a turn a node, under the node of its parent, with its own id as key. So whatever is imported
again is there already: nodes are found, not made, and a conversation that has grown since gets what is new. A session that was
imported whole says so, and is passed over as long as its conversation is the same. That is all that makes an import go on after a
kill: what it had done takes no more than reading it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, NamedTuple
from uuid import UUID

import attrs
import numpy as np

from sessiontree.backends.base import Progress
from sessiontree.errors import HeadMoved, InterchangeError, KeyTaken, SessionExists, SessionTreeError, UnknownFormat, UnknownHead
from sessiontree.interchange import words
from sessiontree.interchange.conversations import MAIN, Conversation, Image, Turn
from sessiontree.interchange.formats import Format, format_named
from sessiontree.interchange.losses import Loss, Losses
from sessiontree.interchange.source import SourceFile
from sessiontree.interchange.templates import LOOKS_BACK, SYSTEM, ChatTemplate, Rendered, TemplateRefused
from sessiontree.media import MediaItem, media_identity
from sessiontree.node import Namespace, Node
from sessiontree.positions import PositionScheme
from sessiontree.positions import scheme as scheme_named
from sessiontree.store import MAX_SESSION_ID, Session, SessionStore

#: The scheme of sessions of which nothing else is said: a token's position is its index.
DEFAULT_SCHEME: Final = "text@hf5"
#: The role of a node in the place of a turn that could not be read.
UNREADABLE: Final = "unreadable"
#: The features of a picture's item that are its file.
FILE: Final = "file"
_NEVER_COMMITTED: Final = ("abort", "error")
_COMPARED: Final = 16  # branches of a conversation that are compared with what a template writes for the whole
_TOGETHER: Final = 64  # tool results that are asked for together, at most
_LOOKED_AT: Final = 256  # nodes that are looked at for the last question
_BEGINNING: Final = 16  # nodes that are looked at for a system message
_EVICT_EVERY: Final = 8 * 2**20  # bytes of input
_IDS_TOLD: Final = 100
_MOVES: Final = 8  # how often a head is tried that others move


@attrs.frozen(kw_only=True)
class ImportReport:
    """What an import did. Sessions: ``added``, ``grown`` (there before, with nodes that are new), ``known`` (nothing new in them);
    ``session_ids``: the first hundred of them, in order. ``turns``: of them all but those that were passed over; ``new_nodes``: how
    many of these made a node. ``images``: pictures that were met; ``tokens``: of the new nodes. ``heads_kept``: heads that stand
    elsewhere than in the file and stay. ``lost``, ``faults``: what has no place in a store, and what could not be read.
    """

    format: str
    added: int = 0
    grown: int = 0
    known: int = 0
    session_ids: tuple[str, ...] = ()
    turns: int = 0
    new_nodes: int = 0
    images: int = 0
    tokens: int = 0
    heads_kept: int = 0
    lost: tuple[Loss, ...] = ()
    faults: tuple[Loss, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """All of it in JSON's types."""
        return attrs.asdict(self)


def import_file(
    store: SessionStore,
    path: str | Path,
    format: str | Format,
    *,
    template: Any = None,
    scheme: PositionScheme | str = DEFAULT_SCHEME,
    namespace: Namespace | Mapping[str, str | None] | str | None = None,
    model_fingerprint: str = "",
    prefix: str = "",
    salvage: bool = False,
    progress: Progress | None = None,
) -> ImportReport:
    """Read a file of another tool into a store; of a folder, all files of that format in it, by name.

    ``format``: the name of one (:func:`formats`), or a :class:`Format`. ``template``: what makes tokens of messages, a
    :class:`ChatTemplate` or what makes one; without it, turns that bring no tokens have none, and a picture has one, id 0.
    ``scheme``, ``namespace``, ``model_fingerprint``: of the sessions, which are called ``prefix`` and the conversation's own id.
    ``salvage``: leave out, and count, what cannot be read. ``progress``: told bytes read and bytes in all.

    A second time changes nothing, and what was interrupted goes on. Raises InterchangeError, naming line or path, where something
    cannot be read; the conversations before it are in the store then, and nothing of the one it is in, but for nodes of one that
    had been there. Raises UnknownFormat; SessionExists where another session has that id; what appending raises.
    """
    form = format if isinstance(format, Format) else format_named(format)
    if form.read is None:
        raise UnknownFormat(f"{form.name} is written, not read", name=form.name, known=())
    path = Path(path)
    paths = _files(path, form)
    total, before = sum(each.stat().st_size for each in paths), 0
    loader = Importer(store, form, template, scheme, namespace, model_fingerprint, prefix)
    if path.is_dir() and not form.folder:
        others = sorted(each for each in path.rglob("*") if each.is_file() and each not in {*paths})
        if others:
            what = f"files whose names do not end in {form.suffix}"
            loader.losses_in(path.name, salvage).add(what, str(others[0].relative_to(path)), len(others))
    for each in paths:
        losses = loader.losses_in(each.name, salvage)
        told = None if progress is None else _Told(progress, before, total)
        file = SourceFile(each, told, "" if each == path else each.relative_to(path).with_suffix("").as_posix())
        if _begins(each, b"\x1f\x8b"):
            raise InterchangeError(f"{each.name} is compressed by gzip: unpack it first", path=str(each), place="")
        mark = _mark(each) if form.single else None
        evicted = 0
        for conversation in form.read(file, losses):
            loader.load(conversation, losses, conversation.mark or mark)
            if file.done - evicted > _EVICT_EVERY:
                evicted = file.done
                store.evict()
        before += each.stat().st_size
    store.flush()
    return loader.report()


class _Told:
    def __init__(self, progress: Progress, before: int, total: int) -> None:
        self._progress, self._before, self._total = progress, before, total

    def __call__(self, done: int) -> None:
        self._progress(min(self._before + done, self._total), self._total)


def _files(path: Path, form: Format) -> list[Path]:
    if not path.exists():
        raise InterchangeError(f"there is no file {path}", path=str(path), place="")
    if form.folder or not path.is_dir():
        return [path]
    found = sorted(each for each in path.rglob(f"*{form.suffix}") if each.is_file())
    if not found:
        raise InterchangeError(f"no file in {path} ends in {form.suffix}", path=str(path), place="")
    return found


def _begins(path: Path, magic: bytes) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def _mark(path: Path) -> str:
    digest = blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


class Importer:
    """One import: what is the same for all its conversations, and what is counted over them."""

    def __init__(
        self,
        store: SessionStore,
        form: Format,
        template: Any,
        scheme: PositionScheme | str = DEFAULT_SCHEME,
        namespace: Namespace | Mapping[str, str | None] | str | None = None,
        model_fingerprint: str = "",
        prefix: str = "",
    ) -> None:
        self.store = store
        self.form = form
        self.template: ChatTemplate | None = None if template is None else ChatTemplate.of(template)
        self.writes: str = "text" if self.template is None else self.template.fingerprint()
        self.scheme: PositionScheme = scheme_named(scheme) if isinstance(scheme, str) else scheme
        self.namespace: Namespace = Namespace.of(namespace)
        self.model_fingerprint = model_fingerprint
        self.prefix = prefix
        #: Whether turns are shown to the template with the whole path before them, since it looks back further than most.
        self.looks_far = False
        self._there = set(store.sessions())
        self._losses: list[Losses] = []
        self._counts = {"added": 0, "grown": 0, "known": 0, "turns": 0, "new_nodes": 0, "images": 0, "tokens": 0, "heads_kept": 0}
        self._session_ids: list[str] = []

    def losses_in(self, file: str, salvage: bool) -> Losses:
        self._losses.append(Losses(file, salvage=salvage))
        return self._losses[-1]

    def report(self) -> ImportReport:
        return ImportReport(
            format=self.form.name,
            session_ids=tuple(self._session_ids),
            lost=joined(each.lost for each in self._losses),
            faults=joined(each.faults for each in self._losses),
            **self._counts,
        )

    def count(self, what: str, count: int = 1) -> None:
        self._counts[what] += count

    def load(self, conversation: Conversation, losses: Losses, mark: str | None) -> None:
        """One conversation, whole or not at all."""
        if not words.is_text(conversation.id):
            losses.fault("a conversation's id is no text", repr(conversation.id))
            return
        mark = None if mark is None else f"{mark} {self.writes} {self.form.name}"
        name = self.prefix + conversation.id
        if not 0 < len(name) <= MAX_SESSION_ID:
            losses.fault(f"the id of a session has 1 to {MAX_SESSION_ID} characters", repr(name[:40]), f"this has {len(name)}")
            return
        if len(self._session_ids) < _IDS_TOLD:
            self._session_ids.append(name)
        if mark is not None and name in self._there and self._is_known(name, mark):
            self.count("known")
            return
        session, made = self._session(name)
        self._there.add(name)
        before = len(session.tree)
        try:
            _Conversation(self, session, conversation, losses).load(mark)
        except BaseException:
            if made:
                self.store.drop(session.id)
            raise
        new = len(session.tree) - before
        self.count("new_nodes", new)
        self.count("added" if made else "grown" if new else "known")

    def append(self, session: Session, parent: Node, conversation: Conversation, losses: Losses) -> Node:
        """The turns of a conversation under a node; the last of them."""
        return _Conversation(self, session, conversation, losses).append(parent)

    def _is_known(self, session_id: str, mark: str) -> bool:
        """Whether a session was imported whole from the same. It is not opened for that, which would be written down."""
        tree = self.store.tree(session_id)
        fits = tree.root.scheme == self.scheme and tree.root.namespace == self.namespace
        facts = words.facts_from(tree.annotation(tree.root, words.ANNOTATION))
        return fits and words.is_own(facts, session_id) and facts.get("mark") == mark

    def _session(self, session_id: str) -> tuple[Session, bool]:
        try:
            return self.store.create(
                session_id, scheme=self.scheme, namespace=self.namespace, model_fingerprint=self.model_fingerprint
            ), True
        except SessionExists:
            found = self.store.get(session_id, scheme=self.scheme, model_fingerprint=self.model_fingerprint)
            if found.root.namespace != self.namespace:
                raise
            return found, False


def joined(losses: Iterable[Iterable[Loss]]) -> tuple[Loss, ...]:
    """The same losses of several files as one each."""
    found: dict[str, Loss] = {}
    for loss in (each for some in losses for each in some):
        before = found.get(loss.what)
        found[loss.what] = loss if before is None else attrs.evolve(before, count=before.count + loss.count)
    return tuple(found.values())


class _Said(NamedTuple):
    """A turn, the key of its node, and its message as JSON text."""

    turn: Turn
    key: str
    message: str | None


class _Conversation:
    """One conversation on its way into its session."""

    def __init__(self, loader: Importer, session: Session, conversation: Conversation, losses: Losses) -> None:
        self.loader = loader
        self.session = session
        self.conversation = conversation
        self.losses = losses
        self.nodes: dict[str, bytes] = {}  # by a turn's id
        self.waiting: dict[str, list[Turn]] = {}  # by the parent's id
        self.run: list[_Said] = []  # tool results that follow each other: they get tokens together
        self.run_parent: Node = session.root
        self.last: Node = session.root
        self.last_id: str | None = None  # the key of the turn that came last
        self.looked = False  # whether the template was asked for a whole path

    def append(self, parent: Node) -> Node:
        self.last = parent
        for turn in self.conversation.turns:
            self.loader.count("turns")
            self._take(turn)
        self._end_run()
        self._take_stranded()
        self._end_run()
        return self.last

    def load(self, mark: str | None) -> None:
        self.append(self.session.root)
        self._say_of_all(mark)
        if self.loader.template is not None:
            self._compare(self.loader.template)

    # Order

    def _take(self, turn: Turn) -> None:
        """A turn and all those that waited for it."""
        ready = deque([turn])
        while ready:
            turn = ready.popleft()
            if turn.id is not None and not words.is_text(turn.id):
                self.losses.fault("an id is no text", turn.place or repr(turn.id), repr(turn.id))
                continue
            if turn.id is not None and (turn.id in self.nodes or any(turn.id == each.key for each in self.run)):
                self.losses.fault("a second turn with the same id", turn.place or repr(turn.id), repr(turn.id))
                continue
            if turn.parent is None or turn.parent is ...:
                self._place(turn, turn.parent is ...)
            elif turn.parent in self.nodes or any(turn.parent == each.key for each in self.run):
                self._place(turn, turn.parent == self.last_id)
            else:
                self.waiting.setdefault(turn.parent, []).append(turn)
                continue
            if turn.id is not None and self.waiting:
                ready.extendleft(reversed(self.waiting.pop(turn.id, ())))

    def _take_stranded(self) -> None:
        """Turns whose parents never came: each is a fault. Salvaged, they become first turns; of a cycle, one of its turns does."""
        stranded = {turn.id: turn for turns in self.waiting.values() for turn in turns}
        for parent in [each for each in self.waiting if each not in stranded]:
            for turn in self.waiting.pop(parent):
                self._take_first(turn, "no such parent")
        while self.waiting:  # what hangs on a cycle
            at, seen = next(iter(self.waiting)), set[str]()
            while at not in seen and at in stranded and (above := stranded[at].parent) in self.waiting:
                seen.add(at)
                at = str(above)
            turn = stranded[at] if at in seen else self.waiting[at][0]
            siblings = self.waiting[str(turn.parent)]
            siblings.remove(turn)
            if not siblings:
                del self.waiting[str(turn.parent)]
            self._take_first(turn, "its parents lead back to itself")

    def _take_first(self, turn: Turn, what: str) -> None:
        self.losses.fault(what, turn.place or repr(turn.id), f"parent {turn.parent!r}")
        self._take(attrs.evolve(turn, parent=None))

    def _place(self, turn: Turn, follows: bool) -> None:
        """Make a node of a turn, or let it wait with the tool results that it follows. ``follows``: the turn that came last."""
        writes = self.loader.template is not None and turn.message is not None and turn.token_ids is None
        answers = writes and turn.message is not None and turn.message.get("role") == "tool"
        if not (answers and follows and 0 < len(self.run) < _TOGETHER):
            self._end_run()
            self.run_parent = self.last if follows else self._node(turn.parent)
        said = self._said(turn)
        self.last_id = said.key
        self.run.append(said)
        if not answers:
            self._end_run()

    def _node(self, parent: Any) -> Node:
        return self.session.root if parent is None else self.session.node(self.nodes[parent])

    def _end_run(self) -> None:
        if not self.run:
            return
        run, self.run = self.run, []
        for said, rendered in zip(run, self._rendered(self.run_parent, [said.turn for said in run]), strict=True):
            self.last = self.run_parent = self._append(self.run_parent, said, rendered)

    def _said(self, turn: Turn) -> _Said:
        """A turn with its message as JSON text, and its key: its id, or else a digest of what it says."""
        try:
            message = None if turn.message is None else words.to_json(turn.message)
            if turn.id is not None:
                return _Said(turn, turn.id, message)
            rest = words.to_json([turn.role, turn.fields]) if turn.fields or message is None else ""
        except (TypeError, ValueError, RecursionError) as error:
            self.losses.fault("a turn that is no JSON", turn.place or repr(turn.id), f"{type(error).__name__}: {error}")
            return self._said(Turn(id=turn.id, parent=turn.parent, role=UNREADABLE, place=turn.place))
        digest = blake2b((message or "").encode(), digest_size=16)
        for part in (rest.encode(), *(image.data for image in turn.images)):
            if part:
                digest.update(blake2b(part, digest_size=16).digest())
        return _Said(turn, str(UUID(bytes=digest.digest())), message)

    # Tokens

    def _rendered(self, parent: Node, turns: Sequence[Turn]) -> Sequence[Rendered | None]:
        """What the template writes for turns that follow each other; None for each where it writes nothing."""
        template = self.loader.template
        if template is None or not turns or turns[0].message is None or turns[0].token_ids is not None:
            return [None] * len(turns)
        try:
            return self._written(template, parent, turns)
        except SessionTreeError as error:
            self.losses.fault("the template cannot write it", turns[0].place or repr(turns[0].id), str(error))
            return [None] * len(turns)

    def _written(self, template: ChatTemplate, parent: Node, turns: Sequence[Turn]) -> list[Rendered]:
        """The same, by as little of the path as the template needs: the last few turns.

        The first time in a conversation that these are not all, and where it refuses them, it is asked for the whole path too.
        Where it writes something else then, since it counts rounds, say, it is shown whole paths from there on.
        """
        render = partial(template.render, turns=turns, tools=self.conversation.tools, scheme=parent.scheme, written=parent.stop > 0)
        if self.loader.looks_far:
            return render(self._path(parent))
        few, found, refused = self._before(parent), None, None
        try:
            found = render(few)
            if self.looked or len(few) < LOOKS_BACK:
                return found
        except TemplateRefused as error:
            refused = error
        path = self._path(parent)
        self.looked = self.looked or len(path) > len(few)
        if len(path) > len(few):
            with suppress(TemplateRefused):
                whole = render(path)
                self.loader.looks_far = found is None or any(
                    not np.array_equal(one.token_ids, other.token_ids) for one, other in zip(found, whole, strict=True)
                )
                return whole
        if found is None:
            assert refused is not None
            raise refused
        return found

    def _path(self, node: Node) -> list[Turn]:
        """All turns down to a node that are messages."""
        return [self._turn(each, message) for each in node.path() if (message := words.message_of(each)) is not None]

    def _before(self, node: Node) -> list[Turn]:
        """What a template is shown of the path: its first message where the system speaks, the last question, what came after.

        Where there was a question among the last few, they begin with one: many templates refuse a conversation that does not.
        """
        said: deque[Turn] = deque()
        asked, at = False, node
        while at.parent is not None and node.depth - at.depth < _LOOKED_AT and len(said) < 2 * LOOKS_BACK:
            if (message := words.message_of(at)) is not None:
                question = message.get("role") == "user"
                if len(said) < LOOKS_BACK or asked or question:
                    said.appendleft(self._turn(at, message))
                asked = asked or question
                if question and len(said) >= LOOKS_BACK:
                    break
            at = at.parent
        for depth in range(1, min(at.depth, _BEGINNING) + 1):  # above what was shown
            if (message := words.message_of(first := node.ancestor(depth))) is not None:
                if message.get("role") in SYSTEM:
                    said.appendleft(self._turn(first, message))
                break
        return list(said)

    def _turn(self, node: Node, message: dict[str, Any]) -> Turn:
        return Turn(message=message, images=tuple(_PLACE for _ in node.metadata.get(words.IMAGES, ())))

    # Nodes

    def _append(self, parent: Node, said: _Said, rendered: Rendered | None) -> Node:
        turn, key, _ = said
        try:
            node = self._appended(parent, said, rendered)
        except InterchangeError:
            raise
        except KeyTaken as error:
            what = "a turn that the session has with other tokens or pictures (a prefix makes another session)"
            self.losses.fault(what, turn.place or repr(key), str(error))
            node = self.session.append(parent, [], role=UNREADABLE, key=f"{key} as it is in the file")
        except (SessionTreeError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
            self.losses.fault("a turn that no node can hold", turn.place or repr(key), f"{type(error).__name__}: {error}")
            node = self.session.append(parent, [], role=UNREADABLE, key=key)  # what follows it keeps its place
        self.nodes[key] = node.id
        return node

    def _appended(self, parent: Node, said: _Said, rendered: Rendered | None) -> Node:
        turn, key, text = said
        message = turn.message
        role = turn.role if message is None else str(message.get("role") or turn.role)
        ids, media, features = self._tokens(parent, turn, rendered)
        kept = self._kept(turn, media, features)
        metadata = words.metadata_of(turn, text, self.loader.form.name, kept)
        sources = [self.nodes[each] for each in turn.derived_from if each in self.nodes]
        self.loader.count("images", len(turn.images))
        before = len(self.session.tree)
        if turn.generated and turn.token_ids is not None and not media and (len(ids) or parent.depth):
            with self.session.draft(parent, role=role, metadata=metadata, key=key) as draft:
                draft.extend(ids)
                reason = turn.finish_reason or "stop"
                reason = "interrupted" if reason.strip().casefold() in _NEVER_COMMITTED else reason
                node = draft.commit(reason, annotations=turn.annotations or None)
        else:
            plain = None
            if media and rendered is None and turn.token_ids is None:
                plain = np.tile(np.arange(len(ids)) + parent.next_position, (parent.scheme.num_axes, 1))
            node = self.session.append(
                parent,
                ids,
                media=media,
                role=role,
                metadata=metadata,
                key=key,
                positions=plain,
                derived_from=sources,
                annotations=turn.annotations or None,
            )
        if len(self.session.tree) > before:
            self.loader.count("tokens", len(node))
        elif node.metadata.get(words.MESSAGE) != text:
            self.losses.add("what turns say now: they stay as they were imported", turn.place or key)
        return node

    def _tokens(self, parent: Node, turn: Turn, rendered: Rendered | None) -> tuple[Any, tuple[MediaItem, ...], tuple[Any, ...]]:
        """Ids, items, and what is kept of each item beside its file. Without a template, a picture is one token."""
        if rendered is not None:
            return rendered.token_ids, rendered.media, rendered.features
        if turn.token_ids is not None:
            return turn.token_ids, tuple(turn.media), (None,) * len(turn.media)
        media = tuple(MediaItem("image", identity_of(image), [(at, 1)]) for at, image in enumerate(turn.images))
        return [0] * len(media) if media else _NO_TOKENS, media, (None,) * len(media)

    def _kept(self, turn: Turn, media: Sequence[MediaItem], features: Sequence[Any]) -> list[dict[str, Any]]:
        """What the metadata say of each picture. Its file goes where features are; where no token stands for it, it stays there."""
        kept: list[dict[str, Any]] = []
        placed = {item.identity: item for item in media}
        for item, more in zip(media, features, strict=True):
            if more is not None:
                self.loader.store.put_features(item, more)
        for number, image in enumerate(turn.images):
            identity = media[number].identity if len(media) == len(turn.images) else identity_of(image)
            if (found := placed.get(identity)) is None:
                kept.append({"mime_type": image.mime_type, "data": image.data})
                continue
            self.loader.store.put_features(found, {FILE: np.frombuffer(image.data, np.uint8)})
            kept.append({"mime_type": image.mime_type, "identity": identity})
        return kept

    # The whole

    def _say_of_all(self, mark: str | None) -> None:
        session, conversation = self.session, self.conversation
        heads = dict(conversation.heads)
        tips = {name: self.nodes[turn_id] for name, turn_id in heads.items() if turn_id in self.nodes}
        for name in heads.keys() - tips.keys():
            self.losses.fault("no such turn", f"head {name!r}", repr(heads[name]))
        tips.setdefault(MAIN, self.last.id)
        said = words.facts_from(session.annotation(session.root, words.ANNOTATION))
        before = said.get("heads", {}) if words.is_own(said, session.id) else {}
        moved = ((name, self._move(name, tips.get(name), before.get(name))) for name in {**tips, **before})
        left = {name: place for name, place in moved if place is not None}
        facts = words.facts_of(conversation, session.id, self.loader.form.name, mark, left)
        session.annotate(session.root, {words.ANNOTATION: facts})

    def _move(self, name: str, tip: bytes | None, before: str | None) -> bytes | None:
        """Have a head where the file has it, None for nowhere. Gives where an import left it then.

        What is not where an import left it, ``before``, stays there; and so does what is further down the same branch: the file is
        an earlier state, or a part.
        """
        for _ in range(_MOVES):
            with suppress(HeadMoved):  # by another import of the same: then it is looked at again
                return self._moved(name, tip, before)
        self.loader.count("heads_kept")
        return tip

    def _moved(self, name: str, tip: bytes | None, before: str | None) -> bytes | None:
        try:
            head = self.session.head(name)
        except UnknownHead:
            if tip is not None:
                self.session.set_head(name, tip, expected=None)
            return tip
        if head.node.id == tip:
            return tip
        if head.node.id.hex() != before:
            self.loader.count("heads_kept")
        elif tip is None:
            self.session.drop_head(name)
        elif tip == head.node.ancestor(min(self.session.node(tip).depth, head.node.depth)).id:
            self.loader.count("heads_kept")
            return head.node.id
        else:
            self.session.set_head(name, tip, expected=head)
        return tip

    def _compare(self, template: ChatTemplate) -> None:
        for leaf in self.session.leaves()[:_COMPARED]:
            turns = [self._turn(node, message) for node in leaf.path() if (message := words.message_of(node)) is not None]
            media = [item for node in leaf.path() for item in node.media]
            if len(turns) > 4096 or any(len(item.spans) > 1 for item in media):
                continue
            placed = [
                item.with_spans([(node.start + offset, length) for offset, length in item.spans])
                for node in leaf.path()
                for item in node.media
            ]
            if template.differs(turns, self.conversation.tools, leaf.input_ids(), placed):
                self.losses.add("branches that the template writes otherwise when it is asked for the whole", leaf.key or "")


_NO_TOKENS: Final = np.empty(0, np.int32)
#: Stands for a picture that has its place already.
_PLACE: Final = Image(b"", "")


def identity_of(image: Image) -> bytes:
    """The identity of a picture's file."""
    return media_identity("image file", image.data)
