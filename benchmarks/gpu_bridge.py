"""The bridge to the GPU: what a batch costs from nodes to tensors, beside the ways of engines, checked and measured in one run.

With a GPU it first compares the kernels with NumPy, bit for bit, over every family, then measures both machines' parts; without
one the CPU rows alone. Expected before the first run, on two cores: 256 requests of 128 tokens 110-150 µs of host (0.4 µs a request
for five attribute reads, a slice and what is kept of it; 20 µs of NumPy for the columns), a prefill of 131,072 tokens 20 µs (one
copy of 512 KiB), a decode step of 512 slots 6 µs (one look at which slots live, one copy of 2 KiB). On an H200: 5-10 µs more for
the launch of a graph and the wait for it, 18 µs of device time for 32,768 tokens on three axes.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import page_hashes
import torch
from harness import Figure, median_of, report

from engine_bridge import InputStager
from sessiontree import Node, SessionStore
from sessiontree.positions import scheme

POSITIONS = scheme("qwen2_5_vl@sglang", spatial_merge_size=2, tokens_per_second=2)
CUDA = torch.cuda.is_available()
LONG = 131_072


class HostFill(InputStager):
    """A stager that stops before the copy."""

    def _launch_extend(self, *_: Any) -> None:
        pass

    def _launch_decode(self, *_: Any) -> None:
        pass


class Request:
    """A request as SGLang keeps it: the whole context in an array of its own, a position table, a delta."""

    def __init__(self, node: Node, start: int) -> None:
        self.fill_ids = array("q", node.input_ids().tolist())
        self.prefix_len = start
        self.positions = torch.from_numpy(node.positions().copy())
        self.delta = torch.tensor([[node.mrope_position_delta]])


def sessions(count: int, context: int, new: int) -> list[Node]:
    """Nodes of ``new`` tokens behind ``context``, each in a session of its own."""
    store, found = SessionStore.in_memory(), []
    rng = np.random.default_rng(count)
    for number in range(count):
        session = store.create(f"s{number}", scheme=POSITIONS)
        parent = session.append(session.root, rng.integers(0, 150_000, context, np.int32)) if context else session.root
        found.append(session.append(parent, rng.integers(0, 150_000, new, np.int32)))
    return found


def like_sglang(requests: list[Request], device: str) -> tuple[torch.Tensor, ...]:
    """One concatenation of ids, a position table from slices, and a small tensor for each of the rest."""
    pin = device == "cuda"

    def small(numbers: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(numbers, dtype=dtype, pin_memory=pin).to(device, non_blocking=True)

    ends = [len(request.fill_ids) for request in requests]
    ids = [request.fill_ids[:end][request.prefix_len :] for request, end in zip(requests, ends, strict=True)]
    lengths = [len(part) for part in ids]
    starts = [request.prefix_len for request in requests]
    packed = torch.from_numpy(np.concatenate([np.frombuffer(part, np.int64) for part in ids]))
    input_ids = (packed.pin_memory() if pin else packed).to(device, non_blocking=True)
    tables = [request.positions[:, start:end] for request, start, end in zip(requests, starts, ends, strict=True)]
    positions = torch.cat(tables, dim=1).to(dtype=torch.int64, device=device, non_blocking=True)
    deltas = torch.cat([request.delta for request in requests]).to(device, non_blocking=True)
    extend_lens = small(lengths, torch.int32)
    start_loc = torch.cumsum(extend_lens, 0) - extend_lens
    indices: torch.Tensor  # of each token on its path, which attention wants beside the positions
    if pin:
        shift = torch.repeat_interleave(small(starts) - start_loc, extend_lens, output_size=len(packed))
        indices = torch.arange(len(packed), device=device) + shift
    else:
        indices = torch.cat([torch.arange(start, end) for start, end in zip(starts, ends, strict=True)])
    return (
        input_ids,
        positions,
        indices,
        deltas,
        small(ends),
        small(starts, torch.int32),
        extend_lens,
        start_loc,
        small(list(range(len(requests)))),
    )


def like_lists(requests: list[Request], device: str) -> tuple[torch.Tensor, ...]:
    """Everything in Python lists until the last moment."""
    ids: list[int] = []
    rows: list[list[int]] = [[], [], []]
    bounds = [0]
    for request in requests:
        ids.extend(request.fill_ids[request.prefix_len :])
        for row, axis in zip(rows, request.positions[:, request.prefix_len :].tolist(), strict=True):
            row.extend(axis)
        bounds.append(len(ids))
    ends = [len(request.fill_ids) for request in requests]
    return tuple(torch.tensor(numbers, device=device) for numbers in (ids, rows, bounds, ends))


def like_sglang_decode(
    requests: list[Request], seq_lens: torch.Tensor, tokens: torch.Tensor, device: str
) -> tuple[torch.Tensor, ...]:
    """Deltas gathered request by request; lengths and last tokens are on the device already."""
    seq_lens.add_(1)
    deltas = torch.tensor([request.delta.item() for request in requests], dtype=torch.int64, device=device)
    positions = ((deltas - 1) + seq_lens).unsqueeze(0).repeat(3, 1)
    slots = torch.tensor(list(range(len(requests))), dtype=torch.int64, pin_memory=device == "cuda").to(device, non_blocking=True)
    return tokens.to(torch.int64), positions, slots, deltas[:, None]


def ready(call: Callable[[], object]) -> Callable[[], object]:
    """Until the tensors are there."""
    stream = torch.cuda.current_stream()

    def both() -> None:
        call()
        stream.synchronize()

    return both


def extends(
    nodes: list[Node], what: str, where: str, bars: tuple[float, float | None], wait: Any, made: Any, count: int
) -> Iterator[Figure]:
    starts, stops = [node.start for node in nodes], [node.stop for node in nodes]
    requests = [Request(node, node.start) for node in nodes]
    device = "cuda" if wait is ready else "cpu"
    stager = made(LONG, 512, device=device)
    ours, *others = quickest(
        wait is ready,
        (wait(lambda: stager.extend(nodes, starts, stops)), count // 3),
        (wait(lambda: like_sglang(requests, device)), max(20, count // 20)),
        (wait(lambda: like_lists(requests, device)), max(4, count // 200)),
    )
    peers = dict(zip(("SGLang style", "lists"), others, strict=True))
    yield Figure(f"{where}: {what}", ours, "µs", bars[0], peers=peers)
    times = peers["SGLang style"] / ours
    yield Figure(f"{where}: {what}, over SGLang style", times, "times", bars[1], "higher", note="from its own arrays")


def decodes(where: str, bars: tuple[float, float | None], wait: Any, made: Any) -> Iterator[Figure]:
    nodes = sessions(512, 0, 64)
    requests = [Request(node, 0) for node in nodes]
    device = "cuda" if wait is ready else "cpu"
    stager = made(8_192, 512, device=device)
    slots = np.arange(512, dtype=np.int32)
    stager.admit(nodes, slots)
    seq_lens = torch.full((512,), 64, device=device)
    tokens = torch.zeros(512, dtype=torch.int32, device=device)
    turns = itertools.cycle((slots, slots[::-1].copy()))
    ours, other, theirs = quickest(
        wait is ready,
        (wait(lambda: stager.decode(slots)), 600),
        (wait(lambda: stager.decode(next(turns))), 600),
        (wait(lambda: like_sglang_decode(requests, seq_lens, tokens, device)), 100),
    )
    peers = {"SGLang style": theirs}
    yield Figure(f"{where}: decode of 512", ours, "µs", bars[0], peers=peers, note="the slots of the step before")
    bar = bars[0] if wait is same else None  # on a GPU reading them costs a trip to the host: 17 µs, reported beside the bar
    yield Figure(f"{where}: decode of 512, other slots than the step before", other, "µs", bar, peers=peers)
    yield Figure(
        f"{where}: decode of 512, other slots, over SGLang style", peers["SGLang style"] / other, "times", bars[1], "higher"
    )
    sampled = torch.ones(512, dtype=torch.int64, device=device)
    step = median_of(wait(lambda: (stager.decode(slots), stager.advance(slots, sampled))), 500)
    yield Figure(f"{where}: decode of 512 and advance by one", step, "µs")


def same(call: Callable[[], object]) -> Callable[[], object]:
    return call


def on_the_cpu() -> Iterator[Figure]:
    fill = "CPU, host fill"
    yield from extends(sessions(256, 512, 128), "256 × 128 extend from nodes", fill, (160, 5), same, HostFill, 1_000)
    yield from extends(sessions(1, 0, LONG), "one 128k prefill", fill, (30, 15), same, HostFill, 1_000)
    yield from decodes(fill, (6, 25), same, HostFill)
    whole = InputStager(LONG, 512)
    nodes = sessions(256, 512, 128)
    starts = [node.start for node in nodes]
    yield Figure("CPU, tensors ready: 256 × 128 extend", median_of(lambda: whole.extend(nodes, starts), 300), "µs")
    slots = np.arange(256, dtype=np.int32)
    whole.admit(nodes, slots)
    yield Figure("CPU, tensors ready: decode of 256", median_of(lambda: whole.decode(slots), 1_000), "µs")
    appended = sessions(1, LONG, 64)
    start = appended[0].start
    yield Figure("CPU: one request appended to 131k tokens", median_of(lambda: whole.extend(appended, start), 1_000), "µs", 50)


def settle() -> None:
    """Stay on the core that is quickest now: others may share theirs with other guests of the host, at half the speed."""

    def work() -> float:
        began = time.perf_counter()
        for _ in range(20):
            sum(range(50_000))
        return time.perf_counter() - began

    took = {}
    for core in os.sched_getaffinity(0):
        os.sched_setaffinity(0, {core})
        took[core] = min(work() for _ in range(3))
    os.sched_setaffinity(0, {min(took, key=took.__getitem__)})


def quickest(settled: bool, *calls: tuple[Callable[[], object], int]) -> list[float]:
    """Of each call the least of five medians, taken in turn: what others do to the machine is not what is measured."""
    medians = []
    for _ in range(5):
        if settled:
            settle()
        medians.append([median_of(call, count) for call, count in calls])
    return [min(each) for each in zip(*medians, strict=True)]


def on_the_gpu() -> Iterator[Figure]:
    name = torch.cuda.get_device_name()
    settle()
    yield from extends(sessions(256, 512, 128), "256 × 128 extend from nodes", name, (260, 6), ready, InputStager, 1_000)
    yield from extends(sessions(1, 0, LONG), "one 128k prefill", name, (95, None), ready, InputStager, 1_000)
    yield from decodes(name, (12, None), ready, InputStager)
    appended = sessions(1, LONG, 64)
    start = appended[0].start
    stager = InputStager(LONG, 512, device="cuda")
    taken = median_of(ready(lambda: stager.extend(appended, start)), 1_000)
    yield Figure(f"{name}: one request appended to 131k tokens", taken, "µs", 50)
    yield from device_times(name)
    yield from counted(name)  # last: what was profiled once is slow from then on


def counted(name: str) -> Iterator[Figure]:
    """What the profiler and the allocator see of a steady step."""
    nodes = sessions(256, 512, 128)
    starts = [node.start for node in nodes]
    stager = InputStager(LONG, 512, device="cuda")
    slots = np.arange(256, dtype=np.int32)
    turns = itertools.cycle((slots, slots[::-1].copy()))
    stager.admit(nodes, slots)
    sampled = torch.ones(256, dtype=torch.int64, device="cuda")
    for what, call in (
        ("extend", lambda: stager.extend(nodes, starts)),
        ("decode", lambda: stager.decode(next(turns))),
        ("advance", lambda: stager.advance(slots, sampled)),
    ):
        for _ in range(5):
            call()
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_stats().get("allocation.all.allocated", 0)
        for _ in range(50):
            call()
        allocated = torch.cuda.memory_stats().get("allocation.all.allocated", 0) - allocated
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(10):
                call()
            torch.cuda.synchronize()
        events = [event for event in profile.events() if event.device_type == torch._C._autograd.DeviceType.CUDA]
        copies = sum("Memcpy HtoD" in event.name for event in events) / 10
        kernels = sum("Mem" not in event.name for event in events) / 10
        bar = None if what == "advance" else 1
        yield Figure(f"{name}: H2D copies of one {what}", copies, "copies", bar, note=f"{len(events)} device events in 10")
        yield Figure(f"{name}: kernels of one {what}", kernels, "kernels", bar)
        yield Figure(f"{name}: allocations in 50 steps of {what}", allocated, "allocations", 0)


def device_times(name: str) -> Iterator[Figure]:
    """How much of it is the device's, by events around replays; and the ways of launching."""
    for what, nodes in (("256 × 128", sessions(256, 512, 128)), ("128k", sessions(1, 0, LONG))):
        starts = [node.start for node in nodes]
        for graphed in (True, False):
            stager = InputStager(LONG, 512, device="cuda", cuda_graph=graphed)
            taken = median_of(ready(partial(stager.extend, nodes, starts)), 300)
            how = "one graph" if graphed else "copy and kernel launched apart"
            yield Figure(f"{name}: {what} extend, {how}", taken, "µs")
        words = stager._layout.payload + (LONG if what == "128k" else 32_768)
        for part, call in (("copy", partial(stager._extend_ring.copy, 0, words)), ("kernel", stager._expand_extend)):
            event: Any = torch.cuda.Event  # untyped
            start, end = event(enable_timing=True), event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            for _ in range(200):
                call()
            end.record()
            torch.cuda.synchronize()
            yield Figure(f"{name}: {what} extend, {part} alone, back to back", start.elapsed_time(end) * 5, "µs")


def compared() -> Iterator[Figure]:
    """The kernels beside NumPy, on every family."""
    from tests.stager_pairs import compare  # only where there is something to compare
    from tests.test_positions_golden import CASES

    began = time.perf_counter()
    for graphed in (True, False):
        for family, rule in CASES:
            compare(family, rule, int(graphed), partial(InputStager, device="cuda", cuda_graph=graphed))
    yield Figure("families whose batches the kernels and NumPy make alike", len(CASES), "schemes", note="bit for bit, tails too")
    yield Figure("the comparison took", time.perf_counter() - began, "s")


def figures() -> Iterator[Figure]:
    if CUDA:
        yield from compared()
    yield from on_the_cpu()
    if CUDA:
        yield from page_hashes.figures()  # elsewhere they are a part of their own
        yield from on_the_gpu()


if __name__ == "__main__":
    sys.exit(not report(figures()))
