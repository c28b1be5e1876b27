"""Replies on their way, and what is done with each when it ends, whether or not anybody still listens.

The engine commits a reply on its own thread. From there on a task of the loop's owns it: it sets the head that the reply is named
by, waits until all of it is on disk, and only then passes the last output on. A client that has gone in between changes nothing,
and one that comes again with the same rid is given what was committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Final

import attrs

from mini_scheduler.engine import Engine
from mini_scheduler.requests import Output, Request, Sampling
from mini_scheduler.text import IM_END, Detokenizer
from sessiontree import NameTaken, Node, SessionTreeError, StoreClosed, UnknownHead
from sessiontree.aio import AsyncSession, AsyncStore

TIP: Final = "tip"  # the head of a streaming session that moves
ASKED: Final = "asked"  # of a reply's node: by what it can be told whether a request is that one again


class Live:
    """A session that is in use: what runs in it, by rid. ``lock``: held by whoever decides where a request goes on.

    ``users``: requests that need it, each reply that is on its way among them; ``on_idle`` is called when the last has left.
    """

    def __init__(self, session: AsyncSession, on_idle: Callable[[Live], None]) -> None:
        self.session = session
        self.lock = asyncio.Lock()
        self.running: dict[str, Generation] = {}
        self.users = 0
        self.closing = False
        self._on_idle = on_idle

    def enter(self) -> None:
        self.users += 1

    def leave(self) -> None:
        self.users -= 1
        if not self.users:
            self._on_idle(self)

    def has(self, name: str) -> bool:
        """Whether there is a head of this name; no disk is touched for that."""
        try:
            self.session.session.head(name)
        except UnknownHead:
            return False
        return True

    async def node(self, name: str) -> Node:
        """Where a head is. Raises UnknownHead."""
        return (await self.session.head(name)).node

    @property
    def streaming(self) -> bool:
        return self.has(TIP)


class Generation:
    """One reply: what has come of it, and the last output once it has ended. ``rid``: its draft's key, and its head's name."""

    def __init__(self, rid: str, prompt: Node, outputs: asyncio.Queue[tuple[Generation, Output]]) -> None:
        self.rid = rid
        self.prompt = prompt
        self.token_ids: list[int] = []
        self.text = ""
        self.last: Output | None = None
        self.settled = asyncio.Event()  # nothing more will happen to its session
        self._outputs = outputs
        self._request: Request | None = None
        self._engine: Engine | None = None

    @property
    def cached_tokens(self) -> int:
        return 0 if self.last is None else self.last.cached_tokens

    @property
    def request(self) -> Request:
        assert self._request is not None
        return self._request

    def give_to(self, engine: Engine, request: Request) -> None:
        self._engine, self._request = engine, request

    def abort(self, reason: str) -> None:
        """Give it up, unless it has ended."""
        if self._engine is not None and not self.settled.is_set():
            self._engine.abort(self.request, reason)

    def pass_on(self, output: Output) -> None:
        self._outputs.put_nowait((self, output))

    def take(self, output: Output) -> None:
        """What whoever answers a client has seen of it."""
        self.token_ids += output.token_ids
        self.text += output.text
        if output.finish_reason is not None:
            self.last = output


class Answer:
    """The replies to one request of a client, and their outputs as they come, the last of each included."""

    def __init__(self) -> None:
        self.generations: list[Generation] = []
        self._outputs: asyncio.Queue[tuple[Generation, Output]] = asyncio.Queue()

    def add(self, rid: str, prompt: Node) -> Generation:
        generation = Generation(rid, prompt, self._outputs)
        self.generations.append(generation)
        return generation

    def add_committed(self, rid: str, node: Node, sampling: Sampling) -> None:
        """One that was made before, and is given again."""
        assert node.parent is not None
        generation = self.add(rid, node.parent)
        generation.settled.set()
        ids, text = tuple(node.token_ids.tolist()), str(node.metadata.get("text", ""))
        if node.finish_reason == "length":
            generation.pass_on(Output(ids, text, "length", node=node))
        else:
            generation.pass_on(Output(ids, text, "stop", matched_in(ids, sampling), node=node))

    async def outputs(self) -> AsyncIterator[tuple[Generation, Output]]:
        while any(generation.last is None for generation in self.generations):
            generation, output = await self._outputs.get()
            generation.take(output)
            yield generation, output

    async def whole(self) -> list[Generation]:
        async for _ in self.outputs():
            pass
        return self.generations

    def abort(self, reason: str) -> None:
        for generation in self.generations:
            generation.abort(reason)


@attrs.frozen
class Wish:
    """What is asked of each reply to a prompt. ``head``: whether it gets a head of its name; ``again``: whether it may be known."""

    sampling: Sampling
    salt: str | None = None
    metadata: Mapping[str, Any] = attrs.Factory(dict)
    head: bool = True
    again: bool = False

    @property
    def asked(self) -> str:
        """What it asks, in a word."""
        return blake2b(repr((self.sampling, self.salt)).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def for_each(self, rids: Iterable[str]) -> dict[str, Wish]:
        """Of several replies, each after the first has the next seed: equal seeds would give equal replies."""
        first = self.sampling.seed
        if first is None:
            return dict.fromkeys(rids, self)
        found = {}
        for index, rid in enumerate(rids):
            seed = (first + index) % 2**64 if index else first
            found[rid] = attrs.evolve(self, sampling=attrs.evolve(self.sampling, seed=seed))
        return found


def matched_in(token_ids: Sequence[int], sampling: Sampling) -> int | str | None:
    """What ended a reply that stopped: its last token, or a stop string in its text."""
    if token_ids and (token_ids[-1] == IM_END or token_ids[-1] in sampling.stop_token_ids):
        return token_ids[-1]
    text = Detokenizer(sampling.stop)
    for token in token_ids:
        text.push(token)
    text.finish()
    return text.matched


class Generations:
    """Starts replies in the engine and sees them to their end."""

    def __init__(self, store: AsyncStore, engine: Engine) -> None:
        self._store = store
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending = False

    async def start(self, live: Live, prompt: Node, wishes: Mapping[str, Wish], then: Callable[[], Any] | None = None) -> Answer:
        """Replies to a prompt, one for each rid. The session's lock is held.

        A rid that a reply to this very prompt has is answered with that reply; one that is taken otherwise raises NameTaken, and
        nothing has changed then. ``then``: awaited once something new is to run; what it does is done for requests that were taken.
        """
        self.check_free(live, wishes)
        answer, new = Answer(), dict[str, Generation]()
        for rid, wish in wishes.items():
            node = await self._committed(live, prompt, rid, wish) if wish.again else None
            if node is None:
                new[rid] = answer.add(rid, prompt)
            else:
                answer.add_committed(rid, node, wish.sampling)
        drafts = []
        try:
            for rid, generation in new.items():
                drafts.append(draft := await live.session.draft(prompt, key=rid))
                wish = wishes[rid]
                tell = self._teller(live, generation, wish)
                request = Request(draft, wish.sampling, tell, salt=wish.salt, metadata={**wish.metadata, ASKED: wish.asked})
                generation.give_to(self._engine, request)
            if new:
                if self._ending:
                    raise StoreClosed("the server is shutting down")
                self._engine.submit([generation.request for generation in new.values()])
        except BaseException:
            for draft in drafts:
                await live.session.abort(draft)
            raise
        for rid, generation in new.items():
            live.running[rid] = generation
            live.enter()
        if new and then is not None:
            try:
                await then()
            except BaseException:
                answer.abort("what it replaces could not be put aside")
                raise
        return answer

    @staticmethod
    def check_free(live: Live, rids: Mapping[str, Any]) -> None:
        """Raises NameTaken for a rid that runs, and for the name that a session keeps for itself."""
        for rid in rids:
            if rid == TIP:
                raise NameTaken(f"{TIP!r} is no rid", name=rid, actual=None)
            if rid in live.running:
                raise NameTaken(f"request {rid!r} is running", name=rid, actual=None)

    async def _committed(self, live: Live, prompt: Node, rid: str, wish: Wish) -> Node | None:
        """The reply to this very request that has this rid; its head is set now where that was not done. Raises NameTaken."""
        if live.has(rid):
            node = await live.node(rid)
            if node.parent != prompt:
                raise NameTaken(f"rid {rid!r} is that of another request", name=rid, actual=None)
        else:
            children = await live.session.children(prompt)
            known = next((node for node in children if node.key == rid and node.finish_reason is not None), None)
            if known is None:
                return None
            node = known
        if node.metadata.get(ASKED) != wish.asked:
            raise NameTaken(f"rid {rid!r} is that of a request with other sampling_params", name=rid, actual=None)
        await self._name(live, rid, node)
        await self._store.flush()
        return node

    async def _name(self, live: Live, rid: str, node: Node) -> None:
        """Have a reply named, and the tip of a streaming session that it goes on from moved to it."""
        session = live.session
        if not live.has(rid):
            await session.set_head(rid, node, expected=None)
        if live.streaming:
            tip = await session.head(TIP)
            if tip.node.key == node.metadata.get(TIP):
                await session.set_head(TIP, node, expected=tip)

    def _teller(self, live: Live, generation: Generation, wish: Wish) -> Callable[[Output], None]:
        """Takes outputs on the engine's thread to the loop."""

        def tell(output: Output) -> None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(take, output)

        def take(output: Output) -> None:
            if output.finish_reason is None:
                generation.pass_on(output)
                return
            task = self._loop.create_task(self._settle(live, generation, wish, output))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return tell

    async def _settle(self, live: Live, generation: Generation, wish: Wish, output: Output) -> None:
        """See to what a reply leaves: its head, on disk. Then it no longer runs, and its end may be told.

        Takes no lock of the session's: who holds it may be waiting for this.
        """
        try:
            if output.node is not None:
                if wish.head:
                    await self._name(live, generation.rid, output.node)
                await self._store.flush()
        except SessionTreeError as error:
            output = attrs.evolve(output, token_ids=(), text="", finish_reason="error", matched=None, node=None, error=error)
        except BaseException:
            output = attrs.evolve(output, token_ids=(), text="", finish_reason="abort", node=None, reason="the server failed")
            raise
        finally:
            del live.running[generation.rid]
            live.leave()
            generation.settled.set()
            generation.pass_on(output)

    async def end(self, lives: Sequence[Live], grace: float) -> None:
        """Start nothing more and wait for all that runs, at most ``grace`` seconds; what runs then is aborted, and waited for."""
        self._ending = True
        running = [generation for live in lives for generation in live.running.values()]
        with suppress(TimeoutError):
            async with asyncio.timeout(grace):
                for generation in running:
                    await generation.settled.wait()
        for generation in running:
            generation.abort("the server is shutting down")
        for generation in running:
            await generation.settled.wait()
