"""session_params as a pure function: what each combination means, without SGLang, and on a tree."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.adapters.sglang_params import Context, Continuation, continuation
from sessiontree import OutOfRange, SessionTreeError, UnknownNode, Unsupported
from tests.toy import A_IDS, a_turn, grow, new_session, reply

KNOWN = {"done": Context(9, 11), "running": Context(9, 12, finished=False), "empty": Context(3, 3)}


def where(known: dict[str, Context] = KNOWN, **params: Any) -> Continuation:
    given = {name: params.pop(name, None) for name in ("rid", "offset", "replace", "drop_previous_output")}
    return continuation(given, known.get, **params)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, Continuation(None, 0)),
        ({"offset": 5}, Continuation(None, 0)),
        ({"rid": "done"}, Continuation("done", 11)),
        ({"rid": "done", "offset": 0}, Continuation("done", 11)),
        ({"rid": "done", "offset": 4}, Continuation("done", 4)),
        ({"rid": "done", "offset": 11}, Continuation("done", 11)),
        ({"rid": "done", "offset": -1}, Continuation("done", 10)),
        ({"rid": "done", "offset": -11}, Continuation("done", 0)),
        ({"rid": "done", "drop_previous_output": True}, Continuation("done", 9)),
        ({"rid": "done", "drop_previous_output": True, "offset": -1}, Continuation("done", 8)),
        ({"rid": "done", "replace": True}, Continuation("done", 11)),
        ({"rid": "done", "replace": False}, Continuation("done", 11)),
        ({"rid": "empty", "drop_previous_output": True}, Continuation("empty", 3)),
        ({"rid": "running", "replace": True}, Continuation("running", 9, ("running",))),
        ({"rid": "running", "replace": True, "offset": 4}, Continuation("running", 4, ("running",))),
        ({"replace": True}, Continuation(None, 0, (), True)),
        ({"replace": True, "offset": -1, "in_flight": ["x", "y"]}, Continuation(None, 0, ("x", "y"), True)),
        ({"in_flight": ["x"]}, Continuation(None, 0)),
        ({"streaming": True}, Continuation(None, 0)),
        ({"streaming": True, "tip": "done"}, Continuation("done", 11)),
        ({"streaming": True, "tip": "done", "offset": 0, "replace": False}, Continuation("done", 11)),
        ({"streaming": True, "tip": "done", "rid": "empty"}, Continuation("empty", 3)),
    ],
)
def test_where_a_request_goes_on(params: dict[str, Any], expected: Continuation) -> None:
    assert where(**params) == expected


@pytest.mark.parametrize(
    ("params", "error", "says"),
    [
        ({"rid": "nobody"}, UnknownNode, "'nobody'"),
        ({"rid": "nobody", "replace": True}, UnknownNode, "'nobody'"),
        ({"rid": "running"}, Unsupported, "'running' has not finished"),
        ({"rid": "running", "drop_previous_output": True}, Unsupported, "'running' has not finished"),
        ({"rid": "done", "offset": 12}, OutOfRange, "offset 12 outside the 11 tokens"),
        ({"rid": "done", "offset": -12}, OutOfRange, "offset -12 outside the 11 tokens"),
        ({"rid": "done", "offset": 10, "drop_previous_output": True}, OutOfRange, "outside the 9 tokens"),
        ({"rid": "running", "offset": 10, "replace": True}, OutOfRange, "outside the 9 tokens"),
        ({"streaming": True, "offset": 1}, Unsupported, "offset=1"),
        ({"streaming": True, "replace": True}, Unsupported, "replace=True"),
        ({"streaming": True, "drop_previous_output": True}, Unsupported, "drop_previous_output=True"),
        ({"streaming": True, "in_flight": ["x"], "tip": "done"}, Unsupported, "'x' has not finished"),
        ({"streaming": True, "rid": "nobody", "tip": "done"}, UnknownNode, "'nobody'"),
        ({"rid": 5}, TypeError, "rid is of type str, not int"),
        ({"rid": "done", "offset": "5"}, TypeError, "str"),
        ({"rid": "done", "offset": True}, TypeError, "bool"),
        ({"rid": "done", "replace": 1}, TypeError, "replace is of type bool"),
    ],
)
def test_what_is_refused_says_why(params: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        where(**params)
    assert says in str(caught.value)


def test_attributes_and_mappings_are_read_alike() -> None:
    for rid, offset, replace, drop in itertools.product([None, "done", "running"], [None, 0, 3, -2], [None, True], [None, True]):
        fields = {"rid": rid, "offset": offset, "replace": replace, "drop_previous_output": drop}
        answers: list[Any] = []
        for params in (fields, {name: value for name, value in fields.items() if value is not None}, SimpleNamespace(**fields)):
            try:
                answers.append(continuation(params, KNOWN.get))
            except SessionTreeError as error:
                answers.append((type(error), str(error)))
        assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("wrong", [None, 5, "done", [("rid", "done")], SimpleNamespace(rid="done")])
def test_only_session_params_and_mappings_are_read(wrong: Any) -> None:
    with pytest.raises(TypeError):
        continuation(wrong, KNOWN.get)


@given(
    rid=st.sampled_from([None, *KNOWN]),
    offset=st.none() | st.integers(-15, 15),
    replace=st.none() | st.booleans(),
    drop=st.none() | st.booleans(),
    streaming=st.booleans(),
    in_flight=st.lists(st.sampled_from(["running", "other"]), unique=True),
)
def test_any_answer_keeps_a_part_of_a_known_context(
    rid: str | None, offset: int | None, replace: bool | None, drop: bool | None, streaming: bool, in_flight: list[str]
) -> None:
    params = {"rid": rid, "offset": offset, "replace": replace, "drop_previous_output": drop}
    try:
        found = continuation(params, KNOWN.get, in_flight=in_flight, streaming=streaming, tip="done")
    except SessionTreeError:
        assert rid == "running" or streaming or offset
        return
    assert 0 <= found.length <= (KNOWN[found.rid].stop if found.rid else 0)
    assert set(found.aborts) <= {*in_flight, rid} and (replace or not found.aborts)
    assert found.forgets == bool(replace and rid is None)


def test_with_a_tree_it_is_two_calls() -> None:
    session = new_session()
    first = grow(session, session.root, a_turn())
    nodes = {"a": grow(session, first, reply(8, 9))}
    known = {"a": Context(first.stop, nodes["a"].stop)}
    found = continuation({"rid": "a", "offset": -1}, known.get)
    assert found.rid is not None
    node = session.append(session.truncate(nodes[found.rid], found.length), [7])
    assert node.input_ids().tolist() == [*A_IDS, 8, 7]
