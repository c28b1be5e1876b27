"""Annotations: what is said of a node and its tokens beside what it is. Trainers need it, engines do not.

A node has annotations by name, each of one kind: a scalar of the node as a whole, :class:`TokenValues`, :class:`Ragged` or
:class:`Spans` of its tokens. They are no part of its id, and may be said with the node or at any time later. What is said of a
token later stands in the place of what was said before; other tokens keep theirs. Offsets are relative to the node, half-open.

The names that packing and queries look for are here; any other may be used. Values are copied when they come in and when they go
out, so nobody can change what a node has.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sessiontree.errors import LimitExceeded, OutOfRange, Unsupported
from sessiontree.frozen import Sealed, checked_text, freeze, frozen_array, no_subclasses, seal, to_numpy

#: Log-probability of each sampled token under the policy that sampled it, natural logarithm; and under a reference policy.
LOGPROBS: Final = "logprobs"
REF_LOGPROBS: Final = "ref_logprobs"
#: Which tokens are trained on, bool, where that is not just those that were generated.
LOSS_MASK: Final = "loss_mask"
#: What a token's loss counts, 1 where nothing is said. More of them are named "loss_weight/<name>".
LOSS_WEIGHT: Final = "loss_weight"
#: :class:`Spans` of the weights that sampled the tokens.
WEIGHT_VERSION: Final = "weight_version"
#: The experts that a token was routed to: (tokens, layers, experts per token).
ROUTED_EXPERTS: Final = "routed_experts"
#: :class:`Ragged`: the ids that top-p sampling chose from.
TOP_P_IDS: Final = "top_p_ids"
REWARD: Final = "reward"
ADVANTAGE: Final = "advantage"
#: False: neither this node nor anything below it is ever trained on.
TRAIN: Final = "train"

STANDARD_NAMES: Final = (
    LOGPROBS,
    REF_LOGPROBS,
    LOSS_MASK,
    LOSS_WEIGHT,
    WEIGHT_VERSION,
    ROUTED_EXPERTS,
    TOP_P_IDS,
    REWARD,
    ADVANTAGE,
    TRAIN,
)

MAX_NAME: Final = 256
_NUMBERS: Final = "biuf"
_LARGEST: Final = 8  # bytes of a number: what is larger is not the same on every machine
_OVERHEAD: Final = 200  # bytes of a value beside its arrays, and of what finds it

Scalar = bool | int | float | str
Part = tuple[Any, ...]  # its start comes first


class OfTokens(Sealed):
    """What is said of some of a node's tokens: parts in order, which neither overlap nor, where they could be one, touch."""

    __slots__ = ("_held",)

    _held: tuple[Part, ...] | Part  # one part stands by itself: that is what most have

    @classmethod
    def _of(cls, parts: Iterable[Part]) -> Self:
        """Of parts in order that do not overlap; those that can be one are joined, and empty ones left out."""
        joined: list[Part] = []
        for part in parts:
            if cls._stop(part) == part[0]:
                continue
            if joined and cls._stop(joined[-1]) == part[0] and (both := cls._both(joined[-1], part)) is not None:
                joined[-1] = both
            else:
                joined.append(part)
        made: Self = object.__new__(cls)
        _set_held(made, joined[0] if len(joined) == 1 else tuple(joined))
        return made

    @property
    def _parts(self) -> tuple[Part, ...]:
        held = self._held
        return held if not held or held[0].__class__ is tuple else (held,)

    # Of one part. As it is where that is arrays, the first with an entry for each token.

    @staticmethod
    def _stop(part: Part) -> int:
        return int(part[0] + len(part[1]))

    @staticmethod
    def _cut(part: Part, start: int, stop: int) -> Part:
        """The tokens ``[start, stop)`` of a part, which it has."""
        first, values = part
        return start, values[start - first : stop - first]

    @staticmethod
    def _both(one: Part, other: Part) -> Part | None:
        """A part and the one that follows it as one; None where they stay two."""
        return one[0], *(frozen_array(np.concatenate(each)) for each in zip(one[1:], other[1:], strict=True))

    @classmethod
    def _checked(cls, part: Part) -> Part:
        """A part that was stored, made as a caller's is. Raises TypeError, ValueError, OutOfRange."""
        start, *arrays = part
        make: Any = cls
        (made,) = make(*reversed(arrays), start=start)._parts
        checked: Part = made
        return checked

    def _check_like(self, older: Any, what: str) -> None:
        """Whether it can stand beside what was said before. Raises Unsupported."""
        if type(older) is not type(self):
            raise Unsupported(f"{what} is {kind_of(older)}, not {kind_of(self)}")

    # What they share.

    def over(self, older: Any, what: str) -> Self:
        """What both say, and this where both say something. ``what``: names them in messages. Raises Unsupported."""
        if older is None:
            return self
        self._check_like(older, what)
        kept: list[Part] = []
        ends = [self._stop(mine) for mine in self._parts]
        for part in older._parts:
            at, stop = part[0], self._stop(part)
            for number in range(bisect_right(ends, at), len(ends)):  # of those that end behind its beginning
                mine = self._parts[number]
                if mine[0] >= stop:
                    break
                if mine[0] > at:
                    kept.append(self._cut(part, at, mine[0]))
                at = max(at, self._stop(mine))
            if at < stop:
                kept.append(self._cut(part, at, stop))
        return self._of(sorted((*kept, *self._parts), key=_start))

    def clipped(self, start: int, stop: int) -> Self | None:
        """What it says of the tokens ``[start, stop)``, under their offsets; None where that is nothing."""
        clipped = self._of(self._within(start, stop))
        return clipped if clipped._parts else None

    def _within(self, start: int, stop: int) -> Iterator[Part]:
        for part in self._parts:
            begin, end = max(start, part[0]), min(stop, self._stop(part))
            if begin < end:
                yield self._cut(part, begin, end)

    @property
    def stop(self) -> int:
        """Where the last of its tokens ends; 0 where there is none."""
        return self._stop(self._parts[-1]) if self._parts else 0

    def fields(self) -> tuple[Part, ...]:
        """Its parts as they are stored."""
        return self._parts

    @classmethod
    def from_fields(cls, fields: tuple[Part, ...]) -> Self:
        """What has these fields. Raises TypeError, ValueError, OutOfRange or Unsupported where none has."""
        made = cls._of(cls._checked(part) for part in fields)
        if len(made._parts) != len(fields) or any(one[0] > other[0] for one, other in pairwise(made._parts)):
            raise ValueError("parts are in order, and those that can be one are one")
        for one, other in pairwise(made._parts):
            if cls._stop(one) > other[0]:
                raise ValueError(f"a part begins at {other[0]}, inside the one before")
            cls._of([one])._check_like(cls._of([other]), "one part")
        return made

    @property
    def nbytes(self) -> int:
        """About how many bytes it takes."""
        return _OVERHEAD + sum(part.nbytes for parts in self._parts for part in parts if isinstance(part, np.ndarray))

    @property
    def _tokens(self) -> str:
        return ", ".join(f"[{part[0]}, {self._stop(part)})" for part in self._parts) or "no tokens"

    def __reduce__(self) -> Any:
        return _from_fields, (type(self), self._parts)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self) or len(self._parts) != len(other._parts):
            return NotImplemented if type(other) is not type(self) else False
        return all(_alike(a, b) for one, two in zip(self._parts, other._parts, strict=True) for a, b in zip(one, two, strict=True))

    def __hash__(self) -> int:
        return hash((type(self), tuple((part[0], self._stop(part)) for part in self._parts)))


