"""What a journal knows of a log's records, looked at as they come: equal to looking at all of them at once."""

from __future__ import annotations

import random
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sessiontree import SessionStore, codec, journal
from sessiontree.backends.segment_log import ENTRY
from sessiontree.journal import Columns

KINDS = [codec.NODE] * 6 + [codec.SESSION, codec.HEAD, codec.OPENED, codec.DROP, codec.ALIAS]
NAMES = [bytes([number]) * 32 for number in range(8)] + [bytes(8) + bytes([number]) * 24 for number in range(4)]


def rows(count: int, rng: random.Random) -> NDArray[Any]:
    entries = np.zeros(count, ENTRY)
    entries["kind"] = rng.choices(KINDS, k=count)
    entries["session"] = rng.choices(range(9), k=count)
    entries["ordinal"] = rng.choices(range(5), k=count)
    entries["parent"] = rng.choices(range(5), k=count)
    entries["id"] = np.frombuffer(b"".join(rng.choices(NAMES, k=count)), "V32")
    return entries


def answers(columns: Columns) -> list[Any]:
    kinds = sorted(set(KINDS))
    return [
        *(field.tolist() for field in (columns.kinds, columns.sessions, columns.ordinals, columns.parents, columns.others())),
        columns.places_of_nodes().tolist(),
        columns.dropped_sessions,
        [columns.sessions_named(name) for name in NAMES],
        [columns.places(kind, session).tolist() for kind in kinds for session in range(9)],
        [columns.places(kind).tolist() for kind in kinds if kind != codec.NODE],
        [(number, places.tolist()) for number, places in columns.by_session()],
    ]


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.lists(st.integers(0, 60), min_size=1, max_size=12), st.data())
def test_what_came_since_is_all_that_is_looked_at(seed: int, steps: list[int], data: st.DataObject) -> None:
    """Each value goes on from any earlier one, as threads do that looked at different times; all of them stay as they were."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "_UNSORTED", 3)
        entries = rows(sum(steps), random.Random(seed))
        known = [Columns(entries[: steps[0]])]
        for _ in range(len(steps) - 1):
            before = data.draw(st.sampled_from(known))
            stop = data.draw(st.integers(len(before.entries), len(entries)))
            known.append(Columns(entries[:stop], None, before))
            if data.draw(st.booleans()):
                answers(known[-1])
        for columns in known:
            assert answers(columns) == answers(Columns(columns.entries))


def test_room_is_made_seldom_and_counted() -> None:
    entries = rows(20_000, random.Random(1))
    columns, moves = Columns(entries[:1]), 0
    for stop in range(2, len(entries), 7):
        longer = Columns(entries[:stop], None, columns)
        moves += not np.shares_memory(longer.sessions, columns.sessions)
        columns = longer
    assert moves < 120
    assert 13 * len(columns.entries) < columns.nbytes < 40 * len(columns.entries)


def test_threads_that_look_at_once_see_the_same(tmp_path: Any) -> None:
    with SessionStore.open(tmp_path / "store", durability="relaxed") as store:
        ids = [f"s{number}" for number in range(300)]
        for name in ids:
            store.create(name, scheme="text@hf5")
        store.evict()
        failed: list[BaseException] = []

        def use(number: int) -> None:
            try:
                rng = random.Random(number)
                for turn in range(60):
                    session = store.get(rng.choice(ids))
                    node = session.append(session.root, [number, turn])
                    session.set_head(f"h{number}", node)
                    assert session.head(f"h{number}").node is not None
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=use, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        found = store._journal
        assert found is not None
        store.flush()
        columns = found.columns()
        assert answers(columns) == answers(Columns(columns.entries))


def test_of_another_lease_everything_is_looked_at_anew(tmp_path: Any) -> None:
    """A compacted log has other rows, and a reader may find more of them than it knew."""
    path = tmp_path / "store"
    with SessionStore.open(path, durability="relaxed") as store, SessionStore.open(path, read_only=True) as reader:
        kept, gone = (store.create(name, scheme="text@hf5") for name in ("kept", "gone"))
        for number in range(30):
            kept.append(kept.root, [number])
            gone.append(gone.root, [number])
        store.flush()
        journals: list[Any] = [store._journal, reader._journal]
        before = [each.columns() for each in journals]
        store.drop("gone")
        store.gc()
        for number in range(100, 200):
            kept.append(kept.root, [number])
        store.flush()
        for each, known in zip(journals, before, strict=True):
            columns = each.columns()
            assert columns.lease is not known.lease and len(columns.entries) > len(known.entries)
            assert answers(columns) == answers(Columns(columns.entries))


def test_sessions_in_hand_share_what_is_known_of_the_store(tmp_path: Any) -> None:
    """Each was opened when the store had other records; none has arrays of all of them for itself."""
    path = tmp_path / "store"
    with SessionStore.open(path, durability="relaxed") as store:
        for number in range(2000):
            session = store.create(f"{number}", scheme="text@hf5")
            session.set_head("main", session.append(session.root, [number]))
    with SessionStore.open(path, durability="relaxed") as store:
        tracemalloc.start()
        try:
            held = []
            for number in range(100):
                session = store.get(f"{number}")
                session.append(session.head("main").node, [9])
                held.append(session)
            assert tracemalloc.get_traced_memory()[0] < 3_000_000  # 13 bytes of 6,000 records each would be 8 MB
        finally:
            tracemalloc.stop()
