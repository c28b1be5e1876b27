"""A replay gives each generation with the request that an engine was given then, and says what cannot be run again."""

from __future__ import annotations

import importlib
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from engine_bridge import RequestInputs, request_inputs
from sessiontree import CorruptTree, Draft, Edit, Node, ReplayStep, Session, SessionStore, SessionTreeError, replay
from tests.disk_model import golden, scheme_of
from tests.histories import History, without_leading_empties
from tests.toy import a_turn, image, media, shown, toy_scheme, turn


# --- the request as it was --------------------------------------------------------------------------------------------
def grown(session: Session, history: History) -> dict[bytes, tuple[Draft, RequestInputs, Any]]:
    """Turns with a reply between, and what the engine was given for each, by the reply's id."""
    node, given = session.root, {}
    for number, each in enumerate(without_leading_empties(history.turns())):
        node = session.append(node, each.tokens, media=each.media)
        if any(item.unfinished for item in each.media):
            continue
        with suppress(SessionTreeError):
            draft = session.draft(node, key=f"request {number}", role="assistant")
            request = request_inputs(draft)
            draft.extend([7, 8, 9])
            reply = draft.commit("length", tail_policy="drop_last" if number % 2 else "keep", metadata={"turn": number})
            given[reply.id] = draft, request, draft.positions(draft.start, reply.stop)
            node = reply
    return given


#: One of every family under every rule; all of those whose replies stand elsewhere when they are replayed.
ELSEWHERE = ("qwen2_vl@hf5", "qwen2_5_vl@hf5")
HISTORIES = [(name, history) for name, history in golden() if name.endswith(" 0") or name.startswith(ELSEWHERE)]


@pytest.mark.parametrize(("name", "history"), [pytest.param(*each, id=each[0]) for each in HISTORIES])
def test_requests_are_what_the_engine_was_given(name: str, history: History, tmp_path: Path) -> None:
    """In a process that has seen nothing of it; in every family, where media, times and floats are."""
    with SessionStore.open(tmp_path / "store") as store:
        given = grown(store.create("chat", scheme=scheme_of(name, history), max_tokens=2**20), history)
    with SessionStore.open(tmp_path / "store", read_only=True) as store:
        steps = list(replay(store.get("chat")))
        assert [step.node.id for step in steps] == list(given), "in commit order"
        for number, (step, (draft, request, decoded_at)) in enumerate(zip(steps, given.values(), strict=True)):
            again = request_inputs(step.prompt)
            for field in ("input_ids", "positions", "mrope_position_delta"):
                assert torch.equal(getattr(again, field), getattr(request, field)), field
            assert again.media_spans == request.media_spans == step.media_spans
            assert again.needed_items == request.needed_items == step.needed_items == step.missing
            assert (step.number, step.session_id) == (number, "chat")
            assert step.input_ids.tolist() == request.input_ids.tolist()
            assert np.array_equal(step.positions, draft.positions(0, draft.start))
            assert (step.mrope_position_delta, step.next_position) == (
                draft.parent.mrope_position_delta,
                draft.parent.next_position,
            )
            assert step.output_ids.tolist() == draft.token_ids.tolist()[: len(step.node)]
            assert np.array_equal(step.output_positions, decoded_at)
            assert (step.key, step.role, step.finish_reason) == (draft.key, "assistant", "length")
            assert step.tail_policy == ("drop_last" if step.metadata["turn"] % 2 else "keep")
            assert step.problem is None or step.missing


def test_some_prompts_of_these_stand_elsewhere_when_they_are_replayed() -> None:
    """Or the test above could not tell the one from the other."""
    differ = set()
    for name, history in HISTORIES:
        session = SessionStore.in_memory().create("chat", scheme=scheme_of(name, history), max_tokens=2**20)
        grown(session, history)
        if any(not np.array_equal(step.positions, step.prompt.positions(mode="as_replayed")) for step in replay(session)):
            differ.add(name.split()[0])
    assert differ == {*ELSEWHERE}


# --- which generations there are --------------------------------------------------------------------------------------
def generate(session: Session, parent: Node, *tokens: int, key: str | None = None) -> Node:
    draft = session.draft(parent, key=key)
    draft.extend(tokens)
    return draft.commit()


