"""What the README does with curl and with the openai client, done to a server that runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mini_server import Server

README = Path(__file__).parent.parent / "README.md"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("store") / "s") as server:
        yield server


def section(language: str, server: Server) -> str:
    text = README.read_text().split("\n## Serve it\n")[1].split("\n## ")[0]
    block: str
    (block,) = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return block.replace("localhost:8000", server.url.removeprefix("http://"))


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_the_readme_by_curl(server: Server) -> None:
    script = section("sh", server).replace("curl -s", "curl -sS --fail-with-body -w '\\n'")
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    opened, one, two, other, fork, copy, closed = map(json.loads, done.stdout.split("\n")[:-1])
    assert (opened, closed) == ("chat", {})
    assert two["meta_info"]["prompt_tokens"] == one["meta_info"]["prompt_tokens"] + 8 + 3
    assert two["output_ids"] != other["output_ids"]
    assert fork == {"session_id": "copy", "rid": "two", "tokens": two["meta_info"]["prompt_tokens"] + 8}
    assert [request["rid"] for request in copy["requests"]] == ["one", "two"]


def test_the_readme_by_the_openai_client(server: Server) -> None:
    done = subprocess.run([sys.executable, "-c", section("py", server)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.split("\n")[:-1]
    assert int(first) >= 16 and int(last.split()[-1]) >= 16
