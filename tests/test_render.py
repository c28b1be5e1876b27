"""Pictures of a tree, read back: text by its rails and its grammar, HTML by parsers, DOT by a strict reader and by Graphviz."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import time
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html.parser import HTMLParser
from typing import Any, NamedTuple
from xml.etree import ElementTree

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sessiontree import FinishRefused, Node, OutOfRange, Session, SessionStore, SessionTree, SessionTreeError, UnknownNode
from sessiontree.errors import NeedsExtra
from sessiontree.render import to_dot, to_html, to_networkx, to_text
from tests import toy

SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"
HOSTILE = [
    "<script>alert(1)</script>",
    "</pre><img src=x onerror=alert(1)>",
    "&lt;b&gt; &amp;quot; &#60;",
    "\"double\" 'single' `back`",
    "two\nlines\r\nand\x85more\u2028still\u2029more\v\f",
    "\x00\x07\x08\x1b[31mred\x1b[0m\x9b1m\x7f",
    "\u202egnp.exe\u202c \u2066isolate\u2069 \u200f\u061c\u200e",
    'back\\slash \\n \\N \\G \\l \\" \\',
    "] ; } digraph { a -> b [label=x]",
    "├─● 00000000 forged\n○ 11111111 [0, 1)",
    "stop, heads ← main",
    "x" * 5_000,
    "long and\tspaced " * 500,
    "zero\u200bwidth\ufeff\u00ad\U000e0041",
    "",
    " ",
    "שלום",
    "e\u0301\u0302\u0303",
    "image 1 of 2 …(5,000 characters)",
]


def generated(session: Session, parent: Node, length: int, reason: str = "stop", **metadata: Any) -> Node:
    draft = session.draft(parent, metadata=metadata)
    draft.extend([7] * length)
    return draft.commit(reason)


class Conversation(NamedTuple):
    session: Session
    system: Node
    user: Node
    call: Node
    tool: Node
    samples: list[Node]
    other: Node
    cut: Node
    rewritten: Node

    @property
    def nodes(self) -> list[Node]:
        return list(self.session.tree)


def conversation() -> Conversation:
    """A question with an image, a tool call, three samples; another answer; an answer cut short; a rewritten tool result."""
    session = toy.new_session()
    system = session.append(session.root, [1, 2, 3], role="system")
    user = session.append(system, toy.a_turn().tokens, media=toy.media(toy.a_turn()))
    call = generated(session, user, 20, "tool_calls", tool_calls=["call_1", "call_2"])
    tool = session.append(call, [4] * 5, role="tool", metadata={"tool_call_id": "call_1"})
    samples = [generated(session, tool, length) for length in (3, 4, 5)]
    other = generated(session, user, 9, "length")
    cut = session.truncate(call, user.stop + 2)
    rewritten = session.rewrite(tool, [(tool.start, tool.stop, [9, 9])])
    session.set_head("main", samples[2])
    session.set_head("best", samples[2])
    session.set_head("an <i>other", other)
    return Conversation(session, system, user, call, tool, samples, other, cut, rewritten)


# --- reading pictures -------------------------------------------------------------------------------------------------
class Drawn(NamedTuple):
    """What a text picture says. Ids are short."""

    above: dict[str, str | None]  # the node that each one is drawn under
    order: list[str]
    columns: dict[str, int]
    lines: dict[str, str]  # id to what stands on its line, id included
    hidden: dict[str, int]  # how many are said not to be shown below a node
    total: tuple[int, int] | None  # how many of how many, says the last line

    def children(self, of: str) -> list[str]:
        return [name for name in self.order if self.above[name] == of]


LINE = re.compile(
    r"(?P<rail>(?:│ |  )*)(?P<fork>├─|└─)?(?:(?P<mark>[●○]) (?P<rest>(?P<id>[0-9a-f]{8}) .*)|⋮ (?P<gap>[\d,]+) nodes? not shown)"
)
TOTAL = re.compile(r"([\d,]+) of ([\d,]+) nodes? not shown")


def number(text: str) -> int:
    return int(text.replace(",", ""))


def read(text: str) -> Drawn:
    """Read a picture back by its rails alone, and check that every rail leads somewhere and every branch has one."""
    assert text.split("\n") == text.splitlines()
    drawn = Drawn({}, [], {}, {}, {}, None)
    last: list[str] = []  # the last node in each column up to here
    rails: list[tuple[int, str, bool]] = []  # (line, the node a rail comes from, whether it goes on)
    lowest: dict[str, int] = {}  # the last line that hangs on a node
    for at, line in enumerate(text.split("\n")):
        if found := TOTAL.fullmatch(line):
            drawn = drawn._replace(total=(number(found[1]), number(found[2])))
            continue
        assert drawn.total is None, "the total is the last line"
        match = LINE.fullmatch(line)
        assert match, line
        cells = [match["rail"][i] for i in range(0, len(match["rail"]), 2)] + ([match["fork"][0]] if match["fork"] else [])
        column = len(cells)
        rails += [(at, last[i], cell in "│├") for i, cell in enumerate(cells)]
        if match["gap"]:
            assert not match["fork"]
            assert drawn.order[-1] == last[column]
            drawn.hidden[last[column]] = number(match["gap"])
            continue
        name, fork = match["id"], bool(match["fork"])
        parent = last[column - 1] if fork else last[column] if last else None
        assert name not in drawn.above
        drawn.above[name] = parent
        drawn.order.append(name)
        drawn.columns[name] = column
        drawn.lines[name] = match["rest"]
        assert (match["mark"] == "●") == (" generated [" in match["rest"])
        if parent is not None:
            lowest[parent] = at
        last[column:] = [name]
    assert all(goes_on == (lowest.get(origin, -1) > at) for at, origin, goes_on in rails)
    return drawn


class Page(HTMLParser):
    """Tags balanced, none but the few there should be, no attribute that loads or runs anything."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.text = ""
        self.titles: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open
        assert ElementTree.fromstring(html).tag == "div"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert (tag, sorted(given)) in [("div", ["dir"]), ("pre", ["style"]), ("span", ["style"]), ("span", ["title"]), ("b", [])]
        assert not re.search(r"url|#|rgb|expression|@", given.get("style") or "")
        if title := given.get("title"):
            assert re.fullmatch("[0-9a-f]{64}", title)
            self.titles.append(title)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError("a comment")

    def handle_decl(self, decl: str) -> None:
        raise AssertionError("a declaration")

    def unknown_decl(self, data: str) -> None:
        raise AssertionError("a declaration")

    def handle_pi(self, data: str) -> None:
        raise AssertionError("an instruction")


