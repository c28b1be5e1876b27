"""Conversations into stores and out of them, whatever the format: order, losses, resuming, templates, pictures, plug-ins."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from qwen_reference import IMAGE_PAD, VISION_END, VISION_START, tokenizer

from sessiontree import (
    InterchangeError,
    LimitExceeded,
    MediaItem,
    SessionExists,
    SessionStore,
    UnknownFormat,
    Unsupported,
    interchange,
    media_identity,
)
from sessiontree.interchange import (
    ChatTemplate,
    Conversation,
    Format,
    Image,
    Losses,
    SourceFile,
    Turn,
    append_messages,
    export_file,
    format_named,
    formats,
    import_file,
    message_of,
)
from sessiontree.interchange import source as sources
from sessiontree.interchange import text_of as said_text
from sessiontree.positions import scheme
from tests.command_line import json_of, run, text_of

QWEN2_VL = scheme("qwen2_vl@hf5", spatial_merge_size=2, image_token_id=IMAGE_PAD, video_token_id=IMAGE_PAD + 1)


def of_turns(*turns: Turn, name: str = "talk", **rest: Any) -> Format:
    """A format whose every file says just these turns."""

    def read(file: SourceFile, losses: Losses) -> Iterator[Conversation]:
        yield Conversation(id=name, turns=iter(turns), **rest)

    return Format("fixed", "what a test says", ".txt", read)


def said(turn_id: str, parent: str | None, text: str = "") -> Turn:
    return Turn(id=turn_id, parent=parent, message={"role": "user", "content": text or turn_id})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "talk.txt"
    path.write_text("something")
    return path


def parents(store: SessionStore, session_id: str = "talk") -> dict[str | None, str | None]:
    session = store.get(session_id)
    nodes = session.descendants(session.root)
    return {node.key: None if node.parent is None else node.parent.key for node in nodes}


def jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# --- order --------------------------------------------------------------------------------------------------------------------


@given(st.data())
def test_turns_in_any_order_make_the_same_tree(data: st.DataObject) -> None:
    """Every turn comes behind its parent, whatever came first; the same nodes, the same ids."""
    count = data.draw(st.integers(1, 12))
    turns = [said(str(at), None if at == 0 else str(data.draw(st.integers(0, at - 1)))) for at in range(count)]
    shuffled = data.draw(st.permutations(turns))
    stores = [SessionStore.in_memory(), SessionStore.in_memory()]
    path = Path(__file__)
    for store, order in zip(stores, (turns, shuffled), strict=True):
        report = import_file(store, path, of_turns(*order))
        assert (report.turns, report.new_nodes, report.faults) == (count, count, ())
    one, two = (store.get("talk") for store in stores)
    assert parents(stores[1]) == {turn.id: turn.parent for turn in turns}
    assert {node.id for node in one.descendants(one.root)} == {node.id for node in two.descendants(two.root)}


def test_a_parent_that_never_comes_and_one_that_is_its_own_end_the_import(file: Path) -> None:
    """Nothing of such a conversation stays; salvaged, each is counted and every turn is there once."""
    first = said("a", None)
    for what, at, turns in (
        ("no such parent", "b", (first, said("b", "nobody"), said("c", "b"))),
        ("its parents lead back to itself", "d", (first, said("b", "d"), said("c", "b"), said("d", "c"), said("e", "d"))),
    ):
        store = SessionStore.in_memory()
        with pytest.raises(InterchangeError, match=what) as caught:
            import_file(store, file, of_turns(*turns))
        assert (caught.value.path, caught.value.place) == ("talk.txt", f"'{at}'")
        assert store.sessions() == ()
        report = import_file(store, file, of_turns(*turns), salvage=True)
        assert [(loss.what, loss.count, loss.first) for loss in report.faults] == [(what, 1, f"'{at}'")]
        assert parents(store) == {turn.id: None if turn.id == at else turn.parent for turn in turns}


@given(st.data())
def test_any_graph_of_parents_is_salvaged_whole(data: st.DataObject) -> None:
    """Cycles, parents that are not there, turns that are their own parents: every turn is there once, under its parent or first."""
    count = data.draw(st.integers(1, 9))
    turns = [said(str(at), data.draw(st.sampled_from([None, *map(str, range(count + 2))]))) for at in range(count)]
    store = SessionStore.in_memory()
    report = import_file(store, Path(__file__), of_turns(*turns), salvage=True)
    found = parents(store)
    assert set(found) == {turn.id for turn in turns}
    moved = [turn.id for turn in turns if found[turn.id] != turn.parent]
    assert all(found[turn_id] is None for turn_id in moved)
    assert sum(loss.count for loss in report.faults) == len(moved), "no more than what is counted"
    cycles = sum(loss.count for loss in report.faults if loss.what == "its parents lead back to itself")
    above = {turn.id: turn.parent for turn in turns}
    on_cycles = set()
    for turn in turns:
        path = [turn.id]
        while isinstance(parent := above.get(path[-1]), str) and parent not in path:
            path.append(parent)
        if parent in path:
            on_cycles.add(frozenset(path[path.index(parent) :]))
    assert cycles == len(on_cycles), "one turn of each"


def test_a_second_turn_of_the_same_id_is_a_fault(file: Path) -> None:
    turns = (said("a", None), said("b", "a"), said("b", None, "another"))
    with pytest.raises(InterchangeError, match="a second turn with the same id"):
        import_file(SessionStore.in_memory(), file, of_turns(*turns))
    store = SessionStore.in_memory()
    assert import_file(store, file, of_turns(*turns), salvage=True).new_nodes == 2
    assert parents(store)["b"] == "a"


def test_what_a_turn_says_now_is_counted_where_it_stays_as_it_was(file: Path) -> None:
    store = SessionStore.in_memory()
    import_file(store, file, of_turns(said("a", None, "half an ans")))
    report = import_file(store, file, of_turns(said("a", None, "half an answer"), said("b", "a", "more")))
    assert [(loss.what, loss.count) for loss in report.lost] == [("what turns say now: they stay as they were imported", 1)]
    assert report.grown == 1 and text_of_message(store.get("talk").heads["main"].path()[1]) == "half an ans"
    assert not import_file(store, file, of_turns(said("a", None, "half an ans"), said("b", "a", "more"))).lost


def test_words_that_get_tokens_later_are_another_session(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", conversations(2))
    store = SessionStore.in_memory()
    import_file(store, path, "openai")
    with pytest.raises(InterchangeError, match=r"line 1, messages\[0\]: .*other tokens or pictures \(a prefix makes another"):
        import_file(store, path, "openai", template=chatml)
    assert import_file(store, path, "openai", template=chatml, salvage=True).faults
    report = import_file(store, path, "openai", template=chatml, prefix="ids/")
    assert report.added == 2 and not report.faults


@pytest.mark.parametrize("name", ["", "x" * 513])
def test_a_name_that_no_session_can_have_is_a_fault(name: str, file: Path) -> None:
    store = SessionStore.in_memory()
    with pytest.raises(InterchangeError, match=f"the id of a session has 1 to 512 characters: this has {len(name)}"):
        import_file(store, file, of_turns(said("a", None), name=name))
    two = Format(
        "two", "", ".x", lambda file, losses: iter([Conversation(id=name, turns=[]), Conversation(id="y", turns=[said("a", None)])])
    )
    report = import_file(store, file, two, salvage=True)
    assert store.sessions() == ("y",) and report.faults[0].count == 1


def test_heads_that_another_import_moves_meanwhile_are_looked_at_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process made the head between this one's look and its move."""
    store = SessionStore.in_memory()
    raced: list[str] = []
    set_head = type(store.create("other", scheme="text@hf5")).set_head

    def overtaken(self: Any, name: str, node: Any, **expected: Any) -> Any:
        if not raced:
            raced.append(name)
            set_head(self, name, node, expected=None)
        return set_head(self, name, node, **expected)

    monkeypatch.setattr("sessiontree.store.Session.set_head", overtaken)
    report = import_file(store, file, of_turns(said("a", None)))
    assert raced == ["main"] and report.added == 1 and store.get("talk").heads["main"].key == "a"


