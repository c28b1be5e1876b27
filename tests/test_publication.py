"""What threads see of each other at every place where one can be stopped and another one run.

A short switch interval finds nothing here: the windows are a few opcodes wide. So the scheduler of ``interleaving.py`` stops one
operation before its n-th opcode and runs another one there; for every n. Here are trees and sessions in memory; stores, and what
goes to disk, are in ``test_publication_stores.py``.

Bugs are planted at the end of this module, to see that the scheduler finds them.
"""

from __future__ import annotations

import itertools
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import pytest

from sessiontree import HeadMoved, LimitExceeded, MediaItem, Node, Session, SessionStore, SessionTree, StaleSession
from sessiontree.features import FeatureStore
from sessiontree.frozen import writable_bytes
from sessiontree.index import NodeIndex
from sessiontree.tokens import TOKEN_BYTES, Extent, PathCache, _Fork, _Gathered
from sessiontree.tree import _value
from tests.interleaving import Interleaving, Operation, Places, Run, Wrong, at_every_place, at_every_two_places, seen_locks
from tests.test_tree import IMAGE_PAD, VISION_END, VISION_START, identity, image, vl

pytestmark = pytest.mark.usefixtures("seen_locks")
__all__ = ["seen_locks"]

# --- a small world ------------------------------------------------------------------------------------------------------


class Known(NamedTuple):
    """What a node is to read as: the tokens of its path, and the ids of the nodes on it."""

    path: bytes
    start: int
    ids: tuple[bytes, ...]


class World:
    """A session whose nodes lie in memory in every way there is: ``trunk`` and its forks ``left`` and ``right``.

    ``known``: all nodes there are or will be; ``order``: their ids in commit order; ``steps``: the lengths a tree may have.
    ``nodes``: those that writers have returned. None of what is known comes from the session that is looked at.
    """

    def __init__(self, plan: Plan | None = None, *, warm: bool = False, path_cache_bytes: int = 2**20) -> None:
        self.store = SessionStore.in_memory(path_cache_bytes=path_cache_bytes)
        self.session = self.store.create("s", scheme="text@hf5")
        append, root = self.session.append, self.session.root
        self.nodes = [root]
        self.plan = plan
        self.trunk = append(root, range(1, 11))  # 10 of the 16 tokens that the first buffer has room for
        self.tip = append(self.trunk, [11, 12, 13])
        self.fork = append(self.trunk, [50, 51])
        self.left = append(self.fork, [52])  # in the arena of its parent
        self.right = append(self.trunk, [60])  # its arena is exactly filled
        self.inner = append(self.fork, [70])  # a fork of a fork
        self.nodes += [self.trunk, self.tip, self.fork, self.left, self.right, self.inner]
        self.head = self.session.set_head("main", self.tip)
        self.views: list[tuple[Any, bytes]] = []
        self.trees: list[tuple[SessionTree, tuple[Node, ...]]] = []
        self.forked: tuple[Session, Node] | None = None
        if plan is None:
            return
        for node in self.nodes:
            if warm or not node._extent.origin:
                view = node.input_ids(copy=False)
                self.views.append((view, plan.known[node.id].path))
        if warm:
            self.session.children(self.trunk)
            self.session.longest_prefix([1])

    def read(self, node: Node) -> None:
        """All that can be read of a node, against what is known."""
        assert self.plan is not None
        path, start, ids = self.plan.known[node.id]
        stop = len(path) // TOKEN_BYTES
        assert (node.start, node.stop) == (start, stop)
        view = node.input_ids(copy=False)
        self.views.append((view, path))
        assert view.tobytes() == path
        assert node.input_ids().tobytes() == path
        assert node.token_ids.tobytes() == path[start * TOKEN_BYTES :]
        if stop > 10:
            assert node.input_ids(1, stop - 1, copy=False).tobytes() == path[4:-4]
            assert node.input_ids(1, stop - 1).tobytes() == path[4:-4]
            assert node.positions(start)[0].tolist() == list(range(start, stop))
        assert tuple(step.id for step in node.path()) == ids

    def look(self) -> None:
        """All that can be read of the tree as it is now."""
        assert self.plan is not None
        known, order, steps = self.plan
        tree = self.session.tree
        nodes = tuple(tree)
        ids = [node.id for node in nodes]
        assert len(tree) == len(nodes) in steps, f"half of an operation: {len(nodes)} nodes"
        assert ids == order[: len(ids)]
        assert set(ids).issuperset(node.id for node in self.nodes), "a node is lost"
        first_at: dict[bytes, Node] = {}
        for node in nodes:
            self.read(node)
            assert tree.node(node.id) is node
            first_at.setdefault(known[node.id].path, node)
        for node in nodes:
            assert tree.children(node) == tuple(other for other in nodes if other.parent == node)
            match = tree.longest_prefix(array("i", known[node.id].path + b"\xff\xff\xff\x7f"))
            assert match == (first_at[known[node.id].path], node.stop, None)
        for one, two in zip(nodes[-2:], nodes[2:], strict=False):
            shared = [mine for mine, its in zip(known[one.id].ids, known[two.id].ids, strict=False) if mine == its]
            assert tree.lowest_common_ancestor(one, two).id == shared[-1]
        self.trees.append((tree, nodes))

    def check(self) -> None:
        """As it is now, and as it was whenever anybody looked."""
        self.look()
        self.check_seen()

    def check_seen(self) -> None:
        """What anybody saw is as it was."""
        for view, path in self.views:
            assert view.tobytes() == path
        for tree, nodes in self.trees:
            assert tuple(tree) == nodes
            assert tree.children(self.trunk) == tuple(node for node in nodes if node.parent == self.trunk)
        if self.forked is not None:
            session, node = self.forked
            assert node.input_ids().tolist() == node.input_ids(copy=False).tolist() == [*TRUNK, 50, 51, 52, 120, 121]
            assert tuple(session.tree) == (*self.left.path(), node)
        self.store.close()


