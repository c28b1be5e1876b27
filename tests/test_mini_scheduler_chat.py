"""The mini scheduler's front, from messages to nodes: templates, replies that are known token for token, thoughts that go."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Environment
from mini_scheduler import schemas
from mini_scheduler.chat import Said, from_items, from_messages, num_placeholders, render, uploads_of, without_thought
from mini_scheduler.history import append_turns, continue_chat, continue_response, continue_tokens
from mini_scheduler.responses import input_items, instruction_ids
from mini_scheduler.text import IM_END, IM_START, decode, encode
from qwen_reference import IMAGE_PAD, VISION_END, VISION_START, tokenizer

from sessiontree import LimitExceeded, MediaItem, Node, Session, SessionStore
from sessiontree.positions import scheme

RULE = scheme("qwen2_5_vl@hf5", image_token_id=IMAGE_PAD, vision_start_token_id=VISION_START, spatial_merge_size=2)
#: What Qwen's templates come to for these messages, tools and thoughts of the last turn left out, said in their own language.
TEMPLATE = (
    Environment()
    .from_string(
        "{%- for m in messages %}"
        "{%- if m.role == 'tool' %}"
        "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
        "{{- '\\n<tool_response>\\n' + m.text + '\\n</tool_response>' }}"
        "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
        "{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.text + '<|im_end|>\\n' }}{% endif %}"
        "{%- endfor %}{{ '<|im_start|>assistant\\n' }}"
    )
    .render
)
Message = tuple[str, str]


def session(max_tokens: int = 4096) -> Session:
    return SessionStore.in_memory().create("chat", scheme=RULE, max_tokens=max_tokens)


def said(*messages: Message) -> list[Said]:
    return [Said(role, (text,)) for role, text in messages]  # type: ignore[arg-type]


def ask(tree: Session, *messages: Message) -> Node:
    return continue_chat(tree, render(said(*messages)))


def answer(tree: Session, prompt: Node, token_ids: Sequence[int], text: str | None = None, key: str = "one") -> Node:
    """A reply as the engine commits one."""
    draft = tree.draft(prompt, key=key, metadata={"text": decode(token_ids) if text is None else text})
    draft.extend(token_ids)
    return draft.commit("stop" if token_ids and token_ids[-1] == IM_END else "length")


def spelled(node: Node) -> str:
    text: str = tokenizer().decode(node.input_ids().tolist())
    return text


def drifting(text: str) -> list[int]:
    """Tokens of a text that no tokenizer would cut it into."""
    return [token for letter in text for token in encode(letter)]


# --- the template ---------------------------------------------------------------------------------------------------------
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(["", "\n", "<|im_end|>", " a\n\nb "])
conversations = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), texts), min_size=1, max_size=8)


@given(conversations)
def test_a_conversation_is_what_the_template_makes_of_it(messages: list[Message]) -> None:
    expected = TEMPLATE(messages=[{"role": role, "text": text} for role, text in messages])
    assert spelled(ask(session(), *messages)) == expected


@given(conversations)
def test_only_the_template_makes_control_tokens(messages: list[Message]) -> None:
    ids = ask(session(), *messages).input_ids().tolist()
    merged = sum(a == b == "tool" for (a, _), (b, _) in itertools.pairwise(messages))
    assert (ids.count(IM_START), ids.count(IM_END)) == (len(messages) - merged + 1, len(messages) - merged)


@given(conversations)
def test_asking_again_appends_nothing(messages: list[Message]) -> None:
    tree = session()
    first = ask(tree, *messages)
    count = len(tree.tree)
    assert ask(tree, *messages) == first
    assert len(tree.tree) == count


def test_pictures_stand_where_they_were_shown() -> None:
    red, blue = (MediaItem("image", bytes([n]) * 32, [(0, 1)], grid_thw=(1, 4, 2 * n)) for n in (1, 2))
    messages = [Said("user", ("see ", red, " and ", blue)), Said("assistant", ("both",)), Said("user", (red,))]
    node = continue_chat(session(), render(messages))
    ids = node.input_ids().tolist()
    spans = node.media_spans()
    assert [item.identity for item, _, _ in spans] == [red.identity, blue.identity, red.identity]
    for item, start, stop in spans:
        assert stop - start == num_placeholders(item) == ids[start:stop].count(IMAGE_PAD)
        assert (ids[start - 1], ids[stop]) == (VISION_START, VISION_END)
    assert ids.count(IMAGE_PAD) == sum(stop - start for _, start, stop in spans)
    assert decode(ids[: spans[0][1]]) == "user\nsee " and decode(ids[spans[0][2] : spans[1][1]]) == " and "


# --- replies that are known ------------------------------------------------------------------------------------------------
def test_a_reply_is_taken_as_it_was_generated() -> None:
    tree = session()
    prompt = ask(tree, ("user", "hi"))
    ids = drifting("Hello there")
    assert ids != encode("Hello there")
    reply = answer(tree, prompt, ids)
    after = ask(tree, ("user", "hi"), ("assistant", "Hello there"), ("user", "more"))
    assert after.path()[-2] == reply
    assert after.input_ids(prompt.stop, reply.stop).tolist() == ids


@given(st.booleans(), st.sampled_from(["", "x", "Hello there"]))
def test_a_reply_is_closed_once_however_it_ended(stopped: bool, text: str) -> None:
    tree = session()
    prompt = ask(tree, ("user", "hi"))
    reply = answer(tree, prompt, [*drifting(text), *([IM_END] if stopped else [])])
    after = ask(tree, ("user", "hi"), ("assistant", text), ("user", "more"))
    assert after.path()[-2] == reply
    assert spelled(after) == TEMPLATE(
        messages=[{"role": "user", "text": "hi"}, {"role": "assistant", "text": text}, {"role": "user", "text": "more"}]
    )


def test_a_reply_is_known_only_where_it_was_generated() -> None:
    tree = session()
    answer(tree, ask(tree, ("user", "hi")), drifting("Hello there"))
    elsewhere = ask(tree, ("user", "ho"), ("assistant", "Hello there"), ("user", "more"))
    assert [node.origin for node in elsewhere.path()[1:]] == ["input"] * 3
    other_words = ask(tree, ("user", "hi"), ("assistant", "Hello!"), ("user", "more"))
    assert [node.origin for node in other_words.path()[1:]] == ["input"] * 3


@pytest.mark.parametrize("seen", ["A PyOb", "A Py", "A", "", "A PyObject"])
def test_what_a_stop_string_cut_off_inside_a_token_was_never_said(seen: str) -> None:
    """What is history is what the client saw: tokens as they were generated as far as they go, then the rest of its text."""
    tree = session()
    prompt = ask(tree, ("user", "What is it?"))
    ids = [*encode("A"), *encode(" PyObject")]
    reply = answer(tree, prompt, ids, text=seen)
    onward = ask(tree, ("user", "What is it?"), ("assistant", seen), ("user", "Go on."))
    before, after = "<|im_start|>assistant\n", "<|im_end|>\n<|im_start|>user\nGo on."
    assert f"{before}{seen}{after}" in spelled(onward)
    shared = len(ids) if seen == "A PyObject" else 1 if seen else 0
    assert onward.input_ids(prompt.stop, prompt.stop + shared).tolist() == ids[:shared]
    assert (reply in onward.path()) == (seen == "A PyObject")
    count = len(tree.tree)
    assert ask(tree, ("user", "What is it?"), ("assistant", seen), ("user", "Go on.")) == onward and len(tree.tree) == count


def test_replies_of_a_whole_conversation_are_known() -> None:
    tree, messages, replies = session(), list[Message](), list[Node]()
    for number in range(6):
        messages.append(("user", f"question {number}"))
        replies.append(answer(tree, ask(tree, *messages), [*drifting(f"answer {number}"), IM_END]))
        messages.append(("assistant", f"answer {number}"))
    path = ask(tree, *messages, ("user", "end")).path()
    assert [node for node in path if node.origin == "generated"] == replies


# --- thoughts ---------------------------------------------------------------------------------------------------------------
THOUGHT = "<think>\nlet me see\n</think>\n\n"


@pytest.mark.parametrize("cut", [drifting, encode], ids=["tokens can be cut", "tokens as usual"])
@pytest.mark.parametrize("end", [[IM_END], []], ids=["stopped", "cut off"])
def test_thoughts_go_once_the_user_speaks_again(cut: Any, end: list[int]) -> None:
    tree = session()
    prompt = ask(tree, ("system", "be"), ("user", "hi"))
    reply = answer(tree, prompt, [*cut(THOUGHT + "Hello there"), *end], THOUGHT + "Hello there")
    history = [("system", "be"), ("user", "hi"), ("assistant", THOUGHT + "Hello there")]
    kept = ask(tree, *history, ("tool", "42"))
    assert kept.path()[-2] == reply, "the user has not spoken"
    after = ask(tree, *history, ("user", "more"))
    assert spelled(after) == TEMPLATE(
        messages=[
            {"role": role, "text": text}
            for role, text in (("system", "be"), ("user", "hi"), ("assistant", "Hello there"), ("user", "more"))
        ]
    )
    shown = after.path()[-2]
    assert shown.parent == prompt
    assert shown.token_ids.tolist() == [*cut("Hello there"), *end]
    assert shown.links[0].node_id == reply.id
    count = len(tree.tree)
    assert ask(tree, *history, ("user", "more")) == after and len(tree.tree) == count


def test_thoughts_between_tools_go_with_the_question() -> None:
    """The second reply was generated while the first one's thoughts were shown, so that is where it is found."""
    tree, messages = session(), [("user", "hi")]
    for number in range(3):
        text = f"<think>{number}</think>step {number}"
        answer(tree, ask(tree, *messages), drifting(text), text)
        messages += [("assistant", text), ("tool", f"result {number}")]
    after = ask(tree, *messages, ("user", "so?"))
    assert spelled(after) == TEMPLATE(
        messages=[{"role": role, "text": without_thought(text)} for role, text in (*messages, ("user", "so?"))]
    )
    for node in after.path():
        if node.role == "assistant":
            assert node.token_ids.tolist() == drifting(decode(node.token_ids.tolist()))


