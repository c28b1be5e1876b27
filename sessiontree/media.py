"""Media as sessions keep them: what an item is and where it stands, never its pixels.

A :class:`MediaItem` says which content it is (a 32-byte identity), how it was gridded, and which tokens of its node are its
placeholders. Features live outside nodes, by identity. Items are immutable; spans are declared, never found by scanning ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, Literal, NamedTuple

import attrs
import numpy as np
from pyrsistent import PMap

from sessiontree.digest import ID_BYTES, pack
from sessiontree.errors import LimitExceeded, MediaSpanError, OutOfRange, PositionError, Unsupported
from sessiontree.frozen import (
    EMPTY_METADATA,
    MAX_DEPTH,
    Sealed,
    checked_text,
    freeze,
    freeze_metadata,
    handed_out,
    no_subclasses,
    seal,
    to_numpy,
)
from sessiontree.tokens import as_index, shown

Modality = Literal["image", "video", "audio"]
MODALITIES: Final = ("image", "video", "audio")
MAX_COUNT: Final = 2**31
Span = tuple[int, int]
#: What :meth:`MediaItem.content` holds, in order; the last only where there is any.
CONTENT_FIELDS: Final = (
    "modality",
    "identity",
    "grid_thw",
    "second_per_grid_ts",
    "audio_feature_length",
    "target_sizes",
    "extra",
)


@attrs.frozen(init=False, repr=False)
class MediaItem(Sealed):
    """One image, video or audio, or the part of one that a node holds.

    ``identity``: 32 bytes (:func:`media_identity` makes them).
    ``spans``: (offset, length) pairs relative to the node's first token, one for each contiguous run of placeholders; kept
    sorted by offset. ``grid_thw``: patches along time, height and width, before spatial merging.
    ``second_per_grid_ts``: seconds per temporal grid step of a video. ``audio_feature_length``: frames of audio features.
    ``target_sizes``: (height, width) patches of each crop of a canvas.
    ``placeholders_before``: placeholders of this item that earlier nodes of the path hold; ``unfinished``: later nodes hold more.
    ``extra``: fields of its processor that this library knows no name for, frozen to the bottom. They go wherever the item goes
    and are part of what it is: their types count (1 is not 1.0), the order of keys does not.

    Raises TypeError for wrong types, MediaSpanError for spans that are empty, negative or overlap, PositionError for grids and
    times that cannot be, Unsupported for another modality; for ``extra`` what metadata raise.
    """

    modality: Modality
    identity: bytes
    spans: tuple[Span, ...]
    grid_thw: tuple[int, int, int] | None
    second_per_grid_ts: float | None
    audio_feature_length: int | None
    target_sizes: tuple[Span, ...]
    placeholders_before: int
    unfinished: bool
    _extra: PMap[str, Any] = attrs.field(eq=False)
    _extra_field: tuple[()] | tuple[bytes] = attrs.field(init=False)  # its canonical bytes, by which items are equal and identified

    def __new__(
        cls,
        modality: Modality,
        identity: bytes,
        spans: Iterable[Sequence[int]],
        grid_thw: Sequence[int] | None = None,
        second_per_grid_ts: float | None = None,
        audio_feature_length: int | None = None,
        target_sizes: Iterable[Sequence[int]] = (),
        placeholders_before: int = 0,
        unfinished: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> MediaItem:
        # What most items do not have takes no call.
        kind = modality if type(modality) is str and modality in MODALITIES else _checked_modality(modality)
        digest = identity if type(identity) is bytes and len(identity) == ID_BYTES else _checked_identity(identity)
        self = object.__new__(cls)
        _set_modality(self, kind)
        _set_identity(self, digest)
        _set_spans(self, _checked_spans(kind, digest, spans))
        _set_grid_thw(self, None if grid_thw is None else _checked_grid(grid_thw))
        _set_second_per_grid_ts(self, None if second_per_grid_ts is None else _checked_seconds(second_per_grid_ts))
        _set_audio_feature_length(
            self, None if audio_feature_length is None else _count(audio_feature_length, "audio_feature_length")
        )
        _set_target_sizes(self, _checked_sizes(target_sizes))
        _set_placeholders_before(self, _count(placeholders_before, "placeholders_before"))
        if unfinished is not False and not isinstance(unfinished, (bool, np.bool)):
            raise TypeError(f"unfinished is a bool, not {type(unfinished).__name__}")
        _set_unfinished(self, bool(unfinished))
        frozen = EMPTY_METADATA if extra is None else _frozen_extra(extra)
        _set_extra(self, frozen)
        _set_extra_field(self, (pack(_canonical(frozen)),) if frozen is not EMPTY_METADATA and frozen else ())
        return self

    __init_subclass__ = no_subclasses

    @property
    def num_placeholders(self) -> int:
        """Placeholder tokens that the spans of this node cover."""
        return sum(length for _, length in self.spans)

    @property
    def extra(self) -> PMap[str, Any]:
        """Its processor's other fields; a copy each time."""
        extra: PMap[str, Any] = handed_out(self._extra)
        return extra

    def with_spans(
        self, spans: Iterable[Span], *, placeholders_before: int | None = None, unfinished: bool | None = None
    ) -> MediaItem:
        """The same item standing elsewhere; None keeps what it says of its other parts."""
        moved = MediaItem(
            self.modality,
            self.identity,
            spans,
            self.grid_thw,
            self.second_per_grid_ts,
            self.audio_feature_length,
            self.target_sizes,
            self.placeholders_before if placeholders_before is None else placeholders_before,
            self.unfinished if unfinished is None else unfinished,
        )
        _SET["_extra"](moved, self._extra)  # shared, not frozen again: it may hold large arrays
        _SET["_extra_field"](moved, self._extra_field)
        return moved

    def fields(self) -> tuple[Any, ...]:
        """What determines the item, packable and in a fixed order: the part of a node's identity that comes from it.

        Nine fields, and ``extra`` in its canonical bytes only where there is any: items without have the ids they always had.
        """
        return (
            self.modality,
            self.identity,
            self.spans,
            self.grid_thw,
            self.second_per_grid_ts,
            self.audio_feature_length,
            self.target_sizes,
            self.placeholders_before,
            self.unfinished,
            *self._extra_field,
        )

    def content(self) -> tuple[Any, ...]:
        """All that describes it, wherever it stands, packable: what its features are kept by, and what its parts agree in.

        :data:`CONTENT_FIELDS` in order, without the last where ``extra`` is empty.
        """
        return (
            self.modality,
            self.identity,
            self.grid_thw,
            self.second_per_grid_ts,
            self.audio_feature_length,
            self.target_sizes,
            *self._extra_field,
        )

    def __str__(self) -> str:
        return f"{self.modality} {self.identity[:4].hex()}"

    def __repr__(self) -> str:
        given = [f"{self.modality!r}", f"{self.identity[:4].hex()}…", f"spans={list(self.spans)}"]
        given += [f"{name}={value}" for name in _OPTIONAL if (value := getattr(self, name))]
        given += [f"extra={dict(self._extra)}"] if self._extra else []
        return f"MediaItem({', '.join(given)})"

    def __reduce__(self) -> tuple[type[MediaItem], tuple[Any, ...]]:
        return MediaItem, (*self.fields()[:9], self.extra)


