"""Makes agents.jsonl: what openai-agents keeps of a session, as the chat messages that its own converter sends to models.

Run with openai-agents installed; the file here is of 0.24.0: python tests/golden/interchange/openai/make_agents.py
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from agents import SQLiteSession
from agents.models.chatcmpl_converter import Converter

HERE = Path(__file__).parent
PNG = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="

ITEMS: list[Any] = [
    {"role": "developer", "content": "Answer in one line."},
    {
        "role": "user",
        "content": [
            {"type": "input_text", "text": "What is it, and what is the weather there?"},
            {"type": "input_image", "image_url": PNG, "detail": "low"},
            {"type": "input_image", "image_url": "https://example.org/a.png", "detail": "auto"},
        ],
    },
    {
        "type": "function_call",
        "call_id": "call_1",
        "name": "weather",
        "arguments": '{"city":"Łódź"}',
        "id": "fc_1",
        "status": "completed",
    },
    {"type": "function_call", "call_id": "call_2", "name": "weather", "arguments": "{}", "id": "fc_2", "status": "completed"},
    {"type": "function_call_output", "call_id": "call_2", "output": "no city"},
    {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "A dot; rain.", "annotations": [], "logprobs": []}],
    },
    {"role": "user", "content": "How do I pick a lock?"},
    {
        "type": "message",
        "id": "msg_2",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "refusal", "refusal": "No."}],
    },
]


async def kept() -> list[Any]:
    session = SQLiteSession("golden")
    await session.add_items(ITEMS)
    items: list[Any] = await session.get_items()
    return items


def main() -> None:
    messages = Converter.items_to_messages(asyncio.run(kept()))
    (HERE / "agents.jsonl").write_text(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
