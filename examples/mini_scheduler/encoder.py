"""What the vision tower made of each picture, by identity: one that comes again, in any turn or branch, is not encoded again.

Pixels are the store's, on disk, so an output that was dropped is made again. A salt is part of the key: nobody can find out by the
clock what pictures others have shown.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch

from sessiontree import MediaItem


class EncoderCache:
    """At most ``budget_bytes`` of outputs, the least recently used dropped first; what is asked for last always stays."""

    def __init__(self, encode: Callable[[MediaItem], torch.Tensor], budget_bytes: int = 64 * 2**20) -> None:
        self._encode = encode
        self._budget = budget_bytes
        self._held: OrderedDict[tuple[str, bytes], torch.Tensor] = OrderedDict()
        self.held_bytes = 0

    def rows(self, item: MediaItem, salt: str) -> torch.Tensor:
        """(placeholders, width): one row for each token of the whole item. Raises what ``encode`` raises."""
        key = salt, item.identity
        found = self._held.get(key)
        if found is None:
            found = self._held[key] = self._encode(item)
            self.held_bytes += found.nbytes
        self._held.move_to_end(key)
        while self.held_bytes > self._budget and len(self._held) > 1:
            _, dropped = self._held.popitem(last=False)
            self.held_bytes -= dropped.nbytes
        return found

    def forget(self) -> None:
        """Hold nothing."""
        self._held.clear()
        self.held_bytes = 0