_set_held = seal(OfTokens)["_held"]


def _from_fields(cls: type[OfTokens], fields: tuple[Part, ...]) -> OfTokens:
    return cls.from_fields(fields)


class TokenValues(OfTokens):
    """A row for each of some tokens of a node.

    ``values``: (n,) or (n, ...), numbers or bools, any NumPy type of these, for the tokens ``[start, start + n)``. Two are equal
    where types and bytes are. Raises TypeError, OutOfRange for a negative start.
    """

    __slots__ = ()
    __init_subclass__ = no_subclasses

    def __new__(cls, values: ArrayLike, start: int = 0) -> TokenValues:
        array = _numbers(values, "values")
        if not array.ndim:
            raise TypeError("values are an array of a row for each token")
        return cls._of([(_offset(start), array)] if len(array) else [])

    @property
    def stretches(self) -> tuple[tuple[int, NDArray[Any]], ...]:
        """(start, values) of each stretch of tokens that has values; copies."""
        return tuple((start, values.copy()) for start, values in self._parts)

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """Of the values; None where there are none."""
        return self._parts[0][1].dtype if self._parts else None

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Of one token's values."""
        return self._parts[0][1].shape[1:] if self._parts else ()

    def read(self, start: int, stop: int) -> TokenWindow:
        """The values of the tokens ``[start, stop)``, zeros where there are none. Raises OutOfRange."""
        start, stop = _offset(start), _offset(stop)
        if stop < start:
            raise OutOfRange(f"tokens [{start}, {stop})", value=stop, limit=start)
        window = TokenWindow.empty(stop - start, self.dtype, self.row_shape)
        self.write(window, start, stop, 0)
        return window

    def write(self, window: TokenWindow, start: int, stop: int, at: int) -> None:
        """The same into a window, where the first of them stands at ``at``."""
        for begin, values in self._within(start, stop):
            to = at + begin - start
            window.values[to : to + len(values)] = values
            window.known[to : to + len(values)] = True

    def _check_like(self, older: Any, what: str) -> None:
        super()._check_like(older, what)
        if self._parts and older._parts and (self.dtype, self.row_shape) != (older.dtype, older.row_shape):
            raise Unsupported(f"{what} has rows of {older.dtype} {older.row_shape}, not {self.dtype} {self.row_shape}")

    def __repr__(self) -> str:
        return f"<TokenValues {self.dtype} {self.row_shape} of {self._tokens}>"


