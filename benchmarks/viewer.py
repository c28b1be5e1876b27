"""How soon the viewer opens a session of 20,000 nodes, how smoothly it moves, how large its file is; and pictures for the docs.

Chromium opens the file from the disk, without a graphics card. Opening counts from the beginning of its navigation to the first
frame drawn. Moving is measured by frames while the tree is moved a little in each, for two seconds: with all of it in sight, and at
the scale where cards can be read. It needs Chromium (make chromium).

    python benchmarks/viewer.py
    python benchmarks/viewer.py --pictures docs/images    # also makes the trees of docs/viewer.md, and pictures of them
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import Figure, report

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "examples")]  # for what tests and examples know

from sessiontree import MediaItem, Node, SessionStore, media_identity
from sessiontree.annotations import ADVANTAGE, LOGPROBS, REWARD, WEIGHT_VERSION, Spans
from sessiontree.interchange import import_file
from tests.browser import Seen, browser, lacking, opened

ROOT = Path(__file__).parents[1]
COUNT = 20_000
TIMES = 5
MOVING = """async ([scale, dx, dy]) => {
    const {drawing} = viewer;
    if (scale > 0) drawing.centre(Math.floor(viewer.layout.count / 2), scale); else drawing.fit();
    const times = [];
    await new Promise((done) => {
        const begun = performance.now();
        (function frame(now) {
            times.push(now);
            if (now - begun > 2000) return done();
            const back = Math.floor((now - begun) / 500) % 2 ? -1 : 1;
            drawing.pan(back * dx, back * dy);
            requestAnimationFrame(frame);
        })(begun);
    });
    return times;
}"""


# --- trees ------------------------------------------------------------------------------------------------------------
def large(store: SessionStore, tokenizer: Any) -> None:
    """20,000 nodes: many conversations under one system prompt, with samples, forks, tools; log-probabilities and rewards."""
    rng = random.Random(1)
    sentence = "the cache of a page is found again by its digest , so what was computed once is read from there and no kernel runs"
    words = sentence.split(" ")
    session = store.create("run-20000", scheme="text@hf5", model_fingerprint="tiny")

    def said(length: int) -> list[int]:
        ids: list[int] = tokenizer.encode(" ".join(rng.choice(words) for _ in range(length)))
        return ids

    system = session.append(session.root, tokenizer.encode("You are a careful assistant."), role="system")
    tips: list[Node] = [system] * 40
    for number in range(1, COUNT):
        at = rng.randrange(len(tips))
        parent = tips[at] if rng.random() < 0.93 else rng.choice(tips[at].path()[1:])
        if parent.role == "assistant":
            role = "tool" if rng.random() < 0.2 else "user"
            node = session.append(parent, said(rng.randrange(4, 24)), role=role, key=str(number), metadata={"at": number / 8})
        else:
            ids = said(rng.randrange(4, 40))
            with session.draft(parent, key=str(number), metadata={"at": number / 8, "worker": f"gpu-{number % 8}"}) as draft:
                draft.extend(ids)
                said_of = {REWARD: rng.random(), WEIGHT_VERSION: Spans([(0, len(ids), number // 2000)])}
                logprobs = -np.random.default_rng(number).exponential(0.4, len(ids)).astype(np.float32)
                reason = rng.choices(("stop", "length", "tool_calls"), (8, 1, 1))[0]
                node = draft.commit(reason, annotations={LOGPROBS: logprobs, **said_of})
        tips[at] = node
    for at in range(12):
        session.set_head("main" if at == 0 else f"worker-{at}", tips[at])


def best_of_n(store: SessionStore, tokenizer: Any) -> None:
    """A question with a picture, four samples, tool calls under two of them, rewards, and a head where the best one is."""
    from qwen_reference import IMAGE_PAD, MERGE, VISION_END, VISION_START, landscape, picture

    from sessiontree.positions import scheme

    rule = scheme("qwen2_5_vl@sglang", spatial_merge_size=MERGE, tokens_per_second=2, image_token_id=IMAGE_PAD)
    session = store.create("best-of-4", scheme=rule, namespace="acme", model_fingerprint="qwen2.5-vl")
    encode: Callable[[str], list[int]] = tokenizer.encode

    def shown(image: Any) -> tuple[list[int], MediaItem]:
        pixels = picture("picture", image)
        grid = tuple(map(int, pixels.grid_thw[0]))
        count = grid[0] * grid[1] * grid[2] // MERGE**2
        item = MediaItem("image", media_identity("image", np.asarray(image)), spans=[(1, count)], grid_thw=grid)
        store.put_features(item, {"pixel_values": pixels.pixel_values})
        return [VISION_START, *[IMAGE_PAD] * count, VISION_END], item

    def sample(parent: Node, key: str, text: str, said: dict[str, Any], reason: str = "stop", metadata: Any = None) -> Node:
        ids = encode(text)
        with session.draft(parent, key=key, metadata=metadata) as draft:
            draft.extend(ids)
            logprobs = -np.random.default_rng(len(ids)).exponential(0.3, len(ids)).astype(np.float32)
            return draft.commit(reason, annotations={LOGPROBS: logprobs, **said})

    system = session.append(session.root, encode("You are a careful guide. Use tools where they help."), role="system")
    ids, item = shown(landscape(336, 224))
    asked = session.append(system, [*ids, *encode("Where was this taken, and when does the sun set there?")], media=[item])
    guesses = (
        ("The ridges look like the Dolomites; the sun sets around 20:40 in June.", 0.35),
        ("I cannot tell the place. The light says evening.", 0.2),
    )
    for at, (text, reward) in enumerate(guesses):
        sample(asked, f"sample-{at}", text, {REWARD: reward, ADVANTAGE: reward - 0.5})
    for at, (query, results, answer, reward) in enumerate(
        (
            (
                "two ridges, evening",
                ("Seceda, Italy: 0.71", "Rigi, Switzerland: 0.22"),
                "Most likely Seceda. Sunset today: 20:58.",
                0.9,
            ),
            ("orange sky over hills", ("no match",), "The search found nothing; my best guess is the Alps.", 0.4),
        ),
        len(guesses),
    ):
        call = sample(
            asked,
            f"sample-{at}",
            f'search_places(query="{query}")',
            {},
            "tool_calls",
            {"tool_calls": [f"call-{at}-{number}" for number in range(len(results))], "latency_ms": 412 + 97 * at},
        )
        tools = [
            session.append(
                call, encode(result), role="tool", key=f"{at}-{number}", metadata={"tool_call_id": f"call-{at}-{number}"}
            )
            for number, result in enumerate(results)
        ]
        last = session.linearize(tools) if len(tools) > 1 else tools[0]
        done = sample(last, f"answer-{at}", answer, {REWARD: reward, ADVANTAGE: reward - 0.5, "judge": "rubric-2"})
        if reward < 0.9:
            session.set_head("guess", done)
        else:
            session.set_head("best", done)
            more = session.append(done, encode("And in winter?"), metadata={"client": "web"})
            for number, text in enumerate(
                ("Around 16:30, behind the northern ridge.", "At 16:30, and the valley is dark by five.")
            ):
                session.set_head(f"winter-{number}", sample(more, f"winter-{number}", text, {}, "length" if number else "stop"))
    session.pin(asked)


def chats(path: Path) -> None:
    """What the mini scheduler serves: a conversation with a picture, replies regenerated, a stateless client."""
    from qwen_reference import landscape

    from tests.mini_server import Server

    image = io.BytesIO()
    landscape().save(image, format="PNG")
    url = "data:image/png;base64," + base64.b64encode(image.getvalue()).decode()
    with Server(path) as server:
        client = server.openai()
        for question in ("Name three colours, and say of each why it is a good one.", "What is an immutable tree good for?"):
            said: list[Any] = [{"role": "user", "content": question}]
            for follow_up in ("And a fourth?", "Say it shorter.", "Thank you. Anything else?"):
                answer = client.chat.completions.create(model="tiny-qwen2.5-vl", messages=said, max_tokens=16, temperature=0)
                for seed in (1, 2):
                    client.chat.completions.create(model="tiny-qwen2.5-vl", messages=said, max_tokens=12, temperature=1, seed=seed)
                said += [
                    {"role": "assistant", "content": answer.choices[0].message.content},
                    {"role": "user", "content": follow_up},
                ]
        seen = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is on this picture?"}]
        said = [{"role": "user", "content": seen}]
        for follow_up in ("What colour is the sky?", "Is it evening?"):
            answer = client.chat.completions.create(model="tiny-qwen2.5-vl", messages=said, max_tokens=16, temperature=0)
            said += [{"role": "assistant", "content": answer.choices[0].message.content}, {"role": "user", "content": follow_up}]
        server.stop()


def example(script: str, *arguments: object) -> None:
    command = [sys.executable, str(ROOT / "examples" / script), *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True)


def imported(form: str, transcript: str) -> Callable[[Path], None]:
    """What makes a store of a transcript that the tool itself wrote."""

    def make(path: Path) -> None:
        with SessionStore.open(path) as store:
            import_file(store, ROOT / "tests" / "golden" / "interchange" / transcript, form)

    return make


def page_of(store: Path, output: Path, *arguments: str) -> None:
    """What `sessiontree view` writes."""
    command = [
        sys.executable,
        "-m",
        "sessiontree",
        "view",
        str(store),
        *arguments,
        "-o",
        str(output),
        "--force",
        "--tokenizer",
        "qwen",
    ]
    subprocess.run(command, check=True, capture_output=True)


# --- pictures ---------------------------------------------------------------------------------------------------------
#: For each: its file's name, the page, light or dark, and what is done before it is taken.
FINDING = "const find = (test) => [...Array(viewer.state.session.count).keys()].find((at) => test(viewer.state.session, at));"
PICTURES = (
    ("quickstart", "quickstart", "light", "await viewer.choose(find((s, at) => s.media.has(at) && s.depths[at] === 4))"),
    ("scheduler", "scheduler", "dark", "await viewer.choose(find((s, at) => s.numChildren[at] > 2 && s.depths[at] > 1))"),
    (
        "grpo",
        "grpo",
        "light",
        "const select = document.getElementById('colour');"
        "select.selectedIndex = [...select.options].findIndex((each) => each.text.includes('advantage'));"
        "viewer.colour(); viewer.drawing.fit(); await viewer.choose(find((s, at) => s.generated[at] && s.numChildren[at] === 2))",
    ),
    (
        "best-of-n",
        "best-of-n",
        "dark",
        "const at = (head) => viewer.state.session.heads.find(([name]) => name === head)[1];"
        "await viewer.compare(at('best'), at('guess'))",
    ),
    ("pi", "pi", "light", "await viewer.choose(find((s, at) => s.numChildren[at] > 1 && s.depths[at] > 2))"),
    ("claude-code", "claude-code", "dark", "await viewer.choose(find((s, at) => s.numChildren[at] > 1 && s.depths[at] > 2))"),
    (
        "large",
        "large",
        "light",
        "const select = document.getElementById('colour'); select.value = 'head'; viewer.colour();"
        "await viewer.choose(viewer.state.session.heads.find(([name]) => name === 'main')[1]);"
        "viewer.drawing.centre(viewer.layout.itemOf[viewer.state.chosen], 0.13)",
    ),
)


def take_pictures(pages: dict[str, Path], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with browser() as chromium:
        for name, page, scheme, script in PICTURES:
            with opened(chromium, pages[page], color_scheme=scheme, viewport={"width": 1360, "height": 800}) as seen:
                seen.ask(f"(async () => {{ {FINDING} {script}; await new Promise((done) => setTimeout(done, 700)); }})()")
                seen.page.screenshot(path=folder / f"viewer-{name}.png")
                assert seen.errors == [], seen.errors


# --- figures ----------------------------------------------------------------------------------------------------------
def frames_a_second(seen: Seen, scale: float, dx: float, dy: float) -> tuple[float, float]:
    """While moving: frames a second, and the longest that one took, in milliseconds. ``scale`` 0: all of it in sight."""
    times = np.array(seen.ask(MOVING, [scale, dx, dy]))
    return float((len(times) - 1) / (times[-1] - times[0]) * 1000), float(np.diff(times).max())


def measured(page: Path) -> list[Figure]:
    with browser() as chromium:
        openings, far, near = [], [], []
        for _ in range(TIMES):
            with opened(chromium, page) as seen:
                openings.append(float(seen.ask("viewer.openedAt")) / 1000)
                near.append(frames_a_second(seen, 0.8, 25, 15))
                seen.ask("viewer.fold()")  # nothing is folded any more
                far.append(frames_a_second(seen, 0, 3, 3))
        version = chromium.version

    def note(runs: list[tuple[float, float]]) -> str:
        longest = max(most for _, most in runs)
        return f"{TIMES} runs: {', '.join(f'{each:.0f}' for each, _ in runs)}; the longest frame {longest:.0f} ms"

    return [
        Figure(
            f"open a session of {COUNT:,} nodes",
            statistics.median(openings),
            "s",
            2,
            note=f"Chromium {version}; {TIMES} runs: {', '.join(f'{each:.2f}' for each in openings)}",
        ),
        Figure(
            "move it, all nodes in sight, none folded",
            statistics.median([each for each, _ in far]),
            "frames/s",
            30,
            "higher",
            note=note(far),
        ),
        Figure("move it, cards legible", statistics.median([each for each, _ in near]), "frames/s", 30, "higher", note=note(near)),
        Figure(
            f"file of {COUNT:,} nodes",
            page.stat().st_size / 1e6,
            "MB",
            10,
            note="text, 351,000 ids, positions, 216,000 log-probabilities",
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the viewer, and make its pictures.")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="make more trees, and pictures of them")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the trees and their pages there, and use those that are")
    arguments = parser.parse_args()
    if (why := lacking()) is not None:
        print(f"not measured: {why}")
        return
    from qwen_reference import tokenizer

    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="sessiontree-viewer-"))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}", "OMP_NUM_THREADS": "1"}
    try:
        pages: dict[str, Path] = {}

        def made(name: str, make: Callable[[Path], object], *session: str, inside: str = "") -> None:
            store, pages[name] = folder / name, folder / f"{name}.html"
            if not store.exists():
                make(store)
            page_of(store / inside, pages[name], *session)

        def written(make: Callable[[SessionStore, Any], None]) -> Callable[[Path], None]:
            def make_in(path: Path) -> None:
                with SessionStore.open(path, durability="relaxed") as store:
                    make(store, tokenizer())

            return make_in

        made("large", written(large))
        if arguments.pictures is not None:
            made("quickstart", lambda path: example("quickstart.py", "--store", path))
            made("grpo", lambda path: example("tree_grpo.py", "--store", path, "--steps", 3), "step 2", inside="seed-3/store")
            made("best-of-n", written(best_of_n))
            made("pi", imported("pi", "pi/1.6.0/everything.jsonl"))
            made("claude-code", imported("claude-code", "claude_code/2.1.197/session.jsonl"))
            made("scheduler", chats)
            take_pictures(pages, arguments.pictures)
        met = report(measured(pages["large"]))
    finally:
        if arguments.keep is None:
            shutil.rmtree(folder)
    sys.exit(not met)


if __name__ == "__main__":
    main()
