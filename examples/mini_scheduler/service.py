"""The parts of a server, put together, and what its routes do with them."""

from __future__ import annotations

import asyncio
import gc
import logging
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import attrs

from mini_scheduler import chat, completions, history, native, responses, schemas
from mini_scheduler.engine import Engine
from mini_scheduler.failures import Refused
from mini_scheduler.figures import Figures
from mini_scheduler.generations import Answer, Generations, Wish
from mini_scheduler.limits import Limits
from mini_scheduler.model import Model, load_model
from mini_scheduler.pictures import Pictures, Uploads
from mini_scheduler.sessions import Sessions, refuse_taken, session_store_id
from mini_scheduler.tenants import Tenants, salt_of
from mini_scheduler.text import encode
from mini_scheduler.upkeep import keep_up
from sessiontree import LimitExceeded, Node, Session, SessionStore, UnknownHead, UnknownNode
from sessiontree.aio import AsyncStore

_logger = logging.getLogger("mini_scheduler")
_CHARACTERS: Final = 64  # of text for each token that a prompt may have: more is never encoded


@attrs.frozen
class Config:
    """``store``: a directory, or the URL of a store that others share; None: in memory. ``engine``: options of :class:`Engine`."""

    store: Path | str | None = None
    model: str = "tiny-qwen2.5-vl"
    seed: int = 3
    tenants: Tenants = attrs.Factory(Tenants)
    limits: Limits = attrs.Factory(Limits)
    memory_bytes: int = 256 * 2**20
    engine: Mapping[str, Any] = attrs.Factory(dict)


@attrs.frozen
class Service:
    config: Config
    store: AsyncStore
    model: Model
    engine: Engine
    sessions: Sessions
    generations: Generations
    pictures: Pictures
    figures: Figures
    max_tokens: int
    uploading: Mapping[str, asyncio.Lock] = attrs.Factory(lambda: defaultdict(asyncio.Lock))  # by tenant

    # Requests

    async def generate(self, tenant: str, body: schemas.Generate) -> Answer:
        sampling = native.sampling_of(body.sampling_params)
        rids, given = self._rids(body)
        wish = Wish(sampling, salt_of(tenant, body.cache_salt), again=given, head=given)
        self._check_text(len(body.text or ""))
        self.engine.check_room(len(rids))
        uploads = await self._uploads(tenant, native.uploads_of(body))
        token_ids, media = await asyncio.to_thread(native.prompt_of, body, uploads.items, self.model.vocab_size)
        params = body.session_params
        if params is None:
            if not token_ids:
                raise Refused(400, "a prompt has at least one token", type="OutOfRange", param="input_ids")

            def place(session: Session) -> Node:
                refuse_taken(session, rids, session.root, token_ids)
                return history.continue_tokens(session, token_ids, media, sampling.max_new_tokens, uploads.keep)

            return await self._without_session(tenant, place, wish.for_each(rids))
        wish = attrs.evolve(wish, head=True)
        async with self.sessions.using(session_store_id(tenant, params.id)) as live:
            wishes = wish.for_each(rids)
            return await self.sessions.generate(live, params.model_dump(exclude={"id"}), token_ids, media, wishes, uploads.keep)

    async def complete(self, tenant: str, body: schemas.ChatCompletion) -> tuple[str, Answer]:
        self._check_model(body.model)
        wish = Wish(completions.sampling_of(body), salt_of(tenant, body.cache_salt), head=False)
        self.engine.check_room(body.n or 1)
        uploads = await self._uploads(tenant, chat.uploads_of(body))
        said = await asyncio.to_thread(chat.from_messages, body.messages, uploads.items)
        self._check_text(sum(len(each.text) for each in said))
        completion_id = f"chatcmpl-{uuid.uuid4().hex}"
        rids = [completion_id] if body.n in (None, 1) else [f"{completion_id}-{index}" for index in range(body.n or 0)]

        def place(session: Session) -> Node:
            return history.continue_chat(session, chat.render(said), wish.sampling.max_new_tokens, uploads.keep)

        return completion_id, await self._without_session(tenant, place, wish.for_each(rids))

    async def respond(self, tenant: str, body: schemas.CreateResponse) -> tuple[str, Mapping[str, Any], Answer]:
        """Its id, what is remembered of its request, and the reply."""
        self._check_model(body.model)
        sampling = responses.sampling_of(body)
        self.engine.check_room(1)
        uploads = await self._uploads(tenant, chat.uploads_of(body))
        said = await asyncio.to_thread(chat.from_items, body.input, uploads.items)
        self._check_text(len(body.instructions or "") + sum(len(each.text) for each in said))
        asked = await asyncio.to_thread(responses.kept, body, uploads.items, sampling)
        before, had = None, list[int]()
        if body.previous_response_id is not None:
            before = await self.stored_response(tenant, body.previous_response_id)
            had = responses.instruction_ids(before.metadata[responses.KEPT]["instructions"])

        def place(session: Session) -> Node:
            wanted = responses.instruction_ids(body.instructions)
            turns = chat.render(said, after_reply=before is not None)
            return history.continue_response(session, before, had, wanted, turns, sampling.max_new_tokens, uploads.keep)

        response_id = f"resp_{uuid.uuid4().hex}"
        metadata = {responses.KEPT: asked} if body.store is not False else {}
        wish = Wish(sampling, salt_of(tenant, body.cache_salt), metadata=metadata, head=body.store is not False)
        return response_id, asked, await self._without_session(tenant, place, {response_id: wish})

    async def stored_response(self, tenant: str, response_id: str) -> Node:
        """Raises UnknownHead, UnknownSession."""
        async with self.sessions.history(tenant) as live:
            node = await live.node(response_id)
        if responses.KEPT not in node.metadata:
            raise UnknownHead("no response has this id", name=response_id)
        return node

    async def forget_response(self, tenant: str, response_id: str) -> None:
        await self.stored_response(tenant, response_id)
        async with self.sessions.history(tenant) as live:
            await live.session.drop_head(response_id)
            await self.store.flush()

    async def _without_session(self, tenant: str, place: Callable[[Session], Node], wishes: Mapping[str, Wish]) -> Answer:
        async with self.sessions.history(tenant) as live:
            self.generations.check_free(live, wishes)
            for _ in range(3):
                with suppress(UnknownNode):  # gc took what nothing led to, between two steps of ours
                    prompt = await live.session.run(place)
                    async with live.lock:
                        return await self.generations.start(live, prompt, wishes)
        raise Refused(503, "the history is being collected; try again", type="UnknownNode")

    def _rids(self, body: schemas.Generate) -> tuple[list[str], bool]:
        """One for each reply, and whether they are the client's."""
        count = (body.sampling_params.n if body.sampling_params is not None else None) or 1
        if body.rid is None:
            return [uuid.uuid4().hex for _ in range(count)], False
        rids = [body.rid] if isinstance(body.rid, str) else body.rid
        if len(rids) != count or len(set(rids)) != count:
            raise Refused(400, f"{count} replies have {count} rids, all different", param="rid")
        return rids, True

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.model.name:
            raise Refused(404, f"there is one model here, {self.model.name}", param="model", code="model_not_found")

    def _check_text(self, count: int) -> None:
        if count > _CHARACTERS * self.max_tokens:
            most = self.max_tokens
            raise LimitExceeded(f"{count} characters are more than the {most} tokens of a prompt", value=count, limit=most)

    async def _uploads(self, tenant: str, uploads: Sequence[str]) -> Uploads:
        """One request of a tenant at a time, so that the pictures of others are not behind many of one's."""
        if len(uploads) > schemas.MAX_IMAGES:
            what = f"{len(uploads)} pictures; a request has {schemas.MAX_IMAGES} at most"
            raise Refused(413, what, type="LimitExceeded", code="too_many_images")
        if not uploads:
            return Uploads(self.store.store)
        async with self.uploading[tenant]:
            loop, pictures = asyncio.get_running_loop(), self.pictures
            return await loop.run_in_executor(pictures.threads, pictures.take, self.store.store, tenant, uploads)

    async def healthy(self) -> bool:
        """Whether the engine's thread lives and the store takes writes."""
        if not self.engine.alive:
            return False
        await self.store.flush()
        return True


