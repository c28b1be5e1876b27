"""Rollouts of every shape, through the public API alone: what the engine saw is there, on every kind of store, opened again.

Linear; another system prompt, as subagents and hand-offs have; a compaction, whole or in the middle; several samples and retries;
a warm start from a history that somebody else wrote. The engine here keeps plain lists of what it was given and what it made.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlite_backend

from engine_bridge import to_transformers
from sessiontree import (
    Edit,
    Fork,
    KeyTaken,
    Link,
    MediaItem,
    Node,
    Recorded,
    Session,
    SessionStore,
    StaleSession,
    UnknownNode,
    Unsupported,
)
from sessiontree.bundles import export_bundle, import_bundle
from sessiontree.drift import Drift
from tests.qwen_vocabulary import END, EOT, SPECIAL, START, encode, qwen
from tests.toy import a_turn, media, new_session, refuses, toy_scheme, tree_digest


def to_text(ids: list[int]) -> str:
    said: str = qwen().decode(ids)
    return said


def turn(role: str, said: str) -> list[int]:
    """A turn as a chat template writes it, with the line break behind it."""
    return [START, *encode(f"{role}\n{said}"), END, *encode("\n")]


ASSISTANT = [START, *encode("assistant\n")]
SYSTEM = turn("system", "You are careful.")


# --- stores, and the engine -------------------------------------------------------------------------------------------------
class Place:
    """A store that can be opened anew: what is then there went through its disk, or, of one in memory, through a bundle."""

    def __init__(self, opener: Callable[[], SessionStore], bundle: Path | None = None) -> None:
        self._opener = opener
        self._bundle = bundle
        self.store = opener()

    def create(self, name: str = "rollouts") -> Session:
        return self.store.create(name, scheme=toy_scheme())

    def reopened(self) -> SessionStore:
        if self._bundle is None:
            self.store.close()
            self.store = self._opener()
        else:
            export_bundle(self.store, self._bundle)
            self.store = self._opener()
            import_bundle(self.store, self._bundle)
        return self.store


@pytest.fixture(params=["memory", "disk", "disk that waits", "SQLite", "PostgreSQL"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    openers: dict[str, Callable[[], Place]] = {
        "memory": lambda: Place(SessionStore.in_memory, tmp_path / "bundle"),
        "disk": lambda: Place(partial(SessionStore.open, tmp_path / "store")),
        "disk that waits": lambda: Place(partial(SessionStore.open, tmp_path / "store", durability="commit")),
        "SQLite": lambda: Place(lambda: SessionStore.connect(sqlite_backend.connect(str(tmp_path / "sqlite")))),
        "PostgreSQL": lambda: Place(partial(SessionStore.connect, request.getfixturevalue("postgres_url"))),
    }
    made = openers[request.param]()
    yield made
    made.store.close()


class Engine:
    """What an engine was given and what it made, node by node, in lists of its own."""

    def __init__(self) -> None:
        self.saw: dict[bytes, list[int]] = {}
        self.links: dict[bytes, tuple[tuple[str, bytes, int], ...]] = {}

    def prefill(self, session: Session, parent: Node, ids: Sequence[int], **options: Any) -> Node:
        node = session.append(parent, ids, **options)
        return self.note(node, [*self.saw.get(parent.id, []), *ids])

    def generate(self, session: Session, parent: Node, ids: Sequence[int], finish: str = "stop", **options: Any) -> Node:
        draft = session.draft(parent, **options)
        for token in ids:
            draft.append(token)
        return self.note(draft.commit(finish), [*self.saw[parent.id], *ids])

    def request(self, session: Session, prompt: Sequence[int], completion: Sequence[int], **options: Any) -> Recorded:
        """A whole request of a client that keeps no tree."""
        options = {"decode": to_text, "special_ids": SPECIAL, **options}
        recorded = session.record(prompt, completion, **options)
        self.note(recorded.prompt, prompt)
        self.note(recorded.completion, [*prompt, *completion])
        return recorded

    def note(self, node: Node, ids: Sequence[int]) -> Node:
        assert self.saw.setdefault(node.id, list(ids)) == list(ids)
        self.links.setdefault(node.id, tuple(map(tuple, node.links)))  # type: ignore[arg-type]
        return node

    def check(self, session: Session) -> None:
        """Each node, bit for bit, by its own tokens and those of the nodes above it; and every edge goes on from what was."""
        for node_id, ids in self.saw.items():
            node = session.node(node_id)
            deltas = [each.token_ids for each in node.path()]
            assert b"".join(each.tobytes() for each in deltas) == np.array(ids, "<i4").tobytes()
            assert node.input_ids().tolist() == ids
            assert tuple(map(tuple, node.links)) == self.links[node_id]
            for above in node.path():
                assert ids[: above.stop] == above.input_ids().tolist()


def check_reopened(place: Place, engine: Engine, session: Session) -> Session:
    """Check now, and once more when the store was opened anew, that all is as it was; the session there."""
    engine.check(session)
    digest = tree_digest(session.tree)
    again = place.reopened().get(session.id)
    engine.check(again)
    assert tree_digest(again.tree) == digest
    return again


def derived(node: Node) -> list[bytes]:
    return [link.node_id for link in node.links if link.kind == "derived_from"]


# --- linear -----------------------------------------------------------------------------------------------------------------
def test_d33_a_line_of_turns(place: Place) -> None:
    engine, session = Engine(), place.create()
    node = engine.prefill(session, session.root, SYSTEM, role="system")
    for number in range(4):
        node = engine.prefill(session, node, [*turn("user", f"Step {number}?"), *ASSISTANT])
        node = engine.generate(
            session, node, [*encode(f"Step {number}: naïve café 東京 🦜"), END], "length" if number == 2 else "stop"
        )
        node = engine.prefill(session, node, encode("\n"), role="template")
    session.set_head("main", node)
    again = check_reopened(place, engine, session)
    assert again.leaves() == (again.heads["main"],) == (node,)
    assert [each.finish_reason for each in again.node(node.id).path() if each.origin == "generated"] == [
        "stop",
        "stop",
        "length",
        "stop",
    ]
    # A client without a tree, that keeps ids, comes to the same path.
    whole = engine.saw[node.id]
    last = engine.request(again, [*whole, *turn("user", "Done?"), *ASSISTANT], encode("Yes."))
    assert (last.reused_tokens, last.fork) == (len(whole), None)
    assert last.prompt.parent == node
    check_reopened(place, engine, again)


def test_d33_a_line_with_a_picture(place: Place) -> None:
    engine, session = Engine(), place.create()
    shown = a_turn()
    node = engine.prefill(session, session.root, shown.tokens, media=media(shown))
    node = engine.generate(session, node, [7, 8])
    prompt = [*shown.tokens, 7, 8, 9]
    recorded = engine.request(session, prompt, [10], media=media(shown))
    assert recorded.prompt.parent == node
    again = check_reopened(place, engine, session)
    [item] = again.node(recorded.completion.id).media_spans()
    assert isinstance(item[0], MediaItem)


DRIFTS: list[tuple[str, Callable[[str], list[int]], Drift]] = [
    ("tokenised again", lambda said: [*encode(said), END, *encode("\n")], "retokenised"),
    ("trimmed", lambda said: [*encode(said.replace("  ", " ")), END, *encode("\n")], "whitespace"),
    ("another end", lambda said: [*encode(said), EOT, END, *encode("\n")], "special"),
    ("no line break", lambda said: [*encode(said), END], "special"),
    ("another reply", lambda said: [*encode(said.replace("red", "blue")), END, *encode("\n")], "content"),
]


def kept_in_letters(said: str) -> list[int]:
    ranks = qwen()._tokenizer._mergeable_ranks
    return [ranks[bytes([byte])] for byte in said.encode()]


@pytest.mark.parametrize(("how", "sent", "drift"), DRIFTS, ids=[how for how, *_ in DRIFTS])
def test_d33_a_prompt_that_drifts_forks_where_the_ids_differ(
    place: Place, how: str, sent: Callable[[str], list[int]], drift: Drift
) -> None:
    """Index and kind are told; what was recorded stays, also once all of it is read from the disk."""
    engine, session, said = Engine(), place.create(), "It is  red."
    asked = [*SYSTEM, *turn("user", "Which colour?"), *ASSISTANT]
    reply = kept_in_letters(said) if drift == "retokenised" else encode(said)
    first = engine.request(session, asked, [*reply, END])
    after = [*turn("user", "And why?"), *ASSISTANT]
    kept = engine.request(session, [*asked, *reply, END, *encode("\n"), *after], encode("So."))
    assert kept.fork is None
    again = check_reopened(place, engine, session)
    prompt = [*asked, *sent(said), *after]
    known = engine.saw[kept.completion.id]
    at = next(at for at, (one, two) in enumerate(zip(known, prompt, strict=False)) if one != two)
    drifted = engine.request(again, prompt, encode("Other."))
    [left] = [node for node in again.node(kept.completion.id).path() if node.start <= at < node.stop]
    assert drifted.fork == Fork(at, "token", left, known[at], prompt[at], drift)
    assert drifted.reused_tokens == at
    assert first.completion in again.tree
    check_reopened(place, engine, again)


# --- another system prompt --------------------------------------------------------------------------------------------------
def test_d33_a_subagent_and_a_hand_off(place: Place) -> None:
    """A second root of content, with a link to where it was sent from; its answer goes back as a tool's."""
    engine, session = Engine(), place.create()
    node = engine.prefill(session, session.root, [*SYSTEM, *turn("user", "Find it."), *ASSISTANT])
    call = engine.generate(session, node, [*encode("search()"), END], "tool_calls", metadata={"tool_calls": ["c"]})
    sub = [*turn("system", "You search."), *turn("user", "Search for it."), *ASSISTANT]
    asked = engine.prefill(session, session.root, sub, derived_from=[call])
    found = engine.generate(session, asked, [*encode("It is there."), END])
    result = [*encode("\n"), *turn("tool", "It is there."), *ASSISTANT]
    back = engine.prefill(session, call, result, role="tool", metadata={"tool_call_id": "c"}, derived_from=[found.id])
    end = engine.generate(session, back, [*encode("There."), END])
    other = [*turn("system", "You write."), *turn("user", "Write it down."), *ASSISTANT]
    handed = engine.request(session, other, [*encode("Done."), END], derived_from=[end])
    shared = next(at for at, (one, two) in enumerate(zip(engine.saw[end.id], other, strict=False)) if one != two)
    assert handed.prompt.links == (Link("derived_from", end.id, shared),)  # both begin as system prompts do
    again = check_reopened(place, engine, session)
    assert [derived(again.node(each.id)) for each in (asked, back, handed.prompt, handed.completion)] == [
        [call.id],
        [found.id],
        [end.id],
        [],
    ]
    assert again.node(found.id).path()[1] == asked
    assert not again.validate(again.node(end.id))
    assert [again.node(source).input_ids().tolist() for source in derived(again.node(asked.id))] == [engine.saw[call.id]]
    assert set(again.leaves()) == {end, found, handed.completion}