TOKEN = re.compile(r'\s*(?:("(?:[^"\\\n]|\\[^\n])*")|([A-Za-z_]\w*)|(->|[{}\[\]=,;]))')


class Dot(NamedTuple):
    nodes: dict[str, dict[str, str]]
    edges: list[tuple[str, str, dict[str, str]]]


def read_dot(source: str) -> Dot:
    """A strict reader of the part of DOT that is used: quoted names, one edge a statement, no subgraphs."""
    tokens, at = [], 0
    while at < len(source.rstrip()):
        match = TOKEN.match(source, at)
        assert match, source[at : at + 80]
        tokens.append(match[0].strip())
        at = match.end()
    stream = iter(tokens)
    assert [next(stream) for _ in range(3)] == ["digraph", "sessiontree", "{"]
    found = Dot({}, [])
    while (name := next(stream)) != "}":
        names, attributes = [name], {}
        token = next(stream)
        if token == "->":
            names.append(next(stream))
            token = next(stream)
        if token == "[":
            while token != "]":
                key, equals, value, token = next(stream), next(stream), next(stream), next(stream)
                assert re.fullmatch(r"\w+", key)
                assert (equals, token) in [("=", ","), ("=", "]")]
                assert re.match(r'["\w]', value)
                assert key not in attributes
                attributes[key] = value
            token = next(stream)
        assert token == ";"
        if names == ["node"]:
            continue
        assert all(name[0] == '"' and re.fullmatch(r"[\w ]+", name[1:-1]) for name in names)
        if len(names) == 2:
            found.edges.append((names[0][1:-1], names[1][1:-1], attributes))
        else:
            assert names[0][1:-1] not in found.nodes
            found.nodes[names[0][1:-1]] = attributes
    assert next(stream, None) is None
    return found


def label_lines(value: str) -> list[str]:
    """What Graphviz shows of a quoted label."""
    assert value[0] == value[-1] == '"'
    pieces = re.findall(r"\\.|[^\\]", value[1:-1])
    assert set(piece for piece in pieces if piece[0] == "\\") <= {"\\\\", '\\"', "\\n"}
    shown = "".join({"\\\\": "\\", '\\"': '"', "\\n": "\n"}.get(piece, piece) for piece in pieces)
    assert "&" not in shown.replace("&amp;", "")
    return shown.replace("&amp;", "&").split("\n")


