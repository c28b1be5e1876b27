"""The page of benchmarks, and the tables of other pages, as Markdown made of runs: what it shows is what was printed.

A table of another page stands between two comments, of which the first says what is in it:

    <!-- figures: durable.py "durable commit" "1,000 turns" -->
    <!-- end of figures -->

That is: of the script's figures those that have one of the texts in their name, in the order of the texts; without a text all of
them. ``gpu_bridge.py on a GPU`` are those that a GPU did. Where no figure has a text the table says that it was not measured.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Sequence

from harness import Figure
from report_plots import GPU, OURS, PLOTS, bars_of, by_gpu, curves_of, number, ways
from report_runs import NOT_MEASURED, Run, about

BLOCK = re.compile(r'(<!-- figures: (\S+\.py)( on a GPU)?((?: "[^"\n]+")*) -->\n)(.*?)(<!-- end of figures -->)', re.DOTALL)

INTRODUCTION = """# Benchmarks

Written by `make bench-report`, which runs the scripts of `benchmarks/` one after the other and shows all that they printed, what
misses its bar and what failed too. Peers ran in the same process as ours, or beside the same server. No figure of the README and of
these pages that was measured comes from elsewhere; the lines that it is all made of: [results.jsonl](benchmarks/results.jsonl).

This run took {minutes:,.0f} minutes. Where others use the machine too, figures vary: least those of ratios, since both sides were
measured in turn. `make bench` prints the same and writes nothing.
"""


def cell(text: str) -> str:
    """Text as Markdown that shows it as it is, on one line, in a table too."""
    return re.sub(r"([\\`*_\[\]|~$^{}])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table; its cells are Markdown."""
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


def got(figure: Figure) -> str:
    return cell(f"{number(figure.value)} {figure.unit}".strip())


def bar(figure: Figure) -> str:
    if figure.bar is None:
        return "–"
    held = f"{'≤' if figure.better == 'lower' else '≥'} {number(figure.bar)}"
    return f"{held}, met" if figure.passes else f"{held}, **missed**"


def beside(figure: Figure) -> str:
    return cell(", ".join(f"{name}: {number(value)}" for name, value in figure.peers.items()))


def rows_of(figures: Sequence[Figure]) -> Iterator[str]:
    rows = [(cell(each.figure), got(each), bar(each), beside(each), cell(each.note)) for each in figures]
    yield from table(("figure", "got", "bar", "beside it, same run", ""), rows)


def letters(runs: Sequence[Run]) -> dict[str, str]:
    """A letter for each machine with its versions, by both."""
    return {each: chr(ord("A") + at) for at, each in enumerate(dict.fromkeys(map(where, runs)))}


def where(run: Run) -> str:
    """Equal where machine and versions are; the commit apart, which each script says."""
    return repr((run.machine, {name: each for name, each in run.versions.items() if name != "commit"}))


def machines(runs: Sequence[Run]) -> Iterator[str]:
    named = letters(runs)
    firsts = {letter: next(run for run in runs if where(run) == each) for each, letter in named.items()}
    rows: dict[str, Callable[[Run], str]] = {
        "processor": lambda run: f"{run.machine.processor}, {run.machine.cores} cores",
        "memory": lambda run: f"{run.machine.memory_gib:g} GiB",
        "GPU": lambda run: ", ".join(run.machine.gpus) or "none",
        "system": lambda run: run.machine.system,
    }
    for name in dict.fromkeys(name for run in firsts.values() for name in run.versions if name != "commit"):
        rows[name] = lambda run, name=name: run.versions.get(name) or "not there"  # type: ignore[misc]
    yield from table(["", *firsts], [[cell(name), *(cell(said(run)) for run in firsts.values())] for name, said in rows.items()])


def curve(points: Sequence[Figure]) -> Iterator[str]:
    """A series as a table: what was not measured any more is a dash."""
    over, _, what = points[0].series.partition(": ")
    peers = ways(points)
    rows = []
    for each in points:
        rest = [number(each.peers[way]) if way in each.peers else "–" for way in peers]
        rows.append([f"{each.at:,.0f}", number(each.value), *rest])
    yield f"**{cell(what)}**, {cell(points[0].unit)}"
    yield ""
    yield from table([cell(over), OURS, *map(cell, peers)], rows)
    if any("–" in row for row in rows):
        yield "–: it had taken more time, disk or memory before than the script grants."
        yield ""


