"""Rollouts: the paths of a store that a trainer may learn from, one by one, by group, and shared out over ranks.

A rollout is the path to a node that has no child, with something generated on it. A path with a node that is annotated
``train=False`` is none. Nothing is opened for it: trees are looked at as they are when their turn comes, one session at a time, and
of a session on disk only the nodes of the path in hand are held. So a store may be larger than memory.

All rollouts of one prompt go to one rank, which follows from the prompt's id alone: the same for any order of sessions, on any
store, whatever else is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from hashlib import sha256
from typing import Any, Final, Protocol

import attrs

from sessiontree.annotations import REWARD, TRAIN, Annotation, rejects
from sessiontree.errors import OutOfRange, UnknownNode, UnknownSession, Unsupported
from sessiontree.node import Node
from sessiontree.tree import SessionTree

__all__ = ["Group", "Rollout", "groups", "rollouts", "sample_siblings"]

_DRAWN_BYTES: Final = 8


class Sessions(Protocol):
    """A SessionStore."""

    def sessions(self) -> tuple[str, ...]: ...
    def tree(self, session_id: str, /) -> SessionTree: ...


class OneSession(Protocol):
    """A Session, or one of a bundle."""

    @property
    def id(self) -> str: ...
    @property
    def tree(self) -> SessionTree: ...


Source = Sessions | OneSession


@attrs.frozen(eq=False)
class Rollout:
    """One path to learn from.

    ``session_id``: whose it is. ``tree``: what its annotations are read from. ``node``: its last node. ``prompt``: the last node
    before anything was generated on the path: what samples of one task share. ``reward``: what ``node`` is annotated with, None
    where it is not.
    """

    session_id: str
    tree: SessionTree
    node: Node
    prompt: Node
    reward: float | None

    @property
    def completions(self) -> tuple[Node, ...]:
        """The generated nodes of its path, in order."""
        return tuple(node for node in self.node.path() if node.origin == "generated")


@attrs.frozen(eq=False)
class Group:
    """The rollouts of one prompt, as GRPO compares them. ``prompt_id``: the prompt node's id, in whatever sessions it is."""

    prompt_id: bytes
    rollouts: tuple[Rollout, ...]


def rollouts(
    source: Source,
    *,
    where: Callable[[Rollout], object] | None = None,
    least_reward: float | None = None,
    most_reward: float | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[Rollout]:
    """Rollouts of a store or a session, in the order in which sessions and their last nodes were made.

    ``where``: keeps those for which it is true. ``least_reward``, ``most_reward``: both inclusive; with either, rollouts without a
    reward are left out. ``rank`` of ``world_size``: the share that this process gets; over all ranks each rollout comes once.
    What a fork shares with the session it was forked from comes in both where it ends in both: a fork without turns of its own is
    the path it was forked at.

    A session that is dropped before its turn comes has none. Raises OutOfRange for a rank that is none; Unsupported where a reward
    is no number or ``train`` no bool; CorruptTree, StoreFailed.
    """
    if isinstance(rank, bool) or not 0 <= rank < world_size:
        raise OutOfRange(f"rank {rank} of {world_size}", value=rank, limit=world_size)
    return _chosen(_found(source, rank, world_size), where, least_reward, most_reward)


def _chosen(
    found: Iterable[Rollout], where: Callable[[Rollout], object] | None, least: float | None, most: float | None
) -> Iterator[Rollout]:
    for rollout in found:
        if least is not None or most is not None:
            reward = rollout.reward
            if reward is None or not (least is None or reward >= least) or not (most is None or reward <= most):
                continue
        if where is None or where(rollout):
            yield rollout


def groups(source: Source, *, least: int = 1, rank: int = 0, world_size: int = 1) -> Iterator[Group]:
    """Rollouts by prompt, those of many sessions together, in the order in which the first of each was made.

    ``least``: groups of fewer are left out. A first pass over the store notes where the rollouts of each prompt are, some hundred
    bytes for each; a second reads a group at a time, without those that were dropped in between. Raises what :func:`rollouts`
    raises.
    """
    places: dict[bytes, list[tuple[str, bytes]]] = {}
    for rollout in rollouts(source, rank=rank, world_size=world_size):
        places.setdefault(rollout.prompt.id, []).append((rollout.session_id, rollout.node.id))
    return _groups(source, places, least)


def _groups(source: Source, places: dict[bytes, list[tuple[str, bytes]]], least: int) -> Iterator[Group]:
    known: tuple[str, SessionTree] | None = None
    for prompt_id, found in places.items():
        if len(found) < least:
            continue
        made = []
        for session_id, node_id in found:
            with suppress(UnknownSession, UnknownNode):
                if known is None or known[0] != session_id:
                    known = session_id, _tree_of(source, session_id)
                tree = known[1]
                node = tree.node(node_id)
                made.append(
                    Rollout(session_id, tree, node, _prompt_of(node) or tree.root, _reward(tree.annotation(node, REWARD), node))
                )
        if made and len(made) >= least:
            yield Group(prompt_id, tuple(made))


def sample_siblings(tree: SessionTree, node: Node | bytes, count: int, *, seed: int = 0) -> tuple[Node, ...]:
    """``count`` siblings of a node, or all where there are fewer, drawn without replacement; those with ``train=False`` never.

    What is drawn follows from the seed and the ids alone: the same in any process and in any order of commits. In commit order.
    Raises UnknownNode, OutOfRange for a count below 0, Unsupported where ``train`` is no bool.
    """
    if count < 0:
        raise OutOfRange(f"{count} siblings cannot be drawn", value=count, limit=0)
    never = tree.annotated(TRAIN)
    found = [other for other in tree.siblings(node) if not rejects(never.get(other.id), other.id)]
    salt = b"siblings %d " % seed
    drawn = {other.id for other in sorted(found, key=lambda other: sha256(salt + other.id).digest())[:count]}
    return tuple(other for other in found if other.id in drawn)


def _found(source: Source, rank: int, world_size: int) -> Iterator[Rollout]:
    for session_id in (source.id,) if hasattr(source, "id") else source.sessions():
        try:
            tree = _tree_of(source, session_id)
        except UnknownSession:  # it was dropped since they were listed
            continue
        never = frozenset(node_id for node_id, train in tree.annotated(TRAIN).items() if rejects(train, node_id))
        rewards = tree.annotated(REWARD)
        for node in tree._index.leaves(tree._count):
            prompt = _prompt_of(node)
            if prompt is None or int.from_bytes(prompt.id[:_DRAWN_BYTES]) % world_size != rank:
                continue
            if never and any(each.id in never for each in node.path()):
                continue
            yield Rollout(session_id, tree, node, prompt, _reward(rewards.get(node.id), node))


def _tree_of(source: Any, session_id: str) -> SessionTree:
    found: SessionTree = source.tree if hasattr(source, "id") else source.tree(session_id)
    return found


def _prompt_of(node: Node) -> Node | None:
    """The node above the first that was generated on a path; None where nothing was."""
    return next((each.parent for each in node.path() if each.origin == "generated"), None)


def _reward(value: Annotation | None, node: Node) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unsupported(f"the reward of {node!r} is {value!r}, which is no number")
    return float(value)
