"""The mini scheduler's front with an engine that does what the test says, when it says so: races, retries, and what is left.

A reply is committed, and then named by its head. Everything that can come between those two, or before them, is put there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from mini_scheduler import native
from mini_scheduler.engine import Engine, QueueFull
from mini_scheduler.failures import Refused
from mini_scheduler.generations import TIP, Answer, Generations, Wish
from mini_scheduler.model import Model
from mini_scheduler.requests import Output, Request, Sampling
from mini_scheduler.sessions import Sessions, session_store_id
from mini_scheduler.streams import EventStream, whole
from starlette.requests import Request as HttpRequest

from sessiontree import (
    LimitExceeded,
    MediaItem,
    MediaSpanError,
    NameTaken,
    Node,
    OutOfRange,
    SessionExists,
    SessionStore,
    StoreFailed,
    UnknownHead,
    UnknownNode,
    UnknownSession,
    Unsupported,
)
from sessiontree.aio import AsyncStore
from sessiontree.positions import scheme

RULE = scheme("qwen2_5_vl@hf5", image_token_id=151655, vision_start_token_id=151652, spatial_merge_size=2)
MODEL = cast(Model, SimpleNamespace(scheme=RULE, fingerprint="by hand"))
ONE: Mapping[str, Wish] = {"one": Wish(Sampling())}


class HandEngine:
    """Runs nothing. ``deaf``: does not hear of aborts until it is told to."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.aborted: dict[str, str] = {}
        self.heard: list[Request] = []  # what was to be aborted
        self.full = False
        self.deaf = False

    def submit(self, requests: Sequence[Request]) -> None:
        if self.full:
            raise QueueFull("full", value=1, limit=0)
        self.requests |= {request.draft.key: request for request in requests}

    def abort(self, request: Request, reason: str = "aborted") -> None:
        self.aborted[request.draft.key] = reason
        self.heard.append(request)
        if not self.deaf:
            self.end(request.draft.key)

    def end(self, rid: str) -> None:
        request = self.requests.pop(rid, None)
        if request is not None:
            request.draft.abort()
            request.tell(Output(finish_reason="abort", reason=self.aborted[rid]))

    def commit(self, rid: str, *token_ids: int) -> Node:
        """A reply, told of as the engine does."""
        request = self.requests.pop(rid)
        request.draft.extend(token_ids)
        node = request.draft.commit("length", metadata=request.metadata | {"text": "text"})
        request.tell(Output(token_ids, "text", "length", node=node))
        return node


class Front:
    """Sessions over a hand-run engine, and a client of theirs."""

    def __init__(self, store: AsyncStore) -> None:
        self.store = store
        self.engine = HandEngine()
        self.generations = Generations(store, cast(Engine, self.engine))
        self.sessions = Sessions(store, MODEL, self.generations, 200)

    async def open(self, name: str = "s", *, streaming: bool = False) -> None:
        await self.sessions.open("t", name, streaming=streaming, timeout=None)

    async def ask(
        self,
        rids: str | Sequence[str],
        token_ids: Sequence[int] = (1, 2),
        /,
        *,
        name: str = "s",
        media: Sequence[MediaItem] = (),
        again: bool = True,
        **params: Any,
    ) -> Answer:
        wishes = {rid: Wish(Sampling(), again=again) for rid in ([rids] if isinstance(rids, str) else rids)}
        async with self.sessions.using(session_store_id("t", name)) as live:
            return await self.sessions.generate(live, params, token_ids, media, wishes)

    async def turn(self, name: str, token_ids: Sequence[int] = (1, 2), /, **params: Any) -> Node:
        """One that is asked, generated and answered."""
        answer = await self.ask(name, token_ids, **params)
        node = self.engine.commit(name, 7, 8)
        (generation,) = await answer.whole()
        assert generation.token_ids == [7, 8]
        return node

    async def heads(self, name: str = "s") -> dict[str, Node]:
        return await (await self.store.get(session_store_id("t", name))).heads()

    async def size(self, name: str = "s") -> int:
        return len((await self.store.get(session_store_id("t", name))).session.tree)

    def check_idle(self) -> None:
        """Nothing runs, and no session is held that the store may want to put away."""
        assert not self.engine.requests and not self.sessions._lives


