"""SGLang's dumps: files its own code wrote, files of ours that its own code reads, and pickles that would do harm."""

from __future__ import annotations

import io
import pickle
import struct
import sys
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sessiontree.annotations import LOGPROBS
from sessiontree.errors import InterchangeError, SessionTreeError
from sessiontree.interchange import export_file, import_file, sglang
from sessiontree.interchange.conversations import Conversation, Image, Turn
from sessiontree.interchange.losses import Losses
from sessiontree.interchange.pickles import BadPickle, dump, load
from sessiontree.interchange.plain import Foreign, Room, from_plain, to_plain
from sessiontree.interchange.source import SourceFile
from sessiontree.store import SessionStore

GOLDEN = Path(__file__).parent / "golden" / "interchange" / "sglang"
REQUEST = ("sglang.srt.managers.io_struct", "GenerateReqInput")
PNG = b"\x89PNG\r\n\x1a\nnot much of a picture"


def read(path: Path, *, salvage: bool = False) -> tuple[list[Conversation], Losses]:
    losses = Losses(path.name, salvage=salvage)
    return list(sglang.read(SourceFile(path), losses)), losses


def write(conversations: Iterable[Conversation], path: Path) -> Losses:
    losses = Losses(path.name)
    sglang.write(conversations, path, losses)
    return losses


def value(data: bytes) -> Any:
    return load(data, lambda module, name: True)


def turns(conversation: Conversation) -> dict[str, Turn]:
    return {str(turn.id): turn for turn in conversation.turns}


def pickled(requests: list[Any], path: Path) -> Path:
    with path.open("wb") as file:
        dump({"server_args": None, "requests": requests}, file, {REQUEST})
    return path


def request(output: dict[str, Any], created: Any = 1.0, finished: Any = 2.0, **state: Any) -> tuple[Any, ...]:
    return (Foreign("new", [Foreign("class", list(REQUEST)), (), state]), output, created, finished)


@pytest.mark.parametrize("name", ["dump.pkl", "crash.pkl"])
def test_a_dump_of_the_servers_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    conversations, losses = read(GOLDEN / name)
    assert not losses.lost
    assert not write(conversations, tmp_path / "again.pkl").lost
    assert value((tmp_path / "again.pkl").read_bytes()) == value((GOLDEN / name).read_bytes())


def test_requests_are_turns_with_their_tokens_logprobs_and_pictures() -> None:
    found = {each.id: each for each in read(GOLDEN / "dump.pkl")[0]}
    assert list(found) == ["text", "ids", "see", "one", "chat", "embed"]
    asked, replied = found["text"].turns
    assert asked.message == {"role": "user", "content": "Where is Łódź?"}
    assert (asked.token_ids, asked.generated, asked.created_at) == (None, False, 1_780_001_000.0)
    assert replied.message == {"role": "assistant", "content": "The is"}
    assert (replied.parent, replied.token_ids, replied.generated) == ("text", [785, 374], True)
    assert (replied.finish_reason, replied.annotations[LOGPROBS].tolist()) == ("stop", [-0.5, -1.25])
    asked, replied = found["ids"].turns
    assert (asked.message, asked.role, asked.token_ids) == (None, "user", [151644, 872, 198])
    assert not replied.annotations  # its rows say the text of tokens too: they are kept whole
    (seen, _) = found["see"].turns
    assert seen.message is not None
    assert [part["type"] for part in seen.message["content"]] == ["text", "image", "image", "image", "image_url"]
    assert {image.mime_type for image in seen.images} == {"image/png"}
    assert "iVBOR" not in str(seen.fields)  # kept once
    (embedded,) = found["embed"].turns
    assert embedded.fields["output"]["embedding"] == [0.25, -0.5]


def test_requests_of_a_session_are_a_tree_as_they_go_on_from_each_other() -> None:
    (chat,) = [each for each in read(GOLDEN / "dump.pkl")[0] if each.id == "chat"]
    parents = {turn.id: turn.parent for turn in chat.turns if turn.role == "user"}
    assert parents == {"s1": None, "s2": "s1/reply", "s3": "s1/reply", "s4": "s2"}


