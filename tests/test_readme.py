"""The README's code runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def test_readme_code_runs(capsys: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert blocks
    scope: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), scope)
    inputs, follow_up = scope["inputs"], scope["follow_up"]
    assert inputs.input_ids.tolist() == [2168, 151644, 872, 3170]  # type: ignore[attr-defined]
    assert inputs.positions.tolist() == [[7, 8, 9, 10]] * 3  # type: ignore[attr-defined]
    assert inputs.mrope_position_delta.tolist() == [[-2]]  # type: ignore[attr-defined]
    assert follow_up.parent is scope["reply"]  # type: ignore[attr-defined]
    assert [path.name for path in tmp_path.iterdir()] == ["sessions"]