class Ragged(OfTokens):
    """A list of numbers for each of some tokens of a node, of any length.

    ``values``: (sum of lengths,) numbers, ``lengths``: (n,) whole numbers of 0 or more, for the tokens ``[start, start + n)``.
    """

    __slots__ = ()
    __init_subclass__ = no_subclasses

    def __new__(cls, values: ArrayLike, lengths: ArrayLike, start: int = 0) -> Ragged:
        array, counts = _numbers(values, "values"), _numbers(lengths, "lengths")
        if array.ndim != 1 or counts.ndim != 1 or (len(counts) and counts.dtype.kind not in "iu"):
            raise TypeError("values are an array of one dimension, lengths one of whole numbers")
        if len(counts) and (int(counts.min()) < 0 or int(counts.max()) > 2**31 - 1):
            raise OutOfRange("a length is within 0..2**31-1", value=int(counts.min()), limit=2**31 - 1)
        if int(counts.sum()) != len(array):
            raise OutOfRange(
                f"lengths of {int(counts.sum())} values, of which there are {len(array)}", value=len(array), limit=None
            )
        return cls._of([(_offset(start), frozen_array(counts.astype(np.int32)), array)] if len(counts) else [])

    @classmethod
    def of(cls, lists: Sequence[ArrayLike], start: int = 0) -> Ragged:
        """Of a list a token."""
        arrays = [_numbers(each, "values") for each in lists]
        filled = [array for array in arrays if array.size]
        return cls(np.concatenate(filled) if filled else np.empty(0, np.int64), [array.size for array in arrays], start)

    @property
    def stretches(self) -> tuple[tuple[int, NDArray[np.int32], NDArray[Any]], ...]:
        """(start, lengths, values) of each stretch of tokens; copies."""
        return tuple((start, lengths.copy(), values.copy()) for start, lengths, values in self._parts)

    def lists(self) -> dict[int, NDArray[Any]]:
        """By token, those that have a list; copies."""
        found: dict[int, NDArray[Any]] = {}
        for start, lengths, values in self._parts:
            found |= enumerate(np.split(values.copy(), np.cumsum(lengths)[:-1]), start)
        return found

    @staticmethod
    def _cut(part: Part, start: int, stop: int) -> Part:
        first, lengths, values = part
        ends = np.cumsum(lengths, dtype=np.int64)
        begin = int(ends[start - first - 1]) if start > first else 0
        return start, lengths[start - first : stop - first], values[begin : int(ends[stop - first - 1])]

    def _check_like(self, older: Any, what: str) -> None:
        super()._check_like(older, what)
        if self._parts and older._parts and self._parts[0][2].dtype != older._parts[0][2].dtype:
            raise Unsupported(f"{what} has values of {older._parts[0][2].dtype}, not {self._parts[0][2].dtype}")

    def __repr__(self) -> str:
        return f"<Ragged of {self._tokens}>"


