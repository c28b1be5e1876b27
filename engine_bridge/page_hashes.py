"""Which pages of an engine's KV cache serve a path, as the engine itself names them: one hash for each full page of tokens.

Engines find KV again by a chain of hashes: a page's hash covers the hash of the page before it, the tokens, and what else the KV
depends on. This module computes the same chains, without the engine, from a node or a draft, so that a router or a cache knows
what a session needs and what it will need no more. The tree never owns KV: a hash is a name, and nothing here knows whether the
page behind it is still held anywhere.

=====================  ===========================================================================================================
scheme                 the hash of a page, and what its chain begins with
=====================  ===========================================================================================================
``sglang``             SHA-256(hash before ‖ ids as little-endian uint32), of KV cache events. Spans of media are filled with the
                       pad sentinels of their item; a page with an id above 2**32 - 1 is SHA-256(hash before ‖ 0xff ‖ ids as
                       little-endian uint64). Begins with SHA-256("sglang-cache-salt-v1" ‖ 0x00 ‖ salt), without a salt with
                       nothing. LoRA is no part of it: an event names the adapter beside the hash.
                       SGLang 0.5.23: ``mem_cache/utils.py``, ``mem_cache/cpp_utils/hash_binding.cpp``.
``sglang_storage``     The same, of keys in its storage backends. Begins with the digest of its namespace, where there is any: the
                       request's ``extra_key``, which ends in the LoRA's id, and the salt. Without both, the chain is that of
                       ``sglang``. The same files.
``vllm_sha256``        SHA-256(pickle of (hash before, ids, extra keys)). Extra keys, in this order: ("lora", name, path); ("mm",
                       identity in hex, first placeholder - first token of the page) for each item that reaches into the page;
                       ("cache_salt", salt) in the first page alone. Begins with SHA-256(pickle of ``none_hash_seed``).
                       vLLM 0.33.0: ``v1/core/kv_cache_utils.py``, ``utils/hashing.py``.
``vllm_sha256_cbor``   The same over canonical CBOR (RFC 8949).
``nano_vllm``          xxh64(hash before, 8 bytes little-endian ‖ ids as int64): ``BlockManager.compute_hash``. It knows no media,
                       salt or LoRA. Needs the package xxhash.
=====================  ===========================================================================================================

The tenant of a namespace is no part of any chain: no engine knows of it. Tenants that are not to share KV get salts.

vLLM's pages have the ids of the node, in spans too. ``to_vllm`` writes vLLM's own there, so a session whose hashes are to be
those of its requests holds these. An item is one range, from its first placeholder to its last, text between its spans included;
while a path holds only a part of it, to the end of the path.

A chain says which tokens and media were computed, as a prefill of the whole path would place them. Where tokens that were decoded
stand elsewhere, their KV is another: from the first page with such a token on, hashes of ``mode="as_decoded"`` are of a chain of
their own, which depends on these positions, and equal to no engine's. Those of ``mode="as_replayed"`` are the engine's throughout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any, ClassVar, Final, Literal, get_args, overload

from engine_bridge.chains import VLLM, Chain, NanoVLLM, SGLang, VLLMCbor
from engine_bridge.policies import committed
from sessiontree import Draft, Node, OutOfRange, PositionError, Unsupported
from sessiontree.frozen import checked_text
from sessiontree.node import deepest_from
from sessiontree.positions import MODES, Mode
from sessiontree.tokens import as_index, shown

HashScheme = Literal["sglang", "sglang_storage", "vllm_sha256", "vllm_sha256_cbor", "nano_vllm"]
SCHEMES: Final[tuple[HashScheme, ...]] = get_args(HashScheme)
#: vLLM's own, without PYTHONHASHSEED.
NONE_HASH_SEED: Final = "vllm-none-hash"


class PageHashes(Sequence[bytes]):
    """The hashes of all full pages of a path, in order; a value. Equal to any list or tuple of the same bytes.

    Made without touching the pages of ancestors: their hashes are looked up when they are read.
    """

    __slots__ = ("_all", "_chain", "_first", "_node", "_own")
    __hash__: ClassVar[None] = None  # type: ignore[assignment]  # it is equal to lists

    def __init__(self, chain: Chain, node: Node | None, first: int, own: tuple[bytes, ...]) -> None:
        """``own``: hashes of the pages from number ``first`` on; the others end in ``node`` or above it."""
        self._chain = chain
        self._node = node
        self._first = first
        self._own = own
        self._all: tuple[bytes, ...] | None = None if first else own

    def _whole(self) -> tuple[bytes, ...]:
        if self._all is None:
            assert self._node is not None
            found: list[bytes] = []
            for node in self._node.path():
                found += self._chain.reached(node).hashes
            found += self._own
            self._all = tuple(found)
        return self._all

    def __len__(self) -> int:
        return self._first + len(self._own)

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[bytes, ...]: ...
    def __getitem__(self, at: int | slice) -> bytes | tuple[bytes, ...]:
        count = len(self)
        if isinstance(at, slice):
            pages = range(count)[at]
            if pages and min(pages[0], pages[-1]) < self._first:
                return self._whole()[at]
            return tuple(self._own[page - self._first] for page in pages)
        number = at + count if at < 0 else at
        if not 0 <= number < count:
            raise IndexError(f"page {at} of {count}")
        if number >= self._first:
            return self._own[number - self._first]
        if self._all is not None:
            return self._all[number]
        assert self._node is not None
        size = self._chain.page_size
        node = deepest_from(self._node, (number + 1) * size - 1)
        return self._chain.reached(node).hashes[number - node.start // size]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._whole())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PageHashes):
            return len(self) == len(other) and self[-1:] == other[-1:] and self._whole() == other._whole()
        return list(self._whole()) == list(other) if isinstance(other, (list, tuple)) else NotImplemented

    def __repr__(self) -> str:
        last = f", last {self[-1][:4].hex()}" if len(self) else ""
        return f"<PageHashes {self._chain.scheme} {len(self)} of {self._chain.page_size} tokens{last}>"


def page_hashes(
    node: Node | Draft,
    scheme: HashScheme,
    page_size: int,
    salt: str | None = None,
    lora: str | tuple[str, str] | None = None,
    *,
    none_hash_seed: str = NONE_HASH_SEED,
    mode: Mode = "as_decoded",
) -> PageHashes:
    """The hash of each full page of a node's or draft's path, as the engine computes it: ``stop // page_size`` of them, bytes.

    32 bytes each; 8 for ``nano_vllm``. As engines write them: SGLang's storage keys are ``hash.hex()``, its events carry
    ``int.from_bytes(hash[:8], "big", signed=True)``; nano-vllm has ``int.from_bytes(hash, "big")``.

    ``page_size``: tokens in a page, the engine's. ``salt``: the request's cache salt; None: that of the session's namespace; "":
    none. ``lora``: the same for the adapter. For vLLM (name, path), one text being both; for SGLang the request's ``extra_key``
    with the LoRA's id at its end. ``none_hash_seed``: what vLLM's chains begin with; no environment variable is read.
    ``mode``: whose KV is asked for, that of the path as it was decoded or as it is replayed.

    O(new): a node's hashes are remembered by its id and all else that they depend on, as long as the node lives and there is room
    (``engine_bridge.chains.REMEMBERED``). A page that begins in an ancestor and ends in the node is the node's. Pages of a draft
    are computed each time. Every thread may call it.

    Raises Unsupported for another scheme, and for media, a salt or a LoRA where the engine knows none; OutOfRange for a page size
    below 1; PositionError for the mode; TypeError.
    """
    if not isinstance(node, (Node, Draft)):
        raise TypeError(f"pages are those of a Node or a Draft, not of a {type(node).__name__}")
    last = committed(node)
    namespace = last.namespace
    chain = _chain(
        checked_text(scheme, "scheme"),
        as_index(page_size, "page_size"),
        namespace.cache_salt if salt is None else checked_text(salt, "salt"),
        namespace.lora if lora is None else _checked_lora(lora),
        checked_text(none_hash_seed, "none_hash_seed"),
        checked_text(mode, "mode"),
    )
    reached = chain.reached(last)
    if isinstance(node, Draft):
        first = node.start // chain.page_size
        return PageHashes(chain, last, first, chain.advance(reached, node).hashes)
    return PageHashes(chain, last.parent, last.start // chain.page_size, reached.hashes)


def _checked_lora(lora: Any) -> str | tuple[str, str]:
    if isinstance(lora, str):
        return checked_text(lora, "lora")
    if not isinstance(lora, tuple) or len(lora) != 2:
        raise TypeError(f"lora is text, or a pair of a name and a path, not {type(lora).__name__}")
    return checked_text(lora[0], "the name of a lora"), checked_text(lora[1], "the path of a lora")


@lru_cache(maxsize=1024)
def _chain(
    scheme: str, page_size: int, salt: str | None, lora: str | tuple[str, str] | None, none_hash_seed: str, mode: str
) -> Chain:
    """The chain of a scheme in a namespace, checked; empty texts are none."""
    if scheme not in SCHEMES:
        raise Unsupported(f"no page hashes {scheme!r}; known are {', '.join(SCHEMES)}", scheme=scheme)
    if mode not in MODES:
        raise PositionError(f"no positions {mode!r}; a mode is one of {', '.join(MODES)}", mode=mode)
    if page_size < 1:
        raise OutOfRange(f"a page of {shown(page_size)} tokens", value=page_size, limit=1)
    salt, lora = salt or None, lora or None
    if scheme.startswith("vllm"):
        kind = VLLM if scheme == "vllm_sha256" else VLLMCbor
        return kind(scheme, page_size, mode, none_hash_seed, salt, (lora, lora) if isinstance(lora, str) else lora)
    if scheme == "nano_vllm":
        if salt is not None or lora is not None:
            raise Unsupported("nano-vllm has neither cache salts nor LoRA, so its hashes cannot tell them apart", scheme=scheme)
        return NanoVLLM(scheme, page_size, mode)
    if isinstance(lora, tuple):
        raise TypeError("SGLang's lora is text, the extra_key of its requests; a name and a path are vLLM's")
    first = b""
    if scheme == "sglang" and salt is not None:
        first = sha256(b"sglang-cache-salt-v1\0" + salt.encode()).digest()
    if scheme == "sglang_storage" and (salt is not None or lora is not None):
        first = sha256(b"".join([b"sglang-cache-namespace-v1", *map(_namespace_part, (lora, salt))])).digest()
    return SGLang(scheme, page_size, mode, first)


def _namespace_part(text: str | None) -> bytes:
    if text is None:
        return b"\0"
    data = text.encode()
    return b"\1" + len(data).to_bytes(8, "little") + data
