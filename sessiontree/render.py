"""Pictures of a tree: text for terminals, HTML for notebooks, DOT for Graphviz, a graph for networkx.

All of them take plain values: ``nodes``, every node of a tree in commit order (the first is the top, each other one comes behind
its parent), and ``heads``, nodes by name. The same values give the same picture. Nothing recurses, nothing reads tokens, and the
work is O(nodes + what is written). A parent, or a head's node, that is not among ``nodes`` raises UnknownNode.

Text that users wrote (roles, heads, finish reasons, tool ids) stands as it is where it looks like a name. Anything else is
written as Python writes it, in quotes, with every control, format and bidi character escaped; what runs from right to left is
isolated from what stands beside it; what is long is cut, and says so. So no text breaks a line or passes for another fact.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final, Protocol
from unicodedata import bidirectional

from pyrsistent import PMap

from sessiontree.details import Details, Link
from sessiontree.errors import NeedsExtra, OutOfRange, UnknownNode
from sessiontree.media import MediaItem
from sessiontree.node import Node
from sessiontree.positions import PositionScheme
from sessiontree.tokens import as_index, shown

MAX_NAME: Final = 40  # characters of a name that are shown, and
MAX_NAMES: Final = 8  # names of a list: whatever a node carries, its line stays readable
_PLAIN: Final = re.compile(r"[\w.:/@+#-]+")  # letters and digits of any script


class Told(Protocol):
    """What :func:`_facts` says something of: a node, or what is known of one."""

    @property
    def id(self) -> bytes: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def role(self) -> str | None: ...
    @property
    def origin(self) -> str: ...
    @property
    def media(self) -> tuple[MediaItem, ...]: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def links(self) -> tuple[Link, ...]: ...
    @property
    def scheme(self) -> PositionScheme: ...
    @property
    def _details(self) -> Details: ...
    def __len__(self) -> int: ...


def to_text(nodes: Sequence[Node], heads: Mapping[str, Node], *, max_nodes: int = 200) -> str:
    """The tree in lines, one for each node: ``●`` generated, ``○`` input; ``←`` names its heads.

    A turn stands straight below the one before. Where a path forks, branches are indented, in commit order; the one with the most
    nodes comes last and goes straight on (the newest of equals; a leaf is indented as its siblings are). So n nodes are never
    indented more than log2(n) + 1 times.

    At most ``max_nodes`` nodes are shown: the top; the heads' nodes and, in step with each other, what leads up to them; then the
    newest nodes with what leads up to them. ``⋮`` below a node counts those that are not shown between it and the next, or beside
    those; the last line counts all of them. A node whose parent is not shown names it. Raises OutOfRange below 1.
    """
    return "\n".join(rail + facts + names for rail, facts, names, _ in _rows(nodes, heads, max_nodes))


def to_html(nodes: Sequence[Node], heads: Mapping[str, Node], *, max_nodes: int = 200) -> str:
    """The lines of :func:`to_text` as a piece of HTML: no scripts, nothing from elsewhere, colours of the page it stands in."""
    style = "color:inherit;background:none;white-space:pre;overflow-x:auto;line-height:1.3"
    lines = []
    for rail, facts, names, node in _rows(nodes, heads, max_nodes):
        line = f'<span style="opacity:.6">{escape(rail)}</span>' if rail else ""
        line += escape(facts) if node is None else f'<span title="{node.id.hex()}">{escape(facts)}</span>'
        lines.append(f"{line}<b>{escape(names)}</b>" if names else line)
    return f'<div dir="ltr"><pre style="{style}">' + "\n".join(lines) + "</pre></div>"


def to_dot(nodes: Sequence[Node], heads: Mapping[str, Node]) -> str:
    """The whole tree for Graphviz, every node and every head of it.

    Nodes are named by their ids in hex; generated ones are rounded. Edges from parent to child are solid, links dashed and
    labelled with their kind; a link's target that is not among ``nodes`` is a dotted stub. Heads are nodes without a border.
    """
    parents, _ = _places(nodes, heads)
    names = [f'"{node.id.hex()}"' for node in nodes]
    known = set(names)
    lines = ["digraph sessiontree {", "  node [shape=box];"]
    for node, name in zip(nodes, names, strict=True):
        style = ", style=rounded" if node.origin == "generated" else ""
        lines.append(f"  {name} [label={_quoted(*_facts(node))}{style}];")
    lines += [f"  {names[parent]} -> {name};" for parent, name in zip(parents[1:], names[1:], strict=True)]
    for node, name in zip(nodes, names, strict=True):
        for link in node.links:
            target = f'"{link.node_id.hex()}"'
            if target not in known:
                known.add(target)
                lines.append(f"  {target} [label={_quoted(_short(link.node_id))}, style=dotted];")
            lines.append(f"  {name} -> {target} [style=dashed, constraint=false, label={_quoted(link.kind)}];")
    for number, (head, node) in enumerate(sorted(heads.items())):
        lines.append(f'  "head {number}" [shape=plaintext, label={_quoted(_name(head))}];')
        lines.append(f'  "head {number}" -> "{node.id.hex()}" [arrowhead=open];')
    return "\n".join([*lines, "}", ""])


def to_networkx(nodes: Sequence[Node], heads: Mapping[str, Node]) -> Any:
    """A ``networkx.MultiDiGraph`` of the whole tree. Raises NeedsExtra where networkx is not installed.

    A node is ``node.id.hex()`` with attributes depth, start, stop, role, origin, finish_reason, num_media, heads (names, sorted)
    and node (the Node). An edge has a kind, which is its key too: "child" from a parent to its child; "derived_from" and
    "prefix_of" from a node to what it was made from, with reused_tokens. It is a multigraph because a link may join two nodes
    that another edge joins already. A link to what is not among ``nodes`` makes no edge: it is in ``node.links``.
    """
    try:
        import networkx  # noqa: PLC0415
    except ImportError as error:
        raise NeedsExtra(f"to_networkx needs networkx: pip install 'sessiontree[networkx]' ({error})", extra="networkx") from error
    parents, heads_at = _places(nodes, heads)
    graph = networkx.MultiDiGraph()
    for at, node in enumerate(nodes):
        own = {name: getattr(node, name) for name in ("depth", "start", "stop", "role", "origin", "finish_reason")}
        graph.add_node(node.id.hex(), **own, num_media=len(node.media), heads=heads_at.get(at, []), node=node)
    for parent, node in zip(parents[1:], nodes[1:], strict=True):
        graph.add_edge(nodes[parent].id.hex(), node.id.hex(), key="child", kind="child")
    for node in nodes:
        for kind, node_id, reused_tokens in node.links:
            if node_id.hex() in graph:
                graph.add_edge(node.id.hex(), node_id.hex(), key=kind, kind=kind, reused_tokens=reused_tokens)
    return graph


def _places(nodes: Sequence[Node], heads: Mapping[str, Node]) -> tuple[list[int], dict[int, list[str]]]:
    """Where in ``nodes`` each one's parent is (the top's own: 0), and the names of the heads there are at each place."""
    found: dict[bytes, int] = {}
    parents = []
    for at, node in enumerate(nodes):
        parent = 0 if at == 0 else found.get(node.parent.id) if node.parent is not None else None
        if parent is None:
            raise UnknownNode(f"the parent of {node!r} is not among the nodes before it", node_id=node.id)
        parents.append(parent)
        found[node.id] = at
    heads_at: dict[int, list[str]] = {}
    for name, node in sorted(heads.items()):
        if node.id not in found:
            raise UnknownNode(f"head {_name(name)} is at {node!r}, which is not among the nodes", node_id=node.id)
        heads_at.setdefault(found[node.id], []).append(name)
    return parents, heads_at


def _chosen(parents: Sequence[int], heads_at: Iterable[int], max_nodes: int) -> set[int]:
    """Which nodes are shown. See :func:`to_text`."""
    chosen = {0}
    upward = deque(sorted(heads_at, reverse=True))
    while upward and len(chosen) < max_nodes:
        at = upward.popleft()
        if at not in chosen:
            chosen.add(at)
            upward.append(parents[at])
    for newest in reversed(range(len(parents))):
        at = newest
        while at not in chosen and len(chosen) < max_nodes:
            chosen.add(at)
            at = parents[at]
    return chosen


def _rows(nodes: Sequence[Node], heads: Mapping[str, Node], max_nodes: int) -> list[tuple[str, str, str, Node | None]]:
    """The lines of a tree, top first: what is drawn before a node, its facts, its heads, the node; None where it only counts."""
    if (max_nodes := as_index(max_nodes, "max_nodes")) < 1:
        raise OutOfRange(f"max_nodes is 1 or more, not {shown(max_nodes)}", value=max_nodes, limit=1)
    parents, heads_at = _places(nodes, heads)
    chosen = _chosen(parents, heads_at, max_nodes)
    nearest = list(range(len(nodes)))  # itself if it is shown, else the nearest node above that is
    hidden, weight = [0] * len(nodes), [1] * len(nodes)
    below: dict[int, list[int]] = {}
    for at in range(1, len(nodes)):
        above = nearest[parents[at]]
        if at in chosen:
            below.setdefault(above, []).append(at)
        else:
            nearest[at] = above
            hidden[above] += 1
    for at in reversed(range(1, len(nodes))):
        if at in chosen:
            weight[nearest[parents[at]]] += weight[at]

    rows: list[tuple[str, str, str, Node | None]] = []
    waiting = [(0, "", "")] if nodes else []  # a node, its own rail, and that of what comes below it
    while waiting:
        at, own, rail = waiting.pop()
        node = nodes[at]
        facts = _facts(node)
        if node.parent is not None and (at == 0 or parents[at] not in chosen):
            facts.append(f"parent {_short(node.parent.id)} not shown")
        names = f" ← {_listed(heads_at[at])}" if at in heads_at else ""
        rows.append((own + ("● " if node.origin == "generated" else "○ "), ", ".join(facts), names, node))
        if hidden[at]:
            rows.append((rail + "⋮ ", f"{_count(hidden[at], 'node')} not shown", "", None))
        branches = below.get(at, [])
        if branches:
            last = max(branches, key=lambda branch: (weight[branch], branch))
            leaves = len(branches) > 1 and weight[last] == 1
            waiting.append((last, rail + "└─", rail + "  ") if leaves else (last, rail, rail))
            waiting += [(branch, rail + "├─", rail + "│ ") for branch in reversed(branches) if branch != last]
    if any(hidden):
        rows.append(("", f"{sum(hidden):,} of {_count(len(nodes), 'node')} not shown", "", None))
    return rows


def _facts(node: Told) -> list[str]:
    """All that is said of a node besides its heads; the first entry says which it is, what and where."""
    role = f"root of {_name(node.scheme.name)}" if node.role is None else _name(node.role)
    origin = " generated" if node.origin == "generated" else ""
    facts = [f"{_short(node.id)} {role}{origin} [{node.start}, {node.stop}) {_count(len(node), 'token')}"]
    facts += [_count(number, modality) for modality, number in Counter(item.modality for item in node.media).items()]
    if node.finish_reason is not None:
        facts.append(f"finish_reason={_name(node.finish_reason)}")
    metadata = node._details.metadata  # node.metadata is a copy of all of it
    for key in ("tool_calls", "tool_call_id"):
        if ids := _tool_ids(metadata.get(key)):
            facts.append(f"{key}={_listed(ids)}")
    facts += [f"{link.kind}={_short(link.node_id)}" for link in node.links]
    return facts


def _tool_ids(value: Any) -> list[str]:
    """Ids of tool calls, however they were recorded: one or many, as text or as mappings with an id."""
    if isinstance(value, frozenset):
        return sorted(map(_tool_id, value))  # a set has another order in another process
    return [] if value is None else list(map(_tool_id, value if isinstance(value, tuple) else (value,)))


def _tool_id(value: Any) -> str:
    if isinstance(value, PMap):
        value = value.get("id")
    return value if isinstance(value, str) else str(value) if isinstance(value, (int, float)) else f"<{type(value).__name__}>"


def _short(node_id: bytes) -> str:
    return node_id[:4].hex()


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _listed(names: Sequence[str]) -> str:
    more = f" … {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else ""
    return " ".join(map(_name, names[:MAX_NAMES])) + more


def _name(text: str, limit: int = MAX_NAME) -> str:
    """A user's text as part of a line."""
    start = text[:limit]
    name = start if _PLAIN.fullmatch(start) else repr(start)
    name = _isolated(name)
    return name if len(text) <= limit else f"{name}…({len(text):,} characters)"


def _isolated(text: str) -> str:
    """Text that may run from right to left as part of a line: digits and brackets beside it stay where they are."""
    if not text.isascii() and any(bidirectional(character) in ("R", "AL", "AN") for character in text):
        return f"\u2068{text}\u2069"  # first strong isolate, pop
    return text


def _quoted(*lines: str) -> str:
    """A label for DOT: there a backslash escapes, and entities as in HTML are read even between quotes."""
    escaped = (line.replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;") for line in lines)
    return '"' + "\\n".join(escaped) + '"'
