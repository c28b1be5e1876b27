"""Rollouts of stores and sessions: which there are, by group, by reward, by rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import sqlite_backend
from hypothesis import given
from hypothesis import strategies as st

from sessiontree import Node, OutOfRange, Session, SessionStore, SessionTree, Unsupported
from sessiontree.bundles import export_bundle, open_bundle
from sessiontree.rollouts import Rollout, groups, rollouts, sample_siblings

SCHEME = "text@hf5"


@pytest.fixture(params=["memory", "disk", "SQLite", "PostgreSQL"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SessionStore]:
    if request.param == "memory":
        made = SessionStore.in_memory()
    elif request.param == "disk":
        made = SessionStore.open(tmp_path / "store")
    elif request.param == "SQLite":
        made = SessionStore.connect(sqlite_backend.connect(str(tmp_path / "sqlite")))
    else:
        made = SessionStore.connect(request.getfixturevalue("postgres_url"))
    with made:
        yield made


def sampled(session: Session, parent: Node, token: int, reward: float | None = None, **said: object) -> Node:
    """A reply of three tokens."""
    draft = session.draft(parent)
    draft.extend([token, token + 1, token + 2])
    return draft.commit(annotations={**said, **({} if reward is None else {"reward": reward})})


def ids(found: Iterator[Rollout]) -> list[bytes]:
    return [rollout.node.id for rollout in found]


def test_a_rollout_ends_where_nothing_goes_on_and_something_was_generated(store: SessionStore) -> None:
    session = store.create("s", scheme=SCHEME)
    task = session.append(session.root, [1, 2])
    session.append(session.root, [9])  # nothing was generated on that path
    good, bad = sampled(session, task, 10, 1.0), sampled(session, task, 20, 0.0)
    tool = session.append(good, [5], role="tool")
    last = sampled(session, tool, 30, 0.5)
    found = list(rollouts(store))
    assert [(each.session_id, each.node, each.prompt, each.reward) for each in found] == [
        ("s", bad, task, 0.0),
        ("s", last, task, 0.5),
    ]
    assert found[1].completions == (good, last)
    assert ids(rollouts(session)) == [bad.id, last.id]


def test_what_must_never_be_trained_on_is_no_rollout(store: SessionStore) -> None:
    session = store.create("s", scheme=SCHEME)
    task = session.append(session.root, [1])
    rejected = sampled(session, task, 10, 1.0, train=False)
    sampled(session, session.append(sampled(session, rejected, 20, 1.0), [5], role="tool"), 30, 1.0)  # far below it
    kept = sampled(session, task, 30, 1.0, train=True)
    assert ids(rollouts(store)) == [kept.id]
    session.annotate(rejected, {"train": True})  # it was an error of the judge
    assert len(ids(rollouts(store))) == 2


@pytest.mark.parametrize("said", [0, "false", [False] * 3])
def test_a_mark_that_is_no_bool_is_refused_not_overlooked(store: SessionStore, said: object) -> None:
    session = store.create("s", scheme=SCHEME)
    task = session.append(session.root, [1])
    reply, other = sampled(session, task, 10, 1.0, train=said), sampled(session, task, 20)
    looks: list[Callable[[], object]] = [
        lambda: list(rollouts(store)),
        lambda: list(groups(store)),
        lambda: sample_siblings(session.tree, other, 1),
    ]
    for look in looks:
        with pytest.raises(Unsupported, match=rf"'train' of node {reply.id.hex()} is .*; it is True or False"):
            look()


def test_rewards_are_bounded_on_both_sides_and_must_be_there(store: SessionStore) -> None:
    session = store.create("s", scheme=SCHEME)
    task = session.append(session.root, [1])
    made = {reward: sampled(session, task, 10 + at, reward) for at, reward in enumerate((-1.0, 0.0, 0.5, 1.0))}
    unjudged = sampled(session, task, 90)
    assert ids(rollouts(store, least_reward=0.0, most_reward=0.5)) == [made[0.0].id, made[0.5].id]
    assert ids(rollouts(store, most_reward=-1)) == [made[-1.0].id]
    assert ids(rollouts(store, where=lambda rollout: rollout.reward is None)) == [unjudged.id]
    for wrong in ("good", True):
        session.annotate(unjudged, {"reward": wrong})
        with pytest.raises(Unsupported, match=repr(wrong)):
            list(rollouts(store))


def test_groups_are_of_one_prompt_in_whatever_sessions_it_stands(store: SessionStore) -> None:
    for name in "ab":
        session = store.create(name, scheme=SCHEME)
        for task in (session.append(session.root, [1]), session.append(session.root, [2])):
            for number in range(2):
                sampled(session, task, 10 * number, float(number))
    alone = store.create("c", scheme=SCHEME)
    sampled(alone, alone.append(alone.root, [3]), 10)
    found = list(groups(store))
    assert [len(group.rollouts) for group in found] == [4, 4, 1]
    assert [[each.session_id for each in group.rollouts] for group in found[:2]] == [["a", "a", "b", "b"]] * 2
    assert all(each.prompt.id == group.prompt_id for group in found for each in group.rollouts)
    assert [each.reward for each in found[0].rollouts] == [0.0, 1.0, 0.0, 1.0]
    assert len(list(groups(store, least=2))) == 2


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_ranks_share_all_rollouts_and_no_group_is_parted(store: SessionStore, world_size: int) -> None:
    for name in range(6):
        session = store.create(f"s{name}", scheme=SCHEME)
        for task in range(4):
            prompt = session.append(session.root, [name % 3, task])
            for number in range(3):
                sampled(session, prompt, 10 * number)
    shares = [list(rollouts(store, rank=rank, world_size=world_size)) for rank in range(world_size)]
    every = Counter((each.session_id, each.node.id) for share in shares for each in share)
    assert len(every) == 72 and set(every.values()) == {1}
    prompts = [{each.prompt.id for each in share} for share in shares]
    assert sum(map(len, prompts)) == len(frozenset[bytes]().union(*prompts)) == 12
    assert [ids(iter(share)) for share in shares] == [
        ids(rollouts(store, rank=r, world_size=world_size)) for r in range(world_size)
    ]
    for rank, share in enumerate(shares):  # as docs/training.md has it: another program may share out alike
        assert all(int.from_bytes(each.prompt.id[:8]) % world_size == rank for each in share)
    by_group = [sum(len(group.rollouts) for group in groups(store, rank=r, world_size=world_size)) for r in range(world_size)]
    assert by_group == list(map(len, shares))


def test_a_rank_that_is_none_is_refused(store: SessionStore) -> None:
    for rank, world_size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(OutOfRange, match=f"rank {rank} of {world_size}"):
            rollouts(store, rank=rank, world_size=world_size)


def test_nothing_is_opened_and_a_store_larger_than_memory_streams(tmp_path: Path) -> None:
    turn = np.arange(50_000, dtype=np.int32)
    with SessionStore.open(tmp_path / "s", durability="relaxed") as store:
        for name in range(20):
            session = store.create(f"s{name}", scheme=SCHEME)
            task = session.append(session.root, turn)
            draft = session.draft(task)
            draft.extend(turn + name)
            draft.commit(annotations={"reward": float(name), "logprobs": np.zeros(len(turn), np.float32)})
            session.close()
        store.evict()
        store.flush()
    with SessionStore.open(tmp_path / "s") as store:
        before, most, seen = store.usage().memory_bytes, 0, 0
        for rollout in rollouts(store):
            assert rollout.node.input_ids()[-1] == turn[-1] + seen
            assert len(rollout.tree.token_values(rollout.node, "logprobs").known) == 100_000
            most, seen = max(most, store.usage().memory_bytes), seen + 1
        assert seen == 20
        assert most - before < 8 * 400_000  # of 20 paths of 400 KB a few are held
        assert store.get("s19").incarnation == 21  # none was opened before


def test_siblings_are_drawn_alike_everywhere_and_never_those_that_are_out(store: SessionStore) -> None:
    session = store.create("s", scheme=SCHEME)
    task = session.append(session.root, [1])
    samples = [sampled(session, task, 10 * at, train=at != 3) for at in range(8)]
    drawn = sample_siblings(session.tree, samples[0], 3, seed=1)
    assert len(drawn) == 3 and samples[0] not in drawn and samples[3] not in drawn
    assert drawn == sample_siblings(session.tree, samples[0], 3, seed=1)
    assert len({sample_siblings(session.tree, samples[0], 3, seed=seed) for seed in range(20)}) > 5
    assert sample_siblings(session.tree, samples[0], 99) == (*samples[1:3], *samples[4:]), "in commit order"
    again = SessionTree(SCHEME)
    again, prompt = again.append(again.root, [1])
    with pytest.raises(OutOfRange):
        sample_siblings(again, prompt, -1)


def test_a_bundle_has_the_rollouts_of_its_store(store: SessionStore, tmp_path: Path) -> None:
    for name in "ab":
        session = store.create(name, scheme=SCHEME)
        task = session.append(session.root, [1])
        for number in range(3):
            sampled(session, task, 10 * number, float(number), train=number != 1, logprobs=np.full(3, -number, np.float32))
    export_bundle(store, tmp_path / "rollouts.bundle")
    with open_bundle(tmp_path / "rollouts.bundle") as bundle:

        def all_of(source: SessionStore | Session) -> list[tuple[str, bytes, float | None, list[float]]]:
            return [
                (each.session_id, each.node.id, each.reward, each.tree.token_values(each.node, "logprobs").values.tolist())
                for each in rollouts(source)
            ]

        assert all_of(bundle) == all_of(store) and len(all_of(bundle)) == 4
        assert all_of(bundle.get("b")) == all_of(store.get("b")) == all_of(store)[2:]
        (found,) = groups(bundle)
        assert [(each.session_id, each.reward) for each in found.rollouts] == [("a", 0.0), ("a", 2.0), ("b", 0.0), ("b", 2.0)]


@pytest.mark.parametrize("kind", ["disk", "SQLite"])
def test_what_a_fork_says_of_the_path_that_it_shares_counts_in_it(kind: str, tmp_path: Path) -> None:
    """Also when both are read from where they lie, whoever said it first."""
    path = tmp_path / "store"

    def opened() -> SessionStore:
        return SessionStore.open(path) if kind == "disk" else SessionStore.connect(sqlite_backend.connect(str(path)))

    with opened() as store:
        session = store.create("s", scheme=SCHEME)
        reply = sampled(session, session.append(session.root, [1]), 10, 1.0)
        store.fork(session, reply, "worse").annotate(reply, {"reward": 0.5})
        store.fork(session, reply, "never").annotate(reply, {"train": False})
        again = store.fork(session, reply, "again")
        again.annotate(reply, {"train": True})
        session.annotate(reply, {"train": False, "reward": 2.0})
    with opened() as store:
        assert [(each.session_id, each.reward) for each in rollouts(store)] == [("again", 2.0)]
        store.get("s").annotate(reply.id, {"train": True})
        assert {each.session_id: each.reward for each in rollouts(store)} == {"s": 2.0, "worse": 0.5, "again": 2.0}


def test_who_reads_beside_a_writer_sees_what_came_since(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with SessionStore.open(path, durability="commit") as store, SessionStore.open(path, read_only=True) as reader:
        assert not list(rollouts(reader))
        session = store.create("a", scheme=SCHEME)
        task = session.append(session.root, [1])
        first = sampled(session, task, 10)
        assert [(each.node.id, each.reward) for each in rollouts(reader)] == [(first.id, None)]
        session.annotate(first, {"reward": 0.5})
        second = sampled(session, task, 20, 1.0)
        assert [(each.node.id, each.reward) for each in rollouts(reader)] == [(first.id, 0.5), (second.id, 1.0)]
        session.annotate(second, {"train": False})
        other = store.create("b", scheme=SCHEME)
        third = sampled(other, other.append(other.root, [1]), 10, 0.0)
        (found,) = groups(reader, least=2)
        assert [each.node.id for each in found.rollouts] == [first.id, third.id]


@given(st.lists(st.integers(0, 30), max_size=30), st.integers(1, 4))
def test_leaves_of_any_tree_are_those_that_nothing_hangs_on(parents: list[int], shared: int) -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme=SCHEME)
    nodes = [session.root]
    for at, parent in enumerate(parents):
        nodes.append(session.append(nodes[parent % len(nodes)], [at + 1]))
    fork = store.fork(session, nodes[-1], "fork")
    for at in range(shared - 1):
        fork.append(nodes[at % len(nodes)] if nodes[at % len(nodes)] in fork.tree else fork.root, [500 + at])
    for tree in (session.tree, fork.tree):
        assert tuple(tree._index.leaves(tree._count)) == tree.leaves()


def test_what_was_dropped_and_sampled_again_begins_anew(store: SessionStore) -> None:
    session = store.create("s", scheme=SCHEME)
    task = session.append(session.root, [1, 2])

    def sample(**said: object) -> Node:
        draft = session.draft(task, key="step 0")
        draft.extend([5, 6])
        return draft.commit("stop", annotations=said)

    rejected = sample(reward=1.0, train=False)
    session.drop(rejected)
    assert session.tree.annotated("reward") == {}
    again = sample()
    assert again == rejected
    assert [(each.node, each.reward) for each in rollouts(store)] == [(again, None)]
    assert [(each.node, each.reward) for group in groups(store) for each in group.rollouts] == [(again, None)]
    beside = sampled(session, task, 10)
    assert sample_siblings(session.tree, beside, 9) == (again,)


def test_a_node_may_be_asked_for_more_than_once(store: SessionStore) -> None:
    session = store.create("s", scheme=SCHEME)
    good = sampled(session, session.append(session.root, [1]), 10, 1.0)
    store.flush()
    store.evict(0)
    assert store.get("s").annotation_of_each([good.id, session.root.id, good.id], "reward") == [1.0, None, 1.0]


def test_sessions_that_are_dropped_meanwhile_have_none(store: SessionStore) -> None:
    kept = []
    for name in "abcd":
        session = store.create(name, scheme=SCHEME)
        task = session.append(session.root, [1, 2])
        kept.append([sampled(session, task, 10), sampled(session, task, 20)])
    (all_of_them,) = groups(store)
    assert len(all_of_them.rollouts) == 8
    found, by_prompt, pairs = rollouts(store), groups(store), groups(store, least=4)
    assert next(found).node == kept[0][0]
    store.drop("b")
    store.get("a").drop(kept[0][1])
    store.drop("d")
    assert [each.session_id for each in found] == ["a", "c", "c"]
    (left,) = by_prompt
    assert [each.node.id for each in left.rollouts] == [kept[0][0].id, kept[2][0].id, kept[2][1].id]
    assert list(pairs) == []


def test_what_a_fork_samples_anew_has_nothing_of_what_its_source_sampled(store: SessionStore) -> None:
    session = store.create("s", scheme=SCHEME)
    task = session.append(session.root, [1, 2], annotations={"mine": 1})

    def sample(at: Session) -> Node:
        draft = at.draft(task.id, key="step 0")
        draft.extend([5, 6])
        return draft.commit("stop")

    first = sample(session)
    session.annotate(first, {"reward": 1.0})
    again = sample(store.fork(session, task, "fork"))
    assert again == first
    store.get("s").annotate(first.id, {"reward": 2.0})
    for _ in range(2):
        fork = store.get("fork")
        assert (fork.annotation(task.id, "mine"), fork.annotations(again.id)) == (1, {})
        assert fork.tree.annotated("reward") == {}
        assert [(each.session_id, each.reward) for each in rollouts(store)] == [("s", 2.0), ("fork", None)]
        (group,) = groups(store)
        assert [(each.session_id, each.reward) for each in group.rollouts] == [("s", 2.0), ("fork", None)]
        store.flush()
        store.evict(0)
    fork = store.get("fork")
    kept = fork.append(fork.root, [9])
    fork.drop(kept)
    assert (fork.annotation(task.id, "mine"), fork.annotations(again.id)) == (1, {})
