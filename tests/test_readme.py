"""The code of the README and of docs/ runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


def blocks_of(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def test_readme_code_runs(capsys: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    for block in blocks_of(README):
        exec(compile(block, str(README), "exec"), scope)
    inputs, follow_up = scope["inputs"], scope["follow_up"]
    assert inputs.input_ids.tolist() == [2168, 151644, 872, 3170]  # type: ignore[attr-defined]
    assert inputs.positions.tolist() == [[7, 8, 9, 10]] * 3  # type: ignore[attr-defined]
    assert inputs.mrope_position_delta.tolist() == [[-2]]  # type: ignore[attr-defined]
    assert follow_up.parent is scope["reply"]  # type: ignore[attr-defined]
    assert [path.name for path in tmp_path.iterdir()] == ["sessions"]


PAGES = [page.name for page in sorted((ROOT / "docs").glob("*.md")) if blocks_of(page)]


@pytest.mark.parametrize("name", PAGES)
def test_the_code_of_a_page_runs(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    for block in blocks_of(ROOT / "docs" / name):
        exec(compile(block, name, "exec"), scope)
