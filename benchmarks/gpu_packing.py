"""Training on a packed tree beside training on its rows, on a GPU: loss and gradients checked, attention and a whole step measured.

A prompt of 8,192 tokens, eight branches of 1,024, four replies of 512 under each: 32 rows of 9,728 tokens. Attention looks at 1,514
million pairs of tokens in the rows and at 260 million in the tree, so 5.8 times is the most that it can gain; everything else in a
step sees 9.5 times fewer tokens. Without a GPU the same runs in small, with dense masks: FlexAttention has no backward there.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from harness import Figure, report
from packing import rollouts
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import cross_entropy, linear, rms_norm, scaled_dot_product_attention, silu

from engine_bridge import pack_rows, pack_tree, tree_mask
from sessiontree import Node, SessionStore
from sessiontree.positions import scheme

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HEADS, HEAD_DIM = (16, 128) if CUDA else (2, 16)
LAYERS, VOCABULARY = (8, 32_768) if CUDA else (2, 256)
ROWS_AT_ONCE = 8  # of the rows' step: all at once would not fit beside their activations
TREE = (8_192, 8, 1_024, 4, 512) if CUDA else (64, 2, 16, 2, 8)
SMALL = (300, 3, 100, 3, 61) if CUDA else (20, 2, 9, 2, 7)
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
compiled: Any = torch.compile(flex_attention, dynamic=False) if CUDA else flex_attention


class Batch(NamedTuple):
    """Tokens of one sequence, (T,), their positions, where each is attended up to, and the targets: source, id, weight."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    tok_end: torch.Tensor
    source: torch.Tensor
    label: torch.Tensor
    weight: torch.Tensor

    @property
    def block_mask(self) -> Any:
        return tree_mask.block_mask(self.tok_end.cpu().numpy(), self.tok_end, 128)


def of_tree(leaves: list[Node], dtype: torch.dtype) -> Batch:
    (pack,) = pack_tree(leaves, weighting="per_branch_mean", dtype=dtype, device=DEVICE)
    source, target, weight = pack.edges
    return Batch(pack.input_ids, pack.position_ids[0], pack.tok_end, source, pack.input_ids[target], weight)


def of_rows(leaves: list[Node], dtype: torch.dtype, at_once: int) -> list[Batch]:
    """The rows one behind the other, so many in a batch; a document is a tree of one branch."""
    rows = pack_rows(leaves, padding="packed", weighting="per_branch_mean", dtype=dtype, device=DEVICE)
    bounds = rows.cu_seq_lens.tolist()
    batches = []
    for first in range(0, len(leaves), at_once):
        ends = bounds[first : first + at_once + 1]
        part = slice(ends[0], ends[-1])
        labels, lengths = rows.shift_labels[0, part], np.diff(ends)
        tok_end = torch.tensor(np.repeat(np.cumsum(lengths), lengths), dtype=torch.int32, device=DEVICE)
        source = (labels >= 0).nonzero()[:, 0]
        weight = rows.weights[0, part][source]
        batches.append(Batch(rows.input_ids[0, part], rows.position_ids[0, part], tok_end, source, labels[source], weight))
    return batches