def test_what_a_turn_is_derived_from_is_told_by_the_first(place: Place) -> None:
    """As metadata are: a retry is the same node; and links are no part of what it is."""
    session = place.create()
    one, two = (session.append(session.root, [number]) for number in (1, 2))
    made = session.append(session.root, [3], derived_from=[one, two.id, one])
    assert made.links == (Link("derived_from", one.id, 0), Link("derived_from", two.id, 0))
    assert session.append(session.root, [3], derived_from=[two]) == session.append(session.root, [3]) == made
    behind = session.append(one, [3], derived_from=[session.append(one, [4])])
    assert [link.reused_tokens for link in behind.links] == [1]
    known = session.record([3], [4], derived_from=[one])
    assert known.prompt == made
    assert known.prompt.links == made.links
    again = place.reopened().get(session.id)
    assert again.node(made.id).links == made.links
    tree, alone = again.tree.append(again.root, [9], derived_from=[made])
    assert derived(alone) == [made.id]
    assert len(tree) == len(again.tree) + 1


def test_what_it_is_derived_from_is_in_the_session() -> None:
    session, other = new_session(), new_session(name="other")
    foreign = other.append(other.root, [1])
    unknown: list[list[Node | bytes]] = [[foreign], [b"x" * 32], [session.append(session.root, [2]), foreign.id]]
    for sources in unknown:
        refuses(UnknownNode, session, partial(session.append, session.root, [3], derived_from=sources))
        refuses(UnknownNode, session, partial(session.record, [3], [4], derived_from=sources))
        refuses(UnknownNode, session, partial(session.tree.append, session.root, [3], derived_from=sources))
    unfit: list[Any] = [session.root, session.root.id, [5]]
    for wrong in unfit:
        refuses(TypeError, session, partial(session.append, session.root, [3], derived_from=wrong))
        refuses(TypeError, session, partial(session.record, [3], [4], derived_from=wrong))


