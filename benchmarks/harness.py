"""How figures are measured and printed: one process, one run, peers beside ours, no recorded constants."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from attrs.validators import deep_mapping, in_, instance_of, optional
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

STARTED = time.monotonic()
CORES = len(os.sched_getaffinity(0))  # before a script settles on one of them
# What figures depend on, and the peers beside which they stand. Those that are not there are named too.
PACKAGES = (
    "sessiontree",
    "numpy",
    "pyrsistent",
    "msgpack",
    "isal",
    "psycopg",
    "torch",
    "triton",
    "transformers",
    "langgraph-checkpoint",
    "langgraph-checkpoint-sqlite",
    "langgraph-checkpoint-postgres",
    "openai-agents",
    "sglang",
    "vllm",
)


def _number(_: Any, field: attrs.Attribute[Any], value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ValueError(f"{field.name} is no number: {value!r}")


@attrs.frozen
class Figure:
    """One row: ``value`` in ``unit``, the ``bar`` it is held to (None: reported only), and peers measured in the same run.

    A row that is a point of a curve names it: its ``series``, and where on it the point is ``at``, of turns or sessions.
    Every field is checked, since rows are read from logs too: ValueError or TypeError.
    """

    figure: str = attrs.field(validator=instance_of(str))
    value: float = attrs.field(validator=_number)
    unit: str = attrs.field(validator=instance_of(str))
    bar: float | None = attrs.field(default=None, validator=optional(_number))
    better: str = attrs.field(default="lower", validator=in_(("lower", "higher")))
    peers: dict[str, float] = attrs.field(factory=dict, validator=deep_mapping(instance_of(str), _number, instance_of(dict)))
    note: str = attrs.field(default="", validator=instance_of(str))
    series: str = attrs.field(default="", validator=instance_of(str))
    at: float | None = attrs.field(default=None, validator=optional(_number))

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


def machine() -> dict[str, Any]:
    """What this machine is, by kind: nothing that names it."""
    torch = sys.modules.get("torch")  # scripts that use a GPU have it; the others need no look
    gpus = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())] if torch is not None else []
    return {
        "processor": _after("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": CORES,
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": _after("/etc/os-release", "PRETTY_NAME").strip('"') or platform.system(),
        "gpus": gpus,
    }


def _after(path: str, name: str) -> str:
    """What stands behind a name and ``:`` or ``=`` in a file of such lines; "" where it has none."""
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return next((line[len(name) :].strip(" \t:=") for line in lines if line.startswith(name)), "")


def versions() -> dict[str, str]:
    """Of Python and packages, "" of those that are not there; and the commit."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found | {"commit": _commit()}


def _commit() -> str:
    """That of a checkout, "+" behind it where what runs is not what was committed; outside of one what BENCH_COMMIT says, or ""."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])

    if shutil.which("git") is None or not (head := git("rev-parse", "--short=12", "HEAD").stdout.strip()):
        return os.environ.get("BENCH_COMMIT", "")
    changed = git("diff", "--quiet", "HEAD", "--", "sessiontree", "engine_bridge", "benchmarks").returncode
    return f"{head}+" if changed else head


def described(script: str) -> dict[str, Any]:
    """What a run of a script says of itself: which, where, of what, on which day, how many seconds until now."""
    run = {"script": script, "machine": machine(), "versions": versions()}
    return run | {"day": datetime.now(UTC).date().isoformat(), "seconds": round(time.monotonic() - STARTED, 1)}


def report(figures: Iterable[Figure]) -> bool:
    """Print a table, then a line of JSON that describes the run and one for each figure; whether every bar is met."""
    figures = list(figures)
    table = Table("figure", "value", "bar", "peers", "note", title="sessiontree benchmarks")
    for row in figures:
        bar = "" if row.bar is None else f"{'≤' if row.better == 'lower' else '≥'} {row.bar:g} {'met' if row.passes else 'MISSED'}"
        peers = ", ".join(f"{name} {value:,.3g}" for name, value in row.peers.items())
        table.add_row(row.figure, f"{row.value:.3g} {row.unit}", bar, peers, row.note)
    Console(width=170).print(table)
    print(json.dumps(described(Path(sys.argv[0]).name)))
    for row in figures:
        print(json.dumps(attrs.asdict(row) | {"passes": row.passes}))
    return all(row.passes for row in figures)
