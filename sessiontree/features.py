"""Features of media, pixels and encoder outputs, kept outside nodes, by identity, under a byte budget.

:class:`Features` are the arrays of one content, a value: compact copies that are nobody's view. A :class:`FeatureStore` keeps them
until its budget is needed, least recently used first out, and never lets go of what anybody else still holds: a request keeps
what ``put``, ``get`` and ``need`` gave it, or an array of it, and is safe. So there is one ``Features`` of a content at a time, for
as long as it lives, and copies on a device can be keyed by it, weakly. What a node needs for positions is in the node, never here.

Signal handlers and finalizers may use a store in the middle of a call to it, on the same thread. They come in where a call is made,
so whatever belongs together is written without one; a ``put`` that something came in between of is done again.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from sessiontree.errors import KeyTaken, LimitExceeded, NeedsMedia, OutOfRange, SessionTreeError, StoreClosed
from sessiontree.frozen import Sealed, checked_text, no_subclasses, seal, to_numpy
from sessiontree.locks import new_lock
from sessiontree.media import MediaItem
from sessiontree.tokens import as_index, shown

__all__ = ["FeatureArray", "FeatureStore", "Features"]

DEFAULT_BUDGET: Final = 256 * 2**20
#: Counted for each array beside its values: its item, the objects that keep it and what finds them, measured for one of an item.
OVERHEAD_BYTES: Final = 1536
_NO_NUMPY_DTYPE: Final = ("bfloat16", "float8", "float4")  # PyTorch's; such values are kept as the unsigned ints of their bits


class FeatureArray(NamedTuple):
    """One array: what its dtype is called, the NumPy dtype that it is read as, and its values in C order."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    data: bytes


class Features(Sealed):
    """The arrays of one content, by name. Made by :meth:`FeatureStore.put`; immutable, equal only to itself.

    ``item``: the MediaItem it was put for, wherever that stood. ``content``: ``item.content()``, what it is kept by. ``nbytes``:
    what is counted for it, the bytes of the values and ``OVERHEAD_BYTES`` for each array.

    Arrays are read-only, C-ordered, in native byte order, and views: whoever has one holds these features. bfloat16 and float8
    have no NumPy dtype and are read as the unsigned ints of their bits; ``dtype`` names what they are. PyTorch's ``from_numpy``
    knows no read-only memory: a tensor made by it writes into what everybody reads, so write only to a copy.
    """

    __slots__ = ("__weakref__", "_arrays", "_newer", "content", "item", "nbytes")

    item: MediaItem
    content: tuple[Any, ...]
    nbytes: int
    _arrays: Mapping[str, FeatureArray]
    _newer: list[Features | None]  # what replaced it, which lives as long: what is counted for that covers this one's arrays

    __init_subclass__ = no_subclasses

    def __new__(cls) -> Features:
        raise TypeError("features are made by FeatureStore.put, not by calling Features")

    @property
    def names(self) -> tuple[str, ...]:
        """In the order they were put."""
        return tuple(self._arrays)

    def __getitem__(self, name: str) -> NDArray[Any]:
        """The array of this name, read-only, without copying. Raises KeyError."""
        return np.asarray(_Exposed(self, self._arrays[name]))

    def __contains__(self, name: object) -> bool:
        return name in self._arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Every array by name, as ``features[name]``."""
        return {name: self[name] for name in self.names}

    def dtype(self, name: str) -> str:
        """What the values are: "float32", "bfloat16", "float8_e4m3fn". Raises KeyError."""
        return self._arrays[name].name

    def __repr__(self) -> str:
        arrays = ", ".join(f"{name} {array.name} {array.shape}" for name, array in self._arrays.items())
        return f"<Features of {self.item}: {arrays}; {self.nbytes} bytes>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("features are kept once; ship their arrays()")


_SET = seal(Features)


def _made(item: MediaItem, content: tuple[Any, ...], arrays: dict[str, FeatureArray]) -> Features:
    self = object.__new__(Features)
    _SET["item"](self, item)
    _SET["content"](self, content)
    _SET["nbytes"](self, sum(len(array.data) + OVERHEAD_BYTES for array in arrays.values()))
    _SET["_arrays"](self, arrays)
    _SET["_newer"](self, [None])
    return self


class _Exposed(Sealed):
    """What NumPy arrays of features have as their base: it holds the features, and offers memory to read only."""

    __slots__ = ("_array", "_features")

    _array: FeatureArray
    _features: Features

    def __new__(cls, features: Features, array: FeatureArray) -> _Exposed:
        self = object.__new__(cls)
        _SET_EXPOSED["_features"](self, features)
        _SET_EXPOSED["_array"](self, array)
        return self

    @property
    def __array_interface__(self) -> dict[str, Any]:
        array = self._array
        return np.ndarray(array.shape, array.dtype, buffer=array.data).__array_interface__


_SET_EXPOSED = seal(_Exposed)


def _readable(value: Any, what: str) -> tuple[str, NDArray[Any]]:
    """What the dtype of an array or tensor is called, and an array of its values that may be a view."""
    if not hasattr(value, "__array__") and not hasattr(value, "__array_interface__"):
        raise TypeError(f"{what} is an array or tensor, not {type(value).__name__}")
    name = str(getattr(value, "dtype", "")).removeprefix("torch.")
    if name.startswith(_NO_NUMPY_DTYPE) and hasattr(value, "detach") and "torch" in sys.modules:
        bits = getattr(sys.modules["torch"], f"uint{8 * value.element_size()}")
        return sys.intern(name), np.asarray(to_numpy(value.view(bits)))
    try:
        array = np.asarray(to_numpy(value))
    except ValueError as error:
        raise TypeError(f"{what} is no array: {error}") from None
    if array.dtype.kind not in "biufc":
        raise TypeError(f"{what} holds numbers, not {array.dtype}")
    return sys.intern(array.dtype.name), array.astype(array.dtype.newbyteorder("="), copy=False)


def _copied(item: MediaItem, features: Any, limit: int) -> dict[str, FeatureArray]:
    """Arrays of one's own, by name. Nothing is copied of what can never be kept."""
    given = dict(features.items()) if isinstance(features, Mapping) else {"features": features}
    if not given:
        raise TypeError(f"{item}: features are at least one array")
    found = {}
    for key, value in given.items():
        name = checked_text(key, "a name of features")
        found[name] = _readable(value, f"{item}: features {name!r}")
    size = sum(array.nbytes + OVERHEAD_BYTES for _, array in found.values())
    if size > limit:
        raise LimitExceeded(f"{item}: features of {size} bytes; the budget is {limit}", value=size, limit=limit)
    # One byte more for a single one, as in frozen_array: Python has one object for each, and this is to be nobody else's.
    return {
        name: FeatureArray(dtype, array.dtype, array.shape, array.tobytes() + b"\0" * (array.nbytes == 1))
        for name, (dtype, array) in found.items()
    }