class Plan(NamedTuple):
    """What the nodes of a world will be, from a world of its own in which the same was done by one thread."""

    known: dict[bytes, Known]
    order: list[bytes]
    steps: set[int]


Made = tuple[Node, Iterable[int]] | None  # a node and the tokens of its path


def write(world: World, name: str) -> None:
    """Do it, and keep what was made, which is there from now on."""
    made = WRITERS[name](world)
    node = None if made is None else made[0]
    while node is not None:
        world.nodes.append(node)
        node = node.parent


TRUNK = list(range(1, 11))


def commit(world: World) -> Made:
    draft = world.session.draft(world.tip)
    draft.extend([80, 81])
    return draft.commit(), [*TRUNK, 11, 12, 13, 80, 81]


def set_head(world: World) -> None:
    head = world.session.set_head("main", world.left, expected=world.head)
    assert head == world.session.head("main")
    assert head.node is world.left
    assert head.version > world.head.version


def close(world: World) -> None:
    world.session.close()
    with pytest.raises(StaleSession):
        world.session.append(world.tip, [1])


def fork(world: World) -> None:
    session = world.store.fork(world.session, world.left, "f")
    world.forked = session, session.append(world.left, [120, 121])


WRITERS: dict[str, Callable[[World], Made]] = {
    "append in place": lambda w: (w.session.append(w.tip, [14, 15]), range(1, 16)),
    "append and grow": lambda w: (w.session.append(w.tip, [14, 15, 16, 17, 18]), range(1, 19)),
    "append to a fork in place": lambda w: (w.session.append(w.left, [53]), [*TRUNK, 50, 51, 52, 53]),
    "append to a fork and grow": lambda w: (w.session.append(w.right, [61]), [*TRUNK, 60, 61]),
    "append in a new extent": lambda w: (w.session.append(w.trunk, [99]), [*TRUNK, 99]),
    "commit": commit,
    "truncate": lambda w: (w.session.truncate(w.tip, 12), range(1, 13)),
    "truncate a fork": lambda w: (w.session.truncate(w.fork, 11), [*TRUNK, 50]),
    "rewrite": lambda w: (w.session.rewrite(w.left, [(11, 12, [90, 91])]), [*TRUNK, 50, 90, 91, 52]),
    "replace": lambda w: (w.session.replace(w.fork, [95], head="other"), [*TRUNK, 95]),
    "set_head": set_head,
    "fork": fork,
    "close": close,
}
ALL = tuple(name for name in WRITERS if name != "close")


@cache
def plan_of(*names: str) -> Plan:
    """What these writers do, one after the other. The tokens are as written down above, not as read."""
    world = World()
    known = {world.session.root.id: Known(b"", 0, (world.session.root.id,))}
    first: list[Iterable[int]] = [
        range(1, 11),
        range(1, 14),
        [*TRUNK, 50, 51],
        [*TRUNK, 50, 51, 52],
        [*TRUNK, 60],
        [*TRUNK, 50, 51, 70],
    ]
    steps = {len(world.nodes)}
    made = list(zip(world.nodes[1:], first, strict=True))
    for name in names:
        new = WRITERS[name](world)
        made += [] if new is None else [new]
        steps.add(len(world.session.tree))
    for node, tokens in made:
        path = np.array(list(tokens), "<i4").tobytes()
        for step in node.path()[1:]:
            ids = tuple(other.id for other in step.path())
            entry = Known(path[: step.stop * TOKEN_BYTES], step.start, ids)
            assert known.setdefault(step.id, entry) == entry
    return Plan(known, [node.id for node in world.session.tree], steps)


# --- a writer is stopped, readers run -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "warm"),
    [(name, False) for name in WRITERS] + [(name, True) for name in ("append to a fork in place", "truncate")],
)
def test_readers_at_every_place_of_a_writer(name: str, warm: bool) -> None:
    plan = plan_of(name)

    def make() -> Run:
        world = World(plan, warm=warm)
        return Run(partial(write, world, name), world.look, world.check)

    assert at_every_place(make, may_wait=(True, False)) > 20


@pytest.mark.parametrize("name", [name for name in ALL if name != "fork"])
def test_what_readers_see_goes_from_before_to_after_once(name: str) -> None:
    """The same readers at every place of one single run."""
    plan = plan_of(name)
    world = World(plan)
    lengths: list[int] = []

    def look() -> None:
        world.look()
        lengths.append(len(world.session.tree))

    def stop(place: str) -> int:
        Interleaving(lambda: None, look, [], may_wait=(False, False))
        return 6

    before = sys.gettrace()
    try:
        Places(0, stop)
        write(world, name)
    finally:
        sys.settrace(before)
    assert len(lengths) > 10
    assert lengths == sorted(lengths)
    assert {lengths[0], len(world.session.tree)} == plan.steps
    world.check()


# --- a reader is stopped, writers run -----------------------------------------------------------------------------------


def _path(world: World, node: Node) -> bytes:
    assert world.plan is not None
    return world.plan.known[node.id].path


