"""The formats there are: our own, and those that other packages add by the entry point group ``sessiontree.formats``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

import attrs

from sessiontree.errors import UnknownFormat
from sessiontree.interchange.conversations import Conversation
from sessiontree.interchange.losses import Losses
from sessiontree.interchange.source import SourceFile

#: The group of entry points; each names a :class:`Format`.
GROUP: Final = "sessiontree.formats"

#: What a format may have no place for, and what a loss of it is called.
LACKING: Final[Mapping[str, str]] = {
    "title": "titles",
    "created_at": "when a conversation was begun",
    "heads": "heads other than main",
    "main": "which turn is gone on from",
    "token_ids": "token ids",
    "media": "where pictures stand among tokens",
    "times": "when turns were made",
    "finish_reason": "why turns ended",
    "derived_from": "what turns were made of",
    "annotations": "the annotation",  # and its name
}

Read = Callable[[SourceFile, Losses], Iterator[Conversation]]
Write = Callable[[Iterable[Conversation], Path, Losses], None]


@attrs.frozen
class Format:
    """How the files of some tool are read and written.

    ``read(file, losses)``: its conversations, one at a time, so that a large file takes little memory. What it cannot read is
    ``losses.fault(...)``, and what it understands and a store has no place for ``losses.add(...)``. ``write(conversations, path,
    losses)``: makes the file at a path where there is none yet; ids and parents of turns are all there, parents come first. What
    the format cannot hold is ``losses.add(...)``. None where it only goes one way.

    ``lacks``: of :data:`LACKING`, what it has no place for, whoever's turns are written: an export counts that, and ``write`` need
    not. ``keys``: what of messages of other formats it has places for; None: anything.

    ``one_result``: whether a turn holds one result of a tool at most: a turn with several is written as a turn for each.

    ``suffix``: what its files' names end in. ``single``: whether a file holds one conversation; several are a folder of files then.
    ``folder``: whether a folder is read as one, and given to ``read`` whole. ``summary``: a line for who chooses.
    """

    name: str
    summary: str
    suffix: str
    read: Read | None = None
    write: Write | None = None
    single: bool = False
    folder: bool = False
    lacks: frozenset[str] = frozenset()
    keys: frozenset[str] | None = None
    one_result: bool = False


_OWN: Final = (
    "atif",
    "chatgpt",
    "claude_code",
    "langgraph",
    "openai",
    "pi",
    "sglang",
    "sharegpt",
    "verifiers",
)


def formats() -> tuple[str, ...]:
    """The names of all formats, sorted."""
    return tuple(sorted({*(name.replace("_", "-") for name in _OWN), *(each.name for each in entry_points(group=GROUP))}))


def format_named(name: str) -> Format:
    """The format of a name. One that another package adds stands before ours. Raises UnknownFormat."""
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            found = entry.load()
            if not isinstance(found, Format):
                raise UnknownFormat(f"{entry.value} is to be a Format, not {type(found).__name__}", name=name, known=formats())
            return found
    own = name.replace("-", "_")
    if own not in _OWN:
        raise UnknownFormat(f"no format is called {name!r}; there are {', '.join(formats())}", name=name, known=formats())
    made: Format = import_module(f"sessiontree.interchange.{own}").FORMAT
    return made
