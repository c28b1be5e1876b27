"""What a turn of a session costs SGLang's scheduler: the session controller of engine_bridge beside SGLang 0.5.23's own functions.

A turn is 1,024 tokens, 16 of them the reply; an image turn has an image of 256 among them. Measured is what the scheduler waits for
from the arrival of a request until it stands in the queue, and at the request's end: ``create_req``, the shift of offsets, padding,
``extend_image_inputs``, the check for the end. Ours has gone through every turn; SGLang's history of as many turns was put there in
one, since its arrays of 1,000 turns would take 12 GB.

Expected before the first run: the tree's part (checks, two nodes, a head) 60-100 µs for text and 200 µs for an image turn at any
depth. The rest is what SGLang's request holds of its own: 8 B a token of ids, once more where sentinels stand in them, and an
object for each item; 2-3 ms for a million tokens, more where every page of that is new to the process.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from harness import Figure, median_of, report

from engine_bridge.adapters.pending import PendingPrompt
from engine_bridge.adapters.sglang_sessions import SessionTreeController
from sessiontree import MediaItem, SessionStore, media_identity
from sessiontree.positions import scheme
from tests.sglang_engine import engine, missing

TOKENS, REPLY, IMAGE = 1024, 16, 256
VS, IMG, VE = 151652, 151655, 151653
POSITIONS = scheme("qwen2_5_vl@sglang", spatial_merge_size=2, tokens_per_second=2, max_position_limit=2**28)
NUMBERS = itertools.count()


def prompt_ids(image: bool) -> array[int]:
    ids = np.arange(TOKENS - REPLY, dtype=np.int64)
    ids[0] = next(NUMBERS)
    if image:
        ids[100], ids[101 : 101 + IMAGE], ids[101 + IMAGE] = VS, IMG, VE
    return array("q", ids.tolist())


def request(session_id: str, ids: array[int], after: str | None, inputs: Any = None) -> Any:
    messages, sampling = engine("sglang.srt.managers.io_struct"), engine("sglang.srt.sampling.sampling_params")
    params = sampling.SamplingParams(max_new_tokens=REPLY)
    params.normalize(None)
    return messages.TokenizedGenerateReqInput(
        rid=f"r{next(NUMBERS)}",
        input_text=None,
        input_ids=ids,
        input_embeds=None,
        mm_inputs=inputs,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
        session_params=messages.SessionParams(id=session_id, rid=after),
    )


def images(offsets: list[int], table: torch.Tensor) -> Any:
    """MultimodalInputs as the scheduler has them when a turn's media were hashed."""
    requests = engine("sglang.srt.managers.schedule_batch")
    items = []
    for first in offsets:
        item = requests.MultimodalDataItem(
            modality=requests.Modality.IMAGE,
            offsets=[(first, first + IMAGE - 1)],
            feature=torch.zeros(1),
            model_specific_data={"image_grid_thw": torch.tensor([[1, 32, 32]])},
        )
        item.set_hash(next(NUMBERS))
        items.append(item)
    delta = (table.max() + 1 - table.shape[1]).reshape(1, 1)
    return requests.MultimodalInputs(mm_items=items, im_token_id=IMG, mrope_positions=table, mrope_position_delta=delta)


def own_table() -> torch.Tensor:
    """Positions of an image turn by itself, as SGLang's processor gives them."""
    item = MediaItem("image", media_identity("png", b""), [(101, IMAGE)], (1, 32, 32))
    return torch.tensor(POSITIONS.extend(POSITIONS.initial_state(), prompt_ids(True), [item])[0])


def served(controller: Any, session: Any, given: Any, inputs: Any) -> Any:
    """A request from its arrival to its end."""
    made = session.create_req(given, None, 200_000)
    if inputs is not None:
        controller.adjust_mm_offsets(given, made, inputs)
        made.origin_input_ids = engine("sglang.srt.managers.mm_utils").pad_mm_tokens(made.origin_input_ids, inputs)
        made.extend_image_inputs(inputs)
    made.output_ids.extend(range(REPLY))
    made.update_finish_state(REPLY)
    assert made.finished() and made.to_finish is None
    return made


