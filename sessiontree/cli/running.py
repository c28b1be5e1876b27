"""``replay``: what was generated, and what it takes to run it again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from sessiontree.cli.facts import item_facts, number, span_facts
from sessiontree.cli.output import Code, plain, safe, shown, stream_json, styled, write
from sessiontree.cli.source import Json, Lenient, OneSession, Source, Tokenizer, reading, session_named
from sessiontree.cli.words import Words, words
from sessiontree.errors import CorruptTree
from sessiontree.media import MediaItem
from sessiontree.node import Node
from sessiontree.render import _count, _name
from sessiontree.replay import ReplayStep
from sessiontree.replay import replay as steps_of


def replay(
    store: Source,
    session: OneSession = None,
    inputs: Annotated[
        bool, typer.Option("--inputs", help="With --json: also the whole requests, token ids and positions as decoded.")
    ] = False,
    tokenizer: Tokenizer = None,
    lenient: Lenient = False,
    as_json: Json = False,
) -> int:
    """List what was generated, and its requests.

    Every recorded generation in commit order, with the request that made it; of all sessions, unless one is named. An engine
    runs them again: examples/replay.py does it with the model of the demo. Exit code 1: some cannot be run again, and their
    lines say why. Generations that were aborted were never recorded.
    """
    text = words(tokenizer)
    with reading(store, lenient) as source:
        count = problems = 0
        held = _Held()

        def counted() -> Iterator[ReplayStep]:
            nonlocal count, problems
            for step in steps_of(source if session is None else session_named(source, session)):
                count += 1
                problems += held.problem(step) is not None
                yield step

        if as_json:
            stream_json({"path": shown(store)}, "steps", (_facts(step, held.problem(step), inputs, text) for step in counted()))
        else:
            for step in counted():
                write(_line(step, held.problem(step), text))
            can = "all can be run again" if not problems else f"{problems:,} cannot be run again"
            write(f"{_count(count, 'generation')}, {can}; what was aborted was never recorded")
    return Code.FOUND if problems else Code.FINE


class _Held:
    """Whether features that a request takes are not only there, but as they were put. Each is read once."""

    def __init__(self) -> None:
        self._damage: dict[tuple[Any, ...], str | None] = {}

    def problem(self, step: ReplayStep) -> str | None:
        """Why a step cannot be run again; None where it can."""
        if step.problem is not None:
            return step.problem
        return next(filter(None, (self._damaged(step.node, item) for item in step.needed_items)), None)

    def _damaged(self, node: Node, item: MediaItem) -> str | None:
        content, features = item.content(), node.feature_store
        if features is not None and content not in self._damage:
            self._damage[content] = None
            try:
                features.kept(item)
            except CorruptTree as error:
                self._damage[content] = f"the features of {item} are damaged: {error}"
        return self._damage.get(content)


def _line(step: ReplayStep, problem: str | None, text: Words | None) -> str:
    node = step.node
    line = f"{step.number:>4}  {_name(step.session_id)}/{node.id.hex()[:8]}  {step.prompt.stop:,} tokens → {len(node):,}"
    if step.finish_reason is not None:
        line += f", {_name(step.finish_reason)}"
    if step.tail_policy == "drop_last":
        line += ", last one dropped"
    if step.beginning_of is not None:
        line += f", beginning of {step.beginning_of.node_id.hex()[:8]}"
    if step.key is not None:
        line += f", key {_name(step.key)}"
    if step.needed_items:
        line += f", {_count(len(step.needed_items), 'item')} needed"
    if text is not None:
        line += "  " + styled(text.beginning(node, 40), italic=True)
    return line if problem is None else line + styled(f"  ✗ {safe(problem)}", fg="red")


def _facts(step: ReplayStep, problem: str | None, inputs: bool, text: Words | None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "number": step.number,
        "session": step.session_id,
        "node": step.node.id.hex(),
        "prompt": step.prompt.id.hex(),
        "prompt_tokens": step.prompt.stop,
        "mrope_position_delta": number(step.mrope_position_delta),
        "output_ids": step.output_ids.tolist(),
        "role": step.role,
        "key": step.key,
        "finish_reason": step.finish_reason,
        "tail_policy": step.tail_policy,
        "beginning_of": None if step.beginning_of is None else step.beginning_of.node_id.hex(),
        "metadata": plain(step.metadata),
        "needed": [item_facts(item) for item in step.needed_items],
        "missing": [item_facts(item) for item in step.missing],
        "problem": problem,
    }
    if inputs:
        facts |= {
            "scheme": step.node.scheme.name,
            "input_ids": step.input_ids.tolist(),
            "positions": step.positions.tolist(),
            "output_positions": step.output_positions.tolist(),
            "media": span_facts(step.media_spans),
        }
    return facts if text is None else facts | {"text": text.text(step.node)}