def test_a_streaming_session_goes_on_from_its_last_request_where_its_prompt_is_longer_than_what_was_sent(tmp_path: Path) -> None:
    session = {"id": "s"}
    entries = [
        request({"text": "a", "meta_info": {"prompt_tokens": 2}}, rid="1", input_ids=[1, 2], session_params=session),
        request({"text": "b", "meta_info": {"prompt_tokens": 5}}, rid="2", input_ids=[3], session_params=session),
        request({"text": "c", "meta_info": {"prompt_tokens": 1}}, rid="3", input_ids=[4], session_params=session),
        request({"text": "d"}, rid="4", input_ids=[4], session_params=session | {"rid": "gone"}),
        request({"text": "e"}, rid="5", input_ids=[4], session_params=session | {"rid": "1", "offset": 1}),
        request({}, rid="6", input_ids=[4], session_params=session | {"rid": "7"}),
        request({}, rid="7", input_ids=[4], session_params=session | {"rid": "6"}),
    ]
    (chat,), losses = read(pickled(entries, tmp_path / "x.pkl"))
    found = turns(chat)
    assert [found[f"{n}"].parent for n in range(1, 6)] == [None, "1/reply", None, None, None]
    assert found["5"].derived_from == ("1/reply",)
    assert (found["6"].parent, found["7"].parent) == (None, "6")  # none that comes later
    assert [each.what for each in losses.lost] == [
        "a request that goes on from one that is not before it in the file",
        "a request that goes on from within another",
    ]


def test_the_last_piece_of_a_streamed_reply_is_named(tmp_path: Path) -> None:
    entry = request({"text": " it", "output_ids": [9], "meta_info": {"completion_tokens": 7}}, rid="1", text="x")
    _, losses = read(pickled([entry], tmp_path / "x.pkl"))
    assert [each.what for each in losses.lost] == ["a streamed reply of which the dump has only the last piece"]


def test_the_log_of_requests_says_the_same_as_the_dump(tmp_path: Path) -> None:
    dumped, logged = read(GOLDEN / "dump.pkl")[0], read(GOLDEN / "requests.log")[0]
    assert [each.id for each in logged] == [each.id for each in dumped]
    for one, other in zip(dumped, logged, strict=True):
        for here, there in zip(one.turns, other.turns, strict=True):
            names = ("id", "parent", "message", "images", "token_ids", "finish_reason", "generated")
            assert [getattr(here, name) for name in names] == [getattr(there, name) for name in names]
    write(logged, tmp_path / "x.pkl")
    assert [each.id for each in read(tmp_path / "x.pkl")[0]] == [each.id for each in dumped]


def test_requests_that_a_log_saw_begin_only_are_named(tmp_path: Path) -> None:
    lines = [
        line for line in (GOLDEN / "requests.log").read_text().splitlines() if '"embed"' not in line or "request.received" in line
    ]
    (tmp_path / "x.log").write_text("\n".join([*lines, '{"event": "request.received.openai", "obj": {}}']))
    found, losses = read(tmp_path / "x.log")
    assert len(found) == 5
    assert [(each.what, each.count) for each in losses.lost] == [
        ("a line of the log that is about no request, or about one before it was adapted", 1),
        ("a request of the log that did not finish", 1),
    ]


# What SGLang's own code says of files of ours.


def tree() -> Conversation:
    """A conversation of another format: two replies to one question, and a question that nobody answered."""
    picture = {"role": "user", "content": [{"type": "text", "text": "Who?"}, {"type": "image", "image": 0}]}
    return Conversation(
        id="c",
        created_at=5.0,
        turns=[
            Turn(id="q", parent=None, message=picture, images=(Image(PNG, "image/png"),), created_at=7.0, token_ids=[1, 2]),
            Turn(
                id="a",
                parent="q",
                message={"role": "assistant", "content": "I."},
                token_ids=np.array([3, 4], np.int32),
                generated=True,
                finish_reason="stop",
                annotations={LOGPROBS: np.array([-0.5, -1.0])},
            ),
            Turn(id="b", parent="q", message={"role": "assistant", "content": "You."}, created_at=9.0),
            Turn(id="r", parent="b", message={"role": "user", "content": "Why?"}),
        ],
    )


