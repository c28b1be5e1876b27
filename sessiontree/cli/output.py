"""What a command writes, and how it ends.

Answers go to stdout, as text or as one JSON document; errors and progress go to stderr. Text that came out of a store never
reaches a terminal as it is: whatever is not printable is escaped. A command function returns its exit code or raises;
:func:`command` makes a command of it that ends as docs/cli.md says.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import Any, Final

import numpy as np
import typer

from sessiontree.backends.base import Progress
from sessiontree.errors import (
    CorruptTree,
    IncompatibleStore,
    InterchangeError,
    NeedsExtra,
    SessionDiffers,
    SessionTreeError,
    StoreFailed,
    StoreLocked,
)


class Code(IntEnum):
    """Exit codes."""

    FINE = 0
    FOUND = 1
    USAGE = 2
    NO_STORE = 3
    LOCKED = 4
    CORRUPT = 5
    INCOMPATIBLE = 6
    FAILED = 7
    NEEDS = 8
    BROKEN_PIPE = 141


class Usage(SessionTreeError):
    """A name that means nothing, or more than one thing. ``candidates``: what it may mean."""

    candidates: tuple[str, ...] = ()


class NoStore(SessionTreeError):
    """There is no store or bundle at a path."""


_CODES: Final[tuple[tuple[type[BaseException], Code], ...]] = (  # the first that fits
    (NoStore, Code.NO_STORE),
    (SessionDiffers, Code.FOUND),
    (StoreLocked, Code.LOCKED),
    (CorruptTree, Code.CORRUPT),
    (InterchangeError, Code.CORRUPT),
    (IncompatibleStore, Code.INCOMPATIBLE),
    (StoreFailed, Code.FAILED),
    (NeedsExtra, Code.NEEDS),
    (OSError, Code.FAILED),
    (SessionTreeError, Code.USAGE),
)


_URL: Final = re.compile(r"postgres(?:ql)?://[^\s'\"`]*")


# --- ends -------------------------------------------------------------------------------------------------------------
def command(run: Callable[..., int]) -> Callable[..., None]:
    """A command of a function that returns its exit code; errors become one line on stderr, and what JSON says of them."""

    @functools.wraps(run)
    def ending(**options: Any) -> None:
        if sys.stdout is None:  # it was closed before this began
            raise typer.Exit(int(_unheard()))
        with suppress(AttributeError):  # an odd encoding is no reason to fail
            sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        try:
            try:
                for given in options.values():
                    for text in given if isinstance(given, list) else (given,):
                        if isinstance(text, str):
                            _check_text(text)
                code = run(**options)
            except BrokenPipeError:
                raise
            except (SessionTreeError, OSError) as error:
                code = _failed(error, options)
            sys.stdout.flush()
        except BrokenPipeError:  # whoever reads has enough
            with suppress(OSError, ValueError, AttributeError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = Code.BROKEN_PIPE
        raise typer.Exit(int(code))

    return ending


def _unheard() -> Code:
    """There is nowhere to write an answer to."""
    if sys.stderr is not None:
        print("sessiontree: stdout is closed, so there is nowhere to write to; nothing was done", file=sys.stderr)
    return Code.FAILED


def _check_text(text: str) -> None:
    """Raises Usage for an argument that is no text in the terminal's encoding."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Usage(f"{text!r} is no text") from error


def _failed(error: SessionTreeError | OSError, options: Mapping[str, Any]) -> Code:
    code = next(code for kind, code in _CODES if isinstance(error, kind))
    if not getattr(error, "candidates", ()) and (remedies := tuple(_remedies(error, code, options))):
        error.candidates = remedies  # type: ignore[union-attr]
    if options.get("as_json") and not getattr(error, "told", False):
        write_json({"error": _error(error)})
    sys.stdout.flush()
    print(f"sessiontree: {safe(without_passwords(str(error)))}", file=sys.stderr)
    for candidate in getattr(error, "candidates", ()):
        print(f"  {safe(candidate)}", file=sys.stderr)
    return code


def _remedies(error: Exception, code: Code, options: Mapping[str, Any]) -> Iterator[str]:
    """What may be done where damage is in the way, or may be."""
    path = options.get("store")
    if path is None or not os.path.isdir(os.path.join(path, "segments")):
        return
    path = shlex.quote(str(path))
    if code == Code.CORRUPT:
        yield f"`sessiontree fsck {path}` names the damage, and can save the rest to a new store."
        if options.get("lenient") is False:
            yield "With --lenient what is sound can be looked at."
    elif code == Code.INCOMPATIBLE and "expected" not in vars(error):  # else it is sound, and of another kind than was wanted
        yield f"`sessiontree fsck {path}` tells whether that is damage."


