"""A client of the mini scheduler that keeps its own record, and trusts nothing that the server remembers.

An :class:`Ask` is a request as its client makes it, a :class:`Turn` what came of it. Both hold the whole context as the client
knows it: token ids, and pictures where they stand. Any turn can thus be asked again as one stateless request under another cache
salt, without session, history or cached KV, and has to come out the same: ``Client.check``.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import httpx
import numpy as np
from PIL import Image

from tests.mini_server import Server

VISION_START, VISION_END, IMAGE_PAD = 151652, 151653, 151655
GREEDY: Mapping[str, Any] = {"temperature": 0, "max_new_tokens": 4}
NUMBERS = itertools.count()
SIDE = 28  # pixels of the square that one token of a picture stands for


# --- the record ---------------------------------------------------------------------------------------------------------


@attrs.frozen
class Picture:
    """A picture as it is uploaded, and how many tokens it takes in the context."""

    url: str = attrs.field(repr=False)
    tokens: int


Part = int | Picture


def picture(seed: int, width: int = 2, height: int = 2) -> Picture:
    """Noise, of so many tokens across and down."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height * SIDE, width * SIDE, 3), dtype=np.uint8)
    return Picture(data_url(png(Image.fromarray(pixels))), width * height)


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def shown(*pictures: Picture) -> tuple[Part, ...]:
    """Pictures in a prompt, each between its two marks."""
    return tuple(part for each in pictures for part in (VISION_START, each, VISION_END))


def length(parts: Iterable[Part]) -> int:
    """Tokens of a context."""
    return sum(part.tokens if isinstance(part, Picture) else 1 for part in parts)


def cut(parts: Iterable[Part], kept: int) -> tuple[Part, ...]:
    """The first ``kept`` tokens of a context; no cut goes through a picture."""
    found, left = [], kept
    for part in parts:
        if left <= 0:
            break
        found.append(part)
        left -= length([part])
    assert left == 0, f"{kept} tokens end inside a picture, or behind the context"
    return tuple(found)


def wire(parts: Iterable[Part]) -> dict[str, Any]:
    """A prompt as /generate takes it: one pad stands for each picture."""
    given = list(parts)
    pictures = [part.url for part in given if isinstance(part, Picture)]
    ids = [IMAGE_PAD if isinstance(part, Picture) else part for part in given]
    return {"input_ids": ids, **({"image_data": pictures} if pictures else {})}


@attrs.frozen
class Ask:
    """A request as its client makes it.

    ``context``: what it believes to stand before ``parts``. ``params``: its session_params. ``more``: other fields of the body.
    """

    context: tuple[Part, ...]
    parts: tuple[Part, ...]
    sampling: Mapping[str, Any] = GREEDY
    rid: str | None = None
    params: Mapping[str, Any] | None = None
    more: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def prompt(self) -> tuple[Part, ...]:
        return (*self.context, *self.parts)

    @property
    def body(self) -> dict[str, Any]:
        names = {"rid": self.rid, "session_params": self.params}
        given = {name: value for name, value in names.items() if value is not None}
        return {**wire(self.parts), "sampling_params": dict(self.sampling), **given, **self.more}

    def stateless(self, salt: str) -> dict[str, Any]:
        """The body of the same request with its whole context in it, and nothing kept for it under that salt."""
        return {**wire(self.prompt), "sampling_params": dict(self.sampling), "cache_salt": salt}

    def answered(self, answer: Mapping[str, Any]) -> Turn:
        """The turn that an answer, or the last event of a stream, makes of it."""
        meta = answer["meta_info"]
        assert meta["prompt_tokens"] == length(self.prompt), (meta["prompt_tokens"], length(self.prompt))
        assert meta["completion_tokens"] == len(answer["output_ids"])
        if self.rid is not None:
            assert meta["id"] == self.rid
        return Turn(
            self, tuple(answer["output_ids"]), answer["text"], meta["finish_reason"], meta["cached_tokens"], str(meta["id"])
        )


@attrs.frozen
class Turn:
    """What came of an Ask; ``rid``: what the server calls it."""

    ask: Ask
    output_ids: tuple[int, ...]
    text: str
    finish_reason: Mapping[str, Any]
    cached_tokens: int
    rid: str

    @property
    def context(self) -> tuple[Part, ...]:
        """All that a request which goes on from here has before it."""
        return (*self.ask.prompt, *self.output_ids)


# --- the wire -----------------------------------------------------------------------------------------------------------


def data_of(line: str) -> str | None:
    """What a line of a stream of server-sent events says; None for one that says nothing."""
    return line.removeprefix("data:").strip() if line.startswith("data:") else None


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """What a stream says, up to its [DONE]; a stream without one was cut off."""
    for line in response.iter_lines():
        said = data_of(line)
        if said == "[DONE]":
            return
        if said:
            yield json.loads(said)
    raise AssertionError("the stream ended without [DONE]")


