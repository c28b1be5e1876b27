"""Random tests draw the same in every run, so that a run of a commit says something about it; at soak length they do not."""

from __future__ import annotations

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, rule, run_state_machine_as_test

from tests.conftest import SOAK

ROOT = Path(__file__).parents[1]


class Steps(RuleBasedStateMachine):
    """Writes down what it is told to do."""

    seen: list[Any] = []  # noqa: RUF012

    made = Bundle("made")

    @rule(target=made, value=st.integers() | st.text())
    def make(self, value: int | str) -> Any:
        self.seen.append(value)
        return value

    @rule(value=made, times=st.integers(0, 9))
    def look(self, value: Any, times: int) -> None:
        self.seen.append((value, times))

    @rule(value=consumes(made))
    def take(self, value: Any) -> None:
        self.seen.append([value])


def drawn() -> str:
    """A digest of what a test, and a machine in both ways to run one, draw."""
    seen: list[Any] = []

    @settings(max_examples=30)
    @given(st.lists(st.integers() | st.text(), min_size=40))
    def draw(values: list[Any]) -> None:
        seen.append(values)

    draw()
    Steps.seen = seen
    run_state_machine_as_test(Steps, settings=settings(max_examples=10, stateful_step_count=20))
    case = Steps.TestCase
    case.settings = settings(max_examples=10)
    case("runTest").debug()
    assert len(seen) > 100
    return sha256(repr(seen).encode()).hexdigest()


@pytest.mark.parametrize("soak", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_every_process_draws_the_same_but_at_soak_length(soak: bool) -> None:
    found = []
    for number in range(3):
        code = "from tests.test_drawing import drawn\nprint(drawn())"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(number), "SESSIONTREE_SOAK": str(int(soak))}
        done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout)
    assert len(set(found)) == (3 if soak else 1)


def test_all_that_hypothesis_draws_constants_from_is_loaded_from_the_start() -> None:
    code = "import sys, tests.conftest\nprint(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for package in ("sessiontree", "engine_bridge"):
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            assert name in loaded or name.endswith("__main__")


def test_every_test_follows_the_profile(request: pytest.FixtureRequest) -> None:
    """Of those that are run here: `make test` runs them all."""
    followed = 0
    for item in request.session.items:
        case = getattr(item, "cls", None)
        chosen = getattr(getattr(item, "obj", None), "_hypothesis_internal_use_settings", None) or getattr(case, "settings", None)
        if isinstance(chosen, settings):
            assert chosen.derandomize is not SOAK, item.nodeid
            assert chosen.deadline is None, item.nodeid
            followed += 1
    assert settings().derandomize is not SOAK and settings().deadline is None
    assert followed or len(request.session.items) < 100
