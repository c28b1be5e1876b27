"""The page of benchmarks shows all that scripts printed, what missed and what failed too; the committed pages show nothing else."""

from __future__ import annotations

import json
import re
import shutil
from importlib.metadata import version
from pathlib import Path

import attrs
import pytest
import report
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from report import main, measured, pages_of
from report_page import BLOCK, cell, filled, page
from report_plots import GPU, PLOTS, drawn
from report_runs import Malformed, Run, about, merged, parse, text, without_paths

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
RUNS = (Path(__file__).parent / "golden" / "benchmark_runs.jsonl").read_text()
RUN, FIGURE = (json.loads(line) for line in RUNS.splitlines()[1:3])
MARKDOWN = MarkdownIt("commonmark").enable("table")
# Durations, rates and ratios that pages say, and that nobody measured: promises and limits.
LIMITS = (
    "within 5 %, and 15 % where",  # what the tests hold counted memory to
    "within\n50 ms, so nobody waits longer",
    "looks every 10 ms while",
    "tried again for about 30 seconds",
    "9.5 times fewer tokens for a prompt of 8k, 8 branches of 1k and 32 replies of 512",  # 311,296 of 32,768
)


def runs_of(log: str = RUNS) -> list[Run]:
    return parse(log, "log")[0]


def rows(markdown: str) -> list[list[str]]:
    """The cells of all tables, as a reader sees them."""
    found: list[list[str]] = []
    inside = False
    for token in MARKDOWN.parse(markdown):
        if token.type in ("tr_open", "tr_close"):
            inside = token.type == "tr_open"
            found += [[]] if inside else []
        elif token.type == "inline" and inside:
            found[-1].append("".join(each.content for each in token.children or ()))
    return found


# what is read ------------------------------------------------------------------------------------------------------------------


def test_a_log_is_read_and_written_again_without_a_loss() -> None:
    runs = runs_of()
    assert [(run.script, len(run.figures), len(run.missed), run.added) for run in runs] == [
        ("tree.py", 4, 1, False),
        ("durable.py", 0, 0, False),
        ("gpu_bridge.py", 2, 0, True),
    ]
    assert runs[0].remarks == ("not measured beside Other: it is not installed (PEERS=1)",)
    assert runs[1].failure == "OSError: no space left"
    assert runs_of(text(runs)) == runs
    assert parse("not measured: no GPU\n", "log") == ([], ["not measured: no GPU"])


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"figure": "cut off', "Unterminated string"),
        (json.dumps(FIGURE)[:-1], "Expecting ',' delimiter"),
        (json.dumps(FIGURE | {"value": "4"}), "value is no number: '4'"),
        (json.dumps(FIGURE | {"value": float("nan")}), "value is no number: nan"),
        (json.dumps(FIGURE | {"value": True}), "value is no number: True"),
        (json.dumps(FIGURE | {"bar": "6"}), "bar is no number"),
        (json.dumps(FIGURE | {"peers": {"list": None}}), "peers is no number: None"),
        (json.dumps(FIGURE | {"peers": []}), "'peers' must be"),
        (json.dumps(FIGURE | {"better": "same"}), "'better' must be in"),
        (json.dumps(FIGURE | {"unit": None}), "'unit' must be"),
        (json.dumps(FIGURE | {"passes": False}), "it says passes: False"),
        (json.dumps(FIGURE | {"colour": "red"}), "unexpected keyword argument 'colour'"),
        (
            json.dumps({name: each for name, each in FIGURE.items() if name != "value"}),
            "missing 1 required positional argument: 'value'",
        ),
        (json.dumps(RUN | {"machine": {"cores": 2}}), "'gpus'"),
        (json.dumps(RUN | {"versions": {"python": 3}}), "'python'|must be <class 'str'>"),
        (json.dumps(RUN | {"seconds": "long"}), "'seconds' must be"),
        ("{}", "missing"),
    ],
)
def test_a_line_that_no_script_prints_is_refused_with_its_number(line: str, why: str) -> None:
    with pytest.raises(Malformed, match=rf"^h200\.log, line {len(RUNS.splitlines()) + 1}: ") as error:
        parse(f"{RUNS}{line}\n", "h200.log")
    assert re.search(why, str(error.value))


def test_a_figure_of_no_run_is_refused() -> None:
    with pytest.raises(Malformed, match=r"^log, line 1: a figure before any line that says which script"):
        parse(json.dumps(FIGURE), "log")