def test_of_a_reply_that_was_all_thought_nothing_is_shown() -> None:
    tree = session()
    answer(tree, ask(tree, ("user", "hi")), encode("<think>x</think>"))
    after = ask(tree, ("user", "hi"), ("assistant", "<think>x</think>"), ("user", "more"))
    messages = [("user", "hi"), ("assistant", ""), ("user", "more")]
    assert spelled(after) == TEMPLATE(messages=[{"role": role, "text": text} for role, text in messages])


def test_thoughts_that_nobody_generated_go_too() -> None:
    tree = session()
    after = ask(tree, ("user", "hi"), ("assistant", THOUGHT + "Hello"), ("user", "more"))
    messages = [("user", "hi"), ("assistant", "Hello"), ("user", "more")]
    assert spelled(after) == TEMPLATE(messages=[{"role": role, "text": text} for role, text in messages])


# --- prompts as tokens --------------------------------------------------------------------------------------------------------
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), min_size=1, max_size=8))
def test_a_prompt_of_tokens_is_its_path_whatever_came_before(prompts: list[list[int]]) -> None:
    tree = session()
    for prompt in prompts:
        node = continue_tokens(tree, prompt, [])
        assert node.input_ids().tolist() == prompt
        count = len(tree.tree)
        assert continue_tokens(tree, prompt, []) == node and len(tree.tree) == count