_SET = seal(MediaItem)
_set_modality = _SET["modality"]
_set_identity = _SET["identity"]
_set_spans = _SET["spans"]
_set_grid_thw = _SET["grid_thw"]
_set_second_per_grid_ts = _SET["second_per_grid_ts"]
_set_audio_feature_length = _SET["audio_feature_length"]
_set_target_sizes = _SET["target_sizes"]
_set_placeholders_before = _SET["placeholders_before"]
_set_unfinished = _SET["unfinished"]
_set_extra = _SET["_extra"]
_set_extra_field = _SET["_extra_field"]
_OPTIONAL: Final = (
    "grid_thw",
    "second_per_grid_ts",
    "audio_feature_length",
    "target_sizes",
    "placeholders_before",
    "unfinished",
)


class Placement(NamedTuple):
    """One span of one item, in the coordinates of its node: tokens ``[start, stop)``."""

    start: int
    stop: int
    item: MediaItem


def placements(media: Iterable[MediaItem], num_tokens: int) -> list[Placement]:
    """Every span of ``media`` in token order.

    Raises TypeError for what is not a MediaItem, MediaSpanError naming the item whose span is missing, reaches past
    ``num_tokens`` or overlaps another.
    """
    placed = []
    for item in media:
        if not isinstance(item, MediaItem):
            raise TypeError(f"media are MediaItems, not {type(item).__name__}")
        if not item.spans:
            raise MediaSpanError(f"{item} has no span", item=item, span=None)
        placed += [Placement(offset, offset + length, item) for offset, length in item.spans]
    if len(placed) > 1:
        placed.sort(key=lambda placement: placement.start)
    end = 0
    for start, stop, item in placed:
        if start < end:
            raise MediaSpanError(f"{item}: span [{start}, {stop}) overlaps the one before", item=item, span=(start, stop))
        end = stop
        if stop > num_tokens:
            raise MediaSpanError(
                f"{item}: span [{start}, {stop}) reaches past the {num_tokens} tokens of its node",
                item=item,
                span=(start, stop),
            )
    return placed