def test_a_run_takes_the_place_of_the_one_before_and_what_was_added_stays() -> None:
    tree, durable, gpu = runs_of()
    here, again = attrs.evolve(gpu, added=False, figures=()), attrs.evolve(durable, failure="")
    assert merged([tree, durable, gpu], [again, here]) == [tree, again, gpu, here]
    assert merged([tree, durable, gpu], [attrs.evolve(gpu, seconds=1)]) == [tree, durable, attrs.evolve(gpu, seconds=1)]


def test_paths_are_left_out_of_what_is_kept() -> None:
    assert (
        without_paths("FileNotFoundError: '/some/where/deep/db.sqlite' of 3/4, 1/s") == "FileNotFoundError: 'db.sqlite' of 3/4, 1/s"
    )


# scripts -----------------------------------------------------------------------------------------------------------------------

SCRIPT = f"""import sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
from harness import Figure, report
"""


@pytest.mark.parametrize(
    ("body", "figures", "failure", "remarks"),
    [
        ("sys.exit(not report([Figure('a', 1, 'µs', 2)]))", 1, "", ()),
        ("sys.exit(not report([Figure('a', 3, 'µs', 2)]))", 1, "", ()),  # a bar that is missed is no failure
        ("report([Figure('a', 3, 'µs', 2)])", 1, "it says nothing", ()),  # but then it says so
        ("report([Figure('a', 1, 'µs', 2)])\nraise OSError('/no/such/place is full')", 1, "OSError: place is full", ()),
        ("import nothing_of_that_name", 0, "ModuleNotFoundError: No module named 'nothing_of_that_name'", ()),
        ("print('not measured: no GPU in /dev/gpu/0')", 0, "", ("not measured: no GPU in 0",)),
        ("print('not measured: no peer')\nsys.exit(not report([Figure('a', 1, 'µs')]))", 1, "", ("not measured: no peer",)),
        ("print('{\"figure\": ')", 0, "the output of script.py, line 1: Expecting value", ()),
        ("import time\ntime.sleep(60)", 0, "it took longer than 2 s", ()),
    ],
)
def test_a_script_is_kept_whatever_comes_of_it(
    tmp_path: Path, body: str, figures: int, failure: str, remarks: tuple[str, ...]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + body)
    run = measured(script, limit=2 if "sleep" in body else 60)
    assert (run.script, len(run.figures), run.remarks) == ("script.py", figures, remarks)
    assert run.failure.startswith(failure) and bool(run.failure) == bool(failure)
    assert run.machine.cores > 0 and run.versions["python"]
    shown = page([run])
    assert "script.py" in shown and (not failure or f"**It failed**, so not all was measured: {cell(run.failure)}" in shown)


def test_what_is_measured_is_kept_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two scripts, of which one fails: the other one's figures are there, and the exit says that not all is well."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "good.py").write_text(SCRIPT + "sys.exit(not report([Figure('a thing', 1.25, 'µs', 2)]))")
    (scripts / "bad.py").write_text("raise ValueError('it is broken')")
    monkeypatch.setattr(report, "SCRIPTS", scripts)
    root = checkout(tmp_path, "")
    assert main(["bad.py", "good.py", "--root", str(root)]) == 1
    shown = (root / "docs" / "benchmarks.md").read_text()
    assert "**It failed**, so not all was measured: ValueError: it is broken" in shown
    assert ["a thing", "1.25 µs", "≤ 2, met", "", ""] in rows(shown)
    (scripts / "bad.py").write_text(SCRIPT + "sys.exit(not report([Figure('another', 7, 's')]))")
    assert main(["bad.py", "--root", str(root)]) == 0
    shown = (root / "docs" / "benchmarks.md").read_text()
    assert "failed**" not in shown
    assert {"a thing", "another"} <= {row[0] for row in rows(shown)}


