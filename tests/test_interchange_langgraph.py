"""LangGraph's checkpoints: files that it wrote, files of ours that it reads and goes on from, and files that would do harm."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sessiontree.errors import InterchangeError, NeedsExtra, SessionTreeError
from sessiontree.interchange import append_messages, export_file, import_file, langgraph
from sessiontree.interchange.conversations import Conversation, Image, Tree, Turn
from sessiontree.interchange.langchain import as_message, read_message
from sessiontree.interchange.losses import Losses
from sessiontree.interchange.plain import Foreign
from sessiontree.interchange.source import SourceFile
from sessiontree.store import SessionStore

ormsgpack = pytest.importorskip("ormsgpack")
sqlite = pytest.importorskip("langgraph.checkpoint.sqlite")
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer  # noqa: E402

GOLDEN = Path(__file__).parent / "golden" / "interchange" / "langgraph" / "threads.sqlite"
RUNTIME = find_spec("langgraph.graph") is not None
CONFIG = dict[str, dict[str, Any]]


def read(path: Path, *, salvage: bool = False) -> tuple[dict[str, Conversation], Losses]:
    losses = Losses(path.name, salvage=salvage)
    return {each.id: each for each in langgraph.read(SourceFile(path), losses)}, losses


def write(conversations: Iterable[Conversation], path: Path) -> Losses:
    losses = Losses(path.name)
    langgraph.write(conversations, path, losses)
    return losses


def config(thread: str, checkpoint: str | None = None) -> CONFIG:
    return {"configurable": {"thread_id": thread, "checkpoint_ns": ""} | ({"checkpoint_id": checkpoint} if checkpoint else {})}


def saver(connection: sqlite3.Connection) -> Any:
    """LangGraph's own, with its own serializer, as strict as it can be."""
    return sqlite.SqliteSaver(connection, serde=JsonPlusSerializer(allowed_msgpack_modules=None))


def shape(value: Any) -> str:
    """A value whose order of keys does not matter, as text; what is not of msgpack itself by its code and content."""
    if isinstance(value, dict):
        return "{" + ", ".join(sorted(f"{shape(key)}: {shape(each)}" for key, each in value.items())) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(shape, value)) + "]"
    return repr(value)


def unpacked(data: bytes) -> str:
    def hook(code: int, inner: bytes) -> Any:
        return ["ext", code, ormsgpack.unpackb(inner, ext_hook=hook, option=ormsgpack.OPT_NON_STR_KEYS)]

    return shape(ormsgpack.unpackb(data, ext_hook=hook, option=ormsgpack.OPT_NON_STR_KEYS))


def rows(path: Path) -> list[Any]:
    """All that a file says, bytes taken apart by other code than what is tested."""
    with closing(sqlite3.connect(path)) as connection:
        checkpoints = connection.execute("SELECT * FROM checkpoints ORDER BY 1, 2, 3").fetchall()
        writes = connection.execute("SELECT * FROM writes ORDER BY 1, 2, 3, 4, 5, 6").fetchall()
    said = [[*row[:5], unpacked(row[5]), shape(json.loads(row[6]))] for row in checkpoints]
    return said + [[*row[:8], unpacked(row[8]) if row[7] == "msgpack" else row[8]] for row in writes]


def messages(tree: Tree, turn_id: str) -> list[str]:
    return [str((turn.message or {}).get("content")) for turn in tree.path(turn_id) if turn.message is not None]


# Files of LangGraph's.


def test_a_file_of_langgraphs_comes_back_as_it_was(tmp_path: Path) -> None:
    conversations, losses = read(GOLDEN)
    assert not losses.lost
    assert not write(conversations.values(), tmp_path / "again.sqlite").lost
    assert rows(tmp_path / "again.sqlite") == rows(GOLDEN)


def test_a_store_gives_it_back(tmp_path: Path) -> None:
    store = SessionStore.in_memory()
    for _ in range(2):  # a second time changes nothing
        report = import_file(store, GOLDEN, "langgraph")
        assert not report.lost and not report.faults
    assert report.new_nodes == 0 and report.known == 6
    assert not export_file(store, tmp_path / "again.sqlite", "langgraph").lost
    assert rows(tmp_path / "again.sqlite") == rows(GOLDEN)