def test_a_prompt_that_differs_inside_a_picture_shares_none_of_it() -> None:
    tree = session()
    for number in (1, 2):
        item = MediaItem("image", bytes([number]) * 32, [(2, 4)], grid_thw=(1, 4, 4))
        ids = [5, VISION_START, *[IMAGE_PAD] * 4, VISION_END, number]
        node = continue_tokens(tree, ids, [item])
        assert node.input_ids().tolist() == ids
        assert [(found.identity, start, stop) for found, start, stop in node.media_spans()] == [(item.identity, 2, 6)]


def test_a_prompt_that_is_too_long_leaves_nothing() -> None:
    tree = session(max_tokens=16)
    with pytest.raises(LimitExceeded):
        ask(tree, ("user", "one"), ("assistant", "two"), ("user", "three " * 16))
    with pytest.raises(LimitExceeded):
        continue_tokens(tree, range(17), [])
    with pytest.raises(LimitExceeded):
        continue_tokens(tree, range(12), [], room=5)
    assert len(tree.tree) == 1
    assert ask(tree, ("user", "one")).stop <= 16 == continue_tokens(tree, range(16), []).stop


# --- bodies -------------------------------------------------------------------------------------------------------------------
def chat_body(*messages: dict[str, Any]) -> schemas.ChatCompletion:
    return schemas.ChatCompletion.model_validate({"messages": list(messages)})