def test_make_runs_every_script() -> None:
    """All that measure something, but for the one that is for a GPU alone."""
    listed = re.search(r"^BENCHMARKS := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed is not None
    found = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert set(listed[1].replace("\\", "").split()) == found - {"report", "gpu_packing"}


# pages -------------------------------------------------------------------------------------------------------------------------


def checkout(tmp_path: Path, kept: str = text(runs_of()), **pages: str) -> Path:
    """The pages that are written, and what was kept."""
    root = tmp_path / "checkout"
    (root / "docs" / "benchmarks").mkdir(parents=True)
    (root / "README.md").write_text("# Read me\n")
    (root / "docs" / "benchmarks" / "results.jsonl").write_text(kept)
    for name, content in pages.items():
        (root / "docs" / f"{name}.md").write_text(content)
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_the_page_shows_every_figure_and_says_what_missed() -> None:
    shown = page(runs_of())
    found = rows(shown)
    assert ["append 16 tokens to a tip, 10 nodes, median", "4.57 µs", "≤ 6, met", "list copy: 12.3"] in [row[:4] for row in found]
    memory = "1M tokens in 1,000 turns, whole path read each turn: memory"
    assert [memory, "13.5 MB", "≤ 12, missed", "list copy: 4,004, torch.cat: 2,002", ""] in found
    assert ["tree.py", memory, "13.5 MB", "≤ 12, missed", "1.12", ""] in found
    assert "6 figures, 4 with a bar: 3 met, **1 missed**." in shown
    assert ["100", "0.21", "–", "0.6"] in found  # of the curve, where LangGraph had ended
    assert shown.count("–: it had taken more time") == 1
    assert "- durable.py: it failed: OSError: no space left" in shown
    assert "- tree.py: not measured beside Other: it is not installed (PEERS=1)" in shown
    assert ["processor", "Processor | <one>, 2 cores", "Xeon, 16 cores"] in found
    assert ["openai-agents", "not there", "not there"] in found
    assert "Machine B, 2026-11-30, 200 s, commit 0123456789ab+." in shown and "commit not known." in shown
    assert "This run took 2 minutes" in shown  # without what another machine took
    assert "Expected before the first run of this file, with the parts already measured" in shown
    assert "![GPU, beside peers](benchmarks/gpu.svg)" in shown


def test_without_a_gpu_the_page_says_so() -> None:
    shown = page(runs_of()[:2])
    assert "- whatever needs a GPU: no log of a machine that has one was added" in shown
    assert "## GPU\n\nNot measured.\n" in shown and "gpu.svg" not in shown


def test_notes_are_shown_as_they_are() -> None:
    shown = rows(page(runs_of()))
    assert "a | b <i>c</i> `d` $e$ *f* _g_ [h](i)" in {row[-1] for row in shown}


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=40))
def test_a_cell_shows_any_text(said: str) -> None:
    assert rows(f"| a | b |\n|---|---|\n| {cell(said)} | end |\n")[1:] == [[" ".join(said.split()), "end"]]


def test_every_series_and_bar_that_was_measured_is_drawn() -> None:
    pictures = {plot.name: drawn(plot, runs_of()) for plot in (*PLOTS, GPU)}
    assert {name for name, picture in pictures.items() if picture} == {"turns", "memory", "gpu"}
    turns, memory, gpu = ((pictures[name] or b"").decode() for name in ("turns", "memory", "gpu"))
    assert "LangGraph" in turns and "agents" in turns and "time of a turn" in turns
    assert "13.5 MB" in memory and "4,004 MB" in memory and "torch.cat" in memory
    assert "NVIDIA H200: 256" in gpu and "222 µs" in gpu and "CPU, host fill" not in gpu


def test_names_in_pictures_are_text() -> None:
    figure = attrs.evolve(runs_of()[0].figures[1], peers={"<script>$x_1$&": 3.0})
    picture = drawn(PLOTS[2], [attrs.evolve(runs_of()[0], figures=(figure,))])
    assert picture is not None and b">&lt;script&gt;$x_1$&amp;</text>" in picture


def test_the_same_runs_give_the_same_bytes(tmp_path: Path) -> None:
    block = '<!-- figures: tree.py "memory" "append" -->\n<!-- end of figures -->\n'
    root = checkout(tmp_path, page=f"# A page\n\n{block}\nand more\n")
    assert main(["--root", str(root)]) == 1
    once = contents(root)
    assert set(once) >= {"docs/benchmarks.md", "docs/benchmarks/turns.svg", "docs/benchmarks/memory.svg", "docs/benchmarks/gpu.svg"}
    assert main(["--root", str(root)]) == 1
    assert contents(root) == once
    assert main(["--root", str(checkout(tmp_path / "other", page=f"# A page\n\n{block}\nand more\n"))]) == 1
    assert contents(tmp_path / "other" / "checkout") == once


