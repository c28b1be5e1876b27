"""A drop-in for the session controller of SGLang 0.5.23's scheduler, backed by a tree.

:class:`SessionTreeController` takes the place of ``sglang.srt.session.session_controller.SessionController``, and
:class:`TreeSession` that of its ``Session``. A request is nowhere in the tree before it has finished: then its prompt and what the
client saw of its output become nodes, and a head with its rid leads to the last of them. One that is refused, aborted, replaced
or forgotten leaves no trace, so nothing has to be undone, and there is no flag that could be left behind.

Requests are SGLang's own ``Req``, made by its constructor or the scheduler's factory. Then their class becomes one derived from
theirs, which says how media are added, how a retracted request's positions go on, and that it has finished. A request owns its ids
and its ``MultimodalInputs``; of its ancestors' items it has copies that share their features. SGLang is imported by the first
request.

There is no clock in here: the time is what ``maybe_reap`` or ``tick`` is told.
"""

from __future__ import annotations

import json
import logging
import math
from array import array
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar, Final, NamedTuple
from weakref import WeakValueDictionary, ref

import numpy as np
import torch
from numpy.typing import NDArray

from engine_bridge.adapters.pending import PendingPrompt
from engine_bridge.adapters.sglang_media import Layout, engine_item, kept_features, media_item, placed, sglang
from engine_bridge.adapters.sglang_params import Context, continuation
from sessiontree import (
    KeyTaken,
    MediaItem,
    MediaSpanError,
    NeedsMedia,
    Node,
    NodeHeld,
    OutOfRange,
    PositionError,
    Session,
    SessionExists,
    SessionStore,
    SessionTreeError,
    StoreFailed,
    UnknownHead,
    Unsupported,
)
from sessiontree.details import TailPolicy
from sessiontree.frozen import checked_text, freeze_metadata
from sessiontree.positions import PositionScheme
from sessiontree.tokens import token_array, token_bytes

__all__ = ["SessionTreeController", "TreeSession"]

logger: Final = logging.getLogger(__name__)

#: Fields of a request that its ``Req`` gets as they are, under the same name.
CARRIED: Final = (
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "cache_salt",
    "custom_logit_processor",
    "disagg_prefill_dp_rank",
    "extra_key",
    "http_worker_ipc",
    "kv_hints",
    "lora_id",
    "priority",
    "require_reasoning",
    "return_flat_raw_top_logprobs",
    "return_hidden_states",
    "return_indexer_topk",
    "return_logprob",
    "return_routed_experts",
    "return_sampling_mask",
    "rid",
    "routed_dp_rank",
    "routed_experts_start_len",
    "routing_key",
    "sampling_logprobs_mode",
    "sampling_params",
    "session_id",
    "stream",
    "time_stats",
    "token_ids_logprob",
    "top_logprobs_num",
)
#: Fields that count the tokens of one turn or replace them. A request of a session that sets one is refused, by name.
REFUSED: Final = (
    "input_embeds",
    "multi_item_delimiter_indices",
    "positional_embed_overrides",
    "token_indices_to_pool",
    "token_type_ids",
)
#: What of an attempt is recorded with its reply, where it is set.
RECORDED: Final = ("cache_salt", "extra_key", "lora_id")
#: Fields of MultimodalInputs that are constant for a model.
_TOKEN_IDS: Final = (
    "im_token_id",
    "im_start_id",
    "im_end_id",
    "slice_start_id",
    "slice_end_id",
    "video_token_id",
    "audio_token_id",
    "audio_start_id",
    "audio_end_id",
)
_MODALITIES: Final = "token_modalities"  # wanted for every token
#: Those that describe a whole prompt's media, with no rule for what two turns' make together.
_WHOLE_PROMPT: Final = ("image_pad_len", "num_image_tokens", "vision_position_ids", "media_nums_per_sample", "visible_frame_counts")
_RID: Final = "rid "  # what heads' names begin with
_TIP: Final = "tip"
_OPENED: Final = "sglang session "  # what it was opened with, as JSON, follows
_MODEL: Final = "sglang model "  # what MultimodalInputs say of the model, likewise