@asynccontextmanager
async def front(path: Path | None = None) -> AsyncIterator[Front]:
    store = AsyncStore(SessionStore.in_memory()) if path is None else await AsyncStore.open(path)
    async with store:
        yield Front(store)


def play(scene: Callable[[Front], Awaitable[None]], path: Path | None = None) -> None:
    async def scenes() -> None:
        async with asyncio.timeout(60), front(path) as made:
            await scene(made)
            made.check_idle()

    asyncio.run(scenes())


async def ends(answer: Answer) -> str:
    (generation,) = await answer.whole()
    assert generation.last is not None
    return f"{generation.last.finish_reason} {generation.last.reason}".strip()


# --- one rid, two requests ------------------------------------------------------------------------------------------------
def test_of_two_requests_at_once_one_has_the_rid() -> None:
    async def scene(front: Front) -> None:
        await front.open()
        found = await asyncio.gather(*(front.ask("one") for _ in range(5)), return_exceptions=True)
        (answer,) = (each for each in found if isinstance(each, Answer))
        assert sum(isinstance(each, NameTaken) for each in found) == 4
        front.engine.commit("one", 7)
        assert await ends(answer) == "length"
        assert set(await front.heads()) == {"one"}

    play(scene)


def test_a_rid_of_other_content_is_taken_and_nothing_changes() -> None:
    async def scene(front: Front) -> None:
        await front.open()
        node = await front.turn("one")
        with pytest.raises(NameTaken):
            await front.ask("one", (3,))
        with pytest.raises(NameTaken):
            await front.ask("one", rid="one")
        assert await front.heads() == {"one": node}

    play(scene)


@pytest.mark.parametrize("streaming", [False, True])
def test_an_answer_that_was_lost_is_given_again(streaming: bool) -> None:
    async def scene(front: Front) -> None:
        await front.open(streaming=streaming)
        first = await front.turn("zero")
        node = await front.turn("one", **({} if streaming else {"rid": "zero"}))
        await front.turn("two", (5,), rid=None if streaming else "one")
        size, heads = await front.size(), await front.heads()
        answer = await front.ask("one", rid=None if streaming else "zero")
        (generation,) = await answer.whole()
        assert (generation.token_ids, generation.text, generation.prompt) == ([7, 8], "text", node.parent)
        assert not front.engine.requests and (await front.size(), await front.heads()) == (size, heads)
        assert node.parent is not None and node.parent.parent == first

    play(scene)


def test_one_that_may_not_be_known_is_made_anew() -> None:
    """A rid that the server made is asked for by nobody else."""

    async def scene(front: Front) -> None:
        await front.open()
        answer = await front.ask("one", again=False)
        assert front.engine.requests.keys() == {"one"}
        front.engine.commit("one", 7)
        assert await ends(answer) == "length"

    play(scene)


def test_of_several_replies_only_those_that_lack_are_made() -> None:
    async def scene(front: Front) -> None:
        await front.open()
        await front.turn("one")
        answer = await front.ask(["one", "two"])
        assert front.engine.requests.keys() == {"two"}
        front.engine.commit("two", 9)
        assert [generation.token_ids for generation in await answer.whole()] == [[7, 8], [9]]
        assert set(await front.heads()) == {"one", "two"}

    play(scene)


# --- between commit and answer ----------------------------------------------------------------------------------------------
def test_a_reply_is_named_though_its_client_has_gone() -> None:
    async def scene(front: Front) -> None:
        await front.open()
        answer = await front.ask("one")
        node = front.engine.commit("one", 7)
        answer.abort("the client left")  # in between, and nobody reads the answer
        await answer.generations[0].settled.wait()
        assert await front.heads() == {"one": node}

    play(scene)


