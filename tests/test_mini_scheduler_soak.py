"""32 clients of the mini scheduler who do anything, while answers get lost and the server is killed; and what is left at the end.

What was acknowledged is there: the server lists it, and what goes on from it is what the client's own record gives. What was never
acknowledged is there whole or not at all, and is given to who asks for it again by its rid. Every output is that of its whole
history, asked again under another cache salt.

Choices come from SESSIONTREE_SEED (0), the client and the number of its step, so a seed repeats them as far as the moments of the
kills allow. SESSIONTREE_SOAK: ten minutes instead of one, and clients that take no time to think.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncGenerator, Awaitable, Hashable, Iterable, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import attrs
import httpx

from sessiontree.fsck import fsck
from tests.mini_client import Ask, Part, Turn, cut, data_of, length, picture, shown
from tests.mini_server import PATIENCE, ForkedServer, Server

SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"
SEED = os.environ.get("SESSIONTREE_SEED", "0")
SECONDS = 600.0 if SOAK else 60.0
KILLS = 20 if SOAK else 3
THINKS = 0.0 if SOAK else 2.0  # seconds at most between two steps of a client: every turn is looked at in the end
CLIENTS = 32
MODEL = "tiny-qwen2.5-vl"
# While it is loaded, pages are few. Who looks at it all wants large batches.
LOADED = ("--model", MODEL, "--num-pages", 64)
LOOKED_AT = ("--model", MODEL, "--num-pages", 1024, "--max-running", 32, "--max-batch-tokens", 256)
DEEPEST = 250  # tokens of a context that is still gone on from
LOST = 0.2  # of the answers to turns get lost on their way
WHAT = ("turn", "stream", "samples", "leave", "abort", "fork", "close", "respond")
WEIGHTS = (40, 20, 8, 8, 8, 5, 2, 9)


class World:
    """The server, and whether it is up."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.up = asyncio.Event()
        self.up.set()
        self.http = httpx.AsyncClient(timeout=PATIENCE, limits=httpx.Limits(max_connections=None))
        self.replays: dict[Hashable, asyncio.Task[Turn]] = {}

    async def post(self, path: str, body: Any) -> httpx.Response:
        """Raises TransportError where the server dies meanwhile: nobody knows what became of it."""
        await self.up.wait()
        return await self.http.post(f"{self.server.url}{path}", json=body)

    async def ok(self, path: str, body: Any) -> Any:
        answer = await self.post(path, body)
        assert answer.status_code == 200, (path, answer.status_code, answer.text)
        return answer.json()

    async def get(self, path: str) -> httpx.Response:
        return await self.http.get(f"{self.server.url}{path}")

    async def until_done(self, path: str, body: Any, *, done: int) -> None:
        """Ask until it is answered; an answer ``done`` says that it was done before, and that answer was lost."""
        lost = False
        while True:
            try:
                answer = await self.post(path, body)
            except httpx.TransportError:
                lost = True
                await asyncio.sleep(0.05)
                continue
            assert answer.status_code == 200 or (lost and answer.status_code == done), (path, answer.status_code, answer.text)
            return

    async def kill_now_and_then(self) -> None:
        for _ in range(KILLS):
            await asyncio.sleep(SECONDS / (KILLS + 1))
            self.up.clear()
            await asyncio.to_thread(self.server.kill)
            await asyncio.to_thread(self.server.start)
            self.up.set()