def _same(view: Any, path: bytes, world: World) -> None:
    world.views.append((view, path))
    assert view.tobytes() == path


def _is(found: object, expected: object) -> None:
    assert found == expected


def children(world: World) -> None:
    tree = world.session.tree
    found = tree.children(world.trunk)
    assert found == tuple(node for node in tree if node.parent == world.trunk)
    assert {world.tip, world.fork, world.right} <= set(found)


def walk(world: World) -> None:
    assert world.plan is not None
    ids = [node.id for node in world.session.tree]
    assert ids == world.plan.order[: len(ids)]


def known_prefix(world: World, node: Node, more: Sequence[int]) -> None:
    """However many nodes there are: the node that was there before and ends there, with what stands behind it."""
    tree = world.session.tree
    match = tree.longest_prefix(np.concatenate([np.frombuffer(_path(world, node), "<i4"), np.array(more, "<i4")]))
    assert match.length >= node.stop
    if match.length == node.stop:
        assert match == (node, node.stop, None)
    assert match.node in tree
    assert match.within is None or match.within in tree


def heads(world: World) -> None:
    node, version = world.session.head("main")
    assert version >= world.head.version
    assert node is (world.tip if version == world.head.version else world.left)
    assert world.session.heads["main"] in (world.tip, world.left)


def by_id(world: World) -> None:
    for node in (world.trunk, world.inner):
        assert world.session.node(node.id) is node
        assert node in world.session.tree


def leaves(world: World) -> None:
    tree = world.session.tree
    parents = {node.parent for node in tree}
    assert tree.leaves() == tuple(node for node in tree if node not in parents)


READERS: dict[str, Callable[[World], None]] = {
    "copy": lambda w: _same(w.tip.input_ids(), _path(w, w.tip), w),
    "copy of a window": lambda w: _same(w.tip.input_ids(2, 12), _path(w, w.tip)[8:48], w),
    "copy across forks": lambda w: _same(w.inner.input_ids(1, 13), _path(w, w.inner)[4:52], w),
    "view": lambda w: _same(w.tip.input_ids(copy=False), _path(w, w.tip), w),
    "view of a window": lambda w: _same(w.tip.input_ids(2, 12, copy=False), _path(w, w.tip)[8:48], w),
    "view of a fork": lambda w: _same(w.left.input_ids(copy=False), _path(w, w.left), w),
    "view of a fork of a fork": lambda w: _same(w.inner.input_ids(copy=False), _path(w, w.inner), w),
    "view across forks": lambda w: _same(w.inner.input_ids(1, 13, copy=False), _path(w, w.inner)[4:52], w),
    "token_ids": lambda w: _same(w.left.token_ids, _path(w, w.left)[48:], w),
    "positions": lambda w: _same(w.inner.positions(3, 13)[0], np.arange(3, 13).astype(w.inner.scheme.dtype).tobytes(), w),
    "path": lambda w: _is(w.inner.path(), (w.session.root, w.trunk, w.fork, w.inner)),
    "children": children,
    "walk": walk,
    "leaves": leaves,
    "prefix": lambda w: known_prefix(w, w.tip, []),
    "prefix of a fork": lambda w: known_prefix(w, w.left, [1, 2]),
    "ancestor": lambda w: _is(w.session.lowest_common_ancestor(w.left, w.inner), w.fork),
    "by id": by_id,
    "heads": heads,
}
#: Those that make links or a trie on their way, and may meet another one at it.
LINKING = {"children", "prefix", "prefix of a fork"}


def link(world: World) -> None:
    """Whatever readers make on their way is made now."""
    world.session.children(world.trunk)
    world.session.longest_prefix([1])


@pytest.mark.parametrize(
    ("reader", "warm"),
    [(reader, False) for reader in READERS if "prefix" not in reader]
    + [(reader, True) for reader in READERS if "fork" in reader or reader in LINKING],
)
def test_writers_at_every_place_of_a_reader(reader: str, warm: bool) -> None:
    """All of them, one after the other, so that the reader goes on in another world."""
    plan = plan_of(*ALL)

    def make() -> Run:
        world = World(plan, warm=warm)

        def second() -> None:
            for name in ALL:
                write(world, name)
            link(world)

        def check() -> None:
            if reader in LINKING or "view" in reader:
                world.look()
            world.check_seen()

        return Run(partial(READERS[reader], world), second, check)

    assert at_every_place(make, may_wait=(False, reader in LINKING)) > 5


@pytest.mark.parametrize(
    ("reader", "name"),
    [
        ("view of a fork", "append to a fork in place"),
        ("view of a fork", "append to a fork and grow"),
        ("children", "append in a new extent"),
        ("children", "rewrite"),
        ("prefix", "append in place"),
        ("prefix", "append in a new extent"),
        ("prefix", "truncate"),
    ],
)
def test_one_writer_at_every_place_of_a_reader(reader: str, name: str) -> None:
    plan = plan_of(name)

    def make() -> Run:
        world = World(plan, warm=True)

        def second() -> None:
            write(world, name)
            link(world)

        return Run(partial(READERS[reader], world), second, world.check)

    assert at_every_place(make, may_wait=(False, True)) > 10


@pytest.mark.parametrize("reader", ["view of a fork", "copy across forks", "children"])
def test_a_reader_among_readers(reader: str) -> None:
    plan = plan_of()

    def make() -> Run:
        world = World(plan)
        return Run(partial(READERS[reader], world), world.look, world.check)

    assert at_every_place(make, may_wait=(False, reader in LINKING)) > 10


