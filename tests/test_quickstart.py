"""The demo passes, and fails when the positions of replies are planted one off."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from sessiontree import PositionScheme, PositionState
from sessiontree.positions.runs import Runs


@pytest.fixture
def quickstart(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    monkeypatch.syspath_prepend(str(request.config.rootpath / "examples"))
    return importlib.import_module("quickstart")


def test_quickstart_agrees_with_transformers(quickstart: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert quickstart.main([]) == 0
    assert "Everything agrees" in capsys.readouterr().out


@pytest.mark.parametrize("off", [-1, 1])
def test_quickstart_sees_replies_one_position_off(
    quickstart: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], off: int
) -> None:
    right = PositionScheme.plan_decode

    def wrong(scheme: PositionScheme, state: PositionState, count: int) -> tuple[Runs, PositionState]:
        runs, after = right(scheme, state, count)
        assert isinstance(runs, int)
        return runs + off, after

    monkeypatch.setattr(PositionScheme, "plan_decode", wrong)
    assert quickstart.main([]) == 1
    assert "FAILED" in capsys.readouterr().out
