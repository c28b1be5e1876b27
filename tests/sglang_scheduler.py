"""SGLang 0.5.23's scheduler on the CPU, as far as sessions go: its own code from the arrival of a request to its end.

:class:`Engine` is a ``Scheduler`` without a model. Requests go through its own ``handle_generate_request``: the session is looked
up, the request made, media placed, ids padded, positions and limits checked, and it is queued. ``generate`` leaves what forward
passes would: output tokens, then SGLang's own check for the end. Either session controller can be put into it, so that two engines
can be shown the same requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from hashlib import sha256
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import torch
from numpy.typing import NDArray

from tests.sglang_engine import engine
from tests.toy import IMG, SECONDS, VID, VS, Block

SCHEDULER = "sglang.srt.managers.scheduler"
REQUESTS = "sglang.srt.managers.schedule_batch"
MESSAGES = "sglang.srt.managers.io_struct"
CONTROLLER = "sglang.srt.session.session_controller"
FORWARD = "sglang.srt.model_executor.forward_batch_info"
MAX_INPUT = 100_000


@contextmanager
def configured() -> Iterator[None]:
    """SGLang's process-wide configuration, as far as these modules ask for it."""
    config = {
        "get_disagg": SimpleNamespace(disaggregation_bootstrap_port=None, disaggregation_decode_enable_offload_kvcache=False),
        "get_mm": SimpleNamespace(enable_broadcast_mm_inputs_process=False, mm_feature_transport="default"),
        "get_serving": SimpleNamespace(allow_auto_truncate=False, strip_thinking_cache=False),
        "get_device": SimpleNamespace(mlx_enable_sampling=False, gpu_id=0),
        "get_exec": SimpleNamespace(
            moe=SimpleNamespace(elastic_ep_backend=None),
            kernel=SimpleNamespace(sampling_backend="pytorch"),
            deterministic=SimpleNamespace(rl_on_policy_target=None),
        ),
        "get_spec": SimpleNamespace(speculative_algorithm=None),
        "get_parallel": SimpleNamespace(tp_rank=0, pp_rank=0, attn_cp_rank=0),
    }
    with ExitStack() as stack:
        for name in (SCHEDULER, REQUESTS, FORWARD):
            module = engine(name)
            for getter, value in config.items():
                if hasattr(module, getter):
                    stack.enter_context(patch.object(module, getter, lambda value=value: value))
        yield