def test_its_library_reads_the_same_of_both(tmp_path: Path) -> None:
    write(read(GOLDEN)[0].values(), tmp_path / "again.sqlite")
    with (
        closing(sqlite3.connect(tmp_path / "again.sqlite")) as ours,
        closing(sqlite3.connect(f"{GOLDEN.as_uri()}?mode=ro", uri=True)) as its,
    ):
        theirs = saver(its)
        theirs.is_setup = True  # it would change the file otherwise
        mine = saver(ours)
        found = list(theirs.list(None))
        assert len(found) == 40
        for each, other in zip(found, list(mine.list(None)), strict=True):
            assert (each.config, each.parent_config, each.metadata) == (other.config, other.parent_config, other.metadata)
            assert each.checkpoint["channel_values"].get("messages") == other.checkpoint["channel_values"].get("messages")
            if each.config["configurable"]["thread_id"] != "state":  # which writes a NaN
                assert each.pending_writes == other.pending_writes
            one = mine.get_tuple(each.config)
            assert shape(one.checkpoint | {"channel_values": 0}) == shape(each.checkpoint | {"channel_values": 0})


def test_checkpoints_are_turns_after_the_messages_of_their_state() -> None:
    conversations, _ = read(GOLDEN)
    assert list(conversations) == ["ask", "nested", "nested/inner", "state", "summary", "tools"]
    with closing(sqlite3.connect(f"{GOLDEN.as_uri()}?mode=ro", uri=True)) as connection:
        theirs = saver(connection)
        theirs.is_setup = True
        for conversation in conversations.values():
            tree = Tree(conversation)
            thread, space = conversation.fields["thread_id"], conversation.fields["checkpoint_ns"]
            its = {
                each.config["configurable"]["checkpoint_id"]: each
                for each in theirs.list(config(thread) | {"configurable": {"thread_id": thread, "checkpoint_ns": space}})
            }
            notes = {turn.id: turn for turn in tree.turns.values() if turn.role == "checkpoint"}
            assert notes.keys() == its.keys()
            assert conversation.heads == {"main": max(its)}
            for name, each in its.items():
                here = [turn for turn in tree.path(name) if turn.message is not None]
                state = each.checkpoint["channel_values"].get("messages") or []
                assert [turn.fields["langchain"]["set"]["id"] for turn in here] == [message.id for message in state]
                parent = each.parent_config["configurable"]["checkpoint_id"] if each.parent_config else None
                assert notes[name].fields["parent"] == parent
            count = len(
                {
                    (str(message.content), message.id)
                    for each in its.values()
                    for message in each.checkpoint["channel_values"].get("messages") or ()
                }
            )
            assert count <= sum(turn.message is not None for turn in tree.turns.values())


def test_a_thread_that_was_summed_up_goes_on_on_a_branch_derived_from_the_old_one() -> None:
    conversations, _ = read(GOLDEN)
    tree = Tree(conversations["summary"])
    first, second = (each for each in tree.children[None] if tree.turns[each].message is not None or tree.turns[each].role)
    tip = tree.turns[second].derived_from[0]
    assert messages(tree, tip) == ["turn 0", "You said 1.", "turn 1", "You said 3.", "turn 2", "You said 5."]
    assert messages(tree, conversations["summary"].heads["main"]) == [
        "turn 2",
        "You said 5.",
        "Two turns went before.",
        "on",
        "You said 4.",
    ]
    assert first != second and len(tree.leaves) == 2


def test_messages_are_in_the_normal_form() -> None:
    tree = Tree(read(GOLDEN)[0]["tools"])
    found = {turn.fields["langchain"]["set"]["id"]: turn for turn in tree.turns.values() if turn.message is not None}
    content = found["h0"]  # the edited one comes last
    assert content.message == {"role": "user", "content": "look, edited"}
    looked = next(turn for turn in tree.turns.values() if turn.images)
    assert looked.message is not None
    kinds = [part["type"] for part in looked.message["content"]]
    assert kinds == ["text", "text", "image", "image", "image", "image", "image_url", "image_url", "audio"]
    assert len(looked.images) == 4 and {image.mime_type for image in looked.images} == {"image/png"}
    assert "iVBOR" not in json.dumps([turn.fields for turn in tree.turns.values()])  # kept once, also where writes say it again
    call = found["ai-4"].message
    assert call is not None
    assert [(each["id"], each["function"]) for each in call["tool_calls"]] == [
        ("call-4", {"name": "weather", "arguments": '{"city": "Łódź", "days": [1, 2.5]}'}),
        ("bad-4", {"name": "weather", "arguments": '{"city": '}),
    ]
    assert found["r-call-4"].message == {"role": "tool", "content": "rain", "tool_call_id": "call-4"}
    assert found["ai-6"].message == {
        "role": "assistant",
        "content": [{"type": "text", "text": "Rain."}],
        "reasoning_content": "It rained.",
    }
    assert found["h1"].message == {"role": "user", "content": "the weather?", "name": "Ann"}
    assert found["ai-2"].message == {"role": "assistant", "content": "You said 2.", "reasoning_content": "Hm."}


