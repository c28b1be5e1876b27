"""Trajectories in Harbor's format: one that its own models wrote with every field, random ones, and what other formats said."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sessiontree import InterchangeError, SessionStore
from sessiontree.interchange import Conversation, Turn, export_file, format_named, import_file, message_of
from sessiontree.interchange.atif import FORMAT
from tests.transcripts import GOLDEN, conversations, mappings, texts, words, write_to

TRAJECTORY = GOLDEN / "atif" / "trajectory-1.8.json"
#: The interpreter of an environment that has harbor: SESSIONTREE_HARBOR=.../bin/python.
INTERPRETER = os.environ.get("SESSIONTREE_HARBOR") or None


def same(one: Any, other: Any) -> bool:
    """Whether two are the same JSON values: the order of keys does not count, the types of numbers do."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def through(path: Path, out: Path, store: SessionStore | None = None) -> Any:
    """What comes out of a store where a file went in."""
    held = SessionStore.in_memory() if store is None else store
    import_file(held, path, "atif")
    out.unlink(missing_ok=True)
    assert not export_file(held, out, "atif").lost
    return json.loads(out.read_text())


def harbor(*paths: Path) -> list[int]:
    """How many steps harbor finds in each file; a file that it does not take is an error."""
    assert INTERPRETER is not None
    command = [INTERPRETER, str(GOLDEN / "atif" / "harbor_0_26.py"), "check", *map(str, paths)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return [int(line) for line in found.stdout.split()]


def test_what_harbor_wrote_comes_back(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        assert same(through(TRAJECTORY, tmp_path / "out.json", store), json.loads(TRAJECTORY.read_text()))
    with SessionStore.open(tmp_path / "store") as store:
        export_file(store, tmp_path / "again.json", "atif")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "out.json").read_bytes()


def test_the_path_before_a_reply_has_the_ids_of_its_prompt() -> None:
    """As far as prompts go on from each other; where one does not, that is told and kept as it is."""
    store = SessionStore.in_memory()
    report = import_file(store, TRAJECTORY, "atif")
    assert [loss.count for loss in report.lost] == [1]
    session = store.get("S/R")
    nodes = {node.key: node for node in session.descendants(session.root)}
    steps = {str(step["step_id"]): step for step in json.loads(TRAJECTORY.read_text())["steps"]}
    for key in ("3", "4", "6"):
        node, metrics = nodes[key], steps[key]["metrics"]
        assert node.input_ids(0, node.start).tolist() == metrics["prompt_token_ids"]
        assert node.token_ids.tolist() == metrics["completion_token_ids"]
        assert session.token_values(node, "logprobs", node.start, node.stop).values.tolist() == metrics["logprobs"]
        assert node.origin == "generated"
    assert len(nodes["7"]) == 0


def test_results_are_turns_and_subagents_trees_of_their_own() -> None:
    store = SessionStore.in_memory()
    import_file(store, TRAJECTORY, "atif")
    session = store.get("S/R")
    nodes = {node.key: node for node in session.descendants(session.root)}
    assert [nodes[f"3/{at}"].role for at in range(3)] == ["tool", "tool", "user"]
    assert [nodes[f"3/{at}"].metadata.get("tool_call_id") for at in range(3)] == ["c1", "c2", None]
    assert nodes["3"].metadata["tool_calls"] == ("c1", "c2") and session.validate(nodes["7"]) == ()
    (call,) = (message_of(nodes["3"]) or {})["tool_calls"][:1]
    assert json.loads(call["function"]["arguments"]) == {"x": 1.0, "y": "ü", "deep": [None, {"a": True}]}
    assert nodes["0:1"].depth == 1 and nodes["0:1"].links[0].node_id == nodes["3/1"].id, "the subagent, and who called it"
    assert nodes["0:0:1"].depth == 1
    assert session.heads["main"] == nodes["7"]


ids = st.lists(st.integers(0, 9), max_size=4)


@st.composite
def trajectories(draw: st.DrawFn, depth: int = 1) -> dict[str, Any]:
    """A trajectory of a few steps, some with ids that go on and some with others."""
    steps, known = [], draw(ids)
    for number in range(draw(st.integers(0, 5))):
        source = draw(st.sampled_from(["system", "user", "agent"]))
        part = st.builds(lambda text: {"type": "text", "text": text}, texts)
        step: dict[str, Any] = {"step_id": number + 1, "source": source, "message": draw(texts | st.lists(part, max_size=2))}
        step = draw(mappings) | step
        if source == "agent" and draw(st.booleans()):
            call = {"tool_call_id": f"c{number}", "function_name": draw(words), "arguments": draw(mappings)}
            result = draw(mappings) | draw(st.just({"source_call_id": f"c{number}"}) | st.just({}))
            step |= {"tool_calls": [call], "observation": {"results": [result | {"content": draw(texts)}]}}
        if source == "agent" and draw(st.booleans()):
            known = known + draw(ids) if draw(st.integers(0, 3)) else draw(ids)
            reply = draw(ids)
            tokens: dict[str, Any] = {"prompt_token_ids": list(known), "completion_token_ids": reply}
            step["metrics"] = draw(mappings) | tokens
            if draw(st.booleans()):
                step["metrics"]["logprobs"] = [draw(st.floats(-9, 0)) for _ in reply]
            known = known + reply
        if draw(st.booleans()):
            step["timestamp"] = draw(st.sampled_from(["2026-01-02T03:04:05Z", "2026-01-02T03:04:05.25+02:00", "soon"]))
        steps.append(step)
    said = {"schema_version": "ATIF-v1.8", "agent": draw(mappings) | {"name": "a", "version": "1"}, "steps": steps}
    if depth and draw(st.booleans()):
        said["subagent_trajectories"] = [draw(trajectories(depth - 1)) | {"trajectory_id": "inner"}]
    return draw(mappings) | said


@given(trajectories())
def test_any_trajectory_comes_back(tmp_path_factory: pytest.TempPathFactory, drawn: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("atif")
    path = folder / "a.json"
    path.write_text(json.dumps(drawn))
    assert same(through(path, folder / "out.json"), drawn)


def check(value: Any) -> None:
    """The rules of harbor's models, written out again for what other formats say."""
    assert value["schema_version"] == "ATIF-v1.7" and value["agent"]["name"] and value["agent"]["version"]
    assert [step["step_id"] for step in value["steps"]] == list(range(1, len(value["steps"]) + 1))
    for step in value["steps"]:
        agent = step["source"] == "agent"
        assert step["source"] in ("system", "user", "agent")
        assert agent or not {"tool_calls", "metrics", "reasoning_content", "model_name"} & step.keys()
        assert isinstance(step["message"], (str, list))
        called = {call["tool_call_id"] for call in step.get("tool_calls", ())}
        assert all(isinstance(call["arguments"], dict) for call in step.get("tool_calls", ()))
        for result in step.get("observation", {}).get("results", ()):
            assert result.get("source_call_id") is None or result["source_call_id"] in called


@given(conversations())
def test_what_other_formats_said_is_a_valid_trajectory(tmp_path_factory: pytest.TempPathFactory, made: Conversation) -> None:
    path = tmp_path_factory.mktemp("atif") / "a.json"
    write_to(path, "atif", made)
    check(json.loads(path.read_text()))


def replied(message: str, prompt: list[int], ids: list[int], **more: Any) -> dict[str, Any]:
    """A step of an agent, with its ids."""
    return {"source": "agent", "message": message, "metrics": {"prompt_token_ids": prompt, "completion_token_ids": ids}} | more


def test_what_is_copied_or_no_models_is_not_sampled(tmp_path: Path) -> None:
    """Ids that no turn before a reply can have stand before its own, and no loss is said of them; copies are never sampled."""
    steps: list[dict[str, Any]] = [
        {"source": "user", "message": "q"},
        replied("a", [1, 2], [3, 4], is_copied_context=True),
        replied("b", [1, 2, 3, 4, 5], [6, 7], is_copied_context=True),
        {"source": "agent", "message": "dispatched", "llm_call_count": 0},
        replied("c", [*range(1, 9)], [9]),
        replied("d", [*range(1, 11)], [11, 12]),
    ]
    trajectory: dict[str, Any] = {"agent": {"name": "a", "version": "1"}, "session_id": "s", "trajectory_id": "t"}
    trajectory |= {"steps": [step | {"step_id": at} for at, step in enumerate(steps, 1)]}
    path = tmp_path / "a.json"
    path.write_text(json.dumps(trajectory))
    store = SessionStore.in_memory()
    assert same(through(path, tmp_path / "out.json", store), trajectory)
    session = store.get("s/t")
    nodes = list(session.descendants(session.root))
    assert [node.token_ids.tolist() for node in nodes] == [[1, 2], [3, 4], [5, 6, 7], [8], [9], [10, 11, 12]]
    assert [node.origin for node in nodes] == ["input"] * 4 + ["generated"] * 2
    masks = [session.token_values(node, "loss_mask", node.start, node.stop) for node in nodes]
    assert [mask.known.any() for mask in masks] == [False] * 5 + [True]
    assert masks[5].values.tolist() == [False, True, True]


def test_branches_and_subagents_of_others_are_trajectories_inside(tmp_path: Path) -> None:
    """Turns that branches share are copies in all but one; who called a subagent refers to it, and what has no place is told."""
    call: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "task", "arguments": "{}"}}
    turns = [
        Turn(id="q", parent=None, message={"role": "user", "content": "q"}),
        Turn(id="call", parent="q", message={"role": "assistant", "content": "", "tool_calls": [call]}),
        Turn(id="sub", parent=None, message={"role": "user", "content": "do"}, derived_from=("call",)),
        Turn(id="done", parent="sub", message={"role": "assistant", "content": "done"}),
        Turn(id="deep", parent=None, message={"role": "user", "content": "deeper"}, derived_from=("done",)),
        Turn(id="result", parent="call", message={"role": "tool", "tool_call_id": "c", "content": "done"}),
        Turn(id="end", parent="result", message={"role": "assistant", "content": "end"}, annotations={"reward": 1.0}),
        Turn(id="other", parent="q", message={"role": "assistant", "content": "another"}),
        Turn(id="lost", parent="other", message={"role": "tool", "tool_call_id": "z", "content": "whose?"}),
    ]
    losses = write_to(tmp_path / "a.json", "atif", Conversation(id="c", turns=turns, heads={"main": "end"}))
    value = json.loads((tmp_path / "a.json").read_text())
    check(value)
    assert [step["message"] for step in value["steps"]] == ["q", "", "end"]
    other, subagent = value["subagent_trajectories"]
    refs = [result.get("subagent_trajectory_ref") for result in value["steps"][1]["observation"]["results"]]
    assert refs == [None, [{"trajectory_id": subagent["trajectory_id"]}]]
    assert [step["message"] for step in subagent["steps"]] == ["do", "done"]
    (deeper,) = subagent["subagent_trajectories"]
    assert subagent["steps"][1]["observation"]["results"] == [
        {"subagent_trajectory_ref": [{"trajectory_id": deeper["trajectory_id"]}]}
    ]
    assert [(step["message"], step.get("is_copied_context")) for step in other["steps"]] == [
        ("q", True),
        ("another", None),
        ("whose?", None),
    ]
    for inner in (subagent, deeper, other):
        check(inner)
    assert {loss.what: loss.count for loss in losses.lost} == {
        "the annotation reward": 1,
        "a tree is written branch by branch: turns that branches share stand in each": 1,
        "a tool result without its call: it is the user's": 1,
    }


