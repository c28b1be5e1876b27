"""Curves and bars of figures as SVG, ours beside the peers of the same run. The same figures give the same bytes."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import matplotlib as mpl
from harness import Figure
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, NullFormatter
from report_runs import Run

OURS = "sessiontree"
STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.color": "#dddddd",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "sessiontree",
    "text.parse_math": False,  # a name is a name, whatever is in it
}
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#7f7f7f")


@attrs.frozen
class Plot:
    """A picture: curves of ``series``, and groups of bars of ``bars``, each a script and a figure's name, or its beginning."""

    name: str
    title: str
    series: tuple[str, ...] = ()
    bars: tuple[tuple[str, str], ...] = ()


PLOTS = (
    Plot(
        "turns",
        "Growth over turns",
        (
            "turns: time of a turn",
            "turns: path read after opening",
            "turns: text turn of SGLang's session",
            "turns: image turn of SGLang's session",
        ),
    ),
    Plot(
        "sessions",
        "Growth over sessions",
        ("sessions: one begun", "sessions: one read after opening", "sessions: bytes on disk"),
    ),
    Plot(
        "memory",
        "Memory",
        ("turns: memory",),
        (
            ("tree.py", "1M tokens in 1,000 turns, whole path read each turn: memory"),
            ("trajectories.py", "memory of a million tokens"),
            ("scheduler.py", "live memory"),
            ("positions.py", "position runs of an image turn, in memory"),
        ),
    ),
    Plot(
        "disk",
        "Disk",
        ("turns: bytes on disk",),
        (
            ("durable.py", "1,000 turns of 1,000 tokens: bytes"),
            ("durable.py", "100 forks of 1,000 turns, a turn of 16 each: bytes"),
            ("postgres.py", "PostgreSQL, 1,000 turns of 1,000 tokens: bytes"),
            ("postgres.py", "PostgreSQL, a fork of 1,000 turns, with a turn of 16: bytes"),
        ),
    ),
)
GPU = Plot("gpu", "GPU")


def number(value: float) -> str:
    """Three digits of it."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def curves_of(plot: Plot, runs: Sequence[Run]) -> dict[str, list[Figure]]:
    """The points of each of its series that was measured."""
    points = [figure for run in runs for figure in run.figures if figure.series]
    found = {name: [figure for figure in points if figure.series == name] for name in plot.series}
    return {name: each for name, each in found.items() if each}


def bars_of(plot: Plot, runs: Sequence[Run]) -> list[Figure]:
    """The figures of its bars that were measured beside a peer; of the GPU's all that a GPU did."""
    if plot is GPU:
        return [each for run in runs if run.machine.gpus for each in run.figures if each.peers and by_gpu(each, run)]
    figures = [(run.script, figure) for run in runs for figure in run.figures if figure.peers]
    return [each for script, start in plot.bars for where, each in figures if where == script and each.figure.startswith(start)]


def by_gpu(figure: Figure, run: Run) -> bool:
    """Figures of a GPU begin with its name; a script has others too."""
    return any(figure.figure.startswith(gpu) for gpu in run.machine.gpus)


def drawn(plot: Plot, runs: Sequence[Run]) -> bytes | None:
    """The picture; None where nothing of it was measured."""
    curves, bars = curves_of(plot, runs), bars_of(plot, runs)
    count = len(curves) + len(bars)
    if not count:
        return None
    with mpl.rc_context(STYLE):
        rows = -(-count // 2)
        canvas = Canvas(figsize=(10, 3.1 * rows), layout="constrained")
        axes = list(canvas.subplots(rows, 2, squeeze=False).flat)
        for ax, (name, points) in zip(axes, curves.items(), strict=False):
            _curve(ax, name, points)
        for ax, figure in zip(axes[len(curves) :], bars, strict=False):
            _bars(ax, figure)
        for ax in axes[count:]:
            ax.set_axis_off()
        made = io.StringIO()
        canvas.savefig(made, format="svg", metadata={"Date": None, "Creator": None})
    return made.getvalue().encode()


def ways(figures: Iterable[Figure]) -> list[str]:
    """The names of peers, in the order in which they come."""
    return list(dict.fromkeys(name for figure in figures for name in figure.peers))


def _curve(ax: Axes, name: str, points: list[Figure]) -> None:
    over, _, what = name.partition(": ")
    peers = {way: [(each.at, each.peers[way]) for each in points if way in each.peers] for way in ways(points)}
    lines = {OURS: [(each.at, each.value) for each in points], **peers}
    for colour, (way, line) in zip(COLOURS, lines.items(), strict=False):
        ours = way == OURS
        ax.plot(
            *zip(*line, strict=True), color=colour, marker="o", ms=4, lw=2.5 if ours else 1.2, label=way, zorder=3 if ours else 2
        )
    ax.set(title=what, xlabel=over, ylabel=points[0].unit, xscale="log", yscale="log")
    ax.legend(fontsize=7)
    ax.set_ylim(_decades(value for line in lines.values() for _, value in line))
    _plain(ax.xaxis)
    _plain(ax.yaxis)


def _bars(ax: Axes, figure: Figure) -> None:
    values = {OURS: figure.value, **figure.peers}
    colours = [COLOURS[0], *["#aaaaaa"] * len(figure.peers)]
    drawn = ax.barh(list(values), list(values.values()), color=colours)
    ax.bar_label(drawn, [f"{number(value)} {figure.unit}" for value in values.values()], padding=3, fontsize=8)
    first, last = _decades(values.values())
    ax.set(xscale="log", xlim=(first, last * (last / first) ** 0.3))  # room for the longest bar's label
    ax.set_title(figure.figure, fontsize=8, wrap=True)
    ax.grid(visible=False, axis="y")
    ax.invert_yaxis()
    _plain(ax.xaxis)


def _decades(values: Iterable[float]) -> tuple[float, float]:
    """Powers of ten around values, that are above zero."""
    logs = [math.log10(value) for value in values]
    return 10.0 ** (math.ceil(min(logs)) - 1), 10.0 ** (math.floor(max(logs)) + 1)


def _plain(axis: Axis) -> None:
    """Numbers as they are read, and none between the powers of ten."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    axis.set_minor_formatter(NullFormatter())