# --- a writer is stopped, a writer runs ---------------------------------------------------------------------------------


PAIRS = [
    ("append in place", "append and grow"),
    ("append and grow", "append in place"),
    ("append and grow", "append in a new extent"),
    ("commit", "append and grow"),
    ("truncate", "rewrite"),
    ("rewrite", "append and grow"),
    ("append in place", "close"),
    ("close", "append in place"),
    ("set_head", "append and grow"),
]


def two_writers(first: str, second: str) -> int:
    plans = [plan_of(*names) for names in ((first, second), (second, first)) if "close" not in names[:1]]

    def make() -> Run:
        world = World(plans[0], warm=True)

        def attempt(name: str) -> None:
            try:
                write(world, name)
            except StaleSession:
                assert "close" in (first, second)

        def check() -> None:
            tree = tuple(world.session.tree)
            assert len({node.id for node in tree}) == len(tree)
            if "close" not in (first, second):
                assert [node.id for node in tree] in [plan.order for plan in plans]
                world.plan = next(plan for plan in plans if plan.order == [node.id for node in tree])
            world.check()

        return Run(partial(attempt, first), partial(attempt, second), check)

    return at_every_place(make)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_writer_at_every_place_of_a_writer(first: str, second: str) -> None:
    assert two_writers(first, second) > 20


@pytest.mark.soak
@pytest.mark.parametrize(("first", "second"), [pair for pair in itertools.product(ALL, WRITERS) if pair[0] != pair[1]])
def test_every_writer_at_every_place_of_every_writer(first: str, second: str) -> None:
    assert two_writers(first, second) > 20


def test_of_two_that_move_a_head_one_does() -> None:
    plan = plan_of()

    def make() -> Run:
        world = World(plan)
        won: list[Node] = []

        def move(node: Node) -> None:
            try:
                head = world.session.set_head("main", node, expected=world.head)
            except HeadMoved as error:
                assert error.actual.node in (world.left, world.right)
            else:
                assert head.version == world.head.version + 1
                won.append(node)

        def check() -> None:
            assert len(won) == 1
            assert world.session.head("main") == (won[0], world.head.version + 1)
            world.check()

        return Run(partial(move, world.left), partial(move, world.right), check)

    assert at_every_place(make) > 50


def test_the_same_turn_twice_is_one_node() -> None:
    plan = plan_of("append and grow")

    def make() -> Run:
        world = World(plan)
        made: list[Node] = []

        def append() -> None:
            made.append(world.session.append(world.tip, [14, 15, 16, 17, 18]))

        def check() -> None:
            assert made[0] is made[1]
            world.check()

        return Run(append, append, check)

    assert at_every_place(make) > 50


def test_samples_of_two_threads_are_two_nodes() -> None:
    plan = plan_of()

    def make() -> Run:
        world = World(plan)
        made: list[Node] = []

        def sample() -> None:
            draft = world.session.draft(world.tip)
            draft.append(7)
            made.append(draft.commit())

        def check() -> None:
            assert set(world.session.children(world.tip)) == set(made)
            assert len({node.id for node in made}) == 2
            for node in made:
                assert node.input_ids().tolist() == node.input_ids(copy=False).tolist() == [*range(1, 14), 7]
            world.store.close()

        return Run(sample, sample, check)

    assert at_every_place(make) > 50


# --- an extent alone, two switches ----------------------------------------------------------------------------------------


def numbers(start: int, stop: int) -> bytes:
    return np.arange(start, stop, dtype="<i4").tobytes()


class Arena:
    """An extent of 10 tokens with room for 16, and a fork of it at 8 with 2 tokens of its own."""

    def __init__(self, budget: int = 2**20) -> None:
        self.paths = PathCache(budget)
        self.owner = object()
        self.trunk = Extent(self.owner, None, 0, b"", self.paths)
        self.trunk.append(numbers(0, 10))
        self.fork = self.new_fork(100)
        self.views: list[tuple[Any, bytes]] = []

    def new_fork(self, first: int) -> Extent:
        return Extent(self.owner, self.trunk, 8, numbers(first, first + 2), self.paths)

    def see(self, extent: Extent, how: str, start: int, stop: int, path: bytes) -> None:
        found = getattr(extent, how)(start, stop)
        self.views.append((memoryview(found), path[start * TOKEN_BYTES : stop * TOKEN_BYTES]))
        self.check()

    def check(self) -> None:
        for found, path in self.views:
            assert bytes(found) == path

    def check_held(self) -> None:
        self.check()
        kept = [entry for entry in self.paths._paths.values() if entry.extent() is not None]
        assert self.paths.held_bytes == sum(len(entry.buffer) for entry in kept) <= self.paths.budget_bytes


OLD = numbers(0, 10)
GROWTHS = {"without growth": numbers(10, 14), "to the last byte": numbers(10, 16), "with growth": numbers(10, 40)}


@pytest.mark.parametrize("how", ["read", "view", "read_bytes"])
@pytest.mark.parametrize("growth", GROWTHS)
def test_an_arena_is_written_and_read_by_turns(growth: str, how: str) -> None:
    more = GROWTHS[growth]

    def writer_first() -> Run:
        arena = Arena()
        return Run(partial(arena.trunk.append, more), partial(arena.see, arena.trunk, how, 1, 10, OLD), arena.check)

    def reader_first() -> Run:
        run = writer_first()
        return Run(run.second, run.first, run.check)

    assert at_every_two_places(writer_first, may_wait=(False, False)) > 50
    assert at_every_two_places(reader_first, may_wait=(False, False)) > 50