def in_token_order(media: Iterable[MediaItem]) -> tuple[MediaItem, ...]:
    """Items by their first span: the one order a node keeps them in."""
    items = tuple(media)
    return items if len(items) < 2 else tuple(sorted(items, key=lambda item: item.spans[0][0]))


def each_content_once(items: Iterable[MediaItem]) -> tuple[MediaItem, ...]:
    """The first of each content, in order."""
    found: dict[tuple[Any, ...], MediaItem] = {}
    for item in items:
        found.setdefault(item.content(), item)
    return tuple(found.values())


def media_identity(kind: str, data: Any, *, options: Mapping[str, Any] | None = None) -> bytes:
    """The 32-byte identity of some content.

    ``kind``: what it is ("image", "video pixels", ...). ``data``: bytes, an array or tensor, a picture, or a list of them
    (nested lists keep their boundaries). ``options``: the processor's options that shaped it. Type, shape, dtype and length of
    every piece are part of the identity, so equal bytes of another shape are other content. Where a processor has cut pictures
    into rows of patches (Qwen's ``pixel_values``), these no longer say how high and wide one is: give its grid in ``options``.

    A picture is what has the ``mode``, ``size``, ``tobytes()`` and ``getpalette()`` of a Pillow image. Its mode, size, pixels,
    palette, transparency and EXIF orientation (image loaders turn by it) count; of an animation, those of the frame it stands at.
    The rest of what its file says does not.
    """
    kind = checked_text(kind, "kind")
    digest = sha256(b"sessiontree media\0" + pack([kind, _canonical(freeze_metadata(options))]))
    _feed(digest, data, 0)
    return digest.digest()


def _feed(digest: Any, data: Any, depth: int) -> None:
    data = to_numpy(data)
    if isinstance(data, (bytes, bytearray, memoryview)):
        raw = bytes(data)
        digest.update(pack(["bytes", len(raw)]))
        digest.update(raw)
    elif isinstance(data, np.ndarray) and not data.dtype.hasobject:
        digest.update(pack(["array", _dtype_name(data.dtype), data.shape]))
        digest.update(data.tobytes())
    elif isinstance(data, (list, tuple)):
        if depth >= MAX_DEPTH:
            raise LimitExceeded(f"media content nested deeper than {MAX_DEPTH}", value=depth, limit=MAX_DEPTH)
        digest.update(pack(["list", len(data)]))
        for piece in data:
            _feed(digest, piece, depth + 1)
    elif data is None or isinstance(data, (bool, int, float, str)):
        data = freeze(data, "media content")
        digest.update(pack(["scalar", type(data).__name__, data]))
    elif all(hasattr(data, name) for name in ("mode", "size", "tobytes", "getpalette")):
        raw = data.tobytes()  # first: it loads the picture, which can change all the rest
        digest.update(pack(["picture", _canonical(freeze(_looks(data), "picture")), len(raw)]))
        digest.update(raw)
    else:
        raise TypeError(f"media content is bytes, arrays, pictures, or lists of them, not {type(data).__name__}")


def _looks(picture: Any) -> list[Any]:
    """All but its pixels that says how a picture looks."""
    palette_mode = getattr(getattr(picture, "palette", None), "mode", None)
    transparency = getattr(picture, "info", {}).get("transparency")
    try:
        orientation = picture.getexif().get(0x0112, 1)
    except Exception:  # no EXIF, or none that can be read: then nobody turns the picture by it either
        orientation = 1
    return [picture.mode, picture.size, palette_mode, picture.getpalette(None), transparency, orientation]


def _canonical(value: Any) -> Any:
    """A frozen value as packable lists, mappings sorted and types told apart."""
    if isinstance(value, Mapping):
        pairs = [[key, _canonical(entry)] for key, entry in value.items()]
        return ["map", sorted(pairs, key=lambda pair: pack(pair[0]))]
    if isinstance(value, tuple):
        return ["list", [_canonical(entry) for entry in value]]
    if isinstance(value, frozenset):
        return ["set", sorted((_canonical(entry) for entry in value), key=pack)]
    if isinstance(value, np.ndarray):
        return ["array", _dtype_name(value.dtype), list(value.shape), value.tobytes()]
    return value


