"""Reads a store or a bundle with nothing of sessiontree, as docs/format.md says, and prints it as JSON: read_store.py PATH."""

import json
import re
import sys
from functools import partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from struct import Struct
from typing import Any
from zlib import crc32

import msgpack

HEADER, HEAD, BLOCK, RECORD = map(Struct, ("<4sB3xIIQQII", "<III", "<4sB3xIIQQQQQII", ">BBBBIBIBIBB32sBQ"))
pack, unpack = msgpack.packb, partial(msgpack.unpackb, use_list=False, max_map_len=0, max_ext_len=0)


def line(path: Path, start: str, words: str, seed: int = 0) -> tuple[list[str], int]:
    """The words of a file's first line behind those it starts with, and its length."""
    found = re.match(f"({start} ({words})) ([0-9a-f]{{8}})\n".encode(), path.read_bytes())
    if found is None or int(found[3], 16) != crc32(found[1], seed):
        sys.exit(f"{path}, offset 0: it does not begin as {start!r} does, or not with that line's checksum")
    return found[2].decode().split(" "), found.end()


def frames(path: Path, data: bytes, segment: int, seed: int, at: int, sequence: int, found: list[Any]) -> tuple[int, int, int]:
    """Take the sound frames from ``at`` on: where they end, the last one's sequence, and the highest known to have been synced."""
    proof = 0
    for match in re.compile(b"\xf5stf").finditer(data, at):
        header = data[match.start() : match.start() + 40].ljust(40, b"\0")
        _, version, mine, count, number, synced, length, crc = HEADER.unpack(header)
        if match.start() < at or mine != segment or crc != crc32(header[:36], (seed ^ match.start()) & 0xFFFFFFFF):
            continue
        if version != 1:
            sys.exit(f"{path}, offset {match.start()}: a frame of version {version}")
        proof = max(proof, synced if number > sequence else 0)
        place, stop, records = at + 40, at + 40 + length, []
        for _ in range(count if (match.start(), number) == (at, sequence + 1) else 0):
            magic, size, expected = HEAD.unpack(data[place : place + 12].ljust(12, b"\0"))
            record = data[place + 12 : min(place + 12 + size, stop)]
            if magic != crc32(b"record", seed) or len(record) != size or crc32(record, seed ^ size) != expected:
                break
            records.append((path, place + 12, record))
            crc, place = crc32(data[place : place + 12], crc), place + 12 + size
        if (match.start(), number, place) == (at, sequence + 1, stop) and data[stop : stop + 4] == crc.to_bytes(4, "little"):
            found, at, sequence = found.__iadd__(records), stop + 4, number
    return at, sequence, proof


def read(path: Path, found: list[Any]) -> int:
    """Find the records of a store or bundle, as (file, offset, bytes); how many bytes of an unfinished write stand behind them."""
    if path.is_file():
        (name, *zstd), at = line(path, "sessiontree bundle 1", r"[0-9a-f]{32}(?: zstd \d{20} \d{20} [0-9a-f]{8})?")
        data = path.read_bytes()
        if zstd:
            expand = import_module("zstandard").ZstdDecompressor().decompressobj().decompress
            data = data[:at] + (expand(data[at:]) if crc32(data[at:]) == int(zstd[3], 16) else b"")
        at, sequence, synced = frames(path, data, 1, crc32(name.encode()), at, 0, found)
        whole = at == len(data) and synced == sequence - 1 and data[at - 12 : at - 8] == bytes(4)
        return 0 if whole else sys.exit(f"{path}, offset {at}: no sound frame {sequence + 1}; it was cut, or is damaged")
    seed = crc32(line(path / "FORMAT", "sessiontree log 1", "[0-9a-f]{32}")[0][0].encode())
    base = line(path / "BASE", "sessiontree base", r"\d+ \d+ \d+ \d+", seed)[0] if (path / "BASE").exists() else [1, 0, 0]
    first, sequence, proof = map(int, base[:3])
    for sidecar in path.glob("segments/*.idx"):
        for match in re.finditer(b"\xf5sti", data := sidecar.read_bytes()):
            *_, count, _, final, _, _, _, _, crc = BLOCK.unpack(data[match.start() : match.start() + 64].ljust(64, b"\0"))
            rows = data[match.start() + 64 : match.start() + 64 + 73 * count]
            proof = max(proof, final if crc == crc32(rows, crc32(data[match.start() : match.start() + 60], seed)) else 0)
    last, torn = max([0, *(int(each.stem) for each in path.glob("segments/*.[is][de][xg]"))]), 0
    for segment in range(first, last + 1):
        where = path / f"segments/{segment:08d}.seg"
        data = where.read_bytes() if where.exists() else sys.exit(f"{where}, offset 0: the segment is missing")
        at, sequence, synced = frames(where, data, segment, seed, 0, sequence, found)
        proof, torn = max(proof, synced), len(data[at:].rstrip(b"\0"))
        if torn if segment < last else proof > sequence:
            sys.exit(f"{where}, offset {at}: no sound frame {sequence + 1}, which was synced")
    return torn


