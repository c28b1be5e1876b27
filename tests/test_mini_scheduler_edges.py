"""The mini scheduler's edges: what errors become, whose key it is, how large a body or a picture may be."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import struct
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from mini_scheduler import failures, schemas
from mini_scheduler.engine import QueueFull
from mini_scheduler.failures import Json, Refused
from mini_scheduler.limits import BodyLimit, Limits
from mini_scheduler.native import prompt_of
from mini_scheduler.pictures import Pictures, opened, uploaded
from mini_scheduler.tenants import Tenants, namespace_of, read_keys, salt_of
from PIL import Image
from pydantic import ValidationError
from qwen_reference import IMAGE_PAD
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

import sessiontree
from sessiontree import MediaItem, SessionStore, SessionTreeError

STATUS = {
    "SessionExists": 409,
    "NameTaken": 409,
    "HeadMoved": 409,
    "KeyTaken": 409,
    "IncompatibleStore": 409,
    "UnknownSession": 404,
    "UnknownHead": 404,
    "UnknownNode": 404,
    "StaleSession": 404,
    "NeedsMedia": 503,
    "StoreFailed": 503,
    "StoreClosed": 503,
    "CorruptTree": 503,
    "QueueFull": 429,
}
ERRORS = [found for found in vars(sessiontree).values() if isinstance(found, type) and issubclass(found, SessionTreeError)]


@pytest.mark.parametrize("kind", [*ERRORS, QueueFull], ids=lambda kind: kind.__name__)
def test_every_error_has_a_status_and_one_shape(kind: type[SessionTreeError]) -> None:
    refused = Refused.of(kind("what it says of 'another/session/s'"))
    assert refused.status == STATUS.get(kind.__name__, 400)
    assert refused.body["error"].keys() == {"message", "type", "param", "code"}
    assert refused.body["error"]["type"] == kind.__name__
    if refused.status in (404, 503):
        assert "another" not in str(refused), "who asks for what is not theirs learns no name"


def test_answers_are_ascii_and_no_number_is_none() -> None:
    assert json.loads(bytes(Json({"said": "\ud800 é"}).body)) == {"said": "\ud800 é"}
    assert bytes(Json({"said": "\ud800 é"}).body).isascii()
    with pytest.raises(ValueError):
        failures.to_json(float("nan"))


# --- tenants --------------------------------------------------------------------------------------------------------------------
def test_a_key_is_its_tenants_alone() -> None:
    tenants = Tenants({"acme": "k1", "other": "k2"}, "boss")
    assert [tenants.name(f"{scheme} {key}") for scheme, key in (("Bearer", "k1"), ("bearer", "k2"))] == ["acme", "other"]
    for wrong in (None, "", "Bearer", "Bearer ", "Bearer k", "Bearer k11", "Basic k1", "k1", "Bearer boss", "Bearer k1 k1"):
        with pytest.raises(Refused) as refused:
            tenants.name(wrong)
        assert refused.value.status == 401
    tenants.check_admin("Bearer boss")
    for wrong in (None, "Bearer k1", "Bearer "):
        with pytest.raises(Refused):
            tenants.check_admin(wrong)
    with pytest.raises(Refused):
        Tenants({"acme": "k1"}).check_admin("Bearer ")


def test_without_keys_there_is_one_tenant() -> None:
    assert Tenants().name(None) == Tenants().name("Bearer whatever") == "default"
    Tenants().check_admin(None)


@pytest.mark.parametrize("keys", [{"a/b": "k"}, {"": "k"}, {"a" * 65: "k"}, {"a": ""}, {"a": "k", "b": "k"}, {"a": "boss"}])
def test_keys_that_cannot_be(keys: dict[str, str]) -> None:
    with pytest.raises(ValueError):
        Tenants(keys, "boss")


def test_keys_are_read_from_arguments_and_lines(tmp_path: Path) -> None:
    lines = tmp_path / "keys"
    lines.write_text("# ours\n\n b=2=2 \n")
    assert read_keys(["a=1"], lines) == {"a": "1", "b": "2=2"}
    for wrong in (["a"], ["a=1", "a=2"], ["b=1"]):
        with pytest.raises(ValueError):
            read_keys(wrong, lines)


def test_no_salt_of_one_tenant_is_anothers() -> None:
    names = ["a", "a-b", "default"]
    salts = [None, "", "a", "b:c"]
    found = [namespace_of(name).cache_salt if salt is None else salt_of(name, salt) for name in names for salt in salts]
    assert len(set(found)) == len(found) and salt_of("a", None) is None


# --- bodies ---------------------------------------------------------------------------------------------------------------------
async def length_of(scope: Scope, receive: Receive, send: Send) -> None:
    body = await Request(scope, receive).body()
    await Json(len(body))(scope, receive, send)


def posted(*pieces: bytes, headers: dict[str, str] | None = None) -> httpx.Response:
    async def content() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(app=BodyLimit(length_of, Limits(body_bytes=100), Tenants({"acme": "key"}).name))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/", content=content(), headers={"Authorization": "Bearer key"} | (headers or {}))

    return asyncio.run(post())


def test_no_body_is_read_of_somebody_unknown() -> None:
    assert posted(b"x", headers={"Authorization": "Bearer other"}).status_code == 401
    assert posted(headers={"Authorization": "Bearer other"}).json() == 0


def test_a_body_has_to_come_in_time() -> None:
    async def never() -> Any:
        await asyncio.Event().wait()

    async def scene() -> list[Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        await BodyLimit(length_of, Limits(timeout=0.01), Tenants().name)(scope, never, send)
        return sent

    begun, body = asyncio.run(scene())
    assert begun["status"] == 408 and b"0.01 seconds" in body["body"]


def test_a_body_is_counted_while_it_is_read() -> None:
    assert posted(b"x" * 60, b"y" * 40).json() == 100
    refused = posted(b"x" * 60, b"y" * 41)
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")
    assert posted(b"x" * 60, b"y" * 60, headers={"Content-Length": "1"}).status_code == 413
    assert posted().json() == 0


@pytest.mark.parametrize(
    "body",
    [
        {"text": "a", "unknown": 1},
        {"text": 1},
        {"text": "\ud800"},
        {"input_ids": [True]},
        {"input_ids": [1.0]},
        {"input_ids": ["1"]},
        {"input_ids": [-1]},
        {"input_ids": [[1]]},
        {"text": "a", "rid": "a/b"},
        {"text": "a", "rid": "a\n"},
        {"text": "a", "rid": ""},
        {"text": "a", "sampling_params": {"temperature": float("nan")}},
        {"text": "a", "sampling_params": {"n": 9}},
        {"text": "a", "sampling_params": {"max_new_tokens": 0}},
        {"text": "a", "session_params": {"rid": "a"}},
        {"text": "a", "image_data": ["x"] * 17},
    ],
)
def test_bodies_of_another_shape_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        schemas.Generate.model_validate(body)


def test_each_pad_is_one_picture_and_the_other_way_round() -> None:
    pictures = [MediaItem("image", bytes([n]) * 32, [(0, 1)], grid_thw=(1, 2, 4 * n)) for n in (1, 2)]
    body = schemas.Generate.model_validate({"text": "a<|image_pad|>b<|image_pad|>"})
    ids, media = prompt_of(body, pictures, 200_000)
    assert [item.spans for item in media] == [((1, 2),), ((4, 4),)]
    assert [token == IMAGE_PAD for token in ids] == [False, True, True, False, True, True, True, True]
    for wrong in (pictures[:1], [*pictures, pictures[0]]):
        with pytest.raises(Refused) as refused:
            prompt_of(body, wrong, 200_000)
        assert refused.value.status == 400
    for none in ({}, {"text": "a", "input_ids": [1]}, {"input_ids": [200_000]}):
        with pytest.raises(Refused):
            prompt_of(schemas.Generate.model_validate(none), [], 200_000)


# --- pictures -------------------------------------------------------------------------------------------------------------------
def file_of(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind)
    return buffer.getvalue()


def url_of(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def bomb(width: int, height: int) -> bytes:
    """The header of a picture of this size, and next to nothing behind it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