def _error(error: BaseException) -> dict[str, Any]:
    facts: dict[str, Any] = {"type": type(error).__name__, "message": without_passwords(str(error))}
    if candidates := getattr(error, "candidates", ()):
        facts["candidates"] = list(candidates)
    return facts


# --- JSON -------------------------------------------------------------------------------------------------------------
def plain(value: Any) -> Any:
    """A value of metadata in JSON's types: what has none there is a mapping of one key that begins with "$"."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: plain(entry) for key, entry in sorted(value.items())}
        return {"$pairs": [[plain(key), plain(entry)] for key, entry in sorted(value.items(), key=lambda pair: str(pair[0]))]}
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if isinstance(value, np.ndarray):
        return {"$array": str(value.dtype), "shape": list(value.shape), "bytes": value.tobytes().hex()}
    if isinstance(value, (set, frozenset)):
        return {"$set": sorted((plain(entry) for entry in value), key=repr)}
    return [plain(entry) for entry in value] if isinstance(value, (tuple, list)) else value


def write_json(value: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")


def stream_json(facts: Mapping[str, Any], key: str, entries: Iterable[Mapping[str, Any]]) -> None:
    """``facts`` and, under ``key``, a list that is written entry by entry. An error on the way is its last key, and raised."""
    sys.stdout.write(json.dumps(facts)[:-1] + (", " if facts else "") + json.dumps(key) + ": [")
    separators = itertools.chain(("\n",), itertools.repeat(",\n"))
    try:
        for separator, entry in zip(separators, entries, strict=False):
            sys.stdout.write(separator + json.dumps(entry))
    except SessionTreeError as error:
        sys.stdout.write(f'\n], "error": {json.dumps(_error(error))}}}\n')
        error.told = True  # type: ignore[attr-defined]
        raise
    sys.stdout.write("\n]}\n")


# --- places -----------------------------------------------------------------------------------------------------------
def is_url(where: str) -> bool:
    """Whether it names a store that many processes write to."""
    return _URL.match(where) is not None


def shown(where: str) -> str:
    """A place to be told of: of a URL neither the password nor the parameters, which may hold one."""
    if not is_url(where):
        return where
    scheme, _, rest = where.partition("://")
    credentials, at, host = rest.rpartition("@")
    return f"{scheme}://{credentials.partition(':')[0]}{at}{host.partition('?')[0]}"


def without_passwords(text: str) -> str:
    """A message in which every URL is as :func:`shown`."""
    return _URL.sub(lambda found: shown(found.group()), text)


# --- text -------------------------------------------------------------------------------------------------------------
def safe(text: str) -> str:
    """A text in one line, without anything that a terminal acts upon: what is not printable is escaped as Python does."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def write(line: str = "") -> None:
    """A line, already safe."""
    sys.stdout.write(line + "\n")


def styled(text: str, **style: Any) -> str:
    """Colours where stdout is a terminal that wants them."""
    return typer.style(text, **style) if _colours() else text


def _colours() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def write_pairs(pairs: Iterable[tuple[str, str]], indent: str = "") -> None:
    """Names and values, aligned. Values are safe already."""
    rows = [(safe(name), value) for name, value in pairs]
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        write(f"{indent}{name:<{width}}  {value}".rstrip())


def flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """A report's facts as (name, value) pairs; of lists, how many entries they have."""
    for key, value in facts.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, Mapping):
            yield from flat(value, f"{name} ")
        elif isinstance(value, list):
            yield name, f"{len(value):,}"
        elif isinstance(value, bool):
            yield name, "yes" if value else "no"
        elif isinstance(value, float):
            yield name, f"{value:,.3g}"
        else:
            yield name, f"{value:,}" if isinstance(value, int) else "none" if value is None else safe(str(value))


def report_facts(report: Any) -> dict[str, Any]:
    """A report of the library in JSON: what it says itself, ids in hexadecimal."""
    facts: dict[str, Any] = report.to_dict()
    return facts


# --- progress ---------------------------------------------------------------------------------------------------------
@contextmanager
def progress(label: str, as_json: bool) -> Iterator[Progress | None]:
    """A bar on stderr for what takes long, fed by a callback; None where nobody is to see it."""
    if as_json or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import Progress as Bar  # noqa: PLC0415

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