def test_a_file_of_another_tool_is_no_transcript(tmp_path: Path) -> None:
    with pytest.raises(InterchangeError, match=r"everything\.jsonl, the whole file: no transcript of Claude Code"):
        import_file(SessionStore.in_memory(), GOLDEN / SOURCES["pi"], "claude-code")


@pytest.mark.parametrize("form", ["atif", "claude-code", "sglang", "verifiers"])
def test_a_file_of_another_format_is_a_fault(form: str, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", [{"messages": [{"role": "user", "content": "q"}]}])
    store = SessionStore.in_memory()
    with pytest.raises(InterchangeError):
        import_file(store, path, form)
    assert store.sessions() == ()


def test_a_compressed_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b'{"messages":[]}\n'))
    with pytest.raises(InterchangeError, match=r"x\.jsonl\.gz is compressed by gzip: unpack it first"):
        import_file(SessionStore.in_memory(), tmp_path / "x.jsonl.gz", "openai")


def test_ids_that_are_no_text_are_faults(file: Path) -> None:
    for form in (of_turns(said("\ud800", None)), of_turns(said("a", None), name="\ud800")):
        with pytest.raises(InterchangeError, match="is no text"):
            import_file(SessionStore.in_memory(), file, form)
        assert import_file(SessionStore.in_memory(), file, form, salvage=True).new_nodes == 0


def test_a_failure_in_the_middle_leaves_the_conversations_before_it(tmp_path: Path) -> None:
    """And of a session that was there before, its heads as they were."""
    good = {"messages": [{"role": "user", "content": "hello"}]}
    path = jsonl(tmp_path / "a.jsonl", [good, {"messages": [{"role": "user", "content": "hello"}, {"content": 1}]}, good])
    store = SessionStore.in_memory()
    with pytest.raises(InterchangeError, match=r"a\.jsonl, line 2, messages\[1\]: its role is to be text: it is null"):
        import_file(store, path, "openai")
    assert store.sessions() == ("a-1",)
    jsonl(path, [{"messages": [*good["messages"], {"role": "assistant", "content": "hi"}, 7]}])
    tip = store.get("a-1").heads["main"]
    with pytest.raises(InterchangeError):
        import_file(store, path, "openai")
    assert store.get("a-1").heads["main"] == tip
    assert import_file(store, path, "openai", salvage=True).new_nodes == 0, "the turn before it is there, beside the heads"
    assert message_of(store.get("a-1").heads["main"]) == {"role": "assistant", "content": "hi"}


# --- again, and after a kill ----------------------------------------------------------------------------------------------------


def conversations(count: int, turns: int = 4) -> list[Any]:
    roles = ("user", "assistant")
    return [{"messages": [{"role": roles[at % 2], "content": f"{row} {at}"} for at in range(turns)]} for row in range(count)]


def test_a_second_import_changes_nothing_and_a_grown_file_adds_what_is_new(tmp_path: Path) -> None:
    rows = conversations(5)
    path = jsonl(tmp_path / "a.jsonl", rows)
    with SessionStore.open(tmp_path / "store") as store:
        assert import_file(store, path, "openai").added == 5
        again = import_file(store, path, "openai")
        assert (again.known, again.turns, again.new_nodes) == (5, 0, 0)
        rows[2]["messages"].append({"role": "user", "content": "more"})
        grown = import_file(store, jsonl(path, rows), "openai")
        assert (grown.known, grown.grown, grown.new_nodes) == (4, 1, 1)
        assert message_of(store.get("a-3").heads["main"]) == {"role": "user", "content": "more"}


def test_heads_follow_the_file_unless_somebody_moved_them(file: Path) -> None:
    """Also to another branch, and away: where an import left them is remembered. Elsewhere they stay, and that is counted."""
    one, two, three = said("a", None), said("b", "a"), said("c", "a")
    store = SessionStore.in_memory()

    def heads(mark: str, *turns: Turn, **heads: str) -> dict[str, str | None]:
        form = of_turns(*turns, mark=mark, heads=heads)
        kept.append(import_file(store, file, form).heads_kept)
        return {name: node.key for name, node in store.get("talk").heads.items()}

    kept: list[int] = []
    assert heads("1", one, two, saved="a") == {"main": "b", "saved": "a"}
    assert heads("2", one, two, three, main="c") == {"main": "c"}
    session = store.get("talk")
    mine = append_messages(store, session, session.root, [{"role": "user", "content": "mine"}])
    session.set_head("main", mine)
    assert heads("3", one, two, three, main="b", other="a") == {"main": mine.key, "other": "a"}
    session.drop_head("other")
    assert heads("4", one, two, three, main="b", other="c") == {"main": mine.key, "other": "c"}
    assert kept == [0, 0, 1, 1]


def test_an_earlier_state_of_a_file_moves_no_head_back(file: Path) -> None:
    """Nor does a part of a conversation. What comes after it moves the head on, as if the earlier one had not been read."""
    one, two, three = said("a", None), said("b", "a"), said("c", "b")
    store = SessionStore.in_memory()

    def main(mark: str, *turns: Turn) -> tuple[str | None, int]:
        report = import_file(store, file, of_turns(*turns, mark=mark))
        return store.get("talk").heads["main"].key, report.heads_kept

    assert main("1", one, two) == ("b", 0)
    assert main("2", one) == ("b", 1)
    assert main("3", one, two, three) == ("c", 0)
    assert main("4", one, said("d", "a")) == ("d", 0)  # another branch


def test_a_session_that_goes_to_pi_and_on_again_stays_one(file: Path, tmp_path: Path) -> None:
    """Where main is not what came last, an entry says so; the next time there is another of these."""
    store = SessionStore.in_memory()
    import_file(store, file, of_turns(said("a", None, "a"), said("b", "a", "b"), said("c", "a", "c"), heads={"main": "b"}))
    for number in range(3):
        path = tmp_path / f"{number}.jsonl"
        export_file(store, path, "pi", ["talk"])
        store = SessionStore.in_memory()
        assert not import_file(store, path, "pi").faults
        session = store.get("talk")
        (c,) = [node for node in walk(session) if text_of_message(node) == "c"]
        append_messages(store, session, session.heads["main"], [{"role": "user", "content": f"more {number}"}])
        append_messages(store, session, c, [{"role": "user", "content": f"aside {number}"}])
    texts = {text_of_message(node) for node in walk(store.get("talk"))}
    assert texts >= {"a", "b", "c", "more 0", "more 1", "aside 0", "aside 1"}


def test_several_results_in_one_turn_answer_several_calls(file: Path, tmp_path: Path) -> None:
    """For a tree's checks, for a template, and as messages."""
    calls = [{"id": each, "type": "function", "function": {"name": "f", "arguments": "{}"}} for each in "xy"]
    results = [{"type": "tool_result", "tool_call_id": each, "content": each * 3} for each in "xyz"]
    turns = (
        Turn(message={"role": "user", "content": "go"}),
        Turn(message={"role": "assistant", "content": "", "tool_calls": calls}),
        Turn(message={"role": "tool", "content": [*results, {"type": "text", "text": "and on"}]}),
    )
    store = SessionStore.in_memory()
    import_file(store, file, of_turns(*turns), template=chatml)
    session = store.get("talk")
    tip = session.heads["main"]
    assert [(problem.kind, problem.call_id) for problem in session.validate(tip)] == [("unrequested_result", "z")]
    assert "xxx\n</tool_response>\n<tool_response>\nyyy" in "".join(map(chr, tip.token_ids))
    export_file(store, tmp_path / "out.jsonl", "openai")
    messages = json.loads((tmp_path / "out.jsonl").read_text())["messages"]
    assert [message.get("tool_call_id") for message in messages] == [None, None, "x", "y", "z", None]


