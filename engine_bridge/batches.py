"""What a stager hands out: views of its outputs that know whether they still hold their own batch."""

from __future__ import annotations

import operator
from typing import Any, Generic, TypeVar

import attrs
import torch
from numpy.typing import NDArray

from engine_bridge.rows import BatchSpan
from sessiontree import MediaItem, Unsupported
from sessiontree.media import each_content_once
from sessiontree.positions import Mode


@attrs.define(eq=False)
class ExtendOutputs:
    """The whole of each output of a stager's prefill batches, at its address for good. ``serial``: which batch they hold."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    mrope_deltas: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    prefix_lens: torch.Tensor
    req_slots: torch.Tensor
    logits_indices: torch.Tensor
    serial: int = 0

    def arrays(self) -> tuple[NDArray[Any], ...]:
        """``input_ids``, ``positions`` and (requests,) ``mrope_deltas`` as arrays of the host's, where they lie."""
        return self.input_ids.numpy(), self.positions.numpy(), self.mrope_deltas.numpy()[:, 0]


def buffers(outputs: ExtendOutputs | DecodeOutputs) -> dict[str, torch.Tensor]:
    """Its tensors, by name."""
    return {name: value for name, value in attrs.asdict(outputs, recurse=False).items() if isinstance(value, torch.Tensor)}


@attrs.define(eq=False)
class DecodeOutputs:
    """The whole of each output of a stager's decode steps, at its address for good. ``serial``: which step they hold."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    mrope_deltas: torch.Tensor
    seq_lens: torch.Tensor
    req_slots: torch.Tensor
    serial: int = 0
    _ramps: dict[int, torch.Tensor] = attrs.field(factory=dict)

    def arrays(self) -> tuple[NDArray[Any], ...]:
        """``input_ids``, ``positions``, ``seq_lens`` and (requests,) ``mrope_deltas`` as arrays of the host's, where they lie."""
        return self.input_ids.numpy(), self.positions.numpy(), self.seq_lens.numpy(), self.mrope_deltas.numpy()[:, 0]

    def ramp(self, width: int) -> torch.Tensor:
        """0, width, 2 * width, ..."""
        if width not in self._ramps:
            slots = self.req_slots
            self._ramps[width] = torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device) * width
        return self._ramps[width]

    def ends(self, width: int) -> torch.Tensor:
        if -width not in self._ramps:
            self._ramps[-width] = self.ramp(width)[1:] - 1
        return self._ramps[-width]


Outputs = TypeVar("Outputs", ExtendOutputs, DecodeOutputs)


class _Batch(Generic[Outputs]):
    """What batches of both kinds have. Reading a tensor raises Unsupported once a later batch of its kind was made."""

    __slots__ = ("_serial", "_whole", "num_requests")

    num_tokens: int

    def __init__(self, outputs: Outputs, num_requests: int) -> None:
        self._whole: Outputs = outputs
        self._serial = outputs.serial
        self.num_requests: int = num_requests

    def _outputs(self) -> Outputs:
        if self._serial != self._whole.serial:
            raise Unsupported(f"this batch of {self.num_requests} requests was overwritten by a later one")
        return self._whole

    @property
    def input_ids(self) -> torch.Tensor:
        return self._outputs().input_ids[: self.num_tokens]

    @property
    def positions(self) -> torch.Tensor:
        return self._outputs().positions[:, : self.num_tokens]

    @property
    def seq_lens(self) -> torch.Tensor:
        return self._outputs().seq_lens[: self.num_requests]

    @property
    def req_slots(self) -> torch.Tensor:
        return self._outputs().req_slots[: self.num_requests]

    @property
    def mrope_deltas(self) -> torch.Tensor:
        return self._outputs().mrope_deltas[: self.num_requests]


class ExtendBatch(_Batch[ExtendOutputs]):
    """The inputs of one ragged prefill batch of B requests and T tokens. Tensors are views of the stager's own, at fixed addresses.

    They are those of this batch until the stager's next ``extend``, after which reading them raises Unsupported.

    ``input_ids``: (T,) int64. ``positions``: (num_position_axes, T) of the stager's dtype; contiguous along tokens.
    ``cu_seqlens_q``: (B + 1,) int32, where each request's tokens begin. ``seq_lens``: (B,) int32, window ends. ``prefix_lens``:
    (B,) int32, window starts. ``req_slots``: (B,) int32. ``mrope_deltas``: (B, 1) of the stager's dtype, of each whole path,
    whatever the window. ``logits_indices``: (B,) int32, ``cu_seqlens_q[1:] - 1``: each window's last token (an empty one has none).
    ``media_spans``: placeholders in the batch, in order. ``needed_items``: the items that have any, each content once.
    """

    __slots__ = ("_windows", "media_spans", "mode", "num_tokens")

    def __init__(
        self, outputs: ExtendOutputs, num_requests: int, num_tokens: int, windows: Any, spans: tuple[BatchSpan, ...], mode: Mode
    ) -> None:
        super().__init__(outputs, num_requests)
        self._windows = windows
        self.num_tokens: int = num_tokens
        self.media_spans: tuple[BatchSpan, ...] = spans
        self.mode = mode

    @property
    def cu_seqlens_q(self) -> torch.Tensor:
        return self._outputs().cu_seqlens_q[: self.num_requests + 1]

    @property
    def prefix_lens(self) -> torch.Tensor:
        return self._outputs().prefix_lens[: self.num_requests]

    @property
    def logits_indices(self) -> torch.Tensor:
        return self._outputs().logits_indices[: self.num_requests]

    @property
    def max_seqlen_q(self) -> int:
        """The longest window."""
        starts, stops = self._windows
        return max(map(operator.sub, stops, starts), default=0)

    @property
    def max_seqlen_k(self) -> int:
        """The longest window with the tokens before it."""
        return max(self._windows[1], default=0)

    @property
    def needed_items(self) -> tuple[MediaItem, ...]:
        return each_content_once(span.item for span in self.media_spans)

    def __repr__(self) -> str:
        return f"<ExtendBatch of {self.num_requests} requests, {self.num_tokens} tokens>"


class DecodeBatch(_Batch[DecodeOutputs]):
    """The inputs of one decode step of B requests, ``width`` tokens each: the last of each path, where they stand.

    Tensors as in :class:`ExtendBatch`, until the stager's next ``decode``. ``input_ids``: (B * width,) int64.
    ``positions``: (num_position_axes, B * width). ``seq_lens``: (B,) int32, paths with these tokens. ``mrope_deltas``: (B, 1).
    ``req_slots``: (B,) int32. ``cu_seqlens_q``: (B + 1,) int32. ``logits_indices``: (B,) int32, the last token of each.
    """

    __slots__ = ("num_tokens", "width")

    def __init__(self, outputs: DecodeOutputs, num_requests: int, width: int) -> None:
        super().__init__(outputs, num_requests)
        self.num_tokens: int = num_requests * width
        self.width: int = width

    @property
    def cu_seqlens_q(self) -> torch.Tensor:
        return self._outputs().ramp(self.width)[: self.num_requests + 1]

    @property
    def logits_indices(self) -> torch.Tensor:
        return self._outputs().ends(self.width)[: self.num_requests]

    def __repr__(self) -> str:
        return f"<DecodeBatch of {self.num_requests} requests, {self.width} tokens each>"