@pytest.mark.parametrize("how", ["read", "view"])
def test_a_fork_is_read_while_its_trunk_grows(how: str) -> None:
    path = numbers(0, 8) + numbers(100, 102)

    def make() -> Run:
        arena = Arena()

        def grow() -> None:
            arena.trunk.append(numbers(10, 40))
            arena.fork.append(numbers(102, 104))
            arena.see(arena.fork, how, 0, 12, path + numbers(102, 104))

        return Run(partial(arena.see, arena.fork, how, 0, 10, path), grow, arena.check_held)

    assert at_every_two_places(make, may_wait=(False, False)) > 50


# --- readers of the path cache --------------------------------------------------------------------------------------------


LEFT = numbers(0, 8) + numbers(100, 102)
RIGHT = numbers(0, 8) + numbers(200, 202)


def _same_fork(arena: Arena) -> tuple[Operation, Operation]:
    read = partial(arena.see, arena.fork, "view", 0, 10, LEFT)
    return read, read


def _two_forks(arena: Arena) -> tuple[Operation, Operation]:
    other = arena.new_fork(200)
    return partial(arena.see, arena.fork, "view", 0, 10, LEFT), partial(arena.see, other, "view", 0, 10, RIGHT)


def _growing(arena: Arena) -> tuple[Operation, Operation]:
    """One reads what the other's path has grown by."""
    arena.see(arena.fork, "view", 0, 10, LEFT)
    arena.fork.append(numbers(102, 106))
    path = LEFT + numbers(102, 106)
    return partial(arena.see, arena.fork, "view", 0, 12, path), partial(arena.see, arena.fork, "view", 3, 14, path)


def _growing_in_place(arena: Arena) -> tuple[Operation, Operation]:
    """As before, in a buffer that has room for both."""
    arena.see(arena.fork, "view", 0, 10, LEFT)
    arena.fork.append(numbers(102, 122))
    path = LEFT + numbers(102, 122)
    arena.see(arena.fork, "view", 0, 26, path)
    arena.fork.append(numbers(122, 126))
    path += numbers(122, 126)
    return partial(arena.see, arena.fork, "view", 0, 28, path), partial(arena.see, arena.fork, "view", 3, 30, path)


def _evicting(arena: Arena) -> tuple[Operation, Operation]:
    """There is room for one of two paths."""
    arena.paths.budget_bytes = 60
    arena.see(arena.fork, "view", 0, 10, LEFT)
    other = arena.new_fork(200)

    def second() -> None:
        arena.see(other, "view", 0, 10, RIGHT)
        arena.see(arena.fork, "view", 0, 9, LEFT)
        arena.see(other, "view", 0, 9, RIGHT)

    return partial(arena.see, arena.fork, "view", 0, 10, LEFT), second


def _dying(arena: Arena) -> tuple[Operation, Operation]:
    """A fork goes, and others come, of which one may get its place in memory."""
    forks = [arena.new_fork(200)]
    arena.see(forks[0], "view", 0, 10, RIGHT)

    def second() -> None:
        forks.clear()
        forks.extend(arena.new_fork(first) for first in (300, 400, 500))
        for fork, first in zip(forks, (300, 400, 500), strict=True):
            arena.see(fork, "view", 0, 10, numbers(0, 8) + numbers(first, first + 2))

    return partial(arena.see, arena.fork, "view", 0, 10, LEFT), second


def _clearing(arena: Arena) -> tuple[Operation, Operation]:
    arena.see(arena.fork, "view", 0, 9, LEFT)
    return partial(arena.see, arena.fork, "view", 0, 10, LEFT), arena.paths.clear


def _counting(arena: Arena) -> tuple[Operation, Operation]:
    forks = [arena.new_fork(200)]
    arena.see(forks[0], "view", 0, 10, RIGHT)

    def count() -> None:
        forks.clear()
        assert arena.paths.held_bytes in (0, len(LEFT))

    return partial(arena.see, arena.fork, "view", 0, 10, LEFT), count


@pytest.mark.parametrize("what", [_same_fork, _two_forks, _growing, _growing_in_place, _evicting, _dying, _clearing, _counting])
def test_paths_are_kept_while_others_are_at_it(what: Callable[[Arena], tuple[Operation, Operation]]) -> None:
    def make() -> Run:
        arena = Arena()
        return Run(*what(arena), arena.check_held)

    def other_way_round() -> Run:
        first, second, check = make()
        return Run(second, first, check)

    waits = what in (_clearing, _counting)
    assert at_every_place(make, may_wait=(False, waits)) > 30
    assert at_every_place(other_way_round, may_wait=(waits, False)) > 5
    if what in (_same_fork, _two_forks, _growing, _growing_in_place):
        assert at_every_two_places(make, may_wait=(False, False)) > 50


# --- links and the trie, against a second query ---------------------------------------------------------------------------


def linked(session: Session) -> None:
    tree = session.tree
    nodes = tuple(tree)
    for node in nodes:
        assert tree.children(node) == tuple(other for other in nodes if other.parent == node)