class SessionTreeController:
    """Sessions by id, as SGLang's scheduler keeps them.

    In ``sglang/srt/managers/scheduler.py``, in place of the import of ``SessionController``::

        SessionController = SessionTreeController.configured(store=SessionStore.open(path), scheme="qwen2_5_vl@sglang")

    ``tree_cache``: the scheduler's prefix cache, which is told of sessions that end. ``store``: in memory by default; one on disk
    keeps sessions that are open over a restart. The store's sessions of others are left alone, and nothing else writes to those
    of this controller. ``scheme``: positions of the model that is served, "text@sglang" by default, which takes no media.
    ``strip_bos``: leave out the BOS token that a turn behind others begins with, as SGLang does. ``tail_policy``: whether the last
    sampled token is history. ``max_tokens``, ``reserve_output``, ``model_fingerprint``: as for ``store.create``. ``keep_features``:
    put features of media into the store too, so that they outlive a restart.

    The same calls give the same ids on every rank. One thread calls, the scheduler's.
    """

    _configured: ClassVar[Mapping[str, Any]] = {}

    def __init__(
        self,
        tree_cache: Any = None,
        *,
        store: SessionStore | None = None,
        scheme: PositionScheme | str | None = None,
        strip_bos: bool | None = None,
        tail_policy: TailPolicy | None = None,
        max_tokens: int | None = None,
        reserve_output: int | None = None,
        model_fingerprint: str | None = None,
        keep_features: bool | None = None,
    ) -> None:
        def option(given: Any, name: str, default: Any) -> Any:
            return given if given is not None else self._configured.get(name, default)

        self.tree_cache = tree_cache
        self.store: SessionStore = option(store, "store", None) or SessionStore.in_memory()
        self.strip_bos: bool = option(strip_bos, "strip_bos", True)
        self.tail_policy: TailPolicy = option(tail_policy, "tail_policy", "keep")
        self.keep_features: bool = option(keep_features, "keep_features", False)
        self._session_options = {
            "scheme": option(scheme, "scheme", "text@sglang"),
            "max_tokens": option(max_tokens, "max_tokens", None),
            "reserve_output": option(reserve_output, "reserve_output", 0),
            "model_fingerprint": option(model_fingerprint, "model_fingerprint", ""),
        }
        self.now: float = -math.inf
        self._last_reap = -math.inf
        self.sessions: dict[str, TreeSession] = {}
        for session_id in self.store.sessions():
            self._take_up(self.store.get(session_id))

    @classmethod
    def configured(cls, **options: Any) -> type[SessionTreeController]:
        """A class with other defaults, which the scheduler can call with its cache alone. Raises TypeError."""
        known = cls.__init__.__kwdefaults__ or {}
        if unknown := options.keys() - known.keys():
            raise TypeError(f"no option {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        return type(cls.__name__, (cls,), {"_configured": {**cls._configured, **options}, "__doc__": cls.__doc__})

    def __contains__(self, session_id: object) -> bool:
        return session_id in self.sessions

    def get(self, session_id: str) -> TreeSession | None:
        """The open session of this id; None where there is none."""
        return self.sessions.get(session_id)

    def open(self, recv_req: Any) -> Any:
        """SGLang's answer to its OpenSessionReqInput: whether there is a new session of that id now."""
        session_id = recv_req.session_id
        success = False
        if session_id is None:
            logger.warning("a session without an id cannot be opened")
        elif session_id in self.sessions:
            logger.warning("session %s is open already", session_id)
        else:
            try:
                tree = self.store.create(session_id, **self._session_options)
                opened = {
                    "capacity_of_str_len": recv_req.capacity_of_str_len,
                    "streaming": bool(recv_req.streaming),
                    "timeout": recv_req.timeout,
                }
                _say(tree, _OPENED, opened)
            except (SessionExists, OutOfRange, StoreFailed, TypeError) as error:
                logger.warning("session %.100r cannot be opened: %s", session_id, error)
            else:
                self._take_up(tree)
                success = True
        return sglang().OpenSessionReqOutput(session_id=session_id, success=success)

    def _take_up(self, tree: Session) -> None:
        """A session of the store, if it was opened here and not closed."""
        opened = _said(tree, _OPENED)
        if opened:
            self.sessions[tree.id] = TreeSession(self, tree, **opened)

    def close(self, recv_req: Any) -> None:
        """End a session. While requests of it are running, it takes no new ones, and ends when they have finished.

        Its nodes are forgotten, on disk too, where nothing pins them: pin or fork what is to be kept. Whoever holds one can go on
        reading it.
        """
        session = self.sessions.get(recv_req.session_id)
        if session is None:
            logger.warning("no session %s to close", recv_req.session_id)
        elif session.in_flight():
            session.close_on_finish = True
        else:
            self._end(session)

    def _end(self, session: TreeSession) -> None:
        session_id = session.session_id
        del self.sessions[session_id]
        if self.tree_cache is not None:
            self.tree_cache.release_radix_session(session_id)
            self.tree_cache.release_session(session_id)
        if session.tree.closed:
            return
        try:
            try:
                self.store.drop(session_id)
            except NodeHeld as error:
                logger.info("session %s is closed, and stays in the store: %s", session_id, error)
                _say(session.tree, _OPENED, {})
                session.tree.close()
        except StoreFailed as error:
            logger.error("session %s is closed here, and open again when the store is opened again: %s", session_id, error)
            session.tree.close()

    def maybe_reap(self, now: float, interval: float = 1.0) -> None:
        """Tell it the time, as the scheduler does before it takes requests; :meth:`tick`, once every ``interval``."""
        if now - self._last_reap > interval:
            self.tick(now)
        else:
            self.now = now

    def tick(self, now: float) -> tuple[str, ...]:
        """Tell it the time, in seconds: ids of the sessions that end now.

        Those that were to be closed when their requests had finished, and those that lay idle for more than their ``timeout``
        with no request running. Requests that begin and finish are use, at the time that was told last.
        """
        first, self.now, self._last_reap = self.now == -math.inf, now, now
        ended = []
        for session in tuple(self.sessions.values()):
            if first:
                session.last_active_time = now
            if session.in_flight():
                session.last_active_time = now
            elif session.close_on_finish or session.is_timed_out():
                self._end(session)
                ended.append(session.session_id)
        return tuple(ended)

    @staticmethod
    def adjust_mm_offsets(recv_req: Any, req: Any, image_inputs: Any) -> None:
        """Move a turn's item offsets to where the turn stands in its prompt."""
        shift = len(req.origin_input_ids) - len(recv_req.input_ids)
        for item in image_inputs.mm_items if shift > 0 else ():
            if item.offsets:
                item.offsets = [(first + shift, last + shift) for first, last in item.offsets]

    def __repr__(self) -> str:
        return f"<SessionTreeController of {self.store!r}, {len(self.sessions)} sessions open>"


class TreeSession:
    """One session of SGLang's, over a tree: what a scheduler and its cache ask of ``req.session``.

    ``tree``: the session that holds the nodes. ``capacity_of_str_len`` is kept, and not looked at, as in SGLang; what limits a
    context is the controller's ``max_tokens``. ``close_on_finish``: no new requests are taken.
    """

    def __init__(
        self, controller: SessionTreeController, tree: Session, *, capacity_of_str_len: int, streaming: bool, timeout: float | None
    ) -> None:
        self.controller = controller
        self.tree = tree
        self.session_id: str = tree.id
        self.capacity_of_str_len = capacity_of_str_len
        self.streaming = streaming
        self.timeout = timeout
        self.close_on_finish = False
        self.last_active_time: float = controller.now
        self.model: dict[str, Any] = _said(tree, _MODEL)  # token ids of MultimodalInputs, from the first turn that says them
        self.engine_items: dict[Any, Any] = {}  # SGLang's, with their features, by content
        self._attempts: WeakValueDictionary[str, Attempt] = WeakValueDictionary()
        self._layout = Layout(tree.scheme)  # of the path that was asked for last

    # As the scheduler calls them

    def create_req(
        self,
        req: Any,
        tokenizer: Any,
        vocab_size: int,
        eos_token_ids: Any = None,
        disagg_mode: Any = None,
        req_factory: Callable[..., Any] | None = None,
    ) -> Any:
        """SGLang's ``Req`` for its TokenizedGenerateReqInput, with the history that its session_params name.

        One that cannot be served comes back as the scheduler expects it, with an abort that says why. Then it belongs to no
        session, and ``req`` has no media any more. A turn that is stripped of its BOS is stripped in ``req`` too.
        """
        made_by = req_factory or sglang().Req
        given = {name: getattr(req, name) for name in CARRIED}
        given |= {"vocab_size": vocab_size, "eos_token_ids": eos_token_ids, "disagg_mode": disagg_mode}
        try:
            attempt, aborted = self._attempt(req, tokenizer)
            inputs = attempt.multimodal_inputs() if attempt.layout is not None and attempt.awaited is None else None
        except (SessionTreeError, TypeError) as error:
            req.mm_inputs = None
            ids = req.input_ids if req.input_ids is not None else array("q")
            refused = made_by(origin_input_text=None, origin_input_ids=ids, origin_input_ids_unpadded=ids, session=None, **given)
            refused.tokenizer = tokenizer
            refused.set_finish_with_abort(str(error))
            return refused
        unpadded = attempt.input_ids()
        padded = unpadded if attempt.layout is None else attempt.layout.padded(unpadded)
        made = made_by(origin_input_text=None, origin_input_ids=padded, origin_input_ids_unpadded=unpadded, session=self, **given)
        made.tokenizer = tokenizer
        made.multimodal_inputs = inputs
        made.__class__ = _derived(made.__class__)
        made.attempt = attempt
        attempt.request = ref(made)
        for rid in aborted:
            self._abort(rid)
        self._attempts[attempt.rid] = attempt
        self.last_active_time = self.controller.now
        return made

    def finish_req(self, req: Any) -> None:
        """A streaming request has finished. Only what has finished with a reply is recorded, and once."""
        self.settle(req)

    def abort_req(self) -> None:
        """Some request of it was aborted. There is nothing to undo; others go on."""

    def is_timed_out(self) -> bool:
        """Whether it lay idle for more than its timeout, at the time that was told last."""
        return self.timeout is not None and self.controller.now - self.last_active_time > self.timeout

    # Beyond SGLang's

    def reply(self, rid: str) -> Node | None:
        """The node of a finished request's reply; its parent is the prompt. None for an unknown rid."""
        try:
            return self.tree.head(_RID + rid).node
        except UnknownHead:
            return None

    def in_flight(self) -> tuple[str, ...]:
        """Rids of its requests that have not finished."""
        attempts = tuple(self._attempts.values())
        for attempt in attempts:
            if (owner := attempt.owner) is not None:
                self.settle(owner)
        return tuple(attempt.rid for attempt in attempts if attempt.running)

    def context_of(self, rid: str) -> Context | None:
        """What :func:`continuation` asks of a rid."""
        attempt = self._attempts.get(rid)
        if attempt is not None and attempt.running:
            return Context(attempt.prompt.stop, attempt.prompt.stop, finished=False)
        reply = self.reply(rid)
        return None if reply is None else Context(reply.start, reply.stop)

    def _attempt(self, req: Any, tokenizer: Any) -> tuple[Attempt, tuple[str, ...]]:
        """What a request asks for, checked, and which requests are aborted for it. Of ``req``, only a BOS to strip is changed."""
        for name in REFUSED:
            if getattr(req, name) is not None:
                raise Unsupported(f"{name} counts or replaces the tokens of one turn; a session's request cannot have it")
        if self.tree.closed:
            raise Unsupported(f"session {self.session_id!r} was closed")
        checked_text(req.rid, "rid")
        running = self.in_flight()
        if self.context_of(req.rid) is not None:
            raise KeyTaken(f"session {self.session_id!r} has a request {req.rid!r} already", key=req.rid, node=self.reply(req.rid))
        tip = self._tip() if self.streaming else None
        where = continuation(req.session_params, self.context_of, in_flight=running, streaming=self.streaming, tip=tip)
        unfinished = None if where.rid is None else self._attempts.get(where.rid)
        engine_items: dict[Any, Any] = {}
        if where.rid is None:
            prompt = PendingPrompt.of(self.tree.root, 0)
        elif unfinished is not None and unfinished.running:
            prompt, engine_items = unfinished.prompt.cut(where.length), dict(unfinished.engine_items)
        else:
            reply = self.reply(where.rid)
            assert reply is not None
            prompt = PendingPrompt.of(reply, where.length)
        stripped = _without_bos(req, tokenizer) if self.controller.strip_bos and prompt.stop else None
        ids = req.input_ids if stripped is None else stripped.input_ids
        if not prompt.stop + len(ids):
            raise OutOfRange("a request without tokens and without history", value=0, limit=1)
        recorded = {name: getattr(req, name) for name in RECORDED if getattr(req, name) is not None}
        if where.rid is not None:
            recorded["continues"] = where.rid
        freeze_metadata(recorded)  # what could not be recorded with the reply is no request
        awaited = None
        if req.mm_inputs is None:
            prompt = prompt.extended(ids, limit=self.prompt_limit)
        else:
            awaited = token_array(token_bytes(ids))
        forgets = tuple(name for name in self.tree.heads if name.startswith(_RID)) if where.forgets else ()
        made = Attempt(self, req.rid, prompt, awaited, engine_items, recorded, forgets)
        if prompt.has_media:
            self.laid(made)
        if stripped is not None:  # nothing is refused from here on
            stripped.apply()
        if tip is not None and where.rid != tip and self.controller.tree_cache is not None:
            self.controller.tree_cache.release_session(self.session_id)  # the KV it keeps is the tip's
        return made, where.aborts

    def laid(self, attempt: Attempt) -> Layout:
        """Its prompt as SGLang wants it. Raises NeedsMedia."""
        prompt = attempt.prompt
        layout = self._layout.behind(prompt.node, prompt.kept)
        layout.lay(prompt, attempt.engine_item)
        self._layout = attempt.layout = layout
        return layout

    @property
    def prompt_limit(self) -> int | None:
        """How many tokens a prompt may have."""
        return None if self.tree.max_tokens is None else self.tree.max_tokens - self.tree.reserve_output

    def _tip(self) -> str | None:
        try:
            rid: str = self.tree.head(_TIP).node.metadata["rid"]
        except UnknownHead:
            return None
        return rid

    def _abort(self, rid: str) -> None:
        attempt = self._attempts.pop(rid, None)
        request = None if attempt is None else attempt.owner
        if request is not None and request.finished_reason is None:
            request.to_finish = sglang().FINISH_ABORT()

    def settle(self, request: Any) -> None:
        """Record what a request has finished with, once. What cannot be recorded is logged, and its rid stays unknown."""
        attempt: Attempt | None = request.attempt
        if attempt is None or request.finished_reason is None:
            return
        request.attempt = None
        if self._attempts.get(attempt.rid) is attempt:
            del self._attempts[attempt.rid]
        if isinstance(request.finished_reason, sglang().FINISH_ABORT):
            return
        try:
            self._record(attempt, request)
        except SessionTreeError as error:
            logger.error("request %s of session %s is not recorded: %s", attempt.rid, self.session_id, error)
        self.last_active_time = self.controller.now

    def _record(self, attempt: Attempt, request: Any) -> None:
        tree, policy = self.tree, self.controller.tail_policy
        if attempt.awaited is not None:
            raise Unsupported("its media were never given")
        seen = len(request.output_ids) if request.finished_len is None else request.finished_len
        output = request.output_ids[: min(seen, request.sampling_params.max_new_tokens)]
        reason = request.finished_reason.to_json()["type"]
        attempt.prompt.check_reply(output, tree.max_tokens)
        prompt = attempt.prompt.committed(tree)
        metadata = {"rid": attempt.rid, **attempt.recorded}
        with tree.draft(prompt, key=attempt.rid, metadata=metadata) as draft:
            draft.extend(output)
            try:
                reply = draft.commit(reason, tail_policy=policy)
            except KeyTaken:  # the rid was forgotten, and is used again for the same prompt
                with tree.draft(prompt, metadata=metadata) as another:
                    another.extend(output)
                    reply = another.commit(reason, tail_policy=policy)
        if attempt.layout is self._layout:
            self._layout.ended(attempt.prompt, reply)
        for name in attempt.forgets:
            tree.drop_head(name)
        tree.set_head(_RID + attempt.rid, reply, expected=None)
        if self.streaming:
            tree.set_head(_TIP, reply)
        model = {**attempt.model, **self.model}
        if model != self.model:
            self.model = model
            _say(tree, _MODEL, model)
        if attempt.forgets:
            self._forget_items()
        for content, (item, with_features) in attempt.engine_items.items():
            self.engine_items.setdefault(content, with_features)
            if self.controller.keep_features:
                self._keep_features(item, with_features)

    def _forget_items(self) -> None:
        """Let go of SGLang's items that no path to a head, and none that is generated behind, has any more."""
        tips = [*self.tree.heads.values(), *(attempt.prompt.node for attempt in tuple(self._attempts.values()))]
        reached = {item.content() for tip in tips for item, *_ in tip.media_spans()}
        self.engine_items = {content: held for content, held in self.engine_items.items() if content in reached}
        if all(attempt.layout is not self._layout for attempt in tuple(self._attempts.values())):
            self._layout = Layout(self.tree.scheme)

    def engine_item(self, item: MediaItem) -> Any:
        """SGLang's item for one of a finished request, with its features. Raises NeedsMedia where nobody holds those."""
        content = item.content()
        found = self.engine_items.get(content)
        if found is None:
            features = self.controller.store.get_features(item)
            if features is None:
                raise NeedsMedia(f"features of {item} are not held any more; send its turn again", items=(item,))
            found = self.engine_items[content] = engine_item(item, features)
        return found

    def _keep_features(self, item: MediaItem, held: Any) -> None:
        try:
            self.controller.store.put_features(item, kept_features(held))
        except (SessionTreeError, TypeError) as error:
            logger.warning("features of %s are held by this process alone: %s", item, error)

    def __repr__(self) -> str:
        kind = "streaming, " if self.streaming else ""
        return f"<TreeSession {self.session_id!r} {kind}{len(self._attempts)} running, {self.tree!r}>"


class Attempt:
    """A request that has not finished. Held by it alone, so that it is gone when that is."""

    __slots__ = (
        "__weakref__",
        "awaited",
        "engine_items",
        "forgets",
        "layout",
        "model",
        "prompt",
        "recorded",
        "request",
        "rid",
        "session",
    )

    def __init__(
        self,
        session: TreeSession,
        rid: str,
        prompt: PendingPrompt,
        awaited: NDArray[np.int32] | None,
        engine_items: dict[Any, tuple[MediaItem, Any]],
        recorded: dict[str, Any],
        forgets: tuple[str, ...],
    ) -> None:
        self.session: TreeSession = session
        self.rid: str = rid
        self.prompt: PendingPrompt = prompt
        self.awaited = awaited  # tokens of its turn, as long as their media are still to come
        self.engine_items: dict[Any, tuple[MediaItem, Any]] = engine_items  # by content, of turns that are no nodes yet
        self.recorded: dict[str, Any] = recorded
        self.forgets: tuple[str, ...] = forgets  # heads that end with its success
        self.layout: Layout | None = None  # where it has media
        self.model: dict[str, Any] = {}  # what its media say of the model
        self.request: ref[Any] | None = None

    @property
    def owner(self) -> Any:
        """Its request; None when that is gone."""
        return None if self.request is None else self.request()

    @property
    def running(self) -> bool:
        """Whether it can still finish with a reply."""
        owner = self.owner
        return owner is not None and owner.finished_reason is None and owner.to_finish is None

    def input_ids(self) -> array[int]:
        """Of the whole prompt, as they were before padding."""
        awaited = 0 if self.awaited is None else len(self.awaited)
        ids = array("q", [0]) * (self.prompt.stop + awaited)
        view = np.frombuffer(ids, np.int64)
        self.prompt.input_ids(out=view[: self.prompt.stop])
        if self.awaited is not None:
            view[self.prompt.stop :] = self.awaited
        return ids

    def engine_item(self, item: MediaItem) -> Any:
        """SGLang's item, of this turn or an earlier one. Raises NeedsMedia."""
        own = self.engine_items.get(item.content())
        return self.session.engine_item(item) if own is None else own[1]

    def take_media(self, request: Any, given: Any) -> None:
        """The turn's MultimodalInputs, offsets in the prompt's coordinates: all of it is taken, or the request is aborted."""
        request._session_mm_items = list(given.mm_items)  # what an abort releases
        before, ids = self.prompt, self.awaited
        try:
            if ids is None:
                raise Unsupported("media for a turn that was given without, or twice")
            if len(request.origin_input_ids) != before.stop + len(ids):
                raise Unsupported(
                    f"padding made {len(request.origin_input_ids)} tokens of {before.stop + len(ids)}; turns come expanded",
                    index=before.stop,
                )
            for name in _WHOLE_PROMPT:
                if getattr(given, name) is not None:
                    raise Unsupported(f"{name} describes one prompt's media, and has no rule for several turns")
            items = [(media_item(item, before.stop), item) for item in given.mm_items]
            self.prompt = before.extended(ids, [item for item, _ in items], limit=self.session.prompt_limit)
            _check_table(given.mrope_positions, before, self.prompt)
            own = {item.content(): (item, placed(engine_item, engine_item.offsets)) for item, engine_item in items}
            self.engine_items = {**own, **self.engine_items}
            laid = self.session.laid(self)
            inputs = self.multimodal_inputs(given)
        except (SessionTreeError, TypeError) as error:
            request.set_finish_with_abort(str(error))
            return
        self.awaited = None
        request.multimodal_inputs = inputs
        if request.origin_input_ids is request.origin_input_ids_unpadded:  # nobody padded it
            request.origin_input_ids = request.origin_input_ids[:]
        laid.write(request.origin_input_ids)  # whatever padded it may have taken text for placeholders

    def multimodal_inputs(self, given: Any = None) -> Any:
        """SGLang's MultimodalInputs of the whole prompt, which is laid out, its own. ``given``: the turn's."""
        assert self.layout is not None
        items = self.layout.items()
        if given is not None and given.mm_items:
            items[-len(given.mm_items) :] = sorted(given.mm_items, key=lambda item: min(item.offsets))
        inputs = sglang().MultimodalInputs(mm_items=items)
        self.model = {name: said for name in _TOKEN_IDS if (said := getattr(given, name, None)) is not None}
        if getattr(given, "token_modalities", None) is not None:
            self.model[_MODALITIES] = True
        known = {**self.model, **self.session.model}
        if known.pop(_MODALITIES, False):
            kinds = np.zeros(self.prompt.stop, np.int64)
            for item in items:
                for first, last in item.offsets:
                    kinds[first : last + 1] = item.modality.value
            inputs.token_modalities = kinds.tolist()
        for name, said in known.items():
            setattr(inputs, name, said)
        if self.prompt.node.scheme.num_axes > 1:
            inputs.mrope_positions = self.layout.table()
            delta = math.floor(self.prompt.mrope_position_delta)  # SGLang cuts fractions off, which is upwards for negative ones
            inputs.mrope_position_delta = torch.tensor([[delta]], dtype=torch.int64)
        return inputs

    def positions_with(self, table: torch.Tensor, output_ids: array[int]) -> torch.Tensor:
        """A table of the prompt, or more, with what was generated so far behind the prompt: (num_axes, prompt + output)."""
        decoded, _ = self.prompt.node.scheme.decode(self.prompt.state, output_ids)
        return torch.cat([table[:, : self.prompt.stop], torch.tensor(decoded)], dim=1)


class _SessionRequest:
    """What a session's request does otherwise than SGLang's ``Req``, from which it is derived too."""

    attempt: Attempt | None

    def extend_image_inputs(self, image_inputs: Any) -> None:
        """Media of the turn, after padding: items, ids, positions and delta of the whole prompt, made anew."""
        if self.attempt is not None:
            self.attempt.take_media(self, image_inputs)

    def init_next_round_input(self, tree_cache: Any = None, cow_mamba: bool | None = None) -> None:
        """As SGLang's; positions of a retracted request's output are those it was decoded at, however often this is called."""
        inputs = self.multimodal_inputs  # type: ignore[attr-defined]
        table = None if inputs is None else inputs.mrope_positions
        super().init_next_round_input(tree_cache, cow_mamba)  # type: ignore[misc]
        if table is not None and self.is_retracted and self.attempt is not None:  # type: ignore[attr-defined]
            inputs.mrope_positions = self.attempt.positions_with(table, self.output_ids)  # type: ignore[attr-defined]

    def update_finish_state(self, new_accepted_len: int = 1) -> None:
        """As SGLang's; what has finished is recorded."""
        super().update_finish_state(new_accepted_len)  # type: ignore[misc]
        if self.attempt is not None:
            self.attempt.session.settle(self)


def _said(tree: Session, kind: str) -> dict[str, Any]:
    """What a head's name says, as the last of its kind; nothing without one."""
    names = [name for name in tree.heads if name.startswith(kind)]
    said: dict[str, Any] = json.loads(max(names, key=lambda name: tree.head(name).version)[len(kind) :]) if names else {}
    return said


def _say(tree: Session, kind: str, what: Mapping[str, Any]) -> None:
    """Keep something with a session, in place of what was kept of this kind. A session has no metadata, but heads have names."""
    before = [name for name in tree.heads if name.startswith(kind)]
    name = kind + json.dumps(what)
    tree.set_head(name, tree.root)
    for other in before:
        if other != name:
            tree.drop_head(other)


@cache
def _derived(base: type) -> type:
    return type(base.__name__, (_SessionRequest, base), {"__doc__": base.__doc__, "__module__": base.__module__})


def _check_table(given: Any, before: PendingPrompt, after: PendingPrompt) -> None:
    """Whether positions that SGLang's processor computed for the turn alone are those of the scheme.

    Raises PositionError, TypeError.
    """
    if given is None:
        return
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"a table of positions is a tensor, not {type(given).__name__}")
    scheme, count = before.node.scheme, after.stop - before.stop
    if tuple(given.shape) != (scheme.num_axes, count):
        raise PositionError(
            f"a table of {tuple(given.shape)} for {count} tokens of {scheme.name}, which has {scheme.num_axes} axes",
            value=tuple(given.shape),
            limit=(scheme.num_axes, count),
        )
    if not scheme.floats:
        differs = (given.cpu().numpy() + int(scheme.next_position(before.state)) != after.last_positions()).any(axis=0)
        if differs.any():
            at = before.stop + int(differs.argmax())
            raise PositionError(f"SGLang's processor places token {at} elsewhere than {scheme.name} with its parameters", value=at)


