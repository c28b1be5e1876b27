"""Rollouts of verifiers: files that 0.3.1 and 0.4.0 wrote, random ones, and what other formats said."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sessiontree import InterchangeError, SessionStore
from sessiontree.interchange import Conversation, Losses, SourceFile, Turn, export_file, format_named, import_file
from sessiontree.interchange.verifiers import FORMAT, read
from tests.transcripts import GOLDEN, conversations, lines_of, mappings, put_lines, texts, words, write_to

TRACES = GOLDEN / "verifiers" / "traces-0.4.0.jsonl"
RESULTS = GOLDEN / "verifiers" / "results-0.3.1.jsonl"
#: The interpreter of an environment that has verifiers 0.4: SESSIONTREE_VERIFIERS=.../bin/python.
INTERPRETER = os.environ.get("SESSIONTREE_VERIFIERS") or None


def same(one: Any, other: Any) -> bool:
    """Whether two are the same JSON values: the order of keys does not count, the types of numbers do."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def through(path: Path, out: Path, *, store: SessionStore | None = None, salvage: bool = False) -> list[Any]:
    """The lines that come out of a store where a file went in."""
    held = SessionStore.in_memory() if store is None else store
    import_file(held, path, "verifiers", salvage=salvage)
    out.unlink(missing_ok=True)
    assert not export_file(held, out, "verifiers").lost
    return lines_of(out)


@pytest.mark.parametrize("path", [TRACES, RESULTS])
def test_what_verifiers_wrote_comes_back(path: Path, tmp_path: Path) -> None:
    assert same(through(path, tmp_path / "out.jsonl"), lines_of(path))
    with SessionStore.open(tmp_path / "store") as store:
        through(path, tmp_path / "out.jsonl", store=store)
    with SessionStore.open(tmp_path / "store") as store:
        assert export_file(store, tmp_path / "again.jsonl", "verifiers").sessions == len(lines_of(path))
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "out.jsonl").read_bytes()


def test_each_step_has_the_ids_and_the_log_probabilities_that_were_sampled() -> None:
    """Of a row of results every prompt is a path, bit for bit; its reply stands behind it, and is what is trained on."""
    store = SessionStore.in_memory()
    import_file(store, RESULTS, "verifiers")
    for row, name in zip(lines_of(RESULTS), store.sessions(), strict=True):
        session = store.get(name)
        replies = [node for node in session.descendants(session.root) if node.origin == "generated"]
        steps = [step for step in row["trajectory"] if step["tokens"]]
        assert len(replies) == len(steps) > 0
        for reply, step in zip(replies, steps, strict=True):
            tokens = step["tokens"]
            assert reply.input_ids(0, reply.start).tolist() == tokens["prompt_ids"]
            assert reply.token_ids.tolist() == tokens["completion_ids"]
            logprobs = session.token_values(reply, "logprobs", reply.start, reply.stop)
            assert logprobs.values.tolist() == tokens["completion_logprobs"]
        assert session.annotation(replies[-1], "reward") == row["reward"]


def test_a_trace_is_the_tree_that_it_is() -> None:
    """A node is a node; a compaction is a branch made of the old one; what is not trained on says so."""
    store = SessionStore.in_memory()
    import_file(store, TRACES, "verifiers")
    episode = lines_of(TRACES)[0]
    session = store.get(episode["id"])
    solver, judge = episode["traces"]
    assert len(session.tree) - 1 == len(solver["nodes"]) + len(judge["nodes"])
    by_key = {node.key: node for node in session.descendants(session.root)}
    for number, trace in enumerate(episode["traces"]):
        for at, said in enumerate(trace["nodes"]):
            node = by_key[f"{number}/{at}"]
            assert node.token_ids.tolist() == said["token_ids"]
            assert node.depth == 1 if said.get("parent") is None else node.parent == by_key[f"{number}/{said['parent']}"]
    compacted = next(at for at, said in enumerate(solver["nodes"]) if said["semantic_parents"])
    assert by_key[f"0/{compacted}"].metadata["derived_from"]
    assert session.annotation(by_key["1/0"], "train") is False
    assert session.annotation(by_key[f"0/{compacted}"], "reward") == pytest.approx(1.0)