# Files of ours.


def other() -> Conversation:
    """A conversation of another format, with a fork, a picture, a note, and a call."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    picture = {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image", "image": 0}]}
    return Conversation(
        id="pi",
        created_at=5.0,
        heads={"main": "4"},
        turns=[
            Turn(id="0", parent=None, message={"role": "developer", "content": "Be brief."}),
            Turn(id="1", parent="0", message=picture, images=(Image(b"not much", "image/png"),), created_at=7.0),
            Turn(id="2", parent="1", role="model_change"),
            Turn(
                id="3", parent="2", message={"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."}
            ),
            Turn(id="4", parent="3", message={"role": "tool", "content": "ok", "tool_call_id": "c1"}),
            Turn(id="5", parent="2", message={"role": "critic", "content": "bad"}),
        ],
    )


def test_langgraphs_library_reads_what_is_written(tmp_path: Path) -> None:
    losses = write([other()], tmp_path / "x.sqlite")
    assert [(each.what, each.count) for each in losses.lost] == [("turns that are no messages", 1)]
    with closing(sqlite3.connect(tmp_path / "x.sqlite")) as connection:
        found = list(saver(connection).list(config("pi")))
        latest = saver(connection).get_tuple(config("pi"))
    assert len(found) == 3  # where several branches begin, and where each ends
    said = [message for message in latest.checkpoint["channel_values"]["messages"]]
    assert [type(each).__name__ for each in said] == ["SystemMessage", "HumanMessage", "AIMessage", "ToolMessage"]
    assert said[0].additional_kwargs == {"__openai_role__": "developer"}
    assert said[1].content[1]["image_url"]["url"] == "data:image/png;base64,bm90IG11Y2g="
    assert said[2].tool_calls == [{"name": "f", "args": {"a": 1}, "id": "c1", "type": "tool_call"}]
    assert said[3].tool_call_id == "c1"
    assert {each.parent_config and each.parent_config["configurable"]["checkpoint_id"] for each in found} == {
        None,
        found[-1].config["configurable"]["checkpoint_id"],
    }


def test_what_is_written_of_another_format_is_read_again(tmp_path: Path) -> None:
    conversation = other()
    write([conversation], tmp_path / "x.sqlite")
    found, losses = read(tmp_path / "x.sqlite")
    assert not losses.lost
    before, after = Tree(other()), Tree(found["pi"])
    assert paths(after) == paths(before)
    assert messages(after, found["pi"].heads["main"]) == [*messages(before, "4")[:2], "", "ok"]


def paths(tree: Tree) -> list[str]:
    """The messages of each branch; no content and an empty one are the same to LangChain."""
    return sorted(
        json.dumps(
            [dict(turn.message) | {"content": turn.message.get("content") or ""} for turn in branch if turn.message is not None],
            sort_keys=True,
        )
        for branch in tree.branches()
    )


def test_turns_that_came_after_those_of_a_thread_are_checkpoints_after_its_last(tmp_path: Path) -> None:
    store = SessionStore.in_memory()
    import_file(store, GOLDEN, "langgraph")
    session = store.get("ask")
    more = Turn(id="more", parent=read(GOLDEN)[0]["ask"].heads["main"], message={"role": "assistant", "content": "yes"})
    (asked,) = [each for each in read(GOLDEN)[0].values() if each.id == "ask"]
    asked.turns = [*asked.turns, more]
    asked.heads = {"main": "more"}
    assert session is not None
    losses = write([asked], tmp_path / "x.sqlite")
    assert not losses.lost
    with closing(sqlite3.connect(tmp_path / "x.sqlite")) as connection:
        latest = saver(connection).get_tuple(config("ask"))
    assert [each.content for each in latest.checkpoint["channel_values"]["messages"]] == ["go", "yes"]
    assert latest.parent_config["configurable"]["checkpoint_id"] == more.parent
    asked.heads = {"main": str(more.parent)}
    assert [each.what for each in write([asked], tmp_path / "y.sqlite").lost] == ["which turn is gone on from"]


@pytest.mark.skipif(not RUNTIME, reason="langgraph, the runtime, is not installed")
@pytest.mark.parametrize("own", [False, True])
def test_langgraph_goes_on_from_a_file_of_ours(own: bool, tmp_path: Path) -> None:
    from langchain_core.messages import AIMessage
    from langgraph.graph import START, MessagesState, StateGraph

    def model(state: Any) -> dict[str, Any]:
        return {"messages": [AIMessage(f"heard {len(state['messages'])}")]}

    thread = "tools" if own else "pi"
    write(read(GOLDEN)[0].values() if own else [other()], tmp_path / "x.sqlite")
    with closing(sqlite3.connect(tmp_path / "x.sqlite", check_same_thread=False)) as connection:
        graph = StateGraph(MessagesState).add_node("model", model).add_edge(START, "model").compile(checkpointer=saver(connection))
        before = graph.get_state({"configurable": {"thread_id": thread}})
        assert before.next == () and len(before.values["messages"]) == 4
        graph.invoke({"messages": [("user", "and now?")]}, {"configurable": {"thread_id": thread}})
        early = list(graph.get_state_history({"configurable": {"thread_id": thread}}))[-1 if not own else -2]
        graph.update_state(early.config, {"messages": [("user", "another way")]}, as_node="model")
    found, _ = read(tmp_path / "x.sqlite")
    tree = Tree(found[thread])
    ends = [messages(tree, leaf) for leaf in tree.leaves]
    assert any(each[-2:] == ["and now?", "heard 5"] for each in ends) and any(each[-1:] == ["another way"] for each in ends)
    write(found.values(), tmp_path / "y.sqlite")
    assert rows(tmp_path / "y.sqlite") == rows(tmp_path / "x.sqlite")


@pytest.mark.skipif(not RUNTIME, reason="langgraph, the runtime, is not installed")
def test_an_interrupted_run_is_resumed_from_a_file_of_ours(tmp_path: Path) -> None:
    from langchain_core.messages import AIMessage
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.types import Command, interrupt

    def node(state: Any) -> dict[str, Any]:
        return {"messages": [AIMessage(str(interrupt({"sure": True})))]}

    write(read(GOLDEN)[0].values(), tmp_path / "x.sqlite")
    with closing(sqlite3.connect(tmp_path / "x.sqlite", check_same_thread=False)) as connection:
        graph = StateGraph(MessagesState).add_node("node", node).add_edge(START, "node").compile(checkpointer=saver(connection))
        assert graph.get_state({"configurable": {"thread_id": "ask"}}).interrupts[0].value == {"sure": True}
        said = graph.invoke(Command(resume="I am"), {"configurable": {"thread_id": "ask"}})
    assert [each.content for each in said["messages"]] == ["go", "I am"]


# Random checkpoints and random conversations.

names = st.text(max_size=6)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | names | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names | st.integers(0, 9) | st.just("$ext"), inner, max_size=3),
    max_leaves=8,
)
PNG = "aWZvbg=="
blocks = st.one_of(
    names,
    st.builds(lambda text: {"type": "text", "text": text}, names),
    st.builds(lambda kind, text: {"type": kind, kind: text, "x": 1}, st.sampled_from(["thinking", "reasoning"]), names),
    st.sampled_from(
        [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}", "detail": "low"}},
            {"type": "image_url", "image_url": f"data:image/png;base64,{PNG}"},
            {"type": "image_url", "image_url": "https://a"},
            {"type": "image_url", "image_url": {"url": "data:,a%20b"}},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
            {"type": "image", "source": {"type": "url", "url": "https://a"}},
            {"type": "image", "base64": PNG},
            {"type": "image", "base64": "no base64", "mime_type": "image/png"},
            {"type": "image", "url": "https://a", "id": "b"},
            {"type": "tool_use", "id": "a", "name": "f", "input": {"x": b"1"}},
            {"type": "image"},
            {"type": 1},
            {},
        ]
    ),
    plain,
)  # fmt: skip
calls = st.lists(
    st.fixed_dictionaries({"name": names, "args": plain, "id": names | st.none()}, optional={"type": st.just("tool_call")}) | plain,
    max_size=2,
)
entries = st.fixed_dictionaries(
    {"content": names | st.lists(blocks, max_size=3) | plain},
    optional={
        "additional_kwargs": st.fixed_dictionaries(
            {}, optional={"reasoning_content": names, "__openai_role__": st.just("developer"), "x": plain}
        ),
        "name": names | st.none(),
        "id": names | st.none(),
        "type": names,
        "role": names | st.sampled_from(["user", "assistant", "tool"]),
        "tool_calls": calls,
        "invalid_tool_calls": calls,
        "tool_call_id": names | st.none(),
        "artifact": plain,
        "status": st.just("error"),
    },
)
kinds = st.sampled_from(
    [
        "human.HumanMessage",
        "ai.AIMessage",
        "ai.AIMessageChunk",
        "system.SystemMessage",
        "tool.ToolMessage",
        "function.FunctionMessage",
        "chat.ChatMessage",
        "modifier.RemoveMessage",
    ]
)


def message(kind: str, said: dict[str, Any]) -> Foreign:
    module, name = kind.split(".")
    return Foreign("ext", [5, [f"langchain_core.messages.{module}", name, said, "model_validate_json"]])


langchain = st.builds(message, kinds, entries)


def made(
    path: Path, checkpoints: list[tuple[str, str | None, Any]], writes: list[Any] | None = None, kind: str = "msgpack"
) -> Path:
    """A file of the checkpoints (id, parent, channel values) of one thread."""
    serde = langgraph._Inert(ormsgpack)
    with closing(sqlite3.connect(path)) as connection:
        saver(connection).setup()
        for name, parent, values in checkpoints:
            value = {"v": 4, "ts": "2026-01-02T03:04:05+00:00", "id": name, "channel_values": values, "channel_versions": {}}
            row = ("t", "", name, parent, kind, serde.dumps_typed(value)[1], b"{}")
            connection.execute("INSERT INTO checkpoints VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        for number, each in enumerate(writes or ()):
            write = ("t", "", checkpoints[0][0], "task", number, "messages", *serde.dumps_typed(each), "~path")
            connection.execute(
                "INSERT INTO writes (thread_id, checkpoint_ns, checkpoint_id, task_id, idx, channel, type, value, task_path) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                write,
            )
        connection.commit()
    return path


@given(st.data())
def test_any_checkpoints_come_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("langgraph")
    pool = data.draw(st.lists(langchain, min_size=1, max_size=4))
    checkpoints: list[tuple[str, str | None, Any]] = []
    for number in range(data.draw(st.integers(1, 5))):
        parent = data.draw(st.sampled_from([None, "gone", *(name for name, _, _ in checkpoints)]))
        before: list[Any] = next((values.get("messages", []) for name, _, values in checkpoints if name == parent), [])
        kept = before[: data.draw(st.integers(0, len(before)))] if data.draw(st.booleans()) else before
        values = {"messages": [*kept, *data.draw(st.lists(st.sampled_from(pool), max_size=2))]} | data.draw(
            st.fixed_dictionaries({}, optional={"x": plain})
        )
        checkpoints.append((f"{9 - number}", parent, values))
    made(folder / "x.sqlite", checkpoints, [data.draw(plain | st.lists(st.sampled_from(pool), max_size=2)) for _ in range(2)])
    found, _ = read(folder / "x.sqlite")
    write(found.values(), folder / "y.sqlite")
    assert rows(folder / "y.sqlite") == rows(folder / "x.sqlite")
    store = SessionStore.in_memory()
    import_file(store, folder / "x.sqlite", "langgraph")
    export_file(store, folder / "z.sqlite", "langgraph")
    assert rows(folder / "z.sqlite") == rows(folder / "x.sqlite")


normal = st.one_of(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "developer", "critic"]), "content": names}, optional={"name": names}
    ),
    st.fixed_dictionaries({"role": st.just("tool"), "content": names, "tool_call_id": names}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": names},
        optional={
            "reasoning_content": names,
            "tool_calls": st.lists(
                st.builds(
                    lambda name, text: {"id": "a", "type": "function", "function": {"name": name, "arguments": text}},
                    names,
                    st.sampled_from(['{"a": 1}', "{}"]),
                ),
                min_size=1,
                max_size=2,
            ),
        },
    ),
)


@given(st.lists(st.tuples(normal, st.integers(0, 9)), min_size=1, max_size=7))
def test_any_conversation_of_messages_is_read_again(tmp_path_factory: pytest.TempPathFactory, drawn: list[Any]) -> None:
    path = tmp_path_factory.mktemp("langgraph") / "x.sqlite"
    turns = [Turn(id=str(n), parent=str(back % n) if n else None, message=said) for n, (said, back) in enumerate(drawn)]
    assert not write([Conversation(id="c", turns=turns)], path).lost
    found, losses = read(path)
    assert paths(Tree(found["c"])) == paths(Tree(Conversation(id="c", turns=turns)))
    assert {each.what for each in losses.lost} <= {"a tool result without its call"}


def test_what_a_calls_arguments_cannot_say_is_kept_as_text_and_named(tmp_path: Path) -> None:
    texts = ['{"a":1}', "{", "[1]", f'{{"a": {2**70}}}', '{"a": NaN}']
    made_calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": text}} for text in texts]
    turn = Turn(id="0", parent=None, message={"role": "assistant", "content": "", "tool_calls": made_calls})
    losses = write([Conversation(id="c", turns=[turn], tools=({"type": "function"},))], tmp_path / "x.sqlite")
    assert [each.what for each in losses.lost] == ["tool definitions", "how the JSON of a tool call's arguments is written"]
    found, _ = read(tmp_path / "x.sqlite")
    said = next(turn.message for turn in found["c"].turns if turn.message is not None)
    assert [each["function"]["arguments"] for each in said["tool_calls"]] == ['{"a": 1}', *texts[1:]]


def test_a_write_that_says_nearly_what_a_message_says_stays_what_it_is(tmp_path: Path) -> None:
    said = {"content": "x", "id": "a"}
    alike = [[message("human.HumanMessage", said | more)] for more in ({}, {"name": "Ann"})]
    path = made(tmp_path / "x.sqlite", [("1", None, {"messages": alike[0]})], alike)
    found, _ = read(path)
    (note,) = (turn for turn in found["t"].turns if turn.role == "checkpoint")
    assert [each[4][0].keys() for each in note.fields["writes"]] == [{"$message": 0}.keys(), {"$ext": 0}.keys()]
    write(found.values(), tmp_path / "y.sqlite")
    assert rows(tmp_path / "y.sqlite") == rows(path)


def test_a_result_without_its_call_is_named(tmp_path: Path) -> None:
    said = {"content": "x", "tool_call_id": "gone"}
    _, losses = read(made(tmp_path / "x.sqlite", [("1", None, {"messages": [message("tool.ToolMessage", said)]})]))
    assert [each.what for each in losses.lost] == ["a tool result without its call"]


# Hostile files.


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that leaves a file behind when it is imported, and another one when what it has is called."""
    (tmp_path / "sprung").mkdir()
    code = f"from pathlib import Path\nPath({str(tmp_path / 'sprung')!r}, 'imported').touch()\n"
    code += f"class Call:\n    def __init__(self, *a, **k):\n        Path({str(tmp_path / 'sprung')!r}, 'called').touch()\n"
    code += "    go = model_construct = construct = __init__\n"
    (tmp_path / "trapmodule.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "sprung"
    sys.modules.pop("trapmodule", None)


def hostile() -> list[Any]:
    return [Foreign("ext", [code, ["trapmodule", "Call", value, "go"]]) for code in range(8) for value in ("x", ["x"], {"x": 1})]


def test_nothing_is_imported_or_called(trap: Path, tmp_path: Path) -> None:
    evil = [*hostile(), Foreign("ext", [3, ["os", "path", "x", "abspath"]]), Foreign("ext", [1, ["builtins", "eval", ["1"]]])]
    evil += [Foreign("extension", [99, b"\x80\x04ctrapmodule\nCall\n."]), message("human.HumanMessage", {"content": evil[:3]})]
    made(tmp_path / "x.sqlite", [("1", None, {"messages": [evil[-1]], "x": evil})], evil)
    before = set(sys.modules)
    found, _ = read(tmp_path / "x.sqlite")
    store = SessionStore.in_memory()
    import_file(store, tmp_path / "x.sqlite", "langgraph")
    assert not list(trap.iterdir()) and not {
        each for each in set(sys.modules) - before if not each.startswith(("sessiontree", "langgraph"))
    }
    write(found.values(), tmp_path / "y.sqlite")
    assert rows_of_any(tmp_path / "y.sqlite") == rows_of_any(tmp_path / "x.sqlite")
    assert not list(trap.iterdir())


def rows_of_any(path: Path) -> list[Any]:
    serde = langgraph._Inert(ormsgpack)
    with closing(sqlite3.connect(path)) as connection:
        return [shape(serde.loads_typed(row)) for row in connection.execute("SELECT type, checkpoint FROM checkpoints").fetchall()]


def test_the_trap_is_one(trap: Path, tmp_path: Path) -> None:
    """What LangGraph's own serializer does with the same bytes, unless it is told to be strict."""
    made(tmp_path / "x.sqlite", [("1", None, {"x": hostile()})])
    with closing(sqlite3.connect(tmp_path / "x.sqlite")) as connection:
        sqlite.SqliteSaver(connection, serde=JsonPlusSerializer(allowed_msgpack_modules=True)).get_tuple(config("t"))
    assert {each.name for each in trap.iterdir()} == {"imported", "called"}


@pytest.mark.parametrize("kind", ["pickle", "json", "x", None, 7])
def test_values_serialised_otherwise_are_refused(kind: Any, tmp_path: Path, trap: Path) -> None:
    path = made(tmp_path / "x.sqlite", [("1", None, {})])
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE checkpoints SET type = ?, checkpoint = ?", (kind, b"ctrapmodule\nCall\n(tR."))
        connection.commit()
    with pytest.raises(InterchangeError, match="thread 't', checkpoint '1': a value that cannot be read"):
        read(path)
    assert list(read(path, salvage=True)[0]["t"].turns) == [] and not list(trap.iterdir())


def test_cycles_and_parents_that_are_gone_are_named(tmp_path: Path) -> None:
    path = made(tmp_path / "x.sqlite", [("1", "2", {}), ("2", "1", {}), ("3", "gone", {}), ("4", "3", {})])
    with pytest.raises(InterchangeError, match="a cycle of parents: 2 checkpoints"):
        read(path)
    found, losses = read(path, salvage=True)
    assert {turn.id: turn.parent for turn in found["t"].turns} == {"3": None, "4": "3"}
    assert [each.what for each in losses.lost] == ["a checkpoint whose parent is not in the file"]


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE checkpoints SET checkpoint = x'c1'",
        "UPDATE checkpoints SET checkpoint = x'90'",
        "UPDATE checkpoints SET checkpoint = x'81a26964a131'",
        "UPDATE checkpoints SET checkpoint = NULL",
        "UPDATE checkpoints SET checkpoint = 7",
        "UPDATE checkpoints SET checkpoint_id = 'other'",
        "UPDATE checkpoints SET checkpoint_id = x'00'",
        "UPDATE checkpoints SET parent_checkpoint_id = x'00'",
        "UPDATE checkpoints SET thread_id = x'00'",
        "UPDATE checkpoints SET thread_id = CAST(x'ff' AS TEXT)",
        "UPDATE checkpoints SET checkpoint_ns = x'00'",
        "UPDATE checkpoints SET metadata = x'7b'",
        "UPDATE writes SET value = x'c1'",
        "DROP TABLE checkpoints",
        "DROP TABLE writes",
    ],
)
def test_a_file_with_other_things_in_it_is_named(change: str, tmp_path: Path) -> None:
    path = made(tmp_path / "x.sqlite", [("1", None, {})], [1])
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(change)
        connection.commit()
    with pytest.raises(InterchangeError):
        read(path)
    read(path, salvage=True)


