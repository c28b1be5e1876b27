"""LangGraph's checkpoints: SQLite files of its ``SqliteSaver``, read and written with its own library.

A thread, or the part of one in a subgraph, is a conversation. Its checkpoints are a tree, and each has the whole state, so that
each has all messages so far. Here a message is a turn, once, and a checkpoint is a turn after the last of its messages, which has
the rest of the state in ``fields``: the messages on a checkpoint's path are those of its state. A checkpoint with other messages
than its parent's begins a branch where they differ, derived from the parent.

LangGraph's serializer imports and calls what a file names. Here the library is given another one, which makes a name and a value
of each such thing (:class:`~sessiontree.interchange.plain.Foreign`), and the same bytes of it again: nothing is imported or called,
and no type is lost, whether it is installed or not.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import attrs

from sessiontree.errors import LimitExceeded, NeedsExtra
from sessiontree.interchange.conversations import MAIN, Branch, Conversation, Tree, Turn
from sessiontree.interchange.formats import LACKING, Format
from sessiontree.interchange.langchain import as_message, read_message, write_message
from sessiontree.interchange.losses import Losses
from sessiontree.interchange.plain import Foreign, from_plain, to_plain
from sessiontree.interchange.source import SourceFile, expect
from sessiontree.interchange.times import seconds
from sessiontree.store import MAX_SESSION_ID

_CHANNEL: Final = "messages"
_KNOWN_CODES: Final = range(8)  # of LangGraph's extension types, whose bytes are msgpack again
_FIRST: Final = "00000000-0000-6000-8000-000000000000"  # before all ids that LangGraph makes, which are times


@attrs.frozen
class _Library:
    saver: Any
    ormsgpack: Any


def _library() -> _Library:
    try:
        import ormsgpack  # noqa: PLC0415
        from langgraph.checkpoint.sqlite import SqliteSaver  # noqa: PLC0415
    except ImportError as error:
        what = f"checkpoints of LangGraph need its library: pip install 'sessiontree[langgraph]' ({error})"
        raise NeedsExtra(what, extra="langgraph") from error
    return _Library(SqliteSaver, ormsgpack)


class _Inert:
    """A serializer for LangGraph's savers. ``message(checkpoint, number)``: what :func:`_reference` stands for."""

    def __init__(self, ormsgpack: Any, message: Callable[[str, int], Foreign] | None = None) -> None:
        self._ormsgpack = ormsgpack
        self._message = message

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        """A value; raises ValueError for what is none."""
        kind, value = data
        if kind == "null":
            return None
        if kind == "bytes":
            return value
        if kind != "msgpack":
            raise ValueError(f"serialised as {kind}, not as msgpack")
        return self._unpacked(value)

    def _unpacked(self, data: bytes) -> Any:
        return self._ormsgpack.unpackb(data, ext_hook=self._extension, option=self._ormsgpack.OPT_NON_STR_KEYS)

    def _extension(self, code: int, data: bytes) -> Foreign:
        if code in _KNOWN_CODES:
            try:
                return Foreign("ext", [code, self._unpacked(data)])
            except ValueError:
                pass  # kept as the bytes that it is
        return Foreign("extension", [code, bytes(data)])

    def dumps_typed(self, value: Any) -> tuple[str, bytes]:
        """The kind and the bytes of a value, those that it was read from."""
        if value is None:
            return "null", b""
        if isinstance(value, bytes):
            return "bytes", value
        return "msgpack", self._packed(value)

    def _packed(self, value: Any) -> bytes:
        option = self._ormsgpack.OPT_NON_STR_KEYS
        packed: bytes = self._ormsgpack.packb(value, default=self._default, option=option)
        return packed

    def _default(self, value: Any) -> Any:
        match value:
            case Foreign("message", [str() as checkpoint, int() as number]) if self._message is not None:
                return self._default(self._message(checkpoint, number))
            case Foreign("ext", [code, each]):
                return self._ormsgpack.Ext(code, self._packed(each))
            case Foreign("extension", [code, bytes() as each]):
                return self._ormsgpack.Ext(code, each)
        raise TypeError(f"nothing that a checkpoint holds: {type(value).__name__}")


