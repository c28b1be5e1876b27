"""Trajectories of agents in the Agent Trajectory Interchange Format of the project Harbor, ATIF 1.0 to 1.8: a JSON file each.

A trajectory is a row of steps. A step is a turn, and what it observed is a turn for each result, behind it: step 3 is "3", its
results "3/0", "3/1". A result that answers a call is a tool's message, and one that names none is the user's, as agents show it to
the model. Trajectories of subagents are trees of their own in the same conversation: "0:3" is a step of the first of them, which
is derived from the result that refers to it.

A step may give all ids of its prompt. Where they go on from the ids of the steps before, what is new stands on the last turn before
the reply, and the path before a reply has exactly the ids of its prompt. Where they do not, a row of steps has no place for that:
ids from there on are kept as they are, and are no tokens.
"""

from __future__ import annotations

import json
import mimetypes
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
from numpy.typing import NDArray

from sessiontree.annotations import LOGPROBS, LOSS_MASK
from sessiontree.interchange.conversations import MAIN, Branch, Conversation, Image, Message, Tree, Turn
from sessiontree.interchange.differences import NOWHERE, difference, put_over
from sessiontree.interchange.formats import Format
from sessiontree.interchange.images import as_data_url, from_data_url
from sessiontree.interchange.losses import Losses
from sessiontree.interchange.per_token import checked_ids, ids_of, numbers, over, trained_mask, under
from sessiontree.interchange.source import SourceFile, expect, parsed
from sessiontree.interchange.words import is_text

_VERSION: Final = "ATIF-v1.7"
_ROLES: Final = {"system": "system", "user": "user", "agent": "assistant"}
_SOURCES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "agent"}
_PICTURES: Final = ("image/jpeg", "image/png", "image/gif", "image/webp")
#: What of a step and of a result turns have a place for. The rest of it is kept under the names it has.
_STEP: Final = {"step_id", "source", "message", "reasoning_content", "tool_calls", "observation", "metrics"}
_RESULT: Final = {"source_call_id", "content"}
_PROMPT: Final = "prompt_token_ids"
_REPLY: Final = "completion_token_ids"

Ids = NDArray[np.int32]
_NO_IDS: Final[Ids] = np.empty(0, np.int32)
#: What a trajectory is called: the run that it is of, and it alone.
_NAMES: Final = ("session_id", "trajectory_id")
Row = list[tuple[Turn, dict[str, Any]]]  # turns, and what each was read from


def read(file: SourceFile, losses: Losses) -> Iterator[Conversation]:
    """The one conversation of a file."""
    value = file.document(losses)
    if value is None or not expect(value, dict, "a trajectory", "the whole file", losses):
        return
    if not value.keys() & {"schema_version", "steps"}:
        losses.fault("no trajectory", "the whole file", "it has neither schema_version nor steps")
        return
    run, own = (_text(value.get(key)) for key in _NAMES)
    name = own or (file.path.name.removesuffix(".json") if run else file.stem)
    conversation = Conversation(id=f"{run}/{name}" if run and run != name else name, turns=())
    try:
        _fill(conversation, value, losses)
    except RecursionError:
        losses.fault("nested too deeply", "the whole file")
        return
    yield conversation


def _text(value: Any) -> str:
    return value if isinstance(value, str) and is_text(value) else ""


def _fill(conversation: Conversation, value: dict[str, Any], losses: Losses) -> None:
    """Turns of a trajectory and of those of its subagents, all of them by their places; what else they say is in ``fields``."""
    turns: list[Turn] = []
    kept: dict[str, Any] = {}
    callers: dict[str, str] = {}  # by the id of a subagent's trajectory: the turn that refers to it
    waiting = [("", value, "the trajectory")]
    for prefix, trajectory, place in waiting:  # grows on the way
        if not expect(trajectory, dict, "a trajectory", place, losses):
            continue
        steps, inner = trajectory.pop("steps", []), trajectory.get("subagent_trajectories")
        if isinstance(inner, list):
            trajectory["subagent_trajectories"] = []
            waiting.extend((f"{prefix}{at}:", each, f"{place}.subagent_trajectories[{at}]") for at, each in enumerate(inner))
        if not prefix:
            conversation.tools = _tools(trajectory)
        row = _row(steps, prefix, place, losses) if expect(steps, list, "steps", place, losses) else []
        _place_tokens(row, losses)
        _compare(row)
        caller = callers.get(_text(trajectory.get("trajectory_id")))
        if row and caller is not None:
            row[0] = attrs.evolve(row[0][0], derived_from=(caller,)), row[0][1]
        for turn, said in row:
            for ref in _refs(said):
                callers.setdefault(ref, turn.id or "")
        turns.extend(turn for turn, _ in row)
        if row and not prefix:
            conversation.heads[MAIN] = row[-1][0].id or ""
        kept[prefix] = trajectory
    conversation.turns = turns
    conversation.fields["trajectories"] = kept
    extra = value.get("extra")
    conversation.title = _text(extra.get("title")) or None if isinstance(extra, dict) else None