def test_a_file_that_is_none_and_one_that_was_cut_off_are_named(tmp_path: Path) -> None:
    for data in (b"", b"SQLite format 3\0", b"{}\n" * 999, GOLDEN.read_bytes()[:50_000]):
        (tmp_path / "x.sqlite").write_bytes(data)
        with pytest.raises(InterchangeError):
            read(tmp_path / "x.sqlite")
        read(tmp_path / "x.sqlite", salvage=True)
        assert (tmp_path / "x.sqlite").read_bytes() == data


def test_a_value_nested_without_end_is_named(tmp_path: Path) -> None:
    path = made(tmp_path / "x.sqlite", [("1", None, {})])
    for nested in (b"\x91" * 100_000 + b"\xc0", b"\x91" * 300 + b"\xc0"):
        data = b"\x82\xa2id\xa11\xaechannel_values\x81\xa1x" + nested
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("UPDATE checkpoints SET checkpoint = ?", (data,))
            connection.commit()
        with pytest.raises(InterchangeError):
            read(path)


def test_a_file_is_not_changed_by_reading_it(tmp_path: Path) -> None:
    (tmp_path / "x.sqlite").write_bytes(GOLDEN.read_bytes())
    read(tmp_path / "x.sqlite")
    assert (tmp_path / "x.sqlite").read_bytes() == GOLDEN.read_bytes()
    assert [each.name for each in tmp_path.iterdir()] == ["x.sqlite"]


