"""Rows of ``results.jsonl``: a rollout with the steps of its trajectory, each of which says its whole prompt anew.

Steps share what they share. A step goes on from the longest path that says the same in words and in ids, and adds a turn for each
message that its prompt has beyond that, and one for its reply. Where messages lie among the new ids of a prompt the file does not
say, so all of them stand on the last new message, and the others have none. So the path before a reply has exactly the ids of the
step's prompt, however it came about: a history that was compacted or tokenized otherwise is another branch.

``prompt`` and ``completion`` of the row are a path of the same tree, found by its words; its end is where the conversation goes on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import attrs
import numpy as np
from numpy.typing import NDArray

from sessiontree.annotations import ADVANTAGE, LOGPROBS, LOSS_MASK, REWARD
from sessiontree.interchange.conversations import MAIN, Branch, Conversation, Tree, Turn
from sessiontree.interchange.differences import NOWHERE, difference, put_over
from sessiontree.interchange.losses import Losses
from sessiontree.interchange.openai import with_images
from sessiontree.interchange.per_token import checked_ids, ids_of, numbers, over, trained_mask, under
from sessiontree.interchange.source import expect
from sessiontree.interchange.verifiers_messages import from_verifiers, number, to_verifiers, tools_from, tools_to

#: What a step says that turns have a place for; of its tokens, and of the whole row.
_STEP: Final = {"prompt", "completion", "tokens", "response", "reward", "advantage"}
_TOKENS: Final = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "completion_logprobs"}
_ROW: Final = {"prompt", "completion", "trajectory", "tool_defs", "reward"}

Ids = NDArray[np.int32]


def conversation(row: dict[str, Any], name: str, place: str, losses: Losses) -> Conversation | None:
    """A row as a conversation; None where that is a fault."""
    steps = row.get("trajectory")
    if not expect(steps, (list, type(None)), "its trajectory", place, losses):
        return None
    asked = _messages(row, "prompt", place, losses)
    answered = _messages(row, "completion", place, losses)
    if asked is None or answered is None:
        return None
    grown = _Grown(losses)
    added = [_add_step(grown, at, step, f"{place}, trajectory[{at}]") for at, step in enumerate(steps or ())]
    tip = grown.goes_on([*asked, *answered], len(asked), place)
    tools = tools_from(row.get("tool_defs"))
    fields: dict[str, Any] = {
        "rollout": {key: value for key, value in row.items() if key not in _ROW},
        "asked": len(asked),
        "texts": [key for key in ("prompt", "completion") if isinstance(row.get(key), str)],
        "trajectory": steps is not None,
        "silent": tip is None,
    }
    made = Conversation(id=name, turns=grown.turns, tools=tools, fields=fields)
    reward = number(row.get("reward"))
    if tip is not None:
        made.heads[MAIN] = str(tip)
        if reward is not None:
            grown.say(tip, REWARD, reward)
    for last, step in filter(None, added):
        changes = difference(_step(grown.path(last), NOWHERE), step)
        grown.turns[last] = attrs.evolve(grown.turns[last], fields=dict(grown.turns[last].fields) | {"difference": changes})
    path = () if tip is None else grown.path(tip)
    rest = {key: value for key, value in row.items() if key != "trajectory" or value is None}
    if changes := difference(_row(made, path, NOWHERE), rest):
        fields["difference"] = changes
    return made


class _Message(NamedTuple):
    """A message in the common form, and as it was; None where what is around it says that."""

    said: dict[str, Any]
    was: Any


def _messages(value: dict[str, Any], key: str, place: str, losses: Losses) -> list[_Message] | None:
    """Messages of a list, or of text alone, which is one. What cannot be read is left out of ``value`` too."""
    found = value.get(key)
    if isinstance(found, str):
        return [_Message({"role": "user" if key == "prompt" else "assistant", "content": found}, None)]
    if not expect(found, (list, type(None)), key, place, losses):
        return None
    read = []
    for at, each in enumerate(found or ()):
        said = from_verifiers(each, f"{place}, {key}[{at}]", losses)
        if said is not None:
            read.append(_Message(said, each))
    if found is not None:
        value[key] = [message.was for message in read]
    return read


def _key(message: Mapping[str, Any]) -> str:
    """What makes messages the same: nothing and empty content are, as ``verifiers`` writes both."""
    return json.dumps(dict(message) | {"content": message.get("content") or ""}, sort_keys=True)


class _Grown:
    """The turns of a row, as its steps add to them. Turns are named by their number."""

    def __init__(self, losses: Losses) -> None:
        self.turns: list[Turn] = []
        self.losses = losses
        self._after: dict[tuple[int | None, str], list[int]] = {}

    def add(self, parent: int | None, message: _Message | None, ids: Ids | None, place: str, **more: Any) -> int:
        """Another turn; its number."""
        at = len(self.turns)
        named = None if parent is None else str(parent)
        turn = Turn(id=str(at), parent=named, role="step", token_ids=ids, place=place, **more)
        if message is not None:
            self._after.setdefault((parent, _key(message.said)), []).append(at)
            content, images = with_images(message.said["content"], place, self.losses)
            turn = attrs.evolve(turn, message=message.said | {"content": content}, images=images)
            changes = [] if message.was is None else difference(_made(turn, NOWHERE), message.was)
            if changes:
                turn = attrs.evolve(turn, fields=dict(turn.fields) | {"message": changes})
        self.turns.append(turn)
        return at

    def say(self, at: int, name: str, value: Any) -> None:
        """Something of a turn."""
        turn = self.turns[at]
        self.turns[at] = attrs.evolve(turn, annotations=dict(turn.annotations) | {name: value})

    def path(self, at: int) -> Branch:
        """From the first turn to that one."""
        path = []
        turn: Turn | None = self.turns[at]
        while turn is not None:
            path.append(turn)
            turn = self.turns[int(turn.parent)] if isinstance(turn.parent, str) else None
        return tuple(reversed(path))

    def prompt(self, messages: Sequence[_Message], ids: Ids | None, place: str) -> int | None:
        """The turn that a prompt ends with, None where it is empty. ``ids``: all of it, None where there are none."""
        depth, at, done = self._longest([_key(each.said) for each in messages], ids)
        if not messages and ids is not None and len(ids):
            return self.add(None, None, ids, place)
        for number_, message in enumerate(messages[depth:], depth):
            last = number_ == len(messages) - 1
            at = self.add(at, message, ids if ids is None else ids[done:] if last else ids[:0], f"{place}, prompt[{number_}]")
        return at

    def _longest(self, keys: list[str], ids: Ids | None) -> tuple[int, int | None, int]:
        """(messages, turn, ids) of the longest path that begins a prompt. One that has all its messages has all its ids too."""
        best: tuple[int, int | None, int] = (0, None, 0)
        reached: list[tuple[int | None, int]] = [(None, 0)]
        for depth, key in enumerate(keys, 1):
            reached = [
                (child, done + self._count(child))
                for at, done in reached
                for child in self._after.get((at, key), ())
                if self._fits(child, ids, done)
            ]
            ended = [each for each in reached if depth < len(keys) or ids is None or each[1] == len(ids)]
            if ended:
                at, done = max(ended, key=lambda each: (each[1], each[0] or 0))
                best = depth, at, done
            if not reached:
                break
        return best

    def _count(self, at: int) -> int:
        ids = self.turns[at].token_ids
        return 0 if ids is None else len(ids)

    def _fits(self, at: int, ids: Ids | None, done: int) -> bool:
        own = self.turns[at].token_ids
        if own is None or ids is None:
            return own is None and ids is None
        return np.array_equal(np.asarray(own), ids[done : done + len(own)])

    def goes_on(self, messages: Sequence[_Message], asked: int, place: str) -> int | None:
        """The turn at which messages end, found by their words; what is not there is added. ``asked``: how many are no reply."""
        reached: list[int] = []
        depth = 0
        for message in messages:
            key = _key(message.said)
            after = [child for at in reached or (None,) for child in self._after.get((at, key), ())]
            if not after:
                break
            reached, depth = after, depth + 1
        at = max(reached, default=None)
        for number_, message in enumerate(messages[depth:], depth):
            replied = number_ >= asked and message.said["role"] == "assistant"
            at = self.add(
                at, _Message(message.said, None), None, f"{place}, message {number_}", generated=replied, fields={"row": True}
            )
        return at


def _add_step(grown: _Grown, at: int, step: Any, place: str) -> tuple[int, dict[str, Any]] | None:
    """The number of a step's last turn, and the step without what could not be read; None where it is a fault."""
    losses = grown.losses
    if not expect(step, dict, "a step", place, losses):
        return None
    step = dict(step)
    asked = _messages(step, "prompt", place, losses)
    answered = _messages(step, "completion", place, losses)
    tokens = step.get("tokens")
    if asked is None or answered is None or not expect(tokens, (dict, type(None)), "its tokens", place, losses):
        return None
    before = after = None
    if tokens is not None:
        before = checked_ids(tokens.get("prompt_ids", []), "prompt ids", place, losses)
        after = checked_ids(tokens.get("completion_ids", []), "completion ids", place, losses)
        if before is None or after is None:
            return None
    parent = grown.prompt(asked, before, place)
    for message in answered[:-1]:
        ids = None if after is None else after[:0]
        parent = grown.add(parent, message, ids, place, generated=tokens is None and message.said["role"] == "assistant")
    fields = _step_fields(at, step, len(answered), tokens)
    said = _said_of_step(step, tokens, 0 if after is None else len(after))
    last = grown.add(
        parent,
        answered[-1] if answered else None,
        after,
        place,
        generated=True,
        finish_reason=_finish_reason(step),
        annotations=said,
        fields=fields,
    )
    return last, step


