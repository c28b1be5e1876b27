"""The KV cache's pages: which are free, which are in use, and which are kept because somebody may ask for them again.

A full page has a name: its hash, which covers all tokens before it, the media among them and the salt (``page_hashes``). Requests
with a common prefix hold the same pages, so a fork copies nothing. A page in use is never given away. One that nobody uses stays
under its name until room is needed; the one that was let go of longest ago goes first. Nodes know nothing of any of this.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from sessiontree import LimitExceeded, OutOfRange


class PagePool:
    """``num_pages`` pages of ``page_size`` tokens. One thread uses it. Raises OutOfRange for less than one of either."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        for value, what in ((num_pages, "num_pages"), (page_size, "page_size")):
            if value < 1:
                raise OutOfRange(f"{what} is {value}, below 1", value=value, limit=1)
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._users = [0] * num_pages
        self._names: list[bytes | None] = [None] * num_pages
        self._named: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # named, used by nobody; the first to go first
        self.evicted = 0

    @property
    def available(self) -> int:
        """Pages that :meth:`take` can give."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        """Pages that nobody uses and that can be found."""
        return len(self._idle)

    def find(self, names: Iterable[bytes]) -> list[int]:
        """The pages of these names, up to the first that is not there. They are in use from here on."""
        found = []
        for name in names:
            page = self._named.get(name)
            if page is None:
                break
            self._idle.pop(page, None)
            self._users[page] += 1
            found.append(page)
        return found

    def take(self) -> int:
        """A page to write to, in use from here on. Raises LimitExceeded where all are."""
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            name = self._names[page]
            assert name is not None
            del self._named[name]
            self._names[page] = None
            self.evicted += 1
        else:
            raise LimitExceeded(f"all {self.num_pages} pages are in use", value=self.num_pages, limit=self.num_pages)
        self._users[page] = 1
        return page

    def name(self, page: int, name: bytes) -> None:
        """Let others find a page whose KV is complete. Where another page has the name already, this one stays without."""
        if name not in self._named and self._names[page] is None:
            self._named[name] = page
            self._names[page] = name

    def forget(self) -> None:
        """Let none of the pages be found any more. Those in use stay in use."""
        self._free += self._idle
        self._idle.clear()
        self._named.clear()
        self._names = [None] * self.num_pages

    def release(self, pages: Iterable[int]) -> None:
        """Use these no more, the last first: a page is of no use without those before it."""
        for page in reversed(list(pages)):
            self._users[page] -= 1
            if self._users[page]:
                continue
            if self._names[page] is None:
                self._free.append(page)
            else:
                self._idle[page] = None