class Engine:
    """A scheduler and its session controller; ``queue``: what came out of its intake, in order."""

    def __init__(self, controller: Any = None, tokenizer: Any = None) -> None:
        module = engine(SCHEDULER)
        theirs = engine(CONTROLLER).SessionController
        self.cache = MagicMock(supports_prefix_sharing=lambda: False, cache_controller=None)
        self.controller = theirs(self.cache) if controller is None else controller
        if controller is not None:
            controller.tree_cache = self.cache
        self.queue: list[Any] = []
        scheduler = self.scheduler = object.__new__(module.Scheduler)
        self.static = type(self.controller)
        scheduler.__dict__.update(
            session_controller=self.controller,
            tree_cache=self.cache,
            enable_session_radix_cache=False,
            tokenizer=tokenizer,
            model_config=SimpleNamespace(vocab_size=1_000_000, hf_eos_token_id={2}, requires_mm_token_modalities=False),
            disaggregation_mode=module.DisaggregationMode.NULL,
            metrics_reporter=SimpleNamespace(enable_metrics=False),
            kv_events_publisher=SimpleNamespace(enable_kv_cache_events=False),
            spec_algorithm=MagicMock(is_dflash_family=lambda: False, is_uno=lambda: False, is_none=lambda: True),
            dllm_config=None,
            server_args=SimpleNamespace(sampling_mask_max_tokens=0),
            _mm_processor=None,
            pad_input_ids_func=engine("sglang.srt.managers.mm_utils").pad_mm_tokens,
            max_req_input_len=MAX_INPUT,
            max_req_len=MAX_INPUT + 1,
            max_new_tokens_limit=None,
            page_size=1,
            attn_cp_size=1,
            grammar_manager=SimpleNamespace(process_req_with_grammar=lambda request: False),
            _add_request_to_queue=self.queue.append,
            init_req_max_new_tokens=lambda request: None,
        )

    def open(self, session_id: str = "s", *, streaming: bool = False, timeout: float | None = None) -> bool:
        request = engine(MESSAGES).OpenSessionReqInput(
            capacity_of_str_len=1000, session_id=session_id, streaming=streaming, timeout=timeout
        )
        success: bool = self.controller.open(request).success
        return success

    def close(self, session_id: str = "s") -> None:
        self.controller.close(engine(MESSAGES).CloseSessionReqInput(session_id=session_id))

    def send(self, rid: str, ids: Sequence[int], *blocks: Block, session_id: str = "s", bos: int = 0, **given: Any) -> Any:
        """A request through the scheduler's intake: the ``Req`` that it puts into its queue.

        ``blocks``: media of the turn; each stands where its ``fill`` first runs in ``ids``, in order. ``bos``: how many tokens
        stand before the turn's own, for its processor's table. Session parameters by name; others are fields of the request.
        """
        names = {"offset": "offset", "replace": "replace", "drop_previous_output": "drop_previous_output", "after": "rid"}
        params = {there: given.pop(name, None) for name, there in names.items()}
        sampling = engine("sglang.srt.sampling.sampling_params").SamplingParams(max_new_tokens=given.pop("max_new_tokens", 64))
        sampling.normalize(None)
        mm_inputs = given.pop("mm_inputs", processed(ids, blocks) if blocks else None)
        request = engine(MESSAGES).TokenizedGenerateReqInput(
            **{
                "rid": rid,
                "input_text": None,
                "input_ids": array("q", ids),
                "input_embeds": None,
                "mm_inputs": mm_inputs,
                "token_type_ids": None,
                "sampling_params": sampling,
                "return_logprob": False,
                "logprob_start_len": -1,
                "top_logprobs_num": 0,
                "token_ids_logprob": None,
                "stream": False,
                "session_params": engine(MESSAGES).SessionParams(id=session_id, **params),
                **given,
            }
        )
        with self.intake():
            self.scheduler.handle_generate_request(request)
        return self.queue[-1]

    def intake(self) -> AbstractContextManager[Any]:
        """The scheduler's module with this engine's controller in it."""
        return patch.object(engine(SCHEDULER), "SessionController", self.static)

    def generate(self, request: Any, output: Sequence[int], *, end: bool = True) -> Any:
        """What forward passes and SGLang's check for the end leave: ``output``, and that it has finished, of length or by EOS 2."""
        if end:
            request.sampling_params.max_new_tokens = len(request.output_ids) + len(output)
        for token in output:
            request.output_ids.append(token)
            request.update_finish_state()
        if not output:
            request.update_finish_state(0)
        if request.session is not None and request.session.streaming and request.finished():
            aborted = isinstance(request.finished_reason, engine(REQUESTS).FINISH_ABORT)
            request.session.abort_req() if aborted else finish_streaming(request)
        return request

    def turn(self, rid: str, ids: Sequence[int], *blocks: Block, output: Sequence[int] = (8, 9), **given: Any) -> Any:
        """A request that is served."""
        request = self.send(rid, ids, *blocks, **given)
        assert not refused(request), refused(request)
        return self.generate(request, output)


def finish_streaming(request: Any) -> None:
    """What the cache does at the end of a streaming turn: cut what the client did not see, tell the session."""
    request.refresh_fill_ids()
    if request.finished_len is not None:
        request.output_ids = request.output_ids[: request.finished_len]
    request.session.finish_req(request)


def refused(request: Any) -> str | None:
    """Why a request is to be aborted; None if it is not."""
    reason = request.to_finish or request.finished_reason
    return reason.message if isinstance(reason, engine(REQUESTS).FINISH_ABORT) else None