def _step_fields(at: int, step: dict[str, Any], answers: int, tokens: dict[str, Any] | None) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "number": at,
        "answers": answers,
        "texts": [key for key in ("prompt", "completion") if isinstance(step.get(key), str)],
        "step": {key: value for key, value in step.items() if key not in _STEP},
    }
    if tokens is not None:
        fields["tokens"] = {key: value for key, value in tokens.items() if key not in _TOKENS}
    response = step.get("response")
    if isinstance(response, dict) and isinstance(response.get("message"), dict):
        fields["response"] = {key: value for key, value in response.items() if key != "message"}
    return fields


def _said_of_step(step: dict[str, Any], tokens: dict[str, Any] | None, count: int) -> dict[str, Any]:
    said: dict[str, Any] = {name: value for name in (REWARD, ADVANTAGE) if (value := number(step.get(name))) is not None}
    if tokens is None or not count:
        return said
    mask = numbers(tokens.get("completion_mask"), count)
    if mask is not None and set(mask.tolist()) <= {0, 1} and not mask.all():
        said[LOSS_MASK] = mask.astype(bool)
    logprobs = numbers(tokens.get("completion_logprobs"), count)
    if logprobs is not None:
        said[LOGPROBS] = over(logprobs, np.ones(count, bool))
    return said