def test_an_import_that_was_killed_goes_on(tmp_path: Path) -> None:
    """SIGKILL at three places of the file; the store ends up as if nothing had happened, and what was done is passed over."""
    path = jsonl(tmp_path / "a.jsonl", conversations(150, 6))
    script = textwrap.dedent(
        """
        import os, signal, sys
        from sessiontree import SessionStore
        from sessiontree.interchange import import_file
        def progress(done, total):
            if done > total * float(sys.argv[3]):
                os.kill(os.getpid(), signal.SIGKILL)
        with SessionStore.open(sys.argv[1], durability="commit") as store:
            import_file(store, sys.argv[2], "openai", progress=progress)
        """
    )
    for share in ("0.2", "0.5", "0.9"):
        found = subprocess.run([sys.executable, "-c", script, str(tmp_path / "store"), str(path), share], check=False)
        assert found.returncode == -signal.SIGKILL
    with SessionStore.open(tmp_path / "store") as store, SessionStore.open(tmp_path / "whole") as whole:
        report = import_file(store, path, "openai")
        assert report.known >= 130 and report.added >= 1
        import_file(whole, path, "openai")
        assert sorted(store.sessions()) == sorted(whole.sessions())
        for name in whole.sessions():
            assert store.get(name).heads["main"] == whole.get(name).heads["main"]
            assert len(store.get(name).tree) == len(whole.get(name).tree)