class Model(nn.Module):
    """A plain transformer: rotary positions, gated MLPs, logits where they are asked for."""

    def __init__(self, layers: int, vocabulary: int) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.embedding = nn.Embedding(vocabulary, width)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(size) / size[1] ** 0.5)
            for _ in range(layers)
            for size in ((3 * width, width), (width, width), (4 * width, width), (width, 2 * width))
        )

    def forward(self, batch: Batch, attend: Attend) -> torch.Tensor:
        """The loss: the weighted sum over targets."""
        hidden = self.embedding(batch.input_ids)
        turn = 100.0 ** -(torch.arange(0, HEAD_DIM, 2, device=hidden.device, dtype=torch.float64) / HEAD_DIM)
        angle = batch.positions[:, None].double() * turn
        cos, sin = angle.cos().to(hidden.dtype), angle.sin().to(hidden.dtype)

        def rotated(heads: torch.Tensor) -> torch.Tensor:
            one, two = heads.chunk(2, dim=-1)
            return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1).to(heads.dtype)

        for at in range(0, len(self.weights), 4):
            into, out, up, down = (weight.to(hidden.dtype) for weight in self.weights[at : at + 4])
            parts = linear(rms_norm(hidden, hidden.shape[-1:]), into).view(-1, 3, HEADS, HEAD_DIM).permute(1, 2, 0, 3)
            query, key, value = parts[:, None]
            mixed = attend(rotated(query), rotated(key), value)[0].transpose(0, 1).flatten(1)
            hidden = hidden + linear(mixed, out)
            gate, wide = linear(rms_norm(hidden, hidden.shape[-1:]), up).chunk(2, dim=-1)
            hidden = hidden + linear(silu(gate) * wide, down)
        logits = linear(rms_norm(hidden[batch.source], hidden.shape[-1:]), self.embedding.weight.to(hidden.dtype))
        losses = cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), batch.label, reduction="none")
        return (losses * batch.weight).sum()


def flex(batch: Batch, kernel: Any = compiled) -> Attend:
    if not CUDA:
        return dense(batch)
    mask = batch.block_mask
    return lambda query, key, value: kernel(query, key, value, block_mask=mask)


def dense(batch: Batch) -> Attend:
    mask = tree_mask.dense_mask(batch.tok_end)
    return lambda query, key, value: scaled_dot_product_attention(query, key, value, attn_mask=mask)


def tree_of(session_sizes: tuple[int, int, int, int, int]) -> list[Node]:
    return rollouts(SessionStore.in_memory().create("s", scheme=scheme("text@hf5")), session_sizes, VOCABULARY)


