"""Continuous batching over a paged KV cache. One call of :meth:`Scheduler.step` is one run of the model; one thread calls it.

A step takes the last sampled token of every reply and, as far as its budget goes, the next chunk of prompts that are not computed
yet. Where only replies go on, they decode by slots that live in the stager. When pages run out, first those go that nobody uses,
then the request that came last is preempted: its pages are given up, its draft stays, and it is computed again when there is room.

The session layer says what runs: a draft is prompt and reply in one, its ``num_computed_tokens`` is all that progress is,
``page_hashes`` names what may be found again, and ``InputStager`` makes the tensors. Nothing here copies a history.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import attrs
import numpy as np
import torch

from engine_bridge import InputStager, page_hashes
from engine_bridge.batches import DecodeBatch, ExtendBatch
from mini_scheduler.encoder import EncoderCache
from mini_scheduler.model import KEYS, ROWS, Model, PagedBatch
from mini_scheduler.pages import PagePool
from mini_scheduler.requests import FinishReason, Output, Request
from mini_scheduler.sampler import logprob, sample
from sessiontree import DraftClosed, LimitExceeded, MediaItem, NeedsMedia, SessionStore, SessionTreeError, Spans, extend_drafts
from sessiontree.annotations import LOGPROBS, WEIGHT_VERSION

_logger = logging.getLogger("mini_scheduler")


@attrs.define
class Counters:
    """What has been done since the start. Tokens count once for each time they were computed; seconds are of the engine's thread.

    ``session_seconds``: of ``step_seconds``, those spent in sessiontree and engine_bridge.
    """

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    evicted_pages: int = 0
    encoded_items: int = 0
    step_seconds: float = 0.0
    session_seconds: float = 0.0


class _SessionTime:
    """Counts what is done inside as the session layer's."""

    __slots__ = ("_began", "_counters")

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._counters.session_seconds += time.perf_counter() - self._began


class _Window(NamedTuple):
    """Path tokens [start, stop) of a request, to be computed in this step."""

    request: Request
    start: int
    stop: int


