"""Files as formats read them: lines of JSON with their numbers, or the entries of one large document, and how far that is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from sessiontree.errors import LimitExceeded, NeedsExtra
from sessiontree.interchange.losses import Losses

#: Bytes of one line.
MAX_LINE_BYTES: Final = 2**30


class SourceFile:
    """A file to read from. ``path``: where it is. ``done``: bytes that were read. ``mark``: a digest of the line that came last."""

    def __init__(self, path: Path, tell: Callable[[int], None] | None = None) -> None:
        self.path = path
        self.done = 0
        self.mark = ""
        self._tell = tell

    @property
    def stem(self) -> str:
        """Its name without suffixes: what conversations are called that have no name of their own."""
        return self.path.name.partition(".")[0] or self.path.name

    def lines(self, losses: Losses) -> Iterator[tuple[str, Any]]:
        """(place, value) of each line of JSON, the place being "line 7", counted from 1; empty lines are passed over.

        A line that is no JSON, such as the last one of a file that was cut off, is a fault.
        """
        with self.path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), 1):
                self._went_on(len(line))
                if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                    limit = MAX_LINE_BYTES
                    raise LimitExceeded(f"{self.path.name}, line {number}: longer than {limit} bytes", value=len(line), limit=limit)
                if line.isspace():
                    continue
                place = f"line {number}"
                self.mark = blake2b(line, digest_size=16).hexdigest()
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError) as error:
                    losses.fault("no JSON", place, str(error))
                    continue
                yield place, value

    def entries(self, losses: Losses, prefix: str) -> Iterator[tuple[str, Any]]:
        """(place, value) of each entry at ``prefix`` of one JSON document, in ijson's notation: "item" for those of a list.

        The document may be larger than memory. Where it stops being JSON is a fault, and the last thing that is read. Raises
        NeedsExtra without ijson.
        """
        try:
            import ijson  # noqa: PLC0415
        except ImportError as error:
            raise NeedsExtra(
                "large documents are read by ijson: pip install 'sessiontree[interchange]'", extra="interchange"
            ) from error
        with self.path.open("rb") as file:
            at = 0
            try:
                for value in ijson.items(_Told(file, self._went_on), prefix, use_float=True):
                    yield f"{prefix.removesuffix('item')}[{at}]", value
                    at += 1
            except ijson.JSONError as error:
                losses.fault("no JSON", f"{prefix.removesuffix('item')}[{at}]", str(error))

    def document(self, losses: Losses) -> Any:
        """The whole file as one JSON value; None where that is a fault."""
        data = self.path.read_bytes()
        self._went_on(len(data))
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            losses.fault("no JSON", "the whole file", str(error))
            return None

    def first_byte(self) -> bytes:
        """The first that is no whitespace, b"" for an empty file: "[" is a list, "{" a mapping or lines of them."""
        with self.path.open("rb") as file:
            while block := file.read(4096):
                if begun := block.lstrip(b"\xef\xbb\xbf \t\r\n"):
                    return begun[:1]
        return b""

    def _went_on(self, count: int) -> None:
        self.done += count
        if self._tell is not None:
            self._tell(self.done)


class _Told:
    """A file that tells how much of it was read."""

    def __init__(self, file: Any, tell: Callable[[int], None]) -> None:
        self._file = file
        self._tell = tell

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._file.read(size)
        self._tell(len(data))
        return data


def expect(value: Any, kind: type | tuple[type, ...], what: str, place: str, losses: Losses) -> bool:
    """Whether ``value`` is of a kind; a fault that names what it is to be and what it is, otherwise."""
    if isinstance(value, kind) and not (isinstance(value, bool) and bool not in (kind if isinstance(kind, tuple) else (kind,))):
        return True
    names = " or ".join(_NAMES.get(each, each.__name__) for each in (kind if isinstance(kind, tuple) else (kind,)))
    losses.fault(f"{what} is to be {names}", place, f"it is {_NAMES.get(type(value), type(value).__name__)}")
    return False


_NAMES: Final = {
    dict: "a mapping",
    list: "a list",
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}