def test_files_of_versions_without_task_paths_are_read(tmp_path: Path) -> None:
    path = made(tmp_path / "x.sqlite", [("1", None, {})], [1])
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("ALTER TABLE writes DROP COLUMN task_path")
    (turn,) = read(path)[0]["t"].turns
    assert turn.fields["writes"] == [["task", "", 0, "messages", 1]]


def test_without_its_library_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ormsgpack", None)
    with pytest.raises(NeedsExtra, match=r"pip install 'sessiontree\[langgraph\]'") as caught:
        read(GOLDEN)
    assert caught.value.extra == "langgraph"


def test_long_threads_and_deep_conversations(tmp_path: Path) -> None:
    said = [message("human.HumanMessage", {"content": f"turn {n}", "id": str(n)}) for n in range(300)]
    path = made(tmp_path / "x.sqlite", [(f"{n:04}", f"{n - 1:04}" if n else None, {"messages": said[: n + 1]}) for n in range(300)])
    found, _ = read(path)
    assert len(list(found["t"].turns)) == 600  # each message once, each checkpoint once
    turns = [Turn(id=str(n), parent=str(n - 1) if n else None, message={"role": "user", "content": "x"}) for n in range(2565)]
    write([Conversation(id="deep", turns=turns)], tmp_path / "y.sqlite")
    assert len(list(read(tmp_path / "y.sqlite")[0]["deep"].turns)) == 2566