def test_another_session_of_that_id_is_left_alone(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", conversations(1))
    store = SessionStore.in_memory()
    store.create("a-1", scheme="text@hf5", namespace="other")
    with pytest.raises(SessionExists):
        import_file(store, path, "openai")
    assert import_file(store, path, "openai", prefix="mine/").session_ids == ("mine/a-1",)


MEMORY = """
import resource, sys
from sessiontree import SessionStore
from sessiontree.interchange import export_file, import_file
with SessionStore.open(sys.argv[1]) as store:
    (import_file if sys.argv[3] == "in" else export_file)(store, sys.argv[2], "openai")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.soak
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """Of a file of 800 MB, the most that a process ever holds is what it holds for one of 200 MB, in and out."""
    most: dict[str, list[int]] = {"in": [], "out": []}
    for size in (200, 800):
        path = tmp_path / f"{size}.jsonl"
        row = json.dumps({"messages": [{"role": "user", "content": "word " * 2000} for _ in range(10)]}) + "\n"
        with path.open("w") as file:
            for _ in range(size * 10**6 // len(row)):
                file.write(row)
        for way, other in (("in", path), ("out", tmp_path / f"{size}.out.jsonl")):
            command = [sys.executable, "-c", MEMORY, str(tmp_path / f"store{size}"), str(other), way]
            most[way].append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    assert all(much < 1.3 * little for little, much in most.values())


# --- pictures -----------------------------------------------------------------------------------------------------------------


def picture(data: bytes, mime_type: str = "image/png") -> Image:
    return Image(data, mime_type)


def test_a_picture_is_kept_once_and_found_again(file: Path, tmp_path: Path) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image", "image": 0}]}
    turns = [Turn(id=str(at), message=message, images=(picture(b"P" * 100_000),)) for at in range(20)]
    with SessionStore.open(tmp_path / "store") as store:
        report = import_file(store, file, of_turns(*turns))
        assert (report.images, report.tokens) == (20, 20)
        session = store.get("talk")
        (item,) = session.heads["main"].media
        assert item.modality == "image" and item.spans == ((0, 1),)
        assert len({node.media[0].identity for node in session.descendants(session.root)}) == 1
        stored = sum(each.stat().st_size for each in (tmp_path / "store").rglob("*") if each.is_file() and each.name != "LOCK")
        held = sum(each.stat().st_blocks * 512 for each in (tmp_path / "store").rglob("blobs/**/*") if each.is_file())
        assert 100_000 < held < 200_000 <= stored or held < 200_000
        export_file(store, tmp_path / "out.jsonl", "openai")
        store.gc()
    with SessionStore.open(tmp_path / "store") as store:
        export_file(store, tmp_path / "again.jsonl", "openai")
        (line,) = (tmp_path / "out.jsonl").read_text().splitlines()
        assert line.count("data:image/png;base64,UFBQ") == 20
        assert (tmp_path / "again.jsonl").read_text() == line + "\n"


def test_a_picture_that_is_gone_is_counted(file: Path, tmp_path: Path) -> None:
    store = SessionStore.in_memory()
    turn = Turn(message={"role": "user", "content": [{"type": "image", "image": 0}]}, images=(picture(b"P"),))
    import_file(store, file, of_turns(turn))
    store.drop_features(store.get("talk").heads["main"].media[0])
    report = export_file(store, tmp_path / "out.jsonl", "openai")
    assert [(loss.what, loss.count) for loss in report.lost] == [("pictures that are no longer kept", 1)]


def test_pictures_of_turns_with_tokens_of_their_own_stay_with_the_words(file: Path, tmp_path: Path) -> None:
    message = {"role": "user", "content": [{"type": "image", "image": 0}]}
    store = SessionStore.in_memory()
    import_file(store, file, of_turns(Turn(message=message, images=(picture(b"P"),), token_ids=[1, 2])))
    export_file(store, tmp_path / "out.jsonl", "openai")
    assert "base64,UA==" in (tmp_path / "out.jsonl").read_text()


# --- tokens -------------------------------------------------------------------------------------------------------------------


def chatml(messages: Sequence[Any], tools: Sequence[Any]) -> list[int]:
    """As Qwen2.5's template: a system message of its own, tool results that follow each other in one block of the user's."""
    text = "" if messages and messages[0]["role"] == "system" else "<|im_start|>system\nYou are Qwen.<|im_end|>\n"
    for at, message in enumerate(messages):
        content = message["content"]
        pieces = [content] if isinstance(content, str) else content or []
        words = "".join(
            "<|vision_start|>\N{OBJECT REPLACEMENT CHARACTER}<|vision_end|>"
            if isinstance(piece, dict) and piece["type"] == "image"
            else piece
            if isinstance(piece, str)
            else piece["text"]
            for piece in pieces
        )
        if message["role"] == "tool":
            begun = at and messages[at - 1]["role"] == "tool"
            goes_on = at + 1 < len(messages) and messages[at + 1]["role"] == "tool"
            text += ("" if begun else "<|im_start|>user") + f"\n<tool_response>\n{words}\n</tool_response>"
            text += "" if goes_on else "<|im_end|>\n"
        else:
            text += f"<|im_start|>{message['role']}\n{words}<|im_end|>\n"
    ids: list[int] = []
    for number, piece in enumerate(text.split("<|vision_start|>\N{OBJECT REPLACEMENT CHARACTER}<|vision_end|>")):
        ids += [VISION_START, IMAGE_PAD, VISION_END] if number else []
        ids += map(ord, piece)
    return ids


def alternating(messages: Sequence[Any], tools: Sequence[Any]) -> list[int]:
    """As Gemma's and Mistral's templates: who asks and who answers take turns, or it refuses."""
    for at, message in enumerate(each for each in messages if each["role"] != "system"):
        if (message["role"] == "user") != (at % 2 == 0):
            raise ValueError("roles must alternate")
    return [ord(each) for message in messages for each in f"[{message['role']}]{message['content']}"]


def counting(messages: Sequence[Any], tools: Sequence[Any]) -> list[int]:
    """As ChatGLM's: each round has its number."""
    asked = list(itertools.accumulate(message["role"] == "user" for message in messages))
    return [ord(each) for message, at in zip(messages, asked, strict=True) for each in f"[Round {at}]{message['content']}"]


def with_first(messages: Sequence[Any], tools: Sequence[Any]) -> list[int]:
    """Says at each question what was said first."""
    first = next((each["content"] for each in messages if each["role"] != "system"), "")
    pieces = (f"<{first}>{each['content']};" if each["role"] == "user" else each["content"] for each in messages)
    return [ord(each) for piece in pieces for each in piece]


def test_another_template_is_no_second_import_of_the_same(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", conversations(1))
    store = SessionStore.in_memory()
    assert import_file(store, path, "openai", template=chatml).added == 1
    assert import_file(store, path, "openai", template=chatml).known == 1
    with pytest.raises(InterchangeError, match="other tokens"):
        import_file(store, path, "openai", template=alternating)


def test_tools_of_appended_messages_are_written(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    store = SessionStore.in_memory()
    session = store.create("a", scheme="text@hf5")
    node = append_messages(store, session, session.root, [{"role": "user", "content": "q"}], template=chatml, tools=tools)
    append_messages(store, session, node, [{"role": "assistant", "content": "r"}], template=chatml, tools=tools)
    export_file(store, tmp_path / "a.jsonl", "openai")
    assert json.loads((tmp_path / "a.jsonl").read_text())["tools"] == tools


def calling(*names: str) -> Turn:
    calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in names]
    return Turn(id=f"call {names[0]}", message={"role": "assistant", "content": None, "tool_calls": calls})


def result(call: str, parent: str) -> Turn:
    return Turn(id=f"result {call}", parent=parent, message={"role": "tool", "tool_call_id": call, "content": call})


def test_results_beside_the_branch_that_goes_on_stand_behind_their_calls(file: Path, tmp_path: Path) -> None:
    """As Claude Code writes calls that were made at once: x, then y below it, each with its result as a child."""
    turns = [
        said("q", None),
        attrs.evolve(calling("x"), parent="q"),
        attrs.evolve(calling("y"), parent="call x"),
        result("x", "call x"),
        result("y", "call y"),
        Turn(id="end", parent="result y", message={"role": "assistant", "content": "done"}),
        Turn(id="other", parent="call y", message={"role": "user", "content": "stop"}),
    ]
    store = SessionStore.in_memory()
    import_file(store, file, of_turns(*turns))
    report = export_file(store, tmp_path / "out.jsonl", "openai")
    rows = [json.loads(line)["messages"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    shown = [[row.get("tool_call_id") or row["content"] or row["tool_calls"][0]["id"] for row in each] for each in rows]
    assert shown == [["q", "x", "x", "y", "y", "done"], ["q", "x", "x", "y", "stop"]]
    unanswered = "tool calls of a branch whose results stand in another, or nowhere"  # y's goes on, on a branch of its own
    assert {loss.what: loss.count for loss in report.lost}[unanswered] == 1


def test_two_results_of_one_call_stay_two_branches(file: Path, tmp_path: Path) -> None:
    again = attrs.evolve(result("x", "call x"), id="again")
    store = SessionStore.in_memory()
    import_file(store, file, of_turns(said("q", None), attrs.evolve(calling("x"), parent="q"), result("x", "call x"), again))
    export_file(store, tmp_path / "out.jsonl", "openai")
    rows = [json.loads(line)["messages"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [len(row) for row in rows] == [3, 3]


@pytest.mark.parametrize("form", ["atif", "chatgpt", "sglang", "sharegpt", "verifiers"])
def test_several_results_of_one_turn_are_written_one_by_one(form: str, file: Path, tmp_path: Path) -> None:
    parts = [{"type": "tool_result", "tool_call_id": each, "content": f"result {each}"} for each in "xy"]
    turn = Turn(id="r", parent="call x", message={"role": "user", "content": [*parts, {"type": "text", "text": "Both?"}]})
    store, other = SessionStore.in_memory(), SessionStore.in_memory()
    import_file(store, file, of_turns(said("q", None, "q"), attrs.evolve(calling("x", "y"), parent="q"), turn))
    out = tmp_path / f"out{format_named(form).suffix}"
    report = export_file(store, out, form)
    assert "a turn with several results of tools, written as one for each" in {loss.what for loss in report.lost}
    import_file(other, out, form)
    everything = "\n".join(text_of_message(node) for each in other.sessions() for node in walk(other.get(each)))
    assert all(text in everything for text in ("result x", "result y", "Both?"))


def test_calls_are_shown_to_transformers_as_engines_show_them() -> None:
    """vLLM and SGLang parse arguments before the template sees them, which writes them as JSON itself."""
    shown: list[Any] = []

    class Tokenizer:
        def apply_chat_template(self, messages: list[Any], **_: Any) -> list[int]:
            shown.append(messages)
            return [ord(each) for each in json.dumps(messages)]

    calls = [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "Łódź"}'}},
        {"id": "d", "type": "function", "function": {"name": "f", "arguments": "no JSON"}},
    ]
    turn = Turn(message={"role": "assistant", "content": None, "tool_calls": calls})
    ChatTemplate(Tokenizer()).render([], [turn], (), scheme("text@hf5"), written=False)
    said_of = [call["function"]["arguments"] for call in shown[-1][0]["tool_calls"]]
    assert said_of == [{"city": "Łódź"}, "no JSON"]


@pytest.mark.parametrize("system", [True, False])
@pytest.mark.parametrize("template", [chatml, alternating, counting, with_first])
def test_a_template_may_look_back_as_far_as_it_likes(template: Any, system: bool, tmp_path: Path) -> None:
    """Imported, and appended one by one: the tokens are those of the whole conversation."""
    roles = ["user", "assistant"] * 12
    messages = [{"role": "system", "content": "s"}] * system + [{"role": role, "content": str(at)} for at, role in enumerate(roles)]
    store = SessionStore.in_memory()
    report = import_file(store, jsonl(tmp_path / "x.jsonl", [{"messages": messages}] * 2), "openai", template=template)
    assert not report.lost
    for name in store.sessions():
        assert store.get(name).heads["main"].input_ids().tolist() == template(messages, ())
    session = store.create("one by one", scheme="text@hf5")
    at: Any = session.root
    for message in messages:
        at = append_messages(store, session, at, [message], template=template)
    assert at.input_ids().tolist() == template(messages, ())


def placed(image: Image) -> tuple[MediaItem, Any]:
    side = 2 * len(image.data)
    item = MediaItem("image", image.data.ljust(32, b"\0"), (), grid_thw=(1, side, side))
    return item, {"pixel_values": np.zeros((side * side, 4), np.float32)}


TEMPLATE = ChatTemplate(chatml, image_token_id=IMAGE_PAD, place=placed)
ROLES = st.sampled_from(["user", "assistant", "tool"])


@given(st.data())
def test_tokens_of_every_path_are_what_the_template_writes_for_the_whole(data: st.DataObject) -> None:
    """Random trees, tool results in runs, pictures: turn by turn is the same as all at once, position by position."""
    count = data.draw(st.integers(1, 10))
    turns: list[Turn] = []
    for at in range(count):
        parent = None if at == 0 else str(data.draw(st.integers(max(0, at - 3), at - 1)))
        role = data.draw(ROLES) if at else data.draw(st.sampled_from(["system", "user"]))
        images = tuple(picture(b"x" * data.draw(st.integers(1, 3))) for _ in range(data.draw(st.integers(0, 2)))) * (role == "user")
        parts = [{"type": "text", "text": f"say {at}"}, *({"type": "image", "image": n} for n in range(len(images)))]
        turns.append(Turn(id=str(at), parent=parent, message={"role": role, "content": parts}, images=images))
    store = SessionStore.in_memory()
    report = import_file(store, Path(__file__), of_turns(*turns), template=TEMPLATE, scheme=QWEN2_VL)
    by_id = {turn.id: turn for turn in turns}
    followed = Counter(turn.parent for turn in turns)
    otherwise = 0
    for leaf in store.get("talk").leaves():
        path = [by_id[node.key] for node in leaf.path()[1:]]
        expected: list[int] = []
        sizes = iter([len(image.data) ** 2 for turn in path for image in turn.images])
        for token in chatml([as_shown(turn) for turn in path], ()):
            expected += [token] * (next(sizes) if token == IMAGE_PAD else 1)
        # Behind a tool result, a block is closed or goes on, as what came next in the file had it; a branch there finds it so.
        cut = any(
            role_of(one) == "tool"
            and (followed[one.id] > 1 or (role_of(two) == "tool" and int(two.id or 0) != int(one.id or 0) + 1))
            for one, two in itertools.pairwise(path)
        )
        same = leaf.input_ids().tolist() == expected
        assert same or cut
        otherwise += not same
    lost = {loss.what: loss.count for loss in report.lost}
    assert sum(lost.values()) == otherwise, "and a branch that is not is counted"


def role_of(turn: Turn) -> Any:
    return (turn.message or {})["role"]


def as_shown(turn: Turn) -> Any:
    message = dict(turn.message or {})
    return message | {"content": [{"type": "image"} if part["type"] == "image" else part for part in message["content"]]}


def letters(chat_template: str) -> Any:
    """A tokenizer of transformers for which each character is a token: its code."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    known = {"[UNK]": 0, **{chr(at): at for at in range(1, 127)}}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    fast.chat_template = chat_template
    return fast


def test_a_template_of_transformers_writes_what_it_writes_for_the_whole(tmp_path: Path) -> None:
    """A tokenizer with a real template that strips earlier reasoning: tokens stay as they were written, and that is counted."""
    fast = letters(
        "{% for m in messages %}<{{ m.role }}>"
        "{% if m.reasoning_content and loop.last %}({{ m.reasoning_content }}){% endif %}{{ m.content }}{% endfor %}"
    )
    rows = [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "reasoning_content": "hm"},
            {"role": "user", "content": "c"},
        ],
    ]
    store = SessionStore.in_memory()
    report = import_file(store, jsonl(tmp_path / "a.jsonl", rows), "openai", template=fast)
    texts = ["".join(map(chr, store.get(name).heads["main"].input_ids())) for name in ("a-1", "a-2")]
    assert texts == ["<user>a<assistant>b<user>c", "<user>a<assistant>(hm)b<user>c"]
    assert [(loss.what, loss.count) for loss in report.lost] == [
        ("branches that the template writes otherwise when it is asked for the whole", 1)
    ]


def test_a_template_that_refuses_ends_the_import_or_is_counted(tmp_path: Path) -> None:
    """But for a system message, which some write only with what follows it: that gets the tokens of both."""

    def strict(messages: Sequence[Any], tools: Sequence[Any]) -> list[int]:
        if not any(message["role"] == "user" for message in messages):
            raise ValueError("no user")
        return [ord(letter) for message in messages for letter in message["content"]]

    store = SessionStore.in_memory()
    rows = [[{"role": "system", "content": "S"}, {"role": "user", "content": "U"}], [{"role": "assistant", "content": "A"}]]
    path = jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(InterchangeError, match=r"line 2.*the template cannot write it: .* 1 messages: ValueError: no user"):
        import_file(store, path, "openai", template=strict)
    assert store.sessions() == ("a-1",)
    system, user = store.get("a-1").heads["main"].path()[1:]
    assert (system.token_ids.tolist(), user.token_ids.tolist()) == ([], [ord("S"), ord("U")])
    assert import_file(store, path, "openai", template=strict, salvage=True).faults[0].count == 1
    assert message_of(store.get("a-2").heads["main"]) == {"role": "assistant", "content": "A"}


def test_a_template_that_takes_back_what_it_wrote_is_refused(tmp_path: Path) -> None:
    """But for thoughts: tokens of a turn cannot change once another follows it."""

    def forgetful(messages: Sequence[Any], tools: Sequence[Any]) -> list[int]:
        return [ord(letter) for at, message in enumerate(messages) for letter in message["content"][at + 1 == len(messages) :]]

    rows = [[{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]]
    with pytest.raises(InterchangeError, match="the template writes token 0 otherwise once 'assistant' has spoken"):
        import_file(SessionStore.in_memory(), jsonl(tmp_path / "a.jsonl", rows), "openai", template=forgetful)


def test_pictures_without_a_place_are_refused_by_name(file: Path) -> None:
    message = {"role": "user", "content": [{"type": "image", "image": 0}]}
    with pytest.raises(InterchangeError, match="a picture has no tokens"):
        import_file(SessionStore.in_memory(), file, of_turns(Turn(message=message, images=(picture(b"P"),))), template=chatml)


def test_tokens_that_a_file_has_are_never_made_again(file: Path) -> None:
    turns = (
        Turn(message={"role": "user", "content": "x"}, token_ids=[5, 6]),
        Turn(
            message={"role": "assistant", "content": "y"},
            token_ids=[7, 8, 9],
            generated=True,
            finish_reason="error",
            annotations={"logprobs": np.array([-1.0, -2.0, -3.0], np.float32), "reward": 1.0},
        ),
    )
    store = SessionStore.in_memory()
    import_file(store, file, of_turns(*turns), template=chatml)
    session = store.get("talk")
    reply = session.heads["main"]
    assert reply.input_ids().tolist() == [5, 6, 7, 8, 9]
    assert (reply.origin, reply.finish_reason, reply.metadata["finish_reason"]) == ("generated", "interrupted", "error")
    assert session.token_values(reply, "logprobs", 2, 5).values.tolist() == [-1.0, -2.0, -3.0]
    assert session.annotation(reply, "reward") == 1.0


# --- what a session was never imported of ---------------------------------------------------------------------------------------


def test_turns_that_have_tokens_alone_need_a_decoder(tmp_path: Path) -> None:
    store = SessionStore.in_memory()
    session = store.create("a", scheme="text@hf5")
    with session.draft(session.append(session.root, [104, 105], role="user")) as draft:
        draft.extend([111, 107])
        draft.commit("stop")
    report = export_file(store, tmp_path / "a.jsonl", "openai")
    assert {loss.what: loss.count for loss in report.lost} == {
        "the words of turns that have tokens alone: no tokenizer was given": 2,
        "token ids": 2,
        "why turns ended": 1,
    }
    export_file(store, tmp_path / "b.jsonl", "openai", decode=lambda ids: "".join(map(chr, ids)))
    (line,) = (tmp_path / "b.jsonl").read_text().splitlines()
    assert json.loads(line) == {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]}


def test_equal_keys_under_other_parents_are_turns_of_their_own(tmp_path: Path) -> None:
    store = SessionStore.in_memory()
    session = store.create("a", scheme="text@hf5")
    parents = [session.append(session.root, [token], key=str(token)) for token in (1, 2)]
    parents += [session.append(node, [3], key="question") for node in parents]
    turns: list[Turn] = []

    def write(found: Any, path: Path, losses: Losses) -> None:
        for conversation in found:
            turns.extend(conversation.turns)
        path.write_text("")

    export_file(store, tmp_path / "out.x", Format("x", "", ".x", None, write), decode=lambda ids: "")
    assert len({turn.id for turn in turns}) == 4
    assert [turn.parent for turn in turns] == [None, None, "1", "2"]


def test_messages_go_on_behind_any_node_and_only_a_branch_is_written(tmp_path: Path) -> None:
    store = SessionStore.in_memory()
    import_file(store, jsonl(tmp_path / "a.jsonl", conversations(1, 6)), "openai")
    session = store.get("a-1")
    third = session.heads["main"].ancestor(3)
    more = [{"role": "user", "content": "other"}, {"role": "assistant", "content": "way"}]
    tip = append_messages(store, session, third, more)
    assert tip == append_messages(store, session, third.id, more), "once"
    export_file(store, tmp_path / "all.jsonl", "openai")
    assert len((tmp_path / "all.jsonl").read_text().splitlines()) == 2
    export_file(store, tmp_path / "one.jsonl", "openai", at=("a-1", tip))
    (line,) = (tmp_path / "one.jsonl").read_text().splitlines()
    assert json.loads(line)["messages"][3:] == more
    with pytest.raises(InterchangeError, match=r"messages\[0\]: a message is to be a mapping: it is text"):
        append_messages(store, session, tip, ["hello"])  # type: ignore[list-item]


# --- files and formats ----------------------------------------------------------------------------------------------------------


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    def write(found: Any, path: Path, losses: Losses) -> None:
        path.write_text("half")
        raise OSError("the disk is full")

    store = SessionStore.in_memory()
    store.create("a", scheme="text@hf5")
    with pytest.raises(OSError, match="full"):
        export_file(store, tmp_path / "out.x", Format("x", "", ".x", None, write))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out.x").write_text("mine")
    with pytest.raises(Unsupported, match="there already"):
        export_file(store, tmp_path / "out.x", "openai")
    export_file(store, tmp_path / "out.x", "openai", overwrite=True)
    assert json.loads((tmp_path / "out.x").read_text()) == {"messages": []}


def test_formats_that_hold_one_conversation_make_a_folder_and_read_one(tmp_path: Path) -> None:
    def read(file: SourceFile, losses: Losses) -> Iterator[Conversation]:
        yield Conversation(id=file.path.read_text(), turns=[said("a", None)])

    def write(found: Any, path: Path, losses: Losses) -> None:
        (conversation,) = found
        list(conversation.turns)
        path.write_text(conversation.id)

    form = Format("one", "", ".one", read, write, single=True)
    store, other = SessionStore.in_memory(), SessionStore.in_memory()
    for name in ("x/..", "y", "z"):
        append_messages(store, (session := store.create(name, scheme="text@hf5")), session.root, [{"role": "user", "content": "a"}])
    report = export_file(store, tmp_path / "out", form)
    assert sorted(os.listdir(tmp_path / "out")) == ["x%2F...one", "y.one", "z.one"] and len(report.files) == 3
    assert import_file(other, tmp_path / "out", form).session_ids == ("x/..", "y", "z")
    assert import_file(other, tmp_path / "out", form).known == 3, "their files are as they were"


def test_no_two_sessions_are_written_to_one_file(tmp_path: Path) -> None:
    """Also where their names are long, and alike for long, in letters that are three each in the name of a file."""
    store = SessionStore.in_memory()
    names = [f"{'北京旅行计划' * 9}{number}" for number in range(3)]
    for name in names:
        session = store.create(name, scheme="text@hf5")
        append_messages(store, session, session.root, [{"role": "user", "content": name}])
    report = export_file(store, tmp_path / "out", "pi")
    assert len(set(report.files)) == 3 and {Path(each).name for each in report.files} == set(os.listdir(tmp_path / "out"))
    other = SessionStore.in_memory()
    import_file(other, tmp_path / "out", "pi")
    assert sorted(other.sessions()) == names


def test_files_of_a_folder_do_not_share_names(tmp_path: Path) -> None:
    for name in ("a/train.jsonl", "b/train.jsonl", "chat.2024.jsonl", "chat.2025.jsonl"):
        (tmp_path / "all" / name).parent.mkdir(parents=True, exist_ok=True)
        jsonl(tmp_path / "all" / name, [{"messages": [{"role": "user", "content": name}]}])
    store = SessionStore.in_memory()
    report = import_file(store, tmp_path / "all", "openai")
    assert report.session_ids == ("a/train-1", "b/train-1", "chat.2024-1", "chat.2025-1") and report.added == 4


def test_names_of_formats(tmp_path: Path) -> None:
    assert {"openai", "chatgpt", "pi", "claude-code", "verifiers", "atif", "sharegpt", "langgraph", "sglang"} <= set(formats())
    with pytest.raises(UnknownFormat, match="no format is called 'nope'; there are atif, chatgpt"):
        format_named("nope")
    with pytest.raises(UnknownFormat, match="is written, not read"):
        import_file(SessionStore.in_memory(), tmp_path, Format("x", "", ".x", None, lambda *_: None))
    with pytest.raises(InterchangeError, match="there is no file"):
        import_file(SessionStore.in_memory(), tmp_path / "nothing", "openai")
    with pytest.raises(InterchangeError, match=r"no file in .* ends in \.jsonl"):
        import_file(SessionStore.in_memory(), tmp_path, "openai")


def test_a_package_adds_a_format(tmp_path: Path) -> None:
    """An installed distribution, as an importer finds it: two files of metadata, and a module."""
    (tmp_path / "shouting.py").write_text(
        "from sessiontree.interchange import Conversation, Format, Turn\n"
        "def read(file, losses):\n"
        "    lines = file.path.read_text().splitlines()\n"
        "    yield Conversation(id=file.stem, turns=(Turn(message={'role': 'user', 'content': line}) for line in lines))\n"
        "FORMAT = Format('shouting', 'lines', '.txt', read)\n"
    )
    found = tmp_path / "shouting-1.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: shouting\nVersion: 1\n")
    (found / "entry_points.txt").write_text("[sessiontree.formats]\nshouting = shouting:FORMAT\n")
    (tmp_path / "talk.txt").write_text("A\nB\n")
    command = [sys.executable, "-m", "sessiontree", "import", "store", "talk.txt", "--format", "shouting", "--json"]
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["new_nodes"] == 2


def test_lines_that_are_no_json_name_their_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"messages": []}\r\n\r\n[]\r\n{"messages": [')
    with pytest.raises(InterchangeError, match=r"a\.jsonl, line 4: no JSON"):
        import_file(SessionStore.in_memory(), path, "openai")
    store = SessionStore.in_memory()
    report = import_file(store, path, "openai", salvage=True)
    assert store.sessions() == ("a-1", "a-3") and [loss.first for loss in report.faults] == ["line 4"]
    path.write_text("[" * 100_000)
    with pytest.raises(InterchangeError, match="line 1: no JSON"):
        import_file(SessionStore.in_memory(), path, "openai")
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 1000)
    with pytest.raises(LimitExceeded, match="line 1: longer than 1000 bytes"):
        import_file(SessionStore.in_memory(), path, "openai")


# --- the command line -----------------------------------------------------------------------------------------------------------


def test_a_file_goes_in_and_a_branch_comes_out_on_the_command_line(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "talk.jsonl", conversations(2, 6))
    store = tmp_path / "chats"
    report = json_of("import", store, path, "--format", "openai")
    assert (report["added"], report["new_nodes"], report["session_ids"]) == (2, 12, ["talk-1", "talk-2"])
    assert "known" in text_of("import", store, path, "--format", "openai")
    assert "'0 5'" in text_of("log", store, "talk-1")
    third = json_of("log", store, "talk-1")["nodes"][-5]["id"]
    assert "goes on from talk-1" in text_of("fork", store, f"talk-1/{third}", "other")
    out = tmp_path / "branch.jsonl"
    assert "written to" in text_of("export", store, out, "other", "--format", "openai")
    (line,) = out.read_text().splitlines()
    assert [message["content"] for message in json.loads(line)["messages"]] == ["0 0", "0 1", "0 2", "0 3"]
    assert run("export", store, out, "--format", "openai").exit_code == 2
    assert json_of("export", store, out, "--format", "openai", "--force")["sessions"] == 3
    assert run("export", store, tmp_path / "x", "--format", "nope").exit_code == 2


def test_the_inside_of_a_store_and_stdout_are_left_alone(tmp_path: Path) -> None:
    chats = str(tmp_path / "chats")
    assert run("import", chats, str(jsonl(tmp_path / "x.jsonl", conversations(1))), "--format", "openai").exit_code == 0
    before = sorted(tmp_path.rglob("*"))
    for target, said_of in (
        (f"{chats}/x.jsonl", "inside of a store"),
        (f"{chats}/segments/x", "inside of a store"),
        ("-", "stdout"),
    ):
        refused = run("export", chats, target, "--format", "openai")
        assert refused.exit_code == 2 and said_of in refused.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_what_cannot_be_read_is_named_on_the_command_line(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "talk.jsonl", [*conversations(1), {"messages": 7}])
    failed = run("import", tmp_path / "chats", path, "--format", "openai")
    assert failed.exit_code == 5
    assert "talk.jsonl, line 2: messages is to be a list" in failed.stderr and "--salvage" in failed.stderr
    assert "not read: messages is to be a list" in text_of("import", tmp_path / "chats", path, "--format", "openai", "--salvage")


def test_messages_become_tokens_on_the_command_line(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "talk.jsonl", [[{"role": "user", "content": "hi <|im_end|>"}]])
    text_of("import", tmp_path / "chats", path, "--format", "openai", "--tokenizer", "qwen")
    with SessionStore.open(tmp_path / "chats") as store:
        ids = store.get("talk-1").heads["main"].input_ids().tolist()
    assert tokenizer().decode(ids) == "<|im_start|>user\nhi <|im_end|><|im_end|>\n"
    assert ids.count(151645) == 1, "what is said never ends the turn"


# --- as the documents have it ---------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parent.parent


def an_export(folder: Path) -> None:
    """A ChatGPT export of two conversations, four questions and answers each; one is the "Trip to Rome"."""
    store = SessionStore.in_memory()
    import_file(store, jsonl(folder / "said.jsonl", conversations(2, 8)), "openai")
    export_file(store, folder / "conversations.json", "chatgpt")
    trip, other = json.loads((folder / "conversations.json").read_text())
    names = {"id": "cbef4763-0000-4000-8000-000000000001", "conversation_id": "cbef4763-0000-4000-8000-000000000001"}
    made = [trip | names | {"title": "Trip to Rome"}, other | {"title": "Something else"}]
    (folder / "conversations.json").write_text(json.dumps(made))


def test_the_python_of_the_page_forks_at_the_third_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import a ChatGPT export, go on otherwise from its third answer, write that branch as chat messages."""
    an_export(tmp_path)
    monkeypatch.chdir(tmp_path)
    block, *_ = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "interchange.md").read_text(), re.DOTALL)
    exec(compile(block, "interchange.md", "exec"), {})
    (line,) = (tmp_path / "branch.jsonl").read_text().splitlines()
    contents = [message["content"] for message in json.loads(line)["messages"]]
    assert contents == ["0 0", "0 1", "0 2", "0 3", "0 4", "0 5", "And by train?"]


TITLES = ((1, "Bus/Train"), (2, "Bus"), (3, "What now?"), (4, "10 * 10 [sums]"))


def test_a_title_names_its_session_and_a_key_its_node(tmp_path: Path) -> None:
    an_export(tmp_path)
    chats = str(tmp_path / "chats")
    name = "cbef4763-0000-4000-8000-000000000001"
    assert run("import", chats, str(tmp_path / "conversations.json"), "--format", "chatgpt").exit_code == 0
    assert run("fork", chats, f"{name}/main", "another").exit_code == 0
    assert [each["title"] for each in json.loads(run("ls", chats, "--json").stdout)["sessions"]] == [
        "Trip to Rome",
        "Something else",
        None,  # a fork has the name that it was given
    ]
    assert "'Trip to Rome'" in run("ls", chats).stdout
    store = SessionStore.open(chats, read_only=True)
    third = [node for node in store.get(name).heads["main"].path() if node.role == "assistant"][2]
    for place in (f"Trip to Rome/{third.id.hex()[:8]}", f"Trip to Rome/{third.key}", f"{name}/{third.key}", f"Trip/{third.key}"):
        assert json.loads(run("show", chats, place, "--json").stdout)["id"] == third.id.hex()
    slashed = tmp_path / "slashed.json"
    made = json.loads((tmp_path / "conversations.json").read_text())
    slashed.write_text(json.dumps([made[0] | {"conversation_id": f"s{n}", "id": f"s{n}", "title": title} for n, title in TITLES]))
    assert run("import", chats, str(slashed), "--format", "chatgpt").exit_code == 0
    for number, title in TITLES:
        assert json.loads(run("log", chats, f"{title}/main", "--json").stdout)["session"] == f"s{number}"
        assert run("export", chats, str(tmp_path / f"{number}.jsonl"), title, "--format", "openai").exit_code == 0
    refused = run("log", chats, "Trip to Athens")
    assert (refused.exit_code, refused.stdout) == (2, "") and "Trip to Athens" in refused.stderr
    twice = tmp_path / "twice.json"
    made = json.loads((tmp_path / "conversations.json").read_text())
    twice.write_text(json.dumps([made[0] | {"conversation_id": "twin", "id": "twin"}]))
    assert run("import", chats, str(twice), "--format", "chatgpt").exit_code == 0
    refused = run("log", chats, "Trip to Rome")
    assert refused.exit_code == 2 and name in refused.stderr and "twin" in refused.stderr


def test_each_python_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates, masks, pictures, a format of one's own: as they stand, on files of such names."""
    monkeypatch.chdir(tmp_path)
    _, templates, masks, pictures, own = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "interchange.md").read_text(), re.DOTALL)
    fast = letters("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}")
    jsonl(tmp_path / "chats.jsonl", [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "answer"}]}])
    known: dict[str, Any] = vars(interchange) | {
        "tokenizer": fast,
        "np": np,
        "MediaItem": MediaItem,
        "media_identity": media_identity,
    }
    first, second = templates.splitlines()
    known |= {"store": SessionStore.in_memory()}
    exec(first, known)
    exec(second, known | {"store": SessionStore.in_memory(), "ids_of": lambda messages: chatml(messages, ())})
    known["session"] = session = known["store"].get("chats-1")
    exec(masks, known)
    tip = session.heads["main"]
    trained = session.token_values(tip, "loss_mask", tip.start, tip.stop).values
    assert "".join(map(chr, tip.token_ids[np.asarray(trained)])) == "answer<|im_end|>"

    data = b"\x89PNG and so on"
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    content = [{"type": "text", "text": "q"}, {"type": "image_url", "image_url": {"url": url}}]
    jsonl(tmp_path / "chats.jsonl", [{"messages": [{"role": "user", "content": content}]}])

    def with_pictures(messages: list[Any], tools: Any) -> list[int]:
        return [151655 if part["type"] == "image" else 1 for message in messages for part in message["content"]]

    known |= {"store": SessionStore.in_memory(), "tokenizer": with_pictures, "rule": QWEN2_VL}
    exec(pictures, known)
    (item,) = known["store"].get("chats-1").heads["main"].media
    assert item.spans == ((1, 2),) and bytes(known["store"].get_features(item)["file"]) == data

    exec(own, known)
    jsonl(tmp_path / "x.jsonl", [{"title": "t", "said": ["one", "two"]}])
    store = SessionStore.in_memory()
    assert import_file(store, tmp_path / "x.jsonl", known["FORMAT"]).turns == 2
    export_file(store, tmp_path / "y.jsonl", known["FORMAT"])
    assert json.loads((tmp_path / "y.jsonl").read_text()) == {"title": "t", "said": ["one", "two"]}
    jsonl(tmp_path / "z.jsonl", [{"said": 1}])
    with pytest.raises(InterchangeError, match="line 1: no list of what was said"):
        import_file(store, tmp_path / "z.jsonl", known["FORMAT"])