NAME = r"""\u2068?(?:[\w.:/@+#-]+|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\u2069?(?:…\([\d,]+ characters\))?"""
NAMES = rf"{NAME}(?: {NAME})*(?: … [\d,]+ more)?"
FACTS = re.compile(
    rf"(?P<id>[0-9a-f]{{8}}) (?:root of {NAME}|(?P<role>{NAME}))(?P<generated> generated)? \[(?P<start>\d+), (?P<stop>\d+)\) "
    rf"(?P<count>[\d,]+) tokens?(?P<media>(?:, \d+ (?:image|video|audio)s?)*)(?:, finish_reason=(?P<finish_reason>{NAME}))?"
    rf"(?:, tool_calls=(?P<tool_calls>{NAMES}))?(?:, tool_call_id=(?P<tool_call_id>{NAMES}))?"
    r"(?P<links>(?:, (?:derived_from|prefix_of)=[0-9a-f]{8})*)(?:, parent (?P<parent>[0-9a-f]{8}) not shown)?"
    rf"(?: ← (?P<heads>{NAMES}))?"
)


def unwritten(name: str | None) -> tuple[str, int] | None:
    """The text that a name was written for: as much as is there, and how long it was."""
    if name is None:
        return None
    match = re.fullmatch(r"\u2068?(.*?)\u2069?(?:…\(([\d,]+) characters\))?", name)
    assert match
    text = ast.literal_eval(match[1]) if match[1][0] in "'\"" else match[1]
    return text, number(match[2]) if match[2] else len(text)


def written(text: str | None) -> tuple[str, int] | None:
    return None if text is None else (text[:40], len(text))


def names_of(listed: str | None) -> tuple[list[tuple[str, int] | None], int]:
    """The texts of a list, and how many it had."""
    if listed is None:
        return [], 0
    more = re.search(r" … ([\d,]+) more\Z", listed)
    names = [unwritten(name) for name in re.findall(NAME, listed[: more.start()] if more else listed)]
    return names, len(names) + (number(more[1]) if more else 0)


def check_facts(line: str, node: Node, heads: Sequence[str], shown: set[Node]) -> None:
    """A line says just what there is to say of its node."""
    facts = FACTS.fullmatch(line)
    assert facts, line
    assert facts["id"] == short(node)
    assert unwritten(facts["role"]) == written(node.role)
    assert bool(facts["generated"]) == (node.origin == "generated")
    assert (int(facts["start"]), int(facts["stop"]), number(facts["count"])) == (node.start, node.stop, len(node))
    assert sum(map(int, re.findall(r"\d+", facts["media"]))) == len(node.media)
    assert unwritten(facts["finish_reason"]) == written(node.finish_reason)
    for key in ("tool_calls", "tool_call_id"):
        value = node.metadata.get(key, ())
        ids = value if isinstance(value, tuple) else (value,)
        if all(isinstance(entry, str) for entry in ids):
            assert names_of(facts[key]) == ([written(entry) for entry in ids[:8]], len(ids))
    assert facts["links"] == "".join(f", {link.kind}={link.node_id[:4].hex()}" for link in node.links)
    assert facts["parent"] == (None if node.parent is None or node.parent in shown else short(node.parent))
    assert names_of(facts["heads"]) == ([written(name) for name in heads[:8]], len(heads))


def chosen(nodes: Sequence[Node], heads: Iterable[Node], max_nodes: int) -> set[Node]:
    """Which nodes are to be shown, said in another way: everything in order of preference, cut off."""
    order = [nodes[0]]
    tips = sorted(set(heads), key=nodes.index, reverse=True)
    steps = max((tip.depth for tip in tips), default=0) + 1
    order += [tip.ancestor(tip.depth - step) for step in range(steps) for tip in tips if step <= tip.depth]
    order += [node for newest in reversed(nodes) for node in reversed(newest.path())]
    return set(list(dict.fromkeys(order))[:max_nodes])


def short(node: Node) -> str:
    return node.id[:4].hex()