@pytest.mark.skipif(INTERPRETER is None, reason="SESSIONTREE_HARBOR names no interpreter that has harbor")
def test_harbor_takes_ours(tmp_path: Path) -> None:
    through(TRAJECTORY, tmp_path / "out.json")
    paths = [tmp_path / "out.json"]
    for name, pattern in (("openai", "openai/*.jsonl"), ("pi", "pi/1.6.0/*.jsonl"), ("claude-code", "claude_code/*.jsonl")):
        for source in sorted(GOLDEN.glob(pattern)):
            store = SessionStore.in_memory()
            import_file(store, source, name)
            for session in store.sessions():
                paths.append(tmp_path / f"{name}-{len(paths)}.json")
                export_file(store, paths[-1], "atif", [session])
    assert len(paths) > 5
    assert harbor(TRAJECTORY, *paths)[:2] == [7, 7]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        "[]",
        '{"steps": 3}',
        '{"steps": [3]}',
        '{"steps": [{"step_id": 1, "source": "user", "message": "x"}, {"step_id": 1, "source": "user", "message": "y"}]}',
        '{"steps": [{"source": "agent", "message": "x", "metrics": {"prompt_token_ids": [-1], "completion_token_ids": []}}]}',
        '{"steps": [{"source": "agent", "message": "x", "observation": {"results": 3}}]}',
        '{"steps": [',
        '{"steps": [{"source": "user", "message": NaN}]}',
    ],
)
def test_what_is_wrong_is_an_error_or_the_same_again(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    try:
        came = through(path, tmp_path / "out.json")
    except InterchangeError as error:
        assert str(error).startswith("a.json, ")
        assert import_file(SessionStore.in_memory(), path, "atif", salvage=True).faults
    else:
        assert same(came, json.loads(text)), "what is odd and can be kept is kept"


def test_it_is_a_format() -> None:
    assert format_named("atif") is FORMAT
