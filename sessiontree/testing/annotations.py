"""Annotations: what is said of nodes and tokens is read as it was said, bit for bit, whoever said it, wherever it is read."""

from __future__ import annotations

import numpy as np
import pytest

from sessiontree import Annotation, OutOfRange, Ragged, Session, SessionStore, Spans, TokenValues, UnknownNode, Unsupported
from sessiontree.testing.base import Conformance, Home, Opener
from sessiontree.testing.drawn import ANNOTATIONS, annotation, conversation
from sessiontree.testing.model import SCHEME, Log, Said, Turn, all_seen, check_session, said_of
from sessiontree.testing.together import in_processes, in_threads
from sessiontree.testing.turns import said
from sessiontree.testing.work import annotate_token_by_token

WRITERS = 4
EACH = 12  # what each of them says
DTYPES = ("bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")


def of_every_kind() -> dict[str, Annotation]:
    """For a node of 9 tokens."""
    values: dict[str, Annotation] = {
        "yes": True,
        "no": False,
        "whole": -(2**62),
        "float": -0.0,
        "not a number": float("nan"),
        "endless": float("-inf"),
        "text": "Grüße\0\n😀",
        "none of them": TokenValues(np.zeros((0, 4), np.float32)),
        "lists": Ragged.of([[1, 2, 3], [], [2**40], [], []], start=2),
        "float lists": Ragged.of([np.array([0.5, -0.0], np.float16)] * 9),
        "spans": Spans([(0, 2, 7), (2, 3, 7), (4, 9, "step 8")]),
        "x" * 256: 1,
    }
    for dtype in DTYPES:
        noise = np.random.default_rng(len(dtype)).bytes(9 * 6 * np.dtype(dtype).itemsize)
        array = np.frombuffer(noise, dtype if dtype != "bool" else "u1")
        array = array % 2 == 1 if dtype == "bool" else array
        values[f"rows of {dtype}"] = TokenValues(array.reshape(9, 2, 3))
        values[f"some of {dtype}"] = TokenValues(array[:4], start=3)
    return values


def annotate_all(session: Session, log: Log, seed: int = 0) -> None:
    """Say something by every name of every node, also of some tokens once more."""
    for number, entry in enumerate(log.entries):
        count = 0 if entry.turn is None else len(entry.turn.tokens)
        for again in range(2):
            values = {name: annotation(name, count, seed + 2 * number + again) for name in ANNOTATIONS}
            session.annotate(entry.id, values)
            log.annotate(entry.id, values)


