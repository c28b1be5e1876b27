"""harbor 0.26 itself: writes a trajectory with every field that its models have, and says whether it takes a file.

    python harbor_0_26.py write FILE
    python harbor_0_26.py check FILE...

Run where ``harbor==0.26.0`` is installed; it is no dependency of ours. ``check`` prints how many steps each file has.
"""
# mypy: ignore-errors

from __future__ import annotations

import json
import sys
from pathlib import Path

from harbor.models.trajectories import (
    Agent,
    AudioSource,
    ContentPart,
    FinalMetrics,
    ImageSource,
    Metrics,
    Observation,
    ObservationResult,
    Step,
    SubagentTrajectoryRef,
    ToolCall,
    Trajectory,
)

TOOL = {"type": "function", "function": {"name": "f", "description": "Does.", "parameters": {"type": "object"}}}


def metrics(prompt, reply):
    """Of a call whose ids and log-probabilities are known."""
    logprobs = [-0.125 * (1 + at) for at in range(len(reply))]
    return Metrics(
        prompt_tokens=len(prompt),
        completion_tokens=len(reply),
        cached_tokens=1,
        cost_usd=0.25,
        prompt_token_ids=prompt,
        completion_token_ids=reply,
        logprobs=logprobs,
        extra={"provider": "p"},
    )


def subagent():
    """A trajectory of its own, with one inside of it."""
    deepest = Trajectory(
        schema_version="ATIF-v1.7",
        trajectory_id="sub2",
        agent=Agent(name="b", version="2"),
        steps=[Step(step_id=1, source="user", message="deeper")],
    )
    return Trajectory(
        schema_version="ATIF-v1.7",
        trajectory_id="sub1",
        agent=Agent(name="b", version="2"),
        steps=[
            Step(step_id=1, source="user", message="do"),
            Step(step_id=2, source="agent", message="done", llm_call_count=1, metrics=metrics([1, 2], [3])),
        ],
        subagent_trajectories=[deepest],
    )


def trajectory():
    """All fields; ids that go on, and ids that do not."""
    call = ToolCall(
        tool_call_id="c1", function_name="f", arguments={"x": 1.0, "y": "ü", "deep": [None, {"a": True}]}, extra={"t": 1}
    )
    task = ToolCall(tool_call_id="c2", function_name="task", arguments={})
    results = [
        ObservationResult(source_call_id="c1", content="out", extra={"e": 1}),
        ObservationResult(
            source_call_id="c2",
            subagent_trajectory_ref=[SubagentTrajectoryRef(trajectory_id="sub1", session_id="S", extra={"s": 2})],
        ),
        ObservationResult(content=[ContentPart(type="text", text="env")]),
    ]
    parts = [
        ContentPart(type="text", text="look"),
        ContentPart(type="image", source=ImageSource(media_type="image/png", path="images/a.png")),
        ContentPart(type="image", source=ImageSource(media_type="image/png", path="data:image/png;base64,aGk=")),
        ContentPart(type="audio", source=AudioSource(media_type="audio/wav", path="a.wav", duration_sec=1.5)),
    ]
    steps = [
        Step(step_id=1, timestamp="2026-01-02T03:04:05.678Z", source="system", message="sys"),
        Step(step_id=2, source="user", message=parts),
        Step(
            step_id=3,
            source="agent",
            model_name="m2",
            reasoning_effort="high",
            message="",
            reasoning_content="think",
            tool_calls=[call, task],
            observation=Observation(results=results),
            metrics=metrics([1, 2, 3], [4, 5]),
            llm_call_count=1,
            extra={"z": None},
        ),
        Step(step_id=4, source="agent", message="next", metrics=metrics([1, 2, 3, 4, 5, 6, 7], [8])),
        Step(step_id=5, source="user", message="copied", is_copied_context=True),
        Step(step_id=6, source="agent", message="again", metrics=metrics([1, 2, 3, 4, 5, 6, 7, 8, 9], [10, 11])),
        Step(step_id=7, source="agent", message="compacted", metrics=metrics([1, 3], [12]), observation=Observation(results=[])),
    ]
    return Trajectory(
        schema_version="ATIF-v1.8",
        session_id="S",
        trajectory_id="R",
        agent=Agent(name="a", version="1", model_name="m", tool_definitions=[TOOL], extra={"k": 1}),
        steps=steps,
        notes="n",
        final_metrics=FinalMetrics(
            total_prompt_tokens=21,
            total_completion_tokens=6,
            total_cached_tokens=4,
            total_cost_usd=1.0,
            total_steps=7,
            extra={"f": 3},
        ),
        continued_trajectory_ref="trajectory.cont-1.json",
        extra={"e": [1]},
        subagent_trajectories=[subagent()],
    )


if __name__ == "__main__":
    if sys.argv[1] == "write":
        Path(sys.argv[2]).write_text(json.dumps(trajectory().to_json_dict(), indent=1) + "\n")
    else:
        for name in sys.argv[2:]:
            print(len(Trajectory.model_validate(json.loads(Path(name).read_text())).steps))