def test_a_rollout_that_went_on_has_a_step_more_and_no_reward_yet(tmp_path: Path) -> None:
    """Its new reply is a step with the whole path as its prompt; the reward was that of less, which is told."""
    store = SessionStore.in_memory()
    import_file(store, RESULTS, "verifiers")
    name = next(iter(store.sessions()))
    session, row = store.get(name), lines_of(RESULTS)[0]
    asked = session.append(session.head("main").node, [7, 8], role="user")
    with session.draft(asked, key="reply") as draft:
        draft.extend([9])
        session.set_head("main", draft.commit("stop"), expected=session.head("main"))
    report = export_file(store, tmp_path / "out.jsonl", "verifiers", [name], decode=lambda ids: "x" * len(ids))
    (out,) = lines_of(tmp_path / "out.jsonl")
    assert same(out["trajectory"][:-1], row["trajectory"])
    before = row["trajectory"][-1]["tokens"]
    assert out["trajectory"][-1]["tokens"]["prompt_ids"] == [*before["prompt_ids"], *before["completion_ids"], 7, 8]
    assert out["trajectory"][-1]["tokens"]["completion_ids"] == [9]
    assert [each["content"] for each in out["completion"][-2:]] == ["xx", "x"]
    assert out["reward"] is None and [loss.what for loss in report.lost] == ["the reward of a rollout that went on since"]


numbers = st.floats(-9, 0) | st.integers(-9, 0)


@st.composite
def traces(draw: st.DrawFn) -> dict[str, Any]:
    """A trace of a few nodes."""
    nodes: list[Any] = []
    for at in range(draw(st.integers(0, 5))):
        role = draw(st.sampled_from(["system", "user", "assistant", "tool"]))
        message: dict[str, Any] = {"role": role, "content": draw(texts)}
        if role == "tool":
            message["tool_call_id"] = draw(words)
        if role == "assistant" and draw(st.booleans()):
            message["tool_calls"] = [{"id": draw(words), "name": draw(words), "arguments": draw(texts)}]
        ids: list[int] = draw(st.lists(st.integers(0, 2**31 - 1), max_size=4))
        mask = [draw(st.booleans()) for _ in ids]
        known: dict[str, Any] = {"message": message, "sampled": draw(st.booleans()), "token_ids": ids, "mask": mask}
        node = draw(mappings) | known
        node["logprobs"] = [draw(numbers) for _ in range(draw(st.sampled_from([sum(mask), 0, 1])))]
        if draw(st.booleans()) and nodes:
            node["parent"] = draw(st.integers(0, at - 1))
        if draw(st.booleans()) and nodes:
            node["semantic_parents"] = [{"node": draw(st.integers(0, at - 1)), "type": draw(st.sampled_from(["compaction", "x"]))}]
        nodes.append(node)
    said = {"nodes": nodes, "rewards": draw(st.none() | st.dictionaries(words, numbers | st.none(), max_size=2))}
    return draw(mappings) | said