def read(file: SourceFile, losses: Losses) -> Iterator[Conversation]:
    """A conversation for each thread and each subgraph of one."""
    serde = _Inert(_library().ormsgpack)
    with closing(sqlite3.connect(f"{Path(str(file.path)).absolute().as_uri()}?mode=ro", uri=True)) as connection:
        try:
            connection.execute("PRAGMA trusted_schema = OFF")
            names = "SELECT DISTINCT thread_id, checkpoint_ns FROM checkpoints ORDER BY thread_id, checkpoint_ns"
            for thread, space in connection.execute(names).fetchall():
                place = f"thread {thread!r}"
                if expect(thread, str, "thread_id", place, losses) and expect(space, str, "checkpoint_ns", place, losses):
                    yield _Thread(connection, thread, space, serde, losses).conversation()
        except sqlite3.Error as error:
            losses.fault("no file of LangGraph's SqliteSaver", "the database", str(error))


@attrs.frozen(eq=False)
class _Checkpoint:
    """One as it lies in the file, its messages apart. ``turns``: where they are turns, as (checkpoint, number)."""

    id: str
    parent: str | None
    value: dict[str, Any]
    channel: str | None
    metadata: Any
    writes: list[Any]
    messages: list[Foreign]
    turns: list[tuple[str, int]]
    above: str | None
    derived_from: tuple[str, ...]


def _turn_id(turn: tuple[str, int]) -> str:
    return f"{turn[0]}/{turn[1]}"


