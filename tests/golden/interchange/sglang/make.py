"""Makes dump.pkl, crash.pkl and requests.log beside it, with SGLang 0.5.23's own code and no GPU (see tests/sglang_engine.py).

    PYTHONPATH=. python tests/golden/interchange/sglang/make.py

The requests are SGLang's classes, and ``TokenizerManager.dump_requests``, ``record_request_for_crash_dump``, ``_dump_data_to_file``
and ``RequestLogger`` write them. What a model would have given is made up here.
"""

import asyncio
import copy
import pickle
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tests.sglang_engine import engine

with patch.object(asyncio, "set_event_loop_policy"):  # uvloop is a stub
    manager = engine("sglang.srt.managers.tokenizer_manager")
io_struct = engine("sglang.srt.managers.io_struct")
log = engine("sglang.srt.utils.request_logger")
server = engine("sglang.srt.server_args")
HERE = Path(__file__).parent
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"


def output(rid: str, text: str, ids: list[int], prompt: int, kind: str = "stop", **meta: Any) -> dict[str, Any]:
    reason = {"type": kind, "matched": ids[-1]} if kind == "stop" else {"type": kind, "length": len(ids)}
    info = {"id": rid, "finish_reason": reason, "prompt_tokens": prompt, "weight_version": "default", "num_retractions": 0}
    info |= {"reasoning_tokens": 0, "completion_tokens": len(ids), "cached_tokens": 0, "e2e_latency": 0.25, **meta}
    return {"text": text, "output_ids": ids, "meta_info": info}


def requests() -> list[tuple[Any, dict[str, Any]]]:
    """Requests and what each gave."""
    made = io_struct.GenerateReqInput
    logprobs = [(-0.5, 785, None), (-1.25, 374, None)]
    named = [(-0.5, 785, "The"), (-1.25, 374, " is")]
    prompt = [(None, 151644, None)]
    image = io_struct.ImageData(url=f"data:image/png;base64,{PNG}", detail="low")
    sampling = {"temperature": 0.7, "max_new_tokens": 16}
    session = {"id": "chat", "rid": None, "offset": None, "replace": None, "drop_previous_output": None}
    return [
        (made(text="Where is Łódź?", rid="text", sampling_params=sampling, return_logprob=True, stream=True),
         output("text", "The is", [785, 374], 5, output_token_logprobs=logprobs)),
        (made(input_ids=[151644, 872, 198], rid="ids", sampling_params=sampling, extra_key="a"),
         output("ids", "The is", [785, 374], 3, "length", output_token_logprobs=named, input_token_logprobs=prompt)),
        (made(text="<image>What?", image_data=[image, f"data:image/png;base64,{PNG}", PNG, "https://example.org/a.png"], rid="see"),
         output("see", "Red.", [6033, 13], 90)),
        (made(text="<image>And?", image_data=PNG, input_ids=[1, 2], rid="one"), output("one", "Blue.", [10331, 13], 90)),
        (made(input_ids=[10, 11], rid="s1", session_params=session), output("s1", "a", [64], 2)),
        (made(input_ids=[12], rid="s2", session_params=session | {"rid": "s1"}), output("s2", "b", [65], 4)),
        (made(input_ids=[13], rid="s3", session_params=session | {"rid": "s1"}), output("s3", "c", [66], 4)),
        (made(input_ids=[14], rid="s4", session_params=session | {"rid": "s2", "drop_previous_output": True}),
         output("s4", "", [], 5, "abort")),
        (io_struct.EmbeddingReqInput(text="embed me", rid="embed"),
         {"embedding": [0.25, -0.5], "meta_info": {"id": "embed", "finish_reason": {"type": "length", "length": 0}}}),
    ]  # fmt: skip


def dumped(folder: str) -> Path:
    """A request dump, by the server's own code."""
    fake = SimpleNamespace(dump_requests_exclude_meta_keys=["routed_experts"], dump_request_list=[], dump_requests_folder=folder)
    made = requests()
    fake.dump_requests_threshold = len(made)
    fake._server_args_for_dump = lambda: server.ServerArgs(model_path="Qwen/Qwen2.5-VL-3B-Instruct")
    fake._dump_config_snapshot = lambda: {"max_running_requests": 8, "model_path": "Qwen/Qwen2.5-VL-3B-Instruct"}
    fake._dump_data_to_file = lambda **kinds: manager.TokenizerManager._dump_data_to_file(fake, **kinds)

    async def main() -> None:
        for number, (request, out) in enumerate(made):
            stats = SimpleNamespace(created_time=1000.0 + number, finished_time=1000.5 + number)
            with patch.object(manager, "convert_time_to_realtime", lambda seconds: 1_780_000_000 + seconds):
                manager.TokenizerManager.dump_requests(fake, SimpleNamespace(obj=request, time_stats=stats), out)
        await asyncio.gather(*(task for task in asyncio.all_tasks() if task is not asyncio.current_task()))

    asyncio.run(main())
    (path,) = Path(folder).glob("*.pkl")
    return path


def crashed() -> list[Any]:
    """What a crash dump has as requests: ids as tuples, and one that was cut off."""
    fake = SimpleNamespace(crash_dump_request_list=[])
    with patch.object(manager, "convert_time_to_realtime", float), patch.object(manager, "real_time", lambda: 1.5):
        for request, out in requests()[:2]:
            stats = SimpleNamespace(created_time=1.0)
            manager.TokenizerManager.record_request_for_crash_dump(
                fake, SimpleNamespace(obj=copy.copy(request), time_stats=stats), out
            )
    state = manager.ReqState([], False, asyncio.Event(), requests()[1][0], SimpleNamespace())
    cut = [(io_struct.GenerateReqInput(text="never began", rid="cut"), state.get_crash_dump_output(), 2.0, 2.5)]
    state.append_text("The")
    state.output_ids.append(785)
    return [*fake.crash_dump_request_list, *cut, (state.obj, state.get_crash_dump_output(), 2.0, 2.5)]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        (HERE / "dump.pkl").write_bytes(dumped(folder).read_bytes())
    crash = {"server_args": None, "config_updates": [], "resolved_config": None, "requests": crashed(), "launch_command": "x --y"}
    (HERE / "crash.pkl").write_bytes(pickle.dumps(crash))
    lines: list[str] = []
    logger = log.RequestLogger(True, 3, "json", None)
    logger.targets = [SimpleNamespace(info=lines.append)]
    with patch.object(log, "_watermark_redaction_enabled", lambda: False):
        for request, out in requests():
            logger.log_received_request(request)
            logger.log_finished_request(request, out)
    (HERE / "requests.log").write_text("\n".join(lines) + "\n")
