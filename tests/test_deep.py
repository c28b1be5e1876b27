"""Size: 100,000 turns in a row, 10,000 children, thousands of forks and versions, all under the default recursion limit."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from sessiontree import MediaSpanError, Node, OutOfRange, Session, SessionStore, SessionTree, extend_drafts
from tests.test_tree import IMAGE_PAD, image, refused, text_tree, video, vl

DEPTH = 100_000
WIDTH = 10_000
FORKS = 20_000
VERSIONS = 50_000


@pytest.fixture(scope="module", autouse=True)
def default_recursion_limit() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


def chain(depth: int) -> tuple[SessionTree, Node]:
    """Turns of one token, their own number mod 1000; an image near the root and a video near the tip."""
    tree = SessionTree(vl("sglang"))
    node = tree.root
    for at in range(depth):
        if at == 10:
            tree, node = tree.append(node, [IMAGE_PAD] * 4, media=[image("near the root", 0)])
        elif at == depth - 10:
            tree, node = tree.append(node, [51] * 6, media=[video("near the tip", 0)])
        else:
            tree, node = tree.append(node, [at % 1000])
    return tree, node


@pytest.fixture(scope="module")
def deep() -> tuple[SessionTree, Node]:
    return chain(DEPTH)


def expected_ids() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    ids = np.arange(DEPTH) % 1000
    return np.concatenate([ids[:10], [IMAGE_PAD] * 4, ids[11 : DEPTH - 10], [51] * 6, ids[DEPTH - 9 :]])


STOP = DEPTH + 3 + 5


def test_reading_a_deep_path(deep: tuple[SessionTree, Node]) -> None:
    tree, tip = deep
    assert (tip.depth, tip.stop, len(tree)) == (DEPTH, STOP, DEPTH + 1)
    path = tip.path()
    assert len(path) == DEPTH + 1
    assert (path[0], path[-1]) == (tree.root, tip)
    assert np.array_equal(tip.input_ids(), expected_ids())
    assert np.array_equal(tip.input_ids(50_000, 50_010), expected_ids()[50_000:50_010])
    assert [tip.ancestor(depth).depth for depth in (0, 1, 2, 4711, DEPTH // 2, DEPTH - 1, DEPTH)] == [
        0,
        1,
        2,
        4711,
        DEPTH // 2,
        DEPTH - 1,
        DEPTH,
    ]
    assert tip.ancestor(4711) is path[4711]
    assert [(item.modality, start, stop) for item, start, stop in tip.media_spans()] == [
        ("image", 10, 14),
        ("video", DEPTH - 7, DEPTH - 1),
    ]
    assert tip.media_spans(14, DEPTH - 7) == ()
    assert [span[1:] for span in tip.media_spans(12, 13)] == [(12, 13)]
    positions = tip.positions()
    assert positions.shape == (3, STOP)
    assert positions[:, :10].tolist() == [list(range(10))] * 3
    assert positions[:, 14].tolist() == [12] * 3
    assert tip.positions(STOP - 1)[0, 0] + 1 == tip.next_position
    assert np.array_equal(tip.positions(12, STOP - 3), positions[:, 12 : STOP - 3])
    assert np.array_equal(tip.positions(mode="as_replayed"), positions)


def test_every_ancestor_by_its_depth(deep: tuple[SessionTree, Node]) -> None:
    _, tip = deep
    path = tip.path()
    for depth in range(0, DEPTH + 1, 97):
        assert tip.ancestor(depth) is path[depth]


def test_a_deep_tree_as_a_whole(deep: tuple[SessionTree, Node]) -> None:
    tree, tip = deep
    path = tip.path()
    assert list(tree) == list(path)
    assert tree.leaves() == (tip,)
    assert tree.children(tip) == ()
    assert tree.children(path[500]) == (path[501],)
    assert tree.siblings(path[500]) == ()
    assert tip in tree
    assert tree.node(path[77_777].id) is path[77_777]
    assert f"depth={DEPTH}" in repr(tip)
    assert f"nodes={DEPTH + 1}" in repr(tree)
    assert len(repr(tip)) < 200
    assert copy.copy(tip) is copy.deepcopy(tip) is tip
    assert copy.copy(tree) is copy.deepcopy(tree) is tree
    assert copy.deepcopy([tip])[0] is tip
    fork = tree.forked(tip)
    assert len(fork) == DEPTH + 1
    assert fork.leaves() == (tip,)
    assert fork.node(path[5].id) is path[5]
    assert fork.children(path[5]) == (path[6],)
    assert tree.forked(path[50_000]).leaves() == (path[50_000],)


def test_two_deep_trees_are_equal_node_by_node(deep: tuple[SessionTree, Node]) -> None:
    _, tip = deep
    _, other = chain(DEPTH)
    assert other is not tip
    assert other == tip
    assert hash(other) == hash(tip)
    assert other.path() == tip.path()
    assert {tip} == {other}
    assert other.ancestor(DEPTH - 1) != tip


def test_editing_a_deep_tree(deep: tuple[SessionTree, Node]) -> None:
    tree, tip = deep
    path = tip.path()
    assert tree.truncate(tip, 50_003)[1] is path[50_000]
    assert tree.truncate(tip, 0)[1] is tree.root
    assert tree.drop_last(tip, 0)[1] is tip
    assert tree.drop_last(tip, 9)[1] is path[DEPTH - 9]
    refused_at = [12, DEPTH - 5]
    for length in refused_at:
        with pytest.raises(MediaSpanError):
            tree.truncate(tip, length)
    with pytest.raises(OutOfRange):
        tree.truncate(tip, STOP + 1)
    longer, wide = tree.append(tip, range(10))
    cut_tree, cut = longer.drop_last(wide, 4)
    assert cut.input_ids(STOP).tolist() == [0, 1, 2, 3, 4, 5]
    assert cut.parent is tip
    assert len(cut_tree) == DEPTH + 3
    near, end = tree.rewrite(tip, [(STOP - 2, STOP - 1, [7, 7])])
    assert end.ancestor(DEPTH - 2) is path[DEPTH - 2]
    assert end.links[0].reused_tokens == STOP - 2
    assert end.input_ids(STOP - 3).tolist() == [(DEPTH - 3) % 1000, 7, 7, (DEPTH - 1) % 1000]
    assert len(near) == DEPTH + 3
    assert tree.replace(path[40], [5], head="main")[1].depth == 40


def test_rewriting_a_deep_tree_from_its_root(deep: tuple[SessionTree, Node]) -> None:
    tree, tip = deep
    far, end = tree.rewrite(tip, [(5, 6, []), (20, 21, [8, 8, 8])])
    old = expected_ids().tolist()
    assert end.input_ids().tolist() == [*old[:5], *old[6:20], 8, 8, 8, *old[21:]]
    assert end.depth == DEPTH - 1
    assert end.ancestor(5) is tip.ancestor(5)
    assert [span[1:] for span in end.media_spans()] == [(9, 13), (DEPTH - 6, DEPTH)]
    assert len(far) == 1 + DEPTH + DEPTH - 6
    assert len(tree) == DEPTH + 1


def test_a_draft_at_depth(deep: tuple[SessionTree, Node]) -> None:
    _, tip = deep
    session = SessionStore.in_memory().create("s", scheme=vl("sglang"))
    node = session.root
    for at in range(20_000):
        node = session.append(node, [at % 7])
    drafts = [session.draft(node) for _ in range(50)]
    for step in range(20):
        extend_drafts(drafts, [step + 100 * number for number in range(50)])
    assert drafts[3].input_ids(19_999).tolist() == [19_999 % 7, *range(300, 320)]
    assert drafts[3].positions(19_999)[0].tolist() == list(range(19_999, 20_020))
    assert len(drafts[3].path()) == 20_001
    assert "open" in repr(drafts[3])
    nodes = [draft.commit() for draft in drafts]
    assert session.children(node) == tuple(nodes)
    for draft in range(2_000):
        with session.draft(nodes[-1]) as chained:
            chained.append(draft)
            nodes.append(chained.commit())
    assert nodes[-1].depth == 22_001
    assert nodes[-1].input_ids(20_020).tolist() == list(range(2_000))
    assert tip.depth == DEPTH


def wide(width: int) -> tuple[Session, Node, list[Node]]:
    session = SessionStore.in_memory().create("s", scheme="text@hf5")
    parent = session.append(session.root, range(100))
    children = []
    for at in range(width):
        if at % 3:
            children.append(session.append(parent, [at, at]))
        else:
            draft = session.draft(parent)
            draft.extend([at, at])
            children.append(draft.commit())
    return session, parent, children


def test_a_node_with_ten_thousand_children() -> None:
    session, parent, children = wide(WIDTH)
    tree = session.tree
    assert tree.children(parent) == tuple(children)
    assert tree.siblings(children[5000]) == (*children[:5000], *children[5001:])
    assert tree.leaves() == tuple(children)
    assert list(tree) == [session.root, parent, *children]
    assert len({child.id for child in children}) == WIDTH
    for at in (0, 1, 4999, WIDTH - 1):
        assert children[at].input_ids().tolist() == [*range(100), at, at]
    assert all(child.token_ids.tolist() == [at, at] for at, child in enumerate(children))
    assert parent.input_ids().tolist() == list(range(100))
    again = session.append(parent, [7, 7])
    assert again is children[7]
    assert f"nodes={WIDTH + 2}" in repr(session)
    assert copy.deepcopy(tree) is tree
    gc.collect()
    assert children[-1].parent is parent


def test_forks_of_forks() -> None:
    """Each level is a second child, so each has an extent of its own over the one before."""
    tree = text_tree()
    node = tree.root
    ids = []
    held = []
    for at in range(FORKS):
        tree = tree.append(node, [at])[0]
        tree, node = tree.append(node, [at, 1])
        ids += [at, 1]
        if at % 2000 == 0:
            held.append((node, list(ids)))
    assert node.depth == FORKS
    assert node.input_ids().tolist() == ids
    assert node.input_ids(10, 20).tolist() == ids[10:20]
    assert node.positions(FORKS).tolist() == [list(range(FORKS, 2 * FORKS))]
    for old, old_ids in held:
        assert old.input_ids().tolist() == old_ids
        assert [child.token_ids.tolist() for child in tree.children(old)] == [[old.depth], [old.depth, 1]]
    cut_tree, cut = tree.truncate(node, 2 * FORKS - 1)
    assert cut.input_ids(2 * FORKS - 3).tolist() == [1, FORKS - 1]
    assert (cut_tree, cut) == (tree, tree.siblings(node)[0]), "the other branch is what is left of it"
    store = SessionStore.in_memory()
    session = store.create("0", scheme="text@hf5")
    tip = session.append(session.root, [0])
    for at in range(1, 2_000):
        session = store.fork(session, tip, str(at))
        tip = session.append(tip, [at])
    assert tip.input_ids().tolist() == list(range(2_000))
    assert len(session.tree) == 2_001
    weak = weakref.ref(node)
    del node, held, old, tree, cut, cut_tree
    gc.collect()
    assert weak() is None


def test_many_versions_over_one_old_value() -> None:
    base = text_tree()
    base, node = base.append(base.root, range(5))
    kept = []
    for at in range(VERSIONS):
        value, child = base.append(node, [at])
        assert len(value) == 3
        if at % 5000 == 0:
            kept.append((value, child, at))
    for value, child, at in kept:
        assert list(value) == [base.root, node, child]
        assert child.input_ids().tolist() == [0, 1, 2, 3, 4, at]
    assert len(base) == 2
    assert base.children(node) == ()


def test_a_chain_of_appends_to_old_values() -> None:
    """Every step appends to a value that is not the newest of its index any more."""
    tree = text_tree()
    node = tree.root
    held = []
    for at in range(VERSIONS // 10):
        aside, _ = tree.append(node, [at])
        tree, node = tree.append(node, [at, at])
        assert len(aside) == len(tree) == at + 2
        if at % 500 == 0:
            held.append((tree, node, aside, at))
    assert node.input_ids(2 * 4000).tolist() == [at for at in range(4000, VERSIONS // 10) for _ in "ab"]
    for version, tip, aside, at in held:
        assert version.leaves() == (tip,)
        assert (len(version), tip.depth) == (at + 2, at + 1)
        assert aside.leaves()[0].token_ids.tolist() == [at]
        assert node.ancestor(at + 1) is tip
        refused_node = node.ancestor(at + 2) if at + 2 <= node.depth else node
        assert refused_node not in version


def test_dropping_the_last_reference_frees_a_deep_tree() -> None:
    tree, tip = chain(DEPTH)
    middle = weakref.ref(tip.ancestor(DEPTH // 2))
    root = weakref.ref(tree.root)
    del tree
    gc.collect()
    assert middle() is not None, "a node keeps its path"
    del tip
    gc.collect()
    assert middle() is None
    assert root() is None


def test_a_refusal_at_depth_changes_nothing() -> None:
    tree, tip = chain(100)
    refused(tree, MediaSpanError, lambda: tree.rewrite(tip, [(3, 4, [1]), (11, 12, [2])]))


EXITS = {
    "globals": "",
    "a cycle and no collector": "import gc; gc.disable(); loop = [tip, session]; loop.append(loop); del tree",
    "only the tip": "del tree, session, wide",
    "an open draft and an error": """
draft = session.draft(wide)
draft.extend([1, 2])
del session
try:
    tree.append(tip, [-1])
except Exception as error:
    kept = error
""",
}


@pytest.mark.parametrize("end", EXITS)
def test_the_interpreter_exits_cleanly(end: str) -> None:
    script = f"""
from sessiontree import SessionStore, SessionTree
tree = SessionTree("text@hf5")
tip = tree.root
for at in range({DEPTH}):
    tree, tip = tree.append(tip, [at])
session = SessionStore.in_memory().create("s", scheme="text@hf5")
node = session.root
for at in range({FORKS // 2}):
    session.append(node, [at])
    node = session.append(node, [at, at])
wide = session.append(session.root, [1])
for at in range({WIDTH}):
    session.append(wide, [at])
{EXITS[end]}
print("end")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, b"", b"end\n")
