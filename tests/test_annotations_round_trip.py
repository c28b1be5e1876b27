"""Each kind of value through each kind of store, to the bit, with forks in the middle of the node that it is said of."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import sqlite_backend
from numpy.typing import NDArray

from sessiontree import SessionStore, SessionTree
from sessiontree.annotations import Annotation, OfTokens, Ragged, Spans, TokenValues
from sessiontree.bundles import export_bundle, import_bundle, open_bundle
from sessiontree.copying import copy_sessions
from tests.test_annotations import DTYPES

LONG: Final = 9  # tokens of a reply
CUTS: Final = (5, 2)  # how many of them are kept by a fork in its middle, and by one in the middle of that
FEW: Final = ("bool", "uint8", "int32", "int64", "float16", "float64")


def noise(dtype: str, *shape: int) -> NDArray[Any]:
    """Any bits of a type: payloads of NaN, numbers below the normal ones."""
    kind = np.dtype(dtype)
    data = np.random.default_rng(list(dtype.encode())).bytes(int(np.prod(shape)) * kind.itemsize)
    array = np.frombuffer(data, np.uint8) % 2 == 1 if dtype == "bool" else np.frombuffer(data, kind)
    return array.reshape(shape)


def double(bits: int) -> float:
    (made,) = struct.unpack("<d", struct.pack("<Q", bits))
    return float(made)


#: What is said of a reply, and what is said over it later.
KINDS: Final[dict[str, tuple[Annotation, Annotation]]] = {
    "logprobs": (TokenValues(noise("float32", LONG)), TokenValues(np.array([-0.0, -np.inf], np.float32), 3)),
    "reference logprobs": (TokenValues(noise("float64", LONG)), TokenValues([double(0x7FF8_0000_0000_0123)], 4)),
    "loss mask": (TokenValues([True] * 3), TokenValues([False] * 3, 2)),
    "routed experts": (TokenValues(noise("uint8", 8, 48, 8)), TokenValues(noise("uint8", 1, 48, 8), 8)),
    **{f"rows of {each}": (TokenValues(noise(each, 6, 2, 3), 1), TokenValues(noise(each, 2, 2, 3), 3)) for each in DTYPES},
    **{f"lists of {each}": (Ragged(noise(each, 9), [3, 0, 2, 0, 4, 0], 1), Ragged(noise(each, 4), [0, 4], 3)) for each in FEW},
    "weight versions": (Spans([(0, 3, 7), (3, 8, 2**40)]), Spans([(2, 4, "step 9"), (8, 9, -1)])),
    "yes or no": (True, False),
    "whole number": (2**64 - 1, -(2**63)),
    "float": (-0.0, double(1)),
    "not a number": (1.0, double(0xFFF8_0000_0000_0123)),
    "text": ("", "Grüße\0\n😀"),
}


def exact(value: Any) -> Any:
    """A value's type and bytes."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return type(value), struct.pack("<d", value) if isinstance(value, float) else value


def by_token(value: Any) -> list[Any]:
    """What is said of each token of a reply, with its type and bytes; None where that is nothing."""
    found: list[Any] = [None] * LONG
    for start, stop, which in value if isinstance(value, Spans) else ():
        found[start:stop] = [exact(which)] * (stop - start)
    for start, rows in value.stretches if isinstance(value, TokenValues) else ():
        found[start : start + len(rows)] = [exact(row) for row in rows]
    for start, lengths, values in value.stretches if isinstance(value, Ragged) else ():
        at = 0
        for token, length in enumerate(lengths.tolist(), start):
            found[token] = exact(values[at : at + length])
            at += length
    return found


def over(later: Any, earlier: Sequence[Any]) -> list[Any]:
    return [old if new is None else new for old, new in zip(earlier, by_token(later), strict=True)]


@pytest.fixture(params=["memory", "disk", "SQLite", "PostgreSQL"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], SessionStore]:
    """Opens the store, and opens it again."""
    kinds: dict[str, Callable[[], Callable[[], SessionStore]]] = {
        "memory": lambda: SessionStore.in_memory,
        "disk": lambda: partial(SessionStore.open, tmp_path / "store"),
        "SQLite": lambda: lambda: SessionStore.connect(sqlite_backend.connect(str(tmp_path / "sqlite"))),
        "PostgreSQL": lambda: partial(SessionStore.connect, request.getfixturevalue("postgres_url")),
    }
    return kinds[request.param]()


