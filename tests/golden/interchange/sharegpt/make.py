"""Makes the files in this folder: python tests/golden/interchange/sharegpt/make.py

The rows are ours, in the shapes that these read, as their documentation has them: LLaMA-Factory 0.9 (tools, observations, system
beside the list, pictures, preferences), FastChat and Vicuna (ids, human and gpt), LLaVA (one picture), Axolotl (weight, train),
Hermes (tool), and lists in the form of OpenAI's messages under the name ``conversations``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="

WEATHER = {
    "name": "weather",
    "description": "Of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = {"name": "weather", "arguments": {"city": "Łódź", "days": 1.0}}


def said(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"from": speaker, "value": value} for speaker, value in pairs]


LLAMA_FACTORY: list[dict[str, Any]] = [
    {
        "conversations": said(
            ("human", "Weather in Łódź?"),
            ("function_call", json.dumps(CALL, ensure_ascii=False)),
            ("observation", '{"rain": true}'),
            ("gpt", "Rain."),
            ("human", "And in both?"),
            ("function_call", json.dumps([CALL, {"name": "weather", "arguments": {}}])),
            ("observation", "rain"),
            ("gpt", "<think>\nStill.\n</think>\n\nRain."),
        ),
        "system": "You know the weather.",
        "tools": json.dumps([WEATHER]),
    },
    {
        "conversations": said(("human", "<image>And <image>?"), ("gpt", "Dots.")),
        "system": "",
        "tools": "",
        "images": ["pictures/dot.png", f"data:image/png;base64,{PNG}"],
    },
    {
        "conversations": said(("human", "2 + 2?")),
        "chosen": {"from": "gpt", "value": "4"},
        "rejected": {"from": "gpt", "value": "5"},
    },
    {"conversations": said(("human", "2 + 3?"), ("gpt", "6")), "label": False},
]
OTHERS: list[Any] = [
    {"id": "QWJhYvA_0", "conversations": said(("human", "Hi"), ("gpt", "Hello"), ("user", "Bye"), ("chatgpt", "Bye"))},
    {"id": "QWJhYvA_0", "conversations": said(("gpt", "Begins in the middle"))},
    {"id": 7, "image": "pictures/dot.png", "conversations": said(("human", "<image>\nWhat?"), ("gpt", "A dot."))},
    {"conversations": [{"from": "human", "value": "x", "weight": 0}, {"from": "gpt", "value": "y", "weight": 1, "train": True}]},
    {
        "id": "hermes",
        "category": "tools",
        "tools": [{"type": "function", "function": WEATHER}],
        "conversations": said(
            ("system", "Call as <tool_call>."),
            ("human", "?"),
            ("gpt", "<tool_call>\n{}\n</tool_call>"),
            ("tool", "<tool_response>\n1\n</tool_response>"),
            ("gpt", "1"),
        ),
    },
    {
        "conversations": [
            {"role": "system", "content": "s"},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "q"},
                    {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
                ],
            },
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "r",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "name": "weather", "content": "rain"},
            {"role": "assistant", "content": "Rain."},
        ]
    },
]


def main() -> None:
    (HERE / "llama_factory.json").write_text(json.dumps(LLAMA_FACTORY, ensure_ascii=False, indent=2) + "\n")
    (HERE / "others.jsonl").write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in OTHERS))


if __name__ == "__main__":
    main()
