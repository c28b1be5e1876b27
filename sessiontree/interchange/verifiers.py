"""Rollouts of the library ``verifiers``: a JSON line for each, ``traces.jsonl`` since 0.2 and ``results.jsonl`` up to 0.3.

A line of ``traces.jsonl`` is an episode with its traces (a trace alone, in 0.2). A trace is a tree already: nodes, each a message
with the tokens that it adds to those before it, so a node becomes a turn. A line of ``results.jsonl`` is a rollout of steps that
say all of their prompt anew: see :mod:`sessiontree.interchange.verifiers_rollouts`. Conversations of other formats are written as
episodes of one trace, which hold trees.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np

from sessiontree.annotations import ADVANTAGE, LOGPROBS, LOSS_MASK, LOSS_WEIGHT, MAX_NAME, REF_LOGPROBS, REWARD, TRAIN
from sessiontree.interchange import verifiers_rollouts as rollouts
from sessiontree.interchange.conversations import Conversation, Tree, Turn
from sessiontree.interchange.differences import NOWHERE, difference, put_over
from sessiontree.interchange.formats import Format
from sessiontree.interchange.losses import Losses
from sessiontree.interchange.openai import with_images
from sessiontree.interchange.per_token import Mask, checked_ids, ids_of, numbers, over, trained_mask, under
from sessiontree.interchange.source import SourceFile, expect
from sessiontree.interchange.verifiers_messages import from_verifiers, number, to_verifiers, tools_from, tools_to
from sessiontree.interchange.words import is_text

#: Lists of numbers, one for each sampled token, and the annotations that they become.
_SAMPLED: Final = {
    "logprobs": LOGPROBS,
    "advantages": ADVANTAGE,
    "reference_logprobs": REF_LOGPROBS,
    "trainer_logprobs": "trainer_logprobs",
    "entropies": "entropies",
}
#: Of these, each line has some.
_OF_ROLLOUTS: Final = {"traces", "nodes", "prompt", "completion", "trajectory"}
_CONTENT: Final = "is_content"
_WEIGHT: Final = f"{LOSS_WEIGHT}/"
_KNOWN: Final = {*_SAMPLED.values(), _CONTENT, LOSS_MASK, REWARD, TRAIN}


def read(file: SourceFile, losses: Losses) -> Iterator[Conversation]:
    """A conversation for each line, called by the id of its episode or trace, or else by its number."""
    for place, line in file.lines(losses):
        if not expect(line, dict, "a rollout", place, losses):
            continue
        if not line.keys() & _OF_ROLLOUTS:
            losses.fault("no rollout", place, f"it has none of {', '.join(sorted(_OF_ROLLOUTS))}")
            continue
        name = f"{file.stem}-{place.removeprefix('line ')}"
        try:
            if "traces" in line or "nodes" in line:
                conversation = _episode(line, name, place, losses)
            else:
                conversation = rollouts.conversation(line, name, place, losses)
        except RecursionError:
            losses.fault("nested too deeply", place)
            continue
        if conversation is not None:
            conversation.mark = file.mark
            yield conversation


def _episode(line: dict[str, Any], name: str, place: str, losses: Losses) -> Conversation | None:
    alone = "nodes" in line
    traces = [line] if alone else line.pop("traces")
    if not expect(traces, list, "traces", place, losses):
        return None
    turns: list[Turn] = []
    kept: list[dict[str, Any]] = []
    tools: tuple[dict[str, Any], ...] = ()
    for number_, trace in enumerate(traces):
        where = place if alone else f"{place}, traces[{number_}]"
        if not (expect(trace, dict, "a trace", where, losses) and expect(trace.get("nodes", []), list, "nodes", where, losses)):
            continue
        if not kept:
            tools = tools_from(trace.get("tools"))
            if tools and tools_to(tools) == trace["tools"]:
                del trace["tools"]
        read_trace = _Trace(trace, len(kept), "" if alone else f"{len(kept)}/", where, losses)
        turns.extend(read_trace.turns())
        kept.append(read_trace.rest)
    fields: dict[str, Any] = {"traces": kept} if alone else {"episode": line, "traces": kept}
    own = line.get("id")
    return Conversation(id=own if isinstance(own, str) and own and is_text(own) else name, turns=turns, tools=tools, fields=fields)


class _Trace:
    """A trace on its way to turns. ``rest``: what it says beside its nodes; calls name nodes by the ids of their turns."""

    def __init__(self, trace: dict[str, Any], number: int, prefix: str, place: str, losses: Losses) -> None:
        self.nodes: list[Any] = trace.pop("nodes", [])
        self.rest = trace
        self._number = number
        self._prefix = prefix
        self._place = place
        self._losses = losses

    def turns(self) -> Iterator[Turn]:
        nodes, rest = self.nodes, self.rest
        mappings = [node if isinstance(node, dict) else {} for node in nodes]
        with_tokens = any(node.get("token_ids") for node in mappings)
        parents = {node.get("parent") for node in mappings if type(node.get("parent")) is int}
        reward = _reward(rest)
        reasons = self._calls()
        accepted = {link.get("node") for node in mappings for link in self._links(node) if link.get("type") == "compaction"}
        agent = rest.get("agent")
        untrained = isinstance(agent, dict) and agent.get("trainable") is False
        for at, node in enumerate(nodes):
            turn = self._turn(at, node, with_tokens)
            if turn is None:
                continue
            said = dict(turn.annotations)
            if at not in parents and reward is not None:
                said[REWARD] = reward
            attempt = at not in parents and any(link.get("type") == "compaction_attempt" for link in self._links(node))
            if (untrained and turn.parent is None) or (attempt and at not in accepted):
                said[TRAIN] = False
            yield attrs.evolve(turn, annotations=said, finish_reason=reasons.get(at))

    def _id(self, at: int) -> str:
        return f"{self._prefix}{at}"

    def _calls(self) -> dict[int, str]:
        """Why sampling each node ended. The calls name turns from here on."""
        reasons = {}
        calls = self.rest.get("calls")
        for call in calls if isinstance(calls, list) else ():
            node = call.get("node") if isinstance(call, dict) else None
            if type(node) is int and 0 <= node < len(self.nodes):
                call["node"] = self._id(node)
                if isinstance(call.get("finish_reason"), str):
                    reasons[node] = call["finish_reason"]
        return reasons

    def _turn(self, at: int, node: Any, with_tokens: bool) -> Turn | None:
        place, losses = f"{self._place}, nodes[{at}]", self._losses
        if not expect(node, dict, "a node", place, losses):
            return None
        if not expect(node.get("parent"), (int, type(None)), "its parent", place, losses):
            return None
        message = from_verifiers(node.get("message"), place, losses)
        ids = checked_ids(node.get("token_ids", []), "token ids", place, losses)
        sampled = node.get("sampled", False)
        if message is None or ids is None or not expect(sampled, bool, "sampled", place, losses):
            return None
        message["content"], images = with_images(message["content"], f"{place}.message", losses)
        links, derived = self._linked(at, node)
        rest = {key: value for key, value in node.items() if key not in _NODE}
        fields = {"sampled": sampled, "tokens": with_tokens, "trace": self._number, "links": links, "node": rest}
        created_at = number(node.get("timestamp"))
        turn = Turn(
            id=self._id(at),
            parent=None if node.get("parent") is None else self._id(node["parent"]),
            message=message,
            images=images,
            created_at=created_at,
            token_ids=ids if with_tokens else None,
            generated=sampled,
            annotations=_annotations(node, len(ids), sampled),
            derived_from=derived,
            fields=fields,
            place=place,
        )
        made = _node(turn, node.get("parent"), lambda name: None, NOWHERE)
        made["semantic_parents"] = [{"node": link["node"], "type": link.get("type")} for link in self._links(node)]
        if changes := difference(made, node):
            fields["difference"] = changes
        return turn

    def _linked(self, at: int, node: dict[str, Any]) -> tuple[list[list[Any]], tuple[str, ...]]:
        """What else it comes from: [id of the turn, kind], and the ids of those that came before it."""
        links = [[self._id(link["node"]), link.get("type")] for link in self._links(node)]
        earlier = (self._id(link["node"]) for link in self._links(node) if link["node"] < at)
        return links, tuple(dict.fromkeys(earlier))

    def _links(self, node: Any) -> list[dict[str, Any]]:
        links = node.get("semantic_parents") if isinstance(node, dict) else None
        return [each for each in links if self._is_link(each)] if isinstance(links, list) else []

    def _is_link(self, value: Any) -> bool:
        return isinstance(value, dict) and type(value.get("node")) is int and 0 <= value["node"] < len(self.nodes)


#: What a node says that turns have a place for. The rest of it is kept under the names it has.
_NODE: Final = {
    *("parent", "message", "sampled", "timestamp", "token_ids", "mask", "loss_weights", "semantic_parents"),
    *(_CONTENT, *_SAMPLED),
}


def _annotations(node: dict[str, Any], count: int, sampled: bool) -> dict[str, Any]:
    """What a node says of its tokens. What fits them not is no annotation, and stays in the node's difference."""
    said: dict[str, Any] = {}
    mask = np.full(count, sampled)
    if _flags(node.get("mask"), count) and node["mask"] != mask.tolist():
        said[LOSS_MASK] = mask = np.array(node["mask"], bool)
    if count and _flags(node.get(_CONTENT), count):
        said[_CONTENT] = np.array(node[_CONTENT], bool)
    for name, annotation in _SAMPLED.items():
        values = numbers(node.get(name), int(mask.sum()))
        if values is not None and len(values):
            said[annotation] = over(values, mask)
    weights = node.get("loss_weights")
    for name, each in weights.items() if isinstance(weights, dict) else ():
        values = numbers(each, count)
        if values is not None and count and is_text(name) and len(name) < MAX_NAME // 4:
            said[_WEIGHT + name] = values
    return said


