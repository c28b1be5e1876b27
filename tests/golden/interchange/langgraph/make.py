"""Makes threads.sqlite beside it, with LangGraph itself: langgraph 1.2.24, langgraph-checkpoint-sqlite 3.1.2, langchain-core 1.8.3.

    python make.py

Threads: "tools", a chat with tool calls, pictures in each of LangChain's forms, an edited message and a fork by ``update_state``;
"summary", messages that are removed and summed up; "ask", an interrupted run; "nested", a subgraph with checkpoints of its own;
"state", channels of all kinds of values, and no messages.
"""

import dataclasses
import datetime
import decimal
import operator
import pathlib
import sqlite3
import uuid
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, RemoveMessage, SystemMessage, ToolMessage
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import interrupt

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"


def model(state: MessagesState) -> dict[str, Any]:
    messages: list[AnyMessage] = state["messages"]
    last, count = messages[-1], len(messages)
    if isinstance(last, ToolMessage):
        content: Any = [{"type": "thinking", "thinking": "It rained.", "signature": "c2ln"}, {"type": "text", "text": "Rain."}]
        return {"messages": [AIMessage(content, id=f"ai-{count}", response_metadata={"model_name": "m", "finish_reason": "stop"})]}
    if "weather" in str(last.content):
        calls = [{"name": "weather", "args": {"city": "Łódź", "days": [1, 2.5]}, "id": f"call-{count}", "type": "tool_call"}]
        wrong = [{"name": "weather", "args": '{"city": ', "id": f"bad-{count}", "error": "no JSON", "type": "invalid_tool_call"}]
        usage = {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10}
        return {"messages": [AIMessage("", id=f"ai-{count}", tool_calls=calls, invalid_tool_calls=wrong, usage_metadata=usage)]}
    return {"messages": [AIMessage(f"You said {count}.", id=f"ai-{count}", additional_kwargs={"reasoning_content": "Hm."})]}


def tool(state: MessagesState) -> dict[str, Any]:
    call = state["messages"][-1].tool_calls[0]
    return {"messages": [ToolMessage("rain", tool_call_id=call["id"], artifact={"mm": 3}, status="success", id=f"r-{call['id']}")]}


def calls(state: MessagesState) -> str:
    return "tool" if getattr(state["messages"][-1], "tool_calls", None) else "__end__"


def chat(saver: SqliteSaver) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("model", model)
    graph.add_node("tool", tool)
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", calls, ["tool", "__end__"])
    graph.add_edge("tool", "model")
    return graph.compile(checkpointer=saver)


def tools(saver: SqliteSaver) -> None:
    graph, config = chat(saver), {"configurable": {"thread_id": "tools"}}
    pictures: list[Any] = [
        "look",
        {"type": "text", "text": "four", "cache_control": {"type": "ephemeral"}},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}", "detail": "low"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
        {"type": "image", "source_type": "base64", "mime_type": "image/png", "data": PNG},
        {"type": "image", "base64": PNG, "mime_type": "image/png"},
        {"type": "image", "url": "https://example.org/a.png"},
        {"type": "image_url", "image_url": {"url": "https://example.org/b.png"}},
        {"type": "audio", "base64": "AAAA", "mime_type": "audio/wav"},
    ]
    graph.invoke({"messages": [SystemMessage("Be brief.", id="s"), HumanMessage(pictures, id="h0")]}, config)
    graph.invoke({"messages": [HumanMessage("the weather?", id="h1", name="Ann")]}, config)
    history = list(graph.get_state_history(config))
    early = next(each for each in history if len(each.values.get("messages", ())) == 3)
    forked = graph.update_state(early.config, {"messages": [HumanMessage("instead", id="h2")]})
    graph.invoke(None, forked)
    graph.update_state(config, {"messages": [HumanMessage("look, edited", id="h0")]})


def summary(saver: SqliteSaver) -> None:
    graph, config = chat(saver), {"configurable": {"thread_id": "summary"}}
    for number in range(3):
        graph.invoke({"messages": [HumanMessage(f"turn {number}", id=f"h{number}")]}, config)
    old = graph.get_state(config).values["messages"][:-2]
    removed = [RemoveMessage(id=each.id) for each in old]
    graph.update_state(config, {"messages": [*removed, SystemMessage("Two turns went before.", id="sum")]})
    graph.invoke({"messages": [HumanMessage("on", id="h9")]}, config)


def ask(saver: SqliteSaver) -> None:
    def node(state: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage(str(interrupt({"sure": True})), id="a")]}

    graph = StateGraph(MessagesState).add_node("node", node).add_edge(START, "node").compile(checkpointer=saver)
    graph.invoke({"messages": [HumanMessage("go", id="h")]}, {"configurable": {"thread_id": "ask"}})


def nested(saver: SqliteSaver) -> None:
    inner = StateGraph(MessagesState).add_node("model", model).add_edge(START, "model").compile(checkpointer=True)
    graph = StateGraph(MessagesState).add_node("inner", inner).add_edge(START, "inner").compile(checkpointer=saver)
    for number in range(2):
        graph.invoke({"messages": [HumanMessage(f"in {number}", id=f"h{number}")]}, {"configurable": {"thread_id": "nested"}})


@dataclasses.dataclass
class Plan:
    steps: list[str]


class State(TypedDict):
    log: Annotated[list[Any], operator.add]
    kinds: dict[str, Any]


def state(saver: SqliteSaver) -> None:
    def node(state: State) -> dict[str, Any]:
        kinds = {"date": datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC), "set": {1}, "bytes": b"\0\xff", "nan": float("nan")}
        kinds |= {"decimal": decimal.Decimal("1.50"), "uuid": uuid.UUID(int=7), "path": pathlib.PurePosixPath("a") / "b"}
        return {"log": [Plan(["one"])], "kinds": {k: v for k, v in kinds.items() if k != "path"} | {1: "an int", "$x": (1, 2)}}

    graph = StateGraph(State).add_node("node", node).add_edge(START, "node").compile(checkpointer=saver)
    graph.invoke({"log": ["start"], "kinds": {}}, {"configurable": {"thread_id": "state"}})


if __name__ == "__main__":
    file = pathlib.Path(__file__).with_name("threads.sqlite")
    file.unlink(missing_ok=True)
    connection = sqlite3.connect(file, check_same_thread=False)
    saver = SqliteSaver(connection)
    for make in (tools, summary, ask, nested, state):
        make(saver)
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.execute("VACUUM")
    connection.close()