def item(block: Block, first: int, frames: int = 1) -> Any:
    """SGLang's item of a block whose placeholders begin at ``first`` of their turn, hashed by the engine's own rule."""
    kinds = engine(REQUESTS).Modality
    digest = sha256(repr((block.modality, block.grid, block.number)).encode()).digest()
    data = {f"{block.modality}_grid_thw": torch.tensor([block.grid])}
    if block.modality == "video":
        data["second_per_grid_ts"] = torch.tensor([SECONDS])
    made = engine(REQUESTS).MultimodalDataItem(
        modality=kinds[block.modality.upper()],
        offsets=[(first, first + block.num_tokens - 1)],
        feature=torch.full((block.num_tokens * 4, 3), float(block.number)),
        model_specific_data=data,
    )
    made.set_hash(int.from_bytes(digest[:8], "big"))
    return made


def processed(ids: Sequence[int], blocks: Sequence[Block]) -> Any:
    """What SGLang's Qwen2.5-VL processor hands over for a turn: items, and positions by its own get_rope_index."""
    items, at = [], 0
    for block in blocks:
        at = next(i for i in range(at, len(ids)) if list(ids[i : i + block.num_tokens]) == [block.fill] * block.num_tokens)
        items.append(item(block, at))
        at += block.num_tokens
    grids = {
        kind: torch.tensor(rows) if (rows := [block.grid for block in blocks if block.modality == kind]) else None
        for kind in ("image", "video")
    }
    seconds = [SECONDS for block in blocks if block.modality == "video"]
    positions, delta = engine("sglang.srt.layers.rotary_embedding.mrope_rope_index").get_rope_index(
        spatial_merge_size=2,
        image_token_id=IMG,
        video_token_id=VID,
        vision_start_token_id=VS,
        model_type="qwen2_5_vl",
        tokens_per_second=2,
        input_ids=torch.tensor([list(ids)]),
        image_grid_thw=grids["image"],
        video_grid_thw=grids["video"],
        second_per_grid_ts=torch.tensor(seconds) if seconds else None,
    )
    return engine(REQUESTS).MultimodalProcessorOutput(
        mm_items=items,
        input_ids=list(ids),
        im_token_id=IMG,
        video_token_id=VID,
        mrope_positions=positions.squeeze(1),
        mrope_position_delta=delta,
    )


def prefilled(request: Any, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
    """Positions that SGLang's own forward batch gives the request's tokens ``[start, stop)``: (3, stop - start)."""
    stop = request.seqlen if stop is None else stop
    forward = engine(FORWARD).ForwardBatch
    batch = SimpleNamespace(
        multimodal_inputs=[request.multimodal_inputs],
        extend_lens=[stop - start],
        prefix_lens=[start],
        reqs=[request],
    )
    made = SimpleNamespace(
        seq_lens_cpu=torch.tensor([stop]),
        seq_lens=torch.tensor([stop]),
        _expand_mrope_from_input=lambda inputs, length: forward._expand_mrope_from_input(None, inputs, length),
    )
    forward._compute_mrope_positions_extend(made, SimpleNamespace(device="cpu"), batch)
    return np.asarray(made.mrope_positions)


def decoded(request: Any) -> NDArray[np.int64]:
    """The position that it gives the token to be decoded behind the request's: (3,)."""
    length = request.seqlen + 1
    made = SimpleNamespace(seq_lens_cpu=torch.tensor([length]), seq_lens=torch.tensor([length]))
    made._expand_mrope_from_input = lambda inputs, n: engine(FORWARD).ForwardBatch._expand_mrope_from_input(None, inputs, n)
    batch = SimpleNamespace(multimodal_inputs=[request.multimodal_inputs])
    engine(FORWARD).ForwardBatch._compute_mrope_positions_decode(made, SimpleNamespace(device="cpu"), batch)
    return np.asarray(made.mrope_positions)[:, 0]


@cache
def aborts() -> Any:
    return engine(REQUESTS).FINISH_ABORT
