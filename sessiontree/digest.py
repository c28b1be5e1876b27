"""Identities. SHA-256 over length-prefixed, domain-separated fields; nothing here looks at a tree.

A root's id covers what is constant in a session. A node's id covers its parent's id and everything that determines what an
engine computes from it: origin, role, key, media, an external position table and the tokens. Structured fields are msgpack,
which prefixes every length; the tokens come last and run to the end, so no two contents share an encoding.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Final

import msgpack

ID_BYTES: Final = 32
FORMAT: Final = 1
_ROOT: Final = b"sessiontree root\0"
_NODE: Final = b"sessiontree node\0"
_LARGE: Final = 2**14  # bytes, from which on to copy them costs more than a second call
_KEPT: Final = 2**20  # bytes; a packer that has grown larger is let go
_plain_heads: dict[tuple[str, str], bytes] = {}


class _Local(threading.local):
    def __init__(self) -> None:
        self.packer = msgpack.Packer(use_bin_type=True)


_local: Final = _Local()


def pack(value: Any) -> bytes:
    """``value`` in msgpack: equal values, equal bytes (callers sort what has no order)."""
    packed: bytes = _local.packer.pack(value)
    if len(packed) > _KEPT:
        _local.packer = msgpack.Packer(use_bin_type=True)
    return packed


def root_id(scheme: str, params: Sequence[tuple[str, Any]], namespace: Sequence[str | None], model_fingerprint: str) -> bytes:
    """The id of a root: format, scheme name and parameters (sorted), namespace and model fingerprint."""
    return sha256(_ROOT + pack([FORMAT, scheme, sorted(params), list(namespace), model_fingerprint])).digest()


def node_id(parent_id: bytes, head: bytes, token_bytes: bytes) -> bytes:
    """The id of a child of ``parent_id``; ``head`` comes from :func:`content_prefix`."""
    if len(token_bytes) < _LARGE:
        return sha256(parent_id + head + token_bytes).digest()
    digest = sha256(parent_id + head)
    digest.update(token_bytes)
    return digest.digest()


def content_prefix(origin: str, role: str, key: str | None = None, media: tuple[Any, ...] = (), table: Any = None) -> bytes:
    """Everything but parent and tokens, encoded. ``media`` and ``table`` are packable fields in a canonical order."""
    if key is None and not media and table is None:
        head = _plain_heads.get((origin, role))
        if head is not None:
            return head
    head = _NODE + pack([origin, role, key, media, table])
    if key is None and not media and table is None and len(_plain_heads) < 256:
        _plain_heads[origin, role] = head
    return head