# --- compaction ---------------------------------------------------------------------------------------------------------------
def conversation(engine: Engine, session: Session, parent: Node, steps: Sequence[int]) -> Node:
    node = parent
    for step in steps:
        node = engine.prefill(session, node, [*turn("user", f"Step {step}?"), *ASSISTANT])
        node = engine.generate(session, node, [*encode(f"Done with {step}."), END, *encode("\n")])
    return node


def test_c67_d20_a_recap_of_everything(place: Place) -> None:
    """New content at the root that leads to what it sums up; the old branch goes on from before it."""
    engine, session = Engine(), place.create()
    system = engine.prefill(session, session.root, SYSTEM, role="system")
    tip = conversation(engine, session, system, range(3))
    asked = engine.prefill(session, tip, [*turn("user", "Sum it up."), *ASSISTANT])
    summary = engine.generate(session, asked, [*encode("Three steps were done."), END])
    recap = [*SYSTEM, *turn("user", "So far: three steps were done.")]
    compacted = engine.prefill(session, session.root, recap, derived_from=[tip, summary])
    after = conversation(engine, session, compacted, [3, 4])
    again = check_reopened(place, engine, session)
    first = again.node(compacted.id)
    assert first.parent == again.root
    assert derived(first) == [tip.id, summary.id]
    raw = [node.id for node in tip.path()]
    assert [node.id for node in again.node(derived(first)[0]).path()] == raw
    rewound = conversation(engine, again, again.node(tip.id), [30])  # to before it: the full text
    assert rewound.input_ids().tolist() == [*engine.saw[tip.id], *engine.saw[rewound.id][tip.stop :]]
    assert compacted not in again.node(rewound.id).path()
    assert {after, rewound} <= set(again.leaves())
    check_reopened(place, engine, again)


