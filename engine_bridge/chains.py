"""The chain of page hashes of each engine: what the hash of a page covers, encoded as the engine does.

A :class:`Chain` goes along a path turn by turn and never back. Where it has come to after a node (:class:`Reached`) is remembered,
so a turn costs its own pages. Imports no engine.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_bridge.page_memo import Memo
from sessiontree import Draft, MediaItem, Node, Unsupported
from sessiontree.placeholders import pad_sequence
from sessiontree.tokens import TOKEN_BYTES

#: How many hashes and nodes are remembered, in all chains together, before the least recently used of them are forgotten.
REMEMBERED: Final = 2**20

_DECODED: Final = b"sessiontree as_decoded\0"
_NARROW: Final = 2**32
_UNKNOWN: Final = 2**62  # where an item ends of which a path holds only a part
ExtraKeys = tuple[tuple[Any, ...], ...] | None


class Piece(NamedTuple):
    """Path tokens ``[start, stop)`` belong to an item: one run of its placeholders, or for vLLM all of it.

    ``placeholders``: how many of the item stand before ``stop``, or so far where ``stop`` is :data:`_UNKNOWN`.
    """

    start: int
    stop: int
    content: tuple[Any, ...]
    placeholders: int

    @property
    def identity(self) -> bytes:
        identity: bytes = self.content[1]
        return identity


class Reached(NamedTuple):
    """Where the chain of a path has come to.

    ``last``: what the hash of the next page covers as the one before it. ``hashes``: of the pages that end in the path's last
    turn. ``pieces``: media that reach behind the last full page. ``apart``: path index after the last token there whose decoded
    position is not its replayed one; 0 where none is.
    """

    last: bytes
    hashes: tuple[bytes, ...] = ()
    pieces: tuple[Piece, ...] = ()
    apart: int = 0


class Chain:
    """One engine's chain in one namespace: all that a page's hash depends on but the path."""

    def __init__(self, scheme: str, page_size: int, mode: str, first: bytes, *namespace: object) -> None:
        """``first``: what the chain begins with."""
        self.scheme = scheme
        self.page_size = page_size
        self.mode = mode
        self.start: Reached = Reached(first)
        self.key: bytes = sha256(repr((scheme, page_size, mode, first, namespace)).encode()).digest()[:16]

    def hash_pages(self, before: bytes, first: int, ids: NDArray[np.int32], pieces: Sequence[Piece]) -> list[bytes]:
        """The hashes of full pages of ``ids``, (n × page_size,), the first of which is number ``first``."""
        raise NotImplementedError

    def placed(self, pieces: Sequence[Piece], turn: Node | Draft) -> list[Piece]:
        """The pieces of a path with those of its next turn. Raises Unsupported where the engine has no media.

        A run that goes on where one of the same item ended is the same run, in whatever turns it stands.
        """
        placed = list(pieces)
        for item in turn.media:
            content, count = item.content(), item.placeholders_before
            for offset, length in item.spans:
                begin, stop = turn.start + offset, turn.start + offset + length
                number = _going_on(placed, content, count, begin)
                count += length
                if number is None:
                    placed.append(Piece(begin, stop, content, count))
                else:
                    placed[number] = Piece(placed[number].start, stop, content, count)
        return placed

    def reached(self, node: Node) -> Reached:
        """Where the chain has come to after ``node``; what is new on the way is remembered. Nothing recurses."""
        key = self.key
        known = _memo.get(key + node.id)
        if known is not None:
            return known
        new: list[Node] = []
        at: Node | None = node
        while at is not None and at.parent is not None:
            known = _memo.get(key + at.id)
            if known is not None:
                break
            new.append(at)
            at = at.parent
        known = known or self.start
        for at in reversed(new):
            known = self.advance(known, at)
            _memo.put(key + at.id, known, 1 + len(known.hashes), at)
        return known

    def advance(self, before: Reached, turn: Node | Draft) -> Reached:
        """Where the chain has come to after ``turn``, from where it was before it."""
        size = self.page_size
        last, _, pieces, apart = before
        start, stop = turn.start, turn.stop
        begin, end = start - start % size, stop - stop % size
        if turn.media:
            pieces = tuple(sorted(self.placed(pieces, turn), key=lambda piece: piece.start))
        differs = None
        if self.mode == "as_decoded" and (apart or _may_differ(turn)):
            differs = (turn.positions(begin, stop) != turn.positions(begin, stop, "as_replayed")).any(axis=0)
            apart = stop - int(differs[::-1].argmax()) if differs.any() else 0
        if begin == end:
            return Reached(last, (), pieces, apart)
        ids = turn.input_ids(begin, end, copy=False)
        if not apart:
            hashes = self.hash_pages(last, begin // size, ids, pieces)
        else:
            assert differs is not None
            hashes = self._hash_apart(last, begin, ids, pieces, turn, differs)
            apart = apart if apart > end else 0
        if pieces:
            pieces = tuple(piece for piece in pieces if piece.stop > end or piece.stop == stop)
        return Reached(hashes[-1], tuple(hashes), pieces, apart)

    def _hash_apart(
        self,
        before: bytes,
        begin: int,
        ids: NDArray[np.int32],
        pieces: Sequence[Piece],
        turn: Node | Draft,
        differs: NDArray[np.bool],
    ) -> list[bytes]:
        """As :meth:`hash_pages`, where pages with a token that ``differs`` are of a chain that depends on their positions."""
        size = self.page_size
        table = turn.positions(begin, begin + len(ids), "as_decoded")
        table = table.astype(table.dtype.newbyteorder("<"), copy=False)
        hashes: list[bytes] = []
        first = 0
        apart = [int(number) for number in np.flatnonzero(differs[: len(ids)].reshape(-1, size).any(axis=1))]
        for number in [*apart, len(ids) // size]:
            if number > first:
                hashes += self.hash_pages(before, begin // size + first, ids[first * size : number * size], pieces)
                before = hashes[-1]
            if number * size < len(ids):
                page = slice(number * size, (number + 1) * size)
                before = sha256(_DECODED + before + table[:, page].tobytes()).digest()[: len(before) or None]
                hashes += self.hash_pages(before, begin // size + number, ids[page], pieces)
                before = hashes[-1]
            first = number + 1
        return hashes


def _may_differ(turn: Node | Draft) -> bool:
    """Whether tokens of a turn can stand elsewhere as decoded than as replayed."""
    if isinstance(turn, Node):
        return turn.replayed is not None
    parent, ids = turn.parent, turn.token_ids
    if parent.replayed is not None:
        return True
    return turn.scheme.plan_decode(parent.state, len(ids)) != turn.scheme.plan(parent.state, ids.tobytes())


def _going_on(pieces: Sequence[Piece], content: tuple[Any, ...], count: int, stop: int) -> int | None:
    """The number of the piece that ends at ``stop``, after ``count`` placeholders of this content; None without one."""
    if count:
        for number, piece in enumerate(pieces):
            if piece.stop == stop and piece.placeholders == count and piece.content == content:
                return number
    return None


class SGLang(Chain):
    """Little-endian uint32, or wide where an id needs more."""

    def hash_pages(self, before: bytes, first: int, ids: NDArray[np.int32], pieces: Sequence[Piece]) -> list[bytes]:
        size, step = self.page_size, self.page_size * TOKEN_BYTES
        words = _filled(ids, first * size, pieces) if pieces else None
        data = ids.tobytes() if words is None else words.astype("<u4").tobytes()
        pages = [data[at : at + step] for at in range(0, len(data), step)]
        if words is not None:
            data = words.tobytes()
            for number in np.flatnonzero((words >= _NARROW).reshape(-1, size).any(axis=1)).tolist():
                pages[number] = b"\xff" + data[2 * number * step : 2 * (number + 1) * step]
        hashes = []
        for page in pages:
            before = sha256(before + page).digest()
            hashes.append(before)
        return hashes


def _filled(ids: NDArray[np.int32], start: int, pieces: Sequence[Piece]) -> NDArray[np.int64]:
    """Ids from path index ``start`` on, with sentinels over the pieces."""
    words = ids.astype("<i8")
    stop = start + len(ids)
    for piece in pieces:
        begin, end = max(start, piece.start), min(stop, piece.stop)
        if begin < end:
            words[begin - start : end - start] = pad_sequence(piece.identity, begin - piece.start, end - piece.start)
    return words


class VLLM(Chain):
    """Pages with their extra keys, encoded by pickle as vLLM does. :class:`VLLMCbor` encodes the same otherwise."""

    def __init__(self, scheme: str, page_size: int, mode: str, seed: str, salt: str | None, lora: tuple[str, str] | None) -> None:
        super().__init__(scheme, page_size, mode, self.encoded_seed(seed), salt, lora)
        self.salt_keys: tuple[tuple[str, str], ...] = () if salt is None else (("cache_salt", _own(salt)),)
        self.lora_keys: tuple[tuple[str, str, str], ...] = () if lora is None else (("lora", _own(lora[0]), _own(lora[1])),)

    def encoded_seed(self, seed: str) -> bytes:
        """The hash before the first page."""
        return sha256(pickle.dumps(seed, pickle.HIGHEST_PROTOCOL)).digest()

    def placed(self, pieces: Sequence[Piece], turn: Node | Draft) -> list[Piece]:
        """One piece an item: the range of vLLM's placeholder."""
        placed = list(pieces)
        new = turn.start - turn.start % self.page_size
        for item in turn.media:
            content, before = item.content(), item.placeholders_before
            begin, stop = turn.start + item.spans[0][0], turn.start + sum(item.spans[-1])
            if item.modality == "video" and turn.scheme.family in ("qwen3_vl", "glm4v"):
                first = max([new - 1, 0, *(piece.stop for piece in placed if piece.stop <= begin)])
                others = (turn.start + other.spans[0][0] for other in turn.media)
                last = min((other for other in others if other >= stop), default=turn.stop)
                begin, stop = _frames_range(turn, item, (first, begin, stop, last), new)
            number = _going_on(placed, content, before, _UNKNOWN)
            if number is not None:
                begin = placed.pop(number).start
            placed.append(Piece(begin, _UNKNOWN if item.unfinished else stop, content, before + item.num_placeholders))
        return placed

    def extra_keys(self, first: int, count: int, pieces: Sequence[Piece]) -> list[ExtraKeys]:
        """Those of each of ``count`` pages from number ``first`` on; None where there are none."""
        size = self.page_size
        keys: list[ExtraKeys] = [self.lora_keys or None] * count
        for piece in pieces:
            name = _own(piece.identity.hex())
            start = max(first, piece.start // size)
            stop = min(first + count, -(-piece.stop // size))
            for page in range(start, stop):
                keys[page - first] = (*(keys[page - first] or ()), ("mm", name, piece.start - page * size))
        if not first and self.salt_keys:
            keys[0] = (*(keys[0] or ()), *self.salt_keys)
        return keys

    def hash_pages(self, before: bytes, first: int, ids: NDArray[np.int32], pieces: Sequence[Piece]) -> list[bytes]:
        tokens, size = ids.tolist(), self.page_size
        dumps, protocol = pickle.dumps, pickle.HIGHEST_PROTOCOL
        hashes = []
        at = 0
        for keys in self.extra_keys(first, len(tokens) // size, pieces):
            before = sha256(dumps((before, tuple(tokens[at : at + size]), keys), protocol)).digest()
            hashes.append(before)
            at += size
        return hashes


def _own(text: str) -> str:
    """Text that is an object of its own, as what a request brings along is: pickle writes the same object only once."""
    return text.encode().decode()


def _frames_range(turn: Node | Draft, item: MediaItem, edges: tuple[int, int, int, int], new: int) -> tuple[int, int]:
    """vLLM's range of a video of frames whose placeholders in this turn begin and end at the two middle ``edges``.

    It counts in what stands around them, for Qwen3-VL from the first timestamp to the last vision_end, for GLM-4V from
    begin_of_video to end_of_video, where it stands as vLLM writes it (``get_video_repl`` of ``models/qwen3_vl.py``,
    ``_construct_video_placeholder`` of ``models/glm4_1v.py``). Tokens outside the outer edges are other items', or an earlier
    turn's; no range begins before ``new``, where pages are hashed already.
    """
    first, begin, stop, last = edges
    scheme = turn.scheme
    qwen = scheme.family == "qwen3_vl"
    names = ("vision_start", "vision_end") if qwen else ("image_start", "image_end", "video_start", "video_end")
    marks = [scheme.params.get(f"{name}_token_id", -1) for name in names]
    ids = turn.input_ids(first, last, copy=False)
    before, behind = ids[: begin - first], ids[stop - first :]
    ends = behind[:1].tolist() == marks[1:2]
    if qwen and not item.placeholders_before and before[-1:].tolist() == marks[:1]:
        around = np.flatnonzero(np.isin(before[:-1], marks))  # the delimiter that the first timestamp stands behind
        if len(around) and before[around[-1]] == marks[0]:
            begin = first + int(around[-1]) + 1
    if not qwen and not item.placeholders_before and before[-2:].tolist() == [marks[2], marks[0]] and begin - 2 >= new:
        begin -= 2
    if qwen:
        return begin, stop + ends
    around = np.flatnonzero(np.isin(behind, [marks[0], *marks[2:]]))
    if ends and len(around) and behind[around[0]] == marks[3]:
        stop += int(around[0]) + 1
    return begin, stop


class VLLMCbor(VLLM):
    """The same over canonical CBOR, written here for all ids of a turn at once: cbor2, page by page, takes three times as long."""

    def encoded_seed(self, seed: str) -> bytes:
        return sha256(_cbor(seed)).digest()

    def hash_pages(self, before: bytes, first: int, ids: NDArray[np.int32], pieces: Sequence[Piece]) -> list[bytes]:
        size = self.page_size
        data, stops = _cbor_tokens(ids, size)
        head, count = b"\x83\x58\x20", _cbor_head(0x80, size)  # an array of three, the first of them 32 bytes
        known: ExtraKeys = None
        tail = _cbor(known)
        hashes = []
        at = 0
        for stop, keys in zip(stops, self.extra_keys(first, len(stops), pieces), strict=True):
            if keys is not known:
                known, tail = keys, _cbor(keys)
            before = sha256(b"%b%b%b%b%b" % (head, before, count, data[at:stop], tail)).digest()
            hashes.append(before)
            at = stop
        return hashes


def _cbor_head(major: int, value: int) -> bytes:
    """A type and its number in the fewest bytes (RFC 8949, 4.2.1)."""
    if value < 24:
        return bytes([major | value])
    size = next(size for size in (1, 2, 4, 8) if value < 256**size)
    return bytes([major | 23 + size.bit_length()]) + value.to_bytes(size, "big")


def _cbor(value: object) -> bytes:
    """None, text, ints and tuples of them in canonical CBOR."""
    if value is None:
        return b"\xf6"
    if isinstance(value, str):
        data = value.encode()
        return _cbor_head(0x60, len(data)) + data
    if isinstance(value, int):
        return _cbor_head(0x00, value) if value >= 0 else _cbor_head(0x20, -1 - value)
    assert isinstance(value, tuple)
    return _cbor_head(0x80, len(value)) + b"".join(map(_cbor, value))


def _cbor_tokens(ids: NDArray[np.int32], size: int) -> tuple[bytes, list[int]]:
    """Every id as :func:`_cbor` has it, in one, and where each page of ``size`` of them ends."""
    width = (ids > 23).view(np.int8) + (ids > 0xFF).view(np.int8) + 2 * (ids > 0xFFFF).view(np.int8)  # 0, 1, 2 or 4 bytes follow
    cells = np.empty((len(ids), 5), np.uint8)
    cells[:, 0] = np.where(width, _CBOR_INFO[width], ids)
    cells[:, 1:] = ids.astype(">u4").view(np.uint8).reshape(-1, 4)
    data = cells[_CBOR_KEPT[width]].tobytes()
    stops: list[int] = np.cumsum(width + 1, dtype=np.int64)[size - 1 :: size].tolist()
    return data, stops


_CBOR_INFO: Final = np.array([0, 24, 25, 0, 26], np.uint8)  # by how many bytes follow
_CBOR_KEPT: Final = np.array([[1, 0, 0, 0, 0], [1, 0, 0, 0, 1], [1, 0, 0, 1, 1], [0] * 5, [1] * 5], np.bool)


class NanoVLLM(Chain):
    """xxh64 over int64 ids."""

    def __init__(self, scheme: str, page_size: int, mode: str) -> None:
        from xxhash import xxh64_digest  # noqa: PLC0415

        super().__init__(scheme, page_size, mode, b"")
        self._digest: Callable[[bytes], bytes] = xxh64_digest

    def placed(self, pieces: Sequence[Piece], turn: Node | Draft) -> list[Piece]:
        item = turn.media[0]
        raise Unsupported(f"nano-vllm has no media, so its hashes cannot tell {item} of {turn!r} from another", item=item)

    def hash_pages(self, before: bytes, first: int, ids: NDArray[np.int32], pieces: Sequence[Piece]) -> list[bytes]:
        data, step, digest = ids.astype("<i8").tobytes(), self.page_size * 8, self._digest
        hashes = []
        for at in range(0, len(data), step):
            before = digest(before[::-1] + data[at : at + step])
            hashes.append(before)
        return hashes


_memo: Final[Memo[Reached]] = Memo(REMEMBERED)