@given(st.lists(traces(), max_size=3), mappings, st.booleans())
def test_any_episode_comes_back(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[Any], more: dict[str, Any], alone: bool
) -> None:
    folder = tmp_path_factory.mktemp("verifiers")
    lines = drawn if alone else [more | {"id": "e", "traces": drawn}]
    path = put_lines(folder / "a.jsonl", lines)
    assert same(through(path, folder / "out.jsonl"), lines)


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    """A row of results, whose steps may say their prompts anew, go on, or do neither."""
    said = st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "assistant", "tool"]), texts)
    prompt: list[Any] = draw(st.lists(said, max_size=2))
    steps, ids = [], draw(st.lists(st.integers(0, 9), max_size=4))
    history = list(prompt)
    for _ in range(draw(st.integers(0, 3))):
        if not draw(st.integers(0, 3)):
            ids = draw(st.lists(st.integers(0, 9), max_size=4))
        reply = draw(st.lists(st.integers(0, 9), max_size=3))
        tokens = {
            "prompt_ids": list(ids),
            "prompt_mask": [0] * len(ids),
            "completion_ids": reply,
            "completion_mask": [1] * len(reply),
            "completion_logprobs": [draw(numbers) for _ in reply],
            "overlong_prompt": False,
        }
        answer = [{"role": "assistant", "content": draw(texts)}]
        step: dict[str, Any] = {
            "prompt": list(history),
            "completion": answer,
            "tokens": draw(st.just(tokens) | st.none()),
            "reward": draw(numbers),
        }
        steps.append(draw(mappings) | step)
        history += answer + draw(st.lists(said, max_size=1))
        ids = ids + reply + draw(st.lists(st.integers(0, 9), max_size=2))
    row: dict[str, Any] = {
        "prompt": prompt,
        "completion": history[len(prompt) :],
        "reward": draw(numbers),
        "example_id": draw(st.integers(0, 5)),
    }
    return draw(mappings) | row | ({"trajectory": steps} if draw(st.booleans()) else {})


