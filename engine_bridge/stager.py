"""Whole batches for the GPU: nodes and drafts in, tensors at fixed addresses out, by one copy and one kernel.

Positions travel as runs, a few words however many tokens they cover, and are written out on the device. A batch is gathered
first, which is where anything can be wrong with it, then written to one staging area in pinned memory, copied and expanded. The
areas are a ring: one is written again only after the event of its last copy. With CUDA graphs, copy and kernel are one launch.

Requests that decode live on the device: how long their paths are, their deltas and their last tokens. A step sends slots alone; so
few words that the kernel reads them itself, and none where they are those of the step before.

On the CPU the same class does the same in NumPy, without Triton.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from engine_bridge.batches import DecodeBatch, DecodeOutputs, ExtendBatch, ExtendOutputs, buffers
from engine_bridge.expand import FEW, HostPens, HostTables, expand_decode, expand_extend
from engine_bridge.layout import FIELDS, HEADER, WORD, WORD_BYTES, ExtendArea, ExtendLayout, bytes_of
from engine_bridge.ring import Ring
from engine_bridge.rows import Gathered, check_limit, gather, path_of, windows
from sessiontree import Draft, LimitExceeded, Node, OutOfRange, Unsupported
from sessiontree.frozen import to_numpy
from sessiontree.positions import Mode
from sessiontree.positions.runs import counted
from sessiontree.tokens import as_index, shown, token_bytes

_DTYPES: Final = (torch.int32, torch.int64, torch.float32)
_pack_header = struct.Struct("<5i").pack_into
_MOST_WORDS: Final = 2**31 - 1
_SMALLEST: Final = 1024  # words of a payload, below which copies are not told apart


class InputStager:
    """Makes the inputs of whole batches, at fixed addresses. One thread at a time; work goes to the current CUDA stream.

    ``max_tokens``, ``max_requests``, ``max_runs`` (None: four a request): of an extend batch; as many slots as requests are there
    to decode in. ``num_position_axes``: rows of ``positions``; schemes of that many axes can be in a batch, and text schemes, whose
    one position is written to each. ``dtype``: of positions and deltas: torch.int64, int32, or float32 for schemes whose engine
    takes floats; into integers a float goes as engines cast it, towards zero, once. ``depth``: staging areas in the ring.
    ``cuda_graph``: launch copy and kernel as one graph, captured when a size first comes. ``max_decode_width``: tokens that a
    request may have in one decode step. ``sampled_tokens``: (max_requests, max_decode_width) int64 on the device, where a sampler
    may leave its tokens for :meth:`advance`.

    Raises TypeError, OutOfRange for a capacity below 1, LimitExceeded for capacities whose product needs more than 32 bits.
    """

    def __init__(
        self,
        max_tokens: int,
        max_requests: int,
        max_runs: int | None = None,
        num_position_axes: int = 3,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.int64,
        depth: int = 2,
        cuda_graph: bool = True,
        *,
        max_decode_width: int = 8,
    ) -> None:
        if dtype not in _DTYPES:
            raise TypeError(f"positions are {', '.join(map(str, _DTYPES))}, not {dtype}")
        self.max_tokens: int = _capacity(max_tokens, "max_tokens")
        self.max_requests: int = _capacity(max_requests, "max_requests")
        self.max_runs: int = _capacity(4 * self.max_requests if max_runs is None else max_runs, "max_runs")
        self.num_position_axes: int = _capacity(num_position_axes, "num_position_axes")
        self.max_decode_width: int = _capacity(max_decode_width, "max_decode_width")
        self.device: torch.device = torch.device(device)
        self.dtype = dtype
        self.cuda_graph: bool = bool(cuda_graph)
        cuda = self.device.type == "cuda"
        depth = _capacity(depth, "depth")
        self._layout = layout = ExtendLayout.of(self.max_tokens, self.max_requests, self.max_runs, self.num_position_axes)
        self._ring_size = 1 << (2 * self.max_decode_width - 1).bit_length()
        decoding = self.max_requests * max(self._ring_size, self.num_position_axes * self.max_decode_width)
        for words, what in ((layout.words, "a staging area"), (decoding, "a table of what decodes")):
            if words > _MOST_WORDS:  # the kernels count them in 32 bits
                raise LimitExceeded(f"{what} of {shown(words)} words", value=words, limit=_MOST_WORDS)
        self._extend_ring = ring = Ring(layout.words, depth, self.device, cuda)
        self._areas = [ExtendArea(layout, words) for words in ring.areas]
        self._extended = (0, 0)  # tokens and requests that the outputs hold

        def columns(at: int, count: int) -> torch.Tensor:
            return ring.device[at : at + count]

        requests = self.max_requests
        self._extend = ExtendOutputs(
            self._zeros(self.max_tokens, dtype=torch.int64),
            self._zeros(self.num_position_axes, self.max_tokens),
            self._zeros(requests, 1),
            columns(layout.cu_seqlens_q, requests + 1),
            columns(layout.seq_lens, requests),
            columns(layout.prefix_lens, requests),
            columns(layout.req_slots, requests),
            columns(layout.logits_indices, requests),
        )
        self._extended_arrays = () if cuda else self._extend.arrays()
        # What decodes.
        self._decode_ring = Ring(HEADER + requests, depth, self.device, cuda)
        self._slot_areas = [(bytes_of(words), words[HEADER:]) for words in self._decode_ring.areas]
        self._decoded = (0, 0)
        self._staged: tuple[bytes, int] | None = None  # slots and width of the last step, while all of them live
        self._distinct = False  # whether those slots are known to differ
        self._decode = DecodeOutputs(
            self._zeros(requests * self.max_decode_width, dtype=torch.int64),
            self._zeros(self.num_position_axes, requests * self.max_decode_width),
            self._zeros(requests, 1),
            self._zeros(requests, dtype=torch.int32),
            self._decode_ring.device[HEADER:],
        )
        self._state = self._zeros(3, requests, dtype=torch.int32)  # lengths, deltas, whether those are bits of floats
        self._history = self._zeros(requests, self._ring_size, dtype=torch.int32)
        self._live = np.zeros(requests, np.bool)
        self._lengths = np.zeros(requests, np.int64)
        self._longest = np.zeros(requests, np.int64)  # since it was admitted: what lies further back is overwritten
        self._shortest = np.zeros(requests, np.int64)  # its length when it was admitted
        self._update_ring = Ring(HEADER + requests * (2 + self.max_decode_width), depth, self.device, cuda)
        self.sampled_tokens: torch.Tensor = self._zeros(requests, self.max_decode_width, dtype=torch.int64)
        self._counted = self._live.data, self._lengths.data, self._longest.data
        self._stamps = np.zeros(requests, np.int64)
        self._host = None if cuda else HostPens(HostTables(self._state.numpy(), self._history.numpy(), *self._decode.arrays()))
        self._kernels: Any = None
        if cuda:
            from engine_bridge import kernels  # noqa: PLC0415  # Triton is there only with a GPU

            self._kernels = kernels

    def _zeros(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The outputs whole, tails included, for whoever captures a model: ``extend.input_ids`` and so on.

        Behind a batch's own tokens and requests everything is 0, and ``cu_seqlens_q`` stays at the number of tokens.
        """
        extend, decode = buffers(self._extend), buffers(self._decode)
        return {f"extend.{name}": of for name, of in extend.items()} | {f"decode.{name}": of for name, of in decode.items()}

    # Prefill

    def extend(
        self,
        nodes: Sequence[Node | Draft],
        start: int | Sequence[int] | NDArray[np.integer[Any]] | None = None,
        stop: int | Sequence[int] | NDArray[np.integer[Any]] | None = None,
        *,
        slots: Any = None,
        mode: Mode = "as_decoded",
    ) -> ExtendBatch:
        """Inputs for path tokens ``[start, stop)`` of each of ``nodes``, nodes and drafts, packed one behind the other.

        ``start``, ``stop``: one for all, one each (a list or an integer array), or None for 0 and the path's end. A window may
        begin and end anywhere: in an ancestor, inside media, across many nodes. ``slots``: (B,) ints that come back as
        ``req_slots``, by default 0, 1, ...

        Raises OutOfRange for a window outside its path, LimitExceeded for a batch beyond a capacity, Unsupported for a scheme of
        other axes or whose positions need more than 32 bits, PositionError for the mode, TypeError. A call that raises leaves the
        last batch as it was; one that is interrupted while it writes leaves none, and the next is whole.
        """
        starts, stops = windows(nodes, start, stop)
        count = len(starts)
        if count > self.max_requests:
            raise LimitExceeded(
                f"a batch with {count} requests; max_requests is {self.max_requests}", value=count, limit=self.max_requests
            )
        named = None if slots is None else self._named_slots(slots, count)
        at = self._extend_ring.next()
        area = self._areas[at]
        floats = self.dtype is torch.float32
        found = gather(nodes, starts, stops, mode, self.num_position_axes, floats, area.pen, self.max_tokens)
        rows = count if found.rows is None else len(found.rows)
        if rows > self.max_runs:
            raise LimitExceeded(f"a batch with {rows} runs; max_runs is {self.max_runs}", value=rows, limit=self.max_runs)
        tokens, dirty = found.num_tokens, self._extended
        self._extend.serial += 1  # from here on the last batch is no more
        self._extended = max(tokens, dirty[0]), max(count, dirty[1])  # until it is known what the outputs hold
        words = self._write(area, found, starts, stops, named, tokens)
        self._launch_extend(at, words)
        self._extended = tokens, count
        return ExtendBatch(self._extend, count, tokens, (starts, stops), tuple(found.spans), mode)

    def _named_slots(self, slots: Any, count: int) -> NDArray[np.int32]:
        named = _slot_numbers(slots)
        if len(named) != count:
            raise TypeError(f"{count} nodes and slots for {len(named)}")
        return named

    def _write(
        self,
        area: ExtendArea,
        found: Gathered,
        starts: list[int],
        stops: list[int],
        slots: NDArray[np.int32] | None,
        tokens: int,
    ) -> int:
        """Write a batch to an area that has its ``tokens``; returns how many words are to be copied."""
        layout, count = self._layout, len(starts)
        pack, pen = _packer(count), area.words_pen
        used_requests, used_kinds = area.num_requests, area.num_kinds
        if count > used_requests:
            area.num_requests = count
        cu = area.cu_seqlens_q
        if count == 1:  # what is quick for many costs most of the time here
            words = area.words
            words[layout.prefix_lens], words[layout.seq_lens] = starts[0], stops[0]
            cu[1:] = tokens
            words[layout.req_slots] = 0 if slots is None else slots[0]
            words[layout.logits_indices] = tokens - 1
            words[layout.deltas] = 0
        else:
            pack(pen, layout.seq_lens * WORD_BYTES, *stops)
            pack(pen, layout.prefix_lens * WORD_BYTES, *starts)
            cu[count + 1 :] = tokens
            ends = cu[1 : count + 1]
            np.subtract(area.seq_lens[:count], area.prefix_lens[:count], out=ends)
            np.add.accumulate(ends, out=ends)
            area.req_slots[:count] = counted(count) if slots is None else slots
            np.subtract(ends, 1, out=area.logits_indices[:count])
            area.deltas[:count] = 0
        if found.deltas:
            deltas: list[int | float] = [0] * count
            for request, delta in found.deltas.items():
                deltas[request] = delta
            kind = np.float32 if self.dtype is torch.float32 else WORD
            area.deltas[:count] = np.fromiter(deltas, kind, count).view(WORD)
        if used_requests > count:
            for column in (area.seq_lens, area.prefix_lens, area.req_slots, area.logits_indices):
                column[count:] = 0
            area.num_requests = count
        used = tokens
        if found.rows is None:
            rows = count
            if count == 1:
                words = area.words
                words[layout.dst], words[layout.dst + 1], words[layout.fields] = 0, tokens, found.bases[0]
            else:
                area.dst[: count + 1] = cu[: count + 1]
                shifts = area.fields[0, :count]
                pack(pen, layout.fields * WORD_BYTES, *found.bases)
                shifts -= cu[:count]
            if used_kinds:
                area.kind[:used_kinds] = 0
                area.num_kinds = 0
        else:
            rows = len(found.rows)
            table = np.array(found.rows, np.int64).reshape(rows, FIELDS + 2).T
            area.dst[:rows] = table[0]
            area.dst[rows] = tokens
            area.num_kinds = max(rows, used_kinds)
            area.kind[:used_kinds] = 0
            area.kind[:rows] = table[1]
            area.fields[:, :rows] = table[2:]
            area.num_kinds = rows
            for numbers in found.payload:
                area.payload[used : used + len(numbers)] = numbers
                used += len(numbers)
        _pack_header(area.words_pen, 0, tokens, count, rows, *self._extended)
        room = max(_SMALLEST, 1 << (used - 1).bit_length()) if used else _SMALLEST
        return min(layout.payload + room, layout.words)

    def _launch_extend(self, at: int, words: int) -> None:
        if self._kernels is None:
            expand_extend(self._areas[0], *self._extended_arrays)
        else:
            self._extend_ring.launch(at, words, self._expand_extend, self.cuda_graph)

    def _expand_extend(self, _: int = 0) -> None:
        layout, out, kernels = self._layout, self._extend, self._kernels
        block = kernels.BLOCK
        kernels.extend_kernel[(math.ceil(max(self.max_tokens, self.max_requests) / block),)](
            self._extend_ring.device,
            out.input_ids,
            out.positions,
            out.mrope_deltas,
            self.max_tokens,
            self.max_requests,
            self.max_runs,
            self.num_position_axes,
            layout.deltas,
            layout.dst,
            layout.kind,
            layout.fields,
            layout.payload,
            self.max_runs.bit_length(),
            self.dtype is torch.float32,
            block,
        )

    # Decoding

    def admit(self, nodes: Sequence[Node | Draft], slots: Any) -> None:
        """Let the requests of ``nodes`` decode in ``slots``: ints below max_requests, each free.

        A path's last token is what its first decode step runs: admit a draft when it has its first sampled token, or a node and
        :meth:`advance` it by that. Raises OutOfRange for a slot outside 0..max_requests - 1 or an empty path, Unsupported for a
        slot that is taken, a path that ends inside media and a scheme that decodes by a plan (extend its draft by one token
        instead), TypeError. Nothing is admitted then.
        """
        named = self._slots(slots, unique=True)
        if len(named) != len(nodes):
            raise TypeError(f"{len(nodes)} nodes and slots for {len(named)}")
        taken = np.flatnonzero(self._live[named])
        if len(taken):
            raise Unsupported(f"slot {named[taken[0]]} is taken", slot=int(named[taken[0]]))
        state = np.zeros((3, len(nodes)), WORD)
        history = np.zeros((len(nodes), self._ring_size), WORD)
        for row, node in enumerate(nodes):
            state[:, row], tail = self._admitted(node)
            history[row, np.arange(node.stop - len(tail), node.stop) % self._ring_size] = tail
        if self._host is not None:
            self._host.tables.state[:, named] = state
            self._host.tables.history[named] = history
        else:
            where = torch.from_numpy(named.astype(np.int64)).to(self.device)
            self._state[:, where] = torch.from_numpy(state).to(self.device)
            self._history[where] = torch.from_numpy(history).to(self.device)
        self._lengths[named] = self._longest[named] = self._shortest[named] = state[0]
        self._live[named] = True

    def _admitted(self, node: Node | Draft) -> tuple[tuple[int, int, int], NDArray[np.int32]]:
        state = path_of(node).position_state()
        if state.open_block is not None:
            raise Unsupported(f"{node!r} ends inside an item; nothing can be decoded there")
        if not node.stop:
            raise OutOfRange(f"{node!r} has no tokens on its path", value=0, limit=1)
        scheme = node.scheme
        if scheme.decode_room(state) is not None:
            raise Unsupported(
                f"{scheme.name} decodes by a plan, not by a delta; extend its draft token by token", scheme=scheme.name
            )
        check_limit(scheme)
        delta = scheme.mrope_position_delta(state)
        floats = isinstance(delta, float)
        word = int(np.float32(delta).view(WORD)) if floats else int(delta)
        return (node.stop, word, int(floats)), node.input_ids(max(0, node.stop - self._ring_size))

    def decode(self, slots: Any, width: int = 1) -> DecodeBatch:
        """Inputs of a step: the last ``width`` tokens of each of ``slots``, (B,) ints, at index + delta on every axis.

        The keys and values of all tokens before them must be in the engine's cache. Raises OutOfRange for a slot outside
        0..max_requests - 1 or that was not admitted, LimitExceeded for more than max_requests slots or a width beyond
        max_decode_width, TypeError.
        """
        named = slots if type(slots) is np.ndarray and slots.dtype is WORD and slots.ndim == 1 else self._slots(slots)
        count = len(named)
        if count > self.max_requests or width.__class__ is not int or not 1 <= width <= self.max_decode_width:
            width = self._checked_width(count, width)
        same = named.tobytes(), width
        if same == self._staged:  # the device has these
            self._decode.serial += 1
            self._launch_decode(self._decode_ring.at, False, count, width, self._decoded)
            return DecodeBatch(self._decode, count, width)
        try:
            # As unsigned numbers, those below 0 are too large as well.
            if b"\0" in self._live.take(named.view(np.uint32)).tobytes():
                raise IndexError
        except IndexError:
            self._refuse_slots(named)
        if width > 1:
            self._check_width(named, width)
        at = self._decode_ring.next()
        pen, place = self._slot_areas[at]
        dirty_tokens, dirty = self._decoded
        tokens = count * width
        most = tokens if tokens > dirty_tokens else dirty_tokens
        self._decode.serial += 1  # from here on the last step is no more
        self._staged, self._distinct = None, False
        self._decoded = reset = most, count if count > dirty else dirty
        place[:count] = named
        _pack_header(pen, 0, tokens, count, 0, *reset)
        self._launch_decode(at, True, count, width, reset)
        self._decoded = tokens, count
        self._staged = same
        return DecodeBatch(self._decode, count, width)

    def _launch_decode(self, at: int, staged: bool, count: int, width: int, dirty: tuple[int, int]) -> None:
        ring = self._decode_ring
        if self._host is None:
            kernel = partial(self._expand_decode, width, staged)
            ring.launch(at, 0, kernel, self.cuda_graph, 2 * width + staged)
            return
        area = ring.areas[at]
        clean = dirty[1] <= count and dirty[0] <= count * width
        if not clean:
            area[HEADER + count :] = 0
        slots = area[HEADER : HEADER + count]
        if clean and count <= FEW and width == 1 and self._host.expand(slots.tolist()):
            return
        expand_decode(slots, width, dirty, self._host.tables)

    def _expand_decode(self, width: int, staged: bool, at: int) -> None:
        out, kernels, ring = self._decode, self._kernels, self._decode_ring
        block = kernels.BLOCK
        tokens = self.max_requests * self.max_decode_width
        kernels.decode_kernel[(math.ceil(tokens / block),)](
            ring.host[at],
            ring.device,
            self._state,
            self._history,
            out.input_ids,
            out.positions,
            out.seq_lens,
            out.mrope_deltas,
            staged,
            self.max_requests,
            tokens,
            self.num_position_axes,
            width,
            self._ring_size,
            self.dtype is torch.float32,
            block,
        )

    def advance(self, slots: Any, token_ids: Any, counts: Any = None) -> None:
        """Put sampled tokens behind the paths of ``slots``, each named once.

        ``token_ids``: (B,) or (B, k) ints: a tensor on the stager's device, whose values are not looked at
        (``sampled_tokens[:B, :k]`` spares a copy), or numbers of the host's, 0..2**31 - 1. ``counts``: (B,) ints in 0..k, how many
        of its row each takes (those that a speculative step accepted); None: all.

        Raises OutOfRange, LimitExceeded for k beyond max_decode_width, TypeError; nothing is taken then. A call that is
        interrupted while it writes can leave its slots free, to be admitted again.
        """
        named = self._distinct_slots(slots)
        if isinstance(token_ids, torch.Tensor) and self.device.type != "cpu" and token_ids.device.type == self.device.type:
            if token_ids.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"token ids are int32 or int64, not {token_ids.dtype}")
            tokens: Any = token_ids
        else:
            tokens = _token_rows(token_ids, len(named))
        if tokens.ndim not in (1, 2) or len(tokens) != len(named):
            raise TypeError(f"{len(named)} slots and token ids of shape {tuple(tokens.shape)}")
        width = 1 if tokens.ndim == 1 else tokens.shape[1]
        if width > self.max_decode_width:
            raise LimitExceeded(
                f"{width} tokens a slot at once; max_decode_width is {self.max_decode_width}",
                value=width,
                limit=self.max_decode_width,
            )
        taken = None if counts is None else self._counts(counts, named, width)
        self._update(named, taken, tokens.reshape(len(named), width), width)

    def rollback(self, slots: Any, seq_lens: Any) -> None:
        """Take the paths of ``slots``, each named once, back to ``seq_lens`` tokens: (B,) ints, such as the ``stop`` of each draft.

        Raises OutOfRange for a length above the path's or below the one that its slot was admitted with, LimitExceeded where the
        token that the next step needs is no longer held (a path keeps its last ``2 * max_decode_width`` tokens or more), TypeError;
        nothing is taken back then. An interrupt does as in :meth:`advance`.
        """
        named = self._distinct_slots(slots)
        after = self._lengths_given(seq_lens, named)
        for wrong, error in (
            ((after < self._shortest[named]) | (after > self._lengths[named]), OutOfRange),
            (self._longest[named] - after > self._ring_size - 1, LimitExceeded),
        ):
            found = np.flatnonzero(wrong)
            if len(found):
                slot, value = int(named[found[0]]), int(after[found[0]])
                most = int(self._lengths[slot])
                least = max(int(self._shortest[slot]), int(self._longest[slot]) - self._ring_size + 1)
                raise error(
                    f"slot {slot} can go back to {least}..{most} tokens, not to {value}: no further than it was admitted with, nor "
                    f"than the last {self._ring_size} that it had",
                    value=value,
                    limit=most if value > most else least,
                )
        self._update(named, after - self._lengths[named], None, 0)

    def _lengths_given(self, numbers: Any, named: NDArray[np.int32]) -> NDArray[np.int64]:
        """A number for each slot."""
        given = np.frombuffer(token_bytes(numbers), WORD).astype(np.int64)
        if len(given) != len(named):
            raise TypeError(f"{len(named)} slots and numbers for {len(given)}")
        return given

    def _counts(self, counts: Any, named: NDArray[np.int32], most: int) -> NDArray[np.int64]:
        given = self._lengths_given(counts, named)
        over = np.flatnonzero(given > most)
        if len(over):
            slot, value = int(named[over[0]]), int(given[over[0]])
            raise OutOfRange(f"slot {slot} is to take {value} of {most} tokens", value=value, limit=most)
        return given

    def _update(self, named: NDArray[np.int32], counts: NDArray[np.int64] | None, rows: Any, width: int) -> None:
        """Write ``rows``, (B, width), behind the paths, or of each as many as ``counts`` says."""
        if not len(named):
            return
        staged, self._staged = self._staged, None
        if self._host is not None and counts is None and width == 1 and len(named) <= FEW:
            self._put(self._host, named.tolist(), rows[:, 0].tolist())
            self._staged = staged
            return
        self._live[named] = False  # until host and device agree again
        if self._host is None:
            self._launch_update(named, counts, rows, width, staged)
        else:
            history, lengths = self._host.tables.history, self._host.tables.state[0]
            for step in range(width):
                some, taken = (named, rows) if counts is None else (named[counts > step], rows[counts > step])
                history[some, (lengths[some] + step) & (self._ring_size - 1)] = taken[:, step]
            lengths[named] += WORD.type(width) if counts is None else counts.astype(WORD)
        after = self._lengths[named] + (width if counts is None else counts)
        self._lengths[named] = after
        self._longest[named] = np.maximum(self._longest[named], after)
        self._live[named] = True
        if counts is None or staged is None or staged[1] == 1:  # otherwise it is to be asked again what a wide step finds
            self._staged = staged

    def _put(self, pens: HostPens, slots: list[int], tokens: list[int]) -> None:
        """One token behind each of a few paths: as :meth:`_update`, number by number."""
        live, lengths, longest = self._counted
        for slot, token in zip(slots, tokens, strict=True):
            live[slot] = False
            pens.put(slot, token)
            lengths[slot] = after = pens.lengths[slot]
            longest[slot] = max(longest[slot], after)
            live[slot] = True

    def _launch_update(
        self,
        named: NDArray[np.int32],
        counts: NDArray[np.int64] | None,
        rows: Any,
        width: int,
        staged: tuple[bytes, int] | None,
    ) -> None:
        number, sampled = len(named), self.sampled_tokens
        on_device = isinstance(rows, torch.Tensor)
        if on_device and not _is_part(rows, sampled):
            own = rows.untyped_storage().data_ptr() == sampled.untyped_storage().data_ptr()
            sampled[:number, :width].copy_(rows.clone() if own else rows, non_blocking=True)
        if on_device and counts is None and staged is not None and named.tobytes() == staged[0]:
            ring = self._decode_ring  # whose slots are these already
            ring.launch(ring.at, 0, partial(self._advance, ring, sampled, width, False), self.cuda_graph, -width)
            return
        ring, most = self._update_ring, self.max_requests
        at = ring.next()
        area = ring.areas[at]
        _pack_header(bytes_of(area), 0, 0, number, 0, 0, 0)
        area[HEADER : HEADER + number] = named
        area[HEADER + most : HEADER + most + number] = width if counts is None else counts
        words = HEADER + 2 * most
        tokens = sampled
        if not on_device:
            tokens = ring.device[words:]
            host = area[words : words + most * self.max_decode_width].reshape(most, self.max_decode_width)
            if rows is not None:
                host[:number, :width] = rows
            words += number * self.max_decode_width
        ring.launch(at, words, partial(self._advance, ring, tokens, width, True), False)

    def _advance(self, ring: Ring, tokens: torch.Tensor, width: int, counted: bool, _: int = 0) -> None:
        kernels = self._kernels
        kernels.advance_kernel[(math.ceil(self.max_requests / kernels.BLOCK),)](
            ring.device,
            ring.device[HEADER + self.max_requests :] if counted else ring.device,
            tokens,
            self._state,
            self._history,
            self.max_decode_width,
            width,
            counted,
            self._ring_size,
            kernels.BLOCK,
        )

    def retire(self, slots: Any) -> None:
        """Free ``slots``. Raises OutOfRange for one that was not admitted."""
        named = self._slots(slots, unique=True)
        self._check_live(named)
        self._staged = None
        self._live[named] = False

    def _slots(self, slots: Any, unique: bool = False) -> NDArray[np.int32]:
        """``slots`` as an array. Raises TypeError, OutOfRange for one outside 0..max_requests - 1 and, if asked, named twice."""
        named = _slot_numbers(slots)
        if len(named) and int(named.max()) >= self.max_requests:
            at = int(named.argmax())
            raise OutOfRange(
                f"slot {named[at]} outside 0..{self.max_requests - 1}", value=int(named[at]), limit=self.max_requests - 1
            )
        if unique:
            self._stamps[named] = counted(len(named))
            if (self._stamps[named] != counted(len(named))).any():
                twice = int(np.bincount(named).argmax())
                raise OutOfRange(f"slot {twice} stands twice in one call", value=twice)
        return named

    def _distinct_slots(self, slots: Any) -> NDArray[np.int32]:
        """``slots`` as an array, each of them live and named once."""
        known = self._staged if self._distinct and type(slots) is np.ndarray and slots.dtype is WORD and slots.ndim == 1 else None
        if known is not None and slots.tobytes() == known[0]:
            checked: NDArray[np.int32] = slots
            return checked
        named = self._slots(slots, unique=True)
        self._check_live(named)
        self._distinct = self._staged is not None and named.tobytes() == self._staged[0]
        return named

    def _check_live(self, named: NDArray[np.int32]) -> None:
        free = np.flatnonzero(~self._live[named])
        if len(free):
            slot = int(named[free[0]])
            raise OutOfRange(f"slot {slot} was not admitted", value=slot)

    def _refuse_slots(self, named: NDArray[np.int32]) -> None:
        self._check_live(self._slots(named))

    def _checked_width(self, count: int, given: Any) -> int:
        """The width of a step of ``count`` slots. Raises TypeError, LimitExceeded, OutOfRange."""
        width = as_index(given, "width")
        if count > self.max_requests:
            raise LimitExceeded(f"{count} slots; max_requests is {self.max_requests}", value=count, limit=self.max_requests)
        if width < 1:
            raise OutOfRange(f"width {shown(width)} is below 1", value=width, limit=1)
        if width > self.max_decode_width:
            most = self.max_decode_width
            raise LimitExceeded(f"{shown(width)} tokens a slot at once; max_decode_width is {most}", value=width, limit=most)
        return width

    def _check_width(self, named: NDArray[np.int32], width: int) -> None:
        held = self._ring_size - (self._longest[named] - self._lengths[named])
        short = np.flatnonzero(np.minimum(held, self._lengths[named]) < width)
        if len(short):
            slot = int(named[short[0]])
            limit = int(min(held[short[0]], self._lengths[slot]))
            raise OutOfRange(f"slot {slot} has its last {limit} tokens, not {width}", value=width, limit=limit)


