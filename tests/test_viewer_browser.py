"""The viewer in Chromium: what it shows is what the library says, it moves and compares and follows, and nothing hostile runs."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from sessiontree import ExternalPositions, MediaItem, Node, Session, SessionStore, query
from sessiontree.annotations import Spans
from sessiontree.cli.viewing import Live
from sessiontree.cli.words import words
from sessiontree.positions import scheme
from sessiontree.viewer.server import Server
from tests.browser import Seen, browser, lacking, opened
from tests.command_line import conversation, generate, text_of
from tests.histories import without_leading_empties
from tests.qwen_vocabulary import encode
from tests.test_cli import random_tree
from tests.test_positions_golden import CASES, known_cases, scheme_of
from tests.toy import a_turn, media, toy_scheme

if TYPE_CHECKING:
    from playwright.sync_api import Browser

#: All that a session's nodes are by what the page makes of them: token ids, positions in both modes.
NODES = """async () => {
    const { session } = viewer.state;
    const found = [];
    for (let at = 0; at < session.count; at++) {
        const node = await session.node(at);
        const { decoded, replayed } = Runs.positions(session, node);
        const plain = (axes) => axes.map((axis) => Array.from(axis));
        found.push({
            id: node.facts.id, ids: Array.from(node.chunk.array(node.facts.token_ids)), start: session.starts[at],
            depth: session.depths[at], decoded: plain(decoded), replayed: plain(replayed ?? decoded),
        });
    }
    return found;
}"""

#: Faults of a layout: two items at one place, an item that is not behind what it hangs on, lines that cross.
FAULTS = """() => {
    const { layout } = viewer;
    const { columns, rows, above, count } = layout;
    const faults = [];
    const places = new Set();
    for (let item = 0; item < count; item++) {
        const place = `${columns[item]} ${rows[item]}`;
        if (places.has(place)) faults.push(`two items at ${place}`);
        places.add(place);
        if (layout.at(rows[item], columns[item]) !== item) faults.push(`${place} is not found`);
        const parent = above[item];
        const hangs = parent < 0 ? item === 0 : columns[item] === columns[parent] + 1 && rows[item] >= rows[parent];
        if (!hangs) faults.push(`${place} hangs wrongly`);
    }
    for (let item = 0; item < count; item++) { // branches off one node stand in commit order, but for the one that goes straight on
        const off = [];
        for (let other = 0; other < count; other++) if (above[other] === item && rows[other] > rows[item]) off.push(other);
        off.sort((one, two) => rows[one] - rows[two]);
        const ordered = off.every((each, at) => at === 0 || layout.nodes[each] > layout.nodes[off[at - 1]]);
        if (!ordered) faults.push(`branches off ${item} in disorder`);
    }
    layout.trunks.forEach((trunks, column) => trunks.forEach(([from, to], number) => {
        if (number > 0 && trunks[number - 1][1] >= from) faults.push(`lines behind column ${column} overlap`);
        for (let row = from + 1; row <= to; row++) {
            const item = layout.at(row, column + 1);
            if (item >= 0 && rows[above[item]] === row) faults.push(`a line crosses another at ${column} ${row}`);
        }
    }));
    return faults;
}"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Skips where there is none; under CHROMIUM_REQUIRED that is an error."""
    if (why := lacking()) is not None:
        assert not os.environ.get("CHROMIUM_REQUIRED"), f"CHROMIUM_REQUIRED is set, and {why}"
        pytest.skip(why)
    with browser() as found:
        yield found


