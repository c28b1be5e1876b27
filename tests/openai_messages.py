"""Whether the openai package's own types take a message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from openai.types.chat import ChatCompletionMessageParam
from pydantic import TypeAdapter, ValidationError

MESSAGE: TypeAdapter[Any] = TypeAdapter(ChatCompletionMessageParam)


def is_valid(message: Any) -> bool:
    """Also its parts and calls, which pydantic looks at when they are asked for."""
    try:
        waiting: list[Any] = [MESSAGE.validate_python(message)]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                waiting.extend(value.values())
            elif isinstance(value, (Iterator, list)):
                waiting.extend(value)
    except ValidationError:
        return False
    return True
