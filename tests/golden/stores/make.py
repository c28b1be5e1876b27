"""How the stores beside this file were made: ``PYTHONPATH=. python tests/golden/stores/make.py DIRECTORY`` makes others like them.

They are never made again: a later version of the format adds a directory of its own. What is in ``v1`` was written by the first
version. The tests read it, and do the operations below once more elsewhere, to compare what is written today with it byte by byte:
all that differs is a store's random name, which they give it, and what the package zstandard makes of a stream.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np

from sessiontree import ExternalPositions, MediaItem, Node, Ragged, Session, SessionStore, Spans, TokenValues, media_identity
from sessiontree.annotated import annotated
from sessiontree.annotations import OfTokens
from sessiontree.backends.frames import FRAME_MAGIC
from sessiontree.backends.segment_log import SegmentLog
from sessiontree.bundles import export_bundle, open_bundle
from sessiontree.copying import session_digest
from sessiontree.positions import scheme

START, END, IMAGE, VIDEO = 151652, 151653, 151655, 151656
TORN: Final = 82  # bytes of the frame that a killed writer did not finish


def generate(session: Session, parent: Node, tokens: list[int], key: str, finish_reason: str = "stop", **options: Any) -> Node:
    """A reply. Its key is given, since one that is drawn would be another every time."""
    with session.draft(parent, key=key) as draft:
        draft.extend(tokens)
        return draft.commit(finish_reason, **options)


def open_store(path: Path) -> SessionStore:
    return SessionStore.open(path, durability="commit")


def text(path: Path) -> None:
    """Text: branches, heads that move and go, pins, links, tool calls, limits, namespaces, forks, every kind of annotation."""
    with open_store(path) as store:
        space = {"cache_salt": "pepper", "lora": "poet", "tenant": "acme"}
        options: dict[str, Any] = {"namespace": space, "model_fingerprint": "model 1", "max_tokens": 500, "reserve_output": 10}
        chat = store.create("chat", scheme="text@hf5", **options)
        metadata = {"n": 1, "deep": {"a": [1, 2.5, None, True, "é"], 7: b"\0"}, "set": {3, "x"}, "array": np.arange(6, dtype="<u2")}
        system = chat.append(chat.root, [1, 2, 3], role="system", key="first", metadata=metadata)
        question = chat.append(system, list(range(100, 140)))
        chat.set_head("main", question)
        long = generate(
            chat, question, list(range(200, 220)), "long", "length", tail_policy="drop_last", metadata={"by": "sampler"}
        )
        short = generate(chat, question, [7, 8], "short", annotations={"logprobs": np.array([-0.5, -1.25], "<f4"), "reward": 1.0})
        chat.set_head("main", short, expected=chat.head("main"))
        chat.set_head("other", long)
        chat.set_head("gone", system)
        chat.drop_head("gone")
        chat.pin(long)
        chat.pin(system)
        chat.unpin(system)
        chat.annotate(short, {"reward": 0.5, "train": False, "judge": "fine", "rank": 3})
        chat.annotate(
            long, {"weight_version": Spans([(0, 5, 7), (5, 19, "v8")]), "top_p_ids": Ragged([5, 6, 7], [2, 0, 1], start=3)}
        )
        chat.annotate(long, {"routed_experts": TokenValues(np.arange(12, dtype="<u1").reshape(2, 3, 2), start=4)})
        chat.annotate(long, {"routed_experts": TokenValues(np.full((1, 3, 2), 9, "<u1"), start=12)})
        chat.annotate(chat.root, {"task": "greet"})
        chat.truncate(long, 50)
        chat.rewrite(long, [(0, 2, [31, 32])])
        empty = chat.append(short, [])
        calls = generate(chat, empty, [41], "calls", "tool_calls", metadata={"tool_calls": ["x", "y"]})
        results = [chat.append(calls, [42], role="tool", key=name, metadata={"tool_call_id": name}) for name in "xy"]
        chat.set_head("main", chat.linearize(results))
        fork = store.fork(chat, results[0], "fork")
        fork.annotate(short, {"reward": -1.0})
        chat.annotate(short, {"later": True})
        fork.set_head("main", generate(fork, results[0], [51, 52], "of the fork"))
        last = fork.head("main").node
        again = store.fork(fork, last, "fork of a fork")
        again.append(question.id, [61])
        again.append(last, [62])
        again.set_head("high", question.id)
        store.create("empty", scheme="text@vllm")
        store.alias_media("logo", media_identity("png", b"logo"), namespace="acme")


def picture(number: int, grid: tuple[int, int, int], *spans: tuple[int, int], **options: Any) -> MediaItem:
    return MediaItem("image", media_identity("png", number), spans, grid_thw=grid, **options)


def media(path: Path) -> None:
    """Media and features; every kind of run of positions; an item in two parts; fields of a processor; as decoded, as replayed."""
    ids: dict[str, Any] = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
    with open_store(path) as store:
        qwen = store.create("qwen2_5_vl", scheme=scheme("qwen2_5_vl@hf5", spatial_merge_size=2, tokens_per_second=1, **ids))
        extra = {
            "fps": 2.0,
            "crops": [[1, 2], (3,)],
            "kinds": {"b", ("a", 1)},
            "mask": np.eye(2, dtype="?"),
            "of": {2: "b", "a": 1},
        }
        image = picture(1, (1, 4, 4), (2, 4), extra=extra)
        asked = qwen.append(qwen.root, [1, START, *[IMAGE] * 4, END, 5], media=[image])
        first = generate(qwen, asked, [6, 7], "first")
        identity = media_identity("mp4", b"film")
        film = MediaItem("video", identity, [(1, 4)], grid_thw=(4, 2, 2), second_per_grid_ts=0.5)
        watched = qwen.append(first, [START, *[VIDEO] * 4, END], media=[film])
        qwen.set_head("main", generate(qwen, watched, [8, 9, 10], "second", "length"))
        part = picture(2, (1, 4, 4), (1, 3), unfinished=True)
        begun = qwen.append(watched, [START, *[IMAGE] * 3], media=[part])
        rest = part.with_spans([(0, 1)], placeholders_before=3, unfinished=False)
        whole = qwen.append(begun, [IMAGE, END], media=[rest])
        table = np.arange(6, dtype=np.int64).reshape(3, 2) + int(whole.next_position)
        qwen.append(whole, [21, 22], positions=ExternalPositions(table))
        store.put_features(image, {"pixel_values": np.arange(8, dtype="<f4").reshape(2, 4), "mask": np.array([True, False])})
        store.put_features(film, {"embeddings": np.full((2, 3), 0.25, "<f2")})
        store.alias_media("film", identity)

        omni_ids = ids | {"audio_token_id": 151675, "vision_end_token_id": END, "audio_start_token_id": 151669}
        rule = scheme("qwen3_omni@hf5", spatial_merge_size=2, position_id_per_seconds=13, audio_end_token_id=151670, **omni_ids)
        omni = store.create("qwen3_omni", scheme=rule)
        clips = [MediaItem("video", media_identity("mp4", n), [(1 + 4 * n, 2)], (2, 2, 2), 0.2) for n in range(2)]
        seen = omni.append(omni.root, [*[START, VIDEO, VIDEO, END] * 2, 11], media=clips)
        omni.set_head("main", generate(omni, seen, [12, 13], "heard"))

        rule = scheme(
            "hunyuan_vl@hf5", image_token_id=120120, im_start_id=120118, im_end_id=120119, spatial_merge_size=1, num_axes=4
        )
        absolute = store.create("hunyuan_vl", scheme=rule)
        absolute.append(absolute.root, [1, 120118, *[120120] * 4, 120119, 2], media=[picture(3, (1, 1, 1), (2, 4))])

        marks: dict[str, Any] = {
            "image_start_id": 70,
            "image_end_id": 71,
            "slice_start_id": 72,
            "slice_end_id": 73,
            "newline_id": 10,
        }
        canvas = store.create("minicpmv4_7", scheme=scheme("minicpmv4_7@hf5", image_token_id=60, video_token_id=61, **marks))
        tokens, spans = [1, 70, *[60] * 4, 71], [(2, 4)]
        for row in range(2):
            for column in range(3):
                spans.append((len(tokens) + 1, 2))
                tokens += [72, 60, 60, 73, *([10] if (row, column) == (0, 2) else [])]
        sizes = [(8, 8), *[(4, 8)] * 6]
        crops = canvas.append(canvas.root, tokens, media=[MediaItem("image", media_identity("png", 4), spans, target_sizes=sizes)])
        lone = MediaItem("image", media_identity("png", 5), [(2, 8)], target_sizes=[(8, 16)])
        coat = canvas.append(crops, [10, 70, *[60] * 8], media=[lone])
        canvas.append(coat, [71, 10, 5])


def compacted(path: Path) -> None:
    """Nodes and a session that were dropped, some of which forks go on from; compacted; then written to again."""
    with open_store(path) as store:
        chat = store.create("chat", scheme="text@sglang")
        kept = chat.append(chat.root, [1, 2, 3])
        lost = chat.append(kept, list(range(50)))
        chat.append(lost, [4])
        shared = chat.append(kept, [5, 6])
        below = chat.append(shared, [7])
        chat.annotate(shared, {"reward": 2})
        chat.annotate(shared, {"reward": 3})
        chat.set_head("main", kept)
        chat.set_head("old", kept)
        chat.drop_head("old")
        fork = store.fork(chat, below, "fork")
        fork.set_head("main", fork.append(below, [8]))
        chat.drop(lost)
        chat.drop(shared)
        gone = store.create("gone", scheme="text@vllm")
        tip = gone.append(gone.root, [9])
        gone.append(gone.root, [10])
        store.fork(gone, tip, "of the gone").append(tip, [11])
        store.drop("gone")
        middle = store.fork(chat, kept, "middle")
        middle.annotate(kept, {"said": "by the middle"})
        store.fork(middle, kept, "past the middle").append(kept, [15])
        store.drop("middle")
    with open_store(path) as store:
        store.gc()
        chat = store.get("chat")
        chat.set_head("main", chat.append(chat.head("main").node, [12]))
        dropped = chat.append(chat.root, [13])
        chat.append(dropped, [14])
        chat.drop(dropped)


def killed(path: Path) -> None:
    """Several small segments of a writer that was killed while it wrote a frame: the bytes of a part of that are there."""
    beside = path.with_name(f"{path.name} that goes on")
    open_function: Any = SegmentLog.open
    with patch.dict(open_function.__func__.__kwdefaults__, segment_bytes=2048), open_store(beside) as store:
        chat = store.create("chat", scheme="text@hf5")
        node = chat.root
        for number in range(12):
            node = chat.append(node, list(range(100 * number, 100 * number + 60)))
            chat.set_head("main", node)
        shutil.copytree(beside, path)
        segment = max(path.glob("segments/*.seg"))
        chat.append(node, [1, 2, 3, 4])
        data = (beside / "segments" / segment.name).read_bytes()
        segment.write_bytes(data[: data.rindex(FRAME_MAGIC) + TORN] + bytes(512))
    shutil.rmtree(beside)


def bundle(path: Path, compress: Any = None) -> None:
    """A few sessions in one file, features and a fork among them."""
    with SessionStore.in_memory() as store:
        chat = store.create("chat", scheme=scheme("qwen2_vl@vllm", spatial_merge_size=2, image_token_id=IMAGE), namespace="acme")
        image = picture(1, (1, 4, 4), (1, 4))
        asked = chat.append(chat.root, [START, *[IMAGE] * 4, END], media=[image])
        reply = generate(chat, asked, list(range(300)), "reply", annotations={"logprobs": np.linspace(-2, 0, 300, dtype="<f4")})
        chat.set_head("main", reply)
        chat.pin(asked)
        store.put_features(image, {"pixel_values": np.arange(64, dtype="<f4").reshape(4, 16)})
        store.alias_media("picture", image.identity, namespace="acme")
        fork = store.fork(chat, reply, "fork")
        fork.annotate(reply, {"reward": 1})
        fork.set_head("main", fork.append(reply, [1]))
        export_bundle(store, path, features=True, compress=compress)


def packed_bundle(path: Path) -> None:
    """The same, compressed."""
    bundle(path, "zstd")


ALL: Final[dict[str, Callable[[Path], None]]] = {
    "text": text,
    "media": media,
    "compacted": compacted,
    "killed": killed,
    "plain.bundle": bundle,
    "zstd.bundle": packed_bundle,
}


# What is in them, as JSON has it


def open_golden(path: Path) -> SessionStore:
    return open_bundle(path) if path.is_file() else SessionStore.open(path, read_only=True)


def what_a_reader_prints(store: SessionStore, torn: int) -> dict[str, Any]:
    """What examples/read_store.py is to print of a store, as the library sees it."""
    return {"torn": torn, "sessions": [_printed(store.get(name)) for name in store.sessions()]}


def _printed(session: Session) -> dict[str, Any]:
    tree = session.tree
    heads = sorted((name, session.head(name)) for name in session.heads)
    said = [(node.id.hex(), name, values[name]) for _, node, values in annotated(tree) for name in sorted(values)]
    return {
        "id": session.id,
        "digest": session_digest(session).hex(),
        "nodes": [[node.id.hex(), node.stop] for node in tree],
        "heads": [[name, head.node.id.hex(), head.version] for name, head in heads],
        "pins": sorted(pin.hex() for pin in session.pins),
        "annotations": [[node_id, name, *_form(value)] for node_id, name, value in said],
    }


def _form(value: Any) -> tuple[int, Any]:
    if not isinstance(value, OfTokens):
        return 0, value
    form = {TokenValues: 1, Ragged: 2, Spans: 3}[type(value)]
    return form, [[_array(field) if isinstance(field, np.ndarray) else field for field in part] for part in value.fields()]


def _array(array: Any) -> list[Any]:
    return [3, array.dtype.str, list(array.shape), array.tobytes().hex()]


def facts(store: SessionStore) -> dict[str, Any]:
    """What else there is of each session and node."""
    found: dict[str, Any] = {}
    for name in store.sessions():
        session = store.get(name)
        root = session.root
        found[name] = {
            "scheme": [root.scheme.name, dict(sorted(root.scheme.params.items()))],
            "namespace": list(root.namespace),
            "fingerprint": root.model_fingerprint,
            "limits": [session.max_tokens, session.reserve_output],
            "nodes": [_facts(store, node) for node in list(session.tree)[1:]],
        }
    return found


def _facts(store: SessionStore, node: Node) -> dict[str, Any]:
    tables = (node.positions(node.start, node.stop, mode) for mode in ("as_decoded", "as_replayed"))
    features = [(item, store.get_features(item)) for item in node.media]
    return {
        "id": node.id.hex(),
        "parent": None if node.parent is None else node.parent.id.hex(),
        "said": [node.role, node.origin, node.key, node.finish_reason, node.tail_policy],
        "links": [[link.kind, link.node_id.hex(), link.reused_tokens] for link in node.links],
        "metadata": sorted(map(str, node.metadata)),
        "media": [[str(item), [list(span) for span in item.spans], sorted(item.extra)] for item in node.media],
        "features": [[str(item), {name: _array(held[name]) for name in held}] for item, held in features if held is not None],
        "tokens": sha256(node.token_ids.tobytes()).hexdigest(),
        "positions": [[table.dtype.str, list(table.shape), sha256(table.tobytes()).hexdigest()] for table in tables],
        "state": [node.next_position, node.mrope_position_delta],
    }


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir()
    for name, operations in ALL.items():
        operations(place / name)
    expected = {}
    for name in ALL:
        with open_golden(place / name) as store:
            expected[name] = {"read": what_a_reader_prints(store, TORN if name == "killed" else 0), "facts": facts(store)}
    (place / "expected.json").write_text(json.dumps(expected, separators=(",", ":")) + "\n")