@given(st.lists(rows(), max_size=3))
def test_any_rows_of_results_come_back(tmp_path_factory: pytest.TempPathFactory, drawn: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("verifiers")
    path = put_lines(folder / "a.jsonl", drawn)
    assert same(through(path, folder / "out.jsonl"), drawn)


def a_step(prompt: list[Any], reply: str, prompt_ids: list[int], ids: list[int], **more: Any) -> dict[str, Any]:
    """A step as 0.3 saves it."""
    tokens = {
        "prompt_ids": prompt_ids,
        "prompt_mask": [0] * len(prompt_ids),
        "completion_ids": ids,
        "completion_mask": [1] * len(ids),
        "completion_logprobs": [-0.5] * len(ids),
    }
    answer = [{"role": "assistant", "content": reply}] if reply else []
    return {"prompt": prompt, "completion": answer, "tokens": tokens, "reward": None, "is_truncated": False} | more


def replies_of(store: SessionStore) -> list[tuple[list[int], list[int]]]:
    """(ids of the path before it, its ids) of each reply that has any, of the one session, in order."""
    session = store.get(next(iter(store.sessions())))
    found = [node for node in session.descendants(session.root, "commit") if node.origin == "generated" and len(node)]
    return [(node.input_ids(0, node.start).tolist(), node.token_ids.tolist()) for node in found]


def ids_of_steps(steps: list[Any]) -> list[tuple[list[int], list[int]]]:
    """The same of steps as they were written."""
    said = [step["tokens"] for step in steps]
    return [(each["prompt_ids"], each["completion_ids"]) for each in said if each["completion_ids"]]


ASKED: list[Any] = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
PICTURE: list[Any] = [
    {"type": "text", "text": "t"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk=", "detail": "low"}},
]
SEEN: list[Any] = [{"role": "user", "content": PICTURE}]
ON: list[Any] = [*ASKED, {"role": "assistant", "content": "a"}, {"role": "tool", "tool_call_id": "c", "content": "r"}]


@pytest.mark.parametrize(
    ("steps", "nodes"),
    [
        pytest.param([a_step(ASKED, "a", [1, 2], [3]), a_step(ON, "b", [1, 2, 3, 4], [5])], 5, id="goes on"),
        pytest.param([a_step(ASKED, "a", [1, 2], [3, 4]), a_step(ON, "b", [1, 2, 34, 5], [6])], 6, id="the reply tokenized anew"),
        pytest.param([a_step(ASKED, "a", [1, 2], [3]), a_step(ON, "b", [9, 2, 3, 4], [5])], 7, id="the prompt tokenized anew"),
        pytest.param([a_step(ASKED, "a", [1, 2], [3]), a_step(ASKED, "a", [1, 2], [3])], 4, id="sampled twice"),
        pytest.param([a_step(ASKED, "a", [1, 2], [3]), a_step(ASKED, "b", [1, 2, 8], [6])], 5, id="more ids, no more words"),
        pytest.param([a_step(ASKED, "a", [1, 2], [3]), a_step(ASKED, "b", [1], [6])], 5, id="less ids, no less words"),
        pytest.param([a_step(ASKED, "", [1, 2], [])], 3, id="too long to be answered"),
        pytest.param([a_step([], "a", [1, 2], [3])], 3, id="a prompt of no words"),
        pytest.param([a_step(SEEN, "a", [1, 2], [3])], 2, id="a picture"),
    ],
)
def test_steps_share_turns_and_keep_their_ids(steps: list[Any], nodes: int, tmp_path: Path) -> None:
    """Where a prompt does not go on from a path, bit for bit, it parts from it at a turn, and its own ids stand there."""
    last = [*steps[-1]["prompt"], *steps[-1]["completion"]]
    row = {"prompt": last[:1], "completion": last[1:], "reward": 0.5, "trajectory": steps}
    store = SessionStore.in_memory()
    assert same(through(put_lines(tmp_path / "a.jsonl", [row]), tmp_path / "out.jsonl", store=store), [row])
    assert replies_of(store) == ids_of_steps(steps)
    assert len(store.get("a-1").tree) - 1 == nodes


alike = st.sampled_from(["", "a"])


@st.composite
def rows_alike(draw: st.DrawFn) -> dict[str, Any]:
    """A row whose steps say nearly the same, in words and in ids: much of it is shared, and not all."""
    steps: list[Any] = []
    few = st.lists(st.integers(0, 1), max_size=4)
    for _ in range(draw(st.integers(1, 5))):
        said = st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "assistant"]), alike)
        prompt, reply = draw(st.lists(said, max_size=3)), draw(alike)
        steps.append(
            a_step(prompt, reply, draw(few), draw(few))
            if draw(st.booleans()) or not steps
            else a_step(
                [*steps[-1]["prompt"], *steps[-1]["completion"], *prompt],
                reply,
                [*steps[-1]["tokens"]["prompt_ids"], *steps[-1]["tokens"]["completion_ids"], *draw(few)],
                draw(few),
            )
        )
    return {"prompt": [], "completion": [], "reward": 0.0, "trajectory": steps}