def _finish_reason(step: dict[str, Any]) -> str | None:
    response = step.get("response")
    message = response.get("message") if isinstance(response, dict) else None
    reason = message.get("finish_reason") if isinstance(message, dict) else None
    if step.get("is_truncated") is True:
        return "length"
    return reason if isinstance(reason, str) else None


def _step(path: Branch, losses: Losses) -> dict[str, Any]:
    """The step that a path is: its last turn says how many messages were the reply."""
    turn = path[-1]
    fields = turn.fields
    own = "number" in fields
    answers = fields["answers"] if own else 1
    cut = len(path) - max(answers, 1)
    made = {
        key: _said(path[slice(*part)], key in fields.get("texts", ()), losses)
        for key, part in (("prompt", (0, cut)), ("completion", (cut, None)))
    }
    step: dict[str, Any] = dict(fields.get("step", {})) | made
    step["reward"], step["advantage"] = (number(turn.annotations.get(name)) for name in (REWARD, ADVANTAGE))
    step["tokens"] = _tokens(path[:cut], path[cut:], fields.get("tokens", {})) if "tokens" in fields or not own else None
    if "response" in fields:
        message = dict(step["completion"][0]) if isinstance(step["completion"], list) and step["completion"] else {}
        if step["tokens"] is not None:
            message["tokens"] = dict(step["tokens"])
        step["response"] = fields["response"] | {"message": message}
    return step