def check(nodes: Sequence[Node], heads: Mapping[str, Node], max_nodes: int) -> Drawn:
    """Everything that holds of the pictures of any tree."""
    text = to_text(nodes, heads, max_nodes=max_nodes)
    for line in text.split("\n"):
        assert all(character.isprintable() or character in "\u2068\u2069" for character in line)
        isolates = re.sub("[^\u2068\u2069]", "", line)
        assert isolates == "\u2068\u2069" * (len(isolates) // 2)
        outside = re.sub("\u2068[^\u2068\u2069]*\u2069", "", line)
        assert not any(unicodedata.bidirectional(character) in ("R", "AL", "AN") for character in outside)
        assert len(line) < 3_000
    drawn = read(text)

    shown = chosen(nodes, heads.values(), max_nodes)
    assert set(drawn.order) == set(map(short, shown))
    hidden: dict[str, int] = {}
    for node in nodes:
        above = node.parent
        while above is not None and above not in shown:
            above = above.parent
        if node in shown:
            assert drawn.above[short(node)] == (above and short(above))
            check_facts(drawn.lines[short(node)], node, sorted(name for name, head in heads.items() if head == node), shown)
        else:
            assert above is not None
            hidden[short(above)] = hidden.get(short(above), 0) + 1
    assert drawn.hidden == hidden
    assert drawn.total == ((sum(hidden.values()), len(nodes)) if hidden else None)
    assert len(drawn.order) + sum(drawn.hidden.values()) == len(nodes)

    page = Page(to_html(nodes, heads, max_nodes=max_nodes))
    assert page.text == text
    assert [title[:8] for title in page.titles] == drawn.order
    assert set(page.titles) == {node.id.hex() for node in shown}
    return drawn


def check_graphs(nodes: Sequence[Node], heads: Mapping[str, Node]) -> None:
    """DOT and networkx have every node, edge, link and head."""
    ids = [node.id.hex() for node in nodes]
    family = [(node.parent.id.hex(), node.id.hex()) for node in nodes if node.parent is not None]
    links = [(node.id.hex(), link.node_id.hex(), link.kind) for node in nodes for link in node.links]
    stubs = {target for _, target, _ in links} - set(ids)

    source = to_dot(nodes, heads)
    dot = read_dot(source)
    assert source.isprintable() or not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e]", source)
    assert list(dot.nodes)[: len(ids)] == ids
    lines = read(to_text(nodes, {}, max_nodes=len(nodes))).lines
    assert [", ".join(label_lines(dot.nodes[name]["label"])) for name in ids] == [lines[name[:8]] for name in ids]
    assert [dot.nodes[node.id.hex()].get("style") == "rounded" for node in nodes] == [n.origin == "generated" for n in nodes]
    styles = [(edge, attributes) for *edge, attributes in dot.edges]
    assert [tuple(edge) for edge, attributes in styles if not attributes] == family
    dashed = [(*edge, label_lines(attributes["label"])[0]) for edge, attributes in styles if attributes.get("style") == "dashed"]
    assert dashed == links
    others = {name: attributes for name, attributes in dot.nodes.items() if name not in ids}
    dotted = {name: label_lines(attributes["label"]) for name, attributes in others.items() if attributes.get("style") == "dotted"}
    assert dotted == {name: [name[:8]] for name in stubs}
    at_heads = [(name, attributes) for name, attributes in others.items() if attributes.get("shape") == "plaintext"]
    pointing = {source: target for (source, target), attributes in styles if attributes.get("arrowhead") == "open"}
    assert [pointing[name] for name, _ in at_heads] == [heads[name].id.hex() for name in sorted(heads)]
    assert all(len(label_lines(attributes["label"])) == 1 for _, attributes in at_heads)
    assert len(dot.nodes) == len(ids) + len(stubs) + len(heads)
    assert len(dot.edges) == len(family) + len(links) + len(heads)

    graph = to_networkx(nodes, heads)
    assert list(graph) == ids
    edges = list(graph.edges(keys=True))
    assert all(graph.edges[edge]["kind"] == edge[2] for edge in edges)
    assert sorted(edges) == sorted(
        [(*edge, "child") for edge in family] + list(dict.fromkeys(link for link in links if link[1] not in stubs))
    )
    children = graph.edge_subgraph([edge for edge in edges if edge[2] == "child"])
    assert len(nodes) == 1 or (len(children) == len(nodes) and networkx.is_arborescence(children))
    for node in nodes:
        own = graph.nodes[node.id.hex()]
        assert own.pop("heads") == sorted(name for name, head in heads.items() if head == node)
        assert own.pop("node") is node
        assert own.pop("num_media") == len(node.media)
        assert own == {name: getattr(node, name) for name in ("depth", "start", "stop", "role", "origin", "finish_reason")}