NOISE = Image.fromarray(np.random.default_rng(1).integers(0, 256, (56, 84, 3), dtype=np.uint8))


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_a_picture_is_what_its_pixels_are(kind: str) -> None:
    store, pictures = SessionStore.in_memory(), Pictures(Limits(), taken=True)
    data = file_of(NOISE, kind)
    taken = pictures.take(store, "acme", [url_of(data), base64.b64encode(data).decode()])
    item, same = taken.items
    assert item == same and item.grid_thw == (1, 4, 6)
    taken.keep()
    features = store.get_features(item)
    assert features is not None and features["pixel_values"].shape == (24, 1176)
    (other,) = pictures.take(store, "acme", [url_of(file_of(NOISE.rotate(180), kind))]).items
    assert other.identity != item.identity


def test_an_upload_is_processed_once_for_each_tenant_and_again_once_it_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    store, pictures = SessionStore.in_memory(), Pictures(Limits(), taken=True)
    processed: list[Any] = []
    process = Pictures._process

    def counted(self: Pictures, image: Image.Image) -> Any:
        processed.append(image)
        return process(self, image)

    monkeypatch.setattr(Pictures, "_process", counted)
    url = url_of(file_of(NOISE))
    taken = pictures.take(store, "acme", [url, url])
    item = taken.items[0]
    assert taken.items == (item, item) and len(processed) == 1
    assert store.get_features(item) is None  # nothing is kept of what may yet be refused
    assert pictures.take(store, "acme", [url]).items == (item,) and len(processed) == 2
    taken.keep()
    assert pictures.take(store, "acme", [url, url]).items == (item, item) and len(processed) == 2
    (other,) = pictures.take(store, "other", [url]).items
    assert other.identity != item.identity and len(processed) == 3  # so that the clock tells nobody who has sent what
    store.drop_features(item)
    again = pictures.take(store, "acme", [url])
    assert again.items == (item,) and len(processed) == 4
    again.keep()
    assert store.get_features(item) is not None


