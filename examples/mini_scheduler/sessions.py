"""Sessions that clients open, and the history of each tenant: which node a request goes on from, and what it takes to get there.

What is known of a session is on disk: a finished request is a head of its rid; a streaming session has a head ``tip`` from the
start. Only what runs is in memory, and all of it ends before its session is closed.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence, Set
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final, NamedTuple

import attrs

from engine_bridge.adapters.sglang_params import Context, Continuation, continuation
from mini_scheduler.generations import TIP, Answer, Generations, Live, Wish
from mini_scheduler.history import Keep, check_length, nothing
from mini_scheduler.model import Model
from mini_scheduler.tenants import namespace_of
from sessiontree import (
    MediaItem,
    NameTaken,
    Node,
    OutOfRange,
    Session,
    SessionExists,
    UnknownHead,
    UnknownNode,
    UnknownSession,
    Unsupported,
)
from sessiontree.aio import AsyncStore

_PARENT: Final = "parent"


class Sessions:
    """All that is in use. ``max_tokens``: allowed on a path. ``shared``: other servers have the same store."""

    def __init__(self, store: AsyncStore, model: Model, generations: Generations, max_tokens: int, *, shared: bool = False) -> None:
        self._store = store
        self._shared = shared
        self._model = model
        self._generations = generations
        self._max_tokens = max_tokens
        self._lives: dict[str, Live] = {}
        self._histories: set[str] = set()  # tenants that have one
        self._idle: dict[str, tuple[float, float]] = {}  # by store id: how long it may lie idle, and since when it does

    # Using

    @asynccontextmanager
    async def using(self, store_id: str) -> AsyncIterator[Live]:
        """A session, for as long as a request needs it. Raises UnknownSession, also for one that is being closed."""
        live = self._lives.get(store_id)
        if live is None:
            session = await self._store.get(store_id, scheme=self._model.scheme, model_fingerprint=self._model.fingerprint)
            live = self._lives.setdefault(store_id, Live(session, self._let_go))
        elif self._shared and not live.closing:
            await live.session.refresh()
        if live.closing or live.session.session.closed:
            raise UnknownSession(f"no session {store_id!r}", session_id=store_id)
        live.enter()
        try:
            yield live
        finally:
            live.leave()

    def _let_go(self, live: Live) -> None:
        """Hold no session that nobody uses: the store may put it away then."""
        store_id = live.session.session.id
        if self._lives.get(store_id) is live:
            del self._lives[store_id]
        if store_id in self._idle:
            self._idle[store_id] = self._idle[store_id][0], time.monotonic()

    @asynccontextmanager
    async def history(self, tenant: str) -> AsyncIterator[Live]:
        """What a tenant's requests without a session share; made when the first comes."""
        store_id = f"{tenant}/history"
        if tenant not in self._histories:
            with suppress(SessionExists):
                await self._create(store_id, tenant)
            self._histories.add(tenant)
        async with self.using(store_id) as live:
            yield live

    async def _create(self, store_id: str, tenant: str, *, streaming: bool = False) -> None:
        session = await self._store.create(
            store_id,
            scheme=self._model.scheme,
            namespace=namespace_of(tenant),
            model_fingerprint=self._model.fingerprint,
            max_tokens=self._max_tokens,
        )
        if streaming:
            await session.set_head(TIP, session.session.root, expected=None)
        await self._store.flush()

    # Opening and closing

    async def open(self, tenant: str, session_id: str | None, *, streaming: bool, timeout: float | None) -> str:
        """Raises SessionExists. ``timeout``: seconds without a request until it is closed; a restart forgets them."""
        session_id = session_id or uuid.uuid4().hex
        store_id = session_store_id(tenant, session_id)
        await self._create(store_id, tenant, streaming=streaming)
        if timeout is not None:
            self._idle[store_id] = timeout, time.monotonic()
        return session_id

    async def close(self, store_id: str) -> None:
        """Abort what runs in it and forget it. Raises UnknownSession."""
        async with self.using(store_id) as live:
            live.closing = True  # from here on nobody finds it
            try:
                async with live.lock:
                    await _aborted(live, tuple(live.running), "the session was closed")
                    await self._store.drop(store_id)
                    await self._store.flush()
            except BaseException:
                live.closing = live.session.session.closed
                raise
            del self._lives[store_id]  # another session may have this id now
            self._idle.pop(store_id, None)

    async def close_idle(self) -> None:
        now = time.monotonic()
        for store_id, (timeout, since) in list(self._idle.items()):
            if now - since >= timeout and store_id not in self._lives:
                with suppress(UnknownSession):
                    await self.close(store_id)
                self._idle.pop(store_id, None)

    async def fork(self, tenant: str, session_id: str, rid: str | None, new_id: str | None) -> tuple[str, str | None, int]:
        """A session that holds the path of a reply, and knows the rids on it: (its id, the reply's rid, its tokens).

        ``rid`` None: the tip, or what was committed last. Raises UnknownSession, UnknownHead, SessionExists.
        """
        new_id = new_id or uuid.uuid4().hex
        async with self.using(session_store_id(tenant, session_id)) as live:
            node = await live.session.run(_forked_at, rid)
            forked = await self._store.fork(live.session, node, session_store_id(tenant, new_id))
            await forked.run(_name_path, node.id, live.streaming)
            await self._store.flush()
        return new_id, node.key if node.origin == "generated" else None, node.stop

    async def describe(self, store_id: str) -> tuple[bool, list[dict[str, Any]]]:
        """Whether it is a streaming session, and its finished requests in the order of their rids."""
        async with self.using(store_id) as live:
            return live.streaming, await live.session.run(_requests)

    # Requests

    async def generate(
        self,
        live: Live,
        params: Mapping[str, Any],
        token_ids: Sequence[int],
        media: Sequence[MediaItem],
        wishes: Mapping[str, Wish],
        keep: Keep = nothing,
    ) -> Answer:
        """The replies to a turn of a session, where its ``session_params`` say."""
        async with live.lock:
            if live.closing:
                raise UnknownSession("the session is closed", session_id="")
            self._generations.check_free(live, wishes)
            if live.streaming and len(wishes) > 1:
                raise Unsupported("a streaming session has one reply to a turn")
            prompts = {rid: generation.prompt for rid, generation in live.running.items()}
            room = max(wish.sampling.max_new_tokens for wish in wishes.values())
            place = await live.session.run(_placed, params, prompts, tuple(wishes), token_ids, media, room, keep)
            made = {rid: attrs.evolve(wish, metadata={**wish.metadata, **place.remembered}) for rid, wish in wishes.items()}
            return await self._generations.start(live, place.prompt, made, partial(_make_way, live, place.where, frozenset(wishes)))

    def abort(self, tenant: str, rid: str | None, *, everything: bool) -> None:
        """Abort a tenant's requests of this rid, wherever they run, or all that it has."""
        for store_id, live in list(self._lives.items()):
            if store_id.startswith(f"{tenant}/"):
                for name, generation in list(live.running.items()):
                    if everything or name == rid:
                        generation.abort("aborted")

    async def end(self, grace: float) -> None:
        await self._generations.end(list(self._lives.values()), grace)