@pytest.mark.parametrize("page", ["README.md", "docs/interchange.md"])
def test_the_commands_of_the_page_do_what_it_says(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    an_export(tmp_path)
    monkeypatch.chdir(tmp_path)
    (block,) = [each for each in re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(), re.DOTALL) if "chatgpt" in each]
    third = ""
    for line in block.splitlines():
        command = [each.replace("3f2a", third) for each in shlex.split(line, comments=True)[1:]]
        done = run(*command)
        assert done.exit_code == 0, (line, done.stderr)
        if command[0] == "log":
            third = done.stdout.splitlines()[2].split()[1]
    (line,) = (tmp_path / "branch.jsonl").read_text().splitlines()
    assert [message["content"] for message in json.loads(line)["messages"]] == ["0 0", "0 1", "0 2", "0 3", "0 4", "0 5"]


# --- and between all formats ----------------------------------------------------------------------------------------------------

GOLDEN = ROOT / "tests" / "golden" / "interchange"
SOURCES = {
    "chatgpt": "chatgpt",
    "claude-code": "claude_code/kinds.jsonl",
    "langgraph": "langgraph/threads.sqlite",
    "openai": "openai/agents.jsonl",
    "pi": "pi/1.6.0/everything.jsonl",
    "sglang": "sglang/dump.pkl",
    "sharegpt": "sharegpt/others.jsonl",
    "verifiers": "verifiers/traces-0.4.0.jsonl",
    "atif": "atif/trajectory-1.8.json",
}