def test_c67_d20_a_recap_that_a_client_without_a_tree_sends(place: Place) -> None:
    engine, session = Engine(), place.create()
    asked = [*SYSTEM, *turn("user", "Step 0?"), *ASSISTANT]
    first = engine.request(session, asked, [*encode("Done."), END])
    recap = [*SYSTEM, *turn("user", "So far: one step."), *turn("user", "Step 1?"), *ASSISTANT]
    second = engine.request(session, recap, [*encode("Done."), END], derived_from=[first.completion])
    assert second.fork is not None
    assert (second.fork.at, second.fork.drift) == (second.reused_tokens, "content")
    again = check_reopened(place, engine, session)
    assert again.node(second.prompt.id).links == (Link("derived_from", first.completion.id, second.reused_tokens),)
    assert again.node(second.prompt.id).start == second.reused_tokens


@pytest.mark.parametrize("begin", ["in the middle", "from the first turn on"])
def test_c67_d20_a_splice_in_the_middle(place: Place, begin: str) -> None:
    """One branch is compacted; its sibling, the way to before it, and forks on either side keep what they had."""
    engine, session = Engine(), place.create()
    system = engine.prefill(session, session.root, SYSTEM, role="system")
    trunk = conversation(engine, session, system, [0, 1])
    one, two = (conversation(engine, session, trunk, steps) for steps in ([2, 3], [20]))
    path = one.path()
    start, stop = (path[4 if begin == "in the middle" else 2].start, path[-2].start)
    recap = turn("user", "Much was done.")
    whole = engine.saw[one.id]
    compacted = session.rewrite(one, [Edit(start, stop, recap)])
    engine.note(compacted, [*whole[:start], *recap, *whole[stop:]])
    after = conversation(engine, session, compacted, [4])
    session.set_head("main", after)
    again = check_reopened(place, engine, session)
    for node in again.node(compacted.id).path():
        if node.start >= start:
            assert [again.node(link.node_id) in path for link in node.links] == [True]
    assert again.node(two.id).path()[: trunk.depth + 1] == again.node(trunk.id).path()
    assert not any(node.links for node in again.node(two.id).path())
    rewound = conversation(engine, again, again.node(path[4].id), [31])
    assert rewound.input_ids(0, path[4].stop).tolist() == whole[: path[4].stop]
    # D20: a fork from before sees the full text, one from after the summary and what is behind it, and raw turns are there.
    store = place.store
    before, behind = store.fork(again, one.id, "before"), store.fork(again, after.id, "after")
    for name, node, ids in (("before", one, whole), ("after", after, engine.saw[after.id])):
        forked = place.store.get(name)
        assert forked in (before, behind)
        [leaf] = forked.leaves()
        assert leaf.id == node.id
        assert leaf.input_ids().tolist() == ids
    check_reopened(place, engine, again)
    for name, node in (("before", one), ("after", after)):
        forked = place.store.get(name)
        assert [each.id for each in forked.tree] == [each.id for each in node.path()]
        assert [each.links for each in forked.node(node.id).path()] == [each.links for each in node.path()]
        raw = place.store.get(again.id)
        for each in forked.node(node.id).path():
            for source in derived(each):
                assert raw.node(source).input_ids().tolist() == whole[: raw.node(source).stop]


