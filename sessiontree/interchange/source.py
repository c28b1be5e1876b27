"""Files as formats read them: lines of JSON with their numbers, or the entries of one large document, and how far that is."""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from math import isfinite
from pathlib import Path
from typing import Any, Final

from sessiontree.errors import LimitExceeded
from sessiontree.interchange.losses import Losses

#: Bytes of one line.
MAX_LINE_BYTES: Final = 2**30

#: Bytes that are read of a list at a time, at least.
_BLOCK: Final = 2**20

#: What has brackets of its own is passed over, and the next bracket found; or a quote, where a string is not all there yet.
_BRACKET: Final = re.compile(rb'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+")*+(["\[\]{}])', re.DOTALL)

_SPACE: Final = b" \t\r\n"
_MARK: Final = b"\xef\xbb\xbf"


class SourceFile:
    """A file to read from. ``path``: where it is, also in a ZIP archive. ``done``: bytes that were read. ``mark``: a digest of the
    line or the entry of a list that came last.
    """

    def __init__(self, path: Path | zipfile.Path, tell: Callable[[int], None] | None = None, stem: str = "") -> None:
        self.path = path
        #: Its name without its suffix, with the path in a folder that is read: what conversations are called that have no name.
        self.stem: str = stem or Path(path.name).stem
        self.done: int = 0
        self.mark: str = ""
        self._tell = tell

    @property
    def size(self) -> int:
        """How many bytes it has."""
        with self.path.open("rb") as file:
            return file.seek(0, os.SEEK_END)

    def part(self, path: Path | zipfile.Path) -> SourceFile:
        """Another file that belongs to this one, such as one in it; what is read of it counts here."""
        before = self.done

        def tell(done: int) -> None:
            self._went_on(before + done - self.done)

        return SourceFile(path, tell)

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
                    value = parsed(line)
                except (ValueError, RecursionError) as error:
                    losses.fault("no JSON", place, str(error))
                    continue
                yield place, value

    def items(self, losses: Losses) -> Iterator[tuple[str, Any]]:
        """(place, value) of each entry of a JSON list of mappings or lists, the place being "[7]", counted from 0.

        The list may be larger than memory. An entry that is no JSON is a fault, and so is where the list stops being one, which is
        the last thing that is read. Raises LimitExceeded for an entry of more than MAX_LINE_BYTES.
        """
        with self.path.open("rb") as file:
            data, at, begun, depth, number = b"", 0, 0, 0, 0
            while True:
                place = f"[{number}]"
                found = _BRACKET.match(data, at)
                if found is None or found[1] == b'"':
                    if len(data) - begun > MAX_LINE_BYTES:
                        limit = MAX_LINE_BYTES
                        raise LimitExceeded(f"{self.path.name}, {place}: longer than {limit} bytes", value=len(data), limit=limit)
                    more = file.read(max(_BLOCK, len(data) - begun))
                    if not more:
                        losses.fault("no JSON", place, "the list does not end")
                        return
                    self._went_on(len(more))
                    data, at, begun = data[begun:] + more, at - begun, 0
                    continue
                at = found.end()
                opens = found[1] in b"[{"
                if depth <= 1:  # before the list, or between its entries
                    between = data[begun : at - 1].strip(_SPACE)
                    wanted = b"," if opens and number else b""
                    if depth == 0:
                        between, wanted = between.removeprefix(_MARK).strip(_SPACE), b""
                    if between != wanted or found[1] == b"}" or (depth == 0 and found[1] != b"["):
                        losses.fault("no JSON list of mappings", place, (between or found[1])[:40].decode(errors="replace"))
                        return
                    begun = at if depth == 0 else at - 1
                depth += 1 if opens else -1
                if depth == 0:
                    break
                if depth == 1 and not opens:
                    entry, begun, number = data[begun:at], at, number + 1
                    self.mark = blake2b(entry, digest_size=16).hexdigest()
                    try:
                        value = parsed(entry)
                    except (ValueError, RecursionError) as error:
                        losses.fault("no JSON", place, str(error))
                        continue
                    yield place, value
            while more := data[at:].strip(_SPACE) or file.read(_BLOCK):
                data, at = more, 0
                if more.strip(_SPACE):
                    losses.fault("no JSON", "after the list", more[:40].decode(errors="replace"))
                    return

    def document(self, losses: Losses) -> Any:
        """The whole file as one JSON value; None where that is a fault."""
        data = self.path.read_bytes()
        self._went_on(len(data))
        try:
            return parsed(data)
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


def parsed(data: bytes | str) -> Any:
    """The value of JSON, in UTF-8 or as text. Raises ValueError, also for NaN and what is too large for a float; RecursionError."""
    return _DECODER.decode(data if isinstance(data, str) else data.decode("utf-8-sig"))


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text[:40]} is too large")
    return value


_DECODER: Final = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)


def write_lines(path: Path, values: Iterable[Any]) -> None:
    """A file of JSON lines."""
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:  # which is how JSON escapes lone surrogates
        for value in values:
            file.write(json.dumps(value, ensure_ascii=False) + "\n")


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