def is_url(store: Path | str | None) -> bool:
    """Whether a store is one that other servers share."""
    return isinstance(store, str) and store.startswith(("postgresql://", "postgres://"))


async def open_store(where: Path | str, memory_bytes: int) -> AsyncStore:
    if is_url(where):
        return await AsyncStore.connect(str(where), memory_bytes=memory_bytes)
    return await AsyncStore.open(where, durability="group", memory_bytes=memory_bytes)


@asynccontextmanager
async def serving(config: Config) -> AsyncIterator[Service]:
    """A service, from an open store to a closed one. What still runs at the end is aborted."""
    model = await asyncio.to_thread(load_model, config.model, config.seed)
    await asyncio.to_thread(encode, "")  # which loads the vocabulary
    if config.store is None:
        store = AsyncStore(SessionStore.in_memory())
    else:
        store = await open_store(config.store, config.memory_bytes)
    async with store:
        for session_id in store.store.sessions()[:1]:  # rather than to refuse every request
            await store.get(session_id, scheme=model.scheme, model_fingerprint=model.fingerprint)
        options = {"num_pages": 256, "page_size": 16, **config.engine}
        engine = Engine(store.store, model, **options)
        max_tokens = min(model.max_tokens, options["num_pages"] * options["page_size"])
        generations = Generations(store, engine)
        sessions = Sessions(store, model, generations, max_tokens, shared=is_url(config.store))
        pictures = Pictures(config.limits, taken=model.takes_images)
        figures = Figures(store.store, engine)
        engine.start()
        upkeep = asyncio.create_task(keep_up(store, sessions))
        gc.collect()
        gc.freeze()  # what is here now stays: no collection need look at it again
        _logger.info("serving %s, store %s", model.name, config.store or "in memory")
        try:
            yield Service(config, store, model, engine, sessions, generations, pictures, figures, max_tokens)
        finally:
            upkeep.cancel()
            await sessions.end(0.0)
            await asyncio.to_thread(engine.close)
            pictures.threads.shutdown(wait=False)
            figures.close()
            gc.unfreeze()
