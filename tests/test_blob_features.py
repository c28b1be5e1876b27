"""Features in blobs that many processes share: as in a folder, and what comes with the others.

The first half runs over a folder of files too, which one process writes: what a store sees is the same.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sessiontree import CorruptTree, KeyTaken, LimitExceeded, NeedsMedia, SessionStore, SessionTreeError, StoreFailed, Unsupported
from sessiontree.backends import buckets
from sessiontree.backends.blob_features import _ATTEMPTS, BlobFeatures
from sessiontree.backends.blobs import FeatureFolder, file_name
from sessiontree.backends.shared import Blobs
from sessiontree.features import FeatureArray, FeatureStore
from sessiontree.testing.together import in_threads
from tests.blob_places import KINDS, DictBlobs, Place, bucket_server, connect, new_place
from tests.bucket_server import BucketServer
from tests.test_features import item, pixels
from tests.toy import a_turn, grow, toy_scheme

DAY = 86_400.0


class Kept(NamedTuple):
    """Where features are kept. ``files``: for one more process. ``blobs``: all that lies there. ``spoil``: gives one other ones."""

    files: Callable[..., Any]
    blobs: Callable[[], dict[str, bytes]]
    spoil: Callable[[str, bytes], None]

    def store(self, budget_bytes: int = 2**20) -> FeatureStore:
        """That of a process which holds nothing yet."""
        return FeatureStore(budget_bytes, self.files())


def in_blobs(place: Place) -> Kept:
    def blobs() -> dict[str, bytes]:
        client = place.client()
        return {name: client.get(name) or b"" for name, _ in client.names()}

    def files(read_only: bool = False) -> BlobFeatures:
        return BlobFeatures(place.client(), "features/", grace_seconds=DAY, read_only=read_only)

    return Kept(files, blobs, place.spoil)


def in_a_folder(path: Path) -> Kept:
    def blobs() -> dict[str, bytes]:
        return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file()}

    return Kept(partial(FeatureFolder, str(path)), blobs, lambda name, data: (Path(name).write_bytes(data), None)[1])


@pytest.fixture(params=["folder", *KINDS])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Kept:
    return in_a_folder(tmp_path / "features") if request.param == "folder" else in_blobs(new_place(request, request.param))


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest) -> Place:
    return new_place(request, request.param)


def arrays(**values: Any) -> dict[str, FeatureArray]:
    given = {name: np.asarray(value, np.float32) for name, value in values.items()}
    return {name: FeatureArray("float32", each.dtype, each.shape, each.tobytes()) for name, each in given.items()}


# --- as in a folder --------------------------------------------------------------------------------------------------------
def test_c80_what_one_process_put_another_finds(kept: Kept) -> None:
    put = kept.store().put(
        item(0), {"pixel_values": pixels(3), "grid": np.array([[1, 2, 2]], np.int64), "none": np.zeros((0, 3), "<f2")}
    )
    found = kept.store().get(item(0))
    assert found is not None and found.names == put.names == ("pixel_values", "grid", "none")
    for name in put:
        assert found[name].dtype == put[name].dtype and found[name].tobytes() == put[name].tobytes()
        assert found[name].shape == put[name].shape
    assert kept.store().get(item(1)) is None
    assert item(0).content() in kept.files() and item(1).content() not in kept.files()
    with pytest.raises(NeedsMedia):
        kept.store().need([item(0), item(1)])


def test_d24_features_are_kept_once_for_each_content(kept: Kept) -> None:
    for number in (0, 1, 2, 1, 0, 2):
        kept.store().put(item(number), pixels(number))
    before = kept.blobs()
    assert len(before) == 3
    store = kept.store()
    for _ in range(3):
        store.put(item(1), pixels(1))
        store.clear()
    assert kept.blobs() == before


def test_arrays_that_come_later_stand_beside_the_first(kept: Kept) -> None:
    kept.store().put(item(0), {"z": pixels(1)})
    kept.store().put(item(0), {"b": pixels(2), "z": pixels(1)})
    kept.store().put(item(0), {"a": pixels(3), "b": pixels(2)})
    found = kept.store().get(item(0))
    assert found is not None and found.names == ("z", "b", "a")
    assert [found[name][0] for name in found] == [1, 2, 3]
    assert sum(len(data) for data in kept.blobs().values()) < 3 * pixels().nbytes + 1000


@pytest.mark.parametrize("other", [pixels(2), pixels(1)[:-1], pixels(1).astype(np.float16), pixels(1).reshape(2, -1)])
def test_other_values_under_a_name_that_is_taken(kept: Kept, other: Any) -> None:
    kept.store().put(item(0), {"a": pixels(1)})
    before = kept.blobs()
    with pytest.raises(KeyTaken) as caught:
        kept.store().put(item(0), {"new": pixels(5), "a": other})
    assert caught.value.key == "a" and kept.blobs() == before


def test_features_that_were_evicted_are_read_again(kept: Kept) -> None:
    store = kept.store(12_000)
    for number in range(5):
        store.put(item(number), pixels(number))
    for number in [*range(5), 3, 3, 0]:
        found = store.get(item(number))
        assert found is not None and found["features"].tobytes() == pixels(number).tobytes()
    assert store.held_bytes <= 12_000


def test_features_that_were_refused_are_not_kept(kept: Kept) -> None:
    store = kept.store(12_000)
    held = [store.put(item(number), pixels(number)) for number in range(2)]
    before = kept.blobs()
    with pytest.raises(LimitExceeded):
        store.put(item(2), pixels(2))
    assert kept.blobs() == before and len(held) == 2


def test_features_that_were_dropped_are_gone_for_everybody(kept: Kept) -> None:
    for number in range(2):
        kept.store().put(item(number), {"a": pixels(number)})
        kept.store().put(item(number), {"b": pixels(number)})
    store = kept.store()
    store.drop(item(0))
    store.drop(item(7))
    assert kept.store().get(item(0)) is None and item(0).content() not in kept.files()
    assert kept.store().get(item(1)) is not None
    store.put(item(0), {"b": pixels(8)})
    found = kept.store().get(item(0))
    assert found is not None and found.names == ("b",) and found["b"][0] == 8


def test_who_only_reads_puts_and_drops_nothing(kept: Kept) -> None:
    kept.store().put(item(0), pixels(0))
    reader = FeatureStore(2**20, kept.files(read_only=True))
    assert reader.get(item(0)) is not None and item(1).content() not in kept.files(read_only=True)
    for call in (lambda: reader.put(item(1), pixels(1)), lambda: reader.drop(item(0)), lambda: reader.files.remove(["a"])):  # type: ignore[union-attr]
        with pytest.raises(Unsupported):
            call()
    assert len(kept.blobs()) == 1


def test_c85_d04_features_that_are_damaged(kept: Kept, request: pytest.FixtureRequest) -> None:
    kept.store().put(item(0), {"a": np.arange(20, dtype=np.int16), "b": np.zeros((0, 3))})
    [(name, whole)] = kept.blobs().items()
    step = 1 if request.node.callspec.params["kept"] in ("folder", "dict") else 17
    broken = [whole[:size] for size in range(0, len(whole), step)] + [whole + b"\0", b"", bytes(len(whole))]
    broken += [whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :] for at in range(0, len(whole), step)]
    store = kept.store()
    for data in broken:
        kept.spoil(name, data)
        with pytest.raises(CorruptTree, match=file_name(item(0).content())):
            store.get(item(0))
        with pytest.raises(CorruptTree):
            store.put(item(0), {"a": np.arange(20, dtype=np.int16)})
    kept.spoil(name, whole)
    found = store.get(item(0))
    assert found is not None and found["a"].tolist() == list(range(20))


def test_damaged_features_can_be_dropped_and_put_again(kept: Kept) -> None:
    kept.store().put(item(0), pixels(0))
    kept.spoil(next(iter(kept.blobs())), b"damaged")
    kept.store().drop(item(0))
    kept.store().put(item(0), pixels(0))
    assert kept.store().get(item(0)) is not None


def test_d04_features_under_the_name_of_others_are_damage(kept: Kept) -> None:
    for number in range(2):
        kept.store().put(item(number), pixels(number))
    first, second = kept.blobs()
    kept.spoil(second, kept.blobs()[first])
    with pytest.raises(CorruptTree):
        [kept.store().get(item(number)) for number in range(2)]


def test_threads_put_features_of_one_content(kept: Kept) -> None:
    store = kept.store()
    for number in range(4):
        in_threads(4, lambda thread, number=number: _put(store, number, thread))  # type: ignore[misc]
        found = kept.store().get(item(number))
        assert found is not None and set(found.names) == {"features", *(f"of {thread}" for thread in range(4))}


def _put(store: FeatureStore, number: int, thread: int) -> None:
    store.put(item(number), {"features": pixels(number), f"of {thread}": pixels(thread)})


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "put", "get", "drop", "in"]),
            st.integers(0, 1),
            st.dictionaries(st.sampled_from("abc"), st.lists(st.integers(0, 1), max_size=1), min_size=1),
        ),
        max_size=12,
    )
)
def test_whatever_is_done_a_folder_answers_the_same(steps: list[tuple[str, int, dict[str, list[int]]]]) -> None:
    def does(files: Any, what: str, number: int, values: dict[str, list[int]]) -> Any:
        content = item(number).content()
        try:
            if what == "put":
                return files.put(content, arrays(**values))
            if what == "get":
                found = files.get(content)
                return found and list(found.items())
            return files.drop(content) if what == "drop" else content in files
        except SessionTreeError as error:
            return type(error), error.__dict__

    with tempfile.TemporaryDirectory() as path:
        folder, shared = FeatureFolder(path), DictBlobs()
        for step in steps:  # each by another process
            ours = BlobFeatures(shared, "tenant/", grace_seconds=DAY, read_only=False)
            assert does(ours, *step) == does(folder, *step)


# --- with others -----------------------------------------------------------------------------------------------------------
def test_sixteen_that_put_the_same_keep_one_blob(place: Place) -> None:
    kept = in_blobs(place)
    stores = [kept.store() for _ in range(16)]
    values = np.random.default_rng(1).random(100_000, np.float32)
    picture = {"pixel_values": values, "grid": np.ones(3)}
    in_threads(16, lambda number: (stores[number].put(item(0), picture), None)[1])
    assert len(kept.blobs()) == 1
    found = kept.store().get(item(0))
    assert found is not None and found["pixel_values"].tobytes() == values.tobytes()


def test_of_sixteen_that_put_other_values_one_is_first(place: Place) -> None:
    kept = in_blobs(place)
    stores, refused = [kept.store() for _ in range(16)], list[int]()

    def put(number: int) -> None:
        try:
            stores[number].put(item(0), {"a": pixels(number), f"of {number}": pixels()})
        except KeyTaken:
            refused.append(number)

    in_threads(16, put)
    found = kept.store().get(item(0))
    assert found is not None and len(kept.blobs()) == 1
    assert {*range(16)} - {*refused} == {int(found["a"][0])}


class Before(DictBlobs):
    """Blobs in which something else happens before the n-th call of a client."""

    def __init__(self, blobs: DictBlobs, at: int, other: Callable[[], object]) -> None:
        self.blobs, self.at, self.other, self.calls = blobs, at, other, 0

    def _called(self) -> DictBlobs:
        self.calls += 1
        if self.calls == self.at:
            self.other()
        return self.blobs

    def put(self, name: str, data: bytes) -> bool:
        return self._called().put(name, data)

    def get(self, name: str) -> bytes | None:
        return self._called().get(name)

    def names(self, prefix: str = "") -> Iterator[tuple[str, float]]:
        return self._called().names(prefix)

    def delete(self, names: Iterable[str]) -> int:
        return self._called().delete(names)


def features_in(blobs: Blobs, grace: float = DAY) -> BlobFeatures:
    return BlobFeatures(blobs, "features/", grace_seconds=grace, read_only=False)


@pytest.mark.parametrize("between", ["the same", "one of them", "another", "other values", "dropped", "dropped and others"])
@pytest.mark.parametrize("there", ["nothing", "some", "all", "all, for long"])
def test_whatever_another_does_in_between(between: str, there: str) -> None:
    """What is there then is what one order of the two would leave; of what is dropped meanwhile, part or nothing may be there."""
    content, mine = item(0).content(), arrays(a=[1], b=[2])
    for at in range(1, 20):
        shared = DictBlobs()
        other = features_in(shared)
        if there != "nothing":
            other.put(content, arrays(a=[1]) if there == "some" else mine)
        shared.now += DAY if there == "all, for long" else 0

        def meanwhile(other: BlobFeatures = other) -> None:
            if between.startswith("dropped"):
                other.drop(content)
            values = {"one of them": arrays(b=[2]), "another": arrays(c=[3]), "other values": arrays(b=[7]), "the same": mine}
            for new in (values | {"dropped and others": arrays(b=[7])}).items():
                if new[0] == between:
                    try:
                        other.put(content, new[1])
                    except KeyTaken:
                        assert new[1] == arrays(b=[7])

        before = Before(shared, at, meanwhile)
        refused = False
        try:
            features_in(before).put(content, mine)
        except KeyTaken:
            refused = True
        if before.calls < at:
            assert at > 2
            return
        found = features_in(shared).get(content)
        if between.startswith("dropped"):
            assert found in (None, mine, arrays(b=[7]), arrays(a=[1], b=[7])) or (
                found is not None and found.items() >= mine.items()
            )
            assert found != mine or not refused
        else:
            assert found is not None
            assert refused == (found["b"] != mine["b"])
            assert refused or found.items() >= mine.items()
            assert ("c" in found) == (between == "another")
        assert all(name.endswith(("/0", "/1", "/2", "/used")) for name in shared.held)
    raise AssertionError("a put has no end")


def test_puts_that_never_come_first_end_with_a_failure() -> None:
    class Taken(DictBlobs):
        attempts = 0

        def put(self, name: str, data: bytes) -> bool:
            self.attempts += 1
            return False

    blobs = Taken()
    with pytest.raises(StoreFailed):
        features_in(blobs).put(item(0).content(), arrays(a=[1]))
    assert blobs.attempts == _ATTEMPTS


def test_two_prefixes_know_nothing_of_each_other(place: Place) -> None:
    mine, other, below = (BlobFeatures(place.client(), prefix, grace_seconds=0, read_only=False) for prefix in ("a/", "b/", "a/b/"))
    content = item(0).content()
    for number, files in enumerate((mine, other, below)):
        files.put(content, arrays(x=[number]))
    assert [files.get(content) for files in (mine, other, below)] == [arrays(x=[number]) for number in range(3)]
    assert mine.names() == {file_name(content)}
    assert mine.remove(mine.names()) == 1
    assert content not in mine and content in other and content in below


def test_a_bucket_that_cannot_be_reached_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "_PAUSE", 0)
    with BucketServer() as server:
        store = FeatureStore(2**20, features_in(server.blobs(server.bucket())))
        store.put(item(0), pixels(0))
        store.clear()
        server.fault = lambda method, path: "error"
        for call in (lambda: store.get(item(0)), lambda: store.put(item(1), pixels(1)), lambda: store.need([item(0)])):
            with pytest.raises(StoreFailed):
                call()
        server.fault = lambda method, path: "flipped" if method == "GET" and path.endswith("/0?") else None
        with pytest.raises(CorruptTree):
            store.get(item(0))
        server.fault = lambda method, path: None
        found = store.get(item(0))
        assert found is not None and found["features"].tobytes() == pixels(0).tobytes()
        assert store.get(item(1)) is None


# --- garbage ---------------------------------------------------------------------------------------------------------------
def test_what_is_older_than_the_grace_may_go_and_nothing_else(place: Place) -> None:
    old, young, again, added = (item(number).content() for number in range(4))
    files = in_blobs(place).files()
    for content in (old, again, added):
        files.put(content, arrays(a=[1]))
        files.put(content, arrays(b=[1]))
    place.client().put("features/what is this", b"not ours")
    place.age(DAY + 1)
    other = in_blobs(place).files()
    assert other.names() == {file_name(content) for content in (old, again, added)}
    other.put(young, arrays(a=[1]))
    other.put(again, arrays(a=[1], b=[1]))
    other.put(added, arrays(c=[1]))
    assert files.names() == {file_name(old)}
    everything = {file_name(content) for content in (old, young, again, added)}
    assert files.remove(everything) == 1
    assert [content in files for content in (old, young, again, added)] == [False, True, True, True]
    assert files.get(old) is None and files.get(again) == arrays(a=[1], b=[1]) and files.get(added) == arrays(a=[1], b=[1], c=[1])
    assert not any(file_name(old) in name for name, _ in place.client().names())
    place.age(DAY + 1)
    assert files.remove(everything | {"0" * 64}) == 3 and files.remove(everything) == 0
    assert [name for name, _ in place.client().names()] == ["features/what is this"]
    files.put(old, arrays(a=[2]))
    assert files.get(old) == arrays(a=[2])


def test_putting_again_makes_young_at_half_the_grace_and_seldom() -> None:
    blobs, content = DictBlobs(), item(0).content()
    for _ in range(20):
        features_in(blobs).put(content, arrays(a=[1]))
        blobs.now += DAY / 4
        assert features_in(blobs).names() == set()
    assert len(blobs.held) == 2, "the first one, and what keeps it young"
    blobs.now += DAY
    assert features_in(blobs).names() == {file_name(content)}


def test_what_this_process_put_since_it_looked_stays() -> None:
    blobs, contents = DictBlobs(), [item(number).content() for number in range(3)]
    files = features_in(blobs, grace=0)
    for content in contents:
        files.put(content, arrays(a=[1]))
    names = [file_name(content) for content in contents]
    assert files.fresh() == files.names() == set(names)
    files.put(contents[1], arrays(a=[1]))
    files.came(names[2:])
    assert files.fresh() == set(names[:2])
    assert files.remove(names) == 2
    assert [content in files for content in contents] == [False, True, False]
    assert files.fresh() == {names[1]}


@pytest.mark.parametrize("end", ["remove", "drop"])
def test_whoever_removes_may_be_killed_anywhere(end: str) -> None:
    """At every call, and with any part of what a call was to delete: the rest reads as a put left it, and can be put to."""

    class Killed(BaseException):
        pass

    class Kills(DictBlobs):
        at = part = 0

        def delete(self, names: Iterable[str]) -> int:
            self.at -= 1
            if self.at == 0:
                super().delete(sorted(names)[self.part :])
                raise Killed
            return super().delete(names)

    content, puts = item(0).content(), [arrays(a=[1]), arrays(b=[2]), arrays(c=[3])]
    states: list[Any] = [None, puts[0], puts[0] | puts[1], puts[0] | puts[1] | puts[2]]
    kills = 0
    for at in range(1, 6):
        for part in range(2):
            blobs = Kills()
            for new in puts:
                features_in(blobs).put(content, new)
            blobs.now += DAY
            features_in(blobs).put(content, puts[0])
            blobs.now += DAY
            blobs.at, blobs.part = at, part
            files = features_in(blobs)
            try:
                files.drop(content) if end == "drop" else files.remove(files.names())
            except Killed:
                kills += 1
            blobs.at = 0
            left = features_in(blobs).get(content)
            assert left in states
            new = arrays(c=[9]) if left is None else puts[2] | puts[0]  # nothing of what went comes back
            features_in(blobs).put(content, new)
            assert features_in(blobs).get(content) == (left or {}) | new
            blobs.now += DAY
            assert features_in(blobs).remove([file_name(content)]) == 1 and not blobs.held
    assert kills >= 6


@pytest.mark.parametrize("where", ["database", "bucket"])
def test_d26_gc_of_a_store_that_others_share(where: str, postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a node names stays however old it is, and so does what is young; the rest goes, and none of another tenant's."""
    server = bucket_server()
    for name in ("endpoint_url", "access_key_id", "secret_access_key", "region"):
        monkeypatch.setenv(f"AWS_{name.upper()}", server.options[name.removesuffix("_url")])
    bucket = server.bucket()
    blobs = "database" if where == "database" else f"{bucket}/some/where"

    def age() -> None:
        if where == "bucket":
            return server.age(bucket, 3700)
        with connect(postgres_url) as connection:
            connection.execute("UPDATE blobs SET made_at = made_at - interval '3700 seconds'")

    connected = partial(SessionStore.connect, postgres_url, blobs=blobs)
    with connected() as one, connected() as two, connected(read_only=True) as reader, connected(tenant="other") as other:
        session = one.create("s", scheme=toy_scheme())
        named = [media for media, _, _ in grow(session, session.root, a_turn(0), a_turn(1)).media_spans()]
        unnamed, young = item(0), item(1)
        for media in (*named, unnamed):
            one.put_features(media, pixels(1))
        other.put_features(unnamed, pixels(2))
        assert (two.gc().features_removed, one.gc().features_removed) == (0, 0)
        age()
        two.put_features(young, pixels(3))
        one.put_features(named[0], {"encoded": pixels(4)})
        assert (two.gc().features_removed, one.gc().features_removed) == (1, 0)
        assert [reader.get_features(media) is not None for media in (*named, unnamed, young)] == [True, True, False, True]
        found, others = reader.get_features(named[0]), other.get_features(unnamed)
        assert found is not None and found.names == ("features", "encoded")
        assert others is not None and others["features"][0] == 2