def test_sglang_reads_what_is_written(tmp_path: Path) -> None:
    pytest.importorskip("msgspec")
    from tests.sglang_engine import engine

    made = engine("sglang.srt.managers.io_struct").GenerateReqInput
    common = engine("sglang.srt.utils.common")
    losses = write([tree()], tmp_path / "ours.pkl")
    data = (tmp_path / "ours.pkl").read_bytes()
    for loaded in (pickle.loads(data), common.SafeUnpickler(io.BytesIO(data)).load()):
        requests = loaded["requests"]
        assert all(type(each[0]) is made for each in requests)
        first, second, third = (asdict(each[0]) for each in requests)  # what its replay script sends
        assert (first["input_ids"], first["text"], first["stream"], first["sampling_params"]) == ([1, 2], None, False, {})
        assert first["image_data"] == ["data:image/png;base64," + "iVBORw0KGgpub3QgbXVjaCBvZiBhIHBpY3R1cmU="]
        assert second["rid"] == "c-2" and third["text"] == "Who?\n\nYou.\n\nWhy?"
        assert [each[2:] for each in requests] == [(7.0, 7.0), (7.0, 9.0), (5.0, 5.0)]
        output = requests[0][1]
        assert output["output_ids"] == [3, 4] and output["meta_info"]["output_token_logprobs"] == [(-0.5, 3, None), (-1.0, 4, None)]
        for each, *_ in requests:
            each.normalize_batch_and_arguments()  # what a server does first: it takes each of them
    assert [each.what for each in losses.lost] == [
        "token ids of a prompt, where not all its turns have some",
        "who said what in a prompt: it is one text, without a chat template",
        "a tree is written as requests: turns before several replies stand in each",
    ]


def test_sglangs_own_classes_come_out_of_a_dump_that_went_through_here(tmp_path: Path) -> None:
    pytest.importorskip("msgspec")
    from tests.sglang_engine import engine

    engine("sglang.srt.managers.io_struct")
    engine("sglang.srt.server_args")
    write(read(GOLDEN / "dump.pkl")[0], tmp_path / "again.pkl")
    ours, its = (pickle.loads(path.read_bytes()) for path in (tmp_path / "again.pkl", GOLDEN / "dump.pkl"))
    assert [asdict(each[0]) for each in ours["requests"]] == [asdict(each[0]) for each in its["requests"]]
    assert [each[1:] for each in ours["requests"]] == [each[1:] for each in its["requests"]]
    assert vars(ours["server_args"]) == vars(its["server_args"])


def test_a_conversation_of_another_format_is_read_as_its_requests(tmp_path: Path) -> None:
    write([tree()], tmp_path / "x.pkl")
    found, _ = read(tmp_path / "x.pkl")
    assert [each.id for each in found] == ["c-1", "c-2", "c-3"]
    asked, replied = found[0].turns
    assert (asked.token_ids, replied.token_ids, replied.finish_reason) == ([1, 2], [3, 4], "stop")
    assert asked.images == (Image(PNG, "image/png"),)
    assert replied.annotations[LOGPROBS].tolist() == [-0.5, -1.0]
    assert len(list(found[2].turns)) == 1


def test_turns_after_those_of_a_dump_are_requests_of_their_own(tmp_path: Path) -> None:
    (first, *_), _ = read(GOLDEN / "dump.pkl")
    more = Turn(id="x", parent="text/reply", message={"role": "user", "content": "And?"})
    first.turns = [*first.turns, more, attrs.evolve(more, id="y", parent="x", message={"role": "assistant", "content": "So."})]
    first.tools = ({"type": "function"},)
    losses = write([first], tmp_path / "x.pkl")
    _, two = value((tmp_path / "x.pkl").read_bytes())["requests"]
    assert two[0].parts[2]["text"] == "Where is Łódź?\n\nThe is\n\nAnd?" and two[1]["text"] == "So."
    assert "tool definitions" in [each.what for each in losses.lost]


