"""Whether a store that many processes write is sound, and what it is made of: :func:`fsck_shared` and :func:`stats_shared`.

The reports are those of stores on disk. What there is no such thing here, segments, sidecars, torn commits, is 0 or empty.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from sessiontree.backends.base import Progress
from sessiontree.backends.shared import Backend
from sessiontree.fsck.report import Damage, Finding, Report
from sessiontree.fsck.shared_survey import HeldAnnotation, HeldSession, Key, SharedSurvey
from sessiontree.fsck.stats import SessionStats, Stats


class _Judged:
    """What follows: which nodes are lost, and what names them."""

    def __init__(self, found: SharedSurvey) -> None:
        self.found = found
        self.children: defaultdict[Key, list[Key]] = defaultdict(list)
        self.lost: set[Key] = set()
        for session in found.sessions.values():
            for ordinal in session.nodes:
                self.children[session.above(ordinal)].append((session.number, ordinal))
        found.damaged += list(self._nodes())
        found.dangling += [*self._orphans(), *self._refs()]

    def _nodes(self) -> Iterator[Damage]:
        for session in self.found.sessions.values():
            for ordinal, node in sorted(session.nodes.items()):
                if node.why is not None:
                    what = f"node {ordinal} of {session.whose()}: {node.why}"
                    yield Damage(what, session_id=session.name, node_id=node.id, dependents=self._below((session.number, ordinal)))

    def _orphans(self) -> Iterator[Finding]:
        """Nodes whose parent is nowhere."""
        for session in self.found.sessions.values():
            for ordinal, node in sorted(session.nodes.items()):
                above, key = session.above(ordinal), (session.number, ordinal)
                if above[1] and self.found.find(above) is None and key not in self.lost:
                    what = f"node {above[1]} of {session.whose()} is missing"
                    yield Finding(what, session_id=session.name, node_id=node.id, dependents=(node.id, *self._below(key)))

    def _below(self, key: Key) -> tuple[bytes, ...]:
        """A node is lost: the ids of those below it that were not before, in forks too."""
        self.lost.add(key)
        ids: list[bytes] = []
        waiting = list(self.children.get(key, ()))
        while waiting:
            below = waiting.pop()
            node = self.found.find(below)
            if below in self.lost or node is None or node.why is not None:  # what is damaged itself comes on its own
                continue
            self.lost.add(below)
            ids.append(node.id)
            waiting += self.children.get(below, ())
        return tuple(dict.fromkeys(ids))

    def _refs(self) -> Iterator[Finding]:
        for session in self.found.sessions.values():
            if session.gone:
                continue
            for head in session.heads:
                if head.ordinal is not None and (how := self._how(session, head.ordinal)):
                    what = f"head {head.name!r} of {session.whose()} is at node {head.ordinal}, which {how}"
                    yield Finding(what, session_id=session.name, node_id=self.found.id_of(session.key(head.ordinal)))
            for pin in session.pins:
                if not pin.pinned:
                    continue
                how = self._how(session, pin.ordinal)
                if not how and self.found.id_of(session.key(pin.ordinal)) not in (pin.id, None):
                    how = "is another"
                if how:
                    what = f"a pin of {session.whose()} is at node {pin.ordinal}, which {how}"
                    yield Finding(what, session_id=session.name, node_id=pin.id)

            for said in session.annotations:
                if how := self._how_said(session, said):
                    what = f"annotation {said.name!r} of {session.whose()} is of node {said.ordinal}, which {how}"
                    yield Finding(what, session_id=session.name, node_id=said.id)

    def _how_said(self, session: HeldSession, said: HeldAnnotation) -> str | None:
        """Why nothing can be said so of a node. One that was dropped takes what is said of it along when it is removed."""
        key = session.key(said.ordinal)
        node = self.found.find(key)
        if key[1] and node is None:
            return "is missing"
        if self.found.id_of(key) not in (said.id, None):
            return "is another"
        if (node is None or node.why is None) and said.stop > (0 if node is None else node.stop - node.start):
            return "has fewer tokens"
        return None

    def _how(self, session: HeldSession, ordinal: int) -> str | None:
        """Why no head can be there."""
        key = session.key(ordinal)
        node = self.found.find(key)
        if key[1] and node is None:
            return "is missing"
        if node is not None and node.why is not None:
            return "is damaged"
        if key in self.lost:
            return "rests on damage"
        return "was dropped" if ordinal in session.dropped else None


def fsck_shared(backend: Backend, *, progress: Progress | None = None) -> Report:
    """As :func:`~sessiontree.fsck.fsck`, of a store that many processes write, beside them. ``progress``: is told of sessions.

    ``path``: where it is; ``bytes``: of records and features; ``misleading``: rows that say otherwise than the records they are
    for, where the record can be read all the same. Nodes take some 300 bytes of memory each. Raises StoreFailed.
    """
    found = SharedSurvey(backend, progress)
    _Judged(found)
    shown = [session for session in found.sessions.values() if not session.gone]
    named = [alias for alias in found.aliases if alias.identity is not None]
    features = [row for row in found.features if row.rpartition("/")[2] not in found.contents]
    aliases = [alias.alias for alias in named if alias.identity not in found.identities]
    unreachable = [Finding("features that no node names", row) for row in features]
    unreachable += [Finding(f"alias {alias!r} of media that no node names") for alias in aliases]
    sessions = found.sessions.values()
    heads = [head for session in shown for head in session.heads if head.ordinal is not None]
    pins = [pin for session in shown for pin in session.pins if pin.pinned]
    nodes = sum(len(session.nodes) for session in sessions)
    refs = sum(len(session.heads) + len(session.pins) + len(session.annotations) for session in sessions)
    return Report(
        path=backend.where,
        bytes=sum(_bytes(found).values()),
        records=len(found.sessions) + nodes + refs + len(found.aliases),
        sessions=len(shown),
        nodes=nodes,
        heads=len(heads),
        pins=len(pins),
        aliases=len(named),
        features=len(found.features),
        unknown_records=found.unknown,
        repeated=0,
        torn_bytes=0,
        unreadable_bytes=0,
        damaged=tuple(found.damaged),
        dangling=tuple(found.dangling),
        wrong_ordinals=tuple(found.wrong),
        misleading=tuple(found.misleading),
        unreachable=tuple(unreachable),
        strays=tuple(found.strays),
    )


def _bytes(found: SharedSurvey) -> dict[str, int]:
    """Of records and features, by kind."""
    sessions = found.sessions.values()
    refs: Counter[str] = Counter()
    for session in sessions:
        refs.update(session.ref_bytes)
    return {
        "session": sum(session.nbytes for session in sessions),
        "node": sum(node.nbytes for session in sessions for node in session.nodes.values()),
        "head": refs["head"],
        "alias": found.alias_bytes,
        "pin": refs["pin"],
        "drop": refs["drop"],
        "annotation": refs["annotation"],
        "features": sum(sum(sizes.values()) for sizes in found.features.values()),
    }


def stats_shared(backend: Backend, *, progress: Progress | None = None) -> Stats:
    """As :func:`~sessiontree.fsck.stats`, of a store that many processes write: bytes of records, not of tables and indexes."""
    found = SharedSurvey(backend, progress)
    judged = _Judged(found)
    sessions = found.sessions.values()

    def behind(keys: list[Key]) -> set[Key]:
        reached: set[Key] = set()
        for at in keys:
            key = at
            while key[1] and key not in reached and (node := found.find(key)) is not None:
                reached.add(key)
                key = found.sessions[key[0]].key(node.parent)
        return reached

    shown = [session for session in sessions if not session.gone]
    forked = behind([session.path[-1] for session in shown if len(session.path) > 1])
    held = behind(
        [session.key(head.ordinal) for session in shown for head in session.heads if head.ordinal is not None]
        + [session.key(pin.ordinal) for session in shown for pin in session.pins if pin.pinned]
    )
    sound = {
        (session.number, ordinal)
        for session in sessions
        for ordinal in session.nodes
        if (session.number, ordinal) not in judged.lost
        and ((session.number, ordinal) in forked or not (session.gone or ordinal in session.dropped))
    }
    reached = (forked | held) & sound
    by_kind = _bytes(found)
    sizes = {key: found.sessions[key[0]].nodes[key[1]].nbytes for key in sound}
    named = sum(sum(each.values()) for row, each in found.features.items() if row.rpartition("/")[2] in found.contents)
    kept = [session for session in sessions if not session.gone or any(key[0] == session.number for key in forked)]
    live = sum(sizes[key] for key in reached) + named + found.alias_bytes + sum(session.nbytes for session in kept)
    live += sum(session.ref_bytes[kind] for session in shown for kind in ("head", "pin", "drop"))
    live -= sum(session.spent_bytes for session in shown)
    loose = sum(size for key, size in sizes.items() if key not in reached)
    annotations = 0
    for session in kept:
        for said in session.annotations:
            key = session.key(said.ordinal)
            annotations += key in sound or not (key[1] or session.gone)
            live += said.nbytes if key in reached or not key[1] else 0
            loose += said.nbytes if key in sound - reached else 0
    depths: dict[Key, int] = {}
    children: Counter[Key] = Counter()
    parents: set[Key] = set()
    for key in sorted(sound):
        session = found.sessions[key[0]]
        above = session.above(key[1])
        at = session.nodes[key[1]].parent
        depths[key] = (at if at < len(session.path) else depths.get(above, 0)) + 1
        children[above if above[1] else (key[0], 0)] += 1  # each session has a root
        if above[0] == key[0]:
            parents.add(above)
    leaves = sound - parents
    listed = [_session_stats(found, session, sound, leaves, depths) for session in kept]
    stops = {key: found.sessions[key[0]].nodes[key[1]].stop for key in leaves}
    tokens = sum(each.tokens for each in listed)
    path_tokens = sum(stops.values())
    return Stats(
        path=backend.where,
        bytes=by_kind,
        live=live,
        loose=loose,
        dead=sum(by_kind.values()) - live - loose,
        nodes=len(sound),
        leaves=len(leaves),
        tokens=tokens,
        path_tokens=path_tokens,
        dedupe_ratio=path_tokens / max(tokens, 1) if path_tokens else 1.0,
        depth_max=max(depths.values(), default=0),
        depth_mean=sum(depths.values()) / len(depths) if depths else 0.0,
        fan_out_max=max(children.values(), default=0),
        fan_out_mean=sum(children.values()) / len(children) if children else 0.0,
        annotations=annotations,
        sessions=tuple(listed),
    )


def _session_stats(
    found: SharedSurvey, session: HeldSession, sound: set[Key], leaves: set[Key], depths: Mapping[Key, int]
) -> SessionStats:
    own = [(session.number, ordinal) for ordinal in session.nodes if (session.number, ordinal) in sound]
    tip = None if session.record is None else session.record.tip
    source = None if tip is None else found.sessions.get(tip[0])
    return SessionStats(
        session.name or "",
        len(own),
        sum(key in leaves for key in own),
        sum(session.nodes[ordinal].stop - session.nodes[ordinal].start for _, ordinal in own),
        sum(session.nodes[ordinal].nbytes for _, ordinal in own),
        max((depths[key] for key in own), default=0),
        sum(head.ordinal is not None for head in session.heads),
        None if source is None else source.name,
    )