def _made(turn: Turn, losses: Losses) -> dict[str, Any]:
    """The message of a turn."""
    made = to_verifiers(turn.message or {}, turn.images, NOWHERE if turn.fields else losses, turn.place)
    restored: dict[str, Any] = put_over(made, turn.fields.get("message", ()))
    return restored


def _said(path: Branch, text: bool, losses: Losses) -> Any:
    messages = [_made(turn, losses) for turn in path if turn.message is not None]
    return messages[0]["content"] if text and len(messages) == 1 else messages


def _tokens(before: Branch, after: Branch, rest: Mapping[str, Any]) -> dict[str, Any]:
    """Ids of the path before a reply, and of the reply, with what is said of these."""
    prompt = np.concatenate([np.empty(0, np.int32), *map(ids_of, before)])
    reply = np.concatenate([np.empty(0, np.int32), *map(ids_of, after)])
    turn = after[-1]
    made = dict(rest) | {
        "prompt_ids": prompt.tolist(),
        "prompt_mask": [0] * len(prompt),
        "completion_ids": reply.tolist(),
        "completion_mask": trained_mask(turn, len(reply), otherwise=True).astype(int).tolist(),
    }
    if LOGPROBS in turn.annotations:
        made["completion_logprobs"] = under(turn.annotations[LOGPROBS], np.ones(len(reply), bool))
    return made


def _row(conversation: Conversation, path: Branch, losses: Losses) -> dict[str, Any]:
    """All of a row but its trajectory."""
    fields = conversation.fields
    path = tuple(turn for turn in path if turn.message is not None)
    row: dict[str, Any] = dict(fields["rollout"])
    for key, part in (("prompt", path[: fields["asked"]]), ("completion", path[fields["asked"] :])):
        said = _said(part, key in fields["texts"], losses)
        row[key] = said if isinstance(said, str) else [_as_saved(each) for each in said]
    row["reward"] = number(path[-1].annotations.get(REWARD)) if path else None
    row["tool_defs"] = tools_to(conversation.tools)
    return row


def _as_saved(message: dict[str, Any]) -> dict[str, Any]:
    """A message as rows have it: each tool call is JSON text."""
    calls = [json.dumps({key: value for key, value in call.items() if key != "type"}) for call in message.get("tool_calls", ())]
    return message | ({"tool_calls": calls} if calls else {})


def line(conversation: Conversation, losses: Losses) -> dict[str, Any]:
    """The row of a conversation that was one."""
    tree = Tree(conversation)
    fields = conversation.fields
    tip = conversation.heads.get(MAIN, next(reversed(tree.turns), None))
    main = () if tip is None or fields.get("silent") else tree.path(tip)
    row: dict[str, Any] = put_over(_row(conversation, main, losses), fields.get("difference", ()))
    if main and REWARD not in main[-1].annotations and any(REWARD in turn.annotations for turn in main):
        losses.add("the reward of a rollout that went on since", conversation.id)
    written = {turn.id for turn in main}
    if fields["trajectory"]:
        replies = [turn for turn in tree.turns.values() if "number" in turn.fields or (turn.generated and turn.message is not None)]
        own = [turn for turn in replies if "number" in turn.fields]
        new = [turn for turn in replies if "number" not in turn.fields and ids_of(turn).size]
        row["trajectory"] = []
        for turn in (*sorted(own, key=lambda each: int(each.fields["number"])), *new):
            assert turn.id is not None
            path = tree.path(turn.id)
            written.update(each.id for each in path)
            row["trajectory"].append(put_over(_step(path, losses), turn.fields.get("difference", ())))
    if left := len(tree.turns.keys() - written):
        losses.add("turns beside the rollout and its steps", conversation.id, left)
    return row