class Speaker:
    """One client. ``turns``: what was acknowledged, by session; ``unsure``: what may be there, or not."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.name = f"client-{number}"
        self.steps = 0
        self.turns: dict[str, dict[str, Turn]] = {}
        self.unsure: dict[str, dict[str, Ask]] = {}
        self.responses: dict[str, str] = {}  # texts, by id
        self.count = 0

    async def run(self, stop: float) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < stop:
            self.rng = random.Random(f"{SEED}/{self.name}/{self.steps}")
            self.steps += 1
            with suppress(httpx.TransportError):
                await self.step()
            await asyncio.sleep(self.rng.random() * THINKS)

    async def step(self) -> None:
        rng = self.rng
        if not self.turns or rng.random() < 0.05:
            await self.open()
        session = rng.choice(list(self.turns)[-3:])
        await self.ask_again(session)
        match rng.choices(WHAT, WEIGHTS)[0]:
            case "turn":
                ask = self.ask(session)
                self.acknowledged(session, ask, await self.said(session, ask))
            case "stream":
                ask = self.ask(session)
                self.unsure[session][str(ask.rid)] = ask
                async with aclosing(self.stream(ask)) as events:
                    async for event in events:
                        last = event
                self.acknowledged(session, ask, last)
            case "samples":
                await self.samples(session)
            case "leave":
                ask = self.ask(session, max_new_tokens=rng.randrange(1, 30))
                self.unsure[session][str(ask.rid)] = ask
                left = rng.randrange(5)
                async with aclosing(self.stream(ask)) as events:
                    async for _ in events:
                        left -= 1
                        if left < 0:
                            break
            case "abort":
                ask = self.ask(session, max_new_tokens=30)
                self.unsure[session][str(ask.rid)] = ask
                asked = asyncio.ensure_future(self.world.ok("/generate", ask.body))
                await asyncio.sleep(rng.random() / 10)
                await asyncio.gather(asked, self.world.ok("/abort_request", {"rid": ask.rid}), return_exceptions=True)
                answer = await asked
                if answer["meta_info"]["finish_reason"]["type"] != "abort":
                    self.acknowledged(session, ask, answer)
                else:
                    del self.unsure[session][str(ask.rid)]  # an abort that was told is final: nothing may be there
            case "fork":
                await self.fork(session)
            case "close":
                del self.turns[session]
                del self.unsure[session]
                await self.world.until_done("/close_session", {"session_id": session}, done=404)
            case "respond":
                await self.respond()

    # --- what it asks -----------------------------------------------------------------------------------------------------

    async def open(self) -> str:
        session = f"{self.name}-{self.steps}"
        await self.world.until_done("/open_session", {"session_id": session}, done=409)
        self.turns[session], self.unsure[session] = {}, {}
        return session

    def ask(self, session: str, max_new_tokens: int = 0) -> Ask:
        """A request somewhere in the session: mostly behind the last turn, or from any turn, or from nothing."""
        rng = self.rng
        sampling: dict[str, Any] = {"max_new_tokens": max_new_tokens or rng.randrange(1, 7), "temperature": 0}
        if rng.random() < 0.3:
            sampling |= {"temperature": 1.0, "seed": rng.randrange(1_000)}
        parts: tuple[Part, ...] = tuple(rng.randrange(150_000) for _ in range(rng.randrange(1, 20)))
        if rng.random() < 0.15:
            parts += (*shown(picture(rng.randrange(6))), rng.randrange(1_000))
        turns = [turn for turn in self.turns[session].values() if length(turn.context) < DEEPEST]
        if not turns or rng.random() < 0.05:
            return Ask((), parts, sampling, self.rid(), {"id": session})
        turn = turns[-1] if rng.random() < 0.7 else rng.choice(turns)
        context, how = turn.context, rng.random()
        params: dict[str, Any] = {"id": session, "rid": turn.rid}
        if how < 0.1:
            context = turn.ask.prompt
            params["drop_previous_output"] = True
        elif how < 0.2 and len(turn.output_ids) > 1:
            context = cut(context, length(context) - 1)
            params["offset"] = -1
        elif how < 0.25:
            params["replace"] = True
        elif how < 0.3:
            parts = ()
        return Ask(context, parts, sampling, self.rid(), params)

    def rid(self) -> str:
        self.count += 1
        return f"{self.name}-{self.steps}-{self.count}"

    async def said(self, session: str, ask: Ask) -> Any:
        self.unsure[session][str(ask.rid)] = ask
        return await self.told(ask.body)

    async def told(self, body: Any) -> Any:
        """The answer to a request, unless it gets lost: then the server has acknowledged it, and its client does not know."""
        answer = await self.world.ok("/generate", body)
        if self.rng.random() < LOST:
            raise httpx.ReadError("lost")
        return answer

    def acknowledged(self, session: str, ask: Ask, answer: Any) -> None:
        turn = ask.answered(answer)
        assert turn.finish_reason["type"] in ("stop", "length"), turn
        self.turns[session][turn.rid] = turn
        self.unsure[session].pop(turn.rid, None)

    async def stream(self, ask: Ask) -> AsyncGenerator[Any, None]:
        await self.world.up.wait()
        body = {**ask.body, "stream": True}
        async with self.world.http.stream("POST", f"{self.world.server.url}/generate", json=body) as response:
            assert response.status_code == 200, (await response.aread()).decode()
            async for line in response.aiter_lines():
                said = data_of(line)
                if said == "[DONE]":
                    return
                if said:
                    yield json.loads(said)
        raise httpx.ReadError("cut off")

    async def samples(self, session: str) -> None:
        """Two replies at once; each is recorded as the request that would be answered with it alone."""
        ask = self.ask(session)
        asks = [attrs.evolve(ask, sampling=sampling, rid=self.rid()) for sampling in of_each(ask.sampling, 2)]
        self.unsure[session] |= {str(each.rid): each for each in asks}
        body = {**ask.body, "sampling_params": {**ask.sampling, "n": 2}, "rid": [each.rid for each in asks]}
        for each, answer in zip(asks, await self.told(body), strict=True):
            self.acknowledged(session, each, answer)

    async def ask_again(self, session: str) -> None:
        """What was lost is asked again, by its rid: it is done now, or it had been done, or it runs because nobody has noticed."""
        for rid, ask in list(self.unsure[session].items()):
            if self.rng.random() < 0.5 and ask.params is not None and not ask.params.get("replace"):
                answer = await self.world.post("/generate", ask.body)
                if answer.status_code == 200:
                    self.acknowledged(session, ask, answer.json())
                else:
                    assert answer.status_code == 409, answer.text
                    assert answer.json()["error"]["message"] == f"request {rid!r} is running"

    async def fork(self, session: str) -> None:
        if not self.turns[session]:
            return
        turn = self.rng.choice(list(self.turns[session].values()))
        name = f"{session}-fork-{self.steps}"
        body = {"rid": turn.rid, "session_id": name}
        await self.world.until_done(f"/sessions/{session}/fork", body, done=409)
        self.turns[name], self.unsure[name] = {turn.rid: turn}, {}

    async def respond(self) -> None:
        said = f"{self.name} {self.steps}"
        body: dict[str, Any] = {"model": MODEL, "input": said, "temperature": 0, "max_output_tokens": 4}
        if self.responses and self.rng.random() < 0.7:
            body["previous_response_id"] = self.rng.choice(list(self.responses)[-4:])
        answer = await self.world.ok("/v1/responses", body)
        self.responses[answer["id"]] = text_of(answer)

    # --- what is left -------------------------------------------------------------------------------------------------------

    async def check(self) -> int:
        """Look at all that it was told; how many turns that is."""
        count = 0
        for session, turns in self.turns.items():
            answer = await self.world.get(f"/sessions/{session}")
            assert answer.status_code == 200, answer.text
            known = {each["rid"]: each for each in answer.json()["requests"]}
            assert turns.keys() <= known.keys(), "acknowledged, and not there"
            forked = "-fork-" in session  # the turns on its path come with it
            assert forked or known.keys() <= turns.keys() | self.unsure[session].keys(), "there, and nobody asked for it"
            for rid, turn in turns.items():
                assert known[rid]["prompt_tokens"] == length(turn.ask.prompt)
                assert known[rid]["completion_tokens"] == len(turn.output_ids)
                await self.replayed(turn)
            unheard = {rid: ask for rid, ask in self.unsure[session].items() if rid in known}
            for rid, ask in unheard.items():
                turns[rid] = await self.replayed(ask.answered(await self.world.ok("/generate", ask.body)))
            whole = [turn.ask.params for turn in turns.values() if turn.ask.params and len(turn.ask.params) == 2]
            gone_on = {params["rid"] for params in whole}  # their ids are in the context of another turn
            for rid in turns.keys() - gone_on:
                await self.goes_on(session, turns[rid])
            count += len(turns)
        for response, text in self.responses.items():
            answer = await self.world.get(f"/v1/responses/{response}")
            assert answer.status_code == 200 and text_of(answer.json()) == text
        return count

    async def replayed(self, turn: Turn) -> Turn:
        """Ask it as one stateless request, each history once: the output of every turn is compared with that."""
        ask = turn.ask
        what = (ask.prompt, *sorted(ask.sampling.items()))
        if what not in self.world.replays:
            self.world.replays[what] = asyncio.ensure_future(self.replay(ask))
        replay = await self.world.replays[what]
        same = (turn.output_ids, turn.text, turn.finish_reason)
        assert (replay.output_ids, replay.text, replay.finish_reason) == same, f"{turn}"  # pytest cuts what is no string
        return turn

    async def replay(self, ask: Ask) -> Turn:
        answer = await self.world.ok("/generate", ask.stateless(f"{self.name}-{self.rid()}"))
        replay = Ask(ask.context, ask.parts, ask.sampling).answered(answer)
        assert replay.cached_tokens == 0
        return replay

    async def goes_on(self, session: str, turn: Turn) -> None:
        """The ids that the server has behind a turn are the client's."""
        params = {"id": session, "rid": turn.rid}
        ask = Ask(turn.context, (), {"temperature": 0, "max_new_tokens": 2}, self.rid(), params)
        await self.replayed(ask.answered(await self.world.ok("/generate", ask.body)))