def ids_of(steps: Iterator[ReplayStep]) -> list[bytes]:
    return [step.node.id for step in steps]


def test_only_what_was_generated_and_committed() -> None:
    session = SessionStore.in_memory().create("chat", scheme="text@hf5")
    question = session.append(session.root, [1, 2])
    first = generate(session, question, 3, 4, 5)
    session.draft(question).abort()
    kept_open = session.draft(question)
    kept_open.extend([9])
    second = generate(session, first, 6)
    recorded = session.record([1, 2, 3, 4, 5, 6, 7], [8], key="stateless").completion
    rewritten = session.rewrite(second, [Edit(2, 3, [30])])
    assert rewritten.origin == "input", "made anew is prefilled, not generated"
    assert ids_of(replay(session)) == [first.id, second.id, recorded.id]


def test_the_beginning_of_a_generation_says_so() -> None:
    session = SessionStore.in_memory().create("chat", scheme="text@hf5")
    whole = generate(session, session.append(session.root, [1, 2]), 3, 4, 5)
    cut = session.truncate(whole, 4)
    one, two = replay(session)
    assert (one.node, one.beginning_of, one.finish_reason) == (whole, None, "stop")
    assert two.node == cut and two.output_ids.tolist() == [3, 4] and two.finish_reason is None
    assert two.beginning_of is not None and two.beginning_of.node_id == whole.id
    assert two.prompt == one.prompt


def test_a_whole_store_gives_what_its_sessions_share_once() -> None:
    with SessionStore.in_memory() as store:
        session = store.create("chat", scheme="text@hf5")
        reply = generate(session, session.append(session.root, [1, 2]), 3)
        fork = store.fork(session, reply, "fork")
        other = generate(fork, fork.append(reply, [4]), 5)
        assert ids_of(replay(fork)) == [reply.id, other.id], "a session is whole by itself"
        steps = list(replay(store))
        assert [(step.number, step.session_id, step.node.id) for step in steps] == [(0, "chat", reply.id), (1, "fork", other.id)]


def test_d24_a_replay_takes_memory_for_a_path_not_for_the_session(tmp_path: Path) -> None:
    """200 replies of 4 kB, on 20 paths: what is held at once is a few paths."""
    with SessionStore.open(tmp_path / "store") as store:
        session = store.create("chat", scheme="text@hf5")
        for branch in range(20):
            node = session.append(session.root, [branch])
            for _ in range(10):
                node = generate(session, node, *[branch] * 1000)
    with SessionStore.open(tmp_path / "store", read_only=True) as store:
        session = store.get("chat")
        sum(len(step.output_ids) for step in replay(session))  # whatever is made once
        tracemalloc.start()
        try:
            assert sum(len(step.output_ids) for step in replay(session)) == 200_000
            assert tracemalloc.get_traced_memory()[1] < 400_000
        finally:
            tracemalloc.stop()


def test_other_things_are_not_replayed() -> None:
    with pytest.raises(TypeError, match="not list"):
        replay([])  # type: ignore[arg-type]


