"""The mini scheduler against those who mean it harm, and those who know no better.

Whatever comes, the answer is no 5xx, has one shape, and repeats nothing of what was sent; nothing changes, nothing grows, and the
server goes on. What is another tenant's cannot be told from what never was.
"""

from __future__ import annotations

import base64
import json
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import given, settings
from PIL import Image
from schemathesis import GenerationMode
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import ignored_auth, positive_data_acceptance

from tests.mini_client import GREEDY, IMAGE_PAD, Client, Talk, data_url, picture, png, shown
from tests.mini_server import ForkedServer, Server

SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"
KEYS = {"acme": "key-of-acme", "other": "key-of-other"}
ADMIN = "key-of-admin"
MODEL = "tiny-qwen2.5-vl"
SHORT = {"temperature": 0, "max_new_tokens": 2}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with ForkedServer(tmp_path_factory.mktemp("hostile") / "store", "--model", MODEL, "--admin-key", ADMIN, keys=KEYS) as running:
        yield running
        running.stop()
        assert "Traceback" not in running.log.read_text()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    yield (made := Client(server, KEYS["acme"]))
    made.http.close()


@pytest.fixture(autouse=True)
def healthy(server: Server) -> Iterator[None]:
    yield
    server.check_healthy()


@pytest.fixture(scope="module")
def kept(client: Client) -> Iterator[Talk]:
    """A session with a turn that can be gone on from after all of this."""
    made = Talk(client)
    turn = made.turn(*range(100, 120))
    yield made
    made.turn(*range(5), after=turn)


@pytest.fixture
def talk(kept: Talk) -> Iterator[Talk]:
    """That session, which is afterwards what it was."""
    before = kept.known()
    yield kept
    assert kept.known() == before


def refused(answer: httpx.Response, *statuses: int) -> dict[str, Any]:
    """An error in its one shape."""
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text)
    assert not statuses or answer.status_code in statuses, (answer.status_code, answer.text)
    body = answer.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"] and len(answer.text) < 2_000
    error: dict[str, Any] = body["error"]
    return error


# --- the schema -----------------------------------------------------------------------------------------------------------