def apart(ones: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """The greatest relative difference of two lists of tensors, each by its norm."""
    return max(
        float((one.double() - other.double()).norm() / other.double().norm()) for one, other in zip(ones, others, strict=True)
    )


def gradients(model: Model, batches: list[Batch], attend: Callable[[Batch], Attend]) -> list[torch.Tensor]:
    """The loss, and the gradients of all weights."""
    model.zero_grad(set_to_none=True)
    total = torch.zeros((), dtype=torch.float64, device=DEVICE)
    for batch in batches:
        loss = model(batch, attend(batch))
        loss.backward()
        total += loss.detach()
    return [total, *(weight.grad.clone() for weight in model.parameters() if weight.grad is not None)]


def checks(where: str) -> Iterator[Figure]:
    """Loss and gradients of the tree by FlexAttention, beside the rows by dense masks in float64."""
    leaves = tree_of(SMALL)
    for dtype, kernel, what, bar in (
        (torch.float64, flex_attention, "float64, FlexAttention not compiled", 1e-9),
        (torch.float64, compiled, "float64, FlexAttention compiled", None),
        (torch.float32, compiled, "float32, FlexAttention compiled", 1e-4),
    ):
        torch.manual_seed(0)
        model = Model(2, VOCABULARY).to(DEVICE, torch.float64)
        expected = gradients(model, of_rows(leaves, torch.float64, len(leaves)), dense)
        model.to(dtype)
        try:
            got = gradients(model, [of_tree(leaves, dtype)], lambda batch, kernel=kernel: flex(batch, kernel))  # type: ignore[misc]
        except Exception as error:  # a kernel that this PyTorch cannot make is said, not hidden
            yield Figure(
                f"{where}: tree against rows, {what}", float("inf"), "relative", bar, note=f"{type(error).__name__}: {error}"[:200]
            )
            continue
        note = f"loss {float(expected[0]):.4f}; {len(got) - 1} gradients; rows in float64 by dense masks"
        yield Figure(f"{where}: tree against rows, {what}", apart(got, expected), "relative", bar, note=note)


def milliseconds(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median of each call, by turns, until the device is done."""
    for call in calls.values():
        call()
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            if CUDA:
                torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            if CUDA:
                torch.cuda.synchronize()
            taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(each) * 1000 for name, each in taken.items()}


def heads_of(count: int, batch: int = 1) -> list[torch.Tensor]:
    dtype = torch.bfloat16 if CUDA else torch.float32
    return [torch.randn(batch, HEADS, count, HEAD_DIM, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(3)]


def both_ways(attend: Attend, parts: list[torch.Tensor]) -> Callable[[], object]:
    upward = torch.randn_like(parts[0])
    return lambda: torch.autograd.grad(attend(*parts), parts, upward)


def attention(where: str, leaves: list[Node]) -> Iterator[Figure]:
    """One layer's attention, forward and backward."""
    tree, (rows,) = of_tree(leaves, torch.float32), of_rows(leaves, torch.float32, len(leaves))
    length = leaves[0].stop
    calls = {
        "tree": both_ways(flex(tree), heads_of(len(tree.input_ids))),
        "rows, FlexAttention": both_ways(flex(rows), heads_of(len(rows.input_ids))),
    }

    def causal(backend: Any) -> Attend:
        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(query, key, value, is_causal=True)

        return attend

    padded = heads_of(length, len(leaves))
    failed = []
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        call = both_ways(causal(backend), padded)
        try:
            call()
        except RuntimeError as error:
            failed.append(f"{name}: {str(error)[:80]}")
            continue
        calls[f"rows, {name}"] = call
    taken = milliseconds(calls, 10)
    ours = taken.pop("tree")
    note = "; ".join([f"{HEADS} heads of {HEAD_DIM}, {len(tree.input_ids):,} tokens for {len(rows.input_ids):,}", *failed])
    yield Figure(f"{where}: attention forward + backward, tree", ours, "ms", peers=taken, note=note)
    for name, peer in taken.items():
        yield Figure(f"{where}: attention forward + backward, over {name}", peer / ours, "times", 4 if CUDA else None, "higher")


def steps(where: str, leaves: list[Node]) -> Iterator[Figure]:
    """A whole training step of a small model, bfloat16 over float32 weights, over the tree and over its rows."""
    torch.manual_seed(0)
    model = Model(LAYERS, VOCABULARY).to(DEVICE)
    tree = [of_tree(leaves, torch.float32)]
    rows = of_rows(leaves, torch.float32, ROWS_AT_ONCE)
    masks = {id(batch): flex(batch) for batch in (*tree, *rows)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)  # both take the step, neither moves the weights

    def loss_of(batches: list[Batch]) -> list[torch.Tensor]:
        with torch.autocast(DEVICE, torch.bfloat16):
            return gradients(model, batches, lambda batch: masks[id(batch)])

    got, expected = loss_of(tree), loss_of(rows)
    loss, grads = apart(got[:1], expected[:1]), apart(got[1:], expected[1:])
    del got, expected

    def step(batches: list[Batch]) -> Callable[[], object]:
        def taken() -> None:
            optimizer.zero_grad(set_to_none=True)
            for batch in batches:
                with torch.autocast(DEVICE, torch.bfloat16):
                    model(batch, masks[id(batch)]).backward()
            optimizer.step()

        return taken

    taken = milliseconds({"tree": step(tree), "rows": step(rows)}, 5)
    size = sum(weight.numel() for weight in model.parameters())
    yield Figure(f"{where}: loss of a step, tree against rows in bfloat16", loss, "relative", 1e-3, note=f"gradients {grads:.2g}")
    note = f"{size / 1e6:.0f}M weights; rows in batches of {ROWS_AT_ONCE}"
    yield Figure(f"{where}: training step, tree", taken["tree"], "ms", peers={"rows": taken["rows"]}, note=note)
    yield Figure(f"{where}: training step, over the rows", taken["rows"] / taken["tree"], "times", None, "higher")


def figures() -> Iterator[Figure]:
    where = torch.cuda.get_device_name() if CUDA else "CPU, in small"
    torch.set_float32_matmul_precision("highest")
    torch._dynamo.config.recompile_limit = 64  # one for each shape and type
    yield from checks(where)
    leaves = tree_of(TREE)
    yield from attention(where, leaves)
    yield from steps(where, leaves)


if __name__ == "__main__":
    sys.exit(not report(figures()))
