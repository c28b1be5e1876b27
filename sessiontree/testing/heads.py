"""Heads: names that move by compare-and-set."""

from __future__ import annotations

import pytest

from sessiontree import Head, HeadMoved, NameTaken, UnknownHead
from sessiontree.testing.base import Conformance, Home
from sessiontree.testing.model import all_seen


class HeadTests(Conformance):
    def test_a_head_moves_from_where_it_is_said_to_be(self, home: Home) -> None:
        session = home.session()
        one, two, three = (session.append(session.root, [number]) for number in range(3))
        first = session.set_head("main", one, expected=None)
        second = session.set_head("main", two, expected=first)
        third = session.set_head("main", three, expected=two)
        session.set_head("aside", one)
        for reader in home.twice(session):
            assert (reader.head("main").node.id, reader.head("main").version) == (three.id, third.version)
            assert {name: node.id for name, node in reader.heads.items()} == {"main": three.id, "aside": one.id}
            before = all_seen(reader)
            for stale in (first, second, Head(three, first.version), two, one.id):
                with pytest.raises(HeadMoved) as refusal:
                    reader.set_head("main", one.id, expected=stale)
                assert (refusal.value.name, refusal.value.actual) == ("main", third)
            with pytest.raises(NameTaken) as taken:
                reader.set_head("main", one.id, expected=None)
            assert taken.value.actual == third
            with pytest.raises(HeadMoved) as missing:
                reader.set_head("nobody", one.id, expected=one.id)
            assert missing.value.actual is None
            assert all_seen(reader) == before

    def test_there_and_back_again_is_another_version(self, home: Home) -> None:
        session = home.session()
        one, two = (session.append(session.root, [number]) for number in range(2))
        versions = [session.set_head("main", node).version for node in (one, two, one)]
        versions.append(session.set_head("other", two).version)
        again = home.again(session)
        with pytest.raises(HeadMoved):
            again.set_head("main", two.id, expected=Head(one, versions[0]))
        versions += [again.set_head("main", node, expected=node).version for node in (one.id, one.id)]
        assert versions == sorted(set(versions)), "a version never repeats"

    def test_a_head_that_was_dropped_is_free(self, home: Home) -> None:
        session = home.session()
        node = session.append(session.root, [1])
        before = session.set_head("main", node)
        session.drop_head("main")
        for reader in home.twice(session):
            assert dict(reader.heads) == {}
            for act in (lambda: reader.head("main"), lambda: reader.drop_head("main")):  # noqa: B023
                with pytest.raises(UnknownHead):
                    act()
            with pytest.raises(HeadMoved) as refusal:
                reader.set_head("main", node.id, expected=before)
            assert refusal.value.actual is None
            assert reader.node(node.id) == node, "its node stays"
        again = reader.set_head("main", node.id, expected=None)
        assert again.version > before.version

    def test_a_stale_writer_appends_and_is_told_what_is_there(self, home: Home) -> None:
        """D28: a new branch under the old parent always comes to be; the head is another's."""
        session = home.session()
        old = session.append(session.root, [1])
        known = session.set_head("main", old)
        newer = session.set_head("main", session.append(old, [2]), expected=known)
        session = home.again(session)
        mine = session.append(old.id, [3])
        with pytest.raises(HeadMoved) as refusal:
            session.set_head("main", mine, expected=known)
        assert refusal.value.actual == newer
        assert [child.token_ids.tolist() for child in session.children(old.id)] == [[2], [3]]
        session.set_head("main", mine, expected=refusal.value.actual)

    def test_replace_moves_a_head_or_makes_no_branch(self, home: Home) -> None:
        session = home.session()
        prompt = session.append(session.root, [1])
        first = session.append(prompt, [2])
        session.set_head("main", first)
        other = session.replace(first, [3], head="main", expected=first)
        again = home.again(session)
        before = all_seen(again)
        with pytest.raises(HeadMoved):
            again.replace(other.id, [4], head="main", expected=first.id)
        assert all_seen(again) == before
        assert again.head("main").node.id == other.id

    def test_many_heads(self, home: Home) -> None:
        session = home.session()
        nodes = [session.append(session.root, [number]) for number in range(20)]
        named = {f"head {number} ä": nodes[number % 20].id for number in range(60)}
        for name, node in named.items():
            session.set_head(name, node)
        for name in list(named)[::3]:
            session.drop_head(name)
            del named[name]
        assert {name: node.id for name, node in home.again(session).heads.items()} == named
