"""How figures are measured and printed: one process, one run, peers beside ours, no recorded constants."""

from __future__ import annotations

import json
from collections.abc import Iterable

import attrs
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


def report(figures: Iterable[Figure]) -> bool:
    """Print a table, then one line of JSON a figure; whether every bar is met."""
    figures = list(figures)
    table = Table("figure", "value", "bar", "peers", "note", title="sessiontree benchmarks")
    for row in figures:
        bar = "" if row.bar is None else f"{'≤' if row.better == 'lower' else '≥'} {row.bar:g} {'met' if row.passes else 'MISSED'}"
        peers = ", ".join(f"{name} {value:.3g}" for name, value in row.peers.items())
        table.add_row(row.figure, f"{row.value:.3g} {row.unit}", bar, peers, row.note)
    Console(width=160).print(table)
    for row in figures:
        print(json.dumps(attrs.asdict(row) | {"passes": row.passes}))
    return all(row.passes for row in figures)