class _Thread:
    """The checkpoints of one thread and namespace."""

    def __init__(self, connection: sqlite3.Connection, thread: str, space: str, serde: _Inert, losses: Losses) -> None:
        self._connection = connection
        columns = {name for _, name, *_ in connection.execute("PRAGMA table_info(writes)")}
        self._task_path = "task_path" if "task_path" in columns else "''"  # files of versions before 3.1 have none
        self._of = thread, space
        self._serde = serde
        self._losses = losses
        self._checkpoints: dict[str, _Checkpoint] = {}
        self._alike: dict[Any, list[tuple[str, int, Foreign]]] = {}  # messages by what is quickly compared

    def conversation(self) -> Conversation:
        for checkpoint_id, parent in self._order():
            found = self._read(checkpoint_id, parent)
            if found is not None:
                self._checkpoints[checkpoint_id] = found
        thread, space = self._of
        turns = [turn for each in self._checkpoints.values() for turn in self._turns(each)]
        heads = {MAIN: max(self._checkpoints)} if self._checkpoints else {}
        name = f"{thread}/{space}" if space else thread
        name = name or "thread"  # LangGraph takes any text for an id
        if len(name) > MAX_SESSION_ID:
            name = f"{name[:100]}-{blake2b(name.encode('utf-8', 'surrogatepass'), digest_size=16).hexdigest()}"
        return Conversation(id=name, turns=turns, heads=heads, fields={"thread_id": thread, "checkpoint_ns": space})

    def _select(self, columns: str, table: str, checkpoint: str | None = None) -> list[Any]:
        where = "thread_id = ? AND checkpoint_ns = ?" + (" AND checkpoint_id = ?" if checkpoint is not None else "")
        order = {"checkpoints": "checkpoint_id", "writes": f"{self._task_path}, task_id, idx"}[table]
        values = self._of if checkpoint is None else (*self._of, checkpoint)
        return self._connection.execute(f"SELECT {columns} FROM {table} WHERE {where} ORDER BY {order}", values).fetchall()

    def _place(self, checkpoint: object) -> str:
        return f"thread {self._of[0]!r}, checkpoint {checkpoint!r}"

    def _order(self) -> Iterator[tuple[str, str | None]]:
        """Ids of all checkpoints and their parents, parents first."""
        parents: dict[str, str | None] = {}
        for each, parent in self._select("checkpoint_id, parent_checkpoint_id", "checkpoints"):
            place = self._place(each)
            if expect(each, str, "checkpoint_id", place, self._losses) and expect(
                parent, (str, type(None)), "parent_checkpoint_id", place, self._losses
            ):
                parents[each] = parent or None
        children: dict[str | None, list[str]] = {None: []}
        for each, parent in parents.items():
            if parent is not None and parent not in parents:
                self._losses.add("a checkpoint whose parent is not in the file", self._place(each))
            children.setdefault(parent if parent in parents else None, []).append(each)
        waiting, reached = children[None][::-1], 0
        while waiting:
            at = waiting.pop()
            reached += 1
            yield at, parents[at]
            waiting.extend(children.get(at, ())[::-1])
        if reached < len(parents):
            self._losses.fault("a cycle of parents", f"thread {self._of[0]!r}", f"{len(parents) - reached} checkpoints")

    def _read(self, checkpoint_id: str, parent: str | None) -> _Checkpoint | None:
        place, losses = self._place(checkpoint_id), self._losses
        [(kind, blob, metadata)] = self._select("type, checkpoint, metadata", "checkpoints", checkpoint_id)
        value = self._loaded(kind, blob, place)
        if not expect(value, dict, "a checkpoint", place, losses) or not expect(
            values := value.get("channel_values"), dict, "channel_values", place, losses
        ):
            return None
        if value.get("id") != checkpoint_id:
            losses.fault("a checkpoint that has another id within", place, str(value.get("id"))[:40])
            return None
        try:
            said = json.loads(metadata) if metadata is not None else {}
        except (TypeError, ValueError, RecursionError) as error:
            losses.fault("metadata that are no JSON", place, str(error))
            said = {}
        writes = []
        for task, path, number, channel, kind, blob in self._select(
            f"task_id, {self._task_path}, idx, channel, type, value", "writes", checkpoint_id
        ):
            writes.append([task, path, number, channel, self._loaded(kind, blob, f"{place}, a write of {task!r}")])
        channel = _channel_of(values)
        messages = values.pop(channel) if channel is not None else []
        above = self._checkpoints.get(parent) if parent is not None else None
        before = above.messages if above is not None else []
        shared = 0
        while shared < min(len(before), len(messages)) and before[shared] == messages[shared]:
            shared += 1
        turns = [*(above.turns[:shared] if above is not None else ()), *((checkpoint_id, n) for n in range(shared, len(messages)))]
        if shared == len(before):
            return _Checkpoint(checkpoint_id, parent, value, channel, said, writes, messages, turns, parent if above else None, ())
        branch = _turn_id(turns[shared - 1]) if shared else None
        old = (above.id,) if above is not None else ()
        return _Checkpoint(checkpoint_id, parent, value, channel, said, writes, messages, turns, branch, old)

    def _loaded(self, kind: Any, blob: Any, place: str) -> Any:
        try:
            return self._serde.loads_typed((kind, blob))
        except (TypeError, ValueError, RecursionError) as error:
            self._losses.fault("a value that cannot be read", place, str(error))
            return None

    def _turns(self, checkpoint: _Checkpoint) -> Iterator[Turn]:
        """The turns of the messages that are new in it, and its own."""
        place = self._place(checkpoint.id)
        parent, derived_from = checkpoint.above, checkpoint.derived_from
        created_at = seconds(checkpoint.value.get("ts"))
        calls = {call for message in checkpoint.messages for call in _call_ids(message)}
        for turn, message in zip(checkpoint.turns, checkpoint.messages, strict=True):
            if turn[0] != checkpoint.id:
                continue
            about = {"id": _turn_id(turn), "parent": parent, "created_at": created_at, "derived_from": derived_from}
            made = read_message(message, about, f"{place}, message {turn[1]}", self._losses)
            if (made.message or {}).get("tool_call_id") not in calls and (made.message or {}).get("role") == "tool":
                self._losses.add("a tool result without its call", made.place)
            yield made
            parent, derived_from = made.id, ()
        fields: dict[str, Any] = {"channel": checkpoint.channel, "parent": checkpoint.parent}
        for name, value in (("checkpoint", checkpoint.value), ("metadata", checkpoint.metadata), ("writes", checkpoint.writes)):
            try:
                fields[name] = to_plain(value, replace=self._reference)
            except LimitExceeded as error:
                self._losses.fault("nested too deep", f"{place}, {name}", str(error))
                fields[name] = {} if name == "metadata" else []
        if not isinstance(fields["checkpoint"], dict):
            return
        yield Turn(
            id=checkpoint.id,
            parent=parent,
            role="checkpoint",
            created_at=created_at,
            derived_from=derived_from,
            fields=fields,
            place=place,
        )

    def _reference(self, value: Foreign) -> Foreign:
        """What stands for a message that is a turn of this thread, where it is said again; all else as it is."""
        key = _quickly(value)
        if key is None:
            return value
        if not self._alike:
            for checkpoint in self._checkpoints.values():
                for turn, message in zip(checkpoint.turns, checkpoint.messages, strict=True):
                    if turn[0] == checkpoint.id:
                        self._alike.setdefault(_quickly(message), []).append((*turn, message))
        for checkpoint_id, number, message in self._alike.get(key, ()):
            if message == value:
                return Foreign("message", [checkpoint_id, number])
        return value


