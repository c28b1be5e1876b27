"""Quickstart: one conversation with pictures, branched, aborted, preempted and rewritten, and every answer checked.

A session keeps the conversation as a tree. A small engine (Qwen2.5-VL with random weights, on the CPU) answers from it:
each turn starts on the KV cache of an earlier node and feeds only what that cache lacks, at the positions the tree
gives. Then transformers alone replays the same conversation from its first token (`qwen_reference.py`, which knows no
sessiontree), and the two must agree: the reply's ids are identical, no logit differs by 1e-3 or more, all positions are
equal, and no earlier node has changed. If anything fails, the process exits with 1.

    python examples/quickstart.py
    python examples/quickstart.py --store PATH    # on disk: killed half-way and started again, it goes on where it was
"""

import argparse
import copy
import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from quickstart_report import TOLERANCE, Comparison, draw_table, draw_tree, verdict
from qwen_reference import (
    IMAGE_PAD,
    MERGE,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
    Picture,
    Turn,
    greedy,
    landscape,
    picture,
    plain,
    replay,
    system_turn,
    tiny_model,
    user_turn,
)
from rich.console import Console
from transformers import DynamicCache

from engine_bridge import request_inputs, to_transformers
from sessiontree import Draft, Edit, MediaItem, Node, SessionStore, SessionTree, media_identity
from sessiontree.positions import scheme

REPLY = 8  # tokens of each reply
HALF = REPLY // 2


# --- the engine -------------------------------------------------------------------------------------------------------
@dataclass
class Stopwatch:
    """Where the time of a turn goes, in seconds."""

    session: float = 0.0
    bridge: float = 0.0  # what the session holds, made into tensors
    model: float = 0.0

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        setattr(self, part, getattr(self, part) + time.perf_counter() - start)


@dataclass
class Request:
    """One reply in the making: its draft in the session, its KV cache in the engine."""

    draft: Draft
    kv: DynamicCache
    logits: list[torch.Tensor] = field(default_factory=list)  # the row that each token was picked from
    fed: int = 0  # tokens the model ran over


class Engine:
    """What stands beside the session layer: the model, the pixels, and the KV caches the engine chose to keep."""

    def __init__(self, model: Any, watch: Stopwatch) -> None:
        self.model = model
        self.watch = watch
        self.pictures: dict[bytes, Picture] = {}  # by the identity of the media item
        self.kv: WeakKeyDictionary[Node, DynamicCache] = WeakKeyDictionary()  # of the first tokens of the node's path

    def start(self, draft: Draft) -> Request:
        """Begin a reply on a copy of the nearest cache up the path, so that every branch has its own."""
        for node in reversed(draft.parent.path()):
            if node in self.kv:
                return Request(draft, copy.deepcopy(self.kv[node]))
        return Request(draft, self.empty_cache())

    def empty_cache(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)

    def feed(self, request: Request) -> None:
        """Run the model over what the cache lacks of the draft's path: a prompt, one new token, or all of it again."""
        draft, cached = request.draft, request.kv.get_seq_length()
        with self.watch.timing("bridge"):
            inputs = to_transformers(draft, prefix_len=cached)
        with self.watch.timing("session"):
            items = [item for item, _, _ in draft.media_spans(cached, draft.stop)]
        if items:
            inputs["pixel_values"] = torch.cat([self.pictures[item.identity].pixel_values for item in items])
            inputs["image_grid_thw"] = torch.cat([self.pictures[item.identity].grid_thw for item in items])
        self.run(request, inputs)

    def feed_at(self, request: Request, token: int, position: int) -> None:
        """Run the model over one token that the session has not seen yet."""
        inputs = {
            "input_ids": torch.tensor([[token]]),
            "position_ids": torch.full((3, 1, 1), position),
            "mm_token_type_ids": torch.zeros(1, 1, dtype=torch.long),
            "attention_mask": torch.ones(1, request.kv.get_seq_length() + 1, dtype=torch.long),
        }
        self.run(request, inputs)

    def restore(self, answer: Node) -> tuple[list[torch.Tensor], int]:
        """Prefill the path of a reply that an earlier process made: the rows its tokens were picked from, and what was fed.

        At the positions it was decoded with, so the cache is what that process had. The last token stays to be fed.
        """
        kv = self.empty_cache()
        with self.watch.timing("bridge"):
            inputs = to_transformers(answer, stop=answer.stop - 1)
        items = [item for item, _, _ in answer.media_spans()]
        inputs["pixel_values"] = torch.cat([self.pictures[item.identity].pixel_values for item in items])
        inputs["image_grid_thw"] = torch.cat([self.pictures[item.identity].grid_thw for item in items])
        with self.watch.timing("model"), torch.inference_mode():
            output = self.model(**inputs, cache=kv, use_cache=True, logits_to_keep=len(answer))
        self.kv[answer] = kv
        return list(output.logits[0]), answer.stop - 1

    def run(self, request: Request, inputs: dict[str, torch.Tensor]) -> None:
        with self.watch.timing("model"), torch.inference_mode():
            output = self.model(**inputs, cache=request.kv, use_cache=True, logits_to_keep=1)
        request.logits.append(output.logits[0, -1])
        request.fed += inputs["input_ids"].shape[1]


