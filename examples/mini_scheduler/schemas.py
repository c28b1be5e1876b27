"""The bodies that this server takes, field by field. What stands in no list here is refused by name, never ignored.

Types are strict: a number in quotes is no number. Numbers that only sampling looks at are checked by ``Sampling``.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag

MAX_MESSAGES: Final = 1024
MAX_IMAGES: Final = 16  # of one request
MAX_SAMPLES: Final = 8


def _encodable(text: str) -> str:
    """JSON can spell half a character, which no tokenizer and no store has a word for."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("a lone surrogate is no text") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$", description="1 to 128 of A-Z a-z 0-9 _ . : -")]
Salt = Annotated[Text, Field(max_length=128)]
ItemId = Annotated[Text, Field(max_length=128)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Stops = Annotated[list[Text], Field(max_length=16)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Samples = Annotated[int, Field(ge=1, le=MAX_SAMPLES)]
Length = Annotated[int, Field(ge=1, le=2**20)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


# --- SGLang's -----------------------------------------------------------------------------------------------------------
class OpenSession(Body):
    """``capacity_of_str_len`` is SGLang's, and limits nothing here either. ``timeout``: seconds without a request."""

    session_id: Name | None = None
    capacity_of_str_len: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    streaming: bool | None = None
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class CloseSession(Body):
    session_id: Name


class SamplingParams(Body):
    max_new_tokens: Length | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    seed: Seed | None = None
    stop: Text | Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=16)] | None = None
    ignore_eos: bool | None = None
    n: Samples | None = None


class SessionParams(Body):
    id: Name
    rid: Name | None = None
    offset: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None


class Generate(Body):
    """One prompt, as text or as token ids. Each ``<|image_pad|>`` (151655) stands for one picture of ``image_data``, in order."""

    text: Text | None = None
    input_ids: Annotated[list[TokenId], Field(max_length=2**18)] | None = None
    image_data: Text | Annotated[list[Text], Field(max_length=MAX_IMAGES)] | None = None
    sampling_params: SamplingParams | None = None
    rid: Name | Annotated[list[Name], Field(min_length=1, max_length=MAX_SAMPLES)] | None = None
    stream: bool | None = None
    session_params: SessionParams | None = None
    cache_salt: Salt | None = None


class AbortRequest(Body):
    rid: Name | None = None
    abort_all: bool | None = None


class Fork(Body):
    """``rid``: up to and with that reply; without it, the one that was committed last."""

    rid: Name | None = None
    session_id: Name | None = None


# --- OpenAI's: messages -------------------------------------------------------------------------------------------------
class TextPart(Body):
    type: Literal["text"]
    text: Text


class ImageUrl(Body):
    url: Text
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(Body):
    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]
Texts = Text | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES)]


class Function(Body):
    name: Text
    arguments: Text


class ToolCall(Body):
    type: Literal["function"]
    id: Text
    function: Function


class SystemMessage(Body):
    role: Literal["system", "developer"]
    content: Texts
    name: Text | None = None


class UserMessage(Body):
    role: Literal["user"]
    content: Text | Annotated[list[Part], Field(max_length=MAX_MESSAGES)]
    name: Text | None = None


class AssistantMessage(Body):
    """As it was answered, so the fields that are null there may stand here too."""

    role: Literal["assistant"]
    content: Texts | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    name: Text | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class ToolMessage(Body):
    role: Literal["tool"]
    content: Texts
    tool_call_id: ItemId


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


Pairs = dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]]
Metadata = Annotated[Pairs, Field(max_length=16)]


class Ignored(Body):
    """Fields of OpenAI's that change nothing here."""

    user: Text | None = None
    parallel_tool_calls: bool | None = None
    service_tier: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    metadata: Metadata | None = None


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChatCompletion(Ignored):
    model: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Length | None = None
    max_completion_tokens: Length | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    seed: Seed | None = None
    n: Samples | None = None
    stop: Text | Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    cache_salt: Salt | None = None


# --- OpenAI's: responses ------------------------------------------------------------------------------------------------
class InputText(Body):
    type: Literal["input_text"]
    text: Text


class InputImage(Body):
    type: Literal["input_image"]
    image_url: Text
    detail: Literal["auto", "low", "high"] | None = None


class OutputText(Body):
    type: Literal["output_text"]
    text: Text
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: Annotated[list[Any], Field(max_length=0)] | None = None


Content = Annotated[InputText | InputImage | OutputText, Field(discriminator="type")]


class Item(Body):
    id: ItemId | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Annotated[list[Content], Field(max_length=MAX_MESSAGES)]


class FunctionCall(Item):
    type: Literal["function_call"]
    call_id: ItemId
    name: Text
    arguments: Text


class FunctionCallOutput(Item):
    type: Literal["function_call_output"]
    call_id: ItemId
    output: Text


class SummaryText(Body):
    type: Literal["summary_text"]
    text: Text


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: Text


class Reasoning(Item):
    type: Literal["reasoning"]
    summary: Annotated[list[SummaryText], Field(max_length=128)]
    content: Annotated[list[ReasoningText], Field(max_length=128)] | None = None
    encrypted_content: None = None


def _kind(item: Any) -> Any:
    """A message may go without its type."""
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[Reasoning, Tag("reasoning")],
    Discriminator(_kind),
]


class CreateResponse(Ignored):
    model: Text | None = None
    input: Text | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: Text | None = None
    previous_response_id: Name | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: Length | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    cache_salt: Salt | None = None