class Scheduler:
    """``num_pages`` of ``page_size`` tokens hold all KV; ``max_batch_tokens`` go into a step, of ``max_running`` requests at most.

    Raises OutOfRange for capacities below 1, LimitExceeded where a step could not hold a token of each request.
    """

    def __init__(
        self,
        store: SessionStore,
        model: Model,
        *,
        num_pages: int = 256,
        page_size: int = 16,
        max_batch_tokens: int = 64,
        max_running: int = 16,
    ) -> None:
        if max_running > max_batch_tokens:
            what = f"{max_running} requests, each with a token in every step of at most {max_batch_tokens}"
            raise LimitExceeded(what, value=max_running, limit=max_batch_tokens)
        self.counters = Counters()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order in which they came
        self.pool = PagePool(num_pages, page_size)
        self.encoder = EncoderCache(self._encode)
        self._store = store
        self._model = model
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        self._cache = model.new_cache(num_pages, page_size)
        rows = -(-max_batch_tokens // ROWS) * ROWS
        axes = model.num_position_axes
        runs = 4 * rows  # more than enough: a window has at most a run for each of its tokens, and a few where it begins and ends
        self._decode_rows = -(-max_running // ROWS) * ROWS
        self._stager = InputStager(rows, self._decode_rows, runs, num_position_axes=axes, max_decode_width=1)
        self._slots = list(range(max_running - 1, -1, -1))

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def check_fits(self, request: Request) -> None:
        """Whether a request can ever run to its end. Raises LimitExceeded."""
        tokens = request.draft.stop + request.sampling.max_new_tokens
        room = self.pool.num_pages * self.pool.page_size
        for limit, what in ((room, "the KV cache"), (self._model.max_tokens, "the model")):
            if tokens > limit:
                asked = f"{request.draft.stop} tokens of prompt and {request.sampling.max_new_tokens} new ones"
                raise LimitExceeded(f"{asked}; {what} holds {limit}", value=tokens, limit=limit)

    def step(self) -> None:
        """Run the model once, over what is due."""
        began = time.perf_counter()
        self._drop_aborted()
        self._admit()
        windows = self._plan()
        if windows:
            self._run(windows)
        self.counters.steps += bool(windows)
        self.counters.step_seconds += time.perf_counter() - began

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Go on with other weights, between two steps; ``version`` is their number. Raises what the model does, unchanged.

        Replies that run keep their tokens and are preempted, and nothing that was computed is found again: no token from here on
        sees what other weights made.
        """
        self._model.load_weights(weights, version)
        for request in reversed(self.running[:]):
            self._preempt(request)
        self.pool.forget()
        self.encoder.forget()

    # Admission

    def _admit(self) -> None:
        """Take requests in, the first to come first, while there are pages for what they lack of their paths.

        One that has to wait, for pages or for a prefix that is being computed, is overtaken by none.
        """
        while self.waiting and len(self.running) < self._max_running:
            request = self.waiting[0]
            try:
                if not self._find_prefix(request):
                    return
            except SessionTreeError as error:
                self._end(request, "error", error)
                continue
            self.waiting.popleft()
            self.running.append(request)

    def _find_prefix(self, request: Request) -> bool:
        """Give a request the pages that hold the beginning of its path; whether it can run now."""
        draft, pool = request.draft, self.pool
        with self._timed():
            request.hashes = page_hashes(draft.parent, "sglang", pool.page_size, salt=request.salt)
            usable = request.hashes[: (draft.stop - 1) // pool.page_size]  # at least one token is run, for its logits
        found = pool.find(usable)
        shared = len(found) < len(usable) and any(
            usable[len(found)] in other.hashes[other.named :] for other in self.running
        )  # somebody is computing it right now: it is worth the wait
        need = -(-draft.stop // pool.page_size) - len(found)
        if shared or need > pool.available:
            pool.release(found)
            return False
        request.pages = found
        request.named = len(found)
        with self._timed():
            draft.num_computed_tokens = len(found) * pool.page_size
        self.counters.cached_tokens += draft.num_computed_tokens
        if request.cached_tokens is None:
            request.cached_tokens = draft.num_computed_tokens
        return True

    # Planning

    def _plan(self) -> list[_Window]:
        """What each request computes in this step: a token of every reply, and of prompts what the budget has left."""
        planned: dict[Request, _Window] = {}
        budget = self._max_batch_tokens
        for request in sorted(self.running, key=lambda request: request.left > 1):  # replies first; both in order of admission
            if request not in self.running:  # preempted for one before it
                continue
            start = request.draft.num_computed_tokens
            stop = min(request.draft.stop, start + budget)
            if stop > start and self._make_room(request, stop):
                planned[request] = _Window(request, start, stop)
                budget -= stop - start
        return [window for request, window in planned.items() if request in self.running]

    def _make_room(self, request: Request, stop: int) -> bool:
        """Pages for path tokens up to ``stop``; whether the request is still running.

        Who came last gives way. So the first of those that run always gets on, and every request is the first at some time.
        """
        while len(request.pages) * self.pool.page_size < stop:
            if self.pool.available:
                request.pages.append(self.pool.take())
                continue
            last = self.running[-1]
            self._preempt(last)
            if last is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._let_go(request)
        with self._timed():
            request.draft.preempt()
        self.waiting.appendleft(request)
        self.counters.preemptions += 1

    def _let_go(self, request: Request) -> None:
        """It does not run any more: its pages and its slot are free."""
        self.running.remove(request)
        self.pool.release(request.pages)
        request.pages = []
        if request.slot is not None:
            self._stager.retire([request.slot])
            self._slots.append(request.slot)
            request.slot = None

    # Running

    def _run(self, windows: Sequence[_Window]) -> None:
        requests = [window.request for window in windows]
        drafts = [request.draft for request in requests]
        batch: ExtendBatch | DecodeBatch
        pictures: list[tuple[int, int, torch.Tensor]] = []
        if all(request.slot is not None for request in requests):
            slots = np.array([request.slot for request in requests], np.int32)
            with self._timed():
                batch = self._stager.decode(slots)
            kind = "decode"
            self.counters.decode_tokens += len(windows)
        else:
            starts, stops = [window.start for window in windows], [window.stop for window in windows]
            # A chunk of a prompt is its node's, which is read in less time than the draft behind it.
            holders = [draft.parent if stop <= draft.start else draft for draft, stop in zip(drafts, stops, strict=True)]
            with self._timed():
                batch = self._stager.extend(holders, starts, stops)
            kind = "extend"
            self.counters.prefill_tokens += batch.num_tokens
            if (missing := self._take_pictures(batch, requests, pictures)) is not None:
                request, error = missing
                self._end(request, "error", error)
                return
        rows = -(-batch.num_tokens // ROWS) * ROWS
        buffers = self._stager.buffers  # whole: behind the batch's own tokens they hold zeros
        logits = self._model.forward(
            buffers[f"{kind}.input_ids"][:rows],
            buffers[f"{kind}.positions"][:, :rows],
            pictures,
            batch.logits_indices.long(),
            self._cache,
            self._places(windows, rows),
        )
        done = [row for row, window in enumerate(windows) if window.stop == window.request.draft.stop]
        sampled = sample(logits[done], [requests[row] for row in done])
        for row, token in zip(done, sampled, strict=True):
            if (request := requests[row]).for_training:
                request.logprobs.append(logprob(logits[row], request, token))
                request.versions.append(self._model.version)
        with self._timed():
            for draft, window in zip(drafts, windows, strict=True):
                draft.num_computed_tokens = window.stop
        for request in requests:
            self._name_pages(request)
        if done:
            self._take_tokens([requests[row] for row in done], sampled)

    def _places(self, windows: Sequence[_Window], rows: int) -> PagedBatch:
        """Block table and places of a batch; rows behind its tokens read the first token of the first request."""
        size = self.pool.page_size
        longest = max(window.stop for window in windows)
        table = np.zeros((len(windows), -(-longest // KEYS) * (KEYS // size)), np.int64)
        requests, indices = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        at = 0
        for number, (request, start, stop) in enumerate(windows):
            table[number, : len(request.pages)] = request.pages[: table.shape[1]]
            requests[at : at + stop - start] = number
            indices[at : at + stop - start] = np.arange(start, stop)
            at += stop - start
        places = table[requests[:at], indices[:at] // size] * size + indices[:at] % size
        return PagedBatch(*map(torch.from_numpy, (places, table, requests, indices)))

    def _take_pictures(
        self, batch: ExtendBatch, requests: Sequence[Request], pictures: list[tuple[int, int, torch.Tensor]]
    ) -> tuple[Request, SessionTreeError] | None:
        """Add encoder outputs for the columns of a batch that show something; or say which request lacks the pixels, and why."""
        for span in batch.media_spans:
            request = requests[span.request]
            try:
                rows = self.encoder.rows(span.item, request.salt)
            except SessionTreeError as error:  # it is not held, or damaged, or cannot be read: that is this request's alone
                return request, error
            pictures.append((span.start, span.stop, rows[span.first_row : span.first_row + span.stop - span.start]))
        return None

    def _encode(self, item: MediaItem) -> torch.Tensor:
        features = self._store.get_features(item)
        if features is None or item.grid_thw is None:
            raise NeedsMedia(f"the pixels of {item} are not held", items=(item,))
        self.counters.encoded_items += 1
        return self._model.encode(torch.tensor(features["pixel_values"]), item.grid_thw)

    def _name_pages(self, request: Request) -> None:
        """Let others find its pages that are complete, as far as their names are known."""
        complete = request.draft.num_computed_tokens // self.pool.page_size
        for page in range(request.named, min(complete, len(request.hashes))):
            self.pool.name(request.pages[page], request.hashes[page])
            request.named = page + 1

    # Tokens

    def _take_tokens(self, requests: Sequence[Request], sampled: Sequence[int]) -> None:
        """Give each its token, in the draft, in the slot and as text; end those that are done.

        A slot gets each token of its draft, by whichever kind of batch it was made: the two are to say the same.
        """
        drafts = [request.draft for request in requests]
        decoding = [row for row, request in enumerate(requests) if request.slot is not None]
        slots, tokens = np.array([requests[row].slot for row in decoding], np.int32), np.array(sampled, np.int32)
        with self._timed():
            extend_drafts(drafts, tokens)
            if decoding:
                self._stager.advance(slots, tokens[decoding])
        for request, token in zip(requests, sampled, strict=True):
            self._take_token(request, token)
        self._give_slots([request for request in requests if request.slot is None and not request.ended])

    def _take_token(self, request: Request, token: int) -> None:
        sampling = request.sampling
        ends = token in sampling.stop_token_ids or (token == self._model.eos_token_id and not sampling.ignore_eos)
        text = "" if ends else request.text.push(token)
        if ends or request.text.matched is not None:
            self._finish(request, token, text, "stop", token if ends else request.text.matched)
        elif len(request.draft) >= sampling.max_new_tokens:
            self._finish(request, token, text, "length", None)
        else:
            _tell(request, Output((token,), text, cached_tokens=request.cached_tokens or 0))

    def _give_slots(self, requests: Sequence[Request]) -> None:
        """A slot for each that goes on from here one token at a time."""
        if requests:
            for request in requests:
                request.slot = self._slots.pop()
            with self._timed():
                self._stager.admit([request.draft for request in requests], [request.slot for request in requests])

    # Ends

    def _finish(self, request: Request, token: int, text: str, reason: FinishReason, matched: int | str | None) -> None:
        """Make the node, then say so. What it has in pages can be found from here on."""
        text += request.text.finish()
        try:
            with self._timed():
                said = _said_of(request) if request.for_training else None
                node = request.draft.commit(reason, metadata=request.metadata | {"text": request.text.text}, annotations=said)
                request.hashes = page_hashes(node, "sglang", self.pool.page_size, salt=request.salt)
        except SessionTreeError as error:
            self._end(request, "error", error)
            return
        self._name_pages(request)
        self._let_go(request)
        request.ended = True
        _tell(request, Output((token,), text, reason, matched, node, cached_tokens=request.cached_tokens or 0))

    def _drop_aborted(self) -> None:
        for request in (*self.running, *self.waiting):
            if request.aborted is None and request.draft.closed:  # by store.tick
                request.aborted = str(request.draft.how_closed)
            if request.aborted is not None:
                self._end(request, "abort", reason=request.aborted)

    def _end(self, request: Request, finish: FinishReason, error: SessionTreeError | None = None, *, reason: str = "") -> None:
        """End a request that makes no node. Nothing of it stays."""
        if request in self.running:
            self._let_go(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.ended = True
        try:
            request.draft.abort()
        except DraftClosed:
            _logger.warning("%r ended by %s, but its draft was %s", request, finish, request.draft.how_closed)
        _tell(request, Output((), "", finish, error=error, reason=reason, cached_tokens=request.cached_tokens or 0))

    def fail(self, error: SessionTreeError) -> None:
        """End all that a step may have touched, those that run and the one that was to: nobody can say what it has done."""
        for request in (*self.running, *list(self.waiting)[:1]):
            self._end(request, "error", error)

    def _timed(self) -> _SessionTime:
        return _SessionTime(self.counters)


def _said_of(request: Request) -> dict[str, Any]:
    """What a trainer needs to know of a reply: a number for each token, and which weights sampled which stretch."""
    versions = request.versions
    starts = [at for at in range(len(versions)) if at == 0 or versions[at] != versions[at - 1]]
    spans = [(start, stop, versions[start]) for start, stop in pairwise([*starts, len(versions)])]
    return {LOGPROBS: np.array(request.logprobs, np.float32), WEIGHT_VERSION: Spans(spans)}


def _tell(request: Request, output: Output) -> None:
    try:
        request.tell(output)
    except Exception:  # whoever listened is gone; the others go on
        _logger.exception("%r could not be told of an output", request)