def opened(controller: Any) -> Any:
    controller.open(engine("sglang.srt.managers.io_struct").OpenSessionReqInput(capacity_of_str_len=0, session_id="s"))
    return controller.get("s")


def theirs(image: bool, turns: int) -> float:
    """Microseconds of the turn after so many, for SGLang's own functions."""
    controller = engine("sglang.srt.session.session_controller").SessionController(None)
    session = opened(controller)
    history = np.tile(np.array([*prompt_ids(image), *range(REPLY)]), turns)[:-REPLY]
    inputs = None
    if image:
        table = torch.arange(len(history)).repeat(3, 1)
        inputs = images([turn * TOKENS + 101 for turn in range(turns)], table)
    before = served(controller, session, request("s", array("q", history.tolist()), None, inputs), inputs)

    table, rid = own_table(), before.rid

    def turn() -> None:
        nonlocal rid
        inputs = images([101], table) if image else None
        rid = served(controller, session, request("s", prompt_ids(image), rid, inputs), inputs).rid

    return median_of(turn, 15) - arrival(image, table)


def arrival(image: bool, table: torch.Tensor) -> float:
    """What of a measured turn is the benchmark's own: making the request."""
    return median_of(lambda: request("s", prompt_ids(image), "x", images([101], table) if image else None), 50)


def ours(image: bool, depths: tuple[int, ...]) -> Iterator[tuple[int, float, float, float]]:
    """(turns, microseconds of the turn after so many, of another branch from there, of the tree's part)."""
    controller = SessionTreeController(store=SessionStore.in_memory(), scheme=POSITIONS)
    session = opened(controller)
    table, rid = own_table(), None

    def turn(after: str | None) -> str:
        inputs = images([101], table) if image else None
        made: str = served(controller, session, request("s", prompt_ids(image), after, inputs), inputs).rid
        return made

    def go_on() -> None:
        nonlocal rid
        rid = turn(rid)

    done, own = 0, arrival(image, table)
    for depth in depths:
        while done < depth:
            go_on()
            done += 1
        fork = rid
        linear, branch = median_of(go_on, 15) - own, median_of(partial(turn, fork), 5) - own
        done += 15
        yield depth, linear, branch, tree_alone(session, fork, image)


def tree_alone(session: Any, rid: str | None, image: bool) -> float:
    """Microseconds of what depends on the tree: the prompt checked and placed, made two nodes, and a head."""
    tree, reply = session.tree, session.reply(rid)

    def turn() -> None:
        media = [MediaItem("image", media_identity("png", str(next(NUMBERS))), [(101, IMAGE)], (1, 32, 32))] if image else []
        node = PendingPrompt.of(reply, reply.stop).extended(prompt_ids(image), media).committed(tree)
        draft = tree.draft(node, key=f"k{next(NUMBERS)}")
        draft.extend(range(REPLY))
        tree.set_head(f"h{next(NUMBERS)}", draft.commit(), expected=None)

    return median_of(turn, 200) - median_of(lambda: prompt_ids(image), 200)


def figures() -> Iterator[Figure]:
    if reason := missing():
        print(f"not measured: {reason}")
        return
    for image in (False, True):
        kind = "image" if image else "text"
        shallow = None
        for turns, whole, branch, tree in ours(image, (10, 100, 1000)):
            shallow = tree if shallow is None else shallow
            name = f"SGLang session, {kind} turn after {turns:,} of {TOKENS:,} tokens"
            note = f"arrival to queue, and end; {branch:,.0f} µs for another branch from there"
            peers, series = {"SGLang 0.5.23": theirs(image, turns)}, f"turns: {kind} turn of SGLang's session"
            yield Figure(name, whole, "µs", peers=peers, note=note, series=series, at=turns)
            bar = None if turns == 10 else 2 * shallow
            yield Figure(f"{name}: the tree's part", tree, "µs", bar, note="bar: twice that after 10 turns")


if __name__ == "__main__":
    raise SystemExit(not report(figures()))
