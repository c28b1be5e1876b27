"""SGLang's request dumps: pickles of requests with what they gave, and the JSON lines of its request log.

A server that is told to (``--crash-dump-folder``, ``sglang.srt.managers.configure_logging --dump-requests-folder``) pickles a
mapping whose ``requests`` are a list of (request, output, created at, finished at); older ones the list alone. They are read as
data (``pickles``): none of SGLang's classes is imported, and a file that names any other is refused. What is written, SGLang's own
``scripts/playground/replay_request_dump.py`` reads. With ``--log-requests-format json`` it logs a line for each request instead.

A request is a turn of its own, and what it gave the turn under it. Those of one session (``session_params``) are one conversation,
a request under the reply that it goes on from; all others are conversations of their own, since each has its whole prompt.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from io import BytesIO
from math import isfinite
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np

from sessiontree.annotations import LOGPROBS, TokenValues
from sessiontree.errors import LimitExceeded
from sessiontree.interchange.conversations import Branch, Conversation, Image, Tree, Turn, parts_of, text_of
from sessiontree.interchange.formats import Format
from sessiontree.interchange.images import as_data_url, from_base64, from_data_url, to_base64
from sessiontree.interchange.losses import Losses
from sessiontree.interchange.pickles import BadPickle, dump, load
from sessiontree.interchange.plain import Foreign, Room, from_plain, to_plain
from sessiontree.interchange.source import SourceFile, expect
from sessiontree.interchange.times import seconds
from sessiontree.interchange.words import is_text
from sessiontree.tokens import MAX_TOKEN_ID

_REQUEST: Final = ("sglang.srt.managers.io_struct", "GenerateReqInput")
_EMBEDDING: Final = ("sglang.srt.managers.io_struct", "EmbeddingReqInput")
_SERVER: Final = "sglang.srt.server_args"
#: All that a dump may name. None is looked up, so what they would do does not matter; what else is named is somebody's own.
_NAMED: Final = {
    _REQUEST,
    _EMBEDDING,
    ("sglang.srt.utils", "ImageData"),
    ("sglang.srt.utils.common", "ImageData"),
    ("sglang.srt.utils.common", "VideoData"),
    ("sglang.srt.managers.schedule_batch", "Modality"),
    ("sglang.srt.multimodal.modality", "Modality"),
    ("sglang.srt.lora.lora_registry", "LoRARef"),
    (_SERVER, "ServerArgs"),
    (_SERVER, "_rebuild_server_args"),
}
_VALUES_PER_BYTE: Final = 1000  # how often one value of a dump may be named, on average
_PICTURES: Final = (b"\x89PNG", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"GIF8", "image/gif"), (b"RIFF", "image/webp")


@attrs.define(eq=False)
class _Request:
    """One of a dump. ``number``: its place there; ``names``: its class; ``state``: its fields; ``stamps``: created and finished;
    ``name``: the id of its turn.
    """

    number: int
    names: tuple[str, str]
    state: dict[str, Any]
    output: dict[str, Any]
    stamps: tuple[float, float]
    place: str
    name: str = ""

    @property
    def rid(self) -> str | None:
        rid = self.state.get("rid")
        return rid if isinstance(rid, str) and rid else None

    @property
    def session(self) -> dict[str, Any] | None:
        session = self.state.get("session_params")
        return session if isinstance(session, dict) and isinstance(session.get("id"), str) and session["id"] else None

    @property
    def replied(self) -> bool:
        return isinstance(self.output.get("text"), str) or _token_ids(self.output.get("output_ids")) is not None


def read(file: SourceFile, losses: Losses) -> Iterator[Conversation]:
    """A conversation for each session, and for each request that is of none."""
    room = Room(10**6 + _VALUES_PER_BYTE * file.size)
    rest: dict[str, Any] = {}
    if file.first_byte() == b"{":
        requests = list(_logged(file, losses))
    else:
        requests, rest = _dumped(file, losses)
    counts = Counter(request.rid for request in requests)
    sessions: dict[str, list[_Request]] = {}
    for request in requests:
        own = request.rid if request.rid is not None and counts[request.rid] == 1 else f"{file.stem}-{request.number + 1}"
        sessions.setdefault(request.session["id"] if request.session else own, []).append(request)
    for name, members in sessions.items():
        fields = {"dump": _plain(rest, "the dump", room, losses)} if rest else {}
        rest = {}  # what is said of the whole file is said once
        yield Conversation(id=name, turns=list(_turns(members, room, losses)), fields=fields)


def _dumped(file: SourceFile, losses: Losses) -> tuple[list[_Request], dict[str, Any]]:
    def known(module: str, name: str) -> bool:
        if (module, name) not in _NAMED:
            losses.fault("a class or function that no dump of SGLang holds", "the whole file", f"{module}.{name}")
        return (module, name) in _NAMED

    try:
        value = load(file.path.read_bytes(), known)
    except BadPickle as error:
        losses.fault("no pickle of SGLang's", f"byte {error.offset}", str(error))
        return [], {}
    rest = value if isinstance(value, dict) else {"requests": value, "bare": True}
    entries = rest.pop("requests", None)
    if not expect(entries, list, "requests", "the whole file", losses):
        return [], {}
    return [each for number, entry in enumerate(entries) for each in _request(number, entry, losses)], rest


def _request(number: int, entry: Any, losses: Losses) -> Iterator[_Request]:
    place = f"requests[{number}]"
    match entry:
        case (Foreign("new", [Foreign("class", names), (), dict() as state]), output, created, finished):
            output = {} if output is None else output
            timed = all(expect(each, (int, float), "a time of a request", place, losses) for each in (created, finished))
            if timed and expect(output, dict, "the output of a request", place, losses):
                yield _Request(number, (names[0], names[1]), state, output, (created, finished), place)
        case _:
            losses.fault("no request with its output and two times", place)


def _logged(file: SourceFile, losses: Losses) -> Iterator[_Request]:
    number = 0
    begun: dict[str, str] = {}
    for place, line in file.lines(losses):
        if not expect(line, dict, "a line of the log", place, losses):
            continue
        if not expect(line.get("event"), str, "the event of a line of the log", place, losses):
            continue
        event, rid = line["event"], str(line.get("rid"))
        if event == "request.received":
            begun[rid] = place
            continue
        if event != "request.finished":
            losses.add("a line of the log that is about no request, or about one before it was adapted", place)
            continue
        begun.pop(rid, None)
        state, output = line.get("obj"), line.get("out")
        if expect(state, dict, "obj", place, losses) and expect(output, dict, "out", place, losses):
            finished = seconds(line.get("timestamp")) or 0.0
            created = state.get("received_time")
            times = (created if isinstance(created, (int, float)) else finished, finished)
            yield _Request(number, _EMBEDDING if "embedding" in output else _REQUEST, state, output, times, place)
            number += 1
    for place in begun.values():
        losses.add("a request of the log that did not finish", place)


#: Names that may be given to other turns.
_MADE: Final = re.compile(r"request-|.*/reply\Z", re.DOTALL)


def _turns(requests: list[_Request], room: Room, losses: Losses) -> Iterator[Turn]:
    by_rid: dict[str, _Request] = {}  # those before it: a request is dumped when it has ended
    counts = Counter(request.rid for request in requests)
    before = None
    for request in requests:
        own = request.rid is not None and counts[request.rid] == 1 and is_text(request.rid) and not _MADE.match(request.rid)
        request.name = str(request.rid) if own else f"request-{request.number}"
        parent, derived_from = _goes_on(request, by_rid, before, losses)
        before = request
        if request.rid is not None:
            by_rid[request.rid] = request
        yield _prompt(request, parent, derived_from, room, losses)
        if request.replied:
            yield _reply(request, room, losses)


def _time(seconds: float) -> float | None:
    return float(seconds) if 0 < seconds < 1e12 else None


def _last_id(request: _Request) -> str:
    return f"{request.name}/reply" if request.replied else request.name


def _goes_on(
    request: _Request, by_rid: Mapping[str, _Request], before: _Request | None, losses: Losses
) -> tuple[str | None, tuple[str, ...]]:
    """The turn that a request goes on from, and turns that it is made of."""
    session = request.session
    if session is None:
        return None, ()
    rid = session.get("rid")
    if rid is None:
        # A streaming session goes on from its last request without saying so; then the prompt was longer than what was sent.
        meta, ids = request.output.get("meta_info"), request.state.get("input_ids")
        prompt = meta.get("prompt_tokens") if isinstance(meta, dict) else None
        goes_on = isinstance(prompt, int) and isinstance(ids, (list, tuple)) and prompt > len(ids)
        return (_last_id(before) if goes_on and before is not None else None), ()
    target = by_rid.get(rid) if isinstance(rid, str) else None
    if target is None:
        losses.add("a request that goes on from one that is not before it in the file", request.place)
        return None, ()
    if session.get("offset"):
        losses.add("a request that goes on from within another", request.place)
        return None, (_last_id(target),)
    return target.name if session.get("drop_previous_output") else _last_id(target), ()


def _prompt(request: _Request, parent: str | None, derived_from: tuple[str, ...], room: Room, losses: Losses) -> Turn:
    state, fields = dict(request.state), dict[str, Any]()
    text = state.pop("text", None)
    content: Any = text if isinstance(text, str) else None
    if content is None and "text" in request.state:
        state["text"] = text
    ids = _token_ids(state.get("input_ids"))
    if ids is not None:
        fields["ids"] = type(state.pop("input_ids")).__name__
    images: list[Image] = []
    if (parts := _pictures(state.get("image_data"), images, losses)) is not None:
        shown = [{name: value for name, value in part.items() if name != "in"} for part in parts]
        content = [*([{"type": "text", "text": content}] if content is not None else ()), *shown]
        fields["pictures"] = [_plain(part["in"], request.place, room, losses) for part in parts]
        if not isinstance(state.pop("image_data"), list):
            fields["pictures"] = fields["pictures"][0]
    fields |= {"request": _plain(state, request.place, room, losses), "class": list(request.names), "number": request.number}
    fields["times"] = to_plain(list(request.stamps))
    if not request.replied:
        fields["output"] = _plain(request.output, request.place, room, losses)
    return Turn(
        id=request.name,
        parent=parent,
        message=None if content is None else {"role": "user", "content": content},
        role="user",
        images=tuple(images),
        created_at=_time(request.stamps[0]),
        token_ids=ids,
        derived_from=derived_from,
        fields=fields,
        place=request.place,
    )


def _pictures(data: Any, images: list[Image], losses: Losses) -> list[dict[str, Any]] | None:
    """A part of a message for each picture of ``image_data``, and as "in" what it was in; None where that is something else."""
    items = data if isinstance(data, list) else [data]
    parts = []
    for item in items:
        url: Any = item
        within: Foreign | dict[Any, Any] | None = None
        if isinstance(item, Foreign) and _named(item) == "ImageData" and isinstance(item.parts[2], dict):
            url = item.parts[2].get("url")
            within = Foreign("new", [*item.parts[:2], _without_url(item.parts[2])])
        elif isinstance(item, dict):  # the same in a log, and from clients
            url, within = item.get("url"), _without_url(item)
        if isinstance(url, bytes) and url:
            image: Image | None = Image(url, _kind(url))
            form = "bytes"
        elif isinstance(url, str) and url:
            image, form = _in_text(url, losses.file)
        else:
            return None
        if image is None:
            part: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
        else:
            part = {"type": "image", "image": len(images)}
            images.append(image)
        parts.append(part | {"in": [form, within]})
    return parts or None


def _without_url(state: dict[Any, Any]) -> dict[Any, Any]:
    return {name: each for name, each in state.items() if name != "url"}


def _named(value: Foreign) -> Any:
    """The name of the class that it is an instance of, if it is one."""
    return value.parts[0].parts[1] if value.kind == "new" else None


def _in_text(url: str, file: str) -> tuple[Image | None, str]:
    """The picture that a text is, if it is one and would be written as the same text; and the form that this is."""
    aside = Losses(file, salvage=True)  # what is no base64 is a name then, such as SGLang takes it for
    if url.startswith("data:"):
        image = from_data_url(url, "", aside)
        return (image, "data") if image is not None and as_data_url(image) == url else (None, "url")
    if url.startswith(("http://", "https://", "file://")) or len(url) % 4:
        return None, "url"
    image = from_base64(url, "", "", aside)
    if image is None or to_base64(image) != url or (kind := _kind(image.data)) == "application/octet-stream":
        return None, "url"
    return Image(image.data, kind), "base64"


def _kind(data: bytes) -> str:
    return next((kind for magic, kind in _PICTURES if data.startswith(magic)), "application/octet-stream")


def _reply(request: _Request, room: Room, losses: Losses) -> Turn:
    output, fields, annotations = dict(request.output), {}, {}
    text, ids = output.pop("text", None), _token_ids(output.get("output_ids"))
    if "text" in request.output and not isinstance(text, str):
        output["text"] = text
    if ids is not None:
        fields["ids"] = type(output.pop("output_ids")).__name__
    meta = output.get("meta_info")
    meta = dict(meta) if isinstance(meta, dict) else {}
    if ids is not None and (logprobs := _logprobs(meta.get("output_token_logprobs"), ids)) is not None:
        rows = meta.pop("output_token_logprobs")
        fields["logprobs"] = type(rows[0]).__name__
        annotations[LOGPROBS] = logprobs
        output["meta_info"] = meta
    count = meta.get("completion_tokens")
    if ids is not None and isinstance(count, int) and count > len(ids):
        losses.add("a streamed reply of which the dump has only the last piece", request.place)
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else None
    return Turn(
        id=f"{request.name}/reply",
        parent=request.name,
        message={"role": "assistant", "content": text} if isinstance(text, str) else None,
        role="assistant",
        created_at=_time(request.stamps[1]),
        token_ids=ids,
        generated=True,
        finish_reason=kind if isinstance(kind, str) else None,
        annotations=annotations,
        fields=fields | {"output": _plain(output, request.place, room, losses)},
        place=f"{request.place}, output",
    )


def _logprobs(rows: Any, ids: list[int]) -> Any:
    """Log-probabilities as an array, where the rows say no more than them and the ids: (logprob, id, None) for each."""
    if not isinstance(rows, list) or len(rows) != len(ids) or not rows:
        return None
    kind = type(rows[0])
    for row, token_id in zip(rows, ids, strict=True):
        if type(row) is not kind or kind not in (list, tuple) or len(row) != 3 or type(row[0]) is not float:
            return None
        if not isfinite(row[0]) or type(row[1]) is not int or row[1] != token_id or row[2] is not None:
            return None
    return np.array([row[0] for row in rows], np.float64)


def _token_ids(value: Any) -> list[int] | None:
    """Token ids, if these are some; None otherwise."""
    if not isinstance(value, (list, tuple)) or not value:
        return None
    return list(value) if all(type(each) is int and 0 <= each <= MAX_TOKEN_ID for each in value) else None


def _plain(value: Any, place: str, room: Room, losses: Losses) -> Any:
    try:
        return to_plain(value, room)
    except LimitExceeded as error:
        losses.fault("more than a turn can carry", place, str(error))
        return {}


def write(conversations: Iterable[Conversation], path: Path, losses: Losses) -> None:
    """One dump: the requests that came from dumps as they were, and one for each reply of another's."""
    rest: dict[str, Any] = {"server_args": None, "config_updates": [], "resolved_config": None}
    said = False
    records: list[tuple[bool, int, tuple[Any, ...]]] = []  # what was in a dump comes first, in its order there
    for conversation in conversations:
        if (dump_fields := conversation.fields.get("dump")) is not None:
            if said:
                losses.add("what a second dump said of its server", conversation.id)
            else:
                rest, said = from_plain(dump_fields), True
        tree = Tree(conversation)
        if conversation.tools:
            losses.add("tool definitions", conversation.id)
        count = 0
        for turn_id, turn in tree.turns.items():
            if "request" in turn.fields:
                below = (tree.turns[each] for each in tree.children[turn_id])
                reply = next((each for each in below if "output" in each.fields and "request" not in each.fields), None)
                forked = conversation.read_as is not None
                number = len(records) if forked else turn.fields["number"]
                records.append((forked, number, _restored(conversation, turn, reply)))
            elif "output" not in turn.fields:
                replies = turn.generated or (turn.message or {}).get("role") == "assistant"
                if replies or not tree.children[turn_id]:
                    count += 1
                    branch = tree.path(turn_id)
                    made = _made(conversation, count, branch[:-1] if replies else branch, turn if replies else None, losses)
                    records.append((True, len(records), made))
        if count > 1:
            losses.add("a tree is written as requests: turns before several replies stand in each", conversation.id)
    requests = [record for *_, record in sorted(records, key=lambda each: each[:2])]
    buffer = BytesIO()
    dump(requests if rest.pop("bare", False) else rest | {"requests": requests}, buffer, _NAMED)
    path.write_bytes(buffer.getvalue())


