"""What clients said they did, read from their files, and whether it agrees with what is in the store at the end.

Nothing here asks the library what is right, but for ids, tokens and positions: those are compared with a store in memory in which
the same turns are made, one after the other.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from sessiontree import KeyTaken, Node, Session, SessionStore
from tests.linearizability import NEVER, Call, check
from tests.postgres_clients import NAMES, ROOTS, media_of, nodes_of, place, rules

HEADS: Final[Mapping[str, Any]] = {"set": "set", "cas": "cas", "drop_head": "drop", "read": "read"}
MAKING: Final = ("append", "generate")


class Operation(NamedTuple):
    """One call of a client. ``returned``: NEVER, where nobody knows what became of it. ``error``: what it was refused with."""

    client: str
    made: int
    returned: int
    kind: str
    given: Mapping[str, Any]
    result: Any = None
    error: str | None = None
    said: str = ""

    @property
    def session(self) -> str:
        return str(self.given["session"])

    @property
    def may_have_been_done(self) -> bool:
        return self.error is None or self.returned == NEVER

    @property
    def was_done(self) -> bool:
        return self.error is None and self.returned != NEVER


def operations(logs: Iterable[Path]) -> list[Operation]:
    """All of them, in the order in which they were made. A line that was not written to its end is the last one of its file."""
    found = []
    for log in logs:
        *lines, rest = log.read_bytes().split(b"\n")
        assert not rest, f"{log.name} ends in the middle of a line"
        begun: dict[int, dict[str, Any]] = {}
        ended: dict[int, dict[str, Any]] = {}
        for line in map(json.loads, lines):
            where = begun if "made" in line else ended
            assert line["call"] not in where
            where[line.pop("call")] = line
        for number, given in begun.items():
            end = ended.get(number, {})
            made, kind = given.pop("made"), given.pop("kind")
            unknown = not end or end.get("error") == "StoreFailed"
            returned = NEVER if unknown else end["returned"]
            result = None if unknown else _tuples(end.get("result"))
            found.append(Operation(log.stem, made, returned, kind, given, result, end.get("error"), end.get("said", "")))
    return sorted(found, key=lambda each: each.made)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


class History:
    """What clients did, and the nodes that it makes."""

    def __init__(self, done: Iterable[Operation]) -> None:
        self.done = list(done)
        self.made: dict[tuple[str, bytes], list[Operation]] = defaultdict(list)  # by session and id, what may have made it
        self.nodes: dict[tuple[str, bytes], Node] = {}
        self.drops: dict[str, list[Operation]] = defaultdict(list)
        self.forks: dict[str, list[Operation]] = defaultdict(list)
        self.ends: dict[str, Operation] = {}
        self._replay = SessionStore.in_memory()
        self._parts: dict[str, list[Session]] = {name: [self._replay.create(name, scheme=rules())] for name in ROOTS}
        for each in self.done:
            if not each.may_have_been_done:
                continue
            if each.kind in MAKING:
                self._make(each)
            elif each.kind == "fork":
                self._fork(each)
            elif each.kind == "drop":
                self.drops[each.session].append(each)
            elif each.kind == "drop_session":
                self.ends[each.session] = each

    # The same in memory

    def _part_with(self, session: str, node: bytes) -> Session:
        """Of what was made anew of a session, the part that has a node: two may be told apart by nothing but what a key names."""
        return next(part for part in self._parts[session] if node in part.tree)

    def _make(self, each: Operation) -> None:
        parent = bytes.fromhex(each.given["parent"])
        session = self._part_with(each.session, parent)
        try:
            node = _made_again(session, each)
        except KeyTaken:  # whichever came first in the store has the key
            name = f"{each.session}, {len(self._parts[each.session])}"
            session = self._replay.fork(session, parent, name)
            self._parts[each.session].append(session)
            node = _made_again(session, each)
        self.nodes[each.session, node.id] = node
        self.made[each.session, node.id].append(each)

    def _fork(self, each: Operation) -> None:
        node, name = bytes.fromhex(each.given["node"]), each.given["new"]
        source = self._part_with(each.session, node)
        parts = self._parts.setdefault(name, [])
        part = self._replay.fork(source, node, f"{name}, {len(parts)}")
        parts.append(part)
        self.forks[name].append(each)
        for shared in part.node(node).path()[1:]:
            self.nodes[name, shared.id] = shared
            self.made[name, shared.id].append(each)

    def dropped_by(self, session: str, node: Node) -> list[Operation]:
        """What may have dropped a node: with itself, or with one above it."""
        above = {each.id.hex() for each in node.path()}
        return [each for each in self.drops[session] if each.given["node"] in above]

    # What is compared

    def check_kinds(self) -> None:
        """Nothing was refused without a reason."""
        for each in self.done:
            if each.error is not None and each.returned != NEVER:
                assert self._reason(each), f"refused for nothing: {each}"

    def _reason(self, each: Operation) -> bool:
        end = self.ends.get(each.given.get("session", ""))
        gone = end is not None and end.made < each.returned
        match each.error:
            case "StaleSession" | "UnknownSession":
                return gone
            case "UnknownNode":
                return any(drop.made < each.returned for drop in self._drops_about(each))
            case "KeyTaken":
                key, parent = each.given["key"], bytes.fromhex(each.given["parent"])
                there = [of for of, node in self.nodes.items() if of[0] == each.session and node.key == key]
                taken = (made for of in there if self.nodes[of].path()[-2].id == parent for made in self.made[of])
                return any(other.made < each.returned for other in taken)
            case "NodeHeld":
                return each.kind in ("drop", "drop_session")
            case "Unsupported":  # a node of the path that a fork shares
                return each.kind == "drop" and each.session in self.forks
            case "SessionExists":
                return any(other is not each and other.made < each.returned for other in self.forks[each.given["new"]])
        return False

    def _drops_about(self, each: Operation) -> list[Operation]:
        """What may have dropped the node that an operation is about; of a read, any."""
        nodes = [bytes.fromhex(each.given[name]) for name in ("parent", "node") if name in each.given]
        if not nodes:
            return self.drops[each.session]
        made = [self.nodes[each.session, node] for node in nodes if (each.session, node) in self.nodes]
        return [drop for node in made for drop in self.dropped_by(each.session, node)]

    def check_heads(self, store: SessionStore) -> None:
        """Each session's heads have a history that one client alone could have had, and which ends as the store has it."""
        calls: dict[str, list[Call]] = defaultdict(list)
        for each in self.done:
            if each.kind in HEADS and each.may_have_been_done:
                given = each.given
                what = given["name"], given.get("node"), _tuples(given.get("expected"))
                calls[each.session].append(Call(each.made, each.returned, HEADS[each.kind], *what, each.result))
        end = max((each.made if each.returned == NEVER else each.returned for each in self.done), default=0)
        for session_id in store.sessions():
            session = store.get(session_id)
            for name in NAMES:
                at = place(session.head(name)) if name in session.heads else None
                calls[session_id].append(Call(end + 1, end + 2, "read", name, result=at))
        for history in calls.values():
            _check_versions(history)
            check(history)

    def check_nodes(self, store: SessionStore) -> None:
        """What was acknowledged is there, as it was made; what is there was made by somebody, and is there once."""
        there = set(store.sessions())
        for name in (*ROOTS, *self.forks):
            forks = self.forks.get(name, ())
            if name in there:
                assert name not in self.ends or not self.ends[name].was_done, f"{name!r} was dropped"
                self._check_session(store.get(name))
            else:
                assert name not in ROOTS
                assert name in self.ends or not any(each.was_done for each in forks), f"{name!r} was made, and is not there"
        assert there <= {*ROOTS, *self.forks}

    def _check_session(self, session: Session) -> None:
        stored = nodes_of(session)
        ids = [node.id for node in stored]
        assert max(Counter(ids).values(), default=1) == 1, f"{session!r} shows a node twice"
        for node in stored:
            again = self.nodes.get((session.id, node.id))
            assert again is not None, f"nobody made {node!r} of {session!r}"
            assert outline(node) == outline(again)
        keyed = Counter((node.parent, node.key) for node in stored if node.key is not None)
        assert max(keyed.values(), default=1) == 1, f"{session!r} has two nodes of one key"
        shown = set(ids)
        for (name, node_id), made in self.made.items():
            if name != session.id:
                continue
            drops = self.dropped_by(name, self.nodes[name, node_id])
            last = max((each.made for each in made if each.was_done), default=-1)
            if last >= 0 and all(drop.returned < last for drop in drops):
                assert node_id in shown, f"{node_id.hex()} of {name!r} was acknowledged: {made}"
            first = min((drop.made for drop in drops if drop.was_done), default=-1)
            if all(each.returned < first for each in made):
                assert node_id not in shown, f"{node_id.hex()} of {name!r} was dropped: {drops}"

    def check_order(self, session: Session) -> None:
        """Nodes stand in an order in which they were acknowledged, where nothing was dropped and made again."""
        if self.drops[session.id]:
            return
        latest = -1  # when one that stands before this was made at the earliest
        for node in nodes_of(session):
            made = self.made[session.id, node.id]
            assert min(each.returned for each in made) >= latest, f"{node!r} stands behind one that was made after it"
            latest = max(latest, min(each.made for each in made))

    def check_pins(self, store: SessionStore) -> None:
        """A node is pinned as whoever made it said last: nobody else does."""
        last: dict[tuple[str, str], list[Operation]] = defaultdict(list)
        for each in self.done:
            if each.kind in ("pin", "unpin") and each.may_have_been_done:
                of = last[each.session, each.given["node"]]
                of[:] = [each] if each.returned != NEVER else [*of, each]
        for session_id in store.sessions():
            pins = {pin.hex() for pin in store.get(session_id).pins}
            for (name, node), said in last.items():
                if name == session_id:
                    may = {each.kind == "pin" for each in said} | ({False} if said[0].returned == NEVER else set())
                    assert (node in pins) in may, f"{said[-1].kind} was acknowledged last: {said}"
            assert pins <= {node for name, node in last if name == session_id}

    def check_aliases(self, store: SessionStore) -> None:
        """An alias names what it named first."""
        for alias in {each.given["alias"] for each in self.done if each.kind == "alias"}:
            said = [each for each in self.done if each.kind == "alias" and each.given["alias"] == alias]
            names = {each.result for each in said if each.was_done}
            assert len(names) <= 1, f"{alias!r} names {names}"
            if names:
                assert {store.aliased_media(alias).hex()} == names, f"{alias!r} does not name {names}"
                assert names <= {each.given["identity"] for each in said}, f"nobody named {alias!r} {names}"

    def check_all(self, store: SessionStore) -> None:
        """Whether all of it agrees with a store that was connected after the end."""
        self.check_kinds()
        self.check_heads(store)
        self.check_nodes(store)
        for name in store.sessions():
            self.check_order(store.get(name))
        self.check_pins(store)
        self.check_aliases(store)