def session_store_id(tenant: str, session_id: str) -> str:
    return f"{tenant}/session/{session_id}"


async def _make_way(live: Live, where: Continuation, rids: Set[str]) -> None:
    """Abort what the requests of these ``rids`` replace, and wait for that; forget all that came before where they begin anew."""
    await _aborted(live, where.aborts, "replaced by another request")
    if where.forgets:
        for name in list(live.session.session.heads):
            if name != TIP and name not in rids:
                await live.session.drop_head(name)


async def _aborted(live: Live, rids: Sequence[str], reason: str) -> None:
    generations = [live.running[rid] for rid in rids if rid in live.running]
    for generation in generations:
        generation.abort(reason)
    for generation in generations:
        await generation.settled.wait()


# --- of what is on disk, on a thread of the store's ---------------------------------------------------------------------
class _Place(NamedTuple):
    """Where a request goes on, the node that its prompt ends with, and what its reply's node remembers of that."""

    where: Continuation
    prompt: Node
    remembered: dict[str, Any]


def _placed(
    session: Session,
    params: Mapping[str, Any],
    running: Mapping[str, Node],
    rids: Iterable[str],
    token_ids: Sequence[int],
    media: Sequence[MediaItem],
    room: int,
    keep: Keep,
) -> _Place:
    """``running``: the prompts of what runs. ``rids``: those of the request; one that has a reply goes on where that one did."""
    at_tip, tip = _at(session, TIP), None
    if at_tip is not None:
        earlier = next((node for node in (_at(session, rid) for rid in rids) if node is not None), None)
        tip = at_tip.key if earlier is None else earlier.metadata.get(TIP)

    def context_of(rid: str) -> Context | None:
        if rid in running:
            return Context(running[rid].stop, running[rid].stop, finished=False)
        node = _at(session, rid) if rid != TIP else None
        return None if node is None else Context(node.start, node.stop)

    where = continuation(params, context_of, in_flight=running, streaming=at_tip is not None, tip=tip)
    if not token_ids and not where.length:
        raise OutOfRange("a first turn has at least one token", value=0, limit=1)
    check_length(session, where.length + len(token_ids), room)
    node = session.root
    if where.rid is not None:
        node = session.truncate(running.get(where.rid) or session.head(where.rid).node, where.length)
    refuse_taken(session, rids, node, token_ids)
    keep()
    prompt = session.append(node, token_ids, media=media)
    return _Place(where, prompt, {_PARENT: where.rid} | ({TIP: tip} if at_tip is not None else {}))