def _quickly(value: Any) -> Any:
    message = as_message(value)
    if message is None:
        return None
    _, name, entries = message
    content = entries.get("content")
    return name, str(entries.get("id")), content if isinstance(content, str) else None


def _channel_of(values: dict[str, Any]) -> str | None:
    """The channel that holds the messages: a list of LangChain's and of nothing else."""
    for name in [_CHANNEL, *sorted(each for each in values if isinstance(each, str))]:
        value = values.get(name)
        if isinstance(value, list) and value and all(as_message(each) is not None for each in value):
            return name
    return None


def _call_ids(message: Foreign) -> Iterator[Any]:
    found = as_message(message)
    for name in ("tool_calls", "invalid_tool_calls"):
        calls = found[2].get(name) if found is not None else None
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict) and isinstance(call.get("id"), str):
                yield call["id"]


def write(conversations: Iterable[Conversation], path: Path, losses: Losses) -> None:
    """Checkpoints as they were read, and others for turns that have none: where a branch ends or several begin."""
    library = _library()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA synchronous = OFF")  # nobody reads it before it is whole
        for conversation in conversations:
            thread = _Written(conversation, losses)
            saver = library.saver(connection, serde=_Inert(library.ormsgpack, thread.message))
            for turn_id in thread.tree.turns:
                if turn_id in thread.checkpoints:
                    thread.put(saver, turn_id)
        library.saver(connection).setup()
        connection.execute("PRAGMA journal_mode = DELETE")  # one file, whole


