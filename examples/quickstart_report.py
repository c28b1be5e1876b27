"""What the quickstart compares in each turn, and how it shows that."""

from collections.abc import Mapping
from dataclasses import dataclass

from qwen_reference import MERGE, Picture, tokenizer
from rich import box
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from sessiontree import Node, Session

TOLERANCE = 1e-3


@dataclass(frozen=True)
class Comparison:
    """One turn, held against the replay of its whole history."""

    step: str
    fed: int  # tokens the model ran over
    total: int  # tokens of the path, the reply included
    same_ids: bool
    logit_difference: float
    same_positions: bool
    earlier_nodes: int
    unchanged: bool  # all earlier nodes
    session_us: float
    bridge_us: float
    model_ms: float

    @property
    def passed(self) -> bool:
        return self.same_ids and self.logit_difference < TOLERANCE and self.same_positions and self.unchanged


def verdict(good: bool, text: str, otherwise: str | None = None) -> Text:
    return Text(text, style="green") if good else Text(otherwise or text, style="bold red")


def draw_table(comparisons: list[Comparison]) -> Table:
    table = Table(
        title="Each turn against transformers' replay of its whole history",
        caption="fed: tokens the model ran over (a reply's last one waits, what is preempted counts twice).\n"
        "µs: sums of single calls between runs of the model, so with cold CPU caches.",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("turn", no_wrap=True)
    headings = ["fed/all", "ids", "logit\ndiff.", "posi-\ntions", "earlier\nnodes", "session\nµs", "bridge\nµs", "model\nms"]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in comparisons:
        table.add_row(
            row.step,
            f"{row.fed}/{row.total}",
            verdict(row.same_ids, "equal", "DIFFER"),
            verdict(row.logit_difference < TOLERANCE, f"{row.logit_difference:.1e}"),
            verdict(row.same_positions, "equal", "DIFFER"),
            verdict(row.unchanged, f"{row.earlier_nodes} same", "CHANGED"),
            f"{row.session_us:,.0f}",
            f"{row.bridge_us:,.0f}",
            f"{row.model_ms:.1f}",
        )
    return table


def draw_tree(session: Session, pictures: Mapping[bytes, Picture]) -> Tree:
    """Role, token range, id, pictures and heads of every node."""
    heads: dict[bytes, list[str]] = {}
    for name, node in session.heads.items():
        heads.setdefault(node.id, []).append(name)
    drawn: dict[bytes, Tree] = {}
    for node in session.tree:  # parents come before their children
        label = describe(node, heads.get(node.id, []), pictures)
        drawn[node.id] = Tree(label) if node.parent is None else drawn[node.parent.id].add(label)
    return drawn[session.root.id]


def describe(node: Node, heads: list[str], pictures: Mapping[bytes, Picture]) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(node.role or "root", style="green" if node.origin == "generated" else "cyan")
    text.append(f" {node.start}..{node.stop}", style="default")
    text.append(f" {node.id.hex()[:8]}", style="dim")
    for item in node.media:
        assert item.grid_thw is not None
        _, height, width = item.grid_thw
        text.append(f" [{pictures[item.identity].name} {height // MERGE}×{width // MERGE}]", style="magenta")
    if heads:
        text.append(f" ← {', '.join(heads)}", style="bold yellow")
    if node.origin == "generated":
        text.append(f" {tokenizer().decode(node.token_ids.tolist())!r}", style="italic")
    for link in node.links:
        text.append(f" {link.kind} {link.node_id.hex()[:8]}, {link.reused_tokens} tokens shared", style="italic")
    return text