def _dtype_name(dtype: np.dtype[Any]) -> str:
    """``dtype.str``, which of records and of types that NumPy has from elsewhere (float8) says only the size; of those, more."""
    if dtype.kind != "V":
        return dtype.str
    return str(np.lib.format.dtype_to_descr(dtype)) if dtype.type is np.void else f"{dtype.str} {dtype.name}"


def _checked_modality(modality: Any) -> str:
    kind = checked_text(modality, "modality")
    if kind not in MODALITIES:
        raise Unsupported(f"modality {kind!r}; known are {', '.join(MODALITIES)}", modality=kind)
    return kind


def _checked_identity(identity: Any) -> bytes:
    if not isinstance(identity, (bytes, bytearray)):
        raise TypeError(f"an identity is {ID_BYTES} bytes, not {type(identity).__name__}")
    digest = memoryview(identity).tobytes()
    if len(digest) != ID_BYTES:
        raise OutOfRange(f"an identity has {ID_BYTES} bytes, not {len(digest)}", value=len(digest), limit=ID_BYTES)
    return digest


def _frozen_extra(extra: Any) -> PMap[str, Any]:
    if not isinstance(extra, Mapping):
        raise TypeError(f"extra is a mapping, not {type(extra).__name__}")
    frozen: PMap[str, Any] = freeze(extra, "extra")
    return frozen


def _rows(values: Any) -> Any:
    if type(values) is list or type(values) is tuple:
        return values
    values = to_numpy(values)
    return values.tolist() if isinstance(values, np.ndarray) else values


def _pair(values: Any, what: str) -> Span:
    try:
        first, second = _rows(values)
    except (TypeError, ValueError):
        raise TypeError(f"{what} are pairs of ints; this is a {type(values).__name__}") from None
    return as_index(first, what), as_index(second, what)


def _checked_spans(modality: str, identity: bytes, spans: Any) -> tuple[Span, ...]:
    pairs = sorted([_pair(span, "spans") for span in _rows(spans)])
    end = 0
    for offset, length in pairs:
        if offset < end or length < 1 or offset + length > MAX_COUNT:
            name = f"{modality} {identity[:4].hex()}"
            no_run = offset < 0 or length < 1 or offset + length > MAX_COUNT
            why = "is no run of tokens" if no_run else "overlaps its own"
            where = f"(offset {shown(offset)}, length {shown(length)})"
            raise MediaSpanError(f"{name}: span {where} {why}", item=name, span=(offset, length))
        end = offset + length
    return tuple(pairs)


def _checked_sizes(sizes: Any) -> tuple[Span, ...]:
    if type(sizes) is tuple and not sizes:
        return ()
    pairs = (_pair(size, "target_sizes") for size in _rows(sizes))
    return tuple((_count(height, "target_sizes"), _count(width, "target_sizes")) for height, width in pairs)


def _checked_grid(grid_thw: Any) -> tuple[int, int, int]:
    grid = tuple([as_index(size, "grid_thw") for size in _rows(grid_thw)])
    if len(grid) != 3 or min(grid) < 1 or max(grid) >= MAX_COUNT:
        raise PositionError(f"grid_thw is three sizes of 1 to {MAX_COUNT - 1}, not {', '.join(map(shown, grid))}", grid_thw=grid)
    return grid


def _checked_seconds(seconds: Any) -> float:
    seconds = to_numpy(seconds)
    if isinstance(seconds, (str, bytes, bytearray, bool)):
        raise TypeError(f"second_per_grid_ts is a number, not {type(seconds).__name__}")
    try:
        value = float(seconds)
    except OverflowError:
        value = math.inf
    except ValueError as error:
        raise TypeError(f"second_per_grid_ts is a number: {error}") from None
    if not (math.isfinite(value) and value >= 0):
        raise PositionError(f"second_per_grid_ts is {value}, not a time", value=value)
    return value + 0.0  # no negative zero: equal items, equal bytes


def _count(value: Any, what: str) -> int:
    count = as_index(value, what)
    if not 0 <= count < MAX_COUNT:
        raise OutOfRange(f"{what} is {shown(count)}, outside 0..{MAX_COUNT - 1}", value=count, limit=MAX_COUNT)
    return count