# --- examples ---------------------------------------------------------------------------------------------------------
def test_a_conversation_as_text() -> None:
    talk = conversation()
    drawn = check(talk.nodes, talk.session.heads, 200)
    root, samples = short(talk.session.root), talk.samples
    assert drawn.total is None
    assert [drawn.lines[short(node)] for node in (talk.session.root, talk.system, talk.user, talk.call, talk.tool)] == [
        f"{root} root of qwen2_5_vl@sglang [0, 0) 0 tokens",
        f"{short(talk.system)} system [0, 3) 3 tokens",
        f"{short(talk.user)} user [3, 12) 9 tokens, 1 image",
        f"{short(talk.call)} assistant generated [12, 32) 20 tokens, finish_reason=tool_calls, tool_calls=call_1 call_2",
        f"{short(talk.tool)} tool [32, 37) 5 tokens, tool_call_id=call_1",
    ]
    assert [drawn.lines[short(node)] for node in (samples[2], talk.other, talk.cut, talk.rewritten)] == [
        f"{short(samples[2])} assistant generated [37, 42) 5 tokens, finish_reason=stop ← best main",
        f"{short(talk.other)} assistant generated [12, 21) 9 tokens, finish_reason=length ← 'an <i>other'",
        f"{short(talk.cut)} assistant generated [12, 14) 2 tokens, tool_calls=call_1 call_2, prefix_of={short(talk.call)}",
        f"{short(talk.rewritten)} tool [32, 34) 2 tokens, tool_call_id=call_1, derived_from={short(talk.tool)}",
    ]
    # Straight down where nothing forks, and where the most comes below a fork; siblings in commit order.
    assert [drawn.columns[short(node)] for node in (talk.system, talk.user, talk.call, talk.tool)] == [0, 0, 0, 0]
    assert [drawn.columns[short(node)] for node in (*samples, talk.other, talk.cut, talk.rewritten)] == [1] * 6
    assert drawn.children(short(talk.user)) == [short(talk.other), short(talk.cut), short(talk.call)]
    assert drawn.children(short(talk.tool)) == list(map(short, samples))
    assert drawn.children(short(talk.call)) == [short(talk.rewritten), short(talk.tool)]


def test_the_whole_picture() -> None:
    session = toy.new_session()
    first = session.append(session.root, [1])
    early = generated(session, first, 2)
    late = generated(session, session.append(early, [2]), 3, "length")
    again = generated(session, first, 1)
    session.set_head("main", late)
    ids = {name: short(node) for name, node in [("r", session.root), ("f", first), ("e", early), ("l", late), ("a", again)]}
    assert to_text(tuple(session.tree), session.heads) == "\n".join(
        [
            f"○ {ids['r']} root of qwen2_5_vl@sglang [0, 0) 0 tokens",
            f"○ {ids['f']} user [0, 1) 1 token",
            f"├─● {ids['a']} assistant generated [1, 2) 1 token, finish_reason=stop",
            f"● {ids['e']} assistant generated [1, 3) 2 tokens, finish_reason=stop",
            f"○ {short(late.parent or late)} user [3, 4) 1 token",
            f"● {ids['l']} assistant generated [4, 7) 3 tokens, finish_reason=length ← main",
        ]
    )
    assert to_text(tuple(session.tree), session.heads, max_nodes=3) == "\n".join(
        [
            f"○ {ids['r']} root of qwen2_5_vl@sglang [0, 0) 0 tokens",
            "⋮ 3 nodes not shown",
            f"○ {short(late.parent or late)} user [3, 4) 1 token, parent {ids['e']} not shown",
            f"● {ids['l']} assistant generated [4, 7) 3 tokens, finish_reason=length ← main",
            "3 of 6 nodes not shown",
        ]
    )


def test_the_newest_heads_come_first_and_what_is_below_them_is_counted() -> None:
    root, first, second, *below = grown([0, 0, 1, 2, 2])
    nodes = [root, first, second, *below]
    heads = {"a": first, "b": second}
    assert read(to_text(nodes, heads, max_nodes=2)).order == [short(root), short(second)]
    assert to_text(nodes, heads, max_nodes=3).split("\n")[1:] == [
        f"├─○ {short(first)} user [0, 1) 1 token ← a",
        "│ ⋮ 1 node not shown",
        f"└─○ {short(second)} user [0, 1) 1 token ← b",
        "  ⋮ 2 nodes not shown",
        "3 of 6 nodes not shown",
    ]
    for max_nodes in range(1, 8):
        check(nodes, heads, max_nodes)


def test_a_conversation_as_graphs() -> None:
    talk = conversation()
    check_graphs(talk.nodes, talk.session.heads)
    graph = to_networkx(talk.nodes, talk.session.heads)
    assert graph.nodes[talk.samples[2].id.hex()]["heads"] == ["best", "main"]
    assert graph.nodes[talk.user.id.hex()]["num_media"] == 1
    cut = graph.edges[talk.cut.id.hex(), talk.call.id.hex(), "prefix_of"]
    assert cut == {"kind": "prefix_of", "reused_tokens": talk.cut.stop}


