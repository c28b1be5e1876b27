"""One server takes over from another with nothing but the database between them, in the middle of a conversation with images.

Every output is compared with what the whole history gives as one request without a session (``Client.check``), asked of whichever
server is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.mini_client import Client, Talk, Turn, picture, shown
from tests.mini_server import ForkedServer, Server

LONG = {"temperature": 0, "max_new_tokens": 1_000, "ignore_eos": True}


@pytest.fixture
def servers(postgres_url: str, tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    """Two that share a database and nothing else; neither runs yet."""
    yield tuple(ForkedServer(postgres_url, "--model", "tiny-qwen2.5-vl", log=tmp_path / f"{name}.log") for name in "ab")  # type: ignore[misc]


@pytest.fixture
def client_of() -> Iterator[Callable[[Server], Client]]:
    with ExitStack() as clients:

        def made(server: Server) -> Client:
            client = Client(server)
            clients.enter_context(client.http)
            return client

        yield made


def at(client: Client, talk: Talk) -> Talk:
    """The same session, as it is spoken to through another server."""
    other = Talk.__new__(Talk)
    other.client, other.id = client, talk.id
    return other


def conversation(talk: Talk) -> list[Turn]:
    turns = [talk.turn(*shown(picture(1, 3, 2)), 11, 12, 13)]
    turns.append(talk.turn(21, *shown(picture(2), picture(3)), 22, after=turns[-1]))
    return turns


Clients = Callable[[Server], Client]


def test_a_killed_server_is_taken_over_from_the_database_alone(servers: tuple[Server, Server], client_of: Clients) -> None:
    first, second = servers
    with ExitStack() as running:
        running.enter_context(first)
        talk = Talk(client_of(first))
        turns = conversation(talk)
        fork = talk.forked(turns[0])
        branch = fork.turn(31, 32, after=turns[0])
        unfinished = talk.ask(*shown(picture(4)), 41, after=turns[-1], sampling=LONG)
        with talk.client.stream(unfinished) as stream:
            next(stream)  # it is in the middle of a reply
            known = talk.known()
            first.kill()
        running.enter_context(second)
        talk, fork = at(client_of(second), talk), at(client_of(second), fork)
        assert talk.known() == {rid: each for rid, each in known.items() if rid != unfinished.rid}
        again = talk.turn(*shown(picture(4)), 41, after=turns[-1])  # the turn that the kill cut off
        talk.turn(51, after=again)
        talk.turn(*shown(picture(5)), 61, after=turns[0])  # a branch from before the last picture
        fork.turn(*shown(picture(6)), 71, after=branch)
        for turn in (*turns, branch):
            talk.client.check(turn)


def test_two_servers_go_on_with_each_others_turns(servers: tuple[Server, Server], client_of: Clients) -> None:
    first, second = servers
    with first, second:
        here = Talk(client_of(first))
        there = at(client_of(second), here)
        turn = here.turn(*shown(picture(1)), 11)
        for number, talk in enumerate((there, here, there, here), 2):
            turn = talk.turn(*shown(picture(number)), number, after=turn)
        assert here.known() == there.known() and len(here.known()) == 5
        streaming = Talk(client_of(first), streaming=True)
        elsewhere = at(client_of(second), streaming)
        turn = streaming.turn(*shown(picture(7)), 81)
        for number, talk in enumerate((elsewhere, streaming, elsewhere), 82):
            turn = talk.turn(number, tip=turn)
