"""Pictures in files of others: bytes in base64, and what they are said to be."""

from __future__ import annotations

import base64
import binascii
import mimetypes
import re
import zipfile
from pathlib import Path
from typing import Final
from urllib.parse import unquote, unquote_to_bytes

from sessiontree.errors import LimitExceeded
from sessiontree.interchange.conversations import Image
from sessiontree.interchange.losses import Losses

#: Bytes of one picture.
MAX_BYTES: Final = 2**30

#: What files of pictures begin with, whatever they are called.
_BEGINNINGS: Final = tuple(
    (re.compile(begin, re.DOTALL), mime_type)
    for begin, mime_type in (
        (rb"\x89PNG", "image/png"),
        (rb"\xff\xd8\xff", "image/jpeg"),
        (rb"GIF8", "image/gif"),
        (rb"RIFF....WEBP", "image/webp"),
    )
)


def from_file(path: Path | zipfile.Path) -> Image:
    """A picture in a file; what it is, its first bytes say, or its name. Raises LimitExceeded, and OSError as reading does."""
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise LimitExceeded(f"{path.name}: longer than {MAX_BYTES} bytes", value=len(data), limit=MAX_BYTES)
    for begin, mime_type in _BEGINNINGS:
        if begin.match(data):
            return Image(data, mime_type)
    return Image(data, mimetypes.guess_type(path.name)[0] or "application/octet-stream")


def from_base64(text: str, mime_type: str, place: str, losses: Losses) -> Image | None:
    """A picture of its bytes in base64; None where that is a fault."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        losses.fault("no base64", place, str(error))
        return None
    if not data:
        losses.fault("an empty picture", place)
        return None
    return Image(data, mime_type)


#: Base64 as mail and URLs have it, as it is written without either.
_SAFE: Final = str.maketrans("-_", "+/", " \t\r\n=")


def from_data_url(url: str, place: str, losses: Losses) -> Image | None:
    """A picture of a ``data:`` URL, RFC 2397; None where that is a fault. Its base64 may have white space, or be made for URLs."""
    head, comma, body = url.removeprefix("data:").partition(",")
    kind, *parameters = head.split(";")
    if not comma:
        losses.fault("a data URL without data", place, url[:40])
        return None
    mime_type = ";".join([kind or "text/plain", *(each for each in parameters if each != "base64")])
    if "base64" in parameters:
        body = unquote(body)
        digits = body.translate(_SAFE)
        padded = digits + "=" * (-len(digits) % 4)
        return from_base64(body if len(digits) % 4 == 1 else padded, mime_type, place, losses)
    return Image(unquote_to_bytes(body), mime_type)


def to_base64(image: Image) -> str:
    """Its bytes in base64."""
    return base64.b64encode(image.data).decode()


def as_data_url(image: Image) -> str:
    """A ``data:`` URL of a picture."""
    return f"data:{image.mime_type};base64,{to_base64(image)}"
