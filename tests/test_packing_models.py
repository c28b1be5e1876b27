"""A packed tree's loss and gradients are those of its rows, in tiny models of transformers with random float64 weights.

On the CPU, where FlexAttention has no backward: the model takes the dense mask.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, Phase, assume, given, settings
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from engine_bridge import pack_rows, pack_tree
from sessiontree import MediaItem, Node, Session, SessionStore
from sessiontree.annotations import ADVANTAGE, LOSS_WEIGHT
from sessiontree.positions import scheme
from tests.tiny_models import END, IMAGE, START, encoded, grown, picture, text_config, tiny_model, tiny_scheme
from tests.trained_trees import SEEDED, WEIGHTINGS, annotate, decode

SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # a smaller tree would say no more
TREES = settings(max_examples=60 if SOAK else 5, deadline=None, suppress_health_check=list(HealthCheck), phases=PHASES)
BAR = 1e-9
FACTORS = (LOSS_WEIGHT, ADVANTAGE)


@cache
def model_of(family: str) -> Any:
    if family == "qwen3":
        return grown(transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**text_config(head_dim=16)))
    return tiny_model(family)


def tree_of(rng: random.Random, family: str) -> Session:
    """A random tree with pictures, where the model has eyes, the same picture in several places; some tokens are annotated."""
    positions_of = scheme("text@hf5") if family == "qwen3" else tiny_scheme(family)
    session = SessionStore.in_memory().create("s", scheme=positions_of)
    nodes = [session.append(session.root, [1, 2, 3])]
    for number in range(rng.randint(4, 9)):
        parent = rng.choice(nodes)
        if rng.random() < 0.6:
            nodes.append(decode(session, parent, [rng.randint(1, 40) for _ in range(rng.randint(1, 5))]))
        elif family == "qwen3" or rng.random() < 0.3:
            nodes.append(session.append(parent, [rng.randint(1, 40) for _ in range(rng.randint(1, 4))]))
        else:
            item = picture(positions_of, rng.choice("ab"), 2, rng.randint(1, 2), 2)
            ids = [10 + number, START, *[IMAGE] * item.num_placeholders, END, 12]
            nodes.append(session.append(parent, ids, media=[item]))
    long = rng.choice([node for node in nodes if node.origin == "generated"] or [decode(session, nodes[0], [30, 31])])
    nodes.append(decode(session, session.truncate(long, long.stop - 1), [35, 36]))
    for node in session.tree:
        annotate(session, rng, node)
    return session


def features(model: Any, spans: Sequence[Any]) -> dict[str, Any]:
    """What an encoder gives for the pictures of these spans, in their order; each of its contents would be encoded once."""
    items: list[MediaItem] = [span.item for span in spans]
    assert all(span.first_row == 0 and span.stop - span.start == span.item.num_placeholders for span in spans)
    return encoded(model, items) if items else {}


def loss_of_tree(model: Any, leaves: Sequence[Node], **named: Any) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for pack in pack_tree(leaves, dtype=torch.float64, **named):
        positions = pack.position_ids[:, None] if len(pack.position_ids) > 1 else pack.position_ids
        logits = model(
            input_ids=pack.input_ids[None],
            position_ids=positions,
            attention_mask=pack.dense_mask()[None, None],
            use_cache=False,
            **features(model, pack.media_spans),
        ).logits[0]
        source, target, weight = pack.edges
        total = total + (cross_entropy(logits[source], pack.input_ids[target], reduction="none") * weight).sum()
    return total


def loss_of_rows(model: Any, leaves: Sequence[Node], padding: Any, **named: Any) -> torch.Tensor:
    rows = pack_rows(leaves, padding=padding, dtype=torch.float64, **named)
    mask = {} if rows.attention_mask is None else {"attention_mask": rows.attention_mask}
    logits = model(
        input_ids=rows.input_ids, position_ids=rows.position_ids, use_cache=False, **mask, **features(model, rows.media_spans)
    ).logits
    losses = cross_entropy(logits.flatten(0, 1), rows.shift_labels.flatten(), reduction="none")
    return (losses * rows.weights.flatten()).sum()


class InFloat64(TorchFunctionMode):
    """Computes in float64 what transformers computes in float32, whatever a model's weights are: norms and rotations."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        doubled = {torch.float32: torch.float64}
        args = [doubled.get(each, each) if isinstance(each, torch.dtype) else each for each in args]
        kwargs = {name: doubled.get(each, each) if isinstance(each, torch.dtype) else each for name, each in (kwargs or {}).items()}
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*args, **kwargs)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm().clamp_min(1e-30))


@pytest.mark.parametrize("family", ["qwen3", "qwen2_5_vl", "qwen3_vl"])
@TREES
@given(rng=SEEDED)
def test_loss_and_gradients_are_the_rows(family: str, rng: random.Random) -> None:
    session, model = tree_of(rng, family), model_of(family)
    weights = [weight.requires_grad_(True) for name, weight in model.named_parameters() if "visual" not in name]
    leaves = list(session.leaves())
    assume(pack_tree(leaves, annotations=session))  # not all of it is rejected
    padding = rng.choice(("left", "right", "packed"))
    with InFloat64():
        for weighting in WEIGHTINGS:
            named: Any = {"annotations": session, "weighting": weighting, "factors": rng.choice((FACTORS, (LOSS_WEIGHT,)))}
            by_rows = loss_of_rows(model, leaves, padding, **named)
            expected = torch.autograd.grad(by_rows, weights, allow_unused=True)
            longest = max((row.stop for row in pack_rows(leaves, **named).rows), default=1)
            for budget in (None, rng.randint(longest, 2 * longest)):
                loss = loss_of_tree(model, leaves, token_budget=budget, **named)
                assert apart(loss.detach(), by_rows.detach()) <= BAR
                got = torch.autograd.grad(loss, weights, allow_unused=True)
                for one, other in zip(got, expected, strict=True):
                    assert apart(one, other) <= BAR