class _Written:
    """A conversation as checkpoints. ``checkpoints``: their ids, by the turns that they stand after."""

    def __init__(self, conversation: Conversation, losses: Losses) -> None:
        self.tree = Tree(conversation)
        self._losses = losses
        fields = conversation.fields
        own = "thread_id" in fields and conversation.read_as is None
        self._of = (fields["thread_id"], fields["checkpoint_ns"]) if own else (conversation.id, "")
        self._created_at = conversation.created_at
        self._messages: dict[str, Foreign] = {}
        self._paths: dict[str, list[str]] = {}
        if conversation.tools:
            losses.add("tool definitions", conversation.id)
        self.checkpoints = {each: turn.fields["checkpoint"]["id"] for each, turn in self.tree.turns.items() if _own(turn)}
        self._own = {checkpoint: turn_id for turn_id, checkpoint in self.checkpoints.items()}
        self._name_others(conversation)

    def _name_others(self, conversation: Conversation) -> None:
        turns, children = self.tree.turns, self.tree.children
        main = conversation.heads.get(MAIN, next(reversed(turns), None))
        at: dict[str | None, str | None] = {None: None}  # by turn, the one after which its messages were last kept
        others = []
        for each, turn in turns.items():
            assert turn.parent is not ...
            if each in self.checkpoints:
                at[each] = each
                continue
            at[each] = at[turn.parent]
            if turn.message is None and "langchain" not in turn.fields:
                self._losses.add("turns that are no messages", conversation.id)
            ends = not children[each] or each == main or ("langchain" not in turn.fields and len(children[each]) > 1)
            if ends and (at[each] is None or self._path(each) != self._path(at[each])):
                others.append(each)
                at[each] = each
        self._after = at
        if main in others:  # the last one is the one that LangGraph goes on from
            others.remove(main)
            others.append(main)
        last = max(self.checkpoints.values(), default=_FIRST)
        for number, each in enumerate(others, 1):
            self.checkpoints[each] = _id_after(last, number)
        kept = at.get(main)
        if kept is not None and self.checkpoints[kept] != max(self.checkpoints.values()):
            self._losses.add(LACKING["main"], conversation.id)

    def _path(self, turn_id: str | None) -> list[str]:
        """Ids of the turns that are messages, down to one."""
        if turn_id is None:
            return []
        path: Branch = self.tree.path(turn_id)
        return [each.id for each in path if each.id is not None and (each.message is not None or "langchain" in each.fields)]

    def message(self, checkpoint: str, number: int) -> Foreign:
        """The message of that number in the state of a checkpoint."""
        turn_id = _turn_id((checkpoint, number))
        return self._message(turn_id if turn_id in self.tree.turns else self._path(self._own[checkpoint])[number])

    def _message(self, turn_id: str) -> Foreign:
        if turn_id not in self._messages:
            self._messages[turn_id] = write_message(self.tree.turns[turn_id], self._losses)
        return self._messages[turn_id]

    def put(self, saver: Any, turn_id: str) -> None:
        """Writes the checkpoint that stands after a turn."""
        turn, checkpoint_id = self.tree.turns[turn_id], self.checkpoints[turn_id]
        messages = [self._message(each) for each in self._path(turn_id)]
        if _own(turn):
            value, metadata, parent = (
                from_plain(turn.fields["checkpoint"]),
                from_plain(turn.fields["metadata"]),
                turn.fields["parent"],
            )
            state, writes = value["channel_values"], from_plain(turn.fields["writes"])
            if pending := [name for name, each in state.items() if self._names_another(each)]:
                self._losses.add("input that is on a branch that is not here", turn_id)
                value["channel_values"] = state = {name: each for name, each in state.items() if name not in pending}
            if self._names_another(writes):
                self._losses.add("what was written after a checkpoint, on a branch that is not here", turn_id)
                writes = []
            if (channel := turn.fields["channel"]) is not None:
                state[channel] = messages
        else:
            assert turn.parent is not ...
            above = self._after[turn.parent]
            parent = self.checkpoints[above] if above is not None else None
            value = _fresh(checkpoint_id, messages, turn.created_at or self._created_at)
            metadata, writes = {"source": "update", "step": len(messages) - 1, "parents": {}}, []
        thread, space = self._of
        config = {"configurable": {"thread_id": thread, "checkpoint_ns": space, "checkpoint_id": parent}}
        saver.put(config, value, metadata, {})
        names = "thread_id, checkpoint_ns, checkpoint_id, task_id, task_path, idx, channel, type, value"
        with saver.cursor() as cursor:
            for *row, each in writes:
                cursor.execute(
                    f"INSERT INTO writes ({names}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (thread, space, checkpoint_id, *row, *saver.serde.dumps_typed(each)),
                )

    def _names_another(self, value: Any) -> bool:
        """Whether a value names a message of a branch that is not here: of a fork, or where only one branch is written."""
        waiting = [value]
        while waiting:
            match waiting.pop():
                case Foreign("message", [str() as checkpoint, int() as number]):
                    if _turn_id((checkpoint, number)) not in self.tree.turns and checkpoint not in self._own:
                        return True
                case Foreign(_, parts):
                    waiting.extend(parts)
                case Mapping() as each:
                    waiting.extend(each.values())
                case list() | tuple() as each:
                    waiting.extend(each)
        return False


def _own(turn: Turn) -> bool:
    return "checkpoint" in turn.fields


def _id_after(last: str, number: int) -> str:
    """An id that sorts after another one."""
    try:
        return str(UUID(int=UUID(last).int + number))
    except ValueError:
        return f"{last}-{number:08}"


def _fresh(checkpoint_id: str, messages: list[Foreign], created_at: float | None) -> dict[str, Any]:
    version = f"{len(messages):032}.{0.0:016}"
    return {
        "v": 4,
        "ts": datetime.fromtimestamp(created_at or 0.0, UTC).isoformat(),
        "id": checkpoint_id,
        "channel_values": {_CHANNEL: messages},
        "channel_versions": {_CHANNEL: version},
        "versions_seen": {},
        "updated_channels": [_CHANNEL],
    }


FORMAT: Final = Format(
    "langgraph",
    "LangGraph's checkpoints (SQLite files of its SqliteSaver)",
    ".sqlite",
    read,
    write,
    lacks=frozenset({*LACKING} - {"main"}),
    keys=frozenset({"role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id"}),
)
