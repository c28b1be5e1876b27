"""Nothing is lost in silence: what a conversation says comes back from a file of each format, or the export has counted it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from sessiontree import MediaItem, SessionStore
from sessiontree.annotations import LOGPROBS, TokenValues
from sessiontree.interchange import Conversation, Format, Image, Turn, export_file, import_file, message_of
from sessiontree.interchange.conversations import parts_of, text_of
from sessiontree.interchange.formats import format_named
from sessiontree.interchange.words import ANNOTATION, facts_from
from sessiontree.node import Node
from sessiontree.positions import scheme

FORMATS = ("atif", "chatgpt", "claude-code", "langgraph", "openai", "pi", "sglang", "sharegpt", "verifiers")
QWEN2_VL = scheme("qwen2_vl@hf5", spatial_merge_size=2, image_token_id=7, video_token_id=8)
PNG = b"\x89PNG\r\n\x1a\n123"
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def talk(**rest: Any) -> Conversation:
    """Two questions and their answers."""
    turns = [
        Turn(id="q", parent=None, message={"role": "user", "content": "Where?"}),
        Turn(id="a", parent="q", message={"role": "assistant", "content": "There."}),
        Turn(id="p", parent="a", message={"role": "user", "content": "And then?"}),
        Turn(id="b", parent="p", message={"role": "assistant", "content": "Here."}),
    ]
    return Conversation(**{"id": "talk", "turns": turns} | rest)


def with_turn(turn_id: str, /, **change: Any) -> Conversation:
    return talk(turns=[attrs.evolve(each, **change) if each.id == turn_id else each for each in talk().turns])


def with_message(turn_id: str, /, **change: Any) -> Conversation:
    (turn,) = (each for each in talk().turns if each.id == turn_id)
    return with_turn(turn_id, message={**(turn.message or {}), **change})


def with_ids(names: str, **change: Any) -> Conversation:
    """Three token ids for each of some turns; ``change`` of the first answer."""
    turns = []
    for at, turn in enumerate(talk().turns):
        more = change if turn.id == "a" else {}
        ids = np.array([10, 20, 30], np.int32) + at
        turns.append(
            attrs.evolve(turn, token_ids=ids, generated=str(turn.id) in "ab", **more) if turn.id and turn.id in names else turn
        )
    return talk(turns=turns)


def with_call(**result: Any) -> Conversation:
    asked = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    told = {"role": "tool", "tool_call_id": "c1", "content": "42"} | result
    messages = {"a": asked, "p": told}
    return talk(turns=[attrs.evolve(each, message=messages.get(str(each.id), each.message)) for each in talk().turns])


def words_at(node: Node) -> str:
    """What was said last on its path."""
    return next(text for each in reversed(node.path()) if (text := text_of(message_of(each))))


class Found:
    """What a store says of the one conversation that it has, or of the branches of it that are conversations there."""

    def __init__(self, store: SessionStore) -> None:
        self.sessions = [store.get(each) for each in store.sessions()]
        self.facts = [facts_from(each.annotation(each.root, ANNOTATION)) for each in self.sessions]

    def nodes(self) -> Iterator[tuple[Any, Node]]:
        for session in self.sessions:
            for node in session.descendants(session.root):
                yield session, node

    def said(self, text: str) -> list[tuple[Any, Node]]:
        """The nodes that say so."""
        return [(session, node) for session, node in self.nodes() if text_of(message_of(node)).strip() == text]

    def of(self, text: str, what: Callable[[Any, Node], Any]) -> Any:
        """Of the first node that says so."""
        return next((what(*each) for each in self.said(text)), None)

    def fact(self, name: str) -> Any:
        return next((facts[name] for facts in self.facts if facts.get(name)), None)

    def message(self, text: str, name: str) -> Any:
        return self.of(text, lambda _, node: (message_of(node) or {}).get(name))

    def any_message(self, what: Callable[[Any], Any]) -> list[Any]:
        messages = [message_of(node) for _, node in self.nodes()]
        return [value for each in messages if each is not None and (value := what(each))]

    def ids(self) -> Any:
        session = self.sessions[-1]
        return session.heads["main"].input_ids().tolist()


def _parts(kind: str) -> Callable[[Found], Any]:
    return lambda found: found.any_message(lambda said: [dict(each) for each in parts_of(said) if each.get("type") == kind])[:1]


def _value(value: Any) -> Any:
    return [row.tolist() for _, row in value.stretches] if isinstance(value, TokenValues) else value


def _annotation(text: str, name: str) -> Callable[[Found], Any]:
    return lambda found: found.of(text, lambda session, node: _value(session.annotations(node).get(name)))


def _reason(found: Found) -> Any:
    """Why the first answer ended, where it says more than that it did."""
    reason = found.of("There.", lambda _, node: node.metadata.get("finish_reason") or node.finish_reason)
    return None if reason == "stop" else reason


def _time(text: str) -> Callable[[Found], Any]:
    return lambda found: found.of(text, lambda _, node: node.metadata.get("created_at"))


CASES: dict[str, tuple[Conversation, Callable[[Found], Any]]] = {
    "title": (talk(title="Trip"), lambda found: found.fact("title")),
    "time of the whole": (talk(created_at=1.7e9), lambda found: found.fact("created_at")),
    "tools": (talk(tools=(TOOL,)), lambda found: [each["function"]["name"] for each in found.fact("tools") or ()]),
    "another head": (talk(heads={"main": "b", "best": "a"}), lambda found: [sorted(each.heads) for each in found.sessions]),
    "main before the end": (
        talk(heads={"main": "a"}),
        lambda found: [words_at(each.heads["main"]) for each in found.sessions],
    ),
    "time of a question": (with_turn("q", created_at=1.7e9), _time("Where?")),
    "time of an answer": (with_turn("a", created_at=1.7e9), _time("There.")),
    "finish reason": (with_turn("a", finish_reason="length"), _reason),
    "derived from": (
        with_turn("b", derived_from=("q",)),
        lambda found: found.of("Here.", lambda _, node: len(node.metadata.get("derived_from", ()))),
    ),
    "no message": (with_turn("p", message=None, role="mark"), lambda found: "mark" in [node.role for _, node in found.nodes()]),
    "reward": (with_turn("a", annotations={"reward": 1.5}), _annotation("There.", "reward")),
    "annotation of a question": (with_turn("q", annotations={"quality": "good"}), _annotation("Where?", "quality")),
    "ids of all": (with_ids("qapb"), Found.ids),
    "ids of questions": (with_ids("qp"), Found.ids),
    "ids of answers": (with_ids("ab"), Found.ids),
    "ids of all but the last": (with_ids("qap"), Found.ids),
    "ids of one": (with_ids("q"), Found.ids),
    "ids in the middle": (with_ids("ap"), Found.ids),
    "a call that another branch answers": (
        talk(
            turns=[
                Turn(id="q", parent=None, message={"role": "user", "content": "Where?"}),
                Turn(id="a", parent="q", message={"role": "assistant", "content": None, "tool_calls": [CALL]}),
                Turn(id="p", parent="a", message={"role": "tool", "tool_call_id": "c1", "content": "42"}),
                Turn(id="b", parent="a", message={"role": "user", "content": "Never mind."}),
            ]
        ),
        lambda found: [len(found.sessions), *found.any_message(lambda said: bool(said.get("tool_calls")))],
    ),
    "where a picture stands": (
        with_turn(
            "q",
            token_ids=np.array([1, 7, 7, 7, 7, 2], np.int32),
            media=(MediaItem("image", b"i" * 32, [(1, 4)], grid_thw=(1, 4, 4)),),
        ),
        lambda found: found.of("Where?", lambda _, node: [item.spans for item in node.media]),
    ),
    "logprobs": (with_ids("qapb", annotations={LOGPROBS: np.array([-1.0, -2.0, -3.0])}), _annotation("There.", LOGPROBS)),
    "finish reason of tokens": (with_ids("qapb", finish_reason="length"), _reason),
    "name": (with_message("q", name="Ann"), lambda found: found.message("Where?", "name")),
    "reasoning": (
        with_message("a", reasoning_content="Hm."),
        lambda found: found.any_message(lambda said: said.get("reasoning_content")),
    ),
    "refusal": (with_message("a", content=None, refusal="No."), lambda found: found.any_message(lambda said: said.get("refusal"))),
    "role developer": (with_message("q", role="developer"), lambda found: found.message("Where?", "role")),
    "role function": (with_message("p", role="function", name="f"), lambda found: found.message("And then?", "role")),
    "role system in between": (with_message("p", role="system"), lambda found: found.message("And then?", "role")),
    "another role": (with_message("p", role="critic"), lambda found: found.message("And then?", "role")),
    "refusal as a part": (
        with_message("a", content=[{"type": "refusal", "refusal": "No."}]),
        lambda found: found.any_message(lambda said: "refusal" in str(said)),
    ),
    "reasoning by its other name": (
        with_message("a", reasoning="Hm."),
        lambda found: found.any_message(lambda said: said.get("reasoning_content") or said.get("reasoning")),
    ),
    "reasoning of a question": (
        with_message("q", reasoning_content="Hm."),
        lambda found: found.any_message(lambda said: said.get("reasoning_content")),
    ),
    "text as parts": (
        with_message("q", content=["Where", "?"]),
        lambda found: found.of("Where?", lambda _, node: len(list(parts_of(message_of(node) or {})))),
    ),
    "a number": (with_message("q", content=5), lambda found: found.any_message(lambda said: said.get("content") in (5, "5"))),
    "more of a call": (
        with_turn("a", message={"role": "assistant", "content": None, "tool_calls": [CALL | {"extra_content": {"x": 1}}]}),
        lambda found: found.any_message(lambda said: [True for call in said.get("tool_calls", ()) if "extra_content" in call]),
    ),
    "a call without an id": (
        with_turn(
            "a", message={"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL["function"]}]}
        ),
        lambda found: found.any_message(lambda said: [call.get("id") or None for call in said.get("tool_calls", ())] == [None]),
    ),
    "a custom tool": (
        with_turn(
            "a",
            message={
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "run", "input": "ls"}}],
            },
        ),
        lambda found: found.any_message(lambda said: [True for call in said.get("tool_calls", ()) if "ls" in str(call)]),
    ),
    "arguments too large": (
        with_turn(
            "a",
            message={
                "role": "assistant",
                "content": None,
                "tool_calls": [CALL | {"function": {"name": "f", "arguments": '{"a":1e400}'}}],
            },
        ),
        lambda found: found.any_message(lambda said: [True for call in said.get("tool_calls", ()) if "1e400" in str(call)]),
    ),
    "arguments that say a thing twice": (
        with_turn(
            "a",
            message={
                "role": "assistant",
                "content": None,
                "tool_calls": [CALL | {"function": {"name": "f", "arguments": '{"a":1,"a":2}'}}],
            },
        ),
        lambda found: found.any_message(lambda said: [call["function"]["arguments"] for call in said.get("tool_calls", ())]),
    ),
    "calls": (with_call(), lambda found: found.any_message(lambda said: said.get("tool_calls"))),
    "call of a result": (with_call(), lambda found: found.any_message(lambda said: said.get("tool_call_id"))),
    "arguments that are no JSON": (
        with_turn(
            "a",
            message={"role": "assistant", "content": None, "tool_calls": [CALL | {"function": {"name": "f", "arguments": "{"}}]},
        ),
        lambda found: found.any_message(lambda said: said.get("tool_calls")),
    ),
    "result without a call": (with_message("p", role="tool", tool_call_id="z"), lambda found: found.message("And then?", "role")),
    "several results": (
        with_turn(
            "p",
            message={"role": "tool", "content": [{"type": "tool_result", "tool_call_id": each, "content": each} for each in "xy"]},
        ),
        lambda found: sorted("xy".count(text) for _, node in found.nodes() for text in "xy" if text in str(message_of(node))),
    ),
    "function call": (
        with_message("a", content=None, function_call={"name": "f", "arguments": "{}"}),
        lambda found: found.any_message(lambda said: "function_call" in said or "tool_calls" in said),
    ),
    "picture": (
        with_turn(
            "q",
            images=(Image(PNG, "image/png"),),
            message={"role": "user", "content": [{"type": "text", "text": "Where?"}, {"type": "image", "image": 0}]},
        ),
        lambda found: found.of("Where?", lambda _, node: len(node.metadata.get("images", ()))),
    ),
    "picture by URL": (
        with_message(
            "q", content=[{"type": "text", "text": "Where?"}, {"type": "image_url", "image_url": {"url": "https://x.org/a"}}]
        ),
        _parts("image_url"),
    ),
    "audio": (
        with_message(
            "q",
            content=[{"type": "text", "text": "Where?"}, {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}}],
        ),
        _parts("input_audio"),
    ),
    "parts": (
        with_message("q", content=[{"type": "text", "text": "Whe"}, {"type": "text", "text": "re?"}]),
        lambda found: found.of("Where?", lambda _, node: len(list(parts_of(message_of(node) or {})))),
    ),
    "detail of a picture": (
        with_turn(
            "q",
            images=(Image(PNG, "image/png"),),
            message={
                "role": "user",
                "content": [{"type": "text", "text": "Where?"}, {"type": "image", "image": 0, "image_url": {"detail": "low"}}],
            },
        ),
        lambda found: found.any_message(lambda said: [True for part in parts_of(said) if "low" in str(part)])[:1],
    ),
    "picture of an answer": (
        with_turn(
            "b",
            images=(Image(PNG, "image/png"),),
            message={"role": "assistant", "content": [{"type": "text", "text": "Here."}, {"type": "image", "image": 0}]},
        ),
        lambda found: any(node.metadata.get("images") for _, node in found.nodes()),
    ),
    "another key": (with_message("q", weight=0), lambda found: found.message("Where?", "weight")),
    "a key of an answer": (with_message("a", weight=0), lambda found: found.message("There.", "weight")),
    "white space": (
        with_message("q", content=" Where? \n"),
        lambda found: found.of("Where?", lambda _, node: text_of(message_of(node))),
    ),
    "a lone surrogate": (with_message("q", content="a\ud800b"), lambda found: len(found.said("a\ud800b"))),
    "a zero byte": (with_message("q", content="a\x00b"), lambda found: len(found.said("a\x00b"))),
}


def through(conversation: Conversation, name: str, folder: Path) -> tuple[Found, Found, set[str]]:
    """A conversation as an import makes it, the same after a file of that format, and what either way is said to be lost."""
    (folder / "talk.x").touch()
    one, two = SessionStore.in_memory(), SessionStore.in_memory()
    import_file(one, folder / "talk.x", Format("mine", "", ".x", lambda file, losses: iter([conversation])), scheme=QWEN2_VL)
    form = format_named(name)
    out = folder / f"talk{'.zip' if name == 'chatgpt' else form.suffix}"
    written = export_file(one, out, form)
    read = import_file(two, out, form, scheme=QWEN2_VL)
    assert not read.faults
    return Found(one), Found(two), {loss.what for loss in (*written.lost, *read.lost)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", FORMATS)
def test_what_a_file_cannot_hold_is_counted(name: str, case: str, tmp_path: Path) -> None:
    conversation, what = CASES[case]
    (tmp_path / "plain").mkdir()
    _, _, usual = through(talk(), name, tmp_path / "plain")
    before, after, lost = through(conversation, name, tmp_path)
    if name == "sglang" and "role" in case:  # of which its prompts say nothing, in plain talk too
        assert any("who said what" in each for each in lost)
    elif not lost - usual:
        assert what(after) == what(before)


@pytest.mark.parametrize("case", CASES)
def test_each_case_says_what_plain_talk_does_not(case: str, tmp_path: Path) -> None:
    """So the test above can fail."""
    conversation, what = CASES[case]
    (tmp_path / "plain").mkdir()
    usual, _, _ = through(talk(), "openai", tmp_path / "plain")
    before, _, _ = through(conversation, "openai", tmp_path)
    assert what(before) != what(usual)