def _flags(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count and set(map(type, value)) <= {bool}


def _reward(trace: Mapping[str, Any]) -> float | None:
    """The sum of a trace's rewards, each times its weight; None where it has none."""
    rewards = trace.get("rewards")
    given = [each for each in rewards.values() if each is not None] if isinstance(rewards, Mapping) else []
    values = [_value(each) for each in given]
    known = [value for value in values if value is not None]
    return number(sum(known)) if known and len(known) == len(values) else None


def _value(reward: Any) -> float | None:
    """A reward times its weight; up to 0.2 it is a number."""
    if not isinstance(reward, Mapping):
        return number(reward)
    score, weight = number(reward.get("score")), number(reward.get("weight", 1.0))
    return None if score is None or weight is None else score * weight


def write(conversations: Iterable[Conversation], path: Path, losses: Losses) -> None:
    """A line for each conversation: a rollout where it was read as one, else an episode."""
    with path.open("w", encoding="utf-8") as file:
        for conversation in conversations:
            line = rollouts.line(conversation, losses) if "rollout" in conversation.fields else _line(conversation, losses)
            file.write(json.dumps(line) + "\n")


def _line(conversation: Conversation, losses: Losses) -> dict[str, Any]:
    fields = conversation.fields
    own = "traces" in fields
    made = _Traces(conversation, fields["traces"] if own else [_new_trace(conversation)], losses).made
    name = {} if conversation.read_as is None else {"id": conversation.id}
    if own and "episode" not in fields:
        return made[0] | name
    return (fields["episode"] if own else _new_episode(conversation)) | name | {"traces": made}


_TASK: Final = {"type": "Task", "data": {}}


def _new_episode(conversation: Conversation) -> dict[str, Any]:
    return {"id": conversation.id, "env": {"id": ""}, "task": _TASK, "ok": True}


def _new_trace(conversation: Conversation) -> dict[str, Any]:
    return {"version": 1, "id": conversation.id, "task": _TASK, "agent": {"config": {}}, "is_completed": True, "ok": True}


class _Traces:
    """The turns of a conversation on their way to traces."""

    def __init__(self, conversation: Conversation, kept: list[dict[str, Any]], losses: Losses) -> None:
        tree = Tree(conversation)
        turns = list(tree.turns.values())
        kept = [_new_trace(conversation)] if turns and not kept else kept
        self.made = [dict(each) | {"nodes": []} for each in kept]
        self._losses = losses
        self._trace: dict[str | None, int] = {None: 0}
        self._index: dict[str, int] = {}  # of a turn's node in its trace
        self._node: dict[str | None, str | None] = {None: None}  # of a turn, itself or the nearest before it that is a node
        for turn in turns:
            self._place(turn)
        for turn in turns:
            if turn.id in self._index:
                self._write(turn)
        if conversation.tools and self.made and "tools" not in self.made[0]:
            self.made[0]["tools"] = tools_to(conversation.tools)
        for number_, trace in enumerate(self.made):
            self._finish(trace, [turn for turn in turns if self._trace[turn.id] == number_], tree)

    def _place(self, turn: Turn) -> None:
        assert turn.id is not None
        assert turn.parent is not ...
        trace = turn.fields.get("trace", self._trace[turn.parent])
        self._trace[turn.id] = trace if trace < len(self.made) else 0
        if turn.message is None:
            self._losses.add("turns that are no messages", turn.id)
            self._node[turn.id] = self._node[turn.parent]
            return
        self._node[turn.id] = turn.id
        nodes = self.made[self._trace[turn.id]]["nodes"]
        self._index[turn.id] = len(nodes)
        nodes.append(None)

    def _write(self, turn: Turn) -> None:
        assert turn.id is not None
        assert turn.parent is not ...
        before = self._node[turn.parent]
        trace = self.made[self._trace[turn.id]]
        node = _node(turn, None if before is None else self._index[before], self._index.get, self._losses)
        trace["nodes"][self._index[turn.id]] = put_over(node, turn.fields.get("difference", ()))

    def _finish(self, trace: dict[str, Any], turns: list[Turn], tree: Tree) -> None:
        calls = trace.get("calls")
        if isinstance(calls, list):
            trace["calls"] = [self._call(each) for each in calls]
        elif "calls" not in trace and (made := [call for turn in turns if (call := self._new_call(turn)) is not None]):
            trace["calls"] = made
        agent = trace.get("agent")
        if isinstance(agent, dict) and any(turn.parent is None and turn.annotations.get(TRAIN) is False for turn in turns):
            trace["agent"] = agent | {"trainable": False}
        leaves = [turn for turn in turns if turn.id is not None and not tree.children[turn.id]]
        said = [float(turn.annotations[REWARD]) for turn in leaves if number(turn.annotations.get(REWARD)) is not None]
        if len(set(said)) > 1:
            self._losses.add("rewards that differ from branch to branch: the last is the trace's", turns[0].id or "")
        between = [turn for turn in turns if REWARD in turn.annotations and turn not in leaves]
        if between:
            self._losses.add("rewards of turns that others follow", between[0].id or "", len(between))
        if said and said[-1] != _reward(trace):
            if trace.get("rewards"):
                self._losses.add("rewards by name, of a trace whose reward was said anew", turns[0].id or "")
            trace["rewards"] = {"reward": {"score": said[-1], "weight": 1.0}}

    def _call(self, call: Any) -> Any:
        if isinstance(call, dict) and isinstance(name := call.get("node"), str):
            if name not in self._index:
                self._losses.add("which turn a model call made: it is not written", name)
            return call | {"node": self._index.get(name)}
        return call

    def _new_call(self, turn: Turn) -> dict[str, Any] | None:
        if (
            turn.id not in self._index
            or "sampled" in turn.fields
            or not (turn.generated or (turn.message or {}).get("role") == "assistant")
        ):
            return None
        call: dict[str, Any] = {"node": self._index[turn.id]}
        if turn.finish_reason in ("stop", "length", "tool_calls"):
            return call | {"finish_reason": turn.finish_reason}
        if turn.finish_reason is not None:
            self._losses.add(f"the finish reason {turn.finish_reason}", turn.id or "")
        return None


def _node(turn: Turn, parent: int | None, index: Any, losses: Losses) -> dict[str, Any]:
    """A turn as a node. ``index``: of the node of a turn, by its id, or None."""
    assert turn.message is not None
    fields, place = turn.fields, turn.place or turn.id or ""
    own = "sampled" in fields
    sampled = fields["sampled"] if own else turn.generated
    ids = ids_of(turn) if fields.get("tokens", not own) else np.empty(0, np.int32)
    node: dict[str, Any] = dict(fields.get("node", {}))
    if parent is not None:
        node["parent"] = parent
    links = [[name, "derived_from"] for name in turn.derived_from] if not own else fields["links"]
    found = [{"node": index(name), "type": kind} for name, kind in links]
    if lost := sum(link["node"] is None for link in found):
        losses.add("turns that a turn comes from: they are not written", place, lost)
    node["semantic_parents"] = [link for link in found if link["node"] is not None]
    node["message"] = to_verifiers(turn.message, turn.images, NOWHERE if own else losses, place)
    node["sampled"] = sampled
    if turn.created_at is not None:
        node["timestamp"] = turn.created_at
    mask = trained_mask(turn, len(ids), sampled)
    return node | {"token_ids": ids.tolist(), "mask": mask.tolist()} | _of_tokens(turn, mask, losses, place)


def _of_tokens(turn: Turn, mask: Mask, losses: Losses, place: str) -> dict[str, Any]:
    """What is said of a turn's tokens, as a node has it."""
    node: dict[str, Any] = {_CONTENT: [], "logprobs": []}
    weights: dict[str, Any] = {}
    for name, annotation in _SAMPLED.items():
        if annotation in turn.annotations:
            node[name] = _said(turn, annotation, mask, losses, place) or []
    for annotation in turn.annotations:
        if annotation == _CONTENT:
            node[_CONTENT] = _said(turn, annotation, np.ones_like(mask), losses, place) or []
        elif annotation.startswith(_WEIGHT):
            values = _said(turn, annotation, np.ones_like(mask), losses, place)
            if values is not None:
                weights[annotation.removeprefix(_WEIGHT)] = values
        elif annotation not in _KNOWN:
            losses.add(f"the annotation {annotation}", place)
    attempt = any(kind == "compaction_attempt" for _, kind in turn.fields.get("links", ()))
    if turn.annotations.get(TRAIN) is False and turn.parent is not None and not attempt:
        losses.add("that what follows a turn is never trained on", place)
    return node | ({"loss_weights": weights} if weights else {})


def _said(turn: Turn, annotation: str, mask: Mask, losses: Losses, place: str) -> list[Any] | None:
    said = turn.annotations[annotation]
    values = [float(said)] * int(mask.sum()) if number(said) is not None else under(said, mask)
    if values is None:
        losses.add(f"{annotation}, which is not said of each sampled token", place)
    return values


FORMAT: Final = Format(
    "verifiers",
    "rollouts of the library verifiers (traces.jsonl, results.jsonl)",
    ".jsonl",
    read,
    write,
    lacks=frozenset({"title", "created_at", "heads", "main", "media"}),
    keys=frozenset({"role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id"}),
    one_result=True,
)