@contextmanager
def served(store: SessionStore, first: str | None = None, tokenizer: str | None = None) -> Iterator[Server]:
    with Server(Live(store, words(tokenizer), first), "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def page_of(store: Path, *options: object) -> Path:
    file = store.with_name(f"{store.name}.html")
    text_of("view", store, "-o", file, "--force", *options)
    return file


def clean(seen: Seen) -> None:
    """Nothing went wrong, and nothing was asked of anybody but where the page came from."""
    assert seen.errors == [] and seen.console == []
    assert seen.ask("violations") == []
    own = seen.requests[0]
    if own.startswith("file:"):
        assert [each for each in seen.requests if not each.startswith("data:image/png;base64,")] == [own]
    else:
        assert all(each.startswith((own, "data:image/png;base64,")) for each in seen.requests)


# --- what is shown is what there is -----------------------------------------------------------------------------------
def test_token_ids_and_positions_of_every_family(chromium: Browser, tmp_path: Path) -> None:
    """Of prefilled turns and of tokens decoded behind them, under every rule, in both modes."""
    kinds = set()
    with SessionStore.open(tmp_path / "store", durability="relaxed") as store:
        for family, rule in CASES:
            history, *others = [each for each, _ in known_cases(family, rule)]
            session = store.create(f"{family}@{rule}", scheme=scheme_of(history, rule))
            for each in [history, *(other for other in others if other.params == history.params)][:5]:
                node = session.root
                for turn in without_leading_empties(each.turns()):
                    node = session.append(node, turn.tokens, media=turn.media)
                kinds.add(type(node.runs))
                if node.state.open_block is None and family != "glm_image":  # which decodes by a plan
                    generate(session, node, 5, 6, 7, key="reply")
        session = store.create("external", scheme=toy_scheme())
        table = np.array([[0, 5, 5], [1, 1, 9], [2, 7, 3]])
        session.append(session.root, [1, 2, 3], positions=ExternalPositions(table, next_position=12, max_position=11))
        store.flush()
        with served(store) as server, opened(chromium, server.url) as seen:
            assert len(store.sessions()) == len(CASES) + 1
            for name in store.sessions():
                seen.ask("(name) => viewer.open(name)", name)
                nodes = list(store.get(name).tree)
                for node, shown in zip(nodes, seen.ask(NODES), strict=True):
                    assert (shown["id"], shown["depth"], shown["start"]) == (node.id.hex(), node.depth, node.start)
                    assert shown["ids"] == node.token_ids.tolist()
                    for mode, there in (("as_decoded", "decoded"), ("as_replayed", "replayed")):
                        right = node.positions(node.start, node.stop, mode=mode).tolist()  # type: ignore[arg-type]
                        assert shown[there] == right, (name, node, mode)
            clean(seen)
    assert kinds == {int, bytes}


def test_a_panel_says_what_is_known_of_a_node(chromium: Browser, tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        session = conversation(store)
        asked, first = session.head("main").node.path()[1], session.head("first").node
        store.put_features(asked.media[0], np.full((20, 30, 3), 200, np.uint8))
        session.annotate(asked, {"score": 0.25, "logprobs": np.linspace(-1, 0, 9, dtype=np.float32)})
        session.annotate(asked, {"spans": Spans([(0, 2, "first"), (2, 9, "rest")])})
        session.pin(asked)
    with opened(chromium, page_of(tmp_path / "store")) as seen:
        text = seen.choose(1)
        for said in (asked.id.hex(), "user", "pinned", "[0, 9)", "0.25", "first", '"at": 1.5', "1 × 4 × 4", "M-RoPE", "-0.125"):
            assert said in text, said
        assert seen.page.eval_on_selector(
            "#panel img", "async (image) => (await image.decode(), [image.naturalWidth, image.naturalHeight])"
        ) == [30, 20]
        text = seen.choose(2)
        assert "generated" in text and "first" in text and "stop" in text
        seen.page.hover("#panel canvas.chart", position={"x": 300, "y": 60})
        readout = seen.page.inner_text("#panel .readout")
        index = int(readout.split()[1])
        t, height, width = first.positions(index, index + 1)[:, 0].tolist()
        assert readout.split() == ["token", str(index), "t", str(t), "h", str(height), "w", str(width)]
        assert "5 nodes" in seen.page.inner_text("#counts")
        clean(seen)


def test_a_wrong_position_is_pointed_at(chromium: Browser, tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        session = store.create("chat", scheme=toy_scheme())
        right = session.append(session.root, [1, 2, 3])
        table = np.array([[7, 8], [7, 8], [7, 8]])
        session.append(right, [4, 5], positions=ExternalPositions(table, next_position=9, max_position=8))
        session.append(right, [4, 5])
    with opened(chromium, page_of(tmp_path / "store")) as seen:
        assert "Begins at t 7, h 7, w 7, where text after its parent stands at 3." in seen.choose(2)
        assert "Begins at" not in seen.choose(3)


# --- comparing --------------------------------------------------------------------------------------------------------
def forest(session: Session, rng: random.Random) -> None:
    """Nodes that have much alike: the same tokens in other turns, with and without pictures, at other positions."""
    nodes = [session.root]
    for number in range(60):
        parent = rng.choice(nodes)
        asked = a_turn(number=rng.randrange(2))
        kind = rng.randrange(5)
        if kind == 0:
            node = session.append(parent, asked.tokens, media=media(asked), key=str(number))
        elif kind == 1:
            node = session.append(parent, asked.tokens, key=str(number))
        elif kind == 2:
            node = generate(session, parent, *[1] * rng.randrange(1, 4), key=str(number))
        elif kind == 3:  # a picture in two turns
            (item,) = media(asked)
            at, size = item.spans[0]
            cut = rng.randrange(1, size)
            begun = item.with_spans([(at, cut)], unfinished=True)
            node = session.append(parent, asked.tokens[: at + cut], media=[begun], key=str(number))
            rest = item.with_spans([(0, size - cut)], placeholders_before=cut)
            node = session.append(node, asked.tokens[at + cut :], media=[rest], key=str(number))
        else:
            table = np.tile(np.arange(2) + parent.stop + rng.randrange(2), (3, 1))
            top = int(table.max())
            node = session.append(
                parent, [1, 1], positions=ExternalPositions(table, next_position=top + 1, max_position=top), key=str(number)
            )
        nodes.append(node)


@pytest.mark.parametrize("seed", range(3))
def test_comparing_says_what_diff_says(chromium: Browser, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with SessionStore.open(tmp_path / "store") as store:
        forest(store.create("chat", scheme=toy_scheme()), rng)
        nodes: list[Node] = list(store.get("chat").tree)
    page = page_of(tmp_path / "store")
    pairs = [(rng.randrange(len(nodes)), rng.randrange(len(nodes))) for _ in range(250)]
    with opened(chromium, page) as seen:
        script = "async (pairs) => Promise.all(pairs.map(([one, two]) => Compare.parting(viewer.state.session, one, two)))"
        found = set()
        for (one, two), shown in zip(pairs, seen.ask(script, [list(pair) for pair in pairs]), strict=True):
            right = query.diff(nodes[one], nodes[two])
            assert right.ancestor is not None
            assert (nodes[shown["ancestor"]], shown["shared"], shown["kind"]) == (
                right.ancestor,
                right.shared_prefix_len,
                right.kind,
            )
            found.add(right.kind)
        assert found == {"same", "end", "media", "token", "position"}
        one, two = next(pair for pair in pairs if query.diff(nodes[pair[0]], nodes[pair[1]]).kind == "token")
        seen.ask("([one, two]) => viewer.compare(one, two)", [one, two])
        text = seen.page.inner_text("#panel")
        shared = query.diff(nodes[one], nodes[two]).shared_prefix_len
        assert f"At token {shared} there stand different tokens." in text and "A goes on with" in text
        clean(seen)


# --- the picture ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(4))
def test_layouts_have_no_faults(chromium: Browser, tmp_path: Path, seed: int) -> None:
    """Whatever is folded or collapsed; and every node is somewhere."""
    with SessionStore.open(tmp_path / "store") as store:
        random_tree(store.create("chat", scheme="text@hf5"), seed, 400)
    with opened(chromium, page_of(tmp_path / "store")) as seen:
        assert seen.ask(FAULTS) == [] and seen.ask("[...viewer.layout.itemOf].every((item) => item >= 0)")
        assert seen.ask("viewer.layout.count") < 401
        seen.ask("viewer.fold()")
        assert seen.ask(FAULTS) == [] and seen.ask("viewer.layout.count") == 401
        seen.ask("for (let at = 0; at < 400; at += 7) viewer.collapse(at)")
        assert seen.ask(FAULTS) == [] and 0 < seen.ask("viewer.layout.count") < 401
        clean(seen)


def test_a_long_chain(chromium: Browser, tmp_path: Path) -> None:
    """Nothing recurses, folded or not, chosen or compared."""
    with SessionStore.open(tmp_path / "store", durability="relaxed") as store:
        session = store.create("chat", scheme="text@hf5")
        node = session.root
        for number in range(30_000):
            node = session.append(node, [number])
            if number == 15_000:
                session.append(node, [7], key="other")
        session.set_head("main", node)
    with opened(chromium, page_of(tmp_path / "store")) as seen:
        assert seen.ask("viewer.layout.count") < 20
        assert "30,000" in seen.choose(30_001)
        assert seen.ask("viewer.state.chosen") == 30_001
        seen.ask("viewer.fold()")
        assert seen.ask("viewer.layout.count") == 30_002
        parted = seen.ask("Compare.parting(viewer.state.session, 30001, 15002)")
        assert parted == {"ancestor": 15_001, "shared": 15_001, "kind": "token"}
        clean(seen)


def test_moving_by_keys_and_pointer(chromium: Browser, tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        conversation(store)
    with opened(chromium, page_of(tmp_path / "store")) as seen:
        page = seen.page

        def chosen(*keys: str) -> int:
            for key in keys:
                page.keyboard.press(key)
            found: int = seen.ask("viewer.state.chosen")
            return found

        # 0 - 1 - 3 - 4 - 5, and 2 below 1.
        assert chosen("ArrowRight") == 0
        assert chosen("ArrowRight", "ArrowRight") == 3
        assert chosen("ArrowDown") == 2 and chosen("ArrowUp") == 3
        assert chosen("ArrowRight", "ArrowRight", "ArrowRight") == 5
        assert chosen("ArrowLeft") == 4
        assert chosen("h") == 2 and chosen("h") == 5 and chosen("Home") == 0
        assert chosen("ArrowRight", " ") == 1 and seen.ask("viewer.layout.count") == 2
        assert chosen(" ") == 1 and seen.ask("viewer.layout.count") == 6
        assert chosen("m") == 1 and "Choose another node" in page.inner_text("#panel")
        assert chosen("ArrowRight") == 3
        seen.wait("document.querySelector('#panel h2').textContent === 'Compare'")
        assert chosen("Escape") == 3 and chosen("Escape") == -1
        page.keyboard.press("?")
        assert page.is_visible("#keys") and "unfold a chain" in page.inner_text("#keys")
        page.keyboard.press("Escape")
        assert not page.is_visible("#keys")
        x, y = seen.ask("(() => { const [x, y] = viewer.drawing.place(viewer.layout.itemOf[2]); return [x + 20, y + 10]; })()")
        page.hover("#tree", position={"x": x, "y": y})
        assert "assistant" in page.inner_text("#hover") and "first" in page.inner_text("#hover")
        page.click("#tree", position={"x": x, "y": y})
        assert seen.ask("viewer.state.chosen") == 2
        before = seen.ask("[viewer.drawing.x, viewer.drawing.scale]")
        page.mouse.move(300, 600)
        page.mouse.down()
        page.mouse.move(200, 550, steps=4)
        page.mouse.up()
        assert seen.ask("viewer.drawing.x") > before[0] and seen.ask("viewer.state.chosen") == 2
        page.mouse.wheel(0, -300)
        seen.wait("(scale) => viewer.drawing.scale > scale", before[1])
        page.keyboard.press("0")
        assert seen.ask("viewer.state.fitted")
        clean(seen)


def test_searching(chromium: Browser, tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        session = store.create("chat", scheme="text@hf5")
        node = session.root
        for number in range(600):
            said = encode("Somewhere far behind " * 8 + "a needle lies" if number == 300 else f"turn {number}")
            node = session.append(node, said, role="tool" if number % 100 == 7 else "user", metadata={"batch": f"b{number // 200}"})
        session.set_head("main", node)
    with opened(chromium, page_of(tmp_path / "store", "--tokenizer", "qwen")) as seen:

        def found(query: str) -> list[int]:
            seen.page.fill("#search", query)
            seen.wait("document.getElementById('found').textContent.match(/^[\\d,]+$/) !== null")
            matches: list[int] = seen.ask("[...viewer.state.matches].sort((a, b) => a - b)")
            return matches

        assert found("A NEEDLE") == [301]  # behind all that a card shows
        assert found("role:tool") == list(range(8, 601, 100))
        assert found("role:tool depth:>300") == [308, 408, 508]
        assert found('"b2"') == list(range(401, 601))
        assert found("turn 599") == [600]
        assert found("head:main") == [600] and found("is:leaf") == [600] and found("tokens:>20") == [301]
        assert found(f"id:{node.id.hex()}") == [600] and found(node.id.hex()[:6]) == [600]
        assert found("nothing of it") == []
        found("role:tool")
        seen.page.press("#search", "Enter")
        seen.wait("viewer.state.chosen === 8")
        seen.page.press("#search", "Shift+Enter")
        seen.wait("viewer.state.chosen === 508")
        assert seen.page.inner_text("#found") == "6 of 6"
        seen.page.press("#search", "Escape")
        assert seen.ask("viewer.state.matches") is None
        clean(seen)


def test_colours(chromium: Browser, tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        session = conversation(store)
        for at, node in enumerate(session.tree):
            session.annotate(node, {"reward": at / 4}) if at in (1, 5) else None
    with opened(chromium, page_of(tmp_path / "store")) as seen:

        def by(name: str) -> list[str]:
            value = seen.ask(
                "(name) => [...document.getElementById('colour').options].find((each) => each.text === name).value", name
            )
            seen.page.select_option("#colour", value)
            colours: list[str] = seen.ask("Array.from(viewer.state.colourOf, (number) => viewer.state.palette[number])")
            return colours

        role = by("role")
        assert role[2] == role[3] == role[5] and len({role[1], role[2], role[4]}) == 3
        head = by("head")
        assert head[3] == head[4] == head[5] != head[2] and head[1] not in (head[2], head[3])
        assert len(set(by("time (commit order)"))) == 6
        reward = by("annotation: reward")
        assert reward[1] != reward[5] and reward[0] == reward[2] == reward[3] and reward[0] not in (reward[1], reward[5])
        assert "0.25" in seen.page.inner_text("#legend") and "1.25" in seen.page.inner_text("#legend")
        clean(seen)


# --- live -------------------------------------------------------------------------------------------------------------
def test_serve_follows_a_writer(chromium: Browser, tmp_path: Path) -> None:
    """New nodes, heads, annotations and sessions come in; what was chosen, and the view, stay; one that is dropped says so."""
    with SessionStore.open(tmp_path / "store", durability="commit") as writer:
        session = writer.create("chat", scheme="text@hf5")
        first = session.append(session.root, [1, 2, 3])
        reader = SessionStore.open(tmp_path / "store", read_only=True)
        with reader, served(reader) as server, opened(chromium, server.url) as seen:
            page = seen.page
            assert "user" in seen.choose(1) and page.inner_text("#live") == "live"
            seen.ask("viewer.drawing.zoom(1.2, 10, 10); viewer.state.fitted = false")
            place = seen.ask("viewer.drawing.place(viewer.layout.itemOf[1])")
            reply = generate(session, first, 4, 5, key="reply")
            for number in range(30):
                session.append(reply, [number])
            seen.wait("viewer.state.session.count === 33")
            assert seen.ask("viewer.state.chosen") == 1
            assert seen.ask("viewer.drawing.place(viewer.layout.itemOf[1])") == pytest.approx(place, abs=0.01)
            assert seen.ask(FAULTS) == []
            session.set_head("main", reply)
            session.annotate(first, {"score": 0.125})
            seen.wait("viewer.state.session.heads.length === 1")
            seen.wait("document.getElementById('panel').innerText.includes('0.125')")
            assert "and 18 more" in seen.choose(2) and "main" in page.inner_text("#panel")
            writer.create("second", scheme="text@hf5")
            seen.wait("document.getElementById('sessions').length === 2")
            session.drop(session.leaves()[-1])
            seen.wait("viewer.state.session.below[0] === 31")
            assert seen.ask("viewer.state.chosen") == 2
            page.select_option("#sessions", "second")
            seen.wait("viewer.state.session.id === 'second'")
            assert "0 nodes" in page.inner_text("#counts")
            writer.drop("second")
            page.wait_for_selector("#problem:visible")
            assert "was dropped" in page.inner_text("#problem")
            clean(seen)


def test_a_server_that_is_gone_is_said(chromium: Browser, tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        conversation(store)
        with served(store) as server, opened(chromium, server.url) as seen:
            seen.page.context.set_offline(True)
            seen.page.wait_for_selector("#live.lost")
            assert seen.ask("viewer.state.session.count") == 6
            seen.page.context.set_offline(False)
            seen.page.wait_for_selector("#live:not(.lost)")


# --- hostile sessions -------------------------------------------------------------------------------------------------
ATTACKS = (
    "<script>window.hacked = 1</script>",
    "</script><script>window.hacked = 2</script>",
    '"><img src=x onerror="window.hacked = 3">',
    "<svg/onload=window.hacked=4>",
    "<!--<script>window.hacked = 5//-->",
    "javascript:window.hacked=6",
    "${window.hacked = 7}`+(window.hacked=8)+`",
    "<iframe src=//evil.example></iframe><link rel=stylesheet href=//evil.example><base href=//evil.example>",
    "<meta http-equiv=refresh content='0;url=//evil.example'>",
    "</textarea></select></style></title><style>@import '//evil.example'</style>",
    "__proto__",
    "constructor",
    "\u2028\u2029\u202egnp.exe\u0000\u001b[31m\ufeff",
    "]]>'\"\\&lt;script&gt;window.hacked = 9&lt;/script&gt;",
)


def hostile(store: SessionStore, name: str) -> Session:
    """A session that says these wherever a session can say something."""
    told = "".join(ATTACKS)
    rules = scheme("qwen2_5_vl@sglang", spatial_merge_size=2, tokens_per_second=2)
    session = store.create(
        name, scheme=rules, namespace={"tenant": told, "lora": ATTACKS[0], "cache_salt": ATTACKS[1]}, model_fingerprint=told
    )
    node = session.root
    for number, attack in enumerate(ATTACKS):
        said = {attack: attack, "nested": {attack: [attack, {attack: attack}]}, "tool_calls": [attack]}
        ids = encode(attack)
        item = MediaItem("image", bytes([number] * 32), spans=[(0, 4)], grid_thw=(1, 4, 4), extra={attack: attack})
        store.put_features(item, {attack[:200]: np.zeros((8, 8, 3), np.uint8)})
        asked = session.append(node, [0, 0, 0, 0, *ids], media=[item], role=attack, key=attack, metadata=said)
        with session.draft(asked, role=attack, key=attack, metadata=said) as draft:
            draft.extend(ids)
            node = draft.commit(attack)
        session.annotate(node, {attack: attack, f"spans {attack}": Spans([(0, 1, attack)]), f"each {attack}": np.arange(len(ids))})
        session.set_head(attack, node)
        session.append(asked, encode(told), role=told)
    return session


def look_everywhere(seen: Seen, count: int) -> None:
    """Have all of it shown, by every way there is."""
    for at in range(count):
        seen.choose(at)
    for one, two in ((2, 3), (2, count - 1), (4, 7)):
        seen.ask("([one, two]) => viewer.compare(one, two)", [one, two])
    seen.ask("viewer.mark(-1)")
    seen.ask("viewer.choose(-1)")
    for number in range(seen.ask("document.getElementById('colour').length")):
        seen.ask("(number) => { document.getElementById('colour').selectedIndex = number; viewer.colour(); }", number)
    for scale in (0.1, 0.36, 1):
        seen.ask("(scale) => viewer.drawing.centre(2, scale)", scale)
        for x in range(60, 900, 140):
            for y in range(80, 700, 60):
                seen.page.mouse.move(x, y)
    for attack in ATTACKS:
        seen.page.fill("#search", attack)
        seen.page.press("#search", "Enter")
    seen.page.wait_for_timeout(300)
    seen.page.press("#search", "Escape")
    seen.page.keyboard.press("?")
    seen.page.keyboard.press("Escape")
    seen.choose(1)
    for number in range(seen.ask("document.querySelectorAll('#panel button').length")):
        seen.ask("(number) => document.querySelectorAll('#panel button')[number]?.click()", number)


def nothing_ran(seen: Seen, scripts: int) -> None:
    clean(seen)
    assert seen.ask("window.hacked") is None
    made = seen.ask(
        "['script', 'style', 'iframe', 'link', 'base', 'meta', 'svg', 'img'].map((tag) => document.querySelectorAll(tag).length)"
    )
    assert made[0] == scripts and made[1:7] == [1, 0, 1, 0, 5, 0]
    assert seen.ask("[...document.images].every((image) => image.src.startsWith('data:image/png;base64,'))")
    assert seen.ask(
        "[...document.querySelectorAll('*')].every((each) => [...each.attributes].every(({name}) => !name.startsWith('on')))"
    )
    assert seen.ask("Object.keys(Object.prototype).length") == 0


def test_a_hostile_session_runs_nothing_in_a_file(chromium: Browser, tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        session = hostile(store, "".join(ATTACKS[:6]))
        count = len(session.tree)
    page = page_of(tmp_path / "store", "--tokenizer", "qwen")
    text = page.read_text()
    assert "hacked" not in text and "evil.example" not in text  # nothing of it stands there but in base64
    with opened(chromium, page) as seen:
        scripts = seen.ask("document.scripts.length")
        look_everywhere(seen, count)
        nothing_ran(seen, scripts)
        assert "window.hacked = 1" in seen.choose(1) and "\\u{202e}" in seen.choose(count - 3)


def test_a_hostile_session_runs_nothing_when_served(chromium: Browser, tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        names = [f"{attack}{number}" for number, attack in enumerate(ATTACKS[:4])]
        for name in names:
            session = hostile(store, name)
        count = len(session.tree)
        with served(store, names[0], "qwen") as server, opened(chromium, server.url) as seen:
            scripts = seen.ask("document.scripts.length")
            assert seen.ask("viewer.state.session.id") == names[0]
            for name in names:
                seen.ask("(name) => viewer.open(name)", name)
                seen.choose(2)
            look_everywhere(seen, count)
            nothing_ran(seen, scripts)


def test_the_policy_holds_even_where_a_script_would_do_it(chromium: Browser, tmp_path: Path) -> None:
    """The page makes no markup of text; if it did, the browser would refuse, as it refuses requests and other scripts."""
    with SessionStore.open(tmp_path / "store") as store:
        conversation(store)
    with opened(chromium, page_of(tmp_path / "store")) as seen:
        attempts = (
            "document.body.innerHTML = '<img src=x onerror=\"window.hacked = 1\">'",
            "document.body.insertAdjacentHTML('beforeend', '<b>x</b>')",
            "document.write('<b>x</b>')",
            "setTimeout('window.hacked = 1')",
            "document.createElement('a').setAttribute('onclick', 'window.hacked = 1')",
            "document.body.append(Object.assign(document.createElement('script'), { text: 'window.hacked = 1' }))",
        )
        for attempt in attempts:
            assert (
                seen.ask(f"(() => {{ try {{ {attempt}; return 'done'; }} catch (error) {{ return error.name; }} }})()") != "done"
            ), attempt
        assert seen.ask("fetch('https://evil.example/').then(() => 'done', (error) => error.name)") == "TypeError"
        seen.ask("const image = new Image(); image.src = 'https://evil.example/x.png'; document.body.append(image)")
        seen.page.wait_for_timeout(200)
        assert seen.ask("window.hacked") is None
        forbidden = {each.split()[0] for each in seen.ask("violations")}
        assert forbidden >= {"connect-src", "img-src", "require-trusted-types-for"}