def test_media_are_counted_by_modality() -> None:
    session = toy.new_session()
    segment = toy.turn(*toy.shown(toy.image()), *toy.shown(toy.video()), *toy.shown(toy.image(number=1)))
    node = session.append(session.root, segment.tokens, media=toy.media(segment))
    assert ", 2 images, 1 video" in check(tuple(session.tree), {}, 9).lines[short(node)]


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"tool_calls": "call_1"}, ["tool_calls=call_1"]),
        ({"tool_calls": []}, []),
        ({"tool_calls": None, "tool_call_id": None}, []),
        (
            {"tool_calls": [{"id": "a", "type": "function"}, {"name": "no id"}, 7, b"raw"]},
            ["tool_calls=a '<NoneType>' 7 '<bytes>'"],
        ),
        ({"tool_calls": {"id": "one"}}, ["tool_calls=one"]),
        ({"tool_calls": {f"call_{at}" for at in range(8)}}, [f"tool_calls={' '.join(f'call_{at}' for at in range(8))}"]),
        ({"tool_calls": [f"c{at}" for at in range(2_000)]}, [f"tool_calls={' '.join(f'c{at}' for at in range(8))} … 1,992 more"]),
        ({"tool_calls": ["one two"], "tool_call_id": "x"}, ["tool_calls='one two'", "tool_call_id=x"]),
        ({"tool_call_id": ["x", "y"]}, ["tool_call_id=x y"]),
        ({"tool_calls": ["a, tool_call_id=b", "\n"]}, [r"tool_calls='a, tool_call_id=b' '\n'"]),
    ],
)
def test_tool_calls_however_they_are_recorded(metadata: dict[str, Any], expected: list[str]) -> None:
    session = toy.new_session()
    node = session.append(session.root, [1], metadata=metadata)
    line = check(tuple(session.tree), {}, 9).lines[short(node)]
    assert line == ", ".join([f"{short(node)} user [0, 1) 1 token", *expected])


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_users_breaks_no_picture(text: str) -> None:
    session = toy.new_session()
    node = session.append(session.root, [1], role=text, metadata={"tool_calls": [text, {"id": text}], "tool_call_id": text})
    try:
        node = generated(session, node, 2, text, tool_calls=text)
    except FinishRefused:
        assert not text
    session.set_head(text, node)
    session.set_head("main", node)
    nodes = tuple(session.tree)
    check(nodes, session.heads, 200)
    check_graphs(nodes, session.heads)


def test_names_as_they_are_written() -> None:
    session = toy.new_session()
    names = {
        "user": "user",
        "a/b:c.d@e+f#g-h_1": "a/b:c.d@e+f#g-h_1",
        "rôle": "rôle",
        "": "''",
        "it's": '"it\'s"',
        "a\nb\x1b\u202e\\": r"'a\nb\x1b\u202e\\'",
        "ש": "\u2068ש\u2069",
        "x" * 40: "x" * 40,
        "x" * 1_041: "x" * 40 + "…(1,041 characters)",
        "\t" * 41: "'" + r"\t" * 40 + "'…(41 characters)",
    }
    for name, written in names.items():
        node = session.append(session.root, [1], role=name)
        assert read(to_text(tuple(session.tree), {})).lines[short(node)] == f"{short(node)} {written} [0, 1) 1 token"


def test_many_heads_are_counted() -> None:
    session = toy.new_session()
    heads = {f"h{at:04}": session.root for at in range(1_200)}
    line = read(to_text(tuple(session.tree), heads)).lines[short(session.root)]
    assert line.endswith(" ← h0000 h0001 h0002 h0003 h0004 h0005 h0006 h0007 … 1,192 more")
    assert len(read_dot(to_dot(tuple(session.tree), heads)).nodes) == 1_201
    assert len(to_networkx(tuple(session.tree), heads).nodes[session.root.id.hex()]["heads"]) == 1_200


def test_links_that_lead_out_of_a_fork_are_stubs() -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme="text@sglang")
    user = session.append(session.root, [1, 2, 3])
    reply = session.append(user, [4, 5, 6])
    rewritten = session.append(session.rewrite(reply, [(4, 5, [8])]), [7])
    fork = store.fork(session, rewritten, "fork")
    nodes = tuple(fork.tree)
    targets = {link.node_id for node in nodes for link in node.links}
    assert targets - {node.id for node in nodes}
    check(nodes, {}, 200)
    check_graphs(nodes, {"main": rewritten})