# Random dumps and random conversations.

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.binary(max_size=8)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.sampled_from(["$int", "$dict", "$tuple"]) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)
token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=4)
pictures = st.sampled_from(
    [
        "aWZvbg==",
        "data:image/png;base64,aWZvbg==",
        "data:,a%20b",
        "/a.png",
        PNG,
        {"url": "x", "detail": "low"},
        {"detail": "low"},
        7,
    ]
)
states = st.fixed_dictionaries(
    {"rid": st.sampled_from(["a", "b", "c", None, ["a"]])},
    optional={
        "text": st.text(max_size=8) | st.none() | st.just(["a", "b"]),
        "input_ids": token_ids | token_ids.map(tuple) | st.none(),
        "image_data": pictures | st.lists(pictures, max_size=3) | st.none(),
        "session_params": st.none()
        | st.fixed_dictionaries({"id": st.sampled_from(["s", "t", None]), "rid": st.sampled_from(["a", None])}),
        "custom": values,
    },
)
rows = st.tuples(st.floats(-9, 0), st.integers(0, 9), st.none() | st.text(max_size=2))
reasons = st.none() | st.just({"type": "length", "length": 2})
metas = {"finish_reason": reasons, "output_token_logprobs": st.lists(rows), "x": values}
outputs = st.fixed_dictionaries(
    {},
    optional={
        "text": st.text(max_size=8) | st.none(),
        "output_ids": token_ids,
        "meta_info": st.fixed_dictionaries({}, optional=metas),
        "embedding": st.lists(st.floats(allow_nan=False), max_size=2),
    },
)  # fmt: skip


@given(st.lists(st.tuples(states, outputs, st.floats(0, 9), st.integers(0, 9)), max_size=5), st.booleans())
def test_any_dump_comes_back(tmp_path_factory: pytest.TempPathFactory, drawn: list[Any], bare: bool) -> None:
    folder = tmp_path_factory.mktemp("sglang")
    entries = [request(deepcopy(output), created, finished, **deepcopy(state)) for state, output, created, finished in drawn]
    with (folder / "x.pkl").open("wb") as file:
        dump(entries if bare else {"server_args": {"a": 1}, "requests": entries}, file, {REQUEST})
    conversations, _ = read(folder / "x.pkl")
    write(conversations, folder / "y.pkl")
    if drawn:  # an empty dump has no conversation to say that it was one
        assert value((folder / "y.pkl").read_bytes()) == value((folder / "x.pkl").read_bytes())


@given(values)
def test_any_value_comes_back(drawn: Any) -> None:
    """As Python's own pickle and our own, and as JSON between them."""
    out = io.BytesIO()
    dump(drawn, out, ())
    for protocol in (3, 4, 5):
        assert repr(value(pickle.dumps(drawn, protocol))) == repr(drawn)
    assert repr(pickle.loads(out.getvalue())) == repr(drawn)
    assert repr(from_plain(to_plain(drawn))) == repr(drawn)


def test_sets_lone_surrogates_and_numbers_that_are_none_come_back() -> None:
    for each in ("\ud800", float("inf"), 2**70, -(2**70), {1: {"$x": b""}}, {"\ud800": 1}):
        assert repr(from_plain(to_plain(each))) == repr(each)
        to_plain(each)
    out = io.BytesIO()
    dump([value(pickle.dumps({1, 2})), value(pickle.dumps(frozenset("a")))], out, ())
    assert pickle.loads(out.getvalue()) == [{1, 2}, frozenset("a")]


