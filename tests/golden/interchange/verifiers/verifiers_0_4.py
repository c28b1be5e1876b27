"""verifiers 0.4 itself: writes ``traces.jsonl`` by its own graph and writer, and reads one, saying what a trainer would get.

    python verifiers_0_4.py write FOLDER
    python verifiers_0_4.py read FOLDER

Run where ``verifiers==0.4.0`` is installed; it is no dependency of ours.
"""
# mypy: ignore-errors

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import verifiers.v1.trace as traces
from verifiers.v1 import graph
from verifiers.v1.configs.agent import WireAgentConfig
from verifiers.v1.episode import EnvInfo, Episode, EvalRunInfo, GroupInfo
from verifiers.v1.semantic import ParentLink
from verifiers.v1.task import WireTaskData
from verifiers.v1.types import (
    AssistantMessage,
    ImageUrlContentPart,
    ImageUrlSource,
    Response,
    Sampling,
    SystemMessage,
    TextContentPart,
    Tool,
    ToolCall,
    ToolMessage,
    TurnTokens,
    Usage,
    UserMessage,
)
from verifiers.v1.utils.trace_store import read_episodes, write_episode

PIXEL = base64.b64encode(
    bytes.fromhex(
        "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
    )
).decode()
ADD = Tool(name="add", description="Adds.", parameters={"type": "object", "properties": {"a": {"type": "integer"}}}, strict=True)


def turn(trace, prompt, reply, spans, prompt_ids, ids, logprobs, tools=(), finish="stop"):
    """One exchange, as the interception server commits it."""
    pending = graph.prepare_turn(trace, prompt, list(tools))
    tokens = (
        TurnTokens(prompt_ids=prompt_ids, completion_ids=ids, completion_logprobs=logprobs, message_spans=spans) if ids else None
    )
    usage = Usage(prompt_tokens=len(prompt_ids), completion_tokens=len(ids))
    response = Response(id="r", created=1, model="m", message=reply, finish_reason=finish, usage=usage, tokens=tokens)
    node = pending.commit(response)
    trace.calls.append(
        traces.ModelCall(
            node=node, model="m", sampling=Sampling(temperature=1.0), endpoint="/chat", finish_reason=finish, usage=usage
        )
    )
    return node


def a_trace(name, trainable=True):
    """A trace of nothing yet."""
    return traces.WireTrace(
        id=name,
        task=traces.TraceTask(type="Sum", data=WireTaskData(idx=7, prompt="2+2?", answer="4"), key="sum-7"),
        agent=traces.AgentInfo(config=WireAgentConfig(), name="solver", trainable=trainable),
    )


def tools_and_compaction(name):
    """A call and its result, a prompt that was tokenized otherwise, a compaction, rewards, a failed call."""
    trace = a_trace(name)
    asked = [
        SystemMessage(content="Add."),
        UserMessage(
            content=[
                TextContentPart(text="2+2? ü"),
                ImageUrlContentPart(image_url=ImageUrlSource(url=f"data:image/png;base64,{PIXEL}")),
            ]
        ),
    ]
    call = AssistantMessage(content=None, reasoning_content="add", tool_calls=[ToolCall(id="c1", name="add", arguments='{"a": 2}')])
    turn(trace, asked, call, [(0, 3), (3, 6)], [1, 2, 3, 4, 5, 6, 7], [8, 9], [-0.123456, -0.5], [ADD], "tool_calls")
    told = [*asked, call, ToolMessage(tool_call_id="c1", content="4", name="add")]
    spans = [None, None, None, (9, 12)]
    last = turn(trace, told, AssistantMessage(content="4"), spans, [*range(1, 13), 13], [14, 15], [-0.25, -1.75], [ADD])
    shorter = [SystemMessage(content="Add."), UserMessage(content="So far: 4.")]
    node = turn(
        trace, shorter, AssistantMessage(content="Yes"), [(0, 3), (3, 5)], [1, 2, 3, 40, 41, 42], [43], [-2.0], finish="length"
    )
    trace.nodes[node].semantic_parents.append(ParentLink(node=last, type="compaction"))
    trace.nodes[node].advantages = [0.5]
    trace.nodes[last].reference_logprobs = [-0.5, -0.75]
    trace.nodes[last].loss_weights = {"echo": [0.0] * (len(trace.nodes[last].token_ids) - 2) + [1.0, 0.5]}
    trace.calls.append(traces.ModelCall(model="m", error=traces.Error(type="TimeoutError", message="late", status_code=504)))
    trace.record_reward("right", 1.0, 0.75)
    trace.record_reward("short", 0.5, 0.5)
    trace.record_metric("turns", 3)
    trace.rewards["judged"] = None
    trace.extra_usage.append(Usage(prompt_tokens=5, completion_tokens=1, cost=0.25))
    trace.info["note"] = {"deep": [1, 2.5, None]}
    trace.ok = True
    trace.stop("agent_completed")
    return trace


def a_judge(name):
    """No ids, since it went through another provider; never trained on; ended by an error."""
    trace = a_trace(name, trainable=False)
    turn(trace, [UserMessage(content="Is 4 right?")], AssistantMessage(content="yes"), None, [], [], [])
    trace.record_error(RuntimeError("broke"))
    return trace


def write(folder):
    """Two episodes: of two agents in a group, and one in which nothing ran."""
    task = traces.TraceTask(type="Sum", data=WireTaskData(idx=7))
    both = [tools_and_compaction("a" * 32), a_judge("b" * 32)]
    run = EvalRunInfo(id="run-1", name="evening")
    write_episode(
        folder, Episode(id="e" * 32, env=EnvInfo(id="sum"), task=task, group=GroupInfo(id="g"), run=run, ok=True, traces=both)
    )
    write_episode(folder, Episode(id="f" * 32, env=EnvInfo(id="sum"), task=task, errors=[traces.Error(type="E", message="m")]))


def read(folder):
    """What it reads: for each branch of each trace its ids, what was sampled, and how it is trained on."""
    for episode in read_episodes(folder, traces.WireTrace):
        for trace in episode.traces:
            for branch in trace.branches:
                said = {
                    "messages": [message.model_dump(mode="json") for message in branch.messages],
                    "token_ids": branch.token_ids,
                    "sampled_mask": branch.sampled_mask,
                    "logprobs": branch.logprobs,
                    "trainable": branch.trainable and trace.agent.trainable,
                    "reward": trace.reward,
                }
                sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]))