# --- what cannot be run again is said ---------------------------------------------------------------------------------
def test_missing_features_are_named_each_once(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        session = store.create("chat", scheme=toy_scheme())
        one, two = a_turn(number=1), turn(*shown(image(number=2)), *shown(image(number=1)), 5)
        kept = media(one)[0]
        store.put_features(kept, np.ones((2, 2), np.float32))
        first = generate(session, session.append(session.root, one.tokens, media=media(one)), 7)
        generate(session, session.append(first, two.tokens, media=media(two)), 8)
        lost = media(two)[0]
        steps = list(replay(session))
        assert [step.missing for step in steps] == [(), (lost,)]
    for _ in range(2):  # the second time the features of neither are there
        with SessionStore.open(tmp_path / "store") as store:  # nothing is held: they lie on disk
            steps = list(replay(store.get("chat")))
            held = store.get_features(kept) is not None
            assert [step.missing for step in steps] == ([(), (lost,)] if held else [(kept,), (kept, lost)])
            assert [len(step.needed_items) for step in steps] == [1, 2]
            assert (steps[0].problem is None) == held
            assert str(lost) in str(steps[1].problem)
            store.drop_features(kept)
    assert not held


def test_what_damage_hides_is_said_behind_the_last_step(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store", durability="commit") as store:
        session = store.create("chat", scheme="text@hf5")
        asked = [session.append(session.root, [number]) for number in range(9)]
        replies = [generate(session, node, 3, key=f"reply {number}") for number, node in enumerate(asked)]
    (segment,) = (tmp_path / "store" / "segments").glob("*.seg")
    data = bytearray(segment.read_bytes())
    at = data.index(b"reply 4")
    data[at] ^= 1
    segment.write_bytes(data)
    with SessionStore.open(tmp_path / "store", read_only=True, strict=False) as store:
        steps = []
        with pytest.raises(CorruptTree, match="1 of session 'chat'"):
            for step in replay(store):
                steps.append(step)
    assert [step.node.id for step in steps] == [reply.id for at, reply in enumerate(replies) if at != 4]


# --- run again --------------------------------------------------------------------------------------------------------
@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(request.config.rootpath / "examples"))
    return importlib.import_module


@pytest.fixture
def demo(examples: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert examples("quickstart").main(["--store", str(tmp_path / "demo")]) == 0
    capsys.readouterr()
    return tmp_path / "demo"


def test_the_demo_run_again_is_the_same(
    examples: Callable[[str], ModuleType], demo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert examples("replay").main([str(demo)]) == 0
    output = capsys.readouterr().out
    assert output.count("the same") == 7 and "7 of 7" in output


def copied(source: Session, store: SessionStore, altered: int, token: int) -> Node:
    """The same session in another store, but for one token of its ``altered``-th generation, which is returned."""
    session = store.create(source.id, scheme=source.scheme)
    copies, found, number = {source.root.id: session.root}, [], 0
    for node in list(source.tree)[1:]:
        assert node.parent is not None
        parent = copies[node.parent.id]
        if node.origin == "input":
            copies[node.id] = session.append(parent, node.token_ids, media=node.media, role=str(node.role), key=node.key)
            continue
        ids = node.token_ids.copy()
        if number == altered:
            ids[token] += 1
        draft = session.draft(parent, key=node.key)
        draft.extend(ids)
        copies[node.id] = draft.commit(str(node.finish_reason))
        found.append(copies[node.id])
        number += 1
    return found[altered]


@pytest.mark.parametrize(("altered", "token"), [(0, 0), (2, 5), (6, 7)])
def test_one_altered_token_is_found_where_it_is(
    examples: Callable[[str], ModuleType],
    demo: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    altered: int,
    token: int,
) -> None:
    """And no other: the check compares what the model says now with what was written, wherever that came from."""
    with SessionStore.open(demo) as source, SessionStore.open(tmp_path / "altered") as store:
        session = source.get("quickstart")
        node = copied(session, store, altered, token)
        for item in {item for each in session.tree for item in each.media}:
            features = source.get_features(item)
            assert features is not None
            store.put_features(item, features.arrays())
        where = node.start + token
    assert examples("replay").main([str(tmp_path / "altered")]) == 1
    *before, last = capsys.readouterr().out.splitlines()
    assert all("the same" in line for line in before) and len(before) == altered
    assert f"step {altered}, " in last and node.id[:4].hex() in last
    assert f"token {token} of 8 differs, path index {where}:" in last


def test_a_request_without_its_pictures_is_not_run(
    examples: Callable[[str], ModuleType], demo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with SessionStore.open(demo) as store:
        photo = store.get("quickstart").head("photo").node.parent
        assert photo is not None
        (item,) = photo.media
        store.drop_features(item)
    assert examples("replay").main([str(demo)]) == 1
    output = capsys.readouterr().out
    assert output.count("not run") == 3 and output.count(str(item)) == 3 and "4 of 7" in output


def test_another_models_session_is_not_run(
    examples: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        session = store.create("chat", scheme="text@hf5")
        generate(session, session.append(session.root, [1, 2]), 3)
    assert examples("replay").main([str(tmp_path / "store")]) == 1
    assert "made for another model" in capsys.readouterr().out