def section(run: Run, letter: str) -> Iterator[str]:
    """Of one script all that it printed, but for its curves, which stand with the pictures."""
    what, expected = about(run.script)
    yield f"### {run.script}{', on a GPU' if run.added and run.machine.gpus else ''}"
    yield ""
    if what:
        yield cell(what)
        yield ""
    yield cell(expected) if expected else "Nothing that was expected of it was written down before its first run."
    yield ""
    commit = run.versions.get("commit") or "not known"
    yield f"Machine {letter}, {run.day}, {run.seconds:,.0f} s, commit {cell(commit)}."
    yield ""
    if run.failure:
        yield f"**It failed**, so not all was measured: {cell(run.failure)}"
        yield ""
    for remark in run.remarks:
        yield f"**Not measured.** {cell(remark)}"
        yield ""
    figures = [each for each in run.figures if not each.series]
    if figures:
        yield from rows_of(figures)


def page(runs: Sequence[Run]) -> str:
    """``docs/benchmarks.md``. The pictures lie beside it, in ``benchmarks/``."""
    return "\n".join(_page(runs))


def _page(runs: Sequence[Run]) -> Iterator[str]:
    named = letters(runs)
    barred = [figure for run in runs for figure in run.figures if figure.bar is not None]
    missed = [(run, figure) for run in runs for figure in run.missed]
    lacking = [(run, said) for run in runs for said in (*([f"it failed: {run.failure}"] if run.failure else []), *run.remarks)]
    minutes = sum(run.seconds for run in runs if not run.added) / 60
    yield INTRODUCTION.format(minutes=minutes)
    yield "## Met and missed"
    yield ""
    count = sum(len(run.figures) for run in runs)
    yield f"{count:,} figures, {len(barred)} with a bar: {len(barred) - len(missed)} met, **{len(missed)} missed**."
    yield ""
    if missed:
        rows = [(run.script, cell(each.figure), got(each), bar(each), over(each), cell(each.note)) for run, each in missed]
        yield from table(("script", "figure", "got", "bar", "got / bar", ""), rows)
    if lacking or not any(run.machine.gpus for run in runs):
        yield "Not measured:"
        yield ""
        yield from (f"- {run.script}: {cell(said)}" for run, said in lacking)
        if not any(run.machine.gpus for run in runs):
            yield "- whatever needs a GPU: no log of a machine that has one was added"
        yield ""
    for plot in (*PLOTS, GPU):
        curves, bars = curves_of(plot, runs), bars_of(plot, runs)
        yield f"## {plot.title}"
        yield ""
        if not curves and not bars:
            yield "Not measured."
            yield ""
            continue
        yield f"![{plot.title}, beside peers](benchmarks/{plot.name}.svg)"
        yield ""
        yield "Axes of values are logarithmic."
        yield ""
        for points in curves.values():
            yield from curve(points)
    yield "## Machines and versions"
    yield ""
    yield from machines(runs)
    yield "## Every script"
    yield ""
    for run in runs:
        yield from section(run, named[where(run)])


def over(figure: Figure) -> str:
    return f"{figure.value / figure.bar:.2f}" if figure.bar else "–"


def filled(text: str, runs: Sequence[Run], link: str) -> str:
    """A page with the tables that its comments ask for. ``link``: from there to the page of benchmarks."""

    def made(found: re.Match[str]) -> str:
        opening, script, gpu, texts, _, closing = found.groups()
        return opening + "\n".join(block(runs, script, re.findall(r'"([^"]+)"', texts), gpu is not None, link)) + closing

    return BLOCK.sub(made, text)


def block(runs: Sequence[Run], script: str, texts: Sequence[str], gpu: bool, link: str) -> Iterator[str]:
    chosen = [run for run in runs if run.script == script and (bool(run.machine.gpus) if gpu else not run.added)]
    figures = [each for run in chosen for each in run.figures if not each.series and (by_gpu(each, run) or not gpu)]
    yield ""
    if not figures:
        yield f"{NOT_MEASURED.capitalize()}: see [benchmarks]({link})."
        yield ""
        return
    run = chosen[0]
    rows: list[tuple[str, ...]] = []
    for text in texts or ("",):
        found = [(cell(each.figure), got(each), bar(each), beside(each)) for each in figures if text in each.figure]
        rows += [row for row in found or [(cell(text), NOT_MEASURED, "–", "")] if row not in rows]
    yield from table(("figure", "got", "bar", "beside it, same run"), rows)
    on = ", ".join([*run.machine.gpus, run.machine.processor])
    yield f"{run.day}, {cell(on)}, {run.machine.cores} cores; all of it: [benchmarks]({link})."
    yield ""
