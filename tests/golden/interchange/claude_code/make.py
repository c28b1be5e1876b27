"""Transcripts that Claude Code writes, with a model that answers from a script: python make.py CLAUDE FOLDER.

CLAUDE is the executable of npm's @anthropic-ai/claude-code; 2.1.197 made what lies beside this. It talks to a server on this
machine alone, in a home directory of its own. What stands in the folder then is a session (two calls in one answer, a picture that
a tool gave back, a failed call, a subagent, a compaction, a command), the subagent's transcript, and a fork of the session. Long
texts of Claude Code's own and paths of the machine are replaced.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

SESSION = "11111111-2222-4333-8444-555555555555"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
PROJECT = "/home/user/project"
LONG = 100  # characters from which on text is replaced


class Model:
    """What answers. ``asked``: the messages of each request."""

    def __init__(self, project: Path) -> None:
        self.project = project
        self.asked: list[list[Any]] = []
        self._numbers = count(1)

    def answer(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The blocks of an answer."""
        self.asked.append(body["messages"])
        number = next(self._numbers)
        content = body["messages"][-1]["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        said = "\n".join(part.get("text", "") for part in parts)
        thought = {"type": "thinking", "thinking": f"Thought {number}.", "signature": "c2lnbmVk"}
        if "<summary>" in said:
            return [{"type": "text", "text": "<analysis>.</analysis><summary>Two files were looked at.</summary>"}]
        if any(part["type"] == "tool_result" for part in parts):
            return [thought, {"type": "text", "text": f"Done {number}."}]
        calls = {
            "TOOLS": [
                ("Bash", {"command": "echo héllo", "description": "Say hello"}),
                ("Read", {"file_path": str(self.project / "pixel.png")}),
                ("Read", {"file_path": str(self.project / "nothing.txt")}),
            ],
            "AGENT": [("Agent", {"description": "Look", "prompt": "Say something", "subagent_type": "general-purpose"})],
        }
        for word, wanted in calls.items():
            if word in said:
                uses = [
                    {"type": "tool_use", "id": f"toolu_{number}{at}", "name": n, "input": i} for at, (n, i) in enumerate(wanted)
                ]
                sealed = {"type": "redacted_thinking", "data": "c2VhbGVk"}
                return [thought, sealed, {"type": "text", "text": "I call."}, *uses]
        return [{"type": "text", "text": f"Answer {number}."}]


def events(body: dict[str, Any], blocks: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """An answer as the API streams it."""
    usage = {"input_tokens": 10, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 1}
    name = f"msg_{os.urandom(10).hex()}"
    begun = {"id": name, "type": "message", "role": "assistant", "model": body["model"], "content": []}
    yield "message_start", {"message": {**begun, "stop_reason": None, "stop_sequence": None, "usage": usage}}
    for index, block in enumerate(blocks):
        match block["type"]:
            case "text":
                start, deltas = {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
            case "thinking":
                start = {**block, "thinking": "", "signature": ""}
                deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}]
                deltas.append({"type": "signature_delta", "signature": block["signature"]})
            case "tool_use":
                start, deltas = {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
            case _:
                start, deltas = block, []
        yield "content_block_start", {"index": index, "content_block": start}
        for delta in deltas:
            yield "content_block_delta", {"index": index, "delta": delta}
        yield "content_block_stop", {"index": index}
    reason = "tool_use" if blocks[-1]["type"] == "tool_use" else "end_turn"
    yield "message_delta", {"delta": {"stop_reason": reason, "stop_sequence": None}, "usage": {"output_tokens": 20}}
    yield "message_stop", {}


class Claude:
    """Claude Code in a home of its own under ``folder``. ``project``: where it works; ``sessions``: where it writes."""

    def __init__(self, executable: str, folder: Path) -> None:
        self.executable = executable
        self.home = folder / "home"
        self.project = folder / "project"
        self.home.mkdir()
        self.project.mkdir()
        (self.project / "pixel.png").write_bytes(base64.b64decode(PIXEL))
        self.model = Model(self.project)
        self.address = ""

    @property
    def sessions(self) -> Path:
        """The folder of the project's sessions, by its path as Claude Code writes it."""
        name = "".join(letter if letter.isalnum() else "-" for letter in str(self.project.resolve()))
        return self.home / ".claude" / "projects" / name

    @contextmanager
    def serving(self) -> Iterator[None]:
        """While its model answers."""
        model = self.model

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.reply("application/json", b"{}")

            do_HEAD = do_GET

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}")
                if "messages" not in body or "count_tokens" in self.path:
                    self.reply("application/json", b'{"input_tokens": 100}')
                    return
                told = events(body, model.answer(body))
                lines = (f"event: {kind}\ndata: {json.dumps({'type': kind, **said})}\n\n" for kind, said in told)
                self.reply("text/event-stream", "".join(lines).encode())

            def reply(self, kind: str, data: bytes) -> None:
                headers = {"content-type": kind, "content-length": len(data), "request-id": f"req_{os.urandom(8).hex()}"}
                self.send_response(200)
                for name, value in headers.items():
                    self.send_header(name, str(value))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()

    def run(self, prompt: str, *options: str) -> str:
        """One prompt, without a terminal; what it prints."""
        environment = {
            "HOME": str(self.home),
            "PATH": "/usr/bin:/bin",
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_BASE_URL": self.address,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        }
        command = [self.executable, "-p", prompt, *options, "--allowedTools", "Bash,Read,Agent"]
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        done = subprocess.run(command, cwd=self.project, env=environment, timeout=120, check=True, **pipes)
        return str(done.stdout)

    def converse(self) -> None:
        """A session with everything, and a fork of it."""
        self.run("Hello", "--session-id", SESSION)
        for prompt in ("Call TOOLS", "Ask an AGENT", "/compact", "After it", "/cost"):
            self.run(prompt, "--resume", SESSION)
        self.run("A fork", "--resume", SESSION, "--fork-session")


def shortened(value: Any, paths: dict[str, str]) -> Any:
    """A line without what is Claude Code's prose or this machine's."""
    if isinstance(value, dict):
        return {key: shortened(each, paths) for key, each in value.items()}
    if isinstance(value, list):
        return [shortened(each, paths) for each in value]
    if not isinstance(value, str) or value == PIXEL:
        return value
    for path, other in paths.items():
        value = value.replace(path, other)
    return value if len(value) < LONG else f"({len(value)} characters)"


def main(executable: str, folder: Path) -> None:
    """The transcripts, shortened, in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        claude = Claude(executable, Path(place).resolve())
        with claude.serving():
            claude.converse()
        paths = {str(claude.project): PROJECT, str(claude.home): "/home/user"}
        for file in sorted(claude.sessions.rglob("*.jsonl")):
            name = "session" if file.stem == SESSION else "subagent" if file.stem.startswith("agent-") else "fork"
            with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as out:
                for line in file.read_text(encoding="utf-8").splitlines():
                    out.write(json.dumps(shortened(json.loads(line), paths), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
