"""Positions as docs/format.md writes them: its formulas alone, token by token, against what nodes answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgpack
import numpy as np
import pytest
from numpy.typing import NDArray

from sessiontree import Node, SessionStore
from tests.disk_model import golden, grow, scheme_of
from tests.golden.stores import make
from tests.test_format import NAMES, PAGE, copied

Place = tuple[Any, ...]  # of one token, a number for each axis


def written_out(laid: int | bytes, count: int, axes: int) -> Iterator[Place]:
    """Where each of a node's tokens stands."""
    described = [[0, count, laid]] if isinstance(laid, int) else msgpack.unpackb(laid)
    for kind, length, *fields in described:
        places = canvas(length, *fields) if kind == 5 else None
        for j in range(length):
            yield places[j] if places is not None else FORMULAS[kind](j, length, axes, *fields)


def text(j: int, _: int, axes: int, base: int) -> Place:
    return (base + j,) * axes


def float_text(j: int, _: int, axes: int, base: float, skip: int) -> Place:
    return (np.float32(skip + j) + np.float32(base),) * axes


def grid(j: int, _: int, axes: int, base: int, time: int, step: int, height: int, width: int, skip: int) -> Place:
    k, n = skip + j, height * width
    return time + k // n * step, base + k % n // width, base + k % width


def framed(j: int, _: int, axes: int, base: float, times: bytes, height: int, width: int, skip: int) -> Place:
    k, n = skip + j, height * width
    number: Any = np.float32 if isinstance(base, float) else np.int64
    time = np.frombuffer(times, number)[k // n]
    return number(base) + time, number(base) + number(k % n // width), number(base) + number(k % width)


def absolute(j: int, _: int, axes: int, base: int, width: int, image: int, skip: int) -> Place:
    k = skip + j
    return *(base + j,) * (axes - 3), k % width, k // width, image


def table(j: int, length: int, axes: int, dtype: str, data: bytes) -> Place:
    return tuple(np.frombuffer(data, dtype).reshape(axes, length)[:, j])


FORMULAS: Any = {0: text, 1: float_text, 2: grid, 3: framed, 4: absolute, 6: table, 7: table}


def canvas(length: int, origin: int, data: bytes) -> list[Place]:
    crops = np.frombuffer(data, "<i4").reshape(-1, 3).tolist()
    found: dict[int, tuple[int, int]] = {}
    if crops:
        (first, high, wide_of), *slices = crops
        across, (_, p, q) = len(slices), slices[0] if slices else (0, 0, 0)
        for number, (one, other) in enumerate(pairwise(slices), 1):
            if other[0] - one[0] - one[1] * one[2] > 2:
                across = number if len(slices) % number == 0 else len(slices)
                break
        tall, wide = (len(slices) // across * p, across * q) if slices else (high, wide_of)
        found[0] = -1, -1
        found[first + high * wide_of] = tall, wide
        for token in range(high * wide_of):
            y, x = divmod(token, wide_of)
            found[first + token] = spread(tall, high, y), spread(wide, wide_of, x)
        for i, (offset, r, c) in enumerate(slices):
            top, left, end = i // across * p, i % across * q, offset + r * c
            found[offset - 1] = top, left
            found[end] = top + r - 1, left + c - 1
            found |= {offset + token: (top + token // c, left + token % c) for token in range(r * c)}
            behind = slices[i + 1][0] if i + 1 < len(slices) else end
            if behind - end > 2:
                found |= dict.fromkeys(range(end + 1, behind - 1), (top + p - 1, wide))
    return [tuple(max(0, origin + each) for each in (0, *found.get(j, (0, 0)))) for j in range(length)]


def spread(size: int, count: int, i: int) -> int:
    if size == count:
        return i
    if count == 1:
        return 0
    last = np.float32(size - 1)
    step = last / np.float32(count - 1)
    return int(np.rint(step * np.float32(i) if i < count // 2 else last - step * np.float32(count - 1 - i)))


def checked(node: Node) -> set[int]:
    """Compare both modes of a node with the formulas: the kinds of runs that it has."""
    kinds: set[int] = set()
    for mode, laid in (("as_decoded", node.runs), ("as_replayed", node.runs if node.replayed is None else node.replayed.runs)):
        expected: NDArray[Any] = node.positions(node.start, node.stop, mode)  # type: ignore[arg-type]
        places = list(written_out(laid, len(node), node.scheme.num_axes))
        assert len(places) == len(node)
        assert np.array(places, expected.dtype).reshape(len(node), -1).T.tolist() == expected.reshape(-1, len(node)).tolist()
        kinds |= {0} if isinstance(laid, int) else {run[0] for run in msgpack.unpackb(laid)}
    return kinds


def test_the_formulas_give_the_positions_of_the_golden_stores(tmp_path: Any) -> None:
    kinds: set[int] = set()
    for name in NAMES:
        with make.open_golden(copied(name, tmp_path)) as store:
            for session_id in store.sessions():
                for node in store.get(session_id).tree:
                    kinds |= checked(node) if len(node) else set()
    assert kinds == {*FORMULAS, 5}
    assert kinds == {int(kind) for kind in re.findall(r"\| (\d) \w+Run \|", PAGE)}


@pytest.mark.parametrize(("name", "history"), list(golden()), ids=lambda value: value if isinstance(value, str) else "")
def test_the_formulas_give_the_positions_of_every_family(name: str, history: Any) -> None:
    session = SessionStore.in_memory().create(name, scheme=scheme_of(name, history))
    grow(session, history)
    for node in session.tree:
        if len(node):
            checked(node)