def test_d20_a_turn_taken_back_after_a_compaction(place: Place) -> None:
    engine, session = Engine(), place.create()
    tip = conversation(engine, session, session.root, range(3))
    compacted = engine.prefill(session, session.root, turn("user", "So far."), derived_from=[tip])
    after = conversation(engine, session, compacted, [3])
    whole = engine.saw[after.id]
    cut = session.truncate(after, after.start + 2)
    engine.note(cut, whole[: after.start + 2])
    last = session.drop_last(after, len(after))
    assert last == after.parent
    again = check_reopened(place, engine, session)
    assert again.node(cut.id).links == (Link("prefix_of", after.id, after.start + 2),)
    assert derived(again.node(cut.id).path()[1]) == [tip.id]


# --- several samples, and retries ----------------------------------------------------------------------------------------------
def test_d33_best_of_n_and_retries(place: Place) -> None:
    engine, session = Engine(), place.create()
    asked = engine.prefill(session, session.root, [*SYSTEM, *turn("user", "Roll."), *ASSISTANT])
    drafts = [session.draft(asked) for _ in range(6)]
    said = [[*encode("Six."), END]] * 3 + [[*encode(f"{number}."), END] for number in range(3)]
    for draft, ids in zip(drafts, said, strict=True):
        draft.extend(ids)
    drafts.pop().abort()  # an attempt that failed leaves no trace
    samples = [engine.note(draft.commit("stop"), [*engine.saw[asked.id], *ids]) for draft, ids in zip(drafts, said, strict=False)]
    assert len({node.id for node in samples}) == 5, "equal samples stay apart"
    retried = engine.generate(session, asked, [*encode("Again."), END], key="request")
    assert engine.generate(session, asked, [*encode("Again."), END], key="request") == retried
    with pytest.raises(KeyTaken):
        engine.generate(session, asked, [*encode("Other."), END], key="request")
    prompt = engine.saw[asked.id]
    recorded = [engine.request(session, prompt, [*encode("Six."), END]) for _ in range(2)]
    session.set_head("best", samples[1])
    better = session.replace(samples[1], [*encode("Seven."), END], head="best", expected=samples[1])
    engine.note(better, [*prompt, *encode("Seven."), END])
    again = check_reopened(place, engine, session)
    children = {*samples, retried, better, *(each.completion for each in recorded)}
    assert set(again.children(again.node(asked.id))) == children
    assert len(children) == len(again.leaves()) == 9
    assert again.heads["best"] == better
    engine.generate(again, again.node(samples[0].id), encode(" More."))
    check_reopened(place, engine, again)


