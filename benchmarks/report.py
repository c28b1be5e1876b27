"""``make bench-report``: run benchmark scripts, keep what they print, and write the page and the tables that show it.

    python benchmarks/report.py tree.py durable.py   # run these, then write; what others printed stays
    python benchmarks/report.py --add h200.log       # add what scripts printed on another machine, then write
    python benchmarks/report.py                      # write again from what is kept

Scripts run one after the other, each in a process of its own. What they printed is kept after each, so a run that is cut off can be
gone on with. One that fails, or says that it cannot measure, is kept and shown as that. Exits with 1 where a bar is missed or a
script failed, with 2 where a log is refused, and then nothing is written.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
from harness import described
from report_page import filled, page
from report_plots import GPU, PLOTS, drawn
from report_runs import SCRIPTS, Malformed, Run, merged, parse, run_of, text, without_paths

ROOT = SCRIPTS.parent
LIMIT = 1800.0  # seconds of a script


def measured(script: Path, limit: float = LIMIT) -> Run:
    """Run a script and read what it prints. What goes wrong is in the run's ``failure``."""
    began = time.monotonic()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
    try:
        done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=limit, check=False)
        output, code, last = done.stdout, done.returncode, (done.stderr.strip() or "it says nothing").splitlines()[-1]
    except subprocess.TimeoutExpired:
        output, code, last = "", 2, f"it took longer than {limit:,.0f} s"
    print(output, end="", flush=True)
    run = run_of(described(script.name) | {"seconds": round(time.monotonic() - began, 1)})
    try:
        runs, remarks = parse(output, f"the output of {script.name}")
    except Malformed as error:
        return attrs.evolve(run, failure=without_paths(str(error)))
    if runs:
        run = attrs.evolve(run, **{name: getattr(runs[0], name) for name in ("machine", "versions", "day", "remarks", "figures")})
    failed = code != bool(run.missed)  # a script that misses a bar exits with 1
    said = tuple(without_paths(remark) for remark in (*run.remarks, *remarks))
    return attrs.evolve(run, remarks=said, failure=without_paths(last) if failed else "")


def write(runs: Sequence[Run], pages: Sequence[Path], folder: Path) -> None:
    """All that shows them: ``folder``'s page and pictures, and the tables of other pages."""
    shown = folder.with_suffix(".md")
    made = {path: filled(path.read_text(), runs, os.path.relpath(shown, path.parent)) for path in pages}
    made[shown] = page(runs)
    for path, new in made.items():
        path.write_text(new)
    for plot in (*PLOTS, GPU):
        picture = drawn(plot, runs)
        path = folder / f"{plot.name}.svg"
        if picture is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(picture)


def pages_of(root: Path) -> list[Path]:
    """Those that may ask for tables."""
    return [root / "README.md", *sorted(path for path in (root / "docs").rglob("*.md") if path.name != "benchmarks.md")]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run benchmarks, and write the page that shows them.")
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help="of benchmarks/, to be run; none: only write")
    parser.add_argument(
        "--add", type=Path, action="append", default=[], metavar="LOG", help="what scripts printed on another machine"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout whose README.md and docs/ are written")
    given = parser.parse_args(arguments)
    folder = given.root / "docs" / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "results.jsonl"
    try:
        runs, _ = parse(kept.read_text() if kept.exists() else "", kept.name)
        for log in given.add:
            added, _ = parse(log.read_text(), log.name)
            runs = merged(runs, [attrs.evolve(run, added=True) for run in added])
        for script in given.scripts:
            runs = merged(runs, [measured(SCRIPTS / script)])
            kept.write_text(text(runs))
        kept.write_text(text(runs))
        write(runs, pages_of(given.root), folder)
    except Malformed as error:
        print(error, file=sys.stderr)
        return 2
    return int(any(run.missed or run.failure for run in runs))


if __name__ == "__main__":
    sys.exit(main())