# Hostile files.


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that leaves a file behind when it is imported, and another one when what it has is called."""
    (tmp_path / "sprung").mkdir()
    code = f"from pathlib import Path\nPath({str(tmp_path / 'sprung')!r}, 'imported').touch()\n"
    code += f"def call(*a, **k):\n    Path({str(tmp_path / 'sprung')!r}, 'called').touch()\n    return a\n"
    (tmp_path / "trapmodule.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "sprung"
    sys.modules.pop("trapmodule", None)


TEXT = b"X\x0a\x00\x00\x00trapmoduleX\x04\x00\x00\x00call"
HOSTILE = {
    "global": b"\x80\x02ctrapmodule\ncall\n.",
    "reduce": b"\x80\x02ctrapmodule\ncall\n(tR.",
    "stack global": b"\x80\x04" + TEXT + b"\x93(tR.",
    "newobj": b"\x80\x02ctrapmodule\ncall\n)\x81.",
    "newobj ex": b"\x80\x04ctrapmodule\ncall\n)}\x92.",
    "inst": b"\x80\x02(itrapmodule\ncall\n.",
    "obj": b"\x80\x02(ctrapmodule\ncall\no.",
    "build": b"\x80\x02ctrapmodule\ncall\n)\x81}X\x01\x00\x00\x00aK\x01sb.",
    "system": b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.",
    "eval": b"\x80\x02cbuiltins\neval\nX\x01\x00\x00\x001\x85R.",
    "getattr": b"\x80\x02cbuiltins\ngetattr\n.",
    "dotted": b"\x80\x04X\x1d\x00\x00\x00sglang.srt.managers.io_structX\x0f\x00\x00\x00pickle.os.systemX"[:-1] + b"\x93(tR.",
    "sglang": b"\x80\x02csglang.srt.utils.common\ndynamic_import\n(tR.",
    "extension": b"\x80\x02\x82\x01.",
    "persistent": b"\x80\x02X\x01\x00\x00\x00aQ.",
    "protocol 0": b"ctrapmodule\ncall\n(tR.",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("within", [False, True])
def test_nothing_is_imported_or_called(name: str, within: bool, trap: Path, tmp_path: Path) -> None:
    data = HOSTILE[name]
    if within:  # in a place where anything may be: the output of a request
        inner = data[2 if data[0] == 0x80 else 0 : -1]
        data = b"\x80\x04}X\x08\x00\x00\x00requests](csglang.srt.managers.io_struct\nGenerateReqInput\n)\x81}b}X\x01\x00\x00\x00a"
        data += inner + b"sG?\xf0\x00\x00\x00\x00\x00\x00G?\xf0\x00\x00\x00\x00\x00\x00tas."
    (tmp_path / "x.pkl").write_bytes(data)
    before = set(sys.modules)
    with pytest.raises(InterchangeError, match=r"no dump of SGLang holds|no pickle of SGLang's"):
        read(tmp_path / "x.pkl")
    found, losses = read(tmp_path / "x.pkl", salvage=True)
    assert losses.faults
    assert not list(trap.iterdir()) and set(sys.modules) == before
    if found:  # nor does what was salvaged go on to somebody who would
        write(found, tmp_path / "y.pkl")
        assert b"trapmodule" not in (tmp_path / "y.pkl").read_bytes() and b"system" not in (tmp_path / "y.pkl").read_bytes()


def test_the_trap_is_one(trap: Path) -> None:
    """What Python's own unpickler does with the same bytes."""
    pickle.loads(HOSTILE["reduce"])
    assert {each.name for each in trap.iterdir()} == {"imported", "called"}


def test_no_class_is_written_that_a_dump_does_not_hold(tmp_path: Path) -> None:
    """Fields of a store are not trusted either."""
    (first, *_), _ = read(GOLDEN / "dump.pkl")
    asked, replied = first.turns
    call = {"$call": [{"$class": ["os", "system"]}, {"$tuple": ["true"]}, None]}
    for name, evil in (("class", ["os", "system"]), ("request", dict(asked.fields["request"]) | {"x": call})):
        first.turns = [attrs.evolve(asked, fields=dict(asked.fields) | {name: evil}), replied]
        with pytest.raises(BadPickle, match="nothing to be written"):
            write([first], tmp_path / "x.pkl")
        assert not (tmp_path / "x.pkl").exists()


