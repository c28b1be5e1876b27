"""Sessions of the mini scheduler over HTTP: what SGLang's session control is tested for, and what goes wrong there.

Every output is compared with what the whole history gives as one request without a session, under a cache salt of its own
(``Client.check``). The client's record is the only other party: nothing is compared with what the server remembers.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import httpx
import pytest

from sessiontree.fsck import fsck
from tests.mini_client import GREEDY, IMAGE_PAD, Ask, Client, Part, Talk, Turn, length, picture, shown
from tests.mini_server import ForkedServer, Server

VISION, TEXT = "tiny-qwen2.5-vl", "tiny-qwen2"
PAGE = 16
LONG = {"temperature": 0, "max_new_tokens": 1_500, "ignore_eos": True}  # still running when the test goes on
WARM = {"temperature": 1.0, "seed": 11, "max_new_tokens": 8}
SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"
# At soak length both models go through all that has no images.
both_models = pytest.mark.parametrize("server", [VISION, TEXT], indirect=True)
sees_images = pytest.mark.parametrize("server", [VISION], indirect=True)


@pytest.fixture(scope="module", params=[VISION, TEXT] if SOAK else [VISION])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with ForkedServer(tmp_path_factory.mktemp("sessions") / "store", "--model", request.param) as running:
        yield running
        running.stop()
    assert fsck(running.store).ok


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    yield (made := Client(server))
    made.http.close()
    server.check_healthy()


@pytest.fixture
def talk(client: Client) -> Talk:
    return Talk(client)


NUMBERS = itertools.count(200, 40)


def ids(count: int = 6) -> tuple[int, ...]:
    """Tokens that no other turn has, so that nothing but its own session can have them cached."""
    first = next(NUMBERS)
    return tuple(range(first, first + count))


# --- going on -------------------------------------------------------------------------------------------------------------


@both_models
def test_turns_are_appended(talk: Talk) -> None:
    turns = [talk.turn(*ids(12))]
    for count in (12, 13, 7):  # two replies end where a page does
        turns.append(talk.turn(*ids(count), after=turns[-1]))
        whole_pages = (length(turns[-2].context) - 1) // PAGE * PAGE
        assert turns[-1].cached_tokens >= whole_pages, "the context is in the cache"
    assert turns[-1].cached_tokens > 0
    assert [length(turn.context) % PAGE for turn in turns] == [0, 0, 1, 12]
    known = talk.known()
    assert known.keys() == {turn.rid for turn in turns}
    for turn in turns:
        told = known[turn.rid]
        assert (told["prompt_tokens"], told["completion_tokens"]) == (length(turn.ask.prompt), len(turn.output_ids))
        assert told["finish_reason"] == turn.finish_reason["type"]


@both_models
def test_branches_stand_beside_each_other(talk: Talk) -> None:
    root = talk.turn(*ids())
    left, right = talk.turn(*ids(), after=root), talk.turn(*ids(), after=root)
    assert left.cached_tokens == right.cached_tokens
    for branch in (left, right, left):
        talk.turn(*ids(), after=branch)
    known = talk.known()
    assert known[left.rid]["parent"] == known[right.rid]["parent"] == root.rid
    assert known[root.rid]["parent"] is None


def test_a_client_goes_back_any_number_of_turns(talk: Talk) -> None:
    turns = [talk.turn(*ids(12))]
    for count in (12, 13, 7):  # two replies end where a page does
        turns.append(talk.turn(*ids(count), after=turns[-1]))
    for earlier in (turns[0], turns[2], turns[1]):
        again = talk.turn(*ids(), after=earlier)
        assert talk.known()[again.rid]["parent"] == earlier.rid
    talk.turn(*ids(), after=turns[-1])


def test_the_same_turn_asked_twice_is_two_requests(talk: Talk) -> None:
    root, same = talk.turn(*ids()), ids()
    first, second = talk.turn(*same, after=root), talk.turn(*same, after=root)
    assert first.output_ids == second.output_ids and first.rid != second.rid
    assert {first.rid, second.rid} <= talk.known().keys()


def test_requests_without_a_rid_begin_from_nothing(talk: Talk) -> None:
    first, second = talk.turn(*ids()), talk.turn(*ids())
    assert talk.known()[first.rid]["parent"] is talk.known()[second.rid]["parent"] is None


@both_models
def test_an_empty_turn_goes_on_where_there_is_history(talk: Talk) -> None:
    root = talk.turn(*ids(), sampling={"temperature": 0, "max_new_tokens": 3})
    more = talk.turn(after=root)
    whole = talk.turn(*root.ask.prompt, sampling={"temperature": 0, "max_new_tokens": 7})
    assert root.output_ids + more.output_ids == whole.output_ids
    talk.turn(after=root, drop=True)


def test_an_empty_turn_needs_history(talk: Talk) -> None:
    talk.refused(400)
    answer = talk.client.post("/generate", {"input_ids": [], "sampling_params": dict(GREEDY)})
    assert answer.status_code == 400


def test_text_is_the_ids_it_stands_for(talk: Talk, client: Client) -> None:
    given = {"text": "<|im_start|>user\nHello, world<|im_end|>\n", "sampling_params": dict(GREEDY)}
    answer = client.ok("/generate", {**given, "session_params": {"id": talk.id}})
    ids = [151644, 872, 198, 9707, 11, 1879, 151645, 198]
    plain = client.ok("/generate", {"input_ids": ids, "sampling_params": dict(GREEDY), "cache_salt": client.fresh()})
    assert answer["meta_info"]["prompt_tokens"] == len(ids)
    assert answer["output_ids"] == plain["output_ids"]


# --- offset, drop_previous_output ---------------------------------------------------------------------------------------


@both_models
def test_an_offset_keeps_the_first_tokens_of_the_context(talk: Talk) -> None:
    root = talk.turn(*ids(10))
    second = talk.turn(*ids(), after=root)
    for offset in (3, 10, 12, 16, length(second.context), 1):
        talk.turn(*ids(3), after=second, offset=offset)
    talk.turn(*ids(), after=root)
    talk.turn(*ids(), after=second)


def test_a_negative_offset_counts_from_the_end(talk: Talk) -> None:
    root = talk.turn(*ids())
    for offset in (-1, -4, -5, 1 - length(root.context)):
        talk.turn(*ids(3), after=root, offset=offset)
    talk.turn(*ids(3), after=root, offset=0)
    talk.turn(after=root, offset=-1)


def test_an_offset_outside_the_context_is_refused(talk: Talk) -> None:
    root = talk.turn(*ids())
    beyond = length(root.context) + 1
    for offset in (beyond, -beyond, 2**31, 2**63, -(2**70)):
        body = talk.ask(*ids(3), after=root).body
        body["session_params"]["offset"] = offset
        answer = talk.client.post("/generate", body)
        assert answer.status_code in (400, 422), (offset, answer.text)
    talk.turn(*ids(), after=root)


@both_models
def test_the_previous_output_is_dropped(talk: Talk) -> None:
    root = talk.turn(*ids())
    talk.turn(*ids(), after=root, drop=True)
    talk.turn(*ids(), after=root, drop=True, offset=-2)
    talk.turn(*ids(), after=root)


# --- replace, abort -------------------------------------------------------------------------------------------------------


def until_it_runs(stream: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """The first event in which a token has come."""
    return next(event for event in stream if event["output_ids"])


def last_of(stream: Iterator[dict[str, Any]], ask: Ask) -> Turn:
    *_, last = stream
    return ask.answered(last)


def test_a_finished_request_is_replaced_and_stays(talk: Talk) -> None:
    root = talk.turn(*ids())
    old = talk.turn(*ids(), after=root)
    sibling = talk.turn(*ids(), after=root)
    new = talk.turn(*ids(), after=old, replace=True, offset=-1)
    for each in (old, sibling, new):
        talk.turn(*ids(), after=each)


@both_models
def test_a_running_request_is_replaced(talk: Talk, client: Client) -> None:
    root = talk.turn(*ids())
    running = talk.ask(*ids(), after=root, sampling=LONG)
    with client.stream(running) as stream:
        until_it_runs(stream)
        aborted = Turn(running, (), "", {}, 0, str(running.rid))
        new = talk.turn(*ids(), after=aborted, drop=True, replace=True)
        old = last_of(stream, running)
    assert old.finish_reason["type"] == "abort"
    client.check_beginning(old, 24)
    assert running.rid not in talk.known()
    talk.turn(*ids(), after=new)
    talk.turn(*ids(), after=root)
    talk.refused(404, *ids(), after=old)


def test_a_replacement_that_is_refused_changes_nothing(talk: Talk, client: Client) -> None:
    root = talk.turn(*ids())
    running = talk.ask(*ids(), after=root, sampling={**LONG, "max_new_tokens": 60})
    with client.stream(running) as stream:
        until_it_runs(stream)
        half = Turn(running, (), "", {}, 0, str(running.rid))
        too_long = {**LONG, "max_new_tokens": 100_000}
        talk.refused(400, *ids(), after=half, drop=True, replace=True, sampling=too_long)
        talk.refused(400, *ids(), replace=True, sampling=too_long)
        talk.refused(409, *ids(), replace=True, rid=root.rid)
        talk.refused(400, *ids(), after=half, drop=True, replace=True, sampling={"top_p": 2})
        client.check(last_of(stream, running))
    talk.turn(*ids(), after=root)


@both_models
def test_an_aborted_request_leaves_nothing(talk: Talk, client: Client) -> None:
    root = talk.turn(*ids())
    running = talk.ask(*ids(), after=root, sampling=LONG)
    with client.stream(running) as stream:
        until_it_runs(stream)
        assert client.ok("/abort_request", {"rid": running.rid}) == {}
        aborted = last_of(stream, running)
    assert aborted.finish_reason["type"] == "abort" and 0 < len(aborted.output_ids) < 1_500
    talk.refused(404, *ids(), after=aborted)
    talk.refused(404, *ids(), after=aborted, replace=True)
    assert talk.known().keys() == {root.rid}
    again = talk.turn(*ids(), after=root, rid=running.rid)
    talk.turn(*ids(), after=again)


def test_a_request_whose_client_leaves_is_aborted(talk: Talk, client: Client, server: Server) -> None:
    root = talk.turn(*ids())
    running = talk.ask(*ids(), after=root, sampling=LONG)
    with client.stream(running) as stream:
        until_it_runs(stream)
    until_unknown_or_free(talk, running, root)


def until_unknown_or_free(talk: Talk, running: Ask, root: Turn) -> None:
    """A rid is free again as soon as the server has noticed; while it runs it is taken."""
    again = talk.ask(*ids(), after=root, rid=running.rid)
    for _ in range(1_000):
        answer = talk.client.post("/generate", again.body)
        if answer.status_code == 200:
            talk.client.check(again.answered(answer.json()))
            return
        assert answer.status_code == 409, answer.text
    raise AssertionError("the request still runs")


def test_a_client_that_does_not_stream_and_leaves_is_noticed_too(talk: Talk, client: Client) -> None:
    root = talk.turn(*ids())
    running = talk.ask(*ids(), after=root, sampling=LONG)
    with pytest.raises(httpx.ReadTimeout):
        client.http.post("/generate", json=running.body, timeout=0.3)
    until_unknown_or_free(talk, running, root)


def test_all_that_run_are_aborted(talk: Talk, client: Client) -> None:
    first, second = talk.ask(*ids(), sampling=LONG), talk.ask(*ids(), sampling=LONG)
    with client.stream(first) as one, client.stream(second) as other:
        until_it_runs(one)
        until_it_runs(other)
        assert client.ok("/abort_request", {"abort_all": True}) == {}
        assert last_of(one, first).finish_reason["type"] == last_of(other, second).finish_reason["type"] == "abort"
    assert talk.known() == {}
    talk.turn(*ids())


def test_aborting_what_is_not_there_is_nothing(talk: Talk, client: Client) -> None:
    root = talk.turn(*ids())
    assert client.ok("/abort_request", {"rid": "never"}) == {}
    assert client.ok("/abort_request", {"rid": root.rid}) == {}
    talk.turn(*ids(), after=root)


def test_a_session_begins_anew(talk: Talk, client: Client) -> None:
    old = talk.turn(*ids())
    running = talk.ask(*ids(), after=old, sampling=LONG)
    with client.stream(running) as stream:
        until_it_runs(stream)
        new = talk.turn(*ids(), replace=True)
        assert last_of(stream, running).finish_reason["type"] == "abort"
    assert talk.known().keys() == {new.rid}
    talk.refused(404, *ids(), after=old)
    talk.turn(*ids(), after=new)


def test_nothing_goes_on_from_what_still_runs(talk: Talk, client: Client) -> None:
    running = talk.ask(*ids(), sampling=LONG)
    with client.stream(running) as stream:
        until_it_runs(stream)
        half = Turn(running, (), "", {}, 0, str(running.rid))
        answer = client.post("/generate", talk.ask(*ids(), after=half).body)
        assert answer.status_code in (400, 409), answer.text
        client.ok("/abort_request", {"rid": running.rid})
        assert last_of(stream, running).finish_reason["type"] == "abort"


# --- rids, sessions -------------------------------------------------------------------------------------------------------


def test_a_rid_is_taken_once(talk: Talk, client: Client) -> None:
    root = talk.turn(*ids())
    talk.refused(409, *ids(), rid=root.rid)
    talk.refused(409, *ids(), after=root, rid=root.rid)
    running = talk.ask(*ids(), after=root, sampling=LONG)
    with client.stream(running) as stream:
        until_it_runs(stream)
        talk.refused(409, *ids(), after=root, rid=running.rid)
        client.ok("/abort_request", {"rid": running.rid})
        assert last_of(stream, running).finish_reason["type"] == "abort"
    talk.turn(*ids(), after=root)


def test_an_acknowledged_request_is_not_made_again(talk: Talk, client: Client) -> None:
    """One whose answer was lost is sent again by its rid, and answered with the reply that there is."""
    root = talk.turn(*ids())
    ask = talk.ask(*ids(), after=root, sampling={**GREEDY, "temperature": 1.0})
    turn = client.send(ask)
    before = talk.known()
    again = client.send(ask)
    assert (again.output_ids, again.text, again.finish_reason) == (turn.output_ids, turn.text, turn.finish_reason)
    assert talk.known() == before
    talk.turn(*ids(), after=turn)


def test_a_session_is_closed_for_good(client: Client) -> None:
    talk = Talk(client, client.fresh("session"))
    turn = talk.turn(*ids())
    assert client.post("/open_session", {"session_id": talk.id}).status_code == 409
    assert client.ok("/close_session", {"session_id": talk.id}) == {}
    unknown = errors_of(client, client.fresh("never"), None)
    assert errors_of(client, talk.id, None) == errors_of(client, talk.id, turn.rid) == unknown
    again = Talk(client, talk.id)
    assert again.known() == {}
    again.refused(404, *ids(), after=turn)
    again.turn(*ids())


def errors_of(client: Client, session_id: str, rid: str | None) -> list[Any]:
    """Status and type of whatever can be asked of a session that is not there."""
    params = {"id": session_id} | ({} if rid is None else {"rid": rid})
    generate = {"input_ids": [1, 2], "sampling_params": dict(GREEDY), "session_params": params}
    answers = [
        client.post("/generate", generate),
        client.post("/generate", {**generate, "stream": True}),
        client.post("/close_session", {"session_id": session_id}),
        client.post(f"/sessions/{session_id}/fork", {}),
        client.http.get(f"/sessions/{session_id}"),
    ]
    assert {answer.status_code for answer in answers} == {404}
    return [(answer.json()["error"]["type"], answer.json()["error"]["code"]) for answer in answers]


def test_closing_a_session_aborts_what_runs_in_it(client: Client) -> None:
    talk = Talk(client)
    other = Talk(client)
    running, beside = talk.ask(*ids(), sampling=LONG), other.ask(*ids(), sampling={**LONG, "max_new_tokens": 60})
    with client.stream(running) as stream, client.stream(beside) as stays:
        until_it_runs(stream)
        client.ok("/close_session", {"session_id": talk.id})
        assert last_of(stream, running).finish_reason["type"] == "abort"
        client.check(last_of(stays, beside))


def test_an_unknown_rid_is_refused(talk: Talk, client: Client) -> None:
    root, elsewhere = talk.turn(*ids()), Talk(client).turn(*ids())
    talk.refused(404, *ids(), after=elsewhere)
    talk.turn(*ids(), after=root)


def test_a_fork_is_a_session_of_its_own(talk: Talk, client: Client) -> None:
    root = talk.turn(*ids())
    left, right = talk.turn(*ids(), after=root), talk.turn(*ids(), after=root)
    fork = talk.forked(left)
    assert fork.known().keys() == {root.rid, left.rid}
    fork.refused(404, *ids(), after=right)
    in_fork = fork.turn(*ids(), after=left)
    assert in_fork.cached_tokens >= (length(left.context) - 1) // PAGE * PAGE, "a fork copies no page"
    talk.refused(404, *ids(), after=in_fork)
    client.ok("/close_session", {"session_id": talk.id})
    fork.turn(*ids(), after=in_fork)
    fork.turn(*ids(), after=root)


# --- images ---------------------------------------------------------------------------------------------------------------


@sees_images
def test_an_image_is_appended_after_a_reply(talk: Talk) -> None:
    turn = talk.turn(*ids())
    for number in range(3):
        turn = talk.turn(*ids(2), *shown(picture(number)), *ids(2), after=turn)
    talk.turn(*ids(), after=turn)


@sees_images
def test_sibling_images_do_not_mix(talk: Talk) -> None:
    root = talk.turn(*shown(picture(1)), *ids(2))
    before, behind = ids(2), ids(2)
    siblings = [talk.turn(*before, *shown(picture(seed)), *behind, after=root) for seed in (2, 3, 2)]
    assert siblings[0].output_ids == siblings[2].output_ids != siblings[1].output_ids, "the pictures are seen"
    for each in siblings:
        talk.turn(*ids(2), *shown(picture(4)), after=each)
    talk.turn(*ids(), after=root)


@sees_images
def test_pictures_of_one_turn_stand_in_order(talk: Talk) -> None:
    one, other, tall = picture(1), picture(2), picture(3, 2, 4)
    behind = ids(2)
    turns = [talk.turn(*shown(*each), *behind) for each in ((one, other, tall), (other, one, tall), (tall, one, one))]
    assert len({turn.output_ids for turn in turns}) == 3


@sees_images
def test_an_offset_never_cuts_an_image(talk: Talk) -> None:
    root = talk.turn(*ids(4), *shown(picture(1)), *ids(3))  # the picture: tokens 5 to 8
    assert length(root.ask.prompt) == 13
    for inside in (6, 7, 8):
        body = talk.ask(*ids(2), after=root).body
        body["session_params"]["offset"] = inside
        assert talk.client.post("/generate", body).status_code == 400
    for beside in (4, 5, 9, 10, -1):
        talk.turn(*ids(2), after=root, offset=beside)


@sees_images
def test_each_pad_has_its_image(talk: Talk, client: Client) -> None:
    root = talk.turn(*ids())
    url = picture(1).url
    for prompt, images in (([5, IMAGE_PAD], []), ([5, 6], [url]), ([5, IMAGE_PAD], [url, url]), ([IMAGE_PAD, IMAGE_PAD], [url])):
        body = {**talk.ask(after=root).body, "input_ids": prompt, "image_data": images}
        assert client.post("/generate", body).status_code == 400
    assert talk.known().keys() == {root.rid}
    talk.turn(*shown(picture(1)), after=root)


@pytest.mark.parametrize("server", [TEXT], indirect=True)
def test_a_model_without_eyes_refuses_images(talk: Talk, client: Client) -> None:
    ask = talk.ask(*shown(picture(1)))
    assert client.post("/generate", ask.body).status_code == 400
    talk.turn(*ids())


# --- streaming ------------------------------------------------------------------------------------------------------------


@both_models
def test_a_streaming_session_goes_on_from_its_tip(client: Client) -> None:
    talk = Talk(client, streaming=True)
    tip = talk.turn(*ids())
    for _ in range(3):
        tip = talk.turn(*ids(), tip=tip)
    rids = list(talk.known())
    assert len(rids) == 4
    again = talk.turn(*ids(), after=tip)
    talk.turn(*ids(), tip=again)
    for how in ({"drop": True}, {"offset": 2}, {"replace": True}):
        talk.refused(400, *ids(), after=again, **how)


def test_a_streaming_session_runs_one_request_at_a_time(client: Client) -> None:
    talk = Talk(client, streaming=True)
    tip = talk.turn(*ids())
    running = talk.ask(*ids(), tip=tip, sampling=LONG)
    with client.stream(running) as stream:
        until_it_runs(stream)
        answer = client.post("/generate", talk.ask(*ids(), tip=tip).body)
        assert answer.status_code in (400, 409), answer.text
        client.ok("/abort_request", {"rid": running.rid})
        assert last_of(stream, running).finish_reason["type"] == "abort"
    after = talk.turn(*ids(), tip=tip)
    talk.turn(*ids(), tip=after)


@both_models
def test_a_streamed_answer_grows_to_what_a_whole_one_is(talk: Talk, client: Client) -> None:
    root = talk.turn(*ids())
    ask = talk.ask(*ids(), after=root, sampling=WARM)
    with client.stream(ask) as stream:
        parts = list(stream)
    for before, later in itertools.pairwise(parts):
        assert later["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert later["text"].startswith(before["text"])
        assert before["meta_info"]["finish_reason"] is None
    assert len({len(part["output_ids"]) for part in parts}) >= 8
    turn = client.check(ask.answered(parts[-1]))
    talk.turn(*ids(), after=turn)


# --- sampling -------------------------------------------------------------------------------------------------------------


def sampled(talk: Talk, prompt: Sequence[Part], **sampling: Any) -> Turn:
    return talk.turn(*prompt, sampling={"max_new_tokens": 8, **sampling})


def test_a_seed_repeats_itself(talk: Talk) -> None:
    prompt = ids()
    first, again, other = (sampled(talk, prompt, temperature=1.0, seed=seed) for seed in (5, 5, 6))
    assert first.output_ids == again.output_ids != other.output_ids
    nucleus = sampled(talk, prompt, temperature=1.0, seed=5, top_p=0.5)
    greedy = sampled(talk, prompt, temperature=0)
    assert sampled(talk, prompt, temperature=1.0, seed=5, top_k=1).output_ids == greedy.output_ids
    assert nucleus.output_ids != greedy.output_ids


def test_several_samples_of_one_prompt(talk: Talk, client: Client) -> None:
    root = talk.turn(*ids())
    ask = talk.ask(*ids(20), after=root, sampling={**WARM, "n": 3}, rid=None)
    rids = [client.fresh("rid") for _ in range(3)]
    answers = client.ok("/generate", {**ask.body, "rid": rids})
    turns = []
    for number, (rid, answer) in enumerate(zip(rids, answers, strict=True)):
        sampling = {**WARM, "seed": WARM["seed"] + number}  # each has the next one
        turns.append(client.check(attrs.evolve(ask, rid=rid, sampling=sampling).answered(answer)))
    assert len({turn.output_ids for turn in turns}) == 3
    for turn in turns:
        talk.turn(*ids(), after=turn)
    before = talk.known()
    for turn in turns:  # each was a request of its own, and is known as that
        assert client.send(turn.ask) == attrs.evolve(turn, cached_tokens=0)
    assert client.post("/generate", {**ask.body, "rid": rids[:2]}).status_code == 400
    assert client.post("/generate", {**ask.body, "rid": [*rids[:2], client.fresh("rid")], "input_ids": [1]}).status_code == 409
    assert talk.known() == before


def test_a_reply_stops_where_it_is_told(talk: Talk) -> None:
    prompt = ids()
    whole = sampled(talk, prompt, temperature=0)
    token = whole.output_ids[4]
    first = whole.output_ids.index(token)
    stopped = sampled(talk, prompt, temperature=0, stop_token_ids=[token])
    assert stopped.output_ids == whole.output_ids[: first + 1]
    assert stopped.finish_reason == {"type": "stop", "matched": token}
    by_string = sampled(talk, prompt, temperature=0, stop=[whole.text[-3:], "never that"])
    assert by_string.finish_reason == {"type": "stop", "matched": whole.text[-3:]}
    assert by_string.text == whole.text[: whole.text.index(whole.text[-3:])]
    assert by_string.output_ids == whole.output_ids[: len(by_string.output_ids)]
    for each in (stopped, by_string):
        talk.turn(*ids(), after=each)


# --- many at once, restarts ---------------------------------------------------------------------------------------------


def test_requests_at_once_do_not_see_each_other(talk: Talk, client: Client) -> None:
    root = talk.turn(*ids(40))
    asks = [talk.ask(*ids(3 + 5 * number), after=root, sampling={**WARM, "seed": number}) for number in range(6)]
    turns: dict[int, Turn] = {}
    threads = [threading.Thread(target=lambda n=n, ask=ask: turns.update({n: client.send(ask)})) for n, ask in enumerate(asks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(turns) == 6
    for turn in turns.values():
        client.check(turn)


@sees_images
def test_what_was_acknowledged_survives_a_kill(talk: Talk, client: Client, server: Server) -> None:
    root = talk.turn(*shown(picture(1)), *ids(2))
    left, right = talk.turn(*ids(), after=root), talk.turn(*ids(), after=root, sampling=WARM)
    streaming = Talk(client, streaming=True)
    tip = streaming.turn(*ids())
    known = talk.known()
    server.kill()
    server.start()
    client.reconnect()
    assert talk.known() == known
    assert client.send(left.ask).output_ids == left.output_ids, "its answer may have been lost"
    assert talk.known() == known
    for turn in (left, right, root):
        talk.turn(*ids(2), *shown(picture(2)), after=turn)
    talk.turn(after=right, sampling=WARM)
    streaming.turn(*ids(), tip=tip)