# --- a warm start ---------------------------------------------------------------------------------------------------------------
def test_d33_a_warm_start_from_a_history_of_somebody_else(place: Place) -> None:
    """Replies that were never sampled here are given, not generated; what goes on from them is the engine's, to the token."""
    engine, session = Engine(), place.create()
    node = session.root
    for role, said in (("system", "You are careful."), ("user", "Hello?"), ("assistant", "Hello  there."), ("user", "Go on.")):
        node = engine.prefill(session, node, turn(role, said), role=role)
    imported = engine.prefill(session, node, ASSISTANT, role="assistant")
    reply = engine.generate(session, imported, [*encode("On."), END])
    again = check_reopened(place, engine, session)
    assert [each.origin for each in again.node(reply.id).path()[1:]] == ["input"] * 5 + ["generated"]
    # What the engine's own template makes of the same messages differs by a blank.
    whole = engine.saw[imported.id]
    prompt = [*turn("system", "You are careful."), *turn("user", "Hello?"), *turn("assistant", "Hello there.")]
    drifted = engine.request(again, [*prompt, *turn("user", "Go on."), *ASSISTANT], [*encode("On."), END])
    assert drifted.fork is not None
    assert drifted.fork.drift == "whitespace"
    assert whole[: drifted.fork.at] == engine.saw[drifted.prompt.id][: drifted.fork.at]
    check_reopened(place, engine, again)


def test_d33_a_warm_start_from_another_store(place: Place, tmp_path: Path) -> None:
    source = SessionStore.in_memory()
    engine, old = Engine(), source.create("rollouts", scheme=toy_scheme())
    tip = conversation(engine, old, old.root, range(2))
    export_bundle(source, tmp_path / "moved")
    old.close()
    with pytest.raises(StaleSession):
        old.append(tip, [1])
    import_bundle(place.store, tmp_path / "moved")
    session = place.store.get("rollouts")
    conversation(engine, session, session.node(tip.id), [2])
    whole = engine.saw[tip.id]
    assert engine.request(session, [*whole, *turn("user", "Go on."), *ASSISTANT], encode("On.")).reused_tokens >= len(whole)
    check_reopened(place, engine, session)


# --- tool calls ---------------------------------------------------------------------------------------------------------------
def test_d23_a_repair_is_a_new_branch_and_old_nodes_stay(place: Place) -> None:
    """Calls whose results stand on other branches, or nowhere: named, refused by the bridge when asked, mended beside them."""
    engine, session = Engine(), place.create()
    asked = engine.prefill(session, session.root, [*turn("user", "Look up two."), *ASSISTANT])
    with session.draft(asked, metadata={"tool_calls": ["a", "b"]}) as draft:
        draft.extend(encode("Looking."))
        call = engine.note(draft.commit("tool_calls"), [*engine.saw[asked.id], *encode("Looking.")])
    one, two = (
        engine.prefill(session, call, turn("tool", "It is."), role="tool", metadata={"tool_call_id": name}, key=name)
        for name in "ab"
    )
    after = engine.generate(session, engine.prefill(session, one, ASSISTANT), encode("Well."))
    [problem] = session.validate(after)
    assert (problem.kind, problem.node, problem.call_id, problem.elsewhere) == ("unanswered_call", call, "b", (two,))
    with pytest.raises(Unsupported, match="'b'"):
        to_transformers(after, paired_calls=True)
    before = {node.id: _details(node) for node in session.tree}
    joined = session.linearize([one, two])
    engine.note(joined, [*engine.saw[one.id], *turn("tool", "It is.")])
    lost = engine.prefill(session, one, turn("tool", "No answer."), role="tool", metadata={"tool_call_id": "b"}, key="lost")
    again = check_reopened(place, engine, session)
    for mended in (joined, lost):
        assert mended.id not in before and again.validate(mended.id) == ()
        assert to_transformers(again.node(mended.id), paired_calls=True)["input_ids"][0].tolist() == engine.saw[mended.id]
    assert {node_id: _details(again.node(node_id)) for node_id in before} == before
    assert [problem.call_id for problem in again.validate(after.id)] == ["b"], "the old branch is what it was"


