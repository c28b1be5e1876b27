"""Run every generation of a store or bundle again, and compare what comes out with what was recorded.

The quickstart's model gets each request as it was, ids, positions as decoded, pixels, and nothing from the run before: no KV
cache, no draft. It is greedy, so the same tokens must come out.

    python examples/quickstart.py --store PATH
    python examples/replay.py PATH

Ends with 0 if all of them do; with 1 at the first token that differs, or if something could not be run again.
"""

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from qwen_reference import VOCABULARY, greedy, tiny_model
from transformers import DynamicCache

from engine_bridge import request_inputs, to_transformers
from sessiontree import ReplayStep, SessionStore, replay


@torch.inference_mode()
def generated(model: Any, step: ReplayStep) -> Iterator[int]:
    """Tokens that the model picks for a request: the whole prompt is fed at once, then each token that was picked."""
    request = request_inputs(step.prompt, features=True)
    features = dict(zip((item.content() for item in request.needed_items), request.features or (), strict=True))
    inputs: dict[str, Any] = to_transformers(step.prompt)
    if items := [item for item, _, _ in step.media_spans]:
        inputs["pixel_values"] = torch.cat([torch.tensor(features[item.content()]["pixel_values"]) for item in items])
        inputs["image_grid_thw"] = torch.tensor([item.grid_thw for item in items])
    kv = DynamicCache(config=model.config)
    index, delta = step.prompt.stop, int(request.mrope_position_delta)
    while True:
        logits = model(**inputs, cache=kv, use_cache=True, logits_to_keep=1).logits[0, -1]
        token = greedy(logits)
        yield token
        inputs = {
            "input_ids": torch.tensor([[token]]),
            "position_ids": torch.full((3, 1, 1), index + delta),
            "mm_token_type_ids": torch.zeros(1, 1, dtype=torch.long),
            "attention_mask": torch.ones(1, index + 1, dtype=torch.long),
        }
        index += 1


def why_not(step: ReplayStep) -> str | None:
    """Why this model cannot run a request again."""
    if step.node.scheme.family != "qwen2_5_vl" or step.node.input_ids().max(initial=0) >= VOCABULARY:
        return f"it was made for another model, at positions of {step.node.scheme.name}"
    return step.problem if step.prompt.stop else "its prompt is empty"


def check(model: Any, step: ReplayStep) -> str:
    """Run one generation again and say how it went: "same", "differs" or "not run"."""
    name = f"step {step.number}, {step.session_id!r} {step.key!r}, node {step.node.id[:4].hex()}"
    if problem := why_not(step):
        print(f"{name}: not run: {problem}")
        return "not run"
    recorded = step.output_ids.tolist()
    for at, (was, comes) in enumerate(zip(recorded, generated(model, step), strict=False)):
        if was != comes:
            print(f"{name}: token {at} of {len(recorded)} differs, path index {step.prompt.stop + at}: {was} recorded, {comes} now")
            return "differs"
    print(f"{name}: {len(recorded)} tokens behind {step.prompt.stop}: the same")
    return "same"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run what the quickstart recorded again, and compare.")
    parser.add_argument("source", type=Path, metavar="STORE_OR_BUNDLE")
    parser.add_argument("--seed", type=int, default=3, help="seed of the model's weights")
    options = parser.parse_args(argv)

    torch.set_num_threads(1)
    model = tiny_model(options.seed)
    if options.source.is_dir():
        source: Any = SessionStore.open(options.source, read_only=True)
    else:
        source = importlib.import_module("sessiontree.bundles").open_bundle(options.source)
    results: list[str] = []
    with source:
        for step in replay(source):
            results.append(check(model, step))
            if results[-1] == "differs":
                return 1
    same = results.count("same")
    print(f"{same} of {len(results)} generations came out as they were recorded; aborted ones were never recorded.")
    return 0 if same == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
