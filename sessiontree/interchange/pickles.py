"""Pickles, read as data: no class is looked up, nothing is imported and nothing called, whatever the file says.

Python's own unpickler is told by the file what to import and call, and can be made to take any memory; it is never used here.
What stands in a file is walked through instead: containers and scalars become themselves, a class becomes its name, an instance
the name and what it was made of (:class:`~sessiontree.interchange.plain.Foreign` of kind "class", "new", "call", "set" or
"frozenset"). Written are the same, so that Python finds the classes again where they are installed, and never another one than the
caller allows.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Container, Iterator
from typing import Any, BinaryIO, Final

from sessiontree.errors import SessionTreeError
from sessiontree.interchange.plain import Foreign


class BadPickle(SessionTreeError):
    """Bytes that are no pickle, or one of a kind that no such file needs. ``offset``: of the byte where that shows."""

    offset: int


def load(data: bytes, known: Callable[[str, str], bool]) -> Any:
    """The value of a pickle, protocols 2 to 5. ``known(module, name)`` says of each class whether to keep what is made of it.

    What is made of others is a Foreign of kind "unknown", its name and nothing else. One value may stand in several places, as it
    does in the pickle, and may hold itself. Raises BadPickle, and what ``known`` raises.
    """
    try:
        return _Walk(data, known).value()
    except (IndexError, struct.error, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise BadPickle(f"no pickle, or one that is cut off ({error})", offset=len(data)) from error


_SIZES: Final = {"<H": 2, "<I": 4, "<Q": 8, "<i": 4, ">d": 8, "B": 1}


class _Walk:
    """One walk through a pickle: what its machine would do, done with values alone."""

    def __init__(self, data: bytes, known: Callable[[str, str], bool]) -> None:
        self._data = data
        self._at = 0
        self._known = known
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks under each mark
        self._memo: dict[int, Any] = {}

    def value(self) -> Any:
        data, byte1, byte2 = self._data, pickle.BININT1[0], pickle.BININT2[0]
        while True:
            op = data[self._at]
            if op == byte1:  # token ids, nearly all of a dump
                self._stack.append(data[self._at + 1])
                self._at += 2
            elif op == byte2:
                self._stack.append(data[self._at + 1] | data[self._at + 2] << 8)
                self._at += 3
            else:
                self._at += 1
                if op == pickle.STOP[0]:
                    return self._stack.pop()
                step = _STEPS.get(op)
                if step is None:
                    raise BadPickle(
                        f"byte {self._at - 1}: {bytes([op])!r} is nothing that such a pickle holds", offset=self._at - 1
                    )
                step(self)

    def number(self, form: str) -> Any:
        size = _SIZES[form]
        (number,) = struct.unpack(form, self.bytes(size))
        return number

    def bytes(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise BadPickle(f"byte {self._at}: {size} more are to come, and {len(self._data) - self._at} do", offset=self._at)
        self._at += size
        return self._data[self._at - size : self._at]

    def line(self) -> str:
        end = self._data.index(b"\n", self._at)
        text = self._data[self._at : end].decode()
        self._at = end + 1
        return text

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop(self) -> Any:
        return self._stack.pop()

    def top(self, kind: type) -> Any:
        if not isinstance(self._stack[-1], kind):
            raise BadPickle(f"byte {self._at - 1}: entries for a {type(self._stack[-1]).__name__}", offset=self._at - 1)
        return self._stack[-1]

    def mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def since_mark(self) -> list[Any]:
        values, self._stack = self._stack, self._below.pop()
        return values

    def put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def memoize(self) -> None:
        self.put(len(self._memo))

    def get(self, index: int) -> None:
        self.push(self._memo[index])

    def several(self, count: int) -> tuple[Any, ...]:
        values = self._stack[-count:]
        if len(values) != count:
            raise IndexError("too few values")
        del self._stack[-count:]
        return tuple(values)

    def append(self, values: list[Any]) -> None:
        self.top(list).extend(values)

    def add(self, values: list[Any]) -> None:
        target = self.top(Foreign)
        if target.kind != "set":
            raise TypeError("entries of what is no set")
        target.parts.extend(values)

    def new_dict(self, pairs: list[Any]) -> None:
        self.push({})
        self.set_items(pairs)

    def set_items(self, pairs: list[Any]) -> None:
        target = self.top(dict)
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            target[self.key(key)] = value

    def key(self, key: Any) -> Any:
        """A key, if hashing it takes no time to speak of."""
        if isinstance(key, (list, dict)) or (isinstance(key, tuple) and any(isinstance(each, (list, dict, tuple)) for each in key)):
            raise BadPickle(f"byte {self._at - 1}: a key that is a {type(key).__name__}", offset=self._at - 1)
        return key

    def named(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise TypeError("a class that is named by no text")
        self.push(Foreign("class" if self._known(module, name) else "unknown", [module, name]))

    def stack_global(self) -> None:
        name, module = self.pop(), self.pop()
        self.named(module, name)

    def made(self, kind: str) -> None:
        arguments, made_of = self.pop(), self.pop()
        if not (isinstance(made_of, Foreign) and made_of.kind in ("class", "unknown") and isinstance(arguments, tuple)):
            raise TypeError("an instance of what is no class")
        self.push(made_of if made_of.kind == "unknown" else Foreign(kind, [made_of, arguments, None]))

    def build(self) -> None:
        state = self.pop()
        instance = self.top(Foreign)
        if instance.kind in ("new", "call"):
            instance.parts[2] = state
        elif instance.kind != "unknown":
            raise TypeError("a state for what is no instance")


_STEPS: Final[dict[int, Callable[[_Walk], Any]]] = {
    op[0]: step
    for op, step in (
        (pickle.PROTO, lambda walk: walk.bytes(1)),
        (pickle.FRAME, lambda walk: walk.bytes(8)),
        (pickle.MARK, _Walk.mark),
        (pickle.POP, _Walk.pop),
        (pickle.POP_MARK, _Walk.since_mark),
        (pickle.NONE, lambda walk: walk.push(None)),
        (pickle.NEWTRUE, lambda walk: walk.push(True)),
        (pickle.NEWFALSE, lambda walk: walk.push(False)),
        (pickle.BININT, lambda walk: walk.push(walk.number("<i"))),
        (pickle.LONG1, lambda walk: walk.push(int.from_bytes(walk.bytes(walk.number("B")), "little", signed=True))),
        (pickle.LONG4, lambda walk: walk.push(int.from_bytes(walk.bytes(walk.number("<I")), "little", signed=True))),
        (pickle.BINFLOAT, lambda walk: walk.push(walk.number(">d"))),
        (pickle.SHORT_BINUNICODE, lambda walk: walk.push(str(walk.bytes(walk.number("B")), "utf-8", "surrogatepass"))),
        (pickle.BINUNICODE, lambda walk: walk.push(str(walk.bytes(walk.number("<I")), "utf-8", "surrogatepass"))),
        (pickle.BINUNICODE8, lambda walk: walk.push(str(walk.bytes(walk.number("<Q")), "utf-8", "surrogatepass"))),
        (pickle.SHORT_BINBYTES, lambda walk: walk.push(walk.bytes(walk.number("B")))),
        (pickle.BINBYTES, lambda walk: walk.push(walk.bytes(walk.number("<I")))),
        (pickle.BINBYTES8, lambda walk: walk.push(walk.bytes(walk.number("<Q")))),
        (pickle.EMPTY_LIST, lambda walk: walk.push([])),
        (pickle.LIST, lambda walk: walk.push(walk.since_mark())),
        (pickle.APPEND, lambda walk: walk.append([walk.pop()])),
        (pickle.APPENDS, lambda walk: walk.append(walk.since_mark())),
        (pickle.EMPTY_TUPLE, lambda walk: walk.push(())),
        (pickle.TUPLE, lambda walk: walk.push(tuple(walk.since_mark()))),
        (pickle.TUPLE1, lambda walk: walk.push(walk.several(1))),
        (pickle.TUPLE2, lambda walk: walk.push(walk.several(2))),
        (pickle.TUPLE3, lambda walk: walk.push(walk.several(3))),
        (pickle.EMPTY_DICT, lambda walk: walk.push({})),
        (pickle.DICT, lambda walk: walk.new_dict(walk.since_mark())),
        (pickle.SETITEM, lambda walk: walk.set_items(list(walk.several(2)))),
        (pickle.SETITEMS, lambda walk: walk.set_items(walk.since_mark())),
        (pickle.EMPTY_SET, lambda walk: walk.push(Foreign("set", []))),
        (pickle.ADDITEMS, lambda walk: walk.add(walk.since_mark())),
        (pickle.FROZENSET, lambda walk: walk.push(Foreign("frozenset", walk.since_mark()))),
        (pickle.BINPUT, lambda walk: walk.put(walk.number("B"))),
        (pickle.LONG_BINPUT, lambda walk: walk.put(walk.number("<I"))),
        (pickle.MEMOIZE, _Walk.memoize),
        (pickle.BINGET, lambda walk: walk.get(walk.number("B"))),
        (pickle.LONG_BINGET, lambda walk: walk.get(walk.number("<I"))),
        (pickle.GLOBAL, lambda walk: walk.named(walk.line(), walk.line())),
        (pickle.STACK_GLOBAL, _Walk.stack_global),
        (pickle.NEWOBJ, lambda walk: walk.made("new")),
        (pickle.REDUCE, lambda walk: walk.made("call")),
        (pickle.BUILD, _Walk.build),
    )
}


def dump(value: Any, file: BinaryIO, named: Container[tuple[str, str]]) -> None:
    """Writes a value of :func:`load` as a pickle, protocol 4; what is unknown as None.

    Whoever loads it in Python's way imports and calls what it names: raises BadPickle for a class that is not in ``named``.
    """
    file.write(pickle.PROTO + b"\x04")
    file.writelines(_written(value, named))
    file.write(pickle.STOP)


def _written(value: Any, named: Container[tuple[str, str]]) -> Iterator[bytes]:
    match value:
        case dict():
            yield pickle.EMPTY_DICT + pickle.MARK
            yield from _each([part for pair in value.items() for part in pair], named)
            yield pickle.SETITEMS
        case list():
            yield pickle.EMPTY_LIST + pickle.MARK
            yield from _each(value, named)
            yield pickle.APPENDS
        case tuple():
            yield pickle.MARK
            yield from _each(value, named)
            yield pickle.TUPLE
        case Foreign("set"):
            yield pickle.EMPTY_SET + pickle.MARK
            yield from _each(value.parts, named)
            yield pickle.ADDITEMS
        case Foreign("frozenset"):
            yield pickle.MARK
            yield from _each(value.parts, named)
            yield pickle.FROZENSET
        case Foreign("class", [str(), str()]) if tuple(value.parts) in named:
            yield from _each(value.parts, named)
            yield pickle.STACK_GLOBAL
        case Foreign("new" | "call", [Foreign("class") as made_of, tuple() as arguments, state]):
            yield from _each([made_of, arguments], named)
            yield pickle.NEWOBJ if value.kind == "new" else pickle.REDUCE
            if state is not None:
                yield from _written(state, named)
                yield pickle.BUILD
        case Foreign("unknown"):
            yield pickle.NONE
        case Foreign():
            raise BadPickle(f"nothing to be written into a pickle: {value.kind} of {value.parts[:2]}", offset=0)
        case _:
            # A scalar: Python's own bytes of it, without the frame around them. The memo they write to is never read.
            yield pickle.dumps(value, protocol=3)[2:-1]


def _each(values: list[Any] | tuple[Any, ...], named: Container[tuple[str, str]]) -> Iterator[bytes]:
    for each in values:
        yield from _written(each, named)