def test_messages_of_classes_that_only_look_like_langchains_are_values() -> None:
    for module, name in (
        ("trapmodule", "HumanMessage"),
        ("langchain_core.messages.ai", "HumanMessage"),
        ("langchain_core.messages.human", "X"),
    ):
        assert as_message(Foreign("ext", [5, [module, name, {}, "model_validate_json"]])) is None
    removed = read_message(message("modifier.RemoveMessage", {"content": "", "id": "a"}), {}, "", Losses("x"))
    assert (removed.message, removed.role) == (None, "remove")
    assert attrs.evolve(removed, id="x").fields["langchain"]["removed"]["id"] == "a"
    assert issubclass(InterchangeError, SessionTreeError)


def test_threads_of_any_name_are_sessions(tmp_path: Path) -> None:
    """LangGraph takes no name and a very long one; each comes back under its own."""
    library = pytest.importorskip("langgraph.checkpoint.sqlite")
    names = ["", "x" * 600, "usual"]
    with closing(sqlite3.connect(tmp_path / "in.sqlite", check_same_thread=False)) as connection:
        kept = library.SqliteSaver(connection)
        for name in names:
            store = SessionStore.in_memory()
            session = store.create("usual", scheme="text@hf5")
            append_messages(store, session, session.root, [{"role": "user", "content": "q"}])
            export_file(store, tmp_path / f"{len(name)}.sqlite", "langgraph")
            with closing(sqlite3.connect(tmp_path / f"{len(name)}.sqlite", check_same_thread=False)) as one:
                found = library.SqliteSaver(one).get_tuple({"configurable": {"thread_id": "usual"}})
            kept.put({"configurable": {"thread_id": name, "checkpoint_ns": ""}}, found.checkpoint, found.metadata, {})
    store = SessionStore.in_memory()
    report = import_file(store, tmp_path / "in.sqlite", "langgraph")
    assert report.added == 3 and max(map(len, report.session_ids)) <= 512 and "thread" in report.session_ids
    export_file(store, tmp_path / "out.sqlite", "langgraph")
    with closing(sqlite3.connect(tmp_path / "out.sqlite")) as connection:
        assert {name for (name,) in connection.execute("SELECT DISTINCT thread_id FROM checkpoints")} == set(names)
