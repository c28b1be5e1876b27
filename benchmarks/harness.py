"""How figures are measured and printed: one process, one run, peers beside ours, no recorded constants."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table


@attrs.frozen
class Figure:
    """One row: ``value`` in ``unit``, the ``bar`` it is held to (None: reported only), and peers measured in the same run."""

    figure: str
    value: float
    unit: str
    bar: float | None = None
    better: str = "lower"
    peers: dict[str, float] = attrs.field(factory=dict)
    note: str = ""

    @property
    def passes(self) -> bool:
        if self.bar is None:
            return True
        return self.value <= self.bar if self.better == "lower" else self.value >= self.bar


def microseconds(call: Callable[[], object], count: int) -> NDArray[np.float64]:
    """What each of ``count`` calls took."""
    clock = time.perf_counter_ns
    taken = np.empty(count)
    for number in range(count):
        start = clock()
        call()
        taken[number] = clock() - start
    return taken / 1000


def median_of(call: Callable[[], object], count: int, each: int = 1) -> float:
    """Median microseconds of a call, over ``count`` samples of ``each`` calls, so that short ones are not lost in the clock's."""

    def several() -> None:
        for _ in range(each):
            call()

    return float(np.median(microseconds(call if each == 1 else several, count))) / each


def memory_of(make: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes that are held more after a call than before, as tracemalloc counts them; and what it made."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        made = make()
        return tracemalloc.get_traced_memory()[0] - before, made
    finally:
        tracemalloc.stop()


def report(figures: Iterable[Figure]) -> bool:
    """Print a table, then one line of JSON a figure; whether every bar is met."""
    figures = list(figures)
    table = Table("figure", "value", "bar", "peers", "note", title="sessiontree benchmarks")
    for row in figures:
        bar = "" if row.bar is None else f"{'≤' if row.better == 'lower' else '≥'} {row.bar:g} {'met' if row.passes else 'MISSED'}"
        peers = ", ".join(f"{name} {value:,.3g}" for name, value in row.peers.items())
        table.add_row(row.figure, f"{row.value:.3g} {row.unit}", bar, peers, row.note)
    Console(width=170).print(table)
    for row in figures:
        print(json.dumps(attrs.asdict(row) | {"passes": row.passes}))
    return all(row.passes for row in figures)