def _details(node: Node) -> tuple[bytes, Any, Any]:
    return node.input_ids().tobytes(), node.metadata, node.links


# --- all of it, in any order ------------------------------------------------------------------------------------------------------
class Rollouts:
    """One step after the other, drawn: each shape wherever it may stand."""

    def __init__(self, place: Place, chance: random.Random) -> None:
        self.place, self.chance, self.engine = place, chance, Engine()
        self.session = place.create()
        self.nodes = [self.engine.prefill(self.session, self.session.root, SYSTEM)]

    def some(self) -> Node:
        return self.session.node(self.chance.choice(self.nodes).id)

    def words(self, most: int = 6) -> list[int]:
        said = "".join(
            self.chance.choice(["a", " b", "  ", "\n", "é", "🦜", "<think>", "12"]) for _ in range(self.chance.randint(1, most))
        )
        return encode(said)

    def step(self) -> None:
        engine, session, chance = self.engine, self.session, self.chance
        node = self.some()
        whole = engine.saw[node.id]
        match chance.choice(["append", "generate", "record", "record again", "system", "recap", "splice", "cut", "samples"]):
            case "append":
                made = engine.prefill(session, node, [*turn("user", to_text(self.words())), *ASSISTANT])
            case "generate":
                made = engine.generate(session, node, [*self.words(), END])
            case "record":
                made = engine.request(session, [*whole, *self.words()], self.words()).completion
            case "record again":  # through text, or cut, or with another end
                place = chance.randrange(1, len(whole) + 1)
                prompt = chance.choice([encode(to_text(whole)), whole[:place], [*whole[:place], EOT, *whole[place:]]])
                recorded = engine.request(session, prompt, self.words())
                if recorded.fork is not None:
                    assert recorded.fork.drift != "unknown"
                made = recorded.completion
            case "system":
                made = engine.prefill(
                    session, session.root, [*turn("system", to_text(self.words())), *self.words()], derived_from=[node]
                )
            case "recap":
                prompt = [*SYSTEM, *turn("user", to_text(self.words())), *ASSISTANT]
                made = engine.request(session, prompt, self.words(), derived_from=[node, self.some()]).completion
            case "splice":
                start, stop = sorted(chance.randint(0, len(whole)) for _ in range(2))
                recap = turn("user", to_text(self.words()))
                made = engine.note(session.rewrite(node, [Edit(start, stop, recap)]), [*whole[:start], *recap, *whole[stop:]])
            case "cut":
                stop = chance.randint(1, len(whole))
                made = engine.note(session.truncate(node, stop), whole[:stop])
            case _:
                samples = [engine.generate(session, node, [*self.words(), END]) for _ in range(3)]
                made = chance.choice(samples)
        self.nodes.append(made)


@pytest.mark.parametrize("seed", range(3))
def test_c64_d33_any_rollouts(place: Place, seed: int) -> None:
    rollouts = Rollouts(place, random.Random(seed))
    for _ in range(3):
        for _ in range(15):
            rollouts.step()
        rollouts.session = check_reopened(place, rollouts.engine, rollouts.session)
