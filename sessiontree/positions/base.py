"""What a position scheme is: the rule of one model family under one engine, and the state it carries along a path.

A scheme turns new tokens and their media into position runs and the state after them, in time proportional to what is new.
It reads spans and grids; of token ids only those a family needs as delimiters. Positions "as replayed" are those a whole-history
prefill gives; "as decoded" are those a generated token had when it was made: its index plus the delta before it. The two
differ only where a block's greatest position is not the one that text continues from.

A block is a contiguous run of placeholders: a whole item, or a frame of one in the families that part frames by text. Everything
about turns, parts and limits is here. Subclasses say what a block is: how many tokens it has (:meth:`~PositionScheme.merged_grid`),
where they stand (:meth:`~PositionScheme.block_runs`) and what follows it (:meth:`~PositionScheme.end_block`).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, NamedTuple

import attrs
import numpy as np
from numpy.typing import ArrayLike, NDArray
from pyrsistent import PMap, pmap

from sessiontree.errors import MediaSpanError, PositionError, PositionLimitExceeded, Unsupported
from sessiontree.frozen import Sealed, checked_text, frozen_array, no_subclasses, seal
from sessiontree.media import CONTENT_FIELDS, MediaItem, Placement, placements
from sessiontree.positions.runs import ExternalRun, Piece, Runs, TextRun, grid_run, image_runs, packed, write
from sessiontree.tokens import TOKEN_BYTES, Position, TokenIds, as_index, shown, token_bytes

RULES: Final = ("hf5", "sglang", "vllm")
Mode = Literal["as_decoded", "as_replayed"]
MODES: Final = ("as_decoded", "as_replayed")
DEFAULT_POSITION_LIMIT: Final = 2**24


class OpenBlock(NamedTuple):
    """An item of which a path holds only a part.

    ``content``: the item's :meth:`~sessiontree.media.MediaItem.content`, which the rest of it has to repeat. ``base``: where the
    block that it stopped inside begins; None between blocks. ``placeholders``: how many stand so far.
    """

    content: tuple[Any, ...]
    base: int | float | None
    placeholders: int


class PositionState(NamedTuple):
    """All that positions after a path depend on.

    ``next_position``: where the next prefilled text token stands; ``max_position``: the greatest position so far on any axis
    (-1 before the first); the two differ after a video under the hf5 rule. ``open_blocks``: items still to be completed, in the
    order they began. ``carried``: numbers that only some families need; each says which in its docstring.
    """

    num_tokens: int
    next_position: int | float
    max_position: int | float
    open_blocks: tuple[OpenBlock, ...] = ()
    carried: tuple[Any, ...] = ()

    @property
    def open_block(self) -> OpenBlock | None:
        """The item to be completed that began last."""
        return self.open_blocks[-1] if self.open_blocks else None


class Cursor:
    """Where planning a turn has come to: the runs so far, and what will be the state after them."""

    __slots__ = ("carried", "max_position", "next_position", "num_tokens", "open_blocks", "runs")

    num_tokens: int
    next_position: int | float
    max_position: int | float
    open_blocks: list[OpenBlock]
    carried: tuple[Any, ...]

    def __init__(self, state: PositionState) -> None:
        self.num_tokens, self.next_position, self.max_position, open_blocks, self.carried = state
        self.open_blocks = list(open_blocks)
        self.runs: list[Any] = []

    def add(self, run: Any, greatest: int | float) -> None:
        self.runs.append(run)
        self.num_tokens += run.length
        self.max_position = max(self.max_position, greatest)

    def state(self) -> PositionState:
        return _state((self.num_tokens, self.next_position, self.max_position, tuple(self.open_blocks), self.carried))


@attrs.frozen(init=False, eq=False, repr=False)
class ExternalPositions(Sealed):
    """Positions of one turn that came from elsewhere (a pruned video, a model that no scheme covers).

    ``positions``: (num_axes, T), one column for each token of the turn, of the scheme's kind of number. ``next_position``: where
    text continues, by default one past the table's greatest entry. ``max_position``: the greatest position of the path, by
    default the greater of the path's and the table's.
    """

    _table: NDArray[Any]
    next_position: int | float | None
    max_position: int | float | None

    __init_subclass__ = no_subclasses

    def __new__(
        cls, positions: ArrayLike, next_position: int | float | None = None, max_position: int | float | None = None
    ) -> ExternalPositions:
        self = object.__new__(cls)
        _SET_EXTERNAL["_table"](self, frozen_array(positions))
        _SET_EXTERNAL["next_position"](self, _optional_position(next_position, "next_position"))
        _SET_EXTERNAL["max_position"](self, _optional_position(max_position, "max_position"))
        return self

    @property
    def positions(self) -> NDArray[Any]:
        """The table, as a read-only copy."""
        return frozen_array(self._table)

    def __repr__(self) -> str:
        return f"ExternalPositions{self._table.shape}"

    def __reduce__(self) -> Any:
        return ExternalPositions, (self.positions, self.next_position, self.max_position)


def _optional_position(value: Any, what: str) -> int | float | None:
    if isinstance(value, (bool, np.bool)):
        raise TypeError(f"{what} is a position, not a bool")
    if value is None:
        return None
    if isinstance(value, (float, np.floating)):
        if not math.isfinite(value):
            raise PositionError(f"{what} is {value}, no position", value=float(value))
        return float(value)
    number = int.__index__(operator.index(value))
    if not -(2**63) <= number < 2**63:
        raise PositionError(f"{what} is {shown(number)}, no position", value=number, limit=2**63)
    return number


_SET_EXTERNAL = seal(ExternalPositions)


# As PositionState(...), without a Python call.
_state = partial(tuple.__new__, PositionState)


class PositionScheme(Sealed):
    """A family's rule with its parameters, such as ``qwen2_5_vl@sglang``. Immutable; equal by name and parameters.

    ``name``: ``family@rule``. ``num_axes``: rows of a position table. ``dtype``: NumPy dtype of positions. Name
    and parameters are part of every root's id.
    """

    family: ClassVar[str] = ""
    rules: ClassVar[tuple[str, ...]] = RULES  # those the family has
    dtype: ClassVar[np.dtype[Any]] = np.dtype(np.int64)
    defaults: ClassVar[Mapping[str, Any]] = {}  # the parameters a family knows; None: not set
    per_frame: ClassVar[bool] = False  # whether each frame of a video is a block, with a span of its own
    carries: ClassVar[tuple[int, ...]] = (0,)  # how many numbers a state carries
    floats: ClassVar[bool] = False  # whether positions are computed in float32, whatever they are given out as
    usual_delta: ClassVar[bool] = True  # whether the delta is max_position + 1 - num_tokens
    _usual_blocks: ClassVar[bool] = True  # whether text and blocks stand as this class places them

    __slots__ = ("_params", "max_position_limit", "name", "rule")

    name: str
    rule: str
    _params: Mapping[str, Any]
    max_position_limit: int

    def __init_subclass__(cls) -> None:
        cls._usual_blocks = all(getattr(cls, name) is getattr(PositionScheme, name) for name in _PLACING)

    def __new__(cls, rule: str, params: Mapping[str, Any]) -> PositionScheme:
        if rule not in cls.rules:
            raise Unsupported(f"{cls.family} has no positions under {rule}, only under {', '.join(cls.rules)}", scheme=rule)
        self = object.__new__(cls)
        known = {**self.defaults, "max_position_limit": DEFAULT_POSITION_LIMIT}
        for key, value in params.items():
            if key not in known:
                raise PositionError(f"{self.family} has no parameter {key!r}; it has {', '.join(sorted(known))}", parameter=key)
            if value is not None:
                known[key] = _checked(key, value)
        put = _SET_SCHEME
        put["rule"](self, rule)
        put["name"](self, f"{self.family}@{rule}")
        put["_params"](self, MappingProxyType({key: value for key, value in known.items() if value is not None}))
        put["max_position_limit"](self, known["max_position_limit"])
        return self

    @property
    def num_axes(self) -> int:
        """Rows of a position table."""
        return 3

    @property
    def params(self) -> PMap[str, Any]:
        """The parameters given, with defaults filled in; those that were not given and have no default are absent."""
        return pmap(self._params)

    def __reduce__(self) -> Any:
        return type(self), (self.rule, dict(self._params))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PositionScheme):
            return NotImplemented
        return self.name == other.name and self._params == other._params

    def __hash__(self) -> int:
        return hash((self.name, frozenset(self._params.items())))

    def __repr__(self) -> str:
        given = "".join(f", {key}={self._params[key]}" for key in sorted(self._params))
        return f"scheme({self.name!r}{given})"

    # What callers use

    def initial_state(self) -> PositionState:
        """The state before the first token."""
        return PositionState(0, 0, -1)

    def extend(
        self, state: PositionState, token_ids: TokenIds, media: Sequence[MediaItem] = ()
    ) -> tuple[NDArray[Any], PositionState]:
        """Positions of new tokens as a prefill gives them: ((num_axes, T) read-only, the state after them).

        Spans of ``media`` are relative to ``token_ids``. Raises MediaSpanError, PositionError, PositionLimitExceeded, Unsupported.
        """
        self.check_state(state)
        data = token_bytes(token_ids)
        runs, after = self.plan(state, data, media)
        return self.written(runs, len(data) // TOKEN_BYTES), after

    def decode(self, state: PositionState, token_ids: TokenIds) -> tuple[NDArray[Any], PositionState]:
        """Positions of generated tokens as they were decoded: index + delta on every axis; and the state after them."""
        self.check_state(state)
        count = len(token_bytes(token_ids)) // TOKEN_BYTES
        runs, after = self.plan_decode(state, count)
        return self.written(runs, count), after

    def check_state(self, state: PositionState) -> None:
        """Whether a state can be this scheme's. Raises TypeError, PositionError."""
        if type(state) is not PositionState:
            raise TypeError(f"a state is a PositionState, not {type(state).__name__}")
        if isinstance(state.next_position, float) != self.floats or len(state.carried) not in self.carries:
            raise PositionError(f"{state} is no state of {self.name}", value=state)

    def decode_positions(self, state: PositionState, target_grids: Sequence[Sequence[int]] = ()) -> NDArray[Any]:
        """The plan of positions an image-generating family decodes by."""
        raise Unsupported(f"{self.name} decodes at index + delta; only image-generating families have a plan", scheme=self.name)

    def mrope_position_delta(self, state: PositionState) -> int | float:
        """max_position + 1 - num_tokens: what a decoded token's index lacks to its position."""
        return state.max_position + 1 - state.num_tokens

    def next_position(self, state: PositionState) -> Position | float:
        """Where the next prefilled text token stands."""
        at = state.next_position
        return at if isinstance(at, float) else Position(at)

    def num_placeholders(self, item: MediaItem) -> int:
        """Placeholders of the whole of ``item``, however many of them a node holds. Raises Unsupported or PositionError."""
        return math.prod(self.merged_grid(item))

    def num_spans(self, item: MediaItem) -> int:
        """Contiguous runs of placeholders of the whole of ``item``, each a span of its own."""
        return self.merged_grid(item)[0] if self.per_frame else 1

    # What nodes use: runs instead of tables, token bytes instead of arrays

    def plan(self, state: PositionState, data: bytes, media: Sequence[MediaItem] = ()) -> tuple[Runs, PositionState]:
        """Position runs of a prefilled turn and the state after it."""
        count = len(data) // TOKEN_BYTES
        before, base, top, open_blocks, carried = state
        if media or open_blocks or carried:
            if self._usual_blocks and len(media) == 1 and not (open_blocks or carried):
                planned = self._plan_image(state, count, media[0])
                if planned is not None:
                    return planned
            return self._plan_blocks(state, data, placements(media, count))
        if not count:
            return int(base), state
        stop, after = before + count, base + count
        if after > self.max_position_limit:
            self._check_limit(after - 1)
        if after == stop:
            after = stop  # the same object: that is one int less to keep
        return int(base), _state((stop, after, after - 1 if after > top else top, (), ()))

    def plan_decode(self, state: PositionState, count: int) -> tuple[Runs, PositionState]:
        """Position runs of ``count`` generated tokens and the state after them."""
        before, following, top, open_blocks, _ = state
        if open_blocks:
            _refuse_inside(open_blocks[-1], "nothing can be generated")
        if not count:
            return int(following), state
        stop, base = before + count, int(top) + 1
        if following.__class__ is int and following == base:
            base = following  # the same object, as above
        after = base + count
        if after > self.max_position_limit:
            self._check_limit(after - 1)
        if after == stop:
            after = stop
        return base, _state((stop, after, after - 1, (), self.carried_behind(state, ())))

    def plan_table(
        self, state: PositionState, count: int, external: ExternalPositions, media: Sequence[MediaItem] = ()
    ) -> tuple[Runs, PositionState]:
        """A run of a table that came from elsewhere, checked, and the state after it.

        The items must be whole; how many placeholders they have is the table's business, not their grid's. A ``max_position``
        that comes with it never lowers the path's own.
        """
        for start, stop, item in placements(media, count):
            if item.unfinished or item.placeholders_before:
                raise MediaSpanError(
                    f"{item}: span [{start}, {stop}) is a part; under an external table items are whole",
                    item=item,
                    span=(start, stop),
                )
        table = external._table
        if state.open_block is not None:
            _refuse_inside(state.open_block, "an external table cannot continue it")
        if table.shape != (self.num_axes, count):
            raise PositionError(
                f"an external table for {count} tokens has shape ({self.num_axes}, {count}), not {table.shape}; "
                "columns of tokens to come have no place in it",
                value=table.shape,
                limit=(self.num_axes, count),
            )
        if table.dtype.kind not in "iuf" or (not self.floats and table.dtype.kind == "f"):
            raise PositionError(f"an external table of {table.dtype} is no table of {self.dtype}", dtype=str(table.dtype))
        after, top = external.next_position, external.max_position
        if not self.floats and (isinstance(after, float) or isinstance(top, float)):
            raise TypeError(f"positions of {self.name} are whole numbers, not {top!r} and {after!r}")
        if not count:
            if after is not None or top is not None:
                raise PositionError("an empty turn has no positions, so nothing comes after them", value=after)
            return int(state.next_position), state
        least, greatest = table.min(), table.max()
        if not (least >= 0 and np.isfinite(greatest)):
            raise PositionError(f"an external table holds the position {least if greatest >= 0 else greatest}", value=least)
        self._check_limit(float(greatest))
        for position in (after, top):
            if position is not None:
                self._check_limit(position - 1)
        table = table.astype(np.float32 if self.floats else np.int64) + 0  # -0.0 is 0.0
        last = table.max().item()
        top = last if top is None else self._number(top)
        after = self._number(last + 1) if after is None else self._number(after)
        if top < last or after < 0:
            raise PositionError(
                f"max_position {top} and next_position {after} cannot follow positions up to {last}",
                value=(top, after),
                limit=last,
            )
        top = max(top, state.max_position)
        self._check_limit(max(top, after - 1))
        run = ExternalRun(count, table.dtype.str, table.tobytes())
        return packed([run]), PositionState(state.num_tokens + count, after, top, (), self.carried_behind(state, media, after))

    # What families define

    def merged_grid(self, item: MediaItem) -> tuple[int, int, int]:
        """Frames, rows and columns of placeholders in the whole of ``item``. Raises Unsupported or PositionError."""
        raise Unsupported(f"{self.name} has no media, {item} cannot be placed", item=item)

    def frame_times(self, item: MediaItem, first: int, stop: int) -> Sequence[int]:
        """Positions of frames ``[first, stop)`` of ``item`` along time, from its base; never falling."""
        return range(first, stop)

    def advance(self, last_time: int, height: int, width: int) -> int:
        """How far from a block's base the text after it stands; ``last_time`` is that of its last frame."""
        return max(last_time + 1, height, width)

    def text(self, cursor: Cursor, data: bytes, item: MediaItem | None = None) -> None:
        """Place the tokens of a stretch that no span covers. ``item``: whose span follows; None where the turn ends."""
        count = len(data) // TOKEN_BYTES
        base = cursor.next_position
        cursor.add(TextRun(count, int(base)), base + count - 1)
        cursor.next_position = base + count

    def begin_block(self, cursor: Cursor, item: MediaItem) -> int | float:
        """The position of a block's first token."""
        return cursor.next_position

    def block_runs(self, cursor: Cursor, item: MediaItem, base: Any, first: int, stop: int) -> Sequence[Any]:
        """Runs of placeholders ``[first, stop)`` of a block that begins at ``base``."""
        _, height, width = self.merged_grid(item)
        size = height * width
        frame = first // size
        times = self.frame_times(item, frame, -(-stop // size))
        self._check_limit(base + times[-1])
        return (grid_run(base, frame, times, height, width, first, stop),)

    def greatest(self, run: Any) -> int | float:
        """The greatest position of a block's run, on any axis."""
        greatest: int | float = run.greatest()
        return greatest

    def end_block(self, cursor: Cursor, item: MediaItem, base: Any) -> None:
        """Say where text continues behind a whole block that began at ``base``; its last run is the cursor's."""
        frames, height, width = self.merged_grid(item)
        last = 0 if self.per_frame else self.frame_times(item, frames - 1, frames)[-1]
        cursor.next_position = base + self.advance(last, height, width)

    def carried_behind(self, state: PositionState, media: Sequence[MediaItem], after: Any = None) -> tuple[Any, ...]:
        """What is carried behind tokens that the rule did not place: generated ones, or those of an external table."""
        return state.carried

    def compact(self, runs: list[Any]) -> Runs:
        """Runs as a node keeps them."""
        return packed(runs)

    def decode_room(self, state: PositionState) -> int | None:
        """How many tokens can be generated there; None: any number."""
        return None

    def atomic_span(self, item: MediaItem) -> tuple[int, int] | None:
        """Tokens of its node ``[start, stop)`` that no cut may part, where those are more than its spans."""
        return None

    def written(self, runs: Runs, count: int) -> NDArray[Any]:
        """The table of a turn of ``count`` tokens."""
        out = np.empty((self.num_axes, count), self.dtype)
        write([Piece(0, runs, 0, count)], out)
        return frozen_array(out)

    # Turns, parts and limits

    def _number(self, position: Any) -> int | float:
        return float(np.float32(position)) + 0.0 if self.floats else int(position)

    def _parameter(self, name: str, item: MediaItem, why: str) -> Any:
        value = self._params.get(name)
        if value is None:
            raise PositionError(f"{item}: {self.name} was not given {name}, which {why} need", item=item, parameter=name)
        return value

    def _check_limit(self, position: Any) -> None:
        if not position < self.max_position_limit:
            at = shown(position) if isinstance(position, int) else position
            raise PositionLimitExceeded(
                f"position {at} is not below {self.name}'s max_position_limit of {self.max_position_limit}",
                value=position,
                limit=self.max_position_limit,
            )

    def _plan_image(self, state: PositionState, count: int, item: MediaItem) -> tuple[Runs, PositionState] | None:
        """As :meth:`_plan_blocks`, where all media of a turn are one whole image, as most often; None where that is not plain."""
        if type(item) is not MediaItem or item.modality != "image" or item.placeholders_before or item.unfinished:
            return None
        spans = item.spans
        if len(spans) != 1:
            return None
        start, length = spans[0]
        stop = start + length
        if stop > count:
            return None
        frames, height, width = self.merged_grid(item)
        if frames != 1 or length != height * width:
            return None
        before, base, top = state.num_tokens, int(state.next_position), state.max_position
        corner = base + start
        behind = corner + self.advance(0, height, width)
        after = behind + count - stop
        top = max(top, corner + max(height, width) - 1, after - 1 if stop < count else 0)
        if not max(top, after - 1) < self.max_position_limit:
            return None
        return image_runs(base, start, height, width, behind, count - stop), _state((before + count, after, top, (), ()))

    def _plan_blocks(self, state: PositionState, data: bytes, placed: list[Placement]) -> tuple[Runs, PositionState]:
        count = len(data) // TOKEN_BYTES
        if state.open_blocks and count:
            inside = next((block for block in state.open_blocks if block.base is not None), None)
            if inside is not None:
                if not placed or placed[0].start:
                    _refuse_inside(inside, "other tokens cannot stand before the rest of it")
                _check_continues(inside, placed[0].item)
        cursor = Cursor(state)
        begun: dict[int, _Part] = {}
        at = 0
        for start, stop, item in placed:
            if start > at:
                self.text(cursor, data[at * TOKEN_BYTES : start * TOKEN_BYTES], item)
            part = begun.get(id(item))
            if part is None:
                part = begun[id(item)] = self._begun(cursor, item, (start, stop))
            elif not self.per_frame:
                raise MediaSpanError(
                    f"{item}: a {item.modality} of {self.name} is one contiguous block, not several spans",
                    item=item,
                    span=(start, stop),
                )
            self._place(cursor, part, start, stop, count)
            at = stop
        if at < count:
            self.text(cursor, data[at * TOKEN_BYTES :])
        for part in begun.values():
            if part.item.unfinished:
                cursor.open_blocks.append(OpenBlock(part.item.content(), part.base, part.placeholders))
        self._check_limit(max(cursor.max_position, cursor.next_position - 1))
        return self.compact(cursor.runs), cursor.state()

    def _begun(self, cursor: Cursor, item: MediaItem, span: tuple[int, int]) -> _Part:
        """``item`` as far as the path holds it already."""
        total = self.num_placeholders(item)
        if total < 1:
            raise PositionError(f"{item} has no placeholders under {self.name}", item=item)
        if self.per_frame:
            _, height, width = self.merged_grid(item)
            part = _Part(item, total, height * width)
        else:
            part = _Part(item, total, total)
        if not item.placeholders_before:
            return part
        content = item.content()
        for number, (known, base, placeholders) in enumerate(cursor.open_blocks):
            if known == content and placeholders == item.placeholders_before:
                del cursor.open_blocks[number]
                part.base, part.placeholders = base, placeholders
                return part
        if cursor.open_blocks:
            of_same = (block for block in cursor.open_blocks if block.content[1] == item.identity)
            _check_continues(next(of_same, cursor.open_blocks[-1]), item)
        raise MediaSpanError(
            f"{item}: span [{span[0]}, {span[1]}) says that {item.placeholders_before} placeholders stand before it; "
            "the path holds no such part",
            item=item,
            span=span,
        )

    def _place(self, cursor: Cursor, part: _Part, start: int, stop: int, count: int) -> None:
        """Place one span, all of it in one block."""
        item, span = part.item, (start, stop)
        last = part.placeholders + stop - start
        first = part.placeholders % part.block
        end = first + stop - start
        if end > part.block and last <= part.total:
            raise MediaSpanError(
                f"{item}: span [{start}, {stop}) goes on into the next frame; a frame of {self.name} has {part.block} placeholders "
                "and a span of its own",
                item=item,
                span=span,
                limit=part.block,
            )
        if last != part.total or item.unfinished:
            is_last = (start, stop - start) == item.spans[-1]
            _check_count(item, span, last, part.total, count, is_last=is_last, whole_block=end == part.block)
        base = part.base if first else self.begin_block(cursor, item)
        for run in self.block_runs(cursor, item, base, first, end):
            cursor.add(run, self.greatest(run))
        part.placeholders = last
        part.base = base
        if end == part.block:
            part.base = None
            self.end_block(cursor, item, base)


class _Part:
    """An item while its turn is planned. ``block``: placeholders of one of its blocks; ``base``: of the one that is begun."""

    __slots__ = ("base", "block", "item", "placeholders", "total")

    def __init__(self, item: MediaItem, total: int, block: int) -> None:
        self.item = item
        self.total = total
        self.block = block
        self.placeholders = 0
        self.base: Any = None


def _checked(key: str, value: Any) -> int | float | str | None:
    """A parameter's value; None for hints at how a rule computes, which the rule knows."""
    if key in ("time", "downsample_mode"):
        text = checked_text(value, f"parameter {key}")
        if key == "time":
            return None
        if text not in ("4x", "16x"):
            raise PositionError(f"parameter {key} is {text!r}, known are '4x' and '16x'", parameter=key, value=text)
        return text
    if key in ("split_frames", "wrapped"):
        if not isinstance(value, (bool, np.bool)):
            raise TypeError(f"parameter {key} is a bool, not {type(value).__name__}")
        if key == "wrapped":
            return bool(value)
        if not value:
            raise Unsupported("videos of this family are split into frames with text between them", parameter=key)
        return None
    number: int | float
    if isinstance(value, float) and key in ("tokens_per_second", "position_id_per_seconds") and not value.is_integer():
        number = float(value)
    else:
        try:
            number = as_index(int(value) if isinstance(value, float) and value.is_integer() else value, key)
        except TypeError as error:
            raise TypeError(f"parameter {key} is a number, not {type(value).__name__}") from error
    if not (number >= 0 if key.endswith("_id") else 0 < number < 2**53):
        raise PositionError(
            f"parameter {key} is {number if isinstance(number, float) else shown(number)}", parameter=key, value=number
        )
    return number


_SET_SCHEME = seal(PositionScheme)
#: The methods by which a family places text and blocks otherwise.
_PLACING: Final = ("text", "begin_block", "block_runs", "greatest", "end_block", "compact", "num_placeholders", "plan")


def _check_count(
    item: MediaItem, span: tuple[int, int], last: int, total: int, count: int, *, is_last: bool, whole_block: bool
) -> None:
    """Whether an item may have ``last`` placeholders after ``span``, in a node of ``count`` tokens."""
    start, stop = span
    where = f"{item}: span [{start}, {stop})"
    if last > total:
        raise MediaSpanError(f"{where} brings it to {last} placeholders, its grid has {total}", item=item, span=span, limit=total)
    if item.unfinished and last == total:
        raise MediaSpanError(f"{where} completes its {total} placeholders, yet it is declared unfinished", item=item, span=span)
    if item.unfinished and stop != count and not whole_block:
        raise MediaSpanError(f"{where} is unfinished, so no token of its node may follow ({count - stop} do)", item=item, span=span)
    if last < total and not item.unfinished and (is_last or not whole_block):
        raise MediaSpanError(
            f"{where} holds {last} placeholders so far, its grid has {total} and it is not declared unfinished",
            item=item,
            span=span,
            limit=total,
        )


def _check_continues(open_block: OpenBlock, item: MediaItem) -> None:
    described = itertools.zip_longest(CONTENT_FIELDS, item.content(), open_block.content)
    differing = [name for name, given, known in described if given != known]
    if differing:
        _refuse_inside(open_block, f"{item} is not the rest of it, it differs in {', '.join(differing)}", item)
    if item.placeholders_before != open_block.placeholders:
        _refuse_inside(open_block, f"{item} with placeholders_before={item.placeholders_before} is not the rest of it", item)


def _refuse_inside(open_block: OpenBlock, why: str, item: MediaItem | None = None) -> None:
    modality, identity, *_ = open_block.content
    what = f"{modality} {identity[:4].hex()}"
    raise MediaSpanError(
        f"the path ends inside {what}, after {open_block.placeholders} placeholders: {why}", item=item or what, span=None
    )
