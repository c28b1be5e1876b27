"""Media between SGLang 0.5.23 and a tree: its items as a tree keeps them, and a path as its requests want it.

Nothing here knows sessions. SGLang is imported when it is first needed.
"""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from engine_bridge.adapters.pending import PendingPrompt
from engine_bridge.engines import importing
from sessiontree import Features, MediaItem, MediaSpanError, Node, Unsupported, media_identity
from sessiontree.frozen import frozen_array
from sessiontree.node import deepest_to, lowest_common_ancestor
from sessiontree.positions import PositionScheme

#: What an item holds beside its model_specific_data; names of features that are kept.
FEATURES: Final = ("feature", "precomputed_embeddings")
DATA: Final = "data."  # what the names of those begin with that come from model_specific_data
SCALAR: Final = "scalar."  # likewise, of those that are Python's numbers there
FORMAT: Final = "format"  # in ASCII


@cache
def sglang() -> SimpleNamespace:
    """The classes of SGLang that sessions use. Raises NeedsExtra, saying what to install."""
    with importing("sglang"):
        requests = importlib.import_module("sglang.srt.managers.schedule_batch")
        messages = importlib.import_module("sglang.srt.managers.io_struct")
    return SimpleNamespace(
        FINISH_ABORT=requests.FINISH_ABORT,
        Modality=requests.Modality,
        MultimodalDataItem=requests.MultimodalDataItem,
        MultimodalInputFormat=requests.MultimodalInputFormat,
        MultimodalInputs=requests.MultimodalInputs,
        OpenSessionReqOutput=messages.OpenSessionReqOutput,
        Req=requests.Req,
    )


def media_item(item: Any, prefix_len: int = 0) -> MediaItem:
    """A MultimodalDataItem as a tree keeps it; spans relative to ``prefix_len``, where the item's turn begins.

    Identity is the item's own 32 bytes, or made of its sentinels, which the engine's caches go by, with shape and type of what it
    holds; then the sentinels are kept in ``extra``. Raises MediaSpanError for offsets that are none or before the turn,
    Unsupported for several grids in one item, what a MediaItem raises, TypeError.
    """
    kind = item.modality.name.lower()
    if not item.offsets:
        raise MediaSpanError(f"a {kind} without offsets", item=item, span=None)
    spans = []
    for first, last in item.offsets:
        if not prefix_len <= first <= last:
            raise MediaSpanError(
                f"a {kind}'s offset ({first}, {last}) behind {prefix_len} tokens", item=item, span=(first, last + 1)
            )
        spans.append((first - prefix_len, last + 1 - first))
    data = item.model_specific_data
    grid = data.get(f"{kind}_grid_thw")
    if grid is not None:
        grid = _numbers(grid, f"a {kind}'s grid")
        if len(grid) > 3:
            raise Unsupported(f"a {kind} item with {len(grid) // 3} grids; a session takes one item for each {kind}", item=item)
    item.set_pad_value()
    identity, extra = item.identity, None
    if identity is None:
        values = item.padding_values()
        held = item.feature if item.feature is not None else item.precomputed_embeddings
        options = {"shape": list(getattr(held, "shape", ())), "dtype": str(getattr(held, "dtype", ""))}
        identity = media_identity(f"sglang {kind}", np.array(values, np.int64), options=options)
        extra = {"sglang_hash": None if item.hash is None else f"{item.hash:016x}", "sglang_pad_values": list(values)}
    seconds, length = data.get("second_per_grid_ts"), data.get("audio_feature_lens")
    return MediaItem(
        kind,
        identity,
        spans,
        grid_thw=grid,
        second_per_grid_ts=None if seconds is None else float(_numbers(seconds, "second_per_grid_ts")[0]),
        audio_feature_length=None if length is None else _numbers(length, "audio_feature_lens")[0],
        extra=extra,
    )


def _numbers(given: Any, what: str) -> NDArray[Any]:
    """A tensor, an array, a list or a number as (n,) numbers, at least one. Raises TypeError for anything else."""
    numbers = frozen_array(given).reshape(-1)
    if numbers.dtype.kind not in "iuf" or not len(numbers):
        raise TypeError(f"{what} is numbers, not {type(given).__name__} of {numbers.dtype}, {len(numbers)} values")
    return numbers


def kept_features(held: Any) -> dict[str, Any]:
    """What a store keeps of SGLang's item, by the names that :func:`engine_item` reads. The store refuses what is no array."""
    values = {name: value for name in FEATURES if (value := getattr(held, name)) is not None}
    values[FORMAT] = np.frombuffer(held.format.name.encode(), np.uint8)
    for name, value in held.model_specific_data.items():
        if isinstance(value, (bool, int, float)):
            values[SCALAR + name] = np.asarray(value)
        elif value is not None:
            values[DATA + name] = value
    return values