def _check_versions(history: Iterable[Call]) -> None:
    """No version was given out twice."""
    moves = (call for call in history if call.returned != NEVER and call.kind in ("set", "cas") and call.result[0] != "moved")
    twice = [version for version, count in Counter(call.result[1] for call in moves).items() if count > 1]
    assert not twice, f"versions {twice} were given out twice"


def _made_again(session: Session, each: Operation) -> Node:
    given = each.given
    parent, tokens = bytes.fromhex(given["parent"]), given["tokens"]
    if each.kind == "append":
        node = session.append(parent, tokens, media=media_of(given["image"], tokens), key=given["key"])
    else:
        draft = session.draft(parent, key=given["key"])
        draft.extend(tokens)
        node = draft.commit("stop")
    assert each.result in (None, node.id.hex()), f"in memory it is {node!r}: {each}"
    return node


def outline(node: Node) -> tuple[Any, ...]:
    """All that a node says of itself."""
    parent = None if node.parent is None else node.parent.id
    media = [(item.identity, start, stop) for item, start, stop in node.media_spans(node.start, node.stop)]
    positions = np.asarray(node.positions(node.start, node.stop))
    says = (node.depth, node.start, node.stop, node.origin, node.role, node.finish_reason, node.key)
    return parent, *says, bytes(np.asarray(node.token_ids)), media, positions.tobytes(), positions.shape, node.next_position
