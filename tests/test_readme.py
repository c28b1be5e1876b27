"""The code of the README and of docs/ runs as it stands.

Blocks fenced as ``python`` run in any environment of the tests, those of a page one after another in one namespace and directory.
One with a title is a file that later blocks run. Blocks fenced as ``py`` need more: those of the tutorials on PostgreSQL and SGLang
are run where that is installed; those of other pages have names that are the reader's own: see `test_docs_excerpts.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.sglang_engine import engine, needs_sglang
from tests.sglang_scheduler import Engine, configured

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"


def blocks_of(page: Path, fences: str = "python") -> list[tuple[str, str]]:
    """(title, code) of each block of a page; no title is "". ``fences``: a pattern."""
    return re.findall(rf'^```(?:{fences})(?: title="(.+)")?\n(.*?)^```$', page.read_text(), re.DOTALL | re.MULTILINE)


def run(page: Path, scope: dict[str, object], fences: str = "python") -> None:
    """Run the blocks of a page here, as its reader would."""
    for title, block in blocks_of(page, fences):
        if title:
            Path(title).write_text(block)
        else:
            exec(compile(block, str(page), "exec"), scope)


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty one, from which processes that a page starts find the library."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def test_readme_code_runs(directory: Path) -> None:
    scope: dict[str, object] = {}
    run(README, scope)
    inputs, follow_up = scope["inputs"], scope["follow_up"]
    assert inputs.input_ids.tolist() == [2168, 151644, 872, 3170]  # type: ignore[attr-defined]
    assert inputs.positions.tolist() == [[7, 8, 9, 10]] * 3  # type: ignore[attr-defined]
    assert inputs.mrope_position_delta.tolist() == [[-2]]  # type: ignore[attr-defined]
    assert follow_up.parent is scope["reply"]  # type: ignore[attr-defined]
    assert [path.name for path in directory.iterdir()] == ["sessions"]


PAGES = [str(page.relative_to(DOCS)) for page in sorted(DOCS.rglob("*.md")) if blocks_of(page)]


@pytest.mark.parametrize("name", PAGES)
def test_the_code_of_a_page_runs(name: str) -> None:
    run(DOCS / name, {})


def test_all_code_of_the_page_on_postgresql_runs(postgres_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(DOCS / "tutorials/machines.md", {"url": postgres_url}, "python|py")
    assert "went on elsewhere" in capsys.readouterr().out


@needs_sglang
def test_all_code_of_the_page_on_sglang_runs_and_its_controller_serves() -> None:
    engine("sglang.srt.managers.io_struct")  # with stubs of what is not installed
    scope: dict[str, Any] = {}
    run(DOCS / "tutorials/sglang.md", scope, "python|py")
    with configured():
        controller = scope["SessionController"](MagicMock())
        scheduler = Engine(controller)
        assert scheduler.open("chat")
        scheduler.turn("r1", [5, 6], session_id="chat")
        for rid, ids in (("r2", [7]), ("r3", [8, 9])):  # a branch each from r1
            scheduler.turn(rid, ids, session_id="chat", after="r1")
    heads = controller.store.get("chat").heads
    assert heads["rid r2"].path()[2] == heads["rid r3"].path()[2] == heads["rid r1"]


@pytest.mark.parametrize("name", ["fork", "scheduler", "persist", "train"])
def test_a_tutorial_is_all_run(name: str) -> None:
    page = DOCS / "tutorials" / f"{name}.md"
    assert len(blocks_of(page)) == page.read_text().count("```") // 2 >= 3