def _instance(names: Iterable[str], state: dict[str, Any]) -> Foreign:
    return Foreign("new", [Foreign("class", list(names)), (), state])


def _restored(conversation: Conversation, turn: Turn, reply: Turn | None) -> tuple[Any, ...]:
    fields = turn.fields
    state = from_plain(fields["request"])
    if conversation.read_as is not None:
        if isinstance(state.get("session_params"), dict):
            state["session_params"] = state["session_params"] | {"id": conversation.id}
        else:
            state["rid"] = conversation.id
    content = (turn.message or {}).get("content")
    if (text := content if isinstance(content, str) else None) is not None:
        state["text"] = text
    parts = [part for part in content or () if not isinstance(content, str)]
    if parts and parts[0]["type"] == "text":
        state["text"] = parts.pop(0)["text"]
    if "ids" in fields:
        ids = np.asarray(turn.token_ids).tolist()
        state["input_ids"] = tuple(ids) if fields["ids"] == "tuple" else ids
    if (within := from_plain(fields.get("pictures"))) is not None:
        several = isinstance(within[0], list)
        pictures = [_picture(part, turn, *each) for part, each in zip(parts, within if several else [within], strict=True)]
        state["image_data"] = pictures if several else pictures[0]
    output = from_plain(fields.get("output", {}) if reply is None else reply.fields["output"])  # a fork may end before the reply
    if reply is not None:
        if reply.message is not None:
            output["text"] = reply.message["content"]
        if "ids" in reply.fields:
            ids = np.asarray(reply.token_ids).tolist()
            output["output_ids"] = tuple(ids) if reply.fields["ids"] == "tuple" else ids
            if (kind := reply.fields.get("logprobs")) is not None:
                output["meta_info"]["output_token_logprobs"] = [
                    (list if kind == "list" else tuple)(row) for row in _rows(reply, ids)
                ]
    return (_instance(fields["class"], state), output, *from_plain(fields["times"]))