def test_a_part_of_a_tree() -> None:
    session = toy.new_session()
    top = session.append(session.root, [1])
    nodes = [top, session.append(top, [2]), session.append(top, [3])]
    assert read(to_text(nodes, {})).lines[short(top)] == f"{short(top)} user [0, 1) 1 token, parent {short(session.root)} not shown"
    assert networkx.is_arborescence(to_networkx(nodes, {}))
    assert (to_text([], {}), len(read_dot(to_dot([], {})).nodes), len(to_networkx([], {}))) == ("", 0, 0)
    assert Page(to_html([], {})).text == ""


def test_pictures_do_not_depend_on_the_order_of_heads() -> None:
    talk = conversation()
    nodes, heads = talk.nodes, dict(talk.session.heads)
    backward = dict(reversed(heads.items()))
    for limit in range(1, len(nodes) + 1):
        assert to_text(nodes, heads, max_nodes=limit) == to_text(tuple(nodes), backward, max_nodes=limit)
    assert to_dot(nodes, heads) == to_dot(tuple(nodes), backward)


def test_what_cannot_be_drawn_is_refused() -> None:
    session, other = toy.new_session(), toy.new_session()
    one = session.append(session.root, [1])
    two = session.append(one, [2])
    foreign = other.append(other.root, [9])
    for picture in (to_text, to_html, to_dot, to_networkx):
        with pytest.raises(UnknownNode, match=r"head '<b>\\n' is at"):
            picture([session.root, one], {"<b>\n": foreign})
        with pytest.raises(UnknownNode, match="not among the nodes before it"):
            picture([session.root, two, one], {})
        with pytest.raises(UnknownNode, match="not among the nodes before it"):
            picture([one, session.root], {})
    for draw in (to_text, to_html):
        for limit in (0, -1, -(10**5_000)):
            with pytest.raises(OutOfRange, match="max_nodes"):
                draw([session.root], {}, max_nodes=limit)
        for wrong in (1.5, "3", None, True):
            with pytest.raises(TypeError):
                draw([session.root], {}, max_nodes=wrong)  # type: ignore[arg-type]
        assert short(session.root) in draw([session.root], {}, max_nodes=10**100)


def test_networkx_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "networkx", None)
    with pytest.raises(NeedsExtra, match=r"pip install 'sessiontree\[networkx\]'") as caught:
        to_networkx(tuple(toy.new_session().tree), {})
    assert isinstance(caught.value, SessionTreeError) and isinstance(caught.value, ImportError)
    assert caught.value.extra == "networkx"


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_graphviz_shows_what_was_meant() -> None:
    session = toy.new_session()
    for at, text in enumerate(HOSTILE):
        session.append(session.root, [at], role=text, metadata={"tool_call_id": text})
        session.set_head(text, session.root)
    source = to_dot(tuple(session.tree), session.heads)
    done = subprocess.run(["dot", "-Tsvg"], input=source.encode(), capture_output=True, check=True, timeout=60)
    assert not re.search("rror", done.stderr.decode())
    texts = {}
    for group in ElementTree.fromstring(done.stdout).iter("{http://www.w3.org/2000/svg}g"):
        if group.get("class") == "node":
            name = group.findtext("{http://www.w3.org/2000/svg}title") or ""
            texts[name] = [(text.text or "").replace("\xa0", " ") for text in group.findall("{http://www.w3.org/2000/svg}text")]
    assert texts == {name: label_lines(attributes["label"]) for name, attributes in read_dot(source).nodes.items()}


# --- any tree ---------------------------------------------------------------------------------------------------------
def texts() -> st.SearchStrategy[str]:
    return (
        st.sampled_from(HOSTILE)
        | st.sampled_from(["user", "tool"])
        | st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
    )


@st.composite
def trees(draw: st.DrawFn) -> tuple[tuple[Node, ...], dict[str, Node]]:
    session = toy.new_session()
    nodes = [session.root]
    for at in range(draw(st.integers(0, 24))):
        parent = nodes[draw(st.integers(max(0, len(nodes) - 4), len(nodes) - 1) | st.integers(0, len(nodes) - 1))]
        metadata = draw(st.fixed_dictionaries({}, optional={"tool_calls": st.lists(texts(), max_size=2), "tool_call_id": texts()}))
        kind = draw(st.sampled_from(["append", "append", "decode", "decode", "truncate", "rewrite"]))
        if kind == "truncate" and parent.stop > parent.start:
            session.truncate(parent, draw(st.integers(parent.start, parent.stop)))
        elif kind == "rewrite" and parent.stop > 0:
            start = draw(st.integers(0, parent.stop - 1))
            session.rewrite(parent, [(start, start + 1, [1_000 + at])])
        elif kind == "append":
            session.append(parent, [at, at, 3][: draw(st.integers(1, 3))], role=draw(texts()), metadata=metadata)
        else:
            draft = session.draft(parent, metadata=metadata)
            draft.extend([at] * draw(st.integers(1, 3)))
            try:
                draft.commit(draw(texts()))
            except FinishRefused:
                draft.commit()
        nodes = list(session.tree)
    for name in draw(st.lists(texts(), max_size=4)):
        session.set_head(name, draw(st.sampled_from(nodes)))
    return tuple(nodes), dict(session.heads)