class Spans(OfTokens):
    """A number or text for stretches of a node's tokens: (start, stop, value) each, half-open, in any order.

    Two that touch stay two, even of one value. Raises TypeError; OutOfRange for empty ones and those that overlap.
    """

    __slots__ = ()
    __init_subclass__ = no_subclasses

    def __new__(cls, spans: Iterable[tuple[int, int, int | str]]) -> Spans:
        checked: list[Part] = []
        for span in spans:
            try:
                start, stop, value = span
            except ValueError:
                raise TypeError("a span is (start, stop, value)") from None
            value = freeze(value, "a span's value")
            if type(value) not in (int, str):
                raise TypeError(f"a span's value is an int or text, not {type(value).__name__}")
            start, stop = _offset(start), _offset(stop)
            if start >= stop:
                raise OutOfRange(f"span [{start}, {stop}) is empty", value=start, limit=stop)
            checked.append((start, stop, value))
        checked.sort(key=_start)
        for (_, end, _), (start, _, _) in pairwise(checked):
            if start < end:
                raise OutOfRange(f"a span begins at {start}, inside the one that ends at {end}", value=start, limit=end)
        return cls._of(checked)

    def __iter__(self) -> Iterator[tuple[int, int, int | str]]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    @staticmethod
    def _stop(part: Part) -> int:
        stop: int = part[1]
        return stop

    @staticmethod
    def _cut(part: Part, start: int, stop: int) -> Part:
        return start, stop, part[2]

    @classmethod
    def _checked(cls, part: Part) -> Part:
        (made,) = cls([part])._parts
        return made

    @staticmethod
    def _both(one: Part, other: Part) -> Part | None:
        return None

    def __repr__(self) -> str:
        return f"Spans({list(self._parts)})"


Annotation = Scalar | TokenValues | Ragged | Spans


class TokenWindow(NamedTuple):
    """Values of a stretch of tokens. ``values``: (n, ...), zeros where nothing is known; ``known``: (n,) bool."""

    values: NDArray[Any]
    known: NDArray[np.bool]

    @classmethod
    def empty(cls, count: int, dtype: np.dtype[Any] | None, row_shape: tuple[int, ...]) -> TokenWindow:
        """Of so many tokens of which nothing is known; float32 where no type is."""
        return cls(np.zeros((count, *row_shape), np.float32 if dtype is None else dtype), np.zeros(count, np.bool))


def checked(annotations: Mapping[str, Any], count: int, of: object) -> dict[str, Annotation]:
    """What a caller says of a node of ``count`` tokens, as values. ``of``: the node, or its role, for messages.

    An array or a list of numbers is :class:`TokenValues` of all tokens. Raises TypeError; OutOfRange for tokens that it has not;
    LimitExceeded for a name that is empty or longer than 256 characters.
    """
    if not isinstance(annotations, Mapping):
        raise TypeError(f"annotations are a mapping of names to values, not {type(annotations).__name__}")
    return {_name(name): _value(value, count, f"{name!r} of {of!r}") for name, value in annotations.items()}


