"""Whether a recorded history of concurrent calls is linearizable: whether the calls can be put in one order that keeps a call that
returned before another was made before it, and in which every call returns what it returned.

Wing and Gong's search, with Lowe's memory of where it has been. A call that changes nothing is placed as soon as it can be, without
trying anything else: whatever order there is, there is one with that call there. What heads return names a version, which says
where in the order a move stands, so that hardly anything is left to search.

A call that never returned, as of a process that was killed in it, may have been done at any time after it was made, or never.

What a session's heads are, without threads, is :func:`step`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from threading import get_ident
from typing import Any, Final, Literal, NamedTuple

Value = Any  # of a node, something that compares
Place = tuple[Value, int]  # of a head: where it is, and its version
NEVER: Final = 2**63  # when a call returned that has not, or not said what it did


class Call(NamedTuple):
    """A call on the heads of one session, from the tick ``made`` to the tick ``returned``.

    ``kind``: "set", "cas" (``expected``: a place; None: the name must be free), "drop" or "read". ``result``: of a set, and of a
    cas that moved it, the new place; else ("moved", what is there), where None is no head; of a drop, whether there was one; of a
    read, the place or None; of what returned NEVER, nothing.
    """

    made: int
    returned: int
    kind: Literal["set", "cas", "drop", "read"]
    name: str
    value: Value = None
    expected: Place | None = None
    result: Any = None
    thread: int = 0


State = tuple[int, frozenset[tuple[str, Place]]]  # how often heads were moved, and where they are
INITIAL: State = (0, frozenset())


def step(state: State, call: Call) -> State | None:
    """The state after a call; None where it would have returned something else."""
    moves, heads = state
    there = dict(heads)
    actual = there.get(call.name)
    if call.kind == "read":
        return state if call.result == actual else None
    if call.kind == "drop":
        if call.result != (actual is not None):
            return None
        if actual is None:
            return state
        del there[call.name]
        return moves + 1, frozenset(there.items())
    if call.kind == "cas" and call.expected != actual:
        return state if call.result == ("moved", actual) else None
    place = call.value, moves + 1
    if call.result != place:
        return None
    there[call.name] = place
    return moves + 1, frozenset(there.items())


def told_by(calls: Iterable[Call]) -> dict[int, tuple[str, Value]]:
    """What each version is that some call told of: the head, and where it was."""
    told: dict[int, tuple[str, Value]] = {}
    for call in calls:
        result = call.result[1] if isinstance(call.result, tuple) and call.result[0] == "moved" else call.result
        for at in (result, call.expected):
            if isinstance(at, tuple):
                told.setdefault(at[1], (call.name, at[0]))
    return told


def step_unreturned(state: State, call: Call, told: dict[int, tuple[str, Value]]) -> State | None:
    """The state after a call that never returned, where that is another one and nobody was told otherwise."""
    moves, heads = state
    there = dict(heads)
    actual = there.pop(call.name, None)
    if call.kind == "drop":
        return None if actual is None or moves + 1 in told else (moves + 1, frozenset(there.items()))
    if call.kind == "read" or (call.kind == "cas" and call.expected != actual):
        return None
    if told.get(moves + 1, (call.name, call.value)) != (call.name, call.value):
        return None
    there[call.name] = call.value, moves + 1
    return moves + 1, frozenset(there.items())


class NotLinearizable(AssertionError):
    """No order explains the history. ``stuck``: the calls, one of which had to come next in the longest order found."""

    def __init__(self, placed: int, of: int, state: State, stuck: Sequence[Call]) -> None:
        lines = "\n".join(f"  {call}" for call in stuck)
        super().__init__(f"{placed} of {of} calls have an order, to {state}; then none of these can be next:\n{lines}")
        self.stuck = tuple(stuck)


def check(history: Iterable[Call], initial: State = INITIAL) -> list[Call]:
    """An order that explains the history, of the calls that were done. Raises NotLinearizable."""
    every = sorted(history, key=lambda call: call.made)
    calls = [call for call in every if call.returned != NEVER]
    unreturned = [call for call in every if call.returned == NEVER]
    told = told_by(calls)
    done = 0  # of those that never returned, a bit for each
    order: list[int] = []  # places in ``calls``, or behind them in ``unreturned``
    placed = bytearray(len(calls))
    first, state = 0, initial
    seen: set[tuple[int, bytes, int, State]] = set()
    branches: list[tuple[int, list[tuple[int, State]]]] = []  # how long the order was, and what else could be next there
    best: tuple[int, State, list[Call]] = (-1, initial, [])

    def next_ones() -> tuple[list[int], list[int]]:
        """Those before which no other has returned, and those of them that never returned."""
        found, end = [], None
        for at in range(first, len(calls)):
            if end is not None and calls[at].made > end:
                break
            if not placed[at]:
                found.append(at)
                end = calls[at].returned if end is None else min(end, calls[at].returned)
        assert end is not None
        others = [at for at, call in enumerate(unreturned) if call.made <= end and not done >> at & 1]
        return [at for at in found if calls[at].made <= end], others

    remaining = len(calls)
    while remaining:
        while first < len(calls) and placed[first]:
            first += 1
        ones, others = next_ones()
        steps = [(at, after) for at in ones if (after := step(state, calls[at])) is not None]
        still = next((at for at, after in steps if after == state), None)
        if still is not None:
            steps = [(still, state)]
        else:
            moved = ((len(calls) + at, step_unreturned(state, unreturned[at], told)) for at in others)
            steps += [(at, after) for at, after in moved if after is not None]
            if len(steps) > 1:
                here = bytes(placed[first:]).rstrip(b"\0")
                steps = [(at, after) for at, after in steps if (at, here, done, after) not in seen]
                seen.update((at, here, done, after) for at, after in steps)
        if len(calls) - remaining > best[0]:
            best = len(calls) - remaining, state, [calls[at] for at in ones]
        if not steps:
            if not branches:
                raise NotLinearizable(best[0], len(calls), best[1], best[2])
            length, steps = branches.pop()
            for undone in order[length:]:
                if undone < len(calls):
                    placed[undone] = 0
                    first = min(first, undone)
                    remaining += 1
                else:
                    done ^= 1 << undone - len(calls)
            del order[length:]
        (at, after), *rest = steps
        if rest:
            branches.append((len(order), rest))
        if at < len(calls):
            placed[at] = 1
            remaining -= 1
        else:
            done |= 1 << at - len(calls)
        order.append(at)
        state = after
    return [calls[at] if at < len(calls) else unreturned[at - len(calls)] for at in order]


class Recorder:
    """A history as it comes about, under a logical clock: each tick is one step of a counter that all threads share."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._clock = itertools.count(1)

    def call(self, what: Callable[[], Any], **fields: Any) -> Any:
        """Make a call and record it: what ``what`` returns is the call's result."""
        made = next(self._clock)
        time.sleep(0)  # let others in, as often as not
        result = what()
        time.sleep(0)
        returned = next(self._clock)
        self.calls.append(Call(made, returned, result=result, thread=get_ident(), **fields))
        return result
