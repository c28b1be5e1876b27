"""What sessions save a server: the mini scheduler over HTTP, beside the same conversations sent whole each time.

The server is a process of its own on the loopback, with the tiny Qwen2.5-VL, 64 tokens a step and 1,024 pages of 16, so that
neither side pushes the other out of the cache. A turn is 40 tokens and a reply of 8. "Resent" is every request of the same
conversation as one prompt under a cache salt that nobody has used, so nothing of it is there. Prefilled tokens are those of a
prompt that were not cached, as the answers say. Time to first token is from the request until its first event. Both sides are
measured in turns, in one run.

Expected before the first run: ten turns and 16 branches and forks from the last prefill 9 times fewer tokens than resent (26
requests of 40 tokens, the last token of the reply before and what is left of a page, 10 on average; against 10,900); 20 turns of
a stateless chat 8 times fewer. The first token of turn 50 of 2,400 tokens, 5 pictures among them: 38 steps of 15 ms and 5 pictures
resent, 600 ms; one step and the server's own 5 ms with a session, 25 ms; 24 times. The session layer: 400 µs of a step of 10 to
15 ms, 3 to 5 %, above its bar: after each run of the model nothing of Python's is left in the processor's caches.

What came: 9.07 and 10.2 times fewer tokens; 34 ms against 762, 22 times. The session layer took 3.3 to 3.9 % at first; steps of
a few slots are made number by number since, and it is 1.8 % over all of it, 1.0 to 1.5 % for replies of 256 tokens, 2.4 to 2.7 %
for short ones. With 256 pages the whole prompts had pushed the session's pages out, and its first token came after 636 ms.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

from harness import Figure, report

from tests.mini_client import Ask, Client, Part, Talk, Turn, events, picture, shown
from tests.mini_server import Server

MODEL = "tiny-qwen2.5-vl"
TURN, REPLY = 40, 8
SAMPLING = {"temperature": 0, "max_new_tokens": REPLY, "ignore_eos": True}
NUMBERS = count(1)
# What is in flight together: requests, tokens of each prompt, tokens of each reply; and the bar. The first and the last step of a
# reply cost the session layer most: of short replies there are more of them.
LOADS = [
    ("one reply of 256 tokens", 1, TURN, 256, 2),
    ("16 replies of 256 tokens", 16, TURN, 256, 2),
    ("16 replies of 64 tokens", 16, TURN, 64, None),
    ("16 replies of 64 tokens behind 800", 16, 800, 64, None),
    ("16 prompts of 400 tokens, replies of 2", 16, 400, 2, None),
]


def new_tokens() -> tuple[int, ...]:
    """A turn that nobody has sent before."""
    first = 1_000 + next(NUMBERS) * TURN
    return tuple(range(first, first + TURN))


def resent(client: Client, ask: Ask) -> int:
    """Tokens that a request prefills as one prompt under a salt of its own."""
    meta = client.ok("/generate", ask.stateless(client.fresh()))["meta_info"]
    return int(meta["prompt_tokens"] - meta["cached_tokens"])


def forks(client: Client) -> Figure:
    talk = Talk(client)
    asks: list[tuple[Ask, int]] = []

    def turn(talk: Talk, after: Turn | None) -> Turn:
        ask = talk.ask(*new_tokens(), after=after, sampling=SAMPLING)
        made = client.send(ask)
        asks.append((ask, len(ask.prompt) - made.cached_tokens))
        return made

    last: Turn | None = None
    for _ in range(10):
        last = turn(talk, last)
    assert last is not None
    for number in range(16):
        turn(talk if number % 2 else talk.forked(last), last)
    with_session = sum(count for _, count in asks)
    whole = sum(resent(client, ask) for ask, _ in asks)
    note = f"{with_session:,} against {whole:,} tokens, 26 requests"
    return Figure(
        "10 turns, 8 branches and 8 forks: resent over session, tokens prefilled", whole / with_session, "x", 5, "higher", note=note
    )


def chats(client: Client) -> Figure:
    def tokens(messages: list[dict[str, str]], salt: dict[str, str]) -> tuple[int, str]:
        body = {"model": MODEL, "messages": messages, "max_tokens": REPLY, "temperature": 0, **salt}
        answer = client.ok("/v1/chat/completions", body)
        usage = answer["usage"]
        return usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["message"]["content"]

    messages: list[dict[str, str]] = []
    found = whole = 0
    for number in range(20):
        messages.append({"role": "user", "content": f"Question {number} of {client.fresh()}: what is it that a tree has to say?"})
        new, text = tokens(messages, {})
        found += new
        new, again = tokens(messages, {"cache_salt": client.fresh()})
        whole += new
        assert text == again
        messages.append({"role": "assistant", "content": text})
    note = f"{found:,} against {whole:,} tokens, 20 requests"
    return Figure("20 turns of a stateless chat: resent over found, tokens prefilled", whole / found, "x", 5, "higher", note=note)


def first_token(client: Client, body: dict[str, Any]) -> float:
    """Milliseconds from a request until its first token is there."""
    began, taken = time.perf_counter(), None
    with client.http.stream("POST", "/generate", json={**body, "stream": True}) as response:
        for _ in events(response):
            taken = taken or time.perf_counter() - began
    assert taken is not None
    return taken * 1000


def turn_50(client: Client) -> Iterator[Figure]:
    talk = Talk(client)
    last: Turn | None = None
    for number in range(49):
        pictures: tuple[Part, ...] = shown(picture(number)) if number % 10 == 0 else ()
        last = client.send(talk.ask(*pictures, *new_tokens(), after=last, sampling=SAMPLING))
    with_session, whole = [], []
    for _ in range(7):
        ask = talk.ask(*new_tokens(), after=last, sampling=SAMPLING)
        with_session.append(first_token(client, ask.body))
        again = talk.ask(*new_tokens(), after=last, sampling=SAMPLING)
        whole.append(first_token(client, again.stateless(client.fresh())))
    ours, theirs = statistics.median(with_session), statistics.median(whole)
    yield Figure(
        "first token of turn 50, resent over session", theirs / ours, "x", 5, "higher", note="streamed over HTTP, 5 pictures"
    )
    yield Figure("first token of turn 50", ours, "ms", peers={"resent": theirs}, note="median of 7")


Seconds = tuple[float, ...]


def spent(server: Server) -> Seconds:
    """What the engine's thread has spent in sessiontree and engine_bridge, and in its steps; and how many steps those were."""
    found = server.metrics()
    return tuple(
        next(value for name, value in found.items() if kind in name) for kind in ("session_seconds", "step_seconds", "steps_total")
    )


