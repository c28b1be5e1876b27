"""Values that stay what they are.

Three tools the rest of the package is frozen with: :func:`seal` makes the slots of a class read-only even for
``object.__setattr__``; :func:`frozen_array` gives an array whose memory belongs to a ``bytes`` object, so that neither
``flags.writeable`` nor a walk along ``.base`` finds anything to write to; :func:`freeze` copies nested metadata into immutable
values. None of them knows anything of sessions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pyrsistent import PMap, pmap

from sessiontree.errors import LimitExceeded, OutOfRange

MAX_METADATA_DEPTH: Final = 64
_INT_LIMITS: Final = (-(2**63), 2**64)  # what msgpack can hold

Setter = Callable[[Any, Any], None]
EMPTY_METADATA: Final[PMap[str, Any]] = pmap()


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
    """A NumPy array of a tensor that knows ``detach().cpu().numpy()`` (PyTorch's), anything else as it is."""
    detach = getattr(value, "detach", None)
    return detach().cpu().numpy() if callable(detach) else value


def frozen_array(values: ArrayLike, dtype: Any = None) -> NDArray[Any]:
    """A read-only C-ordered copy of ``values`` over a ``bytes`` object of its own."""
    array = np.asarray(to_numpy(values), dtype=dtype)
    if array.dtype.hasobject:
        raise TypeError(f"an array of {array.dtype} cannot be frozen")
    return np.ndarray(array.shape, array.dtype, buffer=array.tobytes())


def checked_text(value: Any, what: str) -> str:
    """``value`` if it is text that can be encoded, else TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"{what} is text, not {type(value).__name__}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise TypeError(f"{what} holds a lone surrogate, which is no text") from None
    return str(value)


def freeze_metadata(metadata: Mapping[str, Any] | None) -> PMap[str, Any]:
    """Metadata as a persistent map, copied and frozen to the bottom. None is the empty map."""
    if metadata is None:
        return EMPTY_METADATA
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata is a mapping, not {type(metadata).__name__}")
    frozen: PMap[str, Any] = freeze(metadata, "metadata")
    return frozen


def freeze(value: Any, where: str = "value", depth: int = 0) -> Any:
    """An immutable copy of ``value``: mappings become PMaps, lists tuples, sets frozensets, buffers bytes, arrays frozen arrays.

    Scalars (None, bool, int of at most 64 bits, float, str, bytes) stay. Keys are str or int. Raises TypeError for any other
    type and LimitExceeded beyond 64 levels (a container that holds itself, say), naming the place.
    """
    if value is None or isinstance(value, (bool, float, bytes)):
        return value
    if isinstance(value, str):
        return checked_text(value, where)
    if isinstance(value, int):
        if not _INT_LIMITS[0] <= value < _INT_LIMITS[1]:
            raise OutOfRange(f"{where}: {value} does not fit 64 bits", value=value, limit=_INT_LIMITS)
        return value
    if depth >= MAX_METADATA_DEPTH:
        raise LimitExceeded(f"{where}: nested deeper than {MAX_METADATA_DEPTH}", value=depth, limit=MAX_METADATA_DEPTH)
    value = to_numpy(value)
    if isinstance(value, Mapping):
        items = {}
        for key, entry in value.items():
            name = key if isinstance(key, int) else checked_text(key, f"{where}: a key")
            items[name] = freeze(entry, f"{where}[{key!r}]", depth + 1)
        return pmap(items)
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, np.generic):
        return freeze(value.item(), where, depth + 1)
    if isinstance(value, np.ndarray):
        return frozen_array(value)
    if isinstance(value, (set, frozenset)):
        return frozenset(freeze(entry, where, depth + 1) for entry in value)
    if isinstance(value, Sequence):
        return tuple(freeze(entry, f"{where}[{at}]", depth + 1) for at, entry in zip(itertools.count(), value, strict=False))
    raise TypeError(f"{where}: {type(value).__name__} cannot be frozen; use numbers, text, bytes, arrays, lists and mappings")


def fresh_arrays(value: Any) -> Any:
    """A frozen value with a copy of every array in it; without arrays, the value itself.

    PyTorch writes through read-only arrays, so a stored array is never handed out.
    """
    if isinstance(value, np.ndarray):
        return frozen_array(value)
    if isinstance(value, PMap):
        entries = {key: fresh_arrays(entry) for key, entry in value.items()}
        return pmap(entries) if any(entries[key] is not value[key] for key in entries) else value
    if isinstance(value, tuple):
        items = tuple(map(fresh_arrays, value))
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    return value