# --- three ways to fill a draft ---------------------------------------------------------------------------------------
def reply_at_once(engine: Engine, request: Request) -> None:
    """The engine decodes on its own, at position token index + delta, and hands over the whole reply at the end."""
    engine.feed(request)
    with engine.watch.timing("bridge"):
        delta = int(request_inputs(request.draft, prefix_len=request.draft.stop).mrope_position_delta)
    reply = [greedy(request.logits[-1])]
    while len(reply) < REPLY:
        engine.feed_at(request, reply[-1], request.kv.get_seq_length() + delta)
        reply.append(greedy(request.logits[-1]))
    with engine.watch.timing("session"):
        request.draft.extend(reply)


def reply_streamed(engine: Engine, request: Request, length: int = REPLY) -> None:
    """Each token goes into the draft as it comes, and is fed to the model from there."""
    while len(request.draft) < length:
        engine.feed(request)
        token = greedy(request.logits[-1])
        with engine.watch.timing("session"):
            request.draft.append(token)


def reply_preempted(engine: Engine, request: Request) -> None:
    """Half-way the engine needs the memory and throws the KV cache away. The draft still has all it takes to go on."""
    reply_streamed(engine, request, HALF)
    request.kv = engine.empty_cache()
    reply_streamed(engine, request)


# --- the experiment ---------------------------------------------------------------------------------------------------
class Experiment:
    def __init__(self, seed: int, store: SessionStore) -> None:
        self.watch = Stopwatch()
        self.model = tiny_model(seed)
        self.engine = Engine(self.model, self.watch)
        self.store = store
        rule = scheme(
            "qwen2_5_vl@hf5",
            image_token_id=IMAGE_PAD,
            video_token_id=VIDEO_PAD,
            vision_start_token_id=VISION_START,
            vision_end_token_id=VISION_END,
            spatial_merge_size=MERGE,
            tokens_per_second=self.model.config.vision_config.tokens_per_second,
        )
        known = "quickstart" in store.sessions()
        self.session = store.get("quickstart") if known else store.create("quickstart", scheme=rule)
        self.found = 0  # replies that were in the store
        self.comparisons: list[Comparison] = []
        self.checks: dict[str, bool] = {}
        # The judge's own record of what was said on the way to a node. Nothing in it is read from the session.
        self.said: dict[bytes, list[Turn]] = {}

    def append(self, parent: Node, turn: Turn, role: str) -> Node:
        """Append a turn and declare its pictures: which they are, how large, and which tokens stand for them."""
        items = []
        for offset, shown in turn.pictures:
            spans, grid = [(offset, shown.num_tokens)], shown.grid_thw[0].tolist()
            # The patches of a picture and of the same one turned say nothing of its shape: the grid does.
            identity = media_identity("image", shown.pixel_values, options={"merge_size": MERGE, "grid_thw": grid})
            items.append(MediaItem("image", identity, spans, grid_thw=grid))
            self.store.put_features(items[-1], {"pixel_values": shown.pixel_values})  # for whoever runs it again
            self.engine.pictures[identity] = shown
        with self.watch.timing("session"):
            return self.session.append(parent, turn.token_ids, media=items, role=role)

    def begin(self, turn: Turn) -> Node:
        node = self.append(self.session.root, turn, "system")
        self.said[node.id] = [turn]
        return node

    def ask(
        self,
        step: str,
        parent: Node,
        turn: Turn,
        head: str,
        reply: Callable[[Engine, Request], None] = reply_at_once,
    ) -> Node:
        """One turn: append the question, reply into a draft, commit it, move the head; then ask the judge."""
        earlier = self.session.tree
        before = fingerprints(earlier)
        self.watch.session = self.watch.bridge = self.watch.model = 0.0

        question = self.append(parent, turn, "user")
        with self.watch.timing("session"):
            found = [child for child in self.session.children(question) if child.key == step]
        if found:
            (answer,) = found
            logits, fed = self.engine.restore(answer)
            self.found += 1
        else:
            with self.watch.timing("session"):
                draft = self.session.draft(question, key=step)
            request = self.engine.start(draft)
            reply(self.engine, request)
            with self.watch.timing("session"):
                answer = draft.commit("length")
            self.engine.kv[answer] = request.kv
            logits, fed = request.logits, request.fed
        with self.watch.timing("session"):
            self.session.set_head(head, answer)

        conversation = [*self.said[parent.id], turn]
        judge = replay(self.model, conversation, REPLY)
        self.said[answer.id] = [*conversation, Turn(judge.reply)]
        self.comparisons.append(
            Comparison(
                step=step,
                fed=fed,
                total=answer.stop,
                same_ids=tuple(answer.token_ids.tolist()) == judge.reply,
                logit_difference=float((torch.stack(logits) - judge.logits).abs().max()),
                same_positions=np.array_equal(answer.positions(), judge.positions.numpy()),
                earlier_nodes=len(before),
                unchanged=fingerprints(earlier) == before and before.items() <= fingerprints(self.session.tree).items(),
                session_us=self.watch.session * 1e6,
                bridge_us=self.watch.bridge * 1e6,
                model_ms=self.watch.model * 1e3,
            )
        )
        return answer

    def abort_half_way(self, parent: Node, turn: Turn) -> None:
        """Start a turn and give up in the middle of its reply. Nothing may stay behind but the question itself."""
        question = self.append(parent, turn, "user")
        tree, heads, before = self.session.tree, dict(self.session.heads), fingerprints(self.session.tree)
        children = self.session.children(question)
        draft = self.session.draft(question)
        reply_streamed(self.engine, self.engine.start(draft), HALF)
        draft.abort()
        self.checks["the aborted reply left no trace in the tree"] = (
            len(self.session.tree) == len(tree)
            and fingerprints(self.session.tree) == before
            and self.session.children(question) == children
        )
        self.checks["and no trace in the heads"] = dict(self.session.heads) == heads

    def without(self, node: Node, start: int, stop: int) -> Node:
        """Rewrite the path to `node` without its tokens [start, stop). The KV cache of what both share is kept."""
        rewritten = self.session.rewrite(node, [Edit(start, stop, ())])
        (link,) = rewritten.links
        kept = copy.deepcopy(self.engine.kv[self.session.node(link.node_id)])
        kept.crop(link.reused_tokens - kept.get_seq_length())  # negative: so many tokens off the end
        self.engine.kv[rewritten] = kept
        return rewritten