def _name(given: Any) -> str:
    name: str = checked_text(given, "an annotation's name")
    if not 0 < len(name) <= MAX_NAME:
        raise LimitExceeded(
            f"an annotation's name has 1 to {MAX_NAME} characters, not {len(name)}", value=len(name), limit=MAX_NAME
        )
    return name


def _value(value: Any, count: int, what: str) -> Annotation:
    if not isinstance(value, OfTokens):
        try:
            value = to_numpy(value)
        except TypeError as error:
            raise TypeError(f"{what}: {error}") from None
        if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim):
            value = value.item()
        if isinstance(value, bool | int | float | str):
            scalar: Scalar = freeze(value, what)
            return scalar
        if not isinstance(value, np.ndarray | list | tuple):
            raise TypeError(f"{what} is a scalar, an array, TokenValues, Ragged or Spans, not {type(value).__name__}")
        try:
            value = TokenValues(value)
        except TypeError as error:
            raise TypeError(f"{what}: {error}") from None
        if value.stop != count:
            said = f"{what}: {value.stop} rows for {count} tokens; TokenValues(values, start) says of which, Spans of stretches"
            raise OutOfRange(said, value=value.stop, limit=count)
    if value.stop > count:
        raise OutOfRange(f"{what} goes to token {value.stop} of {count}", value=value.stop, limit=count)
    made: Annotation = value
    return made


def said_over(value: Annotation, older: Annotation | None, what: str) -> Annotation:
    """A value over what was said before. Raises Unsupported where they are of two kinds."""
    if isinstance(value, OfTokens):
        return value.over(older, what)
    if isinstance(older, OfTokens):
        raise Unsupported(f"{what} is {kind_of(older)}, not {kind_of(value)}")
    return value


def same(one: Annotation | None, other: Annotation | None) -> bool:
    """Whether two are one value, of one type, bit for bit."""
    if isinstance(one, float) and isinstance(other, float):
        return one.hex() == other.hex()
    return type(one) is type(other) and bool(one == other)


def kind_of(value: Any) -> str:
    return type(value).__name__ if isinstance(value, OfTokens) else "a scalar"


def rejects(train: Annotation | None, node_id: bytes) -> bool:
    """Whether what is said of a node as ``train`` keeps it from being trained on. Raises Unsupported where it is no bool.

    A 0 or a "false" that counted as nothing said would be trained on.
    """
    if train is not None and not isinstance(train, bool):
        said = repr(train) if isinstance(train, int | float | str) else kind_of(train)
        raise Unsupported(f"{TRAIN!r} of node {node_id.hex()} is {said}; it is True or False, and {LOSS_MASK!r} is by token")
    return train is False


def value_bytes(value: Annotation) -> int:
    """About how many bytes it takes."""
    return value.nbytes if isinstance(value, OfTokens) else _OVERHEAD


def _start(part: Part) -> int:
    start: int = part[0]
    return start


def _offset(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"a token's offset is an int, not {type(value).__name__}")
    if not 0 <= value < 2**31:
        raise OutOfRange(f"offset {value} is outside 0..2**31-1", value=int(value), limit=2**31 - 1)
    return int(value)


def _numbers(values: Any, what: str) -> NDArray[Any]:
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError(f"{what} are all there; a masked array says of some that they are not")
    array = frozen_array(values)
    if array.dtype.kind not in _NUMBERS or array.dtype.itemsize > _LARGEST:
        raise TypeError(f"{what} are bools or numbers of up to 64 bits, not {array.dtype}")
    return array


def _alike(one: Any, other: Any) -> bool:
    if not isinstance(one, np.ndarray):
        return type(one) is type(other) and bool(one == other)
    equal: bool = one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return equal