def _ints(turn: Turn) -> list[int] | None:
    """The token ids of a turn; None where it has none, or only the zeros that stand for its pictures where nothing made tokens."""
    ids: list[int] = [] if turn.token_ids is None else np.asarray(turn.token_ids).tolist()
    return ids if any(ids) or len(ids) > len(turn.images) else None


def _rows(turn: Turn, ids: list[int]) -> list[tuple[float, int, None]]:
    """(logprob, id, None) for each token, as SGLang has it; none where not all of them have one."""
    said = turn.annotations.get(LOGPROBS)
    stretches = said.stretches if isinstance(said, TokenValues) else [] if said is None else [(0, np.asarray(said))]
    values = stretches[0][1].tolist() if len(stretches) == 1 else []
    return [(float(value), token_id, None) for value, token_id in zip(values, ids, strict=True)] if len(values) == len(ids) else []


def _picture(part: Mapping[str, Any], turn: Turn, form: str, within: Foreign | dict[str, Any] | None) -> Any:
    if part["type"] == "image":
        image = turn.images[part["image"]]
        value: Any = image.data if form == "bytes" else as_data_url(image) if form == "data" else to_base64(image)
    else:
        value = part["image_url"]["url"]
    if within is None:
        return value
    if isinstance(within, dict):
        return {"url": value} | within
    return Foreign("new", [*within.parts[:2], {"url": value} | within.parts[2]])