@given(rows_alike())
def test_steps_that_are_alike_keep_their_ids(tmp_path_factory: pytest.TempPathFactory, row: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("verifiers")
    store = SessionStore.in_memory()
    assert same(through(put_lines(folder / "a.jsonl", [row]), folder / "out.jsonl", store=store), [row])
    assert replies_of(store) == ids_of_steps(row["trajectory"])


def test_what_is_said_of_a_step_stands_on_its_reply(tmp_path: Path) -> None:
    step = a_step(ASKED, "a", [1, 2], [3, 4, 5], reward=0.25, advantage=-1.5, is_truncated=True)
    step["tokens"]["completion_mask"] = [1, 0, 1]
    plain = a_step(ASKED, "a", [1, 2], [3])
    row = {"prompt": ASKED, "completion": [{"role": "assistant", "content": "z"}], "reward": 1.0, "trajectory": [step, plain]}
    store = SessionStore.in_memory()
    assert same(through(put_lines(tmp_path / "a.jsonl", [row]), tmp_path / "out.jsonl", store=store), [row])
    session = store.get("a-1")
    first, second = (node for node in session.descendants(session.root, "commit") if node.origin == "generated")
    assert session.token_values(first, "loss_mask", first.start, first.stop).values.tolist() == [True, False, True]
    assert (session.annotation(first, "reward"), session.annotation(first, "advantage"), first.finish_reason) == (
        0.25,
        -1.5,
        "length",
    )
    assert session.annotations(second).keys() == {"logprobs"} and second.finish_reason == "stop"
    assert session.annotation(session.head("main").node, "reward") == 1.0, "the row is another branch, by its words"
    session.append(first, [6], role="user")
    assert [loss.what for loss in export_file(store, tmp_path / "more.jsonl", "verifiers").lost] == [
        "the words of turns that have tokens alone: no tokenizer was given",
        "turns beside the rollout and its steps",
    ]


def a_node(parent: int | None, *links: tuple[int, str], sampled: bool = True) -> dict[str, Any]:
    """A node of a trace, which comes from others by some links."""
    role = "assistant" if sampled else "user"
    said = [{"node": node, "type": kind} for node, kind in links]
    start = {} if parent is None else {"parent": parent}
    return start | {"message": {"role": role, "content": "x"}, "sampled": sampled, "token_ids": [1], "semantic_parents": said}


def test_what_is_not_trained_on_and_what_is_rewarded(tmp_path: Path) -> None:
    """Of two attempts at a compaction one was taken. Leaves alone are rewarded, and turns come from earlier ones alone."""
    attempt = "compaction_attempt"
    nodes = [
        a_node(None, sampled=False),
        a_node(0),
        a_node(1, (1, attempt)),
        a_node(1, (1, attempt), (4, "subagent_cancel")),
        a_node(None, (3, "compaction")),
    ]
    trace = {"id": "t", "nodes": nodes, "rewards": {"a": {"score": 3.0, "weight": 0.5}, "b": None}}
    path = put_lines(tmp_path / "a.jsonl", [trace])
    store = SessionStore.in_memory()
    assert same(through(path, tmp_path / "out.jsonl", store=store), [trace])
    session = store.get("t")
    by_key = {node.key: node for node in session.descendants(session.root)}
    said = {key: (session.annotation(node, "train"), session.annotation(node, "reward")) for key, node in by_key.items()}
    assert said == {"0": (None, None), "1": (None, None), "2": (False, 1.5), "3": (None, 1.5), "4": (None, 1.5)}
    assert by_key["3"].metadata["derived_from"] == ("1",) and by_key["4"].metadata["derived_from"] == ("3",)
    for node in session.leaves():
        session.annotate(node, {"reward": -1.0, "mood": 1})
    report = export_file(store, tmp_path / "anew.jsonl", "verifiers")
    assert lines_of(tmp_path / "anew.jsonl")[0]["rewards"] == {"reward": {"score": -1.0, "weight": 1.0}}
    assert {loss.what: loss.count for loss in report.lost} == {
        "rewards by name, of a trace whose reward was said anew": 1,
        "the annotation mood": 3,
    }


def test_a_picture_without_tokens_brings_none(tmp_path: Path) -> None:
    path = put_lines(tmp_path / "a.jsonl", [{"messages": SEEN}])
    store = SessionStore.in_memory()
    import_file(store, path, "openai")
    export_file(store, tmp_path / "out.jsonl", "verifiers")
    (node,) = lines_of(tmp_path / "out.jsonl")[0]["traces"][0]["nodes"]
    assert node["token_ids"] == [] and node["message"]["content"][1]["image_url"]["url"] == "data:image/png;base64,aGk="


def read_by_verifiers(path: Path) -> list[Any]:
    """What verifiers itself makes of traces: a mapping for each branch."""
    assert INTERPRETER is not None
    folder = path.parent / f"of {path.stem}"
    folder.mkdir()
    (folder / "traces.jsonl").write_bytes(path.read_bytes())
    command = [INTERPRETER, str(GOLDEN / "verifiers" / "verifiers_0_4.py"), "read", str(folder)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in found.stdout.splitlines()]


@pytest.mark.skipif(INTERPRETER is None, reason="SESSIONTREE_VERIFIERS names no interpreter that has verifiers")
def test_verifiers_reads_ours_as_its_own(tmp_path: Path) -> None:
    through(TRACES, tmp_path / "out.jsonl")
    (tmp_path / "own.jsonl").write_bytes(TRACES.read_bytes())
    assert read_by_verifiers(tmp_path / "out.jsonl") == read_by_verifiers(tmp_path / "own.jsonl")


@pytest.mark.skipif(INTERPRETER is None, reason="SESSIONTREE_VERIFIERS names no interpreter that has verifiers")
def test_verifiers_trains_on_what_another_sampled(tmp_path: Path) -> None:
    """A tree of ours, in which two replies follow one prompt: two branches, with their ids, masks and log-probabilities."""
    store = SessionStore.in_memory()
    session = store.create("ours", scheme="text@hf5")
    prompt = session.append(session.root, [1, 2, 3], role="user")
    for key, ids in (("one", [4, 5]), ("two", [4, 6, 7])):
        with session.draft(prompt, key=key) as draft:
            draft.extend(ids)
            draft.commit("stop", annotations={"logprobs": -np.arange(1.0, len(ids) + 1)})
    export_file(store, tmp_path / "ours.jsonl", "verifiers", decode=lambda ids: " ".join(map(str, ids)))
    one, two = read_by_verifiers(tmp_path / "ours.jsonl")
    assert (one["token_ids"], two["token_ids"]) == ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7])
    assert one["sampled_mask"] == [False] * 3 + [True] * 2
    assert two["logprobs"] == [0.0] * 3 + [-1.0, -2.0, -3.0]