def _token_rows(token_ids: Any, count: int) -> NDArray[np.int32]:
    """Token ids of the host's, one for each of ``count`` slots or a row of them, as an array. Raises TypeError, OutOfRange."""
    numbers: NDArray[np.int32]
    words: bool = type(token_ids) is np.ndarray and token_ids.dtype is WORD and token_ids.ndim == 1
    if words:
        numbers = np.frombuffer(token_bytes(token_ids), WORD)
        return numbers
    given = to_numpy(token_ids)
    if isinstance(given, range) and len(given) != count:
        raise TypeError(f"{count} slots and {len(given)} token ids")  # without making them: they may be many
    try:
        host: NDArray[Any] = np.asarray(given)
    except ValueError as error:
        raise TypeError(f"token ids are rows of one length: {error}") from None
    flat = host.reshape(-1)
    numbers = np.frombuffer(token_bytes(flat.tolist() if host.dtype.hasobject else flat), WORD)
    return numbers.reshape(host.shape)


def _is_part(rows: torch.Tensor, sampled: torch.Tensor) -> bool:
    """Whether ``rows``, (B, width), are the first so many rows and columns of ``sampled``, where they are."""
    begin = rows.data_ptr() == sampled.data_ptr() and rows.dtype == sampled.dtype
    apart = zip(rows.shape, rows.stride(), sampled.stride(), strict=True)
    return begin and all(size == 1 or stride == other for size, stride, other in apart)


@cache
def _packer(count: int) -> Callable[..., None]:
    """Writes so many ints to a buffer, as words from a byte on."""
    return struct.Struct(f"<{count}i").pack_into


def _slot_numbers(slots: Any) -> NDArray[np.int32]:
    """Any ints in 0..2**31 - 1. Raises TypeError, OutOfRange."""
    try:
        return np.frombuffer(token_bytes(slots), WORD)
    except OutOfRange as error:
        value, limit = error.value, error.limit
        raise OutOfRange(f"slot {shown(value)} outside 0..{limit}", value=value, limit=limit) from None


def _capacity(value: Any, what: str) -> int:
    number = as_index(value, what)
    if number < 1:
        raise OutOfRange(f"{what} is {shown(number)}, below 1", value=number, limit=1)
    return number