def fingerprints(tree: SessionTree) -> dict[bytes, bytes]:
    """A hash over all that each node holds, read anew from the node rather than taken from its id."""
    found = {}
    for node in tree:
        parent = None if node.parent is None else node.parent.id
        media = [(item.modality, item.identity, item.spans, item.grid_thw) for item in node.media]
        facts = (node.id, parent, node.role, node.origin, node.start, node.stop, node.finish_reason, media, node.links)
        content = hashlib.sha256(repr(facts).encode())
        for array in (node.token_ids, node.positions(), node.positions(mode="as_replayed")):
            content.update(array.tobytes())
        found[node.id] = content.digest()
    return found


def run(seed: int, store: SessionStore) -> Experiment:
    red, blue = picture("red", plain("crimson")), picture("blue", plain("royalblue"))
    photo = picture("photo", landscape())
    lab = Experiment(seed, store)
    start = lab.begin(system_turn("You are a careful observer."))

    # 1. A picture and a question.
    first = lab.ask("1 first picture", start, user_turn("What do you see?", red, after_reply=False), "main")

    # 2. A second picture after the reply. Only this turn is fed, on top of the first turn's KV cache.
    second = lab.ask("2 second picture", first, user_turn("And how does this one differ?", blue), "main")

    # 3. Back to the first reply, and on with another picture: a branch, on its own copy of that KV cache.
    other = user_turn("Compare it with this photograph.", photo)
    branch = lab.ask("3 branch", first, other, "photo")

    # 4. The same once more, but the reply is streamed into its draft token by token.
    streamed = lab.ask("4 streamed", first, other, "streamed", reply_streamed)
    lab.checks["a question repeated at the same place is the same node"] = streamed.parent == branch.parent
    lab.checks["its two replies are two nodes with equal tokens"] = streamed != branch and np.array_equal(
        streamed.token_ids, branch.token_ids
    )

    # 5. A turn aborted in the middle of its reply, and retried.
    question = user_turn("Which of the two is warmer?")
    lab.abort_half_way(second, question)
    third = lab.ask("5 abort, retry", second, question, "main", reply_streamed)

    # 6. A request that loses its KV cache in the middle of its reply and is prefilled again from its draft.
    lab.ask("6 preempted", third, user_turn("Look at this too.", photo), "main", reply_preempted)

    # 7. Chat templates of reasoning models drop the reasoning of earlier replies. Random weights do not reason, so the
    #    first half of the first reply stands for it. What follows moves forward, the second picture too, and is fed
    #    again; what stands before is not.
    rewritten = lab.without(second, first.start, first.start + HALF)
    system, ask_red, reply_red, ask_blue, reply_blue = lab.said[second.id]
    lab.said[rewritten.id] = [system, ask_red, Turn(reply_red.token_ids[HALF:]), ask_blue, reply_blue]
    lab.ask("7 rewritten", rewritten, user_turn("So, in one word?"), "stripped", reply_streamed)
    return lab


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A conversation with pictures, every answer checked.")
    parser.add_argument("--seed", type=int, default=3, help="seed of the model's weights")
    parser.add_argument("--store", metavar="PATH", help="keep the session there, and go on with one that is there already")
    options = parser.parse_args(argv)

    torch.set_num_threads(1)  # more would only wait for each other on so small a model
    began = time.perf_counter()
    store = SessionStore.open(options.store, durability="commit") if options.store else SessionStore.in_memory()
    with store:
        return report(run(options.seed, store), time.perf_counter() - began)


def report(lab: Experiment, took: float) -> int:
    """Print what was done and whether it agrees: the exit code."""
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(draw_tree(lab.session, lab.engine.pictures))
    console.print()
    console.print(draw_table(lab.comparisons))
    for claim, holds in lab.checks.items():
        console.print(verdict(holds, f"yes: {claim}", f"NO: {claim}"))
    if lab.found:
        console.print(f"{lab.found} of {len(lab.comparisons)} replies were in the store.")
    largest = max(comparison.logit_difference for comparison in lab.comparisons)
    console.print(f"Largest difference of a logit: {largest:.1e} (allowed: below {TOLERANCE}). It took {took:.1f} s.")
    passed = all(comparison.passed for comparison in lab.comparisons) and all(lab.checks.values())
    console.print(verdict(passed, "Everything agrees with transformers.", "FAILED: see what is red above."))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