class AnnotationTests(Conformance):
    def test_values_of_every_kind_come_back_bit_for_bit(self, home: Home) -> None:
        session = home.session()
        node = session.append(session.root, range(9))
        values = of_every_kind()
        session.annotate(node, values)
        session.annotate(session.root, {"of the root": 1.5})
        for reader in home.twice(session):
            found = reader.annotations(node.id)
            assert {name: Said.of(value) for name, value in found.items()} == {
                name: Said.of(value) for name, value in values.items()
            }
            assert reader.annotations(reader.root) == {"of the root": 1.5}
            spans = found["spans"]
            assert isinstance(spans, Spans) and list(spans) == [(0, 2, 7), (2, 3, 7), (4, 9, "step 8")]

    def test_of_a_token_what_was_said_last_counts(self, home: Home) -> None:
        session = home.session()
        log = said(session, conversation())
        for seed in range(0, 60, 20):
            annotate_all(session, log, seed)
            check_session(session, log)
            session = home.again(session)
            check_session(session, log)

    def test_large_values(self, home: Home) -> None:
        """C64: 1,000 tokens, 48 layers, 8 experts each."""
        session = home.session()
        node = session.append(session.root, range(1000))
        experts = np.random.default_rng(0).integers(0, 128, (1000, 48, 8), np.uint8)
        session.annotate(node, {"routed_experts": experts, "reward": 1.0})
        session.annotate(node, {"routed_experts": TokenValues(experts[:3] + 1, start=500)})
        experts[500:503] = experts[:3] + 1
        for reader in home.twice(session):
            window = reader.token_values(node.id, "routed_experts", 400, 600)
            assert window.known.all() and window.values.dtype == np.uint8
            assert np.array_equal(window.values, experts[400:600])

    def test_windows_along_a_path(self, home: Home) -> None:
        session = home.session()
        log = said(session, conversation())
        annotate_all(session, log)
        tip = log.ids[-1]
        rows: dict[int, bytes] = {}
        spans: dict[int, int | str] = {}
        start = 0
        for entry in log.path(tip):
            own = log.annotations(entry.id)
            rows |= {start + token: row for token, row in (own["logprobs"].tokens or {}).items()}
            spans |= {start + token: which for token, (_, which) in (own["weight_version"].tokens or {}).items()}
            start += 0 if entry.turn is None else len(entry.turn.tokens)
        for reader in home.twice(session):
            for first, last in ((0, start), (3, start - 2), (7, 7), (9, 10)):
                window = reader.token_values(tip, "logprobs", first, last)
                assert [row.tobytes() for row in window.values] == [rows.get(token, bytes(4)) for token in range(first, last)]
                assert window.known.tolist() == [token in rows for token in range(first, last)]
                found = {
                    token: which
                    for begin, end, which in reader.spans(tip, "weight_version", first, last)
                    for token in range(begin, end)
                }
                assert found == {token: which for token, which in spans.items() if first <= token < last}

    def test_a_node_and_what_is_said_of_it_come_together(self, home: Home) -> None:
        session = home.session()
        prompt = session.append(session.root, [1, 2, 3], annotations={"loss_mask": [False] * 3})
        with session.draft(prompt) as draft:
            draft.extend([4, 5])
            reply = draft.commit(head="main", annotations={"logprobs": [-1.0, -2.0], "train": False})
        reader = home.again(session)
        assert reader.head("main").node.id == reply.id
        assert set(reader.annotations(reply.id)) == {"logprobs", "train"}
        assert reader.token_values(reply.id, "loss_mask").known.tolist() == [True] * 3 + [False] * 2
        before = all_seen(reader)
        with pytest.raises(OutOfRange):
            reader.append(reply.id, [6], annotations={"logprobs": [1.0, 2.0]})
        assert all_seen(home.again(reader)) == before

    def test_what_is_refused_changes_nothing(self, home: Home) -> None:
        session = home.session()
        node = session.append(session.root, [1, 2, 3])
        session.annotate(node, {"logprobs": np.zeros(3, np.float32), "reward": 1.0})
        session = home.again(session)
        before = all_seen(session)
        for wrong in (
            {"logprobs": np.zeros(3)},
            {"logprobs": np.zeros((3, 2), np.float32)},
            {"logprobs": 1.0},
            {"reward": [1.0] * 3},
        ):
            with pytest.raises(Unsupported):
                session.annotate(node.id, {"new": 1, **wrong})
        with pytest.raises(OutOfRange):
            session.annotate(node.id, {"new": 1, "logprobs": TokenValues(np.zeros(1, np.float32), start=3)})
        with pytest.raises(UnknownNode):
            session.annotate(bytes(32), {"new": 1})
        assert all_seen(session) == before
        assert all_seen(home.again(session)) == before

    def test_what_is_cut_off_inside_a_node_has_what_is_said_of_its_tokens(self, home: Home) -> None:
        session = home.session()
        node = session.append(session.root, range(6))
        session.annotate(node, {"logprobs": np.arange(6.0), "reward": 1.0})
        cut = session.truncate(node, 4)
        shorter = session.truncate(cut, 3)
        session.annotate(cut, {"logprobs": TokenValues([40.0], start=1)})
        expected = {cut.id: [0.0, 40.0, 2.0, 3.0], shorter.id: [0.0, 40.0, 2.0]}
        for reader in home.twice(session):
            for each, values in expected.items():
                assert set(reader.annotations(each)) == {"logprobs"}, "a scalar is of the whole node"
                assert reader.token_values(each, "logprobs").values.tolist() == values
        fork = home.store.fork(home.store.get(session.id), shorter.id, home.name())
        below = fork.append(shorter.id, [7, 8], annotations={"logprobs": [7.0, 8.0]})
        for reader in home.twice(fork):
            assert reader.token_values(below.id, "logprobs").values.tolist() == [*expected[shorter.id], 7.0, 8.0]
        session = home.store.get(session.id)
        session.drop(node.id)
        home.store.gc()
        for reader in home.twice(session):
            for each, values in expected.items():
                assert reader.token_values(each, "logprobs").values.tolist() == values, (
                    "it stays where the node it was cut from goes"
                )
        home.store.drop(session.id)
        home.store.gc()
        assert home.again(fork).token_values(below.id, "logprobs").values.tolist() == [*expected[shorter.id], 7.0, 8.0]

    def test_forks_have_what_is_said_of_their_path_and_go_on_by_themselves(self, home: Home) -> None:
        session = home.session()
        logs = [said(session, conversation())]
        annotate_all(session, logs[0])
        for number, at in enumerate((-2, -3, 2, 0)):
            source = logs[-1]
            fork = home.store.fork(home.store.get(source.session_id), source.ids[at], home.name())
            logs.append(source.forked(source.ids[at], fork))
            if number % 2 == 0:  # the others have what those say that they come from
                annotate_all(fork, logs[-1], seed=100 * number)
            session = home.store.get(source.session_id)
            node = session.append(logs[-1].ids[-1], [number, 1])
            source.add(node.id, logs[-1].ids[-1], Turn((number, 1)))
        for _ in range(2):
            for log in logs:
                check_session(home.store.get(log.session_id), log)
            home.reopen()
        for gone in (1, 0, 1):
            home.store.drop(logs.pop(gone).session_id)
            home.store.gc()
            home.reopen()
            for log in logs:
                check_session(home.store.get(log.session_id), log)

    def test_a_fork_of_a_session_of_another_store_has_them_too(self, home: Home) -> None:
        with SessionStore.in_memory() as other:
            source = other.create("elsewhere", scheme=SCHEME)
            log = said(source, conversation())
            annotate_all(source, log)
            fork = home.store.fork(source, log.ids[-2], home.name())
        log = log.forked(log.ids[-2], fork)
        check_session(fork, log)
        if self.survives_reopen:
            fork.close()
            fork = home.store.get(fork.id)
            check_session(fork, log)
        check_session(home.again(fork), log)

    def test_gc_takes_along_what_is_said_of_nodes_that_go(self, home: Home) -> None:
        session = home.session()
        kept, gone = (session.append(session.root, [number, 1, 2]) for number in range(2))
        for node in (kept, gone):
            session.annotate(node, {"logprobs": [1.0, 2.0, 3.0], "reward": 1.0})
        session.drop(gone)
        home.store.gc()
        session = home.again(session)
        again = session.append(session.root, [1, 1, 2])
        assert again.id == gone.id, "it is the same node"
        for reader in home.twice(session):
            assert reader.annotations(gone.id) == {}, "of which nothing is said any more"
            assert set(reader.annotations(kept.id)) == {"logprobs", "reward"}
        other = reader.append(reader.root, [9, 9, 9], annotations={"reward": 2.0})
        assert home.again(reader).annotations(other.id) == {"reward": 2.0}

    def test_threads_that_annotate_one_node_lose_nothing(self, home: Home) -> None:
        session = home.session()
        node = session.append(session.root, range(WRITERS * EACH))

        def write(number: int) -> None:
            for at in range(EACH):
                token = number * EACH + at
                session.annotate(node, {"logprobs": TokenValues([float(token)], start=token), f"by {number}": at})

        in_threads(WRITERS, write)
        for reader in home.twice(session):
            check_written(reader, node.id)

    def test_processes_that_annotate_one_node_lose_nothing(self, elsewhere: Opener) -> None:
        self.need("many_writers")
        with elsewhere() as store:
            session = store.create("s", scheme="text@hf5")
            node = session.append(session.root, range(WRITERS * EACH)).id
        in_processes(WRITERS, annotate_token_by_token, elsewhere, "s", node, EACH)
        with elsewhere() as store:
            check_written(store.get("s"), node)

    def test_who_annotates_what_another_store_annotated_says_it_over_that(self, home: Home, make_store: Opener) -> None:
        self.need("many_writers")
        here = home.session()
        node = here.append(here.root, range(4))
        there = home.beside(make_store).get(here.id)
        here.annotate(node, {"logprobs": TokenValues([1.0, 1.0], start=0), "by": "here"})
        there.annotate(node.id, {"logprobs": TokenValues([2.0, 2.0], start=1), "by": "there"})
        assert there.token_values(node.id, "logprobs").values.tolist() == [1.0, 2.0, 2.0, 0.0]
        with pytest.raises(Unsupported):
            here.annotate(node, {"by": TokenValues([1], start=0)})
        here.annotate(node, {"logprobs": TokenValues([3.0], start=3)})
        there.refresh()
        for each in (here, there):
            assert each.token_values(node.id, "logprobs").values.tolist() == [1.0, 2.0, 2.0, 3.0]
            assert each.annotations(node.id)["by"] == "there"

    def test_of_a_node_that_was_removed_elsewhere_nothing_is_read(self, home: Home, make_store: Opener) -> None:
        """Whoever has not looked since has its node, and is told; others come under its ordinal, and are not taken for it."""
        self.need("many_writers")
        here = home.session()
        node = here.append(here.root, [1], annotations={"reward": 1.0})
        there = home.beside(make_store).get(here.id)
        assert there.node(node.id).token_ids.tolist() == [1]
        here.drop(node)
        home.store.gc()
        for again in range(2):
            with pytest.raises(UnknownNode):
                there.annotations(node.id)
            if not again:
                after = home.beside(make_store).get(here.id)
                after.append(after.root, [2], annotations={"reward": 2.0})
        there.refresh()
        assert {name: value for each in there.tree for name, value in there.annotations(each).items()} == {"reward": 2.0}


def check_written(session: Session, node: bytes) -> None:
    """Everything is there that writers have said, each of tokens of its own."""
    window = session.token_values(node, "logprobs")
    assert window.known.all() and window.values.tolist() == [float(token) for token in range(WRITERS * EACH)]
    assert {name: each.scalar for name, each in said_of(session, node).items() if name != "logprobs"} == {
        f"by {number}": EACH - 1 for number in range(WRITERS)
    }