def test_pickles_that_grow_without_end_are_refused(tmp_path: Path) -> None:
    laughs = b"\x80\x04]\x94" + b"".join(b"](" + b"h" + bytes([n]) * 1 + (b"h" + bytes([n])) * 9 + b"e\x94" for n in range(40))
    path = tmp_path / "x.pkl"
    path.write_bytes(b"\x80\x04}X\x01\x00\x00\x00xX\x01\x00\x00\x00ys0" + laughs[2:] + b".")
    with pytest.raises(InterchangeError):
        read(path)
    nested: Any = "x"
    for _ in range(30):
        nested = [nested] * 10  # one list, ten times, thirty levels down
    path.write_bytes(pickle.dumps({"requests": [], "server_args": nested}))
    assert read(path)[0] == []  # nobody asked for it
    entry = pickle.dumps(nested, 4)
    head = b"\x80\x04}X\x08\x00\x00\x00requests](csglang.srt.managers.io_struct\nGenerateReqInput\n)\x81}b}X\x01\x00\x00\x00a"
    path.write_bytes(head + entry[2:-1] + b"sG?\xf0\x00\x00\x00\x00\x00\x00G?\xf0\x00\x00\x00\x00\x00\x00tas.")
    with pytest.raises(InterchangeError, match="more than a turn can carry"):
        read(path)
    with pytest.raises(SessionTreeError):
        to_plain(nested, Room(1000))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        b"\x80\x04.",
        b"\x80\x04N.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",  # so many bytes are to come
        b"\x80\x04e.",
        b"\x80\x04K\x01K\x02e.",
        b"\x80\x04](K\x01",
        b"\x80\x04}(K\x01u.",
        b"\x80\x04}(]K\x01u.",
        b"\x80\x04h\x05.",
        b"\x80\x04\x8c\x02\xff\xfe.",
        b"\x80\x04" + b"]\x94" * 5 + b"h\x00h\x00a.",
        b"\x80\x04" + b"(" * 100_000 + b"t" * 100_000 + b".",
        b"\x80\x04}X\x08\x00\x00\x00requests](K\x01K\x02ees.",
        struct.pack("<IQ", 7, 7) * 9,
    ],
)  # fmt: skip
def test_broken_pickles_are_named(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.pkl").write_bytes(data)
    with pytest.raises(InterchangeError):
        read(tmp_path / "x.pkl")
    read(tmp_path / "x.pkl", salvage=True)


def test_a_state_is_of_an_instance_alone() -> None:
    with pytest.raises(BadPickle, match="a state for what is no instance"):
        value(b"\x80\x04\x8f(K\x01K\x02K\x03\x90}b.")


def test_requests_of_one_rid_are_called_by_their_place() -> None:
    assert [each.id for each in read(GOLDEN / "crash.pkl")[0]] == ["text", "crash-2", "cut", "crash-4"]


def test_lengths_that_make_python_take_any_memory_take_none(tmp_path: Path) -> None:
    for data in (b"\x80\x04]r\xff\xff\xff\xff.", b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f]."):
        (tmp_path / "x.pkl").write_bytes(data)  # a memo of 64 GiB; a frame of all memory
        assert read(tmp_path / "x.pkl")[0] == []


@pytest.mark.parametrize("name", ["dump.pkl", "crash.pkl", "requests.log"])
def test_a_store_gives_a_dump_back(name: str, tmp_path: Path) -> None:
    store = SessionStore.in_memory()
    for _ in range(2):  # a second time changes nothing
        report = import_file(store, GOLDEN / name, "sglang")
        assert not report.lost
    assert report.new_nodes == 0
    assert not export_file(store, tmp_path / "again.pkl", "sglang").lost
    if name != "requests.log":
        assert value((tmp_path / "again.pkl").read_bytes()) == value((GOLDEN / name).read_bytes())
    export_file(store, tmp_path / "x.jsonl", "openai")
    assert "Where is Łódź?" in (tmp_path / "x.jsonl").read_text()


@given(st.data())
def test_a_dump_with_bytes_changed_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    whole = bytearray((GOLDEN / "crash.pkl").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("sglang") / "x.pkl"
    path.write_bytes(whole[: data.draw(st.integers(len(whole) // 2, len(whole)))])
    try:
        conversations, _ = read(path)
        write(conversations, path.with_name("y.pkl"))
    except SessionTreeError:
        read(path, salvage=True)


@pytest.mark.parametrize(
    "entry",
    [1, (1, {}, 1.0, 2.0), request({}, created="x"), request(3), request({})[:3], (Foreign("set", []), {}, 1.0, 2.0)],  # type: ignore[arg-type]
)
def test_an_entry_of_another_kind_is_named_and_left_out_of_what_is_salvaged(entry: Any, tmp_path: Path) -> None:
    path = pickled([request({"text": "a"}, text="q"), entry], tmp_path / "x.pkl")
    with pytest.raises(InterchangeError, match=r"requests\[1\]"):
        read(path)
    found, losses = read(path, salvage=True)
    assert len(found) == 1 and losses.faults[0].first == "requests[1]"


def test_a_session_of_thousands_is_read_and_written(tmp_path: Path) -> None:
    entries = [
        request({"text": "a"}, rid=str(n), text="q", session_params={"id": "s", "rid": str(n - 1) if n else None})
        for n in range(5000)
    ]
    (chat,), _ = read(pickled(entries, tmp_path / "x.pkl"))
    assert len(list(chat.turns)) == 10_000 and turns(chat)["4999"].parent == "4998/reply"
    write([chat], tmp_path / "y.pkl")
    assert (tmp_path / "y.pkl").stat().st_size == pytest.approx((tmp_path / "x.pkl").stat().st_size, abs=100)