class _Stripped(NamedTuple):
    """A request's turn without the BOS it begins with: ids, offsets, padded ids and positions together."""

    request: Any
    input_ids: array[int]

    def apply(self) -> None:
        self.request.input_ids = self.input_ids
        given = self.request.mm_inputs
        for item in getattr(given, "mm_items", ()):
            if item.offsets:
                item.offsets = [(first - 1, last - 1) for first, last in item.offsets]
        if getattr(given, "padded_input_ids", None) is not None:
            given.padded_input_ids = given.padded_input_ids[1:]
        if getattr(given, "mrope_positions", None) is not None:
            given.mrope_positions = given.mrope_positions[:, 1:] - 1


def _without_bos(request: Any, tokenizer: Any) -> _Stripped | None:
    """None where there is nothing to strip. Raises MediaSpanError where an item covers the BOS."""
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None or not len(request.input_ids) or request.input_ids[0] != bos:
        return None
    for item in getattr(request.mm_inputs, "mm_items", ()):
        for first, last in item.offsets or ():
            if first == 0:
                kind = item.modality.name.lower()
                raise MediaSpanError(
                    f"a {kind}'s span [0, {last + 1}) covers the BOS token to strip", item=item, span=(0, last + 1)
                )
    return _Stripped(request, request.input_ids[1:])