def test_a_log_of_another_machine_is_added_beside_what_is_there(tmp_path: Path) -> None:
    here, there = text(runs_of()[:2]), "\n".join(RUNS.splitlines()[-3:]).replace(', "added": true', "")
    root, log = checkout(tmp_path, here), tmp_path / "h200.log"
    log.write_text(f"a table for people\n{there}\n")
    main(["--add", str(log), "--root", str(root)])
    assert runs_of((root / "docs" / "benchmarks" / "results.jsonl").read_text()) == runs_of()
    assert (root / "docs" / "benchmarks.md").read_text() == page(runs_of())
    log.write_text(f"{there[:-20]}\n")
    before = contents(root)
    assert main(["--add", str(log), "--root", str(root)]) == 2
    assert contents(root) == before


def test_tables_of_pages_are_filled_and_stay_what_they_are() -> None:
    asked = 'a\n<!-- figures: tree.py "memory" "append" -->\nold\n<!-- end of figures -->\nb\n'
    made = filled(asked, runs_of(), "../benchmarks.md")
    assert filled(made, runs_of(), "../benchmarks.md") == made
    assert "old" not in made and made.startswith("a\n<!--") and made.endswith("-->\nb\n")
    assert [row[1] for row in rows(made)] == ["got", "13.5 MB", "4.57 µs"]
    assert "2026-12-01, Processor \\| &lt;one&gt;, 2 cores; all of it: [benchmarks](../benchmarks.md)." in made
    both = "".join(f"<!-- figures: gpu_bridge.py{of} -->\n<!-- end of figures -->\n" for of in (" on a GPU", ""))
    assert [row[0] for row in rows(filled(both, runs_of(), "x"))] == ["figure", "NVIDIA H200: 256 × 128 extend from nodes"]
    assert filled(both, runs_of(), "x").count("Not measured: see [benchmarks](x).") == 1


def test_what_a_page_asks_for_and_nobody_printed_was_not_measured() -> None:
    asked = '<!-- figures: tree.py "speed of light" "memory" -->\n<!-- end of figures -->\n'
    assert [row[:2] for row in rows(filled(asked, runs_of(), "x"))[1:]] == [
        ["speed of light", "not measured"],
        ["1M tokens in 1,000 turns, whole path read each turn: memory", "13.5 MB"],
    ]


# what is committed -------------------------------------------------------------------------------------------------------------


def committed() -> str:
    return (DOCS / "benchmarks" / "results.jsonl").read_text()


def test_committed_pages_show_what_was_measured(tmp_path: Path) -> None:
    """Byte for byte what they are made of; pictures too, where the version that drew them is here."""
    root = checkout(tmp_path, committed())
    shutil.copytree(DOCS, root / "docs", dirs_exist_ok=True)
    shutil.copy(ROOT / "README.md", root / "README.md")
    pinned = re.search(r"^matplotlib==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    left_out = () if version("matplotlib") == pinned[1] else (".svg",)
    before = {name: content for name, content in contents(root).items() if not name.endswith(left_out)}
    assert main(["--root", str(root)]) in (0, 1)
    assert {name: content for name, content in contents(root).items() if not name.endswith(left_out)} == before


def test_committed_tables_lack_nothing_but_what_a_gpu_did() -> None:
    """So a text that is in no figure's name is found."""
    blocks = [block for path in pages_of(ROOT) for block in BLOCK.finditer(path.read_text())]
    assert len(blocks) > 10
    assert not [block[1] for block in blocks if not block[3] and "not measured" in block[5].lower()]


def test_what_was_measured_is_of_this_benchmark_and_names_no_place() -> None:
    runs = runs_of(committed())
    assert all(about(run.script)[0] for run in runs)  # the scripts are there
    assert not re.search(r"(?<![\w.])/(?:[\w.-]+/)+", committed())
    assert any(run.figures for run in runs)


def test_no_page_shows_a_figure_that_was_measured_elsewhere() -> None:
    shown = re.compile(r"\d\s?(?:µs|ms|ns|[kMG]B/s|frames|seconds?|minutes?|s\b|x\b|times\b|%)")
    made = re.compile(r"<!-- figures: .*?<!-- end of figures -->|```.*?```|`[^`\n]+`|\"\d+x\"", re.DOTALL)
    found, unused = [], set(LIMITS)
    for path in pages_of(ROOT):
        prose = made.sub("", path.read_text())
        for limit in LIMITS:
            unused -= {limit} if limit in prose else set()
            prose = prose.replace(limit, "")
        found += [f"{path.name}: {prose[max(0, each.start() - 40) : each.end() + 10]}" for each in shown.finditer(prose)]
    assert not found and not unused
