"""Values that stay what they are.

The tools the rest of the package is frozen with: :class:`Sealed` and :func:`seal` make a class whose values are read-only even
for ``object.__setattr__``; :func:`frozen_array` gives an array whose memory belongs to a ``bytes`` object, so that neither
``flags.writeable`` nor a walk along ``.base`` finds anything to write to; :func:`freeze` copies nested metadata into immutable
values, and :func:`handed_out` keeps the stored ones apart from those that callers get. They stand against mistakes and
shortcuts of Python code in the same process (``object.__setattr__``, ``flags.writeable``, a tensor over an array), not against
ctypes or a search through the interpreter. Nothing here knows of sessions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pyrsistent import PMap, pmap

from sessiontree.errors import LimitExceeded, OutOfRange

MAX_DEPTH: Final = 64
_INT_LIMITS: Final = (-(2**63), 2**64)  # what msgpack can hold

Setter = Callable[[Any, Any], None]
EMPTY_METADATA: Final[PMap[str, Any]] = pmap()


def no_subclasses(cls: type) -> None:
    """``__init_subclass__`` of classes whose values must be what they say: an override would be a way in."""
    raise TypeError(f"{cls.__mro__[1].__name__} is final; {cls.__name__} cannot be made of it")


class Sealed:
    """Base of values that are made in ``__new__`` (a second ``__init__`` would be a way in) and then sealed.

    Even the class of a value stays: ``__class__`` is a property without a setter.
    """

    __slots__ = ()

    @property  # type: ignore[misc]  # typeshed gives it a setter
    def __class__(self) -> type:
        return type(self)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable; {name} stays")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable; {name} stays")

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self


def seal(cls: type) -> dict[str, Setter]:
    """Make every slot of ``cls`` read-only for good; returns the only setters that are left, by slot name.

    A slot's descriptor has a getter and a setter, and ``object.__setattr__`` finds the setter however frozen the class says
    it is. Here each descriptor is replaced by a property without one. Reading stays in C (about 30 ns).
    """
    setters: dict[str, Setter] = {}
    for name in cls.__dict__["__slots__"]:
        if name == "__weakref__":
            continue
        member = cls.__dict__[name]
        setters[name] = member.__set__
        setattr(cls, name, property(member.__get__, doc=f"Read-only slot ``{name}``."))
    return setters


def to_numpy(value: Any) -> Any:
    """A NumPy array of a tensor (PyTorch's: what knows ``__array__``, ``detach`` and ``cpu``), anything else as it is.

    Raises TypeError for a tensor whose values cannot be had.
    """
    if not (hasattr(value, "__array__") and hasattr(value, "detach") and hasattr(value, "cpu")):
        return value
    try:
        return value.detach().cpu().numpy()
    except (RuntimeError, NotImplementedError, TypeError) as error:  # TypeError: of a type that NumPy lacks, such as bfloat16
        raise TypeError(f"the values of a {type(value).__name__} cannot be read: {error}") from None


def frozen_array(values: ArrayLike) -> NDArray[Any]:
    """A read-only copy of ``values`` over a ``bytes`` object of its own, in C order and native byte order."""
    try:
        array = np.asarray(to_numpy(values))
    except ValueError as error:
        raise TypeError(f"no array can be made of it: {error}") from None
    if array.dtype.hasobject:
        raise TypeError("an array is of numbers, not of objects such as None")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    data = array.tobytes()
    if len(data) == 1:
        data += b"\0"  # Python has one object for each single byte; this one is to be nobody else's
    return np.ndarray(array.shape, array.dtype, buffer=data)


class _Memory:
    """Lets NumPy write to memory that belongs to ``owner``, once."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, owner: bytes) -> None:
        place = id(owner) + _HEADER_BYTES
        self.__array_interface__ = {"shape": (len(owner),), "typestr": "|u1", "version": 3, "data": (place, False)}
        self.owner = owner

    def array(self) -> NDArray[np.uint8]:
        memory = np.asarray(self)
        del self.__array_interface__  # which takes more than all the rest
        return memory


_SAMPLE: Final = bytes(64)
_HEADER_BYTES: Final[int] = np.frombuffer(_SAMPLE, np.uint8).ctypes.data - id(_SAMPLE)  # of a bytes object, before its bytes


def writable_bytes(size: int) -> tuple[bytes, memoryview]:
    """A new bytes object, zeroed, and the one way to write to it.

    Views of it go out. Over a bytearray, or a memoryview of one, ``.base`` would lead to something that can be written to.
    """
    buffer = bytes(size)
    memory: Any = _Memory(buffer).array()
    return buffer, memoryview(memory)


def frozen_empty(shape: tuple[int, ...], dtype: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """A read-only array of zeros over a ``bytes`` object of its own, and the one array through which it can be written."""
    number = np.dtype(dtype)
    size = math.prod(shape)
    data = bytes(max(size * number.itemsize, 2))  # Python has one object for each single byte
    memory: Any = _Memory(data).array()
    return np.ndarray(shape, number, buffer=data), np.ndarray(shape, number, buffer=memory)


def checked_text(value: Any, what: str) -> str:
    """``value`` if it is text that can be encoded, else TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"{what} is text, not {type(value).__name__}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise TypeError(f"{what} holds a lone surrogate, which is no text") from None
    return str.__str__(value)  # of a subclass, just the text


def freeze_metadata(metadata: Mapping[str, Any] | None) -> PMap[str, Any]:
    """Metadata as a persistent map, copied and frozen to the bottom. None is the empty map."""
    if metadata is None:
        return EMPTY_METADATA
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata is a mapping, not {type(metadata).__name__}")
    frozen: PMap[str, Any] = freeze(metadata, "metadata")
    return frozen


_Place = tuple[Any, Any] | None  # (where the container is, its key or index there)


def freeze(value: Any, what: str = "value") -> Any:
    """An immutable copy of ``value``: mappings become PMaps, lists tuples, sets frozensets, buffers bytes, arrays frozen arrays.

    Scalars (None, bool, int of at most 64 bits, float, str, bytes) stay. Keys are str or int. Raises TypeError for any other
    type and LimitExceeded beyond 64 levels (a container that holds itself, say), naming the place in ``what``.
    """
    return _frozen(value, what, None, 0)


def _where(what: str, place: _Place) -> str:
    keys = []
    while place is not None:
        place, key = place
        keys.append(f"[{key[:40]!r}]" if isinstance(key, str) else f"[{key}]" if type(key) is int and key < 2**64 else "[…]")
    return what + "".join(reversed(keys[-8:]))


def _frozen(value: Any, what: str, place: _Place, depth: int) -> Any:
    if value is None or type(value) is bool:
        return value
    if isinstance(value, str):
        return checked_text(value, _where(what, place)) if type(value) is not str or not value.isascii() else value
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        if not _INT_LIMITS[0] <= number < _INT_LIMITS[1]:
            bits = number.bit_length()
            raise OutOfRange(f"{_where(what, place)}: an integer of {bits} bits; 64 is the limit", value=number, limit=_INT_LIMITS)
        return number
    if depth >= MAX_DEPTH:
        raise LimitExceeded(f"{_where(what, place)}: nested deeper than {MAX_DEPTH}", value=depth, limit=MAX_DEPTH)
    value = to_numpy(value)
    if isinstance(value, Mapping):
        items: dict[Any, Any] = {}
        for key, entry in value.items():
            name = _frozen(key, what, (place, key), depth + 1)
            if type(name) not in (str, int):
                raise TypeError(f"{_where(what, place)}: a key is str or int, not {type(key).__name__}")
            if name in items:
                raise TypeError(f"{_where(what, place)}: two keys are both {name!r}")
            items[name] = _frozen(entry, what, (place, key), depth + 1)
        return pmap(items)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return memoryview(value).tobytes()
    if isinstance(value, np.generic):
        item = value.item()
        if not isinstance(item, np.generic):
            return _frozen(item, what, place, depth + 1)
    if isinstance(value, np.ndarray):
        return frozen_array(value)
    if isinstance(value, (set, frozenset)):
        return frozenset(_frozen(entry, what, place, depth + 1) for entry in value)
    if isinstance(value, Sequence):
        return tuple(_frozen(entry, what, (place, at), depth + 1) for at, entry in enumerate(value))
    raise TypeError(
        f"{_where(what, place)}: {type(value).__name__} cannot be frozen; use numbers, text, bytes, arrays, lists and mappings"
    )


def handed_out(value: Any) -> Any:
    """A frozen value in containers of its own, for callers to keep.

    A PMap is immutable by convention, its slots can be set; PyTorch writes through read-only arrays. So stored ones stay inside.
    """
    if isinstance(value, np.ndarray):
        return frozen_array(value)
    if isinstance(value, PMap):
        # With a size given, pyrsistent makes a map even where it would otherwise share its one empty map.
        return pmap({key: handed_out(entry) for key, entry in value.items()}, pre_size=2 * len(value) + 8)
    if type(value) is tuple:
        return tuple(map(handed_out, value))
    if isinstance(value, frozenset):
        return frozenset(map(handed_out, value))
    return value
