"""Code of the documentation that is a part of something: each excerpt runs as it stands, in what it is a part of.

Pages whose code is whole run in ``test_readme.py``, those of the interchange in ``test_interchange.py``, the HTTP client's in
``test_mini_scheduler_page.py``.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import typer

import engine_bridge
import sessiontree
from sessiontree import Node, Session, SessionStore, positions
from sessiontree.annotations import Spans
from sessiontree.cli.app import app
from tests.sglang_engine import engine, needs_sglang
from tests.sglang_scheduler import configured

ROOT = Path(__file__).parent.parent
#: Pages whose excerpts other modules run.
ELSEWHERE = {"docs/interchange.md", "docs/tutorials/machines.md", "docs/tutorials/sglang.md"}

#: What the tests above take.
HERE = {
    ("README.md", 'with SessionStore.connect("postgresql://me@db/chats")'),
    ("README.md", "reply = draft.commit"),
    ("docs/shared_stores.md", 'with SessionStore.connect("postgresql://me@db/chats")'),
    ("docs/backends.md", "SessionStore.connect(sqlite_backend"),
    ("docs/engines.md", "from engine_bridge import to_sglang"),
    ("docs/engines.md", "from engine_bridge.adapters.sglang import"),
    ("docs/engines.md", "from engine_bridge import to_vllm, to_vllm_prompt"),
    ("docs/engines.md", "handed = 0"),
    ("docs/engines.md", "inputs = to_transformers([one, two]"),
}


def excerpt(page: str, beginning: str) -> str:
    """The one excerpt of a page that begins so."""
    assert (page, beginning) in HERE
    (found,) = (block for block in excerpts(page) if block.startswith(beginning))
    return found


def excerpts(page: str) -> list[str]:
    return re.findall(r"^```py\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def run(code: str, **scope: Any) -> dict[str, Any]:
    scope = {**vars(sessiontree), **vars(engine_bridge), "scheme": positions.scheme, **scope}
    exec(compile(code, "excerpt", "exec"), scope)
    return scope


def chat(store: SessionStore | None = None, name: str = "chat", rule: str = "text@hf5") -> tuple[Session, Node]:
    session = (store or SessionStore.in_memory()).create(name, scheme=rule)
    return session, session.append(session.root, [1, 2, 3, 4], role="user", head="main")


@pytest.mark.parametrize("page", ["README.md", "docs/shared_stores.md"])
def test_a_turn_in_a_database(page: str, postgres_url: str) -> None:
    with SessionStore.connect(postgres_url) as store:
        chat(store, "chat-1")
    code = excerpt(page, 'with SessionStore.connect("postgresql://me@db/chats")').replace("postgresql://me@db/chats", postgres_url)
    run(code, ids=[5, 6, 7])
    with SessionStore.connect(postgres_url, read_only=True) as store:
        assert store.get("chat-1").head("main").node.input_ids().tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_a_backend_of_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")
    import sqlite_backend

    store = eval(
        excerpt("docs/backends.md", "SessionStore.connect(sqlite_backend"), vars(sessiontree) | {"sqlite_backend": sqlite_backend}
    )
    with store:
        store.create("chat", scheme="text@hf5", namespace={"tenant": "acme"})
    assert (tmp_path / "chats.db").exists()


def test_what_is_trained_on() -> None:
    store = SessionStore.in_memory()
    session, question = chat(store)
    draft = session.draft(question, role="assistant")
    draft.extend(list(range(64)))
    logprobs = np.full(64, -0.5, np.float32)
    code = excerpt("README.md", "reply = draft.commit")
    found = run(code, draft=draft, session=session, store=store, logprobs=logprobs, Spans=Spans, rank=0, **vars(training()))
    assert found["reply"].finish_reason == "stop" and session.annotation(found["reply"], "reward") == 1.0


def training() -> SimpleNamespace:
    from sessiontree.rollouts import groups

    return SimpleNamespace(groups=groups, pack_tree=engine_bridge.pack_tree)


@needs_sglang
def test_requests_of_sglang() -> None:
    engine("sglang.srt.managers.io_struct")
    _, node = chat(rule="text@sglang")
    found = run(excerpt("docs/engines.md", "from engine_bridge import to_sglang"), node=node, held=2)
    assert (list(found["request"].input_ids), list(found["turn"].input_ids)) == ([1, 2, 3, 4], [3, 4])


@needs_sglang
def test_sessions_of_sglang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine("sglang.srt.managers.io_struct")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}))
    found = run(excerpt("docs/engines.md", "from engine_bridge.adapters.sglang import"), json=json, Path=Path)
    with configured():
        controller = found["SessionController"](MagicMock())
    assert controller.store.sessions() == () and found["rule"].name.endswith("sglang")
    controller.store.close()


def test_requests_of_vllm() -> None:
    _, node = chat(rule="text@vllm")
    asked, generated = MagicMock(), MagicMock()
    run(
        excerpt("docs/engines.md", "from engine_bridge import to_vllm, to_vllm_prompt"),
        node=node,
        engine=asked,
        llm=generated,
        request_id="r",
        sampling_params=None,
    )
    assert asked.add_request.call_args.args[1]["prompt_token_ids"] == [1, 2, 3, 4]
    assert generated.generate.call_args.args[0]["prompt_token_ids"] == [1, 2, 3, 4]


def test_a_streaming_session_of_vllm() -> None:
    """Each chunk is what the engine has not had: the reply's last token comes with the next turn."""
    session, _ = chat(rule="text@vllm")
    turns = iter([SimpleNamespace(token_ids=[5, 6], media=()), SimpleNamespace(token_ids=[9], media=()), None])

    async def next_turn() -> Any:
        return next(turns)

    async def sampled_ids() -> list[int]:
        return [7, 8]

    body = textwrap.indent(excerpt("docs/engines.md", "handed = 0"), "    ")
    scope = run(
        f"async def chunks():\n    node = session.root\n{body}",
        session=session,
        next_turn=next_turn,
        sampled_ids=sampled_ids,
        prompt_of=__import__("engine_bridge.policies", fromlist=["prompt_of"]).prompt_of,
        StreamingInput=lambda prompt, sampling_params: prompt["prompt_token_ids"],
    )

    async def collect() -> list[list[int]]:
        return [chunk async for chunk in scope["chunks"]()]

    assert asyncio.run(collect()) == [[5, 6], [9]]


