"""The demo passes, and fails when the positions of replies are planted one off."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from sessiontree import PositionScheme, PositionState, SessionStore
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


KILLED: str = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import quickstart

left = int(sys.argv[3])
feed = quickstart.Engine.feed

def feed_or_die(engine, request):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    feed(engine, request)

quickstart.Engine.feed = feed_or_die
sys.exit(quickstart.main(["--store", sys.argv[2]]))
"""


def what_it_left(path: Path) -> dict[str, tuple[bytes, list[int]]]:
    with SessionStore.open(path, read_only=True) as store:
        return {name: (node.id, node.input_ids().tolist()) for name, node in store.get("quickstart").heads.items()}


@pytest.mark.parametrize("feeds", [2, pytest.param(11, marks=pytest.mark.soak)])
def test_quickstart_killed_half_way_goes_on_with_the_same_outputs(
    quickstart: ModuleType, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], tmp_path: Path, feeds: int
) -> None:
    """Killed in the middle of the second reply, and of one that is streamed. It is another process that goes on: this one."""
    root = request.config.rootpath
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    killed, whole = str(tmp_path / "killed"), str(tmp_path / "whole")
    command = [sys.executable, "-c", KILLED, str(root / "examples"), killed, str(feeds)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert quickstart.main(["--store", killed]) == 0
    assert "replies were in the store" in capsys.readouterr().out
    assert quickstart.main(["--store", whole]) == 0
    assert "replies were in the store" not in capsys.readouterr().out
    assert what_it_left(Path(killed)) == what_it_left(Path(whole))