def all_of(store: SessionStore) -> dict[str, Any]:
    """What an import made of each session, but for the marks of its file."""
    found = {}
    for name in sorted(store.sessions()):
        session = store.get(name)
        nodes = [(node.id, dict(node.metadata), session.annotations(node)) for node in session.descendants(session.root)]
        heads = {head: node.id for head, node in session.heads.items()}
        found[name] = repr((sorted(nodes, key=lambda node: node[0]), sorted(heads.items())))
    return found


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_what_goes_out_in_its_own_format_and_in_again_is_the_same(name: str, tmp_path: Path) -> None:
    """On disk: the same sessions, ids, metadata, annotations and heads."""
    form = format_named(name)
    with SessionStore.open(tmp_path / "one") as one, SessionStore.open(tmp_path / "two") as two:
        import_file(one, GOLDEN / SOURCES[name], form)
        out = tmp_path / f"out{'.zip' if name == 'chatgpt' else Path(SOURCES[name]).suffix}"
        lost = export_file(one, out, form).lost
        if name == "sharegpt":  # which names pictures: they are files beside it
            assert {loss.what for loss in lost} == {"pictures that are files: named, not written"}
            shutil.copytree(GOLDEN / "sharegpt" / "pictures", tmp_path / "pictures")
        else:
            assert not lost
        import_file(two, out, form)
        stem = Path(SOURCES[name]).stem  # what has no name of its own is called by its file
        assert all_of(two) == {key.replace(stem, "out"): value for key, value in all_of(one).items()}