@settings(max_examples=150 if SOAK else 60, deadline=None)
@given(trees(), st.integers(1, 6) | st.integers(1, 30))
def test_any_tree(tree: tuple[tuple[Node, ...], dict[str, Node]], max_nodes: int) -> None:
    nodes, heads = tree
    check(nodes, heads, max_nodes)
    check(nodes, heads, len(nodes))
    check_graphs(nodes, heads)


# --- size -------------------------------------------------------------------------------------------------------------
DEPTH = 100_000
WIDTH = 10_000


@pytest.fixture(scope="module", autouse=True)
def default_recursion_limit() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1_000)
    yield
    sys.setrecursionlimit(before)


def grown(parents: Iterable[int]) -> list[Node]:
    """A tree: for each node behind the root, which node is its parent."""
    tree = SessionTree("text@sglang")
    nodes = [tree.root]
    for at, parent in enumerate(parents):
        tree, node = tree.append(nodes[parent], [at])
        nodes.append(node)
    return nodes


def test_d31_pictures_of_a_chain_of_100_000_turns() -> None:
    nodes = grown(range(DEPTH))
    heads = {"main": nodes[-1], "middle": nodes[DEPTH // 2]}
    began = time.perf_counter()
    text = to_text(nodes, heads)
    drawn = read(text)
    ends = [*range(DEPTH // 2 - 98, DEPTH // 2 + 1), *range(DEPTH - 99, DEPTH + 1)]
    assert set(drawn.order) == {short(nodes[at]) for at in [0, *ends]}
    assert drawn.total == (DEPTH + 1 - 200, DEPTH + 1)
    assert sum(drawn.hidden.values()) == drawn.total[0]
    assert len(text) < 20_000
    assert Page(to_html(nodes, heads)).text == text

    whole = to_text(nodes, heads, max_nodes=DEPTH + 1).split("\n")
    assert len(whole) == DEPTH + 1
    assert all(line.startswith(f"○ {short(node)} ") for line, node in zip(whole, nodes, strict=True))
    assert to_html(nodes, heads, max_nodes=DEPTH + 1).count("\n") == DEPTH
    assert to_dot(nodes, heads).count(" -> ") == DEPTH + 2
    graph = to_networkx(nodes, heads)
    assert (len(graph), graph.number_of_edges()) == (DEPTH + 1, DEPTH)
    assert networkx.is_arborescence(graph)
    assert time.perf_counter() - began < 30


def test_d31_pictures_of_10_000_children() -> None:
    nodes = grown([0] * WIDTH)
    drawn = read(to_text(nodes, {"first": nodes[1]}))
    assert drawn.order == [short(nodes[at]) for at in (0, 1, *range(WIDTH - 197, WIDTH + 1))]
    assert drawn.hidden == {short(nodes[0]): WIDTH + 1 - 200}
    assert drawn.total == (WIDTH + 1 - 200, WIDTH + 1)
    whole = read(to_text(nodes, {}, max_nodes=WIDTH + 1))
    assert whole.order == [short(node) for node in nodes]
    assert set(whole.columns.values()) == {0, 1}
    assert to_dot(nodes, {}).count(" -> ") == WIDTH
    assert networkx.is_arborescence(to_networkx(nodes, {}))


def test_d31_indentation_stays_small_however_often_a_path_forks() -> None:
    comb = [at - at % 2 for at in range(2 * WIDTH)]  # two answers to every turn, and the second goes on
    binary = [at // 2 for at in range(2**13 - 2)]
    for parents, indented in ((comb, 1), (binary, 12)):
        nodes = grown(parents)
        drawn = read(to_text(nodes, {}, max_nodes=len(nodes)))
        assert max(drawn.columns.values()) == indented
        assert len(drawn.order) == len(nodes)
        assert drawn.total is None