def test_a_picture_and_the_same_one_turned_are_two() -> None:
    """Of one colour their patches are equal; only the grid tells them apart."""
    store, pictures = SessionStore.in_memory(), Pictures(Limits(), taken=True)
    urls = [url_of(file_of(Image.new("RGB", size, "crimson"))) for size in ((112, 168), (168, 112))]
    taken = pictures.take(store, "acme", urls)
    (one, first), (other, second) = taken.new
    assert np.array_equal(first, second) and one.grid_thw != other.grid_thw
    assert one.identity != other.identity


def test_a_picture_is_turned_as_its_file_says() -> None:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned by 90 degrees
    NOISE.save(file, "JPEG", exif=exif)
    assert opened(file.getvalue(), 1_000_000).size == NOISE.size[::-1]


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (bomb(1_001, 1_000), 413),
        (bomb(50_000, 50_000), 413),
        (bomb(2**31 - 1, 2**31 - 1), 413),
        (bomb(3_000, 2), 400),
        (bomb(100, 100), 400),
        (file_of(NOISE)[:-40], 400),
        (file_of(NOISE, "BMP"), 400),
        (b"", 400),
        (b"GIF89a", 400),
    ],
    ids=[
        "too many pixels",
        "a bomb",
        "a larger one",
        "a thread",
        "no pixels",
        "cut off",
        "another format",
        "nothing",
        "a beginning",
    ],
)
def test_what_is_no_picture_is_refused(data: bytes, status: int) -> None:
    with pytest.raises(Refused) as refused:
        opened(data, 1_000_000)
    assert refused.value.status == status


def test_uploads_that_are_none() -> None:
    assert uploaded("data:;base64,QUJD", 3) == uploaded("QUJD", 3) == b"ABC"
    for upload, status in (
        ("QUJDRA==", 413),
        ("http://example.org/x.png", 400),
        ("HTTPS://example.org/x.png", 400),
        ("file:///etc/hostname", 400),
        ("data:image/png,QUJD", 400),
        ("QUJ*", 400),
        ("QUJ", 400),
        ("é" * 4, 400),
    ):
        with pytest.raises(Refused) as refused:
            uploaded(upload, 3)
        assert refused.value.status == status, upload
    with pytest.raises(Refused):
        Pictures(Limits(), taken=False).take(SessionStore.in_memory(), "acme", ["QUJD"])