def _at(session: Session, name: str) -> Node | None:
    try:
        return session.head(name).node
    except UnknownHead:
        return None


def refuse_taken(session: Session, rids: Iterable[str], node: Node, token_ids: Sequence[int]) -> None:
    """Before they are appended: raises NameTaken where a rid is that of a reply to something else than these behind ``node``."""
    for rid in rids:
        known = _at(session, rid)
        if known is not None and known.input_ids(0, known.start).tolist() != [*node.input_ids().tolist(), *token_ids]:
            raise NameTaken(f"rid {rid!r} is that of another request", name=rid, actual=None)


def _forked_at(session: Session, rid: str | None) -> Node:
    if rid == TIP:
        raise UnknownHead(f"{TIP!r} is no rid", name=rid)
    if rid is not None:
        return session.head(rid).node
    if TIP in session.heads:
        return session.head(TIP).node
    heads = [session.head(name) for name in session.heads]
    return max(heads, key=lambda head: head.version).node if heads else session.root


def _name_path(session: Session, tip: bytes, streaming: bool) -> None:
    """Give a fork, which holds the path of ``tip``, the rids of the replies on it."""
    node = session.node(tip)
    for reply in node.path():
        if reply.origin == "generated" and reply.key is not None and reply.finish_reason is not None:
            session.set_head(reply.key, reply, expected=None)
    if streaming:
        session.set_head(TIP, node, expected=None)


def _requests(session: Session) -> list[dict[str, Any]]:
    found = []
    for rid in sorted(name for name in session.heads if name != TIP):
        with suppress(UnknownHead, UnknownNode):  # forgotten meanwhile
            node = session.head(rid).node
            found.append(
                {
                    "rid": rid,
                    "parent": node.metadata.get(_PARENT),
                    "prompt_tokens": node.start,
                    "completion_tokens": len(node),
                    "finish_reason": node.finish_reason,
                }
            )
    return found