def items_of(*items: dict[str, Any]) -> list[schemas.InputItem]:
    return schemas.CreateResponse.model_validate({"input": list(items)}).input  # type: ignore[return-value]


def test_calls_of_tools_are_said_as_qwen_says_them() -> None:
    call = {"type": "function", "id": "c1", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    body = chat_body(
        {"role": "developer", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "what "}, {"type": "text", "text": "now"}]},
        {"role": "assistant", "content": "I look", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "c1", "content": "blue"},
    )
    spoken = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
    found = from_messages(body.messages, [])
    assert [each.role for each in found] == ["system", "user", "assistant", "tool"]
    assert [each.text for each in found] == ["be", "what now", f"I look\n{spoken}\n{spoken}", "blue"]
    assert json.loads(spoken.split("\n")[1]) == {"name": "look", "arguments": {"at": "sky"}}


def test_pictures_of_a_body_are_taken_in_order() -> None:
    def shown(name: str) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": name}}

    body = chat_body(
        {"role": "user", "content": [shown("a"), {"type": "text", "text": "x"}, shown("b")]},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": [shown("c")]},
    )
    items = [MediaItem("image", name.encode() * 32, [(0, 1)], grid_thw=(1, 2, 2)) for name in uploads_of(body)]
    parts = [part for each in from_messages(body.messages, items) for part in each.parts]
    assert parts == [items[0], "x", items[1], "y", items[2]]


def test_every_item_of_a_response_is_in_its_history() -> None:
    items = items_of(
        {"role": "user", "content": "a question"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a thought"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "an answer"}]},
        {"type": "function_call", "call_id": "c", "name": "a_call", "arguments": '{"x": "an argument"}'},
        {"type": "function_call_output", "call_id": "c", "output": "an output"},
        {"role": "user", "content": [{"type": "input_text", "text": "another"}]},
    )
    tree = session()
    text = spelled(continue_response(tree, None, [], instruction_ids("be kind"), render(from_items(items, []))))
    places = [
        text.index(each)
        for each in ("be kind", "a question", "a thought", "an answer", "a_call", "an argument", "an output", "another")
    ]
    assert places == sorted(places)
    assert text.count("<|im_start|>assistant") == 2, "what it thought, said and called is one message"
    assert [item["type"] for item in input_items(items, [])] == [item.type for item in items]


@given(st.sampled_from([None, "be kind", "be brief and kind"]), st.sampled_from([None, "be kind", "be very rude"]))
def test_other_instructions_change_nothing_else_of_the_path(first: str | None, second: str | None) -> None:
    tree = session()
    picture = MediaItem("image", bytes(32), [(0, 1)], grid_thw=(1, 4, 4))
    had, wanted = instruction_ids(first), instruction_ids(second)
    prompt = continue_response(tree, None, [], had, render([Said("user", ("look", picture))]))
    reply = answer(tree, prompt, drifting("Hello there"))
    more = render(said(("user", "more")), after_reply=True)
    after = continue_response(tree, reply, had, wanted, more)
    kept = reply.input_ids(len(had)).tolist()
    assert after.input_ids().tolist()[: len(wanted) + len(kept)] == [*wanted, *kept]
    assert after.input_ids(len(wanted) + len(kept)).tolist() == [IM_END, *encode("\n"), *more[0].token_ids]
    moved = len(wanted) - len(had)
    assert [span[1:] for span in after.media_spans()] == [(start + moved, stop + moved) for _, start, stop in reply.media_spans()]
    if first == second:
        assert after.parent == reply


def test_turns_behind_a_reply_close_it() -> None:
    tree = session()
    reply = answer(tree, ask(tree, ("user", "hi")), encode("Hello"))
    turns = render(said(("assistant", "and I call"), ("tool", "42")), after_reply=True)
    text = spelled(append_turns(tree, reply, turns))
    assert text.endswith(
        "assistant\nHello<|im_end|>\n<|im_start|>assistant\nand I call<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
