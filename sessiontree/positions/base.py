"""What a position scheme is: the rule of one model family under one engine, and the state it carries along a path.

A scheme turns new tokens and their media into position runs and the state after them, in time proportional to what is new.
It reads spans and grids; of token ids only those a family needs as delimiters. Positions "as replayed" are those a whole-history
prefill gives; "as decoded" are those a generated token had when it was made: its index plus the delta before it. The two
differ only where a block's greatest position is not the one that text continues from.

Subclasses say what a block is (:meth:`~PositionScheme.merged_grid`, :meth:`~PositionScheme.frame_times`,
:meth:`~PositionScheme.advance`); everything about turns, parts and limits is here.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final, Literal, NamedTuple

import attrs
import numpy as np
from numpy.typing import ArrayLike, NDArray
from pyrsistent import PMap, pmap

from sessiontree.errors import MediaSpanError, PositionError, PositionLimitExceeded, Unsupported
from sessiontree.frozen import Sealed, checked_text, frozen_array, handed_out, no_subclasses, seal
from sessiontree.media import CONTENT_FIELDS, MediaItem, Placement, placements
from sessiontree.positions.runs import GridRun, Run, Runs, TableRun, TextRun, grid_runs, write
from sessiontree.tokens import TOKEN_BYTES, Position, TokenIds, as_index, shown, token_bytes

RULES: Final = ("hf5", "sglang", "vllm")
Mode = Literal["as_decoded", "as_replayed"]
MODES: Final = ("as_decoded", "as_replayed")
DEFAULT_POSITION_LIMIT: Final = 2**24


class OpenBlock(NamedTuple):
    """A block that a turn stopped inside.

    ``content``: the item's :meth:`~sessiontree.media.MediaItem.content`, which the rest of it has to repeat. ``base``: the position
    of its first token. ``placeholders``: how many stand so far.
    """

    content: tuple[Any, ...]
    base: int
    placeholders: int


class PositionState(NamedTuple):
    """All that positions after a path depend on.

    ``next_position``: where the next prefilled text token stands; ``max_position``: the greatest position so far on any axis
    (-1 before the first); the two differ after a video under the hf5 rule. ``open_block``: see :class:`OpenBlock`.
    """

    num_tokens: int
    next_position: int
    max_position: int
    open_block: OpenBlock | None = None


@attrs.frozen(init=False, eq=False, repr=False)
class ExternalPositions(Sealed):
    """Positions of one turn that came from elsewhere (a pruned video, a model that no scheme covers).

    ``positions``: (num_axes, T), one column for each token of the turn, of the scheme's kind of number. ``next_position``: where
    text continues, by default one past the table's greatest entry. ``max_position``: the greatest position of the path, by
    default the greater of the path's and the table's.
    """

    _table: NDArray[Any]
    next_position: int | None
    max_position: int | None

    __init_subclass__ = no_subclasses

    def __new__(cls, positions: ArrayLike, next_position: int | None = None, max_position: int | None = None) -> ExternalPositions:
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


def _optional_position(value: Any, what: str) -> int | None:
    if isinstance(value, (bool, np.bool)):
        raise TypeError(f"{what} is a position, not a bool")
    if value is None:
        return None
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
    num_axes: ClassVar[int] = 1
    dtype: ClassVar[np.dtype[Any]] = np.dtype(np.int64)
    defaults: ClassVar[Mapping[str, Any]] = {}  # the parameters a family knows; None: not set

    __slots__ = ("_params", "max_position_limit", "name", "rule")

    name: str
    rule: str
    _params: PMap[str, Any]
    max_position_limit: int

    def __new__(cls, rule: str, params: Mapping[str, Any]) -> PositionScheme:
        self = object.__new__(cls)
        known = {**self.defaults, "max_position_limit": DEFAULT_POSITION_LIMIT}
        for key, value in params.items():
            if key not in known:
                raise PositionError(f"{self.family} has no parameter {key!r}; it has {', '.join(sorted(known))}", parameter=key)
            if value is not None:
                known[key] = self._checked(key, value)
        put = _SET_SCHEME
        put["rule"](self, rule)
        put["name"](self, f"{self.family}@{rule}")
        put["_params"](self, pmap({key: value for key, value in known.items() if value is not None}))
        put["max_position_limit"](self, known["max_position_limit"])
        return self

    @property
    def params(self) -> PMap[str, Any]:
        """The parameters given, with defaults filled in; those that were not given and have no default are absent."""
        params: PMap[str, Any] = handed_out(self._params)
        return params

    def __reduce__(self) -> Any:
        return type(self), (self.rule, dict(self._params))

    @staticmethod
    def _checked(key: str, value: Any) -> int | float | None:
        if key == "time":  # a hint at how a rule computes; the rule knows
            checked_text(value, "parameter time")
            return None
        number: int | float
        if isinstance(value, float) and key == "tokens_per_second" and not value.is_integer():
            number = float(value)
        else:
            number = as_index(int(value) if isinstance(value, float) and value.is_integer() else value, key)
        if not (number >= 0 if key.endswith("_token_id") else 0 < number < 2**53):
            raise PositionError(
                f"parameter {key} is {number if isinstance(number, float) else shown(number)}", parameter=key, value=number
            )
        return number

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PositionScheme):
            return NotImplemented
        return self.name == other.name and self._params == other._params

    def __hash__(self) -> int:
        return hash((self.name, self._params))

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

        Spans of ``media`` are relative to ``token_ids``. Raises MediaSpanError, PositionError, PositionLimitExceeded.
        """
        data = token_bytes(token_ids)
        runs, after = self.plan(state, data, media)
        return self.written(runs, len(data) // TOKEN_BYTES), after

    def decode(self, state: PositionState, token_ids: TokenIds) -> tuple[NDArray[Any], PositionState]:
        """Positions of generated tokens as they were decoded: index + delta on every axis; and the state after them."""
        count = len(token_bytes(token_ids)) // TOKEN_BYTES
        runs, after = self.plan_decode(state, count)
        return self.written(runs, count), after

    def decode_positions(self, state: PositionState, target_grids: Sequence[Sequence[int]] = ()) -> NDArray[Any]:
        """The plan of positions an image-generating family decodes by."""
        raise Unsupported(f"{self.name} decodes at index + delta; only image-generating families have a plan", scheme=self.name)

    def mrope_position_delta(self, state: PositionState) -> int:
        """max_position + 1 - num_tokens: what a decoded token's index lacks to its position."""
        return state.max_position + 1 - state.num_tokens

    def next_position(self, state: PositionState) -> Position:
        """Where the next prefilled text token stands."""
        return Position(state.next_position)

    def num_placeholders(self, item: MediaItem) -> int:
        """Placeholders of the whole of ``item``, however many of them a node holds. Raises Unsupported or PositionError."""
        return math.prod(self.merged_grid(item))

    # What nodes use: runs instead of tables, token bytes instead of arrays

    def plan(self, state: PositionState, data: bytes, media: Sequence[MediaItem] = ()) -> tuple[Runs, PositionState]:
        """Position runs of a prefilled turn and the state after it."""
        count = len(data) // TOKEN_BYTES
        before, base, top, open_block = state
        if media or open_block is not None:
            return self._plan_blocks(state, count, placements(media, count))
        if not count:
            return base, state
        stop, after = before + count, base + count
        if after > self.max_position_limit:
            self._check_limit(after - 1)
        if after == stop:
            after = stop  # the same object: that is one int less to keep
        return base, _state((stop, after, after - 1 if after > top else top, None))

    def plan_decode(self, state: PositionState, count: int) -> tuple[Runs, PositionState]:
        """Position runs of ``count`` generated tokens and the state after them."""
        if state.open_block is not None:
            _refuse_inside(state.open_block, "nothing can be generated")
        if not count:
            return state.next_position, state
        base = state.max_position + 1
        after = base + count
        self._check_limit(after - 1)
        return base, _state((state.num_tokens + count, after, after - 1, None))

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
        if table.dtype.kind not in "iuf" or (self.dtype.kind == "i" and table.dtype.kind == "f"):
            raise PositionError(f"an external table of {table.dtype} is no table of {self.dtype}", dtype=str(table.dtype))
        if not count:
            if external.next_position is not None or external.max_position is not None:
                raise PositionError("an empty turn has no positions, so nothing comes after them", value=external.next_position)
            return state.next_position, state
        least, greatest = table.min(), table.max()
        if not least >= 0:
            raise PositionError(f"an external table holds the position {least}", value=least)
        self._check_limit(greatest)
        top = int(greatest) if external.max_position is None else external.max_position
        after = int(greatest) + 1 if external.next_position is None else external.next_position
        if top < greatest or after < 0:
            raise PositionError(
                f"max_position {top} and next_position {after} cannot follow positions up to {greatest}",
                value=(top, after),
                limit=int(greatest),
            )
        top = max(top, state.max_position)
        self._check_limit(max(top, after - 1))
        run = TableRun(count, table.astype(self.dtype).tobytes())
        return (run,), PositionState(state.num_tokens + count, after, top)

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

    def written(self, runs: Runs, count: int) -> NDArray[Any]:
        """The table of a turn of ``count`` tokens."""
        out = np.empty((self.num_axes, count), self.dtype)
        write(runs, 0, count, out)
        return frozen_array(out)

    # Turns, parts and limits

    def _check_limit(self, position: Any) -> None:
        if not position < self.max_position_limit:
            at = shown(position) if isinstance(position, int) else position
            raise PositionLimitExceeded(
                f"position {at} is not below {self.name}'s max_position_limit of {self.max_position_limit}",
                value=position,
                limit=self.max_position_limit,
            )

    def _plan_blocks(self, state: PositionState, count: int, placed: list[Placement]) -> tuple[Runs, PositionState]:
        runs: list[Run] = []
        open_block = state.open_block
        next_position, max_position = state.next_position, state.max_position
        at = 0
        seen: dict[int, int] = {}
        if open_block is not None and count:
            if not placed or placed[0].start:
                _refuse_inside(open_block, "other tokens cannot stand before the rest of it")
            _check_continues(open_block, placed[0].item)
        for start, stop, item in placed:
            if seen.setdefault(id(item), start) != start:
                raise MediaSpanError(
                    f"{item}: a {item.modality} of {self.name} is one contiguous block, not several spans",
                    item=item,
                    span=(start, stop),
                )
            if start > at:
                runs.append(TextRun(start - at, next_position))
                next_position += start - at
                max_position = max(max_position, next_position - 1)
            if open_block is None:
                base, first = next_position, 0
                if item.placeholders_before:
                    raise MediaSpanError(
                        f"{item}: span [{start}, {stop}) says that {item.placeholders_before} placeholders stand before it; "
                        "the path holds no such part",
                        item=item,
                        span=(start, stop),
                    )
            else:
                base, first = open_block.base, open_block.placeholders
            frames, height, width = self.merged_grid(item)
            last = first + stop - start
            _check_count(item, (start, stop), last, frames * height * width, count)
            frame = first // (height * width)
            times = self.frame_times(item, frame, -(-last // (height * width)))
            self._check_limit(base + times[-1])
            pieces = grid_runs(base, frame, times, height, width, first, last)
            runs += pieces
            max_position = max(max_position, *(_greatest(piece) for piece in pieces))
            if item.unfinished:
                open_block = OpenBlock(item.content(), base, last)
            else:
                open_block = None
                next_position = base + self.advance(times[-1], height, width)
            at = stop
        if at < count:
            runs.append(TextRun(count - at, next_position))
            next_position += count - at
            max_position = max(max_position, next_position - 1)
        self._check_limit(max(max_position, next_position - 1))
        return tuple(runs), PositionState(state.num_tokens + count, next_position, max_position, open_block)


_SET_SCHEME = seal(PositionScheme)


def _greatest(run: GridRun) -> int:
    """The greatest position of a grid run, on any axis; what came before it in its frame is on the path already."""
    frame_size = run.height * run.width
    last = run.skip + run.length - 1
    whole_frame = last + 1 >= frame_size
    row = run.height - 1 if whole_frame else last // run.width
    column = min(last, run.width - 1)
    return max(run.time + last // frame_size * run.time_step, run.base + row, run.base + column)


def _check_count(item: MediaItem, span: tuple[int, int], last: int, total: int, count: int) -> None:
    start, stop = span
    where = f"{item}: span [{start}, {stop})"
    if last > total:
        raise MediaSpanError(f"{where} brings it to {last} placeholders, its grid has {total}", item=item, span=span, limit=total)
    if item.unfinished and last == total:
        raise MediaSpanError(f"{where} completes its {total} placeholders, yet it is declared unfinished", item=item, span=span)
    if item.unfinished and stop != count:
        raise MediaSpanError(f"{where} is unfinished, so no token of its node may follow ({count - stop} do)", item=item, span=span)
    if not item.unfinished and last < total:
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