@given(conversations())
def test_what_other_formats_said_is_a_tree_of_theirs(tmp_path_factory: pytest.TempPathFactory, made: Conversation) -> None:
    path = tmp_path_factory.mktemp("verifiers") / "a.jsonl"
    turns = list(made.turns)
    losses = write_to(path, "verifiers", Conversation(id="c", turns=turns, heads=made.heads))
    (line,) = lines_of(path)
    nodes = line["traces"][0]["nodes"] if turns else []
    silent = sum(turn.message is None for turn in turns)
    assert len(nodes) == len(turns) - silent
    assert sum(loss.count for loss in losses.lost if loss.what == "turns that are no messages") == silent
    (again,) = read(SourceFile(path), Losses("a.jsonl"))
    found = list(again.turns)
    assert [turn.message is not None and turn.message["role"] for turn in found] == [node["message"]["role"] for node in nodes]
    assert all(isinstance(turn, Turn) for turn in found)


@pytest.mark.parametrize(
    "line",
    [
        "7",
        '{"traces": 3}',
        '{"nodes": {}}',
        '{"nodes": [3]}',
        '{"nodes": [{"message": 3, "token_ids": []}]}',
        '{"nodes": [{"message": {"role": "user", "content": "x"}, "token_ids": [-1]}]}',
        '{"nodes": [{"message": {"role": "user", "content": "x"}, "token_ids": "ab"}]}',
        '{"nodes": [{"message": {"role": "user", "content": "x"}, "parent": 0}]}',
        '{"nodes": [{"message": {"role": "user", "content": "x"}, "parent": 9}]}',
        '{"prompt": 3, "completion": [], "trajectory": {}}',
        '{"nodes": [',
    ],
)
def test_what_cannot_be_read_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"nodes": [], "id": "fine"}\n' + line + "\n")
    with pytest.raises(InterchangeError, match=r"a\.jsonl, .*"):
        import_file(SessionStore.in_memory(), path, "verifiers")
    assert import_file(SessionStore.in_memory(), path, "verifiers", salvage=True).faults


def test_it_is_a_format() -> None:
    assert format_named("verifiers") is FORMAT