class Client:
    """A client of a server, under one key. It can be any number of them: what it knows is in its turns."""

    def __init__(self, server: Server, key: str | None = None) -> None:
        self.server = server
        self.key = key
        self.http = server.http(key)

    def reconnect(self) -> None:
        """After the server was started again: it is somewhere else."""
        self.http.close()
        self.http = self.server.http(self.key)

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def ok(self, path: str, body: Any) -> Any:
        answer = self.post(path, body)
        assert answer.status_code == 200, (answer.status_code, answer.text)
        return answer.json()

    def send(self, ask: Ask) -> Turn:
        return ask.answered(self.ok("/generate", ask.body))

    @contextmanager
    def stream(self, ask: Ask) -> Iterator[Iterator[dict[str, Any]]]:
        """The events of a request that is streamed; leaving early is a client that disconnects."""
        with self.http.stream("POST", "/generate", json={**ask.body, "stream": True}) as response:
            if response.status_code != 200:
                raise AssertionError((response.status_code, response.read().decode()))
            yield events(response)

    def fresh(self, what: str = "salt") -> str:
        """A name that nobody has used."""
        return f"{what}-{next(NUMBERS)}"

    def check(self, turn: Turn) -> Turn:
        """The turn came to its end, and is what its whole history gives as one stateless request under another salt."""
        answer = self.ok("/generate", turn.ask.stateless(self.fresh()))
        replay = attrs.evolve(turn.ask, rid=None).answered(answer)
        assert replay.cached_tokens == 0, "nothing may be cached under a fresh salt"
        assert turn.finish_reason["type"] in ("stop", "length")
        same = (turn.output_ids, turn.text, turn.finish_reason)
        assert (replay.output_ids, replay.text, replay.finish_reason) == same
        return turn

    def check_beginning(self, turn: Turn, most: int) -> None:
        """The turn was aborted, and what came of it is the beginning of what it would have been; ``most`` tokens are compared."""
        assert turn.finish_reason["type"] == "abort"
        beginning = turn.output_ids[:most]
        whole = attrs.evolve(turn.ask, rid=None, sampling={**turn.ask.sampling, "max_new_tokens": len(beginning)})
        assert tuple(self.ok("/generate", whole.stateless(self.fresh()))["output_ids"]) == beginning


class Talk:
    """A session that a client has opened, and the turns of it as the client knows them."""

    def __init__(self, client: Client, session_id: str | None = None, *, streaming: bool = False) -> None:
        self.client = client
        self.id: str = client.ok("/open_session", {"streaming": streaming} | ({"session_id": session_id} if session_id else {}))
        assert session_id in (None, self.id)

    def ask(
        self,
        *parts: Part,
        after: Turn | None = None,
        offset: int | None = None,
        drop: bool = False,
        replace: bool = False,
        sampling: Mapping[str, Any] = GREEDY,
        tip: Turn | None = None,
        **more: Any,
    ) -> Ask:
        """A request behind a turn; ``tip``: behind that one, which the server is to know without being told."""
        found = after or tip
        context = () if found is None else (found.ask.prompt if drop else found.context)
        if offset:
            context = cut(context, offset if offset > 0 else length(context) + offset)
        fields = {
            "rid": None if after is None else after.rid,
            "offset": offset,
            "drop_previous_output": drop or None,
            "replace": replace or None,
        }
        params = {"id": self.id} | {name: value for name, value in fields.items() if value is not None}
        return Ask(context, parts, sampling, more.pop("rid", self.client.fresh("rid")), params, more)

    def forked(self, at: Turn) -> Talk:
        """A session behind a turn of this one."""
        made = self.client.ok(f"/sessions/{self.id}/fork", {"rid": at.rid})
        assert made["rid"] == at.rid and made["tokens"] == length(at.context)
        fork = Talk.__new__(Talk)
        fork.client, fork.id = self.client, made["session_id"]
        return fork

    def turn(self, *parts: Part, **how: Any) -> Turn:
        """A request that is answered, and checked against its replay."""
        return self.client.check(self.client.send(self.ask(*parts, **how)))

    def refused(self, status: int, *parts: Part, **how: Any) -> dict[str, Any]:
        """A request that is answered with an error, which changes nothing: what the error says."""
        before = self.known()
        answer = self.client.post("/generate", self.ask(*parts, **how).body)
        assert answer.status_code == status, (answer.status_code, answer.text)
        assert self.known() == before
        error: dict[str, Any] = answer.json()["error"]
        return error

    def known(self) -> dict[str, dict[str, Any]]:
        """What the server says of each request of this session."""
        answer = self.client.http.get(f"/sessions/{self.id}")
        assert answer.status_code == 200, answer.text
        assert answer.json()["session_id"] == self.id
        return {each["rid"]: each for each in answer.json()["requests"]}