def operations(server: Server) -> dict[str, Any]:
    """What the server says of itself, by method and path."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    schema.config.update(base_url=server.url)
    return {found.ok().label: found.ok() for found in schema.get_all_operations() if isinstance(found, Ok)}


OPERATIONS = [
    "POST /open_session",
    "POST /close_session",
    "POST /generate",
    "POST /abort_request",
    "GET /sessions/{session_id}",
    "POST /sessions/{session_id}/fork",
    "POST /v1/chat/completions",
    "POST /v1/responses",
    "GET /v1/responses/{response_id}",
    "DELETE /v1/responses/{response_id}",
    "GET /v1/responses/{response_id}/input_items",
    "GET /v1/models",
    "GET /health",
    "GET /metrics",
]


@pytest.fixture(scope="module")
def described(server: Server) -> dict[str, Any]:
    found = operations(server)
    assert sorted(found) == sorted(OPERATIONS)
    return found


# The key is put there by the test. No schema says how fields depend on each other, nor that 1.0 is no int here.
NOT_CHECKED = [ignored_auth, positive_data_acceptance]


@pytest.mark.parametrize("what", OPERATIONS)
def test_the_server_keeps_to_its_own_schema(client: Client, described: dict[str, Any], what: str) -> None:
    @settings(max_examples=1_000 if SOAK else 15, database=None)
    @given(case=described[what].as_strategy())
    def keeps(case: Any) -> None:
        limit_work(what, case.body)
        case.headers["Authorization"] = f"Bearer {ADMIN if what == 'GET /metrics' else KEYS['acme']}"
        answer = case.call(timeout=60)
        case.validate_response(answer, excluded_checks=NOT_CHECKED)
        if answer.status_code >= 400:
            assert answer.json().keys() == {"error"}

    keeps()


POSTS = [what for what in OPERATIONS if what.startswith("POST")]


@pytest.mark.parametrize("what", POSTS)
def test_what_the_schema_does_not_allow_is_refused(client: Client, described: dict[str, Any], what: str) -> None:
    """Bodies that are wrong in one thing: refused in the one shape, or taken where the schema says less than is taken."""

    @settings(max_examples=500 if SOAK else 10, database=None)
    @given(case=described[what].as_strategy(generation_mode=GenerationMode.NEGATIVE))
    def refuses(case: Any) -> None:
        limit_work(what, case.body)
        case.headers["Authorization"] = f"Bearer {KEYS['acme']}"
        answer = case.call(timeout=60)
        if answer.status_code != 200:
            refused(answer)
        assert answer.status_code == 200 or answer.status_code < 500

    refuses()


LENGTHS = {
    "POST /generate": "max_new_tokens",
    "POST /v1/chat/completions": "max_completion_tokens",
    "POST /v1/responses": "max_output_tokens",
}


def limit_work(what: str, body: Any) -> None:
    """A valid request for a thousand tokens is no test of the schema."""
    if what not in LENGTHS or not isinstance(body, dict):
        return
    if what == "POST /generate":
        if body.get("sampling_params") is None:
            body["sampling_params"] = {}
        body = body["sampling_params"]
    elif type(body.get("max_tokens")) is int:
        del body["max_tokens"]
    name = LENGTHS[what]
    if isinstance(body, dict) and (body.get(name) is None or (type(body[name]) is int and body[name] > 2)):
        body[name] = 2


# --- bodies ---------------------------------------------------------------------------------------------------------------


def nested(depth: int) -> bytes:
    return b'{"input_ids": ' + b"[" * depth + b"]" * depth + b"}"


RAW = {
    "nothing": b"",
    "no JSON": b"{",
    "not UTF-8": b'{"text": "\xff\xfe"}',
    "a list": b"[]",
    "null": b"null",
    "a number": b"1",
    "NaN": b'{"input_ids": [1], "sampling_params": {"temperature": NaN}}',
    "Infinity": b'{"input_ids": [1], "sampling_params": {"temperature": Infinity}}',
    "1e999": b'{"input_ids": [1], "sampling_params": {"temperature": 1e999}}',
    "NaN for an id": b'{"input_ids": [NaN]}',
    "NaN in an unknown field": b'{"input_ids": [1], "what": NaN}',
    "a huge int": b'{"input_ids": [' + b"9" * 4_000 + b"]}",
    "an int beyond all": b'{"input_ids": [' + b"9" * 100_000 + b"]}",
    "a lone surrogate for a rid": rb'{"input_ids": [1], "rid": "\ud800"}',
    "a lone surrogate for a session": rb'{"input_ids": [1], "session_params": {"id": "\udfff"}}',
    "a lone surrogate for a stop": rb'{"input_ids": [1], "sampling_params": {"max_new_tokens": 2, "stop": ["\ud800"]}}',
    "a lone surrogate for a field": rb'{"\ud800": 1}',
    "a NUL in a rid": rb'{"input_ids": [1], "rid": "a\u0000b"}',
    "nested 1,000 deep": nested(1_000),
    "nested 100,000 deep": nested(100_000),
    "many fields": json.dumps({f"field{number}": number for number in range(10_000)}).encode(),
    "twice the same field": b'{"input_ids": [1], "input_ids": "x"}',
}


@pytest.mark.parametrize("what", RAW)
@pytest.mark.parametrize("path", ["/generate", "/open_session", "/v1/chat/completions", "/v1/responses"])
def test_bodies_that_are_none(talk: Talk, client: Client, what: str, path: str) -> None:
    answer = client.http.post(path, content=RAW[what], headers={"Content-Type": "application/json"})
    if path == "/open_session" and answer.status_code == 200:
        pytest.fail(f"{what} opens a session")
    refused(answer)


def test_a_body_of_another_kind(talk: Talk, client: Client) -> None:
    for kind in ("text/plain", "application/xml", "multipart/form-data", "application/json; charset=utf-16"):
        refused(client.http.post("/generate", content=b"<a/>", headers={"Content-Type": kind}))


def test_a_body_that_is_too_large_is_not_read(talk: Talk, client: Client, server: Server) -> None:
    before = server.memory()

    def without_end() -> Iterator[bytes]:
        for _ in range(4_096):
            yield b" " * 65_536

    with suppress(httpx.TransportError):  # it may hang up in the middle, which is as good
        refused(client.http.post("/generate", content=without_end()), 413)
    assert server.memory() - before < 64 * 2**20


WRONG: list[dict[str, Any]] = [
    {"input_ids": "x"},
    {"input_ids": [1.5]},
    {"input_ids": [True]},
    {"input_ids": ["1"]},
    {"input_ids": [-1]},
    {"input_ids": [2**31]},
    {"input_ids": [2**63]},
    {"input_ids": [151_936 + 10_000]},
    {"input_ids": [[1]]},
    {"input_ids": None},
    {"input_ids": [1], "text": "both"},
    {"text": 5},
    {"text": ""},
    {"input_ids": [1] * 5_000},
    {"input_ids": [1], "sampling_params": []},
    {"input_ids": [1], "sampling_params": {"max_new_tokens": -1}},
    {"input_ids": [1], "sampling_params": {"max_new_tokens": 2**62}},
    {"input_ids": [1], "sampling_params": {"max_new_tokens": "4"}},
    {"input_ids": [1], "sampling_params": {"temperature": -0.1}},
    {"input_ids": [1], "sampling_params": {"top_p": 0}},
    {"input_ids": [1], "sampling_params": {"top_p": 1.01}},
    {"input_ids": [1], "sampling_params": {"top_k": -2}},
    {"input_ids": [1], "sampling_params": {"seed": 2**200}},
    {"input_ids": [1], "sampling_params": {"n": 0}},
    {"input_ids": [1], "sampling_params": {"n": 2**30}},
    {"input_ids": [1], "sampling_params": {"stop": "x" * 100_000}},
    {"input_ids": [1], "sampling_params": {"stop": ["a"] * 10_000}},
    {"input_ids": [1], "sampling_params": {"stop": [""]}},
    {"input_ids": [1], "sampling_params": {"stop_token_ids": [-5]}},
    {"input_ids": [1], "sampling_params": {"unheard_of": 1}},
    {"input_ids": [1], "unheard_of": 1},
    {"input_ids": [1], "rid": ""},
    {"input_ids": [1], "rid": "x" * 100_000},
    {"input_ids": [1], "rid": 5},
    {"input_ids": [1], "rid": ["a", "b"]},
    {"input_ids": [1], "sampling_params": {"n": 2}, "rid": ["a", "a"]},
    {"input_ids": [1], "cache_salt": "x" * 1_000_000},
    {"input_ids": [1], "cache_salt": 5},
    {"input_ids": [1], "stream": "yes"},
    {"input_ids": [1], "session_params": "x"},
    {"input_ids": [1], "session_params": {}},
    {"input_ids": [1], "session_params": {"id": ""}},
    {"input_ids": [1], "session_params": {"id": "../../etc/passwd"}},
    {"input_ids": [1], "session_params": {"id": "x" * 100_000}},
    {"input_ids": [1], "session_params": {"id": "other/session/x"}},
    {"input_ids": [1], "session_params": {"id": "s", "unheard_of": 1}},
    {"input_ids": [1], "session_params": {"id": "s", "offset": "1"}},
    {"input_ids": [1], "session_params": {"id": "s", "replace": 1}},
]


@pytest.mark.parametrize("body", WRONG, ids=lambda body: json.dumps(body)[:60])
def test_values_that_are_wrong(client: Client, body: dict[str, Any]) -> None:
    given = {"sampling_params": dict(SHORT), **body}
    if isinstance(body.get("sampling_params"), dict):
        given["sampling_params"] = {**SHORT, **body["sampling_params"]}
    error = refused(client.post("/generate", given), 400, 404, 413, 422)
    for needle in ("x" * 1_000, "/work", "Traceback", 'File "'):
        assert needle not in json.dumps(error)
    refused(client.post("/generate", {**given, "stream": given.get("stream", True)}))


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "TRACE", "GET", "NONSENSE"])
def test_methods_that_are_none(client: Client, method: str) -> None:
    refused(client.http.request(method, "/generate"), 405)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/nothing",
        "/sessions",
        "/sessions/",
        "/sessions/%00",
        "/sessions/..%2f..%2fx",
        "/v1/responses/%ff",
        "/sessions/" + "x" * 10_000,
    ],
)
def test_paths_that_are_none(client: Client, path: str) -> None:
    refused(client.http.get(path), 400, 404, 405, 414, 422)


def test_an_unknown_field_is_named(client: Client) -> None:
    for path, body in (
        ("/generate", {"input_ids": [1], "unheard_of": 1}),
        ("/open_session", {"unheard_of": 1}),
        ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "unheard_of": 1}),
        ("/v1/responses", {"model": MODEL, "input": "x", "unheard_of": 1}),
    ):
        assert "unheard_of" in json.dumps(refused(client.post(path, body), 422))


# --- pictures -------------------------------------------------------------------------------------------------------------


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is that large, and of which the first rows are there."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"\0" * 10_000_000, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def text_bomb() -> bytes:
    """A PNG with a compressed comment that is far larger than itself."""
    good = png(Image.new("RGB", (56, 56)))
    comment = chunk(b"zTXt", b"a\0\0" + zlib.compress(b"\0" * 200_000_000, 9))
    return good[:33] + comment + good[33:]


GOOD = png(Image.new("RGB", (56, 56), "red"))
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
# What takes its time to make is made by its test: every process of the run loads this module.
UPLOADS: dict[str, str | Callable[[], str]] = {
    "a URL": "http://127.0.0.1:1/x.png",
    "a URL with TLS": "https://example.com/x.png",
    "a file": "file:///etc/passwd",
    "a path": "/etc/passwd",
    "nothing": "",
    "an empty data URL": "data:image/png;base64,",
    "a data URL cut short": "data:image/png;base64",
    "no base64": "data:image/png;base64,!!!!",
    "a text": data_url(b"hello", "text/plain"),
    "SVG": data_url(SVG, "image/svg+xml"),
    "SVG as PNG": data_url(SVG),
    "a PNG cut short": data_url(GOOD[: len(GOOD) // 2]),
    "the header of a PNG": data_url(GOOD[:33]),
    "a bomb": lambda: data_url(bomb(50_000, 50_000)),
    "more pixels than are taken": lambda: data_url(png(Image.new("RGB", (3_000, 3_000)))),
    "a wide bomb": lambda: data_url(bomb(2**31 - 1, 1)),
    "no pixels": lambda: data_url(bomb(0, 0)),
    "a bomb in a comment": lambda: data_url(text_bomb()),
    "one pixel of 10,000": data_url(png(Image.new("RGB", (10_000, 1)))),
    "a PDF": data_url(b"%PDF-1.4\n", "application/pdf"),
    "an EPS": data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n", "image/eps"),
    "zeros": data_url(bytes(1_000_000)),
    "a lone surrogate": "\ud800",
}


@cache
def upload(what: str) -> str:
    made = UPLOADS[what]
    return made if isinstance(made, str) else made()


@pytest.mark.parametrize("what", UPLOADS)
def test_pictures_that_are_none(talk: Talk, client: Client, server: Server, what: str) -> None:
    before = server.memory()
    url = upload(what)
    part = {"type": "image_url", "image_url": {"url": url}}
    bodies = {
        "/generate": {"input_ids": [1, IMAGE_PAD], "image_data": [url], "sampling_params": SHORT},
        "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": [part]}], "max_tokens": 2},
        "/v1/responses": {
            "model": MODEL,
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}],
            "max_output_tokens": 2,
        },
    }
    for path, body in bodies.items():
        answer = client.http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
        if what == "a bomb in a comment" and answer.status_code == 200:
            continue  # the picture itself is good: it is enough that the comment is not unpacked
        refused(answer, 400, 413, 415, 422)
    assert server.memory() - before < 64 * 2**20


def test_more_pictures_than_are_allowed(talk: Talk, client: Client) -> None:
    url = picture(1).url
    body = {"input_ids": [IMAGE_PAD] * 1_000, "image_data": [url] * 1_000, "sampling_params": SHORT}
    refused(client.post("/generate", body), 400, 413, 422)


# --- other tenants --------------------------------------------------------------------------------------------------------


def test_what_is_another_tenants_was_never_there(talk: Talk, server: Server) -> None:
    (rid,) = talk.known()
    with server.http(KEYS["other"]) as http:

        def answers(session: str, named: str) -> list[tuple[int, str]]:
            body = {"input_ids": [1], "sampling_params": SHORT}
            told = [
                http.get(f"/sessions/{session}"),
                http.post(f"/sessions/{session}/fork", json={}),
                http.post(f"/sessions/{session}/fork", json={"rid": named}),
                http.post("/generate", json={**body, "session_params": {"id": session}}),
                http.post("/generate", json={**body, "session_params": {"id": session, "rid": named}}),
                http.post("/generate", json={**body, "session_params": {"id": session, "rid": named}, "stream": True}),
                http.post("/close_session", json={"session_id": session}),
                http.post("/abort_request", json={"rid": named}),
                http.get(f"/v1/responses/{named}"),
            ]
            return [(answer.status_code, masked(answer.text, session, named)) for answer in told]

        never = "".join("0" if each.isalnum() else each for each in talk.id)
        assert answers(talk.id, rid) == answers(never, "0" * len(rid))
        # A name that one tenant has taken is free for another.
        assert http.post("/open_session", json={"session_id": talk.id}).json() == talk.id
        mine = http.post(
            "/generate",
            json={"input_ids": list(range(100, 120)), "rid": rid, "sampling_params": SHORT, "session_params": {"id": talk.id}},
        )
        assert mine.status_code == 200, "a rid that one tenant has is free for another"
        assert mine.json()["meta_info"]["cached_tokens"] == 0, "what one tenant has said is not in another's cache"
        salted = {"input_ids": list(range(100, 120)), "sampling_params": SHORT, "cache_salt": "tenant:acme"}
        assert http.post("/generate", json=salted).json()["meta_info"]["cached_tokens"] == 0
        assert http.post("/close_session", json={"session_id": talk.id}).status_code == 200


def masked(text: str, *names: str) -> str:
    for name in names:
        text = text.replace(name, "NAME")
    return text


def test_another_tenant_aborts_nothing(client: Client, server: Server) -> None:
    talk = Talk(client)
    ask = talk.ask(*range(50), sampling={**GREEDY, "max_new_tokens": 60, "ignore_eos": True})
    with client.stream(ask) as stream:
        next(stream)
        with server.http(KEYS["other"]) as http:
            for body in ({"rid": ask.rid}, {"abort_all": True}):
                assert http.post("/abort_request", json=body).status_code == 200
        *_, last = stream
    client.check(ask.answered(last))


def test_metrics_are_for_whoever_runs_the_server(client: Client, server: Server) -> None:
    refused(client.http.get("/metrics"), 401, 403)
    assert server.metrics(ADMIN)
    with server.http(ADMIN) as http:
        refused(http.post("/generate", json={"input_ids": [1], "sampling_params": SHORT}), 401)


# --- growth ---------------------------------------------------------------------------------------------------------------


def everything_hostile(client: Client) -> int:
    """Each hostile request once; how many there were."""
    headers = {"Content-Type": "application/json"}
    given = [("/generate", body) for body in RAW.values()] + [("/v1/responses", body) for body in RAW.values()]
    given += [("/generate", json.dumps(body).encode()) for body in WRONG]
    given += [
        ("/generate", json.dumps({"input_ids": [1, IMAGE_PAD], "image_data": [upload(what)], "sampling_params": SHORT}).encode())
        for what in UPLOADS
        if what != "a bomb in a comment"
    ]
    for path, body in given:
        refused(client.http.post(path, content=body, headers=headers))
    client.ok("/abort_request", {"rid": "never"})
    for number in range(20):
        client.http.get(f"/sessions/never-{number}")
        client.http.get(f"/v1/responses/resp_{number}")
    return len(given) + 41


def store_holds(server: Server) -> dict[str, float]:
    """What /metrics says that the store and the engine hold at this moment."""
    found = server.metrics(ADMIN)
    return {
        name: value
        for name, value in found.items()
        if re.search(r"(sessions|nodes|heads|drafts|running|waiting|pins|subscri)", name)
        and not re.search(r"(_total|_created|_bucket|_sum|_count)", name)
    }


def test_nothing_grows(talk: Talk, client: Client, server: Server) -> None:
    everything_hostile(client)
    held, disk, memory, made = store_holds(server), on_disk(server), server.memory(), nodes_made(server)
    assert held and made
    count = sum(everything_hostile(client) for _ in range(20 if SOAK else 3))
    assert store_holds(server) == held
    assert nodes_made(server) == made
    assert on_disk(server) == disk
    assert server.memory() - memory < 16 * 2**20, f"after {count} requests"


def nodes_made(server: Server) -> float:
    """How many nodes were ever committed, of input or generated: each takes room on disk."""
    return sum(value for name, value in server.metrics(ADMIN).items() if re.match(r"sessiontree_nodes_committed_total", name))


def on_disk(server: Server) -> int:
    return sum(path.stat().st_size for path in Path(server.store).rglob("*.seg"))


def test_pictures_that_are_good_still_are(client: Client) -> None:
    assert base64.b64decode(picture(1).url.partition(",")[2])[:4] == b"\x89PNG"
    Talk(client).turn(*shown(picture(1)), 5)
