"""What a format cannot hold, and what a file says that cannot be read: counted, named, and told with the first place of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from sessiontree.errors import InterchangeError


@attrs.frozen
class Loss:
    """Something that was left behind. ``what``: in words. ``count``: how often. ``first``: where it happened first."""

    what: str
    count: int
    first: str


class Losses:
    """The losses of one import or export, in the order in which each first happened.

    ``salvage``: whether what cannot be read is left out and counted, instead of ending the import.
    """

    def __init__(self, file: str, *, salvage: bool = False) -> None:
        self.file = file
        self.salvage = salvage
        self._lost: dict[str, tuple[int, str]] = {}
        self._faults: dict[str, tuple[int, str]] = {}

    def add(self, what: str, place: str = "", count: int = 1) -> None:
        """Something has no place where it goes. ``what``: the same words for the same kind. ``place``: a line, a path, an id."""
        _count(self._lost, what, place, count)

    def fault(self, what: str, place: str, detail: str = "") -> None:
        """Something in the file cannot be read: raises InterchangeError naming it, or counts it where what is sound is salvaged.

        The caller goes on without it then. ``what``: the same words for the same kind; ``detail``: what stands there.
        """
        if not self.salvage:
            where = f"{self.file}, {place}" if place else self.file
            raise InterchangeError(f"{where}: {what}{f': {detail}' if detail else ''}", path=self.file, place=place)
        _count(self._faults, what, place, 1)

    @property
    def lost(self) -> tuple[Loss, ...]:
        """What has no place where it went."""
        return tuple(_losses(self._lost))

    @property
    def faults(self) -> tuple[Loss, ...]:
        """What could not be read and was left out."""
        return tuple(_losses(self._faults))


def _count(counts: dict[str, tuple[int, str]], what: str, place: str, count: int) -> None:
    before, first = counts.get(what, (0, place))
    counts[what] = before + count, first


def _losses(counts: Mapping[str, tuple[int, str]]) -> Iterator[Loss]:
    return (Loss(what, count, first) for what, (count, first) in counts.items())
