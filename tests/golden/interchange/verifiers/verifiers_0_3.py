"""verifiers 0.3 itself: runs its own rollout loop with a model that always says the same, and saves what ``vf-eval -s`` does.

    python verifiers_0_3.py write FOLDER
    python verifiers_0_3.py read FOLDER

Run where ``verifiers==0.3.1`` and ``datasets`` are installed; they are no dependencies of ours.
"""
# mypy: ignore-errors

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from datasets import Dataset
from verifiers.legacy.clients.client import Client
from verifiers.legacy.envs.tool_env import ToolEnv
from verifiers.legacy.rubrics.rubric import Rubric
from verifiers.legacy.types import Response, ResponseMessage, ResponseTokens, ToolCall, Usage
from verifiers.legacy.utils.save_utils import load_outputs


class Scripted(Client):
    """A model that calls a tool, and answers when it has the result. Its tokens are letters."""

    def setup_client(self, config):
        return None

    async def to_native_tool(self, tool):
        return tool

    async def to_native_prompt(self, messages):
        return messages, {}

    async def get_native_response(self, prompt, model, sampling_args, tools=None, **kwargs):
        asked = any(message.role == "tool" for message in prompt)
        call = ToolCall(id="c1", name="add", arguments=json.dumps({"a": 2, "b": 2}))
        ids = [ord(each) % 251 + 1 for message in prompt for each in f"{message.role}:{text(message)};"]
        reply = "The sum is 4. ü" if asked else ""
        sampled = [ord(each) % 251 + 1 for each in (f":{reply};" if asked else ":;")]
        ids += [ord(each) % 251 + 1 for each in "assistant"]
        return Response(
            id="r",
            created=1,
            model=model,
            usage=Usage(
                prompt_tokens=len(ids), reasoning_tokens=0, completion_tokens=len(sampled), total_tokens=len(ids) + len(sampled)
            ),
            message=ResponseMessage(
                content=reply,
                reasoning_content=None if asked else "to add",
                tool_calls=None if asked else [call],
                finish_reason="stop" if asked else "tool_calls",
                is_truncated=False,
                tokens=ResponseTokens(
                    prompt_ids=ids,
                    prompt_mask=[0] * len(ids),
                    completion_ids=sampled,
                    completion_mask=[1] * len(sampled),
                    completion_logprobs=[-(at + 1) / 7 for at in range(len(sampled))],
                ),
            ),
        )

    async def raise_from_native_response(self, response):
        return None

    async def from_native_response(self, response):
        return response

    async def close(self):
        return None


def text(message):
    """What a message says."""
    return message.content if isinstance(message.content, str) else ""


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


async def right(completion, answer, **kwargs):
    """Whether the answer is in the last message."""
    return 1.0 if answer in text(completion[-1]) else 0.0


def write(folder):
    """Two questions, two rollouts of each."""
    questions = [
        {"question": "2+2?", "answer": "4", "info": {"level": 1}},
        {"question": "1+1?", "answer": "2", "info": {"level": 1}},
    ]
    env = ToolEnv(
        dataset=Dataset.from_list(questions), tools=[add], rubric=Rubric(funcs=[right]), system_prompt="Add.", max_turns=3
    )
    asyncio.run(
        env.evaluate(
            client=Scripted(None),
            model="scripted",
            num_examples=2,
            rollouts_per_example=2,
            results_path=folder,
            save_results=True,
            state_columns=["trajectory"],
            on_progress=lambda *args: None,
            on_log=lambda *args: None,
        )
    )


def read(folder):
    """What it reads."""
    for output in load_outputs(folder):
        sys.stdout.write(json.dumps(output) + "\n")


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]))