def test_what_is_told_is_on_disk_and_named(tmp_path: Path) -> None:
    async def scene(front: Front) -> None:
        await front.open()
        node = await front.turn("one")
        with SessionStore.open(tmp_path / "store", read_only=True) as other:
            assert other.get("t/session/s").head("one").node == node

    play(scene, tmp_path / "store")


@pytest.mark.parametrize("named", [False, True], ids=["not named", "named, the tip not moved"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_server_that_died_between_commit_and_answer_answers_all_the_same(tmp_path: Path, streaming: bool, named: bool) -> None:
    path = tmp_path / "store"
    made: list[Node] = []

    async def first_life(front: Front) -> None:
        await front.open(streaming=streaming)
        await front.turn("zero")
        await front.ask("one", (3,), rid=None if streaming else "zero")
        request = front.engine.requests.pop("one")
        request.tell = lambda output: None  # what comes after the commit never happens
        front.engine.requests["one"] = request
        made.append(front.engine.commit("one", 9, 9))
        if named:
            session = await front.store.get("t/session/s")
            await session.set_head("one", made[0], expected=None)

    async def first() -> None:
        async with asyncio.timeout(60), front(path) as life:
            await first_life(life)

    asyncio.run(first())

    async def second_life(front: Front) -> None:
        answer = await front.ask("one", (3,), rid=None if streaming else "zero")
        (generation,) = await answer.whole()
        assert generation.token_ids == [9, 9] and not front.engine.requests
        heads = await front.heads()
        assert heads["one"] == made[0]
        if streaming:
            assert heads[TIP] == made[0]
        await front.turn("two", rid=None if streaming else "one")

    play(second_life, path)


def test_a_reply_that_the_disk_refuses_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(front: Front) -> None:
        await front.open()

        async def refuse(_: AsyncStore) -> None:
            raise StoreFailed("no space")

        answer = await front.ask("one")
        monkeypatch.setattr(AsyncStore, "flush", refuse)
        front.engine.commit("one", 7)
        (generation,) = await answer.whole()
        assert generation.last is not None and generation.last.finish_reason == "error"
        assert isinstance(generation.last.error, StoreFailed)
        assert generation.token_ids == [] and generation.text == ""

    play(scene)


# --- what goes on while something runs ----------------------------------------------------------------------------------------
def test_replace_aborts_what_runs_and_stands_beside_it() -> None:
    async def scene(front: Front) -> None:
        await front.open()
        running = await front.ask("one", (1,))
        with pytest.raises(Unsupported):
            await front.ask("two", (2,), rid="one")
        instead = await front.ask("two", (2,), rid="one", replace=True)
        assert await ends(running) == "abort replaced by another request"
        node = front.engine.commit("two", 7)
        assert await ends(instead) == "length"
        assert node.input_ids().tolist() == [1, 2, 7], "its prompt stays, its reply does not"
        assert await front.heads() == {"two": node}

    play(scene)


def test_one_that_ends_before_it_is_replaced_stays() -> None:
    async def scene(front: Front) -> None:
        await front.open()
        front.engine.deaf = True
        running = await front.ask("one", (1,))
        replacing = asyncio.create_task(front.ask("two", (2,), rid="one", replace=True))
        while "one" not in front.engine.aborted:
            await asyncio.sleep(0)
        assert not replacing.done(), "it waits for what it replaces"
        node = front.engine.commit("one", 5)
        assert await ends(running) == "length"
        await replacing
        front.engine.commit("two", 7)
        assert await ends(replacing.result()) == "length"
        assert (await front.heads())["one"] == node

    play(scene)


def test_beginning_anew_forgets_what_was_and_what_ran() -> None:
    async def scene(front: Front) -> None:
        await front.open()
        await front.turn("one")
        running = await front.ask("two", rid="one")
        anew = await front.ask("three", (4,), replace=True)
        assert (await ends(running)).startswith("abort")
        node = front.engine.commit("three", 7)
        assert await ends(anew) == "length"
        assert await front.heads() == {"three": node} and node.start == 1
        with pytest.raises(UnknownNode):
            await front.ask("four", rid="one")

    play(scene)


def test_a_streaming_session_runs_one_at_a_time_from_its_tip() -> None:
    async def scene(front: Front) -> None:
        await front.open(streaming=True)
        found = await asyncio.gather(*(front.ask(rid) for rid in ("one", "two")), return_exceptions=True)
        assert sum(isinstance(each, Unsupported) for each in found) == 1
        (answer,) = (each for each in found if isinstance(each, Answer))
        front.engine.commit("one", 7)
        assert await ends(answer) == "length"
        node = await front.turn("three")
        assert node.input_ids().tolist() == [1, 2, 7, 1, 2, 7, 8]
        back = await front.turn("four", rid="one")
        assert back.input_ids().tolist() == [1, 2, 7, 1, 2, 7, 8] and back != node
        assert (await front.heads())[TIP] == back
        with pytest.raises(NameTaken):
            await front.ask(TIP)
        with pytest.raises(Unsupported):
            await front.ask(["five", "six"])

    play(scene)


def test_closing_aborts_what_runs_and_its_id_is_free_again() -> None:
    async def scene(front: Front) -> None:
        await front.open()
        await front.turn("zero")
        front.engine.deaf = True
        running = await front.ask("one")
        closing = asyncio.create_task(front.sessions.close("t/session/s"))
        while "one" not in front.engine.aborted:
            await asyncio.sleep(0)
        with pytest.raises(UnknownSession):
            await front.ask("two")
        with pytest.raises(SessionExists):
            await front.open()
        front.engine.end("one")
        await closing
        assert await ends(running) == "abort the session was closed"
        with pytest.raises(UnknownSession):
            await front.ask("two")
        with pytest.raises(UnknownSession):
            await front.sessions.close("t/session/s")
        await front.open()
        assert await front.heads() == {}
        await front.turn("one")

    play(scene)


def test_who_waited_for_a_session_that_was_closed_finds_none() -> None:
    async def scene(front: Front) -> None:
        await front.open()
        front.engine.deaf = True
        running = await front.ask("one")
        async with front.sessions.using("t/session/s") as live:
            closing = asyncio.create_task(front.sessions.close("t/session/s"))
            waiting = asyncio.create_task(front.sessions.generate(live, {}, [1], [], ONE))
            while "one" not in front.engine.aborted:
                await asyncio.sleep(0)
            front.engine.end("one")
            await closing
            with pytest.raises(UnknownSession):
                await waiting
            await front.open()  # another of that id is no concern of who still has the old one
            await front.turn("one")
        assert (await ends(running)).startswith("abort")

    play(scene)


def test_a_fork_has_what_is_finished_and_knows_its_rids() -> None:
    async def scene(front: Front) -> None:
        await front.open()
        one = await front.turn("one")
        two = await front.turn("two", rid="one")
        beside = await front.turn("beside", (5,), rid="one")
        running = await front.ask("three", rid="two")
        assert await front.sessions.fork("t", "s", "two", "f") == ("f", "two", two.stop)
        assert await front.heads("f") == {"one": one, "two": two}
        assert (await front.sessions.fork("t", "s", None, "last"))[1:] == ("beside", beside.stop)
        with pytest.raises(UnknownHead):
            await front.sessions.fork("t", "s", "three", "g")
        with pytest.raises(SessionExists):
            await front.sessions.fork("t", "s", "two", "f")
        front.engine.commit("three", 7)
        assert await ends(running) == "length"
        await front.turn("three", rid="two", name="f")
        await front.sessions.close("t/session/s")
        assert (await front.turn("four", rid="three", name="f")).input_ids().tolist()[: two.stop] == two.input_ids().tolist()

    play(scene)


def test_a_fork_of_a_streaming_session_goes_on_from_there() -> None:
    async def scene(front: Front) -> None:
        await front.open(streaming=True)
        one = await front.turn("one")
        await front.turn("two")
        await front.sessions.fork("t", "s", "one", "f")
        node = await front.turn("three", name="f")
        assert node.parent is not None and node.parent.parent == one
        assert await front.sessions.describe("t/session/f") == (
            True,
            [
                {"rid": "one", "parent": None, "prompt_tokens": 2, "completion_tokens": 2, "finish_reason": "length"},
                {"rid": "three", "parent": "one", "prompt_tokens": 6, "completion_tokens": 2, "finish_reason": "length"},
            ],
        )

    play(scene)


# --- what is refused ------------------------------------------------------------------------------------------------------------
def test_where_the_queue_is_full_nothing_is_left() -> None:
    async def scene(front: Front) -> None:
        await front.open()
        front.engine.full = True
        with pytest.raises(QueueFull):
            await front.ask(["one", "two"])
        front.engine.full = False
        assert front.store.store.usage().draft_bytes == 0
        await front.turn("one")

    play(scene)


@pytest.mark.parametrize("params", [{"replace": True}, {"replace": True, "rid": "running"}], ids=["anew", "one"])
def test_a_replacement_that_finds_the_queue_full_changes_nothing(params: dict[str, Any]) -> None:
    async def scene(front: Front) -> None:
        await front.open()
        await front.turn("done")
        running = await front.ask("running", (3,), rid="done")
        front.engine.full = True
        with pytest.raises(QueueFull):
            await front.ask("new", (9,), **params)
        assert (await front.heads()).keys() == {"done"} and not front.engine.aborted
        front.engine.full = False
        front.engine.commit("running", 7)
        assert [generation.token_ids for generation in await running.whole()] == [[7]]
        assert (await front.heads()).keys() == {"done", "running"}

    play(scene)


def test_a_reply_that_ends_while_others_make_way_for_it_is_not_forgotten() -> None:
    async def scene(front: Front) -> None:
        await front.open()
        await front.turn("old")
        front.engine.deaf = True
        running = await front.ask("running", (3,), rid="old")
        new = asyncio.create_task(front.ask("new", (9,), replace=True))
        while "new" not in front.engine.requests:
            await asyncio.sleep(0)
        front.engine.commit("new", 7)
        while "new" not in await front.heads():
            await asyncio.sleep(0)
        front.engine.end("running")
        await (await new).whole()
        await running.whole()
        assert (await front.heads()).keys() == {"new"}

    play(scene)


def test_a_retry_with_other_sampling_is_another_request() -> None:
    async def scene(front: Front) -> None:
        await front.open()
        node = await front.turn("one")
        again = await front.ask("one")
        assert [generation.token_ids for generation in await again.whole()] == [node.token_ids.tolist()]
        for other in (Wish(Sampling(max_new_tokens=9), again=True), Wish(Sampling(), salt="x", again=True)):
            async with front.sessions.using(session_store_id("t", "s")) as live:
                with pytest.raises(NameTaken, match="other sampling_params"):
                    await front.sessions.generate(live, {}, (1, 2), (), {"one": other})

    play(scene)


def test_a_rid_that_is_taken_leaves_nothing_of_the_new_prompt() -> None:
    async def scene(front: Front) -> None:
        await front.open()
        await front.turn("one")
        size = await front.size()
        for tokens in ((1, 3), (1,), (1, 2, 3)):
            with pytest.raises(NameTaken):
                await front.ask("one", tokens)
        assert await front.size() == size

    play(scene)


def test_turns_that_cannot_be() -> None:
    async def scene(front: Front) -> None:
        await front.open()
        with pytest.raises(OutOfRange):
            await front.ask("one", ())
        with pytest.raises(LimitExceeded):
            await front.ask("one", range(200 - 127))  # and 128 new ones
        assert await front.size() == 1
        picture = MediaItem("image", bytes(32), [(1, 4)], grid_thw=(1, 4, 4))
        node = await front.turn("one", (151652, 151655, 151655, 151655, 151655, 151653), media=[picture])
        for offset, error in ((3, MediaSpanError), (9, OutOfRange), (-9, OutOfRange)):
            with pytest.raises(error):
                await front.ask("two", rid="one", offset=offset)
        assert await front.heads() == {"one": node}
        empty = await front.turn("two", (), rid="one")
        assert empty.input_ids().tolist() == [*node.input_ids().tolist(), 7, 8]
        cut = await front.turn("three", (4,), rid="one", offset=-1)
        assert cut.input_ids().tolist() == [*node.input_ids(0, node.stop - 1).tolist(), 4, 7, 8]
        without = await front.turn("four", (4,), rid="one", drop_previous_output=True)
        assert without.input_ids().tolist() == [*node.input_ids(0, node.start).tolist(), 4, 7, 8]

    play(scene)


def test_aborts_reach_the_tenants_own_requests_alone() -> None:
    async def scene(front: Front) -> None:
        await front.open()
        await front.sessions.open("other", "s", streaming=False, timeout=None)
        mine = [await front.ask("one"), await front.ask("two")]
        async with front.sessions.using("other/session/s") as live:
            theirs = await front.sessions.generate(live, {}, [1], [], {"one": Wish(Sampling())})
        requests = [answer.generations[0].request for answer in (*mine, theirs)]
        front.engine.deaf = True
        front.sessions.abort("t", "one", everything=False)
        assert front.engine.heard == requests[:1]
        front.sessions.abort("t", None, everything=True)
        assert front.engine.heard == [requests[0], *requests[:2]]
        for request in requests:
            request.draft.abort()
            request.tell(Output(finish_reason="abort"))
        front.engine.requests.clear()
        for answer in (*mine, theirs):
            await answer.whole()

    play(scene)


async def _never() -> Any:
    await asyncio.Event().wait()


def test_an_answer_that_takes_too_long_is_given_up() -> None:
    async def scene(front: Front) -> None:
        await front.open()
        answer = await front.ask("one")
        with pytest.raises(Refused) as refused:
            await whole(HttpRequest({"type": "http"}, _never), answer, 0.01)
        assert (refused.value.status, front.engine.aborted) == (504, {"one": "timed out"})
        assert [generation.last.reason for generation in await answer.whole() if generation.last] == ["timed out"]

        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        answer = await front.ask("two")
        await EventStream(answer, native.events(answer), 0.01)({"type": "http"}, _never, send)
        assert b'"code":"timeout"' in sent[-2]["body"]
        assert front.engine.aborted["two"] == "timed out" and sent[-1]["more_body"] is False
        await answer.whole()

    play(scene)


def test_a_client_that_leaves_gives_its_request_up() -> None:
    async def left() -> Any:
        return {"type": "http.disconnect"}

    async def scene(front: Front) -> None:
        await front.open()
        for rid, stream in (("one", False), ("two", True)):
            answer = await front.ask(rid)
            if stream:
                await EventStream(answer, native.events(answer), 60)({"type": "http"}, left, _sink)
            else:
                with pytest.raises(Refused):
                    await whole(HttpRequest({"type": "http"}, left), answer, 60)
            assert front.engine.aborted[rid] == "the client left"
            await answer.whole()

    play(scene)


async def _sink(message: Any) -> None: ...


def test_idle_sessions_are_closed_when_their_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(front: Front) -> None:
        now = [100.0]
        monkeypatch.setattr("mini_scheduler.sessions.time", SimpleNamespace(monotonic=lambda: now[0]))
        await front.sessions.open("t", "s", streaming=False, timeout=10.0)
        await front.open("forever")
        now[0] += 9
        await front.turn("one")
        now[0] += 9
        await front.sessions.close_idle()
        running = await front.ask("two", rid="one")
        now[0] += 100
        await front.sessions.close_idle()  # something runs
        front.engine.commit("two", 7)
        assert await ends(running) == "length"
        now[0] += 10
        await front.sessions.close_idle()
        with pytest.raises(UnknownSession):
            await front.ask("three")
        await front.turn("one", name="forever")

    play(scene)