@pytest.mark.parametrize("name", sorted(SOURCES))
@pytest.mark.parametrize("target", sorted(SOURCES))
def test_every_format_is_written_as_every_other(name: str, target: str, tmp_path: Path) -> None:
    """What comes of that is read again without a fault, and says what it said: no words are lost but those that are counted."""
    store, other = SessionStore.in_memory(), SessionStore.in_memory()
    import_file(store, GOLDEN / SOURCES[name], name)
    form = format_named(target)
    for number, session_id in enumerate(store.sessions()):
        session = store.get(session_id)
        if len(session.tree) == 1:
            continue
        out = tmp_path / f"{number}{form.suffix}"
        exported = export_file(store, out, form, [session_id])
        report = import_file(other, out, form, prefix=f"{number}/")
        assert not report.faults
        path = session.heads["main"].path()
        if any(loss.what.startswith("messages of the system are remarks") for loss in exported.lost):
            path = tuple(node for node in path if node.role not in ("system", "developer"))
        said = {text_of_message(node) for node in path} - {""}
        came = "\n".join(text_of_message(node) for each in report.session_ids for node in walk(other.get(each)))
        assert all(text in came for text in said if target != "sharegpt" or text.strip() in came)


#: Formats whose files say what each turn is called, so that turns of others keep their names too.
NAMES_TURNS = ("chatgpt", "claude-code", "pi")


