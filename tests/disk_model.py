"""What the tests of stores on disk share: sessions to store, all that can be seen of them, and the disk they lie on."""

from __future__ import annotations

import errno
import hashlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from sessiontree import Node, Session, SessionStore, SessionTree, SessionTreeError, journal
from sessiontree.backends.segment_log import SegmentLog
from sessiontree.backends.system import System
from sessiontree.positions import Mode, scheme
from tests.disk import Disk, Fault
from tests.histories import GOLDEN_FAMILIES, History, cases, without_leading_empties

MODES: tuple[Mode, ...] = ("as_decoded", "as_replayed")
DURABILITIES: tuple[journal.Durability, ...] = ("commit", "group", "relaxed")
AT = "/store"
NO_RULE = (("minicpmv4_7", "sglang"),)
NO_AUDIO_IN_VIDEO = (("qwen2_5_omni", "vllm"), ("qwen3_omni", "sglang"))


def typed(value: Any) -> Any:
    """A value with the types of all that is in it; equal ones have one repr."""
    if isinstance(value, Mapping):
        return "map", sorted((repr(key), typed(entry)) for key, entry in value.items())
    if isinstance(value, (frozenset, set)):
        return "set", sorted(repr(typed(entry)) for entry in value)
    if isinstance(value, tuple):
        return "tuple", [typed(entry) for entry in value]
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.shape, value.tobytes()
    return type(value).__name__, repr(value)


def _answer(call: Any) -> str:
    try:
        return repr(call())
    except SessionTreeError as error:
        return type(error).__name__


def facts(node: Node) -> tuple[Any, ...]:
    """All that a node says of itself; its windows in both modes, never its whole path."""
    return (
        node.id,
        None if node.parent is None else node.parent.id,
        (node.depth, node.start, node.stop, node.origin, node.role, node.key),
        (node.finish_reason, node.tail_policy, node.links),
        typed(node.metadata),
        [item.fields() for item in node.media],
        [(item.fields(), start, stop) for item, start, stop in node.media_spans(node.start, node.stop)],
        (node.token_ids.dtype.str, node.token_ids.tobytes()),
        [(table.dtype.str, table.tobytes()) for table in (node.positions(node.start, node.stop, mode) for mode in MODES)],
        _answer(lambda: node.next_position),
        _answer(lambda: node.mrope_position_delta),
        (node.scheme.name, typed(node.scheme.params), node.namespace, node.model_fingerprint),
    )


def digest(node: Node) -> str:
    """Facts as one line."""
    return hashlib.sha256(repr(facts(node)).encode()).hexdigest()


def paths_of(tree: SessionTree) -> list[Any]:
    """The whole path of every leaf, as an engine reads it."""
    found = []
    for leaf in tree.leaves():
        tables = [leaf.positions(mode=mode) for mode in MODES]
        spans = [(item.identity, start, stop) for item, start, stop in leaf.media_spans()]
        found.append((leaf.id, [node.id for node in leaf.path()], leaf.input_ids().tobytes(), spans, [t.tobytes() for t in tables]))
    return found


def outline(tree: SessionTree) -> tuple[Any, ...]:
    """Ids in commit order, and heads."""
    heads = sorted((name, head.node.id, head.version) for name, head in tree.heads.items())
    return tuple(node.id for node in tree), tuple(heads)


def seen(session: Session) -> dict[str, Any]:
    """All that can be seen of a session."""
    tree = session.tree
    nodes = list(tree)
    return {
        "id": session.id,
        "limits": (session.max_tokens, session.reserve_output),
        "namespace": session.namespace,
        "root": session.root.id,
        "nodes": [facts(node) for node in nodes],
        "heads": outline(tree)[1],
        "children": [[child.id for child in tree.children(node)] for node in nodes],
        "siblings": [[child.id for child in tree.siblings(node)] for node in nodes],
        "leaves": [leaf.id for leaf in tree.leaves()],
        "paths": paths_of(tree),
        "problems": [[repr(problem) for problem in tree.validate(leaf)] for leaf in tree.leaves()],
        "text": tree.to_text(),
    }


def all_seen(store: SessionStore) -> dict[str, Any]:
    return {name: seen(store.get(name)) for name in store.sessions()}


def short(value: Any) -> str:
    """One line for another process to print."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


# --- sessions of every family ----------------------------------------------------------------------------------------------
def golden() -> Iterator[tuple[str, History]]:
    """Every family under every rule that has a table: the histories of its vectors with most media, of moderate length."""
    for family in (*GOLDEN_FAMILIES, "text"):
        for rule in ("hf5", "sglang", "vllm"):
            if (family, rule) in NO_RULE:
                continue
            known = [history for history, _ in cases(family, rule) if len(history.tokens) < 3000]
            known = [history for history in known if (family, rule) not in NO_AUDIO_IN_VIDEO or not history.has_audio_in_video]
            known.sort(key=lambda history: (-len({(item.modality, item.audio_feature_length is None) for item in history.items}),))
            for number, history in enumerate(known[:3]):
                yield f"{family}@{rule} {number}", history


def grow(session: Session, history: History) -> Node:
    """Its turns one behind the other, with a reply in between where one may stand, and a fork in the middle."""
    node = session.root
    for number, turn in enumerate(without_leading_empties(history.turns())):
        node = session.append(node, turn.tokens, media=turn.media, metadata={"turn": number, "of": (history.note, b"\0", 1.5)})
        if any(item.unfinished for item in turn.media):
            continue
        with suppress(SessionTreeError):
            draft = session.draft(node)
            draft.extend([7, 8])
            side = draft.commit("length")
            session.set_head(f"side {number}", side)
    session.set_head("main", node)
    return node


def scheme_of(name: str, history: History) -> Any:
    return scheme(name.split(maxsplit=1)[0], **history.params)


# --- the disk ---------------------------------------------------------------------------------------------------------------
@contextmanager
def logs_on(system: System, **options: Any) -> Iterator[None]:
    """Logs that are opened meanwhile lie on this disk."""
    with patch.object(journal, "SegmentLog", SimpleNamespace(open=partial(SegmentLog.open, system=system, **options))):
        yield


def open_on(system: System, *, segment_bytes: int = 64 * 2**20, **options: Any) -> SessionStore:
    """A store on a disk of the tests' own."""
    with logs_on(system, segment_bytes=segment_bytes):
        return SessionStore.open(AT, **options)


@contextmanager
def reopened(disk: Disk, **options: Any) -> Iterator[SessionStore]:
    """What another process finds there if this one were killed now."""
    store = open_on(disk.copy(), **options)
    try:
        yield store
    finally:
        store.close()


def let_go(store: SessionStore) -> None:
    """Close a store that may have failed."""
    with suppress(SessionTreeError):
        store.close()


def fail(disk: Disk, n: int, call: str, error: int = errno.ENOSPC, *, forever: bool = False, part: float = 0.5) -> None:
    """Let the n-th call from now on fail."""
    disk._hit = 0
    disk.fault = Fault(n, error, frozenset({call}), forever, part)


class Stalled(Disk):
    """A disk whose writes wait until they are let go on."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.go = threading.Event()
        self.go.set()
        self.waits = threading.Event()

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        if not self.go.is_set():
            self.waits.set()
            self.go.wait(10)
        return super().pwrite(fd, data, offset)