def test_a_batch_of_transformers() -> None:
    """Two paths of unequal length and a decode step: the logits are those of each alone."""
    import torch
    from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    model = Qwen2ForCausalLM(config).eval()
    session, one = chat()
    two = session.append(one, [5, 6, 7])
    drafts = [session.draft(node) for node in (one, two)]
    for draft in drafts:
        draft.extend([9])
    with torch.no_grad():
        found = run(
            excerpt("docs/engines.md", "inputs = to_transformers([one, two]"),
            one=one,
            two=two,
            drafts=drafts,
            model=model,
            pixels=lambda rows: {},
            cache=DynamicCache(config=config),
        )
        alone = model(input_ids=torch.tensor([two.input_ids().tolist()], dtype=torch.long)).logits[0, -1]
    row = found["row"]
    assert torch.allclose(found["logits"][row.row, row.stop - 1], alone, atol=1e-5)
    assert found["inputs"]["input_ids"].tolist() == [[9], [9]]


def test_every_excerpt_is_run_by_some_test() -> None:
    """One that nobody runs is added here, or is whole and says ``python``."""
    pages = ["README.md", *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md")))]
    left = [
        (page, block.splitlines()[0])
        for page in pages
        if page not in ELSEWHERE
        for block in excerpts(page)
        if not any(page == known and block.startswith(beginning) for known, beginning in HERE)
    ]
    assert left == [("README.md", "from openai import OpenAI")]  # test_mini_scheduler_page.py


def commands() -> list[tuple[str, list[str]]]:
    """(page, arguments) of each `sessiontree` in the shell's blocks."""
    pages = ["README.md", *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md")))]
    return [
        (page, shlex.split(line, comments=True)[1:])
        for page in pages
        for block in re.findall(r"^```sh\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
        if line.startswith("sessiontree ")
    ]


def test_every_command_in_the_documentation_is_one() -> None:
    """With such arguments and options. What they do, the tests of the pages say that are about them."""
    group: Any = typer.main.get_command(app)
    found = commands()
    assert len(found) > 40
    for page, arguments in found:
        with group.make_context("sessiontree", list(arguments)) as context:
            name, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
            assert command is not None, (page, arguments)
            command.make_context(name, rest, parent=context).close()  # raises UsageError for what there is not