def _tools(trajectory: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The definitions of tools that an agent has, taken out of it."""
    agent = trajectory.get("agent")
    tools = agent.get("tool_definitions") if isinstance(agent, dict) else None
    if not isinstance(tools, list) or not tools or not all(isinstance(each, dict) for each in tools):
        return ()
    trajectory["agent"] = {key: value for key, value in trajectory["agent"].items() if key != "tool_definitions"}
    return tuple(tools)


def _refs(result: dict[str, Any]) -> Iterator[str]:
    refs = result.get("subagent_trajectory_ref")
    for ref in refs if isinstance(refs, list) else ():
        if isinstance(ref, dict) and (found := _text(ref.get("trajectory_id"))):
            yield found


# Reading


def _row(steps: list[Any], prefix: str, place: str, losses: Losses) -> Row:
    row: Row = []
    for at, step in enumerate(steps):
        where = f"{place}.steps[{at}]"
        if not expect(step, dict, "a step", where, losses):
            continue
        turn = _step_turn(step, f"{prefix}{at + 1}", row[-1][0].id if row else None, where, losses)
        if turn is None:
            continue
        results = step.pop("observation")["results"] if "observation" in turn.fields else []
        row.append((turn, step))
        calls = {call["id"] for call in (turn.message or {}).get("tool_calls", ())}
        for number, result in enumerate(results):
            spot = f"{where}.observation.results[{number}]"
            answer = _result_turn(result, f"{turn.id}/{number}", row[-1][0].id, spot, losses)
            if answer is None:
                continue
            row.append((answer, result))
            answered = (answer.message or {}).get("tool_call_id")
            if answered is not None and answered not in calls:
                losses.add("a tool result without its call", spot)
    return row


def _step_turn(step: dict[str, Any], name: str, parent: str | None, place: str, losses: Losses) -> Turn | None:
    source = step.get("source")
    if not expect(source, str, "its source", place, losses):
        return None
    if source not in _ROLES:
        losses.fault("a source is system, user or agent", place, str(source))
        return None
    content, images = _content(step.get("message"), place, losses)
    message: dict[str, Any] = {"role": _ROLES[source], "content": content}
    if isinstance(step.get("reasoning_content"), str):
        message["reasoning_content"] = step["reasoning_content"]
    calls = step.get("tool_calls")
    if isinstance(calls, list) and (found := [call for each in calls if (call := _call(each)) is not None]):
        message["tool_calls"] = found
    fields: dict[str, Any] = {"step": {key: value for key, value in step.items() if key not in _STEP}}
    if isinstance(step.get("metrics"), dict):
        fields["metrics"] = dict(step["metrics"])
    observed = step.get("observation")
    if isinstance(observed, dict) and isinstance(observed.get("results"), list):
        fields["observation"] = {key: value for key, value in observed.items() if key != "results"}
    return Turn(
        id=name,
        parent=parent,
        message=message,
        images=images,
        created_at=_seconds(step.get("timestamp")),
        generated=source == "agent" and step.get("is_copied_context") is not True and step.get("llm_call_count") != 0,
        fields=fields,
        place=place,
    )


def _result_turn(result: Any, name: str, parent: str | None, place: str, losses: Losses) -> Turn | None:
    if not expect(result, dict, "a result", place, losses):
        return None
    content, images = _content(result.get("content"), place, losses)
    answered = result.get("source_call_id")
    who = {"role": "tool", "tool_call_id": answered} if isinstance(answered, str) else {"role": "user"}
    fields = {"result": {key: value for key, value in result.items() if key not in _RESULT}}
    return Turn(id=name, parent=parent, message=who | {"content": content}, images=images, fields=fields, place=place)


def _call(value: Any) -> dict[str, Any] | None:
    """A call in OpenAI's form; None where it is none."""
    name = value.get("function_name") if isinstance(value, dict) else None
    if not (isinstance(name, str) and isinstance(value.get("tool_call_id"), str)):
        return None
    function = {"name": name, "arguments": json.dumps(value.get("arguments", {}), ensure_ascii=False)}
    return {"id": value["tool_call_id"], "type": "function", "function": function}


def _content(value: Any, place: str, losses: Losses) -> tuple[Any, tuple[Image, ...]]:
    """Content in the common form. What is only named stays a URL, since files may name anything that a machine has."""
    if not expect(value, (str, list, type(None)), "its text", place, losses):
        return None, ()
    if not isinstance(value, list):
        return value, ()
    parts: list[Any] = []
    images: list[Image] = []
    for part in value:
        source = part.get("source") if isinstance(part, dict) and part.get("type") == "image" else None
        url = source.get("path") if isinstance(source, dict) else None
        image = from_data_url(url, place, losses) if isinstance(url, str) and url.startswith("data:") else None
        if image is not None and as_data_url(image) == url:
            images.append(image)
            parts.append({"type": "image", "image": len(images) - 1})
        else:
            parts.append({"type": "image_url", "image_url": {"url": url}} if isinstance(url, str) else part)
    return parts, tuple(images)


def _seconds(stamp: Any) -> float | None:
    try:
        found = datetime.fromisoformat(stamp)
        return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def _place_tokens(row: Row, losses: Losses) -> None:
    """Ids that steps give, on the turns that they are of."""
    known: Ids | None = _NO_IDS  # of the path so far; None where the file does not say
    waiting: list[int] = []  # turns since the last reply
    for at, (turn, said) in enumerate(row):
        metrics = turn.fields.get("metrics", {})
        found = {}
        for key in (_PROMPT, _REPLY):
            if metrics.get(key) is not None:
                found[key] = checked_ids(said["metrics"][key], key, turn.place, losses)
        if not found:
            waiting.append(at)
            continue
        prompt, reply = found.get(_PROMPT), found.get(_REPLY)
        goes_on = prompt is None or (known is not None and np.array_equal(prompt[: len(known)], known))
        if not goes_on or any(ids is None for ids in found.values()):
            losses.add("token ids from where a prompt does not go on from the step before", turn.place)
            return
        first = _NO_IDS
        if prompt is not None and known is not None:
            first = prompt[len(known) :]
            for number in waiting:
                ids, first = (first, _NO_IDS) if number == waiting[-1] else (_NO_IDS, first)
                row[number] = attrs.evolve(row[number][0], token_ids=ids), row[number][1]
        row[at] = _with_ids(turn, first, reply, [*found]), said
        known = None if prompt is None else np.concatenate([prompt, _NO_IDS if reply is None else reply])
        waiting = []


def _with_ids(turn: Turn, first: Ids, reply: Ids | None, placed: list[str]) -> Turn:
    """A step with its reply's ids. ``first``: those of its prompt that no turn before it can have."""
    count = 0 if reply is None else len(reply)
    mask = np.repeat([False, True], [len(first), count])
    metrics = {key: value for key, value in turn.fields["metrics"].items() if key not in placed}
    said: dict[str, Any] = {}
    logprobs = numbers(metrics.get("logprobs"), count)
    if count and logprobs is not None:
        said[LOGPROBS] = over(logprobs, mask)
        del metrics["logprobs"]
    if len(first) and count and turn.generated:
        said[LOSS_MASK] = mask
    return attrs.evolve(
        turn,
        token_ids=np.concatenate([first, _NO_IDS if reply is None else reply]),
        generated=turn.generated and reply is not None,
        annotations=said,
        fields=dict(turn.fields) | {"metrics": metrics, "placed": placed, "first": len(first)},
    )


def _compare(row: Row) -> None:
    """What each turn, as it would be written, differs from what it was read from."""
    known: list[Ids] = []
    number = 0
    for at, (turn, said) in enumerate(row):
        number += "step" in turn.fields
        made = _step(turn, number, known, NOWHERE) if "step" in turn.fields else _result(turn, NOWHERE)
        if changes := difference(made, said):
            row[at] = attrs.evolve(turn, fields=dict(turn.fields) | {"difference": changes}), said
        known.append(ids_of(turn))


# Writing


def write(conversations: Iterable[Conversation], path: Path, losses: Losses) -> None:
    """The one conversation: the branch that it goes on from, and all others as trajectories inside that."""
    (conversation,) = conversations
    path.write_text(json.dumps(_Written(conversation, losses).root) + "\n", encoding="utf-8")


class _Written:
    """A conversation on its way to a file. ``root``: the trajectory of the file."""

    def __init__(self, conversation: Conversation, losses: Losses) -> None:
        self._losses = losses
        self._tree = Tree(conversation)
        self._holders: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}  # of a turn: its trajectory, and its step or result
        kept = conversation.fields.get("trajectories") or {"": _new(conversation.id, {"title": conversation.title})}
        self._made: dict[str, dict[str, Any]] = {}
        for prefix, each in kept.items():
            inside = each.get("subagent_trajectories")
            copied = {"subagent_trajectories": list(inside)} if isinstance(inside, list) else {}
            self._made[prefix] = {**each, **copied, "steps": []}
        self._used = {each.get("trajectory_id") for each in self._made.values()}
        self.root = self._made.setdefault("", _new(conversation.id, {}) | {"steps": []})
        for prefix, each in self._made.items():
            if prefix:
                self._put_inside(each, self._made.get(prefix[: prefix[:-1].rfind(":") + 1], self.root))
        if conversation.read_as is not None:
            self.root |= dict.fromkeys(_NAMES if "trajectory_id" in self.root else _NAMES[:1], conversation.id)
        if conversation.tools:
            self.root["agent"] = self.root["agent"] | {"tool_definitions": [dict(tool) for tool in conversation.tools]}
        self._write_branches(conversation)
        if not conversation.fields and not self.root["steps"]:
            losses.add("that nothing was said: there is a step that says nothing", conversation.id)
            self.root["steps"].append({"step_id": 1, "source": "system", "message": ""})

    def _write_branches(self, conversation: Conversation) -> None:
        """The main branch first, then others in the order in which their first turns came."""
        branches = list(self._tree.branches())
        main = conversation.heads.get(MAIN, next(reversed(self._tree.turns), None))
        order = {name: at for at, name in enumerate(self._tree.turns)}
        branches.sort(key=lambda branch: (all(turn.id != main for turn in branch), order[str(branch[0].id)]))
        free = set(self._made)
        for branch in branches:
            prefix = str(branch[0].id).rpartition(":")[0]
            prefix = f"{prefix}:" if prefix and "step" in branch[0].fields else ""
            if prefix in free:
                free.discard(prefix)
                self._write(branch, self._made[prefix])
                continue
            self._write(branch, self._inside(branch))

    def _inside(self, branch: Branch) -> dict[str, Any]:
        """A new trajectory inside another: a subagent's, where its first turn comes from a turn of that, or another branch."""
        trajectory = _new(None, {}) | {"trajectory_id": self._unused(str(branch[-1].id)), "steps": []}
        self._made[f"new {len(self._made)}"] = trajectory
        caller = next((each for each in branch[0].derived_from if each in self._holders), None)
        if caller is None:
            self._put_inside(trajectory, self.root)
            return trajectory
        outer, said = self._holders[caller]
        self._put_inside(trajectory, outer)
        if "step_id" in said:
            _results(said).append(said := {})
        said.setdefault("subagent_trajectory_ref", []).append({"trajectory_id": trajectory["trajectory_id"]})
        return trajectory

    def _unused(self, name: str) -> str:
        while name in self._used:
            name += "'"
        self._used.add(name)
        return name

    def _put_inside(self, inner: dict[str, Any], outer: dict[str, Any]) -> None:
        inside = outer.get("subagent_trajectories")
        if not isinstance(inside, list):
            inside = outer["subagent_trajectories"] = []
        inside.append(inner)

    def _write(self, branch: Branch, trajectory: dict[str, Any]) -> None:
        steps = trajectory["steps"]
        known: list[Ids] = []
        untold: list[str] = []  # turns with ids since the last prompt that says them
        for turn in branch:
            assert turn.id is not None
            said: dict[str, Any] = {}
            if turn.message is None:
                self._losses.add("turns that are no messages", turn.id)
            elif self._answers(turn, steps):
                said = put_over(_result(turn, NOWHERE if turn.fields else self._losses), turn.fields.get("difference", ()))
                _results(steps[-1]).append(said)
                self._holders.setdefault(turn.id, (trajectory, said))
            else:
                step = _step(turn, len(steps) + 1, known, NOWHERE if turn.fields else self._losses)
                said = put_over(step, turn.fields.get("difference", ()))
                if "observation" in turn.fields:
                    said["observation"] = turn.fields["observation"] | {"results": []}
                if turn.id in self._holders:
                    self._losses.add("a tree is written branch by branch: turns that branches share stand in each", turn.id)
                    said["is_copied_context"] = True
                steps.append(said)
                self._holders.setdefault(turn.id, (trajectory, said))
            known.append(ids_of(turn))
            metrics = said.get("metrics") or {}
            if metrics.get(_PROMPT) is not None:
                untold.clear()
            if len(known[-1]) and metrics.get(_REPLY) is None:
                untold.append(turn.id)
            for annotation in turn.annotations.keys() - {LOGPROBS, LOSS_MASK}:
                self._losses.add(f"the annotation {annotation}", turn.id)

        if untold:
            self._losses.add("token ids of turns that no prompt after them says", untold[0], len(untold))

    def _answers(self, turn: Turn, steps: list[dict[str, Any]]) -> bool:
        """Whether a turn is a result of the step before it."""
        if not steps or "step" in turn.fields:
            return False
        if "result" in turn.fields:
            return True
        calls = steps[-1].get("tool_calls")
        called = [call.get("tool_call_id") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
        return (turn.message or {}).get("role") == "tool" and (turn.message or {}).get("tool_call_id") in called


def _results(step: dict[str, Any]) -> list[Any]:
    """What a step observed; from here on there is something."""
    if not isinstance(step.get("observation"), dict):
        step["observation"] = {"results": []}
    results: list[Any] = step["observation"]["results"]
    return results


def _new(session_id: str | None, extra: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"schema_version": _VERSION, "agent": {"name": "unknown", "version": "unknown"}}
    said = {key: value for key, value in extra.items() if value is not None}
    return made | (dict.fromkeys(_NAMES, session_id) if session_id else {}) | ({"extra": said} if said else {})


def _step(turn: Turn, number: int, known: list[Ids], losses: Losses) -> dict[str, Any]:
    """A turn as a step. ``known``: the ids of each turn before it."""
    message, fields, place = turn.message or {}, turn.fields, turn.place or turn.id or ""
    role = message.get("role")
    source = _SOURCES.get(str(role), "user")
    if role not in _ROLES.values():
        losses.add("a tool result without its call: it is the user's" if role == "tool" else f"the role {role}: {source}", place)
    step: dict[str, Any] = {"step_id": number, "source": source, "message": _as_content(message, turn.images, losses, place) or ""}
    if "step" in fields:
        step |= fields["step"]
    elif (stamp := _stamp(turn.created_at)) is not None:
        step["timestamp"] = stamp
    if source == "agent":
        if isinstance(message.get("reasoning_content"), str):
            step["reasoning_content"] = message["reasoning_content"]
        if calls := [_as_call(call, losses, place) for call in message.get("tool_calls") or () if isinstance(call, Mapping)]:
            step["tool_calls"] = calls
        if metrics := _metrics(turn, known, losses, place):
            step["metrics"] = metrics
    elif "metrics" in fields:
        step["metrics"] = fields["metrics"]
    return step


def _metrics(turn: Turn, known: list[Ids], losses: Losses, place: str) -> dict[str, Any] | None:
    """What a step says of its tokens."""
    fields = turn.fields
    own = "step" in fields
    metrics: dict[str, Any] = dict(fields.get("metrics", {}))
    ids = ids_of(turn)
    placed = fields.get("placed", ()) if own else (_PROMPT, _REPLY) if turn.generated and len(ids) else ()
    mask = trained_mask(turn, len(ids), otherwise=True)
    first = fields.get("first", 0) if own else int(mask.argmax()) if mask.any() and mask[int(mask.argmax()) :].all() else 0
    if _PROMPT in placed:
        metrics[_PROMPT] = np.concatenate([*known, ids[:first]]).tolist()
    if _REPLY in placed:
        metrics[_REPLY] = ids[first:].tolist()
    if LOGPROBS in turn.annotations:
        values = under(turn.annotations[LOGPROBS], np.arange(len(ids)) >= first) if placed else None
        if values is None:
            losses.add(f"{LOGPROBS}, which are not said of each sampled token", place)
        else:
            metrics["logprobs"] = values
    return metrics if metrics or "metrics" in fields else None


def _result(turn: Turn, losses: Losses) -> dict[str, Any]:
    """A turn as a result."""
    message = turn.message or {}
    result: dict[str, Any] = dict(turn.fields.get("result", {}))
    if message.get("tool_call_id") is not None:
        result["source_call_id"] = message["tool_call_id"]
    content = _as_content(message, turn.images, losses, turn.place or turn.id or "")
    return result if content is None else result | {"content": content}


def _as_content(message: Message, images: tuple[Image, ...], losses: Losses, place: str) -> Any:
    content = message.get("content")
    if not isinstance(content, list):
        return content
    return [made for part in content if (made := _as_part(part, images, losses, place)) is not None]


def _as_part(part: Any, images: tuple[Image, ...], losses: Losses, place: str) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image":
        image = images[part["image"]]
        if image.mime_type in _PICTURES:
            return {"type": "image", "source": {"media_type": image.mime_type, "path": as_data_url(image)}}
    elif kind == "image_url" and isinstance(part.get("image_url"), Mapping) and isinstance(part["image_url"].get("url"), str):
        url = part["image_url"]["url"]
        guessed = _guessed(url)
        if guessed not in _PICTURES:
            losses.add("of which kind a picture is that is only named: image/png is written", place)
        return {"type": "image", "source": {"media_type": guessed if guessed in _PICTURES else "image/png", "path": url}}
    elif (kind == "text" and isinstance(part.get("text"), str)) or (kind == "audio" and isinstance(part.get("source"), Mapping)):
        return dict(part)
    losses.add(f"a part of the type {kind}", place)
    return None


def _guessed(url: str) -> str | None:
    try:
        return mimetypes.guess_type(url)[0]
    except ValueError:  # what is no URL
        return None


def _as_call(call: Mapping[str, Any], losses: Losses, place: str) -> dict[str, Any]:
    said = call.get("function")
    function = said if isinstance(said, Mapping) else {}
    written = function.get("arguments")
    try:
        arguments = parsed(written) if isinstance(written, str) else written
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        losses.add("arguments of a call that are no mapping: they are one of text", place)
        arguments = {} if written is None else {"arguments": written}
    elif json.dumps(arguments, ensure_ascii=False) != written:
        losses.add("how the JSON of a tool call's arguments is written", place)
    if not function:
        losses.add("tool calls that are no functions", place)
    return {
        "tool_call_id": call["id"] if isinstance(call.get("id"), str) else "",
        "function_name": function["name"] if isinstance(function.get("name"), str) else "",
        "arguments": arguments,
    }


def _stamp(seconds: float | None) -> str | None:
    try:
        return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()
    except (ValueError, OverflowError, OSError):
        return None


FORMAT: Final = Format(
    "atif",
    "trajectories of agents as Harbor keeps them (ATIF, JSON)",
    ".json",
    read,
    write,
    single=True,
    lacks=frozenset({"created_at", "heads", "main", "media", "finish_reason", "derived_from"}),
    keys=frozenset({"role", "content", "reasoning_content", "tool_calls", "tool_call_id"}),
    one_result=True,
)