class _Entry(weakref.ref[Features]):
    """How a store finds features and counts them. ``nbytes``: what it has counted for them."""

    __slots__ = ("content", "nbytes")

    content: tuple[Any, ...]
    nbytes: int


def _references(table: Mapping[Any, Any], key: Any) -> int:
    value = table.get(key)
    return sys.getrefcount(value)


_ALONE: Final = _references({0: object()}, 0)  # what nobody but the table holds


def _content(item: Any) -> tuple[Any, ...]:
    if not isinstance(item, MediaItem):
        raise TypeError(f"features belong to a MediaItem, not to {type(item).__name__}")
    return item.content()


class FeatureFiles(Protocol):
    """Where features lie that do not fit the budget, by content."""

    def put(self, content: tuple[Any, ...], arrays: Mapping[str, FeatureArray]) -> None:
        """Keep arrays beside those that are there. Raises KeyTaken for other values under a name that is."""

    def get(self, content: tuple[Any, ...]) -> dict[str, FeatureArray] | None: ...

    def drop(self, content: tuple[Any, ...]) -> None: ...

    def __contains__(self, content: tuple[Any, ...]) -> bool: ...


class FeatureStore:
    """Features by content, at most ``budget_bytes`` of them. Safe to use from many threads and after a fork.

    With ``files``, what is put is written there too, and what is not held is read from there; damage there raises CorruptTree.

    What was dropped, cleared or evicted and is still held by somebody stays counted, and is found and kept again. Being used is
    ``put``, ``get`` and ``need``; ``in`` and ``len`` are not.
    """

    __slots__ = (
        "__weakref__",
        "_budget_bytes",
        "_closed",
        "_dead",
        "_died",
        "_entries",
        "_held",
        "_kept",
        "_lock",
        "_puts",
        "files",
    )

    def __init__(self, budget_bytes: int = DEFAULT_BUDGET, files: FeatureFiles | None = None) -> None:
        budget = as_index(budget_bytes, "budget_bytes")
        if budget < 0:
            raise OutOfRange(f"budget_bytes is {shown(budget)}, below 0", value=budget, limit=0)
        self._budget_bytes = budget
        self.files: FeatureFiles | None = files
        self._lock = new_lock()
        self._closed = False
        self._kept: OrderedDict[tuple[Any, ...], Features] = OrderedDict()  # the longest unused first
        self._entries: dict[tuple[Any, ...], _Entry] = {}  # all that live, kept or not
        self._held = 0  # what all entries have counted
        self._puts = 0  # how many changed something
        self._dead: deque[_Entry] = deque()  # since anybody looked; where an object dies, leaving word is all that is safe
        self._died = self._dead.append

    @property
    def budget_bytes(self) -> int:
        """The most that ``held_bytes`` can be."""
        return self._budget_bytes

    @property
    def held_bytes(self) -> int:
        """``nbytes`` of all features of this store that live, whoever holds them; arrays that a later one took over count once."""
        with self._lock:
            self._settle()
            return self._held

    def put(self, item: MediaItem, features: Any) -> Features:
        """Keep features of ``item``: a mapping of names to arrays or tensors, or one of them, which is named "features".

        They are copied. Names that are held already with equal values (dtype, shape and bytes) are left as they are, and what is
        held is returned if nothing is new; with new names, features with all of them take its place. Raises KeyTaken for other
        values under a name that is held, LimitExceeded if they do not fit beside what others hold, TypeError for what is no array
        of numbers; then nothing is kept and nothing evicted.
        """
        content = _content(item)
        try:
            arrays = _copied(item, features, self._budget_bytes)
            if self.files is None:
                return self._put(item, content, arrays)
            was_there = content in self.files
            self.files.put(content, arrays)
            try:
                return self._put(item, content, arrays)
            except BaseException:
                if not was_there:
                    self.files.drop(content)
                raise
        except SessionTreeError as error:
            raise error.with_traceback(None) from None  # whoever keeps the error is to hold no features by its frames

    def take(self, item: MediaItem, arrays: Mapping[str, FeatureArray]) -> None:
        """Keep arrays that nobody else has, as :meth:`put` does; where there are files, they are enough."""
        content = _content(item)
        if self.files is not None:
            self.files.put(content, arrays)
        if self.files is None or item in self:
            self._put(item, content, dict(arrays))

    def kept(self, item: MediaItem) -> Mapping[str, FeatureArray] | None:
        """The arrays of an item's content by name, as they lie in files where there are any."""
        content = _content(item)
        if self.files is not None:
            return self.files.get(content)
        found = self.get(item)
        return None if found is None else found._arrays

    def _put(self, item: MediaItem, content: tuple[Any, ...], arrays: dict[str, FeatureArray]) -> Features:
        evicted: list[Features] = []
        spared: set[tuple[Any, ...]] = set()
        while True:
            gone = [features.content for features in evicted]
            evicted.clear()  # without the lock: whoever is told of their end may take locks of its own
            with self._lock:
                # Not gone where somebody has taken it by a weak reference in between.
                spared.update([each for each in gone if self._used(each) is not None])
                puts = self._puts
                old = self._entries.get(content)
                current = None if old is None else old()
                known = {} if current is None else dict(current._arrays)
                for name, array in arrays.items():
                    if known.get(name, array) != array:
                        raise KeyTaken(f"{item}: other features are held as {name!r}", key=name, item=item)
                if current is not None and known.keys() >= arrays.keys():
                    return self._used(content) or current
                made = _made(item, content, known | {name: array for name, array in arrays.items() if name not in known})
                newer: list[Features | None] = [None] if current is None else current._newer
                entry = _Entry(made, self._died)
                entry.content, entry.nbytes, nbytes = content, 0, made.nbytes
                evicted = self._room_for(item, nbytes - (0 if current is None else current.nbytes), spared)
                held = self._held + nbytes - (0 if old is None else old.nbytes)
                if held <= self._budget_bytes and self._puts == puts:
                    # No call from the line above on: nothing comes in between.
                    self._puts = puts + 1
                    self._held = held
                    if old is not None:
                        old.nbytes = 0
                    entry.nbytes = nbytes
                    self._entries[content] = entry
                    self._kept[content] = newer[0] = made
                    self._kept.move_to_end(content)
                    return made

    def get(self, item: MediaItem) -> Features | None:
        """What is held for ``item``, now used; None without any."""
        content = _content(item)
        with self._lock:
            found = self._used(content)
        return self._fetched(item, content) if found is None else found

    def _fetched(self, item: MediaItem, content: tuple[Any, ...]) -> Features | None:
        """What lies in files, now held."""
        if self.files is None:
            return None
        if self._closed:
            raise StoreClosed("this store is closed; what lies in its files is not read")
        arrays = self.files.get(content)
        return None if arrays is None else self._put(item, content, arrays)

    def need(self, items: Iterable[MediaItem]) -> tuple[Features, ...]:
        """What is held for each of ``items``, in their order, now used.

        Raises NeedsMedia with the items that have nothing, each content once, in their order; the others are used all the same.
        """
        wanted = [(_content(item), item) for item in items]
        with self._lock:
            found = [self._used(content) for content, _ in wanted]
        missing: dict[tuple[Any, ...], MediaItem] = {}
        for (content, item), features in zip(wanted, found, strict=True):
            if features is None:
                missing.setdefault(content, item)
        if missing and self.files is not None:
            fetched = {content: self._fetched(item, content) for content, item in missing.items()}
            found = [
                fetched.get(content) if features is None else features for (content, _), features in zip(wanted, found, strict=True)
            ]
            missing = {content: item for content, item in missing.items() if fetched[content] is None}
            del fetched
        if not missing:
            return tuple(features for features in found if features is not None)
        del found, features  # whoever keeps the error is to hold none
        some = ", ".join(str(item) for item in list(missing.values())[:8])
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise NeedsMedia(f"no features are held of {some}{more}", items=tuple(missing.values()))

    def release(self, nbytes: int, spared: Container[Any] = ()) -> int:
        """Keep no longer what was not used for longest, until so many bytes are free or others hold all the rest: how many are.

        ``spared``: contents that stay. Only where there are files, from which they come back.
        """
        if self.files is None:
            return 0
        with self._lock:
            self._settle()
            released, freed = [], 0
            for content in list(self._kept):
                if freed >= nbytes:
                    break
                entry = self._entries.get(content)
                if entry is not None and content not in spared and _references(self._kept, content) <= _ALONE:
                    freed += entry.nbytes
                    released.append(self._kept.pop(content, None))
        del released  # without the lock: whatever is told of their end runs then
        return freed

    def drop(self, item: MediaItem) -> None:
        """Keep the features of ``item`` no longer, if there are any."""
        content = _content(item)
        if self.files is not None:
            self.files.drop(content)
        with self._lock:
            dropped = self._kept.pop(content, None)
        del dropped  # without the lock: whatever is told of its end runs then

    def clear(self) -> None:
        """Keep nothing any longer."""
        with self._lock:
            dropped, self._kept = self._kept, OrderedDict()
        del dropped

    def close(self) -> None:
        """Keep nothing from now on. What others hold is still found; ``put`` raises StoreClosed."""
        self._closed = True
        self.clear()

    def __len__(self) -> int:
        with self._lock:
            self._settle()
            return len(self._entries)

    def __contains__(self, item: object) -> bool:
        content = _content(item)
        with self._lock:
            entry = self._entries.get(content)
            return entry is not None and entry() is not None

    def __repr__(self) -> str:
        return f"<FeatureStore of {len(self)} contents: {self.held_bytes} of {self.budget_bytes} bytes>"

    # The lock is held from here on.

    def _used(self, content: tuple[Any, ...]) -> Features | None:
        """What lives of this content, kept as the last used."""
        while True:
            entry = self._entries.get(content)
            features = None if entry is None else entry()
            if features is None:
                return None
            if self._closed:
                return features
            if self._entries[content] is entry:  # no call until it is kept: nothing newer comes in between
                self._kept[content] = features
                self._kept.move_to_end(content)
                return features

    def _settle(self) -> None:
        """Stop counting what has died."""
        while True:
            if not self._dead:
                return
            entry = self._dead[0]  # no call until the next round: whoever comes in then finds this one done
            self._held -= entry.nbytes
            entry.nbytes = 0
            if entry.content in self._entries and self._entries[entry.content] is entry:
                del self._entries[entry.content]
            del self._dead[0]

    def _room_for(self, item: MediaItem, growth: int, spared: Container[Any]) -> list[Features]:
        """What has to go before ``growth`` more bytes fit, no longer kept. LimitExceeded, with all kept, if that is not enough."""
        while True:
            self._settle()
            held, limit = self._held, self._budget_bytes
            excess = held + growth - limit
            victims = []
            for content in list(self._kept) if excess > 0 else ():
                entry = self._entries.get(content)
                if entry is not None and content not in spared and _references(self._kept, content) <= _ALONE:
                    victims.append(content)
                    excess -= entry.nbytes
                    if excess <= 0:
                        break
            if excess <= 0:
                return [features for content in victims if (features := self._kept.pop(content, None)) is not None]
            self._settle()
            if self._held >= held:  # else what came in between has let go of some
                message = f"{item}: with features that others hold, {limit + excess} bytes; the budget is {limit}"
                raise LimitExceeded(message, value=limit + excess, limit=limit)