@pytest.mark.parametrize("layered", [False, True], ids=["one index", "a layer over it"])
def test_links_are_made_while_somebody_asks_for_them(layered: bool) -> None:
    def make() -> Run:
        session = SessionStore.in_memory().create("s", scheme="text@hf5")
        trunk = session.append(session.root, [1])
        nodes = [session.append(trunk, [number]) for number in range(3)]
        tree = session.tree
        if layered:
            for number in range(3, 5):
                tree, node = tree.append(trunk, [number])
                nodes.append(node)

        def first() -> None:
            assert tree.children(trunk) == tuple(nodes)

        def second() -> None:
            first()
            session.append(nodes[0], [7])
            session.append(trunk, [8])
            first()
            linked(session)

        def check() -> None:
            first()
            linked(session)
            session.close()

        return Run(first, second, check)

    assert at_every_place(make) > 100


class Library:
    """A session with an image, and histories of it with what is known of them among its first nodes."""

    def __init__(self) -> None:
        self.session = SessionStore.in_memory().create("s", scheme=vl())
        append = self.session.append
        picture = [VISION_START, *[IMAGE_PAD] * 4, VISION_END]
        self.trunk = append(self.session.root, [1, 2, *picture, 3, 4, 5], media=[image("a", 3)])
        self.tip = append(self.trunk, [6, 7, 8])
        self.other = append(self.trunk, [6, 7, 9, *picture], media=[image("b", 4)])
        self.tree = self.session.tree
        path = [1, 2, *picture, 3, 4, 5]
        self.histories: list[tuple[list[int], list[MediaItem], Node, int, Node | None]] = [
            ([*path, 6, 7, 8], [image("a", 3)], self.tip, 14, None),
            ([*path, 6, 7], [image("a", 3)], self.trunk, 13, self.tip),
            ([*path, 6, 7, 9, *picture], [image("a", 3), image("b", 15)], self.other, 20, None),
            ([*path, 6, 7, 9, *picture], [image("a", 3), image("c", 15)], self.trunk, 15, self.other),
            ([*path, 99], [image("a", 3)], self.trunk, 11, None),
            ([1, 2, 3], [], self.session.root, 2, self.trunk),
        ]

    def ask(self, numbers: Iterable[int]) -> None:
        """Of the tree as it was: whatever came since is not seen."""
        for number in numbers:
            history, media, node, length, within = self.histories[number]
            assert self.tree.longest_prefix(history, media) == (node, length, within)

    def grow(self) -> None:
        """Nodes that end on, leave and go on from every line there is; then somebody asks, which takes them in."""
        session = self.session
        session.truncate(self.tip, 12)
        session.truncate(self.other, 13)
        session.truncate(self.trunk, 1)
        session.append(self.tip, [10, 11])
        session.append(self.trunk, [6, 7, 8, 20])
        session.append(session.root, [1, 2, 99])
        session.append(self.trunk, [6, 7, 9, VISION_START, *[IMAGE_PAD] * 4, VISION_END], media=[image("c", 4)])
        session.longest_prefix([1])

    def check(self) -> None:
        self.ask(range(6))
        self.find_all()
        self.session.close()

    def find_all(self) -> None:
        """Every node of the tree as it is now is found by its path."""
        tree = self.session.tree
        ends: dict[tuple[Any, ...], Node] = {}
        for node in tree:
            spans = node.media_spans()
            media = [MediaItem("image", item.identity, [(start, stop - start)], item.grid_thw) for item, start, stop in spans]
            path = (node.input_ids().tobytes(), *((item.identity, start) for item, start, _ in spans))
            assert tree.longest_prefix(node.input_ids(), media) == (ends.setdefault(path, node), node.stop, None)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search goes over from lines to blocks at once, so that few tokens do for both."""
    monkeypatch.setattr("sessiontree.prefixes.BLOCK", 2)
    monkeypatch.setattr("sessiontree.prefixes._PATIENCE", 1)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("number", "warm"), [(3, False), (0, True), (1, True), (3, True), (5, True)])
def test_a_history_is_looked_up_while_the_trie_grows(number: int, warm: bool) -> None:
    def make() -> Run:
        library = Library()
        if warm:
            library.ask([0])

        def second() -> None:
            library.grow()
            library.ask(range(6))

        return Run(partial(library.ask, [number]), second, library.session.close if warm else library.check)

    assert at_every_place(make, may_wait=(False, True), step=1 if warm else 9) > 50


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("number", [0, 3])
def test_the_trie_grows_while_histories_are_looked_up(number: int) -> None:
    def make() -> Run:
        library = Library()
        library.ask([0])
        library.session.truncate(library.tip, 12)
        library.session.append(library.trunk, [6, 7, 8, 20])
        library.session.append(library.tip, [10, 11])

        return Run(partial(library.session.longest_prefix, [1]), partial(library.ask, [number]), library.check)

    assert at_every_place(make, may_wait=(False, False)) > 100


@pytest.mark.usefixtures("small_blocks")
def test_what_is_about_to_be_in_the_trie_is_found() -> None:
    """By who may have to wait for the one that puts it in."""

    def make() -> Run:
        library = Library()
        library.ask([0])
        library.session.truncate(library.tip, 12)
        library.session.append(library.tip, [10, 11])
        return Run(partial(library.session.longest_prefix, [1]), library.find_all, library.check)

    assert at_every_place(make, may_wait=(False, True)) > 100


# --- features -------------------------------------------------------------------------------------------------------------


def picture(name: str) -> MediaItem:
    return MediaItem("image", identity(name), [(0, 1)], (1, 2, 2))


def pixels(name: str) -> np.ndarray[Any, Any]:
    return np.full(8, ord(name), np.uint8)


class Gallery:
    """A store of features with room for two pictures, of which it has ``a`` and ``b``."""

    def __init__(self) -> None:
        probe = FeatureStore()
        probe.put(picture("a"), pixels("a"))
        self.store = FeatureStore(2 * probe.held_bytes)
        self.held: dict[str, Any] = {}
        self.put("a")
        self.put("b")
        self.held.clear()

    def put(self, name: str) -> None:
        with suppress(LimitExceeded):
            self.held[name] = self.store.put(picture(name), pixels(name))

    def get(self, name: str) -> None:
        found = self.store.get(picture(name))
        if found is not None:
            self.held[name] = found

    def look(self) -> None:
        """Something has died, and somebody looks at what is held."""
        self.store.drop(picture("a"))
        assert 0 <= self.store.held_bytes <= self.store.budget_bytes
        assert len(self.store) <= 2

    def use(self) -> None:
        self.get("a")
        self.get("c")
        assert self.store.held_bytes <= self.store.budget_bytes
        self.held.pop("c", None)
        self.put("b")
        assert len(self.store) <= 2
        self.store.drop(picture("c"))

    def check(self) -> None:
        for name, features in self.held.items():
            assert features["features"].tobytes() == pixels(name).tobytes()
            assert self.store.get(picture(name)) is features
        living = [found for found in (self.store.get(picture(name)) for name in "abcd") if found is not None]
        assert self.store.held_bytes == sum(found.nbytes for found in living) <= self.store.budget_bytes
        assert len(self.store) == len(living)


FEATURES: dict[str, Callable[[Gallery], Any]] = {
    "get": lambda gallery: gallery.get("a"),
    "put another": lambda gallery: gallery.put("c"),
    "put the same": lambda gallery: gallery.put("a"),
    "use": Gallery.use,
    "clear": lambda gallery: gallery.store.clear(),
    "look": Gallery.look,
}


@pytest.mark.parametrize("second", FEATURES)
@pytest.mark.parametrize("first", FEATURES)
def test_features_are_put_and_got_by_two(first: str, second: str) -> None:
    def make() -> Run:
        gallery = Gallery()
        return Run(partial(FEATURES[first], gallery), partial(FEATURES[second], gallery), gallery.check)

    assert at_every_place(make) > 10


def test_a_put_is_not_refused_for_what_another_one_lets_go() -> None:
    """Two pictures fit, and nobody holds any but what is put."""

    def make() -> Run:
        gallery = Gallery()
        made: list[Any] = []

        def put(name: str) -> None:
            made.append(gallery.store.put(picture(name), pixels(name)))

        return Run(partial(put, "c"), partial(put, "d"), gallery.check)

    assert at_every_place(make) > 50


# --- planted bugs: each is right as long as nobody comes in between ---------------------------------------------------------


def broken_append_published_early(self: Extent, data: bytes) -> None:
    """The larger buffer is seen before the old tokens are in it."""
    used = (self.end - self.origin) * TOKEN_BYTES
    needed = used + len(data)
    pen = self._pen
    if pen is None or needed > len(pen):
        old = self.buffer
        self.buffer, pen = writable_bytes(max(64, needed + needed // 4))
        pen[:used] = memoryview(old)[:used]
        self._pen = pen
    pen[used:needed] = data
    self.end += len(data) // TOKEN_BYTES


def broken_read_twice(self: Extent, start: int, stop: int) -> Any:
    """A reader takes the buffer, and how long it is from another one."""
    offset = (start - self.origin) * TOKEN_BYTES
    if offset < 0:
        return np.frombuffer(self.read_bytes(start, stop), "<i4")
    from_behind = len(self.buffer) - offset
    return np.frombuffer(self.buffer[-from_behind:][: (stop - start) * TOKEN_BYTES], "<i4")


def broken_attach_without_the_lock(self: Session, parent: Node, turn: Any, details: Any, reserved: int = 0) -> Node:
    """Two writers see the same end of an extent."""
    while True:
        before = self._tree
        after, node = before._attach_alone(parent, turn, details, None, reserved, True)
        if self._tree is before:
            self._tree = after
            return node


def broken_attach_counted_early(self: Session, parent: Node, turn: Any, details: Any, reserved: int = 0) -> Node:
    """A tree that counts the node is there before the node is."""
    with self._lock:
        before = self._tree
        self._tree = _value(before._index, before._count + 1, before._heads, before._moves, before._log, before._said, True)
        self._tree, node = before._attach_alone(parent, turn, details, None, reserved, True)
        return node


_late: list[tuple[memoryview, int, bytes]] = []
_real_attach = Session._attach


def broken_append_end_first(self: Extent, data: bytes) -> None:
    """The end moves, and the tokens are written later."""
    used = (self.end - self.origin) * TOKEN_BYTES
    needed = used + len(data)
    pen = self._pen
    if pen is None or needed > len(pen):
        larger, pen = writable_bytes(max(64, needed + needed // 4))
        pen[:used] = memoryview(self.buffer)[:used]
        self.buffer = larger
        self._pen = pen
    self.end += len(data) // TOKEN_BYTES
    _late.append((pen, used, data))


def broken_attach_written_late(self: Session, parent: Node, turn: Any, details: Any, reserved: int = 0) -> Node:
    """The node is published before its tokens are written."""
    node = _real_attach(self, parent, turn, details, reserved)
    while _late:
        pen, used, data = _late.pop()
        pen[used : used + len(data)] = data
    return node


def broken_see_children(self: NodeIndex) -> bool:
    """All is said to be linked before it is."""
    if self._children_seen == len(self.nodes):
        return True
    with self.lock:
        seen, self._children_seen = self._children_seen, len(self.nodes)
        for at in range(seen, len(self.nodes)):
            parent = self.nodes[at].parent
            self._next_sibling.append(-1)
            if parent is None:
                continue
            elder = self._last_child.get(parent.id)
            if elder is None:
                self._first_child[parent.id] = self.base_count + at
            else:
                self._next_sibling[elder - self.base_count] = self.base_count + at
            self._last_child[parent.id] = self.base_count + at
    return True


def broken_paths(self: PathCache, extent: Extent, stop: int) -> bytes | None:
    """An entry is found before its tokens are written, by readers who take no lock."""
    known = self._paths.get(id(extent))
    if known is not None and known.extent() is extent and known.stop >= stop:
        return known.buffer
    needed = stop * TOKEN_BYTES
    buffer, pen = writable_bytes(needed + needed // 4)
    self._paths[id(extent)] = _Gathered(_Fork(extent), stop, buffer, pen)
    pen[:needed] = extent.read_bytes(0, stop)
    return buffer


def broken_append_pen_first(self: Extent, data: bytes) -> None:
    """The way to write to the larger buffer is kept before the buffer is seen."""
    used = (self.end - self.origin) * TOKEN_BYTES
    needed = used + len(data)
    pen = self._pen
    if pen is None or needed > len(pen):
        larger, pen = writable_bytes(max(64, needed + needed // 4))
        pen[:used] = memoryview(self.buffer)[:used]
        self._pen = pen
        self.buffer = larger
    pen[used:needed] = data
    self.end += len(data) // TOKEN_BYTES


class Planted(NamedTuple):
    """A bug, and what finds it: the operation that is stopped, and the one that runs meanwhile; None is a reader of everything."""

    patches: dict[tuple[type, str], Any]
    stopped: str
    meanwhile: str | None
    warm: bool = False


PLANTED = {
    "the larger buffer is published before the old tokens are in it": Planted(
        {(Extent, "append"): broken_append_published_early}, "append and grow", None
    ),
    "a reader takes the buffer twice": Planted({(Extent, "read"): broken_read_twice}, "copy of a window", "append and grow"),
    "a tree counts a node before it is there": Planted(
        {(Session, "_attach"): broken_attach_counted_early}, "append in place", None
    ),
    "a node is published before its tokens are written": Planted(
        {(Extent, "append"): broken_append_end_first, (Session, "_attach"): broken_attach_written_late}, "append in place", None
    ),
    "children are said to be linked before they are": Planted(
        {(NodeIndex, "_see_children"): broken_see_children}, "children", "children"
    ),
    "a path is kept before its tokens are written": Planted(
        {(PathCache, "read"): broken_paths}, "view of a fork", "view of a fork"
    ),
    "writers do not hold the lock": Planted(
        {(Session, "_attach"): broken_attach_without_the_lock}, "append in place", "append and grow"
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patches, stopped, meanwhile, warm = PLANTED[bug]
    writers = [name for name in (stopped, meanwhile) if name in WRITERS]
    plans = [plan_of(*names) for names in itertools.permutations(writers)]
    for (where, name), what in patches.items():
        monkeypatch.setattr(where, name, what)

    def make() -> Run:
        world = World(plans[0], warm=warm)

        def operation(name: str | None) -> Operation:
            if name is None:
                return world.look
            return partial(write, world, name) if name in WRITERS else partial(READERS[name], world)

        def check() -> None:
            order = [node.id for node in world.session.tree]
            world.plan = next((plan for plan in plans if plan.order == order), plans[0])
            world.check()

        return Run(operation(stopped), operation(meanwhile), check)

    run = make()
    run.first()
    run.second()
    run.check()  # one after the other all is well
    with pytest.raises(Wrong) as caught:
        at_every_place(make)
    assert "A stopped at" in str(caught.value)


# --- interrupts: as fine a grid -------------------------------------------------------------------------------------------


def _interrupt(place: str) -> None:
    raise KeyboardInterrupt


def append_interrupted_everywhere(more: bytes) -> int:
    """Interrupt an append at each of its opcodes, and write again as a session does: how many there were."""
    for at in itertools.count():
        arena = Arena()
        before = sys.gettrace()
        try:
            Places(at, _interrupt)
            arena.trunk.append(more)
        except KeyboardInterrupt:
            pass
        else:
            return at
        finally:
            sys.settrace(before)
        arena.see(arena.trunk, "read", 0, 10, OLD)
        others = numbers(500, 500 + len(more) // TOKEN_BYTES)
        if arena.trunk.end == 10:  # else it was over: nothing is written there again
            arena.trunk.append(others)
            arena.see(arena.trunk, "view", 0, 10 + len(more) // TOKEN_BYTES, OLD + others)
        arena.trunk.append(numbers(900, 990))
        arena.check()
    raise AssertionError


@pytest.mark.parametrize("growth", GROWTHS)
def test_an_append_is_interrupted_at_every_opcode(growth: str) -> None:
    assert append_interrupted_everywhere(GROWTHS[growth]) > 20


def test_a_planted_bug_is_found_by_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Extent, "append", broken_append_pen_first)
    with pytest.raises((ValueError, AssertionError)):
        append_interrupted_everywhere(GROWTHS["with growth"])