def engine_item(item: MediaItem, features: Features) -> Any:
    """SGLang's item as it was before a restart, of what :func:`kept_features` gave."""
    engine = sglang()
    data = {name[len(DATA) :]: tensor_of(features, name) for name in features if name.startswith(DATA)}
    data |= {name[len(SCALAR) :]: features[name].item() for name in features if name.startswith(SCALAR)}
    made = engine.MultimodalDataItem(
        modality=engine.Modality[item.modality.upper()],
        model_specific_data=data,
        **{name: tensor_of(features, name) for name in FEATURES if name in features},
    )
    if FORMAT in features:
        made.format = engine.MultimodalInputFormat[features[FORMAT].tobytes().decode()]
    extra = item.extra
    if "sglang_pad_values" in extra:
        said = extra["sglang_hash"]
        made.hash = None if said is None else int(said, 16)
        made.pad_values = tuple(extra["sglang_pad_values"])
        made.pad_value = made.pad_values[0]
    else:
        made.set_identity(item.identity)
    return made


def tensor_of(features: Features, name: str) -> torch.Tensor:
    """A tensor of its own, in the dtype that was put."""
    tensor = torch.tensor(features[name])
    dtype = features.dtype(name)
    known = getattr(torch, dtype, None)  # bfloat16 and float8, which NumPy has not, are read as the bits they are
    return tensor if known in (None, tensor.dtype) else tensor.view(known)


def placed(item: Any, offsets: list[tuple[int, int]]) -> Any:
    """An item of its own with these offsets that shares the features, except where those are handed over once (CUDA IPC)."""
    made = item if item.has_cuda_ipc_proxy() else duplicate(item)
    made.offsets = offsets
    return made


def duplicate(item: Any) -> Any:
    """An item that can be changed without the other, and shares its features."""
    made = item.__copy__()
    made.model_specific_data = made.model_specific_data.copy()
    return made


class Layout:
    """A prompt as SGLang's requests want it: ids with sentinels in place of placeholders, positions, and items, each in its place.

    It grows at its end, as a tree's extents do: who goes on from there writes behind what is there already, anybody else takes a
    copy. So a table that was handed out is never written to again, and a turn costs what is new in it.
    """

    __slots__ = ("_ids", "_items", "_table", "node", "stop")

    def __init__(self, scheme: PositionScheme) -> None:
        self._ids = np.empty(1024, np.int64)
        self._table = torch.from_numpy(np.empty((scheme.num_axes, 1024), scheme.dtype))
        self._items: list[tuple[Any, bool]] = []  # and whether all share the object
        self.node: Node | None = None  # the deepest node of the path that is known to be laid out here
        self.stop: int = 0

    def behind(self, node: Node, length: int) -> Layout:
        """One that holds what this has of the first ``length`` tokens of a path, at least none: this, or a copy."""
        fork = None if self.node is None else lowest_common_ancestor(self.node, node)
        common = 0 if fork is None else min(fork.stop, length)
        if common == self.stop:
            return self
        made = Layout(node.scheme)
        made._reserve(common)
        made._ids[:common] = self._ids[:common]
        made._table[:, :common] = self._table[:, :common]
        made._items = [(item, shared) for item, shared in self._items if item.offsets[0][0] < common]
        made.node, made.stop = fork, common
        return made

    def lay(self, prompt: PendingPrompt, item_of: Callable[[MediaItem], Any]) -> None:
        """Go on to the end of a prompt that begins with what is here. ``item_of``: SGLang's item, wherever it stands."""
        start, stop = self.stop, prompt.stop
        found = [(item_of(item), [(first, last - 1) for first, last in spans]) for item, spans in prompt.media(start)]
        self._reserve(stop)
        ids = self._ids[start:stop]
        prompt.input_ids(start, out=ids)
        prompt.positions(start, out=self._table.numpy()[:, start:stop])
        for item, offsets in found:
            for first, last in offsets:
                ids[first - start : last + 1 - start] = item.padding_sequence(last + 1 - first)
            self._items.append((placed(item, offsets), item.has_cuda_ipc_proxy()))
        self.node, self.stop = deepest_to(prompt.node, prompt.kept), stop

    def ended(self, prompt: PendingPrompt, reply: Node) -> None:
        """What was laid out last has become nodes, and this was the reply. Where something else was, nothing changes."""
        if self.stop == prompt.stop:
            self._reserve(reply.stop)
            self._ids[self.stop : reply.stop] = reply.input_ids(self.stop, copy=False)
            reply.positions(self.stop, out=self._table.numpy()[:, self.stop : reply.stop])
            self.node, self.stop = reply, reply.stop

    def write(self, ids: array[int]) -> None:
        """Write the ids over the first of an array, which is at least as long."""
        np.frombuffer(ids, np.int64)[: self.stop] = self._ids[: self.stop]

    def padded(self, unpadded: array[int]) -> array[int]:
        """Another array, with the ids for the first of those."""
        ids = array("q", [0]) * len(unpadded)
        self.write(ids)
        np.frombuffer(ids, np.int64)[self.stop :] = np.frombuffer(unpadded, np.int64)[self.stop :]
        return ids

    def table(self) -> torch.Tensor:
        """The positions: (num_axes, stop), a view of what is never written to again."""
        return self._table[:, : self.stop]

    def items(self) -> list[Any]:
        """The items, in path order, for one request."""
        return [item if shared else duplicate(item) for item, shared in self._items]

    def _reserve(self, size: int) -> None:
        room = len(self._ids)
        if size > room:
            room = max(size, 2 * room)
            ids, table = np.empty(room, np.int64), self._table.new_empty((len(self._table), room))
            ids[: self.stop], table[:, : self.stop] = self._ids[: self.stop], self._table[:, : self.stop]
            self._ids, self._table = ids, table
