"""Uploads: base64 or a data URL, to a picture's identity, grid and pixels. Nothing is fetched, and nothing large is unpacked.

The header is read first: a file that claims more pixels than are allowed is refused before any is decoded. What the image
processor made goes to the store, by identity, once it is sure that a node will name it; the same upload of the same tenant is not
processed again. A tenant is part of an identity, so that nobody can find out by the clock what others have sent.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import threading
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import attrs
from PIL import Image, ImageOps
from qwen_reference import MERGE
from transformers import Qwen2VLImageProcessorPil

from mini_scheduler.failures import Refused
from mini_scheduler.limits import Limits
from sessiontree import MediaItem, SessionStore, media_identity

FORMATS: Final = ("PNG", "JPEG", "WEBP")
MAX_TOKENS: Final = 64  # of one picture; larger ones are scaled down
_PATCH: Final = 14
_ASPECT: Final = 100  # the processor refuses 200, and scales sides to whole patches first
_REMEMBERED: Final = 256  # uploads


@attrs.frozen(eq=False)
class Uploads:
    """The pictures of a request. ``items``: in order, in compact form: one placeholder, at 0. ``new``: pixels the store lacks."""

    store: SessionStore
    items: tuple[MediaItem, ...] = ()
    new: tuple[tuple[MediaItem, Any], ...] = ()

    def keep(self) -> None:
        """Put those pixels there."""
        for item, pixels in self.new:
            self.store.put_features(item, {"pixel_values": pixels})


class Pictures:
    """Makes media items of uploads, on ``threads`` of its own. ``taken``: whether the model takes pictures at all."""

    def __init__(self, limits: Limits, *, taken: bool) -> None:
        self._limits = limits
        self._taken = taken
        side = _PATCH * MERGE
        size = {"shortest_edge": 4 * side**2, "longest_edge": MAX_TOKENS * side**2}  # areas, whatever they are called
        self._processor: Any = Qwen2VLImageProcessorPil(merge_size=MERGE, patch_size=_PATCH, size=size)
        self._seen: OrderedDict[tuple[str, bytes], MediaItem] = OrderedDict()
        self._lock = threading.Lock()
        self.threads = ThreadPoolExecutor(2, "pictures")  # those of the store are for what others wait for

    def take(self, store: SessionStore, tenant: str, uploads: Sequence[str]) -> Uploads:
        """An item for each upload. Raises Refused."""
        if uploads and not self._taken:
            raise Refused(400, "this model takes no pictures", code="no_images")
        files = [uploaded(upload, self._limits.image_bytes) for upload in uploads]
        made = {data: self._item(store, tenant, data) for data in dict.fromkeys(files)}  # each of them once
        found = [made[data] for data in files]
        new = tuple((item, pixels) for item, pixels in found if pixels is not None)
        return Uploads(store, tuple(item for item, _ in found), new)

    def _item(self, store: SessionStore, tenant: str, data: bytes) -> tuple[MediaItem, Any]:
        key = tenant, hashlib.sha256(data).digest()  # by tenant: how long it takes tells nobody what others sent
        pixels = None
        with self._lock:
            item = self._seen.pop(key, None)
        if item is None or store.get_features(item) is None:
            pixels, grid = self._process(opened(data, self._limits.image_pixels))
            identity = media_identity("image", pixels, options={"merge_size": MERGE, "grid_thw": grid, "tenant": tenant})
            item = MediaItem("image", identity, [(0, 1)], grid_thw=grid)
        with self._lock:
            self._seen[key] = item
            while len(self._seen) > _REMEMBERED:
                self._seen.popitem(last=False)
        return item, pixels

    def _process(self, picture: Image.Image) -> tuple[Any, list[int]]:
        features = self._processor(images=[picture], return_tensors="np")
        return features["pixel_values"], features["image_grid_thw"][0].tolist()


def uploaded(upload: str, most: int) -> bytes:
    """The bytes of a data URL or of plain base64. Raises Refused: 413 for more than ``most``, 400 for anything else."""
    if upload.startswith("data:"):
        head, comma, text = upload.partition(",")
        if not comma or not head.endswith(";base64"):
            raise Refused(400, "a data URL of a picture is data:image/...;base64,...", code="invalid_image")
    elif upload[:8].lower().startswith(("http:", "https:", "file:")):
        raise Refused(400, "pictures are sent, not fetched: use a data URL", code="image_url_refused")
    else:
        text = upload
    if len(text) > -(-most // 3) * 4:
        raise Refused(413, f"a picture has {most} bytes at most", type="LimitExceeded", code="image_too_large")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Refused(400, "a picture is sent as base64", code="invalid_image") from None


def opened(data: bytes, most_pixels: int) -> Image.Image:
    """The picture in a file, decoded, in RGB; the first frame of an animation. Raises Refused."""
    what = f"a picture has {most_pixels} pixels at most, by what its header says"
    too_large = Refused(413, what, type="LimitExceeded", code="image_too_large")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of sizes too
            picture = Image.open(io.BytesIO(data), formats=FORMATS)
            width, height = picture.size
            if width * height > most_pixels:
                raise too_large
            if max(width, height) > _ASPECT * min(width, height):
                raise Refused(400, f"a picture of {width} × {height} is too narrow", code="invalid_image")
            return ImageOps.exif_transpose(picture).convert("RGB")
    except Refused:
        raise
    except Image.DecompressionBombError:
        raise too_large from None
    except Exception:  # Pillow raises all kinds of things over files that are broken
        raise Refused(400, f"this is no picture in {', '.join(FORMATS)}, or it is damaged", code="invalid_image") from None
