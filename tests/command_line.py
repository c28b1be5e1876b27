"""What the tests of the command line share: running it, here or in a process of its own, and a store to run it on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from sessiontree import Node, Session, SessionStore
from sessiontree.cli.app import app
from tests.toy import a_turn, media, toy_scheme

ROOT = Path(__file__).parent.parent


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments], prog_name="sessiontree", catch_exceptions=False)


def text_of(*arguments: object, code: int = 0) -> str:
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert code not in (0, 1) or result.stderr == ""
    return result.stdout


def json_of(*arguments: object, code: int = 0) -> Any:
    return json.loads(text_of(*arguments, "--json", code=code))


def generate(session: Session, parent: Node, *tokens: int, **options: Any) -> Node:
    draft = session.draft(parent, **options)
    draft.extend(tokens)
    return draft.commit("stop")


def conversation(store: SessionStore, name: str = "chat-1") -> Session:
    """A question with an image, two replies, the second gone on from; heads "main" and "first"."""
    session = store.create(name, scheme=toy_scheme(), namespace="acme", model_fingerprint="tiny")
    asked = a_turn(number=1)
    question = session.append(session.root, asked.tokens, media=media(asked), metadata={"at": 1.5})
    first = generate(session, question, 7, 8, key="first")
    second = generate(session, question, 7, 9, 10, key="other", metadata={"tool_calls": ["a"]})
    result = session.append(second, [11], role="tool", metadata={"tool_call_id": "a"})
    session.set_head("main", generate(session, result, 12, key="last"))
    session.set_head("first", first)
    return session


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}


def sessiontree(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sessiontree", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), check=False, **options)


def flip(path: Path, what: bytes) -> None:
    """One bit of the record that holds it."""
    (segment,) = (path / "segments").glob("*.seg")
    data = bytearray(segment.read_bytes())
    assert data.count(what) == 1
    data[data.index(what)] ^= 1
    segment.write_bytes(data)