def fixed(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    tag, parts = value[0], value[1:] if value[0] == 3 else [fixed(each) for each in value[1:]]
    parts = sorted(parts, key=pack) if tag == 1 else list(zip(parts[::2], parts[1::2], strict=True)) if tag == 2 else parts
    return ["array", *parts] if tag == 3 else [("list", "set", "map")[tag], parts]


def contents(found: list[Any]) -> Any:  # the sessions that records come to, as JSON has them
    first, last, drops, said = dict[Any, Any](), dict[Any, Any](), set[Any](), dict[Any, dict[str, Any]]()
    for path, offset, record in found:
        _, kind, _, _, session, _, ordinal, _, parent, _, _, own, _, key = RECORD.unpack_from(record)
        body, where, known = unpack(record[61:]), f"{path}, offset {offset}", kind in (*range(1, 9), 64)
        again = RECORD.pack(0x98, kind, 1, 0xCE, session, 0xCE, ordinal, 0xCE, parent, 0xC4, 32, own, 0xCF, key) + pack(body)
        if not known or record != again or (kind in (1, 3, 8) and own != sha256(body[kind == 8].encode()).digest()):
            sys.exit(f"{where}: a record of kind {kind} and version {record[2]} as none is written")
        alone = RECORD.pack(0x98, kind, 1, 0xCE, 0, 0xCE, kind == 2, 0xCE, 0, 0xC4, 32, own, 0xCF, key if kind == 2 else 0)
        if kind in (1, 2):  # a session stands in the place of its root
            first.setdefault((session, ordinal), (where, parent, own, alone + record[61:], body))
        elif kind in (3, 6):
            last[kind, session, own] = ordinal, body
        elif kind == 7:
            drops.update((session, *each) for each in Struct("<I").iter_unpack(body[0]))
        elif kind == 8 and key >= said.setdefault((session, ordinal), {}).get(body[1], (0,))[0]:
            said[session, ordinal][body[1]] = key, alone + record[61:], body, where
    at, above, ids, stops = dict[Any, Any](), dict[Any, Any](), dict[Any, bytes](), dict[Any, int]()
    for place, (where, parent, own, _, body) in sorted(first.items()):
        (session, ordinal), up = place, at.get((place[0], parent), (place[0], parent))
        if not ordinal:
            way = [at.get(body[7], body[7] or place)]  # from the node that it is a fork of upwards
            while way[-1] in above:
                way.append(above[way[-1]])
            for depth, each in enumerate(reversed(way)):
                at[session, depth] = each
                if body[7] is not None:  # over what those say that it shares it with
                    there = next((o for (s, o), node in at.items() if s == body[7][0] and node == each), each[1])
                    said[session, depth] = said.get((body[7][0], there), {}) | said.get((session, depth), {})
            ids[place] = sha256(b"sessiontree root\0" + pack([1, *body[1:5]])).digest() if body[7] is None else ids[way[-1]]
            stops[place], right = 0, ids[place] == body[6]
        else:
            key, origin, role, tokens, runs, state, replayed, media, _ = body
            items = [(*item[:9], *(pack(fixed(extra)) for extra in item[9:])) for item in media]
            laid = [(0, len(tokens) // 4)] if isinstance(runs, int) else unpack(runs)
            head = pack((("input", "generated")[origin], role, key, items, (runs, state) if laid and laid[0][0] == 7 else None))
            ids[place] = sha256(ids[up] + b"sessiontree node\0" + head + tokens).digest()
            above[place], stops[place] = up, stops[up] + len(tokens) // 4
            counts = state[0], (replayed or [state])[-1][0], stops[up] + sum(run[1] for run in laid)
            right = (own, {*counts}) == (ids[place], {stops[place]})
            drops |= {place} if up in drops and up[0] == session else set()
        if not right:
            sys.exit(f"{where}: {ids[place].hex()} is the id of what stands here")
    order = [key for key in sorted({*at, *above}) if key in at or key not in drops]
    for session, body in ((place[0], each[4]) for place, each in sorted(first.items()) if not place[1] and place not in drops):
        nodes = {ordinal: at.get((number, ordinal), (number, ordinal)) for number, ordinal in order if number == session}
        heads = sorted((b[0], ids[nodes[o]], b[1]) for (k, s, _), (o, b) in last.items() if (k, s) == (3, session) and o in nodes)
        pins = sorted(own for (kind, number, own), (_, b) in last.items() if (kind, number) == (6, session) and b[0])
        words = [(ids[nodes[o]], *each[1:]) for o in nodes for _, each in sorted(said.get((session, o), {}).items())]
        if wrong := [where for identity, _, said_of, where in words if identity != said_of[0]]:
            sys.exit(f"{wrong[0]}: an annotation of another node than stands in its place")
        turns = b"".join(sha256(ids[above[node]] + first[node][3]).digest() for node in nodes.values() if node in above)
        ends = pack([[head[:2] for head in heads], pins]) + b"".join(sha256(alone).digest() for _, alone, *_ in words)
        digest = sha256(b"sessiontree session\0" + pack([body[6], *body[5]]) + turns + ends)
        facts = {"nodes": [(ids[node], stops[node]) for node in nodes.values()], "heads": heads, "pins": pins}
        yield {"id": body[0], "digest": digest.digest(), **facts, "annotations": [each[2] for each in words]}


if __name__ == "__main__":
    found: list[Any] = []
    print(json.dumps({"torn": read(Path(sys.argv[1]), found), "sessions": [*contents(found)]}, default=bytes.hex, indent=1))