def of_each(sampling: Mapping[str, Any], n: int) -> list[Mapping[str, Any]]:
    """The sampling_params of each of ``n`` replies to one request: each after the first has the next seed."""
    seeds = [{"seed": sampling["seed"] + index} if "seed" in sampling else {} for index in range(n)]
    return [{**sampling, **seed} for seed in seeds]


def text_of(response: Any) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


async def gather(work: Iterable[Awaitable[Any]]) -> list[Any]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each) for each in map(awaited, work)]
    return [task.result() for task in tasks]


async def awaited(work: Awaitable[Any]) -> Any:
    return await work


async def load(server: Server) -> list[Speaker]:
    world = World(server)
    speakers = [Speaker(world, number) for number in range(CLIENTS)]
    stop = asyncio.get_running_loop().time() + SECONDS
    await gather([*(speaker.run(stop) for speaker in speakers), world.kill_now_and_then()])
    await world.http.aclose()
    return speakers


async def look_at(server: Server, speakers: list[Speaker]) -> int:
    world = World(server)
    for speaker in speakers:
        speaker.world = world
    counts = await gather(speaker.check() for speaker in speakers)
    await world.http.aclose()
    return sum(counts)


def test_32_clients_and_a_server_that_is_killed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with ForkedServer(store, *LOADED) as server:
        speakers = asyncio.run(load(server))
        server.check_healthy()
        server.stop()
    with ForkedServer(store, *LOOKED_AT) as server:
        count = asyncio.run(look_at(server, speakers))
        server.check_healthy()
        assert count > 100
        server.stop()
    assert fsck(store).ok