def share(server: Server, what: str, before: Seconds, bar: float | None = None) -> Figure:
    """Of the engine's step time since ``before``, what went into the session layer."""
    session, step, steps = (now - then for now, then in zip(spent(server), before, strict=True))
    note = f"{steps:,.0f} steps of {1e3 * step / steps:.1f} ms, {1e6 * session / steps:.0f} µs of the session layer"
    return Figure(f"session layer's share of a step: {what}", 100 * session / step, "%", bar, note=note)


def at_once(client: Client, requests: int, tokens: int, reply: int) -> None:
    """So many requests of one turn each, in flight together."""
    talk = Talk(client)
    sampling = {**SAMPLING, "max_new_tokens": reply}
    asks = [talk.ask(*islice(chain.from_iterable(iter(new_tokens, None)), tokens), sampling=sampling) for _ in range(requests)]
    threads = [threading.Thread(target=client.send, args=(ask,)) for ask in asks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def figures() -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder) / "store", "--model", MODEL, "--num-pages", 1024) as server:
        client = Client(server)
        at_once(client, 2, TURN, REPLY)  # whatever is made once
        before = spent(server)
        yield forks(client)
        yield chats(client)
        yield from turn_50(client)
        yield share(server, "all of the above", before, 2)
        for what, requests, tokens, reply, bar in LOADS:
            before = spent(server)
            at_once(client, requests, tokens, reply)
            yield share(server, what, before, bar)


if __name__ == "__main__":
    raise SystemExit(not report(figures()))