def _shown(turn: Turn, losses: Losses, rid: str) -> Iterator[str]:
    """The pictures of a message: data URLs, and URLs that are names."""
    texts = 0
    for part in parts_of(turn.message or {}):
        kind = part.get("type")
        texts += kind == "text"
        if kind == "image" and isinstance(part.get("image"), int):
            yield as_data_url(turn.images[part["image"]])
        elif kind == "image_url" and isinstance(part.get("image_url"), Mapping):
            yield str(part["image_url"].get("url"))
        elif kind != "text":
            losses.add(f"parts of messages of type {kind}", rid)
    if texts > 1:
        losses.add("parts of text, written as one", rid)


def _made(conversation: Conversation, count: int, prompt: Branch, reply: Turn | None, losses: Losses) -> tuple[Any, ...]:
    """A request for a reply of another's conversation, from its messages or, where all have them, its token ids."""
    rid = f"{conversation.id}-{count}"
    times = [each.created_at for each in (*prompt[-1:], reply) if each is not None and each.created_at is not None]
    created = times[0] if times else conversation.created_at or 0.0
    state: dict[str, Any] = {"rid": rid, "sampling_params": {}, "return_logprob": False}
    ids = [_ints(turn) for turn in prompt]
    if ids and None not in ids:
        state["input_ids"] = [each for some in ids for each in some or ()]
    else:
        messages = [turn for turn in prompt if turn.message is not None]
        state["text"] = "\n\n".join(text_of(turn.message) for turn in messages)
        if count := sum(bool(each) for each in ids):
            losses.add("token ids of a prompt, where not all its turns have some", rid, count)
        if len(messages) > 1 or any(turn.message["role"] != "user" for turn in messages if turn.message is not None):
            losses.add("who said what in a prompt: it is one text, without a chat template", rid)
        if any(turn.message is None for turn in prompt):
            losses.add("turns that are no messages", rid)
    if pictures := [picture for turn in prompt for picture in _shown(turn, losses, rid)]:
        state["image_data"] = pictures
    for turn in (*prompt[-1:], *(() if reply is None else (reply,))):
        for name in turn.annotations.keys() - {LOGPROBS}:
            losses.add(f"the annotation {name}", rid)
    output: dict[str, Any] = {}
    if reply is not None:
        message, completion = reply.message or {}, _ints(reply)
        if count := sum(1 for _ in _shown(reply, losses, rid)):
            losses.add("pictures of a reply", rid, count)
        for name in ("tool_calls", "reasoning_content"):
            if message.get(name):
                losses.add(f"{name} of a reply, beside its text", rid)
        reason = {"type": reply.finish_reason} if reply.finish_reason is not None else None
        meta: dict[str, Any] = {"id": rid, "finish_reason": reason}
        if "input_ids" in state:
            meta["prompt_tokens"] = len(state["input_ids"])
        output = {"text": text_of(message), "meta_info": meta}
        if completion:
            output["output_ids"] = completion
            meta["completion_tokens"] = len(completion)
            if rows := _rows(reply, completion):
                meta["output_token_logprobs"] = rows
    return (_instance(_REQUEST, state), output, float(created), float(times[-1] if times else created))


FORMAT: Final = Format(
    "sglang",
    "SGLang's request and crash dumps (pickles, read as data), and its request log",
    ".pkl",
    read,
    write,
    lacks=frozenset({"title", "created_at", "heads", "main", "media", "derived_from"}),
    keys=frozenset({"role", "content", "tool_calls", "reasoning_content"}),
    one_result=True,
)
