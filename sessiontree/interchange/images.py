"""Pictures in files of others: bytes in base64, and what they are said to be."""

from __future__ import annotations

import base64
import binascii
from urllib.parse import unquote_to_bytes

from sessiontree.interchange.conversations import Image
from sessiontree.interchange.losses import Losses


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


def from_data_url(url: str, place: str, losses: Losses) -> Image | None:
    """A picture of a ``data:`` URL, RFC 2397; None where that is a fault."""
    head, comma, body = url.removeprefix("data:").partition(",")
    kind, *parameters = head.split(";")
    if not comma:
        losses.fault("a data URL without data", place, url[:40])
        return None
    mime_type = ";".join([kind or "text/plain", *(each for each in parameters if each != "base64")])
    if "base64" in parameters:
        return from_base64(body, mime_type, place, losses)
    return Image(unquote_to_bytes(body), mime_type)


def to_base64(image: Image) -> str:
    """Its bytes in base64."""
    return base64.b64encode(image.data).decode()


def as_data_url(image: Image) -> str:
    """A ``data:`` URL of a picture."""
    return f"data:{image.mime_type};base64,{to_base64(image)}"