def forked(store: SessionStore, where: float) -> None:
    """A fork of each session, somewhere on its longest path, that goes on otherwise; and so does what it was forked from."""
    for name in store.sessions():
        session = store.get(name)
        path = max(session.leaves(), key=lambda leaf: leaf.depth).path()
        if len(path) < 3:
            continue
        at = path[int(where * len(path))]
        fork = store.fork(session, at, f"fork of {name}")
        messages = [{"role": "user", "content": "And by train?"}, {"role": "assistant", "content": "It is slower."}]
        fork.set_head("main", append_messages(store, fork, fork.node(at.id), messages))
        append_messages(store, session, at, [{"role": "user", "content": "And by sea?"}])


@pytest.mark.parametrize("where", [0.3, 0.6, 0.99])
@pytest.mark.parametrize("name", sorted(SOURCES))
def test_forks_are_conversations_of_their_own(name: str, where: float, tmp_path: Path) -> None:
    """No two of a file have one name; read again, beside what they were forked from, none changes the other."""
    form, store, other = format_named(name), SessionStore.in_memory(), SessionStore.in_memory()
    import_file(store, GOLDEN / SOURCES[name], form)
    forked(store, where)
    out = tmp_path / f"out{'.zip' if name == 'chatgpt' else Path(SOURCES[name]).suffix}"
    export_file(store, out, form)
    if name == "sharegpt":
        shutil.copytree(GOLDEN / "sharegpt" / "pictures", tmp_path / "pictures")
    assert not import_file(other, out, form).faults
    forks = [each for each in store.sessions() if each.startswith("fork of")]
    assert forks
    for each in forks:
        tip = store.get(each).heads["main"]
        if name in NAMES_TURNS:
            for one in (each, each.removeprefix("fork of ")):
                assert {node.id for node in walk(store.get(one))} <= {node.id for node in walk(other.get(one))}
            assert other.get(each).heads["main"].id == tip.id
        if name not in ("openai", "sglang"):  # where what is new has another name
            came = other.get(each).heads["main"].path()
            assert [text for node in came if (text := text_of_message(node).strip())] == [
                text for node in tip.path() if (text := text_of_message(node).strip())
            ]
    everything = "\n".join(text_of_message(node) for each in other.sessions() for node in walk(other.get(each)))
    assert everything.count("And by train?") >= len(forks) and everything.count("And by sea?") >= len(forks)
    before = {each: store.get(each).heads["main"].id for each in forks}
    if name == "atif":  # the fork's last prompt is said no more, so a turn of it has other ids
        return
    report = import_file(store, out, form)
    assert not report.faults and {each: store.get(each).heads["main"].id for each in forks} == before
    if name in NAMES_TURNS:
        assert report.added == 0 and report.heads_kept == 0


def walk(session: Any) -> Any:
    return session.descendants(session.root)


def text_of_message(node: Any) -> str:
    return said_text(message_of(node))