def readers(store: SessionStore, opened: Callable[[], SessionStore], place: Path) -> Iterator[Any]:
    """Where its sessions are now, without what it holds in memory: a bundle, what was imported of it, a copy, and it itself."""
    export_bundle(store, place / "bundle")
    with open_bundle(place / "bundle") as bundle:
        yield bundle
    for name in ("imported", "copied"):
        with SessionStore.open(place / name) as target:
            if name == "copied":
                assert copy_sessions(store, target).ok
            else:
                import_bundle(target, place / "bundle")
        with SessionStore.open(place / name) as target:
            yield target
    if opened == SessionStore.in_memory:  # it has nothing to be opened from
        return
    store.close()
    with opened() as again:
        yield again


def check_path(tree: SessionTree, node: bytes, expected: Sequence[Any]) -> None:
    """What is read along a path of windows of any length, without the prompt's two tokens."""
    value = next(each for said in map(tree.annotations, tree.node(node).path()) if (each := said.get("said")) is not None)
    for start, stop in ((0, len(expected)), (1, 1), (3, len(expected) - 2), (len(expected) - 1, len(expected))):
        if isinstance(value, TokenValues):
            values, known = tree.token_values(node, "said", 2 + start, 2 + stop)
            assert known.tolist() == [each is not None for each in expected[start:stop]]
            assert [exact(row) for row in values[known]] == [each for each in expected[start:stop] if each is not None]
            assert values.shape[1:] == value.row_shape and values.dtype == value.dtype
            assert not values[~known].any()
        if isinstance(value, Spans):
            found: list[Any] = [None] * (stop - start)
            for begin, end, which in tree.spans(node, "said", 2 + start, 2 + stop):
                found[begin - 2 - start : end - 2 - start] = [exact(which)] * (end - begin)
            assert found == expected[start:stop]


@pytest.mark.parametrize("kind", KINDS)
def test_an_annotation_comes_back_bit_for_bit(kind: str, opened: Callable[[], SessionStore], tmp_path: Path) -> None:
    first, later = KINDS[kind]
    store = opened()
    session = store.create("s", scheme="text@hf5")
    prompt = session.append(session.root, [1, 2])
    with session.draft(prompt) as draft:
        draft.extend(range(LONG))
        whole = draft.commit("stop", annotations={"said": first})
    cuts = [session.truncate(whole, whole.start + CUTS[0])]
    cuts.append(session.truncate(cuts[0], cuts[0].start + CUTS[1]))
    ends = [session.append(cut, range(LONG), annotations={"said": first}) for cut in cuts]
    session.annotate(whole, {"said": later})  # by now others begin with its first tokens
    fork = store.fork(session, ends[0], "fork")
    fork.annotate(ends[0], {"said": later})
    own = fork.append(ends[0], range(LONG), annotations={"said": later})

    is_scalar = not isinstance(first, OfTokens)
    said = over(later, by_token(first))
    for found in readers(store, opened, tmp_path):
        tree, forked = found.get("s").tree, found.get("fork").tree
        for node, value in ((whole.id, later), *((end.id, first) for end in ends)):
            if is_scalar:
                assert exact(tree.annotations(node)["said"]) == exact(value)
        for node in (ends[0].id, own.id):
            if is_scalar:
                assert exact(forked.annotations(node)["said"]) == exact(later)
        if is_scalar:
            assert [tree.annotations(cut.id) for cut in cuts] == [{}, {}], "a scalar is of the whole node"
            assert forked.annotations(cuts[0].id) == {}
            continue
        assert by_token(tree.annotations(whole.id)["said"]) == said
        for cut, count, end in zip(cuts, CUTS, ends, strict=True):
            begun = said[:count]
            for each in (tree, forked) if cut is cuts[0] else (tree,):
                assert by_token(each.annotations(cut.id).get("said")) == [*begun, *[None] * (LONG - count)]
            assert by_token(tree.annotations(end.id)["said"]) == by_token(first)
            check_path(tree, end.id, [*begun, *by_token(first)])
        assert by_token(forked.annotations(ends[0].id)["said"]) == said
        check_path(forked, own.id, [*said[: CUTS[0]], *said, *by_token(later)])
